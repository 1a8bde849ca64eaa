// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Between two device processes, as between hosts: RoCEv2 packets over loopback, beside UDP bursts
//! with the same copies and checksums; and what a way out costs messages that stay in a process.
//!
//! One worker sends and has one core, the other one receives and has the other core. The thread that
//! drives both VMs shares the core of whoever sends payload, who has work all the time, and sleeps most of
//! the time: one that waits for frames would not poll for them beside another thread.
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce, UdpGroSegment, UdpGsoSegment};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{mtu, wr_opcode};
use vhost_device_rdma_bare::{DeviceProcess, Polling, Qp, Vm, VmOptions};

use super::bed::{self, Pair, Side};
use super::{cache, figure, iwarp, latency, pin, quantile, settle, Cores, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "wire";
/// The longest IP packet.
pub const MTU: usize = 9000;
/// Payload of a packet, and what it has beside it, bytes.
pub const PAYLOAD: usize = 4096;
const HEADERS: usize = 14 + 20 + 8 + 12 + 16 + 4;
/// Sizes of messages.
pub const SIZES: [u32; 3] = [4096, 64 << 10, 1 << 20];
/// That of the messages which are compared with the most.
pub const LARGE: u32 = 1 << 20;
/// What else has this size, beside WRITE.
const OTHERS: [(&str, u8); 2] = [("SEND", wr_opcode::SEND), ("READ", wr_opcode::RDMA_READ)];
/// Bytes outstanding, about.
const OUTSTANDING: u32 = 64 << 20;
/// How long the thread that drives sleeps when nothing has completed: that is short beside the time of
/// what is outstanding of small messages, or of large ones. It takes the core from the sender for each.
const SLEEP: Duration = Duration::from_micros(100);
const LONG_SLEEP: Duration = Duration::from_millis(1);
/// Memory that is read and written.
pub const MEMORY: usize = 4 << 20;
/// Work requests of a list of small messages, how many are outstanding (more than are sent while the
/// thread that drives sleeps, which is on the sender's core), and their size.
pub const LIST: u64 = 32;
pub const SMALL_DEPTH: u64 = 2048;
pub const SMALL: u32 = 64;
/// Receives that are posted, each as long as the longest message: twice as many as SENDs of that length
/// are outstanding.
const RECEIVES: u32 = 2 * OUTSTANDING / LARGE;
/// Size of messages that go one after the other, and how long one may take.
pub const SHORTEST: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(5);
/// What is lost of what one end sends.
const LOSSES: [(&str, f64); 2] = [("0.1 %", 0.9), ("1 %", 0.5)];
/// Queue pairs that share a bottleneck, what each has outstanding, and the bottleneck: a rate, what may
/// wait for it, and with what a router says that it is congested.
const SHARING: usize = 16;
const EACH: u64 = 8;
const SHARED: u32 = 64 << 10;
const BOTTLENECK: &str = "rate=2G,queue=1M,mark-from=128k";
/// Queue pairs whose memory is measured.
const CONNECTED: usize = 10_000;
/// How many times more often messages that stay in a process are measured: what differs is little.
const MORE: usize = 3;
/// What large messages are compared with.
const SAME: &str = "UDP bursts with copies and CRC";
/// Packets of a burst, and bursts under way.
pub const BURST: usize = 15;
const BURSTS: usize = 32;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let mut figures = bandwidth(settings)?;
    figures.extend(round_trip_times(settings)?);
    figures.push(message_rate(settings)?);
    figures.extend(goodput(settings)?);
    figures.push(fairness(settings)?);
    figures.push(memory(settings)?);
    figures.push(beside_idle_wire(settings)?);
    Ok(figures)
}

