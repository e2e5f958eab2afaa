//! `serve`: what it tells about itself, whom it lets in, and how it ends.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::adapter::{Layout, adapter};
use support::mlx_bun;
use support::server::{Reply, Server, chat, checkpoint, content, with};

#[test]
fn the_server_tells_about_itself() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/health").text(), "{\"status\": \"ok\"}");
    assert_eq!(server.get("/").json()["name"], "mlx-bun");
    assert_eq!(server.send("HEAD", "/", &[], b"").status, 200);
    assert_eq!(server.get("/v1").json()["model"], "llama-f32");
    let models = server.get("/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("llama-f32")));
    assert_eq!(models["data"][0]["context_window"], 512);
    assert_eq!(server.get("/v1/models/llama-f32").json()["id"], "llama-f32");
    assert_eq!(server.get("/v1/models/llama").status, 404);
    assert_eq!(server.get("/v1/modelsXYZ").status, 404);
    assert_eq!(server.get("/v1/adapters").json(), json!({"adapters": []}));
    server.ask("/v1/chat/completions", &chat("Hello", 2));
    let stats = server.get("/stats").json();
    assert_eq!((&stats["server"]["model"], &stats["batch"]["configured"]), (&json!("llama-f32"), &json!(8)));
    assert_eq!(stats["requests"]["submitted"], 1);
    let metrics = server.get("/metrics").text();
    assert!(
        metrics.contains("mlx_bun_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 1\n"),
        "{metrics}"
    );
    assert!(metrics.contains("mlx_bun_completion_tokens_total 2\n"), "{metrics}");
    let fit = server.get("/fit").json();
    assert_eq!((&fit["report"]["fits"], &fit["sku_matrix_ctx"]), (&json!(true), &json!(32768)));
    assert!(server.get("/library").json()["models"].is_array());
    assert_eq!(server.get("/downloads").json(), json!({"downloads": []}));
    let description = server.get("/openapi.json").json();
    for (path, operations) in description["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            let reply = server.send(&method.to_uppercase(), &path.replace("{id}", "none"), &[], b"");
            assert!(
                !(reply.status == 404 && reply.error() == "not found") && reply.status != 405,
                "{method} {path}"
            );
        }
    }
}

