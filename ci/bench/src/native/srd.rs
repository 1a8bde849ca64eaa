// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable datagrams between two device processes: one queue pair that reaches many peers, beside as
//! many RC queue pairs, and messages one after the other while a path loses packets. The cores are
//! shared as in the section *wire*.
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::core::SrdWqe;
use vhost_device_rdma_bare::spec::verbs::{qp_type, wr_opcode};
use vhost_device_rdma_bare::{Address, Connection, Qp, QpOptions};

use super::bed::{self, Side};
use super::wire::{one_by_one, Hosts};
use super::{figure, quantile, Settings};
use crate::figure::{Better, Figure};

const SECTION: &str = "SRD";
const QKEY: u32 = 0x1111_1111;
/// Peers.
const PEERS: usize = 1000;
/// Size of small messages, and how many are outstanding.
const SMALL: u32 = 64;
const OUTSTANDING: u64 = 200;
/// Size of messages that go one after the other.
const SHORTEST: u32 = 8;
/// How long the thread that drives sleeps when nothing has completed.
const SLEEP: Duration = Duration::from_micros(100);
/// What the path of RC loses, and one of the four of SRD.
const ONLY_PATH: &str = "seed=1,loss=1%";
const ONE_PATH: &str = "seed=1,loss=1%,path=1";

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let peers = if settings.quick { PEERS / 5 } else { PEERS };
    let srd = many(settings, peers, One::start, One::reach)?;
    let rc = many(settings, peers, All::start, All::reach)?;
    let beside = format!("{peers} RC queue pairs");
    let name = |what: &str| format!("{what}, one SRD queue pair for {peers} peers");
    let of = |what: &str, unit, better, own: &[f64], other: &[f64]| {
        figure(SECTION, &name(what), unit, better, own).beside(&beside, other)
    };
    let mut figures = vec![
        of(
            "time to make them",
            "ms",
            Better::Lower,
            &srd.made,
            &rc.made,
        ),
        of(
            "memory of the process",
            "KiB",
            Better::Lower,
            &srd.memory,
            &rc.memory,
        ),
        of(
            "WRITE 64 B, in turn to all",
            "million/s",
            Better::Higher,
            &srd.rate,
            &rc.rate,
        ),
    ];
    figures.extend(latency(settings)?);
    Ok(figures)
}

/// What was measured of a way to reach many peers.
#[derive(Default)]
struct Measured {
    made: Vec<f64>,
    memory: Vec<f64>,
    rate: Vec<f64>,
}

/// Measures a way to reach many peers: `start` makes what is theirs, `reach` what is ours, so that it can
/// send to all.
fn many<W: Way>(
    settings: &Settings,
    peers: usize,
    start: impl Fn(&Hosts, usize) -> Result<W>,
    reach: impl Fn(&mut W, &Hosts) -> Result<()>,
) -> Result<Measured> {
    let mut measured = Measured::default();
    let repetitions = if settings.quick { 1 } else { 3 };
    for _ in 0..repetitions {
        let hosts = Hosts::start(settings.cores, "", "")?;
        let mut way = start(&hosts, peers)?;
        let before = hosts.resident()?;
        let begin = Instant::now();
        reach(&mut way, &hosts)?;
        measured.made.push(begin.elapsed().as_secs_f64() * 1e3);
        way.finish()?;
        measured.rate.push(rate(settings, &hosts, &way, peers)?);
        measured.memory.push(hosts.resident()? - before);
    }
    Ok(measured)
}

/// A way to reach many peers.
trait Way {
    /// What the peers do when they are reached.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Posts a small message to a peer.
    fn post(&self, hosts: &Hosts, peer: usize) -> Result<()>;

    /// The queue pair that sends to a peer.
    fn sender(&self, peer: usize) -> Option<&Qp>;
}

/// Millions of messages per second, in turn to all peers.
fn rate(settings: &Settings, hosts: &Hosts, way: &impl Way, peers: usize) -> Result<f64> {
    let mut polling = hosts.from.send_cq.polling();
    let mut next = 0;
    bed::measure_rate_of(
        &mut polling,
        1,
        OUTSTANDING,
        4 * settings.time(),
        |_| {
            next = (next + 1) % peers;
            way.post(hosts, next)
        },
        |polling| {
            let done = bed::poll_lists(polling, |peer| way.sender(peer as usize))?;
            if done == 0 {
                std::thread::sleep(SLEEP);
            }
            Ok(done)
        },
    )
}

/// A queue pair of SRD that is ready.
fn srd(side: &Side) -> Result<Qp> {
    let options = QpOptions {
        caps: QpCaps {
            max_send_wr: bed::DEPTH as u32,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 16,
        },
        ..QpOptions::of(qp_type::SRD)
    };
    let (sends, receives) = (&side.send_cq, &side.recv_cq);
    let qp = Qp::new(&side.context, &side.pd, sends, receives, &options)?;
    qp.connect(&Connection::reliable_datagram(QKEY))?;
    Ok(qp)
}

