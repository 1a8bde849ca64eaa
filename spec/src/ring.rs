// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rings in guest memory and their entries (specification: "Rings").
//!
//! A ring has a power-of-two number of entries of a power-of-two stride. Each entry carries a phase
//! bit: it is 1 in the first lap, and flips with every lap; the ring starts zeroed. The writer of
//! an entry writes everything else first and then, with release order, the 8 aligned bytes that
//! hold the phase; the reader reads these 8 bytes first, with acquire order. There is no producer
//! index, hence none that could be wrong.
use crate::command::PageList;
use crate::layouts;

layouts! {
    /// A scatter/gather entry.
    pub struct Sge(16) {
        /// Virtual address (or offset, for zero-based regions) in the region.
        0 => addr: u64,
        /// Length, bytes. Zero: the entry is skipped.
        8 => length: u32,
        /// Local key of the region.
        12 => lkey: u32,
    }

    /// The first bytes of an entry of a send queue; scatter/gather entries or inline data follow at
    /// offset 48.
    pub struct SendWqe(48) {
        /// `wr_opcode`.
        0 => opcode: u8,
        /// `send_flag` bits, and `PHASE`.
        1 => flags: u8,
        /// Scatter/gather entries, or with INLINE the bytes of payload.
        2 => count: u16,
        /// Immediate data (four octets, as the application gave them), or the key to invalidate.
        4 => imm: u32,
        /// Work request id, returned in the completion.
        8 => wr_id: u64,
        /// Remote virtual address.
        16 => remote_addr: u64,
        /// Remote key.
        24 => rkey: u32,
        /// XRC: number of the remote SRQ. Otherwise zero.
        28 => srqn: u32,
        /// Atomic operations: operand to add or to compare with. FLUSH: length of the range, bytes.
        /// Otherwise zero.
        32 => operand0: u64,
        /// Atomic operations: operand to swap in. FLUSH: `flush_type` bits, and `flush_level` in
        /// bits 8 to 15. Otherwise zero.
        40 => operand1: u64,
    }

    /// The first bytes of an entry of the send queue of a UD or GSI queue pair; scatter/gather
    /// entries or inline data follow at offset 64.
    pub struct UdWqe(64) {
        /// `wr_opcode`: SEND or SEND_WITH_IMM.
        0 => opcode: u8,
        /// `send_flag` bits, and `PHASE`.
        1 => flags: u8,
        /// Scatter/gather entries, or with INLINE the bytes of payload.
        2 => count: u16,
        /// Immediate data (four octets, as the application gave them).
        4 => imm: u32,
        /// Work request id, returned in the completion.
        8 => wr_id: u64,
        /// Destination GID; a multicast GID reaches the group.
        16 => dgid: [u8; 16],
        /// Destination queue pair; 0xffffff for multicast.
        32 => remote_qpn: u32,
        /// Q_Key of the message. With bit 31 set the sender's own Q_Key is used.
        36 => remote_qkey: u32,
        /// Flow label, 20 bits.
        40 => flow_label: u32,
        /// Index of the source GID.
        44 => sgid_index: u16,
        /// Service level, 0 to 15.
        46 => sl: u8,
        /// Traffic class.
        47 => traffic_class: u8,
        /// Hop limit.
        48 => hop_limit: u8,
        /// Reserved, zero.
        49 => reserved0: u8,
        /// Destination MAC address.
        50 => dmac: [u8; 6],
        /// GSI: index of the P_Key of the message. Otherwise zero.
        56 => pkey_index: u16,
        /// Reserved, zero.
        58 => reserved1: [u8; 6],
    }

    /// The same for SRD queue pairs, as far as it goes on; scatter/gather entries or inline data follow
    /// at offset 80.
    pub struct SrdRange(16) {
        /// RDMA WRITE and RDMA READ: remote virtual address. Otherwise zero.
        0 => remote_addr: u64,
        /// RDMA WRITE and RDMA READ: remote key. Otherwise zero.
        8 => rkey: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }

    /// An entry of a send queue that binds a memory window, as far as it differs from `SendWqe`:
    /// bytes 16 to 64.
    pub struct BindMw(48) {
        /// First address of the window, as remote work requests name it.
        0 => addr: u64,
        /// Present rkey of the window.
        8 => mw_rkey: u32,
        /// Reserved, zero.
        12 => reserved: u32,
        /// Length of the window, bytes. Zero: the window is bound to nothing.
        16 => length: u64,
        /// `access` of the window.
        24 => access: u32,
        /// lkey of the region.
        28 => mr_lkey: u32,
        /// Address of the window's first byte in the region.
        32 => mr_addr: u64,
        /// The rkey of the window after the bind: the present one with other low 8 bits.
        40 => new_rkey: u32,
        /// Reserved, zero.
        44 => reserved1: u32,
    }

    /// An entry of a send queue that registers a region, as far as it differs from `SendWqe`: bytes
    /// 16 to 64.
    pub struct FastReg(48) {
        /// Address of the first byte, as work requests name it.
        0 => iova: u64,
        /// The key of the region from now on: its index, and new low 8 bits.
        8 => key: u32,
        /// `access` of the region.
        12 => access: u32,
        /// Length, bytes.
        16 => length: u64,
        /// The pages, or the blocks.
        24 => pages: PageList,
        /// Offset of the first byte in the first page, or the first block.
        40 => offset: u32,
        /// Key of a PHYSICAL region of the queue pair's protection domain: leave to name pages.
        44 => lkey: u32,
    }

    /// The last operands of an entry of a send queue with a masked atomic operation; they follow
    /// the scatter/gather entry, at offset 64.
    pub struct MaskedOperands(16) {
        /// Compare and swap: mask of the comparison. Fetch and add: mask of the field boundaries.
        0 => mask0: u64,
        /// Compare and swap: mask of the swap. Fetch and add: zero.
        8 => mask1: u64,
    }

    /// The first bytes of an entry of a receive queue; scatter/gather entries follow at offset 16.
    pub struct RecvWqe(16) {
        /// Reserved, zero.
        0 => reserved0: u8,
        /// `PHASE`, all other bits zero.
        1 => flags: u8,
        /// Scatter/gather entries.
        2 => count: u16,
        /// Reserved, zero.
        4 => reserved1: u32,
        /// Work request id, returned in the completion.
        8 => wr_id: u64,
    }

    /// An entry of a completion queue.
    pub struct Cqe(32) {
        /// Work request id.
        0 => wr_id: u64,
        /// Bytes transferred (receives, RDMA READ and atomic operations).
        8 => byte_len: u32,
        /// Immediate data or the key that was invalidated, by `wc_flags`.
        12 => imm: u32,
        /// Local queue pair.
        16 => qp_num: u32,
        /// Remote queue pair (receives).
        20 => src_qp: u32,
        /// Index of the completed entry in its ring; with it all earlier ones of the send queue are
        /// free.
        24 => wqe_index: u16,
        /// `vendor_err`, when `status` is not SUCCESS.
        26 => vendor_err: u8,
        /// Service level (datagrams).
        27 => sl: u8,
        /// `wc_status`.
        28 => status: u8,
        /// `wc_opcode`; undefined unless `status` is SUCCESS, but whether it is a receive (bit 7)
        /// is always told.
        29 => opcode: u8,
        /// `wc_flag` bits.
        30 => wc_flags: u8,
        /// Bit 0 is the phase. Other bits are zero.
        31 => phase: u8,
    }

    /// What follows `Cqe` in an entry of a completion queue with stride 64. It is written before
    /// `Cqe`'s phase.
    pub struct CqeExtension(32) {
        /// Time of the completion on the device's clock, nanoseconds.
        0 => timestamp: u64,
        /// Source MAC address (datagrams).
        8 => smac: [u8; 6],
        /// VLAN id of the datagram, or 0xffff.
        14 => vlan: u16,
        /// Reserved, zero.
        16 => reserved: [u8; 16],
    }

    /// The start of a shared receive queue's buffer. The ring follows.
    pub struct SrqRecord(128) {
        /// Written by the device. Not zero: posting must ring the doorbell (a sender waits for a
        /// receive).
        0 => rq_waited: u32,
        /// Written by the device: entries consumed so far, modulo 2^32. They are free.
        4 => consumed: u32,
        /// Reserved, zero.
        8 => reserved0: [u8; 56],
        /// Written by the driver: entries posted so far, modulo 2^32. The device reads it for the
        /// limit only.
        64 => posted: u32,
        /// Reserved, zero.
        68 => reserved1: [u8; 60],
    }

    /// The start of a queue pair's buffer: written by the device, read by the driver.
    pub struct QpRecord(64) {
        /// Not zero: posting to the receive queue must ring the doorbell (a sender waits for a
        /// receive, or the queue pair is in the error state and receives are to be flushed).
        0 => rq_waited: u32,
        /// Reserved.
        4 => reserved: [u8; 60],
    }

    /// The start of a completion queue's buffer: written by the driver, read by the device. What is
    /// written with every completion and what is read with every completion do not share a cache
    /// line.
    pub struct CqRecord(128) {
        /// Entries consumed so far, modulo 2^32. The device reads it to see that the queue is not
        /// full.
        0 => consumer: u32,
        /// Reserved, zero.
        4 => reserved0: [u8; 60],
        /// Arming: bit 0: any completion, bit 1: solicited completions and errors only, bits 2..32:
        /// a sequence number that the driver increments with every arming. Zero: never armed.
        64 => arm: u32,
        /// Reserved, zero.
        68 => reserved1: [u8; 60],
    }
}

