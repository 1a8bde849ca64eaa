// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues of a [`Guest`]: what its driver keeps of them, and entries that are written as bytes.
use std::sync::atomic::Ordering;

use virtio_rdma_spec::command::{
    opcode, AddressVector, CreateContext, CreateCq, CreateQp, CreateQpResponse, CreateSrq,
    CreateSrqResponse, HandleResponse, ModifyQp, QpAttr, RegMr, RegMrResponse,
};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, PHASE};
use virtio_rdma_spec::verbs::{access, qp_attr, qp_state, qp_type};

use crate::host::{Guest, PAGE};

/// Entries of each work queue.
pub const ENTRIES: u32 = 16;
/// Bytes of an entry of a send queue: five scatter/gather entries, four of datagrams.
pub const SEND_STRIDE: u32 = 128;
/// Bytes of an entry of a receive queue.
pub const RECV_STRIDE: u32 = 64;
/// Scatter/gather entries of a receive work request.
pub const RECV_SGE: u16 = 3;
/// Entries of a completion queue.
pub const CQ_ENTRIES: u32 = 64;
/// Q_Key of datagrams.
pub const QKEY: u32 = 0x1111;

/// A context, and the first page of its doorbell memory.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Handle.
    pub handle: u32,
    /// First page.
    pub page: usize,
}

/// A ring of work requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ring {
    offset: usize,
    stride: usize,
    posted: u32,
}

impl Ring {
    /// The page that it is in.
    #[must_use]
    pub fn page(&self) -> usize {
        self.offset / PAGE
    }

    /// Begins anew, as after the change to RESET.
    pub fn reset(&mut self, guest: &Guest) {
        guest
            .view
            .write(self.offset, &vec![0; ENTRIES as usize * self.stride]);
        self.posted = 0;
    }

    /// Writes an entry, as long as one may be, with the phase that it has to have.
    pub fn post(&mut self, guest: &Guest, entry: &[u8]) {
        let mut bytes = vec![0; self.stride];
        let length = entry.len().min(self.stride);
        bytes[..length].copy_from_slice(&entry[..length]);
        bytes[1] &= !PHASE;
        if self.posted / ENTRIES % 2 == 0 {
            bytes[1] |= PHASE;
        }
        let at = self.offset + (self.posted % ENTRIES) as usize * self.stride;
        guest.view.write(at, &bytes);
        self.posted = self.posted.wrapping_add(1);
    }
}

/// A completion queue.
#[derive(Debug, Clone, Copy)]
pub struct Cq {
    /// Number.
    pub number: u32,
    /// The page that it is in.
    pub page: usize,
    taken: u32,
}

impl Cq {
    const RING: usize = 128;

    /// Takes the next completion.
    pub fn take(&mut self, guest: &Guest) -> Option<Cqe> {
        let index = (self.taken % CQ_ENTRIES) as usize;
        let at = self.page * PAGE + Self::RING + index * Cqe::SIZE;
        let cqe = Cqe::get(&guest.view.get(at, Cqe::SIZE));
        let phase = u8::from(self.taken / CQ_ENTRIES % 2 == 0);
        if cqe.phase != phase {
            return None;
        }
        self.taken = self.taken.wrapping_add(1);
        let consumer = guest.view.u32(self.page * PAGE);
        consumer.store(self.taken.to_le(), Ordering::SeqCst);
        Some(cqe)
    }
}

/// A queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Qp {
    /// Number.
    pub number: u32,
    /// `verbs::qp_type`.
    pub qp_type: u8,
    /// Its send queue.
    pub sq: Ring,
    /// Its receive queue.
    pub rq: Ring,
    slot: u32,
    doorbell: usize,
}

/// A shared receive queue.
#[derive(Debug, Clone, Copy)]
pub struct Srq {
    /// Number.
    pub number: u32,
    /// Its ring.
    pub rq: Ring,
    slot: u32,
    doorbell: usize,
}

/// A region.
#[derive(Debug, Clone, Copy)]
pub struct Mr {
    /// Its key.
    pub key: u32,
    /// First page of its memory.
    pub page: usize,
    /// Address for work requests.
    pub iova: u64,
    /// Length, bytes.
    pub length: u64,
}

/// What a queue pair refers to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Refs {
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of both of its queues.
    pub cq: u32,
    /// Shared receive queue, or zero.
    pub srq: u32,
    /// XRC domain, or zero.
    pub xrcd: u32,
}

