// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers: how many objects a VM may have, and how large things may be.
use serde::Deserialize;

/// Entries of the GID table.
pub const GID_TABLE_LEN: usize = 32;
/// Longest message, bytes.
pub const MAX_MESSAGE: u64 = 1 << 31;
/// Longest datagram, bytes: the port's MTU.
pub const MAX_DATAGRAM: u64 = 4096;
/// Most RDMA READ and atomic operations outstanding, as requester and as responder.
pub const MAX_RD_ATOMIC: u8 = 128;
/// Number of the port.
pub const PORT: u32 = 1;
/// Number of a port's GSI queue pair, as messages name it.
pub const GSI_QPN: u32 = 1;
/// Most workers.
pub const MAX_WORKERS: u16 = 8;
/// Most completion-event queues.
pub const MAX_COMPLETION_QUEUES: u16 = 32;

/// How many objects a VM may have, and how much of our memory their page lists may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Contexts.
    pub contexts: u32,
    /// Protection domains.
    pub pds: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub mws: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// XRC domains.
    pub xrcds: u32,
    /// Attachments to multicast groups.
    pub multicast: u32,
    /// Page lists of all objects, bytes of this process.
    pub footprint: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            contexts: 4096,
            pds: 65536,
            mrs: 1 << 20,
            mws: 1 << 20,
            cqs: 131_072,
            qps: 131_072,
            srqs: 65536,
            xrcds: 4096,
            multicast: 4096,
            footprint: 1 << 30,
        }
    }
}
