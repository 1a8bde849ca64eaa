// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's port of iWARP: what its driver knows of connections, and what waits for it to be told.
//!
//! Commands are judged here, in the thread of the front end, against what the driver knows. The
//! connections themselves are the worker's (`super::Iwarp`), which a command reaches as a
//! `Request`; what became of it comes back as an event.
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use arrayvec::ArrayVec;
use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::iwarp::{iw_event, IwEndpoint, IwEvent, MAX_PRIVATE_DATA};

use crate::engine::events::raise;
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::footprint::Share;
use crate::verbs::Error;

/// Connections and listeners that a VM may have, at most: each is a file descriptor of the process.
pub const MOST_CONNECTIONS: usize = 4096;
/// Connections of a listener that wait to be accepted, at most.
pub(crate) const MOST_BACKLOG: u32 = 1024;
/// Those of a port, at whichever listeners: what is left is for connections that the driver wants.
const MOST_WAITING: usize = MOST_CONNECTIONS / 2;
/// Those of a port that came in and have asked for nothing yet, at most.
const MOST_SILENT: usize = 256;
/// Events that wait for the driver, at most: no connection begins while there are more.
const MOST_EVENTS: usize = 4 * MOST_CONNECTIONS;
/// What a connection takes of its VM's account beside its buffers, bytes.
const CONNECTION: u64 = 4096;
/// What is left of that when all that is left of it is its last event.
const EVENT: u64 = 512;

/// Private data of one side of a connection.
pub(crate) type PrivateData = ArrayVec<u8, { MAX_PRIVATE_DATA as usize }>;

/// Where connections of a VM are from, and where the addresses that its driver names are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSettings {
    /// The address of the host that they are from, and at which the VM listens.
    pub address: IpAddr,
    /// Addresses that drivers name, and those of hosts that stand for them. Others stand for
    /// themselves.
    pub directory: HashMap<IpAddr, IpAddr>,
    /// Ranges of addresses, each with the bits that all have in common, to which the VM may connect
    /// beside those of the directory.
    pub peers: Vec<(IpAddr, u8)>,
    /// Each FPDU has a CRC, unless the peer wants it and this is false.
    pub crc: bool,
    /// Who connects offers that either end may send first, as RFC 6581 has it.
    pub peer_to_peer: bool,
}

impl PortSettings {
    /// Where an address is that a driver names, if the VM may connect to it: the process has a way to
    /// more than its VMs should.
    fn host_of(&self, address: IpAddr) -> Option<IpAddr> {
        if let Some(host) = self.directory.get(&address) {
            return Some(*host);
        }
        let mut ranges = self.peers.iter();
        let permits = ranges.any(|(first, bits)| within(*first, *bits, address));
        let host = self.directory.values().any(|host| *host == address);
        (permits || host).then_some(address)
    }

    /// How drivers name the address of a host.
    fn name_of(&self, host: IpAddr) -> IpAddr {
        let mut names = self.directory.iter().filter(|(_, of)| **of == host);
        names.next().map_or(host, |(name, _)| *name)
    }
}

/// Whether an address has its first bits in common with another one.
fn within(first: IpAddr, bits: u8, address: IpAddr) -> bool {
    let number = |ip: IpAddr| match ip {
        // All of the highest bits.
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let differ = number(first) ^ number(address);
    first.is_ipv4() == address.is_ipv4() && differ.leading_zeros() >= bits.into()
}

/// How often RDMA READs may be under way, in either direction, as the driver wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Depths {
    /// From here.
    pub ord: u8,
    /// From the peer.
    pub ird: u8,
}

/// What a driver asks of the worker that has the connections.
#[derive(Debug)]
pub(crate) enum Request {
    /// Connections come in by this socket.
    Listen {
        port: Arc<Port>,
        listener: u32,
        socket: Arc<TcpListener>,
    },
    /// They do so no longer, or for another listener, its heir.
    DestroyListen {
        port: Arc<Port>,
        listener: u32,
        heir: Option<u32>,
    },
    /// A connection begins by this socket, which is connecting.
    Connect {
        port: Arc<Port>,
        id: u32,
        qp: Arc<Qp>,
        socket: TcpStream,
        depths: Depths,
        private: PrivateData,
    },
    /// One that came in is accepted.
    Accept {
        port: Arc<Port>,
        id: u32,
        qp: Arc<Qp>,
        depths: Depths,
        private: PrivateData,
    },
    /// Or rejected.
    Reject {
        port: Arc<Port>,
        id: u32,
        private: PrivateData,
    },
    /// All that the port has is closed: its VM was reset.
    Forget { port: Arc<Port> },
}

