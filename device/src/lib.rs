// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user RDMA NIC for virtual machines.
//!
//! The way of a work request: [`worker`] sees the doorbell, [`engine::requester`] reads the entry,
//! [`fabric::local`] finds the peer, [`engine::responder`] places the data, [`verbs::cq`] takes the
//! completion.
#![deny(unsafe_code)]

pub mod config;
pub mod control;
pub mod engine;
pub mod fabric;
#[allow(unsafe_code)]
pub mod heap;
#[allow(unsafe_code)]
pub mod memory;
pub mod rnic;
pub mod status;
pub mod verbs;
pub mod vhost_user;
pub mod worker;
