//! `mlx-bun cache-prompt`: computes a prompt once and keeps its cache in a file.

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde_json::Map;

use crate::args::adapter::AdapterArgs;
use crate::args::kv_cache::KvCacheArgs;
use crate::args::model::ModelArgs;
use crate::args::numerics::NumericsArgs;
use crate::args::prompt::read_stdin;
use crate::args::template::TemplateArgs;
use crate::engine::{Engine, Event, LoadOptions, Prompt, message};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::interrupt::Interrupt;
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
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt")]
    prompt: String,

    /// Feed the prompt as it is, without the chat template
    #[arg(long, visible_alias = "ignore-chat-template", help_heading = "Prompt")]
    raw: bool,

    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    adapter: AdapterArgs,

    /// A token that ends a reply, beside the model's own; kept with the cache
    #[arg(long, value_name = "TOKEN", help_heading = "Model")]
    eos_token: Option<String>,

    #[command(flatten)]
    template: TemplateArgs,
    #[command(flatten)]
    kv_cache: KvCacheArgs,
    #[command(flatten)]
    numerics: NumericsArgs,
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
    let interrupt = Interrupt::install()?;
    let mut warnings = Vec::new();
    let options = LoadOptions {
        model: args.model.resolve(true)?,
        adapter_path: args.adapter.adapter_path.clone(),
        extra_eos_tokens: args.eos_token.iter().cloned().collect(),
        template: args.template.resolve()?,
        kv_cache: args.kv_cache.resolve(&mut warnings)?,
        numerics: args.numerics.resolve(),
        prompt_cache_file: None,
        conversation: false,
    };
    if args.raw {
        args.template.warn_unused(&mut warnings);
    }
    let text = match args.prompt.as_str() {
        "" => return Err(Complaint::usage("the prompt is empty").into()),
        "-" => read_stdin(printer)?,
        text => text.to_owned(),
    };
    for warning in &warnings {
        printer.warning(warning);
    }
    check_writable(args)?;
    interrupt.begin();
    let mut engine = load(&options, printer)?;
    save(engine.as_mut(), &prompt(args, text), args, printer, &interrupt)
}

/// A folder that is not there is better known before an hour of work than after.
fn check_writable(args: &CachePromptArgs) -> Result<(), Complaint> {
    let file = &args.prompt_cache_file;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => Err(Complaint::failure(format!(
            "cannot write `{}`: there is no folder `{}`",
            file.display(),
            folder.display()
        ))),
        _ if file.is_dir() => {
            Err(Complaint::failure(format!("cannot write `{}`: it is a folder", file.display())))
        }
        _ => Ok(()),
    }
}

/// As mlx-lm: the user's message is left open, so that `generate` can go on with the question.
fn prompt(args: &CachePromptArgs, text: String) -> Prompt {
    if args.raw {
        return Prompt::Raw(text);
    }
    let system = args.template.system_prompt.clone().map(|system| message("system", system));
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
