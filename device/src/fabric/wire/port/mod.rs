// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports: where frames leave and come. Nothing of them blocks, and time is a parameter.
use std::fmt;

use std::io;
use std::net::UdpSocket;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBuf, RcvBufForce};

use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

pub(crate) mod interface;
#[cfg(test)]
pub(super) mod sim;
pub(crate) mod uplinks;
pub(crate) mod vxlan;

/// Bytes of frames that may wait in a socket.
const RECEIVED: usize = 8 << 20;
/// The longest datagram, bytes.
const LONGEST: usize = 1 << 16;

/// Makes room in a socket for bursts, which wait there while the worker does other things. Without
/// privileges there is less.
fn receive_buffer(socket: &UdpSocket) -> io::Result<()> {
    if setsockopt(socket, RcvBufForce, &RECEIVED).is_err() {
        setsockopt(socket, RcvBuf, &RECEIVED)?;
    }
    Ok(())
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
    /// Sends a frame to `destination` at time `now`, nanoseconds. It may be lost.
    fn send(&mut self, now: u64, segment: Segment, destination: Gid, frame: &[u8]) -> Fate;

    /// Takes the next frame that has come by `now` into `frame`, and returns where it came from, if
    /// there is one.
    fn receive(&mut self, now: u64, frame: &mut Vec<u8>) -> Option<Segment>;

    /// When it is worth a look though nobody sends, nanoseconds.
    #[cfg(test)]
    fn timer(&self) -> Option<u64>;
}
