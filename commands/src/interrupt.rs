//! Ctrl-C and SIGTERM. The first Ctrl-C asks the work to stop, the second ends the program at once.

use std::io::{self, IsTerminal, Read};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::exit::ExitStatus;
use crate::printer;

/// Waiting for a person, who may leave: Ctrl-C ends the program.
const IDLE: u8 = 0;
/// Working: Ctrl-C asks to stop.
const BUSY: u8 = 1;
/// Asked to stop: another Ctrl-C ends the program.
const STOPPING: u8 = 2;

/// Whether the user wants the work to stop. Clones share the answer.
#[derive(Clone, Default)]
pub struct Interrupt {
    state: Arc<AtomicU8>,
}

impl Interrupt {
    /// Takes over SIGINT and SIGTERM for the rest of the process. Until work begins, Ctrl-C ends the program.
    ///
    /// # Errors
    /// The system refuses a pipe, a thread or the handlers.
    pub fn install() -> io::Result<Self> {
        let interrupt = Self::default();
        let (mut wakeups, waker) = UnixStream::pair()?;
        let terminated = Arc::new(AtomicBool::new(false));
        // Actions run in the order of their registration: the flag is up before the byte arrives.
        flag::register(SIGTERM, Arc::clone(&terminated))?;
        low_level::pipe::register(SIGTERM, waker.try_clone()?)?;
        low_level::pipe::register(SIGINT, waker)?;
        let state = Arc::clone(&interrupt.state);
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while let Ok(1..) = wakeups.read(&mut [0]) {
                if terminated.load(Ordering::SeqCst) {
                    leave(state.load(Ordering::SeqCst), ExitStatus::Terminated);
                }
                if state.compare_exchange(BUSY, STOPPING, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                    leave(state.load(Ordering::SeqCst), ExitStatus::Interrupted);
                }
            }
        })?;
        Ok(interrupt)
    }

    /// Work begins: Ctrl-C asks it to stop. Forgets an earlier request.
    pub fn begin(&self) {
        self.state.store(BUSY, Ordering::SeqCst);
    }

    /// Work is over and a person is asked: Ctrl-C ends the program.
    pub fn rest(&self) {
        self.state.store(IDLE, Ordering::SeqCst);
    }

    /// Whether the work shall stop.
    pub fn is_set(&self) -> bool {
        self.state.load(Ordering::SeqCst) == STOPPING
    }

    /// Asks the work to stop, as a Ctrl-C does.
    #[cfg(test)]
    pub fn set(&self) {
        self.state.store(STOPPING, Ordering::SeqCst);
    }
}

/// Ends the process without running destructors: other threads may be in the middle of MLX's work.
fn leave(state: u8, status: ExitStatus) {
    printer::restore_terminal();
    // At the prompt of `chat` the line editor has the terminal in raw mode, and cannot be asked to give it back.
    if state == IDLE && io::stdin().is_terminal() {
        let _ = Command::new("stty").arg("sane").status();
    }
    low_level::exit(i32::from(status.code()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_lasts_until_the_next_work_begins() {
        let interrupt = Interrupt::default();
        interrupt.begin();
        assert!(!interrupt.is_set());
        let seen_by_worker = interrupt.clone();
        interrupt.set();
        assert!(seen_by_worker.is_set());
        interrupt.begin();
        assert!(!seen_by_worker.is_set());
    }
}
