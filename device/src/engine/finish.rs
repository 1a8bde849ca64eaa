// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ends of a work request: it completes, fails, or is flushed.
use std::sync::Arc;

use virtio_rdma_spec::facts::completion_opcode;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{qp_state, vendor_err, wc_status};

use super::complete;
use super::queue_pair::Qp;
use super::send_queue::{Active, SendQueue};
use super::tables::Tables;
use crate::probes;
use crate::verbs::WcError;

impl SendQueue {
    /// The work request is done.
    pub(crate) fn finish(&mut self, tables: &Tables, qp: &Arc<Qp>, active: &Active) {
        self.active = None;
        self.queue.advance();
        complete_done(tables, qp, active);
    }

    /// Takes the work request in progress out of the queue, for a fabric that keeps what is under
    /// way itself: the next one may begin. The fabric ends it, in the order in which they began,
    /// by [`Self::finish_begun`], [`Self::fail_begun`] or [`Self::flush_begun`].
    pub(crate) fn take_begun(&mut self) {
        self.active = None;
        self.under_way += 1;
        self.queue.advance();
    }

    /// A work request that was taken out is done.
    pub(crate) fn finish_begun(&mut self, tables: &Tables, qp: &Qp, begun: &Active) {
        self.under_way = self.under_way.saturating_sub(1);
        complete_done(tables, qp, begun);
    }

    /// A work request that was taken out fails. The queue pair does so first: a driver that has the
    /// completion finds the state.
    pub(crate) fn fail_begun(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        begun: &Active,
        error: WcError,
    ) {
        self.reset_retries();
        self.under_way = self.under_way.saturating_sub(1);
        tell(qp, error);
        qp.fail_send();
        complete_failed(tables, qp, begun, error);
    }

    /// A work request that was taken out is flushed.
    pub(crate) fn flush_begun(&mut self, tables: &Tables, qp: &Qp, begun: &Active) {
        self.under_way = self.under_way.saturating_sub(1);
        complete_failed(tables, qp, begun, WcError::FLUSHED);
    }

    /// The work request in progress fails, after the queue pair, as above.
    pub(crate) fn fail(&mut self, tables: &Tables, qp: &Arc<Qp>, error: WcError) {
        self.reset_retries();
        tell(qp, error);
        qp.fail_send();
        self.complete_active(tables, qp, error);
    }

    /// Completes the work request in progress in error.
    fn complete_active(&mut self, tables: &Tables, qp: &Arc<Qp>, error: WcError) {
        self.registration = None;
        let Some(active) = self.active.take() else {
            return;
        };
        self.queue.advance();
        complete_failed(tables, qp, &active, error);
    }

    /// What is posted now is to be flushed, whatever the state: by [`Self::flush_stale`].
    pub(crate) fn outdate(&mut self) {
        self.stale = self.queue.posted(&self.buffer);
    }

    /// Whether there are work requests that are to be flushed, whatever the state.
    #[inline(always)]
    pub(crate) fn is_stale(&self) -> bool {
        self.stale != 0
    }

    /// Completes up to `budget` of these as flushed.
    pub(crate) fn flush_stale(&mut self, tables: &Tables, qp: &Arc<Qp>, budget: u32) {
        let count = self.stale.min(budget);
        let more = self.flush_posted(tables, qp, count);
        self.stale = if more { self.stale - count } else { 0 };
    }

    /// Completes up to `budget` posted work requests as flushed. Returns whether there may be more.
    pub(crate) fn flush(&mut self, tables: &Tables, qp: &Arc<Qp>, budget: u32) -> bool {
        // With us locked, it stays in this state: it may have been reset, or made ready, since the
        // caller looked.
        if !matches!(qp.state(), qp_state::ERR | qp_state::SQE) {
            return false;
        }
        self.flush_posted(tables, qp, budget)
    }

    /// Completes up to `count` posted work requests as flushed. Returns whether there may be more.
    fn flush_posted(&mut self, tables: &Tables, qp: &Arc<Qp>, count: u32) -> bool {
        self.parked = None;
        for _ in 0..count {
            if self.active.is_none() && self.fetch(tables, qp).is_none() {
                return false;
            }
            self.complete_active(tables, qp, WcError::FLUSHED);
        }
        true
    }
}

/// Counts a work request that failed, and warns of it.
fn tell(qp: &Qp, error: WcError) {
    qp.vm.count_error(qp.worker_index, error.status);
    qp.vm.warn(format_args!(
        "QP {}: {} ({})",
        qp.number,
        wc_status::name(error.status).unwrap_or("error"),
        vendor_err::name(error.vendor).unwrap_or("?")
    ));
}

/// Completes a work request that is done, if it is signaled.
#[inline]
fn complete_done(tables: &Tables, qp: &Qp, active: &Active) {
    if !active.signaled {
        return;
    }
    let cqe = Cqe {
        wr_id: active.wr_id,
        byte_len: if active.message.kind.brings() {
            u32::try_from(active.message.length).unwrap_or(u32::MAX)
        } else {
            0
        },
        qp_num: qp.number,
        wqe_index: active.index,
        opcode: completion_opcode(active.message.opcode),
        ..Cqe::default()
    };
    if let Some(cq) = &qp.send_cq {
        complete(tables, cq, &cqe, false);
    }
}

/// Completes a work request in error. Such a completion does not say what it was.
fn complete_failed(tables: &Tables, qp: &Qp, active: &Active, error: WcError) {
    probes::completion_error(qp.vm.name(), qp.number, error);
    let cqe = Cqe {
        wr_id: active.wr_id,
        qp_num: qp.number,
        wqe_index: active.index,
        vendor_err: error.vendor,
        status: error.status,
        ..Cqe::default()
    };
    if let Some(cq) = &qp.send_cq {
        complete(tables, cq, &cqe, true);
    }
}
