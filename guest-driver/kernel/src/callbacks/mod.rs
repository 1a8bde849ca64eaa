// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! What the kernel calls: the verbs, as the RDMA core calls them, with [`verbs`] behind; the data
//! path of users in the kernel ([`data`]); the life of the device ([`driver`]).
//!
//! Every function here is called by the core, with arguments that it checked and keeps alive for
//! the call; that is the safety requirement of all of them. Objects of the core start with its
//! structure, and ours go on with the data that [`verbs`] keeps ([`Object`]). The core allocates
//! them (except memory regions and device memory) with the sizes in [`table`].
#![allow(unsafe_code)]

mod addresses;
mod connections;
mod data;
mod device;
mod driver;
mod memory;
mod queues;

use crate::device::DeviceObject;
use crate::device::{Device, Features, IbDevice};
use crate::sys::alloc::Box;
use crate::sys::bindings::*;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{self, DeviceOps, Udata};
use crate::verbs;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use virtio_rdma_driver_core::abi;
use virtio_rdma_spec::config::feature;

/// A structure of the core with what the driver keeps behind it.
#[repr(C)]
pub(super) struct Object<B: Base> {
    base: B,
    data: MaybeUninit<B::Data>,
}

/// A structure of the core that an [`Object`] starts with.
///
/// # Safety
/// `device` must return the device that the object belongs to, and the core must only know objects
/// of type `Object<Self>`.
pub(super) unsafe trait Base: Sized {
    /// What the driver keeps.
    type Data;
    /// # Safety
    /// `this` must be an object of the core.
    unsafe fn device(this: *mut Self) -> *mut ib_device;
}

macro_rules! base {
    ($($base:ident => $data:ty),* $(,)?) => {$(
        // SAFETY: all objects of this type come from us, with the size of Object<Self>.
        unsafe impl Base for $base {
            type Data = $data;
            unsafe fn device(this: *mut Self) -> *mut ib_device {
                // SAFETY: the caller's.
                unsafe { (*this).device }
            }
        }
    )*};
}
base! {
    ib_ucontext => verbs::Context,
    ib_pd => verbs::Pd,
    ib_cq => verbs::Cq,
    ib_qp => verbs::Qp,
    ib_mr => verbs::Mr,
    ib_ah => verbs::Ah,
    ib_mw => verbs::Mw,
    ib_srq => verbs::Srq,
    ib_xrcd => verbs::Xrcd,
    ib_dm => verbs::Dm,
}

impl<B: Base> Object<B> {
    /// # Safety
    /// The object must have been created, and not be destroyed while this is used.
    pub(super) unsafe fn data<'a>(base: NonNull<B>) -> &'a B::Data {
        // SAFETY: the caller says that the data was written.
        unsafe { (*base.as_ptr().cast::<Self>()).data.assume_init_ref() }
    }

    /// An object whose memory is ours to allocate; without any, the data is given back. The core
    /// fills in its structure.
    fn allocate(data: B::Data) -> core::result::Result<Box<Self>, B::Data> {
        // SAFETY: the structures of the core are plain data for which zero is a value.
        let base = unsafe { core::mem::zeroed() };
        let object = Box::new(Self {
            base,
            data: MaybeUninit::uninit(),
        });
        match object {
            Ok(mut object) => {
                object.data.write(data);
                Ok(object)
            }
            Err(_) => Err(data),
        }
    }

    /// Frees an object of [`Self::allocate`] whose data was dropped.
    ///
    /// # Safety
    /// It must be used no more.
    unsafe fn free(base: *mut B) {
        if let Some(object) = NonNull::new(base.cast::<Self>()) {
            // SAFETY: the caller's; the data is not dropped again.
            drop(unsafe { Box::from_raw(object) });
        }
    }
}

/// # Safety
/// `ib` must be a device of this driver, in place.
pub(super) unsafe fn device<'a>(ib: *mut ib_device) -> Result<&'a Device> {
    let ib = NonNull::new(ib.cast::<DeviceObject>()).ok_or(Errno::ENODEV)?;
    // SAFETY: the caller's.
    Ok(unsafe { IbDevice::new(ib).device() })
}

/// Creates: what `make` returns becomes the object's data.
///
/// # Safety
/// `base` must be an object under creation.
unsafe fn create<B: Base>(
    base: *mut B,
    make: impl FnOnce(&Device, NonNull<B>) -> Result<B::Data>,
) -> Result<()> {
    let object = NonNull::new(base).ok_or(Errno::EINVAL)?;
    // SAFETY: the core set `device`; the memory behind the structure is ours to write.
    unsafe {
        let data = make(device(B::device(base))?, object)?;
        (*base.cast::<Object<B>>()).data.write(data);
    }
    Ok(())
}

