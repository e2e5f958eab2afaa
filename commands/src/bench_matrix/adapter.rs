//! A LoRA adapter of random factors for any model, to measure what an adapter costs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};
use mlx_bun::checkpoint::safetensors_writer::write_safetensors;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::checkpoint::{Config, ElementType, gguf};
use serde_json::{Value, json};

use crate::rng::Rng;

const RANK: usize = 8;
const SCALE: f64 = 2.0;
/// Small beside weights, so that replies stay sensible.
const SIZE: f32 = 0.002;

/// Sizes of a decoder's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    layers: usize,
    hidden: usize,
    queries: usize,
    values: usize,
    /// Features a head.
    pub head_dim: usize,
}

impl Shape {
    /// Of a model's config.
    ///
    /// # Errors
    /// It cannot be read, or says no sizes.
    pub fn of(source: &ModelSource) -> anyhow::Result<Self> {
        let config = match source {
            ModelSource::Snapshot(folder) => Config::read(folder)?.text().clone(),
            ModelSource::Gguf(file) => Value::Object(gguf::summarize(file)?.config),
        };
        Self::of_config(&config)
    }

    fn of_config(config: &Value) -> anyhow::Result<Self> {
        let number = |field: &str| config[field].as_u64().and_then(|number| usize::try_from(number).ok());
        let wanted =
            |field: &str| number(field).filter(|n| *n > 0).with_context(|| format!("config: no `{field}`"));
        let (layers, hidden) = (wanted("num_hidden_layers")?, wanted("hidden_size")?);
        let heads = wanted("num_attention_heads")?;
        let head_dim = number("head_dim").filter(|n| *n > 0).unwrap_or(hidden / heads);
        let kv_heads = number("num_key_value_heads").unwrap_or(heads);
        let (Some(queries), Some(values)) = (heads.checked_mul(head_dim), kv_heads.checked_mul(head_dim))
        else {
            bail!("config: sizes that are too large");
        };
        Ok(Self { layers, hidden, queries, values, head_dim })
    }
}

/// Writes an adapter on the queries and values of every layer, in mlx-lm's layout.
///
/// # Errors
/// The folder cannot be written.
pub fn write(folder: &Path, shape: Shape) -> anyhow::Result<()> {
    let mut rng = Rng::new(17);
    let mut numbers = |count: usize| -> Vec<u8> {
        (0..count).flat_map(|_| ((rng.unit() as f32 * 2.0 - 1.0) * SIZE).to_le_bytes()).collect()
    };
    let mut tensors: Vec<(String, [usize; 2], Vec<u8>)> = Vec::new();
    for layer in 0..shape.layers {
        for (module, out) in [("q_proj", shape.queries), ("v_proj", shape.values)] {
            let name = format!("model.layers.{layer}.self_attn.{module}");
            tensors.push((format!("{name}.lora_a"), [shape.hidden, RANK], numbers(shape.hidden * RANK)));
            tensors.push((format!("{name}.lora_b"), [RANK, out], numbers(RANK * out)));
        }
    }
    let config = json!({
        "fine_tune_type": "lora", "num_layers": shape.layers,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
    });
    fs::write(folder.join("adapter_config.json"), config.to_string())?;
    let tensors =
        tensors.iter().map(|(name, shape, bytes)| (name.as_str(), ElementType::F32, shape.as_slice(), bytes));
    write_safetensors(&folder.join("adapters.safetensors"), tensors, &BTreeMap::new())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use mlx_bun::lora::Adapter;

    use super::super::temp_folder::TempFolder;
    use super::*;

    #[test]
    fn shapes_come_from_the_config() {
        let config = json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2});
        let shape = Shape::of_config(&config).unwrap();
        assert_eq!(shape, Shape { layers: 2, hidden: 64, queries: 64, values: 32, head_dim: 16 });
        let wide =
            json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32});
        assert_eq!(Shape::of_config(&wide).unwrap().queries, 128);
        assert!(Shape::of_config(&json!({"num_hidden_layers": 2})).is_err());
        assert!(
            Shape::of_config(&json!({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 0}))
                .is_err()
        );
    }

    #[test]
    fn the_adapter_fits_the_model_it_is_made_for() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints/llama-f32");
        let source = ModelSource::Snapshot(model);
        let folder = TempFolder::new().unwrap();
        write(folder.path(), Shape::of(&source).unwrap()).unwrap();
        let adapter = Adapter::open(folder.path()).unwrap();
        mlx_bun::load::load_adapted(&source, Some(adapter)).unwrap();
    }
}
