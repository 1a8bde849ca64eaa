// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Letting the work requests of a sender gather, where that pays.
use std::sync::atomic::{AtomicU32, Ordering};

/// Where it does not pay it is skipped, twice as often each time, up to 2^`MOST_DOUBLED` times.
const MOST_DOUBLED: u32 = 10;

/// Whether it is worth letting the work requests of a sender gather: not for a while, if it was not.
/// Only the worker that runs the queue pair uses it.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    /// Times to skip.
    skip: AtomicU32,
    /// How often in a row it was in vain.
    failures: AtomicU32,
}

impl Gather {
    /// Whether to skip this time.
    pub(crate) fn skips(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        self.skip.store(skip.saturating_sub(1), Ordering::Relaxed);
        skip != 0
    }

    /// It was worth it.
    pub(crate) fn worked(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    /// It was not.
    pub(crate) fn failed(&self) {
        let failures = self.failures.load(Ordering::Relaxed);
        let more = (failures + 1).min(MOST_DOUBLED);
        self.failures.store(more, Ordering::Relaxed);
        self.skip.store(1 << failures, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_pay_is_tried_ever_more_seldom() {
        let gather = Gather::default();
        let until_next = || (0..).find(|_| !gather.skips()).unwrap_or(0);
        assert_eq!(until_next(), 0);
        for skipped in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            gather.failed();
            assert_eq!(until_next(), skipped);
        }
        gather.worked();
        assert_eq!(until_next(), 0);
        gather.failed();
        assert_eq!(until_next(), 1);
    }
}
