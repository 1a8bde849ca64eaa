// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lanes `rdma-core-56`, `rdma-core-65` and `wire-rdma-core`: rdma-core's own tests on our device, those
//! of 56.1 also on Soft-RoCE (rxe) in the same guest, and over our wire.
//!
//! Each test on our device is a case of the lane. Rxe's outcomes stand beside ours to compare with,
//! whatever they are. The devices take turns and do not share the guest: rdma_cm picks a device by
//! its address, and both would have the same.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{bail, ensure, Result};
use serde::Deserialize;

use super::tools::{counts, settled};
use super::{Case, Fixture, Lane, Skip};
use crate::images::{Image, Kernel};
use crate::report::{CaseReport, Outcome};
use crate::vm::{FrontEnd, Hosts};

/// How long all tests may take on one device. Most of it is for tests that hang.
const LONG: Duration = Duration::from_secs(45 * 60);

/// How often a guest may be lost before that is the result.
const LOSSES: usize = 8;

/// What is wanted of a version of the tests.
struct Wanted {
    /// How many have to pass on our device.
    passing: usize,
    /// Which our device may skip.
    skippable: &'static [Skippable],
}

/// Tests that may be skipped for one reason.
#[derive(Clone, Copy)]
struct Skippable {
    /// What the device or the guest does not have.
    group: &'static str,
    /// True for their names.
    is: fn(&str) -> bool,
}

const ON_DEMAND_PAGING: Skippable = Skippable {
    group: "on-demand paging",
    is: |name| name.starts_with("tests.test_odp."),
};

const TAG_MATCHING: Skippable = Skippable {
    group: "tag matching",
    is: |name| name.starts_with("tests.test_tag_matching."),
};

const RAW_PACKETS: Skippable = Skippable {
    group: "raw packet QPs, flows, RSS",
    is: |name| {
        name.starts_with("tests.test_flow.")
            || name.starts_with("tests.test_rss_traffic.")
            || RAW_QUEUE_PAIRS.contains(&name)
    },
};

/// The tests of raw packet queue pairs; others with such a name test limits of what every device
/// has.
const RAW_QUEUE_PAIRS: &[&str] = &[
    "tests.test_qp.QPTest.test_create_raw_qp_no_attr",
    "tests.test_qp.QPTest.test_create_raw_qp_with_attr",
    "tests.test_qp.QPTest.test_create_raw_qp_ex_no_attr",
    "tests.test_qp.QPTest.test_create_raw_qp_ex_with_attr",
    "tests.test_qp.QPTest.test_query_raw_qp",
    "tests.test_qp.QPTest.test_raw_qp_rate_limit_modify",
];

const DMA_BUF: Skippable = Skippable {
    group: "dma-buf",
    is: |name| {
        name.starts_with("tests.test_mr.DmaBufMRTest.")
            || name.starts_with("tests.test_mr.DmaBufTestCase.")
            || name == "tests.test_mr.DeviceMemoryAPITest.test_dm_export_dmabuf_fd"
    },
};

const PROCESSING_HINTS: Skippable = Skippable {
    group: "special hardware: PCIe TLP processing hints (DMA handles)",
    is: |name| name.starts_with("tests.test_dmah."),
};

const HARDWARE_CLOCK: Skippable = Skippable {
    group: "special hardware: a PTP hardware clock in the network interface",
    is: |name| name.starts_with("tests.test_phc_timestamp."),
};

const CONFIDENTIAL: Skippable = Skippable {
    group: "special hardware: confidential VMs with bounce buffers",
    is: |name| {
        name.starts_with("tests.test_buf.")
            && (name.contains("_cc_pd") || name.contains("bounce_device"))
    },
};

const VERSION_56: Wanted = Wanted {
    passing: 139,
    skippable: &[ON_DEMAND_PAGING, TAG_MATCHING, RAW_PACKETS, DMA_BUF],
};

const VERSION_65: Wanted = Wanted {
    passing: 159,
    skippable: &[
        ON_DEMAND_PAGING,
        TAG_MATCHING,
        RAW_PACKETS,
        DMA_BUF,
        PROCESSING_HINTS,
        HARDWARE_CLOCK,
        CONFIDENTIAL,
    ],
};

