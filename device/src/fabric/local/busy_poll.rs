// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Busy polling, as the local fabric needs it of the worker: after its poll, a queue pair waits for
//! a moment for more work, as long as nobody else has any. A sender of one message at a time is
//! answered sooner.
use std::sync::Arc;

use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::Budget;

/// What busy polling found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// A work request of its own.
    Own,
    /// One of the peer, which answers.
    Answer,
}

/// The worker, as a queue pair sees it that busy polls.
pub(crate) trait BusyPoll {
    /// The doorbell of one queue pair.
    type OwnDoorbell<'d>;

    /// Whether there is any time for it.
    fn may(&self) -> bool;

    /// Whether other doorbells than `own` ring.
    fn others_ring<const N: usize>(&self, own: [Option<&Self::OwnDoorbell<'_>>; N]) -> bool;

    /// Accounts for what was found and carried out.
    fn spend(&mut self, done: Budget);

    /// The doorbell of a queue pair of the VM of `tables`.
    fn doorbell<'d>(&self, tables: &'d Tables, qp: &'d Qp) -> Option<Self::OwnDoorbell<'d>>;

    /// Waits until `posted` finds something, for as long as nobody else has work. It asks `posted`
    /// all the time if `eager`; otherwise when one of `doorbells` rang, which it clears.
    fn wait<const N: usize>(
        &mut self,
        doorbells: [&Self::OwnDoorbell<'_>; N],
        eager: bool,
        posted: impl Fn() -> Option<Came>,
    ) -> Option<Came>;

    /// Leaves a queue pair of the VM of `tables` alone for so many looks at the doorbells of others.
    /// Returns whether none of them rang.
    fn pause(&self, tables: &Tables, qp: &Qp, looks: u32) -> bool;

    /// Has a queue pair polled next.
    fn next(&mut self, qp: &Arc<Qp>);
}
