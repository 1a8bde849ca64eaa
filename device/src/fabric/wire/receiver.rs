// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The responder of a fabric with packets: it takes them in the order of their sequence numbers,
//! hands their parts of messages to the engine's responder, and answers.
//!
//! Each packet is carried out once. One that comes again is acknowledged again. Of one that comes too
//! early, the requester is told once that packets before it are missing; it is kept until those are
//! there, if there is room, for a requester that has asked what is missing. Others send it again, and
//! Soft-RoCE takes no acknowledgement of it before. What was brought is brought again: an RDMA READ
//! reads anew, what an atomic operation found is kept.
use std::collections::VecDeque;
use std::sync::Arc;

use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::verbs::{flush_level, vendor_err, wr_opcode};

use super::packet::{
    Body, GapList, Nak, Operands, Packet, Payload, Place, Psn, Request, RequestPacket, Reth,
    Service, Syndrome, HALF,
};
use super::rooms::{Kept, Rooms};
use super::verdict::{Reason, Verdict};
use crate::engine::cursor::{DataSource, Sink};
use crate::engine::message::{Answer, Message};
use crate::engine::operation::flush_access;
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Origin, Payload as Moved, Responder, Slice};
use crate::engine::tables::Tables;
use crate::engine::vm::PacketEvent;
use crate::footprint::{listed, Share};
use crate::memory::atomic::AtomicOperation;
use crate::verbs::WcError;

/// Longest message, bytes.
const LONGEST: u32 = 1 << 31;
/// Packets that are kept, at most: as many as a requester of ours has under way.
const MOST_KEPT: usize = 512;
/// Answers that may wait until what an RDMA READ brings is sent, beside two for each request that
/// brings something. Packets that would lead to more are dropped.
const MORE_REPLIES: usize = 8;

/// The message that is under way.
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    kind: Kind,
    reth: Reth,
    /// Bytes placed.
    offset: u64,
}

/// What an RDMA READ brings, as far as it was not sent.
#[derive(Debug, Clone, Copy)]
struct Reading {
    reth: Reth,
    srqn: u32,
    /// The next packet, its number within the answer, and how many there are.
    psn: Psn,
    number: u32,
    packets: u32,
    msn: u32,
    /// It was asked for before.
    again: bool,
}

/// An answer that is to be sent.
#[derive(Debug, Clone, Copy)]
enum Reply {
    /// To this packet.
    Acknowledge(Psn, Syndrome, u32),
    /// What was there before an atomic operation.
    Atomic(Psn, u64, u32),
    /// To FLUSH and ATOMIC WRITE.
    Done(Psn, u32),
    Read(Reading),
}

impl Reply {
    /// The number of the packet to send next, and how many there are.
    fn packets(&self) -> (Psn, u32) {
        match self {
            Self::Acknowledge(psn, ..) | Self::Atomic(psn, ..) | Self::Done(psn, _) => (*psn, 1),
            Self::Read(reading) => (reading.psn, reading.packets - reading.number),
        }
    }

    /// Whether it brings something, from packet `psn` on.
    fn brings(&self, psn: Psn) -> bool {
        let (next, packets) = self.packets();
        !matches!(self, Self::Acknowledge(..)) && psn.since(next) < packets
    }
}

/// A request that brings something, for when it comes again.
#[derive(Debug, Clone, Copy)]
struct Brought {
    psn: Psn,
    /// Sequence numbers that it takes.
    packets: u32,
    what: What,
    msn: u32,
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// Of this range, by way of this shared receive queue (XRC).
    Read(Reth, u32),
    Atomic(u64),
    Done,
}

/// A packet that came too early.
#[derive(Debug)]
struct Early {
    psn: Psn,
    kept: Kept,
}

/// What a responder has come to: what it tells a requester that sends again what was carried out,
/// where all that is to be answered is an acknowledgement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Completed {
    expected: Psn,
    pub messages: u32,
    /// What the last packet asked for is its answer.
    brings_last: bool,
    fatal: Option<(Psn, Nak)>,
}

