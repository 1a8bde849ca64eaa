// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the kernel module, the rdma-core provider and the bare front end share: rings, work queue entries, completion
//! parsing, doorbells, control commands, and the private interface between module and provider.
#![no_std]
#![forbid(unsafe_code)]

pub mod abi;