fn bandwidth(settings: &Settings) -> Result<Vec<Figure>> {
    let hosts = Hosts::start(settings.cores, "", "")?;
    let mut writes = [const { Vec::new() }; SIZES.len()];
    let mut others = [const { Vec::new() }; OTHERS.len()];
    let (mut same, mut bare, mut tcp) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        same.push(bursts(settings, true)?);
        for (size, runs) in SIZES.iter().zip(&mut writes) {
            runs.push(hosts.write(*size, settings)?);
        }
        for ((_, opcode), runs) in OTHERS.iter().zip(&mut others) {
            runs.push(hosts.transfer(*opcode, LARGE, settings)?);
        }
        bare.push(bursts(settings, false)?);
        tcp.push(iwarp::stream(
            settings,
            iwarp::ends()?,
            iwarp::AT_ONCE,
            false,
        )?);
    }
    let own = |verb: &str, size: u32, runs: &[f64]| {
        let name = format!("{verb}, 4 KiB packets between two processes");
        figure(SECTION, &name, "GB/s", Better::Higher, runs).at(f64::from(size))
    };
    let mut figures = Vec::new();
    for (size, runs) in SIZES.iter().zip(&writes) {
        let own = own("WRITE", *size, runs);
        let beside = own.clone().beside(SAME, &same);
        if *size != LARGE {
            figures.push(beside);
            continue;
        }
        figures.push(beside.target(Target::Min(0.75)));
        let beside = own
            .clone()
            .beside("UDP bursts without copies and CRC", &bare);
        figures.push(beside.target(Target::Min(0.5)));
        figures.push(own.beside("a TCP stream, 1 MiB at once", &tcp));
    }
    for ((verb, _), runs) in OTHERS.iter().zip(&others) {
        let beside = own(verb, LARGE, runs).beside(SAME, &same);
        figures.push(beside.target(Target::Min(0.75)));
    }
    Ok(figures)
}

/// The shortest messages one after the other, beside packets of their length to and fro. Where the driver
/// shares the core with a worker, nobody can poll: all sleep until something comes, at both.
fn round_trip_times(settings: &Settings) -> Result<Vec<Figure>> {
    const VERBS: [(&str, u8); 2] = [("WRITE", wr_opcode::RDMA_WRITE), ("SEND", wr_opcode::SEND)];
    let hosts = Hosts::start(settings.cores, "", "poll_us = 0\n")?;
    let rounds = settings.rounds();
    let mut ours = [const { Vec::new() }; VERBS.len()];
    let mut raw = Vec::new();
    for _ in 0..settings.repetitions() {
        raw.push(quantile(&round_trips(settings, rounds)?, 0.5));
        for ((_, opcode), runs) in VERBS.iter().zip(&mut ours) {
            runs.push(quantile(&hosts.round_trips_of(*opcode, rounds)?, 0.5));
        }
    }
    let figures = VERBS.iter().zip(&ours).map(|((verb, _), runs)| {
        let name = format!("{verb} {SHORTEST} B, post to completion, between two processes");
        let own = figure(SECTION, &name, "µs", Better::Lower, runs);
        let beside = own.beside("UDP packets to and fro", &raw);
        beside.target(Target::Max(1.5))
    });
    Ok(figures.collect())
}

/// The shortest messages between VMs of a process that has a way out which nothing goes over, beside those
/// of a process that has none.
fn beside_idle_wire(settings: &Settings) -> Result<Figure> {
    let (_with, with) = local(settings.cores, true)?;
    let (_without, without) = local(settings.cores, false)?;
    let pairs = [with, without];
    let mut runs = [const { Vec::new() }; 2];
    for repetition in 0..settings.repetitions() * MORE {
        // Neither is always the first.
        let order = if repetition % 2 == 0 { [0, 1] } else { [1, 0] };
        let values = cache::steady(settings.cores, || {
            let mut values = [0.0; 2];
            for which in order {
                settle();
                let times = latency::post_to_completion(
                    &pairs[which],
                    wr_opcode::RDMA_WRITE,
                    settings.rounds(),
                )?;
                values[which] = quantile(&times, 0.5);
            }
            Ok(values)
        })?;
        for (runs, value) in runs.iter_mut().zip(values) {
            runs.push(value);
        }
    }
    let [own, peer] = &runs;
    let name = format!("WRITE {SHORTEST} B, post to completion, in a process with an idle wire");
    let own = figure(SECTION, &name, "µs", Better::Lower, own);
    let beside = own.beside("without a wire", peer);
    Ok(beside.target(Target::Max(1.02)))
}

/// A process with two VMs that are connected in it, with a way out or without.
fn local(cores: Cores, wire: bool) -> Result<(DeviceProcess, Pair)> {
    let free = || UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let (own, other) = (free()?, free()?);
    let [way_out, network] = if wire {
        let way_out = format!(
            "[wire]\naddress = '{own}'\n\
             [[wire.host]]\naddress = '{other}'\ngids = ['10.0.1.0/24']\n"
        );
        [way_out, "vni = 7\n".to_owned()]
    } else {
        [String::new(), String::new()]
    };
    let sockets = [1, 2].map(|vm| (vm, socket()));
    let devices = sockets.each_ref().map(|(vm, socket)| {
        format!(
            "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:02:0{vm}'\n{network}",
            socket.display()
        )
    });
    let process = bed::device(cores, 0, &(way_out + &devices.concat()))?;
    let [a, b] = sockets.map(|(vm, socket)| host_vm(vm, &socket, 64 << 20));
    Ok((process, Pair::new(&a?, &b?, 1 << 20)?))
}

