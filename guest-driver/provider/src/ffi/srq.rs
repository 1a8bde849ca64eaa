// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared receive queues.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr;
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{CreateSrqRequest, CreateSrqResponse, ResizeSrqRequest};
use virtio_rdma_driver_core::buffer::SrqLayout;
use virtio_rdma_driver_core::{Doorbell, SharedRecvQueue};
use virtio_rdma_spec::config::feature;

use super::buffer::{Allocator, Mapping, Notify, Resource, Words};
use super::lock::SpinLock;
use super::qp::{list, sge};
use super::{context, cq, object, pd, status, sys, zeroed, Errno, With, EINVAL, EOPNOTSUPP};

/// A shared receive queue: the part that libibverbs knows, and ours.
#[repr(C)]
struct Srq {
    base: sys::verbs_srq,
    /// The lock is for posting.
    state: SpinLock<State>,
    doorbell: Doorbell<Words>,
    notify: Notify,
    number: u32,
    /// XRC: where its receives complete. Otherwise null.
    cq: *mut sys::ibv_cq,
    max_sge: u32,
    /// Of the parent domain, if there is one: for another buffer.
    allocator: Option<Arc<Allocator>>,
    // The memory of the doorbell, so after it.
    context: Arc<context::Shared>,
}

/// What the lock of a shared receive queue protects.
#[derive(Debug)]
struct State {
    queue: SharedRecvQueue<Words>,
    // The memory of the queue, so after it.
    buffer: Mapping,
}

// The part of libibverbs is the first.
const _: () = assert!(offset_of!(sys::verbs_srq, srq) == 0 && offset_of!(Srq, base) == 0);

/// Creates a shared receive queue; `command` has the kernel create it.
///
/// # Safety
/// The objects are ours and alive.
unsafe fn create(
    pd: *mut sys::ibv_pd,
    attr: sys::ibv_srq_attr,
    cq: *mut sys::ibv_cq,
    command: impl FnOnce(
        *mut sys::verbs_srq,
        [u8; CreateSrqRequest::SIZE],
    ) -> Result<[u8; CreateSrqResponse::SIZE], Errno>,
) -> Result<*mut Srq, Errno> {
    // SAFETY: as the caller says.
    let (shared, allocator, single) = unsafe {
        let shared = context::shared((*pd).context);
        (shared, pd::allocator(pd), pd::single_threaded(pd))
    };
    let limits = shared.limits();
    if limits.max_srq_wr == 0 {
        return Err(EOPNOTSUPP);
    }
    if attr.max_wr > limits.max_srq_wr || attr.max_sge > limits.max_srq_sge {
        return Err(EINVAL);
    }
    let layout = SrqLayout::new(attr.max_wr, attr.max_sge).ok_or(EINVAL)?;
    let buffer = Mapping::queue(layout.size, allocator.as_ref(), Resource::Srq)?;
    // SAFETY: writable memory, which `Srq` keeps as long as the queue.
    let words = unsafe { Words::new(&buffer) };
    let queue = SharedRecvQueue::new(words, &layout.ring, attr.max_sge)?;
    let request = CreateSrqRequest {
        buffer: buffer.address() as u64,
        length: buffer.length() as u64,
        entries: layout.ring.entries,
        stride: layout.ring.stride,
        ring_offset: layout.ring.offset,
        reserved: 0,
    };
    // libibverbs initializes a mutex and a condition in it: it stays where it is.
    let mut srq: Box<core::mem::MaybeUninit<Srq>> = Box::new_uninit();
    let place = srq.as_mut_ptr();
    // SAFETY: the place of the first field.
    let base = unsafe { &raw mut (*place).base };
    // SAFETY: as before.
    unsafe { base.write(zeroed()) };
    let created = CreateSrqResponse::from_bytes(&command(base, request.to_bytes())?);
    // SAFETY: `Srq` keeps the context.
    let doorbell = unsafe { shared.doorbell(created.doorbell_queue, created.slot) };
    let (doorbell, notify) = match doorbell {
        Ok(doorbell) => doorbell,
        Err(error) => {
            // SAFETY: just created; nobody knows it yet.
            unsafe { sys::ibv_cmd_destroy_srq(base.cast()) };
            return Err(error);
        }
    };
    // SAFETY: all other fields are written here; the completion queue is ours and alive.
    unsafe {
        (&raw mut (*place).state).write(pd::lock(single, State { queue, buffer }));
        (&raw mut (*place).doorbell).write(doorbell);
        (&raw mut (*place).notify).write(notify);
        (&raw mut (*place).number).write(created.srqn);
        (&raw mut (*place).cq).write(cq);
        (&raw mut (*place).max_sge).write(attr.max_sge);
        (&raw mut (*place).allocator).write(allocator);
        (&raw mut (*place).context).write(shared);
        if !cq.is_null() {
            cq::attach_xrc_srq(cq);
        }
        Ok(Box::into_raw(srq.assume_init()))
    }
}

