//! The drawing of a run.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph};

use super::state::State;

/// Rows of the figures below the chart.
const FIGURES: u16 = 6;

/// Draws it over the whole terminal.
pub fn draw(frame: &mut Frame, state: &State) {
    let [title, chart, gauge, figures, help] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(5),
        Constraint::Length(1),
        Constraint::Length(FIGURES),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let name = if state.is_empty() { "waiting for a run to begin" } else { state.title.as_str() };
    frame.render_widget(Line::from(name), title);
    losses(frame, chart, state);
    let label = format!("{} of {}", state.step, state.iterations);
    frame.render_widget(Gauge::default().ratio(state.progress()).label(label), gauge);
    columns(frame, figures, &state.summary());
    frame.render_widget(Line::from("q leaves; the run goes on").style(Style::new().dim()), help);
}

fn losses(frame: &mut Frame, area: Rect, state: &State) {
    let values = || state.train.iter().chain(&state.valid).map(|(_, loss)| *loss);
    let (low, high) = values()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| (low.min(loss), high.max(loss)));
    let (low, high) = if low.is_finite() { (low, high.max(low + 1e-3)) } else { (0.0, 1.0) };
    let right = state.iterations.max(state.step).max(1) as f64;
    let line = |name: &'static str, points, color| {
        Dataset::default()
            .name(name)
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(color))
            .data(points)
    };
    let sets =
        vec![line("train", &state.train, Color::Cyan), line("validation", &state.valid, Color::Yellow)];
    let labels = |low: f64, high: f64, digits: usize| {
        [low, (low + high) / 2.0, high].map(|value| Line::from(format!("{value:.digits$}")))
    };
    let chart = Chart::new(sets)
        .block(Block::bordered().title("loss"))
        .x_axis(Axis::default().bounds([0.0, right]).labels(labels(0.0, right, 0)))
        .y_axis(Axis::default().bounds([low, high]).labels(labels(low, high, 3)));
    frame.render_widget(chart, area);
}

/// As many lines a column as there is room for.
fn columns(frame: &mut Frame, area: Rect, lines: &[String]) {
    let lines = lines.get(1..).unwrap_or_default();
    let rows = usize::from(area.height.max(1));
    let columns: Vec<&[String]> = lines.chunks(rows).collect();
    let widths = vec![Constraint::Fill(1); columns.len()];
    for (column, area) in columns.into_iter().zip(Layout::horizontal(widths).split(area).iter()) {
        let text: Vec<Line> = column.iter().map(|line| Line::from(line.as_str())).collect();
        frame.render_widget(Paragraph::new(text), *area);
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn drawn(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_run_is_drawn_at_any_size() {
        let mut events = vec![json!({"type": "meta", "method": "orpo", "model": "m", "iters": 50})];
        events.extend((1..=20).map(|step| {
            json!({"type": "metric", "kind": "train", "step": step, "loss": 4.0 / f64::from(step), "tokens_per_sec": 12.0})
        }));
        let state = State::of(&events);
        let text = drawn(&state, 80, 24);
        for expected in ["orpo of m", "loss", "20 of 50", "Speed: 12.0 tokens/s", "q leaves"] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
        for (width, height) in [(1, 1), (5, 3), (200, 60)] {
            drawn(&state, width, height);
            drawn(&State::default(), width, height);
        }
        assert!(drawn(&State::default(), 60, 20).contains("waiting for a run"));
    }
}
