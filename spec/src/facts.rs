// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is so of each opcode and of each type of queue pair (specification: "Work requests",
//! "Queue pairs").
//!
//! Each fact stands here once. Device, kernel module, provider and tests ask these tables instead
//! of listing opcodes and types themselves.
use crate::config::feature;
use crate::verbs::{qp_type, wc_flag, wc_opcode, wr_opcode};

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Sends a message to a receive work request.
    Send,
    /// Writes remote memory.
    Write,
    /// Reads remote memory.
    Read,
    /// Changes a word of remote memory and brings what it was.
    Atomic,
    /// Writes a word of remote memory.
    AtomicWrite,
    /// Makes what was written visible.
    Flush,
    /// Binds a memory window.
    Bind,
    /// Invalidates a local key.
    Invalidate,
    /// Registers a fast region.
    Register,
}

impl Kind {
    /// Whether its payload may be in the entry itself.
    #[must_use]
    pub const fn may_be_inline(self) -> bool {
        match self {
            Self::Send | Self::Write | Self::AtomicWrite => true,
            Self::Read | Self::Atomic | Self::Flush => false,
            Self::Bind | Self::Invalidate | Self::Register => false,
        }
    }

    /// Whether it is carried out at the requester, with no message to anybody.
    #[must_use]
    pub const fn is_local(self) -> bool {
        match self {
            Self::Bind | Self::Invalidate | Self::Register => true,
            Self::Send | Self::Write | Self::Read => false,
            Self::Atomic | Self::AtomicWrite | Self::Flush => false,
        }
    }

    /// Whether it brings data, to which its scatter/gather list must lead.
    #[must_use]
    pub const fn brings(self) -> bool {
        match self {
            Self::Read | Self::Atomic => true,
            Self::Send | Self::Write | Self::AtomicWrite | Self::Flush => false,
            Self::Bind | Self::Invalidate | Self::Register => false,
        }
    }

    /// Whether it is of exactly one word of 8 bytes.
    #[must_use]
    pub const fn is_word(self) -> bool {
        match self {
            Self::Atomic | Self::AtomicWrite => true,
            Self::Send | Self::Write | Self::Read | Self::Flush => false,
            Self::Bind | Self::Invalidate | Self::Register => false,
        }
    }

    /// Whether its entry has operands: it asks for something that addresses, keys and `imm` do not
    /// say.
    #[must_use]
    pub const fn has_operands(self) -> bool {
        match self {
            Self::Atomic | Self::Flush | Self::Bind | Self::Register => true,
            Self::Send | Self::Write | Self::Read | Self::AtomicWrite => false,
            Self::Invalidate => false,
        }
    }

    /// Whether its entry has a scatter/gather list, or inline data in its place.
    #[must_use]
    pub const fn has_data(self) -> bool {
        match self {
            Self::Send | Self::Write | Self::Read | Self::Atomic | Self::AtomicWrite => true,
            Self::Flush | Self::Bind | Self::Invalidate | Self::Register => false,
        }
    }
}

/// What the field `imm` of a work request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Imm {
    /// Nothing.
    None,
    /// Immediate data.
    Data,
    /// A key of the responder to invalidate.
    RemoteKey,
    /// A key of the requester to invalidate.
    LocalKey,
}

impl Imm {
    /// `wc_flag` of the completion at the responder.
    #[inline(always)]
    #[must_use]
    pub const fn receive_flags(self) -> u8 {
        match self {
            Self::Data => wc_flag::WITH_IMM,
            Self::RemoteKey => wc_flag::WITH_INV,
            Self::None | Self::LocalKey => 0,
        }
    }
}

/// One opcode of send work requests.
#[derive(Debug, Clone, Copy)]
pub struct Opcode {
    /// `wr_opcode`.
    pub opcode: u8,
    /// What it does.
    pub kind: Kind,
    /// The types of queue pairs that have it: bit n for `qp_type` n.
    pub qp_types: u16,
    /// The driver must have accepted one of these features, if there are any.
    pub features: &'static [u32],
    /// `wc_opcode` of its completion.
    pub completes_as: u8,
    /// What `imm` says.
    pub imm: Imm,
    /// When it is done, the key of its only scatter/gather entry is invalidated.
    pub invalidates_sink: bool,
}

