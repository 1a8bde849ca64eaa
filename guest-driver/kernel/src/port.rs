// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The port and its network interface: they are paired by MAC address, and the port is active when
//! the device's link and the interface are up.
use crate::device::Device;
use core::sync::atomic::Ordering;
use virtio_rdma_spec::command::{opcode, SetPortState};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::event::event_type;

/// The only port.
pub(crate) const PORT: u8 = 1;

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

    /// Something about the device, its link or an interface changed: looks at all of it again. The
    /// work item for that; process context.
    pub(crate) fn refresh(&self) {
        if self.is_closing() || self.commands().is_dead() {
            return;
        }
        if self.is_distrusted() {
            self.give_up();
            return;
        }
        if self.take_failed() || self.virtio().needs_reset() {
            self.fail("the device failed, or its process on the host ended");
            return;
        }
        self.link_up()
            .store(self.virtio().link_up(), Ordering::Relaxed);
        self.pair_again();
        self.tell_port_state();
        self.report_port();
    }

    /// Pairs the port anew if interfaces have changed, and makes the GID table follow.
    fn pair_again(&self) {
        let changed = self.pair();
        if !self.features().has(feature::IWARP) {
            if changed {
                self.ib().rescan_gids();
            }
        } else if !self.is_paired() {
            // The entry holds the interface that went, which waits for that.
            self.ib().delete_gids();
        } else if changed {
            self.ib().renew_gid();
        }
    }

    /// Tells the device when the interface came up or went down, so that the port's traffic goes on
    /// or stops with it. Process context.
    pub(crate) fn tell_port_state(&self) {
        let up = self.netdev_is_up();
        if !self.features().has(feature::PORT_STATE)
            || self.port_told_up().swap(up, Ordering::AcqRel) == up
        {
            return;
        }
        let body = SetPortState {
            port_num: PORT,
            up: u8::from(up),
            ..Default::default()
        };
        if let Err(error) = self.simple_command(opcode::SET_PORT_STATE, &body) {
            if !self.commands().is_dead() {
                self.virtio()
                    .failed("the device was not told of the state of the port", error);
            }
        }
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
