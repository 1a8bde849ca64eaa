// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames that a wire has sent and received, and those that messages within this process would have
//! been, with what became of them, for those who want to see them: a worker puts copies into a bounded list, another thread takes them out and makes a file of
//! them for Wireshark.
//!
//! While nobody captures it costs a load for each frame.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::pcapng;
use super::port::Direction;
use crate::engine::vm::Segment;
use crate::verbs::cq::clock;

/// Bytes of frames that wait to be taken, at most.
const MOST_BYTES: usize = 16 << 20;

/// A frame.
#[derive(Debug, Clone)]
pub(crate) struct Captured {
    /// When, by the device's clock, nanoseconds.
    time: u64,
    /// Where it was sent or came from; nothing if it stayed in this process.
    segment: Option<Segment>,
    direction: Direction,
    frame: Vec<u8>,
    comment: Option<String>,
}

impl Captured {
    #[cfg(test)]
    pub(super) fn frame(&self) -> (&[u8], Option<&str>) {
        (&self.frame, self.comment.as_deref())
    }

    /// Whether it is from or to a MAC address, or to many.
    pub(crate) fn concerns(&self, mac: &[u8; 6]) -> bool {
        let address = |at: usize| self.frame.get(at..at + 6);
        let group = self.frame.first().is_some_and(|byte| byte & 1 != 0);
        group || address(0) == Some(mac) || address(6) == Some(mac)
    }
}

/// Frames that wait.
#[derive(Debug, Default)]
struct Frames {
    list: Vec<Captured>,
    bytes: usize,
    /// Captures so far.
    captures: u64,
}

/// What is captured of a process.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    /// The number of this capture; zero if there is none.
    number: AtomicU64,
    frames: Mutex<Frames>,
    /// Frames that found no room.
    missed: AtomicU64,
}

impl Capture {
    /// From now on frames are captured, or no longer. Nothing is left of what was captured before.
    pub(crate) fn set(&self, on: bool) {
        let mut frames = self.frames();
        *frames = Frames {
            captures: frames.captures + u64::from(on),
            ..Frames::default()
        };
        let number = if on { frames.captures } else { 0 };
        self.missed.store(0, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
    }

    /// The number of this capture, if there is one.
    pub(super) fn number(&self) -> Option<u64> {
        Some(self.number.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Whether frames are captured.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.number.load(Ordering::Relaxed) != 0
    }

    fn frames(&self) -> MutexGuard<'_, Frames> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A frame was sent or received at time `time`, nanoseconds. It does not wait. Returns whether
    /// there was room for it.
    pub(super) fn add(
        &self,
        time: u64,
        segment: Option<Segment>,
        direction: Direction,
        frame: &[u8],
        comment: Option<String>,
    ) -> bool {
        let mut frames = match self.frames.try_lock() {
            Ok(frames) => frames,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.missed.fetch_add(1, Ordering::Relaxed);
                return false;
            }
        };
        let bytes = frames.bytes + frame.len() + size_of::<Captured>();
        if bytes > MOST_BYTES {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        frames.bytes = bytes;
        frames.list.push(Captured {
            time,
            segment,
            direction,
            frame: frame.to_vec(),
            comment,
        });
        true
    }

    /// Takes what was captured, the oldest first, and how many frames found no room since the last
    /// time.
    pub(crate) fn take(&self) -> (Vec<Captured>, u64) {
        let mut frames = self.frames();
        frames.bytes = 0;
        let taken = std::mem::take(&mut frames.list);
        drop(frames);
        (taken, self.missed.swap(0, Ordering::Relaxed))
    }
}

/// A file for Wireshark, as it grows: an interface for each segment.
#[derive(Debug)]
pub(crate) struct CaptureFile {
    interfaces: Vec<(Option<Segment>, String)>,
    /// From the device's clock to the time since 1970, nanoseconds.
    since_1970: u64,
    /// Bytes of each frame, at most.
    snap: usize,
}

impl CaptureFile {
    /// Begins one in `out` that has at most `snap` bytes of each frame.
    pub(crate) fn begin(out: &mut Vec<u8>, snap: usize) -> Self {
        pcapng::section(out);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        Self {
            interfaces: Vec::new(),
            since_1970: now.saturating_sub(clock()),
            snap,
        }
    }

    /// Appends a frame. `prefix` goes before the name of its interface.
    pub(crate) fn add(&mut self, out: &mut Vec<u8>, prefix: &str, frame: &Captured) {
        let segment = frame.segment.map(|segment| segment.to_string());
        let name = format!("{prefix}{}", segment.as_deref().unwrap_or("local"));
        let known = |(segment, known): &(_, String)| *segment == frame.segment && *known == name;
        let number = self.interfaces.iter().position(known);
        let number = number.unwrap_or_else(|| {
            pcapng::interface(out, &name);
            self.interfaces.push((frame.segment, name));
            self.interfaces.len() - 1
        });
        pcapng::packet(
            out,
            &pcapng::Packet {
                interface: u32::try_from(number).unwrap_or(u32::MAX),
                time: self.since_1970.saturating_add(frame.time),
                direction: frame.direction,
                frame: &frame.frame,
                snap: self.snap,
                comment: frame.comment.as_deref(),
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(capture: &Capture, len: usize) {
        let segment = Some(Segment::Vxlan(1));
        capture.add(5, segment, Direction::In, &vec![2; len], None);
    }

    #[test]
    fn frames_are_taken_once_and_only_what_there_is_room_for_is_kept() {
        let capture = Capture::default();
        assert!(!capture.is_on());
        capture.set(true);
        add(&capture, 100);
        add(&capture, 200);
        let (frames, missed) = capture.take();
        assert_eq!((frames.len(), missed), (2, 0));
        assert_eq!(frames[1].frame.len(), 200);
        for _ in 0..20 {
            add(&capture, 1 << 20);
        }
        let (frames, missed) = capture.take();
        assert_eq!((frames.len(), missed), (15, 5));
        add(&capture, 1);
        capture.set(false);
        assert_eq!(capture.take().0.len(), 0);
    }

    #[test]
    fn frames_concern_those_whose_addresses_they_have() {
        let capture = Capture::default();
        let mut frame = vec![2; 60];
        frame[6..12].fill(4);
        capture.add(0, None, Direction::Out, &frame, None);
        frame[0] = 3;
        capture.add(0, None, Direction::Out, &frame, None);
        let (frames, _) = capture.take();
        let concerns = |frame: usize, mac| frames[frame].concerns(&[mac; 6]);
        assert!(concerns(0, 2) && concerns(0, 4) && !concerns(0, 6));
        assert!(concerns(1, 6), "to many");
    }
}
