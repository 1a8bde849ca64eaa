// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `libvirt`: Debian's libvirtd and VMs with the card that it makes from
//! `docs/libvirt/domain.xml`, with a device process of its own. The files of `docs/libvirt` are
//! installed as `docs/libvirt.md` says. Without KVM, VMs of a VM are too slow for guests that are to
//! do something, so there are two hosts:
//!
//! - a root of Debian 13 in namespaces of this machine, whose VMs boot, and do RDMA;
//! - the VM of the bed, where AppArmor confines libvirtd and its VM, which has nothing to boot.
//!
//! The cases of a host go from one to the next: each begins where the one before ended.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use super::{first_complaint, Case, Fixture, Lane};
use crate::book::Page;
use crate::images::{Image, Kernel};
use crate::shell;
use crate::vm::{wait_for, Chroot, FrontEnd, Hosts, Output, Vm, SHORT};

/// How long something may take in a VM whose host is an emulated VM itself.
const LONG: Duration = Duration::from_secs(300);

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "libvirt",
        about: "VMs with the card under Debian's libvirt, and confined by AppArmor",
        with_device: true,
        vms: 1,
        memory: 2048,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Libvirt,
        // It is about the host's user space.
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

const CASES: &[Case] = &[
    Case {
        name: "RDMA: define, start: the device comes with the VM",
        run: start,
    },
    Case {
        name: "RDMA: ibv_devinfo shows the card",
        run: devinfo,
    },
    Case {
        name: "RDMA: within a VM",
        run: |fixture| pingpong(fixture, 1),
    },
    Case {
        name: "RDMA: from VM to VM",
        run: |fixture| pingpong(fixture, 2),
    },
    Case {
        name: "RDMA: the device process is killed and started again",
        run: process_killed,
    },
    Case {
        name: "RDMA: shutdown, undefine: the device goes with the VM",
        run: shutdown,
    },
    Case {
        name: "RDMA: the device of a VM that is destroyed goes",
        run: destroy,
    },
    Case {
        name: "RDMA: a VM of a stock QEMU, by vfio-user",
        run: vfio_user,
    },
    Case {
        name: "AppArmor: libvirtd is confined",
        run: confined,
    },
    Case {
        name: "AppArmor: what is in no rule is denied",
        run: denied,
    },
    Case {
        name: "AppArmor: a VM does not start without the device process",
        run: no_process,
    },
    Case {
        name: "AppArmor: QEMU is confined, its device attached",
        run: start_confined,
    },
    Case {
        name: "AppArmor: the device process is started again",
        run: process_restarts,
    },
    Case {
        name: "AppArmor: the device of a VM that is destroyed goes",
        run: destroy_confined,
    },
];

/// A host of VMs.
#[derive(Clone, Copy)]
enum Host<'a> {
    Chroot(&'a Chroot),
    Vm(&'a Vm),
}

impl Host<'_> {
    /// Runs a shell command.
    fn run(self, command: &str) -> Result<Output> {
        match self {
            Host::Chroot(chroot) => chroot.run(command, SHORT),
            Host::Vm(vm) => vm.run(command, LONG),
        }
    }

    /// Runs a shell command that has to succeed, and returns what it wrote.
    fn sh(self, command: &str) -> Result<String> {
        let Output { status, text } = self.run(command)?;
        ensure!(status == 0, "`{command}` ended with {status}:\n{text}");
        Ok(text)
    }

    /// The devices of its device process, as `list` has them.
    fn devices(self) -> Result<String> {
        self.sh("vhost-device-rdma list /run/vrdma/status.sock")
    }

    /// Its device process has so many devices with a VM.
    fn attached(self, wanted: usize) -> Result<()> {
        let attached = wait_for(SHORT, || {
            Ok((self.devices()?.matches("attached").count() == wanted).then_some(()))
        })?;
        match attached {
            Some(()) => Ok(()),
            None => bail!("not {wanted} VMs are attached:\n{}", self.devices()?),
        }
    }

    /// Starts the device process again after it has ended, and tells it of the VMs that run, as
    /// docs/libvirt.md says.
    fn start_process(self) -> Result<()> {
        self.sh("/payload/libvirt/device")?;
        self.page("devices again")
    }

    /// Runs a block of docs/libvirt.md, where the files are that it names.
    fn page(self, block: &str) -> Result<()> {
        let page = Page::read("libvirt.md")?;
        let commands = page.of_lane("libvirt", block)?;
        let repository = "mkdir -p /tmp/repository/docs
            ln -sfn /payload/libvirt /tmp/repository/docs/libvirt
            cd /tmp/repository";
        self.sh(&format!("set -e\n{repository}\n{commands}"))
            .map(drop)
    }

    /// Waits until a VM is off and its device gone.
    fn gone(self, number: u8) -> Result<()> {
        let off = wait_for(SHORT, || {
            let state = self.sh(&format!("virsh domstate vm{number}"))?;
            Ok((state.trim() == "shut off").then_some(()))
        })?;
        off.with_context(|| format!("vm{number} does not end"))?;
        // The hook runs after the VM is off.
        let gone = wait_for(SHORT, || {
            Ok((!self.devices()?.contains(&format!("vm{number}.sock"))).then_some(()))
        })?;
        gone.with_context(|| format!("the device of vm{number} stays"))?;
        self.sh(&format!("! test -e /run/vrdma/vm{number}.sock"))?;
        self.sh(&format!("virsh undefine vm{number}")).map(drop)
    }
}

