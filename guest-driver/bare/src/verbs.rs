// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verbs objects of a [`Vm`], as a guest process has them.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use virtio_rdma_driver_core::buffer::{CqLayout, QpCaps, QpLayout, RingLayout};
use virtio_rdma_driver_core::command::{
    AllocMr, AllocMw, AttachMcast, CreateContext, CreateCq, CreatePd, CreateQp, DeallocMw, DeregMr,
    DestroyContext, DestroyCq, DestroyPd, DestroyQp, DetachMcast, ModifyCq, ModifyQp, QueryQp,
    RegMr, ResizeCq,
};
use virtio_rdma_driver_core::{
    ArmMode, CompletionQueue, Doorbell, RecvQueue, SendEntry, SendQueue, SrdWqe,
};
use virtio_rdma_spec::command::{
    self as spec, create_qp_flag, AddressVector, Handle, Multicast, PageList, QpAttr,
};
use virtio_rdma_spec::doorbell::BLOCK_SIZE;
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::{
    BindMw, Cqe, CqeExtension, FastReg, MaskedOperands, SendWqe, Sge, SrdRange, UdWqe,
};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_state, qp_type, wr_opcode};

use crate::mapping::View;
use crate::memory::{page_list, Buffer};
use crate::{Error, Srq, Vm, Xrcd};

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
        let blocks = vm.placed_buffer(size)?;
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

    /// The VM that it belongs to.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// The doorbell memory.
    #[must_use]
    pub fn doorbell(&self) -> &View {
        self.blocks.view()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The device may be gone, or have refused: nothing is left to do either way. (Likewise
        // below.)
        let _ = self.vm.execute::<DestroyContext>(&handle(self.handle));
    }
}

pub(crate) fn handle(handle: u32) -> Handle {
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
        let buffer = self.vm.placed_buffer(size)?;
        let (iova, length) = (buffer.addr(), size as u64);
        self.register_buffer(buffer, iova, 0, length, access)
    }

    /// Registers all guest memory, under its guest-physical addresses; returns the key.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn register_physical(&self, access: u32) -> Result<u32, Error> {
        let body = spec::RegMr {
            pd: self.handle,
            access: access | access::PHYSICAL,
            ..spec::RegMr::default()
        };
        Ok(self.vm.execute::<RegMr>(&body)?.lkey)
    }

    /// Deregisters a region by its key.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn deregister(&self, lkey: u32) -> Result<(), Error> {
        self.vm.execute::<DeregMr>(&handle(lkey)).map(|_| ())
    }

    /// Allocates a window of type `mw_type`.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn window(self: &Arc<Self>, mw_type: u8) -> Result<Mw, Error> {
        let body = spec::AllocMw {
            pd: self.handle,
            mw_type,
            ..spec::AllocMw::default()
        };
        let response = self.vm.execute::<AllocMw>(&body)?;
        Ok(Mw {
            pd: self.clone(),
            rkey: response.handle,
        })
    }

    /// Allocates a fast region for lists of up to `max_pages` pages, or, by `flags`, blocks.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn fast_region(self: &Arc<Self>, max_pages: u32, flags: u32) -> Result<FastMr, Error> {
        let body = spec::AllocMr {
            pd: self.handle,
            max_pages,
            flags,
            ..spec::AllocMr::default()
        };
        let response = self.vm.execute::<AllocMr>(&body)?;
        Ok(FastMr {
            pd: self.clone(),
            key: response.lkey,
        })
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

/// A memory window.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    /// Its first key.
    pub rkey: u32,
}

impl Drop for Mw {
    fn drop(&mut self) {
        let _ = self.pd.vm.execute::<DeallocMw>(&handle(self.rkey));
    }
}

/// A fast region.
#[derive(Debug)]
pub struct FastMr {
    pd: Arc<Pd>,
    /// Its first key.
    pub key: u32,
}

impl FastMr {
    /// Its key with these low 8 bits.
    #[must_use]
    pub fn key(&self, low: u8) -> u32 {
        self.key & !0xff | u32::from(low)
    }
}

