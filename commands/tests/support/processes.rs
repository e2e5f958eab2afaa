//! Which processes are alive. `/proc` tells where there is one: `ps` is not on every machine.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A process that somebody has yet to end; those that only wait to be asked about are left out.
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Who started it.
    pub parent: u32,
    /// Its group.
    pub group: u32,
    /// Its command line, words apart by blanks.
    pub arguments: String,
}

/// All of them.
pub fn alive() -> Vec<Process> {
    if Path::new("/proc/self/stat").exists() {
        return fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| told(&entry.path()))
            .collect();
    }
    let listed = Command::new("ps").args(["-A", "-ww", "-o", "pid=,ppid=,pgid=,stat=,args="]).output();
    let listed =
        listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let parsed = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words.get(index)?.parse().ok();
        let lives = words.get(3).is_some_and(|state| !state.starts_with('Z'));
        let arguments = words.get(4..)?.join(" ");
        lives.then_some(Process { pid: number(0)?, parent: number(1)?, group: number(2)?, arguments })
    };
    listed.lines().filter_map(parsed).collect()
}

/// What a folder of `/proc` tells; one that ends meanwhile tells nothing.
fn told(folder: &Path) -> Option<Process> {
    let pid = folder.file_name()?.to_str()?.parse().ok()?;
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    // The name, in parentheses, may have anything in it.
    let mut words = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let lives = !matches!(words.next()?, "Z" | "X");
    let (parent, group) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let line = fs::read(folder.join("cmdline")).ok()?;
    let arguments = String::from_utf8_lossy(&line).replace('\0', " ");
    lives.then_some(Process { pid, parent, group, arguments })
}
