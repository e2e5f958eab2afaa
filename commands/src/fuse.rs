//! `mlx-bun fuse`: puts an adapter into the weights of its base model.

use std::path::{Path, PathBuf};

use mlx_bun::lora::Adapter;
use mlx_bun::quantize::{Converted, fuse};

use crate::args::model::ModelArgs;
use crate::convert::{open, refuse_existing, source_model, written};
use crate::exit::ExitStatus;
use crate::interrupt::Interrupt;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Example:
  mlx-bun fuse --model ./model --adapter-path ./adapters --save-path ./fused
  mlx-bun fuse --model ./model-4bit --adapter-path ./adapters --save-path ./fused --dequantize";

/// Less of the adapter than this, or an error larger than [`LARGE_ERROR`], is worth a warning.
const SMALL_FRACTION: f64 = 0.9;
/// A multiple of the adapter's own length.
const LARGE_ERROR: f64 = 0.5;

/// Put an adapter into the weights of its model
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = crate::generate::MORE, after_long_help = EXAMPLES)]
pub struct FuseArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// The adapter: a folder with adapter_config.json and the weights, as mlx-lm or PEFT write them
    #[arg(
        long,
        visible_alias = "adapter",
        value_name = "DIR",
        default_value = "adapters",
        help_heading = "Files"
    )]
    adapter_path: PathBuf,

    /// The folder to write; it must not exist
    #[arg(long, value_name = "DIR", default_value = "fused_model", help_heading = "Files")]
    save_path: PathBuf,

    /// Leave the whole model unpacked, so that nothing of the adapter is lost to rounding
    #[arg(long, help_heading = "Quantization")]
    dequantize: bool,
}

/// Runs the verb.
///
/// # Errors
/// A model or adapter that cannot be used, a folder that exists or cannot be written.
pub fn run(args: &FuseArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    let name = args.model.resolve(None, true)?;
    refuse_existing(&args.save_path)?;
    let adapter = Adapter::open(&args.adapter_path)?;
    let resolved = source_model(name.as_deref())?;
    let source = open(&resolved, printer)?;
    let repo_id = resolved.repo_id.as_deref();
    let fused = written(printer, &interrupt, |on_progress| {
        fuse(&source, adapter, &args.save_path, args.dequantize, repo_id, on_progress)
    })?;
    let Some(fused) = fused else { return Ok(ExitStatus::Interrupted) };
    report(&fused, &args.save_path, printer);
    Ok(ExitStatus::Success)
}

fn report(fused: &Converted, path: &Path, printer: &Printer) {
    let (fraction, error) = (fused.kept.fraction(), fused.kept.error());
    if fraction < SMALL_FRACTION || error > LARGE_ERROR {
        printer.warning(&format!(
            "packing the weights again left {:.0} % of the adapter and made an error {error:.2} times its size",
            fraction * 100.0
        ));
        printer.hint("--dequantize keeps all of it");
    }
    printer.note(&format!("Fused {} modules into {}", fused.fused, path.display()));
}
