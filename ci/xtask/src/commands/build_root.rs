// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask build-root`: the root in which the kernel module is compiled, for work on the
//! module by hand.

use std::path::Path;

use anyhow::{Context, Result};

use crate::images::{self, Kernel};
use crate::{setup, shell};

/// Prints the root's path, or runs a command in it.
pub fn run(kernel: Kernel, out: Option<&Path>, command: &[String]) -> Result<bool> {
    setup::run()?;
    let root = images::build_root(kernel.suite())?;
    if command.is_empty() {
        println!("{}", root.tree.display());
        return Ok(true);
    }
    let out = out.map_or_else(
        || shell::target().join("module").join(kernel.name()),
        Path::to_path_buf,
    );
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let status = root.command(kernel, &out, &words)?.status()?;
    shell::own(&out)?;
    Ok(status.success())
}
