// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Registrations by work requests: REG_MR (specification: "Fast registration").
//!
//! A list may be long. It is read a part in each poll; the region changes at the end, in one
//! step.
use std::sync::atomic::AtomicU32;

use virtio_rdma_spec::ring::FastReg;
use virtio_rdma_spec::verbs::{access, vendor_err, wc_status};

use super::queue_pair::Qp;
use super::send_queue::SendQueue;
use super::tables::Tables;
use super::Budget;
use crate::memory::{self, Form, GuestMemory, ListReader};
use crate::verbs::keys::KeyError;
use crate::verbs::mr::{check_access, Backing, Mr, Range};
use crate::verbs::WcError;

/// A registration of which the list is being read.
#[derive(Debug)]
pub(super) struct Registration {
    form: Form,
    range: Range,
    reader: ListReader,
}

/// Why there is no registration: a `vendor_err`.
struct Refused(u8);

impl From<KeyError> for Refused {
    fn from(key: KeyError) -> Self {
        Self(key.0)
    }
}

impl From<memory::Error> for Refused {
    fn from(error: memory::Error) -> Self {
        match error {
            memory::Error::NotGuestMemory(_) => Self(vendor_err::MEMORY_GONE),
            memory::Error::NoMemory => Self(vendor_err::NO_MEMORY),
            _ => Self(vendor_err::PAGE_LIST),
        }
    }
}

impl SendQueue {
    /// Carries out the REG_MR in progress, as far as the budget goes. Returns whether all is done.
    ///
    /// # Errors
    /// Status and reason, where it is not possible: nothing has changed then.
    pub(super) fn register(
        &mut self,
        tables: &Tables,
        qp: &Qp,
        reg: &FastReg,
        budget: &mut Budget,
    ) -> Result<bool, WcError> {
        self.try_register(tables, qp, reg, budget)
            .map_err(|Refused(reason)| WcError::new(wc_status::MW_BIND_ERR, reason))
    }

    fn try_register(
        &mut self,
        tables: &Tables,
        qp: &Qp,
        reg: &FastReg,
        budget: &mut Budget,
    ) -> Result<bool, Refused> {
        let memory = tables.memory.as_ref();
        let memory = memory.ok_or(Refused(vendor_err::MEMORY_GONE))?;
        let present = |registration: &Registration| registration.reader.reads(memory);
        // If the memory changed meanwhile, all is read anew.
        let mut registration = match self.registration.take().filter(|r| present(r)) {
            Some(registration) => registration,
            None => Box::new(Registration::begin(tables, qp, reg, memory)?),
        };
        let size = registration.form.entry_size();
        let most = (budget.bytes / size).max(1);
        let taken = registration.reader.step(most as usize)?;
        budget.bytes = budget.bytes.saturating_sub(taken as u64 * size);
        if !registration.reader.done() {
            self.registration = Some(registration);
            return Ok(false);
        }
        registration.finish(tables, qp, reg)?;
        Ok(true)
    }
}

impl Registration {
    fn begin(
        tables: &Tables,
        qp: &Qp,
        reg: &FastReg,
        memory: &GuestMemory,
    ) -> Result<Self, Refused> {
        let privileged = tables
            .keys
            .region(reg.lkey)
            .is_some_and(|mr| mr.pd == qp.pd && matches!(mr.backing, Backing::Physical(_)));
        if !privileged {
            return Err(Refused(vendor_err::PRIVILEGE));
        }
        let region = tables.keys.check_register(reg.key, qp.pd)?;
        let (form, max_pages) = (region.form, region.max_pages);
        if reg.access & access::PHYSICAL != 0 || check_access(qp.vm.features(), reg.access).is_err()
        {
            return Err(Refused(vendor_err::KEY_ACCESS));
        }
        let range = Range {
            iova: reg.iova,
            length: reg.length,
            offset: reg.offset.into(),
        };
        let range = range
            .check(reg.access)
            .map_err(|_| Refused(vendor_err::KEY_RANGE))?;
        form.check(&reg.pages)?;
        let fits = form == Form::Blocks || range.has_pages(&reg.pages);
        if reg.pages.count > max_pages || !fits {
            return Err(Refused(vendor_err::PAGE_LIST));
        }
        Ok(Self {
            form,
            range,
            reader: ListReader::new(memory, &reg.pages, form, &tables.footprint)?,
        })
    }

    /// All was read: the region is what it is to be.
    fn finish(self, tables: &Tables, qp: &Qp, reg: &FastReg) -> Result<(), Refused> {
        let Self {
            form,
            range,
            reader,
        } = self;
        let backing = Backing::from(reader.finish()?);
        if let Backing::Blocks(blocks) = &backing {
            if !blocks.fit(range.offset, range.length) {
                return Err(Refused(vendor_err::PAGE_LIST));
            }
        }
        // It may be another region than at the beginning.
        let region = tables.keys.check_register(reg.key, qp.pd)?;
        if region.form != form || region.max_pages < reg.pages.count {
            return Err(Refused(vendor_err::PAGE_LIST));
        }
        tables.keys.register(Mr {
            key: reg.key,
            pd: qp.pd,
            access: reg.access,
            iova: range.iova,
            length: range.length,
            offset: range.offset,
            windows: AtomicU32::new(0),
            backing,
        })?;
        Ok(())
    }
}
