//! From a model argument to an engine.

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::resolve_model;

use crate::engine::{Engine, LoadOptions};
use crate::printer::Printer;

/// Loads the model that the options name.
///
/// # Errors
/// There is no such model, or it cannot be used.
pub fn load(options: &LoadOptions, printer: &Printer) -> anyhow::Result<Box<dyn Engine>> {
    let resolved = resolve_model(options.model.as_deref(), &Environment::of_process())?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    anyhow::bail!("{} cannot be run by this build", resolved.source.path().display())
}
