// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a front end maps for DMA: the memory of the VM.
use std::fs::File;
use std::sync::Arc;

use vm_memory::{GuestMemoryMmap, GuestRegionCollectionError, GuestRegionMmap};

use super::protocol::{DMA_READ, DMA_WRITE, UNMAP_ALL};
use crate::limits::MAX_MEMORY_REGIONS;
use crate::memory::{map_region, RegionInfo};

/// Why nothing is mapped, or nothing is taken away.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{MAX_MEMORY_REGIONS} ranges are mapped, which are the most")]
    TooMany,
    #[error("{size:#x} bytes at {address:#x} are no range, or overlap another")]
    Range { address: u64, size: u64 },
    #[error("the flags {0:#x} are unknown, or do not go with the file descriptors")]
    Flags(u32),
    #[error("{size:#x} bytes at {address:#x} are a part of what was mapped")]
    Part { address: u64, size: u64 },
    #[error("a range cannot be mapped")]
    Map(#[from] crate::memory::Error),
    #[error("the ranges are no memory")]
    Memory(#[source] GuestRegionCollectionError),
    #[error(
        "{size:#x} bytes of the VM's memory came without a file: it is not shared (share=on), and \
         the device cannot use it"
    )]
    NotShared { size: u64 },
}

/// A range that is mapped for DMA.
#[derive(Debug, Clone)]
struct Range {
    address: u64,
    size: u64,
    /// The device may write there.
    writable: bool,
    /// None, if it is no memory that the device can use.
    region: Option<Arc<GuestRegionMmap>>,
}

impl Range {
    fn end(&self) -> u64 {
        self.address.saturating_add(self.size)
    }
}

/// All ranges that are mapped for DMA.
#[derive(Debug, Clone, Default)]
pub(super) struct Mappings(Vec<Range>);

impl Mappings {
    /// These, and one more.
    pub(super) fn with(
        &self,
        flags: u32,
        offset: u64,
        (address, size): (u64, u64),
        files: Vec<File>,
    ) -> Result<Self, Error> {
        if self.0.len() >= MAX_MEMORY_REGIONS {
            return Err(Error::TooMany);
        }
        let range = || Error::Range { address, size };
        let end = address.checked_add(size).ok_or_else(range)?;
        let overlaps = |other: &Range| address < other.end() && other.address < end;
        if size == 0 || self.0.iter().any(overlaps) {
            return Err(range());
        }
        let mut files = files.into_iter();
        let (file, more) = (files.next(), files.next());
        if flags & !(DMA_READ | DMA_WRITE) != 0 || more.is_some() {
            return Err(Error::Flags(flags));
        }
        let writable = flags & DMA_WRITE != 0;
        let region = file.filter(|_| writable).map(|file| {
            map_region(RegionInfo {
                guest_addr: address,
                size,
                fd_offset: offset,
                file,
            })
        });
        let mut all = self.clone();
        all.0.push(Range {
            address,
            size,
            writable,
            region: region.transpose()?.map(Arc::new),
        });
        Ok(all)
    }

    /// What is wrong if the VM's memory is mapped without a file. That of a PC begins at address 0,
    /// where no device has its own; elsewhere, it may be that of a screen, which has none.
    pub(super) fn not_shared(&self) -> Option<Error> {
        let ram = self.0.iter().find(|range| range.address == 0)?;
        let size = ram.size;
        (ram.writable && ram.region.is_none()).then_some(Error::NotShared { size })
    }

    /// These, without those in a range.
    pub(super) fn without(&self, flags: u32, address: u64, size: u64) -> Result<Self, Error> {
        if flags & !UNMAP_ALL != 0 {
            return Err(Error::Flags(flags));
        }
        if flags & UNMAP_ALL != 0 {
            return Ok(Self::default());
        }
        let range = Error::Range { address, size };
        let end = address.checked_add(size).ok_or(range)?;
        let mut all = self.clone();
        all.0
            .retain(|other| !(address <= other.address && other.end() <= end));
        let cut = |other: &Range| address < other.end() && other.address < end;
        if all.0.iter().any(cut) {
            return Err(Error::Part { address, size });
        }
        Ok(all)
    }

    /// What of them is memory of the VM.
    pub(super) fn memory(&self) -> Result<Arc<GuestMemoryMmap>, Error> {
        let mut regions: Vec<_> = self
            .0
            .iter()
            .filter(|range| range.region.is_some())
            .collect();
        regions.sort_by_key(|range| range.address);
        if regions.is_empty() {
            return Ok(Arc::new(GuestMemoryMmap::new()));
        }
        let regions = regions.into_iter().filter_map(|range| range.region.clone());
        let memory = GuestMemoryMmap::from_arc_regions(regions.collect());
        memory.map(Arc::new).map_err(Error::Memory)
    }

