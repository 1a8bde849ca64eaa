// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All unsafe access to guest memory, and nothing else.
//!
//! [`GuestMemory`] is the memory of a VM as its front end shared it. [`Pages`] is a list of guest
//! pages resolved to host addresses: what a memory region or a ring consists of; [`Blocks`] is the
//! same for a block list. It keeps the mapping alive, so everything outside of this module is safe
//! code: ring words are seen as atomics, payload is copied between [`ContiguousRange`]s.
//!
//! Guest memory changes under us at any time. Nothing here gives out a plain reference to it.

pub mod atomic;
#[cfg(target_arch = "x86_64")]
mod avx;
mod blocks;
mod guest;
mod list;
mod loss;
pub mod null;
mod pages;
mod range;
mod scatter;

pub use blocks::Blocks;
pub use guest::{map_region, Error, GuestMemory, RegionInfo};
pub use list::{Form, ListReader, Resolved};
pub use pages::Pages;
pub use range::{
    copy, copy_last, fetch_bytes, lines, prefetch_from, prefetch_write, ContiguousRange, Hint,
    Source,
};
pub use scatter::{copy_scattered, end_streaming, ScatterRange, Way};

/// Measures how this processor copies between pages of guests best, and copies so from now on. It takes
/// some twenty milliseconds.
pub fn choose_copy() {
    #[cfg(target_arch = "x86_64")]
    if let Some(order) = avx::choose() {
        log::debug!("pages are copied {order:?}");
    }
}

#[cfg(test)]
pub(crate) use guest::tests::region;
