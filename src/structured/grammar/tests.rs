//! Constraints over the tiny tokenizer of the fixtures: what they let through, what is refused and how.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::structured::tools::{ToolParser, ToolSchemas};
use crate::tokenizer::Tokenizer;

fn tokenizer() -> Tokenizer {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/llama-f32");
    Tokenizer::from_dir(&dir).unwrap()
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(&tokenizer(), Limits::default()).unwrap()
}

/// Whether the constraint accepts the whole text, ended.
fn accepts(compiler: &GrammarCompiler, constraint: &Constraint, text: &str) -> bool {
    let grammar =
        compiler.compile(constraint, Reasoning::None).unwrap_or_else(|e| panic!("{constraint:?}: {e}"));
    let mut matcher = grammar.matcher(384);
    let ids = byte_ids(text);
    ids.iter().all(|&id| matcher.accepted(&[id]).unwrap() == 1 && matcher.advance(id).is_ok())
        && matcher.is_accepting().unwrap()
}

/// One token a byte, so that what is tested is the grammar.
fn byte_ids(text: &str) -> Vec<u32> {
    let bytes = tokenizer().vocabulary_bytes().unwrap();
    let id = |byte: u8| {
        bytes.iter().position(|token| *token == crate::tokenizer::TokenBytes::Text(vec![byte])).unwrap()
    };
    text.bytes().map(|byte| id(byte) as u32).collect()
}

fn schema(schema: Value) -> Constraint {
    Constraint::JsonSchema { schema, strict: true, any_whitespace: true }
}

fn refusal(constraint: &Constraint) -> String {
    compiler().compile(constraint, Reasoning::None).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn constraints_accept_what_they_describe() {
    let compiler = compiler();
    let check = |constraint: Constraint, good: &[&str], bad: &[&str]| {
        for text in good {
            assert!(accepts(&compiler, &constraint, text), "{constraint:?} should accept {text:?}");
        }
        for text in bad {
            assert!(!accepts(&compiler, &constraint, text), "{constraint:?} should refuse {text:?}");
        }
    };
    check(Constraint::JsonObject, &["{}", "{\"a\": [1, null]}"], &["[]", "{", "{} x", "1"]);
    check(Constraint::Regex("[a-c]{2}d?".to_owned()), &["ab", "ccd"], &["a", "abdd", "x"]);
    check(Constraint::Regex("^a\\!$".to_owned()), &["a!"], &["a", "^a!$"]);
    let choices = ["yes", "yes please", "n\"o\\\n"].map(str::to_owned).to_vec();
    check(Constraint::Choice(choices), &["yes", "yes please", "n\"o\\\n"], &["ye", "no", "yes "]);
    check(Constraint::grammar("start: \"a\" start? \"b\"".to_owned()), &["ab", "aabb"], &["aab", "abb"]);
    let gbnf = "# sums\nroot ::= term (\"+\" term)* # end\nterm ::= [0-9]{1,2} |\n  \"(\" root \")\"\n";
    check(Constraint::grammar(gbnf.to_owned()), &["1+22", "(1+2)+3"], &["1+", "123", "()"]);
    check(
        schema(
            json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", 1]}},
            "required": ["a"], "additionalProperties": false}),
        ),
        &["{\"a\": 3}", "{\"a\": 12, \"b\": \"x\"}", "{\"a\":12,\n\"b\":1}"],
        &["{\"a\": 2}", "{\"b\": 1}", "{\"a\": 3, \"c\": 1}", "{\"a\": 3, \"b\": 2}"],
    );
    let compact = Constraint::JsonSchema {
        schema: json!({"type": "array", "items": {"type": "integer"}}),
        strict: true,
        any_whitespace: false,
    };
    check(compact, &["[1,2]"], &["[1, 2]"]);
}

