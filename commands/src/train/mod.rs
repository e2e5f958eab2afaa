//! `mlx-bun train`: fine-tunes a model.

mod args;
mod dry_run;
mod layers;
pub mod metrics;
mod plot;
mod prepare;
mod settings;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use args::TrainAction;
pub use args::TrainArgs;
pub use dry_run::shown_time;
use mlx_bun::lora::{Adapter, AdapterSet};
use mlx_bun::mlx::memory;
use mlx_bun::train::checkpoint::STATE_NAME;
use mlx_bun::train::output::{ADAPTER_NAME, Output, PeftShape, export_peft};
use mlx_bun::train::parameters::Tuning;
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
    if !settings.train && settings.tuning == Tuning::Full && settings.resume_adapter_file.is_none() {
        settings.resume_adapter_file = Some(settings.adapter_path.join(ADAPTER_NAME));
    }
    let numerics = args.numerics.resolve(&mut warnings);
    warnings.iter().for_each(|warning| printer.warning(warning));
    choose_numerics(numerics, printer)?;
    let base = prepare::load(&settings, printer)?;
    let mut data = prepare::data(&settings, &base, printer)?;
    interrupt.begin();
    if args.dry_run {
        dry_run::run(&settings, &base, &data, printer)?;
        return Ok(ExitStatus::Success);
    }
    let (network, values, keys, num_layers) = prepare::network(&settings, &base)?;
    if !settings.train {
        return test_adapter(&settings, &base, data, (network, values, keys), &interrupt, printer);
    }
    let trained: usize = values.iter().map(mlx_bun::mlx::Array::size).sum();
    let ranks: BTreeMap<String, i32> =
        network.parameters().ranks().map(|(path, rank)| (path.to_owned(), rank)).collect();
    let record = config_record(&settings, &base.path, num_layers, &ranks);
    let mut trainer = prepare::trainer(&settings, network, values, keys, &mut data)?;
    begin_folder(&settings, printer)?;
    let output = Output::create(&settings.adapter_path, &record)?;
    printer.note(&format!("Training {trained} numbers of {} ({})", base.path, settings.tuning.name()));
    interrupt.wait_for_work();
    let outcome = train(&settings, &base, &mut trainer, &output, &interrupt, printer)?;
    if let Outcome::NotFinite { iteration } = outcome {
        return Err(not_finite(&settings, iteration).into());
    }
    if let Some(folder) = &args.export_peft {
        peft(&settings, &base, &trainer, folder)?;
    }
    if outcome == Outcome::Interrupted {
        printer.hint(&format!("go on with `mlx-bun train --resume {}`", settings.adapter_path.display()));
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

fn not_finite(settings: &Settings, iteration: u64) -> Complaint {
    let saved = settings.adapter_path.join(ADAPTER_NAME);
    let kept = match saved.is_file() {
        true => format!("the last good state is in `{}`", settings.adapter_path.display()),
        false => "nothing was saved before".to_owned(),
    };
    Complaint::failure(format!("the loss or the gradient of step {iteration} is no number; {kept}"))
        .hint("lower --learning-rate, or limit gradients with --grad-clip 1")
}

/// A new run must not be taken for the one that was in its folder.
fn begin_folder(settings: &Settings, printer: &Printer) -> anyhow::Result<()> {
    if settings.resume.is_some() {
        return Ok(());
    }
    if settings.adapter_path.join(ADAPTER_NAME).is_file() {
        printer.warning(&format!("the adapter in `{}` is replaced", settings.adapter_path.display()));
    }
    match std::fs::remove_file(settings.adapter_path.join(STATE_NAME)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound && settings.adapter_path.exists() => {
            Err(error.into())
        }
        _ => Ok(()),
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
    let mut metrics = Metrics::open(output.folder(), trainer.iteration(), iterations, meta);
    let mut stdout = printer.stdout();
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
                say_validation(&mut stdout, &report)
            }
            Event::Train(report) => {
                metrics.train(&report);
                say_train(&mut stdout, &report)
            }
            Event::Saved { iteration, path } => {
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
    printer.note(&format!("Saved: {}", output.adapter_file().display()));
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

fn peft(settings: &Settings, base: &Base, trainer: &Trainer, folder: &std::path::Path) -> anyhow::Result<()> {
    if settings.tuning == Tuning::Full {
        return Err(Complaint::usage("`--export-peft` is for lora and dora, not for whole weights").into());
    }
    let shape = PeftShape {
        rank: settings.adapter.rank,
        scale: settings.adapter.scale,
        rank_stabilized: settings.adapter.rank_stabilized,
    };
    let values: Vec<_> = trainer.named_values().map(|(_, value)| value.clone()).collect();
    Ok(export_peft(folder, trainer.parameters(), &values, &base.path, shape)?)
}

/// `--test` alone: the adapter of `--adapter-path`, or the model itself when that is empty.
fn test_adapter(
    settings: &Settings,
    base: &Base,
    mut data: Data,
    (network, values, keys): (
        mlx_bun::train::network::Network,
        Vec<mlx_bun::mlx::Array>,
        mlx_bun::mlx::random::RandomState,
    ),
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
    let (network, values) = match settings.tuning {
        Tuning::Full => (network, values),
        _ => (network.without_training(), Vec::new()),
    };
    if settings.tuning != Tuning::Full && !settings.adapter_path.as_os_str().is_empty() {
        let adapters = base.loaded.model.adapters();
        let fitted = adapters.fit(Adapter::open(&settings.adapter_path)?)?;
        adapters.activate(&AdapterSet::new(vec![fitted])?);
    }
    let settings = Settings { resume: None, ..settings.clone() };
    let mut trainer = prepare::trainer(&settings, network, values, keys, &mut data)?;
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
