// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An established connection: work requests become FPDUs, and FPDUs are carried out.
//!
//! SENDs and RDMA WRITEs are done when their bytes wait to be sent: TCP brings them, or the connection
//! ends. RDMA READs and atomic operations are under way until they are answered, and what was posted
//! after them completes after them.
use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;

use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{access, qp_state, vendor_err, wc_status, wr_opcode};

use super::ddp::{
    self, Atomic, AtomicRequest, Message as Body, ReadRequest, Segment, Tagged, TaggedKind,
    Untagged,
};
use super::fpdu;
use super::mpa::Rtr;
use super::outgoing::{Outgoing, Pool};
use super::refusal::{error_type, layer, Refusal};
use super::terminate::Terminate;
use crate::engine::cursor::{fetch, transfer, Cursor, DataSource, Fault, Part, Sink};
use crate::engine::events::raise;
use crate::engine::execute::invalidate_sink;
use crate::engine::message::{Answer, Message};
use crate::engine::operation::Operation;
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Origin, Payload, Responder, Slice};
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::footprint::Share;
use crate::memory::atomic::AtomicOperation;
use crate::verbs::keys::{Accessor, KeyError};
use crate::verbs::WcError;

/// Work requests that are under way, at most.
const MOST_BEGUN: usize = 256;
/// The STag of what moves no data.
const NOTHING: u32 = 1;
/// No header is longer, bytes.
const HEADER: usize = 128;
/// The account has no room for what is to be sent: it is looked again after so long, nanoseconds.
const NO_ROOM: u64 = 1_000_000;

/// A work request that was begun.
#[derive(Debug)]
struct Begun {
    active: Active,
    /// Where what it brings goes.
    sges: Vec<Sge>,
    /// The message sequence number of its request.
    msn: u32,
    /// Its bytes that have come.
    brought: u64,
    /// It has its answer, or needs none.
    done: bool,
}

/// Where an RDMA WRITE went.
#[derive(Debug, Clone, Copy)]
struct Written {
    stag: u32,
    offset: u64,
    len: u64,
}

/// What the peer is to be answered.
#[derive(Debug, Clone, Copy)]
enum Reply {
    /// The bytes of an RDMA READ with this sequence number, from `done` on.
    Read {
        msn: u32,
        request: ReadRequest,
        done: u64,
    },
    /// What was there before an atomic operation.
    Atomic { request_id: u32, original: u64 },
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The peer did what it must not, and is told.
    Refuses(Refusal),
    /// The peer has said that it refuses something.
    Refused,
    /// An error of this end, of which the completion says more.
    Failed,
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Refuses(refusal)
    }
}

/// An established connection.
#[derive(Debug)]
pub(super) struct Stream {
    out: Outgoing,
    crc: bool,
    /// The longest ULPDU that is sent, bytes.
    longest: usize,
    /// The start of an FPDU whose rest has not come.
    partial: Vec<u8>,
    share: Share,

    begun: VecDeque<Begun>,
    /// How many of them wait for an answer, and may.
    waiting: u8,
    ord: u8,
    /// Of the past, for their capacity.
    spare: Vec<Vec<Sge>>,
    /// What is under way, and was, is in the account of the VM: so many work requests.
    account: Share,
    accounted: usize,
    /// The work request in progress in the send queue fails for this, when all before it is done.
    refused: Option<WcError>,
    /// Message sequence numbers of what is sent next, by queue.
    sends: u32,
    requests: u32,
    answers: u32,

    /// RDMA READs and atomic operations that the peer may have under way.
    ird: u8,
    replies: VecDeque<Reply>,
    /// Message sequence numbers of what comes next, by queue.
    receives: u32,
    requested: u32,
    answered: u32,
    /// Bytes of the SEND that is coming.
    received: u64,
    /// The RDMA WRITE that is coming, and the last one, for its immediate data.
    writing: Option<Written>,
    written: Option<Written>,
    /// The end was told, or there is nobody to tell.
    ended: bool,
    /// The header that is being written.
    header: Vec<u8>,
}

/// What one end has agreed to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agreed {
    pub crc: bool,
    /// The longest ULPDU, bytes.
    pub longest: usize,
    pub ord: u8,
    pub ird: u8,
}

impl Stream {
    pub(super) fn new(agreed: Agreed, share: Share) -> Self {
        Self {
            out: Outgoing::new(agreed.crc, share.another()),
            crc: agreed.crc,
            longest: agreed.longest,
            partial: Vec::new(),
            begun: VecDeque::new(),
            waiting: 0,
            ord: agreed.ord,
            spare: Vec::new(),
            account: share.another(),
            accounted: 0,
            refused: None,
            sends: 1,
            requests: 1,
            answers: 1,
            ird: agreed.ird,
            replies: VecDeque::new(),
            receives: 1,
            requested: 1,
            answered: 1,
            received: 0,
            writing: None,
            written: None,
            ended: false,
            header: Vec::with_capacity(HEADER),
            share,
        }
    }

