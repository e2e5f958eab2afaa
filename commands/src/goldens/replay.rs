//! One cell through the engine, its bits compared with what mlx-lm left.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use anyhow::{Context as _, Result, bail};
use mlx_bun::cache::{LayerCache, make_prompt_cache};
use mlx_bun::checkpoint::Tensor;
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::generate::prompt_cache;
use mlx_bun::generate::step::{KvQuantization, PREFILL_STEP_SIZE, StepOptions, TokenGenerator};
use mlx_bun::mlx::{self, Array};
use mlx_bun::models::Model;
use mlx_bun::sampling::{MinP, Penalty, PenaltyParams, SamplingParams, Xtc};
use sha2::{Digest as _, Sha256};

use super::format::{Cell, Expect, Prefill, Processors, Run, Sampler, Steps};

/// Tensors by name, mapped.
pub type Tensors = BTreeMap<String, Tensor>;

/// Where a replay left the recording.
#[derive(Debug, PartialEq)]
pub struct Difference {
    /// Which tensor or list is not the same.
    pub tensor: String,
    /// First step at which it is not.
    pub step: Option<usize>,
    /// Largest difference of the first kept tensor at or after that step, with its step.
    pub max_difference: Option<(Option<usize>, f32)>,
    /// How far the oracle's best token lay above its second best there.
    pub top2_gap: Option<f64>,
    /// What was expected and what came, where that can be said in a few words.
    pub detail: String,
}

impl Difference {
    fn new(tensor: impl Into<String>, detail: impl Into<String>) -> Self {
        let (tensor, detail) = (tensor.into(), detail.into());
        Self { tensor, step: None, max_difference: None, top2_gap: None, detail }
    }
}

/// How a replay can end short of an error.
pub type Outcome = Result<(), Difference>;

/// What lies beside a golden file.
pub struct Recording<'a> {
    /// Raw tensors of chosen steps.
    pub kept: &'a Tensors,
    /// Where mlx-lm's prompt caches are.
    pub folder: &'a Path,
}

/// Replays a cell through a model that could be loaded.
///
/// # Errors
/// When the engine fails, or the recording lacks a tensor.
pub fn replay(cell: &Cell, model: &dyn Model, recording: &Recording) -> Result<Outcome> {
    let kept = recording.kept;
    match &cell.expect {
        Expect::Refused(message) => {
            Ok(Err(Difference::new("config", format!("mlx-lm refuses it: {message}"))))
        }
        Expect::Prefill(prefill) => replay_prefill(cell, prefill, model, kept),
        Expect::Steps(steps) => match generate(cell, model, recording.folder)? {
            Ok(generated) => compare_steps(cell, steps, &generated, kept),
            Err(difference) => Ok(Err(difference)),
        },
        Expect::Run(run) => match generate(cell, model, recording.folder)? {
            Ok(generated) => compare_run(cell, run, &generated, kept),
            Err(difference) => Ok(Err(difference)),
        },
    }
}

/// Tokens and logprobs of a generation.
struct Generated {
    tokens: Vec<u32>,
    logprobs: Vec<Array>,
}

fn replay_prefill(cell: &Cell, expected: &Prefill, model: &dyn Model, kept: &Tensors) -> Result<Outcome> {
    let mut caches = make_prompt_cache(model.layer_kinds(), None);
    let length = i32::try_from(cell.prompt.len())?;
    let logits = model.forward(&Array::from_slice(&cell.prompt, &[1, length])?, Some(&mut caches))?;
    if logits.shape() != expected.shape {
        return Ok(Err(Difference::new(
            "logits",
            format!("shape {:?}, expected {:?}", logits.shape(), expected.shape),
        )));
    }
    if let Some(difference) = dtype_difference("logits", &logits, &expected.dtype) {
        return Ok(Err(difference));
    }
    if hash([&logits])? == expected.logits {
        return Ok(Ok(()));
    }
    let last = logits.slice(1, length - 1, length)?;
    let max_difference = max_difference(&last, kept_tensor(kept, &format!("{}.last", cell.name))?)?;
    let detail = "the kept row is that of the last position";
    Ok(Err(Difference { max_difference: Some((None, max_difference)), ..Difference::new("logits", detail) }))
}

