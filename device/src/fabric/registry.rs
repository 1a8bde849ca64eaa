// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which VM of this process has which GID, which GIDs are kept for which device, and which queue
//! pairs are in which multicast group.
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::engine::binding::{Binding, Peers};
use crate::engine::path::{Member, Members, Path};
use crate::engine::tables::Gid;
use crate::engine::vm::{Link, Network, Vm};

/// A GID that a VM has, or had.
#[derive(Debug)]
struct Owned {
    /// The VM that has it.
    vm: Option<Arc<Vm>>,
    /// The device that it is, or was, a GID of: the link is the same for all VMs that attach to it
    /// one after the other.
    device: Arc<Link>,
    /// Queue pairs of other VMs that were connected to it while a VM had it, and are. As long as
    /// there are any, no VM of another device gets it.
    named: usize,
}

/// Who has which GID, per network.
#[derive(Debug, Default)]
pub struct Registry {
    owners: RwLock<HashMap<(Network, Gid), Owned>>,
    /// Changes whenever a VM gets or loses a GID.
    generation: AtomicU64,
    groups: RwLock<HashMap<(Network, Gid), Members>>,
    /// The own GIDs of all devices, and how many devices have each.
    reserved: RwLock<HashMap<(Network, Gid), usize>>,
}

impl Registry {
    /// A GID is an own one of a device of this network from now on. A VM that has it keeps it.
    pub fn reserve(&self, network: &Network, gid: Gid) {
        let mut reserved = self
            .reserved
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *reserved.entry((network.clone(), gid)).or_default() += 1;
    }

    /// A GID is none of a device that is no longer there.
    pub fn unreserve(&self, network: &Network, gid: Gid) {
        let mut reserved = self
            .reserved
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut of) = reserved.entry((network.clone(), gid)) {
            *of.get_mut() -= 1;
            if *of.get() == 0 {
                of.remove();
            }
        }
    }

    /// Whether a GID is an own one of a device of this network, whether or not its VM is attached.
    pub fn is_reserved(&self, network: &Network, gid: Gid) -> bool {
        let reserved = self.reserved.read().unwrap_or_else(PoisonError::into_inner);
        reserved.contains_key(&(network.clone(), gid))
    }

    /// Gives a GID to a VM. Returns false if another has it already, or if it is kept for another
    /// device: the first keeps it.
    pub fn claim(&self, gid: Gid, vm: &Arc<Vm>) -> bool {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let owned = match owners.entry((vm.network.clone(), gid)) {
            Entry::Occupied(owned) => owned.into_mut(),
            Entry::Vacant(free) => free.insert(Owned {
                vm: None,
                device: vm.link().clone(),
                named: 0,
            }),
        };
        if let Some(owner) = &owned.vm {
            return Arc::ptr_eq(owner, vm);
        }
        if !Arc::ptr_eq(&owned.device, vm.link()) {
            return false;
        }
        owned.vm = Some(vm.clone());
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes a GID from a VM. It is kept for the VM's device while queue pairs name it.
    pub fn release(&self, gid: Gid, vm: &Arc<Vm>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let key = (vm.network.clone(), gid);
        let Some(owned) = owners.get_mut(&key) else {
            return;
        };
        if !owned
            .vm
            .as_ref()
            .is_some_and(|owner| Arc::ptr_eq(owner, vm))
        {
            return;
        }
        owned.vm = None;
        if owned.named == 0 {
            owners.remove(&key);
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Attaches a queue pair to a multicast group that it is not in yet.
    pub fn join(&self, gid: Gid, vm: &Arc<Vm>, qpn: u32) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let members = groups.entry((vm.network.clone(), gid)).or_default();
        // Those of a VM are together.
        let place = |member: &Member| Arc::as_ptr(&member.vm) <= Arc::as_ptr(vm);
        let members = Arc::make_mut(members);
        let at = members.partition_point(place);
        let vm = vm.clone();
        members.insert(at, Member { vm, qpn });
    }

    /// Detaches a queue pair of a VM from a multicast group, or all that it has in it.
    pub fn leave(&self, gid: Gid, vm: &Arc<Vm>, qpn: Option<u32>) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let key = (vm.network.clone(), gid);
        let Some(members) = groups.get_mut(&key) else {
            return;
        };
        let leaves = |member: &Member| {
            qpn.is_none_or(|qpn| qpn == member.qpn) && Arc::ptr_eq(&member.vm, vm)
        };
        Arc::make_mut(members).retain(|member| !leaves(member));
        if members.is_empty() {
            groups.remove(&key);
        }
    }

    /// The queue pairs of a multicast group.
    pub(crate) fn members(&self, network: &Network, gid: Gid) -> Members {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups
            .get(&(network.clone(), gid))
            .cloned()
            .unwrap_or_default()
    }

    /// The VM that has a GID.
    pub(crate) fn owner(&self, network: &Network, gid: Gid) -> Option<Arc<Vm>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(&(network.clone(), gid))?.vm.clone()
    }

    /// A port went down or came up: routes that were found before are not followed any longer.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// A worker whose read section begins after a writer has waited for the readers must see what
    /// the writer changed before: so the order is sequential, as that of entering and waiting is.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Looks a path up again if it may have changed.
    #[inline]
    pub(super) fn refresh(&self, path: &mut Path, from: &Vm, gid: Gid) {
        let generation = self.generation();
        match &path.found {
            Some((known, known_gid, _)) if *known == generation && *known_gid == gid => {}
            _ => self.find(path, from, gid, generation),
        }
    }

    #[cold]
    fn find(&self, path: &mut Path, from: &Vm, gid: Gid, generation: u64) {
        let peer = self
            .owner(&from.network, gid)
            .filter(|peer| from.port_is_up() && peer.port_is_up() && from.meets(peer));
        path.found = Some((generation, gid, peer));
    }

    /// Whether a path leads to a peer, and led to nobody when it was looked up last.
    pub(super) fn appears(&self, path: &mut Path, from: &Vm, gid: Gid) -> bool {
        if path.vm().is_some() {
            return false;
        }
        self.refresh(path, from, gid);
        path.vm().is_some()
    }
}

