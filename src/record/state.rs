//! Whether a machine is quiet enough for its numbers to be quoted.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde::{Deserialize, Serialize};
use sysinfo::{MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};

use crate::registry::machine;

const MIB: f64 = (1 << 20) as f64;
/// Swap in use above this, in MiB, means that memory is short.
const MOST_SWAP: f64 = 512.0;
/// The least share of memory that should be free, in percent.
const LEAST_FREE: f64 = 35.0;
/// Processes that run or wait to, averaged over a minute; on fewer cores as many as there are.
const MOST_LOAD: f64 = 8.0;
/// Memory of one foreign process, in MiB.
const BIG_PROCESS: f64 = 2048.0;
/// Users below this are the system's own.
const FIRST_USER: u32 = if cfg!(target_os = "macos") { 500 } else { 1000 };

/// A program of somebody else that takes much memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BigProcess {
    /// Its name.
    pub name: String,
    /// Its number.
    pub pid: u32,
    /// Its memory in MiB.
    pub mb: f64,
}

/// What a machine is doing beside the measurement. A probe that cannot be read is a problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineState {
    /// What the network calls it.
    pub host: Option<String>,
    /// The processor.
    pub chip: String,
    /// Memory in GiB.
    pub ram_gb: Option<f64>,
    /// Swap in use, in MiB.
    pub swap_mb: Option<f64>,
    /// Memory that programs can still get, in percent.
    pub free_pct: Option<f64>,
    /// Speed that the system allows the processor, in percent; none where nothing limits it.
    pub cpu_limit: Option<f64>,
    /// What a GPU may wire, in MiB, where that can be set (macOS; 0 for the default).
    pub gpu_wired_mb: Option<u64>,
    /// Processes that run or wait to, averaged over a minute.
    pub load1m: Option<f64>,
    /// Foreign programs that take much memory.
    pub big_procs: Vec<BigProcess>,
    /// Whether there is no problem.
    pub ok: bool,
    /// What is wrong, a sentence each.
    pub problems: Vec<String>,
    /// When it was looked at (RFC 3339).
    pub at: String,
}

impl MachineState {
    /// Looks at this machine, which takes some milliseconds.
    pub fn probe() -> Self {
        let mut system = System::new();
        system.refresh_memory_specifics(MemoryRefreshKind::everything());
        let total = system.total_memory();
        let known = total > 0;
        let state = Self {
            host: System::host_name(),
            chip: machine::processor(),
            ram_gb: machine::ram().map(|bytes| hundredths(bytes as f64 / (1u64 << 30) as f64)),
            swap_mb: known.then(|| hundredths(system.used_swap() as f64 / MIB)),
            free_pct: known.then(|| hundredths(free(&system, total))),
            load1m: load().map(hundredths),
            big_procs: big_processes(&mut system),
            at: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            ..Self::default()
        };
        state.judged(cpu_limit(), gpu_wired())
    }

    /// The swap that may be in use while something is measured, in MiB: an eighth of memory, at least 2048.
    pub fn most_swap_meanwhile(&self) -> f64 {
        self.ram_gb.map_or(2048.0, |ram| (ram * 1024.0 / 8.0).max(2048.0))
    }

    /// Sums the problems up. `Err` says why a probe could not be read.
    fn judged(mut self, cpu_limit: Result<Option<f64>, String>, wired: Result<Option<u64>, String>) -> Self {
        let mut problems = Vec::new();
        match self.swap_mb {
            None => problems.push("swap in use cannot be read".to_owned()),
            Some(swap) if swap > MOST_SWAP => {
                problems.push(format!("swap in use is {swap:.0} MiB, more than {MOST_SWAP:.0}"));
            }
            Some(_) => {}
        }
        match self.free_pct {
            None => problems.push("free memory cannot be read".to_owned()),
            Some(free) if free < LEAST_FREE => {
                problems.push(format!("free memory is {free:.0} %, less than {LEAST_FREE:.0} %"));
            }
            Some(_) => {}
        }
        let cores = thread::available_parallelism().map_or(MOST_LOAD, |cores| cores.get() as f64);
        let most_load = MOST_LOAD.min(cores);
        match self.load1m {
            None => problems.push("the load cannot be read".to_owned()),
            Some(load) if load > most_load => {
                problems.push(format!("the load is {load:.1}, more than {most_load:.0}"));
            }
            Some(_) => {}
        }
        match cpu_limit {
            Ok(limit) => self.cpu_limit = limit,
            Err(why) => problems.push(format!("the processor's speed limit cannot be read: {why}")),
        }
        if let Some(limit) = self.cpu_limit.filter(|limit| *limit < 100.0) {
            problems.push(format!("the processor is limited to {limit:.0} % of its speed"));
        }
        match wired {
            Ok(wired) => self.gpu_wired_mb = wired,
            Err(why) => problems.push(format!("the GPU's memory limit cannot be read: {why}")),
        }
        problems.extend(self.big_procs.iter().map(|process| {
            format!("`{}` ({}) takes {:.0} MiB of memory", process.name, process.pid, process.mb)
        }));
        self.ok = problems.is_empty();
        self.problems = problems;
        self
    }
}

