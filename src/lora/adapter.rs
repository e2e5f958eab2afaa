//! Adapter directories: mlx-lm's (`adapters.safetensors`, low-rank factors or whole weights) and PEFT's
//! (`adapter_model.safetensors`).

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::error::AdapterError;
use super::low_rank::LowRank;
use super::whole::WholeWeights;
use crate::checkpoint::error::shown_name;
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::{CheckpointError, Tensor};
use crate::mlx::Array;

/// Tensors that a message names before it only counts.
const NAMED: usize = 5;
/// PEFT's defaults.
const DEFAULT_ALPHA: f64 = 16.0;
const DEFAULT_RANK: f64 = 8.0;

/// What an adapter stores for one module.
#[derive(Clone, Debug)]
struct Stored {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
    /// PEFT keeps the factors as `[rank, in]` and `[out, rank]`.
    transposed: bool,
}

/// An adapter, its tensors mapped.
#[derive(Clone, Debug)]
pub struct Adapter {
    modules: BTreeMap<String, Stored>,
    scaling: Scaling,
    whole: Option<WholeWeights>,
}

/// How the scale of a module comes about.
#[derive(Clone, Copy, Debug)]
struct Scaling {
    /// Scale, or alpha where it is divided by the rank.
    scale: f64,
    /// Divided by the module's rank.
    by_rank: bool,
    /// Divided by its square root instead.
    rank_stabilized: bool,
}

impl Adapter {
    /// Opens an adapter directory.
    ///
    /// # Errors
    /// When files are missing or broken, or it is another kind of adapter.
    pub fn open(directory: &Path) -> Result<Self, AdapterError> {
        let names = ["adapters.safetensors", "adapter_model.safetensors"];
        let file = names.iter().map(|name| directory.join(name)).find(|path| path.is_file());
        let file = file.ok_or_else(|| AdapterError::NoWeights { path: directory.to_owned() })?;
        let config = read_config(directory)?;
        let wrong = |problem| AdapterError::Config { path: directory.to_owned(), problem };
        if config.get("fine_tune_type").and_then(Value::as_str) == Some("full") {
            let scaling = Scaling { scale: 0.0, by_rank: false, rank_stabilized: false };
            return Ok(Self { modules: BTreeMap::new(), scaling, whole: Some(WholeWeights::open(&file)?) });
        }
        let scaling = read_scaling(&config).map_err(wrong)?;
        let modules = read_modules(&file, &SafetensorsFile::open(&file)?)?;
        check_config(&config, &modules).map_err(wrong)?;
        Ok(Self { modules, scaling, whole: None })
    }

    /// The weights that it puts in place of the model's, if it is no adapter but a model that was trained itself.
    pub fn whole(&self) -> Option<&WholeWeights> {
        self.whole.as_ref()
    }

