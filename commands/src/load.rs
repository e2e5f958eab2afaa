//! From a model argument to an engine.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use mlx_bun::cache::{LayerCache, LayerKind};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::generate::prompt_cache;
use mlx_bun::load::{LoadModelError, LoadedModel};
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::cpu::Isa;
use mlx_bun::mlx::cpu::kernels::matmul::has_integers;
use mlx_bun::mlx::cpu_ops::CpuPrecision;
use mlx_bun::mlx::{self, DeviceKind, cpu_ops};
use mlx_bun::registry::select::select_model;
use serde_json::Value;

use crate::args::numerics::Numerics;
use crate::compiled;
use crate::engine::{Engine, LoadOptions};
use crate::env;
use crate::error::Complaint;
use crate::printer::Printer;
use crate::prompt::Renderer;
use crate::session::{CACHE_EOS_TOKEN, CACHE_MODEL, CACHE_TOKENIZER, Session};

/// Loads the model that the options name.
///
/// # Errors
/// There is no such model, or it cannot be used.
pub fn load(options: &LoadOptions, printer: &Printer) -> anyhow::Result<Box<dyn Engine>> {
    choose_numerics(options.numerics, printer)?;
    let saved = options.prompt_cache_file.as_deref().map(prompt_cache::load).transpose()?;
    let (prefix, metadata) = saved.unzip();
    let recorded = metadata.as_ref().and_then(|metadata: &BTreeMap<_, _>| metadata.get(CACHE_MODEL).cloned());
    let argument = match (options.model.clone(), recorded) {
        (Some(given), Some(recorded)) if absolute(&given) != absolute(&recorded) => {
            return Err(Complaint::failure(format!(
                "the prompt cache was made with `{recorded}`, not `{given}`"
            ))
            .hint("leave --model out to take the model of the cache")
            .into());
        }
        // An empty name stands for the starter.
        (given, recorded) => given.or(recorded).filter(|name| !name.is_empty()),
    };
    let resolved = select_model(argument.as_deref(), &Environment::of_process())?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    let adapter = options.adapter_path.as_deref().map(Adapter::open).transpose()?;
    let mut loaded = load_adapted(&resolved.source, adapter, printer)?;
    loaded.model.prepare()?;
    let recorded = metadata.as_ref().map(recorded_eos_token).transpose()?.flatten();
    for token in options.extra_eos_tokens.iter().chain(&recorded) {
        let added = loaded.tokenizer.add_eos_token(token);
        added.map_err(|error| Complaint::usage(format!("end-of-sequence tokens: {error}")))?;
    }
    if let (Some(caches), Some(file)) = (&prefix, &options.prompt_cache_file) {
        prompt_cache::check(caches, &*loaded.model).with_context(|| file.display().to_string())?;
        check_packing(caches, loaded.model.layer_kinds(), options)?;
    }
    if options.numerics.l1 && options.kv_cache.max_size.is_some() && loaded.model.makes_own_cache() {
        printer.warning("`--max-kv-size` has no effect with `--l1` on this family, as in mlx-lm");
    }
    let templates = std::mem::take(&mut loaded.chat_templates);
    let renderer = Renderer::new(templates, &loaded.tokenizer, &options.template);
    let name = argument.as_deref().map(absolute).unwrap_or_default();
    Ok(Box::new(Session::new(loaded, renderer, options.clone(), name, prefix)))
}

/// The `--eos-token` that a prompt cache was made with.
fn recorded_eos_token(metadata: &BTreeMap<String, String>) -> anyhow::Result<Option<String>> {
    let Some(text) = metadata.get(CACHE_TOKENIZER) else { return Ok(None) };
    let config: Value =
        serde_json::from_str(text).context("the prompt cache's `tokenizer_config` is not JSON")?;
    Ok(config.get(CACHE_EOS_TOKEN).and_then(Value::as_str).map(str::to_owned))
}

/// A path that exists, from the root; anything else as it is. A saved cache is used from other folders, too.
fn absolute(name: &str) -> String {
    let path = Path::new(name).canonicalize();
    path.ok().and_then(|path| path.to_str().map(str::to_owned)).unwrap_or_else(|| name.to_owned())
}

