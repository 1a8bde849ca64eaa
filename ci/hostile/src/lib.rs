// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hostile guests and front ends: each [`Attack`] connects to a socket of a device process as a
//! front end does, plays a guest that wants to harm the process or its neighbours, checks that it
//! is refused as it should be, and goes.
//!
//! The lane `hostile` lets each attack run beside VMs with traffic, and `cargo xtask soak` draws
//! from all of them.

mod frontend;
mod guest;
mod neighbour;
pub mod objects;
mod random;
mod traffic;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure, Context as _, Result};
use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::verbs::wc_status;
use vhost_device_rdma_bare::{Error, Vm, VmOptions};

pub use random::Random;
pub use traffic::{Pair, Side, SideOptions, ACCESS};

/// How long the device may take for anything on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// One attack.
#[derive(Clone, Copy)]
pub struct Attack {
    /// A name, unique among all.
    pub name: &'static str,
    /// One round of it, of a second at most where the machine is not busy. An error: the attacker
    /// was not refused, or has found that the device does not serve it any longer.
    pub round: fn(&mut Attacker) -> Result<()>,
}

impl std::fmt::Debug for Attack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All attacks.
pub const ALL: &[&[Attack]] = &[frontend::ALL, guest::ALL, neighbour::ALL];

/// The attack of that name.
///
/// # Errors
/// If there is none.
pub fn find(name: &str) -> Result<Attack> {
    let mut all = ALL.iter().copied().flatten();
    let found = all.find(|attack| attack.name == name);
    found.copied().with_context(|| format!("no attack {name}"))
}

/// What an attacker knows of a VM that is not its own: more than it could learn.
#[derive(Clone, Debug, Default)]
pub struct Victim {
    /// Its GIDs.
    pub gids: Vec<[u8; 16]>,
    /// Numbers of its queue pairs.
    pub qpns: Vec<u32>,
    /// Keys of its memory regions, and their first addresses.
    pub regions: Vec<(u32, u64)>,
}

/// Who attacks.
#[derive(Debug)]
pub struct Attacker {
    /// The socket that it may connect to.
    pub socket: PathBuf,
    /// The others of the same process.
    pub victims: Vec<Victim>,
    /// What its choices are drawn from.
    pub random: Random,
}

impl Attacker {
    /// Connects as a VM with all features.
    fn vm(&self) -> Result<Arc<Vm>> {
        self.vm_with(VmOptions::default())
    }

    /// The same, with other options.
    fn vm_with(&self, options: VmOptions) -> Result<Arc<Vm>> {
        // But iWARP, with which there are fewer.
        let all =
            feature::ALL.iter().fold(0, |all, (_, bit)| all | 1 << bit) & !(1 << feature::IWARP);
        let options = VmOptions {
            features: all,
            timeout: TIMEOUT,
            ..options
        };
        Vm::connect(&self.socket, options).context("the device does not take the attacker")
    }
}

/// The device refused, with one of these statuses.
fn refused<T>(what: &str, result: Result<T, Error>, statuses: &[u16]) -> Result<()> {
    let error = match result {
        Ok(_) => bail!("{what}: the device accepted"),
        Err(error) => error,
    };
    let name = |status: u16| status::name(status).unwrap_or("?");
    match error.status() {
        Some(status) if statuses.contains(&status) => Ok(()),
        Some(status) => bail!("{what}: refused with {}", name(status)),
        None => Err(error).with_context(|| what.to_owned()),
    }
}

/// A completion has one of these statuses.
fn completed(what: &str, got: u8, statuses: &[u8]) -> Result<()> {
    let name = wc_status::name(got).unwrap_or("?");
    ensure!(statuses.contains(&got), "{what}: completed with {name}");
    Ok(())
}
