//! A Hugging Face `config.json` out of GGUF metadata, with the fields that mlx-lm's model files read.

use serde_json::{Map, Value, json};

use super::error::Fault;
use super::header::{Header, TensorInfo};
use super::names::Architecture;
use super::rope;
use super::value::Metadata;

/// Layers of Gemma 3 27B, the one size whose queries are not scaled by the head dimension (llama.cpp's
/// src/models/gemma3.cpp goes by the same number).
const GEMMA3_27B_LAYERS: u64 = 62;
/// What Gemma 3 has where older files leave the keys out.
const GEMMA3_LOCAL_ROPE_BASE: f64 = 10_000.0;
const GEMMA3_WINDOW_PATTERN: u64 = 6;

/// The configuration and the numbers that the conversion of tensors needs.
#[derive(Debug)]
pub struct Configuration {
    /// As config.json would hold it, without `quantization` and token ids.
    pub json: Map<String, Value>,
    /// The architecture.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: u64,
    /// Elements of an attention head.
    pub head_dimension: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub key_value_heads: u64,
    /// Rows of the embedding.
    pub vocabulary: u64,
}

/// Reads the configuration.
///
/// `rope_factors` are the elements of `rope_freqs.weight` if the file has it.
///
/// # Errors
/// If the architecture is not supported, a key is missing, or the model has a feature that mlx-lm's model file
/// cannot express.
pub fn read(header: &Header<'_>, rope_factors: Option<&[f32]>) -> Result<Configuration, Fault> {
    let metadata = &header.metadata;
    let name = metadata
        .text("general.architecture")?
        .ok_or_else(|| Fault::MissingKey("general.architecture".to_owned()))?;
    let architecture = Architecture::from_name(name).ok_or_else(|| Fault::Architecture(name.to_owned()))?;
    let keys = Keys { metadata, architecture: name };

    if let Some(experts) = keys.integer("expert_count")?.filter(|&experts| experts > 0) {
        let key = keys.name("expert_count");
        return Err(Fault::key(&key, format!("is {experts}; mixtures of experts are not supported")));
    }
    let hidden = keys.size("embedding_length")?;
    let layers = keys.size("block_count")?;
    let heads = keys.size("attention.head_count")?;
    let key_value_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(heads);
    if !heads.is_multiple_of(key_value_heads) {
        let key = keys.name("attention.head_count_kv");
        return Err(Fault::key(&key, format!("is {key_value_heads}, which does not divide {heads} heads")));
    }
    let context = keys.size("context_length")?;
    let head_dimension = head_dimension(&keys, architecture, hidden, heads)?;
    let vocabulary = vocabulary(header, hidden)?;
    let theta = keys.number("rope.freq_base")?.unwrap_or(match architecture {
        Architecture::Gemma3 => 1_000_000.0,
        _ => 10_000.0,
    });
    let mut scaling = rope::scaling(metadata, name, context)?;
    if let Some(factors) = rope_factors {
        if scaling.is_some() {
            return Err(Fault::tensor(
                rope::FACTORS,
                "comes on top of another rope scaling, which is not supported",
            ));
        }
        scaling = rope::llama3(factors, theta, head_dimension)?;
    }
    let epsilon = keys
        .number("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| Fault::MissingKey(keys.name("attention.layer_norm_rms_epsilon")))?;

    let mut json = Map::new();
    let mut set = |field: &str, value: Value| json.insert(field.to_owned(), value);
    set("model_type", json!(architecture.model_type()));
    set("hidden_size", json!(hidden));
    set("num_hidden_layers", json!(layers));
    set("intermediate_size", json!(keys.size("feed_forward_length")?));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(key_value_heads));
    set("head_dim", json!(head_dimension));
    set("rms_norm_eps", json!(epsilon));
    set("vocab_size", json!(vocabulary));
    set("max_position_embeddings", json!(context));
    set("rope_theta", json!(theta));
    if let Some(scaling) = scaling {
        set("rope_scaling", scaling);
    }
    set("tie_word_embeddings", json!(!header.tensors.contains_key("output.weight")));
    match architecture {
        Architecture::Llama => {
            set("attention_bias", json!(header.tensors.contains_key("blk.0.attn_q.bias")));
            set("mlp_bias", json!(header.tensors.contains_key("blk.0.ffn_gate.bias")));
        }
        Architecture::Qwen2 | Architecture::Qwen3 => {}
        Architecture::Gemma3 => {
            if keys.number("final_logit_softcapping")?.is_some_and(|cap| cap != 0.0) {
                let key = keys.name("final_logit_softcapping");
                return Err(Fault::key(&key, "is set, which Gemma 3 does not have"));
            }
            let local = keys.number("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_ROPE_BASE);
            let scale = if layers == GEMMA3_27B_LAYERS { hidden / heads } else { head_dimension };
            // Without a window every layer is global.
            let window = keys.integer("attention.sliding_window")?.filter(|&window| window > 0);
            let pattern = if window.is_some() { window_pattern(&keys, layers)? } else { 1 };
            set("rope_local_base_freq", json!(local));
            set("query_pre_attn_scalar", json!(scale));
            set("sliding_window", json!(window.unwrap_or(context)));
            set("sliding_window_pattern", json!(pattern));
        }
    }
    Ok(Configuration { json, architecture, layers, head_dimension, heads, key_value_heads, vocabulary })
}

/// Keys of one architecture.
struct Keys<'m, 'a> {
    metadata: &'m Metadata<'a>,
    architecture: &'a str,
}

impl Keys<'_, '_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn integer(&self, key: &str) -> Result<Option<u64>, Fault> {
        self.metadata.uniform_integer(&self.name(key))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        self.metadata.number(&self.name(key))
    }

    /// A count or length: from 1 to what 31 bits hold.
    fn optional_size(&self, key: &str) -> Result<Option<u64>, Fault> {
        match self.integer(key)? {
            Some(size) if size == 0 || size > i32::MAX as u64 => {
                Err(Fault::key(&self.name(key), format!("is {size}, not between 1 and {}", i32::MAX)))
            }
            size => Ok(size),
        }
    }

    fn size(&self, key: &str) -> Result<u64, Fault> {
        self.optional_size(key)?.ok_or_else(|| Fault::MissingKey(self.name(key)))
    }
}

