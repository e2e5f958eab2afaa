//! Any text as a chat template, any JSON as the conversation: a prompt or an error, never a panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mlx_bun::tokenizer::chat_template::{ChatTemplate, RenderRequest};
use serde_json::{Value, json};

fuzz_target!(|input: (String, String)| {
    let (source, conversation) = input;
    let Ok(template) = ChatTemplate::new("fuzz", &source) else { return };
    let messages: Value =
        serde_json::from_str(&conversation).unwrap_or_else(|_| json!([{"role": "user", "content": conversation}]));
    let _ = template.render(&RenderRequest::new(&messages));
});
