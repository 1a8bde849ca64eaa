// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma check`: what this host has, and lacks, for VMs with the device, and what to do
//! about it. It reads what the kernel tells, and changes nothing.
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::{default_workers, descriptors_for, FrontEnd};
use crate::status::{self, list_devices};

/// PCI identifiers of the device, as lspci prints them.
const PCI_ID: &str = "1af4:106a";
/// Interrupts of a VM that Linux AIO delivers at a time, at most.
const INTERRUPTS: u64 = 1024;

/// Why nothing was looked at.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What lspci said cannot be read.
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// The output is closed.
    #[error("cannot say what was found")]
    Output(#[from] io::Error),
}

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// As it should be.
    Good,
    /// It works, but could be better.
    Note,
    /// It does not work.
    Bad,
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    state: State,
    what: String,
    /// What to do.
    remedy: Option<String>,
}

impl Finding {
    fn good(what: impl Into<String>) -> Self {
        Self {
            state: State::Good,
            what: what.into(),
            remedy: None,
        }
    }

    fn of(state: State, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            state,
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }
}

/// What is looked at besides the host.
#[derive(Debug, Clone, Default)]
pub struct Subjects {
    /// The status socket of a process.
    pub status_socket: Option<PathBuf>,
    /// What `lspci -nnk` said in a guest.
    pub lspci: Option<PathBuf>,
}

/// Looks at the host and `subjects`, and says to `out` what it found. False, if something does not
/// work.
///
/// # Errors
/// If a file that is to be looked at cannot be read.
pub fn run(subjects: &Subjects, out: &mut impl Write) -> Result<bool, Error> {
    let mut findings = host(Path::new("/"));
    if let Some(path) = &subjects.status_socket {
        findings.extend(process(path));
    }
    if let Some(path) = &subjects.lspci {
        let text = fs::read_to_string(path);
        findings.push(guest(
            &text.map_err(|error| Error::Read(path.clone(), error))?,
        ));
    }
    for finding in &findings {
        let state = match finding.state {
            State::Good => "ok",
            State::Note => "note",
            State::Bad => "BAD",
        };
        writeln!(out, "{state:<4}  {}", finding.what)?;
        if let Some(remedy) = &finding.remedy {
            writeln!(out, "      {remedy}")?;
        }
    }
    Ok(findings.iter().all(|finding| finding.state != State::Bad))
}

/// What there is to find below `root`, which is / but in tests.
fn host(root: &Path) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let mut findings = vec![kvm(root), landlock(read("sys/kernel/security/lsm"))];
    findings.push(workers(read("proc/cpuinfo")));
    findings.push(files(read("proc/self/limits")));
    findings.extend(interrupts(
        read("proc/sys/fs/aio-nr"),
        read("proc/sys/fs/aio-max-nr"),
    ));
    findings.extend(huge_pages(
        read("sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        read("proc/meminfo"),
    ));
    let processes = processes(root);
    findings.extend(memory_lock(&processes));
    findings.extend(processes.iter().filter_map(machine));
    findings.extend(pinning(root, &processes));
    findings
}

