// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable datagrams over a fabric with packets (`spec/srd.md`, "On the wire").
//!
//! All messages from one GID to another are in one [`Flow`], whichever queue pairs they are of.
//! [`outgoing`] knows which packets are under way, [`incoming`] which came; [`message`] is what they
//! are of. Packets are sent when a work request begins, when an answer comes, and when a timer ends:
//! all of them have the tables of the VM, whose GID the flow is from.
mod incoming;
mod message;
mod outgoing;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use rustc_hash::FxHashMap;
use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::verbs::{vendor_err, wc_status, wr_opcode};

use self::incoming::{Admission, Incoming};
use self::message::{footprint, origin, Piece, Role, Sending};
use self::outgoing::{Outgoing, Stamp, GIVE_UP, PATHS};
use super::egress::Egress;
use super::frame::{Addresses, Frame, Route};
use super::packet::{Packet, Payload, Psn};
use super::port::Port;
use super::recipients::{Arriving, Destination, Recipients};
use super::srd_packet;
use super::srd_packet::{most_refusals, Data, Refusal, SrdPacket};
use super::verdict::{Reason, Verdict};
use crate::engine::cursor::{DataSource, Sink};
use crate::engine::message::{Answer, Message};
use crate::engine::payload_of;
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Payload as Moved, Slice};
use crate::engine::send_queue::{Active, SendQueue};
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::{Segment, Vm};
use crate::footprint::Share;
use crate::limits::MAX_SRD_MESSAGE;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// A receiver answers after so many packets at the latest.
const ANSWER_EVERY: u32 = 16;
/// Packets of a message that are sent before another one has its turn.
const TURN: u32 = 8;
/// A flow that was not used for so long begins anew, nanoseconds, and is forgotten after the other.
const IDLE: u64 = 30_000_000_000;
const FORGET: u64 = 120_000_000_000;
/// A flow that waits for what a READ brings, and has nothing under way, asks whether the peer is
/// there, nanoseconds.
const ASK: u64 = 500_000_000;
/// A flow whose VM is stopped, or busy, is looked at again, nanoseconds.
const LATER: u64 = 1_000_000;
/// READs of a peer that may be answered at a time in one flow.
const MOST_RESPONSES: usize = 256;
/// `rnr_retry` without a limit.
const NO_LIMIT: u8 = 7;
/// How long a peer waits that asks for more than there is room for, as an RNR timer code: 0.64 ms.
const NO_ROOM_TIMER: u8 = 12;
/// Flows that are looked through for some that nobody uses, when one more is made.
const MANY: usize = 64;

/// Between whom a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ends {
    segment: Segment,
    here: Gid,
    there: Gid,
}

/// What a packet that was sent is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct What {
    message: u32,
    piece: Piece,
    part: Part,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Data,
    /// What a READ was to bring cannot be read, for this reason.
    Failed(WcError),
    /// What it was of was given up.
    Nothing,
}

/// All messages between two GIDs, in both directions.
#[derive(Debug)]
struct Flow {
    /// The VM, and in which of its lives.
    vm: Weak<Vm>,
    life: u32,
    token: u64,
    out: Outgoing<What>,
    incoming: Option<Incoming>,
    /// The way of packets that are of no message, and of answers.
    way: Addresses,
    messages: FxHashMap<u32, Sending>,
    next_message: u32,
    /// Those that have something to send that is new, and how many packets the first of them has
    /// sent in its turn.
    ready: VecDeque<u32>,
    turn: u32,
    /// Those that wait for a receive, and until when, nanoseconds.
    later: BinaryHeap<Reverse<(u64, u32)>>,
    /// Those that are to end, with what.
    ended: Vec<(u32, Option<WcError>)>,
    /// Messages that ask for what READs bring, and that bring it.
    asking: usize,
    bringing: usize,
    /// When it was used last, and when it asked last whether the peer is there, nanoseconds.
    used: u64,
    asked: u64,
    /// It is to be looked at then, at the latest, nanoseconds.
    wake: Option<u64>,
    _share: Share,
}

/// A number that is given once, which rises with each flow of the same GIDs and is hard to guess.
fn new_token(before: u64) -> u64 {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    // In 16 ms, modulo 2^32.
    let ticks = unix.map_or(0, |unix| unix.as_millis() >> 4) as u32;
    let last = (before >> 32) as u32;
    let upper = if before != 0 && ticks.wrapping_sub(last.wrapping_add(1)) >= 1 << 31 {
        last.wrapping_add(1)
    } else {
        ticks
    };
    let random = RandomState::new().hash_one(before) as u32;
    u64::from(upper) << 32 | u64::from(random)
}

