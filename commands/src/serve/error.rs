//! What a client is told when its request fails, in the words of its protocol.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::reply::json_response;

/// Whose envelope an error comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
}

impl Dialect {
    /// The one that clients of a path understand.
    pub fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") { Self::Anthropic } else { Self::OpenAi }
    }
}

/// A request that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What is wrong, and what to do.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// A word that programs look for.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// An error of this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// The request makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field of the request makes no sense.
    pub fn field(param: &str, problem: impl std::fmt::Display) -> Self {
        Self { param: Some(param.to_owned()), ..Self::invalid(format!("`{param}` {problem}")) }
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// The server's own failure.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Too many requests wait already.
    pub fn busy() -> Self {
        let message = "too many requests are waiting; try again in a moment";
        Self { code: Some("rate_limit_exceeded"), ..Self::new(StatusCode::TOO_MANY_REQUESTS, message) }
    }

    /// Something that there is little of is taken; it is free again soon.
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self { code: Some("overloaded"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// The engine is gone.
    pub fn unavailable() -> Self {
        let message = "the server is stopping, or its engine has failed; restart it";
        Self { code: Some("engine_unavailable"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// The prompt leaves no room for a reply.
    pub fn context_length(prompt: usize, context: usize) -> Self {
        Self::too_long(&prompt.to_string(), context)
    }

    /// The same of a prompt whose tokens nobody has counted: there are `least` or more.
    pub fn context_length_at_least(least: usize, context: usize) -> Self {
        Self::too_long(&format!("at least {least}"), context)
    }

    fn too_long(tokens: &str, context: usize) -> Self {
        let message = format!(
            "the prompt has {tokens} tokens and the model's context is {context}, a reply included; shorten the prompt"
        );
        Self {
            code: Some("context_length_exceeded"),
            param: Some("messages".to_owned()),
            ..Self::invalid(message)
        }
    }

    /// With a word that programs look for.
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn kind(&self, dialect: Dialect) -> &'static str {
        match (self.status.as_u16(), dialect) {
            (401, _) => "authentication_error",
            (403, _) => "permission_error",
            (404, Dialect::Anthropic) => "not_found_error",
            (413, Dialect::Anthropic) => "request_too_large",
            (429, _) => "rate_limit_error",
            (503, Dialect::Anthropic) => "overloaded_error",
            (500.., Dialect::Anthropic) => "api_error",
            (500.., Dialect::OpenAi) => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body.
    pub fn body(&self, dialect: Dialect) -> Value {
        let kind = self.kind(dialect);
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code,
            }}),
            Dialect::Anthropic => json!({"type": "error", "error": {"type": kind, "message": self.message}}),
        }
    }

    /// The whole reply.
    pub fn response(&self, dialect: Dialect) -> Response {
        let mut response = (self.status, json_response(&self.body(dialect))).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(Dialect::OpenAi)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_has_its_envelope() {
        let error = ApiError::field("top_p", "must be in [0, 1]");
        assert_eq!(
            error.body(Dialect::OpenAi),
            json!({"error": {"message": "`top_p` must be in [0, 1]", "type": "invalid_request_error", "param": "top_p",
                "code": null}})
        );
        assert_eq!(
            error.body(Dialect::Anthropic),
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "`top_p` must be in [0, 1]"}})
        );
        assert_eq!(ApiError::internal("x").body(Dialect::Anthropic)["error"]["type"], "api_error");
        assert_eq!(ApiError::internal("x").body(Dialect::OpenAi)["error"]["type"], "server_error");
    }

    #[test]
    fn statuses_bring_their_headers() {
        let response = ApiError::busy().response(Dialect::OpenAi);
        assert_eq!(
            (response.status().as_u16(), &response.headers()["retry-after"]),
            (429, &"1".parse().unwrap())
        );
        let response = ApiError::new(StatusCode::UNAUTHORIZED, "x").response(Dialect::Anthropic);
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
    }
}
