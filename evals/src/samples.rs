//! The file of a run: a header, then a line a sample, each on the disk before the next is begun. A run that was killed
//! goes on from it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Version of the format.
pub const VERSION: u32 = 1;
/// What a header calls itself.
const KIND: &str = "mlx-bun-eval-samples";

/// What a run is of: two runs with the same header give the same samples. How many questions are asked at a time is not
/// part of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    kind: String,
    version: u32,
    /// The task.
    pub task: String,
    /// Questions of the run.
    pub questions: usize,
    /// The model: its name, and a fingerprint of its files.
    pub model: Map<String, Value>,
    /// Everything that decides the questions and the replies.
    pub settings: Map<String, Value>,
}

impl Header {
    /// A header of this version.
    pub fn new(
        task: &str,
        questions: usize,
        model: Map<String, Value>,
        settings: Map<String, Value>,
    ) -> Self {
        Self { kind: KIND.to_owned(), version: VERSION, task: task.to_owned(), questions, model, settings }
    }

    /// What differs from another header, in words; `None` if nothing does.
    fn difference(&self, other: &Self) -> Option<String> {
        if (&self.kind, self.version) != (&other.kind, other.version) {
            return Some("it is of another format".to_owned());
        }
        if self.task != other.task {
            return Some(format!("it is of task {}, not {}", other.task, self.task));
        }
        let fields = [("model", &self.model, &other.model), ("settings", &self.settings, &other.settings)];
        for (part, ours, theirs) in fields {
            let names: std::collections::BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
            for name in names {
                let (our, their) = (ours.get(name), theirs.get(name));
                if our != their {
                    let shown = |value: Option<&Value>| value.map_or("nothing".to_owned(), Value::to_string);
                    return Some(format!(
                        "its {part} has `{name}` {}, this run {}",
                        shown(their),
                        shown(our)
                    ));
                }
            }
        }
        (self.questions != other.questions)
            .then(|| format!("it has {} questions, this run {}", other.questions, self.questions))
    }
}

/// One question and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its place among the questions of the run, from 0.
    pub index: usize,
    /// What the task calls it.
    pub id: String,
    /// A part of the task that is scored for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Whether it counts as right.
    pub correct: bool,
    /// What was read out of the reply.
    pub answer: Value,
    /// The reply.
    pub output: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the reply.
    pub generated_tokens: usize,
    /// `stop`, `length`, `refused` (longer than the context), or `scored` where no reply was asked for.
    pub finish: String,
    /// What the task tells beside.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub detail: Map<String, Value>,
}

/// Why samples cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The file system.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// `read`, `write` or `create`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A line that is no sample.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// Samples of something else.
    #[error("{} cannot be continued: {difference}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs.
        difference: String,
    },
    /// A run that nobody asked to continue.
    #[error("{} exists already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// The samples of a run as they come, in a file or in memory only.
#[derive(Debug)]
pub struct SampleWriter {
    file: Option<(PathBuf, File)>,
    samples: BTreeMap<usize, Sample>,
}

impl SampleWriter {
    /// Keeps samples in memory.
    pub fn in_memory() -> Self {
        Self { file: None, samples: BTreeMap::new() }
    }

    /// Begins a file.
    ///
    /// # Errors
    /// There is one already, or it cannot be written.
    pub fn create(path: &Path, header: &Header) -> Result<Self, SampleError> {
        let io = |action| move |cause| SampleError::Io { action, path: path.to_owned(), cause };
        let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => file,
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {
                return Err(SampleError::Exists { path: path.to_owned() });
            }
            Err(cause) => return Err(io("create")(cause)),
        };
        append(&mut file, header).map_err(io("write"))?;
        Ok(Self { file: Some((path.to_owned(), file)), samples: BTreeMap::new() })
    }

    /// Goes on with a file, or begins it. A last line that was cut off is dropped; so is a file whose header was.
    ///
    /// # Errors
    /// The file is of another run, damaged, or cannot be read.
    pub fn resume(path: &Path, header: &Header) -> Result<Self, SampleError> {
        let io = |action| move |cause| SampleError::Io { action, path: path.to_owned(), cause };
        let mut file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Self::create(path, header),
            Err(cause) => return Err(io("read")(cause)),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io("read"))?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let (begun, samples) = read(bytes.get(..whole).unwrap_or_default(), path)?;
        if let Some(difference) = begun.as_ref().and_then(|begun| header.difference(begun)) {
            return Err(SampleError::Other { path: path.to_owned(), difference });
        }
        if let Some((line, index)) = samples.keys().enumerate().find(|(_, index)| **index >= header.questions)
        {
            let problem = format!("there is no question {index}");
            return Err(SampleError::Line { path: path.to_owned(), line: line + 2, problem });
        }
        file.set_len(whole as u64).map_err(io("write"))?;
        file.seek(SeekFrom::End(0)).map_err(io("write"))?;
        if begun.is_none() {
            append(&mut file, header).map_err(io("write"))?;
        }
        Ok(Self { file: Some((path.to_owned(), file)), samples })
    }

    /// Whether a question is answered.
    pub fn has(&self, index: usize) -> bool {
        self.samples.contains_key(&index)
    }

    /// How many are.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Adds a sample, and waits until the disk has it.
    ///
    /// # Errors
    /// The disk does not take it.
    pub fn add(&mut self, sample: &Sample) -> Result<(), SampleError> {
        if let Some((path, file)) = &mut self.file {
            append(file, sample).map_err(|cause| SampleError::Io {
                action: "write",
                path: path.clone(),
                cause,
            })?;
        }
        self.samples.insert(sample.index, sample.clone());
        Ok(())
    }

    /// All samples, in the order of the questions.
    pub fn into_samples(self) -> Vec<Sample> {
        self.samples.into_values().collect()
    }
}

