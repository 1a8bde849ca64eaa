// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What it costs to serve more VMs: 1 to 16 pairs of them, with one worker.
//!
//! The latency is that of the first pair while the others are attached and silent. The rate is that
//! of all pairs together, which get a list of 32 WRITEs of 64 bytes each in turn, of which the last
//! is signalled, with 512 outstanding in all.
use std::time::Duration;

use anyhow::Result;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{DeviceProcess, Polling};

use super::bed::{self, Pair};
use super::{cache, figure, quantile, settle, Settings};
use crate::figure::{Better, Figure};

const SECTION: &str = "VMs";
const LIST: u64 = 32;
const COUNTS: [u8; 5] = [1, 2, 4, 8, 16];

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    // A device for each number, all at once: those that are not measured sleep.
    let mut beds: Vec<(Vec<Pair>, DeviceProcess)> = Vec::new();
    for count in COUNTS {
        let process = bed::device(settings.cores, 2 * count, "")?;
        let mut pairs = Vec::new();
        for pair in 0..usize::from(count) {
            let a = bed::vm(&process, 2 * pair, 8 << 20)?;
            let b = bed::vm(&process, 2 * pair + 1, 8 << 20)?;
            pairs.push(Pair::new(&a, &b, 1 << 20)?);
        }
        beds.push((pairs, process));
    }
    let mut runs = vec![(Vec::new(), Vec::new()); beds.len()];
    for _ in 0..settings.repetitions() {
        let both = cache::steady(settings.cores, || {
            let both = beds.iter().map(|(pairs, _)| {
                Ok((
                    latency(&pairs[0], settings.rounds())?,
                    rate(pairs, 64, LIST, bed::DEPTH, settings.time())?,
                ))
            });
            both.collect::<Result<Vec<_>>>()
        })?;
        for ((latency, rate), (latencies, rates)) in both.into_iter().zip(&mut runs) {
            latencies.push(latency);
            rates.push(rate);
        }
    }
    let mut figures = Vec::new();
    for (count, (own, _)) in COUNTS.iter().zip(&runs) {
        let name = "WRITE 8 B, post to completion, other pairs silent";
        let mut point = figure(SECTION, name, "µs", Better::Lower, own).at(f64::from(*count));
        if *count > 1 {
            point = point.beside("1 pair", &runs[0].0);
        }
        figures.push(point);
    }
    for (count, (_, own)) in COUNTS.iter().zip(&runs) {
        let name = "WRITE 64 B, all pairs together";
        let mut point =
            figure(SECTION, name, "million/s", Better::Higher, own).at(f64::from(*count));
        if *count > 1 {
            point = point.beside("1 pair", &runs[0].1);
        }
        figures.push(point);
    }
    Ok(figures)
}

fn latency(pair: &Pair, rounds: usize) -> Result<f64> {
    settle();
    let polling = pair.a.send_cq.polling();
    let wqe = bed::signaled(pair.wqe(wr_opcode::RDMA_WRITE));
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + rounds / 4 {
        let start = std::time::Instant::now();
        bed::round(&polling, &pair.a_qp, &wqe, pair.a.mr.sge(0, 8))?;
        if round >= rounds / 4 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(quantile(&times, 0.5))
}

/// Completion queues of all pairs, and which is looked at next.
struct Queues<'a> {
    pairs: &'a [Pair],
    polling: Vec<Polling<'a>>,
    next: usize,
    list: u64,
    /// Work requests found complete while waiting for room.
    early: u64,
}

impl Queues<'_> {
    fn poll(&mut self) -> Result<u64> {
        self.next = (self.next + 1) % self.pairs.len();
        let qp = &self.pairs[self.next].a_qp;
        Ok(bed::poll_lists(&self.polling[self.next], |_| Some(qp))? * self.list)
    }
}

/// Millions of WRITEs of `size` bytes per second in lists of `list` of which the last is signalled,
/// each to the next pair, with `depth` outstanding in all.
pub fn rate(pairs: &[Pair], size: u32, list: u64, depth: u64, time: Duration) -> Result<f64> {
    let mut queues = Queues {
        pairs,
        polling: pairs.iter().map(|pair| pair.a.send_cq.polling()).collect(),
        next: 0,
        list,
        early: 0,
    };
    let mut next = 0;
    bed::measure_rate_of(
        &mut queues,
        list,
        depth,
        time,
        |queues| {
            let pair = &pairs[next];
            next = (next + 1) % pairs.len();
            while u64::from(pair.a_qp.send_queue().room()) < list {
                queues.early += queues.poll()?;
            }
            let (wqe, sge) = (pair.wqe(wr_opcode::RDMA_WRITE), pair.a.mr.sge(0, size));
            bed::post_list(&pair.a_qp, list, || (wqe, sge))
        },
        |queues| Ok(queues.poll()? + std::mem::take(&mut queues.early)),
    )
}