#[test]
fn j3_references_are_followed() {
    let compiler = compiler();
    let list = schema(
        json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "additionalProperties": false,
        "properties": {"v": {"$ref": "#/$defs/kind"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"]}, "kind": {"enum": ["p", "q"]}}}),
    );
    assert!(accepts(&compiler, &list, "{\"v\": \"p\", \"next\": {\"v\": \"q\", \"next\": null}}"));
    assert!(!accepts(&compiler, &list, "{\"v\": \"r\", \"next\": null}"));
    let items =
        schema(json!({"type": "object", "required": ["a", "b"], "additionalProperties": false, "properties":
        {"a": {"type": "array", "items": {"enum": [1, 2]}}, "b": {"$ref": "#/properties/a/items"}}}));
    assert!(accepts(&compiler, &items, "{\"a\": [2], \"b\": 1}"));
    assert!(!accepts(&compiler, &items, "{\"a\": [2], \"b\": 3}"));
    let escaped = schema(
        json!({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#end"}, "x": {"$anchor": "end", "const": 7}}}),
    );
    assert!(accepts(&compiler, &escaped, "7"));
    assert!(!accepts(&compiler, &escaped, "8"));
    for reference in ["#/$defs/none", "http://example.org/schema", "#nowhere"] {
        assert!(refusal(&schema(json!({"$ref": reference}))).contains("`$ref`"), "{reference}");
    }
    assert!(refusal(&schema(json!({"$ref": "#"}))).contains("refers to itself"));
}

#[test]
fn what_cannot_be_enforced_is_named() {
    for (keyword, value) in [
        ("not", json!({"type": "string"})),
        ("if", json!({"type": "string"})),
        ("uniqueItems", json!(true)),
        ("propertyNames", json!({"pattern": "^a"})),
        ("contains", json!({"const": 1})),
        ("unevaluatedProperties", json!(false)),
    ] {
        let constraint = schema(json!({"type": "object", "properties": {"x": {keyword: value}}}));
        let message = refusal(&constraint);
        assert!(message.contains(&format!("`{keyword}`")) && message.contains("#/properties/x"), "{message}");
        let Constraint::JsonSchema { schema, .. } = constraint else { unreachable!() };
        let lenient = Constraint::JsonSchema { schema, strict: false, any_whitespace: true };
        assert!(compiler().compile(&lenient, Reasoning::None).is_ok(), "{keyword}");
    }
    // Remarks restrict nothing, whoever invented them.
    let remarks =
        schema(json!({"type": "integer", "title": "T", "nullable": false, "format": "uint32", "x-y": 1,
        "uniqueItems": false, "x-guidance": {"lenient": true}}));
    assert!(accepts(&compiler(), &remarks, "7"));
    // It would allow everything.
    for envelope in [
        json!({"name": "n", "description": "d", "schema": {"type": "null"}}),
        json!({"jsn": {"type": "null"}}),
    ] {
        assert!(refusal(&schema(envelope.clone())).contains("no keyword of JSON schema"), "{envelope}");
    }
    let tools =
        [json!({"type": "function", "function": {"name": "f", "parameters": {"city": {"type": "string"}}}})];
    let calls = ToolChoice::new(ToolParser::JsonTools, &ToolSchemas::from_openai(&tools), None, true);
    let refused = calls
        .and_then(|calls| compiler().compile(&Constraint::ToolCalls(calls), Reasoning::None).map(|_| ()));
    assert!(refused.unwrap_err().to_string().contains("no keyword of JSON schema"));
    assert!(accepts(&compiler(), &schema(json!({"title": "T"})), "1"));
    assert!(accepts(&compiler(), &schema(json!({})), "1"));
    let overlapping = schema(json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}));
    assert!(refusal(&overlapping).contains("`oneOf`"));
}

#[test]
fn j1_j2_bad_grammars_are_errors() {
    for constraint in [
        Constraint::Regex("(?=a)b".to_owned()),
        Constraint::Regex("a(".to_owned()),
        Constraint::Regex("(".repeat(10_000)),
        Constraint::Lark("start: nowhere".to_owned()),
        Constraint::Lark("start: %json {\"type\": 5}".to_owned()),
        Constraint::Lark("(".repeat(10_000)),
        Constraint::Gbnf("root ::= missing".to_owned()),
        Constraint::Gbnf("root ::= \"a".to_owned()),
        Constraint::Gbnf("root ::= [".to_owned()),
        Constraint::Gbnf("root ::= \"a\"{9".to_owned()),
        Constraint::Gbnf("other ::= \"a\"".to_owned()),
        Constraint::Choice(vec![]),
        Constraint::Choice(vec![String::new()]),
        schema(json!(false)),
        schema(json!([])),
        schema(json!({"type": "nothing"})),
        schema(json!({"type": "string", "pattern": "(?=a)b"})),
        schema(json!({"type": "integer", "minimum": 5, "maximum": 4})),
        schema(json!({"properties": [1]})),
    ] {
        let message = refusal(&constraint);
        assert!(!message.contains('\n') && message.len() < 500, "{message}");
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let message = refusal(&Constraint::Regex("(?=a)b".to_owned()));
    assert!(message.contains("look-around"), "{message}");
    let message = refusal(&schema(json!({"type": "string", "pattern": "a(?!b)"})));
    assert!(message.contains("look-around"), "{message}");
    assert!(refusal(&Constraint::Lark("start: nowhere".to_owned())).contains("nowhere"));
    assert!(refusal(&Constraint::Gbnf("root ::= missing".to_owned())).contains("`missing`"));
}

#[test]
fn size_nesting_and_work_are_bounded() {
    let mut nested = json!({"type": "integer"});
    for _ in 0..100 {
        nested = json!({"type": "array", "items": nested});
    }
    assert!(refusal(&schema(nested)).contains("deeper than 64 levels"));
    assert!(refusal(&Constraint::Regex("a".repeat(300 << 10))).contains("the limit is 262144"));
    let started = std::time::Instant::now();
    let explosive = schema(json!({"type": "string", "pattern": "^(a|b)*a(a|b){400}(c{1,500}d){1,500}$"}));
    let _ = compiler().compile(&explosive, Reasoning::None);
    assert!(started.elapsed() < std::time::Duration::from_secs(30));
    let none = Limits { compile_time: std::time::Duration::ZERO, ..Limits::default() };
    let compiler = GrammarCompiler::new(&tokenizer(), none).unwrap();
    let large = Constraint::Choice((0..9000).map(|n| format!("choice {n}")).collect());
    let timeout = compiler.compile(&large, Reasoning::None);
    assert!(matches!(timeout, Err(GrammarError::Timeout(_))), "{timeout:?}");
}

#[test]
fn work_that_nobody_waits_for_holds_its_place() {
    use std::sync::atomic::{AtomicBool, Ordering};
    struct Place(Arc<AtomicBool>);
    impl Drop for Place {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let compiler =
        GrammarCompiler::new(&tokenizer(), Limits { compile_time: Duration::ZERO, ..Limits::default() })
            .unwrap();
    let properties: serde_json::Map<_, _> =
        (0..200).map(|index| (format!("p{index}"), json!({"type": "integer"}))).collect();
    let wide = schema(json!({"type": "object", "properties": properties, "additionalProperties": false}));
    let free = Arc::new(AtomicBool::new(false));
    let result = compiler.compile_holding(&wide, Reasoning::None, Place(Arc::clone(&free)));
    assert!(matches!(result, Err(GrammarError::Timeout(_))), "{result:?}");
    assert!(!free.load(Ordering::SeqCst), "the work goes on, and holds its place");
    let since = std::time::Instant::now();
    while !free.load(Ordering::SeqCst) {
        assert!(since.elapsed() < Duration::from_secs(120), "the place is lost");
        std::thread::sleep(Duration::from_millis(5));
    }
    // What needs no compiling needs no place for long either.
    let free = Arc::new(AtomicBool::new(false));
    let too_large = Constraint::Regex("a".repeat(Limits::default().bytes + 1));
    assert!(compiler.compile_holding(&too_large, Reasoning::None, Place(Arc::clone(&free))).is_err());
    assert!(free.load(Ordering::SeqCst));
}

#[test]
fn ids_beyond_the_tokenizer_are_never_allowed() {
    let compiler = compiler();
    let grammar = compiler.compile(&Constraint::Regex("(.|\\n)*".to_owned()), Reasoning::None).unwrap();
    let tokens = tokenizer().vocab_size();
    let mask = grammar.matcher(tokens + 77).mask().unwrap();
    assert_eq!(mask.len(), (tokens + 77).div_ceil(32));
    let allowed = |id: usize| mask[id / 32] >> (id % 32) & 1 == 1;
    assert!((tokens..mask.len() * 32).all(|id| !allowed(id)));
    assert!(allowed(2), "the end of the sequence");
    assert!(!allowed(1), "another control token");
    // A model with fewer rows than the tokenizer has ids.
    assert_eq!(grammar.matcher(40).mask().unwrap()[1] >> 8, 0);
}

#[test]
fn matchers_go_back_and_forth() {
    let compiler = compiler();
    let constraint =
        schema(json!({"type": "object", "properties": {"name": {"const": "abc"}}, "required": ["name"],
        "additionalProperties": false}));
    let grammar = compiler.compile(&constraint, Reasoning::None).unwrap();
    let mut matcher = grammar.matcher(320);
    let first = matcher.mask().unwrap();
    let ids = byte_ids("{\"name\"");
    for &id in &ids {
        matcher.advance(id).unwrap();
    }
    assert!(!matcher.is_accepting().unwrap() && !matcher.is_finished());
    let middle = matcher.mask().unwrap();
    for &id in &byte_ids(": \"abc\"}") {
        matcher.advance(id).unwrap();
    }
    assert!(matcher.is_finished());
    matcher.rollback(8).unwrap();
    assert_eq!(matcher.mask().unwrap(), middle);
    assert_eq!(matcher.accepted(&byte_ids(": \"abd")).unwrap(), 5);
    matcher.rollback(ids.len()).unwrap();
    assert_eq!(matcher.mask().unwrap(), first);
    assert!(matcher.rollback(1).is_err());
    // Another matcher of the grammar is where it began.
    assert_eq!(grammar.matcher(320).mask().unwrap(), first);
    let forced = grammar.matcher(320).forced_bytes();
    assert!(forced.starts_with(b"{"), "{forced:?}");
}

#[test]
fn compiled_grammars_are_kept_up_to_a_number() {
    let limits = Limits { cached: 2, ..Limits::default() };
    let compiler = GrammarCompiler::new(&tokenizer(), limits).unwrap();
    let regex = |text: &str| Constraint::Regex(text.to_owned());
    for text in ["a", "b", "a", "c", "a"] {
        assert!(accepts(&compiler, &regex(text), text));
        assert!(!accepts(&compiler, &regex(text), "d"));
    }
}

/// The tiny tokenizer with tags that are tokens, as reasoning models have them.
fn tagged_tokenizer() -> Tokenizer {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoints/llama-f32");
    let read =
        |name: &str| -> Value { serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap() };
    let mut tokenizer = read("tokenizer.json");
    for (id, content) in (320..).zip(["<think>", "</think>", "<tool_call>", "</tool_call>"]) {
        tokenizer["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(json!({"id": id, "content": content, "special": id < 322,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}));
    }
    Tokenizer::from_parts(crate::tokenizer::TokenizerParts {
        tokenizer_json: tokenizer.to_string().into_bytes(),
        config: read("tokenizer_config.json"),
        special_tokens_map: None,
    })
    .unwrap()
}

#[test]
fn reasoning_may_come_before_the_constrained_text() {
    let tokenizer = tagged_tokenizer();
    assert_eq!(tokenizer.thinking().map(|thinking| thinking.start_tokens.clone()), Some(vec![320]));
    let compiler = GrammarCompiler::new(&tokenizer, Limits::default()).unwrap();
    let accepts = |constraint: &Constraint, reasoning: Reasoning, parts: &[&str]| {
        let mut matcher = compiler.compile(constraint, reasoning).unwrap().matcher(384);
        let ids = parts.iter().flat_map(|part| match tokenizer.token_to_id(part) {
            Some(id) if id >= 320 => vec![id],
            _ => byte_ids(part),
        });
        ids.into_iter().all(|id| matcher.advance(id).is_ok()) && matcher.is_accepting().unwrap()
    };
    let regex = Constraint::Regex("[0-9]+".to_owned());
    for constraint in [&regex, &schema(json!({"type": "integer"}))] {
        assert!(accepts(constraint, Reasoning::Optional, &["<think>", "hm {\n", "</think>", "42"]));
        assert!(accepts(constraint, Reasoning::Optional, &["42"]));
        assert!(!accepts(constraint, Reasoning::Optional, &["hm"]));
        assert!(accepts(constraint, Reasoning::Open, &["hm", "</think>", "42"]));
        assert!(accepts(constraint, Reasoning::Open, &["</think>", "42"]));
        assert!(!accepts(constraint, Reasoning::Open, &["42"]));
        assert!(!accepts(constraint, Reasoning::None, &["<think>", "hm", "</think>", "42"]));
    }
    assert!(accepts(&Constraint::JsonObject, Reasoning::Open, &["a", "</think>", "\n\n{}"]));
    let tools = ToolSchemas::from_openai(&[json!({"type": "function", "function": {"name": "ping"}})]);
    let calls = Constraint::ToolCalls(ToolChoice::new(ToolParser::JsonTools, &tools, None, true).unwrap());
    let call = ["<tool_call>", "\n{\"name\": \"ping\", \"arguments\": {}}\n", "</tool_call>"];
    assert!(accepts(&calls, Reasoning::None, &call));
    assert!(accepts(&calls, Reasoning::Open, &[&["hm", "</think>", "\n"], &call[..]].concat()));
    assert!(accepts(&calls, Reasoning::None, &[&call[..], &["\n"], &call[..]].concat()));
    assert!(!accepts(&calls, Reasoning::None, &["ping"]));
}

#[test]
fn tool_grammars_write_what_the_parsers_read() {
    let tools = ToolSchemas::from_openai(&[
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"]}}}),
        json!({"type": "function", "function": {"name": "ping"}}),
    ]);
    let compiler = compiler();
    let arguments = "{\"city\": \"Paris\", \"unit\": \"c\"}";
    for (parser, text) in [
        (ToolParser::JsonTools, format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {arguments}}}\n</tool_call>")),
        (ToolParser::Qwen3Coder, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n\
            <parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>".to_owned()),
        (ToolParser::Gemma4, "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,unit:<|\"|>c<|\"|>}<tool_call|>".to_owned()),
        (ToolParser::FunctionGemma, "<start_function_call>call:get_weather{city:<escape>Paris<escape>,unit:<escape>c<escape>}\
            <end_function_call>".to_owned()),
        (ToolParser::Glm47, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n\
            <arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>".to_owned()),
        (ToolParser::Longcat, "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n\
            <longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>unit</longcat_arg_key>\n\
            <longcat_arg_value>c</longcat_arg_value>\n</longcat_tool_call>".to_owned()),
        (ToolParser::KimiK2, format!("<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0\
            <|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>")),
        (ToolParser::KimiK3, format!("<|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|>\
            <|open|>json type=\"object\"<|sep|>{arguments}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>")),
        (ToolParser::Minicpm5, "<function name=\"get_weather\"><param name=\"city\">Paris</param>\
            <param name=\"unit\">c</param></function>".to_owned()),
        (ToolParser::MinimaxM2, "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n\
            <parameter name=\"unit\">c</parameter>\n</invoke>\n</minimax:tool_call>".to_owned()),
        (ToolParser::Mistral, format!("[TOOL_CALLS][{{\"name\": \"get_weather\", \"arguments\": {arguments}}}]")),
        (ToolParser::MuseSpark, "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">\
            Paris</atem:parameter>\n<atem:parameter name=\"unit\">c</atem:parameter>\n</atem:invoke>\n</atem:function_calls>".to_owned()),
        (ToolParser::Pythonic, "<|tool_call_start|>[get_weather(city=\"Paris\", unit=\"c\")]<|tool_call_end|>".to_owned()),
        (ToolParser::Llama3, format!("{{\"name\": \"get_weather\", \"parameters\": {arguments}}}")),
        (ToolParser::Deepseek, format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{arguments}\
            <｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
        (ToolParser::Dsml, "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" \
            string=\"true\">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name=\"unit\" string=\"true\">c</｜DSML｜parameter>\n\
            </｜DSML｜invoke>\n</｜DSML｜function_calls>".to_owned()),
        (ToolParser::Harmony, format!("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{arguments}")),
    ] {
        let choice = Constraint::ToolCalls(ToolChoice::new(parser, &tools, None, false).unwrap());
        assert!(accepts(&compiler, &choice, &text), "{parser:?} should accept {text}");
        let wrong = text.replace("Paris", "").replace("get_weather", "get_whatever");
        assert!(!accepts(&compiler, &choice, &wrong), "{parser:?} should refuse {wrong}");
        let named = Constraint::ToolCalls(ToolChoice::new(parser, &tools, Some("ping"), false).unwrap());
        assert!(!accepts(&compiler, &named, &text), "{parser:?}");
        let inside = text.strip_prefix(parser.start().unwrap_or("")).unwrap_or(&text);
        let inside = parser.end().and_then(|end| inside.strip_suffix(end)).unwrap_or(inside);
        let calls = parser.parse(inside, &tools).unwrap();
        assert_eq!((calls.len(), calls[0].name.as_str()), (1, "get_weather"), "{parser:?}");
        assert_eq!(Value::Object(calls[0].arguments.clone()), json!({"city": "Paris", "unit": "c"}), "{parser:?}");
    }
    assert!(ToolChoice::new(ToolParser::JsonTools, &tools, Some("none"), false).is_err());
    assert!(ToolChoice::new(ToolParser::JsonTools, &ToolSchemas::default(), None, true).is_err());
}