fn generate(cell: &Cell, model: &dyn Model, folder: &Path) -> Result<Result<Generated, Difference>> {
    // mlx-lm asks the model first, and only a model without a make_cache of its own hears of max_kv_size.
    let max_kv_size = cell.kv.max_kv_size.filter(|_| !model.makes_own_cache());
    let mut caches = make_prompt_cache(model.layer_kinds(), max_kv_size);
    let options = step_options(cell)?;
    if let Some(prefix) = &cell.prefix {
        let only_feed = StepOptions {
            max_tokens: Some(0),
            kv_quantization: options.kv_quantization,
            ..Default::default()
        };
        TokenGenerator::new(model, &mut caches, prefix, &only_feed)?.next()?;
        caches = match saved_and_loaded(&caches, cell.cache_file.as_ref().map(|file| folder.join(file)))? {
            Ok(caches) => caches,
            Err(difference) => return Ok(Err(difference)),
        };
    }
    let mut generator = TokenGenerator::new(model, &mut caches, &cell.prompt, &options)?;
    let mut generated = Generated { tokens: Vec::new(), logprobs: Vec::new() };
    while let Some(step) = generator.next()? {
        generated.tokens.push(step.token);
        generated.logprobs.push(step.logprobs);
    }
    Ok(Ok(generated))
}

/// The caches through a file. Where mlx-lm's own file was kept, ours must equal it, and its is the one loaded.
fn saved_and_loaded(
    caches: &[LayerCache],
    recorded: Option<PathBuf>,
) -> Result<Result<Vec<LayerCache>, Difference>> {
    let scratch = Scratch::new();
    prompt_cache::save(&scratch.0, caches, &BTreeMap::new())?;
    if let Some(recorded) = &recorded
        && let Err(difference) = compare_files(&scratch.0, recorded)?
    {
        return Ok(Err(difference));
    }
    let (caches, _) = prompt_cache::load(recorded.as_ref().unwrap_or(&scratch.0))?;
    Ok(Ok(caches))
}

/// A file that goes with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        Self(env::temp_dir().join(format!("mlx-bun-goldens-{}.safetensors", process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn step_options(cell: &Cell) -> Result<StepOptions> {
    let kv = &cell.kv;
    Ok(StepOptions {
        max_tokens: Some(cell.max_tokens),
        sampling: sampling(&cell.sampler),
        penalties: penalties(&cell.processors)?,
        seed: cell.seed,
        prefill_step_size: cell.prefill_step_size.unwrap_or(PREFILL_STEP_SIZE),
        kv_quantization: kv.kv_bits.map(|bits| KvQuantization {
            bits,
            group_size: kv.kv_group_size,
            start: kv.quantized_kv_start,
        }),
        grammar: None,
    })
}

fn sampling(sampler: &Sampler) -> SamplingParams {
    let Sampler { min_p, min_tokens_to_keep, xtc_probability, xtc_threshold, .. } = *sampler;
    SamplingParams {
        temperature: sampler.temp,
        top_p: sampler.top_p,
        min_p: (min_p != 0.0).then_some(MinP { p: min_p, min_tokens_to_keep }),
        xtc: (xtc_probability > 0.0).then(|| Xtc {
            probability: xtc_probability,
            threshold: xtc_threshold,
            special_tokens: sampler.xtc_special_tokens.clone(),
        }),
        top_k: sampler.top_k,
        hlg: None,
    }
}

fn penalties(processors: &Processors) -> Result<PenaltyParams> {
    let penalty = |value: Option<f32>, context_size| value.map(|value| Penalty { value, context_size });
    Ok(PenaltyParams {
        logit_bias: processors.bias()?,
        repetition: penalty(processors.repetition_penalty, processors.repetition_context_size),
        presence: penalty(processors.presence_penalty, processors.presence_context_size),
        frequency: penalty(processors.frequency_penalty, processors.frequency_context_size),
    })
}

