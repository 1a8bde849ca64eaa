// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fabric iWARP (specification: "iWARP transport"): each connected queue pair has a TCP connection of
//! the host's kernel.
//!
//! | file | what |
//! |---|---|
//! | [`port`] | a VM's port: what its driver knows of connections, and what it is told |
//! | `connections` | all of a worker's: whose they are, when they are served, how they end |
//! | `connection` | one of them: how far it is, and what its socket says |
//! | `handshake` | how it begins: MPA, and what the driver decides |
//! | `traffic` | what goes over it, and how that ends |
//! | `stream` | work requests become FPDUs, and FPDUs are carried out |
//! | `outgoing` | FPDUs that wait for the socket |
//! | `tcp` | sockets |
//! | `mpa` | the request and the reply that a connection begins with |
//! | `fpdu` | what frames a segment in the stream |
//! | `ddp` | segments of messages, of DDP and RDMAP |
//! | `terminate`, `refusal` | the message that ends a connection, and the reasons that it can have |
//!
//! The engine is that of all fabrics. Where both ends of a connection are in this process, their queue
//! pairs are connected like those of RC, and [`super::local`] moves their messages; the TCP connection
//! stays, and shows by its end that the other end is gone.
mod bytes;
mod connection;
mod connections;
pub(crate) mod ddp;
pub(crate) mod fpdu;
mod handshake;
pub(crate) mod mpa;
mod outgoing;
pub mod port;
pub(crate) mod refusal;
mod stream;
pub(crate) mod tcp;
pub(crate) mod terminate;
mod traffic;

pub(crate) use connections::{Here, Iwarp};
