//! Replies from an engine's events.

use std::path::Path;
use std::time::Duration;

use mlx_bun::generate::stream::Stats;
use mlx_bun::structured::ReplyFormat;
use mlx_bun::structured::tools::ToolSchemas;

use super::super::stream::Encoder;
use super::*;

fn tokenizer() -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tokenizers/byte-level");
    Arc::new(Tokenizer::from_dir(&folder).unwrap())
}

/// A reply in these pieces to a request with a tool `ping`.
pub fn reply(pieces: &[&str], reason: FinishReason, parallel: bool) -> Result<Whole, ApiError> {
    let (replies, sink) = replies(pieces, reason, parallel);
    let whole = block_on(replies.collect()).map(|mut wholes| wholes.pop().unwrap());
    assert!(sink.is_gone(), "nobody listens any more");
    whole
}

/// The same reply as the events of a protocol.
pub fn encoded(pieces: &[&str], reason: FinishReason, encoder: &mut impl Encoder) -> String {
    let (mut replies, _sink) = replies(pieces, reason, true);
    let mut events = encoder.begin(&replies);
    while let Some(next) = block_on(replies.next()) {
        match next.unwrap() {
            (_, Item::Progress { .. }) => {}
            (index, Item::Piece(piece)) => events += &encoder.piece(index, piece),
            (index, Item::Done(outcome)) => events += &encoder.done(index, &outcome),
        }
    }
    events + &encoder.end()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn replies(pieces: &[&str], reason: FinishReason, parallel: bool) -> (Replies, Sink) {
    let tokenizer = tokenizer();
    let template = "<tool_call>{{ tool_call.name }}";
    let format = ReplyFormat::new(&tokenizer, Some(template)).unwrap();
    let schemas = ToolSchemas::from_openai(&[json!({"type": "function", "function": {"name": "ping"}})]);
    let mut replies = Replies::new(Arc::clone(&tokenizer), 7, parallel);
    let mut sink = replies.sink(Some(format.parser(&tokenizer, &[], schemas))).unwrap();
    replies.seal();
    for (index, piece) in pieces.iter().enumerate() {
        let chunk = Chunk { text: (*piece).to_owned(), token: Some(index as u32), logprobs: None };
        sink.send(GenerationEvent::Chunk(chunk));
    }
    let stats = Stats { generation_tokens: pieces.len() + 1, ..Stats::default() };
    sink.send(GenerationEvent::Finished(Summary {
        finish_reason: reason,
        stop: None,
        stats,
        cached_tokens: 3,
        queue_time: Duration::ZERO,
        lane: Lane::Serial,
    }));
    (replies, sink)
}

/// A call of the tool.
pub const CALL: &str = "<tool_call>{\"name\": \"ping\", \"arguments\": {}}</tool_call>";

#[test]
fn f6_calls_keep_their_order_and_content_stays() {
    let text = format!("Look: {CALL} and {CALL}");
    let whole = reply(&[&text], FinishReason::Stop, true).unwrap();
    assert_eq!((whole.calls().count(), whole.content().as_str()), (2, "Look:  and "));
    assert_eq!(whole.finish(), Finish::ToolCalls);
    let usage = Usage { prompt: 7, cached: 3, completion: 2, reasoning: 0 };
    assert_eq!(whole.usage(), usage);
}

#[test]
fn f7_a_call_is_the_same_in_every_two_pieces() {
    let whole = reply(&[CALL], FinishReason::Stop, true).unwrap().blocks;
    for cut in 1..CALL.len() {
        let pieces = reply(&[&CALL[..cut], &CALL[cut..]], FinishReason::Stop, true).unwrap();
        assert_eq!(pieces.blocks, whole, "{cut}");
    }
}

#[test]
fn f11_a_call_that_was_cut_is_no_call() {
    let whole = reply(&["<tool_call>{\"name\": \"pi"], FinishReason::Length, true).unwrap();
    assert_eq!((whole.finish(), whole.calls().count()), (Finish::Length, 0));
    assert_eq!(whole.content(), "<tool_call>{\"name\": \"pi");
}

#[test]
fn one_call_ends_a_reply_that_may_have_one() {
    let whole = reply(&["Hm ", CALL, CALL, "more"], FinishReason::Length, false).unwrap();
    assert_eq!(
        (whole.finish(), whole.calls().count(), whole.content().as_str()),
        (Finish::ToolCalls, 1, "Hm ")
    );
    assert_eq!(whole.usage().completion, 2);
}

#[test]
fn a_reply_that_the_server_cut_short_is_an_error() {
    let error = reply(&["a"], FinishReason::Cancelled, true).unwrap_err();
    assert_eq!(error.status.as_u16(), 503);
}

#[test]
fn a_reply_that_is_cut_short_has_counted_its_tokens() {
    let (mut replies, _sink) = replies(&["a", "b", "c"], FinishReason::Cancelled, true);
    while block_on(replies.next()).is_some_and(|next| next.is_ok()) {}
    assert_eq!((replies.usage().prompt, replies.usage().completion), (7, 3));
}
