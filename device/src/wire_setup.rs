// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Prepares an interface of the host for a device process that starts without privileges.
use std::io;
use std::path::Path;

use crate::fabric::wire::port::tap::{Tap, TapError};
use crate::sandbox::Identity;

/// Why an interface could not be prepared, or what was prepared not be taken back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such user.
    #[error("there is no user {0}")]
    Nobody(String),
    /// Neither a user was named nor that it is to be taken back.
    #[error("for which user? name it with --user")]
    NoUser,
    /// A step failed.
    #[error("cannot prepare {0}")]
    SetUp(String, #[source] TapError),
    /// A step back failed.
    #[error("cannot take back what was prepared for {0}")]
    Remove(String, #[source] TapError),
}

/// Joins a TAP of `user` to the interface of the host `netdev`, which stays until it is taken back:
/// a device process of that user finds and uses it. The programs that join them are pinned in the
/// directory `pins`, in a file system of type bpf.
///
/// # Errors
/// If there is no such user or interface, or the system refuses: it takes CAP_NET_ADMIN and CAP_BPF.
pub fn set_up(
    netdev: &str,
    user: Option<&str>,
    pins: &Path,
    out: &mut impl io::Write,
) -> Result<(), Error> {
    let user = user.ok_or(Error::NoUser)?;
    let owner = Identity::named(user).ok_or_else(|| Error::Nobody(user.to_owned()))?;
    let made = Tap::prepare(netdev, owner.uid(), pins);
    let name = made.map_err(|error| Error::SetUp(netdev.to_owned(), error))?;
    // Who does not read it is told by the status.
    let _ = writeln!(out, "{name} of user {user} is joined to {netdev}");
    Ok(())
}

/// Takes back what [`set_up`] did.
///
/// # Errors
/// If there is no such interface, or the system refuses.
pub fn remove(netdev: &str, pins: &Path) -> Result<(), Error> {
    let removed = Tap::take_back(netdev, pins);
    removed.map_err(|error| Error::Remove(netdev.to_owned(), error))
}
