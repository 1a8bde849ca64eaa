// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The local fabric: both queue pairs are in this process. The requester calls the peer's responder directly; payload is
//! copied once, from guest memory to guest memory.
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use virtio_rdma_spec::verbs::{qp_state, qp_type};

use crate::engine::cursor::From;
use crate::engine::message::{Answer, Datagram, Message};
use crate::engine::responder::Payload;
use crate::rnic::{Rnic, GSI_QPN};
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Gid, Tables};

/// Who has which GID, per network.
#[derive(Debug, Default)]
pub struct Ports {
    owners: RwLock<HashMap<(String, Gid), Arc<Rnic>>>,
    /// Changes whenever `owners` does.
    generation: AtomicU64,
    groups: RwLock<HashMap<(String, Gid), Vec<Member>>>,
}

/// A queue pair in a multicast group.
#[derive(Debug, Clone)]
struct Member {
    rnic: Arc<Rnic>,
    qpn: u32,
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

    /// Attaches a queue pair to a multicast group. Returns false if it is in it already.
    pub fn join(&self, gid: Gid, rnic: &Arc<Rnic>, qpn: u32) -> bool {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let members = groups.entry((rnic.network().to_owned(), gid)).or_default();
        if members
            .iter()
            .any(|m| m.qpn == qpn && Arc::ptr_eq(&m.rnic, rnic))
        {
            return false;
        }
        members.push(Member {
            rnic: rnic.clone(),
            qpn,
        });
        true
    }

    /// Detaches queue pairs from the groups for which `leaves` holds; returns how many attachments ended.
    fn detach(&self, leaves: impl Fn(&Gid, &Member) -> bool) -> u32 {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let mut ended = 0;
        groups.retain(|(_, gid), members| {
            let before = members.len();
            members.retain(|member| !leaves(gid, member));
            ended += (before - members.len()) as u32;
            !members.is_empty()
        });
        ended
    }

    /// Detaches a queue pair from a multicast group. Returns false if it is not in it.
    pub fn leave(&self, gid: Gid, rnic: &Arc<Rnic>, qpn: u32) -> bool {
        self.detach(|group, m| *group == gid && m.qpn == qpn && Arc::ptr_eq(&m.rnic, rnic)) != 0
    }

    /// Detaches a queue pair from all groups; returns from how many.
    pub fn leave_groups(&self, rnic: &Arc<Rnic>, qpn: u32) -> u32 {
        self.detach(|_, m| m.qpn == qpn && Arc::ptr_eq(&m.rnic, rnic))
    }

    /// Detaches all queue pairs of an RNIC.
    pub fn leave_all(&self, rnic: &Arc<Rnic>) {
        self.detach(|_, m| Arc::ptr_eq(&m.rnic, rnic));
    }

    fn members(&self, network: &str, gid: Gid) -> Vec<Member> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups
            .get(&(network.to_owned(), gid))
            .cloned()
            .unwrap_or_default()
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
    known: Option<(u64, Gid, Option<Arc<Rnic>>)>,
}

impl Route {
    /// The route, looked up again if it may have changed.
    pub(crate) fn refresh(self, from: &Arc<Rnic>, gid: Gid) -> Self {
        let generation = from.ports().generation();
        match &self.known {
            Some((known, known_gid, _)) if *known == generation && *known_gid == gid => self,
            _ => Self {
                known: Some((generation, gid, from.ports().find(from.network(), gid))),
            },
        }
    }

    fn peer(&self) -> Option<&Arc<Rnic>> {
        self.known.as_ref().and_then(|(_, _, peer)| peer.as_ref())
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
        let kind = match sender.qp_type {
            qp_type::XRC_INI => qp_type::XRC_TGT,
            same => same,
        };
        if qp.qp_type != kind || !listens(qp) || !responder.connected_to(sender.number, &own.gids) {
            return Answer::NoAnswer;
        }
        responder.receive(tables, qp, sender, message, offset, len, payload)
    }

    /// Hands a datagram to its queue pair. Only a peer that is busy for a moment is worth another try.
    pub(crate) fn deliver_datagram(
        &self,
        sender: &Arc<Qp>,
        message: &Message,
        datagram: &Datagram,
        source: From<'_>,
    ) -> Answer {
        let (rnic, tables) = match self {
            Self::Here(rnic, tables) => (rnic, tables),
            Self::Busy => return Answer::Busy,
            Self::Stopped | Self::Nobody => return Answer::Done,
        };
        let number = match datagram.qpn {
            GSI_QPN => tables.gsi,
            number => Some(number),
        };
        let Some(qp) = number.and_then(|number| tables.qps.get(number)) else {
            return Answer::Done;
        };
        match give(tables, qp, sender, message, datagram, source) {
            Answer::Done => rnic.count_received(sender.worker.index, message.length),
            Answer::Local(status, reason) => return Answer::Local(status, reason),
            _ => {}
        }
        Answer::Done
    }

    /// Counts a message that the peer received.
    pub(crate) fn count_received(&self, worker: u16, bytes: u64) {
        if let Self::Here(rnic, _) = self {
            rnic.count_received(worker, bytes);
        }
    }
}

/// Whether a queue pair takes messages. In SQE only its send queue is in error. (With its responder locked, this stays so.)
fn listens(qp: &Qp) -> bool {
    matches!(
        qp.state(),
        qp_state::RTR | qp_state::RTS | qp_state::SQD | qp_state::SQE
    )
}

/// Hands a datagram to a queue pair; no answer means that it was dropped.
fn give(
    tables: &Tables,
    qp: &Arc<Qp>,
    sender: &Arc<Qp>,
    message: &Message,
    datagram: &Datagram,
    source: From<'_>,
) -> Answer {
    let mut responder = qp.responder();
    if !matches!(qp.qp_type, qp_type::UD | qp_type::GSI) || !listens(qp) {
        return Answer::NoAnswer;
    }
    responder.receive_datagram(tables, qp, sender, message, datagram, source)
}

/// Hands a datagram to all queue pairs of a multicast group.
pub(crate) fn multicast<'a>(
    own: &Tables,
    sender: &Arc<Qp>,
    message: &Message,
    datagram: &Datagram,
    source: impl Fn() -> From<'a>,
) -> Answer {
    let mut members = sender
        .rnic
        .ports()
        .members(sender.rnic.network(), datagram.dgid);
    let here = |rnic: &Arc<Rnic>| Arc::ptr_eq(rnic, &sender.rnic);
    if sender.block_multicast_loopback {
        members.retain(|member| !here(&member.rnic));
    }
    // All or, for now, none: so that nobody gets it twice, and nobody misses it whose tables are being changed.
    let mut guards = Vec::with_capacity(members.len());
    for member in &members {
        let guard = if here(&member.rnic) {
            None
        } else {
            match member.rnic.try_tables() {
                Some(guard) => Some(guard),
                None => return Answer::Busy,
            }
        };
        guards.push(guard);
    }
    for (member, guard) in members.iter().zip(&guards) {
        let tables: &Tables = guard.as_deref().unwrap_or(own);
        let Some(qp) = tables.qps.get(member.qpn).filter(|_| tables.running) else {
            continue;
        };
        match give(tables, qp, sender, message, datagram, source()) {
            Answer::Done => member
                .rnic
                .count_received(sender.worker.index, message.length),
            Answer::Local(status, reason) => return Answer::Local(status, reason),
            _ => {}
        }
    }
    Answer::Done
}
