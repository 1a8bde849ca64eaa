// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What send, receive and completion queues have in common: entries of a ring, positions and
//! phases.
use core::fmt;
use core::ops::Deref;

use crate::buffer::RingLayout;
use crate::sync::{AtomicU64, Ordering};

/// Memory shared with the device, seen as 8-byte words in the byte order of the machine they are
/// in.
///
/// A `&[AtomicU64]` is one; who owns the memory by other means (a mapping behind a reference count,
/// say) implements `Deref` for a type of his own. It must always deliver the same words.
pub trait Memory: Deref<Target = [AtomicU64]> {}
impl<M: Deref<Target = [AtomicU64]>> Memory for M {}

/// A layout that is not valid, or that the memory is too small for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadLayout;

impl fmt::Display for BadLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the queue layout is not valid or does not fit the memory")
    }
}

impl core::error::Error for BadLayout {}

/// Why a work request was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The queue is full (ENOMEM).
    Full,
    /// More scatter/gather entries than the queue was created for (EINVAL).
    TooManySges,
    /// More inline bytes than the queue was created for (EINVAL).
    InlineTooLong,
}

impl PostError {
    /// The errno that verbs return for it.
    #[must_use]
    pub const fn errno(self) -> u16 {
        match self {
            Self::Full => virtio_rdma_spec::command::status::ENOMEM,
            Self::TooManySges | Self::InlineTooLong => virtio_rdma_spec::command::status::EINVAL,
        }
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the queue is full",
            Self::TooManySges => "too many scatter/gather entries",
            Self::InlineTooLong => "too many inline bytes",
        })
    }
}

impl core::error::Error for PostError {}

/// The entries of a ring. Positions count from 0 modulo 2^32; a ring that is not used yet is all
/// zero.
#[derive(Debug)]
pub(crate) struct Ring<M> {
    memory: M,
    /// Word of the first entry.
    base: usize,
    /// log2 of the words per entry.
    shift: u32,
    /// Entries minus one.
    mask: u32,
}

impl<M: Memory> Ring<M> {
    /// INVARIANT: every entry of the ring is within the memory, so [`Ring::entry`] never fails.
    pub(crate) fn new(memory: M, layout: &RingLayout) -> Result<Self, BadLayout> {
        let stride = layout.stride;
        let size = u64::from(layout.entries).saturating_mul(u64::from(stride));
        let end = size.saturating_add(u64::from(layout.offset));
        if !layout.entries.is_power_of_two()
            || !stride.is_power_of_two()
            || stride < 8
            || layout.offset % stride != 0
            || end > (memory.len() as u64).saturating_mul(8)
        {
            return Err(BadLayout);
        }
        Ok(Self {
            base: (layout.offset / 8) as usize,
            shift: stride.trailing_zeros().wrapping_sub(3),
            mask: layout.entries.wrapping_sub(1),
            memory,
        })
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    pub(crate) fn into_memory(self) -> M {
        self.memory
    }

    #[inline(always)]
    pub(crate) fn entries(&self) -> u32 {
        self.mask.wrapping_add(1)
    }

    #[inline(always)]
    pub(crate) fn index(&self, position: u32) -> u32 {
        position & self.mask
    }

    /// The entry at a position, as exactly as many words as the stride has.
    #[inline(always)]
    pub(crate) fn entry(&self, position: u32) -> &[AtomicU64] {
        // Nothing here overflows (the invariant); in the kernel the compiler must see that nothing
        // can panic.
        let start = self
            .base
            .wrapping_add((self.index(position) as usize).wrapping_shl(self.shift));
        let end = start.wrapping_add(1usize.wrapping_shl(self.shift));
        self.memory.get(start..end).unwrap_or(&[])
    }

    /// The entries from a position on, `count` of them at most, as far as they follow each other in
    /// memory.
    #[inline(always)]
    pub(crate) fn run(&self, position: u32, count: u32) -> &[AtomicU64] {
        let index = self.index(position);
        let count = count.min(self.entries().wrapping_sub(index));
        // As for one entry: the end of the ring is within the memory.
        let start = self
            .base
            .wrapping_add((index as usize).wrapping_shl(self.shift));
        let end = start.wrapping_add((count as usize).wrapping_shl(self.shift));
        self.memory.get(start..end).unwrap_or(&[])
    }

    /// Whether the phase bit of the entry at a position is set.
    #[inline(always)]
    pub(crate) fn phase(&self, position: u32) -> bool {
        position & self.entries() == 0
    }

    /// How many entries are completed when the one with this index is, of those between `completed`
    /// and `posted`; `None` if it is not among them.
    #[inline(always)]
    pub(crate) fn completed_up_to(&self, index: u16, completed: u32, posted: u32) -> Option<u32> {
        let count = u32::from(index).wrapping_sub(completed) & self.mask;
        if u32::from(index) > self.mask || count >= posted.wrapping_sub(completed) {
            return None;
        }
        Some(completed.wrapping_add(count).wrapping_add(1))
    }

    /// Makes the ring as it was when new.
    pub(crate) fn zero(&self) {
        let words = (self.entries() as usize).wrapping_shl(self.shift);
        let end = self.base.wrapping_add(words);
        for word in self.memory.get(self.base..end).unwrap_or(&[]) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// The words of a little-endian representation, as they are stored in memory shared with the
/// device.
#[inline(always)]
pub(crate) fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(bytes) = bytes.get(8 * index..8 * index + 8) {
        word.copy_from_slice(bytes);
    }
    u64::from_ne_bytes(word)
}
