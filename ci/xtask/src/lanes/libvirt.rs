// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `libvirt`: a VM of the bed is the host here. It runs Debian's libvirtd, confined by Debian's
//! AppArmor profiles, a device process of its own, and VMs with the card that libvirt makes from
//! `docs/libvirt/domain.xml`. The files of `docs/libvirt` are installed as `docs/libvirt.md` says.
//!
//! The cases go from one to the next: each begins where the one before ended.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{wait_for, FrontEnd, Hosts, SHORT};

/// How long something may take in a VM whose host is an emulated VM itself.
const LONG: Duration = Duration::from_secs(1200);

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "libvirt",
        about: "VMs with the card under Debian's libvirt, confined by AppArmor",
        with_device: true,
        vms: 1,
        memory: 4096,
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
        name: "libvirtd is confined",
        run: confined,
    },
    Case {
        name: "AppArmor denies what is in no rule",
        run: denied,
    },
    Case {
        name: "a VM does not start without the device process",
        run: no_process,
    },
    Case {
        name: "define, start: the device comes with the VM",
        run: start,
    },
    Case {
        name: "ibv_devinfo shows the card",
        run: devinfo,
    },
    Case {
        name: "RDMA within a VM",
        run: |fixture| pingpong(fixture, 1),
    },
    Case {
        name: "RDMA from VM to VM",
        run: |fixture| pingpong(fixture, 2),
    },
    Case {
        name: "the device process is started again",
        run: process_restarts,
    },
    Case {
        name: "shutdown, undefine: the device goes with the VM",
        run: shutdown,
    },
    Case {
        name: "the device of a VM that is destroyed goes",
        run: destroy,
    },
];

/// Runs a shell command on the host.
fn host(fixture: &Fixture, command: &str) -> Result<String> {
    let output = fixture.vm(1)?.run(command, LONG)?;
    ensure!(
        output.status == 0,
        "`{command}` ended with {}:\n{}",
        output.status,
        output.text
    );
    Ok(output.text)
}

/// Runs a shell command in a VM of the host; waits for the VM if it boots.
fn guest(fixture: &Fixture, number: u8, command: &str) -> Result<String> {
    let seconds = LONG.as_secs() - 10;
    let quoted = command.replace('\'', r"'\''");
    let in_guest = format!("/payload/libvirt/in-guest {number} {seconds} '{quoted}'");
    host(fixture, &in_guest)
}

/// The devices of the host's device process, as `list` has them.
fn devices(fixture: &Fixture) -> Result<String> {
    host(fixture, "vhost-device-rdma list /run/vrdma/status.sock")
}

