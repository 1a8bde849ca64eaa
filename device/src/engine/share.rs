// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM may have of the workers: its weight beside other VMs, and caps that hold even if
//! nobody else wants anything.
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// A rate that is not exceeded but by a burst. All workers draw on it.
#[derive(Debug)]
struct Rate {
    per_second: NonZeroU64,
    /// When what was spent is paid for, nanoseconds.
    paid: AtomicU64,
}

impl Rate {
    fn new(per_second: NonZeroU64) -> Self {
        Self {
            per_second,
            paid: AtomicU64::new(0),
        }
    }

    /// When more may be spent, if not at `now`.
    fn wait(&self, now: u64) -> Option<u64> {
        let until = self.paid.load(Ordering::Relaxed).saturating_sub(BURST);
        (until > now).then_some(until)
    }

    fn spend(&self, now: u64, amount: u64) {
        let time = u128::from(amount) * u128::from(SECOND) / u128::from(self.per_second.get());
        let time = u64::try_from(time).unwrap_or(u64::MAX);
        let later = |paid: u64| Some(paid.max(now).saturating_add(time));
        // It always changes it.
        let _ = self
            .paid
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }
}

/// The caps of a VM that has any.
#[derive(Debug)]
pub(crate) struct Caps {
    bytes: Option<Rate>,
    messages: Option<Rate>,
}

impl Caps {
    pub(super) fn new(settings: &ShareSettings) -> Option<Self> {
        let (bytes, messages) = (settings.bytes_per_second, settings.messages_per_second);
        (bytes.is_some() || messages.is_some()).then(|| Self {
            bytes: bytes.map(Rate::new),
            messages: messages.map(Rate::new),
        })
    }

    fn rates(&self) -> impl Iterator<Item = &Rate> {
        self.bytes.iter().chain(&self.messages)
    }

    /// When the VM may send again, if not at `now`; nanoseconds.
    pub(crate) fn wait(&self, now: u64) -> Option<u64> {
        self.rates().filter_map(|rate| rate.wait(now)).max()
    }

    /// The VM has sent so much.
    pub(crate) fn spend(&self, now: u64, done: Budget) {
        if let Some(bytes) = &self.bytes {
            bytes.spend(now, done.bytes);
        }
        if let Some(messages) = &self.messages {
            messages.spend(now, done.messages.into());
        }
    }
}

/// What a poll that costs a worker so much counts for a VM of this weight.
#[inline]
pub(super) fn weighed(cost: u64, weight: u16) -> u64 {
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
        let caps = Caps::new(settings).unwrap();
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
        assert!(Caps::new(&usual).is_none());
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
