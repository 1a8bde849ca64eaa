// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `vfio-user`: the device under a QEMU as Debian has built it, which has it by vfio-user.
//! What the lane `smoke` does, rdma-core's own tests, and perftest.
//!
//! The card is never pulled: QEMU 11.1.3 aborts when a `vfio-user-pci` goes
//! (`memory_region_del_subregion: Assertion subregion->container == mr failed`).

use anyhow::{ensure, Context, Result};

use super::{perftest, smoke, suite, Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts};

/// Cases of `smoke` that this is not for: QEMU tells nobody by vfio-user that the VM is stopped.
const NOT_HERE: &[&str] = &["traffic to a stopped VM waits and goes on"];

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "vfio-user",
        about: "the device by vfio-user, under a QEMU as Debian has built it",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VfioUser,
        image: Image::Plain,
        runs: || {
            let smoke = smoke::CASES.iter().copied();
            let smoke = smoke.filter(|case| !NOT_HERE.contains(&case.name));
            let first: Vec<Case> = CASES.iter().copied().chain(smoke).collect();
            let more = |of: &[Case]| first.iter().chain(of).copied().collect();
            vec![
                (Kernel::Trixie, more(perftest::CASES)),
                (Kernel::Backports, more(&suite::cases_56())),
            ]
        },
    }
}

const CASES: &[Case] = &[Case {
    name: "a PCI device like that of vhost-user",
    run: pci_device,
}];

/// What the guest sees of it.
fn pci_device(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    let device = vm.sh("for d in /sys/bus/pci/devices/*; do \
             [ $(cat $d/device) = 0x106a ] || continue; \
             cat $d/vendor $d/class; ls $d/msi_irqs | wc -l; \
         done")?;
    let words: Vec<&str> = device.split_ascii_whitespace().collect();
    let [vendor, class, interrupts] = words[..] else {
        anyhow::bail!("not one device 106a:\n{device}");
    };
    ensure!(
        (vendor, class) == ("0x1af4", "0x028000"),
        "not the device:\n{device}"
    );
    // One for each queue with interrupts, at least.
    let interrupts: u32 = interrupts.parse().context("a number of interrupts")?;
    ensure!(interrupts > 4, "{interrupts} MSI-X vectors");
    Ok(())
}
