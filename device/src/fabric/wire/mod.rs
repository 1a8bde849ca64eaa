// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric with packets: RoCEv2. A queue pair's messages go out as frames of a [`port`], many of
//! them under way at a time, and answers come back as frames.
//!
//! So far it carries all messages of reliable connections but atomic operations with masks, and has
//! one port, which simulates a network in virtual time. No process has such a port yet: what is here runs in tests alone. It shows that engine and [`Fabric`] need to know
//! nothing of how a message travels.
//!
//! [`packet`], [`frame`] and [`icrc`] are bytes and values. The [`sender`] is the requester of a
//! queue pair, the [`receiver`] its responder; both stand on the engine's send queue and responder,
//! which decide what everything means. [`layer`]s are put around ports.
mod frame;
mod icrc;
mod layer;
mod packet;
mod port;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use virtio_rdma_spec::verbs::{mtu, qp_state, qp_type};

use self::frame::{Addresses, Dropped, Frame};
use self::packet::{Body, Packet, Psn};
use self::port::Port;
use self::receiver::Receiver;
use self::sender::{Brought, Peer, Sender};
use super::{Carrier, Fabric};
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{PathAttributes, Polled, SendQueue};
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::Vm;
use crate::engine::{Budget, BUDGET};
use crate::verbs::numbers::NUMBERS;

/// Headers that a packet has beside its payload, bytes: IPv6, UDP, base transport header, the
/// longest extension headers, ICRC, rounded up as other implementations do.
const HEADERS: usize = 80;

/// The payload of a packet, bytes, for an `mtu`.
fn payload_of(mtu: u8) -> u64 {
    128 << mtu.clamp(mtu::MTU_256, mtu::MTU_4096)
}

/// Frames that were dropped, by the reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct DropCounts {
    /// None of RoCEv2.
    other: u64,
    malformed: u64,
    icrc: u64,
    /// For nobody here, or not from the peer that its queue pair is connected to.
    stranger: u64,
    /// The port is down, or the VM stopped.
    down: u64,
}

/// What the fabric keeps of a queue pair, from its first packet on.
#[derive(Debug)]
struct Connection {
    /// The queue pair that it is of, and which of its lives.
    of: Weak<Qp>,
    life: u32,
    /// The path and its destination, and the addresses that frames have on it.
    path: (PathAttributes, Gid),
    addresses: Option<Addresses>,
    peer: Peer,
    /// Made when it sends first, and when it receives first: both PSNs are known by then.
    sender: Option<Sender>,
    receiver: Option<Receiver>,
}

impl Connection {
    fn is_of(&self, qp: &Arc<Qp>) -> bool {
        std::ptr::eq(self.of.as_ptr(), Arc::as_ptr(qp)) && self.life == qp.life()
    }
}

/// The addresses of frames on a path; `None` if its source is no GID.
fn addresses(
    fabric: &impl Fabric,
    tables: &Tables,
    path: &PathAttributes,
    destination: Gid,
) -> Option<Addresses> {
    let index = usize::from(path.sgid_index);
    Some(Addresses {
        source_mac: fabric.l2_address(tables, index)?.mac,
        destination_mac: path.dmac,
        source: (*tables.gids.get(index)?)?,
        destination,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        hop_limit: path.hop_limit,
    })
}

/// The fabric, as one worker has it for one VM: a port, and what it keeps of the queue pairs.
#[derive(Debug)]
struct Wire<P> {
    port: P,
    up: AtomicBool,
    connections: HashMap<u32, Connection>,
    dropped: DropCounts,
    /// The frame that is read.
    received: Vec<u8>,
    /// The frame that is written, and the payload of the packet in it.
    frame: Vec<u8>,
    payload: Vec<u8>,
}

impl<P: Port> Wire<P> {
    fn new(port: P) -> Self {
        Self {
            port,
            up: AtomicBool::new(true),
            connections: HashMap::new(),
            dropped: DropCounts::default(),
            received: Vec::new(),
            frame: Vec::new(),
            payload: Vec::new(),
        }
    }

    fn is_up(&self) -> bool {
        self.up.load(Ordering::SeqCst)
    }

