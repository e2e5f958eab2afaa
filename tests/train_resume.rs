//! Runs that are stopped and go on.

#![allow(clippy::unwrap_used)]

#[path = "support/train.rs"]
mod support;

use std::fs;
use std::path::Path;

use mlx_bun::train::checkpoint::STATE_NAME;
use mlx_bun::train::dataset::Learn;
use mlx_bun::train::optimizers::{Adafactor, AdamW, Kind, Schedule};
use mlx_bun::train::output::{ADAPTER_NAME, Output};
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
    let other = Run { learn: Learn::Completion, ..run.clone() };
    assert!(error(&other).contains("the rows to learn from are not those"), "{}", error(&other));
    let mut other = run.clone();
    other.options.batch.size = 3;
    assert!(error(&other).contains("batches an epoch"));
    fs::write(folder.path().join(STATE_NAME), b"short").unwrap();
    assert!(error(&run).contains(STATE_NAME));
}

/// A step whose loss is no number is not taken, what led to it is not saved, and what was saved before stays.
#[test]
fn a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    // Small in steps 1 to 3, and beyond all measure in step 4.
    let schedule = Schedule::from_arguments("step_decay", &[1e-5, 1e36, 3.0], 0, 0.0).unwrap();
    let mut run = Run { schedule, ..Run::default() };
    run.options.save_every = 1;
    let (trainer, said, outcome) = run.run(folder.path());
    assert_eq!(outcome, Outcome::NotFinite { iteration: 5 });
    assert!(said.losses().iter().all(|loss| loss.is_finite()));
    assert_eq!((trainer.iteration(), trainer.saved()), (4, Some(3)));
    let copy = |iteration: u64| folder.path().join(format!("{iteration:07}_{ADAPTER_NAME}"));
    assert!(copy(3).is_file() && !copy(4).exists());
    assert!(bytes(folder.path(), ADAPTER_NAME) == fs::read(copy(3)).unwrap());
    let mut resumed = run.trainer();
    resumed.resume(folder.path()).unwrap();
    assert_eq!(resumed.iteration(), 3);

    // No step comes after the last, and its result is not saved either.
    let last = tempfile::tempdir().unwrap();
    run.options.iterations = 4;
    let (trainer, _, outcome) = run.run(last.path());
    assert_eq!((outcome, trainer.saved()), (Outcome::NotFinite { iteration: 5 }, Some(3)));
}

/// A run that begins leaves what is in its folder until it is saved, and then only its own files are there.
#[test]
fn an_earlier_run_stays_until_the_next_is_saved() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::default();
    (run.options.iterations, run.options.save_every) = (4, 1);
    run.run(folder.path());
    let names = || {
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let all = |names: Vec<String>| -> Vec<Vec<u8>> {
        names.iter().map(|name| bytes(folder.path(), name)).collect()
    };
    let (before, held) = (names(), all(names()));
    assert_eq!(before.len(), 7, "{before:?}");
    // The next one comes to nothing.
    let mut lost = Run { schedule: Schedule::constant(1e30), ..run.clone() };
    lost.options.iterations = 9;
    assert_eq!(lost.run(folder.path()).2, Outcome::NotFinite { iteration: 2 });
    assert!(names() == before && all(names()) == held);
    // A killed writer's file goes, and the files of another run's steps.
    fs::write(folder.path().join(".training_state.safetensors.77-0.tmp"), b"x").unwrap();
    run.options.iterations = 2;
    run.run(folder.path());
    let expected = ["0000001", "0000002"].map(|number| format!("{number}_{ADAPTER_NAME}"));
    assert_eq!(names()[..2], expected);
    assert_eq!(names().len(), 5, "{:?}", names());
}

/// A run that was killed between its state and its adapter has nothing left to train, but something to write.
#[test]
fn a_run_that_was_killed_while_it_was_saved_for_the_last_time_is_completed() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::default();
    (run.options.iterations, run.options.save_every) = (2, 1);
    run.run(folder.path());
    let (adapter, copy) =
        (folder.path().join(ADAPTER_NAME), folder.path().join(format!("0000001_{ADAPTER_NAME}")));
    let last = fs::read(&adapter).unwrap();
    let nothing = serde_json::Map::new();
    let complete = || {
        let mut trainer = run.trainer();
        trainer.resume(folder.path()).unwrap();
        trainer.complete_save(&Output::create(folder.path(), &nothing, &nothing).unwrap()).unwrap()
    };
    assert!(!complete());
    fs::copy(copy, &adapter).unwrap();
    assert!(complete() && fs::read(&adapter).unwrap() == last);
    fs::remove_file(&adapter).unwrap();
    assert!(complete() && fs::read(&adapter).unwrap() == last);
}

/// Two runs in one folder would mix their files.
#[test]
fn a_folder_takes_one_run_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let nothing = serde_json::Map::new();
    let create = || Output::create(folder.path(), &nothing, &nothing);
    let first = create().unwrap();
    let error = create().unwrap_err().to_string();
    assert!(error.starts_with("another run writes into "), "{error}");
    drop(first);
    create().unwrap();
}

/// Weights never lie beside a config of other weights.
#[test]
fn the_config_changes_while_no_weights_are_there() {
    choose_kernels(false);
    let folder = tempfile::tempdir().unwrap();
    let config = |rank: u32| {
        let config = serde_json::json!({"fine_tune_type": "lora", "lora_parameters": {"rank": rank}});
        config.as_object().unwrap().clone()
    };
    let nothing = serde_json::Map::new();
    let run = |rank: u32| {
        let mut run = Run::default();
        (run.adapter.rank, run.options.iterations) = (rank, 1);
        let output = Output::create(folder.path(), &config(rank), &nothing).unwrap();
        run.trainer().run(&output, &mut |_| std::ops::ControlFlow::Continue(()))
    };
    run(2).unwrap();
    // The config cannot be written: the old weights are gone by then, and the new ones are not there yet.
    let file = folder.path().join("adapter_config.json");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    fs::write(file.join("x"), b"").unwrap();
    assert!(run(4).is_err());
    assert!(!folder.path().join(ADAPTER_NAME).exists());
    fs::remove_dir_all(&file).unwrap();
    run(4).unwrap();
    assert!(folder.path().join(ADAPTER_NAME).is_file() && file.is_file());
    assert!(!folder.path().join("next_adapters.safetensors").exists());
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
