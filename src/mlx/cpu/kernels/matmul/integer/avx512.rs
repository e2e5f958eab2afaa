//! The integer kernels with AVX-512 and VNNI, whose instruction adds four products of bytes to each lane.

mod few;
mod rounding;
mod scales;
mod tile;
mod vectors;

pub(super) use few::{FEW, FEW_ROWS};
pub(super) use rounding::round_row;
pub(super) use tile::PANEL;
