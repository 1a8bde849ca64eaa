// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is behind the null lkey: zeros to read, and a place to write to that nobody reads.
use std::cell::UnsafeCell;
use std::marker::PhantomData;

use super::range::ContiguousRange;

/// Size of a contiguous range, bytes.
const SIZE: usize = 64 * 1024;

/// Memory of this process that is treated like a guest's.
#[repr(align(4096))]
struct Memory(UnsafeCell<[u8; SIZE]>);

// SAFETY: it is accessed through `ContiguousRange`s only, which anybody may read and write at the
// same time, as they do guest memory.
unsafe impl Sync for Memory {}

static ZEROS: Memory = Memory(UnsafeCell::new([0; SIZE]));
static DISCARDED: Memory = Memory(UnsafeCell::new([0; SIZE]));

impl Memory {
    fn range_at(&self, max: u64) -> ContiguousRange<'static> {
        ContiguousRange {
            // The statics live for ever.
            ptr: self.0.get().cast(),
            len: usize::try_from(max).map_or(SIZE, |max| max.min(SIZE)),
            owner: PhantomData,
        }
    }
}

/// At most `max` zeros; not to be written to.
#[must_use]
pub fn zeros(max: u64) -> ContiguousRange<'static> {
    ZEROS.range_at(max)
}

/// A place for at most `max` bytes that are not wanted; not to be read.
#[must_use]
pub fn discarded(max: u64) -> ContiguousRange<'static> {
    DISCARDED.range_at(max)
}
