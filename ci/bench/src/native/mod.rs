// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The native part: the real device process, driven at native speed by VMs without a VM
//! (`guest-driver/bare`).
//!
//! The device has one worker, pinned to one core; the thread that measures, which is the driver of
//! all VMs, has another. What the device is compared with runs on the same two cores, in the same
//! run, in turn with it: repetition by repetition.
//!
//! An experiment ([`EXPERIMENTS`]) makes the figures of one section of the report.
use std::time::Duration;

use anyhow::{ensure, Result};
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::figure::{Better, Figure, Measurements, Part};

mod bandwidth;
mod bed;
mod cache;
mod front_ends;
mod idle;
mod iwarp;
mod latency;
mod lookup;
mod model;
mod neighbours;
mod peers;
mod qps;
mod rate;
mod registration;
mod setup;
mod srd;
mod tap;
mod tuning;
mod vms;
mod wire;

/// The two cores that are used.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    /// Of the thread that measures.
    pub driver: usize,
    /// Of the device's worker, and of whatever plays its role.
    pub worker: usize,
}

impl Cores {
    /// The first two that this process may use.
    ///
    /// # Errors
    /// If there is only one.
    pub fn first_two() -> Result<Self> {
        let set = sched_getaffinity(None)?;
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect();
        ensure!(cpus.len() >= 2, "this needs two CPUs");
        Ok(Self {
            driver: cpus[0],
            worker: cpus[1],
        })
    }
}

/// Pins this thread to these CPUs, and with it all that it starts.
///
/// # Errors
/// If the system refuses.
pub fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The cores.
    pub cores: Cores,
    /// Little of everything, to try things out.
    pub quick: bool,
}

impl Settings {
    /// How often everything is repeated.
    fn repetitions(&self) -> usize {
        if self.quick {
            3
        } else {
            9
        }
    }

    /// How long to measure a rate.
    fn time(&self) -> Duration {
        Duration::from_millis(if self.quick { 40 } else { 80 })
    }

    /// How many single events to measure.
    fn rounds(&self) -> usize {
        if self.quick {
            5_000
        } else {
            10_000
        }
    }
}

/// Makes the figures of one section.
type Experiment = fn(&Settings) -> Result<Vec<Figure>>;

/// All experiments, by the names of their sections.
pub const EXPERIMENTS: [(&str, Experiment); 16] = [
    ("latency", latency::run),
    ("message rate", rate::run),
    ("active queue pairs", qps::run),
    ("bandwidth", bandwidth::run),
    ("registration", registration::run),
    ("key lookup", lookup::run),
    ("set-up", setup::run),
    ("VMs", vms::run),
    ("front ends", front_ends::run),
    ("wire", wire::run),
    ("wire by TAP", tap::run),
    ("SRD", srd::run),
    ("iWARP", iwarp::run),
    ("neighbours", neighbours::run),
    ("tuning", tuning::run),
    ("idle", idle::run),
];

/// Runs those experiments whose section contains one of `only`, or all if that is empty.
///
/// # Errors
/// If one fails.
pub fn run(settings: &Settings, only: &[String]) -> Result<Measurements> {
    pin(&[settings.cores.driver])?;
    let mut all = Measurements::default();
    all.notes.push(format!(
        "Native: the device's one worker is pinned to CPU {}, the thread that drives all VMs to CPU {}; what they are compared with uses \
         the same two. {} repetitions, each beside one of what they are compared with; a figure is their median, and a ratio the median of \
         theirs. A repetition during which the round trip of a cache line between the two CPUs changed was measured again.",
        settings.cores.worker,
        settings.cores.driver,
        settings.repetitions()
    ));
    if settings.quick {
        all.notes
            .push("This was a quick run: its figures are not to be trusted.".to_owned());
    }
    for (name, experiment) in EXPERIMENTS {
        if !only.is_empty() && !only.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let start = std::time::Instant::now();
        let figures = experiment(settings)?;
        println!("{name}: {:.1} s", start.elapsed().as_secs_f64());
        for figure in &figures {
            println!("    {}", crate::report::line(figure));
        }
        all.figures.extend(figures);
    }
    Ok(all)
}

/// Lets everything come to rest that used the worker's core. A worker of a device looks for more
/// work for a while, and if another thread takes its core meanwhile, it does so no longer for a
/// long time: the next measurement would not be of a worker that polls.
fn settle() {
    std::thread::sleep(Duration::from_millis(2));
}

/// A figure of this part.
fn figure(section: &str, name: &str, unit: &str, better: Better, runs: &[f64]) -> Figure {
    Figure::new(Part::Native, section, name, unit, better, runs)
}

/// A value below which a part (0 to 1) of sorted values is.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let index = (sorted.len() as f64 * part) as usize;
    sorted.get(index.min(last)).copied().unwrap_or(f64::NAN)
}