/// Phase bit in the `flags` of work queue entries.
pub const PHASE: u8 = 0x80;
/// Offset of the first scatter/gather entry or of the inline data in an entry of a send queue.
pub const SEND_DATA_OFFSET: usize = SendWqe::SIZE;
/// The same, in an entry of the send queue of a UD or GSI queue pair.
pub const UD_DATA_OFFSET: usize = UdWqe::SIZE;
/// Offset of `SrdRange` in an entry of the send queue of an SRD queue pair, behind `UdWqe`.
pub const SRD_RANGE_OFFSET: usize = UdWqe::SIZE;
/// Offset of the first scatter/gather entry or of the inline data there.
pub const SRD_DATA_OFFSET: usize = UdWqe::SIZE + SrdRange::SIZE;
/// Offset of `BindMw` in an entry of a send queue.
pub const BIND_MW_OFFSET: usize = 16;
/// Offset of `FastReg` in an entry of a send queue.
pub const FAST_REG_OFFSET: usize = 16;
/// Offset of `MaskedOperands` in an entry of a send queue.
pub const MASKED_OPERANDS_OFFSET: usize = 64;
/// Offset of the first scatter/gather entry in an entry of a receive queue.
pub const RECV_DATA_OFFSET: usize = RecvWqe::SIZE;
/// Offset, in a work queue entry, of the aligned 8 bytes that hold the phase.
pub const WQE_PHASE_WORD: usize = 0;
/// Offset, in a completion queue entry, of the aligned 8 bytes that hold the phase.
pub const CQE_PHASE_WORD: usize = 24;
/// Offset of `CqRecord::arm`.
pub const CQ_ARM_OFFSET: usize = 64;
/// Smallest stride of a send queue, bytes.
pub const MIN_SEND_STRIDE: u32 = 64;
/// Smallest stride of a receive queue, bytes.
pub const MIN_RECV_STRIDE: u32 = 32;
/// Largest stride of a work queue, bytes.
pub const MAX_WQE_STRIDE: u32 = 1024;
/// Largest number of entries of a work queue.
pub const MAX_WQ_ENTRIES: u32 = 32768;
/// Largest number of entries of a completion queue.
pub const MAX_CQ_ENTRIES: u32 = 1 << 22;
/// Most scatter/gather entries of a work request.
pub const MAX_SGE: u32 = 32;
/// Most inline bytes of a send work request.
pub const MAX_INLINE: u32 = MAX_WQE_STRIDE - SendWqe::SIZE as u32;
/// `CqRecord::arm`: any completion.
pub const ARM_NEXT: u32 = 1;
/// `CqRecord::arm`: solicited completions and errors only.
pub const ARM_SOLICITED: u32 = 2;
/// `CqRecord::arm`: the sequence number counts in steps of this.
pub const ARM_SEQUENCE: u32 = 4;

