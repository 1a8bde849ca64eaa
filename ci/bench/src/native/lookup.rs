// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What finding a memory region by its key, and memory in it by an address, costs: WRITEs of 8
//! bytes in lists of 32, with one region or up to a million, with a small region or a large one.
//!
//! All regions are made of the same few pages in shuffled order, so that the memory written to is
//! in the cache in any case: what differs is only what the device looks up. *The same of many*: all
//! WRITEs go to one region, while others exist. *Any of many*: each goes to another region at
//! random. *Anywhere in one*: each goes to an address in one region at random.
use std::time::Duration;

use anyhow::Result;
use vhost_device_rdma_bare::core::command::RegMr;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{page_list, Buffer, DeviceProcess, Placement, PAGE};

use super::bed::{self, Pair};
use super::registration::{command, shuffled, IOVA};
use super::{cache, figure, Settings};
use crate::figure::{Better, Figure};

const SECTION: &str = "key lookup";
const LIST: u64 = 32;
/// Pages that all regions are made of.
const PAGES: u64 = 64;
/// Regions.
const COUNTS: [usize; 5] = [1, 100, 10_000, 100_000, 1_000_000];
/// Sizes of one region.
const SIZES: [u64; 6] = [4 << 10, 256 << 10, 4 << 20, 64 << 20, 1 << 30, 4 << 30];
/// Destinations, used in turn.
const TARGETS: usize = 1 << 16;

/// Numbers that look random, always the same: xorshift.
pub struct Random(pub u64);

impl Random {
    /// One below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A device and what is registered with it.
struct Registered {
    pair: Pair,
    /// Address of the pages that regions are made of.
    pages: Vec<u64>,
    _pages: Buffer,
    _process: DeviceProcess,
}

impl Registered {
    fn new(settings: &Settings) -> Result<Self> {
        let process = bed::device(settings.cores, 2, "[limits]\nfootprint = 4294967296\n")?;
        let a = bed::vm(&process, 0, 64 << 20)?;
        let b = bed::vm(&process, 1, 256 << 20)?;
        let pages = b.buffer(PAGES as usize * PAGE, Placement::Contiguous)?;
        let region = b.region(0);
        let first = (pages.page(0) - region.guest_addr()) / PAGE as u64;
        Ok(Self {
            pair: Pair::new(&a, &b, 1 << 20)?,
            pages: shuffled(&region, first, PAGES),
            _pages: pages,
            _process: process,
        })
    }

    /// Registers `count` regions of `size` bytes; returns their keys.
    fn register(&self, count: usize, size: u64) -> Result<Vec<u32>> {
        let vm = &self.pair.b.vm;
        let pages = self.pages.iter().copied().cycle();
        let pages: Vec<u64> = pages.take(size as usize / PAGE).collect();
        let (list, _tables) = page_list(&vm.region(0), &pages)?;
        let command = command(&self.pair.b.pd, list, size);
        (0..count)
            .map(|_| Ok(vm.execute::<RegMr>(&command)?.rkey))
            .collect()
    }
}

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let counts = if settings.quick {
        &COUNTS[..3]
    } else {
        &COUNTS
    };
    let time = settings.time() / 2;
    let mut random = Random(88_172_645_463_325_252);
    let mut figures = Vec::new();
    let mut add = |name: &str, x: f64, own: &[f64], peer: &str, theirs: &[f64]| {
        let point = figure(SECTION, name, "ns/WRITE", Better::Lower, own).at(x);
        figures.push(point.beside(peer, theirs));
    };

    // One device has one region, the other more and more of them; so they can take turns.
    let (one, many) = (Registered::new(settings)?, Registered::new(settings)?);
    let alone = [(one.register(1, PAGE as u64)?[0], IOVA)];
    let mut keys = Vec::new();
    let mut any_figures = Vec::new();
    for count in counts {
        keys.extend(many.register(count - keys.len(), PAGE as u64)?);
        let mut any = || (keys[random.below(keys.len() as u64) as usize], IOVA);
        let same = [any()];
        let any: Vec<(u32, u64)> = (0..TARGETS).map(|_| any()).collect();
        let [mut of_alone, mut of_same, mut of_any] = [const { Vec::new() }; 3];
        for _ in 0..settings.repetitions() {
            let (alone, same, any) = cache::steady(settings.cores, || {
                Ok((
                    cost(&one.pair, &alone, time)?,
                    cost(&many.pair, &same, time)?,
                    cost(&many.pair, &any, time)?,
                ))
            })?;
            of_alone.push(alone);
            of_same.push(same);
            of_any.push(any);
        }
        add(
            "the same of many regions, by their number",
            *count as f64,
            &of_same,
            "a device with one region",
            &of_alone,
        );
        any_figures.push((*count as f64, of_any, of_alone));
    }
    for (x, own, theirs) in &any_figures {
        add(
            "any of many regions, by their number",
            *x,
            own,
            "a device with one region",
            theirs,
        );
    }

    for size in SIZES {
        let rkey = one.register(1, size)?[0];
        let anywhere: Vec<(u32, u64)> = (0..TARGETS)
            .map(|_| (rkey, IOVA + 8 * random.below(size / 8)))
            .collect();
        let [mut own, mut theirs] = [Vec::new(), Vec::new()];
        for _ in 0..settings.repetitions() {
            let (alone, anywhere) = cache::steady(settings.cores, || {
                Ok((
                    cost(&one.pair, &alone, time)?,
                    cost(&one.pair, &anywhere, time)?,
                ))
            })?;
            theirs.push(alone);
            own.push(anywhere);
        }
        add(
            "anywhere in one region, by its size in bytes",
            size as f64,
            &own,
            "one address in a region of 4 KiB",
            &theirs,
        );
    }
    Ok(figures)
}

/// Nanoseconds for a WRITE of 8 bytes in lists, to these keys and addresses in turn.
pub fn cost(pair: &Pair, targets: &[(u32, u64)], time: Duration) -> Result<f64> {
    let mut polling = pair.a.send_cq.polling();
    let sge = pair.a.mr.sge(0, 8);
    let mut targets = targets.iter().cycle();
    let mut next = || {
        // It never ends.
        let (rkey, remote_addr) = targets.next().copied().unwrap_or_default();
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr,
            rkey,
            ..SendWqe::default()
        };
        (wqe, sge)
    };
    let millions = bed::measure_rate(
        &mut polling,
        LIST,
        time,
        |_| bed::post_list(&pair.a_qp, LIST, &mut next),
        |polling| Ok(bed::poll_lists(polling, |_| Some(&pair.a_qp))? * LIST),
    )?;
    Ok(1e3 / millions)
}