impl Drop for FastMr {
    fn drop(&mut self) {
        let _ = self.pd.vm.execute::<DeregMr>(&handle(self.key));
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
    /// The buffer since it was resized.
    resized: Mutex<Option<Buffer>>,
    queues: RwLock<HashMap<u32, Weak<Queues>>>,
}

impl Cq {
    /// Creates a completion queue of at least `entries` entries.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(vm: &Arc<Vm>, entries: u32, vector: u16) -> Result<Arc<Self>, Error> {
        Self::with_layout(vm, CqLayout::new(entries), vector)
    }

    /// Creates a completion queue of at least `entries` entries with time stamps.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn extended(vm: &Arc<Vm>, entries: u32, vector: u16) -> Result<Arc<Self>, Error> {
        Self::with_layout(vm, CqLayout::extended(entries), vector)
    }

    fn with_layout(
        vm: &Arc<Vm>,
        layout: Option<CqLayout>,
        vector: u16,
    ) -> Result<Arc<Self>, Error> {
        let layout = layout.ok_or(Error::BadLayout)?;
        let buffer = vm.placed_buffer(layout.size)?;
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
            resized: Mutex::new(None),
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

    /// The next completion with its extension, if there is one. What it completes is free again.
    pub fn poll_extended(&self) -> Option<(Cqe, CqeExtension)> {
        let queue = self.queue();
        let cqe = queue.poll()?;
        let extension = queue.extension();
        queue.publish();
        self.free(&cqe);
        Some((cqe, extension))
    }

    /// Goes over to another buffer of at least `entries` entries; returns how many completions were
    /// moved.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn resize(&self, entries: u32, extended: bool) -> Result<u32, Error> {
        let layout = if extended {
            CqLayout::extended(entries)
        } else {
            CqLayout::new(entries)
        };
        let layout = layout.ok_or(Error::BadLayout)?;
        let buffer = self.vm.placed_buffer(layout.size)?;
        let (pages, _tables) = buffer.page_list()?;
        let mut queue = self.queue();
        let next = queue.prepare_resize(buffer.view().clone(), &layout.ring)?;
        let body = spec::ResizeCq {
            cqn: self.cqn,
            entries: layout.ring.entries,
            ring_offset: layout.ring.offset,
            buffer: pages,
            ..spec::ResizeCq::default()
        };
        let response = self.vm.execute::<ResizeCq>(&body)?;
        queue.resized(next);
        *self.resized.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
        Ok(response.handle)
    }

    /// Has the device hold back events: for `count` completions or `period` microseconds.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn moderate(&self, count: u16, period: u16) -> Result<(), Error> {
        let body = spec::ModifyCq {
            cqn: self.cqn,
            count,
            period,
            reserved: 0,
        };
        self.vm.execute::<ModifyCq>(&body).map(drop)
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

    /// Keeps it for this thread, which then polls without further ado.
    pub fn polling(&self) -> Polling<'_> {
        Polling {
            queue: self.queue(),
        }
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

    /// Waits for an event of its vector, which must not serve another queue at the time. Returns
    /// whether one came.
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

/// A completion queue that one thread keeps to poll it at full speed. What completions report must
/// be freed with [`SendQueue::complete`] and [`RecvQueue::complete`].
#[derive(Debug)]
pub struct Polling<'a> {
    queue: std::sync::MutexGuard<'a, CompletionQueue<View>>,
}

impl Polling<'_> {
    /// The next completion, if there is one. Call [`Polling::publish`] after the last of a series.
    #[inline(always)]
    pub fn poll(&self) -> Option<Cqe> {
        self.queue.poll()
    }

    /// Tells the device what is consumed.
    #[inline(always)]
    pub fn publish(&self) {
        self.queue.publish();
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
    /// Multicast messages do not reach queue pairs of the same VM.
    pub block_multicast_loopback: bool,
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
            block_multicast_loopback: false,
        }
    }
}

