// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory regions (specification: "Memory regions and keys").
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_rdma_spec::command::PageList;
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::verbs::{access, vendor_err};

use super::keys::KeyError;
use super::{Error, Features};
use crate::memory::{Blocks, ContiguousRange, GuestMemory, Pages, Resolved, ScatterRange};

/// Longest region, bytes.
pub const MAX_MR_SIZE: u64 = 1 << 40;

/// `Mr::windows` of a region to which no window can be bound any longer.
pub(super) const NO_WINDOWS: u32 = u32::MAX;

/// Access flags that a region may have.
const ACCESS: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::ZERO_BASED
    | access::HUGETLB
    | access::RELAXED_ORDERING;

/// Access flags that come with a feature.
const ACCESS_FEATURES: [(u32, u32); 3] = [
    (access::MW_BIND, feature::MW),
    (access::FLUSH_GLOBAL, feature::FLUSH),
    (access::PHYSICAL, feature::PHYSICAL_MR),
];

/// Access flags that the specification names, but that this device does not support: its pages are
/// pinned and volatile.
const ACCESS_NEVER: u32 = access::ON_DEMAND | access::FLUSH_PERSISTENT;

/// Checks the access flags of a region.
///
/// # Errors
/// [`Error::Invalid`] for flags that are unknown or that cannot be without others,
/// [`Error::NotSupported`] for those that are not supported.
pub fn check_access(features: Features, wanted: u32) -> Result<(), Error> {
    let known = ACCESS_FEATURES
        .iter()
        .fold(ACCESS | ACCESS_NEVER, |all, (bit, _)| all | bit);
    if wanted & !known != 0 {
        return Err(Error::Invalid);
    }
    let missing = ACCESS_FEATURES
        .iter()
        .any(|(bit, feature)| wanted & bit != 0 && !features.has(*feature));
    if missing || wanted & ACCESS_NEVER != 0 {
        return Err(Error::NotSupported);
    }
    // Remote writes and atomics need local write (InfiniBand architecture specification, volume 1,
    // 10.6.3.1).
    let writes = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
    if wanted & writes != 0 && wanted & access::LOCAL_WRITE == 0 {
        return Err(Error::Invalid);
    }
    Ok(())
}

/// What a region covers.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    /// Address of the first byte, as work requests name it.
    pub iova: u64,
    /// Length, bytes.
    pub length: u64,
    /// Offset of the first byte in the pages or blocks.
    pub offset: u64,
}

impl Range {
    /// Checks address and length of a region with these access flags.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(self, access: u32) -> Result<Self, Error> {
        let zero_based = access & access::ZERO_BASED != 0;
        let iova = if zero_based { 0 } else { self.iova };
        let end = iova.checked_add(self.length.saturating_sub(1));
        if self.length > MAX_MR_SIZE || end.is_none() {
            return Err(Error::Invalid);
        }
        Ok(Self { iova, ..self })
    }

    /// Whether it is of as many pages as the list has.
    #[must_use]
    pub fn has_pages(&self, list: &PageList) -> bool {
        let shift = u32::from(list.page_shift);
        (12..=31).contains(&shift)
            && self.offset >> shift == 0
            // A region without bytes is on a page, too.
            && self.offset.checked_add(self.length).is_some_and(|end| {
                u64::from(list.count) == end.max(1).div_ceil(1 << shift)
            })
    }
}

/// The memory of a region.
#[derive(Debug)]
pub enum Backing {
    /// Pages.
    Pages(Pages),
    /// Blocks.
    Blocks(Blocks),
    /// All guest memory, by guest-physical addresses, while there is any.
    Physical(Option<GuestMemory>),
}

impl Backing {
    /// Number of pages or blocks.
    #[must_use]
    pub fn count(&self) -> u64 {
        match self {
            Self::Pages(pages) => pages.count(),
            Self::Blocks(blocks) => blocks.count(),
            Self::Physical(_) => 0,
        }
    }

    /// Finds it anew after a change of the memory table.
    fn rebase(&mut self, memory: Option<&GuestMemory>) {
        match self {
            Self::Pages(pages) => pages.rebase(memory),
            Self::Blocks(blocks) => blocks.rebase(memory),
            Self::Physical(old) => *old = memory.cloned(),
        }
    }
}

