//! Training against mlx_lm.lora; scripts/oracle/train.py writes the rows and the expectations.

#![allow(clippy::unwrap_used)]

#[path = "support/train.rs"]
mod support;

use std::collections::BTreeMap;

use mlx_bun::mlx::Array;
use mlx_bun::train::dataset::Learn;
use mlx_bun::train::optimizers::{Adafactor, Adam, AdamW, Kind, Muon, Schedule, Sgd};
use mlx_bun::train::parameters::Tuning;
use mlx_bun::train::report::Outcome;
use serde_json::Value;
use sha2::{Digest, Sha256};
use support::{Run, choose_kernels, fixtures};

fn cases() -> BTreeMap<String, Value> {
    serde_json::from_slice(&std::fs::read(fixtures().join("train/expected.json")).unwrap()).unwrap()
}

/// Single-precision numbers in the notation of double ones.
fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| f64::from(number.as_f64().unwrap() as f32)).collect()
}

fn run_of(options: &Value) -> Run {
    let mut run = Run::default();
    let text = |name: &str| options.get(name).and_then(Value::as_str);
    let number = |name: &str| options.get(name).and_then(Value::as_u64);
    run.checkpoint = text("checkpoint").unwrap().to_owned();
    run.data = fixtures().join("train").join(text("data").unwrap());
    if options["mask_prompt"] == true {
        run.learn = Learn::Completion;
    }
    run.tuning = match text("fine_tune_type") {
        Some("dora") => Tuning::Dora,
        Some("full") => Tuning::Full,
        _ => Tuning::Lora,
    };
    run.num_layers = options["num_layers"].as_i64().unwrap();
    run.options.batch.size = number("batch_size").unwrap() as usize;
    run.options.batch.max_length = number("max_seq_length").unwrap() as usize;
    run.options.accumulation = number("grad_accumulation_steps").unwrap_or(1);
    if let Some(parameters) = options.get("lora_parameters") {
        run.adapter.rank = parameters["rank"].as_u64().unwrap() as u32;
        run.adapter.scale = parameters["scale"].as_f64().unwrap();
        run.adapter.dropout = parameters["dropout"].as_f64().unwrap();
        run.adapter.keys = parameters.get("keys").map(|keys| serde_json::from_value(keys.clone()).unwrap());
    }
    run.optimizer = match text("optimizer") {
        Some("adamw") => {
            let adam = Adam { bias_correction: true, ..Adam::default() };
            Kind::AdamW(AdamW { adam, weight_decay: 0.1 })
        }
        Some("muon") => Kind::Muon(Muon::default()),
        Some("sgd") => Kind::Sgd(Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..Sgd::default() }),
        Some("adafactor") => Kind::Adafactor(Adafactor::default()),
        _ => Kind::Adam(Adam::default()),
    };
    if let Some(schedule) = options.get("lr_schedule") {
        let arguments: Vec<f64> = serde_json::from_value(schedule["arguments"].clone()).unwrap();
        run.schedule = Schedule::from_arguments("cosine_decay", &arguments, 4, 1e-5).unwrap();
    }
    run
}

fn short_hash(array: &Array) -> String {
    let digest = Sha256::digest(array.to_bytes().unwrap());
    digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

/// The largest relative distance.
fn apart(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max)
}

/// With MLX's kernels, losses of training and validation and all trained numbers are those of mlx_lm.lora, bit for bit.
#[test]
fn with_mlxs_kernels_runs_are_mlx_lms_bit_for_bit() {
    choose_kernels(false);
    let mut wrong = Vec::new();
    for (name, case) in cases() {
        let run = run_of(&case["options"]);
        let folder = tempfile::tempdir().unwrap();
        let (trainer, said, outcome) = run.run(folder.path());
        assert_eq!(outcome, Outcome::Finished, "{name}");
        let plain = &case["plain"];
        let (train, valid) = (numbers(&plain["train"]), numbers(&plain["valid"]));
        let arrays = plain["arrays"].as_object().unwrap();
        let names: Vec<&str> = trainer.named_values().map(|(name, _)| name).collect();
        assert_eq!(names.len(), arrays.len(), "{name}: {names:?}");
        let same = trainer
            .named_values()
            .filter(|(array, value)| arrays[*array][0].as_str() == Some(&short_hash(value)))
            .count();
        if said.losses() != train || said.valid != valid || same != arrays.len() {
            wrong.push(format!(
                "{name}: losses are {:.1e} apart, validation {:.1e}, {same} of {} arrays are equal",
                apart(&said.losses(), &train),
                apart(&said.valid, &valid),
                arrays.len()
            ));
        }
        if let Some(rates) = plain.get("rates") {
            let found: Vec<f64> = said.train.iter().map(|report| f64::from(report.learning_rate)).collect();
            if found != numbers(rates) {
                wrong.push(format!("{name}: rates {found:?}, {rates}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// mlx_lm.lora compiles its step, which rounds otherwise; our kernels sum in another order.
#[test]
fn losses_are_those_of_the_compiled_step_and_of_our_kernels_to_rounding() {
    let mut wrong = Vec::new();
    for ours in [false, true] {
        choose_kernels(ours);
        for (name, case) in cases().into_iter().filter(|(_, case)| ours || case.get("compiled").is_some()) {
            let folder = tempfile::tempdir().unwrap();
            let found = run_of(&case["options"]).run(folder.path()).1.losses();
            // Half-precision activations (of the packed model, too) round at every layer.
            let half = name.contains("bf16") || name == "lora-packed";
            let mut check = |expected: &Value, bound: f64| {
                let apart = apart(&found, &numbers(expected));
                if apart > bound {
                    wrong.push(format!("{name}, ours {ours}: {apart:.1e}"));
                }
            };
            if let Some(compiled) = case.get("compiled").filter(|_| !ours) {
                check(compiled, 1e-6);
            }
            if ours {
                check(&case["plain"]["train"], if half { 2e-2 } else { 2e-6 });
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