impl QpOptions {
    /// The usual ones for a queue pair of this type.
    #[must_use]
    pub fn of(qp_type: u8) -> Self {
        Self {
            qp_type,
            ..Self::default()
        }
    }
}

/// What a queue pair uses; which of them it needs depends on its type.
#[derive(Debug, Clone, Copy, Default)]
pub struct Uses<'a> {
    /// Context, of all that have a queue.
    pub context: Option<&'a Arc<Context>>,
    /// Protection domain, of all but XRC_TGT.
    pub pd: Option<&'a Arc<Pd>>,
    /// Completion queue for sends.
    pub send_cq: Option<&'a Arc<Cq>>,
    /// Completion queue for receives.
    pub recv_cq: Option<&'a Arc<Cq>>,
    /// Shared receive queue: then it has no receive queue.
    pub srq: Option<&'a Arc<Srq>>,
    /// XRC domain, of XRC_TGT.
    pub xrcd: Option<&'a Arc<Xrcd>>,
}

/// A destination of datagrams.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    /// GID of the destination.
    pub dgid: [u8; 16],
    /// Its MAC address.
    pub dmac: [u8; 6],
    /// Queue pair there.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

impl Address {
    /// Of a queue pair.
    #[must_use]
    pub fn of(qp: &Qp, qkey: u32) -> Self {
        Self {
            dgid: qp.vm.gid(),
            dmac: qp.vm.mac(),
            qpn: qp.number(),
            qkey,
        }
    }

    /// Of a multicast group.
    #[must_use]
    pub fn group(dgid: [u8; 16], qkey: u32) -> Self {
        let [.., high, middle, low] = dgid;
        Self {
            dgid,
            // Of IPv4 groups.
            dmac: [1, 0, 0x5e, high & 0x7f, middle, low],
            qpn: 0x00ff_ffff,
            qkey,
        }
    }

    /// A SEND there.
    #[must_use]
    pub fn send(&self, wr_id: u64) -> UdWqe {
        UdWqe {
            opcode: wr_opcode::SEND,
            wr_id,
            dgid: self.dgid,
            dmac: self.dmac,
            remote_qpn: self.qpn,
            remote_qkey: self.qkey,
            hop_limit: 64,
            ..UdWqe::default()
        }
    }

    /// A work request of an SRD queue pair: for an RDMA WRITE or READ with the remote range, which
    /// begins at `remote_addr`.
    #[must_use]
    pub fn reliable(&self, opcode: u8, wr_id: u64, (remote_addr, rkey): (u64, u32)) -> SrdWqe {
        SrdWqe {
            to: UdWqe {
                opcode,
                ..self.send(wr_id)
            },
            range: SrdRange {
                remote_addr,
                rkey,
                reserved: 0,
            },
        }
    }
}