const fn types(types: &[u8]) -> u16 {
    let mut bits = 0;
    let mut i = 0;
    while i < types.len() {
        bits |= 1 << types[i];
        i += 1;
    }
    bits
}

/// Those whose messages are acknowledged.
const ACKNOWLEDGED: u16 = types(&[qp_type::RC, qp_type::XRC_INI]);
/// Those that have a peer.
const CONNECTED: u16 = ACKNOWLEDGED | types(&[qp_type::UC]);
/// The same with the queue pairs of iWARP, which lacks some of their opcodes.
const CONNECTED_ANYHOW: u16 = CONNECTED | IWARP;
const SRD: u16 = types(&[qp_type::SRD]);
const IWARP: u16 = types(&[qp_type::IWARP]);
/// All that send.
const ALL: u16 = CONNECTED | SRD | types(&[qp_type::UD, qp_type::GSI]);

const INVALIDATION: &[u32] = &[feature::MW, feature::FAST_REG];

/// All opcodes.
pub const OPCODES: &[Opcode] = &[
    Opcode {
        qp_types: CONNECTED_ANYHOW | SRD,
        ..opcode(wr_opcode::RDMA_WRITE, Kind::Write, wc_opcode::RDMA_WRITE)
    },
    Opcode {
        qp_types: CONNECTED_ANYHOW | SRD,
        imm: Imm::Data,
        ..opcode(
            wr_opcode::RDMA_WRITE_WITH_IMM,
            Kind::Write,
            wc_opcode::RDMA_WRITE,
        )
    },
    Opcode {
        qp_types: ALL | IWARP,
        ..opcode(wr_opcode::SEND, Kind::Send, wc_opcode::SEND)
    },
    Opcode {
        qp_types: ALL,
        imm: Imm::Data,
        ..opcode(wr_opcode::SEND_WITH_IMM, Kind::Send, wc_opcode::SEND)
    },
    Opcode {
        qp_types: ACKNOWLEDGED | IWARP | SRD,
        ..opcode(wr_opcode::RDMA_READ, Kind::Read, wc_opcode::RDMA_READ)
    },
    opcode(
        wr_opcode::ATOMIC_CMP_AND_SWP,
        Kind::Atomic,
        wc_opcode::COMP_SWAP,
    ),
    opcode(
        wr_opcode::ATOMIC_FETCH_AND_ADD,
        Kind::Atomic,
        wc_opcode::FETCH_ADD,
    ),
    Opcode {
        imm: Imm::LocalKey,
        ..opcode(wr_opcode::LOCAL_INV, Kind::Invalidate, wc_opcode::LOCAL_INV)
    },
    opcode(wr_opcode::BIND_MW, Kind::Bind, wc_opcode::BIND_MW),
    Opcode {
        qp_types: CONNECTED_ANYHOW,
        imm: Imm::RemoteKey,
        features: INVALIDATION,
        ..opcode(wr_opcode::SEND_WITH_INV, Kind::Send, wc_opcode::SEND)
    },
    Opcode {
        features: &[feature::FAST_REG],
        invalidates_sink: true,
        ..opcode(
            wr_opcode::RDMA_READ_WITH_INV,
            Kind::Read,
            wc_opcode::RDMA_READ,
        )
    },
    opcode(
        wr_opcode::MASKED_ATOMIC_CMP_AND_SWP,
        Kind::Atomic,
        wc_opcode::MASKED_COMP_SWAP,
    ),
    opcode(
        wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD,
        Kind::Atomic,
        wc_opcode::MASKED_FETCH_ADD,
    ),
    opcode(wr_opcode::FLUSH, Kind::Flush, wc_opcode::FLUSH),
    opcode(
        wr_opcode::ATOMIC_WRITE,
        Kind::AtomicWrite,
        wc_opcode::ATOMIC_WRITE,
    ),
    opcode(wr_opcode::REG_MR, Kind::Register, wc_opcode::REG_MR),
];

