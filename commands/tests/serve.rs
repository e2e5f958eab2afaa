//! `serve` over real connections: what each route answers, and what it refuses.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use std::io::{Read, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::adapter::{Layout, adapter};
use support::mlx_bun;
use support::server::{Reply, Server, checkpoint, template};

/// A chat request of a few tokens.
fn chat(text: &str, tokens: usize) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": tokens})
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap()
}

/// The contents of a chat stream, joined.
fn streamed(reply: &Reply) -> String {
    let events = reply.events();
    let text = |(_, value): &(_, Value)| value["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    events.iter().filter_map(text).collect()
}

#[test]
fn a_chat_is_answered_as_generate_answers_it() {
    let server = Server::start(&[]);
    let reply = server.ask("/v1/chat/completions", &chat("Hello", 12));
    let generated =
        mlx_bun(&["generate", "--model", &checkpoint("llama-f32"), "-q", "--json", "-m", "12", "Hello"]);
    let generated: Value = serde_json::from_slice(&{ generated }.output().unwrap().stdout).unwrap();
    assert_eq!(content(&reply), generated["text"].as_str().unwrap());
    assert_eq!(reply["object"], "chat.completion");
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let usage = &reply["usage"];
    assert_eq!((&usage["completion_tokens"], &usage["lane"]), (&json!(12), &json!("serial")));
    assert_eq!(usage["prompt_tokens"], generated["stats"]["prompt_tokens"]);
    assert_eq!(server.ask("/chat/completions", &chat("Hello", 12))["choices"], reply["choices"]);
}

#[test]
fn a_stream_is_the_same_text_by_the_book() {
    let server = Server::start(&[]);
    let whole = server.ask("/v1/chat/completions", &chat("Hello", 20));
    let reply = server.post("/v1/chat/completions", &with(chat("Hello", 20), json!({"stream": true})));
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert_eq!(
        (reply.header("cache-control"), reply.header("x-accel-buffering")),
        (Some("no-cache"), Some("no"))
    );
    assert_eq!(streamed(&reply), content(&whole));
    let events: Vec<Value> = reply.events().into_iter().map(|(_, value)| value).collect();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events.last().unwrap(), "[DONE]");
    let last = &events[events.len() - 2];
    assert_eq!(
        (&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]),
        (&json!({}), &json!("length"))
    );
    assert_eq!(last["usage"]["completion_tokens"], 20);
    for event in &events[..events.len() - 1] {
        assert_eq!((&event["id"], &event["model"]), (&events[0]["id"], &whole["model"]));
        assert_eq!(event["object"], "chat.completion.chunk");
    }
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = server.post("/v1/chat/completions", &with(chat("Hello", 3), options)).events();
    let usage = &events[events.len() - 2].1;
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
    assert!(events[events.len() - 3].1["usage"].is_null());
}