/// Writes a line in one call, so that a kill leaves a whole line or a cut last one.
fn append(file: &mut File, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    file.write_all(&line)?;
    file.sync_data()
}

type Read = (Option<Header>, BTreeMap<usize, Sample>);

/// Reads whole lines: a header and samples. A sample that stands there twice counts once, as it was first.
fn read(bytes: &[u8], path: &Path) -> Result<Read, SampleError> {
    let mut lines = bytes.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    let problem =
        |line: usize, problem: String| SampleError::Line { path: path.to_owned(), line: line + 1, problem };
    let Some((_, first)) = lines.next() else { return Ok((None, BTreeMap::new())) };
    let header: Header = serde_json::from_slice(first)
        .map_err(|_| problem(0, "the file does not begin with the header of a run".to_owned()))?;
    let mut samples = BTreeMap::new();
    for (number, line) in lines {
        let sample: Sample = serde_json::from_slice(line)
            .map_err(|error| problem(number, format!("the line is no sample: {error}")))?;
        samples.entry(sample.index).or_insert(sample);
    }
    Ok((Some(header), samples))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(seed: u32) -> Header {
        let settings = Map::from_iter([("seed".to_owned(), Value::from(seed))]);
        Header::new("gsm8k", 5, Map::new(), settings)
    }

    fn sample(index: usize) -> Sample {
        Sample {
            index,
            id: format!("q{index}"),
            group: None,
            correct: index.is_multiple_of(2),
            answer: Value::from(index),
            output: "é\n\"x\"".repeat(index),
            prompt_tokens: 1,
            generated_tokens: 2,
            finish: "stop".to_owned(),
            detail: Map::new(),
        }
    }

    fn written() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.jsonl");
        let mut writer = SampleWriter::create(&path, &header(1)).unwrap();
        [2, 0, 1].into_iter().for_each(|index| writer.add(&sample(index)).unwrap());
        std::fs::read(&path).unwrap()
    }

    fn resumed(bytes: &[u8], header: &Header) -> Result<(Vec<Sample>, Vec<u8>), String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.jsonl");
        std::fs::write(&path, bytes).unwrap();
        let resumed = SampleWriter::resume(&path, header);
        let shown = path.display().to_string();
        let samples = resumed.map_err(|error| error.to_string().replace(&shown, "FILE"))?.into_samples();
        Ok((samples, std::fs::read(&path).unwrap()))
    }

    #[test]
    fn a_finished_file_comes_back_in_order() {
        let bytes = written();
        let (samples, kept) = resumed(&bytes, &header(1)).unwrap();
        assert_eq!(samples, [sample(0), sample(1), sample(2)]);
        assert_eq!(kept, bytes);
    }

    #[test]
    fn samples_of_another_run_are_not_continued() {
        let error = resumed(&written(), &header(2)).unwrap_err();
        assert_eq!(error, "FILE cannot be continued: its settings has `seed` 1, this run 2");
    }

    #[test]
    fn damage_before_the_last_line_is_placed() {
        let text = String::from_utf8(written()).unwrap().replacen("\"id\"", "\"di\"", 1);
        assert!(
            resumed(text.as_bytes(), &header(1)).unwrap_err().starts_with("FILE:2: the line is no sample")
        );
        assert!(resumed(b"hello\n", &header(1)).unwrap_err().starts_with("FILE:1: the file does not begin"));
    }

    #[test]
    fn a_file_is_not_begun_twice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.jsonl");
        SampleWriter::create(&path, &header(1)).unwrap();
        assert!(matches!(SampleWriter::create(&path, &header(1)), Err(SampleError::Exists { .. })));
    }

    proptest! {
        #[test]
        fn a_file_cut_anywhere_goes_on(cut in 0usize..1000) {
            let bytes = written();
            let cut = cut.min(bytes.len());
            let (samples, kept) = resumed(&bytes[..cut], &header(1)).unwrap();
            let lines = bytes[..cut].iter().filter(|byte| **byte == b'\n').count();
            prop_assert_eq!(samples.len(), lines.saturating_sub(1));
            prop_assert!(bytes.starts_with(&kept));
            prop_assert!(kept.ends_with(b"\n"));
        }
    }
}
