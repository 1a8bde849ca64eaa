// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The direct way: runs of plain work requests, carried out without what only others need.
//!
//! A work request is plain if it is a WRITE, a READ or a SEND of one scatter/gather entry or as much inline data, everything about it is as it should be, and its bytes lie in one piece at both ends. Whatever is not plain
//! is left where it is, untouched, for the general way, which alone knows errors, waiting and slices: so there is nothing that
//! only this way decides.
//!
//! The locks that a message needs are taken once for a run, and whether an event is wanted is looked up once at its end.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, MIN_SEND_STRIDE, PHASE, SEND_DATA_OFFSET};
use virtio_rdma_spec::verbs::{
    access, qp_state, qp_type, send_flag, wc_flag, wc_opcode, wr_opcode,
};

use super::Requester;
use crate::engine::operation::completion_opcode;
use crate::engine::settle;
use crate::fabric::local::{Peer, Target};
use crate::memory::{copy_last, Source, Span};
use crate::verbs::cq::{Batch, Cq, Pushed};
use crate::verbs::keys::Memo;
use crate::verbs::qp::Qp;
use crate::verbs::tables::Tables;
use crate::worker::{Came, Linger};

/// Size of an entry with one scatter/gather entry, bytes.
const ENTRY: usize = SEND_DATA_OFFSET + Sge::SIZE;

/// Others may use a completion queue again after a message longer than this, bytes.
const SHORT: u64 = 1024;

/// Most messages at a time of who sends but few.
const SPARSE: u32 = 4;

/// Flags of a plain work request.
const FLAGS: u8 =
    PHASE | send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;

/// What a turn may still do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Work requests.
    pub messages: u32,
    /// Bytes.
    pub bytes: u64,
}

/// What the direct way leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// No work request is posted.
    Nothing,
    /// There may be more to do.
    Something,
}

/// The entry at the head of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Head {
    /// It may be plain: here is a copy.
    Plain,
    /// It is not, or not for now.
    Other,
    /// It is not posted.
    None,
}

/// A work request that may be plain.
#[derive(Default)]
struct Entry {
    wqe: SendWqe,
    /// Its scatter/gather entry, or inline data.
    data: [u8; Sge::SIZE],
}

impl Entry {
    #[inline(always)]
    fn inline(&self) -> bool {
        self.wqe.flags & send_flag::INLINE != 0
    }

    #[inline(always)]
    fn sge(&self) -> Sge {
        Sge::from_bytes(&self.data)
    }

    /// Length of the message, bytes.
    #[inline(always)]
    fn len(&self) -> u64 {
        if self.inline() {
            self.wqe.count.into()
        } else {
            self.sge().length.into()
        }
    }

    #[inline(always)]
    fn is_read(&self) -> bool {
        self.wqe.opcode == wr_opcode::RDMA_READ
    }
}

/// The completion queue that is locked, if one is. Never two: others may lock the same two the other way round.
#[derive(Default)]
struct Completions<'a> {
    open: Option<(Batch<'a>, &'a Arc<Cq>, &'a Tables)>,
}

impl<'a> Completions<'a> {
    /// Pushes a completion to a queue of the VM of `tables`. Returns false if more than that has come of it.
    #[inline(always)]
    #[must_use]
    fn push(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>, cqe: &Cqe) -> bool {
        if !matches!(self.open, Some((_, open, _)) if Arc::ptr_eq(open, cq)) {
            self.finish();
        }
        let (batch, ..) = self.open.get_or_insert_with(|| (cq.batch(), cq, tables));
        let pushed = batch.push(cqe);
        if pushed != Pushed::Quiet {
            self.finish();
            settle(tables, cq, pushed);
        }
        pushed == Pushed::Quiet
    }

    /// Unlocks, and raises the event that is wanted.
    #[inline(always)]
    fn finish(&mut self) {
        if let Some((batch, cq, tables)) = self.open.take() {
            let pushed = batch.finish();
            settle(tables, cq, pushed);
        }
    }
}

