// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long one operation of 8 bytes takes.
//!
//! *Post to completion*: from before posting until the completion is polled; then the next one.
//! *Ping-pong*: half a round trip; for a WRITE both ends look at the memory that the other writes
//! to, for a SEND at the completion of the receive. One thread drives both ends, as the worker has
//! the other core: what it waits for has crossed from core to core as often as with a thread for
//! each.
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{ensure, Result};
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{wc_status, wr_opcode};

use super::bed::{self, Pair};
use super::{cache, figure, model, peers, quantile, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "latency";
/// Size of a message.
const SIZE: u32 = 8;

/// The operations, with what may be at most of their ratio to the model.
const OPERATIONS: [(&str, u8, Option<f64>); 4] = [
    ("WRITE", wr_opcode::RDMA_WRITE, Some(1.3)),
    ("READ", wr_opcode::RDMA_READ, None),
    ("SEND", wr_opcode::SEND, None),
    ("FETCH_ADD", wr_opcode::ATOMIC_FETCH_AND_ADD, None),
];

/// Some repetitions of something, each with its percentiles.
struct Runs {
    median: Vec<f64>,
    p99: Vec<f64>,
    p999: Vec<f64>,
}

impl Runs {
    const fn new() -> Self {
        Self {
            median: Vec::new(),
            p99: Vec::new(),
            p999: Vec::new(),
        }
    }

    fn add(&mut self, sorted: &[f64]) {
        self.median.push(quantile(sorted, 0.5));
        self.p99.push(quantile(sorted, 0.99));
        self.p999.push(quantile(sorted, 0.999));
    }

    fn figure(&self, name: &str) -> Figure {
        figure(SECTION, name, "µs", Better::Lower, &self.median)
            .percentile("p99", &self.p99)
            .percentile("p99.9", &self.p999)
    }
}

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let cores = settings.cores;
    let process = bed::device(cores, 2, "")?;
    let (a, b) = (
        bed::vm(&process, 0, 64 << 20)?,
        bed::vm(&process, 1, 64 << 20)?,
    );
    let pair = Pair::new(&a, &b, 1 << 20)?;

    let mut modelled = Runs::new();
    let mut operations = [const { Runs::new() }; OPERATIONS.len()];
    let [mut write, mut inline, mut send] = [const { Runs::new() }; 3];
    let [mut one, mut two, mut ucx, mut libfabric] = [const { Vec::new() }; 4];
    let rounds = settings.rounds();
    for _ in 0..settings.repetitions() {
        let (lines, model, own) = cache::steady(cores, || {
            let lines = [
                cache::one_line(cores, rounds as u64)?,
                cache::two_lines(cores, rounds as u64)?,
            ];
            let model = model::latency(cores, SIZE.into(), rounds)?;
            let own = OPERATIONS.map(|(_, opcode, _)| post_to_completion(&pair, opcode, rounds));
            Ok((lines, model, own))
        })?;
        one.push(lines[0]);
        two.push(lines[1]);
        modelled.add(&model);
        for (times, runs) in own.into_iter().zip(&mut operations) {
            runs.add(&times?);
        }
        let (one_way_write, one_way_inline, put) = cache::steady(cores, || {
            Ok((
                write_ping_pong(&pair, false, rounds)?,
                write_ping_pong(&pair, true, rounds)?,
                peers::ucx_put_latency(cores, SIZE, rounds)?,
            ))
        })?;
        write.add(&one_way_write);
        inline.add(&one_way_inline);
        ucx.push(put);
        let (one_way_send, message) = cache::steady(cores, || {
            Ok((
                send_ping_pong(&pair, rounds)?,
                peers::libfabric_latency(cores, SIZE, rounds)?,
            ))
        })?;
        send.add(&one_way_send);
        libfabric.push(message);
    }

    let mut figures = Vec::new();
    for ((name, opcode, most), runs) in OPERATIONS.iter().zip(&operations) {
        let name = format!("{name} {SIZE} B, post to completion");
        let mut beside_model = runs.figure(&name).beside("model", &modelled.median);
        if let Some(most) = most {
            beside_model = beside_model.target(Target::Max(*most));
        }
        figures.push(beside_model);
        if *opcode == wr_opcode::RDMA_WRITE {
            figures.push(
                runs.figure(&name)
                    .beside("cache-line round trip", &one)
                    .target(Target::Max(4.0)),
            );
            figures.push(
                runs.figure(&name)
                    .beside("round trip of two cache lines", &two),
            );
        }
    }
    let name = format!("WRITE {SIZE} B, ping-pong one way");
    figures.push(
        write
            .figure(&name)
            .beside("UCX put", &ucx)
            .target(Target::Max(3.0)),
    );
    figures.push(write.figure(&name).beside("libfabric", &libfabric));
    let name = format!("WRITE {SIZE} B inline, ping-pong one way");
    figures.push(inline.figure(&name).beside("UCX put", &ucx));
    let name = format!("SEND {SIZE} B, ping-pong one way");
    figures.push(send.figure(&name).beside("UCX put", &ucx));
    figures.push(send.figure(&name).beside("libfabric", &libfabric));
    Ok(figures)
}

