//! GGUF tensor names and where mlx-lm's model files keep the same tensors.
//!
//! Names: llama.cpp's src/llama-arch.cpp and gguf-py's tensor_mapping.py; mlx-lm's models/llama.py, qwen2.py,
//! qwen3.py and gemma3_text.py.

/// Architectures that can be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama, Mistral, SmolLM and others alike.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Gemma 3, text only.
    Gemma3,
}

impl Architecture {
    /// By `general.architecture`.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3].into_iter().find(|one| one.name() == name)
    }

    /// `general.architecture`, and the prefix of its keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    /// `model_type` of the Hugging Face configuration.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3_text",
            other => other.name(),
        }
    }
}

/// What a tensor is, as far as its conversion depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A linear layer's weight or an embedding: may stay quantized.
    Matrix,
    /// The query projection's weight or bias: rows permuted for llama.
    Query,
    /// The key projection's weight or bias: likewise.
    Key,
    /// A normalization's weight: offset by one for gemma3.
    Norm,
    /// A bias.
    Bias,
}

/// The place of a tensor in the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Path of the module, for example `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// `weight` or `bias`.
    pub leaf: &'static str,
    /// What it is.
    pub role: Role,
}

/// The place of the tensor that GGUF calls `name`, or `None` if `architecture` with that many layers has none.
pub fn place(architecture: Architecture, layers: u64, name: &str) -> Option<Place> {
    let (path, leaf) = name.rsplit_once('.')?;
    let leaf = match leaf {
        "weight" => "weight",
        "bias" => "bias",
        _ => return None,
    };
    let Some(rest) = path.strip_prefix("blk.") else {
        let (module, role) = match path {
            "token_embd" => ("model.embed_tokens", Role::Matrix),
            "output_norm" => ("model.norm", Role::Norm),
            "output" => ("lm_head", Role::Matrix),
            _ => return None,
        };
        return (leaf == "weight").then(|| Place { module: module.to_owned(), leaf, role });
    };
    let (layer, part) = rest.split_once('.')?;
    // Only the canonical spelling, so that no two names share a place.
    let number: u64 = layer.parse().ok().filter(|number: &u64| number.to_string() == layer)?;
    let (module, role) = layer_module(architecture, part)?;
    let role = match (leaf, role) {
        ("weight", role) => role,
        (_, Role::Norm) => return None,
        (_, Role::Matrix) => Role::Bias,
        (_, role) => role,
    };
    let biased = match architecture {
        Architecture::Llama => true,
        Architecture::Qwen2 => matches!(part, "attn_q" | "attn_k" | "attn_v"),
        Architecture::Qwen3 | Architecture::Gemma3 => false,
    };
    (number < layers && (leaf == "weight" || biased)).then(|| Place {
        module: format!("model.layers.{number}.{module}"),
        leaf,
        role,
    })
}

/// Parts of a layer as GGUF calls them.
const PARTS: [&str; 13] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

/// The inverse of [`place`]: what GGUF calls the tensor `module`.`leaf`, and what it is.
pub fn stored_name(
    architecture: Architecture,
    layers: u64,
    module: &str,
    leaf: &str,
) -> Option<(String, Role)> {
    let name = match module.strip_prefix("model.layers.") {
        None => match module {
            "model.embed_tokens" => "token_embd".to_owned(),
            "model.norm" => "output_norm".to_owned(),
            "lm_head" => "output".to_owned(),
            _ => return None,
        },
        Some(rest) => {
            let (layer, rest) = rest.split_once('.')?;
            let is_part =
                |part: &&str| layer_module(architecture, part).is_some_and(|(module, _)| module == rest);
            format!("blk.{layer}.{}", PARTS.into_iter().find(is_part)?)
        }
    };
    let name = format!("{name}.{leaf}");
    let found = place(architecture, layers, &name).filter(|place| place.module == module)?;
    Some((name, found.role))
}

fn layer_module(architecture: Architecture, part: &str) -> Option<(&'static str, Role)> {
    use Architecture::{Gemma3, Qwen3};
    Some(match (part, architecture) {
        ("attn_norm", _) => ("input_layernorm", Role::Norm),
        ("attn_q", _) => ("self_attn.q_proj", Role::Query),
        ("attn_k", _) => ("self_attn.k_proj", Role::Key),
        ("attn_v", _) => ("self_attn.v_proj", Role::Matrix),
        ("attn_output", _) => ("self_attn.o_proj", Role::Matrix),
        ("attn_q_norm", Qwen3 | Gemma3) => ("self_attn.q_norm", Role::Norm),
        ("attn_k_norm", Qwen3 | Gemma3) => ("self_attn.k_norm", Role::Norm),
        ("post_attention_norm", Gemma3) => ("post_attention_layernorm", Role::Norm),
        ("ffn_norm", Gemma3) => ("pre_feedforward_layernorm", Role::Norm),
        ("post_ffw_norm", Gemma3) => ("post_feedforward_layernorm", Role::Norm),
        ("ffn_norm", _) => ("post_attention_layernorm", Role::Norm),
        ("ffn_gate", _) => ("mlp.gate_proj", Role::Matrix),
        ("ffn_up", _) => ("mlp.up_proj", Role::Matrix),
        ("ffn_down", _) => ("mlp.down_proj", Role::Matrix),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(architecture: Architecture, name: &str) -> Option<String> {
        place(architecture, 2, name).map(|place| format!("{}.{}", place.module, place.leaf))
    }

    #[test]
    fn ffn_norm_is_another_norm_in_gemma3() {
        let name = "blk.1.ffn_norm.weight";
        let llama = module(Architecture::Llama, name);
        assert_eq!(llama.as_deref(), Some("model.layers.1.post_attention_layernorm.weight"));
        let gemma = module(Architecture::Gemma3, name);
        assert_eq!(gemma.as_deref(), Some("model.layers.1.pre_feedforward_layernorm.weight"));
    }

    #[test]
    fn every_name_is_found_again() {
        use Architecture::{Gemma3, Llama, Qwen2, Qwen3};
        for architecture in [Llama, Qwen2, Qwen3, Gemma3] {
            for part in PARTS {
                for leaf in ["weight", "bias"] {
                    let name = format!("blk.1.{part}.{leaf}");
                    let Some(place) = place(architecture, 2, &name) else { continue };
                    let found = stored_name(architecture, 2, &place.module, leaf);
                    assert_eq!(found, Some((name, place.role)), "{architecture:?}");
                }
            }
        }
        assert_eq!(
            stored_name(Llama, 2, "lm_head", "weight"),
            Some(("output.weight".to_owned(), Role::Matrix))
        );
        assert_eq!(stored_name(Llama, 2, "model.layers.2.mlp.up_proj", "weight"), None);
        assert_eq!(stored_name(Qwen3, 2, "model.layers.0.mlp.up_proj", "bias"), None);
    }

    #[test]
    fn refuses_what_has_no_place() {
        for name in [
            "blk.2.attn_q.weight",
            "blk.01.attn_q.weight",
            "blk.-1.attn_q.weight",
            "blk.0.attn_q_norm.weight",
            "blk.0.attn_norm.bias",
            "blk.0.attn_q.scale",
            "output.bias",
            "rope_freqs.weight",
            "weight",
        ] {
            assert_eq!(module(Architecture::Llama, name), None, "{name}");
        }
        assert_eq!(module(Architecture::Qwen2, "blk.0.attn_output.bias"), None);
        assert!(module(Architecture::Qwen2, "blk.0.attn_q.bias").is_some());
    }
}
