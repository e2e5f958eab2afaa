//! The models on this machine: what the Hugging Face cache and the user's own folders hold, kept in one SQLite file
//! and read from headers alone; which of them a query means; whether one fits into memory; what can be deleted.

mod database;
mod error;
mod facts;
pub mod fit;
pub mod gc;
pub mod machine;
mod model;
mod scan;
pub mod select;

pub use database::Registry;
pub use error::{QueryError, RegistryError};
pub use model::{Filter, Model, Tier};
pub use scan::ScanReport;
