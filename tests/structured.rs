//! Constrained generation over the tiny checkpoints: whatever the weights say, every reply is what was asked for.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::PathBuf;

use mlx_bun::cache::make_prompt_cache;
use mlx_bun::checkpoint::Checkpoint;
use mlx_bun::generate::step::StepOptions;
use mlx_bun::generate::stream::{FinishReason, StreamOptions, TextGenerator};
use mlx_bun::models::{self, Model};
use mlx_bun::sampling::SamplingParams;
use mlx_bun::structured::ReplyFormat;
use mlx_bun::structured::grammar::{Constraint, Grammar, GrammarCompiler, Limits, Reasoning, ToolChoice};
use mlx_bun::structured::tools::{ToolParser, ToolSchemas};
use mlx_bun::tokenizer::Tokenizer;
use serde_json::{Value, json};

struct Fixture {
    model: Box<dyn Model>,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
}

impl Fixture {
    fn new(name: &str) -> Self {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints").join(name);
        let mut checkpoint = Checkpoint::open(&directory).unwrap();
        let tensors = checkpoint.take_tensors();
        let model = models::load(&checkpoint.config, tensors, None).unwrap();
        let tokenizer = Tokenizer::from_dir(&directory).unwrap();
        let grammars = GrammarCompiler::new(&tokenizer, Limits::default()).unwrap();
        Self { model, tokenizer, grammars }
    }

    fn grammar(&self, constraint: &Constraint) -> Grammar {
        self.grammars.compile(constraint, Reasoning::None).unwrap()
    }

    /// Text, its tokens, and why it ended.
    fn reply(
        &self,
        grammar: &Grammar,
        temperature: f64,
        seed: u64,
        max_tokens: usize,
    ) -> (String, usize, FinishReason) {
        let step = StepOptions {
            max_tokens: Some(max_tokens),
            sampling: SamplingParams { temperature, ..SamplingParams::default() },
            seed: Some(seed),
            grammar: Some(grammar.clone()),
            ..StepOptions::default()
        };
        let options = StreamOptions { step, ..StreamOptions::default() };
        let prompt: Vec<u32> = (0..9).map(|i| (i * 37 + seed as u32 * 5 + 11) % 320).collect();
        let mut caches = make_prompt_cache(self.model.layer_kinds(), None);
        let mut reply =
            TextGenerator::new(&*self.model, &self.tokenizer, &mut caches, &prompt, &options).unwrap();
        let (mut text, mut tokens) = (String::new(), 0);
        while let Some(chunk) = reply.next().unwrap() {
            text.push_str(&chunk.text);
            tokens += usize::from(chunk.token.is_some());
        }
        (text, tokens, reply.finish_reason().unwrap())
    }
}

/// The part of JSON schema that these tests use.
fn is_valid(schema: &Value, value: &Value, root: &Value) -> bool {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        return is_valid(root.pointer(&reference[1..]).unwrap(), value, root);
    }
    if let Some(options) = schema.get("anyOf").and_then(Value::as_array) {
        return options.iter().any(|option| is_valid(option, value, root));
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return values.contains(value);
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    match (schema["type"].as_str().unwrap(), value) {
        ("null", Value::Null) | ("boolean", Value::Bool(_)) => true,
        ("integer" | "number", Value::Number(n)) => {
            let n = n.as_f64().unwrap();
            (schema["type"] == "number" || n.fract() == 0.0)
                && number("minimum").is_none_or(|low| n >= low)
                && number("maximum").is_none_or(|high| n <= high)
        }
        ("string", Value::String(text)) => {
            let length = text.chars().count() as f64;
            number("minLength").is_none_or(|low| length >= low)
                && number("maxLength").is_none_or(|high| length <= high)
        }
        ("array", Value::Array(items)) => {
            let length = items.len() as f64;
            number("minItems").is_none_or(|low| length >= low)
                && number("maxItems").is_none_or(|high| length <= high)
                && items.iter().all(|item| is_valid(&schema["items"], item, root))
        }
        ("object", Value::Object(fields)) => {
            let required = schema.get("required").and_then(Value::as_array);
            required.is_none_or(|names| names.iter().all(|name| fields.contains_key(name.as_str().unwrap())))
                && fields.iter().all(|(name, value)| match schema["properties"].get(name) {
                    Some(schema) => is_valid(schema, value, root),
                    None => schema["additionalProperties"] != false,
                })
        }
        _ => false,
    }
}

