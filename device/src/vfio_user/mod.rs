// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends that speak vfio-user: this process has the whole PCI device, and the VMM, which may
//! be one that knows nothing of RDMA, only passes on what the guest does to it. This module knows
//! nothing of verbs.
//!
//! A session (`server`) has two threads, as with vhost-user. One reads messages and answers them:
//! `stream` takes them from the socket, `protocol` from their bytes, and `backend` says what they
//! mean for the PCI device. Of that, `pci` is the configuration space and where things are in the
//! BARs, `registers` the virtio registers that are there, `memory` the memory of the VM. The other
//! thread executes the commands in the control queue and delivers events. Both change the device, a
//! [`crate::virtio::VirtioDevice`], in turn.
//!
//! A guest's write to a notify page comes as a message, and is answered as soon as the eventfd of
//! the virtqueue is signaled: a VMM may wait for the answer, and must not wait for a command. QEMU
//! wants none, as long as no region can be mapped. Notifications of doorbell queues are the workers',
//! who tell the driver in its memory when they need none.
//!
//! The first worker, if it sleeps, is woken by the message itself, and takes it, so that not two threads
//! have to wake up one after the other ([`crate::worker`]'s `messages`). All other messages, and those
//! that come while that worker is awake, are the first thread's. It signals the eventfds of the other
//! workers' queues, as the first worker does with notifications that it has taken and that are not its
//! own.
//!
//! This module must never block on something that a guest or a front end can withhold, except on
//! the front end's own connection.
//!
//! # Why there is no crate for the protocol
//! `vfio_user` 0.1.7 has a `Server`, which trusts who connects to it: it allocates as many bytes as
//! a message asks for (`handle_command`: 4 GiB for REGION_READ), panics at a version without its
//! last byte and at a length below that of the header, cannot be told to stop waiting for a client
//! or for the rest of a message (`run`), and goes on after messages that it has not read to their
//! end. Its `Client` is what this module is tested with.
//!
//! # What front ends do not get
//! - Interrupts other than MSI-X.
//! - Memory that may not be written, or comes without a file descriptor (DMA_READ and DMA_WRITE):
//!   it may be mapped, and is then none of the VM.
//! - Migration, dirty pages, and file descriptors of regions: QEMU asks for none of a notify page.
//! - A word when the VM is stopped: the protocol has none.
#![forbid(unsafe_code)]

mod backend;
mod memory;
mod pci;
mod protocol;
mod registers;
mod server;
mod stream;

pub use server::serve;
