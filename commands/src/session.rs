//! The engine behind the verbs: one loaded model and, between the turns of a conversation, its cache.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use mlx_bun::cache::{LayerCache, can_trim, make_prompt_cache};
use mlx_bun::generate::prompt_cache;
use mlx_bun::generate::step::{PREFILL_STEP_SIZE, StepError, StepOptions, TokenGenerator};
use mlx_bun::generate::stream::{self, Chunk, StreamError, StreamOptions, TextGenerator};
use mlx_bun::load::LoadedModel;
use mlx_bun::mlx::{cpu_ops, memory};
use mlx_bun::sampling::SamplingParams;
use mlx_bun::structured::grammar::{Constraint, Grammar, GrammarCompiler, GrammarError, Limits, Reasoning};
use mlx_bun::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::args::kv_cache::KvCache;
use crate::args::prompt::{check_length, empty_prompt};
use crate::engine::{
    Engine, Event, FinishReason, LoadOptions, Prompt, Request, SavedCache, Sink, Stats, Summary,
    TokenLogprobs,
};
use crate::error::Complaint;
use crate::prompt::Renderer;

/// Key of the model argument in a prompt cache file's metadata (mlx_lm.cache_prompt).
pub const CACHE_MODEL: &str = "model";
/// Key of the tokenizer's settings, a JSON object, in that metadata.
pub const CACHE_TOKENIZER: &str = "tokenizer_config";
/// Key of `--eos-token` in that object.
pub const CACHE_EOS_TOKEN: &str = "eos_token";

/// Prompt tokens fed at a time with our CPU kernels.
const CPU_PREFILL_STEP_SIZE: usize = 512;

/// Tokens a model has been fed and what it kept of them.
struct Conversation {
    fed: Vec<u32>,
    /// How many of them were the prompt.
    prompt: usize,
    caches: Vec<LayerCache>,
}

/// A value that only the loaded model can refuse is wrong usage, as one that is refused before.
fn refusal(error: StreamError) -> anyhow::Error {
    match &error {
        StreamError::Step(
            StepError::Range(_)
            | StepError::KvGroup { .. }
            | StepError::BiasedToken { .. }
            | StepError::PrefillStep
            | StepError::NanPenalties,
        )
        | StreamError::Stop(_)
        | StreamError::NoTokens => Complaint::usage(error.to_string()).into(),
        _ => error.into(),
    }
}

/// Prompt tokens fed at a time. A CPU gains nothing from long chunks, and nobody can stop it inside one.
pub fn prefill_step_size(kv_cache: &KvCache, cpu_kernels: bool) -> usize {
    let usual = if cpu_kernels { CPU_PREFILL_STEP_SIZE } else { PREFILL_STEP_SIZE };
    kv_cache.prefill_step_size.unwrap_or(usual)
}

/// What may come before a constrained reply to `prompt`: reasoning where the model's template asks for it, never
/// after a raw prompt, nor where the reply continues a message.
pub fn reasoning_before(tokenizer: &Tokenizer, prompt: &[u32], begins: bool) -> Reasoning {
    match tokenizer.thinking() {
        Some(thinking) if thinking.is_open(prompt) => Reasoning::Open,
        Some(_) if begins => Reasoning::Optional,
        _ => Reasoning::None,
    }
}

/// Names the tokens that XTC never drops, as mlx-lm does.
pub fn protect_special_tokens(sampling: &mut SamplingParams, tokenizer: &Tokenizer) {
    if let Some(xtc) = &mut sampling.xtc {
        xtc.special_tokens = tokenizer.encode("\n", false).unwrap_or_default();
        xtc.special_tokens.extend(tokenizer.eos_token_ids());
    }
}

/// A loaded model that answers requests one after another.
pub struct Session {
    loaded: LoadedModel,
    renderer: Renderer,
    options: LoadOptions,
    /// What the model argument was, for the metadata of saved caches.
    model_name: String,
    /// The cache of the prompt cache file, which every request continues.
    prefix: Option<Vec<LayerCache>>,
    last: Option<Conversation>,
    /// Made for the first request with a constraint.
    grammars: OnceCell<GrammarCompiler>,
}

impl Session {
    /// A session over a loaded model.
    pub fn new(
        loaded: LoadedModel,
        renderer: Renderer,
        options: LoadOptions,
        model_name: String,
        prefix: Option<Vec<LayerCache>>,
    ) -> Self {
        Self { loaded, renderer, options, model_name, prefix, last: None, grammars: OnceCell::new() }
    }

    fn prefill_step_size(&self) -> usize {
        prefill_step_size(&self.options.kv_cache, cpu_ops::enabled())
    }

