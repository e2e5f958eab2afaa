//! The parsers against mlx-lm's (scripts/oracle/tool_parsers.py records), and what mlx-lm has no parser for.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::json;

use super::*;

#[derive(Deserialize)]
struct Oracle {
    templates: BTreeMap<String, Option<String>>,
    tools: Vec<Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    parser: String,
    text: String,
    #[serde(default)]
    calls: Vec<RecordedCall>,
    #[serde(default)]
    unrepresentable: bool,
}

#[derive(Deserialize, PartialEq, Debug)]
struct RecordedCall {
    name: String,
    arguments: Map<String, Value>,
    id: Option<String>,
}

fn oracle() -> Oracle {
    serde_json::from_str(include_str!("../../../fixtures/tool_parsers/oracle.json")).unwrap()
}

/// Numbers are compared by value: Python keeps `1` and `1.0`, and integers of any length, apart.
fn same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Number(a), Value::Number(b)) => a.is_f64() == b.is_f64() && a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => same_fields(a, b),
        _ => ours == theirs,
    }
}

fn same_fields(ours: &Map<String, Value>, theirs: &Map<String, Value>) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|((a, x), (b, y))| a == b && same(x, y))
}

/// Where the engine reads more than mlx-lm, on purpose.
fn reads_more(case: &Case) -> bool {
    match case.parser.as_str() {
        // Keys with hyphens.
        "gemma4" => case.text.contains("-"),
        _ => false,
    }
}

