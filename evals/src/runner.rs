//! Asks the engine a task's questions, many at a time, and judges the replies as they come.
//!
//! Decoding is greedy, so with kernels whose rows do not depend on each other the replies are the same whatever
//! [`RunSettings::in_flight`] is. The engine's prompt cache is not used, for the same reason.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use mlx_bun::generate::stream::{FinishReason, StreamError};
use mlx_bun::scheduler::{
    Engine, GenerationError, GenerationEvent, GenerationRequest, GenerationSink, SubmitError,
};
use serde_json::{Map, Value};

use crate::prompt::{Prompt, PromptError, Prompter};
use crate::samples::{Sample, SampleError, SampleWriter};

/// How often an interrupt is looked for while the engine works.
const GLANCE: Duration = Duration::from_millis(50);

/// One question of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What the task calls it.
    pub id: String,
    /// What is asked.
    pub prompt: Prompt,
    /// A part of the task that is scored for itself, too.
    pub group: Option<String>,
}

/// What came of a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Whether the reply counts as right.
    pub correct: bool,
    /// What was read out of the reply; null if nothing was.
    pub answer: Value,
    /// More about it, for the line of the sample.
    pub detail: Map<String, Value>,
}

/// A task whose questions are answered with text.
pub trait Task {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// Its questions.
    fn questions(&self) -> &[Question];
    /// Judges the reply to question `index`. May take seconds where code is run.
    fn judge(&self, index: usize, reply: &str) -> Verdict;
}

/// How a task is run.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// Most tokens of a reply.
    pub max_tokens: usize,
    /// Questions that are with the engine at once, some of them waiting.
    pub in_flight: usize,
    /// Mounted adapters.
    pub adapters: Vec<String>,
}

/// Why a run ends before its time.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A question cannot be put.
    #[error("question {id}: {cause}")]
    Prompt {
        /// Which.
        id: String,
        /// Why.
        cause: PromptError,
    },
    /// The engine takes no questions.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The engine failed.
    #[error("question {id}: {cause}")]
    Generation {
        /// Which.
        id: String,
        /// Why.
        cause: Box<GenerationError>,
    },
    /// The samples cannot be kept.
    #[error(transparent)]
    Samples(#[from] SampleError),
    /// The engine has gone without a word.
    #[error("the engine has failed")]
    Dead,
}

/// A reply, complete.
struct Answered {
    index: usize,
    text: String,
    prompt_tokens: usize,
    generated_tokens: usize,
    end: Result<FinishReason, GenerationError>,
}

/// Gathers one reply.
struct Gather {
    index: usize,
    text: String,
    prompt_tokens: usize,
    gone: Arc<AtomicBool>,
    answers: Sender<Answered>,
}

