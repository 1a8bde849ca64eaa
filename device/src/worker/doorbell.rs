// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Doorbells: a tree of bits in memory that a context shares with the device (specification:
//! "Doorbells").
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use virtio_rdma_spec::doorbell::{
    BLOCK_SIZE, DIRECT_SHIFT, DIRECT_SLOTS, LEAF_OFFSET, ROOT_OFFSET, SUMMARY_OFFSET,
};

use super::handle::{count, Worker};
use crate::engine::queue_pair::Qp;
use crate::engine::tables::{Context, DoorbellTarget};
use crate::memory::{prefetch_write, Pages};

/// A worker's doorbell of a context.
#[derive(Clone, Copy)]
pub(super) struct Doorbell<'a> {
    /// The root word: a bit for each part of the tree with a doorbell that rang.
    pub(super) root: &'a AtomicU64,
    pub(super) context: &'a Context,
}

impl<'a> Doorbell<'a> {
    #[inline(always)]
    pub(super) fn new(context: &'a Context, worker: &Worker) -> Option<Self> {
        let root = context.doorbell.word(block(worker) + ROOT_OFFSET as u64)?;
        Some(Self { root, context })
    }

    /// Whether anything rang. The caller is about to take what did: its cache line is fetched for
    /// writing.
    #[inline(always)]
    pub(super) fn rings(&self) -> bool {
        prefetch_write(self.root);
        self.root.load(Ordering::Relaxed) != 0
    }

    /// Clears what rang, and calls `f` with the queue pairs.
    #[inline(always)]
    pub(super) fn take(&self, worker: &Worker, mut f: impl FnMut(&'a Arc<Qp>)) {
        let pages = &self.context.doorbell;
        let Some(slots) = self.context.workers.get(usize::from(worker.index)) else {
            return;
        };
        let seen = u64::from_le(self.root.load(Ordering::Relaxed));
        let first = seen.trailing_zeros().checked_sub(DIRECT_SHIFT);
        if let Some(DoorbellTarget::Qp(qp)) = first.and_then(|slot| slots.get(slot)) {
            qp.hints.prefetch_entry();
        }
        let block = block(worker);
        let mut ring = |slot: u32| match slots.get(slot) {
            Some(DoorbellTarget::Qp(qp)) => {
                count(&worker.stats.doorbells);
                f(qp);
            }
            Some(DoorbellTarget::Srq(srq)) => {
                count(&worker.stats.doorbells);
                srq.receives_posted();
            }
            None => {}
        };
        // Bits of slots that are not in use cost nothing more: a guest may set all of them all the
        // time.
        let end = slots.end();
        drain(self.root, |bit| {
            if bit >= DIRECT_SHIFT {
                ring(bit - DIRECT_SHIFT);
                return;
            }
            if 64 * 64 * bit >= end {
                return;
            }
            drain_at(
                pages,
                block + SUMMARY_OFFSET as u64 + 8 * u64::from(bit),
                |second| {
                    let leaf = 64 * bit + second;
                    if 64 * leaf >= end {
                        return;
                    }
                    drain_at(
                        pages,
                        block + LEAF_OFFSET as u64 + 8 * u64::from(leaf),
                        |third| {
                            let slot = 64 * leaf + third;
                            if slot >= DIRECT_SLOTS {
                                ring(slot);
                            }
                        },
                    );
                },
            );
        });
    }
}

/// Where a worker's block of the doorbell memory of a context begins.
fn block(worker: &Worker) -> u64 {
    u64::from(worker.index) * BLOCK_SIZE as u64
}

/// Clears the bits of a word, and calls `f` with each that was set.
#[inline(always)]
fn drain(word: &AtomicU64, mut f: impl FnMut(u32)) {
    let mut bits = u64::from_le(word.swap(0, Ordering::SeqCst));
    while bits != 0 {
        f(bits.trailing_zeros());
        bits &= bits - 1;
    }
}

/// The same with the word at `offset`, if any bit is set.
fn drain_at(pages: &Pages, offset: u64, f: impl FnMut(u32)) {
    if let Some(word) = pages.word(offset) {
        if word.load(Ordering::Relaxed) != 0 {
            drain(word, f);
        }
    }
}

/// The doorbell of one queue pair.
pub(crate) struct OwnDoorbell<'a> {
    pub(super) root: &'a AtomicU64,
    /// Its bit in the root word; zero: it has none.
    pub(super) bit: u64,
    pub(super) qp: &'a Qp,
}

impl OwnDoorbell<'_> {
    /// Whether it may ring for a receive that a sender waits for.
    #[inline(always)]
    pub(super) fn rings_for_receives(&self) -> bool {
        self.qp.awaited.load(Ordering::SeqCst) && self.root.load(Ordering::SeqCst) & self.bit != 0
    }

    /// Clears the bit, if it is the only one that is set, and set for a send. Returns whether it
    /// did, or none if the bit may be for a receive.
    #[inline(always)]
    pub(super) fn clear(&self) -> Option<bool> {
        if self.root.load(Ordering::Relaxed) != self.bit || self.bit == 0 {
            return Some(false);
        }
        self.root.fetch_and(!self.bit, Ordering::SeqCst);
        // A sender that waits for a receive says so before the guest is asked to ring for it.
        if self.qp.awaited.load(Ordering::SeqCst) {
            self.root.fetch_or(self.bit, Ordering::SeqCst);
            return None;
        }
        Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tables::Slots;
    use crate::footprint::Share;
    use crate::memory::{region, GuestMemory};
    use crate::worker::Shared;
    use std::time::Duration;
    use vhost_device_rdma_sync::Readers;
    use virtio_rdma_spec::doorbell::BLOCK_PAGES;

    #[test]
    fn bits_of_unused_slots_are_not_read() {
        let memory = GuestMemory::new(vec![region(0, u64::from(BLOCK_PAGES))]).unwrap();
        let pages: Vec<u64> = (0..u64::from(BLOCK_PAGES)).map(|page| page << 12).collect();
        let doorbell = Pages::resolve(&memory, &pages, 12).unwrap();
        let words = || (0..BLOCK_SIZE as u64).step_by(8);
        for at in words() {
            doorbell.word(at).unwrap().store(!0, Ordering::Relaxed);
        }
        let mut slots = Slots::default();
        // One leaf, and one slot of the next.
        for slot in 0..65 {
            assert_eq!(slots.reserve(), Ok(slot));
        }
        let context = Context {
            doorbell,
            workers: vec![slots],
            users: 0,
            share: Share::default(),
        };
        let (_, mut readers) = Readers::new(1);
        let reader = readers.pop().unwrap();
        let (worker, _) =
            Worker::without_thread(0, reader, Shared::default(), Duration::ZERO).unwrap();
        Doorbell::new(&context, &worker)
            .unwrap()
            .take(&worker, |_| ());
        let read: Vec<u64> = words()
            .filter(|at| context.doorbell.word(*at).unwrap().load(Ordering::Relaxed) == 0)
            .collect();
        let leaf = LEAF_OFFSET as u64;
        let summary = SUMMARY_OFFSET as u64;
        assert_eq!(read, [ROOT_OFFSET as u64, summary, leaf, leaf + 8]);
    }
}