/// The number on the device of the context that a command is in; none if it is in none, as those of
/// the kernel are.
///
/// # Safety
/// The command must be under way.
unsafe fn context(udata: &Udata<'_>) -> Option<u32> {
    let context = udata.context().ok()?;
    // SAFETY: the core holds the context while the command runs, and a context that commands come
    // from was created.
    let context: &verbs::Context = unsafe { Object::data(context) };
    Some(context.handle())
}

/// Creates something for a user in the kernel (without `udata`) or a process. That the device was
/// lost is ENETDOWN to the kernel, after which its users try again, as when an interface is down;
/// EIO would end, say, what an NFS mount is at.
fn creating<T>(device: &Device, udata: Udata<'_>, result: Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        Errno::EIO if !udata.is_user() && device.commands().is_dead() => Errno::ENETDOWN,
        error => error,
    })
}

/// Destroys: if `end` says Ok, the data is dropped.
///
/// # Safety
/// `base` must be an object that was created; if this returns Ok, it is used no more.
unsafe fn destroy<B: Base>(
    base: *mut B,
    end: impl FnOnce(&Device, &B::Data) -> Result<()>,
) -> Result<()> {
    let object = NonNull::new(base).ok_or(Errno::EINVAL)?;
    // SAFETY: the caller's.
    unsafe {
        end(device(B::device(base))?, Object::data(object))?;
        (*base.cast::<Object<B>>()).data.assume_init_drop();
    }
    Ok(())
}

/// The operations for these features, as the core wants them; it copies the table.
fn table(features: Features) -> DeviceOps {
    // SAFETY: a table of optional functions and numbers, for which zero is none.
    let mut ops: ib_device_ops = unsafe { core::mem::zeroed() };
    // SAFETY: no preconditions.
    ops.owner = unsafe { vrdma_this_module() };
    ops.driver_id = RDMA_DRIVER_UNKNOWN;
    ops.uverbs_abi_ver = abi::ABI_VERSION;
    // All driver data goes through Udata: unknown input must be zero, and all of the output is
    // written.
    #[cfg(has_robust_udata)]
    ops.set_uverbs_robust_udata(1);

    ops.query_device = Some(device::query_device);
    ops.query_port = Some(device::query_port);
    ops.get_port_immutable = Some(device::get_port_immutable);
    ops.get_link_layer = Some(device::get_link_layer);
    ops.get_dev_fw_str = Some(device::get_dev_fw_str);
    ops.query_pkey = Some(device::query_pkey);
    #[cfg(has_query_port_speed)]
    {
        ops.query_port_speed = Some(vrdma_query_port_speed);
    }
    #[cfg(has_report_port_event)]
    {
        ops.report_port_event = Some(device::report_port_event);
    }
    ops.alloc_hw_port_stats = Some(device::alloc_hw_port_stats);
    ops.get_hw_stats = Some(device::get_hw_stats);

    ops.alloc_ucontext = Some(device::alloc_ucontext);
    ops.query_ucontext = Some(device::query_ucontext);
    ops.dealloc_ucontext = Some(device::dealloc_ucontext);
    ops.disassociate_ucontext = Some(device::disassociate_ucontext);
    ops.mmap = Some(rdma::map);
    ops.mmap_free = Some(rdma::free_mapping);
    ops.size_ib_ucontext = size_of::<Object<ib_ucontext>>();

    ops.alloc_pd = Some(memory::alloc_pd);
    ops.dealloc_pd = Some(memory::dealloc_pd);
    ops.size_ib_pd = size_of::<Object<ib_pd>>();

    ops.create_cq = Some(queues::create_cq);
    #[cfg(has_create_user_cq)]
    {
        ops.create_user_cq = Some(queues::create_cq);
    }
    ops.destroy_cq = Some(queues::destroy_cq);
    ops.fill_res_cq_entry = Some(queues::fill_res_cq_entry);
    ops.size_ib_cq = size_of::<Object<ib_cq>>();

    ops.create_qp = Some(queues::create_qp);
    ops.modify_qp = Some(queues::modify_qp);
    ops.query_qp = Some(queues::query_qp);
    ops.destroy_qp = Some(queues::destroy_qp);
    ops.fill_res_qp_entry = Some(queues::fill_res_qp_entry);
    ops.size_ib_qp = size_of::<Object<ib_qp>>();

    ops.reg_user_mr = Some(memory::reg_user_mr);
    ops.dereg_mr = Some(memory::dereg_mr);
    ops.fill_res_mr_entry = Some(memory::fill_res_mr_entry);
    ops.alloc_dm = Some(memory::alloc_dm);
    ops.dealloc_dm = Some(memory::dealloc_dm);
    ops.reg_dm_mr = Some(memory::reg_dm_mr);
    add_features(&mut ops, features);
    DeviceOps(ops)
}