/// A VM with address 10.0.0.`number`.
fn host_vm(number: u8, socket: &Path, memory: usize) -> Result<Arc<Vm>> {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, number]);
    let options = VmOptions {
        memory,
        gid: Some(gid),
        features: 1 << feature::SRD,
        ..VmOptions::default()
    };
    let vm = Vm::connect(socket, options)?;
    // Who has connected needs it no longer.
    std::fs::remove_file(socket)?;
    Ok(vm)
}

/// Small messages in lists, beside packets that go one by one.
fn message_rate(settings: &Settings) -> Result<Figure> {
    let hosts = Hosts::start(settings.cores, "", "")?;
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        raw.push(singles(settings)?);
        ours.push(hosts.rate(SMALL, LIST, SMALL_DEPTH, settings)?);
    }
    let name = format!("WRITE {SMALL} B in lists of {LIST}, between two processes");
    let own = figure(SECTION, &name, "million/s", Better::Higher, &ours);
    let beside = own.beside("UDP packets one by one", &raw);
    Ok(beside.target(Target::Min(5.0)))
}

/// What arrives when packets are lost, beside what does when none is.
fn goodput(settings: &Settings) -> Result<Vec<Figure>> {
    let clean = Hosts::start(settings.cores, "", "")?;
    let mut figures = Vec::new();
    for (loss, least) in LOSSES {
        let part = loss.replace(' ', "");
        let lossy = Hosts::start(settings.cores, &format!("seed=1,loss={part}"), "")?;
        let (mut all, mut some) = (Vec::new(), Vec::new());
        for _ in 0..settings.repetitions() {
            all.push(clean.write(1 << 20, settings)?);
            some.push(lossy.write(1 << 20, settings)?);
        }
        let name = format!("WRITE 1 MiB, {loss} of the packets lost");
        let own = figure(SECTION, &name, "GB/s", Better::Higher, &some);
        figures.push(own.beside("none lost", &all).target(Target::Min(least)));
    }
    Ok(figures)
}

/// How even queue pairs share a bottleneck: 1 if all get the same, 1/n if one of n gets all.
fn fairness(settings: &Settings) -> Result<Figure> {
    let hosts = Hosts::start(settings.cores, BOTTLENECK, "")?;
    let pairs = (0..SHARING).map(|_| hosts.pair(2 * EACH as u32));
    let pairs: Vec<_> = pairs.collect::<Result<_>>()?;
    let mut runs = Vec::new();
    for _ in 0..settings.repetitions() {
        let shares = hosts.share(&pairs, 10 * settings.time())?;
        let sum: f64 = shares.iter().sum();
        let squares: f64 = shares.iter().map(|share| share * share).sum();
        runs.push(sum * sum / (squares * shares.len() as f64));
    }
    let name = format!("fairness of {SHARING} queue pairs at a bottleneck (Jain's index)");
    let own = figure(SECTION, &name, "", Better::Higher, &runs);
    Ok(own.target(Target::Min(0.9)))
}

/// What a process keeps of a connected queue pair that has sent a message.
fn memory(settings: &Settings) -> Result<Figure> {
    let hosts = Hosts::start(settings.cores, "", "")?;
    let count = if settings.quick {
        CONNECTED / 10
    } else {
        CONNECTED
    };
    let before = hosts.resident()?;
    let mut pairs = Vec::new();
    let polling = hosts.from.send_cq.polling();
    for _ in 0..count {
        let pair = hosts.pair(1)?;
        let (wqe, sge) = hosts.wqe(SMALL);
        bed::round(&polling, &pair[0], &bed::signaled(wqe), sge)?;
        pairs.push(pair);
    }
    let each = (hosts.resident()? - before) / count as f64;
    let name = format!("memory of each of {count} connected queue pairs that have sent");
    Ok(figure(SECTION, &name, "KiB", Better::Lower, &[each]))
}

