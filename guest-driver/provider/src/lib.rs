// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! libvirtio_rdma: the rdma-core provider of the virtio RDMA device.
//!
//! libibverbs loads it, finds it responsible for the device, and calls its operations. Creating
//! things goes through the kernel module; posting and polling work on rings and doorbells in memory
//! shared with the device, without a system call. What libibverbs asks for and is not set here, it
//! answers itself, with EOPNOTSUPP.
//!
//! The C interface, and all unsafe code with it, is in the module `ffi`; rings and doorbells are
//! those of the crate `virtio-rdma-driver-core`. A panic cannot unwind into C: `extern "C"`
//! functions abort instead.
#![deny(unsafe_code)]
// Without the registration nothing calls the operations.
#![cfg_attr(test, allow(dead_code))]

#[allow(unsafe_code)]
mod ffi;
