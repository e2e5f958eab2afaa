//! `mlx-bun goldens`: proves that the engine computes what mlx-lm computes, bit for bit.
//!
//! `check` replays recorded cells through the engine, `regen` records them with stock MLX, `list` says what there is.
//! For people who work on mlx-bun: all of it needs a checkout.

mod format;
mod regen;
mod replay;
mod report;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand};
use mlx_bun::checkpoint::safetensors::SafetensorsFile;
use mlx_bun::checkpoint::{Checkpoint, Config};
use mlx_bun::mlx::{self, DeviceKind};
use mlx_bun::models::{self, Model};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::compiled;
use crate::error::Complaint;
use format::{Cell, Expect, GoldenFile};
use replay::{Recording, Tensors, replay};
use report::{Entry, Report, Status};

/// Compare the engine with mlx-lm, bit for bit
#[derive(Args, Debug)]
pub struct Goldens {
    /// The checkout to use instead of the one around the current folder
    #[arg(long, value_name = "DIR", global = true)]
    root: Option<PathBuf>,

    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what is recorded for this machine class and MLX version
    List,
    /// Record anew with stock MLX and mlx-lm (makes a Python environment on first use)
    Regen {
        /// Only this family, e.g. llama or starter
        #[arg(long)]
        family: Option<String>,
    },
    /// Replay the recordings; exit status 1 unless every bit agrees
    Check {
        /// Only this family, e.g. llama or starter
        #[arg(long)]
        family: Option<String>,
        /// Print one JSON object instead of the matrix
        #[arg(long)]
        json: bool,
    },
}

impl Goldens {
    /// Runs the verb; false when a check finds a difference.
    ///
    /// # Errors
    /// When there is no checkout or no recording for this machine, or a program fails.
    pub fn run(&self, out: &mut dyn Write) -> Result<bool> {
        let root = checkout(self.root.as_deref())?;
        match &self.action {
            Action::Regen { family } => regen::regen(&root, family.as_deref()).map(|()| true),
            Action::List => list(&recorded(&root, None)?, out).map(|()| true),
            Action::Check { family, json } => {
                compiled::claim()?;
                let report = check(&root, family.as_deref())?;
                match json {
                    true => writeln!(out, "{}", report.to_json())?,
                    false => report.print(out)?,
                }
                Ok(report.passes())
            }
        }
    }
}

/// The checkout that is named, or the nearest folder above the current one that holds the goldens.
fn checkout(named: Option<&Path>) -> Result<PathBuf, Complaint> {
    let holds = |folder: &Path| folder.join("goldens/README.md").exists();
    if let Some(root) = named {
        return match holds(root) {
            true => Ok(root.to_owned()),
            false => Err(Complaint::usage(format!(
                "`{}` is no checkout of mlx-bun: it has no goldens",
                root.display()
            ))),
        };
    }
    let here = std::env::current_dir()
        .map_err(|error| Complaint::failure(format!("cannot tell the current directory: {error}")))?;
    here.ancestors().find(|folder| holds(folder)).map(Path::to_owned).ok_or_else(|| {
        Complaint::failure("there are no goldens here: neither in this folder nor above it")
            .hint("run this inside a checkout of mlx-bun, or name one with --root")
    })
}

/// The folder that keeps results of different arithmetic apart, relative to `goldens`.
fn place() -> PathBuf {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let arch = if os == "macos" && arch == "aarch64" { "arm64" } else { arch };
    let backend = match mlx::default_device() {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Gpu if os == "macos" => "metal",
        DeviceKind::Gpu => "cuda",
    };
    Path::new(&format!("{os}-{arch}-{backend}")).join(format!("mlx-{}", mlx::version()))
}

