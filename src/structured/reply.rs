//! A reply's text, split as it comes into reasoning, content and tool calls.
//!
//! One machine serves streams and whole texts, and the result is the same however the text is cut
//! (`TextStateMachine` and `make_text_state_machine` of mlx_lm/generate.py, the response loop of server.py). Markers
//! are matched in decoded text, so that it does not matter how a model spells them in tokens. A call that cannot be
//! parsed comes back as the text it is.

use serde_json::Value;

use super::markers::MarkerScanner;
use super::tools::{ToolCall, ToolParser, ToolSchemas, UnknownToolParser, recipient};
use crate::tokenizer::Tokenizer;

/// A part of a reply that became certain.
#[derive(Debug, Clone, PartialEq)]
pub enum ReplyEvent {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A whole call.
    ToolCall(ToolCall),
}

/// A whole reply.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reply {
    /// The reasoning.
    pub reasoning: String,
    /// The answer, and whatever looked like a call and is none.
    pub content: String,
    /// The calls.
    pub tool_calls: Vec<ToolCall>,
}

impl Reply {
    /// Adds what became certain.
    pub fn add(&mut self, events: Vec<ReplyEvent>) {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(&text),
                ReplyEvent::Content(text) => self.content.push_str(&text),
                ReplyEvent::ToolCall(call) => self.tool_calls.push(call),
            }
        }
    }
}

/// Where in a reply the text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The answer.
    Content,
    /// The reasoning.
    Reasoning,
    /// A call.
    Tool,
    /// Between messages: text that says what the next message is.
    Header,
    /// Nothing but blanks so far, and a call without a marker may begin.
    Start,
}

/// What follows a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    State(State),
    /// What the header before the marker says.
    Header,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Edge {
    from: State,
    marker: &'static str,
    to: Target,
}

/// How the replies of a model are laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyFormat {
    edges: Vec<Edge>,
    tools: Option<ToolParser>,
    initial: State,
    thinking: bool,
}

/// Whose messages have headers.
const MUSE_SPARK: &str = "muse_spark";

impl ReplyFormat {
    /// The format of a model, from its tokenizer (reasoning tags are tokens) and its chat template.
    ///
    /// # Errors
    /// The tokenizer's config names a tool parser that does not exist.
    pub fn new(tokenizer: &Tokenizer, template: Option<&str>) -> Result<Self, UnknownToolParser> {
        let config = tokenizer.config();
        let tools = ToolParser::choose(config, template, |token| tokenizer.token_to_id(token).is_some())?;
        let think = tokenizer.thinking().map(|thinking| (thinking.start.as_str(), thinking.end.as_str()));
        let think = THINK_TAGS.iter().copied().find(|tags| think == Some(*tags));
        let headers = config.get("chat_template_type").and_then(Value::as_str) == Some(MUSE_SPARK);
        Ok(Self::from_parts(think, tools, headers))
    }

