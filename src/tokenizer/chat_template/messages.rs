//! Brings messages from a request into the form templates expect, as mlx-lm's server does.

use serde_json::Value as Json;

use super::error::TemplateError;

/// Parses the arguments of tool calls that are given as a string of JSON, which is how OpenAI's protocol sends them,
/// into the objects that templates want. A string that is not a JSON object stays as it is: the template decides.
///
/// The messages are a JSON array; anything that is not shaped like a tool call is left alone.
pub fn parse_tool_arguments(messages: &mut Json) {
    let calls = messages
        .as_array_mut()
        .into_iter()
        .flatten()
        .filter_map(|message| message.get_mut("tool_calls")?.as_array_mut())
        .flatten();
    for call in calls {
        // Some clients send the function's fields without the wrapper.
        let call = match call.get("function") {
            Some(Json::Object(_)) => call.get_mut("function"),
            _ => Some(call),
        };
        let Some(arguments) = call.and_then(|call| call.get_mut("arguments")) else {
            continue;
        };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Json>(text).ok());
        if let Some(object @ Json::Object(_)) = parsed {
            *arguments = object;
        }
    }
}

/// Joins the parts of contents that are lists of text parts into one string, and makes a null content empty, for
/// models whose templates expect strings.
///
/// # Errors
///
/// [`TemplateError::InvalidRequest`] when a part is not text.
pub fn flatten_text_content(messages: &mut Json) -> Result<(), TemplateError> {
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let Some(content) = message.get_mut("content") else {
            continue;
        };
        let text = match content {
            Json::Null => String::new(),
            Json::Array(parts) => {
                let texts = parts.iter().map(|part| {
                    let is_text = part.get("type").is_some_and(|kind| kind == "text");
                    part.get("text").and_then(Json::as_str).filter(|_| is_text)
                });
                texts.collect::<Option<String>>().ok_or_else(|| {
                    TemplateError::InvalidRequest(format!(
                        "`messages[{index}].content` has a part that is not text; this model takes text only"
                    ))
                })?
            }
            _ => continue,
        };
        *content = Json::String(text);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tool_arguments_are_parsed_when_they_are_an_object() {
        let mut messages = json!([{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2.0]}"}},
            {"function": {"name": "f", "arguments": "not json"}},
            {"function": {"name": "f", "arguments": "[1]"}},
            {"function": {"name": "f", "arguments": {"x": 1}}},
            {"name": "f", "arguments": "{}"},
            {"function": null}, 3,
        ]}, {"role": "user", "tool_calls": null}, "odd"]);
        parse_tool_arguments(&mut messages);
        let calls = messages[0]["tool_calls"].as_array().unwrap();
        assert_eq!(calls[0]["function"]["arguments"].to_string(), r#"{"b":1,"a":[2.0]}"#);
        assert_eq!(calls[1]["function"]["arguments"], "not json");
        assert_eq!(calls[2]["function"]["arguments"], "[1]");
        assert_eq!(calls[3]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(calls[4]["arguments"], json!({}));
    }

    #[test]
    fn text_parts_are_joined_and_other_parts_refused() {
        let mut messages = json!([
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"content": null},
            {"content": "c"},
            {},
        ]);
        flatten_text_content(&mut messages).unwrap();
        assert_eq!(messages, json!([{"content": "ab"}, {"content": ""}, {"content": "c"}, {}]));
        let mut messages = json!([{"content": [{"type": "image"}]}]);
        assert!(flatten_text_content(&mut messages).is_err());
    }
}