    /// Paths of the modules that it adapts.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.keys().map(String::as_str)
    }

    /// Whether it has something for a module.
    pub fn contains(&self, module: &str) -> bool {
        self.modules.contains_key(module)
    }

    /// Takes what it has for the module at `path`, which maps `input` features to `output`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn take(&mut self, path: &str, input: i32, output: i32) -> Result<Option<LowRank>, AdapterError> {
        self.take_for(path, input, output, false)
    }

    /// [`Adapter::take`] for an embedding of `rows` vectors of `features` numbers.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn take_embedding(
        &mut self,
        path: &str,
        rows: i32,
        features: i32,
    ) -> Result<Option<LowRank>, AdapterError> {
        self.take_for(path, rows, features, true)
    }

    fn take_for(
        &mut self,
        path: &str,
        input: i32,
        output: i32,
        embedding: bool,
    ) -> Result<Option<LowRank>, AdapterError> {
        let Some(stored) = self.modules.remove(path) else { return Ok(None) };
        let misfit = || AdapterError::Shape {
            module: path.to_owned(),
            model_in: input,
            model_out: output,
            a: stored.a.shape.clone(),
            b: stored.b.shape.clone(),
        };
        let array = |tensor: &Tensor| -> Result<Array, AdapterError> {
            let array = Array::from_tensor(tensor)?;
            if !array.dtype().is_floating() {
                return Err(AdapterError::Type { module: path.to_owned(), dtype: array.dtype().name() });
            }
            Ok(array)
        };
        let (mut a, mut b) = (array(&stored.a)?, array(&stored.b)?);
        if a.ndim() != 2 || b.ndim() != 2 {
            return Err(misfit());
        }
        if stored.transposed {
            (a, b) = (a.t()?, b.t()?);
        }
        let rank = a.dim(1);
        let magnitude = stored.magnitude.as_ref().map(array).transpose()?;
        let magnitude = magnitude.map(|magnitude| magnitude.reshape(&[-1])).transpose()?;
        let fits = a.dim(0) == input
            && b.dim(1) == output
            && b.dim(0) == rank
            && rank > 0
            && magnitude
                .as_ref()
                .is_none_or(|magnitude| magnitude.dim(0) == if embedding { input } else { output });
        if !fits {
            return Err(misfit());
        }
        Ok(Some(LowRank { a, b, scale: self.scaling.of(rank), magnitude, embedding, dropout: None }))
    }

    /// Nothing may be left that no module took.
    ///
    /// # Errors
    /// Names what is left.
    pub fn finish(self) -> Result<(), AdapterError> {
        if self.modules.is_empty() {
            return Ok(());
        }
        Err(AdapterError::Unmatched { names: listed(&self.modules.into_keys().collect::<Vec<_>>()) })
    }
}

impl Scaling {
    fn of(self, rank: i32) -> f32 {
        let rank = f64::from(rank.max(1));
        let scale = match (self.by_rank, self.rank_stabilized) {
            (_, true) => self.scale / rank.sqrt(),
            (true, false) => self.scale / rank,
            (false, false) => self.scale,
        };
        scale as f32
    }
}

pub(super) fn listed(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(NAMED).map(|name| format!("`{}`", shown_name(name))).collect();
    match names.len().saturating_sub(NAMED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn read_config(directory: &Path) -> Result<Value, AdapterError> {
    let path = directory.to_owned();
    let file = directory.join("adapter_config.json");
    let text = match std::fs::read(&file) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            return Err(AdapterError::NoConfig { path });
        }
        text => text.map_err(|cause| CheckpointError::Read { file, cause })?,
    };
    let wrong = |error: serde_json::Error| AdapterError::Config { path, problem: error.to_string() };
    serde_json::from_slice(&text).map_err(wrong)
}

/// What completes the sentence that begins with the config's name, where it contradicts what the adapter holds.
fn check_config(config: &Value, modules: &BTreeMap<String, Stored>) -> Result<(), String> {
    if modules.is_empty() {
        return Err("there are no tensors beside it".to_owned());
    }
    let text = |name: &str| config.get(name).and_then(Value::as_str);
    if let Some(kind) = text("peft_type").filter(|kind| !kind.eq_ignore_ascii_case("lora")) {
        return Err(format!("`peft_type` is `{}`; only LORA is supported", shown_name(kind)));
    }
    let dora = text("fine_tune_type") == Some("dora") || config.get("use_dora") == Some(&Value::Bool(true));
    if let Some((module, _)) = modules.iter().find(|(_, stored)| dora && stored.magnitude.is_none()) {
        return Err(format!("it says DoRA, but `{}` has no magnitudes", shown_name(module)));
    }
    let parameters = config.get("lora_parameters").filter(|parameters| parameters.is_object());
    // Where ranks differ between modules the config lists them apart.
    let varies = ["optiq", "applied_ranks", "rank_scaling"].iter().any(|name| config.get(*name).is_some());
    let rank = match parameters {
        Some(parameters) => parameters.get("rank"),
        None => config.get("r"),
    };
    if let Some(rank) = rank.and_then(Value::as_u64).filter(|&rank| rank > 0 && !varies) {
        let differs = |stored: &Stored| {
            let axis = usize::from(!stored.transposed);
            stored.a.shape.len() == 2 && stored.a.shape.get(axis).is_none_or(|&found| found as u64 != rank)
        };
        if let Some((module, stored)) = modules.iter().find(|(_, stored)| differs(stored)) {
            let (module, shape) = (shown_name(module), &stored.a.shape);
            return Err(format!("it says rank {rank}, but `{module}` has a lora_a of {shape:?}"));
        }
    }
    let keys = parameters.and_then(|parameters| parameters.get("keys")).and_then(Value::as_array);
    if let Some(keys) = keys.filter(|keys| !keys.is_empty()) {
        let named = |module: &str| keys.iter().filter_map(Value::as_str).any(|key| module.ends_with(key));
        if let Some(module) = modules.keys().find(|module| !named(module)) {
            return Err(format!("its `keys` do not name `{}`, which has tensors", shown_name(module)));
        }
    }
    Ok(())
}