/// What the driver knows of a connection.
#[derive(Debug)]
struct Known {
    cookie: u64,
    /// The serial number of its queue pair; none while it waits to be accepted.
    qp: Option<u64>,
    /// Of a connection that waits to be accepted: its listener.
    listener: Option<u32>,
    /// The driver has taken the event about it.
    told: bool,
    /// Its peer has asked for it.
    asked: bool,
    share: Share,
}

/// What the driver is to be told.
#[derive(Debug)]
struct Told {
    event: IwEvent,
    /// Of a connection that is over.
    _share: Option<Share>,
}

/// What the driver knows of a listener.
#[derive(Debug)]
struct Listening {
    cookie: u64,
    backlog: u32,
    /// The TCP port.
    at: u16,
    /// The worker's, too, which lets it go later. None: another listener of the VM has the address.
    socket: Option<Arc<TcpListener>>,
    _share: Share,
}

#[derive(Debug, Default)]
struct Inner {
    connections: HashMap<u32, Known>,
    listeners: HashMap<u32, Listening>,
    /// For the driver; each connection has few.
    events: VecDeque<Told>,
    last: u32,
}

impl Known {
    /// Whether the driver may accept it. Of one whose peer has not asked, it cannot know.
    fn waits(&self) -> bool {
        self.listener.is_some() && self.asked
    }
}

impl Inner {
    /// Connections that came in, and have asked for nothing yet.
    fn silent(&self) -> usize {
        let silent = |known: &&Known| known.listener.is_some() && !known.asked;
        self.connections.values().filter(silent).count()
    }

    /// Whether one more that came in at a listener may wait to be accepted.
    fn may_wait(&self, listener: u32) -> bool {
        let Some(Listening { backlog, .. }) = self.listeners.get(&listener) else {
            return false;
        };
        let (mut all, mut here) = (0, 0);
        for known in self.connections.values().filter(|known| known.waits()) {
            all += 1;
            here += u32::from(known.listener == Some(listener));
        }
        all < MOST_WAITING && here < *backlog
    }

    /// A number that no connection or listener has.
    fn number(&mut self) -> Result<u32, Error> {
        let used = self.connections.len() + self.listeners.len();
        if used >= MOST_CONNECTIONS || self.events.len() >= MOST_EVENTS {
            return Err(Error::NoMemory);
        }
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            let known = self.connections.contains_key(&self.last);
            if !known && !self.listeners.contains_key(&self.last) {
                return Ok(self.last);
            }
        }
    }
}

/// A VM's port of iWARP.
pub(crate) struct Port {
    pub settings: Arc<PortSettings>,
    pub vm: Arc<Vm>,
    inner: Mutex<Inner>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").finish_non_exhaustive()
    }
}

/// An endpoint as drivers name it.
pub(crate) fn endpoint(address: SocketAddr) -> IwEndpoint {
    let addr = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    IwEndpoint {
        addr: addr.octets(),
        port: address.port(),
        ..IwEndpoint::default()
    }
}

/// The address of an endpoint.
///
/// # Errors
/// If a reserved field is not zero.
pub(crate) fn address(endpoint: &IwEndpoint) -> Result<SocketAddr, Error> {
    if endpoint.reserved != [0; 6] {
        return Err(Error::Invalid);
    }
    let address = Ipv6Addr::from(endpoint.addr).to_canonical();
    Ok(SocketAddr::new(address, endpoint.port))
}

