// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands (specification: "Control commands").
//!
//! A command is a device-readable buffer that starts with a [`CommandHeader`], followed by the body
//! of its opcode; the response is a device-writable buffer that gets a [`ResponseHeader`] and the
//! body of the opcode. Both may grow: a command longer than the device knows is accepted if the
//! rest is zero, a response is cut to the buffer.
use crate::{constants, layouts};

constants! {
    /// Opcode of a control command.
    pub mod opcode: u16 {
        /// Device attributes and limits.
        QUERY_DEVICE = 0x01,
        /// Port attributes.
        QUERY_PORT = 0x02,
        /// Sets or clears an entry of the GID table.
        SET_GID = 0x03,
        /// Tells the device where the status page is.
        SET_STATUS_PAGE = 0x04,
        /// The device's clock, by which completions have time stamps.
        QUERY_CLOCK = 0x05,
        /// Takes the port down or up.
        SET_PORT_STATE = 0x06,
        /// What became of the port's packets.
        QUERY_COUNTERS = 0x07,
        /// Creates a context: doorbell memory.
        CREATE_CONTEXT = 0x10,
        /// Destroys a context.
        DESTROY_CONTEXT = 0x11,
        /// Creates a protection domain.
        CREATE_PD = 0x20,
        /// Destroys a protection domain.
        DESTROY_PD = 0x21,
        /// Creates an XRC domain.
        CREATE_XRCD = 0x24,
        /// Destroys an XRC domain.
        DESTROY_XRCD = 0x25,
        /// Registers a memory region.
        REG_MR = 0x30,
        /// Deregisters a memory region.
        DEREG_MR = 0x31,
        /// Changes a memory region.
        REREG_MR = 0x32,
        /// Allocates a memory region for fast registration.
        ALLOC_MR = 0x33,
        /// Allocates a memory window.
        ALLOC_MW = 0x38,
        /// Deallocates a memory window.
        DEALLOC_MW = 0x39,
        /// Creates a completion queue.
        CREATE_CQ = 0x40,
        /// Destroys a completion queue.
        DESTROY_CQ = 0x41,
        /// Gives a completion queue another buffer.
        RESIZE_CQ = 0x42,
        /// Moderates the events of a completion queue.
        MODIFY_CQ = 0x43,
        /// Creates a queue pair.
        CREATE_QP = 0x50,
        /// Modifies a queue pair.
        MODIFY_QP = 0x51,
        /// Queries a queue pair.
        QUERY_QP = 0x52,
        /// Destroys a queue pair.
        DESTROY_QP = 0x53,
        /// Creates a shared receive queue.
        CREATE_SRQ = 0x60,
        /// Modifies a shared receive queue.
        MODIFY_SRQ = 0x61,
        /// Queries a shared receive queue.
        QUERY_SRQ = 0x62,
        /// Destroys a shared receive queue.
        DESTROY_SRQ = 0x63,
        /// Gives a shared receive queue another buffer.
        RESIZE_SRQ = 0x64,
        /// Attaches a queue pair to a multicast group.
        ATTACH_MCAST = 0x70,
        /// Detaches a queue pair from a multicast group.
        DETACH_MCAST = 0x71,
        /// Connects a queue pair of iWARP.
        IW_CONNECT = 0x80,
        /// Accepts a connection with a queue pair of iWARP.
        IW_ACCEPT = 0x81,
        /// Rejects a connection of iWARP.
        IW_REJECT = 0x82,
        /// Listens for connections of iWARP.
        IW_LISTEN = 0x83,
        /// Ends that.
        IW_DESTROY_LISTEN = 0x84,
        /// Takes the next event of connections of iWARP.
        IW_NEXT_EVENT = 0x85,
    }
}

