//! How tokens are chosen: mlx-lm's samplers and processors, and the HLG tone curve.

use std::str::FromStr;

use mlx_bun::checkpoint::json;
use mlx_bun::sampling::{Hlg, HlgBase, MinP, Penalty, PenaltyParams, SamplingParams, Xtc};
use serde_json::Value;

use super::{Switch, Warnings, range};
use crate::error::Complaint;

/// The filters and the draw.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    #[arg(long = "temp", visible_alias = "temperature", value_name = "T", default_value_t = 0.0,
          help = range::TEMPERATURE.help("Temperature; 0 always takes the likeliest token"), value_parser = range::TEMPERATURE.parser())]
    pub temperature: f64,

    #[arg(long, value_name = "P", default_value_t = 1.0, help = range::TOP_P.help("Keep the likeliest tokens that make up this share of the probability; 0 and 1 keep all"), value_parser = range::TOP_P.parser())]
    pub top_p: f64,

    #[arg(long, value_name = "K", default_value_t = 0, help = range::TOP_K.help("Keep this many of the likeliest tokens; 0 keeps all"), value_parser = range::TOP_K.parser())]
    pub top_k: i32,

    #[arg(long, value_name = "P", default_value_t = 0.0, help = range::MIN_P.help("Drop tokens less likely than this share of the likeliest one's probability"), value_parser = range::MIN_P.parser())]
    pub min_p: f64,

    #[arg(long, value_name = "N", default_value_t = 1, help = range::MIN_TOKENS_TO_KEEP.help("Tokens that --min-p always keeps"), value_parser = range::MIN_TOKENS_TO_KEEP.parser(), hide_short_help = true)]
    pub min_tokens_to_keep: i32,

    #[arg(long, value_name = "P", default_value_t = 0.0, help = range::XTC_PROBABILITY.help("Chance, at each token, of dropping all likely tokens but the last of them (XTC)"), value_parser = range::XTC_PROBABILITY.parser(), hide_short_help = true)]
    pub xtc_probability: f32,

    #[arg(long, value_name = "P", default_value_t = 0.1, help = range::XTC_THRESHOLD.help("Probability from which XTC calls a token likely"), value_parser = range::XTC_THRESHOLD.parser(), hide_short_help = true)]
    pub xtc_threshold: f32,

    #[arg(long, value_name = "N", help = range::SEED.help("Seed of the random draws; the same seed gives the same text"), value_parser = range::SEED.parser())]
    pub seed: Option<u64>,

    #[command(flatten)]
    pub hlg: HlgArgs,
}

/// The HLG tone curve.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct HlgArgs {
    /// Choose by the HLG tone curve instead of the filters above
    #[arg(long, value_name = "ON|OFF", value_enum, default_value_t = Switch::Off, hide_short_help = true)]
    pub hlg_sampling: Switch,

    #[arg(long, value_name = "NATS", default_value_t = 4.0, help = range::HLG.help("Half-width of the curve's linear middle, in nats"), value_parser = range::HLG.parser(), hide_short_help = true)]
    pub hlg_width: f32,

    #[arg(long, value_name = "NATS", default_value_t = 4.0, help = range::HLG.help("Scale of the roll-off among the likeliest tokens, in nats"), value_parser = range::HLG.parser(), hide_short_help = true)]
    pub hlg_shoulder: f32,

    #[arg(long, value_name = "NATS", default_value_t = 6.0, help = range::HLG.help("Scale of the roll-off among unlikely tokens, in nats"), value_parser = range::HLG.parser(), hide_short_help = true)]
    pub hlg_toe: f32,

    #[arg(long, value_name = "NATS", default_value_t = 6.0, help = range::HLG.help("How far below the likeliest token the curve's middle lies, in nats"), value_parser = range::HLG.parser(), hide_short_help = true)]
    pub hlg_pivot_offset: f32,
}

/// What is done to logits first.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Penalties")]
pub struct PenaltyArgs {
    #[arg(long, value_name = "X", help = range::REPETITION_PENALTY.help("Make tokens already seen less likely by this factor; 1 changes nothing"), value_parser = range::REPETITION_PENALTY.parser())]
    pub repetition_penalty: Option<f32>,

