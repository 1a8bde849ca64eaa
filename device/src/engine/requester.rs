// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requester: takes work requests from a send queue, has them carried out, and completes them
//! (specification: "Requester").
//!
//! Each entry is read once into a local copy, which alone is checked and used.
mod direct;
mod register;

use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, UdWqe, PHASE, SEND_DATA_OFFSET, UD_DATA_OFFSET};
use virtio_rdma_spec::verbs::{
    access, completion_opcode, qp_state, qp_type, send_flag, vendor_err, wc_status, wr_opcode,
    MASK_24,
};

pub(crate) use self::direct::Found;
use self::direct::Rest;
use self::register::Registration;
use super::cursor::{check, Cursor, From};
use super::message::{Answer, Datagram, Message};
use super::operation::{Kind, Operation};
use super::queue::WorkQueue;
use super::responder::{Payload, Slice};
use super::{complete, raise, Budget, SHARE};
use crate::fabric::local::{Fanout, Peer, Route};
use crate::memory::Pages;
use crate::rnic::{GSI_QPN, MAX_DATAGRAM, MAX_MESSAGE};
use crate::verbs::keys::{Accessor, KeyError};
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Gid, Tables};
use crate::worker::Linger;
use vhost_device_rdma_sync::Visit;

/// How long to wait for a stopped VM before looking again, nanoseconds.
const STOPPED_RETRY: u64 = 5_000_000;
/// How long to wait between attempts where no time-out is set, nanoseconds.
const ENDLESS_RETRY: u64 = 100_000_000;

/// How long to let receives gather where a sender that waits for them finds few each time,
/// nanoseconds: at least, and at most (specification: "RNR").
const LEAST_GATHER: u32 = 4_000;
const MOST_GATHER: u32 = 128_000;

/// A Q_Key with this bit stands for the sender's own.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// What a turn of a queue pair led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nothing more to do until something happens.
    Idle,
    /// There is more to do: another turn, please.
    Again,
    /// The same, after more bytes than those who wait for their turn should wait for.
    Long,
    /// Nothing to do before this time, nanoseconds.
    Park(u64),
}

/// The work request in progress.
#[derive(Debug, Clone, Copy)]
struct Active {
    message: Message,
    wr_id: u64,
    index: u16,
    signaled: bool,
    inline: bool,
    kind: Kind,
    /// Bytes moved.
    done: u64,
}

/// The requester's half of a queue pair.
// In this order: what every turn needs is on few cache lines, and first.
#[derive(Debug)]
#[repr(C)]
pub struct Requester {
    /// The queue pair's buffer.
    pub(crate) buffer: Arc<Pages>,
    queue: WorkQueue,
    /// Nothing is tried before this time.
    parked: Option<u64>,
    max_sge: usize,
    max_inline: usize,
    /// The way to the peer.
    route: Route,
    dest_gid: Gid,
    dest_qp: u32,
    qp_type: u8,
    signal_all: bool,
    retries: u8,
    rnr_retries: u8,
    drained: bool,
    drained_notify: bool,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    max_rd_atomic: u8,
    /// This turn is the first after it waited.
    resumed: bool,
    /// What it waited for came; it waits for more, now.
    gathering: bool,
    /// How long it does that, nanoseconds.
    gather: u32,
    active: Option<Active>,
    /// What the active one asks for beyond moving data.
    operation: Operation,
    /// How far the active one is, if it is a registration.
    registration: Option<Box<Registration>>,
    /// Where the active one goes, if it is a datagram.
    datagram: Option<Datagram>,
    /// How far the active one is, if it goes to a multicast group.
    fanout: Option<Fanout>,
    /// Gather list of the work request in progress; its capacity was reserved at creation.
    sges: Vec<Sge>,
    /// Inline data of the work request in progress; its capacity was reserved at creation.
    inline: Vec<u8>,
    qkey: u32,
}

