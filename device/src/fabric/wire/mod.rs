// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fabric with packets: RoCEv2. A queue pair's messages go out as frames of a [`port`], many of
//! them under way at a time, and answers come back as frames.
//!
//! It carries all messages but those that RoCEv2 does not have: atomic operations with masks, and
//! SEND_WITH_INV of UC. Its ports are VXLAN between hosts, interfaces of VMs and, for tests, a
//! network that is simulated in virtual time.
//!
//! [`packet`], [`frame`] and [`icrc`] are bytes and values. The [`sender`] is the requester of a
//! queue pair whose packets are acknowledged, what is in [`unacknowledged`] that of the others; the
//! [`receiver`] is the responder of a connected queue pair. They stand on the engine's send queue and
//! responder, which decide what everything means. [`layer`] has what is put
//! around ports: faults. [`imagined`] makes packets of messages that never were any, for captures.
pub(crate) mod capture;
pub(crate) mod counters;
mod departed;
pub(crate) mod egress;
mod frame;
mod icrc;
pub(crate) mod imagined;
pub(crate) mod layer;
mod packet;
mod pcapng;
pub(crate) mod port;
mod receiver;
pub(crate) mod recipients;
mod rooms;
mod sender;
mod srd;
mod srd_packet;
#[cfg(test)]
pub(super) mod tests;
mod unacknowledged;
mod verdict;

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use virtio_rdma_spec::verbs::{mtu, qp_state, qp_type};

use self::departed::{Departed, DepartedList};
use self::egress::{Attempt, Egress, View};
use self::frame::{Addresses, Frame, Route, Vlan};
use self::packet::{
    has_wrong_pkey, Body, Nak, Packet, Payload, Psn, RequestPacket, Service, Syndrome,
};
use self::port::{Burst, Direction, Fate, Port};
use self::receiver::Receiver;
use self::recipients::{Arriving, Destination, Recipients};
use self::rooms::Rooms;
use self::sender::{Brought, Peer, Sender};
use self::srd::Flows;
use self::unacknowledged::{datagram, datagrams, Stream};
use self::verdict::{Reason, Verdict};
use super::{Carrier, Elsewhere, Fabric};
use crate::engine::cursor::DataSource;
use crate::engine::message::{Answer, Datagram, Message};
use crate::engine::queue_pair::Qp;
use crate::engine::responder::Origin;
use crate::engine::send_queue::{Active, PathAttributes, Polled, SendQueue};
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::{PacketEvent, Segment, Uplink, Vm};
use crate::engine::{payload_of, Budget, BUDGET};
use crate::footprint::Share;
use crate::verbs::cq::L2Source;
use crate::verbs::numbers::NUMBERS;
use crate::verbs::WcError;

/// Headers that a packet has beside its payload, bytes: IPv6, UDP, base transport header, the
/// longest extension headers, ICRC, rounded up as other implementations do.
const HEADERS: usize = 80;

/// The largest path MTU (`mtu`) whose packets are IP packets of at most `longest` bytes.
pub(crate) fn path_mtu_within(longest: usize) -> u8 {
    let fits = |mtu: &u8| payload_of(*mtu) as usize + HEADERS <= longest;
    let largest = (mtu::MTU_256..=mtu::MTU_4096).rfind(fits);
    largest.unwrap_or(mtu::MTU_256)
}

/// How long a frame waits for a VM whose objects are being changed, at most, nanoseconds;
const MOST_WAIT: u64 = 10_000_000;
/// how many frames wait for one destination, at most, and how many in all.
const MOST_WAITING_FOR_ONE: usize = 128;
const MOST_WAITING: usize = 512;

/// How long a peer waits before it tries again whether a VM is still stopped, as an RNR NAK has it:
/// 41 ms.
const STOPPED_TIMER: u8 = 24;

/// A peer is told at most once in this time that the network is congested, nanoseconds.
const NOTIFY_AGAIN: u64 = 50_000;

/// How long to wait where the account of a VM has no room, nanoseconds.
const NO_ROOM_RETRY: u64 = 10_000_000;

/// What the fabric keeps of a queue pair, from its first packet on.
#[derive(Debug)]
struct Connection {
    /// The queue pair that it is of, and which of its lives.
    of: Weak<Qp>,
    life: u32,
    /// The path and its destination, and what frames on it have.
    path: (PathAttributes, Gid),
    route: Option<Route>,
    peer: Peer,
    /// When its peer was last told that the network is congested.
    notified: Option<u64>,
    /// Made when it sends first, and when it receives first: both PSNs are known by then.
    requester: Option<Requester>,
    receiver: Option<Receiver>,
    /// For itself, in the account of its VM.
    share: Share,
}

