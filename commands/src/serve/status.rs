//! The server about itself and its machine: `/health`, `/stats`, `/metrics`, `/fit`, `/library`, `/downloads`.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::registry::fit::{Fit, FitOptions, Footprint, KvScheme, fit};
use mlx_bun::registry::machine::Machine;
use mlx_bun::registry::select::select_entry;
use mlx_bun::registry::{Filter, Model, Registry, Tier};
use mlx_bun::scheduler::EngineStats;
use serde_json::{Value, json};

use super::app::App;
use super::downloads;
use super::error::ApiError;
use super::metrics::Gauge;
use super::reply::json_response;
use super::response_store;

/// Context that `/fit` and `/library` judge by.
const TYPICAL_CONTEXT: u64 = 8192;
/// Context of the table of machines.
const SKU_CONTEXT: u64 = 32_768;
/// How long the list of models is kept.
const LIBRARY_AGE: Duration = Duration::from_secs(30);

/// Whether requests are answered.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, body) = match app.engine.is_alive() {
        true => (StatusCode::OK, r#"{"status": "ok"}"#),
        false => (StatusCode::SERVICE_UNAVAILABLE, r#"{"status": "unavailable"}"#),
    };
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (status, kind, body).into_response()
}

/// What the server does and how it is set.
pub async fn stats(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let stats = app.engine.stats();
    let (entries, bytes) = app.responses.size();
    let cache = stats.prompt_cache;
    let fitting = fit_of(&app).await.ok();
    let mode = if stats.max_batch > 1 { "batch" } else { "off" };
    Ok(json_response(&json!({
        "server": {"owner": "serve", "model": app.served.id, "started_at": app.started_at, "alive": stats.alive},
        "prompt_cache": {
            "entries": cache.entries, "bytes": cache.bytes, "max_bytes": cache.max_bytes, "hits": cache.hits,
            "misses": cache.misses,
        },
        "response_store": {
            "entries": entries, "bytes": bytes, "max_bytes": response_store::MOST_BYTES,
            "ttl_ms": response_store::TIME_TO_LIVE.as_millis(),
        },
        "kv_quant": {"mode": app.policy.kv_mode},
        "admission": {
            "max_safe_context": fitting.as_ref().and_then(|fit| fit.max_context),
            "memory_budget_bytes": app.policy.memory_budget,
            "usable_bytes": fitting.as_ref().map(|fit| fit.usable),
            "weights_bytes": app.served.parts.weight_bytes,
        },
        "batch": {
            "configured": stats.max_batch, "mode": mode, "batched": mode == "batch",
            "active_rows": stats.active_rows, "prefilling_rows": stats.prefilling_rows,
            "pending_rows": stats.queued, "queue_limit": stats.queue_limit, "submitted_rows": stats.submitted,
            "kv_bytes": stats.kv_bytes, "kv_budget_bytes": stats.kv_budget,
        },
        "requests": {
            "submitted": stats.submitted, "finished": stats.finished, "cancelled": stats.cancelled,
            "failed": stats.failed, "embedded": stats.embedded,
        },
        "tokens": {
            "prompt": stats.prompt_tokens, "cached": stats.cached_tokens, "generated": stats.generated_tokens,
            "steps": stats.steps,
        },
    })))
}

/// For Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.page(&gauges(&app.engine.stats()));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], page).into_response()
}

fn gauges(stats: &EngineStats) -> Vec<Gauge> {
    let gauge = |name, help, value: f64| Gauge { name, help, kind: "gauge", value };
    let counter = |name, help, value: u64| Gauge { name, help, kind: "counter", value: value as f64 };
    let cache = stats.prompt_cache;
    vec![
        gauge("mlx_bun_up", "Whether the engine is alive", f64::from(u8::from(stats.alive))),
        gauge("mlx_bun_requests_waiting", "Requests in the queue", stats.queued as f64),
        gauge("mlx_bun_requests_running", "Requests that are being computed", stats.active_rows as f64),
        gauge("mlx_bun_kv_cache_bytes", "Key-value caches of running requests", stats.kv_bytes as f64),
        gauge("mlx_bun_prompt_cache_bytes", "Bytes of the prompt cache", cache.bytes as f64),
        gauge("mlx_bun_prompt_cache_entries", "Entries of the prompt cache", cache.entries as f64),
        counter("mlx_bun_prompt_cache_hits_total", "Prompts whose beginning was cached", cache.hits),
        counter("mlx_bun_prompt_cache_misses_total", "Prompts whose beginning was not cached", cache.misses),
        counter("mlx_bun_engine_steps_total", "Decode steps", stats.steps),
        counter("mlx_bun_engine_failures_total", "Requests that failed in the engine", stats.failed),
    ]
}

/// What is known of models on this machine, kept for a while.
#[derive(Default)]
pub struct Library {
    machine: OnceLock<Machine>,
    footprint: OnceLock<Footprint>,
    models: Mutex<Option<(Instant, Value)>>,
}

impl Library {
    /// This machine; its speed is measured at the first question.
    fn machine(&self) -> &Machine {
        self.machine.get_or_init(Machine::this)
    }

