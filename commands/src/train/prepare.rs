//! From settings to a run that can begin: the model, its rows, what is trained of it.

use std::collections::BTreeMap;
use std::path::Path;

use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::load::LoadedModel;
use mlx_bun::mlx::Array;
use mlx_bun::mlx::random::RandomState;
use mlx_bun::train::dataset::{self, Content, DataError, Example, Prepared, Row, Splits, prepare};
use mlx_bun::train::network::Network;
use mlx_bun::train::optimizers::Optimizer;
use mlx_bun::train::parameters::{AdapterOptions, Parameters, RankPolicy, Tuning};
use mlx_bun::train::trainer::Trainer;
use serde_json::Value;

use super::settings::Settings;
use crate::convert::source_model;
use crate::error::Complaint;
use crate::printer::Printer;

/// The layers that mlx-lm trains if it is not told.
const DEFAULT_LAYERS: i64 = 16;
/// Figures of what quantizing each module does to the model, in its folder.
const KL_FILE: &str = "optiq_metadata.json";
/// Rows that a warning names before it only counts.
const NAMED: usize = 3;

/// The rows of a run, made ready.
pub struct Data {
    pub train: Prepared,
    pub valid: Prepared,
    pub test: Prepared,
    pub format: &'static str,
}

/// A loaded model and where it lies.
pub struct Base {
    pub loaded: LoadedModel,
    pub path: String,
}

/// Loads the model.
///
/// # Errors
/// There is no such model, or it cannot be used.
pub fn load(settings: &Settings, printer: &Printer) -> anyhow::Result<Base> {
    let resolved = source_model(settings.model.as_deref())?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    let path = resolved.repo_id.clone().unwrap_or_else(|| resolved.source.path().display().to_string());
    Ok(Base { loaded: mlx_bun::load::load(&resolved.source)?, path })
}

/// Reads the rows and makes tokens of them.
///
/// # Errors
/// Names the file and line of a bad row.
pub fn data(settings: &Settings, base: &Base, printer: &Printer) -> anyhow::Result<Data> {
    let path = &settings.data;
    if !path.exists() {
        return Err(Complaint::failure(format!(
            "there is no `{}` here, and data sets of the hub are not read",
            path.display()
        ))
        .hint("give a folder with train.jsonl, or a .jsonl or .parquet file")
        .into());
    }
    let mut splits = dataset::read(path)?;
    if settings.train {
        splits.check_train(path)?;
    }
    if settings.test {
        splits.check_test(path)?;
    }
    split_off(settings, &mut splits)?;
    for row in [&splits.train, &splits.valid, &splits.test].into_iter().flatten() {
        fits_method(settings, row)?;
    }
    let format = splits.format.map_or("none", |format| format.name());
    let ready = |rows: &[Row], name: &str| -> anyhow::Result<Prepared> {
        let loaded = &base.loaded;
        let ready = prepare(rows, &loaded.tokenizer, &loaded.chat_templates, settings.preparation)?;
        warn(&ready, name, settings, printer);
        check_ids(&ready.examples, loaded.model.vocab_size())?;
        Ok(ready)
    };
    let data = Data {
        train: ready(&splits.train, "train")?,
        valid: ready(&splits.valid, "valid")?,
        test: ready(&splits.test, "test")?,
        format,
    };
    if settings.train && data.train.examples.is_empty() {
        return Err(Complaint::failure("no row has anything to learn within --max-seq-length").into());
    }
    if settings.train && data.valid.examples.is_empty() {
        printer.note("There are no validation rows; --valid-split N keeps some");
    }
    Ok(data)
}

/// Keeps the last rows for validation, where none are given.
fn split_off(settings: &Settings, splits: &mut Splits) -> Result<(), Complaint> {
    if splits.valid.is_empty() && settings.valid_split > 0 {
        let rows = splits.train.len();
        let left = rows.checked_sub(settings.valid_split).filter(|left| *left > 0).ok_or_else(|| {
            Complaint::usage(format!(
                "`--valid-split {}` leaves nothing of {rows} rows to learn from",
                settings.valid_split
            ))
        })?;
        splits.valid = splits.train.split_off(left);
    }
    if let Some(most) = settings.valid_most {
        splits.valid.truncate(most);
    }
    Ok(())
}

fn fits_method(settings: &Settings, row: &Row) -> Result<(), DataError> {
    let name = settings.objective.name();
    let problem = match (&row.content, settings.objective.takes_pairs()) {
        (Content::Sample(_), true) => format!("{name} needs rows with `chosen` and `rejected`"),
        (Content::Preference { .. }, false) => {
            format!("a row with `chosen` and `rejected` is for dpo, orpo, simpo or kto, not for {name}")
        }
        _ => return Ok(()),
    };
    Err(DataError::Kind { path: row.file.to_path_buf(), line: row.line, problem })
}

