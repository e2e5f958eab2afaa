//! The rows of a run: examples in batches.

use sha2::{Digest, Sha256};

use super::batches::{BatchOptions, Batches};
use super::dataset::Example;
use super::trainer::TrainError;

/// Examples and their batches.
pub(super) struct Rows {
    pub(super) examples: Vec<Example>,
    pub(super) batches: Batches,
}

impl Rows {
    pub(super) fn new(
        name: &'static str,
        examples: Vec<Example>,
        options: &BatchOptions,
    ) -> Result<Self, TrainError> {
        let batches =
            Batches::new(&examples, options).map_err(|cause| TrainError::TooFew { rows: name, cause })?;
        Ok(Self { examples, batches })
    }

    /// Tells these rows from others: tokens, and which of them are learned.
    pub(super) fn fingerprint(&self) -> String {
        let mut hasher = Sha256::new();
        for sequence in self.examples.iter().flat_map(|example| &example.sequences) {
            hasher.update((sequence.tokens.len() as u64).to_le_bytes());
            hasher.update((sequence.prompt as u64).to_le_bytes());
            sequence.tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        }
        hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Whether there are enough rows for a batch; what a run checks before it begins.
///
/// # Errors
/// Names the rows that are too few.
pub fn check_rows(
    name: &'static str,
    examples: &[Example],
    options: &BatchOptions,
) -> Result<(), TrainError> {
    match Batches::new(examples, options) {
        Ok(_) => Ok(()),
        Err(cause) => Err(TrainError::TooFew { rows: name, cause }),
    }
}
