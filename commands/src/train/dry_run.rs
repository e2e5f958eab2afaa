//! `--dry-run`: what a run would do, and what one step of its longest rows takes.

use std::io::Write;
use std::time::Instant;

use mlx_bun::mlx::memory;
use mlx_bun::train::batches::{Batch, BatchOptions, Batches};
use mlx_bun::train::dataset::{Example, Prepared};
use mlx_bun::train::optimizers::clip_by_norm;
use mlx_bun::train::parameters::Parameters;

use super::not_finite;
use super::prepare::{Base, Data, network, trainer};
use super::settings::Settings;
use crate::args::size::shown_size;
use crate::printer::Printer;

/// Bounds of the histogram's bars, in tokens.
const BOUNDS: [usize; 9] = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const BAR: usize = 40;

/// Prints the plan.
///
/// # Errors
/// Too few rows, or a step that fails.
pub fn run(settings: &Settings, base: &Base, data: &Data, printer: &Printer) -> anyhow::Result<()> {
    let (network, values, mut keys, num_layers) = network(settings, base, printer)?;
    let options = settings.options;
    if settings.resume.is_some() {
        // Whether the saved state is of this run.
        let (train, valid) = (data.train.clone(), data.valid.clone());
        let mut copy = Data { train, valid, test: Prepared::default(), format: data.format };
        trainer(settings, network.clone(), values.clone(), keys.clone(), &mut copy)?;
    }
    let batches = Batches::new(&data.train.examples, &options.batch)?;
    let trained: usize = values.iter().map(mlx_bun::mlx::Array::size).sum();
    let mut out = printer.stdout();
    writeln!(out, "Model: {} ({} of weights)", base.path, shown_size(base.weight_bytes))?;
    writeln!(out, "Rows: {} of format {}", settings.data.display(), data.format)?;
    for (name, prepared) in [("train", &data.train), ("valid", &data.valid), ("test", &data.test)] {
        counts(&mut out, name, prepared)?;
    }
    histogram(&mut out, &data.train.examples)?;
    let layers = if num_layers <= 0 { network.layers() as i64 } else { num_layers };
    writeln!(
        out,
        "Trains: {}, {}, {layers} of {} layers, {trained} numbers{}",
        settings.objective.name(),
        settings.tuning.name(),
        network.layers(),
        shown_ranks(network.parameters())
    )?;
    let epochs = options.iterations as f64 / batches.len() as f64;
    writeln!(
        out,
        "Steps: {} of {} rows, {epochs:.2} times over the data, an update every {}",
        options.iterations, options.batch.size, options.accumulation
    )?;
    let batch = longest(&data.train.examples, &options.batch)?;
    memory::reset_peak()?;
    let dropout = network.parameters().dropout_keys(&mut keys)?;
    let started = Instant::now();
    let gradient = network.gradient(&values, &batch, &settings.objective, &dropout)?;
    let seconds = started.elapsed().as_secs_f64();
    let norm = clip_by_norm(gradient.gradients, None)?.1;
    for figure in [gradient.values.first(), Some(&norm)].into_iter().flatten() {
        if figure.to_f32_vec()?.iter().any(|number| !number.is_finite()) {
            return Err(not_finite(0, "").into());
        }
    }
    let longest: usize = batch.streams.iter().map(|stream| stream.inputs.size()).sum();
    let kept = trained as u64 * 4 * 3;
    let peak = memory::peak()? as u64 + kept;
    writeln!(out, "Memory: about {} (measured, the longest rows: {longest} tokens)", shown_size(peak))?;
    let mean = mean_length(&data.train.examples) * options.batch.size as f64;
    let step = seconds * (mean / longest.max(1) as f64).min(1.0);
    writeln!(
        out,
        "Time: about {} ({seconds:.2} s the longest step)",
        shown_time(step * options.iterations as f64)
    )?;
    out.flush()?;
    Ok(())
}

/// The ranks, where they are not the one that was asked for.
pub fn shown_ranks(parameters: &Parameters) -> String {
    let ranks = || parameters.ranks().map(|(_, rank)| rank);
    match (ranks().min(), ranks().max()) {
        (Some(low), Some(high)) if low < high => format!(", ranks {low} to {high}"),
        (Some(rank), _) => format!(", rank {rank}"),
        _ => String::new(),
    }
}

fn counts(out: &mut impl Write, name: &str, prepared: &Prepared) -> std::io::Result<()> {
    let examples = &prepared.examples;
    if examples.is_empty() && prepared.nothing_to_learn.is_empty() {
        return writeln!(out, "  {name}: none");
    }
    let sequences = || examples.iter().flat_map(|example| &example.sequences);
    let tokens: usize = sequences().map(|sequence| sequence.tokens.len()).sum();
    let learned: usize = sequences().map(|sequence| sequence.learned()).sum();
    writeln!(
        out,
        "  {name}: {} rows, {tokens} tokens, {learned} of them learned, {} rows cut, {} left out",
        examples.len(),
        prepared.truncated,
        prepared.nothing_to_learn.len()
    )
}

fn histogram(out: &mut impl Write, examples: &[Example]) -> std::io::Result<()> {
    let mut bars = [0usize; BOUNDS.len() + 1];
    for example in examples {
        let place = BOUNDS.iter().position(|bound| example.length() <= *bound).unwrap_or(BOUNDS.len());
        bars[place] += 1;
    }
    let most = bars.iter().copied().max().unwrap_or(0).max(1);
    writeln!(out, "Tokens of a row:")?;
    for (place, count) in bars.into_iter().enumerate().filter(|(_, count)| *count > 0) {
        let label = match BOUNDS.get(place) {
            Some(bound) => format!("to {bound}"),
            None => format!("over {}", BOUNDS[BOUNDS.len() - 1]),
        };
        writeln!(out, "  {label:>9} {count:>7} {}", "#".repeat((count * BAR).div_ceil(most)))?;
    }
    Ok(())
}

/// A batch of the longest rows.
fn longest(examples: &[Example], options: &BatchOptions) -> anyhow::Result<Batch> {
    let mut order: Vec<&Example> = examples.iter().collect();
    order.sort_by_key(|example| std::cmp::Reverse(example.length()));
    let longest: Vec<Example> = order.into_iter().take(options.size).cloned().collect();
    let options = BatchOptions { size: if options.packing { 1 } else { options.size }, ..*options };
    Ok(Batches::new(&longest, &options)?.build(0, &longest, &options)?)
}

fn mean_length(examples: &[Example]) -> f64 {
    let tokens: usize =
        examples.iter().flat_map(|example| &example.sequences).map(|sequence| sequence.tokens.len()).sum();
    tokens as f64 / examples.len().max(1) as f64
}

/// A duration as people say it.
pub fn shown_time(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}
