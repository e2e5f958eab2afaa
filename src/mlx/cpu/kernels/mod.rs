//! The kernels. All take slices, an [`Isa`](super::Isa) and a [`Pool`](super::Pool), check every shape, and return
//! a typed error instead of touching memory they were not given.
pub mod floats;
pub mod matmul;

pub use floats::{Floats, FloatsMut};