#[test]
fn every_setting_changes_the_reply() {
    let server = Server::start(&["--max-tokens", "16"]);
    let usual = server.ask("/v1/chat/completions", &chat("Hello", 16));
    let text = content(&usual).to_owned();
    let reply = |fields: Value| server.ask("/v1/chat/completions", &with(chat("Hello", 16), fields));
    let seeded = |seed: u64| content(&reply(json!({"temperature": 1.5, "seed": seed}))).to_owned();
    assert_eq!(seeded(1), seeded(1));
    assert_ne!(seeded(1), seeded(2));
    for fields in [
        json!({"repetition_penalty": 5}),
        json!({"frequency_penalty": 100, "frequency_context_size": 0}),
        json!({"presence_penalty": 100}),
        json!({"logit_bias": {"100": 1000}}),
        json!({"max_completion_tokens": 2}),
        json!({"temperature": 2, "seed": 3, "hlg": true}),
    ] {
        assert_ne!(content(&reply(fields.clone())), text, "{fields}");
    }
    for fields in [
        json!({"temperature": 3, "top_k": 1}),
        json!({"temperature": 3, "min_p": 1, "seed": 1}),
        json!({"n": 1}),
    ] {
        assert_eq!(content(&reply(fields.clone())), text, "{fields}");
    }
    let stop: String = text.chars().skip(3).take(3).collect();
    let stopped = reply(json!({"stop": [stop, "never"]}));
    assert_eq!(content(&stopped), &text[..text.find(&stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let several = reply(json!({"n": 3, "temperature": 1, "seed": 5}));
    let texts: Vec<_> =
        several["choices"].as_array().unwrap().iter().map(|c| c["message"]["content"].clone()).collect();
    assert!(texts.len() == 3 && texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    assert_eq!(several["usage"]["completion_tokens"], 48);
    let events = server
        .post("/v1/chat/completions", &with(chat("Hello", 4), json!({"n": 2, "stream": true})))
        .events();
    let indices: Vec<_> =
        events.iter().filter_map(|(_, event)| event["choices"][0]["index"].as_u64()).collect();
    assert!(indices.contains(&0) && indices.contains(&1));
}

#[test]
fn log_probabilities_come_whole_and_in_streams() {
    let server = Server::start(&[]);
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let whole = server.ask("/v1/chat/completions", &with(chat("Hello", 5), fields.clone()));
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(tokens.len(), 5);
    assert_eq!(tokens[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(tokens[0]["top_logprobs"][0]["token"], tokens[0]["token"]);
    assert!(tokens[0]["logprob"].as_f64().unwrap() < 0.0);
    let stream =
        server.post("/v1/chat/completions", &with(with(chat("Hello", 5), fields), json!({"stream": true})));
    let in_stream: Vec<Value> = stream
        .events()
        .iter()
        .filter_map(|(_, event)| event["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(in_stream, tokens);
    let completion =
        server.ask("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 4, "logprobs": 1}));
    let lists = &completion["choices"][0]["logprobs"];
    assert_eq!(lists["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(lists["text_offset"][0], 0);
}

#[test]
fn completions_continue_a_text() {
    let server = Server::start(&[]);
    let reply = server.ask("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 8}));
    let generated =
        mlx_bun(&["generate", "--model", &checkpoint("llama-f32"), "-q", "--raw", "-m", "8", "Hello"]);
    let generated = String::from_utf8({ generated }.output().unwrap().stdout).unwrap();
    assert_eq!(format!("{}\n", reply["choices"][0]["text"].as_str().unwrap()), generated);
    assert_eq!(reply["object"], "text_completion");
    let stream = server.post("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 8, "stream": true}));
    let text: String = stream
        .events()
        .iter()
        .filter_map(|(_, event)| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, reply["choices"][0]["text"].as_str().unwrap());
    let refused = server.post("/v1/completions", &json!({"prompt": [1, 2]}));
    assert_eq!(
        (refused.status, refused.error().as_str()),
        (
            400,
            "prompt (a non-empty string) is required (token-array prompts are not accepted, matching mlx_lm.server)"
        )
    );
}

#[test]
fn replies_have_the_structure_asked_for() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
        "additionalProperties": false});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    for fields in [
        json!({"response_format": format}),
        json!({"guided_json": schema}),
        json!({"structured_outputs": schema}),
    ] {
        let fields = with(fields, json!({"temperature": 1, "seed": 1}));
        let reply = server.ask("/v1/chat/completions", &with(chat("Hello", 300), fields));
        assert_eq!(reply["choices"][0]["finish_reason"], "stop", "{reply}");
        let object: Value = serde_json::from_str(content(&reply)).unwrap();
        assert!(object["n"].as_i64().unwrap() <= 9, "{object}");
    }
    let choice =
        server.ask("/v1/chat/completions", &with(chat("Hello", 20), json!({"guided_choice": ["yes", "no"]})));
    assert!(["yes", "no"].contains(&content(&choice)));
    let regex = json!({"prompt": "Hello", "max_tokens": 20, "guided_regex": "[0-9]{3}"});
    let regex = server.ask("/v1/completions", &regex);
    assert!(regex["choices"][0]["text"].as_str().unwrap().parse::<u16>().is_ok());
}

#[test]
fn j1_j2_j5_what_cannot_be_enforced_is_a_400_and_the_server_lives() {
    let server = Server::start(&[]);
    for (fields, words) in [
        (json!({"guided_regex": "(?=a)b"}), "look-around"),
        (json!({"guided_json": {"properties": {"x": {"not": {}}}}}), "`not`"),
        (json!({"guided_grammar": "root ::= ("}), "grammar"),
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}), "schema"),
        (json!({"tool_choice": "required"}), "`tools`"),
    ] {
        let reply = server.post("/v1/chat/completions", &with(chat("Hello", 5), fields.clone()));
        assert_eq!(reply.status, 400, "{fields}");
        assert!(reply.error().contains(words), "{fields}: {}", reply.error());
    }
    server.ask("/v1/chat/completions", &chat("Hello", 2));
    drop(server);
    let lenient = Server::start(&["--grammar-fallback", "prompt"]);
    let reply =
        lenient.post("/v1/chat/completions", &with(chat("Hello", 2), json!({"guided_regex": "(?=a)b"})));
    assert_eq!(reply.status, 200);
    assert!(reply.header("warning").unwrap().starts_with("grammar not enforced: "));
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false}}}])
}

/// Keeps a model that likes blanks from writing them where JSON allows some.
fn without_blanks(server: &Server) -> Value {
    let blanks =
        ["\n", "\t", "\r", " ", "  ", "\n\n"].map(|blank| json!({"content": blank, "add_special": false}));
    let ids =
        blanks.iter().flat_map(|body| server.ask("/tokenize", body)["tokens"].as_array().unwrap().clone());
    json!({"logit_bias": ids.map(|id| (id.to_string(), json!(-1000))).collect::<serde_json::Map<_, _>>()})
}

/// A server whose template knows tools.
fn with_tools() -> Server {
    Server::start(&["--chat-template", &template("hermes_tools.jinja")])
}

#[test]
fn tools_are_called_whole_and_in_streams() {
    let server = with_tools();
    let body = with(chat("Weather?", 100), without_blanks(&server));
    let required = with(
        body.clone(),
        json!({"tools": weather(), "tool_choice": "required", "parallel_tool_calls": false}),
    );
    let reply = server.ask("/v1/chat/completions", &required);
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null),
        "{reply}"
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("get_weather")));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()));
    let stream = server.post("/v1/chat/completions", &with(required, json!({"stream": true})));
    let calls: Vec<Value> = stream
        .events()
        .iter()
        .filter_map(|(_, event)| event["choices"][0]["delta"]["tool_calls"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0]["index"], &calls[0]["function"]), (&json!(0), &call["function"]));
    let named =
        json!({"tools": weather(), "tool_choice": {"type": "function", "function": {"name": "get_weather"}}});
    let reply = server.ask("/v1/chat/completions", &with(body, named));
    assert!(reply["choices"][0]["message"]["tool_calls"].is_array(), "{reply}");
}