fn compare_steps(cell: &Cell, expected: &Steps, generated: &Generated, kept: &Tensors) -> Result<Outcome> {
    let gap = |step: usize| expected.top2_gap.get(step).copied();
    if let Some(first) = generated.logprobs.first()
        && let Some(difference) = dtype_difference("logprobs", first, &expected.dtype)
    {
        return Ok(Err(difference));
    }
    let tokens = compare_tokens(&expected.tokens, &generated.tokens);
    // From a wrong token on, logprobs differ as well; the token is what went wrong.
    let wrong_token = tokens.as_ref().err().and_then(|difference| difference.step).unwrap_or(usize::MAX);
    for (step, (row, recorded)) in generated.logprobs.iter().zip(&expected.logprobs).enumerate() {
        if step <= wrong_token && hash([row])? != *recorded {
            let difference = Difference {
                step: Some(step),
                max_difference: difference_from(step, cell, expected, generated, kept)?,
                top2_gap: gap(step),
                ..Difference::new("logprobs", first_token_difference(&expected.tokens, &generated.tokens))
            };
            return Ok(Err(difference));
        }
    }
    Ok(tokens.map_err(|difference| Difference { top2_gap: difference.step.and_then(gap), ..difference }))
}

fn compare_run(cell: &Cell, expected: &Run, generated: &Generated, kept: &Tensors) -> Result<Outcome> {
    let with_gap = |difference| Difference { top2_gap: Some(expected.smallest_gap), ..difference };
    if let Some(first) = generated.logprobs.first()
        && let Some(difference) = dtype_difference("logprobs", first, &expected.dtype)
    {
        return Ok(Err(difference));
    }
    if let Err(difference) = compare_tokens(&expected.tokens, &generated.tokens) {
        return Ok(Err(with_gap(difference)));
    }
    if hash(&generated.logprobs)? == expected.logprobs {
        return Ok(Ok(()));
    }
    let mut worst = None;
    for &step in &expected.raw {
        if let Some(row) = generated.logprobs.get(step) {
            let recorded = kept_tensor(kept, &format!("{}.{step}", cell.name))?;
            worst = Some((Some(step), max_difference(row, recorded)?));
        }
    }
    let detail = "the tokens agree; steps are not hashed one by one";
    Ok(Err(with_gap(Difference { max_difference: worst, ..Difference::new("logprobs", detail) })))
}

/// The largest difference at the first kept step from `step` on up to which the tokens agree.
fn difference_from(
    step: usize,
    cell: &Cell,
    expected: &Steps,
    generated: &Generated,
    kept: &Tensors,
) -> Result<Option<(Option<usize>, f32)>> {
    let agreed = expected.tokens.iter().zip(&generated.tokens).take_while(|(a, b)| a == b).count();
    let comparable = |at: &usize| *at >= step && *at <= agreed;
    if let Some(at) = expected.raw.iter().copied().find(comparable) {
        let Some(row) = generated.logprobs.get(at) else { return Ok(None) };
        let recorded = kept_tensor(kept, &format!("{}.{at}", cell.name))?;
        return Ok(Some((Some(at), max_difference(row, recorded)?)));
    }
    if let Some(at) = expected.top.keys().copied().find(comparable)
        && let (Some(row), Some(ids)) = (generated.logprobs.get(at), expected.top.get(&at))
    {
        let best = row.take(&Array::from_slice(ids, &[i32::try_from(ids.len())?])?, 0)?;
        let recorded = kept_tensor(kept, &format!("{}.{at}.top", cell.name))?;
        return Ok(Some((Some(at), max_difference(&best, recorded)?)));
    }
    Ok(None)
}

fn compare_tokens(expected: &[u32], got: &[u32]) -> Outcome {
    match expected.iter().zip(got).position(|(a, b)| a != b) {
        None if expected.len() == got.len() => Ok(()),
        None => {
            let detail = format!("{} tokens, expected {}", got.len(), expected.len());
            Err(Difference::new("tokens", detail))
        }
        Some(step) => Err(Difference {
            step: Some(step),
            ..Difference::new("tokens", first_token_difference(expected, got))
        }),
    }
}

fn first_token_difference(expected: &[u32], got: &[u32]) -> String {
    match expected.iter().zip(got).enumerate().find(|(_, (a, b))| a != b) {
        Some((step, (a, b))) => format!("token {b} instead of {a} at step {step}"),
        None => "the tokens agree".to_owned(),
    }
}