impl Port {
    /// The port of a VM.
    pub(crate) fn new(settings: Arc<PortSettings>, vm: Arc<Vm>) -> Arc<Self> {
        let inner = Mutex::default();
        Arc::new(Self {
            settings,
            vm,
            inner,
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Where a connection goes to that the driver wants to this address.
    ///
    /// # Errors
    /// If the VM may not connect to it.
    pub(crate) fn remote(&self, to: SocketAddr) -> Result<SocketAddr, Error> {
        let host = self.settings.host_of(to.ip()).ok_or(Error::NotAllowed)?;
        Ok(SocketAddr::new(host, to.port()))
    }

    /// Connections come in by this socket; the number of the listener.
    ///
    /// # Errors
    /// If there are too many, or the account has no room.
    pub(crate) fn listen(
        &self,
        cookie: u64,
        at: u16,
        backlog: u32,
        socket: Option<Arc<TcpListener>>,
    ) -> Result<u32, Error> {
        let share = self.vm.footprint().share(CONNECTION)?;
        let mut inner = self.inner();
        let number = inner.number()?;
        let listening = Listening {
            cookie,
            backlog,
            at,
            socket,
            _share: share,
        };
        inner.listeners.insert(number, listening);
        Ok(number)
    }

    /// How many listeners and connections there are.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let inner = self.inner();
        (inner.listeners.len(), inner.connections.len())
    }

    /// Whether the VM listens at a TCP port, once.
    pub(crate) fn listens_at(&self, port: u16) -> bool {
        let inner = self.inner();
        let mut there = inner.listeners.values().filter(|of| of.at == port);
        there.next().is_some() && there.next().is_none()
    }

    /// A listener ends. Nothing of it is told any longer. Returns its heir: the one that it had the
    /// address instead of.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn destroy_listen(&self, listener: u32) -> Result<Option<u32>, Error> {
        let mut inner = self.inner();
        let Inner {
            connections,
            listeners,
            events,
            ..
        } = &mut *inner;
        let gone = listeners.remove(&listener).ok_or(Error::NotFound)?;
        let mut heir = None;
        if let Some(socket) = gone.socket {
            let mut others = listeners.iter_mut();
            if let Some((number, other)) = others.find(|(_, of)| of.at == gone.at) {
                other.socket = Some(socket);
                heir = Some(*number);
            } else {
                // Its address is free at once.
                let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Read);
            }
        }
        // What the driver was told of, it will accept or reject.
        let of_it = |known: &Known| known.listener == Some(listener) && !known.told;
        events.retain(|Told { event, .. }| {
            let known = connections.get(&event.connection);
            event.kind != iw_event::CONNECT_REQUEST || !known.is_some_and(of_it)
        });
        connections.retain(|_, known| !of_it(known));
        Ok(heir)
    }

    /// A connection of a queue pair; its number.
    ///
    /// # Errors
    /// If the queue pair has one, there are too many, or the account has no room.
    pub(crate) fn connect(&self, cookie: u64, qp: &Qp) -> Result<u32, Error> {
        let share = self.vm.footprint().share(CONNECTION)?;
        let mut inner = self.inner();
        self.check_free(&inner, qp)?;
        let number = inner.number()?;
        let known = Known {
            cookie,
            qp: Some(qp.serial()),
            listener: None,
            told: true,
            asked: false,
            share,
        };
        inner.connections.insert(number, known);
        Ok(number)
    }

    fn check_free(&self, inner: &Inner, qp: &Qp) -> Result<(), Error> {
        let serial = Some(qp.serial());
        if inner.connections.values().any(|known| known.qp == serial) {
            return Err(Error::Invalid);
        }
        Ok(())
    }

    /// Whether as many connections came in and asked for nothing as may.
    pub(crate) fn is_crowded(&self) -> bool {
        self.inner().silent() >= MOST_SILENT
    }

    /// A connection came in at a listener. Returns its number, unless the listener has gone, or
    /// there are too many.
    pub(crate) fn incoming(&self, listener: u32) -> Option<u32> {
        let share = self.vm.footprint().share(CONNECTION).ok()?;
        let mut inner = self.inner();
        let cookie = inner.listeners.get(&listener)?.cookie;
        if inner.silent() >= MOST_SILENT {
            return None;
        }
        let number = inner.number().ok()?;
        let known = Known {
            cookie,
            qp: None,
            listener: Some(listener),
            told: false,
            asked: false,
            share,
        };
        inner.connections.insert(number, known);
        Some(number)
    }

    /// The peer of one that came in asks for a connection. Returns whether it may wait for that.
    pub(crate) fn asks(&self, id: u32) -> bool {
        let mut inner = self.inner();
        let of = inner.connections.get(&id).and_then(|known| known.listener);
        let may = of.is_some_and(|of| inner.may_wait(of));
        if let Some(known) = inner.connections.get_mut(&id) {
            known.asked |= may;
        }
        may
    }

    /// The driver accepts a connection that waits for that.
    ///
    /// # Errors
    /// If it does not, or the queue pair has another one.
    pub(crate) fn accept(&self, id: u32, cookie: u64, qp: &Qp) -> Result<(), Error> {
        let mut inner = self.inner();
        let waits = |known: &Known| known.waits();
        if !inner.connections.get(&id).is_some_and(waits) {
            return Err(Error::NotFound);
        }
        self.check_free(&inner, qp)?;
        if let Some(known) = inner.connections.get_mut(&id) {
            (known.cookie, known.qp, known.listener) = (cookie, Some(qp.serial()), None);
        }
        Ok(())
    }

