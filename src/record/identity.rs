//! Which machine it is.

use std::thread;

use serde::{Deserialize, Serialize};
use sysinfo::System;

use crate::mlx::{DeviceKind, default_device, device_info};
use crate::registry::machine;

/// A machine, as far as measurements depend on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MachineIdentity {
    /// Its short name: the processor's, or that of a GPU of its own, in lower case with `-` between words, such as
    /// `apple-m4-pro` and `nvidia-h200`. A processor that is sold in any number of cores has that behind it:
    /// `intel-xeon-processor-2c`.
    pub key: String,
    /// What the network calls it.
    pub host: Option<String>,
    /// The processor.
    pub cpu: String,
    /// Its cores.
    pub physical_cores: Option<usize>,
    /// Threads that it runs at once.
    pub logical_cores: Option<usize>,
    /// Memory in bytes.
    pub ram_bytes: Option<u64>,
    /// The operating system and its version.
    pub os: Option<String>,
    /// Instruction set, such as `x86_64`.
    pub arch: String,
    /// The GPU that MLX runs on.
    pub gpu: Option<String>,
    /// Its memory in bytes.
    pub gpu_bytes: Option<u64>,
}

impl MachineIdentity {
    /// This machine; the GPU only if MLX runs on it.
    pub fn this() -> Self {
        let gpu = match default_device() {
            DeviceKind::Gpu => device_info(DeviceKind::Gpu),
            DeviceKind::Cpu => Default::default(),
        };
        let cpu = machine::processor();
        let logical_cores = thread::available_parallelism().map(usize::from).ok();
        Self {
            key: key(&cpu, logical_cores, gpu.name.as_deref()),
            host: System::host_name(),
            physical_cores: System::physical_core_count(),
            logical_cores,
            ram_bytes: machine::ram(),
            os: System::long_os_version(),
            arch: std::env::consts::ARCH.to_owned(),
            cpu,
            gpu: gpu.name,
            gpu_bytes: gpu.memory,
        }
    }

    /// What computes: the GPU, else the processor.
    pub fn device(&self) -> &str {
        self.gpu.as_deref().unwrap_or(&self.cpu)
    }
}

fn key(cpu: &str, cores: Option<usize>, gpu: Option<&str>) -> String {
    let slug = |name: &str| {
        let name = name.to_lowercase().replace("(r)", "").replace("(tm)", "");
        let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    };
    let own = gpu.filter(|gpu| !gpu.starts_with("Apple"));
    match (own, cores) {
        (Some(gpu), _) => slug(gpu),
        // Apple's name says how many there are.
        (None, Some(cores)) if !cpu.starts_with("Apple") => format!("{}-{cores}c", slug(cpu)),
        (None, _) => slug(cpu),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_short_names() {
        assert_eq!(key("Apple M4 Pro", Some(12), Some("Apple M4 Pro")), "apple-m4-pro");
        assert_eq!(key("Intel(R) Xeon(R) Processor", Some(2), None), "intel-xeon-processor-2c");
        assert_eq!(key("AMD EPYC 9654 96-Core", Some(16), Some("NVIDIA H200")), "nvidia-h200");
        assert_eq!(key("this machine", None, None), "this-machine");
    }

    #[test]
    fn this_machine_has_a_name() {
        let machine = MachineIdentity::this();
        assert!(!machine.key.is_empty() && !machine.device().is_empty());
        assert!(machine.ram_bytes.unwrap() > 256 << 20);
        assert!(machine.key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
    }
}