/// Whether a flow's token is of a later one than another.
fn is_newer(token: u64, than: u64) -> bool {
    let ahead = ((token >> 32) as u32).wrapping_sub((than >> 32) as u32);
    ahead != 0 && ahead < 1 << 31
}

fn invalid(reason: u8) -> WcError {
    WcError::new(wc_status::REM_INV_REQ_ERR, reason)
}

/// The status of a refusal as it may be told to a user: the peer may say anything.
fn refused(refusal: &Refusal) -> WcError {
    let status = match refusal.status {
        known @ (wc_status::REM_INV_RD_REQ_ERR
        | wc_status::REM_INV_REQ_ERR
        | wc_status::REM_ACCESS_ERR
        | wc_status::REM_OP_ERR
        | wc_status::RNR_RETRY_EXC_ERR) => known,
        _ => wc_status::REM_OP_ERR,
    };
    let known = vendor_err::name(refusal.reason).is_some();
    let reason = if known {
        refusal.reason
    } else {
        vendor_err::PEER
    };
    WcError::new(status, reason)
}

/// How a packet fared that came for the first time.
enum Fared {
    Done,
    Refused(WcError, u8),
    /// Its VM is stopped.
    NotNow,
}

impl Flow {
    /// What it takes of its VM's account, bytes.
    const FOOTPRINT: u64 = 3 * size_of::<Self>() as u64 + Outgoing::<What>::FOOTPRINT;

    fn new(vm: &Arc<Vm>, way: Addresses, now: u64, share: Share) -> Self {
        Self {
            vm: Arc::downgrade(vm),
            life: vm.life(),
            token: new_token(0),
            out: Outgoing::new(
                vm.uplink()
                    .map(|uplink| uplink.congestion)
                    .unwrap_or_default(),
            ),
            incoming: None,
            way,
            messages: FxHashMap::default(),
            next_message: 0,
            ready: VecDeque::new(),
            turn: 0,
            later: BinaryHeap::new(),
            ended: Vec::new(),
            asking: 0,
            bringing: 0,
            used: now,
            asked: now,
            wake: None,
            _share: share,
        }
    }

    /// Whether its VM is there still, with its objects.
    fn lives(&self) -> bool {
        let vm = self.vm.upgrade();
        vm.is_some_and(|vm| vm.life() == self.life)
    }

    /// Whether it is of the VM of these tables.
    fn is_of(&self, tables: &Tables) -> bool {
        Weak::ptr_eq(&self.vm, &tables.vm) && self.lives()
    }

    /// Whether nobody uses it.
    fn is_old(&self, now: u64) -> bool {
        self.messages.is_empty() && now.saturating_sub(self.used) >= FORGET
    }

    /// What is sent from now on is of another flow.
    fn renew(&mut self) {
        let congestion = self.vm.upgrade().and_then(|vm| vm.uplink());
        self.token = new_token(self.token);
        self.out = Outgoing::new(
            congestion
                .map(|uplink| uplink.congestion)
                .unwrap_or_default(),
        );
    }

    fn insert(&mut self, message: Sending) {
        let id = self.next_message;
        self.next_message = id.wrapping_add(1);
        self.asking += usize::from(message.asks());
        self.bringing += usize::from(!message.is_request());
        self.messages.insert(id, message);
        self.ready.push_back(id);
    }

    fn remove(&mut self, id: u32) -> Option<Sending> {
        let message = self.messages.remove(&id)?;
        self.asking -= usize::from(message.asks());
        self.bringing -= usize::from(!message.is_request());
        Some(message)
    }