#[test]
fn m7_m8_bad_bodies_are_told_and_hurt_nobody() {
    let server = Server::start(&[]);
    let route = "/v1/chat/completions";
    let post = |headers: &[(&str, &str)], body: &[u8]| server.send("POST", route, headers, body);
    for (body, words) in [
        (&b"{"[..], "not valid JSON"),
        (b"", "the body is "),
        (b"[]", "must be a JSON object"),
        (b"{\"messages\": \"\xff\"}", "not UTF-8"),
        (b"{\"messages\": []}", "at least one message"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", \"image_url\": {\"url\": \"http://127.0.0.1\"}}]}]}", "text only"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"chat_template\": \"x\"}", "chat_template"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"chat_template_kwargs\": {\"messages\": 1}}", "messages"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"max_tokens\": true}", "max_tokens"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"logit_bias\": {\"1\": null}}", "logit_bias"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"logit_bias\": {\"99999\": 1}}", "99999"),
        (b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"adapter\": \"../../x\"}", "not mounted"),
    ] {
        let reply = post(&[], body);
        assert_eq!(reply.status, 400, "{}", String::from_utf8_lossy(body));
        assert!(reply.error().contains(words), "{}: {}", String::from_utf8_lossy(body), reply.error());
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
    }
    let text = chat("Hello", 3).to_string();
    let chunked = format!("{:x}\r\n{text}\r\n0\r\n\r\n", text.len());
    let reply = post(&[("Transfer-Encoding", "chunked")], chunked.as_bytes());
    assert_eq!(reply.status, 200);
    let mut stream = server.connect();
    write!(stream, "POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000\r\n\r\n")
        .unwrap();
    assert_eq!(Reply::read(stream).status, 413);
    let mut stream = server.connect();
    write!(stream, "POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert_eq!(server.send("PUT", route, &[], b"{}").status, 405);
    assert_eq!((server.get(route).status, server.get("/nowhere").status), (405, 404));
    assert_eq!(server.get("/nowhere").json()["error"]["message"], "not found");
    server.ask(
        route,
        &with(chat("Hello", 3), json!({"xtc_probability": 0, "stream_options": {}, "unknown": [1]})),
    );
}

#[test]
fn a_prompt_longer_than_the_context_has_its_code() {
    let server = Server::start(&[]);
    let reply = server.post("/v1/chat/completions", &chat(&"Hello ".repeat(600), 5));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let long = server
        .ask("/v1/chat/completions", &with(chat(&"Hello ".repeat(60), 5), json!({"max_tokens": 9_000_000})));
    let usage = &long["usage"];
    assert!(usage["total_tokens"].as_u64().unwrap() <= 512, "{usage}");
}

#[test]
fn keys_origins_and_hosts_are_checked() {
    let server = Server::start(&["--api-key", "secret", "--cors-origin", "https://good.example"]);
    let body = chat("Hello", 1).to_string();
    let post =
        |headers: &[(&str, &str)]| server.send("POST", "/v1/chat/completions", headers, body.as_bytes());
    let refused = post(&[]);
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(post(&[("Authorization", "Bearer secret")]).status, 200);
    assert_eq!(post(&[("x-api-key", "wrong")]).status, 401);
    assert_eq!(
        (server.get("/health").status, server.get("/metrics").status, server.get("/").status),
        (200, 401, 401)
    );
    let good = post(&[("x-api-key", "secret"), ("Origin", "https://good.example")]);
    assert_eq!(good.header("access-control-allow-origin"), Some("https://good.example"));
    assert_eq!(post(&[("x-api-key", "secret"), ("Origin", "https://evil.example")]).status, 403);
    let preflight = [
        ("Origin", "https://good.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization"),
    ];
    let preflight = server.send("OPTIONS", "/v1/chat/completions", &preflight, b"");
    assert_eq!(
        (preflight.status, preflight.header("access-control-allow-headers")),
        (204, Some("authorization"))
    );
    drop(server);
    let open = Server::start(&[]);
    assert_eq!(open.send("GET", "/v1/models", &[("Host", "evil.example")], b"").status, 403);
    assert_eq!(open.send("GET", "/v1/models", &[("Host", "localhost:1")], b"").status, 200);
    assert_eq!(
        open.send("POST", "/v1/chat/completions", &[("Origin", "https://evil.example")], b"{}").status,
        403
    );
    let id = open.send("GET", "/health", &[("X-Request-Id", "mine-1")], b"");
    assert_eq!(id.header("x-request-id"), Some("mine-1"));
    assert!(open.get("/health").header("x-request-id").unwrap().starts_with("req_"));
}

#[test]
fn m3_clients_that_go_leave_nothing_behind() {
    let server = Server::start(&["--max-tokens", "400"]);
    let body = |stream: bool| {
        with(chat("Hello", 400), json!({"stream": stream, "logit_bias": {"2": -1000}})).to_string()
    };
    for stream in [true, false] {
        for _ in 0..10 {
            let mut connection = server.connect();
            server.write(&mut connection, "POST", "/v1/chat/completions", &[], body(stream).as_bytes());
            if stream {
                connection.read_exact(&mut [0; 64]).unwrap();
            }
        }
    }
    server.wait_until("all rows are free", |stats| {
        stats["batch"]["active_rows"] == 0 && stats["batch"]["pending_rows"] == 0
    });
    let text = server.ask("/v1/chat/completions", &chat("Hello", 5));
    assert_eq!(text["usage"]["completion_tokens"], 5);
}

/// The tiny Llama with another context length.
fn with_context(length: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(checkpoint("llama-f32")).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let config = folder.path().join("config.json");
    let mut fields: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    fields["max_position_embeddings"] = json!(length);
    std::fs::write(config, fields.to_string()).unwrap();
    folder
}

#[test]
fn the_queue_is_bounded_and_says_so() {
    // The first reply outlasts the test, so that nothing leaves the queue while it fills.
    let endless = with_context(1 << 20);
    let server = Server::over(endless.path().to_str().unwrap(), &["--batch", "1"]);
    let body = with(chat("Hello", 1 << 19), json!({"stream": true, "logit_bias": {"2": -1000}})).to_string();
    let mut waiting = Vec::new();
    for _ in 0..80 {
        let mut connection = server.connect();
        connection.set_nonblocking(true).unwrap();
        server.write(&mut connection, "POST", "/v1/chat/completions", &[], body.as_bytes());
        waiting.push(connection);
    }
    let since = Instant::now();
    let is_refused = |connection: &TcpStream| {
        let mut head = [0; 12];
        connection.peek(&mut head).is_ok_and(|length| head[..length] == *b"HTTP/1.1 429")
    };
    let refused = loop {
        if let Some(refused) = waiting.iter().position(is_refused) {
            break waiting.swap_remove(refused);
        }
        assert!(since.elapsed() < Duration::from_secs(60), "nobody was refused");
        std::thread::sleep(Duration::from_millis(20));
    };
    refused.set_nonblocking(false).unwrap();
    let mut reply = String::new();
    { refused }.read_to_string(&mut reply).unwrap();
    let reply = reply.to_lowercase();
    assert!(reply.contains("retry-after: 1") && reply.contains("rate_limit"), "{reply}");
    drop(waiting);
    server.wait_until("the queue drains", |stats| {
        stats["batch"]["pending_rows"] == 0 && stats["batch"]["active_rows"] == 0
    });
    server.ask("/v1/chat/completions", &chat("Hello", 1));
}

#[test]
fn signals_end_the_server_in_order() {
    let mut server = Server::start(&["--shutdown-timeout", "20"]);
    let mut connection = server.connect();
    let body = with(chat("Hello", 300), json!({"stream": true, "logit_bias": {"2": -1000}})).to_string();
    server.write(&mut connection, "POST", "/v1/chat/completions", &[], body.as_bytes());
    connection.read_exact(&mut [0; 1]).unwrap();
    assert_eq!(server.signal("TERM"), Some(0));
    let mut rest = String::new();
    connection.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "what runs is finished");
    assert_eq!(Server::start(&[]).signal("INT"), Some(130));
    let mut server = Server::start(&["--shutdown-timeout", "0"]);
    let mut connection = server.connect();
    server.write(&mut connection, "POST", "/v1/chat/completions", &[], body.as_bytes());
    connection.read_exact(&mut [0; 1]).unwrap();
    let since = Instant::now();
    assert_eq!(server.signal("TERM"), Some(0));
    assert!(since.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_stream_that_the_end_of_the_server_cuts_is_logged_as_it_was() {
    let endless = with_context(1 << 20);
    let flags = ["serve", "--port", "0", "--shutdown-timeout", "0", "--log-format", "json", "--model"];
    let mut command = mlx_bun(&[&flags[..], &[endless.path().to_str().unwrap()]].concat());
    let mut server = Server::spawn(command.stderr(Stdio::piped()));
    let mut stderr = server.child.stderr.take().unwrap();
    let mut connection = server.connect();
    let body = with(chat("Hello", 1 << 19), json!({"stream": true, "logit_bias": {"2": -1000}})).to_string();
    server.write(&mut connection, "POST", "/v1/chat/completions", &[], body.as_bytes());
    // The head, the role and some of the reply.
    connection.read_exact(&mut [0; 1500]).unwrap();
    assert_eq!(server.signal("TERM"), Some(0));
    let mut log = String::new();
    stderr.read_to_string(&mut log).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let line = lines.into_iter().find(|line| line["event"] == "request").unwrap();
    assert_eq!((&line["status"], &line["failed"]), (&json!(200), &json!(503)), "{line}");
    assert!(line["completion_tokens"].as_u64().unwrap() > 0, "{line}");
}

#[test]
fn a_killed_server_leaves_its_port_to_the_next() {
    let mut first = Server::start(&[]);
    let port = first.address.rsplit(':').next().unwrap().to_owned();
    let again = |port: &str| mlx_bun(&["serve", "--model", &checkpoint("llama-f32"), "--port", port]);
    let refused = again(&port).output().unwrap();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr.starts_with(&format!("error: another mlx-bun serve listens on 127.0.0.1:{port} already")),
        "{stderr}"
    );
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    let second = Server::spawn(again(&port).stderr(Stdio::null()));
    second.ask("/v1/chat/completions", &chat("Hello", 1));
}

#[test]
fn logs_hold_no_text_of_prompts() {
    let mut command =
        mlx_bun(&["serve", "--model", &checkpoint("llama-f32"), "--port", "0", "--log-format", "json"]);
    let mut server = Server::spawn(command.stderr(Stdio::piped()));
    let mut stderr = server.child.stderr.take().unwrap();
    server.ask("/v1/chat/completions", &chat("a secret question", 3));
    server.post("/v1/chat/completions", &json!({"messages": "a secret question"}));
    server.signal("TERM");
    let mut log = String::new();
    stderr.read_to_string(&mut log).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let requests: Vec<_> = lines.iter().filter(|line| line["event"] == "request").collect();
    assert_eq!(
        (requests.len(), &requests[0]["completion_tokens"], &requests[1]["status"]),
        (2, &json!(3), &json!(400))
    );
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn l5_x4_adapters_are_mounted_named_and_unmounted() {
    let root = tempfile::tempdir().unwrap();
    adapter(&root.path().join("first"), Layout::MlxLm, 0.5);
    adapter(&root.path().join("second"), Layout::Peft, 0.7);
    let first = root.path().join("first");
    let root = root.path().to_str().unwrap();
    let server = Server::start(&["--adapter", first.to_str().unwrap(), "--adapter-root", root]);
    let reply = |adapter: Value| {
        let body = with(chat("Hello", 8), json!({"adapter": adapter}));
        content(&server.ask("/v1/chat/completions", &body)).to_owned()
    };
    let base = content(&Server::start(&[]).ask("/v1/chat/completions", &chat("Hello", 8))).to_owned();
    // The adapter of the start is the default, and an explicit choice wins.
    assert_eq!((reply(json!("none")), reply(Value::Null)), (base.clone(), reply(json!("first"))));
    assert_ne!(reply(json!("first")), base);
    assert_eq!(server.post("/v1/adapters", &json!({"id": "second"})).error(), "id and path required");
    for path in ["../outside", "/etc", "nowhere"] {
        let refused = server.post("/v1/adapters", &json!({"id": "x", "path": path}));
        assert_eq!(refused.status, 400, "{path}");
    }
    let mounted = server.ask("/v1/adapters", &json!({"id": "second", "path": "second"}));
    assert_eq!(
        (&mounted["id"], &mounted["rank"], &mounted["mounted_layers"]),
        (&json!("second"), &json!(4), &json!(6))
    );
    let texts = [reply(json!("second")), reply(json!("first+second")), reply(json!("first")), base];
    for (index, text) in texts.iter().enumerate() {
        assert!(!texts[index + 1..].contains(text), "{texts:?}");
    }
    assert_eq!(server.get("/v1/adapters").json()["adapters"].as_array().unwrap().len(), 2);
    let available = server.get("/v1/adapters/available").json();
    assert!(
        available["adapters"].as_array().unwrap().iter().all(|adapter| adapter["mounted"] == true),
        "{available}"
    );
    assert_eq!(server.send("DELETE", "/v1/adapters/second", &[], b"").json()["id"], "second");
    let gone = server.send("DELETE", "/v1/adapters/second", &[], b"");
    assert_eq!((gone.status, gone.error().as_str()), (404, "adapter second not mounted"));
    let refused = server.post("/v1/chat/completions", &with(chat("Hello", 1), json!({"adapter": "second"})));
    assert_eq!(refused.status, 400);
}
