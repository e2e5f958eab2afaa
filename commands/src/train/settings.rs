//! What was asked for, checked and complete.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mlx_bun::train::batches::{BatchOptions, Grouping};
use mlx_bun::train::dataset::{Learn, Preparation};
use mlx_bun::train::losses::{Objective, SftScope};
use mlx_bun::train::network::MemoryOptions;
use mlx_bun::train::optimizers::{Kind, Schedule};
use mlx_bun::train::parameters::{AdapterOptions, AdapterShape, RankPolicy, Tuning};
use mlx_bun::train::trainer::TrainOptions;
use serde_json::{Map, Value, json};

use super::args::TrainArgs;
use super::layers::Layers;
use super::optimization::{optimizer, schedule};
use super::{config_file, recorded};
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
    /// The model of the run that goes on.
    pub resume_model: Option<String>,
    pub resume_adapter_file: Option<PathBuf>,
    pub export_peft: Option<PathBuf>,
    /// All settings, for adapter_config.json and for whoever goes on with the run.
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
        let resume = args.resume.clone().map(|folder| {
            folder.unwrap_or_else(|| typed_path.clone().unwrap_or_else(|| "adapters".to_owned()).into())
        });
        let (recorded, mut name) = match &resume {
            Some(folder) => recorded::read(folder)?,
            None => (Map::new(), String::new()),
        };
        let mut file = recorded.clone();
        if let Some(given) = &args.config {
            file.extend(config_file::read(given)?);
            name = given.display().to_string();
        }
        if let Some(folder) = &resume {
            refuse_beside_resume(args, folder)?;
        }
        let mut layers = Layers::new(file, &name);
        let model = args.model.resolve(args.model_argument.clone(), false)?;
        let model = layers.given("model", model)?.or(args.model.resolve(None, true)?);
        let data: Option<String> = layers.given("data", args.data.as_deref().map(absolute))?;
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
        meaningless(args, &objective, tuning, warnings);
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
        let (train, test) = what_to_do(args, &mut layers, resume.is_some())?;
        accumulates(&options, warnings)?;
        if args.export_peft.is_some() && tuning == Tuning::Full {
            return Err(
                Complaint::usage("`--export-peft` is for lora and dora, not for whole weights").into()
            );
        }
        let mut settings = Self {
            model,
            data: PathBuf::from(absolute(&data)),
            preparation: Preparation { learn, max_length: options.batch.max_length },
            valid_split: size(layers.setting("valid_split", args.valid_split, 0)?),
            valid_most: layers.given("val_size", args.val_size)?.map(size),
            num_layers: layers.given("num_layers", args.num_layers)?.map(layer_count).transpose()?,
            lora_plus_ratio,
            optimizer: optimizer(args, &mut layers)?,
            schedule: schedule(args, &mut layers, iterations.div_ceil(options.accumulation), warnings)?,
            memory: memory(args, &mut layers)?,
            test_batches: batches("--test-batches", layers.setting("test_batches", args.test_batches, 500)?)?,
            resume_adapter_file: layers
                .given("resume_adapter_file", args.resume_adapter_file.clone())?
                .map(PathBuf::from)
                .filter(|_| resume.is_none()),
            objective,
            tuning,
            adapter,
            policy,
            options,
            train,
            test,
            adapter_path,
            resume_model: recorded.get("model").and_then(Value::as_str).map(str::to_owned),
            resume,
            export_peft: args.export_peft.clone(),
            record: Map::new(),
        };
        if let Some(name) = layers.unknown().find(|name| REFUSED.contains(name)) {
            return Err(Complaint::usage(format!(
                "`{name}` is not supported: data and figures stay on this machine"
            ))
            .into());
        }
        for unknown in layers.unknown().filter(|name| !IGNORED.contains(name)) {
            let meant = config_file::nearest(unknown, layers.settled.keys().map(String::as_str));
            let meant = meant.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
            warnings.push(format!("{name}: nothing here is called `{unknown}`{meant}"));
        }
        settings.record = layers.settled;
        settings.record.insert("adapter_path".to_owned(), json!(settings.adapter_path));
        recorded::compare(&recorded, &settings.record, warnings)?;
        Ok(settings)
    }
}

/// What `--resume` decides already.
fn refuse_beside_resume(args: &TrainArgs, folder: &std::path::Path) -> Result<(), Complaint> {
    let same = |path: &str| absolute(path) == absolute(&folder.to_string_lossy());
    if let Some(path) = args.adapter_path.as_deref().filter(|path| !same(path)) {
        let folder = folder.display();
        return Err(Complaint::usage(format!(
            "a run goes on where it was saved, in `{folder}`, not in `{path}`"
        ))
        .hint("leave --adapter-path out, or copy the folder and resume the copy"));
    }
    if args.resume_adapter_file.is_some() {
        return Err(Complaint::usage(
            "`--resume-adapter-file` begins a run with an adapter's values, and `--resume` goes on with a run",
        )
        .hint("leave one of them out"));
    }
    Ok(())
}

/// A path from the root, if there is something: a run goes on from other folders, too.
fn absolute(path: &str) -> String {
    let found = std::path::Path::new(path).canonicalize().ok();
    found.and_then(|path| path.to_str().map(str::to_owned)).unwrap_or_else(|| path.to_owned())
}

