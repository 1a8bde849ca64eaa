// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long registering memory takes in the device: pages of 4 KiB in shuffled order, no two of
//! them in a row.
//!
//! Commands are given to the device many at a time, and it is the time from the first answer to the
//! last that counts: a command by itself is a sleep of the device and one of the driver, whose
//! lengths differ by more than what is to be measured. What one takes so is beside it. Pinning pages
//! and writing their list is the guest's part and not in it.
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use vhost_device_rdma_bare::core::command::{self, Command, DeregMr, RegMr};
use vhost_device_rdma_bare::spec::command::{self as spec, Handle};
use vhost_device_rdma_bare::{
    page_list, Buffer, Descriptor, Pd, Placement, Region, Virtqueue, Vm, PAGE,
};

use super::bed::{self, ALL};
use super::{figure, Settings};
use crate::figure::{median, Better, Figure, Target};

const SECTION: &str = "registration";

/// Sizes: 4 KiB to 4 GiB.
const SIZES: [u64; 11] = [
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    256 << 20,
    1 << 30,
    4 << 30,
];

/// Guest-physical addresses of `count` pages of a region from page `first` on, in an order that has
/// no two in a row.
pub fn shuffled(region: &Region, first: u64, count: u64) -> Vec<u64> {
    // Steps of an odd number visit all of a power of two.
    let span = count.next_power_of_two();
    let step = (span / 8 * 5) | 1;
    (0..span)
        .map(|i| (i * step) & (span - 1))
        .filter(|page| *page < count)
        .map(|page| region.guest_addr() + (first + page) * PAGE as u64)
        .collect()
}

/// The command that registers pages, under an address of their own.
pub fn command(
    pd: &Pd,
    pages: vhost_device_rdma_bare::spec::command::PageList,
    length: u64,
) -> spec::RegMr {
    spec::RegMr {
        pd: pd.handle(),
        access: ALL,
        iova: IOVA,
        length,
        pages,
        ..spec::RegMr::default()
    }
}

/// Address of regions that are no memory of this process.
pub const IOVA: u64 = 1 << 40;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let process = bed::device(settings.cores, 1, "")?;
    let sizes = if settings.quick { &SIZES[..9] } else { &SIZES };
    let largest = sizes.last().copied().unwrap_or(0);
    // The lists are at the start. Nobody ever touches the pages that are registered, so there is no
    // memory behind them.
    let lists = 64 << 20;
    let vm = bed::vm(&process, 0, (largest + lists) as usize)?;
    let pd = Pd::new(&vm)?;
    let region = vm.region(0);
    let mut prepared: Vec<(u64, spec::RegMr, Option<Buffer>)> = Vec::new();
    for size in sizes {
        let pages = shuffled(&region, lists / PAGE as u64, size / PAGE as u64);
        let (list, tables) = page_list(&region, &pages)?;
        prepared.push((*size, command(&pd, list, *size), tables));
    }
    let mut batch = Batch::new(&vm)?;
    let mut runs = vec![(Vec::new(), Vec::new()); prepared.len()];
    let mut whole = Vec::new();
    for _ in 0..settings.repetitions() {
        for ((size, command, _), (registering, deregistering)) in prepared.iter().zip(&mut runs) {
            let (commands, times) = if *size <= 16 << 20 {
                (AT_ONCE, 20)
            } else {
                (4, 1)
            };
            let (mut there, mut back) = (Vec::new(), Vec::new());
            for _ in 0..times {
                let (time, keys) = batch.execute::<RegMr>(&vec![*command; commands])?;
                there.push(time);
                let handle = |key: &spec::RegMrResponse| Handle {
                    handle: key.lkey,
                    reserved: 0,
                };
                let handles: Vec<_> = keys.iter().map(handle).collect();
                back.push(batch.execute::<DeregMr>(&handles)?.0);
            }
            registering.push(median(&there));
            deregistering.push(median(&back));
        }
        whole.push(one_by_one(&vm, &prepared[0].1)?);
    }
    let mut figures = Vec::new();
    for (name, which) in [("REG_MR, scattered 4 KiB pages", 0), ("DEREG_MR", 1)] {
        for ((size, _, _), runs) in prepared.iter().zip(&runs) {
            let runs = if which == 0 { &runs.0 } else { &runs.1 };
            let mut point = figure(SECTION, name, "µs", Better::Lower, runs).at(*size as f64);
            if which == 0 && *size == 1 << 30 {
                point = point.target(Target::Max(15_000.0));
            }
            figures.push(point);
        }
    }
    let name = "REG_MR, 4 KiB, the whole command";
    figures.push(figure(SECTION, name, "µs", Better::Lower, &whole));
    Ok(figures)
}

