// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory of a VM.
use std::fs::File;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;

use virtio_rdma_spec::PAGE_SIZE;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::ContiguousRange;

/// Why guest memory could not be mapped or found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Address, size or offset is not a multiple of the page size, or the end is beyond 2^64.
    #[error("a memory region at {0:#x} is not page aligned")]
    Alignment(u64),
    /// The file is shorter than the region.
    #[error("the file behind the memory region at {0:#x} is too short")]
    Short(u64),
    /// The region could not be mapped.
    #[error("cannot map the memory region at {addr:#x}")]
    Map {
        /// Guest-physical address.
        addr: u64,
        /// What mmap said.
        #[source]
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The region overlaps another.
    #[error("the memory region at {0:#x} overlaps another")]
    Overlap(u64),
    /// An address is not in guest memory.
    #[error("address {0:#x} is not guest memory")]
    NotGuestMemory(u64),
    /// A page list is malformed.
    #[error("a page list is malformed")]
    PageList,
}

/// A region of guest memory, as vhost-user describes it.
#[derive(Debug)]
pub struct RegionInfo {
    /// Guest-physical address, bytes.
    pub guest_addr: u64,
    /// Size, bytes.
    pub size: u64,
    /// Address in the front end's process: what ring addresses of vhost-user refer to.
    pub user_addr: u64,
    /// Offset of the region in `file`, bytes.
    pub fd_offset: u64,
    /// The file to map.
    pub file: File,
}

/// A host address within a mapping that its owner keeps alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Host(pub(super) *mut u8);

// SAFETY: the address is only used through `GuestMemory` and `Pages`, which keep the mapping alive
// and access it by atomics and by copies that allow for others writing at the same time.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// Where a region is.
#[derive(Debug, Clone, Copy)]
pub(super) struct MappedRange {
    user: u64,
    guest: u64,
    host: Host,
    size: u64,
}

impl MappedRange {
    /// The host address of `len` bytes at `guest_addr`, if all are in the region.
    #[inline]
    pub(super) fn host(&self, guest_addr: u64, len: u64) -> Option<Host> {
        let offset = guest_addr.wrapping_sub(self.guest);
        let fits = offset < self.size && len <= self.size - offset;
        fits.then(|| Host(self.host.0.wrapping_add(offset as usize)))
    }
}

#[derive(Debug)]
struct Inner {
    mmap: GuestMemoryMmap,
    /// The regions by guest-physical address.
    ranges: Vec<MappedRange>,
}

/// The memory of a VM. Cloning is cheap; a clone keeps its mappings alive.
#[derive(Debug, Clone)]
pub struct GuestMemory(Arc<Inner>);

impl GuestMemory {
    /// Maps `regions`.
    ///
    /// # Errors
    /// If a region is not page aligned, overlaps another, or cannot be mapped.
    pub fn new(regions: Vec<RegionInfo>) -> Result<Self, Error> {
        regions
            .into_iter()
            .try_fold(Self::empty(), |memory, region| memory.with_region(region))
    }

    fn empty() -> Self {
        Self(Arc::new(Inner {
            mmap: GuestMemoryMmap::new(),
            ranges: Vec::new(),
        }))
    }

