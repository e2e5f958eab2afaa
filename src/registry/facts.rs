//! What can be known about a model from its config and the headers of its weights.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::model::{Model, Tier};
use crate::checkpoint::gguf;
use crate::checkpoint::hub_cache::missing_files;
use crate::checkpoint::safetensors::SafetensorsFile;
use crate::checkpoint::{Config, ElementType, Tensor};

/// Weights of the vision and audio towers, apart from the language model's.
pub(super) const SIDECAR: &str = "optiq_vision.safetensors";
const FRONT_MATTER: u64 = 4096;
const LONGEST_TEMPLATE: u64 = 16 << 20;
const EXPERTS: &str = ".experts.";

/// What a snapshot's directory holds. `usable` says of a path whether it may be read.
///
/// # Errors
/// Why it is no model: one line.
pub(super) fn of_directory(
    directory: &Path,
    repo_id: &str,
    usable: &dyn Fn(&Path) -> bool,
) -> Result<Model, String> {
    let config = directory.join("config.json");
    if is_dangling(&config) {
        let (repo_id, path) = (repo_id.to_owned(), directory.to_owned());
        let model_type = "unknown".to_owned();
        return Ok(Model { repo_id, path, model_type, tier: Tier::Unsupported, ..Model::default() });
    }
    if !usable(&config) {
        return Err("config.json is not there or leads out of the cache".to_owned());
    }
    let config = Config::read(directory).map_err(|error| error.to_string())?;
    let mut model = of_config(&config, repo_id);
    model.path = directory.to_owned();
    let mut weights = Weights::default();
    let (mut files, mut dangling) = (0, false);
    for name in safetensors_in(directory)? {
        let path = directory.join(&name);
        if !usable(&path) {
            model.complete = false;
            dangling |= is_dangling(&path);
            continue;
        }
        let size = fs::metadata(&path).map(|metadata| metadata.len()).unwrap_or_default();
        let header = SafetensorsFile::open(&path);
        if name == SIDECAR {
            model.sidecar_bytes = size;
            model.has_vision_sidecar = true;
            model.has_audio_tower =
                header.is_ok_and(|file| file.tensors().any(|(name, _)| name.contains("audio_tower.")));
            continue;
        }
        files += 1;
        model.size_bytes += size;
        match header {
            Ok(file) => weights.add(&file),
            Err(_) => model.complete = false,
        }
    }
    if files == 0 && (dangling || has_unfinished_download(directory)) {
        model.complete = false;
    } else if files == 0 {
        return Err("it has no .safetensors file".to_owned());
    }
    model.experts_bytes = weights.experts;
    model.param_count = indexed_parameters(directory).or(Some(weights.parameters()));
    model.complete &= missing_files(directory).is_ok_and(|missing| missing.is_empty());
    model.has_kv_config = usable(&directory.join("kv_config.json"));
    let template = ["chat_template.jinja", "tokenizer_config.json"].map(|name| directory.join(name));
    model.has_tool_template =
        template.iter().any(|path| usable(path) && text(path, LONGEST_TEMPLATE).contains("tool_call"));
    let readme = directory.join("README.md");
    model.license = if usable(&readme) { license(&text(&readme, FRONT_MATTER)) } else { None };
    Ok(model)
}

/// What a GGUF file holds.
///
/// # Errors
/// Why it is no model: one line.
pub(super) fn of_gguf(file: &Path, repo_id: &str) -> Result<Model, String> {
    let summary = gguf::summarize(file).map_err(|error| error.to_string())?;
    let config = Config::from_value(Value::Object(summary.config), "the GGUF file");
    let mut model = of_config(&config.map_err(|error| error.to_string())?, repo_id);
    model.path = file.to_owned();
    model.size_bytes = fs::metadata(file).map(|metadata| metadata.len()).unwrap_or_default();
    model.param_count = Some(summary.parameters);
    model.has_tool_template = summary.chat_template.is_some_and(|template| template.contains("tool_call"));
    Ok(model)
}

fn of_config(config: &Config, repo_id: &str) -> Model {
    let (root, text) = (config.root(), config.text());
    let number = |name: &str| text.get(name).or_else(|| root.get(name)).and_then(Value::as_u64);
    let quantization = ["quantization", "quantization_config"]
        .iter()
        .find_map(|name| root.get(*name).or_else(|| text.get(*name)))
        .filter(|value| value.is_object());
    let field = |name: &str| quantization.and_then(|quantization| quantization.get(name));
    let small = |name: &str| field(name).and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok());
    let mode = || field("mode").and_then(Value::as_str).unwrap_or("affine").to_owned();
    let vision =
        root.get("vision_config").and_then(|vision| vision.get("model_type")).and_then(Value::as_str);
    Model {
        repo_id: repo_id.to_owned(),
        model_type: config.model_type().unwrap_or("unknown").to_owned(),
        tier: config.family().map_or(Tier::Unsupported, |family| Tier::of(family, repo_id)),
        complete: true,
        quant_bits: small("bits"),
        quant_group_size: small("group_size"),
        quant_mode: quantization.map(|_| mode()),
        vision_config_type: vision.filter(|kind| kind.ends_with("_vision")).map(str::to_owned),
        has_audio_config: root.get("audio_config").is_some_and(Value::is_object),
        num_layers: number("num_hidden_layers"),
        hidden_size: number("hidden_size"),
        vocab_size: number("vocab_size"),
        ..Model::default()
    }
}