/// A WRITE to the memory of the second host.
fn write(hosts: &Hosts, to: &Qp, wr_id: u64) -> SrdWqe {
    let range = (hosts.to.mr.iova, hosts.to.mr.rkey);
    Address::of(to, QKEY).reliable(wr_opcode::RDMA_WRITE, wr_id, range)
}

/// One queue pair of SRD.
struct One {
    sender: Option<Qp>,
    peers: Vec<Qp>,
}

impl One {
    fn start(hosts: &Hosts, peers: usize) -> Result<Self> {
        let peers = (0..peers).map(|_| srd(&hosts.to));
        Ok(Self {
            sender: None,
            peers: peers.collect::<Result<_>>()?,
        })
    }

    fn reach(&mut self, hosts: &Hosts) -> Result<()> {
        self.sender = Some(srd(&hosts.from)?);
        Ok(())
    }
}

impl Way for One {
    fn post(&self, hosts: &Hosts, peer: usize) -> Result<()> {
        let sender = self.sender.as_ref().context("no queue pair")?;
        let to = self.peers.get(peer).context("no such peer")?;
        let sge = hosts.from.mr.sge(0, SMALL);
        sender
            .send_queue()
            .post(&write(hosts, to, peer as u64), [sge])?;
        Ok(sender.ring()?)
    }

    fn sender(&self, _: usize) -> Option<&Qp> {
        self.sender.as_ref()
    }
}

/// A queue pair of RC for each peer.
struct All {
    senders: Vec<Qp>,
    peers: Vec<Qp>,
}

impl All {
    fn start(hosts: &Hosts, peers: usize) -> Result<Self> {
        let peers = (0..peers).map(|_| hosts.to.qp(1, 1));
        Ok(Self {
            senders: Vec::new(),
            peers: peers.collect::<Result<_>>()?,
        })
    }

    fn reach(&mut self, hosts: &Hosts) -> Result<()> {
        for peer in &self.peers {
            let qp = hosts.from.qp(4, 1)?;
            qp.connect(&bed::to_peer(peer))?;
            self.senders.push(qp);
        }
        Ok(())
    }
}

impl Way for All {
    fn finish(&self) -> Result<()> {
        for (qp, peer) in self.senders.iter().zip(&self.peers) {
            peer.connect(&bed::to_peer(qp))?;
        }
        Ok(())
    }

    fn post(&self, hosts: &Hosts, peer: usize) -> Result<()> {
        let qp = self.senders.get(peer).context("no such peer")?;
        let (mut wqe, sge) = hosts.wqe(SMALL);
        wqe.wr_id = peer as u64;
        qp.send_queue().post(&bed::signaled(wqe), [sge])?;
        Ok(qp.ring()?)
    }

    fn sender(&self, peer: usize) -> Option<&Qp> {
        self.senders.get(peer)
    }
}

/// Messages one after the other while a path loses packets: one of the four of SRD, the only one of RC.
fn latency(settings: &Settings) -> Result<Vec<Figure>> {
    let ours = Hosts::start(settings.cores, ONE_PATH, "poll_us = 0\n")?;
    let theirs = Hosts::start(settings.cores, ONLY_PATH, "poll_us = 0\n")?;
    let (sender, peer) = (srd(&ours.from)?, srd(&ours.to)?);
    let polling = ours.from.send_cq.polling();
    let sge = ours.from.mr.sge(0, SHORTEST);
    let rounds = settings.rounds();
    let mut srd = [Vec::new(), Vec::new()];
    let mut rc = [Vec::new(), Vec::new()];
    let parts = [0.5, 0.999];
    let repetitions = if settings.quick { 1 } else { 3 };
    for _ in 0..repetitions {
        let times = one_by_one(rounds, &sender, &polling, || {
            let wqe = write(&ours, &peer, 0);
            Ok(sender.send_queue().post(&wqe, [sge])?)
        })?;
        let beside = theirs.round_trips(rounds)?;
        for (at, part) in parts.iter().enumerate() {
            srd[at].push(quantile(&times, *part));
            rc[at].push(quantile(&beside, *part));
        }
    }
    let figures = ["median", "p99.9"].iter().zip(srd.iter().zip(&rc));
    let figures = figures.map(|(what, (srd, rc))| {
        let name = format!("WRITE {SHORTEST} B, {what}, one of four paths loses 1 %");
        let own = figure(SECTION, &name, "µs", Better::Lower, srd);
        own.beside("RC, whose path loses 1 %", rc)
    });
    Ok(figures.collect())
}