    /// Whether the memory of the VM is the same as before a request, which adds ranges or takes
    /// some away.
    pub(super) fn same_memory(&self, before: &Self) -> bool {
        let count = |all: &Self| all.0.iter().filter(|range| range.region.is_some()).count();
        count(self) == count(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
    use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

    const BOTH: u32 = DMA_READ | DMA_WRITE;

    fn file(size: u64) -> Vec<File> {
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, size).unwrap();
        vec![file.into()]
    }

    fn regions(mappings: &Mappings) -> Vec<(u64, u64)> {
        let memory = mappings.memory().unwrap();
        let region = |region: &GuestRegionMmap| (region.start_addr().raw_value(), region.len());
        memory.iter().map(region).collect()
    }

    #[test]
    fn memory_is_what_may_be_written_and_has_a_file() {
        let none = Mappings::default();
        let high = none.with(BOTH, 0x1000, (0x10_0000, 0x2000), file(0x3000));
        let high = high.unwrap();
        let low = high.with(BOTH, 0, (0, 0x1000), file(0x1000)).unwrap();
        let rom = low.with(DMA_READ, 0, (0xc_0000, 0x1000), file(0x1000));
        let rom = rom.unwrap();
        let private = rom.with(BOTH, 0, (0xd_0000, 0x1000), vec![]).unwrap();
        assert_eq!(regions(&private), [(0, 0x1000), (0x10_0000, 0x2000)]);
        assert!(private.same_memory(&low) && !low.same_memory(&high));
        let gone = private.without(0, 0xc_0000, 0x10_0000).unwrap();
        assert_eq!(regions(&gone), [(0, 0x1000)]);
        let all = gone.without(UNMAP_ALL, 0, 0).unwrap();
        assert_eq!(regions(&all), []);
    }

    #[test]
    fn memory_without_a_file_is_not_shared() {
        let none = Mappings::default();
        let with = |address, flags, files| none.with(flags, 0, (address, 0x1000), files);
        for (address, flags, files, is) in [
            (0, BOTH, vec![], true),
            (0, BOTH, file(0x1000), false),
            (0, DMA_READ, vec![], false),
            (0xfd00_0000, BOTH, vec![], false),
        ] {
            let said = with(address, flags, files).unwrap().not_shared();
            assert_eq!(said.is_some(), is, "{address:#x} {flags}");
        }
    }

    #[test]
    fn what_is_no_range_is_not_mapped() {
        let some = Mappings::default().with(BOTH, 0, (0x2000, 0x2000), file(0x2000));
        let some = some.unwrap();
        for (address, size) in [
            (0x1000, 0x2000),
            (0x3000, 0x1000),
            (0, 0x10_0000),
            (0x8000, 0),
            (u64::MAX, 2),
        ] {
            let mapped = some.with(BOTH, 0, (address, size), vec![]);
            assert!(matches!(mapped, Err(Error::Range { .. })), "{address:#x}");
        }
        // No offset of a file.
        let long = some.with(BOTH, u64::MAX, (0x8000, 0x2000), file(0x2000));
        assert!(matches!(long, Err(Error::Map(_))));
        let mut two = file(0x1000);
        two.extend(file(0x1000));
        let two = some.with(BOTH, 0, (0x8000, 0x1000), two);
        assert!(matches!(two, Err(Error::Flags(_))));
        assert!(some.with(4, 0, (0x8000, 0x1000), vec![]).is_err());
    }

    #[test]
    fn a_range_goes_as_a_whole() {
        let some = Mappings::default().with(BOTH, 0, (0x2000, 0x2000), file(0x2000));
        let some = some.unwrap();
        for (address, size) in [(0x2000, 0x1000), (0x3000, 0x1000), (0, 0x3000)] {
            let cut = some.without(0, address, size);
            assert!(matches!(cut, Err(Error::Part { .. })));
        }
        assert!(some.without(0, u64::MAX, 2).is_err());
        assert_eq!(regions(&some.without(0, 0x4000, 0x1000).unwrap()).len(), 1);
    }

    #[test]
    fn there_are_so_many_ranges_and_no_more() {
        let mut all = Mappings::default();
        for at in 0..MAX_MEMORY_REGIONS as u64 {
            all = all.with(BOTH, 0, (at << 12, 1 << 12), vec![]).unwrap();
        }
        let more = all.with(BOTH, 0, (1 << 40, 1 << 12), vec![]);
        assert!(matches!(more, Err(Error::TooMany)));
    }
}
