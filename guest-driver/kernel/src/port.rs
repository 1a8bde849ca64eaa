// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The port and its network interface: they are paired by MAC address, and the port is active when the device's link
//! and the interface are up.
use crate::device::Device;
use core::sync::atomic::Ordering;
use virtio_rdma_spec::event::event_type;

/// States of a port, as in verbs.
pub(crate) mod state {
    /// No link.
    pub(crate) const DOWN: u8 = 1;
    /// Works.
    pub(crate) const ACTIVE: u8 = 4;
}

impl Device {
    /// Is the port active, as things are now?
    pub(crate) fn port_is_active(&self) -> bool {
        !self.commands().is_dead() && self.link_up().load(Ordering::Relaxed) && self.netdev_is_up()
    }

    /// Something about the device, its link or an interface changed: looks at all of it again. The work item for that;
    /// process context.
    pub(crate) fn refresh(&self) {
        if self.is_closing() || self.commands().is_dead() {
            return;
        }
        if self.take_failed() || self.virtio().needs_reset() {
            self.fail("the device failed, or its process on the host ended");
            return;
        }
        self.link_up()
            .store(self.virtio().link_up(), Ordering::Relaxed);
        if self.pair() {
            self.ib().rescan_gids();
        }
        self.report_port();
    }

    /// Tells the users of the port when it came up or went down.
    pub(crate) fn report_port(&self) {
        let active = self.port_is_active();
        if self.port_active().swap(active, Ordering::AcqRel) != active && !self.is_closing() {
            self.ib().dispatch(if active {
                event_type::PORT_ACTIVE
            } else {
                event_type::PORT_ERR
            });
        }
    }
}
