// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `srd`: reliable datagrams between VMs of two device processes, as on two hosts: with nothing
//! lost, with packets lost on all paths, and with one path of four that loses some, or all. (Between
//! VMs of one process, the lane `verbs` runs the same tests.) Then perftest with SRD (`ci/perftest`),
//! whose figures are the lane's table.

use anyhow::{Context, Result};

use super::perftest::{self, Combination, Kind, Variant};
use super::stock::USUAL;
use super::verbs::apart;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts};

/// Its name.
pub const NAME: &str = "srd";

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        let cases = [CASES, PERFTEST].concat();
        let kernels = Kernel::STABLE.iter();
        kernels.map(|kernel| (*kernel, cases.clone())).collect()
    };
    Lane {
        name: NAME,
        about:
            "reliable datagrams (SRD) between VMs of two device processes, with VXLAN between them",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::Vxlan(9000),
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs,
    }
}

/// Gives what both devices send these faults.
fn set_faults(fixture: &Fixture, faults: &str) -> Result<()> {
    let first = fixture.bed.device.as_ref().context("no device")?;
    let mut devices = std::iter::once(first).chain(&fixture.bed.others);
    devices.try_for_each(|device| device.set_faults_out(1, faults))
}

/// A test of `ci/verbs/srd.c` with these faults of both devices.
fn run(fixture: &mut Fixture, test: &str, faults: &str) -> Result<()> {
    set_faults(fixture, faults)?;
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

/// An operation of perftest with these faults of both devices.
fn measure(
    fixture: &mut Fixture,
    network: &str,
    faults: &str,
    combination: Combination,
) -> Result<()> {
    set_faults(fixture, faults)?;
    let cell = perftest::measure(fixture, USUAL, combination)?;
    println!("         {cell}");
    let column = format!("{}, {network}", fixture.kernel);
    fixture.cell(&combination.title(), &column, &cell);
    Ok(())
}

/// Each tool of perftest with two of these networks.
macro_rules! perftest {
    ($($tool:literal $what:tt,)*) => {
        &[$(
            perftest!($tool, $what, "nothing lost", "off"),
            perftest!($tool, $what, "1 % lost", "seed=1,loss=1%"),
        )*]
    };
    ($tool:literal, ($operation:literal $kind:ident $variant:ident), $network:literal,
     $faults:literal) => {
        Case {
            name: concat!($tool, ", ", $network),
            run: |fixture| {
                let (kind, variant) = (Kind::$kind, Variant::$variant);
                let combination = Combination::srd($operation, kind, variant, fixture.quick);
                measure(fixture, $network, $faults, combination)
            },
        }
    };
}

const PERFTEST: &[Case] = perftest!(
    "ib_send_bw -c SRD" ("send" Bandwidth Plain),
    "ib_send_lat -c SRD" ("send" Latency Plain),
    "ib_write_bw -c SRD" ("write" Bandwidth Plain),
    "ib_write_lat -c SRD" ("write" Latency Plain),
    "ib_read_bw -c SRD" ("read" Bandwidth Plain),
    // Of so many, READs of one queue pair overtake each other even where nothing is lost.
    "ib_read_bw -c SRD -q 64" ("read" Bandwidth ManyQueuePairs),
    "ib_read_lat -c SRD" ("read" Latency Plain),
);
