// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The launcher: a [`Bed`] is a device process and the VMs on it.
//!
//! All processes of a bed end with it, however it ends: each is started with its parent-death
//! signal set. That signal goes out when the *thread* that started it ends, so beds are started and
//! restarted from the main thread.

mod agent;
mod capture;
mod chroot;
mod device;
pub mod namespace;
mod qmp;
mod switch;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::process::{kill_process, Pid, Signal};
use serde_json::{json, Value};

pub use agent::{Agent, Job, Output, NO_END};
pub use capture::Capture;
pub use chroot::Chroot;
pub use device::DeviceProcess;
pub use switch::Switch;

use crate::artifacts::Stack;
use crate::images::KernelImage;
use crate::shell;
use qmp::Qmp;

/// How long a guest may take from power-on to its agent, on a machine that is busy with other
/// things.
const BOOT: Duration = Duration::from_secs(120);
/// The same for an installed system, with all that it starts.
const BOOT_SYSTEM: Duration = Duration::from_secs(400);

/// QEMU's names of the RDMA device, of the slot it is in, and of the network interface.
const CARD: &str = "rdma-card";
const SLOT: &str = "rdma-port";
const NIC: &str = "nic";

/// How long a short command may take.
pub const SHORT: Duration = Duration::from_secs(60);

/// How QEMU has the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FrontEnd {
    /// By `vhost-user-rdma-pci`, which our patches add to it.
    #[default]
    VhostUser,
    /// By `vfio-user-pci`, which it has from 10.1 on.
    VfioUser,
    /// By vhost-user under a QEMU as Debian has built it: by its device for tests, which cannot
    /// have our device's id ([`TEST_ID`]), does not connect again, and interrupts by one line.
    #[value(skip)]
    VhostUserTest,
    /// Two VMs with each of [`FrontEnd::EACH`], in this order.
    #[value(skip)]
    Each,
}

/// The virtio device id of [`FrontEnd::VhostUserTest`]: QEMU has a name for it, Linux no driver.
pub const TEST_ID: u16 = 35;

/// Virtqueues of a device with the default of completion queues, but for doorbell queues: those are
/// as many as workers.
const QUEUES: usize = 6;

impl FrontEnd {
    /// All of them.
    pub const EACH: [FrontEnd; 3] = [
        FrontEnd::VfioUser,
        FrontEnd::VhostUserTest,
        FrontEnd::VhostUser,
    ];

    /// That of a VM, by its number from 1.
    fn of(self, number: u8) -> Self {
        match self {
            FrontEnd::Each => {
                let at = usize::from(number.saturating_sub(1) / 2);
                Self::EACH.get(at).copied().unwrap_or_default()
            }
            same => same,
        }
    }

    /// Whether VMs want a QEMU as Debian has built it.
    pub fn wants_stock(self) -> bool {
        self != FrontEnd::VhostUser
    }
}

/// Which device process VMs have, and what is between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// All have the same.
    One,
    /// Each has one of its own, as on a host of its own, with VXLAN between them; what carries that
    /// has IP packets of so many bytes at most.
    Vxlan(u16),
    /// Each has one of its own, with VXLAN that leads back to it.
    Loop,
    /// Each has one of its own, whose frames go through the same switch as those of the VM's
    /// network interface; IP packets have so many bytes at most.
    Switch(u16),
    /// Each has one of its own, at the TAP of the VM's network interface, which is in a bridge of
    /// its host, a network namespace; IP packets have so many bytes at most, and those that the
    /// device sends have these faults.
    Tap(u16, &'static str),
    /// Hosts and the VMs' network interfaces are as with [`Self::Tap`]; each VM has a device
    /// process of its own, with VXLAN between them.
    TapVxlan(u16),
    /// Ports of iWARP, whose connections device processes make by TCP of their hosts. Hosts and the
    /// VMs' network interfaces are as with [`Self::Tap`]; IP packets have [`IWARP_MTU`] bytes at most.
    Iwarp(Processes),
}

