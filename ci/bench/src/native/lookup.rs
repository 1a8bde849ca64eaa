// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What finding a memory region by its key, and memory in it by an address, costs: WRITEs of 8 bytes in lists of 32, with one region
//! or up to a million, with a small region or a large one.
//!
//! All regions are made of the same few pages in shuffled order, so that the memory written to is in the cache
//! in any case: what differs is only what the device looks up. *The same of many*: all WRITEs go to one region, while others exist.
//! *Any of many*: each goes to another region at random. *Anywhere in one*: each goes to an address in one region at random.
use std::time::Duration;

use anyhow::Result;
use vhost_device_rdma_bare::core::command::RegMr;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{page_list, PAGE};

use super::bed::{self, Pair};
use super::registration::{command, shuffled, IOVA};
use super::{figure, Settings};
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
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let counts = if settings.quick {
        &COUNTS[..3]
    } else {
        &COUNTS
    };
    let process = bed::device(settings.cores, 2, "[limits]\nfootprint = 4294967296\n")?;
    let (a, b) = (
        bed::vm(&process, 0, 64 << 20)?,
        bed::vm(&process, 1, 256 << 20)?,
    );
    let pair = Pair::new(&a, &b, 1 << 20)?;
    let region = b.region(0);
    let pages = b.buffer(
        PAGES as usize * PAGE,
        vhost_device_rdma_bare::Placement::Contiguous,
    )?;
    let first = (pages.page(0) - region.guest_addr()) / PAGE as u64;
    let pages = shuffled(&region, first, PAGES);
    let mut random = Random(88_172_645_463_325_252);

    let mut figures = Vec::new();
    let mut of_sizes = vec![Vec::new(); SIZES.len()];
    let mut ways = Vec::new();
    for size in SIZES {
        let list: Vec<u64> = pages
            .iter()
            .copied()
            .cycle()
            .take(size as usize / PAGE)
            .collect();
        let (list, _tables) = page_list(&region, &list)?;
        let rkey = b.execute::<RegMr>(&command(&pair.b.pd, list, size))?.rkey;
        ways.push(
            (0..TARGETS)
                .map(|_| (rkey, IOVA + 8 * random.below(size / 8)))
                .collect::<Vec<_>>(),
        );
    }
    for _ in 0..settings.repetitions() {
        for (way, runs) in ways.iter().zip(&mut of_sizes) {
            runs.push(cost(&pair, way, settings.time() / 2)?);
        }
    }

    let mut keys = Vec::new();
    let (list, _tables) = page_list(&region, &pages[..1])?;
    let [mut same_runs, mut any_runs] = [Vec::new(), Vec::new()];
    for count in counts {
        while keys.len() < *count {
            let keys_of = b.execute::<RegMr>(&command(&pair.b.pd, list, PAGE as u64))?;
            keys.push(keys_of.rkey);
        }
        let mut any = || (keys[random.below(keys.len() as u64) as usize], IOVA);
        let same = [any()];
        let any: Vec<(u32, u64)> = (0..TARGETS).map(|_| any()).collect();
        let [mut of_same, mut of_any] = [Vec::new(), Vec::new()];
        for _ in 0..settings.repetitions() {
            of_same.push(cost(&pair, &same, settings.time() / 2)?);
            of_any.push(cost(&pair, &any, settings.time() / 2)?);
        }
        same_runs.push(of_same);
        any_runs.push(of_any);
    }

    let counts: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
    let sizes = SIZES.map(|size| size as f64);
    let curves = [
        (
            "the same of many regions, by their number",
            &counts[..],
            &same_runs,
        ),
        ("any of many regions, by their number", &counts, &any_runs),
        (
            "anywhere in one region, by its size in bytes",
            &sizes,
            &of_sizes,
        ),
    ];
    for (name, places, runs) in curves {
        for (x, own) in places.iter().zip(runs) {
            let mut point = figure(SECTION, name, "ns/WRITE", Better::Lower, own).at(*x);
            if point.x != Some(places[0]) {
                point = point.beside("the first of the curve", &runs[0]);
            }
            figures.push(point);
        }
    }
    Ok(figures)
}

/// Nanoseconds for a WRITE of 8 bytes in lists, to these keys and addresses in turn.
fn cost(pair: &Pair, targets: &[(u32, u64)], time: Duration) -> Result<f64> {
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
