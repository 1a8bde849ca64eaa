// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! iWARP between two device processes: connections of TCP over loopback, beside TCP streams with the
//! same copies and checksums. The cores are shared as in the section *wire*.
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::core::command::{IwAccept, IwConnect, IwListen, IwNextEvent};
use vhost_device_rdma_bare::spec::command::QpAttr;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::iwarp::{self, iw_event, IwEndpoint, IwEvent};
use vhost_device_rdma_bare::spec::verbs::{qp_attr, qp_state, qp_type, wr_opcode};
use vhost_device_rdma_bare::{DeviceProcess, Qp, QpOptions, Vm, VmOptions};

use super::bed::{self, Side};
use super::wire::{sorted_times, Hosts, LIST, MEMORY, SHORTEST, SIZES, SMALL, SMALL_DEPTH};
use super::{figure, pin, quantile, settle, Cores, Settings};
use crate::figure::{Better, Figure, Target};

const SECTION: &str = "iWARP";
/// The port at which the second VM listens.
const PORT: u16 = 7471;
/// How long a connection may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that go by one call.
pub const AT_ONCE: usize = 1 << 20;
/// Payload that has one checksum, about that of an FPDU over loopback.
const CHUNK: usize = 64 << 10;
/// What an FPDU of a short message has beside it, bytes.
const HEADERS: usize = 2 + 14 + 4;

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let mut figures = bandwidth(settings)?;
    figures.push(latency(settings)?);
    figures.push(message_rate(settings)?);
    Ok(figures)
}

fn bandwidth(settings: &Settings) -> Result<Vec<Figure>> {
    let hosts = start(settings.cores, "")?;
    let mut ours = [const { Vec::new() }; SIZES.len()];
    let (mut same, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        same.push(stream(settings, ends()?, AT_ONCE, true)?);
        bare.push(stream(settings, ends()?, AT_ONCE, false)?);
        for (size, runs) in SIZES.iter().zip(&mut ours) {
            runs.push(hosts.write(*size, settings)?);
        }
    }
    let mut figures = Vec::new();
    for (size, runs) in SIZES.iter().zip(&ours) {
        let name = "WRITE over TCP between two processes";
        let own = figure(SECTION, name, "GB/s", Better::Higher, runs).at(f64::from(*size));
        let beside = own.beside("a TCP stream with the same copies and CRC", &same);
        figures.push(if *size == 1 << 20 {
            beside.target(Target::Min(0.7))
        } else {
            beside
        });
    }
    if let Some(runs) = ours.last() {
        let name = "WRITE 1 MiB over TCP, beside no copies but the system's";
        let own = figure(SECTION, name, "GB/s", Better::Higher, runs);
        figures.push(own.beside("a TCP stream without copies and CRC", &bare));
    }
    Ok(figures)
}

/// The shortest READs one after the other, beside as many bytes to and fro.
fn latency(settings: &Settings) -> Result<Figure> {
    let hosts = start(settings.cores, "poll_us = 0\n")?;
    let rounds = settings.rounds();
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        raw.push(quantile(&round_trips(settings, rounds)?, 0.5));
        let times = hosts.round_trips_of(wr_opcode::RDMA_READ, rounds)?;
        ours.push(quantile(&times, 0.5));
    }
    let name = format!("READ {SHORTEST} B, post to completion, between two processes");
    let own = figure(SECTION, &name, "µs", Better::Lower, &ours);
    Ok(own.beside("TCP to and fro", &raw))
}

/// Small messages in lists, beside as many bytes that are sent and received one by one.
fn message_rate(settings: &Settings) -> Result<Figure> {
    let hosts = start(settings.cores, "")?;
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        raw.push(singles(settings)?);
        ours.push(hosts.rate(SMALL, LIST, SMALL_DEPTH, settings)?);
    }
    let name = format!("WRITE {SMALL} B in lists of {LIST}, between two processes");
    let own = figure(SECTION, &name, "million/s", Better::Higher, &ours);
    Ok(own.beside("TCP, a call for each", &raw))
}

/// Processes so far: each has addresses of its own.
static PROCESSES: AtomicU32 = AtomicU32::new(0);

