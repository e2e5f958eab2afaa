//! Faults that other engines had with chat templates, and templates that mean harm.

#![allow(clippy::unwrap_used, reason = "a corpus that cannot be read fails the test")]

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use mlx_bun::tokenizer::chat_template::{
    ChatTemplate, ChatTemplates, Limits, RenderRequest, TemplateError, flatten_text_content,
    parse_tool_arguments,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn user() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn render(source: &str) -> Result<String, TemplateError> {
    render_with(source, json!({}))
}

fn render_with(source: &str, variables: Value) -> Result<String, TemplateError> {
    let messages = user();
    let request = RenderRequest { extra: variables.as_object(), ..RenderRequest::new(&messages) };
    ChatTemplate::new("test", source)?.render(&request)
}

#[test]
fn tojson_takes_pythons_arguments_and_prints_pythons_bytes() {
    let variables = json!({"x": {"a": 1, "b": "é"}});
    for (source, expected) in [
        ("{{ x | tojson(ensure_ascii=False) }}", r#"{"a": 1, "b": "é"}"#),
        ("{{ x | tojson }}", r#"{"a": 1, "b": "é"}"#),
        ("{{ x | tojson(ensure_ascii=True) }}", r#"{"a": 1, "b": "\u00e9"}"#),
        ("{{ x | tojson(separators=(',', ':')) }}", r#"{"a":1,"b":"é"}"#),
        ("{{ x | tojson(indent=2) }}", "{\n  \"a\": 1,\n  \"b\": \"é\"\n}"),
    ] {
        assert_eq!(render_with(source, variables.clone()).unwrap(), expected);
    }
    // An argument it does not know is an error, not another prompt.
    let error = render_with("{{ x | tojson(default=1) }}", variables).unwrap_err();
    assert!(matches!(error, TemplateError::Render { line: 1, .. }), "{error}");
}

#[test]
fn fromjson_reads_tool_arguments_of_earlier_turns() {
    let source = "{% for m in messages %}{% for c in m.tool_calls %}{% set a = c.function.arguments | fromjson %}\
                  {% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}";
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{\"b\": [1, 2.0], \"a\": null}"}}]},
        {"role": "tool", "content": "ok"},
    ]);
    let template = ChatTemplate::new("test", source).unwrap();
    let prompt = template.render(&RenderRequest::new(&messages)).unwrap();
    assert_eq!(prompt, "b=[1, 2.0];a=None;");
    let error = render("{{ 'not json' | fromjson }}").unwrap_err();
    assert!(error.to_string().contains("cannot parse \"not json\" as JSON"), "{error}");
}

#[test]
fn tool_arguments_that_are_not_json_reach_the_template_as_text() {
    let source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}";
    let template = ChatTemplate::new("test", source).unwrap();
    for (arguments, expected) in [("{\"a\":1}", "{\"a\": 1}"), ("not json", "\"not json\"")] {
        let mut messages = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        ]);
        parse_tool_arguments(&mut messages);
        let prompt = template.render(&RenderRequest::new(&messages)).unwrap();
        assert_eq!(prompt, expected);
    }
}

#[test]
fn the_suffix_after_the_query_depends_on_the_same_variables() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}\
                  <think></think>{% endif %}{% endif %}";
    let template = ChatTemplate::new("test", source).unwrap();
    let messages = json!([{"role": "user", "content": "<query>"}]);
    let suffix = |variables: &Value| {
        let request = RenderRequest {
            add_generation_prompt: true,
            extra: variables.as_object(),
            ..RenderRequest::new(&messages)
        };
        let prompt = template.render(&request).unwrap();
        prompt.split_once("<query>").unwrap().1.to_owned()
    };
    assert_eq!(suffix(&json!({})), "<assistant>");
    assert_eq!(suffix(&json!({"enable_thinking": false})), "<assistant><think></think>");
}

#[test]
fn a_model_without_template_says_so() {
    let templates = ChatTemplates::from_directory(Path::new("/nonexistent"), &json!({})).unwrap();
    assert!(templates.is_empty());
    let error = templates.select(None, true).unwrap_err();
    assert!(error.to_string().contains("has no chat template"), "{error}");
}

