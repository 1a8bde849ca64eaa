// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The kernel's locks, completions and work items.
use super::alloc::Box;
use super::bindings;
use super::error::{Errno, Result};
use super::rdma::IbDevice;
use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, Ordering};

/// Declares an owner of a kernel object that is allocated by `$new` and needs no more than kfree.
macro_rules! owned {
    ($(#[$doc:meta])* $name:ident, $object:ident, $new:ident ( $($arg:ident : $type:ty),* )) => {
        $(#[$doc])*
        pub(crate) struct $name(NonNull<bindings::$object>);

        // SAFETY: the kernel's functions on it may be called from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            pub(crate) fn new($($arg: $type),*) -> Result<Self> {
                // SAFETY: no preconditions; null if there is no memory.
                NonNull::new(unsafe { bindings::$new($($arg),*) }).map(Self).ok_or(Errno::ENOMEM)
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: allocated by kzalloc, owned, and unused from here on.
                unsafe { bindings::kfree(self.0.as_ptr().cast()) }
            }
        }
    };
}

/// Which lock it is, for the kernel's checker of locks: those of one kind are never taken inside of
/// each other.
pub(crate) type Which = bindings::vrdma_lock;

/// The kinds of locks.
pub(crate) mod which {
    pub(crate) use super::bindings::{
        VRDMA_LOCK_COMMANDS as COMMANDS, VRDMA_LOCK_CONNECTIONS as CONNECTIONS,
        VRDMA_LOCK_CQ as CQ, VRDMA_LOCK_DYING as DYING, VRDMA_LOCK_OBJECT as OBJECT,
        VRDMA_LOCK_RECV as RECV, VRDMA_LOCK_REGION as REGION, VRDMA_LOCK_SEND as SEND,
    };
}

owned! {
    /// A spinlock that also disables interrupts.
    SpinLock, spinlock_t, vrdma_spinlock_new(which: Which)
}
owned! {
    /// A mutex.
    Mutex, mutex, vrdma_mutex_new(which: Which)
}
owned! {
    /// Something to wait for.
    Completion, completion, vrdma_completion_new()
}
owned! {
    /// A counting semaphore.
    Semaphore, semaphore, vrdma_semaphore_new(count: i32)
}

impl SpinLock {
    /// Runs `inside` with the lock held.
    pub(crate) fn with<R>(&self, inside: impl FnOnce() -> R) -> R {
        // SAFETY: the lock is initialized; it is released below with the flags from here.
        let flags = unsafe { bindings::vrdma_spinlock_lock(self.0.as_ptr()) };
        let result = inside();
        // SAFETY: held since above.
        unsafe { bindings::vrdma_spinlock_unlock(self.0.as_ptr(), flags) };
        result
    }
}

impl Mutex {
    /// Runs `inside` with the mutex held. May sleep.
    pub(crate) fn with<R>(&self, inside: impl FnOnce() -> R) -> R {
        // SAFETY: the mutex is initialized; it is released below.
        unsafe { bindings::vrdma_mutex_lock(self.0.as_ptr()) };
        let result = inside();
        // SAFETY: held since above.
        unsafe { bindings::vrdma_mutex_unlock(self.0.as_ptr()) };
        result
    }
}

/// A value behind a mutex.
pub(crate) struct Locked<T> {
    lock: Mutex,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only touched with the lock held.
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    pub(crate) fn new(value: T) -> Result<Self> {
        Self::new_of(which::OBJECT, value)
    }

    /// With a lock of this kind.
    pub(crate) fn new_of(which: Which, value: T) -> Result<Self> {
        Ok(Self {
            lock: Mutex::new(which)?,
            value: UnsafeCell::new(value),
        })
    }

    /// Runs `inside` on the value with the mutex held. May sleep.
    pub(crate) fn with<R>(&self, inside: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is held, and not taken again by its holder.
        self.lock.with(|| inside(unsafe { &mut *self.value.get() }))
    }
}

/// A value behind a spinlock.
pub(crate) struct SpinLocked<T> {
    lock: SpinLock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only touched with the lock held.
unsafe impl<T: Send> Sync for SpinLocked<T> {}

impl<T> SpinLocked<T> {
    pub(crate) fn new(which: Which, value: T) -> Result<Self> {
        Ok(Self {
            lock: SpinLock::new(which)?,
            value: UnsafeCell::new(value),
        })
    }

    /// Runs `inside` on the value with the lock held.
    pub(crate) fn with<R>(&self, inside: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock is held, and not taken again by its holder.
        self.lock.with(|| inside(unsafe { &mut *self.value.get() }))
    }
}

impl Completion {
    /// Completes it: one waiter goes on.
    pub(crate) fn complete(&self) {
        // SAFETY: initialized.
        unsafe { bindings::complete(self.0.as_ptr()) }
    }

