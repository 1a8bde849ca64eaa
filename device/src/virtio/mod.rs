// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtio device: its virtqueues, its configuration, its features, its life. Front ends stand
//! on it; it knows of none.
//!
//! A front end says where the virtqueues lie, starts and stops them, tells of changes of memory,
//! and passes on what the guest notifies ([`VirtioDevice`]). Commands in the control queue are
//! executed in the front end's thread (`device`); events come from workers at any time and go to
//! the event queues (`events`); a virtqueue itself is a `ring`. Work requests never pass here:
//! doorbell queues carry no buffers, and their notifications go straight to the workers.
//!
//! Nothing here waits for a guest or a front end.
#![forbid(unsafe_code)]

mod device;
mod events;
mod ring;

pub use device::{VirtioDevice, FEATURES};
pub use ring::{Addresses, Error, Ring, MAX_RING_SIZE};
