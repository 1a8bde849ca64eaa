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

/// Size of an entry with one scatter/gather entry, bytes.
const ENTRY: usize = SEND_DATA_OFFSET + Sge::SIZE;

/// Others may use a completion queue again after a message longer than this, bytes.
const SHORT: u64 = 1024;

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
enum Head {
    /// It may be plain.
    Plain(Entry),
    /// It is not, or not for now.
    Other,
    /// It is not posted.
    None,
}

/// A work request that may be plain.
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
    /// Pushes a completion to a queue of the VM of `tables`.
    #[inline(always)]
    fn push(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>, cqe: &Cqe) {
        if !matches!(self.open, Some((_, open, _)) if Arc::ptr_eq(open, cq)) {
            self.finish();
        }
        let (batch, ..) = self.open.get_or_insert_with(|| (cq.batch(), cq, tables));
        let pushed = batch.push(cqe);
        if pushed != Pushed::Quiet {
            self.finish();
            settle(tables, cq, pushed);
        }
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
    /// Carries out the plain work requests at the head of the queue. None may be in progress.
    #[inline(never)]
    pub(super) fn direct(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: &Peer<'_>,
        budget: &mut Budget,
    ) -> Rest {
        if qp.state() != qp_state::RTS {
            return Rest::Something;
        }
        let mut entry = match self.head(qp, budget.bytes) {
            Head::Plain(entry) => entry,
            Head::Other => return Rest::Something,
            Head::None => return Rest::Nothing,
        };
        let Ok(mut target) = peer.meet(tables, qp, self.dest_qp) else {
            return Rest::Something;
        };
        let mut rest = Rest::Something;
        let before = *budget;
        let mut own = Own {
            tables,
            qp,
            memo: Memo::default(),
        };
        let mut completions = Completions::default();
        while budget.messages > 0 && qp.state() == qp_state::RTS && target.takes_plain() {
            let len = entry.len();
            let moved = match entry.wqe.opcode {
                wr_opcode::SEND | wr_opcode::SEND_WITH_IMM => {
                    own.send(&mut target, &entry, &mut completions)
                }
                _ => own.access_remote(&mut target, &entry),
            };
            if moved.is_none() {
                break;
            }
            let index = self.queue.index();
            self.queue.advance();
            budget.messages -= 1;
            budget.bytes -= len;
            if self.signal_all || entry.wqe.flags & send_flag::SIGNALED != 0 {
                if let Some(cq) = &qp.send_cq {
                    let cqe = Cqe {
                        wr_id: entry.wqe.wr_id,
                        byte_len: if entry.is_read() { len as u32 } else { 0 },
                        qp_num: qp.number,
                        wqe_index: index,
                        opcode: completion_opcode(entry.wqe.opcode),
                        ..Cqe::default()
                    };
                    completions.push(tables, cq, &cqe);
                }
            }
            if len > SHORT {
                completions.finish();
            }
            entry = match self.head(qp, budget.bytes) {
                Head::Plain(entry) => entry,
                Head::Other => break,
                Head::None => {
                    rest = Rest::Nothing;
                    break;
                }
            };
        }
        completions.finish();
        let messages = before.messages - budget.messages;
        if messages != 0 {
            self.reset_retries();
            qp.next_send.set(self.queue.head(&self.buffer));
            // Whatever woke us is behind us.
            qp.wake.store(false, Ordering::Relaxed);
            let bytes = before.bytes - budget.bytes;
            let (worker, messages) = (qp.worker.index, u64::from(messages));
            qp.rnic.count_sent(worker, messages, bytes);
            target.rnic.count_received(worker, messages, bytes);
        }
        rest
    }

    /// A copy of the current entry, if it may be plain, of at most `max` bytes.
    #[inline(always)]
    fn head(&self, qp: &Qp, max: u64) -> Head {
        // All of an entry of a send queue is at hand: no stride is less.
        const { assert!(ENTRY <= MIN_SEND_STRIDE as usize) };
        let Some(bytes) = self.queue.entry::<ENTRY>(&self.buffer) else {
            return Head::None;
        };
        let Some((head, Some(data))) = bytes
            .split_first_chunk::<{ SendWqe::SIZE }>()
            .map(|(head, data)| (head, data.first_chunk()))
        else {
            return Head::Other;
        };
        let entry = Entry {
            wqe: SendWqe::from_bytes(head),
            data: *data,
        };
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
            Head::Plain(entry)
        } else {
            Head::Other
        }
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
    qp: &'a Qp,
    memo: Memo<'a>,
}

impl<'a> Own<'a> {
    /// The memory of a work request that is not inline.
    #[inline(always)]
    fn piece(&mut self, entry: &Entry, access: u32) -> Option<Span<'a>> {
        let (keys, pd, sge) = (&self.tables.keys, self.qp.pd, entry.sge());
        let len = u64::from(sge.length);
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
        completions.push(target.tables, cq, &cqe);
        Some(())
    }
}
