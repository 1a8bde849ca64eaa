// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Walks a scatter/gather list, and copies from one to another.
use virtio_rdma_spec::ring::Sge;

use crate::engine::tables::Tables;
use crate::memory::{
    copy, copy_last, copy_scattered, end_streaming, fetch_bytes, ScatterRange, Way,
};
use crate::verbs::keys::{Accessor, Grant, KeyError};

/// A position in a scatter/gather list. Each entry's key is checked, for all of the entry, when it
/// is reached.
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

    /// As much as can be had at once of what comes next, at most `max` bytes; `None` at the end.
    ///
    /// # Errors
    /// If the key does not give access.
    #[inline]
    fn next(&mut self, max: u64) -> Result<Option<ScatterRange<'_>>, KeyError> {
        let entry = loop {
            let Some((first, rest)) = self.sges.split_first() else {
                return Ok(None);
            };
            if self.done < u64::from(first.length) {
                break first;
            }
            self.sges = rest;
            self.done = 0;
            self.grant = None;
        };
        let length = u64::from(entry.length);
        if self.grant.is_none() {
            let keys = &self.tables.keys;
            let grant = keys.grant(entry.lkey, self.accessor, self.access, entry.addr, length)?;
            self.grant = Some(grant);
        }
        let Some(grant) = &self.grant else {
            return Ok(None);
        };
        let left = length - self.done;
        let scatter = grant.scattered(entry.addr.wrapping_add(self.done), left.min(max))?;
        self.done += scatter.len();
        Ok(Some(scatter))
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
        let (keys, pd) = (&tables.keys, accessor.pd);
        // What most are, a contiguous range of a region, is found in fewer steps.
        if keys
            .contiguous_once(sge.lkey, pd, access, sge.addr, length)
            .is_some()
        {
            continue;
        }
        let grant = keys.grant(sge.lkey, accessor, access, sge.addr, length)?;
        grant.scattered(sge.addr, 1)?;
    }
    Ok(())
}

/// What a copy reads.
#[derive(Debug)]
pub enum DataSource<'a> {
    /// Guest memory.
    Guest(Cursor<'a>),
    /// Bytes of ours.
    Bytes(&'a [u8]),
}

/// Reads `into.len()` bytes of a source that has as many.
///
/// # Errors
/// If a key does not give access.
pub fn fetch(from: &mut DataSource<'_>, mut into: &mut [u8]) -> Result<(), KeyError> {
    while !into.is_empty() {
        let read = match from {
            DataSource::Guest(cursor) => match cursor.next(into.len() as u64)? {
                Some(mut scatter) => {
                    let mut read = 0;
                    while !scatter.is_empty() {
                        let into = into.get_mut(read..).unwrap_or_default();
                        read += fetch_bytes(into, scatter.take(usize::MAX));
                    }
                    read
                }
                None => return Ok(()),
            },
            DataSource::Bytes(bytes) => {
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

/// Where a copy goes that may leave this process.
#[derive(Debug)]
pub enum Sink<'a> {
    /// Guest memory.
    Guest(Cursor<'a>),
    /// Bytes of ours, such as a packet.
    Bytes(&'a mut [u8]),
}

impl Sink<'_> {
    /// Copies a part of a message to it (see [`transfer`]).
    ///
    /// # Errors
    /// If a key does not give access; what precedes it has been copied.
    #[inline]
    pub fn fill(&mut self, from: &mut DataSource<'_>, part: Part) -> Result<(), Fault> {
        match self {
            Self::Guest(cursor) => transfer(cursor, from, part),
            Self::Bytes(bytes) => {
                let bytes_len = bytes.len();
                let len = usize::try_from(part.len).map_or(bytes_len, |len| len.min(bytes_len));
                let (head, rest) = std::mem::take(bytes).split_at_mut(len);
                *bytes = rest;
                fetch(from, head).map_err(Fault::Source)
            }
        }
    }
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

/// Copies a part of a message. The last word of the message becomes visible after all else.
///
/// # Errors
/// If a key does not give access; what precedes it has been copied.
#[inline]
pub fn transfer(to: &mut Cursor<'_>, from: &mut DataSource<'_>, part: Part) -> Result<(), Fault> {
    if !part.large {
        return transfer_by(Way::Cached, to, from, part);
    }
    let transferred = transfer_by(Way::Streaming, to, from, part);
    end_streaming();
    transferred
}

#[inline]
fn transfer_by(
    way: Way,
    to: &mut Cursor<'_>,
    from: &mut DataSource<'_>,
    part: Part,
) -> Result<(), Fault> {
    let mut left = part.len;
    while left > 0 {
        let Some(mut to) = to.next(left).map_err(Fault::Destination)? else {
            break;
        };
        // One scatter range of the destination may need several of the source.
        while !to.is_empty() {
            let len = match from {
                DataSource::Guest(cursor) => {
                    let Some(mut source) = cursor.next(to.len()).map_err(Fault::Source)? else {
                        return Ok(());
                    };
                    let len = source.len();
                    copy_scattered(&mut to, &mut source, way, part.last && len == left);
                    len
                }
                DataSource::Bytes(bytes) => {
                    let range = to.take(bytes.len());
                    let (head, rest) = bytes.split_at(range.len());
                    *bytes = rest;
                    if part.last && head.len() as u64 == left {
                        copy_last(range, head.into());
                    } else {
                        copy(range, head.into());
                    }
                    head.len() as u64
                }
            };
            if len == 0 {
                return Ok(());
            }
            left -= len;
        }
    }
    Ok(())
}