/// Loads a model with an adapter, and says so when integer products were asked for and cannot be had.
///
/// # Errors
/// The model or its adapter cannot be used.
pub fn load_adapted(
    source: &ModelSource,
    adapter: Option<Adapter>,
    printer: &Printer,
) -> Result<LoadedModel, LoadModelError> {
    let loaded = mlx_bun::load::load_adapted(source, adapter)?;
    if let Some(kernels) = cpu_ops::kernels()
        && matches!(kernels.precision(), CpuPrecision::Int8 | CpuPrecision::Int16)
    {
        let precision = kernels.precision();
        let packed = || loaded.model.pieces().is_none_or(|mut pieces| pieces.takes_integers());
        if !has_integers(kernels.isa()) {
            let level = kernels.isa().level();
            printer.warning(&format!(
                "`--cpu-precision {precision}` changes nothing here: it needs avx512-vnni or avx2, and the kernels use {level}"
            ));
        } else if !packed() {
            printer.warning(&format!(
                "`--cpu-precision {precision}` changes nothing here: the model has no affine weights of 4 or 8 bits"
            ));
        }
    }
    Ok(loaded)
}

/// `MLX_BUN_CPU_ISA`, for every verb: a wrong value is wrong whether or not kernels are used.
///
/// # Errors
/// No such instructions, or none on this processor.
pub fn check_isa() -> Result<(), Complaint> {
    let name = env::MLX_BUN_CPU_ISA;
    let checked = Isa::from_setting(env::get(name).as_deref()).map(|_| ());
    checked.map_err(|error| Complaint::usage(format!("`{name}`: {error}")))
}

/// Fused activations are mlx-lm's bits. On a Linux CPU they need a C++ compiler at run time, so there they are
/// on only where those bits are asked for.
pub fn choose_numerics(numerics: Numerics, printer: &Printer) -> anyhow::Result<()> {
    let wanted =
        numerics.compiled_activations.unwrap_or(numerics.l1 || mlx::default_device() == DeviceKind::Gpu);
    let available = wanted && mlx::compile_available();
    if wanted && !available {
        printer.warning(
            "no g++ found: activations run unfused, and results may differ from mlx-lm's in the last bit",
        );
    }
    let asked = matches!(numerics.cpu_precision, CpuPrecision::Int8 | CpuPrecision::Int16);
    if asked && numerics.cpu_kernels && mlx::default_device() == DeviceKind::Gpu {
        let precision = numerics.cpu_precision;
        printer
            .warning(&format!("`--cpu-precision {precision}` changes nothing here: the model runs on a GPU"));
    }
    if available {
        compiled::claim()?;
    }
    mlx::set_compile(available);
    if numerics.cpu_kernels {
        cpu_ops::enable(cpu_ops::Settings {
            threads: numerics.threads,
            isa: env::get(env::MLX_BUN_CPU_ISA).as_deref(),
            precision: numerics.cpu_precision,
        })
        .map_err(|error| match &error {
            cpu_ops::EnableError::Pool(cpu_ops::PoolError::Spawn { .. }) => {
                Complaint::failure(error.to_string())
            }
            _ => Complaint::usage(error.to_string()),
        })?;
    } else {
        cpu_ops::disable();
    }
    Ok(())
}

/// Checks the flags of the key-value cache against a saved one, which keeps the form it was made in.
fn check_packing(caches: &[LayerCache], kinds: &[LayerKind], options: &LoadOptions) -> Result<(), Complaint> {
    let packed = caches.iter().find_map(|cache| match cache {
        LayerCache::Quantized(cache) => Some(cache.scheme()),
        _ => None,
    });
    let bounded = caches
        .iter()
        .zip(kinds)
        .any(|(cache, kind)| matches!((cache, kind), (LayerCache::Rotating(_), LayerKind::Full)));
    match (packed, options.kv_cache.quantization) {
        (Some(scheme), Some(wanted))
            if (scheme.bits, scheme.group_size) != (wanted.bits, wanted.group_size) =>
        {
            Err(Complaint::usage(format!(
                "the prompt cache is packed to {} bits in groups of {}, not {} in groups of {}",
                scheme.bits, scheme.group_size, wanted.bits, wanted.group_size
            ))
            .hint("leave --kv-bits and --kv-quant out, or give the cache's own sizes"))
        }
        (Some(scheme), None) if options.kv_cache.unpacked => Err(Complaint::usage(format!(
            "the prompt cache is packed to {} bits, and `--kv-quant off` cannot unpack it",
            scheme.bits
        ))
        .hint("leave --kv-quant out, or make the cache without it")),
        (None, Some(_)) if bounded => {
            Err(Complaint::usage("the prompt cache was made with `--max-kv-size` and cannot be packed")
                .hint("leave --kv-bits and --kv-quant out"))
        }
        _ => Ok(()),
    }
}