/// Two processes, with a VM each.
pub struct Hosts {
    // Dropped in this order.
    qps: [Qp; 2],
    /// The first host, which sends.
    pub from: Side,
    /// The second.
    pub to: Side,
    processes: [DeviceProcess; 2],
}

impl Hosts {
    /// What the first one sends has these faults. `more` is in the configuration of both.
    pub fn start(cores: Cores, faults: &str, more: &str) -> Result<Self> {
        let free = || UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let [a, b] = [free()?, free()?];
        let port = |local, remote, faults: &str| {
            let faults = match faults {
                "" => String::new(),
                faults => format!("faults = {{ out = '{faults}' }}\n"),
            };
            format!(
                "mac = '52:54:00:00:02:01'\n\
                 dgram = {{ local = '{local}', remote = '{remote}', mtu = {MTU} }}\n{faults}"
            )
        };
        Self::between([
            process(cores, cores.driver, more, &port(a, b, faults))?,
            process(cores, cores.worker, more, &port(b, a, ""))?,
        ])
    }

    /// Those whose processes these are, each with the socket of its VM.
    pub fn between(started: [(DeviceProcess, PathBuf); 2]) -> Result<Self> {
        let vm = |number, socket: &Path| host_vm(number, socket, 512 << 20);
        let from = Side::new(&vm(1, &started[0].1)?, MEMORY)?;
        let to = Side::new(&vm(2, &started[1].1)?, MEMORY)?;
        let queue = SMALL_DEPTH as u32;
        let qps = [from.qp(queue, queue)?, to.qp(queue, queue)?];
        connect(&qps)?;
        let processes = started.map(|(process, _)| process);
        let hosts = Self::of(from, to, qps, processes);
        (0..RECEIVES).try_for_each(|_| hosts.post_receive())?;
        Ok(hosts)
    }

    /// Two processes whose queue pairs are connected.
    pub fn of(from: Side, to: Side, qps: [Qp; 2], processes: [DeviceProcess; 2]) -> Self {
        Self {
            from,
            to,
            qps,
            processes,
        }
    }

    /// What the first process keeps in memory of its own, KiB.
    pub fn resident(&self) -> Result<f64> {
        let [process, _] = &self.processes;
        let path = format!("/proc/{}/status", process.id());
        let status = std::fs::read_to_string(path)?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
        Ok(kib.context("no RssAnon")?.trim().parse()?)
    }

    /// Another two queue pairs, which are connected, with a send queue of so many entries.
    fn pair(&self, send: u32) -> Result<[Qp; 2]> {
        let qps = [self.from.qp(send, 0)?, self.to.qp(1, 0)?];
        connect(&qps)?;
        Ok(qps)
    }

    /// Posts a receive to the second host's queue pair.
    fn post_receive(&self) -> Result<()> {
        self.qps[1].post_recv(0, &[self.to.mr.sge(0, LARGE)])?;
        Ok(())
    }

    /// Takes what has completed of the second host's receives, and posts as many again.
    fn receive(&self, polling: &Polling<'_>) -> Result<()> {
        while let Some(cqe) = polling.poll() {
            ensure!(cqe.status == 0, "a receive with status {}", cqe.status);
            self.qps[1].recv_queue().complete(cqe.wqe_index);
            self.post_receive()?;
        }
        polling.publish();
        Ok(())
    }

    /// A WRITE of so many bytes.
    pub fn wqe(&self, size: u32) -> (SendWqe, Sge) {
        wqe(wr_opcode::RDMA_WRITE, &self.from, &self.to, size)
    }

    /// The end that posts work requests of this opcode, and the other one. The first host sends payload,
    /// whoever asks for it, as what all is compared with does: pages that the system takes for it on
    /// another core may be slower.
    fn ends(&self, opcode: u8) -> [(&Side, &Qp); 2] {
        let [first, second] = &self.qps;
        let (from, to) = ((&self.from, first), (&self.to, second));
        if opcode == wr_opcode::RDMA_READ {
            [to, from]
        } else {
            [from, to]
        }
    }

    /// Sorted times of WRITEs of the shortest size one after the other, µs.
    pub fn round_trips(&self, rounds: usize) -> Result<Vec<f64>> {
        self.round_trips_of(wr_opcode::RDMA_WRITE, rounds)
    }

