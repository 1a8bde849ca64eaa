// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ports: where frames leave and come. Nothing of them blocks, and time is a parameter.
#[cfg(test)]
pub(super) mod sim;

/// A port. Layers, as for faults, are ports around another one.
pub(super) trait Port {
    /// The longest IP packet that it carries, bytes.
    fn mtu(&self) -> usize;

    /// Sends a frame at time `now`, nanoseconds. It may be lost.
    fn send(&mut self, now: u64, frame: &[u8]);

    /// Takes the next frame that has come by `now` into `frame`; false if there is none.
    fn receive(&mut self, now: u64, frame: &mut Vec<u8>) -> bool;

    /// When it is worth a look though nobody sends, nanoseconds.
    fn timer(&self) -> Option<u64>;
}
