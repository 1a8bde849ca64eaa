// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contexts, and device and port attributes.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr;
use std::ffi::CString;
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{self, AllocContextResponse, QueryDeviceResponse};
use virtio_rdma_driver_core::{Doorbell, StatusPage};
use virtio_rdma_spec::config::MAX_QUEUES;
use virtio_rdma_spec::doorbell::BLOCK_SIZE;
use virtio_rdma_spec::PAGE_SIZE;

use super::buffer::{Mapping, Notify, Words};
use super::ioctl::Attrs;
use super::{
    ah, cq, mr, object, pd, put_text, qp, srq, status, sys, zeroed, Errno, Table, With, EINVAL,
    EOPNOTSUPP,
};

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
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
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
            max_srq_wr: self.response.max_srq_wr,
            max_srq_sge: self.response.max_srq_sge,
        }
    }

    /// Whether the device has a feature (`config::feature`).
    pub fn has(&self, feature: u32) -> bool {
        self.response.features & 1 << feature != 0
    }

    /// The local key of the null region.
    pub fn null_lkey(&self) -> Option<u32> {
        (self.response.null_lkey != 0).then_some(self.response.null_lkey)
    }

    /// Where it says whether the device is lost.
    ///
    /// # Safety
    /// This context outlives it.
    pub unsafe fn status_page(&self) -> StatusPage<Words> {
        // SAFETY: the mapping is part of the context, and only loaded from.
        StatusPage::new(unsafe { Words::new(&self.status) })
    }

    /// Whether the device is lost: it was reset, and accesses no memory any more.
    fn is_lost(&self) -> bool {
        // SAFETY: not kept.
        unsafe { self.status_page() }.is_lost()
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

#[cfg(test)]
impl Shared {
    /// Of a device with one worker, which polls: a test that wakes it writes to a page that cannot
    /// be written to.
    pub fn fixture() -> Self {
        Self {
            response: AllocContextResponse {
                num_doorbell_queues: 1,
                ..AllocContextResponse::default()
            },
            doorbells: Mapping::fixture(BLOCK_SIZE),
            notify: Mapping::forbidden(PAGE_SIZE as usize),
            status: Mapping::fixture(PAGE_SIZE as usize),
        }
    }

    /// What the driver does when the device is lost.
    pub fn lose(&self) {
        use virtio_rdma_spec::doorbell::{worker_status, STATUS_STRIDE};
        // SAFETY: not kept; the mapping of the fixture is writable.
        let status = unsafe { Words::new(&self.status) };
        for word in status.iter().step_by(STATUS_STRIDE / 8) {
            let lost = u64::from(worker_status::LOST).to_le();
            word.store(lost, core::sync::atomic::Ordering::SeqCst);
        }
        assert!(self.is_lost());
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

/// What destroying an object comes to, when the kernel returned `rc`. Of a device that is lost the
/// kernel has destroyed all objects, and answers EIO: then the rest is to be freed here.
///
/// # Safety
/// The context is ours and alive.
pub unsafe fn destroyed(context: *mut sys::ibv_context, rc: c_int) -> c_int {
    match Errno::check(rc) {
        // SAFETY: as the caller says.
        Err(Errno(libc::EIO)) if unsafe { shared(context) }.is_lost() => 0,
        result => status(result),
    }
}

fn container(context: *mut sys::ibv_context) -> *mut Context {
    const OFFSET: usize = offset_of!(Context, base) + offset_of!(sys::verbs_context, context);
    context.wrapping_byte_sub(OFFSET).cast()
}

static OPS: Table<sys::verbs_context_ops> = Table(sys::verbs_context_ops {
    alloc_dm: Some(mr::alloc_dm),
    alloc_mw: Some(mr::alloc_mw),
    alloc_null_mr: Some(mr::alloc_null_mr),
    alloc_parent_domain: Some(pd::alloc_parent_domain),
    alloc_pd: Some(pd::alloc_pd),
    alloc_td: Some(pd::alloc_td),
    attach_mcast: Some(sys::ibv_cmd_attach_mcast),
    bind_mw: Some(qp::bind_mw),
    close_xrcd: Some(pd::close_xrcd),
    cq_event: Some(cq::cq_event),
    create_ah: Some(ah::create_ah),
    create_cq: Some(cq::create_cq),
    create_cq_ex: Some(cq::create_cq_ex),
    create_qp: Some(qp::create_qp),
    create_qp_ex: Some(qp::create_qp_ex),
    create_srq: Some(srq::create_srq),
    create_srq_ex: Some(srq::create_srq_ex),
    dealloc_mw: Some(mr::dealloc_mw),
    dealloc_pd: Some(pd::dealloc_pd),
    dealloc_td: Some(pd::dealloc_td),
    dereg_mr: Some(mr::dereg_mr),
    destroy_ah: Some(ah::destroy_ah),
    destroy_cq: Some(cq::destroy_cq),
    destroy_qp: Some(qp::destroy_qp),
    destroy_srq: Some(srq::destroy_srq),
    detach_mcast: Some(sys::ibv_cmd_detach_mcast),
    free_context: Some(free_context),
    free_dm: Some(mr::free_dm),
    get_srq_num: Some(srq::get_srq_num),
    import_dm: Some(mr::import_dm),
    import_mr: Some(mr::import_mr),
    import_pd: Some(pd::import_pd),
    modify_cq: Some(cq::modify_cq),
    modify_qp: Some(qp::modify_qp),
    modify_srq: Some(srq::modify_srq),
    open_qp: Some(qp::open_qp),
    open_xrcd: Some(pd::open_xrcd),
    poll_cq: Some(cq::poll_cq),
    post_recv: Some(qp::post_recv),
    post_send: Some(qp::post_send),
    post_srq_recv: Some(srq::post_srq_recv),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    #[cfg(pabi = "65")]
    query_port_speed: Some(sys::ibv_cmd_query_port_speed),
    query_qp: Some(qp::query_qp),
    query_qp_data_in_order: Some(qp::query_qp_data_in_order),
    query_rt_values: Some(query_rt_values),
    query_srq: Some(srq::query_srq),
    reg_dm_mr: Some(mr::reg_dm_mr),
    reg_mr: Some(mr::reg_mr),
    req_notify_cq: Some(cq::req_notify_cq),
    rereg_mr: Some(mr::rereg_mr),
    resize_cq: Some(cq::resize_cq),
    unimport_dm: Some(mr::unimport_dm),
    unimport_mr: Some(mr::unimport_mr),
    unimport_pd: Some(pd::unimport_pd),
    ..zeroed()
});

pub unsafe extern "C" fn alloc_context(
    device: *mut sys::ibv_device,
    fd: c_int,
    _private: *mut c_void,
) -> *mut sys::verbs_context {
    // SAFETY: as libibverbs calls us.
    object(unsafe { set_up(device, fd, get_context) })
}

pub unsafe extern "C" fn import_context(
    device: *mut sys::ibv_device,
    fd: c_int,
) -> *mut sys::verbs_context {
    // SAFETY: as libibverbs calls us.
    object(unsafe { set_up(device, fd, query_context) })
}

/// Makes a context of a command file; `ask` has the kernel tell what belongs to it.
///
/// # Safety
/// The device is ours.
unsafe fn set_up(
    device: *mut sys::ibv_device,
    fd: c_int,
    ask: unsafe fn(*mut sys::verbs_context) -> Result<AllocContextResponse, Errno>,
) -> Result<*mut sys::verbs_context, Errno> {
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
        return Err(Errno::last());
    }
    // SAFETY: just allocated and initialized.
    let base = unsafe { &raw mut (*context).base };
    // SAFETY: as before.
    match unsafe { ask(base) }.and_then(|response| Shared::map(fd, response)) {
        Ok(shared) => {
            // SAFETY: writing our part leaves nothing undropped.
            unsafe {
                (&raw mut (*context).shared).write(Arc::new(shared));
                sys::verbs_set_ops(base, &raw const OPS.0);
            }
            Ok(base)
        }
        Err(error) => {
            // SAFETY: as before.
            unsafe { explain(base, error) };
            // SAFETY: undoes what _verbs_init_and_alloc_context did; `shared` was not written.
            unsafe {
                sys::verbs_uninit_context(base);
                libc::free(context.cast());
            }
            Err(error)
        }
    }
}

/// Says why there is no context, to who asks libibverbs for its log (VERBS_LOG_LEVEL): programs
/// seldom tell errno.
///
/// # Safety
/// The part of libibverbs is initialized.
unsafe fn explain(base: *mut sys::verbs_context, Errno(errno): Errno) {
    let hint = match errno {
        libc::EIO | libc::ENODEV => ": the device is lost, or does not answer commands",
        _ => "",
    };
    let error = std::io::Error::from_raw_os_error(errno);
    // No text of these has a zero byte.
    let Ok(text) = CString::new(format!("virtio_rdma: no context: {error}{hint}\n")) else {
        return;
    };
    // SAFETY: as the caller says; the format asks for one text.
    unsafe { sys::__verbs_log(base, sys::VERBS_LOG_ERR, c"%s".as_ptr(), text.as_ptr()) };
}

/// # Safety
/// The part of libibverbs is initialized.
unsafe fn get_context(base: *mut sys::verbs_context) -> Result<AllocContextResponse, Errno> {
    let mut cmd: sys::ibv_get_context = zeroed();
    let mut response =
        With::<sys::ib_uverbs_get_context_resp, _>::new([0; AllocContextResponse::SIZE]);
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    let resp = (&raw mut response).cast();
    // SAFETY: command and response are of these sizes.
    unsafe {
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
    }
    Ok(AllocContextResponse::from_bytes(&response.driver))
}

/// # Safety
/// The part of libibverbs is initialized.
unsafe fn query_context(base: *mut sys::verbs_context) -> Result<AllocContextResponse, Errno> {
    let mut response = [0; AllocContextResponse::SIZE];
    let mut attrs = Attrs::<1>::new(
        sys::UVERBS_OBJECT_DEVICE as u16,
        sys::UVERBS_METHOD_QUERY_CONTEXT as u16,
    );
    attrs.output(0, abi::DRIVER_ATTR, &mut response);
    // SAFETY: the attributes are complete, and the response is still there.
    Errno::check(unsafe { sys::ibv_cmd_query_context(&raw mut (*base).context, attrs.link()) })?;
    Ok(AllocContextResponse::from_bytes(&response))
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
    // SAFETY: objects are ours and alive; the attributes are at least the original ones, which
    // libibverbs checks.
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

/// The device's clock, in nanoseconds as in completion time stamps.
///
/// # Safety
/// The context is ours and alive.
pub unsafe fn device_clock(context: *mut sys::ibv_context) -> Result<u64, Errno> {
    let mut attr: sys::ibv_device_attr_ex = zeroed();
    let mut response =
        With::<sys::ib_uverbs_ex_query_device_resp, _>::new([0; QueryDeviceResponse::SIZE]);
    let mut size = size_of_val(&response);
    // SAFETY: as the caller says; attributes and response are of these sizes.
    Errno::check(unsafe {
        sys::ibv_cmd_query_device_any(
            context,
            ptr::null(),
            &mut attr,
            size_of_val(&attr),
            (&raw mut response).cast(),
            &mut size,
        )
    })?;
    match QueryDeviceResponse::from_bytes(&response.driver).clock {
        0 => Err(EOPNOTSUPP),
        clock => Ok(clock),
    }
}

unsafe extern "C" fn query_rt_values(
    context: *mut sys::ibv_context,
    values: *mut sys::ibv_values_ex,
) -> c_int {
    // SAFETY: the application's values.
    let values = unsafe { &mut *values };
    if values.comp_mask & !sys::IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return libc::EINVAL;
    }
    // SAFETY: objects are ours and alive.
    status(unsafe { device_clock(context) }.map(|clock| {
        values.raw_clock = sys::timespec {
            tv_sec: 0,
            tv_nsec: clock as _,
        };
    }))
}

#[cfg(test)]
mod tests {
    use core::mem::MaybeUninit;

    use super::*;

    #[test]
    fn what_a_lost_device_had_is_destroyed_with_it() {
        let shared = Arc::new(Shared::fixture());
        let mut ours = Box::new(MaybeUninit::<Context>::zeroed());
        let ours = ours.as_mut_ptr();
        // SAFETY: places in the box; only `shared` is used of what is in it.
        let context = unsafe {
            (&raw mut (*ours).shared).write(Arc::clone(&shared));
            &raw mut (*ours).base.context
        };
        // SAFETY: the context is there.
        let destroyed = |rc| unsafe { destroyed(context, rc) };
        let results = || [0, libc::EIO, libc::EBUSY].map(destroyed);
        // A device that lives may still write to the memory of an object that the kernel did not
        // destroy.
        assert_eq!(results(), [0, libc::EIO, libc::EBUSY]);
        shared.lose();
        assert_eq!(results(), [0, 0, libc::EBUSY]);
        // SAFETY: written above.
        unsafe { (&raw mut (*ours).shared).drop_in_place() };
    }
}