/// The host with RDMA, without its VMs at first.
fn unconfined<'a>(fixture: &'a mut Fixture) -> Result<Host<'a>> {
    if fixture.bed.chroot.is_none() {
        let logs = fixture.logs().join("host");
        fs::create_dir_all(&logs)?;
        let stack = fixture.plan.stack.context("nothing was built")?;
        let modules = fixture.plan.kernel.modules.as_ref();
        let stock = fixture.plan.stock_qemu.and_then(Path::parent);
        let words: [&OsStr; 5] = [
            fixture.root().as_ref(),
            modules.context("the kernel has no modules")?.as_ref(),
            stack.payload.as_ref(),
            logs.as_ref(),
            stock.context("no QEMU as Debian has built it")?.as_ref(),
        ];
        let chroot = Chroot::start(
            &shell::root().join("ci/libvirt/namespaces"),
            &fixture.bed.directory().join("host"),
            &words,
            &fixture.logs().join("namespaces.log"),
        )?;
        Host::Chroot(&chroot).sh("/payload/libvirt/host")?;
        fixture.bed.chroot = Some(chroot);
    }
    let chroot = fixture.bed.chroot.as_ref();
    chroot.map(Host::Chroot).context("no host")
}

/// The same with both VMs, whose guests are up.
fn guests<'a>(fixture: &'a mut Fixture) -> Result<Host<'a>> {
    let host = unconfined(fixture)?;
    let running = host.sh("virsh list --name")?;
    for number in [1, 2] {
        if running.lines().any(|name| name == format!("vm{number}")) {
            continue;
        }
        host.sh(&format!(
            "cd /tmp; set -e
             /payload/libvirt/domain.py {number} --guest >vm{number}.xml
             virt-xml-validate vm{number}.xml domain
             virsh define vm{number}.xml
             virsh start vm{number}"
        ))?;
    }
    for number in [1, 2] {
        up(host, number)?;
    }
    Ok(host)
}

/// Waits until a guest has an active port.
fn up(host: Host, number: u8) -> Result<()> {
    guest(host, number, "/payload/wait-active '*' 50")
        .map(drop)
        .with_context(|| {
            let console = format!("tail -n 20 /var/log/libvirt/qemu/vm{number}-console.log");
            let text = host.run(&console).map(|output| output.text);
            format!(
                "vm{number} does not get there; the end of its console:\n{}",
                text.unwrap_or_default()
            )
        })
}

/// Runs a shell command in a guest of the host with RDMA; waits for the guest if it boots.
fn guest(host: Host, number: u8, command: &str) -> Result<String> {
    let seconds = SHORT.as_secs() - 5;
    let quoted = shell::quote(command);
    host.sh(&format!(
        "/payload/libvirt/in-guest {number} {seconds} {quoted}"
    ))
}

/// No guest's kernel complains.
fn guests_are_well(host: Host, numbers: &[u8]) -> Result<()> {
    for number in numbers {
        let log = guest(host, *number, "dmesg -c")?;
        ensure!(
            first_complaint(&log).is_none(),
            "the kernel of vm{number} complains:\n{log}"
        );
    }
    Ok(())
}

