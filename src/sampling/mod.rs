//! From logits to a token: processors, then a sampler, in mlx-lm's order (`sample_utils.py`).
//!
//! A step is: logits of the last position; [`LogitsProcessors`] (bias, repetition, presence, frequency);
//! the [`mask`] of a grammar; `logits - logsumexp(logits)`; [`Sampler`] (top-p, min-p, XTC, top-k, then temperature and a draw; or the
//! HLG tone curve in place of all filters; or the arg-max at temperature 0). Order matters to results and is
//! the contract.

mod chain;
mod hlg;
pub mod mask;
mod min_p;
mod penalties;
mod top_k;
mod top_p;
mod xtc;

pub use chain::{Sampler, SamplingParams};
pub use hlg::{Hlg, HlgBase};
pub use min_p::MinP;
pub use penalties::{LogitsProcessors, Penalty, PenaltyParams};
pub use xtc::Xtc;

/// A parameter outside the range its definition allows.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{name}` must be {range}, but is {value}")]
pub struct RangeError {
    name: &'static str,
    range: &'static str,
    value: String,
}

/// Checks one parameter; the message quotes the range.
fn require(
    ok: bool,
    name: &'static str,
    range: &'static str,
    value: impl ToString,
) -> Result<(), RangeError> {
    if ok { Ok(()) } else { Err(RangeError { name, range, value: value.to_string() }) }
}
