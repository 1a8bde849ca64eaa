// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device costs when nobody uses it: 16 VMs attached, with 1,000 connected queue pairs
//! each.
//!
//! Time on CPUs and switches of all its threads over some seconds, as the kernel counts them.
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::bed::{self, Side};
use super::{figure, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "idle";
const VMS: u8 = 16;

/// What the threads of a process have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Time on a CPU, nanoseconds.
    pub time: u64,
    /// How often they began to run.
    pub wakeups: u64,
}

impl Usage {
    /// Up to now.
    pub fn of(process: u32) -> Result<Self> {
        let mut all = Self::default();
        for task in fs::read_dir(format!("/proc/{process}/task"))? {
            let task = task?.path();
            let text = fs::read_to_string(task.join("schedstat"))?;
            let mut words = text.split_whitespace();
            // Time on a CPU, time waited for one, times given one.
            let time = words.next().context("no time in schedstat")?;
            let runs = words.nth(1).context("no count in schedstat")?;
            all.time += time.parse::<u64>()?;
            all.wakeups += runs.parse::<u64>()?;
        }
        Ok(all)
    }
}

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let (count, time) = if settings.quick {
        (100, Duration::from_millis(500))
    } else {
        (1_000, Duration::from_secs(2))
    };
    let process = bed::device(settings.cores, VMS, "")?;
    let mut sides = Vec::new();
    for vm in 0..VMS {
        let vm = bed::vm(&process, vm.into(), 32 << 20)?;
        sides.push(Side::new(&vm, 4096)?);
    }
    let mut qps = Vec::new();
    for pair in sides.chunks_exact(2) {
        for _ in 0..count {
            let (a, b) = (pair[0].qp(4, 4)?, pair[1].qp(4, 4)?);
            bed::connect(&a, &b)?;
            qps.push((a, b));
        }
    }
    // Until all that was set going has come to rest. The watchdog takes two looks at sleeping
    // workers, a second apart, before it sleeps itself.
    std::thread::sleep(Duration::from_secs(3));
    let [mut shares, mut wakeups] = [Vec::new(), Vec::new()];
    for _ in 0..settings.repetitions() {
        let (before, start) = (Usage::of(process.id())?, Instant::now());
        std::thread::sleep(time);
        let (after, elapsed) = (Usage::of(process.id())?, start.elapsed().as_secs_f64());
        shares.push((after.time - before.time) as f64 / 1e9 / elapsed * 100.0);
        wakeups.push((after.wakeups - before.wakeups) as f64 / elapsed);
    }
    let what = format!("{VMS} VMs with {count} queue pairs each");
    Ok(vec![
        figure(
            SECTION,
            &format!("CPU use, {what}"),
            "%",
            Better::Lower,
            &shares,
        )
        .target(Target::Max(0.0)),
        figure(
            SECTION,
            &format!("wake-ups, {what}"),
            "/s",
            Better::Lower,
            &wakeups,
        )
        .target(Target::Max(0.0)),
    ])
}
