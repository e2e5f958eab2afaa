//! Whatever a client sends is read or refused, never a panic.

use proptest::prelude::*;
use serde_json::{Map, Value};

use super::{chat, completions, messages_request, responses_request};

const KEYS: [&str; 40] = [
    "messages",
    "role",
    "content",
    "type",
    "text",
    "tools",
    "function",
    "name",
    "parameters",
    "tool_choice",
    "stop",
    "stream",
    "stream_options",
    "include_usage",
    "max_tokens",
    "temperature",
    "top_k",
    "seed",
    "logit_bias",
    "n",
    "logprobs",
    "top_logprobs",
    "response_format",
    "json_schema",
    "schema",
    "guided_choice",
    "structured_outputs",
    "hlg",
    "adapter",
    "adapters",
    "chat_template_kwargs",
    "reasoning_effort",
    "prompt",
    "input",
    "system",
    "thinking",
    "tool_calls",
    "input_schema",
    "instructions",
    "output",
];

const WORDS: [&str; 14] = [
    "user",
    "assistant",
    "tool",
    "system",
    "function",
    "text",
    "json_schema",
    "auto",
    "required",
    "tool_use",
    "tool_result",
    "function_call",
    "function_call_output",
    "",
];

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..WORDS.len()).prop_map(|word| Value::from(WORDS[word])),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((0..KEYS.len(), inner), 0..6).prop_map(object),
        ]
    })
}

fn object(fields: Vec<(usize, Value)>) -> Value {
    fields.into_iter().map(|(key, value)| (KEYS[key].to_owned(), value)).collect::<Map<_, _>>().into()
}

proptest! {
    #[test]
    fn any_body_is_read_or_refused(fields in prop::collection::vec((0..KEYS.len(), value()), 0..10)) {
        let Value::Object(body) = object(fields) else { unreachable!() };
        let _ = chat::read(&body);
        let _ = completions::read(&body);
        let _ = messages_request::read(&body, false);
        let _ = responses_request::read(&body, None);
    }
}
