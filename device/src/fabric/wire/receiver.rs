// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The responder of a fabric with packets: it takes them in the order of their sequence numbers,
//! hands their parts of messages to the engine's responder, and says what to answer.
//!
//! Each packet is carried out once. One that comes again is acknowledged again; one that comes too
//! early is dropped, and its requester told once to go back.
use std::sync::Arc;

use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::verbs::{qp_state, vendor_err, wc_status};

use super::packet::{Body, Nak, Packet, Psn, Reth, Syndrome};
use crate::engine::cursor::DataSource;
use crate::engine::message::{Answer, Message};
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Origin, Payload, Responder, Slice};
use crate::engine::tables::Tables;

/// Packets ahead of the expected one are no more than half of all numbers away.
const HALF: u32 = 1 << 23;

/// The message that is under way.
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    kind: Kind,
    reth: Reth,
    /// Bytes placed.
    offset: u64,
}

/// An answer: for which packet, what, and how many messages are complete.
pub(super) type Reply = (Psn, Syndrome, u32);

/// The responder's half of a queue pair on a fabric with packets.
#[derive(Debug)]
pub(super) struct Receiver {
    /// The packet to take next.
    expected: Psn,
    /// Messages completed.
    messages: u32,
    under_way: Option<UnderWay>,
    /// The requester knows that it has to go back to `expected`.
    told: bool,
    /// What was answered to the packet that ended it all: its requester may ask again.
    fatal: Option<(Psn, Nak)>,
}

impl Receiver {
    pub(super) fn new(first: Psn) -> Self {
        Self {
            expected: first,
            messages: 0,
            under_way: None,
            told: false,
            fatal: None,
        }
    }

    fn reply(&self, psn: Psn, syndrome: Syndrome) -> Reply {
        (psn, syndrome, self.messages)
    }

    /// Takes a request with payload of at most `mtu` bytes for queue pair `qp`, whose engine's
    /// responder is locked. Returns what to answer, if anything.
    pub(super) fn receive(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        packet: &Packet<'_>,
    ) -> Option<Reply> {
        let takes = matches!(qp.state(), qp_state::RTR | qp_state::RTS | qp_state::SQD);
        if !takes {
            // The requester learns the reason, though its first answer may be lost.
            let (psn, nak) = self.fatal.filter(|(psn, _)| *psn == packet.psn)?;
            return Some(self.reply(psn, Syndrome::Nak(nak)));
        }
        let ahead = packet.psn.since(self.expected);
        if ahead >= HALF {
            let again = self.reply(self.expected.before(), Syndrome::Ack);
            return packet.ack_request.then_some(again);
        }
        if ahead != 0 {
            let first = !std::mem::replace(&mut self.told, true);
            return first.then(|| self.reply(self.expected, Syndrome::Nak(Nak::Sequence)));
        }
        match self.carry_out(responder, tables, qp, mtu, packet) {
            Answer::Progress | Answer::Done => {
                self.expected = self.expected.after(1);
                self.told = false;
                let reply = self.reply(packet.psn, Syndrome::Ack);
                packet.ack_request.then_some(reply)
            }
            Answer::NotReady(timer) => {
                // What comes after it is dropped until it comes again.
                self.told = true;
                Some(self.reply(packet.psn, Syndrome::RnrNak(timer)))
            }
            Answer::Refused(error) => {
                let nak = match error.status {
                    wc_status::REM_ACCESS_ERR => Nak::RemoteAccess,
                    wc_status::REM_INV_REQ_ERR => Nak::InvalidRequest,
                    _ => Nak::RemoteOperational,
                };
                self.fatal = Some((packet.psn, nak));
                Some(self.reply(packet.psn, Syndrome::Nak(nak)))
            }
            // As if the packet were lost.
            Answer::Busy | Answer::Stopped | Answer::NoAnswer | Answer::Local(_) => None,
        }
    }

    fn carry_out(
        &mut self,
        responder: &mut Responder,
        tables: &Tables,
        qp: &Arc<Qp>,
        mtu: u64,
        packet: &Packet<'_>,
    ) -> Answer {
        let Body::Request {
            request,
            reth,
            immediate,
            payload,
        } = packet.body
        else {
            return Answer::NoAnswer;
        };
        let len = payload.len() as u64;
        let under_way = if request.place.begins() {
            let offset = 0;
            let kind = request.kind;
            self.under_way
                .is_none()
                .then_some(UnderWay { kind, reth, offset })
        } else {
            self.under_way
                .filter(|message| message.kind == request.kind)
        };
        let Some(under_way) = under_way else {
            return responder.invalid_request(tables, qp, vendor_err::OPCODE);
        };
        let end = under_way.offset + len;
        // Only the last packet of a message may be short, and none is empty but the only one.
        let full = if request.place.ends() {
            len <= mtu && (len != 0 || request.place.begins())
        } else {
            len == mtu
        };
        let length = if request.kind == Kind::Write {
            u64::from(under_way.reth.length)
        } else {
            end
        };
        if !full || end > length || (request.place.ends() && end != length) {
            return responder.invalid_request(tables, qp, vendor_err::MESSAGE_LENGTH);
        }
        let with_imm = request.kind == Kind::Write && request.imm == Imm::Data;
        let message = Message {
            opcode: request.wr_opcode,
            kind: request.kind,
            imm_is: request.imm,
            solicited: packet.solicited,
            imm: immediate,
            remote_addr: under_way.reth.addr,
            rkey: under_way.reth.rkey,
            srqn: 0,
            src_qp: responder.remote_qp(),
            length,
        };
        let answer = responder.receive(
            tables,
            qp,
            Origin {
                worker: qp.worker_index,
                waiter: None,
            },
            Slice {
                message: &message,
                offset: under_way.offset,
                len,
                last: request.place.ends(),
                claims: request.place.begins() || with_imm,
                payload: Payload::From(DataSource::Bytes(payload)),
            },
        );
        match answer {
            Answer::Progress => {
                self.under_way = Some(UnderWay {
                    offset: end,
                    ..under_way
                });
            }
            Answer::Done => {
                self.under_way = None;
                self.messages = self.messages.wrapping_add(1);
                qp.vm.count_received(qp.worker_index, 1, end);
            }
            _ => {}
        }
        answer
    }
}
