//! How far the CPU's integer precisions stray from `exact` on a text: perplexity, KL divergence and agreement, as rows of
//! a table. Both models are loaded from the same files into one process.
//!
//! usage: precision_divergence TEXT SEQUENCES MODEL...
//! Sequences are 512 tokens each, from the text's beginning. A model is a directory or a GGUF file.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use mlx_bun::cache::make_prompt_cache;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::load::{LoadedModel, load};
use mlx_bun::mlx::cpu_ops::{self, CpuPrecision, in_prefill};
use mlx_bun::mlx::{Array, Dtype};
use mlx_bun::perplexity::divergence;

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
        let mut reference = Vec::new();
        for precision in [CpuPrecision::Exact, CpuPrecision::Int16, CpuPrecision::Int8] {
            let model = open(name, precision)?;
            let (mut losses, mut divergences, mut agreements) = (Vec::new(), Vec::new(), Vec::new());
            for tokens in &sequences {
                let (found, expected) = (logits(&model, tokens)?, logits(&exact, tokens)?);
                losses.extend(cross_entropy(&found, tokens)?);
                divergences.extend(divergence(&expected, &found)?.to_vec::<f32>()?);
                agreements.extend(expected.argmax(-1)?.equal(&found.argmax(-1)?)?.to_vec::<bool>()?);
            }
            let perplexity = mean(&losses).exp();
            if precision == CpuPrecision::Exact {
                reference.push(perplexity);
                continue;
            }
            let label = Path::new(name).file_name().map_or(name.into(), |name| name.to_string_lossy());
            let agreement =
                100.0 * agreements.iter().filter(|same| **same).count() as f64 / agreements.len() as f64;
            writeln!(
                out,
                "| {label} | {precision} | {perplexity:.5} | {:.5} | {:.1e} | {agreement:.2} % |",
                mean(&reference),
                mean(&divergences.iter().copied().map(f64::from).collect::<Vec<_>>())
            )?;
        }
    }
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Logits `[1, tokens - 1, vocabulary]`, computed as a prompt's are.
fn logits(model: &LoadedModel, tokens: &[u32]) -> Result<Array> {
    let inputs = &tokens[..tokens.len() - 1];
    let ids = Array::from_slice(inputs, &[1, i32::try_from(inputs.len())?])?;
    let mut caches = make_prompt_cache(model.model.layer_kinds(), None);
    Ok(in_prefill(|| model.model.forward(&ids, Some(&mut caches)))?.astype(Dtype::Float32)?)
}

/// The loss of each token after the first.
fn cross_entropy(logits: &Array, tokens: &[u32]) -> Result<Vec<f64>> {
    let targets = &tokens[1..];
    let targets = Array::from_slice(targets, &[1, i32::try_from(targets.len())?, 1])?;
    let score = logits.take_along_axis(&targets, -1)?.squeeze(-1)?;
    let losses = logits.logsumexp(-1, false)?.subtract(&score)?.to_vec::<f32>()?;
    Ok(losses.into_iter().map(f64::from).collect())
}

fn open(name: &str, precision: CpuPrecision) -> Result<LoadedModel> {
    cpu_ops::enable(cpu_ops::Settings { precision, ..cpu_ops::Settings::default() })?;
    let path = Path::new(name).to_path_buf();
    let source = if path.is_dir() { ModelSource::Snapshot(path) } else { ModelSource::Gguf(path) };
    Ok(load(&source)?)
}
