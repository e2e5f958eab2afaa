//! `mlx-bun generate`: one prompt, or a file of them, answered once.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::args::Warnings;
use crate::args::grammar::GrammarArgs;
use crate::args::load::{ComputeArgs, SourceArgs};
use crate::args::per_prompt::{Flags, PerPrompt};
use crate::args::prompt::{PromptArgs, PromptSource, read_prompt};
use crate::args::reply::TalkArgs;
use crate::engine::{Engine, FinishReason, LoadOptions, Message, Prompt, Request, message};
use crate::error::{self, Complaint};
use crate::exit::ExitStatus;
use crate::interrupt::Interrupt;
use crate::output;
use crate::printer::Printer;
use crate::prompt_file::{self, Line, Question};

/// Tokens of a reply unless asked otherwise (mlx-lm's default).
const MAX_TOKENS: usize = 100;

/// Ends the short help of verbs with many flags.
pub const MORE: &str = "--help lists every flag, with examples.";

const EXAMPLES: &str = "\
Examples:
  mlx-bun generate \"What is the capital of France?\"
  mlx-bun generate --model ./my-model --temp 0.7 --top-p 0.9 --max-tokens 500 \"A haiku about rain\"
  git diff | mlx-bun generate --system-prompt \"Write a commit message\" -
  mlx-bun generate --json \"Name a colour\" | jq .stats
  mlx-bun generate --json-schema person.json \"Invent a person\"
  mlx-bun generate --prompt-file prompts.jsonl > answers.jsonl

The reply goes to standard output, statistics and everything else to standard error.";

/// Answer a prompt and exit
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct GenerateArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    per_prompt: PerPrompt,
    #[command(flatten)]
    talk: TalkArgs,
    #[command(flatten)]
    grammar: GrammarArgs,
    #[command(flatten)]
    compute: ComputeArgs,

    /// Continue a prompt cache that `cache-prompt` saved; the model is the one it was made with
    #[arg(long, value_name = "FILE", help_heading = "Key-value cache")]
    prompt_cache_file: Option<PathBuf>,

    /// Print one JSON object: text, tokens, finish_reason, stats
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// One request and what it came with.
struct Job {
    request: Request,
    /// The `id` of its line in the prompt file.
    id: Option<Value>,
}

/// How answers are printed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Text as it comes.
    Text,
    /// One JSON object.
    Object,
    /// A JSON object a line, one for each line of the prompt file.
    Lines,
}

/// What the arguments mean.
struct Plan {
    load: LoadOptions,
    jobs: Vec<Job>,
    form: Form,
}

impl GenerateArgs {
    fn resolve(&self, warnings: &mut Warnings, printer: &Printer) -> anyhow::Result<Plan> {
        let (source, model) = self.prompt.resolve()?;
        let form = match source {
            PromptSource::Lines(_) => Form::Lines,
            _ if self.json => Form::Object,
            _ => Form::Text,
        };
        self.per_prompt.flags.logprobs.resolve(form != Form::Text)?;
        if self.prompt_cache_file.is_some() {
            self.check_continues_cache()?;
        }
        if self.prompt.raw {
            self.source.template.warn_unused(warnings);
            if self.prompt.prefill_response.is_some() {
                warnings.push("`--prefill-response` does nothing with `--raw`".to_owned());
            }
        }
        // Said once for the flags, not for each line of a file.
        self.per_prompt.flags.reply.request(Prompt::Raw(String::new()), MAX_TOKENS, warnings)?;
        let load = LoadOptions {
            extra_eos_tokens: self.talk.extra_eos_tokens()?,
            ..self.source.resolve(model, &self.compute, self.prompt_cache_file.clone(), warnings)?
        };
        let stdin_free = !self.reads_stdin(&source);
        let constraint = self.grammar.resolve(stdin_free, printer)?;
        let mut jobs = self.jobs(source, printer)?;
        jobs.iter_mut().for_each(|job| job.request.constraint.clone_from(&constraint));
        Ok(Plan { load, jobs, form })
    }

    fn reads_stdin(&self, source: &PromptSource) -> bool {
        match source {
            PromptSource::Text(_) => false,
            PromptSource::Stdin => true,
            PromptSource::Lines(path) => path.as_os_str() == "-",
        }
    }

    /// A saved cache holds the beginning of the prompt and is kept as it was made.
    fn check_continues_cache(&self) -> Result<(), Complaint> {
        let fixed = [
            ("--system-prompt", self.source.template.system_prompt.is_some(), "give it to `cache-prompt`"),
            ("--max-kv-size", self.compute.kv_cache.max_kv_size.is_some(), "give it to `cache-prompt`"),
        ];
        match fixed.iter().find(|(_, given, _)| *given) {
            Some((flag, _, hint)) => Err(Complaint::usage(format!(
                "`{flag}` cannot change what `--prompt-cache-file` already holds"
            ))
            .hint(*hint)),
            None => Ok(()),
        }
    }