impl Connection {
    /// What it takes of its VM's account, bytes: an entry of a map that is half empty, and a
    /// requester.
    const FOOTPRINT: u64 = (3 * size_of::<Self>() + size_of::<Sender>()) as u64;

    fn is_of(&self, qp: &Arc<Qp>) -> bool {
        std::ptr::eq(self.of.as_ptr(), Arc::as_ptr(qp)) && self.life == qp.life()
    }

    /// Carries out a request that came, and those that came before it and waited for it.
    /// `keeps_unasked` as in [`Wire`]. `None` if the queue pair takes none.
    fn request(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        came: &Came<'_>,
        rooms: &mut Rooms,
        keeps_unasked: bool,
    ) -> Option<Verdict> {
        if qp.qp_type == qp_type::XRC_INI {
            return None;
        }
        let Self {
            path: (path, _),
            peer,
            receiver,
            share,
            ..
        } = self;
        let Came {
            packet,
            request,
            bytes,
        } = came;
        let mut responder = qp.responder();
        let at_a_time = responder.max_rd_atomic;
        if receiver.is_none() {
            // The PSN is known since the queue pair is ready to receive.
            *receiver = Receiver::new(Psn::new(path.rq_psn), at_a_time, share);
        }
        let Some(receiver) = receiver else {
            return Some(Verdict::Dropped(Reason::NoRoom));
        };
        if !receiver.set_at_a_time(at_a_time, share) {
            return Some(Verdict::Dropped(Reason::NoRoom));
        }
        let mtu = peer.mtu;
        let keeps = receiver.is_asked() || keeps_unasked;
        let mut verdict = receiver.receive(&mut responder, tables, qp, mtu, packet, request);
        match verdict {
            Verdict::Taken => {
                let mut filled = false;
                while let Some(kept) = receiver.next_kept() {
                    let packet = Packet::read(kept.bytes());
                    let Some((packet, Body::Request(request))) =
                        packet.map(|packet| (packet, packet.body))
                    else {
                        break;
                    };
                    let taken =
                        receiver.receive(&mut responder, tables, qp, mtu, &packet, &request);
                    filled = taken == Verdict::Taken;
                    rooms.release(kept);
                    if !filled {
                        break;
                    }
                }
                if filled {
                    receiver.filled();
                }
            }
            Verdict::Dropped(Reason::Ahead)
                if keeps && receiver.keep(packet.psn, bytes, share, rooms) =>
            {
                verdict = Verdict::Kept;
            }
            // The first one of those.
            Verdict::Refused(_, Syndrome::Nak(Nak::Sequence), _) if keeps => {
                receiver.keep(packet.psn, bytes, share, rooms);
            }
            _ => {}
        }
        Some(verdict)
    }
}

/// A request that came.
struct Came<'a> {
    packet: &'a Packet<'a>,
    request: &'a RequestPacket<'a>,
    /// What the packet was read from.
    bytes: &'a [u8],
}

/// The requester's half of a connected queue pair.
#[derive(Debug)]
enum Requester {
    Acknowledged(Box<Sender>),
    Unacknowledged(Stream),
}

/// The addresses of frames on a path; `None` if its source is no GID.
fn addresses(tables: &Tables, path: &PathAttributes, destination: Gid) -> Option<Addresses> {
    let index = usize::from(path.sgid_index);
    let l2 = *tables.sources.get(index)?;
    Some(Addresses {
        source_mac: l2.mac,
        destination_mac: path.dmac,
        source: (*tables.gids.get(index)?)?,
        destination,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label,
        hop_limit: path.hop_limit,
        vlan: Vlan::of(l2, path.sl),
    })
}

/// Whether a VM has the address that a frame goes to, in its VLAN.
fn is_own(fabric: &impl Fabric, tables: &Tables, frame: &Frame<'_>) -> bool {
    let from = &frame.addresses;
    (0..tables.gids.len()).any(|index| {
        let gid = tables.gids.get(index) == Some(&Some(from.destination));
        let l2 = || fabric.l2_address(tables, index);
        gid && l2().is_some_and(|l2| from.is_in_vlan_of(l2) && l2.mac == from.destination_mac)
    })
}

