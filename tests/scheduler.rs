//! The engine over the tiny checkpoints: what is computed together is what would have been computed alone, and nobody
//! hurts anybody else.

#![allow(clippy::unwrap_used)] // a test may panic

#[path = "scheduler/adapters.rs"]
mod adapters;
#[path = "scheduler/batches.rs"]
mod batches;
#[path = "scheduler/budgets.rs"]
mod budgets;
#[path = "scheduler/lifecycle.rs"]
mod lifecycle;
#[path = "scheduler/prefixes.rs"]
mod prefixes;
#[path = "scheduler/rows.rs"]
mod rows;
#[path = "support/engine.rs"]
mod support;
