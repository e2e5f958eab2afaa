//! `mlx-bun fuse`: puts an adapter into the weights of its base model.

use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::lora::Adapter;
use mlx_bun::quantize::{Converted, GgufFileType, SourceModel, fuse};

use crate::args::model::ModelArgs;
use crate::convert::{open, refuse_existing, source_model, written};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::gguf_export::{export, model_name};
use crate::interrupt::Interrupt;
use crate::printer::Printer;
use crate::upload::Destination;

const EXAMPLES: &str = "\
Example:
  mlx-bun fuse --model ./model --adapter-path ./adapters --save-path ./fused
  mlx-bun fuse --model ./model-4bit --adapter-path ./adapters --save-path ./fused --dequantize
  mlx-bun fuse --model ./model --adapter-path ./adapters --save-path ./fused --export-gguf";

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

    /// The adapter: a folder with adapter_config.json and the weights, as mlx-lm or PEFT write them; whole weights too
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

    /// Also write the fused model as a GGUF file of half-precision weights for llama.cpp
    #[arg(long, help_heading = "Files")]
    export_gguf: bool,

    /// That file, below --save-path; it must not exist [default: ggml-model-f16.gguf]
    #[arg(long, value_name = "FILE", requires = "export_gguf", help_heading = "Files")]
    gguf_path: Option<PathBuf>,

    /// Send the fused model to this repository of the hub, like org/name
    #[arg(long, value_name = "ID", help_heading = "Files")]
    upload_repo: Option<String>,
}

/// Runs the verb.
///
/// # Errors
/// A model or adapter that cannot be used, a folder that exists or cannot be written.
pub fn run(args: &FuseArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    let name = args.model.resolve(None, true)?;
    refuse_existing(&args.save_path)?;
    let gguf = if args.export_gguf { Some(gguf_file(args)?) } else { None };
    let destination = args.upload_repo.as_deref().map(Destination::new).transpose()?;
    let adapter = Adapter::open(&args.adapter_path)?;
    let parts = if adapter.whole().is_some() { "tensors" } else { "modules" };
    let resolved = source_model(name.as_deref())?;
    let source = open(&resolved, printer)?;
    let repo_id = resolved.repo_id.as_deref();
    let fused = written(printer, &interrupt, |on_progress| {
        fuse(&source, adapter, &args.save_path, args.dequantize, repo_id, on_progress)
    })?;
    let Some(fused) = fused else { return Ok(ExitStatus::Interrupted) };
    report(&fused, parts, &args.save_path, printer);
    if let Some(file) = gguf {
        // From what was written, so that the file is of the model that was saved.
        let saved = SourceModel::open(&ModelSource::Snapshot(args.save_path.clone()))?;
        let name = model_name(repo_id, resolved.source.path());
        if !export(&saved, &file, GgufFileType::F16, &name, printer, &interrupt)? {
            return Ok(ExitStatus::Interrupted);
        }
    }
    if let Some(destination) = destination {
        destination.send(&args.save_path, "fuse", printer)?;
    }
    Ok(ExitStatus::Success)
}

/// The GGUF file to write. Checked before the work: a file of the model that is saved must not be replaced by it.
fn gguf_file(args: &FuseArgs) -> Result<PathBuf, Complaint> {
    let name = args.gguf_path.as_deref().unwrap_or(Path::new("ggml-model-f16.gguf"));
    let file = args.save_path.join(name);
    if !file.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf")) {
        let shown = name.display();
        return Err(Complaint::usage(format!("--gguf-path `{shown}` does not end in .gguf")));
    }
    refuse_existing(&file)?;
    match file.parent() {
        Some(folder) if folder != args.save_path && !folder.is_dir() => {
            let (file, folder) = (file.display(), folder.display());
            Err(Complaint::failure(format!("cannot write `{file}`: there is no folder `{folder}`")))
        }
        _ => Ok(file),
    }
}

fn report(fused: &Converted, parts: &str, path: &Path, printer: &Printer) {
    let (fraction, error) = (fused.kept.fraction(), fused.kept.error());
    if fraction < SMALL_FRACTION || error > LARGE_ERROR {
        printer.warning(&format!(
            "packing the weights again left {:.0} % of the adapter and made an error {error:.2} times its size",
            fraction * 100.0
        ));
        printer.hint("--dequantize keeps all of it");
    }
    printer.note(&format!("Fused {} {parts} into {}", fused.fused, path.display()));
}
