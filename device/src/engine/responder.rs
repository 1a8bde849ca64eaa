// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The responder: checks and places what a peer sends, consumes receive work requests, completes
//! them (specification: "Responder").
//!
//! It never trusts that the peer's message is one: every slice is checked again, because keys and
//! states may have changed between two of them.
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, Weak};

use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::ring::{Cqe, Sge};
use virtio_rdma_spec::verbs::{
    access, qp_state, qp_type, vendor_err, wc_flag, wc_opcode, wc_status,
};

use super::binding::Binding;
use super::cursor::{check, transfer, Cursor, DataSource, Fault, Part, Sink};
use super::events::raise;
use super::message::{Answer, Datagram, Message, GRH};
use super::queue_pair::Qp;
use super::tables::{Gid, Tables};
use super::{complete_from, LARGE};
use crate::memory::atomic::AtomicOperation;
use crate::memory::{copy, copy_last, Pages};
use crate::probes;
use crate::verbs::cq::{Cq, L2Source};
use crate::verbs::keys::{Accessor, CachedRange, Keys};
use crate::verbs::srq::{Srq, Waiter};
use crate::verbs::work_queue::{FastReceive, WorkQueue};
use crate::verbs::WcError;

/// Offset of `QpRecord::rq_waited`.
const RQ_WAITED: u64 = 0;

/// A receive work request that was consumed for the message under way.
#[derive(Debug, Clone)]
struct Inbound {
    wr_id: u64,
    index: u16,
    /// The shared receive queue that it is from.
    srq: Option<Arc<Srq>>,
}

/// The responder's half of a queue pair.
#[derive(Debug)]
// In this order: what every message needs is on few cache lines, and first.
#[repr(C)]
pub struct Responder {
    remote_qp: u32,
    remote_gid: Gid,
    /// The peer that it is connected to.
    pub(super) binding: Binding,
    pub(super) access: u32,
    communication_established: bool,
    last_wqe_told: bool,
    pub(crate) max_rd_atomic: u8,
    rnr_timer: u8,
    qkey: u32,
    /// The queue pair's buffer.
    pub(crate) buffer: Arc<Pages>,
    queue: WorkQueue,
    /// Receives come from here instead.
    srq: Option<Arc<Srq>>,
    max_sge: usize,
    inbound: Option<Inbound>,
    /// The sender that waits for a receive work request.
    waiter: Option<Weak<Qp>>,
    /// Scatter list of the receive work request in use; its capacity was reserved at creation.
    sges: Vec<Sge>,
    /// The part of them that the message in progress goes to. What it does not reach need not be
    /// accessible.
    reached: Vec<Sge>,
    /// How far that is, bytes.
    reach: u64,
}

impl Responder {
    /// A responder with a receive queue for up to `max_sge` scatter/gather entries per work
    /// request.
    #[must_use]
    pub fn new(
        buffer: Arc<Pages>,
        queue: WorkQueue,
        srq: Option<Arc<Srq>>,
        max_sge: usize,
    ) -> Self {
        let responder = Self {
            buffer,
            queue,
            srq,
            max_sge,
            sges: Vec::with_capacity(max_sge),
            reached: Vec::with_capacity(max_sge),
            reach: 0,
            inbound: None,
            waiter: None,
            communication_established: false,
            last_wqe_told: false,
            qkey: 0,
            access: 0,
            rnr_timer: 0,
            max_rd_atomic: 0,
            remote_qp: 0,
            remote_gid: Gid::default(),
            binding: Binding::default(),
        };
        responder.set_waited(false);
        responder
    }

