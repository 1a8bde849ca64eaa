// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lookup cache: what was looked up for one queue pair and may serve the next.
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::verbs::access;

use super::peer::{Peer, Target};
use crate::engine::path::Path;
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::fabric::registry::Registry;
use crate::verbs::keys::CachedRange;

/// What was looked up for the queue pairs of one poll iteration. The next one is often of the same
/// VM and protection domain, and names the same memory; and so does its peer.
#[derive(Debug)]
pub(crate) struct LookupCache<'a> {
    pub(super) section: &'a ReadSection<'a>,
    pub(crate) registry: &'a Registry,
    /// The worker's VMs, of which peers may be.
    vms: &'a [Arc<Vm>],
    /// The last peer.
    pub(super) peer: Peer<'a>,
    pub(super) ours: DomainCache<'a>,
    pub(super) theirs: DomainCache<'a>,
}

/// The range that was looked up last for a protection domain.
#[derive(Debug, Default)]
pub(super) struct DomainCache<'a> {
    /// The tables of its VM, and its number.
    domain: Option<(&'a Tables, u32)>,
    pub(super) cached: CachedRange<'a>,
}

impl<'a> DomainCache<'a> {
    /// Forgets what was looked up for another protection domain.
    #[inline(always)]
    fn keep_for(&mut self, tables: &'a Tables, pd: u32) {
        if !matches!(self.domain, Some((known, known_pd)) if std::ptr::eq(known, tables) && known_pd == pd)
        {
            self.domain = Some((tables, pd));
            self.cached = CachedRange::default();
        }
    }
}

impl<'a> LookupCache<'a> {
    /// An empty cache, for a poll iteration of a worker with these VMs.
    pub(crate) fn new(
        section: &'a ReadSection<'a>,
        registry: &'a Registry,
        vms: &'a [Arc<Vm>],
    ) -> Self {
        Self {
            section,
            registry,
            vms,
            peer: Peer::Nobody,
            ours: DomainCache::default(),
            theirs: DomainCache::default(),
        }
    }

    /// A cache with nothing but a peer.
    pub(super) fn afresh<'b>(&self, peer: Peer<'b>) -> LookupCache<'b>
    where
        'a: 'b,
    {
        LookupCache {
            peer,
            ..LookupCache::new(self.section, self.registry, &[])
        }
    }

    /// Goes to the peer that a path leads to. Returns whether it is one of the VMs; otherwise
    /// nothing has changed.
    #[inline(always)]
    pub(super) fn follow(&mut self, path: &Path) -> bool {
        match (path.vm(), self.peer) {
            (Some(vm), Peer::Here(known, _)) if Arc::ptr_eq(known, vm) => true,
            (Some(vm), _) => self.find(vm),
            (None, _) => false,
        }
    }

    /// The same, for another VM than that of the last peer. It borrows from the list, which
    /// outlives the path.
    #[inline(never)]
    fn find(&mut self, vm: &Arc<Vm>) -> bool {
        let mut vms = self.vms.iter();
        let Some(vm) = vms.find(|known| Arc::ptr_eq(known, vm)) else {
            return false;
        };
        self.peer = Peer::of(vm, self.section);
        true
    }

    /// Forgets what does not hold for a queue pair of the VM of `tables` that sends to `target`.
    #[inline(always)]
    pub(super) fn keep_for(&mut self, tables: &'a Tables, qp: &Qp, target: &Target<'a>) {
        self.ours.keep_for(tables, qp.pd);
        self.theirs.keep_for(target.tables, target.qp.pd);
        // Another queue pair may grant its peer less. And receives may name another protection
        // domain.
        let cached = &mut self.theirs.cached;
        let remote = matches!(cached.access(), access::REMOTE_WRITE | access::REMOTE_READ);
        if !remote || !target.grants(cached.access()) {
            *cached = CachedRange::default();
        }
    }
}
