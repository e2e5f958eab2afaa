//! `mlx-bun evals`: what was measured so far.

mod compare;
mod export;
mod measurement;
mod plotted;
mod report;

use std::io::Write;
use std::path::{Path, PathBuf};

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::record::{Database, Figure, Filter, parse_time, shown_time};
use serde_json::{Value, json};

use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::output::SCHEMA_VERSION;
use crate::output_file;
use crate::printer::Printer;
use crate::table::write_table;
use measurement::{Measurement, distinctions, select, shown};

/// Rows of the list, unless asked otherwise.
const LIMIT: usize = 20;

const EXAMPLES: &str = "\
Examples:
  mlx-bun evals --verb benchmark --model smollm --since 7d
  mlx-bun evals --limit 1000 --parquet measurements.parquet
  mlx-bun evals compare 1a2b3c4 5d6e7f8
  mlx-bun evals plot generation_tps --model smollm --out speed.svg
  mlx-bun evals plot prompt_tps --against prompt_tokens --log-x --out length.svg
  mlx-bun evals report --out docs/benchmarks.md";

/// List, compare and plot what was measured
///
/// `benchmark`, `bench-matrix`, `ab`, `eval` and `perplexity` record what they measure in `evals.sqlite`, in the folder
/// of MLX_BUN_CACHE: with machine, commit, flags, the state of the machine and every sample.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct EvalsArgs {
    #[command(subcommand)]
    verb: Option<EvalsVerb>,
    #[command(flatten)]
    list: ListArgs,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum EvalsVerb {
    /// Compare two commits, or two machines: the newest of what both measured
    Compare(CompareArgs),
    /// Draw how a figure changed, or how it depends on another one, as SVG or PNG
    Plot(plotted::PlotArgs),
    /// Write the page of the newest numbers, with machine and commit at each
    Report(ReportArgs),
}

/// Which rows.
#[derive(Clone, Debug, Default, clap::Args)]
struct FilterArgs {
    /// Only of this verb
    #[arg(long, value_name = "VERB", help_heading = "Filters")]
    verb: Option<String>,

    /// Only of models whose path or name has this in it
    #[arg(short, long, value_name = "TEXT", help_heading = "Filters")]
    model: Option<String>,

    /// Only of commits that begin so
    #[arg(long, value_name = "HASH", help_heading = "Filters")]
    commit: Option<String>,

    /// Only of machines whose name has this in it
    #[arg(long, value_name = "TEXT", help_heading = "Filters")]
    machine: Option<String>,

    /// Only of cells whose label has this in it
    #[arg(long, value_name = "TEXT", help_heading = "Filters")]
    label: Option<String>,

    /// Only of this engine or server, such as `mlx-bun`
    #[arg(long, value_name = "NAME", help_heading = "Filters")]
    stack: Option<String>,

    /// Only since a day (2026-01-31), a time (RFC 3339), or so long ago (90m, 36h, 7d)
    #[arg(long, value_name = "WHEN", value_parser = when, help_heading = "Filters")]
    since: Option<i64>,
}

#[derive(Clone, Debug, clap::Args)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,

    /// The newest so many rows; 0 for all
    #[arg(long, value_name = "N", default_value_t = LIMIT, help_heading = "Output")]
    limit: usize,

    /// Print whole rows, their samples included, as a JSON object a line
    #[arg(long, help_heading = "Output")]
    raw: bool,

    /// Print rows without their samples as one JSON array
    #[arg(long, conflicts_with = "raw", help_heading = "Output")]
    json: bool,

    /// Write a line a number to a CSV file; `-` is standard output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    csv: Option<PathBuf>,

    /// Write a line a number to a Parquet file, which has to be one
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    parquet: Option<PathBuf>,

    /// Put the database aside under a name with the time in it and begin a new one; nothing is deleted
    #[arg(long, conflicts_with_all = ["raw", "json", "csv", "parquet"], help_heading = "Output")]
    clear: bool,
}

