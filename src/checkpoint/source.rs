//! What a model argument means: a directory, a GGUF file, a repository in the Hugging Face cache, or the
//! starter model when nothing is named.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::environment::Environment;
use super::error::{shown_name, shown_path};
use super::hub_cache::{HubCache, HubCacheError, is_repo_id, missing_files, origin_of};

/// File name of the starter model in [`Environment::mlx_bun_cache`]`/models`.
pub const STARTER_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// What to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A directory with config.json, tokenizer and safetensors files.
    Snapshot(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
}

impl ModelSource {
    /// The directory or file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Snapshot(path) | Self::Gguf(path) => path,
        }
    }
}

/// What a model argument was found to mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedModel {
    /// What to load.
    pub source: ModelSource,
    /// `org/name`, where the model lies in a Hugging Face cache.
    pub repo_id: Option<String>,
    /// Commit hash, where the model lies in a Hugging Face cache.
    pub revision: Option<String>,
}

/// Why a model argument means nothing.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Nothing was named and the starter model is not there.
    #[error(
        "no model is named and the starter model {} is missing; ./scripts/mlx-bun fetches it, or name a model \
         with --model",
        shown_path(path)
    )]
    NoStarter {
        /// Where it would be.
        path: PathBuf,
    },
    /// A path that does not exist.
    #[error("there is no model at {}", shown_path(path))]
    NoSuchPath {
        /// The path.
        path: PathBuf,
    },
    /// A path that is there but leads nowhere: a loop of links, a link to nothing, a closed folder.
    #[error("cannot use {}: {problem}", shown_path(path))]
    Unreachable {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// An address of a web page or a repository.
    #[error(
        "`{}` is an address, and models are named by path or hub id; {}",
        shown_name(argument),
        address_hint(argument)
    )]
    Address {
        /// The argument.
        argument: String,
    },
    /// Neither a path nor a repository id.
    #[error(
        "`{}` is no model: it is neither a directory with config.json, nor a .gguf file, nor a hub id like \
         org/name",
        shown_name(argument)
    )]
    NotAModel {
        /// The argument.
        argument: String,
    },
    /// A directory without a model.
    #[error("{} has no config.json{}", shown_path(directory), gguf_hint(ggufs))]
    NoConfig {
        /// The directory.
        directory: PathBuf,
        /// GGUF files in it.
        ggufs: Vec<String>,
    },
    /// A file of another kind.
    #[error("{} is not a .gguf file; for a safetensors model name its directory", shown_path(path))]
    NotGguf {
        /// The file.
        path: PathBuf,
    },
    /// A repository that cannot be used from the cache.
    #[error(transparent)]
    Hub(#[from] HubCacheError),
}

fn gguf_hint(ggufs: &[String]) -> String {
    match ggufs.first() {
        Some(first) => {
            format!(" but {} .gguf files; name one of them, such as {}", ggufs.len(), shown_name(first))
        }
        None => String::new(),
    }
}

/// Finds the model that an argument names, without touching the network.
///
/// A path that exists wins over a repository id, as in mlx-lm. A repository id may carry a revision:
/// `org/name@revision`.
///
/// # Errors
/// When there is no such model, or its cached copy is incomplete.
pub fn resolve_model(
    argument: Option<&str>,
    environment: &Environment,
) -> Result<ResolvedModel, SourceError> {
    let Some(argument) = argument else { return starter(environment) };
    let path = Path::new(argument);
    if argument.contains("://") {
        return Err(SourceError::Address { argument: argument.to_owned() });
    }
    reachable(path)?;
    if path.is_dir() {
        return local(in_directory(path)?, path);
    }
    if path.exists() {
        if !is_gguf(path) {
            return Err(SourceError::NotGguf { path: path.to_owned() });
        }
        return local(ModelSource::Gguf(path.to_owned()), path.parent().unwrap_or(path));
    }
    let (repo_id, revision) = match argument.split_once('@') {
        Some((repo_id, revision)) => (repo_id, Some(revision)),
        None => (argument, None),
    };
    if is_repo_id(repo_id) && !is_gguf(path) {
        return in_cache(repo_id, revision, environment);
    }
    let looks_like_path =
        is_gguf(path) || argument.starts_with(['/', '.', '~']) || argument.matches('/').count() > 1;
    if looks_like_path {
        return Err(SourceError::NoSuchPath { path: path.to_owned() });
    }
    Err(SourceError::NotAModel { argument: argument.to_owned() })
}

