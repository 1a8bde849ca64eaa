// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The verbs as the RDMA core calls them: C in front, [`verbs`] behind.
//!
//! Every function here is called by the core, with arguments that it checked and keeps alive for the call; that is
//! the safety requirement of all of them. Objects of the core start with its structure, and ours go on with the data
//! that [`verbs`] keeps ([`Object`]). The core allocates them (except memory regions) with the sizes in [`table`].
use super::alloc::Box;
use super::bindings::{self, *};
use super::data;
use super::error::{code, Errno, Result};
use super::rdma::{self, CqBuffer, CqTarget, DeviceObject, IbDevice, QpTarget, Udata, UserContext};
use crate::device::{Device, Features};
use crate::verbs;
use core::ffi::{c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use virtio_rdma_driver_core::abi;
use virtio_rdma_spec::command::{gid_type, AddressVector, QpAttr};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::verbs::qp_attr;

/// A structure of the core with what the driver keeps behind it.
#[repr(C)]
pub(super) struct Object<B: Base> {
    base: B,
    data: MaybeUninit<B::Data>,
}

/// A structure of the core that an [`Object`] starts with.
///
/// # Safety
/// `device` must return the device that the object belongs to, and the core must only know objects of type
/// `Object<Self>`.
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
}

impl<B: Base> Object<B> {
    /// # Safety
    /// The object must have been created, and not be destroyed while this is used.
    pub(super) unsafe fn data<'a>(base: NonNull<B>) -> &'a B::Data {
        // SAFETY: the caller says that the data was written.
        unsafe { (*base.as_ptr().cast::<Self>()).data.assume_init_ref() }
    }
}

/// # Safety
/// `ib` must be a device of this driver, in place.
pub(super) unsafe fn device<'a>(ib: *mut ib_device) -> Result<&'a Device> {
    let ib = NonNull::new(ib.cast::<DeviceObject>()).ok_or(Errno::ENODEV)?;
    // SAFETY: the caller's.
    Ok(unsafe { IbDevice(ib).device() })
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
pub(super) fn table(features: Features) -> ib_device_ops {
    // SAFETY: a table of optional functions and numbers, for which zero is none.
    let mut ops: ib_device_ops = unsafe { core::mem::zeroed() };
    // SAFETY: no preconditions.
    ops.owner = unsafe { vrdma_this_module() };
    ops.driver_id = RDMA_DRIVER_UNKNOWN;
    ops.uverbs_abi_ver = abi::ABI_VERSION;
    // All driver data goes through Udata: unknown input must be zero, and all of the output is written.
    #[cfg(has_robust_udata)]
    ops.set_uverbs_robust_udata(1);

    ops.query_device = Some(query_device);
    ops.query_port = Some(query_port);
    ops.get_port_immutable = Some(get_port_immutable);
    ops.get_link_layer = Some(get_link_layer);
    ops.get_dev_fw_str = Some(get_dev_fw_str);
    ops.query_pkey = Some(query_pkey);
    ops.add_gid = Some(add_gid);
    ops.del_gid = Some(del_gid);
    #[cfg(has_report_port_event)]
    {
        ops.report_port_event = Some(report_port_event);
    }

    ops.alloc_ucontext = Some(alloc_ucontext);
    ops.dealloc_ucontext = Some(dealloc_ucontext);
    ops.disassociate_ucontext = Some(disassociate_ucontext);
    ops.mmap = Some(rdma::map);
    ops.mmap_free = Some(rdma::free_mapping);
    ops.size_ib_ucontext = size_of::<Object<ib_ucontext>>();

    ops.alloc_pd = Some(alloc_pd);
    ops.dealloc_pd = Some(dealloc_pd);
    ops.size_ib_pd = size_of::<Object<ib_pd>>();

    ops.create_cq = Some(create_cq);
    #[cfg(has_create_user_cq)]
    {
        ops.create_user_cq = Some(create_cq);
    }
    ops.destroy_cq = Some(destroy_cq);
    ops.size_ib_cq = size_of::<Object<ib_cq>>();

    ops.create_qp = Some(create_qp);
    ops.modify_qp = Some(modify_qp);
    ops.query_qp = Some(query_qp);
    ops.destroy_qp = Some(destroy_qp);
    ops.size_ib_qp = size_of::<Object<ib_qp>>();

    ops.reg_user_mr = Some(reg_user_mr);
    ops.dereg_mr = Some(dereg_mr);

    if features.has(feature::UD) {
        ops.create_ah = Some(create_ah);
        ops.create_user_ah = Some(create_ah);
        ops.query_ah = Some(query_ah);
        ops.destroy_ah = Some(destroy_ah);
        ops.size_ib_ah = size_of::<Object<ib_ah>>();
        ops.attach_mcast = Some(attach_mcast);
        ops.detach_mcast = Some(detach_mcast);
    }
    // The core knows from the presence of all of these that the kernel can use the device.
    if features.kernel_verbs() {
        ops.get_dma_mr = Some(get_dma_mr);
        ops.post_send = Some(data::post_send);
        ops.post_recv = Some(data::post_recv);
        ops.poll_cq = Some(data::poll_cq);
        ops.req_notify_cq = Some(data::req_notify_cq);
    }
    ops
}

unsafe extern "C" fn query_device(
    ib: *mut ib_device,
    attr: *mut ib_device_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| verbs::query_device(device, &mut *attr, Udata::new(udata)))
    })
}