#[test]
fn content_parts_and_tool_roles_that_a_template_does_not_know_are_errors() {
    let source = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}";
    let template = ChatTemplate::new("test", source).unwrap();
    let mut messages = json!([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]);
    let error = template.render(&RenderRequest::new(&messages)).unwrap_err();
    assert!(matches!(error, TemplateError::Render { line: 1, .. }), "{error}");
    flatten_text_content(&mut messages).unwrap();
    assert_eq!(template.render(&RenderRequest::new(&messages)).unwrap(), "user: hi");
}

#[test]
fn the_request_cannot_replace_the_template_or_the_conversation() {
    for name in ["chat_template", "messages", "tools", "add_generation_prompt", "documents"] {
        let error = render_with("x", json!({name: "{% for i in range(99999) %}x{% endfor %}"}));
        assert!(matches!(error, Err(TemplateError::InvalidRequest(_))), "{name}");
    }
}

#[test]
fn templates_that_loop_too_long_are_stopped() {
    let bombs = [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
        "{% for i in range(99999) %}{{ 99998 in range(99999) }}{% endfor %}",
        "{% for i in range(99999) %}{% set x = (range(99999) | list)[::-1] | sort %}{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99999) %}{% set ns.l = ns.l * 9 %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = [ns.s, ns.s] | tojson %}{% endfor %}",
        "{% set s = 'ab' * 100000 %}{% for i in range(99999) %}{{ s.find('z') }}{% endfor %}",
        "{% set s = 'ab' * 100000 %}{% for i in range(99999) %}{% set t = s.count('a') %}{% endfor %}",
        "{% set s = 'a b' * 100000 %}{% for i in range(99999) %}{% set t = s.split() %}{% endfor %}",
        "{% set s = 'ab' * 100000 %}{% for i in range(99999) %}{% if s == s ~ '' %}{% endif %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in range(99999) %}{% if l == l[:] %}{% endif %}{% endfor %}",
        "{% set l = range(9999) | list %}{% set m = l[:] %}{% for i in range(99999) %}{% if l == m %}{% endif %}{% endfor %}",
        "{% set l = range(9999) | list %}{% set m = [l[:], l[:]] %}{% for i in range(99999) %}{{ loop.changed(m[i % 2]) }}{% endfor %}",
        "{% set s = 'ab' * 100000 %}{% set t = s ~ '' %}{% for i in range(99999) %}{% if s == t %}{% endif %}{% endfor %}",
        "{% set s = 'ab' * 100000 %}{% set t = s ~ '' %}{% for i in range(99999) %}{% if s < t %}{% endif %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(90) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x | string }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x ~ '' }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % (ns.x,) }}{{ 1/0 }}",
        "{% set ns = namespace(x=1, y=1) %}{% for i in range(90) %}{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.x == ns.y }}",
        "{% set ns = namespace(x=1, y=1) %}{% for i in range(90) %}{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.x < ns.y }}",
        "{% set ns = namespace(x=1, y=1) %}{% for i in range(90) %}{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ {ns.x: 1}[ns.y] }}{{ 1/0 }}",
        "{% set l = range(9999) | list %}{% for i in l %}{% set u = l | unique | list %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in range(99999) %}{% set t = l | string | length %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in range(99999) %}{% set t = l ~ '' %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in range(99999) %}{% set t = l | batch(1) | list %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in range(99999) %}{% set t = l | length %}{{ l.index(9998) }}{% endfor %}",
        "{% for i in range(99999) %}{% set t = 'x'.center(1000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% set t = 'x' | center(1000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% set t = '%9999s' | format('x') %}{% endfor %}",
        "{% for i in range(99999) %}{% set t = '\\n' * 9999 %}{% set t = t | indent(999, true, true) %}{% endfor %}",
    ];
    for bomb in bombs {
        let start = Instant::now();
        let result = render(bomb);
        let elapsed = start.elapsed();
        assert!(result.is_err(), "{bomb} rendered");
        assert!(elapsed < Duration::from_secs(5), "{bomb} ran for {elapsed:?}");
    }
    let error = render(bombs[0]).unwrap_err();
    assert!(matches!(error, TemplateError::OutOfFuel { line: 1, .. }), "{error}");
}

