// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections of iWARP, all of one worker: whose they are, when they are served, and how they end.
//!
//! A connection goes from phase to phase ([`Phase`]) as its socket becomes readable and writable, which
//! epoll tells once each time, and as its driver decides (`handshake`). Then FPDUs go both ways
//! (`traffic`). What it does with its queue pair needs the tables of the VM; while these are being
//! changed, the connection waits.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use epoll::Events;
use rustc_hash::FxHashMap;
use rustix::net::SocketFlags;
use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::command::status;
use virtio_rdma_spec::iwarp::iw_event;

use super::connection::{Connection, Phase, Step};
use super::outgoing::{Pool, LONGEST};
use super::port::{Port, Request};
use crate::engine::vm::Vm;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::fabric::registry::Registry;

/// Bytes that are read of a connection at once, beside those that came before. When so many have come of
/// several, the worker looks at the doorbells of its VMs before it serves the others.
pub(super) const AT_ONCE: usize = 512 << 10;
/// Connections that are taken of a listener at once.
pub(super) const ACCEPTED: usize = 16;
/// How long each step of the beginning of a connection may take, nanoseconds; and its end.
pub(super) const BEGIN: u64 = 10_000_000_000;
pub(super) const END: u64 = 3_000_000_000;
/// How often a connection of a VM that is stopped is looked at, and a listener for which there are no
/// descriptors, and how long a peer that replies is left alone, nanoseconds.
pub(super) const LATER: u64 = 10_000_000;
/// How long an initiator that is replied to, and did not ask that either end may send first, is left alone
/// until it has sent something, nanoseconds.
pub(super) const SILENCE: u64 = 50_000_000;

/// What the worker knows when it looks at connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Here<'a> {
    pub section: &'a ReadSection<'a>,
    pub registry: &'a Registry,
    /// The time, nanoseconds.
    pub now: u64,
}

/// A listener.
#[derive(Debug)]
pub(super) struct Listener {
    port: Arc<Port>,
    id: u32,
    socket: Arc<TcpListener>,
    /// It is in the list of those that are to be served.
    ready: bool,
}

/// A place in the table, and what tells it from those that were there before.
pub(super) type Token = u64;

/// What epoll tells of.
#[derive(Debug)]
pub(super) enum Entry {
    Connection(Box<Connection>),
    Listener(Box<Listener>),
}

/// The connections of iWARP of a worker.
#[derive(Debug)]
pub(crate) struct Iwarp {
    pub(super) epoll: EpollFd,
    pub(super) entries: FxHashMap<Token, Entry>,
    /// The connection of each queue pair, by its serial number.
    pub(super) of_qp: FxHashMap<u64, Token>,
    /// That of each number of a port.
    pub(super) by_id: HashMap<(usize, u32), Token>,
    /// Connections by their ends, for those whose other end is here.
    pub(super) ends: HashMap<(SocketAddr, SocketAddr), Token>,
    /// Those that are to be served, in turn.
    pub(super) ready: VecDeque<Token>,
    pub(super) deadlines: BTreeSet<(u64, Token)>,
    /// Those whose VM was stopped, and when they are looked at again.
    pub(super) later: BTreeSet<(u64, Token)>,
    /// Ports whose drivers are to be told that there are events.
    pub(super) telling: Vec<Arc<Port>>,
    pub(super) pool: Pool,
    pub(super) space: Box<[u8]>,
    pub(super) last: Token,
    /// Bytes that came for VMs, for who shares the worker.
    charges: Vec<(Arc<Vm>, u64)>,
    /// Bytes that have come since it began to serve those that are ready.
    came: u64,
}

fn key(port: &Arc<Port>, id: u32) -> (usize, u32) {
    (Arc::as_ptr(port).addr(), id)
}

