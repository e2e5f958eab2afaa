//! The row order of llama's query and key projections.
//!
//! llama.cpp rotates neighbouring elements of a head, Hugging Face's llama the first half against the second,
//! so its converter reorders the rows of `attn_q` and `attn_k` (`LlamaModel.permute`): within each head, row
//! `half * (d / 2) + pair` becomes row `pair * 2 + half`. Here the order is undone, on stored rows of any type,
//! since a quantized row is a unit of its own. Only the llama architecture is stored that way.

/// Where the rows of a tensor come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As stored.
    Stored,
    /// Permuted within heads of this many rows (even and not zero).
    Heads(usize),
}

impl RowOrder {
    /// The stored row that holds row `row` of the Hugging Face tensor.
    pub fn stored_row(self, row: usize) -> usize {
        match self {
            Self::Stored => row,
            Self::Heads(size) => {
                let (head, within) = (row / size, row % size);
                let (half, pair) = (within / (size / 2), within % (size / 2));
                head * size + pair * 2 + half
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undoes_the_converters_permutation() {
        // reshape(heads, 2, size / 2).swapaxes(1, 2) over the row numbers, as the converter does it.
        let (heads, size) = (3, 8);
        let mut stored = Vec::new();
        for head in 0..heads {
            for pair in 0..size / 2 {
                for half in 0..2 {
                    stored.push(head * size + half * (size / 2) + pair);
                }
            }
        }
        let restored: Vec<_> =
            (0..heads * size).map(|row| stored[RowOrder::Heads(size).stored_row(row)]).collect();
        assert_eq!(restored, (0..heads * size).collect::<Vec<_>>());
    }
}
