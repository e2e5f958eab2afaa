//! What B costs in quality: KL divergence and perplexity of two settings of one model on the same text.
//!
//! Both models are loaded into this process, each with its own flags, and read the text as a server would: the beginning
//! of each sequence as a prompt, in chunks, its end token by token, with the cache packed as the flags say. So kernels
//! for prompts, kernels for decoding and packed caches all have their part in the result. (`perplexity` reads whole
//! sequences as prompts, which would not see a cache at all.)

use std::ops::ControlFlow;
use std::path::Path;

use mlx_bun::cache::{LayerCache, make_prompt_cache, maybe_quantize};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::load::LoadedModel;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::{self, Array, DeviceKind, Dtype, eval, memory};
use mlx_bun::models::Model;
use mlx_bun::perplexity::{divergence, read_rows, sequences};
use mlx_bun::quantize::calibration;
use mlx_bun::registry::select::select_model;

use super::gate::Quality;
use crate::args::adapter::AdapterArgs;
use crate::args::known;
use crate::args::kv_cache::KvCache;
use crate::args::load::ComputeArgs;
use crate::args::model::ModelArgs;
use crate::args::numerics::Numerics;
use crate::error::Complaint;
use crate::input_file;
use crate::load::choose_numerics;
use crate::printer::Printer;
use crate::recorder::recorded_path;
use crate::session::prefill_step_size;

/// Tokens at the end of a sequence that are read one by one.
const DECODED: usize = 32;
const SHUFFLE_SEED: u32 = 123;
/// A larger file is no text for a few sequences, but a slip of the hand.
const MOST_TEXT: u64 = 1 << 30;

/// The flags of a verb that say which model computes how.
#[derive(Clone, Debug, clap::Args)]
struct SettingArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,
    #[command(flatten)]
    compute: ComputeArgs,
}

/// A model, and how it computes.
#[derive(Clone, Debug)]
pub struct Setting {
    model: Option<String>,
    adapter: Option<std::path::PathBuf>,
    numerics: Numerics,
    kv_cache: KvCache,
}

impl Setting {
    /// Of the arguments of a verb.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub fn of(arguments: &[String]) -> Result<Self, Complaint> {
        let args = known::read::<SettingArgs>(arguments)
            .map_err(|error| Complaint::usage(format!("the gate cannot read the flags: {}", error.kind())))?;
        let mut warnings = Vec::new();
        Ok(Self {
            model: args.model.resolve(None, true)?,
            adapter: args.adapter.adapter_path.clone(),
            numerics: args.compute.numerics.resolve(&mut warnings),
            kv_cache: args.compute.kv_cache.resolve(&mut warnings)?,
        })
    }

    /// How rows name the model: its file or folder with links resolved, where it can be found, else as it is named.
    pub fn recorded_model(&self) -> Option<String> {
        match select_model(self.model.as_deref(), &Environment::of_process()) {
            Ok(found) => Some(recorded_path(&found.source)),
            Err(_) => self.model.clone(),
        }
    }

    fn load(&self, printer: &Printer) -> anyhow::Result<LoadedModel> {
        choose_numerics(self.numerics, printer)?;
        let source = select_model(self.model.as_deref(), &Environment::of_process())?.source;
        let adapter = self.adapter.as_deref().map(Adapter::open).transpose()?;
        Ok(mlx_bun::load::load_adapted(&source, adapter)?)
    }

    /// Logits `[1, L - 1, V]` in float32 of what follows each token of a sequence but the last.
    fn predictions(&self, model: &dyn Model, tokens: &[u32], printer: &Printer) -> anyhow::Result<Array> {
        choose_numerics(self.numerics, printer)?;
        let max_size =
            if self.numerics.l1 && model.makes_own_cache() { None } else { self.kv_cache.max_size };
        let mut caches = make_prompt_cache(model.layer_kinds(), max_size);
        let on_cpu = mlx::default_device() == DeviceKind::Cpu;
        let step = prefill_step_size(&self.kv_cache, self.numerics.cpu_kernels && on_cpu).max(1);
        let inputs = &tokens[..tokens.len().saturating_sub(1)];
        let (prompt, decoded) = inputs.split_at(inputs.len().saturating_sub(DECODED));
        let mut logits = Vec::new();
        for chunk in prompt.chunks(step) {
            logits.push(self.feed(model, chunk, &mut caches)?);
        }
        for token in decoded.chunks(1) {
            logits.push(self.feed(model, token, &mut caches)?);
        }
        let all = Array::concatenate(&logits, 1)?.astype(Dtype::Float32)?;
        eval([&all])?;
        memory::clear_cache()?;
        Ok(all)
    }

    fn feed(&self, model: &dyn Model, tokens: &[u32], caches: &mut [LayerCache]) -> mlx::Result<Array> {
        let length = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let ids = Array::from_slice(tokens, &[1, length])?;
        let logits = model.forward(&ids, Some(caches))?;
        if let Some(packed) = self.kv_cache.quantization {
            maybe_quantize(caches, packed.bits, packed.group_size, packed.start)?;
        }
        eval(caches.iter().flat_map(LayerCache::arrays).chain([&logits]))?;
        Ok(logits)
    }
}

/// What text is read, and how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// A .jsonl or text file; `None` for the built-in mix.
    pub file: Option<&'a Path>,
    /// Sequences at most.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
}

/// Checks that the text can be read, before the hour that the runs may take.
///
/// # Errors
/// The file is not there, is no regular file, or is too large.
pub fn check_text(file: &Path) -> Result<(), Complaint> {
    input_file::check(file, MOST_TEXT)
}