/// Hands a datagram to its queue pair, or to those of its multicast group; `None` if there is none.
fn deliver_datagram(
    fabric: &impl Fabric,
    tables: &Tables,
    frame: &Frame<'_>,
    packet: &Packet<'_>,
    request: &RequestPacket<'_>,
) -> Option<Verdict> {
    let from = &frame.addresses;
    let datagram = Datagram {
        sgid: from.source,
        source: L2Source {
            mac: from.source_mac,
            vlan: from.vlan_id(),
        },
        dgid: from.destination,
        dmac: from.destination_mac,
        qpn: packet.dest_qp,
        qkey: request.deth.qkey,
        flow_label: from.flow_label,
        traffic_class: from.traffic_class,
        hop_limit: from.hop_limit,
        sl: from.vlan.map_or(0, |vlan| vlan.priority),
    };
    let message = Message {
        opcode: request.request.wr_opcode,
        kind: request.request.kind,
        imm_is: request.request.imm,
        solicited: packet.solicited,
        imm: request.immediate,
        remote_addr: 0,
        rkey: 0,
        srqn: 0,
        src_qp: request.deth.src_qp,
        length: request.payload.len() as u64,
    };
    let give = |qp: &Arc<Qp>| {
        if !qp.vm.port_is_up() {
            return Verdict::Dropped(Reason::Down);
        }
        let origin = Origin {
            worker: qp.worker_index,
            waiter: None,
        };
        let source = DataSource::Bytes(request.payload);
        let answer = qp.take_datagram(tables, origin, &message, &datagram, source);
        if answer != Answer::Done {
            return Verdict::Dropped(Reason::Unreceivable);
        }
        qp.vm.count_received(qp.worker_index, 1, message.length);
        Verdict::Taken
    };
    // An entry of the GID table that is in the frame's VLAN.
    let in_vlan = |index: usize| {
        let l2 = fabric.l2_address(tables, index);
        l2.filter(|l2| from.is_in_vlan_of(*l2))
    };
    let mut entries = (0..tables.gids.len()).filter(|index| tables.gids.get(*index) != Some(&None));
    if datagram.multicast() {
        if !entries.any(|index| in_vlan(index).is_some()) {
            return None;
        }
        let members = tables.multicast.keys();
        let members = members.filter(|(_, group)| *group == datagram.dgid);
        let mut verdict = None;
        for qp in members.filter_map(|(number, _)| tables.qps.get(*number)) {
            verdict = Some(give(qp));
        }
        return verdict;
    }
    if !is_own(fabric, tables, frame) {
        return None;
    }
    tables.datagram_qp(datagram.qpn).map(give)
}

/// Sends the acknowledgement that a queue pair owes, if that is all that it has to answer. Returns
/// whether nothing is left to answer.
fn acknowledge<P: Port>(
    out: &mut Egress<P>,
    connection: &mut Connection,
    qp: &Qp,
    now: u64,
) -> bool {
    let Some(receiver) = &mut connection.receiver else {
        return true;
    };
    if let Some((psn, body)) = receiver.take_acknowledgement() {
        let packet = connection.peer.answer(psn, body);
        out.send_empty(now, &qp.vm, connection.route.as_ref(), &packet);
    }
    !receiver.answers()
}

/// A packet from the peer of a queue pair says that a router was congested. The peer is to know.
fn notify<P: Port>(out: &mut Egress<P>, connection: &mut Connection, qp: &Qp, now: u64) {
    let again = |before: u64| now.saturating_sub(before) >= NOTIFY_AGAIN;
    let notifies = connection.notified.is_none_or(again);
    out.view.counters.congested(notifies);
    qp.vm.count_packet(qp.worker_index, PacketEvent::Marked);
    if notifies {
        qp.vm.count_packet(qp.worker_index, PacketEvent::Notified);
        connection.notified = Some(now);
        let packet = Packet::notification(connection.peer.dest_qp);
        out.send_empty(now, &qp.vm, connection.route.as_ref(), &packet);
    }
}

/// A frame that waits for its VM.
#[derive(Debug)]
struct Waiting {
    to: Destination,
    /// Since when, nanoseconds.
    since: u64,
    bytes: Vec<u8>,
}

/// The fabric, as one worker has it: a port, and what it keeps of the queue pairs.
#[derive(Debug)]
pub(crate) struct Wire<P> {
    out: Egress<P>,
    /// By the serial number of the queue pair.
    connections: FxHashMap<u64, Connection>,
    /// Those of queue pairs that are gone are forgotten when there are as many as this.
    tidy_at: usize,
    /// Queue pairs that were destroyed.
    departed: DepartedList,
    /// Of reliable datagrams.
    flows: Flows,
    /// The frames that are read; none while they are taken. (An empty one takes memory, too.)
    received: Option<Burst>,
    /// The queue pair whose request came last, if it is to be acknowledged.
    unacknowledged: Option<Arc<Qp>>,
    /// Frames that wait for their VMs, the oldest first.
    waiting: VecDeque<Waiting>,
    rooms: Rooms,
    /// Peers are asked what is missing. (Not in tests of what is done without an answer.)
    asks: bool,
    /// Packets that come too early are kept for a peer that has asked nothing, too. (Only in tests, as a
    /// peer that does so.)
    keeps_unasked: bool,
}

