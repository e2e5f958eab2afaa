//! Results of a sweep as they are kept between runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::sensitivity::SweepOptions;
use crate::checkpoint::atomic_file::{AtomicFileError, write_bytes_atomically};

/// The file's content.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Stored {
    /// What the results hold for.
    model: String,
    options: Option<SweepOptions>,
    /// Divergence by width, of each thing that was probed.
    modules: BTreeMap<String, BTreeMap<u8, f64>>,
}

/// Divergences that are written to a file as they come.
#[derive(Debug)]
pub(super) struct SweepResults {
    file: PathBuf,
    stored: Stored,
}

impl SweepResults {
    /// The file's results, if they are of the same model and options; else none.
    pub(super) fn open(file: &Path, model: &str, options: &SweepOptions) -> Self {
        let stored: Option<Stored> =
            std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let same = |stored: &Stored| stored.model == model && stored.options.as_ref() == Some(options);
        let fresh =
            || Stored { model: model.to_owned(), options: Some(options.clone()), ..Stored::default() };
        Self { file: file.to_owned(), stored: stored.filter(same).unwrap_or_else(fresh) }
    }

    /// What is known of one thing.
    pub(super) fn get(&self, name: &str) -> Option<&BTreeMap<u8, f64>> {
        self.stored.modules.get(name)
    }

    /// Keeps what was measured of one thing.
    pub(super) fn put(&mut self, name: &str, divergences: BTreeMap<u8, f64>) -> Result<(), AtomicFileError> {
        self.stored.modules.insert(name.to_owned(), divergences);
        let text = serde_json::to_vec(&self.stored)
            .map_err(|error| AtomicFileError { path: self.file.clone(), cause: error.into() })?;
        write_bytes_atomically(&self.file, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_another_sweep_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("results.json");
        let options = SweepOptions { candidates: vec![4, 8], group_size: 64, sequences: vec![vec![1, 2]] };
        let mut results = SweepResults::open(&file, "m", &options);
        results.put("a", BTreeMap::from([(4, 0.5)])).unwrap();
        assert_eq!(SweepResults::open(&file, "m", &options).get("a"), Some(&BTreeMap::from([(4, 0.5)])));
        assert!(SweepResults::open(&file, "n", &options).get("a").is_none());
        let other = SweepOptions { group_size: 32, ..options.clone() };
        assert!(SweepResults::open(&file, "m", &other).get("a").is_none());
        std::fs::write(&file, b"{").unwrap();
        assert!(SweepResults::open(&file, "m", &options).get("a").is_none());
    }
}
