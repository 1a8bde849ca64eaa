// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a connection begins: the request and the reply of MPA, what the driver decides, and whether the
//! other end is in this process.

use std::sync::Arc;

use virtio_rdma_spec::command::status;
use virtio_rdma_spec::iwarp::{iw_event, IwEvent};

use super::connection::{with_private, Connection, Phase, Step};
use super::connections::{Entry, Here, Iwarp, Token, BEGIN, LATER};
use super::mpa::{Enhanced, Frame, Rtr, NOT_NEGOTIATED, REVISION_2};
use super::port::{Depths, Port, PrivateData};
use super::refusal::Refusal;
use super::tcp;
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Gid;
use crate::engine::vm::Vm;

/// What an initiator can begin with.
const RTR: Rtr = Rtr {
    send: false,
    write: true,
    read: false,
};

/// How many requests may be under way if the peer takes so many.
fn least(ours: u8, theirs: u16) -> u8 {
    if theirs == NOT_NEGOTIATED {
        return ours;
    }
    u8::try_from(theirs).map_or(ours, |theirs| ours.min(theirs))
}

/// Whether the peer wants to have more requests under way than we offered to answer (RFC 6581, 9).
fn wants_more(theirs: u16, ours: u8) -> bool {
    theirs != NOT_NEGOTIATED && theirs > ours.into()
}

/// The GID by which queue pairs of a VM find each other.
fn own_gid(vm: &Vm, here: Here<'_>) -> Option<Gid> {
    let tables = vm.read_in(here.section)?;
    tables.gids.first().copied().flatten()
}

