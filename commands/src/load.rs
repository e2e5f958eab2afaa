//! From a model argument to an engine.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use mlx_bun::cache::LayerCache;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::checkpoint::gguf;
use mlx_bun::checkpoint::source::{ModelSource, resolve_model};
use mlx_bun::checkpoint::{Checkpoint, Config, Quantization, TensorSource};
use mlx_bun::generate::prompt_cache;
use mlx_bun::mlx::{self, Dtype};
use mlx_bun::models::{self, Model};
use mlx_bun::tokenizer::{Tokenizer, TokenizerParts};
use serde_json::{Map, Value, json};

use crate::args::template::Template;
use crate::engine::{Engine, LoadOptions, Message};
use crate::error::Complaint;
use crate::native::{Native, Session, check_saved};
use crate::printer::Printer;
use crate::prompt_text::{PromptText, Render};

/// Loads a model whose requests have nothing to do with each other.
///
/// # Errors
/// There is no such model, it cannot be used, or the prompt cache file is not one of it.
pub fn separate(options: &LoadOptions, printer: &Printer) -> Result<Box<dyn Engine>> {
    load(options, Session::Separate, printer)
}

/// Loads a model for a conversation: what turns share is computed once.
///
/// # Errors
/// As [`separate`].
pub fn conversation(options: &LoadOptions, printer: &Printer) -> Result<Box<dyn Engine>> {
    load(options, Session::Conversation(Vec::new(), Vec::new()), printer)
}

fn load(options: &LoadOptions, session: Session, printer: &Printer) -> Result<Box<dyn Engine>> {
    let saved = options.prompt_cache_file.as_deref().map(open_saved).transpose()?;
    let (mut name, mut extra_eos_tokens) = (options.model.clone(), options.extra_eos_tokens.clone());
    if let Some(saved) = &saved {
        name = Some(saved.model_of(options.model.as_deref())?);
        extra_eos_tokens.extend(saved.eos_token.clone());
    }
    let resolved = resolve_model(name.as_deref(), &Environment::of_process())?;
    let path = resolved.source.path();
    printer.detail(&format!("Model: {}", path.display()));
    let spinner = printer.spinner(format!("Loading {}", path.display()));
    mlx::set_compile(options.numerics.compiled_activations);
    let (model, mut tokenizer) = open(&resolved.source)?;
    drop(spinner);
    for token in &extra_eos_tokens {
        tokenizer.add_eos_token(token)?;
    }
    if let (Some(saved), Some(file)) = (&saved, &options.prompt_cache_file) {
        check_saved(&saved.caches, file, model.layer_kinds().len(), &options.kv_cache)?;
    }
    let metadata = metadata(name.unwrap_or_else(|| path.display().to_string()), &options.extra_eos_tokens);
    Ok(Box::new(Native {
        model,
        prompt_text: PromptText {
            template: chat_template(&options.template, &tokenizer, &resolved.source),
            variables: options.template.variables.clone(),
        },
        tokenizer,
        kv_cache: options.kv_cache.clone(),
        metadata,
        saved: saved.map(|saved| saved.caches),
        session,
    }))
}

fn open(source: &ModelSource) -> Result<(Box<dyn Model>, Tokenizer)> {
    match source {
        ModelSource::Snapshot(directory) => {
            let mut checkpoint = Checkpoint::open(directory)?;
            let mut tokenizer = Tokenizer::from_dir(directory)?;
            tokenizer.extend_eos_token_ids(checkpoint.eos_token_ids.iter().copied());
            let tensors = checkpoint.take_tensors();
            Ok((models::load(&checkpoint.config, tensors, None)?, tokenizer))
        }
        ModelSource::Gguf(file) => {
            let gguf = gguf::load(file)?;
            let label = file.display().to_string();
            let config = Config::from_value(Value::Object(gguf.config), label.clone())?;
            let quantization = Quantization::from_config(&config, None)?;
            let tensors = TensorSource::new(gguf.tensors, quantization, label.clone(), label);
            let mut tokenizer = Tokenizer::from_parts(TokenizerParts {
                tokenizer_json: gguf.tokenizer_json,
                config: gguf.tokenizer_config,
                special_tokens_map: None,
            })?;
            tokenizer.extend_eos_token_ids(gguf.eos_token_ids);
            Ok((models::load(&config, tensors, Some(Dtype::Float32))?, tokenizer))
        }
    }
}