/// How many device processes make connections of iWARP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processes {
    /// One for all VMs, on the host of the first.
    One,
    /// One for each VM, on its host.
    Each,
}

/// MTU of the network between hosts with iWARP.
pub const IWARP_MTU: u16 = 1500;

impl Hosts {
    /// The MTU if hosts are network namespaces with bridges and TAPs.
    fn namespaces(self) -> Option<u16> {
        match self {
            Hosts::Tap(mtu, _) | Hosts::TapVxlan(mtu) => Some(mtu),
            Hosts::Iwarp(_) => Some(IWARP_MTU),
            Hosts::One | Hosts::Vxlan(_) | Hosts::Loop | Hosts::Switch(_) => None,
        }
    }
}

/// What to start.
pub struct Plan<'a> {
    /// Binaries, and what the guests get. Without it: stock guests on the QEMU given by `qemu`.
    pub stack: Option<&'a Stack>,
    /// The QEMU binary.
    pub qemu: &'a Path,
    /// That of VMs that want one as Debian has built it.
    pub stock_qemu: Option<&'a Path>,
    /// The root image.
    pub root: &'a Path,
    /// The kernel.
    pub kernel: &'a KernelImage,
    /// How many VMs.
    pub vms: u8,
    /// Memory of each in MiB.
    pub memory: u32,
    /// For how many guests that are no VMs the device has sockets, behind those of the VMs.
    pub bare: u8,
    /// Which device process each VM has.
    pub hosts: Hosts,
    /// How QEMU has the device; with VMs that are not [`Hosts::One`], by vhost-user.
    pub front_end: FrontEnd,
    /// They are hosts of VMs themselves: each has a second processor, and writes to its kernel's log
    /// what is denied.
    pub nested: bool,
    /// MiB of a disk for each that keeps its contents when the VM is killed, `/dev/vdc`.
    pub disk: Option<u64>,
    /// Where console and device logs go.
    pub logs: PathBuf,
    /// Give the serial consoles sockets (`console-N` in the bed's directory) instead of log files
    /// alone.
    pub interactive: bool,
}

/// A device process and VMs on it.
pub struct Bed {
    /// The device; None for stock guests.
    pub device: Option<DeviceProcess>,
    /// The devices of other hosts: those of the VMs from the second on, if they are on hosts of
    /// their own.
    pub others: Vec<DeviceProcess>,
    /// The VMs; `vms[0]` is number 1.
    pub vms: Vec<Vm>,
    /// What is between their network interfaces, if it is not QEMU itself.
    pub switch: Option<Switch>,
    /// A host beside them, which a case has started.
    pub chroot: Option<Chroot>,
    /// The guests of VMs that a case has started there.
    pub guests: Vec<Agent>,
    hosts: Option<namespace::Hosts>,
    directory: PathBuf,
}

impl Bed {
    /// The words before those of a command that is to run on the host of a VM, by its number from
    /// 1: none if hosts are no network namespaces.
    pub fn host_prefix(&self, number: u8) -> Vec<String> {
        let hosts = self.hosts.as_ref();
        hosts.map_or_else(Vec::new, |hosts| hosts.prefix(number))
    }

    /// Runs a command on the host of a VM, by its number from 1, if hosts are network namespaces.
    pub fn on_host(&self, number: u8, command: &str) -> Result<()> {
        let hosts = self.hosts.as_ref();
        hosts
            .context("hosts are no network namespaces")?
            .run(number, command)
    }

