// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Protection domains, memory regions, windows, device memory. The safety requirements are those of
//! [`super`].
use super::{create, creating, destroy, detail, device, fill, write_attr, Base, Object};
use crate::device::Device;
use crate::pages::Kind;
use crate::sys::alloc::Box;
use crate::sys::bindings::*;
use crate::sys::error::{code, Errno, Result};
use crate::sys::rdma::{SgList, Udata, UserContext};
use crate::verbs::{self, Change, UserRange};
use core::ffi::c_int;
use core::ptr::NonNull;
use virtio_rdma_spec::command::rereg_flag;

pub(super) unsafe extern "C" fn alloc_pd(pd: *mut ib_pd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(pd, |device, _| {
            let udata = Udata::new(udata);
            creating(device, udata, verbs::alloc_pd(device, udata))
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ib_pd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(pd, verbs::dealloc_pd))
    })
}

/// A pointer to the new region, or an error as the kernel encodes it in pointers.
pub(super) unsafe extern "C" fn reg_user_mr(
    pd: *mut ib_pd,
    start: u64,
    length: u64,
    virt: u64,
    access: c_int,
    #[cfg(has_dmah)] dmah: *mut ib_dmah,
    udata: *mut ib_udata,
) -> *mut ib_mr {
    #[cfg(has_dmah)]
    if !dmah.is_null() {
        return pointer(Err(Errno::EOPNOTSUPP));
    }
    let place = UserRange {
        start,
        length,
        virt,
    };
    // SAFETY: see the module.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            Udata::new(udata).none()?;
            let data = verbs::reg_mr(device, Object::data(pd), place, access as u32)?;
            new_mr(device, data, virt, length)
        })
    };
    pointer(made)
}

/// A region of all memory, for users in the kernel.
pub(super) unsafe extern "C" fn get_dma_mr(pd: *mut ib_pd, access: c_int) -> *mut ib_mr {
    // SAFETY: see the module.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            let made = verbs::get_dma_mr(device, Object::data(pd), access as u32);
            let data = creating(device, Udata::none_of_kernel(), made)?;
            new_mr(device, data, 0, u64::MAX)
        })
    };
    pointer(made)
}

/// A region for fast registration.
pub(super) unsafe extern "C" fn alloc_mr(
    pd: *mut ib_pd,
    mr_type: ib_mr_type,
    max_pages: u32,
) -> *mut ib_mr {
    // SAFETY: see the module.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            let kind = match mr_type {
                IB_MR_TYPE_MEM_REG => Kind::Pages,
                IB_MR_TYPE_SG_GAPS => Kind::Blocks,
                _ => return Err(Errno::EOPNOTSUPP),
            };
            let made = verbs::alloc_mr(device, Object::data(pd), kind, max_pages);
            let fast = creating(device, Udata::none_of_kernel(), made)?;
            new_mr(device, verbs::Mr::Fast(fast), 0, 0)
        })
    };
    pointer(made)
}

/// Maps a list into a region; returns how many entries are mapped to their end. Any context.
pub(super) unsafe extern "C" fn map_mr_sg(
    mr: *mut ib_mr,
    list: *mut scatterlist,
    entries: c_int,
    offset: *mut core::ffi::c_uint,
) -> c_int {
    // SAFETY: see the module; the list is mapped, and the offset is null or a place of the
    // caller's.
    let mapped = unsafe {
        let object = NonNull::new(mr).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let device = device((*mr).device)?;
            let data: &verbs::Mr = Object::data(object);
            let fast = data.fast().ok_or(Errno::EINVAL)?;
            let skip = offset.as_ref().map_or(0, |offset| *offset);
            let list = SgList::new(list, entries);
            let extent: verbs::Extent = fast.map(device, &list, skip, (*mr).page_size.into())?;
            ((*mr).iova, (*mr).length) = (extent.start, extent.length);
            if let Some(offset) = offset.as_mut() {
                *offset = extent.rest;
            }
            Ok(extent.entries)
        })
    };
    match mapped {
        Ok(entries) => c_int::try_from(entries).unwrap_or(c_int::MAX),
        Err(error) => error.code(),
    }
}

/// The memory of a region is ours to allocate; without any, the region has to go again. The core
/// fills in the rest.
fn new_mr(device: &Device, data: verbs::Mr, iova: u64, length: u64) -> Result<Box<Object<ib_mr>>> {
    let mut object = Object::<ib_mr>::allocate(data).map_err(|data| {
        verbs::discard_mr(device, &data);
        Errno::ENOMEM
    })?;
    // SAFETY: just written.
    let (lkey, rkey) = unsafe { object.data.assume_init_ref() }.keys();
    let base = &mut object.base;
    (base.lkey, base.rkey) = (lkey, rkey);
    (base.iova, base.length) = (iova, length);
    Ok(object)
}

/// As the kernel returns pointers that may be errors.
fn pointer<B: Base>(made: Result<Box<Object<B>>>) -> *mut B {
    match made {
        Ok(object) => object.into_raw().cast(),
        Err(error) => error.code() as isize as *mut B,
    }
}