    /// The first message of the initiator, without data, which the peer can have.
    ///
    /// # Errors
    /// If it can have none, or there is no memory.
    pub(super) fn show_ready(&mut self, rtr: Rtr, pool: &mut Pool) -> Result<(), Refusal> {
        if !self.out.prepare(pool) {
            return Err(Refusal::MpaCatastrophic);
        }
        if rtr.write || !(rtr.send || rtr.read) {
            let segment = Segment::Tagged(Tagged {
                kind: TaggedKind::Write,
                last: true,
                stag: NOTHING,
                offset: 0,
                payload: &[],
            });
            let _ = self.put(&segment, 0, |_| Ok::<_, KeyError>(()));
            return Ok(());
        }
        Err(Refusal::MpaNoMatchingRtr)
    }

    /// Nothing more is carried out, and the peer is told nothing more.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.replies.clear();
    }

    /// Puts answers to the peer, as far as there is room and memory. Returns false if there is no
    /// memory for any.
    ///
    /// # Errors
    /// Why the connection ends.
    pub(super) fn answer(
        &mut self,
        pool: &mut Pool,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<bool, End> {
        if self.replies.is_empty() {
            return Ok(true);
        }
        let memory = self.out.prepare(pool);
        if memory {
            self.reply(tables, qp)?;
        }
        Ok(memory)
    }

    /// Gives its memory back, with what waits to be sent.
    pub(super) fn give_back(&mut self, pool: &mut Pool) {
        self.out.give_back(pool);
    }

    /// Whether all that is to be sent has been.
    pub(super) fn is_sent(&self) -> bool {
        self.out.is_empty() && self.replies.is_empty()
    }

    /// The longest payload of a segment whose header is so long, bytes.
    fn longest_payload(&self, header: usize) -> u64 {
        self.longest.saturating_sub(header).max(64) as u64
    }

    /// Begins work requests and puts their messages, as far as there is room, and answers to the peer
    /// before them.
    pub(super) fn poll(
        &mut self,
        pool: &mut Pool,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        now: u64,
        budget: &mut Budget,
    ) -> Result<Polled, End> {
        if let Err(polled) = sq.check_ring(tables, qp) {
            return Ok(polled);
        }
        loop {
            if self.ended {
                return Ok(Polled::Idle);
            }
            if !self.out.prepare(pool) {
                return Ok(Polled::Park(now.saturating_add(NO_ROOM)));
            }
            // What does not fit goes on when the socket has taken more.
            let full = !self.reply(tables, qp)? || !self.out.has_room();
            if full || budget.messages == 0 || budget.bytes == 0 {
                return Ok(Polled::Again);
            }
            let active = match self.next(sq, tables, qp) {
                Ok(Some(active)) => active,
                Ok(None) => return Ok(Polled::Idle),
                Err(polled) => return Ok(polled),
            };
            let kind = active.message.kind;
            if kind.is_local() {
                if let Err(polled) = sq.execute(tables, qp, &active, budget) {
                    return Ok(polled);
                }
                continue;
            }
            budget.messages -= 1;
            match kind {
                Kind::Read | Kind::Atomic => self.request(sq, &active),
                _ => self.put_segment(sq, tables, qp, active, budget)?,
            }
        }
    }

    /// The work request to go on with, if it may.
    fn next(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<Option<Active>, Polled> {
        sq.may_go_on(tables, qp)?;
        if sq.active.is_none() {
            // While the queue pair closes, nothing more begins.
            let may = qp.state() == qp_state::RTS && sq.posted() && self.has_room(sq);
            match may.then(|| sq.fetch(tables, qp)).flatten() {
                None => return Ok(None),
                Some(Err(error)) => self.refused = Some(error),
                Some(Ok(active)) => sq.active = Some(active),
            }
        }
        let Some(active) = sq.active else {
            return Ok(None);
        };
        if let Some(error) = self.refused {
            if !self.begun.is_empty() {
                return Ok(None);
            }
            self.refused = None;
            sq.fail(tables, qp, error);
            return Err(Polled::Again);
        }
        let kind = active.message.kind;
        let waits = match kind {
            _ if active.done != 0 => false,
            _ if kind.is_local() => !self.begun.is_empty(),
            _ if active.fence && self.waiting != 0 => true,
            Kind::Read | Kind::Atomic => self.waiting >= self.ord.max(1),
            _ => false,
        };
        Ok((!waits).then_some(active))
    }

    /// Whether there may be another work request under way, and the account of the VM has room for it.
    /// It always has for one.
    fn has_room(&mut self, sq: &SendQueue) -> bool {
        let kept = self.begun.len() + self.spare.len();
        if kept < self.accounted || !self.spare.is_empty() {
            return true;
        }
        // The queue and the list of spare ones grow to twice what they need.
        let each = 2 * (size_of::<Begun>() + size_of::<Vec<Sge>>()) + sq.max_sge * size_of::<Sge>();
        let grown = kept < MOST_BEGUN && self.account.grow(each as u64).is_ok();
        self.accounted += usize::from(grown);
        grown || kept == 0
    }

    /// Puts a request of an RDMA READ or an atomic operation.
    fn request(&mut self, sq: &mut SendQueue, active: &Active) {
        let message = &active.message;
        let msn = self.requests;
        let body = match sq.operation {
            Operation::Atomic(operation) if message.kind == Kind::Atomic => {
                Body::AtomicRequest(AtomicRequest {
                    request_id: msn,
                    stag: message.rkey,
                    offset: message.remote_addr,
                    atomic: atomic(operation),
                })
            }
            // The peer answers with the names that it is given: those of the request itself.
            _ => Body::ReadRequest(ReadRequest {
                sink_stag: msn,
                sink_offset: 0,
                length: u32::try_from(message.length).unwrap_or(u32::MAX),
                source_stag: message.rkey,
                source_offset: message.remote_addr,
            }),
        };
        self.put_message(msn, body);
        self.waiting = self.waiting.saturating_add(1);
        self.begin(sq, *active, false);
        self.requests = self.requests.wrapping_add(1);
    }

    /// Puts a segment whose payload `read` writes, `len` bytes.
    fn put<E>(
        &mut self,
        segment: &Segment<'_>,
        len: u64,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.header.clear();
        segment.write_header(&mut self.header);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.out.put(&self.header, len, read)
    }

    /// Puts a message that is nothing but headers.
    fn put_message(&mut self, msn: u32, message: Body<'_>) {
        let segment = Segment::Untagged(Untagged { msn, message });
        // There is no payload that could fail.
        let _ = self.put(&segment, 0, |_| Ok::<_, KeyError>(()));
    }

    /// The work request in progress is under way: `done` says whether it waits for others only.
    fn begin(&mut self, sq: &mut SendQueue, active: Active, done: bool) {
        let mut sges = self.spare.pop().unwrap_or_default();
        sges.clear();
        if !done {
            // The queue reads the next one's into the other list.
            if sges.capacity() < sq.max_sge {
                sges.reserve_exact(sq.max_sge);
            }
            std::mem::swap(&mut sges, &mut sq.sges);
        }
        self.begun.push_back(Begun {
            active,
            sges,
            msn: self.requests,
            brought: 0,
            done,
        });
        sq.take_begun();
    }

    /// Puts the next segment of a SEND or RDMA WRITE, and of the latter's immediate data.
    fn put_segment(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        mut active: Active,
        budget: &mut Budget,
    ) -> Result<(), End> {
        let message = active.message;
        let writes = message.kind == Kind::Write;
        let longest = self.longest_payload(if writes {
            ddp::TAGGED_LEN
        } else {
            ddp::UNTAGGED_LEN
        });
        let left = message.length - active.done;
        let len = left.min(longest);
        let last = len == left;
        let segment = if writes {
            Segment::Tagged(Tagged {
                kind: TaggedKind::Write,
                last,
                stag: message.rkey,
                offset: message.remote_addr.wrapping_add(active.done),
                payload: &[],
            })
        } else {
            Segment::Untagged(Untagged {
                msn: self.sends,
                message: Body::Send {
                    invalidate: (message.imm_is == Imm::RemoteKey).then_some(message.imm),
                    solicited: message.solicited,
                    last,
                    offset: u32::try_from(active.done).unwrap_or(u32::MAX),
                    payload: &[],
                },
            })
        };
        let source: &SendQueue = sq;
        let read = |space: &mut [u8]| {
            let mut source = source.source(tables, qp, &active);
            fetch(&mut source, space)
        };
        if let Err(key) = self.put(&segment, len, read) {
            // The peer has a part of the message: there is no way to go on.
            let error = WcError::new(wc_status::LOC_PROT_ERR, key.0);
            if self.begun.is_empty() {
                sq.fail(tables, qp, error);
            } else {
                qp.fail();
            }
            return Err(End::Failed);
        }
        budget.bytes = budget.bytes.saturating_sub(len.max(64));
        active.done += len;
        if !last {
            sq.active = Some(active);
            return Ok(());
        }
        if writes && message.imm_is == Imm::Data {
            let mut data = [0; 8];
            data[..4].copy_from_slice(&message.imm.to_le_bytes());
            let solicited = message.solicited;
            self.put_message(self.sends, Body::Immediate { solicited, data });
        }
        if !writes || message.imm_is == Imm::Data {
            self.sends = self.sends.wrapping_add(1);
        }
        if self.begun.is_empty() {
            sq.finish(tables, qp, &active);
            qp.vm.count_sent(qp.worker_index, 1, message.length);
        } else {
            sq.active = Some(active);
            self.begin(sq, active, true);
        }
        Ok(())
    }

    /// Ends what is done, in the order in which it began.
    fn complete(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) -> Result<(), End> {
        while self.begun.front().is_some_and(|first| first.done) {
            let Some(Begun { active, sges, .. }) = self.begun.pop_front() else {
                break;
            };
            if active.invalidates_sink {
                if let Err(key) = invalidate_sink(&sges, tables, qp) {
                    let error = WcError::new(wc_status::LOC_QP_OP_ERR, key.0);
                    sq.fail_begun(tables, qp, &active, error);
                    self.spare.push(sges);
                    return Err(End::Failed);
                }
            }
            sq.finish_begun(tables, qp, &active);
            qp.vm.count_sent(qp.worker_index, 1, active.message.length);
            self.spare.push(sges);
        }
        Ok(())
    }

    /// Flushes all that is under way. The send queue flushes what it has itself. Of a queue pair that
    /// was reset, nothing completes.
    pub(super) fn flush(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        if qp.state() != qp_state::ERR {
            self.begun.clear();
        }
        while let Some(begun) = self.begun.pop_front() {
            if begun.done {
                sq.finish_begun(tables, qp, &begun.active);
            } else {
                sq.flush_begun(tables, qp, &begun.active);
            }
        }
        self.waiting = 0;
        self.refused = None;
    }

    /// Puts answers to the peer, as far as there is room. Returns whether that was all.
    fn reply(&mut self, tables: &Tables, qp: &Arc<Qp>) -> Result<bool, End> {
        while let Some(reply) = self.replies.front().copied() {
            if !self.out.has_room() {
                return Ok(false);
            }
            match reply {
                Reply::Atomic {
                    request_id,
                    original,
                } => {
                    let response = Body::AtomicResponse {
                        request_id,
                        original,
                    };
                    self.put_message(self.answers, response);
                    self.answers = self.answers.wrapping_add(1);
                    self.replies.pop_front();
                }
                Reply::Read { msn, request, done } => {
                    let left = u64::from(request.length) - done;
                    let len = left.min(self.longest_payload(ddp::TAGGED_LEN));
                    let last = len == left;
                    let segment = Segment::Tagged(Tagged {
                        kind: TaggedKind::ReadResponse,
                        last,
                        stag: request.sink_stag,
                        offset: request.sink_offset.wrapping_add(done),
                        payload: &[],
                    });
                    let read = |space: &mut [u8]| read(tables, qp, &request, done, last, space);
                    if let Err(end) = self.put(&segment, len, read) {
                        // What cannot be read is a request for the rest.
                        let mut about = Vec::with_capacity(HEADER);
                        let message = Body::ReadRequest(rest_of(&request, done));
                        Segment::Untagged(Untagged { msn, message }).write(&mut about);
                        self.refuse(&end, &about, qp);
                        return Err(end);
                    }
                    if last {
                        self.replies.pop_front();
                    } else if let Some(first) = self.replies.front_mut() {
                        let done = done + len;
                        *first = Reply::Read { msn, request, done };
                    }
                }
            }
        }
        Ok(true)
    }

    /// Sends what waits. Returns whether that was all.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(super) fn send(&mut self, pool: &mut Pool, socket: &TcpStream) -> std::io::Result<bool> {
        self.out.send(pool, socket)
    }

    /// Bytes that came before and make no FPDU.
    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }

    /// Keeps bytes that make no FPDU yet. Returns false if the account has no room for them.
    pub(super) fn keep(&mut self, bytes: &[u8]) -> bool {
        self.partial.clear();
        let wanted = bytes.len() as u64;
        let before = self.share.bytes();
        if wanted > before && self.share.grow(wanted - before).is_err() {
            return false;
        }
        self.partial.extend_from_slice(bytes);
        true
    }

    /// Takes the FPDUs in `bytes`. Returns how long they are; what is behind them is the start of
    /// another one.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<usize, End> {
        let mut taken = 0;
        while !self.ended {
            let rest = bytes.get(taken..).unwrap_or_default();
            let mut about: &[u8] = &[];
            let took = fpdu::read(rest, self.crc).map_err(|bad| End::Refuses(bad.into()));
            let took = took.and_then(|fpdu| {
                let Some((ulpdu, length)) = fpdu else {
                    return Ok(0);
                };
                about = ulpdu;
                self.take_segment(&Segment::read(ulpdu)?, tables, qp)?;
                Ok(length)
            });
            match took {
                Ok(0) => break,
                Ok(length) => taken += length,
                Err(end) => {
                    self.refuse(&end, about, qp);
                    return Err(end);
                }
            }
        }
        Ok(taken)
    }

    /// Puts the Terminate message for an end, about the segment `ulpdu`, and warns if that is the peer's
    /// fault.
    fn refuse(&mut self, end: &End, ulpdu: &[u8], qp: &Qp) {
        if let (End::Refuses(refusal), false) = (end, self.ended) {
            qp.vm.warn(format_args!(
                "QP {}: the connection ends for what the peer has sent: {refusal}",
                qp.number
            ));
        }
        self.tell(end, ulpdu);
    }

    /// Puts the Terminate message for an end, about the segment `ulpdu`.
    pub(super) fn tell(&mut self, end: &End, ulpdu: &[u8]) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let refusal = match end {
            End::Refused => return,
            End::Failed => Refusal::RdmapCatastrophic,
            End::Refuses(refusal) => *refusal,
        };
        self.replies.clear();
        let message = Terminate::new(refusal, ulpdu);
        self.header.clear();
        message.write_segment(&mut self.header);
        self.out.put_last(&self.header);
    }

    fn take_segment(
        &mut self,
        segment: &Segment<'_>,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<(), End> {
        match *segment {
            Segment::Tagged(Tagged {
                kind: TaggedKind::Write,
                stag,
                offset,
                last,
                payload,
            }) => {
                let len = payload.len() as u64;
                let begins = Written {
                    stag,
                    offset,
                    len: 0,
                };
                let writing = self.writing.get_or_insert(begins);
                writing.len += len;
                // Nothing of an empty one is checked.
                if len != 0 {
                    let mut responder = qp.responder();
                    check_listens(qp)?;
                    let place = (stag, offset);
                    if !responder.write_at_once(tables, qp, place, payload, last) {
                        let message = message(&responder, wr_opcode::RDMA_WRITE, Kind::Write);
                        let message = Message {
                            rkey: stag,
                            remote_addr: offset,
                            length: len,
                            ..message
                        };
                        let slice = Slice {
                            message: &message,
                            offset: 0,
                            len,
                            last: true,
                            claims: false,
                            payload: Payload::From(DataSource::Bytes(payload)),
                        };
                        let answer = responder.receive(tables, qp, origin(qp), slice);
                        judge(answer, of_tagged)?;
                    }
                }
                if last {
                    self.written = self.writing.take();
                    let len = self.written.map_or(0, |written| written.len);
                    qp.vm.count_received(qp.worker_index, 1, len);
                }
                Ok(())
            }
            Segment::Tagged(Tagged {
                kind: TaggedKind::ReadResponse,
                stag,
                offset,
                last,
                payload,
            }) => self.bring(tables, qp, (stag, offset), payload, last),
            Segment::Untagged(untagged) => self.take_untagged(&untagged, tables, qp),
        }
    }

    fn take_untagged(
        &mut self,
        untagged: &Untagged<'_>,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<(), End> {
        let expected = match untagged.message {
            Body::Send { .. } | Body::Immediate { .. } => self.receives,
            Body::ReadRequest(_) | Body::AtomicRequest(_) => self.requested,
            Body::AtomicResponse { .. } => self.answered,
            Body::Terminate { payload } => {
                return Err(self.refused_by_peer(payload, tables, qp));
            }
        };
        if untagged.msn != expected {
            return Err(Refusal::DdpMsnRange.into());
        }
        match untagged.message {
            Body::Send {
                invalidate,
                solicited,
                last,
                offset,
                payload,
            } => {
                let len = payload.len() as u64;
                // Nothing comes but in order, and no segment says nothing.
                if u64::from(offset) != self.received || (len == 0 && !last) {
                    return Err(Refusal::DdpInvalidOffset.into());
                }
                let end = self.received + len;
                let mut responder = qp.responder();
                check_listens(qp)?;
                let message = match invalidate {
                    None => message(&responder, wr_opcode::SEND, Kind::Send),
                    Some(key) => Message {
                        imm_is: Imm::RemoteKey,
                        imm: key,
                        ..message(&responder, wr_opcode::SEND_WITH_INV, Kind::Send)
                    },
                };
                let message = Message {
                    solicited,
                    length: end,
                    ..message
                };
                let slice = Slice {
                    message: &message,
                    offset: self.received,
                    len,
                    last,
                    claims: self.received == 0,
                    payload: Payload::From(DataSource::Bytes(payload)),
                };
                let answer = responder.receive(tables, qp, origin(qp), slice);
                self.judge_untagged(answer, &responder, tables, qp)?;
                self.received = end;
                if last {
                    self.received = 0;
                    self.receives = self.receives.wrapping_add(1);
                    qp.vm.count_received(qp.worker_index, 1, end);
                }
                Ok(())
            }
            Body::Immediate { solicited, data } => {
                if self.received != 0 {
                    // A SEND has this number, and goes on.
                    return Err(Refusal::DdpInvalidOffset.into());
                }
                let [a, b, c, d, ..] = data;
                let mut responder = qp.responder();
                check_listens(qp)?;
                let written = self.written.take();
                let message = Message {
                    imm_is: Imm::Data,
                    imm: u32::from_le_bytes([a, b, c, d]),
                    solicited,
                    rkey: written.map_or(0, |written| written.stag),
                    remote_addr: written.map_or(0, |written| written.offset),
                    length: written.map_or(0, |written| written.len),
                    ..message(&responder, wr_opcode::RDMA_WRITE_WITH_IMM, Kind::Write)
                };
                let slice = Slice {
                    message: &message,
                    offset: message.length,
                    len: 0,
                    last: true,
                    claims: true,
                    payload: Payload::From(DataSource::Bytes(&[])),
                };
                let answer = responder.receive(tables, qp, origin(qp), slice);
                self.judge_untagged(answer, &responder, tables, qp)?;
                self.receives = self.receives.wrapping_add(1);
                Ok(())
            }
            Body::ReadRequest(request) => {
                self.check_depth()?;
                self.requested = self.requested.wrapping_add(1);
                self.replies.push_back(Reply::Read {
                    msn: untagged.msn,
                    request,
                    done: 0,
                });
                Ok(())
            }
            Body::AtomicRequest(request) => {
                self.check_depth()?;
                self.requested = self.requested.wrapping_add(1);
                let operation = operation(request.atomic);
                let mut word = [0; 8];
                let mut responder = qp.responder();
                check_listens(qp)?;
                let message = Message {
                    rkey: request.stag,
                    remote_addr: request.offset,
                    length: 8,
                    ..message(
                        &responder,
                        wr_opcode::MASKED_ATOMIC_CMP_AND_SWP,
                        Kind::Atomic,
                    )
                };
                let slice = Slice {
                    message: &message,
                    offset: 0,
                    len: 8,
                    last: true,
                    claims: false,
                    payload: Payload::Atomic(operation, Sink::Bytes(&mut word)),
                };
                let answer = responder.receive(tables, qp, origin(qp), slice);
                drop(responder);
                judge(answer, of_rdmap)?;
                qp.vm.count_received(qp.worker_index, 1, 8);
                self.replies.push_back(Reply::Atomic {
                    request_id: request.request_id,
                    original: u64::from_le_bytes(word),
                });
                Ok(())
            }
            Body::AtomicResponse {
                request_id,
                original,
            } => {
                self.answered = self.answered.wrapping_add(1);
                self.bring_word(tables, qp, request_id, original)
            }
            Body::Terminate { .. } => Ok(()),
        }
    }

    /// The answer to a SEND, or to immediate data.
    fn judge_untagged(
        &self,
        answer: Answer,
        responder: &Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<(), End> {
        if let Answer::NotReady(_) = answer {
            // As for what is not as it should be: it waits for nobody.
            responder.invalid_request(tables, qp, vendor_err::NO_RECEIVE);
            qp.vm.count_rnr(qp.worker_index);
            return Err(Refusal::DdpNoBuffer.into());
        }
        judge(answer, of_untagged)
    }

    /// Whether the peer may have another request under way.
    fn check_depth(&self) -> Result<(), Refusal> {
        if self.replies.len() >= usize::from(self.ird) {
            return Err(Refusal::DdpNoBuffer);
        }
        Ok(())
    }

    /// The oldest work request that waits for an answer.
    fn oldest(&mut self) -> Option<&mut Begun> {
        self.begun.iter_mut().find(|begun| !begun.done)
    }

    /// Bytes that an RDMA READ asked for.
    fn bring(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        (stag, offset): (u32, u64),
        payload: &[u8],
        last: bool,
    ) -> Result<(), End> {
        let len = payload.len() as u64;
        let Some(oldest) = self.oldest() else {
            return Err(Refusal::DdpInvalidStag.into());
        };
        let length = oldest.active.message.length;
        if oldest.active.message.kind != Kind::Read || stag != oldest.msn {
            return Err(Refusal::DdpInvalidStag.into());
        }
        let end = oldest.brought + len;
        if offset != oldest.brought || end > length || last != (end == length) {
            return Err(Refusal::DdpBounds.into());
        }
        let placed = place(tables, qp, &oldest.sges, oldest.brought, payload, last);
        oldest.brought = end;
        self.brought(tables, qp, placed, last)
    }

    /// What was there before an atomic operation.
    fn bring_word(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        request_id: u32,
        original: u64,
    ) -> Result<(), End> {
        let oldest = self.oldest().filter(|oldest| {
            oldest.active.message.kind == Kind::Atomic && oldest.msn == request_id
        });
        let Some(oldest) = oldest else {
            return Err(Refusal::RdmapOpcode.into());
        };
        let placed = place(tables, qp, &oldest.sges, 0, &original.to_le_bytes(), true);
        self.brought(tables, qp, placed, true)
    }

    /// A part of an answer was placed, or could not be; `last`: that was all of it.
    fn brought(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        placed: Result<(), KeyError>,
        last: bool,
    ) -> Result<(), End> {
        let mut sq = qp.send_queue();
        // It may have been reset meanwhile.
        check_listens(qp)?;
        if let Err(key) = placed {
            // What was posted before is done.
            self.complete(&mut sq, tables, qp)?;
            if let Some(oldest) = self.begun.pop_front() {
                let error = WcError::new(wc_status::LOC_PROT_ERR, key.0);
                sq.fail_begun(tables, qp, &oldest.active, error);
            }
            return Err(End::Failed);
        }
        if !last {
            return Ok(());
        }
        if let Some(oldest) = self.oldest() {
            oldest.done = true;
        }
        self.waiting = self.waiting.saturating_sub(1);
        self.complete(&mut sq, tables, qp)?;
        let closes = qp.state() == qp_state::SQD;
        if closes || sq.active.is_some() || self.refused.is_some() || sq.posted() {
            qp.schedule();
        }
        Ok(())
    }

    /// The peer refuses something that was sent.
    fn refused_by_peer(&mut self, payload: &[u8], tables: &Tables, qp: &Arc<Qp>) -> End {
        let codes = match Terminate::read(payload) {
            Ok(terminate) => terminate.codes(),
            Err(refusal) => refusal.codes(),
        };
        let about_access = matches!(
            (codes.layer, codes.error_type),
            (layer::RDMAP, error_type::RDMAP_REMOTE_PROTECTION)
        );
        let mut sq = qp.send_queue();
        if qp.listens() && self.complete(&mut sq, tables, qp).is_ok() {
            if let Some(oldest) = self.begun.pop_front() {
                let status = if about_access {
                    wc_status::REM_ACCESS_ERR
                } else {
                    wc_status::REM_OP_ERR
                };
                let error = WcError::new(status, vendor_err::PEER);
                sq.fail_begun(tables, qp, &oldest.active, error);
            }
        }
        drop(sq);
        if qp.fail() {
            raise(tables, event_type::QP_FATAL, qp.number, vendor_err::PEER);
        }
        qp.vm.warn(format_args!(
            "QP {}: the peer has ended the connection: {codes}",
            qp.number
        ));
        End::Refused
    }
}