impl Completed {
    /// The answer to a packet that came before, of a request of this kind. The requester learns why
    /// everything ended, though its first answer may be lost, and those to packets before it: the NAK
    /// acknowledges them. It does not bring what they were to bring, so one of those has no answer.
    pub(super) fn answer(&self, packet: &Packet<'_>, kind: Kind) -> Option<(Psn, Syndrome)> {
        let brings = brings(kind);
        if let Some((fatal, nak)) = self.fatal {
            let ahead = packet.psn.since(fatal);
            let answers = ahead == 0 || (ahead >= HALF && !brings);
            return answers.then_some((fatal, Syndrome::Nak(nak)));
        }
        let came_before = packet.psn.since(self.expected) >= HALF;
        if !came_before || brings || !packet.ack_request || !packet.service.answers() {
            return None;
        }
        // An acknowledgement of the last packet would be taken for the answer to a request that brings
        // something, if it is one of that.
        let last = self.expected.before();
        let psn = if self.brings_last { packet.psn } else { last };
        Some((psn, Syndrome::Ack))
    }
}

/// How a packet of a request fared.
enum Fared {
    /// It is carried out, and takes so many sequence numbers. Perhaps it is to be answered by what it
    /// brings.
    Done(u32, Option<What>),
    /// What the engine's responder said.
    Not(Answer),
}

/// The responder's half of a queue pair on a fabric with packets.
#[derive(Debug)]
pub(super) struct Receiver {
    /// The packet to take next.
    expected: Psn,
    /// Messages completed.
    messages: u32,
    under_way: Option<UnderWay>,
    /// The requester knows that it has to go back to `expected`.
    told: bool,
    /// The requester has asked what is missing, so it sends again nothing but that.
    asked: bool,
    /// What was answered to the packet that ended it all: its requester may ask again.
    fatal: Option<(Psn, Nak)>,
    /// Requests that bring something that its requester may have under way, as far as it has room.
    at_a_time: u8,
    /// Answers in the order in which they are sent.
    replies: VecDeque<Reply>,
    /// The last requests that brought something, as many as the requester may have under way.
    brought: VecDeque<Brought>,
    /// Packets that came too early, in their order.
    early: VecDeque<Early>,
}

impl Receiver {
    /// What one that takes so many requests that bring something at a time takes of its VM's
    /// account, bytes, beside itself.
    fn footprint(at_a_time: u8) -> u64 {
        let bringing = usize::from(at_a_time);
        // The lists grow to twice what they need.
        listed::<Reply>(2 * most_replies(at_a_time)) + listed::<Brought>(2 * bringing)
    }

    /// One that is in the account that `share` is of; `None` if there is no room in it.
    pub(super) fn new(first: Psn, at_a_time: u8, share: &mut Share) -> Option<Self> {
        share.grow(Self::footprint(at_a_time)).ok()?;
        Some(Self {
            at_a_time,
            expected: first,
            messages: 0,
            under_way: None,
            told: false,
            asked: false,
            fatal: None,
            replies: VecDeque::new(),
            brought: VecDeque::new(),
            early: VecDeque::new(),
        })
    }

    /// Keeps a packet that came too early, until [`Self::next_kept`]. Returns false if there is no
    /// room for it in the account that `share` is of.
    pub(super) fn keep(
        &mut self,
        psn: Psn,
        bytes: &[u8],
        share: &Share,
        rooms: &mut Rooms,
    ) -> bool {
        let ahead = psn.since(self.expected);
        let before = |early: &Early| early.psn.since(self.expected) < ahead;
        let at = self.early.partition_point(before);
        if self.early.get(at).is_some_and(|early| early.psn == psn) {
            return true;
        }
        if self.early.len() >= MOST_KEPT {
            return false;
        }
        // The list grows to twice what it needs.
        let entry = 2 * size_of::<Early>() as u64;
        let Some(kept) = rooms.keep(bytes, entry, share) else {
            return false;
        };
        self.early.insert(at, Early { psn, kept });
        true
    }