impl From<Resolved> for Backing {
    fn from(resolved: Resolved) -> Self {
        match resolved {
            Resolved::Pages(pages) => Self::Pages(pages),
            Resolved::Blocks(blocks) => Self::Blocks(blocks),
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    /// The key: index in bits 8 to 31, the consumer's part below. Local and remote key are the
    /// same.
    pub key: u32,
    /// Protection domain.
    pub pd: u32,
    /// Granted access: `access` flags.
    pub access: u32,
    /// Address of the first byte, as work requests name it.
    pub iova: u64,
    /// Length, bytes.
    pub length: u64,
    /// Offset of the first byte in the pages.
    pub offset: u64,
    /// Windows that are bound to it. See also `NO_WINDOWS`.
    pub windows: AtomicU32,
    /// Its memory.
    pub backing: Backing,
}

impl Mr {
    /// Checks that `len` bytes at `addr` may be accessed as `access` says through this region by
    /// protection domain `pd`.
    ///
    /// # Errors
    /// The reason, where not.
    #[inline]
    pub fn check(
        &self,
        key: u32,
        pd: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Result<(), KeyError> {
        self.permits(key, pd, access, addr, len)?;
        match &self.backing {
            Backing::Pages(_) | Backing::Blocks(_) => Ok(()),
            Backing::Physical(memory) => memory
                .as_ref()
                .filter(|memory| memory.covers(addr, len))
                .map(|_| ())
                .ok_or(KeyError(vendor_err::KEY_RANGE)),
        }
    }

    /// The same, whether there is memory or not.
    #[inline(always)]
    fn permits(&self, key: u32, pd: u32, access: u32, addr: u64, len: u64) -> Result<(), KeyError> {
        if self.key != key {
            return Err(KeyError(vendor_err::KEY_UNKNOWN));
        }
        if self.pd != pd {
            return Err(KeyError(vendor_err::KEY_PD));
        }
        if self.access & access != access {
            return Err(KeyError(vendor_err::KEY_ACCESS));
        }
        check_range(self.iova, self.length, addr, len)
    }

    /// The contiguous range of the region that `addr` is in, and at which address it starts. The
    /// address has been checked.
    #[inline]
    #[must_use]
    pub fn contiguous(&self, addr: u64) -> Option<(u64, ContiguousRange<'_>)> {
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        let (start, range) = match &self.backing {
            Backing::Pages(pages) => pages.contiguous(offset)?,
            Backing::Blocks(blocks) => blocks.contiguous(offset)?,
            Backing::Physical(memory) => {
                let left = self.length - (offset - self.offset);
                return Some((addr, memory.as_ref()?.range_at(offset, left)?));
            }
        };
        // The first and the last page may be more than the region.
        let from = start.max(self.offset);
        let to = (start + range.len() as u64).min(self.offset + self.length);
        let part = range.get(from - start, to - from)?;
        Some((self.iova.wrapping_add(from - self.offset), part))
    }

    /// The `len` bytes at `addr`, if protection domain `pd` may access them as `access` says, and
    /// they are contiguous.
    #[inline(always)]
    #[must_use]
    pub fn whole(
        &self,
        key: u32,
        pd: u32,
        access: u32,
        addr: u64,
        len: u64,
    ) -> Option<ContiguousRange<'_>> {
        self.permits(key, pd, access, addr, len).ok()?;
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        match &self.backing {
            Backing::Pages(pages) => pages.whole(offset, len),
            Backing::Blocks(blocks) => {
                let range = blocks.range_at(offset, len)?;
                (range.len() as u64 == len).then_some(range)
            }
            Backing::Physical(memory) => {
                let range = memory.as_ref()?.range_at(offset, len)?;
                (range.len() as u64 == len).then_some(range)
            }
        }
    }

    /// Counts a window that is bound to it, if one still can be.
    pub(super) fn bind(&self) -> bool {
        let more = |count: u32| count.checked_add(1).filter(|count| *count != NO_WINDOWS);
        let counted = self
            .windows
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok()
    }

    /// Finds its memory anew after a change of the memory table.
    pub fn rebase(&mut self, memory: Option<&GuestMemory>) {
        self.backing.rebase(memory);
    }

    /// As much from `addr` on as can be had at once, of at most `max` bytes, which are within the
    /// region as has been checked.
    ///
    /// # Errors
    /// If the memory is gone.
    #[inline]
    pub fn scattered(&self, addr: u64, max: u64) -> Result<ScatterRange<'_>, KeyError> {
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        // The range is within the region, and the region within its pages: they are lost, if
        // anything.
        match &self.backing {
            Backing::Pages(pages) => pages.scattered(offset, max),
            Backing::Blocks(blocks) => blocks.range_at(offset, max).map(ScatterRange::from),
            Backing::Physical(memory) => {
                let memory = memory.as_ref();
                memory.and_then(|memory| memory.range_at(offset, max).map(ScatterRange::from))
            }
        }
        .ok_or(KeyError(vendor_err::MEMORY_GONE))
    }
}

/// Checks that `len` bytes at `addr` are within the `length` bytes at `start`.
#[inline]
pub(super) fn check_range(start: u64, length: u64, addr: u64, len: u64) -> Result<(), KeyError> {
    let left = addr
        .checked_sub(start)
        .and_then(|offset| length.checked_sub(offset));
    match left {
        Some(left) if len <= left => Ok(()),
        _ => Err(KeyError(vendor_err::KEY_RANGE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region;
    use proptest::prelude::*;

    fn lost_mr(iova: u64, length: u64) -> Mr {
        let memory = GuestMemory::new(vec![region(0, 1)]).unwrap();
        let mut pages = Pages::resolve(&memory, &[0], 12).unwrap();
        pages.rebase(None);
        let access = access::LOCAL_WRITE | access::REMOTE_READ;
        Mr {
            key: 0x105,
            pd: 3,
            access,
            iova,
            length,
            offset: 0,
            windows: AtomicU32::new(0),
            backing: Backing::Pages(pages),
        }
    }

    #[test]
    fn each_check_has_its_reason() {
        let mr = lost_mr(0x1000, 0x100);
        assert_eq!(
            mr.check(0x105, 3, access::REMOTE_READ, 0x1000, 0x100),
            Ok(())
        );
        assert_eq!(
            mr.check(0x106, 3, 0, 0x1000, 1),
            Err(KeyError(vendor_err::KEY_UNKNOWN))
        );
        assert_eq!(
            mr.check(0x105, 4, 0, 0x1000, 1),
            Err(KeyError(vendor_err::KEY_PD))
        );
        assert_eq!(
            mr.check(0x105, 3, access::REMOTE_WRITE, 0x1000, 1),
            Err(KeyError(vendor_err::KEY_ACCESS))
        );
        assert_eq!(
            mr.check(0x105, 3, 0, 0xfff, 1),
            Err(KeyError(vendor_err::KEY_RANGE))
        );
        assert_eq!(
            mr.check(0x105, 3, 0, 0x1000, 0x101),
            Err(KeyError(vendor_err::KEY_RANGE))
        );
        assert_eq!(
            mr.check(0x105, 3, 0, 0x1100, 1),
            Err(KeyError(vendor_err::KEY_RANGE))
        );
        assert_eq!(
            mr.scattered(0x1000, 1).err(),
            Some(KeyError(vendor_err::MEMORY_GONE))
        );
    }

    #[test]
    fn a_piece_ends_where_the_region_does() {
        let memory = GuestMemory::new(vec![region(0, 3)]).unwrap();
        let mr = |pages: Vec<u64>| Mr {
            offset: 0x10,
            length: 0x1000,
            backing: Backing::Pages(Pages::resolve(&memory, &pages, 12).unwrap()),
            ..lost_mr(0x7010, 0)
        };
        let part = |mr: &Mr, addr| {
            mr.contiguous(addr)
                .map(|(start, range)| (start, range.len()))
        };
        let whole = mr(vec![0, 0x1000]);
        assert_eq!(part(&whole, 0x7010), Some((0x7010, 0x1000)));
        assert_eq!(part(&whole, 0x800f), Some((0x7010, 0x1000)));
        let scattered = mr(vec![0x1000, 0]);
        assert_eq!(part(&scattered, 0x7fff), Some((0x7010, 0xff0)));
        assert_eq!(part(&scattered, 0x8000), Some((0x8000, 0x10)));
        assert_eq!(part(&lost_mr(0x1000, 0x100), 0x1000), None);
    }

    #[test]
    fn a_physical_region_is_all_guest_memory() {
        let memory = GuestMemory::new(vec![region(0, 1), region(0x1000, 1), region(0x4000, 1)]);
        let mut mr = Mr {
            length: u64::MAX,
            backing: Backing::Physical(Some(memory.unwrap())),
            ..lost_mr(0, 0)
        };
        assert_eq!(mr.check(0x105, 3, 0, 0x10, 0x1ff0), Ok(()));
        for (addr, len) in [(0x1000, 0x1001), (0x2000, 1), (u64::MAX, 1)] {
            assert_eq!(
                mr.check(0x105, 3, 0, addr, len),
                Err(KeyError(vendor_err::KEY_RANGE))
            );
        }
        assert_eq!(mr.scattered(0x4008, 0x1000).unwrap().len(), 0xff8);
        mr.rebase(None);
        assert!(mr.check(0x105, 3, 0, 0x10, 1).is_err() && mr.scattered(0x10, 1).is_err());
    }

    proptest! {
        #[test]
        fn only_ranges_within_the_region_pass(iova: u64, length: u64, addr: u64, len: u64) {
            let passes = lost_mr(iova, length).check(0x105, 3, 0, addr, len).is_ok();
            let (from, to) = (u128::from(addr), u128::from(addr) + u128::from(len));
            let within = from >= u128::from(iova) && to <= u128::from(iova) + u128::from(length);
            prop_assert_eq!(passes, within);
        }
    }
}
