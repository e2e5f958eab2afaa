//! What a comparison found: for people, for programs, and for the database.

use std::io::Write as _;

use mlx_bun::record::{Figures, Run};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::arm::{Arm, Arms};
use super::gate::{Condition, Quality};
use super::output::Identity;
use super::pairs::Stopped;
use super::process::{Pairs, Sample};
use super::quality::Setting;
use super::rule::{Judgement, Rule, Verdict};
use super::statistics::median;
use crate::bench_matrix::{levers_of_environment, numerics_of};
use crate::output::SCHEMA_VERSION;
use crate::printer::Printer;
use crate::recorder::Recorder;

/// Whether the outputs agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Sameness {
    /// All runs of A said the same.
    a_repeats: bool,
    /// All runs of B said the same.
    b_repeats: bool,
    /// B said what A said, in every run.
    same: bool,
}

/// A condition, and whether it holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Held {
    condition: String,
    /// `None` when it was not measured.
    holds: Option<bool>,
}

/// What a comparison found.
pub struct Report {
    figure: String,
    higher_is_better: bool,
    arms: Arms,
    pairs: Pairs,
    stopped: Stopped,
    judgement: Judgement,
    sameness: Sameness,
    gates: Vec<Held>,
    quality: Option<Quality>,
}

impl Report {
    /// Judges pairs, of which there must be one.
    pub fn new(
        rule: Rule,
        figure: String,
        arms: Arms,
        pairs: Pairs,
        stopped: Stopped,
        conditions: &[Condition],
        quality: Option<Quality>,
    ) -> Self {
        let figures: Vec<_> = pairs.iter().map(|(a, b)| (a.figure, b.figure)).collect();
        let judgement = rule.judge(&figures);
        let sameness = sameness(&pairs);
        let held = |condition: &Condition| Held {
            condition: condition.to_string(),
            holds: condition
                .is_measured(quality.as_ref())
                .then(|| condition.holds(quality.as_ref(), sameness.same)),
        };
        Self {
            figure,
            higher_is_better: rule.higher_is_better,
            gates: conditions.iter().map(held).collect(),
            arms,
            pairs,
            stopped,
            judgement,
            sameness,
            quality,
        }
    }

    /// Whether every gate holds.
    pub fn gates_hold(&self) -> bool {
        self.gates.iter().all(|gate| gate.holds == Some(true))
    }

    /// What became of B.
    pub fn verdict(&self) -> Verdict {
        self.judgement.verdict
    }

    fn figures(&self, side: fn(&(Sample, Sample)) -> &Sample) -> Vec<f64> {
        self.pairs.iter().map(|pair| side(pair).figure).collect()
    }

    fn identity(&self, side: fn(&(Sample, Sample)) -> &Sample) -> Option<&Identity> {
        self.pairs.last().map(|pair| &side(pair).identity)
    }

    fn json(&self) -> Value {
        let arm = |arm: &Arm, side: fn(&(Sample, Sample)) -> &Sample| {
            let samples = self.figures(side);
            json!({
                "label": arm.label, "program": arm.program, "arguments": arm.arguments,
                "environment": arm.environment.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
                "median": median(&samples), "samples": samples,
                "wall_seconds": self.pairs.iter().map(|pair| side(pair).wall).collect::<Vec<_>>(),
                "output": self.identity(side),
            })
        };
        let [a, b] = &self.arms.arms;
        json!({
            "schema_version": SCHEMA_VERSION,
            "figure": self.figure,
            "higher_is_better": self.higher_is_better,
            "a": arm(a, |pair| &pair.0),
            "b": arm(b, |pair| &pair.1),
            "pairs": self.pairs.len(),
            "stopped": self.stopped,
            "ratio": self.judgement.ratio,
            "interval": self.judgement.interval,
            "sign_test_p": self.judgement.p,
            "output": self.sameness,
            "quality": self.quality,
            "gates": self.gates,
            "verdict": self.judgement.verdict,
        })
    }

