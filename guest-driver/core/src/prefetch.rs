// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hint to the processor: the only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::sync::AtomicU64;

/// Words of a cache line.
const LINE: usize = 8;

/// Has the processor fetch words that are to be written soon, and take them from others: by the
/// time they are written, that is done.
#[inline(always)]
pub fn prefetch_write(words: &[AtomicU64]) {
    for word in words.iter().step_by(LINE) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        // SAFETY: this changes nothing but caches; processors that do not know the instruction do
        // nothing for it.
        unsafe {
            core::arch::asm!("prefetchw [{}]", in(reg) word, options(nostack, preserves_flags));
        }
        #[cfg(any(not(target_arch = "x86_64"), loom))]
        let _ = word;
    }
}
