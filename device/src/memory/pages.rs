// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest pages resolved to host addresses.
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use virtio_rdma_spec::command::PageList;

use super::{Error, GuestMemory, Span};

/// A host address within a mapping that the owning [`Pages`] keeps alive.
#[derive(Debug, Clone, Copy)]
struct Host(*mut u8);

// SAFETY: the address is only used through `Pages`, which keeps the mapping alive and accesses it by atomics and by copies
// that allow for others writing at the same time.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

#[derive(Debug)]
enum Map {
    /// All pages follow each other, in guest and host.
    Linear { guest: u64, host: Host },
    /// Not in guest memory (any longer): nothing can be accessed.
    Lost { guest: Box<[u64]> },
    /// Anything else.
    Scattered {
        guest: Box<[u64]>,
        host: Box<[Host]>,
    },
}

/// A list of guest pages, resolved. Keeps the mapping that it was resolved in alive.
#[derive(Debug)]
pub struct Pages {
    /// `None`: the pages are lost.
    memory: Option<GuestMemory>,
    map: Map,
    /// log2 of the page size.
    shift: u8,
    /// In all, bytes.
    len: u64,
}

impl Pages {
    /// Resolves the pages of 2^`shift` bytes at the guest-physical addresses `guest`.
    ///
    /// # Errors
    /// [`Error::PageList`] if there is no page, the page size is not between 4 KiB and 2 GiB, or a page is not aligned to
    /// it; [`Error::NotGuestMemory`] if a page is not wholly in one region of guest memory.
    pub fn resolve(memory: &GuestMemory, guest: Vec<u64>, shift: u8) -> Result<Self, Error> {
        if guest.is_empty() || !(12..=31).contains(&shift) {
            return Err(Error::PageList);
        }
        let size = 1u64 << shift;
        let len = (guest.len() as u64)
            .checked_mul(size)
            .ok_or(Error::PageList)?;
        let mut host = Vec::with_capacity(guest.len());
        let mut linear = true;
        for (i, &page) in guest.iter().enumerate() {
            if page % size != 0 {
                return Err(Error::PageList);
            }
            let at = memory.host(page, size).ok_or(Error::NotGuestMemory(page))?;
            let offset = (i as u64) << shift;
            linear &= guest
                .first()
                .is_some_and(|first| first.checked_add(offset) == Some(page))
                && host.first().is_none_or(|first: &Host| {
                    (first.0 as u64).checked_add(offset) == Some(at as u64)
                });
            host.push(Host(at));
        }
        let map = match (linear, guest.first(), host.first()) {
            (true, Some(&guest), Some(&host)) => Map::Linear { guest, host },
            _ => Map::Scattered {
                guest: guest.into(),
                host: host.into(),
            },
        };
        Ok(Self {
            memory: Some(memory.clone()),
            map,
            shift,
            len,
        })
    }

    /// No pages at all, for an object without a buffer.
    #[must_use]
    pub fn none() -> Self {
        let map = Map::Lost {
            guest: Box::default(),
        };
        Self {
            memory: None,
            map,
            shift: 12,
            len: 0,
        }
    }

    /// The same guest pages, resolved anew in `memory`. Where that fails they are lost, until a later call finds them.
    #[must_use]
    pub fn rebase(&self, memory: Option<&GuestMemory>) -> Self {
        let guest: Vec<u64> = match &self.map {
            Map::Linear { guest, .. } => (0..self.count())
                .map(|i| guest.wrapping_add(i << self.shift))
                .collect(),
            Map::Scattered { guest, .. } | Map::Lost { guest } => guest.to_vec(),
        };
        let found = memory.and_then(|memory| Self::resolve(memory, guest.clone(), self.shift).ok());
        found.unwrap_or(Self {
            memory: None,
            map: Map::Lost {
                guest: guest.into(),
            },
            shift: self.shift,
            len: self.len,
        })
    }

