//! How likely a model finds given continuations, several sequences at a time, and tasks that choose by it.
//!
//! Sequences of a batch are padded on the right, which causal attention never looks at, and only the positions that are
//! asked for become logits: a batch takes `tokens * hidden` floats, not `tokens * vocabulary`.

use std::ops::ControlFlow;

use mlx_bun::cache::make_prompt_cache;
use mlx_bun::mlx::cpu_ops;
use mlx_bun::mlx::{self, Array, Dtype};
use mlx_bun::models::Model;
use mlx_bun::models::layers::Head;
use serde_json::{Map, Value, json};

use crate::samples::{Sample, SampleError, SampleWriter};

/// Tokens of which the last ones are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scored {
    /// The whole sequence.
    pub tokens: Vec<u32>,
    /// Where the scored part begins, at least 1.
    pub from: usize,
}

/// A question with choices, as token sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Choices {
    /// What the task calls it.
    pub id: String,
    /// A part of the task that is scored for itself.
    pub group: Option<String>,
    /// One a choice.
    pub sequences: Vec<Scored>,
    /// Characters of each choice, for the normalised score.
    pub lengths: Vec<usize>,
    /// The right one.
    pub answer: usize,
}

/// Why choices cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum LikelihoodError {
    /// MLX failed.
    #[error(transparent)]
    Mlx(#[from] mlx::Error),
    /// The samples cannot be kept.
    #[error(transparent)]
    Samples(#[from] SampleError),
    /// The tokenizer and the model do not fit.
    #[error(
        "question {id} has token {token}, but the model's embedding has {rows} rows; they do not belong together"
    )]
    UnknownToken {
        /// Which question.
        id: String,
        /// The token.
        token: u32,
        /// Rows of the embedding.
        rows: usize,
    },
}

/// The log-probability of each scored token, in nats, for each sequence.
///
/// # Errors
/// When MLX fails.
pub fn log_probabilities(model: &dyn Model, batch: &[&Scored]) -> mlx::Result<Vec<Vec<f32>>> {
    let longest = batch.iter().map(|scored| scored.tokens.len()).max().unwrap_or(0);
    // The last token is only predicted.
    let width = longest.saturating_sub(1);
    if batch.is_empty() || width == 0 {
        return Ok(batch.iter().map(|_| Vec::new()).collect());
    }
    let mut ids = Vec::with_capacity(batch.len() * width);
    let (mut positions, mut targets): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
    for (row, scored) in batch.iter().enumerate() {
        let fed = scored.tokens.len().saturating_sub(1);
        ids.extend(scored.tokens.iter().take(fed));
        ids.extend(std::iter::repeat_n(0u32, width - fed));
        for at in scored.from.max(1)..scored.tokens.len() {
            positions.push((row * width + at - 1) as u32);
            targets.extend(scored.tokens.get(at));
        }
    }
    let inputs = Array::from_slice(&ids, &[batch.len() as i32, width as i32])?;
    let count = positions.len() as i32;
    if count == 0 {
        return Ok(batch.iter().map(|_| Vec::new()).collect());
    }
    let logits = logits_at(model, &inputs, &Array::from_slice(&positions, &[count])?)?;
    let targets = Array::from_slice(&targets, &[count, 1])?;
    // As cross-entropy: the largest logit is taken off first, so that nothing overflows.
    let logits = logits.subtract(&logits.max(-1, true)?)?;
    let chosen = logits.take_along_axis(&targets, -1)?.squeeze(-1)?;
    let values: Vec<f32> = chosen.subtract(&logits.logsumexp(-1, false)?)?.to_vec()?;
    mlx::memory::clear_cache()?;
    let mut values = values.into_iter();
    let scored = |scored: &&Scored| {
        values.by_ref().take(scored.tokens.len().saturating_sub(scored.from.max(1))).collect()
    };
    Ok(batch.iter().map(scored).collect())
}

/// Logits `[N, vocab]` in float32 at flat `positions` of inputs `[B, L]`.
fn logits_at(model: &dyn Model, inputs: &Array, positions: &Array) -> mlx::Result<Array> {
    // Our kernels run fused where a model has caches.
    let mut caches = cpu_ops::enabled().then(|| make_prompt_cache(model.layer_kinds(), None));
    let rows = |array: Array| {
        let width = array.shape().last().copied().unwrap_or(0);
        array.reshape(&[-1, width])?.take(positions, 0)
    };
    let logits = match model.pieces() {
        Some(pieces) => {
            // The final norm is behind `hidden` already.
            let hidden = rows(model.hidden(inputs, caches.as_deref_mut())?)?;
            match &pieces.head {
                Head::Tied => pieces.embed_tokens.as_linear(&hidden)?,
                Head::Linear(head) => head.forward(&hidden)?,
            }
        }
        None => rows(model.forward(inputs, caches.as_deref_mut())?)?,
    };
    logits.astype(Dtype::Float32)
}

/// The index of the largest value; the first of several.
fn largest(values: &[f64]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if values.get(best).is_none_or(|most| value > most) {
            best = index;
        }
    }
    best
}

