//! Why a kernel refused its arguments.

use crate::PoolError;

/// Arguments that do not fit together, or a failure inside the work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A length or dimension differs from what the other arguments call for.
    #[error("{op}: {what} is {found} but must be {expected}")]
    Mismatch {
        /// The kernel.
        op: &'static str,
        /// The dimension or operand.
        what: &'static str,
        /// What the other arguments call for.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// A view reaches past the end of its buffer.
    #[error(
        "{op}: {what} has {found} elements but its shape and strides reach {needed}; pass the whole buffer"
    )]
    Short {
        /// The kernel.
        op: &'static str,
        /// The operand.
        what: &'static str,
        /// Elements that the view needs.
        needed: usize,
        /// Elements that the buffer has.
        found: usize,
    },
    /// A value that the kernel does not compute with.
    #[error("{op}: {what} is {found}; it must be {rule}")]
    Unsupported {
        /// The kernel.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// What was given.
        found: usize,
        /// What is possible.
        rule: &'static str,
    },
    /// Operands that must share an element type do not.
    #[error("{op}: {what} have different element types; convert them first")]
    MixedTypes {
        /// The kernel.
        op: &'static str,
        /// The operands.
        what: &'static str,
    },
    /// A cache that two sequences, or two steps, write to.
    #[error("{op}: a cache is in use by another sequence or step; give each sequence its own")]
    Shared {
        /// The kernel.
        op: &'static str,
    },
    /// A row index past the end of a table.
    #[error("{op}: index {index} is outside the table's {rows} rows")]
    IndexOutOfRange {
        /// The kernel.
        op: &'static str,
        /// The index.
        index: u32,
        /// Rows of the table.
        rows: usize,
    },
    /// The work failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Checks that `found` is `expected`.
pub(super) fn expect(
    op: &'static str,
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), KernelError> {
    if expected == found { Ok(()) } else { Err(KernelError::Mismatch { op, what, expected, found }) }
}

/// Checks that a view of `shape` with element strides `strides` stays within `found` elements.
pub(super) fn expect_reach<const N: usize>(
    op: &'static str,
    what: &'static str,
    shape: [usize; N],
    strides: [usize; N],
    found: usize,
) -> Result<(), KernelError> {
    if shape.contains(&0) {
        return Ok(());
    }
    let last = shape.iter().zip(strides).try_fold(0usize, |last, (&n, stride)| {
        (n - 1).checked_mul(stride).and_then(|step| last.checked_add(step))
    });
    let needed = last.and_then(|last| last.checked_add(1)).unwrap_or(usize::MAX);
    if needed <= found { Ok(()) } else { Err(KernelError::Short { op, what, needed, found }) }
}
