//! Command-line arguments in two layers: the structs that clap fills are what was typed; their `resolve` methods
//! say what it means, checked and ready for the engine. A group of flags that several verbs share is one file.

pub mod adapter;
pub mod grammar;
pub mod known;
pub mod kv_cache;
pub mod load;
pub mod model;
pub mod numerics;
pub mod per_prompt;
pub mod prompt;
pub mod range;
pub mod reply;
pub mod sampling;
pub mod size;
pub mod template;

/// Things that are allowed but do nothing; said once, before the work.
pub type Warnings = Vec<String>;

/// A switch that is spelled out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// On (`true` and `1` are taken too)
    #[value(aliases = ["true", "1"])]
    On,
    /// Off (`false` and `0` are taken too)
    #[value(aliases = ["false", "0"])]
    Off,
}

impl Switch {
    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// A truth value as mlx-lm's flags take it, and in the other usual spellings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Truth {
    /// Yes
    #[value(aliases = ["True", "TRUE", "t", "T", "on", "1"])]
    True,
    /// No
    #[value(aliases = ["False", "FALSE", "f", "F", "off", "0"])]
    False,
}

impl Truth {
    /// Whether it is true.
    pub fn is_true(self) -> bool {
        self == Self::True
    }
}