impl Text<'_> {
    fn sequences(&self, model: &LoadedModel) -> anyhow::Result<Vec<Vec<u32>>> {
        let (tokenizer, templates) = (&model.tokenizer, &model.chat_templates);
        match self.file {
            Some(file) => {
                let rows = read_rows(file)?;
                Ok(sequences(&rows, tokenizer, templates, SHUFFLE_SEED, self.length, Some(self.sequences))?)
            }
            None => {
                let samples = calibration::samples(None)?;
                Ok(calibration::sequences(&samples, tokenizer, self.length, self.sequences)?)
            }
        }
    }
}

/// Measures both settings; `None` when `go_on` says so.
///
/// # Errors
/// A model or text that cannot be used, or models whose vocabularies differ.
pub fn measure(
    [a, b]: [&Setting; 2],
    text: Text,
    printer: &Printer,
    go_on: &dyn Fn() -> ControlFlow<()>,
) -> anyhow::Result<Option<Quality>> {
    let (model_a, model_b) = (a.load(printer)?, b.load(printer)?);
    if model_a.model.vocab_size() != model_b.model.vocab_size() {
        return Err(Complaint::failure("A and B have vocabularies of different sizes")
            .hint("a gate compares settings of one model")
            .into());
    }
    let sequences = text.sequences(&model_a)?;
    let vocabulary = u32::try_from(model_a.model.vocab_size()).unwrap_or(0);
    if sequences.iter().flatten().any(|id| *id >= vocabulary) {
        return Err(Complaint::failure("the text has tokens that the model does not have").into());
    }
    let mut sums = [0.0f64; 3];
    let mut tokens = 0;
    let bar = printer.progress("Quality", sequences.len() as u64);
    for (index, sequence) in sequences.iter().enumerate() {
        if go_on().is_break() {
            return Ok(None);
        }
        let logits_a = a.predictions(&*model_a.model, sequence, printer)?;
        let logits_b = b.predictions(&*model_b.model, sequence, printer)?;
        let targets = &sequence[1..];
        sums[0] += total(&divergence(&logits_a, &logits_b)?)?;
        sums[1] += loss(&logits_a, targets)?;
        sums[2] += loss(&logits_b, targets)?;
        tokens += targets.len();
        bar.set(index as u64 + 1);
    }
    let mean = |sum: f64| sum / tokens.max(1) as f64;
    Ok(Some(Quality {
        kl: Some(mean(sums[0])),
        perplexity_a: mean(sums[1]).exp(),
        perplexity_b: mean(sums[2]).exp(),
        tokens,
    }))
}

/// In double precision: single precision is too coarse for small differences.
fn total(values: &Array) -> mlx::Result<f64> {
    Ok(values.to_vec::<f32>()?.into_iter().map(f64::from).sum())
}

fn loss(logits: &Array, targets: &[u32]) -> mlx::Result<f64> {
    let length = i32::try_from(targets.len()).unwrap_or(i32::MAX);
    let targets = Array::from_slice(targets, &[1, length, 1])?;
    let logits = logits.subtract(&logits.logsumexp(-1, true)?)?;
    Ok(-total(&logits.take_along_axis(&targets, -1)?)?)
}

#[cfg(test)]
mod tests {
    use mlx_bun::mlx::cpu_ops;

    use super::*;
    use crate::printer::Verbosity;

    fn fixture(name: &str) -> String {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name).display().to_string()
    }

    fn quality(a: &str, b: &str) -> Quality {
        let model = fixture("checkpoints/llama-4bit");
        let setting = |flags: &str| {
            let words = format!("generate --json --model {model} --threads 1 {flags} --temp 0 -p x");
            Setting::of(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
        };
        let (printer, _) = Printer::captured(Verbosity::Default);
        let data = fixture("perplexity.jsonl");
        let text = Text { file: Some(Path::new(&data)), sequences: 2, length: 48 };
        let (a, b) = (setting(a), setting(b));
        let go_on = &|| ControlFlow::Continue(());
        let measured = measure([&a, &b], text, &printer, go_on).unwrap().unwrap();
        cpu_ops::disable();
        mlx::set_compile(false);
        measured
    }

    #[test]
    fn a_setting_does_not_stray_from_itself() {
        for flags in ["", "--l1 --compiled-activations off", "--kv-quant 4 --kv-group-size 32"] {
            let same = quality(flags, flags);
            assert!(same.kl.unwrap().abs() < 1e-6, "{flags}: {same:?}");
            assert_eq!(same.perplexity_a, same.perplexity_b, "{flags}");
            assert_eq!(same.tokens, 2 * 47);
        }
    }

    #[test]
    fn a_packed_cache_and_coarser_products_are_seen() {
        let packed = quality("", "--kv-quant 4 --kv-group-size 32");
        assert!(packed.kl.unwrap() > 1e-6 && packed.perplexity_a != packed.perplexity_b, "{packed:?}");
        let finer = quality("", "--kv-quant 8 --kv-group-size 32");
        assert!(finer.kl.unwrap() < packed.kl.unwrap(), "{finer:?} {packed:?}");
        // The fixture's weights are random and its logits large: roundings show more than in a trained model.
        let other = quality("--cpu-precision exact", "--cpu-kernels off --compiled-activations off");
        assert!(
            other.kl.unwrap() < packed.kl.unwrap() && other.perplexity_change().abs() < 0.05,
            "{other:?}"
        );
    }

    #[test]
    fn settings_are_read_from_a_verbs_arguments() {
        let of = |text: &str| Setting::of(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let setting =
            of("generate --json --kv-quant 8 --temp 0.5 --model ./no/such/model --l1 -p x").unwrap();
        assert_eq!(setting.recorded_model().as_deref(), Some("./no/such/model"));
        assert!(setting.numerics.l1 && setting.kv_cache.quantization.is_some());
        assert!(of("generate --kv-quant off --kv-bits 4 x").is_err());
    }
}