fn head_dimension(
    keys: &Keys<'_, '_>,
    architecture: Architecture,
    hidden: u64,
    heads: u64,
) -> Result<u64, Fault> {
    let even_share = hidden / heads;
    let dimension = keys.optional_size("attention.key_length")?.unwrap_or(even_share);
    let refuse = |key: &str, problem: String| Err(Fault::key(&keys.name(key), problem));
    if dimension == 0 || !dimension.is_multiple_of(2) {
        return refuse(
            "attention.key_length",
            format!("makes heads of {dimension} elements, not an even number"),
        );
    }
    if architecture == Architecture::Qwen2 && dimension != even_share {
        return refuse("attention.key_length", format!("is {dimension}; qwen2 has {hidden} / {heads}"));
    }
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = keys.optional_size(key)?.filter(|&other| other != dimension) {
            return refuse(
                key,
                format!("is {other}, which is not supported for heads of {dimension} elements"),
            );
        }
    }
    Ok(dimension)
}

fn vocabulary(header: &Header<'_>, hidden: u64) -> Result<u64, Fault> {
    const NAME: &str = "token_embd.weight";
    let embedding: &TensorInfo = header.tensors.get(NAME).ok_or(Fault::MissingTensor(NAME))?;
    match embedding.shape[..] {
        [rows, columns] if columns as u64 == hidden => Ok(rows as u64),
        _ => {
            Err(Fault::tensor(NAME, format!("has shape {:?} in a model of width {hidden}", embedding.shape)))
        }
    }
}

/// Every how many layers one is global. Newer files give the number, or a flag for each layer that is local.
fn window_pattern(keys: &Keys<'_, '_>, layers: u64) -> Result<u64, Fault> {
    const KEY: &str = "attention.sliding_window_pattern";
    let name = keys.name(KEY);
    let Some(super::value::Value::Array(array)) = keys.metadata.get(&name) else {
        return Ok(keys.optional_size(KEY)?.unwrap_or(GEMMA3_WINDOW_PATTERN));
    };
    let local = array.integers().unwrap_or_default();
    // One more than there are layers stands for "none is global", which the last one of a pattern is.
    let period = local.iter().position(|&flag| flag == 0).map_or(layers + 1, |first| first as u64 + 1);
    let regular = (1_u64..).zip(&local).all(|(number, &flag)| (flag == 0) == number.is_multiple_of(period));
    if local.len() as u64 == layers && regular {
        Ok(period)
    } else {
        Err(Fault::key(&name, "is not one global layer in every so many, which is not supported"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::value::{Array, Value as Stored, ValueType};
    use super::*;

    fn pattern(flags: &[u8]) -> Result<u64, Fault> {
        let array = Array { element: ValueType::Bool, count: flags.len(), bytes: flags };
        let mut metadata = Metadata::default();
        metadata.entries.insert("gemma3.attention.sliding_window_pattern", Stored::Array(array));
        window_pattern(&Keys { metadata: &metadata, architecture: "gemma3" }, flags.len() as u64)
    }

    #[test]
    fn window_pattern_given_as_flags() {
        assert_eq!(pattern(&[1, 1, 0, 1, 1, 0, 1]).unwrap(), 3);
        assert_eq!(pattern(&[0, 0, 0]).unwrap(), 1);
        assert_eq!(pattern(&[1, 1, 1]).unwrap(), 4);
        for irregular in [&[1, 0, 0, 1][..], &[0, 1, 1], &[1, 0, 1, 1]] {
            assert!(pattern(irregular).is_err(), "{irregular:?}");
        }
    }

    #[test]
    fn values_of_each_layer_must_agree() {
        let mut metadata = Metadata::default();
        let equal: Vec<u8> = [4_i32, 4, 4].iter().flat_map(|value| value.to_le_bytes()).collect();
        let different: Vec<u8> = [4_i32, 4, 2].iter().flat_map(|value| value.to_le_bytes()).collect();
        let array = |bytes| Stored::Array(Array { element: ValueType::I32, count: 3, bytes });
        metadata.entries.insert("llama.attention.head_count", array(&equal));
        metadata.entries.insert("llama.attention.head_count_kv", array(&different));
        let keys = Keys { metadata: &metadata, architecture: "llama" };
        assert_eq!(keys.size("attention.head_count").unwrap(), 4);
        let message = keys.size("attention.head_count_kv").unwrap_err().to_string();
        assert!(message.contains("differs from layer to layer"), "{message}");
    }

    #[test]
    fn single_precision_becomes_the_decimal_it_came_from() {
        let mut metadata = Metadata::default();
        for (key, value) in [("a", 1e-5_f32), ("b", 500_000.0), ("c", 1e-6), ("d", f32::NAN)] {
            metadata.entries.insert(key, Stored::F32(value));
        }
        let numbers = ["a", "b", "c"].map(|key| metadata.number(key).unwrap());
        assert_eq!(numbers, [Some(1e-5), Some(500_000.0), Some(1e-6)]);
        assert!(metadata.number("d").is_err());
    }
}
