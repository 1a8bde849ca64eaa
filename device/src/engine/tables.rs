// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything one VM has: the tables of its objects.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use virtio_rdma_spec::doorbell::{self, STATUS_STRIDE};

use super::events::EventSink;
use super::queue_pair::Qp;
use super::vm::Vm;
use crate::footprint::{grown, listed, Footprint, Share};
use crate::limits::{Limits, GID_TABLE_LEN, GSI_QPN};
use crate::memory::{GuestMemory, Pages};
use crate::verbs::cq::{Cq, L2Source};
pub use crate::verbs::gid_policy::Gid;
use crate::verbs::keys::Keys;
use crate::verbs::numbers::{Numbers, Order, NUMBERS};
use crate::verbs::slab::Slab;
use crate::verbs::srq::Srq;
use crate::verbs::Error;

/// A protection domain.
#[derive(Debug, Default)]
pub struct Pd {
    /// Objects in it.
    pub users: u32,
}

/// The target of a doorbell: what it rings for.
#[derive(Debug, Clone)]
pub enum DoorbellTarget {
    /// A queue pair has new work.
    Qp(Arc<Qp>),
    /// Receives were posted to a shared receive queue that somebody waits for.
    Srq(Arc<Srq>),
}

/// What a context has on one worker, by slot.
#[derive(Debug, Default)]
pub struct Slots {
    entries: Vec<Option<DoorbellTarget>>,
    /// Slots that were released; there is room for all.
    free: Vec<u32>,
    /// For the capacity of both.
    share: Share,
}

impl Slots {
    /// No slots, whose memory is in an account.
    #[must_use]
    pub fn within(account: &Footprint) -> Self {
        Self {
            share: account.empty(),
            ..Self::default()
        }
    }

    /// Reserves a slot: the one that was released last, or the lowest that never was in use.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if all are taken, or there is no memory for more.
    pub fn reserve(&mut self) -> Result<u32, Error> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        let slot = self.entries.len() as u32;
        if slot >= doorbell::SLOTS {
            return Err(Error::NoMemory);
        }
        if self.entries.len() == self.entries.capacity() {
            self.grow()?;
        }
        self.entries.push(None);
        Ok(slot)
    }

    /// Makes room for as many slots again.
    #[cold]
    fn grow(&mut self) -> Result<(), Error> {
        let (len, free) = (self.entries.len(), self.free.len());
        let capacity = grown(len);
        let before = self.share.bytes();
        let bytes = listed::<Option<DoorbellTarget>>(capacity) + listed::<u32>(capacity);
        self.share.grow(bytes.saturating_sub(before))?;
        let entries = self.entries.try_reserve_exact(capacity - len);
        let reserved = entries.and_then(|()| self.free.try_reserve_exact(capacity - free));
        reserved.map_err(|_| {
            self.share.shrink(before);
            Error::NoMemory
        })
    }

    /// Fills a reserved slot.
    pub fn set(&mut self, slot: u32, target: DoorbellTarget) {
        if let Some(entry) = self.entries.get_mut(slot as usize) {
            *entry = Some(target);
        }
    }

    /// Frees a slot.
    pub fn release(&mut self, slot: u32) {
        if let Some(entry) = self.entries.get_mut(slot as usize) {
            *entry = None;
            self.free.push(slot);
        }
        if self.free.len() == self.entries.len() {
            self.entries = Vec::new();
            self.free = Vec::new();
            self.share.shrink(0);
        }
    }

    /// What they take of their account, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.share.bytes()
    }

    /// No slot is at or above this.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.entries.len() as u32
    }

    /// What is in a slot.
    #[inline]
    #[must_use]
    pub fn get(&self, slot: u32) -> Option<&DoorbellTarget> {
        self.entries.get(slot as usize)?.as_ref()
    }
}

/// A context: a process (or the kernel) with its doorbell memory.
#[derive(Debug)]
pub struct Context {
    /// One doorbell block per worker, in order.
    pub doorbell: Pages,
    /// What it has, per worker.
    pub workers: Vec<Slots>,
    /// Number of its queue pairs and shared receive queues.
    pub users: u32,
    /// For `workers`. What grows in them has shares of its own.
    pub share: Share,
}

