// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory of a VM.
use std::fs::File;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;

use rustix::fs::fstatfs;
use rustix::mm::{madvise, Advice};
use virtio_rdma_spec::PAGE_SIZE;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::loss::Watch;
use super::ContiguousRange;
use crate::footprint::NoMemory;

/// Type of the file system of memfds and of /dev/shm (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Type of the file system of huge pages.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

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
        source: MmapRegionError,
    },
    /// The region would be in a core dump of this process.
    #[error("cannot keep the memory region at {addr:#x} out of core dumps")]
    Dump {
        /// Guest-physical address.
        addr: u64,
        /// What madvise said.
        #[source]
        source: std::io::Error,
    },
    /// The file behind the region is not memory: an access might wait for a disk, a network, or
    /// another process.
    #[error(
        "the file behind the memory region at {0:#x} is neither a memfd nor on tmpfs or hugetlbfs"
    )]
    NotMemory(u64),
    /// The loss of the region's memory would end the process.
    #[error("cannot watch the memory regions")]
    Watch(#[source] std::io::Error),
    /// The region overlaps another.
    #[error("the memory region at {0:#x} overlaps another")]
    Overlap(u64),
    /// An address is not in guest memory.
    #[error("address {0:#x} is not guest memory")]
    NotGuestMemory(u64),
    /// A page list is malformed.
    #[error("a page list is malformed")]
    PageList,
    /// There is no memory for what a page list describes.
    #[error("there is no memory for a page list")]
    NoMemory,
}

impl From<NoMemory> for Error {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// A region of guest memory that is to be mapped.
#[derive(Debug)]
pub struct RegionInfo {
    /// Guest-physical address, bytes.
    pub guest_addr: u64,
    /// Size, bytes.
    pub size: u64,
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

impl Host {
    /// No address, and in place of a guest-physical one that of a page that no region has.
    pub(super) const NOWHERE: Self = Self::lost(0u64.wrapping_sub(PAGE_SIZE));

    /// A guest-physical address where a host address was: a number, never used as an address.
    pub(super) const fn lost(guest: u64) -> Self {
        Self(std::ptr::without_provenance_mut(guest as usize))
    }

    /// The guest-physical address of [`Self::lost`].
    pub(super) fn guest(self) -> u64 {
        self.0.addr() as u64
    }
}

/// Finds addresses in a memory, most of which are in the region of the one before.
#[derive(Debug)]
pub(super) struct Finder<'a> {
    memory: &'a GuestMemory,
    range: Option<MappedRange>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(memory: &'a GuestMemory) -> Self {
        let range = None;
        Self { memory, range }
    }

    /// The host address of `len` bytes at a guest-physical address, if they lie in one region.
    pub(super) fn host(&mut self, guest: u64, len: u64) -> Option<Host> {
        let known = self.range.and_then(|range| range.host(guest, len));
        known.or_else(|| {
            self.range = self.memory.range(guest).copied();
            self.range?.host(guest, len)
        })
    }

    /// The guest-physical address of what is at a host address.
    pub(super) fn guest(&mut self, host: Host) -> Option<u64> {
        let known = self.range.and_then(|range| range.guest(host));
        known.or_else(|| {
            let mut ranges = self.memory.0.ranges.iter();
            self.range = ranges.find(|range| range.guest(host).is_some()).copied();
            self.range?.guest(host)
        })
    }

    /// The host address of `len` bytes at a guest-physical address, if they are one piece of the
    /// host, in one region or several.
    pub(super) fn contiguous(&self, guest: u64, len: u64) -> Option<Host> {
        let Host(start) = self.memory.host(guest, 0)?;
        let mut done = 0;
        while done < len {
            let range = self.memory.range_at(guest.checked_add(done)?, len - done)?;
            if range.ptr != start.wrapping_add(done as usize) {
                return None;
            }
            done += range.len() as u64;
        }
        Some(Host(start))
    }
}

/// Where a region is.
#[derive(Debug, Clone, Copy)]
pub(super) struct MappedRange {
    guest: u64,
    host: Host,
    size: u64,
}

impl MappedRange {
    /// Its mapping: address and size in bytes.
    fn mapping(&self) -> (usize, usize) {
        (self.host.0 as usize, self.size as usize)
    }

    /// What a guest has in its memory is not for those who look at a core dump of this process.
    fn keep_out_of_core_dumps(&self) -> Result<(), Error> {
        let Host(start) = self.host;
        // SAFETY: a whole mapping of guest memory (`range`), which the caller keeps; this advice
        // changes nothing of what is in it.
        unsafe { madvise(start.cast(), self.size as usize, Advice::LinuxDontDump) }.map_err(
            |source| Error::Dump {
                addr: self.guest,
                source: source.into(),
            },
        )
    }

