//! What was measured, kept in one SQLite file that every measuring verb writes and `evals` reads.
//!
//! A row is an [`Entry`] (what measured it, where, with which build and flags, the samples themselves) beside the
//! columns of its table: [`Run`] for one model at work, [`LoadRun`] for a server under clients, [`QualityRun`] for what
//! a model knows or how far it strays from another. [`Database::insert`] adds one, [`Database::select`] finds them.
//! [`MachineIdentity`] names the machine, [`MachineState`] says whether it was quiet enough for its numbers to be quoted,
//! [`Statistics`] sums samples up.

mod cell;
mod database;
mod error;
mod identity;
mod rows;
mod state;
mod statistics;

pub use cell::{Cell, CellKind, Column};
pub use database::{Database, FILE, Filter};
pub use error::RecordError;
pub use identity::MachineIdentity;
pub use rows::{Columns, Entry, Figure, Figures, LoadRun, QualityRun, Recorded, Run, Table};
pub use state::{BigProcess, MachineState};
pub use statistics::{Statistics, percentile};
