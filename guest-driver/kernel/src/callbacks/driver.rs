// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The module's entry points: the device comes and goes, interrupts.
use super::table;
use crate::device::{Device, DeviceObject, IbDevice};
use crate::sys::bindings;
use crate::sys::error::{Errno, Result};
use crate::sys::virtio::VirtioDevice;
use core::ffi::c_int;
use core::ptr::NonNull;

/// A device was found.
///
/// # Safety
/// As called by the virtio core.
#[no_mangle]
unsafe extern "C" fn vrdma_probe(vdev: *mut bindings::virtio_device) -> c_int {
    let Some(vdev) = NonNull::new(vdev) else {
        return Errno::ENODEV.code();
    };
    // SAFETY: the caller's.
    crate::sys::error::code(unsafe { probe(vdev) })
}

/// # Safety
/// As called by the virtio core.
unsafe fn probe(vdev: NonNull<bindings::virtio_device>) -> Result<()> {
    // SAFETY: the memory is fresh (zeroed) and ours; `ib` is at its start, as the core wants it.
    unsafe {
        let ib = bindings::vrdma_ib_alloc(size_of::<DeviceObject>(), (*vdev.as_ptr()).dev.parent);
        let ib = NonNull::new(ib.cast::<DeviceObject>()).ok_or(Errno::ENOMEM)?;
        (*ib.as_ptr()).ib.phys_port_cnt = 1;
        (*ib.as_ptr()).ib.node_type = bindings::RDMA_NODE_IB_CA as u8;
        match Device::new(VirtioDevice(vdev), IbDevice::new(ib), table) {
            Ok(device) => (*ib.as_ptr()).device.write(device),
            Err(error) => {
                bindings::ib_dealloc_device(ib.as_ptr().cast());
                return Err(error);
            }
        };
        // Callbacks find the device by this, and come only after `ready`, in `start`.
        (*vdev.as_ptr()).priv_ = ib.as_ptr().cast();
        let started = IbDevice::new(ib).device().start();
        if started.is_err() {
            release(vdev);
        }
        started
    }
}

/// The device goes, or the module.
///
/// # Safety
/// As called by the virtio core, for a device that was probed.
#[no_mangle]
unsafe extern "C" fn vrdma_remove(vdev: *mut bindings::virtio_device) {
    if let Some(vdev) = NonNull::new(vdev) {
        // SAFETY: the caller's.
        unsafe { release(vdev) }
    }
}

/// # Safety
/// The device is in place (`probe`); this ends it.
unsafe fn release(vdev: NonNull<bindings::virtio_device>) {
    // SAFETY: `priv` is ours; after `stop` the device is reset, and no verb, callback or work item
    // runs any more.
    unsafe {
        let Some(ib) = NonNull::new((*vdev.as_ptr()).priv_.cast::<DeviceObject>()) else {
            return;
        };
        IbDevice::new(ib).device().stop();
        (*vdev.as_ptr()).priv_ = core::ptr::null_mut();
        (*ib.as_ptr()).device.assume_init_drop();
        bindings::ib_dealloc_device(ib.as_ptr().cast());
    }
}

/// # Safety
/// `vdev` is a device of this driver.
unsafe fn device_of<'a>(vdev: *mut bindings::virtio_device) -> Option<&'a Device> {
    // SAFETY: `priv` is null or a device in place; `release` clears it only after callbacks have
    // ended.
    unsafe {
        let ib = NonNull::new((*vdev).priv_.cast::<DeviceObject>())?;
        Some(IbDevice::new(ib).device())
    }
}

/// The configuration space changed. Interrupt context.
///
/// # Safety
/// As called by the virtio core.
#[no_mangle]
unsafe extern "C" fn vrdma_config_changed(vdev: *mut bindings::virtio_device) {
    // SAFETY: the caller's.
    if let Some(device) = unsafe { device_of(vdev) } {
        device.config_changed();
    }
}

/// The system ends, or another kernel takes over: the device must touch no memory any more.
///
/// # Safety
/// As called by the driver core.
#[no_mangle]
unsafe extern "C" fn vrdma_shutdown(vdev: *mut bindings::virtio_device) {
    // SAFETY: the caller's.
    if let Some(device) = unsafe { device_of(vdev) } {
        device.shut_down();
    }
}

/// The system is suspended.
///
/// # Safety
/// As called by the virtio core.
#[no_mangle]
unsafe extern "C" fn vrdma_freeze(vdev: *mut bindings::virtio_device) -> c_int {
    // SAFETY: the caller's.
    if let Some(device) = unsafe { device_of(vdev) } {
        device.freeze();
    }
    0
}

/// The system goes on. The device was given up when it was suspended, and is taken into use again
/// when processes run.
///
/// # Safety
/// As called by the virtio core.
#[no_mangle]
unsafe extern "C" fn vrdma_restore(_vdev: *mut bindings::virtio_device) -> c_int {
    0
}

/// A queue has used buffers. Interrupt context.
///
/// # Safety
/// As called by the virtio core.
#[no_mangle]
unsafe extern "C" fn vrdma_vq_callback(queue: *mut bindings::virtqueue) {
    // SAFETY: the caller's; a queue belongs to a device of this driver.
    unsafe {
        if let Some(device) = device_of((*queue).vdev) {
            device.interrupt((*queue).index);
        }
    }
}