fn read_scaling(config: &Value) -> Result<Scaling, String> {
    let wrong = |problem: &str| problem.to_owned();
    let number = |fields: &Value, name: &str, default: f64| match fields.get(name) {
        None => Ok(default),
        Some(value) => match value.as_f64() {
            Some(number) if number.is_finite() => Ok(number),
            _ => Err(wrong(&format!("`{name}` is not a number"))),
        },
    };
    let flag = |fields: &Value, name: &str| fields.get(name).and_then(Value::as_bool).unwrap_or(false);
    match config.get("lora_parameters") {
        Some(parameters) if parameters.is_object() => {
            if parameters.get("scale").is_none() {
                return Err(wrong(
                    "`lora_parameters` has no `scale`, without which the adapter has no meaning",
                ));
            }
            Ok(Scaling {
                scale: number(parameters, "scale", 0.0)?,
                by_rank: false,
                rank_stabilized: flag(config, "rs_lora") || flag(parameters, "rs_lora"),
            })
        }
        _ => {
            if ["rank_pattern", "alpha_pattern"].iter().any(|name| {
                config.get(*name).and_then(Value::as_object).is_some_and(|pattern| !pattern.is_empty())
            }) {
                return Err(wrong("ranks or alphas that differ between modules are not supported"));
            }
            let rank = number(config, "r", DEFAULT_RANK)?;
            if rank < 1.0 {
                return Err(format!("`r` is {rank}, and must be at least 1"));
            }
            Ok(Scaling {
                scale: number(config, "lora_alpha", DEFAULT_ALPHA)?,
                by_rank: true,
                rank_stabilized: flag(config, "use_rslora") || flag(config, "rs_lora"),
            })
        }
    }
}

/// What a tensor of an adapter is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    A,
    B,
    Magnitude,
}

/// Module, part, and whether the name is PEFT's.
fn parse(name: &str) -> Option<(&str, Part, bool)> {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    let name = name.strip_suffix(".default").unwrap_or(name);
    let name = name.strip_prefix("base_model.model.").unwrap_or(name);
    let (module, part) = name.rsplit_once('.')?;
    match part {
        "lora_a" => Some((module, Part::A, false)),
        "lora_b" => Some((module, Part::B, false)),
        "m" => Some((module, Part::Magnitude, false)),
        "lora_A" => Some((module, Part::A, true)),
        "lora_B" => Some((module, Part::B, true)),
        "lora_embedding_A" => Some((module, Part::A, true)),
        "lora_embedding_B" => Some((module, Part::B, true)),
        "lora_magnitude_vector" => Some((module, Part::Magnitude, true)),
        _ => None,
    }
}