    /// Starts everything and waits until all guests are up.
    pub fn start(plan: &Plan) -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("virtio-rdma-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        fs::create_dir_all(&plan.logs)?;
        let mut bed = Bed {
            device: None,
            others: Vec::new(),
            vms: Vec::new(),
            switch: None,
            chroot: None,
            guests: Vec::new(),
            hosts: None,
            directory,
        };
        if let Hosts::Switch(_) = plan.hosts {
            bed.switch = Some(Switch::start(&bed.directory, plan.vms)?);
        }
        if let Some(mtu) = plan.hosts.namespaces() {
            bed.hosts = Some(namespace::Hosts::start(plan.vms, mtu)?);
        }
        if let (Some(stack), Hosts::Iwarp(processes)) = (plan.stack, plan.hosts) {
            let all: Vec<u8> = (1..=plan.vms).collect();
            let served: Vec<&[u8]> = match processes {
                Processes::One => vec![&all],
                Processes::Each => all.chunks(1).collect(),
            };
            for (vms, host) in served.into_iter().zip(1..) {
                let log = plan.logs.join(format!("device-{host}.log"));
                for vm in vms {
                    let add = format!("ip addr add {}/24 dev bridge", host_address(*vm));
                    bed.on_host(host, &add)?;
                }
                let command = (bed.host_prefix(host), stack.device.as_path());
                let device = DeviceProcess::start_iwarp(command, &bed.directory, vms, &all, &log)?;
                match &bed.device {
                    None => bed.device = Some(device),
                    Some(_) => bed.others.push(device),
                }
            }
        } else if let Some(stack) = plan.stack.filter(|_| plan.hosts != Hosts::One) {
            if let Hosts::TapVxlan(_) = plan.hosts {
                for number in 1..=plan.vms {
                    let address = host_address(number);
                    bed.on_host(number, &format!("ip addr add {address}/24 dev bridge"))?;
                }
            }
            for number in 1..=plan.vms {
                let log = plan.logs.join(format!("device-{number}.log"));
                let wire = match plan.hosts {
                    Hosts::Switch(mtu) => device::Wire::Switch(mtu),
                    Hosts::Tap(_, faults) => device::Wire::Tap(faults),
                    Hosts::TapVxlan(mtu) => device::Wire::HostVxlan(plan.vms, mtu),
                    Hosts::Vxlan(mtu) => device::Wire::Vxlan(plan.vms, mtu),
                    _ => device::Wire::Loop,
                };
                let directory = &bed.directory;
                let command = (bed.host_prefix(number), stack.device.as_path());
                let device = DeviceProcess::start_on_host(command, directory, number, wire, &log)?;
                match &bed.device {
                    None => bed.device = Some(device),
                    Some(_) => bed.others.push(device),
                }
            }
        } else if let Some(stack) = plan.stack {
            let sockets: Vec<_> = (1..=plan.vms + plan.bare)
                .map(|number| (bed.directory.join(format!("rdma-{number}")), mac(number)))
                .collect();
            let (status, log) = (bed.directory.join("status"), plan.logs.join("device.log"));
            // Those are the first ones.
            let by_vfio_user = |number: &u8| plan.front_end.of(*number) == FrontEnd::VfioUser;
            let vfio_user = (1..=plan.vms).filter(by_vfio_user).count();
            let device = &stack.device;
            let device = DeviceProcess::start(device, &sockets, vfio_user, &status, &log)?;
            bed.device = Some(device);
        }
        let workers = match &bed.device {
            Some(device) => device.workers()?,
            None => 0,
        };
        for number in 1..=plan.vms {
            let card = card(plan, &bed.directory, number, QUEUES + workers);
            let vm = Vm::start(plan, number, bed.host_prefix(number), &bed.directory, card)?;
            bed.vms.push(vm);
        }
        for vm in &mut bed.vms {
            vm.wait_up()?;
        }
        Ok(bed)
    }

    /// A VM by its number, from 1.
    pub fn vm(&self, number: u8) -> Result<&Vm> {
        self.vms
            .iter()
            .find(|vm| vm.number == number)
            .with_context(|| format!("there is no vm{number}"))
    }

    /// Ends all its processes.
    pub fn stop(&mut self) {
        self.vms.clear();
        self.device = None;
        self.others.clear();
        self.switch = None;
        self.guests.clear();
        self.chroot = None;
        self.hosts = None;
        // The next bed of this process has the same directory, and may be there before this one is
        // dropped.
        let directory = std::mem::take(&mut self.directory);
        if !directory.as_os_str().is_empty() {
            let _ = fs::remove_dir_all(directory);
        }
    }

