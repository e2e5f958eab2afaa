//! How one reply is made and when it ends: the flags that `generate` and `chat` share, and that a line of a prompt
//! file may set for itself.

use super::sampling::{PenaltyArgs, SamplingArgs};
use super::{Truth, Warnings, range};
use crate::engine::{Prompt, Request};
use crate::error::Complaint;
use crate::printer::{Printer, Verbosity};

/// `--max-tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimit(pub Option<usize>);

impl std::str::FromStr for TokenLimit {
    type Err = String;

    /// -1 is no limit.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-1" {
            return Ok(Self(None));
        }
        let limit = range::MAX_TOKENS.parser()(text);
        limit.map(|limit| Self(Some(limit))).map_err(|expected| format!("{expected}, or -1 for no limit"))
    }
}

/// Flags of a reply.
#[derive(Clone, Debug, clap::Args)]
pub struct ReplyArgs {
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub penalties: PenaltyArgs,

    /// Stop before this text; can be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Stopping")]
    pub stop: Vec<String>,

    /// Most tokens of a reply; -1 for no limit [default: 100, in chat 256] [range: 1 to 10000000]
    #[arg(short, long, value_name = "N", help_heading = "Stopping")]
    pub max_tokens: Option<TokenLimit>,
}

impl ReplyArgs {
    /// The request for `prompt`, without log-probabilities; `usual` tokens unless a flag says otherwise.
    ///
    /// # Errors
    /// An empty stop text would end every reply before it begins.
    pub fn request(
        &self,
        prompt: Prompt,
        usual: usize,
        warnings: &mut Warnings,
    ) -> Result<Request, Complaint> {
        if self.stop.iter().any(String::is_empty) {
            return Err(Complaint::usage("`--stop` is empty"));
        }
        Ok(Request {
            prompt,
            max_tokens: self.max_tokens.unwrap_or(TokenLimit(Some(usual))).0,
            sampling: self.sampling.resolve(warnings),
            penalties: self.penalties.resolve(),
            seed: self.sampling.seed,
            stop: self.stop.clone(),
            logprobs: None,
            constraint: None,
        })
    }
}

/// What `generate` and `chat` share beside that.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TalkArgs {
    /// Stop at these tokens too; each must be one token of the model
    #[arg(long, value_name = "TOKEN", num_args = 1.., hide_short_help = true, help_heading = "Stopping")]
    extra_eos_token: Vec<String>,

    /// `false`: only the reply, as --quiet; mlx-lm's spelling
    #[arg(long, value_name = "true|false", value_enum, hide_short_help = true, help_heading = "Output")]
    verbose: Option<Truth>,
}

impl TalkArgs {
    /// Tokens that end a reply, beside the model's own.
    ///
    /// # Errors
    /// An empty one.
    pub fn extra_eos_tokens(&self) -> Result<Vec<String>, Complaint> {
        match self.extra_eos_token.iter().any(String::is_empty) {
            true => Err(Complaint::usage("`--extra-eos-token` is empty")),
            false => Ok(self.extra_eos_token.clone()),
        }
    }

    /// The printer, as quiet as `--verbose` asks.
    pub fn limit(&self, printer: Printer) -> Printer {
        match self.verbose {
            Some(Truth::False) => printer.limited(Verbosity::Quiet),
            _ => printer,
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
