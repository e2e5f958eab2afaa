//! `mlx-bun train`: fine-tunes a model.

mod args;
mod config_file;
mod dry_run;
mod layers;
pub mod metrics;
mod optimization;
mod plot;
mod prepare;
mod recorded;
mod settings;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use args::TrainAction;
pub use args::TrainArgs;
pub use dry_run::shown_time;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::memory;
use mlx_bun::mlx::random::RandomState as Keys;
use mlx_bun::train::output::{ADAPTER_NAME, Output, export_peft};
use mlx_bun::train::report::{Event, Outcome, TrainReport, ValidationReport};
use mlx_bun::train::trainer::Trainer;
use serde_json::json;

use self::metrics::Metrics;
use self::prepare::{Base, Data};
use self::settings::{Settings, config_record};
use crate::allocator;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::interrupt::Interrupt;
use crate::load::choose_numerics;
use crate::printer::{Printer, Progress};

/// Runs the verb.
///
/// # Errors
/// Settings, a model or rows that cannot be used, or a file that cannot be written.
pub fn run(args: &TrainArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    if let Some(TrainAction::Plot(args)) = &args.action {
        return plot::run(args, printer);
    }
    allocator::keep_little();
    let interrupt = Interrupt::install(printer)?;
    let mut warnings = Vec::new();
    let mut settings = Settings::resolve(args, &mut warnings)?;
    let numerics = args.numerics.resolve(&mut warnings);
    warnings.iter().for_each(|warning| printer.warning(warning));
    if settings.train {
        prepare::check_folders(&settings)?;
    }
    choose_numerics(numerics, printer)?;
    // What is only measured may have an adapter already.
    let adapted = !settings.train && !settings.adapter_path.as_os_str().is_empty();
    let adapter = adapted.then(|| Adapter::open(&settings.adapter_path)).transpose()?;
    let (base, words) = prepare::load(&settings, adapter, printer)?;
    settings.record.insert("model".to_owned(), json!(base.path));
    let mut data = prepare::data(&settings, &base, &words, printer)?;
    drop(words);
    prepare::check_batches(&settings, &data)?;
    interrupt.begin();
    if args.dry_run {
        dry_run::run(&settings, &base, &data, printer)?;
        return Ok(ExitStatus::Success);
    }
    if !settings.train {
        return test_adapter(&settings, &base, data, &interrupt, printer);
    }
    let (network, values, keys, num_layers) = prepare::network(&settings, &base, printer)?;
    let trained: usize = values.iter().map(mlx_bun::mlx::Array::size).sum();
    let ranks: BTreeMap<String, i32> =
        network.parameters().ranks().map(|(path, rank)| (path.to_owned(), rank)).collect();
    let config = config_record(&settings, num_layers, network.parameters().shape(), &ranks);
    let mut trainer = prepare::trainer(&settings, network, values, keys, &mut data)?;
    let (taken, all) = (trainer.iteration(), settings.options.iterations);
    let mut lasting = settings.record.clone();
    // Wherever the folder will be then.
    lasting.remove("adapter_path");
    let output = Output::create(&settings.adapter_path, &config, &lasting)?;
    let outcome = if taken >= all {
        printer.note(&format!("Nothing is left to train: {taken} steps are taken, and --iters is {all}"));
        if trainer.complete_save(&output)? {
            printer.note(&format!("Saved: {}", output.adapter_file().display()));
        }
        Outcome::Finished
    } else {
        if settings.resume.is_none() && output.adapter_file().is_file() {
            let folder = settings.adapter_path.display();
            printer.warning(&format!("the adapter in `{folder}` is replaced when this run is saved"));
        }
        printer.note(&format!(
            "Training {trained} numbers of {} ({}{})",
            base.path,
            settings.tuning.name(),
            dry_run::shown_ranks(trainer.parameters())
        ));
        interrupt.wait_for_work();
        train(&settings, &base, &mut trainer, &output, &interrupt, printer)?
    };
    if let Outcome::NotFinite { iteration } = outcome {
        let folder = settings.adapter_path.display();
        let kept = match trainer.saved() {
            Some(step) => format!("; the state after step {step} is in `{folder}`"),
            None if settings.adapter_path.join(ADAPTER_NAME).is_file() => {
                format!("; nothing of this run is saved, and what was in `{folder}` before is as it was")
            }
            None => "; nothing was saved".to_owned(),
        };
        return Err(not_finite(iteration.saturating_sub(1), &kept).into());
    }
    if let (Some(folder), Some(_)) = (&settings.export_peft, trainer.saved()) {
        let values: Vec<_> = trainer.named_values().map(|(_, value)| value.clone()).collect();
        export_peft(folder, trainer.parameters(), &values, &base.path)?;
    }
    if outcome == Outcome::Interrupted {
        printer.hint(&match trainer.saved() {
            Some(_) => format!("go on with `mlx-bun train --resume {}`", settings.adapter_path.display()),
            None => "nothing was saved: no step was taken yet".to_owned(),
        });
        return Ok(ExitStatus::Interrupted);
    }
    printer.hint(&format!(
        "use it with `--adapter-path {0}`, or make it part of the model with `mlx-bun fuse --adapter-path {0}`",
        settings.adapter_path.display()
    ));
    if settings.test {
        return test(&settings, &mut trainer, data, &interrupt, printer);
    }
    Ok(ExitStatus::Success)
}