/// An opcode with what most of its kind have.
const fn opcode(opcode: u8, kind: Kind, completes_as: u8) -> Opcode {
    let (qp_types, features): (u16, &[u32]) = match kind {
        Kind::Send | Kind::Write => (CONNECTED, &[]),
        Kind::Read => (ACKNOWLEDGED | IWARP, &[]),
        Kind::Atomic => (ACKNOWLEDGED | IWARP, &[feature::ATOMIC]),
        Kind::AtomicWrite => (ACKNOWLEDGED, &[feature::ATOMIC]),
        Kind::Flush => (ACKNOWLEDGED, &[feature::FLUSH]),
        Kind::Bind => (CONNECTED_ANYHOW, &[feature::MW]),
        Kind::Invalidate => (CONNECTED_ANYHOW, INVALIDATION),
        Kind::Register => (CONNECTED_ANYHOW, &[feature::FAST_REG]),
    };
    Opcode {
        opcode,
        kind,
        qp_types,
        features,
        completes_as,
        imm: Imm::None,
        invalidates_sink: false,
    }
}

/// Numbers of opcodes are below this.
const OPCODES_END: usize = {
    let mut end = 0;
    let mut i = 0;
    while i < OPCODES.len() {
        let number = OPCODES[i].opcode as usize;
        if number >= end {
            end = number + 1;
        }
        i += 1;
    }
    end
};

/// Where in [`OPCODES`] each opcode is, plus one; zero: there is none of that number.
const PLACES: [u8; OPCODES_END] = {
    let mut places = [0; OPCODES_END];
    let mut i = 0;
    while i < OPCODES.len() {
        places[OPCODES[i].opcode as usize] = i as u8 + 1;
        i += 1;
    }
    places
};

/// As what each opcode completes.
const COMPLETES_AS: [u8; OPCODES_END] = {
    let mut completes_as = [wc_opcode::SEND; OPCODES_END];
    let mut i = 0;
    while i < OPCODES.len() {
        completes_as[OPCODES[i].opcode as usize] = OPCODES[i].completes_as;
        i += 1;
    }
    completes_as
};

/// `wc_opcode` of the completion of a send work request; that of a SEND for opcodes that there are
/// not.
#[inline(always)]
#[must_use]
pub fn completion_opcode(opcode: u8) -> u8 {
    let completes_as = COMPLETES_AS.get(usize::from(opcode));
    completes_as.copied().unwrap_or(wc_opcode::SEND)
}

impl Opcode {
    /// What is so of an opcode, if it is one.
    #[inline]
    #[must_use]
    pub fn of(opcode: u8) -> Option<&'static Self> {
        let place = *PLACES.get(usize::from(opcode))?;
        OPCODES.get(usize::from(place.checked_sub(1)?))
    }

    /// Whether queue pairs of this type have it.
    #[inline]
    #[must_use]
    pub const fn is_for(&self, qp_type: u8) -> bool {
        self.qp_types & 1u16.wrapping_shl(qp_type as u32) != 0 && qp_type < 16
    }
}

/// What becomes of a queue pair when one of its send work requests fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// All of it is in error.
    QueuePair,
    /// In RTS, only its send queue is: nobody is told of messages that are lost anyway.
    SendQueue,
    /// Nothing: only the work request is in error.
    WorkRequest,
}

/// One type of queue pairs.
#[derive(Debug, Clone, Copy)]
pub struct QpType {
    /// `qp_type`.
    pub qp_type: u8,
    /// It has a send queue.
    pub sends: bool,
    /// It has a receive queue, or takes receives from a shared one.
    pub receives: bool,
    /// Each message has a destination of its own; the others have a peer.
    pub datagram: bool,
    /// Messages are acknowledged, and repeated until they are.
    pub acknowledged: bool,
    /// The type of queue pairs that it sends to.
    pub peer: u8,
    /// What an error of its send queue does.
    pub failure: Failure,
    /// The feature that it needs.
    pub feature: u32,
}

