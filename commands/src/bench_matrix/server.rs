//! This program's own server as a child process.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::child::{GuardedChild, signal_group};
use crate::resident_memory;

/// A model of many gigabytes on a slow disk takes minutes.
const START_TIMEOUT: Duration = Duration::from_secs(600);
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Lines of standard error that are kept for a message.
const KEPT_LINES: usize = 20;

/// A server that listens; it is stopped when dropped, and when this process is gone.
pub struct Server {
    running: GuardedChild,
    url: String,
    flags: Vec<String>,
}

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The program cannot be started.
    #[error("cannot start the server: {0}")]
    Start(std::io::Error),
    /// It ended by itself.
    #[error("the server did not start: {0}")]
    Ended(String),
    /// It takes too long.
    #[error("the server did not answer within {} s", START_TIMEOUT.as_secs())]
    Slow,
    /// The user wants no more.
    #[error("interrupted")]
    Stopped,
}

impl Server {
    /// Starts `mlx-bun serve FLAGS` on a free port and waits until it listens.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(flags: &[String], stop: &dyn Fn() -> bool) -> Result<Self, ServerError> {
        let program = std::env::current_exe().map_err(ServerError::Start)?;
        let mut command = Command::new(program);
        command.args(["serve", "--port", "0", "--host", "127.0.0.1"]).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = GuardedChild::spawn(&mut command).map_err(ServerError::Start)?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(stderr) = running.child.stderr.take() {
            let kept = Arc::clone(&lines);
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    kept.push_back(line);
                    if kept.len() > KEPT_LINES {
                        kept.pop_front();
                    }
                }
            });
        }
        let (sender, url) = channel();
        if let Some(stdout) = running.child.stdout.take() {
            std::thread::spawn(move || {
                let mut line = String::new();
                let read = BufReader::new(stdout).read_line(&mut line);
                if read.is_ok_and(|read| read > 0) {
                    let _ = sender.send(line.trim().to_owned());
                }
            });
        }
        // From here on an early return stops the child.
        let mut server = Self { running, url: String::new(), flags: flags.to_vec() };
        let since = Instant::now();
        loop {
            match url.recv_timeout(Duration::from_millis(100)) {
                Ok(url) => {
                    server.url = url;
                    return Ok(server);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = server.running.wait();
                    // Its last words may still be on their way.
                    std::thread::sleep(Duration::from_millis(50));
                    return Err(ServerError::Ended(reason(
                        &lines.lock().unwrap_or_else(PoisonError::into_inner),
                    )));
                }
                Err(RecvTimeoutError::Timeout) if stop() => return Err(ServerError::Stopped),
                Err(RecvTimeoutError::Timeout) if since.elapsed() > START_TIMEOUT => {
                    return Err(ServerError::Slow);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// What it was started with.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// The most memory it has had at once, in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        resident_memory::peak_bytes(self.running.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Asked nicely it puts away what it compiled.
        let asked = signal_group(self.running.id(), libc::SIGTERM);
        let since = Instant::now();
        while asked && since.elapsed() < STOP_TIMEOUT {
            match self.running.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        self.running.kill();
    }
}

/// The first line that is an error, else the last.
fn reason(lines: &VecDeque<String>) -> String {
    let error = lines.iter().find_map(|line| line.strip_prefix("error: "));
    let last = || lines.back().map(String::as_str);
    error.or_else(last).unwrap_or("it said nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_reason() {
        let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<VecDeque<_>>();
        assert_eq!(reason(&lines(&["warning: x", "error: no model", "hint: get one"])), "no model");
        assert_eq!(reason(&lines(&["thread panicked", "note: backtrace"])), "note: backtrace");
        assert_eq!(reason(&lines(&[])), "it said nothing");
    }
}
