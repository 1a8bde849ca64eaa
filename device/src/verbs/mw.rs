// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory windows (specification: "Memory windows").
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What a window is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// Index of the region's key.
    pub region: u32,
    /// The queue pair that it was bound by.
    pub qp: u32,
    /// Granted access: `access` flags.
    pub access: u32,
    /// First address of the window, as remote work requests name it.
    pub iova: u64,
    /// Length, bytes.
    pub length: u64,
    /// What to add to an address of the window to get the region's.
    pub shift: u64,
}

/// What changes of a window.
#[derive(Debug, Clone, Copy)]
pub struct State {
    /// The present key.
    pub key: u32,
    /// What it is bound to.
    pub binding: Option<Binding>,
}

/// A memory window.
///
/// An access to memory through it holds its state for reading meanwhile. So a bind or an
/// invalidation, which takes it for writing, returns when nobody accesses memory by the old binding
/// any longer.
#[derive(Debug)]
pub struct Mw {
    /// Index of its keys.
    pub index: u32,
    /// Protection domain.
    pub pd: u32,
    /// Type 2: bound once, until it is invalidated, and only good for the queue pair that bound it.
    pub type_2: bool,
    state: RwLock<State>,
}

impl Mw {
    /// A window with its first key, bound to nothing.
    #[must_use]
    pub fn new(key: u32, pd: u32, type_2: bool) -> Self {
        Self {
            index: key >> 8,
            pd,
            type_2,
            state: RwLock::new(State { key, binding: None }),
        }
    }

    /// The state, which stays so while the guard lives. A thread must not hold two guards.
    pub(super) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to change it.
    pub(super) fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
