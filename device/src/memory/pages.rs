// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest pages resolved to host addresses.
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64};

use virtio_rdma_spec::command::PageList;

use super::guest::{Finder, Host, MappedRange};
use super::list::{Form, ListReader, Resolved};
use super::{ContiguousRange, Error, GuestMemory, ScatterRange};
use crate::footprint::{Footprint, Share};

/// A list of guest pages, resolved. Keeps the mapping that it was resolved in alive.
///
/// The pages are seen as units of 2^`unit` bytes, at the host addresses `list`: as one if all
/// follow each other in the guest and in the host, so that a look-up is the same whatever there is,
/// and that of the first unit stays within this.
///
/// If the memory that they are in is removed, the pages are *lost*: nothing can be accessed. Which
/// they were is kept, as memory often comes back: a front end that changes its memory may remove
/// all of it and add it again. In place of the host address of each unit there is its
/// guest-physical one then, so that it takes what it took before.
#[derive(Debug)]
pub struct Pages {
    /// The memory that they are in; none: they are lost.
    mapping: Option<GuestMemory>,
    /// Address of the first unit, if there is any page.
    first: Host,
    /// Addresses of all units; empty if there is only one.
    list: Box<[Host]>,
    /// Mapped bytes: all, or none.
    mapped: u64,
    /// Size in all, bytes, whether mapped or lost.
    len: u64,
    /// Bits of an offset within a unit.
    mask: u64,
    /// log2 of the size of a unit.
    unit: u8,
    /// log2 of the page size.
    shift: u8,
    /// What `list` takes of the VM's account.
    share: Share,
}

/// `Pages::unit` of pages that follow each other.
const ONE_PIECE: u8 = 63;

/// Resolves pages one after the other.
#[derive(Debug)]
pub(super) struct Resolver {
    /// Size of a page, bytes.
    size: u64,
    /// Pages that will come, at most.
    expected: usize,
    /// Where the last page was: most likely the next one is there, too.
    range: Option<MappedRange>,
    /// The first page: in the guest and in the host.
    first: Option<(u64, Host)>,
    count: u64,
    /// Empty as long as all pages follow each other.
    scattered: Vec<Host>,
    /// The first page that does not follow the others, until those are in `scattered`.
    stray: Option<Host>,
    /// Covers `scattered` with all pages in it.
    share: Share,
}

impl Resolver {
    /// For `expected` pages of 2^`shift` bytes, with a share for as many.
    pub(super) fn new(expected: usize, shift: u8, share: Share) -> Result<Self, Error> {
        if expected == 0 || !(12..=31).contains(&shift) {
            return Err(Error::PageList);
        }
        Ok(Self {
            size: 1 << shift,
            expected,
            range: None,
            first: None,
            count: 0,
            scattered: Vec::new(),
            stray: None,
            share,
        })
    }

    /// Takes the next pages, as many as it takes at once: if these are not all, there is something to
    /// [`Self::spread`] before it takes further ones. Returns how many.
    pub(super) fn take(&mut self, memory: &GuestMemory, pages: &[u64]) -> Result<usize, Error> {
        let mut taken = 0;
        while let Some((page, more)) = pages.get(taken..).and_then(|left| left.split_first()) {
            taken += 1;
            if !self.push(memory, *page)? {
                break;
            }
            // Most pages of a long list are in the same range.
            if let Some(range) = self.range.filter(|_| !self.scattered.is_empty()) {
                let fits = |page: &&u64| {
                    **page & (self.size - 1) == 0 && range.host(**page, self.size).is_some()
                };
                let many = more.iter().take_while(fits).count();
                let hosts = more.iter().take(many).map(|page| range.host_of(*page));
                self.scattered.extend(hosts);
                self.count += many as u64;
                taken += many;
            }
        }
        Ok(taken)
    }