/// Whether to train and whether to test. Training is the default, unless there is another task or a file says no.
fn what_to_do(args: &TrainArgs, layers: &mut Layers, resumes: bool) -> Result<(bool, bool), Complaint> {
    let train: Option<bool> = layers.given("train", args.train.then_some(true))?;
    let test = layers.switch("test", args.test)?;
    let train = resumes || train.unwrap_or(!test);
    if !train && !test {
        return Err(Complaint::usage(
            "there is nothing to do: the config says `train: false`, and `test` is not set",
        )
        .hint("add --train or --test"));
    }
    layers.settled.insert("train".to_owned(), json!(train));
    Ok((train, test))
}

/// mlx-lm takes 0 and any negative number for all layers.
fn layer_count(number: i64) -> Result<i64, Complaint> {
    match number {
        -1.. => Ok(number),
        _ => Err(Complaint::usage(format!(
            "`--num-layers` must be at least 1, or -1 for all, and is {number}"
        ))),
    }
}

/// Every update takes so many steps, and an unfinished one changes nothing.
fn accumulates(options: &TrainOptions, warnings: &mut Warnings) -> Result<(), Complaint> {
    let (steps, each) = (options.iterations, options.accumulation);
    if steps < each {
        return Err(Complaint::usage(format!(
            "nothing would be learned: an update takes {each} steps (`--grad-accumulation-steps`), and there are {steps}"
        ))
        .hint("raise --iters"));
    }
    match steps % each {
        0 => {}
        left => warnings.push(format!(
            "the last {left} steps change nothing: an update takes {each}, and `--iters {steps}` is no multiple of that"
        )),
    }
    Ok(())
}

/// Flags that were typed and do nothing.
fn meaningless(args: &TrainArgs, objective: &Objective, tuning: Tuning, warnings: &mut Warnings) {
    let full = tuning == Tuning::Full;
    let rewards =
        matches!(objective, Objective::Dpo { .. } | Objective::Kto { .. } | Objective::Simpo { .. });
    let odds = matches!(objective, Objective::Orpo { .. });
    let (method, kind) =
        (format!("--method {}", objective.name()), format!("--fine-tune-type {}", tuning.name()));
    let flags = [
        ("--beta", args.beta.is_some() && !rewards, &method),
        ("--gamma", args.gamma.is_some() && !matches!(objective, Objective::Simpo { .. }), &method),
        ("--lambda", args.lambda.is_some() && !odds, &method),
        ("--sft-scope", args.sft_scope.is_some() && !odds, &method),
        ("--mask-prompt", args.mask_prompt && objective.takes_pairs(), &method),
        ("--no-prefix", args.no_prefix && !objective.takes_pairs(), &method),
        ("--rank", args.rank.is_some() && full, &kind),
        ("--scale", args.scale.is_some() && full, &kind),
        ("--dropout", args.dropout.is_some() && full, &kind),
        ("--rank-policy", args.rank_policy.is_some() && full, &kind),
        ("--rs-lora", args.rs_lora && full, &kind),
        ("--lora-plus-ratio", args.lora_plus_ratio.is_some() && full, &kind),
    ];
    for (flag, _, because) in flags.into_iter().filter(|(_, idle, _)| *idle) {
        warnings.push(format!("`{flag}` does nothing with `{because}`"));
    }
}

pub(super) fn one_of(flag: &str, given: &str, known: &str) -> Complaint {
    Complaint::usage(format!("`{flag} {given}` is unknown; use {known}"))
}

fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn at_least_one(flag: &str, number: u64) -> Result<u64, Complaint> {
    if number == 0 { Err(Complaint::usage(format!("`{flag}` must be at least 1"))) } else { Ok(number) }
}

pub(super) fn not_negative(flag: &str, number: f64) -> Result<f64, Complaint> {
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

/// Layers of a segment: much less memory for little more time (docs/train.md has figures).
const DEFAULT_SEGMENT: u64 = 4;

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
        (false, None) if each => Some(1),
        // mlx-lm keeps everything unless it is told not to.
        (false, None) => (!args.numerics.levers.l1).then_some(DEFAULT_SEGMENT),
    };
    Ok(MemoryOptions { segment: segment.map(size), head_chunk: Some(size(chunk)).filter(|chunk| *chunk > 0) })
}

/// What adapter_config.json says: the settings, and of the adapter what its files have, which know one rank and one scale.
pub fn config_record(
    settings: &Settings,
    num_layers: i64,
    shape: Option<AdapterShape>,
    ranks: &BTreeMap<String, i32>,
) -> Map<String, Value> {
    let mut record = settings.record.clone();
    if let Some(shape) = shape {
        if let Some(Value::Object(block)) = record.get_mut("lora_parameters") {
            block.insert("rank".to_owned(), json!(shape.rank));
            block.insert("scale".to_owned(), json!(shape.scale));
        }
        // mlx-lm knows no rsLoRA, and divides nothing.
        record.insert("rs_lora".to_owned(), json!(false));
    }
    record.insert("num_layers".to_owned(), json!(num_layers));
    record.insert("fine_tune_type".to_owned(), json!(settings.tuning.name()));
    record.insert("mlx_bun".to_owned(), json!({"rank_policy": settings.policy, "applied_ranks": ranks}));
    record
}
