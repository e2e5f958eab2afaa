//! What a transfer tells while it runs.

use std::time::Duration;

/// Told how far a transfer is, from several threads.
pub trait TransferProgress: Sync {
    /// Before the first byte: so many files with so many bytes.
    fn planned(&self, _files: usize, _bytes: u64) {}

    /// More bytes are there; `moved` says whether they came over the network or were there already.
    fn advanced(&self, _bytes: u64, _moved: bool) {}

    /// Bytes that had been counted are to be transferred anew.
    fn rewound(&self, _bytes: u64) {}

    /// A file is whole.
    fn finished(&self, _file: &str) {}

    /// The other side asked to be left alone for so long.
    fn waiting(&self, _time: Duration) {}

    /// Whether to stop. Asked often.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Tells nobody.
impl TransferProgress for () {}