unsafe extern "C" fn query_port(ib: *mut ib_device, port: u32, attr: *mut ib_port_attr) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| {
            let attr = &mut *attr;
            attr.set_ip_gids(1);
            verbs::query_port(device, port, attr)
        })
    })
}

unsafe extern "C" fn get_port_immutable(
    ib: *mut ib_device,
    _port: u32,
    immutable: *mut ib_port_immutable,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).map(|device| {
            let immutable = &mut *immutable;
            let limits = device.limits();
            immutable.core_cap_flags = VRDMA_CORE_CAPS;
            immutable.max_mad_size = VRDMA_MAD_SIZE;
            immutable.gid_tbl_len = limits.gid_table_len as c_int;
            immutable.pkey_tbl_len = limits.pkey_table_len as c_int;
        })
    })
}

unsafe extern "C" fn get_link_layer(_ib: *mut ib_device, _port: u32) -> rdma_link_layer {
    IB_LINK_LAYER_ETHERNET
}

/// Writes "major.minor.patch".
unsafe extern "C" fn get_dev_fw_str(ib: *mut ib_device, text: *mut c_char) {
    // SAFETY: see the module; the core gives room for 32 characters, and three numbers of 16 bits need 18.
    let Ok(device) = (unsafe { device(ib) }) else {
        return;
    };
    let version = device.limits().fw_ver;
    let mut at = text;
    let mut put = |character: u8| {
        // SAFETY: as above.
        unsafe {
            at.write(character as c_char);
            at = at.add(1);
        }
    };
    let numbers = [
        (version >> 32) as u16,
        (version >> 16) as u16,
        version as u16,
    ];
    for (number, end) in numbers.into_iter().zip([b'.', b'.', 0]) {
        let mut started = false;
        for unit in [10_000u16, 1000, 100, 10, 1] {
            let digit = number.checked_div(unit).unwrap_or(0) % 10;
            started |= digit != 0 || unit == 1;
            if started {
                put(b'0'.wrapping_add(digit as u8));
            }
        }
        put(end);
    }
}

unsafe extern "C" fn query_pkey(
    ib: *mut ib_device,
    _port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| {
            if u32::from(index) >= device.limits().pkey_table_len {
                return Err(Errno::EINVAL);
            }
            *pkey = 0xffff;
            Ok(())
        })
    })
}

unsafe extern "C" fn add_gid(attr: *const ib_gid_attr, _context: *mut *mut c_void) -> c_int {
    // SAFETY: see the module; the GID is plain bytes.
    code(unsafe {
        let attr = &*attr;
        device(attr.device).and_then(|device| {
            let (mut vlan, mut mac) = (0xffff, [0; 6]);
            Errno::check(rdma_read_gid_l2_fields(attr, &mut vlan, mac.as_mut_ptr()))?;
            let kind = match attr.gid_type {
                IB_GID_TYPE_ROCE_UDP_ENCAP => gid_type::ROCE_V2,
                IB_GID_TYPE_ROCE => gid_type::ROCE_V1,
                _ => return Err(Errno::EINVAL),
            };
            verbs::add_gid(device, attr.index, attr.gid.raw, kind, vlan, mac)
        })
    })
}

unsafe extern "C" fn del_gid(attr: *const ib_gid_attr, _context: *mut *mut c_void) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let attr = &*attr;
        device(attr.device).and_then(|device| verbs::del_gid(device, attr.index))
    })
}

#[cfg(has_report_port_event)]
unsafe extern "C" fn report_port_event(
    ib: *mut ib_device,
    _ndev: *mut net_device,
    _event: core::ffi::c_ulong,
) {
    // SAFETY: see the module.
    if let Ok(device) = unsafe { device(ib) } {
        device.netdev_changed();
    }
}

