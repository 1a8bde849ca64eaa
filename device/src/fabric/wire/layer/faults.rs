// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults: a layer that loses, repeats, delays and damages the frames that a port sends.
//!
//! What becomes of a frame depends on the seed and the number of the frame alone, so that any
//! failure can be had again.
use std::collections::BTreeMap;

use super::super::port::Port;

/// How often what happens to a frame, each of 256, and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in super::super) struct FaultSettings {
    pub seed: u64,
    /// The frame is lost.
    pub lost: u8,
    /// One bit of it is damaged.
    pub damaged: u8,
    /// It comes twice, the second time later.
    pub repeated: u8,
    /// It comes later than others that were sent after it.
    pub delayed: u8,
    /// How much later at most, nanoseconds.
    pub delay: u64,
    /// So many frames in a row are lost or damaged, at most.
    pub in_a_row: u64,
}

/// What happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in super::super) struct FaultCounts {
    pub sent: u64,
    pub lost: u64,
    pub damaged: u64,
    pub repeated: u64,
    pub delayed: u64,
}

/// A port with faults.
#[derive(Debug)]
pub(in super::super) struct Faults<P> {
    inner: P,
    settings: FaultSettings,
    pub counts: FaultCounts,
    /// Delayed frames, by the time at which they are sent.
    held: BTreeMap<(u64, u64), Vec<u8>>,
}

/// A number that depends on its arguments alone (splitmix64).
fn draw(seed: u64, frame: u64, what: u64) -> u64 {
    let mut z = seed
        .wrapping_add(frame.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(what.wrapping_mul(0xd1b5_4a32_d192_ed03));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl FaultSettings {
    fn happens(&self, frame: u64, what: u64, often: u8) -> bool {
        draw(self.seed, frame, what) & 0xff < u64::from(often)
    }

    /// Whether a frame is lost or damaged, were it not for those before it.
    fn suffers(&self, frame: u64) -> bool {
        self.happens(frame, 0, self.lost) || self.happens(frame, 1, self.damaged)
    }

    /// Whether enough frames in a row have been lost or damaged.
    fn enough(&self, frame: u64) -> bool {
        let first = frame.saturating_sub(self.in_a_row);
        frame >= self.in_a_row && (first..frame).all(|before| self.suffers(before))
    }
}

impl<P: Port> Faults<P> {
    pub(in super::super) fn new(inner: P, settings: FaultSettings) -> Self {
        Self {
            inner,
            settings,
            counts: FaultCounts::default(),
            held: BTreeMap::new(),
        }
    }

    /// Sends what was held back until now.
    fn release(&mut self, now: u64) {
        while let Some(entry) = self.held.first_entry() {
            let (at, _) = *entry.key();
            if at > now {
                break;
            }
            let frame = entry.remove();
            self.inner.send(at, &frame);
        }
    }

    fn pass(&mut self, now: u64, number: u64, what: u64, late: bool, frame: &[u8]) {
        if late {
            let wait = 1 + draw(self.settings.seed, number, what) % self.settings.delay.max(1);
            let at = now.saturating_add(wait);
            self.held
                .insert((at, number * 2 + what % 2), frame.to_vec());
        } else {
            self.inner.send(now, frame);
        }
    }
}

impl<P: Port> Port for Faults<P> {
    fn mtu(&self) -> usize {
        self.inner.mtu()
    }

    fn send(&mut self, now: u64, frame: &[u8]) {
        self.release(now);
        let (settings, number) = (self.settings, self.counts.sent);
        self.counts.sent += 1;
        let spared = settings.enough(number);
        if settings.happens(number, 0, settings.lost) && !spared {
            self.counts.lost += 1;
            return;
        }
        let mut damaged = Vec::new();
        let mut frame = frame;
        if settings.happens(number, 1, settings.damaged) && !spared {
            self.counts.damaged += 1;
            damaged.extend_from_slice(frame);
            let bit = draw(settings.seed, number, 2) % (8 * frame.len() as u64).max(1);
            let at = usize::try_from(bit / 8).unwrap_or_default();
            if let Some(byte) = damaged.get_mut(at) {
                *byte ^= 1 << (bit % 8);
            }
            frame = &damaged;
        }
        let late = settings.happens(number, 3, settings.delayed);
        self.counts.delayed += u64::from(late);
        self.pass(now, number, 4, late, frame);
        if settings.happens(number, 5, settings.repeated) {
            self.counts.repeated += 1;
            self.pass(now, number, 7, true, frame);
        }
    }

    fn receive(&mut self, now: u64, frame: &mut Vec<u8>) -> bool {
        self.release(now);
        self.inner.receive(now, frame)
    }

    fn timer(&self) -> Option<u64> {
        let held = self.held.keys().next().map(|(at, _)| *at);
        held.into_iter().chain(self.inner.timer()).min()
    }
}
