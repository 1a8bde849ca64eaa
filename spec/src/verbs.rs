// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The numbers of verbs: opcodes, statuses, states, access flags. Where the InfiniBand verbs of
//! Linux have a number for something, it is the same here (specification: "Verbs numbers").
use crate::constants;

constants! {
    /// Opcode of a send work request.
    pub mod wr_opcode: u8 {
        /// RDMA WRITE.
        RDMA_WRITE = 0,
        /// RDMA WRITE with immediate data: consumes a receive work request of the responder.
        RDMA_WRITE_WITH_IMM = 1,
        /// SEND.
        SEND = 2,
        /// SEND with immediate data.
        SEND_WITH_IMM = 3,
        /// RDMA READ.
        RDMA_READ = 4,
        /// Compare and swap of 8 bytes.
        ATOMIC_CMP_AND_SWP = 5,
        /// Fetch and add of 8 bytes.
        ATOMIC_FETCH_AND_ADD = 6,
        /// Invalidate a local key.
        LOCAL_INV = 7,
        /// Bind a memory window.
        BIND_MW = 8,
        /// SEND that invalidates a key of the responder.
        SEND_WITH_INV = 9,
        /// RDMA READ that invalidates the local key of its SGE when it completes.
        RDMA_READ_WITH_INV = 11,
        /// Masked compare and swap.
        MASKED_ATOMIC_CMP_AND_SWP = 12,
        /// Masked fetch and add.
        MASKED_ATOMIC_FETCH_AND_ADD = 13,
        /// FLUSH.
        FLUSH = 14,
        /// Atomic write of 8 bytes.
        ATOMIC_WRITE = 15,
        /// Fast registration.
        REG_MR = 32,
    }
}

constants! {
    /// Flags of a send work request (low bits of `SendWqe::flags`).
    pub mod send_flag: u8 {
        /// Start only when all previous RDMA READ and atomic operations of this queue have
        /// completed.
        FENCE = 1,
        /// Produce a completion on success.
        SIGNALED = 2,
        /// Raise a solicited event at the responder.
        SOLICITED = 4,
        /// The payload is in the entry itself.
        INLINE = 8,
    }
}

constants! {
    /// Opcode of a completion.
    pub mod wc_opcode: u8 {
        /// A SEND of any form.
        SEND = 0,
        /// An RDMA WRITE of any form.
        RDMA_WRITE = 1,
        /// An RDMA READ.
        RDMA_READ = 2,
        /// A compare and swap.
        COMP_SWAP = 3,
        /// A fetch and add.
        FETCH_ADD = 4,
        /// A memory window bind.
        BIND_MW = 5,
        /// A local invalidate.
        LOCAL_INV = 6,
        /// A FLUSH.
        FLUSH = 8,
        /// An atomic write.
        ATOMIC_WRITE = 9,
        /// A fast registration.
        REG_MR = 10,
        /// A masked compare and swap.
        MASKED_COMP_SWAP = 11,
        /// A masked fetch and add.
        MASKED_FETCH_ADD = 12,
        /// A receive.
        RECV = 128,
        /// A receive consumed by an RDMA WRITE with immediate data.
        RECV_RDMA_WITH_IMM = 129,
    }
}

constants! {
    /// Flags of a completion.
    pub mod wc_flag: u8 {
        /// The first 40 bytes of the receive buffer hold a GRH.
        GRH = 1,
        /// `imm` holds immediate data.
        WITH_IMM = 2,
        /// `imm` holds the key that was invalidated.
        WITH_INV = 8,
        /// With GRH: the header is one of IPv4.
        IPV4 = 128,
    }
}