    fn jobs(&self, source: PromptSource, printer: &Printer) -> anyhow::Result<Vec<Job>> {
        let mut per_prompt = self.per_prompt.clone();
        per_prompt.map_stop(|text| self.prompt.text(text));
        let system = self.source.template.system_prompt.as_ref().map(|text| self.prompt.text(text));
        let prefill = self.prompt.prefill_response.as_ref().map(|text| self.prompt.text(text));
        let job = |text: String| -> anyhow::Result<Vec<Job>> {
            let prompt = if self.prompt.raw {
                Prompt::Raw(text)
            } else {
                chat(vec![message("user", text)], system.clone(), prefill.clone(), Map::new())
            };
            Ok(vec![Job { request: request(prompt, &per_prompt.flags)?, id: None }])
        };
        let path = match source {
            PromptSource::Text(text) => return job(text),
            PromptSource::Stdin => return job(read_prompt(printer)?),
            PromptSource::Lines(path) => path,
        };
        let lines = prompt_file::read(&path, &per_prompt, self.prompt_cache_file.is_some(), printer)?;
        let job = |line: Line| {
            let prompt = match line.question {
                Question::Prompt(text) if self.prompt.raw => Prompt::Raw(text),
                question => {
                    let messages = match question {
                        Question::Prompt(text) => vec![message("user", text)],
                        Question::Messages(messages) => messages,
                    };
                    chat(
                        messages,
                        line.system_prompt.or_else(|| system.clone()),
                        line.prefill_response.or_else(|| prefill.clone()),
                        line.chat_template_kwargs,
                    )
                }
            };
            Ok(Job { request: request(prompt, &line.flags)?, id: line.id })
        };
        lines.into_iter().map(job).collect()
    }
}

/// A conversation; one that brings its own system message keeps it.
fn chat(
    mut messages: Vec<Message>,
    system: Option<String>,
    prefill: Option<String>,
    variables: Map<String, Value>,
) -> Prompt {
    let has_system =
        messages.first().and_then(|first| first.get("role")).is_some_and(|role| role == "system");
    if let Some(system) = system.filter(|_| !has_system) {
        messages.insert(0, message("system", system));
    }
    let continue_last = prefill.is_some();
    messages.extend(prefill.map(|prefill| message("assistant", prefill)));
    Prompt::Chat { messages, continue_last, variables }
}

fn request(prompt: Prompt, flags: &Flags) -> Result<Request, Complaint> {
    let request = flags.reply.request(prompt, MAX_TOKENS, &mut Vec::new())?;
    Ok(Request { logprobs: flags.logprobs.resolve(true)?, ..request })
}

/// Runs the verb; `load` makes the engine.
///
/// # Errors
/// Arguments that make no sense, a model that cannot be loaded, a generation that fails.
pub fn run(
    args: &GenerateArgs,
    printer: Printer,
    load: impl FnOnce(&LoadOptions, &Printer) -> anyhow::Result<Box<dyn Engine>>,
) -> anyhow::Result<ExitStatus> {
    let printer = args.talk.limit(printer);
    let mut warnings = Vec::new();
    let interrupt = Interrupt::install(&printer)?;
    let plan = args.resolve(&mut warnings, &printer)?;
    for warning in &warnings {
        printer.warning(warning);
    }
    interrupt.begin();
    let mut engine = load(&plan.load, &printer)?;
    answer(engine.as_mut(), &plan.jobs, plan.form, &printer, &interrupt)
}