impl Iwarp {
    /// TCP is connected, or will not be.
    pub(super) fn connected(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        if !connection.writable {
            return Step::Waits;
        }
        match connection.socket.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Step::Over(tcp::status_of(&error)),
        }
        if let Err(error) = connection.set_up() {
            return Step::Over(tcp::status_of(&error));
        }
        let Depths { ord, ird } = connection.depths;
        let request = Frame {
            reply: false,
            revision: REVISION_2,
            markers: false,
            crc: connection.port.settings.crc,
            rejected: false,
            enhanced: Some(Enhanced {
                peer_to_peer: connection.port.settings.peer_to_peer.then_some(RTR),
                ird: ird.into(),
                ord: ord.into(),
            }),
            private: connection.private.iter().copied().collect(),
        };
        if connection.write_frame(&request).is_err() {
            return Step::Over(status::ECONNRESET);
        }
        self.ends
            .insert((connection.local, connection.remote), token);
        connection.phase = Phase::AwaitsReply;
        self.set_deadline(token, connection, Some(here.now.saturating_add(BEGIN)));
        Step::Again
    }

    /// Reads what is to be a request or a reply.
    pub(super) fn take_frame(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        if connection.local.port() == 0 {
            if let Err(error) = connection.set_up() {
                return Step::Over(tcp::status_of(&error));
            }
            self.set_deadline(token, connection, Some(here.now.saturating_add(BEGIN)));
        }
        if let Err(status) = connection.read_input() {
            return Step::Over(status);
        }
        let (frame, length) = match Frame::read(&connection.input) {
            Ok(None) if connection.ends => return Step::Over(status::ECONNRESET),
            Ok(None) => return Step::Waits,
            Ok(Some(read)) => read,
            Err(malformed) => {
                let vm = &connection.port.vm;
                vm.warn(format_args!(
                    "a connection from {}: {malformed}",
                    connection.remote
                ));
                return Step::Over(status::ECONNRESET);
            }
        };
        let awaited = matches!(connection.phase, Phase::AwaitsReply);
        if frame.reply != awaited {
            return Step::Over(status::ECONNRESET);
        }
        let alone = connection.input.len() == length;
        if awaited && !frame.rejected && alone && self.partner(connection, here).is_none() {
            // A peer may reply before it looks at what comes after: Soft-iWARP does, and never sees
            // what it has missed.
            let at = *connection.replied.get_or_insert(here.now);
            if here.now < at.saturating_add(LATER) {
                return Step::Later;
            }
        }
        connection.input.drain(..length);
        if awaited {
            return self.replied(token, connection, &frame, here);
        }
        // Until the reply the initiator has nothing to say, and it does not go.
        if !connection.input.is_empty() || connection.ends {
            return Step::Over(status::ECONNRESET);
        }
        if frame.markers {
            let reply = Frame {
                reply: true,
                rejected: true,
                private: Default::default(),
                ..frame
            };
            let _ = connection.write_frame(&reply);
            return Step::Over(status::ECONNREFUSED);
        }
        if !connection.port.asks(connection.id) {
            return Step::Over(status::ECONNRESET);
        }
        self.ends
            .insert((connection.local, connection.remote), token);
        self.set_deadline(token, connection, None);
        let event = IwEvent {
            private_length: 0,
            ..connection.event_with(iw_event::CONNECT_REQUEST, &frame)
        };
        let event = with_private(event, &frame);
        connection.phase = Phase::Requested(Box::new(frame));
        connection.port.tell(connection.id, event);
        let port = connection.port.clone();
        self.tell(&port);
        Step::Waits
    }

    /// The driver accepts.
    pub(super) fn accept(
        &mut self,
        port: &Arc<Port>,
        id: u32,
        qp: Arc<Qp>,
        depths: Depths,
        private: PrivateData,
        here: Here<'_>,
    ) {
        let taken = self.token_of(port, id).and_then(|token| {
            let entry = self.entries.remove(&token)?;
            Some((token, entry))
        });
        let (token, mut connection) = match taken {
            Some((token, Entry::Connection(connection))) => (token, connection),
            _ => {
                // It has ended meanwhile.
                let event = IwEvent {
                    kind: iw_event::CLOSE,
                    status: status::ECONNRESET,
                    ..IwEvent::default()
                };
                port.tell(id, event);
                self.tell(port);
                return;
            }
        };
        connection.life = qp.life();
        self.of_qp.insert(qp.serial(), token);
        connection.qp = Some(qp);
        (connection.depths, connection.private) = (depths, private);
        let step = self.accepted(token, &mut connection, here);
        self.settle(token, connection, step, here);
    }

    pub(super) fn accepted(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        let phase = std::mem::replace(&mut connection.phase, Phase::Closes(status::ECONNRESET));
        let Phase::Requested(request) = phase else {
            return Step::Over(status::ECONNRESET);
        };
        let crc = request.crc || connection.port.settings.crc;
        let Depths { ord, ird } = connection.depths;
        let mut depths = connection.depths;
        let enhanced = request.enhanced.map(|theirs| {
            depths.ord = least(ord, theirs.ird);
            Enhanced {
                peer_to_peer: theirs.peer_to_peer,
                ird: ird.into(),
                ord: depths.ord.into(),
            }
        });
        let reply = Frame {
            reply: true,
            revision: request.revision,
            markers: false,
            crc,
            rejected: false,
            enhanced,
            private: connection.private.iter().copied().collect(),
        };
        if connection.write_frame(&reply).is_err() {
            return Step::Over(status::ECONNRESET);
        }
        connection.depths = depths;
        connection.phase = Phase::Accepted(Box::new(connection.new_stream(crc)));
        let both = request
            .enhanced
            .is_some_and(|with| with.peer_to_peer.is_some());
        if both || self.initiator_is_here(connection, here) {
            // The first message of the initiator shows that it is ready; one of this process joins.
            self.set_deadline(token, connection, Some(here.now.saturating_add(BEGIN)));
        } else {
            // It may send first, or wait for us. What is behind the reply before it has taken that in,
            // Soft-iWARP takes for an error.
            connection.replied = Some(here.now);
        }
        Step::Again
    }

    /// The driver rejects.
    pub(super) fn reject(&mut self, port: &Arc<Port>, id: u32, private: PrivateData) {
        let Some(token) = self.token_of(port, id) else {
            return;
        };
        if let Some(connection) = self.connection(token) {
            if let Phase::Requested(request) = &connection.phase {
                let reply = Frame {
                    reply: true,
                    rejected: true,
                    private: private.iter().copied().collect(),
                    ..(**request).clone()
                };
                let _ = connection.write_frame(&reply);
            }
        }
        self.remove(token);
    }

    /// The reply has come.
    pub(super) fn replied(
        &mut self,
        token: Token,
        connection: &mut Connection,
        reply: &Frame,
        here: Here<'_>,
    ) -> Step {
        if reply.rejected {
            let event = IwEvent {
                status: status::ECONNREFUSED,
                ..connection.event_with(iw_event::CONNECT_REPLY, reply)
            };
            connection
                .port
                .tell(connection.id, with_private(event, reply));
            let port = connection.port.clone();
            self.tell(&port);
            // The driver has been told.
            connection.owes_reply = false;
            connection.phase = Phase::AwaitsRequest;
            return Step::Over(status::ECONNREFUSED);
        }
        let wanted = connection.port.settings.crc;
        if reply.markers || (wanted && !reply.crc) {
            return Step::Over(status::ECONNRESET);
        }
        let Depths { ord, ird } = connection.depths;
        if let Some(theirs) = reply.enhanced {
            connection.depths.ord = least(ord, theirs.ird);
        }
        if let Some(partner) = self.partner(connection, here) {
            return self.join(token, connection, partner, reply, here);
        }
        let mut stream = connection.new_stream(reply.crc);
        let agreed = match reply.enhanced {
            Some(theirs) if wants_more(theirs.ord, ird) => Err(Refusal::MpaInsufficientIrd),
            Some(Enhanced {
                peer_to_peer: Some(rtr),
                ..
            }) => stream.show_ready(rtr, &mut self.pool),
            _ => Ok(()),
        };
        if let Err(refusal) = agreed {
            stream.tell(&refusal.into(), &[]);
            let _ = stream.send(&mut self.pool, &connection.socket);
            stream.give_back(&mut self.pool);
            return Step::Over(status::ECONNRESET);
        }
        connection.phase = Phase::Accepted(Box::new(stream));
        let kind = iw_event::CONNECT_REPLY;
        self.begin_streaming(token, connection, kind, Some(reply), here)
    }

    /// Whether the other end of a connection is here, and waits for the reply, to join.
    pub(super) fn initiator_is_here(&self, connection: &Connection, here: Here<'_>) -> bool {
        let other = self.other_end(connection, here);
        other.is_some_and(|(_, other)| matches!(other.phase, Phase::AwaitsReply))
    }

    /// The connection of this process that is the other end of this one and was accepted, if messages
    /// between their VMs stay here.
    pub(super) fn partner(&self, connection: &Connection, here: Here<'_>) -> Option<Token> {
        let (token, other) = self.other_end(connection, here)?;
        let accepted = matches!(other.phase, Phase::Accepted(_)) && other.qp.is_some();
        accepted.then_some(token)
    }

    /// The other end of a connection, if messages between their VMs stay here.
    fn other_end(&self, connection: &Connection, here: Here<'_>) -> Option<(Token, &Connection)> {
        let ends = (connection.remote, connection.local);
        let token = *self.ends.get(&ends)?;
        let Some(Entry::Connection(other)) = self.entries.get(&token) else {
            return None;
        };
        let (ours, theirs) = (&connection.port.vm, &other.port.vm);
        let meets = ours.network == theirs.network && ours.meets(theirs);
        let known = own_gid(ours, here).is_some() && own_gid(theirs, here).is_some();
        (meets && known).then_some((token, other))
    }

    /// Both ends are here: their queue pairs are connected to each other.
    pub(super) fn join(
        &mut self,
        token: Token,
        connection: &mut Connection,
        partner: Token,
        reply: &Frame,
        here: Here<'_>,
    ) -> Step {
        let Some(Entry::Connection(mut other)) = self.entries.remove(&partner) else {
            return Step::Over(status::ECONNRESET);
        };
        let step = self.join_with(token, connection, partner, &mut other, reply, here);
        self.entries.insert(partner, Entry::Connection(other));
        if let Step::Over(status) = step {
            self.end(partner, status, here);
        }
        step
    }

    pub(super) fn join_with(
        &mut self,
        token: Token,
        connection: &mut Connection,
        partner: Token,
        other: &mut Connection,
        reply: &Frame,
        here: Here<'_>,
    ) -> Step {
        let over = Step::Over(status::ECONNRESET);
        let (Some(ours), Some(theirs)) = (connection.qp.clone(), other.qp.clone()) else {
            return over;
        };
        let gids = own_gid(&connection.port.vm, here).zip(own_gid(&other.port.vm, here));
        let Some((own, their)) = gids else {
            return over;
        };
        if let Phase::Accepted(stream) = &mut other.phase {
            stream.give_back(&mut self.pool);
        }
        let alive = ours.life() == connection.life && theirs.life() == other.life;
        let Depths { ord, ird } = other.depths;
        let registry = here.registry;
        if !alive || !theirs.establish(registry, Some((own, ours.number)), [ord, ird]) {
            return over;
        }
        other.phase = Phase::Direct;
        connection.phase = Phase::Direct;
        let Depths { ord, ird } = connection.depths;
        if !ours.establish(registry, Some((their, theirs.number)), [ord, ird]) {
            return over;
        }
        self.set_deadline(partner, other, None);
        self.set_deadline(token, connection, None);
        other
            .port
            .tell(other.id, other.event(iw_event::ESTABLISHED, 0));
        let event = connection.event_with(iw_event::CONNECT_REPLY, reply);
        connection
            .port
            .tell(connection.id, with_private(event, reply));
        connection.owes_reply = false;
        for port in [other.port.clone(), connection.port.clone()] {
            self.tell(&port);
        }
        // Its end may have come with it.
        if !std::mem::replace(&mut other.ready, true) {
            self.ready.push_back(partner);
        }
        Step::Again
    }

    /// From now on FPDUs go both ways; the driver is told by an event of this kind.
    pub(super) fn begin_streaming(
        &mut self,
        token: Token,
        connection: &mut Connection,
        kind: u16,
        reply: Option<&Frame>,
        here: Here<'_>,
    ) -> Step {
        let Some(qp) = connection.qp.clone() else {
            return Step::Over(status::ECONNRESET);
        };
        if let Phase::Accepted(stream) = &mut connection.phase {
            // What came behind the reply belongs to it.
            let input = std::mem::take(&mut connection.input);
            connection.readable |= !input.is_empty();
            if !stream.keep(&input) {
                return Step::Over(status::ECONNRESET);
            }
        }
        let Depths { ord, ird } = connection.depths;
        if qp.life() != connection.life || !qp.establish(here.registry, None, [ord, ird]) {
            return Step::Over(status::ECONNRESET);
        }
        let phase = std::mem::replace(&mut connection.phase, Phase::Closes(0));
        connection.phase = match phase {
            Phase::Accepted(stream) => Phase::Streams(stream),
            other => other,
        };
        self.set_deadline(token, connection, None);
        let event = match reply {
            Some(reply) => with_private(connection.event_with(kind, reply), reply),
            None => connection.event(kind, 0),
        };
        connection.port.tell(connection.id, event);
        connection.owes_reply = false;
        let port = connection.port.clone();
        self.tell(&port);
        Step::Again
    }
}
