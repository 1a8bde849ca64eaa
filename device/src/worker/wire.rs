// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way out of this process, as a worker has it: when it looks for frames, and which VMs they are
//! for.
use std::collections::HashMap;
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;

use super::pace::Pace;
use super::scheduler::QpQueue;
use crate::engine::message::is_multicast;
use crate::engine::tables::Tables;
use crate::engine::vm::{Network, Segment, Vm};
use crate::engine::Budget;
use crate::fabric::registry::{by_vm, Registry};
use crate::fabric::wire::egress::View;
use crate::fabric::wire::layer::faults::Faults;
use crate::fabric::wire::port::uplinks::UplinkPort;
use crate::fabric::wire::recipients::{Arriving, Destination, Recipients};
use crate::fabric::wire::Wire;

/// Frames that are taken in one poll iteration, about: those that came at once are taken together.
const MOST_FRAMES: usize = 64;
/// While queue pairs wait for their turn, what was sent may wait so long for more, nanoseconds.
const MOST_WAIT: u64 = 20_000;

/// A worker's end of the wire.
#[derive(Debug)]
pub(super) struct WireEnd {
    wire: Wire<Faults<UplinkPort>>,
    /// The networks of VMs with a way out, by what they are called on the wire.
    networks: Vec<(Segment, Network)>,
    owners: Owners,
    generation: u64,
    pace: Pace,
    /// What was sent leaves at this time at the latest.
    flush_at: u64,
    /// What was sent when it was looked for last.
    sent: Budget,
}

/// Which VM has which GID, as far as that was asked since the registry changed last.
#[derive(Debug, Default)]
struct Owners {
    /// Frames come in bursts: most have the destination of the one before.
    last: Option<(Destination, Arc<Vm>)>,
    all: HashMap<Destination, Arc<Vm>>,
}

impl Owners {
    fn get(&mut self, to: Destination) -> Option<&Arc<Vm>> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != to) {
            self.last = Some((to, self.all.get(&to)?.clone()));
        }
        self.last.as_ref().map(|(_, vm)| vm)
    }

    fn insert(&mut self, to: Destination, vm: Arc<Vm>) {
        self.all.insert(to, vm);
    }

    fn clear(&mut self) {
        self.last = None;
        self.all.clear();
    }
}

/// The VMs of this process that frames may be for.
struct Here<'a> {
    section: &'a ReadSection<'a>,
    registry: &'a Registry,
    networks: &'a [(Segment, Network)],
    owners: &'a mut Owners,
    queue: &'a mut QpQueue,
    worker: u16,
}

/// Whether a VM has its frames on this segment.
fn is_on(vm: &Vm, segment: Segment) -> bool {
    vm.uplink().is_some_and(|uplink| uplink.segment == segment)
}

impl Here<'_> {
    /// The network that is on a segment.
    fn network(&self, segment: Segment) -> Option<&Network> {
        let mut networks = self.networks.iter();
        networks.find_map(|(known, network)| (*known == segment).then_some(network))
    }
}

/// Visits a VM, for which a frame of so many bytes has come. Returns false if it is busy.
fn visit_one(
    section: &ReadSection<'_>,
    queue: &mut QpQueue,
    worker: u16,
    vm: &Vm,
    bytes: usize,
    visit: &mut dyn FnMut(&Tables),
) -> bool {
    let Some(tables) = vm.read_in(section) else {
        return false;
    };
    visit(tables);
    queue.charge_frame(vm, worker, bytes as u64);
    true
}

