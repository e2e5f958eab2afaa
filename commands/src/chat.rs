//! `mlx-bun chat`: a conversation on the terminal, or over a pipe.

mod input;
mod reader;

use std::io::{self, IsTerminal};

use mlx_bun::generate::stream::StreamError;
use serde_json::{Map, Value};

use crate::args::load::{ComputeArgs, SourceArgs};
use crate::args::reply::{ReplyArgs, TalkArgs};
use crate::engine::{Engine, FinishReason, LoadOptions, Message, Prompt, Request, message};
use crate::error;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::output;
use crate::printer::{Printer, stdout_closed};
use input::{Assembler, Input};
use reader::{Line, Piped, Reader, Terminal};

/// Tokens of a reply unless asked otherwise (mlx-lm's default).
const MAX_TOKENS: usize = 256;

const HELP: &str = "\
/help           this text
/reset          forget the conversation
/system TEXT    set the system prompt; without TEXT, show it
/exit           leave, as does Ctrl-D
//TEXT          say a text that begins with /
A backslash at the end of a line continues it; \"\"\" begins and ends a block of lines.
Ctrl-C stops a reply and keeps the conversation.";

const EXAMPLES: &str = "\
Examples:
  mlx-bun chat
  mlx-bun chat ./my-model --temp 0.7 --system-prompt \"You are a pirate\"
  printf 'Hello\\nAnd in French?\\n' | mlx-bun chat

In the conversation:
  /help /reset /system [TEXT] /exit; Ctrl-C stops a reply, Ctrl-D leaves.";

/// Talk with a model
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct ChatArgs {
    /// The model, as --model names it
    #[arg(value_name = "MODEL")]
    named: Option<String>,

    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    reply: ReplyArgs,
    #[command(flatten)]
    talk: TalkArgs,
    #[command(flatten)]
    compute: ComputeArgs,

    /// Do not read or write the history of inputs
    #[arg(long, help_heading = "Output")]
    no_history: bool,
}

/// Runs the verb; `load` makes the engine.
///
/// # Errors
/// Arguments that make no sense, a model that cannot be loaded, an output that cannot be written.
pub fn run(
    args: &ChatArgs,
    printer: Printer,
    load: impl FnOnce(&LoadOptions, &Printer) -> anyhow::Result<Box<dyn Engine>>,
) -> anyhow::Result<ExitStatus> {
    let printer = args.talk.limit(printer);
    let mut warnings = Vec::new();
    let options = LoadOptions {
        extra_eos_tokens: args.talk.extra_eos_tokens()?,
        conversation: true,
        ..args.source.resolve(args.named.clone(), &args.compute, None, &mut warnings)?
    };
    let settings = args.reply.request(Prompt::Raw(String::new()), MAX_TOKENS, &mut warnings)?;
    for warning in &warnings {
        printer.warning(warning);
    }
    let interrupt = Interrupt::install(&printer)?;
    interrupt.begin();
    let mut engine = load(&options, &printer)?;
    if interrupt.is_set() {
        return Ok(ExitStatus::Interrupted);
    }
    let conversation = Conversation {
        engine: engine.as_mut(),
        settings,
        system: args.source.template.system_prompt.clone(),
        messages: Vec::new(),
        printer: &printer,
        interrupt,
    };
    if !io::stdin().is_terminal() {
        return conversation.hold(&mut Piped::new(io::stdin().lock()));
    }
    let history = if args.no_history { None } else { reader::history_file() };
    let (mut terminal, problem) = Terminal::new(history)?;
    if let Some(problem) = problem {
        printer.warning(&problem);
    }
    printer.note("/help lists the commands; Ctrl-D leaves");
    conversation.hold(&mut terminal)
}

/// The state of a conversation.
struct Conversation<'a> {
    engine: &'a mut dyn Engine,
    /// Everything of a request but its prompt.
    settings: Request,
    system: Option<String>,
    messages: Vec<Message>,
    printer: &'a Printer,
    interrupt: Interrupt,
}

