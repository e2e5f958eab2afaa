//! Tokenizer classes of transformers 5 that overrule parts of tokenizer.json.
//!
//! `AutoTokenizer` picks a class from tokenizer_config.json and config.json. Most take tokenizer.json as it
//! is; four build their own normalizer, pre-tokenizer and decoder around its vocabulary
//! (transformers models/{llama,gemma,qwen2,gpt2}/tokenization_*.py), and mlx-lm's ids come from those.
//! One departure: where such a class does not fit the vocabulary (a byte-level one declared as
//! `LlamaTokenizer`, say) transformers loses the spaces; here tokenizer.json is followed.

use serde_json::{Map, Value};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::{NFC, NormalizerWrapper, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The class that `AutoTokenizer` would choose, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenizerClass {
    /// tokenizer.json as it is.
    Backend,
    Llama,
    Gemma,
    Qwen2,
    Gpt2,
}

impl TokenizerClass {
    /// Follows transformers' models/auto/tokenization_auto.py, without remote code. `model_type` is
    /// config.json's, `config_class` the `tokenizer_class` some config.json have.
    pub(super) fn resolve(
        config: &Map<String, Value>,
        model_type: Option<&str>,
        config_class: Option<&str>,
    ) -> Self {
        let named = config.get("tokenizer_class").and_then(Value::as_str).or(config_class);
        let registered = model_type.and_then(registered);
        match (named, registered) {
            (None, None) => Self::Backend,
            (None, Some(registered)) => Self::from_name(registered),
            (Some(named), None) => Self::from_name(named),
            (Some(_), Some("TokenizersBackend")) => Self::Backend,
            // The hub's Qwen 2 derivatives often name a class that is wrong for them.
            (Some(_), Some(registered)) if model_type == Some("qwen2") => Self::from_name(registered),
            (Some(named), Some(_)) => Self::from_name(named),
        }
    }

    fn from_name(name: &str) -> Self {
        match name.strip_suffix("Fast").unwrap_or(name) {
            "LlamaTokenizer" => Self::Llama,
            "GemmaTokenizer" => Self::Gemma,
            "Qwen2Tokenizer" => Self::Qwen2,
            "GPT2Tokenizer" => Self::Gpt2,
            _ => Self::Backend,
        }
    }

    /// The token of a role that tokenizer_config.json does not mention.
    pub(super) fn default_token(self, role: &str) -> Option<&'static str> {
        match (self, role) {
            (Self::Llama, "unk_token") => Some("<unk>"),
            (Self::Llama, "bos_token") => Some("<s>"),
            (Self::Llama, "eos_token") => Some("</s>"),
            (Self::Gemma, "unk_token") => Some("<unk>"),
            (Self::Gemma, "bos_token") => Some("<bos>"),
            (Self::Gemma, "eos_token") => Some("<eos>"),
            (Self::Gemma, "pad_token") => Some("<pad>"),
            (Self::Gemma, "mask_token") => Some("<mask>"),
            (Self::Qwen2, "unk_token" | "eos_token" | "pad_token") => Some("<|endoftext|>"),
            (Self::Gpt2, "unk_token" | "bos_token" | "eos_token") => Some("<|endoftext|>"),
            _ => None,
        }
    }

    /// Replaces what the class builds itself.
    pub(super) fn apply(
        self,
        tokenizer: &mut tokenizers::Tokenizer,
        config: &Map<String, Value>,
    ) -> tokenizers::Result<()> {
        let byte_level = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let byte_fallback =
            matches!(tokenizer.get_model(), ModelWrapper::BPE(bpe) if bpe.byte_fallback) && !byte_level;
        let flag = |name: &str| config.get(name).and_then(Value::as_bool);
        match self {
            Self::Llama if byte_fallback => {
                let prefix_space = flag("add_prefix_space").unwrap_or(true);
                let scheme = match (prefix_space, flag("legacy").unwrap_or(false)) {
                    (false, _) => PrependScheme::Never,
                    (true, true) => PrependScheme::Always,
                    (true, false) => PrependScheme::First,
                };
                tokenizer.with_normalizer(None::<NormalizerWrapper>);
                tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', scheme, false)));
                tokenizer.with_decoder(Some(sentencepiece_decoder(prefix_space)?));
            }
            Self::Gemma if byte_fallback => {
                let split = Split::new(" ", SplitDelimiterBehavior::MergedWithPrevious, false)?;
                tokenizer.with_normalizer(Some(Replace::new(" ", "▁")?));
                tokenizer.with_pre_tokenizer(Some(split));
                tokenizer.with_decoder(Some(sentencepiece_decoder(false)?));
            }
            Self::Qwen2 if byte_level => {
                let pattern = SplitPattern::Regex(QWEN2_PATTERN.to_owned());
                let prefix_space = flag("add_prefix_space").unwrap_or(false);
                tokenizer.with_normalizer(Some(NFC));
                tokenizer.with_pre_tokenizer(Some(PreTokenizers::new(vec![
                    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into(),
                    PreTokenizerWrapper::ByteLevel(ByteLevel::new(prefix_space, true, false)),
                ])));
            }
            Self::Gpt2 if byte_level => {
                let prefix_space = flag("add_prefix_space").unwrap_or(false);
                tokenizer.with_normalizer(None::<NormalizerWrapper>);
                tokenizer.with_pre_tokenizer(Some(ByteLevel::new(prefix_space, true, true)));
            }
            _ => {}
        }
        Ok(())
    }
}