    /// The packet to take next, if it was kept.
    pub(super) fn next_kept(&mut self) -> Option<Kept> {
        // What came again meanwhile is done with.
        let behind = |early: &Early| early.psn.since(self.expected) >= HALF;
        while self.early.front().is_some_and(behind) {
            self.early.pop_front();
        }
        let next = self.early.front()?.psn == self.expected;
        let early = next.then(|| self.early.pop_front()).flatten()?;
        Some(early.kept)
    }

    /// The packet to take next.
    pub(super) fn expected(&self) -> Psn {
        self.expected
    }

    /// Whether its requester has asked what is missing.
    pub(super) fn is_asked(&self) -> bool {
        self.asked
    }

    /// Its requester asks what is missing of all before packet `end`, which it has sent: as much of
    /// that as there is room for.
    pub(super) fn gaps(&mut self, end: Psn) -> GapList {
        self.asked = true;
        let mut gaps = GapList::default();
        let mut next = self.expected;
        let early = self.early.iter().map(|early| early.psn);
        for psn in early.chain([end]) {
            let gap = psn.since(next);
            // Not what came again meanwhile.
            if gap < HALF {
                if gap != 0 {
                    gaps.push(next, gap);
                }
                next = psn.after(1);
            }
        }
        gaps
    }

    /// Packets that were kept are taken: their requester learns how far that went, and what is
    /// missing next.
    pub(super) fn filled(&mut self) {
        if self.early.is_empty() {
            let last = self.expected.before();
            // What the last one brings is its answer.
            if self.brought_by(last).is_none() {
                self.acknowledge(last, Syndrome::Ack);
            }
        } else if !std::mem::replace(&mut self.told, true) {
            self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
        }
    }

    /// A packet came that is not taken now. If it is the one that is expected, its requester is to
    /// send it again: returns how many messages were completed. What comes after it is dropped
    /// without a word until then.
    pub(super) fn not_now(&mut self, psn: Psn) -> Option<u32> {
        let expected = psn == self.expected;
        self.told |= expected;
        expected.then_some(self.messages)
    }