impl Requester {
    /// A requester with a send queue for work requests of up to `max_sge` gather entries or
    /// `max_inline` bytes.
    #[must_use]
    pub fn new(
        buffer: Arc<Pages>,
        queue: WorkQueue,
        qp_type: u8,
        max_sge: usize,
        max_inline: usize,
        signal_all: bool,
    ) -> Self {
        Self {
            buffer,
            queue,
            qp_type,
            max_sge,
            max_inline,
            signal_all,
            sges: Vec::with_capacity(max_sge),
            inline: Vec::with_capacity(max_inline.next_multiple_of(8)),
            active: None,
            operation: Operation::None,
            registration: None,
            datagram: None,
            fanout: None,
            route: Route::default(),
            parked: None,
            retries: 0,
            rnr_retries: 0,
            drained: false,
            drained_notify: false,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            max_rd_atomic: 0,
            resumed: false,
            gathering: false,
            gather: 0,
            dest_qp: 0,
            dest_gid: Gid::default(),
            qkey: 0,
        }
    }

    /// Takes over attributes.
    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        self.timeout = attr.timeout;
        self.retry_cnt = attr.retry_cnt;
        self.rnr_retry = attr.rnr_retry;
        self.max_rd_atomic = attr.max_rd_atomic;
        self.dest_qp = attr.dest_qp_num;
        self.dest_gid = attr.av.dgid;
        self.qkey = attr.qkey;
        self.route = Route::default();
        self.parked = None;
        self.gathering = false;
        self.gather = 0;
        self.reset_retries();
    }

    /// The send queue drains from now on; SQ_DRAINED tells when it has, if `notify`.
    pub(crate) fn drain(&mut self, notify: bool) {
        self.drained = false;
        self.drained_notify = notify;
    }

    /// Back to the state of creation.
    pub(crate) fn reset(&mut self) {
        self.queue.position = 0;
        self.active = None;
        self.registration = None;
        self.drain(false);
        self.configure(&QpAttr::default());
    }

    /// The memory changes: what was read in the old one is of no use.
    pub(crate) fn rebase(&mut self, buffer: Arc<Pages>) {
        self.buffer = buffer;
        self.registration = None;
    }

    /// Whether a message is under way.
    pub(crate) fn in_progress(&self) -> bool {
        self.active.is_some()
    }

    /// Whether it has a queue and memory, and nothing under way.
    fn is_idle(&self) -> bool {
        let busy = self.in_progress() || self.is_parked();
        !busy && self.queue.entries != 0 && !self.buffer.lost()
    }

    /// Whether it waits for a time.
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Send work requests consumed, modulo 2^32.
    pub(crate) fn position(&self) -> u32 {
        self.queue.position
    }

    fn reset_retries(&mut self) {
        self.retries = 0;
        self.rnr_retries = 0;
    }

    /// One turn of at most `share` at time `now`, nanoseconds. With nothing more to do it may
    /// `linger`. Others before it `found` what it may need.
    pub(crate) fn turn<'a>(
        &mut self,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        share: Budget,
        linger: &mut Linger<'_>,
        found: &mut Found<'a>,
    ) -> Turn {
        self.resumed = false;
        if let Some(until) = self.parked {
            if now < until && self.route.appears(&qp.rnic, self.dest_gid) {
                // The wait for an answer is cut short: that attempt does not count.
                self.retries = self.retries.saturating_sub(1);
            } else if now < until {
                if !qp.wake.swap(false, Ordering::SeqCst) {
                    return Turn::Park(until);
                }
                if self.gather != 0 && !self.gathering {
                    self.gathering = true;
                    return self.park(now, u64::from(self.gather).min(until - now));
                }
            }
            qp.wake.store(false, Ordering::SeqCst);
            self.parked = None;
            self.gathering = false;
            self.resumed = true;
        }
        if self.queue.entries == 0 {
            return Turn::Idle;
        }
        if self.buffer.lost() {
            if qp.fail() {
                raise(
                    tables,
                    event_type::QP_FATAL,
                    qp.number,
                    vendor_err::MEMORY_GONE,
                );
            }
            return Turn::Again;
        }
        if matches!(self.qp_type, qp_type::UD | qp_type::GSI) {
            return self.datagrams(found.visit, tables, qp);
        }
        let mut route = std::mem::take(&mut self.route);
        route.refresh(&qp.rnic, self.dest_gid);
        let turn = if found.follow(&route) {
            self.carry_out(tables, qp, now, share, linger, found)
        } else {
            let mut found = Found::with(found.visit, route.peer(found.visit));
            self.carry_out(tables, qp, now, share, linger, &mut found)
        };
        self.route = route;
        turn
    }

    /// A turn that ends at the peer that was found.
    #[inline(always)]
    fn carry_out<'a>(
        &mut self,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        share: Budget,
        linger: &mut Linger<'_>,
        found: &mut Found<'a>,
    ) -> Turn {
        let mut budget = share;
        let turn = loop {
            // This is all that most turns are.
            if self.active.is_none()
                && self.direct(tables, qp, &mut budget, linger, found) == Rest::Nothing
            {
                break Turn::Idle;
            }
            if budget.messages == 0 || budget.bytes == 0 {
                break Turn::Again;
            }
            let sent = budget.spent(share).messages;
            budget.messages -= 1;
            if let Err(turn) = self.general(tables, qp, now, sent, &mut budget, &found.peer) {
                break turn;
            }
        };
        let done = budget.spent(share);
        let long = done.messages > SHARE.messages || done.bytes > SHARE.bytes;
        if turn == Turn::Again && long {
            return Turn::Long;
        }
        turn
    }

    /// The general way, for one work request or a slice of it, after `sent` of this turn. Fails
    /// with what the turn led to if that ends it.
    #[inline(never)]
    fn general(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        now: u64,
        sent: u32,
        budget: &mut Budget,
        peer: &Peer<'_>,
    ) -> Result<(), Turn> {
        let active = self.next_active(tables, qp)?;
        self.active = Some(active);
        if qp.wake.load(Ordering::Relaxed) {
            // Whatever woke us is behind us: the next wake-up comes after what the responder says
            // now.
            qp.wake.store(false, Ordering::Relaxed);
        }
        if active.kind.is_local() {
            match self.execute(tables, qp, &active, budget) {
                Ok(true) => self.finish(tables, qp, &active),
                Ok(false) => return Err(Turn::Again),
                Err((status, reason)) => {
                    self.fail(tables, qp, status, reason);
                    return Err(Turn::Again);
                }
            }
            return Ok(());
        }
        let len = (active.message.length - active.done).min(budget.bytes);
        let mut answer = self.exchange(tables, qp, &active, len, peer);
        let lost = matches!(
            answer,
            Answer::NoAnswer | Answer::NotReady(_) | Answer::Refused(..) | Answer::Stopped
        );
        let dropped = lost && self.qp_type == qp_type::UC;
        if dropped {
            // The sender does not learn of it.
            answer = Answer::Done;
        }
        match answer {
            Answer::Progress => {
                self.reset_retries();
                self.active = Some(Active {
                    done: active.done + len,
                    ..active
                });
                budget.bytes -= len;
            }
            Answer::Done => {
                self.reset_retries();
                budget.bytes -= len;
                if active.message.opcode == wr_opcode::RDMA_READ_WITH_INV {
                    if let Err(key) = self.invalidate_sink(tables, qp) {
                        let status = wc_status::LOC_QP_OP_ERR;
                        self.fail(tables, qp, status, key.0);
                        return Err(Turn::Again);
                    }
                }
                self.finish(tables, qp, &active);
                let worker = qp.worker.index;
                qp.rnic.count_sent(worker, 1, active.message.length);
                if !dropped {
                    peer.count_received(worker, active.message.length);
                }
            }
            Answer::Busy => return Err(Turn::Again),
            Answer::Stopped => return Err(self.park(now, STOPPED_RETRY)),
            Answer::NoAnswer => {
                qp.rnic.count_retry(qp.worker.index);
                if self.timeout == 0 {
                    return Err(self.park(now, ENDLESS_RETRY));
                }
                if self.retries > self.retry_cnt {
                    self.fail(tables, qp, wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER);
                    return Err(Turn::Again);
                }
                self.retries += 1;
                return Err(self.park(now, 4096u64 << self.timeout));
            }
            Answer::NotReady(timer) => {
                qp.rnic.count_rnr(qp.worker.index);
                self.starve(sent);
                if self.rnr_retry != 7 {
                    if self.rnr_retries >= self.rnr_retry {
                        self.fail(
                            tables,
                            qp,
                            wc_status::RNR_RETRY_EXC_ERR,
                            vendor_err::NO_RECEIVE,
                        );
                        return Err(Turn::Again);
                    }
                    self.rnr_retries += 1;
                }
                return Err(self.park(now, rnr_nanoseconds(timer)));
            }
            Answer::Refused(status, reason) | Answer::Local(status, reason) => {
                self.fail(tables, qp, status, reason);
                return Err(Turn::Again);
            }
        }
        Ok(())
    }

    /// The message to go on with: the one in progress, or the next.
    fn next_active(&mut self, tables: &Tables, qp: &Arc<Qp>) -> Result<Active, Turn> {
        let state = qp.state();
        if state == qp_state::SQD && self.active.is_none() {
            if !self.drained {
                self.drained = true;
                if self.drained_notify {
                    raise(tables, event_type::SQ_DRAINED, qp.number, 0);
                }
            }
            return Err(Turn::Idle);
        }
        if state != qp_state::RTS && state != qp_state::SQD {
            let flushes = matches!(state, qp_state::ERR | qp_state::SQE);
            return Err(if flushes { Turn::Again } else { Turn::Idle });
        }
        if let Some(active) = self.active {
            return Ok(active);
        }
        match self.fetch(tables, qp) {
            Some(Ok(active)) => Ok(active),
            Some(Err((status, reason))) => {
                self.fail(tables, qp, status, reason);
                Err(Turn::Again)
            }
            None => Err(Turn::Idle),
        }
    }

    /// A turn of a queue pair that sends datagrams: each goes its own way, whole, and is done with.
    /// One to a group counts as often as there are queue pairs in it.
    fn datagrams(&mut self, visit: &Visit<'_>, tables: &Tables, qp: &Arc<Qp>) -> Turn {
        let mut budget = SHARE.bytes;
        for _ in 0..SHARE.messages {
            let active = match self.next_active(tables, qp) {
                Ok(active) => active,
                Err(turn) => return turn,
            };
            self.active = Some(active);
            let Some(datagram) = self.datagram else {
                self.fail(tables, qp, wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
                return Turn::Again;
            };
            let answer = if datagram.multicast() {
                let fanout = self.fanout.take();
                let mut fanout = fanout.unwrap_or_else(|| Fanout::new(qp, datagram.dgid));
                let source = self.source(tables, qp, &active);
                let answer = fanout.next(visit, qp, &active.message, &datagram, source);
                self.fanout = Some(fanout);
                answer
            } else {
                let mut route = std::mem::take(&mut self.route);
                route.refresh(&qp.rnic, datagram.dgid);
                let source = self.source(tables, qp, &active);
                let peer = route.peer(visit);
                let answer = peer.deliver_datagram(qp, &active.message, &datagram, source);
                self.route = route;
                answer
            };
            match answer {
                Answer::Busy => return Turn::Again,
                Answer::Local(status, reason) => {
                    self.fail(tables, qp, status, reason);
                    return Turn::Again;
                }
                Answer::Progress => {}
                _ => {
                    self.finish(tables, qp, &active);
                    qp.rnic
                        .count_sent(qp.worker.index, 1, active.message.length);
                }
            }
            budget = budget.saturating_sub(active.message.length);
            if budget == 0 {
                return Turn::Again;
            }
        }
        Turn::Again
    }

    /// What the message in progress reads, from where it is on.
    fn source<'a>(&'a self, tables: &'a Tables, qp: &Qp, active: &Active) -> From<'a> {
        if active.inline {
            let left = usize::try_from(active.done)
                .ok()
                .and_then(|done| self.inline.get(done..));
            From::Bytes(left.unwrap_or_default())
        } else {
            From::Guest(Cursor::new(
                tables,
                &self.sges,
                Accessor::local(qp.pd),
                0,
                active.done,
            ))
        }
    }

    /// There is no receive, after so many messages of this turn. Each that is posted while the
    /// sender waits makes the guest ring and a worker wake up, which costs much more than a
    /// message: where they come one by one, several are left to gather.
    fn starve(&mut self, sent: u32) {
        self.gather = match sent {
            0..=15 if self.resumed => (2 * self.gather).clamp(LEAST_GATHER, MOST_GATHER),
            16..=31 if self.resumed => self.gather,
            _ if self.gather > LEAST_GATHER => self.gather / 2,
            _ => 0,
        };
    }

    fn park(&mut self, now: u64, wait: u64) -> Turn {
        let until = now.saturating_add(wait);
        self.parked = Some(until);
        Turn::Park(until)
    }

    /// Reads and checks the next work request. `None`: nothing is posted. An error leaves it in
    /// `active`, to be completed.
    #[allow(clippy::type_complexity)]
    fn fetch(&mut self, tables: &Tables, qp: &Arc<Qp>) -> Option<Result<Active, (u8, u8)>> {
        let buffer = &self.buffer;
        let head = self.queue.ready(buffer)?;
        let datagram = matches!(self.qp_type, qp_type::UD | qp_type::GSI);
        let mut bytes = [0; UdWqe::SIZE];
        let head_size = if datagram { UdWqe::SIZE } else { SendWqe::SIZE };
        for (i, chunk) in bytes.chunks_exact_mut(8).take(head_size / 8).enumerate() {
            let word = if i == 0 {
                head
            } else {
                self.queue.word(buffer, 8 * i)
            };
            chunk.copy_from_slice(&word);
        }
        let wqe = SendWqe::get(&bytes);
        let flags = wqe.flags & !PHASE;
        let inline = flags & send_flag::INLINE != 0;
        let mut active = Active {
            message: Message {
                opcode: wqe.opcode,
                solicited: flags & send_flag::SOLICITED != 0,
                imm: wqe.imm,
                remote_addr: wqe.remote_addr,
                rkey: wqe.rkey,
                srqn: wqe.srqn,
                src_qp: qp.number,
                length: 0,
            },
            wr_id: wqe.wr_id,
            index: self.queue.index(),
            signaled: self.signal_all || flags & send_flag::SIGNALED != 0,
            inline,
            kind: Kind::Send,
            done: 0,
        };
        self.active = Some(active);
        self.datagram = None;
        self.fanout = None;
        let kind = Kind::of(wqe.opcode)
            .filter(|(kind, _)| kind.allowed(wqe.opcode, self.qp_type))
            .filter(|(_, any)| any.is_empty() || any.iter().any(|one| qp.rnic.accepted(*one)));
        let Some((kind, _)) = kind else {
            return Some(Err((wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE)));
        };
        active.kind = kind;
        let data_offset = if datagram {
            match self.address(tables, &UdWqe::from_bytes(&bytes)) {
                Some(address) => self.datagram = Some(address),
                None => return Some(Err((wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS))),
            }
            let gsi = self.qp_type == qp_type::GSI;
            active.message.src_qp = if gsi { GSI_QPN } else { qp.number };
            UD_DATA_OFFSET
        } else {
            SEND_DATA_OFFSET
        };
        let longest = if datagram { MAX_DATAGRAM } else { MAX_MESSAGE };
        let known =
            send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;
        if flags & !known != 0 || (inline && !kind.may_be_inline()) {
            return Some(Err((wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS)));
        }
        if kind.brings() && self.max_rd_atomic == 0 {
            return Some(Err((wc_status::LOC_QP_OP_ERR, vendor_err::RD_ATOMIC)));
        }
        if !matches!(kind, Kind::Send | Kind::Write | Kind::Read) {
            self.operation = match Operation::read(&self.queue, buffer, &wqe) {
                Ok(operation) => operation,
                Err(refused) => return Some(Err(refused)),
            };
            if kind.is_local() || kind == Kind::Flush {
                self.sges.clear();
                return Some(Ok(active));
            }
        }
        let word = matches!(kind, Kind::Atomic | Kind::AtomicWrite);
        let count = usize::from(wqe.count);
        if inline {
            if count > self.max_inline {
                return Some(Err((wc_status::LOC_LEN_ERR, vendor_err::TOO_LONG_ENTRY)));
            }
            self.inline.clear();
            for i in 0..count.div_ceil(8) {
                self.inline
                    .extend_from_slice(&self.queue.word(buffer, data_offset + 8 * i));
            }
            self.inline.truncate(count);
            active.message.length = count as u64;
            if active.message.length > longest || (word && count != 8) {
                return Some(Err((wc_status::LOC_LEN_ERR, vendor_err::MESSAGE_LENGTH)));
            }
            return Some(Ok(active));
        }
        let invalidates = wqe.opcode == wr_opcode::RDMA_READ_WITH_INV;
        if count > self.max_sge || (invalidates && count != 1) {
            return Some(Err((wc_status::LOC_QP_OP_ERR, vendor_err::TOO_LONG_ENTRY)));
        }
        self.queue
            .read_sges(buffer, data_offset, count, &mut self.sges);
        active.message.length = self.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if active.message.length > longest || (word && active.message.length != 8) {
            return Some(Err((wc_status::LOC_LEN_ERR, vendor_err::MESSAGE_LENGTH)));
        }
        let wanted = if kind.brings() {
            access::LOCAL_WRITE
        } else {
            0
        };
        if let Err(key) = check(tables, &self.sges, Accessor::local(qp.pd), wanted) {
            return Some(Err((wc_status::LOC_PROT_ERR, key.0)));
        }
        if let (true, Some(sink)) = (invalidates, self.sges.first()) {
            if let Err(key) = tables.keys.check_invalidate_region(sink.lkey, qp.pd) {
                return Some(Err((wc_status::LOC_QP_OP_ERR, key.0)));
            }
        }
        Some(Ok(active))
    }

    /// The RDMA_READ_WITH_INV in progress has brought its data: the key that it was written by is
    /// of no use any longer.
    fn invalidate_sink(&self, tables: &Tables, qp: &Qp) -> Result<(), KeyError> {
        match self.sges.first() {
            Some(sink) => {
                let key = sink.lkey;
                tables.keys.check_invalidate_region(key, qp.pd)?;
                tables.keys.invalidate(key, qp.pd, qp.number)
            }
            None => Ok(()),
        }
    }

    /// Where a datagram goes; `None` if its address is not one.
    fn address(&self, tables: &Tables, wqe: &UdWqe) -> Option<Datagram> {
        let index = usize::from(wqe.sgid_index);
        let sgid = (*tables.gids.get(index)?)?;
        let source = *tables.sources.get(index)?;
        let good = wqe.reserved0 == 0
            && wqe.reserved1 == [0; 6]
            && wqe.pkey_index == 0
            && wqe.sl <= 15
            && wqe.flow_label <= 0xf_ffff
            && wqe.remote_qpn <= MASK_24;
        let own_qkey = wqe.remote_qkey & CONTROLLED_QKEY != 0;
        good.then_some(Datagram {
            sgid,
            source,
            dgid: wqe.dgid,
            qpn: wqe.remote_qpn,
            qkey: if own_qkey { self.qkey } else { wqe.remote_qkey },
            flow_label: wqe.flow_label,
            traffic_class: wqe.traffic_class,
            hop_limit: wqe.hop_limit,
            sl: wqe.sl,
        })
    }

    /// Moves `len` bytes of the message.
    fn exchange(
        &self,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        len: u64,
        peer: &Peer<'_>,
    ) -> Answer {
        let local = Accessor::local(qp.pd);
        let sink = || Cursor::new(tables, &self.sges, local, access::LOCAL_WRITE, active.done);
        let payload = match self.operation {
            Operation::Atomic(operation) if active.kind == Kind::Atomic => {
                // It must not be done if its result has no place to go.
                if let Err(key) = check(tables, &self.sges, local, access::LOCAL_WRITE) {
                    return Answer::Local(wc_status::LOC_PROT_ERR, key.0);
                }
                Payload::Atomic(operation, sink())
            }
            Operation::Flush(wanted, range) if active.kind == Kind::Flush => {
                Payload::Flush(wanted, range)
            }
            _ if active.kind == Kind::Read => Payload::Into(sink()),
            _ => Payload::From(self.source(tables, qp, active)),
        };
        let slice = Slice {
            message: &active.message,
            offset: active.done,
            len,
            payload,
        };
        peer.deliver(tables, qp, self.dest_qp, slice)
    }

    /// Carries out a work request that is no message, as far as the budget goes. Returns whether it
    /// is done.
    fn execute(
        &mut self,
        tables: &Tables,
        qp: &Qp,
        active: &Active,
        budget: &mut Budget,
    ) -> Result<bool, (u8, u8)> {
        let keys = &tables.keys;
        match self.operation {
            Operation::Register(reg) if active.kind == Kind::Register => {
                self.register(tables, qp, &reg, budget)
            }
            Operation::Bind(bind) if active.kind == Kind::Bind => {
                let flush = bind.access & access::FLUSH_GLOBAL != 0;
                if flush && !qp.rnic.accepted(feature::FLUSH) {
                    return Err((wc_status::MW_BIND_ERR, vendor_err::BIND));
                }
                keys.bind(&bind, qp.pd, qp.number)
                    .map(|()| true)
                    .map_err(|key| (wc_status::MW_BIND_ERR, key.0))
            }
            _ => keys
                .invalidate(active.message.imm, qp.pd, qp.number)
                .map(|()| true)
                .map_err(|key| (wc_status::LOC_QP_OP_ERR, key.0)),
        }
    }

    /// The work request is done.
    fn finish(&mut self, tables: &Tables, qp: &Arc<Qp>, active: &Active) {
        self.active = None;
        self.queue.advance();
        if active.signaled {
            let opcode = completion_opcode(active.message.opcode);
            let cqe = Cqe {
                wr_id: active.wr_id,
                byte_len: if active.kind.brings() {
                    u32::try_from(active.message.length).unwrap_or(u32::MAX)
                } else {
                    0
                },
                qp_num: qp.number,
                wqe_index: active.index,
                opcode,
                ..Cqe::default()
            };
            if let Some(cq) = &qp.send_cq {
                complete(tables, cq, &cqe, false);
            }
        }
    }

    /// The work request in progress fails, and the queue pair with it.
    fn fail(&mut self, tables: &Tables, qp: &Arc<Qp>, status: u8, reason: u8) {
        self.reset_retries();
        qp.rnic.count_error(qp.worker.index);
        qp.rnic.complain(format_args!(
            "QP {}: {} ({})",
            qp.number,
            wc_status::name(status).unwrap_or("error"),
            vendor_err::name(reason).unwrap_or("?")
        ));
        self.complete_active(tables, qp, status, reason);
        qp.fail_send();
    }

    /// Completes the work request in progress in error. Such a completion does not say what it was.
    fn complete_active(&mut self, tables: &Tables, qp: &Arc<Qp>, status: u8, reason: u8) {
        self.registration = None;
        let Some(active) = self.active.take() else {
            return;
        };
        self.queue.advance();
        let cqe = Cqe {
            wr_id: active.wr_id,
            qp_num: qp.number,
            wqe_index: active.index,
            vendor_err: reason,
            status,
            ..Cqe::default()
        };
        if let Some(cq) = &qp.send_cq {
            complete(tables, cq, &cqe, true);
        }
    }

    /// Completes all work requests that are posted now as flushed.
    pub(crate) fn flush_all(&mut self, tables: &Tables, qp: &Arc<Qp>) {
        // There are no more than entries: what is posted while we flush does not keep us here.
        self.flush(tables, qp, self.queue.entries);
    }

    /// Completes up to `budget` posted work requests as flushed. Returns whether there may be more.
    pub(crate) fn flush(&mut self, tables: &Tables, qp: &Arc<Qp>, budget: u32) -> bool {
        // With us locked, it stays in this state: it may have been reset, or made ready, since the
        // caller looked.
        if !matches!(qp.state(), qp_state::ERR | qp_state::SQE) {
            return false;
        }
        self.parked = None;
        for _ in 0..budget {
            if self.active.is_none() && self.fetch(tables, qp).is_none() {
                return false;
            }
            self.complete_active(tables, qp, wc_status::WR_FLUSH_ERR, vendor_err::FLUSHED);
        }
        true
    }
}

/// The time that an RNR NAK timer code stands for, nanoseconds (InfiniBand architecture
/// specification, volume 1, table 45).
#[must_use]
pub fn rnr_nanoseconds(code: u8) -> u64 {
    /// Units of 10 microseconds.
    const TABLE: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    TABLE.get(usize::from(code)).copied().unwrap_or(65536) * 10_000
}