    /// Takes the next page. Returns whether it takes further ones at once: otherwise there is
    /// something to [`Self::spread`] before.
    #[inline]
    fn push(&mut self, memory: &GuestMemory, page: u64) -> Result<bool, Error> {
        if page & (self.size - 1) != 0 {
            return Err(Error::PageList);
        }
        let known = self.range.and_then(|range| range.host(page, self.size));
        let host = match known {
            Some(host) => host,
            None => self.find(memory, page)?,
        };
        if !self.scattered.is_empty() {
            self.scattered.push(host);
        } else {
            let (guest, first) = *self.first.get_or_insert((page, host));
            let offset = self.count * self.size;
            let follows = first.0.wrapping_add(offset as usize);
            if host.0 != follows || page != guest.wrapping_add(offset) {
                self.stray = Some(host);
                return Ok(false);
            }
        }
        self.count += 1;
        Ok(true)
    }

    /// Whether there is something to [`Self::spread`].
    pub(super) fn stray(&self) -> bool {
        self.stray.is_some()
    }

    #[cold]
    fn find(&mut self, memory: &GuestMemory, page: u64) -> Result<Host, Error> {
        self.range = memory.range(page).copied();
        self.range
            .and_then(|range| range.host(page, self.size))
            .ok_or(Error::NotGuestMemory(page))
    }

    /// Writes down up to `max` of the pages that follow each other one by one, and behind them the
    /// one that does not. Returns how many.
    pub(super) fn spread(&mut self, max: usize) -> Result<usize, Error> {
        match (self.stray, self.first) {
            (Some(stray), Some((_, first))) => self.spread_before(first, stray, max),
            _ => Ok(0),
        }
    }

    #[cold]
    fn spread_before(&mut self, first: Host, stray: Host, max: usize) -> Result<usize, Error> {
        if self.scattered.is_empty() {
            let reserved = self.scattered.try_reserve_exact(self.expected);
            reserved.map_err(|_| Error::NoMemory)?;
        }
        let from = self.scattered.len() as u64;
        let to = self.count.min(from.saturating_add(max as u64));
        let offsets = (from..to).map(|i| (i * self.size) as usize);
        self.scattered
            .extend(offsets.map(|offset| Host(first.0.wrapping_add(offset))));
        if to == self.count {
            self.scattered.push(stray);
            self.stray = None;
            self.count += 1;
        }
        Ok((to - from) as usize)
    }

    pub(super) fn finish(mut self, memory: &GuestMemory) -> Result<Pages, Error> {
        let mapped = self.count.checked_mul(self.size).ok_or(Error::PageList)?;
        let shift = self.size.trailing_zeros() as u8;
        let unit = if self.scattered.is_empty() {
            ONE_PIECE
        } else {
            shift
        };
        let (_, first) = self.first.ok_or(Error::PageList)?;
        self.share
            .shrink(Pages::PAGE_FOOTPRINT * self.scattered.len() as u64);
        Ok(Pages {
            mapping: Some(memory.clone()),
            first,
            list: self.scattered.into(),
            mapped,
            len: mapped,
            mask: (1 << unit) - 1,
            unit,
            shift,
            share: self.share,
        })
    }
}

impl Pages {
    /// Memory of the process that a page takes at most, bytes.
    pub const PAGE_FOOTPRINT: u64 = size_of::<Host>() as u64;

    /// Resolves the pages of 2^`shift` bytes at the guest-physical addresses `guest`.
    ///
    /// # Errors
    /// [`Error::PageList`] if there is no page, the page size is not between 4 KiB and 2 GiB, or a
    /// page is not aligned to it; [`Error::NotGuestMemory`] if a page is not wholly in one region
    /// of guest memory.
    pub fn resolve(memory: &GuestMemory, guest: &[u64], shift: u8) -> Result<Self, Error> {
        Self::resolve_all(memory, guest.iter().copied(), shift, Share::default())
    }

    fn resolve_all(
        memory: &GuestMemory,
        guest: impl ExactSizeIterator<Item = u64>,
        shift: u8,
        share: Share,
    ) -> Result<Self, Error> {
        let mut resolver = Resolver::new(guest.len(), shift, share)?;
        for page in guest {
            resolver.take(memory, &[page])?;
            resolver.spread(usize::MAX)?;
        }
        resolver.finish(memory)
    }

