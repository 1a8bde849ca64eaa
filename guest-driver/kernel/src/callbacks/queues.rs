// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Completion queues, shared receive queues, XRC domains, queue pairs. The safety requirements are
//! those of [`super`].
use super::addresses::{qp_attr_from_device, qp_attr_to_device};
use super::{context, create, creating, destroy, detail, device, fill, Object};
use crate::sys::bindings::*;
use crate::sys::error::{code, Errno};
use crate::sys::rdma::{CqBuffer, CqHandle, QpHandle, SrqHandle, Udata};
use crate::targets::{CqTarget, QpTarget};
use crate::verbs;
use core::ffi::c_int;
use core::ptr::NonNull;

pub(super) unsafe extern "C" fn create_cq(
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
            let made =
                verbs::create_cq(device, CqTarget::new(CqHandle::new(target)), &wanted, udata);
            let data = creating(device, udata, made)?;
            (*cq).cqe = c_int::try_from(data.entries()).unwrap_or(c_int::MAX);
            Ok(data)
        })
    })
}

#[cfg(has_resize_user_cq)]
type Entries = core::ffi::c_uint;
#[cfg(not(has_resize_user_cq))]
type Entries = c_int;

pub(super) unsafe extern "C" fn resize_cq(
    cq: *mut ib_cq,
    entries: Entries,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let object = NonNull::new(cq).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let device = device((*cq).device)?;
            let data: &verbs::Cq = Object::data(object);
            let entries = u32::try_from(entries).map_err(|_| Errno::EINVAL)?;
            verbs::resize_cq(device, data, entries, Udata::new(udata))?;
            (*cq).cqe = c_int::try_from(data.entries()).unwrap_or(c_int::MAX);
            Ok(())
        })
    })
}

/// Moderation of its events.
pub(super) unsafe extern "C" fn modify_cq(cq: *mut ib_cq, count: u16, period: u16) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let object = NonNull::new(cq).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let data: &verbs::Cq = Object::data(object);
            verbs::modify_cq(device((*cq).device)?, data, count, period)
        })
    })
}

pub(super) unsafe extern "C" fn fill_res_cq_entry(msg: *mut sk_buff, cq: *mut ib_cq) -> c_int {
    let Some(cq) = NonNull::new(cq) else {
        return 0;
    };
    // SAFETY: see the module; the core holds the object.
    unsafe {
        let data: &verbs::Cq = Object::data(cq);
        let entries = [
            detail(c"cqn", data.number()),
            detail(c"entries", data.entries()),
            detail(c"comp_vector", data.comp_vector()),
        ];
        fill(msg, entries)
    }
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ib_cq, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(cq, verbs::destroy_cq))
    })
}

pub(super) unsafe extern "C" fn create_qp(
    qp: *mut ib_qp,
    attr: *mut ib_qp_init_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module; the queues that the attributes name were created, and the core holds
    // them.
    code(unsafe {
        create(qp, |device, target| {
            let attr = &mut *attr;
            let udata = Udata::new(udata);
            let wanted = verbs::QpInit {
                qp_type: u8::try_from(attr.qp_type).map_err(|_| Errno::EOPNOTSUPP)?,
                create_flags: attr.create_flags,
                signal_all: attr.sq_sig_type == IB_SIGNAL_ALL_WR,
                srq: NonNull::new(attr.srq).map(|srq| Object::data(srq)),
                xrcd: NonNull::new(attr.xrcd).map(|xrcd| Object::data(xrcd)),
                max_send_wr: attr.cap.max_send_wr,
                max_recv_wr: attr.cap.max_recv_wr,
                max_send_sge: attr.cap.max_send_sge,
                max_recv_sge: attr.cap.max_recv_sge,
                max_inline: attr.cap.max_inline_data,
                pd: NonNull::new((*qp).pd).map(|pd| Object::data(pd)),
                send_cq: NonNull::new(attr.send_cq).map(|cq| Object::data(cq)),
                recv_cq: NonNull::new(attr.recv_cq).map(|cq| Object::data(cq)),
                context: context(&udata),
            };
            let target = QpTarget::new(QpHandle::new(target));
            let made = verbs::create_qp(device, target, &wanted, udata);
            let data = creating(device, udata, made)?;
            (*qp).qp_num = data.number();
            attr.cap.max_inline_data = data.caps().max_inline;
            Ok(data)
        })
        .map(|()| {
            // Only now is there all that those find who refer to it.
            let data = NonNull::new(qp).map(|qp| Object::data(qp));
            if let Some(references) = data.and_then(verbs::Qp::references) {
                references.publish();
            }
        })
    })
}

