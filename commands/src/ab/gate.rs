//! `--gate`: how much quality B may cost.

use std::fmt;

use serde::Serialize;

/// One condition.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "measure", content = "below", rename_all = "lowercase")]
pub enum Condition {
    /// KL(A || B) in nats a token is below this.
    Kl(f64),
    /// B's perplexity is above A's by less than this fraction.
    Ppl(f64),
    /// B says what A says.
    Same,
}

/// What was measured for the conditions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quality {
    /// KL(A || B), nats a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Perplexity of A.
    pub perplexity_a: f64,
    /// Perplexity of B.
    pub perplexity_b: f64,
    /// Tokens that were predicted.
    pub tokens: usize,
}

impl Quality {
    /// How much higher B's perplexity is, as a fraction.
    pub fn perplexity_change(&self) -> f64 {
        self.perplexity_b / self.perplexity_a - 1.0
    }
}

/// Reads `kl<0.01,ppl<1%,same`.
///
/// # Errors
/// What is wrong with which part.
pub fn parse(text: &str) -> Result<Vec<Condition>, String> {
    let condition = |part: &str| {
        let part = part.trim();
        if part == "same" {
            return Ok(Condition::Same);
        }
        let problem = || format!("`{part}` is no condition; write kl<0.01, ppl<1% or same");
        let (name, limit) = part.split_once('<').ok_or_else(problem)?;
        let is_share = name.trim() == "ppl";
        if is_share != limit.trim().ends_with('%') && matches!(name.trim(), "kl" | "ppl") {
            return Err(match is_share {
                true => format!("`{part}`: the limit must be a percentage, such as 1%"),
                false => format!("`{part}`: the limit must be in nats a token, such as 0.01"),
            });
        }
        let (digits, scale) = match limit.trim().strip_suffix('%') {
            Some(digits) => (digits, 0.01),
            None => (limit.trim(), 1.0),
        };
        let limit = digits.trim().parse::<f64>().ok().filter(|limit| limit.is_finite() && *limit > 0.0);
        let limit = limit.ok_or_else(|| format!("`{part}`: the limit must be a positive number"))? * scale;
        match name.trim() {
            "kl" => Ok(Condition::Kl(limit)),
            "ppl" => Ok(Condition::Ppl(limit)),
            _ => Err(problem()),
        }
    };
    text.split(',').map(condition).collect()
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kl(limit) => write!(f, "kl<{limit}"),
            Self::Ppl(limit) => write!(f, "ppl<{}%", limit * 100.0),
            Self::Same => f.write_str("same"),
        }
    }
}

impl Condition {
    /// Whether text has to be evaluated for it.
    pub fn needs_quality(&self) -> bool {
        *self != Self::Same
    }

    /// Whether it can be told.
    pub fn is_measured(&self, quality: Option<&Quality>) -> bool {
        quality.is_some() || !self.needs_quality()
    }

    /// Whether it holds; NaN never does.
    pub fn holds(&self, quality: Option<&Quality>, same: bool) -> bool {
        match *self {
            Self::Kl(limit) => quality.and_then(|quality| quality.kl).is_some_and(|kl| kl < limit),
            Self::Ppl(limit) => quality.is_some_and(|quality| quality.perplexity_change() < limit),
            Self::Same => same,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read() {
        assert_eq!(
            parse("kl<0.01, ppl < 1% ,same").unwrap(),
            [Condition::Kl(0.01), Condition::Ppl(0.01), Condition::Same]
        );
        assert_eq!(parse("ppl<0.5%").unwrap(), [Condition::Ppl(0.005)]);
        for bad in [
            "ppl<1",
            "kl<1%",
            "",
            "kl",
            "kl<",
            "kl<x",
            "kl<-1",
            "kl<nan",
            "mmlu<1%",
            "kl<0.1,,same",
            "kl>0.1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("kl<0").unwrap_err(), "`kl<0`: the limit must be a positive number");
    }

    #[test]
    fn conditions_hold_below_their_limits_and_never_for_nan() {
        let quality =
            |kl: f64, b: f64| Quality { kl: Some(kl), perplexity_a: 10.0, perplexity_b: b, tokens: 9 };
        let holds = |text: &str, quality: Quality| parse(text).unwrap()[0].holds(Some(&quality), false);
        assert!(holds("kl<0.01", quality(0.009, 10.0)) && !holds("kl<0.01", quality(0.011, 10.0)));
        assert!(holds("ppl<1%", quality(0.0, 10.09)) && !holds("ppl<1%", quality(0.0, 10.2)));
        assert!(holds("ppl<1%", quality(0.0, 9.0)));
        assert!(!holds("kl<0.01", quality(f64::NAN, 10.0)) && !holds("ppl<1%", quality(0.0, f64::NAN)));
        assert!(!parse("kl<1").unwrap()[0].holds(None, true));
        assert!(Condition::Same.holds(None, true) && !Condition::Same.holds(None, false));
    }
}
