//! What was asked for, checked and complete.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlx_bun::train::batches::{BatchOptions, Grouping};
use mlx_bun::train::dataset::{Learn, Preparation};
use mlx_bun::train::losses::{Objective, SftScope};
use mlx_bun::train::network::MemoryOptions;
use mlx_bun::train::optimizers::{Adafactor, Adam, AdamW, Decay, Kind, Muon, Schedule, Sgd};
use mlx_bun::train::output::CONFIG_NAME;
use mlx_bun::train::parameters::{AdapterOptions, RankPolicy, Tuning};
use mlx_bun::train::trainer::TrainOptions;
use serde_json::{Map, Value, json};

use super::args::TrainArgs;
use super::layers::Layers;
use crate::args::Warnings;
use crate::error::Complaint;

/// A run as it will be.
#[derive(Clone, Debug)]
pub struct Settings {
    pub model: Option<String>,
    pub data: PathBuf,
    pub preparation: Preparation,
    pub valid_split: usize,
    pub valid_most: Option<usize>,
    pub objective: Objective,
    pub tuning: Tuning,
    /// `None` for mlx-lm's 16, or all there are if they are fewer.
    pub num_layers: Option<i64>,
    pub adapter: AdapterOptions,
    pub policy: String,
    pub lora_plus_ratio: f64,
    pub optimizer: Kind,
    pub schedule: Schedule,
    pub options: TrainOptions,
    pub memory: MemoryOptions,
    pub train: bool,
    pub test: bool,
    pub test_batches: Option<usize>,
    pub adapter_path: PathBuf,
    /// Where the run that goes on was saved.
    pub resume: Option<PathBuf>,
    pub resume_adapter_file: Option<PathBuf>,
    /// For adapter_config.json.
    pub record: Map<String, Value>,
}

/// Settings of mlx_lm.lora that mean nothing here.
const IGNORED: [&str; 4] = ["trust_remote_code", "mlx_bun", "config", "dry_run"];
/// Those that would need the network.
const REFUSED: [&str; 3] = ["hf_dataset", "report_to", "project_name"];

