//! What the tests of the program share.

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
    command.env("HOME", "/nonexistent");
    command
}
