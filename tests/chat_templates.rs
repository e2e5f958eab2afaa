//! The chat-template corpus: every template of `fixtures/chat_templates/` on every conversation, and a list of
//! snippets, must render what transformers rendered (recorded by `scripts/oracle/record_chat_templates.py`) and fail where it
//! failed.

#![allow(clippy::unwrap_used, reason = "a corpus that cannot be read fails the test")]

use std::path::{Path, PathBuf};

use mlx_bun::tokenizer::chat_template::{ChatTemplate, RenderRequest, TemplateError};
use serde_json::{Value, json};

/// How snippets start that differ on purpose, and why.
const MEANT: [(&str, &str); 6] = [
    ("{{ '%d%%' % 3.7 }}", "a float for %d is an error"),
    ("{{ '{}-{}'.format('a', 1) }}", "conversions such as `!r` in str.format are an error"),
    ("{{ [1, 2, 3][1.0] }}", "a float with an integral value is an index"),
    ("{{ self }}", "prints nothing; in Jinja a reference to the template"),
    ("{{ lipsum is defined }}", "there is no placeholder text"),
    ("{{ 'a'.upper }}", "a method that is not called is undefined; Jinja prints its address"),
];

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/chat_templates")
}

fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn render(source: &str, conversation: &Value, suite: &Value) -> Result<String, TemplateError> {
    let kwargs = conversation["kwargs"].as_object().cloned().unwrap_or_default();
    let request = RenderRequest {
        tools: conversation.get("tools"),
        documents: conversation.get("documents"),
        add_generation_prompt: conversation["add_generation_prompt"] == json!(true),
        continue_final_message: conversation["continue_final_message"].as_str(),
        special_tokens: suite["special_tokens"].as_object(),
        extra: Some(&kwargs),
        now: suite["now"].as_str().and_then(|now| now.parse().ok()),
        ..RenderRequest::new(&conversation["messages"])
    };
    ChatTemplate::new("default", source)?.render(&request)
}

/// Says how a result differs from the recorded one; `None` when it does not.
fn difference(expected: &Value, found: &Result<String, TemplateError>) -> Option<String> {
    match (expected["text"].as_str(), expected["raised"].as_str(), found) {
        (Some(text), _, Ok(found)) if text == found => None,
        (Some(text), _, Ok(found)) => Some(text_difference(text, found)),
        (Some(text), _, Err(error)) => Some(format!("expected {text:?}\n     found the error: {error}")),
        (None, Some(message), Err(TemplateError::Raised { message: found, .. })) if message == found => None,
        (None, Some(message), found) => {
            Some(format!("expected it to raise {message:?}\n     found {found:?}"))
        }
        (None, None, Err(error)) => {
            // Every failure inside a template names a line.
            match error {
                TemplateError::Syntax { line: 0, .. } | TemplateError::Render { line: 0, .. } => {
                    Some(format!("the error has no line: {error}"))
                }
                _ => None,
            }
        }
        (None, None, Ok(found)) => Some(format!("expected {}\n     found {found:?}", expected["error"])),
    }
}

/// The first place where two texts differ, with a little around it.
fn text_difference(expected: &str, found: &str) -> String {
    let common = expected
        .char_indices()
        .zip(found.chars())
        .find(|((_, a), b)| a != b)
        .map_or(expected.len().min(found.len()), |((index, _), _)| index);
    let mut start = common.saturating_sub(60);
    while !expected.is_char_boundary(start) {
        start -= 1;
    }
    let excerpt = |text: &str| {
        let tail: String = text[start.min(text.len())..].chars().take(140).collect();
        format!("{tail:?}")
    };
    let line = expected[..common].matches('\n').count() + 1;
    format!(
        "differs on line {line} of the prompt\n  expected ...{}\n     found ...{}",
        excerpt(expected),
        excerpt(found)
    )
}

#[test]
fn templates_render_as_in_transformers() {
    let suite = read_json(&corpus().join("conversations.json"));
    let conversations = suite["conversations"].as_array().unwrap();
    let mut paths: Vec<_> =
        std::fs::read_dir(corpus().join("templates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 40, "the corpus has only {} templates", paths.len());
    let mut failures = Vec::new();
    let mut prompts = 0;
    for path in paths {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let source = std::fs::read_to_string(&path).unwrap();
        let expected = read_json(&corpus().join(format!("expected/{name}.json")));
        for conversation in conversations {
            let case = conversation["name"].as_str().unwrap();
            let found = render(&source, conversation, &suite);
            prompts += usize::from(found.is_ok());
            if let Some(difference) = difference(&expected[case], &found) {
                failures.push(format!("{name} on {case}: {difference}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
    assert!(prompts > 700, "only {prompts} prompts were rendered");
}

#[test]
fn snippets_mean_what_they_mean_in_jinja() {
    let suite = read_json(&corpus().join("conversations.json"));
    let conversations = suite["conversations"].as_array().unwrap();
    let conversation = conversations.iter().find(|c| c["name"] == "multi_turn").unwrap();
    let snippets = read_json(&corpus().join("snippets.json"));
    let expected = read_json(&corpus().join("snippets_expected.json"));
    let (snippets, expected) = (snippets.as_array().unwrap(), expected.as_array().unwrap());
    assert_eq!(snippets.len(), expected.len());
    let mut failures = Vec::new();
    for (snippet, expected) in snippets.iter().zip(expected) {
        let snippet = snippet.as_str().unwrap();
        if MEANT.iter().any(|(meant, _)| snippet.starts_with(meant)) {
            continue;
        }
        let found = render(snippet, conversation, &suite);
        if let Some(difference) = difference(expected, &found) {
            failures.push(format!("{snippet}\n  {difference}"));
        }
    }
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
}
