// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask soak`: two VMs and two guests that are no VMs on one device process, random traffic
//! whose data is verified, a guest that attacks them, and random events among it. After each event
//! everything comes back; at the end nothing is lost, corrupt or left over, and the device has as
//! much memory as before.
//!
//! The events are drawn from the seed alone, so that the same seed gives the same sequence; how
//! many of them there are is a matter of time.

mod bare;
mod flow;
mod hostile;

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::process::Signal;
use virtio_rdma_hostile::Random;

use super::recovery::{nothing_stuck, rping, wait_active_in, wait_noticed};
use super::tools::{counts, resident_memory, settled};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{wait_for, FrontEnd, Hosts, SHORT};
use flow::{Flows, Seen};

/// How long it runs, and what its events are drawn from.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// For how long events happen.
    pub time: Duration,
    /// The same seed gives the same events.
    pub seed: u64,
}

/// How many guests that are no VMs it has: two with traffic between them, one that goes to its
/// limits, and a hostile one.
const BARE: u8 = 4;

/// By how much of it the device's memory may change from the second third of a phase to the last.
/// Each is the median of what it has at times when nothing happens. In the first third the
/// allocator's caches fill (nothing is lost: heaptrack finds as many allocations at the end of four
/// times the work).
const FLAT: f64 = 0.01;

/// After so many events nothing happens for a while.
const ROUND: usize = 8;

/// How long nothing happens before the device's memory is looked at.
const QUIET: Duration = Duration::from_secs(3);

/// What runs as a lane, though it is none of those that `cargo xtask lane` knows.
pub fn lane() -> Lane {
    Lane {
        name: "soak",
        about: "random traffic and random events",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: BARE,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || {
            let kernels = Kernel::STABLE.iter();
            kernels.map(|kernel| (*kernel, CASES.to_vec())).collect()
        },
    }
}

const CASES: &[Case] = &[
    Case {
        name: "events that the device process lives through",
        run: |fixture| phase(fixture, &Event::OTHERS, 1),
    },
    Case {
        name: "events, and the device process killed and stopped",
        run: |fixture| phase(fixture, &Event::ALL, 2),
    },
    Case {
        name: "everything stopped",
        run: everything_stopped,
    },
];

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    ApplicationKilled,
    VmReset,
    InterfaceDownAndUp,
    CablePulled,
    CardUnplugged,
    DriverReloaded,
    QemuFrozen,
    VmStopped,
    BareGuestsKilled,
    LimitsReached,
    DeviceKilled,
    DeviceStopped,
}

impl Event {
    const ALL: [Event; 12] = [
        Event::ApplicationKilled,
        Event::VmReset,
        Event::InterfaceDownAndUp,
        Event::CablePulled,
        Event::CardUnplugged,
        Event::DriverReloaded,
        Event::QemuFrozen,
        Event::VmStopped,
        Event::BareGuestsKilled,
        Event::LimitsReached,
        Event::DeviceKilled,
        Event::DeviceStopped,
    ];

    /// Those that the device process lives through.
    const OTHERS: [Event; 10] = [
        Event::ApplicationKilled,
        Event::VmReset,
        Event::InterfaceDownAndUp,
        Event::CablePulled,
        Event::CardUnplugged,
        Event::DriverReloaded,
        Event::QemuFrozen,
        Event::VmStopped,
        Event::BareGuestsKilled,
        Event::LimitsReached,
    ];
}

/// An event with what it is about: always the same number of draws.
#[derive(Clone, Copy, Debug)]
struct Draw {
    event: Event,
    vm: u8,
    /// How long traffic runs undisturbed before it.
    before: Duration,
    /// How long what goes away is away.
    away: Duration,
    /// Which application.
    which: u64,
}

impl Draw {
    fn next(random: &mut Random, events: &[Event]) -> Self {
        Draw {
            event: random.of(events, Event::ApplicationKilled),
            vm: if random.below(2) == 0 { 1 } else { 2 },
            before: Duration::from_millis(1000 + random.below(6000)),
            away: Duration::from_millis(200 + random.below(4000)),
            which: random.any(),
        }
    }
}

