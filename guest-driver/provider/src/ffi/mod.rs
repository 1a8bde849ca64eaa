// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface to libibverbs: registration, and what the operations share.
//!
//! libibverbs calls every operation with objects that it got from the operation that created them
//! and that are not destroyed yet; that is the invariant most SAFETY comments here appeal to
//! ("objects are ours and alive").

mod ah;
mod buffer;
mod clock;
mod context;
mod cq;
// Applications that link with us call it; nothing here does.
mod dv;
mod ioctl;
mod lock;
mod mr;
mod pd;
mod qp;
mod srq;
mod wr;

use core::ffi::{c_char, c_int, CStr};
use core::mem::{self, MaybeUninit};
use core::ptr;

use virtio_rdma_driver_core::abi;

/// rdma-core's private headers, digested by bindgen.
#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unknown_lints,
    unnecessary_transmutes,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
pub(crate) mod sys {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

/// PCI vendor of virtio devices.
const PCI_VENDOR: u16 = 0x1af4;
/// PCI device: 0x1040 and the virtio device id.
const PCI_DEVICE: u16 = 0x1040 + virtio_rdma_spec::DEVICE_ID as u16;
/// The same device as the virtio bus names it, for a parent that is the virtio device.
const MODALIAS: &CStr = c"virtio:d0000002Av*";

const _: () = assert!(virtio_rdma_spec::DEVICE_ID == 0x2a);

/// Makes tables of pointers to constants fit for a `static`.
#[repr(transparent)]
struct Table<T>(T);

// SAFETY: the tables are constants; neither libibverbs nor we write to them.
unsafe impl<T> Sync for Table<T> {}

/// An all-zero value of a C structure.
const fn zeroed<T: CData>() -> T {
    // SAFETY: CData says that all zero is a value of the type.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Types of which all zero is a value: C structures.
///
/// # Safety
/// As it says.
unsafe trait CData {}

macro_rules! c_data {
    ($($t:ident),* $(,)?) => {$(
        // SAFETY: a structure of integers, optional function pointers and raw pointers.
        unsafe impl CData for sys::$t {}
    )*};
}
c_data!(
    ib_uverbs_alloc_mw_resp,
    ib_uverbs_alloc_pd_resp,
    ib_uverbs_attr,
    ib_uverbs_create_ah_resp,
    ib_uverbs_create_cq_resp,
    ib_uverbs_create_qp_resp,
    ib_uverbs_create_srq_resp,
    ib_uverbs_ex_create_cq_resp,
    ib_uverbs_ex_create_qp_resp,
    ib_uverbs_ex_query_device_resp,
    ib_uverbs_get_context_resp,
    ib_uverbs_open_xrcd_resp,
    ib_uverbs_reg_mr_resp,
    ib_uverbs_rereg_mr_resp,
    ib_uverbs_resize_cq_resp,
    ibv_ah,
    ibv_alloc_mw,
    ibv_alloc_pd,
    ibv_command_buffer,
    ibv_create_cq,
    ibv_create_cq_ex,
    ibv_create_qp,
    ibv_create_qp_ex,
    ibv_create_srq,
    ibv_create_xsrq,
    ibv_device_attr_ex,
    ibv_get_context,
    ibv_modify_cq,
    ibv_modify_qp,
    ibv_modify_srq,
    ibv_mr,
    ibv_mw,
    ibv_mw_bind_info,
    ibv_open_qp,
    ibv_open_xrcd,
    ibv_pd,
    ibv_query_port,
    ibv_query_qp,
    ibv_query_srq,
    ibv_reg_mr,
    ibv_rereg_mr,
    ibv_resize_cq,
    ibv_td,
    verbs_context_ops,
    verbs_cq,
    verbs_device,
    verbs_device_ops,
    verbs_dm,
    verbs_match_ent,
    verbs_mr,
    verbs_qp,
    verbs_srq,
    verbs_xrcd,
);

/// A structure of libibverbs and behind it the driver's own data, as commands and responses have
/// it.
#[repr(C)]
struct With<T, D> {
    base: T,
    driver: D,
}

impl<T: CData, const N: usize> With<T, [u8; N]> {
    fn new(driver: [u8; N]) -> Self {
        // The driver's data follow without a hole.
        const {
            assert!(
                mem::offset_of!(Self, driver) == size_of::<T>()
                    && size_of::<Self>() % align_of::<T>() == 0
            )
        };
        const { assert!(size_of::<Self>() == size_of::<T>() + N) };
        Self {
            base: zeroed(),
            driver,
        }
    }
}

const MATCH_TABLE: [sys::verbs_match_ent; 3] = {
    let mut pci: sys::verbs_match_ent = zeroed();
    pci.vendor = PCI_VENDOR;
    pci.device = PCI_DEVICE;
    pci.kind = sys::VERBS_MATCH_PCI as u8;
    let mut virtio: sys::verbs_match_ent = zeroed();
    virtio.u.modalias = MODALIAS.as_ptr();
    virtio.kind = sys::VERBS_MATCH_MODALIAS as u8;
    [pci, virtio, zeroed()]
};

static MATCHES: Table<[sys::verbs_match_ent; 3]> = Table(MATCH_TABLE);

static DEVICE_OPS: Table<sys::verbs_device_ops> = Table(sys::verbs_device_ops {
    name: c"virtio_rdma".as_ptr(),
    match_min_abi_version: abi::ABI_VERSION,
    match_max_abi_version: abi::ABI_VERSION,
    match_table: (&raw const MATCHES).cast(),
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
    alloc_context: Some(context::alloc_context),
    import_context: Some(context::import_context),
    ..zeroed()
});

/// Registration, when the library is loaded.
#[cfg(not(test))]
mod register {
    use super::{sys, DEVICE_OPS};

    extern "C" {
        // The name of the function carries the version of the private interface.
        #[cfg_attr(pabi = "34", link_name = "verbs_register_driver_34")]
        #[cfg_attr(pabi = "65", link_name = "verbs_register_driver_65")]
        fn verbs_register_driver(ops: *const sys::verbs_device_ops);
    }

    extern "C" fn register() {
        // SAFETY: the operations are a constant and fit the version of the interface that the name
        // carries.
        unsafe { verbs_register_driver(&raw const DEVICE_OPS.0) }
    }

    #[used]
    #[link_section = ".init_array"]
    static REGISTER: extern "C" fn() = register;
}

unsafe extern "C" fn alloc_device(_sysfs: *mut sys::verbs_sysfs_dev) -> *mut sys::verbs_device {
    Box::into_raw(Box::new(zeroed()))
}

unsafe extern "C" fn uninit_device(device: *mut sys::verbs_device) {
    // SAFETY: made by alloc_device, and not used any more.
    drop(unsafe { Box::from_raw(device) });
}

/// An error number, as operations return it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Errno(c_int);

const EINVAL: Errno = Errno(libc::EINVAL);
const EOPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);

impl Errno {
    /// That of the system call that just failed.
    fn last() -> Self {
        Self(
            std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
        )
    }