/// All types of queue pairs.
pub const QP_TYPES: &[QpType] = &[
    QpType {
        datagram: true,
        acknowledged: false,
        failure: Failure::SendQueue,
        feature: feature::UD,
        ..connected(qp_type::GSI)
    },
    connected(qp_type::RC),
    QpType {
        acknowledged: false,
        failure: Failure::SendQueue,
        feature: feature::UC,
        ..connected(qp_type::UC)
    },
    QpType {
        datagram: true,
        acknowledged: false,
        failure: Failure::SendQueue,
        feature: feature::UD,
        ..connected(qp_type::UD)
    },
    QpType {
        receives: false,
        peer: qp_type::XRC_TGT,
        feature: feature::XRC,
        ..connected(qp_type::XRC_INI)
    },
    QpType {
        sends: false,
        receives: false,
        peer: qp_type::XRC_INI,
        feature: feature::XRC,
        ..connected(qp_type::XRC_TGT)
    },
    QpType {
        datagram: true,
        failure: Failure::WorkRequest,
        feature: feature::SRD,
        ..connected(qp_type::SRD)
    },
    QpType {
        feature: feature::IWARP,
        ..connected(qp_type::IWARP)
    },
];

/// A type with what RC has.
const fn connected(qp_type: u8) -> QpType {
    QpType {
        qp_type,
        sends: true,
        receives: true,
        datagram: false,
        acknowledged: true,
        peer: qp_type,
        failure: Failure::QueuePair,
        feature: feature::RC,
    }
}

impl QpType {
    /// What is so of a type, if it is one.
    #[inline]
    #[must_use]
    pub fn of(qp_type: u8) -> Option<&'static Self> {
        QP_TYPES.iter().find(|of| of.qp_type == qp_type)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_opcode_and_every_type_is_there_once() {
        for (name, opcode) in wr_opcode::ALL {
            let found = Opcode::of(*opcode as u8);
            assert_eq!(found.map(|of| of.opcode), Some(*opcode as u8), "{name}");
        }
        assert_eq!(OPCODES.len(), wr_opcode::ALL.len());
        for (name, qp_type) in qp_type::ALL {
            let found = QpType::of(*qp_type as u8);
            assert_eq!(found.map(|of| of.qp_type), Some(*qp_type as u8), "{name}");
        }
        assert_eq!(QP_TYPES.len(), qp_type::ALL.len());
        assert!(Opcode::of(10).is_none() && Opcode::of(33).is_none() && Opcode::of(255).is_none());
    }

    #[test]
    fn a_type_of_queue_pair_that_can_do_less_has_fewer_opcodes() {
        for of in OPCODES {
            let name = of.opcode;
            assert!(of.is_for(qp_type::RC), "{name}");
            assert_eq!(
                of.is_for(qp_type::XRC_INI),
                of.is_for(qp_type::RC),
                "{name}"
            );
            assert_eq!(of.is_for(qp_type::GSI), of.is_for(qp_type::UD), "{name}");
            assert!(of.is_for(qp_type::UC) || !of.is_for(qp_type::UD), "{name}");
            // What brings something needs an answer.
            assert!(!of.is_for(qp_type::UC) || !of.kind.brings(), "{name}");
            assert!(!of.is_for(qp_type::UD) || of.kind == Kind::Send, "{name}");
            assert!(!of.is_for(qp_type::XRC_TGT) && !of.is_for(17) && !of.is_for(18));
        }
    }

    #[test]
    fn a_type_that_is_sent_to_is_sent_to_by_its_peer() {
        for of in QP_TYPES {
            let peer = QpType::of(of.peer).unwrap();
            assert_eq!(peer.peer, of.qp_type);
            assert_eq!(peer.datagram, of.datagram);
            assert_eq!(peer.acknowledged, of.acknowledged);
        }
    }
}
