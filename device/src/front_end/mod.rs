// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What front ends of every protocol have in common: sockets that are served, and the device that
//! the threads of a session share. It knows of no protocol, and nothing of verbs.
//!
//! A [`Server`] listens on a socket and serves one front end (one VM) after the other, by a
//! `Protocol`. While a session lasts, its threads change the device in turn
//! (`SharedDevice`): one that reads what the front end sends, and one of the virtqueues, which
//! executes commands and delivers events.
#![forbid(unsafe_code)]

mod device;
mod server;

pub(crate) use device::{lock, SharedDevice};
pub use server::Server;
pub(crate) use server::{Connection, Ended, Protocol, ShutDown, Vm};
