// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports: where frames leave and come. Nothing of them blocks, and time is a parameter.
use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use virtio_rdma_spec::verbs::{vendor_err, wc_status};

use super::rooms::Room;
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;
use crate::verbs::WcError;

mod bursts;
pub(crate) mod interface;
#[allow(unsafe_code)]
mod kernel;
#[cfg(test)]
pub(super) mod sim;
pub(crate) mod tap;
pub(crate) mod uplinks;
pub(crate) mod vxlan;
pub(crate) mod watch;

/// What comes at once is no longer than this, bytes.
const LONGEST: usize = 1 << 16;

/// Which way frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

/// A burst has so many bytes at least if packets stay in it that came too early, of which there may be
/// few: what it takes is not much more than what is kept.
const LEAST_KEPT: usize = LONGEST / 2;

/// Frames that came at once.
#[derive(Debug, Default)]
pub(crate) struct Burst {
    /// Where they are.
    room: Arc<Room>,
    frames: Vec<Arrived>,
}

/// A frame that came.
#[derive(Debug)]
struct Arrived {
    /// Where it came from.
    segment: Segment,
    /// Its place in the bytes of a burst.
    place: Range<usize>,
    /// It is lost, or comes later.
    gone: Option<Fate>,
}

impl Arrived {
    /// A frame at `place` of what was read.
    fn new(segment: Segment, place: Range<usize>) -> Self {
        Self {
            segment,
            place,
            gone: None,
        }
    }

    /// One from a host where its source is not.
    fn foreign(segment: Segment, place: Range<usize>, host: IpAddr) -> Self {
        let gone = Some(Fate::Foreign(host));
        Self {
            segment,
            place,
            gone,
        }
    }
}

impl Burst {
    /// The frames, each with where it came from, and its fate if it is lost or comes later.
    pub(super) fn frames(&self) -> impl Iterator<Item = (Segment, &[u8], Option<Fate>)> {
        let bytes = |one: &Arrived| self.room.bytes.get(one.place.clone());
        let frames = self.frames.iter();
        frames.filter_map(move |one| Some((one.segment, bytes(one)?, one.gone)))
    }

    /// Asks what happens to each frame that is not lost already.
    pub(super) fn judge(&mut self, mut fate: impl FnMut(Segment, &mut [u8]) -> Option<Fate>) {
        let Some(Room { bytes, .. }) = Arc::get_mut(&mut self.room) else {
            return;
        };
        for one in self.frames.iter_mut().filter(|one| one.gone.is_none()) {
            let frame = bytes.get_mut(one.place.clone()).unwrap_or_default();
            let fate = fate(one.segment, frame);
            one.gone = fate.filter(|fate| matches!(fate, Fate::Lost(_) | Fate::Delayed(_)));
        }
    }

    /// Whether packets are kept in it.
    pub(super) fn is_kept(&self) -> bool {
        Arc::strong_count(&self.room) > 1
    }

    /// Its frames are taken: if none is kept in it, or none any longer, it is in no account.
    pub(super) fn taken(&mut self) {
        if let Some(room) = Arc::get_mut(&mut self.room) {
            room.leave_account();
        }
    }

    /// What comes next is in this room, or a new one.
    pub(super) fn renew(&mut self, room: Option<Arc<Room>>) {
        self.room = room.unwrap_or_default();
    }

    /// Where its frames are, if packets may be kept there.
    pub(super) fn room(&self) -> Option<Arc<Room>> {
        let end = self.frames.last().map_or(0, |last| last.place.end);
        (end >= LEAST_KEPT).then(|| self.room.clone())
    }

    /// The bytes and the frames, for what comes next.
    fn parts(&mut self) -> (&mut Vec<u8>, &mut Vec<Arrived>) {
        (&mut Arc::make_mut(&mut self.room).bytes, &mut self.frames)
    }

    fn bytes(&mut self) -> &mut Vec<u8> {
        self.parts().0
    }

    /// There is nothing in it.
    fn clear(&mut self) {
        self.frames.clear();
        self.bytes().clear();
    }

    /// A copy of a frame comes behind the others.
    fn push(&mut self, segment: Segment, frame: &[u8]) {
        let bytes = self.bytes();
        let start = bytes.len();
        bytes.extend_from_slice(frame);
        let place = start..bytes.len();
        self.frames.push(Arrived::new(segment, place));
    }

    /// Whether there is enough in it.
    fn is_full(&self) -> bool {
        self.room.bytes.len() >= LONGEST
    }

