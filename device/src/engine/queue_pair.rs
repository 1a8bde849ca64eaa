// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs (specification: "Queue pairs").
//!
//! A queue pair belongs to one worker, which runs its send queue. Its responder runs on the worker
//! of its peer. The two halves have a lock each, taken for a bounded poll, in the order
//! send queue before responder (of the peer). A worker that waits for what one of two connected
//! queue pairs of its own sends has all four: no other takes a send queue, and nobody waits for a
//! lock with a responder's.
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::facts::{Failure, QpType};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_state, qp_type, MASK_24};

use super::binding::{serial, Binding, Peers};
use super::gather::Gather;
use super::payload_of;
use super::responder::Responder;
use super::send_queue::SendQueue;
use super::tables::Gid;
use super::vm::{Schedule, Vm};
use crate::footprint::Share;
use crate::limits::{GID_TABLE_LEN, MAX_RD_ATOMIC};
use crate::memory::{lines, prefetch_from, GuestMemory, Hint, Pages};
use crate::verbs::cq::Cq;
use crate::verbs::numbers::Numbered;
use crate::verbs::srq::{Srq, Waiter};
use crate::verbs::{state, Error};

/// Cache lines that a poll needs of `Qp::hints` and what follows it.
const OWN_LINES: usize = 5;

/// Cache lines that a peer's poll needs, from the beginning.
const PEER_LINES: usize = 3;

/// Entries that are prefetched before a poll, at most.
const ENTRIES_AHEAD: usize = 8;

/// All that a peer may be granted.
const GRANTABLE: u32 = access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// The attributes of a queue pair in RESET. One with many peers has no access flags of its own, and
/// waits for receives as long as it takes, unless it is told otherwise. One of iWARP has none, either.
fn initial(facts: &QpType) -> QpAttr {
    let many = facts.datagram && facts.acknowledged;
    let access_flags = match facts.qp_type {
        qp_type::IWARP => GRANTABLE,
        _ if many => GRANTABLE & !access::REMOTE_ATOMIC,
        _ => 0,
    };
    QpAttr {
        port_num: 1,
        access_flags,
        max_rd_atomic: u8::from(many),
        max_dest_rd_atomic: u8::from(many),
        rnr_retry: if many { 7 } else { 0 },
        min_rnr_timer: if many { 12 } else { 0 },
        ..QpAttr::default()
    }
}

/// A queue pair.
// In this order: what every poll needs is on few cache lines, and so is what the peer needs.
#[repr(C, align(64))]
pub struct Qp {
    /// Whose it is.
    pub vm: Arc<Vm>,
    /// Completion queue of the send queue; XRC_TGT has none.
    pub send_cq: Option<Arc<Cq>>,
    /// Completion queue of the receive queue; XRC_TGT and XRC_INI have none.
    pub recv_cq: Option<Arc<Cq>>,
    /// Its number.
    pub number: u32,
    /// Protection domain.
    pub pd: u32,
    /// What tells it from all other queue pairs of this process, those with its number included.
    pub(super) serial: u64,
    /// The serial number of its VM, which would be farther away there.
    pub(super) vm_serial: u64,
    /// The index of its worker.
    pub worker_index: u16,
    /// What is so of its type.
    pub facts: &'static QpType,
    /// Type: `qp_type`.
    pub qp_type: u8,
    /// Multicast messages of its own VM do not reach it.
    pub block_multicast_loopback: bool,
    /// Its VM has caps.
    capped: AtomicBool,
    /// Its messages, or some of them, leave this process.
    leaves: AtomicBool,
    state: AtomicU8,
    /// In a run queue, or about to be.
    pub(crate) scheduled: AtomicBool,
    /// A parked send queue must try again now: what it waited for came.
    pub(crate) wake: AtomicBool,
    /// A sender waits for a receive work request of ours, or is about to.
    pub(crate) awaited: AtomicBool,
    /// Destroyed: leave it alone.
    pub(crate) dead: AtomicBool,
    responder: Mutex<Responder>,
    /// What its next poll will need.
    pub(crate) hints: PrefetchHints,
    /// Context: whose doorbell memory it uses.
    pub context: u32,
    /// Slot in the doorbell block of its worker.
    pub slot: u32,
    send_queue: Mutex<SendQueue>,
    /// XRC domain (XRC_TGT).
    pub xrcd: u32,
    /// Shared receive queue that it was created with.
    pub srq: Option<Arc<Srq>>,
    /// When its worker's timer for it ends, nanoseconds. Only the worker uses it.
    pub(crate) timer: Mutex<u64>,
    attr: Mutex<QpAttr>,
    /// The destination GID, while it is kept for the device that had it.
    kept_gid: Mutex<Option<Gid>>,
    /// How often it was reset: what a fabric keeps of an earlier life is of no use.
    life: AtomicU32,
    /// The worker that runs it.
    worker: Arc<dyn Schedule>,
    /// For itself. The page list of its buffer has its own.
    _share: Share,
}

