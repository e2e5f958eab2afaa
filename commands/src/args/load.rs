//! What is loaded and how it runs: flags that every verb with a model has.

use std::path::PathBuf;

use super::Warnings;
use super::kv_cache::KvCacheArgs;
use super::model::ModelArgs;
use super::numerics::NumericsArgs;
use super::template::TemplateArgs;
use crate::engine::LoadOptions;

/// The model and how it is spoken to.
#[derive(Clone, Debug, clap::Args)]
pub struct SourceArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub template: TemplateArgs,
}

/// How it computes.
#[derive(Clone, Debug, clap::Args)]
pub struct ComputeArgs {
    #[command(flatten)]
    pub kv_cache: KvCacheArgs,
    #[command(flatten)]
    pub numerics: NumericsArgs,
}

impl SourceArgs {
    /// What to load: the model of a prompt cache file, that of an argument, `--model`, `MLX_BUN_MODEL`, or the starter.
    /// End-of-sequence tokens and the kind of session are the verb's to add.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub fn resolve(
        &self,
        argument: Option<String>,
        compute: &ComputeArgs,
        prompt_cache_file: Option<PathBuf>,
        warnings: &mut Warnings,
    ) -> anyhow::Result<LoadOptions> {
        Ok(LoadOptions {
            model: self.model.resolve(argument, prompt_cache_file.is_none())?,
            extra_eos_tokens: Vec::new(),
            template: self.template.resolve()?,
            kv_cache: compute.kv_cache.resolve(warnings)?,
            numerics: compute.numerics.resolve(),
            prompt_cache_file,
            conversation: false,
        })
    }
}