fn origin(qp: &Qp) -> Origin<'_> {
    Origin {
        worker: qp.worker_index,
        waiter: None,
    }
}

/// A message without what its segment says.
fn message(responder: &Responder, opcode: u8, kind: Kind) -> Message {
    Message {
        opcode,
        kind,
        imm_is: Imm::None,
        solicited: false,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        srqn: 0,
        src_qp: responder.remote_qp(),
        length: 0,
    }
}

/// Nothing comes to a queue pair that has ended.
fn check_listens(qp: &Qp) -> Result<(), End> {
    if qp.listens() {
        Ok(())
    } else {
        Err(End::Failed)
    }
}

/// What an answer of the responder means for the connection.
fn judge(answer: Answer, refusal: impl Fn(u8) -> Refusal) -> Result<(), End> {
    match answer {
        Answer::Done | Answer::Progress => Ok(()),
        Answer::Refused(error) | Answer::Local(error) => Err(refusal(error.vendor).into()),
        Answer::NotReady(_) => Err(Refusal::DdpNoBuffer.into()),
        Answer::Busy | Answer::Stopped | Answer::NoAnswer => Err(End::Failed),
    }
}

/// The request for what comes behind the first `done` bytes.
fn rest_of(request: &ReadRequest, done: u64) -> ReadRequest {
    let less = u32::try_from(done).unwrap_or(u32::MAX);
    ReadRequest {
        sink_offset: request.sink_offset.wrapping_add(done),
        length: request.length.saturating_sub(less),
        source_offset: request.source_offset.wrapping_add(done),
        ..*request
    }
}

