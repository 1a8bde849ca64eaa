// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The local fabric: both queue pairs are in this process. There are no packets: the requester
//! calls the responder of its peer, payload is copied once, and the answer is there at once.
pub(crate) mod busy_poll;
mod fast_path;
pub(crate) mod lookup_cache;
mod peer;
mod reliable;
mod requester;
#[cfg(test)]
pub(super) mod tests;

use std::ops::RangeInclusive;
use std::sync::Arc;

use virtio_rdma_spec::verbs::{mtu, qp_type};

use self::busy_poll::BusyPoll;
use self::lookup_cache::LookupCache;
use super::registry::Registry;
use super::{Carrier, Elsewhere, Fabric, Observe, Port};
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::engine::Budget;
use crate::verbs::numbers::NUMBERS;

/// The local fabric, as it answers for ports: a VM that has a GID of the network is reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Local<'r> {
    /// Who has which GID.
    pub registry: &'r Registry,
}

impl Fabric for Local<'_> {
    fn port(&self, vm: &Vm) -> Port {
        Port {
            up: vm.port_is_up(),
            max_mtu: mtu::MTU_4096,
            active_mtu: vm.active_mtu(),
        }
    }

    fn set_link(&self, _: &Vm, _: bool) {
        // The VM itself knows whether its port is up. Routes that were found before are looked up
        // again.
        self.registry.changed();
    }

    fn qp_numbers(&self) -> RangeInclusive<u32> {
        NUMBERS
    }
}

/// What a worker lends the local fabric for one poll.
pub(crate) struct LocalCarrier<'p, 'a, B> {
    /// What was looked up for queue pairs of the same poll iteration.
    pub cache: &'p mut LookupCache<'a>,
    /// Busy polling, which it may do when there is nothing more to do.
    pub busy_poll: &'p mut B,
    /// What it did in this poll.
    pub done: Budget,
    /// What takes the datagrams that leave this process, if they may.
    pub elsewhere: Option<&'p mut dyn Elsewhere>,
    /// What sees all messages, if they are to be seen.
    pub observer: Option<&'p mut dyn Observe>,
}

impl<'a, B: BusyPoll> Carrier<'a> for LocalCarrier<'_, 'a, B> {
    #[inline(always)]
    fn send(
        &mut self,
        sq: &mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        budget: Budget,
    ) -> Polled {
        requester::poll(self, sq, tables, qp, now, budget)
    }

    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>, _: u64) {
        // Of others nothing is ever under way: a message is either in the send queue or has its answer.
        reliable::flush(sq, tables, qp);
        if let Some(elsewhere) = self.elsewhere.as_deref_mut() {
            if sq.under_way() != 0 && qp.qp_type == qp_type::SRD {
                elsewhere.flush_reliable_datagrams(sq, tables, qp);
            }
        }
    }
}