/// Our prompt cache file against mlx-lm's: every tensor, and the header apart from the caller's metadata.
fn compare_files(ours: &Path, recorded: &Path) -> Result<Outcome> {
    let (ours, recorded) = (SafetensorsFile::open(ours)?, SafetensorsFile::open(recorded)?);
    let header = |file: &SafetensorsFile| -> BTreeMap<String, String> {
        let entries = file.metadata().iter().filter(|(key, _)| !key.starts_with("0."));
        entries.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    if header(&ours) != header(&recorded) {
        let detail = format!("{:?}, expected {:?}", header(&ours), header(&recorded));
        return Ok(Err(Difference::new("prompt cache header", detail)));
    }
    let ours: BTreeMap<_, _> = ours.tensors().collect();
    for (name, theirs) in recorded.tensors() {
        let what = format!("prompt cache `{name}`");
        let Some(tensor) = ours.get(name) else { return Ok(Err(Difference::new(what, "missing"))) };
        if (tensor.dtype, &tensor.shape) != (theirs.dtype, &theirs.shape) {
            let detail =
                format!("{} {:?}, expected {} {:?}", tensor.dtype, tensor.shape, theirs.dtype, theirs.shape);
            return Ok(Err(Difference::new(what, detail)));
        }
        if tensor.bytes() != theirs.bytes() {
            let worst = max_difference(&Array::from_tensor(tensor)?, &theirs)?;
            let difference = Difference::new(what, "after the prefix");
            return Ok(Err(Difference { max_difference: Some((None, worst)), ..difference }));
        }
    }
    let extra = ours.len() - recorded.tensors().count();
    if extra > 0 {
        return Ok(Err(Difference::new("prompt cache", format!("{extra} tensors more than mlx-lm's"))));
    }
    Ok(Ok(()))
}

fn dtype_difference(tensor: &str, array: &Array, expected: &str) -> Option<Difference> {
    let got = array.dtype().name();
    (got != expected).then(|| Difference::new(tensor, format!("{got}, expected {expected}")))
}

fn kept_tensor<'a>(kept: &'a Tensors, name: &str) -> Result<&'a Tensor> {
    kept.get(name).with_context(|| format!("the golden's safetensors file has no tensor `{name}`"))
}

