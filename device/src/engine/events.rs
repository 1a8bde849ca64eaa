// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events: what a VM is told beside its completions.
use virtio_rdma_spec::event::{AsyncEvent, CompletionEvent};

use super::tables::Tables;
use crate::verbs::cq::Cq;

/// Where the events of a VM go: its event virtqueues.
pub trait EventSink: Send + Sync {
    /// Delivers a completion event to completion-event queue `vector`. If there is no buffer, it is
    /// kept until there is; one per completion queue suffices.
    fn completion(&self, vector: u16, event: CompletionEvent);
    /// Delivers an asynchronous event. If there is no buffer, it is kept until there is, within
    /// reason.
    fn asynchronous(&self, event: AsyncEvent);
    /// Drops what is kept about a completion queue, which is destroyed.
    fn forget_cq(&self, vector: u16, cqn: u32);
    /// Drops what is kept about a queue pair, which is destroyed.
    fn forget_qp(&self, qpn: u32);
    /// Drops what is kept about a shared receive queue, which is destroyed.
    fn forget_srq(&self, srqn: u32);
}

/// Raises the event that an armed completion queue wants.
pub(crate) fn notify(tables: &Tables, cq: &Cq) {
    if let Some(sink) = &tables.sink {
        let event = CompletionEvent {
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
