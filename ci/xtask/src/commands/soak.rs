// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask soak`: random traffic and random events, for as long as asked.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;

use crate::images::Kernel;
use crate::lanes::soak::{self, Soak};
use crate::lanes::{self, Choice, Means};
use crate::report::Report;
use crate::setup;

/// What to do.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// For how long events happen
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// What the events are drawn from: the same seed, the same sequence (default: another one each
    /// time)
    #[arg(long)]
    seed: Option<u64>,
    /// The guests' kernel
    #[arg(long, value_enum, default_value_t = Kernel::Trixie)]
    kernel: Kernel,
}

/// A short one: minutes, and the seed.
const SHORT: (u64, u64) = (2, 1);

/// Runs it; false if anything was lost, corrupt or left over.
pub fn run(options: &Options) -> Result<bool> {
    setup::run()?;
    Ok(soak(options)?.good())
}

/// A short one, which is always the same.
pub fn short() -> Result<Report> {
    let (minutes, seed) = SHORT;
    soak(&Options {
        minutes,
        seed: Some(seed),
        kernel: Kernel::Trixie,
    })
}

fn soak(options: &Options) -> Result<Report> {
    let seed = options.seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.map_or(1, |now| now.as_secs())
    });
    let lane = soak::lane();
    let kernel = Some(options.kernel);
    let choice = Choice {
        kernel,
        soak: Some(Soak {
            time: Duration::from_secs(options.minutes * 60),
            seed,
        }),
        ..Choice::default()
    };
    let means = Means::prepare(std::slice::from_ref(&lane), &choice)?;
    lanes::run(&lane, &means, &choice)
}
