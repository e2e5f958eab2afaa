//! A server over a tiny model, and a client that knows just enough of HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::mlx_bun;

/// A running `mlx-bun serve`; killed when dropped.
pub struct Server {
    pub child: Child,
    /// Its home, empty at first.
    _home: tempfile::TempDir,
    /// `127.0.0.1:PORT`.
    pub address: String,
}

/// The path of a tiny checkpoint; its end-of-sequence id is 2.
pub fn checkpoint(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/checkpoints").join(name).display().to_string()
}

/// The path of a chat template.
pub fn template(name: &str) -> String {
    let templates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/chat_templates/templates");
    templates.join(name).display().to_string()
}

impl Server {
    /// Over the tiny Llama, greedy unless a request says otherwise.
    pub fn start(flags: &[&str]) -> Self {
        Self::over(&checkpoint("llama-f32"), flags)
    }

    /// Over a model.
    pub fn over(model: &str, flags: &[&str]) -> Self {
        let mut command = mlx_bun(&["serve", "--model", model, "--port", "0", "--temp", "0"]);
        Self::spawn(command.args(flags).stderr(Stdio::null()))
    }

    /// A command that is ready to go.
    pub fn spawn(command: &mut Command) -> Self {
        let home = tempfile::tempdir().unwrap();
        let mut child = command.env("HOME", home.path()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").unwrap().to_owned();
        Self { child, _home: home, address }
    }

    /// Opens a connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request with these headers and reads the whole reply.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut stream = self.connect();
        self.write(&mut stream, method, path, headers, body);
        Reply::read(stream)
    }

    /// Writes a request.
    pub fn write(
        &self,
        stream: &mut TcpStream,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str(&format!("Host: {}\r\n", self.address));
        }
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("transfer-encoding")) {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        stream.write_all(body).unwrap();
    }

    /// Posts JSON.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    /// Posts JSON to a request that must succeed.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text());
        reply.json()
    }

    /// Reads a page that must be there.
    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    /// Waits until something about the server holds.
    pub fn wait_until(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        let since = Instant::now();
        while !holds(&self.get("/stats").json()) {
            assert!(since.elapsed() < Duration::from_secs(60), "{what}: {}", self.get("/stats").text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a signal and waits for the end: the exit code.
    pub fn signal(&mut self, name: &str) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A reply.
pub struct Reply {
    pub status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    /// Reads to the end of the connection.
    pub fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<_> = lines
            .map(|line| line.split_once(':').unwrap())
            .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
            .collect();
        let mut body = bytes[end + 4..].to_vec();
        if headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked") {
            body = unchunked(&body);
        }
        Self { status, headers, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The events of a stream: names, where there are any, and data.
    pub fn events(&self) -> Vec<(Option<String>, Value)> {
        let text = self.text();
        let mut events = Vec::new();
        for block in text.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':')) {
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
            let data = field("data: ").unwrap();
            let value =
                if data == "[DONE]" { Value::from("[DONE]") } else { serde_json::from_str(data).unwrap() };
            events.push((field("event: ").map(str::to_owned), value));
        }
        events
    }

    /// The error's message.
    pub fn error(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        body.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[(end + size + 4).min(bytes.len())..];
    }
    body
}

/// A chat request of a few tokens.
pub fn chat(text: &str, tokens: usize) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": tokens})
}

pub fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

pub fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap()
}

/// The contents of a chat stream, joined.
pub fn streamed(reply: &Reply) -> String {
    let events = reply.events();
    let text = |(_, value): &(_, Value)| value["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    events.iter().filter_map(text).collect()
}

pub fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false}}}])
}

/// Keeps a model that likes blanks from writing them where JSON allows some.
pub fn without_blanks(server: &Server) -> Value {
    let blanks =
        ["\n", "\t", "\r", " ", "  ", "\n\n"].map(|blank| json!({"content": blank, "add_special": false}));
    let ids =
        blanks.iter().flat_map(|body| server.ask("/tokenize", body)["tokens"].as_array().unwrap().clone());
    json!({"logit_bias": ids.map(|id| (id.to_string(), json!(-1000))).collect::<serde_json::Map<_, _>>()})
}

/// A server whose template knows tools.
pub fn with_tools() -> Server {
    Server::start(&["--chat-template", &template("hermes_tools.jinja")])
}