/// Schemas of bounded texts, so that even random weights come to an end.
fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
            "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "bc", 3, null]}, "minItems": 1, "maxItems": 3}}}),
        json!({"type": "array", "minItems": 2, "maxItems": 2, "items": {"anyOf": [{"type": "boolean"},
            {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": false}]}}),
        json!({"type": "object", "required": ["kind"], "additionalProperties": false,
            "properties": {"kind": {"$ref": "#/$defs/kind"}, "note": {"type": "string", "minLength": 2, "maxLength": 4}},
            "$defs": {"kind": {"enum": ["one", "two \"quoted\"", "zwölf"]}}}),
    ]
}

#[test]
fn every_reply_follows_its_schema() {
    for name in ["llama-f32", "gemma3_text-bf16", "qwen3-4bit"] {
        let fixture = Fixture::new(name);
        for schema in schemas() {
            let constraint =
                Constraint::JsonSchema { schema: schema.clone(), strict: true, any_whitespace: false };
            let grammar = fixture.grammar(&constraint);
            for seed in 0..6 {
                let temperature = if seed == 0 { 0.0 } else { 1.0 };
                let (text, tokens, reason) = fixture.reply(&grammar, temperature, seed, 200);
                assert_eq!(reason, FinishReason::Stop, "{name}: {text}");
                assert!(tokens < 200);
                let value: Value =
                    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {text:?}: {e}"));
                assert!(is_valid(&schema, &value, &schema), "{name}: {text}");
            }
        }
    }
}

#[test]
fn j6_a_model_that_likes_blanks_comes_to_the_closing_brace() {
    let fixture = Fixture::new("llama-f32");
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": false});
    let grammar = fixture.grammar(&Constraint::JsonSchema { schema, strict: true, any_whitespace: true });
    // The scripted model takes a blank wherever it may.
    let blanks: Vec<u32> =
        [" ", "\n", "\t"].iter().flat_map(|text| fixture.tokenizer.encode(text, false).unwrap()).collect();
    let mut matcher = grammar.matcher(320);
    let mut text = Vec::new();
    while !matcher.is_finished() {
        let mask = matcher.mask().unwrap();
        let allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        let token = blanks.iter().copied().find(&allowed).or_else(|| (4..320).find(&allowed)).unwrap();
        matcher.advance(token).unwrap();
        text.push(token);
        assert!(text.len() < 600, "{:?}", fixture.tokenizer.decode(&text, true));
    }
    assert!(serde_json::from_str::<Value>(&fixture.tokenizer.decode(&text, true)).is_ok());
}

#[test]
fn a_reply_ends_with_its_grammar_and_at_the_limit() {
    let fixture = Fixture::new("llama-f32");
    let regex = |text: &str| fixture.grammar(&Constraint::Regex(text.to_owned()));
    let (text, _, reason) = fixture.reply(&regex("[0-9]{3}-[a-z]{2}"), 1.0, 1, 50);
    assert_eq!((text.len(), reason), (6, FinishReason::Stop));
    let (text, tokens, reason) = fixture.reply(&regex("[0-9]{100}"), 1.0, 2, 7);
    assert_eq!((tokens, reason), (7, FinishReason::Length));
    assert!(text.len() >= 7 && text.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
    let choice = Constraint::Choice(vec!["yes".to_owned(), "no".to_owned()]);
    let (text, _, reason) = fixture.reply(&fixture.grammar(&choice), 0.0, 3, 50);
    assert!(["yes", "no"].contains(&text.as_str()), "{text}");
    assert_eq!(reason, FinishReason::Stop);
}

#[test]
fn demanded_calls_are_made_and_can_be_read() {
    let fixture = Fixture::new("llama-f32");
    let tools =
        ToolSchemas::from_openai(&[json!({"type": "function", "function": {"name": "set", "parameters": {
        "type": "object", "required": ["on", "level"], "additionalProperties": false,
        "properties": {"on": {"type": "boolean"}, "level": {"enum": ["low", "high"]}}}}})]);
    let template = "{% if tool_call.name %}<tool_call>{% endif %}";
    let format = ReplyFormat::new(&fixture.tokenizer, Some(template)).unwrap();
    assert_eq!(format.tool_parser(), Some(ToolParser::JsonTools));
    let choice = ToolChoice::new(ToolParser::JsonTools, &tools, None, false).unwrap();
    let grammar = fixture.grammar(&Constraint::ToolCalls(choice));
    for seed in 0..4 {
        // Blanks are free in arguments, so the weights may go on for a while.
        let (text, _, reason) = fixture.reply(&grammar, if seed == 0 { 0.0 } else { 1.0 }, seed, 600);
        assert_eq!(reason, FinishReason::Stop, "{text}");
        let reply = format.parser(&fixture.tokenizer, &[1, 2, 3], tools.clone()).parse(&text);
        assert_eq!((reply.content.as_str(), reply.tool_calls.len()), ("", 1), "{text}");
        let call = &reply.tool_calls[0];
        assert_eq!(call.name, "set");
        assert!(call.arguments["on"].is_boolean() && call.arguments["level"].is_string(), "{text}");
    }
}
