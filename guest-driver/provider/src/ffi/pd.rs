// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Domains: protection domains, parent domains, thread domains, XRC domains.

use core::ffi::c_int;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use virtio_rdma_driver_core::abi::AllocPdResponse;

use super::buffer::Allocator;
use super::lock::SpinLock;
use super::{context, object, status, sys, zeroed, Errno, With, EINVAL, EOPNOTSUPP};

/// Something that must not go away yet.
const EBUSY: Errno = Errno(libc::EBUSY);

/// A protection domain or parent domain: the part that libibverbs knows, and ours.
#[repr(C)]
struct Pd {
    base: sys::ibv_pd,
    /// Parent domains of this protection domain.
    parents: AtomicUsize,
    /// What a parent domain is made of.
    parent: Option<Parent>,
}

struct Parent {
    pd: *mut sys::ibv_pd,
    td: *mut sys::ibv_td,
    /// Shared with the queues that have memory of it.
    allocator: Option<Arc<Allocator>>,
}

/// A thread domain: what belongs to it is used by one thread, and needs no locks.
#[repr(C)]
struct Td {
    base: sys::ibv_td,
    /// Parent domains of this thread domain.
    parents: AtomicUsize,
}

impl Pd {
    fn new(base: sys::ibv_pd, parent: Option<Parent>) -> Box<Self> {
        Box::new(Self {
            base,
            parents: AtomicUsize::new(0),
            parent,
        })
    }
}

/// The allocator for queues created with a domain, if it has one.
///
/// # Safety
/// The domain is null, or ours and alive.
pub unsafe fn allocator(pd: *mut sys::ibv_pd) -> Option<Arc<Allocator>> {
    // SAFETY: the domain is the start of a `Pd`.
    let pd = unsafe { pd.cast::<Pd>().as_ref() }?;
    pd.parent.as_ref()?.allocator.clone()
}

/// Whether the domain is a parent domain.
///
/// # Safety
/// The domain is ours and alive.
pub unsafe fn is_parent(pd: *mut sys::ibv_pd) -> bool {
    // SAFETY: the domain is the start of a `Pd`.
    unsafe { &*pd.cast::<Pd>() }.parent.is_some()
}

/// Whether what is created with a domain belongs to a thread domain.
///
/// # Safety
/// The domain is null, or ours and alive.
pub unsafe fn single_threaded(pd: *mut sys::ibv_pd) -> bool {
    // SAFETY: the domain is the start of a `Pd`.
    let parent = unsafe { pd.cast::<Pd>().as_ref() }.and_then(|pd| pd.parent.as_ref());
    parent.is_some_and(|parent| !parent.td.is_null())
}

/// A lock for an object, or none if only one thread uses it.
///
/// # Safety
/// If `single`, the application has promised that, as with a thread domain.
pub unsafe fn lock<T>(single: bool, value: T) -> SpinLock<T> {
    if single {
        // SAFETY: as the caller says.
        unsafe { SpinLock::unlocked(value) }
    } else {
        SpinLock::new(value)
    }
}

pub unsafe extern "C" fn alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    let mut cmd: sys::ibv_alloc_pd = zeroed();
    let mut response = With::<sys::ib_uverbs_alloc_pd_resp, _>::new([0; AllocPdResponse::SIZE]);
    let mut pd = Pd::new(zeroed(), None);
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_alloc_pd(
            context,
            &mut pd.base,
            &mut cmd,
            cmd_size,
            (&raw mut response).cast(),
            response_size,
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(pd).cast()))
}

pub unsafe extern "C" fn import_pd(
    context: *mut sys::ibv_context,
    handle: u32,
) -> *mut sys::ibv_pd {
    // The kernel looks at the handle whenever it is used.
    let mut base: sys::ibv_pd = zeroed();
    base.context = context;
    base.handle = handle;
    Box::into_raw(Pd::new(base, None)).cast()
}

pub unsafe extern "C" fn unimport_pd(pd: *mut sys::ibv_pd) {
    // SAFETY: objects are ours and alive; made by import_pd.
    drop(unsafe { Box::from_raw(pd.cast::<Pd>()) });
}

pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_parent_domain_init_attr,
) -> *mut sys::ibv_pd {
    const ALLOCATORS: u32 = sys::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
    const PD_CONTEXT: u32 = sys::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    // SAFETY: objects are ours and alive, and so are the attributes.
    let attr = unsafe { &*attr };
    if attr.pd.is_null() {
        return object(Err(EINVAL));
    }
    // Such as memory that a confidential VM shares with its host.
    if attr.comp_mask & !(ALLOCATORS | PD_CONTEXT) != 0 {
        return object(Err(EOPNOTSUPP));
    }
    let functions = if attr.comp_mask & ALLOCATORS == 0 {
        None
    } else {
        match (attr.alloc, attr.free) {
            (Some(alloc), Some(free)) => Some((alloc, free)),
            _ => return object(Err(EINVAL)),
        }
    };
    let mut base: sys::ibv_pd = zeroed();
    base.context = context;
    // SAFETY: as before. For the kernel a parent domain is its protection domain.
    base.handle = unsafe { (*attr.pd).handle };
    let pd = Box::into_raw(Pd::new(base, None));
    let allocator = functions.map(|(alloc, free)| {
        Arc::new(Allocator {
            pd: pd.cast(),
            context: if attr.comp_mask & PD_CONTEXT == 0 {
                core::ptr::null_mut()
            } else {
                attr.pd_context
            },
            alloc,
            free,
        })
    });
    // SAFETY: the domain is new, and nobody else knows it; the others are ours and alive.
    unsafe {
        (*attr.pd.cast::<Pd>())
            .parents
            .fetch_add(1, Ordering::Relaxed);
        if let Some(td) = attr.td.cast::<Td>().as_ref() {
            td.parents.fetch_add(1, Ordering::Relaxed);
        }
        (*pd).parent = Some(Parent {
            pd: attr.pd,
            td: attr.td,
            allocator,
        });
    }
    pd.cast()
}

pub unsafe extern "C" fn dealloc_pd(base: *mut sys::ibv_pd) -> c_int {
    let pd = base.cast::<Pd>();
    // SAFETY: objects are ours and alive; made by alloc_pd or alloc_parent_domain.
    let dealloc = || unsafe {
        if (*pd).parents.load(Ordering::Relaxed) > 0 {
            return Err(EBUSY);
        }
        match &mut (*pd).parent {
            None => {
                let rc = sys::ibv_cmd_dealloc_pd(base);
                Errno::check(context::destroyed((*base).context, rc))?;
            }
            Some(parent) => {
                // A queue that has memory of the application has its allocator, too.
                if parent
                    .allocator
                    .as_mut()
                    .is_some_and(|a| Arc::get_mut(a).is_none())
                {
                    return Err(EBUSY);
                }
                (*parent.pd.cast::<Pd>())
                    .parents
                    .fetch_sub(1, Ordering::Relaxed);
                if let Some(td) = parent.td.cast::<Td>().as_ref() {
                    td.parents.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        drop(Box::from_raw(pd));
        Ok(())
    };
    status(dealloc())
}

pub unsafe extern "C" fn alloc_td(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_td_init_attr,
) -> *mut sys::ibv_td {
    // SAFETY: the attributes are the application's.
    if unsafe { (*attr).comp_mask } != 0 {
        return object(Err(EINVAL));
    }
    let mut td = Box::new(Td {
        base: zeroed(),
        parents: AtomicUsize::new(0),
    });
    td.base.context = context;
    Box::into_raw(td).cast()
}

pub unsafe extern "C" fn dealloc_td(td: *mut sys::ibv_td) -> c_int {
    let td = td.cast::<Td>();
    // SAFETY: objects are ours and alive; made by alloc_td.
    unsafe {
        if (*td).parents.load(Ordering::Relaxed) > 0 {
            return libc::EBUSY;
        }
        drop(Box::from_raw(td));
    }
    0
}

pub unsafe extern "C" fn open_xrcd(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_xrcd_init_attr,
) -> *mut sys::ibv_xrcd {
    let mut cmd: sys::ibv_open_xrcd = zeroed();
    let mut response: sys::ib_uverbs_open_xrcd_resp = zeroed();
    let mut xrcd: Box<sys::verbs_xrcd> = Box::new(zeroed());
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive, and so are the attributes; all is of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_open_xrcd(
            context,
            &mut *xrcd,
            size_of::<sys::verbs_xrcd>() as c_int,
            attr,
            &mut cmd,
            cmd_size,
            &mut response,
            response_size,
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(xrcd).cast()))
}

pub unsafe extern "C" fn close_xrcd(xrcd: *mut sys::ibv_xrcd) -> c_int {
    let xrcd = xrcd.cast::<sys::verbs_xrcd>();
    // SAFETY: objects are ours and alive; made by open_xrcd.
    unsafe {
        let rc = sys::ibv_cmd_close_xrcd(xrcd);
        let rc = context::destroyed((*xrcd).xrcd.context, rc);
        if rc == 0 {
            drop(Box::from_raw(xrcd));
        }
        rc
    }
}
