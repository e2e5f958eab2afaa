//! The most memory that a process has had at once, as the system counts it: everything that is resident, whoever
//! allocated it.

use std::fs;
use std::process::Command;

use crate::allocator;

/// Bytes of a process's largest resident set so far; on systems that do not keep it, of the present one. `None` when
/// the process is gone.
pub fn peak_bytes(pid: u32) -> Option<u64> {
    if cfg!(target_os = "linux") {
        return of_status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?);
    }
    let output = Command::new("ps").args(["-o", "rss=", "-p", &pid.to_string()]).output().ok()?;
    kibibytes(&String::from_utf8_lossy(&output.stdout))
}

/// Begins counting this process's largest resident set anew, where the system can (Linux, proc_pid_clear_refs(5)); what
/// the allocator keeps of what this thread has freed goes back to the system before.
pub fn forget_own_peak() {
    allocator::give_back();
    if cfg!(target_os = "linux") {
        // Where it may not be written, the peak stays that since the start.
        let _ = fs::write("/proc/self/clear_refs", "5");
    }
}

/// Bytes of this process's largest resident set since [`forget_own_peak`]; where the system does not keep it, of the
/// present one.
pub fn own_peak_bytes() -> Option<u64> {
    peak_bytes(std::process::id())
}

/// Of proc_pid_status(5).
fn of_status(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    kibibytes(line.trim().strip_suffix("kB")?)
}

fn kibibytes(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn what_anybody_allocates_is_counted() {
        forget_own_peak();
        let block = std::hint::black_box(vec![7u8; 96 << 20]);
        drop(block);
        // Other tests take and free memory meanwhile.
        assert!(own_peak_bytes().unwrap() >= 96 << 20);
    }

    #[test]
    fn the_peak_is_read() {
        assert_eq!(of_status("Name:\tx\nVmPeak:\t  9 kB\nVmHWM:\t    12 kB\n"), Some(12 << 10));
        assert_eq!(of_status("Name:\tx\n"), None);
        assert_eq!(kibibytes(" 18446744073709551615\n"), None);
        assert!(peak_bytes(std::process::id()).unwrap() > 1 << 20);
    }
}
