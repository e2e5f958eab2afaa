//! `/v1/models`: the model that is served, then those of this machine.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::reply::json_response;
use super::status::scan;

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let models = app.off_thread(|app| Ok(models(app))).await?;
    Ok(json_response(&json!({"object": "list", "data": models})))
}

/// The models of this id, in the same form. A name that only begins like one is none.
pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let models = app.off_thread(|app| Ok(models(app))).await?;
    let mut found: Vec<Value> = models.into_iter().filter(|model| model["id"] == id.as_str()).collect();
    let Some(first) = found.first_mut() else {
        let message = format!("there is no model `{id}`; GET /v1/models lists those that are");
        return Err(ApiError::not_found(message).code("model_not_found"));
    };
    // OpenAI's clients expect the model, mlx-lm's a list with it.
    let mut object = first.take();
    object["data"] = json!([object.clone()]);
    Ok(json_response(&object))
}

fn models(app: &App) -> Vec<Value> {
    let created = app.started_at / 1000;
    let served = json!({
        "id": app.served.id, "object": "model", "created": created, "owned_by": "mlx-bun",
        "context_window": app.served.parts.context_length, "reasoning": app.format.has_reasoning(), "vision": false,
    });
    // A registry that cannot be read hides the other models, not this one.
    let others = scan().unwrap_or_default().into_iter().filter(|model| {
        model.repo_id != app.served.id && !matches!(model.tier, mlx_bun::registry::Tier::Unsupported)
    });
    let other = |model: mlx_bun::registry::Model| json!({"id": model.repo_id, "object": "model", "created": model.scanned_at, "owned_by": "mlx-bun"});
    std::iter::once(served).chain(others.map(other)).collect()
}
