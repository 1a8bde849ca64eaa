// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a connection is ended by a Terminate message: the reasons, and their codes on the wire
//! (RFC 5040, 4.8; RFC 5041, 7.2; RFC 5044, 8; RFC 6581, 8).
use std::fmt;

/// The layer that found the error.
pub(crate) mod layer {
    pub(crate) const RDMAP: u8 = 0;
    pub(crate) const DDP: u8 = 1;
    pub(crate) const MPA: u8 = 2;
}

/// Error types, each with its layer in its name.
pub(crate) mod error_type {
    /// Of RDMAP and DDP.
    pub(crate) const LOCAL_CATASTROPHIC: u8 = 0;
    pub(crate) const RDMAP_REMOTE_PROTECTION: u8 = 1;
    pub(crate) const RDMAP_REMOTE_OPERATION: u8 = 2;
    pub(crate) const DDP_TAGGED: u8 = 1;
    pub(crate) const DDP_UNTAGGED: u8 = 2;
    pub(crate) const MPA: u8 = 0;
}

/// A reason on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Codes {
    /// See [`layer`]: 4 bits.
    pub layer: u8,
    /// See [`error_type`]: 4 bits.
    pub error_type: u8,
    pub code: u8,
}

/// A reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    RdmapCatastrophic,
    /// Those of RDMAP about memory: what an RDMA Read Request, an Atomic Request or a Send with
    /// Invalidate names.
    RdmapInvalidStag,
    RdmapBounds,
    RdmapAccess,
    RdmapStagNotAssociated,
    RdmapOffsetWrap,
    RdmapStagNotInvalidated,
    RdmapProtection,
    /// Those of RDMAP about anything else.
    RdmapVersion,
    RdmapOpcode,
    /// Also that the address of an atomic operation is not aligned (RFC 7306, 8.2).
    RdmapStreamCatastrophic,
    RdmapGlobalCatastrophic,
    RdmapOperationNotInvalidated,
    /// Also that a segment is too short for its headers, for which the RFCs have no code.
    RdmapOperation,
    DdpCatastrophic,
    /// Those of RDMA Write and RDMA Read Response.
    DdpInvalidStag,
    DdpBounds,
    DdpStagNotAssociated,
    DdpOffsetWrap,
    DdpTaggedVersion,
    /// Those of all other messages.
    DdpInvalidQueue,
    DdpNoBuffer,
    DdpMsnRange,
    DdpInvalidOffset,
    DdpMessageTooLong,
    DdpUntaggedVersion,
    MpaConnectionLost,
    MpaCrc,
    MpaFpduStart,
    MpaInvalidFrame,
    MpaCatastrophic,
    MpaInsufficientIrd,
    MpaNoMatchingRtr,
}

const fn row(
    refusal: Refusal,
    layer: u8,
    error_type: u8,
    code: u8,
    name: &'static str,
) -> (Refusal, Codes, &'static str) {
    let codes = Codes {
        layer,
        error_type,
        code,
    };
    (refusal, codes, name)
}

/// All of them, in the order of the enumeration, with their codes and names.
pub(crate) const REFUSALS: [(Refusal, Codes, &str); 33] = {
    use error_type::{
        DDP_TAGGED, DDP_UNTAGGED, LOCAL_CATASTROPHIC, RDMAP_REMOTE_OPERATION,
        RDMAP_REMOTE_PROTECTION,
    };
    use layer::{DDP, MPA, RDMAP};
    use Refusal as R;
    const PROTECTION: u8 = RDMAP_REMOTE_PROTECTION;
    const OPERATION: u8 = RDMAP_REMOTE_OPERATION;
    const TAGGED: u8 = DDP_TAGGED;
    const UNTAGGED: u8 = DDP_UNTAGGED;
    const ONLY: u8 = error_type::MPA;
    #[rustfmt::skip]
    let rows = [
        row(R::RdmapCatastrophic, RDMAP, LOCAL_CATASTROPHIC, 0x00, "local catastrophic error"),
        row(R::RdmapInvalidStag, RDMAP, PROTECTION, 0x00, "invalid STag"),
        row(R::RdmapBounds, RDMAP, PROTECTION, 0x01, "base or bounds violation"),
        row(R::RdmapAccess, RDMAP, PROTECTION, 0x02, "access rights violation"),
        row(R::RdmapStagNotAssociated, RDMAP, PROTECTION, 0x03, "STag not associated with stream"),
        row(R::RdmapOffsetWrap, RDMAP, PROTECTION, 0x04, "tagged offset wrap"),
        row(R::RdmapStagNotInvalidated, RDMAP, PROTECTION, 0x09, "STag cannot be invalidated"),
        row(R::RdmapProtection, RDMAP, PROTECTION, 0xff, "unspecified protection error"),
        row(R::RdmapVersion, RDMAP, OPERATION, 0x05, "invalid version"),
        row(R::RdmapOpcode, RDMAP, OPERATION, 0x06, "unexpected opcode"),
        row(R::RdmapStreamCatastrophic, RDMAP, OPERATION, 0x07, "catastrophic error of the stream"),
        row(R::RdmapGlobalCatastrophic, RDMAP, OPERATION, 0x08, "catastrophic error, global"),
        row(R::RdmapOperationNotInvalidated, RDMAP, OPERATION, 0x09, "STag cannot be invalidated"),
        row(R::RdmapOperation, RDMAP, OPERATION, 0xff, "unspecified operation error"),
        row(R::DdpCatastrophic, DDP, LOCAL_CATASTROPHIC, 0x00, "local catastrophic error"),
        row(R::DdpInvalidStag, DDP, TAGGED, 0x00, "invalid STag"),
        row(R::DdpBounds, DDP, TAGGED, 0x01, "base or bounds violation"),
        row(R::DdpStagNotAssociated, DDP, TAGGED, 0x02, "STag not associated with stream"),
        row(R::DdpOffsetWrap, DDP, TAGGED, 0x03, "tagged offset wrap"),
        row(R::DdpTaggedVersion, DDP, TAGGED, 0x04, "invalid version of a tagged segment"),
        row(R::DdpInvalidQueue, DDP, UNTAGGED, 0x01, "invalid queue number"),
        row(R::DdpNoBuffer, DDP, UNTAGGED, 0x02, "no buffer available"),
        row(R::DdpMsnRange, DDP, UNTAGGED, 0x03, "message sequence number out of range"),
        row(R::DdpInvalidOffset, DDP, UNTAGGED, 0x04, "invalid message offset"),
        row(R::DdpMessageTooLong, DDP, UNTAGGED, 0x05, "message too long for its buffer"),
        row(R::DdpUntaggedVersion, DDP, UNTAGGED, 0x06, "invalid version of an untagged segment"),
        row(R::MpaConnectionLost, MPA, ONLY, 0x01, "TCP connection lost"),
        row(R::MpaCrc, MPA, ONLY, 0x02, "wrong CRC"),
        row(R::MpaFpduStart, MPA, ONLY, 0x03, "FPDU length and markers do not agree"),
        row(R::MpaInvalidFrame, MPA, ONLY, 0x04, "invalid request or reply frame"),
        row(R::MpaCatastrophic, MPA, ONLY, 0x05, "local catastrophic error"),
        row(R::MpaInsufficientIrd, MPA, ONLY, 0x06, "insufficient IRD"),
        row(R::MpaNoMatchingRtr, MPA, ONLY, 0x07, "no matching RTR option"),
    ];
    rows
};

