//! The body of a request, within bounds.

use std::time::Duration;

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::http::{Request, StatusCode, header};
use mlx_bun::checkpoint::json;
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::error::ApiError;

/// Bytes of a body: the longest prompt, and what is around it.
const LARGEST: usize = 32 << 20;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(120);

/// Reads a body that must be a JSON object.
///
/// # Errors
/// It is none, or too large.
pub async fn read_object(request: Request<Body>) -> Result<Map<String, Value>, ApiError> {
    let too_large = || {
        let message = format!("the body has more than {LARGEST} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if request.headers().contains_key(header::CONTENT_ENCODING) {
        let message = "compressed bodies are not supported; send plain JSON";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let body = request.into_body();
    if body.size_hint().lower() > LARGEST as u64 {
        return Err(too_large());
    }
    let bytes = timeout(PATIENCE, to_bytes(body, LARGEST)).await;
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
    let bytes = bytes.map_err(late)?.map_err(|error| {
        let limit =
            std::error::Error::source(&error).is_some_and(|cause| cause.to_string().contains("limit"));
        if limit { too_large() } else { ApiError::invalid("the body broke off") }
    })?;
    let problem = |error| ApiError::invalid(format!("the body is {}", json::problem(&error)));
    let text = std::str::from_utf8(&bytes).map_err(|_| ApiError::invalid("the body is not UTF-8"))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ApiError::invalid("the body must be a JSON object")),
        Err(error) => Err(problem(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: impl Into<Body>) -> Result<Map<String, Value>, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(read_object(Request::new(body.into())))
    }

    #[test]
    fn m8_bodies_that_are_no_objects_are_told_so() {
        assert_eq!(read("{\"a\": 1}").unwrap()["a"], 1);
        let message = |body: &'static [u8]| read(body).unwrap_err().message;
        assert!(message(b"{").starts_with("the body is not valid JSON"), "{}", message(b"{"));
        assert!(message(b"").starts_with("the body is "), "{}", message(b""));
        assert_eq!(message(b"[1]"), "the body must be a JSON object");
        assert_eq!(message(b"{\"a\": \"\xff\"}"), "the body is not UTF-8");
        assert_eq!(read(vec![b' '; LARGEST + 1]).unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
