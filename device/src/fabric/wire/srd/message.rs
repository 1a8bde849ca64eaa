// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A message of a reliable datagram that is sent in packets: a request of a work request that was
//! begun, or what an RDMA READ of the peer is to bring.
use std::sync::{Arc, Weak};

use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{access, vendor_err, wc_status};

use super::super::frame::Addresses;
use super::super::srd_packet::{self, Data};
use super::outgoing::Stamp;
use crate::engine::cursor::{fetch, transfer, Cursor, DataSource, Fault, Part, Sink};
use crate::engine::message::{Answer, Message};
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Origin, Payload, Slice};
use crate::engine::send_queue::Active;
use crate::engine::tables::Tables;
use crate::footprint::Share;
use crate::verbs::keys::Accessor;
use crate::verbs::WcError;

/// Whose message it is.
#[derive(Debug)]
pub(super) enum Role {
    /// A work request's: what it moves, and how often it goes again for want of a receive.
    Request {
        active: Active,
        way: Addresses,
        sges: Vec<Sge>,
        inline: Vec<u8>,
        rnr_retry: u8,
    },
    /// What the peer's READ with this number brings.
    Response { number: u32 },
}

/// A message under way.
#[derive(Debug)]
pub(super) struct Sending {
    /// The queue pair that it is of, and which of its lives.
    pub qp: Weak<Qp>,
    pub life: u32,
    pub role: Role,
    pub message: Message,
    pub dest_qp: u32,
    pub qkey: u32,
    /// Payload of a packet, bytes.
    pub mtu: u32,
    /// Where the next packet begins that is new, and whether there is none.
    next: u32,
    all_sent: bool,
    /// Packets that were sent and have no answer.
    pub unanswered: u32,
    /// A READ was taken by the peer, and has brought anything, and so many bytes.
    pub accepted: bool,
    any_brought: bool,
    brought: u32,
    /// When anything of it was heard last, nanoseconds.
    pub since: u64,
    /// How often there was no receive for it.
    pub not_ready: u8,
    /// For itself, in the account of its VM.
    pub _share: Share,
}

/// What is new: a packet of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u32,
    pub len: u32,
}

impl Sending {
    pub(super) fn new(
        (qp, role, message): (&Arc<Qp>, Role, Message),
        (dest_qp, qkey): (u32, u32),
        mtu: u32,
        now: u64,
        share: Share,
    ) -> Self {
        Self {
            qp: Arc::downgrade(qp),
            life: qp.life(),
            role,
            message,
            dest_qp,
            qkey,
            mtu,
            next: 0,
            all_sent: false,
            unanswered: 0,
            accepted: false,
            any_brought: false,
            brought: 0,
            since: now,
            not_ready: 0,
            _share: share,
        }
    }

    /// Its queue pair, if that is there still, and in the same life.
    pub(super) fn qp(&self) -> Option<Arc<Qp>> {
        self.qp.upgrade().filter(|qp| qp.life() == self.life)
    }

    /// Where a request goes.
    pub(super) fn way(&self) -> Option<&Addresses> {
        match &self.role {
            Role::Request { way, .. } => Some(way),
            Role::Response { .. } => None,
        }
    }

    pub(super) fn is_request(&self) -> bool {
        matches!(self.role, Role::Request { .. })
    }

    /// Whether it asks for what a READ brings.
    pub(super) fn asks(&self) -> bool {
        self.is_request() && self.message.kind == Kind::Read
    }

    fn length(&self) -> u32 {
        u32::try_from(self.message.length).unwrap_or(u32::MAX)
    }

    /// Whether anything of it was sent, and has not been refused.
    pub(super) fn has_begun(&self) -> bool {
        self.unanswered != 0 || self.next != 0 || self.all_sent
    }

    pub(super) fn all_sent(&self) -> bool {
        self.all_sent
    }

    /// The next packet that is new, if it may be sent now.
    pub(super) fn piece(&self) -> Option<Piece> {
        if self.all_sent {
            return None;
        }
        let len = if self.asks() {
            0
        } else {
            (self.length() - self.next).min(self.mtu)
        };
        let piece = Piece {
            offset: self.next,
            len,
        };
        // Immediate data come when all else is there.
        let early = self.immediate(piece).is_some() && self.unanswered != 0;
        (!early).then_some(piece)
    }

    /// The next packet was sent.
    pub(super) fn sent(&mut self, piece: Piece) {
        self.next = piece.offset + piece.len;
        self.all_sent = self.asks() || self.next >= self.length();
        self.unanswered += 1;
    }

    /// A packet is to be sent again, as a new one.
    pub(super) fn again_from(&mut self, offset: u32) {
        self.next = offset;
        self.all_sent = false;
    }

    fn immediate(&self, piece: Piece) -> Option<u32> {
        let last = piece.offset + piece.len == self.length() && !self.asks();
        let has = self.is_request() && self.message.imm_is == Imm::Data;
        (has && last).then_some(self.message.imm)
    }

