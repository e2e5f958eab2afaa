//! Compiles constraints within bounds and keeps what was compiled.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv};

use super::vocabulary::Vocabulary;
use super::{Constraint, GrammarError, Matcher, Reasoning};
use crate::tokenizer::Tokenizer;

/// Stack of the thread that compiles: schemas may refer to themselves in long chains.
const STACK_BYTES: usize = 32 << 20;

/// What a grammar may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a constraint.
    pub bytes: usize,
    /// Brackets, or schemas, within each other.
    pub nesting: usize,
    /// Time to compile one.
    pub compile_time: Duration,
    /// Compiled grammars that are kept.
    pub cached: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 256 << 10, nesting: 64, compile_time: Duration::from_secs(10), cached: 32 }
    }
}

impl Limits {
    /// Refuses text with too many open brackets: parsers of nested text use the stack.
    pub(super) fn check_nesting(&self, text: &str) -> Result<(), GrammarError> {
        let mut depth = 0usize;
        for byte in text.bytes() {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > self.nesting {
                return Err(GrammarError::TooDeep { limit: self.nesting });
            }
        }
        Ok(())
    }
}

/// A compiled constraint; cloning shares it.
#[derive(Clone)]
pub struct Grammar {
    fresh: Arc<Mutex<llguidance::Matcher>>,
}

impl Grammar {
    /// A matcher at the beginning, for a model whose output has `vocab_size` rows.
    pub fn matcher(&self, vocab_size: usize) -> Matcher {
        Matcher::new(lock(&self.fresh).deep_clone(), vocab_size)
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

/// Compiles constraints for one tokenizer. Shared between threads.
pub struct GrammarCompiler {
    tokenizer: Tokenizer,
    factory: Arc<ParserFactory>,
    limits: Limits,
    /// Most recently used last.
    cache: Mutex<Vec<(u64, Constraint, Reasoning, Grammar)>>,
}

impl GrammarCompiler {
    /// Prepares a tokenizer's vocabulary. Worth keeping: some tens of milliseconds for 150 000 tokens.
    ///
    /// # Errors
    /// The tokenizer has no end-of-sequence token, or tokens without text of their own.
    pub fn new(tokenizer: &Tokenizer, limits: Limits) -> Result<Self, GrammarError> {
        let vocabulary: TokEnv = Arc::new(Vocabulary::new(tokenizer)?);
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&vocabulary, capabilities, &slices).map_err(GrammarError::invalid)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        let (factory, cache) = (Arc::new(factory), Mutex::new(Vec::new()));
        Ok(Self { tokenizer: tokenizer.clone(), factory, limits, cache })
    }

    /// Compiles a constraint, or finds it among those compiled before.
    ///
    /// # Errors
    /// The constraint is no grammar, cannot be enforced whole, or is too much work.
    pub fn compile(&self, constraint: &Constraint, reasoning: Reasoning) -> Result<Grammar, GrammarError> {
        self.compile_holding(constraint, reasoning, ())
    }

    /// As [`compile`](Self::compile), and `held` is dropped when the work has really ended, which after
    /// [`GrammarError::Timeout`] may be much later: with a place among a few to hold, works that nobody waits for any
    /// more cannot pile up.
    ///
    /// # Errors
    /// As for [`compile`](Self::compile).
    pub fn compile_holding(
        &self,
        constraint: &Constraint,
        reasoning: Reasoning,
        held: impl Send + 'static,
    ) -> Result<Grammar, GrammarError> {
        if let Some(grammar) = self.find(constraint, reasoning)? {
            return Ok(grammar);
        }
        let grammars = constraint.to_grammars(&self.tokenizer, reasoning, &self.limits)?;
        let grammar = self.build(grammars, held)?;
        let hash = hash(constraint, reasoning);
        let mut cache = lock(&self.cache);
        while cache.len() >= self.limits.cached.max(1) {
            cache.remove(0);
        }
        cache.push((hash, constraint.clone(), reasoning, grammar.clone()));
        Ok(grammar)
    }

    /// What was compiled before.
    ///
    /// # Errors
    /// The constraint is larger than any that is compiled.
    pub fn find(
        &self,
        constraint: &Constraint,
        reasoning: Reasoning,
    ) -> Result<Option<Grammar>, GrammarError> {
        let size = constraint.size();
        if size > self.limits.bytes {
            return Err(GrammarError::TooLarge { size, limit: self.limits.bytes });
        }
        let hash = hash(constraint, reasoning);
        let mut cache = lock(&self.cache);
        // Hashes may collide, constraints do not.
        let found =
            cache.iter().position(|entry| (entry.0, &entry.1, entry.2) == (hash, constraint, reasoning));
        let Some(found) = found else { return Ok(None) };
        let entry = cache.remove(found);
        let grammar = entry.3.clone();
        cache.push(entry);
        Ok(Some(grammar))
    }

    /// Compiles on a thread of its own, which is left behind when the time is up; its work is bounded too, so it
    /// ends by itself.
    fn build(&self, grammars: TopLevelGrammar, held: impl Send + 'static) -> Result<Grammar, GrammarError> {
        let (send, receive) = mpsc::channel();
        let factory = Arc::clone(&self.factory);
        let compile = move || {
            // Whatever goes wrong inside, a panic included, is an error here.
            let compiled = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut matcher = llguidance::Matcher::new(factory.create_parser(grammars));
                if let Some(error) = matcher.get_error() {
                    return Err(llguidance_error(error));
                }
                // The first mask shows grammars that nothing satisfies.
                matcher.compute_mask_or_eos()?;
                Ok(matcher)
            }));
            // Nobody listens any more once the time is up.
            let _ = send.send(compiled.map_err(|error| error.to_string()));
            drop(held);
        };
        std::thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(compile)
            .map_err(GrammarError::invalid)?;
        match receive.recv_timeout(self.limits.compile_time) {
            Ok(Ok(matcher)) => Ok(Grammar { fresh: Arc::new(Mutex::new(matcher)) }),
            Ok(Err(error)) => Err(explain(&error)),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(GrammarError::Timeout(self.limits.compile_time)),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(GrammarError::Invalid("compiling it failed".to_owned()))
            }
        }
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("limits", &self.limits).finish_non_exhaustive()
    }
}

fn llguidance_error<E: From<std::io::Error>>(message: String) -> E {
    E::from(std::io::Error::other(message))
}

/// llguidance's message in our users' terms.
fn explain(message: &str) -> GrammarError {
    if message.contains("oneOf constraints are not supported") {
        return GrammarError::Keyword {
            keyword: "oneOf".to_owned(),
            at: "#".to_owned(),
            reason: "its options overlap; use `anyOf`, or make them differ in a required `const`",
        };
    }
    GrammarError::invalid(message)
}

fn hash(constraint: &Constraint, reasoning: Reasoning) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{constraint:?}").hash(&mut hasher);
    reasoning.hash(&mut hasher);
    hasher.finish()
}

/// What the locks guard is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
