// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! virtio_rdma: the guest kernel's driver of the virtio RDMA device.
//!
//! The driver is the control path: it finds the device ([`device`]), talks to it through the
//! control queue ([`command`]), answers the verbs of the RDMA core ([`verbs`]), gives the device
//! lists of the pages that user space registered ([`pages`]), keeps the port in step with its
//! network interface ([`port`]), delivers events ([`events`]) and has connections of iWARP made
//! ([`connections`]). The data path of applications is not here: they share rings and doorbells
//! with the device. That of users in the kernel is ([`kverbs`]).
//!
//! Everything unsafe lives in [`sys`], what the kernel offers, and in [`callbacks`], what it calls;
//! the other modules forbid it. What the layouts and numbers
//! are, the crate `virtio_rdma_spec` says; what module and provider tell each other,
//! `virtio_rdma_driver_core::abi`.
#![no_std]
#![deny(unsafe_code, unsafe_op_in_unsafe_fn, missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod callbacks;
mod command;
mod connections;
mod device;
mod events;
mod kverbs;
mod pages;
mod port;
mod sys;
mod targets;
mod verbs;