/// What the next poll of a queue pair will need beside the queue pair itself, if it is as the last
/// one: where it is.
#[derive(Debug, Default)]
pub(crate) struct PrefetchHints {
    /// The next entry of its send queue.
    entry: Hint,
    /// Its buffer.
    buffer: Hint,
    /// The queue pair that it sends to.
    peer: Hint,
    /// Entries of the last poll.
    entries: AtomicU32,
    /// Whether it is worth letting its work requests gather.
    pub(crate) gather: Gather,
}

impl PrefetchHints {
    /// It had `entries` entries in its last poll. The next one will be `entry`, in `buffer`, and
    /// for `peer`.
    #[inline(always)]
    pub(crate) fn set(&self, entries: u32, entry: Option<&AtomicU64>, buffer: &Pages, peer: &Qp) {
        self.entry.set(entry);
        self.buffer.set(Some(buffer));
        self.peer.set(Some(peer));
        self.entries.store(entries, Ordering::Relaxed);
    }

    /// Entries of the last poll.
    #[inline(always)]
    pub(crate) fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Has the processor fetch the entry.
    #[inline(always)]
    pub(crate) fn prefetch_entry(&self) {
        self.entry.prefetch(1);
    }

    /// Has the processor fetch all of it.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let entries = self.entries() as usize;
        self.entry.prefetch(entries.min(ENTRIES_AHEAD));
        self.buffer.prefetch(lines::<Pages>());
        self.peer.prefetch(PEER_LINES);
    }
}

impl std::fmt::Debug for Qp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qp")
            .field("number", &self.number)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

/// What a queue pair is made of.
pub(crate) struct QpParts {
    pub number: u32,
    pub vm: Arc<Vm>,
    pub worker: Arc<dyn Schedule>,
    pub worker_index: u16,
    pub pd: u32,
    pub context: u32,
    pub slot: u32,
    pub facts: &'static QpType,
    pub share: Share,
    pub xrcd: u32,
    pub block_multicast_loopback: bool,
    pub send_cq: Option<Arc<Cq>>,
    pub recv_cq: Option<Arc<Cq>>,
    pub srq: Option<Arc<Srq>>,
    pub send_queue: SendQueue,
    pub responder: Responder,
}

impl Numbered for Arc<Qp> {
    #[inline(always)]
    fn number(&self) -> u32 {
        self.number
    }
}

impl Qp {
    pub(crate) fn new(parts: QpParts) -> Self {
        let QpParts {
            number,
            vm,
            worker,
            worker_index,
            pd,
            context,
            slot,
            facts,
            share,
            xrcd,
            block_multicast_loopback,
            send_cq,
            recv_cq,
            srq,
            ..
        } = parts;
        let (send_queue, responder) = (parts.send_queue, parts.responder);
        Self {
            capped: AtomicBool::new(vm.caps().is_some()),
            // Where a datagram goes, each says itself. That a queue pair of iWARP stays, its connection
            // shows.
            leaves: AtomicBool::new(
                facts.qp_type == qp_type::IWARP || (facts.datagram && vm.uplink().is_some()),
            ),
            number,
            serial: serial(),
            vm_serial: vm.serial(),
            vm,
            worker,
            worker_index,
            pd,
            context,
            slot,
            facts,
            qp_type: facts.qp_type,
            xrcd,
            block_multicast_loopback,
            send_cq,
            recv_cq,
            srq,
            state: AtomicU8::new(qp_state::RESET),
            scheduled: AtomicBool::new(false),
            wake: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            timer: Mutex::new(0),
            hints: PrefetchHints::default(),
            attr: Mutex::new(initial(facts)),
            kept_gid: Mutex::default(),
            life: AtomicU32::new(0),
            send_queue: Mutex::new(send_queue),
            responder: Mutex::new(responder),
            _share: share,
        }
    }