    /// Prints it.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn print(&self, json: bool, printer: &Printer) -> anyhow::Result<()> {
        let mut stdout = printer.stdout();
        match json {
            true => writeln!(stdout, "{}", self.json())?,
            false => stdout.write_all(self.text().as_bytes())?,
        }
        stdout.flush()?;
        Ok(())
    }

    fn text(&self) -> String {
        let [a, b] = &self.arms.arms;
        let unit = if self.figure == "wall" { " s" } else { "" };
        let middle = |samples: Vec<f64>| format!("{:.4}{unit}", median(&samples));
        let judged = &self.judgement;
        let change = (judged.ratio - 1.0) * 100.0;
        let mut lines = vec![
            format!("A: {}: {} {}", a.label, self.figure, middle(self.figures(|pair| &pair.0))),
            format!("B: {}: {} {}", b.label, self.figure, middle(self.figures(|pair| &pair.1))),
            format!(
                "B/A: {:.4} ({change:+.1} %), 99 % interval {:.4} to {:.4}, sign test p = {:.2e}, {} pairs{}",
                judged.ratio,
                judged.interval[0],
                judged.interval[1],
                judged.p,
                self.pairs.len(),
                match self.stopped {
                    Stopped::Width => "",
                    Stopped::Pairs => " (the most)",
                    Stopped::Time => " (no time for more)",
                    Stopped::Interrupt => " (interrupted)",
                }
            ),
            self.said(),
        ];
        if let Some(quality) = &self.quality {
            let kl = quality.kl.map(|kl| format!("KL {kl:.3e} nats a token, ")).unwrap_or_default();
            lines.push(format!(
                "Quality: {kl}perplexity {:.4} against {:.4} ({:+.3} %), {} tokens",
                quality.perplexity_b,
                quality.perplexity_a,
                quality.perplexity_change() * 100.0,
                quality.tokens
            ));
        }
        for gate in &self.gates {
            lines.push(format!(
                "Gate {}: {}",
                gate.condition,
                match gate.holds {
                    Some(true) => "holds",
                    Some(false) => "does NOT hold",
                    None => "was not measured",
                }
            ));
        }
        lines.push(format!("Verdict: {}", judged.verdict.name()));
        lines.join("\n") + "\n"
    }

    fn said(&self) -> String {
        let Sameness { a_repeats, b_repeats, same } = self.sameness;
        let both = if same { "the same from both" } else { "B differs from A" };
        let loose = match (a_repeats, b_repeats) {
            (true, true) => "",
            (false, true) => " (A differs from run to run)",
            (true, false) => " (B differs from run to run)",
            (false, false) => " (both differ from run to run)",
        };
        let count = |identity: Option<&Identity>| {
            let identity = identity?;
            let tokens = identity.tokens?;
            Some(format!("{tokens} tokens, {}", identity.finish_reason.as_deref().unwrap_or("no reason")))
        };
        let counts = count(self.identity(|pair| &pair.0)).zip(count(self.identity(|pair| &pair.1)));
        let counts = counts.map(|(a, b)| if a == b { format!("; {a}") } else { format!("; A {a}; B {b}") });
        format!("Output: {both}{loose}{}", counts.unwrap_or_default())
    }

    /// Writes it into the database.
    pub fn record(&self, printer: &Printer) {
        let [a, b] = &self.arms.arms;
        let mut flags = Map::new();
        flags.insert("a".to_owned(), json!({"arguments": a.arguments, "environment": a.environment}));
        flags.insert("b".to_owned(), json!({"arguments": b.arguments, "environment": b.environment}));
        flags.insert("environment".to_owned(), Value::Object(levers_of_environment()));
        let mut recorder = Recorder::begin("ab", &numerics_of(&b.arguments), flags, printer);
        let mut figures = Figures::default();
        figures.add("ratio", self.judgement.ratio, "B/A");
        figures.add("ratio_low", self.judgement.interval[0], "B/A");
        figures.add("ratio_high", self.judgement.interval[1], "B/A");
        figures.add("sign_test_p", self.judgement.p, "");
        let samples = json!({"a": self.figures(|pair| &pair.0), "b": self.figures(|pair| &pair.1)});
        if let Some(quality) = &self.quality {
            if let Some(kl) = quality.kl {
                figures.add("kl", kl, "nats/token");
            }
            figures.add("perplexity_a", quality.perplexity_a, "");
            figures.add("perplexity_b", quality.perplexity_b, "");
        }
        let label = format!("{}: {} | {}", self.figure, a.label, b.label);
        let mut entry = recorder.entry(&label, figures, samples);
        let same = if self.sameness.same { "the same output" } else { "other output" };
        let whole = if self.stopped == Stopped::Interrupt { ", interrupted" } else { "" };
        entry.notes = Some(format!("{}, {same}{whole}", self.judgement.verdict.name()));
        let model = Setting::of(&b.arguments).ok().filter(|_| self.arms.ours);
        let model = model.and_then(|setting| setting.recorded_model()).unwrap_or_default();
        recorder.record(&entry, &Run { model_path: model, ..Run::default() });
    }
}

