// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lanes `rxe-interop` and `rxe-tap`: our device in vm1 and Soft-RoCE (rxe) in vm2, with a switch
//! between them, or on hosts that are network namespaces;
//! each as server and as client, and with lost packets.
//!
//! Each combination is a case and a cell of the lane's table.

use std::time::Instant;

use anyhow::{ensure, Context, Result};

use super::perftest::{self, Combination};
use super::stock::{self, Ends};
use super::tools::device_of;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::report::{CaseReport, Outcome};
use crate::vm::Hosts;

/// The VM with our device, and that with rxe.
const OURS: u8 = 1;
const RXE: u8 = 2;

/// Which way, and how many of ten thousand packets are lost.
struct Column {
    name: &'static str,
    /// Server and client.
    ends: Ends,
    lost: u32,
}

const COLUMNS: [Column; 4] = [
    Column {
        name: "rxe is server",
        ends: (RXE, OURS),
        lost: 0,
    },
    Column {
        name: "rxe is client",
        ends: (OURS, RXE),
        lost: 0,
    },
    Column {
        name: "rxe is server, 1 % lost",
        ends: (RXE, OURS),
        lost: 100,
    },
    Column {
        name: "rxe is client, 1 % lost",
        ends: (OURS, RXE),
        lost: 100,
    },
];

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        let cases = |kernel: &Kernel| (*kernel, CASES.to_vec());
        Kernel::STABLE.iter().map(cases).collect()
    };
    Lane {
        name: "rxe-interop",
        about: "our device in one VM and Soft-RoCE in another: stock tools and perftest",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::Switch(1500),
        image: Image::Plain,
        runs,
    }
}

/// A case for a tool.
macro_rules! tool {
    ($name:literal, $run:expr) => {
        Case {
            name: $name,
            run: |fixture| all_columns(fixture, $name, Loses::Yes, $run),
        }
    };
}

/// A case for a tool that does not count on lost packets.
macro_rules! unreliable {
    ($name:literal, $run:expr) => {
        Case {
            name: $name,
            run: |fixture| all_columns(fixture, $name, Loses::No, $run),
        }
    };
}

/// A case for an operation of perftest and a transport, which consists of one for each variant.
macro_rules! perftest {
    ($operation:literal, $transport:literal) => {
        Case {
            name: concat!("perftest: ", $operation, " ", $transport),
            run: |fixture| all_variants(fixture, $operation, $transport),
        }
    };
}

/// Whether a tool gets by when packets are lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loses {
    Yes,
    No,
}

const CASES: &[Case] = &[
    tool!("ibv_rc_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_rc_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100"]
    )),
    unreliable!("ibv_uc_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_uc_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -s 65536 -n 100"]
    )),
    unreliable!("ibv_ud_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_ud_pingpong",
        &["-c -s 1024", "-c -s 1024 -e"]
    )),
    tool!("ibv_srq_pingpong", |fixture, ends| stock::pingpong(
        fixture,
        ends,
        "ibv_srq_pingpong",
        &["-c -n 200", "-c -e -n 200", "-c -q 64 -n 200"]
    )),
    tool!("rping", stock::rping),
    tool!("ucmatose", stock::ucmatose),
    unreliable!("udaddy", stock::udaddy),
    unreliable!("mckey", stock::mckey),
    tool!("rstream", stock::rstream),
    tool!("cmtime", stock::cmtime),
    tool!("ib_send_bw -R", stock::send_bw),
    perftest!("send", "RC"),
    perftest!("send", "UC"),
    perftest!("send", "UD"),
    perftest!("write", "RC"),
    perftest!("write", "UC"),
    perftest!("read", "RC"),
    perftest!("atomic", "RC"),
];

/// The same on hosts whose bridges have TAPs of the VMs: packets are lost by our device.
pub fn at_taps() -> Lane {
    Lane {
        name: "rxe-tap",
        about: "the same on two hosts, which are network namespaces with bridges",
        hosts: Hosts::Tap(1500, ""),
        ..lane()
    }
}

