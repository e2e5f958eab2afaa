//! A reply on its way out: text as it comes, or one JSON object; statistics in mlx-lm's wording.

use std::io::Write;
use std::ops::ControlFlow;

use serde::Serialize;
use serde_json::Value;

use crate::engine::{Engine, Event, FinishReason, Request, Stats, TokenLogprobs};
use crate::interrupt::Interrupt;
use crate::printer::{Printer, Progress};

/// Version of the JSON objects; it changes when a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// Prompts shorter than this are read too fast for a bar to be more than a flicker.
const LONG_PROMPT: usize = 512;

/// What the model answered.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The text.
    pub text: String,
    /// The tokens, without the one that ended the reply.
    pub tokens: Vec<u32>,
    /// Log-probabilities of the tokens, if asked for.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Figures.
    pub stats: Stats,
}

/// Runs a request. With `stream` the text goes to standard output as it comes, ended by a line end.
///
/// # Errors
/// What the engine reports, or standard output cannot be written.
pub fn run(
    engine: &mut dyn Engine,
    request: &Request,
    stream: bool,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<Reply> {
    let mut text = String::new();
    let mut tokens = Vec::new();
    let mut logprobs = request.logprobs.map(|_| Vec::new());
    let mut progress: Option<Progress> = None;
    let summary = engine.generate(request, &mut |event| {
        match event {
            Event::Prefill { total, .. } if total < LONG_PROMPT => {}
            Event::Prefill { done, total } => {
                progress
                    .get_or_insert_with(|| printer.progress("Reading the prompt", total as u64))
                    .set(done as u64);
            }
            Event::Token { id, logprobs: of_token } => {
                progress = None;
                tokens.push(id);
                if let (Some(list), Some(of_token)) = (&mut logprobs, of_token) {
                    list.push(of_token);
                }
            }
            Event::Text(segment) => {
                text.push_str(&segment);
                if stream {
                    let mut stdout = printer.stdout();
                    stdout.write_all(printer.model_text(&segment).as_bytes())?;
                    stdout.flush()?;
                }
            }
        }
        Ok(if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    drop(progress);
    // A line that was begun is ended, also when the generation failed half-way; one that was not, is not begun.
    let answered = summary.as_ref().is_ok_and(|summary| summary.finish_reason != FinishReason::Interrupted);
    if stream && (answered || !text.is_empty()) {
        let mut stdout = printer.stdout();
        stdout.write_all(b"\n")?;
        stdout.flush()?;
    }
    let summary = summary?;
    Ok(Reply { text, tokens, logprobs, finish_reason: summary.finish_reason, stats: summary.stats })
}

/// The JSON form of a reply. A line of a prompt file also has its number and the `id` it came with.
#[derive(Serialize)]
struct ReplyObject<'a> {
    schema_version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    text: &'a str,
    tokens: &'a [u32],
    finish_reason: FinishReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [TokenLogprobs]>,
    stats: &'a Stats,
}

/// A request of a prompt file that failed.
#[derive(Serialize)]
struct ErrorObject<'a> {
    schema_version: u32,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    error: String,
}

/// Writes a reply as one line of JSON.
///
/// # Errors
/// Standard output cannot be written.
pub fn write_json(
    reply: &Reply,
    index: Option<usize>,
    id: Option<&Value>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let object = ReplyObject {
        schema_version: SCHEMA_VERSION,
        index,
        id,
        text: &reply.text,
        tokens: &reply.tokens,
        finish_reason: reply.finish_reason,
        logprobs: reply.logprobs.as_deref(),
        stats: &reply.stats,
    };
    write_line(&object, printer)
}

/// Writes a failure as one line of JSON.
///
/// # Errors
/// Standard output cannot be written.
pub fn write_json_error(
    error: &anyhow::Error,
    index: usize,
    id: Option<&Value>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let error = format!("{error:#}");
    write_line(&ErrorObject { schema_version: SCHEMA_VERSION, index, id, error }, printer)
}

fn write_line(object: &impl Serialize, printer: &Printer) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(object)?;
    line.push(b'\n');
    let mut stdout = printer.stdout();
    stdout.write_all(&line)?;
    stdout.flush()?;
    Ok(())
}

/// The statistics, line for line as mlx-lm prints them.
pub fn print_stats(reply: &Reply, printer: &Printer) {
    let stats = &reply.stats;
    if reply.tokens.is_empty() {
        // Stopped before the first token: nothing was measured.
        if reply.finish_reason == FinishReason::Interrupted {
            return;
        }
        printer.note("No text generated for this prompt");
    }
    printer.note(&format!("Prompt: {} tokens, {:.3} tokens-per-sec", stats.prompt_tokens, stats.prompt_tps));
    printer.note(&format!(
        "Generation: {} tokens, {:.3} tokens-per-sec",
        stats.generation_tokens, stats.generation_tps
    ));
    printer.note(&format!("Peak memory: {:.3} GB", stats.peak_memory_gb));
    printer.detail(&format!(
        "Time to first token: {:.3} s, {} prompt tokens from the cache",
        stats.time_to_first_token, stats.cached_tokens
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printer::Verbosity;
    use crate::scripted::{Scripted, request};

    fn reply(script: Scripted, verbosity: Verbosity) -> (Reply, crate::printer::Captured) {
        let (printer, captured) = Printer::captured(verbosity);
        let mut engine = script;
        let reply = run(&mut engine, &request("hi"), true, &printer, &Interrupt::default()).unwrap();
        print_stats(&reply, &printer);
        (reply, captured)
    }

    #[test]
    fn text_goes_to_stdout_and_statistics_to_stderr_in_mlx_lms_words() {
        let (reply, captured) = reply(Scripted::saying(&["Par", "is", "."]), Verbosity::Default);
        assert_eq!(captured.out(), "Paris.\n");
        assert_eq!(
            captured.err(),
            "Prompt: 7 tokens, 70.000 tokens-per-sec\nGeneration: 3 tokens, 12.346 tokens-per-sec\n\
             Peak memory: 0.250 GB\n"
        );
        assert_eq!(reply.text, "Paris.");
        assert_eq!(reply.tokens, [0, 1, 2]);
    }

    #[test]
    fn quiet_leaves_only_the_text() {
        let (_, captured) = reply(Scripted::saying(&["a"]), Verbosity::Quiet);
        assert_eq!((captured.out().as_str(), captured.err().as_str()), ("a\n", ""));
    }

    #[test]
    fn an_empty_reply_is_said_to_be_empty() {
        let (_, captured) = reply(Scripted::saying(&[]), Verbosity::Default);
        assert!(captured.err().starts_with("No text generated for this prompt\n"));
    }

    #[test]
    fn json_is_one_line() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let mut engine = Scripted::saying(&["a\n", "é"]);
        let mut request = request("hi");
        request.logprobs = Some(1);
        let reply = run(&mut engine, &request, false, &printer, &Interrupt::default()).unwrap();
        assert_eq!(captured.out(), "");
        write_json(&reply, None, None, &printer).unwrap();
        insta::assert_snapshot!(captured.out(), @r#"{"schema_version":1,"text":"a\né","tokens":[0,1],"finish_reason":"stop","logprobs":[{"id":0,"token":"a\n","bytes":[97,10],"logprob":-0.5,"top_logprobs":[{"id":0,"token":"a\n","bytes":[97,10],"logprob":-0.5}]},{"id":1,"token":"é","bytes":[195,169],"logprob":-0.5,"top_logprobs":[{"id":1,"token":"é","bytes":[195,169],"logprob":-0.5}]}],"stats":{"prompt_tokens":7,"cached_tokens":0,"prompt_tps":70.0,"generation_tokens":2,"generation_tps":12.3456,"time_to_first_token":0.1,"peak_memory_gb":0.25}}"#);
    }

    #[test]
    fn an_interrupt_stops_after_the_event_it_came_with_and_ends_the_line() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let interrupt = Interrupt::default();
        let mut engine = Scripted::saying(&["one ", "two ", "three"]).interrupted_after(2, interrupt.clone());
        let reply = run(&mut engine, &request("count"), true, &printer, &interrupt).unwrap();
        assert_eq!(captured.out(), "one two \n");
        assert_eq!(reply.finish_reason, FinishReason::Interrupted);
    }

    #[test]
    fn an_interrupt_before_the_first_token_prints_nothing() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let interrupt = Interrupt::default();
        let mut engine = Scripted::saying(&["never"]).interrupted_after(0, interrupt.clone());
        let reply = run(&mut engine, &request("count"), true, &printer, &interrupt).unwrap();
        print_stats(&reply, &printer);
        assert_eq!(reply.finish_reason, FinishReason::Interrupted);
        assert_eq!((captured.out().as_str(), captured.err().as_str()), ("", ""));
    }

    #[test]
    fn a_failure_half_way_ends_the_line() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let mut engine = Scripted::saying(&["so far"]).failing("out of memory");
        let error = run(&mut engine, &request("x"), true, &printer, &Interrupt::default()).unwrap_err();
        assert_eq!(error.to_string(), "out of memory");
        assert_eq!(captured.out(), "so far\n");
    }
}