    #[arg(long, value_name = "N", default_value_t = 20, help = range::CONTEXT_SIZE.help("Last tokens the repetition penalty looks at; 0 looks at all"), value_parser = range::CONTEXT_SIZE.parser(), hide_short_help = true)]
    pub repetition_context_size: i32,

    #[arg(long, value_name = "X", help = range::ADDITIVE_PENALTY.help("Subtract this once from the logit of each token seen"), value_parser = range::ADDITIVE_PENALTY.parser(), hide_short_help = true)]
    pub presence_penalty: Option<f32>,

    #[arg(long, value_name = "N", default_value_t = 20, help = range::CONTEXT_SIZE.help("Last tokens the presence penalty looks at; 0 looks at all"), value_parser = range::CONTEXT_SIZE.parser(), hide_short_help = true)]
    pub presence_context_size: i32,

    #[arg(long, value_name = "X", help = range::ADDITIVE_PENALTY.help("Subtract this for each time a token was seen"), value_parser = range::ADDITIVE_PENALTY.parser(), hide_short_help = true)]
    pub frequency_penalty: Option<f32>,

    #[arg(long, value_name = "N", default_value_t = 20, help = range::CONTEXT_SIZE.help("Last tokens the frequency penalty looks at; 0 looks at all"), value_parser = range::CONTEXT_SIZE.parser(), hide_short_help = true)]
    pub frequency_context_size: i32,

    /// Add a value from -1000 to 1000 to a token's logit: `ID=VALUE`, several times, or a JSON object
    #[arg(long, value_name = "ID=VALUE", allow_hyphen_values = true, hide_short_help = true)]
    pub logit_bias: Vec<LogitBias>,
}

/// One `--logit-bias`.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitBias(pub Vec<(u32, f32)>);

impl FromStr for LogitBias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim_start().starts_with('{') {
            let value =
                serde_json::from_str(text).map_err(|error| format!("is {}", json::problem(&error)))?;
            return Self::from_json(&value);
        }
        let (id, value) = text.split_once('=').ok_or("must be ID=VALUE or a JSON object")?;
        let value = value.trim().parse().map_err(|_| format!("`{value}` is not a number"))?;
        Ok(Self(vec![entry(id.trim(), value)?]))
    }
}

impl LogitBias {
    /// From `{"ID": VALUE, ...}`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_json(value: &Value) -> Result<Self, String> {
        let object = value.as_object().ok_or("must be an object of token ids and numbers")?;
        let entries = object.iter().map(|(id, value)| {
            let value = value.as_f64().ok_or_else(|| format!("the value of token {id} is not a number"))?;
            entry(id, value as f32)
        });
        entries.collect::<Result<_, _>>().map(Self)
    }
}

fn entry(id: &str, value: f32) -> Result<(u32, f32), String> {
    let id = id.parse().map_err(|_| format!("`{id}` is not a token id"))?;
    let value = range::LOGIT_BIAS.check(value).map_err(|range| format!("the value of token {id} {range}"))?;
    Ok((id, value))
}

