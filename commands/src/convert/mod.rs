//! `mlx-bun convert`: quantizes, dequantizes or casts a model on disk.

mod method;
mod mix;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::{ResolvedModel, resolve_model};
use mlx_bun::checkpoint::{QuantMode, QuantParams};
use mlx_bun::mlx::cpu_ops;
use mlx_bun::quantize::{
    Action, ConvertError, ConvertOptions, Converted, FloatType, GgufFileType, Predicate, Recipe, SourceModel,
    convert, is_sensitivities, write_as_is,
};

use self::method::{MethodArgs, Outcome};
use crate::args::numerics::NumericsArgs;
use crate::env;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::gguf_export::{export, model_name};
use crate::interrupt::Interrupt;
use crate::load::choose_numerics;
use crate::output_file;
use crate::printer::Printer;
use crate::upload::Destination;

const EXAMPLES: &str = "\
Example:
  mlx-bun convert org/name --mlx-path name-4bit -q
  mlx-bun convert ./model --mlx-path model-mxfp4 -q --q-mode mxfp4
  mlx-bun convert ./model --mlx-path model-mixed --target-bpw 5
  mlx-bun convert ./model-4bit --mlx-path model-bf16 -d --dtype bfloat16
  mlx-bun convert ./model --to-gguf Q4_1 --gguf-path model.gguf";

/// Quantize, dequantize or cast a model
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = crate::generate::MORE, after_long_help = EXAMPLES)]
pub struct ConvertArgs {
    /// The model: a folder, a .gguf file, or the id of a model in the Hugging Face cache
    #[arg(value_name = "MODEL", conflicts_with = "hf_path")]
    model: Option<String>,

    /// The model, as mlx-lm's flag names it
    #[arg(long, visible_alias = "model", value_name = "MODEL", help_heading = "Files")]
    hf_path: Option<String>,

    /// The folder to write; it must not exist
    #[arg(long, value_name = "DIR", default_value = "mlx_model", help_heading = "Files")]
    mlx_path: PathBuf,

    /// Quantize the model; `-q` in this verb
    #[arg(long, conflicts_with = "dequantize", help_heading = "Quantization")]
    quantize: bool,

    /// Bits a weight [default: 4, mxfp8: 8]
    #[arg(long, value_name = "N", help_heading = "Quantization")]
    q_bits: Option<u64>,

    /// Weights that share a scale [default: affine 64, mxfp4 and mxfp8 32, nvfp4 16]
    #[arg(long, value_name = "N", help_heading = "Quantization")]
    q_group_size: Option<u64>,

    /// How numbers are coded: affine, mxfp4, nvfp4 or mxfp8
    #[arg(long, value_name = "MODE", default_value = "affine", value_parser = PossibleValuesParser::new(["affine", "mxfp4", "nvfp4", "mxfp8"]), hide_possible_values = true, help_heading = "Quantization")]
    q_mode: String,

    /// A mix of two widths: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6
    #[arg(long, value_name = "RECIPE", value_parser = PossibleValuesParser::new(Recipe::ALL.map(Recipe::name)), hide_possible_values = true, help_heading = "Quantization")]
    quant_predicate: Option<String>,

    /// Mix widths so that the whole file has this many bits a weight, scales and all, more where the model is sensitive;
    /// implies -q
    ///
    /// Each module is probed at each width first, which takes a forward pass; the results are kept, so that an
    /// interrupted run goes on where it was.
    #[arg(long, value_name = "BITS", value_parser = target_bits, conflicts_with_all = ["dequantize", "quant_predicate"], help_heading = "Mixed precision")]
    target_bpw: Option<f64>,

