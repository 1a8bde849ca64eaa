// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The local fabric: both queue pairs are in this process. The requester calls the peer's responder
//! directly; payload is copied once, from guest memory to guest memory.
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, RwLock};

use virtio_rdma_spec::verbs::{qp_state, qp_type};

use crate::engine::cursor::From;
use crate::engine::message::{Answer, Datagram, Message};
use crate::engine::queue::PlainReceive;
use crate::engine::responder::{Responder, Slice};
use crate::memory::{Span, Stretch};
use crate::rnic::{Rnic, GSI_QPN};
use crate::verbs::cq::Cq;
use crate::verbs::keys::Memo;
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Gid, Tables};
use vhost_device_rdma_sync::Visit;

/// Name of a network. To clone it allocates nothing.
pub(crate) type Network = Arc<str>;

/// Who has which GID, per network.
#[derive(Debug, Default)]
pub struct Ports {
    owners: RwLock<HashMap<(Network, Gid), Arc<Rnic>>>,
    /// Changes whenever `owners` does.
    generation: AtomicU64,
    groups: RwLock<HashMap<(Network, Gid), Members>>,
}

/// A queue pair in a multicast group.
#[derive(Debug, Clone)]
struct Member {
    rnic: Arc<Rnic>,
    qpn: u32,
}

/// The queue pairs of a multicast group. A message goes to those that it found, however long that
/// takes.
type Members = Arc<Vec<Member>>;

impl Ports {
    /// Gives a GID to an RNIC. Returns false if another has it already: the first keeps it.
    pub fn claim(&self, gid: Gid, rnic: &Arc<Rnic>) -> bool {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let owner = owners
            .entry((rnic.network().clone(), gid))
            .or_insert_with(|| rnic.clone());
        let ours = Arc::ptr_eq(owner, rnic);
        self.generation.fetch_add(1, Ordering::Release);
        ours
    }

    /// Takes a GID from an RNIC.
    pub fn release(&self, gid: Gid, rnic: &Arc<Rnic>) {
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        let key = (rnic.network().clone(), gid);
        if owners
            .get(&key)
            .is_some_and(|owner| Arc::ptr_eq(owner, rnic))
        {
            owners.remove(&key);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Attaches a queue pair to a multicast group that it is not in yet.
    pub fn join(&self, gid: Gid, rnic: &Arc<Rnic>, qpn: u32) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let members = groups.entry((rnic.network().clone(), gid)).or_default();
        Arc::make_mut(members).push(Member {
            rnic: rnic.clone(),
            qpn,
        });
    }

    /// Detaches a queue pair of an RNIC from a multicast group, or all that it has in it.
    pub fn leave(&self, gid: Gid, rnic: &Arc<Rnic>, qpn: Option<u32>) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        let key = (rnic.network().clone(), gid);
        let Some(members) = groups.get_mut(&key) else {
            return;
        };
        let leaves = |member: &Member| {
            qpn.is_none_or(|qpn| qpn == member.qpn) && Arc::ptr_eq(&member.rnic, rnic)
        };
        Arc::make_mut(members).retain(|member| !leaves(member));
        if members.is_empty() {
            groups.remove(&key);
        }
    }

    fn members(&self, network: &Network, gid: Gid) -> Members {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups
            .get(&(network.clone(), gid))
            .cloned()
            .unwrap_or_default()
    }

    fn find(&self, network: &Network, gid: Gid) -> Option<Arc<Rnic>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(&(network.clone(), gid)).cloned()
    }

    /// A port went down or came up: routes that were found before are not followed any longer.
    pub(crate) fn changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// A worker whose turn begins after a writer has waited for the readers must see what the
    /// writer changed before: so the order is sequential, as that of entering and waiting is.
    fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }
}

/// A requester's way to its peer, remembered until some port changes.
#[derive(Debug, Default)]
pub struct Route {
    known: Option<(u64, Gid, Option<Arc<Rnic>>)>,
}

impl Route {
    /// Looks the route up again if it may have changed.
    #[inline]
    pub(crate) fn refresh(&mut self, from: &Arc<Rnic>, gid: Gid) {
        let generation = from.ports().generation();
        match &self.known {
            Some((known, known_gid, _)) if *known == generation && *known_gid == gid => {}
            _ => self.find(from, gid, generation),
        }
    }