// Each reason has its row.
const _: () = assert!(Refusal::MpaNoMatchingRtr as usize + 1 == REFUSALS.len());

impl Refusal {
    pub(crate) const fn codes(self) -> Codes {
        REFUSALS[self as usize].1
    }

    /// Its name. Those of two layers may be the same.
    pub(crate) const fn name(self) -> &'static str {
        REFUSALS[self as usize].2
    }

    /// The reason with these codes, if there is one.
    pub(crate) fn find(codes: Codes) -> Option<Self> {
        // RDMAP has any code with this type.
        let any_code =
            codes.layer == layer::RDMAP && codes.error_type == error_type::LOCAL_CATASTROPHIC;
        let codes = Codes {
            code: if any_code { 0 } else { codes.code },
            ..codes
        };
        let mut rows = REFUSALS.iter();
        rows.find(|row| row.1 == codes).map(|row| row.0)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.codes().fmt(f)
    }
}

impl fmt::Display for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            layer::RDMAP => f.write_str("RDMAP: ")?,
            layer::DDP => f.write_str("DDP: ")?,
            layer::MPA => f.write_str("MPA: ")?,
            other => write!(f, "layer {other}: ")?,
        }
        match Refusal::find(*self) {
            Some(refusal) => f.write_str(refusal.name()),
            None => write!(f, "error type {}, code {:#04x}", self.error_type, self.code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(layer: u8, error_type: u8, code: u8) -> Codes {
        Codes {
            layer,
            error_type,
            code,
        }
    }

    #[test]
    fn the_table_is_in_order_and_each_reason_is_found_by_its_codes() {
        for (at, (refusal, codes, name)) in REFUSALS.into_iter().enumerate() {
            assert_eq!(refusal as usize, at, "{refusal:?}");
            assert_eq!((refusal.codes(), refusal.name()), (codes, name));
            assert_eq!(Refusal::find(codes), Some(refusal));
        }
    }

    #[test]
    fn codes_are_those_of_the_rfcs() {
        for (refusal, layer, error_type, code) in [
            (Refusal::RdmapAccess, 0, 1, 2),
            (Refusal::RdmapOpcode, 0, 2, 6),
            (Refusal::DdpBounds, 1, 1, 1),
            (Refusal::DdpNoBuffer, 1, 2, 2),
            (Refusal::MpaCrc, 2, 0, 2),
            (Refusal::MpaInsufficientIrd, 2, 0, 6),
        ] {
            assert_eq!(refusal.codes(), codes(layer, error_type, code));
        }
        let catastrophic = Refusal::find(codes(0, 0, 0x55));
        assert_eq!(catastrophic, Some(Refusal::RdmapCatastrophic));
        for unknown in [
            codes(0, 1, 5),
            codes(1, 0, 1),
            codes(2, 1, 2),
            codes(3, 0, 0),
        ] {
            assert_eq!(Refusal::find(unknown), None);
        }
    }

    #[test]
    fn they_have_names() {
        assert_eq!(Refusal::DdpNoBuffer.to_string(), "DDP: no buffer available");
        assert_eq!(Refusal::MpaCrc.to_string(), "MPA: wrong CRC");
        let unknown = codes(5, 1, 0xa).to_string();
        assert_eq!(unknown, "layer 5: error type 1, code 0x0a");
    }
}
