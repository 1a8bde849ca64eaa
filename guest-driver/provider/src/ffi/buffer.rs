// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory shared with the device: queue buffers, doorbell memory, the status page, notify pages.

use core::ffi::{c_int, c_void};
use core::ops::Deref;
use core::{ptr, slice};
use std::sync::Arc;

use virtio_rdma_driver_core::sync::AtomicU64;
use virtio_rdma_spec::PAGE_SIZE;

use super::{sys, Errno};

/// A mapping, or memory of the application's for a queue; given back when dropped.
#[derive(Debug)]
pub struct Mapping {
    address: *mut c_void,
    length: usize,
    /// Kept out of children: the device goes on using the pages, and a copy on write must not move
    /// them away from us.
    not_forked: bool,
    /// Where it came from, if the application's allocator gave it.
    lender: Option<(Arc<Allocator>, u64)>,
}

// SAFETY: an address and a length; who uses the memory does it with atomics or single stores.
unsafe impl Send for Mapping {}
// SAFETY: as before.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory for a queue, `length` bytes, whole pages.
    pub fn anonymous(length: usize) -> Result<Self, Errno> {
        Self::new(
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )?
        .without_fork()
    }

    /// The same, from the allocator of a parent domain, if there is one.
    pub fn queue(
        length: usize,
        allocator: Option<&Arc<Allocator>>,
        resource: Resource,
    ) -> Result<Self, Errno> {
        match allocator.map(|allocator| Allocator::lend(allocator, length, resource)) {
            Some(Lent::Memory(mapping)) => mapping.without_fork(),
            Some(Lent::Nothing) => Err(Errno(libc::ENOMEM)),
            Some(Lent::UseDefault) | None => Self::anonymous(length),
        }
    }

    fn without_fork(mut self) -> Result<Self, Errno> {
        // SAFETY: the range is the mapping.
        Errno::check(unsafe { sys::ibv_dontfork_range(self.address, self.length) })?;
        self.not_forked = true;
        Ok(self)
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
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        Ok(Self {
            address,
            length,
            not_forked: false,
            lender: None,
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
        // SAFETY: the range is the mapping, and its users borrowed it or kept it alive. It goes
        // back to where it came from.
        unsafe {
            if self.not_forked {
                sys::ibv_dofork_range(self.address, self.length);
            }
            match &self.lender {
                None => {
                    libc::munmap(self.address, self.length);
                }
                Some((allocator, resource)) => {
                    (allocator.free)(allocator.pd, allocator.context, self.address, *resource);
                }
            }
        }
    }
}

/// What memory is for: the resource types that the allocators of an application are told.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum Resource {
    Qp = 1,
    Cq = 2,
    Srq = 3,
}

type Alloc = unsafe extern "C" fn(*mut sys::ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut sys::ibv_pd, *mut c_void, *mut c_void, u64);

/// The allocator of a parent domain: functions of the application.
#[derive(Debug)]
pub struct Allocator {
    pub pd: *mut sys::ibv_pd,
    pub context: *mut c_void,
    pub alloc: Alloc,
    pub free: Free,
}

// SAFETY: the application gave the functions for use by whatever thread creates or destroys
// something in the domain.
unsafe impl Send for Allocator {}
// SAFETY: as before.
unsafe impl Sync for Allocator {}

enum Lent {
    Memory(Mapping),
    UseDefault,
    Nothing,
}

impl Allocator {
    fn lend(allocator: &Arc<Self>, length: usize, resource: Resource) -> Lent {
        const USE_DEFAULT: usize = usize::MAX;
        let (page, resource) = (PAGE_SIZE as usize, resource as u64);
        // SAFETY: as the application promised when it created the domain, which is alive: queues
        // keep it.
        let address =
            unsafe { (allocator.alloc)(allocator.pd, allocator.context, length, page, resource) };
        if address.is_null() {
            return Lent::Nothing;
        }
        if address.addr() == USE_DEFAULT {
            return Lent::UseDefault;
        }
        let mapping = Mapping {
            address,
            length,
            not_forked: false,
            lender: Some((Arc::clone(allocator), resource)),
        };
        if address.addr() % page != 0 {
            return Lent::Nothing;
        }
        // SAFETY: the application gave us memory of that length.
        unsafe { address.write_bytes(0, length) };
        Lent::Memory(mapping)
    }
}

/// A mapping as words. Does not keep it alive: who holds words holds the mapping too, and drops it
/// later.
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

#[cfg(test)]
impl Mapping {
    /// Zeroed memory.
    pub fn fixture(length: usize) -> Self {
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::new(length, read | write, flags, -1, 0).unwrap()
    }

    /// Memory that is not to be touched.
    pub fn forbidden(length: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::new(length, libc::PROT_NONE, flags, -1, 0).unwrap()
    }
}

/// Stands in for libibverbs, which is not there in tests.
#[cfg(test)]
mod libibverbs {
    use super::{c_int, c_void};

    #[no_mangle]
    extern "C" fn ibv_dofork_range(_address: *mut c_void, _length: usize) -> c_int {
        panic!("no mapping of a test was kept out of children");
    }
}

#[cfg(test)]
impl Words {
    /// Zeroed words that stay for ever. (Mappings need libibverbs, which is not there in tests.)
    pub fn leaked(length: usize) -> Self {
        let words: Vec<_> = (0..length / size_of::<AtomicU64>())
            .map(|_| AtomicU64::new(0))
            .collect();
        let words = Box::leak(words.into_boxed_slice());
        Self {
            address: words.as_ptr(),
            count: words.len(),
        }
    }
}

impl Deref for Words {
    type Target = [AtomicU64];
    #[inline(always)]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: page aligned memory of this size, mapped while there are words (Words::new), only
        // used as atomics.
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
