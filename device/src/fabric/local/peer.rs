// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The other end: a queue pair in this process, whose responder is called directly. Payload is
//! copied once, from guest memory to guest memory.
use std::sync::{Arc, MutexGuard};

use crate::engine::binding::Binding;
use crate::engine::cursor::DataSource;
use crate::engine::message::{Answer, Datagram, Message};
use crate::engine::path::{Fanout, Member, Path};
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Origin, Responder, Slice};
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::memory::{ContiguousRange, ScatterRange};
use crate::verbs::cq::Cq;
use crate::verbs::keys::CachedRange;
use crate::verbs::work_queue::FastReceive;
use crate::verbs::WcError;
use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::verbs::{vendor_err, wc_status};

/// The peer's VM, for one read section.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Peer<'a> {
    /// Its tables.
    Here(&'a Arc<Vm>, &'a Tables),
    /// Its tables are being changed.
    Busy,
    /// It is stopped.
    Stopped,
    /// There is none.
    Nobody,
}

/// The queue pair that a requester is connected to.
pub(crate) struct Target<'a> {
    pub vm: &'a Vm,
    pub tables: &'a Tables,
    pub qp: &'a Arc<Qp>,
    responder: MutexGuard<'a, Responder>,
}

impl<'a> Target<'a> {
    /// Whether it takes messages of the fast path.
    #[inline(always)]
    pub(crate) fn takes_fast_path(&self) -> bool {
        self.qp.listens() && self.responder.established(self.qp)
    }

    /// The `len` bytes at `addr` that the sender may access by `key` as `access` says, if they are
    /// in one contiguous range of a region. The range in `cached` was granted, and still is while
    /// the responder is locked.
    #[inline(always)]
    pub(crate) fn contiguous(
        &self,
        cached: &mut CachedRange<'a>,
        access: u32,
        key: u32,
        addr: u64,
        len: u64,
    ) -> Option<ContiguousRange<'a>> {
        if let Some(part) = cached.recall(key, access, addr, len) {
            return Some(part);
        }
        if !self.grants(access) {
            return None;
        }
        let (keys, pd) = (&self.tables.keys, self.qp.pd);
        keys.contiguous(cached, key, pd, access, addr, len)
    }

    /// Whether the sender may access memory as `access` says, REMOTE_WRITE or REMOTE_READ.
    #[inline(always)]
    pub(crate) fn grants(&self, access: u32) -> bool {
        self.responder.grants(access)
    }

    /// The same as a scatter range.
    #[inline]
    pub(crate) fn scattered(
        &self,
        access: u32,
        key: u32,
        addr: u64,
        len: u64,
    ) -> Option<ScatterRange<'a>> {
        if !self.grants(access) {
            return None;
        }
        let keys = &self.tables.keys;
        keys.scattered(key, self.qp.pd, access, addr, len)
    }

    /// Takes a receive work request for a message of `len` bytes, if it is eligible, and tells
    /// where it completes.
    #[inline(always)]
    pub(crate) fn take_fast(
        &mut self,
        cached: &mut CachedRange<'a>,
        len: u64,
    ) -> Option<(FastReceive<'a>, &'a Arc<Cq>)> {
        let cq = self.qp.recv_cq.as_ref().filter(|cq| !cq.errored())?;
        let (keys, pd) = (&self.tables.keys, self.qp.pd);
        let receive = self.responder.take_fast(keys, cached, pd, len)?;
        Some((receive, cq))
    }
}

impl<'a> Peer<'a> {
    /// The VM that a path leads to.
    #[inline]
    pub(crate) fn at(path: &'a Path, section: &'a ReadSection<'_>) -> Self {
        path.vm().map_or(Self::Nobody, |vm| Self::of(vm, section))
    }

    /// A VM.
    #[inline]
    pub(crate) fn of(vm: &'a Arc<Vm>, section: &'a ReadSection<'_>) -> Self {
        match vm.read_in(section) {
            None => Self::Busy,
            Some(tables) if tables.running => Self::Here(vm, tables),
            Some(_) => Self::Stopped,
        }
    }

