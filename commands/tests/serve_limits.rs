//! `serve` under clients that ask for too much: it refuses them soon, and goes on answering the others.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Map, Value, json};
use support::mlx_bun;
use support::server::{Reply, Server, chat, checkpoint, content, with};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn structures_that_take_long_to_compile_hold_up_nobody_else() {
    let server = Server::start(&[]);
    let properties: Map<_, _> =
        (0..6000).map(|index| (format!("p{index}"), json!({"type": "integer"}))).collect();
    let wide = json!({"type": "object", "properties": properties, "additionalProperties": false});
    let waiting: Vec<TcpStream> = (0..3)
        .map(|index| {
            let schema = with(wide.clone(), json!({"title": index.to_string()}));
            let body = with(chat("Hello", 1), json!({"guided_json": schema})).to_string();
            let mut connection = server.connect();
            server.write(&mut connection, "POST", CHAT, &[], body.as_bytes());
            connection
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    server.ask(CHAT, &chat("Hello", 2));
    for connection in &waiting {
        connection.set_nonblocking(true).unwrap();
        assert!(connection.peek(&mut [0]).is_err(), "the structures are compiled already");
        connection.set_nonblocking(false).unwrap();
    }
    // Two take the places, the third waits for one. Whether each exceeds its time depends on the machine.
    for reply in waiting.into_iter().map(Reply::read) {
        match reply.status {
            400 => assert!(reply.error().contains("grammar"), "{}", reply.error()),
            503 => {
                assert!(reply.error().contains("structures of other requests"), "{}", reply.error());
                assert_eq!(reply.header("retry-after"), Some("1"));
            }
            status => panic!("{status}: {}", reply.error()),
        }
    }
    server.ask(CHAT, &chat("Hello", 2));
}

#[test]
fn texts_that_cannot_fit_are_not_tokenized() {
    let server = Server::start(&[]);
    let text = "ab ".repeat(100_000);
    let message = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        (CHAT, chat(&text, 1)),
        ("/v1/completions", json!({"prompt": text, "max_tokens": 1})),
        ("/v1/messages", json!({"messages": message, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": message})),
        ("/v1/responses", json!({"input": text, "max_output_tokens": 1})),
        ("/tokenize", json!({"content": text})),
        ("/tokenize", json!({"messages": message})),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path}");
        assert!(reply.error().contains("the prompt has at least "), "{path}: {}", reply.error());
    }
}

#[test]
fn heads_are_taken_up_to_their_limit() {
    let server = Server::start(&[]);
    let status = |size: usize| server.send("GET", "/health", &[("x-long", &"x".repeat(size))], b"").status;
    assert_eq!([50_000, 65_000].map(status), [200, 200]);
    assert_eq!([66_000, 200_000].map(status), [431, 431]);
    let many = |count: usize| {
        let names: Vec<String> = (0..count).map(|index| format!("x-{index}")).collect();
        let headers: Vec<_> = names.iter().map(|name| (name.as_str(), "a")).collect();
        server.send("GET", "/health", &headers, b"").status
    };
    // Three are there anyway.
    assert_eq!((many(97), many(98)), (200, 431));
}

#[test]
fn every_refusal_is_json() {
    let server = Server::start(&[]);
    for (method, path, status) in [
        ("GET", "/v1/models/%ff", 400),
        ("GET", "/v1/responses/%ff", 400),
        ("DELETE", "/v1/responses/%ff", 400),
        ("DELETE", "/v1/adapters/%ff", 400),
        ("GET", "/%ff", 404),
        ("PUT", "/v1/models/%ff", 405),
    ] {
        let reply = server.send(method, path, &[], b"");
        assert_eq!(
            (reply.status, reply.header("content-type")),
            (status, Some("application/json")),
            "{method} {path}"
        );
        assert!(!reply.error().is_empty(), "{method} {path}: {}", reply.text());
    }
}

#[test]
fn a_body_of_one_client_may_stop_and_others_are_answered() {
    let server = Server::start(&[]);
    let mut stuck = server.connect();
    write!(stuck, "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{").unwrap();
    server.ask(CHAT, &chat("Hello", 1));
}

#[test]
fn a_standard_error_that_nobody_reads_stops_nothing() {
    let mut command = mlx_bun(&["serve", "--model", &checkpoint("llama-f32"), "--port", "0"]);
    let mut server = Server::spawn(command.stderr(Stdio::piped()));
    // A pipe holds 64 KiB.
    let id = "x".repeat(128);
    for _ in 0..600 {
        assert_eq!(server.send("GET", "/health", &[("X-Request-Id", &id)], b"").status, 200);
    }
    server.ask(CHAT, &chat("Hello", 1));
    assert_eq!(server.signal("TERM"), Some(0));
}

/// What a server that cannot start says, with its exit code.
fn refused(flags: &[&str]) -> (Option<i32>, String) {
    let model = checkpoint("llama-f32");
    let mut command = mlx_bun(&[&["serve", "--port", "0", "--model", &model], flags].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if !line.is_empty() {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(line, "", "{flags:?}: it has started");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn what_no_request_could_work_with_is_refused_at_the_start() {
    for (flags, code, words) in [
        (&["--kv-bits", "8"][..], 1, "needs a head dimension that it divides"),
        (&["--kv-quant", "8"], 1, "needs a head dimension that it divides"),
        (&["--chat-template", "{% broken"], 2, "`--chat-template` cannot be used: "),
        (&["--kv-budget", "100b"], 1, "the KV budget leaves 100 for it"),
        (&["--memory-budget", "100kB"], 1, "the weights take "),
        (&["--kv-budget", "0"], 2, "must be more than 0"),
        (&["--cors-origin", "evil"], 2, "is no origin"),
        (&["--allowed-hosts", "a/b"], 2, "is no name of a host"),
        (&["--adapter-root", "/no/such/folder"], 1, "is no folder"),
    ] {
        let (status, said) = refused(flags);
        assert_eq!(status, Some(code), "{flags:?}: {said}");
        assert!(said.contains(words), "{flags:?}: {said}");
    }
}

#[test]
fn penalties_that_leave_no_numbers_are_refused() {
    let server = Server::start(&[]);
    for value in [1e-38, 1e38, 0.001] {
        let reply = server.post(CHAT, &with(chat("Hello", 2), json!({"repetition_penalty": value})));
        assert_eq!(
            (reply.status, reply.error().as_str()),
            (400, "`repetition_penalty` must be 0 or in [0.01, 100]")
        );
    }
    let usual = server.ask(CHAT, &chat("Hello", 8));
    // Too low to draw with, so greedy, as the server is.
    let low = server.ask(CHAT, &with(chat("Hello", 8), json!({"temperature": 1e-38, "seed": 1})));
    assert_eq!(content(&low), content(&usual));
    let generated =
        mlx_bun(&["generate", "--model", &checkpoint("llama-f32"), "--repetition-penalty", "1e-38", "x"]);
    assert_eq!({ generated }.output().unwrap().status.code(), Some(2));
}

#[test]
fn likely_tokens_are_all_listed_whether_they_are_text_or_not() {
    let server = Server::start(&[]);
    for stream in [false, true] {
        let body = json!({"prompt": "Hi", "max_tokens": 8, "logprobs": 20, "stream": stream});
        let reply = server.post("/v1/completions", &body);
        let parts: Vec<Value> = match stream {
            false => vec![reply.json()["choices"][0]["logprobs"].clone()],
            true => {
                let events = reply.events().into_iter();
                let parts = events.map(|(_, event)| event["choices"][0]["logprobs"].clone());
                parts.filter(Value::is_object).collect()
            }
        };
        let mut tokens = 0;
        for part in &parts {
            for (token, top) in
                part["tokens"].as_array().unwrap().iter().zip(part["top_logprobs"].as_array().unwrap())
            {
                tokens += 1;
                assert!(top.as_object().unwrap().len() >= 20, "{top}");
                assert!(top.get(token.as_str().unwrap()).is_some(), "{token} {top}");
            }
        }
        assert_eq!(tokens, 8);
    }
}

#[test]
fn hosts_are_read_strictly() {
    let server = Server::start(&[]);
    let status = |host: &str| {
        let mut stream = server.connect();
        write!(stream, "GET /v1/models HTTP/1.1\r\n{host}Connection: close\r\n\r\n").unwrap();
        Reply::read(stream).status
    };
    assert_eq!(status("Host: localhost\r\n"), 200);
    assert_eq!(status("Host: [::1].evil.example\r\n"), 400);
    assert_eq!(status("Host: user@127.0.0.1\r\n"), 400);
    assert_eq!(status("Host: localhost\r\nHost: evil.example\r\n"), 400);
    assert_eq!(status("Host: evil.example\r\n"), 403);
}
