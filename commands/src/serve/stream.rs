//! Server-sent events: replies on their way to a client as they are made.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;

use super::error::ApiError;
use super::log::RequestLog;
use super::prepare::Started;
use super::reply::{Item, Outcome, Piece, Replies};

/// Pieces that wait for the connection.
const WAITING: usize = 64;
/// Silence before a comment tells the client that we live.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Time between reports of progress.
const PROGRESS: Duration = Duration::from_millis(200);

/// The events of a protocol.
pub trait Encoder: Send + 'static {
    /// What comes first.
    fn begin(&mut self, replies: &Replies) -> String;
    /// More of a reply.
    fn piece(&mut self, index: usize, piece: Piece) -> String;
    /// The end of a reply.
    fn done(&mut self, index: usize, outcome: &Outcome) -> String;
    /// The end of all.
    fn end(&mut self) -> String;
    /// A failure, after which nothing comes.
    fn failed(&mut self, error: &ApiError) -> String;
}

/// An event without a name.
pub fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// An event with a name.
pub fn event(name: &str, value: &Value) -> String {
    format!("event: {name}\ndata: {value}\n\n")
}

/// Appends a named event.
pub fn push_event(events: &mut String, name: &str, value: &Value) {
    // Writing to a String cannot fail.
    let _ = write!(events, "event: {name}\ndata: {value}\n\n");
}

/// The reply that streams; the replies end when the client goes.
pub fn respond(started: Started, encoder: impl Encoder, log: Arc<RequestLog>) -> Response {
    let (sender, receiver) = mpsc::channel(WAITING);
    log.streaming();
    let mut response = Body::from_stream(ReceiverStream::new(receiver)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    warn(headers, started.warning.as_deref());
    tokio::spawn(write(started.replies, encoder, sender, log));
    response
}

/// The header `Warning`, in what headers may hold.
pub fn warn(headers: &mut HeaderMap, warning: Option<&str>) {
    let Some(warning) = warning else { return };
    let plain: String = warning.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
    if let Ok(value) = HeaderValue::from_str(&plain) {
        headers.insert(header::WARNING, value);
    }
}

type Sender = mpsc::Sender<Result<Bytes, Infallible>>;

/// How the writing of a stream ended.
enum End {
    /// All of it is sent.
    Whole,
    /// The client went.
    Left,
    /// With an error of this status, of which the client is told.
    Failed(u16),
}

async fn write(mut replies: Replies, encoder: impl Encoder, sender: Sender, log: Arc<RequestLog>) {
    let end = send_all(&mut replies, encoder, &sender, &log).await;
    let usage = replies.usage();
    match end {
        End::Left => return log.left(usage),
        End::Failed(status) => log.failed(status),
        End::Whole => {}
    }
    log.finished(usage);
}

async fn send_all(
    replies: &mut Replies,
    mut encoder: impl Encoder,
    sender: &Sender,
    log: &RequestLog,
) -> End {
    let send = async |text: String| text.is_empty() || sender.send(Ok(Bytes::from(text))).await.is_ok();
    if !send(encoder.begin(replies)).await {
        return End::Left;
    }
    let mut silence = interval(KEEP_ALIVE);
    silence.set_missed_tick_behavior(MissedTickBehavior::Delay);
    silence.reset();
    let mut progress: Option<Instant> = None;
    loop {
        let next = tokio::select! {
            biased;
            () = sender.closed() => return End::Left,
            next = replies.next() => next,
            _ = silence.tick() => {
                if !send(": keepalive\n\n".to_owned()).await {
                    return End::Left;
                }
                continue;
            }
        };
        let text = match next {
            None => return if send(encoder.end()).await { End::Whole } else { End::Left },
            Some(Ok((_, Item::Progress { done, total }))) => {
                if progress.is_some_and(|last| last.elapsed() < PROGRESS) {
                    continue;
                }
                progress = Some(Instant::now());
                format!(": keepalive {done}/{total}\n\n")
            }
            Some(Ok((index, Item::Piece(piece)))) => {
                if !piece.events.is_empty() {
                    log.first_token();
                }
                encoder.piece(index, piece)
            }
            Some(Ok((index, Item::Done(outcome)))) => encoder.done(index, &outcome),
            Some(Err(error)) => {
                send(encoder.failed(&error)).await;
                return End::Failed(error.status.as_u16());
            }
        };
        if !text.is_empty() {
            silence.reset();
        }
        if !send(text).await {
            return End::Left;
        }
    }
}
