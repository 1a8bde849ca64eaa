// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a wire counts, for people and programs.
use std::sync::atomic::{AtomicU64, Ordering};

use super::port::Fate;
use super::verdict::{Reason, Verdict};
use crate::engine::Budget;

/// What a wire counts. Only its worker writes.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent_frames: AtomicU64,
    sent_bytes: AtomicU64,
    received_frames: AtomicU64,
    received_bytes: AtomicU64,
    /// Frames that were to be sent, and no host has their destination.
    no_host: AtomicU64,
    /// Frames that the system did not take.
    refused: AtomicU64,
    /// Frames that were to be sent while the port of their VM was down.
    down: AtomicU64,
    /// Packets that came before and were answered again.
    again: AtomicU64,
    /// Requests that were answered by a NAK.
    naks: AtomicU64,
    /// Packets that came too early, and were kept.
    kept: AtomicU64,
    /// Packets that were sent before.
    sent_again: AtomicU64,
    /// Answers that had packets sent again.
    repeats: AtomicU64,
    /// Answers that ended a message in error.
    ends: AtomicU64,
    /// Frames that came and said that a router was congested.
    congested: AtomicU64,
    /// Congestion notifications that were sent, and those that were obeyed.
    notified: AtomicU64,
    slowed: AtomicU64,
    dropped: [AtomicU64; Reason::ALL.len()],
}

fn add(counter: &AtomicU64, more: usize) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(more as u64);
    counter.store(sum, Ordering::Relaxed);
}

impl Counters {
    /// A frame of so many bytes was sent, with this result.
    pub(super) fn sent(&self, bytes: usize, fate: Fate) {
        if let Fate::Over(_) = fate {
            return;
        }
        add(&self.sent_frames, 1);
        add(&self.sent_bytes, bytes);
        match fate {
            Fate::Down => add(&self.down, 1),
            Fate::NoHost => add(&self.no_host, 1),
            Fate::Refused => add(&self.refused, 1),
            _ => {}
        }
    }

    /// A frame that was sent had been sent before.
    pub(super) fn again(&self) {
        add(&self.sent_again, 1);
    }

    /// A frame came that says that a router was congested. Perhaps its sender was notified.
    pub(super) fn congested(&self, notified: bool) {
        add(&self.congested, 1);
        add(&self.notified, usize::from(notified));
    }

    /// The system did not take so many frames, which were counted as sent.
    pub(super) fn refused(&self, frames: u64) {
        let sum = self.refused.load(Ordering::Relaxed).wrapping_add(frames);
        self.refused.store(sum, Ordering::Relaxed);
    }

    /// A frame of so many bytes came, of which this was made.
    pub(super) fn received(&self, bytes: usize, verdict: Verdict) {
        add(&self.received_frames, 1);
        add(&self.received_bytes, bytes);
        match verdict {
            Verdict::Taken | Verdict::Asks | Verdict::Tells(0) => {}
            Verdict::Again => add(&self.again, 1),
            Verdict::Refused(..) | Verdict::RefusedMessage(_) => add(&self.naks, 1),
            Verdict::Kept => add(&self.kept, 1),
            Verdict::Repeats(_) | Verdict::Fills(_) | Verdict::Tells(_) => add(&self.repeats, 1),
            Verdict::Ends(_) => add(&self.ends, 1),
            Verdict::Slows => add(&self.slowed, 1),
            Verdict::Dropped(reason) => {
                if let Some(count) = self.dropped.get(reason as usize) {
                    add(count, 1);
                }
            }
        }
    }

    /// Frames and bytes that were sent in all, modulo 2^32 and 2^64.
    pub(super) fn all_sent(&self) -> Budget {
        Budget {
            messages: self.sent_frames.load(Ordering::Relaxed) as u32,
            bytes: self.sent_bytes.load(Ordering::Relaxed),
        }
    }

    /// All of them but those of what was dropped, with their names.
    pub(crate) fn list(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let all = [
            ("sent_frames", &self.sent_frames),
            ("sent_bytes", &self.sent_bytes),
            ("received_frames", &self.received_frames),
            ("received_bytes", &self.received_bytes),
            ("no_host", &self.no_host),
            ("refused_by_system", &self.refused),
            ("own_port_down", &self.down),
            ("answered_again", &self.again),
            ("naks", &self.naks),
            ("kept", &self.kept),
            ("sent_again", &self.sent_again),
            ("answers_of_loss", &self.repeats),
            ("answers_of_error", &self.ends),
            ("congestion_marks", &self.congested),
            ("cnp_sent", &self.notified),
            ("cnp_handled", &self.slowed),
        ];
        let value = |(name, count): (_, &AtomicU64)| (name, count.load(Ordering::Relaxed));
        all.into_iter().map(value)
    }

    /// Frames that were dropped, by the reason.
    pub(crate) fn dropped(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let all = Reason::ALL.iter().zip(&self.dropped);
        all.map(|((_, name, _), count)| (*name, count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_count_of_its_own() {
        for (reason, name, _) in Reason::ALL {
            let counters = Counters::default();
            counters.received(100, Verdict::Dropped(reason));
            let counted: Vec<_> = counters
                .dropped()
                .filter(|(_, count)| *count != 0)
                .collect();
            assert_eq!(counted, [(name, 1)]);
        }
    }
}
