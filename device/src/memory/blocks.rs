// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Blocks of guest memory, of any address and length, resolved to host addresses.
use std::marker::PhantomData;

use super::guest::{Finder, Host, MappedRange};
use super::{ContiguousRange, Error, GuestMemory};
use crate::footprint::Share;

/// A list of blocks of guest memory, resolved, that are seen as one contiguous range. Keeps the
/// mapping that it was resolved in alive.
///
/// If the memory that they are in is removed, the blocks are *lost*, as [`super::Pages`] may be.
#[derive(Debug)]
pub struct Blocks {
    /// The memory that they are in; none: they are lost.
    mapping: Option<GuestMemory>,
    /// Host addresses of the blocks, or, while they are lost, guest-physical ones.
    hosts: Box<[Host]>,
    /// Where each block starts, counted from the first.
    starts: Box<[u64]>,
    /// Length of all, bytes.
    len: u64,
    /// What both lists take of the VM's account.
    _share: Share,
}

/// Resolves blocks one after the other.
#[derive(Debug)]
pub(super) struct BlockResolver {
    /// Where the last block was: most likely the next one is there, too.
    range: Option<MappedRange>,
    starts: Vec<u64>,
    hosts: Vec<Host>,
    len: u64,
    share: Share,
}

impl BlockResolver {
    /// For `count` blocks, with a share for as many.
    pub(super) fn new(count: usize, share: Share) -> Result<Self, Error> {
        let (mut starts, mut hosts) = (Vec::new(), Vec::new());
        starts
            .try_reserve_exact(count)
            .and_then(|()| hosts.try_reserve_exact(count))
            .map_err(|_| Error::NoMemory)?;
        Ok(Self {
            range: None,
            starts,
            hosts,
            len: 0,
            share,
        })
    }

    /// Takes the next block.
    pub(super) fn push(
        &mut self,
        memory: &GuestMemory,
        addr: u64,
        length: u64,
    ) -> Result<(), Error> {
        if length == 0 {
            return Err(Error::PageList);
        }
        let known = self.range.and_then(|range| range.host(addr, length));
        let host = match known {
            Some(host) => host,
            None => {
                self.range = memory.range(addr).copied();
                self.range
                    .and_then(|range| range.host(addr, length))
                    .ok_or(Error::NotGuestMemory(addr))?
            }
        };
        self.starts.push(self.len);
        self.hosts.push(host);
        self.len = self.len.checked_add(length).ok_or(Error::PageList)?;
        Ok(())
    }

    pub(super) fn finish(mut self, memory: &GuestMemory) -> Result<Blocks, Error> {
        self.share
            .shrink(Blocks::BLOCK_FOOTPRINT * self.hosts.len() as u64);
        Ok(Blocks {
            mapping: Some(memory.clone()),
            hosts: self.hosts.into(),
            starts: self.starts.into(),
            len: self.len,
            _share: self.share,
        })
    }
}

impl Blocks {
    /// Memory of the process that a block takes at most, bytes.
    pub const BLOCK_FOOTPRINT: u64 = (size_of::<u64>() + size_of::<Host>()) as u64;

    /// Finds the same blocks in `memory`. Where that fails they are lost, until a later call finds
    /// them.
    pub fn rebase(&mut self, memory: Option<&GuestMemory>) {
        if let Some(old) = self.mapping.take() {
            let mut finder = Finder::new(&old);
            for host in &mut self.hosts {
                *host = finder.guest(*host).map_or(Host::NOWHERE, Host::lost);
            }
        }
        let Some(memory) = memory else {
            return;
        };
        let mut finder = Finder::new(memory);
        let ends = self.starts.iter().skip(1).chain([&self.len]);
        let lengths = self.starts.iter().zip(ends).map(|(start, end)| end - start);
        let mut blocks = self.hosts.iter().zip(lengths.clone());
        if blocks.all(|(block, length)| finder.host(block.guest(), length).is_some()) {
            for (block, length) in self.hosts.iter_mut().zip(lengths) {
                *block = finder.host(block.guest(), length).unwrap_or(Host::NOWHERE);
            }
            self.mapping = Some(memory.clone());
        }
    }

