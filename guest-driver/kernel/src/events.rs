// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Events of the device: completions in interrupt context, asynchronous events in a work item.
//!
//! An event may name an object that has just been destroyed; the device does not wait for buffers
//! that it has already used. Such events find nothing in the tables, and nothing happens.
use crate::device::Device;
use virtio_rdma_spec::config::{CONTROL_QUEUE, EVENT_QUEUE, FIRST_COMPLETION_QUEUE};
use virtio_rdma_spec::event::{event_type, AsyncEvent, CompletionEvent};

impl Device {
    /// A queue has used buffers. Interrupt context; never twice at a time for one queue.
    pub(crate) fn interrupt(&self, queue: u32) {
        match u16::try_from(queue) {
            Ok(CONTROL_QUEUE) => self.commands().interrupt(),
            Ok(EVENT_QUEUE) => {
                // Handlers of asynchronous events want process context.
                self.schedule_async();
            }
            Ok(queue) => {
                let index = queue.wrapping_sub(FIRST_COMPLETION_QUEUE);
                if let Some(queue) = self.completion_queue(index) {
                    queue.drain(|bytes| {
                        let event = CompletionEvent::from_bytes(bytes);
                        self.cqs().with(event.cqn, |cq| cq.complete());
                    });
                }
            }
            Err(_) => {}
        }
    }

    /// Delivers asynchronous events; the work item of the event queue.
    pub(crate) fn deliver_async(&self) {
        if self.is_closing() {
            return;
        }
        self.async_queue()
            .drain(|bytes| self.async_event(&AsyncEvent::from_bytes(bytes)));
    }

    fn async_event(&self, event: &AsyncEvent) {
        let kind = event.event_type;
        match kind {
            event_type::CQ_ERR => self.cqs().with(event.number, |cq| cq.event(kind)),
            event_type::QP_FATAL
            | event_type::QP_REQ_ERR
            | event_type::QP_ACCESS_ERR
            | event_type::COMM_EST
            | event_type::SQ_DRAINED
            | event_type::QP_LAST_WQE_REACHED => self.qps().with(event.number, |qp| qp.event(kind)),
            event_type::SRQ_ERR | event_type::SRQ_LIMIT_REACHED => {
                self.srqs().with(event.number, |srq| srq.event(kind));
            }
            event_type::DEVICE_FATAL => self.fail_later(),
            event_type::PORT_ACTIVE | event_type::PORT_ERR => self.config_changed(),
            event_type::IW_EVENT => self.schedule_connection_events(),
            _ => self
                .virtio()
                .error("an event of unknown type", i64::from(kind)),
        }
    }
}