    /// From a pair of reasoning tags and a tool parser; `headers` says that messages begin with `to=…` (Muse Spark).
    fn from_parts(
        think: Option<(&'static str, &'static str)>,
        tools: Option<ToolParser>,
        headers: bool,
    ) -> Self {
        use State::{Content, Header, Reasoning, Tool};
        let mut format = Self { edges: Vec::new(), tools, initial: Content, thinking: think.is_some() };
        if let Some((start, end)) = think {
            format.edge(Content, start, Reasoning);
            format.edge(Reasoning, end, Content);
        }
        if let Some(parser) = tools {
            if let Some(start) = parser.start() {
                if !headers {
                    format.edge(Content, start, Tool);
                }
                if think.is_some() {
                    format.edge(Reasoning, start, Tool);
                }
            }
            if let Some(end) = parser.end() {
                format.edge(Tool, end, Content);
            }
        }
        match tools {
            Some(ToolParser::KimiK3) => {
                for marker in
                    ["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"]
                {
                    format.edge(Content, marker, Content);
                }
            }
            Some(ToolParser::Harmony) => {
                format.initial = Header;
                format.edges.push(Edge { from: Header, marker: "<|message|>", to: Target::Header });
                for state in [Content, Reasoning, Tool] {
                    for marker in ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"] {
                        format.edge(state, marker, Header);
                    }
                }
            }
            _ => {}
        }
        if headers {
            format.initial = Header;
            format.edge(Header, "to=self<|message|>", Reasoning);
            format.edge(Header, "to=user<|message|>", Content);
            format.edge(Header, "to=commentary<|message|>", Content);
            format.edge(Header, "<atem:function_calls>", Tool);
            format.edge(Reasoning, "<|eom|>", Header);
            format.edge(Content, "<|eom|>", Header);
            format.edge(Content, "<|eot|>", Content);
        }
        format
    }

    fn edge(&mut self, from: State, marker: &'static str, to: State) {
        self.edges.push(Edge { from, marker, to: Target::State(to) });
    }

    /// The syntax of tool calls; `None` for a model that makes none.
    pub fn tool_parser(&self) -> Option<ToolParser> {
        self.tools
    }

    /// Whether replies may begin with reasoning.
    pub fn has_reasoning(&self) -> bool {
        self.thinking || self.initial == State::Header
    }

    /// A parser for one reply to `prompt`, token ids: a prompt that opens the reasoning, or the answer, has the
    /// reply begin inside it.
    pub fn parser(&self, tokenizer: &Tokenizer, prompt: &[u32], tools: ToolSchemas) -> ReplyParser {
        let inside = tokenizer.thinking().is_some_and(|thinking| thinking.is_open(prompt));
        let initial = if self.tools == Some(ToolParser::Harmony) {
            harmony_start(tokenizer, prompt)
        } else if inside && self.thinking {
            State::Reasoning
        } else {
            self.initial
        };
        self.parser_from(initial, tools)
    }

    fn parser_from(&self, initial: State, tools: ToolSchemas) -> ReplyParser {
        let bare_calls = self.tools == Some(ToolParser::Llama3) && !tools.is_empty();
        ReplyParser {
            state: if initial == State::Content && bare_calls { State::Start } else { initial },
            format: self.clone(),
            tools,
            scanner: MarkerScanner::default(),
            header: String::new(),
            call: String::new(),
            opening: "",
            spoken: false,
        }
    }
}

/// Tags around reasoning (`Thinking` finds which of them a vocabulary has).
const THINK_TAGS: [(&str, &str); 5] = [
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
];

/// Where a reply begins after a prompt of gpt-oss: in a message that the prompt opened, else in a header.
fn harmony_start(tokenizer: &Tokenizer, prompt: &[u32]) -> State {
    let last = |token: &str| {
        let id = tokenizer.token_to_id(token)?;
        prompt.iter().rposition(|&candidate| candidate == id)
    };
    match (last("<|start|>"), last("<|message|>")) {
        (start, Some(message)) if start.is_none_or(|start| start < message) => {
            let header = prompt.get(start.unwrap_or(0)..message).unwrap_or_default();
            let closed = ["<|end|>", "<|call|>", "<|return|>"].iter().any(|end| last(end) > Some(message));
            if closed { State::Header } else { state_of(&tokenizer.decode(header, false)) }
        }
        _ => State::Header,
    }
}

/// What a message of gpt-oss is.
fn state_of(header: &str) -> State {
    if recipient(header).is_some() {
        State::Tool
    } else if header.contains("analysis") {
        State::Reasoning
    } else {
        State::Content
    }
}

/// Splits one reply.
#[derive(Debug, Clone)]
pub struct ReplyParser {
    format: ReplyFormat,
    tools: ToolSchemas,
    state: State,
    scanner: MarkerScanner,
    /// Text between messages.
    header: String,
    /// Text of the call in progress.
    call: String,
    /// The marker that began the call.
    opening: &'static str,
    /// Whether any message or call was seen.
    spoken: bool,
}