    /// Its requester may have so many requests that bring something under way from now on. Returns
    /// false if there is no room for that in the account that `share` is of.
    pub(super) fn set_at_a_time(&mut self, at_a_time: u8, share: &mut Share) -> bool {
        let more = Self::footprint(at_a_time).saturating_sub(Self::footprint(self.at_a_time));
        let grown = more == 0 || share.grow(more).is_ok();
        if grown {
            self.at_a_time = self.at_a_time.max(at_a_time);
        }
        grown
    }

    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome) {
        match self.replies.back_mut() {
            // An acknowledgement is for all before it, too.
            Some(Reply::Acknowledge(before, Syndrome::Ack, msn)) if syndrome == Syndrome::Ack => {
                if psn.since(*before) < HALF {
                    (*before, *msn) = (psn, self.messages);
                }
            }
            _ => {
                let reply = Reply::Acknowledge(psn, syndrome, self.messages);
                self.replies.push_back(reply);
            }
        }
    }

    /// Takes a request with payload of at most `mtu` bytes for queue pair `qp`, whose engine's
    /// responder is locked. [`Self::answer`] sends what is to be answered.
    pub(super) fn receive(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        packet: &Packet<'_>,
        request: &RequestPacket<'_>,
    ) -> Verdict {
        if self.replies.len() >= most_replies(self.at_a_time) {
            // As if it were lost.
            return Verdict::Dropped(Reason::NoRoom);
        }
        if !qp.listens() {
            return self.answer_again(packet, request.request.kind, Reason::State);
        }
        if !qp.facts.acknowledged {
            return self.take(responder, tables, qp, mtu, packet, request);
        }
        let ahead = packet.psn.since(self.expected);
        let count = |event| qp.vm.count_packet(qp.worker_index, event);
        if ahead >= HALF {
            count(PacketEvent::Duplicate);
            return self.again(packet, request, mtu);
        }
        if ahead != 0 {
            count(PacketEvent::OutOfSequence);
            if std::mem::replace(&mut self.told, true) {
                return Verdict::Dropped(Reason::Ahead);
            }
            return self.refuse(self.expected, Syndrome::Nak(Nak::Sequence), 0);
        }
        match self.carry_out(responder, tables, qp, mtu, packet.solicited, request) {
            Fared::Done(packets, what) => {
                self.expected = self.expected.after(packets);
                self.told = false;
                match what {
                    Some(what) => self.bring(responder, packet.psn, packets, what),
                    None if packet.ack_request => self.acknowledge(packet.psn, Syndrome::Ack),
                    None => {}
                }
                Verdict::Taken
            }
            Fared::Not(Answer::NotReady(timer)) => {
                // What comes after it is dropped until it comes again.
                self.told = true;
                count(PacketEvent::NoReceive);
                self.refuse(packet.psn, Syndrome::RnrNak(timer), 0)
            }
            Fared::Not(Answer::Refused(error)) => self.end(packet.psn, error),
            // As if the packet were lost.
            Fared::Not(_) => Verdict::Dropped(Reason::Unreceivable),
        }
    }

    /// Takes a packet of a queue pair whose packets nobody acknowledges: the message that lacks one
    /// is dropped. The receive that it claimed is for the next one.
    fn take(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        packet: &Packet<'_>,
        request: &RequestPacket<'_>,
    ) -> Verdict {
        let ahead = packet.psn.since(self.expected);
        if ahead >= HALF {
            return Verdict::Dropped(Reason::Behind);
        }
        self.expected = packet.psn.after(1);
        let begins = request.request.place.begins();
        if ahead != 0 || begins {
            self.under_way = None;
        }
        if !begins && self.under_way.is_none() {
            return Verdict::Dropped(Reason::Incomplete);
        }
        match self.carry_out(responder, tables, qp, mtu, packet.solicited, request) {
            Fared::Done(..) => Verdict::Taken,
            Fared::Not(_) => {
                self.under_way = None;
                Verdict::Dropped(Reason::Unreceivable)
            }
        }
    }

    /// Answers by a NAK.
    fn refuse(&mut self, psn: Psn, syndrome: Syndrome, reason: u8) -> Verdict {
        self.acknowledge(psn, syndrome);
        Verdict::Refused(psn, syndrome, reason)
    }

    /// Answers that the packet is refused, with which everything ends.
    fn end(&mut self, psn: Psn, error: WcError) -> Verdict {
        let nak = Nak::of(error);
        self.fatal = Some((psn, nak));
        self.early = VecDeque::new();
        self.refuse(psn, Syndrome::Nak(nak), error.vendor)
    }

    /// What was carried out, and is to be answered still.
    pub(super) fn completed(&self) -> Completed {
        let last = self.expected.before();
        Completed {
            expected: self.expected,
            messages: self.messages,
            brings_last: self.brought_by(last).is_some(),
            fatal: self.fatal,
        }
    }

    /// The request that brings something by packet `psn`.
    fn brought_by(&self, psn: Psn) -> Option<Brought> {
        let holds = |brought: &&Brought| psn.since(brought.psn) < brought.packets;
        self.brought.iter().find(holds).copied()
    }

    /// A packet came again, or after everything has ended: an acknowledgement or a NAK is the answer, if
    /// it has one. Otherwise it is dropped for this reason.
    fn answer_again(&mut self, packet: &Packet<'_>, kind: Kind, reason: Reason) -> Verdict {
        let Some((psn, syndrome)) = self.completed().answer(packet, kind) else {
            return Verdict::Dropped(reason);
        };
        self.acknowledge(psn, syndrome);
        Verdict::Again
    }

    /// A request that brings something was carried out.
    fn bring(&mut self, responder: &Responder, psn: Psn, packets: u32, what: What) {
        while self.brought.len() >= usize::from(responder.max_rd_atomic.max(1)) {
            self.brought.pop_front();
        }
        let msn = self.messages;
        let brought = Brought {
            psn,
            packets,
            what,
            msn,
        };
        self.brought.push_back(brought);
        self.reply_with(&brought, false);
    }

    /// Whether the answer that has packet `psn` is still to be sent, and nothing of what comes
    /// before it after that.
    fn is_to_come(&self, psn: Psn) -> bool {
        let at = self.replies.iter().rposition(|reply| reply.brings(psn));
        at.is_some_and(|at| {
            let after = |reply: &Reply| reply.packets().0.since(psn) < HALF;
            self.replies.iter().skip(at + 1).all(after)
        })
    }

    fn reply_with(&mut self, brought: &Brought, again: bool) {
        let (psn, msn) = (brought.psn, brought.msn);
        self.replies.push_back(match brought.what {
            What::Read(reth, srqn) => Reply::Read(Reading {
                reth,
                srqn,
                psn,
                number: 0,
                packets: brought.packets,
                msn,
                again,
            }),
            What::Atomic(value) => Reply::Atomic(psn, value, msn),
            What::Done => Reply::Done(psn, msn),
        });
    }

    /// A packet came again.
    fn again(&mut self, packet: &Packet<'_>, of_request: &RequestPacket<'_>, mtu: u64) -> Verdict {
        let RequestPacket { request, reth, .. } = *of_request;
        if !brings(request.kind) {
            return self.answer_again(packet, request.kind, Reason::Behind);
        }
        let Some(brought) = self.brought_by(packet.psn) else {
            return Verdict::Dropped(Reason::Behind);
        };
        match brought.what {
            // All of it, or a part from here on.
            What::Read(of_all, srqn) => {
                let number = packet.psn.since(brought.psn);
                let skipped = u64::from(number) * mtu;
                let part = request.kind == Kind::Read
                    && reth.rkey == of_all.rkey
                    && reth.addr == of_all.addr.wrapping_add(skipped)
                    && u64::from(reth.length) + skipped <= u64::from(of_all.length);
                if !part {
                    return Verdict::Dropped(Reason::Behind);
                }
                if !self.is_to_come(packet.psn) {
                    let part = Brought {
                        psn: packet.psn,
                        packets: packets_of(reth.length, mtu),
                        what: What::Read(reth, srqn),
                        ..brought
                    };
                    self.reply_with(&part, true);
                }
            }
            What::Atomic(_) | What::Done if self.is_to_come(packet.psn) => {}
            What::Atomic(_) | What::Done => self.reply_with(&brought, true),
        }
        Verdict::Again
    }

    fn carry_out(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        solicited: bool,
        packet: &RequestPacket<'_>,
    ) -> Fared {
        let RequestPacket {
            request,
            reth,
            payload,
            ..
        } = *packet;
        if brings(request.kind) {
            return self.carry_out_word(responder, tables, qp, mtu, packet);
        }
        let len = payload.len() as u64;
        let under_way = if request.place.begins() {
            let offset = 0;
            let kind = request.kind;
            self.under_way
                .is_none()
                .then_some(UnderWay { kind, reth, offset })
        } else {
            self.under_way
                .filter(|message| message.kind == request.kind)
        };
        let Some(under_way) = under_way else {
            return Fared::Not(responder.invalid_request(tables, qp, vendor_err::OPCODE));
        };
        let end = under_way.offset + len;
        // Only the last packet of a message may be short, and none is empty but the only one.
        let full = if request.place.ends() {
            len <= mtu && (len != 0 || request.place.begins())
        } else {
            len == mtu
        };
        let length = if request.kind == Kind::Write {
            u64::from(under_way.reth.length)
        } else {
            end
        };
        if !full || end > length || (request.place.ends() && end != length) {
            let refused = responder.invalid_request(tables, qp, vendor_err::MESSAGE_LENGTH);
            return Fared::Not(refused);
        }
        // All that a WRITE is to, the first packet of several finds out in more steps.
        let simple = request.kind == Kind::Write
            && request.imm == Imm::None
            && (!request.place.begins() || request.place.ends());
        let place = (
            under_way.reth.rkey,
            under_way.reth.addr.wrapping_add(under_way.offset),
        );
        let ends = request.place.ends();
        let answer = if simple && responder.write_at_once(tables, qp, place, payload, ends) {
            if ends {
                Answer::Done
            } else {
                Answer::Progress
            }
        } else {
            let message = Message {
                solicited,
                imm: packet.immediate,
                srqn: packet.srqn,
                ..message(responder, request, under_way.reth, length)
            };
            let with_imm = request.kind == Kind::Write && request.imm == Imm::Data;
            let slice = Slice {
                message: &message,
                offset: under_way.offset,
                len,
                last: ends,
                claims: request.place.begins() || with_imm,
                payload: Moved::From(DataSource::Bytes(payload)),
            };
            responder.receive(tables, qp, origin(qp), slice)
        };
        match answer {
            Answer::Progress => {
                self.under_way = Some(UnderWay {
                    offset: end,
                    ..under_way
                });
                Fared::Done(1, None)
            }
            Answer::Done => {
                self.under_way = None;
                self.messages = self.messages.wrapping_add(1);
                qp.vm.count_received(qp.worker_index, 1, end);
                Fared::Done(1, None)
            }
            other => Fared::Not(other),
        }
    }

    /// A request of one packet that is answered by more than an acknowledgement.
    fn carry_out_word(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        packet: &RequestPacket<'_>,
    ) -> Fared {
        let RequestPacket {
            request,
            reth,
            operands,
            payload,
            ..
        } = *packet;
        let word = request.kind == Kind::AtomicWrite;
        let fits = if word { 8 } else { 0 };
        let reading = |reply: &&Reply| matches!(reply, Reply::Read(Reading { again: false, .. }));
        let reads = self.replies.iter().filter(reading).count();
        let invalid = if self.under_way.is_some() {
            Some(vendor_err::OPCODE)
        } else if payload.len() != fits || (word && reth.length != 8) || reth.length > LONGEST {
            Some(vendor_err::MESSAGE_LENGTH)
        } else if request.kind == Kind::Read && reads >= usize::from(responder.max_rd_atomic) {
            Some(vendor_err::RD_ATOMIC)
        } else {
            None
        };
        if let Some(reason) = invalid {
            return Fared::Not(responder.invalid_request(tables, qp, reason));
        }
        if request.kind == Kind::Read {
            // It is read, and its key judged, when it is sent.
            self.messages = self.messages.wrapping_add(1);
            let packets = packets_of(reth.length, mtu);
            return Fared::Done(packets, Some(What::Read(reth, packet.srqn)));
        }
        let mut old = [0; 8];
        let payload = match (operands, request.wr_opcode) {
            (
                Operands::Atomic {
                    swap_or_add,
                    compare,
                },
                opcode,
            ) => {
                let operation = if opcode == wr_opcode::ATOMIC_CMP_AND_SWP {
                    AtomicOperation::CompareSwap {
                        compare,
                        compare_mask: u64::MAX,
                        swap: swap_or_add,
                        swap_mask: u64::MAX,
                    }
                } else {
                    AtomicOperation::FetchAdd {
                        add: swap_or_add,
                        boundary: 0,
                    }
                };
                Moved::Atomic(operation, Sink::Bytes(&mut old))
            }
            (Operands::Flush { kind, level }, _) => {
                let range = match level {
                    flush_level::RANGE => Some(Some(reth.length.into())),
                    flush_level::MR => Some(None),
                    _ => None,
                };
                let Some((wanted, range)) = flush_access(kind).zip(range) else {
                    let refused = responder.invalid_request(tables, qp, vendor_err::FLAGS);
                    return Fared::Not(refused);
                };
                Moved::Flush(wanted, range)
            }
            (Operands::None, _) => Moved::From(DataSource::Bytes(payload)),
        };
        let length = match request.kind {
            Kind::Flush => reth.length.into(),
            _ => 8,
        };
        let message = Message {
            srqn: packet.srqn,
            ..message(responder, request, reth, length)
        };
        let slice = Slice {
            message: &message,
            offset: 0,
            len: length,
            last: true,
            claims: true,
            payload,
        };
        match responder.receive(tables, qp, origin(qp), slice) {
            Answer::Done => {
                self.messages = self.messages.wrapping_add(1);
                qp.vm.count_received(qp.worker_index, 1, length);
                let what = match request.kind {
                    Kind::Atomic => What::Atomic(u64::from_le_bytes(old)),
                    _ => What::Done,
                };
                Fared::Done(1, Some(what))
            }
            other => Fared::Not(other),
        }
    }

    /// Whether all that is to be answered is one acknowledgement, which may be for more.
    pub(super) fn only_acknowledges(&self) -> bool {
        let mut replies = self.replies.iter();
        let first = replies.next();
        matches!(first, Some(Reply::Acknowledge(_, Syndrome::Ack, _))) && replies.next().is_none()
    }

    /// Whether there is anything to answer.
    pub(super) fn answers(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The acknowledgement that is to be sent, if that is all.
    pub(super) fn take_acknowledgement(&mut self) -> Option<(Psn, Body<'static>)> {
        if !self.only_acknowledges() {
            return None;
        }
        let Some(Reply::Acknowledge(psn, syndrome, msn)) = self.replies.pop_front() else {
            return None;
        };
        Some((psn, Body::Acknowledge { syndrome, msn }))
    }

    /// Gives answers to `send`, each with its packet's number, until `budget` bytes are spent.
    /// Returns whether there are more.
    pub(super) fn answer(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        mut budget: u64,
        send: &mut dyn FnMut(Psn, Body<'_>, Payload<'_>) -> bool,
    ) -> bool {
        while let Some(reply) = self.replies.front_mut() {
            if budget == 0 {
                return true;
            }
            let (psn, body) = match reply {
                Reply::Acknowledge(psn, syndrome, msn) => {
                    let (syndrome, msn) = (*syndrome, *msn);
                    (*psn, Body::Acknowledge { syndrome, msn })
                }
                Reply::Atomic(psn, value, msn) => {
                    let (value, msn) = (*value, *msn);
                    (*psn, Body::AtomicAcknowledge { msn, value })
                }
                Reply::Done(psn, msn) => (*psn, read_response(Place::Only, *msn)),
                Reply::Read(reading) => {
                    let now = *reading;
                    let last = now.number + 1 == now.packets;
                    let body = read_response(Place::of(now.number == 0, last), now.msn);
                    let offset = u64::from(now.number) * mtu;
                    let len = u64::from(now.reth.length).saturating_sub(offset).min(mtu);
                    let mut answer = Answer::NoAnswer;
                    let mut read = |space: &mut [u8]| {
                        answer = read(tables, qp, &now, offset, space);
                        matches!(answer, Answer::Progress | Answer::Done)
                    };
                    let payload = Payload {
                        len: usize::try_from(len).unwrap_or_default(),
                        read: &mut read,
                    };
                    if !qp.listens() || !send(now.psn, body, payload) {
                        match answer {
                            // The VM is stopped, or busy for a moment.
                            Answer::Stopped | Answer::Busy => return true,
                            Answer::Refused(error) => {
                                self.replies.clear();
                                self.end(now.psn, error);
                            }
                            _ => drop(self.replies.pop_front()),
                        }
                        continue;
                    }
                    budget = budget.saturating_sub(len.max(64));
                    reading.psn = now.psn.after(1);
                    reading.number += 1;
                    if last {
                        let bytes = u64::from(now.reth.length);
                        qp.vm.count_received(qp.worker_index, 1, bytes);
                        self.replies.pop_front();
                    }
                    continue;
                }
            };
            let payload = Payload {
                len: 0,
                read: &mut |_| true,
            };
            send(psn, body, payload);
            budget = budget.saturating_sub(64);
            self.replies.pop_front();
        }
        false
    }
}

