// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `srd`: reliable datagrams between VMs of two device processes, as on two hosts: with nothing
//! lost, with packets lost on all paths, and with one path of four that loses some, or all. (Between
//! VMs of one process, the lane `verbs` runs the same tests.)

use anyhow::{Context, Result};

use super::verbs::apart;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::Hosts;

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        let kernels = Kernel::STABLE.iter();
        kernels.map(|kernel| (*kernel, CASES.to_vec())).collect()
    };
    Lane {
        name: "srd",
        about:
            "reliable datagrams (SRD) between VMs of two device processes, with VXLAN between them",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::Vxlan,
        image: Image::Plain,
        runs,
    }
}

/// A test of `ci/verbs/srd.c` with these faults of both devices.
fn run(fixture: &mut Fixture, test: &str, faults: &str) -> Result<()> {
    let first = fixture.bed.device.as_ref().context("no device")?;
    let mut devices = std::iter::once(first).chain(&fixture.bed.others);
    devices.try_for_each(|device| device.set_faults(1, faults))?;
    apart(fixture, test)
}

/// Each test with each network.
macro_rules! cases {
    ($($test:literal)*) => {
        &[$(
            cases!($test, "nothing lost", "off"),
            cases!($test, "1 % lost", "seed=1,loss=1%"),
            cases!($test, "one path of four loses 10 %", "seed=1,loss=10%,path=2"),
            cases!($test, "one path of four is dead", "seed=1,loss=100%,path=1"),
        )*]
    };
    ($test:literal, $network:literal, $faults:literal) => {
        Case {
            name: concat!($test, ", ", $network),
            run: |fixture| run(fixture, $test, $faults),
        }
    };
}

const CASES: &[Case] = cases!(
    "srd_two_ping_pong"
    "srd_two_rdma"
    "srd_two_incast"
    "srd_two_all_to_all"
);