impl<P: Port> Wire<P> {
    /// That of a worker, which counts, and captures, in `view`.
    pub(crate) fn new(port: P, view: Arc<View>, worker: u16) -> Self {
        Self {
            out: Egress::new(port, view, worker),
            connections: FxHashMap::default(),
            tidy_at: 64,
            departed: DepartedList::default(),
            flows: Flows::default(),
            received: Some(Burst::default()),
            unacknowledged: None,
            waiting: VecDeque::new(),
            rooms: Rooms::default(),
            asks: true,
            keeps_unasked: false,
        }
    }

    /// Frames and bytes that were sent in all, modulo 2^32 and 2^64.
    pub(crate) fn sent(&self) -> Budget {
        self.out.view.counters.all_sent()
    }

    /// Makes sure that a connection is kept of a queue pair, of this life of it, and with the path
    /// of its send queue, which may be another one than before. None if the account of the VM has
    /// no room.
    fn connect(&mut self, tables: &Tables, qp: &Arc<Qp>, sq: &SendQueue) -> Option<()> {
        let path = (sq.path_attributes, sq.dest_gid);
        let known = self.connections.get(&qp.serial());
        let known = known.filter(|known| known.is_of(qp));
        if known.is_some_and(|known| known.path == path && known.route.is_some()) {
            return Some(());
        }
        let known = known.is_some();
        let service = Service::of(qp.qp_type)?;
        let addresses = addresses(tables, &sq.path_attributes, sq.dest_gid);
        let qps = [qp.number, sq.dest_qp];
        let route = addresses.map(|addresses| Route::new(addresses, qps));
        if !known {
            if self.connections.len() >= self.tidy_at {
                self.forget_destroyed();
            }
            let made = Connection {
                share: tables.footprint.share(Connection::FOOTPRINT).ok()?,
                of: Arc::downgrade(qp),
                life: qp.life(),
                path,
                route,
                peer: Peer {
                    service,
                    dest_qp: sq.dest_qp,
                    mtu: payload_of(sq.path_attributes.path_mtu),
                },
                notified: None,
                requester: None,
                receiver: None,
            };
            self.connections.insert(qp.serial(), made);
        } else if let Some(known) = self.connections.get_mut(&qp.serial()) {
            known.path = path;
            known.route = route;
        }
        Some(())
    }

    /// Forgets a queue pair that was destroyed, but for what it has completed. That is acknowledged
    /// before: its requester is done with it, too.
    pub(crate) fn forget(&mut self, qp: &Arc<Qp>, now: u64) {
        if qp.qp_type == qp_type::SRD {
            self.flows.forget(qp);
            return;
        }
        self.acknowledge_taken(qp, now);
        let connection = self.connections.remove(&qp.serial());
        let connection = connection.filter(|known| known.is_of(qp));
        let Some(Connection {
            route: Some(route),
            peer,
            receiver: Some(receiver),
            ..
        }) = connection
        else {
            return;
        };
        let Some(Uplink { segment, .. }) = qp.vm.uplink() else {
            return;
        };
        let one = Departed {
            segment,
            route,
            peer,
            completed: receiver.completed(),
            since: now,
        };
        self.departed.add(qp.vm.serial(), qp.number, one);
    }

    /// Answers a packet that was carried out by a queue pair that was destroyed since; `None` if it was
    /// not.
    fn answer_for_departed(
        &mut self,
        tables: &Tables,
        now: u64,
        segment: Segment,
        frame: &Frame<'_>,
        packet: &Packet<'_>,
    ) -> Option<Verdict> {
        let Body::Request(request) = &packet.body else {
            return None;
        };
        let vm = tables.vm.upgrade()?;
        let one = self.departed.get(vm.serial(), packet.dest_qp, now)?;
        let Departed { route, peer, .. } = one;
        let here = one.segment == segment && peer.service == packet.service;
        if !here || !frame.addresses.is_answer_to(&route.addresses) {
            return None;
        }
        let (psn, syndrome) = one.completed.answer(packet, request.request.kind)?;
        let msn = one.completed.messages;
        let answer = peer.answer(psn, Body::Acknowledge { syndrome, msn });
        self.out.send_empty(now, &vm, Some(route), &answer);
        Some(Verdict::Again)
    }

    /// Sends the acknowledgement that a queue pair owes, if that is all that it has to answer. (It needs
    /// nothing of its VM, which may be busy, nor that the queue pair is there still.) Returns whether
    /// nothing is left to answer.
    fn acknowledge_taken(&mut self, qp: &Arc<Qp>, now: u64) -> bool {
        let connection = self.connections.get_mut(&qp.serial());
        let connection = connection.filter(|known| known.is_of(qp));
        connection.is_none_or(|known| acknowledge(&mut self.out, known, qp, now))
    }

