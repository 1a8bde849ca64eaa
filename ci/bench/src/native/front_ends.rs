// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs that have the device by vfio-user beside two that have it by vhost-user, of one process
//! with one worker.
//!
//! The data path is the same: rings and doorbells in the VM's memory. What differs is how a worker
//! that sleeps is notified: by an eventfd, or by a message. That is measured between VMs alone: the
//! client here waits for an answer to each message, and QEMU asks for none.
use anyhow::Result;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{DeviceProcess, FrontEnd};

use super::bed::{self, Pair};
use super::{bandwidth, cache, figure, latency, quantile, rate, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "front ends";
/// What the others are compared with.
const PEER: &str = "vhost-user";

/// How many times more often than elsewhere it is measured: what differs is little.
const MORE: usize = 3;

/// What is measured of a pair of VMs.
struct Measurement {
    name: &'static str,
    unit: &'static str,
    better: Better,
    target: Target,
    measure: fn(&Pair, &Settings) -> Result<f64>,
}

/// How much less good one front end may be than the other.
const NO_SLOWER: Target = Target::Max(1.1);
const NO_LESS: Target = Target::Min(0.9);

const MEASUREMENTS: [Measurement; 5] = [
    Measurement {
        name: "WRITE 8 B, post to completion",
        unit: "µs",
        better: Better::Lower,
        target: NO_SLOWER,
        measure: |pair, settings| round_trip(pair, wr_opcode::RDMA_WRITE, settings),
    },
    Measurement {
        name: "SEND 8 B, post to completion",
        unit: "µs",
        better: Better::Lower,
        target: NO_SLOWER,
        measure: |pair, settings| round_trip(pair, wr_opcode::SEND, settings),
    },
    Measurement {
        name: "WRITE 64 B, in lists of 32, the last signalled",
        unit: "million/s",
        better: Better::Higher,
        target: NO_LESS,
        measure: |pair, settings| writes(pair, 32, settings),
    },
    Measurement {
        name: "WRITE 64 B, one by one, all signalled",
        unit: "million/s",
        better: Better::Higher,
        target: NO_LESS,
        measure: |pair, settings| writes(pair, 1, settings),
    },
    Measurement {
        name: "WRITE 64 KiB",
        unit: "GB/s",
        better: Better::Higher,
        target: NO_LESS,
        measure: |pair, settings| bandwidth::transfer(pair, wr_opcode::RDMA_WRITE, LARGE, settings),
    },
];

/// Size of a large message.
const LARGE: u32 = 64 << 10;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let process = bed::device_of_both(settings.cores, 4, 2)?;
    let pairs = [
        pair(&process, 0, FrontEnd::VfioUser)?,
        pair(&process, 2, FrontEnd::VhostUser)?,
    ];
    let mut runs = [const { [const { Vec::new() }; 2] }; MEASUREMENTS.len()];
    for repetition in 0..settings.repetitions() * MORE {
        for (measurement, runs) in MEASUREMENTS.iter().zip(&mut runs) {
            let measure = measurement.measure;
            // Neither is always the first.
            let order = if repetition % 2 == 0 { [0, 1] } else { [1, 0] };
            let values = cache::steady(settings.cores, || {
                let mut values = [0.0; 2];
                for which in order {
                    values[which] = measure(&pairs[which], settings)?;
                }
                Ok(values)
            })?;
            for (runs, value) in runs.iter_mut().zip(values) {
                runs.push(value);
            }
        }
    }
    let figures = MEASUREMENTS.iter().zip(&runs).map(|(of, [own, peer])| {
        let name = format!("{}, by vfio-user", of.name);
        let own = figure(SECTION, &name, of.unit, of.better, own).beside(PEER, peer);
        own.target(of.target)
    });
    Ok(figures.collect())
}

/// A pair of VMs, the first of them on socket number `first`.
fn pair(process: &DeviceProcess, first: usize, front_end: FrontEnd) -> Result<Pair> {
    let vm = |number| bed::vm_by(process, number, 64 << 20, front_end);
    Pair::new(&vm(first)?, &vm(first + 1)?, 1 << 20)
}

/// The median, µs.
fn round_trip(pair: &Pair, opcode: u8, settings: &Settings) -> Result<f64> {
    super::settle();
    let times = latency::post_to_completion(pair, opcode, settings.rounds())?;
    Ok(quantile(&times, 0.5))
}

fn writes(pair: &Pair, list: u64, settings: &Settings) -> Result<f64> {
    rate::rate(pair, wr_opcode::RDMA_WRITE, 64, list, settings.time())
}
