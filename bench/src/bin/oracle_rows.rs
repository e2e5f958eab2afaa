//! A model's predictions of text against mlx-lm's in float32, row by row: perplexity of both, and how far a token's
//! log-probability strays.
//!
//! usage: oracle_rows MODEL [PRECISION]
//! Rows and their log-probabilities are those of fixtures/starter_rows.safetensors, which scripts/oracle/starter_perplexity.py
//! records of the starter's weights rounded to bfloat16: MODEL is .native/starter/bf16 (`goldens regen --family starter`
//! makes it). PRECISION is auto (the default), exact, int16 or int8.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::source::resolve_model;
use mlx_bun::load::load;
use mlx_bun::mlx::Array;
use mlx_bun::mlx::cpu_ops::{self, Settings};
use mlx_bun::perplexity::evaluate;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(model) = arguments.next() else {
        bail!("usage: oracle_rows MODEL [auto|exact|int16|int8]");
    };
    let precision = arguments.next().as_deref().unwrap_or("auto").parse()?;
    cpu_ops::enable(Settings { precision, ..Settings::default() })?;
    let loaded = load(&resolve_model(Some(&model), &Environment::of_process())?.source)?;
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/starter_rows.safetensors");
    let (rows, expected) = recorded(&fixture)?;
    let found = evaluate(&*loaded.model, None, &rows, 1, &mut |_| std::ops::ControlFlow::Continue(()))?;
    let found = found.context("stopped")?;
    let mut out = std::io::stdout();
    writeln!(out, "| row | mlx-lm, float32 | mlx-bun | largest difference of a log-probability |")?;
    writeln!(out, "| --- | --- | --- | --- |")?;
    let (mut theirs, mut ours, mut furthest) = (Vec::new(), Vec::new(), 0f32);
    for (row, (sequence, expected)) in found.sequences.iter().zip(&expected).enumerate() {
        let differences = sequence.losses.iter().zip(expected).map(|(loss, logprob)| (loss + logprob).abs());
        let largest = differences.fold(0.0, f32::max);
        let losses: Vec<f32> = expected.iter().map(|logprob| -logprob).collect();
        writeln!(
            out,
            "| {row} | {:.4} | {:.4} | {largest:.1e} |",
            perplexity(&losses),
            perplexity(&sequence.losses)
        )?;
        theirs.extend(losses);
        ours.extend(&sequence.losses);
        furthest = furthest.max(largest);
    }
    writeln!(out, "| all | {:.4} | {:.4} | {furthest:.1e} |", perplexity(&theirs), perplexity(&ours))?;
    Ok(())
}

/// Token rows, and of each row the log-probability of every token after the first.
type Recorded = (Vec<Vec<u32>>, Vec<Vec<f32>>);

fn recorded(path: &Path) -> Result<Recorded> {
    let file = SafetensorsFile::open(path)?;
    let array = |wanted: &str| -> Result<Array> {
        let tensor = file.tensors().find(|(name, _)| *name == wanted);
        let (_, tensor) = tensor.with_context(|| format!("{}: no `{wanted}`", path.display()))?;
        Ok(Array::from_tensor(&tensor)?)
    };
    let (tokens, logprobs) = (array("tokens")?, array("logprobs")?);
    let length = tokens.dim(1) as usize;
    let tokens = tokens.astype(mlx_bun::mlx::Dtype::Uint32)?.to_vec::<u32>()?;
    Ok((
        tokens.chunks(length).map(<[u32]>::to_vec).collect(),
        logprobs.to_f32_vec()?.chunks(length - 1).map(<[f32]>::to_vec).collect(),
    ))
}

fn perplexity(losses: &[f32]) -> f64 {
    (losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / losses.len() as f64).exp()
}
