// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM feels of a neighbour that wants all of the worker.
//!
//! *Without a CPU*: the neighbour has thousands of contexts that do nothing, or of queue pairs that
//! are told RNR and ask again after 10 µs; none of its own CPUs does anything. The victim's latency
//! is compared with what it was before.
//!
//! *Flood*: neighbour and victim have so many work requests posted that the worker is busy with
//! both of them for all of the time that is measured. The victim's rate is compared with its fair
//! share, which is half of what it has alone. Beside a flood of commands, which are no work of the
//! worker, that is all of what it has alone.
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _, Result};
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{Connection, Context, Cq, DeviceProcess, Qp, QpOptions, Uses};

use super::bed::{self, Pair, Side};
use super::{cache, figure, quantile, settle, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "neighbours";
/// RNR timer of 10 µs.
const SHORTEST_RNR_TIMER: u8 = 1;
/// Bytes of a short message, and of a long one.
const SHORT: u32 = 64;
const LONG: u32 = 64 << 10;
/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let mut figures = without_a_cpu(settings)?;
    figures.extend(floods(settings)?);
    Ok(figures)
}

/// Sorted latencies of some repetitions.
#[derive(Default)]
struct Latency {
    median: Vec<f64>,
    p99: Vec<f64>,
}

impl Latency {
    fn measure(victim: &Pair, settings: &Settings) -> Result<Self> {
        let mut all = Self::default();
        for _ in 0..settings.repetitions() {
            let times = write_latency(victim, settings.rounds())?;
            all.median.push(quantile(&times, 0.5));
            all.p99.push(quantile(&times, 0.99));
        }
        Ok(all)
    }

    /// Beside what it was without the neighbour.
    fn figures(&self, alone: &Self, what: &str) -> [Figure; 2] {
        let of = |name: &str, own: &[f64], alone: &[f64], most| {
            let name = format!("WRITE 8 B, {name}, beside {what}");
            figure(SECTION, &name, "µs", Better::Lower, own)
                .beside("alone", alone)
                .target(Target::Max(most))
        };
        [
            of("median", &self.median, &alone.median, 2.0),
            of("p99", &self.p99, &alone.p99, 5.0),
        ]
    }
}

/// Sorted times from posting to completion, µs.
fn write_latency(pair: &Pair, rounds: usize) -> Result<Vec<f64>> {
    let polling = pair.a.send_cq.polling();
    let wqe = bed::signaled(pair.wqe(wr_opcode::RDMA_WRITE));
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        bed::round(&polling, &pair.a_qp, &wqe, pair.a.mr.sge(0, 8))?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

fn without_a_cpu(settings: &Settings) -> Result<Vec<Figure>> {
    let contexts = if settings.quick { 512 } else { 4_096 };
    let senders: &[usize] = if settings.quick {
        &[1_000]
    } else {
        &[10_000, 40_000]
    };
    let [alone, beside] = cache::steady(settings.cores, || beside_contexts(settings, contexts))?;
    let mut figures = Vec::new();
    figures.extend(beside.figures(&alone, &format!("{contexts} idle contexts")));
    for &count in senders {
        let [alone, beside] = cache::steady(settings.cores, || beside_rnr(settings, count))?;
        let what = format!("{count} queue pairs that are told RNR");
        figures.extend(beside.figures(&alone, &what));
    }
    Ok(figures)
}

/// Alone, and beside so many contexts.
fn beside_contexts(settings: &Settings, count: usize) -> Result<[Latency; 2]> {
    let process = bed::device(settings.cores, 3, "")?;
    let [a, b, c] = [(0, 64), (1, 64), (2, 512)].map(|(i, mib)| bed::vm(&process, i, mib << 20));
    let (a, b, c) = (a?, b?, c?);
    let victim = Pair::new(&a, &b, 1 << 20)?;
    let alone = Latency::measure(&victim, settings)?;
    let idle: Result<Vec<_>, _> = (0..count).map(|_| Context::new(&c)).collect();
    let _idle = idle?;
    let beside = Latency::measure(&victim, settings)?;
    Ok([alone, beside])
}

/// Alone, and beside so many queue pairs that are told RNR.
fn beside_rnr(settings: &Settings, count: usize) -> Result<[Latency; 2]> {
    let process = bed::device(settings.cores, 4, "")?;
    let [a, b, c, d] =
        [(0, 64), (1, 64), (2, 2048), (3, 2048)].map(|(i, mib)| bed::vm(&process, i, mib << 20));
    let victim = Pair::new(&a?, &b?, 1 << 20)?;
    let (from, to) = (Side::new(&c?, 4096)?, Side::new(&d?, 4096)?);
    let alone = Latency::measure(&victim, settings)?;
    let _waiting = rnr(&from, &to, count)?;
    let beside = Latency::measure(&victim, settings)?;
    Ok([alone, beside])
}

/// So many queue pairs, each with a SEND for which there is no receive.
fn rnr(from: &Side, to: &Side, count: usize) -> Result<Vec<(Qp, Qp)>> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        let (sender, receiver) = (from.qp(1, 1)?, to.qp(1, 1)?);
        sender.connect(&Connection::to(&receiver))?;
        receiver.connect(&Connection {
            min_rnr_timer: SHORTEST_RNR_TIMER,
            ..Connection::to(&sender)
        })?;
        let send = SendWqe {
            opcode: wr_opcode::SEND,
            ..SendWqe::default()
        };
        sender.send_queue().post(&send, [from.mr.sge(0, 8)])?;
        all.push((sender, receiver));
    }
    for (sender, _) in &all {
        sender.ring()?;
    }
    Ok(all)
}