    /// Makes sure that a connection is kept of a queue pair, of this life of it, and with the path
    /// of its send queue, which may be another one than before.
    fn connect(&mut self, tables: &Tables, qp: &Arc<Qp>, sq: &SendQueue) {
        let path = (sq.path_attributes, sq.dest_gid);
        let known = self.connections.get(&qp.number);
        let known = known.filter(|known| known.is_of(qp));
        if known.is_some_and(|known| known.path == path && known.addresses.is_some()) {
            return;
        }
        let known = known.is_some();
        let addresses = addresses(self, tables, &sq.path_attributes, sq.dest_gid);
        if !known {
            self.forget_destroyed(tables);
            let made = Connection {
                of: Arc::downgrade(qp),
                life: qp.life(),
                path,
                addresses,
                peer: Peer {
                    dest_qp: sq.dest_qp,
                    mtu: payload_of(sq.path_attributes.path_mtu),
                },
                sender: None,
                receiver: None,
            };
            self.connections.insert(qp.number, made);
        } else if let Some(known) = self.connections.get_mut(&qp.number) {
            known.path = path;
            known.addresses = addresses;
        }
    }

    /// Forgets destroyed queue pairs, when they are as many as those that are left.
    fn forget_destroyed(&mut self, tables: &Tables) {
        let lives = |qp: Arc<Qp>| !qp.dead.load(Ordering::SeqCst);
        if self.connections.len() >= 2 * tables.qps.len() as usize {
            self.connections
                .retain(|_, known| known.of.upgrade().is_some_and(lives));
        }
    }

    /// Takes the frames that have come by time `now`, at most `most` of them, for the VM of
    /// `tables`. Returns how many there were.
    fn receive(&mut self, tables: &Tables, now: u64, most: usize) -> usize {
        let mut bytes = std::mem::take(&mut self.received);
        let mut taken = 0;
        while taken < most && self.port.receive(now, &mut bytes) {
            self.take(tables, now, &bytes);
            taken += 1;
        }
        self.received = bytes;
        taken
    }

    fn take(&mut self, tables: &Tables, now: u64, bytes: &[u8]) {
        let frame = match frame::read(bytes) {
            Ok(frame) => frame,
            Err(Dropped::Other) => return self.dropped.other += 1,
            Err(Dropped::Malformed) => return self.dropped.malformed += 1,
            Err(Dropped::Icrc) => return self.dropped.icrc += 1,
        };
        if !self.is_up() || !tables.running {
            return self.dropped.down += 1;
        }
        if self.deliver(tables, now, &frame).is_none() {
            self.dropped.stranger += 1;
        }
    }

    /// Hands a packet to its queue pair; `None` if it is for none of ours, or not from its peer.
    fn deliver(&mut self, tables: &Tables, now: u64, frame: &Frame<'_>) -> Option<()> {
        let packet = &frame.packet;
        let qp = tables.qps.get(packet.dest_qp)?;
        // It has an address when it is ready to receive.
        let begun = !matches!(qp.state(), qp_state::RESET | qp_state::INIT);
        if qp.qp_type != qp_type::RC || !begun {
            return None;
        }
        let known = self.connections.get(&qp.number);
        if !known.is_some_and(|known| known.is_of(qp)) {
            self.connect(tables, qp, &qp.send_queue());
        }
        let connection = self.connections.get_mut(&qp.number)?;
        let Addresses {
            source,
            source_mac,
            destination,
            ..
        } = connection.addresses?;
        let addressed = frame.destination_mac == source_mac && frame.destination == source;
        if !addressed || frame.source != destination {
            return None;
        }
        if matches!(packet.body, Body::Request { .. }) {
            return self.request(tables, qp, packet, now);
        }
        let peer = connection.peer;
        // Before it sends there is nothing to answer.
        let sender = connection.sender.as_mut()?;
        let mut sq = qp.send_queue();
        if sq.may_go_on(tables, qp).is_ok() {
            let brought = match packet.body {
                Body::ReadResponse { payload, .. } => Some(Brought::Bytes(payload)),
                Body::AtomicAcknowledge { value, .. } => Some(Brought::Word(value)),
                _ => None,
            };
            let psn = packet.psn;
            if let Some(brought) = brought {
                sender.bring(&mut sq, tables, qp, peer, psn, brought);
            } else if let Body::Acknowledge { syndrome, .. } = packet.body {
                sender.answer(&mut sq, tables, qp, psn, syndrome, now);
            }
        }
        drop(sq);
        qp.schedule();
        Some(())
    }

