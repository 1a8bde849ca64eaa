// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Queues of users in the kernel: their rings are in the kernel's memory, and the driver is their
//! data path, too.
//!
//! Everything that posts, polls or arms works in any context. Locks are taken in the order:
//! completion queue, table of queue pairs; and send queue, region for fast registration. Receive
//! queues have locks of their own, inside of which no other is taken.
//!
//! Users take the id of a completion for a pointer, and call what it leads to. So what was posted
//! is recorded in memory that the device does not see, and a completion is handed on only if it
//! fits the record: otherwise the device is given up ([`Device::distrust`]).
use crate::device::Device;
use crate::pages::{PageTree, Tables};
use crate::sys::alloc::{Arc, Array, Box, Slot};
use crate::sys::dma::{DmaBuffer, Words};
use crate::sys::error::{Errno, Result};
use crate::sys::sync::{milliseconds, which, SpinLock};
use crate::sys::virtio::Notifier;
use crate::targets::QpTarget;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicU8, AtomicUsize, Ordering};
use virtio_rdma_driver_core::buffer::{CqLayout, QpCaps, QpLayout, RingLayout};
use virtio_rdma_driver_core::{
    srq_of, ArmMode, BadLayout, Completing, CompletionQueue, Doorbell, PostError, Private,
    Receives, RecvBatch, RecvQueue, SendBatch, SendQueue, SharedRecvQueue, Slots, Violation,
};
use virtio_rdma_spec::command::{opcode, CreateContext, CreateSrqResponse, HandleResponse};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::doorbell::BLOCK_PAGES;
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{qp_state, qp_type, wc_opcode, wc_status};
use virtio_rdma_spec::PAGE_SIZE;

impl From<BadLayout> for Errno {
    fn from(_: BadLayout) -> Self {
        Self::EINVAL
    }
}

impl From<PostError> for Errno {
    fn from(error: PostError) -> Self {
        match error {
            PostError::Full => Self::ENOMEM,
            PostError::TooManySges | PostError::InlineTooLong => Self::EINVAL,
        }
    }
}

/// The kernel's own context: its doorbell memory. It lives until the device is reset.
pub(crate) struct KernelContext {
    handle: u32,
    doorbell: Words,
}

impl KernelContext {
    /// Creates the context on the device.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let pages = usize::from(device.doorbell_queues()).saturating_mul(BLOCK_PAGES as usize);
        let doorbell = Arc::new(DmaBuffer::new(device.dma(), pages)?)?;
        let tree = PageTree::of_pages(device.dma(), doorbell.pages())?;
        let body = CreateContext {
            doorbell: tree.list(),
            reserved: 0,
        };
        let HandleResponse { handle, .. } = device.command(opcode::CREATE_CONTEXT, &body)?;
        Ok(Self {
            handle,
            doorbell: Words(doorbell),
        })
    }

    /// Its handle on the device.
    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }
}

/// Tells the device of new work in a queue.
struct DeviceDoorbell {
    doorbell: Doorbell<Words>,
    notifier: Notifier,
}

impl DeviceDoorbell {
    fn new(device: &Device, queue: u32, slot: u32) -> Result<Self> {
        let context = device.kernel_context().ok_or(Errno::EOPNOTSUPP)?;
        Ok(Self {
            doorbell: Doorbell::new(context.doorbell.clone(), device.status(), queue, slot)?,
            notifier: device.notifier(queue).ok_or(Errno::EINVAL)?,
        })
    }

    fn ring(&self) {
        if self.doorbell.ring() {
            self.notifier.notify();
        }
    }
}

/// The record of what was posted to a queue pair, by the index of the entry.
pub(crate) type QpRecord = Private<Array<AtomicU64>>;
/// The record of what was posted to a shared receive queue.
pub(crate) type SrqRecord = Slots<Array<AtomicU64>>;
/// Work requests that are posted to a send queue together.
pub(crate) type Sends<'q> = SendBatch<'q, Words, QpRecord>;