impl Requester {
    /// Carries out the plain work requests at the head of the queue. None may be in progress. When there is no more, it stays for as
    /// long as `linger` says.
    #[inline(never)]
    pub(super) fn direct(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: &Peer<'_>,
        budget: &mut Budget,
        linger: &mut Linger<'_>,
    ) -> Rest {
        if qp.state() != qp_state::RTS {
            return Rest::Something;
        }
        if !self.posted() {
            return Rest::Nothing;
        }
        let Some(mut flow) = Flow::new(self, tables, qp, peer, *budget) else {
            return Rest::Something;
        };
        let mut head = flow.run();
        if head == Head::None && linger.may() {
            head = flow.linger(linger);
        }
        *budget = flow.budget;
        match head {
            Head::None => Rest::Nothing,
            Head::Plain | Head::Other => Rest::Something,
        }
    }

    /// Whether there is a work request.
    #[inline(always)]
    fn posted(&self) -> bool {
        self.queue.ready(&self.buffer).is_some()
    }

    /// Copies the current entry to `entry`, and tells whether it may be plain, of at most `max` bytes.
    #[inline(always)]
    fn head(&self, qp: &Qp, max: u64, entry: &mut Entry) -> Head {
        // All of an entry of a send queue is at hand: no stride is less.
        const { assert!(ENTRY <= MIN_SEND_STRIDE as usize) };
        let mut bytes = [0; ENTRY];
        if !self.queue.read(&self.buffer, &mut bytes) {
            return Head::None;
        }
        entry.wqe = SendWqe::get(&bytes);
        entry.data.copy_from_slice(&bytes[SEND_DATA_OFFSET..]);
        let wqe = &entry.wqe;
        let one = if entry.inline() {
            let count = usize::from(wqe.count);
            count <= self.max_inline.min(Sge::SIZE) && !entry.is_read()
        } else {
            wqe.count == 1 && self.max_sge != 0
        };
        let len = entry.len();
        let good = is_plain(wqe.opcode)
            && wqe.flags & !FLAGS == 0
            && one
            && len != 0
            && len <= max
            && (!entry.is_read() || self.max_rd_atomic != 0)
            && qp.send_cq.is_some();
        if good && self.qp_type == qp_type::RC {
            Head::Plain
        } else {
            Head::Other
        }
    }
}

/// A queue pair whose plain work requests are carried out, with all that they need.
struct Flow<'a> {
    requester: &'a mut Requester,
    own: Own<'a>,
    target: Target<'a>,
    /// What may still be done, and what might be at first.
    budget: Budget,
    whole: Budget,
}

impl<'a> Flow<'a> {
    /// None if there is no peer to send to, for now or for ever.
    #[inline(always)]
    fn new(
        requester: &'a mut Requester,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        peer: &Peer<'a>,
        budget: Budget,
    ) -> Option<Self> {
        let target = peer.meet(tables, qp, requester.dest_qp).ok()?;
        Some(Self {
            requester,
            own: Own {
                tables,
                qp,
                memo: Memo::default(),
            },
            target,
            budget,
            whole: budget,
        })
    }

