// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest is suspended, hibernated, reset, started by kexec, and powered off.

use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};

use super::traffic::{self, Kernel, Kind, Traffic};
use super::{comes_back, nothing_left, nothing_stuck, wait_active_in};
use crate::lanes::{Case, Fixture};
use crate::vm::{wait_for, Vm, SHORT};

pub const CASES: &[Case] = &[
    // First: after a suspend to RAM the button of this machine does not wake an idle guest any
    // more.
    Case {
        name: "guest: suspended to idle under applications",
        run: |fixture| sleeps(fixture, Depth::Idle, false),
    },
    Case {
        name: "guest: suspended to RAM under applications",
        run: |fixture| sleeps(fixture, Depth::Ram, false),
    },
    Case {
        name: "guest: suspended to RAM under NVMe over Fabrics and NFS",
        run: |fixture| sleeps(fixture, Depth::Ram, true),
    },
    Case {
        name: "guest: suspended to disk under applications",
        run: |fixture| sleeps(fixture, Depth::Disk, false),
    },
    Case {
        name: "guest: reset under traffic, and the first rping after it",
        run: reset,
    },
    Case {
        name: "guest: kexec under traffic",
        run: kexec,
    },
    Case {
        name: "guest: powered off under traffic, and on",
        run: power_off,
    },
];

/// How deep a guest sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Ram,
    Idle,
    Disk,
}

/// How long going to sleep may take, and waking up.
const SLEEPS: Duration = Duration::from_secs(60);

/// The guest sleeps and wakes, and the card is there.
// G-RST-008.
fn sleeps(fixture: &mut Fixture, depth: Depth, storage: bool) -> Result<()> {
    own_payload(fixture.vm(2)?)?;
    let storage = if storage {
        Some(Kernel::start(fixture, true, true)?)
    } else {
        None
    };
    let mut running = Vec::new();
    for kind in [Kind::Rping, Kind::Perftest, Kind::Flow] {
        running.push(Traffic::start(fixture, kind, 2, 1)?);
        running.push(Traffic::start(fixture, kind, 1, 2)?);
    }
    let vm = fixture.vm_mut(2)?;
    let command = match depth {
        Depth::Ram => "echo deep >/sys/power/mem_sleep && echo mem >/sys/power/state",
        // The button wakes it, which has a driver.
        Depth::Idle => "modprobe button && echo freeze >/sys/power/state",
        // The image is written and read, and the devices go through all of it; only the power stays
        // on.
        Depth::Disk => {
            "mkswap /dev/vdc >/dev/null && swapon /dev/vdc && cat /sys/block/vdc/dev >/sys/power/resume && \
             echo test_resume >/sys/power/disk && echo disk >/sys/power/state && swapoff /dev/vdc"
        }
    };
    // Nobody can be asked while it sleeps: the console tells how far it came.
    vm.sh("dmesg -n 8; echo N >/sys/module/printk/parameters/console_suspend")?;
    sleep_and_wake(vm, depth, command).map_err(|error| {
        let console = vm.console();
        let from = console.lines().count().saturating_sub(24);
        let end: Vec<_> = console.lines().skip(from).collect();
        anyhow!("{error:#}\nthe end of the console:\n{}", end.join("\n"))
    })?;
    vm.sh("dmesg -n 4")?;
    for traffic in running {
        traffic.stop(fixture)?;
    }
    let name = format!("{depth:?}").to_lowercase();
    comes_back(fixture, &format!("suspend_{name}"))?;
    if let Some(storage) = storage {
        storage.wait_moving(fixture)?;
        storage.finish(fixture)?;
    }
    nothing_left(fixture)
}

