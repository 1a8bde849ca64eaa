// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When a worker that polls looks at what the host's kernel has for it: each look is a system call.

/// For so long after something was sent or came, each poll iteration looks for more, nanoseconds;
const BUSY: u64 = 100_000;
/// after that, one each so many nanoseconds.
const SELDOM: u64 = 20_000;

/// When to look.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Nothing is looked for before this time, nanoseconds.
    look_at: u64,
    /// Until then, each poll iteration looks.
    busy_until: u64,
}

impl Pace {
    /// Whether it is time to look.
    #[inline(always)]
    pub(super) fn is_due(&self, now: u64) -> bool {
        now >= self.look_at
    }

    /// The next poll iteration looks.
    pub(super) fn soon(&mut self) {
        self.look_at = 0;
    }

    /// Something was sent or came: there is probably more.
    #[inline(always)]
    pub(super) fn busy(&mut self, now: u64) {
        self.busy_until = now.saturating_add(BUSY);
    }

    /// It was looked.
    #[inline(always)]
    pub(super) fn looked(&mut self, now: u64) {
        self.look_at = if now < self.busy_until {
            0
        } else {
            now.saturating_add(SELDOM)
        };
    }

    /// After it was looked: there is something to do at this time, whatever comes.
    pub(super) fn look_by(&mut self, timer: u64) {
        self.look_at = self.look_at.min(timer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_frequent_while_something_comes_and_seldom_otherwise() {
        let mut pace = Pace::default();
        assert!(pace.is_due(0));
        pace.looked(0);
        assert!(!pace.is_due(SELDOM - 1) && pace.is_due(SELDOM));
        pace.busy(SELDOM);
        for now in [SELDOM, SELDOM + 1, SELDOM + BUSY - 1] {
            pace.looked(now);
            assert!(pace.is_due(now));
        }
        pace.looked(SELDOM + BUSY);
        assert!(!pace.is_due(SELDOM + BUSY));
        pace.soon();
        assert!(pace.is_due(SELDOM + BUSY));
    }

    #[test]
    fn timers_are_not_late() {
        let mut pace = Pace::default();
        pace.looked(0);
        pace.look_by(5);
        assert!(!pace.is_due(4) && pace.is_due(5));
        pace.looked(5);
        pace.look_by(SELDOM + 6);
        assert!(!pace.is_due(SELDOM + 4) && pace.is_due(SELDOM + 5));
    }
}
