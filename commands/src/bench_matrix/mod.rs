//! `mlx-bun bench-matrix`: what features and modes cost, how much load a server takes, how long conversions take; as
//! tables and JSON that a later run can be compared with.
//!
//! Servers are measured from outside, over HTTP: ours as a process of its own, or any that speaks OpenAI's protocol.
//! [`session`] runs the cells of one matrix and remembers them; [`serving`], [`load`] and [`convert`] say what a cell is.

mod adapter;
mod args;
mod baseline;
mod cells;
mod client;
mod convert;
mod document;
mod figures;
mod host;
mod load;
mod reply;
mod round;
mod schema_check;
mod server;
mod serving;
mod session;
mod sse;
mod store;
mod temp_folder;
mod workload;

pub use baseline::parse_percent;
pub use store::{levers_of_environment, numerics_of};

use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;

const EXAMPLES: &str = "\
Examples:
  mlx-bun bench-matrix features --quick
  mlx-bun bench-matrix modes --model ./my-model --out modes.json
  mlx-bun bench-matrix load --url http://127.0.0.1:8081 --stack llama-server
  mlx-bun bench-matrix features --baseline before.json --max-regression 5%

Cells that this build measured on this machine in the last 36 hours are not measured again (--redo does). A busy machine
is refused (--force measures and marks the rows). The exit code is 1 when a cell fails, a reply does not fit its schema,
or a cell is slower than the baseline allows.";

/// Measure features, modes, load and conversions, cell by cell
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE, after_long_help = EXAMPLES)]
pub struct BenchMatrixArgs {
    #[command(subcommand)]
    matrix: Matrix,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Matrix {
    Features(Box<serving::FeaturesArgs>),
    Modes(Box<serving::ModesArgs>),
    Load(Box<load::LoadArgs>),
    Convert(Box<convert::ConvertMatrixArgs>),
}

/// Runs the verb.
///
/// # Errors
/// What cannot be measured at all; what goes wrong in a cell is in the report.
pub fn run(args: &BenchMatrixArgs, printer: &Printer) -> anyhow::Result<ExitStatus> {
    match &args.matrix {
        Matrix::Features(args) => args.run(printer),
        Matrix::Modes(args) => args.run(printer),
        Matrix::Load(args) => args.run(printer),
        Matrix::Convert(args) => args.run(printer),
    }
}
