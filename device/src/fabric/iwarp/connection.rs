// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections from their first byte to their last. All of them belong to one worker.
//!
//! A connection goes from phase to phase ([`Phase`]) as its socket becomes readable and writable, which
//! epoll tells once each time, and as its driver decides. What it does with its queue pair needs the
//! tables of the VM; while these are being changed, the connection waits.
use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use epoll::Events;
use rustc_hash::FxHashMap;
use rustix::net::SocketFlags;
use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::command::status;
use virtio_rdma_spec::iwarp::{iw_event, IwEvent};
use virtio_rdma_spec::verbs::qp_state;

use super::mpa::{Enhanced, Frame, Rtr, NOT_NEGOTIATED, REVISION_2};
use super::outgoing::{Pool, LONGEST};
use super::port::{Depths, Port, PrivateData, Request};
use super::stream::{Agreed, Stream};
use super::{fpdu, tcp};
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Polled, SendQueue};
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::Vm;
use crate::engine::Budget;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::fabric::registry::Registry;
use crate::fabric::{self, Carrier};

/// Bytes that are read of a connection at once, beside those that came before.
const AT_ONCE: usize = 512 << 10;
/// Connections that are taken of a listener at once.
const ACCEPTED: usize = 16;
/// How long each step of the beginning of a connection may take, nanoseconds; and its end.
const BEGIN: u64 = 10_000_000_000;
const END: u64 = 3_000_000_000;
/// How often a connection of a VM that is stopped is looked at, and a listener for which there are no
/// descriptors, nanoseconds.
const LATER: u64 = 10_000_000;
/// Bytes of requests and replies, at most.
const LONGEST_FRAME: usize = 20 + 512;

/// What the worker knows when it looks at connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Here<'a> {
    pub section: &'a ReadSection<'a>,
    pub registry: &'a Registry,
    /// The time, nanoseconds.
    pub now: u64,
}

/// How far a connection is.
#[derive(Debug)]
enum Phase {
    /// TCP connects.
    Connecting,
    /// The request was sent.
    AwaitsReply,
    /// A request is to come.
    AwaitsRequest,
    /// It has come, and the driver decides.
    Requested(Box<Frame>),
    /// It was accepted, and the initiator is to show that it is ready.
    Accepted(Box<Stream>),
    /// FPDUs go both ways.
    Streams(Box<Stream>),
    /// The other end is in this process, and messages go to it directly.
    Direct,
    /// Nothing is sent any longer, and the peer is to close, too.
    Closes(u16),
}

/// A connection.
#[derive(Debug)]
struct Connection {
    port: Arc<Port>,
    /// Its number for the driver.
    id: u32,
    socket: TcpStream,
    local: SocketAddr,
    remote: SocketAddr,
    /// The longest ULPDU that fits a segment of TCP.
    longest: usize,
    qp: Option<Arc<Qp>>,
    /// Which life of the queue pair it is for.
    life: u32,
    depths: Depths,
    private: PrivateData,
    phase: Phase,
    /// Bytes of the request or reply.
    input: Vec<u8>,
    readable: bool,
    writable: bool,
    /// The peer has closed, behind what there is to read.
    ends: bool,
    /// It is over, with this `status`, as soon as its VM runs.
    over: Option<u16>,
    /// It is in the list of those that are to be served.
    ready: bool,
    /// Until when the peer has to do what it has to.
    deadline: Option<u64>,
}

/// What becomes of a connection after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It waits.
    Waits,
    /// There is more to do.
    Again,
    /// Its VM is stopped: there will be something later.
    Later,
    /// It is over, with this `status` for the driver.
    Over(u16),
}

/// A listener.
#[derive(Debug)]
struct Listener {
    port: Arc<Port>,
    id: u32,
    socket: Arc<TcpListener>,
}

/// A place in the table, and what tells it from those that were there before.
type Token = u64;

/// What epoll tells of.
#[derive(Debug)]
enum Entry {
    Connection(Box<Connection>),
    Listener(Box<Listener>),
}