    /// What a command of libibverbs returned.
    fn check(rc: c_int) -> Result<(), Self> {
        match rc {
            0 => Ok(()),
            // Most return an errno, some -1 and set it.
            1.. => Err(Self(rc)),
            _ => Err(Self::last()),
        }
    }
}

impl From<virtio_rdma_driver_core::PostError> for Errno {
    fn from(error: virtio_rdma_driver_core::PostError) -> Self {
        Self(error.errno().into())
    }
}

impl From<virtio_rdma_driver_core::BadLayout> for Errno {
    fn from(_: virtio_rdma_driver_core::BadLayout) -> Self {
        EINVAL
    }
}

/// Returns as operations do that return an error number.
fn status(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(Errno(errno)) => errno,
    }
}

/// Returns as operations do that return an object: null, and the error number in errno.
fn object<T>(result: Result<*mut T, Errno>) -> *mut T {
    match result {
        Ok(object) => object,
        Err(Errno(errno)) => {
            // SAFETY: the address of this thread's errno.
            unsafe { *libc::__errno_location() = errno };
            ptr::null_mut()
        }
    }
}

/// Copies a text to an array of C characters, cut to fit and terminated.
fn put_text(to: &mut [c_char], text: &str) {
    let Some(last) = to.len().checked_sub(1) else {
        return;
    };
    to.fill(0);
    for (to, from) in to.iter_mut().take(last).zip(text.bytes()) {
        *to = from as c_char;
    }
}