/// Memory that programs can get, in percent: in a container of the share that it may have.
fn free(system: &System, total: u64) -> f64 {
    let (free, total) = match system.cgroup_limits().filter(|limits| limits.total_memory < total) {
        Some(limits) => (limits.free_memory, limits.total_memory),
        None => (system.available_memory(), total),
    };
    free as f64 / total.max(1) as f64 * 100.0
}

/// As many digits as mean anything; JSON keeps them to the bit.
fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn load() -> Option<f64> {
    // Where there is no such file the load reads as 0.
    if cfg!(target_os = "linux") {
        let text = fs::read_to_string("/proc/loadavg").ok()?;
        return text.split_whitespace().next()?.parse().ok();
    }
    Some(System::load_average().one)
}

/// Programs that are neither this one, nor what started it or was started by it, nor the system's.
fn big_processes(system: &mut System) -> Vec<BigProcess> {
    let kind = ProcessRefreshKind::nothing().with_memory().with_user(UpdateKind::Always);
    system.refresh_processes_specifics(ProcessesToUpdate::All, true, kind.without_tasks());
    let me = Pid::from_u32(std::process::id());
    let ancestors = |pid: Pid| {
        let mut seen = HashSet::new();
        let mut at = Some(pid);
        while let Some(pid) = at.filter(|pid| seen.insert(*pid)) {
            at = system.process(pid).and_then(|process| process.parent());
        }
        seen
    };
    let (mine, my_user) = (ancestors(me), system.process(me).and_then(|process| process.user_id().cloned()));
    let mut found: Vec<BigProcess> = system
        .processes()
        .values()
        .filter(|process| process.thread_kind().is_none() && process.memory() as f64 / MIB > BIG_PROCESS)
        .filter(|process| !mine.contains(&process.pid()) && !ancestors(process.pid()).contains(&me))
        .filter(|process| match process.user_id() {
            user if user == my_user.as_ref() => true,
            Some(user) => **user >= FIRST_USER,
            None => true,
        })
        .map(|process| BigProcess {
            name: process.name().to_string_lossy().into_owned(),
            pid: process.pid().as_u32(),
            mb: (process.memory() as f64 / MIB).round(),
        })
        .collect();
    found.sort_by(|a, b| b.mb.total_cmp(&a.mb));
    found
}

/// Percent of the processor's speed that may be used: what heat allows on a Mac; on Linux the least of what the
/// frequency governor allows a core and of what the container may have.
fn cpu_limit() -> Result<Option<f64>, String> {
    if cfg!(target_os = "macos") {
        let output =
            Command::new("pmset").args(["-g", "therm"]).output().map_err(|error| error.to_string())?;
        return Ok(thermal_limit(&String::from_utf8_lossy(&output.stdout)));
    }
    let cores = thread::available_parallelism().map_err(|error| error.to_string())?.get();
    let quota = match fs::read_to_string("/sys/fs/cgroup/cpu.max") {
        Ok(text) => quota(&text).map(|allowed| allowed / cores as f64 * 100.0),
        // An older kernel, or none of its control groups in sight.
        Err(_) => None,
    };
    let limits = [quota, frequency_limit(Path::new("/sys/devices/system/cpu"))?];
    Ok(limits.into_iter().flatten().map(|limit| limit.min(100.0)).reduce(f64::min))
}

/// `CPU_Speed_Limit = 80` in what `pmset -g therm` prints; no line, no limit.
fn thermal_limit(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("CPU_Speed_Limit"))?;
    line.split_once('=')?.1.trim().parse().ok()
}