impl Recipients for Here<'_> {
    fn visit(&mut self, to: Destination, frame: Arriving, visit: &mut dyn FnMut(&Tables)) -> bool {
        let Arriving {
            bytes,
            source,
            can_wait,
        } = frame;
        if is_multicast(&to.gid) {
            let network = self.network(to.segment);
            let members = network.map(|network| self.registry.members(network, to.gid));
            // What a VM of this process sent, those whom it meets here have had.
            let sender = network.and_then(|network| self.registry.owner(network, source));
            let had = |vm: &Vm| sender.as_ref().is_some_and(|sender| sender.meets(vm));
            let vms = || {
                let vms = members.iter().flat_map(|members| by_vm(members));
                let vms = vms.filter_map(|members| Some(&members.first()?.vm));
                vms.filter(|vm| is_on(vm, to.segment) && !had(vm))
            };
            if can_wait && vms().any(|vm| vm.read_in(self.section).is_none()) {
                return false;
            }
            // When it can wait no longer, it is lost for those that are busy still.
            let mut all = true;
            for vm in vms() {
                all &= visit_one(self.section, self.queue, self.worker, vm, bytes, visit);
            }
            return all;
        }
        if self.owners.get(to).is_none() {
            let network = self.network(to.segment);
            let owner = network.and_then(|network| self.registry.owner(network, to.gid));
            let Some(vm) = owner.filter(|vm| is_on(vm, to.segment)) else {
                return true;
            };
            self.owners.insert(to, vm);
        }
        let Self {
            owners,
            section,
            queue,
            worker,
            ..
        } = self;
        let vm = owners.get(to);
        vm.is_none_or(|vm| visit_one(section, queue, *worker, vm, bytes, visit))
    }

    fn visit_vm(&mut self, vm: &Vm, visit: &mut dyn FnMut(&Tables)) -> bool {
        visit_one(self.section, self.queue, self.worker, vm, 0, visit)
    }
}

impl WireEnd {
    pub(super) fn new(port: UplinkPort, view: Arc<View>, worker: u16) -> Self {
        Self {
            wire: Wire::new(Faults::new(port, view.faults.clone()), view, worker),
            networks: Vec::new(),
            owners: Owners::default(),
            generation: 0,
            pace: Pace::default(),
            flush_at: 0,
            sent: Budget::NONE,
        }
    }

    /// Takes over changes of the list of VMs.
    pub(super) fn set_vms(&mut self, vms: &[Arc<Vm>]) {
        let of = |vm: &Arc<Vm>| Some((vm.uplink()?.segment, vm.network.clone()));
        self.networks = vms.iter().filter_map(of).collect();
        self.networks.sort_unstable();
        self.networks.dedup();
        // Perhaps a VM has gone, or was reset.
        self.owners.clear();
        self.wire.forget_destroyed();
    }

    /// The fabric.
    pub(super) fn fabric(&mut self) -> &mut Wire<Faults<UplinkPort>> {
        &mut self.wire
    }

    /// Frames and bytes that were sent in all.
    pub(super) fn sent(&self) -> Budget {
        self.wire.sent()
    }

    /// When a frame goes on that faults hold back, nanoseconds.
    pub(super) fn timer(&self) -> Option<u64> {
        self.wire.timer()
    }

    /// The next poll iteration looks for frames.
    pub(super) fn look_soon(&mut self) {
        self.pace.soon();
    }

    /// What was sent leaves now.
    #[inline(always)]
    pub(super) fn flush(&mut self) {
        self.wire.flush_frames();
    }

    /// Lets leave what was sent. Returns whether it is time to look for frames. While nothing goes over the
    /// wire, this is all that a poll iteration does for it.
    #[inline(always)]
    pub(super) fn is_due(&mut self, now: u64, queue: &QpQueue) -> bool {
        // More may come from the run queue that can leave with what waits.
        if queue.is_empty() || now >= self.flush_at {
            self.flush();
            self.flush_at = now.saturating_add(MOST_WAIT);
        }
        self.wire.sent().messages != self.sent.messages || self.pace.is_due(now)
    }

    /// Takes frames that have come. Returns whether there were any.
    pub(super) fn look(
        &mut self,
        now: u64,
        section: &ReadSection<'_>,
        registry: &Registry,
        queue: &mut QpQueue,
        worker: u16,
    ) -> bool {
        let sent = self.wire.sent();
        if sent.messages != self.sent.messages {
            self.sent = sent;
            self.pace.busy(now);
        }
        let generation = registry.generation();
        if generation != self.generation {
            self.generation = generation;
            self.owners.clear();
        }
        let mut here = Here {
            section,
            registry,
            networks: &self.networks,
            owners: &mut self.owners,
            queue,
            worker,
        };
        let came = self.wire.receive(now, MOST_FRAMES, &mut here) != 0 || self.wire.is_waiting();
        if came {
            self.pace.busy(now);
        }
        self.pace.looked(now);
        if let Some(timer) = self.wire.timer() {
            self.pace.look_by(timer);
        }
        came
    }
}
