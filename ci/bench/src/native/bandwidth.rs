// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes per second of messages of all sizes, beside memcpy of as many bytes between the very same
//! two buffers.
//!
//! The buffers are the memory of two VMs, which this process has mapped as the device has: memcpy
//! runs on the worker's core while the worker sleeps, so that the same core copies both times.
//! *Contiguous* buffers are one run of guest-physical pages; *scattered* ones have no two pages in
//! a row, as the worst of guest processes.
use anyhow::Result;
use std::time::Instant;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::Placement;

use super::bed::{self, Pair};
use super::{cache, figure, peers, pin, settle, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "bandwidth";
const LARGEST: u32 = 64 << 20;
/// Bytes outstanding, about.
const OUTSTANDING: u32 = 8 << 20;

/// The least part of memcpy's rate for some sizes.
const TARGETS: [(u32, f64); 2] = [(1 << 20, 0.90), (64 << 20, 0.95)];

/// How often a repetition measures this size: what has a target is to depend less on what else the
/// machine does.
fn times(size: u32) -> usize {
    let targeted = TARGETS.iter().any(|(of, _)| *of == size);
    if targeted {
        3
    } else {
        1
    }
}

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let sizes: Vec<u32> = (0..)
        .map(|i| 64 << (2 * i))
        .take_while(|size| *size <= LARGEST)
        .collect();
    let mut figures = Vec::new();
    let mut ucx = Vec::new();
    for (placement, pages) in [
        (Placement::Contiguous, "contiguous"),
        (Placement::Scattered, "scattered"),
    ] {
        let process = bed::device(settings.cores, 2, "")?;
        let memory = 2 * LARGEST as usize;
        let a = bed::vm_with(&process, 0, memory, placement)?;
        let b = bed::vm_with(&process, 1, memory, placement)?;
        let pair = Pair::new(&a, &b, LARGEST as usize)?;
        let mut runs = vec![[const { Vec::new() }; 3]; sizes.len()];
        for repetition in 0..settings.repetitions() {
            for (size, [copies, writes, reads]) in sizes.iter().zip(&mut runs) {
                for _ in 0..times(*size) {
                    let (copied, written, read) = cache::steady(settings.cores, || {
                        Ok((
                            copy(&pair, *size, settings)?,
                            transfer(&pair, wr_opcode::RDMA_WRITE, *size, settings)?,
                            transfer(&pair, wr_opcode::RDMA_READ, *size, settings)?,
                        ))
                    })?;
                    copies.push(copied);
                    writes.push(written);
                    reads.push(read);
                }
                if *size == 1 << 20 && ucx.len() == repetition {
                    let put = peers::ucx_put_bandwidth(settings.cores, *size, settings.quick)?;
                    ucx.push(put);
                }
            }
        }
        for (verb, which) in [("WRITE", 1), ("READ", 2)] {
            for (size, runs) in sizes.iter().zip(&runs) {
                let name = format!("{verb}, {pages} pages");
                let own = figure(SECTION, &name, "GB/s", Better::Higher, &runs[which])
                    .at(f64::from(*size));
                let mut beside = own.clone().beside("memcpy", &runs[0]);
                if let Some((_, least)) =
                    TARGETS.iter().find(|(of, _)| of == size && verb == "WRITE")
                {
                    beside = beside.target(Target::Min(*least));
                }
                figures.push(beside);
                if *size == 1 << 20 && verb == "WRITE" {
                    figures.push(own.beside("UCX put", &ucx));
                }
            }
        }
    }
    Ok(figures)
}

/// GB/s of memcpy on the core of the worker.
fn copy(pair: &Pair, size: u32, settings: &Settings) -> Result<f64> {
    pin(&[settings.cores.worker])?;
    settle();
    let rate = copy_here(pair, size, settings);
    pin(&[settings.cores.driver])?;
    Ok(rate)
}

/// GB/s of memcpy where this thread is.
fn copy_here(pair: &Pair, size: u32, settings: &Settings) -> f64 {
    let (from, to) = (pair.a.mr.view(), pair.b.mr.view());
    let size = size as usize;
    let batch = (1 << 20) / size + 1;
    let begin = Instant::now();
    let mut start = None;
    let mut count = 0u64;
    loop {
        for _ in 0..batch {
            from.copy_to(to, std::hint::black_box(size));
        }
        count += batch as u64;
        let now = Instant::now();
        match start {
            None if now - begin >= settings.time() / 5 => start = Some((now, count)),
            Some((from, before)) if now - begin >= settings.time() && count > before => {
                let bytes = (count - before) as f64 * size as f64;
                return bytes / (now - from).as_secs_f64() / 1e9;
            }
            _ => {}
        }
    }
}

/// GB/s of an operation: small ones posted in lists, as for the message rate.
pub fn transfer(pair: &Pair, opcode: u8, size: u32, settings: &Settings) -> Result<f64> {
    let list = if size <= 4096 { 32 } else { 1 };
    let depth = u64::from(OUTSTANDING / size).clamp(2, bed::DEPTH);
    let mut polling = pair.a.send_cq.polling();
    let (wqe, sge) = (pair.wqe(opcode), pair.a.mr.sge(0, size));
    let millions = bed::measure_rate_of(
        &mut polling,
        list,
        depth,
        settings.time(),
        |_| bed::post_list(&pair.a_qp, list, || (wqe, sge)),
        |polling| Ok(bed::poll_lists(polling, |_| Some(&pair.a_qp))? * list),
    )?;
    Ok(millions * f64::from(size) / 1e3)
}
