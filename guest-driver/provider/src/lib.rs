// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-rdma-provider.