/// Answers all jobs in order. In a file of many, one that fails leaves its error in its place.
fn answer(
    engine: &mut dyn Engine,
    jobs: &[Job],
    form: Form,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitStatus> {
    let mut status = ExitStatus::Success;
    for (index, job) in jobs.iter().enumerate() {
        if interrupt.is_set() {
            return Ok(ExitStatus::Interrupted);
        }
        let index = (form == Form::Lines).then_some(index);
        let reply = match output::run(engine, &job.request, form == Form::Text, printer, interrupt) {
            Ok(reply) => reply,
            Err(error) => {
                let Some(index) = index else { return Err(error) };
                if crate::printer::stdout_closed(&error) || interrupt.is_set() {
                    return Err(error);
                }
                error::say(&error, &format!("prompt {}: ", index + 1), printer);
                output::write_json_error(&error, index, job.id.as_ref(), printer)?;
                status = ExitStatus::Failure;
                continue;
            }
        };
        if form != Form::Text {
            output::write_json(&reply, index, job.id.as_ref(), printer)?;
        }
        output::print_stats(&reply, printer);
        if reply.finish_reason == FinishReason::Interrupted {
            return Ok(ExitStatus::Interrupted);
        }
    }
    Ok(status)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::printer::Verbosity;
    use crate::scripted::{self, Scripted};

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: GenerateArgs,
    }

    fn plan(arguments: &[&str]) -> anyhow::Result<(Plan, Warnings)> {
        let probe = Probe::try_parse_from(std::iter::once("x").chain(arguments.iter().copied()))?;
        let mut warnings = Vec::new();
        probe
            .args
            .resolve(&mut warnings, &Printer::captured(Verbosity::Default).0)
            .map(|plan| (plan, warnings))
    }

    fn prompt(arguments: &[&str]) -> Prompt {
        plan(arguments).unwrap().0.jobs.remove(0).request.prompt
    }

    fn chat_of(messages: Vec<Message>, continue_last: bool) -> Prompt {
        Prompt::Chat { messages, continue_last, variables: Map::new() }
    }

    #[test]
    fn a_prompt_becomes_a_conversation_unless_raw() {
        assert_eq!(prompt(&["hi"]), chat_of(vec![message("user", "hi")], false));
        assert_eq!(
            prompt(&["--system-prompt", "be brief", "--prefill-response", "Well", "-p", "hi"]),
            chat_of(
                vec![message("system", "be brief"), message("user", "hi"), message("assistant", "Well")],
                true
            )
        );
        assert_eq!(prompt(&["--raw", "hi"]), Prompt::Raw("hi".to_owned()));
        assert_eq!(prompt(&["--ignore-chat-template", "hi"]), Prompt::Raw("hi".to_owned()));
    }

    #[test]
    fn the_limit_is_mlx_lms() {
        let limit = |arguments: &[&str]| plan(arguments).unwrap().0.jobs[0].request.max_tokens;
        assert_eq!(limit(&["hi"]), Some(100));
        assert_eq!(limit(&["-m", "7", "hi"]), Some(7));
        assert_eq!(limit(&["--max-tokens=-1", "hi"]), None);
    }

    #[test]
    fn flags_that_a_raw_prompt_ignores_are_pointed_out() {
        let (_, warnings) =
            plan(&["--raw", "--system-prompt", "s", "--prefill-response", "p", "hi"]).unwrap();
        assert_eq!(
            warnings,
            ["`--system-prompt` does nothing with `--raw`", "`--prefill-response` does nothing with `--raw`"]
        );
    }

    #[test]
    fn a_prompt_file_mixes_prompts_conversations_and_overrides() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines = concat!(
            r#"{"prompt": "a", "temperature": 1, "id": "first"}"#,
            "\n\n",
            r#"{"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}], "#,
            r#""chat_template_kwargs": {"k": 1}}"#,
        );
        std::fs::write(file.path(), lines).unwrap();
        let path = file.path().to_str().unwrap();
        let (plan, _) = plan(&["--system-prompt", "flag", "--prompt-file", path]).unwrap();
        assert!(plan.form == Form::Lines);
        let [first, second] = plan.jobs.as_slice() else { panic!("two jobs") };
        assert_eq!(first.id, Some(Value::from("first")));
        assert_eq!(first.request.sampling.temperature, 1.0);
        assert_eq!(
            first.request.prompt,
            chat_of(vec![message("system", "flag"), message("user", "a")], false)
        );
        let Prompt::Chat { messages, variables, .. } = &second.request.prompt else {
            panic!("a conversation")
        };
        assert_eq!(messages[0], message("system", "own"));
        assert_eq!(messages.len(), 2);
        assert_eq!(variables.get("k"), Some(&Value::from(1)));
    }

    #[test]
    fn a_saved_cache_leaves_no_room_for_what_comes_before() {
        for flags in [&["--system-prompt", "s"][..], &["--max-kv-size", "64"]] {
            let error = plan(&[&["--prompt-cache-file", "f", "hi"], flags].concat()).err().unwrap();
            let said = format!("`{}` cannot change what `--prompt-cache-file` already holds", flags[0]);
            assert_eq!(error.to_string(), said);
        }
        assert!(
            plan(&["--prompt-cache-file", "f", "--kv-bits", "8", "--prefill-response", "p", "hi"]).is_ok()
        );
    }

    fn jobs(count: usize) -> Vec<Job> {
        (0..count).map(|_| Job { request: scripted::request("x"), id: None }).collect()
    }

    #[test]
    fn a_failing_line_leaves_its_error_in_its_place_and_the_rest_goes_on() {
        let (printer, captured) = Printer::captured(Verbosity::Quiet);
        let mut engine = Scripted::replying(&[&["one"], &["two"]]).failing("too long");
        let status = answer(&mut engine, &jobs(2), Form::Lines, &printer, &Interrupt::default()).unwrap();
        assert_eq!(status, ExitStatus::Failure);
        let out = captured.out();
        let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["error"], "too long");
        assert_eq!((&lines[1]["text"], &lines[1]["index"]), (&Value::from("two"), &Value::from(1)));
        assert_eq!(captured.err(), "error: prompt 1: too long\n");
    }

    #[test]
    fn an_interrupt_keeps_what_was_made_and_starts_nothing_more() {
        let (printer, captured) = Printer::captured(Verbosity::Quiet);
        let interrupt = Interrupt::default();
        let mut engine = Scripted::saying(&["so ", "far", "!"]).interrupted_after(2, interrupt.clone());
        let status = answer(&mut engine, &jobs(3), Form::Lines, &printer, &interrupt).unwrap();
        assert_eq!(status, ExitStatus::Interrupted);
        let object: Value = serde_json::from_str(&captured.out()).unwrap();
        assert_eq!((&object["text"], &object["finish_reason"]), (&"so far".into(), &"interrupted".into()));
    }
}