    /// Widths that --target-bpw chooses from
    #[arg(
        long,
        value_name = "N,N",
        value_delimiter = ',',
        default_value = "3,4,5,6,8",
        help_heading = "Mixed precision"
    )]
    candidate_bits: Vec<u8>,

    /// Rank the first and the last block a hundredfold above the others, whatever was measured
    #[arg(long, requires = "target_bpw", help_heading = "Mixed precision")]
    protect_ends: bool,

    /// Measure which layers' key-value caches take 4 bits and which need 8, for a mean of this many, and write
    /// kv_config.json
    #[arg(long, value_name = "BITS", value_parser = kv_bits, help_heading = "Mixed precision")]
    kv_target_bits: Option<f64>,

    /// Text to probe with: a .jsonl or text file [default: a built-in mix]
    #[arg(long, value_name = "FILE", env = env::MLX_BUN_CALIBRATION_JSONL, hide_env = true, help_heading = "Mixed precision")]
    calibration_mix: Option<PathBuf>,

    /// Sequences of 128 tokens to probe with
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Mixed precision")]
    n_calibration: u32,

    /// Where the results of probing are kept [default: --mlx-path with .sensitivities.json at its end;
    /// those of --kv-target-bits have .kv-sensitivities.json there, or .kv behind FILE]
    #[arg(long, value_name = "FILE", help_heading = "Mixed precision")]
    sensitivities: Option<PathBuf>,

    #[command(flatten)]
    methods: MethodArgs,

    #[command(flatten)]
    numerics: NumericsArgs,

    /// Unpack modules that are quantized already and quantize them anew; a .gguf file always is
    #[arg(long, requires = "quantize", help_heading = "Quantization")]
    requantize: bool,

    /// Undo the model's quantization
    #[arg(short, long, help_heading = "Quantization")]
    dequantize: bool,

    /// Type of what is not packed: float16, bfloat16 or float32 [default: the config's `torch_dtype`]
    #[arg(long, value_name = "TYPE", value_parser = PossibleValuesParser::new(FloatType::ALL.map(FloatType::name)), hide_possible_values = true, help_heading = "Quantization")]
    dtype: Option<String>,

    /// Write a GGUF file for llama.cpp instead of a folder, with matrices as F16, Q8_0, Q4_0 or Q4_1
    ///
    /// Packed weights that one of the three quantized types holds exactly stay as they are, unless it is to be F16.
    #[arg(long, value_name = "TYPE", value_parser = PossibleValuesParser::new(GgufFileType::ALL.map(GgufFileType::name)), ignore_case = true, hide_possible_values = true, conflicts_with_all = ["quantize", "dequantize", "dtype", "target_bpw", "kv_target_bits", "upload_repo", "mlx_path"], help_heading = "Files")]
    to_gguf: Option<String>,

    /// The file that --to-gguf writes; it must not exist [default: ggml-model-TYPE.gguf]
    #[arg(long, value_name = "FILE", requires = "to_gguf", help_heading = "Files")]
    gguf_path: Option<PathBuf>,

    /// Send the result to this repository of the hub, like org/name
    #[arg(long, value_name = "ID", help_heading = "Files")]
    upload_repo: Option<String>,

    /// Refused: code that a model ships is never run
    #[arg(long, hide_short_help = true, help_heading = "Files")]
    trust_remote_code: bool,
}

/// Runs the verb.
///
/// # Errors
/// Flags that make no sense, a model that cannot be used, a folder that exists or cannot be written.
pub fn run(args: &ConvertArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    if args.trust_remote_code {
        return Err(Complaint::usage(
            "`--trust-remote-code` is refused: mlx-bun never runs code that a model ships",
        )
        .into());
    }
    let params = quant_params(args)?;
    if let Some(kind) = args.to_gguf.as_deref().and_then(GgufFileType::from_name) {
        return to_gguf(args, kind, printer, &interrupt);
    }
    refuse_existing(&args.mlx_path)?;
    let destination = args.upload_repo.as_deref().map(Destination::new).transpose()?;
    let resolved = source_model(args.model.as_deref().or(args.hf_path.as_deref()))?;
    let source = open(&resolved, printer)?;
    let mut widths = None;
    if let (Some(method), Some(params)) = (args.methods.method, params) {
        match method::run(method, args, params, &source, printer, &interrupt)? {
            Outcome::Interrupted => return Ok(ExitStatus::Interrupted),
            Outcome::Widths(listed) => widths = Some(listed),
            Outcome::Reworked(reworked) => {
                let source = source.reworked(*reworked);
                let repo_id = resolved.repo_id.as_deref();
                let written = written(printer, &interrupt, |progress| {
                    write_as_is(&source, &args.mlx_path, repo_id, progress)
                })?;
                let Some(converted) = written else { return Ok(ExitStatus::Interrupted) };
                report(&converted, None, &args.mlx_path, printer);
                return finish(destination, args, printer);
            }
        }
    }
    let action = match params {
        Some(params) => Action::Quantize {
            params,
            predicate: match args.target_bpw {
                _ if widths.is_some() => Predicate::Listed(widths.unwrap_or_default()),
                None => recipe(args).map_or(Predicate::Uniform, Predicate::Recipe),
                Some(target) => {
                    match mix::mix(args, target, params, &resolved, &source, printer, &interrupt)? {
                        Some(listed) => Predicate::Listed(listed),
                        None => return Ok(ExitStatus::Interrupted),
                    }
                }
            },
            again: args.requantize || source.is_gguf(),
        },
        None if args.dequantize => Action::Dequantize,
        None => Action::Keep,
    };
    let dtype = args.dtype.as_deref().and_then(FloatType::from_name);
    let kv_config = match args.kv_target_bits {
        None => None,
        Some(target) => match mix::measure_caches(args, target, &resolved, &source, printer, &interrupt)? {
            Some(layers) => Some(layers),
            None => return Ok(ExitStatus::Interrupted),
        },
    };
    let options = ConvertOptions { dtype, action, kv_config };
    let converted = written(printer, &interrupt, |on_progress| {
        convert(&source, &args.mlx_path, &options, resolved.repo_id.as_deref(), on_progress)
    })?;
    let Some(converted) = converted else { return Ok(ExitStatus::Interrupted) };
    report(&converted, params, &args.mlx_path, printer);
    finish(destination, args, printer)
}

