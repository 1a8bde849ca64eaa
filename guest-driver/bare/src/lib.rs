// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM without a VM: a front end over memfd memory, of vhost-user or of vfio-user, that plays QEMU
//! and the guest driver, and drives a `vhost-device-rdma` at native speed. Tests, fuzzers and
//! benchmarks stand on it.
//!
//! [`DeviceProcess`] starts the device, [`Vm`] connects to one of its sockets and brings up the
//! virtqueues, and from there it is verbs: [`Context`], [`Pd`], [`Mr`], [`Cq`], [`Srq`], [`Xrcd`],
//! [`Qp`], with rings, doorbells and commands from `virtio-rdma-driver-core`. The life of a VM can
//! be played too ([`Vm::stop`], [`Vm::start`], [`Vm::reset`], [`Vm::add_memory`],
//! [`Vm::remove_memory`]), and what no driver would do: raw commands, raw descriptor chains, any
//! byte anywhere in memory.
//!
//! Objects destroy themselves on the device when dropped, in any order that Rust drops them in;
//! `destroy` does the same and tells what the device said.
//!
//! `unsafe` is confined to [`mapping`], where shared memory is mapped and seen as atomics.
#![deny(unsafe_code)]

mod front_end;
pub mod mapping;
mod memory;
pub mod pci;
mod process;
mod srq;
mod verbs;
mod virtqueue;
mod vm;

pub use front_end::FrontEnd;
pub use mapping::View;
pub use memory::{block_list, page_list, Buffer, Placement, Region};
pub use process::{DeviceProcess, ProcessOptions};
pub use srq::{Srq, SrqOptions, Xrcd};
pub use verbs::{
    Address, Connection, Context, Cq, FastMr, Mr, Mw, Pd, Polling, Qp, QpOptions, Uses, RECV_FLAG,
};
pub use virtio_rdma_driver_core as core;
pub use virtio_rdma_spec as spec;
pub use virtqueue::{Descriptor, Virtqueue};
pub use vm::{Vm, VmOptions};

use virtio_rdma_driver_core::command::CommandError;

/// Size of a page, bytes.
pub const PAGE: usize = virtio_rdma_spec::PAGE_SIZE as usize;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("the system refused")]
    Io(#[from] std::io::Error),
    /// The vhost-user connection failed, or the device refused a message.
    #[error("vhost-user: {0}")]
    Vhost(#[from] vhost::Error),
    /// The vfio-user connection failed.
    #[error("vfio-user: {0}")]
    VfioUser(#[from] vfio_user::Error),
    /// Only a VM that has the device by vhost-user can do that.
    #[error("not by vfio-user")]
    VhostUserOnly,
    /// The device refused a command.
    #[error("the device refused the command: {0}")]
    Command(#[from] CommandError),
    /// The device did not answer in time.
    #[error("no answer from the device")]
    Timeout,
    /// The memory of the VM is exhausted.
    #[error("no memory left in the VM")]
    NoMemory,
    /// No such memory.
    #[error("not an address of whole pages")]
    BadAddress,
    /// A virtqueue has no descriptors left.
    #[error("the virtqueue is full")]
    QueueFull,
    /// A queue cannot be what it is asked to be.
    #[error("a queue cannot be as asked")]
    BadLayout,
    /// A work request was not posted.
    #[error("the work request was not posted: {0}")]
    Post(#[from] virtio_rdma_driver_core::PostError),
    /// The device is not one that this driver knows.
    #[error("the device offers {0:#x}, which is not enough")]
    Features(u64),
    /// The device process did not come up.
    #[error("the device process did not come up: {0}")]
    Process(String),
}

impl Error {
    /// The status of the command, if the device refused one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Command(CommandError::Status(status)) => Some(*status),
            _ => None,
        }
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

impl From<virtio_rdma_driver_core::BadLayout> for Error {
    fn from(_: virtio_rdma_driver_core::BadLayout) -> Self {
        Self::BadLayout
    }
}