/// All remote access.
pub const REMOTE: u32 =
    access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC | access::FLUSH_GLOBAL;

impl Guest {
    /// Creates a context.
    ///
    /// # Errors
    /// The status.
    pub fn context(&mut self) -> Result<Context, u16> {
        let page = self.take_pages(Self::DOORBELL_PAGES);
        let body = CreateContext {
            doorbell: self.list(page, Self::DOORBELL_PAGES),
            reserved: 0,
        };
        let made: HandleResponse = self.ask(opcode::CREATE_CONTEXT, &body)?;
        Ok(Context {
            handle: made.handle,
            page,
        })
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// The status.
    pub fn cq(&mut self) -> Result<Cq, u16> {
        let page = self.take_pages(1);
        let body = CreateCq {
            entries: CQ_ENTRIES,
            stride: Cqe::SIZE as u16,
            ring_offset: Cq::RING as u32,
            buffer: self.list(page, 1),
            ..CreateCq::default()
        };
        let made = self.ask::<_, HandleResponse>(opcode::CREATE_CQ, &body);
        self.keep(made, page).map(|made| Cq {
            number: made.handle,
            page,
            taken: 0,
        })
    }

    /// A page is free again where what was to be in it was not created.
    fn keep<T>(&mut self, made: Result<T, u16>, page: usize) -> Result<T, u16> {
        made.inspect_err(|_| self.give_page(page))
    }

    /// Registers pages.
    ///
    /// # Errors
    /// The status.
    pub fn mr(&mut self, pd: u32, access: u32, pages: usize) -> Result<Mr, u16> {
        let page = self.take_pages(pages);
        let body = RegMr {
            pd,
            access,
            iova: Self::address(page),
            length: (pages * PAGE) as u64,
            pages: self.list(page, pages),
            key: 0x5a,
            ..RegMr::default()
        };
        let made: RegMrResponse = self.ask(opcode::REG_MR, &body)?;
        Ok(Mr {
            key: made.rkey,
            page,
            iova: body.iova,
            length: body.length,
        })
    }

    /// The body that creates a queue pair in the memory from `page` on, and its queues.
    #[must_use]
    pub fn qp_body(&mut self, qp_type: u8, context: Context, refs: Refs) -> (CreateQp, Ring, Ring) {
        let sends = qp_type != qp_type::XRC_TGT;
        let receives = sends && qp_type != qp_type::XRC_INI && refs.srq == 0;
        // An entry has the same length for all types: so much of it is for data.
        let data: u16 = if qp_type == qp_type::SRD { 48 } else { 64 };
        let page = self.take_pages(1);
        let sq_offset = SEND_STRIDE;
        let rq_offset = sq_offset + ENTRIES * SEND_STRIDE;
        let ring = |offset: u32, stride: u32| Ring {
            offset: page * PAGE + offset as usize,
            stride: stride as usize,
            posted: 0,
        };
        let body = CreateQp {
            pd: refs.pd,
            context: context.handle,
            send_cq: refs.cq,
            recv_cq: refs.cq,
            qp_type,
            sq_entries: if sends { ENTRIES } else { 0 },
            sq_stride: SEND_STRIDE,
            sq_offset,
            rq_entries: if receives { ENTRIES } else { 0 },
            rq_stride: RECV_STRIDE,
            rq_offset,
            max_send_sge: data / 16,
            max_recv_sge: RECV_SGE,
            max_inline: data.into(),
            srq: refs.srq,
            buffer: self.list(page, 1),
            xrcd: refs.xrcd,
            ..CreateQp::default()
        };
        (
            body,
            ring(sq_offset, SEND_STRIDE),
            ring(rq_offset, RECV_STRIDE),
        )
    }

    /// Creates a queue pair.
    ///
    /// # Errors
    /// The status.
    pub fn qp(&mut self, qp_type: u8, context: Context, refs: Refs) -> Result<Qp, u16> {
        let (body, sq, rq) = self.qp_body(qp_type, context, refs);
        let made = self.ask::<_, CreateQpResponse>(opcode::CREATE_QP, &body);
        self.keep(made, sq.page()).map(|made| Qp {
            number: made.qpn,
            qp_type,
            sq,
            rq,
            slot: made.slot,
            doorbell: context.page,
        })
    }

    /// Creates a shared receive queue, of XRC if `refs` has a domain.
    ///
    /// # Errors
    /// The status.
    pub fn srq(&mut self, context: Context, refs: Refs) -> Result<Srq, u16> {
        let page = self.take_pages(1);
        let xrc = refs.xrcd != 0;
        let body = CreateSrq {
            pd: refs.pd,
            context: context.handle,
            entries: ENTRIES,
            stride: RECV_STRIDE,
            ring_offset: 128,
            max_sge: RECV_SGE,
            srq_type: u8::from(xrc),
            xrcd: refs.xrcd,
            cq: if xrc { refs.cq } else { 0 },
            buffer: self.list(page, 1),
            ..CreateSrq::default()
        };
        let made = self.ask::<_, CreateSrqResponse>(opcode::CREATE_SRQ, &body);
        self.keep(made, page).map(|made| Srq {
            number: made.srqn,
            rq: Ring {
                offset: page * PAGE + 128,
                stride: RECV_STRIDE as usize,
                posted: 0,
            },
            slot: made.slot,
            doorbell: context.page,
        })
    }

    /// Changes attributes of a queue pair.
    ///
    /// # Errors
    /// The status.
    pub fn modify(&self, qpn: u32, (attr, attr_mask): (QpAttr, u32)) -> Result<(), u16> {
        let body = ModifyQp {
            qpn,
            attr_mask,
            attr,
        };
        self.tell(opcode::MODIFY_QP, &body)
    }

    /// Takes a queue pair from RESET to RTS.
    ///
    /// # Errors
    /// The status.
    pub fn connect(&self, qp: &Qp, dgid: [u8; 16], dest: u32) -> Result<(), u16> {
        for state in [qp_state::INIT, qp_state::RTR, qp_state::RTS] {
            self.modify(qp.number, attributes(qp.qp_type, state, dgid, dest))?;
        }
        Ok(())
    }

    /// Rings for a queue pair.
    pub fn ring_qp(&self, qp: &Qp) {
        self.ring(qp.doorbell, qp.slot);
    }

    /// Rings for a shared receive queue.
    pub fn ring_srq(&self, srq: &Srq) {
        self.ring(srq.doorbell, srq.slot);
    }
}

/// Attributes and mask of the usual change to a state, from the one before.
#[must_use]
pub fn attributes(qp_type: u8, state: u8, dgid: [u8; 16], dest: u32) -> (QpAttr, u32) {
    let attr = QpAttr {
        qp_state: state,
        path_mtu: 5,
        port_num: 1,
        access_flags: REMOTE,
        qkey: QKEY,
        dest_qp_num: dest,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        timeout: 1,
        retry_cnt: 1,
        rnr_retry: 1,
        av: AddressVector {
            dgid,
            port_num: 1,
            ..AddressVector::default()
        },
        ..QpAttr::default()
    };
    let datagram = matches!(qp_type, qp_type::UD | qp_type::GSI | qp_type::SRD);
    let path = qp_attr::AV | qp_attr::PATH_MTU | qp_attr::DEST_QPN | qp_attr::RQ_PSN;
    let responder = qp_attr::MAX_DEST_RD_ATOMIC | qp_attr::MIN_RNR_TIMER;
    let requester = qp_attr::RETRY_CNT | qp_attr::RNR_RETRY | qp_attr::MAX_QP_RD_ATOMIC;
    let mask = match (state, qp_type) {
        (qp_state::INIT, qp_type::GSI) => qp_attr::PKEY_INDEX | qp_attr::QKEY,
        (qp_state::INIT, qp_type::UD | qp_type::SRD) => {
            qp_attr::PKEY_INDEX | qp_attr::PORT | qp_attr::QKEY
        }
        (qp_state::INIT, _) => qp_attr::PKEY_INDEX | qp_attr::PORT | qp_attr::ACCESS_FLAGS,
        (qp_state::RTR, qp_type::RC | qp_type::XRC_TGT) => path | responder,
        (qp_state::RTR, _) if !datagram => path,
        (qp_state::RTS, qp_type::RC | qp_type::XRC_INI) => {
            qp_attr::SQ_PSN | qp_attr::TIMEOUT | requester
        }
        (qp_state::RTS, qp_type::SRD) => qp_attr::SQ_PSN | qp_attr::RNR_RETRY,
        (qp_state::RTS, qp_type::XRC_TGT) => qp_attr::SQ_PSN | qp_attr::TIMEOUT,
        (qp_state::RTS, _) => qp_attr::SQ_PSN,
        _ => 0,
    };
    (attr, mask | qp_attr::STATE)
}