/// Processors that a container may use: `200000 100000` are two, `max 100000` is all.
fn quota(text: &str) -> Option<f64> {
    let (allowed, period) = text.trim().split_once(' ')?;
    let (allowed, period): (f64, f64) = (allowed.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(allowed / period)
}

/// The slowest core's highest allowed frequency, in percent of what it can. A machine without frequency control,
/// such as most virtual ones, has no limit.
fn frequency_limit(folder: &Path) -> Result<Option<f64>, String> {
    let mut least = None;
    for index in 0.. {
        let core = folder.join(format!("cpu{index}"));
        if !core.exists() {
            break;
        }
        let frequencies = core.join("cpufreq");
        if !frequencies.exists() {
            continue;
        }
        let read = |name: &str| -> Result<f64, String> {
            let path = frequencies.join(name);
            let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            text.trim().parse().map_err(|_| format!("{} holds no number", path.display()))
        };
        let (allowed, possible) = (read("scaling_max_freq")?, read("cpuinfo_max_freq")?);
        if possible > 0.0 {
            let limit = allowed / possible * 100.0;
            least = Some(least.map_or(limit, |least: f64| least.min(limit)));
        }
    }
    Ok(least)
}

fn gpu_wired() -> Result<Option<u64>, String> {
    if !cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        return Ok(None);
    }
    let value = machine::sysctl("iogpu.wired_limit_mb").ok_or("sysctl does not run")?;
    value.parse().map(Some).map_err(|_| format!("sysctl says `{value}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> MachineState {
        MachineState {
            swap_mb: Some(0.0),
            free_pct: Some(90.0),
            load1m: Some(0.5),
            ram_gb: Some(24.0),
            ..MachineState::default()
        }
    }

    #[test]
    fn a_quiet_machine_has_no_problem() {
        let state = quiet().judged(Ok(Some(100.0)), Ok(None));
        assert!(state.ok && state.problems.is_empty(), "{:?}", state.problems);
        assert_eq!(state.most_swap_meanwhile(), 3072.0);
    }

    #[test]
    fn every_problem_is_told() {
        let state = MachineState {
            swap_mb: Some(600.0),
            free_pct: Some(20.0),
            load1m: Some(9.0),
            big_procs: vec![BigProcess { name: "browser".to_owned(), pid: 7, mb: 4000.0 }],
            ..MachineState::default()
        };
        let state = state.judged(Ok(Some(80.0)), Ok(None));
        assert!(!state.ok);
        let told = state.problems.join("; ");
        for part in
            ["swap in use is 600 MiB, more than 512", "load is 9.0, more", "20 %", "80 %", "`browser` (7)"]
        {
            assert!(told.contains(part), "{told}");
        }
    }

    #[test]
    fn probes_that_cannot_be_read_are_problems() {
        let state = MachineState::default().judged(Err("no pmset".to_owned()), Err("no sysctl".to_owned()));
        assert_eq!(state.problems.len(), 5, "{:?}", state.problems);
    }

    #[test]
    fn limits_are_read_from_what_systems_print() {
        assert_eq!(thermal_limit("Note: ...\n CPU_Speed_Limit \t= 80\n"), Some(80.0));
        assert_eq!(thermal_limit("Note: No thermal warning level has been recorded"), None);
        assert_eq!(quota("200000 100000\n"), Some(2.0));
        assert_eq!((quota("max 100000"), quota(""), quota("1 0")), (None, None, None));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(frequency_limit(folder.path()), Ok(None));
        for (core, allowed) in [(0, "4000"), (1, "1000")] {
            let frequencies = folder.path().join(format!("cpu{core}/cpufreq"));
            fs::create_dir_all(&frequencies).unwrap();
            fs::write(frequencies.join("scaling_max_freq"), allowed).unwrap();
            fs::write(frequencies.join("cpuinfo_max_freq"), "4000\n").unwrap();
        }
        assert_eq!(frequency_limit(folder.path()), Ok(Some(25.0)));
        fs::write(folder.path().join("cpu1/cpufreq/cpuinfo_max_freq"), "fast").unwrap();
        assert!(frequency_limit(folder.path()).is_err());
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let state = MachineState::probe();
        assert!(state.load1m.is_some() && state.free_pct.unwrap() > 0.0);
        assert_eq!(state.ok, state.problems.is_empty());
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<MachineState>(&text).unwrap(), state);
    }
}
