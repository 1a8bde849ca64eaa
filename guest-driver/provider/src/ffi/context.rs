// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contexts, and what needs no queue: device and port attributes, protection domains, memory regions.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr;
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{AllocContextResponse, AllocPdResponse};
use virtio_rdma_driver_core::Doorbell;
use virtio_rdma_spec::config::MAX_QUEUES;
use virtio_rdma_spec::doorbell::BLOCK_SIZE;
use virtio_rdma_spec::PAGE_SIZE;

use super::buffer::{Mapping, Notify, Words};
use super::{cq, object, put_text, qp, status, sys, zeroed, Errno, Table, With, EINVAL};

/// A context: the part that libibverbs knows, and ours.
#[repr(C)]
pub struct Context {
    base: sys::verbs_context,
    shared: Arc<Shared>,
}

/// What the queue pairs of a context keep alive: memory shared with the workers.
#[derive(Debug)]
pub struct Shared {
    response: AllocContextResponse,
    doorbells: Mapping,
    notify: Mapping,
    status: Mapping,
}

/// Limits of what can be created.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub max_inline: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_cqe: u32,
}

impl Shared {
    fn map(fd: c_int, response: AllocContextResponse) -> Result<Self, Errno> {
        let queues = response.num_doorbell_queues as usize;
        let indices = queues + response.first_doorbell_queue as usize;
        if queues == 0 || indices > MAX_QUEUES.into() {
            return Err(EINVAL);
        }
        let page = PAGE_SIZE as usize;
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        Ok(Self {
            doorbells: Mapping::device(
                queues * BLOCK_SIZE,
                read | write,
                fd,
                response.doorbell_offset,
            )?,
            notify: Mapping::device(queues * page, write, fd, response.notify_offset)?,
            status: Mapping::device(page, read, fd, response.status_offset)?,
            response,
        })
    }

    pub fn limits(&self) -> Limits {
        Limits {
            max_inline: self.response.max_inline,
            max_qp_wr: self.response.max_qp_wr,
            max_sge: self.response.max_sge,
            max_cqe: self.response.max_cqe,
        }
    }

    /// The doorbell of a slot of a doorbell queue, and how to wake its worker.
    ///
    /// # Safety
    /// This context outlives both.
    pub unsafe fn doorbell(
        &self,
        queue: u32,
        slot: u32,
    ) -> Result<(Doorbell<Words>, Notify), Errno> {
        if queue >= self.response.num_doorbell_queues {
            return Err(EINVAL);
        }
        let offset =
            queue as usize * PAGE_SIZE as usize + self.response.notify_page_offset as usize;
        let index = self.response.first_doorbell_queue + queue;
        let index = index.try_into().map_err(|_| EINVAL)?;
        // SAFETY: the mappings are part of the context; the status page is only loaded from.
        unsafe {
            let (blocks, status) = (Words::new(&self.doorbells), Words::new(&self.status));
            let notify = Notify::new(&self.notify, offset, index).ok_or(EINVAL)?;
            Ok((Doorbell::new(blocks, status, queue, slot)?, notify))
        }
    }
}

/// What we share in a context.
///
/// # Safety
/// The context is ours and alive.
pub unsafe fn shared(context: *mut sys::ibv_context) -> Arc<Shared> {
    // SAFETY: the context is part of a `Context`, made by alloc_context; `shared` never changes.
    unsafe { Arc::clone(&(*container(context)).shared) }
}

fn container(context: *mut sys::ibv_context) -> *mut Context {
    const OFFSET: usize = offset_of!(Context, base) + offset_of!(sys::verbs_context, context);
    context.wrapping_byte_sub(OFFSET).cast()
}

static OPS: Table<sys::verbs_context_ops> = Table(sys::verbs_context_ops {
    alloc_pd: Some(alloc_pd),
    cq_event: Some(cq::cq_event),
    create_cq: Some(cq::create_cq),
    create_cq_ex: Some(cq::create_cq_ex),
    create_qp: Some(qp::create_qp),
    create_qp_ex: Some(qp::create_qp_ex),
    dealloc_pd: Some(dealloc_pd),
    dereg_mr: Some(dereg_mr),
    destroy_cq: Some(cq::destroy_cq),
    destroy_qp: Some(qp::destroy_qp),
    free_context: Some(free_context),
    modify_qp: Some(qp::modify_qp),
    poll_cq: Some(cq::poll_cq),
    post_recv: Some(qp::post_recv),
    post_send: Some(qp::post_send),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    query_qp: Some(qp::query_qp),
    reg_mr: Some(reg_mr),
    req_notify_cq: Some(cq::req_notify_cq),
    ..zeroed()
});