/// Changes a region in place: returns null, or an error as the kernel encodes it in pointers.
pub(super) unsafe extern "C" fn rereg_user_mr(
    mr: *mut ib_mr,
    flags: c_int,
    start: u64,
    length: u64,
    virt: u64,
    access: c_int,
    pd: *mut ib_pd,
    udata: *mut ib_udata,
) -> *mut ib_mr {
    let flags = flags as u32;
    // SAFETY: see the module; the core lets nobody else change the region meanwhile.
    let result = unsafe {
        let object = NonNull::new(mr).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let device = device((*mr).device)?;
            Udata::new(udata).none()?;
            let pd = match flags & rereg_flag::PD {
                0 => None,
                _ => Some(Object::data(NonNull::new(pd).ok_or(Errno::EINVAL)?)),
            };
            let place = UserRange {
                start,
                length,
                virt,
            };
            let change = Change {
                place: (flags & rereg_flag::TRANSLATION != 0).then_some(place),
                pd,
                access: (flags & rereg_flag::ACCESS != 0).then_some(access as u32),
            };
            let data: &verbs::Mr = Object::data(object);
            verbs::rereg_mr(device, data, &change)?;
            ((*mr).lkey, (*mr).rkey) = data.keys();
            Ok(())
        })
    };
    match result {
        Ok(()) => core::ptr::null_mut(),
        Err(error) => error.code() as isize as *mut ib_mr,
    }
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut ib_mr, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module; the object was made by new_mr.
    code(unsafe {
        Udata::new(udata).none().and_then(|()| {
            destroy(mr, verbs::dereg_mr)?;
            Object::free(mr);
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn alloc_mw(mw: *mut ib_mw, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module; the core set the domain and the type.
    code(unsafe {
        create(mw, |device, _| {
            let pd = NonNull::new((*mw).pd).ok_or(Errno::EINVAL)?;
            let mw_type = u8::try_from((*mw).type_).map_err(|_| Errno::EINVAL)?;
            let data = verbs::alloc_mw(device, Object::data(pd), mw_type, Udata::new(udata))?;
            (*mw).rkey = data.rkey();
            Ok(data)
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ib_mw) -> c_int {
    // SAFETY: see the module.
    code(unsafe { destroy(mw, verbs::dealloc_mw) })
}

/// A pointer to the new memory, or an error as the kernel encodes it in pointers.
pub(super) unsafe extern "C" fn alloc_dm(
    ib: *mut ib_device,
    context: *mut ib_ucontext,
    attr: *mut ib_dm_alloc_attr,
    attrs: *mut uverbs_attr_bundle,
) -> *mut ib_dm {
    // SAFETY: see the module; the core fills the structure in after this returns.
    let made = unsafe {
        device(ib).and_then(|device| {
            let context = UserContext(NonNull::new(context).ok_or(Errno::EINVAL)?);
            let attr = &*attr;
            let data = verbs::alloc_dm(device, context, attr.length, attr.alignment, attr.flags)?;
            let response = data.response().to_bytes();
            let give_back = |data: &verbs::Dm, error| {
                verbs::dealloc_dm(device, data);
                error
            };
            write_attr(attrs, &response).map_err(|error| give_back(&data, error))?;
            Object::<ib_dm>::allocate(data).map_err(|data| give_back(&data, Errno::ENOMEM))
        })
    };
    pointer(made)
}

pub(super) unsafe extern "C" fn dealloc_dm(
    dm: *mut ib_dm,
    _attrs: *mut uverbs_attr_bundle,
) -> c_int {
    // SAFETY: see the module; the object was made by alloc_dm.
    code(unsafe {
        let end = |device: &Device, data: &verbs::Dm| {
            verbs::dealloc_dm(device, data);
            Ok(())
        };
        destroy(dm, end).map(|()| Object::free(dm))
    })
}

/// A pointer to the new region, or an error as the kernel encodes it in pointers.
pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ib_pd,
    dm: *mut ib_dm,
    attr: *mut ib_dm_mr_attr,
    _attrs: *mut uverbs_attr_bundle,
) -> *mut ib_mr {
    // SAFETY: see the module.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            let dm = Object::data(NonNull::new(dm).ok_or(Errno::EINVAL)?);
            let (attr, pd) = (&*attr, Object::data(pd));
            let (offset, length, access) = (attr.offset, attr.length, attr.access_flags);
            let data = verbs::reg_dm_mr(device, pd, dm, offset, length, access)?;
            new_mr(device, data, 0, length)
        })
    };
    pointer(made)
}

/// Tells a process that imports device memory how to map it; for the method of the driver in
/// glue.c.
///
/// # Safety
/// `dm` must be device memory that was allocated; `to` has room for the response.
#[no_mangle]
unsafe extern "C" fn vrdma_dm_response(dm: *mut ib_dm, to: *mut vrdma_dm_info) {
    if let Some(dm) = NonNull::new(dm) {
        // SAFETY: the caller's.
        unsafe {
            let response = Object::data(dm).response();
            (*to).bytes = response.to_bytes();
        }
    }
}

pub(super) unsafe extern "C" fn fill_res_mr_entry(msg: *mut sk_buff, mr: *mut ib_mr) -> c_int {
    let Some(mr) = NonNull::new(mr) else {
        return 0;
    };
    // SAFETY: see the module; the core holds the object.
    unsafe {
        let data: &verbs::Mr = Object::data(mr);
        match data.pages() {
            Some((pages, shift)) => {
                fill(msg, [detail(c"pages", pages), detail(c"page_shift", shift)])
            }
            None => 0,
        }
    }
}