fn start(fixture: &mut Fixture) -> Result<()> {
    let host = unconfined(fixture)?;
    host.page("another VM")?;
    for xml in ["/payload/libvirt/domain.xml", "/tmp/repository/vm2.xml"] {
        host.sh(&format!("virt-xml-validate {xml} domain"))?;
    }
    let host = guests(fixture)?;
    let listed = host.devices()?;
    for mac in ["52:54:00:12:34:01", "52:54:00:12:34:02"] {
        ensure!(listed.contains(mac), "no device with {mac}:\n{listed}");
    }
    let socket = host.sh("stat -c '%U %a' /run/vrdma/vm1.sock")?;
    ensure!(
        socket.trim() == "libvirt-qemu 600",
        "the socket is {socket}"
    );
    guests_are_well(host, &[1, 2])
}

fn devinfo(fixture: &mut Fixture) -> Result<()> {
    let host = guests(fixture)?;
    let text = guest(host, 1, "ibv_devinfo")?;
    ensure!(
        text.contains("vrdma0") && text.contains("PORT_ACTIVE"),
        "ibv_devinfo says:\n{text}"
    );
    host.attached(2)
}

/// Messages from VM 1 to another one, or itself, with what they carry verified.
fn pingpong(fixture: &mut Fixture, to: u8) -> Result<()> {
    let port = fixture.port();
    let host = guests(fixture)?;
    let tool = format!("ibv_rc_pingpong -c -n 100 -p {port} -g $(/payload/gid)");
    guest(
        host,
        to,
        &format!(
            "setsid {tool} >/tmp/server 2>&1 &
            until ss -ltn | grep -q :{port}; do sleep 0.2; done"
        ),
    )?;
    let text = guest(host, 1, &format!("{tool} 10.10.0.{to}"))?;
    ensure!(
        text.contains("100 iters in"),
        "ibv_rc_pingpong says:\n{text}"
    );
    guests_are_well(host, &[1, 2])
}

fn process_killed(fixture: &mut Fixture) -> Result<()> {
    let host = guests(fixture)?;
    let seen = "dmesg | grep -c 'virtio_rdma.*its process on the host ended'";
    host.sh("kill -KILL $(cat /run/vhost-device-rdma.pid)")?;
    for number in [1, 2] {
        guest(host, number, &format!("until {seen}; do sleep 0.2; done"))?;
    }
    host.start_process()?;
    host.attached(2)?;
    for number in [1, 2] {
        up(host, number)?;
    }
    pingpong(fixture, 2)
}

fn shutdown(fixture: &mut Fixture) -> Result<()> {
    let host = guests(fixture)?;
    guests_are_well(host, &[1, 2])?;
    guest(
        host,
        1,
        "modprobe -a evdev button && /payload/libvirt/power-button",
    )?;
    host.sh("virsh shutdown vm1")?;
    host.gone(1)?;
    // The other one has its device still.
    host.attached(1)?;
    let listed = host.devices()?;
    ensure!(listed.contains("vm2.sock"), "devices:\n{listed}");
    Ok(())
}

fn destroy(fixture: &mut Fixture) -> Result<()> {
    let host = unconfined(fixture)?;
    host.sh("virsh destroy vm2")?;
    host.gone(2)
}

/// The third VM has the QEMU of trixie-backports.
fn vfio_user(fixture: &mut Fixture) -> Result<()> {
    let port = fixture.port();
    let host = unconfined(fixture)?;
    host.sh("virt-xml-validate /payload/libvirt/domain-vfio-user.xml domain")?;
    host.sh("cd /tmp; set -e
         /payload/libvirt/domain.py 3 --guest --vfio-user >vm3.xml
         virsh define vm3.xml
         virsh start vm3")?;
    up(host, 3)?;
    host.attached(1)?;
    let listed = host.devices()?;
    ensure!(
        listed.contains("52:54:00:12:34:03"),
        "no device of vm3:\n{listed}"
    );
    let tool = format!("ibv_rc_pingpong -c -n 100 -p {port} -g $(/payload/gid)");
    let text = guest(
        host,
        3,
        &format!(
            "setsid {tool} >/tmp/server 2>&1 &
            until ss -ltn | grep -q :{port}; do sleep 0.2; done
            {tool} 10.10.0.3"
        ),
    )?;
    ensure!(
        text.contains("100 iters in"),
        "ibv_rc_pingpong says:\n{text}"
    );
    guests_are_well(host, &[3])?;
    host.sh("virsh destroy vm3")?;
    host.gone(3)
}

/// The host with AppArmor.
fn confined_host<'a>(fixture: &'a Fixture) -> Result<Host<'a>> {
    fixture.vm(1).map(Host::Vm)
}