    /// Takes over attributes.
    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        self.access = attr.access_flags;
        self.qkey = attr.qkey;
        self.rnr_timer = attr.min_rnr_timer;
        self.max_rd_atomic = attr.max_dest_rd_atomic;
        self.remote_qp = attr.dest_qp_num;
        self.remote_gid = attr.av.dgid;
    }

    /// Back to the state of creation.
    pub(crate) fn reset(&mut self) {
        self.queue.position = 0;
        self.inbound = None;
        self.communication_established = false;
        self.last_wqe_told = false;
        self.binding = Binding::default();
        self.configure(&QpAttr::default());
        self.set_waited(false);
        self.wake_waiter();
    }

    /// Receive work requests consumed, modulo 2^32.
    pub(crate) fn position(&self) -> u32 {
        self.queue.position
    }

    fn set_waited(&self, waited: bool) {
        if let Some(word) = self.buffer.half_word(RQ_WAITED) {
            word.store(u32::from(waited).to_le(), Ordering::SeqCst);
        }
    }

    /// Lets the sender that waits for a receive work request try again.
    fn wake_waiter(&mut self) {
        if let Some(sender) = self.waiter.take().and_then(|sender| sender.upgrade()) {
            sender.wake();
        }
    }

    /// The first 8 bytes of the next receive work request. If there is none, posting one will ring
    /// from now on.
    fn next_receive(&self, qp: &Qp) -> Option<[u8; 8]> {
        let buffer = &self.buffer;
        if let Some(head) = self.queue.ready(buffer) {
            return Some(head);
        }
        // The poster stores the entry, then, past a full fence, loads `rq_waited`; we store
        // `rq_waited`, then, past a full fence, look for the entry again. One of the two sees the
        // other.
        qp.awaited.store(true, Ordering::SeqCst);
        self.set_waited(true);
        fence(Ordering::SeqCst);
        let head = self.queue.ready(buffer);
        if head.is_some() {
            self.set_waited(false);
        }
        head
    }

    /// The doorbell rang: a sender may wait for the receives that were posted.
    pub(crate) fn receives_posted(&mut self, qp: &Qp) {
        if self.waiter.is_none() {
            qp.awaited.store(false, Ordering::SeqCst);
            return;
        }
        if self.queue.ready(&self.buffer).is_some() {
            self.set_waited(false);
            qp.awaited.store(false, Ordering::SeqCst);
            self.wake_waiter();
        }
    }

    /// Completes up to `budget` posted receive work requests as flushed. Returns whether there may
    /// be more.
    pub(crate) fn flush(&mut self, tables: &Tables, qp: &Arc<Qp>, budget: u32) -> bool {
        // As in the requester: it may have been reset since the caller looked.
        if qp.state() != qp_state::ERR {
            return false;
        }
        if let Some(inbound) = self.inbound.take() {
            self.complete(
                tables,
                qp,
                &inbound,
                wc_status::WR_FLUSH_ERR,
                vendor_err::FLUSHED,
            );
        }
        if self.srq.is_some() && !self.last_wqe_told {
            self.last_wqe_told = true;
            raise(tables, event_type::QP_LAST_WQE_REACHED, qp.number, 0);
        }
        if self.queue.entries == 0 {
            return false;
        }
        for _ in 0..budget {
            if self.next_receive(qp).is_none() {
                // `rq_waited` stays: what is posted from now on rings and is flushed as well.
                return false;
            }
            let wr_id = u64::from_le_bytes(self.queue.word(&self.buffer, 8));
            let index = self.queue.index();
            self.queue.advance();
            let inbound = Inbound {
                wr_id,
                index,
                srq: None,
            };
            self.complete(
                tables,
                qp,
                &inbound,
                wc_status::WR_FLUSH_ERR,
                vendor_err::FLUSHED,
            );
        }
        true
    }

    /// The queue pair that it is connected to.
    pub(crate) fn remote_qp(&self) -> u32 {
        self.remote_qp
    }

    /// Whether this responder is connected to requester `qp`, whose VM has these GIDs.
    #[inline(always)]
    pub(crate) fn connected_to(&self, qp: &Qp, gids: &[Option<Gid>]) -> bool {
        self.remote_qp == qp.number
            && self.binding.admits(qp)
            && gids.contains(&Some(self.remote_gid))
    }

    /// Whether the peer may access memory as `wanted` says, REMOTE_WRITE or REMOTE_READ.
    pub(crate) fn grants(&self, wanted: u32) -> bool {
        self.access & wanted == wanted && (wanted != access::REMOTE_READ || self.max_rd_atomic != 0)
    }

    /// Whether the first message is behind us, whose arrival is an event.
    pub(crate) fn established(&self, qp: &Qp) -> bool {
        self.communication_established || qp.state() != qp_state::RTR
    }

    /// Takes the next receive work request for a message of `len` bytes, if it is eligible for the
    /// fast path (see [`WorkQueue::take_fast`]).
    #[inline(always)]
    pub(crate) fn take_fast<'a>(
        &mut self,
        keys: &'a Keys,
        cached: &mut CachedRange<'a>,
        pd: u32,
        len: u64,
    ) -> Option<FastReceive<'a>> {
        if self.inbound.is_some() {
            return None;
        }
        match &self.srq {
            Some(srq) => srq.take_fast(keys, cached, len),
            None => {
                let queue = &mut self.queue;
                queue.take_fast(&self.buffer, self.max_sge, keys, cached, pd, len)
            }
        }
    }

    /// Places bytes of an RDMA WRITE without immediate data at this key and address, if they go to one
    /// contiguous range that the peer may write, in few steps. Otherwise it does nothing and returns
    /// false: [`Self::receive`] finds out. `last`: they end the message.
    pub(crate) fn write_at_once(
        &self,
        tables: &Tables,
        qp: &Qp,
        (key, addr): (u32, u64),
        bytes: &[u8],
        last: bool,
    ) -> bool {
        let wanted = access::REMOTE_WRITE;
        let own_pd = qp.qp_type != qp_type::XRC_TGT;
        if !own_pd || !self.grants(wanted) || !self.established(qp) || bytes.is_empty() {
            return false;
        }
        let (keys, len) = (&tables.keys, bytes.len() as u64);
        let Some(range) = keys.contiguous_once(key, qp.pd, wanted, addr, len) else {
            return false;
        };
        if last {
            copy_last(range, bytes.into());
        } else {
            copy(range, bytes.into());
        }
        true
    }

    /// Takes a slice of a message.
    pub(crate) fn receive(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        origin: Origin<'_>,
        slice: Slice<'_>,
    ) -> Answer {
        let first = slice.offset == 0;
        let establishes = first && !self.communication_established && qp.state() == qp_state::RTR;
        // A UC message that is dropped was never there.
        let acknowledged = qp.facts.acknowledged;
        if establishes && acknowledged {
            self.establish(tables, qp);
        }
        let answer = self.take_slice(tables, qp, origin, slice);
        if establishes && !acknowledged && matches!(answer, Answer::Progress | Answer::Done) {
            self.establish(tables, qp);
        }
        answer
    }

    fn establish(&mut self, tables: &Tables, qp: &Qp) {
        self.communication_established = true;
        raise(tables, event_type::COMM_EST, qp.number, 0);
    }

    fn take_slice(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        origin: Origin<'_>,
        slice: Slice<'_>,
    ) -> Answer {
        let Slice {
            message,
            offset,
            len,
            last,
            claims,
            payload,
        } = slice;
        let part = Part {
            len,
            last,
            large: message.length >= LARGE,
        };
        // An XRC message names the shared receive queue, whose protection domain counts.
        let xrc = if qp.qp_type == qp_type::XRC_TGT {
            match named_srq(tables, qp, message) {
                Some(srq) => Some(srq),
                None => return self.invalid_request(tables, qp, vendor_err::SRQ),
            }
        } else {
            None
        };
        let at = MessageContext {
            tables,
            qp,
            origin,
            xrc,
            pd: xrc.map_or(qp.pd, |srq| srq.pd),
            receive_pd: self.receive_pd(qp, xrc),
        };
        match (message.kind, payload) {
            (Kind::Send, Payload::From(mut source)) => {
                let invalidated = (message.imm_is == Imm::RemoteKey).then_some(message.imm);
                if let Some(key) = invalidated {
                    if let Err(key) = tables.keys.check_invalidate(key, at.pd, qp.number) {
                        return self.violation(&at, key.0);
                    }
                }
                if let Err(answer) = self.take_receive(&at, claims, message, 0) {
                    return answer;
                }
                let mut to = Cursor::new(
                    tables,
                    &self.reached,
                    at.local(),
                    access::LOCAL_WRITE,
                    offset,
                );
                let moved = transfer(&mut to, &mut source, part);
                // Their leave to access memory ends here: it may be what is to be invalidated.
                drop((to, source));
                match moved {
                    Ok(()) if last => {
                        if let Some(key) = invalidated {
                            if let Err(key) = tables.keys.invalidate(key, at.pd, qp.number) {
                                return self.violation(&at, key.0);
                            }
                        }
                        self.delivered(&at, message, wc_opcode::RECV)
                    }
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => {
                        Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0))
                    }
                    Err(Fault::Destination(key)) => {
                        self.bad_receive(&at, wc_status::LOC_PROT_ERR, key.0, wc_status::REM_OP_ERR)
                    }
                }
            }
            (Kind::Write, Payload::From(mut source)) => {
                let remote = [remote_sge(message)];
                let wanted = access::REMOTE_WRITE;
                let with_imm = message.imm_is == Imm::Data;
                // The key is checked where the data goes, but a receive is taken only for what is
                // granted.
                let granted = if with_imm {
                    let granted = self.check_remote(&at, wanted, &remote);
                    granted.and_then(|()| self.take_receive(&at, claims, message, 0))
                } else {
                    self.check_flags(&at, wanted)
                };
                if let Err(answer) = granted {
                    return answer;
                }
                let mut to =
                    Cursor::new(tables, &remote, at.remote(), access::REMOTE_WRITE, offset);
                let moved = transfer(&mut to, &mut source, part);
                drop(to);
                match moved {
                    Ok(()) if last && with_imm => {
                        self.delivered(&at, message, wc_opcode::RECV_RDMA_WITH_IMM)
                    }
                    Ok(()) if last => Answer::Done,
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => {
                        Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0))
                    }
                    Err(Fault::Destination(key)) => self.violation(&at, key.0),
                }
            }
            (Kind::Read, Payload::Into(mut sink)) => {
                if self.max_rd_atomic == 0 {
                    return self.invalid_request(tables, qp, vendor_err::RD_ATOMIC);
                }
                let remote = [remote_sge(message)];
                if let Err(answer) = self.check_remote(&at, access::REMOTE_READ, &remote) {
                    return answer;
                }
                let from = Cursor::new(tables, &remote, at.remote(), access::REMOTE_READ, offset);
                let moved = sink.fill(&mut DataSource::Guest(from), part);
                match moved {
                    Ok(()) if last => Answer::Done,
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => self.violation(&at, key.0),
                    Err(Fault::Destination(key)) => {
                        Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0))
                    }
                }
            }
            (Kind::Atomic, Payload::Atomic(operation, sink)) => {
                self.atomic(&at, message, operation, sink)
            }
            (Kind::AtomicWrite, Payload::From(source)) => self.atomic_write(&at, message, source),
            (Kind::Flush, Payload::Flush(wanted, range)) => {
                self.flush_memory(&at, message, wanted, range)
            }
            _ => self.invalid_request(tables, qp, vendor_err::OPCODE),
        }
    }

    /// Reads bytes of an RDMA READ, from `offset` on, that is answered again. Its requester may have
    /// what it asked for, and the key may be gone: then it returns false, and nothing else happens.
    pub(crate) fn read_again(
        &self,
        tables: &Tables,
        qp: &Arc<Qp>,
        message: &Message,
        offset: u64,
        space: &mut [u8],
    ) -> bool {
        let wanted = access::REMOTE_READ;
        let pd = if qp.qp_type == qp_type::XRC_TGT {
            named_srq(tables, qp, message).map(|srq| srq.pd)
        } else {
            Some(qp.pd)
        };
        let Some(pd) = pd.filter(|_| self.access & wanted != 0) else {
            return false;
        };
        let remote = [remote_sge(message)];
        let accessor = Accessor::remote(pd, qp.number);
        if check(tables, &remote, accessor, wanted).is_err() {
            return false;
        }
        let from = Cursor::new(tables, &remote, accessor, wanted, offset);
        let part = Part::whole(space.len() as u64);
        let moved = Sink::Bytes(space).fill(&mut DataSource::Guest(from), part);
        moved.is_ok()
    }

    /// The protection domain of the keys of receives.
    fn receive_pd(&self, qp: &Qp, xrc: Option<&Arc<Srq>>) -> u32 {
        xrc.or(self.srq.as_ref()).map_or(qp.pd, |srq| srq.pd)
    }

    /// As [`Qp::take_datagram`].
    fn receive_datagram(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        origin: Origin<'_>,
        message: &Message,
        datagram: &Datagram,
        mut source: DataSource<'_>,
    ) -> Answer {
        if self.qkey != datagram.qkey {
            qp.vm.count_qkey_violation(origin.worker);
            return Answer::Refused(WcError::new(wc_status::REM_INV_REQ_ERR, vendor_err::QKEY));
        }
        let at = MessageContext {
            tables,
            qp,
            origin,
            xrc: None,
            pd: qp.pd,
            receive_pd: self.receive_pd(qp, None),
        };
        if let Err(answer) = self.take_receive(&at, true, message, GRH as u64) {
            return answer;
        }
        let grh = datagram.grh(message.length);
        let header = &mut DataSource::Bytes(&grh);
        let to = |skip| Cursor::new(tables, &self.reached, at.local(), access::LOCAL_WRITE, skip);
        let placed = transfer(&mut to(0), header, Part::whole(GRH as u64)).and_then(|()| {
            transfer(
                &mut to(GRH as u64),
                &mut source,
                Part::whole(message.length),
            )
        });
        match placed {
            Ok(()) => {}
            // The receive stays claimed for the next datagram.
            Err(Fault::Source(key)) => {
                return Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0))
            }
            Err(Fault::Destination(key)) => {
                let remote = wc_status::REM_OP_ERR;
                return self.bad_receive(&at, wc_status::LOC_PROT_ERR, key.0, remote);
            }
        }
        let Some(inbound) = self.inbound.take() else {
            return Answer::NoAnswer;
        };
        let with_imm = message.imm_is == Imm::Data;
        let mut wc_flags = wc_flag::GRH | message.imm_is.receive_flags();
        if datagram.is_ipv4() && qp.vm.accepted(feature::HEADER_TYPE) {
            wc_flags |= wc_flag::IPV4;
        }
        let cqe = Cqe {
            wr_id: inbound.wr_id,
            byte_len: u32::try_from(message.length + GRH as u64).unwrap_or(u32::MAX),
            imm: if with_imm { message.imm } else { 0 },
            qp_num: qp.number,
            src_qp: message.src_qp,
            wqe_index: inbound.index,
            sl: datagram.sl,
            opcode: wc_opcode::RECV,
            wc_flags,
            ..Cqe::default()
        };
        push(
            tables,
            qp,
            &inbound,
            &cqe,
            &datagram.source,
            message.solicited,
        );
        Answer::Done
    }

    /// The peer may access `remote` as `wanted` says: by the queue pair's flags and by the key.
    fn check_remote(
        &self,
        at: &MessageContext<'_>,
        wanted: u32,
        remote: &[Sge],
    ) -> Result<(), Answer> {
        self.check_flags(at, wanted)?;
        check(at.tables, remote, at.remote(), wanted).map_err(|key| self.violation(at, key.0))
    }

    /// The peer may access memory as `wanted` says by the queue pair's flags.
    fn check_flags(&self, at: &MessageContext<'_>, wanted: u32) -> Result<(), Answer> {
        if self.access & wanted != wanted {
            return Err(self.invalid_request(at.tables, at.qp, vendor_err::QP_ACCESS));
        }
        Ok(())
    }

    /// Makes sure that a receive work request is in use for this message, which needs `header`
    /// bytes more than its length, and that it is long enough.
    fn take_receive(
        &mut self,
        at: &MessageContext<'_>,
        claims: bool,
        message: &Message,
        header: u64,
    ) -> Result<(), Answer> {
        if !claims {
            // It was claimed before, unless all was reset since: then this message never began
            // here.
            if self.inbound.is_none() {
                return Err(Answer::NoAnswer);
            }
            let placed = message.kind == Kind::Send;
            if placed && self.reach < message.length {
                return self.reach_on(at, message.length);
            }
            return Ok(());
        }
        // What a message to another shared receive queue left behind is not for this one.
        let other = self.inbound.take_if(|inbound| {
            at.xrc.is_some_and(|xrc| {
                let srq = inbound.srq.as_ref();
                !srq.is_some_and(|srq| Arc::ptr_eq(srq, xrc))
            })
        });
        if let Some(other) = other {
            let srq = other.srq.as_ref();
            if srq.is_some_and(|srq| !srq.give_back(other.wr_id, &self.sges)) {
                self.inbound = Some(other);
                let (status, reason) = (wc_status::LOC_QP_OP_ERR, vendor_err::NO_MEMORY);
                return Err(self.bad_receive(at, status, reason, wc_status::REM_OP_ERR));
            }
        }
        if self.inbound.is_none() {
            self.claim(at)?;
        }
        // A WRITE takes a receive only for its immediate data.
        if message.kind == Kind::Write {
            return Ok(());
        }
        let datagram = header != 0;
        if !self.reach(message.length + header) {
            if datagram {
                // It stays claimed for the next datagram.
                let (status, reason) = (wc_status::REM_INV_REQ_ERR, vendor_err::RECV_TOO_SHORT);
                return Err(Answer::Refused(WcError::new(status, reason)));
            }
            return Err(self.too_short(at));
        }
        self.check_reached(at)
    }

    /// The message goes on to `length` bytes: so must the receive.
    #[inline(never)]
    fn reach_on(&mut self, at: &MessageContext<'_>, length: u64) -> Result<(), Answer> {
        if !self.reach(length) {
            return Err(self.too_short(at));
        }
        self.check_reached(at)
    }

    /// The receive is shorter than its message.
    fn too_short(&mut self, at: &MessageContext<'_>) -> Answer {
        let (status, reason) = (wc_status::LOC_LEN_ERR, vendor_err::RECV_TOO_SHORT);
        self.bad_receive(at, status, reason, wc_status::REM_INV_REQ_ERR)
    }

    /// What the message reaches of the receive must be accessible.
    fn check_reached(&mut self, at: &MessageContext<'_>) -> Result<(), Answer> {
        check(at.tables, &self.reached, at.local(), access::LOCAL_WRITE).map_err(|key| {
            self.bad_receive(at, wc_status::LOC_PROT_ERR, key.0, wc_status::REM_OP_ERR)
        })
    }

    /// Finds the part of the receive that its first `length` bytes are in. Returns whether there is
    /// as much.
    fn reach(&mut self, length: u64) -> bool {
        let mut left = length;
        self.reach = length;
        self.reached.clear();
        for sge in &self.sges {
            let part = u32::try_from(left).map_or(sge.length, |left| left.min(sge.length));
            self.reached.push(Sge {
                length: part,
                ..*sge
            });
            left -= u64::from(part);
        }
        left == 0
    }

    /// Consumes a receive work request.
    fn claim(&mut self, at: &MessageContext<'_>) -> Result<(), Answer> {
        // Nobody waits for a receive whose message may be dropped.
        let waiter = at.origin.waiter.filter(|_| at.qp.facts.acknowledged);
        if let Some(srq) = at.xrc.or(self.srq.as_ref()) {
            let srq = srq.clone();
            let Some(taken) = srq.take(&mut self.sges, waiter) else {
                return Err(if srq.lost() {
                    if srq.fail() {
                        let reason = vendor_err::MEMORY_GONE;
                        raise(at.tables, event_type::SRQ_ERR, srq.number, reason);
                    }
                    self.ring_gone(at.tables, at.qp)
                } else {
                    Answer::NotReady(self.rnr_timer)
                });
            };
            self.inbound = Some(Inbound {
                wr_id: taken.wr_id,
                index: 0,
                srq: Some(srq.clone()),
            });
            if taken.limit_reached {
                raise(at.tables, event_type::SRQ_LIMIT_REACHED, srq.number, 0);
            }
            return match taken.bad {
                Some(reason) => Err(self.bad_receive(
                    at,
                    wc_status::LOC_QP_OP_ERR,
                    reason,
                    wc_status::REM_OP_ERR,
                )),
                None => Ok(()),
            };
        }
        let head = if waiter.is_some() {
            self.next_receive(at.qp)
        } else {
            self.queue.ready(&self.buffer)
        };
        let Some(head) = head else {
            if self.buffer.lost() {
                return Err(self.ring_gone(at.tables, at.qp));
            }
            if let Some(waiter) = waiter {
                self.waiter = Some(Arc::downgrade(waiter));
            }
            return Err(Answer::NotReady(self.rnr_timer));
        };
        let index = self.queue.index();
        let (wr_id, good) =
            self.queue
                .take_receive(&self.buffer, head, self.max_sge, &mut self.sges);
        self.inbound = Some(Inbound {
            wr_id,
            index,
            srq: None,
        });
        if good {
            return Ok(());
        }
        let (status, reason) = (wc_status::LOC_QP_OP_ERR, vendor_err::BAD_RECEIVE);
        Err(self.bad_receive(at, status, reason, wc_status::REM_OP_ERR))
    }

    /// The message is complete: its receive work request too.
    fn delivered(&mut self, at: &MessageContext<'_>, message: &Message, opcode: u8) -> Answer {
        let Some(inbound) = self.inbound.take() else {
            return Answer::Done;
        };
        let wc_flags = message.imm_is.receive_flags();
        let cqe = Cqe {
            wr_id: inbound.wr_id,
            byte_len: u32::try_from(message.length).unwrap_or(u32::MAX),
            imm: if wc_flags == 0 { 0 } else { message.imm },
            qp_num: at.qp.number,
            src_qp: message.src_qp,
            wqe_index: inbound.index,
            opcode,
            wc_flags,
            ..Cqe::default()
        };
        push(
            at.tables,
            at.qp,
            &inbound,
            &cqe,
            &L2Source::default(),
            message.solicited,
        );
        Answer::Done
    }

    /// Completes a receive work request in error.
    fn complete(&self, tables: &Tables, qp: &Arc<Qp>, inbound: &Inbound, status: u8, reason: u8) {
        probes::completion_error(qp.vm.name(), qp.number, WcError::new(status, reason));
        let cqe = Cqe {
            wr_id: inbound.wr_id,
            qp_num: qp.number,
            wqe_index: inbound.index,
            vendor_err: reason,
            status,
            opcode: wc_opcode::RECV,
            ..Cqe::default()
        };
        push(tables, qp, inbound, &cqe, &L2Source::default(), true);
    }

    /// Our receive work request is bad: it completes with `status`, the peer's with `remote`, and
    /// we are in error.
    fn bad_receive(
        &mut self,
        at: &MessageContext<'_>,
        status: u8,
        reason: u8,
        remote: u8,
    ) -> Answer {
        at.qp.fail_receive();
        if let Some(inbound) = self.inbound.take() {
            self.complete(at.tables, at.qp, &inbound, status, reason);
        }
        Answer::Refused(WcError::new(remote, reason))
    }

    /// Our ring is gone: we are in error.
    fn ring_gone(&self, tables: &Tables, qp: &Arc<Qp>) -> Answer {
        if qp.fail() {
            raise(
                tables,
                event_type::QP_FATAL,
                qp.number,
                vendor_err::MEMORY_GONE,
            );
        }
        Answer::Refused(WcError::new(wc_status::REM_OP_ERR, vendor_err::MEMORY_GONE))
    }

    /// The peer's key does not give access.
    pub(super) fn violation(&self, at: &MessageContext<'_>, reason: u8) -> Answer {
        // A UC message is dropped, and that is all.
        if at.qp.facts.acknowledged && at.qp.fail_receive() {
            raise(at.tables, event_type::QP_ACCESS_ERR, at.qp.number, reason);
        }
        Answer::Refused(WcError::new(wc_status::REM_ACCESS_ERR, reason))
    }

    /// The peer asks for what this queue pair does not do.
    pub(crate) fn invalid_request(&self, tables: &Tables, qp: &Arc<Qp>, reason: u8) -> Answer {
        if qp.facts.acknowledged && qp.fail_receive() {
            raise(tables, event_type::QP_REQ_ERR, qp.number, reason);
        }
        Answer::Refused(WcError::new(wc_status::REM_INV_REQ_ERR, reason))
    }
}