/// Makes vm2 one with rxe alone, and loses packets from now on as the column says.
fn set_up(fixture: &mut Fixture, column: &Column) -> Result<()> {
    let vm = fixture.vm(RXE)?;
    vm.sh("! grep -q ^virtio_rdma /proc/modules || rmmod virtio_rdma")?;
    vm.sh("test -e /sys/class/infiniband/rxe0 || \
         { modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0; }")?;
    vm.sh("/payload/wait-active rxe0")?;
    if let Some(switch) = &fixture.bed.switch {
        switch.steer(RXE, false);
        switch.lose(column.lost);
        return Ok(());
    }
    // When the other device ends, its VM gets RoCEv2.
    fixture.bed.others.clear();
    let device = fixture.bed.device.as_ref().context("no device")?;
    let faults = match column.lost {
        0 => "off".to_owned(),
        lost => format!("seed=1,loss={}", f64::from(lost) / 1e4),
    };
    device.set_faults(usize::from(OURS), &faults)
}

/// RoCEv2 frames so far.
fn frames(fixture: &Fixture) -> Result<u64> {
    if let Some(switch) = &fixture.bed.switch {
        return Ok(switch.frames());
    }
    let device = fixture.bed.device.as_ref().context("no device")?;
    let status = device.status()?;
    let sent = status["workers"][0]["wire"]["sent_frames"].as_u64();
    sent.context("the device counts no frames")
}

/// Runs `run` both ways, without and with lost packets.
fn all_columns(
    fixture: &mut Fixture,
    name: &str,
    loses: Loses,
    run: fn(&mut Fixture, Ends) -> Result<()>,
) -> Result<()> {
    for column in &COLUMNS {
        if column.lost != 0 && fixture.quick {
            continue;
        }
        if column.lost != 0 && loses == Loses::No {
            fixture.cell(name, column.name, "–");
            continue;
        }
        one(fixture, name, column, |fixture| {
            run(fixture, column.ends).map(|()| "passed".to_owned())
        })?;
    }
    Ok(())
}

/// Runs all variants of an operation of perftest, both ways.
fn all_variants(
    fixture: &mut Fixture,
    operation: &'static str,
    transport: &'static str,
) -> Result<()> {
    for combination in Combination::all_of(operation, transport) {
        for column in COLUMNS.iter().filter(|column| column.lost == 0) {
            let row = combination.title();
            one(fixture, &row, column, |fixture| {
                perftest::measure(fixture, column.ends, combination)
            })?;
        }
    }
    Ok(())
}

/// Runs a cell of the table, and puts it into the report.
fn one(
    fixture: &mut Fixture,
    row: &str,
    column: &Column,
    run: impl FnOnce(&mut Fixture) -> Result<String>,
) -> Result<()> {
    let start = Instant::now();
    let before = frames(fixture)?;
    let result = set_up(fixture, column).and_then(|()| run(fixture));
    let result = result.and_then(|cell| {
        ensure!(frames(fixture)? > before, "not a packet went from VM to VM");
        fixture.aftermath().map(|()| cell)
    });
    let (outcome, cell, reason) = match result {
        Ok(cell) => (Outcome::Passed, cell, String::new()),
        Err(error) => {
            let status = device_of(&fixture.bed, OURS).map(|status| status.to_string());
            let status = status.unwrap_or_default();
            let reason = format!("{error:#}{}\n{status}", fixture.circumstances());
            (Outcome::Failed, "FAILED".to_owned(), reason)
        }
    };
    println!("         {row}, {}: {cell}", column.name);
    if let Some(line) = reason.lines().next() {
        println!("          {line}");
    }
    let title = format!("{}, {}", fixture.kernel, column.name);
    fixture.cell(row, &title, &cell);
    fixture.sub_case(CaseReport {
        name: format!("{row}, {}", column.name),
        outcome,
        reason,
        seconds: (start.elapsed().as_secs_f64() * 100.0).round() / 100.0,
        tabulated: true,
    });
    if outcome == Outcome::Failed {
        fixture.mend()?;
    }
    Ok(())
}