unsafe extern "C" fn alloc_ucontext(context: *mut ib_ucontext, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(context, |device, context| {
            verbs::alloc_context(device, UserContext(context), Udata::new(udata))
        })
    })
}

unsafe extern "C" fn dealloc_ucontext(context: *mut ib_ucontext) {
    // SAFETY: see the module. `dealloc_context` does not fail.
    let _ = unsafe {
        destroy(context, |device, context| {
            verbs::dealloc_context(device, context);
            Ok(())
        })
    };
}

/// The core takes away the mappings of device memory; nothing else is to be done.
unsafe extern "C" fn disassociate_ucontext(_context: *mut ib_ucontext) {}

unsafe extern "C" fn alloc_pd(pd: *mut ib_pd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe { create(pd, |device, _| verbs::alloc_pd(device, Udata::new(udata))) })
}

unsafe extern "C" fn dealloc_pd(pd: *mut ib_pd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(pd, verbs::dealloc_pd))
    })
}

unsafe extern "C" fn create_cq(
    cq: *mut ib_cq,
    attr: *const ib_cq_init_attr,
    attrs: *mut uverbs_attr_bundle,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(cq, |device, target| {
            let attr = &*attr;
            let wanted = verbs::CqInit {
                entries: attr.cqe,
                comp_vector: attr.comp_vector,
                flags: attr.flags,
                buffer: CqBuffer(attrs),
            };
            let udata = Udata::new(vrdma_attrs_udata(attrs));
            let data = verbs::create_cq(device, CqTarget::new(target), &wanted, udata)?;
            (*cq).cqe = c_int::try_from(data.entries()).unwrap_or(c_int::MAX);
            Ok(data)
        })
    })
}

unsafe extern "C" fn destroy_cq(cq: *mut ib_cq, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(cq, verbs::destroy_cq))
    })
}

unsafe extern "C" fn create_qp(
    qp: *mut ib_qp,
    attr: *mut ib_qp_init_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module; the queues that the attributes name were created, and the core holds them.
    code(unsafe {
        create(qp, |device, target| {
            let attr = &*attr;
            let pd = NonNull::new((*qp).pd).ok_or(Errno::EINVAL)?;
            let send_cq = NonNull::new(attr.send_cq).ok_or(Errno::EINVAL)?;
            let recv_cq = NonNull::new(attr.recv_cq).ok_or(Errno::EINVAL)?;
            let wanted = verbs::QpInit {
                qp_type: u8::try_from(attr.qp_type).map_err(|_| Errno::EOPNOTSUPP)?,
                create_flags: attr.create_flags,
                signal_all: attr.sq_sig_type == IB_SIGNAL_ALL_WR,
                has_srq: !attr.srq.is_null(),
                max_send_wr: attr.cap.max_send_wr,
                max_recv_wr: attr.cap.max_recv_wr,
                max_send_sge: attr.cap.max_send_sge,
                max_recv_sge: attr.cap.max_recv_sge,
                max_inline: attr.cap.max_inline_data,
                pd: Object::data(pd),
                send_cq: Object::data(send_cq),
                recv_cq: Object::data(recv_cq),
            };
            let target = QpTarget::new(target);
            let data = verbs::create_qp(device, target, &wanted, Udata::new(udata))?;
            (*qp).qp_num = data.number();
            Ok(data)
        })
    })
}

unsafe extern "C" fn modify_qp(
    qp: *mut ib_qp,
    attr: *mut ib_qp_attr,
    mask: c_int,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let qp = NonNull::new(qp).ok_or(Errno::EINVAL);
        qp.and_then(|qp| {
            let device = device((*qp.as_ptr()).device)?;
            Udata::new(udata).none()?;
            let attr = qp_attr_to_device(&*attr, mask as u32)?;
            verbs::modify_qp(device, Object::data(qp), mask as u32, attr)
        })
    })
}