/// Two processes with a VM each, which are connected. `more` is in the configuration of both.
fn start(cores: Cores, more: &str) -> Result<Hosts> {
    let number = PROCESSES.fetch_add(1, Ordering::Relaxed);
    let [low, high, ..] = std::process::id().to_le_bytes();
    let at = |vm: u32| Ipv4Addr::new(127, low | 1, high, (2 * number + vm + 1) as u8);
    let hosts = [at(0), at(1)];
    let started = [
        process(cores, cores.driver, hosts[0], more)?,
        process(cores, cores.worker, hosts[1], more)?,
    ];
    let vm = |socket: &Path| -> Result<Arc<Vm>> {
        let options = VmOptions {
            memory: 512 << 20,
            gid: Some([0; 16]),
            features: 1 << feature::IWARP,
            ..VmOptions::default()
        };
        Ok(Vm::connect(socket, options)?)
    };
    let from = Side::new(&vm(&started[0].1)?, MEMORY)?;
    let to = Side::new(&vm(&started[1].1)?, MEMORY)?;
    let qps = [queue_pair(&from)?, queue_pair(&to)?];
    connect(&from.vm, &to.vm, &qps, hosts)?;
    for (_, socket) in &started {
        std::fs::remove_file(socket)?;
    }
    let processes = started.map(|(process, _)| process);
    Ok(Hosts::of(from, to, qps, processes))
}

/// A process whose worker has this core, and the socket of its VM.
fn process(
    cores: Cores,
    core: usize,
    address: Ipv4Addr,
    more: &str,
) -> Result<(DeviceProcess, PathBuf)> {
    let name = format!("virtio-rdma-bench-iwarp-{}-{address}", std::process::id());
    let socket = std::env::temp_dir().join(name);
    let on = Cores {
        worker: core,
        ..cores
    };
    let device = format!(
        "{more}[[device]]\nsocket = '{}'\nmac = '52:54:00:00:02:01'\ntransport = 'iwarp'\n\
         iwarp = {{ address = '{address}', peers = ['127.0.0.0/8'] }}\n",
        socket.display()
    );
    Ok((bed::device(on, 0, &device)?, socket))
}

fn queue_pair(side: &Side) -> Result<Qp> {
    let queue = SMALL_DEPTH as u32;
    let options = QpOptions {
        caps: QpCaps {
            max_send_wr: queue,
            max_recv_wr: queue,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 16,
        },
        signal_all: false,
        qp_type: qp_type::IWARP,
        ..QpOptions::default()
    };
    let qp = Qp::new(
        &side.context,
        &side.pd,
        &side.send_cq,
        &side.recv_cq,
        &options,
    )?;
    let attr = QpAttr {
        qp_state: qp_state::INIT,
        access_flags: bed::ALL,
        ..QpAttr::default()
    };
    qp.modify((attr, qp_attr::STATE | qp_attr::ACCESS_FLAGS))?;
    Ok(qp)
}

/// Connects two queue pairs of VMs at these addresses.
fn connect(from: &Vm, to: &Vm, qps: &[Qp; 2], hosts: [Ipv4Addr; 2]) -> Result<()> {
    let end = |host: Ipv4Addr, port| IwEndpoint {
        addr: host.to_ipv6_mapped().octets(),
        port,
        ..IwEndpoint::default()
    };
    to.execute::<IwListen>(&iwarp::IwListen {
        local: end(hosts[1], PORT),
        backlog: 1,
        ..iwarp::IwListen::default()
    })?;
    from.execute::<IwConnect>(&iwarp::IwConnect {
        local: end(hosts[0], 0),
        remote: end(hosts[1], PORT),
        qpn: qps[0].number(),
        ord: 16,
        ird: 16,
        ..iwarp::IwConnect::default()
    })?;
    let request = event(to, iw_event::CONNECT_REQUEST)?;
    to.execute::<IwAccept>(&iwarp::IwAccept {
        connection: request.connection,
        qpn: qps[1].number(),
        ord: 16,
        ird: 16,
        ..iwarp::IwAccept::default()
    })?;
    event(from, iw_event::CONNECT_REPLY)?;
    event(to, iw_event::ESTABLISHED)?;
    Ok(())
}

/// The next event, which is to be of this kind.
fn event(vm: &Vm, kind: u16) -> Result<IwEvent> {
    let begin = Instant::now();
    loop {
        let event = vm.execute::<IwNextEvent>(&[])?;
        if event.kind == iw_event::NONE {
            ensure!(begin.elapsed() < PATIENCE, "no event of kind {kind}");
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let good = (event.kind, event.status) == (kind, 0);
        ensure!(good, "an event that was not expected: {event:?}");
        return Ok(event);
    }
}

/// Two ends of a TCP connection.
pub fn ends() -> Result<[TcpStream; 2]> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let sender = TcpStream::connect(listener.local_addr()?)?;
    let (receiver, _) = listener.accept()?;
    for end in [&sender, &receiver] {
        end.set_nodelay(true)?;
    }
    Ok([sender, receiver])
}

