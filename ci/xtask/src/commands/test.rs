// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask test`: all that has to hold before a change goes in. Its last line is `N passed, M
//! failed`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::commands::{deny, instructions, soak};
use crate::lanes::{self, Choice, Means};
use crate::report::{Outcome, Report};
use crate::{setup, shell};

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    passed: usize,
    pub(super) failed: usize,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
    }

    fn of_report(report: &Report) -> Self {
        Count {
            passed: report.count(Outcome::Passed),
            failed: report.count(Outcome::Failed),
        }
    }

    fn of(good: bool) -> Self {
        Count {
            passed: usize::from(good),
            failed: usize::from(!good),
        }
    }
}

/// What was run so far.
#[derive(Default)]
struct Checks {
    count: Count,
    /// The names of those with failures, said once more at the end: theirs may be far above.
    failed: Vec<String>,
}

impl Checks {
    fn add(&mut self, name: &str, result: Result<Count>) {
        let count = result.unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            Count::of(false)
        });
        if count.failed > 0 {
            self.failed.push(name.to_owned());
        }
        self.count.add(count);
    }
}

/// The VM lanes that have to pass, which of their cases, and which of these run on a second kernel, too:
/// what has to do with a kernel. What rxe makes of rdma-core's tests is no matter of a change.
const LANES: [(&str, Option<&str>, Option<&str>); 8] = [
    ("smoke", None, Some(SMOKE_AGAIN)),
    ("rdma-core-56", Some("the tests on our device"), None),
    ("recovery", Some(RECOVERY), Some(RECOVERY_AGAIN)),
    (
        "wire",
        Some("rping|ibv_xsrq_pingpong|Wireshark"),
        Some("rping"),
    ),
    (
        "wire-tap",
        Some("rping|ibv_ud_pingpong|follows|VLAN"),
        Some("follows|VLAN"),
    ),
    ("srd", Some("nothing lost|path of four is dead"), None),
    ("rxe-interop", Some("rping|ibv_ud_pingpong"), Some("rping")),
    ("iwarp", Some(IWARP), None),
];

/// Ports of iWARP with each other. Soft-iWARP, which takes longer, is left to the whole lane.
const IWARP: &str = "one process: rping|one process: ib_write_bw -R|one process: ib_send_bw -R|\
     one process: ib_read_lat -R|two hosts: rping|two hosts: ib_write_bw -R|\
     two hosts: ib_send_bw -R|two hosts: ib_read_lat -R";

const SMOKE_AGAIN: &str = "tools show|rc_pingpong with|counters|data arrives|ib_send_bw|\
     system call|kill -9|rmmod|reset";

/// Five minutes of a card that comes back. The system's sleep, and whatever takes longer, is left
/// to the whole lane.
const RECOVERY: &str = "killed while idle|killed under rping|killed under NVMe|unbound and bound|\
     unplugged and plugged under applications|VLAN|reset under";
const RECOVERY_AGAIN: &str = "killed while idle|killed under NVMe|unbound and bound|reset under";

/// Unit, property and documentation tests of the workspace.
const TESTS: &[&str] = &["test", "--workspace", "--no-fail-fast"];

/// The protocols between threads, model-checked.
const MODELS: &[&str] = &[
    "test",
    "--release",
    "--no-fail-fast",
    "-p",
    "virtio-rdma-driver-core",
    "-p",
    "vhost-device-rdma-sync",
    "--test",
    "loom",
];

/// With it everything is compiled otherwise, so it has a directory of its own.
const MODELS_ENVIRONMENT: [(&str, &str); 2] = [
    ("RUSTFLAGS", "--cfg loom"),
    ("CARGO_TARGET_DIR", "target/models"),
];

/// Programs of verbs over networks that are simulated: so many of each kind.
const SIMULATIONS: &[&str] = &[
    "test",
    "--release",
    "--no-fail-fast",
    "-p",
    "vhost-device-rdma",
    "--lib",
    "simulated",
];
const SIMULATIONS_ENVIRONMENT: [(&str, &str); 1] = [("PROPTEST_CASES", "2000")];

