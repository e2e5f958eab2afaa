//! Whether a model fits into memory at some context, how long a context fits, and how fast it would decode.
//!
//! All of this is an estimate from headers and memory bandwidth; nothing is loaded and nothing is refused by it.

mod kv;

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

pub use self::kv::{KvLayout, KvScheme};
use super::machine::Machine;
use super::model::Model;
use crate::checkpoint::Config;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::gguf::{self, GgufError};

/// Share of the memory's speed that decoding reaches.
const DECODE_EFFICIENCY: f64 = 0.82;
/// The same for a mixture of experts, whose reads are scattered.
const MOE_DECODE_EFFICIENCY: f64 = 0.76;
/// Bytes that prefill needs for a moment, a token of its chunk.
const TRANSIENT_PER_TOKEN: u64 = 550_000;
/// Tokens that are fed at once.
const DEFAULT_CHUNK: u64 = 2048;
/// Share of memory that leaves room for other programs.
const COEXIST: f64 = 0.6;

/// Why a model cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// Its config.
    #[error(transparent)]
    Config(#[from] CheckpointError),
    /// Its GGUF header.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// What of a model takes memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Footprint {
    /// Bytes of all weights.
    pub weights: u64,
    /// Of these, routed experts.
    pub experts: u64,
    /// Share of the experts that a token uses; 1 without experts.
    pub active_experts: f64,
    /// What a token leaves in the key-value cache.
    pub kv: KvLayout,
    /// Positions it was made for.
    pub max_positions: Option<u64>,
}

impl Footprint {
    /// Of a model in the registry.
    ///
    /// # Errors
    /// Its config cannot be read.
    pub fn of(model: &Model) -> Result<Self, FitError> {
        let config = config_of(&model.path)?;
        let field = |name: &str| config.text().get(name).and_then(Value::as_f64);
        let experts =
            ["num_experts", "num_local_experts", "n_routed_experts"].iter().find_map(|name| field(name));
        let used = ["num_experts_per_tok", "top_k_experts"].iter().find_map(|name| field(name));
        let share = match (used, experts) {
            (Some(used), Some(experts)) if experts > 0.0 && used >= 0.0 => (used / experts).min(1.0),
            _ => 1.0,
        };
        Ok(Self {
            weights: model.total_bytes(),
            experts: model.experts_bytes.min(model.total_bytes()),
            active_experts: share,
            kv: KvLayout::of(&config),
            max_positions: config.max_position_embeddings()?,
        })
    }
}

/// The config of a model's folder or GGUF file.
///
/// # Errors
/// It cannot be read.
pub fn config_of(path: &Path) -> Result<Config, FitError> {
    if path.is_dir() {
        return Ok(Config::read(path)?);
    }
    Ok(Config::from_value(Value::Object(gguf::summarize(path)?.config), "the GGUF file")?)
}

/// What to assume.
#[derive(Clone, Copy, Debug)]
pub struct FitOptions {
    /// Tokens of context.
    pub context: u64,
    /// Bytes that may be used, instead of three quarters of the memory.
    pub budget: Option<u64>,
    /// How the key-value cache is kept.
    pub kv: KvScheme,
    /// Tokens a second that were measured for this model on this machine.
    pub measured_rate: Option<f64>,
}

/// The estimate. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The machine.
    pub machine: String,
    /// Tokens of context it is about.
    pub context: u64,
    /// All weights.
    pub weights: u64,
    /// The key-value cache at that context.
    pub kv: u64,
    /// What prefill needs for a moment.
    pub transient: u64,
    /// The sum.
    pub total: u64,
    /// What may be used.
    pub usable: u64,
    /// Whether the sum is within it.
    pub fits: bool,
    /// Longest context that fits; `None` when the cache does not grow and the model has no limit.
    pub max_context: Option<u64>,
    /// Tokens a second when decoding at that context.
    pub decode_rate: f64,
    /// Whether that was measured, not predicted.
    pub rate_measured: bool,
}

/// Judges a model on a machine.
pub fn fit(model: &Footprint, machine: &Machine, options: &FitOptions) -> Fit {
    let usable = machine.usable(options.budget);
    let kv = model.kv.bytes(options.context, options.kv);
    let transient = DEFAULT_CHUNK.min(options.context).saturating_mul(TRANSIENT_PER_TOKEN);
    let total = model.weights.saturating_add(kv).saturating_add(transient);
    let predicted = predicted_rate(model, machine.bandwidth, kv);
    Fit {
        machine: machine.name.clone(),
        context: options.context,
        weights: model.weights,
        kv,
        transient,
        total,
        usable,
        fits: total <= usable,
        max_context: max_context(model, usable, options.kv),
        decode_rate: options.measured_rate.unwrap_or(predicted),
        rate_measured: options.measured_rate.is_some(),
    }
}

/// Decoding reads every active weight and the cache once a token.
fn predicted_rate(model: &Footprint, bandwidth: f64, kv: u64) -> f64 {
    let idle = model.experts as f64 * (1.0 - model.active_experts);
    let bytes = model.weights as f64 - idle + kv as f64;
    let efficiency = if model.active_experts < 1.0 { MOE_DECODE_EFFICIENCY } else { DECODE_EFFICIENCY };
    if bytes > 0.0 { bandwidth * 1e9 / bytes * efficiency } else { 0.0 }
}

/// Longest context whose cache fits beside the weights and a chunk of prefill.
fn max_context(model: &Footprint, usable: u64, scheme: KvScheme) -> Option<u64> {
    let taken = model.weights.saturating_add(DEFAULT_CHUNK * TRANSIENT_PER_TOKEN);
    let budget = usable.saturating_sub(taken);
    let longest = if budget == 0 { Some(0) } else { model.kv.longest(budget, scheme) };
    match (longest, model.max_positions) {
        (Some(longest), Some(most)) => Some(longest.min(most)),
        (longest, most) => longest.or(most),
    }
}

