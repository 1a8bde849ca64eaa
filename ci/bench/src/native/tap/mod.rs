// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Between two device processes in network namespaces, as on two hosts: packets leave by the interface
//! that the host has for the VM's network interface, pass a bridge, a veth and the other host's bridge,
//! and come to the other process by its TAP. A TCP stream between the namespaces passes the same bridges.
//! It takes root, since interfaces are made: where they cannot be, there are no figures.
//!
//! The cores are shared as in the section *wire*.
use std::fs::File;
use std::net::{TcpListener, TcpStream};

use anyhow::Result;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;

use super::wire::{process, Hosts, LARGE, MTU};
use super::{cache, figure, iwarp, Settings};
use crate::figure::{Better, Figure, Target};

mod frames;
#[allow(unsafe_code)]
mod kernel;
mod namespace;

use namespace::Namespace;

const SECTION: &str = "wire by TAP";
/// The interface of a host that the device's packets leave by.
const INTERFACE: &str = "vm1";
/// Bytes that an application usually gives to a TCP stream at once.
const USUAL: usize = 64 << 10;
/// A TAP of a host, for bursts that are no device's.
const PLAIN: &str = "plain";

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let network = match Network::new() {
        Ok(network) => network,
        Err(error) => {
            println!("{SECTION}: not measured, since there are no network namespaces: {error:#}");
            return Ok(Vec::new());
        }
    };
    // Ports of bridges forward some time after they are up: then, one can connect.
    network.stream()?;
    let taps = network.taps()?;
    let hosts = network.start(settings)?;
    let verbs = [
        ("WRITE", wr_opcode::RDMA_WRITE),
        ("SEND", wr_opcode::SEND),
        ("READ", wr_opcode::RDMA_READ),
    ];
    let (mut ours, mut raw, mut tcp) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..settings.repetitions() {
        let (verbs, bursts, streams) = cache::steady(settings.cores, || {
            let with_copies = frames::bursts(settings, &taps, true)?;
            let mut rates = [0.0; 3];
            for ((_, opcode), rate) in verbs.iter().zip(&mut rates) {
                *rate = hosts.transfer(*opcode, LARGE, settings)?;
            }
            let without = frames::bursts(settings, &taps, false)?;
            let mut streams = [0.0; 2];
            for (at_once, rate) in [USUAL, iwarp::AT_ONCE].into_iter().zip(&mut streams) {
                *rate = iwarp::stream(settings, network.stream()?, at_once, false)?;
            }
            Ok((rates, [with_copies, without], streams))
        })?;
        ours.push(verbs);
        raw.push(bursts);
        tcp.push(streams);
    }
    let [same, bare] = columns(&raw);
    let [usual, large] = columns(&tcp);
    let peers = [
        ("UDP bursts by TAP with copies and CRC", &same, Some(0.75)),
        ("UDP bursts by TAP without copies and CRC", &bare, Some(0.5)),
        ("a TCP stream, 64 KiB at once", &usual, Some(1.5)),
        ("a TCP stream, 1 MiB at once", &large, None),
    ];
    let figures = verbs
        .iter()
        .zip(columns(&ours))
        .flat_map(|((verb, _), runs)| {
            let name = format!("{verb}, 4 KiB packets between two namespaces");
            let own = figure(SECTION, &name, "GB/s", Better::Higher, &runs).at(f64::from(LARGE));
            peers.map(|(peer, of_peer, least)| {
                let beside = own.clone().beside(peer, of_peer);
                match least {
                    Some(least) => beside.target(Target::Min(least)),
                    None => beside,
                }
            })
        });
    Ok(figures.collect())
}

/// What each repetition has of each, as all repetitions of each.
fn columns<const N: usize>(rows: &[[f64; N]]) -> [Vec<f64>; N] {
    std::array::from_fn(|at| rows.iter().map(|row| row[at]).collect())
}

/// Two namespaces, which go with this.
struct Network {
    namespaces: [Namespace; 2],
}

impl Network {
    fn new() -> Result<Self> {
        let name = |number| format!("virtio-rdma-bench-{}-{number}", std::process::id());
        let namespaces = [Namespace::new(name(1))?, Namespace::new(name(2))?];
        let [first, second] = &namespaces;
        first.ip(&format!(
            "link add wire mtu {MTU} type veth peer name wire netns {} mtu {MTU}",
            second.name()
        ))?;
        for (number, namespace) in (1..).zip(&namespaces) {
            // Otherwise it changes with the interfaces in it, and who has resolved it finds nobody.
            namespace.ip(&format!("link set bridge address 02:00:00:00:04:0{number}"))?;
            namespace.ip("link set wire master bridge up")?;
            // What is at the other end is in place of a guest.
            namespace.ip(&format!(
                "link add {INTERFACE} mtu {MTU} type veth peer name guest mtu {MTU}"
            ))?;
            namespace.ip("link set guest up")?;
            namespace.ip(&format!("link set {INTERFACE} master bridge up"))?;
            namespace.ip(&format!("addr add 10.0.1.{number}/24 dev bridge"))?;
        }
        Ok(Self { namespaces })
    }

    /// Two processes, with a VM each.
    fn start(&self, settings: &Settings) -> Result<Hosts> {
        let cores = settings.cores;
        let [first, second] = &self.namespaces;
        let device = |namespace: &Namespace, core, number| {
            let port = format!("mac = '52:54:00:00:02:0{number}'\nnetdev = '{INTERFACE}'\n");
            namespace.within(|| process(cores, core, "", &port))
        };
        Hosts::between([
            device(first, cores.driver, 1)?,
            device(second, cores.worker, 2)?,
        ])
    }

    /// A TAP in each, at its bridge.
    fn taps(&self) -> Result<[File; 2]> {
        let [first, second] = &self.namespaces;
        let tap = |namespace: &Namespace| {
            let tap = namespace.within(|| Ok(kernel::tap(PLAIN)?))?;
            namespace.ip(&format!("link set {PLAIN} mtu {MTU} master bridge up"))?;
            Ok::<_, anyhow::Error>(tap)
        };
        Ok([tap(first)?, tap(second)?])
    }

    /// Two ends of a TCP connection.
    fn stream(&self) -> Result<[TcpStream; 2]> {
        let [first, second] = &self.namespaces;
        let listener = second.within(|| Ok(TcpListener::bind("10.0.1.2:0")?))?;
        let address = listener.local_addr()?;
        let sender = first.within(|| Ok(TcpStream::connect(address)?))?;
        let (receiver, _) = listener.accept()?;
        Ok([sender, receiver])
    }
}
