// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs that were destroyed. A program may end with a message that comes; if the
//! acknowledgement of that is lost, its requester sends it again. For a while it is told then that it
//! was carried out, as TCP does in TIME-WAIT (RFC 9293, section 3.6).
use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::frame::Route;
use super::receiver::Completed;
use super::sender::Peer;
use crate::engine::vm::Segment;

/// For so long, nanoseconds: longer than requesters with the usual time-outs try.
const STAY: u64 = 10_000_000_000;
/// So many are kept of all VMs together, at most. They are in no VM's account.
const MOST: usize = 1024;

/// One that was destroyed.
#[derive(Debug)]
pub(super) struct Departed {
    pub segment: Segment,
    pub route: Route,
    pub peer: Peer,
    pub completed: Completed,
    /// When, nanoseconds.
    pub since: u64,
}

/// Those of a VM.
#[derive(Debug, Default)]
struct OfVm {
    /// By their numbers; one after the other may have had the same.
    all: FxHashMap<u32, Departed>,
    /// In the order in which they were destroyed, with when that was.
    order: VecDeque<(u32, u64)>,
}

impl OfVm {
    fn remove_first(&mut self) {
        let Some((first, since)) = self.order.pop_front() else {
            return;
        };
        if self.all.get(&first).is_some_and(|one| one.since == since) {
            self.all.remove(&first);
        }
    }

    fn remove_old(&mut self, now: u64) {
        let old = |(_, since): &(u32, u64)| now.saturating_sub(*since) >= STAY;
        while self.order.front().is_some_and(old) {
            self.remove_first();
        }
    }
}

/// Those of a while, of all VMs.
#[derive(Debug, Default)]
pub(super) struct DepartedList {
    /// By the serial numbers of the VMs.
    vms: FxHashMap<u64, OfVm>,
}

impl DepartedList {
    /// The queue pair of this VM with this number was destroyed. If there are too many, those of the VM
    /// that has most make room.
    pub(super) fn add(&mut self, vm: u64, number: u32, one: Departed) {
        let len = |of_vm: &OfVm| of_vm.order.len();
        if self.vms.values().map(len).sum::<usize>() >= MOST {
            for of_vm in self.vms.values_mut() {
                of_vm.remove_old(one.since);
            }
            if self.vms.values().map(len).sum::<usize>() >= MOST {
                let most = self.vms.values_mut().max_by_key(|of_vm| len(of_vm));
                most.into_iter().for_each(OfVm::remove_first);
            }
            self.vms.retain(|_, of_vm| len(of_vm) != 0);
        }
        let of_vm = self.vms.entry(vm).or_default();
        of_vm.remove_old(one.since);
        of_vm.order.push_back((number, one.since));
        of_vm.all.insert(number, one);
    }

    /// The one of this VM with this number, if it was destroyed not long before time `now`.
    pub(super) fn get(&self, vm: u64, number: u32, now: u64) -> Option<&Departed> {
        let one = self.vms.get(&vm)?.all.get(&number)?;
        (now.saturating_sub(one.since) < STAY).then_some(one)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::wire::frame::Addresses;
    use crate::fabric::wire::packet::{Psn, Service};
    use crate::fabric::wire::receiver::Receiver;
    use crate::footprint::Share;

    fn one(since: u64) -> Departed {
        let receiver = Receiver::new(Psn::new(0), 1, &mut Share::default()).unwrap();
        Departed {
            segment: Segment::Own(0),
            route: Route::new(Addresses::default(), [0, 1]),
            peer: Peer {
                service: Service::Rc,
                dest_qp: 1,
                mtu: 256,
            },
            completed: receiver.completed(),
            since,
        }
    }

    // D-WIRE-013.
    #[test]
    fn a_vm_pushes_out_its_own_alone() {
        let mut list = DepartedList::default();
        for number in 0..10 {
            list.add(1, number, one(0));
        }
        for number in 0..100_000 {
            list.add(2, number, one(1));
        }
        let kept = |list: &DepartedList, vm, numbers: std::ops::Range<u32>, now| {
            let there = |number: &u32| list.get(vm, *number, now).is_some();
            numbers.filter(there).count()
        };
        assert_eq!(kept(&list, 1, 0..10, STAY - 1), 10);
        assert_eq!(kept(&list, 2, 0..100_000, STAY), MOST - 10);
        assert_eq!(kept(&list, 2, 100_000 - 1014..100_000, STAY), MOST - 10);
        assert_eq!(kept(&list, 1, 0..10, STAY), 0);
        // What is too old makes room first, and a number may come again.
        list.add(2, 5, one(STAY));
        list.add(2, 5, one(STAY + 1));
        assert_eq!(list.vms.len(), 1);
        assert_eq!(kept(&list, 2, 0..6, 2 * STAY), 1);
    }
}
