//! From settings to a run that can begin: the model, its rows, what is trained of it.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::Array;
use mlx_bun::mlx::random::RandomState;
use mlx_bun::models::Model;
use mlx_bun::models::pieces::Pieces;
use mlx_bun::tokenizer::Tokenizer;
use mlx_bun::tokenizer::chat_template::ChatTemplates;
use mlx_bun::train::dataset::{self, Content, DataError, Example, Prepared, Row, Splits, prepare};
use mlx_bun::train::network::Network;
use mlx_bun::train::optimizers::Optimizer;
use mlx_bun::train::parameters::{AdapterOptions, Parameters, RankPolicy, Tuning};
use mlx_bun::train::rows::check_rows;
use mlx_bun::train::trainer::Trainer;
use serde_json::Value;

use super::recorded;
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
    pub model: Box<dyn Model>,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Its repository, or its path from the root.
    pub path: String,
    /// Where its files are.
    folder: PathBuf,
}

/// What makes tokens of rows. A vocabulary takes tens of megabytes, which training can do without.
pub struct Words {
    tokenizer: Tokenizer,
    chat_templates: ChatTemplates,
}

/// Loads the model, perhaps with an adapter.
///
/// # Errors
/// There is no such model, it cannot be used, or it is not that of the run that goes on.
pub fn load(
    settings: &Settings,
    adapter: Option<Adapter>,
    printer: &Printer,
) -> anyhow::Result<(Base, Words)> {
    let resolved = source_model(settings.model.as_deref())?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    let folder = resolved.source.path().to_owned();
    let path = resolved
        .repo_id
        .clone()
        .unwrap_or_else(|| folder.canonicalize().unwrap_or_else(|_| folder.clone()).display().to_string());
    if let Some(recorded) = &settings.resume_model {
        recorded::check_model(recorded, &path)?;
    }
    let loaded = crate::load::load_adapted(&resolved.source, adapter, printer)?;
    let words = Words { tokenizer: loaded.tokenizer, chat_templates: loaded.chat_templates };
    Ok((Base { model: loaded.model, weight_bytes: loaded.weight_bytes, path, folder }, words))
}

/// What a run will write into can be written into, and is not the same twice. Makes nothing that stays.
///
/// # Errors
/// Names the folder.
pub fn check_folders(settings: &Settings) -> Result<(), Complaint> {
    writable(&settings.adapter_path)?;
    let Some(export) = &settings.export_peft else { return Ok(()) };
    let found = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if found(export) == found(&settings.adapter_path) {
        return Err(Complaint::usage(format!(
            "`--export-peft {}` is the adapter's own folder, whose adapter_config.json would be replaced",
            export.display()
        ))
        .hint("name another folder"));
    }
    writable(export)
}

fn writable(folder: &Path) -> Result<(), Complaint> {
    let here = Path::new(".");
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(here);
    let existing = if existing.as_os_str().is_empty() { here } else { existing };
    let wrong =
        |problem: &str| Complaint::failure(format!("cannot write into `{}`: {problem}", folder.display()));
    if !existing.is_dir() {
        return Err(wrong(&format!("`{}` is no folder", existing.display())));
    }
    let probe = existing.join(format!(".mlx-bun-{}.probe", std::process::id()));
    match OpenOptions::new().write(true).create_new(true).open(&probe) {
        Ok(_) => {
            let _ = std::fs::remove_file(&probe);
            Ok(())
        }
        Err(error) => Err(wrong(&error.to_string())),
    }
}

/// There are enough rows for a batch of each kind.
///
/// # Errors
/// Names the rows that are too few.
pub fn check_batches(settings: &Settings, data: &Data) -> anyhow::Result<()> {
    let batch = &settings.options.batch;
    if settings.train {
        check_rows("train", &data.train.examples, batch)?;
        if !data.valid.examples.is_empty() {
            check_rows("valid", &data.valid.examples, batch)?;
        }
    }
    if settings.test {
        check_rows("test", &data.test.examples, batch)?;
    }
    Ok(())
}

/// Reads the rows and makes tokens of them.
///
/// # Errors
/// Names the file and line of a bad row.
pub fn data(settings: &Settings, base: &Base, words: &Words, printer: &Printer) -> anyhow::Result<Data> {
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
        let ready = prepare(rows, &words.tokenizer, &words.chat_templates, settings.preparation)?;
        warn(&ready, name, settings, printer);
        check_ids(&ready.examples, base.model.vocab_size())?;
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
pub fn network(
    settings: &Settings,
    base: &Base,
    printer: &Printer,
) -> anyhow::Result<(Network, Vec<Array>, RandomState, i64)> {
    let model = &*base.model;
    let pieces = pieces(base)?;
    let layers = pieces.blocks.len();
    let num_layers =
        settings.num_layers.unwrap_or_else(|| DEFAULT_LAYERS.min(i64::try_from(layers).unwrap_or(i64::MAX)));
    let mut keys = RandomState::from_seed(u64::from(settings.options.seed))?;
    let (parameters, mut values) = match settings.tuning {
        Tuning::Full => Parameters::full(&pieces, model.adapters(), num_layers)?,
        tuning => {
            let quantized = pieces.weights().iter().any(|(_, weight)| weight.params().is_some());
            let adapter = with_figures(&settings.adapter, &base.folder, quantized, printer)?;
            Parameters::adapters(tuning, &pieces, model.adapters(), num_layers, &adapter, &mut keys)?
        }
    };
    if let Some(file) = &settings.resume_adapter_file {
        take_values(file, &parameters, &mut values)?;
    }
    Ok((Network::new(pieces, parameters, settings.memory), values, keys, num_layers))
}

/// The model as it is, nothing of it trained.
///
/// # Errors
/// Of its family nothing can be.
pub fn untrained(settings: &Settings, base: &Base) -> Result<Network, Complaint> {
    Ok(Network::new(pieces(base)?, Parameters::none(), settings.memory))
}

fn pieces(base: &Base) -> Result<Pieces, Complaint> {
    base.model.pieces().ok_or_else(|| {
        Complaint::failure("models of this family cannot be trained: their layers cannot be told apart")
    })
}

/// Figures of each module for ranks by divergence.
fn with_figures(
    options: &AdapterOptions,
    model: &Path,
    quantized: bool,
    printer: &Printer,
) -> Result<AdapterOptions, Complaint> {
    let mut options = options.clone();
    if let RankPolicy::ByKl(figures) = &mut options.policy {
        let file = model.join(KL_FILE);
        if !file.is_file() {
            let missing = format!("`--rank-policy by_kl`: the model has no {KL_FILE}");
            if !quantized {
                return Err(Complaint::failure(format!("{missing}, and is not quantized"))
                    .hint("leave --rank-policy out"));
            }
            printer.warning(&format!("{missing}; ranks go by bits"));
        }
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
        let array = narrowed(Array::from_tensor(tensor)?.astype(value.dtype())?, value.shape())?;
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

/// The array without what lies beyond the wanted shape, if that is nothing but zeros: factors of several ranks are stored
/// with the largest.
fn narrowed(array: Array, shape: &[i32]) -> anyhow::Result<Array> {
    let mut cut = array.clone();
    if array.ndim() != shape.len() {
        return Ok(array);
    }
    for (axis, &size) in (0..).zip(shape) {
        let stored = cut.dim(axis);
        if stored > size {
            let beyond = cut.slice(axis, size, stored)?.square()?.sum_all()?.to_f32_vec()?;
            if beyond.iter().any(|sum| *sum != 0.0) {
                return Ok(array);
            }
            cut = cut.slice(axis, 0, size)?;
        }
    }
    Ok(cut.contiguous()?)
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
