//! Low-rank adapters (LoRA, DoRA) over linear modules: reading them, applying them at run time, and the weight that
//! an adapted module amounts to. Whole weights come in the same kind of folder.

mod adapter;
mod error;
mod low_rank;
mod stack;
mod whole;

pub use adapter::Adapter;
pub use error::AdapterError;
pub use low_rank::{Dropout, LowRank};
pub use stack::{AdapterSet, Adapters, FittedAdapter, Kind, Module, ModuleAdapters};
pub use whole::WholeWeights;
