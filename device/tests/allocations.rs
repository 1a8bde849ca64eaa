// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The data path allocates nothing: what a worker does for messages of every kind, counted, between
//! VMs of a process, and over the wire, with packets that are sent and received over loopback.
//!
//! Only the rounds of the worker are counted, after every ring went round once: until then, its
//! lists grow to the size that they need.
#[path = "../benches/common/mod.rs"]
mod common;

use allocation_counter::measure;
use common::{BedKind, Beds, Flow, Workload, WORKLOADS};

/// Messages until every ring went round, and again while allocations are counted.
const MESSAGES: u32 = 2048;

#[test]
fn messages_of_every_kind_allocate_nothing() {
    let mut beds = Beds::new();
    for workload in WORKLOADS {
        let bed = beds.of(&workload);
        let flow = Flow::new(bed, workload);
        let steps = MESSAGES.div_ceil(flow.messages());
        for _ in 0..steps {
            flow.step(|| bed.round());
        }
        let frames = bed.frames();
        let mut rounds = 0;
        let mut allocations = 0;
        for _ in 0..steps {
            flow.step(|| {
                rounds += 1;
                allocations += measure(|| bed.round()).count_total;
            });
        }
        assert!(rounds >= steps, "{}: {rounds} rounds", workload.name);
        assert_eq!(allocations, 0, "{}", workload.name);
        // Each message over the wire is a packet at least; no other is any.
        let frames = bed.frames() - frames;
        let least = match workload.bed {
            BedKind::Local | BedKind::BesideIdleWire => 0,
            BedKind::Wired => u64::from(steps * flow.messages()),
        };
        assert!(
            frames >= least && (least != 0 || frames == 0),
            "{}: {frames} frames",
            workload.name
        );
    }
}

/// Nor does it while it waits for the next message of a queue pair.
#[test]
fn waiting_for_messages_allocates_nothing() {
    let mut beds = Beds::new();
    let one_by_one = |workload: &&Workload| workload.name.ends_with("one by one");
    for workload in WORKLOADS.iter().filter(one_by_one) {
        let bed = beds.of(workload);
        let flow = Flow::new(bed, *workload);
        for _ in 0..MESSAGES {
            flow.step(|| bed.round());
        }
        let mut waits = 0;
        let mut allocations = 0;
        std::thread::scope(|scope| {
            let driver = scope.spawn(|| {
                for _ in 0..MESSAGES {
                    flow.step(std::thread::yield_now);
                }
            });
            while !driver.is_finished() {
                allocations += measure(|| waits += u32::from(bed.busy_round())).count_total;
            }
        });
        // Neither datagrams and atomic operations wait, nor what goes over the wire.
        let local = workload.name.strip_prefix("beside an idle wire: ");
        let name = local.unwrap_or(workload.name);
        let plain = ["WRITE", "READ", "SEND"]
            .iter()
            .any(|verb| name.starts_with(verb));
        assert!(waits > 0 || !plain, "{}: no wait", workload.name);
        assert_eq!(allocations, 0, "{}", workload.name);
    }
}

/// What is measured with can count.
#[test]
fn allocations_are_counted() {
    let counted = measure(|| drop(std::hint::black_box(Box::new(7))));
    assert_eq!(counted.count_total, 1);
}
