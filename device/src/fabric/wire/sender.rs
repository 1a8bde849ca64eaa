// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requester of a fabric with packets. Many messages are under way; acknowledgements complete
//! them in order. What is lost is repeated from there on (go back N).
//!
//! Work requests are begun, judged and ended by the engine, in the order in which they were posted.
//! What was begun is kept here as a copy until it is done: its entry is never read again, and its
//! memory is read through its keys whenever a packet is sent.
use std::collections::VecDeque;
use std::sync::Arc;

use virtio_rdma_spec::facts::Kind;
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{qp_state, qp_type, vendor_err, wc_status};

use super::packet::{Body, Nak, Packet, Place, Psn, Request, Reth, Syndrome};
use crate::engine::cursor::{fetch, Cursor, DataSource};
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::verbs::keys::Accessor;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// Packets that may be under way.
const WINDOW: u32 = 256;
/// Messages that may be under way.
const MESSAGES: usize = 256;
/// An acknowledgement is asked for after so many packets, and at the end of each message.
const ACK_EVERY: u32 = 16;
/// How long to wait for an answer where no time-out is set, nanoseconds. Such attempts do not
/// count.
const ENDLESS_RETRY: u64 = 100_000_000;

/// What decides which queue pair a packet is for, and how it looks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    pub dest_qp: u32,
    /// Payload of a packet that is not the last of its message, bytes.
    pub mtu: u64,
}

/// A message under way.
#[derive(Debug)]
struct Outstanding {
    active: Active,
    first: Psn,
    packets: u32,
    sges: Vec<Sge>,
    inline: Vec<u8>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Nothing,
    /// An answer, until this time.
    Answer(u64),
    /// The time that the peer asked for, since it has no receive.
    Receive(u64),
}

/// The requester's half of a queue pair on a fabric with packets.
#[derive(Debug)]
pub(super) struct Sender {
    /// The first packet that was not acknowledged.
    unacknowledged: Psn,
    /// The packet to send next.
    next: Psn,
    /// The packet after the last one that ever was sent.
    sent: Psn,
    /// The packet after the last one of the last message.
    end: Psn,
    /// What is under way, the oldest first.
    outstanding: VecDeque<Outstanding>,
    /// Where `next` is: index in `outstanding`.
    at: usize,
    /// Of the past, for their capacity.
    spare: Vec<Outstanding>,
    /// The work request in progress in the send queue fails for this, when all before it is done.
    refused: Option<WcError>,
    /// Memory of the message at `next` could not be read: it fails, when all before it is done.
    unreadable: Option<WcError>,
    wait: Wait,
    /// Packet numbers count from here for asking for acknowledgements.
    packets: u32,
}

impl Sender {
    pub(super) fn new(first: Psn) -> Self {
        Self {
            unacknowledged: first,
            next: first,
            sent: first,
            end: first,
            outstanding: VecDeque::new(),
            at: 0,
            spare: Vec::new(),
            refused: None,
            unreadable: None,
            wait: Wait::Nothing,
            packets: 0,
        }
    }