/// Memory for a record: zeroed words, of which the device has no address.
fn record_words(words: usize) -> Result<Array<AtomicU64>> {
    Array::new(words, |_| Ok(AtomicU64::new(0)))
}

/// Memory for a queue of this size (whole pages).
pub(crate) fn queue_memory(device: &Device, bytes: usize) -> Result<Arc<DmaBuffer>> {
    Arc::new(DmaBuffer::new(device.dma(), bytes / PAGE_SIZE as usize)?)
}

/// A completion.
pub(crate) struct Polled<'a> {
    pub(crate) cqe: Cqe,
    /// VLAN id of a datagram (0xffff: none), where completions tell.
    pub(crate) vlan: Option<u16>,
    pub(crate) qp: &'a QpTarget,
}

/// A completion queue.
pub(crate) struct KernelCq {
    lock: SpinLock,
    queue: CompletionQueue<Words>,
    /// Its entries have extensions.
    extended: bool,
    /// Its user waits for an event.
    armed: AtomicBool,
}

impl KernelCq {
    /// A completion queue in its zeroed memory.
    pub(crate) fn new(memory: Arc<DmaBuffer>, layout: &CqLayout) -> Result<Self> {
        Ok(Self {
            lock: SpinLock::new(which::CQ)?,
            queue: CompletionQueue::new(Words(memory), &layout.ring)?,
            extended: layout.ring.stride as usize > Cqe::SIZE,
            armed: AtomicBool::new(false),
        })
    }