fn sleep_and_wake(vm: &mut Vm, depth: Depth, command: &str) -> Result<()> {
    let before = last_exit(&vm.console()).to_owned();
    let awake = |vm: &Vm| {
        let console = vm.console();
        let exit = last_exit(&console);
        !exit.is_empty() && exit != before
    };
    let job = vm.spawn(command)?;
    match depth {
        Depth::Ram => {
            let asleep = wait_for(SLEEPS, || Ok((vm.suspended()? || awake(vm)).then_some(())))?;
            asleep.context("the guest does not go to sleep")?;
            // Beside NVMe and NFS it is awake again at once, whatever wakes it.
            if vm.suspended()? {
                std::thread::sleep(Duration::from_secs(3));
                vm.wake()?;
            }
        }
        Depth::Idle => {
            std::thread::sleep(Duration::from_secs(8));
            // The button wakes what is idle.
            vm.qmp("system_powerdown")?;
        }
        Depth::Disk => {}
    }
    let since = Instant::now();
    let ended = wait_for(SLEEPS * 2, || {
        if job.running() && since.elapsed() > Duration::from_secs(5) && awake(vm) {
            vm.connect_again()?;
            std::thread::sleep(Duration::from_secs(2));
        }
        Ok((!job.running()).then_some(()))
    })?;
    ended.context("the guest does not wake up")?;
    let output = job.wait(SHORT)?;
    ensure!(
        output.status == 0,
        "going to sleep ended with {}: {}",
        output.status,
        output.text
    );
    Ok(())
}

/// The last line of a console, which has the time in it, that says that a sleep is over.
fn last_exit(console: &str) -> &str {
    let over = |line: &&str| line.contains("suspend exit") || line.contains("hibernation exit");
    console.lines().rev().find(over).unwrap_or_default()
}

/// The guest's payload comes over 9p, whose driver for virtio does not live through a suspend: from
/// now on it is in memory.
fn own_payload(vm: &Vm) -> Result<()> {
    vm.sh(
        "if ! mountpoint -q /run/payload; then mkdir /run/payload && mount -t tmpfs payload /run/payload && \
         cp -a /payload/. /run/payload && umount -l /payload && mount --bind /run/payload /payload && \
         umount -q /exchange; rmmod 9pnet_virtio; fi",
    )
    .map(drop)
}

/// Both sides of a guest that goes away.
fn traffic_of_both(fixture: &mut Fixture) -> Result<Vec<Traffic>> {
    let mut running = Vec::new();
    for kind in [Kind::Rping, Kind::Flow] {
        running.push(Traffic::start(fixture, kind, 2, 1)?);
        running.push(Traffic::start(fixture, kind, 1, 2)?);
    }
    Ok(running)
}

fn end(fixture: &mut Fixture, running: Vec<Traffic>) -> Result<()> {
    for traffic in running {
        traffic.stop(fixture)?;
    }
    wait_active_in(fixture, 2)?;
    traffic::rping(fixture, 2, 1)?;
    traffic::rping(fixture, 1, 2)?;
    nothing_stuck(fixture)?;
    nothing_left(fixture)
}

fn reset(fixture: &mut Fixture) -> Result<()> {
    for _ in 0..if fixture.quick { 1 } else { 5 } {
        let running = traffic_of_both(fixture)?;
        fixture.vm_mut(2)?.reset()?;
        fixture.vm_mut(2)?.wait_up()?;
        end(fixture, running)?;
    }
    Ok(())
}

fn kexec(fixture: &mut Fixture) -> Result<()> {
    fixture.vm(2)?.sh(
        "kexec -l /payload/vmlinuz --initrd=/payload/initrd.img --command-line=\"$(cat /proc/cmdline)\"",
    )?;
    let running = traffic_of_both(fixture)?;
    let job = fixture.vm(2)?.spawn("exec kexec -e")?;
    fixture.vm_mut(2)?.wait_up()?;
    drop(job);
    end(fixture, running)
}

fn power_off(fixture: &mut Fixture) -> Result<()> {
    let running = traffic_of_both(fixture)?;
    let job = fixture.vm(2)?.spawn("exec busybox poweroff -f")?;
    fixture.vm_mut(2)?.wait_end(SHORT)?;
    drop(job);
    fixture.vm_mut(2)?.start_again()?;
    end(fixture, running)
}
