//! What a token leaves in the key-value cache, layer by layer, from a config alone and for any family.
//!
//! Layers that look at a window stop growing, those that share another's cache or keep a recurrent state do not
//! grow at all, and latent attention (DeepSeek's) keeps one small vector.

use serde_json::Value;

use crate::checkpoint::Config;

/// Bytes of an element in a model's own precision.
const ELEMENT: u64 = 2;
/// Where the config of a sliding layer does not say how far it looks.
const DEFAULT_WINDOW: u64 = 4096;
/// More layers than any model has: a config that says more is not believed.
const MOST_LAYERS: u64 = 4096;

/// How the cache of full-attention layers is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvScheme {
    /// In the model's own precision.
    Dense,
    /// Packed: so many bits an element, and a scale and a bias of 2 bytes each for every group.
    Affine {
        /// Bits an element.
        bits: u64,
        /// Elements a group.
        group: u64,
    },
}

impl KvScheme {
    /// Bytes of so many elements.
    fn bytes(self, elements: u64) -> u64 {
        match self {
            Self::Dense => elements.saturating_mul(ELEMENT),
            Self::Affine { bits, group } => {
                let scales = elements.saturating_mul(4).checked_div(group).unwrap_or(0);
                (elements.saturating_mul(bits) / 8).saturating_add(scales)
            }
        }
    }
}

/// Elements of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvLayout {
    /// A token, over all layers that keep every token.
    pub full: u64,
    /// A token, over all layers that keep a window.
    pub sliding: u64,
    /// Tokens of that window.
    pub window: u64,
    /// Bytes that do not depend on the context.
    pub fixed: u64,
}

impl KvLayout {
    /// What a config describes; a field that is missing or senseless counts as its usual value.
    pub fn of(config: &Config) -> Self {
        let text = config.text();
        let number = |name: &str| text.get(name).and_then(Value::as_u64).filter(|&value| value < 1 << 32);
        let layers = number("num_hidden_layers").unwrap_or(0).min(MOST_LAYERS);
        let heads = number("num_attention_heads").filter(|&heads| heads > 0).unwrap_or(1);
        let kv_heads = number("num_key_value_heads").unwrap_or(heads);
        let head_dim = number("head_dim").or_else(|| Some(number("hidden_size")? / heads)).unwrap_or(0);
        let global_heads = number("num_global_key_value_heads").unwrap_or(kv_heads);
        let global_dim = number("global_head_dim").unwrap_or(head_dim);
        let latent = number("kv_lora_rank").map(|rank| rank + number("qk_rope_head_dim").unwrap_or(0));
        let full_layer = latent.unwrap_or(global_heads.saturating_mul(global_dim).saturating_mul(2));
        let sliding_layer = kv_heads.saturating_mul(head_dim).saturating_mul(2);
        let own = layers.saturating_sub(number("num_kv_shared_layers").unwrap_or(0));

        let mut layout =
            Self { window: number("sliding_window").unwrap_or(DEFAULT_WINDOW), ..Self::default() };
        for layer in 0..own {
            match kind(text, layer, &number) {
                Kind::Full => layout.full = layout.full.saturating_add(full_layer),
                Kind::Sliding => layout.sliding = layout.sliding.saturating_add(sliding_layer),
                Kind::Recurrent => layout.fixed = layout.fixed.saturating_add(recurrent(&number)),
            }
        }
        layout
    }

    /// Bytes at a context.
    pub fn bytes(&self, context: u64, scheme: KvScheme) -> u64 {
        let full = scheme.bytes(self.full.saturating_mul(context));
        let sliding = KvScheme::Dense.bytes(self.sliding.saturating_mul(context.min(self.window)));
        full.saturating_add(sliding).saturating_add(self.fixed)
    }

    /// Longest context in so many bytes; `None` when it does not matter.
    pub(super) fn longest(&self, budget: u64, scheme: KvScheme) -> Option<u64> {
        const FAR: u64 = 1 << 40;
        if self.bytes(FAR, scheme) <= budget {
            return None;
        }
        // The size never falls with the context.
        let (mut fits, mut too_long) = (0, FAR);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if self.bytes(middle, scheme) <= budget {
                fits = middle;
            } else {
                too_long = middle;
            }
        }
        Some(fits)
    }
}

enum Kind {
    Full,
    Sliding,
    Recurrent,
}

/// What a layer keeps: by the list of layer types, else by the patterns that configs have for it.
fn kind(text: &Value, layer: u64, number: &dyn Fn(&str) -> Option<u64>) -> Kind {
    let every = |name: &str| number(name).filter(|&every| every > 0);
    let is_last_of = |every: u64| (layer + 1).is_multiple_of(every);
    if let Some(Value::Array(types)) = text.get("layer_types") {
        let named = usize::try_from(layer).ok().and_then(|layer| types.get(layer)).and_then(Value::as_str);
        return match named {
            Some("sliding_attention" | "chunked_attention") => Kind::Sliding,
            Some("linear_attention" | "mamba" | "recurrent" | "conv") => Kind::Recurrent,
            _ => Kind::Full,
        };
    }
    if let Some(every) = every("full_attention_interval") {
        return if is_last_of(every) { Kind::Full } else { Kind::Recurrent };
    }
    match every("sliding_window_pattern") {
        Some(every) if number("sliding_window").is_some() => {
            if is_last_of(every) {
                Kind::Full
            } else {
                Kind::Sliding
            }
        }
        _ => Kind::Full,
    }
}

