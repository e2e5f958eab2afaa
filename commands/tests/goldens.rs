//! The engine against mlx-lm, bit for bit, on every tiny checkpoint.
//!
//! Recorded for this machine class; elsewhere `mlx-bun goldens regen` records first.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use assert_cmd::Command;
use predicates::str::contains;

fn goldens(arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx-bun"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).arg("goldens").args(arguments).assert()
}

fn family_is_bit_exact(family: &str) {
    goldens(&["check", "--family", family]).success();
}

#[test]
fn llama_is_bit_exact() {
    family_is_bit_exact("llama");
}

#[test]
fn qwen2_is_bit_exact() {
    family_is_bit_exact("qwen2");
}

#[test]
fn qwen3_is_bit_exact() {
    family_is_bit_exact("qwen3");
}

#[test]
fn gemma3_text_is_bit_exact() {
    family_is_bit_exact("gemma3_text");
}

#[test]
fn list_names_checkpoints_and_modes() {
    let modes = contains("cells: prefill, greedy, sampling, processors, chunked, kv-quant");
    goldens(&["list"]).success().stdout(contains("llama-bf16 ")).stdout(modes);
}

#[test]
fn a_family_without_goldens_is_an_error() {
    let expected = "nothing recorded for `no-such-family`";
    goldens(&["check", "--family", "no-such-family"]).failure().stderr(contains(expected));
}