/// A packet of what an RDMA READ brings, without its payload.
pub(super) fn read_response(place: Place, msn: u32) -> Body<'static> {
    Body::ReadResponse {
        place,
        msn: if place == Place::Middle { 0 } else { msn },
        payload: &[],
    }
}

/// Answers that may wait.
fn most_replies(at_a_time: u8) -> usize {
    2 * usize::from(at_a_time) + MORE_REPLIES
}

/// Whether a request is answered by something of its own.
pub(super) fn brings(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Read | Kind::Atomic | Kind::AtomicWrite | Kind::Flush
    )
}

/// Packets with so many bytes in all.
fn packets_of(length: u32, mtu: u64) -> u32 {
    u32::try_from(u64::from(length).div_ceil(mtu).max(1)).unwrap_or(u32::MAX)
}

fn origin(qp: &Qp) -> Origin<'_> {
    Origin {
        worker: qp.worker_index,
        waiter: None,
    }
}

fn message(responder: &Responder, request: Request, reth: Reth, length: u64) -> Message {
    Message {
        opcode: request.wr_opcode,
        kind: request.kind,
        imm_is: request.imm,
        solicited: false,
        imm: 0,
        remote_addr: reth.addr,
        rkey: reth.rkey,
        srqn: 0,
        src_qp: responder.remote_qp(),
        length,
    }
}

