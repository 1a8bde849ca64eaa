// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults: a layer that loses, repeats, delays and damages the frames that a port sends.
//!
//! What becomes of a frame depends on the seed and the number of the frame alone, so that any
//! failure can be had again; with a limit, also on when frames were lost before it.
use std::collections::{BTreeMap, VecDeque};

use super::super::port::{Burst, Fate, Port};
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

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
    /// How many frames are lost or damaged in any time that is so long (nanoseconds), at most.
    pub limit: Option<(usize, u64)>,
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

/// Segment and destination of a frame.
type Target = (Segment, Gid);

/// A port with faults.
#[derive(Debug)]
pub(in super::super) struct Faults<P> {
    inner: P,
    settings: FaultSettings,
    pub counts: FaultCounts,
    /// When frames were lost or damaged, as far as that counts for the limit.
    suffered: VecDeque<u64>,
    /// The frame that is written, where it goes, and when that began.
    written: Vec<u8>,
    to: Target,
    now: u64,
    /// Delayed frames, by the time at which they are sent.
    held: BTreeMap<(u64, u64), (Target, Vec<u8>)>,
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
}

impl<P: Port> Faults<P> {
    pub(in super::super) fn new(inner: P, settings: FaultSettings) -> Self {
        Self {
            inner,
            settings,
            counts: FaultCounts::default(),
            suffered: VecDeque::new(),
            written: Vec::new(),
            to: (Segment::Vxlan(0), Gid::default()),
            now: 0,
            held: BTreeMap::new(),
        }
    }

    /// From now on it does this.
    pub(in super::super) fn set(&mut self, settings: FaultSettings) {
        self.settings = settings;
        self.suffered.clear();
    }

    /// Sends what was held back until now.
    fn release(&mut self, now: u64) {
        while let Some(entry) = self.held.first_entry() {
            let (at, _) = *entry.key();
            if at > now {
                break;
            }
            let ((segment, destination), frame) = entry.remove();
            self.inner.send(at, segment, destination, &frame);
        }
    }

    /// Whether as many frames as there may be have been lost or damaged by time `now`.
    fn enough(&mut self, now: u64) -> bool {
        let Some((most, time)) = self.settings.limit else {
            return false;
        };
        let past = |at: &u64| at.saturating_add(time) <= now;
        while self.suffered.front().is_some_and(past) {
            self.suffered.pop_front();
        }
        self.suffered.len() >= most
    }

    /// A frame is lost or damaged at time `now`.
    fn suffer(&mut self, now: u64) {
        if self.settings.limit.is_some() {
            self.suffered.push_back(now);
        }
    }

    /// Sends a frame, now or, by the draw `what`, later.
    fn pass(&mut self, now: u64, number: u64, what: Option<u64>, to: Target, frame: &[u8]) {
        if let Some(what) = what {
            let wait = 1 + draw(self.settings.seed, number, what) % self.settings.delay.max(1);
            let at = now.saturating_add(wait);
            let key = (at, number * 2 + what % 2);
            self.held.insert(key, (to, frame.to_vec()));
        } else {
            let (segment, destination) = to;
            self.inner.send(now, segment, destination, frame);
        }
    }

    /// Sends a frame, or does to it what is its turn.
    fn send_or_not(&mut self, now: u64, to: Target, frame: &mut [u8]) -> Fate {
        self.release(now);
        let (settings, number) = (self.settings, self.counts.sent);
        self.counts.sent += 1;
        let spared = self.enough(now);
        if settings.happens(number, 0, settings.lost) && !spared {
            self.counts.lost += 1;
            self.suffer(now);
            return Fate::Lost(number);
        }
        let mut fate = Fate::Sent;
        if settings.happens(number, 1, settings.damaged) && !spared {
            self.counts.damaged += 1;
            self.suffer(now);
            let bit = draw(settings.seed, number, 2) % (8 * frame.len() as u64).max(1);
            let at = usize::try_from(bit / 8).unwrap_or_default();
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= 1 << (bit % 8);
            }
            fate = Fate::Damaged(number);
        }
        let late = settings.happens(number, 3, settings.delayed);
        self.counts.delayed += u64::from(late);
        self.pass(now, number, late.then_some(4), to, frame);
        let again = settings.happens(number, 5, settings.repeated);
        if again {
            self.counts.repeated += 1;
            self.pass(now, number, Some(7), to, frame);
        }
        match fate {
            Fate::Sent if again => Fate::Repeated(number),
            Fate::Sent if late => Fate::Delayed(number),
            other => other,
        }
    }
}

impl<P: Port> Port for Faults<P> {
    fn begin(
        &mut self,
        now: u64,
        segment: Segment,
        destination: Gid,
        len: usize,
    ) -> Result<&mut [u8], Fate> {
        self.now = now;
        self.to = (segment, destination);
        self.written.resize(len, 0);
        Ok(&mut self.written)
    }

    fn end(&mut self) -> Fate {
        let (now, to) = (self.now, self.to);
        let mut frame = std::mem::take(&mut self.written);
        let fate = self.send_or_not(now, to, &mut frame);
        self.written = frame;
        fate
    }

    fn flush(&mut self) -> u64 {
        self.inner.flush()
    }

    fn receive(&mut self, now: u64, burst: &mut Burst) -> bool {
        self.release(now);
        self.inner.receive(now, burst)
    }

    fn timer(&self) -> Option<u64> {
        let held = self.held.keys().next().map(|(at, _)| *at);
        held.into_iter().chain(self.inner.timer()).min()
    }
}