/// What AppArmor has denied since the host's kernel log was read last, to libvirt and its VMs.
fn denials(fixture: &Fixture) -> Result<Vec<String>> {
    let log = host(fixture, "dmesg")?;
    let lines = log
        .lines()
        .filter(|line| line.contains(r#"apparmor="DENIED""#));
    Ok(lines.map(str::to_owned).collect())
}

/// No more is denied than everybody may see denied who has libvirt without the card.
fn nothing_denied(fixture: &Fixture) -> Result<()> {
    let denied: Vec<_> = denials(fixture)?
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
    host(fixture, "/payload/libvirt/host")?;
    let label = host(fixture, "cat /proc/$(pidof libvirtd)/attr/current")?;
    ensure!(label.trim() == "libvirtd (enforce)", "libvirtd is {label}");
    let models = host(fixture, "virsh capabilities | grep '<model>'")?;
    ensure!(models.contains("apparmor"), "security models:\n{models}");
    host(
        fixture,
        "virt-xml-validate /payload/libvirt/domain.xml domain",
    )?;
    for number in [1, 2] {
        let write = format!("/payload/libvirt/domain.py {number} >/tmp/vm{number}.xml");
        host(fixture, &write)?;
    }
    Ok(())
}

/// Which of the two files of rules is there.
fn install_rules(fixture: &Fixture, qemu: bool, libvirtd: bool) -> Result<()> {
    let mut command = String::from("set -e; cd /etc/apparmor.d\n");
    for (wanted, from, to) in [
        (
            qemu,
            "apparmor-libvirt-qemu",
            "abstractions/libvirt-qemu.d/virtio-rdma",
        ),
        (libvirtd, "apparmor-libvirtd", "local/usr.sbin.libvirtd"),
    ] {
        if wanted {
            command += &format!("install -D -m 644 /payload/libvirt/{from} {to}\n");
        }
    }
    host(fixture, &command)?;
    host(
        fixture,
        "apparmor_parser --replace /etc/apparmor.d/usr.sbin.libvirtd",
    )
    .map(drop)
}

fn denied(fixture: &mut Fixture) -> Result<()> {
    // libvirtd may not start that QEMU.
    let refused = |fixture: &Fixture, command: &str, word: &str| -> Result<()> {
        host(fixture, "dmesg -C")?;
        let output = fixture.vm(1)?.run(command, LONG)?;
        ensure!(
            output.status != 0,
            "`{command}` succeeded:\n{}",
            output.text
        );
        let denied = denials(fixture)?;
        ensure!(
            denied.iter().any(|line| line.contains(word)),
            "{}\nnothing with {word:?} was denied:\n{}",
            output.text,
            denied.join("\n")
        );
        Ok(())
    };
    refused(
        fixture,
        "virsh define /tmp/vm1.xml",
        "/opt/virtio-rdma/bin/",
    )?;
    // It may, and QEMU may not become what it is to be.
    install_rules(fixture, false, true)?;
    host(fixture, "virsh define /tmp/vm1.xml")?;
    refused(fixture, "virsh start vm1", "virtio-rdma")?;
    install_rules(fixture, true, true)
}

fn no_process(fixture: &mut Fixture) -> Result<()> {
    host(
        fixture,
        "install -D -m 755 /payload/libvirt/hook /etc/libvirt/hooks/qemu.d/virtio-rdma",
    )?;
    // libvirtd looks for hooks when it starts.
    host(fixture, "kill $(pidof libvirtd); while pidof libvirtd; do sleep 0.2; done; libvirtd --daemon; until virsh version; do sleep 0.5; done")?;
    host(fixture, "kill $(cat /run/vhost-device-rdma.pid); sleep 1")?;
    let output = fixture.vm(1)?.run("virsh start vm1", LONG)?;
    ensure!(
        output.status != 0 && output.text.contains("status.sock"),
        "`virsh start` ended with {}:\n{}",
        output.status,
        output.text
    );
    host(fixture, "/payload/libvirt/device").map(drop)
}

fn start(fixture: &mut Fixture) -> Result<()> {
    host(
        fixture,
        "dmesg -C; virsh define /tmp/vm2.xml; virsh start vm1 && virsh start vm2",
    )?;
    let label = host(
        fixture,
        "cat /proc/$(cat /run/libvirt/qemu/vm1.pid)/attr/current",
    )?;
    ensure!(
        label.starts_with("libvirt-") && label.contains("(enforce)"),
        "QEMU is {label}"
    );
    let listed = devices(fixture)?;
    for mac in ["52:54:00:12:34:01", "52:54:00:12:34:02"] {
        ensure!(listed.contains(mac), "no device with {mac}:\n{listed}");
    }
    let socket = host(fixture, "stat -c '%U %a' /run/vrdma/vm1.sock")?;
    ensure!(
        socket.trim() == "libvirt-qemu 600",
        "the socket is {socket}"
    );
    for number in [1, 2] {
        guest(fixture, number, "/payload/wait-active '*' 300")?;
        guest(
            fixture,
            number,
            "modprobe -a evdev button; setsid /payload/libvirt/power-button >/dev/null 2>&1 &",
        )?;
    }
    nothing_denied(fixture)
}

fn devinfo(fixture: &mut Fixture) -> Result<()> {
    let text = guest(fixture, 1, "ibv_devinfo")?;
    ensure!(
        text.contains("virtio_rdma") && text.contains("PORT_ACTIVE"),
        "ibv_devinfo says:\n{text}"
    );
    let listed = devices(fixture)?;
    let attached = listed.matches("attached").count();
    ensure!(attached == 2, "{attached} VMs are attached:\n{listed}");
    Ok(())
}

/// Messages from VM 1 to another one, or itself, with what they carry verified.
fn pingpong(fixture: &mut Fixture, to: u8) -> Result<()> {
    let port = fixture.port();
    let tool = format!("ibv_rc_pingpong -c -n 100 -p {port} -g $(/payload/gid)");
    guest(fixture, to, &format!("setsid {tool} >/tmp/server 2>&1 &"))?;
    guest(
        fixture,
        to,
        &format!("until ss -ltn | grep -q :{port}; do sleep 0.2; done"),
    )?;
    let text = guest(fixture, 1, &format!("{tool} 10.10.0.{to}"))?;
    ensure!(
        text.contains("100 iters in"),
        "ibv_rc_pingpong says:\n{text}"
    );
    Ok(())
}

fn process_restarts(fixture: &mut Fixture) -> Result<()> {
    host(
        fixture,
        "kill $(cat /run/vhost-device-rdma.pid); sleep 1; /payload/libvirt/device",
    )?;
    host(
        fixture,
        "for vm in $(virsh list --name); do virsh dumpxml $vm | /etc/libvirt/hooks/qemu.d/virtio-rdma $vm prepare begin - || exit 1; done",
    )?;
    let attached = wait_for(LONG, || {
        Ok((devices(fixture)?.matches("attached").count() == 2).then_some(()))
    })?;
    attached.context("the VMs do not come back")?;
    for number in [1, 2] {
        guest(fixture, number, "sleep 2; /payload/wait-active '*' 300")?;
    }
    pingpong(fixture, 2)
}

/// Waits until a VM is off and its device gone.
fn gone(fixture: &Fixture, number: u8) -> Result<()> {
    let off = wait_for(LONG, || {
        let state = host(fixture, &format!("virsh domstate vm{number}"))?;
        Ok((state.trim() == "shut off").then_some(()))
    })?;
    off.with_context(|| format!("vm{number} does not end"))?;
    // The hook runs after the VM is off.
    let gone = wait_for(SHORT, || {
        Ok((!devices(fixture)?.contains(&format!("vm{number}.sock"))).then_some(()))
    })?;
    gone.with_context(|| format!("the device of vm{number} stays"))?;
    host(fixture, &format!("! test -e /run/vrdma/vm{number}.sock"))?;
    host(fixture, &format!("virsh undefine vm{number}")).map(drop)
}

fn shutdown(fixture: &mut Fixture) -> Result<()> {
    host(fixture, "virsh shutdown vm1")?;
    gone(fixture, 1)?;
    // The other one has its device still.
    let listed = devices(fixture)?;
    ensure!(listed.contains("vm2.sock"), "devices:\n{listed}");
    Ok(())
}

fn destroy(fixture: &mut Fixture) -> Result<()> {
    host(fixture, "virsh destroy vm2")?;
    gone(fixture, 2)?;
    nothing_denied(fixture)
}