    /// Carries out a request, and answers it.
    fn request(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        packet: &Packet<'_>,
        now: u64,
    ) -> Option<()> {
        let connection = self.connections.get_mut(&qp.number)?;
        if connection.receiver.is_none() {
            // It is known since the queue pair is ready to receive.
            let (path, _) = connection.path;
            connection.receiver = Some(Receiver::new(Psn::new(path.rq_psn)));
        }
        let receiver = connection.receiver.as_mut()?;
        let mtu = connection.peer.mtu;
        let mut responder = qp.responder();
        receiver.receive(&mut responder, tables, qp, mtu, packet);
        drop(responder);
        if self.send_answers(tables, qp, now) {
            qp.schedule();
        }
        Some(())
    }

    /// Sends what a queue pair has to answer, within a budget. Returns whether there is more.
    fn send_answers(&mut self, tables: &Tables, qp: &Arc<Qp>, now: u64) -> bool {
        let up = self.is_up();
        let Self {
            port,
            connections,
            frame,
            payload,
            ..
        } = self;
        let connection = connections.get_mut(&qp.number);
        let Some(connection) = connection.filter(|known| known.is_of(qp)) else {
            return false;
        };
        let Connection {
            addresses,
            peer,
            receiver: Some(receiver),
            ..
        } = connection
        else {
            return false;
        };
        let Peer { dest_qp, mtu } = *peer;
        let mut send = |psn, body: Body<'_>| {
            // Without a way out the answer is lost, and asked for again.
            if let Some(addresses) = addresses.as_ref().filter(|_| up) {
                let packet = Packet {
                    dest_qp,
                    psn,
                    ack_request: false,
                    solicited: false,
                    body,
                };
                frame::write(frame, addresses, &packet);
                port.send(now, frame);
            }
        };
        receiver.answer(tables, qp, mtu, BUDGET.bytes, payload, &mut send)
    }
}

impl<P: Port> Fabric for Wire<P> {
    fn port(&self, vm: &Vm) -> super::Port {
        let fits = |mtu: &u8| payload_of(*mtu) as usize + HEADERS <= self.port.mtu();
        let largest = (mtu::MTU_256..=mtu::MTU_4096).rfind(fits);
        super::Port {
            up: self.is_up() && vm.port_is_up(),
            max_mtu: mtu::MTU_4096,
            active_mtu: largest.unwrap_or(mtu::MTU_256),
        }
    }

    fn set_link(&self, _: &Vm, up: bool) {
        self.up.store(up, Ordering::SeqCst);
    }

    fn qp_numbers(&self) -> RangeInclusive<u32> {
        NUMBERS
    }
}

impl<'a, P: Port> Carrier<'a> for Wire<P> {
    fn send(
        &mut self,
        sq: &mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        budget: Budget,
    ) -> Polled {
        self.connect(tables, qp, sq);
        let answers = self.send_answers(tables, qp, now);
        let up = self.is_up();
        let Self {
            port,
            connections,
            frame,
            payload,
            ..
        } = self;
        let Some(connection) = connections.get_mut(&qp.number) else {
            return Polled::Idle;
        };
        let Connection {
            addresses,
            peer,
            sender,
            ..
        } = connection;
        let first = Psn::new(sq.path_attributes.sq_psn);
        let sender = sender.get_or_insert_with(|| Sender::new(first));
        let mut send = |packet: &Packet<'_>| {
            // Without a way out the packet is lost, and is repeated.
            if let Some(addresses) = addresses.as_ref().filter(|_| up) {
                frame::write(frame, addresses, packet);
                port.send(now, frame);
            }
        };
        let polled = sender.poll(sq, tables, qp, *peer, now, budget, payload, &mut send);
        if answers {
            return Polled::Again;
        }
        polled
    }

    fn answer(&mut self, tables: &'a Tables, qp: &'a Arc<Qp>, now: u64) -> bool {
        self.send_answers(tables, qp, now)
    }

    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>) {
        let connection = self.connections.get_mut(&qp.number);
        let connection = connection.filter(|known| known.is_of(qp));
        if let Some(sender) = connection.and_then(|known| known.sender.as_mut()) {
            sender.flush(sq, tables, qp);
        }
    }
}