impl Qp {
    /// Takes a datagram, whole. Where it cannot be received it is dropped, and its sender is not told: the
    /// answer is for those who look.
    pub(crate) fn take_datagram(
        self: &Arc<Self>,
        tables: &Tables,
        origin: Origin<'_>,
        message: &Message,
        datagram: &Datagram,
        source: DataSource<'_>,
    ) -> Answer {
        let mut responder = self.responder();
        if !self.facts.datagram || self.facts.acknowledged || !self.listens() {
            return Answer::NoAnswer;
        }
        responder.receive_datagram(tables, self, origin, message, datagram, source)
    }

    /// Takes a slice of a reliable datagram.
    pub(crate) fn take_reliable_datagram(
        self: &Arc<Self>,
        tables: &Tables,
        origin: Origin<'_>,
        qkey: u32,
        slice: Slice<'_>,
    ) -> Answer {
        let mut responder = self.responder();
        if self.qp_type != qp_type::SRD || !self.listens() || responder.qkey != qkey {
            return Answer::Refused(WcError::new(
                wc_status::REM_INV_RD_REQ_ERR,
                vendor_err::NO_QUEUE_PAIR,
            ));
        }
        responder.take_slice(tables, self, origin, slice)
    }
}

/// Where a message is: what the responder's steps have in common.
pub(super) struct MessageContext<'a> {
    pub(super) tables: &'a Tables,
    pub(super) qp: &'a Arc<Qp>,
    pub(super) origin: Origin<'a>,
    /// The shared receive queue that an XRC message names.
    pub(super) xrc: Option<&'a Arc<Srq>>,
    /// The protection domain that the peer's keys must belong to.
    pub(super) pd: u32,
    /// The protection domain that the keys of receives must belong to.
    pub(super) receive_pd: u32,
}

