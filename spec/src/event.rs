// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device writes to the event queues (specification: "Completion events", "Asynchronous
//! events").
use crate::{constants, layouts};

layouts! {
    /// A completion event: an armed completion queue has a completion.
    pub struct CompletionEvent(8) {
        /// Completion queue.
        0 => cqn: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// An asynchronous event.
    pub struct AsyncEvent(16) {
        /// `event_type`.
        0 => event_type: u16,
        /// Reserved, zero.
        2 => reserved0: u16,
        /// Queue pair, completion queue, SRQ or port the event is about.
        4 => number: u32,
        /// `verbs::vendor_err`: the reason, where the event is an error.
        8 => reason: u32,
        /// Reserved, zero.
        12 => reserved1: u32,
    }
}

constants! {
    /// Asynchronous events; the numbers are those of verbs.
    pub mod event_type: u16 {
        /// Completion queue error (overflow): `number` is the CQ.
        CQ_ERR = 0,
        /// Fatal error of a queue pair: `number` is the QP.
        QP_FATAL = 1,
        /// Invalid request seen by the responder: `number` is the QP.
        QP_REQ_ERR = 2,
        /// Access violation seen by the responder: `number` is the QP.
        QP_ACCESS_ERR = 3,
        /// First message on a queue pair in the RTR state: `number` is the QP.
        COMM_EST = 4,
        /// The send queue is drained: `number` is the QP.
        SQ_DRAINED = 5,
        /// The device failed and needs a reset.
        DEVICE_FATAL = 8,
        /// The port became active: `number` is the port.
        PORT_ACTIVE = 9,
        /// The port went down: `number` is the port.
        PORT_ERR = 10,
        /// Shared receive queue error: `number` is the SRQ.
        SRQ_ERR = 14,
        /// Shared receive queue limit reached: `number` is the SRQ.
        SRQ_LIMIT_REACHED = 15,
        /// The last receive work request of a queue pair with an SRQ was consumed: `number` is the
        /// QP.
        QP_LAST_WQE_REACHED = 16,
        /// Events of connections wait (IW_NEXT_EVENT); `number` is zero.
        IW_EVENT = 32,
    }
}