#[test]
fn nothing_large_is_allocated_at_once() {
    for source in [
        "{{ range(10**9) }}",
        "{{ range(10**9) | list }}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'a' | indent(10**9) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ [1] | batch(10**12, 0) | list }}",
        "{{ [1] | slice(10**12) | list }}",
        "{{ '\\t'.expandtabs(10**9) | length > 2000 and 1/0 }}{{ 1/0 }}",
        "{{ 10 ** 1000 }}",
        "{{ range(-9223372036854775808, 9223372036854775807, 1) }}",
        "{{ range(9223372036854775807, -9223372036854775808, -1) }}",
        "{{ 99999999999999999999999999999999999999999999 }}",
        "{{ -9223372036854775808 // -1 % 0 }}",
    ] {
        let start = Instant::now();
        let result = render(source);
        assert!(result.is_err(), "{source} gave {:?}", result.map(|text| text.len()));
        assert!(start.elapsed() < Duration::from_secs(2), "{source}");
    }
    assert_eq!(render("{{ range(9223372036854775800, 9223372036854775807) | length }}").unwrap(), "7");
}

#[test]
fn the_output_is_bounded() {
    let messages = user();
    let request = RenderRequest {
        limits: Limits { output_bytes: 100, ..Limits::default() },
        ..RenderRequest::new(&messages)
    };
    let template = ChatTemplate::new("test", "{% for i in range(1000) %}xxxxxxxx{% endfor %}").unwrap();
    let error = template.render(&request).unwrap_err();
    assert!(matches!(error, TemplateError::OutputTooLong { limit: 100, .. }), "{error}");
}

#[test]
fn a_template_cannot_reach_out_of_the_sandbox() {
    for source in [
        "{{ ''.__class__ }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ ''.__class__() }}",
        "{{ '' | attr('__class__') }}",
        "{{ ''['__class__'].x }}",
        "{{ undefined_name.__class__ }}",
        "{{ ''.format.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% from '/etc/passwd' import x %}",
        "{% extends '/etc/passwd' %}",
        "{{ debug() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
    ] {
        let result = render(source);
        assert!(result.is_err(), "{source} gave {result:?}");
    }
}

#[test]
fn errors_name_the_line_of_the_template() {
    for (source, line) in [
        ("a\nb\n{{ 1 + 'x' }}", 3),
        ("a\n{% if true %}\n{{ undefined_name.x }}\n{% endif %}", 3),
        ("{{\n\n messages.x.y\n}}", 3),
        ("a\n\n{% for x in none %}{% endfor %}", 3),
        ("{% set x = [\n1,\n2 < 'a'\n] %}", 3),
        ("{# a\n b #}\n{%- raw %}\n{%- endraw %}\n{{ raise_exception('no') }}", 5),
        ("a\n{% unknown %}", 2),
        ("a\n\n{{ 1 +", 3),
        ("a\n{% if x %}\nb", 2),
        ("{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}\n{{ m() }}", 3),
    ] {
        let found = match render(source).unwrap_err() {
            TemplateError::Syntax { line, .. }
            | TemplateError::Render { line, .. }
            | TemplateError::Raised { line, .. } => line,
            other => panic!("{other}"),
        };
        assert_eq!(found, line, "{source}");
    }
}

#[test]
fn values_do_not_nest_without_bound() {
    for source in [
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = dict(a=ns.x) %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = ns.x | batch(1) | list %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}",
        "{% set a = namespace() %}{% set b = namespace(a=a) %}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
    let mut deep = json!(1);
    for _ in 0..300 {
        deep = json!([deep]);
    }
    let result = render_with("{{ x }}", json!({"x": deep}));
    assert!(matches!(result, Err(TemplateError::InvalidRequest(_))));
}

