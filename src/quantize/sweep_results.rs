//! Results of a sweep as they are kept between runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::sensitivity::SweepOptions;
use crate::checkpoint::atomic_file::{AtomicFileError, write_bytes_atomically};

/// Whether a file's text is that of results of probing, ours or mlx-lm's pairs of modules and sensitivities: nothing
/// else may be replaced by such.
pub fn is_sensitivities(text: &[u8]) -> bool {
    serde_json::from_slice::<Stored>(text).is_ok()
        || serde_json::from_slice::<Vec<(String, f64)>>(text).is_ok_and(|pairs| !pairs.is_empty())
}

/// The file's content.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
        assert!(is_sensitivities(&std::fs::read(&file).unwrap()));
        assert!(is_sensitivities(br#"[["model.layers.0.mlp.up_proj", 0.5]]"#));
        for other in ["{", "[]", "5", "null", "{}", r#"{"model": "m", "precious": 1}"#, r#"{"precious": 1}"#]
        {
            assert!(!is_sensitivities(other.as_bytes()), "{other}");
        }
        std::fs::write(&file, b"{").unwrap();
        assert!(SweepResults::open(&file, "m", &options).get("a").is_none());
    }
}
