//! What a machine lacks, from outside: memory, or the instructions that a setting asks for.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::path::Path;
use std::process::{Command, Output};

use support::mlx_bun;

/// A model of a few layers with random weights.
fn model(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints").join(name).display().to_string()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// MLX's allocator returns null unchecked, and what was written there ended the program by a signal.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_one_line_and_exit_code_1() {
    for flags in [&["--cpu-kernels", "on"][..], &["--l1"]] {
        let mut refused = 0;
        for limit in (60_000..=400_000).step_by(20_000) {
            let mut command = Command::new("sh");
            command.args([
                "-c",
                &format!("ulimit -v {limit}; exec \"$@\""),
                "sh",
                env!("CARGO_BIN_EXE_mlx-bun"),
            ]);
            command.args(["generate", "--model", &model("llama-4bit"), "--raw", "-q", "-m", "2"]);
            let Output { status, stderr, .. } = command.args(flags).arg("Hello").output().unwrap();
            let stderr = text(&stderr);
            // The system itself may be unable to start a program.
            if status.code() == Some(127) || status.success() {
                continue;
            }
            assert_eq!(status.code(), Some(1), "{limit} {flags:?}: {stderr}");
            assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{limit}: {stderr}");
            refused += 1;
        }
        assert!(refused > 0, "{flags:?}");
    }
}

#[test]
fn a_precision_without_effect_is_pointed_out() {
    let warned = |name: &str, isa: &str| {
        let mut command = mlx_bun(&["generate", "--model", &model(name), "--raw", "-q", "-m", "1"]);
        let output = command.args(["--cpu-precision", "int8", "Hello"]).env("MLX_BUN_CPU_ISA", isa).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    assert!(warned("llama-4bit", "Plain").contains("changes nothing here: it needs avx512-vnni"));
    let dense = warned("llama-bf16", "");
    assert_eq!(dense.matches("`--cpu-precision int8` changes nothing here").count(), 1, "{dense}");
}

#[test]
fn a_wrong_instruction_set_is_wrong_everywhere() {
    let absent = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    for (isa, part) in [("foo", "use auto, plain, neon, avx2, avx512, avx512-vnni"), (absent, "has no ")] {
        let mut generate = mlx_bun(&["generate", "--model", &model("llama-f32"), "--l1", "Hello"]);
        for command in [&mut generate, &mut mlx_bun(&["ls"])] {
            let output = command.env("MLX_BUN_CPU_ISA", isa).output().unwrap();
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{stderr}");
            assert!(stderr.starts_with("error: `MLX_BUN_CPU_ISA`: ") && stderr.contains(part), "{stderr}");
        }
    }
}
