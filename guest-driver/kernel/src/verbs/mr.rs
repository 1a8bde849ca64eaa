// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Memory regions.
use super::Pd;
use crate::device::Device;
use crate::pages::PageTree;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{Umem, ACCESS_OPTIONAL};
use virtio_rdma_spec::command::{opcode, RegMr, RegMrResponse};
use virtio_rdma_spec::verbs::access;

/// A memory region.
pub(crate) struct Mr {
    lkey: u32,
    rkey: u32,
    /// None for the region of all memory.
    _umem: Option<Umem>,
}

impl Mr {
    /// Local and remote key.
    pub(crate) fn keys(&self) -> (u32, u32) {
        (self.lkey, self.rkey)
    }
}

/// Flags that the core lets through and the device may know; optional ones that it cannot are left out.
/// All memory is not for processes.
const KNOWN_ACCESS: u32 = (access::RELAXED_ORDERING | !ACCESS_OPTIONAL) & !access::PHYSICAL;

/// Registers `length` bytes at `start` of the current process, which work requests name by addresses from `virt` on.
pub(crate) fn reg_mr(
    device: &Device,
    pd: &Pd,
    start: u64,
    length: u64,
    virt: u64,
    access: u32,
) -> Result<Mr> {
    let access = access & KNOWN_ACCESS;
    if length == 0 || access & access::ON_DEMAND != 0 {
        return Err(if length == 0 {
            Errno::EINVAL
        } else {
            Errno::EOPNOTSUPP
        });
    }
    let umem = Umem::new(device.ib(), start, length, access)?;
    /// Page sizes that a page list can have: 2^12 to 2^31.
    const SIZES: u64 = 0xffff_f000;
    // The device is told the offset in the first page: it need not be that of `virt`.
    let page_size = umem.best_page_size(device.limits().page_size_cap & SIZES, start);
    if !page_size.is_power_of_two() {
        return Err(Errno::EINVAL);
    }
    let tree = PageTree::of_umem(device.dma(), &umem, page_size)?;
    let body = RegMr {
        pd: pd.handle,
        access,
        iova: virt,
        length,
        offset: start & page_size.wrapping_sub(1),
        pages: tree.list(),
        key: device.next_key(),
        reserved: [0; 7],
    };
    let RegMrResponse { lkey, rkey } = device.command(opcode::REG_MR, &body)?;
    Ok(Mr {
        lkey,
        rkey,
        _umem: Some(umem),
    })
}

/// Registers all memory of the guest, for users in the kernel: addresses are those for DMA.
pub(crate) fn get_dma_mr(device: &Device, pd: &Pd, access: u32) -> Result<Mr> {
    let body = RegMr {
        pd: pd.handle,
        access: (access & KNOWN_ACCESS) | access::PHYSICAL,
        key: device.next_key(),
        ..Default::default()
    };
    let RegMrResponse { lkey, rkey } = device.command(opcode::REG_MR, &body)?;
    Ok(Mr {
        lkey,
        rkey,
        _umem: None,
    })
}

/// Deregisters a region. The device answers when the last access has ended.
pub(crate) fn dereg_mr(device: &Device, mr: &Mr) -> Result<()> {
    device.destroy(opcode::DEREG_MR, mr.lkey)
}

/// Takes a region back whose registration could not be completed.
pub(crate) fn discard_mr(device: &Device, mr: &Mr) {
    device.must_destroy(opcode::DEREG_MR, mr.lkey);
}