unsafe extern "C" fn query_qp(
    qp: *mut ib_qp,
    attr: *mut ib_qp_attr,
    _mask: c_int,
    init: *mut ib_qp_init_attr,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let object = NonNull::new(qp).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let (attr, init, qp) = (&mut *attr, &mut *init, &*qp);
            let data: &verbs::Qp = Object::data(object);
            qp_attr_from_device(attr, &verbs::query_qp(device(qp.device)?, data)?);
            let caps = data.caps();
            attr.cap.max_send_wr = caps.max_send_wr;
            attr.cap.max_recv_wr = caps.max_recv_wr;
            attr.cap.max_send_sge = caps.max_send_sge;
            attr.cap.max_recv_sge = caps.max_recv_sge;
            attr.cap.max_inline_data = caps.max_inline;
            init.cap = attr.cap;
            init.event_handler = qp.event_handler;
            init.qp_context = qp.qp_context;
            init.send_cq = qp.send_cq;
            init.recv_cq = qp.recv_cq;
            init.srq = qp.srq;
            init.qp_type = qp.qp_type;
            init.sq_sig_type = if caps.signal_all {
                IB_SIGNAL_ALL_WR
            } else {
                IB_SIGNAL_REQ_WR
            };
            Ok(())
        })
    })
}

unsafe extern "C" fn destroy_qp(qp: *mut ib_qp, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(qp, verbs::destroy_qp))
    })
}

/// A pointer to the new region, or an error as the kernel encodes it in pointers.
unsafe extern "C" fn reg_user_mr(
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
        return Errno::EOPNOTSUPP.code() as isize as *mut ib_mr;
    }
    // SAFETY: see the module; the core fills the structure in after this returns.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            Udata::new(udata).none()?;
            let data = verbs::reg_mr(device, Object::data(pd), start, length, virt, access as u32)?;
            Object::<ib_mr>::new_mr(device, data, virt, length)
        })
    };
    mr_or_error(made)
}

/// A region of all memory, for users in the kernel.
unsafe extern "C" fn get_dma_mr(pd: *mut ib_pd, access: c_int) -> *mut ib_mr {
    // SAFETY: see the module; the core fills the structure in after this returns.
    let made = unsafe {
        let pd = NonNull::new(pd).ok_or(Errno::EINVAL);
        pd.and_then(|pd| {
            let device = device((*pd.as_ptr()).device)?;
            let data = verbs::get_dma_mr(device, Object::data(pd), access as u32)?;
            Object::<ib_mr>::new_mr(device, data, 0, u64::MAX)
        })
    };
    mr_or_error(made)
}

/// As the kernel returns pointers that may be errors.
fn mr_or_error(made: Result<Box<Object<ib_mr>>>) -> *mut ib_mr {
    match made {
        Ok(object) => object.into_raw().cast(),
        Err(error) => error.code() as isize as *mut ib_mr,
    }
}

impl Object<ib_mr> {
    /// The memory of a region is ours to allocate; without any, the region has to go again.
    fn new_mr(device: &Device, data: verbs::Mr, iova: u64, length: u64) -> Result<Box<Self>> {
        // SAFETY: plain data for which zero is a value.
        let mut base: ib_mr = unsafe { core::mem::zeroed() };
        (base.lkey, base.rkey) = data.keys();
        (base.iova, base.length) = (iova, length);
        let mut object = match Box::new(Self {
            base,
            data: MaybeUninit::uninit(),
        }) {
            Ok(object) => object,
            Err(error) => {
                verbs::discard_mr(device, &data);
                return Err(error);
            }
        };
        object.data.write(data);
        Ok(object)
    }
}

unsafe extern "C" fn dereg_mr(mr: *mut ib_mr, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module; the object was made by reg_user_mr.
    code(unsafe {
        Udata::new(udata).none().and_then(|()| {
            destroy(mr, verbs::dereg_mr)?;
            if let Some(object) = NonNull::new(mr.cast::<Object<ib_mr>>()) {
                drop(Box::from_raw(object));
            }
            Ok(())
        })
    })
}

/// Atomic context if it comes from the kernel and does not say that it may sleep.
unsafe extern "C" fn create_ah(
    ah: *mut ib_ah,
    init: *mut rdma_ah_init_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(ah, |_, _| {
            verbs::create_ah(address_vector(&*(*init).ah_attr)?, Udata::new(udata))
        })
    })
}

unsafe extern "C" fn query_ah(ah: *mut ib_ah, attr: *mut rdma_ah_attr) -> c_int {
    let Some(ah) = NonNull::new(ah) else {
        return Errno::EINVAL.code();
    };
    // SAFETY: see the module.
    unsafe { address_attr(&mut *attr, Object::data(ah).address()) };
    0
}

unsafe extern "C" fn destroy_ah(ah: *mut ib_ah, _flags: u32) -> c_int {
    // SAFETY: see the module. Nothing of it is on the device.
    code(unsafe { destroy(ah, |_, _| Ok(())) })
}