    /// Removes the messages of which `is` says so.
    fn remove_all(&mut self, is: impl Fn(&Sending) -> bool) -> Vec<Sending> {
        let of = |(id, message): (&u32, &Sending)| is(message).then_some(*id);
        let ids: Vec<_> = self.messages.iter().filter_map(of).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// All that is under way ends with an error, and so does what waits, if nothing was heard of it
    /// since the time `since`. What follows is of another flow.
    fn abandon(&mut self, error: WcError, since: u64) {
        self.remove_all(|message| !message.is_request());
        let begun = self
            .messages
            .iter()
            .filter(|(_, message)| message.has_begun() || message.since <= since);
        self.ended.extend(begun.map(|(id, _)| (*id, Some(error))));
        self.renew();
    }

    /// Sends a packet, or one that takes its place.
    fn send_packet<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        mut what: What,
        stamp: Stamp,
        now: u64,
    ) {
        let Some(vm) = self.vm.upgrade() else {
            return;
        };
        let token = self.token;
        let mut send = |way: &Addresses, dest_qp, data, payload: Payload<'_>| {
            let packet = Packet::srd(dest_qp, stamp.psn, SrdPacket::Data(data, &[]));
            let route = Route::on_path(*way, stamp.path);
            egress.send(now, &vm, Some(&route), &packet, payload, stamp.again)
        };
        let Piece { offset, len } = what.piece;
        let message = self.messages.get(&what.message);
        if let (Some(message), Part::Data) = (message, what.part) {
            let mut error = None;
            let mut read = |space: &mut [u8]| {
                error = message.read(tables, offset, space).err();
                error.is_none()
            };
            let payload = Payload {
                len: len as usize,
                read: &mut read,
            };
            let data = message.header(what.message, what.piece, stamp, token);
            if send(
                message.way().unwrap_or(&self.way),
                message.dest_qp,
                data,
                payload,
            ) {
                return;
            }
            let error = error.unwrap_or(WcError::FLUSHED);
            what.part = if message.is_request() {
                self.ended.push((what.message, Some(error)));
                Part::Nothing
            } else {
                Part::Failed(error)
            };
            self.out.replace(stamp.number, what);
        }
        let nothing = Payload {
            len: 0,
            read: &mut |_| true,
        };
        let empty = Data {
            kind: srd_packet::Kind::Nothing,
            solicited: false,
            path: stamp.path,
            token,
            number: stamp.number,
            heard: stamp.heard,
            src_qp: 0,
            qkey: 0,
            message: 0,
            length: 0,
            offset: 0,
            immediate: None,
            rkey: 0,
            remote_addr: 0,
        };
        match (self.messages.get_mut(&what.message), what.part) {
            (Some(message), Part::Failed(WcError { status, vendor })) => {
                let piece = Piece { offset: 0, len: 0 };
                let data = Data {
                    kind: srd_packet::Kind::Failed,
                    length: u32::from(status) << 8 | u32::from(vendor),
                    ..message.header(what.message, piece, stamp, token)
                };
                message.stop();
                send(&self.way, message.dest_qp, data, nothing);
            }
            _ => {
                send(&self.way, 0, empty, nothing);
            }
        }
    }

    /// Sends all that may be sent at time `now`.
    fn pump<P: Port>(&mut self, egress: &mut Egress<P>, tables: &Tables, now: u64) {
        if !tables.running {
            return;
        }
        while let Some(Reverse((until, id))) = self.later.peek() {
            if *until > now {
                break;
            }
            self.ready.push_back(*id);
            self.later.pop();
        }
        while let Some((what, stamp)) = self.out.try_path(now) {
            self.send_packet(egress, tables, what, stamp, now);
        }
        loop {
            if let Some((what, stamp)) = self.out.send_lost(now) {
                self.send_packet(egress, tables, what, stamp, now);
                continue;
            }
            let Some(id) = self.ready.front().copied() else {
                return;
            };
            let piece = self.messages.get(&id).and_then(Sending::piece);
            let Some(piece) = piece else {
                self.ready.pop_front();
                self.turn = 0;
                continue;
            };
            if self.out.next() >= 1 << 31 {
                if !self.out.is_idle() {
                    return;
                }
                self.renew();
            }
            let what = What {
                message: id,
                piece,
                part: Part::Data,
            };
            let Some(stamp) = self.out.send(what, now) else {
                return;
            };
            if let Some(message) = self.messages.get_mut(&id) {
                message.sent(piece);
            }
            self.turn += 1;
            if self.turn >= TURN {
                self.turn = 0;
                self.ready.rotate_left(1);
            }
            self.send_packet(egress, tables, what, stamp, now);
        }
    }

    /// Ends the messages that are to end. No send queue is locked.
    fn settle(&mut self, tables: &Tables) {
        for (id, error) in std::mem::take(&mut self.ended) {
            let Some(message) = self.remove(id) else {
                continue;
            };
            let Some(qp) = message.qp() else {
                continue;
            };
            let Role::Request { active, .. } = &message.role else {
                continue;
            };
            let mut sq = qp.send_queue();
            if sq.may_go_on(tables, &qp).is_err() {
                // It is flushed.
                drop(sq);
                self.asking += usize::from(message.asks());
                self.messages.insert(id, message);
            } else if let Some(error) = error {
                sq.fail_begun(tables, &qp, active, error);
            } else {
                sq.finish_begun(tables, &qp, active);
                qp.vm.count_sent(qp.worker_index, 1, active.message.length);
            }
            qp.schedule();
        }
    }

    /// A packet has its answer.
    fn resolved(&mut self, what: What, refusal: Option<Refusal>, now: u64) {
        let id = what.message;
        let Some(message) = self.messages.get_mut(&id) else {
            return;
        };
        if what.part == Part::Nothing {
            return;
        }
        message.unanswered = message.unanswered.saturating_sub(1);
        message.since = now;
        if !message.is_request() {
            if message.all_sent() && message.unanswered == 0 {
                self.remove(id);
            }
            return;
        }
        if let Some(refusal) = refusal {
            let error = refused(&refusal);
            let Role::Request { rnr_retry, .. } = message.role else {
                return;
            };
            let again = error.status == wc_status::RNR_RETRY_EXC_ERR;
            if again && (rnr_retry == NO_LIMIT || message.not_ready < rnr_retry) {
                message.not_ready = message.not_ready.saturating_add(1);
                message.again_from(what.piece.offset);
                let until = now.saturating_add(rnr_nanoseconds(refusal.timer));
                self.later.push(Reverse((until, id)));
                if let Some(qp) = message.qp() {
                    qp.vm.count_rnr(qp.worker_index);
                }
            } else {
                self.ended.push((id, Some(error)));
            }
            return;
        }
        if message.asks() {
            message.accepted = true;
        } else if message.all_sent() && message.unanswered == 0 {
            self.ended.push((id, None));
        } else if message.unanswered == 0 && message.message.imm_is == Imm::Data {
            // They can be sent now.
            self.ready.push_back(id);
        }
        self.end_if_brought(id);
    }

    fn end_if_brought(&mut self, id: u32) {
        let done = |message: &&Sending| message.asks() && message.accepted && message.is_brought();
        if self.messages.get(&id).filter(done).is_some() {
            self.ended.push((id, None));
        }
    }

    /// Time has come to `now`.
    fn expire<P: Port>(&mut self, egress: &mut Egress<P>, tables: &Tables, now: u64) {
        if !tables.running {
            // That does not count.
            self.out.heard(now);
            self.messages
                .values_mut()
                .for_each(|message| message.since = now);
            return;
        }
        if !self.out.expire(now) {
            self.abandon(NO_ANSWER, now.saturating_sub(GIVE_UP));
        }
        if self.asking != 0 {
            let late = |message: &Sending| now.saturating_sub(message.since) >= GIVE_UP;
            let late = |(id, message): (&u32, &Sending)| {
                (message.asks() && message.accepted && late(message)).then_some(*id)
            };
            let late = self.messages.iter().filter_map(late);
            self.ended.extend(late.map(|id| (id, Some(NO_ANSWER))));
            if self.out.is_idle() && self.ready.is_empty() && self.asks_at() <= now {
                self.asked = now;
                let what = What {
                    message: 0,
                    piece: Piece { offset: 0, len: 0 },
                    part: Part::Nothing,
                };
                if let Some(stamp) = self.out.send(what, now) {
                    self.send_packet(egress, tables, what, stamp, now);
                }
            }
        }
        self.pump(egress, tables, now);
        self.settle(tables);
    }

    /// When the peer is asked whether it is there.
    fn asks_at(&self) -> u64 {
        self.asked.max(self.used).saturating_add(ASK)
    }

    /// When there is something to do though nothing comes, nanoseconds.
    fn deadline(&mut self, running: bool, now: u64) -> Option<u64> {
        if !running && (!self.messages.is_empty() || !self.out.is_idle()) {
            return Some(now.saturating_add(LATER));
        }
        if !self.ended.is_empty() {
            return Some(now);
        }
        let packets = self.out.deadline();
        let later = self.later.peek().map(|Reverse((until, _))| *until);
        let asks = (self.asking != 0).then(|| self.asks_at());
        let idle = self.messages.is_empty();
        let old = idle.then(|| self.used.saturating_add(FORGET));
        let all = packets.into_iter().chain(later).chain(asks).chain(old);
        all.min()
    }

    /// Carries out a packet that is new.
    fn carry_out(
        &mut self,
        tables: &Tables,
        dest_qp: u32,
        data: &Data,
        payload: &[u8],
        now: u64,
    ) -> Fared {
        match data.kind {
            srd_packet::Kind::Nothing => return Fared::Done,
            srd_packet::Kind::Brought | srd_packet::Kind::Failed => {
                self.bring(tables, dest_qp, data, payload, now);
                return Fared::Done;
            }
            srd_packet::Kind::Send | srd_packet::Kind::Write | srd_packet::Kind::Read => {}
        }
        let nobody = WcError::new(wc_status::REM_INV_RD_REQ_ERR, vendor_err::NO_QUEUE_PAIR);
        let Some(qp) = tables.qps.get(dest_qp) else {
            return Fared::Refused(nobody, 0);
        };
        let len = payload.len() as u64;
        let end = u64::from(data.offset) + len;
        let length = u64::from(data.length);
        let imm = data.immediate.is_some();
        let (kind, opcode, fits) = match data.kind {
            srd_packet::Kind::Send => {
                let longest = payload_of(qp.vm.active_mtu());
                let opcode = if imm {
                    wr_opcode::SEND_WITH_IMM
                } else {
                    wr_opcode::SEND
                };
                let fits = data.offset == 0 && end == length && len <= longest;
                (Kind::Send, opcode, fits)
            }
            srd_packet::Kind::Write => {
                let opcode = if imm {
                    wr_opcode::RDMA_WRITE_WITH_IMM
                } else {
                    wr_opcode::RDMA_WRITE
                };
                // An empty packet is that of an empty message.
                let whole = len != 0 || length == 0;
                (
                    Kind::Write,
                    opcode,
                    end <= length && whole && (!imm || end == length),
                )
            }
            _ => (Kind::Read, wr_opcode::RDMA_READ, payload.is_empty() && !imm),
        };
        if !fits || length > MAX_SRD_MESSAGE {
            return Fared::Refused(invalid(vendor_err::MESSAGE_LENGTH), 0);
        }
        let message = Message {
            opcode,
            kind,
            imm_is: if imm { Imm::Data } else { Imm::None },
            solicited: data.solicited,
            imm: data.immediate.unwrap_or_default(),
            remote_addr: data.remote_addr,
            rkey: data.rkey,
            srqn: 0,
            src_qp: data.src_qp,
            length,
        };
        // A READ is only judged now, and read when it is sent.
        let moved = if kind == Kind::Read {
            Moved::Into(Sink::Bytes(&mut []))
        } else {
            Moved::From(DataSource::Bytes(payload))
        };
        let slice = Slice {
            message: &message,
            offset: data.offset.into(),
            len,
            last: true,
            claims: kind == Kind::Send || imm,
            payload: moved,
        };
        match qp.take_reliable_datagram(tables, origin(qp), data.qkey, slice) {
            Answer::Done | Answer::Progress => {}
            Answer::NotReady(timer) => {
                let none = WcError::new(wc_status::RNR_RETRY_EXC_ERR, vendor_err::NO_RECEIVE);
                return Fared::Refused(none, timer);
            }
            Answer::Refused(error) | Answer::Local(error) => return Fared::Refused(error, 0),
            Answer::Busy | Answer::Stopped | Answer::NoAnswer => return Fared::NotNow,
        }
        if kind == Kind::Read {
            let full = self.bringing >= MOST_RESPONSES;
            let share = tables
                .footprint
                .share(footprint(0, 0))
                .ok()
                .filter(|_| !full);
            let Some(share) = share else {
                let none = WcError::new(wc_status::RNR_RETRY_EXC_ERR, vendor_err::NO_MEMORY);
                return Fared::Refused(none, NO_ROOM_TIMER);
            };
            let role = Role::Response {
                number: data.message,
            };
            let mtu = payload_of(qp.vm.active_mtu()) as u32;
            let to = (data.src_qp, data.qkey);
            self.insert(Sending::new((qp, role, message), to, mtu, now, share));
        } else {
            let messages = u64::from(end == length);
            qp.vm.count_received(qp.worker_index, messages, len);
        }
        Fared::Done
    }

    /// A part of what a READ of ours brings has come.
    fn bring(&mut self, tables: &Tables, dest_qp: u32, data: &Data, payload: &[u8], now: u64) {
        let Some(message) = self.messages.get_mut(&data.message) else {
            return;
        };
        let ours = message.asks() && message.message.src_qp == dest_qp;
        if !ours || message.is_brought() {
            return;
        }
        message.since = now;
        if data.kind == srd_packet::Kind::Failed {
            let [_, _, status, reason] = data.length.to_be_bytes();
            let refusal = Refusal {
                number: 0,
                status,
                reason,
                timer: 0,
            };
            self.ended.push((data.message, Some(refused(&refusal))));
            return;
        }
        match message.bring(tables, data.offset, payload) {
            Ok(()) => self.end_if_brought(data.message),
            Err(error) => self.ended.push((data.message, Some(error))),
        }
    }
}