/// Queue pairs that are filled with WRITEs.
struct Backlog<'a> {
    qps: Vec<Qp>,
    _peers: Vec<Qp>,
    cq: Arc<Cq>,
    from: &'a Side,
    to: &'a Side,
    /// WRITEs of each.
    entries: u32,
    /// Bytes of a WRITE.
    size: u32,
}

impl<'a> Backlog<'a> {
    fn new(from: &'a Side, to: &'a Side, count: u32, entries: u32, size: u32) -> Result<Self> {
        let cq = Cq::new(&from.vm, count, 0)?;
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let uses = Uses {
                context: Some(&from.context),
                pd: Some(&from.pd),
                send_cq: Some(&cq),
                recv_cq: Some(&from.recv_cq),
                ..Uses::default()
            };
            let options = QpOptions {
                caps: QpCaps {
                    max_send_wr: entries,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline: 16,
                },
                signal_all: false,
                ..QpOptions::default()
            };
            let (qp, peer) = (Qp::create(&from.vm, &uses, &options)?, to.qp(1, 1)?);
            bed::connect(&qp, &peer)?;
            qps.push(qp);
            peers.push(peer);
        }
        Ok(Self {
            qps,
            _peers: peers,
            cq,
            from,
            to,
            entries,
            size,
        })
    }

    fn bytes(&self) -> f64 {
        self.qps.len() as f64 * f64::from(self.entries) * f64::from(self.size)
    }

    /// Fills all queues. The last WRITE of each is signalled. Nothing is told to the device yet.
    fn fill(&self) -> Result<()> {
        for (index, qp) in self.qps.iter().enumerate() {
            let mut batch = qp.send_queue().batch();
            for entry in 1..=self.entries {
                let wqe = SendWqe {
                    opcode: wr_opcode::RDMA_WRITE,
                    wr_id: index as u64,
                    remote_addr: self.to.mr.iova,
                    rkey: self.to.mr.rkey,
                    ..SendWqe::default()
                };
                let wqe = if entry == self.entries {
                    bed::signaled(wqe)
                } else {
                    wqe
                };
                batch.push(&wqe, [self.from.mr.sge(0, self.size)])?;
            }
            batch.commit();
        }
        Ok(())
    }

    fn ring(&self) -> Result<()> {
        self.qps.iter().try_for_each(|qp| Ok(qp.ring()?))
    }

    /// Polls what there is; returns how many queues are done.
    fn poll(&self) -> Result<usize> {
        Ok(bed::poll_lists(&self.cq.polling(), |id| self.qps.get(id as usize))? as usize)
    }

    /// Waits until all is done, `done` of which is already, and does `meanwhile` again and again.
    fn wait(&self, mut done: usize, mut meanwhile: impl FnMut() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        while done < self.qps.len() {
            done += self.poll()?;
            meanwhile()?;
            ensure!(start.elapsed() < TIMEOUT, "completions do not come");
        }
        Ok(())
    }
}

/// How long the workers have polled for the VM of this number while others had work, too,
/// nanoseconds.
fn contended(process: &DeviceProcess, vm: usize) -> Result<f64> {
    let status = process.status()?;
    let counter = &status["devices"][vm]["counters"]["contended_ns"];
    counter.as_f64().context("no contended_ns in the status")
}

/// What the victim has beside a flood.
#[derive(Clone, Copy, Default)]
struct Beside {
    /// Bytes per second.
    rate: f64,
    /// Its part of the time that the worker polled for it or for the flood, while both had work.
    time: f64,
}

