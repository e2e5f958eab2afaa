//! One run of one command.

use std::io::{self, Read};
use std::process::{ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::arm::Arm;
use super::output::{Figure, Identity, Output};
use crate::child::{GuardedChild, signal_group};
use crate::error::Complaint;

/// How often it is asked whether a run may go on.
const LOOK: Duration = Duration::from_millis(20);
/// How long what a command has started may keep its output open after it.
const CLOSING: Duration = Duration::from_secs(2);
/// Of standard error, the last so many bytes are kept for a message.
const KEPT_ERRORS: usize = 64 << 10;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Seconds on the clock, from start to end.
    pub wall: f64,
    /// What is compared.
    pub figure: f64,
    /// What it said.
    pub identity: Identity,
}

/// Runs of A and B, pair by pair.
pub type Pairs = Vec<(Sample, Sample)>;

/// What a run may take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// On the clock.
    pub time: Duration,
    /// Bytes of output that are kept, to look for figures in them; of more only the hash is known.
    pub kept: usize,
    /// Bytes of output at most.
    pub output: u64,
}

impl Allowance {
    /// The usual sizes of output.
    pub fn of(time: Duration) -> Self {
        Self { time, kept: 16 << 20, output: 1 << 30 }
    }
}

/// Why a run was ended.
enum Ended {
    Itself(ExitStatus, Instant),
    Late,
    Flooding,
    Stopped,
}

