// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The peer that a queue pair was connected to, as opposed to one that has its GID and number later
//! (specification: "Peers").
use std::sync::atomic::{AtomicU64, Ordering};

use super::queue_pair::Qp;
use super::tables::Gid;
use super::vm::Vm;

/// A number that is given once in this process, and is above all that were given before.
pub(super) fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The queue pairs that may be the peer of a connected queue pair: those that the VM with the
/// destination GID had when the queue pair went to RTR. Of these, at most one has the peer's number
/// and lives, so that this is the one that was meant.
///
/// The default is a binding to nobody. Serial numbers are those of this process: who takes queue
/// pairs over from another one has to bind them anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Binding {
    /// Serial number of the VM.
    vm: u64,
    /// The queue pair was created before this number was given.
    before: u64,
}

impl Binding {
    /// A binding to what a VM has now.
    pub(crate) fn to(vm: &Vm) -> Self {
        Self {
            vm: vm.serial(),
            before: serial(),
        }
    }

    /// Whether a queue pair is one of those.
    #[inline(always)]
    pub(crate) fn admits(&self, qp: &Qp) -> bool {
        qp.serial < self.before && qp.vm_serial == self.vm
    }
}

/// What a fabric knows of GIDs, for queue pairs that are connected.
pub(crate) trait Peers {
    /// A queue pair of `vm` has `gid` for its destination from now on. Returns the binding to the
    /// VM that has that GID, and whether the GID is kept for that VM's device until
    /// [`Self::forget`].
    fn connect(&self, vm: &Vm, gid: Gid) -> (Binding, bool);

    /// A queue pair of `vm` for which `gid` was kept has another destination, or none.
    fn forget(&self, vm: &Vm, gid: Gid);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_numbers_rise() {
        let first = serial();
        assert!(first > 0 && serial() > first);
    }
}