    /// Takes up to `wanted` completions, of queue pairs that still are there; returns how many were
    /// given to `take`.
    pub(crate) fn poll(
        &self,
        device: &Device,
        wanted: usize,
        mut take: impl FnMut(usize, &Polled<'_>),
    ) -> usize {
        self.lock.with(|| {
            // Asked before the ring is looked at: a device that was lost before that writes no more
            // to it.
            let lost = device.is_lost();
            let mut taken = 0usize;
            // However the device fills the ring, this ends.
            for _ in 0..self.queue.entries() {
                if taken >= wanted || device.is_distrusted() {
                    break;
                }
                let Some(cqe) = self.queue.poll() else {
                    break;
                };
                let vlan = Some(self.queue.extension().vlan).filter(|_| self.extended);
                let mut known = false;
                device.qps().with(cqe.qp_num, |qp| {
                    known = true;
                    let judged = match qp.kernel() {
                        Some(kernel) => kernel.take(self, &cqe),
                        None => self.take_xrc(device, qp.xrcd(), &cqe),
                    };
                    match judged {
                        Ok(cqe) => {
                            take(taken, &Polled { cqe, vlan, qp });
                            taken = taken.wrapping_add(1);
                        }
                        Err(violation) => device.distrust(cqe.qp_num, violation),
                    }
                });
                if !known {
                    self.drop_xrc(device, &cqe);
                }
            }
            self.queue.publish();
            if lost && taken < wanted {
                device.qps().for_each(|qp| {
                    let Some(kernel) = qp.kernel() else {
                        return;
                    };
                    while taken < wanted {
                        let Some(mut cqe) = kernel.flush_next(self) else {
                            break;
                        };
                        cqe.status = kernel.status_after_loss(&cqe);
                        kernel.complete(&cqe);
                        let vlan = None;
                        take(taken, &Polled { cqe, vlan, qp });
                        taken = taken.wrapping_add(1);
                    }
                });
            }
            taken
        })
    }

    /// Asks for an event; returns whether there are completions that it will not come for.
    pub(crate) fn arm(&self, device: &Device, mode: ArmMode) -> bool {
        self.lock.with(|| {
            self.queue.arm(mode);
            // The thread that loses the device looks at this after it said that it is lost.
            self.armed.store(true, Ordering::SeqCst);
            let mut pending = self.queue.is_pending() && !device.is_distrusted();
            if device.is_lost() {
                device.qps().for_each(|qp| {
                    pending |= qp.kernel().is_some_and(|qp| qp.flush_next(self).is_some());
                });
            }
            pending
        })
    }

    /// Does its user wait for an event? Then no longer.
    pub(crate) fn take_armed(&self) -> bool {
        self.armed.swap(false, Ordering::SeqCst)
    }

    /// An event came.
    pub(crate) fn event_received(&self) {
        self.armed.store(false, Ordering::Relaxed);
        self.queue.event_received();
    }

    /// Judges the completion of a receive by an XRC target of a domain: it comes from a shared
    /// receive queue of that domain that completes here. Under the lock.
    fn take_xrc(
        &self,
        device: &Device,
        xrcd: Option<u32>,
        cqe: &Cqe,
    ) -> core::result::Result<Cqe, Violation> {
        let mut judged = Err(Violation::QueuePair);
        if cqe.opcode & wc_opcode::RECV != 0 && xrcd.is_some() {
            device.srqs().with(srq_of(cqe.wr_id), |srq| {
                if let Some(srq) = srq.kernel().filter(|srq| srq.completes_to(self)) {
                    if srq.xrcd() == xrcd {
                        judged = srq.queue.take(cqe, false);
                    }
                }
            });
        }
        judged
    }

    /// Drops the completion of a queue pair that is gone. Only of XRC targets can there be one.
    /// Under the lock.
    fn drop_xrc(&self, device: &Device, cqe: &Cqe) {
        if cqe.opcode & wc_opcode::RECV == 0 {
            return;
        }
        device.srqs().with(srq_of(cqe.wr_id), |srq| {
            if let Some(srq) = srq.kernel().filter(|srq| srq.completes_to(self)) {
                srq.drop_receive(cqe);
            }
        });
    }

    /// Drops the completions of a queue pair that is gone, and lets its `srq` use again what was
    /// for them.
    fn forget(&self, qpn: u32, srq: Option<&KernelSrq>) {
        self.lock.with(|| {
            self.queue.forget_each(qpn, |cqe| {
                if let Some(srq) = srq.filter(|_| cqe.opcode & wc_opcode::RECV != 0) {
                    srq.drop_receive(cqe);
                }
            });
        });
    }
}

/// A shared receive queue.
pub(crate) struct KernelSrq {
    doorbell: DeviceDoorbell,
    lock: SpinLock,
    queue: SharedRecvQueue<Words, SrqRecord>,
    /// XRC: the domain, and where receives complete.
    xrc: Option<(u32, Arc<KernelCq>)>,
}

impl KernelSrq {
    /// A shared receive queue that the device has created.
    pub(crate) fn new(
        device: &Device,
        memory: Arc<DmaBuffer>,
        ring: &RingLayout,
        max_sge: u32,
        xrc: Option<(u32, Arc<KernelCq>)>,
        made: &CreateSrqResponse,
    ) -> Result<Self> {
        let queue = SharedRecvQueue::new(Words(memory), ring, max_sge)?;
        let words = record_words(SrqRecord::words(ring.entries))?;
        Ok(Self {
            doorbell: DeviceDoorbell::new(device, made.doorbell_queue, made.slot)?,
            lock: SpinLock::new(which::RECV)?,
            queue: queue.recorded(words, made.srqn)?,
            xrc,
        })
    }

    /// Is it an XRC queue, and completes there?
    fn completes_to(&self, cq: &KernelCq) -> bool {
        let own = self.xrc.as_ref();
        own.is_some_and(|(_, own)| core::ptr::eq(&**own, cq))
    }

    /// Its XRC domain.
    fn xrcd(&self) -> Option<u32> {
        self.xrc.as_ref().map(|(xrcd, _)| *xrcd)
    }

    /// The completion of a receive is not handed on: its queue pair is gone.
    fn drop_receive(&self, cqe: &Cqe) {
        // Whatever it says, no more happens than that something else can be posted. (As of a
        // receive that failed: then its length does not matter.)
        let _ = self.queue.take(
            &Cqe {
                status: wc_status::WR_FLUSH_ERR,
                ..*cqe
            },
            false,
        );
    }