impl Settings {
    /// Settles everything.
    ///
    /// # Errors
    /// Names the flag or the setting that makes no sense.
    pub fn resolve(args: &TrainArgs, warnings: &mut Warnings) -> anyhow::Result<Self> {
        if args.report_to.is_some() || args.project_name.is_some() {
            return Err(Complaint::usage(
                "figures are not sent to services: leave --report-to and --project-name out",
            )
            .hint("metrics.jsonl in the adapter's folder has them all; `mlx-bun train-watch DIR` shows them")
            .into());
        }
        let typed_path = args.adapter_path.clone();
        let resume = args.resume.clone().map(|folder| match folder.as_os_str().is_empty() {
            true => PathBuf::from(typed_path.clone().unwrap_or_else(|| "adapters".to_owned())),
            false => folder,
        });
        let (file, name) = match (&args.config, &resume) {
            (Some(file), _) => (read_yaml(file)?, file.display().to_string()),
            (None, Some(folder)) => read_record(folder)?,
            (None, None) => (Map::new(), String::new()),
        };
        let mut layers = Layers::new(file, &name);
        let model = args.model.resolve(args.model_argument.clone(), false)?;
        let model = layers.given("model", model)?.or(args.model.resolve(None, true)?);
        let data: Option<String> = layers.given("data", args.data.clone())?;
        let Some(data) = data else {
            return Err(Complaint::usage("there is nothing to learn from: --data is missing")
                .hint("give a folder with train.jsonl, or a .jsonl or .parquet file")
                .into());
        };
        let objective = objective(args, &mut layers)?;
        let tuning =
            match layers.setting("fine_tune_type", args.fine_tune_type.clone(), "lora".into())?.as_str() {
                "lora" => Tuning::Lora,
                "dora" => Tuning::Dora,
                "full" => Tuning::Full,
                other => return Err(one_of("--fine-tune-type", other, "lora, dora or full").into()),
            };
        let (adapter, policy) = adapter(args, &mut layers)?;
        let iterations = at_least_one("--iters", layers.setting("iters", args.iters, 1000)?)?;
        let options = TrainOptions {
            iterations,
            batch: batch_options(args, &mut layers, &objective, warnings)?,
            validation_batches: batches(
                "--val-batches",
                layers.setting("val_batches", args.val_batches, 25)?,
            )?,
            steps_per_report: at_least_one(
                "--steps-per-report",
                layers.setting("steps_per_report", args.steps_per_report, 10)?,
            )?,
            steps_per_eval: at_least_one(
                "--steps-per-eval",
                layers.setting("steps_per_eval", args.steps_per_eval, 200)?,
            )?,
            save_every: at_least_one("--save-every", layers.setting("save_every", args.save_every, 100)?)?,
            accumulation: at_least_one(
                "--grad-accumulation-steps",
                layers.setting("grad_accumulation_steps", args.grad_accumulation_steps, 1)?,
            )?,
            clip:
                Some(not_negative("--grad-clip", layers.setting("grad_clip", args.grad_clip, 0.0)?)? as f32)
                    .filter(|clip| *clip > 0.0),
            cache_limit: size(layers.setting("clear_cache_threshold", args.clear_cache_threshold, 0)?),
            seed: u32::try_from(layers.setting("seed", args.seed, 0)?)
                .map_err(|_| Complaint::usage("`--seed` must be below 2^32, as NumPy's"))?,
        };
        let learn = match layers.switch("mask_prompt", args.mask_prompt)? {
            true => Learn::Completion,
            false => Learn::Everything,
        };
        let lora_plus_ratio =
            positive("--lora-plus-ratio", layers.setting("lora_plus_ratio", args.lora_plus_ratio, 1.0)?)?;
        let adapter_path = layers.setting("adapter_path", typed_path, "adapters".to_owned())?;
        let adapter_path = resume.clone().unwrap_or_else(|| PathBuf::from(adapter_path));
        let (train, test) = (layers.switch("train", args.train)?, layers.switch("test", args.test)?);
        let mut settings = Self {
            model,
            data: PathBuf::from(data),
            preparation: Preparation { learn, max_length: options.batch.max_length },
            valid_split: size(layers.setting("valid_split", args.valid_split, 0)?),
            valid_most: layers.given("val_size", args.val_size)?.map(size),
            num_layers: layers.given("num_layers", args.num_layers)?,
            lora_plus_ratio,
            optimizer: optimizer(args, &mut layers)?,
            schedule: schedule(args, &mut layers, iterations.div_ceil(options.accumulation))?,
            memory: memory(args, &mut layers)?,
            test_batches: batches("--test-batches", layers.setting("test_batches", args.test_batches, 500)?)?,
            resume_adapter_file: layers
                .given("resume_adapter_file", args.resume_adapter_file.clone())?
                .map(PathBuf::from),
            objective,
            tuning,
            adapter,
            policy,
            options,
            train: train || !test,
            test,
            adapter_path,
            resume,
            record: Map::new(),
        };
        if let Some(name) = layers.unknown().find(|name| REFUSED.contains(name)) {
            return Err(Complaint::usage(format!(
                "`{name}` is not supported: data and figures stay on this machine"
            ))
            .into());
        }
        let unknown: Vec<_> =
            layers.unknown().filter(|name| !IGNORED.contains(name)).map(|name| format!("`{name}`")).collect();
        if !unknown.is_empty() {
            warnings.push(format!("{name}: nothing here is called {}", unknown.join(", ")));
        }
        settings.record = layers.settled;
        Ok(settings)
    }
}

fn one_of(flag: &str, given: &str, known: &str) -> Complaint {
    Complaint::usage(format!("`{flag} {given}` is unknown; use {known}"))
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn at_least_one(flag: &str, number: u64) -> Result<u64, Complaint> {
    if number == 0 { Err(Complaint::usage(format!("`{flag}` must be at least 1"))) } else { Ok(number) }
}

fn not_negative(flag: &str, number: f64) -> Result<f64, Complaint> {
    match number.is_finite() && number >= 0.0 {
        true => Ok(number),
        false => {
            Err(Complaint::usage(format!("`{flag}` must be a number that is not negative, and is {number}")))
        }
    }
}

fn positive(flag: &str, number: f64) -> Result<f64, Complaint> {
    match number.is_finite() && number > 0.0 {
        true => Ok(number),
        false => Err(Complaint::usage(format!("`{flag}` must be above 0, and is {number}"))),
    }
}

fn batches(flag: &str, number: i64) -> Result<Option<usize>, Complaint> {
    match number {
        -1 => Ok(None),
        1.. => Ok(usize::try_from(number).ok()),
        _ => Err(Complaint::usage(format!("`{flag}` must be at least 1, or -1 for all, and is {number}"))),
    }
}

fn read_yaml(file: &Path) -> Result<Map<String, Value>, Complaint> {
    let shown = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Complaint::failure(format!("cannot read `{shown}`: {error}")))?;
    let value: Value = serde_saphyr::from_str(&text).map_err(|error| {
        let line = error.to_string();
        Complaint::failure(format!("{shown}: not valid YAML: {}", line.lines().next().unwrap_or_default()))
    })?;
    match value {
        Value::Object(fields) => Ok(fields),
        Value::Null => Ok(Map::new()),
        _ => Err(Complaint::failure(format!("{shown}: settings are `name: value` lines"))),
    }
}

