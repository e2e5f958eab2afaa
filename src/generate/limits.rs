//! What of a model bounds requests: enough to check one on any thread, before MLX is asked for anything.

use super::step::{KvQuantization, StepError, StepOptions};
use super::stream::{StreamError, StreamOptions};
use crate::models::Model;
use crate::sampling::PenaltyParams;

/// A model's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Logits at a position; ids lie below.
    pub vocab_size: usize,
    /// Features a head, which a packed cache takes in groups.
    pub head_dim: i32,
    /// Positions the model was trained for, where the config says.
    pub context: Option<usize>,
}

impl Limits {
    /// A model's own.
    pub fn of(model: &dyn Model) -> Self {
        Self {
            vocab_size: usize::try_from(model.vocab_size()).unwrap_or(0),
            head_dim: model.head_dim(),
            context: model.max_positions().and_then(|context| usize::try_from(context).ok()),
        }
    }

    /// Refuses a prompt of more tokens than the model was trained for; nothing is ever cut off silently.
    ///
    /// # Errors
    /// [`StreamError::ContextLength`].
    pub fn check_context(&self, prompt: usize) -> Result<(), StreamError> {
        match self.context {
            Some(context) if prompt > context => Err(StreamError::ContextLength { prompt, context }),
            _ => Ok(()),
        }
    }

    /// Refuses a prompt that the model cannot read.
    ///
    /// # Errors
    /// It is empty, too long, or names unknown tokens.
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<(), StreamError> {
        self.check_ids(prompt)?;
        self.check_context(prompt.len())
    }

    fn check_ids(&self, prompt: &[u32]) -> Result<(), StepError> {
        if prompt.is_empty() {
            return Err(StepError::EmptyPrompt);
        }
        match prompt.iter().find(|&&id| !self.knows(id)) {
            Some(&id) => Err(StepError::UnknownToken { id, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }

    fn check_penalties(&self, penalties: &PenaltyParams) -> Result<(), StepError> {
        penalties.validate()?;
        match penalties.logit_bias.iter().find(|&&(id, _)| !self.knows(id)) {
            Some(&(id, _)) => Err(StepError::BiasedToken { id, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }

    /// Refuses a packed cache whose groups do not divide the model's heads.
    ///
    /// # Errors
    /// [`StepError::KvGroup`].
    pub fn check_kv(&self, quantization: Option<KvQuantization>) -> Result<(), StepError> {
        let Some(KvQuantization { group_size, .. }) = quantization else { return Ok(()) };
        let head_dim = self.head_dim;
        if group_size > 0 && i64::from(head_dim) % i64::from(group_size) == 0 {
            return Ok(());
        }
        let suggestion = match head_dim {
            dim if dim % 64 == 0 => "64",
            dim if dim % 32 == 0 => "32",
            _ => "none: leave the cache unquantized",
        };
        Err(StepError::KvGroup { group_size, head_dim, suggestion })
    }

    /// Whether there is such a token.
    pub fn knows(&self, id: u32) -> bool {
        usize::try_from(id).is_ok_and(|id| id < self.vocab_size)
    }
}

impl StepOptions {
    /// Checks a request for a continuation of `prompt`.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn validate(&self, prompt: &[u32], limits: &Limits) -> Result<(), StepError> {
        self.sampling.validate()?;
        limits.check_ids(prompt)?;
        limits.check_penalties(&self.penalties)?;
        if self.prefill_step_size == 0 {
            return Err(StepError::PrefillStep);
        }
        limits.check_kv(self.kv_quantization)
    }
}

impl StreamOptions {
    /// Checks what the token level does not, for a prompt of so many tokens, those already cached included.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn validate(&self, prompt: usize, limits: &Limits) -> Result<(), StreamError> {
        if self.step.max_tokens == Some(0) {
            return Err(StreamError::NoTokens);
        }
        limits.check_context(prompt)?;
        super::stop::StopMatcher::new(self.stop.iter().cloned())?;
        Ok(())
    }
}