    /// Posts what `fill` puts into the batch; on an error what came before it.
    pub(crate) fn post(
        &self,
        fill: impl FnOnce(&mut RecvBatch<'_, Words, SrqRecord>) -> Result<()>,
    ) -> Result<()> {
        let (result, waited) = self.lock.with(|| {
            let mut batch = self.queue.batch();
            let result = fill(&mut batch);
            (result, batch.commit())
        });
        if waited {
            self.doorbell.ring();
        }
        result
    }
}

/// What a queue pair of the kernel is made of.
pub(crate) struct KernelQpInit<'a> {
    pub(crate) qp_type: u8,
    pub(crate) caps: &'a QpCaps,
    pub(crate) sq: &'a RingLayout,
    pub(crate) rq: &'a RingLayout,
    pub(crate) memory: Arc<DmaBuffer>,
    pub(crate) signal_all: bool,
    pub(crate) cqs: [Arc<KernelCq>; 2],
    /// Where its receives come from, if not from a queue of its own.
    pub(crate) srq: Option<Arc<KernelSrq>>,
    /// As the device answered.
    pub(crate) number: u32,
    pub(crate) doorbell_queue: u32,
    pub(crate) slot: u32,
}

/// The layout of the buffer of a queue pair.
pub(crate) fn qp_layout(qp_type: u8, caps: &QpCaps, masked_atomics: bool) -> Result<QpLayout> {
    let of = QpType::of(qp_type).ok_or(Errno::EINVAL)?;
    let layout = if of.datagram {
        QpLayout::datagram(caps)
    } else if of.sends && of.acknowledged && masked_atomics {
        QpLayout::with_masked_atomics(caps)
    } else {
        QpLayout::new(caps)
    };
    layout.ok_or(Errno::EINVAL)
}

/// The latest sends of a queue pair that failed because the device was lost: by identifier and
/// time.
///
/// Newer kernels (6.15) repeat a management datagram that failed, for more than a minute, if an
/// answer to it is due; all the while those that wait for what becomes of it keep the device. They
/// give up when it cannot be posted again.
struct FailedSends {
    next: AtomicUsize,
    sends: [(AtomicU64, AtomicU64); 64],
}

/// How long after its failure a send with the same identifier is a repetition, in milliseconds.
/// Before, it may be another one at the same address in memory, which is to fail like the first.
const REPEATED_MS: u64 = 1000;

impl FailedSends {
    fn new() -> Self {
        Self {
            next: AtomicUsize::new(0),
            sends: [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64],
        }
    }

    /// Adds one, in place of the oldest. Under the lock of the completion queue.
    fn add(&self, wr_id: u64) {
        let at = self.next.fetch_add(1, Ordering::Relaxed) % self.sends.len();
        if let Some((id, time)) = self.sends.get(at) {
            time.store(milliseconds(), Ordering::Relaxed);
            id.store(wr_id, Ordering::Release);
        }
    }