/// Runs a command to its end; `None` when `stop` says so, which is asked meanwhile.
///
/// # Errors
/// It cannot be started, fails, takes or prints more than it may, or does not print the figure.
pub fn run(
    arm: &Arm,
    figure: &Figure,
    allowance: Allowance,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<Option<Sample>> {
    let failed = |problem: String| Complaint::failure(format!("`{}`: {problem}", arm.label));
    let mut command = Command::new(&arm.program);
    command.args(&arm.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.envs(arm.environment.iter().map(|(name, value)| (name, value)));
    let cannot_start = |error: io::Error| failed(format!("cannot start {}: {error}", arm.program.display()));
    let mut printed = Printed::default();
    let mut errors = Vec::new();
    let flooding = AtomicBool::new(false);
    let started = Instant::now();
    let mut guarded = GuardedChild::spawn(&mut command).map_err(cannot_start)?;
    let (stdout, stderr) = (guarded.child.stdout.take(), guarded.child.stderr.take());
    let group = guarded.id();
    let ended = std::thread::scope(|scope| {
        let (done, closed) = channel::<()>();
        let also_done = done.clone();
        let (kept, said, flooded) = (&mut printed, &mut errors, &flooding);
        scope.spawn(move || {
            kept.read(stdout, allowance, flooded);
            drop(done);
        });
        scope.spawn(move || {
            read_errors(stderr, said);
            drop(also_done);
        });
        let ended = wait(&mut guarded, started, allowance.time, flooded, stop);
        // What the command has started may go on, and keep the pipes open.
        if closed.recv_timeout(CLOSING) == Err(RecvTimeoutError::Timeout) {
            signal_group(group, libc::SIGKILL);
        }
        ended
    });
    // A command whose output nobody reads any more may end by itself.
    let ended = match ended {
        Ended::Itself(..) if flooding.load(Ordering::Relaxed) => Ended::Flooding,
        ended => ended,
    };
    let (status, end) = match ended {
        Ended::Stopped => return Ok(None),
        Ended::Late => {
            let seconds = allowance.time.as_secs_f64();
            return Err(failed(format!("it did not end within {seconds} s"))
                .hint("give it more time with --run-timeout")
                .into());
        }
        Ended::Flooding => {
            return Err(failed(format!("it printed more than {} MiB", allowance.output >> 20))
                .hint("let it print less; output is compared, not kept")
                .into());
        }
        Ended::Itself(status, end) => (status, end),
    };
    if !status.success() {
        let stderr = String::from_utf8_lossy(&errors);
        let line = stderr.lines().find(|line| line.starts_with("error: ")).or_else(|| stderr.lines().last());
        let line = line.unwrap_or("it said nothing").trim_start_matches("error: ");
        return Err(failed(format!("{line} ({status})")).into());
    }
    let wall = (end - started).as_secs_f64();
    let said = printed.output();
    let figure = figure.of(wall, &said).map_err(failed)?;
    Ok(Some(Sample { wall, figure, identity: said.identity }))
}

/// Waits for the end of a child. The clock is read by a thread that sleeps until then, so that nothing is rounded.
fn wait(
    guarded: &mut GuardedChild,
    started: Instant,
    time: Duration,
    flooding: &AtomicBool,
    stop: &dyn Fn() -> bool,
) -> Ended {
    std::thread::scope(|scope| {
        let group = guarded.id();
        let (sender, ends) = channel();
        scope.spawn(move || {
            let status = guarded.wait();
            let _ = sender.send((status, Instant::now()));
        });
        let early = loop {
            match ends.recv_timeout(LOOK) {
                Ok((Ok(status), at)) => return Ended::Itself(status, at),
                Ok((Err(_), _)) | Err(RecvTimeoutError::Disconnected) => return Ended::Stopped,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if stop() {
                break Ended::Stopped;
            }
            if flooding.load(Ordering::Relaxed) {
                break Ended::Flooding;
            }
            if started.elapsed() >= time {
                break Ended::Late;
            }
        };
        signal_group(group, libc::SIGKILL);
        early
    })
}

/// What was printed so far: its beginning, and once that is no longer all, the hash of everything.
#[derive(Default)]
struct Printed {
    kept: Vec<u8>,
    length: u64,
    hash: Option<Sha256>,
}

impl Printed {
    /// Reads to the end, or until it is too much.
    fn read(&mut self, pipe: Option<ChildStdout>, allowance: Allowance, flooding: &AtomicBool) {
        let Some(mut pipe) = pipe else { return };
        let mut block = vec![0; 64 << 10];
        loop {
            let read = match pipe.read(&mut block) {
                Ok(0) => return,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            self.take(&block[..read], allowance.kept);
            if self.length > allowance.output {
                flooding.store(true, Ordering::Relaxed);
                // The pipe closes, and the command learns it when it writes again.
                return;
            }
        }
    }

    fn take(&mut self, bytes: &[u8], most: usize) {
        self.length = self.length.saturating_add(bytes.len() as u64);
        match &mut self.hash {
            Some(hash) => hash.update(bytes),
            // Hashing would take time from the command, so what is kept is hashed after it.
            None if self.kept.len() + bytes.len() <= most => self.kept.extend_from_slice(bytes),
            None => {
                let mut hash = Sha256::new();
                hash.update(&self.kept);
                hash.update(bytes);
                self.hash = Some(hash);
                self.kept = Vec::new();
            }
        }
    }

    fn output(self) -> Output {
        match self.hash {
            Some(hash) => Output::long(self.length, hash),
            None => Output::new(&self.kept),
        }
    }
}

/// Reads to the end and keeps what came last.
fn read_errors(pipe: Option<ChildStderr>, kept: &mut Vec<u8>) {
    let Some(mut pipe) = pipe else { return };
    let mut block = vec![0; 16 << 10];
    loop {
        match pipe.read(&mut block) {
            Ok(0) => return,
            Ok(read) => {
                kept.extend_from_slice(&block[..read]);
                kept.drain(..kept.len().saturating_sub(KEPT_ERRORS));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Allowance = Allowance { time: Duration::from_secs(60), kept: 1 << 20, output: 8 << 20 };

    fn arm(program: &str, arguments: &[&str]) -> Arm {
        Arm {
            program: program.into(),
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
            environment: vec![("GREETING".to_owned(), "hello".to_owned())],
            label: "A".to_owned(),
        }
    }

    fn sample(program: &str, arguments: &[&str]) -> Sample {
        run(&arm(program, arguments), &Figure::named("wall"), USUAL, &|| false).unwrap().unwrap()
    }

    fn error(program: &str, arguments: &[&str], figure: &str, allowance: Allowance) -> String {
        run(&arm(program, arguments), &Figure::named(figure), allowance, &|| false).unwrap_err().to_string()
    }

    #[test]
    fn a_run_is_timed_and_its_output_kept() {
        let sample = sample("sh", &["-c", "sleep 0.1; echo $GREETING"]);
        assert!(sample.wall >= 0.1 && sample.figure == sample.wall);
        assert_eq!(sample.identity, self::sample("echo", &["hello"]).identity);
    }

    #[test]
    fn a_run_that_fails_says_why() {
        let error =
            |program: &str, arguments: &[&str], figure: &str| error(program, arguments, figure, USUAL);
        let script = "echo 'warning: x' >&2; echo 'error: no model' >&2; echo 'hint: y' >&2; exit 3";
        assert_eq!(error("sh", &["-c", script], "wall"), "`A`: no model (exit status: 3)");
        assert!(error("/nowhere/program", &[], "wall").starts_with("`A`: cannot start /nowhere/program"));
        assert_eq!(error("echo", &["x"], "decode_tps"), "`A`: the command printed no JSON object");
    }

    #[test]
    fn endless_output_is_cut_off() {
        let since = Instant::now();
        assert_eq!(error("yes", &[], "wall", USUAL), "`A`: it printed more than 8 MiB");
        assert!(since.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn of_long_output_the_hash_is_known_and_nothing_kept() {
        let zeros = |count: &str| sample("head", &["-c", count, "/dev/zero"]).identity;
        assert_eq!(zeros("3000000"), zeros("3000000"));
        assert_ne!(zeros("3000000"), zeros("3000001"));
        // The same bytes have the same hash, kept or not.
        let mut kept = Printed::default();
        kept.take(&vec![0; 3_000_000], 4_000_000);
        assert_eq!(zeros("3000000"), kept.output().identity);
        let problem = error("head", &["-c", "3000000", "/dev/zero"], "ttft", USUAL);
        assert_eq!(problem, "`A`: the command printed 2 MiB, and figures are looked for in less");
    }

    #[test]
    fn a_run_that_hangs_is_ended_with_all_it_started() {
        let since = Instant::now();
        let brief = Allowance { time: Duration::from_millis(300), ..USUAL };
        assert_eq!(error("sleep", &["100"], "wall", brief), "`A`: it did not end within 0.3 s");
        error("sh", &["-c", "sleep 100 & sleep 100"], "wall", brief);
        let stopped = run(&arm("sleep", &["100"]), &Figure::named("wall"), USUAL, &|| true).unwrap();
        assert!(stopped.is_none());
        // One that goes, and leaves something that keeps its output open.
        sample("sh", &["-c", "sleep 100 & echo x"]);
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    }
}