fn sameness(pairs: &[(Sample, Sample)]) -> Sameness {
    let repeats = |side: fn(&(Sample, Sample)) -> &Sample| {
        let mut all = pairs.iter().map(|pair| &side(pair).identity);
        let first = all.next();
        all.all(|identity| Some(identity) == first)
    };
    let (a_repeats, b_repeats) = (repeats(|pair| &pair.0), repeats(|pair| &pair.1));
    let same = pairs.first().is_some_and(|(a, b)| a.identity == b.identity);
    Sameness { a_repeats, b_repeats, same: same && a_repeats && b_repeats }
}

#[cfg(test)]
mod tests {
    use super::super::arm::Given;
    use super::super::gate::parse;
    use super::super::output::Output;
    use super::*;

    fn report(b_says: &str, b_takes: f64, gate: &str) -> Report {
        let sample = |says: &str, figure: f64| Sample {
            wall: figure,
            figure,
            identity: Output::new(says.as_bytes()).identity,
        };
        let reply = r#"{"text": "a", "tokens": [1, 2], "finish_reason": "length"}"#;
        let command = ["generate".to_owned()];
        let given = Given { flags: [Some("--l1"), Some("")], command: &command, ..Given::default() };
        let arms = given.resolve("me".into(), false).unwrap();
        let pairs = (0..8).map(|_| (sample(reply, 1.0), sample(b_says, b_takes))).collect();
        let rule = Rule { least_effect: 0.01, higher_is_better: false, seed: 1, resamples: 100 };
        let conditions = if gate.is_empty() { Vec::new() } else { parse(gate).unwrap() };
        let quality = Quality { kl: Some(0.002), perplexity_a: 10.0, perplexity_b: 10.2, tokens: 100 };
        Report::new(rule, "wall".to_owned(), arms, pairs, Stopped::Width, &conditions, Some(quality))
    }

    #[test]
    fn the_report_says_it_all() {
        let report =
            report(r#"{"text": "b", "tokens": [1], "finish_reason": "stop"}"#, 0.5, "kl<0.01,ppl<1%,same");
        assert!(!report.gates_hold());
        insta::assert_snapshot!(report.text(), @r"
        A: --l1: wall 1.0000 s
        B: (as it is): wall 0.5000 s
        B/A: 0.5000 (-50.0 %), 99 % interval 0.5000 to 0.5000, sign test p = 7.81e-3, 8 pairs
        Output: B differs from A; A 2 tokens, length; B 1 tokens, stop
        Quality: KL 2.000e-3 nats a token, perplexity 10.2000 against 10.0000 (+2.000 %), 100 tokens
        Gate kl<0.01: holds
        Gate ppl<1%: does NOT hold
        Gate same: does NOT hold
        Verdict: win
        ");
        let json = report.json();
        assert_eq!((&json["verdict"], &json["stopped"]), (&json!("win"), &json!("width")));
        assert_eq!(json["a"]["output"]["finish_reason"], "length");
        assert_eq!(json["gates"][1], json!({"condition": "ppl<1%", "holds": false}));
    }

    #[test]
    fn what_ctrl_c_left_is_reported_as_such() {
        let mut report =
            report(r#"{"text": "a", "tokens": [1, 2], "finish_reason": "length"}"#, 1.0, "kl<0.01");
        (report.stopped, report.gates[0].holds) = (Stopped::Interrupt, None);
        let text = report.text();
        assert!(text.contains("8 pairs (interrupted)\n") && text.contains("Gate kl<0.01: was not measured"));
        assert!(!report.gates_hold());
        assert!(!parse("kl<1").unwrap()[0].is_measured(None) && parse("same").unwrap()[0].is_measured(None));
    }

    #[test]
    fn the_same_output_is_seen() {
        let reply = r#"{"finish_reason": "length", "text": "a", "tokens": [1, 2], "stats": {"x": 1}}"#;
        let report = report(reply, 1.0, "same");
        assert!(report.gates_hold());
        assert_eq!(report.verdict(), Verdict::NoDifference);
        assert!(report.text().contains("Output: the same from both; 2 tokens, length\n"));
    }
}
