// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends that speak vhost-user: what their messages mean for the device. It knows nothing of
//! verbs.
//!
//! A session (`server`) lasts as long as the connection of a front end.
//! The crate `vhost-user-backend` reads and answers the messages in a thread, and waits for kicks
//! in another; the latter executes the commands in the control queue and delivers events. Both
//! change the device, a [`crate::virtio::VirtioDevice`], through `backend` and `vring`, in turn.
//! Kicks of doorbell queues go straight to the workers.
//!
//! This module must never block on something that a guest or a front end can withhold, except on
//! the front end's own connection; a front end that is slow or malicious holds up its own threads
//! and nothing else.
//!
//! # What is done by hand, and why
//! `vhost-user-backend` 0.24 is made for devices whose virtqueues it starts and waits for itself.
//! These parts of it do not fit:
//!
//! - *Changes of virtqueues*: `VhostUserHandler` (its `handler.rs`) tells them to the virtqueues
//!   alone, not to the `VhostUserBackend`. For us SET_VRING_ENABLE of the control queue starts and
//!   stops the VM, and SET_VRING_BASE may be a reset. So `vring` implements `VringT`, and passes on
//!   what it is told.
//! - *Kicks*: `VringState::read_kick` reads them, so that a file descriptor that blocks holds up the
//!   thread for ever; in `VringEpollHandler::handle_event` one that was read by somebody else ends
//!   the thread; and `VhostUserHandler::set_vring_kick` leaves a kick that it replaces registered.
//!   So no virtqueue is in a mask of `queues_per_thread`, and the crate registers none. `backend`
//!   has the crate's thread wait for kicks by `register_listener`, edge triggered, and reads none.
//! - *Features*: `VhostUserHandler::set_features` compares with those that are offered, and asks
//!   nobody whether they go together. Where one lacks another, `backend` shuts the connection down.
//! - *Memory*: `VhostUserHandler::add_mem_region` and `set_mem_table` map and publish regions
//!   without a look at their alignment, at the length of their files, at how many there are (it
//!   tells front ends that there may be 509) and how large they are in all. So nobody here uses what
//!   they publish: `Limits::check_memory` and `GuestMemory::of` judge it first.
//! - *The end*: `VringEpollHandler::new` never closes the file descriptor of `exit_event`, and there
//!   would be one more for each session. So the thread ends by an event of ours.
//!
//! And this cannot be had:
//!
//! - A request that is refused ends the connection (`VhostUserDaemon::start_daemon`).
//! - Protocol features that were not offered are not refused (`set_protocol_features`), only what
//!   is asked for by them; RESET_OWNER, which is deprecated, changes nothing (`reset_owner`).
//! - CONFIG_CHANGE: the crate `vhost` 0.18, on which it stands, makes a `Backend` of the file
//!   descriptor of SET_BACKEND_REQ_FD, which neither sends this message nor gives its socket away
//!   (`backend_req.rs`). So BACKEND_REQ is not offered, and events tell the driver of the link.
#![forbid(unsafe_code)]

mod backend;
mod server;
mod vring;

pub use server::serve;