/// # Safety
/// As called by the core.
unsafe fn multicast(qp: *mut ib_qp, gid: *mut bindings::ib_gid, attach: bool) -> c_int {
    // SAFETY: see the module; a GID is plain bytes.
    code(unsafe {
        let qp = NonNull::new(qp).ok_or(Errno::EINVAL);
        qp.and_then(|qp| {
            let device = device((*qp.as_ptr()).device)?;
            verbs::multicast(device, Object::data(qp), (*gid).raw, attach)
        })
    })
}

unsafe extern "C" fn attach_mcast(qp: *mut ib_qp, gid: *mut bindings::ib_gid, _lid: u16) -> c_int {
    // SAFETY: see the module.
    unsafe { multicast(qp, gid, true) }
}

unsafe extern "C" fn detach_mcast(qp: *mut ib_qp, gid: *mut bindings::ib_gid, _lid: u16) -> c_int {
    // SAFETY: see the module.
    unsafe { multicast(qp, gid, false) }
}

/// An address, from the core's to the device's.
fn address_vector(ah: &rdma_ah_attr) -> Result<AddressVector> {
    if ah.type_ != RDMA_AH_ATTR_TYPE_ROCE || u32::from(ah.ah_flags) & IB_AH_GRH == 0 {
        return Err(Errno::EINVAL);
    }
    // SAFETY: for this type the core filled in `roce`; a GID is plain bytes.
    let (dgid, dmac) = unsafe { (ah.grh.dgid.raw, ah.__bindgen_anon_1.roce.dmac) };
    Ok(AddressVector {
        dgid,
        sgid_index: u16::from(ah.grh.sgid_index),
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
        flow_label: ah.grh.flow_label & 0xf_ffff,
        dmac,
        sl: ah.sl,
        port_num: ah.port_num as u8,
        static_rate: ah.static_rate,
        reserved: [0; 7],
    })
}

/// An address, from the device's to the core's.
fn address_attr(ah: &mut rdma_ah_attr, av: &AddressVector) {
    ah.type_ = RDMA_AH_ATTR_TYPE_ROCE;
    ah.ah_flags = IB_AH_GRH as u8;
    ah.sl = av.sl;
    ah.static_rate = av.static_rate;
    ah.port_num = u32::from(av.port_num);
    ah.grh.dgid = bindings::ib_gid { raw: av.dgid };
    ah.grh.sgid_index = av.sgid_index as u8;
    ah.grh.hop_limit = av.hop_limit;
    ah.grh.traffic_class = av.traffic_class;
    ah.grh.flow_label = av.flow_label;
    ah.__bindgen_anon_1.roce = roce_ah_attr { dmac: av.dmac };
}

/// The attributes of a queue pair, from the core's to the device's.
fn qp_attr_to_device(attr: &ib_qp_attr, mask: u32) -> Result<QpAttr> {
    let mut to = QpAttr {
        qp_state: attr.qp_state as u8,
        cur_qp_state: attr.cur_qp_state as u8,
        path_mtu: attr.path_mtu as u8,
        port_num: attr.port_num as u8,
        access_flags: attr.qp_access_flags as u32,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qp_num,
        pkey_index: attr.pkey_index,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        en_sqd_async_notify: attr.en_sqd_async_notify,
        ..Default::default()
    };
    if mask & qp_attr::AV != 0 {
        to.av = address_vector(&attr.ah_attr)?;
    }
    Ok(to)
}

/// The attributes of a queue pair, from the device's to the core's.
fn qp_attr_from_device(to: &mut ib_qp_attr, attr: &QpAttr) {
    to.qp_state = ib_qp_state::from(attr.qp_state);
    to.cur_qp_state = ib_qp_state::from(attr.qp_state);
    to.path_mtu = ib_mtu::from(attr.path_mtu);
    to.port_num = u32::from(attr.port_num);
    to.qp_access_flags = attr.access_flags as c_int;
    to.qkey = attr.qkey;
    to.rq_psn = attr.rq_psn;
    to.sq_psn = attr.sq_psn;
    to.dest_qp_num = attr.dest_qp_num;
    to.pkey_index = attr.pkey_index;
    to.max_rd_atomic = attr.max_rd_atomic;
    to.max_dest_rd_atomic = attr.max_dest_rd_atomic;
    to.min_rnr_timer = attr.min_rnr_timer;
    to.timeout = attr.timeout;
    to.retry_cnt = attr.retry_cnt;
    to.rnr_retry = attr.rnr_retry;
    to.en_sqd_async_notify = attr.en_sqd_async_notify;
    to.sq_draining = attr.sq_draining;
    address_attr(&mut to.ah_attr, &attr.av);
}
