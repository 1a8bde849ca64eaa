// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The user that the process runs as.
use std::fmt;

use nix::unistd::{geteuid, setgroups, setresgid, setresuid, Gid, Uid, User};
use rustix::thread::{capabilities, CapabilitySet};

/// The user that a process becomes which is root and is told nothing else, if there is one of this
/// name.
const OWN_USER: &str = "vhost-device-rdma";
/// And if there is none: the kernel's user and group for what belongs to nobody.
const NOBODY: Identity = Identity {
    uid: 65534,
    gid: 65534,
};

/// A user, with one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    uid: u32,
    gid: u32,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in group {}", self.uid, self.gid)
    }
}

impl Identity {
    /// The user of this name or number, with its first group. A number need not be known: then the
    /// group has the same.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let number = name.parse().ok();
        let known = match number {
            Some(number) => User::from_uid(Uid::from_raw(number)),
            None => User::from_name(name),
        };
        let known = known.ok().flatten().map(|user| Self {
            uid: user.uid.as_raw(),
            gid: user.gid.as_raw(),
        });
        known.or_else(|| number.map(|id| Self { uid: id, gid: id }))
    }

    /// The user's number.
    #[must_use]
    pub fn uid(self) -> u32 {
        self.uid
    }

    /// Becomes this user, for good, with its one group.
    pub(super) fn assume(self) -> Result<(), nix::Error> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        if !may_change() && geteuid() == uid {
            // It is this user already, and has the groups that it was given.
            return setresuid(uid, uid, uid);
        }
        setgroups(&[])?;
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)
    }
}

/// Whether the process may change its users and groups.
fn may_change() -> bool {
    let wanted = CapabilitySet::SETUID | CapabilitySet::SETGID;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted))
}

/// A process that is root becomes a user without privileges, if it can. In a container it may be
/// unable to; capabilities it gives up in any case.
pub(super) fn leave_root() {
    if !geteuid().is_root() {
        return;
    }
    let user = Identity::named(OWN_USER).unwrap_or(NOBODY);
    match user.assume() {
        Ok(()) => log::info!("runs as user {user} from here on"),
        Err(error) => {
            log::warn!("cannot become user {user}, and stays root, without capabilities: {error}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_and_numbers() {
        let root = Identity { uid: 0, gid: 0 };
        assert_eq!(Identity::named("root"), Some(root));
        assert_eq!(Identity::named("0"), Some(root));
        let unknown = 3_999_999_999;
        let own = Identity {
            uid: unknown,
            gid: unknown,
        };
        assert_eq!(Identity::named("3999999999"), Some(own));
        assert_eq!(Identity::named("no such user"), None);
        assert_eq!(Identity::named("-1"), None);
    }
}
