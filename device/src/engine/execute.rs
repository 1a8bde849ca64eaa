// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work requests that are no messages, and what others do to keys of their own VM.
use std::sync::Arc;

use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::facts::Kind;
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{access, vendor_err, wc_status};

use super::operation::Operation;
use super::queue_pair::Qp;
use super::send_queue::{Active, Polled, SendQueue};
use super::tables::Tables;
use super::Budget;
use crate::verbs::keys::KeyError;
use crate::verbs::WcError;

impl SendQueue {
    /// Carries out a work request that is no message, as far as the budget goes, and ends it.
    ///
    /// # Errors
    /// What the poll led to if it failed, or if there is more of it to do.
    pub(crate) fn execute(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        budget: &mut Budget,
    ) -> Result<(), Polled> {
        match self.carry_out(tables, qp, active, budget) {
            Ok(true) => {
                self.finish(tables, qp, active);
                Ok(())
            }
            Ok(false) => Err(Polled::Again),
            Err(error) => {
                self.fail(tables, qp, error);
                Err(Polled::Again)
            }
        }
    }

    /// Returns whether it is done.
    fn carry_out(
        &mut self,
        tables: &Tables,
        qp: &Qp,
        active: &Active,
        budget: &mut Budget,
    ) -> Result<bool, WcError> {
        let keys = &tables.keys;
        match self.operation {
            Operation::Register(reg) if active.message.kind == Kind::Register => {
                self.register(tables, qp, &reg, budget)
            }
            Operation::Bind(bind) if active.message.kind == Kind::Bind => {
                let flush = bind.access & access::FLUSH_GLOBAL != 0;
                if flush && !qp.vm.accepted(feature::FLUSH) {
                    return Err(WcError::new(wc_status::MW_BIND_ERR, vendor_err::BIND));
                }
                keys.bind(&bind, qp.pd, qp.number)
                    .map(|()| true)
                    .map_err(|key| WcError::new(wc_status::MW_BIND_ERR, key.0))
            }
            _ => keys
                .invalidate(active.message.imm, qp.pd, qp.number)
                .map(|()| true)
                .map_err(|key| WcError::new(wc_status::LOC_QP_OP_ERR, key.0)),
        }
    }

    /// The RDMA_READ_WITH_INV in progress has brought its data: the key that it was written by is
    /// of no use any longer.
    pub(crate) fn invalidate_sink(&self, tables: &Tables, qp: &Qp) -> Result<(), KeyError> {
        invalidate_sink(&self.sges, tables, qp)
    }
}

/// Invalidates the key of what a READ was brought to, which is a list of one entry.
pub(crate) fn invalidate_sink(sges: &[Sge], tables: &Tables, qp: &Qp) -> Result<(), KeyError> {
    match sges.first() {
        Some(sink) => {
            let key = sink.lkey;
            tables.keys.check_invalidate_region(key, qp.pd)?;
            tables.keys.invalidate(key, qp.pd, qp.number)
        }
        None => Ok(()),
    }
}
