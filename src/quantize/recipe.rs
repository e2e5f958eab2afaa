//! Which module gets how many bits: mlx-lm's mixed recipes (`convert.py`, `mixed_quant_predicate_builder`) and
//! explicit maps.

use std::collections::BTreeMap;

use crate::checkpoint::{QuantMode, QuantParams};

/// A mix of two widths: the wider for the head and for some layers' value and down projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// 2 and 6 bits.
    Mixed2_6,
    /// 3 and 4 bits.
    Mixed3_4,
    /// 3 and 6 bits.
    Mixed3_6,
    /// 4 and 6 bits.
    Mixed4_6,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Self; 4] = [Self::Mixed2_6, Self::Mixed3_4, Self::Mixed3_6, Self::Mixed4_6];

    /// The name on mlx-lm's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed2_6 => "mixed_2_6",
            Self::Mixed3_4 => "mixed_3_4",
            Self::Mixed3_6 => "mixed_3_6",
            Self::Mixed4_6 => "mixed_4_6",
        }
    }

    /// Low and high bits.
    fn bits(self) -> (u8, u8) {
        match self {
            Self::Mixed2_6 => (2, 6),
            Self::Mixed3_4 => (3, 4),
            Self::Mixed3_6 => (3, 6),
            Self::Mixed4_6 => (4, 6),
        }
    }
}

/// How the modules of a model are quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Predicate {
    /// All alike.
    Uniform,
    /// By a recipe.
    Recipe(Recipe),
    /// By a list; modules that it does not name get the default.
    Listed(BTreeMap<String, QuantParams>),
}

/// A recipe meets a model without the layers it is about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the recipe {recipe} needs modules called `down_proj` and the model has none; quantize it with --q-bits or \
     --target-bpw"
)]
pub struct RecipeError {
    recipe: &'static str,
}

/// A predicate that knows the model.
#[derive(Clone, Debug)]
pub(super) enum Chooser<'a> {
    Uniform,
    Recipe { recipe: Recipe, group_size: u32, layer_place: usize, layers: usize },
    Listed(&'a BTreeMap<String, QuantParams>),
}

impl Predicate {
    /// Binds the predicate to the modules of a model with `layers` blocks.
    pub(super) fn bind<'a>(
        &'a self,
        paths: &[&str],
        layers: usize,
        group_size: u32,
    ) -> Result<Chooser<'a>, RecipeError> {
        match self {
            Self::Uniform => Ok(Chooser::Uniform),
            Self::Listed(listed) => Ok(Chooser::Listed(listed)),
            Self::Recipe(recipe) => {
                let down = paths.iter().find(|path| path.contains("down_proj"));
                let down = down.ok_or(RecipeError { recipe: recipe.name() })?;
                let mut segments = down.split('.');
                let layer_place =
                    segments.position(is_number).unwrap_or(down.split('.').count().saturating_sub(1));
                Ok(Chooser::Recipe { recipe: *recipe, group_size, layer_place, layers })
            }
        }
    }
}

fn is_number(segment: &str) -> bool {
    !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit())
}

impl Chooser<'_> {
    /// The module's own parameters; `None` for the default ones.
    pub(super) fn choose(&self, path: &str) -> Option<QuantParams> {
        match self {
            Self::Uniform => None,
            Self::Listed(listed) => listed.get(path).copied(),
            Self::Recipe { recipe, group_size, layer_place, layers } => {
                let (low, high) = recipe.bits();
                let index = path.split('.').nth(*layer_place).and_then(|segment| segment.parse().ok());
                let wide = is_wide(path, index.unwrap_or(0), *layers);
                let bits = if wide { high } else { low };
                Some(QuantParams { bits, group_size: *group_size, mode: QuantMode::Affine })
            }
        }
    }
}

fn is_wide(path: &str, index: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    let more = index < eighth
        || index >= layers.saturating_mul(7) / 8
        || index.checked_sub(eighth).is_some_and(|from| from % 3 == 2);
    let named = |names: &[&str]| names.iter().any(|name| path.contains(name));
    (more && named(&["v_proj", "v_a_proj", "v_b_proj", "down_proj"])) || named(&["lm_head"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_and_down_projections_of_outer_and_every_third_layer_are_wide() {
        let wide: Vec<usize> =
            (0..16).filter(|index| is_wide("model.layers.0.mlp.down_proj", *index, 16)).collect();
        assert_eq!(wide, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert!(!is_wide("model.layers.0.mlp.up_proj", 0, 16) && is_wide("lm_head", 5, 16));
    }

    #[test]
    fn a_model_without_down_projections_is_told_so() {
        let error = Predicate::Recipe(Recipe::Mixed3_6).bind(&["layers.0.w2"], 1, 64).unwrap_err();
        assert!(error.to_string().starts_with("the recipe mixed_3_6 needs modules called `down_proj`"));
        let predicate = Predicate::Recipe(Recipe::Mixed3_6);
        let chooser = predicate.bind(&["model.layers.0.mlp.down_proj"], 8, 32).unwrap();
        let bits = |path: &str| chooser.choose(path).map(|params| (params.bits, params.group_size));
        assert_eq!(bits("model.layers.0.mlp.down_proj"), Some((6, 32)));
        assert_eq!(bits("model.embed_tokens"), Some((3, 32)));
    }
}
