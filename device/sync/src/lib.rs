// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The locks of the data path: one whose readers, a fixed set of threads, write nothing that others
//! read often, and a count of those who had to wait for another ([`lock`]).
//!
//! This is a big-reader lock. A reader-writer lock has its readers write to it, each time: two
//! atomic read-modify-writes per lock and poll. Workers look at the tables of every VM millions of
//! times a second, while those change seldom. So a worker is a [`Reader`]: it enters a read section
//! ([`Reader::enter`]) by a store to a cache line of its own, and then may look at everything that
//! is [`Shared`], at the cost of a load each. A writer closes what it wants to change, and waits
//! until each reader that may have entered before has left its read section once.
//!
//! # Why nobody reads what is being changed
//! A reader stores that it is in a read section, then loads `closed`; a writer stores `closed`,
//! then loads whether the reader is in. All four are sequentially consistent: either the reader
//! sees `closed` and keeps out, or the writer sees the reader and waits. What the writer waits for
//! is another number of the reader's round: a read section that begins later sees `closed`.
//! `tests/loom.rs` model-checks this.
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

#[cfg(loom)]
use loom::{
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering},
        RwLock, RwLockReadGuard, RwLockWriteGuard,
    },
    thread,
};
#[cfg(not(loom))]
use std::{
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering},
        RwLock, RwLockReadGuard, RwLockWriteGuard,
    },
    thread,
};

use crossbeam_utils::CachePadded;

/// How often a writer looks whether a reader has left before it gives others the CPU.
#[cfg(not(loom))]
const SPINS: u32 = 100;
#[cfg(loom)]
const SPINS: u32 = 0;

/// How often somebody had to wait in [`lock`].
static WAITS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Locks, whether or not somebody panicked with the lock, and counts if that means to wait.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => wait(mutex),
    }
}

#[cold]
fn wait<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    WAITS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often somebody has had to wait in [`lock`], in this process.
#[must_use]
pub fn waits() -> u64 {
    WAITS.load(std::sync::atomic::Ordering::Relaxed)
}

/// Stands between a sequentially consistent store or exchange and a later load. The two are ordered
/// as they are; but the model checker takes such accesses as acquire and release only, and honours
/// fences.
#[inline(always)]
fn store_load_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// Where a reader says whether it is in a read section.
#[derive(Debug)]
struct Slot {
    /// Odd while it is in one. Only the reader writes.
    round: AtomicU64,
    /// A writer waits for it to leave.
    awaited: AtomicBool,
}

impl Slot {
    /// Returns when the reader has been outside of read sections once since.
    fn wait(&self) {
        let round = self.round.load(Ordering::SeqCst);
        if round % 2 == 0 {
            return;
        }
        self.awaited.store(true, Ordering::Relaxed);
        let mut spins = 0;
        while self.round.load(Ordering::Acquire) == round {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

/// The readers of everything that is shared with them.
#[derive(Debug, Clone)]
pub struct Readers {
    slots: Arc<[CachePadded<Slot>]>,
}

impl Readers {
    /// So many readers.
    #[must_use]
    pub fn new(count: usize) -> (Self, Vec<Reader>) {
        let slot = || {
            CachePadded::new(Slot {
                round: AtomicU64::new(0),
                awaited: AtomicBool::new(false),
            })
        };
        let slots: Vec<_> = (0..count).map(|_| slot()).collect();
        let all = Self {
            slots: slots.into(),
        };
        let each = (0..count).map(|index| Reader {
            all: all.clone(),
            index,
        });
        let each = each.collect();
        (all, each)
    }

    /// A number that changes whenever this reader enters or leaves a read section: what a watchdog
    /// looks at. Zero for a reader that there is not.
    #[must_use]
    pub fn round(&self, index: usize) -> u64 {
        let slot = self.slots.get(index);
        slot.map_or(0, |slot| slot.round.load(Ordering::Relaxed))
    }
}

/// A thread that may look at everything that is shared with its [`Readers`].
#[derive(Debug)]
pub struct Reader {
    all: Readers,
    /// No other reader has it.
    index: usize,
}

impl Reader {
    /// Enters a read section. Writers wait until it ends: it should be soon.
    #[inline]
    pub fn enter(&mut self) -> ReadSection<'_> {
        let section = ReadSection { reader: self };
        section.begin();
        section
    }

    #[inline(always)]
    fn slot(&self) -> &Slot {
        &self.all.slots[self.index]
    }
}

/// A read section. It keeps what was read in it from being changed.
#[derive(Debug)]
pub struct ReadSection<'a> {
    reader: &'a mut Reader,
}

impl ReadSection<'_> {
    #[inline(always)]
    fn begin(&self) {
        let round = &self.reader.slot().round;
        // Odd, and never again what it was.
        let next = (round.load(Ordering::Relaxed) + 1) | 1;
        round.swap(next, Ordering::SeqCst);
        store_load_order();
    }

