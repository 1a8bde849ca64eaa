// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The engine: what a work request means, whichever fabric carries its message.
//!
//! A [`send_queue`] reads and judges entries, and completes, fails or flushes them; a fabric
//! carries the messages; the [`responder`] checks and places them and answers. All of it does no
//! I/O, writes no log and reads no clock: time is a parameter, and what it needs beyond that are
//! traits of [`vm`].

mod atomics;
mod begin;
pub(crate) mod binding;
pub mod cursor;
pub mod events;
pub(crate) mod execute;
mod finish;
#[cfg(test)]
pub(crate) mod fixture;
mod gather;
pub mod message;
pub mod operation;
pub mod path;
pub mod queue_pair;
mod register;
pub mod responder;
pub mod send_queue;
pub mod share;
pub mod tables;
pub mod vm;

use std::sync::Arc;

use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::mtu;

use self::events::{notify, raise};
use self::tables::Tables;
use crate::verbs::cq::{Cq, L2Source, Pushed};

/// The payload of a packet, bytes, for an `mtu`.
pub(crate) fn payload_of(path_mtu: u8) -> u64 {
    128 << path_mtu.clamp(mtu::MTU_256, mtu::MTU_4096)
}

/// What a queue pair may do in one poll, before the next is polled.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Messages.
    pub messages: u32,
    /// Payload, bytes.
    pub bytes: u64,
}

impl Budget {
    /// Nothing.
    pub const NONE: Self = Self {
        messages: 0,
        bytes: 0,
    };

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
pub const BUDGET: Budget = Budget {
    messages: 32,
    bytes: 64 * 1024,
};
/// That of a queue pair while no other waits: it is looked for others, and for the time, only so
/// often.
pub const LONE_BUDGET: Budget = Budget {
    messages: 96,
    bytes: 1 << 20,
};
/// Messages of this length and more are copied past the caches: they would evict all that is in
/// them, and gain nothing.
pub const LARGE: u64 = 8 << 20;

/// Writes a completion to a queue of the VM of `tables`, with all that follows from it.
pub(crate) fn complete(tables: &Tables, cq: &Arc<Cq>, cqe: &Cqe, solicited: bool) {
    complete_from(tables, cq, cqe, &L2Source::default(), solicited);
}

/// The same, of a datagram from `source`.
pub(crate) fn complete_from(
    tables: &Tables,
    cq: &Arc<Cq>,
    cqe: &Cqe,
    source: &L2Source,
    solicited: bool,
) {
    settle(tables, cq, cq.push_from(cqe, source, solicited));
}

/// Does what follows from a completion that was pushed: mostly nothing.
#[inline(always)]
pub(crate) fn settle(tables: &Tables, cq: &Arc<Cq>, pushed: Pushed) {
    if pushed != Pushed::Quiet {
        follow(tables, cq, pushed);
    }
}

#[inline(never)]
fn follow(tables: &Tables, cq: &Arc<Cq>, pushed: Pushed) {
    match pushed {
        Pushed::Quiet | Pushed::Dropped => {}
        Pushed::Event => notify(tables, cq),
        Pushed::Held => {
            if let Some(vm) = tables.vm.upgrade() {
                vm.hold(cq);
            }
        }
        Pushed::Error(reason) => {
            raise(tables, event_type::CQ_ERR, cq.number, reason);
            for number in cq.queue_pairs().iter() {
                if let Some(qp) = tables.qps.get(*number) {
                    qp.fail();
                }
            }
        }
    }
}
