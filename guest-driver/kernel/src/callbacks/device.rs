// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The device, its port and GIDs; contexts of processes. The safety requirements are those of
//! [`super`].
use super::{create, destroy, device, write_attr, Object};
use crate::sys::bindings::*;
use crate::sys::error::{code, Errno};
use crate::sys::iw::interface_mac;
use crate::sys::rdma::{Udata, UserContext};
use crate::verbs;
use core::ffi::{c_char, c_int, c_void};
use core::ptr::NonNull;
use virtio_rdma_spec::command::gid_type;
use virtio_rdma_spec::config::feature;

pub(super) unsafe extern "C" fn query_device(
    ib: *mut ib_device,
    attr: *mut ib_device_attr,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| verbs::query_device(device, &mut *attr, Udata::new(udata)))
    })
}

pub(super) unsafe extern "C" fn query_port(
    ib: *mut ib_device,
    port: u32,
    attr: *mut ib_port_attr,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| {
            let attr = &mut *attr;
            attr.set_ip_gids(u32::from(!device.features().has(feature::IWARP)));
            verbs::query_port(device, port, attr)
        })
    })
}

pub(super) unsafe extern "C" fn get_port_immutable(
    ib: *mut ib_device,
    _port: u32,
    immutable: *mut ib_port_immutable,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).map(|device| {
            let immutable = &mut *immutable;
            if device.features().has(feature::IWARP) {
                immutable.core_cap_flags = VRDMA_CORE_CAPS_IWARP;
            } else {
                immutable.core_cap_flags = VRDMA_CORE_CAPS;
                immutable.max_mad_size = VRDMA_MAD_SIZE;
            }
            immutable.gid_tbl_len = verbs::gid_table_len(device) as c_int;
            immutable.pkey_tbl_len = c_int::from(verbs::pkey_table_len(device));
        })
    })
}

pub(super) unsafe extern "C" fn get_link_layer(_ib: *mut ib_device, _port: u32) -> rdma_link_layer {
    IB_LINK_LAYER_ETHERNET
}

/// Writes "major.minor.patch".
pub(super) unsafe extern "C" fn get_dev_fw_str(ib: *mut ib_device, text: *mut c_char) {
    // SAFETY: see the module; the core gives room for 32 characters, and three numbers of 16 bits
    // need 18.
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

pub(super) unsafe extern "C" fn query_pkey(
    ib: *mut ib_device,
    _port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        device(ib).and_then(|device| {
            if index >= verbs::pkey_table_len(device) {
                return Err(Errno::EINVAL);
            }
            *pkey = 0xffff;
            Ok(())
        })
    })
}

/// The GID of a port of iWARP: the MAC address of its interface.
pub(super) unsafe extern "C" fn query_gid(
    ib: *mut ib_device,
    _port: u32,
    _index: c_int,
    gid: *mut ib_gid,
) -> c_int {
    // SAFETY: see the module; the GID is plain bytes.
    code(unsafe {
        device(ib).map(|device| {
            let mut raw = [0; 16];
            let mac = interface_mac(device.ib()).unwrap_or_default();
            for (to, from) in raw.iter_mut().zip(mac) {
                *to = from;
            }
            (*gid).raw = raw;
        })
    })
}

pub(super) unsafe extern "C" fn add_gid(
    attr: *const ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
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

pub(super) unsafe extern "C" fn del_gid(
    attr: *const ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let attr = &*attr;
        device(attr.device).and_then(|device| verbs::del_gid(device, attr.index))
    })
}

#[cfg(has_report_port_event)]
pub(super) unsafe extern "C" fn report_port_event(
    ib: *mut ib_device,
    _ndev: *mut net_device,
    _event: core::ffi::c_ulong,
) {
    // SAFETY: see the module.
    if let Ok(device) = unsafe { device(ib) } {
        device.netdev_changed();
    }
}

pub(super) unsafe extern "C" fn alloc_ucontext(
    context: *mut ib_ucontext,
    udata: *mut ib_udata,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        create(context, |device, context| {
            verbs::alloc_context(device, UserContext(context), Udata::new(udata))
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_ucontext(context: *mut ib_ucontext) {
    // SAFETY: see the module. `dealloc_context` does not fail.
    let _ = unsafe {
        destroy(context, |device, context| {
            verbs::dealloc_context(device, context);
            Ok(())
        })
    };
}

/// The core takes away the mappings of device memory; nothing else is to be done.
pub(super) unsafe extern "C" fn disassociate_ucontext(_context: *mut ib_ucontext) {}

/// What a process that imports the context must know.
pub(super) unsafe extern "C" fn query_ucontext(
    context: *mut ib_ucontext,
    attrs: *mut uverbs_attr_bundle,
) -> c_int {
    // SAFETY: see the module.
    code(unsafe {
        let context = NonNull::new(context).ok_or(Errno::EINVAL);
        context.and_then(|context| write_attr(attrs, &Object::data(context).response().to_bytes()))
    })
}

pub(super) unsafe extern "C" fn alloc_hw_port_stats(
    _ib: *mut ib_device,
    _port: u32,
) -> *mut rdma_hw_stats {
    // SAFETY: no preconditions; null if there is no memory.
    unsafe { vrdma_counters_alloc() }
}

pub(super) unsafe extern "C" fn get_hw_stats(
    ib: *mut ib_device,
    stats: *mut rdma_hw_stats,
    _port: u32,
    _index: c_int,
) -> c_int {
    // SAFETY: see the module.
    let values = unsafe { device(ib).and_then(verbs::port_counters) };
    match values {
        // SAFETY: made by alloc_hw_port_stats; that many values.
        Ok(values) => unsafe { vrdma_counters_set(stats, values.as_ptr(), values.len()) },
        // A device that does not answer has nothing new: an error would only keep tools from
        // showing the rest.
        // SAFETY: made by alloc_hw_port_stats.
        Err(_) => unsafe { (*stats).num_counters },
    }
}

/// Answers what performance management asks: that is where the port's counters in sysfs come from.
pub(super) unsafe extern "C" fn process_mad(
    ib: *mut ib_device,
    _flags: c_int,
    _port: u32,
    _wc: *const ib_wc,
    _grh: *const ib_grh,
    query: *const ib_mad,
    answer: *mut ib_mad,
    _answer_size: *mut usize,
    _pkey_index: *mut u16,
) -> c_int {
    /// As the core has them: nothing was wrong; there is an answer.
    const SUCCESS: c_int = 1;
    const REPLY: c_int = 2;
    // SAFETY: see the module; query and answer are MADs, and the answer needs four values.
    unsafe {
        if !vrdma_pma_is_query(query) {
            return SUCCESS;
        }
        match device(ib).and_then(verbs::port_counters) {
            Ok(values) => {
                vrdma_pma_answer(query, answer, values.as_ptr());
                SUCCESS | REPLY
            }
            Err(_) => 0,
        }
    }
}
