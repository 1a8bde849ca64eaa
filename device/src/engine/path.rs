// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where messages go, as their fabric found out: passive data that the send queue keeps for it.
use std::sync::Arc;

use super::tables::Gid;
use super::vm::Vm;
use crate::footprint::{listed, Footprint, Share};

/// A send queue's way to its peer, remembered until some port changes.
#[derive(Debug, Default)]
pub struct Path {
    /// The VM, if there is one, with the generation of the registry and the GID that it was looked
    /// up for.
    pub(crate) found: Option<(u64, Gid, Option<Arc<Vm>>)>,
}

impl Path {
    /// The VM that it leads to, if it leads to one of this process.
    #[inline(always)]
    pub(crate) fn vm(&self) -> Option<&Arc<Vm>> {
        self.found.as_ref()?.2.as_ref()
    }
}

/// A queue pair in a multicast group.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub vm: Arc<Vm>,
    pub qpn: u32,
}

/// The queue pairs of a multicast group. A message goes to those that were in it when it began,
/// however long that takes.
pub(crate) type Members = Arc<Vec<Member>>;

/// A datagram on its way to the queue pairs of a multicast group, one after the other.
#[derive(Debug)]
pub(crate) struct Fanout {
    pub members: Members,
    /// How many of them are done.
    pub done: usize,
    /// For `members`: the group may have others by now, and nobody else keeps these.
    _share: Share,
}

impl Fanout {
    /// A datagram to these, in the account of its sender. None if that has no room.
    pub(crate) fn begin(members: Members, account: &Footprint) -> Option<Self> {
        let share = account.share(listed::<Member>(members.len()));
        share.ok().map(|share| Self {
            members,
            done: 0,
            _share: share,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_to_a_group_is_in_the_account_while_it_is_under_way() {
        let account = Footprint::new(listed::<Member>(0));
        let fanout = Fanout::begin(Members::default(), &account).unwrap();
        assert!(Fanout::begin(Members::default(), &account).is_none());
        drop(fanout);
        assert!(Fanout::begin(Members::default(), &account).is_some());
        assert_eq!(account.bytes(), 0);
    }
}
