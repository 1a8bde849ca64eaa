// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lane `scale`: how much of everything one VM can have, and what it costs.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::tools::{counts, device_memory, settled};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts};

/// Queue pairs and as many completion queues.
const COUNT: u64 = 65_536;

/// How long it may take to make them on a slow machine.
const TIMEOUT: Duration = Duration::from_secs(900);

pub fn lane() -> Lane {
    Lane {
        name: "scale",
        about: "65,536 queue pairs and completion queues in a VM of 4 GiB",
        with_device: true,
        vms: 1,
        memory: 4096,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || {
            let case = Case {
                name: "65,536 queue pairs and completion queues",
                run: queue_pairs,
            };
            vec![(Kernel::Trixie, vec![case])]
        },
    }
}

fn queue_pairs(fixture: &mut Fixture) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let resident = device_memory(&fixture.bed)?;
    fixture.vm(1)?.sh("rm -f /tmp/counted")?;
    let job = fixture
        .vm(1)?
        .spawn(&format!("/payload/rdma.py scale {COUNT}"))?;
    job.wait_text(TIMEOUT, |text| text.contains("all there"))?;
    let during = counts(&fixture.bed)?;
    for kind in ["qps", "cqs"] {
        let count = |counts: &[super::tools::Counts]| {
            counts
                .first()
                .and_then(|counts| counts.get(kind).copied())
                .unwrap_or(0)
        };
        let (had, has) = (count(&before), count(&during));
        ensure!(
            has == had + COUNT,
            "the device counts {has} {kind}, and there were {had} before {COUNT} more"
        );
    }
    // Each pair: a queue pair and its completion queue.
    let each = (device_memory(&fixture.bed)?.saturating_sub(resident)) / COUNT;
    fixture.figure("device_bytes_per_qp_and_cq", each);
    fixture.vm(1)?.sh("touch /tmp/counted")?;
    let output = job.wait(TIMEOUT)?;
    ensure!(
        output.status == 0 && output.text.contains("all gone"),
        "scale ended with {}:\n{}",
        output.status,
        output.text
    );
    for kind in ["cq", "qp"] {
        let number = |name: &str| {
            let line = output.text.lines().find(|line| line.starts_with(kind));
            line.and_then(|line| {
                let mut words = line.split_ascii_whitespace();
                words.find(|word| *word == name)?;
                words.next()?.parse::<u64>().ok()
            })
            .with_context(|| format!("no {kind} {name} in:\n{}", output.text))
        };
        let (first, last) = (number("first")?, number("last")?);
        fixture.figure(&format!("{kind}_create_first_us"), first);
        fixture.figure(&format!("{kind}_create_last_us"), last);
        fixture.figure(&format!("guest_bytes_per_{kind}"), number("bytes")?);
        ensure!(
            last <= 2 * first,
            "creating the last {kind}s took {last} us each, and the first {first} us"
        );
    }
    settled(&fixture.bed, &before)
}
