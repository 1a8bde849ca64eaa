// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verbs objects of a [`Vm`], as a guest process has them.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use virtio_rdma_driver_core::buffer::{CqLayout, QpCaps, QpLayout};
use virtio_rdma_driver_core::command::{
    CreateContext, CreateCq, CreatePd, CreateQp, DeregMr, DestroyContext, DestroyCq, DestroyPd,
    DestroyQp, ModifyQp, QueryQp, RegMr,
};
use virtio_rdma_driver_core::{ArmMode, CompletionQueue, Doorbell, RecvQueue, SendQueue};
use virtio_rdma_spec::command::{self as spec, create_qp_flag, AddressVector, Handle, QpAttr};
use virtio_rdma_spec::doorbell::BLOCK_SIZE;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_state, qp_type, wr_opcode};

use crate::mapping::View;
use crate::memory::{page_list, Buffer, Placement};
use crate::{Error, Vm};

/// Bit of `Cqe::opcode` that tells a receive.
pub const RECV_FLAG: u8 = 0x80;

/// A user context: doorbell memory.
#[derive(Debug)]
pub struct Context {
    vm: Arc<Vm>,
    handle: u32,
    blocks: Buffer,
}

impl Context {
    /// Creates a context.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>) -> Result<Arc<Self>, Error> {
        let size = usize::from(vm.config().num_doorbell_queues) * BLOCK_SIZE;
        let blocks = vm.buffer(size, Placement::Scattered)?;
        let (doorbell, _tables) = blocks.page_list()?;
        let response = vm.execute::<CreateContext>(&spec::CreateContext {
            doorbell,
            reserved: 0,
        })?;
        Ok(Arc::new(Self {
            vm: vm.clone(),
            handle: response.handle,
            blocks,
        }))
    }

    /// Its handle.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// The doorbell memory.
    #[must_use]
    pub fn doorbell(&self) -> &View {
        self.blocks.view()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The device may be gone, or have refused: nothing is left to do either way. (Likewise below.)
        let _ = self.vm.execute::<DestroyContext>(&handle(self.handle));
    }
}

fn handle(handle: u32) -> Handle {
    Handle {
        handle,
        reserved: 0,
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    vm: Arc<Vm>,
    handle: u32,
}

impl Pd {
    /// Creates a protection domain.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>) -> Result<Arc<Self>, Error> {
        let response = vm.execute::<CreatePd>(&[])?;
        Ok(Arc::new(Self {
            vm: vm.clone(),
            handle: response.handle,
        }))
    }

    /// Its handle.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Registers all of a new buffer of `size` bytes, under its own address.
    ///
    /// # Errors
    /// If there is no memory, or the device refuses.
    pub fn register(self: &Arc<Self>, size: usize, access: u32) -> Result<Mr, Error> {
        let buffer = self.vm.buffer(size, Placement::Scattered)?;
        let (iova, length) = (buffer.addr(), size as u64);
        self.register_buffer(buffer, iova, 0, length, access)
    }

    /// Registers `length` bytes of `buffer` from `offset`, under the address `iova`.
    ///
    /// # Errors
    /// If there is no memory, or the device refuses.
    pub fn register_buffer(
        self: &Arc<Self>,
        buffer: Buffer,
        iova: u64,
        offset: u64,
        length: u64,
        access: u32,
    ) -> Result<Mr, Error> {
        let end = offset.checked_add(length).ok_or(Error::BadAddress)?;
        let count = end
            .div_ceil(crate::PAGE as u64)
            .min(buffer.page_count() as u64);
        let pages: Vec<u64> = (0..count as usize).map(|page| buffer.page(page)).collect();
        let (pages, _tables) = page_list(buffer.region(), &pages)?;
        let body = spec::RegMr {
            pd: self.handle,
            access,
            iova,
            length,
            offset,
            pages,
            key: 0,
            reserved: [0; 7],
        };
        let keys = self.vm.execute::<RegMr>(&body)?;
        Ok(Mr {
            pd: self.clone(),
            lkey: keys.lkey,
            rkey: keys.rkey,
            iova,
            offset: offset as usize,
            length,
            buffer: Some(buffer),
        })
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        let _ = self.vm.execute::<DestroyPd>(&handle(self.handle));
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    pd: Arc<Pd>,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
    /// Address of its first byte in work requests.
    pub iova: u64,
    offset: usize,
    /// Length, bytes.
    pub length: u64,
    /// Until it is destroyed.
    buffer: Option<Buffer>,
}

impl Mr {
    /// Its memory.
    ///
    /// # Panics
    /// Never: only a destroyed region has none.
    #[must_use]
    pub fn view(&self) -> &View {
        self.buffer
            .as_ref()
            .expect("a region has its buffer until it is destroyed")
            .view()
    }

    /// A scatter/gather entry for a part of it.
    #[must_use]
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            addr: self.iova.wrapping_add(offset),
            length,
            lkey: self.lkey,
        }
    }

    /// Writes bytes at an offset in it.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.view().write(self.offset + offset, bytes);
    }

    /// Reads bytes at an offset in it.
    #[must_use]
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.view().get(self.offset + offset, len)
    }

    /// Deregisters it; returns its buffer.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn destroy(mut self) -> Result<Option<Buffer>, Error> {
        let buffer = self.buffer.take();
        self.pd.vm.execute::<DeregMr>(&handle(self.lkey))?;
        Ok(buffer)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            let _ = self.pd.vm.execute::<DeregMr>(&handle(self.lkey));
        }
    }
}

