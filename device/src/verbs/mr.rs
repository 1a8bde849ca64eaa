// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory regions (specification: "Memory regions and keys").
use std::sync::atomic::AtomicU32;

use virtio_rdma_spec::verbs::vendor_err;

use super::keys::KeyError;
use crate::memory::{GuestMemory, Pages, Span};

/// The memory of a region.
#[derive(Debug)]
pub enum Backing {
    /// Pages.
    Pages(Pages),
    /// All guest memory, by guest-physical addresses, while there is any.
    Physical(Option<GuestMemory>),
}

impl Backing {
    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        match self {
            Self::Pages(pages) => pages.count(),
            Self::Physical(_) => 0,
        }
    }

    /// Finds it anew after a change of the memory table.
    fn rebase(&mut self, memory: Option<&GuestMemory>) {
        match self {
            Self::Pages(pages) => *pages = pages.rebase(memory),
            Self::Physical(old) => *old = memory.cloned(),
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    /// The key: index in bits 8 to 31, the consumer's part below. Local and remote key are the same.
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
    /// What its page list takes of our memory, bytes.
    pub footprint: u64,
    /// Windows that are bound to it.
    pub windows: AtomicU32,
    /// Its memory.
    pub backing: Backing,
}

impl Mr {
    /// Checks that `len` bytes at `addr` may be accessed as `access` says through this region by protection domain `pd`.
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
        if self.key != key {
            return Err(KeyError(vendor_err::KEY_UNKNOWN));
        }
        if self.pd != pd {
            return Err(KeyError(vendor_err::KEY_PD));
        }
        if self.access & access != access {
            return Err(KeyError(vendor_err::KEY_ACCESS));
        }
        check_range(self.iova, self.length, addr, len)?;
        match &self.backing {
            Backing::Pages(_) => Ok(()),
            Backing::Physical(memory) => memory
                .as_ref()
                .filter(|memory| memory.covers(addr, len))
                .map(|_| ())
                .ok_or(KeyError(vendor_err::KEY_RANGE)),
        }
    }

    /// A contiguous piece of the region that `addr` is in, and at which address it starts. The address has been checked.
    #[inline]
    #[must_use]
    pub fn piece(&self, addr: u64) -> Option<(u64, Span<'_>)> {
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        match &self.backing {
            Backing::Pages(pages) => {
                let (start, span) = pages.piece(offset)?;
                // The first and the last page may be more than the region.
                let from = start.max(self.offset);
                let to = (start + span.len() as u64).min(self.offset + self.length);
                let piece = span.get(from - start, to - from)?;
                Some((self.iova.wrapping_add(from - self.offset), piece))
            }
            Backing::Physical(memory) => {
                let left = self.length - (offset - self.offset);
                Some((addr, memory.as_ref()?.span(offset, left)?))
            }
        }
    }

    /// Finds its memory anew after a change of the memory table.
    pub fn rebase(&mut self, memory: Option<&GuestMemory>) {
        self.backing.rebase(memory);
    }

    /// The longest contiguous piece at `addr`, of at most `max` bytes. The range has been checked.
    ///
    /// # Errors
    /// If the memory is gone.
    #[inline]
    pub fn span(&self, addr: u64, max: u64) -> Result<Span<'_>, KeyError> {
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        // The range is within the region, and the region within its pages: they are lost, if anything.
        match &self.backing {
            Backing::Pages(pages) => pages.span(offset, max),
            Backing::Physical(memory) => {
                memory.as_ref().and_then(|memory| memory.span(offset, max))
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
    use virtio_rdma_spec::verbs::access;

    fn lost_mr(iova: u64, length: u64) -> Mr {
        let access = access::LOCAL_WRITE | access::REMOTE_READ;
        Mr {
            key: 0x105,
            pd: 3,
            access,
            iova,
            length,
            offset: 0,
            footprint: 0,
            windows: AtomicU32::new(0),
            backing: Backing::Pages(
                Pages::resolve(&GuestMemory::new(vec![region(0, 1)]).unwrap(), &[0], 12)
                    .unwrap()
                    .rebase(None),
            ),
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
            mr.span(0x1000, 1).err(),
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
        let piece = |mr: &Mr, addr| mr.piece(addr).map(|(start, span)| (start, span.len()));
        let whole = mr(vec![0, 0x1000]);
        assert_eq!(piece(&whole, 0x7010), Some((0x7010, 0x1000)));
        assert_eq!(piece(&whole, 0x800f), Some((0x7010, 0x1000)));
        let scattered = mr(vec![0x1000, 0]);
        assert_eq!(piece(&scattered, 0x7fff), Some((0x7010, 0xff0)));
        assert_eq!(piece(&scattered, 0x8000), Some((0x8000, 0x10)));
        assert_eq!(piece(&lost_mr(0x1000, 0x100), 0x1000), None);
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
        assert_eq!(mr.span(0x4008, 0x1000).unwrap().len(), 0xff8);
        mr.rebase(None);
        assert!(mr.check(0x105, 3, 0, 0x10, 1).is_err() && mr.span(0x10, 1).is_err());
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
