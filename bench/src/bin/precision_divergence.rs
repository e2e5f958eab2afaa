//! How far the CPU's integer precisions stray from `exact` on a text: perplexity, KL divergence and agreement, as rows of
//! a table. Both models are loaded from the same files into one process.
//!
//! usage: precision_divergence TEXT SEQUENCES MODEL...
//! Sequences are 512 tokens each, from the text's beginning. A model is a directory or a GGUF file.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::resolve_model;
use mlx_bun::load::{LoadedModel, load};
use mlx_bun::mlx::cpu_ops::{self, CpuPrecision};
use mlx_bun::perplexity::{Estimate, Evaluation, evaluate};

/// As the command has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LENGTH: usize = 512;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [text, count, models @ ..] = arguments.as_slice() else {
        anyhow::bail!("usage: precision_divergence TEXT SEQUENCES MODEL...");
    };
    let count: usize = count.parse()?;
    let text = std::fs::read_to_string(text).with_context(|| format!("cannot read {text}"))?;
    let mut out = std::io::stdout();
    writeln!(out, "| model | precision | perplexity | exact | KL (nats a token) | same likeliest token |")?;
    writeln!(out, "| --- | --- | --- | --- | --- | --- |")?;
    for name in models {
        let exact = open(name, CpuPrecision::Exact)?;
        // A token has at least one byte; far fewer characters make up the sequences than these.
        let start: String = text.chars().take(count * LENGTH * 16).collect();
        let tokens = exact.tokenizer.encode(&start, true)?;
        let sequences: Vec<Vec<u32>> = tokens.chunks_exact(LENGTH).take(count).map(<[u32]>::to_vec).collect();
        let go_on = &mut |_| ControlFlow::Continue(());
        let against = evaluate(&*exact.model, None, &sequences, 1, go_on)?.context("stopped")?;
        for precision in [CpuPrecision::Int16, CpuPrecision::Int8] {
            let model = open(name, precision)?;
            let found =
                evaluate(&*model.model, Some(&*exact.model), &sequences, 1, go_on)?.context("stopped")?;
            let (kl, agreement) = (found.divergence(), found.agreement());
            let label = Path::new(name).file_name().map_or(name.into(), |name| name.to_string_lossy());
            writeln!(
                out,
                "| {label} | {precision} | {:.5} | {:.5} | {:.1e} | {:.2} % |",
                perplexity(&found),
                perplexity(&against),
                kl.context("no divergence")?.mean,
                100.0 * agreement.context("no agreement")?.mean,
            )?;
        }
    }
    Ok(())
}

/// In double precision: mlx-lm's sum in single precision is too coarse for such small differences.
fn perplexity(evaluation: &Evaluation) -> f64 {
    let losses = evaluation.sequences.iter().flat_map(|sequence| &sequence.losses);
    Estimate::of(losses.map(|loss| f64::from(*loss))).mean.exp()
}

fn open(name: &str, precision: CpuPrecision) -> Result<LoadedModel> {
    cpu_ops::enable(cpu_ops::Settings { precision, ..cpu_ops::Settings::default() })?;
    Ok(load(&resolve_model(Some(name), &Environment::of_process())?.source)?)
}
