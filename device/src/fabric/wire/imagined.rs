// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages that stay in this process, as the packets that they would have been, for who captures.
//! They are whole, with PSNs that count on and ICRCs that are right; none was sent.
use std::sync::Arc;

use rustc_hash::FxHashMap;
use virtio_rdma_spec::facts::Kind;
use virtio_rdma_spec::verbs::{vendor_err, wc_status};

use super::capture::Capture;
use super::frame::{self, Addresses, Route};
use super::packet::{Body, Nak, Packet, Payload, Place, Psn, Request, Service, Syndrome};
use super::port::Direction;
use super::receiver::{brings, read_response};
use super::sender::{operands, request_packet};
use super::unacknowledged::datagram;
use crate::engine::cursor::fetch;
use crate::engine::message::Answer;
use crate::engine::payload_of;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, SendQueue};
use crate::engine::tables::Tables;
use crate::fabric::Observe;

/// Queue pairs whose positions are kept, at most: a guest may make and destroy any number of them. Where
/// there are more, all begin anew.
const MOST_POSITIONS: usize = 1 << 16;

/// `rnr_retry` without a limit.
const NO_LIMIT: u8 = 7;

/// Longest datagram of this process, bytes.
const LONGEST_DATAGRAM: u64 = 4096;

/// Where the packets of a queue pair are.
#[derive(Debug, Clone, Copy)]
struct Position {
    life: u32,
    next: Psn,
    /// Messages that its peer has completed.
    messages: u32,
}

/// What a worker knows of queue pairs whose messages it has captured.
#[derive(Debug, Default)]
pub(crate) struct Positions {
    /// By the serial number of the queue pair.
    of: FxHashMap<u64, Position>,
    /// Of this capture; zero if there is none.
    number: u64,
}

impl Positions {
    /// Forgets all of them, and frees their memory, if their capture has ended.
    #[inline]
    pub(crate) fn end_with(&mut self, capture: &Capture) {
        if self.number != 0 && capture.number() != Some(self.number) {
            *self = Self::default();
        }
    }

    /// Where a queue pair is; it is at `begun` if nothing is known of it.
    fn of(&mut self, serial: u64, begun: Position) -> &mut Position {
        if self.of.len() >= MOST_POSITIONS && !self.of.contains_key(&serial) {
            self.of.clear();
        }
        let position = self.of.entry(serial).or_insert(begun);
        if position.life != begun.life {
            *position = begun;
        }
        position
    }
}

/// Captures messages that stay in this process.
#[derive(Debug)]
pub(crate) struct Imagined<'w> {
    capture: &'w Capture,
    positions: &'w mut Positions,
    /// The frame that is written.
    frame: Vec<u8>,
}

impl<'w> Imagined<'w> {
    /// One that goes on from `positions`, if somebody captures.
    pub(crate) fn new(capture: &'w Capture, positions: &'w mut Positions) -> Option<Self> {
        let number = capture.number()?;
        positions.end_with(capture);
        positions.number = number;
        Some(Self {
            capture,
            positions,
            frame: Vec::new(),
        })
    }

    /// A packet would have been sent. Returns whether it is captured: if it is not, nor is the rest of
    /// its message, so that a long one does not hold up the worker.
    fn add(
        &mut self,
        now: u64,
        route: &Route,
        packet: &Packet<'_>,
        mut payload: Payload<'_>,
        comment: &str,
    ) -> bool {
        let len = route.frame_len(packet, payload.len);
        self.frame.resize(len, 0);
        if !frame::write(&mut self.frame, route, false, 0, packet, &mut payload) {
            return false;
        }
        let comment = Some(comment.to_owned());
        let frame = &self.frame;
        self.capture.add(now, None, Direction::Out, frame, comment)
    }

    fn datagram(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        answer: Answer,
        now: u64,
    ) {
        let Some(comment) = comment(answer, sq, qp) else {
            return;
        };
        let mut out = |addresses: &Addresses, packet: &Packet<'_>, payload: Payload<'_>| {
            let route = Route::new(*addresses, [qp.number, packet.dest_qp]);
            self.add(now, &route, packet, payload, &comment)
        };
        // What cannot be read is not captured.
        let _ = datagram(sq, tables, qp, active, LONGEST_DATAGRAM, &mut out);
    }
}

/// What is said of each packet.
const STAYS: &str = "local: not sent";

/// What is said of the packets of a message that had this answer; nothing if there were none.
fn comment(answer: Answer, sq: &SendQueue, qp: &Qp) -> Option<String> {
    let said = match answer {
        Answer::Done => return Some(STAYS.to_owned()),
        Answer::NotReady(_) => "no receive".to_owned(),
        Answer::NoAnswer => "nobody answers".to_owned(),
        Answer::Stopped => "the VM is stopped".to_owned(),
        Answer::Refused(error) => {
            let status = wc_status::name(error.status).unwrap_or("?");
            let reason = vendor_err::name(error.vendor).unwrap_or("?");
            if qp.facts.acknowledged {
                format!("refused with {status} ({reason})")
            } else {
                format!("dropped ({reason})")
            }
        }
        Answer::Progress | Answer::Busy | Answer::Local(_) => return None,
    };
    // The requester decides the same, after this.
    let tries = sq.tries;
    let last = match answer {
        _ if !qp.facts.acknowledged => "",
        Answer::NoAnswer if sq.timeout != 0 && tries.no_answer > sq.retry_cnt => {
            "; ends with RETRY_EXC_ERR"
        }
        Answer::NotReady(_) if sq.rnr_retry != NO_LIMIT && tries.not_ready >= sq.rnr_retry => {
            "; ends with RNR_RETRY_EXC_ERR"
        }
        _ => "",
    };
    Some(format!("{STAYS}; {said}{last}"))
}

