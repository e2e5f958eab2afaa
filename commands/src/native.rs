//! The engine behind the verbs: one loaded model, its tokenizer, and the cache of the last conversation.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use mlx_bun::cache::{LayerCache, can_trim, make_prompt_cache};
use mlx_bun::generate::prompt_cache;
use mlx_bun::generate::step::{StepOptions, TokenGenerator};
use mlx_bun::generate::stream::{self, StreamOptions, TextGenerator};
use mlx_bun::mlx::memory;
use mlx_bun::models::Model;
use mlx_bun::sampling::{PenaltyParams, SamplingParams};
use mlx_bun::tokenizer::Tokenizer;

use crate::args::kv_cache::KvCache;
use crate::engine::{
    Candidate, Engine, Event, FinishReason, Prompt, Request, SavedCache, Sink, Stats, Summary, TokenLogprobs,
};
use crate::prompt_text::PromptText;

/// Bytes to the unit that statistics use.
const GB: f64 = 1e9;

/// A model that verbs can use.
pub struct Native {
    /// The network.
    pub model: Box<dyn Model>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// How prompts become text.
    pub prompt_text: PromptText,
    /// How caches are kept.
    pub kv_cache: KvCache,
    /// What a saved prompt cache remembers.
    pub metadata: BTreeMap<String, String>,
    /// A saved cache that every request continues.
    pub saved: Option<Vec<LayerCache>>,
    /// What the last request left behind; only [`Engine::generate`] touches it.
    pub session: Session,
}

/// Whether and what requests share.
pub enum Session {
    /// Each request computes its whole prompt, so that its bits never depend on what came before.
    Separate,
    /// Requests are turns of one conversation: caches and the tokens they hold.
    Conversation(Vec<LayerCache>, Vec<u32>),
}

impl Native {
    /// Caches to continue, how many tokens they hold, and the tokens still to be fed. Takes the session's.
    fn start(&mut self, ids: &[u32]) -> (Vec<LayerCache>, usize) {
        if let Some(saved) = &self.saved {
            return (saved.clone(), 0);
        }
        if let Session::Conversation(caches, tokens) = &mut self.session {
            let (mut caches, tokens) = (std::mem::take(caches), std::mem::take(tokens));
            // The last token is always computed: its logits are what the reply begins with.
            let shared = ids.iter().zip(&tokens).take_while(|(a, b)| a == b).count().min(ids.len() - 1);
            if shared > 0 && trim(&mut caches, tokens.len() - shared) {
                return (caches, shared);
            }
        }
        (make_prompt_cache(self.model.layer_kinds(), self.kv_cache.max_size), 0)
    }

    /// Keeps the caches for the next turn. `known` are the tokens they hold, as far as they are known: one that
    /// ended the reply was fed too, but nobody saw it.
    fn keep(&mut self, mut caches: Vec<LayerCache>, mut known: Vec<u32>) {
        let Session::Conversation(kept, tokens) = &mut self.session else { return };
        let fed = caches.first().map_or(0, |cache| usize::try_from(cache.offset()).unwrap_or(0));
        known.truncate(fed);
        if trim(&mut caches, fed - known.len()) {
            (*kept, *tokens) = (caches, known);
        }
    }

    fn step_options(&self, sampling: SamplingParams, penalties: PenaltyParams) -> StepOptions {
        StepOptions {
            max_tokens: Some(0),
            sampling,
            penalties,
            seed: None,
            prefill_step_size: self.kv_cache.prefill_step_size,
            kv_quantization: self.kv_cache.quantization,
        }
    }

    /// The engine's options. XTC never removes line ends and end-of-sequence tokens (mlx-lm's `generate`).
    fn options(&self, request: &Request) -> Result<StreamOptions> {
        let mut sampling = request.sampling.clone();
        if let Some(xtc) = &mut sampling.xtc {
            xtc.special_tokens = self.tokenizer.encode("\n", true)?;
            xtc.special_tokens.extend(self.tokenizer.eos_token_ids());
        }
        Ok(StreamOptions {
            step: StepOptions {
                max_tokens: request.max_tokens,
                seed: request.seed,
                ..self.step_options(sampling, request.penalties.clone())
            },
            stop: request.stop.clone(),
            eos_token_ids: None,
            logprobs: request.logprobs,
        })
    }

    fn ids(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let ids = self.prompt_text.encode(prompt, &self.tokenizer, self.saved.is_some())?;
        if ids.is_empty() {
            bail!("the prompt is empty: it gives no tokens");
        }
        Ok(ids)
    }
}

/// Takes back the last `count` positions; false when the caches cannot.
fn trim(caches: &mut [LayerCache], count: usize) -> bool {
    let Ok(positions) = i32::try_from(count) else { return false };
    if count == 0 {
        return true;
    }
    can_trim(caches) && caches.iter_mut().all(|cache| cache.trim(positions) == positions)
}

