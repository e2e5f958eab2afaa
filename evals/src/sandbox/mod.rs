//! Runs Python that a model wrote in a process of its own, which can do no harm.
//!
//! The process is an isolated interpreter with a folder of its own; [`Limits`] bound its time, memory, files. Walls keep
//! it from the network, from other processes, from writing anywhere else and (on Linux) from reading what Python itself
//! does not need: on Linux Landlock and a seccomp filter, inside user, mount, network and process namespaces where those
//! may be made; on macOS a `sandbox-exec` profile. Whether they hold on this machine is tried out with a program that
//! pushes against each ([`Sandbox::find`]). A program dies with this process.

mod probe;

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mlx_bun::checkpoint::environment::Environment;
use serde::Deserialize;
use serde_json::json;

/// Names the interpreter.
pub const MLX_BUN_ORACLE_PYTHON: &str = "MLX_BUN_ORACLE_PYTHON";

const DRIVER: &str = include_str!("driver.py");
/// Longest verdict.
const LONGEST_ANSWER: u64 = 1 << 16;
const NAP: Duration = Duration::from_millis(5);
/// How long an interpreter may take to come up.
const START: Duration = Duration::from_secs(30);

/// What a program may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time on the clock once the program begins, and of the processor.
    pub time: Duration,
    /// Bytes of its address space.
    pub memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time: Duration::from_secs(10), memory: 512 << 20 }
    }
}

/// What keeps a program in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walls {
    /// Linux: namespaces, and inside them Landlock and seccomp.
    Namespaces,
    /// Linux: Landlock and seccomp.
    Kernel,
    /// macOS: `sandbox-exec`.
    Profile,
    /// Nothing but the limits.
    None,
}

impl Walls {
    /// What they are called in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces, landlock, seccomp",
            Self::Kernel => "landlock, seccomp",
            Self::Profile => "sandbox-exec",
            Self::None => "none",
        }
    }

    fn of_this_system() -> &'static [Self] {
        match std::env::consts::OS {
            "linux" => &[Self::Namespaces, Self::Kernel],
            "macos" => &[Self::Profile],
            _ => &[],
        }
    }
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It ran to its end.
    Passed,
    /// It raised something, or ended early.
    Failed(String),
    /// It was ended.
    TimedOut,
}

/// Why a program cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// There is no interpreter.
    #[error("there is no Python to run programs with: {0}")]
    Python(String),
    /// The system has no walls that hold.
    #[error("programs cannot be kept in on this system ({0})")]
    NoWalls(String),
    /// A process or a folder cannot be made.
    #[error("a program cannot be run: {0}")]
    Start(#[from] std::io::Error),
    /// The walls did not come up.
    #[error("the sandbox did not come up: {0}")]
    Broken(String),
}

/// A way to run programs.
#[derive(Clone, Debug)]
pub struct Sandbox {
    python: PathBuf,
    walls: Walls,
    limits: Limits,
}

/// What the driver writes.
#[derive(Deserialize)]
struct Verdict {
    nonce: String,
    passed: bool,
    why: Option<String>,
    broken: Option<String>,
}

impl Sandbox {
    /// The strongest walls of this system that hold against a program that tries to get out.
    ///
    /// # Errors
    /// There is no Python, or nothing holds.
    pub fn find(environment: &Environment) -> Result<Self, SandboxError> {
        let python = python(environment)?;
        let mut reasons = Vec::new();
        for walls in Walls::of_this_system() {
            let sandbox = Self { python: python.clone(), walls: *walls, limits: Limits::default() };
            match probe::holds(&sandbox) {
                Ok(()) => return Ok(sandbox),
                Err(reason) => reasons.push(format!("{}: {reason}", walls.name())),
            }
        }
        Err(SandboxError::NoWalls(match reasons.is_empty() {
            true => std::env::consts::OS.to_owned(),
            false => reasons.join("; "),
        }))
    }

    /// Nothing but the limits of time and memory: for users who say that they know.
    ///
    /// # Errors
    /// There is no Python.
    pub fn without_walls(environment: &Environment) -> Result<Self, SandboxError> {
        Ok(Self { python: python(environment)?, walls: Walls::None, limits: Limits::default() })
    }

    /// The same with other limits.
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// What keeps programs in.
    pub fn walls(&self) -> Walls {
        self.walls
    }