impl SamplingArgs {
    /// The engine's parameters. XTC's protected tokens are the tokenizer's to name, and are left empty here.
    pub fn resolve(&self, warnings: &mut Warnings) -> SamplingParams {
        self.warn_unused(warnings);
        SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            min_p: (self.min_p != 0.0)
                .then_some(MinP { p: self.min_p, min_tokens_to_keep: self.min_tokens_to_keep }),
            xtc: (self.xtc_probability > 0.0).then(|| Xtc {
                probability: self.xtc_probability,
                threshold: self.xtc_threshold,
                special_tokens: Vec::new(),
            }),
            top_k: self.top_k,
            hlg: self.hlg.resolve(),
        }
    }

    fn warn_unused(&self, warnings: &mut Warnings) {
        let filters = [
            ("--top-p", self.top_p != 1.0),
            ("--top-k", self.top_k != 0),
            ("--min-p", self.min_p != 0.0),
            ("--xtc-probability", self.xtc_probability != 0.0),
            ("--seed", self.seed.is_some()),
        ];
        let hlg_numbers = [
            ("--hlg-width", self.hlg.hlg_width != 4.0),
            ("--hlg-shoulder", self.hlg.hlg_shoulder != 4.0),
            ("--hlg-toe", self.hlg.hlg_toe != 6.0),
            ("--hlg-pivot-offset", self.hlg.hlg_pivot_offset != 6.0),
        ];
        let mut warn = |flags: &[(&str, bool)], why: &str| {
            for (flag, _) in flags.iter().filter(|(_, given)| *given) {
                warnings.push(format!("`{flag}` does nothing {why}"));
            }
        };
        let hlg = self.hlg.hlg_sampling.is_on();
        if self.temperature == 0.0 {
            warn(&filters, "at temperature 0; set `--temp`");
            warn(&[("--hlg-sampling", hlg)], "at temperature 0; set `--temp`");
        } else if hlg {
            warn(&filters, "with `--hlg-sampling on`, which replaces the filters");
        }
        if !hlg {
            warn(&hlg_numbers, "without `--hlg-sampling on`");
        }
    }
}

impl HlgArgs {
    /// The curve, if it is on.
    pub fn resolve(&self) -> Option<Hlg> {
        self.hlg_sampling.is_on().then_some(self.curve())
    }

    /// The curve, on or off.
    pub fn curve(&self) -> Hlg {
        Hlg {
            width: self.hlg_width,
            shoulder: self.hlg_shoulder,
            toe: self.hlg_toe,
            pivot_offset: self.hlg_pivot_offset,
            base: HlgBase::Top,
        }
    }
}

impl PenaltyArgs {
    /// The engine's parameters. Of several values for a token the last counts.
    pub fn resolve(&self) -> PenaltyParams {
        let penalty = |value: Option<f32>, context_size: i32| {
            value.filter(|value| *value != 0.0).map(|value| Penalty { value, context_size })
        };
        let mut logit_bias: Vec<(u32, f32)> = Vec::new();
        for &(id, value) in self.logit_bias.iter().flat_map(|bias| &bias.0) {
            match logit_bias.iter_mut().find(|(known, _)| *known == id) {
                Some((_, earlier)) => *earlier = value,
                None => logit_bias.push((id, value)),
            }
        }
        PenaltyParams {
            logit_bias,
            repetition: penalty(self.repetition_penalty, self.repetition_context_size),
            presence: penalty(self.presence_penalty, self.presence_context_size),
            frequency: penalty(self.frequency_penalty, self.frequency_context_size),
        }
    }
}

/// Log-probabilities in the output.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct LogprobArgs {
    /// With --json: the log-probability of each token
    #[arg(long)]
    pub logprobs: bool,

    #[arg(long, value_name = "N", help = range::TOP_LOGPROBS.help("With --json: the N likeliest tokens at each position"), value_parser = range::TOP_LOGPROBS.parser(), hide_short_help = true)]
    pub top_logprobs: Option<usize>,
}

