// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device process is killed, stopped and started again.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use rustix::process::Signal;

use super::traffic::{self, Kernel, Kind, Traffic};
use super::{
    comes_back, no_process_stuck, nothing_left, nothing_stuck, rounded, wait_active_in,
    wait_noticed,
};
use crate::lanes::{Case, Fixture};
use crate::vm::{DeviceProcess, SHORT};

pub const CASES: &[Case] = &[
    Case {
        name: "device: killed while idle",
        run: |fixture| away(fixture, "idle", Signal::KILL, Duration::ZERO),
    },
    Case {
        name: "device: stopped and started while idle",
        run: |fixture| away(fixture, "upgrade", Signal::TERM, Duration::ZERO),
    },
    Case {
        name: "device: killed and away for 30 s",
        run: |fixture| away(fixture, "away_30", Signal::KILL, Duration::from_secs(30)),
    },
    Case {
        name: "device: a VM is reset while it is away",
        run: reset_while_away,
    },
    Case {
        name: "device: the driver is loaded while it is away",
        run: load_while_away,
    },
    Case {
        name: "device: killed under rping",
        run: |fixture| under(fixture, Kind::Rping, "rping"),
    },
    Case {
        name: "device: killed under ucmatose",
        run: |fixture| under(fixture, Kind::Ucmatose, "ucmatose"),
    },
    Case {
        name: "device: killed under ib_write_bw",
        run: |fixture| under(fixture, Kind::Perftest, "perftest"),
    },
    Case {
        name: "device: killed under verified messages",
        run: |fixture| under(fixture, Kind::Flow, "flow"),
    },
    Case {
        name: "device: killed under processes that open it again",
        run: reopened,
    },
    Case {
        name: "device: killed under NVMe over Fabrics",
        run: |fixture| under_kernel(fixture, true, false, "nvme"),
    },
    Case {
        name: "device: killed under NFS",
        run: |fixture| under_kernel(fixture, false, true, "nfs"),
    },
    Case {
        name: "device: killed while NFS is slow to connect",
        run: slow_to_connect,
    },
    Case {
        name: "device: 100 kills under all of it",
        run: kills,
    },
];

/// The device process.
pub fn device<'a>(fixture: &'a mut Fixture) -> Result<&'a mut DeviceProcess> {
    fixture.bed.device.as_mut().context("there is no device")
}

// G-RST-002, G-RST-006.
fn away(fixture: &mut Fixture, case: &str, signal: Signal, time: Duration) -> Result<()> {
    device(fixture)?.end(signal)?;
    wait_noticed(fixture)?;
    sleep(time);
    no_process_stuck(fixture)?;
    device(fixture)?.start_again()?;
    comes_back(fixture, case)?;
    nothing_left(fixture)
}

// G-RST-007.
fn reset_while_away(fixture: &mut Fixture) -> Result<()> {
    device(fixture)?.end(Signal::KILL)?;
    let start = Instant::now();
    fixture.vm_mut(2)?.reset()?;
    fixture.vm_mut(2)?.wait_up()?;
    fixture.figure(
        "boot_without_device_seconds",
        rounded(start.elapsed().as_secs_f64()),
    );
    device(fixture)?.start_again()?;
    comes_back(fixture, "reset_while_away")
}

/// Loading ends in short time and well; the card comes when the device does.
fn load_while_away(fixture: &mut Fixture) -> Result<()> {
    fixture.vm(2)?.sh("rmmod virtio_rdma")?;
    device(fixture)?.end(Signal::KILL)?;
    let output = fixture
        .vm(2)?
        .run("insmod /payload/virtio_rdma.ko", Duration::from_secs(20))?;
    ensure!(
        output.status == 0,
        "the driver cannot be loaded while the device is away: {}",
        output.text
    );
    sleep(Duration::from_secs(5));
    device(fixture)?.start_again()?;
    comes_back(fixture, "load_while_away")
}

fn under(fixture: &mut Fixture, kind: Kind, case: &str) -> Result<()> {
    let there = Traffic::start(fixture, kind, 2, 1)?;
    let back = Traffic::start(fixture, kind, 1, 2)?;
    device(fixture)?.end(Signal::KILL)?;
    let start = Instant::now();
    there.lost(fixture)?;
    back.lost(fixture)?;
    fixture.figure(
        &format!("killed_under_{case}_application_ends_seconds"),
        rounded(start.elapsed().as_secs_f64()),
    );
    no_process_stuck(fixture)?;
    device(fixture)?.start_again()?;
    comes_back(fixture, &format!("killed_under_{case}"))?;
    nothing_left(fixture)?;
    // The driver can still be taken out and put in.
    for number in [1, 2] {
        fixture
            .vm(number)?
            .sh("timeout 40 rmmod virtio_rdma && insmod /payload/virtio_rdma.ko")?;
        wait_active_in(fixture, number)?;
    }
    traffic::rping(fixture, 2, 1)
}

/// Every work request completes once, DEVICE_FATAL comes, and the same process finds the device
/// that comes back.
fn reopened(fixture: &mut Fixture) -> Result<()> {
    let mut running = Vec::new();
    for number in [1, 2] {
        for arguments in ["reopen", "events reopen"] {
            let command = format!("exec /payload/device-lost {arguments}");
            let job = fixture.vm(number)?.spawn(&command)?;
            job.wait_text(SHORT, |text| text.contains("ready"))?;
            running.push((number, arguments, job));
        }
    }
    device(fixture)?.end(Signal::KILL)?;
    wait_noticed(fixture)?;
    device(fixture)?.start_again()?;
    for (number, arguments, job) in running {
        let output = job.wait(SHORT)?;
        ensure!(
            output.status == 0 && output.text.contains("recovered in"),
            "vm{number}: device-lost {arguments} ended with {}:\n{}",
            output.status,
            output.text
        );
    }
    comes_back(fixture, "reopened")?;
    nothing_left(fixture)
}