    #[cold]
    fn find(&mut self, from: &Arc<Rnic>, gid: Gid, generation: u64) {
        let peer = from
            .ports()
            .find(from.network(), gid)
            .filter(|peer| from.port_is_up() && peer.port_is_up());
        self.known = Some((generation, gid, peer));
    }

    /// Whether it leads to a peer, and led to nobody when it was looked up last.
    pub(crate) fn appears(&mut self, from: &Arc<Rnic>, gid: Gid) -> bool {
        if self.rnic().is_some() {
            return false;
        }
        self.refresh(from, gid);
        self.rnic().is_some()
    }

    /// The peer that it leads to.
    #[inline]
    pub(crate) fn peer<'a>(&'a self, visit: &'a Visit<'_>) -> Peer<'a> {
        self.rnic()
            .map_or(Peer::Nobody, |rnic| Peer::of(rnic, visit))
    }

    /// The RNIC that it leads to.
    #[inline(always)]
    pub(crate) fn rnic(&self) -> Option<&Arc<Rnic>> {
        self.known.as_ref()?.2.as_ref()
    }
}

/// The peer's VM, for one visit.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Peer<'a> {
    /// Its tables.
    Here(&'a Arc<Rnic>, &'a Tables),
    /// Its tables are being changed.
    Busy,
    /// It is stopped.
    Stopped,
    /// There is none.
    Nobody,
}

/// The queue pair that a requester is connected to.
pub(crate) struct Target<'a> {
    pub rnic: &'a Rnic,
    pub tables: &'a Tables,
    pub qp: &'a Arc<Qp>,
    responder: MutexGuard<'a, Responder>,
}

impl<'a> Target<'a> {
    /// Whether it takes messages, with nothing else to be done about that.
    #[inline(always)]
    pub(crate) fn takes_plain(&self) -> bool {
        listens(self.qp) && self.responder.established(self.qp)
    }

    /// The `len` bytes at `addr` that the sender may access by `key` as `access` says, if they lie
    /// in one piece of a region. What is in `memo` was granted: while we have the responder, it
    /// still is.
    #[inline(always)]
    pub(crate) fn piece(
        &self,
        memo: &mut Memo<'a>,
        access: u32,
        key: u32,
        addr: u64,
        len: u64,
    ) -> Option<Span<'a>> {
        if let Some(piece) = memo.recall(key, access, addr, len) {
            return Some(piece);
        }
        if !self.grants(access) {
            return None;
        }
        let (keys, pd) = (&self.tables.keys, self.qp.pd);
        keys.piece(memo, key, pd, access, addr, len)
    }

    /// Whether the sender may access memory as `access` says, REMOTE_WRITE or REMOTE_READ.
    #[inline(always)]
    pub(crate) fn grants(&self, access: u32) -> bool {
        self.responder.grants(access)
    }

    /// The same, in however many pieces they lie.
    #[inline]
    pub(crate) fn stretch(
        &self,
        access: u32,
        key: u32,
        addr: u64,
        len: u64,
    ) -> Option<Stretch<'a>> {
        if !self.grants(access) {
            return None;
        }
        let keys = &self.tables.keys;
        keys.stretch(key, self.qp.pd, access, addr, len)
    }

    /// Takes a receive work request for a message of `len` bytes, if it is plain, and tells where
    /// it completes.
    #[inline]
    pub(crate) fn take_plain(
        &mut self,
        memo: &mut Memo<'a>,
        len: u64,
    ) -> Option<(PlainReceive<'a>, &'a Arc<Cq>)> {
        let cq = self.qp.recv_cq.as_ref().filter(|cq| !cq.errored())?;
        let (keys, pd) = (&self.tables.keys, self.qp.pd);
        let receive = self.responder.take_plain(keys, memo, pd, len)?;
        Some((receive, cq))
    }
}

impl<'a> Peer<'a> {
    /// The VM of an RNIC.
    #[inline]
    pub(crate) fn of(rnic: &'a Arc<Rnic>, visit: &'a Visit<'_>) -> Self {
        match rnic.visit(visit) {
            None => Self::Busy,
            Some(tables) if tables.running => Self::Here(rnic, tables),
            Some(_) => Self::Stopped,
        }
    }

