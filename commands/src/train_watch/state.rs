//! Where a run stands, from its figures.

use serde_json::Value;

use crate::train::shown_time;

/// What the screen shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// What is trained on what.
    pub title: String,
    /// Steps in all.
    pub iterations: u64,
    /// The last step reported.
    pub step: u64,
    /// Step and loss.
    pub train: Vec<(f64, f64)>,
    /// The same of validations.
    pub valid: Vec<(f64, f64)>,
    /// The last report.
    pub last: Option<Value>,
    /// How it ended.
    pub outcome: Option<String>,
}

impl State {
    /// From the events of a run's file. A run that went on begins a new part; figures before it stay.
    pub fn of(events: &[Value]) -> Self {
        let mut state = Self::default();
        for event in events {
            let text = |name: &str| event.get(name).and_then(Value::as_str).unwrap_or_default();
            let number = |name: &str| event.get(name).and_then(Value::as_u64);
            let point = || {
                Some((event.get("step")?.as_f64()?, event.get("loss")?.as_f64()?))
                    .filter(|(_, loss): &(f64, f64)| loss.is_finite())
            };
            match (text("type"), text("kind")) {
                ("meta", _) => {
                    state.title = format!("{} of {}", text("method"), text("model"));
                    state.iterations = number("iters").unwrap_or(0);
                    state.outcome = None;
                }
                ("metric", "train") => {
                    state.train.extend(point());
                    state.step = number("step").unwrap_or(state.step);
                    state.last = Some(event.clone());
                }
                ("metric", "val") => state.valid.extend(point()),
                ("end", _) => state.outcome = Some(text("outcome").to_owned()),
                _ => {}
            }
        }
        state
    }

    /// Whether nothing is known yet.
    pub fn is_empty(&self) -> bool {
        self.title.is_empty() && self.train.is_empty()
    }

    fn figure(&self, name: &str) -> Option<f64> {
        self.last.as_ref()?.get(name)?.as_f64()
    }

    /// How much is done, from 0 to 1.
    pub fn progress(&self) -> f64 {
        (self.step as f64 / self.iterations.max(1) as f64).clamp(0.0, 1.0)
    }

    /// Seconds that the rest takes, at the last speed.
    fn left(&self) -> Option<f64> {
        let speed = self.figure("iterations_per_second").filter(|speed| *speed > 0.0)?;
        Some(self.iterations.saturating_sub(self.step) as f64 / speed)
    }

    /// The figures as lines.
    pub fn summary(&self) -> Vec<String> {
        let mut lines = vec![format!("Run: {}", self.title)];
        let standing = match (&self.outcome, self.left()) {
            (Some(outcome), _) => outcome.clone(),
            (None, Some(left)) => format!("about {} left", shown_time(left)),
            (None, None) => "begins".to_owned(),
        };
        lines.push(format!("Step: {} of {} ({standing})", self.step, self.iterations));
        if let Some((_, loss)) = self.train.last() {
            let best = self.train.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
            lines.push(format!("Loss: {loss:.4} (lowest {best:.4})"));
        }
        if let Some((_, loss)) = self.valid.last() {
            let best = self.valid.iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
            lines.push(format!("Validation: {loss:.4} (lowest {best:.4})"));
        }
        for (name, label) in [("accuracy", "Accuracy"), ("margin", "Margin"), ("grad_norm", "Gradient norm")]
        {
            lines.extend(self.figure(name).map(|value| format!("{label}: {value:.4}")));
        }
        lines.extend(self.figure("learning_rate").map(|rate| format!("Learning rate: {rate:.3e}")));
        lines.extend(self.figure("tokens_per_sec").map(|speed| format!("Speed: {speed:.1} tokens/s")));
        lines.extend(self.figure("peak_gb").map(|peak| format!("Memory: {peak:.2} GB at most")));
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_gathered_and_the_time_left_is_told() {
        let train = |step: u64, loss: f64| {
            json!({"type": "metric", "kind": "train", "step": step, "loss": loss, "iterations_per_second": 2.0,
                   "learning_rate": 1e-5, "tokens_per_sec": 40.0, "peak_gb": 1.5})
        };
        let mut events = vec![
            json!({"type": "meta", "method": "sft", "model": "m", "iters": 100}),
            json!({"type": "metric", "kind": "val", "step": 0, "loss": 4.0}),
            train(10, 3.0),
            train(20, 3.5),
        ];
        let state = State::of(&events);
        assert_eq!((state.step, state.progress(), state.train.len()), (20, 0.2, 2));
        let text = state.summary().join("\n");
        assert!(text.contains("Step: 20 of 100 (about 40 s left)"), "{text}");
        assert!(
            text.contains("Loss: 3.5000 (lowest 3.0000)") && text.contains("Validation: 4.0000"),
            "{text}"
        );
        events.push(json!({"type": "end", "outcome": "interrupted"}));
        assert!(State::of(&events).summary()[1].contains("interrupted"));
        events.push(json!({"type": "meta", "method": "sft", "model": "m", "iters": 200}));
        assert_eq!(State::of(&events).outcome, None);
        assert!(State::of(&[]).is_empty());
    }
}