/// The same, by the VMs that send.
fn beside(process: &DeviceProcess, victim: &Backlog<'_>, flood: &Backlog<'_>) -> Result<Beside> {
    let times = || Ok::<_, anyhow::Error>([contended(process, 0)?, contended(process, 2)?]);
    let before = times()?;
    let rate = rate_beside(victim, Some(flood), || Ok(()))?;
    let after = times()?;
    let [own, others] = [after[0] - before[0], after[1] - before[1]];
    ensure!(own > 0.0 && others > 0.0, "no time was measured");
    let time = own / (own + others);
    Ok(Beside { rate, time })
}

/// Bytes per second that the victim has beside a flood. `meanwhile` is done again and again.
fn rate_beside(
    victim: &Backlog<'_>,
    flood: Option<&Backlog<'_>>,
    meanwhile: impl FnMut() -> Result<()>,
) -> Result<f64> {
    victim.fill()?;
    if let Some(flood) = flood {
        flood.fill()?;
    }
    settle();
    if let Some(flood) = flood {
        flood.ring()?;
    }
    let start = Instant::now();
    victim.ring()?;
    victim.wait(0, meanwhile)?;
    let time = start.elapsed();
    if let Some(flood) = flood {
        let done = flood.poll()?;
        ensure!(done < flood.qps.len(), "the flood was over too soon");
        flood.wait(done, || Ok(()))?;
    }
    Ok(victim.bytes() / time.as_secs_f64())
}

fn floods(settings: &Settings) -> Result<Vec<Figure>> {
    let process = bed::device(settings.cores, 4, "")?;
    let [a, b, c, d] = [0, 1, 2, 3].map(|i| bed::vm(&process, i, 512 << 20));
    let (a, b) = (Side::new(&a?, 1 << 20)?, Side::new(&b?, 1 << 20)?);
    let (c, d) = (Side::new(&c?, 1 << 20)?, Side::new(&d?, 1 << 20)?);
    let victims = [
        ("WRITE 64 KiB", Backlog::new(&a, &b, 1, 2048, LONG)?),
        ("WRITE 64 B", Backlog::new(&a, &b, 16, 8192, SHORT)?),
    ];
    let floods = [
        (
            "1,000 queue pairs of 64 KiB WRITEs",
            Backlog::new(&c, &d, 1000, 64, LONG)?,
        ),
        (
            "a flood of 64 B WRITEs",
            Backlog::new(&c, &d, 256, 8192, SHORT)?,
        ),
    ];
    let mut figures = Vec::new();
    for (name, victim) in &victims {
        let mut alone = Vec::new();
        let mut shared_runs = [const { Vec::new() }; 2];
        let mut commands = Vec::new();
        for _ in 0..settings.repetitions() {
            let (own, shared, commanded) = cache::steady(settings.cores, || {
                let own = rate_beside(victim, None, || Ok(()))?;
                let mut shared = [Beside::default(); 2];
                for ((_, flood), shared) in floods.iter().zip(&mut shared) {
                    *shared = beside(&process, victim, flood)?;
                }
                let commanded = rate_beside(victim, None, || {
                    c.vm.query_port()?;
                    Ok(())
                })?;
                Ok((own, shared, commanded))
            })?;
            alone.push(own);
            for (shared, runs) in shared.into_iter().zip(&mut shared_runs) {
                runs.push(shared);
            }
            commands.push(commanded);
        }
        let gigabytes = |runs: &[f64]| runs.iter().map(|run| run / 1e9).collect::<Vec<_>>();
        let share: Vec<f64> = gigabytes(&alone).iter().map(|run| run / 2.0).collect();
        for ((what, _), runs) in floods.iter().zip(&shared_runs) {
            let (rates, times): (Vec<_>, Vec<_>) =
                runs.iter().map(|run| (run.rate, 100.0 * run.time)).unzip();
            let (rates, half) = (gigabytes(&rates), vec![50.0; times.len()]);
            let time = format!("{name}, its part of the worker's time beside {what}");
            let name = format!("{name}, beside {what}");
            figures.push(
                figure(SECTION, &time, "%", Better::Higher, &times)
                    .beside("half of it", &half)
                    .target(Target::Min(0.9)),
            );
            figures.push(
                figure(SECTION, &name, "GB/s", Better::Higher, &rates)
                    .beside("half of it alone", &share),
            );
        }
        let name = format!("{name}, beside a flood of commands");
        figures.push(
            figure(
                SECTION,
                &name,
                "GB/s",
                Better::Higher,
                &gigabytes(&commands),
            )
            .beside("alone", &gigabytes(&alone))
            .target(Target::Min(0.9)),
        );
    }
    Ok(figures)
}