impl ReplyParser {
    /// Consumes more of the reply's text.
    pub fn push(&mut self, text: &str) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        self.scanner.push(text);
        loop {
            if self.state == State::Start {
                match self.scanner.held().trim_start().chars().next() {
                    None => return events,
                    Some('{' | '[') => self.state = State::Tool,
                    Some(_) => self.state = State::Content,
                }
            }
            let edges: Vec<&Edge> = self.format.edges.iter().filter(|edge| edge.from == self.state).collect();
            let markers: Vec<&str> = edges.iter().map(|edge| edge.marker).collect();
            let Some((before, index)) = self.scanner.find(&markers) else {
                let text = self.scanner.release(&markers);
                self.emit(text, &mut events);
                return events;
            };
            let Some(Edge { marker, to, .. }) = edges.get(index).copied().cloned() else { return events };
            self.emit(before, &mut events);
            self.follow(marker, to, &mut events);
        }
    }

    /// Ends the reply: what was held back, and a call that has no end.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        let mut events = Vec::new();
        let rest = self.scanner.take();
        self.emit(rest, &mut events);
        match self.state {
            State::Tool => self.end_call("", &mut events),
            // A model that knows nothing of headers just answers.
            State::Header if !self.spoken && !self.header.contains("<|") => {
                let text = std::mem::take(&mut self.header);
                add(&mut events, ReplyEvent::Content(text));
            }
            _ => {}
        }
        self.state = State::Content;
        events
    }

    /// Splits a whole text.
    pub fn parse(mut self, text: &str) -> Reply {
        let mut reply = Reply::default();
        reply.add(self.push(text));
        reply.add(self.finish());
        reply
    }

    /// Text of the current state.
    fn emit(&mut self, text: String, events: &mut Vec<ReplyEvent>) {
        match self.state {
            State::Content | State::Start => add(events, ReplyEvent::Content(text)),
            State::Reasoning => add(events, ReplyEvent::Reasoning(text)),
            State::Tool => self.call.push_str(&text),
            State::Header => self.header.push_str(&text),
        }
    }

    fn follow(&mut self, marker: &'static str, to: Target, events: &mut Vec<ReplyEvent>) {
        let from = self.state;
        if from == State::Tool {
            self.end_call(marker, events);
        }
        let header = std::mem::take(&mut self.header);
        self.state = match to {
            Target::State(state) => state,
            Target::Header => state_of(&header),
        };
        self.spoken |= self.state != State::Header;
        match (self.state, to) {
            (State::Tool, Target::State(_)) if from != State::Tool => self.opening = marker,
            (State::Tool, Target::Header) => {
                self.opening = "";
                self.call = header + marker;
            }
            // Harmony's headers tell channels and recipients apart by these markers.
            (State::Header, _) if self.format.tools == Some(ToolParser::Harmony) && from != State::Header => {
                self.header.push_str(if matches!(marker, "<|start|>" | "<|channel|>") { marker } else { "" });
            }
            _ => {}
        }
    }

    fn end_call(&mut self, closing: &str, events: &mut Vec<ReplyEvent>) {
        let call = std::mem::take(&mut self.call);
        let opening = std::mem::take(&mut self.opening);
        let parsed = self.format.tools.and_then(|parser| parser.parse(&call, &self.tools).ok());
        match parsed {
            Some(calls) => events.extend(calls.into_iter().map(ReplyEvent::ToolCall)),
            None => add(events, ReplyEvent::Content(format!("{opening}{call}{closing}"))),
        }
    }
}

/// Appends an event; text joins text of the same kind.
fn add(events: &mut Vec<ReplyEvent>, event: ReplyEvent) {
    match (events.last_mut(), event) {
        (_, ReplyEvent::Content(text) | ReplyEvent::Reasoning(text)) if text.is_empty() => {}
        (Some(ReplyEvent::Content(last)), ReplyEvent::Content(text))
        | (Some(ReplyEvent::Reasoning(last)), ReplyEvent::Reasoning(text)) => last.push_str(&text),
        (_, event) => events.push(event),
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
