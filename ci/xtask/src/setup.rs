// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the other commands need of the host: Debian packages, installed if they are missing.

use std::process::{Command, Stdio};

use anyhow::{ensure, Result};

use crate::shell;

/// For the guest images, for running VMs, and for counting instructions and system calls.
/// `qemu/build.sh` installs what it needs itself.
const PACKAGES: &[&str] = &[
    "debian-archive-keyring",
    "e2fsprogs",
    "iproute2",
    "mmdebstrap",
    "qemu-system-data",
    "seabios",
    "strace",
    "util-linux",
    "valgrind",
    "xz-utils",
];

/// Installs what is missing. Quick if nothing is.
pub fn run() -> Result<()> {
    packages(PACKAGES)?;
    // What cargo needs to build the provider; it says itself what it does.
    let status = Command::new("sh")
        .arg(shell::root().join("guest-driver/provider/set-up.sh"))
        .stdin(Stdio::null())
        .status()?;
    ensure!(
        status.success(),
        "guest-driver/provider/set-up.sh: {status}"
    );
    Ok(())
}

/// Installs those packages that are missing.
pub fn packages(wanted: &[&str]) -> Result<()> {
    let missing = missing(wanted)?;
    if missing.is_empty() {
        return Ok(());
    }
    shell::step(&format!("Installing {}", missing.join(" ")), || {
        let apt = || {
            let mut command = shell::as_root("env");
            command.args([
                "DEBIAN_FRONTEND=noninteractive",
                "apt-get",
                "-q",
                "-o",
                "DPkg::Lock::Timeout=300",
            ]);
            command
        };
        shell::logged("apt-update", apt().arg("update"))?;
        shell::logged(
            "apt-install",
            apt()
                .args(["install", "-y", "--no-install-recommends"])
                .args(&missing),
        )
    })
}

fn missing<'a>(wanted: &[&'a str]) -> Result<Vec<&'a str>> {
    // dpkg-query fails if it knows nothing of one of them, and still answers for the others.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status}\n"])
        .args(wanted)
        .output();
    ensure!(
        output.is_ok(),
        "this needs Debian 12 or 13: there is no dpkg-query here"
    );
    let answer = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    Ok(wanted
        .iter()
        .copied()
        .filter(|package| {
            !answer
                .lines()
                .any(|line| line.split_once(' ') == Some((package, "installed")))
        })
        .collect())
}
