// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way out of this process, as a worker has it: when it looks for frames, and which VMs they are
//! for.
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;

use crate::engine::message::is_multicast;
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::{Network, Vm};
use crate::engine::Budget;
use crate::fabric::registry::Registry;
use crate::fabric::wire::port::vxlan::{Tunnel, VxlanPort};
use crate::fabric::wire::{Recipients, Wire};

/// Frames that are taken in one poll iteration, at most.
const MOST_FRAMES: usize = 64;
/// For so long after a frame was sent or came, each poll iteration looks for more, nanoseconds;
const BUSY: u64 = 100_000;
/// after that, one each so many nanoseconds: a look is a system call.
const SELDOM: u64 = 20_000;

/// A worker's end of the wire.
#[derive(Debug)]
pub(super) struct WireEnd {
    wire: Wire<VxlanPort>,
    /// The networks of VMs with a way out, by what they are called on the wire.
    networks: Vec<(u32, Network)>,
    /// Nothing is looked for before this time.
    look_at: u64,
    /// Until then, each poll iteration looks.
    busy_until: u64,
    /// What was sent when it was looked for last.
    sent: Budget,
}

/// The VMs of this process that frames may be for.
struct Here<'a> {
    section: &'a ReadSection<'a>,
    registry: &'a Registry,
    networks: &'a [(u32, Network)],
}

impl Recipients for Here<'_> {
    fn visit(&self, vni: u32, gid: Gid, visit: &mut dyn FnMut(&Tables)) -> bool {
        let known = self.networks.iter().find(|(known, _)| *known == vni);
        let Some((_, network)) = known else {
            return true;
        };
        let visit = |vm: &Arc<Vm>| {
            let tables = vm.read_in(self.section);
            tables.map(&mut *visit).is_some()
        };
        if !is_multicast(&gid) {
            let owner = self.registry.owner(network, gid);
            return owner.as_ref().is_none_or(visit);
        }
        // It is lost for those of a group whose tables are being changed.
        let members = self.registry.members(network, gid);
        let mut vms: Vec<_> = members.iter().map(|member| &member.vm).collect();
        vms.sort_unstable_by_key(|vm| Arc::as_ptr(vm));
        vms.dedup_by_key(|vm| Arc::as_ptr(vm));
        vms.into_iter().map(visit).for_each(drop);
        true
    }
}

impl WireEnd {
    pub(super) fn new(tunnel: Arc<Tunnel>) -> Self {
        Self {
            wire: Wire::new(VxlanPort::new(tunnel)),
            networks: Vec::new(),
            look_at: 0,
            busy_until: 0,
            sent: Budget::NONE,
        }
    }

    /// Takes over changes of the list of VMs.
    pub(super) fn set_vms(&mut self, vms: &[Arc<Vm>]) {
        let of = |vm: &Arc<Vm>| Some((vm.uplink()?.vni, vm.network.clone()));
        self.networks = vms.iter().filter_map(of).collect();
        self.networks.sort_unstable();
        self.networks.dedup();
        // Perhaps a VM has gone, or was reset.
        self.wire.forget_destroyed();
    }

    /// The fabric.
    pub(super) fn fabric(&mut self) -> &mut Wire<VxlanPort> {
        &mut self.wire
    }

    /// Frames and bytes that were sent in all.
    pub(super) fn sent(&self) -> Budget {
        self.wire.sent()
    }

    /// The next poll iteration looks for frames.
    pub(super) fn look_soon(&mut self) {
        self.look_at = 0;
    }

    /// Takes frames that have come, if it is time to look for them. Returns whether there were any.
    pub(super) fn look(
        &mut self,
        now: u64,
        section: &ReadSection<'_>,
        registry: &Registry,
    ) -> bool {
        let sent = self.wire.sent();
        if sent.messages != self.sent.messages {
            self.sent = sent;
            self.busy_until = now.saturating_add(BUSY);
        } else if now < self.look_at {
            return false;
        }
        let here = Here {
            section,
            registry,
            networks: &self.networks,
        };
        let came = self.wire.receive(now, MOST_FRAMES, &here) != 0 || self.wire.is_waiting();
        if came {
            self.busy_until = now.saturating_add(BUSY);
        }
        self.look_at = if now < self.busy_until {
            0
        } else {
            now.saturating_add(SELDOM)
        };
        came
    }
}
