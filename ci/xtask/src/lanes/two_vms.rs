// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `two-vms`: the page `docs/two-vms.md` as a whole, by its own commands, from the packages to a
//! message between two VMs. The host is a Debian 13 with systemd in namespaces of this machine, so
//! that its VMs are as quick as those of other lanes.
//!
//! What is other than on the page: VMs are emulated, are told their kernel, and have a channel for
//! what is typed in them ([`command`]).
//!
//! Its cases follow each other: each begins with what the one before it has left.

use std::ffi::OsStr;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::{first_complaint, Case, Fixture, Lane, Skip};
use crate::book::Page;
use crate::images::{self, Image, Kernel};
use crate::shell;
use crate::vm::{wait_for, Agent, Chroot, FrontEnd, Hosts, Job, SHORT};

/// How long apt may take: in guests, most of it is DKMS, which compiles.
const APT: Duration = Duration::from_secs(3600);
/// How long a guest may take to boot.
const BOOT: Duration = Duration::from_secs(600);

/// Its VMs.
const NUMBERS: [usize; 2] = [1, 2];

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "two-vms",
        about:
            "the page docs/two-vms.md as a whole: from the packages to a message between two VMs",
        with_device: true,
        vms: 0,
        memory: 0,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VfioUser,
        image: Image::System,
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

const CASES: &[Case] = &[
    Case {
        name: "apt installs the package and QEMU of trixie-backports on the host",
        run: host_installs,
    },
    Case {
        name: "the service has a device for each VM",
        run: service_serves,
    },
    Case {
        name: "the VMs boot with the card",
        run: vms_boot,
    },
    Case {
        name: "apt installs the module and the library in the guests",
        run: guests_install,
    },
    Case {
        name: "the ports are active, and have their GIDs",
        run: ports_are_active,
    },
    Case {
        name: "one VM writes to the other",
        run: message,
    },
    Case {
        name: "the host shows what they do",
        run: top,
    },
];

/// A block of the page.
fn block(name: &str) -> Result<String> {
    let page = Page::read("two-vms.md")?;
    Ok(page.of_lane("two-vms", name)?.to_owned())
}

/// The host, which a case before has started.
fn host<'a>(fixture: &'a Fixture<'_>) -> Result<&'a Chroot> {
    let missing = || Skip("a case before it has failed".to_owned()).into();
    fixture.bed.chroot.as_ref().ok_or_else(missing)
}

/// The guests, which a case before has booted.
fn guests<'a>(fixture: &'a Fixture<'_>) -> Result<&'a [Agent]> {
    host(fixture)?;
    let guests = &fixture.bed.guests;
    ensure!(guests.len() == NUMBERS.len(), "the VMs were not started");
    Ok(guests)
}

/// Runs commands that have to succeed, and returns what they wrote.
fn sh(host: &Chroot, commands: &str) -> Result<String> {
    let script =
        format!("set -e\nexport DEBIAN_FRONTEND=noninteractive\ncd /srv/sources\n{commands}");
    let output = host.run(&script, APT)?;
    let (status, text) = (output.status, output.text);
    ensure!(status == 0, "{commands}ended with {status}:\n{text}");
    Ok(text)
}

/// Starts commands in a guest.
fn spawn(guest: &Agent, commands: &str) -> Result<Job> {
    guest.spawn(&format!(
        "exec 2>&1\nset -e\nexport DEBIAN_FRONTEND=noninteractive\n{commands}"
    ))
}

/// Waits for commands that have to succeed, and returns what they wrote.
fn done(job: &Job, timeout: Duration) -> Result<String> {
    let output = job.wait(timeout)?;
    let (status, text) = (output.status, output.text);
    ensure!(status == 0, "ended with {status}:\n{text}");
    Ok(text)
}

fn host_installs(fixture: &mut Fixture) -> Result<()> {
    let stack = fixture.plan.stack.context("nothing was built")?;
    let kernel = images::system_kernel(fixture.root(), Kernel::Trixie);
    let disks = fixture.bed.directory().join("disks");
    let words: [&OsStr; 5] = [
        fixture.root().as_ref(),
        kernel.vmlinuz.as_ref(),
        kernel.initrd.as_ref(),
        stack.payload.as_ref(),
        disks.as_ref(),
    ];
    let host = Chroot::start(
        &shell::root().join("ci/two-vms/namespaces"),
        &fixture.bed.directory().join("host"),
        &words,
        &fixture.logs().join("namespaces.log"),
    )?;
    let up = wait_for(SHORT, || {
        let state = host.run("systemctl is-system-running", SHORT)?.text;
        Ok(["running", "degraded"]
            .contains(&state.trim())
            .then_some(()))
    })?;
    up.context("systemd of the host does not come up")?;
    let host = fixture.bed.chroot.insert(host);
    sh(host, &block("packages")?)?;
    // Those with libvirt are told to install the same.
    let again = Page::read("libvirt.md")?;
    sh(host, again.of_lane("two-vms", "qemu")?)?;
    sh(host, "qemu-system-x86_64 -device vfio-user-pci,help\n").map(drop)
}

fn service_serves(fixture: &mut Fixture) -> Result<()> {
    let host = host(fixture)?;
    let devices = block("devices")?;
    sh(
        host,
        &format!("cat >>/etc/vhost-device-rdma.toml <<'END'\n\n{devices}END\n"),
    )?;
    let list = sh(host, &block("service")?)?;
    for number in NUMBERS {
        ensure!(list.contains(&format!("vm{number}.sock")), "{list}");
    }
    Ok(())
}

