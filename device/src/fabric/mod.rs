// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fabrics carry messages between queue pairs. There is one so far: [`local`], between the VMs of
//! this process.

pub mod local;
