// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Beginning a work request: its entry is read and judged.
use std::sync::Arc;

use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::facts::{Imm, Kind, Opcode};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{
    SendWqe, Sge, SrdRange, UdWqe, PHASE, SEND_DATA_OFFSET, SRD_DATA_OFFSET, SRD_RANGE_OFFSET,
    UD_DATA_OFFSET,
};
use virtio_rdma_spec::verbs::{
    access, qp_state, qp_type, send_flag, vendor_err, wc_status, MASK_24,
};

use super::cursor::check;
use super::events::raise;
use super::message::{is_multicast, Datagram, Message};
use super::operation::Operation;
use super::payload_of;
use super::queue_pair::Qp;
use super::send_queue::{Active, Polled, SendQueue};
use super::tables::Tables;
use crate::limits::{GSI_QPN, MAX_DATAGRAM, MAX_MESSAGE, MAX_SRD_MESSAGE};
use crate::verbs::keys::Accessor;
use crate::verbs::WcError;

/// All entries of send queues are at least so long.
const ENTRY: usize = UdWqe::SIZE;
const _: () = assert!(ENTRY == SEND_DATA_OFFSET + Sge::SIZE);

/// A Q_Key with this bit stands for the sender's own.
const CONTROLLED_QKEY: u32 = 1 << 31;

impl SendQueue {
    /// Whether it has a ring. Where the ring's memory is gone, the queue pair fails.
    ///
    /// # Errors
    /// What its poll led to if not.
    #[inline(always)]
    pub(crate) fn check_ring(&self, tables: &Tables, qp: &Arc<Qp>) -> Result<(), Polled> {
        if self.queue.entries == 0 {
            return Err(Polled::Idle);
        }
        if self.buffer.lost() {
            if qp.fail() {
                let reason = vendor_err::MEMORY_GONE;
                raise(tables, event_type::QP_FATAL, qp.number, reason);
            }
            return Err(Polled::Again);
        }
        Ok(())
    }

    /// Whether a queue pair may, in its state, go on with a message or begin one. While it drains
    /// it may only go on, and is drained when nothing is in progress.
    ///
    /// # Errors
    /// What its poll led to if not.
    #[inline]
    pub(crate) fn may_go_on(&mut self, tables: &Tables, qp: &Qp) -> Result<(), Polled> {
        let state = qp.state();
        if state == qp_state::SQD && !self.in_progress() {
            if !self.drained {
                self.drained = true;
                if self.drained_notify {
                    raise(tables, event_type::SQ_DRAINED, qp.number, 0);
                }
            }
            return Err(Polled::Idle);
        }
        if state != qp_state::RTS && state != qp_state::SQD {
            let flushes = matches!(state, qp_state::ERR | qp_state::SQE);
            return Err(if flushes { Polled::Again } else { Polled::Idle });
        }
        Ok(())
    }

    /// The message to go on with: the one in progress, or the next.
    pub(crate) fn next_active(&mut self, tables: &Tables, qp: &Arc<Qp>) -> Result<Active, Polled> {
        self.may_go_on(tables, qp)?;
        if let Some(active) = self.active {
            return Ok(active);
        }
        match self.fetch(tables, qp) {
            Some(Ok(active)) => Ok(active),
            Some(Err(error)) => {
                self.fail(tables, qp, error);
                Err(Polled::Again)
            }
            None => Err(Polled::Idle),
        }
    }

    /// Reads the first bytes of the next entry, if it was posted: up to its data, and of a connected
    /// queue pair its first gather entry.
    #[inline(always)]
    fn read_entry(&self) -> Option<[u8; ENTRY]> {
        let Self { queue, buffer, .. } = self;
        queue.read(buffer).or_else(|| {
            // It is not there, or its ring is not aligned.
            let head = queue.ready(buffer)?;
            let mut bytes = [0; ENTRY];
            let (first, rest) = bytes.split_at_mut(head.len());
            first.copy_from_slice(&head);
            queue.read_words(buffer, head.len(), rest);
            Some(bytes)
        })
    }

