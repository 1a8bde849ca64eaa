// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the kernel module, the rdma-core provider and the bare front end share: rings, work queue
//! entries, completion parsing, doorbells, control commands, and the private interface between
//! module and provider.
//!
//! Memory shared with the device is seen as words of [`sync::AtomicU64`] ([`Memory`]); the code
//! that maps it makes that view of it, and everything here, but for a hint to the processor, is
//! safe code on it. Posting a work request is [`SendQueue::post`] and then [`Doorbell::ring`]; its
//! completion comes from [`CompletionQueue::poll`], and frees the entry by [`SendQueue::complete`].
#![no_std]
#![deny(unsafe_code)]

pub mod abi;
pub mod buffer;
pub mod command;
mod completion;
mod doorbell;
mod judge;
pub mod pages;
mod prefetch;
mod record;
mod ring;
pub mod sync;
mod work;

pub use completion::{ArmMode, CompletionQueue, ResizedQueue};
pub use doorbell::{Doorbell, StatusPage};
pub use judge::{Completing, Receives, Violation};
pub use record::{srq_of, InRing, Posted, Private, Record, Slots};
pub use ring::{BadLayout, Memory, PostError};
pub use work::{
    RecvBatch, RecvQueue, ResizedSharedQueue, SendBatch, SendEntry, SendQueue, SharedRecvQueue,
    SrdWqe,
};