constants! {
    /// Status of a completion.
    pub mod wc_status: u8 {
        /// Success.
        SUCCESS = 0,
        /// Local length error.
        LOC_LEN_ERR = 1,
        /// Local QP operation error.
        LOC_QP_OP_ERR = 2,
        /// Local EE context operation error (never used).
        LOC_EEC_OP_ERR = 3,
        /// Local protection error.
        LOC_PROT_ERR = 4,
        /// Flushed: the queue pair went to the error state first.
        WR_FLUSH_ERR = 5,
        /// Memory window bind error.
        MW_BIND_ERR = 6,
        /// Bad response.
        BAD_RESP_ERR = 7,
        /// Local access error.
        LOC_ACCESS_ERR = 8,
        /// Remote invalid request.
        REM_INV_REQ_ERR = 9,
        /// Remote access error.
        REM_ACCESS_ERR = 10,
        /// Remote operation error.
        REM_OP_ERR = 11,
        /// Transport retries exceeded.
        RETRY_EXC_ERR = 12,
        /// RNR retries exceeded.
        RNR_RETRY_EXC_ERR = 13,
        /// SRD: the destination has no such queue pair.
        REM_INV_RD_REQ_ERR = 15,
        /// SRD: the peer has forgotten the sender.
        REM_ABORT_ERR = 16,
        /// Fatal error.
        FATAL_ERR = 19,
        /// Response time-out.
        RESP_TIMEOUT_ERR = 20,
        /// General error.
        GENERAL_ERR = 21,
    }
}

constants! {
    /// Why a completion failed, finer than its status (`Cqe::vendor_err`).
    pub mod vendor_err: u8 {
        /// Nothing more to say.
        NONE = 0,
        /// Opcode unknown, or not allowed on this type of queue pair.
        OPCODE = 1,
        /// A flag that is reserved or not allowed with this opcode.
        FLAGS = 2,
        /// More scatter/gather entries or inline bytes than the queue was created for.
        TOO_LONG_ENTRY = 3,
        /// The message is longer than the port allows, or its lengths overflow.
        MESSAGE_LENGTH = 4,
        /// No memory region has this key.
        KEY_UNKNOWN = 5,
        /// The key belongs to another protection domain.
        KEY_PD = 6,
        /// The region does not grant the access.
        KEY_ACCESS = 7,
        /// The range is not within the region.
        KEY_RANGE = 8,
        /// The queue pair does not grant the access (its access flags).
        QP_ACCESS = 9,
        /// The address is not aligned as the operation needs.
        ALIGNMENT = 10,
        /// The receive buffers of the responder are shorter than the message.
        RECV_TOO_SHORT = 11,
        /// The responder never had a receive work request.
        NO_RECEIVE = 12,
        /// Nobody answered: no such port or queue pair, or it is not ready to receive, or not
        /// connected to this one.
        NO_ANSWER = 13,
        /// A receive work request of the responder was bad.
        BAD_RECEIVE = 14,
        /// Guest memory behind a key or ring is gone.
        MEMORY_GONE = 15,
        /// The responder is not set up for RDMA READ or atomic operations (max_dest_rd_atomic is
        /// 0).
        RD_ATOMIC = 16,
        /// Flushed after an earlier error or a change to the error state.
        FLUSHED = 17,
        /// The message has another Q_Key than the queue pair.
        QKEY = 18,
        /// A memory window cannot be bound so.
        BIND = 19,
        /// The shared receive queue does not exist, or does not belong to the XRC domain.
        SRQ = 20,
        /// A registration by a work request without the key of a PHYSICAL region.
        PRIVILEGE = 21,
        /// The region is registered already.
        REGISTERED = 22,
        /// A page list or block list is malformed, or is not the one that the registration needs.
        PAGE_LIST = 23,
        /// The device is not willing to hold so many pages, or one more receive that is given back.
        NO_MEMORY = 24,
        /// The responder refused. Over a fabric with packets it does not say why.
        PEER = 25,
        /// The destination has no such queue pair, or it takes no such message, or not with this Q_Key.
        NO_QUEUE_PAIR = 26,
    }
}

constants! {
    /// State of a queue pair.
    pub mod qp_state: u8 {
        /// Reset.
        RESET = 0,
        /// Initialized.
        INIT = 1,
        /// Ready to receive.
        RTR = 2,
        /// Ready to send.
        RTS = 3,
        /// Send queue drained (or draining).
        SQD = 4,
        /// Send queue error.
        SQE = 5,
        /// Error.
        ERR = 6,
    }
}

constants! {
    /// Type of a queue pair.
    pub mod qp_type: u8 {
        /// General services interface (QP 1).
        GSI = 1,
        /// Reliable connected.
        RC = 2,
        /// Unreliable connected.
        UC = 3,
        /// Unreliable datagram.
        UD = 4,
        /// XRC initiator.
        XRC_INI = 9,
        /// XRC target.
        XRC_TGT = 10,
        /// Scalable reliable datagram.
        SRD = 11,
        /// iWARP: reliable connected, by a connection that the device makes.
        IWARP = 12,
    }
}

