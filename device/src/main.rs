// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vhost-device-rdma.
fn main() {}