/// Medians of what a command takes whose device and driver slept before, µs.
fn one_by_one(vm: &Vm, command: &spec::RegMr) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        let keys = vm.execute::<RegMr>(command)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
        vm.execute::<DeregMr>(&Handle {
            handle: keys.lkey,
            reserved: 0,
        })?;
    }
    Ok(median(&times))
}

/// Commands that are given to the device at once, at most: the control queue has room for them.
const AT_ONCE: usize = 32;
/// Bytes of the longest command or response here, and more.
const SLOT: usize = 256;

/// Memory for many commands and their responses.
struct Batch<'a> {
    vm: &'a Vm,
    commands: Buffer,
    responses: Buffer,
}

impl<'a> Batch<'a> {
    fn new(vm: &'a Vm) -> Result<Self> {
        let buffer = || vm.region(0).buffer(AT_ONCE * SLOT, Placement::Contiguous);
        Ok(Self {
            vm,
            commands: buffer()?,
            responses: buffer()?,
        })
    }

    /// Executes commands; returns the time of one, µs, and their responses.
    fn execute<C: Command>(&mut self, bodies: &[C::Body]) -> Result<(f64, Vec<C::Response>)> {
        let mut slots = Vec::new();
        for (at, body) in (0..AT_ONCE * SLOT).step_by(SLOT).zip(bodies) {
            let mut bytes = [0; SLOT];
            let len = command::build::<C>(body, &mut bytes)?;
            self.commands.view().write(at, &bytes[..len]);
            slots.push((at, len));
        }
        let elapsed = self.vm.with_control(|queue| -> Result<Duration> {
            let answered = |queue: &Virtqueue| queue.used().u16(2).load(Ordering::Acquire);
            let before = u16::from_le(answered(queue));
            for (at, len) in &slots {
                let command = Descriptor {
                    addr: self.commands.page(0) + *at as u64,
                    len: *len as u32,
                    writable: false,
                };
                let response = Descriptor {
                    addr: self.responses.page(0) + *at as u64,
                    len: SLOT as u32,
                    writable: true,
                };
                queue.add(&[command, response])?;
            }
            queue.notify()?;
            let deadline = Instant::now() + Duration::from_secs(60);
            // Looked at without taking what is there, for which the device would interrupt.
            let wait = |count: usize| {
                while usize::from(u16::from_le(answered(queue)).wrapping_sub(before)) < count {
                    ensure!(Instant::now() < deadline, "commands are not answered");
                    std::hint::spin_loop();
                }
                Ok(Instant::now())
            };
            let first = wait(1)?;
            let elapsed = wait(slots.len())? - first;
            while queue.take_used().is_some() {}
            Ok(elapsed)
        })?;
        let responses = slots.iter().map(|(at, _)| {
            let bytes = self.responses.view().get(*at, SLOT);
            Ok(command::parse::<C>(&bytes)?)
        });
        let responses = responses.collect::<Result<Vec<_>>>()?;
        let others = (slots.len() - 1) as f64;
        Ok((elapsed.as_secs_f64() * 1e6 / others, responses))
    }
}
