//! `mlx-bun serve`: the HTTP front.
//!
//! One file a protocol reads a body into one [`request::Request`] and writes what the engine sends back in the
//! protocol's form; [`prepare`] is the way between, the same for all. Handlers never touch MLX, which lives on the
//! engine's thread, and never hold the async threads: templates, tokenizers and grammars run on threads of their own.

mod adapters;
#[cfg(test)]
mod any_body_tests;
mod app;
mod args;
mod body;
mod chat;
mod closed_schema;
mod completions;
mod constraint;
mod defaults;
mod downloads;
mod embeddings;
mod error;
mod fields;
mod guard;
mod listen;
mod log;
mod messages;
mod messages_request;
mod metrics;
mod models;
mod prepare;
mod reply;
mod request;
mod response_store;
mod responses;
mod responses_request;
mod routes;
mod status;
mod stream;
mod tokenize;
mod tools;
mod usage_chunks;

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::source::ResolvedModel;
use mlx_bun::lora::Adapter;
use mlx_bun::mlx::{self, DeviceKind};
use mlx_bun::registry::select::select_model;
use mlx_bun::scheduler::{Engine, ModelParts, StartError};
use mlx_bun::structured::ReplyFormat;

use self::app::{App, Policy, Served};
use self::args::Plan;
pub use self::args::ServeArgs;
use self::log::Log;
pub use self::routes::ENDPOINTS;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::load::choose_numerics;
use crate::printer::Printer;
use crate::prompt::Renderer;

/// Threads that read requests and write replies: they wait most of the time, and the processor is the engine's.
const ASYNC_THREADS: usize = 2;

/// How long the end waits for lines that are still to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Runs the verb.
///
/// # Errors
/// Flags that make no sense, a port that is taken, a model that cannot be loaded.
pub fn run(args: &ServeArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let mut warnings = Vec::new();
    let on_cpu = mlx::default_device() == DeviceKind::Cpu;
    let mut plan = args.resolve(on_cpu, &mut warnings)?;
    for warning in &warnings {
        printer.warning(warning);
    }
    // Before the weights are read: a port that is taken is known at once.
    let (listener, address) = listen::bind(&plan.host, plan.port)?;
    let resolved = select_model(plan.model.as_deref(), &Environment::of_process())?;
    printer.detail(&format!("model: {}", resolved.source.path().display()));
    let (engine, parts) = start(&mut plan, &resolved, printer)?;
    let grace = plan.grace;
    let app = Arc::new(assemble(plan, &resolved, engine, parts, printer)?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .thread_name("http")
        .enable_all()
        .build()?;
    let url = listen::url(address);
    let ready = || {
        app.log.event("listening", &format!("{} answers at {url}; Ctrl-C stops", app.served.id));
        let mut out = printer.stdout();
        writeln!(out, "{url}").and_then(|()| out.flush())
    };
    let status =
        runtime.block_on(listen::serve(listener, routes::router(&app), Arc::clone(&app), grace, ready))?;
    // Requests that did not end in time are left behind.
    runtime.shutdown_background();
    app.log.flush(LAST_LINES);
    Ok(status)
}

/// An error on its way through the engine's start.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct LoadFailure(anyhow::Error);

/// Loads the model on the engine's thread, and mounts the adapter that is named. Of whole weights the model is made, and
/// no adapter is named from then on.
fn start(
    plan: &mut Plan,
    resolved: &ResolvedModel,
    printer: &Printer,
) -> anyhow::Result<(Engine, ModelParts)> {
    let (numerics, source) = (plan.numerics, resolved.source.clone());
    let told = printer.clone();
    let adapter = plan.adapter.as_deref().map(Adapter::open).transpose()?;
    // Whole weights cannot be mounted: the model is loaded with them.
    let whole = adapter.filter(|adapter| adapter.whole().is_some());
    if whole.is_some() {
        plan.adapter = None;
    }
    let load = move || {
        choose_numerics(numerics, &told).map_err(LoadFailure)?;
        crate::load::load_adapted(&source, whole, &told).map_err(|error| LoadFailure(error.into()))
    };
    let (engine, parts) = Engine::start(plan.engine.clone(), load).map_err(|error| match error {
        StartError::Load(LoadFailure(error)) => error,
        error => Complaint::failure(error.to_string()).into(),
    })?;
    if let Some(adapter) = &plan.adapter {
        engine.mount(&adapter_id(adapter), adapter)?;
    }
    Ok((engine, parts))
}

/// What requests call an adapter: its folder's name, in characters that a request can write.
fn adapter_id(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let id = name.replace(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')), "-");
    if id.is_empty() || id == "none" { "adapter".to_owned() } else { id }
}

fn assemble(
    plan: Plan,
    resolved: &ResolvedModel,
    engine: Engine,
    parts: ModelParts,
    printer: &Printer,
) -> anyhow::Result<App> {
    let renderer = Renderer::new(Arc::clone(&parts.chat_templates), &parts.tokenizer, &plan.template);
    // The model's own may be broken and never used; the one that was named is meant.
    if plan.template.source.is_some() {
        let wrong = |error| Complaint::usage(format!("`--chat-template` cannot be used: {error}"));
        renderer.check().map_err(wrong)?;
    }
    let format = ReplyFormat::new(&parts.tokenizer, renderer.source())?;
    let path = resolved.source.path().to_owned();
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let id = resolved.repo_id.clone().or(name).unwrap_or_else(|| "model".to_owned());
    let embeds = id.to_lowercase().contains("embed") || path.join("modules.json").is_file();
    let kv_mode = match plan.kv_cache.quantization {
        Some(packed) => format!("uniform-kv{}", packed.bits),
        None => "bf16".to_owned(),
    };
    let policy = Policy {
        thinking: plan.thinking,
        kv: plan.kv_scheme(),
        kv_mode,
        memory_budget: plan.engine.memory_budget.map(|bytes| bytes as u64),
        adapter: plan.adapter.as_deref().map(adapter_id),
        adapter_root: plan.adapter_root,
        grammar_fallback: plan.grammar_fallback,
        system_prompt: plan.system_prompt,
        defaults: defaults::Defaults { model: parts.generation_config.clone(), ..plan.defaults },
    };
    let served = Served { id, path, embeds, parts };
    Ok(App::new(
        engine,
        served,
        renderer,
        format,
        policy,
        plan.guard,
        Log::new(printer.clone(), plan.log_format)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_called_by_their_folder() {
        assert_eq!(adapter_id(Path::new("/x/my-lora")), "my-lora");
        assert_eq!(adapter_id(Path::new("/x/my lora+2")), "my-lora-2");
        assert_eq!(adapter_id(Path::new("/")), "adapter");
    }
}