/// The chat template to use: the flag's, the model's, or ChatML when asked for.
fn chat_template(flags: &Template, tokenizer: &Tokenizer, source: &ModelSource) -> Option<Box<dyn Render>> {
    let ships_one = tokenizer.config().get("chat_template").is_some_and(|template| !template.is_null())
        || ["chat_template.jinja", "chat_template.json"].iter().any(|name| source.path().join(name).exists());
    let wanted = flags.source.is_some() || ships_one || flags.default_to_chatml;
    wanted.then(|| -> Box<dyn Render> { Box::new(Unsupported) })
}

/// A template that this build cannot render: never a silent fallback.
struct Unsupported;

impl Render for Unsupported {
    fn render(&self, _: &[Message], _: bool, _: &Map<String, Value>) -> Result<String> {
        Err(Complaint::failure("this build cannot render chat templates")
            .hint("feed the prompt as it is with `--raw`")
            .into())
    }
}

/// A prompt cache file, and what `cache-prompt` wrote beside the caches.
struct Saved {
    file: String,
    caches: Vec<LayerCache>,
    model: Option<String>,
    eos_token: Option<String>,
}

fn open_saved(file: &Path) -> Result<Saved> {
    let name = file.display().to_string();
    let (caches, metadata) = prompt_cache::load(file)?;
    let tokenizer_config: Map<String, Value> = match metadata.get("tokenizer_config") {
        Some(text) => serde_json::from_str(text)
            .with_context(|| format!("{name}: its tokenizer_config is not a JSON object"))?,
        None => Map::new(),
    };
    let eos_token = tokenizer_config.get("eos_token").and_then(Value::as_str).map(str::to_owned);
    Ok(Saved { file: name, caches, model: metadata.get("model").cloned(), eos_token })
}

impl Saved {
    /// The model the cache was made with; another one would answer nonsense (mlx-lm's `generate`).
    fn model_of(&self, asked: Option<&str>) -> Result<String> {
        match (&self.model, asked) {
            (Some(own), Some(asked)) if own != asked => bail!(
                "{} was made with the model `{own}`, not `{asked}`; leave out `--model`, or make it anew",
                self.file
            ),
            (Some(own), _) => Ok(own.clone()),
            (None, Some(asked)) => Ok(asked.to_owned()),
            (None, None) => {
                bail!("{} does not say which model it was made with; name it with `--model`", self.file)
            }
        }
    }
}

/// mlx-lm's keys.
fn metadata(model: String, eos_tokens: &[String]) -> BTreeMap<String, String> {
    let mut tokenizer_config = json!({"trust_remote_code": false});
    if let Some(token) = eos_tokens.first() {
        tokenizer_config["eos_token"] = Value::from(token.as_str());
    }
    BTreeMap::from([
        ("model".to_owned(), model),
        ("tokenizer_config".to_owned(), tokenizer_config.to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_cache_names_its_model_and_refuses_another() {
        let saved = |model: Option<&str>| Saved {
            file: "f".to_owned(),
            caches: Vec::new(),
            model: model.map(str::to_owned),
            eos_token: None,
        };
        assert_eq!(saved(Some("m")).model_of(None).unwrap(), "m");
        assert_eq!(saved(Some("m")).model_of(Some("m")).unwrap(), "m");
        assert_eq!(saved(None).model_of(Some("m")).unwrap(), "m");
        assert!(saved(Some("m")).model_of(Some("n")).is_err());
        assert!(saved(None).model_of(None).is_err());
    }

    #[test]
    fn metadata_is_mlx_lms() {
        let metadata = metadata("m".to_owned(), &["</s>".to_owned()]);
        assert_eq!(metadata["model"], "m");
        assert_eq!(metadata["tokenizer_config"], r#"{"trust_remote_code":false,"eos_token":"</s>"}"#);
    }
}
