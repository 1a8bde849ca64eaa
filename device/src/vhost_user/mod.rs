// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The front end that speaks vhost-user: sessions, and what their messages mean for the device. It
//! knows nothing of verbs.
//!
//! A [`Server`] listens on a socket and serves one front end (one VM) after the other in a thread
//! of its own. That thread handles the messages of the front end (`backend`), the commands in the
//! control queue, and new buffers in the event queues; the device itself is
//! [`crate::virtio::VirtioDevice`].
//!
//! This module must never block on something that a guest or a front end can withhold, except on
//! the front end's own connection; a front end that is slow or malicious holds up its own thread
//! and nothing else.
#![forbid(unsafe_code)]

mod backend;
mod server;

pub use server::{bind, Error, Server};