/// Reads the bytes from `offset` on that the peer asks for.
fn read(
    tables: &Tables,
    qp: &Arc<Qp>,
    request: &ReadRequest,
    offset: u64,
    last: bool,
    space: &mut [u8],
) -> Result<(), End> {
    // Nothing of an empty one is checked.
    if request.length == 0 {
        return Ok(());
    }
    let mut responder = qp.responder();
    check_listens(qp)?;
    let message = Message {
        rkey: request.source_stag,
        remote_addr: request.source_offset,
        length: request.length.into(),
        ..message(&responder, wr_opcode::RDMA_READ, Kind::Read)
    };
    let slice = Slice {
        message: &message,
        offset,
        len: space.len() as u64,
        last,
        claims: offset == 0,
        payload: Payload::Into(Sink::Bytes(space)),
    };
    let answer = responder.receive(tables, qp, origin(qp), slice);
    judge(answer, of_rdmap)
}

/// Places what was brought.
fn place(
    tables: &Tables,
    qp: &Qp,
    sges: &[Sge],
    offset: u64,
    bytes: &[u8],
    last: bool,
) -> Result<(), KeyError> {
    let local = Accessor::local(qp.pd);
    let mut to = Cursor::new(tables, sges, local, access::LOCAL_WRITE, offset);
    let part = Part {
        len: bytes.len() as u64,
        last,
        large: false,
    };
    match transfer(&mut to, &mut DataSource::Bytes(bytes), part) {
        Ok(()) => Ok(()),
        Err(Fault::Source(key) | Fault::Destination(key)) => Err(key),
    }
}