    /// Reads and resolves the page list that `list` describes, for an account.
    ///
    /// # Errors
    /// As [`Self::resolve`]; [`Error::PageList`] for a malformed list, [`Error::NotGuestMemory`]
    /// for a table outside of guest memory, [`Error::NoMemory`] if the account has no room for as
    /// many pages, of which then none is looked at.
    pub fn read(memory: &GuestMemory, list: &PageList, account: &Footprint) -> Result<Self, Error> {
        let mut reader = ListReader::new(memory, list, Form::Pages, account)?;
        reader.step(usize::MAX)?;
        match reader.finish()? {
            Resolved::Pages(pages) => Ok(pages),
            Resolved::Blocks(_) => Err(Error::PageList),
        }
    }

    /// No pages at all, for an object without a buffer.
    #[must_use]
    pub fn none() -> Self {
        Self {
            mapping: None,
            first: Host::NOWHERE,
            list: Box::default(),
            mapped: 0,
            len: 0,
            mask: 0,
            unit: ONE_PIECE,
            shift: 12,
            share: Share::default(),
        }
    }

    /// Finds the same guest pages in `memory`. Where that fails they are lost, until a later call
    /// finds them. It takes time by the length of what is accounted, not by the number of pages.
    pub fn rebase(&mut self, memory: Option<&GuestMemory>) {
        self.lose();
        if let Some(memory) = memory.filter(|_| self.len != 0) {
            self.find(memory);
        }
    }

    /// Leaves the memory that the pages are in: from now on they are lost.
    fn lose(&mut self) {
        let Some(old) = self.mapping.take() else {
            return;
        };
        self.mapped = 0;
        let mut finder = Finder::new(&old);
        for unit in std::iter::once(&mut self.first).chain(&mut self.list) {
            *unit = finder.guest(*unit).map_or(Host::NOWHERE, Host::lost);
        }
    }

    /// Finds lost pages: all, or none.
    fn find(&mut self, memory: &GuestMemory) {
        let mut finder = Finder::new(memory);
        if self.unit == ONE_PIECE {
            match finder.contiguous(self.first.guest(), self.len) {
                Some(host) => self.first = host,
                None => return self.find_scattered(memory),
            }
        } else {
            let size = 1 << self.shift;
            let units = &mut self.list;
            if units
                .iter()
                .any(|unit| finder.host(unit.guest(), size).is_none())
            {
                return;
            }
            for unit in std::iter::once(&mut self.first).chain(units) {
                *unit = finder.host(unit.guest(), size).unwrap_or(Host::NOWHERE);
            }
        }
        self.mapping = Some(memory.clone());
        self.mapped = self.len;
    }

    /// What was contiguous in the host no longer is: finds its pages, if the account has room for
    /// a list of them.
    #[cold]
    fn find_scattered(&mut self, memory: &GuestMemory) {
        let (first, size) = (self.first.guest(), 1u64 << self.shift);
        let Ok(count) = u32::try_from(self.count()) else {
            return;
        };
        let pages = (0..count).map(|page| first.wrapping_add(u64::from(page) * size));
        let mut share = self.share.another();
        let room = share.grow(Self::PAGE_FOOTPRINT * u64::from(count));
        if room.is_ok() && memory.covers(first, self.len) {
            if let Ok(found) = Self::resolve_all(memory, pages, self.shift, share) {
                *self = found;
            }
        }
    }