/// The connections of iWARP of a worker.
#[derive(Debug)]
pub(crate) struct Iwarp {
    epoll: EpollFd,
    entries: FxHashMap<Token, Entry>,
    /// The connection of each queue pair, by its serial number.
    of_qp: FxHashMap<u64, Token>,
    /// That of each number of a port.
    by_id: HashMap<(usize, u32), Token>,
    /// Connections by their ends, for those whose other end is here.
    ends: HashMap<(SocketAddr, SocketAddr), Token>,
    ready: Vec<Token>,
    deadlines: BTreeSet<(u64, Token)>,
    /// Those whose VM was stopped, and when they are looked at again.
    later: BTreeSet<(u64, Token)>,
    /// Ports whose drivers are to be told that there are events.
    telling: Vec<Arc<Port>>,
    pool: Pool,
    space: Box<[u8]>,
    last: Token,
    /// Bytes that came for VMs, for who shares the worker.
    charges: Vec<(Arc<Vm>, u64)>,
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
            ready: Vec::new(),
            deadlines: BTreeSet::new(),
            later: BTreeSet::new(),
            telling: Vec::new(),
            pool: Pool::default(),
            space: vec![0; LONGEST + AT_ONCE].into_boxed_slice(),
            last: 0,
            charges: Vec::new(),
        })
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

    fn token(&mut self) -> Token {
        self.last += 1;
        self.last
    }

    fn connection(&mut self, token: Token) -> Option<&mut Connection> {
        match self.entries.get_mut(&token)? {
            Entry::Connection(connection) => Some(connection),
            Entry::Listener(_) => None,
        }
    }

    fn token_of(&self, port: &Arc<Port>, id: u32) -> Option<Token> {
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
            Request::DestroyListen { port, listener } => self.destroy_listen(&port, listener),
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

    fn listen(&mut self, port: Arc<Port>, id: u32, socket: Arc<TcpListener>) {
        let token = self.token();
        let events = Events::EPOLLIN | Events::EPOLLET;
        if let Err(error) = self.epoll.add_for(&*socket, events, token) {
            log::error!("cannot wait for connections of iWARP: {error}");
            return;
        }
        self.by_id.insert(key(&port, id), token);
        let listener = Listener { port, id, socket };
        self.entries
            .insert(token, Entry::Listener(Box::new(listener)));
    }

    fn destroy_listen(&mut self, port: &Arc<Port>, id: u32) {
        let Some(token) = self.by_id.remove(&key(port, id)) else {
            return;
        };
        self.entries.remove(&token);
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

    fn which(&self, is: impl Fn(&Entry) -> bool) -> Vec<Token> {
        let entries = self.entries.iter().filter(|(_, entry)| is(entry));
        entries.map(|(token, _)| *token).collect()
    }

    /// All that a port has is closed.
    fn forget_port(&mut self, port: &Arc<Port>) {
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
    fn add(&mut self, connection: Connection) -> Token {
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
    fn remove(&mut self, token: Token) {
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
    fn detach(&mut self, token: Token, connection: &mut Connection) {
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
    fn set_deadline(&mut self, token: Token, connection: &mut Connection, at: Option<u64>) {
        if let Some(old) = std::mem::replace(&mut connection.deadline, at) {
            self.deadlines.remove(&(old, token));
        }
        if let Some(at) = at {
            self.deadlines.insert((at, token));
        }
    }

    fn make_ready(&mut self, token: Token) {
        let Some(connection) = self.connection(token) else {
            return;
        };
        if !std::mem::replace(&mut connection.ready, true) {
            self.ready.push(token);
        }
    }

    /// The driver of a port is told that there are events.
    fn tell(&mut self, port: &Arc<Port>) {
        if !self.telling.iter().any(|other| Arc::ptr_eq(other, port)) {
            self.telling.push(port.clone());
        }
    }

    /// Looks at sockets, and serves connections that have something to do. Returns whether there was
    /// anything.
    pub(crate) fn look(&mut self, here: Here<'_>) -> bool {
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
            match self.entries.get(&token) {
                Some(Entry::Listener(_)) => self.ready.push(token),
                _ => self.make_ready(token),
            }
        }
        let served = self.ready.len();
        let ready = std::mem::take(&mut self.ready);
        for token in &ready {
            self.serve(*token, here);
        }
        // For its capacity.
        if self.ready.is_empty() {
            self.ready = ready;
            self.ready.clear();
        }
        self.tell_all(here);
        events != 0 || served != 0
    }

    fn happened(&mut self, token: Token, events: u32) {
        let is = |of: Events| events & of.bits() != 0;
        match self.entries.get_mut(&token) {
            Some(Entry::Connection(connection)) => {
                let ended = is(Events::EPOLLERR | Events::EPOLLHUP | Events::EPOLLRDHUP);
                connection.ends |= ended;
                connection.readable |= ended || is(Events::EPOLLIN);
                connection.writable |= ended || is(Events::EPOLLOUT);
                self.make_ready(token);
            }
            Some(Entry::Listener(_)) => self.ready.push(token),
            None => {}
        }
    }

    /// Takes connections that came in at a listener.
    fn take_incoming(&mut self, token: Token, now: u64) {
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
            if port.is_crowded(id) {
                self.send_away_oldest(&port, id);
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
        self.ready.push(token);
    }

    /// The peer that came first to a listener, of those that have asked for nothing yet, has to go.
    fn send_away_oldest(&mut self, port: &Arc<Port>, listener: u32) {
        let silent = |entry: &Entry| match entry {
            Entry::Connection(of) => {
                Arc::ptr_eq(&of.port, port)
                    && matches!(of.phase, Phase::AwaitsRequest)
                    && port.waits_at(of.id, listener)
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
    fn too_late(&mut self, token: Token, here: Here<'_>) {
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
    fn tell_all(&mut self, here: Here<'_>) {
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
    fn serve(&mut self, token: Token, here: Here<'_>) {
        if let Some(Entry::Listener(_)) = self.entries.get(&token) {
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
    fn settle(&mut self, token: Token, connection: Box<Connection>, step: Step, here: Here<'_>) {
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
    fn end(&mut self, token: Token, status: u16, here: Here<'_>) {
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&token) else {
            return;
        };
        let port = connection.port.clone();
        let kind = match connection.phase {
            Phase::Connecting | Phase::AwaitsReply => Some(iw_event::CONNECT_REPLY),
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
                qp.fail();
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

    fn step(&mut self, token: Token, connection: &mut Connection, here: Here<'_>) -> Step {
        match &connection.phase {
            Phase::Connecting => self.connected(token, connection, here),
            Phase::AwaitsReply | Phase::AwaitsRequest => self.take_frame(token, connection, here),
            Phase::Requested(_) => match connection.read_nothing() {
                Ok(()) => Step::Waits,
                Err(status) => Step::Over(status),
            },
            Phase::Direct => match connection.read_nothing() {
                Ok(()) => Step::Waits,
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

    /// TCP is connected, or will not be.
    fn connected(&mut self, token: Token, connection: &mut Connection, here: Here<'_>) -> Step {
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
    fn take_frame(&mut self, token: Token, connection: &mut Connection, here: Here<'_>) -> Step {
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
    fn accept(
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

    fn accepted(&mut self, token: Token, connection: &mut Connection, here: Here<'_>) -> Step {
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
        if both || self.initiator_is_here(connection) {
            // The first message of the initiator shows that it is ready; one of this process joins.
            self.set_deadline(token, connection, Some(here.now.saturating_add(BEGIN)));
            return Step::Again;
        }
        self.begin_streaming(token, connection, iw_event::ESTABLISHED, None, here)
    }

    /// The driver rejects.
    fn reject(&mut self, port: &Arc<Port>, id: u32, private: PrivateData) {
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
    fn replied(
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
            connection.phase = Phase::AwaitsRequest;
            return Step::Over(status::ECONNREFUSED);
        }
        let wanted = connection.port.settings.crc;
        if reply.markers || (wanted && !reply.crc) {
            return Step::Over(status::ECONNRESET);
        }
        if let Some(theirs) = reply.enhanced {
            connection.depths.ord = least(connection.depths.ord, theirs.ird);
        }
        if let Some(partner) = self.partner(connection, here) {
            return self.join(token, connection, partner, reply, here);
        }
        let mut stream = connection.new_stream(reply.crc);
        if let Some(rtr) = reply.enhanced.and_then(|with| with.peer_to_peer) {
            if let Err(refusal) = stream.show_ready(rtr, &mut self.pool) {
                stream.tell(&refusal.into(), &[]);
                let _ = stream.send(&mut self.pool, &connection.socket);
                stream.give_back(&mut self.pool);
                return Step::Over(status::ECONNRESET);
            }
        }
        connection.phase = Phase::Accepted(Box::new(stream));
        let kind = iw_event::CONNECT_REPLY;
        self.begin_streaming(token, connection, kind, Some(reply), here)
    }

    /// Whether the other end of a connection is here, and waits for the reply.
    fn initiator_is_here(&self, connection: &Connection) -> bool {
        let ends = (connection.remote, connection.local);
        let entry = self
            .ends
            .get(&ends)
            .and_then(|token| self.entries.get(token));
        let Some(Entry::Connection(other)) = entry else {
            return false;
        };
        matches!(other.phase, Phase::AwaitsReply)
    }

    /// The connection of this process that is the other end of this one, if messages between their VMs
    /// stay here.
    fn partner(&self, connection: &Connection, here: Here<'_>) -> Option<Token> {
        let ends = (connection.remote, connection.local);
        let token = *self.ends.get(&ends)?;
        let Some(Entry::Connection(other)) = self.entries.get(&token) else {
            return None;
        };
        let (ours, theirs) = (&connection.port.vm, &other.port.vm);
        let accepted = matches!(other.phase, Phase::Accepted(_)) && other.qp.is_some();
        let meets = ours.network == theirs.network && ours.meets(theirs);
        let known = own_gid(ours, here).is_some() && own_gid(theirs, here).is_some();
        (accepted && meets && known).then_some(token)
    }

    /// Both ends are here: their queue pairs are connected to each other.
    fn join(
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

    fn join_with(
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
        for port in [other.port.clone(), connection.port.clone()] {
            self.tell(&port);
        }
        // Its end may have come with it.
        self.ready.push(partner);
        other.ready = true;
        Step::Again
    }

    /// From now on FPDUs go both ways; the driver is told by an event of this kind.
    fn begin_streaming(
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
        let Depths { ord, ird } = connection.depths;
        if qp.life() != connection.life || !qp.establish(here.registry, None, [ord, ird]) {
            return Step::Over(status::ECONNRESET);
        }
        let phase = std::mem::replace(&mut connection.phase, Phase::Closes(0));
        connection.phase = match phase {
            Phase::Accepted(mut stream) => {
                // What came behind the reply belongs to it.
                let input = std::mem::take(&mut connection.input);
                connection.readable |= !input.is_empty();
                if !stream.keep(&input) {
                    return Step::Over(status::ECONNRESET);
                }
                Phase::Streams(stream)
            }
            other => other,
        };
        self.set_deadline(token, connection, None);
        let event = match reply {
            Some(reply) => with_private(connection.event_with(kind, reply), reply),
            None => connection.event(kind, 0),
        };
        connection.port.tell(connection.id, event);
        let port = connection.port.clone();
        self.tell(&port);
        Step::Again
    }

    /// Moves FPDUs of a connection.
    fn stream(&mut self, token: Token, connection: &mut Connection, here: Here<'_>) -> Step {
        let Some(qp) = connection.qp.clone() else {
            return Step::Over(status::ECONNRESET);
        };
        let vm = connection.port.vm.clone();
        let Some(tables) = vm.read_in(here.section) else {
            return Step::Again;
        };
        if !tables.running {
            return Step::Later;
        }
        if qp.life() != connection.life || qp.dead.load(Ordering::SeqCst) {
            return Step::Over(status::ECONNRESET);
        }
        if connection.writable && connection.waits_to_send() {
            if let Err(status) = connection.pump(&mut self.pool, tables, &qp) {
                return self.end_stream(token, connection, tables, &qp, status, here);
            }
            qp.schedule();
        }
        if !connection.readable {
            return Step::Waits;
        }
        let (came, ended) = match connection.fill(&mut self.space) {
            Ok(came) => came,
            Err(_) => return Step::Over(status::ECONNRESET),
        };
        if came != 0 {
            if matches!(connection.phase, Phase::Accepted(_)) {
                let kind = iw_event::ESTABLISHED;
                let step = self.begin_streaming(token, connection, kind, None, here);
                if let Step::Over(_) = step {
                    return step;
                }
            }
            let Phase::Streams(stream) = &mut connection.phase else {
                return Step::Over(status::ECONNRESET);
            };
            let bytes = self.space.get(..came).unwrap_or_default();
            match stream.take(bytes, tables, &qp) {
                Ok(taken) => {
                    let rest = bytes.get(taken..).unwrap_or_default();
                    if !stream.keep(rest) {
                        return Step::Over(status::ECONNRESET);
                    }
                }
                Err(_) => {
                    let status = status::ECONNRESET;
                    return self.end_stream(token, connection, tables, &qp, status, here);
                }
            }
            self.charges.push((vm.clone(), came as u64));
            if connection.writable && connection.waits_to_send() {
                if let Err(status) = connection.pump(&mut self.pool, tables, &qp) {
                    return self.end_stream(token, connection, tables, &qp, status, here);
                }
            }
        }
        if ended {
            let whole = match &connection.phase {
                Phase::Streams(stream) => stream.partial().is_empty(),
                _ => false,
            };
            return Step::Over(if whole { 0 } else { status::ECONNRESET });
        }
        if connection.readable {
            Step::Again
        } else {
            Step::Waits
        }
    }

    /// A stream has come to its end, by an error of one of both.
    fn end_stream(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        status: u16,
        here: Here<'_>,
    ) -> Step {
        qp.fail();
        if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
            stream.flush(&mut qp.send_queue(), tables, qp);
            stream.end();
            // What tells the peer why, if the socket takes it.
            let _ = stream.send(&mut self.pool, &connection.socket);
        }
        self.begin_to_close(token, connection, status, here)
    }

    /// Nothing more is sent: what the peer sends is of no interest any longer, but its end.
    fn begin_to_close(
        &mut self,
        token: Token,
        connection: &mut Connection,
        status: u16,
        here: Here<'_>,
    ) -> Step {
        if connection.socket.shutdown(Shutdown::Write).is_err() {
            return Step::Over(status);
        }
        if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
            stream.give_back(&mut self.pool);
        }
        connection.phase = Phase::Closes(status);
        self.set_deadline(token, connection, Some(here.now.saturating_add(END)));
        Step::Again
    }

    /// A worker polls a queue pair that has, or had, a connection here. Returns what it led to, or
    /// `None` if its messages go another way.
    pub(crate) fn poll(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        here: Here<'_>,
        budget: Budget,
    ) -> Option<(Polled, Budget)> {
        let idle = Some((Polled::Idle, Budget::NONE));
        let token = self.of_qp.get(&qp.serial()).copied();
        let state = qp.state();
        let gone = qp.dead.load(Ordering::SeqCst);
        let Some(token) = token else {
            // Without a connection there is nothing to send.
            return idle.filter(|_| state == qp_state::RTS || gone);
        };
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&token) else {
            return idle;
        };
        let alive = !gone && qp.life() == connection.life;
        let direct = matches!(connection.phase, Phase::Direct);
        let (polled, step) = match state {
            qp_state::RTS if alive && direct => (None, Step::Waits),
            qp_state::RTS | qp_state::SQD if alive && !direct => {
                let (polled, step) =
                    self.poll_stream(token, &mut connection, tables, qp, budget, here);
                (Some(polled), step)
            }
            qp_state::SQD if alive => {
                // What has begun is carried out; there is nothing that has, between polls.
                let step = self.begin_to_close(token, &mut connection, 0, here);
                (idle, step)
            }
            // It waits for its connection.
            qp_state::INIT if alive => (idle, Step::Waits),
            qp_state::ERR if alive => {
                let closes = matches!(connection.phase, Phase::Closes(_));
                let step = if closes {
                    Step::Waits
                } else {
                    self.fail(token, &mut connection, tables, qp, here)
                };
                // What is in its queues is flushed.
                (None, step)
            }
            _ => (idle, Step::Over(status::ECONNRESET)),
        };
        self.settle(token, connection, step, here);
        polled
    }

    /// The queue pair went to the error state: the peer is told by the end of the connection.
    fn fail(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        here: Here<'_>,
    ) -> Step {
        match &mut connection.phase {
            Phase::Accepted(_) | Phase::Streams(_) => {
                self.end_stream(token, connection, tables, qp, 0, here)
            }
            Phase::Direct => self.begin_to_close(token, connection, 0, here),
            _ => Step::Over(status::ECONNRESET),
        }
    }

    fn poll_stream(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        budget: Budget,
        here: Here<'_>,
    ) -> ((Polled, Budget), Step) {
        let Phase::Streams(stream) = &mut connection.phase else {
            return ((Polled::Idle, Budget::NONE), Step::Waits);
        };
        let mut carrier = StreamCarrier {
            stream,
            pool: &mut self.pool,
            left: budget,
            failed: false,
        };
        let polled = fabric::poll(&mut carrier, tables, qp, here.now, budget);
        let (failed, done) = (carrier.failed, carrier.left.spent(budget));
        let mut polled = (polled, done);
        let drained = qp.state() == qp_state::SQD
            && polled.0 == Polled::Idle
            && !qp.send_queue().in_progress();
        if connection.writable {
            match stream.send(&mut self.pool, &connection.socket) {
                Ok(true) => {}
                Ok(false) => connection.writable = false,
                Err(_) => return (polled, Step::Over(status::ECONNRESET)),
            }
        }
        // When the socket takes more, there is a poll again.
        if !connection.writable && polled.0 == Polled::Again {
            polled.0 = Polled::Idle;
        }
        if failed {
            let status = status::ECONNRESET;
            let step = self.end_stream(token, connection, tables, qp, status, here);
            return (polled, step);
        }
        if drained && stream.is_sent() {
            return (polled, self.begin_to_close(token, connection, 0, here));
        }
        (polled, Step::Waits)
    }
}

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

/// An event with the private data of a frame.
fn with_private(mut event: IwEvent, frame: &Frame) -> IwEvent {
    let most = usize::from(virtio_rdma_spec::iwarp::MAX_PRIVATE_DATA);
    let private = frame.private.get(..most).unwrap_or(&frame.private);
    for (to, from) in event.private_data.iter_mut().zip(private) {
        *to = *from;
    }
    event.private_length = u16::try_from(private.len()).unwrap_or_default();
    event
}

/// The GID by which queue pairs of a VM find each other.
fn own_gid(vm: &Vm, here: Here<'_>) -> Option<Gid> {
    let tables = vm.read_in(here.section)?;
    tables.gids.first().copied().flatten()
}

/// A stream, as a queue pair is polled by.
struct StreamCarrier<'s> {
    stream: &'s mut Stream,
    pool: &'s mut Pool,
    /// What is left of the budget.
    left: Budget,
    failed: bool,
}

impl<'a> Carrier<'a> for StreamCarrier<'_> {
    fn send(
        &mut self,
        sq: &mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        mut budget: Budget,
    ) -> Polled {
        let polled = self
            .stream
            .poll(self.pool, sq, tables, qp, now, &mut budget);
        self.left = budget;
        match polled {
            Ok(polled) => polled,
            Err(end) => {
                self.stream.tell(&end, &[]);
                qp.fail();
                self.failed = true;
                Polled::Again
            }
        }
    }

    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>, _: u64) {
        self.stream.flush(sq, tables, qp);
    }
}

impl Connection {
    fn new(port: Arc<Port>, id: u32, socket: TcpStream, phase: Phase) -> Self {
        let connecting = matches!(phase, Phase::Connecting);
        let nowhere = SocketAddr::from(([0; 4], 0));
        Self {
            port,
            id,
            socket,
            local: nowhere,
            remote: nowhere,
            longest: 0,
            qp: None,
            life: 0,
            depths: Depths { ord: 0, ird: 0 },
            private: PrivateData::new(),
            phase,
            input: Vec::new(),
            readable: true,
            writable: !connecting,
            ends: false,
            over: None,
            ready: false,
            deadline: None,
        }
    }

    /// The socket is connected.
    fn set_up(&mut self) -> io::Result<()> {
        let segment = tcp::set_up(&self.socket)?;
        // An FPDU is no longer than a segment of TCP.
        self.longest = fpdu::ulpdu_within(segment);
        self.local = self.socket.local_addr()?;
        self.remote = self.socket.peer_addr()?;
        Ok(())
    }

    fn new_stream(&self, crc: bool) -> Stream {
        let agreed = Agreed {
            crc,
            longest: self.longest,
            ord: self.depths.ord,
            ird: self.depths.ird,
        };
        Stream::new(agreed, self.port.vm.footprint().empty())
    }

    /// Whether its stream has something to send.
    fn waits_to_send(&self) -> bool {
        match &self.phase {
            Phase::Accepted(stream) | Phase::Streams(stream) => !stream.is_sent(),
            _ => false,
        }
    }

    /// Sends what waits, and what is to be answered, as far as the socket takes it.
    ///
    /// # Errors
    /// `status`, if the connection ends.
    fn pump(&mut self, pool: &mut Pool, tables: &Tables, qp: &Arc<Qp>) -> Result<(), u16> {
        let (Phase::Accepted(stream) | Phase::Streams(stream)) = &mut self.phase else {
            return Ok(());
        };
        while !stream.is_sent() {
            if let Err(end) = stream.answer(pool, tables, qp) {
                stream.tell(&end, &[]);
                return Err(status::ECONNRESET);
            }
            match stream.send(pool, &self.socket) {
                Ok(true) => {}
                Ok(false) => {
                    self.writable = false;
                    break;
                }
                Err(error) => return Err(tcp::status_of(&error)),
            }
        }
        Ok(())
    }

    /// An event about it.
    fn event(&self, kind: u16, status: u16) -> IwEvent {
        let (local, remote) = self.port.ends(self.local, self.remote);
        IwEvent {
            kind,
            status,
            local,
            remote,
            ord: self.depths.ord.into(),
            ird: self.depths.ird.into(),
            ..IwEvent::default()
        }
    }

    /// An event about a request or a reply: what the peer can have.
    fn event_with(&self, kind: u16, frame: &Frame) -> IwEvent {
        let mut event = self.event(kind, 0);
        if kind == iw_event::CONNECT_REQUEST {
            let (ord, ird) = match frame.enhanced {
                Some(theirs) => (theirs.ird, theirs.ord),
                None => (u16::from(u8::MAX), u16::from(u8::MAX)),
            };
            let most = u16::from(crate::limits::MAX_RD_ATOMIC);
            (event.ord, event.ird) = (ord.min(most), ird.min(most));
        }
        event
    }

    /// Writes a frame, which a socket takes that has taken nothing else.
    fn write_frame(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(LONGEST_FRAME);
        frame.write(&mut bytes);
        let written = (&self.socket).write(&bytes)?;
        if written == bytes.len() {
            Ok(())
        } else {
            Err(ErrorKind::WriteZero.into())
        }
    }

    /// Reads bytes of a frame, as many as there may be.
    ///
    /// # Errors
    /// `status`, if the connection has ended.
    fn read_input(&mut self) -> Result<(), u16> {
        let mut space = [0; LONGEST_FRAME];
        while self.readable && self.input.len() < LONGEST_FRAME {
            let room = LONGEST_FRAME - self.input.len();
            let space = space.get_mut(..room).unwrap_or_default();
            match (&self.socket).read(space) {
                Ok(0) => {
                    self.ends = true;
                    break;
                }
                Ok(read) => self
                    .input
                    .extend_from_slice(space.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(tcp::status_of(&error)),
            }
        }
        Ok(())
    }

    /// Nothing is to come now.
    ///
    /// # Errors
    /// `status`, if something does, or the connection has ended.
    fn read_nothing(&mut self) -> Result<(), u16> {
        if !self.readable {
            return Ok(());
        }
        match (&self.socket).read(&mut [0; 1]) {
            Ok(0) => Err(0),
            Ok(_) => Err(status::ECONNRESET),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(tcp::status_of(&error)),
        }
    }

    /// What comes is of no interest. Reads no more than fits into `space`: others wait, too.
    ///
    /// # Errors
    /// If the connection has ended.
    fn drain(&mut self, space: &mut [u8]) -> io::Result<()> {
        if !self.readable {
            return Ok(());
        }
        match (&self.socket).read(space) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Reads what has come behind what the stream kept, into `space`. Returns how long both are, and
    /// whether the peer has closed.
    ///
    /// # Errors
    /// If the connection was reset.
    fn fill(&mut self, space: &mut [u8]) -> io::Result<(usize, bool)> {
        let kept: &[u8] = match &self.phase {
            Phase::Accepted(stream) | Phase::Streams(stream) => stream.partial(),
            _ => &[],
        };
        let before = kept.len();
        if let Some(to) = space.get_mut(..before) {
            to.copy_from_slice(kept);
        }
        loop {
            let room = space.get_mut(before..).unwrap_or_default();
            let wanted = room.len();
            match (&self.socket).read(room) {
                Ok(0) => return Ok((before, true)),
                Ok(read) => {
                    // A short read leaves nothing behind, but for an end, of which epoll has told.
                    if read < wanted && !self.ends {
                        self.readable = false;
                    }
                    return Ok((before + read, false));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.readable = false;
                    return Ok((before, false));
                }
                Err(error) => return Err(error),
            }
        }
    }
}
