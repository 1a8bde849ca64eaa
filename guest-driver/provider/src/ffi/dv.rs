// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device has beyond verbs, for applications that link with us:
//! `infiniband/virtio_rdma_dv.h`.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr;

use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::MaskedOperands;
use virtio_rdma_spec::verbs::{qp_type, wr_opcode};

use super::qp::Beyond;

use super::{context, object, qp, status, sys, wr, Errno, DEVICE_OPS, EINVAL, EOPNOTSUPP};

/// `VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_MASKED_ATOMICS` and `_SRD`
const CAPS_MASKED_ATOMICS: u32 = 1;
const CAPS_SRD: u32 = 2;

/// `VIRTIO_RDMA_DV_QP_DRIVER_TYPE_SRD`
const DRIVER_TYPE_SRD: u32 = 1;

/// `VIRTIO_RDMA_DV_QP_EX_WITH_...`, and the opcodes.
const OPERATIONS: [(u64, u8); 2] = [
    (1, wr_opcode::MASKED_ATOMIC_CMP_AND_SWP),
    (2, wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD),
];

/// `struct virtio_rdma_dv_device_attr`
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub struct DeviceAttr {
    comp_mask: u64,
    device_caps: u32,
    reserved: [u8; 4],
}

/// `struct virtio_rdma_dv_qp_init_attr`
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
pub struct QpInitAttr {
    comp_mask: u64,
    send_ops_flags: u64,
    driver_qp_type: u32,
    reserved: [u8; 4],
}

impl QpInitAttr {
    /// Bytes of the first version.
    const FIRST: usize = offset_of!(Self, driver_qp_type);

    /// What is wanted beyond verbs; `None` if it is unknown.
    fn beyond(&self) -> Option<Beyond> {
        let driver_qp_type = match self.driver_qp_type {
            0 => 0,
            DRIVER_TYPE_SRD => qp_type::SRD,
            _ => return None,
        };
        let known = self.comp_mask == 0 && self.reserved == [0; 4];
        let masked = opcodes(self.send_ops_flags).filter(|_| known)?;
        Some(Beyond {
            masked,
            driver_qp_type,
        })
    }
}

// As in the header.
const _: () = assert!(size_of::<DeviceAttr>() == 16 && offset_of!(DeviceAttr, device_caps) == 8);
const _: () = assert!(size_of::<QpInitAttr>() == 24 && QpInitAttr::FIRST == 16);

/// Applications may have contexts of other devices.
///
/// # Safety
/// The context is one of libibverbs, and alive.
unsafe fn check(context: *mut sys::ibv_context) -> Result<(), Errno> {
    // SAFETY: every device is the start of a `verbs_device`.
    let ops = unsafe { (*(*context).device.cast::<sys::verbs_device>()).ops };
    if ptr::eq(ops, &raw const DEVICE_OPS.0) {
        Ok(())
    } else {
        Err(EOPNOTSUPP)
    }
}

/// The opcodes, as bits, of operations by their flags.
fn opcodes(send_ops_flags: u64) -> Option<u32> {
    let (mut left, mut opcodes) = (send_ops_flags, 0);
    for (flag, opcode) in OPERATIONS {
        if left & flag != 0 {
            opcodes |= 1 << opcode;
            left &= !flag;
        }
    }
    (left == 0).then_some(opcodes)
}

#[no_mangle]
unsafe extern "C" fn virtio_rdma_dv_query_device(
    context: *mut sys::ibv_context,
    attr: *mut DeviceAttr,
    inlen: u32,
) -> c_int {
    // SAFETY: objects are alive; the application has room for `inlen` bytes.
    status(unsafe { check(context) }.map(|()| unsafe {
        let mut found = DeviceAttr::default();
        if context::shared(context).has(feature::ATOMIC) {
            found.device_caps |= CAPS_MASKED_ATOMICS;
        }
        if context::shared(context).has(feature::SRD) {
            found.device_caps |= CAPS_SRD;
        }
        let length = size_of::<DeviceAttr>().min(inlen as usize);
        ptr::copy_nonoverlapping((&raw const found).cast::<u8>(), attr.cast(), length);
    }))
}