    /// Whether the pages are not in guest memory any longer.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.mapping.is_none()
    }

    /// Whether the pages were resolved in this very memory.
    #[must_use]
    pub fn resolved_in(&self, memory: &GuestMemory) -> bool {
        self.mapping.as_ref().is_some_and(|own| own.same(memory))
    }

    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.len() >> self.shift
    }

    /// Size in all, bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // only `none` has no page
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Host address of `offset`, and the bytes that follow it contiguously.
    // For every word of a ring and every unit of a message: with many callers, it would not be
    // inlined.
    #[inline(always)]
    fn at(&self, offset: u64) -> Option<(*mut u8, u64)> {
        let left = self.mapped.checked_sub(offset).filter(|left| *left > 0)?;
        let part = (offset >> self.unit) as usize;
        let host = if part == 0 {
            self.first
        } else {
            *self.list.get(part)?
        };
        // `offset` < `mapped`: within the mapping.
        let within = offset & self.mask;
        let contiguous = (self.mask - within + 1).min(left);
        Some((host.0.wrapping_add(within as usize), contiguous))
    }

    /// The `len` bytes at `offset`; `None` if there are not as many.
    #[inline]
    #[must_use]
    pub fn scattered(&self, offset: u64, len: u64) -> Option<ScatterRange<'_>> {
        let (ptr, contiguous) = self.at(offset)?;
        let first = ContiguousRange {
            ptr,
            len: contiguous.min(len) as usize,
            owner: PhantomData,
        };
        if len <= contiguous {
            return Some(first.into());
        }
        let more = self.list.get((offset >> self.unit) as usize + 1..)?;
        ScatterRange::new(first, more, 1 << self.unit, len - contiguous)
    }

    /// The contiguous range that `offset` is in, and at which offset it starts; `None` beyond the
    /// end.
    #[inline]
    #[must_use]
    pub fn contiguous(&self, offset: u64) -> Option<(u64, ContiguousRange<'_>)> {
        let start = offset & !self.mask;
        let (ptr, len) = self.at(start)?;
        (offset - start < len).then(|| {
            let range = ContiguousRange {
                ptr,
                len: len as usize,
                owner: PhantomData,
            };
            (start, range)
        })
    }

    /// The `len` bytes at `offset`, if they are contiguous.
    #[inline]
    #[must_use]
    pub fn whole(&self, offset: u64, len: u64) -> Option<ContiguousRange<'_>> {
        let (ptr, contiguous) = self.at(offset)?;
        (len <= contiguous).then_some(ContiguousRange {
            ptr,
            len: len as usize,
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
        // SAFETY: `ptr` is valid for the 8 bytes: pages are page aligned and a multiple of 8 long,
        // and `offset` is a multiple of 8 below `mapped`. The mapping lives as long as `self`. All
        // access to ring memory, ours and the guest's, is atomic.
        Some(unsafe { &*ptr.cast::<AtomicU64>() })
    }

    /// The words of the `N` bytes at `offset`, which is a multiple of `N`, a power of two from 8 to
    /// 4096.
    #[inline(always)]
    #[must_use]
    pub fn words<const N: usize>(&self, offset: u64) -> Option<&[AtomicU64]> {
        const { assert!(N.is_power_of_two() && N >= 8 && N <= 4096) };
        if offset % N as u64 != 0 {
            return None;
        }
        let (ptr, _) = self.at(offset)?;
        // SAFETY: as in `word`: pages are a multiple of `N` long and aligned to it, and so is
        // `offset`, below `mapped`.
        Some(unsafe { std::slice::from_raw_parts(ptr.cast::<AtomicU64>(), N / 8) })
    }

    /// The 8-byte words from `offset` on, at most `max` bytes, that are contiguous.
    #[inline(always)]
    #[must_use]
    pub fn run(&self, offset: u64, max: u64) -> Option<&[AtomicU64]> {
        if offset % 8 != 0 {
            return None;
        }
        let (ptr, contiguous) = self.at(offset)?;
        let words = contiguous.min(max) / 8;
        // SAFETY: `ptr` is valid for `contiguous` bytes and aligned to 8: units are aligned to
        // pages, and so is `offset` to 8. The mapping lives as long as `self`. All access to ring
        // memory, ours and the guest's, is atomic.
        Some(unsafe { std::slice::from_raw_parts(ptr.cast::<AtomicU64>(), words as usize) })
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

#[cfg(test)]
mod tests {
    use super::super::region;
    use super::*;
    use std::sync::atomic::Ordering;

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

    /// The guest-physical addresses of the pages.
    fn guest(pages: &Pages, memory: &GuestMemory) -> Box<[u64]> {
        let page = |i| memory.guest(Host(pages.at(i << pages.shift).unwrap().0));
        (0..pages.count()).map(|i| page(i).unwrap()).collect()
    }

    fn read_list(memory: &GuestMemory, list: &PageList) -> Result<Box<[u64]>, Error> {
        let account = Footprint::default();
        Pages::read(memory, list, &account).map(|pages| guest(&pages, memory))
    }

    #[test]
    fn page_lists_of_every_depth_are_read() {
        let memory = GuestMemory::new(vec![region(0, 512)]).unwrap();
        let one_page = read_list(&memory, &list(0x5000, 1, 0)).unwrap();
        assert_eq!(*one_page, [0x5000]);
        // Backwards: no page follows another.
        write_table(&memory, 0x1000, (0..512).rev().map(|i| i * 0x1000));
        let one = read_list(&memory, &list(0x1000, 512, 1)).unwrap();
        assert_eq!((one.len(), one[0], one[511]), (512, 511 * 0x1000, 0));
        write_table(&memory, 0x2000, [0x1000, 0x3000].into_iter());
        write_table(&memory, 0x3000, [0x7000].into_iter());
        let two = read_list(&memory, &list(0x2000, 513, 2)).unwrap();
        assert_eq!((two.len(), two[512]), (513, 0x7000));
        write_table(&memory, 0x4000, [0x2000].into_iter());
        let three = read_list(&memory, &list(0x4000, 513, 3)).unwrap();
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
            PageList {
                reserved: 1,
                ..list(0, 1, 0)
            },
            PageList {
                page_shift: 11,
                ..list(0, 1, 0)
            },
        ] {
            assert!(
                matches!(read_list(&memory, &bad), Err(Error::PageList)),
                "{bad:?}"
            );
        }
        for bad in [list(0x8000, 1, 1), list(8, 1, 1)] {
            assert!(matches!(
                read_list(&memory, &bad),
                Err(Error::NotGuestMemory(_))
            ));
        }
        let resolve = |guest: &[u64], shift| Pages::resolve(&memory, guest, shift);
        for (guest, shift) in [(&[0x800][..], 12), (&[], 12), (&[0], 11), (&[0], 32)] {
            assert!(matches!(resolve(guest, shift), Err(Error::PageList)));
        }
        for (guest, shift) in [(0, 16), (0x4000, 12), (!0xfff, 12)] {
            let error = resolve(&[guest], shift).unwrap_err();
            assert!(matches!(error, Error::NotGuestMemory(addr) if addr == guest));
        }
    }

    #[test]
    fn only_pages_that_do_not_follow_each_other_take_memory() {
        let regions = vec![region(0x100_0000, 8), region(0, 8)];
        let memory = GuestMemory::new(regions).unwrap();
        let run: Vec<u64> = (0..8).map(|page| page << 12).collect();
        let account = Footprint::new(10 * Pages::PAGE_FOOTPRINT);
        let resolve = |pages: &[u64]| {
            let most = Pages::PAGE_FOOTPRINT * pages.len() as u64;
            let share = account.share(most).map_err(Error::from)?;
            Pages::resolve_all(&memory, pages.iter().copied(), 12, share)
        };
        let linear = resolve(&run).unwrap();
        assert_eq!(account.bytes(), 0);
        assert_eq!(*guest(&linear, &memory), *run);
        assert!(linear.scattered(100, 8 * 4096 - 100).is_some());
        let mut broken = run.clone();
        broken[7] = 0x100_0000;
        let scattered = resolve(&broken).unwrap();
        assert_eq!(account.bytes(), 8 * Pages::PAGE_FOOTPRINT);
        assert_eq!(*guest(&scattered, &memory), *broken);
        assert!(matches!(resolve(&run[..3]), Err(Error::NoMemory)));
        drop((linear, scattered));
        assert_eq!(account.bytes(), 0);
    }

    /// Whatever the new memory is, a list takes no more than its account says and has room for.
    #[test]
    fn lost_pages_are_accounted_as_before() {
        let whole = GuestMemory::new(vec![region(0, 8)]).unwrap();
        let account = Footprint::new(8 * Pages::PAGE_FOOTPRINT);
        let read = |pages: Vec<u64>| {
            let share = account.share(Pages::PAGE_FOOTPRINT * pages.len() as u64);
            Pages::resolve_all(&whole, pages.into_iter(), 12, share.unwrap()).unwrap()
        };
        let mut linear = read((0..8).map(|page| page << 12).collect());
        linear.rebase(None);
        assert_eq!(
            (linear.lost(), linear.count(), account.bytes()),
            (true, 8, 0)
        );
        // Two regions, which are not where they were, and neither beside the other.
        let parts = GuestMemory::new(vec![region(0, 4), region(0x4000, 4)]).unwrap();
        let mut scattered = read(vec![0x3000, 0]);
        scattered.rebase(None);
        assert_eq!(account.bytes(), 2 * Pages::PAGE_FOOTPRINT);
        scattered.rebase(Some(&parts));
        assert_eq!(*guest(&scattered, &parts), [0x3000, 0]);
        let apart = parts.host(0x4000, 1).unwrap().0 as usize
            != parts.host(0, 1).unwrap().0 as usize + 0x4000;
        linear.rebase(Some(&parts));
        assert_eq!(linear.lost(), apart, "there is no room");
        drop(scattered);
        linear.rebase(Some(&parts));
        assert!(linear.resolved_in(&parts));
        assert_eq!(guest(&linear, &parts)[7], 0x7000);
        assert_eq!(account.bytes(), if apart { 64 } else { 0 });
        // A part is missing: all is lost.
        let part = GuestMemory::new(vec![region(0, 4)]).unwrap();
        linear.rebase(Some(&part));
        assert!(linear.lost() && linear.word(0).is_none());
        linear.rebase(Some(&whole));
        assert_eq!(guest(&linear, &whole)[7], 0x7000);
        drop(linear);
        assert_eq!(account.bytes(), 0);
    }

    #[test]
    fn a_scatter_range_has_all_that_is_asked_for_or_nothing() {
        let memory = GuestMemory::new(vec![region(0, 5)]).unwrap();
        let len = |pages: &Pages, offset, len| pages.scattered(offset, len).map(|all| all.len());
        for guest in [[0x1000, 0x2000, 0x3000], [0x3000, 0, 0x4000]] {
            let pages = Pages::resolve(&memory, &guest, 12).unwrap();
            for (offset, all) in [(0, 0x3000), (8, 0x2ff8), (0x1000, 0x2000), (0x2fff, 1)] {
                assert_eq!(len(&pages, offset, all), Some(all));
                assert_eq!(len(&pages, offset, 1), Some(1));
            }
            assert_eq!(len(&pages, 0x3000, 1), None);
        }
        let pages = Pages::resolve(&memory, &[0x3000, 0, 0x4000], 12).unwrap();
        for (offset, more) in [(0, 0x3001), (0x1008, 0x1ff9), (0x2000, u64::MAX)] {
            assert_eq!(len(&pages, offset, more), None);
        }
    }

    #[test]
    fn lost_pages_give_nothing_and_come_back() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        let pages = Pages::resolve(&memory, &[0x3000, 0x1000], 12).unwrap();
        assert!(pages.word(8).is_some() && !pages.lost());
        let mut moved = Pages::resolve(&memory, &[0x3000, 0x1000], 12).unwrap();
        moved.rebase(None);
        assert!(moved.lost() && moved.word(8).is_none() && moved.scattered(0, 1).is_none());
        assert_eq!(moved.len(), pages.len());
        moved.rebase(Some(&memory));
        assert!(!moved.lost() && moved.resolved_in(&memory));
        moved.word(8).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(pages.word(8).unwrap().load(Ordering::Relaxed), 7);
    }

    #[test]
    fn words_beyond_the_end_or_unaligned_do_not_exist() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        let pages = Pages::resolve(&memory, &[0x1000], 12).unwrap();
        assert!(pages.word(4088).is_some());
        for offset in [4096, 4, u64::MAX - 7, u64::MAX] {
            assert!(pages.word(offset).is_none());
        }
        assert!(pages.half_word(4092).is_some());
        assert!(pages.half_word(2).is_none() && pages.half_word(4096).is_none());
    }

    #[test]
    fn contiguous_ranges_are_pages_or_all() {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        let whole = Pages::resolve(&memory, &[0x1000, 0x2000], 12).unwrap();
        assert_eq!(
            whole
                .contiguous(0x1fff)
                .map(|(at, range)| (at, range.len())),
            Some((0, 0x2000))
        );
        let scattered = Pages::resolve(&memory, &[0x3000, 0x1000], 12).unwrap();
        assert_eq!(
            scattered
                .contiguous(0x1008)
                .map(|(at, range)| (at, range.len())),
            Some((0x1000, 0x1000))
        );
        for pages in [whole, scattered] {
            assert!(pages.contiguous(0x2000).is_none() && pages.contiguous(u64::MAX).is_none());
        }
    }
}
