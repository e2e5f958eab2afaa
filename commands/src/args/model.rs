//! `--model` and what is refused about loading.

use crate::env;
use crate::error::Complaint;

/// Which model.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// The model: a folder, a .gguf file, or the id of a model in the Hugging Face cache
    ///
    /// Part of an id is enough where only one model has it. Left out, it is that of `--query`, then that of the
    /// variable MLX_BUN_MODEL, else the starter model that `scripts/mlx-bun` fetches, else the best model there is.
    #[arg(short = 'M', long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Part of the model's name, when `--model` is not given
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub query: Option<String>,

    /// Refused: code that a model ships is never run
    #[arg(long, hide_short_help = true)]
    pub trust_remote_code: bool,
}

impl ModelArgs {
    /// The model that `--model`, else a verb's `argument`, else `--query` names, if any; `MLX_BUN_MODEL` too if
    /// `environment` allows it.
    ///
    /// # Errors
    /// `--trust-remote-code`, or an empty name.
    pub fn resolve(&self, argument: Option<String>, environment: bool) -> Result<Option<String>, Complaint> {
        if self.trust_remote_code {
            return Err(Complaint::usage(
                "`--trust-remote-code` is refused: mlx-bun never runs code that a model ships",
            )
            .hint("leave the flag out; the supported families are built in"));
        }
        match self.model.as_deref().or(argument.as_deref()).or(self.query.as_deref()) {
            Some("") => Err(Complaint::usage("the model's name is empty")
                .hint("name a folder, a .gguf file or a hub id, or leave it out for the starter model")),
            Some(model) => Ok(Some(model.to_owned())),
            None => Ok(env::get(env::MLX_BUN_MODEL).filter(|_| environment)),
        }
    }
}
