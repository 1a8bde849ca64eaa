// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Addresses of datagrams, and multicast groups. The device knows no address handles: every
//! datagram carries its address.
use super::Qp;
use crate::device::Device;
use crate::sys::error::Result;
use crate::sys::rdma::Udata;
use virtio_rdma_driver_core::abi;
use virtio_rdma_spec::command::{opcode, AddressVector, Multicast};

/// An address handle.
pub(crate) struct Ah {
    address: AddressVector,
}

impl Ah {
    /// The address.
    pub(crate) fn address(&self) -> &AddressVector {
        &self.address
    }
}

/// Creates an address handle. Does not sleep if it is for the kernel.
pub(crate) fn create_ah(address: AddressVector, udata: Udata<'_>) -> Result<Ah> {
    udata.read::<0>()?;
    let answer = abi::CreateAhResponse {
        dmac: address.dmac,
        reserved: 0,
    };
    udata.write(&answer.to_bytes())?;
    Ok(Ah { address })
}

/// Attaches a queue pair to a multicast group, or detaches it.
pub(crate) fn multicast(device: &Device, qp: &Qp, gid: [u8; 16], attach: bool) -> Result<()> {
    let body = Multicast {
        gid,
        qpn: qp.handle(),
        reserved: 0,
    };
    if attach {
        return device.simple_command(opcode::ATTACH_MCAST, &body);
    }
    match device.simple_command(opcode::DETACH_MCAST, &body) {
        // With the device's objects it was detached.
        Err(_) if device.commands().is_dead() => Ok(()),
        result => result,
    }
}
