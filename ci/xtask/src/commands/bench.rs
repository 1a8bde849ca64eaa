// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask bench`: measures, natively and between VMs, and makes the report.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{ensure, Result};

use crate::lanes::Choice;
use crate::{commands, report, setup, shell};

/// What the native part competes with, and the font of the plots.
const PACKAGES: &[&str] = &["fonts-dejavu-core", "libfabric-bin", "ucx-utils"];

/// What the report is named by, and the parts it is made of.
const PREFIX: &str = "bench";

/// What to do.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Only the native part: the device, driven without VMs
    #[arg(long, conflicts_with = "vm")]
    native: bool,
    /// Only the part between two VMs
    #[arg(long)]
    vm: bool,
    /// Little of everything natively, to try things out
    #[arg(long, conflicts_with = "publish")]
    quick: bool,
    /// Only sections of the native part whose name contains this; figures of others are kept. May
    /// be repeated
    #[arg(long, conflicts_with = "publish")]
    only: Vec<String>,
    /// Copy report, figures and plots to ci/bench/
    #[arg(long)]
    publish: bool,
}

/// Measures; false if something between VMs failed.
pub fn run(options: &Options) -> Result<bool> {
    setup::run()?;
    setup::packages(PACKAGES)?;
    let release = shell::cargo_target().join("release");
    shell::step("Building the benchmark", || {
        let mut build = shell::cargo();
        build.args(["build", "--quiet", "--release"]).args([
            "--package",
            "vhost-device-rdma",
            "--package",
            "virtio-rdma-bench",
        ]);
        shell::logged("cargo-build-bench", &mut build)
    })?;
    let bench = |words: &[&str]| -> Result<()> {
        let mut command = Command::new(release.join("virtio-rdma-bench"));
        command.args(words).arg("--reports");
        let status = command
            .arg(report::directory())
            .stdin(Stdio::null())
            .status()?;
        ensure!(
            status.success(),
            "virtio-rdma-bench {}: {status}",
            words.join(" ")
        );
        Ok(())
    };
    let mut good = true;
    if !options.vm {
        let mut words = vec!["native"];
        if options.quick {
            words.push("--quick");
        }
        for only in &options.only {
            words.extend(["--only", only]);
        }
        shell::step("Measuring natively", || bench(&words))?;
    }
    if !options.native {
        good = commands::lane::run(&["bench-vm".to_owned()], &Choice::default())?;
    }
    bench(&["report"])?;
    if options.publish {
        publish()?;
    }
    Ok(good)
}

/// Copies the report and what belongs to it.
fn publish() -> Result<()> {
    let to = shell::root().join("ci/bench");
    for entry in fs::read_dir(report::directory())? {
        let path = entry?.path();
        // What the lane collected is in directories.
        if !path.is_file() {
            continue;
        }
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|name| name.starts_with(PREFIX)) else {
            continue;
        };
        // The parts are in bench.json; the lane's own report is not of interest to readers.
        let part = ["bench-native.json", "bench-vm.json", "bench-vm.md"].contains(&name);
        if !part {
            fs::copy(&path, to.join(name))?;
        }
    }
    shell::say(format_args!("published: {}", to.join("bench.md").display()));
    Ok(())
}