    /// Forgets all queue pairs that were destroyed.
    pub(crate) fn forget_destroyed(&mut self) {
        let lives = |qp: Arc<Qp>| !qp.dead.load(Ordering::SeqCst);
        self.connections
            .retain(|_, known| known.of.upgrade().is_some_and(lives));
        self.tidy_at = 2 * self.connections.len() + 64;
        self.flows.forget_destroyed();
    }

    /// Takes the frames that have come by time `now`, about `most` of them. Returns how many there
    /// were.
    pub(crate) fn receive(&mut self, now: u64, most: usize, vms: &mut impl Recipients) -> usize {
        self.flows.run_timers(&mut self.out, now, vms);
        let mut taken = self.take_waiting(now, vms);
        let mut burst = self.received.take().unwrap_or_default();
        while taken < most {
            if burst.is_kept() {
                burst.renew(self.rooms.for_burst());
            }
            if !self.out.port.receive(now, &mut burst) {
                break;
            }
            self.rooms.current = burst.room();
            for (segment, bytes, gone) in burst.frames() {
                // Those that come later count, too: there may be any number of them.
                taken += 1;
                match gone {
                    None => {}
                    Some(Fate::Delayed(_)) => continue,
                    Some(fate) => {
                        self.lost(now, segment, bytes, fate);
                        continue;
                    }
                }
                let frame = match frame::read(bytes) {
                    Ok(frame) => frame,
                    Err(reason) => {
                        self.judged(now, segment, bytes, Verdict::Dropped(reason));
                        continue;
                    }
                };
                let gid = frame.addresses.destination;
                let to = Destination { segment, gid };
                // It does not overtake those that wait for the same VM.
                let ahead = self.waiting.iter().filter(|one| one.to == to).count();
                if ahead != 0 || !self.take(now, to, bytes, &frame, true, vms) {
                    self.wait(now, to, bytes, ahead);
                }
            }
            self.rooms.current = None;
            burst.taken();
        }
        self.received = Some(burst);
        self.acknowledge(now);
        self.flows.answer(&mut self.out, now);
        taken
    }

    /// A queue pair acknowledges the request that came for it when those that came with that are taken:
    /// one acknowledgement is for all of them.
    fn acknowledge_later(&mut self, qp: &Arc<Qp>) {
        if let Some(before) = &self.unacknowledged {
            if Arc::ptr_eq(before, qp) {
                return;
            }
            // When the worker polls it.
            before.schedule();
        }
        self.unacknowledged = Some(qp.clone());
    }

    /// All that came is taken: sends the acknowledgement that has waited for that.
    fn acknowledge(&mut self, now: u64) {
        let Some(qp) = self.unacknowledged.take() else {
            return;
        };
        if !self.acknowledge_taken(&qp, now) {
            qp.schedule();
        }
    }

    /// When there is something to take or to send though nobody else does, nanoseconds.
    pub(crate) fn timer(&self) -> Option<u64> {
        let port = self.out.port.timer();
        port.into_iter().chain(self.flows.timer()).min()
    }

    /// What was sent leaves now.
    #[inline(always)]
    pub(crate) fn flush_frames(&mut self) {
        let refused = self.out.port.flush();
        if refused != 0 {
            self.out.view.counters.refused(refused);
        }
    }

    /// A frame waits for its VM, behind so many others.
    fn wait(&mut self, now: u64, to: Destination, frame: &[u8], ahead: usize) {
        if ahead >= MOST_WAITING_FOR_ONE || self.waiting.len() >= MOST_WAITING {
            self.judged(now, to.segment, frame, Verdict::Dropped(Reason::Busy));
            return;
        }
        let bytes = self.rooms.with(frame);
        let since = now;
        self.waiting.push_back(Waiting { to, since, bytes });
    }

    /// Takes the frames that have waited for their VMs. Returns how many there were.
    fn take_waiting(&mut self, now: u64, vms: &mut impl Recipients) -> usize {
        let before = self.waiting.len();
        // Those that go on waiting are at the back.
        let mut kept = 0;
        for _ in 0..before {
            let Some(one) = self.waiting.pop_front() else {
                break;
            };
            let mut behind = self.waiting.iter().rev().take(kept);
            let behind = behind.any(|other| other.to == one.to);
            let late = now.saturating_sub(one.since) >= MOST_WAIT;
            // It was read before.
            let taken = !behind
                && frame::read(&one.bytes)
                    .is_ok_and(|frame| self.take(now, one.to, &one.bytes, &frame, !late, vms));
            if taken {
                self.rooms.put_back(one.bytes);
            } else if late {
                let verdict = Verdict::Dropped(Reason::Busy);
                self.judged(now, one.to.segment, &one.bytes, verdict);
                self.rooms.put_back(one.bytes);
            } else {
                self.waiting.push_back(one);
                kept += 1;
            }
        }
        before - kept
    }

