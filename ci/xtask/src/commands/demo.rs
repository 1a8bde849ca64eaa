// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask demo`.

use anyhow::Result;

use crate::images::Kernel;

/// Runs it.
pub fn run(_kernel: Kernel) -> Result<bool> {
    Ok(false)
}
