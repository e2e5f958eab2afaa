//! `mlx-bun perplexity` on the tiny checkpoints, against mlx_lm.perplexity's own functions.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::mlx_bun;

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).to_str().unwrap().to_owned()
}

fn perplexity(model: &str, data: &str, arguments: &[&str]) -> Command {
    let model = fixture(&format!("checkpoints/{model}"));
    let mut command = mlx_bun(&["--no-progress", "-q", "perplexity", "--l1"]);
    command.args(["--model", &model, "--data-path", data]).args(arguments);
    command
}

fn outcome(command: &mut Command, status: i32) -> (String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert_eq!(output.status.code(), Some(status), "{err}");
    (out, err)
}

#[test]
fn the_result_is_mlx_lms_to_the_last_digit() {
    let expected: Vec<Value> =
        serde_json::from_slice(&fs::read(fixture("perplexity.json")).unwrap()).unwrap();
    for case in &expected {
        let text = |name: &str| case[name].as_str().unwrap().to_owned();
        let arguments = [
            "--sequence-length",
            &case["sequence_length"].to_string(),
            "--num-samples",
            &case["num_samples"].to_string(),
        ]
        .map(str::to_owned);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (out, _) = outcome(&mut perplexity(&text("model"), &fixture("perplexity.jsonl"), &arguments), 0);
        assert_eq!(out, format!("Perplexity: {}\n", text("perplexity")), "{case}");
    }
}

#[test]
fn a_model_does_not_stray_from_itself_and_a_packed_one_does() {
    let data = fixture("perplexity.jsonl");
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("out.csv");
    let measure = |model: &str| {
        let baseline = fixture("checkpoints/llama-bf16");
        let arguments = [
            "--baseline",
            &baseline,
            "--json",
            "--num-samples",
            "-1",
            "--sequence-length",
            "32",
            "--csv",
            csv.to_str().unwrap(),
        ];
        let (out, _) = outcome(&mut perplexity(model, &data, &arguments), 0);
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let same = measure("llama-bf16");
    assert_eq!(same["top1_agreement"]["mean"], 1.0);
    assert!(same["kl"]["mean"].as_f64().unwrap().abs() < 1e-6);
    let packed = measure("llama-4bit");
    assert!(packed["kl"]["mean"].as_f64().unwrap() > 1e-3, "{packed}");
    assert!(packed["top1_agreement"]["mean"].as_f64().unwrap() < 1.0);
    assert!(packed["kl"]["standard_error"].as_f64().unwrap() > 0.0);
    let lines = fs::read_to_string(&csv).unwrap();
    assert!(lines.starts_with("sequence,tokens,loss,perplexity,kl,top1_agreement\n0,31,"), "{lines}");
    assert_eq!(lines.lines().count() as u64, 1 + packed["sequences"].as_u64().unwrap());
}

#[test]
fn short_texts_and_data_sets_of_the_hub_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.txt");
    fs::write(&short, "a b c").unwrap();
    let (_, err) = outcome(&mut perplexity("llama-f32", short.to_str().unwrap(), &[]), 1);
    assert!(err.contains("tokens, a sequence takes 512; use a smaller --sequence-length"), "{err}");
    let (_, err) = outcome(&mut perplexity("llama-f32", "allenai/tulu-3-sft-mixture", &[]), 1);
    assert!(
        err.contains("data sets of the hub are not read") && err.contains("hint: give a .jsonl"),
        "{err}"
    );
    let (out, err) =
        outcome(&mut perplexity("llama-f32", short.to_str().unwrap(), &["--sequence-length", "2"]), 0);
    assert!(
        out.starts_with("Perplexity: ") && err.starts_with("warning: the rows give 2 sequences, not 256\n"),
        "{err}"
    );
}