/// What a completion frees.
#[derive(Debug)]
struct Queues {
    send: Option<SendQueue<View>>,
    recv: Option<RecvQueue<View>>,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    vm: Arc<Vm>,
    cqn: u32,
    vector: u16,
    queue: Mutex<CompletionQueue<View>>,
    buffer: Buffer,
    queues: RwLock<HashMap<u32, Weak<Queues>>>,
}

impl Cq {
    /// Creates a completion queue of at least `entries` entries.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>, entries: u32, vector: u16) -> Result<Arc<Self>, Error> {
        let layout = CqLayout::new(entries).ok_or(Error::BadLayout)?;
        let buffer = vm.buffer(layout.size, Placement::Scattered)?;
        let (pages, _tables) = buffer.page_list()?;
        let body = spec::CreateCq {
            entries: layout.ring.entries,
            comp_vector: vector,
            stride: layout.ring.stride as u16,
            ring_offset: layout.ring.offset,
            flags: 0,
            buffer: pages,
            reserved: 0,
        };
        let response = vm.execute::<CreateCq>(&body)?;
        let queue = CompletionQueue::new(buffer.view().clone(), &layout.ring)?;
        Ok(Arc::new(Self {
            vm: vm.clone(),
            cqn: response.handle,
            vector,
            queue: Mutex::new(queue),
            buffer,
            queues: RwLock::default(),
        }))
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.cqn
    }

    /// Its ring and record.
    #[must_use]
    pub fn memory(&self) -> &View {
        self.buffer.view()
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, CompletionQueue<View>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next completion, if there is one. What it completes is free again.
    pub fn poll(&self) -> Option<Cqe> {
        let queue = self.queue();
        let cqe = queue.poll()?;
        queue.publish();
        self.free(&cqe);
        Some(cqe)
    }

    /// Takes completions until `into` is full or there are no more; returns how many.
    pub fn poll_many(&self, into: &mut [Cqe]) -> usize {
        let queue = self.queue();
        let mut count = 0;
        for slot in into {
            let Some(cqe) = queue.poll() else {
                break;
            };
            *slot = cqe;
            self.free(&cqe);
            count += 1;
        }
        if count > 0 {
            queue.publish();
        }
        count
    }

    fn free(&self, cqe: &Cqe) {
        let queues = self.queues.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(queues) = queues.get(&cqe.qp_num).and_then(Weak::upgrade) {
            if cqe.opcode & RECV_FLAG != 0 {
                if let Some(recv) = &queues.recv {
                    recv.complete(cqe.wqe_index);
                }
            } else if let Some(send) = &queues.send {
                send.complete(cqe.wqe_index);
            }
        }
    }

    /// Polls until there is a completion.
    ///
    /// # Errors
    /// [`Error::Timeout`] if there is none in time.
    pub fn wait(&self, timeout: Duration) -> Result<Cqe, Error> {
        let deadline = Instant::now() + timeout;
        let mut spins = 0u32;
        loop {
            if let Some(cqe) = self.poll() {
                return Ok(cqe);
            }
            spins += 1;
            if spins % 256 == 0 {
                if Instant::now() > deadline {
                    return Err(Error::Timeout);
                }
                std::thread::yield_now();
            }
        }
    }

    /// Asks for an event. Poll again afterwards.
    pub fn arm(&self, mode: ArmMode) {
        self.queue().arm(mode);
    }

    /// Waits for an event of its vector, which must not serve another queue at the time. Returns whether one came.
    ///
    /// # Errors
    /// If the device writes nonsense.
    pub fn wait_event(&self, timeout: Duration) -> Result<bool, Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.vm.wait_completion_event(self.vector, left)? {
                Some(cqn) if cqn == self.cqn => {
                    self.queue().event_received();
                    return Ok(true);
                }
                Some(_) => {}
                None => return Ok(false),
            }
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let _ = self.vm.execute::<DestroyCq>(&handle(self.cqn));
    }
}