/// Nothing of a flow was answered for too long.
const NO_ANSWER: WcError = WcError::new(wc_status::RESP_TIMEOUT_ERR, vendor_err::NO_ANSWER);
/// The peer has forgotten a flow.
const FORGOTTEN: WcError = WcError::new(wc_status::REM_ABORT_ERR, vendor_err::PEER);

/// All flows of a wire.
#[derive(Debug, Default)]
pub(super) struct Flows {
    all: FxHashMap<Ends, Flow>,
    /// When each is to be looked at that waits for a time, nanoseconds.
    timers: BTreeSet<(u64, Ends)>,
    /// Those that owe an answer.
    owing: Vec<Ends>,
    /// Some are forgotten when there are so many.
    tidy_at: usize,
}

impl Flows {
    /// The flow between two GIDs; `None` if the account of the VM has no room.
    fn flow(&mut self, tables: &Tables, ends: Ends, way: Addresses, now: u64) -> Option<&mut Flow> {
        let known = self.all.get(&ends);
        if !known.is_some_and(|known| known.is_of(tables)) {
            if self.all.len() >= self.tidy_at.max(MANY) {
                self.tidy(now);
            }
            let vm = tables.vm.upgrade()?;
            let share = tables.footprint.share(Flow::FOOTPRINT).ok()?;
            self.all.insert(ends, Flow::new(&vm, way, now, share));
        }
        let flow = self.all.get_mut(&ends)?;
        flow.used = now;
        Some(flow)
    }

