//! The table of routes, and what all of them have in common: keys, request ids, logs, errors as JSON.

use std::sync::Arc;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde_json::{Map, Value, json};

use super::app::{App, new_id};
use super::error::{ApiError, Dialect};
use super::listen::LARGEST_HEAD;
use super::log::RequestLog;
use super::reply::json_response;
use super::{adapters, chat, completions, embeddings, messages, models, responses, status, tokenize};

/// A route as the reference page and the OpenAPI description show it.
pub struct Endpoint {
    /// `GET`, `POST` or `DELETE`.
    pub method: &'static str,
    /// The path; `{id}` stands for a part of it.
    pub path: &'static str,
    /// What it does.
    pub summary: &'static str,
}

const fn endpoint(method: &'static str, path: &'static str, summary: &'static str) -> Endpoint {
    Endpoint { method, path, summary }
}

/// All routes.
pub const ENDPOINTS: &[Endpoint] = &[
    endpoint("POST", "/v1/chat/completions", "Answer a conversation (OpenAI); also `/chat/completions`"),
    endpoint("POST", "/v1/completions", "Continue a text (OpenAI)"),
    endpoint("POST", "/v1/messages", "Answer a conversation (Anthropic)"),
    endpoint("POST", "/v1/messages/count_tokens", "Count the tokens of a conversation (Anthropic)"),
    endpoint("POST", "/v1/responses", "Answer a conversation (OpenAI Responses)"),
    endpoint("GET", "/v1/responses/{id}", "A stored response"),
    endpoint("DELETE", "/v1/responses/{id}", "Forget a stored response"),
    endpoint("POST", "/v1/embeddings", "Embed texts, where the model is made for it"),
    endpoint("GET", "/v1/models", "The served model, then the others on this machine"),
    endpoint("GET", "/v1/models/{id}", "One of them"),
    endpoint("GET", "/v1/adapters", "Mounted LoRA adapters"),
    endpoint("POST", "/v1/adapters", "Mount an adapter from the folder of `--adapter-root`"),
    endpoint("GET", "/v1/adapters/available", "Adapters in that folder"),
    endpoint("DELETE", "/v1/adapters/{id}", "Unmount an adapter"),
    endpoint("GET", "/v1", "Name, version, model and routes"),
    endpoint("POST", "/tokenize", "Token ids of a text or a conversation"),
    endpoint("POST", "/detokenize", "The text of token ids"),
    endpoint("GET", "/health", "200 while requests are answered, else 503; needs no key"),
    endpoint("GET", "/stats", "What the server does and how it is set"),
    endpoint("GET", "/metrics", "Counters for Prometheus"),
    endpoint("GET", "/fit", "Whether the model fits into memory, here and elsewhere"),
    endpoint("GET", "/library", "Models on this machine"),
    endpoint("GET", "/downloads", "Downloads that are not complete"),
    endpoint("GET", "/openapi.json", "This list as an OpenAPI description"),
    endpoint("GET", "/", "Name and version"),
];

/// The server's routes over an app.
pub fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/messages", post(messages::handle))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::handle))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/embeddings", post(embeddings::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/adapters", get(adapters::list).post(adapters::mount))
        .route("/v1/adapters/available", get(adapters::available))
        .route("/v1/adapters/{id}", delete(adapters::unmount))
        .route("/v1", get(index))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(status::health))
        .route("/stats", get(status::stats))
        .route("/metrics", get(status::metrics))
        .route("/fit", get(status::fit_report))
        .route("/library", get(status::library))
        .route("/downloads", get(status::downloads))
        .route("/openapi.json", get(openapi))
        .route("/", get(root))
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(app), front))
        .with_state(Arc::clone(app))
}

async fn nowhere(request: Request) -> Response {
    ApiError::not_found("not found").response(Dialect::of_path(request.uri().path()))
}

async fn wrong_method(request: Request) -> Response {
    let message = format!("{} has no method {}", request.uri().path(), request.method());
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message);
    error.response(Dialect::of_path(request.uri().path()))
}

async fn root(State(app): State<Arc<App>>) -> Response {
    json_response(&json!({
        "name": "mlx-bun", "version": env!("CARGO_PKG_VERSION"), "model": app.served.id, "api": "/v1",
    }))
}

