// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The private interface between the kernel module and the rdma-core provider: the driver data of uverbs commands.
//!
//! Requests and responses may grow at their end: missing bytes count as zero, and [`ABI_VERSION`] changes only when that
//! is not enough.
use virtio_rdma_spec::layouts;

/// Version of this interface (`uverbs_abi_ver` of the module).
pub const ABI_VERSION: u32 = 1;

layouts! {
    /// Driver response of alloc_ucontext. The three offsets are for mmap on the command file.
    pub struct AllocContextResponse(56) {
        /// Doorbell memory: `doorbell::BLOCK_SIZE` bytes per doorbell queue; read and write.
        0 => doorbell_offset: u64,
        /// Notify pages: one page of 4096 bytes per doorbell queue; write only in effect.
        8 => notify_offset: u64,
        /// The status page; read only.
        16 => status_offset: u64,
        /// Doorbell queues (D).
        24 => num_doorbell_queues: u32,
        /// Virtqueue index of the first doorbell queue: what is written to its notify page.
        28 => first_doorbell_queue: u32,
        /// Offset, within each notify page, of the two bytes to write.
        32 => notify_page_offset: u32,
        /// Inline bytes that a send queue may be created for.
        36 => max_inline: u32,
        /// Entries of a work queue, at most.
        40 => max_qp_wr: u32,
        /// Scatter/gather entries, at most.
        44 => max_sge: u32,
        /// Entries of a completion queue, at most.
        48 => max_cqe: u32,
        /// Reserved, zero.
        52 => reserved: u32,
    }

    /// Driver response of alloc_pd.
    pub struct AllocPdResponse(8) {
        /// Handle of the protection domain on the device.
        0 => pd: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Driver request of create_cq.
    pub struct CreateCqRequest(32) {
        /// Buffer, page aligned, in the memory of the process.
        0 => buffer: u64,
        /// Its length, bytes, a multiple of the page size.
        8 => length: u64,
        /// Entries, a power of two.
        16 => entries: u32,
        /// Offset of the ring in the buffer.
        20 => ring_offset: u32,
        /// Stride of the entries.
        24 => stride: u32,
        /// Reserved, zero.
        28 => flags: u32,
    }

    /// Driver response of create_cq.
    pub struct CreateCqResponse(8) {
        /// Number of the completion queue on the device.
        0 => cqn: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Driver request of create_qp. Scatter/gather and inline limits are in the attributes of the verb.
    pub struct CreateQpRequest(48) {
        /// Buffer, page aligned, in the memory of the process.
        0 => buffer: u64,
        /// Its length, bytes, a multiple of the page size.
        8 => length: u64,
        /// Entries of the send queue, a power of two or zero.
        16 => sq_entries: u32,
        /// Stride of the send queue.
        20 => sq_stride: u32,
        /// Offset of the send queue in the buffer.
        24 => sq_offset: u32,
        /// Entries of the receive queue, a power of two or zero.
        28 => rq_entries: u32,
        /// Stride of the receive queue.
        32 => rq_stride: u32,
        /// Offset of the receive queue in the buffer.
        36 => rq_offset: u32,
        /// Reserved, zero.
        40 => reserved: u64,
    }

    /// Driver response of create_qp.
    pub struct CreateQpResponse(16) {
        /// Queue pair number.
        0 => qpn: u32,
        /// Doorbell queue of its worker, 0 to D - 1.
        4 => doorbell_queue: u32,
        /// Slot in the doorbell block.
        8 => slot: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }
}
