//! A client for any server that speaks OpenAI's chat protocol, which takes the times of what streams in.
//!
//! The first token's time is that of the first piece of text (or reasoning, or of a tool call), as bytes arrive here.
//! A server that sends several tokens in one burst gets gaps of nothing between them, so rates come from whole replies
//! and the clock, never from gaps.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;

use super::reply::{Reply, ReplyStream};
use super::sse::Events;

/// An event is a few hundred bytes; a line longer than this is no event.
const LONGEST_LINE: u64 = 16 << 20;
/// Of a reply that is no stream, this much is read.
const LONGEST_ERROR: u64 = 64 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A list of models may be longer than an error.
const LONGEST_LIST: u64 = 16 << 20;
/// Bytes of a stream, which has a few hundred a token: what is longer has no end.
const LONGEST_STREAM: u64 = 512 << 20;

/// A server.
#[derive(Clone)]
pub struct Endpoint {
    /// Up to and with `/v1`.
    base: String,
    key: Option<String>,
    /// The `model` of requests.
    model: Option<String>,
    /// For a whole request.
    timeout: Duration,
    agent: Agent,
}

/// What is asked.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// The user's message.
    pub prompt: String,
    /// Tokens at most.
    pub max_tokens: usize,
    /// What the reply must look like.
    pub schema: Option<Value>,
}

/// Why there is no reply.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum ClientError {
    /// The server cannot be reached, or went away.
    #[error("no answer: {0}")]
    Network(String),
    /// It refused.
    #[error("status {status}: {message}")]
    Status {
        /// The status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// A reply that is no JSON where there should be some.
    #[error("{path} answered status {status} and no JSON: {got}")]
    NoJson {
        /// What was asked for.
        path: String,
        /// The status.
        status: u16,
        /// How it begins.
        got: String,
    },
    /// It takes too long.
    #[error("no end within {seconds} s (--timeout), after {pieces} pieces of text")]
    Timeout {
        /// What it may take.
        seconds: u64,
        /// Pieces of text that came.
        pieces: usize,
    },
    /// More than can be a reply.
    #[error("the stream has no end: more than {} MiB in {pieces} pieces of text", LONGEST_STREAM >> 20)]
    Endless {
        /// Pieces of text that came.
        pieces: usize,
    },
    /// A reply without any text.
    #[error("the reply is empty")]
    Empty,
    /// An error inside the stream.
    #[error("the stream says: {0}")]
    Stream(String),
    /// The stream ended too early.
    #[error("the stream ended after {pieces} pieces of text, without its end")]
    Cut {
        /// Pieces of text that came.
        pieces: usize,
    },
    /// The user wants no more.
    #[error("interrupted")]
    Stopped,
}

