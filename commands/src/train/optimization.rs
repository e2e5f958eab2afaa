//! Settings of the optimizer and of its learning rate.

use mlx_bun::train::optimizers::{Adafactor, Adam, AdamW, Decay, Kind, Muon, Schedule, Sgd};
use serde_json::{Map, Value};

use super::args::TrainArgs;
use super::layers::Layers;
use super::settings::{not_negative, one_of};
use crate::args::Warnings;
use crate::error::Complaint;

pub fn optimizer(args: &TrainArgs, layers: &mut Layers) -> Result<Kind, Complaint> {
    let name = layers.setting("optimizer", args.optimizer.clone(), "adam".to_owned())?;
    let blocks: Map<String, Value> = layers.setting("optimizer_config", None, Map::new())?;
    let block = match blocks.get(&name.to_lowercase()).or(blocks.get(&name)) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(block)) => block.clone(),
        Some(_) => {
            return Err(Complaint::usage(format!("`optimizer_config.{name}` must hold `name: value` lines")));
        }
    };
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

pub fn schedule(
    args: &TrainArgs,
    layers: &mut Layers,
    updates: u64,
    warnings: &mut Warnings,
) -> Result<Schedule, Complaint> {
    let rate = not_negative("--learning-rate", layers.setting("learning_rate", args.learning_rate, 1e-5)?)?;
    let block: Option<Map<String, Value>> = layers.given("lr_schedule", None)?;
    let warmup = layers.setting("warmup", args.warmup, 0)?;
    let name = layers.setting("schedule", args.schedule.clone(), "constant".to_owned())?;
    let said = |error: mlx_bun::train::optimizers::ScheduleError| Complaint::usage(error.to_string());
    let typed = [
        ("--learning-rate", args.learning_rate.is_some()),
        ("--schedule", args.schedule.is_some()),
        ("--warmup", args.warmup.is_some()),
    ];
    let typed = typed.into_iter().find_map(|(flag, typed)| typed.then_some(flag));
    if let (Some(_), Some(flag)) = (&block, typed) {
        warnings.push(format!("`lr_schedule` does nothing, as `{flag}` was given"));
        layers.settled.insert("lr_schedule".to_owned(), Value::Null);
    }
    if let (Some(block), None) = (block, typed) {
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
