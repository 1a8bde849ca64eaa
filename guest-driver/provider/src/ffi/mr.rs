// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory regions, memory windows, device memory.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::offset_of;
use core::slice;
use core::sync::atomic::{AtomicU32, Ordering};

use virtio_rdma_driver_core::abi::{self, DmResponse};
use virtio_rdma_spec::PAGE_SIZE;

use super::buffer::Mapping;
use super::ioctl::{Attrs, DmBytes};
use super::{context, object, status, sys, zeroed, Errno, EINVAL, EOPNOTSUPP};

// The part of libibverbs is the first.
const _: () = assert!(offset_of!(sys::verbs_mr, ibv_mr) == 0);

pub unsafe extern "C" fn reg_mr(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut sys::ibv_mr {
    let mut cmd: sys::ibv_reg_mr = zeroed();
    let mut response: sys::ib_uverbs_reg_mr_resp = zeroed();
    let mut mr: Box<sys::verbs_mr> = Box::new(zeroed());
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_reg_mr(
            pd,
            addr,
            length,
            hca_va,
            access,
            &mut *mr,
            &mut cmd,
            cmd_size,
            &mut response,
            response_size,
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(mr).cast()))
}

pub unsafe extern "C" fn rereg_mr(
    mr: *mut sys::verbs_mr,
    flags: c_int,
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let mut cmd: sys::ibv_rereg_mr = zeroed();
    let mut response: sys::ib_uverbs_rereg_mr_resp = zeroed();
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_rereg_mr(
            mr,
            flags as u32,
            addr,
            length,
            addr as u64,
            access,
            pd,
            &mut cmd,
            cmd_size,
            &mut response,
            response_size,
        )
    };
    status(Errno::check(rc))
}

/// The null region exists on the device, always: there is nothing to register.
pub unsafe extern "C" fn alloc_null_mr(pd: *mut sys::ibv_pd) -> *mut sys::ibv_mr {
    // SAFETY: objects are ours and alive.
    let context = unsafe { (*pd).context };
    // SAFETY: as before.
    let Some(lkey) = unsafe { context::shared(context) }.null_lkey() else {
        return object(Err(EOPNOTSUPP));
    };
    let mut mr: Box<sys::verbs_mr> = Box::new(zeroed());
    mr.mr_type = sys::IBV_MR_TYPE_NULL_MR;
    mr.ibv_mr.context = context;
    mr.ibv_mr.pd = pd;
    mr.ibv_mr.length = usize::MAX;
    mr.ibv_mr.lkey = lkey;
    Box::into_raw(mr).cast()
}

pub unsafe extern "C" fn dereg_mr(mr: *mut sys::verbs_mr) -> c_int {
    // SAFETY: objects are ours and alive; made by one of the functions here.
    unsafe {
        if (*mr).mr_type != sys::IBV_MR_TYPE_NULL_MR {
            let rc = context::destroyed((*mr).ibv_mr.context, sys::ibv_cmd_dereg_mr(mr));
            if rc != 0 {
                return rc;
            }
        }
        drop(Box::from_raw(mr));
    }
    0
}

pub unsafe extern "C" fn import_mr(pd: *mut sys::ibv_pd, handle: u32) -> *mut sys::ibv_mr {
    let mut mr: Box<sys::verbs_mr> = Box::new(zeroed());
    // SAFETY: objects are ours and alive.
    let rc = unsafe { sys::ibv_cmd_query_mr(pd, &mut *mr, handle) };
    object(Errno::check(rc).map(|()| Box::into_raw(mr).cast()))
}

pub unsafe extern "C" fn unimport_mr(mr: *mut sys::ibv_mr) {
    // SAFETY: objects are ours and alive; made by import_mr.
    drop(unsafe { Box::from_raw(mr.cast::<sys::verbs_mr>()) });
}

pub unsafe extern "C" fn alloc_mw(
    pd: *mut sys::ibv_pd,
    mw_type: sys::ibv_mw_type,
) -> *mut sys::ibv_mw {
    let mut cmd: sys::ibv_alloc_mw = zeroed();
    let mut response: sys::ib_uverbs_alloc_mw_resp = zeroed();
    let mut mw: Box<sys::ibv_mw> = Box::new(zeroed());
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_alloc_mw(
            pd,
            mw_type,
            &mut *mw,
            &mut cmd,
            cmd_size,
            &mut response,
            response_size,
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(mw)))
}

pub unsafe extern "C" fn dealloc_mw(mw: *mut sys::ibv_mw) -> c_int {
    // SAFETY: objects are ours and alive; made by alloc_mw.
    unsafe {
        let rc = context::destroyed((*mw).context, sys::ibv_cmd_dealloc_mw(mw));
        if rc == 0 {
            drop(Box::from_raw(mw));
        }
        rc
    }
}

/// Device memory: the part that libibverbs knows, and ours.
#[repr(C)]
struct Dm {
    base: sys::verbs_dm,
    memory: Mapping,
    /// Length as it was allocated, bytes.
    length: u64,
}

// The part of libibverbs is the first.
const _: () = assert!(offset_of!(sys::verbs_dm, dm) == 0);