/// The tests that make sense with iWARP.
const FOR_IWARP: &[&str] = &[
    "tests.test_device.",
    "tests.test_pd.",
    "tests.test_mr.",
    "tests.test_cq.",
    "tests.test_fork.",
];

/// What tests say that skip since they would connect queue pairs by their GIDs, or want more of these.
const NO_TRAFFIC: &[&str] = &["No supported port is up", "All gid indices populated"];

const FOR_ANY_RNIC: Wanted = Wanted {
    passing: 1,
    skippable: &[DMA_BUF],
};

/// The tests on our device, which `run` runs, and the end of its driver.
fn ours(run: fn(&mut Fixture) -> Result<()>) -> [Case; 2] {
    [
        Case {
            name: "the tests on our device",
            run,
        },
        Case {
            name: "the driver unloads after them",
            run: unload,
        },
    ]
}

fn on_ours_56(fixture: &mut Fixture) -> Result<()> {
    on_ours(fixture, &VERSION_56)
}

/// The tests of rdma-core 56.1 on our device, and the end of its driver.
pub fn cases_56() -> [Case; 2] {
    ours(on_ours_56)
}

/// The lane for rdma-core 56.1.
pub fn lane_56() -> Lane {
    Lane {
        name: "rdma-core-56",
        about: "the tests of rdma-core 56.1, on our device and on rxe",
        with_device: true,
        vms: 1,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || {
            let rxe = Case {
                name: "the tests on rxe, to compare",
                run: on_rxe,
            };
            let cases = ours(on_ours_56).into_iter().chain([rxe]);
            vec![(Kernel::Backports, cases.collect())]
        },
    }
}

/// The lane for rdma-core 56.1 over the wire: the two ends of a test are the same VM.
pub fn lane_wire() -> Lane {
    Lane {
        name: "wire-rdma-core",
        about: "the tests of rdma-core 56.1, on our device, whose messages go out and come back",
        hosts: Hosts::Loop,
        runs: || vec![(Kernel::Backports, ours(on_ours_56).to_vec())],
        ..lane_56()
    }
}

/// The lane for rdma-core 65.
pub fn lane_65() -> Lane {
    Lane {
        name: "rdma-core-65",
        about: "the tests of rdma-core 65, on our device in a guest with Debian sid",
        with_device: true,
        vms: 1,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || {
            let run = |fixture: &mut Fixture| on_ours(fixture, &VERSION_65);
            vec![(Kernel::Sid, ours(run).to_vec())]
        },
    }
}

/// A line of `suite.py`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Total { total: usize },
    Start { start: String },
    Result(TestResult),
}

/// How a test ended.
#[derive(Clone, Debug, Deserialize)]
struct TestResult {
    test: String,
    outcome: String,
    reason: String,
    text: String,
    seconds: f64,
}

/// What a run of `suite.py` wrote: how many tests there are, the results, and the test that was
/// under way at the end.
#[derive(Debug, Default)]
struct Transcript {
    total: usize,
    results: Vec<TestResult>,
    unfinished: Option<String>,
}

impl Transcript {
    fn parse(text: &str) -> Self {
        let mut transcript = Transcript::default();
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        for line in lines {
            match line {
                Line::Total { total } => transcript.total = total,
                Line::Start { start } => transcript.unfinished = Some(start),
                Line::Result(result) => {
                    transcript.unfinished = None;
                    transcript.results.push(result);
                }
            }
        }
        transcript
    }
}

