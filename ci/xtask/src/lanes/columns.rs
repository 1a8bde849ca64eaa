// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cases that run in several ways, with lost packets for example: each is a cell of the lane's table.

use std::time::Instant;

use anyhow::{ensure, Context, Result};

use super::perftest::{self, Combination};
use super::stock::Ends;
use super::tools::device_of;
use super::Fixture;
use crate::report::Outcome;

/// A way to run cases.
pub struct Column {
    pub name: &'static str,
    /// The VMs of server and client.
    pub ends: Ends,
    /// How many of ten thousand packets are lost, each way.
    pub lost: u32,
    /// IP packets have so many bytes at most, if that is not as the VMs were started.
    pub mtu: Option<u16>,
}

/// The ways of a lane.
pub struct Columns {
    pub all: &'static [Column],
    /// What is done before a case runs in one of them.
    pub set_up: fn(&mut Fixture, &Column) -> Result<()>,
    /// Why a case is not run in one of them, if it is not.
    pub skips: fn(&Fixture, &str, &Column) -> Option<&'static str>,
}

/// Whether a tool gets by when packets are lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Loses {
    Yes,
    No,
}

/// RoCEv2 frames so far. Those of a device count in both directions: its peer may be none of ours, and
/// an unreliable one that only receives has nothing to say.
fn frames(fixture: &Fixture) -> Result<u64> {
    if let Some(switch) = &fixture.bed.switch {
        return Ok(switch.frames());
    }
    let first = fixture.bed.device.as_ref().context("no device")?;
    let mut sum = 0;
    for device in std::iter::once(first).chain(&fixture.bed.others) {
        let status = device.status()?;
        for direction in ["sent_frames", "received_frames"] {
            let frames = status["workers"][0]["wire"][direction].as_u64();
            sum += frames.context("the device counts no frames")?;
        }
    }
    Ok(sum)
}

impl Columns {
    /// Runs `run` in all ways.
    pub fn run(
        &self,
        fixture: &mut Fixture,
        name: &str,
        loses: Loses,
        run: fn(&mut Fixture, Ends) -> Result<()>,
    ) -> Result<()> {
        for (nth, column) in self.all.iter().enumerate() {
            if fixture.quick && (column.lost != 0 || (nth != 0 && column.mtu.is_some())) {
                continue;
            }
            if column.lost != 0 && loses == Loses::No {
                fixture.cell(name, &self.title(fixture, column), "–");
                continue;
            }
            if let Some(reason) = (self.skips)(fixture, name, column) {
                println!("         {name}, {}: skipped: {reason}", column.name);
                fixture.cell(name, &self.title(fixture, column), "skipped");
                let (start, reason) = (Instant::now(), reason.to_owned());
                let cell = format!("{name}, {}", column.name);
                fixture.cell_done(cell, start, Outcome::Skipped, reason)?;
                continue;
            }
            self.one(fixture, name, column, |fixture| {
                run(fixture, column.ends).map(|()| "passed".to_owned())
            })?;
        }
        Ok(())
    }

    /// Runs all variants of an operation of perftest, in the ways without losses, and where the
    /// transport is reliable in the others, too.
    pub fn perftest(
        &self,
        fixture: &mut Fixture,
        operation: &'static str,
        transport: &'static str,
        loses: Loses,
    ) -> Result<()> {
        for combination in Combination::all_of(operation, transport) {
            let all = self.all.iter();
            for column in all.filter(|column| column.lost == 0 || loses == Loses::Yes) {
                self.one(fixture, &combination.title(), column, |fixture| {
                    perftest::measure(fixture, column.ends, combination)
                })?;
            }
        }
        Ok(())
    }

    fn title(&self, fixture: &Fixture, column: &Column) -> String {
        format!("{}, {}", fixture.kernel, column.name)
    }

    /// Runs a cell of the table, and puts it into the report.
    fn one(
        &self,
        fixture: &mut Fixture,
        row: &str,
        column: &Column,
        run: impl FnOnce(&mut Fixture) -> Result<String>,
    ) -> Result<()> {
        let start = Instant::now();
        // After what may start the devices anew.
        let before = (self.set_up)(fixture, column).and_then(|()| frames(fixture));
        let result = before.and_then(|before| {
            let cell = run(fixture)?;
            ensure!(frames(fixture)? > before, "not a packet went from VM to VM");
            fixture.aftermath().map(|()| cell)
        });
        let (outcome, cell, reason) = match result {
            Ok(cell) => (Outcome::Passed, cell, String::new()),
            Err(error) => {
                let status =
                    device_of(&fixture.bed, column.ends.1).map(|status| status.to_string());
                let status = status.unwrap_or_default();
                let reason = format!("{error:#}{}\n{status}", fixture.circumstances());
                (Outcome::Failed, "FAILED".to_owned(), reason)
            }
        };
        println!("         {row}, {}: {cell}", column.name);
        if let Some(line) = reason.lines().next() {
            println!("          {line}");
        }
        let title = self.title(fixture, column);
        fixture.cell(row, &title, &cell);
        fixture.cell_done(format!("{row}, {}", column.name), start, outcome, reason)
    }
}
