//! Mixed precision: probing the model and sharing out bits.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::source::ResolvedModel;
use mlx_bun::checkpoint::{QuantMode, QuantParams};
use mlx_bun::quantize::{
    Action, Budget, ConvertOptions, Ends, FloatType, KvLayer, Predicate, SourceModel, SweepError,
    SweepOptions, allocate, calibration, kv_config, planned_size, sweep,
};

use super::{ConvertArgs, check_results_file, choose_arithmetic};
use crate::error::Complaint;
use crate::interrupt::Interrupt;
use crate::printer::Printer;

/// Tokens of a sequence that modules are probed with.
const CALIBRATION_LENGTH: usize = 128;

/// The file that --sensitivities names, or one beside the result.
fn results_file(args: &ConvertArgs) -> PathBuf {
    args.sensitivities.clone().unwrap_or_else(|| with_ending(&args.mlx_path, ".sensitivities.json"))
}

/// Results for caches are in a file of their own.
fn cache_results_file(args: &ConvertArgs) -> PathBuf {
    match &args.sensitivities {
        Some(file) => with_ending(file, ".kv"),
        None => with_ending(&args.mlx_path, ".kv-sensitivities.json"),
    }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// What stands for the weights in files of results.
fn identity(resolved: &ResolvedModel) -> std::io::Result<String> {
    Ok(resolved.source.path().canonicalize()?.to_string_lossy().into_owned())
}

/// Token sequences to probe with; chooses the arithmetic, too.
fn probes(args: &ConvertArgs, source: &SourceModel, printer: &Printer) -> anyhow::Result<Vec<Vec<u32>>> {
    choose_arithmetic(args, printer)?;
    let samples = calibration::samples(args.calibration_mix.as_deref())?;
    let count = args.n_calibration as usize;
    Ok(calibration::sequences(&samples, &source.tokenizer()?, CALIBRATION_LENGTH, count)?)
}

/// Probes the caches; `None` when interrupted.
pub fn measure_caches(
    args: &ConvertArgs,
    target: f64,
    resolved: &ResolvedModel,
    source: &SourceModel,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<Vec<KvLayer>>> {
    let sequences = probes(args, source, printer)?;
    interrupt.begin();
    let mut bar = None;
    let file = cache_results_file(args);
    check_results_file(&file)?;
    let model = identity(resolved)?;
    let layers = kv_config(source, &sequences, target, &file, &model, &mut |done, total| {
        bar.get_or_insert_with(|| printer.progress("Probing caches", total as u64)).set(done as u64);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    let layers = match layers {
        Err(SweepError::Interrupted) => return Ok(None),
        layers => layers?,
    };
    let wide = layers.iter().filter(|layer| layer.bits == 8).count();
    printer.note(&format!("Key-value caches: {wide} layers at 8 bits, {} at 4", layers.len() - wide));
    Ok(Some(layers))
}

/// Probes the model and shares the bits out; `None` when interrupted.
pub fn mix(
    args: &ConvertArgs,
    target: f64,
    params: QuantParams,
    resolved: &ResolvedModel,
    source: &SourceModel,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<Option<BTreeMap<String, QuantParams>>> {
    let mut candidates = args.candidate_bits.clone();
    candidates.sort_unstable();
    candidates.dedup();
    let with_bits = |bits: u8| {
        QuantParams::new(QuantMode::Affine, u64::from(bits), u64::from(params.group_size))
            .map_err(|error| Complaint::usage(error.to_string()))
    };
    for bits in &candidates {
        with_bits(*bits)?;
    }
    if params.mode != QuantMode::Affine {
        return Err(Complaint::usage("`--target-bpw` mixes affine widths; leave --q-mode out").into());
    }
    let sequences = probes(args, source, printer)?;
    let options = SweepOptions { candidates: candidates.clone(), group_size: params.group_size, sequences };
    let file = results_file(args);
    check_results_file(&file)?;
    let model = identity(resolved)?;
    interrupt.begin();
    let mut bar = None;
    let swept = sweep(source, &options, &file, &model, &mut |done, total| {
        bar.get_or_insert_with(|| printer.progress("Probing", total as u64)).set(done as u64);
        if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    let sensitivities = match swept {
        Err(SweepError::Interrupted) => return Ok(None),
        swept => swept?,
    };
    let lowest = candidates.first().copied().unwrap_or(params.bits);
    let listed = sensitivities.iter().map(|one| Ok((one.module.clone(), with_bits(lowest)?)));
    let predicate = Predicate::Listed(listed.collect::<Result<_, Complaint>>()?);
    let again = args.requantize || source.is_gguf();
    let dtype = args.dtype.as_deref().and_then(FloatType::from_name);
    let action = Action::Quantize { params, predicate, again };
    let (bytes, parameters) = planned_size(source, &ConvertOptions { dtype, action, kv_config: None })?;
    let budget = Budget { target, fewest: bytes as f64 * 8.0, parameters: parameters as f64 };
    let fewest = budget.fewest / budget.parameters.max(1.0);
    if fewest > target {
        printer.warning(&format!(
            "the fewest bits a weight that these widths allow are {fewest:.3}, not {target}"
        ));
        printer
            .hint("--candidate-bits with lower widths, a larger --q-group-size or fewer --q-bits take less");
    }
    let ends = if args.protect_ends { Ends::Protected } else { Ends::Measured };
    let allocation = allocate(&sensitivities, &candidates, budget, ends);
    let widest = candidates.last().copied();
    if allocation.bits_per_weight < target && allocation.bits.iter().all(|(_, bits)| Some(*bits) == widest) {
        printer.warning(&format!(
            "the most bits a weight that these widths allow are {:.3}, not {target}",
            allocation.bits_per_weight
        ));
        printer.hint("--candidate-bits with higher widths or a smaller --q-group-size take more");
    }
    printer.note(&format!(
        "Mixed {} modules: {:.3} bits per weight (target {target})",
        allocation.bits.len(),
        allocation.bits_per_weight
    ));
    let listed = allocation.bits.into_iter().map(|(module, bits)| Ok((module, with_bits(bits)?)));
    Ok(Some(listed.collect::<Result<_, Complaint>>()?))
}