fn sentencepiece_decoder(strip_leading_space: bool) -> tokenizers::Result<Decoders> {
    let mut decoders = vec![
        DecoderWrapper::Replace(Replace::new("▁", " ")?),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(Fuse::new()),
    ];
    if strip_leading_space {
        decoders.push(DecoderWrapper::Strip(Strip::new(' ', 1, 0)));
    }
    Ok(Decoders::new(decoders))
}

/// transformers' `TOKENIZER_MAPPING_NAMES`, reduced to text models and to the classes told apart here
/// (`Other` for classes that take tokenizer.json as it is but let tokenizer_config.json's class win).
fn registered(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "gemma" | "gemma2" | "gemma3" | "gemma3_text" | "gemma3n" | "gemma3n_text" | "recurrent_gemma"
        | "shieldgemma2" | "t5gemma" => "GemmaTokenizer",
        "qwen2" | "qwen2_moe" | "qwen2_vl" | "qwen2_5_vl" | "qwen2_5_omni" | "qwen2_audio" | "qwen3"
        | "qwen3_moe" | "qwen3_next" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_omni_moe" | "internvl"
        | "ovis2" => "Qwen2Tokenizer",
        "gpt2" | "gpt_bigcode" | "gpt_neo" | "gptj" | "codegen" | "dbrx" | "flex_olmo" | "jais2" | "opt"
        | "phi" | "starcoder2" => "GPT2Tokenizer",
        "qwen3_5" | "qwen3_5_moe" | "gpt_neox" | "mamba" | "mamba2" | "falcon_mamba" | "mpt" | "olmo"
        | "olmo2" | "olmoe" | "rwkv" | "stablelm" | "xlstm" | "cohere" | "cohere2" | "aya_vision" => "Other",
        "glm" | "glm4" | "glm4_moe" | "glm4_moe_lite" | "granite" | "granitemoe" | "granitemoehybrid"
        | "granitemoeshared" | "mistral" | "mistral3" | "ministral" | "ministral3" | "mixtral"
        | "pixtral" | "voxtral" | "olmo3" | "olmo_hybrid" | "arctic" | "chameleon" | "deepseek_v2"
        | "deepseek_v3" | "deepseek_v32" | "deepseek_v4" | "deepseek_vl_v2" | "internlm2" | "jamba"
        | "llava" | "llava_next" | "minicpmv" | "minimax_m2" | "molmo" | "nemotron" | "phi3" | "phi3_v"
        | "phimoe" | "step3p5" => "TokenizersBackend",
        _ => return None,
    })
}
