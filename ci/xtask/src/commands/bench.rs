// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask bench`: measures, natively and between VMs, and makes the report.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{ensure, Result};

use crate::lanes::Choice;
use crate::{commands, report, setup, shell};

/// What the native part competes with, and the font of the plots.
const PACKAGES: &[&str] = &["fonts-dejavu-core", "libfabric-bin", "ucx-utils"];

/// The report. Its figures as JSON, and those of its parts, stay where they were made.
const REPORT: &str = "bench.md";
/// Plots that are published with it.
const PLOTS: &[&str] = &[
    "bench-latency.svg",
    "bench-message-rate.svg",
    "bench-bandwidth.svg",
    "bench-vm-latency-by-size.svg",
    "bench-vm-bandwidth-by-size.svg",
];

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
    /// Copy the report and a few of its plots to ci/bench/
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
        let lanes = ["bench-vm", "bench-wire", "bench-rxe", "bench-front-ends"].map(str::to_owned);
        good = commands::lane::run(&lanes, &Choice::default())?;
    }
    let whole = !options.native && !options.vm && options.only.is_empty();
    bench(&["report", "--note", &origin(whole)?])?;
    if options.publish {
        publish()?;
    }
    Ok(good)
}

/// When a report was made, and of which commit: of one of a part of the benchmark the rest is older.
fn origin(whole: bool) -> Result<String> {
    let date = shell::capture(Command::new("date").arg("--iso-8601"))?;
    let describe = ["describe", "--always", "--dirty=, with changes"];
    let mut git = Command::new("git");
    let commit = shell::capture(git.args(describe).current_dir(shell::root()));
    let commit = commit.map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned());
    let rest = match whole {
        true => "",
        false => " Of parts that were not measured then, the figures are older.",
    };
    Ok(format!(
        "Measured on {}, commit {commit}.{rest}",
        date.trim()
    ))
}

/// Copies the report and the plots that it keeps.
fn publish() -> Result<()> {
    let (from, to) = (report::directory(), shell::root().join("ci/bench"));
    let report = fs::read_to_string(from.join(REPORT))?;
    fs::write(to.join(REPORT), published(&report))?;
    for plot in PLOTS {
        let published = to.join(plot);
        // A part that was not measured has no plots.
        if report.contains(&link(plot)) {
            fs::copy(from.join(plot), published)?;
        } else if published.exists() {
            fs::remove_file(published)?;
        }
    }
    shell::say(format_args!("published: {}", to.join(REPORT).display()));
    Ok(())
}

/// How the report ends the line that shows a plot.
fn link(plot: &str) -> String {
    format!("]({plot})")
}

/// The report without the plots that are not published.
fn published(report: &str) -> String {
    let mut text = String::new();
    let mut lines = report.lines();
    while let Some(line) = lines.next() {
        let kept = || PLOTS.iter().any(|plot| line.ends_with(&link(plot)));
        if line.starts_with("![") && !kept() {
            // And the empty line below it.
            lines.next();
            continue;
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_report_shows_published_plots_only() {
        let report =
            "# A\n\n![one](bench-latency.svg)\n\n| a |\n\n## B\n\n![two](bench-vms.svg)\n\n| b |\n";
        let expected = "# A\n\n![one](bench-latency.svg)\n\n| a |\n\n## B\n\n| b |\n";
        assert_eq!(published(report), expected);
        assert_eq!(published(expected), expected);
    }

    /// What is in the tree is what would be published.
    #[test]
    fn the_tree_has_the_report_and_its_plots_and_nothing_else_of_it() {
        let directory = shell::root().join("ci/bench");
        let report = fs::read_to_string(directory.join(REPORT)).unwrap();
        assert_eq!(published(&report), report);
        let mut found: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("bench"))
            .collect();
        found.sort_unstable();
        let shown = PLOTS.iter().filter(|plot| report.contains(&link(plot)));
        let mut expected: Vec<_> = [REPORT].iter().chain(shown).copied().collect();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
}
