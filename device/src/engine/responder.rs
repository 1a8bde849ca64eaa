// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The responder: checks and places what a peer sends, consumes receive work requests, completes them
//! (specification: "Responder").
//!
//! It never trusts that the peer's message is one: every slice is checked again, because keys and states may have changed
//! between two of them.
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, Weak};

use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::ring::{Cqe, RecvWqe, Sge, PHASE, RECV_DATA_OFFSET};
use virtio_rdma_spec::verbs::{
    access, qp_state, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode,
};

use super::cursor::{check, transfer, Cursor, Fault, From};
use super::message::{Answer, Message};
use super::queue::WorkQueue;
use super::{complete, raise};
use crate::memory::Pages;
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Gid, Tables};

/// Offset of `QpRecord::rq_waited`.
const RQ_WAITED: u64 = 0;

/// A receive work request that a message under way has consumed.
#[derive(Debug, Clone, Copy)]
struct Inbound {
    wr_id: u64,
    index: u16,
}

/// The responder's half of a queue pair.
#[derive(Debug)]
pub struct Responder {
    /// The queue pair's buffer.
    pub(crate) buffer: Arc<Pages>,
    queue: WorkQueue,
    max_sge: usize,
    /// Scatter list of the receive work request in use; its capacity was reserved at creation.
    sges: Vec<Sge>,
    inbound: Option<Inbound>,
    /// The sender that waits for a receive work request.
    waiter: Option<Weak<Qp>>,
    communication_established: bool,
    access: u32,
    rnr_timer: u8,
    max_rd_atomic: u8,
    remote_qp: u32,
    remote_gid: Gid,
}

impl Responder {
    /// A responder with a receive queue for up to `max_sge` scatter/gather entries per work request.
    #[must_use]
    pub fn new(buffer: Arc<Pages>, queue: WorkQueue, max_sge: usize) -> Self {
        let responder = Self {
            buffer,
            queue,
            max_sge,
            sges: Vec::with_capacity(max_sge),
            inbound: None,
            waiter: None,
            communication_established: false,
            access: 0,
            rnr_timer: 0,
            max_rd_atomic: 0,
            remote_qp: 0,
            remote_gid: Gid::default(),
        };
        responder.set_waited(false);
        responder
    }

