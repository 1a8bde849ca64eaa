// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where messages go, as their fabric found out: passive data that the send queue keeps for it.
use std::sync::Arc;

use super::tables::Gid;
use super::vm::Vm;

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
}