#[test]
fn tool_loops_go_on_in_all_protocols() {
    let server = with_tools();
    let history = json!([
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ]);
    let chat = server
        .ask("/v1/chat/completions", &json!({"messages": history, "tools": weather(), "max_tokens": 8}));
    let messages = server.ask("/v1/messages", &json!({"max_tokens": 8, "system": "Be brief", "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny"}]}],
        "tools": [{"name": "get_weather", "description": "The weather", "input_schema": weather()[0]["function"]["parameters"]}]}));
    let responses = server.ask("/v1/responses", &json!({"max_output_tokens": 8, "instructions": "Be brief", "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{\"city\": \"Paris\"}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Sunny"}],
        "tools": [{"type": "function", "name": "get_weather", "description": "The weather", "parameters": weather()[0]["function"]["parameters"]}]}));
    let text = content(&chat);
    assert_eq!(messages["content"][0]["text"], text, "{messages}");
    assert_eq!(responses["output"][0]["content"][0]["text"], text, "{responses}");
    assert_eq!(chat["usage"]["prompt_tokens"], responses["usage"]["input_tokens"]);
}

#[test]
fn anthropics_clients_are_answered() {
    let server = Server::start(&[]);
    let body = json!({"model": "claude-x", "max_tokens": 6, "messages": [{"role": "user", "content": "Hello"}],
        "metadata": {"user_id": "u"}, "context_management": {"edits": []}});
    let whole = server.ask("/v1/messages?beta=true", &body);
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("max_tokens"))
    );
    let text = whole["content"][0]["text"].as_str().unwrap();
    assert_eq!(text, content(&server.ask("/v1/chat/completions", &chat("Hello", 6))));
    let events = server.post("/v1/messages", &with(body.clone(), json!({"stream": true}))).events();
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_deref().unwrap()).collect();
    assert_eq!(&names[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(&names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let streamed: String = events.iter().filter_map(|(_, event)| event["delta"]["text"].as_str()).collect();
    assert_eq!(streamed, text);
    let counted = server.ask("/v1/messages/count_tokens", &json!({"messages": body["messages"]}));
    // A2: a real number from the first event on.
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], counted["input_tokens"]);
    assert!(counted["input_tokens"].as_u64().unwrap() > 0);
    for (name, event) in &events {
        assert_eq!(event["type"].as_str(), name.as_deref());
    }
    let error = server.post("/v1/messages", &json!({"messages": []}));
    assert_eq!((error.status, &error.json()["type"]), (400, &json!("error")));
    assert_eq!(error.json()["error"]["type"], "invalid_request_error");
    let stop: String = text.chars().skip(1).take(2).collect();
    let stopped = server.ask("/v1/messages", &with(body, json!({"stop_sequences": [stop]})));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
}

