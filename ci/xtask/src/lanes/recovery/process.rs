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
use crate::lanes::{Case, Ground};
use crate::vm::{Device, SHORT};

pub const CASES: &[Case] = &[
    Case {
        name: "device: killed while idle",
        run: |ground| away(ground, "idle", Signal::KILL, Duration::ZERO),
    },
    Case {
        name: "device: stopped and started while idle",
        run: |ground| away(ground, "upgrade", Signal::TERM, Duration::ZERO),
    },
    Case {
        name: "device: killed and away for 30 s",
        run: |ground| away(ground, "away_30", Signal::KILL, Duration::from_secs(30)),
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
        run: |ground| under(ground, Kind::Rping, "rping"),
    },
    Case {
        name: "device: killed under ucmatose",
        run: |ground| under(ground, Kind::Ucmatose, "ucmatose"),
    },
    Case {
        name: "device: killed under ib_write_bw",
        run: |ground| under(ground, Kind::Perftest, "perftest"),
    },
    Case {
        name: "device: killed under verified messages",
        run: |ground| under(ground, Kind::Flow, "flow"),
    },
    Case {
        name: "device: killed under processes that open it again",
        run: reopened,
    },
    Case {
        name: "device: killed under NVMe over Fabrics",
        run: |ground| under_kernel(ground, true, false, "nvme"),
    },
    Case {
        name: "device: killed under NFS",
        run: |ground| under_kernel(ground, false, true, "nfs"),
    },
    Case {
        name: "device: 100 kills under all of it",
        run: kills,
    },
];

/// The device process.
pub fn device<'a>(ground: &'a mut Ground) -> Result<&'a mut Device> {
    ground.bed.device.as_mut().context("there is no device")
}

// G-RST-002, G-RST-006.
fn away(ground: &mut Ground, case: &str, signal: Signal, time: Duration) -> Result<()> {
    device(ground)?.end(signal)?;
    wait_noticed(ground)?;
    sleep(time);
    no_process_stuck(ground)?;
    device(ground)?.start_again()?;
    comes_back(ground, case)?;
    nothing_left(ground)
}

// G-RST-007.
fn reset_while_away(ground: &mut Ground) -> Result<()> {
    device(ground)?.end(Signal::KILL)?;
    let start = Instant::now();
    ground.vm_mut(2)?.reset()?;
    ground.vm_mut(2)?.wait_up()?;
    ground.figure(
        "boot_without_device_seconds",
        rounded(start.elapsed().as_secs_f64()),
    );
    device(ground)?.start_again()?;
    comes_back(ground, "reset_while_away")
}

/// Loading ends in short time and well; the card comes when the device does.
fn load_while_away(ground: &mut Ground) -> Result<()> {
    ground.vm(2)?.sh("rmmod virtio_rdma")?;
    device(ground)?.end(Signal::KILL)?;
    let output = ground
        .vm(2)?
        .run("insmod /payload/virtio_rdma.ko", Duration::from_secs(20))?;
    ensure!(
        output.status == 0,
        "the driver cannot be loaded while the device is away: {}",
        output.text
    );
    sleep(Duration::from_secs(5));
    device(ground)?.start_again()?;
    comes_back(ground, "load_while_away")
}

fn under(ground: &mut Ground, kind: Kind, case: &str) -> Result<()> {
    let there = Traffic::start(ground, kind, 2, 1)?;
    let back = Traffic::start(ground, kind, 1, 2)?;
    device(ground)?.end(Signal::KILL)?;
    let start = Instant::now();
    there.lost(ground)?;
    back.lost(ground)?;
    ground.figure(
        &format!("killed_under_{case}_application_ends_seconds"),
        rounded(start.elapsed().as_secs_f64()),
    );
    no_process_stuck(ground)?;
    device(ground)?.start_again()?;
    comes_back(ground, &format!("killed_under_{case}"))?;
    nothing_left(ground)?;
    // The driver can still be taken out and put in.
    for number in [1, 2] {
        ground
            .vm(number)?
            .sh("timeout 40 rmmod virtio_rdma && insmod /payload/virtio_rdma.ko")?;
        wait_active_in(ground, number)?;
    }
    traffic::rping(ground, 2, 1)
}