impl LogprobArgs {
    /// `None` for no log-probabilities, else how many alternatives.
    ///
    /// # Errors
    /// They have no place in plain text.
    pub fn resolve(&self, json: bool) -> Result<Option<usize>, Complaint> {
        let top = match (self.top_logprobs, self.logprobs) {
            (None | Some(0), false) => return Ok(None),
            (top, _) => top.unwrap_or(0),
        };
        if json {
            return Ok(Some(top));
        }
        let flag = if self.logprobs { "--logprobs" } else { "--top-logprobs" };
        Err(Complaint::usage(format!("`{flag}` needs `--json`: plain text has no place for numbers")))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Probe {
        #[command(flatten)]
        sampling: SamplingArgs,
        #[command(flatten)]
        penalties: PenaltyArgs,
    }

    fn parse(flags: &str) -> Probe {
        Probe::try_parse_from(std::iter::once("x").chain(flags.split_whitespace())).unwrap()
    }

    fn warnings(flags: &str) -> Warnings {
        let mut warnings = Vec::new();
        parse(flags).sampling.resolve(&mut warnings);
        warnings
    }

    #[test]
    fn s7_defaults_are_mlx_lms() {
        let probe = parse("");
        let mut warnings = Vec::new();
        let expected = SamplingParams { top_p: 1.0, ..Default::default() };
        assert_eq!(probe.sampling.resolve(&mut warnings), expected);
        assert_eq!(probe.penalties.resolve(), PenaltyParams::default());
        assert_eq!(probe.sampling.xtc_threshold, 0.1);
        assert!(warnings.is_empty());
    }

    #[test]
    fn s3_every_flag_reaches_the_engine() {
        let probe = parse(
            "--temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --min-tokens-to-keep 2 --xtc-probability 0.5 \
             --xtc-threshold 0.2 --repetition-penalty 1.1 --repetition-context-size 30 --presence-penalty=-0.5 \
             --presence-context-size 31 --frequency-penalty 0.25 --frequency-context-size 0 --logit-bias 5=-1.5",
        );
        let mut warnings = Vec::new();
        let params = probe.sampling.resolve(&mut warnings);
        assert_eq!(
            params,
            SamplingParams {
                temperature: 0.7,
                top_p: 0.9,
                min_p: Some(MinP { p: 0.05, min_tokens_to_keep: 2 }),
                xtc: Some(Xtc { probability: 0.5, threshold: 0.2, special_tokens: Vec::new() }),
                top_k: 40,
                hlg: None,
            }
        );
        let penalties = probe.penalties.resolve();
        assert_eq!(penalties.logit_bias, [(5, -1.5)]);
        assert_eq!(penalties.repetition, Some(Penalty { value: 1.1, context_size: 30 }));
        assert_eq!(penalties.presence, Some(Penalty { value: -0.5, context_size: 31 }));
        assert_eq!(penalties.frequency, Some(Penalty { value: 0.25, context_size: 0 }));
        assert!(warnings.is_empty());
    }

    #[test]
    fn hlg_numbers_reach_the_engine() {
        let flags =
            "--temp 1 --hlg-sampling on --hlg-width 1 --hlg-shoulder 2 --hlg-toe 3 --hlg-pivot-offset 5";
        let hlg = parse(flags).sampling.resolve(&mut Vec::new()).hlg;
        let expected = Hlg { width: 1.0, shoulder: 2.0, toe: 3.0, pivot_offset: 5.0, base: HlgBase::Top };
        assert_eq!(hlg, Some(expected));
    }

    #[test]
    fn flags_without_effect_are_pointed_out() {
        assert_eq!(warnings("--top-p 0.9"), ["`--top-p` does nothing at temperature 0; set `--temp`"]);
        assert_eq!(warnings("--hlg-width 1"), ["`--hlg-width` does nothing without `--hlg-sampling on`"]);
        assert_eq!(
            warnings("--temp 1 --hlg-sampling on --top-k 5"),
            ["`--top-k` does nothing with `--hlg-sampling on`, which replaces the filters"]
        );
    }

    #[test]
    fn logit_biases_come_as_pairs_or_json_and_the_last_wins() {
        let probe =
            Probe::try_parse_from(["x", "--logit-bias", r#"{"1": 2, "7": -3.5}"#, "--logit-bias", "1=4"]);
        assert_eq!(probe.unwrap().penalties.resolve().logit_bias, [(1, 4.0), (7, -3.5)]);
        for wrong in ["5", "x=1", "5=x", "-1=2", "5=inf", "5=nan", "{\"5\": null}", "[1]", "{", "5=1e9"] {
            assert!(wrong.parse::<LogitBias>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn logprobs_belong_to_json() {
        let args = |logprobs, top_logprobs| LogprobArgs { logprobs, top_logprobs };
        assert_eq!(args(false, None).resolve(false).unwrap(), None);
        assert_eq!(args(true, None).resolve(true).unwrap(), Some(0));
        assert_eq!(args(false, Some(3)).resolve(true).unwrap(), Some(3));
        assert!(args(true, None).resolve(false).is_err());
    }
}