    /// Whether frames wait for their VMs.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes a frame of these bytes. Returns false if its VM is busy for a moment.
    fn take(
        &mut self,
        now: u64,
        to: Destination,
        bytes: &[u8],
        frame: &Frame<'_>,
        can_wait: bool,
        vms: &mut impl Recipients,
    ) -> bool {
        let mut verdict = Verdict::Dropped(Reason::Stranger);
        let arriving = Arriving {
            bytes: bytes.len(),
            source: frame.addresses.source,
            can_wait,
        };
        let mut packet = None;
        let there = vms.visit(to, arriving, &mut |tables| match packet
            .get_or_insert_with(|| frame.packet())
        {
            Err(reason) => {
                verdict = Verdict::Dropped(*reason);
                let pkey = *reason == Reason::Malformed && has_wrong_pkey(frame.bytes);
                if pkey && is_own(self, tables, frame) {
                    if let Some(vm) = tables.vm.upgrade() {
                        vm.count_pkey_violation(self.out.worker);
                    }
                }
            }
            Ok(packet) => {
                if let Some(delivered) = self.deliver(tables, now, to.segment, frame, packet) {
                    verdict = delivered;
                }
            }
        });
        if there {
            self.judged(now, to.segment, bytes, verdict);
        }
        there
    }

    /// A frame that came is lost by faults, or is not from where its source is.
    fn lost(&mut self, now: u64, segment: Segment, bytes: &[u8], fate: Fate) {
        let reason = match fate {
            Fate::Foreign(_) => Reason::Stranger,
            _ => Reason::Faults,
        };
        let View {
            counters, capture, ..
        } = &*self.out.view;
        counters.received(bytes.len(), Verdict::Dropped(reason));
        if capture.is_on() {
            let comment = Some(fate.to_string());
            capture.add(now, Some(segment), Direction::In, bytes, comment);
        }
    }

    /// A frame is done with.
    fn judged(&mut self, now: u64, segment: Segment, bytes: &[u8], verdict: Verdict) {
        let View {
            counters, capture, ..
        } = &*self.out.view;
        counters.received(bytes.len(), verdict);
        if capture.is_on() {
            let comment = Some(verdict.to_string());
            capture.add(now, Some(segment), Direction::In, bytes, comment);
        }
    }