    /// What tells it from all other queue pairs of this process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Whether its messages, or of datagrams some, leave this process. A connected queue pair's do
    /// if nobody in this process had the destination GID when it went to RTR.
    #[inline(always)]
    pub(crate) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Relaxed)
    }

    /// How often it was reset. With send queue or responder locked it stays the same.
    pub(crate) fn life(&self) -> u32 {
        self.life.load(Ordering::SeqCst)
    }

    /// Has the processor fetch what a poll needs.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        prefetch_from(self, 1);
        prefetch_from(&self.hints, OWN_LINES);
    }

    /// Has the processor fetch all of it.
    pub(crate) fn prefetch_all(&self) {
        prefetch_from(self, lines::<Self>());
    }

    /// The state: `qp_state`.
    #[must_use]
    pub fn state(&self) -> u8 {
        self.state.load(Ordering::SeqCst)
    }

    /// Whether it takes messages. In SQE only its send queue is in error. (With its responder locked,
    /// this stays so.)
    #[inline(always)]
    pub(crate) fn listens(&self) -> bool {
        matches!(
            self.state(),
            qp_state::RTR | qp_state::RTS | qp_state::SQD | qp_state::SQE
        )
    }

    /// Goes to the error state, from any state but RESET, and lets the worker flush. Returns
    /// whether this call made the change.
    pub(crate) fn fail(self: &Arc<Self>) -> bool {
        let changed = self
            .state
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
                (state != qp_state::ERR && state != qp_state::RESET).then_some(qp_state::ERR)
            })
            .is_ok();
        if changed {
            self.comes_back();
            self.schedule();
        }
        changed
    }

    /// A queue pair of iWARP whose messages stayed in this process goes to another state than RTS, or is
    /// destroyed: its connection has to know.
    pub(crate) fn comes_back(&self) {
        if self.qp_type == qp_type::IWARP {
            self.leaves.store(true, Ordering::Relaxed);
        }
    }

    /// A send work request failed: the queue pair goes to the error state, or, where nobody is told
    /// of lost messages anyway, only its send queue does.
    pub(crate) fn fail_send(self: &Arc<Self>) {
        match self.facts.failure {
            Failure::QueuePair => {
                self.fail();
                return;
            }
            Failure::WorkRequest => return,
            Failure::SendQueue => {}
        }
        let changed = self.state.compare_exchange(
            qp_state::RTS,
            qp_state::SQE,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        match changed {
            Ok(_) => self.schedule(),
            Err(_) => {
                self.fail();
            }
        }
    }

    /// A message that came failed: the queue pair goes to the error state, unless one of many peers
    /// would end it for the others. Returns whether this call made the change.
    pub(crate) fn fail_receive(self: &Arc<Self>) -> bool {
        self.facts.failure != Failure::WorkRequest && self.fail()
    }

    /// Whether one of its completion queues is in error.
    pub(crate) fn cq_errored(&self) -> bool {
        let errored = |cq: &Option<Arc<Cq>>| cq.as_ref().is_some_and(|cq| cq.errored());
        errored(&self.send_cq) || errored(&self.recv_cq)
    }

    /// Has its worker poll it soon.
    pub(crate) fn schedule(self: &Arc<Self>) {
        self.worker.schedule(self);
    }

    /// Whether its VM has caps.
    #[inline]
    pub(crate) fn is_capped(&self) -> bool {
        self.capped.load(Ordering::Relaxed)
    }

    /// Its VM has other caps than before, or none: what waits for the old ones looks again.
    pub(super) fn set_capped(self: &Arc<Self>, capped: bool) {
        if self.capped.swap(capped, Ordering::Relaxed) {
            self.schedule();
        }
    }

    /// The send queue.
    pub(crate) fn send_queue(&self) -> MutexGuard<'_, SendQueue> {
        lock(&self.send_queue)
    }

    /// The send queue, unless somebody has it.
    pub(crate) fn try_send_queue(&self) -> Option<MutexGuard<'_, SendQueue>> {
        self.send_queue.try_lock().ok()
    }

    /// The responder.
    pub(crate) fn responder(&self) -> MutexGuard<'_, Responder> {
        lock(&self.responder)
    }

    /// The attributes, as QUERY_QP gives them.
    #[must_use]
    pub fn query(&self) -> QpAttr {
        let attr = *self.attr.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state();
        let draining = state == qp_state::SQD && self.send_queue().in_progress();
        QpAttr {
            qp_state: state,
            cur_qp_state: state,
            sq_draining: u8::from(draining),
            ..attr
        }
    }

    /// Changes attributes and state. Who the peer is, `peers` says.
    ///
    /// # Errors
    /// [`Error::Invalid`] or [`Error::NotSupported`], with nothing changed.
    pub(crate) fn modify(
        self: &Arc<Self>,
        peers: &impl Peers,
        mask: u32,
        new: &QpAttr,
    ) -> Result<(), Error> {
        let mut attr = self.attr.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.state();
        let next = if mask & qp_attr::STATE != 0 {
            new.qp_state
        } else {
            current
        };
        if mask & qp_attr::CUR_STATE != 0 && new.cur_qp_state != current {
            return Err(Error::Invalid);
        }
        state::check(self.qp_type, current, next, mask)?;
        check_values(mask, new)?;
        if self.qp_type == qp_type::IWARP && next == qp_state::SQD && current != qp_state::RTS {
            return Ok(());
        }
        if next == qp_state::RESET {
            // Both halves at once, so that nobody sees one of them in the old life.
            let mut send_queue = self.send_queue();
            let mut responder = self.responder();
            self.state.store(qp_state::RESET, Ordering::SeqCst);
            self.life.fetch_add(1, Ordering::SeqCst);
            send_queue.reset();
            responder.reset();
            *attr = initial(self.facts);
            drop((send_queue, responder));
            self.forget_peer(peers);
            if self.qp_type == qp_type::IWARP {
                self.comes_back();
                self.schedule();
            }
            return Ok(());
        }
        // Of iWARP, drivers say nothing that is meant.
        let meant = match self.qp_type {
            qp_type::IWARP => mask & !qp_attr::ACCESS_FLAGS,
            _ => mask,
        };
        let merged = merge(meant, &attr, new);
        let binding = self.bind(peers, current, next, &merged, attr.av.dgid);
        {
            let mut send_queue = self.send_queue();
            let mut responder = self.responder();
            send_queue.configure(&merged);
            if let Some(binding) = binding {
                send_queue.binding = binding;
                responder.binding = binding;
                let leaves = self.vm.uplink().is_some() && binding == Binding::default();
                self.leaves.store(leaves, Ordering::Relaxed);
                let port = self.vm.active_mtu();
                if leaves && merged.path_mtu > port {
                    self.vm.warn(format_args!(
                        "QP {}: has a path MTU of {}, but the port one of {}: packets may be lost",
                        self.number,
                        payload_of(merged.path_mtu),
                        payload_of(port)
                    ));
                }
            }
            if (current, next) == (qp_state::RTS, qp_state::SQD) {
                let notify = mask & qp_attr::EN_SQD_ASYNC_NOTIFY != 0;
                send_queue.drain(notify && new.en_sqd_async_notify != 0);
            }
            responder.configure(&merged);
            if next == qp_state::ERR {
                self.state.store(next, Ordering::SeqCst);
            } else {
                if (current, next) == (qp_state::SQE, qp_state::RTS) {
                    // What was posted before must not be executed now. Its worker flushes it.
                    send_queue.outdate();
                }
                // The worker may have failed the queue pair meanwhile: then it stays in the
                // error state.
                self.state
                    .compare_exchange(current, next, Ordering::SeqCst, Ordering::SeqCst)
                    .map_err(|_| Error::Invalid)?;
            }
        }
        *attr = merged;
        drop(attr);
        if next != qp_state::RTS {
            self.comes_back();
        }
        self.schedule();
        Ok(())
    }

    /// The connection of a queue pair of iWARP is there: it goes from INIT to RTS. `partner` is the
    /// other end, by the GID of its VM and its number, if messages go to it directly; `ord` and `ird`
    /// are how many RDMA READs either end may have under way. Returns false if the queue pair is not in
    /// INIT any longer.
    pub(crate) fn establish(
        self: &Arc<Self>,
        peers: &impl Peers,
        partner: Option<(Gid, u32)>,
        [ord, ird]: [u8; 2],
    ) -> bool {
        let mut attr = lock(&self.attr);
        let mut with = QpAttr {
            max_rd_atomic: ord,
            max_dest_rd_atomic: ird,
            ..*attr
        };
        let mut binding = Binding::default();
        if let Some((gid, number)) = partner {
            with.av.dgid = gid;
            with.dest_qp_num = number;
            with.path_mtu = mtu::MTU_4096;
            // The other end is there, or will never be: 70 ms, four times.
            with.timeout = 14;
            with.retry_cnt = 3;
            self.forget_peer(peers);
            let (found, kept) = peers.connect(&self.vm, gid);
            *lock(&self.kept_gid) = kept.then_some(gid);
            binding = found;
        }
        let mut send_queue = self.send_queue();
        let mut responder = self.responder();
        send_queue.configure(&with);
        responder.configure(&with);
        send_queue.binding = binding;
        responder.binding = binding;
        let (from, to) = (qp_state::INIT, qp_state::RTS);
        let (order, state) = (Ordering::SeqCst, &self.state);
        let changed = state.compare_exchange(from, to, order, order).is_ok();
        if changed {
            self.leaves.store(partner.is_none(), Ordering::Relaxed);
            *attr = with;
        }
        drop((send_queue, responder, attr));
        self.schedule();
        changed
    }

    /// Finds out who its peer is when it goes to RTR. Later the path to the peer may change, the
    /// peer does not.
    fn bind(
        &self,
        peers: &impl Peers,
        current: u8,
        next: u8,
        merged: &QpAttr,
        old_dgid: Gid,
    ) -> Option<Binding> {
        let connects = (current, next) == (qp_state::INIT, qp_state::RTR);
        let dgid = merged.av.dgid;
        if self.facts.datagram || !(connects || dgid != old_dgid) {
            return None;
        }
        self.forget_peer(peers);
        let (binding, kept) = peers.connect(&self.vm, dgid);
        *lock(&self.kept_gid) = kept.then_some(dgid);
        connects.then_some(binding)
    }

    /// It names no peer any longer.
    pub(crate) fn forget_peer(&self, peers: &impl Peers) {
        let kept = lock(&self.kept_gid).take();
        if let Some(gid) = kept {
            peers.forget(&self.vm, gid);
        }
    }

    /// Resolves the buffer anew after a change of the memory table.
    pub(crate) fn rebase(self: &Arc<Self>, memory: Option<&GuestMemory>) {
        let (mut send_queue, mut responder) = (self.send_queue(), self.responder());
        // The two halves share it: while they have another, it is ours alone.
        let none = Arc::new(Pages::none());
        responder.buffer = none.clone();
        let mut buffer = std::mem::replace(&mut send_queue.buffer, none);
        if let Some(buffer) = Arc::get_mut(&mut buffer) {
            buffer.rebase(memory);
        }
        send_queue.rebase(buffer.clone());
        responder.buffer = buffer;
    }
}