fn read_modules(file: &Path, weights: &SafetensorsFile) -> Result<BTreeMap<String, Stored>, AdapterError> {
    let mut parts: BTreeMap<String, [Option<Tensor>; 3]> = BTreeMap::new();
    let mut peft = false;
    let mut foreign = Vec::new();
    for (name, tensor) in weights.tensors() {
        let Some((module, part, from_peft)) = parse(name) else {
            foreign.push(name.to_owned());
            continue;
        };
        peft |= from_peft;
        let slot = parts.entry(module.to_owned()).or_default();
        slot[part as usize] = Some(tensor);
    }
    if !foreign.is_empty() {
        return Err(AdapterError::Foreign { path: file.to_owned(), names: listed(&foreign) });
    }
    let mut modules = BTreeMap::new();
    for (module, parts) in parts {
        let [Some(a), Some(b), magnitude] = parts else {
            return Err(AdapterError::Half { path: file.to_owned(), module });
        };
        // Files with PEFT's names and mlx-lm's orientation exist; the rank tells them apart.
        let ours = a.shape.len() == 2 && b.shape.len() == 2 && a.shape.first() != b.shape.last();
        modules.insert(module, Stored { a, b, magnitude, transposed: peft && !ours });
    }
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_layouts_are_read() {
        let peft = parse("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight");
        assert!(peft.is_some_and(|(module, part, peft)| module == "model.layers.0.mlp.up_proj"
            && part == Part::A
            && peft));
        let ours = parse("model.layers.0.mlp.up_proj.lora_b");
        assert!(ours.is_some_and(|(module, part, peft)| module == "model.layers.0.mlp.up_proj"
            && part == Part::B
            && !peft));
        assert!(parse("model.norm.weight").is_none());
    }

    /// case L4: a config that says something else than the tensors is not guessed at.
    #[test]
    fn configs_that_contradict_the_tensors_are_refused() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/adapters/lora");
        let folder = tempfile::tempdir().unwrap();
        for name in ["adapters.safetensors", "adapter_config.json"] {
            std::fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
        }
        assert!(Adapter::open(folder.path()).is_ok());
        let config = read_config(folder.path()).unwrap();
        let refused = |pointer: &str, value: Value| {
            let mut changed = config.clone();
            match changed.pointer_mut(pointer) {
                Some(field) => *field = value,
                None => changed[pointer.trim_start_matches('/')] = value,
            }
            std::fs::write(folder.path().join("adapter_config.json"), changed.to_string()).unwrap();
            Adapter::open(folder.path()).map(|_| ()).unwrap_err().to_string()
        };
        assert!(refused("/lora_parameters/rank", 64.into()).contains("it says rank 64"));
        assert!(refused("/lora_parameters/keys", vec!["self_attn.w_pack"].into()).contains("`keys`"));
        assert!(refused("/fine_tune_type", "dora".into()).contains("no magnitudes"));
        assert!(refused("/peft_type", "IA3".into()).contains("only LORA"));
    }

    #[test]
    fn scales_follow_the_config() {
        let folder = tempfile::tempdir().unwrap();
        let scale = |config: &str| {
            std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
            let config = read_config(folder.path()).unwrap();
            read_scaling(&config).map(|scaling| scaling.of(4))
        };
        assert_eq!(scale(r#"{"lora_parameters": {"scale": 3, "rank": 4}}"#), Ok(3.0));
        assert_eq!(scale(r#"{"lora_parameters": {"scale": 3, "rank": 4}, "rs_lora": true}"#), Ok(1.5));
        assert_eq!(scale(r#"{"r": 4, "lora_alpha": 8}"#), Ok(2.0));
        assert_eq!(scale(r#"{"r": 4, "lora_alpha": 8, "use_rslora": true}"#), Ok(4.0));
        for guessed in
            [r#"{"lora_parameters": {"alpha": 8}}"#, r#"{"r": 0}"#, r#"{"r": 4, "lora_alpha": null}"#]
        {
            assert!(scale(guessed).is_err(), "{guessed}");
        }
        assert!(
            scale(r#"{"lora_parameters": {"scale": "x"}}"#).unwrap_err().contains("`scale` is not a number")
        );
    }
}