#[test]
fn calls_are_those_of_mlx_lm() {
    let oracle = oracle();
    let tools = ToolSchemas::from_openai(&oracle.tools);
    let (mut compared, mut wrong) = (0, Vec::new());
    for case in &oracle.cases {
        let parser = ToolParser::from_name(&case.parser).unwrap();
        let parsed = parser.parse(&case.text, &tools).unwrap_or_default();
        if case.unrepresentable || (case.calls.is_empty() && reads_more(case)) {
            continue;
        }
        compared += 1;
        let equal = parsed.len() == case.calls.len()
            && parsed.iter().zip(&case.calls).all(|(ours, theirs)| {
                ours.name == theirs.name
                    && ours.id == theirs.id
                    && same_fields(&ours.arguments, &theirs.arguments)
            });
        if !equal {
            wrong.push(format!(
                "{} {:?}\n  ours   {parsed:?}\n  theirs {:?}",
                case.parser, case.text, case.calls
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {compared} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(compared >= 150, "{compared}");
}

fn call(name: &str, arguments: Value) -> ToolCall {
    let Value::Object(arguments) = arguments else { panic!("an object") };
    ToolCall::new(name, arguments)
}

fn parse(parser: ToolParser, text: &str) -> Parsed {
    parser.parse(text, &ToolSchemas::default())
}

#[test]
fn llama_3_calls_are_json_or_python() {
    let parse = |text: &str| parse(ToolParser::Llama3, text);
    let weather = call("get_weather", json!({"city": "Paris"}));
    let text = r#"{"name": "get_weather", "parameters": {"city": "Paris"}}"#;
    let one = std::slice::from_ref(&weather);
    assert_eq!(parse(text).unwrap(), one);
    assert_eq!(parse(&format!("{text}; {text}")).unwrap(), [weather.clone(), weather.clone()]);
    assert_eq!(parse(&format!("[{text}]")).unwrap(), one);
    assert_eq!(parse("[get_weather(city='Paris')]").unwrap(), one);
    for text in
        ["{\"name\": \"x\"}", "{\"answer\": 1}", "[1, 2]", "[ping(1)]", "{} trailing", "", "[link](x)"]
    {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn deepseek_calls_of_both_layouts() {
    let parse = |text: &str| parse(ToolParser::Deepseek, text);
    let fenced = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>";
    let plain = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜>";
    let weather = call("get_weather", json!({"city": "Paris"}));
    assert_eq!(parse(&format!("{fenced}\n{plain}")).unwrap(), [weather.clone(), weather]);
    assert!(parse("<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>").is_err());
}

#[test]
fn dsml_parameters_say_whether_they_are_text() {
    let text = "\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">7</｜DSML｜parameter>\n\
                <｜DSML｜parameter name=\"days\" string=\"false\">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
    let parsed = parse(ToolParser::Dsml, text).unwrap();
    assert_eq!(parsed, [call("get_weather", json!({"city": "7", "days": 7}))]);
}

#[test]
fn a_cdata_section_may_hold_end_tags() {
    let text =
        "\"write\"><param name=\"text\"><![CDATA[<param>a</param>]]></param><param name=\"n\">b</param>";
    let parsed = parse(ToolParser::Minicpm5, text).unwrap();
    assert_eq!(parsed, [call("write", json!({"text": "<param>a</param>", "n": "b"}))]);
}

#[test]
fn gemma_keys_may_have_hyphens() {
    let parsed = parse(ToolParser::Gemma4, "call:f{user-id:<|\"|>a<|\"|>}").unwrap();
    assert_eq!(parsed, [call("f", json!({"user-id": "a"}))]);
}

#[test]
fn a6_arguments_are_always_a_json_object() {
    for text in [
        "{\"name\": \"f\", \"arguments\": [1]}",
        "{\"name\": \"f\", \"arguments\": \"text\"}",
        "{\"name\": \"f\", \"arguments\": 1}",
        "{\"name\": \"\", \"arguments\": {}}",
        "{\"arguments\": {}}",
        "\"f\"",
    ] {
        assert!(parse(ToolParser::JsonTools, text).is_err(), "{text}");
    }
    let parsed =
        parse(ToolParser::JsonTools, "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}").unwrap();
    assert_eq!(parsed[0].arguments_json(), "{\"a\":1}");
}

#[test]
fn the_parser_is_chosen_as_mlx_lm_chooses_it() {
    for (name, theirs) in oracle().templates {
        let path = format!("{}/fixtures/chat_templates/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        let template = std::fs::read_to_string(path).unwrap();
        let ours = ToolParser::choose(&json!({}), Some(&template), |_| false).unwrap().map(ToolParser::name);
        let beyond = match name.as_str() {
            "gpt_oss" => Some("harmony"),
            "llama31_tools" => Some("llama3"),
            _ => None,
        };
        assert_eq!(ours, theirs.as_deref().or(beyond), "{name}");
    }
    for (text, parser) in [
        ("{{ '<minimax:tool_call>' }}", ToolParser::MinimaxM2),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", ToolParser::Deepseek),
        ("{{ '<｜DSML｜function_calls>' }}", ToolParser::Dsml),
    ] {
        assert_eq!(ToolParser::choose(&json!({}), Some(text), |_| false), Ok(Some(parser)));
    }
    let choose =
        |config: Value, tokens: &[&str]| ToolParser::choose(&config, None, |token| tokens.contains(&token));
    assert_eq!(choose(json!({"tool_parser_type": "laguna"}), &[]), Ok(Some(ToolParser::Glm47)));
    assert!(choose(json!({"tool_parser_type": "nothing"}), &[]).is_err());
    let xtml = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"];
    assert_eq!(choose(json!({}), &xtml), Ok(Some(ToolParser::KimiK3)));
    assert_eq!(
        choose(json!({}), &["<|tool_call_start|>", "<|tool_call_end|>"]),
        Ok(Some(ToolParser::Pythonic))
    );
    assert_eq!(choose(json!({}), &[]), Ok(None));
}

proptest! {
    #[test]
    fn no_text_makes_a_parser_panic(text in "[\\[\\](){}<>\"'=:,|/ \\na-c1éｘ]{0,60}", index in 0usize..400) {
        let oracle = oracle();
        let tools = ToolSchemas::from_openai(&oracle.tools);
        let case = &oracle.cases[index % oracle.cases.len()];
        let cut = case.text.char_indices().map(|(at, _)| at).nth(index % 17).unwrap_or(0);
        let mixed = format!("{}{text}{}", &case.text[..cut], &case.text[cut..]);
        for name in ["json_tools", "qwen3_coder", "gemma4", "function_gemma", "glm47", "longcat", "kimi_k2", "kimi_k3",
            "minicpm5", "minimax_m2", "mistral", "muse_spark", "pythonic", "llama3", "deepseek", "dsml", "harmony"]
        {
            let parser = ToolParser::from_name(name).unwrap();
            for text in [&text, &mixed] {
                for call in parser.parse(text, &tools).unwrap_or_default() {
                    prop_assert!(!call.name.is_empty());
                    prop_assert!(serde_json::from_str::<Map<String, Value>>(&call.arguments_json()).is_ok());
                }
            }
        }
    }
}
