// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Walks a scatter/gather list, piece by contiguous piece.
use virtio_rdma_spec::ring::Sge;

use crate::memory::{copy, copy_last, copy_streaming, end_streaming, fetch_bytes, Source, Span};
use crate::verbs::keys::{Accessor, Grant, KeyError};
use crate::verbs::tables::Tables;

/// A position in a scatter/gather list. Each entry's key is checked, for all of the entry, when it is reached.
#[derive(Debug)]
pub struct Cursor<'a> {
    tables: &'a Tables,
    sges: &'a [Sge],
    accessor: Accessor,
    access: u32,
    /// Leave for the first entry of `sges`, once looked up.
    grant: Option<Grant<'a>>,
    /// Bytes of the first entry of `sges` that are behind us.
    done: u64,
}

impl<'a> Cursor<'a> {
    /// A cursor `skip` bytes into the list.
    #[must_use]
    pub fn new(
        tables: &'a Tables,
        sges: &'a [Sge],
        accessor: Accessor,
        access: u32,
        skip: u64,
    ) -> Self {
        let mut cursor = Self {
            tables,
            sges,
            accessor,
            access,
            grant: None,
            done: skip,
        };
        while let Some((first, rest)) = cursor.sges.split_first() {
            let length = u64::from(first.length);
            if cursor.done < length {
                break;
            }
            cursor.done -= length;
            cursor.sges = rest;
        }
        cursor
    }

    /// The next contiguous piece, of at most `max` bytes; `None` at the end.
    ///
    /// # Errors
    /// If the key does not give access.
    #[inline]
    fn next(&mut self, max: u64) -> Result<Option<Span<'a>>, KeyError> {
        while let Some((first, rest)) = self.sges.split_first() {
            let left = u64::from(first.length) - self.done;
            if left == 0 {
                self.sges = rest;
                self.done = 0;
                self.grant = None;
                continue;
            }
            let grant = match &self.grant {
                Some(grant) => grant,
                None => {
                    let length = u64::from(first.length);
                    let keys = &self.tables.keys;
                    let grant =
                        keys.grant(first.lkey, self.accessor, self.access, first.addr, length)?;
                    self.grant.insert(grant)
                }
            };
            let span = grant.span(first.addr.wrapping_add(self.done), left.min(max))?;
            self.done += span.len() as u64;
            if self.done < u64::from(first.length) {
                // While this piece is copied.
                grant.prefetch(first.addr.wrapping_add(self.done));
            }
            return Ok(Some(span));
        }
        Ok(None)
    }
}

/// Checks every entry of a list.
///
/// # Errors
/// The reason of the first that does not give access.
pub fn check(
    tables: &Tables,
    sges: &[Sge],
    accessor: Accessor,
    access: u32,
) -> Result<(), KeyError> {
    for sge in sges.iter().filter(|sge| sge.length != 0) {
        let length = u64::from(sge.length);
        let grant = tables
            .keys
            .grant(sge.lkey, accessor, access, sge.addr, length)?;
        grant.span(sge.addr, 1)?;
    }
    Ok(())
}

/// What a copy reads.
#[derive(Debug)]
pub enum From<'a> {
    /// Guest memory.
    Guest(Cursor<'a>),
    /// Bytes of ours.
    Bytes(&'a [u8]),
}

/// Reads `into.len()` bytes of a source that has as many.
///
/// # Errors
/// If a key does not give access.
pub fn fetch(from: &mut From<'_>, mut into: &mut [u8]) -> Result<(), KeyError> {
    while !into.is_empty() {
        let read = match from {
            From::Guest(cursor) => match cursor.next(into.len() as u64)? {
                Some(span) => fetch_bytes(into, span),
                None => return Ok(()),
            },
            From::Bytes(bytes) => {
                let n = bytes.len().min(into.len());
                let (head, rest) = bytes.split_at(n);
                into.get_mut(..n).unwrap_or_default().copy_from_slice(head);
                *bytes = rest;
                n
            }
        };
        if read == 0 {
            return Ok(());
        }
        into = into.get_mut(read..).unwrap_or_default();
    }
    Ok(())
}

/// Which side of a copy failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// What is read.
    Source(KeyError),
    /// What is written.
    Destination(KeyError),
}

/// A part of a message that is copied at once.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Length, bytes.
    pub len: u64,
    /// It ends the message.
    pub last: bool,
    /// The message is so large that it does not fit into caches.
    pub large: bool,
}

impl Part {
    /// All of a message of `len` bytes that is not large.
    #[must_use]
    pub fn whole(len: u64) -> Self {
        Self {
            len,
            last: true,
            large: false,
        }
    }
}

/// Bytes at the end of a large message that are copied as small ones are.
const TAIL: u64 = 64;

/// Copies a part of a message. The last word of the message becomes visible after all else.
///
/// # Errors
/// If a key does not give access; what precedes it has been copied.
#[inline]
pub fn transfer(to: &mut Cursor<'_>, from: &mut From<'_>, part: Part) -> Result<(), Fault> {
    if !part.large {
        return transfer_with(to, from, part.len, part.last, copy);
    }
    let tail = if part.last { TAIL.min(part.len) } else { 0 };
    let streamed = transfer_with(to, from, part.len - tail, false, copy_streaming);
    end_streaming();
    streamed?;
    transfer_with(to, from, tail, part.last, copy)
}

#[inline]
fn transfer_with(
    to: &mut Cursor<'_>,
    from: &mut From<'_>,
    len: u64,
    last: bool,
    copy: impl Fn(Span<'_>, Source<'_>),
) -> Result<(), Fault> {
    let mut left = len;
    while left > 0 {
        let Some(mut to) = to.next(left).map_err(Fault::Destination)? else {
            break;
        };
        // One piece of the destination may need several of the source.
        while !to.is_empty() {
            let source: Source<'_> = match from {
                From::Guest(cursor) => match cursor.next(to.len() as u64).map_err(Fault::Source)? {
                    Some(span) => span.into(),
                    None => return Ok(()),
                },
                From::Bytes(bytes) => {
                    let (head, rest) = bytes.split_at(bytes.len().min(to.len()));
                    *bytes = rest;
                    head.into()
                }
            };
            if source.is_empty() {
                return Ok(());
            }
            let (head, rest) = to.split_at(source.len());
            left -= source.len() as u64;
            if last && left == 0 {
                copy_last(head, source);
            } else {
                copy(head, source);
            }
            to = rest;
        }
    }
    Ok(())
}
