// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send queue: work requests on their way (specification: "Requester").
//!
//! What is here decides what a work request means, whichever way its message goes: reading and
//! judging an entry (`begin`), local operations (`execute`, `register`),
//! completing, failing and flushing it (`finish`). A fabric carries the messages, and
//! learns how they fared.
//!
//! Each entry is read once into a local copy, which alone is checked and used.
use std::sync::Arc;

use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{qp_state, qp_type};

use super::binding::Binding;
use super::cursor::{Cursor, DataSource};
use super::message::{Datagram, Message};
use super::operation::Operation;
use super::path::{Fanout, Path};
use super::queue_pair::Qp;
use super::register::Registration;
use super::tables::Gid;
use super::tables::Tables;
use crate::footprint::Share;
use crate::memory::Pages;
use crate::verbs::keys::Accessor;
use crate::verbs::work_queue::WorkQueue;

/// What polling a queue pair led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polled {
    /// Nothing more to do until something happens.
    Idle,
    /// There is more to do: poll it again.
    Again,
    /// The same, after more bytes than other queue pairs should wait for.
    Long,
    /// Nothing to do before this time, nanoseconds.
    Park(u64),
}

/// The work request in progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Active {
    pub message: Message,
    pub wr_id: u64,
    pub index: u16,
    pub signaled: bool,
    pub inline: bool,
    /// It begins when everything before it that brings data is done.
    pub fence: bool,
    /// When it is done, the key of its only scatter/gather entry is invalidated.
    pub invalidates_sink: bool,
    /// Bytes moved.
    pub done: u64,
}

/// Reliable datagrams of a queue pair that may wait aside.
pub(crate) const MOST_DEFERRED: usize = 256;

/// A reliable datagram that waits, while others go on.
#[derive(Debug)]
pub(crate) struct Deferred {
    pub active: Active,
    pub to: Datagram,
    pub sges: Vec<Sge>,
    pub inline: Vec<u8>,
    /// Since when its destination has not answered, and when it is tried again, nanoseconds.
    pub since: u64,
    pub until: u64,
    /// How often there was no receive for it, and whether that is what it waits for.
    pub not_ready: u8,
    pub for_receive: bool,
    /// For itself, in the account of its VM.
    pub _share: Share,
}

impl Deferred {
    /// What one takes, bytes: the list of them grows to twice what it needs.
    pub(crate) const fn footprint(sges: usize, inline: usize) -> u64 {
        (2 * size_of::<Self>() + sges * size_of::<Sge>() + inline) as u64
    }
}

/// What a fabric with packets needs of a connection's attributes, beyond its peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PathAttributes {
    pub dmac: [u8; 6],
    pub sgid_index: u16,
    pub flow_label: u32,
    pub traffic_class: u8,
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
    /// `mtu`.
    pub path_mtu: u8,
    /// PSN of the first packet that it sends.
    pub sq_psn: u32,
    /// PSN of the first packet that it receives.
    pub rq_psn: u32,
}

/// How often the message in progress was tried in vain, one after the other.
// One word, so that each message forgets it by one store.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(4))]
pub(crate) struct Tries {
    /// There was no answer.
    pub no_answer: u8,
    /// There was no receive.
    pub not_ready: u8,
    /// The peer's VM was stopped, as far as that is counted.
    pub stopped: u8,
    reserved: u8,
}

/// The send queue of a queue pair, and how far its work requests are.
// In this order: what every poll needs is on few cache lines, and first.
#[derive(Debug)]
#[repr(C)]
pub struct SendQueue {
    /// The queue pair's buffer.
    pub(crate) buffer: Arc<Pages>,
    pub(crate) queue: WorkQueue,
    /// Nothing is tried before this time.
    pub(crate) parked: Option<u64>,
    pub(crate) max_sge: usize,
    pub(crate) max_inline: usize,
    /// The way to the peer.
    pub(crate) path: Path,
    pub(crate) dest_gid: Gid,
    pub(crate) dest_qp: u32,
    /// The peer that it is connected to.
    pub(crate) binding: Binding,
    pub(crate) qp_type: u8,
    pub(crate) signal_all: bool,
    pub(crate) tries: Tries,
    pub(crate) drained: bool,
    pub(crate) drained_notify: bool,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u8,
    /// This poll is the first after it was parked.
    pub(crate) resumed: bool,
    /// What it was parked for came; it waits for more now.
    pub(crate) gathering: bool,
    /// How long it does that, nanoseconds.
    pub(crate) gather: u32,
    pub(crate) active: Option<Active>,
    /// What the active one asks for beyond moving data.
    pub(crate) operation: Operation,
    /// How far the active one is, if it is a registration.
    pub(super) registration: Option<Box<Registration>>,
    /// Where the active one goes, if it is a datagram.
    pub(crate) datagram: Option<Datagram>,
    /// How far the active one is, if it goes to a multicast group.
    pub(crate) fanout: Option<Fanout>,
    /// SRD: what waits aside.
    pub(crate) deferred: Vec<Deferred>,
    /// Gather list of the work request in progress; its capacity was reserved at creation.
    pub(crate) sges: Vec<Sge>,
    /// Inline data of the work request in progress; its capacity was reserved at creation.
    pub(crate) inline: Vec<u8>,
    pub(crate) qkey: u32,
    /// Work requests that the fabric took out and has not ended.
    pub(super) under_way: u32,
    /// Entries that are to be flushed before others are executed.
    pub(super) stale: u32,
    pub(crate) path_attributes: PathAttributes,
}