impl Endpoint {
    /// A server at an address, with or without `/v1`. `timeout` is for a whole request.
    pub fn new(url: &str, key: Option<String>, model: Option<String>, timeout: Duration) -> Self {
        let base = url.trim_end_matches('/');
        let base = if base.ends_with("/v1") { base.to_owned() } else { format!("{base}/v1") };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(timeout));
        // A proxy of the environment is for other machines.
        if ["://127.0.0.1", "://localhost", "://[::1]"].iter().any(|host| base.contains(host)) {
            config = config.proxy(None);
        }
        Self { base, key, model, timeout, agent: config.build().into() }
    }

    /// The address, up to and with `/v1`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Takes the first model that the server lists for the `model` of requests, where none was named; returns how many
    /// others there are.
    ///
    /// # Errors
    /// The server cannot be reached, or lists nothing that can be read.
    pub fn find_model(&mut self) -> Result<usize, ClientError> {
        if self.model.is_some() {
            return Ok(0);
        }
        let models = self.get("/models")?;
        let names = models["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str());
        let names: Vec<&str> = names.collect();
        self.model = names.first().map(|name| (*name).to_owned());
        Ok(names.len().saturating_sub(1))
    }

    /// The `model` of requests.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn get(&self, path: &str) -> Result<Value, ClientError> {
        let request = self.agent.get(format!("{}{path}", self.base));
        let request = match &self.key {
            Some(key) => request.header("Authorization", format!("Bearer {key}")),
            None => request,
        };
        let reply = request.call().map_err(|error| self.network(&error))?;
        let status = reply.status().as_u16();
        let body = read_short(reply.into_body().into_reader(), LONGEST_LIST)?;
        match serde_json::from_str(&body) {
            Ok(value) if status == 200 => Ok(value),
            Err(_) if status == 200 => {
                let path = format!("GET /v1{path}");
                let start: String = body.trim().chars().take(100).collect();
                let got =
                    if start.is_empty() { "an empty body".to_owned() } else { start.replace('\n', " ") };
                Err(ClientError::NoJson { path, status, got })
            }
            _ => Err(ClientError::Status { status, message: error_message(&body) }),
        }
    }

    fn body(&self, request: &ChatRequest) -> Value {
        let mut body = json!({
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        if let Some(schema) = &request.schema {
            let schema = json!({"name": "reply", "strict": true, "schema": schema});
            body["response_format"] = json!({"type": "json_schema", "json_schema": schema});
        }
        body
    }

    /// Sends a request and reads its reply; `stop` is asked at every event.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn chat(&self, request: &ChatRequest, stop: &dyn Fn() -> bool) -> Result<Reply, ClientError> {
        let body = self.body(request).to_string();
        let mut post = self
            .agent
            .post(format!("{}/chat/completions", self.base))
            .header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            post = post.header("Authorization", format!("Bearer {key}"));
        }
        let started = Instant::now();
        let reply = post.send(body.as_bytes()).map_err(|error| self.network(&error))?;
        let status = reply.status().as_u16();
        if status != 200 {
            let message = error_message(&read_short(reply.into_body().into_reader(), LONGEST_ERROR)?);
            return Err(ClientError::Status { status, message });
        }
        // One more than may be, so that a stream that stops there is told from one that goes on.
        let body = reply.into_body().into_reader().take(LONGEST_STREAM + 1);
        let mut reader = BufReader::new(body);
        let mut stream = ReplyStream::new(started);
        let mut events = Events::default();
        let (mut line, mut total) = (Vec::new(), 0u64);
        loop {
            if stop() {
                return Err(ClientError::Stopped);
            }
            line.clear();
            let read = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
            let read = read.map_err(|error| match stream.pieces() {
                pieces if started.elapsed() >= self.timeout => self.timed_out(pieces),
                0 => ClientError::Network(error.to_string()),
                pieces => ClientError::Cut { pieces },
            })?;
            total += read as u64;
            if total > LONGEST_STREAM || events.pending() as u64 > LONGEST_LINE {
                return Err(ClientError::Endless { pieces: stream.pieces() });
            }
            let event = if read == 0 { events.rest() } else { events.push(&line) };
            if let Some(event) = event
                && stream.event(&event)?
            {
                return stream.finish(request);
            }
            if read == 0 {
                return stream.finish(request);
            }
        }
    }

    fn network(&self, error: &ureq::Error) -> ClientError {
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                ClientError::Network(error.to_string())
            }
            ureq::Error::Timeout(_) => self.timed_out(0),
            error => ClientError::Network(error.to_string()),
        }
    }

    fn timed_out(&self, pieces: usize) -> ClientError {
        ClientError::Timeout { seconds: self.timeout.as_secs(), pieces }
    }
}

