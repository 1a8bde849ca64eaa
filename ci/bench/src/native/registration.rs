// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long registering memory takes in the device: pages of 4 KiB in shuffled order, no two of
//! them in a row.
//!
//! It is the time from the command to its answer, less that of a command that does nothing
//! (QUERY_PORT), measured in turn with it. Pinning pages and writing their list is the guest's part
//! and not in it.
use std::time::Instant;

use anyhow::Result;
use vhost_device_rdma_bare::core::command::{DeregMr, RegMr};
use vhost_device_rdma_bare::spec::command::{self as spec, Handle};
use vhost_device_rdma_bare::{page_list, Buffer, Pd, Region, PAGE};

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
    let mut runs = vec![(Vec::new(), Vec::new()); prepared.len()];
    let mut whole = Vec::new();
    for _ in 0..settings.repetitions() {
        for ((size, command, _), (registering, deregistering)) in prepared.iter().zip(&mut runs) {
            // Small ones are lost in the noise of the command, unless there are many.
            let times = if *size <= 16 << 20 { 200 } else { 3 };
            let (mut nothing, mut there, mut back) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..times {
                let start = Instant::now();
                vm.query_port()?;
                nothing.push(start.elapsed().as_secs_f64() * 1e6);
                let start = Instant::now();
                let keys = vm.execute::<RegMr>(command)?;
                there.push(start.elapsed().as_secs_f64() * 1e6);
                let start = Instant::now();
                vm.execute::<DeregMr>(&Handle {
                    handle: keys.lkey,
                    reserved: 0,
                })?;
                back.push(start.elapsed().as_secs_f64() * 1e6);
            }
            let nothing = median(&nothing);
            if *size == 4 << 10 {
                whole.push(median(&there));
            }
            registering.push((median(&there) - nothing).max(0.0));
            deregistering.push((median(&back) - nothing).max(0.0));
        }
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