/// Runs all tests on a device. A guest that does not live through one is started anew for the rest;
/// `prepare` makes it ready.
fn run(
    fixture: &mut Fixture,
    device: &str,
    prepare: fn(&Fixture) -> Result<()>,
) -> Result<Vec<TestResult>> {
    let mut results: Vec<TestResult> = Vec::new();
    for _ in 0..LOSSES {
        prepare(fixture)?;
        // Some tests want huge pages, and skip if there are none.
        fixture.vm(1)?.sh("echo 16 >/proc/sys/vm/nr_hugepages")?;
        let command = format!("/payload/suite.py {device} {}", results.len());
        let job = fixture.vm(1)?.spawn(&command)?;
        let end = job.wait(LONG);
        let transcript = Transcript::parse(&job.text());
        drop(job);
        let why = match end {
            Ok(output) if transcript.total == 0 => {
                bail!("suite.py ran no test ({}):\n{}", output.status, output.text)
            }
            Ok(output) => output.text.lines().last().unwrap_or_default().to_owned(),
            Err(error) => error
                .to_string()
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned(),
        };
        results.extend(transcript.results);
        if let Some(test) = transcript.unfinished {
            results.push(TestResult {
                test,
                outcome: "crash".to_owned(),
                reason: format!("the guest was lost: {why}"),
                text: fixture.circumstances(),
                seconds: 0.0,
            });
        }
        if transcript.total > 0 && results.len() >= transcript.total {
            return Ok(results);
        }
        println!(
            "         {} tests on {device} have run, then: {why}; starting the VM anew",
            results.len()
        );
        fixture.restart()?;
    }
    bail!(
        "the guest was lost {LOSSES} times; {} tests have run",
        results.len()
    )
}

/// Counts outcomes into figures, and returns how many tests passed.
fn count(fixture: &mut Fixture, device: &str, results: &[TestResult]) -> usize {
    let mut counts: BTreeMap<&str, usize> =
        ["ok", "skip", "fail", "error"].map(|word| (word, 0)).into();
    for result in results {
        *counts.entry(&result.outcome).or_default() += 1;
    }
    let seconds: f64 = results.iter().map(|result| result.seconds).sum();
    fixture.figure(&format!("{device}_tests"), results.len());
    for (outcome, number) in &counts {
        fixture.figure(&format!("{device}_{outcome}"), *number);
    }
    fixture.figure(&format!("{device}_seconds"), seconds.round());
    counts.get("ok").copied().unwrap_or(0)
}

/// Puts results into the lane's table.
fn tabulate(fixture: &mut Fixture, device: &str, results: &[TestResult]) {
    for result in results {
        let reason: String = result.reason.chars().take(160).collect();
        fixture.cell(&result.test, device, &result.outcome);
        fixture.cell(&result.test, &format!("{device}: reason"), &reason);
    }
}

/// The tests on a device of ours with a port of iWARP. Those that connect queue pairs by themselves, or
/// want datagrams, make no sense there: they are listed as skipped. The others have to pass.
pub(super) fn on_iwarp(fixture: &mut Fixture) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let results = run(fixture, "vrdma0", |_| Ok(()))?;
    let passing = count(fixture, "rdma_core", &results);
    for result in results.iter().filter(|result| {
        let name = result.test.as_str();
        FOR_IWARP.iter().any(|part| name.starts_with(part)) || result.outcome == "ok"
    }) {
        let mut case = judged(result, &FOR_ANY_RNIC);
        let says = |reason: &&str| result.reason.contains(*reason);
        if result.outcome == "skip" && NO_TRAFFIC.iter().any(says) {
            (case.outcome, case.reason) = (
                Outcome::Skipped,
                format!("queue pairs that no rdma_cm connects: {}", result.reason),
            );
        }
        fixture.sub_case(case);
    }
    settled(&fixture.bed, &before)?;
    let least = FOR_ANY_RNIC.passing;
    ensure!(
        passing >= least,
        "{passing} tests pass; at least {least} have to"
    );
    Ok(())
}

fn on_ours(fixture: &mut Fixture, wanted: &Wanted) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let results = run(fixture, "vrdma0", |_| Ok(()))?;
    tabulate(fixture, "ours", &results);
    let passing = count(fixture, "ours", &results);
    for group in wanted.skippable {
        let skipped = results
            .iter()
            .filter(|result| result.outcome == "skip" && (group.is)(&result.test))
            .count();
        fixture.figure(&format!("ours_skip: {}", group.group), skipped);
    }
    for result in &results {
        let case = judged(result, wanted);
        fixture.sub_case(case);
    }
    settled(&fixture.bed, &before)?;
    ensure!(
        passing >= wanted.passing,
        "{passing} tests pass; at least {} have to",
        wanted.passing
    );
    Ok(())
}