fn warn(ready: &Prepared, name: &str, settings: &Settings, printer: &Printer) {
    let most = settings.preparation.max_length;
    if ready.truncated > 0 {
        printer.warning(&format!(
            "{} {name} rows are longer than {most} tokens and are cut; the longest has {}",
            ready.truncated, ready.longest
        ));
    }
    if !ready.nothing_to_learn.is_empty() {
        let named: Vec<_> = ready.nothing_to_learn.iter().take(NAMED).cloned().collect();
        printer.warning(&format!(
            "{} {name} rows are left out, as nothing is left to learn of them within {most} tokens: {}{}",
            ready.nothing_to_learn.len(),
            named.join("; "),
            if ready.nothing_to_learn.len() > NAMED { "; …" } else { "" }
        ));
    }
    if ready.without_prompt > 0 {
        printer.warning(&format!(
            "{} {name} pairs have no prompt left within {most} tokens",
            ready.without_prompt
        ));
    }
}

fn check_ids(examples: &[Example], vocabulary: i32) -> Result<(), Complaint> {
    let sequences = examples.iter().flat_map(|example| &example.sequences);
    crate::perplexity::check_ids(sequences.map(|sequence| sequence.tokens.as_slice()), vocabulary)
}

/// What is trained, and its first values.
///
/// # Errors
/// The model cannot be trained as asked.
pub fn network(settings: &Settings, base: &Base) -> anyhow::Result<(Network, Vec<Array>, RandomState, i64)> {
    let model = &*base.loaded.model;
    let pieces = model.pieces().ok_or_else(|| {
        Complaint::failure("models of this family cannot be trained: their layers cannot be told apart")
    })?;
    let layers = pieces.blocks.len();
    let num_layers =
        settings.num_layers.unwrap_or_else(|| DEFAULT_LAYERS.min(i64::try_from(layers).unwrap_or(i64::MAX)));
    let mut keys = RandomState::from_seed(u64::from(settings.options.seed))?;
    let (parameters, mut values) = match settings.tuning {
        Tuning::Full => Parameters::full(&pieces, model.adapters(), num_layers)?,
        tuning => {
            let adapter = with_figures(&settings.adapter, Path::new(&base.path))?;
            Parameters::adapters(tuning, &pieces, model.adapters(), num_layers, &adapter, &mut keys)?
        }
    };
    if let Some(file) = &settings.resume_adapter_file {
        take_values(file, &parameters, &mut values)?;
    }
    Ok((Network::new(pieces, parameters, settings.memory), values, keys, num_layers))
}

/// Figures of each module for ranks by divergence.
fn with_figures(options: &AdapterOptions, model: &Path) -> Result<AdapterOptions, Complaint> {
    let mut options = options.clone();
    if let RankPolicy::ByKl(figures) = &mut options.policy {
        let file = model.join(KL_FILE);
        // Without the file, ranks go by bits.
        if let Ok(text) = std::fs::read(&file) {
            let metadata: Value = serde_json::from_slice(&text)
                .map_err(|error| Complaint::failure(format!("{}: {error}", file.display())))?;
            let modules = metadata.get("per_layer").and_then(Value::as_array).into_iter().flatten();
            *figures = modules
                .filter_map(|module| {
                    Some((module.get("name")?.as_str()?.to_owned(), module.get("kl")?.as_f64()?))
                })
                .collect::<BTreeMap<_, _>>();
        }
    }
    Ok(options)
}

/// Begins with the values of an adapter file; arrays that it does not have keep theirs, as in mlx-lm.
fn take_values(file: &Path, parameters: &Parameters, values: &mut [Array]) -> anyhow::Result<()> {
    let stored = SafetensorsFile::open(file)?;
    let tensors: BTreeMap<&str, _> = stored.tensors().collect();
    let mut taken = 0;
    for (name, value) in parameters.names().zip(values) {
        let Some(tensor) = tensors.get(name) else { continue };
        let array = Array::from_tensor(tensor)?.astype(value.dtype())?;
        if array.shape() != value.shape() {
            return Err(Complaint::failure(format!(
                "{}: `{name}` has shape {:?}, and {:?} is needed",
                file.display(),
                array.shape(),
                value.shape()
            ))
            .hint("give the rank, the type and the layers that it was trained with")
            .into());
        }
        *value = array;
        taken += 1;
    }
    if taken == 0 {
        return Err(Complaint::failure(format!("{} has nothing that is trained here", file.display())).into());
    }
    Ok(())
}

/// A run that can begin, or go on.
///
/// # Errors
/// Too few rows, or another run's state.
pub fn trainer(
    settings: &Settings,
    network: Network,
    values: Vec<Array>,
    keys: RandomState,
    data: &mut Data,
) -> anyhow::Result<Trainer> {
    let ratio = settings.lora_plus_ratio as f32;
    let factors = match ratio {
        1.0 => Vec::new(),
        ratio => {
            network.parameters().second_factors().map(|second| if second { ratio } else { 1.0 }).collect()
        }
    };
    let optimizer =
        Optimizer::new(settings.optimizer.clone(), settings.schedule, &values)?.with_factors(factors);
    let train = std::mem::take(&mut data.train.examples);
    let valid = std::mem::take(&mut data.valid.examples);
    let objective = settings.objective.clone();
    let mut trainer =
        Trainer::new(network, values, optimizer, objective, settings.options, train, valid, keys)?;
    if let Some(folder) = &settings.resume {
        trainer.resume(folder)?;
    }
    Ok(trainer)
}