impl AsRawFd for Iwarp {
    /// Readable while there is something to do.
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

impl Iwarp {
    /// No connections.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: EpollFd::new()?,
            entries: FxHashMap::default(),
            of_qp: FxHashMap::default(),
            by_id: HashMap::new(),
            ends: HashMap::new(),
            ready: VecDeque::new(),
            deadlines: BTreeSet::new(),
            later: BTreeSet::new(),
            telling: Vec::new(),
            pool: Pool::default(),
            space: vec![0; LONGEST + AT_ONCE].into_boxed_slice(),
            last: 0,
            charges: Vec::new(),
            came: 0,
        })
    }

    /// Bytes came for a VM.
    pub(super) fn charge(&mut self, vm: Arc<Vm>, bytes: u64) {
        self.charges.push((vm, bytes));
        self.came += bytes;
    }

    /// Whether there is nothing to look at.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.telling.is_empty()
    }

    /// What came for VMs since it was asked last.
    pub(crate) fn charges(&mut self) -> impl Iterator<Item = (Arc<Vm>, u64)> + '_ {
        self.charges.drain(..)
    }

    /// When a deadline is, nanoseconds.
    pub(crate) fn timer(&self) -> Option<u64> {
        let first = |set: &BTreeSet<(u64, Token)>| set.first().map(|(at, _)| *at);
        first(&self.deadlines)
            .into_iter()
            .chain(first(&self.later))
            .min()
    }

    /// Whether something is to be done that no socket tells of.
    pub(crate) fn has_more(&self) -> bool {
        !self.ready.is_empty() || !self.telling.is_empty()
    }

    /// Whether a connection has something to send that its socket has not taken.
    pub(crate) fn waits_to_send(&self) -> bool {
        self.entries.values().any(|entry| match entry {
            Entry::Connection(connection) => connection.waits_to_send(),
            Entry::Listener(_) => false,
        })
    }

    pub(super) fn token(&mut self) -> Token {
        self.last += 1;
        self.last
    }

    pub(super) fn connection(&mut self, token: Token) -> Option<&mut Connection> {
        match self.entries.get_mut(&token)? {
            Entry::Connection(connection) => Some(connection),
            Entry::Listener(_) => None,
        }
    }

    pub(super) fn token_of(&self, port: &Arc<Port>, id: u32) -> Option<Token> {
        self.by_id.get(&key(port, id)).copied()
    }

    /// A driver wants something.
    pub(crate) fn ask(&mut self, request: Request, here: Here<'_>) {
        match request {
            Request::Listen {
                port,
                listener,
                socket,
            } => self.listen(port, listener, socket),
            Request::DestroyListen {
                port,
                listener,
                heir,
            } => self.destroy_listen(&port, listener, heir),
            Request::Connect {
                port,
                id,
                qp,
                socket,
                depths,
                private,
            } => {
                let connection = Connection {
                    life: qp.life(),
                    qp: Some(qp),
                    depths,
                    private,
                    deadline: Some(here.now.saturating_add(BEGIN)),
                    ..Connection::new(port, id, socket, Phase::Connecting)
                };
                self.add(connection);
            }
            Request::Accept {
                port,
                id,
                qp,
                depths,
                private,
            } => self.accept(&port, id, qp, depths, private, here),
            Request::Reject { port, id, private } => self.reject(&port, id, private),
            Request::Forget { port } => self.forget_port(&port),
        }
    }

    pub(super) fn listen(&mut self, port: Arc<Port>, id: u32, socket: Arc<TcpListener>) {
        let token = self.token();
        let events = Events::EPOLLIN | Events::EPOLLET;
        if let Err(error) = self.epoll.add_for(&*socket, events, token) {
            log::error!("cannot wait for connections of iWARP: {error}");
            return;
        }
        self.by_id.insert(key(&port, id), token);
        let listener = Listener {
            port,
            id,
            socket,
            ready: false,
        };
        self.entries
            .insert(token, Entry::Listener(Box::new(listener)));
    }

    pub(super) fn destroy_listen(&mut self, port: &Arc<Port>, id: u32, heir: Option<u32>) {
        let Some(token) = self.by_id.remove(&key(port, id)) else {
            return;
        };
        match (heir, self.entries.get_mut(&token)) {
            (Some(heir), Some(Entry::Listener(listener))) => {
                listener.id = heir;
                self.by_id.insert(key(port, heir), token);
            }
            _ => drop(self.entries.remove(&token)),
        }
        // What waited to be accepted, the driver knows no longer.
        let waits = |entry: &Entry| match entry {
            Entry::Connection(of) => {
                Arc::ptr_eq(&of.port, port) && of.qp.is_none() && !port.knows(of.id)
            }
            Entry::Listener(_) => false,
        };
        let gone: Vec<Token> = self.which(waits);
        for token in gone {
            self.remove(token);
        }
    }

    pub(super) fn which(&self, is: impl Fn(&Entry) -> bool) -> Vec<Token> {
        let entries = self.entries.iter().filter(|(_, entry)| is(entry));
        entries.map(|(token, _)| *token).collect()
    }

    /// All that a port has is closed.
    pub(super) fn forget_port(&mut self, port: &Arc<Port>) {
        let of_port = |entry: &Entry| match entry {
            Entry::Connection(of) => Arc::ptr_eq(&of.port, port),
            Entry::Listener(of) => Arc::ptr_eq(&of.port, port),
        };
        for token in self.which(of_port) {
            self.remove(token);
        }
        self.telling.retain(|other| !Arc::ptr_eq(other, port));
    }

    /// Waits for a new connection.
    pub(super) fn add(&mut self, connection: Connection) -> Token {
        let token = self.token();
        let events = Events::EPOLLIN | Events::EPOLLOUT | Events::EPOLLRDHUP | Events::EPOLLET;
        if let Err(error) = self.epoll.add_for(&connection.socket, events, token) {
            log::error!("cannot wait for a connection of iWARP: {error}");
        }
        self.by_id
            .insert(key(&connection.port, connection.id), token);
        if let Some(qp) = &connection.qp {
            self.of_qp.insert(qp.serial(), token);
        }
        if let Some(at) = connection.deadline {
            self.deadlines.insert((at, token));
        }
        self.entries
            .insert(token, Entry::Connection(Box::new(connection)));
        token
    }

    /// Removes an entry, and closes its socket.
    pub(super) fn remove(&mut self, token: Token) {
        match self.entries.remove(&token) {
            Some(Entry::Connection(mut connection)) => {
                if let Some(at) = connection.deadline.take() {
                    self.deadlines.remove(&(at, token));
                }
                self.detach(token, &mut connection);
            }
            Some(Entry::Listener(listener)) => {
                self.by_id.remove(&key(&listener.port, listener.id));
            }
            None => {}
        }
    }

    /// Nothing leads to a connection any longer.
    pub(super) fn detach(&mut self, token: Token, connection: &mut Connection) {
        let id = key(&connection.port, connection.id);
        if self.by_id.get(&id) == Some(&token) {
            self.by_id.remove(&id);
        }
        if let Some(qp) = &connection.qp {
            if self.of_qp.get(&qp.serial()) == Some(&token) {
                self.of_qp.remove(&qp.serial());
            }
        }
        let ends = (connection.local, connection.remote);
        if self.ends.get(&ends) == Some(&token) {
            self.ends.remove(&ends);
        }
        if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
            stream.give_back(&mut self.pool);
        }
    }

    /// The deadline of a connection is another one.
    pub(super) fn set_deadline(
        &mut self,
        token: Token,
        connection: &mut Connection,
        at: Option<u64>,
    ) {
        if let Some(old) = std::mem::replace(&mut connection.deadline, at) {
            self.deadlines.remove(&(old, token));
        }
        if let Some(at) = at {
            self.deadlines.insert((at, token));
        }
    }

    pub(super) fn make_ready(&mut self, token: Token) {
        let ready = match self.entries.get_mut(&token) {
            Some(Entry::Connection(connection)) => &mut connection.ready,
            Some(Entry::Listener(listener)) => &mut listener.ready,
            None => return,
        };
        if !std::mem::replace(ready, true) {
            self.ready.push_back(token);
        }
    }

    /// The driver of a port is told that there are events.
    pub(super) fn tell(&mut self, port: &Arc<Port>) {
        if !self.telling.iter().any(|other| Arc::ptr_eq(other, port)) {
            self.telling.push(port.clone());
        }
    }

    /// Looks at sockets, and serves connections that have something to do. Returns whether there was
    /// anything.
    pub(crate) fn look(&mut self, here: Here<'_>) -> bool {
        self.look_until(here, AT_ONCE as u64)
    }

    /// The same, until `enough` bytes have come. The others are served first when it looks again.
    fn look_until(&mut self, here: Here<'_>, enough: u64) -> bool {
        let mut space = [NO_EVENT; 64];
        let events = match self.epoll.wait(0, &mut space) {
            Ok(events) => events.len(),
            Err(error) => {
                log::error!("cannot look at connections of iWARP: {error}");
                0
            }
        };
        for event in space.iter().take(events) {
            self.happened(event.data, event.events);
        }
        while let Some((at, token)) = self.deadlines.first().copied() {
            if at > here.now {
                break;
            }
            self.deadlines.remove(&(at, token));
            self.too_late(token, here);
        }
        while let Some((at, token)) = self.later.first().copied() {
            if at > here.now {
                break;
            }
            self.later.remove(&(at, token));
            self.make_ready(token);
        }
        let ready = self.ready.len();
        self.came = 0;
        for _ in 0..ready {
            let Some(token) = self.ready.pop_front() else {
                break;
            };
            self.serve(token, here);
            if self.came >= enough {
                break;
            }
        }
        self.tell_all(here);
        events != 0 || ready != 0
    }

    pub(super) fn happened(&mut self, token: Token, events: u32) {
        let is = |of: Events| events & of.bits() != 0;
        match self.entries.get_mut(&token) {
            Some(Entry::Connection(connection)) => {
                let ended = is(Events::EPOLLERR | Events::EPOLLHUP | Events::EPOLLRDHUP);
                connection.ends |= ended;
                connection.readable |= ended || is(Events::EPOLLIN);
                connection.writable |= ended || is(Events::EPOLLOUT);
                self.make_ready(token);
            }
            Some(Entry::Listener(_)) => self.make_ready(token),
            None => {}
        }
    }

    /// Takes connections that came in at a listener.
    pub(super) fn take_incoming(&mut self, token: Token, now: u64) {
        for _ in 0..ACCEPTED {
            let Some(Entry::Listener(listener)) = self.entries.get(&token) else {
                return;
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = match rustix::net::accept_with(&*listener.socket, flags) {
                Ok(socket) => TcpStream::from(socket),
                Err(error) => {
                    let error = io::Error::from(error);
                    if error.kind() != ErrorKind::WouldBlock {
                        log::debug!("a connection of iWARP did not come in: {error}");
                        self.later.insert((now.saturating_add(LATER), token));
                    }
                    return;
                }
            };
            let (port, id) = (listener.port.clone(), listener.id);
            if port.is_crowded() {
                self.send_away_oldest(&port);
            }
            let Some(id) = port.incoming(id) else {
                // Its end is all that the peer learns.
                continue;
            };
            let connection = Connection::new(port, id, socket, Phase::AwaitsRequest);
            let new = self.add(connection);
            self.make_ready(new);
        }
        // Perhaps there are more.
        self.make_ready(token);
    }

    /// The peer that came first to a port, of those that have asked for nothing yet, has to go.
    pub(super) fn send_away_oldest(&mut self, port: &Arc<Port>) {
        let silent = |entry: &Entry| match entry {
            Entry::Connection(of) => {
                Arc::ptr_eq(&of.port, port)
                    && matches!(of.phase, Phase::AwaitsRequest)
                    && of.qp.is_none()
            }
            Entry::Listener(_) => false,
        };
        let Some(token) = self.which(silent).into_iter().min() else {
            return;
        };
        if let Some(connection) = self.connection(token) {
            port.forget_waiting(connection.id);
        }
        self.remove(token);
    }

    /// The peer has not done what it had to in time.
    pub(super) fn too_late(&mut self, token: Token, here: Here<'_>) {
        if let Some(connection) = self.connection(token) {
            connection.deadline = None;
            let status = match connection.phase {
                _ if connection.over.is_some() => connection.over.unwrap_or_default(),
                Phase::Closes(status) => status,
                _ => status::ETIMEDOUT,
            };
            self.end(token, status, here);
        }
    }

    /// Tells drivers of events, where their VMs are not being changed.
    pub(super) fn tell_all(&mut self, here: Here<'_>) {
        self.telling
            .retain(|port| match port.vm.read_in(here.section) {
                Some(tables) if tables.running => {
                    port.raise(tables);
                    false
                }
                // Who starts it tells.
                Some(_) => false,
                None => true,
            });
    }

    /// Does what there is to do for a connection.
    pub(super) fn serve(&mut self, token: Token, here: Here<'_>) {
        if let Some(Entry::Listener(listener)) = self.entries.get_mut(&token) {
            listener.ready = false;
            self.take_incoming(token, here.now);
            return;
        }
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&token) else {
            return;
        };
        connection.ready = false;
        if connection.over.is_some() {
            self.entries.insert(token, Entry::Connection(connection));
            return;
        }
        let step = self.step(token, &mut connection, here);
        self.settle(token, connection, step, here);
    }

    /// Puts a connection back after a step, or ends it.
    pub(super) fn settle(
        &mut self,
        token: Token,
        connection: Box<Connection>,
        step: Step,
        here: Here<'_>,
    ) {
        self.entries.insert(token, Entry::Connection(connection));
        match step {
            Step::Waits => {}
            Step::Again => self.make_ready(token),
            Step::Later => {
                self.later.insert((here.now.saturating_add(LATER), token));
            }
            Step::Over(status) => self.end(token, status, here),
        }
    }

    /// A connection is over: its queue pair is in error, and its driver is told.
    pub(super) fn end(&mut self, token: Token, status: u16, here: Here<'_>) {
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&token) else {
            return;
        };
        let port = connection.port.clone();
        let kind = match connection.phase {
            _ if connection.owes_reply => Some(iw_event::CONNECT_REPLY),
            Phase::AwaitsRequest | Phase::Requested(_) => None,
            _ => Some(iw_event::CLOSE),
        };
        if let Some(qp) = connection.qp.clone() {
            let tables = port.vm.read_in(here.section);
            let Some(tables) = tables.filter(|tables| tables.running) else {
                let at = here.now.saturating_add(LATER);
                self.set_deadline(token, &mut connection, Some(at));
                connection.over = Some(status);
                self.entries.insert(token, Entry::Connection(connection));
                return;
            };
            if kind == Some(iw_event::CLOSE) && qp.life() == connection.life {
                if qp.fail() && status != 0 {
                    qp.vm.warn(format_args!(
                        "QP {}: its connection is lost: {}",
                        qp.number,
                        status::name(status).unwrap_or("an error")
                    ));
                }
                if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
                    stream.flush(&mut qp.send_queue(), tables, &qp);
                }
            }
        }
        if let Some(at) = connection.deadline.take() {
            self.deadlines.remove(&(at, token));
        }
        self.detach(token, &mut connection);
        let Some(kind) = kind else {
            port.forget_waiting(connection.id);
            return;
        };
        port.tell(connection.id, connection.event(kind, status));
        self.tell(&port);
    }

    pub(super) fn step(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        match &connection.phase {
            Phase::Connecting => self.connected(token, connection, here),
            Phase::AwaitsReply | Phase::AwaitsRequest => self.take_frame(token, connection, here),
            Phase::Requested(_) => match connection.read_nothing() {
                Ok(()) => Step::Waits,
                Err(status) => Step::Over(status),
            },
            Phase::Direct => match connection.read_nothing() {
                Ok(()) => self.direct(token, connection, here),
                Err(status) => Step::Over(status),
            },
            Phase::Accepted(_) | Phase::Streams(_) => self.stream(token, connection, here),
            Phase::Closes(status) => {
                let status = *status;
                match connection.drain(&mut self.space) {
                    Ok(()) if connection.readable => Step::Again,
                    Ok(()) => Step::Waits,
                    Err(_) => Step::Over(status),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::Ipv4Addr;

    use super::super::ddp::{Segment, Tagged, TaggedKind};
    use super::super::fpdu;
    use super::super::port::{Depths, PortSettings};
    use super::*;
    use crate::engine::fixture::{Guest, DATA};
    use vhost_device_rdma_sync::Readers;
    use virtio_rdma_spec::command::QpAttr;
    use virtio_rdma_spec::verbs::{access, qp_attr, qp_state, qp_type};

    /// An FPDU that writes 8 bytes to the data of a guest, where connection `number` has them.
    fn write(guest: &Guest, number: u64) -> Vec<u8> {
        let mut segment = Vec::new();
        Segment::Tagged(Tagged {
            kind: TaggedKind::Write,
            last: true,
            stag: guest.key,
            offset: DATA + 8 * number,
            payload: &[],
        })
        .write(&mut segment);
        let mut space = vec![0; 100];
        let payload = |to: &mut [u8]| {
            to.fill(7);
            Ok::<_, ()>(())
        };
        let length = fpdu::write(&mut space, &segment, 8, false, payload).unwrap();
        space.truncate(length);
        space
    }

    // D-IWP-006.
    #[test]
    fn connections_that_have_much_to_read_take_turns_with_all_else() {
        const CONNECTIONS: u64 = 3;
        let (readers, mut each) = Readers::new(1);
        let mut guest = Guest::new(&readers, 1);
        let settings = PortSettings {
            address: Ipv4Addr::LOCALHOST.into(),
            directory: HashMap::new(),
            peers: Vec::new(),
            crc: false,
            peer_to_peer: false,
        };
        let port = Port::new(Arc::new(settings), guest.vm.clone());
        let mut iwarp = Iwarp::new().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut peers = Vec::new();
        for number in 0..CONNECTIONS {
            let qp = guest.queue_pair(qp_type::IWARP);
            let attr = QpAttr {
                qp_state: qp_state::INIT,
                access_flags: access::REMOTE_WRITE,
                ..QpAttr::default()
            };
            let mask = qp_attr::STATE | qp_attr::ACCESS_FLAGS;
            qp.qp.modify(&guest, mask, &attr).unwrap();
            assert!(qp.qp.establish(&guest, None, [1, 1]));
            let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (socket, _) = listener.accept().unwrap();
            socket.set_nonblocking(true).unwrap();
            let mut connection = Connection {
                life: qp.qp.life(),
                qp: Some(qp.qp),
                depths: Depths { ord: 1, ird: 1 },
                ..Connection::new(port.clone(), number as u32, socket, Phase::AwaitsRequest)
            };
            connection.set_up().unwrap();
            connection.phase = Phase::Streams(Box::new(connection.new_stream(false)));
            iwarp.add(connection);
            peers.push(peer);
        }
        let mut reader = each.pop().unwrap();
        let registry = Registry::default();
        let mut look = |iwarp: &mut Iwarp| {
            let section = reader.enter();
            let here = Here {
                section: &section,
                registry: &registry,
                now: 0,
            };
            iwarp.look_until(here, 1);
            iwarp.charges().count()
        };
        // That they are writable.
        assert_eq!(look(&mut iwarp), 0);
        for (number, peer) in (0..).zip(&mut peers) {
            peer.write_all(&write(&guest, number)).unwrap();
        }
        for left in (0..CONNECTIONS).rev() {
            assert_eq!(look(&mut iwarp), 1);
            assert_eq!(iwarp.has_more(), left != 0);
        }
        assert_eq!(guest.read(0, 24), [7; 24]);
        // One goes in the middle of an FPDU.
        peers[0].write_all(&[0]).unwrap();
        peers.remove(0);
        while guest.warnings.all().is_empty() {
            look(&mut iwarp);
        }
        let [warning] = &guest.warnings.all()[..] else {
            panic!("more than one warning");
        };
        assert!(
            warning.ends_with("its connection is lost: ECONNRESET"),
            "{warning}"
        );
    }
}
