//! The golden files as data; goldens/README.md describes the format.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The format this program reads.
const FORMAT: u32 = 1;

/// All that was recorded for one checkpoint.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenFile {
    format: u32,
    /// The model family, `llama`.
    pub family: String,
    /// Which checkpoint of the family, `bf16`.
    pub variant: String,
    /// Snapshot directory, relative to the repository's root.
    pub checkpoint: PathBuf,
    /// SHA-256 of its model.safetensors, in hex.
    pub weights_sha256: String,
    /// Versions and processor of the recording.
    pub environment: BTreeMap<String, String>,
    /// What was run.
    pub cells: Vec<Cell>,
}

/// One run and its result.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Unique in the file.
    pub name: String,
    /// Column of the matrix.
    pub mode: String,
    /// Ids to continue.
    pub prompt: Vec<u32>,
    /// Steps; 0 for a forward pass over the prompt.
    pub max_tokens: usize,
    /// Replaces top-level keys of config.json.
    #[serde(default)]
    pub config_overrides: Map<String, Value>,
    /// Ids already in the cache when generation starts.
    pub prefix: Option<Vec<u32>>,
    /// mlx-lm's own prompt cache of the prefix, beside the golden file.
    pub cache_file: Option<String>,
    /// Seed of the draws.
    pub seed: Option<u64>,
    /// Prompt tokens at a time.
    pub prefill_step_size: Option<usize>,
    /// Arguments of make_sampler.
    #[serde(default)]
    pub sampler: Sampler,
    /// Arguments of make_logits_processors.
    #[serde(default)]
    pub processors: Processors,
    /// What cache to use.
    #[serde(default)]
    pub kv: Kv,
    /// What came out.
    pub expect: Expect,
}

/// Arguments of `make_sampler`, with its defaults.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampler {
    /// Temperature; 0 is greedy.
    pub temp: f64,
    /// Nucleus mass.
    pub top_p: f64,
    /// Minimum relative probability.
    pub min_p: f64,
    /// Tokens that min-p keeps.
    pub min_tokens_to_keep: i32,
    /// Candidates; 0 is off.
    pub top_k: i32,
    /// Chance of XTC.
    pub xtc_probability: f32,
    /// Threshold of XTC.
    pub xtc_threshold: f32,
    /// Tokens XTC leaves alone.
    pub xtc_special_tokens: Vec<u32>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self {
            temp: 0.0,
            top_p: 0.0,
            min_p: 0.0,
            min_tokens_to_keep: 1,
            top_k: 0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            xtc_special_tokens: Vec::new(),
        }
    }
}

/// Arguments of `make_logits_processors`, with its defaults.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Processors {
    /// Id to addend, in the order of the file.
    pub logit_bias: Map<String, Value>,
    /// Multiplicative penalty.
    pub repetition_penalty: Option<f32>,
    /// Its window; 0 is the whole history.
    pub repetition_context_size: i32,
    /// Penalty for having occurred.
    pub presence_penalty: Option<f32>,
    /// Its window.
    pub presence_context_size: i32,
    /// Penalty an occurrence.
    pub frequency_penalty: Option<f32>,
    /// Its window.
    pub frequency_context_size: i32,
}

impl Default for Processors {
    fn default() -> Self {
        Self {
            logit_bias: Map::new(),
            repetition_penalty: None,
            repetition_context_size: 20,
            presence_penalty: None,
            presence_context_size: 20,
            frequency_penalty: None,
            frequency_context_size: 20,
        }
    }
}

/// Cache options of `generate_step`.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Kv {
    /// Bound of a rotating cache.
    pub max_kv_size: Option<i32>,
    /// Bits of a quantized one.
    pub kv_bits: Option<u8>,
    /// Values that share a scale.
    pub kv_group_size: u32,
    /// Positions before packing begins.
    pub quantized_kv_start: i32,
}

impl Default for Kv {
    fn default() -> Self {
        Self { max_kv_size: None, kv_bits: None, kv_group_size: 64, quantized_kv_start: 5000 }
    }
}

/// What mlx-lm computed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Expect {
    /// Logits of a whole prompt.
    Prefill(Prefill),
    /// A generation, step by step.
    Steps(Steps),
    /// A long generation.
    Run(Run),
    /// A refusal to load, with mlx-lm's message.
    Refused(String),
}

/// Logits of a whole prompt.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefill {
    /// `[1, L, V]`.
    pub shape: Vec<i32>,
    /// Element type by its MLX name.
    pub dtype: String,
    /// Hash of all of them.
    pub logits: String,
}

/// A generation, step by step.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Steps {
    /// Ids.
    pub tokens: Vec<u32>,
    /// Element type by its MLX name.
    pub dtype: String,
    /// One hash a step.
    pub logprobs: Vec<String>,
    /// Best minus second best, one a step.
    pub top2_gap: Vec<f64>,
    /// Steps kept as tensors.
    #[serde(default)]
    pub raw: Vec<usize>,
    /// Steps of which only the best entries are kept: their ids.
    #[serde(default)]
    pub top: BTreeMap<usize, Vec<u32>>,
}

/// A long generation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Ids.
    pub tokens: Vec<u32>,
    /// Element type by its MLX name.
    pub dtype: String,
    /// One hash over the logprobs of all steps.
    pub logprobs: String,
    /// Smallest distance of best and second best.
    pub smallest_gap: f64,
    /// Steps kept as tensors.
    pub raw: Vec<usize>,
}