/// Golden files of this machine class with their paths, by name.
fn recorded(root: &Path, family: Option<&str>) -> Result<Vec<(PathBuf, GoldenFile)>> {
    let folder = root.join("goldens").join(place());
    let hint = "record it with `mlx-bun goldens regen`";
    let entries = fs::read_dir(&folder).with_context(|| format!("no {}; {hint}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        let file = GoldenFile::read(&path)?;
        if family.is_none_or(|family| family == file.family) {
            files.push((path, file));
        }
    }
    if files.is_empty() {
        bail!("nothing recorded for `{}` in {}; {hint}", family.unwrap_or("any family"), folder.display());
    }
    Ok(files)
}

fn list(files: &[(PathBuf, GoldenFile)], out: &mut dyn Write) -> Result<()> {
    let width = files.iter().map(|(_, file)| file.name().len()).max().unwrap_or(0);
    for (_, file) in files {
        let mut modes: Vec<&str> = Vec::new();
        for cell in &file.cells {
            if !modes.contains(&cell.mode.as_str()) {
                modes.push(&cell.mode);
            }
        }
        writeln!(out, "{:width$}  {:>3} cells: {}", file.name(), file.cells.len(), modes.join(", "))?;
    }
    let cells: usize = files.iter().map(|(_, file)| file.cells.len()).sum();
    writeln!(out, "{cells} cells of {} checkpoints ({})", files.len(), place().display())?;
    if let Some((_, file)) = files.first() {
        let pairs: Vec<_> = file.environment.iter().map(|(key, value)| format!("{key} {value}")).collect();
        writeln!(out, "recorded with {}", pairs.join(", "))?;
    }
    Ok(())
}

fn check(root: &Path, family: Option<&str>) -> Result<Report> {
    let mut report = Report { place: place().display().to_string(), entries: Vec::new() };
    for (path, file) in recorded(root, family)? {
        let prepared = Replayer::prepare(root, &path, &file);
        for cell in &file.cells {
            let status = match &prepared {
                Ok(replayer) => replayer.status(cell),
                Err(unusable) => unusable.status(),
            };
            let (mode, name) = (cell.mode.clone(), cell.name.clone());
            report.entries.push(Entry { checkpoint: file.name(), mode, cell: name, status });
        }
    }
    Ok(report)
}

/// Why no cell of a file can be replayed.
enum Unusable {
    Absent(String),
    Failed(String),
}

impl Unusable {
    fn status(&self) -> Status {
        match self {
            Self::Absent(why) => Status::Absent(why.clone()),
            Self::Failed(message) => Status::Failed(message.clone()),
        }
    }
}

/// One checkpoint with its recording.
struct Replayer {
    checkpoint: PathBuf,
    folder: PathBuf,
    kept: Tensors,
    model: Box<dyn Model>,
}

impl Replayer {
    fn prepare(root: &Path, golden: &Path, file: &GoldenFile) -> Result<Self, Unusable> {
        let checkpoint = root.join(&file.checkpoint);
        let weights = checkpoint.join("model.safetensors");
        if !weights.exists() {
            let how = "`mlx-bun goldens regen` makes it";
            return Err(Unusable::Absent(format!("no {}; {how}", file.checkpoint.display())));
        }
        let ready = || {
            if file_hash(&weights)? != file.weights_sha256 {
                bail!("{} is not the file of the recording", weights.display());
            }
            let kept = tensors(&golden.with_extension("safetensors"))?;
            let model = open_model(&checkpoint, &Map::new())?;
            let folder = golden.parent().unwrap_or(root).to_owned();
            Ok(Self { checkpoint: checkpoint.clone(), folder, kept, model })
        };
        ready().map_err(|error| Unusable::Failed(format!("{error:#}")))
    }

    fn status(&self, cell: &Cell) -> Status {
        let changed =
            (!cell.config_overrides.is_empty()).then(|| open_model(&self.checkpoint, &cell.config_overrides));
        let model = match &changed {
            None => &*self.model,
            Some(Ok(model)) => &**model,
            Some(Err(_)) if matches!(cell.expect, Expect::Refused(_)) => return Status::Exact,
            Some(Err(error)) => return Status::Failed(format!("{error:#}")),
        };
        match replay(cell, model, &Recording { kept: &self.kept, folder: &self.folder }) {
            Ok(Ok(())) => Status::Exact,
            Ok(Err(difference)) => Status::Different(difference),
            Err(error) => Status::Failed(format!("{error:#}")),
        }
    }
}

fn open_model(directory: &Path, overrides: &Map<String, Value>) -> Result<Box<dyn Model>> {
    let mut checkpoint = Checkpoint::open(directory)?;
    if let (false, Value::Object(mut root)) = (overrides.is_empty(), checkpoint.config.root().clone()) {
        root.extend(overrides.clone());
        checkpoint.config = Config::from_value(Value::Object(root), checkpoint.config.origin())?;
    }
    let tensors = checkpoint.take_tensors();
    Ok(models::load(&checkpoint.config, tensors, None)?)
}

fn tensors(path: &Path) -> Result<Tensors> {
    let file = SafetensorsFile::open(path)?;
    Ok(file.tensors().map(|(name, tensor)| (name.to_owned(), tensor)).collect())
}

fn file_hash(path: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    io::copy(&mut file, &mut digest).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