    /// The host address of what is at `guest_addr`, which is in the region.
    #[inline]
    pub(super) fn host_of(&self, guest_addr: u64) -> Host {
        let offset = guest_addr.wrapping_sub(self.guest);
        Host(self.host.0.wrapping_add(offset as usize))
    }

    /// The host address of `len` bytes at `guest_addr`, if all are in the region.
    #[inline]
    pub(super) fn host(&self, guest_addr: u64, len: u64) -> Option<Host> {
        let offset = guest_addr.wrapping_sub(self.guest);
        let fits = offset < self.size && len <= self.size - offset;
        fits.then(|| Host(self.host.0.wrapping_add(offset as usize)))
    }

    /// The guest-physical address of what is at `host`, if that is in the region.
    fn guest(&self, host: Host) -> Option<u64> {
        let offset = (host.0 as u64).wrapping_sub(self.host.0 as u64);
        (offset < self.size).then(|| self.guest + offset)
    }
}

#[derive(Debug)]
struct Inner {
    /// Dropped before the mappings.
    _watch: Watch,
    mmap: Arc<GuestMemoryMmap>,
    /// The regions by guest-physical address.
    ranges: Vec<MappedRange>,
}

/// The memory of a VM. Cloning is cheap; a clone keeps its mappings alive.
#[derive(Debug, Clone)]
pub struct GuestMemory(Arc<Inner>);

impl GuestMemory {
    /// Maps `regions`, and tells nobody when their memory is lost.
    ///
    /// # Errors
    /// As [`Self::of`], and if a region overlaps another or cannot be mapped.
    pub fn new(regions: Vec<RegionInfo>) -> Result<Self, Error> {
        let nobody = EventFd::new(EFD_NONBLOCK).map_err(Error::Watch)?;
        Self::of(Arc::new(map(regions)?), &Arc::new(nobody))
    }

    /// The memory that is mapped by `mmap`, which is accessed only after this has judged it: the
    /// crate that mapped it does not look at alignment and at files. When memory of it is lost
    /// (see `loss`), `lost` is signaled.
    ///
    /// # Errors
    /// If a region is not page aligned, is longer than its file, is not memory, or cannot be kept
    /// out of core dumps.
    pub fn of(mmap: Arc<GuestMemoryMmap>, lost: &Arc<EventFd>) -> Result<Self, Error> {
        let ranges = mmap.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        ranges
            .iter()
            .try_for_each(MappedRange::keep_out_of_core_dumps)?;
        let watch = Watch::new(ranges.iter().map(MappedRange::mapping), lost)
            .map_err(|error| Error::Watch(error.into()))?;
        Ok(Self(Arc::new(Inner {
            _watch: watch,
            mmap,
            ranges,
        })))
    }

