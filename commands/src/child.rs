//! Processes that end with this one, however it ends.
//!
//! A program that is killed runs no destructors, so each child has a guardian: a shell that waits at a pipe whose other
//! end only this process holds. When the pipe closes, which no kind of death prevents, the guardian ends the child's
//! whole group of processes. Linux could tie a child to its parent's thread (`PR_SET_PDEATHSIG`), but not what that child
//! has started, and no other system can.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use libc::SIGKILL;

/// Ends a group: asked first, so that it can put away what it has in hand.
const END_GROUP: &str = r#"read -r group || exit 0
read -r _
kill -s TERM -- "-$group" || exit 0
n=0
while [ "$n" -lt 30 ] && kill -s 0 -- "-$group"; do sleep 0.1; n=$((n + 1)); done
kill -s KILL -- "-$group""#;
/// Removes a folder, and what a process that is about to end has still put there.
const REMOVE_FOLDER: &str = r#"read -r folder || exit 0
read -r _
rm -rf -- "$folder"
sleep 4
rm -rf -- "$folder""#;

/// Acts when this process is gone.
#[derive(Debug)]
struct Guardian(Child);

impl Guardian {
    fn start(script: &str) -> io::Result<Self> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Ctrl-C and a terminal that hangs up are not for it.
        shell.current_dir("/").process_group(0).spawn().map(Self)
    }

    /// Says what it guards. Until then its end changes nothing.
    fn guard(&mut self, what: &[u8]) -> io::Result<()> {
        let pipe = self.0.stdin.as_mut().ok_or_else(|| io::Error::other("the guardian has no pipe"))?;
        pipe.write_all(&[what, b"\n"].concat())
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // What it guards is gone already; the pipe closes only after this.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child in a group of its own, which ends when this is dropped, or with this process.
#[derive(Debug)]
pub struct GuardedChild {
    /// The child.
    pub child: Child,
    ended: bool,
    _guardian: Guardian,
}

impl GuardedChild {
    /// Starts a command.
    ///
    /// # Errors
    /// It cannot be started, or there is no shell.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut guardian = Guardian::start(END_GROUP)?;
        let child = command.process_group(0).spawn()?;
        let guarded = guardian.guard(child.id().to_string().as_bytes());
        let spawned = Self { child, ended: false, _guardian: guardian };
        guarded.map(|()| spawned)
    }

    /// Its number, which is that of its group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The system's.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.ended |= status.is_some();
        Ok(status)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait()?;
        self.ended = true;
        Ok(status)
    }

    /// Ends the whole group at once.
    pub fn kill(&mut self) {
        if !self.ended {
            signal_group(self.id(), SIGKILL);
            let _ = self.child.kill();
            let _ = self.child.wait();
            self.ended = true;
        }
    }
}

impl Drop for GuardedChild {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a group of processes; whether there was one.
pub fn signal_group(group: u32, signal: i32) -> bool {
    let group = i32::try_from(group).ok().filter(|group| *group > 1);
    // SAFETY: sends a signal, which touches no memory of ours.
    group.is_some_and(|group| unsafe { libc::kill(-group, signal) } == 0)
}

/// Removes a folder once this process is gone, unless it is dropped before.
#[derive(Debug)]
pub struct GuardedFolder {
    _guardian: Guardian,
}

impl GuardedFolder {
    /// From now on.
    ///
    /// # Errors
    /// There is no shell, or the name has a line break in it.
    pub fn guard(folder: &Path) -> io::Result<Self> {
        let name = folder.as_os_str().as_encoded_bytes();
        if name.contains(&b'\n') || !folder.is_absolute() {
            return Err(io::Error::other("the folder's name cannot be told to a shell"));
        }
        let mut guardian = Guardian::start(REMOVE_FOLDER)?;
        guardian.guard(name)?;
        Ok(Self { _guardian: guardian })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Whether something of a group is alive; what nobody has waited for is not.
    fn alive(group: u32) -> bool {
        crate::processes::alive().iter().any(|process| process.group == group)
    }

    fn soon(what: &str, holds: impl Fn() -> bool) {
        let since = Instant::now();
        while !holds() {
            assert!(since.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn what_a_child_started_ends_with_it() {
        let mut command = Command::new("/bin/sh");
        let mut spawned = GuardedChild::spawn(command.args(["-c", "sleep 1000 & sleep 1000"])).unwrap();
        let group = spawned.id();
        assert!(alive(group) && spawned.try_wait().unwrap().is_none());
        drop(spawned);
        soon("the group is still there", || !alive(group));
    }

    #[test]
    fn the_guardian_ends_what_its_parent_left() {
        let mut command = Command::new("/bin/sh");
        let mut spawned =
            GuardedChild::spawn(command.args(["-c", "trap '' TERM; sleep 1000 & wait"])).unwrap();
        // What the death of this process does.
        drop(spawned._guardian.0.stdin.take());
        let since = Instant::now();
        while spawned.try_wait().unwrap().is_none() {
            assert!(since.elapsed() < Duration::from_secs(20), "the child was left");
            std::thread::sleep(Duration::from_millis(20));
        }
        soon("the group was left", || !alive(spawned.id()));
    }

    #[test]
    fn a_folder_goes_with_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("it's \"here\"");
        std::fs::create_dir(&inner).unwrap();
        drop(GuardedFolder::guard(&inner).unwrap());
        assert!(inner.is_dir(), "whoever drops the guard removes the folder");
        let mut guard = GuardedFolder::guard(&inner).unwrap();
        drop(guard._guardian.0.stdin.take());
        soon("the folder was left", || !inner.exists());
    }
}
