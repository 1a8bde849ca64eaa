// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! From the number of an object, as events name it, to the object: and the object does not go while
//! an event is being delivered to it ([`Table`]). The same for what a lock guards ([`Map`]).
use super::alloc::Box;
use super::bindings;
use super::error::{Errno, Result};
use super::sync::Completion;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Objects by number.
pub(crate) struct Table<T>(NonNull<bindings::xarray>, core::marker::PhantomData<T>);

// SAFETY: the xarray is only touched through its functions, which lock; T is handed out by shared
// reference.
unsafe impl<T: Send + Sync> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Table<T> {}

struct Entry<T> {
    target: T,
    /// One for the registration, one for every event under delivery.
    users: AtomicU32,
    idle: Completion,
}

/// An object's place in a [`Table`], which must outlive it. Dropping it ends it (see
/// [`Self::end`]).
pub(crate) struct Registration<T> {
    table: NonNull<bindings::xarray>,
    number: u32,
    ended: AtomicBool,
    entry: Box<Entry<T>>,
}

// SAFETY: as for the table.
unsafe impl<T: Send + Sync> Send for Registration<T> {}
// SAFETY: as for the table.
unsafe impl<T: Send + Sync> Sync for Registration<T> {}

impl<T> Table<T> {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: no preconditions; null if there is no memory.
        let table = unsafe { bindings::vrdma_table_new() };
        NonNull::new(table)
            .map(|table| Self(table, core::marker::PhantomData))
            .ok_or(Errno::ENOMEM)
    }

    /// Enters an object. One that was there before with the same number is no longer found: the
    /// device gives a number to a new object only after it forgot the old.
    pub(crate) fn insert(&self, number: u32, target: T) -> Result<Registration<T>> {
        let entry = Box::new(Entry {
            target,
            users: AtomicU32::new(1),
            idle: Completion::new()?,
        })?;
        // SAFETY: the entry lives until the registration is dropped, which takes it out first.
        Errno::check(unsafe {
            bindings::vrdma_table_insert(self.0.as_ptr(), number.into(), entry.as_ptr().cast())
        })?;
        Ok(Registration {
            table: self.0,
            number,
            ended: AtomicBool::new(false),
            entry,
        })
    }

    /// Runs `deliver` on the object with this number, if there is one. Any context; no lock is held
    /// meanwhile.
    pub(crate) fn with(&self, number: u32, deliver: impl FnOnce(&T)) {
        // SAFETY: initialized, and called under the lock.
        self.find(
            |table| unsafe { bindings::xa_load(table, u64::from(number)) },
            deliver,
        );
    }

    /// Runs `deliver` on all objects that are there all the time. Any context; no lock is held
    /// meanwhile.
    pub(crate) fn for_each(&self, mut deliver: impl FnMut(&T)) {
        let mut number = 0u64;
        // SAFETY: initialized, and called under the lock.
        while self.find(
            |table| unsafe { bindings::vrdma_table_next(table, &mut number) },
            &mut deliver,
        ) {
            number = number.saturating_add(1);
        }
    }

    /// Runs `deliver` on what `look` finds under the lock; false if that is nothing.
    fn find(
        &self,
        look: impl FnOnce(*mut bindings::xarray) -> *mut c_void,
        deliver: impl FnOnce(&T),
    ) -> bool {
        // SAFETY: initialized; released below with the flags from here.
        let flags = unsafe { bindings::vrdma_table_lock(self.0.as_ptr()) };
        // SAFETY: what is in the table are entries of type Entry<T> (insert), and while the lock is
        // held none is freed (Registration::end takes the lock to remove it).
        let entry = unsafe { look(self.0.as_ptr()).cast::<Entry<T>>().as_ref() };
        if let Some(entry) = entry {
            entry.users.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: held since above.
        unsafe { bindings::vrdma_table_unlock(self.0.as_ptr(), flags) };
        let Some(entry) = entry else {
            return false;
        };
        // The entry stays until its last user has left: Registration::end waits for that.
        deliver(&entry.target);
        entry.leave();
        true
    }
}

impl<T> Entry<T> {
    fn leave(&self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.complete();
        }
    }
}

impl<T> Registration<T> {
    /// The object.
    pub(crate) fn target(&self) -> &T {
        &self.entry.target
    }

    /// Takes the object out and waits until no event is being delivered to it any longer. Process
    /// context, by one thread at a time; later calls do nothing.
    pub(crate) fn end(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: the table outlives its registrations (a rule of Device).
        unsafe {
            bindings::vrdma_table_remove(
                self.table.as_ptr(),
                self.number.into(),
                self.entry.as_ptr().cast(),
            );
        }
        self.entry.leave();
        self.entry.idle.wait_forever();
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: owned; no registrations are left.
        unsafe { bindings::vrdma_table_free(self.0.as_ptr()) }
    }
}

/// Values by number, which one thread at a time has: a lock guards it.
pub(crate) struct Map<T>(NonNull<bindings::xarray>, core::marker::PhantomData<Box<T>>);

// SAFETY: a map owns its values.
unsafe impl<T: Send> Send for Map<T> {}

impl<T> Map<T> {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: no preconditions; null if there is no memory.
        let table = unsafe { bindings::vrdma_table_new() };
        NonNull::new(table)
            .map(|table| Self(table, core::marker::PhantomData))
            .ok_or(Errno::ENOMEM)
    }

    /// Enters a value, in place of one that has the number.
    pub(crate) fn insert(&mut self, number: u64, value: T) -> Result<()> {
        drop(self.remove(number));
        let value = Box::new(value)?;
        // SAFETY: the map owns the value until `remove`.
        Errno::check(unsafe {
            bindings::vrdma_table_insert(self.0.as_ptr(), number, value.as_ptr().cast())
        })?;
        value.into_raw();
        Ok(())
    }

    fn find(&self, number: u64) -> Option<NonNull<T>> {
        // SAFETY: initialized; a pointer from `insert`, or null.
        NonNull::new(unsafe { bindings::xa_load(self.0.as_ptr(), number) }.cast())
    }

    /// The value with this number.
    pub(crate) fn get(&mut self, number: u64) -> Option<&mut T> {
        // SAFETY: a value that the map owns, and the map is borrowed exclusively.
        self.find(number).map(|mut value| unsafe { value.as_mut() })
    }

    /// Takes the value with this number out.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Box<T>> {
        let value = self.find(number)?;
        // SAFETY: initialized; the pointer is the one that is there.
        unsafe { bindings::vrdma_table_remove(self.0.as_ptr(), number, value.as_ptr().cast()) };
        // SAFETY: made by into_raw (insert), and no longer in the map.
        Some(unsafe { Box::from_raw(value) })
    }

    /// The first number that there is.
    pub(crate) fn first(&self) -> Option<u64> {
        let mut number = 0;
        // SAFETY: initialized; nobody else changes it meanwhile.
        let value = unsafe { bindings::vrdma_table_next(self.0.as_ptr(), &mut number) };
        (!value.is_null()).then_some(number)
    }
}

impl<T> Drop for Map<T> {
    fn drop(&mut self) {
        while let Some(number) = self.first() {
            drop(self.remove(number));
        }
        // SAFETY: owned, and empty.
        unsafe { bindings::vrdma_table_free(self.0.as_ptr()) }
    }
}
