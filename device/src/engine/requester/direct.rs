// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The direct way: runs of plain work requests, carried out without what only others need.
//!
//! A work request is plain if it is an RDMA WRITE or READ of one scatter/gather entry, everything about it is as it should be, and its
//! bytes lie in one piece at both ends. Whatever is not plain is left where it is, untouched, for the general way, which
//! alone knows errors, waiting and slices: so there is nothing that only this way decides.
//!
//! The locks that a message needs are taken once for a run, and whether an event is wanted is looked up once at its end.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, PHASE, SEND_DATA_OFFSET};
use virtio_rdma_spec::verbs::{access, qp_state, qp_type, send_flag, wr_opcode};

use super::Requester;
use crate::engine::operation::completion_opcode;
use crate::engine::settle;
use crate::fabric::local::Peer;
use crate::memory::copy_last;
use crate::verbs::cq::Pushed;
use crate::verbs::qp::Qp;
use crate::verbs::tables::Tables;

/// Size of an entry with one scatter/gather entry, bytes.
const ENTRY: usize = SEND_DATA_OFFSET + Sge::SIZE;

/// Others may use the completion queue again after a message longer than this, bytes.
const SHORT: u64 = 1024;

/// Flags of a plain work request.
const FLAGS: u8 = PHASE | send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED;

/// What a turn may still do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Work requests.
    pub messages: u32,
    /// Bytes.
    pub bytes: u64,
}

impl Requester {
    /// Carries out the plain work requests at the head of the queue. None may be in progress.
    pub(super) fn direct(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: &Peer<'_>,
        budget: &mut Budget,
    ) {
        if self.qp_type != qp_type::RC || !self.plain_ahead() {
            return;
        }
        let Ok(target) = peer.meet(tables, qp, self.dest_qp) else {
            return;
        };
        let before = *budget;
        let mut completions = None;
        while budget.messages > 0 && qp.state() == qp_state::RTS && target.listens() {
            let Some(words) = self.queue.entry(&self.buffer) else {
                break;
            };
            // Acquire: all else of the entry was written before its phase.
            let head = words[0].load(Ordering::Acquire).to_ne_bytes();
            if head[1] & PHASE != self.queue.phase() {
                break;
            }
            let mut bytes = [0; ENTRY];
            let (first, rest) = bytes.split_at_mut(8);
            first.copy_from_slice(&head);
            for (to, word) in rest.chunks_exact_mut(8).zip(&words[1..]) {
                to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            let (wqe, sge) = (SendWqe::get(&bytes), Sge::get(&bytes[SendWqe::SIZE..]));
            let len = u64::from(sge.length);
            if wqe.flags & !FLAGS != 0 || wqe.count != 1 || len == 0 || len > budget.bytes {
                break;
            }
            let (local, remote) = match wqe.opcode {
                wr_opcode::RDMA_WRITE => (0, access::REMOTE_WRITE),
                wr_opcode::RDMA_READ if self.max_rd_atomic != 0 => {
                    (access::LOCAL_WRITE, access::REMOTE_READ)
                }
                _ => break,
            };
            if !target.grants(remote) {
                break;
            }
            let keys = &tables.keys;
            let Some(ours) = keys.piece(sge.lkey, qp.pd, local, sge.addr, len) else {
                break;
            };
            let keys = &target.tables.keys;
            let Some(theirs) = keys.piece(wqe.rkey, target.qp.pd, remote, wqe.remote_addr, len)
            else {
                break;
            };
            if local == 0 {
                copy_last(theirs, ours.into());
            } else {
                copy_last(ours, theirs.into());
            }
            let index = self.queue.index();
            self.queue.advance();
            budget.messages -= 1;
            budget.bytes -= len;
            if !self.signal_all && wqe.flags & send_flag::SIGNALED == 0 {
                continue;
            }
            let Some(cq) = &qp.send_cq else {
                continue;
            };
            let cqe = Cqe {
                wr_id: wqe.wr_id,
                byte_len: if local == 0 { 0 } else { sge.length },
                qp_num: qp.number,
                wqe_index: index,
                opcode: completion_opcode(wqe.opcode),
                ..Cqe::default()
            };
            let batch = completions.get_or_insert_with(|| cq.batch());
            let pushed = batch.push(&cqe);
            if pushed != Pushed::Quiet || len > SHORT {
                let after = completions.take().map(|batch| batch.finish());
                for pushed in [Some(pushed), after].into_iter().flatten() {
                    settle(tables, cq, pushed);
                }
            }
        }
        if let (Some(batch), Some(cq)) = (completions, &qp.send_cq) {
            let pushed = batch.finish();
            settle(tables, cq, pushed);
        }
        let messages = before.messages - budget.messages;
        if messages != 0 {
            self.reset_retries();
            // Whatever woke us is behind us.
            qp.wake.store(false, Ordering::Relaxed);
            let bytes = before.bytes - budget.bytes;
            let (worker, messages) = (qp.worker.index, u64::from(messages));
            qp.rnic.count_sent(worker, messages, bytes);
            target.rnic.count_received(worker, messages, bytes);
        }
    }

    /// Whether the current entry may be plain.
    fn plain_ahead(&self) -> bool {
        self.queue.ready(&self.buffer).is_some_and(|[opcode, ..]| {
            matches!(opcode, wr_opcode::RDMA_WRITE | wr_opcode::RDMA_READ)
        })
    }
}
