// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask package`: the Debian packages, built from a tarball of the sources in a root of
//! their suite that has no network.

use anyhow::Result;

use crate::images::Suite;
use crate::packages::{self, Sources};
use crate::setup;

/// Builds them, and says where they are.
pub fn run(suite: Suite, next: bool) -> Result<bool> {
    setup::run()?;
    let repository = packages::build(&Sources::of_tree()?, suite, next)?;
    println!("{}", repository.display());
    println!("As a repository for apt:");
    println!("deb [trusted=yes] file:{} ./", repository.display());
    Ok(true)
}
