//! When a generation ends.

use super::range;
use crate::error::Complaint;

/// `--max-tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimit(pub Option<usize>);

impl TokenLimit {
    /// From a number; -1 is no limit.
    ///
    /// # Errors
    /// What it should have been.
    pub fn from_number(number: i64) -> Result<Self, String> {
        if number == -1 {
            return Ok(Self(None));
        }
        let limit = usize::try_from(number).ok().and_then(|limit| range::MAX_TOKENS.check(limit).ok());
        limit.map(|limit| Self(Some(limit))).ok_or_else(Self::expected)
    }

    fn expected() -> String {
        "must be in [1, 10000000], or -1 for no limit".to_owned()
    }
}

impl std::str::FromStr for TokenLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::from_number(text.parse().map_err(|_| Self::expected())?)
    }
}

/// Stop conditions beside the token limit.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Stopping")]
pub struct StopArgs {
    /// Stop before this text; can be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,

    /// Stop at these tokens too; each must be one token of the model
    #[arg(long, value_name = "TOKEN", num_args = 1.., hide_short_help = true)]
    pub extra_eos_token: Vec<String>,
}

impl StopArgs {
    /// # Errors
    /// An empty stop text would end every reply before it begins.
    pub fn check(&self) -> Result<(), Complaint> {
        let empty = [("--stop", &self.stop), ("--extra-eos-token", &self.extra_eos_token)];
        match empty.iter().find(|(_, texts)| texts.iter().any(String::is_empty)) {
            Some((flag, _)) => Err(Complaint::usage(format!("`{flag}` is empty"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_limits() {
        assert_eq!("100".parse(), Ok(TokenLimit(Some(100))));
        assert_eq!("-1".parse(), Ok(TokenLimit(None)));
        for wrong in ["0", "-2", "10000001", "ten", "1.5", "99999999999999999999"] {
            assert!(wrong.parse::<TokenLimit>().is_err(), "{wrong}");
        }
    }
}