impl Conversation<'_> {
    /// Goes on until the input ends. A reply that failed ends a script with a failure, and annoys a person only.
    fn hold(mut self, reader: &mut dyn Reader) -> anyhow::Result<ExitStatus> {
        let mut assembler = Assembler::default();
        let mut status = ExitStatus::Success;
        loop {
            self.interrupt.rest();
            let input = match reader.line(assembler.is_open())? {
                Line::Text(line) => match assembler.feed(&line) {
                    Some(input) => input,
                    None => continue,
                },
                Line::Unreadable(problem) => {
                    self.printer.error(&problem);
                    status = ExitStatus::Failure;
                    continue;
                }
                Line::Interrupted => {
                    if !assembler.is_open() {
                        self.printer.note("Ctrl-D or /exit leaves");
                    }
                    assembler.clear();
                    continue;
                }
                Line::End => match assembler.finish() {
                    Some(input) => input,
                    None => return Ok(status),
                },
            };
            match input {
                Input::Exit => return Ok(status),
                Input::Empty => {}
                Input::Help => self.printer.note(HELP),
                Input::Reset => {
                    self.messages.clear();
                    self.printer.note("The conversation is forgotten");
                }
                Input::System(None) => {
                    self.printer.note(self.system.as_deref().unwrap_or("There is no system prompt"));
                }
                Input::System(text) => {
                    self.system = text;
                    self.printer.note("The system prompt is set");
                }
                Input::Unknown(word) => {
                    self.printer.warning(&format!("there is no command /{word}; /help lists them"));
                }
                Input::Message(text) => {
                    reader.remember(&text);
                    if let Err(error) = self.reply(text) {
                        if stdout_closed(&error) {
                            return Err(error);
                        }
                        if !self.interrupt.is_set() {
                            error::say(&error, "", self.printer);
                        }
                        if let Some(StreamError::ContextLength { .. }) = error.downcast_ref() {
                            self.printer.hint("/reset forgets the conversation and begins a new one");
                        }
                        status = ExitStatus::Failure;
                    }
                    if self.interrupt.is_set() && !reader.is_interactive() {
                        return Ok(ExitStatus::Interrupted);
                    }
                }
            }
            if reader.is_interactive() {
                status = ExitStatus::Success;
            }
        }
    }

    /// One turn. What was said of a stopped reply stays; a turn without any reply is taken back.
    fn reply(&mut self, text: String) -> anyhow::Result<()> {
        self.interrupt.begin();
        self.messages.push(message("user", text));
        let system = self.system.iter().map(|text| message("system", text.as_str()));
        let prompt = Prompt::Chat {
            messages: system.chain(self.messages.iter().cloned()).collect(),
            continue_last: false,
            variables: Map::<String, Value>::new(),
        };
        let request = Request { prompt, ..self.settings.clone() };
        let reply = match output::run(self.engine, &request, true, self.printer, &self.interrupt) {
            Ok(reply) => reply,
            Err(error) => {
                self.messages.pop();
                return Err(error);
            }
        };
        if reply.text.is_empty() {
            self.messages.pop();
            self.printer.note("No reply; the message is taken back");
        } else {
            self.messages.push(message("assistant", reply.text));
        }
        if let (FinishReason::Length, Some(limit)) = (reply.finish_reason, self.settings.max_tokens) {
            self.printer.note(&format!("(cut at {limit} tokens; --max-tokens sets the limit)"));
        }
        self.printer.detail(&format!(
            "Prompt: {} tokens ({} cached), {:.3} tokens-per-sec; generation: {} tokens, {:.3} tokens-per-sec",
            reply.stats.prompt_tokens,
            reply.stats.cached_tokens,
            reply.stats.prompt_tps,
            reply.stats.generation_tokens,
            reply.stats.generation_tps,
        ));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::printer::{Captured, Verbosity};
    use crate::scripted::{self, Scripted};

    /// Lines typed in advance; `^C` is a Ctrl-C, `^?` a line that is not UTF-8.
    struct Typed {
        lines: VecDeque<&'static str>,
        interactive: bool,
        remembered: Vec<String>,
    }

    impl Reader for Typed {
        fn line(&mut self, _: bool) -> anyhow::Result<Line> {
            Ok(match self.lines.pop_front() {
                Some("^C") => Line::Interrupted,
                Some("^?") => Line::Unreadable("not text".to_owned()),
                Some(line) => Line::Text(line.to_owned()),
                None => Line::End,
            })
        }

        fn remember(&mut self, input: &str) {
            self.remembered.push(input.to_owned());
        }

        fn is_interactive(&self) -> bool {
            self.interactive
        }
    }

    fn hold(
        engine: &mut Scripted,
        interrupt: Interrupt,
        interactive: bool,
        lines: &[&'static str],
    ) -> (ExitStatus, Captured, Vec<String>) {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let conversation = Conversation {
            engine,
            settings: scripted::request(""),
            system: None,
            messages: Vec::new(),
            printer: &printer,
            interrupt,
        };
        let mut reader =
            Typed { lines: lines.iter().copied().collect(), interactive, remembered: Vec::new() };
        let status = conversation.hold(&mut reader).unwrap();
        (status, captured, reader.remembered)
    }

    fn contents(request: &Request) -> Vec<String> {
        let Prompt::Chat { messages, .. } = &request.prompt else { panic!("a conversation") };
        messages
            .iter()
            .map(|m| format!("{}: {}", m["role"].as_str().unwrap(), m["content"].as_str().unwrap()))
            .collect()
    }

    #[test]
    fn the_conversation_grows_and_can_be_reset() {
        let mut engine = Scripted::replying(&[&["Hello", "!"], &["Bonjour"], &["Again"]]);
        let lines = ["hi", "in French?", "/reset", "/system be brief", "new"];
        let (status, captured, remembered) = hold(&mut engine, Interrupt::default(), true, &lines);
        assert_eq!(status, ExitStatus::Success);
        assert_eq!(captured.out(), "Hello!\nBonjour\nAgain\n");
        assert_eq!(contents(&engine.requests[1]), ["user: hi", "assistant: Hello!", "user: in French?"]);
        assert_eq!(contents(&engine.requests[2]), ["system: be brief", "user: new"]);
        assert_eq!(remembered, ["hi", "in French?", "new"]);
    }

    #[test]
    fn ctrl_c_stops_a_reply_and_keeps_the_conversation() {
        let interrupt = Interrupt::default();
        let mut engine = Scripted::replying(&[&["one ", "two ", "three"], &["ok"]])
            .interrupted_after(2, interrupt.clone());
        let (status, captured, _) = hold(&mut engine, interrupt, true, &["count", "go on"]);
        assert_eq!(status, ExitStatus::Success);
        assert_eq!(captured.out(), "one two \nok\n");
        assert_eq!(contents(&engine.requests[1]), ["user: count", "assistant: one two ", "user: go on"]);
    }

    #[test]
    fn ctrl_c_ends_a_script() {
        let interrupt = Interrupt::default();
        let mut engine = Scripted::saying(&["one ", "two"]).interrupted_after(1, interrupt.clone());
        let (status, _, _) = hold(&mut engine, interrupt, false, &["count", "never asked"]);
        assert_eq!(status, ExitStatus::Interrupted);
        assert_eq!(engine.requests.len(), 1);
    }

    #[test]
    fn ctrl_c_at_the_prompt_hints_and_drops_what_was_begun() {
        let mut engine = Scripted::saying(&["ok"]);
        let lines = ["^C", "half\\", "^C", "whole"];
        let (_, captured, remembered) = hold(&mut engine, Interrupt::default(), true, &lines);
        assert_eq!(captured.err(), "Ctrl-D or /exit leaves\n");
        assert_eq!(remembered, ["whole"]);
    }

    #[test]
    fn a_failed_turn_is_taken_back() {
        let mut engine = Scripted::replying(&[&[], &["ok"]]).failing("too long");
        let (status, captured, _) = hold(&mut engine, Interrupt::default(), false, &["long", "short"]);
        assert_eq!(status, ExitStatus::Failure);
        assert_eq!(captured.err(), "error: too long\n");
        assert_eq!(contents(&engine.requests[1]), ["user: short"]);
    }

    #[test]
    fn a_conversation_longer_than_the_context_hints_at_reset() {
        let error = StreamError::ContextLength { prompt: 600, context: 512 };
        let mut engine = Scripted::saying(&[]).failing_with(error.into());
        let (_, captured, _) = hold(&mut engine, Interrupt::default(), true, &["long"]);
        assert_eq!(
            captured.err(),
            "error: the prompt has 600 tokens, but the model's context is 512; shorten the prompt\n\
             hint: /reset forgets the conversation and begins a new one\n"
        );
    }

    #[test]
    fn a_line_that_is_no_text_is_skipped_and_said() {
        let mut engine = Scripted::saying(&["ok"]);
        let (status, captured, _) = hold(&mut engine, Interrupt::default(), false, &["^?", "hi"]);
        assert_eq!((captured.out().as_str(), captured.err().as_str()), ("ok\n", "error: not text\n"));
        assert_eq!(status, ExitStatus::Failure);
        assert_eq!(contents(&engine.requests[0]), ["user: hi"]);
    }

    #[test]
    fn a_typo_in_a_command_is_not_sent_to_the_model() {
        let mut engine = Scripted::saying(&["ok"]);
        let (_, captured, _) = hold(&mut engine, Interrupt::default(), true, &["/rest", "/exit", "never"]);
        assert_eq!(captured.err(), "warning: there is no command /rest; /help lists them\n");
        assert!(engine.requests.is_empty());
    }
}
