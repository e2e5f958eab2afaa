//! The integer kernels with AVX2, which multiplies bytes with bytes and halves with halves, but adds up only pairs.

mod few;
mod rounding;
mod scales;
mod tile;
mod vectors;

pub(super) use few::{FEW, FEW_ROWS};
pub(super) use rounding::round_row;
pub(super) use tile::PANEL;
