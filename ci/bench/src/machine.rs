// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine that was measured.
use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine that was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Processors that may be used.
    pub cpus: usize,
    /// Whether they belong to a virtual machine.
    pub virtual_machine: bool,
    /// Last level of cache, as the kernel tells it.
    pub cache: String,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// The operating system.
    pub system: String,
}

impl Machine {
    /// This machine.
    #[must_use]
    pub fn this() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let flags = field(&cpuinfo, "flags");
        let memory: u64 = field(&read("/proc/meminfo"), "MemTotal")
            .trim_end_matches(" kB")
            .parse()
            .unwrap_or(0);
        Self {
            cpu: field(&cpuinfo, "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            virtual_machine: flags.split(' ').any(|flag| flag == "hypervisor"),
            cache: read("/sys/devices/system/cpu/cpu0/cache/index3/size")
                .trim()
                .to_owned(),
            memory_mib: memory / 1024,
            kernel: output("uname", &["-r"]),
            system: read("/etc/os-release")
                .lines()
                .find_map(|line| line.strip_prefix("PRETTY_NAME="))
                .unwrap_or_default()
                .trim_matches('"')
                .to_owned(),
        }
    }

    /// In words.
    #[must_use]
    pub fn describe(&self) -> String {
        let kind = if self.virtual_machine {
            " (a virtual machine)"
        } else {
            ""
        };
        format!(
            "{} CPUs of {}{kind}, last-level cache {}, {} MiB of memory, {}, kernel {}",
            self.cpus, self.cpu, self.cache, self.memory_mib, self.system, self.kernel
        )
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

/// The first value of a `key : value` file.
fn field(text: &str, key: &str) -> String {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim().to_owned())
        .unwrap_or_default()
}
