// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fuzz targets of the device.
//!
//! A target is a function that takes bytes, makes of them what a hostile guest or front end may do,
//! does that to a device in this process, and panics if the device or a neighbour takes harm. The
//! program `fuzz` runs one under libFuzzer (`cargo xtask fuzz`); `tests/corpora.rs` replays the
//! committed inputs of all targets.
#![forbid(unsafe_code)]

pub mod commands;
pub mod entries;
pub mod host;
pub mod memory;
pub mod model;
pub mod neighbour;
pub mod packets;
pub mod queues;
pub mod rings;
pub mod scene;
pub mod stream;
pub mod vfio_user;
pub mod vhost_user;

/// A target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, and that of the folder with its corpus.
    pub name: &'static str,
    /// Runs it on one input.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "commands",
        run: commands::run,
    },
    Target {
        name: "entries",
        run: entries::run,
    },
    Target {
        name: "model",
        run: model::run,
    },
    Target {
        name: "memory",
        run: memory::run,
    },
    Target {
        name: "packets",
        run: packets::run,
    },
    Target {
        name: "rings",
        run: rings::run,
    },
    Target {
        name: "stream",
        run: stream::run,
    },
    Target {
        name: "vfio_user",
        run: vfio_user::run,
    },
    Target {
        name: "vhost_user",
        run: vhost_user::run,
    },
];

/// The target with this name.
#[must_use]
pub fn find(name: &str) -> Option<Target> {
    TARGETS.iter().find(|target| target.name == name).copied()
}
