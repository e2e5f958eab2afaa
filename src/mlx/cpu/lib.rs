//! Our own kernels for plain CPUs, in Rust: no MLX type appears below this module.
//!
//! [`isa`] finds out which vector instructions the processor has, [`pool`] spreads work over its cores, and
//! [`kernels`] computes on plain slices. Every kernel accumulates in f32, and a row of its result depends neither
//! on the other rows, nor on how many there are, nor on the number of threads.
//!
//! The tests also run under AddressSanitizer (those that leak do so on purpose):
//! `ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo test -p mlx-bun-cpu --lib
//! --target x86_64-unknown-linux-gnu`.

pub mod allocation;
pub mod coding;
pub mod isa;
pub mod kernels;
pub mod pages;
pub mod phases;
pub mod pool;

pub use isa::{Isa, IsaError, Level};
pub use pool::{Pool, PoolError};
