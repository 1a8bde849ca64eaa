// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of 64 bytes per second on one queue pair, with 512 outstanding: posted in lists of 32
//! of which the last is signalled, and one by one, all signalled.
use anyhow::Result;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;

use super::bed::{self, Pair};
use super::{cache, figure, model, peers, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "message rate";
/// Size of a message.
const SIZE: u32 = 64;

/// Millions per second in lists of so many, from and to as many places in turn as in the model.
pub fn rate(
    pair: &Pair,
    opcode: u8,
    size: u32,
    list: u64,
    time: std::time::Duration,
) -> Result<f64> {
    let mut polling = pair.a.send_cq.polling();
    let (first, mut place) = (pair.wqe(opcode), 0);
    let mut next = || {
        place = (place + 1) % model::PLACES;
        let offset = place * u64::from(size);
        let mut wqe = first;
        wqe.remote_addr += offset;
        (wqe, pair.a.mr.sge(offset, size))
    };
    bed::measure_rate(
        &mut polling,
        list,
        time,
        |_| bed::post_list(&pair.a_qp, list, &mut next),
        |polling| Ok(bed::poll_lists(polling, |_| Some(&pair.a_qp))? * list),
    )
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
    let modes = [
        (32, "in lists of 32, the last signalled"),
        (1, "one by one, all signalled"),
    ];
    let mut ours = [const { Vec::new() }; 2];
    let mut modelled = [const { Vec::new() }; 2];
    let mut batched = [const { Vec::new() }; 2];
    let mut reads = Vec::new();
    let mut ucx = Vec::new();
    let time = settings.time();
    for _ in 0..settings.repetitions() {
        let (rates, read, put) = cache::steady(cores, || {
            let rates = modes.map(|(list, _)| -> Result<_> {
                Ok((
                    model::rate(cores, SIZE.into(), list, 1, time)?,
                    rate(&pair, wr_opcode::RDMA_WRITE, SIZE, list, time)?,
                    model::rate(cores, SIZE.into(), list, model::MAX_BATCH, time)?,
                ))
            });
            Ok((
                rates,
                rate(&pair, wr_opcode::RDMA_READ, SIZE, 32, time)?,
                peers::ucx_put_rate(cores, SIZE, settings.quick)?,
            ))
        })?;
        for (mode, rates) in rates.into_iter().enumerate() {
            let (model, own, batched_model) = rates?;
            modelled[mode].push(model);
            ours[mode].push(own);
            batched[mode].push(batched_model);
        }
        reads.push(read);
        ucx.push(put);
    }
    let mut figures = Vec::new();
    for (mode, (_, how)) in modes.iter().enumerate() {
        let name = format!("WRITE {SIZE} B, {how}");
        let ours = figure(SECTION, &name, "million/s", Better::Higher, &ours[mode]);
        figures.push(
            ours.clone()
                .beside("model", &modelled[mode])
                .target(Target::Min(0.65)),
        );
        figures.push(
            ours.clone()
                .beside("model, completions in batches", &batched[mode]),
        );
        figures.push(ours.beside("UCX put", &ucx));
    }
    let name = format!("READ {SIZE} B, {}", modes[0].1);
    figures.push(
        figure(SECTION, &name, "million/s", Better::Higher, &reads).beside("model", &modelled[0]),
    );
    Ok(figures)
}
