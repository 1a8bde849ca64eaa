// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Pages that the device reads or writes.
use super::alloc::{Arc, Array, Wait};
use super::bindings;
use super::error::{Errno, Result};
use core::ffi::c_void;
use core::ops::Deref;
use core::ptr::NonNull;
use virtio_rdma_driver_core::sync::AtomicU64;
use virtio_rdma_spec::PAGE_SIZE;

/// The (PCI) device whose DMA addresses the RDMA device understands.
#[derive(Clone, Copy)]
pub(crate) struct DmaDevice(pub(crate) NonNull<bindings::device>);

// SAFETY: a handle; the kernel's functions that take it may be called from any thread.
unsafe impl Send for DmaDevice {}
// SAFETY: as above.
unsafe impl Sync for DmaDevice {}

/// A zeroed page of our own, mapped for the device in both directions (on x86-64 that is coherent).
pub(crate) struct DmaPage {
    device: DmaDevice,
    memory: NonNull<c_void>,
    addr: u64,
}

// SAFETY: the page is owned; access to its words is volatile and through &mut only.
unsafe impl Send for DmaPage {}
// SAFETY: as above.
unsafe impl Sync for DmaPage {}

impl DmaPage {
    pub(crate) fn new(device: DmaDevice) -> Result<Self> {
        Self::new_in(device, Wait::Yes)
    }

    /// The same in another context. It can be dropped in any.
    pub(crate) fn new_in(device: DmaDevice, wait: Wait) -> Result<Self> {
        let (mut addr, may_sleep) = (0, wait == Wait::Yes);
        // SAFETY: the device is alive as long as the driver is bound to it; the caller says whether
        // it may sleep.
        let memory = unsafe { bindings::vrdma_page_alloc(device.0.as_ptr(), &mut addr, may_sleep) };
        Ok(Self {
            device,
            memory: NonNull::new(memory).ok_or(Errno::ENOMEM)?,
            addr,
        })
    }

    /// The address that the device uses.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Is the address that the device uses the physical one?
    pub(crate) fn is_physical(&self) -> bool {
        // SAFETY: it only computes with the address of our page.
        unsafe { bindings::vrdma_page_is_physical(self.memory.as_ptr(), self.addr) }
    }

    /// Stores a word (little-endian) at `index`; out of range does nothing.
    pub(crate) fn set(&mut self, index: usize, value: u64) {
        if index < PAGE_SIZE as usize / 8 {
            // SAFETY: inside of the page, and aligned.
            unsafe {
                self.memory
                    .cast::<u64>()
                    .add(index)
                    .write_volatile(value.to_le())
            };
        }
    }

    /// Where the page is, for mapping it to a process.
    pub(crate) fn memory(&self) -> *mut c_void {
        self.memory.as_ptr()
    }
}

impl Drop for DmaPage {
    fn drop(&mut self) {
        // SAFETY: allocated by vrdma_page_alloc with this device and address. Processes that still
        // map the page hold references of their own.
        unsafe {
            bindings::vrdma_page_free(self.device.0.as_ptr(), self.memory.as_ptr(), self.addr)
        }
    }
}

/// Pages of our own that follow each other in the kernel's address space: rings, doorbell memory.
pub(crate) struct DmaBuffer {
    memory: NonNull<AtomicU64>,
    words: usize,
    /// Freed after the mapping.
    pages: Array<DmaPage>,
}

// SAFETY: owned; its words are atomics.
unsafe impl Send for DmaBuffer {}
// SAFETY: as above.
unsafe impl Sync for DmaBuffer {}

impl DmaBuffer {
    /// This many zeroed pages. May sleep.
    pub(crate) fn new(device: DmaDevice, pages: usize) -> Result<Self> {
        let pages = Array::new(pages, |_| DmaPage::new(device))?;
        let memory = match &*pages {
            [page] => page.memory(),
            pages => {
                let list = Array::new(pages.len(), |i| {
                    pages.get(i).map(DmaPage::memory).ok_or(Errno::EINVAL)
                })?;
                // SAFETY: a list of as many pages, which live longer than the mapping (drop).
                unsafe { bindings::vrdma_pages_map(list.as_ptr(), list.len()) }
            }
        };
        Ok(Self {
            memory: NonNull::new(memory.cast()).ok_or(Errno::ENOMEM)?,
            words: pages.len().saturating_mul(PAGE_SIZE as usize / 8),
            pages,
        })
    }

    /// The pages, in order.
    pub(crate) fn pages(&self) -> &[DmaPage] {
        &self.pages
    }

    /// The memory; others (the device, processes) access it, too.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: that is how long the mapping is, and it stays until drop. Page aligned, and only
        // accessed by atomic instructions, on this side and, as the specification has it, on the
        // device's.
        unsafe { core::slice::from_raw_parts(self.memory.as_ptr(), self.words) }
    }
}

impl Drop for DmaBuffer {
    fn drop(&mut self) {
        if self.pages.len() > 1 {
            // SAFETY: made by vrdma_pages_map; used no more.
            unsafe { bindings::vrdma_pages_unmap(self.memory.as_ptr().cast()) }
        }
    }
}

/// A [`DmaBuffer`] as the driver core wants memory: words.
#[derive(Clone)]
pub(crate) struct Words(pub(crate) Arc<DmaBuffer>);

impl Deref for Words {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        self.0.words()
    }
}