#[derive(Clone, Debug, clap::Args)]
struct CompareArgs {
    /// What a commit begins with, or a part of a machine's name
    #[arg(value_name = "A")]
    a: String,

    /// What it is compared with
    #[arg(value_name = "B")]
    b: String,

    #[command(flatten)]
    filter: FilterArgs,

    /// Print the pairs as one JSON array
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Clone, Debug, clap::Args)]
struct ReportArgs {
    /// The Markdown file
    #[arg(short, long, value_name = "FILE", default_value = "docs/benchmarks.md", help_heading = "Output")]
    out: PathBuf,

    #[command(flatten)]
    filter: FilterArgs,

    /// Also what debug builds measured
    #[arg(long, help_heading = "Filters")]
    debug_builds: bool,
}

fn when(text: &str) -> Result<i64, String> {
    parse_time(text)
        .ok_or_else(|| "must be a day (2026-01-31), a time (RFC 3339), or like 90m, 36h, 7d".to_owned())
}

impl FilterArgs {
    fn filter(&self, limit: Option<usize>) -> Filter {
        Filter {
            verb: self.verb.clone(),
            model: self.model.clone(),
            commit: self.commit.clone(),
            machine: self.machine.clone(),
            label: self.label.clone(),
            stack: self.stack.clone(),
            since: self.since,
            limit,
            ..Filter::default()
        }
    }
}

/// Runs the verb.
///
/// # Errors
/// A database that cannot be read, or a file that cannot be written.
pub fn run(args: &EvalsArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let path = Database::place(&Environment::of_process());
    // Looking makes no file.
    if !path.exists() {
        printer.note("nothing has been measured yet; `mlx-bun benchmark` is a beginning");
        return match &args.verb {
            None if args.list.clear => Ok(ExitStatus::Success),
            None => list(&args.list, &[], printer),
            Some(_) => Err(Complaint::failure(format!("there is no {}", path.display())).into()),
        };
    }
    let database = Database::open(&path)?;
    match &args.verb {
        None if args.list.clear => {
            let archive = database.archive()?;
            printer.note(&format!("the measurements are now in {}", archive.display()));
            Ok(ExitStatus::Success)
        }
        None => {
            let limit = Some(args.list.limit).filter(|limit| *limit > 0);
            let rows = select(&database, &args.list.filter.filter(limit))?;
            list(&args.list, &rows, printer)
        }
        Some(EvalsVerb::Compare(args)) => compared(args, &database, printer),
        Some(EvalsVerb::Plot(args)) => plotted::run(args, &database, printer),
        Some(EvalsVerb::Report(args)) => reported(args, &database, printer),
    }
}

fn list(args: &ListArgs, rows: &[Measurement], printer: &Printer) -> anyhow::Result<ExitStatus> {
    let to_stdout = |file: &&PathBuf| file.as_os_str() == "-";
    if args.parquet.as_ref().is_some_and(|file| to_stdout(&file)) {
        return Err(Complaint::usage("`--parquet -`: Parquet goes into a file only")
            .hint("name a file, or use `--csv -`")
            .into());
    }
    if args.csv.as_ref().is_some_and(|file| to_stdout(&file)) {
        if args.raw || args.json {
            return Err(
                Complaint::usage("`--csv -` takes standard output, and so do --raw and --json").into()
            );
        }
        printer.stdout().write_all(export::csv_text(rows).as_bytes())?;
    }
    if let Some(file) = args.csv.as_ref().filter(|file| !to_stdout(file)) {
        output_file::check(file, ".csv file", |file| has_extension(file, "csv"))?;
        export::csv(rows, file)?;
    }
    if let Some(file) = &args.parquet {
        output_file::check(file, ".parquet file", |file| has_extension(file, "parquet"))?;
        export::parquet(rows, file)?;
    }
    let mut out = printer.stdout();
    if args.raw {
        rows.iter().try_for_each(|row| writeln!(out, "{}", object(row, true)))?;
    } else if args.json {
        writeln!(out, "{}", rows.iter().map(|row| object(row, false)).collect::<Value>())?;
    } else if args.csv.is_none() && args.parquet.is_none() {
        table(&mut out, rows)?;
    }
    out.flush()?;
    Ok(ExitStatus::Success)
}