/// What a queue pair is created with.
#[derive(Debug, Clone, Copy)]
pub struct QpOptions {
    /// Sizes.
    pub caps: QpCaps,
    /// Every send work request produces a completion.
    pub signal_all: bool,
    /// `verbs::qp_type`.
    pub qp_type: u8,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            caps: QpCaps {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline: 128,
            },
            signal_all: true,
            qp_type: qp_type::RC,
        }
    }
}

/// How a queue pair is connected.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Number of the peer.
    pub dest_qp_num: u32,
    /// GID of the peer.
    pub dgid: [u8; 16],
    /// Access that the peer has.
    pub access: u32,
    /// Local ACK time-out code.
    pub timeout: u8,
    /// Transport retries.
    pub retry_cnt: u8,
    /// RNR retries.
    pub rnr_retry: u8,
    /// RNR NAK timer code.
    pub min_rnr_timer: u8,
    /// RDMA READ and atomic operations outstanding, both ways.
    pub max_rd_atomic: u8,
}

impl Connection {
    /// To a queue pair of `peer`, with all access.
    #[must_use]
    pub fn to(peer: &Qp) -> Self {
        Self {
            dest_qp_num: peer.number(),
            dgid: peer.vm.gid(),
            access: access::REMOTE_WRITE | access::REMOTE_READ,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
        }
    }

    /// Attributes and mask of the change to INIT.
    #[must_use]
    pub fn init(&self) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: qp_state::INIT,
            port_num: 1,
            access_flags: self.access,
            ..QpAttr::default()
        };
        (
            attr,
            qp_attr::STATE | qp_attr::PKEY_INDEX | qp_attr::PORT | qp_attr::ACCESS_FLAGS,
        )
    }

    /// Attributes and mask of the change to RTR.
    #[must_use]
    pub fn rtr(&self) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: qp_state::RTR,
            path_mtu: mtu::MTU_4096,
            dest_qp_num: self.dest_qp_num,
            rq_psn: 0,
            max_dest_rd_atomic: self.max_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            av: AddressVector {
                dgid: self.dgid,
                hop_limit: 64,
                port_num: 1,
                ..AddressVector::default()
            },
            ..QpAttr::default()
        };
        let mask = qp_attr::STATE
            | qp_attr::AV
            | qp_attr::PATH_MTU
            | qp_attr::DEST_QPN
            | qp_attr::RQ_PSN
            | qp_attr::MAX_DEST_RD_ATOMIC
            | qp_attr::MIN_RNR_TIMER;
        (attr, mask)
    }

    /// Attributes and mask of the change to RTS.
    #[must_use]
    pub fn rts(&self) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: qp_state::RTS,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            sq_psn: 0,
            max_rd_atomic: self.max_rd_atomic,
            ..QpAttr::default()
        };
        let mask = qp_attr::STATE
            | qp_attr::TIMEOUT
            | qp_attr::RETRY_CNT
            | qp_attr::RNR_RETRY
            | qp_attr::SQ_PSN
            | qp_attr::MAX_QP_RD_ATOMIC;
        (attr, mask)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    vm: Arc<Vm>,
    qpn: u32,
    doorbell_queue: u32,
    slot: u32,
    doorbell: Doorbell<View>,
    queues: Arc<Queues>,
    buffer: Buffer,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    // Destroyed after the queue pair, which names them.
    _context: Arc<Context>,
    _pd: Arc<Pd>,
}

