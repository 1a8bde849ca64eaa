// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user RDMA NIC for virtual machines.
//!
//! Its layers, each of which knows only those before it:
//!
//! | layer | what |
//! |---|---|
//! | [`limits`], [`footprint`] | how much a VM may have, and what it has |
//! | [`error`], [`logging`], [`epoll_fd`], [`eventfd`], [`socket`], `probes` | errors; the log; file descriptors; sockets; probes |
//! | [`sandbox`] | what the process and its threads give up |
//! | [`memory`] | all access to guest memory |
//! | [`verbs`] | the objects of verbs, passive: completion queues, keys, shared receive queues |
//! | [`engine`] | what work requests mean: send queues, responders, completions |
//! | [`fabric`] | what carries messages between queue pairs |
//! | [`worker`] | the threads that look at doorbells and run queue pairs |
//! | [`adapter`], [`rnic`] | the process's adapter, and what each VM sees of it |
//! | [`control`] | control commands |
//! | [`virtio`] | the virtio device: virtqueues, configuration, events |
//! | [`front_end`], [`vhost_user`], [`vfio_user`] | front ends: sessions over vhost-user, and over vfio-user |
//! | [`config`], [`devices`], [`drain`], [`status`], [`metrics`], [`service`], [`manage`], [`top`], [`check`] | the process |
//!
//! The way of a work request: [`worker`] sees the doorbell, [`fabric::local`] takes the entry that
//! [`engine::send_queue`] reads and judges to the peer, [`engine::responder`] places the data,
//! [`verbs::cq`] takes the completion.
#![deny(unsafe_code)]
#![deny(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

pub mod adapter;
pub mod check;
pub mod config;
pub mod control;
pub mod devices;
pub mod drain;
pub mod engine;
pub mod epoll_fd;
pub mod error;
pub mod eventfd;
pub mod fabric;
pub mod footprint;
pub mod front_end;
#[allow(unsafe_code)]
pub mod heap;
pub mod limits;
pub mod logging;
pub mod manage;
#[allow(unsafe_code)]
pub mod memory;
pub mod metrics;
pub mod play;
mod probes;
pub mod rnic;
mod rnic_status;
pub mod sandbox;
pub mod service;
pub mod socket;
pub mod status;
mod table;
pub mod top;
pub mod verbs;
pub mod vfio_user;
pub mod vhost_user;
pub mod virtio;
mod warnings;
pub mod wire_setup;
pub mod worker;