    fn fresh_caches(&self) -> Vec<LayerCache> {
        let model = &self.loaded.model;
        // mlx-lm ignores the limit for families that make their own caches; --l1 does what mlx-lm does.
        let ignored = self.options.numerics.l1 && model.makes_own_cache();
        let max_size = if ignored { None } else { self.options.kv_cache.max_size };
        make_prompt_cache(model.layer_kinds(), max_size)
    }

    fn prompt_ids(&self, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        let tokenizer = &self.loaded.tokenizer;
        check_length(prompt.text_bytes())?;
        let ids = match prompt {
            // A sequence begins once.
            Prompt::Raw(text) if self.prefix.is_some() => tokenizer.encode(text, false)?,
            Prompt::Raw(text) => tokenizer.encode_prompt(text)?,
            Prompt::Chat { messages, continue_last, variables } => {
                let text = match &self.prefix {
                    None => self.renderer.render(messages, &[], *continue_last, variables)?,
                    Some(_) => self.renderer.render_suffix(messages, *continue_last, variables)?,
                };
                tokenizer.encode(&text, false)?
            }
        };
        match (ids.is_empty(), prompt) {
            (false, _) => Ok(ids),
            (true, Prompt::Raw(_)) => Err(empty_prompt().into()),
            (true, Prompt::Chat { .. }) => {
                Err(Complaint::failure("the chat template renders nothing of these messages")
                    .hint("name another with `--chat-template`, or give the prompt as it is with `--raw`")
                    .into())
            }
        }
    }

    /// The caches to continue and how many tokens of the prompt they hold. The last conversation is continued by
    /// a prompt that begins with the whole of the last one, as the next turn of a chat does; other prompts start
    /// anew, so that a reply does not depend on what was asked before.
    fn start(&mut self, prompt: &[u32]) -> (Vec<LayerCache>, usize) {
        if let Some(prefix) = &self.prefix {
            return (prefix.clone(), 0);
        }
        if let Some(mut last) = self.last.take() {
            let common =
                last.fed.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
            let excess = last.fed.len() - common;
            if common >= last.prompt && (excess == 0 || can_trim(&last.caches)) {
                for cache in &mut last.caches {
                    cache.trim(excess as i32);
                }
                return (last.caches, common);
            }
        }
        (self.fresh_caches(), 0)
    }

    fn grammar(
        &self,
        constraint: &Constraint,
        prompt: &Prompt,
        ids: &[u32],
    ) -> Result<Grammar, GrammarError> {
        let tokenizer = &self.loaded.tokenizer;
        let grammars = match self.grammars.get() {
            Some(grammars) => grammars,
            None => {
                let grammars = GrammarCompiler::new(tokenizer, Limits::default())?;
                self.grammars.get_or_init(|| grammars)
            }
        };
        let begins = matches!(prompt, Prompt::Chat { continue_last: false, .. });
        grammars.compile(constraint, reasoning_before(tokenizer, ids, begins))
    }

    fn stream_options(&self, request: &Request, grammar: Option<Grammar>) -> StreamOptions {
        let mut sampling = request.sampling.clone();
        protect_special_tokens(&mut sampling, &self.loaded.tokenizer);
        StreamOptions {
            step: StepOptions {
                max_tokens: request.max_tokens,
                sampling,
                penalties: request.penalties.clone(),
                seed: request.seed,
                prefill_step_size: self.prefill_step_size(),
                kv_quantization: self.options.kv_cache.quantization,
                grammar,
            },
            stop: request.stop.clone(),
            eos_token_ids: None,
            logprobs: request.logprobs,
        }
    }

    /// Drives one reply; the caches hold `fed` tokens of it afterwards.
    fn reply(
        &self,
        caches: &mut Vec<LayerCache>,
        prompt: &[u32],
        request: &Request,
        grammar: Option<Grammar>,
        sink: Sink,
    ) -> anyhow::Result<(stream::FinishReason, stream::Stats, Vec<u32>)> {
        let options = self.stream_options(request, grammar);
        let LoadedModel { model, tokenizer, .. } = &self.loaded;
        let mut reply = TextGenerator::new(&**model, tokenizer, caches, prompt, &options).map_err(refusal)?;
        let mut failure = None;
        reply.prefill(&mut |done, total| {
            sink(Event::Prefill { done, total }).unwrap_or_else(|error| {
                failure = Some(error);
                ControlFlow::Break(())
            })
        })?;
        if let Some(error) = failure {
            return Err(error);
        }
        let mut tokens = Vec::new();
        while let Some(Chunk { text, token, logprobs }) = reply.next()? {
            let mut events = Vec::new();
            if let Some(id) = token {
                tokens.push(id);
                let logprobs = logprobs.map(|logprobs| TokenLogprobs::new(tokenizer, id, logprobs));
                events.push(Event::Token { id, logprobs });
            }
            if !text.is_empty() {
                events.push(Event::Text(text));
            }
            for event in events {
                if sink(event)?.is_break() {
                    reply.cancel();
                }
            }
        }
        let reason = reply.finish_reason().unwrap_or(stream::FinishReason::Cancelled);
        Ok((reason, reply.stats(), tokens))
    }
}

