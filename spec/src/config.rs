// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration space, virtqueues and feature bits (specification: "Virtqueues", "Feature bits",
//! "Configuration").
use crate::{constants, layouts};

layouts! {
    /// The device configuration space.
    pub struct Config(64) {
        /// MAC address of the network interface this RNIC is paired with; all zero: none is named.
        0 => mac: [u8; 6],
        /// Completion-event queues (C), at least 1.
        6 => num_completion_queues: u16,
        /// Doorbell queues (D), one per worker, at least 1.
        8 => num_doorbell_queues: u16,
        /// Link: 1 up, 0 down. A change raises a configuration change interrupt.
        10 => link_up: u8,
        /// Reserved, zero.
        11 => reserved0: [u8; 5],
        /// Node GUID, as a number (the most significant byte is the first on the wire).
        16 => node_guid: u64,
        /// Reserved, zero.
        24 => reserved1: [u8; 40],
    }
}

/// Virtqueue 0 carries control commands.
pub const CONTROL_QUEUE: u16 = 0;
/// Virtqueue 1 carries asynchronous events.
pub const EVENT_QUEUE: u16 = 1;
/// First completion-event queue.
pub const FIRST_COMPLETION_QUEUE: u16 = 2;
/// Queues in all that a device may have.
pub const MAX_QUEUES: u16 = 64;

/// First doorbell queue of a device with `completion_queues` completion-event queues.
#[must_use]
pub const fn first_doorbell_queue(completion_queues: u16) -> u16 {
    FIRST_COMPLETION_QUEUE.saturating_add(completion_queues)
}

constants! {
    /// Device-specific feature bits (bit numbers).
    pub mod feature: u32 {
        /// RC queue pairs with SEND, RDMA WRITE, RDMA READ and their immediate forms. Always
        /// offered; a driver that does not accept it has no queue pairs.
        RC = 0,
        /// UD queue pairs, the GSI queue pair, multicast.
        UD = 1,
        /// UC queue pairs.
        UC = 2,
        /// Shared receive queues.
        SRQ = 3,
        /// XRC domains, XRC queue pairs, XRC shared receive queues. Needs SRQ.
        XRC = 4,
        /// Atomic operations of 8 bytes, plain and masked, and ATOMIC_WRITE.
        ATOMIC = 5,
        /// Memory windows, LOCAL_INV and SEND_WITH_INV.
        MW = 6,
        /// REREG_MR.
        REREG_MR = 7,
        /// RESIZE_CQ.
        RESIZE_CQ = 8,
        /// Completions with time stamps.
        CQ_TIMESTAMP = 9,
        /// FLUSH.
        FLUSH = 10,
        /// Regions of all guest memory (REG_MR with PHYSICAL).
        PHYSICAL_MR = 11,
        /// RESIZE_SRQ. Needs SRQ.
        SRQ_RESIZE = 12,
        /// MODIFY_CQ: fewer completion events.
        CQ_MODERATION = 13,
        /// ALLOC_MR, fast registration, invalidation of regions. Needs PHYSICAL_MR.
        FAST_REG = 14,
        /// SET_PORT_STATE: the driver takes the port down and up.
        PORT_STATE = 15,
        /// Completions of datagrams say whether an IPv4 header is in front of them.
        HEADER_TYPE = 16,
        /// QUERY_COUNTERS: what became of packets.
        COUNTERS = 17,
        /// SRD queue pairs.
        SRD = 18,
        /// The port is one of iWARP: its queue pairs are of type IWARP, and the device makes their
        /// connections.
        IWARP = 19,
    }
}