    /// The mappings, for virtqueues.
    #[must_use]
    pub fn guest_memory(&self) -> &GuestMemoryMmap {
        &self.0.mmap
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

    /// Number of regions.
    #[must_use]
    pub fn regions(&self) -> usize {
        self.0.ranges.len()
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
    #[cfg(test)]
    pub(super) fn guest(&self, host: Host) -> Option<u64> {
        Finder::new(self).guest(host)
    }

    /// The 512 words of the 4 KiB table at `guest_addr`.
    pub(super) fn table(&self, guest_addr: u64) -> Option<&[AtomicU64; 512]> {
        if guest_addr % PAGE_SIZE != 0 {
            return None;
        }
        let Host(host) = self.host(guest_addr, PAGE_SIZE)?;
        // SAFETY: `host` is valid for PAGE_SIZE bytes as long as the mapping lives, which `self`
        // keeps; it is page aligned, as regions are (checked in `range`) and `guest_addr` is.
        // Others change it only as memory, which atomics allow.
        Some(unsafe { &*host.cast::<[AtomicU64; 512]>() })
    }
}

/// Maps regions.
pub(super) fn map(regions: Vec<RegionInfo>) -> Result<GuestMemoryMmap, Error> {
    regions
        .into_iter()
        .try_fold(GuestMemoryMmap::new(), |mmap, region| {
            let addr = region.guest_addr;
            mmap.insert_region(Arc::new(map_region(region)?))
                .map_err(|_| Error::Overlap(addr))
        })
}

/// Maps a region, which [`GuestMemory::of`] has to judge before it is accessed.
///
/// # Errors
/// If it is larger than an address space, or the system refuses.
pub fn map_region(region: RegionInfo) -> Result<GuestRegionMmap, Error> {
    let addr = region.guest_addr;
    let file = FileOffset::new(region.file, region.fd_offset);
    let size = usize::try_from(region.size).map_err(|_| Error::Alignment(addr))?;
    let mapping =
        MmapRegion::from_file(file, size).map_err(|source| Error::Map { addr, source })?;
    GuestRegionMmap::new(mapping, GuestAddress(addr)).ok_or(Error::Alignment(addr))
}

/// Where a region is, if it is one that can be accessed.
fn range(region: &GuestRegionMmap) -> Result<MappedRange, Error> {
    let GuestAddress(guest) = region.start_addr();
    let size = region.len();
    let aligned = |v: u64| v % PAGE_SIZE == 0;
    if !aligned(guest) || !aligned(size) || size == 0 || guest.checked_add(size).is_none() {
        return Err(Error::Alignment(guest));
    }
    if let Some(file) = region.file_offset() {
        let end = file.start().checked_add(size);
        let length = file.file().metadata().map_or(0, |metadata| metadata.len());
        if end.is_none_or(|end| length < end) {
            return Err(Error::Short(guest));
        }
        // A lost region is replaced as a whole, in whole pages of its file system.
        match fstatfs(file.file()).map(|fs| (fs.f_type as u64 & 0xffff_ffff, fs.f_bsize as u64)) {
            Ok((TMPFS_MAGIC, _)) => {}
            Ok((HUGETLBFS_MAGIC, page)) if size % page == 0 => {}
            Ok((HUGETLBFS_MAGIC, _)) => return Err(Error::Alignment(guest)),
            _ => return Err(Error::NotMemory(guest)),
        }
    }
    Ok(MappedRange {
        guest,
        host: Host(region.as_ptr()),
        size,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustix::fs::{memfd_create, MemfdFlags};

    /// A region of `pages` pages at `guest_addr`, of fresh memory.
    pub(crate) fn region(guest_addr: u64, pages: u64) -> RegionInfo {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        let size = pages * PAGE_SIZE;
        file.set_len(size).unwrap();
        RegionInfo {
            guest_addr,
            size,
            fd_offset: 0,
            file,
        }
    }

    #[test]
    fn files_on_disks_are_not_memory() {
        // Of a device, since what the temporary directory is on differs.
        let file = File::open("/proc/self/exe").unwrap();
        let size = file.metadata().unwrap().len() & !(PAGE_SIZE - 1);
        let disk = RegionInfo {
            guest_addr: 0,
            size,
            fd_offset: 0,
            file,
        };
        assert!(matches!(
            GuestMemory::new(vec![disk]),
            Err(Error::NotMemory(0) | Error::Map { .. })
        ));
    }

    #[test]
    fn regions_come_and_go() {
        let memory = GuestMemory::new(vec![region(0x1000, 2)]).unwrap();
        assert!(memory.host(0x1000, 0x2000).is_some());
        assert!(memory.host(0x2000, 0x1001).is_none());
        assert!(memory.host(0, 1).is_none());
        let overlapping = vec![region(0x1000, 2), region(0x2000, 1)];
        assert!(matches!(
            GuestMemory::new(overlapping),
            Err(Error::Overlap(0x2000))
        ));
        let more = GuestMemory::new(vec![region(0x8000, 1), region(0x1000, 2)]).unwrap();
        assert_eq!(more.size(), 3 * PAGE_SIZE);
        for addr in [0x1000, 0x2fff, 0x8000, 0x8fff] {
            assert_eq!(more.guest(more.host(addr, 1).unwrap()), Some(addr));
        }
        let (less, _) = more
            .guest_memory()
            .remove_region(GuestAddress(0x1000), 2 * PAGE_SIZE)
            .unwrap();
        let less = GuestMemory::of(
            Arc::new(less),
            &Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        )
        .unwrap();
        assert!(!less.same(&more));
        assert_eq!(less.guest(more.host(0x1000, 1).unwrap()), None);
        assert!(less.host(0x1000, 1).is_none());
        assert!(less.host(0x8000, 1).is_some());
        assert_eq!(less.size(), PAGE_SIZE);
    }

    #[test]
    fn guest_memory_is_in_no_core_dump() {
        let memory = GuestMemory::new(vec![region(0, 3), region(0x8000, 2)]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        for addr in [0, 0x8000] {
            let Host(start) = memory.host(addr, 1).unwrap();
            let begins = format!("{:x}-", start as usize);
            let mut lines = maps.lines().skip_while(|line| !line.starts_with(&begins));
            let flags = lines
                .find_map(|line| line.strip_prefix("VmFlags: "))
                .unwrap();
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
        }
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
                Err(Error::Alignment(_) | Error::Map { .. })
            ));
        }
    }
}
