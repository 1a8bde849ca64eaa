// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports: where frames leave and come. Nothing of them blocks, and time is a parameter.
use std::fmt;

#[cfg(test)]
pub(super) mod sim;

/// What became of a frame that was to be sent, as far as the port knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Sent,
    /// Faults, by the number of the frame since they began: it is lost.
    Lost(u64),
    /// One bit of it is damaged.
    Damaged(u64),
    /// It goes twice, the second time later.
    Repeated(u64),
    /// It goes later.
    Delayed(u64),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, number) = match self {
            Self::Sent => return f.write_str("sent"),
            Self::Lost(number) => ("lost", number),
            Self::Damaged(number) => ("damaged", number),
            Self::Repeated(number) => ("repeated", number),
            Self::Delayed(number) => ("delayed", number),
        };
        write!(f, "faults: {what} (frame {number})")
    }
}

/// A port. Layers, as for faults, are ports around another one.
pub(super) trait Port {
    /// The longest IP packet that it carries, bytes.
    fn mtu(&self) -> usize;

    /// Sends a frame at time `now`, nanoseconds. It may be lost.
    fn send(&mut self, now: u64, frame: &[u8]) -> Fate;

    /// Takes the next frame that has come by `now` into `frame`; false if there is none.
    fn receive(&mut self, now: u64, frame: &mut Vec<u8>) -> bool;

    /// When it is worth a look though nobody sends, nanoseconds.
    fn timer(&self) -> Option<u64>;
}
