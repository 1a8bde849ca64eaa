// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What requester and responder say to each other.

/// A message, as its responder needs to know it.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// `wr_opcode`.
    pub opcode: u8,
    /// Raise a solicited event at the responder.
    pub solicited: bool,
    /// Immediate data.
    pub imm: u32,
    /// Remote virtual address.
    pub remote_addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Sending queue pair.
    pub src_qp: u32,
    /// Length in all, bytes.
    pub length: u64,
}

/// How a message, or a slice of it, fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The slice was placed; the message goes on.
    Progress,
    /// The message is complete.
    Done,
    /// The peer is occupied for a moment: try again soon.
    Busy,
    /// The peer's VM is stopped: wait, this does not count.
    Stopped,
    /// Nobody is there.
    NoAnswer,
    /// The responder has no receive work request: its RNR timer code.
    NotReady(u8),
    /// The responder refused: the requester's completion status, and the reason.
    Refused(u8, u8),
    /// Our own memory is not as the keys say: completion status, and the reason.
    Local(u8, u8),
}
