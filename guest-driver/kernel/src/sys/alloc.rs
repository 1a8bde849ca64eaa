// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Owned allocations of kernel memory; running out is an error, not a panic.
use super::bindings;
use super::error::{Errno, Result};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::sync::atomic::{fence, AtomicPtr, AtomicUsize, Ordering};

/// One value in memory of its own (kmalloc: physically contiguous).
pub(crate) struct Box<T>(NonNull<T>);

// SAFETY: a Box owns its value like the value itself would be owned.
unsafe impl<T: Send> Send for Box<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Box<T> {}

/// Whether an allocation may sleep.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// In process context, without spinlocks.
    Yes,
    /// Anywhere.
    No,
}

impl<T> Box<T> {
    pub(crate) fn new(value: T) -> Result<Self> {
        Self::new_in(value, Wait::Yes)
    }

    fn new_in(value: T, wait: Wait) -> Result<Self> {
        const { assert!(align_of::<T>() <= 8 && size_of::<T>() > 0) };
        // SAFETY: the caller says whether it may sleep; the result is null or memory of this size,
        // aligned to 8 at least.
        let memory = unsafe { bindings::vrdma_kzalloc(size_of::<T>(), wait == Wait::Yes) };
        let memory = NonNull::new(memory.cast::<T>()).ok_or(Errno::ENOMEM)?;
        // SAFETY: fresh memory of the right size and alignment.
        unsafe { memory.write(value) };
        Ok(Self(memory))
    }

    /// Where the value is. It stays there until the Box is dropped.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Gives up ownership; [`Self::from_raw`] takes it back.
    pub(crate) fn into_raw(self) -> *mut T {
        let raw = self.0.as_ptr();
        core::mem::forget(self);
        raw
    }

    /// # Safety
    /// `raw` must come from [`Self::into_raw`], and be used no more.
    pub(crate) unsafe fn from_raw(raw: NonNull<T>) -> Self {
        Self(raw)
    }
}

impl<T> Deref for Box<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the memory holds a value as long as self lives.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Box<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and self is borrowed exclusively.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Box<T> {
    fn drop(&mut self) {
        // SAFETY: the value is initialized and dropped once; the memory came from kzalloc.
        unsafe {
            self.0.drop_in_place();
            bindings::kfree(self.0.as_ptr().cast());
        }
    }
}

/// A fixed number of values (kvmalloc: not necessarily physically contiguous).
pub(crate) struct Array<T> {
    start: NonNull<T>,
    length: usize,
}

// SAFETY: an Array owns its values.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T> Array<T> {
    /// No values.
    pub(crate) fn empty() -> Self {
        Self {
            start: NonNull::dangling(),
            length: 0,
        }
    }

    /// `length` values made by `make`; stops at the first error.
    pub(crate) fn new(length: usize, make: impl FnMut(usize) -> Result<T>) -> Result<Self> {
        Self::new_in(length, Wait::Yes, make)
    }

    /// The same in another context. An array of no more than a page of memory can also be dropped
    /// in any context.
    pub(crate) fn new_in(
        length: usize,
        wait: Wait,
        mut make: impl FnMut(usize) -> Result<T>,
    ) -> Result<Self> {
        const { assert!(align_of::<T>() <= 8 && size_of::<T>() > 0) };
        if length == 0 {
            return Ok(Self::empty());
        }
        // SAFETY: the caller says whether it may sleep; the result is null or memory for that many
        // values (the product is checked in there).
        let memory = unsafe { bindings::vrdma_kvzalloc(length, size_of::<T>(), wait == Wait::Yes) };
        let start = NonNull::new(memory.cast::<T>()).ok_or(Errno::ENOMEM)?;
        let mut array = Self { start, length: 0 };
        for i in 0..length {
            let value = make(i)?;
            // SAFETY: i < length, so this is inside of the fresh memory; on an error above, drop
            // frees what there is.
            unsafe { start.add(i).write(value) };
            array.length = i.wrapping_add(1);
        }
        Ok(array)
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `length` values are initialized.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and self is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        if self.start == NonNull::dangling() {
            return;
        }
        // SAFETY: the values are dropped once; the memory came from kvzalloc (a dangling start
        // never does: an allocation is aligned to 8 and not at so low an address).
        unsafe {
            core::ptr::drop_in_place::<[T]>(&mut **self);
            bindings::kvfree(self.start.as_ptr().cast());
        }
    }
}

/// One value that several own; the last of them drops it.
pub(crate) struct Arc<T>(NonNull<Counted<T>>);

struct Counted<T> {
    owners: AtomicUsize,
    value: T,
}

// SAFETY: owners share the value, and any of them may drop it.
unsafe impl<T: Send + Sync> Send for Arc<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Arc<T> {}

impl<T> Arc<T> {
    pub(crate) fn new(value: T) -> Result<Self> {
        Self::new_in(value, Wait::Yes)
    }

    pub(crate) fn new_in(value: T, wait: Wait) -> Result<Self> {
        let counted = Counted {
            owners: AtomicUsize::new(1),
            value,
        };
        let counted = Box::new_in(counted, wait)?;
        NonNull::new(counted.into_raw())
            .map(Self)
            .ok_or(Errno::ENOMEM)
    }

    /// The value, if nobody else owns it.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        // SAFETY: valid as long as self is. Acquire: what the last other owner did with the value
        // is over.
        let owners = unsafe { self.0.as_ref() }.owners.load(Ordering::Acquire);
        // SAFETY: the only owner is self, which is borrowed exclusively: nobody can clone it
        // meanwhile.
        (owners == 1).then(|| unsafe { &mut (*self.0.as_ptr()).value })
    }

    /// Gives up ownership; [`Self::from_raw`] takes it back.
    fn into_raw(self) -> *mut Counted<T> {
        let raw = self.0.as_ptr();
        core::mem::forget(self);
        raw
    }

    /// # Safety
    /// `raw` must come from [`Self::into_raw`], and be taken back once.
    unsafe fn from_raw(raw: NonNull<Counted<T>>) -> Self {
        Self(raw)
    }
}

/// A place for a value that is owned together with others; filled and emptied from any thread, in
/// any context.
pub(crate) struct Slot<T>(AtomicPtr<Counted<T>>);

impl<T> Slot<T> {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self(AtomicPtr::new(core::ptr::null_mut()))
    }

    /// Puts a value there, in place of what was.
    pub(crate) fn put(&self, value: Arc<T>) {
        self.swap(value.into_raw());
    }

    /// Empties it.
    pub(crate) fn clear(&self) {
        // Most are empty.
        if !self.0.load(Ordering::Relaxed).is_null() {
            self.swap(core::ptr::null_mut());
        }
    }

    fn swap(&self, new: *mut Counted<T>) {
        if let Some(old) = NonNull::new(self.0.swap(new, Ordering::AcqRel)) {
            // SAFETY: only `put` stores pointers, those of Arc::into_raw, and the thread that swaps
            // one out has it alone.
            drop(unsafe { Arc::from_raw(old) });
        }
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<T> Clone for Arc<T> {
    fn clone(&self) -> Self {
        // SAFETY: valid as long as self is. Owners take memory, so the count cannot overflow.
        unsafe { self.0.as_ref() }
            .owners
            .fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: valid as long as self is.
        unsafe { &(*self.0.as_ptr()).value }
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        // SAFETY: valid: this owner is counted.
        let before = unsafe { self.0.as_ref() }
            .owners
            .fetch_sub(1, Ordering::Release);
        if before == 1 {
            fence(Ordering::Acquire);
            // SAFETY: made by Box::into_raw, and nobody owns it any longer.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}
