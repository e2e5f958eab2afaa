//! Writes a model's directory so that it is there whole or not at all: filled under another name beside its
//! place, synced, renamed.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;

use super::error::shown_path;
use super::json_writer::python_json;
use super::safetensors_writer::{SafetensorsStream, WriteError};
use super::shards::INDEX_NAME;
use super::tensor::ElementType;

/// Bytes that a shard takes at most, unless a single tensor is larger (mlx-lm `utils.py`, `MAX_FILE_SIZE_GB`).
pub const MAX_SHARD_BYTES: usize = 5 << 30;

/// Why a model was not written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Something is there already.
    #[error("{} exists already; remove it or name another folder", shown_path(path))]
    Exists {
        /// The directory that was to be made.
        path: PathBuf,
    },
    /// Another process is writing this model.
    #[error("another process is writing {} (it holds {})", shown_path(path), shown_path(partial))]
    Busy {
        /// The directory that was to be made.
        path: PathBuf,
        /// Its name while it is being filled.
        partial: PathBuf,
    },
    /// The file system.
    #[error("cannot write {}: {cause}", shown_path(path))]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file of weights.
    #[error(transparent)]
    Weights(#[from] WriteError),
}

/// A model directory that is being filled. Dropped before [`SnapshotWriter::commit`], it is gone.
#[derive(Debug)]
pub struct SnapshotWriter {
    target: PathBuf,
    partial: PathBuf,
    /// Locked as long as this writer lives, so that a second one does not take the directory for a left-over.
    handle: File,
    committed: bool,
}

impl SnapshotWriter {
    /// Begins a directory at `target`, where nothing may be. What a killed process left half-way is removed.
    ///
    /// # Errors
    /// When something is at `target`, another process is at it, or the parent cannot be written.
    pub fn create(target: &Path) -> Result<Self, SnapshotError> {
        let unwritable = |path: &Path| {
            let path = path.to_owned();
            move |cause| SnapshotError::Write { path, cause }
        };
        if fs::symlink_metadata(target).is_ok() {
            return Err(SnapshotError::Exists { path: target.to_owned() });
        }
        let name = target.file_name().ok_or_else(|| SnapshotError::Exists { path: target.to_owned() })?;
        let mut partial_name = std::ffi::OsString::from(".");
        partial_name.push(name);
        partial_name.push(".partial");
        let partial = target.with_file_name(partial_name);
        let mut left_over = false;
        loop {
            fs::create_dir_all(&partial).map_err(unwritable(&partial))?;
            let handle = File::open(&partial).map_err(unwritable(&partial))?;
            match handle.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(SnapshotError::Busy { path: target.to_owned(), partial });
                }
                Err(TryLockError::Error(cause)) => return Err(unwritable(&partial)(cause)),
            }
            let filled = fs::read_dir(&partial).map_err(unwritable(&partial))?.next().is_some();
            if !filled {
                return Ok(Self { target: target.to_owned(), partial, handle, committed: false });
            }
            if left_over {
                return Err(SnapshotError::Busy { path: target.to_owned(), partial });
            }
            left_over = true;
            fs::remove_dir_all(&partial).map_err(unwritable(&partial))?;
        }
    }

    /// Where the files lie until the end.
    pub fn directory(&self) -> &Path {
        &self.partial
    }

    /// Writes a file, in a folder of the directory if `name` says so.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let path = self.partial.join(name);
        let write = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|cause| SnapshotError::Write { path: path.clone(), cause })
    }

    /// Writes a JSON file as mlx-lm does.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), SnapshotError> {
        let text = python_json(value)
            .map_err(|error| SnapshotError::Write { path: self.partial.join(name), cause: error.into() })?;
        self.write(name, &text)
    }

    /// Copies a file under its own name; links are followed.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn copy(&self, file: &Path) -> Result<(), SnapshotError> {
        let Some(name) = file.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
        let bytes = fs::read(file).map_err(|cause| SnapshotError::Write { path: file.to_owned(), cause })?;
        self.write(name, &bytes)
    }

    /// Begins the weights: which tensors there will be, in which order they come, and how many numbers they stand
    /// for (a packed weight for those it was packed from).
    pub fn weights(&self, tensors: Vec<TensorSpec>, parameters: u64) -> WeightsWriter<'_> {
        WeightsWriter::new(self, tensors, parameters, MAX_SHARD_BYTES)
    }

    /// Puts the directory in its place.
    ///
    /// # Errors
    /// When something is there by now, or the disk fails.
    pub fn commit(mut self) -> Result<(), SnapshotError> {
        let failed = |cause| SnapshotError::Write { path: self.target.clone(), cause };
        self.handle.sync_all().map_err(failed)?;
        if fs::symlink_metadata(&self.target).is_ok() {
            return Err(SnapshotError::Exists { path: self.target.clone() });
        }
        fs::rename(&self.partial, &self.target).map_err(failed)?;
        self.committed = true;
        let parent = match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)
    }
}

impl Drop for SnapshotWriter {
    fn drop(&mut self) {
        if !self.committed {
            // The error that brought us here is the one to report.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: ElementType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of the tensor; `usize::MAX` when they cannot be counted, which the writer refuses.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes_of(&self.shape).unwrap_or(usize::MAX)
    }
}

/// Shards and their index, filled tensor by tensor in the announced order.
#[derive(Debug)]
pub struct WeightsWriter<'a> {
    snapshot: &'a SnapshotWriter,
    shards: Vec<Vec<TensorSpec>>,
    parameters: u64,
    /// The shard being filled: its number and file.
    open: Option<(usize, SafetensorsStream)>,
    /// Tensors of the open shard that were written.
    written: usize,
}

