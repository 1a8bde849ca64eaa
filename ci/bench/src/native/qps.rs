// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of 64 bytes per second with many active queue pairs.
//!
//! However many they are, each in turn gets a list of 32 WRITEs of which the last is signalled, and
//! 512 WRITEs are outstanding in all: the pattern is that of one queue pair, but every list is the
//! work of another one. With more than 16 of them a queue pair is idle when its turn comes, and the
//! device finds it by its doorbell alone. All complete to one completion queue.
use anyhow::Result;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{Polling, Qp};

use super::bed::{self, Side, DEPTH};
use super::{cache, figure, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "active queue pairs";
const SIZE: u32 = 64;
const LIST: u64 = 32;
const COUNTS: [usize; 4] = [1, 16, 1_000, 10_000];
/// How often a repetition measures them: the rings of 10,000 queue pairs do not fit into the
/// caches, and so their rate depends more than others on what else the machine does.
const TIMES: usize = 3;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let process = bed::device(settings.cores, 2, "")?;
    let memory = 512 << 20;
    let (a, b) = (bed::vm(&process, 0, memory)?, bed::vm(&process, 1, memory)?);
    let (a, b) = (Side::new(&a, 1 << 20)?, Side::new(&b, 1 << 20)?);
    let counts = if settings.quick {
        &COUNTS[..3]
    } else {
        &COUNTS
    };
    // Twice as long as their share of what is outstanding: completions of different queue pairs
    // come in any order.
    let mut peers = Vec::new();
    let mut groups = Vec::new();
    for count in counts {
        let entries = (2 * DEPTH / *count as u64).clamp(2 * LIST, DEPTH);
        let mut group = Vec::new();
        for _ in 0..*count {
            let (from, to) = (a.qp(entries as u32, 0)?, b.qp(1, 0)?);
            bed::connect(&from, &to)?;
            group.push(from);
            peers.push(to);
        }
        groups.push(group);
    }
    let mut runs = vec![Vec::new(); groups.len()];
    for _ in 0..TIMES * settings.repetitions() {
        let rates = cache::steady(settings.cores, || {
            let rates = groups.iter().map(|group| rate(&a, &b, group, settings));
            rates.collect::<Result<Vec<_>>>()
        })?;
        for (rate, runs) in rates.into_iter().zip(&mut runs) {
            runs.push(rate);
        }
    }
    let mut figures = Vec::new();
    for (count, own) in counts.iter().zip(&runs) {
        let name = format!("WRITE {SIZE} B, in turn over queue pairs");
        let mut point = figure(SECTION, &name, "million/s", Better::Higher, own).at(*count as f64);
        if *count > 1 {
            point = point.beside("1 queue pair", &runs[0]);
        }
        if *count == 10_000 {
            point = point.target(Target::Min(0.7));
        }
        figures.push(point);
    }
    Ok(figures)
}

fn rate(a: &Side, b: &Side, qps: &[Qp], settings: &Settings) -> Result<f64> {
    let polling = a.send_cq.polling();
    let sge = a.mr.sge(0, SIZE);
    let mut next = 0;
    let mut state = (polling, 0u64);
    let poll = |state: &mut (Polling<'_>, u64)| -> Result<u64> {
        let lists = bed::poll_lists(&state.0, |id| qps.get(id as usize))?;
        Ok(lists * LIST)
    };
    bed::measure_rate(
        &mut state,
        LIST,
        settings.time(),
        |state| {
            let qp = &qps[next];
            // Lists of others may have completed before its own.
            while u64::from(qp.send_queue().room()) < LIST {
                state.1 += poll(state)?;
            }
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                wr_id: next as u64,
                remote_addr: b.mr.iova,
                rkey: b.mr.rkey,
                ..SendWqe::default()
            };
            next = (next + 1) % qps.len();
            bed::post_list(qp, LIST, || (wqe, sge))
        },
        |state| Ok(poll(state)? + std::mem::take(&mut state.1)),
    )
}