/// The settings that a run was started with.
fn read_record(folder: &Path) -> Result<(Map<String, Value>, String), Complaint> {
    let file = folder.join(CONFIG_NAME);
    let shown = file.display().to_string();
    let text = std::fs::read(&file).map_err(|error| {
        Complaint::failure(format!("cannot go on with the run in `{}`: {shown}: {error}", folder.display()))
    })?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(fields)) => Ok((fields, shown)),
        _ => Err(Complaint::failure(format!("{shown} holds no settings"))),
    }
}

fn objective(args: &TrainArgs, layers: &mut Layers) -> Result<Objective, Complaint> {
    let method = layers.setting("method", args.method.clone(), "sft".to_owned())?;
    let beta = layers.given("beta", args.beta)?;
    let gamma = not_negative("--gamma", layers.setting("gamma", args.gamma, 1.0)?)? as f32;
    let lambda = not_negative("--lambda", layers.setting("lambda", args.lambda, 0.1)?)? as f32;
    let mut weight =
        |name: &str| Ok::<_, Complaint>(not_negative(name, layers.setting(name, None, 1.0)?)? as f32);
    let (desirable, undesirable) = (weight("desirable_weight")?, weight("undesirable_weight")?);
    let scope = match layers.setting("sft_scope", args.sft_scope.clone(), "full".to_owned())?.as_str() {
        "full" => SftScope::Full,
        "response" => SftScope::Response,
        other => return Err(one_of("--sft-scope", other, "full or response")),
    };
    let beta = |default: f64| Ok::<_, Complaint>(positive("--beta", beta.unwrap_or(default))? as f32);
    Ok(match method.as_str() {
        "sft" => Objective::Sft,
        "dpo" => Objective::Dpo { beta: beta(0.1)? },
        "orpo" => Objective::Orpo { lambda, scope },
        "simpo" => Objective::Simpo { beta: beta(2.0)?, gamma },
        "kto" => Objective::Kto { beta: beta(0.1)?, desirable, undesirable },
        other => return Err(one_of("--method", other, "sft, dpo, orpo, simpo or kto")),
    })
}

/// mlx-lm keeps the shape of adapters in a block of its own.
fn adapter(args: &TrainArgs, layers: &mut Layers) -> Result<(AdapterOptions, String), Complaint> {
    let block: Map<String, Value> = layers.setting("lora_parameters", None, Map::new())?;
    let mut inner = Layers::new(block, "lora_parameters");
    let rank = inner.setting("rank", args.rank, 8)?;
    let rank = u32::try_from(rank)
        .ok()
        .filter(|rank| (1..=4096).contains(rank))
        .ok_or_else(|| Complaint::usage(format!("`--rank` must be from 1 to 4096, and is {rank}")))?;
    let scale = not_negative("--scale", inner.setting("scale", args.scale, 20.0)?)?;
    let dropout = inner.setting("dropout", args.dropout, 0.0)?;
    if !(0.0..1.0).contains(&dropout) {
        return Err(Complaint::usage(format!(
            "`--dropout` must be at least 0 and below 1, and is {dropout}"
        )));
    }
    let keys: Option<Vec<String>> = inner.given("keys", None)?;
    if let Some(name) = inner.unknown().next() {
        let hint = if name == "alpha" {
            "mlx-lm's adapters have a `scale`, which is alpha / rank"
        } else {
            "rank, scale, dropout and keys are"
        };
        return Err(Complaint::usage(format!("`lora_parameters.{name}` is unknown")).hint(hint));
    }
    let mut settled = std::mem::take(&mut inner.settled);
    if keys.is_none() {
        settled.remove("keys");
    }
    layers.settled.insert("lora_parameters".to_owned(), Value::Object(settled));
    let policy = layers.setting("rank_policy", args.rank_policy.clone(), "constant".to_owned())?;
    let options = AdapterOptions {
        rank,
        policy: match policy.as_str() {
            "constant" => RankPolicy::Constant,
            "by_bits" => RankPolicy::ByBits,
            "by_kl" => RankPolicy::ByKl(BTreeMap::new()),
            other => return Err(one_of("--rank-policy", other, "constant, by_bits or by_kl")),
        },
        scale,
        rank_stabilized: layers.switch("rs_lora", args.rs_lora)?,
        dropout,
        keys,
    };
    Ok((options, policy))
}

