// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo deny`: licences, sources and known vulnerabilities of the crates that we build from, as
//! `deny.toml` wants them.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::{cache, shell};

/// The version that is used. It is built once, and kept.
const VERSION: &str = "0.20.2";

/// What can be checked without asking anybody.
const CHECKS: [&str; 4] = ["check", "licenses", "bans", "sources"];

/// Checks all that can be checked here, and says what cannot.
pub fn run() -> Result<()> {
    let program = cache::program("cargo-deny", VERSION)?;
    shell::step("cargo deny: licences, bans, sources", || {
        shell::logged("deny", deny(&program).args(CHECKS))
    })?;
    // The database of advisories is on GitHub, which not every machine reaches.
    let fetched = shell::logged("deny-fetch", deny(&program).args(["fetch", "db"]));
    if fetched.is_err() {
        shell::say("cargo deny: advisories were not checked, their database cannot be reached");
        return Ok(());
    }
    shell::step("cargo deny: advisories", || {
        let advisories = ["check", "--disable-fetch", "advisories"];
        shell::logged("deny-advisories", deny(&program).args(advisories))
    })
}

fn deny(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(shell::root());
    command
}
