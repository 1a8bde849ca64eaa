// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The transport: requester and responder as state machines that do no I/O and read no clock.
//!
//! The [`requester`] takes entries from a send queue and makes messages of them; a fabric carries
//! them; the [`responder`] checks and places them and answers; the requester completes. Time is a
//! parameter.

pub mod cursor;
pub mod message;
pub mod operation;
pub mod queue;
pub mod requester;
pub mod responder;

use std::sync::Arc;

use virtio_rdma_spec::event::AsyncEvent;
use virtio_rdma_spec::ring::Cqe;

use crate::verbs::cq::{Cq, Pushed, Source};
use crate::verbs::tables::Tables;

/// What a queue pair may do in a turn, before the next gets its own.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Messages.
    pub messages: u32,
    /// Payload, bytes.
    pub bytes: u64,
}

impl Budget {
    /// What was done since it was `whole`.
    #[inline(always)]
    #[must_use]
    pub fn spent(self, whole: Self) -> Self {
        Self {
            messages: whole.messages - self.messages,
            bytes: whole.bytes - self.bytes,
        }
    }
}

/// That of a queue pair while others may wait.
pub const SHARE: Budget = Budget {
    messages: 32,
    bytes: 64 * 1024,
};
/// That of a queue pair while no other waits: it is looked for others, and for the time, only so
/// often.
pub const LONE_SHARE: Budget = Budget {
    messages: 96,
    bytes: 1 << 20,
};
/// Messages of this length and more are copied past the caches: they would evict all that is in
/// them, and gain nothing.
pub const LARGE: u64 = 8 << 20;

/// Writes a completion to a queue of the VM of `tables`, with all that follows from it.
pub(crate) fn complete(tables: &Tables, cq: &Arc<Cq>, cqe: &Cqe, solicited: bool) {
    complete_from(tables, cq, cqe, &Source::default(), solicited);
}

/// The same, of a datagram from `source`.
pub(crate) fn complete_from(
    tables: &Tables,
    cq: &Arc<Cq>,
    cqe: &Cqe,
    source: &Source,
    solicited: bool,
) {
    settle(tables, cq, cq.push_from(cqe, source, solicited));
}

/// Does what follows from a completion that was pushed.
pub(crate) fn settle(tables: &Tables, cq: &Arc<Cq>, pushed: Pushed) {
    match pushed {
        Pushed::Quiet | Pushed::Dropped => {}
        Pushed::Event => notify(tables, cq),
        Pushed::Held => cq.hold(),
        Pushed::Error(reason) => {
            raise(
                tables,
                virtio_rdma_spec::event::event_type::CQ_ERR,
                cq.number,
                reason,
            );
            for number in cq.queue_pairs().iter() {
                if let Some(qp) = tables.qps.get(*number) {
                    qp.fail();
                }
            }
        }
    }
}

/// Raises the event that an armed completion queue wants.
pub(crate) fn notify(tables: &Tables, cq: &Cq) {
    if let Some(sink) = &tables.sink {
        let event = virtio_rdma_spec::event::CompletionEvent {
            cqn: cq.number,
            reserved: 0,
        };
        sink.completion(cq.vector, event);
    }
}

/// Raises an asynchronous event.
pub(crate) fn raise(tables: &Tables, event_type: u16, number: u32, reason: u8) {
    if let Some(sink) = &tables.sink {
        sink.asynchronous(AsyncEvent {
            event_type,
            number,
            reason: u32::from(reason),
            ..AsyncEvent::default()
        });
    }
}
