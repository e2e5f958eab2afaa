//! The body of a request, within bounds of size, time and memory.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::http::{Request, StatusCode, header};
use mlx_bun::checkpoint::json;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt as _;

use super::error::ApiError;

/// Bytes of a body: the longest prompt, and what is around it.
const LARGEST: usize = 32 << 20;
/// Bytes of all bodies together.
const TOGETHER: usize = 8 * LARGEST;
/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long nothing of it may arrive.
const SILENCE: Duration = Duration::from_secs(30);

/// Room for the bodies of all requests.
pub struct Bodies {
    room: Arc<Semaphore>,
    patience: Duration,
    silence: Duration,
}

impl Default for Bodies {
    fn default() -> Self {
        Self::new(TOGETHER, PATIENCE, SILENCE)
    }
}

/// The object that a body is, and the room it takes.
#[derive(Debug)]
pub struct Received {
    object: Map<String, Value>,
    room: OwnedSemaphorePermit,
}

impl Received {
    /// Frees the object and keeps its room, for what was read out of it.
    pub fn into_room(self) -> OwnedSemaphorePermit {
        self.room
    }
}

impl Deref for Received {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        &self.object
    }
}

impl Bodies {
    /// Room for so many bytes; a body may take so long, and be silent for so long.
    fn new(together: usize, patience: Duration, silence: Duration) -> Self {
        Self { room: Arc::new(Semaphore::new(together)), patience, silence }
    }

    /// Reads a body that must be a JSON object.
    ///
    /// # Errors
    /// It is none, too large or too slow, or others take all the room.
    pub async fn read_object(&self, request: Request<Body>) -> Result<Received, ApiError> {
        if request.headers().contains_key(header::CONTENT_ENCODING) {
            let message = "compressed bodies are not supported; send plain JSON";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let (bytes, room) = self.receive(request.into_body()).await?;
        let text = std::str::from_utf8(&bytes).map_err(|_| ApiError::invalid("the body is not UTF-8"))?;
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Ok(Received { object, room }),
            Ok(_) => Err(ApiError::invalid("the body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the body is {}", json::problem(&error)))),
        }
    }

    /// Room is taken for what arrives, not for what is announced.
    async fn receive(&self, body: Body) -> Result<(Vec<u8>, OwnedSemaphorePermit), ApiError> {
        let too_large = || {
            let message = format!("the body has more than {LARGEST} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        if body.size_hint().lower() > LARGEST as u64 {
            return Err(too_large());
        }
        let end = Instant::now() + self.patience;
        let (mut bytes, mut room) = (Vec::new(), self.room(0)?);
        let mut pieces = body.into_data_stream();
        loop {
            let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
            let silence = Instant::now() + self.silence;
            let piece = match timeout_at(end.min(silence), pieces.next()).await.map_err(late)? {
                None => return Ok((bytes, room)),
                Some(piece) => piece.map_err(|_| ApiError::invalid("the body broke off"))?,
            };
            if bytes.len() + piece.len() > LARGEST {
                return Err(too_large());
            }
            room.merge(self.room(piece.len())?);
            bytes.extend_from_slice(&piece);
        }
    }

    fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let taken = |_| {
            ApiError::overloaded(
                "the requests that are being read take all the room there is; try again in a moment",
            )
        };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.room).try_acquire_many_owned(bytes).map_err(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_into(bodies: &Bodies, body: impl Into<Body>) -> Result<Received, ApiError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(bodies.read_object(Request::new(body.into())))
    }

    fn read(body: impl Into<Body>) -> Result<Received, ApiError> {
        read_into(&Bodies::default(), body)
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
    #[test]
    fn a_body_that_stops_arriving_is_given_up() {
        let (short, long) = (Duration::from_millis(20), Duration::from_secs(60));
        for (patience, silence) in [(short, long), (long, short)] {
            let stuck = Body::from_stream(tokio_stream::pending::<Result<&'static str, std::io::Error>>());
            let error = read_into(&Bodies::new(100, patience, silence), stuck).unwrap_err();
            assert_eq!(error.status, StatusCode::REQUEST_TIMEOUT);
        }
    }

    #[test]
    fn bodies_together_are_bounded() {
        let bodies = Bodies::new(20, PATIENCE, SILENCE);
        let held = read_into(&bodies, "{\"a\": 1234567890}").unwrap();
        let refused = read_into(&bodies, "{\"a\": 1}").unwrap_err();
        assert_eq!((refused.status, refused.code), (StatusCode::SERVICE_UNAVAILABLE, Some("overloaded")));
        drop(held);
        assert!(read_into(&bodies, "{\"a\": 1}").is_ok());
        // What is refused gives its room back.
        assert!(read_into(&bodies, "[1]").is_err());
        assert_eq!(bodies.room.available_permits(), 20);
    }
}