    /// Finds and locks the responder of queue pair `dest_qp`, if it and `sender` are connected to
    /// each other; `binding` is the sender's.
    ///
    /// # Errors
    /// What the sender gets for an answer if there is none.
    #[inline(always)]
    pub(crate) fn meet(
        &self,
        own: &Tables,
        sender: &Qp,
        dest_qp: u32,
        binding: &Binding,
    ) -> Result<Target<'a>, Answer> {
        let (vm, tables) = match *self {
            Self::Here(vm, tables) => (vm, tables),
            Self::Busy => return Err(Answer::Busy),
            Self::Stopped => return Err(Answer::Stopped),
            Self::Nobody => return Err(Answer::NoAnswer),
        };
        let Some(qp) = tables.qps.get(dest_qp) else {
            return Err(Answer::NoAnswer);
        };
        let responder = qp.responder();
        if qp.qp_type != sender.facts.peer
            || !qp.listens()
            || !binding.admits(qp)
            || !responder.connected_to(sender, &own.gids)
        {
            return Err(Answer::NoAnswer);
        }
        Ok(Target {
            vm,
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
        binding: &Binding,
        slice: Slice<'_>,
    ) -> Answer {
        match self.meet(own, sender, dest_qp, binding) {
            Ok(mut target) => {
                target
                    .responder
                    .receive(target.tables, target.qp, Origin::of(sender), slice)
            }
            Err(answer) => answer,
        }
    }

    /// Hands a datagram to its queue pair. Only a peer that is busy for a moment is worth another
    /// try; other answers say why it is dropped.
    pub(crate) fn deliver_datagram(
        &self,
        sender: &Arc<Qp>,
        message: &Message,
        datagram: &Datagram,
        source: DataSource<'_>,
    ) -> Answer {
        let (vm, tables) = match self {
            Self::Here(vm, tables) => (vm, tables),
            Self::Busy => return Answer::Busy,
            Self::Stopped => return Answer::Stopped,
            Self::Nobody => return Answer::NoAnswer,
        };
        let Some(qp) = tables.datagram_qp(datagram.qpn) else {
            return Answer::NoAnswer;
        };
        let answer = qp.take_datagram(tables, Origin::of(sender), message, datagram, source);
        if answer == Answer::Done {
            vm.count_received(sender.worker_index, 1, message.length);
        }
        answer
    }

    /// Hands a slice of a reliable datagram to its queue pair.
    pub(crate) fn deliver_reliable_datagram(
        &self,
        sender: &Arc<Qp>,
        to: &Datagram,
        slice: Slice<'_>,
    ) -> Answer {
        let tables = match self {
            Self::Here(_, tables) => tables,
            Self::Busy => return Answer::Busy,
            Self::Stopped => return Answer::Stopped,
            Self::Nobody => return Answer::NoAnswer,
        };
        let Some(qp) = tables.qps.get(to.qpn) else {
            return Answer::Refused(WcError::new(
                wc_status::REM_INV_RD_REQ_ERR,
                vendor_err::NO_QUEUE_PAIR,
            ));
        };
        qp.take_reliable_datagram(tables, Origin::of(sender), to.qkey, slice)
    }

    /// Counts a message that the peer received.
    pub(crate) fn count_received(&self, worker: u16, bytes: u64) {
        if let Self::Here(vm, _) = self {
            vm.count_received(worker, 1, bytes);
        }
    }
}

/// Hands a datagram to the next queue pair of a multicast group. [`Answer::Progress`]: there are
/// more.
pub(super) fn deliver_next(
    fanout: &mut Fanout,
    section: &ReadSection<'_>,
    sender: &Arc<Qp>,
    message: &Message,
    datagram: &Datagram,
    source: DataSource<'_>,
) -> Answer {
    let Some(Member { vm, qpn }) = fanout.members.get(fanout.done) else {
        return Answer::Done;
    };
    let ours = Arc::ptr_eq(vm, &sender.vm);
    let up = sender.vm.port_is_up() && vm.port_is_up() && sender.vm.meets(vm);
    if up && !(ours && sender.block_multicast_loopback) {
        let Some(tables) = vm.read_in(section) else {
            return Answer::Busy;
        };
        // It may have left since.
        let attached = tables.multicast.contains_key(&(*qpn, datagram.dgid));
        let qp = tables.qps.get(*qpn);
        if let Some(qp) = qp.filter(|_| tables.running && attached) {
            match qp.take_datagram(tables, Origin::of(sender), message, datagram, source) {
                Answer::Done => vm.count_received(sender.worker_index, 1, message.length),
                Answer::Local(error) => return Answer::Local(error),
                _ => {}
            }
        }
    }
    fanout.done += 1;
    if fanout.done < fanout.members.len() {
        Answer::Progress
    } else {
        Answer::Done
    }
}
