// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `bench-rxe`: how fast our device is with Soft-RoCE (rxe) at the other end, in either direction,
//! beside rxe at both ends: whoever has one of ours is not to be worse off with peers that have none.
//!
//! All of it is between the same two guests, with a switch between them and the processes of their
//! devices, in turn.

use anyhow::{Context, Result};
use virtio_rdma_bench::{Figure, Part, Target};

use super::bench::{
    self, judged, perftest, set_clocks, Measurement, Quantity, RdmaDevice, MEASUREMENTS,
};
use super::{Case, Fixture, Lane};
use crate::images::Kernel;
use crate::vm::Hosts;

/// The VM with both, and that with rxe alone.
const BOTH: u8 = 1;
const RXE: u8 = 2;

/// How often everything is measured.
const ROUNDS: usize = 5;

/// The longest IP packet of the VMs' network, which is enough for a path MTU of 4096.
const MTU: u16 = 9000;

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "bench-rxe",
        about: "our device and Soft-RoCE at two ends, beside Soft-RoCE at both",
        hosts: Hosts::Switch(MTU),
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
        ..bench::lane()
    }
}

const CASES: &[Case] = &[
    Case {
        name: "rxe and jumbo frames",
        run: set_up,
    },
    Case {
        name: "rounds",
        run: rounds,
    },
];

/// Who sends to whom, or reads of it.
#[derive(Clone, Copy)]
struct Way {
    /// How reports say it; none of rxe with itself.
    name: Option<&'static str>,
    /// The VMs of client and server, and their devices.
    vms: (u8, u8),
    devices: [RdmaDevice; 2],
}

const WAYS: [Way; 3] = [
    Way {
        name: Some("rxe is the server"),
        vms: (BOTH, RXE),
        devices: [RdmaDevice::Ours, RdmaDevice::Rxe],
    },
    Way {
        name: Some("rxe is the client"),
        vms: (RXE, BOTH),
        devices: [RdmaDevice::Rxe, RdmaDevice::Ours],
    },
    Way {
        name: None,
        vms: (BOTH, RXE),
        devices: [RdmaDevice::Rxe; 2],
    },
];

/// What is wanted beside rxe with itself.
fn target(quantity: Quantity) -> Target {
    match quantity {
        Quantity::Latency => Target::Max(1.0 / 0.9),
        Quantity::Bandwidth | Quantity::Rate => Target::Min(0.9),
    }
}

fn set_up(fixture: &mut Fixture) -> Result<()> {
    set_clocks(fixture)?;
    for vm in &fixture.bed.vms {
        bench::add_rxe(vm, MTU)?;
    }
    fixture.note(format!(
        "With rxe at the other end: two guests, of which one has our device and rxe, the other rxe, take turns with \
         both ends rxe. A switch, which is a process of the host, is between them, and hands RoCEv2 packets to our \
         device or to the guest; our device sends it plain frames (`dgram`). Each figure is the median of {ROUNDS} runs."
    ));
    Ok(())
}

/// Values of each way.
type Runs = [Vec<f64>; WAYS.len()];

fn rounds(fixture: &mut Fixture) -> Result<()> {
    let mut values: Vec<Runs> = vec![Default::default(); MEASUREMENTS.len()];
    for round in 1..=ROUNDS {
        for (measurement, runs) in MEASUREMENTS.iter().zip(&mut values) {
            for (way, run) in WAYS.iter().zip(runs) {
                let value = measure(fixture, *way, *measurement)?;
                println!(
                    "         round {round}, {}: {} {value:.3} {}",
                    way.name.unwrap_or("both are rxe"),
                    measurement.name(),
                    measurement.quantity.unit()
                );
                run.push(value);
            }
        }
    }
    for figure in figures(&values) {
        fixture.sub_case(judged(&figure));
        fixture.measured(figure);
    }
    Ok(())
}

fn measure(fixture: &mut Fixture, way: Way, measurement: Measurement) -> Result<f64> {
    let ours = way.devices.contains(&RdmaDevice::Ours);
    let switch = fixture.bed.switch.as_ref().context("no switch")?;
    switch.steer(BOTH, ours);
    switch.steer(RXE, false);
    let (size, iterations) = (measurement.size, measurement.iterations(RdmaDevice::Rxe));
    let arguments = format!("-s {size} -n {iterations}");
    let tool = measurement.tool();
    let table = perftest(fixture, way.vms, way.devices, &tool, &arguments)?;
    measurement.value(&table, size)
}

/// What the rounds come to.
fn figures(values: &[Runs]) -> Vec<Figure> {
    let of = |(measurement, runs): (&Measurement, &Runs)| {
        let quantity = measurement.quantity;
        let [.., rxe] = runs;
        let with_ours = WAYS.iter().zip(runs).filter_map(|(way, run)| {
            let figure = Figure::new(
                Part::Vm,
                &format!("{} with rxe", quantity.section()),
                &format!("{}, {}", measurement.name(), way.name?),
                quantity.unit(),
                quantity.better(),
                run,
            );
            Some(
                figure
                    .beside("rxe with itself", rxe)
                    .target(target(quantity)),
            )
        });
        with_ours.collect::<Vec<_>>()
    };
    MEASUREMENTS.iter().zip(values).flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Outcome;

    #[test]
    fn both_directions_are_beside_rxe_with_itself() {
        let runs = [vec![95.0], vec![80.0], vec![100.0]];
        let figures = figures(&vec![runs; MEASUREMENTS.len()]);
        assert_eq!(figures.len(), 2 * MEASUREMENTS.len());
        for pair in figures.chunks(2) {
            let met: Vec<_> = pair.iter().map(|one| judged(one).outcome).collect();
            let latency = pair[0].section.starts_with("latency");
            let second = if latency {
                Outcome::Passed
            } else {
                Outcome::Failed
            };
            assert_eq!(met, [Outcome::Passed, second]);
            assert_eq!(pair[1].ratio, Some(0.8));
        }
    }
}