    /// Its device processes.
    pub fn devices(&mut self) -> impl Iterator<Item = &mut DeviceProcess> {
        self.device.iter_mut().chain(&mut self.others)
    }

    /// What its device processes say of themselves.
    pub fn statuses(&self) -> Result<Vec<Value>> {
        let devices = self.device.iter().chain(&self.others);
        devices.map(DeviceProcess::status).collect()
    }

    /// What all workers of its device process have counted under a name.
    pub fn counted(&self, name: &str) -> Result<u64> {
        let device = self.device.as_ref().context("there is no device")?;
        let status = device.status()?;
        let workers = status["workers"].as_array();
        workers
            .context("no workers in the device's status")?
            .iter()
            .map(|worker| {
                worker[name]
                    .as_u64()
                    .with_context(|| format!("a worker has no {name}"))
            })
            .sum()
    }

    /// Where its sockets are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The address of the host of a VM, where hosts are network namespaces whose device processes need
/// one: for connections of iWARP, and for VXLAN.
pub fn host_address(number: u8) -> String {
    format!("10.10.0.{}", 100 + u16::from(number))
}

/// The MAC address of a VM's network device, which its RDMA NIC is paired with.
pub fn mac(number: u8) -> String {
    format!("52:54:00:12:34:{number:02x}")
}

/// True if KVM runs guests here. A `/dev/kvm` that opens is no proof: nested without the CPU's
/// help, guests hang in it.
pub fn kvm() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let able = flags
        .split_ascii_whitespace()
        .any(|word| word == "svm" || word == "vmx");
    able && File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok()
}

/// One VM.
pub struct Vm {
    /// Its number, from 1; its address is 10.10.0.NUMBER.
    pub number: u8,
    child: Child,
    command: Vec<String>,
    console_log: PathBuf,
    qemu_log: PathBuf,
    /// What QEMU is told when the RDMA device is plugged.
    card: Value,
    control: PathBuf,
    qmp_path: PathBuf,
    links: Vec<PathBuf>,
    qmp: Option<Qmp>,
    agent: Option<Agent>,
    boot: Option<String>,
    boots_in: Duration,
}

impl Vm {
    /// Starts QEMU. The guest is not up yet when this returns.
    fn start(
        plan: &Plan,
        number: u8,
        prefix: Vec<String>,
        directory: &Path,
        card: Value,
    ) -> Result<Self> {
        let console_log = plan.logs.join(format!("vm{number}.console"));
        let _ = fs::remove_file(&console_log);
        let qemu_log = plan.logs.join(format!("vm{number}.qemu"));
        if let Some(size) = plan.disk {
            File::create(disk(directory, number))?.set_len(size << 20)?;
        }
        if plan.kernel.modules.is_none() {
            let mut copy = Command::new("cp");
            copy.args(["--sparse=always", "--reflink=auto"]);
            shell::capture(copy.arg(plan.root).arg(system(directory, number)))?;
        }
        let path = |name: &str| directory.join(format!("{name}-{number}"));
        let mut command = prefix;
        command.extend(command_line(plan, number, directory, &console_log, &card)?);
        let mut vm = Vm {
            number,
            child: spawn(&command, &qemu_log)?,
            command,
            console_log,
            qemu_log,
            card,
            control: path("control"),
            qmp_path: path("qmp"),
            links: match plan.hosts {
                Hosts::One | Hosts::Vxlan(_) | Hosts::Loop if number == 1 => {
                    (2..=plan.vms).map(|peer| link(directory, peer)).collect()
                }
                _ => Vec::new(),
            },
            qmp: None,
            agent: None,
            boot: None,
            boots_in: match plan.kernel.modules {
                Some(_) => BOOT,
                None => BOOT_SYSTEM,
            },
        };
        vm.connect()?;
        Ok(vm)
    }