async fn index(State(app): State<Arc<App>>) -> Response {
    let endpoints: Vec<String> =
        ENDPOINTS.iter().map(|endpoint| format!("{} {}", endpoint.method, endpoint.path)).collect();
    json_response(&json!({
        "name": "mlx-bun", "version": env!("CARGO_PKG_VERSION"), "model": app.served.id, "endpoints": endpoints,
    }))
}

async fn openapi() -> Response {
    json_response(&description())
}

/// The OpenAPI description.
fn description() -> Value {
    let mut paths = Map::new();
    for Endpoint { method, path, summary } in ENDPOINTS {
        let mut operation = json!({
            "summary": summary,
            "responses": {
                "200": {"description": "The reply"},
                "default": {"description": "An error", "content": {"application/json": {"schema": {"type": "object"}}}},
            },
        });
        if *method == "POST" {
            let schema = json!({"schema": {"type": "object", "additionalProperties": true}});
            operation["requestBody"] = json!({"required": true, "content": {"application/json": schema}});
        }
        if path.contains("{id}") {
            operation["parameters"] =
                json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        let at = paths.entry(*path).or_insert_with(|| json!({}));
        at[method.to_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "mlx-bun", "version": env!("CARGO_PKG_VERSION")},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    })
}

/// What every request goes through.
async fn front(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let log = RequestLog::new(app.log.clone(), Arc::clone(&app.metrics), id, method.to_string(), route);
    request.extensions_mut().insert(Arc::clone(&log));
    let headers = request.headers().clone();
    let mut response = match app.guard.check(&method, &headers, path == "/health") {
        Err(error) => error.response(Dialect::of_path(&path)),
        Ok(()) if head_size(&request) > LARGEST_HEAD => {
            let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
            let message = format!("the request's head has more than {LARGEST_HEAD} bytes");
            ApiError::new(status, message).response(Dialect::of_path(&path))
        }
        Ok(()) if method == Method::OPTIONS => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => in_our_words(next.run(request).await, Dialect::of_path(&path)).await,
    };
    log.status(response.status().as_u16());
    app.guard.add_cors(&headers, response.headers_mut());
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(log.id()) {
        headers.insert("x-request-id", id);
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Bytes of a request's head, as it was written or nearly so.
fn head_size(request: &Request) -> usize {
    let fields =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    request.uri().to_string().len() + fields.sum::<usize>()
}

/// Refusals that come from the framework, as text, become errors of the protocol.
async fn in_our_words(response: Response, dialect: Dialect) -> Response {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_text = kind.is_none_or(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !is_text || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let words = to_bytes(response.into_body(), 4096).await.unwrap_or_default();
    let words = String::from_utf8_lossy(&words);
    let message = match words.trim() {
        "" => status.canonical_reason().unwrap_or("the request failed").to_lowercase(),
        words => words.to_owned(),
    };
    ApiError::new(status, message).response(dialect)
}

/// The client's own id, if it is fit for a log; else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let fits = |id: &&str| !id.is_empty() && id.len() <= 128 && id.bytes().all(|b| b.is_ascii_graphic());
    given.filter(fits).map_or_else(|| new_id("req_"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_has_every_route() {
        let description = description();
        let paths = description["paths"].as_object().unwrap();
        assert_eq!(paths["/v1/adapters"].as_object().unwrap().len(), 2);
        assert!(paths["/v1/models/{id}"]["get"]["parameters"].is_array());
        let operations: usize = paths.values().map(|path| path.as_object().unwrap().len()).sum();
        assert_eq!(operations, ENDPOINTS.len());
    }

    #[test]
    fn odd_request_ids_are_replaced() {
        let id = |value: &str| {
            request_id(&HeaderMap::from_iter([("x-request-id".parse().unwrap(), value.parse().unwrap())]))
        };
        assert_eq!(id("abc-1"), "abc-1");
        assert!(
            id("a b").starts_with("req_")
                && id("").starts_with("req_")
                && id(&"x".repeat(200)).starts_with("req_")
        );
    }
}