fn batch_options(
    args: &TrainArgs,
    layers: &mut Layers,
    objective: &Objective,
    warnings: &mut Warnings,
) -> Result<BatchOptions, Complaint> {
    let length = layers.setting("max_seq_length", args.max_seq_length, 2048)?;
    if !(2..=1 << 20).contains(&length) {
        return Err(Complaint::usage(format!(
            "`--max-seq-length` must be from 2 to 1048576, and is {length}"
        )));
    }
    let rows = layers.setting("batch_size", args.batch_size, 4)?;
    if !(1..=4096).contains(&rows) {
        return Err(Complaint::usage(format!("`--batch-size` must be from 1 to 4096, and is {rows}")));
    }
    let packing = layers.switch("packing", args.packing)?;
    if packing && objective.takes_pairs() {
        return Err(Complaint::usage(format!("`--packing` is for sft, not for {}", objective.name())));
    }
    let no_prefix = layers.switch("no_prefix", args.no_prefix)?;
    if args.no_prefix && rows > 1 {
        warnings.push("`--no-prefix` does nothing with a batch of several pairs".to_owned());
    }
    let by_length = layers.switch("sort_by_length", args.sort_by_length)?;
    Ok(BatchOptions {
        size: size(rows),
        max_length: size(length),
        grouping: if by_length { Grouping::Length } else { Grouping::File },
        packing,
        prefix_sharing: objective.takes_pairs() && rows == 1 && !no_prefix,
    })
}

fn memory(args: &TrainArgs, layers: &mut Layers) -> Result<MemoryOptions, Complaint> {
    let segment = layers.given("segment_size", args.seg)?;
    let each = layers.switch("grad_checkpoint", args.grad_checkpoint)?;
    // mlx-lm computes all logits at once, and sums in that order.
    let default = if args.numerics.levers.l1 { 0 } else { 512 };
    let chunk = if args.no_flash { Some(0) } else { args.head_chunk };
    let chunk = layers.setting("head_chunk", chunk, default)?;
    let segment = match (args.no_segment, segment) {
        (true, _) => None,
        (false, Some(layers)) => Some(layers).filter(|layers| *layers > 0),
        (false, None) => each.then_some(1),
    };
    Ok(MemoryOptions { segment: segment.map(size), head_chunk: Some(size(chunk)).filter(|chunk| *chunk > 0) })
}

fn optimizer(args: &TrainArgs, layers: &mut Layers) -> Result<Kind, Complaint> {
    let name = layers.setting("optimizer", args.optimizer.clone(), "adam".to_owned())?;
    let blocks: Map<String, Value> = layers.setting("optimizer_config", None, Map::new())?;
    let block = blocks.get(&name).and_then(Value::as_object).cloned().unwrap_or_default();
    let mut own = Layers::new(block, &format!("optimizer_config.{name}"));
    let decay: Option<f64> = layers.given("weight_decay", args.weight_decay)?;
    let decay = decay.map(|decay| not_negative("--weight-decay", decay)).transpose()?;
    let kind = match name.to_lowercase().as_str() {
        "adam" | "adamw" => {
            let betas: [f64; 2] = own.setting("betas", None, [0.9, 0.999])?;
            if !betas.iter().all(|beta| (0.0..1.0).contains(beta)) {
                return Err(Complaint::usage(format!("`optimizer_config.{name}.betas` must lie in [0, 1)")));
            }
            let adam = Adam {
                betas: (betas[0], betas[1]),
                eps: not_negative("eps", own.setting("eps", None, 1e-8)?)? as f32,
                bias_correction: own.switch("bias_correction", false)?,
            };
            match (name.to_lowercase().as_str(), decay) {
                ("adam", None) => Kind::Adam(adam),
                // Decay needs the optimizer that has it.
                (_, decay) => Kind::AdamW(AdamW {
                    adam,
                    weight_decay: own.setting("weight_decay", decay, 0.01)? as f32,
                }),
            }
        }
        "muon" => {
            let default = Muon::default();
            Kind::Muon(Muon {
                momentum: own.setting("momentum", None, default.momentum)?,
                weight_decay: own.setting("weight_decay", decay, 0.01)? as f32,
                nesterov: own.setting("nesterov", None, default.nesterov)?,
                ns_steps: own.setting("ns_steps", None, default.ns_steps)?,
            })
        }
        "sgd" => Kind::Sgd(Sgd {
            momentum: own.setting("momentum", None, 0.0)? as f32,
            weight_decay: own.setting("weight_decay", decay, 0.0)? as f32,
            dampening: own.setting("dampening", None, 0.0)?,
            nesterov: own.switch("nesterov", false)?,
        }),
        "adafactor" => {
            let default = Adafactor::default();
            let eps: [f64; 2] = own.setting("eps", None, [1e-30, 1e-3])?;
            Kind::Adafactor(Adafactor {
                eps: (eps[0] as f32, eps[1] as f32),
                clip_threshold: own.setting("clip_threshold", None, 1.0)? as f32,
                decay_rate: own.setting("decay_rate", None, -0.8)? as f32,
                beta_1: own.given("beta_1", None)?,
                weight_decay: own.setting("weight_decay", decay, 0.0)? as f32,
                scale_parameter: own.setting("scale_parameter", None, default.scale_parameter)?,
                relative_step: own.setting("relative_step", None, default.relative_step)?,
                warmup_init: own.setting("warmup_init", None, default.warmup_init)?,
            })
        }
        other => return Err(one_of("--optimizer", other, "adam, adamw, muon, sgd or adafactor")),
    };
    match own.unknown().next() {
        Some(unknown) => Err(Complaint::usage(format!("`optimizer_config.{name}.{unknown}` is unknown"))),
        None => Ok(kind),
    }
}