    /// Hands a packet to its queue pair; `None` if it is for none of ours, or not from its peer.
    fn deliver(
        &mut self,
        tables: &Tables,
        now: u64,
        segment: Segment,
        frame: &Frame<'_>,
        packet: &Packet<'_>,
    ) -> Option<Verdict> {
        if let (Service::Ud, Body::Request(request)) = (packet.service, &packet.body) {
            if !tables.running {
                return Some(Verdict::Dropped(Reason::Down));
            }
            return deliver_datagram(self, tables, frame, packet, request);
        }
        if let Body::Srd(srd) = &packet.body {
            if !is_own(self, tables, frame) {
                return None;
            }
            let up = tables.vm.upgrade().is_some_and(|vm| vm.port_is_up());
            if !up {
                return Some(Verdict::Dropped(Reason::Down));
            }
            let Self { flows, out, .. } = self;
            return flows.take(out, tables, now, segment, (frame, packet), srd);
        }
        let Some(qp) = tables.qps.get(packet.dest_qp) else {
            return self.answer_for_departed(tables, now, segment, frame, packet);
        };
        // It has an address when it is ready to receive.
        let begun = !matches!(qp.state(), qp_state::RESET | qp_state::INIT);
        let fits = match packet.service {
            Service::Notification => !qp.facts.datagram,
            Service::Ours => qp.facts.acknowledged,
            service => Service::of(qp.qp_type) == Some(service),
        };
        if !fits || !begun || !qp.leaves() {
            return None;
        }
        if !qp.vm.port_is_up() {
            return Some(Verdict::Dropped(Reason::Down));
        }
        let known = self.connections.get(&qp.serial());
        if !known.is_some_and(|known| known.is_of(qp)) {
            self.connect(tables, qp, &qp.send_queue())?;
        }
        let connection = self.connections.get_mut(&qp.serial())?;
        let from = &frame.addresses;
        if !from.is_answer_to(&connection.route.as_ref()?.addresses) {
            return None;
        }
        if from.congested() && packet.may_be_marked() {
            notify(&mut self.out, connection, qp, now);
        }
        if !tables.running {
            return Some(self.not_now(qp, packet, now));
        }
        if let Body::Request(request) = &packet.body {
            let came = Came {
                packet,
                request,
                bytes: frame.bytes,
            };
            let rooms = &mut self.rooms;
            let verdict = connection.request(tables, qp, &came, rooms, self.keeps_unasked)?;
            let owes = connection.receiver.as_ref();
            if owes.is_some_and(Receiver::only_acknowledges) {
                self.acknowledge_later(qp);
            } else if owes.is_some_and(Receiver::answers) && self.send_answers(tables, qp, now) {
                qp.schedule();
            }
            return Some(verdict);
        }
        if let Body::Query { number } = packet.body {
            return self.report(qp, packet.psn, number, now);
        }
        let peer = connection.peer;
        // Before it sends there is nothing to answer.
        let Some(Requester::Acknowledged(sender)) = &mut connection.requester else {
            return None;
        };
        let mut sq = qp.send_queue();
        let psn = packet.psn;
        let verdict = if sq.may_go_on(tables, qp).is_err() {
            Verdict::Dropped(Reason::State)
        } else {
            match packet.body {
                Body::ReadResponse { payload, .. } => {
                    let bytes = Brought::Bytes(payload);
                    if from.congested() {
                        sender.congested();
                    }
                    sender.bring(&mut sq, tables, qp, peer, psn, bytes, now)
                }
                Body::AtomicAcknowledge { value, .. } => {
                    sender.bring(&mut sq, tables, qp, peer, psn, Brought::Word(value), now)
                }
                Body::Acknowledge { syndrome, .. } => {
                    sender.answer(&mut sq, tables, qp, psn, syndrome, now)
                }
                Body::Notification => {
                    sender.congested();
                    qp.vm.count_packet(qp.worker_index, PacketEvent::Slowed);
                    Verdict::Slows
                }
                Body::Report { number, gaps } => {
                    sender.reported(&mut sq, tables, qp, psn, number, gaps, now)
                }
                Body::Request(_) | Body::Query { .. } | Body::Srd(_) => return None,
            }
        };
        drop(sq);
        qp.schedule();
        Some(verdict)
    }

    /// The requester of a queue pair's peer asks what is missing of all before packet `end`.
    fn report(&mut self, qp: &Arc<Qp>, end: Psn, number: u32, now: u64) -> Option<Verdict> {
        let Connection {
            receiver: Some(receiver),
            route,
            peer,
            ..
        } = self.connections.get_mut(&qp.serial())?
        else {
            // Nothing came yet.
            return None;
        };
        if !qp.listens() {
            return Some(Verdict::Dropped(Reason::State));
        }
        let list = receiver.gaps(end);
        let gaps = list.gaps();
        let body = Body::Report { number, gaps };
        let packet = Packet::ours(peer.dest_qp, receiver.expected(), body);
        let payload = Payload {
            len: list.bytes().len(),
            read: &mut |space: &mut [u8]| {
                space.copy_from_slice(list.bytes());
                true
            },
        };
        let route = route.as_ref();
        self.out
            .send(now, &qp.vm, route, &packet, payload, Attempt::First);
        Some(Verdict::Asks)
    }

    /// A packet came for a VM that is stopped. The requester whose turn it is waits, as it does where
    /// there is no receive.
    fn not_now(&mut self, qp: &Arc<Qp>, packet: &Packet<'_>, now: u64) -> Verdict {
        let dropped = Verdict::Dropped(Reason::Down);
        let asks = matches!(packet.body, Body::Request(_)) && packet.service.answers();
        let Some(connection) = self.connections.get_mut(&qp.serial()) else {
            return dropped;
        };
        let (path, _) = connection.path;
        let takes = qp.listens() && qp.qp_type != qp_type::XRC_INI;
        if !asks || !takes {
            return dropped;
        }
        let msn = match &mut connection.receiver {
            Some(receiver) => receiver.not_now(packet.psn),
            None => (packet.psn == Psn::new(path.rq_psn)).then_some(0),
        };
        let Some(msn) = msn else {
            return dropped;
        };
        let syndrome = Syndrome::RnrNak(STOPPED_TIMER);
        let body = Body::Acknowledge { syndrome, msn };
        let answer = connection.peer.answer(packet.psn, body);
        let route = connection.route.as_ref();
        self.out.send_empty(now, &qp.vm, route, &answer);
        Verdict::Refused(packet.psn, syndrome, 0)
    }