/// An atomic operation on the wire.
fn atomic(operation: AtomicOperation) -> Atomic {
    match operation {
        AtomicOperation::CompareSwap {
            compare,
            compare_mask,
            swap,
            swap_mask,
        } => Atomic::CmpSwap {
            swap,
            swap_mask,
            compare,
            compare_mask,
        },
        AtomicOperation::FetchAdd { add, boundary } => Atomic::FetchAdd {
            add,
            boundaries: boundary,
        },
    }
}

/// And back.
fn operation(atomic: Atomic) -> AtomicOperation {
    match atomic {
        Atomic::CmpSwap {
            swap,
            swap_mask,
            compare,
            compare_mask,
        } => AtomicOperation::CompareSwap {
            compare,
            compare_mask,
            swap,
            swap_mask,
        },
        Atomic::FetchAdd { add, boundaries } => AtomicOperation::FetchAdd {
            add,
            boundary: boundaries,
        },
    }
}

/// Why an RDMA WRITE is refused, by its `vendor_err`.
fn of_tagged(reason: u8) -> Refusal {
    match reason {
        vendor_err::KEY_RANGE => Refusal::DdpBounds,
        vendor_err::KEY_PD => Refusal::DdpStagNotAssociated,
        vendor_err::KEY_ACCESS | vendor_err::QP_ACCESS => Refusal::RdmapAccess,
        vendor_err::KEY_UNKNOWN => Refusal::DdpInvalidStag,
        _ => Refusal::DdpCatastrophic,
    }
}

