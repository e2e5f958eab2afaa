//! The kernels. All take slices, an [`Isa`](super::Isa) and a [`Pool`](super::Pool), check every shape, and return
//! a typed error instead of touching memory they were not given.
mod affine;
pub mod attention;
pub mod error;
pub mod floats;
mod pieces;
mod simd;
pub mod views;

pub use error::KernelError;
pub use floats::{Floats, FloatsMut};
pub use views::{Heads, Rows};