impl GoldenFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// When it cannot be read, is of another format, or its lists do not fit together.
    pub fn read(path: &Path) -> Result<Self> {
        let read = || {
            let golden: Self = serde_json::from_str(&fs::read_to_string(path)?)?;
            if golden.format != FORMAT {
                bail!("format {} where {FORMAT} is expected", golden.format);
            }
            golden.cells.iter().try_for_each(Cell::check)?;
            Ok(golden)
        };
        read().with_context(|| format!("{}: `mlx-bun goldens regen` writes it anew", path.display()))
    }

    /// `family-variant`.
    pub fn name(&self) -> String {
        format!("{}-{}", self.family, self.variant)
    }
}

impl Cell {
    /// Lists of equal length, steps that exist, ids that are numbers.
    fn check(&self) -> Result<()> {
        let wrong = |what: &str| bail!("cell `{}`: {what}", self.name);
        match &self.expect {
            Expect::Steps(steps) => {
                let count = steps.tokens.len();
                if count != self.max_tokens || steps.logprobs.len() != count || steps.top2_gap.len() != count
                {
                    return wrong("tokens, logprobs and top2_gap differ in length");
                }
                if steps.raw.iter().chain(steps.top.keys()).any(|&step| step >= count) {
                    return wrong("a kept step lies past the end");
                }
            }
            Expect::Run(run) if run.tokens.len() != self.max_tokens => return wrong("tokens are missing"),
            Expect::Prefill(_) if self.max_tokens != 0 => return wrong("a prefill generates nothing"),
            _ => {}
        }
        self.processors.bias().map(drop).with_context(|| format!("cell `{}`", self.name))
    }
}

impl Processors {
    /// The bias with its ids as numbers.
    ///
    /// # Errors
    /// Names the entry that is not an id and a number.
    pub fn bias(&self) -> Result<Vec<(u32, f32)>> {
        let entry = |(id, value): (&String, &Value)| {
            let value = value.as_f64().with_context(|| format!("logit_bias of `{id}` is not a number"))?;
            Ok((id.parse().with_context(|| format!("`{id}` in logit_bias is no token id"))?, value as f32))
        };
        self.logit_bias.iter().map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = r#"{"format":1,"family":"llama","variant":"f32","checkpoint":"c","weights_sha256":"0",
        "environment":{},"cells":["#;

    fn read(cell: &str) -> Result<GoldenFile> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("llama-f32.json");
        fs::write(&path, format!("{HEAD}{cell}]}}")).unwrap();
        GoldenFile::read(&path)
    }

    fn steps(tokens: &str, more: &str) -> String {
        format!(
            r#"{{"name":"a","mode":"greedy","prompt":[1],"max_tokens":2{more},"expect":{{"steps":{{"tokens":{tokens},
            "dtype":"float32","logprobs":["a","b"],"top2_gap":[0.5,1],"raw":[1]}}}}}}"#
        )
    }

    #[test]
    fn absent_keys_take_the_defaults_of_mlx_lm() {
        let golden = read(&steps("[3,4]", "")).unwrap();
        let cell = &golden.cells[0];
        assert_eq!((cell.kv.kv_group_size, cell.kv.quantized_kv_start), (64, 5000));
        assert_eq!((cell.sampler.min_tokens_to_keep, cell.sampler.xtc_threshold), (1, 0.1));
        assert_eq!(cell.processors.repetition_context_size, 20);
        assert_eq!(golden.name(), "llama-f32");
    }

    #[test]
    fn bias_keeps_its_order() {
        let golden = read(&steps("[3,4]", r#","processors":{"logit_bias":{"9":1.5,"2":-1}}"#)).unwrap();
        assert_eq!(golden.cells[0].processors.bias().unwrap(), [(9, 1.5), (2, -1.0)]);
    }

    #[test]
    fn a_short_list_is_refused() {
        let error = read(&steps("[3]", "")).unwrap_err();
        assert!(
            format!("{error:#}").contains("cell `a`: tokens, logprobs and top2_gap differ in length"),
            "{error:#}"
        );
    }

    #[test]
    fn a_misspelt_option_is_refused() {
        let error = read(&steps("[3,4]", r#","kv":{"kv_bit":4}"#)).unwrap_err();
        assert!(format!("{error:#}").contains("kv_bit"), "{error:#}");
    }

    #[test]
    fn a_bias_of_no_token_is_refused() {
        let error = read(&steps("[3,4]", r#","processors":{"logit_bias":{"x":1}}"#)).unwrap_err();
        assert!(format!("{error:#}").contains("`x` in logit_bias is no token id"), "{error:#}");
    }

    #[test]
    fn another_format_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        fs::write(&path, HEAD.replace(":1,", ":2,") + "]}").unwrap();
        let error = GoldenFile::read(&path).unwrap_err();
        assert!(format!("{error:#}").contains("format 2 where 1 is expected"), "{error:#}");
    }

    /// The files in the repository are read as they are.
    #[test]
    fn recorded_files_parse() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../goldens/linux-x86_64-cpu/mlx-0.32.2");
        let mut modes = std::collections::BTreeSet::new();
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "json") {
                modes.extend(GoldenFile::read(&path).unwrap().cells.into_iter().map(|cell| cell.mode));
            }
        }
        for mode in ["prefill", "greedy", "sampling", "processors", "chunked", "kv-quant", "window", "resume"]
        {
            assert!(modes.contains(mode), "no cell of mode {mode}");
        }
    }
}