constants! {
    /// Which attributes a MODIFY_QP carries.
    pub mod qp_attr: u32 {
        /// `qp_state`.
        STATE = 1,
        /// `cur_qp_state`.
        CUR_STATE = 2,
        /// `en_sqd_async_notify`.
        EN_SQD_ASYNC_NOTIFY = 4,
        /// `access_flags`.
        ACCESS_FLAGS = 8,
        /// `pkey_index`.
        PKEY_INDEX = 0x10,
        /// `port_num`.
        PORT = 0x20,
        /// `qkey`.
        QKEY = 0x40,
        /// `av`.
        AV = 0x80,
        /// `path_mtu`.
        PATH_MTU = 0x100,
        /// `timeout`.
        TIMEOUT = 0x200,
        /// `retry_cnt`.
        RETRY_CNT = 0x400,
        /// `rnr_retry`.
        RNR_RETRY = 0x800,
        /// `rq_psn`.
        RQ_PSN = 0x1000,
        /// `max_rd_atomic`.
        MAX_QP_RD_ATOMIC = 0x2000,
        /// Alternate path: not supported.
        ALT_PATH = 0x4000,
        /// `min_rnr_timer`.
        MIN_RNR_TIMER = 0x8000,
        /// `sq_psn`.
        SQ_PSN = 0x1_0000,
        /// `max_dest_rd_atomic`.
        MAX_DEST_RD_ATOMIC = 0x2_0000,
        /// Path migration state: not supported.
        PATH_MIG_STATE = 0x4_0000,
        /// Capabilities (resize): not supported.
        CAP = 0x8_0000,
        /// `dest_qp_num`.
        DEST_QPN = 0x10_0000,
        /// `rate_limit`: not supported.
        RATE_LIMIT = 0x200_0000,
    }
}

constants! {
    /// Access flags of memory regions, windows and queue pairs.
    pub mod access: u32 {
        /// Local write.
        LOCAL_WRITE = 1,
        /// Remote write.
        REMOTE_WRITE = 2,
        /// Remote read.
        REMOTE_READ = 4,
        /// Remote atomic.
        REMOTE_ATOMIC = 8,
        /// Windows may be bound to the region.
        MW_BIND = 0x10,
        /// Addresses start at zero.
        ZERO_BASED = 0x20,
        /// On-demand paging: not supported.
        ON_DEMAND = 0x40,
        /// A hint about the pages: accepted, no meaning.
        HUGETLB = 0x80,
        /// Remote flush to global visibility.
        FLUSH_GLOBAL = 0x100,
        /// Remote flush to persistence.
        FLUSH_PERSISTENT = 0x200,
        /// Relaxed ordering: a hint, accepted, no meaning.
        RELAXED_ORDERING = 0x10_0000,
        /// Regions only, with the feature PHYSICAL_MR: all guest memory. Addresses are
        /// guest-physical addresses; REG_MR's iova, length, offset and pages are zero.
        PHYSICAL = 0x8000_0000,
    }
}

constants! {
    /// Where a FLUSH makes data arrive (`SendWqe::operand1`, bits 0 to 7).
    pub mod flush_type: u8 {
        /// Visible to all.
        GLOBAL = 1,
        /// Persistent.
        PERSISTENT = 2,
    }
}

constants! {
    /// What a FLUSH is about (`SendWqe::operand1`, bits 8 to 15).
    pub mod flush_level: u8 {
        /// The range that the work request names.
        RANGE = 0,
        /// All of the region.
        MR = 1,
    }
}

constants! {
    /// Path MTU: 1 is 256 bytes, 5 is 4096.
    pub mod mtu: u8 {
        /// 256 bytes.
        MTU_256 = 1,
        /// 512 bytes.
        MTU_512 = 2,
        /// 1024 bytes.
        MTU_1024 = 3,
        /// 2048 bytes.
        MTU_2048 = 4,
        /// 4096 bytes.
        MTU_4096 = 5,
    }
}

/// Queue pair numbers and PSNs have 24 bits.
pub const MASK_24: u32 = 0x00ff_ffff;
