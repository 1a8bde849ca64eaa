// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The private interface between the kernel module and the rdma-core provider: the driver data of
//! uverbs commands.
//!
//! Requests and responses may grow at their end: missing bytes count as zero, and [`ABI_VERSION`]
//! changes only when that is not enough.
//!
//! What is not here has no driver data: memory regions and windows, XRC domains, opening queue
//! pairs, multicast, modifying and querying. Three things use attributes and a method of the driver
//! in the ioctl interface: [`DRIVER_ATTR`] of QUERY_CONTEXT and DM_ALLOC, and [`DM_QUERY_METHOD`].
use virtio_rdma_spec::layouts;

/// Version of this interface (`uverbs_abi_ver` of the module).
pub const ABI_VERSION: u32 = 1;

/// First attribute of the driver's own in an ioctl method (`1 << UVERBS_ID_NS_SHIFT`).
///
/// - In UVERBS_METHOD_QUERY_CONTEXT of UVERBS_OBJECT_DEVICE, out: [`AllocContextResponse`] of the
///   context, as alloc_ucontext gave it, for a process that imports it.
/// - In UVERBS_METHOD_DM_ALLOC of UVERBS_OBJECT_DM, out: [`DmResponse`].
/// - In [`DM_QUERY_METHOD`], in: the handle of the device memory (IDR, read access).
pub const DRIVER_ATTR: u16 = 0x1000;
/// Second attribute of [`DM_QUERY_METHOD`], out: [`DmResponse`].
pub const DM_QUERY_RESPONSE_ATTR: u16 = 0x1001;
/// Method of UVERBS_OBJECT_DM that tells how to map device memory, for a process that imports it.
pub const DM_QUERY_METHOD: u16 = 0x1000;

layouts! {
    /// Driver response of alloc_ucontext. The three offsets are for mmap on the command file.
    pub struct AllocContextResponse(88) {
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
        /// Local key of the null region: what is written there is dropped, reads deliver zeros.
        /// Zero: there is none.
        52 => null_lkey: u32,
        /// Features of the device that the kernel module uses: bits by `config::feature`.
        56 => features: u64,
        /// Entries of a shared receive queue, at most.
        64 => max_srq_wr: u32,
        /// Scatter/gather entries of a receive work request of a shared receive queue, at most.
        68 => max_srq_sge: u32,
        /// Reserved, zero.
        72 => reserved: [u8; 16],
    }

    /// Driver response of query_device (extended), for who asks for it.
    pub struct QueryDeviceResponse(16) {
        /// The device's clock now, in the unit of completion time stamps; zero: not known.
        0 => clock: u64,
        /// Reserved, zero.
        8 => reserved: u64,
    }

    /// Where device memory is to be mapped from.
    pub struct DmResponse(16) {
        /// For mmap on the command file; read and write.
        0 => offset: u64,
        /// Length as asked for when allocating, bytes. The mapping is that, rounded up to whole
        /// pages.
        8 => length: u64,
    }

    /// Driver response of create_ah. All else of an address is the process's own.
    pub struct CreateAhResponse(8) {
        /// MAC address that the destination was resolved to.
        0 => dmac: [u8; 6],
        /// Reserved, zero.
        6 => reserved: u16,
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
        /// Stride of the entries: 64 if the verb asks for time stamps, else 32.
        24 => stride: u32,
        /// Reserved, zero.
        28 => flags: u32,
    }

    /// Driver request of resize_cq. The new buffer is zeroed, but for the record at its start:
    /// nothing consumed, and armed as the queue is.
    pub struct ResizeCqRequest(24) {
        /// New buffer, page aligned, in the memory of the process.
        0 => buffer: u64,
        /// Its length, bytes, a multiple of the page size.
        8 => length: u64,
        /// Entries, a power of two, at least as many as the verb asks for.
        16 => entries: u32,
        /// Offset of the ring in the buffer. The stride stays.
        20 => ring_offset: u32,
    }

    /// Driver response of resize_cq.
    pub struct ResizeCqResponse(8) {
        /// Completions that the device moved to the start of the new ring.
        0 => moved: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Driver response of create_cq.
    pub struct CreateCqResponse(8) {
        /// Number of the completion queue on the device.
        0 => cqn: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Driver request of create_qp. Scatter/gather and inline limits are in the attributes of the
    /// verb; with a shared receive queue and for XRC those about receives have no meaning. All zero
    /// for an XRC target: it has no buffer.
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
        /// Of a queue pair of a driver's own type (`IB_QPT_DRIVER`): its `qp_type`, SRD. Otherwise zero.
        40 => driver_qp_type: u32,
        /// Reserved, zero.
        44 => reserved: u32,
    }

    /// Driver response of create_qp.
    pub struct CreateQpResponse(16) {
        /// Queue pair number.
        0 => qpn: u32,
        /// Doorbell queue of its worker, 0 to D - 1. No meaning for an XRC target.
        4 => doorbell_queue: u32,
        /// Slot in the doorbell block. No meaning for an XRC target.
        8 => slot: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }
    /// Driver request of create_srq (and create_xsrq).
    pub struct CreateSrqRequest(32) {
        /// Buffer, page aligned, in the memory of the process. It starts with the `SrqRecord`.
        0 => buffer: u64,
        /// Its length, bytes, a multiple of the page size.
        8 => length: u64,
        /// Entries, a power of two.
        16 => entries: u32,
        /// Stride of the entries.
        20 => stride: u32,
        /// Offset of the ring in the buffer.
        24 => ring_offset: u32,
        /// Reserved, zero.
        28 => reserved: u32,
    }

    /// Driver request of modify_srq with another size. The new buffer is zeroed; afterwards its
    /// record tells how many entries the device moved to the start of its ring.
    pub struct ResizeSrqRequest(24) {
        /// New buffer, page aligned, in the memory of the process.
        0 => buffer: u64,
        /// Its length, bytes, a multiple of the page size.
        8 => length: u64,
        /// Entries, a power of two, at least as many as the verb asks for.
        16 => entries: u32,
        /// Offset of the ring in the buffer. The stride stays.
        20 => ring_offset: u32,
    }

    /// Driver response of create_srq. For an XRC shared receive queue the kernel module also sets
    /// the number that the verb returns (`ext.xrc.srq_num`).
    pub struct CreateSrqResponse(16) {
        /// Number of the shared receive queue.
        0 => srqn: u32,
        /// Doorbell queue of its worker, 0 to D - 1.
        4 => doorbell_queue: u32,
        /// Slot in the doorbell block.
        8 => slot: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }
}
