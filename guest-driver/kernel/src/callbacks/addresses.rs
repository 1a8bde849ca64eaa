// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Address handles, multicast groups, and the attributes of queue pairs, which hold an address. The
//! safety requirements are those of [`super`].
use super::{create, destroy, device, Object};
use crate::sys::bindings::{self, *};
use crate::sys::error::{code, Errno, Result};
use crate::sys::rdma::Udata;
use crate::verbs;
use core::ffi::c_int;
use core::ptr::NonNull;
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::verbs::qp_attr;

/// Atomic context if it comes from the kernel and does not say that it may sleep.
pub(super) unsafe extern "C" fn create_ah(
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

pub(super) unsafe extern "C" fn query_ah(ah: *mut ib_ah, attr: *mut rdma_ah_attr) -> c_int {
    let Some(ah) = NonNull::new(ah) else {
        return Errno::EINVAL.code();
    };
    // SAFETY: see the module.
    unsafe { address_attr(&mut *attr, Object::data(ah).address()) };
    0
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ib_ah, _flags: u32) -> c_int {
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

pub(super) unsafe extern "C" fn attach_mcast(
    qp: *mut ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: see the module.
    unsafe { multicast(qp, gid, true) }
}

pub(super) unsafe extern "C" fn detach_mcast(
    qp: *mut ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
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
pub(super) fn qp_attr_to_device(attr: &ib_qp_attr, mask: u32) -> Result<QpAttr> {
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
pub(super) fn qp_attr_from_device(to: &mut ib_qp_attr, attr: &QpAttr) {
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
