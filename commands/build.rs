//! Tells the program which commit it is built of. Measurements are kept under it.

use std::env;
use std::path::Path;
use std::process::Command;

/// What the program is made of, from this folder.
const SOURCES: [&str; 7] =
    ["../src", "../native", "../build.rs", "../Cargo.toml", "../Cargo.lock", "src", "Cargo.toml"];

fn main() {
    println!("cargo:rerun-if-env-changed=MLX_BUN_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    SOURCES.iter().for_each(|source| println!("cargo:rerun-if-changed={source}"));
    // A debug build keeps the commit it began from, so that committing costs no rebuild.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        // Moves with every commit and checkout; a file that is not there would rebuild each time.
        let moved = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| Path::new(path).exists());
        let moved = moved.or_else(|| git(&["rev-parse", "--git-path", "HEAD"]));
        moved.iter().for_each(|path| println!("cargo:rerun-if-changed={path}"));
    }
    let given = env::var("MLX_BUN_COMMIT").ok().filter(|commit| !commit.is_empty());
    println!("cargo:rustc-env=MLX_BUN_COMMIT={}", given.or_else(commit).unwrap_or_default());
}

/// The checkout's commit, with `-dirty` behind it when the sources differ from it.
fn commit() -> Option<String> {
    let commit = git(&["rev-parse", "HEAD"])?;
    let mut status = vec!["status", "--porcelain", "--untracked-files=no", "--"];
    status.extend(SOURCES);
    let clean = git(&status)?.is_empty();
    Some(if clean { commit } else { format!("{commit}-dirty") })
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
