// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask lane`: VM lanes by name.

use anyhow::Result;

use crate::lanes::{self, Choice, Means};
use crate::setup;

/// Runs the lanes; false if a case failed.
pub fn run(names: &[String], choice: &Choice) -> Result<bool> {
    let wanted = names
        .iter()
        .map(|name| lanes::find(name))
        .collect::<Result<Vec<_>>>()?;
    setup::run()?;
    let means = Means::prepare(&wanted, choice)?;
    let mut good = true;
    for lane in &wanted {
        good &= lanes::run(lane, &means, choice)?.good();
    }
    Ok(good)
}
