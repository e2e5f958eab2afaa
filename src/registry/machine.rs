//! The memory that a model has to fit into, and how fast it is read: of this machine, and of Apple's line-up.

use std::fs;
use std::hint::black_box;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::mlx::{Array, DeviceKind, Dtype, Result, default_device, device_info, eval};

/// The share of memory that models may use without asking (macOS lets a GPU wire about this much).
const WIRED_FRACTION: f64 = 0.75;
/// Assumed where nothing is known, in GB/s: an M4 Pro.
const UNKNOWN_BANDWIDTH: f64 = 273.0;
const MEASURED_BYTES: usize = 256 << 20;
const PASSES: usize = 4;
const LONGEST: Duration = Duration::from_millis(300);

/// Memory and its speed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// What it is called.
    pub name: String,
    /// Memory in bytes: the GPU's own, else the machine's.
    pub memory: u64,
    /// Reading speed in GB/s (10^9 bytes a second).
    pub bandwidth: f64,
    /// Whether that was measured now.
    pub measured: bool,
}

impl Machine {
    /// This machine, as far as MLX uses it: the GPU's memory where MLX runs on one of its own. Its reading speed
    /// is measured, which takes a fraction of a second, unless it is in Apple's table.
    pub fn this() -> Self {
        let gpu = default_device() == DeviceKind::Gpu;
        let info = if gpu { device_info(DeviceKind::Gpu) } else { Default::default() };
        let name = info.name.clone().unwrap_or_else(processor);
        let memory = info.memory.or_else(ram).unwrap_or_default();
        let known = SKUS.iter().find(|sku| name == format!("Apple {}", sku.name)).map(|sku| sku.bandwidth);
        let measured = match known {
            Some(_) => None,
            None => measured_bandwidth(None).ok(),
        };
        let bandwidth = known.or(measured).unwrap_or(UNKNOWN_BANDWIDTH);
        Self { name, memory, bandwidth, measured: measured.is_some() }
    }

    /// This machine's memory alone, when its speed does not matter.
    pub fn memory_here() -> u64 {
        let gpu = default_device() == DeviceKind::Gpu;
        let own = if gpu { device_info(DeviceKind::Gpu).memory } else { None };
        own.or_else(ram).unwrap_or_default()
    }

    /// Apple's machines, one for each size of memory.
    pub fn apple() -> impl Iterator<Item = Self> {
        SKUS.iter().flat_map(|sku| {
            sku.memory.iter().map(|gib| Self {
                name: format!("{} {gib} GB", sku.name),
                memory: gib << 30,
                bandwidth: sku.bandwidth,
                measured: false,
            })
        })
    }

    /// Bytes that a model may use: the budget given, else three quarters of the memory.
    pub fn usable(&self, budget: Option<u64>) -> u64 {
        budget.unwrap_or((self.memory as f64 * WIRED_FRACTION) as u64)
    }
}

struct Sku {
    name: &'static str,
    /// GB/s.
    bandwidth: f64,
    /// GiB.
    memory: &'static [u64],
}

const fn sku(name: &'static str, bandwidth: f64, memory: &'static [u64]) -> Sku {
    Sku { name, bandwidth, memory }
}

const SKUS: [Sku; 15] = [
    sku("M1", 68.0, &[8, 16]),
    sku("M1 Pro", 200.0, &[16, 32]),
    sku("M1 Max", 400.0, &[32, 64]),
    sku("M1 Ultra", 800.0, &[64, 128]),
    sku("M2", 100.0, &[8, 16, 24]),
    sku("M2 Pro", 200.0, &[16, 32]),
    sku("M2 Max", 400.0, &[32, 64, 96]),
    sku("M2 Ultra", 800.0, &[64, 128, 192]),
    sku("M3", 100.0, &[8, 16, 24]),
    sku("M3 Pro", 150.0, &[18, 36]),
    sku("M3 Max", 400.0, &[36, 48, 64, 96, 128]),
    sku("M3 Ultra", 819.0, &[96, 256, 512]),
    sku("M4", 120.0, &[16, 24, 32]),
    sku("M4 Pro", 273.0, &[24, 48]),
    sku("M4 Max", 546.0, &[36, 48, 64, 128]),
];

