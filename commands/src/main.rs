//! The command `mlx-bun`.

fn main() {}
