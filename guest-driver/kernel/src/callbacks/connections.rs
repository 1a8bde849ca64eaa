// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Connections of iWARP, as iw_cm asks for them. The safety requirements are those of [`super`].
use super::{device, Object};
use crate::connections::QpReferences;
use crate::device::Device;
use crate::sys::bindings::*;
use crate::sys::error::{code, Errno, Result};
use crate::sys::iw::{private_data, CmId, ConnParam};
use crate::verbs;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

/// # Safety
/// `id` must be there during the call.
unsafe fn with_id(id: *mut iw_cm_id, run: impl FnOnce(&Device, CmId) -> Result<()>) -> c_int {
    // SAFETY: the caller's; its device is one of ours, as the core called us.
    code(unsafe {
        let id = NonNull::new(id).ok_or(Errno::EINVAL);
        id.and_then(|id| run(device((*id.as_ptr()).device)?, CmId::new(id)))
    })
}

/// Finds the queue pair with this number, and takes the reference that iw_cm asks for right after
/// (`add_ref`): until then nothing else would keep the queue pair. Any context.
pub(super) unsafe extern "C" fn get_qp(ib: *mut ib_device, qpn: c_int) -> *mut ib_qp {
    let mut found = core::ptr::null_mut();
    // SAFETY: see the module.
    if let Ok(device) = unsafe { device(ib) } {
        device.qps().with(qpn as u32, |qp| {
            if qp.references().is_some_and(QpReferences::take) {
                found = qp.handle().as_ptr();
            }
        });
    }
    found
}

/// Any context.
pub(super) unsafe extern "C" fn add_ref(_qp: *mut ib_qp) {
    // `get_qp` did it.
}

/// Process context.
pub(super) unsafe extern "C" fn rem_ref(qp: *mut ib_qp) {
    // SAFETY: see the module; a queue pair that is referred to was created.
    unsafe {
        if let (Some(object), Ok(device)) = (NonNull::new(qp), device((*qp).device)) {
            let data: &verbs::Qp = Object::data(object);
            if let Some(references) = data.references() {
                device.connections().released(device, references);
            }
        }
    }
}

pub(super) unsafe extern "C" fn connect(id: *mut iw_cm_id, param: *mut iw_cm_conn_param) -> c_int {
    // SAFETY: see the module.
    unsafe {
        with_id(id, |device, id| {
            let param = ConnParam::new(&*param);
            device.connections().connect(device, id, &param)
        })
    }
}

pub(super) unsafe extern "C" fn accept(id: *mut iw_cm_id, param: *mut iw_cm_conn_param) -> c_int {
    // SAFETY: see the module.
    unsafe {
        with_id(id, |device, id| {
            let param = ConnParam::new(&*param);
            device.connections().accept(device, id, &param)
        })
    }
}

pub(super) unsafe extern "C" fn reject(
    id: *mut iw_cm_id,
    data: *const c_void,
    length: u8,
) -> c_int {
    // SAFETY: see the module; there is that much private data, or null.
    unsafe {
        with_id(id, |device, id| {
            let data = private_data(data, usize::from(length));
            device.connections().reject(device, &id, data)
        })
    }
}

pub(super) unsafe extern "C" fn create_listen(id: *mut iw_cm_id, backlog: c_int) -> c_int {
    // SAFETY: see the module.
    unsafe {
        with_id(id, |device, id| {
            let backlog = u32::try_from(backlog).unwrap_or(0);
            device.connections().listen(device, id, backlog)
        })
    }
}

pub(super) unsafe extern "C" fn destroy_listen(id: *mut iw_cm_id) -> c_int {
    // SAFETY: see the module.
    unsafe {
        with_id(id, |device, id| {
            device.connections().destroy_listen(device, &id);
            Ok(())
        })
    }
}
