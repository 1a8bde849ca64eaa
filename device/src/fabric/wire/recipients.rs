// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whom the fabric asks which VMs a frame is for.
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::{Segment, Vm};

/// Who a frame may be for.
pub(crate) trait Recipients {
    /// Calls `visit` with the tables of each VM that has the destination of a frame, or has queue
    /// pairs in that group. The frame, of so many bytes, is work that is done for the VM. Returns
    /// false if a VM is busy for a moment, and calls nothing if the frame can wait.
    fn visit(&mut self, to: Destination, frame: Arriving, visit: &mut dyn FnMut(&Tables)) -> bool;

    /// Calls `visit` with the tables of a VM, whatever destinations it has. Returns false if it is busy
    /// for a moment.
    fn visit_vm(&mut self, vm: &Vm, visit: &mut dyn FnMut(&Tables)) -> bool;
}

/// What there is to know of a frame that comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arriving {
    /// Its length, bytes.
    pub bytes: usize,
    /// The GID that it is from.
    pub source: Gid,
    /// Whether it can wait for a VM that is busy.
    pub can_wait: bool,
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Destination {
    pub segment: Segment,
    pub gid: Gid,
}