    /// The same of another opcode.
    pub fn round_trips_of(&self, opcode: u8, rounds: usize) -> Result<Vec<f64>> {
        let polling = self.from.send_cq.polling();
        let received = self.to.recv_cq.polling();
        let (wqe, sge) = wqe(opcode, &self.from, &self.to, SHORTEST);
        let wqe = bed::signaled(wqe);
        let qp = &self.qps[0];
        one_by_one(rounds, qp, &polling, || {
            self.receive(&received)?;
            Ok(qp.send_queue().post(&wqe, [sge])?)
        })
    }

    /// How many messages of each pair arrive in a time, when all have as many outstanding.
    fn share(&self, pairs: &[[Qp; 2]], time: Duration) -> Result<Vec<f64>> {
        let polling = self.from.send_cq.polling();
        let mut outstanding = 0u64;
        let mut counts = vec![0.0; pairs.len()];
        let post = |number: usize| -> Result<()> {
            let [qp, _] = pairs.get(number).context("no such queue pair")?;
            let (wqe, sge) = self.wqe(SHARED);
            let wqe = bed::signaled(SendWqe {
                wr_id: number as u64,
                ..wqe
            });
            qp.send_queue().post(&wqe, [sge])?;
            Ok(qp.ring()?)
        };
        for number in 0..pairs.len() {
            for _ in 0..EACH {
                post(number)?;
                outstanding += 1;
            }
        }
        let begin = Instant::now();
        while outstanding != 0 {
            let Some(cqe) = polling.poll() else {
                ensure!(begin.elapsed() < 20 * time, "completions do not come");
                std::thread::sleep(SLEEP);
                continue;
            };
            polling.publish();
            ensure!(cqe.status == 0, "a completion with status {}", cqe.status);
            outstanding -= 1;
            let number = usize::try_from(cqe.wr_id)?;
            let [qp, _] = pairs.get(number).context("no such queue pair")?;
            qp.send_queue().complete(cqe.wqe_index);
            let elapsed = begin.elapsed();
            // The first fifth is for finding the rate.
            if elapsed < time + time / 5 {
                post(number)?;
                outstanding += 1;
                if elapsed >= time / 5 {
                    *counts.get_mut(number).context("no such queue pair")? += 1.0;
                }
            }
        }
        Ok(counts)
    }

    /// GB/s of WRITEs.
    pub fn write(&self, size: u32, settings: &Settings) -> Result<f64> {
        self.transfer(wr_opcode::RDMA_WRITE, size, settings)
    }

    /// The same of another opcode.
    pub fn transfer(&self, opcode: u8, size: u32, settings: &Settings) -> Result<f64> {
        let list = if size <= 4096 { 32 } else { 1 };
        let depth = u64::from(OUTSTANDING / size).clamp(2, bed::DEPTH);
        let millions = self.rate_of(opcode, size, list, depth, settings)?;
        Ok(millions * f64::from(size) / 1e3)
    }

    /// Millions of WRITEs per second, in lists, with so many outstanding.
    pub fn rate(&self, size: u32, list: u64, depth: u64, settings: &Settings) -> Result<f64> {
        self.rate_of(wr_opcode::RDMA_WRITE, size, list, depth, settings)
    }

    /// The same of another opcode.
    fn rate_of(
        &self,
        opcode: u8,
        size: u32,
        list: u64,
        depth: u64,
        settings: &Settings,
    ) -> Result<f64> {
        let [(own, qp), (other, _)] = self.ends(opcode);
        let mut polling = own.send_cq.polling();
        let received = self.to.recv_cq.polling();
        let (wqe, sge) = wqe(opcode, own, other, size);
        let sleep = if size > 4096 { LONG_SLEEP } else { SLEEP };
        bed::measure_rate_of(
            &mut polling,
            list,
            depth,
            4 * settings.time(),
            |_| bed::post_list(qp, list, || (wqe, sge)),
            |polling| {
                self.receive(&received)?;
                let lists = bed::poll_lists(polling, |_| Some(qp))?;
                if lists == 0 {
                    std::thread::sleep(sleep);
                }
                Ok(lists * list)
            },
        )
    }
}

/// A work request of so many bytes, posted at `own`.
fn wqe(opcode: u8, own: &Side, other: &Side, size: u32) -> (SendWqe, Sge) {
    let wqe = SendWqe {
        opcode,
        remote_addr: other.mr.iova,
        rkey: other.mr.rkey,
        ..SendWqe::default()
    };
    (wqe, own.mr.sge(0, size))
}

