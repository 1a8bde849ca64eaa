// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared memory, seen as atomics: the only unsafe code of this crate.
//!
//! The device reads and writes the same memory from another process at any time. So it is never
//! seen as plain bytes, only as atomic words; what the two sides agree on beyond that is the
//! protocol's matter.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::ops::Deref;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::Arc;

use rustix::mm::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};

use crate::{Error, PAGE};

/// A mapping of (parts of) a file.
#[derive(Debug)]
pub struct Mapping {
    /// INVARIANT: the start of `len` bytes of shared mappings that live as long as `self`; page
    /// aligned.
    ptr: *mut c_void,
    /// INVARIANT: a multiple of the page size.
    len: usize,
}

// SAFETY: `ptr` is the address of shared memory, accessed as atomics only; it belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` at `offset`.
    ///
    /// # Errors
    /// If `len` or `offset` is not a multiple of the page size, the file is shorter, or the system
    /// refuses.
    pub fn new(file: &File, offset: u64, len: usize) -> Result<Self, Error> {
        Self::scattered(file, &[(offset, len)])
    }

    /// Maps pieces of `file`, each an offset and a length, one behind the other.
    ///
    /// # Errors
    /// As [`Mapping::new`].
    pub fn scattered(file: &File, pieces: &[(u64, usize)]) -> Result<Self, Error> {
        let size = file.metadata()?.len();
        let mut len = 0usize;
        for &(offset, piece) in pieces {
            let end = offset.checked_add(piece as u64).ok_or(Error::BadAddress)?;
            if offset % PAGE as u64 != 0 || piece % PAGE != 0 || piece == 0 || end > size {
                return Err(Error::BadAddress);
            }
            len = len.checked_add(piece).ok_or(Error::BadAddress)?;
        }
        if len == 0 {
            return Err(Error::BadAddress);
        }
        // SAFETY: a new mapping, at an address that the system chooses.
        let ptr = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )?
        };
        // From here on it is unmapped when dropped.
        let mapping = Self { ptr, len };
        let mut at = 0;
        for &(offset, piece) in pieces {
            // SAFETY: replaces `piece` bytes of the mapping above, which nobody uses yet; `at +
            // piece <= len`.
            unsafe {
                mmap(
                    ptr.byte_add(at),
                    piece,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    file,
                    offset,
                )?;
            }
            at += piece;
        }
        Ok(mapping)
    }

    /// Address in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.ptr as u64
    }

    /// Length, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: nothing cannot be mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All of it.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `ptr` is valid for `len` bytes and page aligned, and the mapping lives as long as
        // `self` (invariants). Atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 8) }
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len) }
    }

    /// All of it.
    #[must_use]
    pub fn halves(&self) -> &[AtomicU32] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 4) }
    }

    /// All of it.
    #[must_use]
    pub fn quarters(&self) -> &[AtomicU16] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 2) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours (invariant), and nobody can have a reference into it any
        // longer.
        let _ = unsafe { munmap(self.ptr, self.len) };
    }
}

/// A part of a mapping, which it keeps alive.
#[derive(Debug, Clone)]
pub struct View {
    mapping: Arc<Mapping>,
    /// INVARIANT: the word at `start` of the mapping. So that rings, which ask for their words all
    /// the time, get them at once.
    words: *const AtomicU64,
    /// INVARIANT: `start + len <= mapping.len()`, both multiples of the page size.
    start: usize,
    len: usize,
}

// SAFETY: `words` points into `mapping`, which may be sent to and used by other threads, and is
// seen as atomics only.
unsafe impl Send for View {}
// SAFETY: as for Send.
unsafe impl Sync for View {}

impl View {
    /// `len` bytes of `mapping` from `start`.
    ///
    /// # Errors
    /// If they are not whole pages of it.
    pub fn new(mapping: Arc<Mapping>, start: usize, len: usize) -> Result<Self, Error> {
        let end = start.checked_add(len).ok_or(Error::BadAddress)?;
        if end > mapping.len() || start % PAGE != 0 || len % PAGE != 0 {
            return Err(Error::BadAddress);
        }
        let words = mapping.words()[start / 8..end / 8].as_ptr();
        Ok(Self {
            mapping,
            words,
            start,
            len,
        })
    }

    /// Address in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.mapping.addr() + self.start as u64
    }

    /// Length, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// The 16-bit word at a byte offset.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn u16(&self, offset: usize) -> &AtomicU16 {
        assert!(
            offset % 2 == 0 && offset < self.len,
            "no word at {offset:#x}"
        );
        &self.mapping.quarters()[(self.start + offset) / 2]
    }

    /// The 32-bit word at a byte offset.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset % 4 == 0 && offset < self.len,
            "no word at {offset:#x}"
        );
        &self.mapping.halves()[(self.start + offset) / 4]
    }

    /// The 64-bit word at a byte offset.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset % 8 == 0 && offset < self.len,
            "no word at {offset:#x}"
        );
        &self.mapping.words()[(self.start + offset) / 8]
    }

    /// Copies to it, in no particular order.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset + bytes.len() <= self.len,
            "write beyond the end of a buffer"
        );
        let start = self.start + offset;
        // SAFETY: the range is within the mapping (asserted; invariants), and `bytes` cannot
        // overlap it, as nobody has a plain reference into it. The device may access it at the same
        // time: then the application broke its own rules, and gets some mixture of bytes, as with a
        // real device.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.mapping.ptr.cast::<u8>().add(start),
                bytes.len(),
            );
        }
    }

    /// Copies from it, in no particular order.
    ///
    /// # Panics
    /// If there is not as much.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(
            offset + bytes.len() <= self.len,
            "read beyond the end of a buffer"
        );
        let start = self.start + offset;
        // SAFETY: as for `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.mapping.ptr.cast::<u8>().add(start),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
    }

    /// A copy of a part.
    ///
    /// # Panics
    /// If there is not as much.
    #[must_use]
    pub fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// Copies the first `len` bytes to the start of another buffer, as memcpy does.
    ///
    /// # Panics
    /// If one of them has not as much, or they are the same memory.
    pub fn copy_to(&self, to: &Self, len: usize) {
        assert!(
            len <= self.len && len <= to.len,
            "copy beyond the end of a buffer"
        );
        let (from, into) = (self.addr() as usize, to.addr() as usize);
        assert!(
            from + len <= into || into + len <= from,
            "copy of a buffer to itself"
        );
        // SAFETY: both ranges are within their mappings (asserted; invariants) and do not overlap
        // (asserted). As for `write`, the device may access them at the same time.
        unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, into as *mut u8, len);
        }
    }

    /// Sets all of it to zero.
    pub fn zero(&self) {
        for word in self.iter() {
            word.store(0, Ordering::Relaxed);
        }
    }
}

impl Deref for View {
    type Target = [AtomicU64];

    #[inline(always)]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `words` is valid for `len` bytes as long as the mapping lives, which `self` keeps
        // alive (invariants). Atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(self.words, self.len / 8) }
    }
}
