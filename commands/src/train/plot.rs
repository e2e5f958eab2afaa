//! `mlx-bun train plot`: the losses of runs as a picture.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::metrics::{METRICS_NAME, file_of, read};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::plot::{LinePlot, Point, Series, check};
use crate::printer::Printer;

/// Draw the losses of runs
#[derive(Clone, Debug, clap::Args)]
pub struct PlotArgs {
    /// Folders of runs, or metrics.jsonl files
    #[arg(value_name = "DIR", required = true)]
    runs: Vec<PathBuf>,

    /// The picture, .svg or .png
    #[arg(short, long, value_name = "FILE", default_value = "losses.svg")]
    output: PathBuf,

    /// What to draw: a name in metrics.jsonl, such as loss, learning_rate, tokens_per_sec, grad_norm, margin
    #[arg(long, value_name = "NAME", default_value = "loss")]
    figure: String,
}

/// Runs the verb.
///
/// # Errors
/// Runs without such figures, or a file that cannot be written.
pub fn run(args: &PlotArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    check(&args.output)?;
    let mut series = Vec::new();
    for run in &args.runs {
        let events = read(&file_of(run));
        let before = series.len();
        for (kind, label) in [("train", "train"), ("val", "validation")] {
            let points = points(&events, kind, &args.figure);
            if !points.is_empty() {
                series.push(Series { name: named(run, label, args.runs.len()), points });
            }
        }
        if series.len() == before {
            let problem = format!("{} has no `{}`", file_of(run).display(), args.figure);
            return Err(Complaint::failure(problem)
                .hint(format!("name a folder that `mlx-bun train` wrote, with a {METRICS_NAME}"))
                .into());
        }
    }
    let plot = LinePlot {
        title: format!("{} over steps", args.figure),
        x_label: "step".to_owned(),
        y_label: args.figure.clone(),
        series,
        ..LinePlot::default()
    };
    plot.write(&args.output)?;
    printer.note(&format!("Drawn: {}", args.output.display()));
    Ok(ExitStatus::Success)
}

fn named(run: &Path, label: &str, runs: usize) -> String {
    match run.file_name() {
        Some(name) if runs > 1 => format!("{}: {label}", name.to_string_lossy()),
        _ => label.to_owned(),
    }
}

fn points(events: &[Value], kind: &str, figure: &str) -> Vec<Point> {
    let of_kind = events.iter().filter(|event| event.get("kind").and_then(Value::as_str) == Some(kind));
    let point = |event: &Value| {
        Some(Point { x: event.get("step")?.as_f64()?, y: event.get(figure)?.as_f64()?, error: None })
    };
    of_kind.filter_map(point).collect()
}
