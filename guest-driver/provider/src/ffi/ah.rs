// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Address handles. The kernel checks and resolves an address; then it is ours, and goes into each
//! work request.

use core::ffi::c_int;

use virtio_rdma_driver_core::abi::CreateAhResponse;
use virtio_rdma_spec::ring::UdWqe;

use super::{context, object, sys, zeroed, Errno, With};

/// An address handle: the part that libibverbs knows, and ours.
#[repr(C)]
struct Ah {
    base: sys::ibv_ah,
    address: UdWqe,
}

/// A work request with the address of a handle and all else zero.
///
/// # Safety
/// The handle is ours and alive.
#[inline(always)]
pub unsafe fn address(ah: *mut sys::ibv_ah) -> UdWqe {
    // SAFETY: the handle is the start of an `Ah`; our part does not change.
    unsafe { (*ah.cast::<Ah>()).address }
}

pub unsafe extern "C" fn create_ah(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_ah_attr,
) -> *mut sys::ibv_ah {
    let mut response = With::<sys::ib_uverbs_create_ah_resp, _>::new([0; CreateAhResponse::SIZE]);
    let size = size_of_val(&response);
    let mut ah = Box::new(Ah {
        base: zeroed(),
        address: UdWqe::default(),
    });
    // SAFETY: objects are ours and alive, and so are the attributes; the response is of this size.
    let (rc, attr) = unsafe {
        let resp = (&raw mut response).cast();
        let rc = sys::ibv_cmd_create_ah(pd, &mut ah.base, attr, resp, size);
        (rc, &*attr)
    };
    object(Errno::check(rc).map(|()| {
        ah.address = UdWqe {
            // SAFETY: a GID is 16 bytes, in both forms.
            dgid: unsafe { attr.grh.dgid.raw },
            flow_label: attr.grh.flow_label & 0xf_ffff,
            sgid_index: attr.grh.sgid_index.into(),
            sl: attr.sl & 0xf,
            traffic_class: attr.grh.traffic_class,
            hop_limit: attr.grh.hop_limit,
            dmac: CreateAhResponse::from_bytes(&response.driver).dmac,
            ..UdWqe::default()
        };
        Box::into_raw(ah).cast()
    }))
}

pub unsafe extern "C" fn destroy_ah(ah: *mut sys::ibv_ah) -> c_int {
    // SAFETY: objects are ours and alive; made by create_ah.
    unsafe {
        let rc = context::destroyed((*ah).context, sys::ibv_cmd_destroy_ah(ah));
        if rc == 0 {
            drop(Box::from_raw(ah.cast::<Ah>()));
        }
        rc
    }
}
