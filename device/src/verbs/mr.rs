// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory regions and the check of keys (specification: "Memory regions and keys").
use virtio_rdma_spec::verbs::vendor_err;

use crate::memory::{GuestMemory, Pages, Span};

/// Why a key does not give access; a `vendor_err` of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyError(pub u8);

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
    /// Offset of the first byte in `pages`.
    pub offset: u64,
    /// What its page list takes of our memory, bytes.
    pub footprint: u64,
    /// The pages.
    pub pages: Pages,
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
        let offset = addr
            .checked_sub(self.iova)
            .ok_or(KeyError(vendor_err::KEY_RANGE))?;
        let left = self
            .length
            .checked_sub(offset)
            .ok_or(KeyError(vendor_err::KEY_RANGE))?;
        if len > left {
            return Err(KeyError(vendor_err::KEY_RANGE));
        }
        Ok(())
    }

    /// The same region after a change of the memory table.
    #[must_use]
    pub fn rebase(&self, memory: Option<&GuestMemory>) -> Self {
        Self {
            pages: self.pages.rebase(memory),
            ..*self
        }
    }

    /// The longest contiguous piece at `addr`, of at most `max` bytes. The range has been checked.
    ///
    /// # Errors
    /// If the memory is gone.
    #[inline]
    pub fn span(&self, addr: u64, max: u64) -> Result<Span<'_>, KeyError> {
        let offset = addr.wrapping_sub(self.iova).wrapping_add(self.offset);
        // The range is within the region, and the region within its pages: they are lost, if anything.
        self.pages
            .span(offset, max)
            .ok_or(KeyError(vendor_err::MEMORY_GONE))
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
            pages: Pages::resolve(&GuestMemory::new(vec![region(0, 1)]).unwrap(), vec![0], 12)
                .unwrap()
                .rebase(None),
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