pub unsafe extern "C" fn create_srq(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_srq_init_attr,
) -> *mut sys::ibv_srq {
    // SAFETY: objects are ours and alive, and so are the attributes; command and response are of
    // these sizes.
    unsafe {
        let command = |base: *mut sys::verbs_srq, request| {
            let mut cmd = With::<sys::ibv_create_srq, _>::new(request);
            let mut response =
                With::<sys::ib_uverbs_create_srq_resp, _>::new([0; CreateSrqResponse::SIZE]);
            let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
            Errno::check(sys::ibv_cmd_create_srq(
                pd,
                base.cast(),
                attr,
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
            ))?;
            Ok(response.driver)
        };
        object(create(pd, (*attr).attr, ptr::null_mut(), command)).cast()
    }
}

pub unsafe extern "C" fn create_srq_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_srq_init_attr_ex,
) -> *mut sys::ibv_srq {
    const SUPPORTED: u32 = sys::IBV_SRQ_INIT_ATTR_TYPE
        | sys::IBV_SRQ_INIT_ATTR_PD
        | sys::IBV_SRQ_INIT_ATTR_XRCD
        | sys::IBV_SRQ_INIT_ATTR_CQ;
    const XRC: u32 = sys::IBV_SRQ_INIT_ATTR_XRCD | sys::IBV_SRQ_INIT_ATTR_CQ;
    // SAFETY: objects are ours and alive, and so are the attributes; command and response are of
    // these sizes.
    unsafe {
        let mask = (*attr).comp_mask;
        let srq_type = if mask & sys::IBV_SRQ_INIT_ATTR_TYPE == 0 {
            sys::IBV_SRQT_BASIC
        } else {
            (*attr).srq_type
        };
        let cq = match srq_type {
            _ if mask & !SUPPORTED != 0 => return object(Err(EOPNOTSUPP)),
            _ if mask & sys::IBV_SRQ_INIT_ATTR_PD == 0 => return object(Err(EINVAL)),
            sys::IBV_SRQT_BASIC => ptr::null_mut(),
            sys::IBV_SRQT_XRC
                if mask & XRC != XRC || (*attr).cq.is_null() || (*attr).xrcd.is_null() =>
            {
                return object(Err(EINVAL))
            }
            sys::IBV_SRQT_XRC => (*attr).cq,
            _ => return object(Err(EOPNOTSUPP)),
        };
        let command = |base: *mut sys::verbs_srq, request| {
            let mut cmd = With::<sys::ibv_create_xsrq, _>::new(request);
            let mut response =
                With::<sys::ib_uverbs_create_srq_resp, _>::new([0; CreateSrqResponse::SIZE]);
            let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
            Errno::check(sys::ibv_cmd_create_srq_ex(
                context,
                base,
                attr,
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
            ))?;
            Ok(response.driver)
        };
        object(create((*attr).pd, (*attr).attr, cq, command)).cast()
    }
}

pub unsafe extern "C" fn destroy_srq(srq: *mut sys::ibv_srq) -> c_int {
    // SAFETY: objects are ours and alive; made by `create`. The kernel lets go of the buffer before
    // it returns.
    unsafe {
        let cq = (*srq.cast::<Srq>()).cq;
        let rc = context::destroyed((*srq).context, sys::ibv_cmd_destroy_srq(srq));
        if rc == 0 {
            if !cq.is_null() {
                cq::detach_xrc_srq(cq);
            }
            drop(Box::from_raw(srq.cast::<Srq>()));
        }
        rc
    }
}