impl Engine for Native {
    fn generate(&mut self, request: &Request, sink: Sink) -> Result<Summary> {
        let mut known = self.ids(&request.prompt)?;
        let options = self.options(request)?;
        let (mut caches, shared) = self.start(&known);
        let cached = caches.first().map_or(0, |cache| usize::try_from(cache.offset()).unwrap_or(0));
        let outcome = {
            let mut generator = TextGenerator::new(
                self.model.as_ref(),
                &self.tokenizer,
                &mut caches,
                &known[shared..],
                &options,
            )?;
            let mut generated = Vec::new();
            let outcome = drive(&mut generator, &self.tokenizer, sink, &mut generated);
            known.extend(generated);
            outcome.map(|()| (generator.finish_reason(), generator.stats()))
        };
        self.keep(caches, known);
        let (finish_reason, stats) = outcome?;
        Ok(Summary {
            finish_reason: match finish_reason {
                Some(stream::FinishReason::Length) => FinishReason::Length,
                Some(stream::FinishReason::Cancelled) => FinishReason::Interrupted,
                Some(stream::FinishReason::Stop) | None => FinishReason::Stop,
            },
            stats: Stats {
                prompt_tokens: stats.prompt_tokens,
                cached_tokens: cached,
                prompt_tps: stats.prompt_tps(),
                generation_tokens: stats.generation_tokens,
                generation_tps: stats.generation_tps(),
                time_to_first_token: stats.prompt_time.as_secs_f64(),
                peak_memory_gb: stats.peak_memory as f64 / GB,
            },
        })
    }

    fn save_prompt_cache(&mut self, prompt: &Prompt, file: &Path, sink: Sink) -> Result<Option<SavedCache>> {
        let ids = self.ids(prompt)?;
        let mut caches = make_prompt_cache(self.model.layer_kinds(), self.kv_cache.max_size);
        let options = self.step_options(SamplingParams::default(), PenaltyParams::default());
        let mut generator = TokenGenerator::new(self.model.as_ref(), &mut caches, &ids, &options)?;
        let mut failure = None;
        let outcome = generator.prefill(&mut |done, total| report(sink, &mut failure, done, total))?;
        drop(generator);
        if let Some(failure) = failure {
            return Err(failure);
        }
        if outcome.is_break() {
            return Ok(None);
        }
        prompt_cache::save(file, &caches, &self.metadata)?;
        Ok(Some(SavedCache { tokens: ids.len(), peak_memory_gb: memory::peak()? as f64 / GB }))
    }
}

/// Tells the sink how far the prompt is; keeps its error, since the engine only understands "stop".
fn report(sink: Sink, failure: &mut Option<anyhow::Error>, done: usize, total: usize) -> ControlFlow<()> {
    sink(Event::Prefill { done, total }).unwrap_or_else(|error| {
        *failure = Some(error);
        ControlFlow::Break(())
    })
}

/// Runs a generation to its end, handing everything to the sink and collecting the tokens.
fn drive(
    generator: &mut TextGenerator,
    tokenizer: &Tokenizer,
    sink: Sink,
    generated: &mut Vec<u32>,
) -> Result<()> {
    let mut failure = None;
    generator.prefill(&mut |done, total| report(sink, &mut failure, done, total))?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    while let Some(chunk) = generator.next()? {
        if let Some(id) = chunk.token {
            generated.push(id);
            let logprobs = chunk.logprobs.map(|of_token| TokenLogprobs {
                id,
                logprob: of_token.logprob,
                top_logprobs: of_token
                    .top
                    .iter()
                    .map(|&(id, logprob)| candidate(tokenizer, id, logprob))
                    .collect(),
            });
            if sink(Event::Token { id, logprobs })?.is_break() {
                generator.cancel();
            }
        }
        if !chunk.text.is_empty() && sink(Event::Text(chunk.text))?.is_break() {
            generator.cancel();
        }
    }
    Ok(())
}

fn candidate(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Candidate {
    Candidate { id, token: tokenizer.id_to_token(id).unwrap_or_default(), logprob }
}

/// Reads a saved cache and checks that it is one of this model and of the packing asked for.
///
/// # Errors
/// The file, or what it holds.
pub fn check_saved(caches: &[LayerCache], file: &Path, layers: usize, kv_cache: &KvCache) -> Result<()> {
    prompt_cache::check(caches, layers).with_context(|| file.display().to_string())?;
    let (Some(asked), Some(LayerCache::Quantized(packed))) = (kv_cache.quantization, caches.first()) else {
        return Ok(());
    };
    let found = packed.scheme();
    if (found.bits, found.group_size) != (asked.bits, asked.group_size) {
        bail!(
            "{}: the cache is packed to {} bits in groups of {}, not to {} in groups of {}; leave out `--kv-bits` \
             and `--kv-quant`, or make it anew",
            file.display(),
            found.bits,
            found.group_size,
            asked.bits,
            asked.group_size
        );
    }
    Ok(())
}