    #[inline(always)]
    fn end(&self) {
        let slot = self.reader.slot();
        let next = slot.round.load(Ordering::Relaxed) + 1;
        slot.round.store(next, Ordering::Release);
    }

    /// Whether a writer waits for its end.
    #[inline]
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.reader.slot().awaited.load(Ordering::Relaxed)
    }

    /// Lets writers that wait go first.
    #[inline]
    pub fn yield_to_writers(&mut self) {
        if self.is_awaited() {
            self.reader.slot().awaited.store(false, Ordering::Relaxed);
            self.end();
            self.begin();
        }
    }
}

impl Drop for ReadSection<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_awaited() {
            self.reader.slot().awaited.store(false, Ordering::Relaxed);
        }
        self.end();
    }
}

/// A value that readers look at, and that other threads read and change.
pub struct Shared<T> {
    readers: Readers,
    /// A writer changes it, or is about to.
    closed: AtomicBool,
    /// Among the threads that are not readers.
    lock: RwLock<()>,
    value: UnsafeCell<T>,
}

// SAFETY: references to the value are handed out to several threads (T: Sync), and exclusive ones
// to whichever holds the lock (T: Send).
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl<T> Shared<T> {
    /// A value that `readers` look at.
    #[must_use]
    pub fn new(readers: Readers, value: T) -> Self {
        Self {
            readers,
            closed: AtomicBool::new(false),
            lock: RwLock::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// The value, unless a writer changes it, or it is not shared with this reader.
    #[inline(always)]
    pub fn read_in<'a>(&'a self, section: &'a ReadSection<'_>) -> Option<&'a T> {
        let ours = Arc::ptr_eq(&self.readers.slots, &section.reader.all.slots);
        if !ours || self.closed.load(Ordering::SeqCst) {
            return None;
        }
        // SAFETY: who changes the value has stored `closed` before, and found each of its readers
        // out since: this one is in, and loaded `closed` since it came in, so that it came in
        // before that store, if there was one, and is waited for until the section ends, which the
        // reference does not outlive. That `closed` is false again makes all changes visible.
        Some(unsafe { &*self.value.get() })
    }

    /// The value, for a thread that is no reader. A reader would wait for a writer that waits
    /// for it.
    pub fn read(&self) -> Read<'_, T> {
        Read {
            _lock: self.lock.read().unwrap_or_else(PoisonError::into_inner),
            shared: self,
        }
    }

    /// The value, to change it. Returns when no reader and no other thread looks at it.
    pub fn write(&self) -> Write<'_, T> {
        let lock = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::SeqCst);
        store_load_order();
        for slot in &*self.readers.slots {
            slot.wait();
        }
        Write {
            _lock: lock,
            shared: self,
        }
    }
}

/// Leave to read.
pub struct Read<'a, T> {
    _lock: RwLockReadGuard<'a, ()>,
    shared: &'a Shared<T>,
}

impl<T> Deref for Read<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: writers hold the lock alone.
        unsafe { &*self.shared.value.get() }
    }
}

/// Leave to change.
pub struct Write<'a, T> {
    _lock: RwLockWriteGuard<'a, ()>,
    shared: &'a Shared<T>,
}

impl<T> Deref for Write<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: as for `deref_mut`.
        unsafe { &*self.shared.value.get() }
    }
}

impl<T> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: we hold the lock alone, and no reader has a reference: see `Shared::section`.
        unsafe { &mut *self.shared.value.get() }
    }
}

impl<T> Drop for Write<'_, T> {
    fn drop(&mut self) {
        self.shared.closed.store(false, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_lock_is_counted() {
        let mutex = Mutex::new(0);
        *lock(&mutex) += 1;
        assert_eq!(waits(), 0);
        let guard = lock(&mutex);
        std::thread::scope(|scope| {
            scope.spawn(|| *lock(&mutex) += 1);
            while waits() == 0 {
                thread::yield_now();
            }
            drop(guard);
        });
        assert_eq!((waits(), *lock(&mutex)), (1, 2));
    }

    #[test]
    fn each_read_section_can_be_counted_from_outside() {
        let (all, mut each) = Readers::new(2);
        let mut seen = vec![all.round(1)];
        drop(each[1].enter());
        seen.push(all.round(1));
        let section = each[1].enter();
        seen.push(all.round(1));
        drop(section);
        seen.push(all.round(1));
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
        assert_eq!((all.round(0), all.round(2)), (0, 0));
    }

    #[test]
    fn a_reader_sees_its_own_only() {
        let (all, mut each) = Readers::new(1);
        let (others, _) = Readers::new(1);
        let [ours, theirs] = [all, others].map(|readers| Shared::new(readers, 7));
        let mut reader = each.pop().unwrap();
        let section = reader.enter();
        assert_eq!(ours.read_in(&section), Some(&7));
        assert_eq!(theirs.read_in(&section), None);
    }
}