/// Operations that the device need not have.
fn add_features(ops: &mut ib_device_ops, features: Features) {
    if features.has(feature::IWARP) {
        ops.query_gid = Some(device::query_gid);
        ops.iw_add_ref = Some(connections::add_ref);
        ops.iw_rem_ref = Some(connections::rem_ref);
        ops.iw_get_qp = Some(connections::get_qp);
        ops.iw_connect = Some(connections::connect);
        ops.iw_accept = Some(connections::accept);
        ops.iw_reject = Some(connections::reject);
        ops.iw_create_listen = Some(connections::create_listen);
        ops.iw_destroy_listen = Some(connections::destroy_listen);
    } else {
        ops.add_gid = Some(device::add_gid);
        ops.del_gid = Some(device::del_gid);
        ops.process_mad = Some(device::process_mad);
    }
    if features.has(feature::UD) {
        ops.create_ah = Some(addresses::create_ah);
        ops.create_user_ah = Some(addresses::create_ah);
        ops.query_ah = Some(addresses::query_ah);
        ops.destroy_ah = Some(addresses::destroy_ah);
        ops.size_ib_ah = size_of::<Object<ib_ah>>();
        ops.attach_mcast = Some(addresses::attach_mcast);
        ops.detach_mcast = Some(addresses::detach_mcast);
    }
    if features.has(feature::SRQ) {
        ops.create_srq = Some(queues::create_srq);
        ops.modify_srq = Some(queues::modify_srq);
        ops.query_srq = Some(queues::query_srq);
        ops.destroy_srq = Some(queues::destroy_srq);
        ops.fill_res_srq_entry = Some(queues::fill_res_srq_entry);
        ops.size_ib_srq = size_of::<Object<ib_srq>>();
    }
    if features.has(feature::XRC) {
        ops.alloc_xrcd = Some(queues::alloc_xrcd);
        ops.dealloc_xrcd = Some(queues::dealloc_xrcd);
        ops.size_ib_xrcd = size_of::<Object<ib_xrcd>>();
    }
    if features.has(feature::MW) {
        ops.alloc_mw = Some(memory::alloc_mw);
        ops.dealloc_mw = Some(memory::dealloc_mw);
        ops.size_ib_mw = size_of::<Object<ib_mw>>();
    }
    if features.has(feature::REREG_MR) {
        ops.rereg_user_mr = Some(memory::rereg_user_mr);
    }
    if features.has(feature::CQ_MODERATION) {
        ops.modify_cq = Some(queues::modify_cq);
    }
    if features.has(feature::RESIZE_CQ) {
        #[cfg(has_resize_user_cq)]
        {
            ops.resize_user_cq = Some(queues::resize_cq);
        }
        #[cfg(not(has_resize_user_cq))]
        {
            ops.resize_cq = Some(queues::resize_cq);
        }
    }
    // The core knows from the presence of all of these that the kernel can use the device.
    if features.kernel_verbs() {
        ops.get_dma_mr = Some(memory::get_dma_mr);
        ops.post_send = Some(data::post_send);
        ops.post_recv = Some(data::post_recv);
        ops.poll_cq = Some(data::poll_cq);
        ops.req_notify_cq = Some(data::req_notify_cq);
        if features.has(feature::FAST_REG) {
            ops.alloc_mr = Some(memory::alloc_mr);
            ops.map_mr_sg = Some(memory::map_mr_sg);
        }
        if features.has(feature::SRQ) {
            ops.post_srq_recv = Some(data::post_srq_recv);
        }
    }
}

/// Answers in the driver's own attribute of an ioctl method, if it is there.
///
/// # Safety
/// The attributes must be those of the call under way.
unsafe fn write_attr(attrs: *mut uverbs_attr_bundle, bytes: &[u8]) -> Result<()> {
    // SAFETY: the caller's.
    Errno::check(unsafe { vrdma_attr_write(attrs, bytes.as_ptr().cast(), bytes.len()) })
}

/// What `rdma resource show` tells of an object besides what the core knows.
///
/// # Safety
/// `msg` must be the message under construction.
unsafe fn fill<const N: usize>(msg: *mut sk_buff, entries: [vrdma_detail; N]) -> i32 {
    // SAFETY: the caller's; that many entries.
    unsafe { vrdma_details_put(msg, entries.as_ptr(), N) }
}

fn detail(name: &'static core::ffi::CStr, value: u32) -> vrdma_detail {
    vrdma_detail {
        name: name.as_ptr(),
        value,
    }
}