impl<'a> WeightsWriter<'a> {
    fn new(snapshot: &'a SnapshotWriter, tensors: Vec<TensorSpec>, parameters: u64, limit: usize) -> Self {
        let mut shards: Vec<Vec<TensorSpec>> = Vec::new();
        let mut size = 0usize;
        for tensor in tensors {
            let bytes = tensor.bytes();
            size = size.saturating_add(bytes);
            match shards.last_mut() {
                Some(shard) if size <= limit => shard.push(tensor),
                _ => {
                    size = bytes;
                    shards.push(vec![tensor]);
                }
            }
        }
        Self { snapshot, shards, parameters, open: None, written: 0 }
    }

    /// Files that the weights take.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    fn file_name(&self, shard: usize) -> String {
        match self.shards.len() {
            0 | 1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        }
    }

    /// Writes the next of the announced tensors.
    ///
    /// # Errors
    /// When it is not the one that comes next, has another size, or the disk is full.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let next = self.open.as_ref().map_or(0, |(shard, _)| *shard);
        let full =
            self.open.is_some() && self.shards.get(next).is_none_or(|shard| shard.len() == self.written);
        if full {
            self.close()?;
        }
        let shard = if full { next + 1 } else { next };
        let mut stream = match self.open.take() {
            Some((_, stream)) => stream,
            None => self.create(shard, name)?,
        };
        stream.write(name, bytes)?;
        self.written += 1;
        self.open = Some((shard, stream));
        Ok(())
    }

    fn create(&mut self, shard: usize, name: &str) -> Result<SafetensorsStream, SnapshotError> {
        let path = self.snapshot.partial.join(self.file_name(shard));
        let Some(tensors) = self.shards.get(shard) else {
            return Err(WriteError::Unannounced { tensor: name.to_owned() }.into());
        };
        let tensors: Vec<_> =
            tensors.iter().map(|spec| (spec.name.clone(), spec.dtype, spec.shape.clone())).collect();
        self.written = 0;
        Ok(SafetensorsStream::create(&path, &tensors, &format_metadata())?)
    }

    fn close(&mut self) -> Result<(), SnapshotError> {
        if let Some((_, stream)) = self.open.take() {
            stream.finish()?;
        }
        Ok(())
    }

    /// Ends the last shard and writes the index. Returns the bytes of all tensors.
    ///
    /// # Errors
    /// When a tensor was not written, or the disk fails.
    pub fn finish(mut self) -> Result<u64, SnapshotError> {
        if let Some((shard, _)) = &self.open
            && let Some(never) = self.shards.get(shard + 1).and_then(|shard| shard.first())
        {
            return Err(WriteError::Unannounced { tensor: never.name.clone() }.into());
        }
        self.close()?;
        let mut map = BTreeMap::new();
        let mut total = 0u64;
        for (index, shard) in self.shards.iter().enumerate() {
            for tensor in shard {
                map.insert(tensor.name.as_str(), self.file_name(index));
                total += tensor.bytes() as u64;
            }
        }
        let index = json!({
            "metadata": {"total_size": total, "total_parameters": self.parameters},
            "weight_map": map,
        });
        self.snapshot.write_json(INDEX_NAME, &index)?;
        Ok(total)
    }
}

/// What mlx-lm puts into the header of its files.
fn format_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "mlx".to_owned())])
}

#[cfg(test)]
mod tests {
    use super::super::shards::open_weights;
    use super::*;

    fn spec(name: &str, size: usize) -> TensorSpec {
        TensorSpec { name: name.to_owned(), dtype: ElementType::U8, shape: vec![size] }
    }

    fn children(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn shards_are_cut_at_the_limit_and_indexed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        let writer = SnapshotWriter::create(&target).unwrap();
        let tensors = vec![spec("b", 6), spec("a", 4), spec("big", 20), spec("c", 1)];
        let mut weights = WeightsWriter::new(&writer, tensors, 31, 10);
        assert_eq!(weights.shard_count(), 3);
        for (name, size) in [("b", 6), ("a", 4), ("big", 20), ("c", 1)] {
            weights.write(name, &vec![size as u8; size]).unwrap();
        }
        assert_eq!(weights.finish().unwrap(), 31);
        assert!(!target.exists());
        writer.commit().unwrap();
        let weights = open_weights(&target).unwrap();
        assert_eq!(weights.tensors["big"].bytes(), [20; 20]);
        let index = fs::read_to_string(target.join(INDEX_NAME)).unwrap();
        assert!(index.starts_with("{\n    \"metadata\": {\n        \"total_size\": 31,\n"), "{index}");
        assert!(index.contains("\"a\": \"model-00001-of-00003.safetensors\""), "{index}");
        assert_eq!(children(folder.path()), ["model"]);
    }

    #[test]
    fn nothing_is_left_of_a_writer_that_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        let writer = SnapshotWriter::create(&target).unwrap();
        let mut weights = writer.weights(vec![spec("a", 4), spec("b", 1)], 5);
        weights.write("a", &[0; 4]).unwrap();
        assert!(matches!(weights.finish(), Err(SnapshotError::Weights(WriteError::Unannounced { .. }))));
        drop(writer);
        assert!(children(folder.path()).is_empty());
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_a_live_one_is_not_disturbed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        fs::create_dir(folder.path().join(".model.partial")).unwrap();
        fs::write(folder.path().join(".model.partial/model.safetensors"), b"half").unwrap();
        let writer = SnapshotWriter::create(&target).unwrap();
        assert!(children(writer.directory()).is_empty());
        writer.write("config.json", b"{}").unwrap();
        assert!(matches!(SnapshotWriter::create(&target), Err(SnapshotError::Busy { .. })));
        writer.commit().unwrap();
        assert!(matches!(SnapshotWriter::create(&target), Err(SnapshotError::Exists { .. })));
        assert_eq!(children(folder.path()), ["model"]);
    }
}