/// The first 64 bits of SHA-256 over the arrays' bytes, in hex.
fn hash<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<String, mlx::Error> {
    let mut digest = Sha256::new();
    for array in arrays {
        digest.update(array.to_bytes()?);
    }
    Ok(digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// The largest absolute difference; NaN against a number counts as infinite.
fn max_difference(got: &Array, expected: &Tensor) -> Result<f32> {
    let (got, expected) = (got.to_f32_vec()?, Array::from_tensor(expected)?.to_f32_vec()?);
    if got.len() != expected.len() {
        bail!("{} values were kept, {} computed", expected.len(), got.len());
    }
    let apart = |(a, b): (&f32, &f32)| match (a - b).abs() {
        _ if a == b || (a.is_nan() && b.is_nan()) => 0.0,
        difference if difference.is_nan() => f32::INFINITY,
        difference => difference,
    };
    Ok(got.iter().zip(&expected).map(apart).fold(0.0, f32::max))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mlx_bun::checkpoint::{ElementType, TensorData};

    use super::*;

    fn stored(values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor {
            dtype: ElementType::F32,
            shape: vec![values.len()],
            data: TensorData::Owned(Arc::new(bytes)),
        }
    }

    fn row(values: &[f32]) -> Array {
        Array::from_slice(values, &[values.len() as i32]).unwrap()
    }

    fn cell(tokens: &[u32], rows: &[&[f32]], raw: &[usize]) -> (Cell, Tensors) {
        let hashes: Vec<_> = rows.iter().map(|values| hash([&row(values)]).unwrap()).collect();
        let gaps = vec![0.25; tokens.len()];
        let text = serde_json::json!({
            "name": "a", "mode": "greedy", "prompt": [1], "max_tokens": tokens.len(),
            "expect": {"steps": {"tokens": tokens, "dtype": "float32", "logprobs": hashes, "top2_gap": gaps, "raw": raw}},
        });
        let kept = raw.iter().map(|&step| (format!("a.{step}"), stored(rows[step]))).collect();
        (serde_json::from_value(text).unwrap(), kept)
    }

    fn compare(cell: &(Cell, Tensors), tokens: &[u32], rows: &[&[f32]]) -> Outcome {
        let Expect::Steps(steps) = &cell.0.expect else { panic!("steps") };
        let generated =
            Generated { tokens: tokens.to_vec(), logprobs: rows.iter().map(|values| row(values)).collect() };
        compare_steps(&cell.0, steps, &generated, &cell.1).unwrap()
    }

    /// The same hash as Python's `hashlib.sha256(struct.pack("<2f", 1, 2)).hexdigest()[:16]`.
    #[test]
    fn hash_is_the_oracles() {
        assert_eq!(hash([&row(&[1.0, 2.0])]).unwrap(), "b9c80b5adeca4507");
    }

    #[test]
    fn equal_bits_pass() {
        let recorded = cell(&[1, 0], &[&[0.0, 1.0], &[1.0, 0.5]], &[0]);
        assert_eq!(compare(&recorded, &[1, 0], &[&[0.0, 1.0], &[1.0, 0.5]]), Ok(()));
    }

    #[test]
    fn one_bit_is_a_difference() {
        let recorded = cell(&[1, 0], &[&[0.0, 1.0], &[1.0, 0.5]], &[1]);
        let off = f32::from_bits(1.0f32.to_bits() + 1);
        let difference = compare(&recorded, &[1, 0], &[&[0.0, 1.0], &[off, 0.5]]).unwrap_err();
        assert_eq!((difference.tensor.as_str(), difference.step), ("logprobs", Some(1)));
        assert_eq!(difference.max_difference, Some((Some(1), f32::EPSILON)));
        assert_eq!((difference.top2_gap, difference.detail.as_str()), (Some(0.25), "the tokens agree"));
    }

    /// Minus zero equals zero as a number and not as bits.
    #[test]
    fn minus_zero_is_a_difference() {
        let recorded = cell(&[1], &[&[0.0, 1.0]], &[0]);
        let difference = compare(&recorded, &[1], &[&[-0.0, 1.0]]).unwrap_err();
        assert_eq!(difference.max_difference, Some((Some(0), 0.0)));
    }

    #[test]
    fn a_wrong_token_over_equal_logprobs_is_a_difference() {
        let recorded = cell(&[1, 0], &[&[0.0, 1.0], &[1.0, 0.5]], &[]);
        let difference = compare(&recorded, &[1, 1], &[&[0.0, 1.0], &[1.0, 0.5]]).unwrap_err();
        assert_eq!((difference.tensor.as_str(), difference.step), ("tokens", Some(1)));
        assert_eq!(difference.detail, "token 1 instead of 0 at step 1");
    }

    /// After a wrong token the rows belong to different texts: no number is better than a meaningless one.
    #[test]
    fn rows_after_a_wrong_token_are_not_measured() {
        let recorded = cell(&[1, 0, 0], &[&[0.0, 1.0], &[1.0, 0.5], &[1.0, 0.0]], &[2]);
        let difference =
            compare(&recorded, &[0, 0, 0], &[&[2.0, 1.0], &[1.0, 0.5], &[9.0, 0.0]]).unwrap_err();
        assert_eq!((difference.step, difference.max_difference), (Some(0), None));
    }

    /// A sampler gone wrong at step 0 shows as that, not as logprobs that differ from step 1 on.
    #[test]
    fn a_wrong_token_comes_before_the_logprobs_it_spoils() {
        let recorded = cell(&[1, 0], &[&[0.0, 1.0], &[1.0, 0.5]], &[]);
        let difference = compare(&recorded, &[0, 0], &[&[0.0, 1.0], &[9.0, 0.5]]).unwrap_err();
        assert_eq!((difference.tensor.as_str(), difference.step), ("tokens", Some(0)));
    }

    #[test]
    fn missing_tokens_are_a_difference() {
        assert!(compare_tokens(&[1, 2], &[1]).unwrap_err().detail.contains("1 tokens, expected 2"));
    }
}