    /// Takes over attributes.
    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        self.access = attr.access_flags;
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
            sender.wake.store(true, Ordering::SeqCst);
            sender.worker.schedule(&sender);
        }
    }

    /// The first 8 bytes of the next receive work request. If there is none, posting one will ring from now on.
    fn next_receive(&self, qp: &Qp) -> Option<[u8; 8]> {
        let buffer = &self.buffer;
        if let Some(head) = self.queue.ready(buffer) {
            return Some(head);
        }
        // The poster stores the entry, then, past a full fence, loads `rq_waited`; we store `rq_waited`, then, past a full
        // fence, look for the entry again. One of the two sees the other.
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

    /// Completes up to `budget` posted receive work requests as flushed. Returns whether there may be more.
    pub(crate) fn flush(&mut self, tables: &Tables, qp: &Arc<Qp>, budget: u32) -> bool {
        // As in the requester: it may have been reset since the caller looked.
        if qp.state() != qp_state::ERR {
            return false;
        }
        self.inbound = None;
        for _ in 0..budget {
            if self.next_receive(qp).is_none() {
                // `rq_waited` stays: what is posted from now on rings and is flushed as well.
                return false;
            }
            let wr_id = u64::from_le_bytes(self.queue.word(&self.buffer, 8));
            let index = self.queue.index();
            self.queue.advance();
            self.complete(
                tables,
                qp,
                Inbound { wr_id, index },
                wc_status::WR_FLUSH_ERR,
                vendor_err::FLUSHED,
            );
        }
        true
    }

    /// Whether this responder belongs to requester `qp` at one of `gids`.
    pub(crate) fn connected_to(&self, qp: u32, gids: &[Option<Gid>]) -> bool {
        self.remote_qp == qp && gids.contains(&Some(self.remote_gid))
    }

    /// Takes a slice of a message: `len` bytes at `offset`, from `source` (or, for RDMA READ, into `sink`).
    /// `sender` is the requester, for a wake-up.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn receive(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        sender: &Arc<Qp>,
        message: &Message,
        offset: u64,
        len: u64,
        payload: Payload<'_>,
    ) -> Answer {
        let first = offset == 0;
        let last = offset + len >= message.length;
        if first && !self.communication_established && qp.state() == qp_state::RTR {
            self.communication_established = true;
            raise(tables, event_type::COMM_EST, qp.number, 0);
        }
        match (message.opcode, payload) {
            (wr_opcode::SEND | wr_opcode::SEND_WITH_IMM, Payload::From(mut source)) => {
                if let Err(answer) = self.take_receive(tables, qp, sender, first, message) {
                    return answer;
                }
                let mut to = Cursor::new(tables, &self.sges, qp.pd, access::LOCAL_WRITE, offset);
                match transfer(&mut to, &mut source, len, last) {
                    Ok(()) if last => self.delivered(tables, qp, message, wc_opcode::RECV),
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => Answer::Local(wc_status::LOC_PROT_ERR, key.0),
                    Err(Fault::Destination(key)) => self.bad_receive(
                        tables,
                        qp,
                        wc_status::LOC_PROT_ERR,
                        key.0,
                        wc_status::REM_OP_ERR,
                    ),
                }
            }
            (wr_opcode::RDMA_WRITE | wr_opcode::RDMA_WRITE_WITH_IMM, Payload::From(mut source)) => {
                let remote = [remote_sge(message)];
                if let Err(answer) = self.check_remote(tables, qp, access::REMOTE_WRITE, &remote) {
                    return answer;
                }
                let with_imm = message.opcode == wr_opcode::RDMA_WRITE_WITH_IMM;
                if with_imm {
                    if let Err(answer) = self.take_receive(tables, qp, sender, first, message) {
                        return answer;
                    }
                }
                let mut to = Cursor::new(tables, &remote, qp.pd, access::REMOTE_WRITE, offset);
                match transfer(&mut to, &mut source, len, last) {
                    Ok(()) if last && with_imm => {
                        self.delivered(tables, qp, message, wc_opcode::RECV_RDMA_WITH_IMM)
                    }
                    Ok(()) if last => Answer::Done,
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => Answer::Local(wc_status::LOC_PROT_ERR, key.0),
                    Err(Fault::Destination(key)) => self.violation(tables, qp, key.0),
                }
            }
            (wr_opcode::RDMA_READ, Payload::Into(mut sink)) => {
                if self.max_rd_atomic == 0 {
                    return self.invalid_request(tables, qp, vendor_err::RD_ATOMIC);
                }
                let remote = [remote_sge(message)];
                if let Err(answer) = self.check_remote(tables, qp, access::REMOTE_READ, &remote) {
                    return answer;
                }
                let mut source = From::Guest(Cursor::new(
                    tables,
                    &remote,
                    qp.pd,
                    access::REMOTE_READ,
                    offset,
                ));
                match transfer(&mut sink, &mut source, len, last) {
                    Ok(()) if last => Answer::Done,
                    Ok(()) => Answer::Progress,
                    Err(Fault::Source(key)) => self.violation(tables, qp, key.0),
                    Err(Fault::Destination(key)) => Answer::Local(wc_status::LOC_PROT_ERR, key.0),
                }
            }
            _ => self.invalid_request(tables, qp, vendor_err::OPCODE),
        }
    }

    /// The peer may access `remote` as `wanted` says: by the queue pair's flags and by the key.
    fn check_remote(
        &self,
        tables: &Tables,
        qp: &Arc<Qp>,
        wanted: u32,
        remote: &[Sge],
    ) -> Result<(), Answer> {
        if self.access & wanted != wanted {
            return Err(self.violation(tables, qp, vendor_err::QP_ACCESS));
        }
        check(tables, remote, qp.pd, wanted).map_err(|key| self.violation(tables, qp, key.0))
    }

    /// Makes sure that a receive work request is in use for this message.
    fn take_receive(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        sender: &Arc<Qp>,
        first: bool,
        message: &Message,
    ) -> Result<(), Answer> {
        if self.inbound.is_some() && !first {
            return Ok(());
        }
        let Some(head) = self.next_receive(qp) else {
            if self.buffer.lost() {
                return Err(self.ring_gone(tables, qp));
            }
            self.waiter = Some(Arc::downgrade(sender));
            return Err(Answer::NotReady(self.rnr_timer));
        };
        let mut bytes = [0; RecvWqe::SIZE];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&head);
        high.copy_from_slice(&self.queue.word(&self.buffer, 8));
        let wqe = RecvWqe::from_bytes(&bytes);
        self.inbound = Some(Inbound {
            wr_id: wqe.wr_id,
            index: self.queue.index(),
        });
        let count = usize::from(wqe.count);
        if count > self.max_sge
            || wqe.flags & !PHASE != 0
            || wqe.reserved0 != 0
            || wqe.reserved1 != 0
        {
            let (status, reason) = (wc_status::LOC_QP_OP_ERR, vendor_err::BAD_RECEIVE);
            return Err(self.bad_receive(tables, qp, status, reason, wc_status::REM_OP_ERR));
        }
        self.queue
            .read_sges(&self.buffer, RECV_DATA_OFFSET, count, &mut self.sges);
        if message.opcode == wr_opcode::RDMA_WRITE_WITH_IMM {
            return Ok(());
        }
        let room: u64 = self.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if room < message.length {
            let (status, reason) = (wc_status::LOC_LEN_ERR, vendor_err::RECV_TOO_SHORT);
            return Err(self.bad_receive(tables, qp, status, reason, wc_status::REM_INV_REQ_ERR));
        }
        if let Err(key) = check(tables, &self.sges, qp.pd, access::LOCAL_WRITE) {
            return Err(self.bad_receive(
                tables,
                qp,
                wc_status::LOC_PROT_ERR,
                key.0,
                wc_status::REM_OP_ERR,
            ));
        }
        Ok(())
    }

    /// The message is complete: its receive work request too.
    fn delivered(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        message: &Message,
        opcode: u8,
    ) -> Answer {
        let Some(inbound) = self.inbound.take() else {
            return Answer::Done;
        };
        self.queue.advance();
        let with_imm = matches!(
            message.opcode,
            wr_opcode::SEND_WITH_IMM | wr_opcode::RDMA_WRITE_WITH_IMM
        );
        let cqe = Cqe {
            wr_id: inbound.wr_id,
            byte_len: u32::try_from(message.length).unwrap_or(u32::MAX),
            imm: if with_imm { message.imm } else { 0 },
            qp_num: qp.number,
            src_qp: message.src_qp,
            wqe_index: inbound.index,
            opcode,
            wc_flags: if with_imm { wc_flag::WITH_IMM } else { 0 },
            ..Cqe::default()
        };
        complete(tables, &qp.recv_cq, &cqe, message.solicited);
        Answer::Done
    }

    /// Completes a receive work request in error.
    fn complete(&self, tables: &Tables, qp: &Arc<Qp>, inbound: Inbound, status: u8, reason: u8) {
        let cqe = Cqe {
            wr_id: inbound.wr_id,
            qp_num: qp.number,
            wqe_index: inbound.index,
            vendor_err: reason,
            status,
            opcode: wc_opcode::RECV,
            ..Cqe::default()
        };
        complete(tables, &qp.recv_cq, &cqe, true);
    }

    /// Our receive work request is bad: it completes with `status`, the peer's with `remote`, and we are in error.
    fn bad_receive(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        status: u8,
        reason: u8,
        remote: u8,
    ) -> Answer {
        if let Some(inbound) = self.inbound.take() {
            self.queue.advance();
            self.complete(tables, qp, inbound, status, reason);
        }
        qp.fail();
        Answer::Refused(remote, reason)
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
        Answer::Refused(wc_status::REM_OP_ERR, vendor_err::MEMORY_GONE)
    }

    /// The peer's key does not give access.
    fn violation(&self, tables: &Tables, qp: &Arc<Qp>, reason: u8) -> Answer {
        if qp.fail() {
            raise(tables, event_type::QP_ACCESS_ERR, qp.number, reason);
        }
        Answer::Refused(wc_status::REM_ACCESS_ERR, reason)
    }

    /// The peer asks for what this queue pair does not do.
    fn invalid_request(&self, tables: &Tables, qp: &Arc<Qp>, reason: u8) -> Answer {
        if qp.fail() {
            raise(tables, event_type::QP_REQ_ERR, qp.number, reason);
        }
        Answer::Refused(wc_status::REM_INV_REQ_ERR, reason)
    }
}

/// Where a slice's payload comes from, or goes to.
#[derive(Debug)]
pub enum Payload<'a> {
    /// The requester's data.
    From(From<'a>),
    /// The requester's buffers, for what it reads.
    Into(Cursor<'a>),
}

/// The remote range of a message as a scatter/gather entry.
fn remote_sge(message: &Message) -> Sge {
    Sge {
        addr: message.remote_addr,
        length: u32::try_from(message.length).unwrap_or(u32::MAX),
        lkey: message.rkey,
    }
}
