//! Ctrl-C, SIGTERM and SIGHUP. The first one asks the work to stop, the second ends the program at once; after SIGTERM
//! or SIGHUP, which come from somebody who will not wait for long, it ends soon in any case.

use std::io::{self, IsTerminal, Read};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::exit::ExitStatus;
use crate::printer::{self, Printer};

/// Waiting for a person, who may leave: Ctrl-C ends the program.
const IDLE: u8 = 0;
/// Working: Ctrl-C asks to stop.
const BUSY: u8 = 1;
/// Asked to stop, and the work does not know yet: another Ctrl-C ends the program.
const ASKED: u8 = 2;
/// Asked to stop, and the work is about to.
const STOPPING: u8 = 3;

/// How long the work may go on after a Ctrl-C before the user is told why.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long it may go on after a SIGTERM or SIGHUP, unless it has to save something.
const GRACE: Duration = Duration::from_secs(5);
const NOTICE: &str = "stopping after this step; press Ctrl-C again to stop now";

static INSTALLED: OnceLock<Interrupt> = OnceLock::new();

/// Whether the user asked the work to stop, for the end of the program: what failed since then failed because of it.
/// Ctrl-C goes to the whole group of processes, and MLX reports the death of its compiler as any other error.
pub fn asked() -> bool {
    INSTALLED.get().is_some_and(|interrupt| {
        interrupt.is_set()
            || interrupt.raised.load(Ordering::SeqCst)
            || interrupt.terminated.load(Ordering::SeqCst)
    })
}

/// How a program ends whose work ended with this: one that was told to terminate says so.
pub fn settle(status: ExitStatus) -> ExitStatus {
    let terminated = INSTALLED.get().is_some_and(|interrupt| interrupt.terminated.load(Ordering::SeqCst));
    if terminated && status == ExitStatus::Interrupted { ExitStatus::Terminated } else { status }
}

/// Whether the user wants the work to stop. Clones share the answer.
#[derive(Clone, Default)]
pub struct Interrupt {
    state: Arc<AtomicU8>,
    /// Whether a Ctrl-C came since work began: up before the thread that watches has woken, by when the compiler that
    /// the same Ctrl-C ended may have been reported as an error.
    raised: Arc<AtomicBool>,
    /// Whether a SIGTERM or SIGHUP came.
    terminated: Arc<AtomicBool>,
    /// Whether the work saves itself when it stops, and may take its time.
    saves: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes over SIGINT, SIGTERM and SIGHUP for the rest of the process. Until work begins, each ends the program.
    ///
    /// # Errors
    /// The system refuses a pipe, a thread or the handlers.
    pub fn install(printer: &Printer) -> io::Result<Self> {
        let interrupt = Self::default();
        let (wakeups, waker) = UnixStream::pair()?;
        for signal in [SIGTERM, SIGHUP] {
            // `nohup` has it ignored, and means it.
            if signal == SIGTERM || !ignored(signal) {
                // Actions run in the order of their registration: the flag is up before the byte arrives.
                flag::register(signal, Arc::clone(&interrupt.terminated))?;
                low_level::pipe::register(signal, waker.try_clone()?)?;
            }
        }
        flag::register(SIGINT, Arc::clone(&interrupt.raised))?;
        low_level::pipe::register(SIGINT, waker)?;
        let (watched, printer) = (interrupt.clone(), printer.clone());
        let watch = move || watched.watch(wakeups, || printer.hint(NOTICE));
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch)?;
        let _ = INSTALLED.set(interrupt.clone());
        Ok(interrupt)
    }

    /// The work saves itself when it stops: a SIGTERM waits for it, too.
    pub fn wait_for_work(&self) {
        self.saves.store(true, Ordering::SeqCst);
    }

    /// Takes a byte for each signal, until the other end goes. `notice` is called when the work does not stop soon.
    fn watch(&self, mut wakeups: UnixStream, notice: impl Fn()) {
        let mut said = true;
        let mut end: Option<Instant> = None;
        loop {
            let patience = if said { None } else { Some(PATIENCE) };
            let grace =
                end.map(|end| end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
            // Fails only for a duration of zero.
            let _ = wakeups.set_read_timeout(patience.into_iter().chain(grace).min());
            match wakeups.read(&mut [0]) {
                Ok(0) => return,
                Ok(_) => {
                    if !self.change(BUSY, ASKED) {
                        self.leave();
                    }
                    said = false;
                    if self.terminated.load(Ordering::SeqCst) && !self.saves.load(Ordering::SeqCst) {
                        end = Some(Instant::now() + GRACE);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if end.is_some_and(|end| Instant::now() >= end) {
                        self.leave();
                    }
                    if !said && self.state() == ASKED && !self.terminated.load(Ordering::SeqCst) {
                        notice();
                    }
                    said = true;
                }
                Err(_) => return,
            }
        }
    }

    /// Ends the process, with the terminal as it was.
    fn leave(&self) {
        printer::restore_terminal();
        // At the prompt of `chat` the line editor has the terminal in raw mode, and cannot be asked to give it back.
        if self.state() == IDLE && io::stdin().is_terminal() {
            let _ = Command::new("stty").arg("sane").status();
        }
        settle(ExitStatus::Interrupted).leave_now();
    }

    fn state(&self) -> u8 {
        self.state.load(Ordering::SeqCst)
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Work begins: Ctrl-C asks it to stop. Forgets an earlier request.
    pub fn begin(&self) {
        self.raised.store(false, Ordering::SeqCst);
        self.state.store(BUSY, Ordering::SeqCst);
    }

    /// Work is over and a person is asked: Ctrl-C ends the program.
    pub fn rest(&self) {
        self.state.store(IDLE, Ordering::SeqCst);
    }

    /// Whether the work shall stop; whoever asks is about to.
    pub fn is_set(&self) -> bool {
        self.change(ASKED, STOPPING) || self.state() == STOPPING
    }

    /// Asks the work to stop, as a Ctrl-C does.
    #[cfg(test)]
    pub fn set(&self) {
        self.state.store(ASKED, Ordering::SeqCst);
    }
}

/// Whether whoever started us had a signal ignored.
fn ignored(signal: i32) -> bool {
    // SAFETY: all zeros is a value of this plain C structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the null pointer changes nothing, and `action` may be written.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
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

    /// What the user is told after one Ctrl-C: `work` is what the program does meanwhile.
    fn notices_after_ctrl_c(work: impl FnOnce(&Interrupt)) -> usize {
        use std::io::Write;
        let interrupt = Interrupt::default();
        let (wakeups, mut waker) = UnixStream::pair().unwrap();
        interrupt.begin();
        let (sender, notices) = std::sync::mpsc::channel();
        let watched = interrupt.clone();
        let watcher = std::thread::spawn(move || {
            watched.watch(wakeups, || sender.send(()).unwrap());
        });
        waker.write_all(&[0]).unwrap();
        while interrupt.state() == BUSY {
            std::thread::yield_now();
        }
        work(&interrupt);
        std::thread::sleep(3 * PATIENCE);
        drop(waker);
        watcher.join().unwrap();
        notices.try_iter().count()
    }

    #[test]
    fn a_step_that_goes_on_after_ctrl_c_is_explained_once() {
        assert_eq!(notices_after_ctrl_c(|_| {}), 1);
    }

    #[test]
    fn work_that_stops_at_once_needs_no_explanation() {
        assert_eq!(notices_after_ctrl_c(|interrupt| assert!(interrupt.is_set())), 0);
        assert_eq!(notices_after_ctrl_c(Interrupt::rest), 0);
    }
}
