// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory shared with the device: queue buffers, doorbell memory, the status page, notify pages.

use core::ffi::{c_int, c_void};
use core::ops::Deref;
use core::{ptr, slice};

use virtio_rdma_driver_core::sync::AtomicU64;

use super::{sys, Errno};

/// A mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    address: *mut c_void,
    length: usize,
    /// Kept out of children: the device goes on using the pages, and a copy on write must not move them away from us.
    not_forked: bool,
}

// SAFETY: an address and a length; who uses the memory does it with atomics or single stores.
unsafe impl Send for Mapping {}
// SAFETY: as before.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory for a queue, `length` bytes, whole pages.
    pub fn anonymous(length: usize) -> Result<Self, Errno> {
        let mut mapping = Self::new(
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )?;
        // SAFETY: the range is the mapping.
        Errno::check(unsafe { sys::ibv_dontfork_range(mapping.address, length) })?;
        mapping.not_forked = true;
        Ok(mapping)
    }

    /// Memory of the device, at an offset of the command file.
    pub fn device(length: usize, protection: c_int, fd: c_int, offset: u64) -> Result<Self, Errno> {
        let offset = offset.try_into().map_err(|_| Errno(libc::EOVERFLOW))?;
        Self::new(length, protection, libc::MAP_SHARED, fd, offset)
    }

    fn new(
        length: usize,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> Result<Self, Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice harms nothing.
        let address = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        Ok(Self {
            address,
            length,
            not_forked: false,
        })
    }

    pub fn address(&self) -> *mut c_void {
        self.address
    }

    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and whoever used it borrowed it or kept it alive.
        unsafe {
            if self.not_forked {
                sys::ibv_dofork_range(self.address, self.length);
            }
            libc::munmap(self.address, self.length);
        }
    }
}

/// A mapping as words. Does not keep it alive: who holds words holds the mapping too, and drops it later.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    address: *const AtomicU64,
    count: usize,
}

// SAFETY: the words are atomics.
unsafe impl Send for Words {}
// SAFETY: the words are atomics.
unsafe impl Sync for Words {}

impl Words {
    /// The words of a mapping that is at least readable.
    ///
    /// # Safety
    /// The mapping outlives the words and their copies, and stores go to writable mappings only.
    pub unsafe fn new(mapping: &Mapping) -> Self {
        Self {
            address: mapping.address.cast(),
            count: mapping.length / size_of::<AtomicU64>(),
        }
    }
}

impl Deref for Words {
    type Target = [AtomicU64];
    #[inline(always)]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: page aligned memory of this size, mapped while there are words (Words::new), only used as atomics.
        unsafe { slice::from_raw_parts(self.address, self.count) }
    }
}

/// The address to write to in order to wake a worker.
#[derive(Debug)]
pub struct Notify {
    address: *mut u16,
    value: u16,
}

// SAFETY: a store to a device register, from any thread.
unsafe impl Send for Notify {}
// SAFETY: as before; the register takes concurrent stores.
unsafe impl Sync for Notify {}

impl Notify {
    /// The two bytes at `offset` of a mapping of notify pages, which get the index of a queue.
    ///
    /// # Safety
    /// The mapping outlives the value.
    pub unsafe fn new(pages: &Mapping, offset: usize, queue_index: u16) -> Option<Self> {
        if offset % align_of::<u16>() != 0 || offset.checked_add(size_of::<u16>())? > pages.length {
            return None;
        }
        Some(Self {
            address: pages.address.wrapping_byte_add(offset).cast(),
            value: queue_index.to_le(),
        })
    }

    #[cold]
    pub fn wake(&self) {
        // SAFETY: within the mapping, aligned (Notify::new), and mapped while we are there.
        unsafe { self.address.write_volatile(self.value) }
    }
}