impl GenerationSink for Gather {
    fn send(&mut self, event: GenerationEvent) {
        let (generated_tokens, end) = match event {
            GenerationEvent::Prefill { .. } => return,
            GenerationEvent::Chunk(chunk) => return self.text.push_str(&chunk.text),
            GenerationEvent::Finished(summary) => {
                (summary.stats.generation_tokens, Ok(summary.finish_reason))
            }
            GenerationEvent::Failed(error) => (0, Err(error)),
        };
        let text = std::mem::take(&mut self.text);
        let (index, prompt_tokens) = (self.index, self.prompt_tokens);
        // Nobody listens once the run has ended.
        let _ = self.answers.send(Answered { index, text, prompt_tokens, generated_tokens, end });
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// Asks every question that is not in `samples` yet; each answer is judged, written, and reported to `on_done`. Returns
/// whether all are answered: `stop` is asked often and ends the run early.
///
/// # Errors
/// What [`RunError`] says. A question that is longer than the model's context is no error but a wrong answer, with the
/// reason in its line.
pub fn run(
    engine: &Engine,
    prompter: &Prompter,
    task: &dyn Task,
    settings: &RunSettings,
    samples: &mut SampleWriter,
    stop: &dyn Fn() -> bool,
    on_done: &mut dyn FnMut(&Sample),
) -> Result<bool, RunError> {
    let gone = Arc::new(AtomicBool::new(false));
    let (answers, inbox) = mpsc::channel();
    let mut waiting =
        task.questions().iter().enumerate().filter(|(index, _)| !samples.has(*index)).collect::<Vec<_>>();
    waiting.reverse();
    let ask = Ask { engine, prompter, settings, gone: &gone, answers: &answers };
    let mut flying = 0usize;
    loop {
        while flying < settings.in_flight.max(1)
            && let Some((index, question)) = waiting.pop()
        {
            match ask.put(index, question)? {
                None => flying += 1,
                Some(refusal) => {
                    let sample = refused(index, question, refusal);
                    samples.add(&sample)?;
                    on_done(&sample);
                }
            }
        }
        if flying == 0 {
            return Ok(true);
        }
        if stop() {
            gone.store(true, Ordering::Relaxed);
            return Ok(false);
        }
        let answered = match inbox.recv_timeout(GLANCE) {
            Ok(answered) => answered,
            Err(RecvTimeoutError::Timeout) if engine.is_alive() => continue,
            Err(_) => return Err(RunError::Dead),
        };
        flying -= 1;
        let Some(question) = task.questions().get(answered.index) else { continue };
        let finish = match answered.end {
            Ok(FinishReason::Cancelled) => return Ok(false),
            Ok(finish) => finish.name(),
            Err(cause) => {
                gone.store(true, Ordering::Relaxed);
                return Err(RunError::Generation { id: question.id.clone(), cause: Box::new(cause) });
            }
        };
        let verdict = task.judge(answered.index, &answered.text);
        let sample = Sample {
            index: answered.index,
            id: question.id.clone(),
            group: question.group.clone(),
            correct: verdict.correct,
            answer: verdict.answer,
            output: answered.text,
            prompt_tokens: answered.prompt_tokens,
            generated_tokens: answered.generated_tokens,
            finish: finish.to_owned(),
            detail: verdict.detail,
        };
        samples.add(&sample)?;
        on_done(&sample);
    }
}

/// What it takes to put a question.
struct Ask<'a> {
    engine: &'a Engine,
    prompter: &'a Prompter,
    settings: &'a RunSettings,
    gone: &'a Arc<AtomicBool>,
    answers: &'a Sender<Answered>,
}

impl Ask<'_> {
    /// Submits a question; a reason if it is too long for the model.
    fn put(&self, index: usize, question: &Question) -> Result<Option<(usize, String)>, RunError> {
        let prompt = self
            .prompter
            .encode(&question.prompt)
            .map_err(|cause| RunError::Prompt { id: question.id.clone(), cause })?;
        let prompt_tokens = prompt.len();
        let mut request = GenerationRequest {
            prompt,
            adapters: self.settings.adapters.clone(),
            prompt_cache: false,
            ..GenerationRequest::default()
        };
        request.options.step.max_tokens = Some(self.settings.max_tokens);
        let sink = Gather {
            index,
            text: String::new(),
            prompt_tokens,
            gone: Arc::clone(self.gone),
            answers: self.answers.clone(),
        };
        match self.engine.submit(request, Box::new(sink)) {
            Ok(_) => Ok(None),
            Err(
                error @ (SubmitError::Invalid(StreamError::ContextLength { .. })
                | SubmitError::OverKvBudget { .. }
                | SubmitError::OverMemoryBudget { .. }),
            ) => Ok(Some((prompt_tokens, error.to_string()))),
            Err(error) => Err(error.into()),
        }
    }
}

/// The line of a question that the model cannot be asked.
fn refused(index: usize, question: &Question, (prompt_tokens, reason): (usize, String)) -> Sample {
    Sample {
        index,
        id: question.id.clone(),
        group: question.group.clone(),
        correct: false,
        answer: Value::Null,
        output: String::new(),
        prompt_tokens,
        generated_tokens: 0,
        finish: "refused".to_owned(),
        detail: Map::from_iter([("error".to_owned(), Value::from(reason))]),
    }
}

/// The samples of each group, in the groups' order of names.
pub fn by_group(samples: &[Sample]) -> BTreeMap<&str, Vec<&Sample>> {
    let mut groups: BTreeMap<&str, Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        if let Some(group) = &sample.group {
            groups.entry(group).or_default().push(sample);
        }
    }
    groups
}