/// A result on our device as a case of the lane.
fn judged(result: &TestResult, wanted: &Wanted) -> CaseReport {
    let group = wanted
        .skippable
        .iter()
        .find(|group| (group.is)(&result.test));
    let (outcome, reason) = match (result.outcome.as_str(), group) {
        ("ok", _) => (Outcome::Passed, String::new()),
        ("skip", Some(group)) => (
            Outcome::Skipped,
            format!("{}: {}", group.group, result.reason),
        ),
        ("skip", None) => (
            Outcome::Failed,
            format!("unexpected skip: {}", result.reason),
        ),
        (word, _) => (
            Outcome::Failed,
            format!("{word}: {}\n{}", result.reason, result.text),
        ),
    };
    CaseReport {
        name: result.test.clone(),
        outcome,
        reason,
        seconds: result.seconds,
        tabulated: true,
    }
}

fn unload(fixture: &mut Fixture) -> Result<()> {
    fixture.vm(1)?.sh("rmmod virtio_rdma").map(drop)
}

fn on_rxe(fixture: &mut Fixture) -> Result<()> {
    let results = run(fixture, "rxe0", |fixture| {
        let vm = fixture.vm(1)?;
        vm.sh("! grep -q ^virtio_rdma /proc/modules || rmmod virtio_rdma")?;
        vm.sh(
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0 && /payload/wait-active",
        )
        .map(drop)
    });
    // Its faults are not ours.
    let results = results.map_err(|error| Skip(format!("{error:#}")))?;
    tabulate(fixture, "rxe", &results);
    count(fixture, "rxe", &results);
    let mut traces = String::new();
    for result in results.iter().filter(|result| !result.text.is_empty()) {
        let _ = writeln!(
            traces,
            "{}: {}\n{}\n",
            result.test, result.outcome, result.text
        );
    }
    fs::write(fixture.logs().join("rxe-tracebacks.txt"), traces)?;
    let log = fixture.vm(1)?.sh("dmesg -c")?;
    fs::write(fixture.logs().join("rxe.dmesg"), log)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(test: &str, outcome: &str) -> TestResult {
        TestResult {
            test: test.to_owned(),
            outcome: outcome.to_owned(),
            reason: "because".to_owned(),
            text: "a traceback".to_owned(),
            seconds: 0.5,
        }
    }

    #[test]
    fn transcripts_are_read_to_where_they_break_off() {
        let text = "{\"total\": 3}\n{\"start\": \"a\"}\nnoise\n\
            {\"test\": \"a\", \"outcome\": \"ok\", \"reason\": \"\", \"text\": \"\", \"seconds\": 0.1}\n{\"start\": \"b\"}\n{\"te";
        let transcript = Transcript::parse(text);
        assert_eq!(transcript.total, 3);
        assert_eq!(transcript.results.len(), 1);
        assert_eq!(transcript.results[0].outcome, "ok");
        assert_eq!(transcript.unfinished.as_deref(), Some("b"));
    }

    #[test]
    fn only_the_agreed_tests_may_be_skipped() {
        let of = |test: &str, outcome: &str| judged(&result(test, outcome), &VERSION_56).outcome;
        assert_eq!(
            of("tests.test_odp.OdpTestCase.test_odp_rc_traffic", "skip"),
            Outcome::Skipped
        );
        assert_eq!(
            of("tests.test_qp.QPTest.test_create_raw_qp_no_attr", "skip"),
            Outcome::Skipped
        );
        assert_eq!(
            of("tests.test_mr.DmaBufMRTest.test_dmabuf_reg_mr", "skip"),
            Outcome::Skipped
        );
        assert_eq!(
            of("tests.test_mr.MRTest.test_rereg_mr_pd", "skip"),
            Outcome::Failed
        );
        assert_eq!(of("tests.test_srq.SrqTestCase.x", "ok"), Outcome::Passed);
        for word in ["fail", "error", "crash", "timeout"] {
            assert_eq!(
                of("tests.test_odp.OdpTestCase.test_odp_rc_traffic", word),
                Outcome::Failed
            );
        }
        let failed = judged(&result("tests.test_pd.PDTest.x", "error"), &VERSION_56);
        assert!(failed.reason.contains("a traceback"));
    }
}
