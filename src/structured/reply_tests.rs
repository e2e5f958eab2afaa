//! Replies against mlx-lm's server loop, in any chunking.

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Map, json};

use super::*;

#[derive(Deserialize)]
struct Oracle {
    tools: Vec<Value>,
    replies: Vec<Recorded>,
}

#[derive(Deserialize)]
struct Recorded {
    parser: String,
    think: String,
    text: String,
    initial: String,
    reasoning: String,
    content: String,
    calls: Vec<RecordedCall>,
}

#[derive(Deserialize)]
struct RecordedCall {
    name: String,
    arguments: Map<String, Value>,
}

fn oracle() -> Oracle {
    serde_json::from_str(include_str!("../../fixtures/tool_parsers/oracle.json")).unwrap()
}

fn format(think: Option<&str>, tools: Option<ToolParser>) -> ReplyFormat {
    let think = think.map(|start| *THINK_TAGS.iter().find(|tags| tags.0 == start).unwrap());
    ReplyFormat::from_parts(think, tools, tools == Some(ToolParser::MuseSpark))
}

fn schemas() -> ToolSchemas {
    ToolSchemas::from_openai(&oracle().tools)
}

fn parser(think: Option<&str>, tools: Option<ToolParser>) -> ReplyParser {
    let format = format(think, tools);
    format.parser_from(format.initial, schemas())
}

/// What pieces of a text add up to.
fn in_pieces(mut parser: ReplyParser, text: &str, cuts: &[usize]) -> Reply {
    let mut reply = Reply::default();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    cuts.retain(|&cut| text.is_char_boundary(cut));
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    for pair in cuts.windows(2) {
        reply.add(parser.push(&text[pair[0]..pair[1]]));
    }
    reply.add(parser.finish());
    reply
}

#[test]
fn replies_are_those_of_mlx_lms_server() {
    let Oracle { tools, replies } = oracle();
    for recorded in replies {
        let format = format(Some(&recorded.think), ToolParser::from_name(&recorded.parser));
        let initial = if recorded.initial == "reasoning" { State::Reasoning } else { State::Content };
        let reply = format.parser_from(initial, ToolSchemas::from_openai(&tools)).parse(&recorded.text);
        let context = (&recorded.parser, &recorded.text, &recorded.initial);
        assert_eq!(reply.reasoning, recorded.reasoning, "{context:?}");
        assert_eq!(reply.content, recorded.content, "{context:?}");
        let calls: Vec<_> = reply.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect();
        let theirs: Vec<_> = recorded.calls.into_iter().map(|call| (call.name, call.arguments)).collect();
        assert_eq!(calls, theirs, "{context:?}");
    }
}

#[test]
fn a_malformed_call_comes_back_as_its_text() {
    let text = "Look: <tool_call>{\"name\": \"ping\", </tool_call> done";
    let reply = parser(None, Some(ToolParser::JsonTools)).parse(text);
    assert_eq!((reply.content.as_str(), reply.tool_calls.len()), (text, 0));
    let cut = "<tool_call>{\"name\": \"pi";
    assert_eq!(parser(None, Some(ToolParser::JsonTools)).parse(cut).content, cut);
    let empty = "<tool_call></tool_call>";
    assert_eq!(parser(None, Some(ToolParser::JsonTools)).parse(empty).content, empty);
}

#[test]
fn text_streams_while_it_can_begin_no_marker() {
    let mut parser = parser(Some("<think>"), Some(ToolParser::JsonTools));
    assert_eq!(parser.push("one <t"), [ReplyEvent::Content("one ".to_owned())]);
    assert_eq!(parser.push("hat"), [ReplyEvent::Content("<that".to_owned())]);
    assert_eq!(parser.push("<think>a</th"), [ReplyEvent::Reasoning("a".to_owned())]);
    assert_eq!(parser.push("ink>b"), [ReplyEvent::Content("b".to_owned())]);
    assert_eq!(parser.finish(), []);
}

#[test]
fn harmony_channels_are_told_apart() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.\
                <|end|><|start|>assistant<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{\"a\": 1}\
                <|call|><|start|>assistant<|channel|>final<|message|>Done";
    let reply = parser(None, Some(ToolParser::Harmony)).parse(text);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("Hm.", "One moment.Done"));
    let Value::Object(arguments) = json!({"a": 1}) else { unreachable!() };
    assert_eq!(reply.tool_calls.len(), 1);
    assert_eq!((reply.tool_calls[0].name.as_str(), &reply.tool_calls[0].arguments), ("ping", &arguments));
    // The recipient may stand before the channel, and the end token is not part of the text.
    let text = " to=functions.ping<|channel|>commentary json<|message|>{}";
    assert_eq!(parser(None, Some(ToolParser::Harmony)).parse(text).tool_calls[0].name, "ping");
    assert_eq!(parser(None, Some(ToolParser::Harmony)).parse("plain").content, "plain");
    // A channel that follows without an end.
    let text = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b";
    let reply = parser(None, Some(ToolParser::Harmony)).parse(text);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("a", "b"));
}

