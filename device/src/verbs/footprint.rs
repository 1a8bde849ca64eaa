// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM's page lists take of our memory.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// What all page lists of a VM take of our memory. Clones are the same account.
#[derive(Debug, Clone, Default)]
pub struct Footprint(Arc<AtomicU64>);

impl Footprint {
    /// Bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes `bytes` more into account.
    pub fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// `bytes` are not in use any longer.
    pub fn release(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Takes `bytes` into account until the share is dropped.
    #[must_use]
    pub fn share(&self, bytes: u64) -> Share {
        self.add(bytes);
        Share {
            of: self.clone(),
            bytes,
        }
    }

    /// The same, if there are then no more than `limit` in all.
    #[must_use]
    pub fn share_within(&self, bytes: u64, limit: u64) -> Option<Share> {
        let more = |all: u64| all.checked_add(bytes).filter(|all| *all <= limit);
        let added = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        added.ok().map(|_| Share {
            of: self.clone(),
            bytes,
        })
    }
}

/// What one object takes, while it lives.
#[derive(Debug)]
pub struct Share {
    of: Footprint,
    bytes: u64,
}

impl Share {
    /// It takes no more than `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.of.release(less);
            self.bytes = bytes;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_while_they_live() {
        let all = Footprint::default();
        let one = all.share(10);
        assert!(all.share_within(91, 100).is_none());
        let mut two = all.share_within(90, 100).unwrap();
        assert!(all.share_within(u64::MAX, u64::MAX).is_none());
        two.shrink(91);
        assert_eq!(all.bytes(), 100);
        two.shrink(5);
        drop(one);
        assert_eq!(all.bytes(), 5);
        drop(two);
        assert_eq!(all.bytes(), 0);
    }
}