    fn contains(&self, wr_id: u64) -> bool {
        let now = milliseconds();
        self.sends.iter().any(|(id, time)| {
            id.load(Ordering::Acquire) == wr_id
                && wr_id != 0
                && now.wrapping_sub(time.load(Ordering::Relaxed)) >= REPEATED_MS
        })
    }
}

/// A queue pair.
pub(crate) struct KernelQp {
    number: u32,
    datagram: bool,
    /// Of the queue pair for management datagrams: its sends that failed because the device was
    /// lost.
    management: Option<Box<FailedSends>>,
    /// The device was lost, and a work request has failed because of that.
    failed: AtomicBool,
    /// The state that it was last brought to by its user.
    state: AtomicU8,
    doorbell: DeviceDoorbell,
    send_lock: SpinLock,
    send: Option<SendQueue<Words, QpRecord>>,
    /// What registrations in the send queue need until they have completed, by the index of their
    /// entry.
    registrations: Array<Slot<Tables>>,
    recv_lock: SpinLock,
    recv: Option<RecvQueue<Words, QpRecord>>,
    srq: Option<Arc<KernelSrq>>,
    cqs: [Arc<KernelCq>; 2],
}

impl KernelQp {
    /// A queue pair that the device has created.
    pub(crate) fn new(device: &Device, init: KernelQpInit<'_>) -> Result<Self> {
        let memory = Words(init.memory);
        let datagram = QpType::of(init.qp_type).is_some_and(|of| of.datagram);
        let (caps, sq, rq) = (init.caps, init.sq, init.rq);
        let exists = |ring: &RingLayout| ring.entries != 0;
        let send = exists(sq).then(|| -> Result<_> {
            let make = if datagram {
                SendQueue::datagram
            } else {
                SendQueue::new
            };
            let queue = make(memory.clone(), sq, caps.max_send_sge, caps.max_inline)?;
            let words = record_words(QpRecord::words(sq.entries))?;
            Ok(queue.recorded(words, init.signal_all)?)
        });
        let registrations = match device.features().has(feature::FAST_REG) && !datagram {
            true => sq.entries as usize,
            false => 0,
        };
        let recv = exists(rq).then(|| -> Result<_> {
            let queue = RecvQueue::new(memory.clone(), rq, caps.max_recv_sge)?;
            let words = record_words(QpRecord::words(rq.entries))?;
            Ok(queue.recorded(words)?)
        });
        let management = (init.qp_type == qp_type::GSI).then(|| Box::new(FailedSends::new()));
        Ok(Self {
            number: init.number,
            datagram,
            management: management.transpose()?,
            failed: AtomicBool::new(false),
            state: AtomicU8::new(qp_state::RESET),
            doorbell: DeviceDoorbell::new(device, init.doorbell_queue, init.slot)?,
            send_lock: SpinLock::new(which::SEND)?,
            send: send.transpose()?,
            registrations: Array::new(registrations, |_| Ok(Slot::new()))?,
            recv_lock: SpinLock::new(which::RECV)?,
            recv: recv.transpose()?,
            srq: init.srq,
            cqs: init.cqs,
        })
    }

    /// Do its work requests carry addresses?
    pub(crate) fn is_datagram(&self) -> bool {
        self.datagram
    }