/// Sorted times, µs.
pub fn post_to_completion(pair: &Pair, opcode: u8, rounds: usize) -> Result<Vec<f64>> {
    let polling = pair.a.send_cq.polling();
    let received = pair.b.recv_cq.polling();
    let wqe = bed::signaled(match opcode {
        wr_opcode::SEND => SendWqe {
            opcode,
            ..SendWqe::default()
        },
        wr_opcode::ATOMIC_FETCH_AND_ADD => SendWqe {
            operand0: 1,
            ..pair.wqe(opcode)
        },
        _ => pair.wqe(opcode),
    });
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + rounds / 4 {
        if opcode == wr_opcode::SEND {
            pair.b_qp.recv_queue().post(0, [pair.b.mr.sge(0, SIZE)])?;
        }
        let start = Instant::now();
        bed::round(&polling, &pair.a_qp, &wqe, pair.a.mr.sge(0, SIZE))?;
        let time = start.elapsed();
        if opcode == wr_opcode::SEND {
            let cqe = received.poll();
            received.publish();
            let Some(cqe) = cqe else {
                anyhow::bail!("a SEND has completed, and nothing was received")
            };
            ensure!(cqe.status == wc_status::SUCCESS, "status {}", cqe.status);
            pair.b_qp.recv_queue().complete(cqe.wqe_index);
        }
        if round >= rounds / 4 {
            times.push(time.as_secs_f64() * 1e6);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

/// How many work requests of a ping-pong go without a completion for one that has it: completions
/// must be taken at times.
const SIGNAL_EVERY: usize = 64;

/// Sorted times of one way, µs, of data from memory or, as most applications send so little, from
/// the work request.
fn write_ping_pong(pair: &Pair, inline: bool, rounds: usize) -> Result<Vec<f64>> {
    let polling = [pair.a.send_cq.polling(), pair.b.send_cq.polling()];
    // Each has what it sends at the start of its memory, and receives a page behind that.
    const AT: usize = 4096;
    let ends = [
        (&pair.a_qp, &pair.a.mr, &pair.b.mr),
        (&pair.b_qp, &pair.b.mr, &pair.a.mr),
    ];
    let mut times = Vec::with_capacity(rounds);
    for (_, _, to) in ends {
        to.view().u64(AT).store(0, Ordering::Relaxed);
    }
    let last = rounds + rounds / 4;
    for round in 1..=last {
        let start = Instant::now();
        for ((qp, from, to), polling) in ends.iter().zip(&polling) {
            let mut wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                remote_addr: to.iova + AT as u64,
                rkey: to.rkey,
                ..SendWqe::default()
            };
            let signal = round % SIGNAL_EVERY == 0 || round == last;
            if signal {
                wqe = bed::signaled(wqe);
            }
            let mut batch = qp.send_queue().batch();
            if inline {
                batch.push_inline(&wqe, [&round.to_ne_bytes()[..]])?;
            } else {
                from.view().u64(0).store(round as u64, Ordering::Relaxed);
                batch.push(&wqe, [from.sge(0, SIZE)])?;
            }
            batch.commit();
            qp.ring()?;
            let word = to.view().u64(AT);
            let mut spins = 0u32;
            while word.load(Ordering::Acquire) != round as u64 {
                spins = spins.wrapping_add(1);
                ensure!(spins != u32::MAX, "nothing was written");
            }
            if signal {
                bed::wait(polling, qp)?;
            }
        }
        if round > rounds / 4 {
            times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

/// Sorted times of one way, µs.
fn send_ping_pong(pair: &Pair, rounds: usize) -> Result<Vec<f64>> {
    let sent = [pair.a.send_cq.polling(), pair.b.send_cq.polling()];
    let received = [pair.b.recv_cq.polling(), pair.a.recv_cq.polling()];
    let ends = [
        (&pair.a_qp, &pair.a.mr, &pair.b_qp, &pair.b.mr),
        (&pair.b_qp, &pair.b.mr, &pair.a_qp, &pair.a.mr),
    ];
    let mut times = Vec::with_capacity(rounds);
    let last = rounds + rounds / 4;
    for (_, _, to_qp, to) in ends {
        to_qp.recv_queue().post(0, [to.sge(4096, SIZE)])?;
    }
    for round in 1..=last {
        let start = Instant::now();
        for (((from_qp, from, to_qp, to), sent), received) in ends.iter().zip(&sent).zip(&received)
        {
            let wqe = SendWqe {
                opcode: wr_opcode::SEND,
                ..SendWqe::default()
            };
            let signal = round % SIGNAL_EVERY == 0 || round == last;
            let wqe = if signal { bed::signaled(wqe) } else { wqe };
            from_qp.send_queue().post(&wqe, [from.sge(0, SIZE)])?;
            from_qp.ring()?;
            let mut spins = 0u32;
            let cqe = loop {
                if let Some(cqe) = received.poll() {
                    break cqe;
                }
                spins = spins.wrapping_add(1);
                ensure!(spins != u32::MAX, "nothing was received");
            };
            received.publish();
            ensure!(cqe.status == wc_status::SUCCESS, "status {}", cqe.status);
            to_qp.recv_queue().complete(cqe.wqe_index);
            // For the next round; none is to be left over.
            if round < last {
                to_qp.recv_queue().post(0, [to.sge(4096, SIZE)])?;
            }
            if signal {
                bed::wait(sent, from_qp)?;
            }
        }
        if round > rounds / 4 {
            times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}