impl Waiter for Qp {
    fn wake(self: Arc<Self>) {
        self.wake.store(true, Ordering::SeqCst);
        self.schedule();
    }
}

/// The attributes of `mask` from `new`, the others from `old`.
fn merge(mask: u32, old: &QpAttr, new: &QpAttr) -> QpAttr {
    let mut merged = *old;
    let has = |bit| mask & bit != 0;
    if has(qp_attr::EN_SQD_ASYNC_NOTIFY) {
        merged.en_sqd_async_notify = new.en_sqd_async_notify;
    }
    if has(qp_attr::ACCESS_FLAGS) {
        merged.access_flags = new.access_flags;
    }
    if has(qp_attr::PKEY_INDEX) {
        merged.pkey_index = new.pkey_index;
    }
    if has(qp_attr::PORT) {
        merged.port_num = new.port_num;
    }
    if has(qp_attr::QKEY) {
        merged.qkey = new.qkey;
    }
    if has(qp_attr::AV) {
        merged.av = new.av;
    }
    if has(qp_attr::PATH_MTU) {
        merged.path_mtu = new.path_mtu;
    }
    if has(qp_attr::TIMEOUT) {
        merged.timeout = new.timeout;
    }
    if has(qp_attr::RETRY_CNT) {
        merged.retry_cnt = new.retry_cnt;
    }
    if has(qp_attr::RNR_RETRY) {
        merged.rnr_retry = new.rnr_retry;
    }
    if has(qp_attr::RQ_PSN) {
        merged.rq_psn = new.rq_psn;
    }
    if has(qp_attr::MAX_QP_RD_ATOMIC) {
        merged.max_rd_atomic = new.max_rd_atomic;
    }
    if has(qp_attr::MIN_RNR_TIMER) {
        merged.min_rnr_timer = new.min_rnr_timer;
    }
    if has(qp_attr::SQ_PSN) {
        merged.sq_psn = new.sq_psn;
    }
    if has(qp_attr::MAX_DEST_RD_ATOMIC) {
        merged.max_dest_rd_atomic = new.max_dest_rd_atomic;
    }
    if has(qp_attr::DEST_QPN) {
        merged.dest_qp_num = new.dest_qp_num;
    }
    merged
}