/// Scores every question that is not in `samples` yet, about `batch` sequences at a time. `on_done` hears each sample and
/// says whether to go on; returns whether all are scored.
///
/// A line's `answer` is the choice of the largest log-probability, `detail` has the log-probabilities, and
/// `correct_norm`: whether the largest one a character is the right one.
///
/// # Errors
/// What [`LikelihoodError`] says. A question that is longer than the model's context counts as wrong.
pub fn run(
    model: &dyn Model,
    questions: &[Choices],
    batch: usize,
    samples: &mut SampleWriter,
    on_done: &mut dyn FnMut(&Sample) -> ControlFlow<()>,
) -> Result<bool, LikelihoodError> {
    let context = model.max_positions().and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let rows = usize::try_from(model.vocab_size()).unwrap_or(0);
    let mut left: Vec<usize> = (0..questions.len()).filter(|index| !samples.has(*index)).collect();
    let longest = |index: &usize| questions.get(*index).map_or(0, Choices::longest);
    // Padding is work for nothing: the like go together.
    left.sort_by_key(|index| (longest(index), *index));
    let mut next = left.into_iter().peekable();
    while next.peek().is_some() {
        let (mut group, mut sequences) = (Vec::new(), 0);
        while let Some(question) = next.peek().and_then(|index| questions.get(*index)) {
            if !group.is_empty() && sequences + question.sequences.len() > batch.max(1) {
                break;
            }
            sequences += question.sequences.len();
            group.extend(next.next().map(|index| (index, question)));
        }
        for (_, question) in &group {
            let tokens = question.sequences.iter().flat_map(|sequence| &sequence.tokens);
            if let Some(token) = tokens.copied().find(|token| *token as usize >= rows) {
                return Err(LikelihoodError::UnknownToken { id: question.id.clone(), token, rows });
            }
        }
        let fits = |question: &Choices| question.longest() <= context;
        let fitting: Vec<&Scored> =
            group.iter().filter(|(_, question)| fits(question)).flat_map(|(_, q)| &q.sequences).collect();
        let mut scored = Vec::new();
        for part in fitting.chunks(batch.max(1)) {
            scored.extend(log_probabilities(model, part)?);
        }
        let mut scored = scored.into_iter();
        for (index, question) in group {
            let sample = if fits(question) {
                let sums = scored.by_ref().take(question.sequences.len());
                question.sample(index, &sums.map(sum).collect::<Vec<_>>())
            } else {
                question.refused(index, context)
            };
            samples.add(&sample)?;
            if on_done(&sample).is_break() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn sum(values: Vec<f32>) -> f64 {
    values.into_iter().map(f64::from).sum()
}

impl Choices {
    fn longest(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).max().unwrap_or(0)
    }

    fn sample(&self, index: usize, sums: &[f64]) -> Sample {
        let lengths = self.lengths.iter().map(|length| (*length).max(1) as f64);
        let normalised: Vec<f64> = sums.iter().zip(lengths).map(|(sum, length)| sum / length).collect();
        let (choice, choice_norm) = (largest(sums), largest(&normalised));
        // A NaN is never the largest, so a broken model must not pass as one that answers A.
        let sound = sums.iter().all(|sum| sum.is_finite());
        let mut detail = Map::new();
        detail.insert("expected".to_owned(), json!(self.answer));
        detail.insert("log_probabilities".to_owned(), json!(sums));
        detail.insert("answer_norm".to_owned(), json!(choice_norm));
        detail.insert("correct_norm".to_owned(), json!(sound && choice_norm == self.answer));
        Sample {
            index,
            id: self.id.clone(),
            group: self.group.clone(),
            correct: sound && choice == self.answer,
            answer: json!(choice),
            output: String::new(),
            prompt_tokens: self.sequences.iter().map(|sequence| sequence.from).max().unwrap_or(0),
            generated_tokens: 0,
            finish: if sound { "scored" } else { "not finite" }.to_owned(),
            detail,
        }
    }

    fn refused(&self, index: usize, context: usize) -> Sample {
        let reason =
            format!("the question has {} tokens, but the model's context is {context}", self.longest());
        Sample {
            index,
            id: self.id.clone(),
            group: self.group.clone(),
            correct: false,
            answer: Value::Null,
            output: String::new(),
            prompt_tokens: self.longest(),
            generated_tokens: 0,
            finish: "refused".to_owned(),
            detail: Map::from_iter([
                ("error".to_owned(), Value::from(reason)),
                ("correct_norm".to_owned(), Value::Bool(false)),
            ]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(answer: usize) -> Choices {
        let sequences = vec![Scored { tokens: vec![1, 2], from: 1 }; 2];
        Choices { id: "q".to_owned(), group: None, sequences, lengths: vec![1, 10], answer }
    }

    #[test]
    fn the_first_of_equals_is_chosen() {
        assert_eq!(largest(&[1.0, 2.0, 2.0]), 1);
        assert_eq!(largest(&[f64::NAN, 1.0]), 0);
        assert_eq!(largest(&[]), 0);
    }

    #[test]
    fn long_choices_are_not_punished_by_the_normalised_score() {
        let sample = question(1).sample(0, &[-2.0, -5.0]);
        assert!(!sample.correct);
        assert_eq!(sample.detail["correct_norm"], true);
    }

    #[test]
    fn e4_a_model_that_gives_no_numbers_is_not_right_by_accident() {
        let sample = question(0).sample(0, &[f64::NAN, f64::NAN]);
        assert!(!sample.correct && sample.finish == "not finite");
        assert_eq!(sample.detail["correct_norm"], false);
    }
}