/// GB/s of a TCP stream that is written and read by calls of `at_once` bytes; with `copies`, payloads are
/// copied from memory to what is sent, and from what came to memory, and a checksum of each is
/// computed at both ends.
pub fn stream(
    settings: &Settings,
    ends: [TcpStream; 2],
    at_once: usize,
    copies: bool,
) -> Result<f64> {
    let Cores { driver, worker } = settings.cores;
    let [mut sender, mut receiver] = ends;
    let time = 4 * settings.time();
    settle();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || -> Result<f64> {
            pin(&[worker])?;
            let mut memory = vec![0; MEMORY];
            let mut buffer = vec![0; at_once];
            let mut places = (0..MEMORY).step_by(at_once).cycle();
            let (mut bytes, begin) = (0, Instant::now());
            let mut start = None;
            loop {
                if receiver.read_exact(&mut buffer).is_err() {
                    return Err(anyhow!("it ended too early"));
                }
                if copies {
                    let at = places.next().context("no memory")?;
                    let to = memory.get_mut(at..at + at_once).context("no memory")?;
                    for (to, from) in to.chunks_mut(CHUNK).zip(buffer.chunks(CHUNK)) {
                        std::hint::black_box(crc32c::crc32c(from));
                        to.copy_from_slice(from);
                    }
                }
                let now = Instant::now();
                match start {
                    None if now - begin >= time / 5 => start = Some(now),
                    None => {}
                    Some(from) => {
                        bytes += at_once;
                        if now - from >= time {
                            return Ok(bytes as f64 / (now - from).as_secs_f64() / 1e9);
                        }
                    }
                }
            }
        });
        pin(&[driver])?;
        let memory = vec![1; MEMORY];
        let mut buffer = vec![0; at_once];
        for source in memory.chunks_exact(at_once).cycle() {
            let bytes = if copies {
                for (to, from) in buffer.chunks_mut(CHUNK).zip(source.chunks(CHUNK)) {
                    to.copy_from_slice(from);
                    std::hint::black_box(crc32c::crc32c(to));
                }
                &buffer[..]
            } else {
                source
            };
            // The other end closes when it has measured.
            if sender.write_all(bytes).is_err() {
                break;
            }
        }
        end.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Millions of short messages per second, each by a call of its own, at both ends.
fn singles(settings: &Settings) -> Result<f64> {
    const LENGTH: usize = SMALL as usize + HEADERS;
    let Cores { driver, worker } = settings.cores;
    let [mut sender, mut receiver] = ends()?;
    let time = 4 * settings.time();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || -> Result<f64> {
            pin(&[worker])?;
            let mut message = [0; LENGTH];
            let begin = Instant::now();
            let mut count = 0;
            while begin.elapsed() < time {
                receiver.read_exact(&mut message)?;
                count += 1;
            }
            Ok(f64::from(count) / begin.elapsed().as_secs_f64() / 1e6)
        });
        pin(&[driver])?;
        while sender.write_all(&[1; LENGTH]).is_ok() {}
        end.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Sorted times, µs, of as many bytes as a short READ has, to and fro.
fn round_trips(settings: &Settings, rounds: usize) -> Result<Vec<f64>> {
    const LENGTH: usize = SHORTEST as usize + HEADERS;
    let Cores { driver, worker } = settings.cores;
    let [mut sender, mut receiver] = ends()?;
    std::thread::scope(|scope| {
        let end = scope.spawn(move || -> Result<()> {
            pin(&[worker])?;
            let mut message = [0; LENGTH];
            while receiver.read_exact(&mut message).is_ok() {
                receiver.write_all(&message)?;
            }
            Ok(())
        });
        pin(&[driver])?;
        let times = sorted_times(rounds, || {
            sender.write_all(&[1; LENGTH])?;
            sender.read_exact(&mut [0; LENGTH])?;
            Ok(())
        });
        drop(sender);
        end.join().map_err(|_| anyhow!("a thread panicked"))??;
        times
    })
}
