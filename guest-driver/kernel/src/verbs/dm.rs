// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Device memory. A device in another process of the host has none of its own that would be nearer:
//! it is memory of the guest's kernel, mapped to the process.
use super::{Mr, Pd};
use crate::device::{Device, DM_TOTAL};
use crate::pages::PageTree;
use crate::sys::alloc::{Arc, Array};
use crate::sys::dma::DmaPage;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{MmapEntry, UserContext};
use virtio_rdma_driver_core::abi;
use virtio_rdma_spec::command::RegMr;
use virtio_rdma_spec::PAGE_SIZE;

/// Device memory.
pub(crate) struct Dm {
    length: u64,
    /// Goes first: nobody maps it any more.
    entry: MmapEntry,
    pages: Arc<Array<DmaPage>>,
}

impl Dm {
    /// How to map it.
    pub(crate) fn response(&self) -> abi::DmResponse {
        abi::DmResponse {
            offset: self.entry.offset(),
            length: self.length,
        }
    }

    /// What it takes of [`DM_TOTAL`].
    fn size(&self) -> u64 {
        (self.pages.len() as u64).saturating_mul(PAGE_SIZE)
    }
}

/// Allocates device memory, aligned to two to the power of `log_align`.
pub(crate) fn alloc_dm(
    device: &Device,
    context: UserContext,
    length: u64,
    log_align: u32,
    flags: u32,
) -> Result<Dm> {
    if flags != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if length == 0 || log_align > PAGE_SIZE.trailing_zeros() {
        return Err(Errno::EINVAL);
    }
    if length > DM_TOTAL {
        return Err(Errno::ENOMEM);
    }
    let size = length
        .checked_next_multiple_of(PAGE_SIZE)
        .ok_or(Errno::EINVAL)?;
    if !device.dm_budget().take(size) {
        return Err(Errno::ENOMEM);
    }
    let make = || {
        let count = (size / PAGE_SIZE) as usize;
        let pages = Arc::new(Array::new(count, |_| DmaPage::new(device.dma()))?)?;
        Ok(Dm {
            length,
            entry: MmapEntry::shared_pages(context, &pages)?,
            pages,
        })
    };
    make().inspect_err(|_| device.dm_budget().give_back(size))
}

/// Frees device memory; no region is left on it.
pub(crate) fn dealloc_dm(device: &Device, dm: &Dm) {
    device.dm_budget().give_back(dm.size());
}

/// Registers a part of device memory.
pub(crate) fn reg_dm_mr(
    device: &Device,
    pd: &Pd,
    dm: &Dm,
    offset: u64,
    length: u64,
    access: u32,
) -> Result<Mr> {
    let end = offset.checked_add(length).ok_or(Errno::EINVAL)?;
    if end > dm.length {
        return Err(Errno::EINVAL);
    }
    // A region without bytes is on a page, too: the last one, if it is at the end.
    let first = offset.min(dm.length.saturating_sub(1)) / PAGE_SIZE;
    let last = end.div_ceil(PAGE_SIZE).max(first.saturating_add(1)) as usize;
    let first = first as usize;
    let pages = dm.pages.get(first..last).ok_or(Errno::EINVAL)?;
    let tree = PageTree::of_pages(device.dma(), pages)?;
    let body = RegMr {
        pd: pd.handle,
        access: Mr::known_access(access)?,
        iova: 0,
        length,
        offset: offset % PAGE_SIZE,
        pages: tree.list(),
        key: device.next_key(),
        ..Default::default()
    };
    Mr::register(device, &body, None)
}