fn finish(
    destination: Option<Destination>,
    args: &ConvertArgs,
    printer: &Printer,
) -> anyhow::Result<ExitStatus> {
    if let Some(destination) = destination {
        destination.send(&args.mlx_path, "convert", printer)?;
    }
    Ok(ExitStatus::Success)
}

fn to_gguf(
    args: &ConvertArgs,
    kind: GgufFileType,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitStatus> {
    let default = || PathBuf::from(format!("ggml-model-{}.gguf", kind.name().to_lowercase()));
    let file = args.gguf_path.clone().unwrap_or_else(default);
    refuse_existing(&file)?;
    let resolved = source_model(args.model.as_deref().or(args.hf_path.as_deref()))?;
    let source = open(&resolved, printer)?;
    let name = model_name(resolved.repo_id.as_deref(), resolved.source.path());
    let done = export(&source, &file, kind, &name, printer, interrupt)?;
    Ok(if done { ExitStatus::Success } else { ExitStatus::Interrupted })
}

/// Chooses the arithmetic of whatever runs the model.
fn choose_arithmetic(args: &ConvertArgs, printer: &Printer) -> anyhow::Result<()> {
    let mut warnings = Vec::new();
    let numerics = args.numerics.resolve(&mut warnings);
    warnings.iter().for_each(|warning| printer.warning(warning));
    choose_numerics(numerics, printer)
}

/// No file of sensitivities is larger.
const LARGEST_RESULTS: u64 = 1 << 28;

/// Results of probing replace nothing but such results.
fn check_results_file(file: &Path) -> Result<(), Complaint> {
    output_file::check(file, "file of sensitivities", |file| {
        output_file::beginning(file, LARGEST_RESULTS).is_ok_and(|text| is_sensitivities(&text))
    })
}

fn target_bits(text: &str) -> Result<f64, String> {
    let problem = || "must be a positive number of bits".to_owned();
    text.parse().ok().filter(|bits: &f64| bits.is_finite() && *bits > 0.0).ok_or_else(problem)
}

fn kv_bits(text: &str) -> Result<f64, String> {
    let problem = || "must be a number in [4, 8]".to_owned();
    text.parse().ok().filter(|bits: &f64| (4.0..=8.0).contains(bits)).ok_or_else(problem)
}

/// Runs a conversion with a progress bar; `None` when it was interrupted.
pub fn written<T>(
    printer: &Printer,
    interrupt: &Interrupt,
    work: impl FnOnce(mlx_bun::quantize::OnProgress) -> Result<T, ConvertError>,
) -> anyhow::Result<Option<T>> {
    interrupt.begin();
    let mut bar = None;
    let result = work(&mut |progress| {
        bar.get_or_insert_with(|| printer.progress("Converting", progress.total)).set(progress.done);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    match result {
        Err(ConvertError::Interrupted) => Ok(None),
        result => Ok(Some(result?)),
    }
}

/// Finds a model; without a name that of `MLX_BUN_MODEL`, else the starter.
pub fn source_model(argument: Option<&str>) -> anyhow::Result<ResolvedModel> {
    let fallback = env::get(env::MLX_BUN_MODEL);
    Ok(resolve_model(argument.or(fallback.as_deref()), &Environment::of_process())?)
}

/// Opens a model for conversion.
pub fn open(resolved: &ResolvedModel, printer: &Printer) -> anyhow::Result<SourceModel> {
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    // The family is only asked which tensors it uses.
    cpu_ops::disable();
    Ok(SourceModel::open(&resolved.source)?)
}

/// Known before the work rather than after it.
pub fn refuse_existing(path: &Path) -> Result<(), Complaint> {
    if std::fs::symlink_metadata(path).is_ok() {
        return Err(Complaint::failure(format!(
            "cannot save to the path `{}` as it already exists",
            path.display()
        ))
        .hint("delete it or name another path"));
    }
    Ok(())
}

fn recipe(args: &ConvertArgs) -> Option<Recipe> {
    let name = args.quant_predicate.as_deref()?;
    Recipe::ALL.into_iter().find(|recipe| recipe.name() == name)
}

/// What to quantize to; `None` when nothing is.
fn quant_params(args: &ConvertArgs) -> Result<Option<QuantParams>, Complaint> {
    let mode = QuantMode::from_name(&args.q_mode).unwrap_or(QuantMode::Affine);
    if !args.quantize && args.target_bpw.is_none() && args.methods.method.is_none() {
        let given = [
            ("--q-bits", args.q_bits.is_some()),
            ("--q-group-size", args.q_group_size.is_some()),
            ("--quant-predicate", args.quant_predicate.is_some()),
            ("--q-mode", mode != QuantMode::Affine),
        ];
        return match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Complaint::usage(format!("`{flag}` does nothing without -q"))
                .hint("add -q to quantize the model")),
            None => Ok(None),
        };
    }
    if args.quant_predicate.is_some() && mode != QuantMode::Affine {
        return Err(Complaint::usage(format!(
            "`--quant-predicate` mixes affine widths and does not go with `--q-mode {mode}`"
        )));
    }
    let defaults = mode.defaults();
    let bits = args.q_bits.unwrap_or(u64::from(defaults.bits));
    let group_size = args.q_group_size.unwrap_or(u64::from(defaults.group_size));
    QuantParams::new(mode, bits, group_size).map(Some).map_err(|error| Complaint::usage(error.to_string()))
}

fn report(converted: &Converted, params: Option<QuantParams>, path: &Path, printer: &Printer) {
    const NAMED: usize = 3;
    if !converted.undivided.is_empty() {
        let named: Vec<_> = converted
            .undivided
            .iter()
            .take(NAMED)
            .map(|(module, columns)| format!("`{module}` ({columns} columns)"))
            .collect();
        let more = converted.undivided.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        printer.warning(&format!(
            "left unquantized, since the group size does not divide their rows: {}{more}",
            named.join(", ")
        ));
    }
    if params.is_some() && converted.left_packed > 0 {
        printer.warning(&format!(
            "{} modules are quantized already and stay as they are",
            converted.left_packed
        ));
        printer.hint("--requantize unpacks and quantizes them anew");
    }
    if let Some(params) = params {
        printer.note(&format!(
            "Quantized {} modules ({params}): {:.3} bits per weight",
            converted.quantized,
            converted.bits_per_weight()
        ));
    }
    printer.note(&format!(
        "Wrote {} ({:.3} GB, {} parameters)",
        path.display(),
        converted.bytes as f64 / 1e9,
        converted.parameters
    ));
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: ConvertArgs,
    }

    fn params(arguments: &[&str]) -> Result<Option<QuantParams>, String> {
        let args = Probe::parse_from(["x"].iter().chain(arguments)).args;
        quant_params(&args).map_err(|complaint| complaint.to_string())
    }

    /// case L10: each mode has its own defaults.
    #[test]
    fn modes_have_their_own_defaults_and_impossible_pairs_are_refused() {
        for (mode, bits, group_size) in
            [("affine", 4, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
        {
            let params = params(&["--quantize", "--q-mode", mode]).unwrap().unwrap();
            assert_eq!((params.bits, params.group_size), (bits, group_size), "{mode}");
        }
        assert_eq!(
            params(&["--quantize", "--q-mode", "mxfp4", "--q-group-size", "64"]).unwrap_err(),
            "mxfp4 quantization with 4 bits in groups of 64 does not exist; it takes 4 bits in groups of 32"
        );
        assert!(params(&["--quantize", "--q-bits", "7"]).unwrap_err().contains("2, 3, 4, 5, 6 or 8 bits"));
    }

    #[test]
    fn flags_of_quantization_need_it() {
        assert_eq!(params(&["--q-bits", "4"]).unwrap_err(), "`--q-bits` does nothing without -q");
        assert_eq!(params(&[]).unwrap(), None);
        let mixed = ["--quantize", "--quant-predicate", "mixed_3_6", "--q-mode", "nvfp4"];
        assert!(params(&mixed).unwrap_err().contains("does not go with `--q-mode nvfp4`"));
    }
}