fn read_short(body: impl Read, most: u64) -> Result<String, ClientError> {
    let mut bytes = Vec::new();
    body.take(most).read_to_end(&mut bytes).map_err(|error| ClientError::Network(error.to_string()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The message in an error's body, in any of the forms servers have; else its beginning.
pub fn error_message(body: &str) -> String {
    let parsed: Value = serde_json::from_str(body).unwrap_or_default();
    let found = ["/error/message", "/error", "/message", "/detail"]
        .iter()
        .find_map(|place| parsed.pointer(place).and_then(Value::as_str));
    let text = found.unwrap_or(body).trim();
    let short: String = text.chars().take(300).collect();
    if short.is_empty() { "no reason given".to_owned() } else { short.replace('\n', " ") }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A server that answers one request with what the script writes, and tells the request's body.
    fn scripted(
        script: impl FnOnce(&mut TcpStream) + Send + 'static,
    ) -> (Endpoint, Receiver<(String, Value)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, bodies) = channel();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if line.trim().is_empty() {
                    break;
                }
                head.push_str(&line);
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let _ = sender.send((head, serde_json::from_slice(&body).unwrap_or_default()));
            script(&mut stream);
        });
        (Endpoint::new(&url, Some("secret".to_owned()), None, Duration::from_secs(20)), bodies)
    }

    fn say(stream: &mut TcpStream, text: &str) {
        stream.write_all(text.as_bytes()).unwrap();
        stream.flush().unwrap();
    }

    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";

    fn delta(text: &str) -> String {
        format!(
            "data: {}\n\n",
            json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
        )
    }

    fn end(reason: &str) -> String {
        format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))
    }

    fn request() -> ChatRequest {
        ChatRequest { prompt: "hi".to_owned(), max_tokens: 8, schema: None }
    }

    fn ask(script: impl FnOnce(&mut TcpStream) + Send + 'static) -> Result<Reply, ClientError> {
        scripted(script).0.chat(&request(), &|| false)
    }

    #[test]
    fn times_are_those_of_pieces_of_text() {
        let reply = ask(|stream| {
            say(stream, OK);
            let role = json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]});
            say(stream, &format!(": keepalive 1/2\n\ndata: {role}\n\n"));
            std::thread::sleep(Duration::from_millis(150));
            say(stream, &delta("a"));
            std::thread::sleep(Duration::from_millis(60));
            say(stream, &delta("b"));
            say(stream, &end("length"));
            let usage = json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7,
                "speculation": {"accepted": 3, "drafted": 4}}});
            say(stream, &format!("data: {usage}\n\ndata: [DONE]\n\n"));
        })
        .unwrap();
        assert!(reply.ttft >= 0.15, "a role is no text: {}", reply.ttft);
        assert_eq!(reply.gaps.len(), 1);
        assert!(reply.gaps[0] >= 0.055 && reply.e2e >= reply.ttft + reply.gaps[0]);
        assert_eq!((reply.text.as_str(), reply.finish.as_deref()), ("ab", Some("length")));
        assert_eq!((reply.tokens, reply.tokens_from_usage, reply.prompt_tokens), (7, true, Some(5)));
        assert_eq!(reply.speculation, Some((3, 4)));
    }

    #[test]
    fn without_usage_pieces_are_counted_and_that_is_said() {
        let reply = ask(|stream| {
            say(stream, OK);
            let thought = json!({"choices": [{"delta": {"reasoning_content": "hm"}}]});
            say(stream, &format!("data: {thought}\n\n{}{}data: [DONE]\n\n", delta("x"), end("stop")));
        })
        .unwrap();
        assert_eq!((reply.tokens, reply.tokens_from_usage, reply.prompt_tokens), (2, false, None));
        assert_eq!(reply.text, "x");
    }

    #[test]
    fn a_reply_of_nothing_is_no_answer() {
        assert_eq!(ask(|stream| say(stream, &format!("{OK}{}", end("stop")))), Err(ClientError::Empty));
        let counted = json!({"choices": [], "usage": {"completion_tokens": 8}});
        let claimed = ask(move |stream| say(stream, &format!("{OK}{}data: {counted}\n\n", end("stop"))));
        assert_eq!(claimed, Err(ClientError::Empty));
    }

    #[test]
    fn counts_that_cannot_be_are_not_believed() {
        let claiming = |text: &'static str, completion: u64, prompt: u64| {
            let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion,
                "speculation": {"accepted": 9, "drafted": 4}});
            let usage = json!({"choices": [], "usage": usage});
            let (script, end) = (delta(text), end("stop"));
            ask(move |stream| say(stream, &format!("{OK}{script}{script}{end}data: {usage}\n\n"))).unwrap()
        };
        let told = |reply: &Reply| (reply.tokens, reply.tokens_from_usage, reply.claimed_tokens);
        assert_eq!(told(&claiming("four words of text", 8, 5)), (8, true, None));
        // Of at most 8.
        assert_eq!(told(&claiming("four words of text", 1_000_000, 5)), (2, false, Some(1_000_000)));
        assert_eq!(told(&claiming("x", 0, 5)), (2, false, Some(0)));
        let reply = claiming("x", 2, 1 << 40);
        assert_eq!((reply.prompt_tokens, reply.speculation), (None, None));
    }

    #[test]
    fn a_stream_without_end_is_said_to_be_one() {
        let (mut endpoint, _) = scripted(|stream| {
            let piece = delta("a");
            say(stream, OK);
            while stream.write_all(piece.as_bytes()).is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        endpoint = Endpoint::new(endpoint.base(), None, None, Duration::from_secs(1));
        let error = endpoint.chat(&request(), &|| false).unwrap_err();
        assert!(matches!(error, ClientError::Timeout { seconds: 1, pieces: 1.. }), "{error}");
        // An event that never ends has no piece of text in it.
        let error = ask(|stream| {
            say(stream, OK);
            let line = format!("data: {}\n", "x".repeat(1 << 20));
            while stream.write_all(line.as_bytes()).is_ok() {}
        });
        assert_eq!(error, Err(ClientError::Endless { pieces: 0 }));
    }

    #[test]
    fn a_stream_that_is_cut_is_no_reply() {
        let cut = ask(|stream| say(stream, &format!("{OK}{}{}", delta("a"), delta("b"))));
        assert_eq!(cut, Err(ClientError::Cut { pieces: 2 }));
        let inside = ask(|stream| say(stream, &format!("{OK}data: {{\"choices\": [{{\"del")));
        assert!(matches!(inside, Err(ClientError::Stream(_) | ClientError::Cut { pieces: 0 })), "{inside:?}");
        // A chunked body that stops in the middle of a chunk.
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let event = delta("a");
        let sized = format!("{:x}\r\n{event}\r\n", event.len());
        let broken = ask(move |stream| say(stream, &format!("{chunked}{sized}ff\r\ndata:")));
        assert_eq!(broken, Err(ClientError::Cut { pieces: 1 }));
    }

    #[test]
    fn refusals_tell_status_and_reason() {
        let refuse = |status: &'static str, body: &'static str| {
            ask(move |stream| {
                let length = body.len();
                say(
                    stream,
                    &format!(
                        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                    ),
                );
            })
            .unwrap_err()
            .to_string()
        };
        let busy = r#"{"error": {"message": "the queue is full", "type": "rate_limit_error"}}"#;
        assert_eq!(refuse("429 Too Many Requests", busy), "status 429: the queue is full");
        assert_eq!(refuse("500 Internal Server Error", r#"{"error": "oops"}"#), "status 500: oops");
        assert_eq!(refuse("500 Internal Server Error", "<html>\nx"), "status 500: <html> x");
        assert_eq!(refuse("503 Service Unavailable", ""), "status 503: no reason given");
    }

    #[test]
    fn errors_inside_a_stream_are_errors() {
        let error = ask(|stream| {
            say(stream, &format!("{OK}{}data: {{\"error\": {{\"message\": \"gone\"}}}}\n\n", delta("a")))
        });
        assert_eq!(error, Err(ClientError::Stream("gone".to_owned())));
        let error = ask(|stream| say(stream, &format!("{OK}data: nonsense\n\n"))).unwrap_err();
        assert!(error.to_string().starts_with("the stream says: an event that is no JSON"), "{error}");
    }

    #[test]
    fn nobody_there_and_nobody_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/", listener.local_addr().unwrap());
        drop(listener);
        let endpoint = Endpoint::new(&url, None, None, Duration::from_secs(5));
        assert!(endpoint.base().ends_with("/v1"));
        assert!(matches!(endpoint.chat(&request(), &|| false), Err(ClientError::Network(_))));
        let (endpoint, _) = scripted(|stream| say(stream, &format!("{OK}{}", delta("a"))));
        assert_eq!(endpoint.chat(&request(), &|| true), Err(ClientError::Stopped));
    }

    #[test]
    fn a_server_that_says_nothing_is_given_up() {
        let (mut endpoint, _) = scripted(|_| std::thread::sleep(Duration::from_secs(3)));
        endpoint = Endpoint::new(endpoint.base(), None, None, Duration::from_millis(300));
        let since = Instant::now();
        let given_up = endpoint.chat(&request(), &|| false);
        assert!(matches!(given_up, Err(ClientError::Timeout { pieces: 0, .. })), "{given_up:?}");
        assert!(since.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn the_request_is_openais_and_carries_the_key() {
        let (endpoint, bodies) =
            scripted(|stream| say(stream, &format!("{OK}{}{}", delta("a"), end("stop"))));
        let request = ChatRequest { schema: Some(json!({"type": "null"})), ..request() };
        endpoint.chat(&request, &|| false).unwrap();
        let (head, body) = bodies.recv().unwrap();
        assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
        assert!(head.to_lowercase().contains("authorization: bearer secret"), "{head}");
        assert_eq!(body["messages"][0]["content"], "hi");
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert_eq!(body["response_format"]["json_schema"]["schema"]["type"], "null");
        assert!(body.get("model").is_none());
    }

    #[test]
    fn the_first_model_is_asked_and_others_are_counted() {
        let answer = |body: &'static str| {
            let (mut endpoint, _) = scripted(move |stream| {
                let length = body.len();
                say(
                    stream,
                    &format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                    ),
                );
            });
            let others = endpoint.find_model().map_err(|error| error.to_string());
            others.map(|others| (endpoint.model().map(str::to_owned), others))
        };
        let one = Some("one".to_owned());
        assert_eq!(answer(r#"{"data": [{"id": "one"}]}"#), Ok((one.clone(), 0)));
        assert_eq!(answer(r#"{"data": [{"id": "one"}, {"id": "two"}]}"#), Ok((one, 1)));
        assert_eq!(answer(r#"{"data": []}"#), Ok((None, 0)));
        let got = |got: &str| Err(format!("GET /v1/models answered status 200 and no JSON: {got}"));
        assert_eq!(answer(""), got("an empty body"));
        assert_eq!(answer("<html>\nhello"), got("<html> hello"));
    }
}