fn has_extension(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

fn object(row: &Measurement, raw: bool) -> Value {
    let mut object = json!({
        "schema_version": SCHEMA_VERSION,
        "table": row.table,
        "time": shown_time(row.entry.ts),
    });
    if let (Value::Object(object), Value::Object(whole)) = (&mut object, row.raw.clone()) {
        object.extend(whole.into_iter().filter(|(name, _)| raw || name != "samples"));
    }
    object
}

fn table(out: &mut impl Write, rows: &[Measurement]) -> std::io::Result<()> {
    let line = |(row, flags): (&Measurement, String)| {
        let figures: Vec<_> =
            row.main_figures().map(|(name, figure)| format!("{name} {}", shown(figure))).collect();
        let quiet = if row.entry.forced { "*" } else { "" };
        [
            format!("{}{quiet}", shown_time(row.entry.ts)),
            row.entry.verb.clone(),
            row.model_name(),
            row.entry.label.clone(),
            row.entry.machine_key.clone(),
            row.commit(),
            figures.join("; "),
            flags,
        ]
    };
    let flags = distinctions(&rows.iter().collect::<Vec<_>>());
    let lines: Vec<_> = rows.iter().zip(flags).map(line).collect();
    write_table(out, ["TIME", "VERB", "MODEL", "CELL", "MACHINE", "COMMIT", "FIGURES", "FLAGS"], &[], &lines)
}

fn compared(args: &CompareArgs, database: &Database, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let pairs = compare::compare(database, &args.filter.filter(None), [&args.a, &args.b])??;
    let mut out = printer.stdout();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({"schema_version": SCHEMA_VERSION, "a": args.a, "b": args.b, "pairs": pairs})
        )?;
    } else {
        let number = |value: f64, unit: &str| shown(&Figure { value, unit: unit.to_owned() });
        let lines: Vec<_> = pairs
            .iter()
            .map(|pair| {
                let mark = if pair.quiet { "" } else { "*" };
                [
                    pair.verb.clone(),
                    pair.model.clone(),
                    pair.label.clone(),
                    pair.figure.clone(),
                    number(pair.a, &pair.unit),
                    number(pair.b, &pair.unit),
                    pair.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}{mark}")),
                ]
            })
            .collect();
        write_table(&mut out, ["VERB", "MODEL", "CELL", "FIGURE", "A", "B", "B/A"], &[4, 5, 6], &lines)?;
    }
    out.flush()?;
    if pairs.is_empty() {
        printer.note("they have nothing in common: no cell of the same verb, model and flags");
    }
    if pairs.iter().any(|pair| !pair.quiet) {
        printer.note("* a machine was busy");
    }
    Ok(ExitStatus::Success)
}

fn reported(args: &ReportArgs, database: &Database, printer: &Printer) -> anyhow::Result<ExitStatus> {
    output_file::check(&args.out, "page of this verb", |file| {
        output_file::beginning(file, report::NOTICE.len() as u64)
            .is_ok_and(|text| text == report::NOTICE.as_bytes())
    })?;
    let mut rows = select(database, &args.filter.filter(None))?;
    rows.retain(|row| (args.debug_builds || row.entry.build != "debug") && !row.is_debugged());
    if rows.is_empty() {
        return Err(Complaint::failure("there is nothing to report").hint("measure something first").into());
    }
    write_bytes_atomically(&args.out, report::page(&rows)?.as_bytes())?;
    printer.note(&format!("wrote {}", args.out.display()));
    Ok(ExitStatus::Success)
}