/// Events of these kinds for half of the time, the first of them one of each, by which the device
/// grows as large as it will.
fn phase(fixture: &mut Fixture, events: &[Event], number: u64) -> Result<()> {
    let soak = fixture.soak.context("no time and no seed")?;
    let mut random = Random::new(soak.seed.wrapping_add(number));
    println!("         seed {}", soak.seed);
    let end = Instant::now() + soak.time / 2;
    let before = counts(&fixture.bed)?;
    let mut happened = BTreeMap::new();
    let mut seen = Seen::default();
    let mut memory = Vec::new();
    let warm = events.iter().map(|event| Draw {
        event: *event,
        ..Draw::next(&mut random, events)
    });
    let mut round: Vec<Draw> = warm.collect();
    let (mut result, mut left) = (Ok(()), Ok(()));
    while !round.is_empty() && result.is_ok() && left.is_ok() {
        let mut flows = Flows::start(fixture, random.any())?;
        for draw in round {
            result = event(fixture, &mut flows, draw, &mut happened);
            if result.is_err() || Instant::now() >= end {
                break;
            }
        }
        seen.add(flows.stop()?);
        left = settled(&fixture.bed, &before);
        sleep(QUIET);
        memory.push(resident_memory(&fixture.bed)?);
        round = if Instant::now() < end {
            (0..ROUND)
                .map(|_| Draw::next(&mut random, events))
                .collect()
        } else {
            Vec::new()
        };
    }
    let (second, last) = later_thirds(&memory);
    for (what, value) in [
        ("events", happened.values().sum::<u64>()),
        ("runs", seen.runs),
        ("runs_disturbed", seen.disturbed),
        ("bare_blocks", seen.bare.blocks),
        ("bare_mib", seen.bare.bytes >> 20),
        ("lost", seen.lost + seen.bare.lost),
        ("corrupt", seen.corrupt + seen.bare.corrupt),
        ("leaked", u64::from(left.is_err())),
        ("attacks", seen.hostile.rounds),
        ("attacks_not_refused", seen.hostile.failed),
        ("memory_second_third_kib", second >> 10),
        ("memory_last_third_kib", last >> 10),
    ] {
        fixture.figure(&format!("phase_{number}_{what}"), value);
    }
    fixture.figure("seed", soak.seed);
    for (event, times) in &happened {
        fixture.cell(
            &format!("{event:?}"),
            &format!("phase {number}"),
            &times.to_string(),
        );
    }
    println!(
        "         {} events, {} runs of applications ({} of them disturbed), \
         {} blocks of bare guests, {} attacks; {} lost, {} corrupt; memory in KiB: {:?}",
        happened.values().sum::<u64>(),
        seen.runs,
        seen.disturbed,
        seen.bare.blocks,
        seen.hostile.rounds,
        seen.lost + seen.bare.lost,
        seen.corrupt + seen.bare.corrupt,
        memory.iter().map(|bytes| bytes >> 10).collect::<Vec<_>>(),
    );
    result?;
    left?;
    let messages: Vec<&String> = seen.messages.iter().chain(&seen.bare.messages).collect();
    ensure!(
        seen.lost + seen.bare.lost + seen.corrupt + seen.bare.corrupt == 0,
        "lost or corrupt: {messages:#?}"
    );
    ensure!(
        seen.hostile.failed == 0,
        "attacks were not refused: {:#?}",
        seen.hostile.messages
    );
    let (second, last) = (second as f64, last as f64);
    // A process that was started anew has nothing to be compared with.
    let restarts = events.contains(&Event::DeviceKilled);
    ensure!(
        restarts || (last - second).abs() <= second * FLAT,
        "the device has {last} bytes of memory after {second} before"
    );
    Ok(())
}

/// The medians of the second and of the last third; where there are no thirds, of the last value.
fn later_thirds(values: &[u64]) -> (u64, u64) {
    let third = values.len() / 3;
    let median = |values: &[u64]| {
        let mut values = values.to_vec();
        values.sort_unstable();
        values.get(values.len() / 2).copied()
    };
    let (earlier, last) = values.split_at(values.len() - third);
    let second = earlier.get(earlier.len() - third..).and_then(median);
    let last = median(last).or(values.last().copied()).unwrap_or_default();
    (second.unwrap_or(last), last)
}

/// One event among the traffic, and what has to be true after it.
fn event(
    fixture: &mut Fixture,
    flows: &mut Flows,
    draw: Draw,
    happened: &mut BTreeMap<Event, u64>,
) -> Result<()> {
    let end = Instant::now() + draw.before;
    while Instant::now() < end {
        flows.tend(fixture)?;
        sleep(Duration::from_millis(100));
    }
    *happened.entry(draw.event).or_default() += 1;
    let what = format!("{:?}, vm{}, away {:?}", draw.event, draw.vm, draw.away);
    println!("         {what}");
    disturb(fixture, flows, draw)
        .and_then(|()| whole(fixture, flows))
        .and_then(|()| fixture.aftermath())
        .with_context(|| format!("event {what}"))
}

