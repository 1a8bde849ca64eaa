// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver is unbound, bound, removed and loaded, and the card pulled out of its slot and put in
//! again.

use anyhow::{ensure, Result};

use super::traffic::{self, Kernel, Kind, Traffic};
use super::{comes_back, nothing_left, nothing_stuck, wait_active_in};
use crate::lanes::storage::{clean, CLIENT};
use crate::lanes::{Case, Fixture};
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
        run: unplug,
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
fn applications(fixture: &mut Fixture) -> Result<Vec<Traffic>> {
    [Kind::Rping, Kind::Ucmatose, Kind::Perftest, Kind::Flow]
        .into_iter()
        .map(|kind| Traffic::start(fixture, kind, 2, 1))
        .collect()
}

fn stop(fixture: &Fixture, running: Vec<Traffic>) -> Result<()> {
    running
        .into_iter()
        .try_for_each(|traffic| traffic.stop(fixture))
}

fn unbind(fixture: &mut Fixture) -> Result<()> {
    for number in if fixture.quick { 2..=2 } else { 1..=2 } {
        let running = applications(fixture)?;
        fixture.vm(number)?.sh(
            "cd /sys/bus/virtio/drivers/virtio_rdma && device=$(basename $(echo virtio*)) && \
             echo $device >unbind && ! ls /sys/class/infiniband | grep . && echo $device >bind",
        )?;
        stop(fixture, running)?;
        comes_back(fixture, "unbind")?;
    }
    nothing_left(fixture)
}

/// Users in the kernel are told, and let go: that is what removing the driver of an RDMA card is.
fn reload(fixture: &mut Fixture) -> Result<()> {
    let storage = Kernel::start(fixture, true, true)?;
    // The server's: the client's users wait for it, and find it again.
    let output = fixture
        .vm(2)?
        .run("rmmod virtio_rdma && insmod /payload/virtio_rdma.ko", SHORT)?;
    ensure!(output.status == 0, "vm2: {}", output.text);
    comes_back(fixture, "reload_under_storage")?;
    storage.wait_moving(fixture)?;
    storage.finish(fixture)?;
    nothing_stuck(fixture)?;
    // The client's: an NVMe host gives up its controllers on a card that is taken away.
    let storage = Kernel::start(fixture, true, false)?;
    let output = fixture
        .vm(CLIENT)?
        .run("rmmod virtio_rdma && insmod /payload/virtio_rdma.ko", SHORT)?;
    ensure!(output.status == 0, "vm1: {}", output.text);
    drop(storage);
    comes_back(fixture, "reload_under_storage")?;
    clean(fixture)?;
    nothing_stuck(fixture)
}

fn unplug(fixture: &mut Fixture) -> Result<()> {
    for _ in 0..if fixture.quick { 1 } else { 3 } {
        let running = applications(fixture)?;
        fixture.vm_mut(2)?.unplug()?;
        fixture.vm(2)?.sh("! ls /sys/class/infiniband | grep .")?;
        stop(fixture, running)?;
        fixture.vm_mut(2)?.plug()?;
        comes_back(fixture, "unplug")?;
    }
    nothing_left(fixture)
}

fn unplug_under_kernel(fixture: &mut Fixture) -> Result<()> {
    let storage = Kernel::start(fixture, true, true)?;
    fixture.vm_mut(2)?.unplug()?;
    fixture.vm_mut(2)?.plug()?;
    comes_back(fixture, "unplug_under_storage")?;
    storage.wait_moving(fixture)?;
    storage.finish(fixture)?;
    nothing_stuck(fixture)
}

fn reset_unplugged(fixture: &mut Fixture) -> Result<()> {
    fixture.vm_mut(2)?.unplug()?;
    fixture.vm_mut(2)?.reset()?;
    fixture.vm_mut(2)?.wait_up()?;
    fixture.vm_mut(2)?.plug()?;
    wait_active_in(fixture, 2)?;
    traffic::rping(fixture, 2, 1)
}
