// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `kernel-verbs`: tests of the verbs for users in the kernel (`ci/kernel-verbs/`), on our
//! device and on Soft-RoCE (rxe) in the same guest.
//!
//! Each test on our device is a case of the lane, and has to pass. Rxe's outcomes stand beside ours
//! to compare with, whatever they are.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};

use super::tools::{counts, settled};
use super::{Case, Fixture, Lane, Skip};
use crate::images::{Image, Kernel};
use crate::report::{CaseReport, Outcome};
use crate::vm::{FrontEnd, Hosts};

/// Longer than any of the tests takes: they give up waiting before.
const LONG: Duration = Duration::from_secs(150);

/// How often a guest may be lost before that is the result.
const LOSSES: usize = 8;

/// How many tests there have to be.
const TESTS: usize = 60;

/// How many completion queues of the core's pool the tests make it keep at most.
const POOLED: u64 = 8;

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "kernel-verbs",
        about: "the verbs for users in the kernel, on our device and on rxe",
        with_device: true,
        vms: 1,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || {
            Kernel::STABLE
                .iter()
                .map(|kernel| (*kernel, CASES.to_vec()))
                .collect()
        },
    }
}

const CASES: &[Case] = &[
    Case {
        name: "the tests on our device",
        run: on_ours,
    },
    Case {
        name: "the driver unloads after them",
        run: unload,
    },
    Case {
        name: "the tests on rxe, to compare",
        run: on_rxe,
    },
];

/// How a test ended, as the test module says it.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Ok,
    Skip(String),
    Fail(String),
}

impl End {
    fn parse(text: &str) -> Self {
        let text = text.trim();
        match text.split_once(' ') {
            _ if text == "ok" => End::Ok,
            Some(("skip", reason)) => End::Skip(reason.to_owned()),
            Some(("FAIL", reason)) => End::Fail(reason.to_owned()),
            _ => End::Fail(format!("no result: {text}")),
        }
    }

    fn cell(&self) -> String {
        match self {
            End::Ok => "pass".to_owned(),
            End::Skip(reason) => format!("skip: {reason}"),
            End::Fail(reason) => format!("fail: {}", reason.chars().take(140).collect::<String>()),
        }
    }
}

/// Runs all tests on a device. A guest that does not live through one is started anew for the rest;
/// `prepare` makes it ready.
fn run(
    fixture: &mut Fixture,
    device: &str,
    prepare: fn(&Fixture) -> Result<()>,
    mut tell: impl FnMut(&mut Fixture, &str, &End, f64),
) -> Result<()> {
    prepare(fixture)?;
    let names = fixture.vm(1)?.sh("/payload/kernel-verbs")?;
    ensure!(
        names.lines().count() >= TESTS,
        "there are fewer than {TESTS} tests:\n{names}"
    );
    let mut losses = 0;
    for name in names.lines() {
        let start = Instant::now();
        let result = fixture
            .vm(1)?
            .run(&format!("/payload/kernel-verbs {device} {name}"), LONG);
        let end = match &result {
            Ok(output) => End::parse(&output.text),
            Err(error) => End::Fail(format!("the guest was lost: {error:#}")),
        };
        tell(fixture, name, &end, start.elapsed().as_secs_f64());
        if result.is_err() {
            losses += 1;
            if losses == LOSSES {
                bail!("the guest was lost {LOSSES} times, the last time in {name}");
            }
            println!("         {name} on {device}: the guest was lost; starting it anew");
            fixture.restart()?;
            prepare(fixture)?;
            fixture.vm(1)?.sh("/payload/kernel-verbs")?;
        }
    }
    Ok(())
}

fn on_ours(fixture: &mut Fixture) -> Result<()> {
    let mut before = counts(&fixture.bed)?;
    let column = format!("our device, {}", fixture.kernel);
    run(
        fixture,
        "vrdma0",
        |_| Ok(()),
        |fixture, name, end, seconds| {
            fixture.cell(name, &column, &end.cell());
            let (outcome, reason) = match end {
                End::Ok => (Outcome::Passed, String::new()),
                End::Skip(reason) => (Outcome::Failed, format!("unexpected skip: {reason}")),
                End::Fail(reason) => (Outcome::Failed, reason.clone()),
            };
            fixture.sub_case(CaseReport {
                name: name.to_owned(),
                outcome,
                reason,
                seconds: (seconds * 100.0).round() / 100.0,
                tabulated: true,
            });
        },
    )?;
    // The core keeps the shared completion queues that it made as long as the device is there.
    for (before, now) in before.iter_mut().zip(counts(&fixture.bed)?) {
        let (had, has) = (before.entry("cqs".to_owned()).or_default(), now.get("cqs"));
        if let Some(has) = has.filter(|has| (*had..=*had + POOLED).contains(has)) {
            *had = *has;
        }
    }
    settled(&fixture.bed, &before)
}

fn unload(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    vm.sh("rmmod kernel_verbs_test")?;
    vm.sh("rmmod virtio_rdma").map(drop)
}

fn on_rxe(fixture: &mut Fixture) -> Result<()> {
    let prepare = |fixture: &Fixture| {
        let vm = fixture.vm(1)?;
        vm.sh("! grep -q ^virtio_rdma /proc/modules || rmmod virtio_rdma")?;
        vm.sh("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0")?;
        vm.sh("/payload/wait-active rxe0").map(drop)
    };
    let column = format!("rxe, {}", fixture.kernel);
    let mut outcomes = [0usize; 3];
    let result = run(fixture, "rxe0", prepare, |fixture, name, end, _| {
        fixture.cell(name, &column, &end.cell());
        let [passed, skipped, failed] = &mut outcomes;
        *match end {
            End::Ok => passed,
            End::Skip(_) => skipped,
            End::Fail(_) => failed,
        } += 1;
    });
    for (word, number) in ["pass", "skip", "fail"].iter().zip(outcomes) {
        fixture.figure(&format!("rxe_{word}"), number);
    }
    // Its faults are not ours.
    if let Err(error) = result {
        fixture.restart()?;
        bail!(Skip(format!("{error:#}")));
    }
    let log = fixture.vm(1)?.sh("dmesg -c")?;
    fs::write(fixture.logs().join("rxe.dmesg"), log)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read() {
        assert_eq!(End::parse("ok\n"), End::Ok);
        assert_eq!(
            End::parse("skip the device has none\n"),
            End::Skip("the device has none".to_owned())
        );
        assert_eq!(
            End::parse("FAIL mr.c:7 not so: a b\n"),
            End::Fail("mr.c:7 not so: a b".to_owned())
        );
        for text in ["", "okay", "none", "sh: write error"] {
            assert!(matches!(End::parse(text), End::Fail(_)), "{text}");
        }
    }
}
