// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vhost-user side: the only code that knows vhost-user and virtqueues.
//!
//! A [`Server`] listens on a socket and serves one front end (one VM) after the other in a thread
//! of its own. That thread handles the messages of the front end (`backend`), the commands in the
//! control queue, and new buffers in the event queues (`events`); a virtqueue itself is a `ring`.
//! Work requests never pass here: doorbell queues carry no buffers, and their kicks go straight to
//! the workers.
//!
//! This module must never block on something that a guest or a front end can withhold, except on
//! the front end's own connection; a front end that is slow or malicious holds up its own thread
//! and nothing else.
#![forbid(unsafe_code)]

mod backend;
mod events;
mod ring;
mod server;

pub use server::{bind, Error, Server};

/// `error` and its causes in one line.
#[must_use]
pub fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(error.to_string().trim_end());
        cause = error.source();
    }
    text
}