/// The members of a group, those of each VM together.
pub(crate) fn by_vm(members: &[Member]) -> impl Iterator<Item = &[Member]> {
    members.chunk_by(|one, next| Arc::ptr_eq(&one.vm, &next.vm))
}

impl Peers for Registry {
    fn connect(&self, vm: &Vm, gid: Gid) -> (Binding, bool) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let owned = owners.get_mut(&(vm.network.clone(), gid));
        // A GID that nobody has is not kept for longer because of this one.
        let Some((owner, named)) =
            owned.and_then(|owned| Some((owned.vm.as_ref()?, &mut owned.named)))
        else {
            return (Binding::default(), false);
        };
        if !vm.meets(owner) {
            return (Binding::default(), false);
        }
        let other = !std::ptr::eq(&**owner, vm);
        *named += usize::from(other);
        (Binding::to(owner), other)
    }

    fn forget(&self, vm: &Vm, gid: Gid) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let key = (vm.network.clone(), gid);
        let Some(owned) = owners.get_mut(&key) else {
            return;
        };
        owned.named = owned.named.saturating_sub(1);
        if owned.named == 0 && owned.vm.is_none() {
            owners.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vhost_device_rdma_sync::Readers;

    use super::*;
    use crate::engine::fixture::Warnings;
    use crate::engine::vm::VmSettings;
    use crate::limits::Limits;
    use crate::verbs::numbers::NUMBERS;

    const GIDS: [Gid; 2] = [[7; 16], [8; 16]];
    /// The device of each VM.
    const DEVICES: [usize; 4] = [0, 0, 1, 2];

    /// What happens to a VM or a connection, and a GID.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Claim(usize, usize),
        Release(usize, usize),
        Connect(usize, usize),
        Forget(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let (vm, gid) = (0..DEVICES.len(), 0..GIDS.len());
        let step = prop_oneof![
            (vm.clone(), gid.clone()).prop_map(|(vm, gid)| Step::Claim(vm, gid)),
            (vm.clone(), gid.clone()).prop_map(|(vm, gid)| Step::Release(vm, gid)),
            (vm, gid).prop_map(|(vm, gid)| Step::Connect(vm, gid)),
            any::<usize>().prop_map(Step::Forget),
        ];
        prop::collection::vec(step, 0..100)
    }

    #[test]
    fn a_gid_is_reserved_as_long_as_a_device_has_it() {
        let registry = Registry::default();
        let (network, other): (Network, Network) = ("a".into(), "b".into());
        let [gid, _] = GIDS;
        registry.unreserve(&network, gid);
        assert!(!registry.is_reserved(&network, gid));
        registry.reserve(&network, gid);
        registry.reserve(&network, gid);
        assert!(registry.is_reserved(&network, gid));
        assert!(!registry.is_reserved(&other, gid));
        registry.unreserve(&network, gid);
        assert!(registry.is_reserved(&network, gid));
        registry.unreserve(&network, gid);
        assert!(!registry.is_reserved(&network, gid));
    }

    fn vms() -> Vec<Arc<Vm>> {
        let (readers, _) = Readers::new(1);
        let links: [Arc<Link>; 3] = Default::default();
        let vm = |device: &usize| {
            let settings = VmSettings {
                network: "default".into(),
                limits: Limits::default(),
                qp_numbers: NUMBERS,
                qp_order: Arc::default(),
                link: links[*device].clone(),
                share: Arc::default(),
                uplink: None,
                workers: Vec::new(),
                warnings: Box::new(Warnings::default()),
            };
            Vm::new(readers.clone(), settings)
        };
        DEVICES.iter().map(vm).collect()
    }

    proptest! {
        // D-GID-003.
        #[test]
        fn a_gid_has_one_vm_and_goes_to_no_other_device_while_it_is_named(steps in steps()) {
            let (registry, vms) = (Registry::default(), vms());
            // Of each GID: the VM that has it, the device that had it last.
            let mut having = [None; GIDS.len()];
            let mut last = [0; GIDS.len()];
            let mut connections: Vec<(usize, usize)> = Vec::new();
            for step in steps {
                match step {
                    Step::Claim(vm, gid) => {
                        let named = connections.iter().any(|(_, named)| *named == gid);
                        let may = match having[gid] {
                            Some(owner) => owner == vm,
                            None => !named || last[gid] == DEVICES[vm],
                        };
                        prop_assert_eq!(registry.claim(GIDS[gid], &vms[vm]), may);
                        if may {
                            (having[gid], last[gid]) = (Some(vm), DEVICES[vm]);
                        }
                    }
                    Step::Release(vm, gid) => {
                        registry.release(GIDS[gid], &vms[vm]);
                        having[gid] = having[gid].filter(|owner| *owner != vm);
                    }
                    Step::Connect(vm, gid) => {
                        let (binding, kept) = registry.connect(&vms[vm], GIDS[gid]);
                        let bound = having[gid].is_some();
                        prop_assert_eq!(binding != Binding::default(), bound);
                        prop_assert_eq!(kept, bound && having[gid] != Some(vm));
                        if kept {
                            connections.push((vm, gid));
                        }
                    }
                    Step::Forget(which) if !connections.is_empty() => {
                        let (vm, gid) = connections.swap_remove(which % connections.len());
                        registry.forget(&vms[vm], GIDS[gid]);
                    }
                    Step::Forget(_) => {}
                }
                for (gid, owner) in GIDS.iter().zip(having) {
                    let there = registry.owner(&vms[0].network, *gid);
                    let expected = owner.map(|owner| Arc::as_ptr(&vms[owner]));
                    prop_assert_eq!(there.as_ref().map(Arc::as_ptr), expected);
                }
            }
            // Nothing is left of what nobody has or names.
            for (vm, gid) in connections {
                registry.forget(&vms[vm], GIDS[gid]);
            }
            for (gid, vm) in GIDS.iter().zip(having) {
                if let Some(vm) = vm {
                    registry.release(*gid, &vms[vm]);
                }
            }
            let owners = registry.owners.read().unwrap_or_else(PoisonError::into_inner);
            prop_assert!(owners.is_empty());
        }
    }
}
