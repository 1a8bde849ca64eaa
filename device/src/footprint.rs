// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The account of a VM: what it makes this process keep, and how much that may be.
//!
//! All that commands and work requests make the process keep has a [`Share`] of the account, from
//! before it is allocated until it is given back: objects, page lists, and the tables that grow
//! with their number. What is large is allocated by calls that can fail (`try_reserve_exact`).
//!
//! What is small, such as an object in its `Arc`, is allocated by the usual calls, which end the
//! process if there is no memory: safe Rust has no others. So that this does not happen, a share is
//! refused if the process could not get 64 MiB beyond it: the small allocations that
//! follow are much less than that, and so are those of all other threads meanwhile.
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// There is no memory: a VM has as much as it may, or the process can get no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory;

/// Bytes that the process can still get when a share is given. More than the largest piece that
/// glibc would rather keep than give back (32 MiB), so that looking leaves its settings alone.
const RESERVE: u64 = 64 << 20;
/// The system is asked again after so many bytes of shares, in all VMs.
const ASK_EVERY: u64 = 1 << 20;
/// What the allocator adds to a piece of memory, bytes, at most.
const ALLOCATION: u64 = 24;

/// Bytes of shares since the system was asked.
static SINCE_ASKED: AtomicU64 = AtomicU64::new(ASK_EVERY);

/// Memory of a value in a `Box`, bytes, at most.
#[must_use]
pub const fn boxed<T>() -> u64 {
    size_of::<T>() as u64 + ALLOCATION
}

/// Memory of a value in an `Arc`, bytes, at most.
#[must_use]
pub const fn counted<T>() -> u64 {
    let align = align_of::<T>() as u64;
    // Before the value are two counters, and the allocator may have to skip bytes to align it.
    let before = if align > 16 { 2 * align } else { 16 };
    boxed::<T>() + before
}

/// Memory of a list of `count` values, bytes, at most.
#[must_use]
pub const fn listed<T>(count: usize) -> u64 {
    (size_of::<T>() as u64).saturating_mul(count as u64) + ALLOCATION
}

/// Entries of a table that is full with `len` and grows.
#[must_use]
pub(crate) fn grown(len: usize) -> usize {
    len.saturating_mul(2).max(4)
}

/// Whether the process can get as many bytes as a share has, and the reserve.
fn available(bytes: u64) -> bool {
    let before = SINCE_ASKED.fetch_add(bytes.min(ASK_EVERY), Ordering::Relaxed);
    if before.saturating_add(bytes) < ASK_EVERY {
        return true;
    }
    let Ok(wanted) = usize::try_from(bytes.saturating_add(RESERVE)) else {
        return false;
    };
    let mut probe = Vec::<u8>::new();
    // Nothing touches it, so it takes address space for a moment, and no memory.
    let there = black_box(&mut probe).try_reserve_exact(wanted).is_ok();
    drop(black_box(probe));
    if there {
        SINCE_ASKED.store(0, Ordering::Relaxed);
    }
    there
}

#[derive(Debug)]
struct Account {
    bytes: AtomicU64,
    limit: AtomicU64,
}

/// The account of a VM. Clones are the same account.
#[derive(Debug, Clone)]
pub struct Footprint(Arc<Account>);

impl Default for Footprint {
    /// An account without a limit.
    fn default() -> Self {
        Self::new(u64::MAX)
    }
}

impl Footprint {
    /// An empty account.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Account {
            bytes: AtomicU64::new(0),
            limit: AtomicU64::new(limit),
        }))
    }

    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Bytes in all, at most.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit.load(Ordering::Relaxed)
    }

    /// Changes the limit. If there is more already, it stays.
    pub fn set_limit(&self, limit: u64) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }

    /// A share of `bytes`.
    ///
    /// # Errors
    /// If that is beyond the limit, or the process can get no more memory.
    pub fn share(&self, bytes: u64) -> Result<Share, NoMemory> {
        let mut share = self.empty();
        share.grow(bytes)?;
        Ok(share)
    }

    /// A share of nothing, which may grow.
    #[must_use]
    pub fn empty(&self) -> Share {
        Share {
            of: Some(self.0.clone()),
            bytes: 0,
        }
    }
}

/// What something takes of its VM's account, as long as it lives. The default is of no account.
#[derive(Debug, Default)]
pub struct Share {
    of: Option<Arc<Account>>,
    bytes: u64,
}

impl Share {
    /// How much it is, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is of the same account as another one.
    #[must_use]
    pub fn is_with(&self, other: &Self) -> bool {
        match (&self.of, &other.of) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        }
    }

    /// A share of nothing, of the same account.
    #[must_use]
    pub fn another(&self) -> Self {
        Self {
            of: self.of.clone(),
            bytes: 0,
        }
    }

    /// Takes `more` bytes.
    ///
    /// # Errors
    /// If that is beyond the limit, or the process can get no more memory. It is as before then.
    pub fn grow(&mut self, more: u64) -> Result<(), NoMemory> {
        let sum = self.bytes.checked_add(more).ok_or(NoMemory)?;
        if let Some(of) = self.of.as_ref().filter(|_| more != 0) {
            let limit = of.limit.load(Ordering::Relaxed);
            let add = |all: u64| all.checked_add(more).filter(|all| *all <= limit);
            of.bytes
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
                .map_err(|_| NoMemory)?;
            if !available(more) {
                of.bytes.fetch_sub(more, Ordering::Relaxed);
                return Err(NoMemory);
            }
        }
        self.bytes = sum;
        Ok(())
    }

    /// Gives `bytes` of it away, or all that it is.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            of: self.of.clone(),
            bytes,
        }
    }

    /// Takes no more than `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let Some(less) = self.bytes.checked_sub(bytes) else {
            return;
        };
        if let Some(of) = &self.of {
            of.bytes.fetch_sub(less, Ordering::Relaxed);
        }
        self.bytes = bytes;
    }

    /// Takes `bytes` less.
    pub fn release(&mut self, bytes: u64) {
        self.shrink(self.bytes.saturating_sub(bytes));
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_while_they_live() {
        let all = Footprint::new(100);
        let one = all.share(10).unwrap();
        assert!(all.share(91).is_err());
        let mut two = all.share(90).unwrap();
        assert!(two.grow(1).is_err() && all.share(u64::MAX).is_err());
        assert_eq!((all.bytes(), two.bytes()), (100, 90));
        two.shrink(91);
        assert_eq!(all.bytes(), 100);
        two.shrink(5);
        drop(one);
        assert_eq!(all.bytes(), 5);
        two.grow(2).unwrap();
        two.release(3);
        assert_eq!(all.bytes(), 4);
        let mut three = two.another();
        three.grow(96).unwrap();
        // What is there stays when the limit falls.
        all.set_limit(10);
        assert!(three.grow(1).is_err() && three.grow(0).is_ok());
        let half = three.split(50);
        assert_eq!((half.bytes(), three.bytes(), all.bytes()), (50, 46, 100));
        drop((two, three));
        assert_eq!((all.bytes(), half.bytes()), (50, 50));
        drop(half);
        assert_eq!((all.bytes(), all.limit()), (0, 10));
    }

    #[test]
    fn what_the_process_cannot_get_is_refused() {
        let all = Footprint::default();
        assert!(all.share(1 << 60).is_err() && all.share(u64::MAX).is_err());
        assert_eq!(all.bytes(), 0);
        all.share(1 << 20).unwrap();
        let mut none = Share::default();
        none.grow(u64::MAX).unwrap();
        assert!(none.grow(1).is_err());
    }
}
