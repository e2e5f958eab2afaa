//! One model as the registry knows it.

use std::path::PathBuf;

use serde::Serialize;

use crate::models;

/// A snapshot, a folder or a GGUF file. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Model {
    /// The snapshot's directory or the GGUF file.
    pub path: PathBuf,
    /// `org/name`, or the name of a folder of the user's.
    pub repo_id: String,
    /// Commit hash, in the Hugging Face cache.
    pub revision: Option<String>,
    /// Whether this is the revision that the repository's name stands for.
    pub canonical: bool,
    /// The config's `model_type`.
    pub model_type: String,
    /// How well it runs here.
    pub tier: Tier,
    /// Whether all its files are there.
    pub complete: bool,
    /// Parameters, before quantization.
    pub param_count: Option<u64>,
    /// Weights, without the vision sidecar.
    pub size_bytes: u64,
    /// The vision sidecar.
    pub sidecar_bytes: u64,
    /// Weights of routed experts.
    pub experts_bytes: u64,
    /// Bits of quantized weights.
    pub quant_bits: Option<u32>,
    /// Their group size.
    pub quant_group_size: Option<u32>,
    /// Their mode.
    pub quant_mode: Option<String>,
    /// Whether `optiq_vision.safetensors` lies beside the weights.
    pub has_vision_sidecar: bool,
    /// The vision tower's model type, where it is one.
    pub vision_config_type: Option<String>,
    /// Whether the config has an `audio_config`.
    pub has_audio_config: bool,
    /// Whether the sidecar has an audio tower.
    pub has_audio_tower: bool,
    /// Whether `kv_config.json` is there.
    pub has_kv_config: bool,
    /// Whether the chat template knows tool calls.
    pub has_tool_template: bool,
    /// Layers.
    pub num_layers: Option<u64>,
    /// Features of a layer's output.
    pub hidden_size: Option<u64>,
    /// Tokens of the vocabulary.
    pub vocab_size: Option<u64>,
    /// The licence that its README names.
    pub license: Option<String>,
    /// When it was looked at, in seconds since 1970.
    pub scanned_at: i64,
}

/// How well a model runs here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// With a forward pass and kernels of its own.
    Targeted,
    /// With what all families share.
    Generic,
    /// It drafts for another model.
    Drafter,
    /// Not at all.
    #[default]
    Unsupported,
}

impl Tier {
    /// The tier of a family (a remapped `model_type`).
    pub fn of(family: &str, repo_id: &str) -> Self {
        if is_drafter(family) {
            return Self::Drafter;
        }
        if !models::families().any(|known| known == family) {
            return Self::Unsupported;
        }
        let small = family == "llama" && repo_id.to_ascii_lowercase().contains("minicpm5-1b-optiq-4bit");
        let own = family.starts_with("gemma4")
            || matches!(family, "diffusion_gemma" | "qwen3_5" | "qwen3_5_text" | "qwen3");
        if small || own { Self::Targeted } else { Self::Generic }
    }

    /// As lists show it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Targeted => "supported (targeted)",
            Self::Generic => "supported (generic)",
            Self::Drafter => "drafter",
            Self::Unsupported => "not supported",
        }
    }
}

/// Whether models of this type only draft for others.
pub(super) fn is_drafter(model_type: &str) -> bool {
    model_type.ends_with("_assistant")
}

impl Model {
    /// Whether it sees pictures. A `vision_config` alone is no sign: some models nest their text config there.
    pub fn sees(&self) -> bool {
        self.has_vision_sidecar
            || self.vision_config_type.as_deref().is_some_and(|kind| kind.ends_with("unified_vision"))
    }

    /// Whether it hears: a stub of a sidecar without a tower does not count.
    pub fn hears(&self) -> bool {
        self.has_audio_config && self.has_audio_tower
    }

    /// All weights.
    pub fn total_bytes(&self) -> u64 {
        self.size_bytes.saturating_add(self.sidecar_bytes)
    }
}

/// Which models are wanted.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Part of the repository's name or of the model type, in any case.
    pub query: Option<String>,
    /// Only those that see.
    pub vision: bool,
    /// Only those that hear.
    pub audio: bool,
    /// Only those of at most so many bytes.
    pub max_bytes: Option<u64>,
    /// Every snapshot instead of one a repository.
    pub all_revisions: bool,
}

impl Filter {
    pub(super) fn takes(&self, model: &Model) -> bool {
        let named = self.query.as_deref().is_none_or(|query| contains(model, query));
        named
            && (!self.vision || model.sees())
            && (!self.audio || model.hears())
            && (self.all_revisions || model.canonical)
            && self.max_bytes.is_none_or(|most| model.total_bytes() <= most)
    }
}

pub(super) fn contains(model: &Model, query: &str) -> bool {
    let query = query.to_lowercase();
    model.repo_id.to_lowercase().contains(&query) || model.model_type.to_lowercase().contains(&query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_follow_the_families_there_are() {
        assert_eq!(Tier::of("qwen3", "a/b"), Tier::Targeted);
        assert_eq!(Tier::of("llama", "a/b"), Tier::Generic);
        assert_eq!(Tier::of("llama", "openbmb/MiniCPM5-1B-OptiQ-4bit"), Tier::Targeted);
        assert_eq!(Tier::of("gemma4_assistant", "a/b"), Tier::Drafter);
        assert_eq!(Tier::of("no_such_family", "a/b"), Tier::Unsupported);
    }

    #[test]
    fn a_nested_text_config_is_no_vision() {
        let mut model = Model { vision_config_type: Some("gemma4_vision".to_owned()), ..Model::default() };
        assert!(!model.sees());
        model.vision_config_type = Some("gemma4_unified_vision".to_owned());
        assert!(model.sees());
        let model = Model { has_audio_config: true, ..Model::default() };
        assert!(!model.hears());
    }
}