#[test]
fn responses_remember() {
    let server = Server::start(&[]);
    let first = server
        .ask("/v1/responses", &json!({"input": "Hello", "instructions": "Be brief", "max_output_tokens": 5}));
    assert_eq!(
        (&first["status"], &first["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let id = first["id"].as_str().unwrap();
    let answer = first["output"][0]["content"][0]["text"].as_str().unwrap();
    let second = json!({"input": "And?", "previous_response_id": id, "max_output_tokens": 5});
    let second = server.ask("/v1/responses", &second);
    let spelled_out = json!({"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}], "max_tokens": 5});
    let spelled_out = server.ask("/v1/chat/completions", &spelled_out);
    assert_eq!(second["output"][0]["content"][0]["text"], content(&spelled_out));
    assert_eq!(second["usage"]["input_tokens"], spelled_out["usage"]["prompt_tokens"]);
    assert_eq!(server.get(&format!("/v1/responses/{id}")).json(), first);
    assert_eq!(server.send("DELETE", &format!("/v1/responses/{id}"), &[], b"").json()["deleted"], true);
    assert_eq!(server.get(&format!("/v1/responses/{id}")).status, 404);
    let gone = server.post("/v1/responses", &json!({"input": "x", "previous_response_id": id}));
    assert_eq!(
        (gone.status, gone.error()),
        (404, format!("previous_response_id '{id}' not found or expired"))
    );
    let unstored =
        server.ask("/v1/responses", &json!({"input": "Hello", "store": false, "max_output_tokens": 2}));
    assert_eq!(server.get(&format!("/v1/responses/{}", unstored["id"].as_str().unwrap())).status, 404);
    let events = server
        .post("/v1/responses", &json!({"input": "Hello", "max_output_tokens": 5, "stream": true}))
        .events();
    assert_eq!(events[0].0.as_deref(), Some("response.created"));
    let last = events.last().unwrap();
    assert_eq!(last.0.as_deref(), Some("response.completed"));
    let numbers: Vec<_> =
        events.iter().map(|(_, event)| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let deltas: String = events.iter().filter_map(|(_, event)| event["delta"].as_str()).collect();
    assert_eq!(last.1["response"]["output"][0]["content"][0]["text"], deltas.as_str());
    assert!(
        server.get(&format!("/v1/responses/{}", last.1["response"]["id"].as_str().unwrap())).status == 200
    );
}

#[test]
fn embeddings_come_from_models_made_for_them() {
    let server = Server::start(&[]);
    let refused = server.post("/v1/embeddings", &json!({"input": "Hello"}));
    assert_eq!(refused.status, 400);
    assert!(
        refused.error().starts_with("served model \"llama-f32\" is not an embedding model"),
        "{}",
        refused.error()
    );
    drop(server);
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny-embedding");
    std::os::unix::fs::symlink(checkpoint("qwen3-f32"), &model).unwrap();
    let server = Server::over(model.to_str().unwrap(), &[]);
    let reply = server.ask("/v1/embeddings", &json!({"input": ["Hello", "Hello there"]}));
    let vector = |value: &Value| -> Vec<f64> {
        value["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let (first, second) = (vector(&reply["data"][0]), vector(&reply["data"][1]));
    let length = |vector: &[f64]| vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((length(&first) - 1.0).abs() < 1e-5 && (length(&second) - 1.0).abs() < 1e-5);
    assert_ne!(first, second);
    let tokens =
        server.ask("/tokenize", &json!({"content": "Hello", "add_special": false}))["tokens"].clone();
    let mut ids: Vec<u64> = tokens.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    ids.push(
        server.ask("/tokenize", &json!({"content": "<|endoftext|>", "add_special": false}))["tokens"][0]
            .as_u64()
            .unwrap(),
    );
    let same = server.ask("/v1/embeddings", &json!({"input": ids}));
    assert_eq!(vector(&same["data"][0]), first);
    let short = server.ask("/v1/embeddings", &json!({"input": "Hello", "dimensions": 4}));
    assert_eq!(vector(&short["data"][0]).len(), 4);
    let coded = server.ask("/v1/embeddings", &json!({"input": "Hello", "encoding_format": "base64"}));
    assert!(coded["data"][0]["embedding"].as_str().unwrap().len() > first.len() * 4);
}

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
fn tokens_and_texts() {
    let server = Server::start(&[]);
    let tokens = server.ask("/tokenize", &json!({"content": "Hello there", "with_pieces": true}));
    let ids: Vec<_> = tokens["tokens"].as_array().unwrap().iter().map(|token| token["id"].clone()).collect();
    assert_eq!(server.ask("/detokenize", &json!({"tokens": ids}))["content"], "Hello there");
    let chat = server.ask("/tokenize", &json!({"messages": [{"role": "user", "content": "Hi"}]}));
    assert!(chat["count"].as_u64().unwrap() > 3);
    assert_eq!(server.post("/tokenize", &json!({})).status, 400);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [-1]})).status, 400);
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
    let long = "x".repeat(100_000);
    assert_eq!(server.send("GET", "/health", &[("x-long", &long)], b"").status, 431);
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

#[test]
fn the_queue_is_bounded_and_says_so() {
    let server = Server::start(&["--batch", "1"]);
    let body = with(chat("Hello", 400), json!({"stream": true, "logit_bias": {"2": -1000}})).to_string();
    let mut waiting = Vec::new();
    let mut refused = None;
    for _ in 0..80 {
        let mut connection = server.connect();
        server.write(&mut connection, "POST", "/v1/chat/completions", &[], body.as_bytes());
        waiting.push(connection);
    }
    for mut connection in waiting.drain(..) {
        let mut head = [0; 12];
        connection.read_exact(&mut head).unwrap();
        if head == *b"HTTP/1.1 429" {
            let mut rest = String::new();
            connection.read_to_string(&mut rest).unwrap();
            refused = Some(rest);
            break;
        }
    }
    let refused = refused.unwrap().to_lowercase();
    assert!(refused.contains("retry-after: 1") && refused.contains("rate_limit"), "{refused}");
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