impl MessageContext<'_> {
    /// Our own access, to receive buffers.
    fn local(&self) -> Accessor {
        Accessor::local(self.receive_pd)
    }

    /// The peer's access.
    pub(super) fn remote(&self) -> Accessor {
        Accessor::remote(self.pd, self.qp.number)
    }
}

/// Completes a receive: in the queue pair's completion queue, or that of the XRC shared receive
/// queue it is from.
fn push(
    tables: &Tables,
    qp: &Arc<Qp>,
    inbound: &Inbound,
    cqe: &Cqe,
    source: &L2Source,
    solicited: bool,
) {
    let cq: Option<&Arc<Cq>> = match inbound.srq.as_ref().filter(|srq| srq.xrc.is_some()) {
        // It may have been destroyed: no queue pair keeps it.
        Some(srq) => tables
            .srqs
            .get(srq.number)
            .filter(|present| Arc::ptr_eq(present, srq))
            .and_then(|srq| srq.xrc.as_ref())
            .map(|xrc| &xrc.cq),
        None => qp.recv_cq.as_ref(),
    };
    if let Some(cq) = cq {
        complete_from(tables, cq, cqe, source, solicited);
        if cq.errored() {
            // Those that use it have failed already; an XRC_TGT queue pair uses it from case to
            // case.
            qp.fail();
        }
    }
}

