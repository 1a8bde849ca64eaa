// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver is unbound, bound, removed and loaded, and the card pulled out of its slot and put in
//! again.

use anyhow::{ensure, Result};

use super::traffic::{self, Kernel, Kind, Traffic};
use super::{comes_back, nothing_left, nothing_stuck, wait_active_in};
use crate::lanes::storage::{clean, CLIENT};
use crate::lanes::{Case, Ground};
use crate::vm::SHORT;

pub const CASES: &[Case] = &[
    Case {
        name: "card: unbound and bound under applications",
        run: unbind,
    },
    Case {
        name: "card: the driver is removed and loaded under NVMe over Fabrics and NFS",
        run: reload,
    },
    Case {
        name: "card: unplugged and plugged under applications",
        run: |ground| unplug(ground, 3),
    },
    Case {
        name: "card: unplugged and plugged under NVMe over Fabrics and NFS",
        run: unplug_under_kernel,
    },
    Case {
        name: "card: a VM whose card is unplugged is reset",
        run: reset_unplugged,
    },
];

/// All kinds of applications from vm1 to vm2.
fn applications(ground: &mut Ground) -> Result<Vec<Traffic>> {
    [Kind::Rping, Kind::Ucmatose, Kind::Perftest, Kind::Flow]
        .into_iter()
        .map(|kind| Traffic::start(ground, kind, 2, 1))
        .collect()
}

fn stop(ground: &Ground, running: Vec<Traffic>) -> Result<()> {
    running
        .into_iter()
        .try_for_each(|traffic| traffic.stop(ground))
}

fn unbind(ground: &mut Ground) -> Result<()> {
    for number in [1, 2] {
        let running = applications(ground)?;
        ground.vm(number)?.sh(
            "cd /sys/bus/virtio/drivers/virtio_rdma && device=$(basename $(echo virtio*)) && \
             echo $device >unbind && ! ls /sys/class/infiniband | grep . && echo $device >bind",
        )?;
        stop(ground, running)?;
        comes_back(ground, "unbind")?;
    }
    nothing_left(ground)
}

/// Users in the kernel are told, and let go: that is what removing the driver of an RDMA card is.
fn reload(ground: &mut Ground) -> Result<()> {
    let storage = Kernel::start(ground, true, true)?;
    // The server's: the client's users wait for it, and find it again.
    let output = ground
        .vm(2)?
        .run("rmmod virtio_rdma && insmod /payload/virtio_rdma.ko", SHORT)?;
    ensure!(output.status == 0, "vm2: {}", output.text);
    comes_back(ground, "reload_under_storage")?;
    storage.wait_moving(ground)?;
    storage.finish(ground)?;
    nothing_stuck(ground)?;
    // The client's: an NVMe host gives up its controllers on a card that is taken away.
    let storage = Kernel::start(ground, true, false)?;
    let output = ground
        .vm(CLIENT)?
        .run("rmmod virtio_rdma && insmod /payload/virtio_rdma.ko", SHORT)?;
    ensure!(output.status == 0, "vm1: {}", output.text);
    drop(storage);
    comes_back(ground, "reload_under_storage")?;
    clean(ground)?;
    nothing_stuck(ground)
}

fn unplug(ground: &mut Ground, times: u32) -> Result<()> {
    for _ in 0..times {
        let running = applications(ground)?;
        ground.vm_mut(2)?.unplug()?;
        ground.vm(2)?.sh("! ls /sys/class/infiniband | grep .")?;
        stop(ground, running)?;
        ground.vm_mut(2)?.plug()?;
        comes_back(ground, "unplug")?;
    }
    nothing_left(ground)
}

fn unplug_under_kernel(ground: &mut Ground) -> Result<()> {
    let storage = Kernel::start(ground, true, true)?;
    ground.vm_mut(2)?.unplug()?;
    ground.vm_mut(2)?.plug()?;
    comes_back(ground, "unplug_under_storage")?;
    storage.wait_moving(ground)?;
    storage.finish(ground)?;
    nothing_stuck(ground)
}

fn reset_unplugged(ground: &mut Ground) -> Result<()> {
    ground.vm_mut(2)?.unplug()?;
    ground.vm_mut(2)?.reset()?;
    ground.vm_mut(2)?.wait_up()?;
    ground.vm_mut(2)?.plug()?;
    wait_active_in(ground, 2)?;
    traffic::rping(ground, 2, 1)
}
