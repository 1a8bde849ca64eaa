// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `recovery`: a card that comes back. The device process, the driver, the slot, the network
//! interface and the guest itself go away under traffic of applications and of users in the kernel,
//! and come back; nobody lends a hand, and no kernel complains.

mod card;
mod interface;
mod power;
mod process;
mod traffic;

pub use traffic::rping;

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use super::tools::device_of;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{wait_for, FrontEnd, Hosts, SHORT};

/// How long an application may take to end when its device is gone.
const ENDS: Duration = Duration::from_secs(20);

/// How long a guest may take to see that its device is gone.
const NOTICES: Duration = Duration::from_secs(10);

/// How long a card may take to be there again: QEMU connects every second, users in the kernel are
/// given some seconds to let go of their queue pairs.
const COMES_BACK: Duration = Duration::from_secs(40);

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, cases()))
            .collect()
    };
    Lane {
        name: "recovery",
        about: "a card that comes back when device, driver, slot, interface or guest go away",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Storage,
        runs,
    }
}

fn cases() -> Vec<Case> {
    [process::CASES, card::CASES, interface::CASES, power::CASES].concat()
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}

/// Waits until no guest has an active port: each has seen that its device is gone.
pub fn wait_noticed(fixture: &Fixture) -> Result<()> {
    for vm in &fixture.bed.vms {
        let noticed = wait_for(NOTICES, || {
            let output = vm.run(
                "grep -q ACTIVE /sys/class/infiniband/*/ports/1/state",
                SHORT,
            )?;
            Ok((output.status != 0).then_some(()))
        })?;
        noticed.with_context(|| format!("vm{} does not see that its device is gone", vm.number))?;
    }
    Ok(())
}

/// Waits until a VM has its card again.
pub fn wait_active_in(fixture: &Fixture, number: u8) -> Result<()> {
    let command = format!("/payload/wait-active '*' {}", COMES_BACK.as_secs());
    let output = fixture.vm(number)?.run(&command, COMES_BACK + SHORT)?;
    ensure!(
        output.status == 0,
        "vm{number} has no card after {COMES_BACK:?}: {}",
        output.text.trim_end()
    );
    Ok(())
}

/// What has to be true when the device is there: every guest gets its card by itself, and the first
/// connection is good.
fn comes_back(fixture: &mut Fixture, case: &str) -> Result<()> {
    let start = Instant::now();
    for number in [1, 2] {
        wait_active_in(fixture, number)?;
    }
    let active = start.elapsed();
    traffic::rping(fixture, 2, 1)?;
    let first = start.elapsed();
    traffic::rping(fixture, 1, 2)?;
    fixture.figure(
        &format!("{case}_port_active_seconds"),
        rounded(active.as_secs_f64()),
    );
    fixture.figure(
        &format!("{case}_first_rping_seconds"),
        rounded(first.as_secs_f64()),
    );
    nothing_stuck(fixture)
}

/// No task of a guest hangs in its kernel.
pub fn nothing_stuck(fixture: &Fixture) -> Result<()> {
    not_stuck(fixture, "/payload/stuck 10")
}

/// No process of a guest hangs in its kernel, whatever the kernel itself waits for.
pub fn no_process_stuck(fixture: &Fixture) -> Result<()> {
    not_stuck(fixture, "/payload/stuck 10 processes")
}

fn not_stuck(fixture: &Fixture, command: &str) -> Result<()> {
    for vm in &fixture.bed.vms {
        let output = vm.run(command, SHORT)?;
        ensure!(
            output.status == 0,
            "vm{}: a task is stuck in the kernel:\n{}",
            vm.number,
            output.text
        );
    }
    Ok(())
}

/// The device has nothing of applications any more: each VM has as many queue pairs as an idle
/// driver.
fn nothing_left(fixture: &Fixture) -> Result<()> {
    for vm in &fixture.bed.vms {
        let idle = wait_for(SHORT, || {
            let counts = &device_of(&fixture.bed, vm.number)?["counts"];
            // The one for management datagrams.
            Ok((counts["qps"].as_u64() == Some(1)).then_some(()))
        })?;
        if idle.is_none() {
            let counts = &device_of(&fixture.bed, vm.number)?["counts"];
            anyhow::bail!("vm{} has objects left over: {counts}", vm.number);
        }
    }
    Ok(())
}