pub unsafe extern "C" fn alloc_context(
    device: *mut sys::ibv_device,
    fd: c_int,
    _private: *mut c_void,
) -> *mut sys::verbs_context {
    // libibverbs wants the offset of its part in ours as a pointer; the memory comes from calloc.
    let offset = ptr::without_provenance_mut(offset_of!(Context, base));
    // SAFETY: as declared: the size and the offset are those of `Context`.
    let context: *mut Context = unsafe {
        sys::_verbs_init_and_alloc_context(
            device,
            fd,
            size_of::<Context>(),
            offset,
            sys::RDMA_DRIVER_UNKNOWN,
        )
    }
    .cast();
    if context.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: just allocated and initialized.
    let result = unsafe { set_up(context, fd) };
    // SAFETY: as before.
    let base = unsafe { &raw mut (*context).base };
    if result.is_err() {
        // SAFETY: undoes what _verbs_init_and_alloc_context did; `shared` was not written.
        unsafe {
            sys::verbs_uninit_context(base);
            libc::free(context.cast());
        }
    }
    object(result.map(|()| base))
}

/// # Safety
/// The part of libibverbs is initialized, ours is not.
unsafe fn set_up(context: *mut Context, fd: c_int) -> Result<(), Errno> {
    let mut cmd: sys::ibv_get_context = zeroed();
    let mut response =
        With::<sys::ib_uverbs_get_context_resp, _>::new([0; AllocContextResponse::SIZE]);
    // SAFETY: command and response are of these sizes; writing our part leaves nothing undropped.
    unsafe {
        let base = &raw mut (*context).base;
        let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
        let resp = (&raw mut response).cast();
        #[cfg(pabi = "34")]
        let rc = sys::ibv_cmd_get_context(base, &mut cmd, cmd_size, resp, response_size);
        #[cfg(pabi = "65")]
        let rc = sys::ibv_cmd_get_context(
            base,
            &mut cmd,
            cmd_size,
            ptr::null_mut(),
            resp,
            response_size,
        );
        Errno::check(rc)?;
        let shared = Shared::map(fd, AllocContextResponse::from_bytes(&response.driver))?;
        (&raw mut (*context).shared).write(Arc::new(shared));
        sys::verbs_set_ops(base, &raw const OPS.0);
    }
    Ok(())
}

unsafe extern "C" fn free_context(context: *mut sys::ibv_context) {
    let context = container(context);
    // SAFETY: objects are ours and alive; this is the end of it. The memory came from calloc.
    unsafe {
        sys::verbs_uninit_context(&raw mut (*context).base);
        (&raw mut (*context).shared).drop_in_place();
        libc::free(context.cast());
    }
}

unsafe extern "C" fn query_device_ex(
    context: *mut sys::ibv_context,
    input: *const sys::ibv_query_device_ex_input,
    attr: *mut sys::ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let mut response: sys::ib_uverbs_ex_query_device_resp = zeroed();
    let mut size = size_of_val(&response);
    // SAFETY: objects are ours and alive; the attributes are at least the original ones, which libibverbs checks.
    unsafe {
        let rc = sys::ibv_cmd_query_device_any(
            context,
            input,
            attr,
            attr_size,
            &mut response,
            &mut size,
        );
        if rc != 0 {
            return rc;
        }
        let version = response.base.fw_ver;
        let text = format!(
            "{}.{}.{}",
            (version >> 32) & 0xffff,
            (version >> 16) & 0xffff,
            version & 0xffff
        );
        put_text(&mut (*attr).orig_attr.fw_ver, &text);
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut sys::ibv_context,
    port: u8,
    attr: *mut sys::ibv_port_attr,
) -> c_int {
    let mut cmd: sys::ibv_query_port = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive.
    unsafe { sys::ibv_cmd_query_port(context, port, attr, &mut cmd, size) }
}

unsafe extern "C" fn alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    let mut cmd: sys::ibv_alloc_pd = zeroed();
    let mut response = With::<sys::ib_uverbs_alloc_pd_resp, _>::new([0; AllocPdResponse::SIZE]);
    let mut pd = Box::new(zeroed());
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    let rc = unsafe {
        sys::ibv_cmd_alloc_pd(
            context,
            &mut *pd,
            &mut cmd,
            cmd_size,
            (&raw mut response).cast(),
            response_size,
        )
    };
    object(Errno::check(rc).map(|()| Box::into_raw(pd)))
}

unsafe extern "C" fn dealloc_pd(pd: *mut sys::ibv_pd) -> c_int {
    // SAFETY: objects are ours and alive; made by alloc_pd.
    unsafe {
        let rc = sys::ibv_cmd_dealloc_pd(pd);
        if rc == 0 {
            drop(Box::from_raw(pd));
        }
        rc
    }
}

unsafe extern "C" fn reg_mr(
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
    // The part of libibverbs is the first.
    const _: () = assert!(offset_of!(sys::verbs_mr, ibv_mr) == 0);
    object(Errno::check(rc).map(|()| Box::into_raw(mr).cast()))
}

unsafe extern "C" fn dereg_mr(mr: *mut sys::verbs_mr) -> c_int {
    // SAFETY: objects are ours and alive; made by reg_mr.
    unsafe {
        let rc = sys::ibv_cmd_dereg_mr(mr);
        if rc == 0 {
            drop(Box::from_raw(mr));
        }
        status(Errno::check(rc))
    }
}
