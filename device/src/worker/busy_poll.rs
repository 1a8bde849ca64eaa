// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Busy polling of the queue pair that was polled last, for a moment, as long as nobody else has
//! work.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::doorbell::DIRECT_SHIFT;

use super::doorbell::{Doorbell, OwnDoorbell};
use super::handle::Worker;
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::fabric::local::busy_poll::{BusyPoll, Came};

/// How often doorbells are busy polled before the clock and everything else get their poll
/// iteration.
pub(super) const POLLS: u32 = 100;
/// What a queue pair may carry out by busy polling, for one of [`BusyPoller::left`].
const BUSY_POLL: Budget = Budget {
    messages: 32,
    bytes: 4096,
};

/// Lets the last queue pair busy poll for more work: a sender of one message at a time is answered
/// sooner.
pub(crate) struct BusyPoller<'a> {
    pub(super) section: &'a ReadSection<'a>,
    pub(super) worker: &'a Worker,
    pub(super) generation: u64,
    /// All doorbells of this worker.
    pub(super) doorbells: &'a [(&'a Tables, Doorbell<'a>)],
    /// How often busy polling may still find work.
    pub(super) left: u32,
    /// The queue pair to put into the run queue afterwards.
    pub(super) next: Option<Arc<Qp>>,
}

impl<'a> BusyPoller<'a> {
    /// Lets nobody busy poll.
    pub(super) fn never(section: &'a ReadSection<'a>, worker: &'a Worker) -> Self {
        Self {
            section,
            worker,
            generation: 0,
            doorbells: &[],
            left: 0,
            next: None,
        }
    }
}

impl BusyPoll for BusyPoller<'_> {
    type OwnDoorbell<'d> = OwnDoorbell<'d>;

    #[inline(always)]
    fn may(&self) -> bool {
        self.left != 0
    }

    #[inline(always)]
    fn others_ring<const N: usize>(&self, own: [Option<&OwnDoorbell<'_>>; N]) -> bool {
        self.doorbells.iter().any(|(_, doorbell)| {
            let ours =
                |own: &OwnDoorbell<'_>| std::ptr::eq(own.root, doorbell.root).then_some(own.bit);
            let ours = own.into_iter().flatten().filter_map(ours);
            let ours = ours.fold(0, |bits, bit| bits | bit);
            doorbell.root.load(Ordering::Relaxed) & !ours != 0
        })
    }

    #[inline(always)]
    fn spend(&mut self, done: Budget) {
        let messages = done.messages / BUSY_POLL.messages;
        let times = 1 + u64::from(messages) + done.bytes / BUSY_POLL.bytes;
        let times = u32::try_from(times).unwrap_or(u32::MAX);
        self.left = self.left.saturating_sub(times);
    }

    #[inline(always)]
    fn doorbell<'d>(&self, tables: &'d Tables, qp: &'d Qp) -> Option<OwnDoorbell<'d>> {
        let context = tables.contexts.get(qp.context)?;
        let root = Doorbell::new(context, self.worker)?.root;
        let bit = qp.slot.checked_add(DIRECT_SHIFT)?;
        // A slot without a bit of its own in the root word cannot be told from others.
        let bit = 1u64.checked_shl(bit).unwrap_or(0).to_le();
        Some(OwnDoorbell { root, bit, qp })
    }

    #[inline(always)]
    fn wait<const N: usize>(
        &mut self,
        doorbells: [&OwnDoorbell<'_>; N],
        eager: bool,
        posted: impl Fn() -> Option<Came>,
    ) -> Option<Came> {
        if self.left == 0 {
            return None;
        }
        for _ in 0..POLLS {
            if self.section.is_awaited() || self.worker.is_wanted(self.generation) {
                return None;
            }
            let mut ask = eager;
            for doorbell in doorbells {
                if eager {
                    // The bit stays set: a driver that sees it need not ring again, and leaves this
                    // core its cache line.
                    if doorbell.rings_for_receives() {
                        return None;
                    }
                } else {
                    // What was posted before the ring is looked for after the bit is cleared.
                    ask |= doorbell.clear()?;
                }
            }
            if ask {
                if let Some(came) = posted() {
                    return Some(came);
                }
            }
            let others = if eager {
                self.others_ring(doorbells.map(Some))
            } else {
                self.doorbells.iter().any(|(_, doorbell)| doorbell.rings())
            };
            if others {
                return None;
            }
        }
        None
    }

    #[inline(always)]
    fn pause(&self, tables: &Tables, qp: &Qp, looks: u32) -> bool {
        let own = self.doorbell(tables, qp);
        let rings = (0..looks).any(|_| self.others_ring([own.as_ref()]));
        !rings && !self.section.is_awaited() && !self.worker.is_wanted(self.generation)
    }

    fn next(&mut self, qp: &Arc<Qp>) {
        self.next = Some(qp.clone());
    }
}
