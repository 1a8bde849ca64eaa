// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The local fabric: both queue pairs are in this process. The requester calls the peer's responder directly; payload is
//! copied once, from guest memory to guest memory.
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use virtio_rdma_spec::verbs::{qp_state, qp_type};

use crate::engine::message::{Answer, Message};
use crate::engine::responder::Payload;
use crate::rnic::Rnic;
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Gid, Tables};

/// Who has which GID, per network.
#[derive(Debug, Default)]
pub struct Ports {
    owners: RwLock<HashMap<(String, Gid), Arc<Rnic>>>,
    /// Changes whenever `owners` does.
    generation: AtomicU64,
}

impl Ports {
    /// Gives a GID to an RNIC. Returns false if another has it already: the first keeps it.
    pub fn claim(&self, gid: Gid, rnic: &Arc<Rnic>) -> bool {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let owner = owners
            .entry((rnic.network().to_owned(), gid))
            .or_insert_with(|| rnic.clone());
        let ours = Arc::ptr_eq(owner, rnic);
        self.generation.fetch_add(1, Ordering::Release);
        ours
    }

    /// Takes a GID from an RNIC.
    pub fn release(&self, gid: Gid, rnic: &Arc<Rnic>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let key = (rnic.network().to_owned(), gid);
        if owners
            .get(&key)
            .is_some_and(|owner| Arc::ptr_eq(owner, rnic))
        {
            owners.remove(&key);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    fn find(&self, network: &str, gid: Gid) -> Option<Arc<Rnic>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(&(network.to_owned(), gid)).cloned()
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

/// A requester's way to its peer, remembered until some port changes.
#[derive(Debug, Default)]
pub struct Route {
    known: Option<(u64, Option<Arc<Rnic>>)>,
}

impl Route {
    /// The route, looked up again if it may have changed.
    pub(crate) fn refresh(self, from: &Arc<Rnic>, gid: Gid) -> Self {
        let generation = from.ports().generation();
        match &self.known {
            Some((known, _)) if *known == generation => self,
            _ => Self {
                known: Some((generation, from.ports().find(from.network(), gid))),
            },
        }
    }

    fn peer(&self) -> Option<&Arc<Rnic>> {
        self.known.as_ref().and_then(|(_, peer)| peer.as_ref())
    }
}

/// The peer's VM, for one turn.
#[derive(Debug)]
pub(crate) enum Peer<'a> {
    /// Its tables, locked against changes.
    Here(&'a Arc<Rnic>, &'a Tables),
    /// Its tables are being changed.
    Busy,
    /// It is stopped.
    Stopped,
    /// There is none.
    Nobody,
}

/// Calls `f` with the peer that `route` leads to.
pub(crate) fn with_peer<R>(
    route: &Route,
    own: &Arc<Rnic>,
    tables: &Tables,
    f: impl FnOnce(Peer<'_>) -> R,
) -> R {
    let Some(peer) = route.peer() else {
        return f(Peer::Nobody);
    };
    if Arc::ptr_eq(peer, own) {
        return f(Peer::Here(own, tables));
    }
    // Never block here: whoever changes the peer's tables may be waiting for us.
    let Some(peer_tables) = peer.try_tables() else {
        return f(Peer::Busy);
    };
    if !peer_tables.running {
        return f(Peer::Stopped);
    }
    f(Peer::Here(peer, &peer_tables))
}

impl Peer<'_> {
    /// Hands a slice of a message to the responder of queue pair `dest_qp`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn deliver(
        &self,
        own: &Tables,
        sender: &Arc<Qp>,
        dest_qp: u32,
        message: &Message,
        offset: u64,
        len: u64,
        payload: Payload<'_>,
    ) -> Answer {
        let tables = match self {
            Self::Here(_, tables) => tables,
            Self::Busy => return Answer::Busy,
            Self::Stopped => return Answer::Stopped,
            Self::Nobody => return Answer::NoAnswer,
        };
        let Some(qp) = tables.qps.get(dest_qp) else {
            return Answer::NoAnswer;
        };
        let mut responder = qp.responder();
        let listening = matches!(qp.state(), qp_state::RTR | qp_state::RTS | qp_state::SQD);
        if qp.qp_type != qp_type::RC
            || !listening
            || !responder.connected_to(sender.number, &own.gids)
        {
            return Answer::NoAnswer;
        }
        responder.receive(tables, qp, sender, message, offset, len, payload)
    }

    /// Counts a message that the peer received.
    pub(crate) fn count_received(&self, worker: u16, bytes: u64) {
        if let Self::Here(rnic, _) = self {
            rnic.count_received(worker, bytes);
        }
    }
}
