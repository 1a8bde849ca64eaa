// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connections of iWARP, all of one worker: whose they are, when they are served, and how they end.
//!
//! A connection goes from phase to phase ([`Phase`]) as its socket becomes readable and writable, which
//! epoll tells once each time, and as its driver decides (`handshake`). Then FPDUs go both ways
//! (`traffic`). What it does with its queue pair needs the tables of the VM; while these are being
//! changed, the connection waits.

use std::collections::{BTreeSet, HashMap};
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

/// Bytes that are read of a connection at once, beside those that came before.
pub(super) const AT_ONCE: usize = 512 << 10;
/// Connections that are taken of a listener at once.
pub(super) const ACCEPTED: usize = 16;
/// How long each step of the beginning of a connection may take, nanoseconds; and its end.
pub(super) const BEGIN: u64 = 10_000_000_000;
pub(super) const END: u64 = 3_000_000_000;
/// How often a connection of a VM that is stopped is looked at, and a listener for which there are no
/// descriptors, and how long a peer that replies is left alone, nanoseconds.
pub(super) const LATER: u64 = 10_000_000;

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
    pub(super) ready: Vec<Token>,
    pub(super) deadlines: BTreeSet<(u64, Token)>,
    /// Those whose VM was stopped, and when they are looked at again.
    pub(super) later: BTreeSet<(u64, Token)>,
    /// Ports whose drivers are to be told that there are events.
    pub(super) telling: Vec<Arc<Port>>,
    pub(super) pool: Pool,
    pub(super) space: Box<[u8]>,
    pub(super) last: Token,
    /// Bytes that came for VMs, for who shares the worker.
    pub(super) charges: Vec<(Arc<Vm>, u64)>,
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
        let listener = Listener { port, id, socket };
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
        let Some(connection) = self.connection(token) else {
            return;
        };
        if !std::mem::replace(&mut connection.ready, true) {
            self.ready.push(token);
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
            Some(Entry::Listener(_)) => self.ready.push(token),
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
        self.ready.push(token);
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