    /// Posts what `fill` puts into the batch; on an error what came before it.
    pub(crate) fn post_send(&self, fill: impl FnOnce(&mut Sends<'_>) -> Result<()>) -> Result<()> {
        let queue = self.send.as_ref().ok_or(Errno::EINVAL)?;
        if self.state.load(Ordering::Acquire) < qp_state::RTS {
            return Err(Errno::EINVAL);
        }
        let (result, any) = self.send_lock.with(|| {
            let mut batch = queue.batch();
            let result = fill(&mut batch);
            (result, batch.commit())
        });
        if any {
            self.doorbell.ring();
        }
        result
    }

    /// Posts what `fill` puts into the batch; on an error what came before it.
    pub(crate) fn post_recv(
        &self,
        fill: impl FnOnce(&mut RecvBatch<'_, Words, QpRecord>) -> Result<()>,
    ) -> Result<()> {
        let queue = self.recv.as_ref().ok_or(Errno::EINVAL)?;
        if self.state.load(Ordering::Acquire) == qp_state::RESET {
            return Err(Errno::EINVAL);
        }
        let (result, waited) = self.recv_lock.with(|| {
            let mut batch = queue.batch();
            let result = fill(&mut batch);
            (result, batch.commit())
        });
        if waited {
            self.doorbell.ring();
        }
        result
    }

    /// Which of its queues complete to this completion queue.
    fn completing_to(&self, cq: &KernelCq) -> Completing<'_, Words, Array<AtomicU64>> {
        let [sends, receives] = self
            .cqs
            .each_ref()
            .map(|own| core::ptr::eq::<KernelCq>(&**own, cq));
        let shared = self.srq.as_ref().map(|srq| Receives::Shared(&srq.queue));
        let own = self.recv.as_ref().map(Receives::Own);
        Completing {
            datagram: self.datagram,
            sends: self.send.as_ref().filter(|_| sends),
            receives: shared.or(own).filter(|_| receives),
        }
    }

    /// Judges a completion of a completion queue, and frees what it completes: what its user is
    /// told is returned. Under the lock of the completion queue.
    fn take(&self, cq: &KernelCq, cqe: &Cqe) -> core::result::Result<Cqe, Violation> {
        // Before the entries can be used again.
        self.completing_to(cq)
            .take(cqe, |index| self.clear_registration(index))
    }

    fn clear_registration(&self, index: u32) {
        if let Some(slot) = self.registrations.get(index as usize) {
            slot.clear();
        }
    }

    /// Frees what was flushed. Under the lock of the completion queue.
    fn complete(&self, cqe: &Cqe) {
        if cqe.opcode & wc_opcode::RECV != 0 {
            if let Some(queue) = &self.recv {
                queue.complete(cqe.wqe_index);
            }
        } else if let Some(queue) = &self.send {
            queue
                .completing(cqe.wqe_index)
                .for_each(|index| self.clear_registration(index));
            queue.complete(cqe.wqe_index);
        }
    }

    /// The completion of the next work request that a lost device has left behind, if it is for
    /// this completion queue. Under the lock of that.
    fn flush_next(&self, cq: &KernelCq) -> Option<Cqe> {
        let Completing {
            sends, receives, ..
        } = self.completing_to(cq);
        let receives = match receives {
            Some(Receives::Own(queue)) => Some(queue),
            // They are not the queue pair's.
            Some(Receives::Shared(_)) | None => None,
        };
        sends
            .and_then(|queue| queue.flush_next(self.number))
            .or_else(|| receives.and_then(|queue| queue.flush_next(self.number)))
    }

    /// What becomes of a work request that a lost device has left behind.
    ///
    /// Users take a flush for a consequence of what they did themselves, and some wait for more:
    /// the first one of a queue pair fails, as on one that goes into the ERR state, and tells them
    /// that they have to end the connection. The communication managers wait for what comes of a
    /// management datagram, unless that one failed.
    fn status_after_loss(&self, cqe: &Cqe) -> u8 {
        let is_send = cqe.opcode & wc_opcode::RECV == 0;
        let fails = match &self.management {
            Some(failed) => {
                if is_send {
                    failed.add(cqe.wr_id);
                }
                is_send
            }
            None => !self.failed.swap(true, Ordering::Relaxed),
        };
        match fails {
            true => wc_status::FATAL_ERR,
            false => cqe.status,
        }
    }

    /// Is this work request, posted to a lost device, one that has failed before and is repeated?
    pub(crate) fn is_repeated(&self, wr_id: u64) -> bool {
        let failed = self.management.as_ref();
        failed.is_some_and(|failed| failed.contains(wr_id))
    }

    /// Keeps tables as long as the entry with this index, which is being posted, is in the send
    /// queue.
    pub(crate) fn hold(&self, index: u32, tables: Arc<Tables>) {
        if let Some(slot) = self.registrations.get(index as usize) {
            slot.put(tables);
        }
    }

    /// Its user brought it to this state.
    pub(crate) fn changed(&self, state: u8) {
        self.state.store(state, Ordering::Release);
        if state == qp_state::RESET {
            self.forget();
            self.send_lock.with(|| {
                if let Some(queue) = &self.send {
                    queue.reset();
                }
                self.registrations.iter().for_each(Slot::clear);
            });
            self.recv_lock.with(|| {
                if let Some(queue) = &self.recv {
                    queue.reset();
                }
            });
        }
    }

    /// Drops its completions: the device writes none any more.
    pub(crate) fn forget(&self) {
        for cq in &self.cqs {
            cq.forget(self.number, self.srq.as_deref());
        }
    }
}