/// A slice of a message: all of it, a part of it that is moved at once, or a packet.
#[derive(Debug)]
pub(crate) struct Slice<'a> {
    /// The message. The responder need not know the length of a SEND before its last slice: it may
    /// grow from slice to slice, and reaches the end of this one at least.
    pub message: &'a Message,
    /// Where in the message it is.
    pub offset: u64,
    /// Its length, bytes.
    pub len: u64,
    /// It ends the message.
    pub last: bool,
    /// It claims the receive of its message, if that needs one: the first slice does, or, of
    /// packets of an RDMA WRITE, that which has the immediate data.
    pub claims: bool,
    pub payload: Payload<'a>,
}

/// Who calls a responder, as far as it has to know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin<'a> {
    /// The worker that calls. It counts.
    pub worker: u16,
    /// The queue pair to wake when a receive is posted that this message waits for; none where the
    /// requester learns from an RNR NAK alone.
    pub waiter: Option<&'a Arc<Qp>>,
}

impl<'a> Origin<'a> {
    /// A queue pair of this process.
    pub(crate) fn of(sender: &'a Arc<Qp>) -> Self {
        Self {
            worker: sender.worker_index,
            waiter: Some(sender),
        }
    }
}

/// Where a slice's payload comes from, or goes to.
#[derive(Debug)]
pub enum Payload<'a> {
    /// The requester's data.
    From(DataSource<'a>),
    /// Where what the requester reads goes.
    Into(Sink<'a>),
    /// An atomic operation, and where what was there goes.
    Atomic(AtomicOperation, Sink<'a>),
    /// FLUSH with this access, of a range of this length, or of all that the key is for.
    Flush(u32, Option<u64>),
}

/// The shared receive queue that a message of XRC names, if its queue pair's domain has it.
fn named_srq<'a>(tables: &'a Tables, qp: &Qp, message: &Message) -> Option<&'a Arc<Srq>> {
    let srq = tables.srqs.get(message.srqn);
    srq.filter(|srq| srq.xrc.as_ref().is_some_and(|xrc| xrc.domain == qp.xrcd))
}

/// The remote range of a message as a scatter/gather entry.
fn remote_sge(message: &Message) -> Sge {
    Sge {
        addr: message.remote_addr,
        length: u32::try_from(message.length).unwrap_or(u32::MAX),
        lkey: message.rkey,
    }
}