#[test]
fn sources_do_not_nest_without_bound() {
    let repeated = |open: &str, middle: &str, close: &str| {
        let n = 20_000;
        format!("{}{middle}{}", open.repeat(n), close.repeat(n))
    };
    for source in [
        format!("{{{{ {} }}}}", repeated("(", "1", ")")),
        format!("{{{{ {} }}}}", repeated("[", "1", "]")),
        format!("{{{{ {} }}}}", repeated("{'a': ", "1", "}")),
        format!("{{{{ {} }}}}", repeated("f(", "1", ")")),
        format!("{{{{ {} }}}}", repeated("x[", "1", "]")),
        format!("{{{{ {} }}}}", repeated("not ", "1", "")),
        format!("{{{{ {} }}}}", repeated("- ", "1", "")),
        format!("{{{{ {} }}}}", repeated("+ ", "1", "")),
        format!("{{{{ 1 {} }}}}", repeated("- 1", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("+ 1", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("~ 1", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("and 1 ", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("** 1 ", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("< 1 ", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("if 1 else 1 ", "", "")),
        format!("{{{{ 1 {} }}}}", repeated("if 1 ", "", "")),
        format!("{{{{ x{} }}}}", repeated(".a", "", "")),
        format!("{{{{ x{} }}}}", repeated("|e", "", "")),
        format!("{{{{ x{} }}}}", repeated("()", "", "")),
        format!("{{{{ x{} }}}}", repeated("[0]", "", "")),
        format!("{{{{ x {} }}}}", repeated("is none ", "", "")),
        format!("{{% set {} = 1 %}}", repeated("(", "a", ")")),
        repeated("{% if 1 %}", "", "{% endif %}"),
        repeated("{% for i in x %}", "", "{% endfor %}"),
        repeated("{% macro m() %}", "", "{% endmacro %}"),
        repeated("{% set x %}", "", "{% endset %}"),
        format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(20_000)),
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}".to_owned(),
        "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}".to_owned(),
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}".to_owned(),
        "x".repeat((1 << 20) + 1),
    ] {
        let head: String = source.chars().take(60).collect();
        assert!(render(&source).is_err(), "{head}");
    }
}

#[test]
fn generation_blocks_are_located() {
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                  {% generation %}{{ m.content }}é{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let messages = json!([
        {"role": "user", "content": "á"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
    ]);
    let template = ChatTemplate::new("test", source).unwrap();
    let request = RenderRequest::new(&messages);
    let (prompt, spans) = template.render_with_generation(&request).unwrap();
    assert_eq!(prompt, template.render(&request).unwrap());
    let inside: Vec<_> = spans.into_iter().map(|span| &prompt[span]).collect();
    assert_eq!(inside, ["oneé", "twoé"]);
}

#[test]
fn a_last_message_that_cannot_be_continued_is_an_error() {
    let continued = |source: &str, messages: Value| {
        let request =
            RenderRequest { continue_final_message: Some("content"), ..RenderRequest::new(&messages) };
        ChatTemplate::new("test", source)?.render(&request)
    };
    let all = "{% for m in messages %}{{ m.content }}!{% endfor %}";
    let parts = "{% for p in messages[0].content %}{{ p.text }}!{% endfor %}";
    assert_eq!(continued(all, user()).unwrap(), "hi");
    let content = json!([{"role": "assistant", "content": [{"text": "a"}, {"text": "b"}]}]);
    assert_eq!(continued(parts, content).unwrap(), "a!b");
    for (source, messages) in [
        (all, json!([{"role": "assistant"}])),
        (all, json!([{"role": "assistant", "content": null}])),
        (all, json!([{"role": "assistant", "content": 3}])),
        (all, json!([{"role": "assistant", "content": [{"image": 1}]}])),
        (all, json!([])),
        ("{{ messages[0].role }}", user()),
        ("{{ messages[0].content[:3] }}", user()),
    ] {
        let result = continued(source, messages);
        assert!(matches!(result, Err(TemplateError::InvalidRequest(_))), "{result:?}");
    }
}

/// Renders whatever it is given; all that counts is that nothing panics.
fn render_anything(source: &str, json: &Value) {
    let Ok(template) = ChatTemplate::new("fuzz", source) else {
        return;
    };
    let request = RenderRequest {
        tools: json.get("tools"),
        extra: json.get("extra").and_then(Value::as_object),
        continue_final_message: json.get("continue").and_then(Value::as_str),
        limits: Limits { fuel: 20_000, output_bytes: 1 << 16 },
        ..RenderRequest::new(json.get("messages").unwrap_or(&Value::Null))
    };
    let _ = template.render(&request);
}

/// Damages a template: deletes, repeats, swaps or inserts pieces.
fn mutate(source: &str, edits: &[(u8, u16, u16)]) -> String {
    const PIECES: [&str; 28] = [
        "{{",
        "}}",
        "{%",
        "%}",
        "-%}",
        "{#",
        "#}",
        "'",
        "\"",
        "\\",
        "(",
        ")",
        "[",
        "]",
        "|",
        ".",
        "~",
        "-1",
        "none",
        "undefined_a",
        " is ",
        " not ",
        "9223372036854775807",
        "é",
        "loop",
        "{% endif %}",
        "[::-1]",
        "*",
    ];
    let mut text: Vec<char> = source.chars().collect();
    for (kind, at, extent) in edits {
        let len = text.len();
        let at = usize::from(*at) * len / 65536;
        let end = (at + usize::from(*extent) % 40).min(len);
        match kind % 4 {
            0 => drop(text.drain(at..end)),
            1 => {
                let piece: Vec<char> = text[at..end].to_vec();
                text.splice(at..at, piece);
            }
            2 => {
                let piece = PIECES[usize::from(*extent) % PIECES.len()];
                text.splice(at..at, piece.chars());
            }
            _ => {
                let piece: Vec<char> = text.drain(at..end).collect();
                let to = usize::from(*extent) * text.len() / 65536;
                text.splice(to..to, piece);
            }
        }
    }
    text.into_iter().collect()
}

fn corpus() -> &'static [String] {
    static CORPUS: OnceLock<Vec<String>> = OnceLock::new();
    CORPUS.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/chat_templates");
        let mut paths: Vec<_> =
            std::fs::read_dir(root.join("templates")).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let mut sources: Vec<String> =
            paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
        let snippets = std::fs::read_to_string(root.join("snippets.json")).unwrap();
        let snippets: Vec<String> = serde_json::from_str(&snippets).unwrap();
        sources.extend(snippets);
        sources
    })
}

fn conversation() -> Value {
    json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi é 🎉"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "abc123xyz", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, {}]}}}
            ]},
            {"role": "tool", "content": "ok", "tool_call_id": "abc123xyz"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
            "type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]
        }}}],
    })
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(json!("user")),
        Just(json!("assistant")),
    ];
    let key = prop_oneof![
        "[a-z]{1,6}",
        Just("role".to_owned()),
        Just("content".to_owned()),
        Just("items".to_owned())
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// How often the mutations are tried; `CHAT_TEMPLATE_FUZZ=100000` runs for minutes.
fn cases() -> u32 {
    let cases = std::env::var("CHAT_TEMPLATE_FUZZ").ok();
    cases.and_then(|cases| cases.parse().ok()).unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_templates_never_panic(
        which in any::<prop::sample::Index>(),
        edits in prop::collection::vec(any::<(u8, u16, u16)>(), 1..6),
    ) {
        render_anything(&mutate(which.get::<String>(corpus()), &edits), &conversation());
    }

    #[test]
    fn any_messages_never_panic(which in any::<prop::sample::Index>(), messages in prop::collection::vec(any_json(), 0..4), extra in any_json()) {
        let json = json!({"messages": messages, "extra": extra, "tools": [extra.clone()]});
        render_anything(which.get::<String>(corpus()), &json);
    }

    #[test]
    fn any_text_is_a_template_or_an_error(source in "(\\{\\{|\\{%|\\{#|%\\}|\\}\\}|#\\}|-|\\+|if|for|in|set|x|'|\"|\\\\|\\(|\\)|\\[|\\]|:|,|\\.|\\||~|=|[ -~]|\\PC|\n){0,60}") {
        render_anything(&source, &conversation());
    }
}