#[no_mangle]
unsafe extern "C" fn virtio_rdma_dv_create_qp(
    context: *mut sys::ibv_context,
    attr_ex: *mut sys::ibv_qp_init_attr_ex,
    attr: *mut QpInitAttr,
    inlen: u32,
) -> *mut sys::ibv_qp {
    // SAFETY: objects are alive; the attributes are `inlen` bytes.
    unsafe {
        if let Err(error) = check(context) {
            return object(Err(error));
        }
        let inlen = inlen as usize;
        if inlen < QpInitAttr::FIRST {
            return object(Err(EINVAL));
        }
        let mut wanted = QpInitAttr::default();
        let known = size_of::<QpInitAttr>().min(inlen);
        ptr::copy_nonoverlapping(attr.cast::<u8>(), (&raw mut wanted).cast(), known);
        match wanted.beyond() {
            Some(beyond) => qp::create_extended(context, attr_ex, beyond),
            None => object(Err(EINVAL)),
        }
    }
}

#[no_mangle]
unsafe extern "C" fn virtio_rdma_dv_wr_masked_cmp_swp(
    qp: *mut sys::ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
    compare_mask: u64,
    swap_mask: u64,
) {
    let masks = MaskedOperands {
        mask0: compare_mask,
        mask1: swap_mask,
    };
    let opcode = wr_opcode::MASKED_ATOMIC_CMP_AND_SWP;
    // SAFETY: the application has created the queue pair with virtio_rdma_dv_create_qp, and is
    // between start and end.
    unsafe { wr::masked(qp, opcode, rkey, remote_addr, [compare, swap], masks) }
}

#[no_mangle]
unsafe extern "C" fn virtio_rdma_dv_wr_masked_fetch_add(
    qp: *mut sys::ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add: u64,
    boundary_mask: u64,
) {
    let masks = MaskedOperands {
        mask0: boundary_mask,
        mask1: 0,
    };
    let opcode = wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD;
    // SAFETY: as above.
    unsafe { wr::masked(qp, opcode, rkey, remote_addr, [add, 0], masks) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;

    #[test]
    fn flags_name_opcodes() {
        assert_eq!(opcodes(0), Some(0));
        assert_eq!(opcodes(1), Some(1 << 12));
        assert_eq!(opcodes(3), Some(3 << 12));
        assert_eq!(opcodes(4), None);
        assert_eq!(opcodes(1 << 63 | 1), None);
    }

    /// The header says what is written here in Rust.
    #[test]
    fn the_header_agrees() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = std::env::temp_dir().join(format!("virtio-rdma-dv-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let text = format!(
            "#include <stddef.h>\n\
             #include <infiniband/virtio_rdma_dv.h>\n\
             typedef char agree[\
             sizeof(struct virtio_rdma_dv_device_attr) == {} &&\
             offsetof(struct virtio_rdma_dv_device_attr, device_caps) == {} &&\
             sizeof(struct virtio_rdma_dv_qp_init_attr) == {} &&\
             offsetof(struct virtio_rdma_dv_qp_init_attr, send_ops_flags) == {} &&\
             offsetof(struct virtio_rdma_dv_qp_init_attr, driver_qp_type) == {} &&\
             VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_MASKED_ATOMICS == {CAPS_MASKED_ATOMICS} &&\
             VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_SRD == {CAPS_SRD} &&\
             VIRTIO_RDMA_DV_QP_DRIVER_TYPE_SRD == {DRIVER_TYPE_SRD} &&\
             VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_CMP_AND_SWP == {} &&\
             VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_FETCH_AND_ADD == {} ? 1 : -1];\n",
            size_of::<DeviceAttr>(),
            offset_of!(DeviceAttr, device_caps),
            size_of::<QpInitAttr>(),
            offset_of!(QpInitAttr, send_ops_flags),
            offset_of!(QpInitAttr, driver_qp_type),
            OPERATIONS[0].0,
            OPERATIONS[1].0,
        );
        let source = directory.join("header.c");
        std::fs::write(&source, &text).unwrap();
        let output = Command::new("cc")
            .args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-std=gnu99"])
            .arg("-I")
            .arg(here.join("include"))
            .args(["-isystem", env!("VIRTIO_RDMA_RDMA_CORE_INCLUDE")])
            .arg(&source)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// The manual page names every function and every constant of the header.
    #[test]
    fn the_manual_is_complete() {
        let header = include_str!("../../include/infiniband/virtio_rdma_dv.h");
        let manual = include_str!("../../man/virtio_rdma_dv.3");
        let names = header
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .filter(|word| {
                word.starts_with("virtio_rdma_dv_") || word.starts_with("VIRTIO_RDMA_DV_")
            })
            .filter(|word| *word != "VIRTIO_RDMA_DV_H");
        let mut count = 0;
        for name in names {
            assert!(manual.contains(name), "{name}");
            count += 1;
        }
        assert!(count >= 9);
    }
}