    fn send_datagrams(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        now: u64,
        budget: Budget,
    ) -> Polled {
        let mtu = payload_of(qp.vm.active_mtu());
        let out = &mut self.out;
        let mut send = |addresses: &Addresses, packet: &Packet<'_>, payload: Payload<'_>| {
            let route = Route::new(*addresses, [qp.number, packet.dest_qp]);
            out.send(now, &qp.vm, Some(&route), packet, payload, Attempt::First)
        };
        datagrams(sq, tables, qp, mtu, budget, &mut send)
    }

    /// Sends what a queue pair has to answer, within a budget. Returns whether there is more.
    fn send_answers(&mut self, tables: &Tables, qp: &Arc<Qp>, now: u64) -> bool {
        let Self {
            out, connections, ..
        } = self;
        let connection = connections.get_mut(&qp.serial());
        let Some(connection) = connection.filter(|known| known.is_of(qp)) else {
            return false;
        };
        let Connection {
            route,
            peer,
            receiver: Some(receiver),
            ..
        } = connection
        else {
            return false;
        };
        let peer = *peer;
        let mut send = |psn, body: Body<'_>, payload: Payload<'_>| {
            let packet = peer.answer(psn, body);
            out.send(
                now,
                &qp.vm,
                route.as_ref(),
                &packet,
                payload,
                Attempt::First,
            )
        };
        receiver.answer(tables, qp, peer.mtu, BUDGET.bytes, &mut send)
    }
}

impl<P: Port> Fabric for Wire<P> {
    fn port(&self, vm: &Vm) -> super::Port {
        super::Port {
            up: vm.port_is_up(),
            max_mtu: mtu::MTU_4096,
            active_mtu: vm.active_mtu(),
        }
    }

    fn set_link(&self, _: &Vm, _: bool) {
        // The VM itself knows whether its port is up.
    }

    fn qp_numbers(&self) -> RangeInclusive<u32> {
        NUMBERS
    }
}

impl<P: Port> Elsewhere for Wire<P> {
    fn send_datagram(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> Result<(), WcError> {
        let mtu = payload_of(qp.vm.active_mtu());
        let out = &mut self.out;
        let mut send = |addresses: &Addresses, packet: &Packet<'_>, payload: Payload<'_>| {
            let route = Route::new(*addresses, [qp.number, packet.dest_qp]);
            out.send(now, &qp.vm, Some(&route), packet, payload, Attempt::First)
        };
        datagram(sq, tables, qp, active, mtu, &mut send)
    }

    fn take_reliable_datagram(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> bool {
        let Self { flows, out, .. } = self;
        flows.begin(out, sq, tables, qp, active, now)
    }

    fn flush_reliable_datagrams(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        self.flows.flush(sq, tables, qp);
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
        if qp.facts.datagram {
            return self.send_datagrams(sq, tables, qp, now, budget);
        }
        if self.connect(tables, qp, sq).is_none() {
            let until = now.saturating_add(NO_ROOM_RETRY);
            sq.parked = Some(until);
            return Polled::Park(until);
        }
        let answers = self.send_answers(tables, qp, now);
        let Self {
            out,
            connections,
            asks,
            ..
        } = self;
        let Some(connection) = connections.get_mut(&qp.serial()) else {
            return Polled::Idle;
        };
        let Connection {
            route,
            peer,
            requester,
            share,
            ..
        } = connection;
        let first = Psn::new(sq.path_attributes.sq_psn);
        let requester = requester.get_or_insert_with(|| {
            if qp.facts.acknowledged {
                let uplink = qp.vm.uplink();
                let congestion = uplink.map(|uplink| uplink.congestion).unwrap_or_default();
                let sender = Sender::new(first, congestion, *asks, share.another());
                Requester::Acknowledged(Box::new(sender))
            } else {
                Requester::Unacknowledged(Stream::new(first))
            }
        });
        let mut send = |packet: &Packet<'_>, payload: Payload<'_>, attempt: Attempt| {
            out.send(now, &qp.vm, route.as_ref(), packet, payload, attempt)
        };
        let polled = match requester {
            Requester::Acknowledged(sender) => {
                sender.poll(sq, tables, qp, *peer, now, budget, &mut send)
            }
            Requester::Unacknowledged(stream) => {
                stream.poll(sq, tables, qp, *peer, budget, &mut send)
            }
        };
        if answers {
            return Polled::Again;
        }
        polled
    }

    fn answer(&mut self, tables: &'a Tables, qp: &'a Arc<Qp>, now: u64) -> bool {
        self.send_answers(tables, qp, now)
    }

    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>, now: u64) {
        self.acknowledge_taken(qp, now);
        let connection = self.connections.get_mut(&qp.serial());
        let connection = connection.filter(|known| known.is_of(qp));
        let requester = connection.and_then(|known| known.requester.as_mut());
        if let Some(Requester::Acknowledged(sender)) = requester {
            sender.flush(sq, tables, qp);
        }
    }
}