/// Every work request completes once, DEVICE_FATAL comes, and the same process finds the device
/// that comes back.
fn reopened(ground: &mut Ground) -> Result<()> {
    let mut running = Vec::new();
    for number in [1, 2] {
        for arguments in ["reopen", "events reopen"] {
            let command = format!("exec /payload/device-lost {arguments}");
            let job = ground.vm(number)?.spawn(&command)?;
            job.wait_text(SHORT, |text| text.contains("ready"))?;
            running.push((number, arguments, job));
        }
    }
    device(ground)?.end(Signal::KILL)?;
    wait_noticed(ground)?;
    device(ground)?.start_again()?;
    for (number, arguments, job) in running {
        let output = job.wait(SHORT)?;
        ensure!(
            output.status == 0 && output.text.contains("recovered in"),
            "vm{number}: device-lost {arguments} ended with {}:\n{}",
            output.status,
            output.text
        );
    }
    comes_back(ground, "reopened")?;
    nothing_left(ground)
}

fn under_kernel(ground: &mut Ground, nvme: bool, nfs: bool, case: &str) -> Result<()> {
    let storage = Kernel::start(ground, nvme, nfs)?;
    let kills = if ground.quick { 1 } else { 3 };
    let mut slowest = 0.0_f64;
    for _ in 0..kills {
        device(ground)?.end(Signal::KILL)?;
        wait_noticed(ground)?;
        device(ground)?.start_again()?;
        let start = Instant::now();
        comes_back(ground, &format!("killed_under_{case}"))?;
        storage.wait_moving(ground)?;
        slowest = slowest.max(start.elapsed().as_secs_f64());
    }
    ground.figure(
        &format!("killed_under_{case}_goes_on_seconds"),
        rounded(slowest),
    );
    storage.finish(ground)?;
    nothing_stuck(ground)
}

fn kills(ground: &mut Ground) -> Result<()> {
    let kills = if ground.quick { 3 } else { 100 };
    let storage = Kernel::start(ground, true, true)?;
    let (mut recoveries, mut slowest, mut slowest_storage) = (0_u32, 0.0_f64, 0.0_f64);
    let result: Result<()> = (0..kills).try_for_each(|n| {
        let (mut one, mut storage_one) = (0.0, 0.0);
        once(ground, &storage, n, &mut one, &mut storage_one)
            .and_then(|()| ground.aftermath())
            .with_context(|| format!("kill {} of {kills}", n + 1))?;
        recoveries += 1;
        slowest = slowest.max(one);
        slowest_storage = slowest_storage.max(storage_one);
        if recoveries % 10 == 0 {
            println!("         {recoveries} of {kills} recoveries");
        }
        Ok(())
    });
    ground.figure("kills_recoveries", recoveries);
    ground.figure("kills", kills);
    ground.figure("kills_slowest_first_rping_seconds", rounded(slowest));
    ground.figure("kills_slowest_storage_seconds", rounded(slowest_storage));
    result?;
    storage.finish(ground)?;
    nothing_left(ground)?;
    nothing_stuck(ground)
}

/// One kill, and what has to be true after it.
fn once(
    ground: &mut Ground,
    storage: &Kernel,
    n: u32,
    recovery: &mut f64,
    storage_recovery: &mut f64,
) -> Result<()> {
    // The one that polls comes last.
    let kinds = [Kind::Rping, Kind::Ucmatose, Kind::Perftest];
    let running = kinds
        .iter()
        .map(|kind| Traffic::start(ground, *kind, 2, 1))
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
        storage.wait_moving_of(ground, names)?;
    }
    // Not always at the same point of what goes on.
    sleep(Duration::from_millis(u64::from(n * 37 % 13) * 100));
    device(ground)?.end(Signal::KILL)?;
    // At once, or when everything in the guests is over.
    let at_once = n % 2 == 0;
    if at_once {
        device(ground)?.start_again()?;
    }
    let mut start = Instant::now();
    for traffic in running {
        traffic.lost(ground)?;
    }
    if !at_once {
        wait_noticed(ground)?;
        device(ground)?.start_again()?;
        start = Instant::now();
    }
    for number in [1, 2] {
        wait_active_in(ground, number)?;
    }
    traffic::rping(ground, 2, 1)?;
    *recovery = start.elapsed().as_secs_f64();
    storage.wait_moving_of(ground, names)?;
    *storage_recovery = start.elapsed().as_secs_f64();
    nothing_stuck(ground)
}
