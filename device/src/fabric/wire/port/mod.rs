// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports: where frames leave and come. Nothing of them blocks, and time is a parameter.
use std::fmt;

use std::ops::Range;

use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

mod bursts;
pub(crate) mod interface;
#[cfg(test)]
pub(super) mod sim;
pub(crate) mod uplinks;
pub(crate) mod vxlan;

/// What comes at once is no longer than this, bytes.
const LONGEST: usize = 1 << 16;

/// Frames that came at once.
#[derive(Debug, Default)]
pub(crate) struct Burst {
    /// Room for them; as long as what may come.
    bytes: Vec<u8>,
    /// Where each came from, and its place in `bytes`.
    frames: Vec<(Segment, Range<usize>)>,
}

impl Burst {
    /// The frames, each with where it came from.
    pub(super) fn frames(&self) -> impl Iterator<Item = (Segment, &[u8])> {
        let frames = self.frames.iter();
        frames.filter_map(|(segment, place)| Some((*segment, self.bytes.get(place.clone())?)))
    }

    /// Room for what comes next, instead of what came before.
    fn space(&mut self) -> &mut [u8] {
        self.frames.clear();
        self.bytes.resize(LONGEST, 0);
        &mut self.bytes
    }
}

/// What became of a frame that was to be sent, as far as the port knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests have faults so far"))]
pub(crate) enum Fate {
    Sent,
    /// Faults, by the number of the frame since they began: it is lost.
    Lost(u64),
    /// One bit of it is damaged.
    Damaged(u64),
    /// It goes twice, the second time later.
    Repeated(u64),
    /// It goes later.
    Delayed(u64),
    /// No host has the destination.
    NoHost,
    /// The system did not take it.
    Refused,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, number) = match self {
            Self::Sent => return f.write_str("sent"),
            Self::Lost(number) => ("lost", number),
            Self::Damaged(number) => ("damaged", number),
            Self::Repeated(number) => ("repeated", number),
            Self::Delayed(number) => ("delayed", number),
            Self::NoHost => return f.write_str("lost: no host has the destination"),
            Self::Refused => return f.write_str("lost: the system did not take it"),
        };
        write!(f, "faults: {what} (frame {number})")
    }
}

/// A port. Layers, as for faults, are ports around another one.
pub(crate) trait Port {
    /// Room for a frame of `len` bytes to `destination`, at time `now`, nanoseconds.
    ///
    /// # Errors
    /// What becomes of it instead.
    fn begin(
        &mut self,
        now: u64,
        segment: Segment,
        destination: Gid,
        len: usize,
    ) -> Result<&mut [u8], Fate>;

    /// Sends the frame of [`Self::begin`], which is written. It may be lost.
    fn end(&mut self) -> Fate;

    /// What was sent leaves now, if it has not. Returns how many frames the system did not take
    /// since it was called last.
    fn flush(&mut self) -> u64;

    /// Takes frames that have come by `now` into `burst`, if there are any.
    fn receive(&mut self, now: u64, burst: &mut Burst) -> bool;

    /// Sends a frame.
    #[cfg(test)]
    fn send(&mut self, now: u64, segment: Segment, destination: Gid, frame: &[u8]) -> Fate {
        match self.begin(now, segment, destination, frame.len()) {
            Ok(space) => space.copy_from_slice(frame),
            Err(fate) => return fate,
        }
        self.end()
    }

    /// When it is worth a look though nobody sends, nanoseconds.
    #[cfg(test)]
    fn timer(&self) -> Option<u64>;
}