pub(super) unsafe extern "C" fn modify_qp(
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

pub(super) unsafe extern "C" fn query_qp(
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

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ib_qp, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(qp, verbs::destroy_qp))
    })
}

pub(super) unsafe extern "C" fn fill_res_qp_entry(msg: *mut sk_buff, qp: *mut ib_qp) -> c_int {
    let Some(qp) = NonNull::new(qp) else {
        return 0;
    };
    // SAFETY: see the module; the core holds the object.
    unsafe {
        let data: &verbs::Qp = Object::data(qp);
        let (caps, doorbell) = (data.caps(), data.doorbell());
        let entries = [
            detail(c"sq_entries", caps.max_send_wr),
            detail(c"rq_entries", caps.max_recv_wr),
            detail(c"max_inline", caps.max_inline),
            detail(c"doorbell_queue", doorbell.0),
            detail(c"doorbell_slot", doorbell.1),
        ];
        fill(msg, entries)
    }
}

pub(super) unsafe extern "C" fn create_srq(
    srq: *mut ib_srq,
    init: *mut ib_srq_init_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module; the objects that the attributes name were created, and the core holds
    // them.
    code(unsafe {
        create(srq, |device, target| {
            let init = &mut *init;
            let udata = Udata::new(udata);
            let pd = NonNull::new((*srq).pd).ok_or(Errno::EINVAL)?;
            let xrc = if init.srq_type == IB_SRQT_XRC {
                let xrcd = NonNull::new(init.ext.__bindgen_anon_1.xrc.xrcd).ok_or(Errno::EINVAL)?;
                let cq = NonNull::new(init.ext.cq).ok_or(Errno::EINVAL)?;
                Some((Object::data(xrcd), Object::data(cq)))
            } else {
                None
            };
            let wanted = verbs::SrqInit {
                srq_type: u8::try_from(init.srq_type).map_err(|_| Errno::EOPNOTSUPP)?,
                max_wr: init.attr.max_wr,
                max_sge: init.attr.max_sge,
                limit: init.attr.srq_limit,
                pd: Object::data(pd),
                xrc,
                context: context(&udata),
            };
            let target = SrqHandle::new(target);
            let made = verbs::create_srq(device, target, &wanted, udata);
            let data = creating(device, udata, made)?;
            init.attr.max_wr = data.entries();
            if xrc.is_some() {
                (*srq).ext.__bindgen_anon_1.xrc.srq_num = data.number();
            }
            Ok(data)
        })
    })
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut ib_srq,
    attr: *mut ib_srq_attr,
    mask: ib_srq_attr_mask,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let object = NonNull::new(srq).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let device = device((*srq).device)?;
            let udata = Udata::new(udata);
            if mask & !(IB_SRQ_LIMIT | IB_SRQ_MAX_WR) != 0 {
                return Err(Errno::EOPNOTSUPP);
            }
            let limit = (mask & IB_SRQ_LIMIT != 0).then_some((*attr).srq_limit);
            let srq: &verbs::Srq = Object::data(object);
            if mask & IB_SRQ_MAX_WR != 0 {
                return verbs::resize_srq(device, srq, (*attr).max_wr, limit, udata);
            }
            udata.none()?;
            match limit {
                Some(limit) => verbs::modify_srq(device, srq, limit),
                None => Ok(()),
            }
        })
    })
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut ib_srq, attr: *mut ib_srq_attr) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let object = NonNull::new(srq).ok_or(Errno::EINVAL);
        object.and_then(|object| {
            let answer = verbs::query_srq(device((*srq).device)?, Object::data(object))?;
            (*attr).max_wr = answer.entries;
            (*attr).max_sge = answer.max_sge;
            (*attr).srq_limit = answer.limit;
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ib_srq, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(srq, verbs::destroy_srq))
    })
}

pub(super) unsafe extern "C" fn fill_res_srq_entry(msg: *mut sk_buff, srq: *mut ib_srq) -> c_int {
    let Some(srq) = NonNull::new(srq) else {
        return 0;
    };
    // SAFETY: see the module; the core holds the object.
    unsafe {
        let data: &verbs::Srq = Object::data(srq);
        let entries = [
            detail(c"srqn", data.number()),
            detail(c"entries", data.entries()),
        ];
        fill(msg, entries)
    }
}

pub(super) unsafe extern "C" fn alloc_xrcd(xrcd: *mut ib_xrcd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(xrcd, |device, _| {
            verbs::alloc_xrcd(device, Udata::new(udata))
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_xrcd(xrcd: *mut ib_xrcd, udata: *mut ib_udata) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        Udata::new(udata)
            .none()
            .and_then(|()| destroy(xrcd, verbs::dealloc_xrcd))
    })
}
