// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The network interface that the port is paired with.
use super::alloc::Box;
use super::bindings;
use super::error::{Errno, Result};
use super::rdma::IbDevice;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The pairing of the port with an interface, and a watch on interfaces that come, go or change.
pub(crate) struct Pairing<D> {
    watch: NonNull<bindings::vrdma_netdev_watch>,
    context: Box<Watched<D>>,
}

struct Watched<D> {
    ib: IbDevice<D>,
    changed: fn(&D),
    /// The paired interface, only for comparing. Written with the RTNL held.
    paired: AtomicPtr<bindings::net_device>,
}

// SAFETY: start and stop are called by one thread at a time (probe and remove); the rest is under
// the RTNL.
unsafe impl<D: Sync> Send for Pairing<D> {}
// SAFETY: as above.
unsafe impl<D: Sync> Sync for Pairing<D> {}

impl<D> Watched<D> {
    /// Makes this interface (or none) the one of the port; true if it was not.
    ///
    /// # Safety
    /// The RTNL must be held, and the interface registered.
    unsafe fn set(&self, ndev: *mut bindings::net_device) -> bool {
        if self.paired.load(Ordering::Relaxed) == ndev {
            return false;
        }
        // SAFETY: the device is allocated and has port 1; the core takes a reference of its own.
        let set = unsafe { bindings::ib_device_set_netdev(self.ib.as_ptr(), ndev, 1) } == 0;
        if set {
            self.paired.store(ndev, Ordering::Relaxed);
        }
        set
    }
}

impl<D> Pairing<D> {
    /// `changed` is called when something about interfaces changed. It must not sleep for long: the
    /// RTNL is held.
    pub(crate) fn new(ib: IbDevice<D>, changed: fn(&D)) -> Result<Self> {
        let context = Box::new(Watched {
            ib,
            changed,
            paired: AtomicPtr::new(core::ptr::null_mut()),
        })?;
        // SAFETY: the context lives until drop, and the watch is stopped there.
        let watch = unsafe {
            bindings::vrdma_netdev_watch_new(Some(on_event::<D>), context.as_ptr().cast())
        };
        Ok(Self {
            watch: NonNull::new(watch).ok_or(Errno::ENOMEM)?,
            context,
        })
    }

    /// Pairs the port with the interface that has this MAC address (zero: the first with any), or
    /// with none. True if that changed anything. May sleep; must not be called with the RTNL held.
    pub(crate) fn pair(&self, mac: &[u8; 6]) -> bool {
        // SAFETY: process context; released below.
        unsafe { bindings::rtnl_lock() };
        // SAFETY: with the RTNL held the interface that is found stays.
        let changed = unsafe { self.context.set(bindings::vrdma_netdev_find(mac.as_ptr())) };
        // SAFETY: held since above.
        unsafe { bindings::rtnl_unlock() };
        changed
    }

    /// Is there a paired interface?
    pub(crate) fn is_paired(&self) -> bool {
        !self.context.paired.load(Ordering::Relaxed).is_null()
    }

    /// Is the paired interface up, with carrier?
    pub(crate) fn is_up(&self) -> bool {
        // SAFETY: the device is allocated, and has one port.
        unsafe { bindings::vrdma_netdev_is_up(self.context.ib.as_ptr()) }
    }

    /// Watches from here on; first come events for all interfaces that are there already. The
    /// device must be in place.
    pub(crate) fn start(&self) -> Result<()> {
        // SAFETY: initialized.
        Errno::check(unsafe { bindings::vrdma_netdev_watch_start(self.watch.as_ptr()) })
    }

    /// Watches no longer. Returns when no call is under way.
    pub(crate) fn stop(&self) {
        // SAFETY: initialized.
        unsafe { bindings::vrdma_netdev_watch_stop(self.watch.as_ptr()) }
    }
}

impl<D> Drop for Pairing<D> {
    fn drop(&mut self) {
        self.stop();
        // SAFETY: owned and stopped.
        unsafe { bindings::kfree(self.watch.as_ptr().cast()) }
    }
}

unsafe extern "C" fn on_event<D>(arg: *mut c_void, ndev: *mut bindings::net_device, going: bool) {
    // SAFETY: `arg` is the context given to vrdma_netdev_watch_new; it outlives the watch.
    let context = unsafe { &*arg.cast::<Watched<D>>() };
    // An interface that goes must be let go of at once: its going waits for that.
    if going && context.paired.load(Ordering::Relaxed) == ndev {
        // SAFETY: called with the RTNL held.
        unsafe { context.set(core::ptr::null_mut()) };
    }
    // SAFETY: the watch is started after the device was put in place and stopped before it is
    // dropped.
    (context.changed)(unsafe { context.ib.device() });
}