/// The loss or the gradient after `steps` steps is no number; `kept` says what is saved.
fn not_finite(steps: u64, kept: &str) -> Complaint {
    let hint = "lower --learning-rate, or limit gradients with --grad-clip 1";
    match steps {
        0 => Complaint::failure(format!("the loss or the gradient of the first step is no number{kept}"))
            .hint("the model's weights may be damaged, or too large for their type"),
        steps => {
            Complaint::failure(format!("after {steps} steps the loss or the gradient is no number{kept}"))
                .hint(hint)
        }
    }
}

fn train(
    settings: &Settings,
    base: &Base,
    trainer: &mut Trainer,
    output: &Output,
    interrupt: &Interrupt,
    printer: &Printer,
) -> anyhow::Result<Outcome> {
    let iterations = settings.options.iterations;
    let meta = json!({
        "type": "meta",
        "method": settings.objective.name(),
        "model": base.path,
        "iters": iterations,
        "learning_rate": settings.record.get("learning_rate"),
        "max_seq_length": settings.options.batch.max_length,
        "batch_size": settings.options.batch.size,
        "rank": settings.adapter.rank,
        "scale": settings.adapter.scale,
        "adapter_path": settings.adapter_path,
    });
    let mut metrics = Metrics::open(output.folder(), trainer.resumed(), iterations, meta);
    let before = trainer.saved();
    let (mut stdout, silent) = (printer.stdout(), printer.is_silent());
    let mut failed: Option<std::io::Error> = None;
    let started = Instant::now();
    let bar = printer.progress("Training", iterations);
    bar.set(trainer.iteration());
    let mut measuring: Option<Progress> = None;
    let outcome = trainer.run(output, &mut |event| {
        let said = match event {
            Event::Step { iteration } => {
                bar.set(iteration);
                Ok(())
            }
            Event::Measured { done, total } => {
                let bar = measuring.get_or_insert_with(|| printer.progress("Validating", total as u64));
                bar.set(done as u64);
                Ok(())
            }
            Event::Validation(report) => {
                measuring = None;
                metrics.valid(&report);
                if silent { Ok(()) } else { say_validation(&mut stdout, &report) }
            }
            Event::Train(report) => {
                metrics.train(&report);
                if silent { Ok(()) } else { say_train(&mut stdout, &report) }
            }
            Event::Saved { iteration, path } => {
                metrics.saved();
                printer.detail(&format!("saved after step {iteration}: {}", path.display()));
                Ok(())
            }
        };
        // A reader that went away does not end a run; another failure to write does.
        if let Err(error) = said.and_then(|()| stdout.flush())
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            failed.get_or_insert(error);
        }
        if interrupt.is_set() || failed.is_some() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    drop(bar);
    let ended = match outcome {
        Outcome::Finished => "finished",
        Outcome::Interrupted => "interrupted",
        Outcome::NotFinite { .. } => "not finite",
    };
    metrics.end(trainer.iteration(), ended);
    if let Some(error) = failed {
        return Err(error.into());
    }
    printer.note(&format!("Training time: {}", dry_run::shown_time(started.elapsed().as_secs_f64())));
    printer.note(&format!("Peak memory: {:.2} GB", memory::peak()? as f64 / 1e9));
    if trainer.saved() != before {
        printer.note(&format!("Saved: {}", output.adapter_file().display()));
    }
    Ok(outcome)
}

fn figures(figures: &[(&'static str, f64)]) -> String {
    figures.iter().map(|(name, value)| format!(", {name} {value:.3}")).collect()
}

fn say_train(out: &mut impl Write, report: &TrainReport) -> std::io::Result<()> {
    writeln!(
        out,
        "Iter {}: train loss {:.3}{}, learning rate {:.3e}, {:.3} it/s, {:.1} tokens/s, {} tokens, peak memory {:.3} GB",
        report.iteration,
        report.loss,
        figures(&report.figures),
        report.learning_rate,
        report.iterations_per_second,
        report.tokens_per_second,
        report.trained_tokens,
        report.peak_memory_gb
    )
}

fn say_validation(out: &mut impl Write, report: &ValidationReport) -> std::io::Result<()> {
    writeln!(
        out,
        "Iter {}: val loss {:.3}{}, took {:.2} s",
        report.iteration + 1,
        report.loss,
        figures(&report.figures),
        report.seconds
    )
}

/// `--test` alone: the adapter of `--adapter-path`, or the model itself when that is empty.
fn test_adapter(
    settings: &Settings,
    base: &Base,
    mut data: Data,
    interrupt: &Interrupt,
    printer: &Printer,
) -> anyhow::Result<ExitStatus> {
    data.train.examples = data.test.examples.clone();
    data.valid.examples.clear();
    if settings.objective.needs_reference() {
        return Err(Complaint::usage(format!(
            "`--test` alone cannot compare with the untrained model, which {} does; train and test in one run",
            settings.objective.name()
        ))
        .into());
    }
    let settings = Settings { resume: None, ..settings.clone() };
    let (network, keys) = (prepare::untrained(&settings, base)?, Keys::from_seed(0)?);
    let mut trainer = prepare::trainer(&settings, network, Vec::new(), keys, &mut data)?;
    test(&settings, &mut trainer, data, interrupt, printer)
}

fn test(
    settings: &Settings,
    trainer: &mut Trainer,
    data: Data,
    interrupt: &Interrupt,
    printer: &Printer,
) -> anyhow::Result<ExitStatus> {
    let mut bar: Option<Progress> = None;
    let report = trainer.measure("test", data.test.examples, settings.test_batches, &mut |event| {
        if let Event::Measured { done, total } = event {
            bar.get_or_insert_with(|| printer.progress("Testing", total as u64)).set(done as u64);
        }
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    drop(bar);
    let Some(report) = report else { return Ok(ExitStatus::Interrupted) };
    let mut out = printer.stdout();
    write!(out, "Test loss {:.3}{}", report.loss, figures(&report.figures))?;
    match settings.objective.takes_pairs() {
        true => writeln!(out)?,
        false => writeln!(out, ", test ppl {:.3}", report.loss.exp())?,
    }
    out.flush()?;
    Ok(ExitStatus::Success)
}