constants! {
    /// Status of a response; the numbers are those of Linux errno.
    pub mod status: u16 {
        /// Success.
        OK = 0,
        /// Not allowed.
        EPERM = 1,
        /// No object has this handle.
        ENOENT = 2,
        /// A limit or the memory of the device is exhausted.
        ENOMEM = 12,
        /// An address is not (any longer) guest memory.
        EFAULT = 14,
        /// The object is in use by another.
        EBUSY = 16,
        /// A value is not valid.
        EINVAL = 22,
        /// The command, or what it asks for, is not supported.
        EOPNOTSUPP = 95,
        /// The address is in use.
        EADDRINUSE = 98,
        /// The address is none of the device's.
        EADDRNOTAVAIL = 99,
        /// The connection was reset.
        ECONNRESET = 104,
        /// Nobody answered in time.
        ETIMEDOUT = 110,
        /// The connection was refused.
        ECONNREFUSED = 111,
        /// There is no way to the address.
        EHOSTUNREACH = 113,
    }
}

layouts! {
    /// Starts every command.
    pub struct CommandHeader(8) {
        /// `opcode`.
        0 => opcode: u16,
        /// Reserved, zero.
        2 => reserved: u16,
        /// Length of the command with this header, bytes.
        4 => length: u32,
    }

    /// Starts every response.
    pub struct ResponseHeader(8) {
        /// `status`.
        0 => status: u16,
        /// Reserved, zero.
        2 => reserved: u16,
        /// Length of the response with this header, bytes. On an error only the header is written.
        4 => length: u32,
    }

    /// A list of guest pages, as a tree of 4 KiB tables of 512 guest-physical addresses each.
    pub struct PageList(16) {
        /// With `levels` 0: the address of the one page itself. Otherwise the address of the
        /// topmost table (4 KiB aligned).
        0 => addr: u64,
        /// Number of pages.
        8 => count: u32,
        /// 0 to 3: tables between `addr` and the pages. `count` must not exceed 512 to the power of
        /// `levels`.
        12 => levels: u8,
        /// log2 of the size of a page: 12 to 31. Pages are aligned to their size. Rings and
        /// doorbell memory use 12.
        13 => page_shift: u8,
        /// Reserved, zero.
        14 => reserved: u16,
    }

    /// An entry of a block list: the tables of the last level hold these in place of addresses of
    /// pages, 256 each.
    pub struct Block(16) {
        /// Guest-physical address of the first byte.
        0 => addr: u64,
        /// Length, bytes; not zero.
        8 => length: u64,
    }

    /// A destination and how to get there.
    pub struct AddressVector(40) {
        /// Destination GID.
        0 => dgid: [u8; 16],
        /// Index of the source GID.
        16 => sgid_index: u16,
        /// Hop limit.
        18 => hop_limit: u8,
        /// Traffic class.
        19 => traffic_class: u8,
        /// Flow label, 20 bits.
        20 => flow_label: u32,
        /// Destination MAC address.
        24 => dmac: [u8; 6],
        /// Service level, 0 to 15.
        30 => sl: u8,
        /// Port, 1.
        31 => port_num: u8,
        /// Static rate, a number of the driver's verbs layer.
        32 => static_rate: u8,
        /// Reserved, zero.
        33 => reserved: [u8; 7],
    }

    /// Attributes of a queue pair, for MODIFY_QP and QUERY_QP.
    pub struct QpAttr(96) {
        /// `qp_state`.
        0 => qp_state: u8,
        /// Current state that the driver assumes (modify); the state (query).
        1 => cur_qp_state: u8,
        /// `mtu`.
        2 => path_mtu: u8,
        /// Port, 1.
        3 => port_num: u8,
        /// Remote access that the queue pair grants: `access`.
        4 => access_flags: u32,
        /// Q_Key.
        8 => qkey: u32,
        /// Receive PSN, 24 bits.
        12 => rq_psn: u32,
        /// Send PSN, 24 bits.
        16 => sq_psn: u32,
        /// Destination queue pair, 24 bits.
        20 => dest_qp_num: u32,
        /// Index into the P_Key table.
        24 => pkey_index: u16,
        /// RDMA READ and atomic operations outstanding as requester.
        26 => max_rd_atomic: u8,
        /// RDMA READ and atomic operations outstanding as responder.
        27 => max_dest_rd_atomic: u8,
        /// RNR NAK timer code, 0 to 31.
        28 => min_rnr_timer: u8,
        /// Local ACK time-out code: 4.096 us times two to its power; 0: none.
        29 => timeout: u8,
        /// Transport retries, 0 to 7.
        30 => retry_cnt: u8,
        /// RNR retries, 0 to 6; 7: without limit.
        31 => rnr_retry: u8,
        /// Raise SQ_DRAINED when the send queue is drained.
        32 => en_sqd_async_notify: u8,
        /// Query: the send queue is draining.
        33 => sq_draining: u8,
        /// Reserved, zero.
        34 => reserved0: [u8; 6],
        /// Primary path.
        40 => av: AddressVector,
        /// Reserved, zero.
        80 => reserved1: [u8; 16],
    }

    /// Response of QUERY_DEVICE.
    pub struct QueryDeviceResponse(144) {
        /// Node GUID, as in the configuration space.
        0 => node_guid: u64,
        /// Firmware version: major in bits 32 to 47, minor 16 to 31, patch 0 to 15.
        8 => fw_ver: u64,
        /// Longest region, bytes.
        16 => max_mr_size: u64,
        /// Page sizes of regions: bit n set: 2^n bytes.
        24 => page_size_cap: u64,
        /// Contexts.
        32 => max_context: u32,
        /// Queue pairs.
        36 => max_qp: u32,
        /// Entries of a work queue.
        40 => max_qp_wr: u32,
        /// Scatter/gather entries of a send or receive work request.
        44 => max_sge: u32,
        /// Scatter/gather entries of an RDMA READ.
        48 => max_sge_rd: u32,
        /// Inline bytes.
        52 => max_inline: u32,
        /// Completion queues.
        56 => max_cq: u32,
        /// Entries of a completion queue.
        60 => max_cqe: u32,
        /// Memory regions.
        64 => max_mr: u32,
        /// Protection domains.
        68 => max_pd: u32,
        /// RDMA READ and atomic operations outstanding at a responder, per queue pair.
        72 => max_qp_rd_atom: u32,
        /// The same, as requester.
        76 => max_qp_init_rd_atom: u32,
        /// RDMA READ and atomic operations outstanding at a responder, in all.
        80 => max_res_rd_atom: u32,
        /// Size of the GID table.
        84 => gid_table_len: u32,
        /// Size of the P_Key table.
        88 => pkey_table_len: u32,
        /// Local ACK delay, code as for time-outs.
        92 => local_ca_ack_delay: u32,
        /// Shared receive queues.
        96 => max_srq: u32,
        /// Entries of a shared receive queue.
        100 => max_srq_wr: u32,
        /// Scatter/gather entries of a receive work request of an SRQ.
        104 => max_srq_sge: u32,
        /// Address handles.
        108 => max_ah: u32,
        /// Memory windows.
        112 => max_mw: u32,
        /// Pages, or blocks, of a fast registration.
        116 => max_fast_reg_pages: u32,
        /// Multicast groups.
        120 => max_mcast_grp: u32,
        /// Attachments of queue pairs to multicast groups, in all.
        124 => max_mcast_qp_attach: u32,
        /// XRC domains.
        128 => max_xrcd: u32,
        /// The null lkey: reading it gives zeros, what is written to it is discarded. Zero: there
        /// is none.
        132 => null_lkey: u32,
        /// Largest `count` of MODIFY_CQ.
        136 => max_cq_moderation_count: u16,
        /// Largest `period` of MODIFY_CQ, microseconds.
        138 => max_cq_moderation_period: u16,
        /// Reserved, zero.
        140 => reserved: u32,
    }

    /// Body of QUERY_PORT.
    pub struct QueryPort(8) {
        /// Port, 1.
        0 => port_num: u8,
        /// Reserved, zero.
        1 => reserved: [u8; 7],
    }

    /// Response of QUERY_PORT.
    pub struct QueryPortResponse(96) {
        /// Port state: 1 down, 4 active.
        0 => state: u8,
        /// Physical state: 3 disabled, 5 link up.
        1 => phys_state: u8,
        /// Largest `mtu`.
        2 => max_mtu: u8,
        /// `mtu` in force.
        3 => active_mtu: u8,
        /// Lanes of the link: 1 is one, 2 is 4, 4 is 8, 8 is 12, 16 is 2.
        4 => active_width: u8,
        /// Reserved, zero.
        5 => reserved0: u8,
        /// Speed of a lane: the specification has a table.
        6 => active_speed: u16,
        /// Longest message, bytes.
        8 => max_msg_sz: u32,
        /// Bad P_Keys seen.
        12 => bad_pkey_cntr: u32,
        /// Bad Q_Keys seen.
        16 => qkey_viol_cntr: u32,
        /// Reserved, zero.
        20 => reserved1: u32,
        /// Bytes of messages sent.
        24 => tx_bytes: u64,
        /// Messages sent.
        32 => tx_messages: u64,
        /// Bytes of messages received.
        40 => rx_bytes: u64,
        /// Messages received.
        48 => rx_messages: u64,
        /// Messages that met a responder without receive work request.
        56 => rnr_naks: u64,
        /// Messages sent again because nobody answered.
        64 => retries: u64,
        /// Work requests completed in error.
        72 => errors: u64,
        /// Reserved, zero.
        80 => reserved2: [u8; 16],
    }

    /// Response of QUERY_COUNTERS, whose body is that of QUERY_PORT.
    pub struct QueryCountersResponse(96) {
        /// Packets that came before others that were sent earlier.
        0 => out_of_sequence: u64,
        /// Requests that came again.
        8 => duplicate_request: u64,
        /// Requests that met a responder without receive work request.
        16 => out_of_buffer: u64,
        /// NAKs that came: packets were missing.
        24 => packet_seq_err: u64,
        /// Answers that came, to what was sent after a request whose answer is missing.
        32 => implied_nak_seq_err: u64,
        /// Attempts that nobody answered.
        40 => local_ack_timeout_err: u64,
        /// RNR NAKs that came.
        48 => rnr_nak_retry_err: u64,
        /// Packets that were sent again.
        56 => retrans_pkts: u64,
        /// Packets that came with the mark of a router that was congested.
        64 => np_ecn_marked_roce_packets: u64,
        /// Congestion notifications sent.
        72 => np_cnp_sent: u64,
        /// Congestion notifications obeyed.
        80 => rp_cnp_handled: u64,
        /// Reserved, zero.
        88 => reserved: u64,
    }

    /// Body of SET_GID.
    pub struct SetGid(40) {
        /// The GID; all zero clears the entry.
        0 => gid: [u8; 16],
        /// Index in the table.
        16 => index: u16,
        /// 0: RoCE v1, 1: RoCE v2.
        18 => gid_type: u8,
        /// Port, 1.
        19 => port_num: u8,
        /// VLAN id, or 0xffff for none.
        20 => vlan: u16,
        /// Source MAC address.
        22 => mac: [u8; 6],
        /// Reserved, zero.
        28 => reserved: [u8; 12],
    }

    /// Body of SET_PORT_STATE.
    pub struct SetPortState(8) {
        /// Port, 1.
        0 => port_num: u8,
        /// 1: up, as far as the driver is concerned; 0: down.
        1 => up: u8,
        /// Reserved, zero.
        2 => reserved: [u8; 6],
    }

    /// Body of SET_STATUS_PAGE.
    pub struct SetStatusPage(8) {
        /// Guest-physical address of the page, 4 KiB aligned; zero: none any longer.
        0 => addr: u64,
    }

    /// Response of QUERY_CLOCK.
    pub struct QueryClockResponse(8) {
        /// The device's clock now, nanoseconds.
        0 => clock: u64,
    }

    /// Body of CREATE_CONTEXT.
    pub struct CreateContext(24) {
        /// Doorbell memory: `doorbell::BLOCK_PAGES` pages per doorbell queue, in their order,
        /// zeroed.
        0 => doorbell: PageList,
        /// Reserved, zero.
        16 => reserved: u64,
    }

    /// Response of CREATE_CONTEXT, CREATE_PD.
    pub struct HandleResponse(8) {
        /// Handle of the new object.
        0 => handle: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Body of DESTROY_CONTEXT, DESTROY_PD, DEREG_MR, DESTROY_CQ, QUERY_QP, DESTROY_QP.
    pub struct Handle(8) {
        /// Handle of the object (of a region: its lkey).
        0 => handle: u32,
        /// Reserved, zero.
        4 => reserved: u32,
    }

    /// Body of REG_MR.
    pub struct RegMr(56) {
        /// Protection domain.
        0 => pd: u32,
        /// `access`.
        4 => access: u32,
        /// Address of the first byte, as work requests name it.
        8 => iova: u64,
        /// Length, bytes; not zero.
        16 => length: u64,
        /// Offset of the first byte in the first page.
        24 => offset: u64,
        /// The pages.
        32 => pages: PageList,
        /// The 8-bit consumer part of the keys.
        48 => key: u8,
        /// Reserved, zero.
        49 => reserved: [u8; 7],
    }

    /// Response of REG_MR, REREG_MR, ALLOC_MR.
    pub struct RegMrResponse(8) {
        /// Local key; also the handle.
        0 => lkey: u32,
        /// Remote key.
        4 => rkey: u32,
    }

    /// Body of CREATE_CQ.
    pub struct CreateCq(40) {
        /// Entries, a power of two.
        0 => entries: u32,
        /// Completion-event queue for its events, 0 to C - 1.
        4 => comp_vector: u16,
        /// Stride of the entries, bytes: 32, or, with CQ_TIMESTAMP, 64.
        6 => stride: u16,
        /// Offset of the ring in the buffer, a multiple of the stride, at least 64.
        8 => ring_offset: u32,
        /// Reserved, zero.
        12 => flags: u32,
        /// The buffer: a `CqRecord` at its start, and the ring.
        16 => buffer: PageList,
        /// Reserved, zero.
        32 => reserved: u64,
    }

    /// Body of CREATE_QP.
    pub struct CreateQp(88) {
        /// Protection domain.
        0 => pd: u32,
        /// Context: whose doorbell memory is used.
        4 => context: u32,
        /// Completion queue of the send queue.
        8 => send_cq: u32,
        /// Completion queue of the receive queue.
        12 => recv_cq: u32,
        /// `verbs::qp_type`.
        16 => qp_type: u8,
        /// `create_qp_flag`.
        17 => flags: u8,
        /// Reserved, zero.
        18 => reserved0: u16,
        /// Entries of the send queue, a power of two, or zero.
        20 => sq_entries: u32,
        /// Stride of the send queue, bytes.
        24 => sq_stride: u32,
        /// Offset of the send queue in the buffer, a multiple of its stride.
        28 => sq_offset: u32,
        /// Entries of the receive queue, a power of two, or zero.
        32 => rq_entries: u32,
        /// Stride of the receive queue, bytes.
        36 => rq_stride: u32,
        /// Offset of the receive queue in the buffer, a multiple of its stride.
        40 => rq_offset: u32,
        /// Scatter/gather entries per send work request.
        44 => max_send_sge: u16,
        /// Scatter/gather entries per receive work request.
        46 => max_recv_sge: u16,
        /// Inline bytes per send work request.
        48 => max_inline: u32,
        /// Shared receive queue. Zero: none.
        52 => srq: u32,
        /// The buffer: a `QpRecord` at its start, and the rings.
        56 => buffer: PageList,
        /// XRC domain (XRC_TGT). Otherwise zero.
        72 => xrcd: u32,
        /// Reserved, zero.
        76 => reserved1: [u8; 12],
    }

    /// Response of CREATE_QP.
    pub struct CreateQpResponse(16) {
        /// Queue pair number; also the handle.
        0 => qpn: u32,
        /// Doorbell queue, 0 to D - 1, of its worker.
        4 => doorbell_queue: u32,
        /// Slot in that worker's doorbell block of the context.
        8 => slot: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }

    /// Body of MODIFY_QP.
    pub struct ModifyQp(104) {
        /// Queue pair.
        0 => qpn: u32,
        /// Attributes to change: `verbs::qp_attr`.
        4 => attr_mask: u32,
        /// Their values.
        8 => attr: QpAttr,
    }

    /// Body of REREG_MR. The response is a `RegMrResponse`. Fields of what is not to be changed are
    /// ignored.
    pub struct ReregMr(72) {
        /// The region: its lkey.
        0 => lkey: u32,
        /// What to change: `rereg_flag`.
        4 => flags: u32,
        /// PD: the new protection domain.
        8 => pd: u32,
        /// ACCESS: the new `access`.
        12 => access: u32,
        /// TRANSLATION: the new address of the first byte.
        16 => iova: u64,
        /// TRANSLATION: the new length, bytes.
        24 => length: u64,
        /// TRANSLATION: the new offset in the first page.
        32 => offset: u64,
        /// TRANSLATION: the new pages.
        40 => pages: PageList,
        /// The 8-bit consumer part of the new keys.
        56 => key: u8,
        /// Reserved, zero.
        57 => reserved: [u8; 15],
    }

    /// Body of ALLOC_MR. The response is a `RegMrResponse`; DEREG_MR takes its lkey, or any later
    /// one of the region.
    pub struct AllocMr(16) {
        /// Protection domain.
        0 => pd: u32,
        /// Pages, or blocks, that a registration has at most.
        4 => max_pages: u32,
        /// `alloc_mr_flag`.
        8 => flags: u32,
        /// The 8-bit consumer part of the first key.
        12 => key: u8,
        /// Reserved, zero.
        13 => reserved: [u8; 3],
    }

    /// Body of ALLOC_MW. The response is a `HandleResponse` with the rkey of the window; DEALLOC_MW
    /// takes it, or any later one of the window.
    pub struct AllocMw(16) {
        /// Protection domain.
        0 => pd: u32,
        /// `mw_type`.
        4 => mw_type: u8,
        /// The 8-bit consumer part of the first key.
        5 => key: u8,
        /// Reserved, zero.
        6 => reserved: [u8; 10],
    }

    /// Body of RESIZE_CQ. The response is a `HandleResponse` with the number of entries that were
    /// moved.
    pub struct ResizeCq(40) {
        /// Completion queue.
        0 => cqn: u32,
        /// Entries of the new ring, a power of two.
        4 => entries: u32,
        /// Offset of the new ring in the new buffer.
        8 => ring_offset: u32,
        /// Reserved, zero.
        12 => reserved0: u32,
        /// The new buffer, as in CREATE_CQ.
        16 => buffer: PageList,
        /// Reserved, zero.
        32 => reserved1: u64,
    }

    /// Body of MODIFY_CQ.
    pub struct ModifyCq(16) {
        /// Completion queue.
        0 => cqn: u32,
        /// An event is held back for so many completions at most; zero: `period` alone counts.
        4 => count: u16,
        /// An event is held back for so long at most, microseconds; zero with `count` above 1: for
        /// the longest period.
        6 => period: u16,
        /// Reserved, zero.
        8 => reserved: u64,
    }

    /// Body of CREATE_SRQ. The response is a `CreateSrqResponse`.
    pub struct CreateSrq(64) {
        /// Protection domain.
        0 => pd: u32,
        /// Context: whose doorbell memory is used.
        4 => context: u32,
        /// Entries, a power of two.
        8 => entries: u32,
        /// Stride of the entries, bytes, as of receive queues.
        12 => stride: u32,
        /// Offset of the ring in the buffer, a multiple of the stride, at least 128.
        16 => ring_offset: u32,
        /// Scatter/gather entries per receive work request.
        20 => max_sge: u16,
        /// `srq_type`.
        22 => srq_type: u8,
        /// Reserved, zero.
        23 => reserved0: u8,
        /// XRC: the XRC domain. Otherwise zero.
        24 => xrcd: u32,
        /// XRC: completion queue of its receives. Otherwise zero.
        28 => cq: u32,
        /// SRQ_LIMIT_REACHED is raised once fewer entries than this are posted; zero: never.
        32 => limit: u32,
        /// Reserved, zero.
        36 => reserved1: u32,
        /// The buffer: an `SrqRecord` at its start, and the ring.
        40 => buffer: PageList,
        /// Reserved, zero.
        56 => reserved2: u64,
    }

    /// Response of CREATE_SRQ.
    pub struct CreateSrqResponse(16) {
        /// Number of the SRQ, 24 bits; also the handle.
        0 => srqn: u32,
        /// Doorbell queue, 0 to D - 1, of its worker.
        4 => doorbell_queue: u32,
        /// Slot in that worker's doorbell block of the context.
        8 => slot: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }

    /// Body of RESIZE_SRQ. The stride stays.
    pub struct ResizeSrq(48) {
        /// The shared receive queue.
        0 => srqn: u32,
        /// `resize_srq_flag`.
        4 => flags: u32,
        /// Entries of the new ring, a power of two.
        8 => entries: u32,
        /// Offset of the new ring in the new buffer.
        12 => ring_offset: u32,
        /// LIMIT: the limit from now on.
        16 => limit: u32,
        /// Reserved, zero.
        20 => reserved0: u32,
        /// The new buffer: an `SrqRecord` at its start, and the ring.
        24 => buffer: PageList,
        /// Reserved, zero.
        40 => reserved1: u64,
    }

    /// Body of MODIFY_SRQ.
    pub struct ModifySrq(16) {
        /// The SRQ.
        0 => srqn: u32,
        /// The limit, as in CREATE_SRQ.
        4 => limit: u32,
        /// Reserved, zero.
        8 => reserved: u64,
    }

    /// Response of QUERY_SRQ.
    pub struct QuerySrqResponse(16) {
        /// Entries.
        0 => entries: u32,
        /// Scatter/gather entries per receive work request.
        4 => max_sge: u32,
        /// The limit; zero once SRQ_LIMIT_REACHED was raised.
        8 => limit: u32,
        /// Reserved, zero.
        12 => reserved: u32,
    }

    /// Body of ATTACH_MCAST, DETACH_MCAST.
    pub struct Multicast(24) {
        /// The group's GID.
        0 => gid: [u8; 16],
        /// The UD queue pair.
        16 => qpn: u32,
        /// Reserved, zero.
        20 => reserved: u32,
    }

    /// Response of QUERY_QP.
    pub struct QueryQpResponse(96) {
        /// The attributes.
        0 => attr: QpAttr,
    }
}

constants! {
    /// Flags of CREATE_QP.
    pub mod create_qp_flag: u8 {
        /// Every send work request produces a completion.
        SIGNAL_ALL = 1,
        /// UD: multicast messages do not come back to the queue pair that sent them, nor to others
        /// of its VM.
        BLOCK_MULTICAST_LOOPBACK = 2,
    }
}

constants! {
    /// Flags of RESIZE_SRQ.
    pub mod resize_srq_flag: u32 {
        /// The limit changes, too.
        LIMIT = 1,
    }
}

constants! {
    /// Flags of REREG_MR; the numbers are those of verbs.
    pub mod rereg_flag: u32 {
        /// Other pages.
        TRANSLATION = 1,
        /// Another protection domain.
        PD = 2,
        /// Other access flags.
        ACCESS = 4,
    }
}

constants! {
    /// Flags of ALLOC_MR.
    pub mod alloc_mr_flag: u32 {
        /// Registrations have block lists in place of page lists.
        BLOCKS = 1,
    }
}

constants! {
    /// Types of memory windows.
    pub mod mw_type: u8 {
        /// Bound through a command-like verb, belongs to its protection domain.
        TYPE_1 = 1,
        /// Bound and invalidated by work requests, belongs to the queue pair that bound it and to
        /// its protection domain.
        TYPE_2 = 2,
    }
}

constants! {
    /// Types of shared receive queues.
    pub mod srq_type: u8 {
        /// Used by the queue pairs that were created with it.
        BASIC = 0,
        /// Used by messages to XRC_TGT queue pairs that name it.
        XRC = 1,
    }
}

constants! {
    /// Types of GIDs.
    pub mod gid_type: u8 {
        /// RoCE v1.
        ROCE_V1 = 0,
        /// RoCE v2.
        ROCE_V2 = 1,
    }
}