/// The same of an RDMA READ or an atomic operation.
fn of_rdmap(reason: u8) -> Refusal {
    match reason {
        vendor_err::KEY_RANGE => Refusal::RdmapBounds,
        vendor_err::KEY_PD => Refusal::RdmapStagNotAssociated,
        vendor_err::KEY_ACCESS | vendor_err::QP_ACCESS => Refusal::RdmapAccess,
        vendor_err::KEY_UNKNOWN => Refusal::RdmapInvalidStag,
        vendor_err::RD_ATOMIC => Refusal::DdpNoBuffer,
        vendor_err::ALIGNMENT => Refusal::RdmapStreamCatastrophic,
        _ => Refusal::RdmapOperation,
    }
}

/// The same of a SEND: of its receive, or of the key that it invalidates.
fn of_untagged(reason: u8) -> Refusal {
    match reason {
        vendor_err::RECV_TOO_SHORT => Refusal::DdpMessageTooLong,
        vendor_err::KEY_UNKNOWN | vendor_err::KEY_PD | vendor_err::BIND => {
            Refusal::RdmapStagNotInvalidated
        }
        vendor_err::KEY_ACCESS | vendor_err::QP_ACCESS => Refusal::RdmapAccess,
        _ => Refusal::DdpCatastrophic,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fixture::{Guest, Send, TestQp, DATA};
    use crate::engine::BUDGET;
    use vhost_device_rdma_sync::Readers;
    use virtio_rdma_spec::command::QpAttr;
    use virtio_rdma_spec::verbs::{qp_attr, qp_type, send_flag};

    /// A stream of a queue pair that has sent a request, without a socket.
    fn asked(guest: &mut Guest) -> (TestQp, Stream) {
        let mut qp = guest.queue_pair(qp_type::IWARP);
        let attr = QpAttr {
            qp_state: qp_state::INIT,
            ..QpAttr::default()
        };
        qp.qp.modify(guest, qp_attr::STATE, &attr).unwrap();
        assert!(qp.qp.establish(guest, None, [1, 1]));
        let agreed = Agreed {
            crc: false,
            longest: 1000,
            ord: 1,
            ird: 1,
        };
        let mut stream = Stream::new(agreed, Share::default());
        let read = Send {
            opcode: wr_opcode::RDMA_READ,
            flags: send_flag::SIGNALED,
            sges: vec![guest.sge(0, 8)],
            remote_addr: DATA,
            ..Send::default()
        };
        guest.post_send(&mut qp, &read);
        let tables = guest.vm.tables();
        let mut sq = qp.qp.send_queue();
        let (pool, budget) = (&mut Pool::default(), &mut { BUDGET });
        let polled = stream.poll(pool, &mut sq, &tables, &qp.qp, 0, budget);
        assert_eq!((polled, sq.under_way()), (Ok(Polled::Idle), 1));
        drop((sq, tables));
        (qp, stream)
    }

    /// The FPDU with this ULPDU.
    fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
        let mut space = vec![0; 1000];
        let length = fpdu::write(&mut space, ulpdu, 0, false, |_| Ok::<_, ()>(())).unwrap();
        space.truncate(length);
        space
    }

    /// A queue pair is reset while what came for its connection is taken: what its driver has forgotten
    /// does not complete.
    #[test]
    fn nothing_completes_in_another_life() {
        let (readers, _each) = Readers::new(1);
        let response = Segment::Tagged(Tagged {
            kind: TaggedKind::ReadResponse,
            last: true,
            stag: 1,
            offset: 0,
            payload: &[7; 8],
        });
        let mut segment = Vec::new();
        response.write(&mut segment);
        let response = fpdu(&segment);
        let mut segment = Vec::new();
        Terminate::new(Refusal::RdmapAccess, &[]).write_segment(&mut segment);
        let terminate = fpdu(&segment);
        for what in 0..3 {
            for resets in [false, true] {
                let mut guest = Guest::new(&readers, 1);
                let (qp, mut stream) = asked(&mut guest);
                if resets {
                    let attr = QpAttr::default();
                    qp.qp.modify(&guest, qp_attr::STATE, &attr).unwrap();
                }
                let tables = guest.vm.tables();
                match what {
                    0 => drop(stream.take(&response, &tables, &qp.qp)),
                    1 => drop(stream.take(&terminate, &tables, &qp.qp)),
                    _ => {
                        qp.qp.fail();
                        stream.flush(&mut qp.qp.send_queue(), &tables, &qp.qp);
                    }
                }
                drop(tables);
                assert_eq!(guest.poll_all().len(), usize::from(!resets), "{what}");
                assert_eq!(qp.qp.send_queue().under_way(), 0);
            }
        }
    }

    /// Who runs the device learns what was wrong with what came: the peer learns it, too.
    #[test]
    fn what_is_refused_is_warned_of() {
        let (readers, _each) = Readers::new(1);
        let mut guest = Guest::new(&readers, 1);
        let (qp, mut stream) = asked(&mut guest);
        stream.crc = true;
        let write = Segment::Tagged(Tagged {
            kind: TaggedKind::Write,
            last: true,
            stag: NOTHING,
            offset: 0,
            payload: &[],
        });
        let mut segment = Vec::new();
        write.write(&mut segment);
        let mut bytes = fpdu(&segment);
        *bytes.last_mut().unwrap() ^= 1;
        let end = stream.take(&bytes, &guest.vm.tables(), &qp.qp);
        assert_eq!(end, Err(End::Refuses(Refusal::MpaCrc)));
        let warning = format!(
            "QP {}: the connection ends for what the peer has sent: MPA: wrong CRC",
            qp.qp.number
        );
        assert_eq!(guest.warnings.all(), [warning]);
    }
}
