// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All messages between two GIDs: which packets they become, and what becomes of them.
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use rustc_hash::FxHashMap;
use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{vendor_err, wc_status, wr_opcode};

use super::super::egress::{Attempt, Egress};
use super::super::frame::{Addresses, Route};
use super::super::packet::{Packet, Payload};
use super::super::port::Port;
use super::super::srd_packet::{self, Answer as AnswerPacket, Data, Refusal, SrdPacket};
use super::incoming::Incoming;
use super::message::{footprint, origin, Piece, Role, Sending};
use super::outgoing::{Outgoing, Stamp, GIVE_UP};
use crate::engine::cursor::{DataSource, Sink};
use crate::engine::message::{Answer, Message};
use crate::engine::payload_of;
use crate::engine::responder::{Payload as Moved, Slice};
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::footprint::Share;
use crate::limits::MAX_SRD_MESSAGE;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// Packets of a message that are sent before another one has its turn.
const TURN: u32 = 8;
/// A flow that waits for what a READ brings, and has nothing under way, asks whether the peer is
/// there, nanoseconds.
const ASK: u64 = 500_000_000;
/// Lists of messages of the past that are kept.
const SPARE: usize = 64;
/// READs of a peer that may be answered at a time in one flow.
const MOST_RESPONSES: usize = 256;
/// `rnr_retry` without a limit.
const NO_LIMIT: u8 = 7;
/// How long a peer waits that asks for more than there is room for, as an RNR timer code: 0.64 ms.
const NO_ROOM_TIMER: u8 = 12;
/// A flow is forgotten that was not used for so long, nanoseconds.
const FORGET: u64 = 120_000_000_000;
/// A flow whose VM is stopped is looked at again, nanoseconds.
const STOPPED: u64 = 20_000_000;

/// What a packet that was sent is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct What {
    message: u32,
    piece: Piece,
    part: Part,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Data,
    /// What a READ was to bring cannot be read, for this reason.
    Failed(WcError),
    /// What it was of was given up.
    Nothing,
}

/// All messages between two GIDs, in both directions.
#[derive(Debug)]
pub(super) struct Flow {
    /// The VM, and in which of its lives.
    pub vm: Weak<Vm>,
    life: u32,
    pub token: u64,
    pub out: Outgoing<What>,
    pub incoming: Option<Incoming>,
    /// The way of packets that are of no message, and of answers.
    pub way: Addresses,
    pub messages: FxHashMap<u32, Sending>,
    next_message: u32,
    /// Those that have something to send that is new, and how many packets the first of them has
    /// sent in its turn.
    ready: VecDeque<u32>,
    turn: u32,
    /// Those that wait for a receive, and until when, nanoseconds.
    later: BinaryHeap<Reverse<(u64, u32)>>,
    /// Those that are to end, with what.
    ended: Vec<(u32, Option<WcError>)>,
    /// Lists of messages of the past, for their capacity.
    spare: Vec<(Vec<Sge>, Vec<u8>)>,
    /// Packets that an answer tells of. (Kept for its capacity.)
    told: Vec<(What, Option<Refusal>)>,
    /// Messages that ask for what READs bring, and that bring it.
    asking: usize,
    bringing: usize,
    /// When it was used last, and when it asked last whether the peer is there, nanoseconds.
    pub used: u64,
    asked: u64,
    /// It is to be looked at then, at the latest, nanoseconds.
    pub wake: Option<u64>,
    _share: Share,
}