/// Bytes of memory; `None` where the system does not say.
pub(crate) fn ram() -> Option<u64> {
    if cfg!(target_os = "macos") {
        return sysctl("hw.memsize")?.parse().ok();
    }
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let total = kib.checked_mul(1024)?;
    // In a container the limit counts, not the host.
    let limit =
        fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    Some(limit.map_or(total, |limit: u64| limit.min(total)))
}

pub(crate) fn processor() -> String {
    let name = if cfg!(target_os = "macos") {
        sysctl("machdep.cpu.brand_string")
    } else {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with("model name"));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
    };
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "this machine".to_owned())
}

pub(crate) fn sysctl(name: &str) -> Option<String> {
    let output = Command::new("sysctl").args(["-n", name]).output().ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Reading speed of the memory that MLX computes in, measured now, in GB/s (10^9 bytes a second): of the GPU's, else of
/// main memory with so many threads (`None` for all processors). Takes a fraction of a second.
///
/// # Errors
/// The GPU's memory is full.
pub fn measured_bandwidth(threads: Option<usize>) -> Result<f64> {
    if default_device() == DeviceKind::Gpu { gpu_bandwidth() } else { Ok(ram_bandwidth(threads)) }
}

/// Reading speed of main memory, in GB/s: the best of a few passes over more than any cache
/// holds.
fn ram_bandwidth(threads: Option<usize>) -> f64 {
    let buffer = vec![1u64; MEASURED_BYTES / size_of::<u64>()];
    let all = || thread::available_parallelism().map_or(1, usize::from);
    let workers = threads.unwrap_or_else(all).max(1);
    let share = buffer.len().div_ceil(workers);
    let pass = || {
        let started = Instant::now();
        thread::scope(|scope| {
            for part in buffer.chunks(share) {
                // Without a thread of its own a part is read here.
                let own = thread::Builder::new().spawn_scoped(scope, move || black_box(sum(part)));
                if own.is_err() {
                    black_box(sum(part));
                }
            }
        });
        MEASURED_BYTES as f64 / started.elapsed().as_secs_f64() / 1e9
    };
    // A busy machine shall not keep anybody waiting for an estimate.
    let started = Instant::now();
    let mut best = pass();
    for _ in 1..PASSES {
        if started.elapsed() < LONGEST {
            best = best.max(pass());
        }
    }
    best
}

/// Eight sums at once, so that additions do not wait for each other.
fn sum(part: &[u64]) -> u64 {
    let (rows, rest) = part.as_chunks::<8>();
    let mut sums = [0u64; 8];
    for row in rows {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().chain(rest).fold(0, |total, value| total.wrapping_add(*value))
}

/// Reading speed of the GPU's memory in GB/s, from sums over rows of a large matrix.
fn gpu_bandwidth() -> Result<f64> {
    const SIDE: i32 = 16384;
    let matrix = Array::scalar(1.0, Dtype::Float32)?.broadcast_to(&[SIDE, SIDE])?.add_scalar(0.5)?;
    eval([&matrix])?;
    let mut best = 0.0f64;
    for _ in 0..PASSES {
        let started = Instant::now();
        eval([&matrix.sum(1, false)?])?;
        best = best.max(matrix.nbytes() as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_that_can_be_read() {
        assert!(ram().unwrap() > 256 << 20);
        let speed = ram_bandwidth(Some(1));
        assert!(speed > 0.0 && speed < 10_000.0, "{speed}");
    }

    #[test]
    fn the_line_up_is_whole() {
        let machines: Vec<_> = Machine::apple().collect();
        assert_eq!(machines.len(), 41);
        let machine = machines.iter().find(|machine| machine.name == "M4 Max 128 GB").unwrap();
        assert_eq!(machine.memory, 128 << 30);
        assert_eq!(machine.usable(None), 96 << 30);
        assert_eq!(machine.usable(Some(5)), 5);
    }
}
