//! `convert`: how long conversions take, and how much memory.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mlx_bun::checkpoint::environment::Environment;
use mlx_bun::record::{Figures, Run, percentile};
use mlx_bun::registry::select::select_model;
use serde_json::{Map, Value, json};

use super::args::ReportArgs;
use super::figures::Column;
use super::session::{Ending, Measured, Session, Subject};
use super::store::levers_of_environment;
use super::temp_folder::TempFolder;
use crate::args::model::ModelArgs;
use crate::child::GuardedChild;
use crate::error::Complaint;
use crate::exit::ExitStatus;
use crate::generate::MORE;
use crate::printer::Printer;
use crate::recorder::recorded_path;
use crate::resident_memory::peak_bytes;

const EXAMPLES: &str = "\
Examples:
  mlx-bun bench-matrix convert --model ./my-model
  mlx-bun bench-matrix convert --model ./my-model --cells q4,q8 --repeats 5 --json";

/// How often the memory of the child is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of its standard error that are looked at.
const MOST_WORDS: u64 = 1 << 20;

/// Measure conversions: time, memory and size of the result
///
/// Each cell is `mlx-bun convert` in a process of its own; what it writes is removed again.
#[derive(Clone, Debug, clap::Args)]
#[command(args_override_self = true, after_help = MORE, after_long_help = EXAMPLES)]
pub struct ConvertMatrixArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Conversions of a cell; the table has their median [default: 3; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Cells")]
    repeats: Option<u32>,

    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: &[Column] =
    &[("seconds", "seconds"), ("best", "seconds_best"), ("memory", "peak_bytes"), ("result", "output_bytes")];

struct Mode {
    name: &'static str,
    flags: &'static [&'static str],
    /// Whether `--quick` has it.
    quick: bool,
    /// Whether some models cannot have it.
    optional: bool,
}

const QUANTIZED: Mode = Mode { name: "", flags: &[], quick: false, optional: false };

const MODES: &[Mode] = &[
    Mode { name: "q4", flags: &["--quantize", "--requantize", "--q-bits", "4"], quick: true, ..QUANTIZED },
    Mode { name: "q8", flags: &["--quantize", "--requantize", "--q-bits", "8"], quick: true, ..QUANTIZED },
    Mode { name: "mxfp4", flags: &["--quantize", "--requantize", "--q-mode", "mxfp4"], ..QUANTIZED },
    Mode { name: "mxfp8", flags: &["--quantize", "--requantize", "--q-mode", "mxfp8"], ..QUANTIZED },
    Mode { name: "nvfp4", flags: &["--quantize", "--requantize", "--q-mode", "nvfp4"], ..QUANTIZED },
    Mode {
        name: "mixed_4_6",
        flags: &["--quantize", "--requantize", "--quant-predicate", "mixed_4_6"],
        ..QUANTIZED
    },
    Mode { name: "bfloat16", flags: &["--dtype", "bfloat16"], optional: true, ..QUANTIZED },
    Mode { name: "gguf-q8_0", flags: &["--to-gguf", "Q8_0"], optional: true, ..QUANTIZED },
    Mode { name: "gguf-q4_0", flags: &["--to-gguf", "Q4_0"], optional: true, ..QUANTIZED },
];

impl ConvertMatrixArgs {
    /// Runs the verb.
    ///
    /// # Errors
    /// What cannot be measured at all; what goes wrong in a cell is in the report.
    pub fn run(&self, printer: &Printer) -> anyhow::Result<ExitStatus> {
        let modes: Vec<&Mode> = MODES.iter().filter(|mode| !self.report.quick || mode.quick).collect();
        let names: Vec<String> = modes.iter().map(|mode| mode.name.to_owned()).collect();
        Session::check_names(&self.report, &names)?;
        let name = self.model.resolve(None, true)?;
        let source = select_model(name.as_deref(), &Environment::of_process())?.source;
        let model = recorded_path(&source);
        let repeats = self.repeats.unwrap_or(if self.report.quick { 1 } else { 3 });
        let subject =
            Subject { verb: "bench-matrix convert", stack: "mlx-bun", model: &model, url: None, flags: &[] };
        let mut session = Session::begin::<Run>(&subject, &self.report, settings(repeats), printer)?;
        for mode in modes {
            let flags = mode.flags.iter().map(|flag| (*flag).to_owned()).collect();
            let measure = |session: &Session| measure(session, mode, &model, repeats);
            if !session.cell(mode.name, flags, row, measure) {
                break;
            }
        }
        session.finish(&Ending { columns: COLUMNS, guarded: &["seconds"] })
    }
}

fn settings(repeats: u32) -> Map<String, Value> {
    let settings = json!({"repeats": repeats, "environment": levers_of_environment()});
    settings.as_object().cloned().unwrap_or_default()
}

fn row(session: &Session, figures: &Figures) -> Run {
    Run {
        model_path: session.document.model.clone(),
        peak_bytes: figures.get("peak_bytes").map(|bytes| bytes as u64),
        ..Run::default()
    }
}

fn measure(session: &Session, mode: &Mode, model: &str, repeats: u32) -> anyhow::Result<Measured> {
    let (mut seconds, mut peak, mut size) = (Vec::new(), None, 0);
    for _ in 0..repeats {
        let folder = TempFolder::new()?;
        let to_file = mode.flags.contains(&"--to-gguf");
        let place = folder.path().join(if to_file { "out.gguf" } else { "out" });
        let flag = if to_file { "--gguf-path" } else { "--mlx-path" };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--no-progress", "-q", "convert", "--model", model]).args(mode.flags);
        command.arg(flag).arg(&place).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut running = GuardedChild::spawn(&mut command)?;
        let complaint = running.child.stderr.take().map(|mut stderr| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = std::io::Read::read_to_end(&mut stderr.by_ref().take(MOST_WORDS), &mut text);
                let _ = std::io::copy(&mut stderr, &mut std::io::sink());
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        let status = loop {
            peak = peak.max(peak_bytes(running.id()));
            if let Some(status) = running.try_wait()? {
                break status;
            }
            if session.interrupt.is_set() {
                running.kill();
                return Ok(Measured::Interrupted);
            }
            std::thread::sleep(LOOK);
        };
        seconds.push(started.elapsed().as_secs_f64());
        if !status.success() {
            let text = complaint.and_then(|reader| reader.join().ok()).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            let why = line.unwrap_or("the conversion failed without a word").to_owned();
            return match mode.optional && refused(line) {
                true => Ok(Measured::Unavailable(why)),
                false => Err(Complaint::failure(why).into()),
            };
        }
        size = bytes_of(&place);
    }
    let mut figures = Figures::default();
    figures.add("seconds", percentile(&seconds, 0.5).unwrap_or(f64::NAN), "s");
    figures.add("seconds_best", percentile(&seconds, 0.0).unwrap_or(f64::NAN), "s");
    if let Some(peak) = peak {
        figures.add("peak_bytes", peak as f64, "bytes");
    }
    figures.add("output_bytes", size as f64, "bytes");
    Ok(Measured::Figures { figures, samples: json!({"seconds": seconds}), note: None })
}

/// Whether a conversion refused this model, rather than that the system failed it: without a word it was killed.
fn refused(said: Option<&str>) -> bool {
    said.is_some_and(|said| !said.contains("os error"))
}

/// Of a file, or of the files of a folder.
fn bytes_of(path: &Path) -> u64 {
    let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => size(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_no_missing_feature() {
        assert!(refused(Some("model type `x` has no GGUF architecture here")));
        assert!(!refused(Some("cannot write `x`: No space left on device (os error 28)")));
        assert!(!refused(None));
    }
}
