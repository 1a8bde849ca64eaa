// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fabrics: what carries messages between queue pairs, and answers for a VM's port.
//!
//! The engine owns the objects and decides what a work request means and what becomes of it. A
//! fabric moves messages. The line between the two:
//!
//! - **Down**: `Fabric` answers for a port; `Carrier` carries the messages of queue pairs, for
//!   a worker that polls them by `poll`.
//! - **Up**, to the engine: a message came, or a part of one (`Responder::receive` and
//!   `Qp::take_datagram`; the answer is a value, for the fabric to bring back); how a message fared,
//!   at once (`SendQueue::finish`, `fail`) or later (`take_begun`, then `complete_done` or
//!   `fail_begun`).
//! - **Override**: a fabric may carry out work requests its own way, as long as they mean the same.
//!   The fast path of [`local`] is that.
//!
//! Everything on the data path is dispatched statically: a worker has the `Carrier` of its fabric
//! by type. [`registry`] knows which VM has which GID; all fabrics of a process share it.
//!
//! Two fabrics show that the line is in the right place. [`local`] has both queue pairs in this
//! process: it calls the responder and has its answer at once. `wire` has packets, many of them
//! under way, and learns of their fate later.
#[cfg(test)]
mod differential;
pub mod iwarp;
pub mod local;
pub mod registry;
#[cfg(test)]
mod scenario;
pub(crate) mod wire;

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::verbs::qp_state;

use crate::engine::message::Answer;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::engine::Budget;
use crate::verbs::cq::L2Source;
use crate::verbs::WcError;

/// Work requests that are flushed in one poll.
const FLUSH: u32 = 64;

/// What a fabric says of a VM's port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    /// Messages can leave and reach it.
    pub up: bool,
    /// The largest path MTU that it can have (`mtu`).
    pub max_mtu: u8,
    /// The path MTU that it has now (`mtu`), which datagrams must fit.
    pub active_mtu: u8,
}

/// What a fabric answers for the port of a VM.
pub(crate) trait Fabric {
    /// The port of a VM.
    fn port(&self, vm: &Vm) -> Port;

    /// The port of a VM went down or came up. No message leaves or reaches a port that is down once
    /// all read sections that had begun before are over.
    fn set_link(&self, vm: &Vm, up: bool);

    /// The address of the link layer that messages from an entry of the GID table have: that which
    /// the driver gave it.
    fn l2_address(&self, tables: &Tables, sgid_index: usize) -> Option<L2Source> {
        tables.sources.get(sgid_index).copied()
    }

    /// The numbers that queue pairs of this fabric may have.
    fn qp_numbers(&self) -> RangeInclusive<u32>;
}

/// What a fabric does for the queue pairs that a worker polls. It has what the worker lends it for
/// one poll; tables and queue pairs live for `'a`, the read section.
pub(crate) trait Carrier<'a> {
    /// Sends: begins work requests, carries their messages, and ends those whose fate is known, at
    /// time `now` (nanoseconds) and within `budget`.
    fn send(
        &mut self,
        sq: &mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        budget: Budget,
    ) -> Polled;

    /// Sends what a queue pair that sends no messages yet has to answer to its peer. Returns whether
    /// there is more.
    fn answer(&mut self, _: &'a Tables, _: &'a Arc<Qp>, _: u64) -> bool {
        false
    }

    /// Flushes what this fabric has taken out of the send queue of a queue pair that is in error.
    /// Nothing of it reaches the peer from now on.
    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>, now: u64);
}

/// What takes datagrams whose destination nobody in this process has.
pub(crate) trait Elsewhere {
    /// Sends the datagram of the work request in progress, at time `now`.
    ///
    /// # Errors
    /// If the work request fails.
    fn send_datagram(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> Result<(), WcError>;

    /// Takes over the reliable datagram of the work request in progress, at time `now`, and ends it
    /// by `finish_begun` or `fail_begun` later. Returns false if the account of its VM has no room.
    fn take_reliable_datagram(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> bool;

    /// Flushes the reliable datagrams of a queue pair that were taken over.
    fn flush_reliable_datagrams(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>);
}

/// Sees messages that stay in this process.
pub(crate) trait Observe {
    /// The message of the work request in progress, or its next part, had this answer at time `now`,
    /// nanoseconds. What it moved is still where it was.
    fn answered(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        answer: Answer,
        now: u64,
    );
}

/// Polls a queue pair of the VM of `tables`, by its state.
#[inline]
pub(crate) fn poll<'a>(
    carrier: &mut impl Carrier<'a>,
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    now: u64,
    budget: Budget,
) -> Polled {
    // The start of a stopped VM schedules all its queue pairs.
    if !tables.running || qp.dead.load(Ordering::SeqCst) {
        return Polled::Idle;
    }
    if qp.cq_errored() {
        qp.fail();
    }
    match qp.state() {
        qp_state::RTS | qp_state::SQD => {
            if qp.awaited.load(Ordering::SeqCst) {
                qp.responder().receives_posted(qp);
            }
            let mut send_queue = qp.send_queue();
            if send_queue.is_stale() {
                return flush_stale(carrier, &mut send_queue, tables, qp, now);
            }
            carrier.send(&mut send_queue, tables, qp, now, budget)
        }
        qp_state::SQE => {
            let mut send_queue = qp.send_queue();
            carrier.flush(&mut send_queue, tables, qp, now);
            again(send_queue.flush(tables, qp, FLUSH))
        }
        qp_state::ERR => {
            let mut send_queue = qp.send_queue();
            carrier.flush(&mut send_queue, tables, qp, now);
            let sends = send_queue.flush(tables, qp, FLUSH);
            drop(send_queue);
            let receives = qp.responder().flush(tables, qp, FLUSH);
            again(sends || receives)
        }
        _ => {
            if qp.awaited.load(Ordering::SeqCst) {
                qp.responder().receives_posted(qp);
            }
            again(qp.state() == qp_state::RTR && carrier.answer(tables, qp, now))
        }
    }
}

/// Flushes some of what was posted before a queue pair left SQE.
#[cold]
#[inline(never)]
fn flush_stale<'a>(
    carrier: &mut impl Carrier<'a>,
    send_queue: &mut SendQueue,
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    now: u64,
) -> Polled {
    carrier.flush(send_queue, tables, qp, now);
    send_queue.flush_stale(tables, qp, FLUSH);
    Polled::Again
}

fn again(more: bool) -> Polled {
    if more {
        Polled::Again
    } else {
        Polled::Idle
    }
}