    /// The registry's models as clients see them.
    fn models(&self, kv: KvScheme) -> Result<Value, ApiError> {
        let mut kept = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((since, models)) = kept.as_ref()
            && since.elapsed() < LIBRARY_AGE
        {
            return Ok(models.clone());
        }
        let models =
            scan().map_err(|error| ApiError::internal(format!("the registry cannot be read: {error}")))?;
        let models: Value = models.iter().map(|model| self.entry(model, kv)).collect();
        *kept = Some((Instant::now(), models.clone()));
        Ok(models)
    }

    fn entry(&self, model: &Model, kv: KvScheme) -> Value {
        let supported = !matches!(model.tier, Tier::Unsupported);
        let options = FitOptions { context: TYPICAL_CONTEXT, budget: None, kv, measured_rate: None };
        let assessment = Footprint::of(model).ok().map(|footprint| {
            let fit = fit(&footprint, self.machine(), &options);
            json!({
                "fits": fit.fits, "max_safe_context": fit.max_context, "predicted_decode_tps": fit.decode_rate,
            })
        });
        json!({
            "repo_id": model.repo_id, "model_type": model.model_type, "size_bytes": model.total_bytes(),
            "quant_bits": model.quant_bits, "vision": model.sees(), "supported": supported,
            "support_tier": model.tier, "complete": model.complete, "assessment": assessment,
        })
    }
}

/// The models of the registry, after a look at what has changed.
pub fn scan() -> Result<Vec<Model>, mlx_bun::registry::RegistryError> {
    let mut registry = Registry::open(&Environment::of_process())?;
    registry.scan()?;
    registry.models(&Filter::default())
}

fn judge(app: &App, context: u64, machine: &Machine) -> Result<Fit, ApiError> {
    let footprint = match app.library.footprint.get() {
        Some(footprint) => footprint,
        None => {
            let unreadable =
                |error: String| ApiError::internal(format!("the model cannot be judged: {error}"));
            let path = app.served.path.to_string_lossy();
            let model =
                select_entry(&path, &Environment::of_process()).map_err(|e| unreadable(e.to_string()))?;
            let footprint = Footprint::of(&model).map_err(|error| unreadable(error.to_string()))?;
            app.library.footprint.get_or_init(|| footprint)
        }
    };
    let options =
        FitOptions { context, budget: app.policy.memory_budget, kv: app.policy.kv, measured_rate: None };
    Ok(fit(footprint, machine, &options))
}

/// Of the machine only the memory counts here, so that its speed need not be measured.
async fn fit_of(app: &Arc<App>) -> Result<Fit, ApiError> {
    app.off_thread(|app| {
        let memory = Machine::memory_here();
        let machine = Machine { name: String::new(), memory, bandwidth: 1.0, measured: false };
        judge(app, TYPICAL_CONTEXT, &machine)
    })
    .await
}

/// Whether the model fits, here and elsewhere.
pub async fn fit_report(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let report = app.off_thread(|app| {
        let machine = app.library.machine();
        let context = app.served.parts.context_length.map_or(TYPICAL_CONTEXT, |context| context as u64);
        let typical = TYPICAL_CONTEXT.min(context);
        let here = judge(app, context, machine)?;
        let usual = judge(app, typical, machine)?;
        let skus = Machine::apple().map(|sku| {
            let fit = judge(app, SKU_CONTEXT, &sku)?;
            Ok(json!({
                "sku": sku.name, "ram_gb": sku.memory >> 30, "fits": fit.fits, "max_context": fit.max_context,
                "decode_tps": fit.decode_rate,
            }))
        });
        let skus = skus.collect::<Result<Vec<_>, ApiError>>()?;
        Ok(json!({
            "machine": {"chip": machine.name, "ram_bytes": machine.memory, "bandwidth_gbs": machine.bandwidth},
            "context_tokens": context, "typical_context_tokens": typical, "typical_decode_tps": usual.decode_rate,
            "measured_decode_tps": null, "measured_at": null,
            "report": {
                "fits": here.fits, "weights_bytes": here.weights, "kv_bytes": here.kv,
                "transient_bytes": here.transient, "total_bytes": here.total, "usable_bytes": here.usable,
                "max_safe_context": here.max_context, "predicted_decode_tps": here.decode_rate,
            },
            "sku_matrix_ctx": SKU_CONTEXT, "sku_matrix": skus,
        }))
    });
    report.await.map(|report| json_response(&report))
}

/// The models on this machine.
pub async fn library(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let models = app.off_thread(|app| {
        let mut models = app.library.models(app.policy.kv)?;
        for model in models.as_array_mut().into_iter().flatten() {
            model["serving"] = json!(model["repo_id"] == app.served.id.as_str());
        }
        Ok(models)
    });
    models.await.map(|models| json_response(&json!({"models": models})))
}

/// Downloads into this machine's caches that are not complete.
pub async fn downloads(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let downloads = app.off_thread(|_| Ok(downloads::unfinished(&Environment::of_process())));
    downloads.await.map(|downloads| json_response(&json!({"downloads": downloads})))
}