/// Maps device memory.
///
/// # Safety
/// The context is ours and alive.
unsafe fn map_dm(
    context: *mut sys::ibv_context,
    mut base: sys::verbs_dm,
    response: &DmBytes,
) -> Result<*mut Dm, Errno> {
    let response = DmResponse::from_bytes(response);
    let mapped = usize::try_from(response.length)
        .ok()
        .and_then(|length| length.checked_next_multiple_of(PAGE_SIZE as usize))
        .ok_or(EINVAL)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: as the caller says.
    let fd = unsafe { (*context).cmd_fd };
    let memory = Mapping::device(mapped, protection, fd, response.offset)?;
    base.dm.context = context;
    base.dm.memcpy_to_dm = Some(memcpy_to_dm);
    base.dm.memcpy_from_dm = Some(memcpy_from_dm);
    Ok(Box::into_raw(Box::new(Dm {
        base,
        memory,
        length: response.length,
    })))
}

pub unsafe extern "C" fn alloc_dm(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_alloc_dm_attr,
) -> *mut sys::ibv_dm {
    let mut base: sys::verbs_dm = zeroed();
    let mut response: DmBytes = [0; DmResponse::SIZE];
    let mut attrs = Attrs::<1>::new(
        sys::UVERBS_OBJECT_DM as u16,
        sys::UVERBS_METHOD_DM_ALLOC as u16,
    );
    attrs.output(0, abi::DRIVER_ATTR, &mut response);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            return object(Err(EINVAL));
        }
        let rc = sys::ibv_cmd_alloc_dm(context, attr, &mut base, attrs.link());
        if let Err(error) = Errno::check(rc) {
            return object(Err(error));
        }
        let dm = map_dm(context, base, &response);
        if dm.is_err() {
            sys::ibv_cmd_free_dm(&mut base);
        }
        object(dm).cast()
    }
}

pub unsafe extern "C" fn free_dm(dm: *mut sys::ibv_dm) -> c_int {
    let dm = dm.cast::<Dm>();
    // SAFETY: objects are ours and alive; made by alloc_dm.
    unsafe {
        let base = &raw mut (*dm).base;
        let rc = context::destroyed((*base).dm.context, sys::ibv_cmd_free_dm(base));
        if rc == 0 {
            drop(Box::from_raw(dm));
        }
        rc
    }
}

pub unsafe extern "C" fn import_dm(
    context: *mut sys::ibv_context,
    handle: u32,
) -> *mut sys::ibv_dm {
    let mut response: DmBytes = [0; DmResponse::SIZE];
    let mut attrs = Attrs::<2>::new(sys::UVERBS_OBJECT_DM as u16, abi::DM_QUERY_METHOD);
    attrs.object(0, abi::DRIVER_ATTR, handle);
    attrs.output(1, abi::DM_QUERY_RESPONSE_ATTR, &mut response);
    // SAFETY: objects are ours and alive; the response is still there.
    unsafe {
        if let Err(error) = attrs.execute(context) {
            return object(Err(error));
        }
        let mut base: sys::verbs_dm = zeroed();
        base.handle = handle;
        base.dm.handle = handle;
        base.dm.comp_mask = sys::IBV_DM_MASK_HANDLE;
        object(map_dm(context, base, &response)).cast()
    }
}

pub unsafe extern "C" fn unimport_dm(dm: *mut sys::ibv_dm) {
    // SAFETY: objects are ours and alive; made by import_dm.
    drop(unsafe { Box::from_raw(dm.cast::<Dm>()) });
}

pub unsafe extern "C" fn reg_dm_mr(
    pd: *mut sys::ibv_pd,
    dm: *mut sys::ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut sys::ibv_mr {
    let mut mr: Box<sys::verbs_mr> = Box::new(zeroed());
    // SAFETY: objects are ours and alive.
    let rc = unsafe {
        let dm = &raw mut (*dm.cast::<Dm>()).base;
        sys::ibv_cmd_reg_dm_mr(
            pd,
            dm,
            offset,
            length,
            access,
            &mut *mr,
            core::ptr::null_mut(),
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(mr).cast()))
}

impl Dm {
    /// Size and alignment of what is copied to and from device memory.
    const UNIT: usize = size_of::<AtomicU32>();

    /// A range of the memory; offset and length are multiples of 4.
    fn range(&self, offset: u64, length: usize) -> Result<&[AtomicU32], Errno> {
        let end = offset.checked_add(length as u64).ok_or(EINVAL)?;
        if end > self.length || offset % Self::UNIT as u64 != 0 || length % Self::UNIT != 0 {
            return Err(EINVAL);
        }
        // SAFETY: within the mapping, which is page aligned and at least `length` long; only used
        // as atomics.
        Ok(unsafe {
            let start = self.memory.address().wrapping_byte_add(offset as usize);
            slice::from_raw_parts(start.cast(), length / Self::UNIT)
        })
    }
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut sys::ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let range = unsafe { &*dm.cast::<Dm>() }.range(offset, length);
    status(range.map(|range| {
        for (i, to) in range.iter().enumerate() {
            // SAFETY: the application's memory of that length.
            let value = unsafe { from.cast::<u32>().add(i).read_unaligned() };
            to.store(value, Ordering::Relaxed);
        }
    }))
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut sys::ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let range = unsafe { &*dm.cast::<Dm>() }.range(offset, length);
    status(range.map(|range| {
        for (i, from) in range.iter().enumerate() {
            let value = from.load(Ordering::Relaxed);
            // SAFETY: the application's memory of that length.
            unsafe { to.cast::<u32>().add(i).write_unaligned(value) };
        }
    }))
}
