//! Exit codes, in one place: what scripts may rely on.

use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use signal_hook::low_level;

use crate::compiled;

/// How long an end that a signal asked for waits for standard output.
const FLUSH: Duration = Duration::from_millis(100);

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// All done, or nobody reads our output any more.
    Success,
    /// The work could not be done, or a check failed.
    Failure,
    /// The command line makes no sense.
    Usage,
    /// Ctrl-C.
    Interrupted,
    /// SIGTERM or SIGHUP.
    Terminated,
}

impl ExitStatus {
    /// Every status with its meaning, for `--help`, the manual and the reference page.
    pub const ALL: [(Self, &'static str); 5] = [
        (Self::Success, "success, also when the reader of standard output went away (`mlx-bun ... | head`)"),
        (Self::Failure, "the work could not be done, or a check failed"),
        (
            Self::Usage,
            "wrong usage: an unknown flag or verb, a value out of range, flags that exclude each other",
        ),
        (Self::Interrupted, "interrupted by Ctrl-C (SIGINT)"),
        (Self::Terminated, "ended by SIGTERM or SIGHUP"),
    ];

    /// The number the shell sees.
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::Usage => 2,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }

    /// Ends the process without running destructors of other libraries: MLX's threads may be at work.
    pub fn leave(self) {
        let _ = io::stdout().flush();
        self.exit();
    }

    /// As [`ExitStatus::leave`], from the thread that watches signals: another one may hold standard output, and wait
    /// for its reader or compute.
    pub fn leave_now(self) {
        let (done, flushed) = mpsc::channel();
        thread::spawn(move || {
            let _ = io::stdout().flush();
            let _ = done.send(());
        });
        let _ = flushed.recv_timeout(FLUSH);
        self.exit();
    }

    fn exit(self) {
        compiled::settle(self == Self::Success);
        low_level::exit(i32::from(self.code()));
    }

    /// The table as indented lines.
    pub fn table() -> String {
        Self::ALL.iter().map(|(status, meaning)| format!("  {:<4}{meaning}\n", status.code())).collect()
    }
}
