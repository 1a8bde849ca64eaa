// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The network interface that the port is paired with.
use super::alloc::Box;
use super::bindings;
use super::error::{Errno, Result};
use super::rdma::IbDevice;
use crate::device::Device;
use core::ffi::c_void;
use core::ptr::NonNull;

/// Finds the interface for this MAC address (zero: any) and makes it the one of the port. True if that changed
/// anything. May sleep; must not be called with the RTNL held.
pub(crate) fn pair(ib: IbDevice, mac: &[u8; 6]) -> bool {
    // SAFETY: process context; released below.
    unsafe { bindings::rtnl_lock() };
    // SAFETY: with the RTNL held an interface does not go away; the core takes a reference of its own.
    let changed = unsafe {
        let found = bindings::vrdma_netdev_find(mac.as_ptr());
        !bindings::vrdma_netdev_is(ib.as_ptr(), found)
            && bindings::ib_device_set_netdev(ib.as_ptr(), found, 1) == 0
    };
    // SAFETY: held since above.
    unsafe { bindings::rtnl_unlock() };
    changed
}

/// Is the paired interface up, with carrier?
pub(crate) fn is_up(ib: IbDevice) -> bool {
    // SAFETY: the device is allocated, and has one port.
    unsafe { bindings::vrdma_netdev_is_up(ib.as_ptr()) }
}

/// Tells when interfaces come, go or change.
pub(crate) struct NetdevWatch {
    watch: NonNull<bindings::vrdma_netdev_watch>,
    _context: Box<WatchContext>,
}

struct WatchContext {
    ib: IbDevice,
    changed: fn(&Device),
}

// SAFETY: start and stop are called by one thread at a time (probe and remove).
unsafe impl Send for NetdevWatch {}
// SAFETY: as above.
unsafe impl Sync for NetdevWatch {}

impl NetdevWatch {
    /// `changed` must not sleep for long: it runs with the RTNL held.
    pub(crate) fn new(ib: IbDevice, changed: fn(&Device)) -> Result<Self> {
        let context = Box::new(WatchContext { ib, changed })?;
        // SAFETY: the context lives until drop, and the watch is stopped there.
        let watch = unsafe { bindings::vrdma_netdev_watch_new(Some(on_event), context.as_ptr().cast()) };
        Ok(Self {
            watch: NonNull::new(watch).ok_or(Errno::ENOMEM)?,
            _context: context,
        })
    }

    /// From here on, and first for all interfaces that are there already. The device must be in place.
    pub(crate) fn start(&self) -> Result<()> {
        // SAFETY: initialized.
        Errno::check(unsafe { bindings::vrdma_netdev_watch_start(self.watch.as_ptr()) })
    }

    /// No longer. Returns when no call is under way.
    pub(crate) fn stop(&self) {
        // SAFETY: initialized.
        unsafe { bindings::vrdma_netdev_watch_stop(self.watch.as_ptr()) }
    }
}

impl Drop for NetdevWatch {
    fn drop(&mut self) {
        self.stop();
        // SAFETY: owned and stopped.
        unsafe { bindings::kfree(self.watch.as_ptr().cast()) }
    }
}

unsafe extern "C" fn on_event(arg: *mut c_void, ndev: *mut bindings::net_device, going: bool) {
    // SAFETY: `arg` is the context given to vrdma_netdev_watch_new; it outlives the watch.
    let context = unsafe { &*arg.cast::<WatchContext>() };
    // SAFETY: called with the RTNL held. An interface that goes must be let go of at once.
    unsafe {
        if going && bindings::vrdma_netdev_is(context.ib.as_ptr(), ndev) {
            bindings::ib_device_set_netdev(context.ib.as_ptr(), core::ptr::null_mut(), 1);
        }
    }
    // SAFETY: the watch is started after the device was put in place and stopped before it is dropped.
    (context.changed)(unsafe { context.ib.device() });
}