    /// Forgets flows that nobody uses.
    fn tidy(&mut self, now: u64) {
        self.all.retain(|_, flow| flow.lives() && !flow.is_old(now));
        self.tidy_at = 2 * self.all.len();
    }

    /// Something was done in a flow: it may be due at another time than before.
    fn watch(&mut self, ends: Ends, running: bool, now: u64) {
        let Some(flow) = self.all.get_mut(&ends) else {
            return;
        };
        let Some(deadline) = flow.deadline(running, now) else {
            return;
        };
        if flow.wake.is_none_or(|wake| deadline < wake) {
            if let Some(wake) = flow.wake.replace(deadline) {
                self.timers.remove(&(wake, ends));
            }
            self.timers.insert((deadline, ends));
        }
    }

    /// When a flow has something to do, nanoseconds.
    pub(super) fn timer(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Does what is due by time `now`.
    pub(super) fn run_timers<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        now: u64,
        vms: &mut impl Recipients,
    ) {
        while let Some((at, ends)) = self.timers.first().copied() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(flow) = self.all.get_mut(&ends) else {
                continue;
            };
            flow.wake = None;
            let to = Destination {
                segment: ends.segment,
                gid: ends.here,
            };
            let arriving = Arriving {
                bytes: 0,
                source: ends.there,
                can_wait: true,
            };
            let mut running = None;
            let there = vms.visit(to, arriving, &mut |tables| {
                if flow.is_of(tables) && !flow.is_old(now) {
                    running = Some(tables.running);
                    flow.expire(egress, tables, now);
                }
            });
            match running {
                Some(running) => self.watch(ends, running, now),
                None if there => drop(self.all.remove(&ends)),
                // It is busy for a moment.
                None => {
                    flow.wake = Some(now.saturating_add(LATER));
                    self.timers.insert((now.saturating_add(LATER), ends));
                }
            }
        }
    }

    /// Begins the message of the work request in progress. Returns false if the account of its VM
    /// has no room.
    pub(super) fn begin<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> bool {
        let (Some(to), Some(uplink)) = (sq.datagram, qp.vm.uplink()) else {
            return false;
        };
        let way = Addresses::of(&to);
        let ends = Ends {
            segment: uplink.segment,
            here: to.sgid,
            there: to.dgid,
        };
        let inline = if active.inline {
            sq.inline.as_slice()
        } else {
            &[]
        };
        let Ok(share) = tables
            .footprint
            .share(footprint(sq.sges.len(), inline.len()))
        else {
            return false;
        };
        let before = self.all.get(&ends).map(|flow| flow.used);
        let Some(flow) = self.flow(tables, ends, way, now) else {
            return false;
        };
        let rested = before.is_some_and(|used| now.saturating_sub(used) >= IDLE);
        if rested && flow.messages.is_empty() {
            flow.renew();
        }
        let role = Role::Request {
            active: *active,
            way,
            sges: sq.sges.clone(),
            inline: inline.to_vec(),
            rnr_retry: sq.rnr_retry,
        };
        flow.way = way;
        let mtu = payload_of(qp.vm.active_mtu()) as u32;
        let of = (qp, role, active.message);
        flow.insert(Sending::new(of, (to.qpn, to.qkey), mtu, now, share));
        flow.pump(egress, tables, now);
        self.watch(ends, tables.running, now);
        true
    }

    /// Gives up all that a send queue has under way.
    pub(super) fn flush(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        for flow in self.all.values_mut() {
            let of = Arc::downgrade(qp);
            let own = |message: &Sending| message.is_request() && Weak::ptr_eq(&message.qp, &of);
            for message in flow.remove_all(own) {
                if let Role::Request { active, .. } = &message.role {
                    sq.flush_begun(tables, qp, active);
                }
            }
        }
    }

    /// A queue pair was destroyed.
    pub(super) fn forget(&mut self, qp: &Arc<Qp>) {
        let of = Arc::downgrade(qp);
        for flow in self.all.values_mut() {
            flow.remove_all(|message| Weak::ptr_eq(&message.qp, &of));
        }
    }

    /// Forgets flows of VMs that are gone, and what is of queue pairs that are.
    pub(super) fn forget_destroyed(&mut self) {
        self.all.retain(|_, flow| flow.lives());
        let gone = |message: &Sending| {
            let qp = message.qp.upgrade();
            qp.is_none_or(|qp| qp.dead.load(Ordering::SeqCst))
        };
        for flow in self.all.values_mut() {
            flow.remove_all(gone);
        }
    }

    /// A packet came for a VM, at an address that it has.
    pub(super) fn take<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        now: u64,
        segment: Segment,
        (frame, packet): (&Frame<'_>, &Packet<'_>),
        srd: &SrdPacket<'_>,
    ) -> Option<Verdict> {
        let from = &frame.addresses;
        if !tables.running && !matches!(srd, SrdPacket::Data(..)) {
            return Some(Verdict::Dropped(Reason::Down));
        }
        let ends = Ends {
            segment,
            here: from.destination,
            there: from.source,
        };
        match srd {
            SrdPacket::Data(data, payload) => {
                let frame = (ends, frame, packet);
                Some(self.take_data(egress, tables, now, frame, data, payload))
            }
            SrdPacket::Answer(answer) => {
                let answer = answer.as_ref()?;
                let flow = self.all.get_mut(&ends)?;
                let ours = flow.is_of(tables) && answer.token == flow.token;
                if !ours {
                    return Some(Verdict::Dropped(Reason::Unasked));
                }
                flow.used = now;
                if answer.not_now {
                    flow.messages
                        .values_mut()
                        .for_each(|message| message.since = now);
                }
                let mut told = Vec::new();
                flow.out
                    .answered(answer, now, &mut |what, refusal| told.push((what, refusal)));
                let new = !told.is_empty();
                for (what, refusal) in told {
                    flow.resolved(what, refusal, now);
                }
                flow.pump(egress, tables, now);
                flow.settle(tables);
                self.watch(ends, tables.running, now);
                Some(if new {
                    Verdict::Taken
                } else {
                    Verdict::Dropped(Reason::Behind)
                })
            }
            SrdPacket::Reset { token } => {
                let flow = self.all.get_mut(&ends)?;
                let ours = flow.is_of(tables) && *token == flow.token;
                if !ours {
                    return Some(Verdict::Dropped(Reason::Unasked));
                }
                flow.abandon(FORGOTTEN, 0);
                flow.settle(tables);
                flow.pump(egress, tables, now);
                self.watch(ends, tables.running, now);
                Some(Verdict::Ends(FORGOTTEN))
            }
        }
    }

    fn take_data<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        now: u64,
        (ends, frame, packet): (Ends, &Frame<'_>, &Packet<'_>),
        data: &Data,
        payload: &[u8],
    ) -> Verdict {
        let way = frame.addresses.back();
        let Some(flow) = self.flow(tables, ends, way, now) else {
            return Verdict::Dropped(Reason::NoRoom);
        };
        flow.way = way;
        let known = flow.incoming.as_ref().map(Incoming::token);
        if known != Some(data.token) {
            if known.is_some_and(|known| !is_newer(data.token, known)) {
                return Verdict::Dropped(Reason::Behind);
            }
            if data.heard != 0 {
                // What came before is not known here.
                if let Some(vm) = tables.vm.upgrade() {
                    let token = data.token;
                    let reset = Packet::srd(0, Psn::default(), SrdPacket::Reset { token });
                    egress.send_empty(now, &vm, Some(&Route::on_path(way, 0)), &reset);
                }
                return Verdict::Dropped(Reason::State);
            }
            // What the peer has asked for before is of no use to it.
            flow.remove_all(|message| !message.is_request());
            flow.incoming = Some(Incoming::new(data.token));
        }
        let Some(incoming) = &mut flow.incoming else {
            return Verdict::Dropped(Reason::State);
        };
        let owed = incoming.owed();
        let mtu = flow
            .vm
            .upgrade()
            .map_or(0, |vm| payload_of(vm.active_mtu()));
        let most = most_refusals(mtu as usize);
        let mut verdict = if tables.running {
            let numbers = (data.number, data.heard);
            let congested = frame.addresses.congested();
            match incoming.arrives(numbers, (data.path, packet.psn), congested) {
                Admission::Again => Verdict::Again,
                Admission::Beyond => Verdict::Dropped(Reason::Ahead),
                Admission::New if !incoming.may_refuse(most) => Verdict::Dropped(Reason::NoRoom),
                Admission::New => Verdict::Taken,
            }
        } else {
            incoming.not_now();
            Verdict::Dropped(Reason::Down)
        };
        if verdict == Verdict::Taken {
            let fared = flow.carry_out(tables, packet.dest_qp, data, payload, now);
            let Some(incoming) = &mut flow.incoming else {
                return verdict;
            };
            match fared {
                Fared::Done => incoming.took(data.number),
                Fared::Refused(error, timer) => {
                    incoming.refused(Refusal {
                        number: data.number,
                        status: error.status,
                        reason: error.vendor,
                        timer,
                    });
                    verdict = Verdict::RefusedMessage(error);
                }
                Fared::NotNow => {
                    incoming.not_now();
                    verdict = Verdict::Dropped(Reason::Down);
                }
            }
            flow.settle(tables);
            flow.pump(egress, tables, now);
        }
        if owed == 0 {
            self.owing.push(ends);
        } else if owed + 1 >= ANSWER_EVERY {
            self.answer_one(egress, ends, now);
        }
        self.watch(ends, tables.running, now);
        verdict
    }

    fn answer_one<P: Port>(&mut self, egress: &mut Egress<P>, ends: Ends, now: u64) {
        let Some(flow) = self.all.get_mut(&ends) else {
            return;
        };
        let Some((vm, incoming)) = flow.vm.upgrade().zip(flow.incoming.as_mut()) else {
            return;
        };
        if incoming.owed() == 0 {
            return;
        }
        let answer = incoming.answer();
        let packet = Packet::srd(0, Psn::default(), SrdPacket::Answer(None));
        let payload = Payload {
            len: answer.bytes().len(),
            read: &mut |space: &mut [u8]| {
                space.copy_from_slice(answer.bytes());
                true
            },
        };
        let route = Route::on_path(flow.way, incoming.path());
        egress.send(now, &vm, Some(&route), &packet, payload, false);
    }

    /// Answers all that came.
    pub(super) fn answer<P: Port>(&mut self, egress: &mut Egress<P>, now: u64) {
        for ends in std::mem::take(&mut self.owing) {
            self.answer_one(egress, ends, now);
        }
    }
}

const _: () = assert!(PATHS <= srd_packet::MOST_PATHS);
