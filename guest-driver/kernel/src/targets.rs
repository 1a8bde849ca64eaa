// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! What events of the device are for: objects of the core, with the data path of those that users
//! in the kernel have.
use crate::connections::QpReferences;
use crate::kverbs::{KernelCq, KernelQp, KernelSrq};
use crate::sys::alloc::Arc;
use crate::sys::rdma::{CqHandle, QpHandle, SrqHandle};
use virtio_rdma_spec::event::event_type;

/// The completion queue that events are for.
pub(crate) struct CqTarget {
    cq: CqHandle,
    kernel: Option<Arc<KernelCq>>,
}

/// The queue pair that events and completions are for.
pub(crate) struct QpTarget {
    qp: QpHandle,
    kernel: Option<Arc<KernelQp>>,
    /// Of an XRC target: its domain, as the device calls it.
    xrcd: Option<u32>,
    /// Of one of iWARP.
    references: Option<QpReferences>,
}

/// The shared receive queue that events and completions are for.
pub(crate) struct SrqTarget {
    srq: SrqHandle,
    kernel: Option<Arc<KernelSrq>>,
}

impl CqTarget {
    pub(crate) fn new(cq: CqHandle) -> Self {
        Self { cq, kernel: None }
    }

    /// With the data path of a queue of the kernel.
    pub(crate) fn served_by(self, kernel: Option<Arc<KernelCq>>) -> Self {
        Self { kernel, ..self }
    }

    /// Tells its user that there is a completion. Any context.
    pub(crate) fn complete(&self) {
        if let Some(kernel) = &self.kernel {
            kernel.event_received();
        }
        self.cq.complete();
    }

    /// The device was lost, and there may be something to flush: tells its user, like
    /// [`Self::complete`]. One in the kernel is told if it asked to be; what a process asked for is
    /// in its memory, and a word too many does it no harm.
    pub(crate) fn flushed(&self) {
        if self
            .kernel
            .as_ref()
            .is_none_or(|kernel| kernel.take_armed())
        {
            self.complete();
        }
    }

    /// Takes back what an event had the core do for a user in the kernel: poll the queue. Process
    /// context, while the queue still is there and its user is not told of events any longer.
    pub(crate) fn cancel_polling(&self) {
        if self.kernel.is_some() {
            self.cq.cancel_polling();
        }
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        self.cq.event(event_type);
    }
}

impl QpTarget {
    pub(crate) fn new(qp: QpHandle) -> Self {
        Self {
            qp,
            kernel: None,
            xrcd: None,
            references: None,
        }
    }

    /// With the data path of a queue pair of the kernel.
    pub(crate) fn served_by(self, kernel: Option<Arc<KernelQp>>) -> Self {
        Self { kernel, ..self }
    }

    /// With the domain of an XRC target.
    pub(crate) fn in_domain(self, xrcd: Option<u32>) -> Self {
        Self { xrcd, ..self }
    }

    /// With a count of those who refer to it.
    pub(crate) fn referenced(self, references: Option<QpReferences>) -> Self {
        Self { references, ..self }
    }

    /// Who refers to it, if it is one of iWARP.
    pub(crate) fn references(&self) -> Option<&QpReferences> {
        self.references.as_ref()
    }

    /// The domain, if it is an XRC target.
    pub(crate) fn xrcd(&self) -> Option<u32> {
        self.xrcd
    }

    /// The data path, if it is a queue pair of the kernel.
    pub(crate) fn kernel(&self) -> Option<&KernelQp> {
        self.kernel.as_deref()
    }

    /// The queue pair of the core.
    pub(crate) fn handle(&self) -> &QpHandle {
        &self.qp
    }

    /// The device was lost: receives that are shared are not flushed, and users wait for the word
    /// that no more of them is used. Process context.
    pub(crate) fn lost(&self) {
        if self.qp.has_srq() {
            self.event(event_type::QP_LAST_WQE_REACHED);
        }
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        self.qp.event(event_type);
    }
}

impl SrqTarget {
    /// With the data path of a queue of the kernel.
    pub(crate) fn new(srq: SrqHandle, kernel: Option<Arc<KernelSrq>>) -> Self {
        Self { srq, kernel }
    }

    /// The data path, if it is a queue of the kernel.
    pub(crate) fn kernel(&self) -> Option<&KernelSrq> {
        self.kernel.as_deref()
    }

    /// Tells its user of an asynchronous event. Process context.
    pub(crate) fn event(&self, event_type: u16) {
        self.srq.event(event_type);
    }
}