    /// Reads and checks the next work request. `None`: nothing is posted. An error leaves it in
    /// `active`, to be completed.
    pub(crate) fn fetch(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Option<Result<Active, WcError>> {
        let buffer = &self.buffer;
        let datagram = qp.facts.datagram;
        let srd = self.qp_type == qp_type::SRD;
        let bytes = self.read_entry()?;
        let wqe = SendWqe::get(&bytes);
        let flags = wqe.flags & !PHASE;
        let inline = flags & send_flag::INLINE != 0;
        let mut active = Active {
            message: Message {
                opcode: wqe.opcode,
                kind: Kind::Send,
                imm_is: Imm::None,
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
            fence: flags & send_flag::FENCE != 0,
            invalidates_sink: false,
            done: 0,
        };
        self.active = Some(active);
        self.datagram = None;
        self.fanout = None;
        let features = qp.vm.features();
        let has = |any: &[u32]| any.is_empty() || any.iter().any(|one| features.has(*one));
        let of = Opcode::of(wqe.opcode).filter(|of| of.is_for(self.qp_type) && has(of.features));
        let Some(of) = of else {
            return Some(Err(WcError::new(
                wc_status::LOC_QP_OP_ERR,
                vendor_err::OPCODE,
            )));
        };
        let kind = of.kind;
        active.message.kind = kind;
        active.message.imm_is = of.imm;
        active.invalidates_sink = of.invalidates_sink;
        let data_offset = if datagram {
            match self.address(tables, &UdWqe::from_bytes(&bytes)) {
                Some(address) => self.datagram = Some(address),
                None => {
                    return Some(Err(WcError::new(
                        wc_status::LOC_QP_OP_ERR,
                        vendor_err::FLAGS,
                    )))
                }
            }
            let gsi = self.qp_type == qp_type::GSI;
            active.message.src_qp = if gsi { GSI_QPN } else { qp.number };
            if srd {
                let range = match self.range() {
                    Ok(range) => range,
                    Err(error) => return Some(Err(error)),
                };
                active.message.remote_addr = range.remote_addr;
                active.message.rkey = range.rkey;
                SRD_DATA_OFFSET
            } else {
                UD_DATA_OFFSET
            }
        } else {
            SEND_DATA_OFFSET
        };
        let longest = if srd {
            longest_reliable_datagram(qp, kind)
        } else if datagram {
            longest_datagram(qp)
        } else {
            MAX_MESSAGE
        };
        let fence = if srd { 0 } else { send_flag::FENCE };
        let known = fence | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;
        if flags & !known != 0 || (inline && !kind.may_be_inline()) {
            return Some(Err(WcError::new(
                wc_status::LOC_QP_OP_ERR,
                vendor_err::FLAGS,
            )));
        }
        if kind.brings() && self.max_rd_atomic == 0 {
            return Some(Err(WcError::new(
                wc_status::LOC_QP_OP_ERR,
                vendor_err::RD_ATOMIC,
            )));
        }
        if kind.has_operands() {
            self.operation = match Operation::read(&self.queue, buffer, &wqe) {
                Ok(operation) => operation,
                Err(refused) => return Some(Err(refused)),
            };
        }
        if !kind.has_data() {
            self.sges.clear();
            return Some(Ok(active));
        }
        let word = kind.is_word();
        let count = usize::from(wqe.count);
        if inline {
            if count > self.max_inline {
                return Some(Err(WcError::new(
                    wc_status::LOC_LEN_ERR,
                    vendor_err::TOO_LONG_ENTRY,
                )));
            }
            self.inline.clear();
            for i in 0..count.div_ceil(8) {
                self.inline
                    .extend_from_slice(&self.queue.word(buffer, data_offset + 8 * i));
            }
            self.inline.truncate(count);
            active.message.length = count as u64;
            if active.message.length > longest || (word && count != 8) {
                return Some(Err(WcError::new(
                    wc_status::LOC_LEN_ERR,
                    vendor_err::MESSAGE_LENGTH,
                )));
            }
            return Some(Ok(active));
        }
        let invalidates = of.invalidates_sink;
        if count > self.max_sge || (invalidates && count != 1) {
            return Some(Err(WcError::new(
                wc_status::LOC_QP_OP_ERR,
                vendor_err::TOO_LONG_ENTRY,
            )));
        }
        let (_, first) = bytes.split_at(SEND_DATA_OFFSET);
        if count == 1 && !datagram {
            self.sges.clear();
            self.sges.push(Sge::get(first));
        } else {
            self.queue
                .read_sges(buffer, data_offset, count, &mut self.sges);
        }
        active.message.length = self.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if active.message.length > longest || (word && active.message.length != 8) {
            return Some(Err(WcError::new(
                wc_status::LOC_LEN_ERR,
                vendor_err::MESSAGE_LENGTH,
            )));
        }
        let wanted = if kind.brings() {
            access::LOCAL_WRITE
        } else {
            0
        };
        if let Err(key) = check(tables, &self.sges, Accessor::local(qp.pd), wanted) {
            return Some(Err(WcError::new(wc_status::LOC_PROT_ERR, key.0)));
        }
        if let (true, Some(sink)) = (invalidates, self.sges.first()) {
            if let Err(key) = tables.keys.check_invalidate_region(sink.lkey, qp.pd) {
                return Some(Err(WcError::new(wc_status::LOC_QP_OP_ERR, key.0)));
            }
        }
        Some(Ok(active))
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
            dmac: wqe.dmac,
            qpn: wqe.remote_qpn,
            qkey: if own_qkey { self.qkey } else { wqe.remote_qkey },
            flow_label: wqe.flow_label,
            traffic_class: wqe.traffic_class,
            hop_limit: wqe.hop_limit,
            sl: wqe.sl,
        })
    }

    /// The remote range of a reliable datagram, whose address was read.
    // Out of line: inlined, it changes how the rest is compiled, which datagrams need.
    #[inline(never)]
    fn range(&self) -> Result<SrdRange, WcError> {
        let mut bytes = [0; SrdRange::SIZE];
        for (at, word) in (SRD_RANGE_OFFSET..)
            .step_by(8)
            .zip(bytes.chunks_exact_mut(8))
        {
            word.copy_from_slice(&self.queue.word(&self.buffer, at));
        }
        let range = SrdRange::from_bytes(&bytes);
        let multicast = self.datagram.is_some_and(|to| is_multicast(&to.dgid));
        if range.reserved != 0 || multicast {
            return Err(WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS));
        }
        Ok(range)
    }
}

/// The longest reliable datagram of a kind.
#[inline(never)]
fn longest_reliable_datagram(qp: &Qp, kind: Kind) -> u64 {
    match kind {
        Kind::Send => payload_of(qp.vm.active_mtu()),
        _ => MAX_SRD_MESSAGE,
    }
}

/// The longest datagram, wherever it goes.
#[inline(always)]
fn longest_datagram(qp: &Qp) -> u64 {
    if !qp.leaves() {
        return MAX_DATAGRAM;
    }
    payload_of(qp.vm.active_mtu())
}
