//! `mlx-bun evals plot`: a figure over time, or against another figure of the same row.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mlx_bun::record::Database;

use super::measurement::{Measurement, select};
use super::{FilterArgs, has_extension};
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::output_file;
use crate::plot::{self, LinePlot, Point, Series};
use crate::printer::Printer;

/// How the labels of cells begin what they say of some figures.
const LABELLED: [(&str, &str); 4] =
    [("prompt_tokens", "pp"), ("generated_tokens", "tg"), ("cached_tokens", "d"), ("batch", "b")];

#[derive(Clone, Debug, clap::Args)]
pub struct PlotArgs {
    /// Name of the figure, such as `generation_tps`
    #[arg(value_name = "FIGURE")]
    figure: String,

    /// Against this figure, such as `cached_tokens`, instead of time; of the rows with equal values the newest
    #[arg(long, value_name = "FIGURE")]
    against: Option<String>,

    /// The .svg or .png file
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    out: PathBuf,

    #[command(flatten)]
    filter: FilterArgs,

    /// A logarithmic vertical axis
    #[arg(long, help_heading = "Output")]
    log: bool,

    /// A logarithmic horizontal axis
    #[arg(long, requires = "against", help_heading = "Output")]
    log_x: bool,
}

/// Draws.
///
/// # Errors
/// No row has the figures, or a file that cannot be written.
pub fn run(args: &PlotArgs, database: &Database, printer: &Printer) -> anyhow::Result<ExitStatus> {
    plot::check(&args.out)?;
    output_file::check(&args.out, "picture", |file| {
        has_extension(file, "svg") || has_extension(file, "png")
    })?;
    let rows = select(database, &args.filter.filter(None))?;
    for name in [Some(&args.figure), args.against.as_ref()].into_iter().flatten() {
        if rows.iter().all(|row| row.figures.get(name).is_none()) {
            return Err(unknown(name, &rows).into());
        }
    }
    let unit = |name: &str| {
        let mut found = rows.iter().flat_map(|row| row.figures.iter());
        found.find(|(figure, _)| *figure == name).map(|(_, figure)| figure.unit.clone()).unwrap_or_default()
    };
    let (series, x_label) = match &args.against {
        None => (over_time(&rows, &args.figure), "time (UTC)".to_owned()),
        Some(against) => (versus(&rows, &args.figure, against), against.clone()),
    };
    let plot = LinePlot {
        title: args.figure.clone(),
        x_label,
        y_label: unit(&args.figure),
        log_x: args.log_x,
        log_y: args.log,
        x_is_time: args.against.is_none(),
        series,
    };
    plot.write(&args.out)?;
    printer.note(&format!("wrote {}", args.out.display()));
    Ok(ExitStatus::Success)
}

fn unknown(figure: &str, rows: &[Measurement]) -> Complaint {
    let mut known: Vec<_> =
        rows.iter().flat_map(|row| row.figures.iter().map(|(name, _)| name.to_owned())).collect();
    known.sort();
    known.dedup();
    Complaint::failure(format!("no row has a figure `{figure}`"))
        .hint(format!("there are: {}", known.join(", ")))
}

/// A line for each model, cell and machine; `rows` are the newest first.
fn over_time(rows: &[Measurement], figure: &str) -> Vec<Series> {
    let mut lines: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for row in rows.iter().rev() {
        let Some(point) = point(row, figure, row.entry.ts as f64) else { continue };
        let name = [row.model_name(), row.entry.label.clone(), row.entry.machine_key.clone()];
        lines.entry(name.join(", ")).or_default().push(point);
    }
    lines.into_iter().map(|(name, points)| Series { name, points }).collect()
}

/// A line for each model, machine and cell but for what the horizontal axis has; `rows` are the newest first.
fn versus(rows: &[Measurement], figure: &str, against: &str) -> Vec<Series> {
    let prefix = LABELLED.iter().find(|(name, _)| *name == against).map(|(_, prefix)| *prefix);
    let mut lines: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for row in rows {
        let Some(point) = row.figures.get(against).and_then(|x| point(row, figure, x)) else { continue };
        let label =
            prefix.map_or_else(|| row.entry.label.clone(), |prefix| without(&row.entry.label, prefix));
        let name = [row.model_name(), label, row.entry.machine_key.clone()];
        let line = lines.entry(name.join(", ")).or_default();
        if line.iter().all(|other| other.x != point.x) {
            line.push(point);
        }
    }
    let sorted = |(name, mut points): (String, Vec<Point>)| {
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        Series { name, points }
    };
    lines.into_iter().map(sorted).collect()
}

fn point(row: &Measurement, figure: &str, x: f64) -> Option<Point> {
    Some(Point { x, y: row.figures.get(figure)?, error: row.figures.get(&format!("{figure}_sd")) })
}

/// A cell's label without the part that is `prefix` and a number: `pp4+tg8@d16 b1` is `pp4+tg8 b1` without `d`.
fn without(label: &str, prefix: &str) -> String {
    let is_it = |part: &str| {
        let number = part.strip_prefix(prefix);
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let rest = |text: &str| text.split('+').filter(|part| !is_it(part)).collect::<Vec<_>>().join("+");
    let kept =
        |word: &str| word.split('@').map(rest).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("@");
    label.split(' ').map(kept).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_loses_what_the_axis_has() {
        for (prefix, rest) in [
            ("d", "pp4+tg8 b1 kv-8 t2"),
            ("pp", "tg8@d16 b1 kv-8 t2"),
            ("tg", "pp4@d16 b1 kv-8 t2"),
            ("b", "pp4+tg8@d16 kv-8 t2"),
        ] {
            assert_eq!(without("pp4+tg8@d16 b1 kv-8 t2", prefix), rest);
        }
        assert_eq!(without("pp512 b1", "pp"), "b1");
        assert_eq!(without("batch of b", "b"), "batch of b");
    }
}
