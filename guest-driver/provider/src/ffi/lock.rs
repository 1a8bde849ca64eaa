// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A spin lock: held for the time of a post or a poll. Where an application has promised to use an
//! object from one thread only, it locks nothing.

use core::cell::UnsafeCell;
use core::hint;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Looks at the lock before giving the processor away: its holder may be waiting for it.
const SPINS: u32 = 100;

/// A value behind a spin lock.
#[derive(Debug)]
pub struct SpinLock<T> {
    locked: AtomicBool,
    /// False: it locks nothing.
    shared: bool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock gives the value to one thread at a time, or `unlocked` was promised that.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub fn new(value: T) -> Self {
        Self {
            locked: AtomicBool::new(false),
            shared: true,
            value: UnsafeCell::new(value),
        }
    }

    /// A value that needs no lock.
    ///
    /// # Safety
    /// One thread at a time uses it.
    pub unsafe fn unlocked(value: T) -> Self {
        Self {
            shared: false,
            ..Self::new(value)
        }
    }

    #[inline(always)]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        if self.shared && self.locked.swap(true, Ordering::Acquire) {
            self.wait();
        }
        SpinGuard { lock: self }
    }

    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..SPINS {
                if !self.locked.load(Ordering::Relaxed)
                    && !self.locked.swap(true, Ordering::Acquire)
                {
                    return;
                }
                hint::spin_loop();
            }
            thread::yield_now();
        }
    }

    /// The guard of a lock that this thread holds since a guard was forgotten.
    ///
    /// # Safety
    /// The lock is held, its guard was forgotten, and no other guard was made since then that is
    /// not forgotten too.
    #[inline(always)]
    pub unsafe fn resume(&self) -> SpinGuard<'_, T> {
        SpinGuard { lock: self }
    }
}

/// Releases the lock when dropped.
#[derive(Debug)]
pub struct SpinGuard<'l, T> {
    lock: &'l SpinLock<T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.lock.shared {
            self.lock.locked.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem;

    #[test]
    fn one_at_a_time() {
        let lock = SpinLock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        *lock.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 40_000);
    }

    #[test]
    fn without_a_lock_nothing_is_locked() {
        // SAFETY: this thread is the only one.
        let lock = unsafe { SpinLock::unlocked(1) };
        *lock.lock() += 1;
        assert!(!lock.locked.load(Ordering::Relaxed));
        // As after start_poll: with a lock this would not return.
        mem::forget(lock.lock());
        *lock.lock() += 1;
        assert_eq!(*lock.lock(), 3);
    }

    #[test]
    fn a_forgotten_guard_is_resumed() {
        let lock = SpinLock::new(1);
        mem::forget(lock.lock());
        // SAFETY: forgotten just now.
        let mut guard = unsafe { lock.resume() };
        *guard += 1;
        drop(guard);
        assert_eq!(*lock.lock(), 2);
    }
}