    /// Connects to a QEMU that has just been started.
    fn connect(&mut self) -> Result<()> {
        (self.qmp, self.agent, self.boot) = (None, None, None);
        let deadline = Duration::from_secs(30);
        let (qmp_path, control) = (self.qmp_path.clone(), self.control.clone());
        let connected = wait_for(deadline, || {
            self.check()?;
            if !self.links.iter().all(|link| link.exists()) {
                return Ok(None);
            }
            // QEMU opens one after the other.
            let Ok(qmp) = Qmp::connect(&qmp_path) else {
                return Ok(None);
            };
            let Ok(agent) = Agent::connect(&control) else {
                return Ok(None);
            };
            Ok(Some((agent, qmp)))
        })?;
        let (agent, qmp) = connected
            .with_context(|| format!("QEMU of vm{} does not open its sockets", self.number))?;
        (self.agent, self.qmp) = (Some(agent), Some(qmp));
        Ok(())
    }

    /// An error if QEMU has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let log = shell::tail(&self.qemu_log, 2000);
            bail!(
                "QEMU of vm{} ended ({status}): {}",
                self.number,
                log.trim_end()
            );
        }
        Ok(())
    }

    /// Waits until the guest is up after power-on or a reset.
    pub fn wait_up(&mut self) -> Result<()> {
        let agent = self.agent.as_ref().context("the VM is not connected")?;
        let boot = agent
            .wait_boot(self.boot.as_deref(), self.boots_in)
            .with_context(|| {
                format!(
                    "vm{} does not boot; the end of its console:\n{}",
                    self.number,
                    shell::tail(&self.console_log, 2000)
                )
            })?;
        self.boot = Some(boot);
        Ok(())
    }

    /// The end of what it has written to its serial console.
    pub fn console(&self) -> String {
        shell::tail(&self.console_log, 4000)
    }

    /// The QEMU command line.
    pub fn command(&self) -> &[String] {
        &self.command
    }

    /// Starts a shell command in the guest.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.agent
            .as_ref()
            .context("the VM is not running")?
            .spawn(command)
            .with_context(|| format!("vm{}", self.number))
    }

    /// Runs a shell command in the guest.
    pub fn run(&self, command: &str, timeout: Duration) -> Result<Output> {
        self.spawn(command)?
            .wait(timeout)
            .with_context(|| format!("vm{}", self.number))
    }

    /// Runs a shell command in the guest that has to succeed in [`SHORT`] time, and returns what it
    /// wrote.
    pub fn sh(&self, command: &str) -> Result<String> {
        let output = self.run(command, SHORT)?;
        ensure!(
            output.status == 0,
            "vm{}: `{command}` ended with {}:\n{}",
            self.number,
            output.status,
            output.text
        );
        Ok(output.text)
    }

    /// Runs a QMP command without arguments.
    pub fn qmp(&mut self, command: &str) -> Result<Value> {
        self.qmp_with(command, json!({}))
    }

    /// Runs a QMP command with arguments.
    pub fn qmp_with(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let number = self.number;
        self.monitor()?
            .execute(command, arguments)
            .with_context(|| format!("vm{number}"))
    }

    fn monitor(&mut self) -> Result<&mut Qmp> {
        self.qmp.as_mut().context("the VM is not running")
    }

    /// Pulls the RDMA device out of its slot, and waits until the guest has let go of it.
    pub fn unplug(&mut self) -> Result<()> {
        let number = self.number;
        self.monitor()?.forget_events();
        self.qmp_with("device_del", json!({ "id": CARD }))?;
        self.monitor()?
            .wait_event("DEVICE_DELETED", SHORT)
            .with_context(|| format!("vm{number} does not let go of the RDMA device"))?;
        Ok(())
    }

    /// Puts the RDMA device into its slot again.
    pub fn plug(&mut self) -> Result<()> {
        let card = self.card.clone();
        self.qmp_with("device_add", card).map(drop)
    }

    /// Pulls the cable of the network interface, or puts it in again.
    pub fn set_link(&mut self, up: bool) -> Result<()> {
        self.qmp_with("set_link", json!({ "name": NIC, "up": up }))
            .map(drop)
    }

    /// True if the guest is suspended to RAM.
    pub fn suspended(&mut self) -> Result<bool> {
        Ok(self.qmp("query-status")?["status"] == "suspended")
    }

    /// Wakes the guest from suspend to RAM.
    pub fn wake(&mut self) -> Result<()> {
        self.qmp("system_wakeup").map(drop)
    }

    /// Connects to the guest's agent anew. For kernels (7.3) that, when they resume, do not see
    /// that somebody is connected to their port.
    pub fn connect_again(&self) -> Result<()> {
        let agent = self.agent.as_ref().context("the VM is not connected")?;
        agent.connect_again()
    }

    /// Waits until QEMU ends by itself, as it does when the guest powers off.
    pub fn wait_end(&mut self, timeout: Duration) -> Result<()> {
        let number = self.number;
        let child = &mut self.child;
        let ended = wait_for(timeout, || Ok(child.try_wait()?))?;
        let status = ended.with_context(|| format!("vm{number} runs after {timeout:?}"))?;
        (self.qmp, self.agent, self.boot) = (None, None, None);
        ensure!(status.success(), "QEMU of vm{number} ended: {status}");
        Ok(())
    }

    /// Resets the guest, as the button would; [`Self::wait_up`] waits for it.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp("system_reset").map(drop)
    }

    /// Freezes the whole QEMU process.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets a frozen QEMU process go on.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        signal_child(&self.child, signal)
    }

    /// Kills QEMU, as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        (self.qmp, self.agent, self.boot) = (None, None, None);
        Ok(())
    }

    /// Has the VM boot another kernel when it is started again.
    pub fn set_kernel(&mut self, kernel: &KernelImage) {
        for (option, file) in [("-kernel", &kernel.vmlinuz), ("-initrd", &kernel.initrd)] {
            let at = self.command.iter().position(|word| word == option);
            if let Some(value) = at.and_then(|at| self.command.get_mut(at + 1)) {
                *value = file.display().to_string();
            }
        }
    }

    /// Starts the VM again after [`Self::kill`], on the same sockets, and waits until it is up.
    pub fn start_again(&mut self) -> Result<()> {
        for path in [&self.control, &self.qmp_path]
            .into_iter()
            .chain(&self.links)
        {
            let _ = fs::remove_file(path);
        }
        self.child = spawn(&self.command, &self.qemu_log)?;
        self.connect()?;
        self.wait_up()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The socket between vm1 and another VM's network device.
fn link(directory: &Path, number: u8) -> PathBuf {
    directory.join(format!("net-{number}"))
}

/// QEMU's words for a network device that connects to the socket of a VM's link, again and again if
/// asked to.
fn stream_to(directory: &Path, number: u8, again: bool) -> String {
    let again = if again { ",reconnect-ms=500" } else { "" };
    let path = link(directory, number);
    format!(
        "stream,id=net,server=off,addr.type=unix,addr.path={}{again}",
        path.display()
    )
}

/// The image of a VM's own disk.
fn disk(directory: &Path, number: u8) -> PathBuf {
    directory.join(format!("disk-{number}"))
}

/// QEMU's words for the RDMA device of a VM, which has so many virtqueues.
fn card(plan: &Plan, directory: &Path, number: u8, queues: usize) -> Value {
    match plan.front_end.of(number) {
        FrontEnd::VhostUser | FrontEnd::Each => json!({
            "driver": "vhost-user-rdma-pci", "id": CARD, "bus": SLOT, "chardev": "rdma"
        }),
        FrontEnd::VhostUserTest => json!({
            "driver": "vhost-user-test-device-pci", "id": CARD, "bus": SLOT, "chardev": "rdma",
            "virtio-id": TEST_ID, "num_vqs": queues, "vq_size": 256,
            "config_size": 64, "page-per-vq": true
        }),
        FrontEnd::VfioUser => {
            let path = directory.join(format!("rdma-{number}"));
            json!({
                "driver": "vfio-user-pci", "id": CARD, "bus": SLOT,
                "socket": { "type": "unix", "path": path }
            })
        }
    }
}

/// A VM's own copy of the disk of an installed system.
fn system(directory: &Path, number: u8) -> PathBuf {
    directory.join(format!("system-{number}"))
}

/// The QEMU command line of a VM.
fn command_line(
    plan: &Plan,
    number: u8,
    directory: &Path,
    console_log: &Path,
    card: &Value,
) -> Result<Vec<String>> {
    let front_end = plan.front_end.of(number);
    let qemu = match front_end.wants_stock() {
        true => plan.stock_qemu.context("no QEMU as Debian has built it")?,
        false => plan.qemu,
    };
    let socket = |name: &str| {
        directory
            .join(format!("{name}-{number}"))
            .display()
            .to_string()
    };
    let mut words = vec![qemu.display().to_string()];
    let mut add = |text: &str, value: String| {
        words.extend(text.split_ascii_whitespace().map(str::to_owned));
        if !value.is_empty() {
            words.push(value);
        }
    };
    add(
        "-L /usr/share/qemu -L /usr/share/seabios -nodefaults -no-user-config -display none",
        String::new(),
    );
    add("-name", format!("vm{number}"));
    // TCG runs `rep movsb` very slowly, and guests use it where ERMS is offered.
    if kvm() {
        add("-accel kvm -cpu host", String::new());
    } else {
        add(
            "-accel tcg,thread=multi,tb-size=512 -cpu max,-erms,-fsrm",
            String::new(),
        );
    }
    add(
        "-machine q35,memory-backend=ram,hpet=off -m",
        format!("{}M", plan.memory),
    );
    // With room for another, TCG makes the guest's atomic instructions atomic for those who share
    // its memory, too.
    let cpus = if plan.nested { 2 } else { 1 };
    add("-smp", format!("{cpus},maxcpus=2"));
    add(
        "-object",
        format!("memory-backend-memfd,id=ram,size={}M,share=on", plan.memory),
    );

    let quiet = if plan.interactive { "" } else { " quiet" };
    add("-kernel", plan.kernel.vmlinuz.display().to_string());
    add("-initrd", plan.kernel.initrd.display().to_string());
    // An NMI is for a guest that hangs: it says where, and ends.
    let kernel_words = "panic=1 unknown_nmi_panic no_timer_check tsc=reliable mitigations=off";
    let audit = if plan.nested { "" } else { " audit=0" };
    // There, a program maps registers of a device that has a driver.
    let relaxed = match plan.front_end {
        FrontEnd::Each => " iomem=relaxed",
        _ => "",
    };
    let device = match front_end {
        FrontEnd::VhostUserTest => format!(" vr.device={TEST_ID}"),
        _ => String::new(),
    };
    let root = match plan.kernel.modules {
        Some(_) => "",
        None => " root=/dev/vda rw",
    };
    add(
        "-append",
        format!(
            "console=ttyS0{quiet} {kernel_words}{audit}{relaxed} vr.number={number}{device}{root}"
        ),
    );
    let own = system(directory, number);
    let disks = match &plan.kernel.modules {
        Some(modules) => vec![
            ("root", "readonly=on,file.locking=off", plan.root),
            ("modules", "readonly=on,file.locking=off", modules),
        ],
        None => vec![("root", "cache=unsafe,discard=unmap", own.as_path())],
    };
    for (disk, how, image) in disks {
        let image = image.display();
        let drive = format!("if=none,id={disk},format=raw,{how},file={image}");
        add("-drive", drive);
        add("-device", format!("virtio-blk-pci,drive={disk}"));
    }
    if plan.disk.is_some() {
        let path = disk(directory, number);
        add(
            "-drive",
            format!("if=none,id=disk,format=raw,file={}", path.display()),
        );
        add("-device virtio-blk-pci,drive=disk", String::new());
    }

    if plan.interactive {
        let log = console_log.display();
        add(
            "-chardev",
            format!(
                "socket,id=console,server=on,wait=off,path={},logfile={log}",
                socket("console")
            ),
        );
    } else {
        add(
            "-chardev",
            format!("file,id=console,path={}", console_log.display()),
        );
    }
    add(
        "-serial chardev:console -device virtio-rng-pci -device virtio-serial-pci",
        String::new(),
    );
    add(
        "-chardev",
        format!(
            "socket,id=control,server=on,wait=off,path={}",
            socket("control")
        ),
    );
    add(
        "-device virtserialport,chardev=control,name=control",
        String::new(),
    );
    add("-qmp", format!("unix:{},server=on,wait=off", socket("qmp")));

    let switched = match plan.hosts {
        Hosts::Switch(mtu) => Some(mtu),
        hosts => hosts.namespaces(),
    };
    let host_mtu = switched.map_or_else(String::new, |mtu| format!(",host_mtu={mtu}"));
    // vm1 is the hub that connects the network devices of all, unless a switch does.
    let device_net = match (number, plan.vms) {
        _ if plan.hosts.namespaces().is_some() => {
            let tap = namespace::TAP;
            let more = "script=no,downscript=no,vhost=off";
            add("-netdev", format!("tap,id=net,ifname={tap},{more}"));
            "net"
        }
        (1, _) if switched.is_some() => {
            add("-netdev", stream_to(directory, number, true));
            "net"
        }
        (1, 0 | 1) => {
            // Nobody is there; something has to take its packets, or the guest complains of a
            // transmitter that hangs.
            add("-netdev user,id=net,restrict=on", String::new());
            "net"
        }
        (1, vms) => {
            for peer in 2..=vms {
                let path = link(directory, peer);
                add(
                    "-netdev",
                    format!(
                        "stream,id=to{peer},server=on,addr.type=unix,addr.path={}",
                        path.display()
                    ),
                );
                if vms > 2 {
                    add(
                        "-netdev",
                        format!("hubport,id=port{peer},hubid=0,netdev=to{peer}"),
                    );
                }
            }
            if vms > 2 {
                add("-netdev hubport,id=net,hubid=0", String::new());
                "net"
            } else {
                "to2"
            }
        }
        _ => {
            // A stock QEMU may be too old to know how to reconnect.
            let again = plan.stack.is_some();
            add("-netdev", stream_to(directory, number, again));
            "net"
        }
    };
    add(
        "-device",
        format!(
            "virtio-net-pci,id={NIC},netdev={device_net},mac={},romfile={host_mtu}",
            mac(number)
        ),
    );

    if let Some(stack) = plan.stack {
        add(
            "-fsdev",
            format!(
                "local,id=payload,security_model=none,readonly=on,path={}",
                stack.payload.display()
            ),
        );
        add(
            "-device virtio-9p-pci,fsdev=payload,mount_tag=payload",
            String::new(),
        );
        // Ours connects again to a device process that was started again.
        let again = match front_end {
            FrontEnd::VhostUser => ",reconnect-ms=1000",
            _ => "",
        };
        if front_end != FrontEnd::VfioUser {
            let path = socket("rdma");
            add("-chardev", format!("socket,id=rdma,path={path}{again}"));
        }
        // In a slot of its own it can be unplugged and plugged. The window is for the doorbells of
        // one that is not there when the firmware looks.
        add(
            "-device",
            format!("pcie-root-port,id={SLOT},chassis=1,slot=1,pref64-reserve=32M"),
        );
        match front_end {
            FrontEnd::VhostUser => add(
                "-device",
                format!("vhost-user-rdma-pci,id={CARD},chardev=rdma,bus={SLOT}"),
            ),
            _ => add("-device", card.to_string()),
        }
    }
    Ok(words)
}

/// Starts a process that ends with this thread, with its output in a file.
fn spawn(command: &[String], log: &Path) -> Result<Child> {
    let out = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot open {}", log.display()))?;
    let program = command.first().map(String::as_str).unwrap_or_default();
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .args(command)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()
        .with_context(|| format!("cannot start {program}"))
}

/// Sends a signal to a process that was started here.
fn signal_child(child: &Child, signal: Signal) -> Result<()> {
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .context("no process")?;
    Ok(kill_process(pid, signal)?)
}

/// Asks until there is an answer; None when the time is over.
pub fn wait_for<T>(
    timeout: Duration,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(answer) = ask()? {
            return Ok(Some(answer));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
