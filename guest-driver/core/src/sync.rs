// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The atomics of this crate: those of `core`, or with `--cfg loom` those of the model checker.

#[cfg(not(loom))]
pub use core::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub use loom::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Stands between a sequentially consistent store or read-modify-write and a later sequentially
/// consistent load.
///
/// The two are ordered as they are, so this is nothing. The model checker however treats
/// sequentially consistent accesses as acquire and release only, and honours sequentially
/// consistent fences: there it is one.
#[inline(always)]
pub(crate) fn store_load_order() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
