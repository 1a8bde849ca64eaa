// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Memory windows. Binding is a work request, and not the module's business.
use super::Pd;
use crate::device::Device;
use crate::sys::error::Result;
use crate::sys::rdma::Udata;
use virtio_rdma_spec::command::{opcode, AllocMw, HandleResponse};

/// A memory window.
pub(crate) struct Mw {
    rkey: u32,
}

impl Mw {
    /// The key that it was born with; binds change its low bits.
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

/// Allocates a window of this type, as verbs number it.
pub(crate) fn alloc_mw(device: &Device, pd: &Pd, mw_type: u8, udata: Udata<'_>) -> Result<Mw> {
    udata.none()?;
    let body = AllocMw {
        pd: pd.handle,
        mw_type,
        key: device.next_key(),
        ..Default::default()
    };
    let HandleResponse { handle, .. } = device.command(opcode::ALLOC_MW, &body)?;
    Ok(Mw { rkey: handle })
}

/// Deallocates a window. The device answers when the last access has ended.
pub(crate) fn dealloc_mw(device: &Device, mw: &Mw) -> Result<()> {
    device.destroy(opcode::DEALLOC_MW, mw.rkey)
}
