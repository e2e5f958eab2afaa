//! Runs that are stopped and go on.

#![allow(clippy::unwrap_used)]

#[path = "support/train.rs"]
mod support;

use std::fs;
use std::path::Path;

use mlx_bun::train::checkpoint::STATE_NAME;
use mlx_bun::train::optimizers::{Adafactor, AdamW, Kind, Schedule};
use mlx_bun::train::output::ADAPTER_NAME;
use mlx_bun::train::report::Outcome;
use support::{Run, choose_kernels, fixtures, go_on};

fn bytes(folder: &Path, name: &str) -> Vec<u8> {
    fs::read(folder.join(name)).unwrap()
}

/// Weights, optimizer, schedule, place in the data, random numbers, sums of unfinished updates and reports: all go on
/// where they were (mlx_lm.lora restores weights only).
#[test]
fn a_run_that_was_stopped_ends_as_an_unbroken_one_bit_for_bit() {
    choose_kernels(true);
    let mut with_dropout = Run { optimizer: Kind::AdamW(AdamW::default()), ..Run::default() };
    with_dropout.adapter.dropout = 0.2;
    with_dropout.options.accumulation = 3;
    with_dropout.options.steps_per_report = 4;
    with_dropout.options.clip = Some(0.5);
    with_dropout.schedule = Schedule::from_arguments("cosine_decay", &[1e-3, 20.0], 3, 0.0).unwrap();
    let adafactor = Run { optimizer: Kind::Adafactor(Adafactor::default()), ..Run::default() };
    for run in [with_dropout, adafactor] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (_, unbroken, _) = run.run(whole.path());
        let mut said = Vec::new();
        for stop in [Some(5), Some(13), None] {
            let mut trainer = run.trainer();
            if stop != Some(5) {
                trainer.resume(parts.path()).unwrap();
            }
            let (part, outcome) = go_on(&mut trainer, parts.path(), stop);
            assert_eq!(outcome, if stop.is_some() { Outcome::Interrupted } else { Outcome::Finished });
            said.extend(part.losses());
        }
        assert_eq!(said, unbroken.losses());
        for name in [ADAPTER_NAME, STATE_NAME] {
            assert!(bytes(whole.path(), name) == bytes(parts.path(), name), "{name}");
        }
    }
}

#[test]
fn another_runs_state_is_refused() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    let run = Run::default();
    let error = |run: &Run| run.trainer().resume(folder.path()).unwrap_err().to_string();
    assert!(error(&run).contains("no run to go on with"));
    let mut short = run.clone();
    short.options.iterations = 2;
    short.run(folder.path());
    run.trainer().resume(folder.path()).unwrap();
    let mut other = run.clone();
    other.adapter.rank = 4;
    assert!(error(&other).contains("has shape [64, 8], and [64, 4] is needed"), "{}", error(&other));
    let other = Run { num_layers: 1, ..run.clone() };
    assert!(error(&other).contains("is not trained now"));
    let other = Run { optimizer: Kind::Adafactor(Adafactor::default()), ..run.clone() };
    assert!(error(&other).contains("another optimizer"));
    let mut other = run.clone();
    other.options.batch.size = 3;
    assert!(error(&other).contains("batches an epoch"));
    fs::write(folder.path().join(STATE_NAME), b"short").unwrap();
    assert!(error(&run).contains(STATE_NAME));
}

/// A step whose loss is no number is not taken, and what was saved before stays.
#[test]
fn a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run { schedule: Schedule::constant(1e30), ..Run::default() };
    run.options.save_every = 1;
    let (trainer, said, outcome) = run.run(folder.path());
    let Outcome::NotFinite { iteration } = outcome else { panic!("{outcome:?}") };
    assert!(iteration >= 2 && said.losses().iter().all(|loss| loss.is_finite()));
    assert_eq!(trainer.iteration(), iteration - 1);
    assert!(folder.path().join(ADAPTER_NAME).is_file());
    assert!(!folder.path().join(format!("{iteration:07}_{ADAPTER_NAME}")).exists());
}

/// Validation rows are optional, and too few are told apart from too few to learn from.
#[test]
fn too_few_rows_are_told_with_their_name() {
    choose_kernels(false);
    let mut run = Run { data: fixtures().join("train/pairs/train.jsonl"), ..Run::default() };
    run.options.iterations = 1;
    let folder = tempfile::tempdir().unwrap();
    assert!(run.run(folder.path()).1.valid.is_empty());
    let loaded = run.load();
    let [train, _] = run.examples(&loaded);
    let mut trainer = run.trainer();
    let error =
        trainer.measure("valid", train[..1].to_vec(), None, &mut |_| std::ops::ControlFlow::Continue(()));
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "valid rows: 1 examples are fewer than a batch of 2 takes; use a smaller --batch-size");
}
