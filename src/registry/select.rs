//! Which model is meant: by a path, a repository's id, part of a name, or nothing at all. Never asks the network.

use std::path::{Path, PathBuf};

use super::error::QueryError;
use super::fit::pick;
use super::machine::Machine;
use super::model::{Filter, Model};
use super::{Registry, facts};
use crate::checkpoint::environment::Environment;
use crate::checkpoint::error::shown_path;
use crate::checkpoint::source::{ModelSource, ResolvedModel, SourceError, resolve_model};

/// Why no model is meant.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// As a path or repository id.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// As part of a name.
    #[error(transparent)]
    Query(#[from] QueryError),
    /// What was found is no model.
    #[error("{}: {problem}", shown_path(path))]
    Unreadable {
        /// What was found.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// Finds the model that an argument names: what [`resolve_model`] finds, else the one model of the registry whose
/// name or type has the argument in it; a whole id, `org/name`, means that repository alone. Without an argument it is the starter model, else the best that is there.
///
/// # Errors
/// There is no such model, or several; or its cached copy is incomplete.
pub fn select_model(argument: Option<&str>, environment: &Environment) -> Result<ResolvedModel, SelectError> {
    let error = match resolve_model(argument, environment) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    match (&error, argument) {
        // Not for a whole id that is not cached: another model of a longer name would be a surprise.
        (SourceError::NotAModel { .. }, Some(query)) => match query_model(query, environment) {
            Some(Ok(model)) => Ok(resolved(model)),
            Some(Err(ambiguous @ QueryError::Ambiguous { .. })) => Err(ambiguous.into()),
            _ => Err(error.into()),
        },
        (SourceError::NoStarter { .. }, None) => {
            let models = models(environment).unwrap_or_default();
            let picked = pick(&models, Machine::memory_here()).cloned();
            picked.map(resolved).ok_or_else(|| error.into())
        }
        _ => Err(error.into()),
    }
}

/// As [`select_model`] for a model that is only looked at: its facts, whether it is in the registry or not.
///
/// # Errors
/// There is no such model, or several; or it cannot be read.
pub fn select_entry(argument: &str, environment: &Environment) -> Result<Model, SelectError> {
    let found = select_model(Some(argument), environment)?;
    let path = found.source.path();
    let name = || path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let repo_id = found.repo_id.clone().unwrap_or_else(name);
    let facts = match &found.source {
        ModelSource::Gguf(file) => facts::of_gguf(file, &repo_id),
        ModelSource::Snapshot(directory) => facts::of_directory(directory, &repo_id, &|path| path.exists()),
    };
    facts.map_err(|problem| SelectError::Unreadable { path: path.to_owned(), problem })
}

/// The registry's answer to a query, after a look at what has changed. `None` when there is no registry: whoever
/// asks has a better error to tell.
fn query_model(query: &str, environment: &Environment) -> Option<Result<Model, QueryError>> {
    let mut registry = Registry::open(environment).ok()?;
    registry.scan().ok()?;
    registry.resolve(query).ok()
}

fn models(environment: &Environment) -> Option<Vec<Model>> {
    let mut registry = Registry::open(environment).ok()?;
    registry.scan().ok()?;
    registry.models(&Filter::default()).ok()
}

fn resolved(model: Model) -> ResolvedModel {
    let is_file = Path::new(&model.path).is_file();
    let repo_id = model.revision.is_some().then_some(model.repo_id);
    let source = if is_file { ModelSource::Gguf(model.path) } else { ModelSource::Snapshot(model.path) };
    ResolvedModel { source, repo_id, revision: model.revision }
}
