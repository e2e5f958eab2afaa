//! `serve`: the protocols beside OpenAI's chat.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use serde_json::{Value, json};
use support::mlx_bun;
use support::server::{Server, chat, checkpoint, content, weather, with, with_tools};

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
    assert_eq!(last.0.as_deref(), Some("response.incomplete"));
    assert_eq!(
        (&last.1["response"]["status"], &last.1["response"]["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
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
fn tokens_and_texts() {
    let server = Server::start(&[]);
    let tokens = server.ask("/tokenize", &json!({"content": "Hello there", "with_pieces": true}));
    let ids: Vec<_> = tokens["tokens"].as_array().unwrap().iter().map(|token| token["id"].clone()).collect();
    assert_eq!(server.ask("/detokenize", &json!({"tokens": ids}))["content"], "Hello there");
    let chat = server.ask("/tokenize", &json!({"messages": [{"role": "user", "content": "Hi"}]}));
    assert!(chat["count"].as_u64().unwrap() > 3);
    assert_eq!(server.post("/tokenize", &json!({})).status, 400);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [-1]})).status, 400);
    let unknown = server.post("/detokenize", &json!({"tokens": [1, 99_999]}));
    assert_eq!(
        (unknown.status, unknown.error().as_str()),
        (400, "`tokens` has 99999, which is outside the vocabulary")
    );
}
