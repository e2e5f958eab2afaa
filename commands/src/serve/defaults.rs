//! What a request leaves open: the server's flags decide, then the model's generation_config.json, then a fallback.

use mlx_bun::checkpoint::GenerationConfig;
use mlx_bun::sampling::{Hlg, MinP, Penalty, PenaltyParams, SamplingParams, Xtc};

use super::request::Settings;

/// Temperature when nobody says one, and the most of a model that is told not to think.
const TEMPERATURE: f64 = 0.7;
/// XTC's threshold when a request gives only the chance (mlx-lm's).
const XTC_THRESHOLD: f32 = 0.1;
/// Tokens that penalties look at (mlx-lm's).
const PENALTY_WINDOW: i32 = 20;

/// The server's own defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    /// `--temp`.
    pub temperature: Option<f64>,
    /// `--top-p`.
    pub top_p: Option<f64>,
    /// `--top-k`.
    pub top_k: Option<i32>,
    /// `--min-p`.
    pub min_p: Option<f64>,
    /// `--max-tokens`.
    pub max_tokens: Option<usize>,
    /// `--hlg-sampling` and its numbers.
    pub hlg: Option<Hlg>,
    /// The model's.
    pub model: GenerationConfig,
}

impl Defaults {
    /// The sampler's parameters; XTC's protected tokens are still to be named. `unthinking` says that the model could
    /// think and is told not to.
    pub fn sampling(&self, settings: &Settings, unthinking: bool) -> SamplingParams {
        let asked = settings.temperature.or(self.temperature);
        let temperature = asked.unwrap_or_else(|| match self.model.temperature {
            Some(usual) if unthinking => usual.min(TEMPERATURE),
            usual => usual.unwrap_or(TEMPERATURE),
        });
        let model_top_k = self.model.top_k.and_then(|k| i32::try_from(k).ok());
        let min_p = settings.min_p.or(self.min_p).unwrap_or(0.0);
        let xtc = settings.xtc_probability.unwrap_or(0.0);
        SamplingParams {
            temperature,
            top_p: settings.top_p.or(self.top_p).or(self.model.top_p).unwrap_or(0.0),
            min_p: (min_p > 0.0)
                .then(|| MinP { p: min_p, min_tokens_to_keep: settings.min_tokens_to_keep.unwrap_or(1) }),
            xtc: (xtc > 0.0).then(|| Xtc {
                probability: xtc,
                threshold: settings.xtc_threshold.unwrap_or(XTC_THRESHOLD),
                special_tokens: Vec::new(),
            }),
            top_k: settings.top_k.or(self.top_k).or(model_top_k).unwrap_or(0),
            hlg: settings.hlg.unwrap_or(self.hlg),
        }
    }

    /// What is done to logits first.
    pub fn penalties(&self, settings: &Settings) -> PenaltyParams {
        let penalty = |(value, window): (Option<f32>, Option<i32>)| {
            let value = value.filter(|value| *value != 0.0)?;
            Some(Penalty { value, context_size: window.unwrap_or(PENALTY_WINDOW) })
        };
        PenaltyParams {
            logit_bias: settings.logit_bias.clone(),
            repetition: penalty(settings.repetition),
            presence: penalty(settings.presence),
            frequency: penalty(settings.frequency),
        }
    }

    /// Most tokens of a reply after a prompt of so many: never more than the context has room for.
    pub fn max_tokens(&self, settings: &Settings, prompt: usize, context: Option<usize>) -> Option<usize> {
        let asked = settings.max_tokens.unwrap_or(self.max_tokens);
        let room = context.map(|context| context.saturating_sub(prompt).max(1));
        match (asked, room) {
            (Some(asked), Some(room)) => Some(asked.min(room)),
            (asked, room) => asked.or(room),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(temperature: f64) -> GenerationConfig {
        GenerationConfig {
            temperature: Some(temperature),
            top_k: Some(40),
            top_p: Some(0.9),
            ..Default::default()
        }
    }

    #[test]
    fn request_then_flag_then_model_then_fallback() {
        let request = Settings { temperature: Some(0.1), ..Settings::default() };
        let nothing = Settings::default();
        let all =
            Defaults { temperature: Some(0.2), top_k: Some(3), model: model(0.3), ..Defaults::default() };
        let model = Defaults { model: model(0.3), ..Defaults::default() };
        let fallback = Defaults::default();
        let temperature =
            |defaults: &Defaults, settings: &Settings| defaults.sampling(settings, false).temperature;
        assert_eq!(temperature(&all, &request), 0.1);
        assert_eq!(temperature(&all, &nothing), 0.2);
        assert_eq!(temperature(&model, &nothing), 0.3);
        assert_eq!(temperature(&fallback, &nothing), 0.7);
        assert_eq!((all.sampling(&nothing, false).top_k, model.sampling(&nothing, false).top_k), (3, 40));
        assert_eq!(
            (model.sampling(&nothing, false).top_p, fallback.sampling(&nothing, false).top_p),
            (0.9, 0.0)
        );
    }

    #[test]
    fn a_turn_without_thinking_is_cooler_unless_somebody_said_otherwise() {
        let hot = Defaults { model: model(1.0), ..Defaults::default() };
        let nothing = Settings::default();
        assert_eq!(hot.sampling(&nothing, true).temperature, 0.7);
        assert_eq!(hot.sampling(&nothing, false).temperature, 1.0);
        let asked = Settings { temperature: Some(0.9), ..Settings::default() };
        assert_eq!(hot.sampling(&asked, true).temperature, 0.9);
    }

    #[test]
    fn s7_windows_and_thresholds_are_mlx_lms() {
        let settings =
            Settings { xtc_probability: Some(0.5), repetition: (Some(1.2), None), ..Settings::default() };
        let defaults = Defaults::default();
        assert_eq!(defaults.sampling(&settings, false).xtc.unwrap().threshold, 0.1);
        assert_eq!(defaults.penalties(&settings).repetition.unwrap().context_size, 20);
        let off = Settings { repetition: (Some(0.0), None), ..Settings::default() };
        assert_eq!(defaults.penalties(&off).repetition, None);
    }

    #[test]
    fn replies_stay_inside_the_context() {
        let defaults = Defaults { max_tokens: Some(50), ..Defaults::default() };
        let asked = |limit| Settings { max_tokens: limit, ..Settings::default() };
        assert_eq!(defaults.max_tokens(&asked(None), 10, None), Some(50));
        assert_eq!(defaults.max_tokens(&asked(None), 10, Some(30)), Some(20));
        assert_eq!(defaults.max_tokens(&asked(Some(Some(5))), 10, Some(30)), Some(5));
        assert_eq!(defaults.max_tokens(&asked(Some(None)), 10, Some(30)), Some(20));
        assert_eq!(defaults.max_tokens(&asked(Some(None)), 10, None), None);
    }
}