    /// The driver rejects a connection that waits to be accepted.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn reject(&self, id: u32) -> Result<(), Error> {
        let mut inner = self.inner();
        let known = inner.connections.get(&id);
        known.filter(|known| known.waits()).ok_or(Error::NotFound)?;
        inner.connections.remove(&id);
        Ok(())
    }

    /// Whether the driver knows of a connection, or will: its listener has not gone.
    pub(crate) fn knows(&self, id: u32) -> bool {
        self.inner().connections.contains_key(&id)
    }

    /// The driver knows nothing of a connection any longer.
    pub(crate) fn forget(&self, id: u32) {
        self.inner().connections.remove(&id);
    }

    /// A connection is over that the driver has not accepted: it is not told of it any longer. Of
    /// one that it is accepting just now, it will be.
    pub(crate) fn forget_waiting(&self, id: u32) {
        let mut inner = self.inner();
        let known = inner.connections.get(&id);
        if known.is_some_and(|known| known.listener.is_some()) {
            inner.connections.remove(&id);
            inner.events.retain(|told| told.event.connection != id);
        }
    }

    /// Something happened to a connection: the driver is told, if it knows of it. What ends it, it is
    /// forgotten by.
    pub(crate) fn tell(&self, id: u32, mut event: IwEvent) {
        let mut inner = self.inner();
        let Some(known) = inner.connections.get(&id) else {
            return;
        };
        event.cookie = known.cookie;
        event.connection = id;
        let ends = match event.kind {
            iw_event::CLOSE => true,
            iw_event::CONNECT_REPLY => event.status != 0,
            _ => false,
        };
        let share = if ends {
            let gone = inner.connections.remove(&id);
            gone.map(|mut known| {
                known.share.shrink(EVENT);
                known.share
            })
        } else {
            None
        };
        inner.events.push_back(Told {
            event,
            _share: share,
        });
    }

    /// How the driver names the ends of a connection of this host.
    pub(crate) fn ends(&self, local: SocketAddr, remote: SocketAddr) -> (IwEndpoint, IwEndpoint) {
        let named =
            |of: SocketAddr| endpoint(SocketAddr::new(self.settings.name_of(of.ip()), of.port()));
        (named(local), named(remote))
    }

    /// The next event; one of kind NONE if there is none.
    pub(crate) fn next_event(&self) -> IwEvent {
        let mut inner = self.inner();
        let told = inner.events.pop_front();
        let event = told.as_ref().map(|told| told.event.connection);
        if let Some(known) = event.and_then(|id| inner.connections.get_mut(&id)) {
            known.told = true;
        }
        if inner.events.is_empty() {
            inner.events.shrink_to(16);
        }
        told.map_or_else(IwEvent::default, |told| told.event)
    }

    /// Tells the driver that there are events, if there are any.
    pub(crate) fn raise(&self, tables: &Tables) {
        if !self.inner().events.is_empty() {
            raise(tables, event_type::IW_EVENT, 0, 0);
        }
    }

    /// Nothing of it is known any longer: the VM was reset.
    pub(crate) fn clear(&self) {
        let mut inner = self.inner();
        let last = inner.last;
        *inner = Inner {
            last,
            ..Inner::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_connects_to_what_it_may() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let settings = PortSettings {
            address: ip("10.0.0.1"),
            directory: HashMap::from([(ip("192.168.0.2"), ip("10.0.0.2"))]),
            peers: vec![(ip("10.7.0.0"), 16), (ip("fd00::"), 8)],
            crc: true,
            peer_to_peer: false,
        };
        for (to, host) in [
            ("192.168.0.2", Some("10.0.0.2")),
            ("10.0.0.2", Some("10.0.0.2")),
            ("10.7.255.1", Some("10.7.255.1")),
            ("fd77::1", Some("fd77::1")),
            ("10.8.0.1", None),
            ("127.0.0.1", None),
            ("::1", None),
            ("a07::", None),
        ] {
            assert_eq!(settings.host_of(ip(to)), host.map(ip), "{to}");
        }
        assert_eq!(settings.name_of(ip("10.0.0.2")), ip("192.168.0.2"));
        assert_eq!(settings.name_of(ip("10.7.0.1")), ip("10.7.0.1"));
        assert!(within(ip("0.0.0.0"), 0, ip("1.2.3.4")) && !within(ip("::"), 0, ip("1.2.3.4")));
    }
}
