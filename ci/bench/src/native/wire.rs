// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Between two device processes, as between hosts: RoCEv2 packets over loopback, beside UDP bursts
//! with the same copies and checksums.
//!
//! One worker sends and has one core, the other one receives and has the other core. The thread that
//! drives both VMs shares the sender's core, and sleeps most of the time.
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce, UdpGroSegment, UdpGsoSegment};
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{mtu, wr_opcode};
use vhost_device_rdma_bare::{DeviceProcess, Qp, Vm, VmOptions};

use super::bed::{self, Side};
use super::{figure, pin, Cores, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "wire";
/// The longest IP packet.
const MTU: usize = 9000;
/// Payload of a packet, and what it has beside it, bytes.
const PAYLOAD: usize = 4096;
const HEADERS: usize = 14 + 20 + 8 + 12 + 16 + 4;
/// Sizes of messages.
const SIZES: [u32; 3] = [4096, 64 << 10, 1 << 20];
/// Bytes outstanding, about.
const OUTSTANDING: u32 = 8 << 20;
/// How long the thread that drives sleeps when nothing has completed.
const SLEEP: Duration = Duration::from_micros(100);
/// Memory that is read and written.
const MEMORY: usize = 4 << 20;
/// Packets of a burst, and bursts under way.
const BURST: usize = 15;
const BURSTS: usize = 32;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let hosts = Hosts::start(settings.cores)?;
    let mut ours = [const { Vec::new() }; SIZES.len()];
    let mut raw = Vec::new();
    for _ in 0..settings.repetitions() {
        raw.push(bursts(settings)?);
        for (size, runs) in SIZES.iter().zip(&mut ours) {
            runs.push(hosts.write(*size, settings)?);
        }
    }
    let mut figures = Vec::new();
    for (size, runs) in SIZES.iter().zip(&ours) {
        let name = "WRITE, 4 KiB packets between two processes";
        let own = figure(SECTION, name, "GB/s", Better::Higher, runs).at(f64::from(*size));
        let beside = own.beside("UDP bursts with copies and CRC", &raw);
        figures.push(if *size == 1 << 20 {
            beside.target(Target::Min(0.75))
        } else {
            beside
        });
    }
    Ok(figures)
}

/// Two processes, with a VM each.
struct Hosts {
    // Dropped in this order.
    qps: [Qp; 2],
    from: Side,
    to: Side,
    _processes: [DeviceProcess; 2],
}

impl Hosts {
    fn start(cores: Cores) -> Result<Self> {
        let free = || UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let [a, b] = [free()?, free()?];
        let started = [
            process(cores, cores.driver, a, b)?,
            process(cores, cores.worker, b, a)?,
        ];
        let vm = |number: u8, socket: &Path| -> Result<Arc<Vm>> {
            let mut gid = [0; 16];
            gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, number]);
            let options = VmOptions {
                memory: 64 << 20,
                gid: Some(gid),
                ..VmOptions::default()
            };
            Ok(Vm::connect(socket, options)?)
        };
        let from = Side::new(&vm(1, &started[0].1)?, MEMORY)?;
        let to = Side::new(&vm(2, &started[1].1)?, MEMORY)?;
        let queue = bed::DEPTH as u32;
        let qps = [from.qp(queue, queue)?, to.qp(queue, queue)?];
        let [first, second] = &qps;
        for (qp, peer) in [(first, second), (second, first)] {
            let mut connection = bed::to_peer(peer);
            connection.path_mtu = mtu::MTU_4096;
            qp.connect(&connection)?;
        }
        Ok(Self {
            from,
            to,
            qps,
            _processes: started.map(|(process, _)| process),
        })
    }

    /// GB/s of WRITEs.
    fn write(&self, size: u32, settings: &Settings) -> Result<f64> {
        let list = if size <= 4096 { 32 } else { 1 };
        let depth = u64::from(OUTSTANDING / size).clamp(2, bed::DEPTH);
        let mut polling = self.from.send_cq.polling();
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: self.to.mr.iova,
            rkey: self.to.mr.rkey,
            ..SendWqe::default()
        };
        let (qp, sge) = (&self.qps[0], self.from.mr.sge(0, size));
        let millions = bed::measure_rate_of(
            &mut polling,
            list,
            depth,
            4 * settings.time(),
            |_| bed::post_list(qp, list, || (wqe, sge)),
            |polling| {
                let lists = bed::poll_lists(polling, |_| Some(qp))?;
                if lists == 0 {
                    std::thread::sleep(SLEEP);
                }
                Ok(lists * list)
            },
        )?;
        Ok(millions * f64::from(size) / 1e3)
    }
}