    /// Runs a program to its end or to its limit.
    ///
    /// # Errors
    /// There is no process to be had, or the walls do not come up: nothing was run then.
    pub fn run(&self, program: &str) -> Result<Outcome, SandboxError> {
        let folder = tempfile::Builder::new().prefix("mlx-bun-eval-").tempdir()?;
        // macOS profiles and Landlock see the real path.
        let place = folder.path().canonicalize()?;
        let nonce = nonce();
        let config = json!({
            "program": program,
            "nonce": nonce,
            "folder": place,
            "memory": self.limits.memory,
            "seconds": self.limits.time.as_secs().max(1),
            "walls": self.walls != Walls::None,
            "namespaces": self.walls == Walls::Namespaces,
        });
        let mut child = self.command(&place).spawn()?;
        let input = child.stdin.take();
        let writer = std::thread::spawn(move || {
            // A child that died does not read; what became of it is seen below.
            let _ = input.map(|mut input| input.write_all(config.to_string().as_bytes()));
        });
        let output = child.stdout.take();
        let (ready, started) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut output) = output
                && output.read_exact(&mut [0]).is_ok()
            {
                let _ = ready.send(());
                // What was read before an error is the answer, or none.
                let _ = output.take(LONGEST_ANSWER).read_to_end(&mut bytes);
            }
            bytes
        });
        let started = started.recv_timeout(START).is_ok();
        let deadline = Instant::now() + if started { self.limits.time } else { Duration::from_secs(1) };
        let ended = wait(&mut child, deadline)?;
        let _ = writer.join();
        let answer = reader.join().unwrap_or_default();
        let status = match ended {
            Some(status) if started => status,
            Some(status) => {
                return Err(SandboxError::Broken(format!("the interpreter did not start ({status})")));
            }
            None if started => return Ok(Outcome::TimedOut),
            None => return Err(SandboxError::Broken("the interpreter does not start".to_owned())),
        };
        let verdict = serde_json::from_slice(&answer).ok().filter(|verdict: &Verdict| verdict.nonce == nonce);
        match verdict {
            Some(Verdict { broken: Some(reason), .. }) => Err(SandboxError::Broken(reason)),
            Some(Verdict { passed: true, .. }) => Ok(Outcome::Passed),
            Some(Verdict { why, .. }) => Ok(Outcome::Failed(why.unwrap_or_default())),
            None => Ok(Outcome::Failed(format!("the program ended its process ({status})"))),
        }
    }

    fn command(&self, folder: &Path) -> Command {
        let mut command = match self.walls {
            Walls::Namespaces => {
                let mut command = Command::new("unshare");
                command.args(["--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts"]);
                // Whoever is in there dies with `unshare`.
                command.args(["--fork", "--kill-child", "--"]).arg(&self.python);
                command
            }
            Walls::Profile => {
                let mut command = Command::new("sandbox-exec");
                command.args(["-p", &profile(folder)]).arg(&self.python);
                command
            }
            Walls::Kernel | Walls::None => Command::new(&self.python),
        };
        die_with_us(&mut command);
        command.args(["-I", "-B", "-c", DRIVER]).current_dir(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.env_clear().env("OPENBLAS_NUM_THREADS", "1").env("TMPDIR", folder).env("HOME", folder);
        for kept in ["PATH", "LD_LIBRARY_PATH"] {
            if let Some(value) = std::env::var_os(kept) {
                command.env(kept, value);
            }
        }
        command
    }
}

/// A process that outlived us would go on with nobody to end it. It also ends with the thread that starts it, which
/// waits for it.
#[cfg(target_os = "linux")]
fn die_with_us(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;
    // SAFETY: between fork and exec only a system call is made.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn die_with_us(_command: &mut Command) {}

/// Everything may be read, nothing sent, and files are written in one folder.
fn profile(folder: &Path) -> String {
    let folder = folder.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!(
        "(version 1)(allow default)(deny network*)(deny process-fork)(deny signal (target others))\
         (deny file-write*)(allow file-write* (subpath \"{folder}\") (literal \"/dev/null\"))"
    )
}

/// Waits until the deadline; `None` for a child that had to be killed.
fn wait(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>, std::io::Error> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(NAP);
    }
}

/// A text that a program cannot guess beforehand.
fn nonce() -> String {
    use std::hash::{BuildHasher as _, RandomState};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", RandomState::new().hash_one(count), RandomState::new().hash_one(!count))
}

/// The interpreter: `MLX_BUN_ORACLE_PYTHON`, else `python3` of the path.
fn python(environment: &Environment) -> Result<PathBuf, SandboxError> {
    let named = environment.path(MLX_BUN_ORACLE_PYTHON);
    let shown = named.clone().unwrap_or_else(|| PathBuf::from("python3"));
    let asked = Command::new(&shown)
        .args(["-I", "-c", "import sys; print(sys.executable)"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| SandboxError::Python(format!("`{}`: {error}", shown.display())))?;
    let path = String::from_utf8_lossy(&asked.stdout).trim().to_owned();
    if !asked.status.success() || path.is_empty() {
        return Err(SandboxError::Python(format!("`{}` does not work", shown.display())));
    }
    // The path itself, so that a virtual environment stays one.
    Ok(named.unwrap_or_else(|| PathBuf::from(path)))
}

#[cfg(test)]
mod tests;