/// How a queue pair is connected, or, if it has no peer, made ready.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Its `verbs::qp_type`: attributes depend on it.
    pub qp_type: u8,
    /// Q_Key, of UD and GSI.
    pub qkey: u32,
    /// Number of the peer.
    pub dest_qp_num: u32,
    /// GID of the peer.
    pub dgid: [u8; 16],
    /// MAC address of the peer.
    pub dmac: [u8; 6],
    /// `mtu`.
    pub path_mtu: u8,
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
            qp_type: QpType::of(peer.qp_type).map_or(peer.qp_type, |of| of.peer),
            qkey: 0,
            dest_qp_num: peer.number(),
            dgid: peer.vm.gid(),
            dmac: peer.vm.mac(),
            path_mtu: mtu::MTU_4096,
            access: access::REMOTE_WRITE | access::REMOTE_READ,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
        }
    }

    /// None, for datagrams with this Q_Key.
    #[must_use]
    pub fn datagram(qkey: u32) -> Self {
        Self {
            qp_type: qp_type::UD,
            qkey,
            dest_qp_num: 0,
            dgid: [0; 16],
            dmac: [0; 6],
            path_mtu: mtu::MTU_4096,
            access: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            min_rnr_timer: 0,
            max_rd_atomic: 0,
        }
    }

    /// None, for reliable datagrams with this Q_Key.
    #[must_use]
    pub fn reliable_datagram(qkey: u32) -> Self {
        Self {
            qp_type: qp_type::SRD,
            ..Self::datagram(qkey)
        }
    }

    fn is_datagram(&self) -> bool {
        QpType::of(self.qp_type).is_some_and(|of| of.datagram)
    }

    /// Attributes and mask of the change to INIT.
    #[must_use]
    pub fn init(&self) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: qp_state::INIT,
            port_num: 1,
            access_flags: self.access,
            qkey: self.qkey,
            ..QpAttr::default()
        };
        let own = if self.is_datagram() {
            qp_attr::QKEY
        } else {
            qp_attr::ACCESS_FLAGS
        };
        (
            attr,
            qp_attr::STATE | qp_attr::PKEY_INDEX | qp_attr::PORT | own,
        )
    }

    /// Attributes and mask of the change to RTR.
    #[must_use]
    pub fn rtr(&self) -> (QpAttr, u32) {
        let attr = QpAttr {
            qp_state: qp_state::RTR,
            path_mtu: self.path_mtu,
            dest_qp_num: self.dest_qp_num,
            rq_psn: 0,
            max_dest_rd_atomic: self.max_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            av: AddressVector {
                dgid: self.dgid,
                dmac: self.dmac,
                hop_limit: 64,
                port_num: 1,
                ..AddressVector::default()
            },
            ..QpAttr::default()
        };
        let path = qp_attr::AV | qp_attr::PATH_MTU | qp_attr::DEST_QPN | qp_attr::RQ_PSN;
        let mask = match self.qp_type {
            qp_type::RC | qp_type::XRC_TGT => {
                path | qp_attr::MAX_DEST_RD_ATOMIC | qp_attr::MIN_RNR_TIMER
            }
            qp_type::UC | qp_type::XRC_INI => path,
            _ => 0,
        };
        (attr, mask | qp_attr::STATE)
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
        let mask = match self.qp_type {
            qp_type::RC | qp_type::XRC_INI => {
                qp_attr::TIMEOUT
                    | qp_attr::RETRY_CNT
                    | qp_attr::RNR_RETRY
                    | qp_attr::MAX_QP_RD_ATOMIC
            }
            qp_type::XRC_TGT => qp_attr::TIMEOUT,
            _ => 0,
        };
        (attr, mask | qp_attr::STATE | qp_attr::SQ_PSN)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    vm: Arc<Vm>,
    qpn: u32,
    qp_type: u8,
    doorbell_queue: u32,
    slot: u32,
    /// XRC_TGT has none of these.
    doorbell: Option<Doorbell<View>>,
    queues: Arc<Queues>,
    buffer: Option<Buffer>,
    send_cq: Option<Arc<Cq>>,
    recv_cq: Option<Arc<Cq>>,
    // Destroyed after the queue pair, which names them.
    _context: Option<Arc<Context>>,
    _pd: Option<Arc<Pd>>,
    _srq: Option<Arc<Srq>>,
    _xrcd: Option<Arc<Xrcd>>,
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
        let uses = Uses {
            context: Some(context),
            pd: Some(pd),
            send_cq: Some(send_cq),
            recv_cq: Some(recv_cq),
            ..Uses::default()
        };
        Self::create(&context.vm, &uses, options)
    }

    /// The target of an XRC connection.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn xrc_target(domain: &Arc<Xrcd>) -> Result<Self, Error> {
        let uses = Uses {
            xrcd: Some(domain),
            ..Uses::default()
        };
        let options = QpOptions {
            signal_all: false,
            ..QpOptions::of(qp_type::XRC_TGT)
        };
        Self::create(domain.vm(), &uses, &options)
    }

    /// Creates a queue pair that uses just these. Queues that its type does not have are left out.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn create(vm: &Arc<Vm>, uses: &Uses<'_>, options: &QpOptions) -> Result<Self, Error> {
        let target = options.qp_type == qp_type::XRC_TGT;
        let mut caps = options.caps;
        if uses.srq.is_some() || uses.recv_cq.is_none() {
            caps.max_recv_wr = 0;
        }
        if target {
            caps = QpCaps::default();
        }
        let caps = &caps;
        let of = QpType::of(options.qp_type);
        let (datagram, reliable) = of.map_or((false, false), |of| (of.datagram, of.acknowledged));
        let layout = match (datagram, reliable) {
            (true, true) => QpLayout::reliable_datagram(caps),
            (true, false) => QpLayout::datagram(caps),
            (false, _) => QpLayout::new(caps),
        };
        let layout = layout.ok_or(Error::BadLayout)?;
        let buffer = if target {
            None
        } else {
            Some(vm.placed_buffer(layout.size)?)
        };
        let (pages, _tables) = match &buffer {
            Some(buffer) => buffer
                .page_list()
                .map(|(pages, tables)| (pages, Some(tables)))?,
            None => (PageList::default(), None),
        };
        let flag = |set, flag| if set { flag } else { 0 };
        let body = spec::CreateQp {
            pd: uses.pd.map_or(0, |pd| pd.handle),
            context: uses.context.map_or(0, |context| context.handle),
            send_cq: uses.send_cq.map_or(0, |cq| cq.cqn),
            recv_cq: uses.recv_cq.map_or(0, |cq| cq.cqn),
            srq: uses.srq.map_or(0, |srq| srq.number()),
            xrcd: uses.xrcd.map_or(0, |domain| domain.handle()),
            qp_type: options.qp_type,
            flags: flag(options.signal_all, create_qp_flag::SIGNAL_ALL)
                | flag(
                    options.block_multicast_loopback,
                    create_qp_flag::BLOCK_MULTICAST_LOOPBACK,
                ),
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
        let memory = |ring: &RingLayout| {
            let buffer = buffer.as_ref().filter(|_| ring.entries > 0);
            buffer.map(|buffer| buffer.view().clone())
        };
        let new = match (datagram, reliable) {
            (true, true) => SendQueue::reliable_datagram,
            (true, false) => SendQueue::datagram,
            (false, _) => SendQueue::new,
        };
        let send = memory(&layout.sq)
            .map(|memory| new(memory, &layout.sq, caps.max_send_sge, caps.max_inline))
            .transpose()?;
        let recv = memory(&layout.rq)
            .map(|memory| RecvQueue::new(memory, &layout.rq, caps.max_recv_sge))
            .transpose()?;
        let doorbell = uses
            .context
            .map(|context| {
                Doorbell::new(
                    context.doorbell().clone(),
                    vm.status_page().clone(),
                    created.doorbell_queue,
                    created.slot,
                )
            })
            .transpose()?;
        let queues = Arc::new(Queues { send, recv });
        for cq in [uses.send_cq, uses.recv_cq].into_iter().flatten() {
            let mut known = cq.queues.write().unwrap_or_else(PoisonError::into_inner);
            known.insert(created.qpn, Arc::downgrade(&queues));
        }
        Ok(Self {
            vm: vm.clone(),
            qpn: created.qpn,
            qp_type: options.qp_type,
            doorbell_queue: created.doorbell_queue,
            slot: created.slot,
            doorbell,
            queues,
            buffer,
            send_cq: uses.send_cq.cloned(),
            recv_cq: uses.recv_cq.cloned(),
            _context: uses.context.cloned(),
            _pd: uses.pd.cloned(),
            _srq: uses.srq.cloned(),
            _xrcd: uses.xrcd.cloned(),
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
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    pub fn memory(&self) -> &View {
        self.buffer
            .as_ref()
            .expect("the queue pair has a buffer")
            .view()
    }

    /// Where sends complete.
    ///
    /// # Panics
    /// If it sends nothing.
    #[must_use]
    pub fn send_cq(&self) -> &Arc<Cq> {
        self.send_cq.as_ref().expect("the queue pair sends")
    }

    /// Where receives complete.
    ///
    /// # Panics
    /// If it receives nothing.
    #[must_use]
    pub fn recv_cq(&self) -> &Arc<Cq> {
        self.recv_cq.as_ref().expect("the queue pair receives")
    }

    fn cqs(&self) -> impl Iterator<Item = &Arc<Cq>> {
        [&self.send_cq, &self.recv_cq].into_iter().flatten()
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
            for cq in self.cqs() {
                cq.queue().forget(self.qpn);
            }
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
        if self.doorbell.as_ref().is_some_and(Doorbell::ring) {
            self.vm.notify_doorbell(self.doorbell_queue)?;
        }
        Ok(())
    }

    /// Attaches it to a multicast group.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn attach(&self, gid: [u8; 16]) -> Result<(), Error> {
        self.vm.execute::<AttachMcast>(&self.multicast(gid))?;
        Ok(())
    }

    /// Detaches it from a multicast group.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn detach(&self, gid: [u8; 16]) -> Result<(), Error> {
        self.vm.execute::<DetachMcast>(&self.multicast(gid))?;
        Ok(())
    }

    fn multicast(&self, gid: [u8; 16]) -> Multicast {
        Multicast {
            gid,
            qpn: self.qpn,
            reserved: 0,
        }
    }

    /// Posts a send work request: a `UdWqe` to a UD or GSI queue pair, a `SendWqe` to others.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_send<E: SendEntry>(&self, wqe: &E, sges: &[Sge]) -> Result<(), Error> {
        self.send_queue().post(wqe, sges.iter().copied())?;
        self.ring()
    }

    /// Posts a send work request with inline data.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_inline<E: SendEntry>(&self, wqe: &E, data: &[u8]) -> Result<(), Error> {
        let mut batch = self.send_queue().batch();
        batch.push_inline(wqe, [data])?;
        batch.commit();
        self.ring()
    }

    /// Posts the bind of a memory window.
    ///
    /// # Errors
    /// If the queue is full.
    pub fn post_bind(&self, wr_id: u64, bind: &BindMw) -> Result<(), Error> {
        let wqe = SendWqe {
            opcode: wr_opcode::BIND_MW,
            wr_id,
            ..SendWqe::default()
        };
        let mut batch = self.send_queue().batch();
        batch.push_bind(&wqe, bind)?;
        batch.commit();
        self.ring()
    }

    /// Posts the registration of a fast region.
    ///
    /// # Errors
    /// If the queue is full.
    pub fn post_reg(&self, wr_id: u64, reg: &FastReg) -> Result<(), Error> {
        let wqe = SendWqe {
            opcode: wr_opcode::REG_MR,
            wr_id,
            ..SendWqe::default()
        };
        let mut batch = self.send_queue().batch();
        batch.push_reg(&wqe, reg)?;
        batch.commit();
        self.ring()
    }

    /// Posts the invalidation of a key.
    ///
    /// # Errors
    /// If the queue is full.
    pub fn invalidate(&self, wr_id: u64, key: u32) -> Result<(), Error> {
        let wqe = SendWqe {
            opcode: wr_opcode::LOCAL_INV,
            imm: key,
            wr_id,
            ..SendWqe::default()
        };
        self.post_send(&wqe, &[])
    }

    /// Posts a masked atomic operation.
    ///
    /// # Errors
    /// If the queue is full, or cannot take it.
    pub fn post_masked(
        &self,
        wqe: &SendWqe,
        operands: &MaskedOperands,
        sge: Sge,
    ) -> Result<(), Error> {
        let mut batch = self.send_queue().batch();
        batch.push_masked(wqe, operands, Some(sge))?;
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
        for cq in self.cqs() {
            cq.queue().forget(self.qpn);
            cq.queues
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&self.qpn);
        }
    }
}