    /// Whether the pages are not in guest memory any longer.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.memory.is_none()
    }

    /// Whether the pages were resolved in this very memory.
    #[must_use]
    pub fn resolved_in(&self, memory: &GuestMemory) -> bool {
        self.memory.as_ref().is_some_and(|own| own.same(memory))
    }

    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.len >> self.shift
    }

    /// Size in all, bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // only `none` has no page
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Memory of the process that this list takes, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        match &self.map {
            Map::Linear { .. } | Map::Lost { .. } => 0,
            Map::Scattered { guest, .. } => 16 * guest.len() as u64,
        }
    }

    /// Host address of `offset`, and the bytes that follow it contiguously.
    #[inline]
    fn at(&self, offset: u64) -> Option<(*mut u8, u64)> {
        let left = self.len.checked_sub(offset).filter(|left| *left > 0)?;
        match &self.map {
            // `offset` < `len`: within the mapping.
            Map::Linear { host, .. } => Some((host.0.wrapping_add(offset as usize), left)),
            Map::Lost { .. } => None,
            Map::Scattered { host, .. } => {
                let page = host.get((offset >> self.shift) as usize)?;
                let in_page = offset & ((1 << self.shift) - 1);
                Some((
                    page.0.wrapping_add(in_page as usize),
                    (1 << self.shift) - in_page,
                ))
            }
        }
    }

    /// The longest contiguous piece that starts at `offset`, of at most `max` bytes; `None` beyond the end.
    #[inline]
    #[must_use]
    pub fn span(&self, offset: u64, max: u64) -> Option<Span<'_>> {
        let (ptr, contiguous) = self.at(offset)?;
        Some(Span {
            ptr,
            len: contiguous.min(max) as usize,
            owner: PhantomData,
        })
    }

    /// The aligned 8-byte word at `offset`.
    #[inline]
    #[must_use]
    pub fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if offset % 8 != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: `ptr` is valid for the 8 bytes: pages are page aligned and a multiple of 8 long, and `offset` is a multiple of 8
        // below `len`. The mapping lives as long as `self`. All access to ring memory, ours and the guest's, is atomic.
        Some(unsafe { &*ptr.cast::<AtomicU64>() })
    }

    /// The `N` words at `offset`, which is a multiple of their size; `N` is a power of two up to 512.
    #[inline]
    #[must_use]
    pub fn words<const N: usize>(&self, offset: u64) -> Option<&[AtomicU64; N]> {
        const { assert!(N.is_power_of_two() && N <= 512) };
        if offset % (8 * N as u64) != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: as in `word`: pages are a multiple of `8 * N` long and aligned to it, and so is `offset`, below `len`.
        Some(unsafe { &*ptr.cast::<[AtomicU64; N]>() })
    }

    /// The aligned 4-byte word at `offset`.
    #[inline]
    #[must_use]
    pub fn half_word(&self, offset: u64) -> Option<&AtomicU32> {
        if offset % 4 != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: as in `word`, for 4 bytes.
        Some(unsafe { &*ptr.cast::<AtomicU32>() })
    }
}

/// Reads the page list that `list` describes: guest-physical addresses, at most `max` of them.
///
/// # Errors
/// [`Error::PageList`] for a malformed list, [`Error::NotGuestMemory`] for a table outside of guest memory.
pub fn read_page_list(memory: &GuestMemory, list: &PageList, max: u32) -> Result<Vec<u64>, Error> {
    let capacity = match list.levels {
        0 => 1,
        levels @ 1..=3 => 512u64.pow(u32::from(levels)),
        _ => return Err(Error::PageList),
    };
    if list.count == 0 || list.count > max || u64::from(list.count) > capacity || list.reserved != 0
    {
        return Err(Error::PageList);
    }
    let mut level = vec![list.addr];
    for depth in (0..list.levels).rev() {
        // Entries of this level in all: pages covered by one entry shrink by 512 with each level.
        let covers = 512usize.pow(u32::from(depth));
        let entries = (list.count as usize).div_ceil(covers);
        let mut next = Vec::with_capacity(entries);
        for table in &level {
            let words = memory.table(*table).ok_or(Error::NotGuestMemory(*table))?;
            let wanted = entries.saturating_sub(next.len()).min(512);
            next.extend(
                words
                    .iter()
                    .take(wanted)
                    .map(|word| u64::from_le(word.load(Ordering::Relaxed))),
            );
        }
        level = next;
    }
    Ok(level)
}

#[cfg(test)]
mod tests {
    use super::super::{copy, copy_last, fetch_bytes, region};
    use super::*;
    use proptest::prelude::*;

    fn list(addr: u64, count: u32, levels: u8) -> PageList {
        PageList {
            addr,
            count,
            levels,
            page_shift: 12,
            reserved: 0,
        }
    }

    fn write_table(memory: &GuestMemory, at: u64, entries: impl Iterator<Item = u64>) {
        for (word, entry) in memory.table(at).unwrap().iter().zip(entries) {
            word.store(entry.to_le(), Ordering::Relaxed);
        }
    }

    #[test]
    fn page_lists_of_every_depth_are_read() {
        let memory = GuestMemory::new(vec![region(0, 16)]).unwrap();
        assert_eq!(
            read_page_list(&memory, &list(0x5000, 1, 0), 1).unwrap(),
            [0x5000]
        );
        write_table(&memory, 0x1000, (0..512).map(|i| i * 0x1000));
        let one = read_page_list(&memory, &list(0x1000, 512, 1), 512).unwrap();
        assert_eq!((one.len(), one[511]), (512, 511 * 0x1000));
        write_table(&memory, 0x2000, [0x1000, 0x3000].into_iter());
        write_table(&memory, 0x3000, [0x7000].into_iter());
        let two = read_page_list(&memory, &list(0x2000, 513, 2), 1000).unwrap();
        assert_eq!((two.len(), two[512]), (513, 0x7000));
        write_table(&memory, 0x4000, [0x2000].into_iter());
        let three = read_page_list(&memory, &list(0x4000, 513, 3), 1000).unwrap();
        assert_eq!(two, three);
    }