/// A process whose worker has this core, and the socket of its VM.
fn process(
    cores: Cores,
    core: usize,
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<(DeviceProcess, PathBuf)> {
    let name = format!("virtio-rdma-bench-wire-{}-{core}", std::process::id());
    let socket = std::env::temp_dir().join(name);
    let on = Cores {
        worker: core,
        ..cores
    };
    let device = format!(
        "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:02:01'\n\
         dgram = {{ local = '{local}', remote = '{remote}', mtu = {MTU} }}\n",
        socket.display()
    );
    Ok((bed::device(on, 0, &device)?, socket))
}

/// GB/s of what packets would carry, by UDP with the system's segmentation: payloads are copied
/// from memory to bursts, and from bursts to memory, and a checksum of each is computed at both ends.
fn bursts(settings: &Settings) -> Result<f64> {
    let Cores { driver, worker } = settings.cores;
    let [sender, receiver] = [udp()?, udp()?];
    sender.connect(receiver.local_addr()?)?;
    receiver.connect(sender.local_addr()?)?;
    setsockopt(&sender, UdpGsoSegment, &i32::try_from(PAYLOAD + HEADERS)?)?;
    setsockopt(&receiver, UdpGroSegment, &true)?;
    let time = 4 * settings.time();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || {
            pin(&[worker])?;
            receive(&receiver)
        });
        pin(&[driver])?;
        let rate = send(&sender, time);
        // An empty datagram ends it.
        sender.send(&[])?;
        end.join().map_err(|_| anyhow!("a thread panicked"))??;
        rate
    })
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
fn send(socket: &UdpSocket, time: Duration) -> Result<f64> {
    let memory = vec![1; MEMORY];
    let mut burst = vec![0; BURST * (PAYLOAD + HEADERS)];
    let mut sources = memory.chunks_exact(PAYLOAD).cycle();
    let (mut sent, mut answered) = (0usize, 0usize);
    let begin = Instant::now();
    let mut start = None;
    loop {
        for packet in burst.chunks_exact_mut(PAYLOAD + HEADERS) {
            let source = sources.next().context("no memory")?;
            let (_, payload) = packet.split_at_mut(HEADERS - 4);
            let (payload, crc) = payload.split_at_mut(PAYLOAD);
            payload.copy_from_slice(source);
            crc.copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
        }
        socket.send(&burst)?;
        sent += 1;
        while sent - answered >= BURSTS {
            socket.recv(&mut [0; 8])?;
            answered += 1;
        }
        let now = Instant::now();
        match start {
            None if now - begin >= time / 5 => start = Some((now, answered)),
            Some((from, before)) if now - begin >= time + time / 5 => {
                let bytes = (answered - before) * BURST * PAYLOAD;
                while answered < sent {
                    socket.recv(&mut [0; 8])?;
                    answered += 1;
                }
                return Ok(bytes as f64 / (now - from).as_secs_f64() / 1e9);
            }
            _ => {}
        }
    }
}

/// Receives bursts until an empty datagram comes, and answers each.
fn receive(socket: &UdpSocket) -> Result<()> {
    let mut memory = vec![0; MEMORY];
    let mut burst = vec![0; 1 << 16];
    let (mut at, mut packets) = (0, 0);
    loop {
        let count = socket.recv(&mut burst)?;
        if count == 0 {
            return Ok(());
        }
        for packet in burst[..count].chunks_exact(PAYLOAD + HEADERS) {
            let payload = &packet[HEADERS - 4..HEADERS - 4 + PAYLOAD];
            let crc = crc32fast::hash(payload).to_le_bytes();
            ensure!(
                packet[HEADERS - 4 + PAYLOAD..] == crc,
                "a packet is damaged"
            );
            memory[at..at + PAYLOAD].copy_from_slice(payload);
            at = (at + PAYLOAD) % MEMORY;
            packets += 1;
            if packets % BURST == 0 {
                socket.send(&[1])?;
            }
        }
    }
}
