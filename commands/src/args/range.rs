//! The ranges of numeric options: what is accepted, and what `--help` says of it.

use std::fmt::Display;
use std::str::FromStr;

/// Inclusive bounds.
#[derive(Clone, Copy, Debug)]
pub struct Range<T> {
    low: T,
    high: T,
    /// Whether 0 counts too: it turns the option off.
    or_zero: bool,
}

/// A number type an option can have.
pub trait Number: Copy + Default + PartialOrd + Display + FromStr + Send + Sync + 'static {
    /// What a text that does not parse should have been.
    const KIND: &'static str;
}

impl Number for f64 {
    const KIND: &'static str = "a number";
}
impl Number for f32 {
    const KIND: &'static str = "a number";
}
impl Number for i32 {
    const KIND: &'static str = "a whole number";
}
impl Number for u64 {
    const KIND: &'static str = "a whole number";
}
impl Number for usize {
    const KIND: &'static str = "a whole number";
}

impl<T: Number> Range<T> {
    const fn new(low: T, high: T) -> Self {
        Self { low, high, or_zero: false }
    }

    const fn or_zero(self) -> Self {
        Self { or_zero: true, ..self }
    }

    fn shown(self) -> String {
        let zero = if self.or_zero { "0 or " } else { "" };
        format!("{zero}in [{}, {}]", self.low, self.high)
    }

    /// The value, if it lies inside.
    ///
    /// # Errors
    /// What it should have been: ``must be in [0, 5]``.
    pub fn check(self, value: T) -> Result<T, String> {
        if value >= self.low && value <= self.high || self.or_zero && value == T::default() {
            Ok(value)
        } else {
            Err(format!("must be {}", self.shown()))
        }
    }

    /// A flag's help, with the range at its end.
    pub fn help(self, text: &str) -> String {
        let zero = if self.or_zero { "0, or " } else { "" };
        format!("{text} [range: {zero}{} to {}]", self.low, self.high)
    }

    /// What something that is no such number should have been.
    pub fn expected(self) -> String {
        format!("must be {} {}", T::KIND, self.shown())
    }

    /// For clap.
    pub fn parser(self) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
        move |text| self.check(text.parse().map_err(|_| self.expected())?)
    }
}

/// `--temp`.
pub const TEMPERATURE: Range<f64> = Range::new(0.0, 5.0);
/// `--top-p`.
pub const TOP_P: Range<f64> = Range::new(0.0, 1.0);
/// `--top-k`.
pub const TOP_K: Range<i32> = Range::new(0, 1_000_000);
/// `--min-p`.
pub const MIN_P: Range<f64> = Range::new(0.0, 1.0);
/// `--min-tokens-to-keep`.
pub const MIN_TOKENS_TO_KEEP: Range<i32> = Range::new(1, 1_000_000);
/// `--xtc-probability`.
pub const XTC_PROBABILITY: Range<f32> = Range::new(0.0, 1.0);
/// `--xtc-threshold`.
pub const XTC_THRESHOLD: Range<f32> = Range::new(0.0, 0.5);
/// `--repetition-penalty`.
///
/// A hundredth of what it allows above 1: with much less, logits become infinite and probabilities no numbers.
pub const REPETITION_PENALTY: Range<f32> = Range::new(0.01, 100.0).or_zero();
/// `--presence-penalty` and `--frequency-penalty`.
pub const ADDITIVE_PENALTY: Range<f32> = Range::new(-100.0, 100.0);
/// The windows of the penalties.
pub const CONTEXT_SIZE: Range<i32> = Range::new(0, 10_000_000);
/// A value of `--logit-bias`.
pub const LOGIT_BIAS: Range<f32> = Range::new(-1000.0, 1000.0);
/// The `--hlg-*` numbers, in nats.
pub const HLG: Range<f32> = Range::new(0.0, 100.0);
/// `--seed`.
pub const SEED: Range<u64> = Range::new(0, u64::MAX);
/// `--max-tokens`, when it is a limit.
pub const MAX_TOKENS: Range<usize> = Range::new(1, 10_000_000);
/// `--top-logprobs`.
pub const TOP_LOGPROBS: Range<usize> = Range::new(0, 11);
/// The same in a request, where OpenAI's clients ask for up to 20.
pub const WIRE_TOP_LOGPROBS: Range<i32> = Range::new(-1, 20);
/// Replies to one request.
pub const CHOICES: Range<usize> = Range::new(1, 16);
/// `--batch`.
pub const BATCH: Range<usize> = Range::new(1, 256);
/// Numbers of an embedding.
pub const DIMENSIONS: Range<usize> = Range::new(1, 1_000_000);
/// `--shutdown-timeout`, in seconds.
pub const SHUTDOWN_TIMEOUT: Range<u64> = Range::new(0, 86_400);
/// `--prefill-step-size`.
pub const PREFILL_STEP_SIZE: Range<usize> = Range::new(1, 1_000_000);
/// Threads of the CPU kernels.
pub const THREADS: Range<usize> = Range::new(1, 64);
/// `--max-kv-size`: the 4 positions that always stay, and at least one that moves.
pub const MAX_KV_SIZE: Range<i32> = Range::new(5, 1_000_000_000);
/// `--quantized-kv-start`.
pub const QUANTIZED_KV_START: Range<i32> = Range::new(0, 1_000_000_000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_belong_to_the_range_and_nan_does_not() {
        assert_eq!(TEMPERATURE.check(0.0), Ok(0.0));
        assert_eq!(TEMPERATURE.check(5.0), Ok(5.0));
        assert_eq!(TEMPERATURE.check(5.01), Err("must be in [0, 5]".to_owned()));
        assert!(TEMPERATURE.check(f64::NAN).is_err());
    }

    #[test]
    fn penalties_that_make_nan_are_outside() {
        for value in [0.0, 0.01, 1.3, 100.0] {
            assert_eq!(REPETITION_PENALTY.check(value), Ok(value));
        }
        for value in [1e-38, 0.0099, 101.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(
                REPETITION_PENALTY.check(value),
                Err("must be 0 or in [0.01, 100]".to_owned()),
                "{value}"
            );
        }
        assert!(ADDITIVE_PENALTY.check(1e38).is_err() && LOGIT_BIAS.check(-1e38).is_err());
    }

    #[test]
    fn help_ends_with_the_range() {
        assert_eq!(XTC_THRESHOLD.help("Probability"), "Probability [range: 0 to 0.5]");
    }

    #[test]
    fn texts_that_are_no_numbers_are_told_what_to_be() {
        let parse = TOP_K.parser();
        assert_eq!(parse("40"), Ok(40));
        assert_eq!(parse("1.5"), Err("must be a whole number in [0, 1000000]".to_owned()));
        assert_eq!(parse("99999999999"), Err("must be a whole number in [0, 1000000]".to_owned()));
        assert_eq!(parse("-1"), Err("must be in [0, 1000000]".to_owned()));
    }
}
