// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Capabilities, and privileges that a program that is executed would bring.
use rustix::io::Errno;
use rustix::thread::{
    capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, CapabilitySet,
    CapabilitySets,
};

/// Empties the bounding set: no program that is executed gets a capability. It takes a capability
/// to do that; who has none gets none by [`give_up`] either.
pub(super) fn forget_bounding_set() {
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(capability) {
            Ok(true) => {
                if remove_capability_from_bounding_set(capability).is_err() {
                    return;
                }
            }
            Ok(false) => {}
            // The kernel has no more.
            Err(_) => return,
        }
    }
}

/// Gives up all capabilities of the calling thread, and privileges of programs.
pub(super) fn give_up() -> Result<(), Errno> {
    // Kernels before 4.3 have no such set.
    let _ = clear_ambient_capability_set();
    set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        },
    )?;
    set_no_new_privs(true)
}
