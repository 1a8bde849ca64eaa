// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers: how many objects a VM may have, and how large things may be.
use serde::{Deserialize, Serialize};

/// Entries of the GID table.
pub const GID_TABLE_LEN: usize = 32;
/// Longest message, bytes.
pub const MAX_MESSAGE: u64 = 1 << 31;
/// Longest RDMA WRITE and RDMA READ of an SRD queue pair, bytes.
pub const MAX_SRD_MESSAGE: u64 = 1 << 30;
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

/// Regions of memory that a front end may have, as it is told (GET_MAX_MEM_SLOTS).
pub const MAX_MEMORY_REGIONS: usize = 509;

/// What a VM may make this process keep if nothing else is configured: so much, and an eighth of
/// its own memory.
const FOOTPRINT_BASE: u64 = 64 << 20;
/// For large VMs it is less: so much, and a 256th of its memory. (Page lists of all its memory, in
/// pages of 4 KiB of which none follows another, are a 512th.)
const FOOTPRINT_LARGE: u64 = 1 << 30;

/// A front end shares more memory than it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TooMuchMemory {
    /// It is in too many regions.
    #[error("memory in {0} regions: {MAX_MEMORY_REGIONS} are the most")]
    Regions(usize),
    /// It is too large.
    #[error("{size} bytes of memory: the limit 'memory' of this device is {limit}")]
    Bytes {
        /// Bytes in all regions.
        size: u64,
        /// Bytes that there may be.
        limit: u64,
    },
}

/// How many objects a VM may have, how much of our memory they may take, and how much memory it may
/// share with us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// What the VM makes this process keep in all, bytes; otherwise in proportion to its memory:
    /// see [`Limits::footprint`].
    pub footprint: Option<u64>,
    /// Memory that the front end shares in all, bytes of our address space; otherwise 16 TiB, or
    /// less if there are many devices: see [`memory_of_each`].
    pub memory: Option<u64>,
}

impl Limits {
    /// What a VM with so much memory may make this process keep, bytes: as configured, or 64 MiB
    /// and an eighth of its memory; for large VMs 1 GiB and a 256th.
    #[must_use]
    pub fn footprint(&self, memory: u64) -> u64 {
        let small = FOOTPRINT_BASE.saturating_add(memory / 8);
        let large = FOOTPRINT_LARGE.saturating_add(memory / 256);
        self.footprint.unwrap_or(small.min(large))
    }

    /// Memory that the front end shares in all, at most, bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory.unwrap_or(memory_of_each(1))
    }

    /// Checks memory of `size` bytes in so many regions.
    ///
    /// # Errors
    /// If it is too much.
    pub fn check_memory(&self, regions: usize, size: u64) -> Result<(), TooMuchMemory> {
        if regions > MAX_MEMORY_REGIONS {
            return Err(TooMuchMemory::Regions(regions));
        }
        let limit = self.memory();
        if size > limit {
            return Err(TooMuchMemory::Bytes { size, limit });
        }
        Ok(())
    }
}

/// The limit of memory for each of `devices` if nothing else is configured: an equal part of half
/// of our address space, which is 2^47 bytes, and no more than 16 TiB.
#[must_use]
pub const fn memory_of_each(devices: usize) -> u64 {
    let half = 1u64 << 46;
    match half.checked_div(devices as u64) {
        Some(part) if part < 16 << 40 => part,
        _ => 16 << 40,
    }
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
            footprint: None,
            memory: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_vm_makes_us_keep_is_in_proportion_to_its_memory() {
        let of = |memory| Limits::default().footprint(memory);
        assert_eq!(of(0), 64 << 20);
        assert_eq!(of(64 << 20), 72 << 20);
        assert_eq!(of(4 << 30), 576 << 20);
        // Of a large VM, all pages can be registered, twice, one by one.
        assert!(of(512 << 30) >= 2 * (512 << 30) / 512 + (1 << 30));
        assert!(of(u64::MAX) < 1 << 57);
        let configured = Limits {
            footprint: Some(1 << 20),
            ..Limits::default()
        };
        assert_eq!(
            [0, 1 << 40].map(|memory| configured.footprint(memory)),
            [1 << 20; 2]
        );
    }

    #[test]
    fn memory_is_limited_so_that_there_is_room_for_all_devices() {
        for devices in [0, 1, 4, 5, 100, 10_000] {
            let each = memory_of_each(devices);
            assert!(each * devices as u64 <= 1 << 46 && each <= 16 << 40);
        }
        let limits = Limits {
            memory: Some(1 << 30),
            ..Limits::default()
        };
        assert_eq!(limits.check_memory(509, 1 << 30), Ok(()));
        let [many, large] = [(510, 0), (1, (1 << 30) + 1)]
            .map(|(regions, size)| limits.check_memory(regions, size).unwrap_err());
        assert_eq!(many.to_string(), "memory in 510 regions: 509 are the most");
        assert!(large.to_string().contains("limit 'memory'"));
    }
}
