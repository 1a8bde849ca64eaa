// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requesters whose packets nobody acknowledges: UC and datagrams. A work request is done when its
//! packets have left.
use std::sync::Arc;

use virtio_rdma_spec::verbs::{vendor_err, wc_status};

use super::egress::Attempt;
use super::frame::Addresses;
use super::packet::{
    Body, Deth, Packet, Payload, Place, Psn, Request, RequestPacket, Reth, Service,
};
use super::sender::{Out, Peer};
use crate::engine::cursor::fetch;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::verbs::WcError;

/// The requester's half of a UC queue pair.
#[derive(Debug)]
pub(super) struct Stream {
    next: Psn,
}

impl Stream {
    pub(super) fn new(first: Psn) -> Self {
        Self { next: first }
    }

    /// Polls the send queue: gives packets to `out`, each of at most `peer.mtu` bytes of payload.
    pub(super) fn poll(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        mut budget: Budget,
        out: Out<'_>,
    ) -> Polled {
        loop {
            match self.step(sq, tables, qp, peer, &mut budget, out) {
                Ok(()) => {}
                Err(polled) => return polled,
            }
            if budget.messages == 0 || budget.bytes == 0 {
                return Polled::Again;
            }
        }
    }

    /// Sends one packet, or does what is no message.
    fn step(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<(), Polled> {
        sq.check_ring(tables, qp)?;
        let active = sq.next_active(tables, qp)?;
        sq.active = Some(active);
        let what = active.message;
        if what.kind.is_local() {
            budget.messages -= 1;
            return sq.execute(tables, qp, &active, budget);
        }
        let len = (what.length - active.done).min(peer.mtu);
        let done = active.done + len;
        let place = Place::of(active.done == 0, done == what.length);
        let request = match request(what.opcode, peer.service, place) {
            Ok(request) => request,
            Err(error) => {
                sq.fail(tables, qp, error);
                return Err(Polled::Again);
            }
        };
        let reth = Reth {
            addr: what.remote_addr,
            rkey: what.rkey,
            length: u32::try_from(what.length).unwrap_or(u32::MAX),
        };
        let packet = Packet {
            service: peer.service,
            dest_qp: peer.dest_qp,
            psn: self.next,
            ack_request: false,
            solicited: place.ends() && what.solicited,
            body: Body::Request(RequestPacket {
                reth: if request.has_range() {
                    reth
                } else {
                    Reth::default()
                },
                immediate: what.imm,
                ..RequestPacket::new(request, &[])
            }),
        };
        let sent_packet = with_payload(sq, tables, qp, &active, len, |payload| {
            out(&packet, payload, Attempt::First)
        });
        if let Err(error) = sent_packet {
            sq.fail(tables, qp, error);
            return Err(Polled::Again);
        }
        self.next = self.next.after(1);
        budget.bytes = budget.bytes.saturating_sub(len.max(64));
        if place.ends() {
            budget.messages -= 1;
            sent(sq, tables, qp, &active);
        } else {
            sq.active = Some(Active { done, ..active });
        }
        Ok(())
    }
}

/// Where datagrams go. It returns false if the payload could not be read.
pub(super) type DatagramsOut<'a> = &'a mut dyn FnMut(&Addresses, &Packet<'_>, Payload<'_>) -> bool;

/// Polls the send queue of a queue pair that sends datagrams, each of at most `mtu` bytes of
/// payload.
pub(super) fn datagrams(
    sq: &mut SendQueue,
    tables: &Tables,
    qp: &Arc<Qp>,
    mtu: u64,
    mut budget: Budget,
    out: DatagramsOut<'_>,
) -> Polled {
    while budget.messages != 0 && budget.bytes != 0 {
        match next_datagram(sq, tables, qp, mtu, out) {
            Ok(len) => {
                budget.messages -= 1;
                budget.bytes = budget.bytes.saturating_sub(len.max(64));
            }
            Err(polled) => return polled,
        }
    }
    Polled::Again
}

/// Sends the next datagram. Returns its length, bytes.
fn next_datagram(
    sq: &mut SendQueue,
    tables: &Tables,
    qp: &Arc<Qp>,
    mtu: u64,
    out: DatagramsOut<'_>,
) -> Result<u64, Polled> {
    sq.check_ring(tables, qp)?;
    let active = sq.next_active(tables, qp)?;
    sq.active = Some(active);
    if let Err(error) = datagram(sq, tables, qp, &active, mtu, out) {
        sq.fail(tables, qp, error);
        return Err(Polled::Again);
    }
    sent(sq, tables, qp, &active);
    Ok(active.message.length)
}

/// Sends the datagram of the work request in progress, which must fit `mtu` bytes of payload.
pub(super) fn datagram(
    sq: &SendQueue,
    tables: &Tables,
    qp: &Qp,
    active: &Active,
    mtu: u64,
    out: DatagramsOut<'_>,
) -> Result<(), WcError> {
    let what = active.message;
    let request = request(what.opcode, Service::Ud, Place::Only)?;
    let to = sq.datagram.ok_or(NO_SUCH_PACKET)?;
    if what.length > mtu {
        let reason = vendor_err::MESSAGE_LENGTH;
        return Err(WcError::new(wc_status::LOC_LEN_ERR, reason));
    }
    // Each has a PSN of its own, which nobody looks at.
    let psn = sq.path_attributes.sq_psn.wrapping_add(sq.position());
    let addresses = Addresses::of(&to);
    let packet = Packet {
        service: Service::Ud,
        dest_qp: to.qpn,
        psn: Psn::new(psn),
        ack_request: false,
        solicited: what.solicited,
        body: Body::Request(RequestPacket {
            deth: Deth {
                qkey: to.qkey,
                src_qp: what.src_qp,
            },
            immediate: what.imm,
            ..RequestPacket::new(request, &[])
        }),
    };
    let send = |payload: Payload<'_>| out(&addresses, &packet, payload);
    with_payload(sq, tables, qp, active, what.length, send)
}

/// RoCEv2 has no packet for it.
const NO_SUCH_PACKET: WcError = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);

/// The packet at `place` of the message of a work request, if its service has one.
fn request(opcode: u8, service: Service, place: Place) -> Result<Request, WcError> {
    Request::at(service, opcode, place).ok_or(NO_SUCH_PACKET)
}

/// Sends a packet with the next `len` bytes of a message.
fn with_payload(
    sq: &SendQueue,
    tables: &Tables,
    qp: &Qp,
    active: &Active,
    len: u64,
    send: impl FnOnce(Payload<'_>) -> bool,
) -> Result<(), WcError> {
    let mut source = sq.source(tables, qp, active);
    let mut fault = None;
    let mut read = |space: &mut [u8]| {
        fault = fetch(&mut source, space).err();
        fault.is_none()
    };
    let payload = Payload {
        len: usize::try_from(len).unwrap_or_default(),
        read: &mut read,
    };
    if send(payload) {
        return Ok(());
    }
    let reason = fault.map_or(0, |key| key.0);
    Err(WcError::new(wc_status::LOC_PROT_ERR, reason))
}

/// All of a message has left.
fn sent(sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>, active: &Active) {
    sq.finish(tables, qp, active);
    qp.vm.count_sent(qp.worker_index, 1, active.message.length);
}
