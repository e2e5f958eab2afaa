//! `serve`: chats over real connections, whole and in streams.

#![allow(clippy::unwrap_used)] // clippy counts helpers outside of test functions as production code

mod support;

use serde_json::{Value, json};
use support::mlx_bun;
use support::server::{
    Server, chat, checkpoint, content, streamed, weather, with, with_tools, without_blanks,
};

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
    let firm = json!({"structured_outputs": {"regex": "(?=a)b", "disable_fallback": true}});
    let refused = lenient.post("/v1/chat/completions", &with(chat("Hello", 2), firm));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("constraint_not_supported")));
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
fn a_prompt_that_takes_long_keeps_the_connection_alive() {
    let server = Server::start(&["--prefill-step-size", "8"]);
    let body = with(chat(&"Hello ".repeat(30), 2), json!({"stream": true}));
    let reply = server.post("/v1/chat/completions", &body);
    let comment = reply.text().lines().find(|line| line.starts_with(": keepalive ")).map(str::to_owned);
    let (done, total) = comment.as_deref().and_then(|line| line[12..].split_once('/')).unwrap();
    assert!(done.parse::<usize>().unwrap() <= total.parse().unwrap());
    assert!(!reply.events().is_empty());
}