/// Sorted times of work requests one after the other, from posting to completion, µs. `post` posts one.
pub fn one_by_one(
    rounds: usize,
    qp: &Qp,
    polling: &Polling<'_>,
    post: impl Fn() -> Result<()>,
) -> Result<Vec<f64>> {
    sorted_times(rounds, || {
        let begin = Instant::now();
        post()?;
        qp.ring()?;
        let cqe = loop {
            if let Some(cqe) = polling.poll() {
                break cqe;
            }
            ensure!(begin.elapsed() < PATIENCE, "no completion");
            // The worker has this core, too.
            std::thread::yield_now();
        };
        polling.publish();
        ensure!(cqe.status == 0, "a completion with status {}", cqe.status);
        qp.send_queue().complete(cqe.wqe_index);
        Ok(())
    })
}

/// Connects two queue pairs, with the largest packets.
fn connect([first, second]: &[Qp; 2]) -> Result<()> {
    for (qp, peer) in [(first, second), (second, first)] {
        let mut connection = bed::to_peer(peer);
        connection.path_mtu = mtu::MTU_4096;
        qp.connect(&connection)?;
    }
    Ok(())
}

/// Sockets so far.
static SOCKETS: AtomicU32 = AtomicU32::new(0);

/// Where the socket of a VM is.
fn socket() -> PathBuf {
    let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
    let name = format!("virtio-rdma-bench-wire-{}-{number}", std::process::id());
    std::env::temp_dir().join(name)
}

/// A process whose worker has this core, and the socket of its VM. `more` is in the configuration, and
/// `port` says of the device how its packets leave.
pub fn process(
    cores: Cores,
    core: usize,
    more: &str,
    port: &str,
) -> Result<(DeviceProcess, PathBuf)> {
    let socket = socket();
    let on = Cores {
        worker: core,
        ..cores
    };
    let device = format!("{more}[[device]]\nsocket = '{}'\n{port}", socket.display());
    Ok((bed::device(on, 0, &device)?, socket))
}

/// GB/s of what packets would carry, by UDP with the system's segmentation. With `copies`, payloads are
/// copied from memory to bursts, and from bursts to memory, and a checksum of each is computed at both
/// ends.
fn bursts(settings: &Settings, copies: bool) -> Result<f64> {
    let Cores { driver, worker } = settings.cores;
    let [sender, receiver] = [udp()?, udp()?];
    sender.connect(receiver.local_addr()?)?;
    receiver.connect(sender.local_addr()?)?;
    setsockopt(&sender, UdpGsoSegment, &i32::try_from(PAYLOAD + HEADERS)?)?;
    setsockopt(&receiver, UdpGroSegment, &true)?;
    let time = 4 * settings.time();
    settle();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || {
            pin(&[worker])?;
            receive(&receiver, copies)
        });
        pin(&[driver])?;
        let rate = send(&sender, time, copies);
        // An empty datagram ends it.
        sender.send(&[])?;
        end.join().map_err(|_| anyhow!("a thread panicked"))??;
        rate
    })
}

/// Millions of packets per second that go one by one from a socket to another one, as small ones of
/// ours, and are answered now and then.
fn singles(settings: &Settings) -> Result<f64> {
    let Cores { driver, worker } = settings.cores;
    let [sender, receiver] = [udp()?, udp()?];
    sender.connect(receiver.local_addr()?)?;
    receiver.connect(sender.local_addr()?)?;
    let time = 4 * settings.time();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || -> Result<()> {
            pin(&[worker])?;
            let mut packet = [0; 256];
            let mut packets = 0;
            while receiver.recv(&mut packet)? != 0 {
                packets += 1;
                if packets % BURST == 0 {
                    receiver.send(&[1])?;
                }
            }
            Ok(())
        });
        pin(&[driver])?;
        let packet = [1; SMALL as usize + HEADERS];
        let burst = || (0..BURST).try_for_each(|_| sender.send(&packet).map(drop));
        let rate = burst_rate(time, || Ok(burst()?), || wait(&sender))?;
        // An empty datagram ends it.
        sender.send(&[])?;
        end.join().map_err(|_| anyhow!("a thread panicked"))??;
        Ok(rate * BURST as f64 / 1e6)
    })
}

