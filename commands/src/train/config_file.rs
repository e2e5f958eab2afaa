//! `--config`: a YAML file of settings.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Complaint;

/// Names that differ in more letters than this are not taken for each other.
const NEAR: usize = 3;

/// Reads the settings.
///
/// # Errors
/// The file cannot be read, or holds no settings.
pub fn read(file: &Path) -> Result<Map<String, Value>, Complaint> {
    let shown = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Complaint::failure(format!("cannot read `{shown}`: {error}")))?;
    let value: Value = serde_saphyr::from_str(&text).map_err(|error| {
        let said = error.to_string();
        let line = said.lines().next().unwrap_or_default();
        // The parser tells its own programmers what to set.
        let (before, after) =
            line.split_once(", set DuplicateKeyPolicy in Options if acceptable").unwrap_or((line, ""));
        Complaint::usage(format!("{shown}: not valid YAML: {before}{after}"))
    })?;
    match value {
        Value::Object(fields) => Ok(fields),
        Value::Null => Ok(Map::new()),
        _ => Err(Complaint::usage(format!("{shown}: settings are `name: value` lines"))),
    }
}

/// The known name that is most like another, if any is.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.map(|known| (strsim::levenshtein(name, known), known)).min()?;
    (near.0 <= NEAR.min(name.chars().count() / 2)).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found() {
        let known = ["learning_rate", "iters", "seed"];
        let of = |name| nearest(name, known.into_iter());
        assert_eq!(of("learning-rate"), Some("learning_rate"));
        assert_eq!(of("lerning_rate"), Some("learning_rate"));
        assert_eq!(of("iter"), Some("iters"));
        assert_eq!(of("whatever"), None);
    }

    #[test]
    fn what_is_wrong_is_said_in_the_words_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.yaml");
        let wrong = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read(&file).unwrap_err()
        };
        let error = wrong("iters: 1\niters: 2\n");
        assert!(error.to_string().contains("duplicate") && !error.to_string().contains("Options"), "{error}");
        assert_eq!(error.status, crate::exit::ExitStatus::Usage);
        assert_eq!(wrong("- 1\n").status, crate::exit::ExitStatus::Usage);
        assert_eq!(wrong("a: [1\n").status, crate::exit::ExitStatus::Usage);
    }
}