/// Runs all checks, however many fail.
pub fn run() -> Result<bool> {
    let start = Instant::now();
    setup::run()?;
    let mut checks = Checks::default();
    checks.add("fmt", check("fmt", &["fmt", "--all", "--check"], ""));
    checks.add(
        "clippy",
        check(
            "clippy",
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ],
            "",
        ),
    );
    checks.add(
        "doc",
        check(
            "doc",
            &[
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ],
            "-D warnings",
        ),
    );
    checks.add("deny", deny::run().map(|()| Count::of(true)));
    checks.add("cargo test", tests("cargo test", TESTS, &[]));
    checks.add(
        "model checks",
        tests("model checks", MODELS, &MODELS_ENVIRONMENT),
    );
    checks.add(
        "simulations",
        tests("simulations", SIMULATIONS, &SIMULATIONS_ENVIRONMENT),
    );
    checks.add(
        "instructions",
        instructions::run(false, None).map(Count::of),
    );
    for (name, only, again) in LANES {
        checks.add(&format!("lane {name}"), lane(name, only, again));
    }
    let short = soak::short().map(|report| Count::of_report(&report));
    checks.add("soak", short);
    shell::say(format_args!("all took {}", shell::human(start.elapsed())));
    if !checks.failed.is_empty() {
        println!("failed: {}", checks.failed.join(", "));
    }
    println!(
        "{} passed, {} failed",
        checks.count.passed, checks.count.failed
    );
    Ok(checks.count.failed == 0)
}

/// One cargo command as one check.
fn check(name: &str, words: &[&str], rustdoc_flags: &str) -> Result<Count> {
    let mut command = shell::cargo();
    command.args(words);
    if !rustdoc_flags.is_empty() {
        command.env("RUSTDOCFLAGS", rustdoc_flags);
    }
    shell::step(&format!("cargo {}", words.join(" ")), || {
        shell::logged(name, &mut command)
    })?;
    Ok(Count::of(true))
}

/// Tests, counted by what the harness says.
pub(super) fn tests(name: &str, words: &[&str], environment: &[(&str, &str)]) -> Result<Count> {
    shell::say(format_args!("cargo {} ...", words.join(" ")));
    let start = Instant::now();
    let mut child = shell::cargo()
        .args(words)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let mut count = Count::default();
    let output = child.stdout.take().context("no output")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        match results(&line) {
            Some(result) => count.add(result),
            // Only what is worth reading: the names of passed tests are not.
            None if line.starts_with("test ")
                && (line.ends_with("... ok") || line.ends_with("... ignored")) => {}
            None if line.is_empty() || line.starts_with("running ") => {}
            None => println!("{line}"),
        }
    }
    let status = child.wait()?;
    if !status.success() && count.failed == 0 {
        // It did not compile, or a test took its process down.
        println!("{name}: {status}");
        count.failed = 1;
    }
    shell::say(format_args!(
        "{name}: {} passed, {} failed in {}",
        count.passed,
        count.failed,
        shell::human(start.elapsed())
    ));
    Ok(count)
}

/// The numbers of a line `test result: ok. 5 passed; 0 failed; …`.
fn results(line: &str) -> Option<Count> {
    let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| {
        let part = numbers
            .split(';')
            .map(str::trim)
            .find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    Some(Count {
        passed: number(" passed")?,
        failed: number(" failed")?,
    })
}

fn lane(name: &str, only: Option<&str>, again: Option<&str>) -> Result<Count> {
    let lane = lanes::find(name)?;
    let choice = Choice {
        only,
        again,
        // What has a short form has a long one for whoever has the time.
        quick: true,
        ..Choice::default()
    };
    let means = Means::prepare(std::slice::from_ref(&lane), &choice)?;
    Ok(Count::of_report(&lanes::run(&lane, &means, &choice)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_test_are_read() {
        let line = "test result: ok. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            results(line),
            Some(Count {
                passed: 12,
                failed: 3
            })
        );
        assert_eq!(
            results("test result: FAILED. 1 passed; 2 failed; 0 ignored"),
            Some(Count {
                passed: 1,
                failed: 2
            })
        );
        assert_eq!(results("test a::b ... ok"), None);
    }
}