impl Qp {
    /// Creates a queue pair.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(
        context: &Arc<Context>,
        pd: &Arc<Pd>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        options: &QpOptions,
    ) -> Result<Self, Error> {
        let vm = &context.vm;
        let caps = &options.caps;
        let layout = QpLayout::new(caps).ok_or(Error::BadLayout)?;
        let buffer = vm.buffer(layout.size, Placement::Scattered)?;
        let (pages, _tables) = buffer.page_list()?;
        let body = spec::CreateQp {
            pd: pd.handle,
            context: context.handle,
            send_cq: send_cq.cqn,
            recv_cq: recv_cq.cqn,
            qp_type: options.qp_type,
            flags: if options.signal_all {
                create_qp_flag::SIGNAL_ALL
            } else {
                0
            },
            sq_entries: layout.sq.entries,
            sq_stride: layout.sq.stride,
            sq_offset: layout.sq.offset,
            rq_entries: layout.rq.entries,
            rq_stride: layout.rq.stride,
            rq_offset: layout.rq.offset,
            max_send_sge: caps.max_send_sge as u16,
            max_recv_sge: caps.max_recv_sge as u16,
            max_inline: caps.max_inline,
            buffer: pages,
            ..spec::CreateQp::default()
        };
        let created = vm.execute::<CreateQp>(&body)?;
        let memory = buffer.view();
        let send = (layout.sq.entries > 0)
            .then(|| {
                SendQueue::new(
                    memory.clone(),
                    &layout.sq,
                    caps.max_send_sge,
                    caps.max_inline,
                )
            })
            .transpose()?;
        let recv = (layout.rq.entries > 0)
            .then(|| RecvQueue::new(memory.clone(), &layout.rq, caps.max_recv_sge))
            .transpose()?;
        let doorbell = Doorbell::new(
            context.doorbell().clone(),
            vm.status_page().clone(),
            created.doorbell_queue,
            created.slot,
        )?;
        let queues = Arc::new(Queues { send, recv });
        for cq in [send_cq, recv_cq] {
            let mut known = cq.queues.write().unwrap_or_else(PoisonError::into_inner);
            known.insert(created.qpn, Arc::downgrade(&queues));
        }
        Ok(Self {
            vm: vm.clone(),
            qpn: created.qpn,
            doorbell_queue: created.doorbell_queue,
            slot: created.slot,
            doorbell,
            queues,
            buffer,
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            _context: context.clone(),
            _pd: pd.clone(),
        })
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.qpn
    }

    /// Its slot in the doorbell block.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Its doorbell queue, 0 to D - 1.
    #[must_use]
    pub fn doorbell_queue(&self) -> u32 {
        self.doorbell_queue
    }

    /// Record and rings.
    #[must_use]
    pub fn memory(&self) -> &View {
        self.buffer.view()
    }

    /// Where sends complete.
    #[must_use]
    pub fn send_cq(&self) -> &Arc<Cq> {
        &self.send_cq
    }

    /// Where receives complete.
    #[must_use]
    pub fn recv_cq(&self) -> &Arc<Cq> {
        &self.recv_cq
    }

    /// The send queue, for batches.
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    pub fn send_queue(&self) -> &SendQueue<View> {
        self.queues
            .send
            .as_ref()
            .expect("the queue pair was created with a send queue")
    }

    /// The receive queue, for batches.
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    pub fn recv_queue(&self) -> &RecvQueue<View> {
        self.queues
            .recv
            .as_ref()
            .expect("the queue pair was created with a receive queue")
    }

    /// MODIFY_QP as told.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn modify(&self, (attr, attr_mask): (QpAttr, u32)) -> Result<(), Error> {
        self.vm.execute::<ModifyQp>(&spec::ModifyQp {
            qpn: self.qpn,
            attr_mask,
            attr,
        })?;
        if attr_mask & qp_attr::STATE != 0 && attr.qp_state == qp_state::RESET {
            if let Some(send) = &self.queues.send {
                send.reset();
            }
            if let Some(recv) = &self.queues.recv {
                recv.reset();
            }
            self.send_cq.queue().forget(self.qpn);
            self.recv_cq.queue().forget(self.qpn);
        }
        Ok(())
    }

    /// Changes the state, and nothing else.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn set_state(&self, state: u8) -> Result<(), Error> {
        self.modify((
            QpAttr {
                qp_state: state,
                ..QpAttr::default()
            },
            qp_attr::STATE,
        ))
    }

    /// The attributes.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn query(&self) -> Result<QpAttr, Error> {
        Ok(self.vm.execute::<QueryQp>(&handle(self.qpn))?.attr)
    }

    /// The state.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn state(&self) -> Result<u8, Error> {
        Ok(self.query()?.cur_qp_state)
    }

    /// From RESET to RTS.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn connect(&self, connection: &Connection) -> Result<(), Error> {
        self.modify(connection.init())?;
        self.modify(connection.rtr())?;
        self.modify(connection.rts())
    }

    /// Rings the doorbell, and notifies the worker if it sleeps.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn ring(&self) -> Result<(), Error> {
        if self.doorbell.ring() {
            self.vm.notify_doorbell(self.doorbell_queue)?;
        }
        Ok(())
    }

    /// Posts a send work request.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_send(&self, wqe: &SendWqe, sges: &[Sge]) -> Result<(), Error> {
        self.send_queue().post(wqe, sges.iter().copied())?;
        self.ring()
    }

    /// Posts a send work request with inline data.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_inline(&self, wqe: &SendWqe, data: &[u8]) -> Result<(), Error> {
        let mut batch = self.send_queue().batch();
        batch.push_inline(wqe, [data])?;
        batch.commit();
        self.ring()
    }

    /// Posts a receive work request.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<(), Error> {
        if self.recv_queue().post(wr_id, sges.iter().copied())? {
            self.ring()?;
        }
        Ok(())
    }

    /// Posts a SEND.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn send(&self, wr_id: u64, sges: &[Sge]) -> Result<(), Error> {
        self.post_send(
            &SendWqe {
                opcode: wr_opcode::SEND,
                wr_id,
                ..SendWqe::default()
            },
            sges,
        )
    }

    /// Posts an RDMA WRITE.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn write(
        &self,
        wr_id: u64,
        sges: &[Sge],
        remote_addr: u64,
        rkey: u32,
    ) -> Result<(), Error> {
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            wr_id,
            remote_addr,
            rkey,
            ..SendWqe::default()
        };
        self.post_send(&wqe, sges)
    }

    /// Posts an RDMA READ.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn read(&self, wr_id: u64, sges: &[Sge], remote_addr: u64, rkey: u32) -> Result<(), Error> {
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_READ,
            wr_id,
            remote_addr,
            rkey,
            ..SendWqe::default()
        };
        self.post_send(&wqe, sges)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let _ = self.vm.execute::<DestroyQp>(&handle(self.qpn));
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.queue().forget(self.qpn);
            cq.queues
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&self.qpn);
        }
    }
}