/// Reads the bytes from `offset` on of what an RDMA READ brings into `space`.
fn read(tables: &Tables, qp: &Arc<Qp>, reading: &Reading, offset: u64, space: &mut [u8]) -> Answer {
    let length = u64::from(reading.reth.length);
    let mut responder = qp.responder();
    let request = Request::at(Service::Rc, wr_opcode::RDMA_READ, Place::Only);
    let Some(request) = request else {
        return Answer::NoAnswer;
    };
    let message = Message {
        srqn: reading.srqn,
        ..message(&responder, request, reading.reth, length)
    };
    if reading.again {
        let read = responder.read_again(tables, qp, &message, offset, space);
        return if read {
            Answer::Progress
        } else {
            Answer::NoAnswer
        };
    }
    let slice = Slice {
        message: &message,
        offset,
        len: space.len() as u64,
        last: reading.number + 1 == reading.packets,
        claims: reading.number == 0,
        payload: Moved::Into(Sink::Bytes(space)),
    };
    responder.receive(tables, qp, origin(qp), slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::footprint::Footprint;

    #[test]
    fn what_more_requests_at_a_time_take_is_in_the_account() {
        let account = Footprint::new(1 << 20);
        let mut share = account.empty();
        let mut receiver = Receiver::new(Psn::new(1), 1, &mut share).unwrap();
        let with_one = account.bytes();
        assert!(receiver.set_at_a_time(16, &mut share));
        assert_eq!(account.bytes(), Receiver::footprint(16));
        assert!(account.bytes() > with_one);
        // Less than before changes nothing: the lists are as long as they were.
        assert!(receiver.set_at_a_time(1, &mut share));
        assert_eq!(account.bytes(), Receiver::footprint(16));
        account.set_limit(account.bytes());
        assert!(!receiver.set_at_a_time(17, &mut share));
        assert_eq!(receiver.at_a_time, 16);
        let mut full = account.empty();
        assert!(Receiver::new(Psn::new(1), 1, &mut full).is_none());
    }
}