    /// Carries out work requests until there is no more, one is not plain, or the budget is spent. Returns what is at the head then.
    #[inline(always)]
    fn run(&mut self) -> Head {
        let Self {
            requester,
            own,
            target,
            budget,
            ..
        } = self;
        let (tables, qp) = (own.tables, own.qp);
        let before = *budget;
        let mut completions = Completions::default();
        let mut entry = Entry::default();
        let mut head = requester.head(qp, budget.bytes, &mut entry);
        // What others do to the two takes effect between two runs.
        let mut ready = qp.state() == qp_state::RTS && target.takes_plain();
        while head == Head::Plain && budget.messages > 0 && ready {
            let len = entry.len();
            let wqe = &entry.wqe;
            let moved = match wqe.opcode {
                wr_opcode::SEND | wr_opcode::SEND_WITH_IMM => {
                    own.send(target, &entry, &mut completions, &mut ready)
                }
                _ => own.access_remote(target, &entry),
            };
            if moved.is_none() {
                break;
            }
            let index = requester.queue.index();
            requester.queue.advance();
            budget.messages -= 1;
            budget.bytes -= len;
            if requester.signal_all || wqe.flags & send_flag::SIGNALED != 0 {
                if let Some(cq) = &qp.send_cq {
                    let cqe = Cqe {
                        wr_id: wqe.wr_id,
                        byte_len: if entry.is_read() { len as u32 } else { 0 },
                        qp_num: qp.number,
                        wqe_index: index,
                        opcode: completion_opcode(wqe.opcode),
                        ..Cqe::default()
                    };
                    ready &= completions.push(tables, cq, &cqe);
                }
            }
            if len > SHORT {
                completions.finish();
            }
            head = requester.head(qp, budget.bytes, &mut entry);
        }
        completions.finish();
        let messages = before.messages - budget.messages;
        if messages != 0 {
            requester.reset_retries();
            qp.next_send.set(requester.queue.head(&requester.buffer));
            // Whatever woke us is behind us.
            qp.wake.store(false, Ordering::Relaxed);
            let bytes = before.bytes - budget.bytes;
            let (worker, messages) = (qp.worker.index, u64::from(messages));
            qp.rnic.count_sent(worker, messages, bytes);
            target.rnic.count_received(worker, messages, bytes);
        }
        head
    }

    /// Whether so few messages were sent that the next is to be found as soon as it is written. Who writes many at a time is not to be
    /// disturbed meanwhile.
    #[inline(always)]
    fn is_sparse(&self) -> bool {
        self.whole.messages - self.budget.messages <= SPARSE
    }

    /// The same again, after a wait.
    #[inline(always)]
    fn go_on(&mut self, linger: &mut Linger<'_>) -> Head {
        // Nobody else waits.
        self.budget = self.whole;
        let head = self.run();
        linger.spend(self.whole.bytes - self.budget.bytes);
        head
    }

    /// Waits for work requests of this queue pair, and for those by which the peer answers, and carries them out, as long as nobody else
    /// has any. Returns what is at the head of this queue then.
    #[inline(never)]
    fn linger(&mut self, linger: &mut Linger<'_>) -> Head {
        let (qp, peer) = (self.own.qp, self.target.qp);
        let tables = self.target.tables;
        let Some(bell) = linger.bell(self.own.tables, qp) else {
            return Head::None;
        };
        // It is for us to serve the peer if its worker is ours, and here if it is about to send its next message.
        let mut theirs = (peer.worker.index == qp.worker.index && peer.state() == qp_state::RTS)
            .then(|| peer.try_requester())
            .flatten()
            .filter(|theirs| theirs.is_idle() && !peer.cq_errored());
        let mut route = theirs.as_mut().and_then(|theirs| theirs.route.take());
        let mut answer = None;
        if let (Some(theirs), Some(route)) = (&mut theirs, &mut route) {
            route.refresh(&peer.rnic, theirs.dest_gid);
            answer = linger.bell(tables, peer).and_then(|bell| {
                let way = route.peer(linger.visit);
                Some((Flow::new(theirs, tables, peer, &way, self.whole)?, bell))
            });
        }
        let mut head = Head::None;
        while head == Head::None {
            let own = || self.requester.posted().then_some(Came::Own);
            let came = match &answer {
                None => linger.wait([&bell], self.is_sparse(), own),
                Some((answer, theirs)) => {
                    let eager = self.is_sparse() && answer.is_sparse();
                    linger.wait([&bell, theirs], eager, || {
                        let answered = || answer.requester.posted().then_some(Came::Answer);
                        own().or_else(answered)
                    })
                }
            };
            match (came, &mut answer) {
                (Some(Came::Own), _) => head = self.go_on(linger),
                (Some(Came::Answer), Some((answer, _))) => {
                    if answer.go_on(linger) != Head::None {
                        break;
                    }
                }
                _ => break,
            }
        }
        // Rings were taken of what may not have been looked at since.
        if head == Head::None && self.requester.posted() {
            head = Head::Other;
        }
        if answer.is_some_and(|(answer, _)| answer.requester.posted()) {
            linger.next = Some(peer.clone());
        }
        if let Some(theirs) = &mut theirs {
            theirs.route = route;
        }
        head
    }
}