    /// The headers of a packet.
    pub(super) fn header(&self, id: u32, piece: Piece, stamp: Stamp, token: u64) -> Data {
        let Message {
            kind,
            remote_addr,
            rkey,
            solicited,
            ..
        } = self.message;
        let immediate = self.immediate(piece);
        let (kind, message) = match (&self.role, kind) {
            (Role::Response { number }, _) => (srd_packet::Kind::Brought, *number),
            (_, Kind::Read) => (srd_packet::Kind::Read, id),
            (_, Kind::Write) => (srd_packet::Kind::Write, 0),
            _ => (srd_packet::Kind::Send, 0),
        };
        let ranged = matches!(kind, srd_packet::Kind::Write | srd_packet::Kind::Read);
        Data {
            kind,
            solicited: solicited && (kind == srd_packet::Kind::Send || immediate.is_some()),
            path: stamp.path,
            token,
            number: stamp.number,
            heard: stamp.heard,
            src_qp: self.message.src_qp,
            qkey: self.qkey,
            message,
            length: self.length(),
            offset: piece.offset,
            immediate,
            rkey: if ranged { rkey } else { 0 },
            remote_addr: if ranged { remote_addr } else { 0 },
        }
    }

    /// Reads a part of what it moves.
    pub(super) fn read(
        &self,
        tables: &Tables,
        offset: u32,
        space: &mut [u8],
    ) -> Result<(), WcError> {
        let gone = WcError::new(wc_status::REM_OP_ERR, vendor_err::NO_QUEUE_PAIR);
        let qp = self.qp().ok_or(gone)?;
        let offset = u64::from(offset);
        match &self.role {
            Role::Request {
                active,
                sges,
                inline,
                ..
            } => {
                let mut source = if active.inline {
                    let left = usize::try_from(offset).ok().and_then(|at| inline.get(at..));
                    DataSource::Bytes(left.unwrap_or_default())
                } else {
                    let local = Accessor::local(qp.pd);
                    DataSource::Guest(Cursor::new(tables, sges, local, 0, offset))
                };
                fetch(&mut source, space)
                    .map_err(|key| WcError::new(wc_status::LOC_PROT_ERR, key.0))
            }
            Role::Response { .. } => {
                let len = space.len() as u64;
                let slice = Slice {
                    message: &self.message,
                    offset,
                    len,
                    last: offset + len == self.message.length,
                    claims: false,
                    payload: Payload::Into(Sink::Bytes(space)),
                };
                match qp.take_reliable_datagram(tables, origin(&qp), self.qkey, slice) {
                    Answer::Done | Answer::Progress => Ok(()),
                    Answer::Refused(error) | Answer::Local(error) => Err(error),
                    _ => Err(gone),
                }
            }
        }
    }

    /// No packet is new any more.
    pub(super) fn stop(&mut self) {
        self.all_sent = true;
    }

    /// Whether all that a READ asks for was brought.
    pub(super) fn is_brought(&self) -> bool {
        self.any_brought && u64::from(self.brought) >= self.message.length
    }

    /// Places what a READ brings.
    pub(super) fn bring(
        &mut self,
        tables: &Tables,
        offset: u32,
        payload: &[u8],
    ) -> Result<(), WcError> {
        let length = self.message.length;
        let len = payload.len() as u64;
        let wrong = WcError::new(wc_status::BAD_RESP_ERR, vendor_err::MESSAGE_LENGTH);
        let Role::Request { sges, .. } = &self.role else {
            return Err(wrong);
        };
        if u64::from(offset) + len > length || (len == 0 && length != 0) {
            return Err(wrong);
        }
        let qp = self.qp().ok_or(WcError::FLUSHED)?;
        let wanted = access::LOCAL_WRITE;
        let local = Accessor::local(qp.pd);
        let mut to = Cursor::new(tables, sges, local, wanted, offset.into());
        let moved = transfer(&mut to, &mut DataSource::Bytes(payload), Part::whole(len));
        moved.map_err(|(Fault::Source(key) | Fault::Destination(key))| {
            WcError::new(wc_status::LOC_PROT_ERR, key.0)
        })?;
        self.brought = self.brought.saturating_add(len as u32);
        self.any_brought = true;
        Ok(())
    }
}

/// Nobody waits for a receive here: its sender tries again.
pub(super) fn origin(qp: &Qp) -> Origin<'static> {
    Origin {
        worker: qp.worker_index,
        waiter: None,
    }
}

/// How much of its VM's account a message takes, bytes.
pub(super) fn footprint(sges: usize, inline: usize) -> u64 {
    // A map that is half empty.
    let entries = 3 * size_of::<Sending>() + sges * size_of::<Sge>() + inline;
    entries as u64
}