fn disturb(fixture: &mut Fixture, flows: &mut Flows, draw: Draw) -> Result<()> {
    let number = draw.vm;
    match draw.event {
        Event::ApplicationKilled => flows.kill_one(draw.which)?,
        Event::VmReset => {
            flows.disturb(Some(number));
            fixture.vm_mut(number)?.reset()?;
            fixture.vm_mut(number)?.wait_up()?;
        }
        Event::InterfaceDownAndUp => {
            flows.disturb(Some(number));
            let seconds = draw.away.as_secs_f64();
            fixture.vm(number)?.sh(&format!(
                "ip link set eth0 down && sleep {seconds} && ip link set eth0 up"
            ))?;
        }
        Event::CablePulled => {
            flows.disturb(Some(number));
            fixture.vm_mut(number)?.set_link(false)?;
            sleep(draw.away);
            fixture.vm_mut(number)?.set_link(true)?;
        }
        Event::CardUnplugged => {
            flows.disturb(Some(number));
            fixture.vm_mut(number)?.unplug()?;
            sleep(draw.away);
            fixture.vm_mut(number)?.plug()?;
        }
        Event::DriverReloaded => {
            flows.disturb(Some(number));
            // As long as applications use the driver, it cannot be removed.
            flows.end_disturbed()?;
            fixture
                .vm(number)?
                .sh("rmmod virtio_rdma && insmod /payload/virtio_rdma.ko")?;
        }
        Event::QemuFrozen => {
            fixture.vm(number)?.freeze()?;
            sleep(draw.away);
            fixture.vm(number)?.thaw()?;
        }
        Event::VmStopped => {
            fixture.vm_mut(number)?.qmp("stop")?;
            sleep(draw.away);
            fixture.vm_mut(number)?.qmp("cont")?;
        }
        Event::BareGuestsKilled => flows.kill_bare(),
        Event::LimitsReached => {
            let reached = flows.limits(fixture)?;
            ensure!(
                reached.iter().all(|count| *count > 100),
                "limits are reached too early: {reached:?}"
            );
        }
        Event::DeviceKilled | Event::DeviceStopped => {
            let signal = if draw.event == Event::DeviceKilled {
                Signal::KILL
            } else {
                Signal::TERM
            };
            flows.device_goes();
            let device = fixture.bed.device.as_mut().context("there is no device")?;
            device.end(signal)?;
            wait_noticed(fixture)?;
            sleep(draw.away);
            let device = fixture.bed.device.as_mut().context("there is no device")?;
            device.start_again()?;
            flows.device_is_back();
        }
    }
    Ok(())
}

/// Every guest has its card and reaches the others, and nothing hangs.
fn whole(fixture: &mut Fixture, flows: &mut Flows) -> Result<()> {
    for number in [1, 2] {
        wait_active_in(fixture, number)?;
    }
    flows.replace_disturbed(fixture)?;
    rping(fixture, 2, 1)?;
    rping(fixture, 1, 2)?;
    flows.wait_moving()?;
    nothing_stuck(fixture)
}

/// Without drivers and guests the device has nothing at all.
fn everything_stopped(fixture: &mut Fixture) -> Result<()> {
    for number in [1, 2] {
        fixture.vm(number)?.sh("rmmod virtio_rdma")?;
    }
    let status = || {
        let device = fixture.bed.device.as_ref().context("there is no device")?;
        let status = device.status()?;
        let devices = status["devices"].as_array().context("no devices")?.clone();
        let left: Vec<String> = devices
            .iter()
            .filter_map(|device| device["counts"].as_object())
            .flatten()
            .filter(|(_, count)| count.as_u64() != Some(0))
            .map(|(kind, count)| format!("{kind}: {count}"))
            .collect();
        Ok::<_, anyhow::Error>(left)
    };
    let empty = wait_for(SHORT, || Ok(status()?.is_empty().then_some(())))?;
    let left = status()?;
    fixture.figure("left_at_the_end", left.len());
    if empty.is_none() {
        bail!("objects are left when everything is stopped: {left:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_events() {
        let sequence = |seed| {
            let mut random = Random::new(seed);
            let draws = (0..100).map(|_| Draw::next(&mut random, &Event::ALL));
            draws.map(|draw| format!("{draw:?}")).collect::<Vec<_>>()
        };
        assert_eq!(sequence(7), sequence(7));
        assert_ne!(sequence(7), sequence(8));
    }

    #[test]
    fn the_first_third_does_not_count() {
        assert_eq!(later_thirds(&[1, 1, 5, 5, 7, 7]), (5, 7));
        assert_eq!(later_thirds(&[1, 1, 1, 5, 5, 9, 8, 7, 7]), (5, 7));
        assert_eq!(later_thirds(&[1, 2, 5, 7]), (5, 7));
        assert_eq!(later_thirds(&[5, 7]), (7, 7));
    }

    #[test]
    fn every_event_is_drawn() {
        let mut random = Random::new(1);
        for event in Event::ALL {
            assert!((0..1000).any(|_| Draw::next(&mut random, &Event::ALL).event == event));
        }
    }
}
