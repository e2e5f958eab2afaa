//! A fake engine for the tests of verbs: it says what it is told to.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;

use mlx_bun::sampling::{PenaltyParams, SamplingParams};

use crate::engine::{
    Candidate, Engine, Event, FinishReason, Prompt, Request, SavedCache, Sink, Stats, Summary, TokenLogprobs,
};
use crate::interrupt::Interrupt;

/// Replies in the order given, each a list of segments; the last one is repeated.
pub struct Scripted {
    replies: VecDeque<Vec<String>>,
    interrupted_after: Option<(usize, Interrupt)>,
    failure: Option<anyhow::Error>,
    /// What it was asked.
    pub requests: Vec<Request>,
    /// Where it was told to save caches.
    pub saved: Vec<(Prompt, std::path::PathBuf)>,
}

impl Scripted {
    /// Says these segments, whatever it is asked.
    pub fn saying(segments: &[&str]) -> Self {
        Self::replying(&[segments])
    }

    /// Says one reply after the other.
    pub fn replying(replies: &[&[&str]]) -> Self {
        let owned = |segments: &&[&str]| segments.iter().map(|segment| (*segment).to_owned()).collect();
        Self {
            replies: replies.iter().map(owned).collect(),
            interrupted_after: None,
            failure: None,
            requests: Vec::new(),
            saved: Vec::new(),
        }
    }

    /// Ctrl-C arrives with the segment of this number, once.
    pub fn interrupted_after(mut self, segments: usize, interrupt: Interrupt) -> Self {
        self.interrupted_after = Some((segments, interrupt));
        self
    }

    /// Fails after its segments, once.
    pub fn failing(self, message: &str) -> Self {
        self.failing_with(anyhow::anyhow!(message.to_owned()))
    }

    /// Fails after its segments with this error, once.
    pub fn failing_with(mut self, error: anyhow::Error) -> Self {
        self.failure = Some(error);
        self
    }
}

impl Engine for Scripted {
    fn generate(&mut self, request: &Request, sink: Sink) -> anyhow::Result<Summary> {
        self.requests.push(request.clone());
        let segments = match self.replies.len() {
            0 | 1 => self.replies.front().cloned().unwrap_or_default(),
            _ => self.replies.pop_front().unwrap_or_default(),
        };
        let mut summary = Summary {
            finish_reason: FinishReason::Stop,
            stats: Stats {
                prompt_tokens: 7,
                cached_tokens: 0,
                prompt_tps: 70.0,
                generation_tokens: segments.len(),
                generation_tps: 12.3456,
                time_to_first_token: 0.1,
                peak_memory_gb: 0.25,
            },
        };
        if let Some((0, interrupt)) = &self.interrupted_after {
            interrupt.set();
        }
        if sink(Event::Prefill { done: 7, total: 7 })?.is_break() {
            summary.finish_reason = FinishReason::Interrupted;
            return Ok(summary);
        }
        for (index, segment) in segments.iter().enumerate() {
            let id = index as u32;
            let chosen =
                Candidate { id, token: segment.clone(), bytes: segment.clone().into_bytes(), logprob: -0.5 };
            let logprobs =
                request.logprobs.map(|_| TokenLogprobs { top_logprobs: vec![chosen.clone()], chosen });
            let _ = sink(Event::Token { id, logprobs })?;
            if let Some((at, interrupt)) = &self.interrupted_after
                && *at == index + 1
            {
                interrupt.set();
                self.interrupted_after = None;
            }
            if sink(Event::Text(segment.clone()))?.is_break() {
                summary.finish_reason = FinishReason::Interrupted;
                return Ok(summary);
            }
        }
        match self.failure.take() {
            Some(error) => Err(error),
            None => Ok(summary),
        }
    }

    fn save_prompt_cache(
        &mut self,
        prompt: &Prompt,
        file: &Path,
        sink: Sink,
    ) -> anyhow::Result<Option<SavedCache>> {
        if let ControlFlow::Break(()) = sink(Event::Prefill { done: 7, total: 7 })? {
            return Ok(None);
        }
        self.saved.push((prompt.clone(), file.to_owned()));
        Ok(Some(SavedCache { tokens: 7, peak_memory_gb: 0.25 }))
    }
}

/// A request with nothing but a prompt.
pub fn request(prompt: &str) -> Request {
    Request {
        prompt: Prompt::Raw(prompt.to_owned()),
        max_tokens: None,
        sampling: SamplingParams::default(),
        penalties: PenaltyParams::default(),
        seed: None,
        stop: Vec::new(),
        logprobs: None,
        constraint: None,
    }
}
