// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM may have of the workers: its weight beside other VMs, and caps that hold even if
//! nobody else wants anything.
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use super::Budget;

/// The weight of a VM of which nothing is said.
pub const USUAL_WEIGHT: u16 = 100;
/// The highest weight.
pub const MOST_WEIGHT: u16 = 10_000;

/// What is sent at once after a pause, in nanoseconds at the highest rate.
const BURST: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// What the operator grants a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareSettings {
    /// VMs that all have work share a worker in proportion to their weights, 1 to [`MOST_WEIGHT`].
    pub weight: u16,
    /// Bytes that it may send, or read from others, per second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Messages that it may send per second.
    pub messages_per_second: Option<NonZeroU64>,
}

impl Default for ShareSettings {
    fn default() -> Self {
        Self {
            weight: USUAL_WEIGHT,
            bytes_per_second: None,
            messages_per_second: None,
        }
    }
}

/// A rate that is not exceeded but by a burst, or none. All workers draw on it.
#[derive(Debug, Default)]
struct Rate {
    /// 0: no limit.
    per_second: AtomicU64,
    /// When what was spent is paid for, nanoseconds.
    paid: AtomicU64,
}

impl Rate {
    fn get(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.per_second.load(Ordering::Relaxed))
    }

    fn set(&self, per_second: Option<NonZeroU64>) {
        let new = per_second.map_or(0, NonZeroU64::get);
        if self.per_second.swap(new, Ordering::Relaxed) != new {
            // What was spent was to be paid for at the old rate, which may take years.
            self.paid.store(0, Ordering::Release);
        }
    }

    /// When more may be spent, if not at `now`.
    fn wait(&self, now: u64) -> Option<u64> {
        self.get()?;
        let until = self.paid.load(Ordering::Relaxed).saturating_sub(BURST);
        (until > now).then_some(until)
    }

    fn spend(&self, now: u64, amount: u64) {
        let Some(per_second) = self.get() else {
            return;
        };
        let time = u128::from(amount) * u128::from(SECOND) / u128::from(per_second.get());
        let time = u64::try_from(time).unwrap_or(u64::MAX);
        let later = |paid: u64| Some(paid.max(now).saturating_add(time));
        // It always changes it.
        let _ = self
            .paid
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, later);
        // What was spent at a rate that has changed meanwhile is not paid for, either.
        if self.get() != Some(per_second) {
            self.paid.store(0, Ordering::Relaxed);
        }
    }
}

/// The caps of a VM.
#[derive(Debug, Default)]
pub(crate) struct Caps {
    bytes: Rate,
    messages: Rate,
}

impl Caps {
    /// When the VM may send again, if not at `now`; nanoseconds.
    pub(crate) fn wait(&self, now: u64) -> Option<u64> {
        self.bytes.wait(now).max(self.messages.wait(now))
    }

    /// The VM has sent so much.
    pub(crate) fn spend(&self, now: u64, done: Budget) {
        self.bytes.spend(now, done.bytes);
        self.messages.spend(now, done.messages.into());
    }
}

/// What a VM has of the workers: the same for all VMs that a device has one after the other. The
/// operator may change it.
#[derive(Debug)]
pub struct WorkerShare {
    weight: AtomicU16,
    caps: Caps,
}

impl WorkerShare {
    /// This one.
    #[must_use]
    pub fn new(settings: &ShareSettings) -> Self {
        let share = Self {
            weight: AtomicU16::new(USUAL_WEIGHT),
            caps: Caps::default(),
        };
        share.set(settings);
        share
    }

    /// As it is now.
    #[must_use]
    pub fn settings(&self) -> ShareSettings {
        ShareSettings {
            weight: self.weight.load(Ordering::Relaxed),
            bytes_per_second: self.caps.bytes.get(),
            messages_per_second: self.caps.messages.get(),
        }
    }

