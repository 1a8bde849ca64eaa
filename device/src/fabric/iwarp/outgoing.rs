// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is to be sent on a connection: FPDUs one after the other, until the socket takes them.
use std::io::{ErrorKind, Write};
use std::net::TcpStream;

use super::fpdu;
use crate::footprint::Share;

/// Bytes that wait to be sent, at most: a few of the longest FPDUs.
pub(super) const CAPACITY: usize = 256 << 10;
/// The longest FPDU: length, ULPDU and pad, CRC.
pub(super) const LONGEST: usize = 2 + 0xffff + 3 + 4;

/// Memory for [`Outgoing`] that is in no use. A connection has some only while something waits.
#[derive(Debug, Default)]
pub(super) struct Pool(Vec<Box<[u8]>>);

impl Pool {
    /// Buffers that are kept, at most.
    const KEPT: usize = 8;

    fn take(&mut self) -> Box<[u8]> {
        let new = || vec![0; CAPACITY].into_boxed_slice();
        self.0.pop().unwrap_or_else(new)
    }

    fn put(&mut self, buffer: Box<[u8]>) {
        if self.0.len() < Self::KEPT && buffer.len() == CAPACITY {
            self.0.push(buffer);
        }
    }
}

/// What is to be sent on a connection.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    buffer: Option<Box<[u8]>>,
    start: usize,
    end: usize,
    /// The peer, or this end, wants a CRC.
    crc: bool,
    /// For the buffer, while there is one.
    share: Share,
}

impl Outgoing {
    /// Nothing waits yet. What will is in the account of `share`.
    pub(super) fn new(crc: bool, share: Share) -> Self {
        Self {
            crc,
            share,
            ..Self::default()
        }
    }

    /// Gets memory, if there is none. Returns false if the account has no room.
    pub(super) fn prepare(&mut self, pool: &mut Pool) -> bool {
        if self.buffer.is_none() {
            if self.share.grow(CAPACITY as u64).is_err() {
                return false;
            }
            self.buffer = Some(pool.take());
        }
        true
    }

    /// Whether another FPDU of any length may be put.
    pub(super) fn has_room(&self) -> bool {
        self.end + LONGEST <= CAPACITY
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Puts an FPDU with this header, and `len` bytes of payload that `read` writes.
    ///
    /// # Errors
    /// That of `read`: then nothing was put.
    pub(super) fn put<E>(
        &mut self,
        header: &[u8],
        len: usize,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let buffer = self.buffer.as_deref_mut().unwrap_or_default();
        let space = buffer.get_mut(self.end..).unwrap_or_default();
        self.end += fpdu::write(space, header, len, self.crc, read)?;
        Ok(())
    }

    /// Puts the last FPDU of the connection, which is nothing but a header. It needs no memory of
    /// the account.
    pub(super) fn put_last(&mut self, header: &[u8]) {
        let space = || vec![0; fpdu::length(header.len())].into_boxed_slice();
        self.buffer.get_or_insert_with(space);
        // There is no payload that could fail.
        let _ = self.put(header, 0, |_| Ok::<_, ErrorKind>(()));
    }

    /// Sends what waits, as far as the socket takes it. Returns whether that was all.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(super) fn send(
        &mut self,
        pool: &mut Pool,
        mut socket: &TcpStream,
    ) -> std::io::Result<bool> {
        while self.start != self.end {
            let buffer = self.buffer.as_deref_mut().unwrap_or_default();
            let bytes = buffer.get(self.start..self.end).unwrap_or_default();
            match socket.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => self.start += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // What is sent makes room, once it is worth moving the rest.
                    if self.start >= CAPACITY / 2 {
                        buffer.copy_within(self.start..self.end, 0);
                        self.end -= self.start;
                        self.start = 0;
                    }
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        (self.start, self.end) = (0, 0);
        self.give_back(pool);
        Ok(true)
    }

    /// Gives its memory back, with what waits.
    pub(super) fn give_back(&mut self, pool: &mut Pool) {
        (self.start, self.end) = (0, 0);
        if let Some(buffer) = self.buffer.take() {
            pool.put(buffer);
            self.share.shrink(0);
        }
    }
}