    /// Finds and locks the responder of queue pair `dest_qp`, which must be connected to `sender`.
    ///
    /// # Errors
    /// What the sender gets for an answer if there is none.
    pub(crate) fn meet(
        &self,
        own: &Tables,
        sender: &Qp,
        dest_qp: u32,
    ) -> Result<Target<'a>, Answer> {
        let (rnic, tables) = match *self {
            Self::Here(rnic, tables) => (rnic, tables),
            Self::Busy => return Err(Answer::Busy),
            Self::Stopped => return Err(Answer::Stopped),
            Self::Nobody => return Err(Answer::NoAnswer),
        };
        let Some(qp) = tables.qps.get(dest_qp) else {
            return Err(Answer::NoAnswer);
        };
        let responder = qp.responder();
        let kind = match sender.qp_type {
            qp_type::XRC_INI => qp_type::XRC_TGT,
            same => same,
        };
        if qp.qp_type != kind || !listens(qp) || !responder.connected_to(sender.number, &own.gids) {
            return Err(Answer::NoAnswer);
        }
        Ok(Target {
            rnic,
            tables,
            qp,
            responder,
        })
    }

    /// Hands a slice of a message to the responder of queue pair `dest_qp`.
    pub(crate) fn deliver(
        &self,
        own: &Tables,
        sender: &Arc<Qp>,
        dest_qp: u32,
        slice: Slice<'_>,
    ) -> Answer {
        match self.meet(own, sender, dest_qp) {
            Ok(mut target) => target
                .responder
                .receive(target.tables, target.qp, sender, slice),
            Err(answer) => answer,
        }
    }

    /// Hands a datagram to its queue pair. Only a peer that is busy for a moment is worth another
    /// try.
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
            Answer::Done => rnic.count_received(sender.worker.index, 1, message.length),
            Answer::Local(status, reason) => return Answer::Local(status, reason),
            _ => {}
        }
        Answer::Done
    }

    /// Counts a message that the peer received.
    pub(crate) fn count_received(&self, worker: u16, bytes: u64) {
        if let Self::Here(rnic, _) = self {
            rnic.count_received(worker, 1, bytes);
        }
    }
}

/// Whether a queue pair takes messages. In SQE only its send queue is in error. (With its responder
/// locked, this stays so.)
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

/// A datagram on its way to the queue pairs of a multicast group, one after the other.
#[derive(Debug)]
pub(crate) struct Fanout {
    members: Members,
    done: usize,
}

impl Fanout {
    /// The way of a datagram of `sender` to a group.
    pub(crate) fn new(sender: &Qp, group: Gid) -> Self {
        let rnic = &sender.rnic;
        Self {
            members: rnic.ports().members(rnic.network(), group),
            done: 0,
        }
    }

    /// Hands the datagram to the next queue pair. [`Answer::Progress`]: there are more.
    pub(crate) fn next(
        &mut self,
        visit: &Visit<'_>,
        sender: &Arc<Qp>,
        message: &Message,
        datagram: &Datagram,
        source: From<'_>,
    ) -> Answer {
        let Some(Member { rnic, qpn }) = self.members.get(self.done) else {
            return Answer::Done;
        };
        let ours = Arc::ptr_eq(rnic, &sender.rnic);
        let up = sender.rnic.port_is_up() && rnic.port_is_up();
        if up && !(ours && sender.block_multicast_loopback) {
            let Some(tables) = rnic.visit(visit) else {
                return Answer::Busy;
            };
            // It may have left since.
            let attached = tables.multicast.contains(&(*qpn, datagram.dgid));
            let qp = tables.qps.get(*qpn);
            if let Some(qp) = qp.filter(|_| tables.running && attached) {
                match give(tables, qp, sender, message, datagram, source) {
                    Answer::Done => rnic.count_received(sender.worker.index, 1, message.length),
                    Answer::Local(status, reason) => return Answer::Local(status, reason),
                    _ => {}
                }
            }
        }
        self.done += 1;
        if self.done < self.members.len() {
            Answer::Progress
        } else {
            Answer::Done
        }
    }
}