/// Sorted times, µs, of packets that go from a socket to another one and back, each behind the last one.
fn round_trips(settings: &Settings, rounds: usize) -> Result<Vec<f64>> {
    let Cores { driver, worker } = settings.cores;
    let [sender, receiver] = [udp()?, udp()?];
    sender.connect(receiver.local_addr()?)?;
    receiver.connect(sender.local_addr()?)?;
    std::thread::scope(|scope| {
        let end = scope.spawn(move || -> Result<()> {
            pin(&[worker])?;
            let mut packet = [0; 256];
            while receiver.recv(&mut packet)? != 0 {
                receiver.send(&[1; HEADERS])?;
            }
            Ok(())
        });
        pin(&[driver])?;
        let packet = [1; SHORTEST as usize + HEADERS];
        let times = sorted_times(rounds, || {
            sender.send(&packet)?;
            sender.recv(&mut [0; 256])?;
            Ok(())
        });
        // An empty datagram ends it.
        sender.send(&[])?;
        end.join().map_err(|_| anyhow!("a thread panicked"))??;
        times
    })
}

/// How long each of so many rounds takes, µs, sorted, after some that do not count.
pub fn sorted_times(rounds: usize, mut run: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + rounds / 4 {
        let begin = Instant::now();
        run()?;
        if round >= rounds / 4 {
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

fn udp() -> Result<UdpSocket> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    if setsockopt(&socket, RcvBufForce, &(8 << 20)).is_err() {
        setsockopt(&socket, RcvBuf, &(8 << 20))?;
    }
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(socket)
}

/// Sends bursts for a while, each answered when it has come; GB/s of payload.
fn send(socket: &UdpSocket, time: Duration, copies: bool) -> Result<f64> {
    let memory = vec![1; MEMORY];
    let mut burst = vec![0; BURST * (PAYLOAD + HEADERS)];
    let mut sources = memory.chunks_exact(PAYLOAD).cycle();
    let next = || {
        let packets = burst.chunks_exact_mut(PAYLOAD + HEADERS);
        for packet in packets.filter(|_| copies) {
            let source = sources.next().context("no memory")?;
            let (_, payload) = packet.split_at_mut(HEADERS - 4);
            let (payload, crc) = payload.split_at_mut(PAYLOAD);
            payload.copy_from_slice(source);
            crc.copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
        }
        socket.send(&burst)?;
        Ok(())
    };
    let rate = burst_rate(time, next, || wait(socket))?;
    Ok(rate * (BURST * PAYLOAD) as f64 / 1e9)
}

/// Waits for the answer to a burst.
fn wait(socket: &UdpSocket) -> Result<()> {
    socket.recv(&mut [0; 8])?;
    Ok(())
}

/// Bursts per second that `send` sends and `wait` gets the answers to, with [`BURSTS`] under way. In the end
/// all are answered.
pub fn burst_rate(
    time: Duration,
    mut send: impl FnMut() -> Result<()>,
    mut wait: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let (mut sent, mut answered) = (0usize, 0usize);
    let begin = Instant::now();
    let mut start = None;
    loop {
        send()?;
        sent += 1;
        while sent - answered >= BURSTS {
            wait()?;
            answered += 1;
        }
        let now = Instant::now();
        match start {
            None if now - begin >= time / 5 => start = Some((now, answered)),
            Some((from, before)) if now - begin >= time + time / 5 => {
                let rate = (answered - before) as f64 / (now - from).as_secs_f64();
                (answered..sent).try_for_each(|_| wait())?;
                return Ok(rate);
            }
            _ => {}
        }
    }
}

/// Receives bursts until an empty datagram comes, and answers each.
fn receive(socket: &UdpSocket, copies: bool) -> Result<()> {
    let mut memory = vec![0; MEMORY];
    let mut burst = vec![0; 1 << 16];
    let (mut at, mut packets) = (0, 0);
    loop {
        let count = socket.recv(&mut burst)?;
        if count == 0 {
            return Ok(());
        }
        for packet in burst[..count].chunks_exact(PAYLOAD + HEADERS) {
            if copies {
                let payload = &packet[HEADERS - 4..HEADERS - 4 + PAYLOAD];
                let crc = crc32fast::hash(payload).to_le_bytes();
                ensure!(
                    packet[HEADERS - 4 + PAYLOAD..] == crc,
                    "a packet is damaged"
                );
                memory[at..at + PAYLOAD].copy_from_slice(payload);
                at = (at + PAYLOAD) % MEMORY;
            }
            packets += 1;
            if packets % BURST == 0 {
                socket.send(&[1])?;
            }
        }
    }
}