    // D-PAGE-002.
    #[test]
    fn malformed_page_lists_are_refused() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        for bad in [
            list(0, 0, 0),
            list(0, 2, 0),
            list(0, 513, 1),
            list(0, 1, 4),
            list(0, 11, 1),
            PageList {
                reserved: 1,
                ..list(0, 1, 0)
            },
        ] {
            assert!(
                matches!(read_page_list(&memory, &bad, 10), Err(Error::PageList)),
                "{bad:?}"
            );
        }
        for bad in [list(0x8000, 1, 1), list(8, 1, 1)] {
            assert!(matches!(
                read_page_list(&memory, &bad, 10),
                Err(Error::NotGuestMemory(_))
            ));
        }
        assert!(matches!(
            Pages::resolve(&memory, vec![0x800], 12),
            Err(Error::PageList)
        ));
        assert!(matches!(
            Pages::resolve(&memory, vec![], 12),
            Err(Error::PageList)
        ));
        assert!(matches!(
            Pages::resolve(&memory, vec![0], 11),
            Err(Error::PageList)
        ));
        assert!(matches!(
            Pages::resolve(&memory, vec![0], 32),
            Err(Error::PageList)
        ));
        assert!(matches!(
            Pages::resolve(&memory, vec![0], 16),
            Err(Error::NotGuestMemory(0))
        ));
        assert!(matches!(
            Pages::resolve(&memory, vec![0x4000], 12),
            Err(Error::NotGuestMemory(_))
        ));
    }

    #[test]
    fn lost_pages_give_nothing_and_come_back() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        let pages = Pages::resolve(&memory, vec![0x3000, 0x1000], 12).unwrap();
        assert!(pages.word(8).is_some() && !pages.lost());
        let lost = pages.rebase(None);
        assert!(lost.lost() && lost.word(8).is_none() && lost.span(0, 1).is_none());
        assert_eq!(lost.len(), pages.len());
        let found = lost.rebase(Some(&memory));
        assert!(!found.lost() && found.resolved_in(&memory));
        found.word(8).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(pages.word(8).unwrap().load(Ordering::Relaxed), 7);
    }

    #[test]
    fn words_beyond_the_end_or_unaligned_do_not_exist() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        let pages = Pages::resolve(&memory, vec![0x1000], 12).unwrap();
        assert!(pages.word(4088).is_some());
        for offset in [4096, 4, u64::MAX - 7, u64::MAX] {
            assert!(pages.word(offset).is_none());
        }
        assert!(pages.half_word(4092).is_some());
        assert!(pages.half_word(2).is_none() && pages.half_word(4096).is_none());
    }

    fn fill(pages: &Pages, at: u64, bytes: &[u8]) {
        let mut from = bytes;
        let mut at = at;
        while !from.is_empty() {
            let span = pages.span(at, from.len() as u64).unwrap();
            let (head, rest) = from.split_at(span.len());
            copy(span, head.into());
            at += span.len() as u64;
            from = rest;
        }
    }

    fn read(pages: &Pages, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let span = pages
                .span(at + bytes.len() as u64, (len - bytes.len()) as u64)
                .unwrap();
            let mut part = vec![0; span.len()];
            fetch_bytes(&mut part, span);
            bytes.extend(part);
        }
        bytes
    }

    proptest! {
        /// Past the caches or through them, overlapping or not: the same bytes.
        #[test]
        fn streaming_copies_as_any_copy(from in 0u64..5000, to in 0u64..5000, len in 0u64..3000) {
            let data: Vec<u8> = (0..8192u32).map(|i| (i * 7 + i / 256) as u8).collect();
            let run = |copy: fn(Span<'_>, super::super::Source<'_>)| {
                let memory = GuestMemory::new(vec![region(0, 2)]).unwrap();
                let pages = Pages::resolve(&memory, vec![0, 4096], 12).unwrap();
                fill(&pages, 0, &data);
                copy(pages.span(to, len).unwrap(), pages.span(from, len).unwrap().into());
                super::super::end_streaming();
                read(&pages, 0, data.len())
            };
            prop_assert_eq!(run(super::super::copy_streaming), run(copy));
        }

        /// Whatever the order of the pages, bytes are where the list says; a copy changes nothing else.
        #[test]
        fn copies_through_scattered_pages(
            order in Just([0u64, 1, 2, 3, 4, 5, 6, 7]).prop_shuffle(),
            from in 0usize..3000, to in 0usize..9, len in 0usize..400,
            seed in any::<u8>(),
        ) {
            let memory = GuestMemory::new(vec![region(0, 8)]).unwrap();
            let pages = Pages::resolve(&memory, order.iter().map(|p| p << 12).collect(), 12).unwrap();
            let data: Vec<u8> = (0..8 * 4096u32).map(|i| (i * 7 + i / 256) as u8 ^ seed).collect();
            fill(&pages, 0, &data);
            prop_assert_eq!(&read(&pages, 0, data.len()), &data);
            let target = 4 * 4096 + to;
            let source = pages.span(from as u64, len as u64).unwrap();
            let copied = source.len().min(len);
            copy_last(pages.span(target as u64, len as u64).unwrap(), source.into());
            let mut expected = data.clone();
            expected.copy_within(from..from + copied, target);
            prop_assert_eq!(read(&pages, 0, data.len()), expected);
        }
    }
}
