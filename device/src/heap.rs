// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The heap of the process: what a VM had is given back to the system when the VM ends.
//!
//! glibc's allocator by itself keeps it. It has a heap for every few threads, gives back only what
//! lies at the end of one, and of all but the first not even that on demand. Only the control path
//! allocates, and one heap is enough for it.

/// Sets the allocator up. To be called before there are threads.
#[cfg(target_env = "gnu")]
pub fn set_up() {
    // SAFETY: mallopt(3) takes no pointers, and changes nothing of what is allocated.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Gives memory that is free back to the system. It takes the lock of the allocator, some hundred
/// microseconds in all: for the ends of VMs, not of objects.
#[cfg(target_env = "gnu")]
pub fn give_back() {
    // SAFETY: malloc_trim(3) takes no pointers, is thread-safe, and touches free memory only.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators than glibc's have no such settings.
#[cfg(not(target_env = "gnu"))]
pub fn set_up() {}

/// Other allocators than glibc's have no such call.
#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}