    /// Waits; false if the time is over.
    pub(crate) fn wait(&self, milliseconds: u32) -> bool {
        // SAFETY: initialized; callers are in process context.
        unsafe { bindings::vrdma_completion_wait(self.0.as_ptr(), milliseconds) }
    }

    /// Waits as long as it takes.
    pub(crate) fn wait_forever(&self) {
        while !self.wait(10_000) {}
    }
}

impl Semaphore {
    /// Runs `inside` with one unit taken. May sleep.
    pub(crate) fn with<R>(&self, inside: impl FnOnce() -> R) -> R {
        // SAFETY: initialized; callers are in process context.
        unsafe { bindings::down(self.0.as_ptr()) };
        let result = inside();
        // SAFETY: initialized.
        unsafe { bindings::up(self.0.as_ptr()) };
        result
    }
}

/// Sleeps. Process context.
pub(crate) fn sleep(milliseconds: u32) {
    // SAFETY: callers are in process context.
    unsafe { bindings::vrdma_sleep(milliseconds) }
}

/// Milliseconds since the system was started. Any context.
pub(crate) fn milliseconds() -> u64 {
    // SAFETY: for any context.
    unsafe { bindings::vrdma_milliseconds() }
}

/// A work item that runs a function on the device, in process context, never twice at a time.
pub(crate) struct Work<D> {
    work: NonNull<bindings::vrdma_work>,
    _context: Box<WorkContext<D>>,
}

struct WorkContext<D> {
    ib: IbDevice<D>,
    run: fn(&D),
}

// SAFETY: the kernel's functions on it may be called from any thread.
unsafe impl<D: Sync> Send for Work<D> {}
// SAFETY: as above.
unsafe impl<D: Sync> Sync for Work<D> {}

impl<D> Work<D> {
    /// The item must not be scheduled before the device is in place (see [`super`]).
    pub(crate) fn new(ib: IbDevice<D>, run: fn(&D)) -> Result<Self> {
        let context = Box::new(WorkContext { ib, run })?;
        // SAFETY: the context lives until drop, which first waits for the work to end.
        let work =
            unsafe { bindings::vrdma_work_new(Some(run_work::<D>), context.as_ptr().cast()) };
        Ok(Self {
            work: NonNull::new(work).ok_or(Errno::ENOMEM)?,
            _context: context,
        })
    }

    /// Makes it run soon; any context.
    pub(crate) fn schedule(&self) {
        // SAFETY: initialized.
        unsafe { bindings::vrdma_work_schedule(self.work.as_ptr()) }
    }

    /// Takes it back if it is scheduled, and waits for its end if it runs.
    pub(crate) fn cancel(&self) {
        // SAFETY: initialized; callers are in process context, and not in the work itself.
        unsafe { bindings::vrdma_work_cancel(self.work.as_ptr()) }
    }
}

impl<D> Drop for Work<D> {
    fn drop(&mut self) {
        // SAFETY: owned; waits for the work to end, and frees it.
        unsafe { bindings::vrdma_work_free(self.work.as_ptr()) }
    }
}

unsafe extern "C" fn run_work<D>(arg: *mut c_void) {
    // SAFETY: `arg` is the context given to vrdma_work_new; it outlives the work.
    let context = unsafe { &*arg.cast::<WorkContext<D>>() };
    // SAFETY: scheduled after the device was put in place, cancelled before it is dropped.
    (context.run)(unsafe { context.ib.device() });
}

/// A value that is set once, and has another until then.
pub(crate) struct SetOnce<T> {
    before: T,
    value: UnsafeCell<Option<T>>,
    state: AtomicU8,
}

// SAFETY: readers get at the value only after `state` says that it is written, for good.
unsafe impl<T: Send + Sync> Sync for SetOnce<T> {}

impl<T> SetOnce<T> {
    const UNSET: u8 = 0;
    const WRITING: u8 = 1;
    const SET: u8 = 2;

    pub(crate) fn new(before: T) -> Self {
        Self {
            before,
            value: UnsafeCell::new(None),
            state: AtomicU8::new(Self::UNSET),
        }
    }

    /// Sets the value; later calls do nothing.
    pub(crate) fn set(&self, value: T) {
        if self
            .state
            .compare_exchange(
                Self::UNSET,
                Self::WRITING,
                Ordering::Acquire,
                Ordering::Relaxed,
            )
            .is_ok()
        {
            // SAFETY: only the one that made the state WRITING comes here, and nobody reads before
            // it is SET.
            unsafe { *self.value.get() = Some(value) };
            self.state.store(Self::SET, Ordering::Release);
        }
    }

    pub(crate) fn get(&self) -> &T {
        if self.state.load(Ordering::Acquire) == Self::SET {
            // SAFETY: written before SET, never again.
            if let Some(value) = unsafe { &*self.value.get() } {
                return value;
            }
        }
        &self.before
    }
}