    /// Changes it.
    pub(crate) fn set(&self, settings: &ShareSettings) {
        self.weight.store(settings.weight, Ordering::Relaxed);
        self.caps.bytes.set(settings.bytes_per_second);
        self.caps.messages.set(settings.messages_per_second);
    }

    /// The caps, if there are any.
    #[inline]
    pub(super) fn caps(&self) -> Option<&Caps> {
        let caps = &self.caps;
        let any = caps.bytes.get().is_some() || caps.messages.get().is_some();
        any.then_some(caps)
    }

    /// What a poll that costs a worker so much counts.
    #[inline]
    pub(super) fn weighed(&self, cost: u64) -> u64 {
        weighed(cost, self.weight.load(Ordering::Relaxed))
    }
}

impl Default for WorkerShare {
    fn default() -> Self {
        Self::new(&ShareSettings::default())
    }
}

/// What a poll that costs a worker so much counts for a VM of this weight.
#[inline]
fn weighed(cost: u64, weight: u16) -> u64 {
    if weight == USUAL_WEIGHT {
        return cost;
    }
    cost.saturating_mul(USUAL_WEIGHT.into()) / u64::from(weight.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends messages of `bytes` for a second whenever it may; returns how many.
    fn send(settings: &ShareSettings, bytes: u64) -> u64 {
        let share = WorkerShare::new(settings);
        let caps = share.caps().unwrap();
        let (mut now, mut sent) = (5 * SECOND, 0);
        let end = now + SECOND;
        while now < end {
            match caps.wait(now) {
                Some(until) => {
                    assert!(until > now);
                    now = until;
                }
                None => {
                    let done = Budget { messages: 1, bytes };
                    caps.spend(now, done);
                    sent += 1;
                }
            }
        }
        sent
    }

    #[test]
    fn caps_hold() {
        let usual = ShareSettings::default();
        assert!(WorkerShare::new(&usual).caps().is_none());
        let messages = ShareSettings {
            messages_per_second: NonZeroU64::new(1000),
            ..usual
        };
        assert!((1000..1004).contains(&send(&messages, 1 << 20)));
        let bytes = ShareSettings {
            bytes_per_second: NonZeroU64::new(100 << 20),
            ..messages
        };
        assert!((100..104).contains(&send(&bytes, 1 << 20)));
        assert!((1000..1004).contains(&send(&bytes, 1)));
        let least = ShareSettings {
            bytes_per_second: NonZeroU64::new(1),
            ..usual
        };
        assert_eq!(send(&least, u64::MAX), 1);
    }

    #[test]
    fn what_was_spent_is_not_paid_for_at_another_rate() {
        let least = ShareSettings {
            messages_per_second: NonZeroU64::new(1),
            ..ShareSettings::default()
        };
        let share = WorkerShare::new(&least);
        let done = Budget {
            messages: 1000,
            bytes: 0,
        };
        share.caps().unwrap().spend(0, done);
        assert!(share.caps().unwrap().wait(SECOND).is_some());
        let more = ShareSettings {
            messages_per_second: NonZeroU64::new(1000),
            ..least
        };
        share.set(&more);
        assert_eq!(share.settings(), more);
        assert_eq!(share.caps().unwrap().wait(SECOND), None);
        // The same once more is no other rate.
        share.caps().unwrap().spend(SECOND, done);
        share.set(&more);
        assert!(share.caps().unwrap().wait(SECOND).is_some());
        share.set(&ShareSettings::default());
        assert!(share.caps().is_none());
    }

    #[test]
    fn twice_the_weight_is_half_the_cost() {
        assert_eq!(weighed(1000, USUAL_WEIGHT), 1000);
        assert_eq!(weighed(1000, 2 * USUAL_WEIGHT), 500);
        assert_eq!(weighed(1000, 1), 100_000);
        assert_eq!(
            weighed(u64::MAX, MOST_WEIGHT),
            u64::MAX / u64::from(MOST_WEIGHT)
        );
    }
}
