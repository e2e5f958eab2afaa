//! How far the CPU's integer precisions stray from `exact` on a text: perplexity, KL divergence and agreement, as rows of
//! a table. Both models are loaded from the same files into one process.
//!
//! usage: precision_divergence TEXT SEQUENCES MODEL...
//! Sequences are 512 tokens each, from the text's beginning. A model is a directory or a GGUF file.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::{LoadedModel, load};
use mlx_bun::mlx::cpu_ops::{self, CpuPrecision};
use mlx_bun::perplexity::evaluate;

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
        let measure = |model: &LoadedModel, baseline: Option<&LoadedModel>| {
            let baseline = baseline.map(|baseline| &*baseline.model);
            evaluate(&*model.model, baseline, &sequences, 1, &mut |_| ControlFlow::Continue(()))?
                .context("nothing was measured")
        };
        let reference = measure(&exact, None)?.perplexity()?.mean;
        for precision in [CpuPrecision::Int16, CpuPrecision::Int8] {
            let model = open(name, precision)?;
            let found = measure(&model, Some(&exact))?;
            let (divergence, agreement) = (found.divergence(), found.agreement());
            let [divergence, agreement] = [divergence, agreement].map(|e| e.map_or(f64::NAN, |e| e.mean));
            let label = Path::new(name).file_name().map_or(name.into(), |name| name.to_string_lossy());
            let perplexity = found.perplexity()?.mean;
            let agreement = 100.0 * agreement;
            writeln!(
                out,
                "| {label} | {precision} | {perplexity:.5} | {reference:.5} | {divergence:.1e} | {agreement:.2} % |"
            )?;
        }
    }
    Ok(())
}

fn open(name: &str, precision: CpuPrecision) -> Result<LoadedModel> {
    cpu_ops::enable(cpu_ops::Settings { precision, ..cpu_ops::Settings::default() })?;
    let path = Path::new(name).to_path_buf();
    let source = if path.is_dir() { ModelSource::Snapshot(path) } else { ModelSource::Gguf(path) };
    Ok(load(&source)?)
}