    /// Number of blocks.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.starts.len() as u64
    }

    /// Length of all, bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `length` bytes from `offset` on begin in the first block and need all of them.
    #[must_use]
    pub fn fit(&self, offset: u64, length: u64) -> bool {
        let first = self.starts.get(1).copied().unwrap_or(self.len);
        let last = self.starts.last().copied().unwrap_or(0);
        let end = offset.checked_add(length);
        offset < first && end.is_some_and(|end| end <= self.len && (end > last || last == 0))
    }

    /// The block that `offset` is in, and at which offset it starts; `None` beyond the end.
    #[must_use]
    pub fn contiguous(&self, offset: u64) -> Option<(u64, ContiguousRange<'_>)> {
        if self.mapping.is_none() || offset >= self.len {
            return None;
        }
        let after = self.starts.partition_point(|start| *start <= offset);
        let block = after.checked_sub(1)?;
        let start = *self.starts.get(block)?;
        let end = self.starts.get(after).copied().unwrap_or(self.len);
        // Each block was found to lie in one region of the memory, as long as that lives.
        let range = ContiguousRange {
            ptr: self.hosts.get(block)?.0,
            len: (end - start) as usize,
            owner: PhantomData,
        };
        Some((start, range))
    }

    /// The contiguous range that starts at `offset`, of at most `max` bytes; `None` beyond the end.
    #[must_use]
    pub fn range_at(&self, offset: u64, max: u64) -> Option<ContiguousRange<'_>> {
        let (start, block) = self.contiguous(offset)?;
        let (_, rest) = block.split_at((offset - start) as usize);
        let (range, _) = rest.split_at(usize::try_from(max).unwrap_or(usize::MAX));
        Some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{copy, fetch_bytes, region};
    use super::*;
    use proptest::prelude::*;

    impl Blocks {
        /// Resolves the blocks of guest-physical address and length.
        fn resolve(
            memory: &GuestMemory,
            blocks: impl ExactSizeIterator<Item = (u64, u64)>,
        ) -> Result<Self, Error> {
            let mut resolver = BlockResolver::new(blocks.len(), Share::default())?;
            for (addr, length) in blocks {
                resolver.push(memory, addr, length)?;
            }
            resolver.finish(memory)
        }
    }

    #[test]
    fn blocks_are_found_again() {
        let memory = GuestMemory::new(vec![region(0, 2), region(0x10000, 1)]).unwrap();
        let list = [(0x10, 0x20), (0x10ffe, 2), (0x1fff, 1), (0, 0x2000)];
        let mut blocks = Blocks::resolve(&memory, list.into_iter()).unwrap();
        assert_eq!((blocks.count(), blocks.len()), (4, 0x2023));
        let part = |blocks: &Blocks, at| {
            blocks
                .contiguous(at)
                .map(|(start, range)| (start, range.len()))
        };
        for (at, expected) in [
            (0, Some((0, 0x20))),
            (0x1f, Some((0, 0x20))),
            (0x20, Some((0x20, 2))),
            (0x22, Some((0x22, 1))),
            (0x23, Some((0x23, 0x2000))),
            (0x2022, Some((0x23, 0x2000))),
            (0x2023, None),
            (u64::MAX, None),
        ] {
            assert_eq!(part(&blocks, at), expected, "{at:#x}");
        }
        blocks.rebase(None);
        assert_eq!(
            (blocks.count(), blocks.len(), part(&blocks, 0)),
            (4, 0x2023, None)
        );
        let partly = GuestMemory::new(vec![region(0, 2)]).unwrap();
        blocks.rebase(Some(&partly));
        assert_eq!(part(&blocks, 0), None);
        blocks.rebase(Some(&memory));
        assert_eq!(part(&blocks, 0x20), Some((0x20, 2)));
        assert_eq!(blocks.range_at(0x2000, 0x1000).unwrap().len(), 0x23);
    }

    #[test]
    fn what_is_no_block_is_refused() {
        let memory = GuestMemory::new(vec![region(0, 2)]).unwrap();
        let one = |addr, length| Blocks::resolve(&memory, [(addr, length)].into_iter());
        assert!(one(0x1fff, 1).is_ok());
        assert!(matches!(one(0, 0), Err(Error::PageList)));
        for (addr, length) in [(0x1fff, 2), (0x2000, 1), (1, u64::MAX), (u64::MAX, 1)] {
            assert!(matches!(one(addr, length), Err(Error::NotGuestMemory(_))));
        }
    }

    #[test]
    fn a_range_needs_all_its_blocks() {
        let memory = GuestMemory::new(vec![region(0, 1)]).unwrap();
        let blocks = |list: &[(u64, u64)]| Blocks::resolve(&memory, list.iter().copied()).unwrap();
        let three = blocks(&[(0, 4), (8, 4), (16, 4)]);
        for (offset, length, fits) in [
            (0, 12, true),
            (0, 9, true),
            (0, 8, false),
            (3, 9, true),
            (3, 10, false),
            (4, 8, false),
            (0, u64::MAX, false),
            (1, u64::MAX, false),
        ] {
            assert_eq!(three.fit(offset, length), fits, "{offset} {length}");
        }
        let one = blocks(&[(0, 4)]);
        assert!(one.fit(0, 0) && one.fit(3, 0) && one.fit(3, 1));
        assert!(!one.fit(4, 0) && !three.fit(0, 0));
    }

    proptest! {
        /// All bytes, read through ranges of any size, are those of the blocks put together.
        #[test]
        fn blocks_are_one_memory(
            list in prop::collection::vec((0u64..0x1800, 1u64..0x800), 1..20), offset: u64, max in 1u64..0x1000,
        ) {
            let memory = GuestMemory::new(vec![region(0, 2)]).unwrap();
            let pattern: Vec<u8> = (0..0x2000u32).map(|i| (i * 7 + i / 251) as u8).collect();
            copy(memory.range_at(0, 0x2000).unwrap(), pattern.as_slice().into());
            let blocks = Blocks::resolve(&memory, list.iter().copied()).unwrap();
            let bytes: Vec<u8> =
                list.iter().flat_map(|(at, len)| &pattern[*at as usize..][..*len as usize]).copied().collect();
            let mut at = offset % bytes.len() as u64;
            let mut read = Vec::new();
            while let Some(range) = blocks.range_at(at, max) {
                prop_assert!(!range.is_empty() && range.len() as u64 <= max);
                let mut part = vec![0; range.len()];
                fetch_bytes(&mut part, range);
                at += part.len() as u64;
                read.extend(part);
            }
            prop_assert_eq!(&read[..], &bytes[(offset % bytes.len() as u64) as usize..]);
        }
    }
}