impl Observe for Imagined<'_> {
    fn answered(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        answer: Answer,
        now: u64,
    ) {
        if qp.facts.datagram {
            return self.datagram(sq, tables, qp, active, answer, now);
        }
        let what = active.message;
        let path = &sq.path_attributes;
        let all = (
            Service::of(qp.qp_type),
            super::addresses(tables, path, sq.dest_gid),
            comment(answer, sq, qp),
        );
        let (Some(service), Some(addresses), Some(comment)) = all else {
            return;
        };
        let qps = [qp.number, sq.dest_qp];
        let [there, back] = [addresses, addresses.back()].map(|way| Route::new(way, qps));
        let mtu = payload_of(path.path_mtu);
        let packets = u32::try_from(what.length.div_ceil(mtu).max(1)).unwrap_or(u32::MAX);
        let begun = Position {
            life: qp.life(),
            next: Psn::new(path.sq_psn),
            messages: 0,
        };
        let position = self.positions.of(qp.serial(), begun);
        if answer == Answer::Done {
            position.messages = position.messages.wrapping_add(1);
        }
        let Position { next, messages, .. } = *position;
        if answer == Answer::Done {
            position.next = next.after(packets);
        }
        // The bytes from `offset` on of what the message moves.
        let source = |offset: u64| {
            let from = Active {
                done: offset,
                ..*active
            };
            sq.source(tables, qp, &from)
        };
        let (operands, range) = operands(what.kind, sq.operation);
        let bring = brings(what.kind);
        let moves = !what.kind.brings() && what.kind != Kind::Flush;
        // Without a receive the first packet is all that is looked at.
        let sent = match answer {
            _ if bring => 1,
            Answer::NotReady(_) => 1,
            _ => packets,
        };
        for number in 0..sent {
            let place = if bring {
                Place::Only
            } else {
                Place::of(number == 0, number + 1 == packets)
            };
            let Some(request) = Request::at(service, what.opcode, place) else {
                return;
            };
            let offset = u64::from(number) * mtu;
            let left = what.length - offset;
            let asked = if bring { left } else { left.min(mtu) };
            let packet = Packet {
                service,
                dest_qp: sq.dest_qp,
                psn: next.after(number),
                ack_request: place.ends() && service.answers(),
                solicited: place.ends() && what.solicited,
                body: Body::Request(request_packet(
                    &what, service, request, operands, range, offset, asked,
                )),
            };
            let mut source = source(offset);
            let payload = Payload {
                len: usize::try_from(if moves { asked } else { 0 }).unwrap_or_default(),
                read: &mut |space| fetch(&mut source, space).is_ok(),
            };
            if !self.add(now, &there, &packet, payload, &comment) {
                return;
            }
        }
        if !service.answers() {
            return;
        }
        let mut answers = |psn: Psn, body: Body<'_>, len: u64, offset: u64| {
            let packet = Packet {
                service,
                dest_qp: qp.number,
                psn,
                ack_request: false,
                solicited: false,
                body,
            };
            let mut source = source(offset);
            let payload = Payload {
                len: usize::try_from(len).unwrap_or_default(),
                read: &mut |space| fetch(&mut source, space).is_ok(),
            };
            self.add(now, &back, &packet, payload, STAYS)
        };
        let acknowledge = |syndrome| Body::Acknowledge {
            syndrome,
            msn: messages,
        };
        let last = next.after(packets - 1);
        match (answer, what.kind) {
            (Answer::Done, Kind::Read) => {
                for number in 0..packets {
                    let place = Place::of(number == 0, number + 1 == packets);
                    let offset = u64::from(number) * mtu;
                    let len = (what.length - offset).min(mtu);
                    let body = read_response(place, messages);
                    if !answers(next.after(number), body, len, offset) {
                        return;
                    }
                }
            }
            (Answer::Done, Kind::Atomic) => {
                let mut word = [0; 8];
                if fetch(&mut source(0), &mut word).is_ok() {
                    let body = Body::AtomicAcknowledge {
                        msn: messages,
                        value: u64::from_le_bytes(word),
                    };
                    answers(next, body, 0, 0);
                }
            }
            (Answer::Done, _) if bring => {
                answers(next, read_response(Place::Only, messages), 0, 0);
            }
            (Answer::Done, _) => {
                answers(last, acknowledge(Syndrome::Ack), 0, 0);
            }
            (Answer::NotReady(timer), _) => {
                answers(next, acknowledge(Syndrome::RnrNak(timer)), 0, 0);
            }
            (Answer::Refused(error), _) => {
                let nak = acknowledge(Syndrome::Nak(Nak::of(error)));
                answers(next, nak, 0, 0);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_queue_pairs_are_known_and_none_when_the_capture_has_ended() {
        let capture = Capture::default();
        capture.set(true);
        let mut positions = Positions::default();
        assert!(Imagined::new(&capture, &mut positions).is_some());
        let begun = Position {
            life: 1,
            next: Psn::new(7),
            messages: 0,
        };
        for serial in 0..MOST_POSITIONS as u64 {
            positions.of(serial, begun).messages = 1;
        }
        assert_eq!(positions.of(0, begun).messages, 1);
        assert_eq!(positions.of(u64::MAX, begun).messages, 0);
        assert_eq!(positions.of.len(), 1);
        positions.end_with(&capture);
        assert_eq!(positions.of.len(), 1);
        capture.set(false);
        positions.end_with(&capture);
        assert_eq!(positions.of.capacity(), 0);
    }
}
