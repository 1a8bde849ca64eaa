// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Layouts and constants of the virtio RDMA device.
//!
//! This crate and the text beside it (`virtio-rdma.md`) are one specification in two forms; a test
//! proves that they agree. Device, kernel module, provider and tests take every offset, size,
//! opcode and limit from here.
//!
//! All integers are little-endian. Conversions go through byte arrays ([`layout::Layout`]), so
//! there is no unsafe code, no padding, and no representation that cannot be read.
#![no_std]
#![forbid(unsafe_code)]

pub mod command;
pub mod config;
pub mod doorbell;
pub mod event;
pub mod facts;
pub mod iwarp;
pub mod layout;
pub mod ring;
pub mod verbs;

/// Virtio device id.
pub const DEVICE_ID: u32 = 42;

/// Size of the pages in which rings, page lists and doorbell memory are handed to the device,
/// bytes.
pub const PAGE_SIZE: u64 = 4096;
