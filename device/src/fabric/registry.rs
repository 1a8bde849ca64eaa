// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which VM of this process has which GID, which GIDs are reserved for configured devices, and which
//! queue pairs are in which multicast group.
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::engine::path::{Member, Members, Path};
use crate::engine::tables::Gid;
use crate::engine::vm::{Network, Vm};

/// Who has which GID, per network.
#[derive(Debug, Default)]
pub struct Registry {
    owners: RwLock<HashMap<(Network, Gid), Arc<Vm>>>,
    /// Changes whenever `owners` does.
    generation: AtomicU64,
    groups: RwLock<HashMap<(Network, Gid), Members>>,
    /// The own GIDs of all configured devices.
    reserved: HashSet<(Network, Gid)>,
}

impl Registry {
    /// A registry of which nobody has anything yet, where the networks' devices have these GIDs
    /// for their own.
    pub fn with_reserved(reserved: impl IntoIterator<Item = (Network, Gid)>) -> Self {
        Self {
            reserved: reserved.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Whether a GID is an own one of a device of this network, whether or not its VM is attached.
    pub fn is_reserved(&self, network: &Network, gid: Gid) -> bool {
        self.reserved.contains(&(network.clone(), gid))
    }

    /// Gives a GID to a VM. Returns false if another has it already: the first keeps it.
    pub fn claim(&self, gid: Gid, vm: &Arc<Vm>) -> bool {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let owner = owners
            .entry((vm.network.clone(), gid))
            .or_insert_with(|| vm.clone());
        let ours = Arc::ptr_eq(owner, vm);
        self.generation.fetch_add(1, Ordering::Release);
        ours
    }

    /// Takes a GID from a VM.
    pub fn release(&self, gid: Gid, vm: &Arc<Vm>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let key = (vm.network.clone(), gid);
        if owners.get(&key).is_some_and(|owner| Arc::ptr_eq(owner, vm)) {
            owners.remove(&key);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Attaches a queue pair to a multicast group that it is not in yet.
    pub fn join(&self, gid: Gid, vm: &Arc<Vm>, qpn: u32) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let members = groups.entry((vm.network.clone(), gid)).or_default();
        Arc::make_mut(members).push(Member {
            vm: vm.clone(),
            qpn,
        });
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
    pub(super) fn members(&self, network: &Network, gid: Gid) -> Members {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups
            .get(&(network.clone(), gid))
            .cloned()
            .unwrap_or_default()
    }

    fn owner(&self, network: &Network, gid: Gid) -> Option<Arc<Vm>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(&(network.clone(), gid)).cloned()
    }

    /// A port went down or came up: routes that were found before are not followed any longer.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// A worker whose read section begins after a writer has waited for the readers must see what
    /// the writer changed before: so the order is sequential, as that of entering and waiting is.
    fn generation(&self) -> u64 {
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
            .filter(|peer| from.port_is_up() && peer.port_is_up());
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