    /// Polls the send queue: begins work requests and gives packets to `send`, each at most
    /// `peer.mtu` bytes of payload, which is read into `payload`.
    #[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
    pub(super) fn poll(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        now: u64,
        mut budget: Budget,
        payload: &mut Vec<u8>,
        send: &mut dyn FnMut(&Packet<'_>),
    ) -> Polled {
        if let Err(polled) = sq.may_go_on(tables, qp) {
            return polled;
        }
        match self.wait {
            Wait::Receive(until) if now < until => return self.park(sq, until),
            Wait::Receive(_) => self.wait = Wait::Nothing,
            Wait::Answer(until) if now >= until => {
                if let Err(polled) = self.time_out(sq, tables, qp) {
                    return polled;
                }
            }
            _ => {}
        }
        if let Err(polled) = self.begin(sq, tables, qp, peer, &mut budget) {
            return polled;
        }
        let more = self.send(sq, tables, qp, peer, &mut budget, payload, send);
        if let Some(error) = self.unreadable.filter(|_| self.at == 0) {
            self.fail_oldest(sq, tables, qp, error);
            return Polled::Again;
        }
        if self.unacknowledged == self.sent {
            self.wait = Wait::Nothing;
        } else if self.wait == Wait::Nothing {
            self.wait = Wait::Answer(now.saturating_add(answer_time(sq)));
        }
        match self.wait {
            _ if more => Polled::Again,
            Wait::Answer(until) | Wait::Receive(until) => self.park(sq, until),
            Wait::Nothing => {
                sq.parked = None;
                Polled::Idle
            }
        }
    }

    fn park(&self, sq: &mut SendQueue, until: u64) -> Polled {
        sq.parked = Some(until);
        Polled::Park(until)
    }

    /// No answer came in time: all that is under way is sent again.
    fn time_out(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<(), Polled> {
        qp.vm.count_retry(qp.worker_index);
        self.wait = Wait::Nothing;
        if sq.timeout != 0 {
            if sq.tries.no_answer >= sq.retry_cnt {
                let error = WcError::new(wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER);
                self.fail_oldest(sq, tables, qp, error);
                return Err(Polled::Again);
            }
            sq.tries.no_answer += 1;
        }
        self.go_back();
        Ok(())
    }

    fn go_back(&mut self) {
        self.next = self.unacknowledged;
        self.at = 0;
        self.unreadable = None;
    }

    /// Begins work requests, as many as the window allows.
    fn begin(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        budget: &mut Budget,
    ) -> Result<(), Polled> {
        loop {
            if let Some(active) = sq.active {
                // What is no message, or fails, is carried out when all before it is done.
                if !self.outstanding.is_empty() {
                    return Ok(());
                }
                if let Some(error) = self.refused.take() {
                    sq.fail(tables, qp, error);
                    return Err(Polled::Again);
                }
                match sq.execute(tables, qp, &active, budget) {
                    Ok(true) => sq.finish(tables, qp, &active),
                    Ok(false) => return Err(Polled::Again),
                    Err(error) => {
                        sq.fail(tables, qp, error);
                        return Err(Polled::Again);
                    }
                }
            }
            // While the queue drains, nothing more begins.
            let begins = qp.state() == qp_state::RTS && budget.messages != 0;
            let under_way = self.end.since(self.unacknowledged);
            if !begins || under_way >= WINDOW || self.outstanding.len() >= MESSAGES {
                return Ok(());
            }
            let active = match sq.fetch(tables, qp) {
                None => return Ok(()),
                Some(Err(error)) => {
                    self.refused = Some(error);
                    continue;
                }
                Some(Ok(active)) => active,
            };
            budget.messages -= 1;
            if active.message.kind.is_local() {
                sq.active = Some(active);
                continue;
            }
            let goes = Request::at(active.message.opcode, Place::Only).is_some();
            if sq.qp_type != qp_type::RC || !goes {
                sq.active = Some(active);
                let error = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
                self.refused = Some(error);
                continue;
            }
            let mut message = self.spare.pop().unwrap_or_else(|| Outstanding {
                active,
                first: self.end,
                packets: 0,
                sges: Vec::new(),
                inline: Vec::new(),
            });
            let packets = active.message.length.div_ceil(peer.mtu).max(1);
            message.active = active;
            message.first = self.end;
            message.packets = u32::try_from(packets).unwrap_or(u32::MAX);
            message.sges.clear();
            message.inline.clear();
            if active.inline {
                message.inline.extend_from_slice(&sq.inline);
            } else {
                message.sges.extend_from_slice(&sq.sges);
            }
            self.end = self.end.after(message.packets);
            self.outstanding.push_back(message);
            sq.take_begun();
        }
    }

    /// Sends packets, as many as window and budget allow. Returns whether there are more that may
    /// be sent at once.
    #[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
    fn send(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        budget: &mut Budget,
        payload: &mut Vec<u8>,
        send: &mut dyn FnMut(&Packet<'_>),
    ) -> bool {
        while self.next != self.end && self.unreadable.is_none() {
            let in_flight = self.next.since(self.unacknowledged);
            if in_flight >= WINDOW {
                return false;
            }
            if budget.bytes == 0 {
                return true;
            }
            let Some(message) = self.outstanding.get(self.at) else {
                return false;
            };
            let number = self.next.since(message.first);
            let Active {
                message: what,
                inline,
                ..
            } = message.active;
            let offset = u64::from(number) * peer.mtu;
            let len = what.length.saturating_sub(offset).min(peer.mtu);
            let place = Place::of(number == 0, number + 1 == message.packets);
            payload.resize(usize::try_from(len).unwrap_or_default(), 0);
            let mut source = if inline {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                DataSource::Bytes(message.inline.get(from..).unwrap_or_default())
            } else {
                let local = Accessor::local(qp.pd);
                DataSource::Guest(Cursor::new(tables, &message.sges, local, 0, offset))
            };
            if let Err(key) = fetch(&mut source, payload) {
                self.unreadable = Some(WcError::new(wc_status::LOC_PROT_ERR, key.0));
                return false;
            }
            let Some(request) = Request::at(what.opcode, place) else {
                return false;
            };
            self.packets = self.packets.wrapping_add(1);
            let window_ends = in_flight + 1 == WINDOW;
            let begins_write = what.kind == Kind::Write && place.begins();
            send(&Packet {
                dest_qp: peer.dest_qp,
                psn: self.next,
                ack_request: place.ends() || window_ends || self.packets % ACK_EVERY == 0,
                solicited: place.ends() && what.solicited,
                body: Body::Request {
                    request,
                    reth: if begins_write {
                        Reth {
                            addr: what.remote_addr,
                            rkey: what.rkey,
                            length: u32::try_from(what.length).unwrap_or(u32::MAX),
                        }
                    } else {
                        Reth::default()
                    },
                    immediate: if request.imm == what.imm_is {
                        what.imm
                    } else {
                        0
                    },
                    payload,
                },
            });
            budget.bytes = budget.bytes.saturating_sub(len.max(64));
            self.next = self.next.after(1);
            if place.ends() {
                self.at += 1;
            }
            if self.sent.since(self.unacknowledged) < self.next.since(self.unacknowledged) {
                self.sent = self.next;
            }
        }
        // The guest may have posted more meanwhile; its doorbell tells.
        budget.messages == 0 && sq.posted()
    }

    /// An answer came, at time `now`.
    pub(super) fn answer(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        psn: Psn,
        syndrome: Syndrome,
        now: u64,
    ) {
        let sent = self.sent.since(self.unacknowledged);
        // An ACK is for its packet, too; a NAK for all before it.
        let (known, acknowledged) = match syndrome {
            Syndrome::Ack => {
                let behind = psn.after(1).since(self.unacknowledged);
                (behind <= sent, behind)
            }
            Syndrome::RnrNak(_) | Syndrome::Nak(_) => {
                let behind = psn.since(self.unacknowledged);
                (behind < sent, behind)
            }
        };
        // An answer to what is answered already, or never was sent.
        if !known {
            return;
        }
        if acknowledged != 0 {
            self.progress(sq, tables, qp, acknowledged);
        }
        match syndrome {
            Syndrome::Ack => {}
            Syndrome::Nak(Nak::Sequence) => self.go_back(),
            Syndrome::RnrNak(timer) => {
                qp.vm.count_rnr(qp.worker_index);
                if sq.rnr_retry != 7 {
                    if sq.tries.not_ready >= sq.rnr_retry {
                        let status = wc_status::RNR_RETRY_EXC_ERR;
                        let error = WcError::new(status, vendor_err::NO_RECEIVE);
                        self.fail_oldest(sq, tables, qp, error);
                        return;
                    }
                    sq.tries.not_ready += 1;
                }
                self.go_back();
                self.wait = Wait::Receive(now.saturating_add(rnr_nanoseconds(timer)));
            }
            Syndrome::Nak(nak) => {
                let status = match nak {
                    Nak::RemoteAccess => wc_status::REM_ACCESS_ERR,
                    Nak::RemoteOperational => wc_status::REM_OP_ERR,
                    Nak::Sequence | Nak::InvalidRequest => wc_status::REM_INV_REQ_ERR,
                };
                self.fail_oldest(sq, tables, qp, WcError::new(status, vendor_err::PEER));
            }
        }
    }

    /// So many packets more are acknowledged: the messages that they end are done.
    fn progress(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>, packets: u32) {
        let before = self.unacknowledged;
        let behind = self.next.since(before) < packets;
        self.unacknowledged = before.after(packets);
        sq.reset_retries();
        self.wait = Wait::Nothing;
        while let Some(oldest) = self.outstanding.front() {
            let end = oldest.first.after(oldest.packets);
            if end.since(before) > packets {
                break;
            }
            let Some(done) = self.outstanding.pop_front() else {
                break;
            };
            self.at = self.at.saturating_sub(1);
            let (worker, bytes) = (qp.worker_index, done.active.message.length);
            sq.finish_begun(tables, qp, &done.active);
            qp.vm.count_sent(worker, 1, bytes);
            self.spare.push(done);
        }
        if behind {
            // It had gone back further than was needed.
            self.go_back();
        }
    }

    /// The oldest message fails, and the queue pair with it.
    fn fail_oldest(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>, error: WcError) {
        if let Some(oldest) = self.outstanding.pop_front() {
            sq.fail_begun(tables, qp, &oldest.active, error);
            self.spare.push(oldest);
        }
    }

    /// Flushes all that is under way. The send queue flushes what it has itself.
    pub(super) fn flush(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        while let Some(message) = self.outstanding.pop_front() {
            sq.flush_begun(tables, qp, &message.active);
            self.spare.push(message);
        }
        self.unacknowledged = self.end;
        self.next = self.end;
        self.sent = self.end;
        self.at = 0;
        self.refused = None;
        self.unreadable = None;
        self.wait = Wait::Nothing;
    }
}

/// How long to wait for an answer, nanoseconds.
fn answer_time(sq: &SendQueue) -> u64 {
    match sq.timeout {
        0 => ENDLESS_RETRY,
        timeout => 4096 << timeout,
    }
}