#[inline(always)]
fn is_plain(opcode: u8) -> bool {
    matches!(
        opcode,
        wr_opcode::RDMA_WRITE | wr_opcode::RDMA_READ | wr_opcode::SEND | wr_opcode::SEND_WITH_IMM
    )
}

/// The requester's side of a message.
struct Own<'a> {
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    memo: Memo<'a>,
}

impl<'a> Own<'a> {
    /// The memory of a work request that is not inline.
    #[inline(always)]
    fn piece(&mut self, entry: &Entry, access: u32) -> Option<Span<'a>> {
        let (keys, pd, sge) = (&self.tables.keys, self.qp.pd, entry.sge());
        let len = u64::from(sge.length);
        if let Some(piece) = self.memo.recall(sge.lkey, access, sge.addr, len) {
            return Some(piece);
        }
        keys.piece(&mut self.memo, sge.lkey, pd, access, sge.addr, len)
    }

    /// What a WRITE or SEND takes its bytes from.
    #[inline(always)]
    fn source<'b>(&mut self, entry: &'b Entry) -> Option<Source<'b>>
    where
        'a: 'b,
    {
        if entry.inline() {
            let bytes = entry.data.get(..usize::from(entry.wqe.count))?;
            return Some(bytes.into());
        }
        Some(self.piece(entry, 0)?.into())
    }

    /// A WRITE or READ, if it is plain.
    #[inline(always)]
    fn access_remote(&mut self, target: &mut Target<'_>, entry: &Entry) -> Option<()> {
        let wqe = &entry.wqe;
        let (key, addr, len) = (wqe.rkey, wqe.remote_addr, entry.len());
        if entry.is_read() {
            let ours = self.piece(entry, access::LOCAL_WRITE)?;
            let theirs = target.piece(access::REMOTE_READ, key, addr, len)?;
            copy_last(ours, theirs.into());
        } else {
            let source = self.source(entry)?;
            source.prefetch();
            let theirs = target.piece(access::REMOTE_WRITE, key, addr, len)?;
            copy_last(theirs, source);
        }
        Some(())
    }

    /// A SEND, if it is plain, and so is the receive that it meets.
    #[inline(always)]
    fn send<'b>(
        &mut self,
        target: &mut Target<'b>,
        entry: &Entry,
        completions: &mut Completions<'b>,
        ready: &mut bool,
    ) -> Option<()> {
        // Events for solicited completions are not those of others.
        if entry.wqe.flags & send_flag::SOLICITED != 0 {
            return None;
        }
        let source = self.source(entry)?;
        let (receive, cq) = target.take_plain(entry.len())?;
        copy_last(receive.span, source);
        let with_imm = entry.wqe.opcode == wr_opcode::SEND_WITH_IMM;
        let cqe = Cqe {
            wr_id: receive.wr_id,
            byte_len: entry.len() as u32,
            imm: if with_imm { entry.wqe.imm } else { 0 },
            qp_num: target.qp.number,
            src_qp: self.qp.number,
            wqe_index: receive.index,
            opcode: wc_opcode::RECV,
            wc_flags: if with_imm { wc_flag::WITH_IMM } else { 0 },
            ..Cqe::default()
        };
        *ready &= completions.push(target.tables, cq, &cqe);
        Some(())
    }
}
