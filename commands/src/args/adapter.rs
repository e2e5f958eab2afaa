//! `--adapter-path`.

use std::path::PathBuf;

/// An adapter on the model.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct AdapterArgs {
    /// A LoRA or DoRA adapter to put on the model, or whole weights: a folder as mlx-lm or PEFT write them
    #[arg(long, visible_alias = "adapter", value_name = "DIR", hide_short_help = true)]
    pub adapter_path: Option<PathBuf>,
}