/// Stride of a send queue for work requests with up to `sge` scatter/gather entries and `inline`
/// bytes; `None` where that is more than an entry can hold.
#[must_use]
pub const fn send_stride(sge: u32, inline: u32) -> Option<u32> {
    if sge > MAX_SGE || inline > MAX_INLINE {
        return None;
    }
    let by_sge = sge * Sge::SIZE as u32;
    let data = if by_sge > inline { by_sge } else { inline };
    let stride = (SendWqe::SIZE as u32 + data).next_power_of_two();
    Some(if stride < MIN_SEND_STRIDE {
        MIN_SEND_STRIDE
    } else {
        stride
    })
}

/// The same for the send queue of a UD or GSI queue pair.
#[must_use]
pub const fn ud_send_stride(sge: u32, inline: u32) -> Option<u32> {
    stride_with_data_at(UD_DATA_OFFSET, sge, inline)
}

/// The same for the send queue of an SRD queue pair.
#[must_use]
pub const fn srd_send_stride(sge: u32, inline: u32) -> Option<u32> {
    stride_with_data_at(SRD_DATA_OFFSET, sge, inline)
}

const fn stride_with_data_at(offset: usize, sge: u32, inline: u32) -> Option<u32> {
    let extra = (offset - SEND_DATA_OFFSET) as u32;
    if sge > MAX_SGE || inline > MAX_INLINE - extra {
        return None;
    }
    let by_sge = sge * Sge::SIZE as u32;
    let data = if by_sge > inline { by_sge } else { inline };
    let stride = (offset as u32 + data).next_power_of_two();
    Some(if stride < MIN_SEND_STRIDE {
        MIN_SEND_STRIDE
    } else {
        stride
    })
}

/// Stride of a receive queue for work requests with up to `sge` scatter/gather entries; `None`
/// where that is more than an entry can hold.
#[must_use]
pub const fn recv_stride(sge: u32) -> Option<u32> {
    if sge > MAX_SGE {
        return None;
    }
    let stride = (RecvWqe::SIZE as u32 + sge * Sge::SIZE as u32).next_power_of_two();
    Some(if stride < MIN_RECV_STRIDE {
        MIN_RECV_STRIDE
    } else {
        stride
    })
}
