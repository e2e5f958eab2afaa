//! Texts that wait to be embedded, computed one at a time between the steps of requests.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::command::Over;
use super::request::{EmbedError, SubmitError};
use crate::generate::hidden::last_hidden;
use crate::lora::AdapterSet;
use crate::models::Model;

/// Vectors, one an input.
pub(super) type Embedded = Result<Vec<Vec<f32>>, EmbedError>;

/// Where they go.
pub(super) type EmbedReply = Box<dyn FnOnce(Embedded) + Send>;

/// Tells a caller, whose code it is that runs here.
pub(super) fn answer(reply: EmbedReply, embedded: Embedded) {
    let _ = catch_unwind(AssertUnwindSafe(|| reply(embedded)));
}

/// One call's texts, of which some are embedded.
struct Call {
    inputs: VecDeque<Vec<u32>>,
    done: Vec<Vec<f32>>,
    reply: EmbedReply,
}

/// Calls in the order in which they came.
#[derive(Default)]
pub(super) struct Embeddings {
    calls: VecDeque<Call>,
}

impl Embeddings {
    pub(super) fn push(&mut self, inputs: Vec<Vec<u32>>, reply: EmbedReply) {
        self.calls.push_back(Call { inputs: inputs.into(), done: Vec::new(), reply });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Embeds the next text. Returns how many a call that is done with had.
    pub(super) fn step(&mut self, model: &dyn Model) -> Option<usize> {
        let call = self.calls.front_mut()?;
        let mut failed = None;
        if let Some(input) = call.inputs.pop_front() {
            model.adapters().activate(&AdapterSet::default());
            match last_hidden(model, &input) {
                Ok(hidden) => call.done.push(hidden),
                Err(error) => failed = Some(error),
            }
        }
        if failed.is_none() && !call.inputs.is_empty() {
            return None;
        }
        let Call { done, reply, .. } = self.calls.pop_front()?;
        let count = done.len();
        answer(reply, failed.map_or(Ok(done), |error| Err(error.into())));
        Some(count)
    }

    /// Tells everybody that it is over. Returns how many calls there were.
    pub(super) fn abandon(&mut self, over: Over) -> usize {
        let calls = std::mem::take(&mut self.calls);
        let count = calls.len();
        for Call { reply, .. } in calls {
            answer(reply, Err(SubmitError::from(over).into()));
        }
        count
    }
}
