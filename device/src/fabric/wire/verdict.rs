// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What was made of a frame that came: for counters, and for those who look at a capture.
use std::fmt;

use virtio_rdma_spec::verbs::{vendor_err, wc_status};

use super::packet::{Nak, Psn, Syndrome};
use crate::verbs::WcError;

/// Why a frame was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// It is none of RoCEv2.
    Other,
    /// It is shorter than its headers say, or a header is not as it must be.
    Malformed,
    /// It is damaged.
    Icrc,
    /// The port is down, or the VM stopped.
    Down,
    /// The objects of its VM are being changed for too long.
    Busy,
    /// It is for nobody here, or not from the peer that its queue pair is connected to.
    Stranger,
    /// Its queue pair is in no state to take it.
    State,
    /// Packets before it are missing.
    Ahead,
    /// It came before, or too late.
    Behind,
    /// UC: a packet of its message is missing.
    Incomplete,
    /// UC and datagrams: the message is not one that can be received.
    Unreceivable,
    /// Too many answers wait.
    NoRoom,
    /// It answers nothing that is under way.
    Unasked,
    /// Faults that are wanted.
    Faults,
}

impl Reason {
    /// All of them, in order: what counters call them, and captures.
    pub(super) const ALL: [(Self, &'static str, &'static str); 14] = [
        (Self::Other, "not_rocev2", "not RoCEv2"),
        (Self::Malformed, "malformed", "malformed"),
        (Self::Icrc, "icrc_wrong", "ICRC wrong"),
        (Self::Down, "port_down", "port down or VM stopped"),
        (Self::Busy, "vm_busy", "VM busy for too long"),
        (Self::Stranger, "stranger", "not of a connection here"),
        (Self::State, "state", "queue pair takes no messages now"),
        (Self::Ahead, "ahead", "packets before it are missing"),
        (Self::Behind, "behind", "came before, or too late"),
        (
            Self::Incomplete,
            "incomplete",
            "a packet of its message is missing",
        ),
        (
            Self::Unreceivable,
            "unreceivable",
            "message cannot be received",
        ),
        (Self::NoRoom, "no_room", "too many answers wait"),
        (
            Self::Unasked,
            "unasked",
            "answers nothing that is under way",
        ),
        (Self::Faults, "faults", "faults"),
    ];

    fn name(self) -> &'static str {
        let known = Self::ALL.get(self as usize);
        known.map_or("", |(_, _, name)| name)
    }
}

/// What was made of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It was carried out, or told us what became of what is under way.
    Taken,
    /// It came before, and is answered again.
    Again,
    /// It is answered by a NAK, to the packet with this PSN, for this reason (`vendor_err`) if it
    /// ends everything.
    Refused(Psn, Syndrome, u8),
    /// Its message is refused, for this reason (reliable datagrams).
    RefusedMessage(WcError),
    /// Packets before it are missing: it is kept until they come.
    Kept,
    /// What it answers goes again, from this packet on.
    Repeats(Psn),
    /// This packet goes again, by itself.
    Fills(Psn),
    /// The message that it answers ends in error.
    Ends(WcError),
    /// The network is congested: less is sent at a time.
    Slows,
    /// It asks what is missing, and is answered.
    Asks,
    /// So many packets are missing, and go again.
    Tells(u32),
    Dropped(Reason),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken => f.write_str("taken"),
            Self::Again => f.write_str("came before: answered again"),
            Self::Refused(psn, Syndrome::RnrNak(_), _) => {
                write!(f, "no receive: RNR NAK at PSN {}", psn.value())
            }
            Self::Refused(psn, Syndrome::Nak(Nak::Sequence), _) => {
                write!(f, "packets are missing: NAK, expected PSN {}", psn.value())
            }
            Self::Refused(psn, _, reason) => {
                let reason = vendor_err::name(*reason).unwrap_or("?");
                write!(f, "NAK at PSN {}: {reason}", psn.value())
            }
            Self::RefusedMessage(WcError { status, vendor }) => {
                let status = wc_status::name(*status).unwrap_or("?");
                let reason = vendor_err::name(*vendor).unwrap_or("?");
                write!(f, "message refused with {status} ({reason})")
            }
            Self::Kept => f.write_str("packets before it are missing: kept"),
            Self::Fills(psn) => write!(f, "sent again: PSN {} alone", psn.value()),
            Self::Repeats(psn) => write!(f, "sent again from PSN {} on", psn.value()),
            Self::Ends(WcError { status, vendor }) => {
                let status = wc_status::name(*status).unwrap_or("?");
                let reason = vendor_err::name(*vendor).unwrap_or("?");
                write!(f, "ends a message with {status} ({reason})")
            }
            Self::Slows => f.write_str("congestion: less is sent at a time"),
            Self::Asks => f.write_str("asks what is missing: answered"),
            Self::Tells(packets) => write!(f, "sent again: {packets} packets that are missing"),
            Self::Dropped(reason) => write!(f, "dropped: {}", reason.name()),
        }
    }
}