pub unsafe extern "C" fn modify_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
    mask: c_int,
) -> c_int {
    if mask as u32 & sys::IBV_SRQ_MAX_WR != 0 {
        // SAFETY: objects are ours and alive, and so are the attributes.
        return status(unsafe { resize(srq, attr, mask) });
    }
    let mut cmd: sys::ibv_modify_srq = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe { sys::ibv_cmd_modify_srq(srq, attr, mask, &mut cmd, size) }
}

/// Changes the size, and what else the mask says.
///
/// # Safety
/// The queue is ours and alive, and so are the attributes.
unsafe fn resize(
    base: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
    mask: c_int,
) -> Result<(), Errno> {
    // SAFETY: as the caller says; the reference covers only our part, which changes under its lock.
    let (srq, max_wr) = unsafe {
        let srq = base.cast::<Srq>();
        let parts = (
            &(*srq).state,
            (*srq).max_sge,
            &(*srq).allocator,
            &(*srq).context,
        );
        (parts, (*attr).max_wr)
    };
    let (state, max_sge, allocator, context) = srq;
    if !context.has(feature::SRQ_RESIZE) {
        return Err(EOPNOTSUPP);
    }
    if max_wr > context.limits().max_srq_wr {
        return Err(EINVAL);
    }
    let layout = SrqLayout::new(max_wr, max_sge).ok_or(EINVAL)?;
    // Nobody posts from now on, until the device has moved the entries.
    let mut state = state.lock();
    let buffer = Mapping::queue(layout.size, allocator.as_ref(), Resource::Srq)?;
    // SAFETY: writable memory, which `State` keeps as long as the queue.
    let words = unsafe { Words::new(&buffer) };
    let resized = state.queue.prepare_resize(words, &layout.ring)?;
    let request = ResizeSrqRequest {
        buffer: buffer.address() as u64,
        length: buffer.length() as u64,
        entries: layout.ring.entries,
        ring_offset: layout.ring.offset,
    };
    let mut cmd = With::<sys::ibv_modify_srq, _>::new(request.to_bytes());
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes; the command is of this size.
    Errno::check(unsafe {
        sys::ibv_cmd_modify_srq(base, attr, mask, (&raw mut cmd).cast(), size)
    })?;
    state.queue.resized(resized);
    state.buffer = buffer;
    Ok(())
}

pub unsafe extern "C" fn query_srq(srq: *mut sys::ibv_srq, attr: *mut sys::ibv_srq_attr) -> c_int {
    let mut cmd: sys::ibv_query_srq = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe { sys::ibv_cmd_query_srq(srq, attr, &mut cmd, size) }
}

pub unsafe extern "C" fn get_srq_num(srq: *mut sys::ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: objects are ours and alive; the number is the application's.
    unsafe { *number = (*srq.cast::<Srq>()).number };
    0
}

pub unsafe extern "C" fn post_srq_recv(
    srq: *mut sys::ibv_srq,
    mut wr: *mut sys::ibv_recv_wr,
    bad_wr: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    let srq = srq.cast::<Srq>();
    // SAFETY: objects are ours and alive; the references cover our part only, which does not change
    // but for the queue.
    let (state, doorbell, notify) = unsafe { (&(*srq).state, &(*srq).doorbell, &(*srq).notify) };
    let mut result = Ok(());
    let lock = state.lock();
    let mut batch = lock.queue.batch();
    // SAFETY: a list of work requests that ends with null.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: the application initialized it.
        result = unsafe { list(request.sg_list, request.num_sge) }
            .and_then(|sges| Ok(batch.push(request.wr_id, sges.iter().map(sge))?));
        if result.is_err() {
            break;
        }
        wr = request.next;
    }
    let waited_for = batch.commit();
    drop(lock);
    if waited_for && doorbell.ring() {
        notify.wake();
    }
    if result.is_err() {
        // SAFETY: the application's variable.
        unsafe { *bad_wr = wr };
    }
    status(result)
}
