// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The benchmark: how fast the device is, beside what it competes with, measured in the same run.
//!
//! What is measured becomes [`Figure`]s. Each part of the benchmark leaves its figures in a file of
//! the same format ([`Measurements`]): the native part ([`native`]) in `bench-native.json`, the
//! part between VMs in `bench-vm.json`, over the wire in `bench-wire.json`, with Soft-RoCE at the other end
//! in `bench-rxe.json`, and by vfio-user beside vhost-user in `bench-front-ends.json`, all in `target/reports/`. The report ([`report`]) is made
//! of what is there of these.
//!
//! Without the feature `run` there is only the format.
#![deny(unsafe_code)]

pub mod figure;
#[cfg(feature = "run")]
pub mod machine;
#[cfg(feature = "run")]
pub mod native;
#[cfg(feature = "run")]
pub mod plots;
#[cfg(feature = "run")]
pub mod report;

pub use figure::{Better, Figure, Measurements, Part, Peer, Target};