/// What to write instead of an address.
fn address_hint(argument: &str) -> String {
    let rest = argument.split_once("://").map_or("", |(_, rest)| rest);
    let (host, path) = if argument.starts_with("hf:") {
        ("hf.co", rest)
    } else {
        rest.split_once('/').unwrap_or((rest, ""))
    };
    let mut parts = path.split(['/', '?', '#']).filter(|part| !part.is_empty());
    match (host.trim_start_matches("www."), parts.next(), parts.next()) {
        ("huggingface.co" | "hf.co", Some(organisation), Some(name))
            if is_repo_id(&format!("{organisation}/{name}")) =>
        {
            format!("download it to the Hugging Face cache and give {organisation}/{name}")
        }
        _ => "download it and name its folder or .gguf file, or give its hub id, org/name".to_owned(),
    }
}

/// Refuses a path that is there but leads nowhere. One that is simply absent may be a hub id.
fn reachable(path: &Path) -> Result<(), SourceError> {
    let unreachable = |problem: String| Err(SourceError::Unreachable { path: path.to_owned(), problem });
    match fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            match fs::read_link(path) {
                Ok(target) => {
                    unreachable(format!("it is a link to {}, which is not there", shown_path(&target)))
                }
                Err(_) => Ok(()),
            }
        }
        // A prompt or a hub id that no file system takes for a name.
        Err(error)
            if matches!(error.kind(), io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput) =>
        {
            Ok(())
        }
        Err(error) => unreachable(error.to_string()),
    }
}

fn starter(environment: &Environment) -> Result<ResolvedModel, SourceError> {
    let path = environment.mlx_bun_cache().join("models").join(STARTER_FILE);
    if !path.is_file() {
        return Err(SourceError::NoStarter { path });
    }
    Ok(ResolvedModel { source: ModelSource::Gguf(path), repo_id: None, revision: None })
}

fn local(source: ModelSource, directory: &Path) -> Result<ResolvedModel, SourceError> {
    let (repo_id, revision) = origin_of(directory).unzip();
    Ok(ResolvedModel { source, repo_id, revision })
}

fn in_cache(
    repo_id: &str,
    revision: Option<&str>,
    environment: &Environment,
) -> Result<ResolvedModel, SourceError> {
    let snapshot = HubCache::from_environment(environment).find(repo_id, revision)?;
    let source = match in_directory(&snapshot.path) {
        Ok(ModelSource::Gguf(file)) => ModelSource::Gguf(file),
        Err(error @ SourceError::NoConfig { .. }) if has_gguf(&error) => return Err(error),
        Ok(ModelSource::Snapshot(_)) | Err(_) => {
            let missing = missing_files(&snapshot.path)?;
            if !missing.is_empty() {
                let (repo_id, snapshot) = (snapshot.repo_id, snapshot.path);
                return Err(HubCacheError::Incomplete { repo_id, snapshot, missing }.into());
            }
            ModelSource::Snapshot(snapshot.path)
        }
    };
    Ok(ResolvedModel { source, repo_id: Some(snapshot.repo_id), revision: Some(snapshot.commit) })
}

fn has_gguf(error: &SourceError) -> bool {
    matches!(error, SourceError::NoConfig { ggufs, .. } if !ggufs.is_empty())
}

/// The model of a directory: its config.json, else its only GGUF file.
fn in_directory(directory: &Path) -> Result<ModelSource, SourceError> {
    // A link to nothing counts: the model is broken then, not absent.
    if fs::symlink_metadata(directory.join("config.json")).is_ok() {
        return Ok(ModelSource::Snapshot(directory.to_owned()));
    }
    let unreadable = |cause| SourceError::Hub(HubCacheError::Read { path: directory.to_owned(), cause });
    let mut ggufs = Vec::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if is_gguf(&path) && path.is_file() {
            ggufs.push(path);
        }
    }
    ggufs.sort();
    match ggufs.as_slice() {
        [only] => Ok(ModelSource::Gguf(only.clone())),
        _ => {
            let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
            let ggufs = ggufs.iter().filter_map(name).collect();
            Err(SourceError::NoConfig { directory: directory.to_owned(), ggufs })
        }
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}