fn schedule(args: &TrainArgs, layers: &mut Layers, updates: u64) -> Result<Schedule, Complaint> {
    let rate = not_negative("--learning-rate", layers.setting("learning_rate", args.learning_rate, 1e-5)?)?;
    let block: Option<Map<String, Value>> = layers.given("lr_schedule", None)?;
    let warmup = layers.setting("warmup", args.warmup, 0)?;
    let name = layers.setting("schedule", args.schedule.clone(), "constant".to_owned())?;
    let said = |error: mlx_bun::train::optimizers::ScheduleError| Complaint::usage(error.to_string());
    if let (Some(block), None, None) = (block, &args.schedule, args.warmup) {
        let mut block = Layers::new(block, "lr_schedule");
        let name: String = block.setting("name", None, String::new())?;
        let arguments: Vec<Value> = block.setting("arguments", None, Vec::new())?;
        let number =
            |value: &Value| value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap_or(f64::NAN);
        let arguments: Vec<f64> = arguments.iter().map(number).collect();
        let (warmup, init) = (block.setting("warmup", None, 0)?, block.setting("warmup_init", None, 0.0)?);
        return Schedule::from_arguments(&name, &arguments, warmup, init).map_err(said);
    }
    let left = updates.saturating_sub(warmup).max(1);
    let decay = match name.as_str() {
        "constant" => Decay::Constant { rate },
        "cosine" => Decay::Cosine { init: rate, steps: left, end: rate / 10.0 },
        "linear" => Decay::Linear { init: rate, end: 0.0, steps: left },
        other => return Err(one_of("--schedule", other, "constant, cosine or linear")),
    };
    Schedule::new(decay, warmup, 0.0).map_err(said)
}

/// What adapter_config.json says beside the settings: what mlx-lm needs to load the adapter.
pub fn config_record(
    settings: &Settings,
    model: &str,
    num_layers: i64,
    ranks: &BTreeMap<String, i32>,
) -> Map<String, Value> {
    let mut record = settings.record.clone();
    if settings.adapter.rank_stabilized && settings.adapter.policy == RankPolicy::Constant {
        // mlx-lm knows no rsLoRA, and divides nothing.
        let scale = settings.adapter.scale / f64::from(settings.adapter.rank).sqrt();
        if let Some(Value::Object(block)) = record.get_mut("lora_parameters") {
            block.insert("scale".to_owned(), json!(scale));
        }
        record.insert("rs_lora".to_owned(), json!(false));
    }
    record.insert("model".to_owned(), json!(model));
    record.insert("num_layers".to_owned(), json!(num_layers));
    record.insert("fine_tune_type".to_owned(), json!(settings.tuning.name()));
    record.insert("mlx_bun".to_owned(), json!({"rank_policy": settings.policy, "applied_ranks": ranks}));
    record
}