/// What AppArmor has denied since the host's kernel log was read last, to libvirt and its VMs.
fn denials(host: Host) -> Result<Vec<String>> {
    let log = host.sh("dmesg")?;
    let lines = log
        .lines()
        .filter(|line| line.contains(r#"apparmor="DENIED""#));
    Ok(lines.map(str::to_owned).collect())
}

/// No more is denied than everybody may see denied who has libvirt without the card.
fn nothing_denied(host: Host) -> Result<()> {
    let denied: Vec<_> = denials(host)?
        .into_iter()
        .filter(|line| {
            ["virtio-rdma", "vrdma"]
                .iter()
                .any(|word| line.contains(word))
        })
        .collect();
    ensure!(denied.is_empty(), "denied:\n{}", denied.join("\n"));
    Ok(())
}

fn confined(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    host.sh("/payload/libvirt/apparmor && /payload/libvirt/host")?;
    let label = host.sh("cat /proc/$(pidof libvirtd)/attr/current")?;
    ensure!(label.trim() == "libvirtd (enforce)", "libvirtd is {label}");
    let models = host.sh("virsh capabilities | grep '<model>'")?;
    ensure!(models.contains("apparmor"), "security models:\n{models}");
    host.sh("/payload/libvirt/domain.py 1 >/tmp/vm1.xml")?;
    // A disk with nothing to boot.
    host.sh("truncate -s 1M /var/lib/libvirt/images/vm1.img")
        .map(drop)
}

/// A command fails, and something with this word is denied.
fn refused(host: Host, command: &str, word: &str) -> Result<()> {
    host.sh("dmesg -C")?;
    let Output { status, text } = host.run(command)?;
    ensure!(status != 0, "`{command}` succeeded:\n{text}");
    let denied = denials(host)?;
    ensure!(
        denied.iter().any(|line| line.contains(word)),
        "{text}\nnothing with {word:?} was denied:\n{}",
        denied.join("\n")
    );
    Ok(())
}

fn denied(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    // libvirtd may not start that QEMU.
    refused(host, "virsh define /tmp/vm1.xml", "/opt/virtio-rdma/bin/")?;
    // It may, and QEMU may not become what it is to be.
    host.sh("set -e; cd /etc/apparmor.d
         install -D -m 644 /payload/libvirt/apparmor-libvirtd local/usr.sbin.libvirtd
         apparmor_parser --replace usr.sbin.libvirtd")?;
    host.sh("virsh define /tmp/vm1.xml")?;
    refused(host, "virsh start vm1", "virtio-rdma")?;
    host.sh("rm /etc/apparmor.d/local/usr.sbin.libvirtd")?;
    host.page("rules")
}

fn no_process(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    host.page("hook")?;
    // libvirtd looks for hooks when it starts.
    host.sh("kill $(pidof libvirtd) && while pidof libvirtd; do sleep 0.2; done")?;
    host.sh("libvirtd --daemon; until virsh version; do sleep 0.5; done")?;
    host.sh("kill $(cat /run/vhost-device-rdma.pid) && sleep 1")?;
    let Output { status, text } = host.run("virsh start vm1")?;
    ensure!(
        status != 0 && text.contains("status.sock"),
        "`virsh start` ended with {status}:\n{text}"
    );
    host.sh("/payload/libvirt/device").map(drop)
}

fn start_confined(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    host.sh("dmesg -C && virsh start vm1")?;
    let label = host.sh("cat /proc/$(cat /run/libvirt/qemu/vm1.pid)/attr/current")?;
    ensure!(
        label.starts_with("libvirt-") && label.contains("(enforce)"),
        "QEMU is {label}"
    );
    host.attached(1)?;
    nothing_denied(host)
}

fn process_restarts(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    host.sh("kill $(cat /run/vhost-device-rdma.pid) && sleep 1")?;
    host.start_process()?;
    host.attached(1)?;
    nothing_denied(host)
}

fn destroy_confined(fixture: &mut Fixture) -> Result<()> {
    let host = confined_host(fixture)?;
    host.sh("virsh destroy vm1")?;
    host.gone(1)?;
    nothing_denied(host)
}