fn under_kernel(fixture: &mut Fixture, nvme: bool, nfs: bool, case: &str) -> Result<()> {
    let storage = Kernel::start(fixture, nvme, nfs)?;
    let kills = if fixture.quick { 1 } else { 3 };
    let mut slowest = 0.0_f64;
    for _ in 0..kills {
        device(fixture)?.end(Signal::KILL)?;
        wait_noticed(fixture)?;
        device(fixture)?.start_again()?;
        let start = Instant::now();
        comes_back(fixture, &format!("killed_under_{case}"))?;
        storage.wait_moving(fixture)?;
        slowest = slowest.max(start.elapsed().as_secs_f64());
    }
    fixture.figure(
        &format!("killed_under_{case}_goes_on_seconds"),
        rounded(slowest),
    );
    storage.finish(fixture)?;
    nothing_stuck(fixture)
}

/// A client of NFS that connects again when the device is about to be taken away is not told EINVAL,
/// which it would hand on: the driver waits for it.
fn slow_to_connect(fixture: &mut Fixture) -> Result<()> {
    let storage = Kernel::start(fixture, false, true)?;
    fixture.vm(1)?.sh("insmod /payload/slow_resolve.ko")?;

    for _ in 0..if fixture.quick { 1 } else { 3 } {
        device(fixture)?.end(Signal::KILL)?;
        wait_noticed(fixture)?;
        device(fixture)?.start_again()?;
        for number in [1, 2] {
            wait_active_in(fixture, number)?;
        }
        storage.wait_moving(fixture)?;
    }
    let slept = fixture
        .vm(1)?
        .sh("cat /sys/module/slow_resolve/parameters/slept")?;
    ensure!(slept.trim() != "0", "nobody was slow to connect");
    fixture.vm(1)?.sh("rmmod slow_resolve")?;
    storage.finish(fixture)?;
    nothing_stuck(fixture)
}

fn kills(fixture: &mut Fixture) -> Result<()> {
    let kills = if fixture.quick { 3 } else { 100 };
    let storage = Kernel::start(fixture, true, true)?;
    let (mut recoveries, mut slowest, mut slowest_storage) = (0_u32, 0.0_f64, 0.0_f64);
    let result: Result<()> = (0..kills).try_for_each(|n| {
        let (mut one, mut storage_one) = (0.0, 0.0);
        once(fixture, &storage, n, &mut one, &mut storage_one)
            .and_then(|()| fixture.aftermath())
            .with_context(|| format!("kill {} of {kills}", n + 1))?;
        recoveries += 1;
        slowest = slowest.max(one);
        slowest_storage = slowest_storage.max(storage_one);
        if recoveries % 10 == 0 {
            println!("         {recoveries} of {kills} recoveries");
        }
        Ok(())
    });
    fixture.figure("kills_recoveries", recoveries);
    fixture.figure("kills", kills);
    fixture.figure("kills_slowest_first_rping_seconds", rounded(slowest));
    fixture.figure("kills_slowest_storage_seconds", rounded(slowest_storage));
    result?;
    storage.finish(fixture)?;
    nothing_left(fixture)?;
    nothing_stuck(fixture)
}

/// One kill, and what has to be true after it.
fn once(
    fixture: &mut Fixture,
    storage: &Kernel,
    n: u32,
    recovery: &mut f64,
    storage_recovery: &mut f64,
) -> Result<()> {
    // The one that polls comes last.
    let kinds = [Kind::Rping, Kind::Ucmatose, Kind::Perftest];
    let running = kinds
        .iter()
        .map(|kind| Traffic::start(fixture, *kind, 2, 1))
        .collect::<Result<Vec<_>>>()?;
    // Clients of NFS wait for up to half a minute before they look for their server again: three
    // kills of four come while they do.
    let names: &[&str] = if n % 4 == 0 {
        &["nvme", "nfs"]
    } else {
        &["nvme"]
    };
    if names.contains(&"nfs") {
        // It may still be on its way back from the last kill. NVMe moved data at the end of that.
        storage.wait_moving_of(fixture, names)?;
    }
    // Not always at the same point of what goes on.
    sleep(Duration::from_millis(u64::from(n * 37 % 13) * 100));
    device(fixture)?.end(Signal::KILL)?;
    // At once, or when everything in the guests is over.
    let at_once = n % 2 == 0;
    if at_once {
        device(fixture)?.start_again()?;
    }
    let mut start = Instant::now();
    for traffic in running {
        traffic.lost(fixture)?;
    }
    if !at_once {
        wait_noticed(fixture)?;
        device(fixture)?.start_again()?;
        start = Instant::now();
    }
    for number in [1, 2] {
        wait_active_in(fixture, number)?;
    }
    traffic::rping(fixture, 2, 1)?;
    *recovery = start.elapsed().as_secs_f64();
    storage.wait_moving_of(fixture, names)?;
    *storage_recovery = start.elapsed().as_secs_f64();
    nothing_stuck(fixture)
}