    /// This memory and one region more.
    ///
    /// # Errors
    /// If the region is not page aligned, overlaps another, or cannot be mapped.
    pub fn with_region(&self, region: RegionInfo) -> Result<Self, Error> {
        let RegionInfo {
            guest_addr,
            size,
            user_addr,
            fd_offset,
            file,
        } = region;
        let aligned = |v: u64| v % PAGE_SIZE == 0;
        if !aligned(guest_addr) || !aligned(size) || !aligned(fd_offset) || size == 0 {
            return Err(Error::Alignment(guest_addr));
        }
        let end = fd_offset
            .checked_add(size)
            .ok_or(Error::Alignment(guest_addr))?;
        guest_addr
            .checked_add(size)
            .ok_or(Error::Alignment(guest_addr))?;
        user_addr
            .checked_add(size)
            .ok_or(Error::Alignment(guest_addr))?;
        let bytes = usize::try_from(size).map_err(|_| Error::Alignment(guest_addr))?;
        if file.metadata().map_or(0, |m| m.len()) < end {
            return Err(Error::Short(guest_addr));
        }
        let mapping = MmapRegionBuilder::new(bytes)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file, fd_offset))
            .build()
            .map_err(|source| Error::Map {
                addr: guest_addr,
                source,
            })?;
        let host = Host(mapping.as_ptr());
        let region = GuestRegionMmap::new(mapping, GuestAddress(guest_addr))
            .ok_or(Error::Overlap(guest_addr))?;
        let mmap = self
            .0
            .mmap
            .insert_region(Arc::new(region))
            .map_err(|_| Error::Overlap(guest_addr))?;
        let mut ranges = self.0.ranges.clone();
        let at = ranges.partition_point(|range| range.guest < guest_addr);
        let range = MappedRange {
            user: user_addr,
            guest: guest_addr,
            host,
            size,
        };
        ranges.insert(at, range);
        Ok(Self(Arc::new(Inner { mmap, ranges })))
    }

    /// This memory without the region that starts at `guest_addr`; the same memory where there is
    /// none.
    #[must_use]
    pub fn without_region(&self, guest_addr: u64) -> Self {
        let Some(range) = self.0.ranges.iter().find(|r| r.guest == guest_addr) else {
            return self.clone();
        };
        match self
            .0
            .mmap
            .remove_region(GuestAddress(guest_addr), range.size)
        {
            Ok((mmap, _)) => {
                let mut ranges = self.0.ranges.clone();
                ranges.retain(|r| r.guest != guest_addr);
                Self(Arc::new(Inner { mmap, ranges }))
            }
            Err(_) => self.clone(),
        }
    }

    /// The mappings, for virtqueues.
    #[must_use]
    pub fn guest_memory(&self) -> &GuestMemoryMmap {
        &self.0.mmap
    }

    /// The guest-physical address of an address in the front end's process.
    #[must_use]
    pub fn user_to_guest(&self, user_addr: u64) -> Option<u64> {
        self.0.ranges.iter().find_map(|r| {
            let offset = user_addr.checked_sub(r.user)?;
            (offset < r.size).then(|| r.guest.wrapping_add(offset))
        })
    }

    /// Whether this is the very same memory, not only an equal one.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Size of all regions, bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0
            .ranges
            .iter()
            .fold(0, |sum, r| sum.saturating_add(r.size))
    }

    /// The longest contiguous range that starts at guest-physical address `addr`, of at most `max`
    /// bytes; `None` where there is no memory.
    #[must_use]
    pub fn range_at(&self, addr: u64, max: u64) -> Option<ContiguousRange<'_>> {
        let range = self.range(addr)?;
        let Host(ptr) = range.host(addr, 0)?;
        let left = range.size - (addr - range.guest);
        Some(ContiguousRange {
            ptr,
            len: usize::try_from(left.min(max)).ok()?,
            owner: PhantomData,
        })
    }

    /// Whether all of `len` bytes at guest-physical address `addr` is memory.
    #[must_use]
    pub fn covers(&self, mut addr: u64, mut len: u64) -> bool {
        while len > 0 {
            let Some(range) = self.range_at(addr, len) else {
                return false;
            };
            len -= range.len() as u64;
            addr = addr.wrapping_add(range.len() as u64);
        }
        true
    }

    /// The region that may have `guest_addr`, if one has.
    #[inline]
    pub(super) fn range(&self, guest_addr: u64) -> Option<&MappedRange> {
        let ranges = &self.0.ranges;
        let after = ranges.partition_point(|range| range.guest <= guest_addr);
        ranges.get(after.checked_sub(1)?)
    }

    /// The host address of `len` bytes at `guest_addr`, if they lie in one region.
    #[inline]
    pub(super) fn host(&self, guest_addr: u64, len: u64) -> Option<Host> {
        self.range(guest_addr)?.host(guest_addr, len)
    }

    /// The guest-physical address of what is at `host` in this process.
    pub(super) fn guest(&self, host: Host) -> Option<u64> {
        self.0.ranges.iter().find_map(|range| {
            let offset = (host.0 as u64).wrapping_sub(range.host.0 as u64);
            (offset < range.size).then(|| range.guest + offset)
        })
    }

    /// The 512 words of the 4 KiB table at `guest_addr`.
    pub(super) fn table(&self, guest_addr: u64) -> Option<&[AtomicU64; 512]> {
        if guest_addr % PAGE_SIZE != 0 {
            return None;
        }
        let Host(host) = self.host(guest_addr, PAGE_SIZE)?;
        // SAFETY: `host` is valid for PAGE_SIZE bytes as long as the mapping lives, which `self`
        // keeps; it is page aligned, as regions are (checked in `with_region`) and `guest_addr` is.
        // Others change it only as memory, which atomics allow.
        Some(unsafe { &*host.cast::<[AtomicU64; 512]>() })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use vmm_sys_util::tempfile::TempFile;

    /// A region of `pages` pages at `guest_addr`, of fresh memory.
    pub(crate) fn region(guest_addr: u64, pages: u64) -> RegionInfo {
        let file = TempFile::new().unwrap().into_file();
        let size = pages * PAGE_SIZE;
        file.set_len(size).unwrap();
        RegionInfo {
            guest_addr,
            size,
            user_addr: 0x7000_0000 + guest_addr,
            fd_offset: 0,
            file,
        }
    }

    #[test]
    fn regions_come_and_go() {
        let memory = GuestMemory::new(vec![region(0x1000, 2)]).unwrap();
        assert!(memory.host(0x1000, 0x2000).is_some());
        assert!(memory.host(0x2000, 0x1001).is_none());
        assert!(memory.host(0, 1).is_none());
        assert!(matches!(
            memory.with_region(region(0x2000, 1)),
            Err(Error::Overlap(0x2000))
        ));
        let more = memory.with_region(region(0x8000, 1)).unwrap();
        assert_eq!(more.size(), 3 * PAGE_SIZE);
        assert_eq!(more.user_to_guest(0x7000_8010), Some(0x8010));
        assert_eq!(more.user_to_guest(0x7000_9000), None);
        for addr in [0x1000, 0x2fff, 0x8000, 0x8fff] {
            assert_eq!(more.guest(more.host(addr, 1).unwrap()), Some(addr));
        }
        let less = more.without_region(0x1000);
        assert_eq!(less.guest(more.host(0x1000, 1).unwrap()), None);
        assert!(less.host(0x1000, 1).is_none());
        assert!(less.host(0x8000, 1).is_some());
        assert_eq!(less.without_region(0x1000).size(), PAGE_SIZE);
    }

    #[test]
    fn spans_end_with_their_region_and_ranges_may_go_on_in_the_next() {
        let memory =
            GuestMemory::new(vec![region(0, 1), region(0x1000, 1), region(0x3000, 1)]).unwrap();
        assert_eq!(memory.range_at(0xff0, 100).unwrap().len(), 16);
        assert_eq!(memory.range_at(0, 100).unwrap().len(), 100);
        assert!(memory.range_at(0x2000, 1).is_none());
        assert!(memory.covers(0, 0x2000) && memory.covers(0x2000, 0));
        assert!(!memory.covers(0, 0x2001) && !memory.covers(0x3fff, 2));
        assert!(!memory.covers(u64::MAX, 2));
    }

    #[test]
    fn bad_regions_are_refused() {
        let short = RegionInfo {
            size: 4 * PAGE_SIZE,
            ..region(0, 1)
        };
        assert!(matches!(
            GuestMemory::new(vec![short]),
            Err(Error::Short(0))
        ));
        for (guest_addr, size, fd_offset) in [
            (1, PAGE_SIZE, 0),
            (0, 1, 0),
            (0, PAGE_SIZE, 1),
            (0, 0, 0),
            (u64::MAX - PAGE_SIZE + 1, PAGE_SIZE, 0),
        ] {
            let bad = RegionInfo {
                guest_addr,
                size,
                fd_offset,
                ..region(0, 1)
            };
            assert!(matches!(
                GuestMemory::new(vec![bad]),
                Err(Error::Alignment(_))
            ));
        }
    }
}
