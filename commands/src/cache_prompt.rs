//! `mlx-bun cache-prompt`: computes a prompt once and keeps its cache in a file.

use std::ops::ControlFlow;
use std::path::PathBuf;

use mlx_bun::generate::prompt_cache;
use serde_json::Map;

use crate::args::load::{ComputeArgs, SourceArgs};
use crate::args::prompt::{empty_prompt, read_prompt};
use crate::engine::{Engine, Event, LoadOptions, Prompt, message};
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
use crate::output_file;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Example:
  mlx-bun cache-prompt --prompt-cache-file book.safetensors --prompt - < book.txt
  mlx-bun generate --prompt-cache-file book.safetensors \"Who is the narrator?\"";

/// Compute a long prompt once and save it for `generate --prompt-cache-file`
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct CachePromptArgs {
    /// The file to write
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    prompt_cache_file: PathBuf,

    /// The prompt; `-` reads standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt")]
    prompt: String,

    /// Feed the prompt as it is, without the chat template
    #[arg(long, visible_alias = "ignore-chat-template", help_heading = "Prompt")]
    raw: bool,

    #[command(flatten)]
    source: SourceArgs,

    /// A token that ends a reply, beside the model's own; kept with the cache
    #[arg(long, value_name = "TOKEN", help_heading = "Model")]
    eos_token: Option<String>,

    #[command(flatten)]
    compute: ComputeArgs,
}

/// Runs the verb; `load` makes the engine.
///
/// # Errors
/// Arguments that make no sense, a model that cannot be loaded, a file that cannot be written.
pub fn run(
    args: &CachePromptArgs,
    printer: &Printer,
    load: impl FnOnce(&LoadOptions, &Printer) -> anyhow::Result<Box<dyn Engine>>,
) -> anyhow::Result<ExitStatus> {
    let interrupt = Interrupt::install(printer)?;
    let mut warnings = Vec::new();
    let options = LoadOptions {
        extra_eos_tokens: args.eos_token.iter().cloned().collect(),
        ..args.source.resolve(None, &args.compute, None, &mut warnings)?
    };
    if args.raw {
        args.source.template.warn_unused(&mut warnings);
    }
    let text = match args.prompt.as_str() {
        "" => return Err(empty_prompt().into()),
        "-" => read_prompt(printer)?,
        text => text.to_owned(),
    };
    for warning in &warnings {
        printer.warning(warning);
    }
    output_file::check(&args.prompt_cache_file, "prompt cache", prompt_cache::is_prompt_cache)?;
    interrupt.begin();
    let mut engine = load(&options, printer)?;
    save(engine.as_mut(), &prompt(args, text), args, printer, &interrupt)
}

/// As mlx-lm: the user's message is left open, so that `generate` can go on with the question.
fn prompt(args: &CachePromptArgs, text: String) -> Prompt {
    if args.raw {
        return Prompt::Raw(text);
    }
    let system = args.source.template.system_prompt.clone().map(|system| message("system", system));
    let messages = system.into_iter().chain([message("user", text)]).collect();
    Prompt::Chat { messages, continue_last: true, variables: Map::new() }
}

fn save(
    engine: &mut dyn Engine,
    prompt: &Prompt,
    args: &CachePromptArgs,
    printer: &Printer,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitStatus> {
    let mut progress = None;
    let saved = engine.save_prompt_cache(prompt, &args.prompt_cache_file, &mut |event| {
        if let Event::Prefill { done, total } = event {
            progress
                .get_or_insert_with(|| printer.progress("Reading the prompt", total as u64))
                .set(done as u64);
        }
        Ok(if interrupt.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    drop(progress);
    let Some(saved) = saved else { return Ok(ExitStatus::Interrupted) };
    printer.note(&format!("Prompt: {} tokens saved to {}", saved.tokens, args.prompt_cache_file.display()));
    printer.note(&format!("Peak memory: {:.3} GB", saved.peak_memory_gb));
    Ok(ExitStatus::Success)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::printer::Verbosity;
    use crate::scripted::Scripted;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        args: CachePromptArgs,
    }

    fn parse(arguments: &[&str]) -> CachePromptArgs {
        let required = ["x", "--prompt-cache-file", "out.safetensors", "--prompt", "text"];
        Probe::parse_from(required.iter().chain(arguments)).args
    }

    #[test]
    fn the_users_message_stays_open() {
        let expected = Prompt::Chat {
            messages: vec![message("system", "s"), message("user", "text")],
            continue_last: true,
            variables: Map::new(),
        };
        assert_eq!(prompt(&parse(&["--system-prompt", "s"]), "text".to_owned()), expected);
        assert_eq!(prompt(&parse(&["--raw"]), "text".to_owned()), Prompt::Raw("text".to_owned()));
    }

    #[test]
    fn says_what_was_saved_and_saves_nothing_when_interrupted() {
        let (printer, captured) = Printer::captured(Verbosity::Default);
        let mut engine = Scripted::saying(&[]);
        let (args, interrupt) = (parse(&[]), Interrupt::default());
        let prompt = Prompt::Raw("text".to_owned());
        assert_eq!(save(&mut engine, &prompt, &args, &printer, &interrupt).unwrap(), ExitStatus::Success);
        assert_eq!(captured.err(), "Prompt: 7 tokens saved to out.safetensors\nPeak memory: 0.250 GB\n");
        interrupt.set();
        assert_eq!(save(&mut engine, &prompt, &args, &printer, &interrupt).unwrap(), ExitStatus::Interrupted);
        assert_eq!(engine.saved.len(), 1);
    }
}
