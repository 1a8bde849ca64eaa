// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Doorbell memory and the wake-up protocol (specification: "Doorbells and wake-up").
//!
//! A context shares one *doorbell block* per worker with the device: bits of its queue pairs with
//! new work, in three levels. The root word's bits 16 to 63 are the queue pairs in slots 0 to 47
//! themselves; bits 0 to 15 say which summary words are not zero, a summary word's bits which leaf
//! words are not zero, and a leaf word's bits are slots 48 and up.
//!
//! To ring: set the bit (leaf first, then summary, then root), each by an atomic OR; then, all
//! sequentially consistent, load the worker's status word, and if it says SLEEPING, write the
//! doorbell queue's index to its notify address. The device clears in the other direction (root,
//! summary, leaf), by atomic exchange with zero, and looks at the rings only after the exchange.
use crate::constants;

/// Slots per doorbell block.
pub const SLOTS: u32 = 65536;
/// Slots that have their bit in the root word itself.
pub const DIRECT_SLOTS: u32 = 48;
/// Bit of slot 0 in the root word.
pub const DIRECT_SHIFT: u32 = 16;
/// Offset of the root word in a block, bytes.
pub const ROOT_OFFSET: usize = 0;
/// Offset of the summary words (16 of 8 bytes) in a block.
pub const SUMMARY_OFFSET: usize = 64;
/// Offset of the leaf words (1024 of 8 bytes) in a block.
pub const LEAF_OFFSET: usize = 4096;
/// Size of a block, bytes: three pages.
pub const BLOCK_SIZE: usize = LEAF_OFFSET + SLOTS as usize / 8;
/// Pages of a block.
pub const BLOCK_PAGES: u32 = 3;

/// Stride of the per-worker status words in the status page, bytes.
pub const STATUS_STRIDE: usize = 64;

constants! {
    /// A worker's status word.
    pub mod worker_status: u32 {
        /// The worker scans doorbell memory: no notification needed.
        POLLING = 0,
        /// The worker sleeps, or is about to: notify.
        SLEEPING = 1,
        /// The device was lost: stored by the driver, in all words, after it has reset the device.
        /// The device never writes it.
        LOST = 2,
    }
}

/// Where the bit of a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bit {
    /// In the root word itself.
    Direct {
        /// Mask to OR into the root word.
        root: u64,
    },
    /// In a leaf word, announced in a summary word and in the root word.
    Leaf {
        /// Byte offset of the leaf word in the block.
        leaf_offset: usize,
        /// Mask to OR into the leaf word.
        leaf: u64,
        /// Byte offset of the summary word in the block.
        summary_offset: usize,
        /// Mask to OR into the summary word.
        summary: u64,
        /// Mask to OR into the root word.
        root: u64,
    },
}

/// The place of a slot's bit, or `None` where there is no such slot.
#[must_use]
pub const fn bit(slot: u32) -> Option<Bit> {
    if slot >= SLOTS {
        return None;
    }
    if slot < DIRECT_SLOTS {
        return Some(Bit::Direct {
            root: 1 << (DIRECT_SHIFT + slot),
        });
    }
    let leaf = slot / 64;
    let summary = leaf / 64;
    Some(Bit::Leaf {
        leaf_offset: LEAF_OFFSET + 8 * leaf as usize,
        leaf: 1 << (slot % 64),
        summary_offset: SUMMARY_OFFSET + 8 * summary as usize,
        summary: 1 << (leaf % 64),
        root: 1 << summary,
    })
}