/// Bytes of a gated delta-net's state in single precision (mlx-lm `qwen3_next.py`): a matrix a head and the last
/// columns of a convolution.
fn recurrent(number: &dyn Fn(&str) -> Option<u64>) -> u64 {
    let of = |name: &str| number(name).unwrap_or(0).min(1 << 20);
    let (values, value_dim) = (of("linear_num_value_heads"), of("linear_value_head_dim"));
    let (keys, key_dim) = (of("linear_num_key_heads"), of("linear_key_head_dim"));
    let state = values.saturating_mul(value_dim).saturating_mul(key_dim).saturating_mul(4);
    let channels =
        keys.saturating_mul(key_dim).saturating_mul(2).saturating_add(values.saturating_mul(value_dim));
    let columns = of("linear_conv_kernel_dim").saturating_sub(1);
    state.saturating_add(channels.saturating_mul(columns).saturating_mul(ELEMENT))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn layout(config: Value) -> KvLayout {
        KvLayout::of(&Config::from_value(config, "config.json").unwrap())
    }

    #[test]
    fn plain_attention() {
        let llama = json!({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "hidden_size": 576});
        let layout = layout(llama);
        assert_eq!(layout.full, 30 * 2 * 3 * 64);
        assert_eq!(layout.bytes(1000, KvScheme::Dense), 30 * 2 * 3 * 64 * 2 * 1000);
        // Four bits and a scale and a bias a group of 64: 4.5 bits an element.
        let packed = layout.bytes(1000, KvScheme::Affine { bits: 4, group: 64 });
        assert_eq!(packed, 30 * 2 * 3 * 64 * 1000 * 9 / 16);
    }

    #[test]
    fn sliding_layers_stop_growing() {
        let types: Vec<_> = (1..=12)
            .map(|layer| if layer % 6 == 0 { "full_attention" } else { "sliding_attention" })
            .collect();
        let by_list = layout(json!({"num_hidden_layers": 12, "num_key_value_heads": 1, "head_dim": 256,
            "sliding_window": 512, "layer_types": types}));
        let by_pattern = layout(json!({"num_hidden_layers": 12, "num_key_value_heads": 1, "head_dim": 256,
            "sliding_window": 512, "sliding_window_pattern": 6}));
        assert_eq!(by_list, by_pattern);
        assert_eq!((by_list.full, by_list.sliding), (2 * 512, 10 * 512));
        let growth = by_list.bytes(2000, KvScheme::Dense) - by_list.bytes(1000, KvScheme::Dense);
        assert_eq!(growth, 2 * 512 * 2 * 1000);
    }

    #[test]
    fn shared_global_and_nested() {
        // As Gemma 4: the last layers share, full layers have heads of their own kind.
        let gemma = layout(json!({"text_config": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1,
            "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention"]}}));
        assert_eq!((gemma.full, gemma.sliding), (2 * 128, 2 * 2 * 64));
    }

    #[test]
    fn recurrent_layers_do_not_grow() {
        let qwen =
            layout(json!({"num_hidden_layers": 4, "full_attention_interval": 4, "num_key_value_heads": 2,
            "head_dim": 256, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4}));
        assert_eq!(qwen.full, 2 * 2 * 256);
        assert_eq!(qwen.fixed, 3 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2));
    }

    #[test]
    fn latent_attention_keeps_one_vector() {
        let deepseek =
            layout(json!({"num_hidden_layers": 2, "num_attention_heads": 128, "hidden_size": 7168,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64}));
        assert_eq!(deepseek.full, 2 * 576);
    }

    #[test]
    fn configs_that_lie_give_some_number() {
        for config in [
            json!({}),
            json!({"num_hidden_layers": u64::MAX, "head_dim": u64::MAX, "num_key_value_heads": u64::MAX}),
            json!({"num_hidden_layers": 3, "num_attention_heads": 0, "hidden_size": 1}),
            json!({"num_hidden_layers": -1, "layer_types": [1, null]}),
            json!({"num_hidden_layers": 4_000_000_000u64, "head_dim": 4_000_000_000u64,
                "num_key_value_heads": 4_000_000_000u64, "num_kv_shared_layers": 9}),
        ] {
            let layout = layout(config);
            layout.bytes(u64::MAX, KvScheme::Affine { bits: 8, group: 0 });
            layout.longest(1, KvScheme::Dense);
        }
    }
}
