// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device executes for a message. `cargo xtask instructions` runs this under callgrind,
//! which counts what is done within [`device_round`] between the two ends of [`measured`].
//!
//! Prints the name of each workload and the number of its messages, in the order in which they are
//! measured. An argument selects those whose name contains it.
mod common;

use common::{Bed, Beds, Flow, WORKLOADS};

/// Messages that are measured, at least.
const MESSAGES: u32 = 1024;

fn main() {
    let wanted = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with("--"))
        .unwrap_or_default();
    let mut beds = Beds::new();
    for workload in WORKLOADS {
        if !workload.name.contains(&wanted) {
            continue;
        }
        let bed = beds.of(&workload);
        let flow = Flow::new(bed, workload);
        let steps = MESSAGES.div_ceil(flow.messages());
        // The rings go round once and everything has the size that it needs.
        for _ in 0..steps {
            flow.step(|| bed.round());
        }
        measured(&flow, bed, steps);
        println!("{}\t{}", workload.name, steps * flow.messages());
    }
}

#[inline(never)]
fn measured(flow: &Flow, bed: &mut Bed, steps: u32) {
    for _ in 0..steps {
        flow.step(|| device_round(bed));
    }
}

#[inline(never)]
fn device_round(bed: &mut Bed) {
    bed.round();
}
