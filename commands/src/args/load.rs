//! What is loaded and how it runs: flags that every verb with a model has.

use std::path::PathBuf;

use super::Warnings;
use super::adapter::AdapterArgs;
use super::kv_cache::KvCacheArgs;
use super::model::ModelArgs;
use super::numerics::NumericsArgs;
use super::template::TemplateArgs;
use crate::engine::LoadOptions;
use crate::error::Complaint;

/// The model and how it is spoken to.
#[derive(Clone, Debug, clap::Args)]
pub struct SourceArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub adapter: AdapterArgs,
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
        if let (Some(argument), Some(_)) = (&argument, &self.model.model) {
            // Most likely words of a prompt without quotes.
            let complaint = Complaint::usage(format!("two models: `--model` and the argument `{argument}`"));
            return Err(complaint.hint("put a prompt in quotes, or drop one of the two").into());
        }
        Ok(LoadOptions {
            model: self.model.resolve(argument, prompt_cache_file.is_none())?,
            adapter_path: self.adapter.adapter_path.clone(),
            extra_eos_tokens: Vec::new(),
            template: self.template.resolve()?,
            kv_cache: compute.kv_cache.resolve(warnings)?,
            numerics: compute.numerics.resolve(warnings),
            prompt_cache_file,
            conversation: false,
        })
    }
}