/// Checks the values of the attributes of `mask`.
fn check_values(mask: u32, new: &QpAttr) -> Result<(), Error> {
    let has = |bit| mask & bit != 0;
    let known_access = access::ALL
        .iter()
        .fold(0, |all, (_, bit)| all | *bit as u32);
    let good = (!has(qp_attr::PORT) || new.port_num == 1)
        && (!has(qp_attr::PKEY_INDEX) || new.pkey_index == 0)
        && (!has(qp_attr::ACCESS_FLAGS) || new.access_flags & !known_access == 0)
        && (!has(qp_attr::PATH_MTU) || (mtu::MTU_256..=mtu::MTU_4096).contains(&new.path_mtu))
        && (!has(qp_attr::TIMEOUT) || new.timeout <= 31)
        && (!has(qp_attr::RETRY_CNT) || new.retry_cnt <= 7)
        && (!has(qp_attr::RNR_RETRY) || new.rnr_retry <= 7)
        && (!has(qp_attr::MIN_RNR_TIMER) || new.min_rnr_timer <= 31)
        && (!has(qp_attr::RQ_PSN) || new.rq_psn <= MASK_24)
        && (!has(qp_attr::SQ_PSN) || new.sq_psn <= MASK_24)
        && (!has(qp_attr::DEST_QPN) || new.dest_qp_num <= MASK_24)
        && (!has(qp_attr::MAX_QP_RD_ATOMIC) || new.max_rd_atomic <= MAX_RD_ATOMIC)
        && (!has(qp_attr::MAX_DEST_RD_ATOMIC) || new.max_dest_rd_atomic <= MAX_RD_ATOMIC)
        && (!has(qp_attr::EN_SQD_ASYNC_NOTIFY) || new.en_sqd_async_notify <= 1)
        && (!has(qp_attr::AV)
            || (new.av.port_num == 1
                && new.av.sl <= 15
                && new.av.flow_label <= 0xf_ffff
                && usize::from(new.av.sgid_index) < GID_TABLE_LEN
                && new.av.dgid != [0; 16]));
    if good {
        Ok(())
    } else {
        Err(Error::Invalid)
    }
}