/// Counts over the headers of all shards.
#[derive(Default)]
struct Weights {
    experts: u64,
    /// Shape and type of each tensor by name.
    tensors: BTreeMap<String, (Vec<usize>, ElementType)>,
}

impl Weights {
    fn add(&mut self, file: &SafetensorsFile) {
        for (name, Tensor { dtype, shape, .. }) in file.tensors() {
            if name.contains(EXPERTS) {
                let bytes = dtype.bytes_of(&shape).unwrap_or_default() as u64;
                self.experts = self.experts.saturating_add(bytes);
            }
            self.tensors.insert(name.to_owned(), (shape, dtype));
        }
    }

    /// Parameters before quantization: packed weights count as what they stand for, scales not at all.
    fn parameters(&self) -> u64 {
        let elements = |shape: &[usize]| shape.iter().map(|&size| size as u64).fold(1, u64::saturating_mul);
        let count = |(name, (shape, dtype)): (&String, &(Vec<usize>, ElementType))| {
            let module = name.strip_suffix(".scales").or_else(|| name.strip_suffix(".biases"));
            if module.is_some_and(|module| self.tensors.contains_key(&format!("{module}.scales"))) {
                return 0;
            }
            let scales =
                name.strip_suffix(".weight").and_then(|module| self.tensors.get(&format!("{module}.scales")));
            match scales {
                Some((scales, _)) if *dtype == ElementType::U32 => {
                    // Bits follow from the groups: the usual sizes are tried for one that makes whole numbers.
                    let groups = scales.last().copied().unwrap_or_default() as u64;
                    let rows = elements(shape.get(..shape.len().saturating_sub(1)).unwrap_or_default());
                    let words = shape.last().copied().unwrap_or_default() as u64;
                    rows.saturating_mul(columns(words, groups))
                }
                _ => elements(shape),
            }
        };
        self.tensors.iter().map(count).fold(0, u64::saturating_add)
    }
}

/// Columns of a row of so many 32-bit words and groups. Several pairs of bits and group size can give the same
/// words; the commonest comes first.
fn columns(words: u64, groups: u64) -> u64 {
    let fits = |(group, bits): &(u64, u64)| groups.saturating_mul(*group).saturating_mul(*bits) == words * 32;
    let pairs = [64, 32, 128, 16].into_iter().flat_map(|group| [4, 8, 3, 6, 5, 2].map(|bits| (group, bits)));
    pairs.into_iter().find(fits).map_or(words.saturating_mul(8), |(group, _)| groups.saturating_mul(group))
}

/// Whether a link is there and what it names is not.
fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && !path.exists()
}

/// Whether weights of a snapshot in a cache are still on their way: an index without files, or a blob half there.
fn has_unfinished_download(snapshot: &Path) -> bool {
    let blobs = snapshot.join("../../blobs");
    let unfinished = |entry: std::io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_some_and(|kind| kind == "incomplete"))
    };
    snapshot.join("model.safetensors.index.json").exists()
        || fs::read_dir(blobs).is_ok_and(|mut entries| entries.any(unfinished))
}

/// `metadata.total_parameters` of the index.
fn indexed_parameters(directory: &Path) -> Option<u64> {
    let text = text(&directory.join("model.safetensors.index.json"), LONGEST_TEMPLATE);
    let index: Value = serde_json::from_str(&text).ok()?;
    index.get("metadata")?.get("total_parameters")?.as_u64()
}

fn safetensors_in(directory: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(directory).map_err(|error| error.to_string())?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    names.sort();
    Ok(names)
}

/// The beginning of a text file; empty when it cannot be read.
fn text(path: &Path, most: u64) -> String {
    let mut bytes = Vec::new();
    let _ = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `license` of a README's front matter; `license_name` when that is "other".
fn license(readme: &str) -> Option<String> {
    let front = readme.strip_prefix("---")?;
    let front = front.split("\n---").next()?;
    let field = |name: &str| {
        let mut lines = front.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let value = lines.next()?.trim().trim_matches(['"', '\'']).to_owned();
        Some(value).filter(|value| !value.is_empty())
    };
    match field("license") {
        Some(license) if license == "other" => field("license_name").or(Some(license)),
        license => license,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_come_from_the_front_matter() {
        assert_eq!(
            license("---\nlanguage: en\nlicense: apache-2.0\n---\ntext").as_deref(),
            Some("apache-2.0")
        );
        let other = "---\nlicense: other\nlicense_name: \"gemma\"\n---\n";
        assert_eq!(license(other).as_deref(), Some("gemma"));
        assert_eq!(license("---\nlicense: other\n---\n").as_deref(), Some("other"));
        assert_eq!(license("---\nx: y\n---\nlicense: mit\n"), None);
        assert_eq!(license("license: mit"), None);
    }

    #[test]
    fn packed_columns_are_unpacked() {
        // words = columns * bits / 32
        for (bits, group, expected) in
            [(4, 64, 2048), (8, 64, 2048), (3, 64, 2048), (6, 128, 2048), (5, 32, 2048)]
        {
            let (words, groups) = (expected * bits / 32, expected / group);
            let got = columns(words, groups);
            // Four bits in groups of 128 look like eight in groups of 64.
            assert!(got == expected || got * 2 == expected || got == expected * 2, "{bits} {group}: {got}");
        }
        assert_eq!(columns(256, 32), 2048);
    }
}
