//! What the tests of the program share.

#![allow(dead_code)] // each test program uses its part

pub mod adapter;
pub mod processes;
pub mod server;
pub mod train;

use std::process::{Command, Stdio};

/// The program in a clean environment: no model, history or cache lies in its home.
pub fn mlx_bun(arguments: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("mlx-bun"));
    command.args(arguments).stdin(Stdio::null()).env_clear();
    // PATH: MLX looks for the C++ compiler that its compiled functions need.
    for kept in ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    // No folder can be made below a device, not even by root.
    command.env("HOME", "/dev/null/home");
    command
}

/// What a command printed and how it ended.
pub fn outcome(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    format!(
        "exit {}\n-- stdout\n{}-- stderr\n{}",
        output.status.code().map_or("by signal".to_owned(), |code| code.to_string()),
        text(&output.stdout),
        text(&output.stderr)
    )
}

/// The same for a command line.
pub fn run(arguments: &[&str]) -> String {
    outcome(&mut mlx_bun(arguments))
}

/// The first line of standard error of a command that must be refused as wrong usage.
pub fn refused(arguments: &[&str]) -> String {
    let output = mlx_bun(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    stderr.lines().next().unwrap_or_default().to_owned()
}

/// As [`refused`], for commands that make sense but cannot be done.
pub fn failed(arguments: &[&str]) -> String {
    let output = mlx_bun(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
    stderr.trim_end().to_owned()
}

/// Lets a command hear SIGHUP, which it leaves alone where whoever started the tests has it ignored (`nohup`).
pub fn hearing_hangups(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    // SAFETY: between fork and exec only a system call is made.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            Ok(())
        })
    }
}
