// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fast regions: allocated once, registered and invalidated again and again by work requests
//! (specification: "Fast registration").
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::verbs::vendor_err;

use super::keys::{KeyError, CANNOT_BIND};
use super::mr::{Mr, NO_WINDOWS};
use crate::memory::{Form, GuestMemory};

/// A fast region.
///
/// An access to memory through it holds its state for reading meanwhile, so that an invalidation,
/// which takes it for writing, returns when nobody accesses the memory any longer. A reader never
/// waits: where the state is locked for writing, or a writer waits for it, the region is about to
/// be registered or invalidated, and counts as free. (A message may read one region and write
/// another, or the same; if it waited, it could wait for one that waits for it.) So only a change
/// that is sure to happen takes it for writing: `change` is held from before that is looked at.
#[derive(Debug)]
pub struct FastMr {
    /// Index of its keys.
    pub index: u32,
    /// Protection domain.
    pub pd: u32,
    /// Pages or blocks of a registration, at most.
    pub max_pages: u32,
    /// What a registration has.
    pub form: Form,
    change: Mutex<()>,
    /// What is registered.
    state: RwLock<Option<Mr>>,
}

/// Leave to access what is registered: it stays so meanwhile.
pub(super) type Lease<'a> = RwLockReadGuard<'a, Option<Mr>>;

impl FastMr {
    /// A free region.
    #[must_use]
    pub fn new(index: u32, pd: u32, max_pages: u32, form: Form) -> Self {
        Self {
            index,
            pd,
            max_pages,
            form,
            change: Mutex::new(()),
            state: RwLock::new(None),
        }
    }

    /// What is registered, which stays so while the lease lives; never waits.
    #[inline]
    pub(super) fn lease(&self) -> Option<Lease<'_>> {
        match self.state.try_read() {
            Ok(lease) => Some(lease),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// What `f` says of what is registered, if anything is.
    #[must_use]
    pub fn describe<T>(&self, f: impl FnOnce(&Mr) -> T) -> Option<T> {
        self.lease()?.as_ref().map(f)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        lock(&self.change)
    }

    /// Replaces what is registered, when nobody accesses it any longer. The caller holds `change`.
    fn replace(&self, _changing: &MutexGuard<'_, ()>, mr: Option<Mr>) -> Option<Mr> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *state, mr)
    }

    /// Whether it can be registered for protection domain `pd`.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn check_free(&self, pd: u32) -> Result<(), KeyError> {
        if self.pd != pd {
            return Err(KeyError(vendor_err::KEY_PD));
        }
        match self.lease() {
            Some(lease) if lease.is_some() => Err(KeyError(vendor_err::REGISTERED)),
            _ => Ok(()),
        }
    }

    /// Registers `mr`.
    ///
    /// # Errors
    /// Why that cannot be.
    pub(super) fn register(&self, mr: Mr) -> Result<(), KeyError> {
        let changing = self.changing();
        self.check_free(mr.pd)?;
        self.replace(&changing, Some(mr));
        Ok(())
    }

    /// Whether protection domain `pd` can invalidate `key`.
    ///
    /// # Errors
    /// Where not.
    pub(super) fn check_invalidate(&self, key: u32, pd: u32) -> Result<(), KeyError> {
        let lease = self.lease().ok_or(CANNOT_BIND)?;
        let mr = lease.as_ref().ok_or(CANNOT_BIND)?;
        if mr.key == key && mr.pd == pd && mr.windows.load(Ordering::Relaxed) == 0 {
            Ok(())
        } else {
            Err(CANNOT_BIND)
        }
    }

    /// Invalidates `key` for protection domain `pd`; returns what was registered, and is accessed
    /// by nobody any longer.
    ///
    /// # Errors
    /// Where that cannot be.
    pub(super) fn invalidate(&self, key: u32, pd: u32) -> Result<Option<Mr>, KeyError> {
        let changing = self.changing();
        self.check_invalidate(key, pd)?;
        {
            let lease = self.lease().ok_or(CANNOT_BIND)?;
            let mr = lease.as_ref().ok_or(CANNOT_BIND)?;
            // From here on no window can be bound to it.
            mr.windows
                .compare_exchange(0, NO_WINDOWS, Ordering::Relaxed, Ordering::Relaxed)
                .map_err(|_| CANNOT_BIND)?;
        }
        Ok(self.replace(&changing, None))
    }

    /// What is registered, to change it.
    pub(super) fn get_mut(&mut self) -> Option<&mut Mr> {
        self.state
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
    }

    /// Finds the memory of what is registered anew after a change of the memory table.
    pub(super) fn rebase(&mut self, memory: Option<&GuestMemory>) {
        if let Some(mr) = self.get_mut() {
            mr.rebase(memory);
        }
    }
}