fn kvm(root: &Path) -> Finding {
    let path = root.join("dev/kvm");
    let open = fs::File::options().read(true).write(true).open(&path);
    match open {
        Ok(_) => Finding::good("KVM: VMs run at the speed of the host"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Finding::of(
            State::Note,
            "KVM: there is no /dev/kvm, so VMs are emulated (QEMU's TCG), 10 to 50 times slower",
            "load kvm_amd or kvm_intel; turn virtualisation on in the firmware, or in the VM that \
             this host is",
        ),
        Err(error) => Finding::of(
            State::Note,
            format!("KVM: /dev/kvm is not yours to open: {error}"),
            "whoever runs QEMU needs to be in the group kvm",
        ),
    }
}

fn landlock(modules: Option<String>) -> Finding {
    match modules {
        Some(list) if list.split(',').any(|module| module.trim() == "landlock") => {
            Finding::good("sandbox: the kernel has Landlock")
        }
        Some(_) => Finding::of(
            State::Note,
            "sandbox: the kernel does without Landlock; files are restricted by system calls only",
            "boot with lsm=landlock,... on the kernel's command line",
        ),
        None => Finding::of(
            State::Note,
            "sandbox: whether the kernel has Landlock cannot be seen",
            "mount securityfs at /sys/kernel/security",
        ),
    }
}

fn workers(cpus: Option<String>) -> Finding {
    let is_cpu = |line: &&str| line.starts_with("processor");
    let cpus = cpus.map_or(1, |text| text.lines().filter(is_cpu).count());
    let workers = default_workers();
    let what = format!("CPUs: {cpus}, of which {workers} poll while there is traffic");
    if cpus < 4 {
        return Finding::of(
            State::Note,
            what,
            "a worker and a vCPU that want the same CPU take turns: give VMs fewer vCPUs than CPUs, \
             or have workers sleep sooner (--poll-us)",
        );
    }
    Finding::good(what)
}

fn files(limits: Option<String>) -> Finding {
    let limits = limits.unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    // What the process may raise it to.
    let most = line.and_then(|line| line.split_whitespace().nth(1));
    let most = most
        .and_then(|most| most.parse::<u64>().ok())
        .unwrap_or(u64::MAX);
    let devices = (1..).take_while(|count| descriptors_for(*count) <= most);
    // More are not asked for by anybody.
    let devices = devices.take(1000).count();
    match devices {
        0 => Finding::of(
            State::Bad,
            format!("open files: {most} are too few for one device"),
            "raise `ulimit -Hn`, or LimitNOFILE= of the service",
        ),
        1..8 => Finding::of(
            State::Note,
            format!("open files: {most}, enough for devices: {devices}"),
            "for more, raise `ulimit -Hn`, or LimitNOFILE= of the service",
        ),
        _ => Finding::good(format!(
            "open files: {most}, enough for {devices} devices or more"
        )),
    }
}

fn interrupts(used: Option<String>, most: Option<String>) -> Option<Finding> {
    let number = |text: Option<String>| text?.trim().parse::<u64>().ok();
    let (used, most) = (number(used)?, number(most)?);
    if most.saturating_sub(used) >= INTERRUPTS {
        return None;
    }
    Some(Finding::of(
        State::Bad,
        format!(
            "interrupts: {used} of {most} requests of Linux AIO are taken, by whatever runs here"
        ),
        "sysctl -w fs.aio-max-nr=1048576",
    ))
}

fn huge_pages(shared: Option<String>, memory: Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let chosen = shared.as_deref().and_then(|text| {
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0)
    });
    match chosen {
        Some("always" | "within_size" | "advise") => findings.push(Finding::good(
            "huge pages: shared memory of VMs may have them (transparent)",
        )),
        Some(_) => findings.push(Finding::of(
            State::Note,
            "huge pages: shared memory of VMs has none, which costs small messages to many places",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve some \
             (vm.nr_hugepages) and give QEMU memory-backend-memfd,hugetlb=on",
        )),
        None => {}
    }
    let memory = memory.unwrap_or_default();
    let line = |name: &str| {
        let line = memory.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    if let (Some(total @ 1..), Some(free)) = (line("HugePages_Total:"), line("HugePages_Free:")) {
        findings.push(Finding::good(format!(
            "huge pages: {free} of {total} that are reserved are free"
        )));
    }
    findings
}

/// A process that is looked at.
#[derive(Debug, Default)]
struct Process {
    id: u32,
    /// The words of its command line.
    words: Vec<String>,
    /// How much memory it may lock, in words of the kernel.
    lock_limit: Option<String>,
}

impl Process {
    fn read(root: &Path, id: u32) -> Option<Self> {
        let of = |name: &str| root.join(format!("proc/{id}/{name}"));
        let line = fs::read(of("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).into_owned();
        let limits = fs::read_to_string(of("limits")).unwrap_or_default();
        let mut limits = limits.lines();
        let lock_limit = limits.find_map(|line| line.strip_prefix("Max locked memory"));
        let lock_limit = lock_limit.and_then(|rest| rest.split_whitespace().next());
        Some(Self {
            id,
            words: line.split_terminator('\0').map(str::to_owned).collect(),
            lock_limit: lock_limit.map(str::to_owned),
        })
    }

    fn program(&self) -> &str {
        let program = self.words.first().map(Path::new).and_then(Path::file_name);
        program.and_then(|name| name.to_str()).unwrap_or_default()
    }

    fn has(&self, what: &str) -> bool {
        self.words.iter().any(|word| word.contains(what))
    }

    /// It is QEMU, and its VM has the device.
    fn is_machine(&self) -> bool {
        self.program().starts_with("qemu")
            && (self.has("vhost-user-rdma") || self.has("vfio-user-pci"))
    }
}

/// All that run here.
fn processes(root: &Path) -> Vec<Process> {
    let mut ids = numbers_in(&root.join("proc"));
    ids.sort_unstable();
    let read = |id| Process::read(root, id);
    ids.into_iter().filter_map(read).collect()
}

fn numbers_in(directory: &Path) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    entries.filter_map(number).collect()
}

/// Who locks memory.
fn memory_lock(processes: &[Process]) -> Vec<Finding> {
    let machines = processes.iter().filter(|process| process.is_machine());
    let locks = machines.filter(|process| process.has("mem-lock=on"));
    let limited = locks.filter_map(|process| match process.lock_limit.as_deref() {
        None | Some("unlimited") => None,
        Some(limit) => Some(Finding::of(
            State::Note,
            format!(
                "locked memory: QEMU of process {} locks its memory (mem-lock=on), {limit} bytes at most",
                process.id
            ),
            "memory that is plugged in later cannot go beyond that: raise `ulimit -l` for QEMU",
        )),
    });
    let limited: Vec<_> = limited.collect();
    if !limited.is_empty() {
        return limited;
    }
    vec![Finding::good(
        "locked memory: no limit matters here, since the device has no memory of VMs locked (in guests, \
         registered memory counts: `ulimit -l`)",
    )]
}

/// Whether memory of an `-object` of QEMU is shared: `None`, if it is no memory.
fn is_shared(object: &str) -> Option<bool> {
    let parsed: Value = serde_json::from_str(object).unwrap_or_default();
    let (kind, share) = match parsed["qom-type"].as_str() {
        // As libvirt writes it.
        Some(kind) => (kind, parsed["share"].as_bool()),
        None => {
            let (kind, options) = object.split_once(',').unwrap_or((object, ""));
            let mut options = options.split(',');
            let share = options.find_map(|option| option.strip_prefix("share="));
            let share = share.map(|share| matches!(share, "on" | "yes" | "true" | "y"));
            (kind.trim_start_matches("qom-type="), share)
        }
    };
    let kind = kind.strip_prefix("memory-backend-")?;
    // These are shared unless they are told not to be.
    Some(share.unwrap_or(matches!(kind, "memfd" | "shm")))
}

/// A VM that has the device.
fn machine(process: &Process) -> Option<Finding> {
    if !process.is_machine() {
        return None;
    }
    let name = format!("VM of process {}", process.id);
    let remedy = "give QEMU -object memory-backend-memfd,id=mem,size=...,share=on and \
                  -machine memory-backend=mem";
    let shared: Vec<_> = process
        .words
        .iter()
        .filter_map(|word| is_shared(word))
        .collect();
    if shared.is_empty() {
        let what = format!("{name}: its memory is QEMU's alone");
        return Some(Finding::of(State::Bad, what, remedy));
    }
    if shared.contains(&false) {
        let what = format!("{name}: its memory is not shared");
        return Some(Finding::of(State::Bad, what, remedy));
    }
    if process.has("vhost-user-rdma") && !process.has("reconnect") {
        return Some(Finding::of(
            State::Note,
            format!("{name}: its memory is shared; it does not connect again"),
            "give its chardev reconnect-ms=1000, so that the device comes back after a new start",
        ));
    }
    Some(Finding::good(format!("{name}: its memory is shared")))
}

/// Threads that are busy while there is traffic, and where they may run.
#[derive(Debug, Default)]
struct Busy {
    threads: usize,
    cpus: BTreeSet<usize>,
}

impl Busy {
    /// Counts the threads of a process whose names `are_wanted`.
    fn count(&mut self, root: &Path, process: &Process, are_wanted: impl Fn(&str) -> bool) {
        let tasks = root.join(format!("proc/{}/task", process.id));
        for task in numbers_in(&tasks) {
            let of = |name: &str| fs::read_to_string(tasks.join(format!("{task}/{name}"))).ok();
            if of("comm").is_some_and(|name| are_wanted(name.trim())) {
                self.threads += 1;
                self.cpus
                    .extend(allowed_cpus(&of("status").unwrap_or_default()));
            }
        }
    }

    /// There are fewer CPUs for them.
    fn are_crowded(&self) -> bool {
        self.cpus.len() < self.threads
    }
}

/// The CPUs on which a thread may run that has this for its `status`.
fn allowed_cpus(status: &str) -> Vec<usize> {
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let ranges = list.unwrap_or_default().trim().split(',');
    let of = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    ranges.filter_map(of).flatten().collect()
}

/// CPUs in the form that taskset takes.
fn cpu_list(cpus: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => ranges.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Where workers and vCPUs may run.
fn pinning(root: &Path, processes: &[Process]) -> Option<Finding> {
    let (mut workers, mut vcpus) = (Busy::default(), Busy::default());
    for process in processes {
        if process.is_machine() {
            // As QEMU calls them with -name debug-threads=on, as libvirt has it.
            vcpus.count(root, process, |name| name.starts_with("CPU "));
        } else if process.program() == "vhost-device-rdma" {
            workers.count(root, process, |name| name.starts_with("worker"));
        }
    }
    if workers.threads == 0 {
        return None;
    }
    let of_workers = format!(
        "workers: {} on CPUs {}",
        workers.threads,
        cpu_list(&workers.cpus)
    );
    if workers.are_crowded() {
        return Some(Finding::of(
            State::Note,
            format!("CPU pinning: {of_workers}, where they take turns"),
            "name as many `cpus` in the configuration as there are workers, or have fewer of these",
        ));
    }
    if vcpus.threads == 0 && processes.iter().any(Process::is_machine) {
        return Some(Finding::of(
            State::Note,
            format!("CPU pinning: {of_workers}; which threads are vCPUs cannot be seen"),
            "give QEMU -name debug-threads=on",
        ));
    }
    if vcpus.threads == 0 {
        return Some(Finding::good(format!("CPU pinning: {of_workers}")));
    }
    let both = format!(
        "CPU pinning: {of_workers}; vCPUs: {} on CPUs {}",
        vcpus.threads,
        cpu_list(&vcpus.cpus)
    );
    let apart = "have workers on CPUs of their own (`cpus` in the configuration), and vCPUs on others (`virsh \
                 vcpupin`, taskset)";
    let all = Busy {
        threads: workers.threads + vcpus.threads,
        cpus: workers.cpus.union(&vcpus.cpus).copied().collect(),
    };
    if !workers.cpus.is_disjoint(&vcpus.cpus) {
        let more = match all.are_crowded() {
            true => "more threads than CPUs: workers and vCPUs take turns",
            false => "workers and vCPUs may meet on a CPU",
        };
        return Some(Finding::of(State::Note, format!("{both}; {more}"), apart));
    }
    if vcpus.are_crowded() {
        return Some(Finding::of(
            State::Note,
            format!("{both}, where they take turns"),
            "a guest that waits busily for a message keeps the CPU from the one that is to send it: give VMs \
             fewer vCPUs, or more CPUs",
        ));
    }
    Some(Finding::good(both))
}

/// What QEMU takes to have the device at this socket.
fn options(front_end: FrontEnd, socket: &str) -> String {
    match front_end {
        FrontEnd::VhostUser => format!(
            "-chardev socket,id=rdma0,path={socket},reconnect-ms=1000 \
             -device vhost-user-rdma-pci,chardev=rdma0"
        ),
        FrontEnd::VfioUser => format!(
            "-device '{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"type\":\"unix\",\"path\":\"{socket}\"}}}}'"
        ),
    }
}

/// A device process that runs.
fn process(path: &Path) -> Vec<Finding> {
    let devices = match list_devices(path) {
        Ok(devices) => devices,
        Err(error @ status::Error::Ask { .. }) => {
            return vec![Finding::of(
                State::Bad,
                crate::error::sentence(&error),
                "start it with --status-socket, as the user that you are, or use sudo",
            )];
        }
        Err(error) => {
            let what = crate::error::sentence(&error);
            return vec![Finding::of(State::Bad, what, "start it anew")];
        }
    };
    let of = |device: status::Listed| {
        let name = device.name;
        if !device.link_up {
            let what = format!("{name}: its link is down");
            let remedy = format!("vhost-device-rdma link {} {name} up", path.display());
            return Finding::of(State::Note, what, remedy);
        }
        if !device.attached {
            return Finding::of(
                State::Note,
                format!("{name}: no VM is attached"),
                format!("give QEMU {}", options(device.front_end, &name)),
            );
        }
        Finding::good(format!("{name}: a VM is attached"))
    };
    devices.into_iter().map(of).collect()
}

/// What lspci says in a guest.
fn guest(lspci: &str) -> Finding {
    let mut lines = lspci.lines();
    let Some(found) = lines.find(|line| line.contains(PCI_ID)) else {
        // Without -n there are names only.
        let has_ids = lspci.contains("1af4:") || lspci.contains("8086:");
        if !has_ids {
            return Finding::of(
                State::Bad,
                "guest: there are no identifiers in what lspci said",
                "have it from lspci -nnk",
            );
        }
        return Finding::of(
            State::Bad,
            format!("guest: there is no device {PCI_ID}"),
            "give QEMU -device vhost-user-rdma-pci,chardev=..., or '{\"driver\":\"vfio-user-pci\",...}' if \
             that is what its socket is for; it says why if it cannot",
        );
    };
    let slot = found.split_whitespace().next().unwrap_or("?");
    let details = lines.take_while(|line| line.starts_with(char::is_whitespace));
    let mut driver = details.filter_map(|line| line.trim().strip_prefix("Kernel driver in use:"));
    match driver.next().map(str::trim) {
        Some("virtio-pci") => Finding::good(format!(
            "guest: {slot} is the device, and has virtio-pci (then `rdma link` shows it, if the \
             module virtio_rdma is loaded)"
        )),
        Some(other) => Finding::of(
            State::Bad,
            format!("guest: {slot} is the device, and {other} has it"),
            "take it from that driver, and give it to virtio-pci",
        ),
        None => Finding::of(
            State::Bad,
            format!("guest: {slot} is the device, and no driver has it"),
            "modprobe virtio_pci virtio_rdma; lspci -k says which driver has it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::tempdir::TempDir;

    use super::*;

    fn state(finding: Option<Finding>) -> Option<State> {
        finding.map(|finding| finding.state)
    }

    #[test]
    fn memory_of_vms_is_to_be_shared() {
        let of = |line: &str| {
            let words = line.split_whitespace().map(str::to_owned).collect();
            state(machine(&Process {
                words,
                ..Process::default()
            }))
        };
        let card = "-chardev socket,path=/a,reconnect-ms=1 -device vhost-user-rdma-pci,chardev=c";
        assert_eq!(of("bash -c vhost-user-rdma-pci"), None);
        assert_eq!(of("/usr/bin/qemu-system-x86_64 -m 1G"), None);
        let with = |more: &str| of(&format!("/usr/bin/qemu-system-x86_64 {card} {more}"));
        assert_eq!(with("-m 1G"), Some(State::Bad));
        let memfd = "-object memory-backend-memfd,id=m,size=1G";
        assert_eq!(with(memfd), Some(State::Good));
        assert_eq!(with(&format!("{memfd},share=off")), Some(State::Bad));
        let file = "-object memory-backend-file,id=m,size=1G,mem-path=/dev/shm/m";
        assert_eq!(with(file), Some(State::Bad));
        assert_eq!(with(&format!("{file},share=on")), Some(State::Good));
        // As libvirt has it.
        let json = |more: &str| {
            with(&format!(
                "-object {{\"qom-type\":\"memory-backend-{more},\"id\":\"m\",\"size\":1}}"
            ))
        };
        assert_eq!(json("file\",\"share\":true"), Some(State::Good));
        assert_eq!(json("file\",\"share\":false"), Some(State::Bad));
        assert_eq!(json("file\""), Some(State::Bad));
        assert_eq!(json("memfd\",\"share\":false"), Some(State::Bad));
        assert_eq!(json("memfd\""), Some(State::Good));
        let forgets = "qemu-kvm -device vhost-user-rdma-pci,chardev=c";
        assert_eq!(of(&format!("{forgets} {memfd}")), Some(State::Note));
    }

    #[test]
    fn a_device_is_attached_as_its_front_end_takes_it() {
        let vhost_user = options(FrontEnd::VhostUser, "/run/a");
        assert!(vhost_user.ends_with("-device vhost-user-rdma-pci,chardev=rdma0"));
        let vfio_user = options(FrontEnd::VfioUser, "/run/a");
        let object = vfio_user.strip_prefix("-device '").unwrap();
        let object: Value = serde_json::from_str(object.strip_suffix('\'').unwrap()).unwrap();
        assert_eq!(object["driver"], "vfio-user-pci");
        assert_eq!(object["socket"]["path"], "/run/a");
    }

    #[test]
    fn workers_and_vcpus_are_to_be_on_cpus_of_their_own() {
        let of = |workers: &[&str], vcpus: &[&str]| {
            let directory = TempDir::new().unwrap();
            let root = directory.as_path();
            let process = |id: usize, line: &str, name: &str, threads: &[&str]| {
                for (at, cpus) in threads.iter().enumerate() {
                    let task = root.join(format!("proc/{id}/task/{}", id + at));
                    fs::create_dir_all(&task).unwrap();
                    fs::write(task.join("comm"), format!("{name}{at}\n")).unwrap();
                    let status = format!("Name: x\nCpus_allowed_list:\t{cpus}\n");
                    fs::write(task.join("status"), status).unwrap();
                }
                fs::create_dir_all(root.join(format!("proc/{id}"))).unwrap();
                fs::write(root.join(format!("proc/{id}/cmdline")), line).unwrap();
            };
            let device = "/usr/bin/vhost-device-rdma\0--config\0x\0";
            process(100, device, "worker", workers);
            let machine = "qemu-system-x86_64\0-device\0vhost-user-rdma-pci\0";
            process(200, machine, "CPU ", vcpus);
            pinning(root, &processes(root)).map(|of| (of.state, of.what))
        };
        assert_eq!(of(&[], &["0"]), None);
        let (note, what) = of(&["0-3"], &[]).unwrap();
        assert_eq!(note, State::Note);
        assert!(what.ends_with("cannot be seen"), "{what}");
        let (good, what) = of(&["2", "3"], &["0-1", "0-1"]).unwrap();
        assert_eq!(good, State::Good);
        assert!(
            what.ends_with("2 on CPUs 2-3; vCPUs: 2 on CPUs 0-1"),
            "{what}"
        );
        let (note, what) = of(&["2", "2"], &["0-1"]).unwrap();
        assert_eq!(note, State::Note);
        assert!(
            what.contains("2 on CPUs 2, where they take turns"),
            "{what}"
        );
        let (_, what) = of(&["0-3"], &["0-3", "0-3"]).unwrap();
        assert!(what.contains("may meet on a CPU"), "{what}");
        let (_, what) = of(&["0-1"], &["0-1", "0-1"]).unwrap();
        assert!(what.contains("more threads than CPUs"), "{what}");
        let (note, what) = of(&["0"], &["1,3", "1,3", "1,3"]).unwrap();
        assert_eq!(note, State::Note);
        assert!(
            what.contains("3 on CPUs 1,3, where they take turns"),
            "{what}"
        );
    }

    #[test]
    fn locked_memory_is_looked_at_where_it_is_locked() {
        let of = |more: &str, limit: Option<&str>| {
            let line = format!("qemu-kvm -device vfio-user-pci {more}");
            let process = Process {
                words: line.split_whitespace().map(str::to_owned).collect(),
                lock_limit: limit.map(str::to_owned),
                ..Process::default()
            };
            memory_lock(&[process]).remove(0).state
        };
        assert_eq!(of("", Some("65536")), State::Good);
        assert_eq!(
            of("-overcommit mem-lock=on", Some("unlimited")),
            State::Good
        );
        assert_eq!(of("-overcommit mem-lock=on", Some("65536")), State::Note);
    }

    #[test]
    fn what_a_guest_sees_is_understood() {
        let of = |text: &str| guest(text).state;
        let bridge = "00:00.0 Host bridge [0600]: Intel Corporation 82G33 [8086:29c0]\n";
        let card = "01:00.0 Network controller [0280]: Red Hat, Inc. Device [1af4:106a] (rev 01)\n";
        let with = |driver: &str| format!("{bridge}{card}\tKernel driver in use: {driver}\n");
        assert_eq!(of(&with("virtio-pci")), State::Good);
        assert_eq!(of(&with("vfio-pci")), State::Bad);
        assert_eq!(
            of(&format!(
                "{card}{bridge}\tKernel driver in use: virtio-pci\n"
            )),
            State::Bad
        );
        assert_eq!(of(bridge), State::Bad);
        assert_eq!(of(""), State::Bad);
    }

    #[test]
    fn a_host_is_looked_at() {
        let directory = TempDir::new().unwrap();
        let root = directory.as_path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let states = || -> Vec<State> { host(root).iter().map(|of| of.state).collect() };
        // Nothing can be seen, and nothing is said to be bad for that.
        assert!(!states().contains(&State::Bad));
        write("dev/kvm", "");
        write(
            "sys/kernel/security/lsm",
            "lockdown,capability,landlock,yama\n",
        );
        write("proc/cpuinfo", &"processor\t: 0\n".repeat(4));
        let limits = "Limit  Soft Limit  Hard Limit  Units\n\
                      Max open files            1024                 524288               files\n";
        write("proc/self/limits", limits);
        write("proc/sys/fs/aio-nr", "0\n");
        write("proc/sys/fs/aio-max-nr", "65536\n");
        write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always [advise] never\n",
        );
        write(
            "proc/meminfo",
            "MemTotal: 1 kB\nHugePages_Total:       8\nHugePages_Free:        3\n",
        );
        write(
            "proc/17/cmdline",
            "/usr/bin/qemu-system-x86_64\0-device\0vhost-user-rdma-pci\0",
        );
        let found = host(root);
        let bad: Vec<_> = found.iter().filter(|of| of.state != State::Good).collect();
        assert_eq!(bad.len(), 1, "{bad:?}");
        assert!(bad[0].what.starts_with("VM of process 17"), "{bad:?}");
        assert!(
            found.iter().any(|of| of.what.contains("3 of 8")),
            "{found:?}"
        );
        write("proc/self/limits", "Max open files  100  200  files\n");
        write("proc/sys/fs/aio-nr", "65000\n");
        write("sys/kernel/security/lsm", "capability\n");
        let bad = states()
            .into_iter()
            .filter(|state| *state == State::Bad)
            .count();
        assert_eq!(bad, 3);
    }
}
