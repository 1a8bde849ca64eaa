// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ringing doorbells (specification: "Doorbells and wake-up").
//!
//! # Ordering
//!
//! No wake-up is lost. Posting is, in this order: (P1) store the entry; (P2) set the doorbell bit
//! by an atomic OR, unless a load shows it set already; (P3) load the worker's status word. The
//! worker that wants to sleep does: (W1) store SLEEPING; (W2) a full fence, then look at all root
//! words; and sleeps only if none is set. Taking a bit is an exchange, after which it loads the
//! entry. All of these are sequentially consistent, so there is one total order of them that all
//! agree on.
//!
//! After P2 the bit is set, until the worker takes it by an exchange that is later than P2, hence
//! than P1: it sees the entry. Either P2 is before W2: the worker sees the bit and does not sleep,
//! or has taken it. Or W2 is before P2; then W1 is before P3, the load sees SLEEPING, and the
//! notification wakes the worker.
//!
//! Slots from [`DIRECT_SLOTS`] up set their bit in a leaf word, then announce it in a summary word
//! and in the root word, unless a load shows that announced already. The device clears in the other
//! direction: root, summary, leaf. That the load saw the bit of the summary word set says that the
//! device's exchange of that word is still to come, and with it that of the leaf word, which is
//! later than our OR to it; the same holds between root and summary. If the root word's bit was
//! gone but the summary word's not yet, the root bit is set again, which costs one scan that finds
//! nothing.
//!
//! The same bits by another poster do no harm: a bit says that there may be work, never how much.
use virtio_rdma_spec::doorbell::{
    bit, worker_status, Bit, BLOCK_SIZE, DIRECT_SLOTS, ROOT_OFFSET, STATUS_STRIDE,
};

use crate::prefetch::prefetch_write;
use crate::ring::{BadLayout, Memory};
use crate::sync::{store_load_order, AtomicU64, Ordering};

/// The status page, for those who ask whether the device is lost (specification: "Stop, reset and
/// loss").
///
/// The driver stores LOST in all words when it has reset a lost device: for good, and after the
/// last completion that the device wrote. So who finds a completion queue empty, and then the
/// device lost, polls once more; if the queue is still empty, what its queue pairs have outstanding
/// is his to complete ([`crate::SendQueue::flush_next`], [`crate::RecvQueue::flush_next`]).
#[derive(Debug, Clone, Copy)]
pub struct StatusPage<M>(M);

impl<M: Memory> StatusPage<M> {
    /// The page.
    pub const fn new(page: M) -> Self {
        Self(page)
    }

    /// Whether the device is lost.
    #[inline(always)]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        is_lost(status(&self.0, 0))
    }
}

/// A status word, loaded in the one order of all sequentially consistent operations, and with
/// acquire order.
#[inline(always)]
fn status(page: &[AtomicU64], word: usize) -> u32 {
    page.get(word).map_or(worker_status::POLLING, |status| {
        u64::from_le(status.load(Ordering::SeqCst)) as u32
    })
}

#[inline(always)]
fn is_lost(status: u32) -> bool {
    status == worker_status::LOST
}

const _: () = assert!(DIRECT_SLOTS > 0);

/// The doorbell of one queue pair.
#[derive(Debug)]
pub struct Doorbell<M> {
    /// Doorbell memory of the context: one block per doorbell queue.
    blocks: M,
    /// The status page: one status word per doorbell queue.
    status: M,
    status_word: usize,
    root_word: usize,
    root: u64,
    /// For slots without a bit in the root word.
    leaf: Option<Leaf>,
}

#[derive(Debug)]
struct Leaf {
    leaf_word: usize,
    leaf: u64,
    summary_word: usize,
    summary: u64,
}

impl<M: Memory> Doorbell<M> {
    /// The doorbell of a slot of a doorbell queue (counting from 0), in the doorbell memory and
    /// with the status page of a context.
    ///
    /// # Errors
    /// There is no such slot, or the memory is too small for the queue.
    pub fn new(blocks: M, status: M, doorbell_queue: u32, slot: u32) -> Result<Self, BadLayout> {
        let queue = doorbell_queue as usize;
        let block = queue.checked_mul(BLOCK_SIZE).ok_or(BadLayout)?;
        let end = block.checked_add(BLOCK_SIZE).ok_or(BadLayout)?;
        let status_word = queue.checked_mul(STATUS_STRIDE / 8).ok_or(BadLayout)?;
        if end / 8 > blocks.len() || status_word >= status.len() {
            return Err(BadLayout);
        }
        let (root, leaf) = match bit(slot).ok_or(BadLayout)? {
            Bit::Direct { root } => (root, None),
            Bit::Leaf {
                leaf_offset,
                leaf,
                summary_offset,
                summary,
                root,
            } => {
                let leaf = Leaf {
                    leaf_word: (block + leaf_offset) / 8,
                    leaf: leaf.to_le(),
                    summary_word: (block + summary_offset) / 8,
                    summary: summary.to_le(),
                };
                (root, Some(leaf))
            }
        };
        Ok(Self {
            blocks,
            status,
            status_word,
            root_word: (block + ROOT_OFFSET) / 8,
            root: root.to_le(),
            leaf,
        })
    }

    /// Says that there is new work, which was committed before. Returns whether the worker sleeps:
    /// then write the index of the doorbell queue to its notify address. The worker of a lost
    /// device needs no waking.
    #[inline(always)]
    #[must_use]
    pub fn ring(&self) -> bool {
        match &self.leaf {
            // A worker that busy-polls the queue leaves the bit standing: then the cache line stays
            // with it.
            None => announce(self.blocks.get(self.root_word), self.root),
            Some(leaf) => {
                // Where so many ring, bits seldom stand: the worker took these words from us, and
                // each would be waited for in turn.
                for word in [leaf.summary_word, self.root_word] {
                    prefetch_write(self.blocks.get(word..=word).unwrap_or_default());
                }
                if let Some(word) = self.blocks.get(leaf.leaf_word) {
                    word.fetch_or(leaf.leaf, Ordering::SeqCst);
                }
                announce(self.blocks.get(leaf.summary_word), leaf.summary);
                announce(self.blocks.get(self.root_word), self.root);
            }
        }
        store_load_order();
        let status = status(&self.status, self.status_word);
        status != worker_status::POLLING && !is_lost(status)
    }

    /// Whether the device is lost. After a post this decides who tells of flushed work requests:
    /// either the post is found by those who poll when the loss was made known, or this says that
    /// it came too late for that.
    #[inline(always)]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        store_load_order();
        is_lost(status(&self.status, self.status_word))
    }
}

/// Sets a bit that may well be set already.
#[inline(always)]
fn announce(word: Option<&AtomicU64>, mask: u64) {
    if let Some(word) = word {
        store_load_order();
        if word.load(Ordering::SeqCst) & mask == 0 {
            word.fetch_or(mask, Ordering::SeqCst);
        }
    }
}