    /// Takes as many of these frames as there is room for, instead of what came before.
    pub(super) fn fill(&mut self, frames: &mut VecDeque<(Segment, Vec<u8>)>) {
        self.clear();
        while let Some((segment, frame)) = frames.pop_front() {
            self.push(segment, &frame);
            if self.is_full() {
                break;
            }
        }
    }

    /// Room for what comes next, instead of what came before.
    fn space(&mut self) -> &mut [u8] {
        self.frames.clear();
        let bytes = self.bytes();
        bytes.resize(LONGEST, 0);
        bytes
    }
}

/// What became of a frame that was to be sent, or that came, as far as the port knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Sent,
    /// Faults, by the number of the frame since they began: it is lost.
    Lost(u64),
    /// One bit of it is damaged.
    Damaged(u64),
    /// It says that a router is congested.
    Marked(u64),
    /// It goes twice, the second time later.
    Repeated(u64),
    /// It goes later.
    Delayed(u64),
    /// No host has the destination.
    NoHost,
    /// The system did not take it.
    Refused,
    /// The port of the VM is down.
    Down,
    /// It is not sent any more: its message ends with this error.
    Over(WcError),
    /// It came from this host, where its source is not.
    Foreign(IpAddr),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, number) = match self {
            Self::Sent => return f.write_str("sent"),
            Self::Lost(number) => ("lost", number),
            Self::Damaged(number) => ("damaged", number),
            Self::Marked(number) => ("marked", number),
            Self::Repeated(number) => ("repeated", number),
            Self::Delayed(number) => ("delayed", number),
            Self::NoHost => return f.write_str("lost: no host has the destination"),
            Self::Refused => return f.write_str("lost: the system did not take it"),
            Self::Down => return f.write_str("lost: the port is down"),
            Self::Over(WcError { status, vendor }) => {
                let status = wc_status::name(*status).unwrap_or("?");
                let reason = vendor_err::name(*vendor).unwrap_or("?");
                return write!(f, "not sent: its message ends with {status} ({reason})");
            }
            Self::Foreign(host) => {
                return write!(f, "dropped: came from {host}, where its source is not");
            }
        };
        write!(f, "faults: {what} (frame {number})")
    }
}

/// A port. Layers, as for faults, are ports around another one.
pub(crate) trait Port {
    /// The identification that the next frame of IPv4 on a segment is to have, so that it can leave
    /// together with those before it.
    fn identification(&self, _: Segment) -> u16 {
        0
    }

    /// Room for a frame of `len` bytes to `destination`, at time `now`, nanoseconds. It leaves if
    /// [`Self::end`] follows.
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

    /// The frame of [`Self::begin`].
    fn written(&mut self) -> &mut [u8];

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
    fn timer(&self) -> Option<u64>;
}

#[cfg(test)]
mod tests {
    use super::super::rooms::{Kept, Rooms};
    use super::*;
    use crate::footprint::Footprint;

    /// A burst of one frame, and the frame as it is kept.
    fn keep(rooms: &mut Rooms, account: &Footprint) -> (Burst, Kept) {
        let burst = burst(LONGEST);
        rooms.current = burst.room();
        let (_, frame, _) = burst.frames().next().unwrap();
        let kept = rooms.keep(frame, 1, &account.empty()).unwrap();
        assert!(burst.is_kept() && account.bytes() > LONGEST as u64);
        (burst, kept)
    }

    fn burst(len: usize) -> Burst {
        let mut burst = Burst::default();
        burst.push(Segment::Own(0), &vec![1; len]);
        burst
    }

    #[test]
    fn what_was_kept_and_taken_while_its_burst_was_is_in_no_account() {
        let (account, mut rooms) = (Footprint::default(), Rooms::default());
        let (mut burst, kept) = keep(&mut rooms, &account);
        rooms.release(kept);
        rooms.current = None;
        burst.taken();
        assert!(!burst.is_kept());
        assert_eq!(account.bytes(), 0);
    }

    #[test]
    fn a_burst_in_which_something_is_kept_is_left_alone() {
        let (account, mut rooms) = (Footprint::default(), Rooms::default());
        let (mut burst, kept) = keep(&mut rooms, &account);
        rooms.current = None;
        burst.taken();
        assert!(burst.is_kept() && account.bytes() != 0);
        burst.space().fill(2);
        assert!(kept.bytes().iter().all(|byte| *byte == 1));
        assert!(!burst.is_kept());
    }

    #[test]
    fn few_bytes_are_not_kept_in_their_burst() {
        assert!(burst(LEAST_KEPT - 1).room().is_none());
        assert!(burst(LEAST_KEPT).room().is_some());
        assert!(Burst::default().room().is_none());
    }
}