impl SendQueue {
    /// A queue with a send queue for work requests of up to `max_sge` gather entries or
    /// `max_inline` bytes.
    #[must_use]
    pub fn new(
        buffer: Arc<Pages>,
        queue: WorkQueue,
        qp_type: u8,
        max_sge: usize,
        max_inline: usize,
        signal_all: bool,
    ) -> Self {
        Self {
            buffer,
            queue,
            qp_type,
            max_sge,
            max_inline,
            signal_all: signal_all || qp_type == qp_type::SRD,
            sges: Vec::with_capacity(max_sge),
            inline: Vec::with_capacity(max_inline.next_multiple_of(8)),
            active: None,
            operation: Operation::None,
            registration: None,
            datagram: None,
            deferred: Vec::new(),
            fanout: None,
            path: Path::default(),
            parked: None,
            tries: Tries::default(),
            drained: false,
            drained_notify: false,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            max_rd_atomic: 0,
            resumed: false,
            gathering: false,
            gather: 0,
            dest_qp: 0,
            binding: Binding::default(),
            dest_gid: Gid::default(),
            qkey: 0,
            under_way: 0,
            stale: 0,
            path_attributes: PathAttributes::default(),
        }
    }

    /// Takes over attributes.
    pub(crate) fn configure(&mut self, attr: &QpAttr) {
        self.timeout = attr.timeout;
        self.retry_cnt = attr.retry_cnt;
        self.rnr_retry = attr.rnr_retry;
        self.max_rd_atomic = attr.max_rd_atomic;
        self.dest_qp = attr.dest_qp_num;
        self.dest_gid = attr.av.dgid;
        self.qkey = attr.qkey;
        self.path_attributes = PathAttributes {
            dmac: attr.av.dmac,
            sgid_index: attr.av.sgid_index,
            flow_label: attr.av.flow_label,
            traffic_class: attr.av.traffic_class,
            hop_limit: attr.av.hop_limit,
            sl: attr.av.sl,
            path_mtu: attr.path_mtu,
            sq_psn: attr.sq_psn,
            rq_psn: attr.rq_psn,
        };
        self.path = Path::default();
        self.parked = None;
        self.gathering = false;
        self.gather = 0;
        self.reset_retries();
    }

    /// The send queue drains from now on; SQ_DRAINED tells when it has, if `notify`.
    pub(crate) fn drain(&mut self, notify: bool) {
        self.drained = false;
        self.drained_notify = notify;
    }

    /// Back to the state of creation.
    pub(crate) fn reset(&mut self) {
        self.queue.position = 0;
        self.active = None;
        self.under_way = 0;
        self.stale = 0;
        self.registration = None;
        self.fanout = None;
        self.deferred = Vec::new();
        self.drain(false);
        self.binding = Binding::default();
        self.configure(&QpAttr::default());
    }

    /// The memory changes: what was read in the old one is of no use.
    pub(crate) fn rebase(&mut self, buffer: Arc<Pages>) {
        self.buffer = buffer;
        self.registration = None;
    }

    /// Whether a message is under way.
    pub(crate) fn in_progress(&self) -> bool {
        self.active.is_some() || self.under_way != 0
    }

    /// Work requests that the fabric took out and has not ended.
    pub(crate) fn under_way(&self) -> u32 {
        self.under_way
    }

    /// Whether it has a queue and memory, and nothing under way.
    pub(crate) fn is_idle(&self) -> bool {
        let busy = self.in_progress() || self.is_parked();
        !busy && self.queue.entries != 0 && !self.buffer.lost()
    }

    /// Whether it waits for a time.
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Send work requests consumed, modulo 2^32.
    pub(crate) fn position(&self) -> u32 {
        self.queue.position
    }

    /// Send work requests that have ended, modulo 2^32. (Of reliable datagrams others may have than the
    /// first ones.)
    fn ended(&self) -> u32 {
        self.queue.position.wrapping_sub(self.under_way)
    }

    /// What [`Self::ended`] is when all that is posted now has ended, in this `state`; none if it has.
    pub(crate) fn end_of_posted(&self, state: u8) -> Option<u32> {
        let more = match state {
            qp_state::RTS | qp_state::SQE | qp_state::ERR => self.queue.posted(&self.buffer),
            // Nothing more begins.
            qp_state::SQD => u32::from(self.active.is_some()),
            _ => return None,
        };
        let end = self.queue.position.wrapping_add(more);
        (end != self.ended()).then_some(end)
    }

    /// Whether all before `end` ([`Self::end_of_posted`]) has ended, or will not begin in this `state`.
    pub(crate) fn has_ended(&self, state: u8, end: u32) -> bool {
        if state == qp_state::SQD && !self.in_progress() {
            return true;
        }
        let in_order = self.qp_type != qp_type::SRD;
        let left = end.wrapping_sub(self.ended()) as i32;
        left <= 0 && (in_order || !self.in_progress())
    }

    pub(crate) fn reset_retries(&mut self) {
        self.tries = Tries::default();
    }

    /// What the message in progress reads, from where it is on.
    pub(crate) fn source<'a>(
        &'a self,
        tables: &'a Tables,
        qp: &Qp,
        active: &Active,
    ) -> DataSource<'a> {
        if active.inline {
            let left = usize::try_from(active.done)
                .ok()
                .and_then(|done| self.inline.get(done..));
            DataSource::Bytes(left.unwrap_or_default())
        } else {
            DataSource::Guest(Cursor::new(
                tables,
                &self.sges,
                Accessor::local(qp.pd),
                0,
                active.done,
            ))
        }
    }

    /// Whether there is a work request.
    #[inline(always)]
    pub(crate) fn posted(&self) -> bool {
        self.queue.ready(&self.buffer).is_some()
    }
}