/// The command on the page that starts the first VM, for VM `number`, without KVM, with the kernel that
/// its disk has no boot loader for, and with a channel to an agent.
fn command(page: &str, number: usize) -> Result<String> {
    let command = page
        .trim_end()
        .replace("vm1", &format!("vm{number}"))
        .replace("34:01", &format!("34:{number:02x}"));
    let kvm = "-accel kvm -cpu host";
    ensure!(command.contains(kvm), "no {kvm} in {command}");
    // TCG runs `rep movsb` very slowly, and guests use it where ERMS is offered.
    let command = command.replace(kvm, "-accel tcg,thread=multi -cpu max,-erms,-fsrm");
    let words =
        "console=ttyS0 quiet panic=1 no_timer_check tsc=reliable mitigations=off root=/dev/vda rw";
    Ok(format!(
        "{command} -kernel vmlinuz -initrd initrd.img -append '{words}' -device virtio-serial-pci \
         -chardev socket,id=control,server=on,wait=off,path=/srv/vms/vm{number}-control \
         -device virtserialport,chardev=control,name=control"
    ))
}

fn vms_boot(fixture: &mut Fixture) -> Result<()> {
    let host = host(fixture)?;
    sh(host, &block("bridge")?)?;
    for number in NUMBERS {
        let command = command(&block("vm")?, number)?;
        sh(
            host,
            &format!(
                "cd /srv/vms\nsetsid sh -c {} </dev/null >vm{number}.log 2>&1 &\n",
                shell::quote(&command)
            ),
        )?;
    }
    let disks = fixture.bed.directory().join("disks");
    let mut guests = Vec::new();
    for number in NUMBERS {
        let control = disks.join(format!("vm{number}-control"));
        let said = || shell::tail(&disks.join(format!("vm{number}.log")), 2000);
        let agent = wait_for(SHORT, || Ok(Agent::connect(&control).ok()))?;
        let agent = agent.with_context(|| format!("QEMU of vm{number} has said: {}", said()))?;
        agent
            .wait_boot(None, BOOT)
            .with_context(|| format!("vm{number} does not boot: {}", said()))?;
        guests.push(agent);
    }
    fixture.bed.guests = guests;
    let list = "vhost-device-rdma list /run/vrdma/operator/status.sock\n";
    let list = sh(self::host(fixture)?, list)?;
    ensure!(list.matches("attached").count() == NUMBERS.len(), "{list}");
    Ok(())
}

fn guests_install(fixture: &mut Fixture) -> Result<()> {
    let commands = block("guest")?;
    let guests = guests(fixture)?;
    let jobs = guests.iter().map(|guest| spawn(guest, &commands));
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    jobs.iter().try_for_each(|job| done(job, APT).map(drop))
}

fn ports_are_active(fixture: &mut Fixture) -> Result<()> {
    let commands = block("address")?;
    for (guest, number) in guests(fixture)?.iter().zip(NUMBERS) {
        let address = format!("10.0.0.{number}");
        done(
            &spawn(guest, &commands.replace("10.0.0.1", &address))?,
            SHORT,
        )?;
        // Addresses become GIDs a moment later.
        let gid = format!("GID[  1]:\t\t::ffff:{address}, RoCE v2");
        let look = || done(&spawn(guest, "ibv_devinfo -v")?, SHORT);
        let active = wait_for(SHORT, || {
            let text = look()?;
            Ok((text.contains("PORT_ACTIVE") && text.contains(&gid)).then_some(()))
        })?;
        if active.is_none() {
            anyhow::bail!("no active port with {gid:?} in vm{number}:\n{}", look()?);
        }
    }
    Ok(())
}

fn message(fixture: &mut Fixture) -> Result<()> {
    let guests = guests(fixture)?;
    let server = spawn(&guests[0], &block("server")?)?;
    let listens = "until ss -ltn | grep -q :18515; do sleep 0.2; done";
    done(&spawn(&guests[0], listens)?, SHORT)?;
    let client = done(&spawn(&guests[1], &block("client")?)?, SHORT)?;
    for text in [client, done(&server, SHORT)?] {
        ensure!(
            text.contains("1000 iters in"),
            "ibv_rc_pingpong says:\n{text}"
        );
    }
    for (guest, number) in guests.iter().zip(NUMBERS) {
        let log = done(&spawn(guest, "dmesg")?, SHORT)?;
        ensure!(
            first_complaint(&log).is_none(),
            "the kernel of vm{number} complains:\n{log}"
        );
    }
    Ok(())
}

fn top(fixture: &mut Fixture) -> Result<()> {
    guests(fixture)?;
    let top = block("top")?;
    // It goes on until it is stopped, as by Ctrl-C.
    let top = top.trim_end();
    let stopped = format!("timeout --signal=INT --preserve-status 5 {top} || test $? = 130\n");
    let text = sh(host(fixture)?, &stopped)?;
    for number in NUMBERS {
        ensure!(text.contains(&format!("vm{number}")), "{text}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_are_started_as_the_page_says() {
        let page = block("vm").unwrap();
        let second = command(&page, 2).unwrap();
        for words in [
            "file=vm2.img",
            "mac=52:54:00:12:34:02",
            "/run/vrdma/vm2.sock",
        ] {
            assert!(second.contains(words), "no {words}: {second}");
        }
        assert!(!second.contains("kvm") && !second.contains("vm1"));
        assert!(command("qemu-system-x86_64", 1).is_err());
    }
}