impl Engine for Session {
    fn generate(&mut self, request: &Request, sink: Sink) -> anyhow::Result<Summary> {
        let prompt = self.prompt_ids(&request.prompt)?;
        let constraint = request.constraint.as_ref();
        let grammar =
            constraint.map(|constraint| self.grammar(constraint, &request.prompt, &prompt)).transpose()?;
        let (mut caches, cached) = self.start(&prompt);
        let (reason, stats, tokens) = self.reply(&mut caches, &prompt[cached..], request, grammar, sink)?;
        let cached_tokens = if self.prefix.is_some() { self.prefix_length() } else { cached };
        // A step is always in flight: the cache may hold one token more than was returned, an end-of-sequence
        // token say, which nobody needs to remember.
        let prompt_length = prompt.len();
        let mut fed: Vec<u32> = prompt.into_iter().chain(tokens).collect();
        let held = caches.first().map_or(0, |cache| cache.offset().max(0) as usize);
        if held > fed.len() && can_trim(&caches) {
            let excess = (held - fed.len()) as i32;
            caches.iter_mut().for_each(|cache| {
                cache.trim(excess);
            });
        }
        let held = caches.first().map_or(0, |cache| cache.offset().max(0) as usize);
        self.last = (self.options.conversation && self.prefix.is_none() && held <= fed.len()).then(|| {
            fed.truncate(held);
            Conversation { fed, prompt: prompt_length, caches }
        });
        Ok(Summary {
            finish_reason: match reason {
                stream::FinishReason::Stop => FinishReason::Stop,
                stream::FinishReason::Length => FinishReason::Length,
                stream::FinishReason::Cancelled => FinishReason::Interrupted,
            },
            stats: Stats {
                prompt_tokens: stats.prompt_tokens + cached_tokens,
                cached_tokens,
                prompt_tps: stats.prompt_tps(),
                generation_tokens: stats.generation_tokens,
                generation_tps: stats.generation_tps(),
                time_to_first_token: stats.prompt_time.as_secs_f64(),
                peak_memory_gb: stats.peak_memory as f64 / 1e9,
            },
        })
    }

    fn save_prompt_cache(
        &mut self,
        prompt: &Prompt,
        file: &Path,
        sink: Sink,
    ) -> anyhow::Result<Option<SavedCache>> {
        let ids = self.prompt_ids(prompt)?;
        stream::check_context(&*self.loaded.model, ids.len())?;
        let mut caches = self.fresh_caches();
        let options = StepOptions {
            max_tokens: Some(1),
            prefill_step_size: self.prefill_step_size(),
            kv_quantization: self.options.kv_cache.quantization,
            ..StepOptions::default()
        };
        let mut failure = None;
        let mut generator = TokenGenerator::new(&*self.loaded.model, &mut caches, &ids, &options)
            .map_err(|e| refusal(e.into()))?;
        let flow = generator.prefill(&mut |done, total| {
            sink(Event::Prefill { done, total }).unwrap_or_else(|error| {
                failure = Some(error);
                ControlFlow::Break(())
            })
        })?;
        drop(generator);
        if let Some(error) = failure {
            return Err(error);
        }
        if flow.is_break() {
            return Ok(None);
        }
        let mut tokenizer_config = Map::new();
        if let Some(token) = self.options.extra_eos_tokens.first() {
            tokenizer_config.insert(CACHE_EOS_TOKEN.to_owned(), Value::from(token.as_str()));
        }
        let metadata = BTreeMap::from([
            (CACHE_MODEL.to_owned(), self.model_name.clone()),
            (CACHE_TOKENIZER.to_owned(), Value::Object(tokenizer_config).to_string()),
        ]);
        prompt_cache::save(file, &caches, &metadata)?;
        Ok(Some(SavedCache { tokens: ids.len(), peak_memory_gb: memory::peak()? as f64 / 1e9 }))
    }
}

impl Session {
    fn prefix_length(&self) -> usize {
        let first = self.prefix.as_ref().and_then(|caches| caches.first());
        first.map_or(0, |cache| cache.offset().max(0) as usize)
    }
}