/// Everything one VM has.
pub struct Tables {
    /// Guest memory.
    pub memory: Option<GuestMemory>,
    /// The front end runs the rings. While it does not, nobody touches guest memory.
    pub running: bool,
    /// The link is up, as far as the driver has been told.
    pub link_told: bool,
    /// Where events go.
    pub sink: Option<Arc<dyn EventSink>>,
    /// The page of the workers' status words.
    pub status_page: Option<Pages>,
    /// GID table.
    pub gids: [Option<Gid>; GID_TABLE_LEN],
    /// The link layer's addresses of the entries of the GID table.
    pub sources: [L2Source; GID_TABLE_LEN],
    /// Contexts.
    pub contexts: Slab<Context>,
    /// Protection domains.
    pub pds: Slab<Pd>,
    /// Memory regions and windows.
    pub keys: Keys,
    /// Completion queues.
    pub cqs: Slab<Arc<Cq>>,
    /// Queue pairs.
    pub qps: Numbers<Arc<Qp>>,
    /// The port's GSI queue pair.
    pub gsi: Option<u32>,
    /// Shared receive queues.
    pub srqs: Numbers<Arc<Srq>>,
    /// XRC domains, with the number of what is in them.
    pub xrcds: Slab<Pd>,
    /// Attachments to multicast groups: queue pairs with the group's GID. Each has a share.
    pub multicast: BTreeMap<(u32, Gid), Share>,
    /// The VM's account: what it makes the process keep.
    pub footprint: Footprint,
    /// The VM.
    pub vm: Weak<Vm>,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tables")
            .field("running", &self.running)
            .field("qps", &self.qps.len())
            .finish_non_exhaustive()
    }
}

impl Tables {
    /// Empty tables, for queue pairs with numbers of a range, which come in this order.
    #[must_use]
    pub fn new(
        limits: &Limits,
        qp_numbers: RangeInclusive<u32>,
        qp_order: Arc<Order>,
        vm: Weak<Vm>,
    ) -> Self {
        let footprint = Footprint::new(limits.footprint(0));
        Self {
            memory: None,
            running: false,
            link_told: true,
            sink: None,
            status_page: None,
            gids: [None; GID_TABLE_LEN],
            sources: [L2Source::default(); GID_TABLE_LEN],
            contexts: Slab::new(1, limits.contexts).within(&footprint),
            pds: Slab::new(1, limits.pds).within(&footprint),
            keys: Keys::new(limits).within(&footprint),
            cqs: Slab::new(1, limits.cqs).within(&footprint),
            qps: Numbers::in_order(qp_order, qp_numbers, limits.qps).within(&footprint),
            gsi: None,
            srqs: Numbers::new(NUMBERS, limits.srqs).within(&footprint),
            xrcds: Slab::new(1, limits.xrcds).within(&footprint),
            multicast: BTreeMap::new(),
            footprint,
            vm,
        }
    }

    /// Replaces guest memory: everything that was resolved is resolved anew.
    pub(crate) fn set_memory(&mut self, memory: Option<GuestMemory>) {
        self.memory.clone_from(&memory);
        let memory = memory.as_ref();
        if let Some(page) = &mut self.status_page {
            page.rebase(memory);
        }
        for context in self.contexts.iter_mut() {
            context.doorbell.rebase(memory);
        }
        self.keys.rebase(memory);
        for cq in self.cqs.iter_mut() {
            cq.rebase(memory);
        }
        for qp in self.qps.iter_mut() {
            qp.rebase(memory);
        }
        for srq in self.srqs.iter_mut() {
            srq.rebase(memory);
        }
    }

    /// The multicast groups that queue pairs are attached to.
    pub(crate) fn groups(&self) -> BTreeSet<Gid> {
        self.multicast.keys().map(|(_, gid)| *gid).collect()
    }

    /// The queue pair that a datagram for number `qpn` goes to, if there is one.
    #[inline]
    pub(crate) fn datagram_qp(&self, qpn: u32) -> Option<&Arc<Qp>> {
        let number = match qpn {
            GSI_QPN => self.gsi?,
            number => number,
        };
        self.qps.get(number)
    }

    /// Destroys all objects.
    pub(crate) fn clear(&mut self) {
        for qp in self.qps.clear() {
            qp.dead.store(true, Ordering::SeqCst);
        }
        if let Some(vm) = self.vm.upgrade() {
            vm.cleared();
        }
        self.gsi = None;
        self.srqs.clear();
        self.xrcds.clear();
        self.multicast.clear();
        self.contexts.clear();
        self.keys.clear();
        self.cqs.clear();
        self.pds.clear();
        self.status_page = None;
    }

    /// Writes a worker's status word for the guest.
    pub(crate) fn announce(&self, worker: u16, status: u32) {
        if !self.running {
            return;
        }
        let at = u64::from(worker) * STATUS_STRIDE as u64;
        let page = self.status_page.as_ref();
        if let Some(word) = page.and_then(|page| page.half_word(at)) {
            word.store(status.to_le(), Ordering::SeqCst);
        }
    }

    /// Writes the status words of all workers.
    pub(crate) fn announce_all(&self, workers: usize, status: u32) {
        for worker in 0..workers {
            self.announce(worker as u16, status);
        }
    }
}