/// The model to use when none is named: the default one if it is there and fits, else the largest that leaves
/// room for other programs, else the largest that fits. `memory` is the machine's.
pub fn pick(models: &[Model], memory: u64) -> Option<&Model> {
    const DEFAULT: &str = "mlx-community/gemma-4-e4b-it-OptiQ-4bit";
    use super::model::Tier::{Generic, Targeted};
    let runs = |model: &&Model| model.complete && matches!(model.tier, Targeted | Generic);
    let within = |share: f64| move |model: &&Model| model.total_bytes() as f64 <= memory as f64 * share;
    let largest = |share| {
        models
            .iter()
            .filter(runs)
            .filter(within(share))
            .max_by_key(|model| (model.total_bytes(), &model.repo_id))
    };
    let default = models.iter().filter(runs).filter(within(0.75)).find(|model| model.repo_id == DEFAULT);
    default.or_else(|| largest(COEXIST)).or_else(|| largest(0.75))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Tier;

    fn footprint() -> Footprint {
        // Gemma 3 27B's shape, in small: 2 full and 10 sliding layers.
        let config = serde_json::json!({
            "model_type": "gemma3_text", "num_hidden_layers": 12, "num_key_value_heads": 4, "head_dim": 64,
            "sliding_window": 512, "sliding_window_pattern": 6, "num_attention_heads": 8, "hidden_size": 512,
        });
        let config = Config::from_value(config, "config.json").unwrap();
        let kv = KvLayout::of(&config);
        Footprint { weights: 1 << 30, experts: 0, active_experts: 1.0, kv, max_positions: Some(131_072) }
    }

    fn machine(gib: u64) -> Machine {
        Machine { name: "m".to_owned(), memory: gib << 30, bandwidth: 100.0, measured: false }
    }

    fn options(context: u64) -> FitOptions {
        FitOptions { context, budget: None, kv: KvScheme::Dense, measured_rate: None }
    }

    #[test]
    fn the_sum_is_weights_cache_and_prefill() {
        let fit = fit(&footprint(), &machine(8), &options(8192));
        // A layer keeps 2 * 4 heads * 64 * 2 bytes a token.
        assert_eq!(fit.kv, 2 * 1024 * 8192 + 10 * 1024 * 512);
        assert_eq!(fit.transient, 2048 * 550_000);
        assert_eq!(fit.total, (1 << 30) + fit.kv + fit.transient);
        assert_eq!(fit.usable, 6 << 30);
        assert!(fit.fits);
        assert_eq!(fit.max_context, Some(131_072));
        let bytes = (1u64 << 30) as f64 + fit.kv as f64;
        assert!((fit.decode_rate - 1e11 / bytes * 0.82).abs() < 1e-6);
    }

    #[test]
    fn the_longest_context_just_fits() {
        let model = Footprint { max_positions: None, ..footprint() };
        for budget in [2_300_000_000, 2_210_000_000, 3_000_000_000, 40_000_000_000] {
            let at =
                |context| fit(&model, &machine(1), &FitOptions { budget: Some(budget), ..options(context) });
            let longest = at(2048).max_context.unwrap();
            // A chunk of prefill is counted whole, whatever the context.
            let total =
                |context: u64| model.weights + model.kv.bytes(context, KvScheme::Dense) + 2048 * 550_000;
            assert!(total(longest) <= budget && total(longest + 1) > budget, "{budget}: {longest}");
        }
        let nothing = fit(&model, &machine(1), &options(10));
        assert_eq!((nothing.max_context, nothing.fits), (Some(0), false));
    }

    #[test]
    fn experts_that_rest_are_not_read() {
        let dense = footprint();
        let moe = Footprint { experts: 1 << 29, active_experts: 0.125, ..footprint() };
        let rate = |model: &Footprint| fit(model, &machine(8), &options(0)).decode_rate;
        let bytes = (1u64 << 30) as f64 - 0.875 * (1u64 << 29) as f64;
        assert!((rate(&moe) - 1e11 / bytes * 0.76).abs() < 1e-6);
        assert!(rate(&moe) > rate(&dense));
        let measured = FitOptions { measured_rate: Some(42.0), ..options(0) };
        let fit = fit(&dense, &machine(8), &measured);
        assert_eq!((fit.decode_rate, fit.rate_measured), (42.0, true));
    }

    #[test]
    fn the_pick_leaves_room_where_it_can() {
        let model = |repo: &str, gib: u64, tier| Model {
            repo_id: repo.to_owned(),
            size_bytes: gib << 30,
            complete: true,
            tier,
            ..Model::default()
        };
        let mut models = vec![
            model("a/small", 1, Tier::Generic),
            model("a/medium", 5, Tier::Targeted),
            model("a/large", 7, Tier::Generic),
            model("a/strange", 5, Tier::Unsupported),
            model("a/helper", 2, Tier::Drafter),
        ];
        let name = |models: &[Model], gib: u64| pick(models, gib << 30).map(|model| model.repo_id.clone());
        assert_eq!(name(&models, 10).as_deref(), Some("a/medium"));
        assert_eq!(name(&models, 100).as_deref(), Some("a/large"));
        assert_eq!(name(&models[2..3], 10).as_deref(), Some("a/large"));
        assert_eq!(name(&models, 1), None);
        models.push(model("mlx-community/gemma-4-e4b-it-OptiQ-4bit", 3, Tier::Targeted));
        assert_eq!(name(&models, 10).as_deref(), Some("mlx-community/gemma-4-e4b-it-OptiQ-4bit"));
        models[5].complete = false;
        assert_eq!(name(&models, 10).as_deref(), Some("a/medium"));
    }
}