/// A number that is given once, which rises with each flow of the same GIDs and is hard to guess.
pub(super) fn new_token(before: u64) -> u64 {
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
pub(super) fn is_newer(token: u64, than: u64) -> bool {
    let ahead = ((token >> 32) as u32).wrapping_sub((than >> 32) as u32);
    ahead != 0 && ahead < 1 << 31
}

pub(super) fn invalid(reason: u8) -> WcError {
    WcError::new(wc_status::REM_INV_REQ_ERR, reason)
}

/// The status of a refusal as it may be told to a user: the peer may say anything.
pub(super) fn refused(refusal: &Refusal) -> WcError {
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
pub(super) enum Fared {
    Done,
    Refused(WcError, u8),
    /// Its VM is stopped.
    NotNow,
}

impl Flow {
    /// What it takes of its VM's account, bytes.
    pub(super) const FOOTPRINT: u64 = 3 * size_of::<Self>() as u64 + Outgoing::<What>::FOOTPRINT;

    pub(super) fn new(vm: &Arc<Vm>, way: Addresses, now: u64, share: Share) -> Self {
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
            told: Vec::new(),
            spare: Vec::new(),
            asking: 0,
            bringing: 0,
            used: now,
            asked: now,
            wake: None,
            _share: share,
        }
    }

    /// Whether its VM is there still, with its objects.
    pub(super) fn lives(&self) -> bool {
        let vm = self.vm.upgrade();
        vm.is_some_and(|vm| vm.life() == self.life)
    }

    /// Whether it is of the VM of these tables.
    pub(super) fn is_of(&self, tables: &Tables) -> bool {
        Weak::ptr_eq(&self.vm, &tables.vm) && self.lives()
    }

    /// Whether nobody uses it.
    pub(super) fn is_old(&self, now: u64) -> bool {
        self.messages.is_empty() && now.saturating_sub(self.used) >= FORGET
    }

    /// What is sent from now on is of another flow.
    pub(super) fn renew(&mut self) {
        let congestion = self.vm.upgrade().and_then(|vm| vm.uplink());
        self.token = new_token(self.token);
        self.out = Outgoing::new(
            congestion
                .map(|uplink| uplink.congestion)
                .unwrap_or_default(),
        );
    }

    /// Copies of the lists of a work request.
    pub(super) fn lists(&mut self, sges: &[Sge], inline: &[u8]) -> (Vec<Sge>, Vec<u8>) {
        let (mut own_sges, mut own_inline) = self.spare.pop().unwrap_or_default();
        own_sges.clear();
        own_sges.extend_from_slice(sges);
        own_inline.clear();
        own_inline.extend_from_slice(inline);
        (own_sges, own_inline)
    }

    pub(super) fn insert(&mut self, message: Sending) {
        let id = self.next_message;
        self.next_message = id.wrapping_add(1);
        self.asking += usize::from(message.asks());
        self.bringing += usize::from(!message.is_request());
        self.messages.insert(id, message);
        self.ready.push_back(id);
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Sending> {
        let message = self.messages.remove(&id)?;
        self.asking -= usize::from(message.asks());
        self.bringing -= usize::from(!message.is_request());
        Some(message)
    }

    /// Removes the messages of which `is` says so.
    pub(super) fn remove_all(&mut self, is: impl Fn(&Sending) -> bool) -> Vec<Sending> {
        let of = |(id, message): (&u32, &Sending)| is(message).then_some(*id);
        let ids: Vec<_> = self.messages.iter().filter_map(of).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// All that is under way ends with an error, and so does what waits, if nothing was heard of it
    /// since the time `since`. What follows is of another flow.
    pub(super) fn abandon(&mut self, error: WcError, since: u64) {
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
        attempt: Attempt,
        now: u64,
    ) {
        let Some(vm) = self.vm.upgrade() else {
            return;
        };
        let token = self.token;
        let mut send = |way: &Addresses, dest_qp, data, payload: Payload<'_>| {
            let packet = Packet::srd(dest_qp, stamp.psn, SrdPacket::Data(data, &[]));
            let route = Route::on_path(*way, stamp.path);
            egress.send(now, &vm, Some(&route), &packet, payload, attempt)
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
    pub(super) fn pump<P: Port>(&mut self, egress: &mut Egress<P>, tables: &Tables, now: u64) {
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
            self.send_packet(egress, tables, what, stamp, Attempt::Again, now);
        }
        loop {
            if let Some((what, stamp)) = self.out.send_lost(now) {
                self.send_packet(egress, tables, what, stamp, Attempt::Again, now);
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
                // What READs bring is of this flow, too.
                if !self.out.is_idle() || self.asking != 0 {
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
            self.send_packet(egress, tables, what, stamp, Attempt::First, now);
        }
    }

    /// Ends the messages that are to end. No send queue is locked.
    pub(super) fn settle(&mut self, tables: &Tables) {
        let mut ended = std::mem::take(&mut self.ended);
        for (id, error) in ended.drain(..) {
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
                self.asking += usize::from(message.asks());
                self.messages.insert(id, message);
                qp.schedule();
                continue;
            }
            if let Some(error) = error {
                sq.fail_begun(tables, &qp, active, error);
            } else {
                sq.finish_begun(tables, &qp, active);
                qp.vm.count_sent(qp.worker_index, 1, active.message.length);
            }
            qp.schedule();
            if let Role::Request { sges, inline, .. } = message.role {
                if self.spare.len() < SPARE {
                    self.spare.push((sges, inline));
                }
            }
        }
        self.ended = ended;
    }

    /// An answer came at time `now`. Returns whether it says anything new.
    pub(super) fn answered(&mut self, answer: &AnswerPacket<'_>, now: u64) -> bool {
        if answer.not_now {
            self.heard(now);
        }
        let mut told = std::mem::take(&mut self.told);
        let mut tell = |what, refusal| told.push((what, refusal));
        self.out.answered(answer, now, &mut tell);
        let new = !told.is_empty();
        for (what, refusal) in told.drain(..) {
            self.resolved(what, refusal, now);
        }
        self.told = told;
        new
    }

    /// What keeps messages from being answered does not count.
    fn heard(&mut self, now: u64) {
        let messages = self.messages.values_mut();
        messages.for_each(|message| message.since = now);
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

    /// Time has come to `now`. If its VM has the GID no longer, all of it ends.
    pub(super) fn expire<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        has_gid: bool,
        now: u64,
    ) {
        if !tables.running {
            // That does not count.
            self.out.heard(now);
            self.heard(now);
            return;
        }
        if !has_gid {
            self.abandon(NO_ANSWER, now);
            self.settle(tables);
            return;
        }
        if !self.out.expire(now) {
            // Who captures sees which packet has no answer.
            if let Some((what, stamp)) = self.out.oldest() {
                let over = Attempt::Over(NO_ANSWER);
                self.send_packet(egress, tables, what, stamp, over, now);
            }
            self.abandon(NO_ANSWER, now.saturating_sub(GIVE_UP));
        }
        if self.asking != 0 {
            let late = |message: &Sending| now.saturating_sub(message.since) >= GIVE_UP;
            let late = |(id, message): (&u32, &Sending)| {
                (message.asks() && message.accepted && late(message)).then_some(*id)
            };
            let late = self.messages.iter().filter_map(late);
            self.ended.extend(late.map(|id| (id, Some(NO_ANSWER))));
            if self.asks_at().is_some_and(|at| at <= now) {
                self.asked = now;
                let what = What {
                    message: 0,
                    piece: Piece { offset: 0, len: 0 },
                    part: Part::Nothing,
                };
                if let Some(stamp) = self.out.send(what, now) {
                    self.send_packet(egress, tables, what, stamp, Attempt::First, now);
                }
            }
        }
        self.pump(egress, tables, now);
        self.settle(tables);
    }

    /// When the peer is asked whether it is there, if nothing is under way that does so.
    fn asks_at(&self) -> Option<u64> {
        let waits = self.asking != 0 && self.out.is_idle() && self.ready.is_empty();
        waits.then(|| self.asked.max(self.used).saturating_add(ASK))
    }

    /// When there is something to do though nothing comes, nanoseconds.
    pub(super) fn deadline(&mut self, running: bool, now: u64) -> Option<u64> {
        let works = !self.messages.is_empty() || !self.out.is_idle() || !self.ended.is_empty();
        if !running && works {
            return Some(now.saturating_add(STOPPED));
        }
        if !self.ended.is_empty() {
            return Some(now);
        }
        let packets = self.out.deadline();
        let later = self.later.peek().map(|Reverse((until, _))| *until);
        let asks = self.asks_at();
        let idle = self.messages.is_empty();
        let old = idle.then(|| self.used.saturating_add(FORGET));
        let all = packets.into_iter().chain(later).chain(asks).chain(old);
        all.min()
    }

    /// Carries out a packet that is new.
    pub(super) fn carry_out(
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
pub(super) const FORGOTTEN: WcError = WcError::new(wc_status::REM_ABORT_ERR, vendor_err::PEER);