#[test]
fn muse_spark_headers_say_what_follows() {
    let text = "to=self<|message|>hm<|eom|><|start|>assistant to=x<|message|><atem:function_calls><atem:invoke name=\"ping\">\
                </atem:invoke></atem:function_calls><|eom|><|start|>assistant to=user<|message|>hi<|eot|>";
    let reply = parser(None, Some(ToolParser::MuseSpark)).parse(text);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("hm", "hi"));
    assert_eq!(reply.tool_calls[0].name, "ping");
}

#[test]
fn llama_3_calls_need_no_marker() {
    let llama = || parser(None, Some(ToolParser::Llama3));
    let reply = llama().parse("\n{\"name\": \"ping\", \"parameters\": {}}");
    assert_eq!((reply.tool_calls.len(), reply.content.as_str()), (1, ""));
    let reply = llama().parse("<|python_tag|>{\"name\": \"ping\", \"parameters\": {}}");
    assert_eq!(reply.tool_calls.len(), 1);
    assert_eq!(llama().parse("{\"answer\": 42}").content, "{\"answer\": 42}");
    assert_eq!(llama().parse("  [link] text").content, "  [link] text");
    let mut streaming = llama();
    assert_eq!(streaming.push(" I"), [ReplyEvent::Content(" I".to_owned())]);
    let without_tools =
        format(None, Some(ToolParser::Llama3)).parser_from(State::Content, ToolSchemas::default());
    assert_eq!(without_tools.parse("{\"name\": \"ping\", \"parameters\": {}}").tool_calls.len(), 0);
}

const FORMATS: [(Option<&str>, Option<ToolParser>); 8] = [
    (Some("<think>"), Some(ToolParser::JsonTools)),
    (Some("<|channel>thought"), Some(ToolParser::Gemma4)),
    (Some("<|open|>think<|sep|>"), Some(ToolParser::KimiK3)),
    (Some("<think>"), Some(ToolParser::Minicpm5)),
    (None, Some(ToolParser::Harmony)),
    (None, Some(ToolParser::MuseSpark)),
    (None, Some(ToolParser::Llama3)),
    (Some("<think>"), Some(ToolParser::Mistral)),
];

/// Markers, parts of markers and what stands between them.
const PIECES: [&str; 32] = [
    "<think>",
    "</think>",
    "<thi",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"ping\", \"arguments\": {}}",
    "<|channel>thought",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "call:ping{}",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    "<|open|>tools<|sep|>",
    "<|open|>response<|sep|>",
    "<function name=",
    "\"ping\">",
    "</function>",
    "<|channel|>final",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "analysis",
    "commentary to=functions.ping",
    "to=self<|message|>",
    "<|eom|>",
    "<|python_tag|>",
    "{\"name\": \"ping\", \"parameters\": {}}",
    "[TOOL_CALLS]",
    "ping[ARGS]{}",
    "né <",
    " ",
];

proptest! {
    #[test]
    fn any_chunking_gives_the_same_reply(
        format in 0usize..FORMATS.len(),
        pieces in prop::collection::vec(0usize..PIECES.len(), 0..12),
        cuts in prop::collection::vec(0usize..500, 0..30),
    ) {
        let (think, tools) = FORMATS[format];
        let text: String = pieces.iter().map(|&piece| PIECES[piece]).collect();
        let whole = parser(think, tools).parse(&text);
        prop_assert_eq!(&in_pieces(parser(think, tools), &text, &cuts), &whole);
        let every: Vec<usize> = (0..text.len()).collect();
        prop_assert_eq!(&in_pieces(parser(think, tools), &text, &every), &whole);
    }

    #[test]
    fn recorded_replies_survive_any_chunking(index in 0usize..100, cuts in prop::collection::vec(0usize..500, 0..30)) {
        let Oracle { tools, replies } = oracle();
        let recorded = &replies[index % replies.len()];
        let format = format(Some(&recorded.think), ToolParser::from_name(&recorded.parser));
        let parser = format.parser_from(State::Content, ToolSchemas::from_openai(&tools));
        prop_assert_eq!(in_pieces(parser.clone(), &recorded.text, &cuts), parser.parse(&recorded.text));
    }
}
