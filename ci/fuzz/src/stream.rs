// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `stream`: a VM with a port of iWARP listens and connects, and its peers send anything
//! over TCP: requests and replies of MPA, segments as they should be and otherwise, with their CRC
//! right or not, cuts and resets. The VM accepts, rejects, posts and closes. What the device sends
//! must be well formed, its events must be in order, and no memory may change but what was
//! registered for that.
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use vhost_device_rdma::fabric::iwarp::port::PortSettings;
use virtio_rdma_spec::command::{opcode, HandleResponse};
use virtio_rdma_spec::iwarp::{
    iw_event, IwAccept, IwConnect, IwEndpoint, IwEvent, IwListen, IwReject,
};
use virtio_rdma_spec::ring::{RecvWqe, SendWqe, Sge};
use virtio_rdma_spec::verbs::{access, qp_state, qp_type, send_flag, wc_status, wr_opcode};

use crate::host::{bytes, Guest, Host, PAGE};
use crate::neighbour::Neighbour;
use crate::queues::{attributes, Cq, Mr, Qp, Refs, REMOTE};

/// Rounds that the worker may take to see that a peer has gone.
const ROUNDS: usize = 100_000;
/// Steps of an input.
const MOST_STEPS: usize = 200;
/// Peers at a time.
const MOST_PEERS: usize = 4;
/// The number of the VM.
const GUEST: u8 = 1;
/// Where it listens.
const PORT: u16 = 7471;
/// The cookie of its listener. Others are higher.
const LISTENER: u64 = 1;
/// What fills memory that nobody may change.
const CANARY: u8 = 0xc5;
/// Bytes of a request or a reply before the private data.
const FRAME: usize = 20;

/// Flags of requests and replies.
const CRC: u8 = 0x40;
const REJECTED: u8 = 0x20;
const ENHANCED: u8 = 0x10;
const PEER_TO_PEER: u16 = 0x8000;
const RTR_WRITE: u16 = 0x8000;

/// Opcodes of RDMAP.
const WRITE: u8 = 0;
const READ_REQUEST: u8 = 1;
const READ_RESPONSE: u8 = 2;
const SEND: u8 = 3;
const SEND_SOLICITED_INVALIDATE: u8 = 6;
const TERMINATE: u8 = 7;
const IMMEDIATE: u8 = 8;
const ATOMIC_REQUEST: u8 = 10;
const ATOMIC_RESPONSE: u8 = 11;

/// Another end of a connection.
struct Peer {
    stream: TcpStream,
    /// It has connected, and the VM accepts.
    active: bool,
    /// What came and is not looked at; whether the frame has come.
    input: Vec<u8>,
    streams: bool,
    /// Sequence numbers of what is sent next, by queue.
    next: [u32; 4],
    /// Bytes of the SEND that goes on.
    offset: u32,
    /// What the VM asked for and was not answered: the name, the offset, and the length; of an
    /// atomic operation, without the latter.
    asked: Vec<(u32, u64, Option<u32>)>,
}

/// A queue pair, and what the driver knows of its connection.
struct Connected {
    qp: Qp,
    connection: Option<u32>,
}

/// A connection that the driver knows.
#[derive(Debug, Clone, Copy)]
struct Known {
    cookie: u64,
    established: bool,
    /// The other end is a peer, and not the VM itself.
    of_peer: bool,
}

/// The VM and its peers.
struct Scene {
    guest: Guest,
    address: Ipv4Addr,
    /// Where peers listen.
    passive: TcpListener,
    peers: Vec<Peer>,
    qps: Vec<Connected>,
    cq: Cq,
    mr: Mr,
    read_only: Mr,
    canaries: Vec<usize>,
    listener: Option<u32>,
    /// Connections that wait to be accepted, and whether they are of peers.
    requests: Vec<(u32, bool)>,
    known: BTreeMap<u32, Known>,
    cookie: u64,
    posted: u64,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::with_iwarp();
    let mut neighbour = Neighbour::new(&host);
    let mut scene = Scene::new(&host);
    let mut u = Unstructured::new(data);
    if u.arbitrary().is_ok_and(|byte: u8| byte < 224) {
        scene.begin(&mut host);
    }
    for _ in 0..MOST_STEPS {
        if u.is_empty() || scene.step(&mut host, &mut u).is_err() {
            break;
        }
        host.rounds(1);
        scene.take();
    }
    neighbour.check(&mut host);
    scene.leave(&mut host);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

/// An address that nothing else has: connections of the past take ports of theirs.
fn address() -> Ipv4Addr {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed) % 254 + 1;
    let [low, high, ..] = std::process::id().to_le_bytes();
    Ipv4Addr::new(127, low | 1, high, number as u8)
}

fn endpoint(address: Ipv4Addr, port: u16) -> IwEndpoint {
    IwEndpoint {
        addr: address.to_ipv6_mapped().octets(),
        port,
        ..IwEndpoint::default()
    }
}

impl Scene {
    fn new(host: &Host) -> Self {
        let address = address();
        let mut guest = host.guest_of_iwarp(
            GUEST,
            PortSettings {
                address: address.into(),
                directory: [].into(),
                crc: true,
                peers: vec![(IpAddr::from([127, 0, 0, 0]), 8)],
                peer_to_peer: true,
            },
        );
        let context = guest.context().expect("a context");
        let pd = guest.create(opcode::CREATE_PD).expect("a PD");
        let cq = guest.cq().expect("a completion queue");
        let mr = guest.mr(pd, access::LOCAL_WRITE | REMOTE & !access::FLUSH_GLOBAL, 4);
        let read_only = guest.mr(pd, access::REMOTE_READ, 1).expect("a region");
        let canaries = vec![read_only.page, guest.take_pages(1)];
        for page in &canaries {
            guest.view.write(page * PAGE, &[CANARY; PAGE]);
        }
        let refs = Refs {
            pd,
            cq: cq.number,
            ..Refs::default()
        };
        let qps = (0..3)
            .map(|_| Connected {
                qp: guest
                    .qp(qp_type::IWARP, context, refs)
                    .expect("a queue pair"),
                connection: None,
            })
            .collect();
        let passive = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        passive.set_nonblocking(true).expect("a socket");
        let mut scene = Self {
            guest,
            address,
            passive,
            peers: Vec::new(),
            qps,
            cq,
            mr: mr.expect("a region"),
            read_only,
            canaries,
            listener: None,
            requests: Vec::new(),
            known: BTreeMap::new(),
            cookie: LISTENER,
            posted: 0,
        };
        for which in 0..scene.qps.len() {
            scene.renew(which);
        }
        scene.listen();
        scene
    }

    fn listen(&mut self) {
        let body = IwListen {
            cookie: LISTENER,
            local: endpoint(self.address, PORT),
            backlog: 3,
            ..IwListen::default()
        };
        let made: std::result::Result<HandleResponse, u16> =
            self.guest.ask(opcode::IW_LISTEN, &body);
        // The address may be that of an input before, which has not gone.
        self.listener = made.ok().map(|made| made.handle);
    }

    /// A queue pair begins anew, and waits for a connection.
    fn renew(&mut self, which: usize) {
        let of = &mut self.qps[which];
        let to = |state| attributes(qp_type::IWARP, state, [0; 16], 0);
        let (attr, mask) = to(qp_state::RESET);
        if self.guest.modify(of.qp.number, (attr, mask)).is_ok() {
            of.qp.sq.reset(&self.guest);
            of.qp.rq.reset(&self.guest);
            let (mut attr, mask) = to(qp_state::INIT);
            attr.access_flags &= !access::FLUSH_GLOBAL;
            self.guest
                .modify(of.qp.number, (attr, mask))
                .expect("a queue pair in INIT");
        }
    }

    /// A connection of each kind, with receives: most inputs are about what comes then.
    fn begin(&mut self, host: &mut Host) {
        let plain = |key: &[u8; 16]| [&key[..], &[CRC, 1, 0, 0]].concat();
        self.peer_connects_with(host, &plain(b"MPA ID Req Frame"));
        self.accept_first(host);
        self.connect_with(host, 1, 4, Some(plain(b"MPA ID Rep Frame")));
        for which in [0, 0, 0, 1, 1, 1] {
            let sge = Sge {
                addr: self.mr.iova,
                length: 256,
                lkey: self.mr.key,
            };
            self.post_recv_of(which, sge);
        }
        host.rounds(2);
        self.take();
    }

    fn step(&mut self, host: &mut Host, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? {
            0..=5 => self.peer_connects(host, u)?,
            6..=11 => self.connect(host, u)?,
            12..=19 => self.decide(u)?,
            20..=23 => {
                self.peer_connects(host, u)?;
                self.accept_first(host);
            }
            24..=159 => self.segment(u)?,
            160..=165 => {
                let garbage: [u8; 9] = u.arbitrary()?;
                if let Some(peer) = self.peer(u)? {
                    peer.write(&garbage);
                }
            }
            166..=175 => self.cut(u)?,
            176..=195 => self.post_recv(u)?,
            196..=219 => self.post_send(u)?,
            220..=224 => {
                let which = u.choose_index(self.qps.len())?;
                let state = *u.choose(&[qp_state::ERR, qp_state::SQD, qp_state::RESET])?;
                let number = self.qps[which].qp.number;
                let change = attributes(qp_type::IWARP, state, [0; 16], 0);
                let _ = self.guest.modify(number, change);
            }
            225..=231 => {
                let which = u.choose_index(self.qps.len())?;
                self.renew(which);
            }
            232..=233 => match self.listener.take() {
                Some(listener) => {
                    let gone = self.guest.handle(opcode::IW_DESTROY_LISTEN, listener);
                    assert_eq!(gone, Ok(()));
                    // It is told of none of those any longer.
                    self.requests.clear();
                }
                None => self.listen(),
            },
            234..=236 => {
                self.guest.rnic.stop();
                host.rounds(1);
                self.guest.start();
            }
            237..=239 => host.busy_round(),
            _ => host.rounds(6),
        }
        Ok(())
    }

    fn peer(&mut self, u: &mut Unstructured<'_>) -> Result<Option<&mut Peer>> {
        if self.peers.is_empty() {
            return Ok(None);
        }
        // The last one, mostly.
        let back = u.arbitrary::<u8>()?;
        let back = if back < 192 {
            0
        } else {
            usize::from(back) % self.peers.len()
        };
        let last = self.peers.len() - 1;
        Ok(self.peers.get_mut(last - back))
    }

    fn room_for_peer(&mut self) {
        if self.peers.len() >= MOST_PEERS {
            self.peers.remove(0).reset();
        }
    }

    /// A peer connects, and asks.
    fn peer_connects(&mut self, host: &mut Host, u: &mut Unstructured<'_>) -> Result<()> {
        let request = frame(b"MPA ID Req Frame", u)?;
        self.peer_connects_with(host, &request);
        Ok(())
    }

    fn peer_connects_with(&mut self, host: &mut Host, request: &[u8]) {
        self.room_for_peer();
        let Ok(stream) = TcpStream::connect((self.address, PORT)) else {
            return;
        };
        let mut peer = Peer::new(stream, true);
        peer.write(request);
        self.peers.push(peer);
        host.rounds(2);
        self.take();
    }

    /// The driver accepts what came first.
    fn accept_first(&mut self, host: &mut Host) {
        if self.requests.is_empty() {
            return;
        }
        let request = self.requests.remove(0);
        let free = self.qps.iter().position(|of| of.connection.is_none());
        let which = free.unwrap_or(0);
        if free.is_some() {
            self.renew(which);
        }
        self.accept(request, which, 4);
        host.rounds(2);
        self.take();
        self.receive();
        host.rounds(1);
    }

    fn accept(&mut self, (connection, of_peer): (u32, bool), which: usize, depth: u16) {
        self.cookie += 1;
        let body = IwAccept {
            cookie: self.cookie,
            connection,
            qpn: self.qps[which].qp.number,
            ord: depth,
            ird: depth,
            private_length: 2,
            ..IwAccept::default()
        };
        if self.guest.tell(opcode::IW_ACCEPT, &body).is_ok() {
            self.knows(connection, of_peer);
            self.qps[which].connection = Some(connection);
        } else {
            // Perhaps for the queue pair: then it may be rejected.
            self.reject(connection);
        }
    }

    /// The driver knows a connection with the last cookie.
    fn knows(&mut self, connection: u32, of_peer: bool) {
        let new = Known {
            cookie: self.cookie,
            established: false,
            of_peer,
        };
        assert!(self.known.insert(connection, new).is_none());
    }

    fn reject(&mut self, connection: u32) {
        let body = IwReject {
            connection,
            private_length: 1,
            ..IwReject::default()
        };
        let _ = self.guest.tell(opcode::IW_REJECT, &body);
    }

    /// The driver accepts or rejects something.
    fn decide(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let which = u.choose_index(self.requests.len())?;
        let request = self.requests.remove(which);
        if u.ratio(1, 8)? {
            self.reject(request.0);
            return Ok(());
        }
        let which = u.choose_index(self.qps.len())?;
        self.accept(request, which, u.int_in_range(0..=8)?);
        Ok(())
    }

    /// The driver connects, to a peer or to itself.
    fn connect(&mut self, host: &mut Host, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(self.qps.len())?;
        let reply = if u.ratio(3, 4)? {
            Some(frame(b"MPA ID Rep Frame", u)?)
        } else {
            None
        };
        self.connect_with(host, which, u.int_in_range(0..=8)?, reply);
        Ok(())
    }

    /// The driver connects a queue pair, to a peer that replies so, or to itself.
    fn connect_with(&mut self, host: &mut Host, which: usize, depth: u16, reply: Option<Vec<u8>>) {
        let remote = if reply.is_some() {
            let local = self.passive.local_addr().expect("an address");
            endpoint(Ipv4Addr::LOCALHOST, local.port())
        } else {
            endpoint(self.address, PORT)
        };
        self.cookie += 1;
        let body = IwConnect {
            cookie: self.cookie,
            local: endpoint(self.address, 0),
            remote,
            qpn: self.qps[which].qp.number,
            ord: depth,
            ird: depth,
            private_length: 20,
            ..IwConnect::default()
        };
        let made: std::result::Result<HandleResponse, u16> =
            self.guest.ask(opcode::IW_CONNECT, &body);
        let Ok(made) = made else {
            return;
        };
        self.knows(made.handle, false);
        self.qps[which].connection = Some(made.handle);
        host.rounds(2);
        let Some(reply) = reply else {
            return;
        };
        self.room_for_peer();
        if let Ok((stream, _)) = self.passive.accept() {
            let mut peer = Peer::new(stream, false);
            peer.write(&reply);
            self.peers.push(peer);
            if let Some(known) = self.known.get_mut(&made.handle) {
                known.of_peer = true;
            }
        }
        host.rounds(2);
        self.receive();
    }

    /// A peer ends in one way or another.
    fn cut(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let how = u.int_in_range(0..=4)?;
        if self.peers.is_empty() {
            return Ok(());
        }
        let which = u.choose_index(self.peers.len())?;
        match how {
            0 => {
                let _ = self.peers[which].stream.shutdown(Shutdown::Write);
            }
            1 => {
                let _ = self.peers[which].stream.shutdown(Shutdown::Read);
            }
            2 => drop(self.peers.remove(which)),
            3 => self.peers.remove(which).reset(),
            // Half of an FPDU.
            _ => {
                let whole = fpdu(&self.peers[which].send(&[1; 40]));
                let length = u.int_in_range(0..=whole.len())?;
                self.peers[which].write(&whole[..length]);
            }
        }
        Ok(())
    }

    /// A peer sends a segment, or some at once.
    fn segment(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (mr, read_only) = (self.mr, self.read_only);
        let Some(peer) = self.peer(u)? else {
            return Ok(());
        };
        let count = if u.ratio(1, 8)? {
            u.int_in_range(2..=6)?
        } else {
            1
        };
        let mut all = Vec::new();
        for _ in 0..count {
            let mut ulpdu = peer.ulpdu(&mr, &read_only, u)?;
            match u.arbitrary::<u8>()? {
                0..=7 => {
                    let at = u.choose_index(ulpdu.len().max(1))?;
                    let to = u.arbitrary()?;
                    if let Some(byte) = ulpdu.get_mut(at) {
                        *byte = to;
                    }
                }
                8..=11 => ulpdu.truncate(u.int_in_range(0..=60)?),
                12..=13 => ulpdu.extend([0; 5]),
                _ => {}
            }
            let mut bytes = fpdu(&ulpdu);
            if u.ratio(1, 50)? {
                let at = u.choose_index(bytes.len())?;
                bytes[at] ^= 1;
            }
            all.extend(bytes);
        }
        peer.write(&all);
        Ok(())
    }

    fn sge(&self, u: &mut Unstructured<'_>) -> Result<Sge> {
        let wrong = u.ratio(1, 40)?;
        Ok(Sge {
            addr: self.mr.iova + 8 * u64::from(u.arbitrary::<u8>()?),
            length: if u.ratio(1, 3)? {
                u.int_in_range(0..=3 * PAGE as u32)?
            } else {
                64
            },
            lkey: if wrong {
                self.read_only.key
            } else {
                self.mr.key
            },
        })
    }

    fn post_recv(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(self.qps.len())?;
        let sge = self.sge(u)?;
        self.post_recv_of(which, sge);
        Ok(())
    }

    fn post_recv_of(&mut self, which: usize, sge: Sge) {
        self.posted += 1;
        let wqe = RecvWqe {
            count: 1,
            wr_id: self.posted,
            ..RecvWqe::default()
        };
        let entry = [bytes(&wqe), bytes(&sge)].concat();
        let qp = &mut self.qps[which].qp;
        qp.rq.post(&self.guest, &entry);
        self.guest.ring_qp(qp);
    }

    fn post_send(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(self.qps.len())?;
        let opcode = *u.choose(&[
            wr_opcode::SEND,
            wr_opcode::RDMA_READ,
            wr_opcode::RDMA_WRITE,
            wr_opcode::RDMA_READ,
            wr_opcode::RDMA_WRITE_WITH_IMM,
            wr_opcode::SEND_WITH_INV,
            wr_opcode::ATOMIC_CMP_AND_SWP,
            wr_opcode::ATOMIC_FETCH_AND_ADD,
            wr_opcode::LOCAL_INV,
        ])?;
        let flags = u.arbitrary::<u8>()? & (send_flag::FENCE | send_flag::SOLICITED);
        let local = opcode == wr_opcode::LOCAL_INV;
        let atomic = matches!(
            opcode,
            wr_opcode::ATOMIC_CMP_AND_SWP | wr_opcode::ATOMIC_FETCH_AND_ADD
        );
        self.posted += 1;
        let wqe = SendWqe {
            opcode,
            flags: flags | send_flag::SIGNALED,
            count: u16::from(!local),
            wr_id: self.posted,
            // What it is to invalidate is not there.
            imm: 0x7654_3200,
            remote_addr: self.mr.iova,
            rkey: self.mr.key,
            ..SendWqe::default()
        };
        let sge = self.sge(u)?;
        let sge = Sge {
            length: if atomic { 8 } else { sge.length },
            ..sge
        };
        let entry = [bytes(&wqe), bytes(&sge)].concat();
        let qp = &mut self.qps[which].qp;
        qp.sq.post(&self.guest, &entry);
        self.guest.ring_qp(qp);
        Ok(())
    }

    /// Looks at what the device says: completions, events, and what it sends.
    fn take(&mut self) {
        while let Some(cqe) = self.cq.take(&self.guest) {
            assert!(wc_status::name(cqe.status).is_some(), "{cqe:?}");
            let own = self.qps.iter().any(|of| of.qp.number == cqe.qp_num);
            assert!(own && cqe.wr_id <= self.posted, "{cqe:?}");
        }
        loop {
            let event: IwEvent = self
                .guest
                .ask(opcode::IW_NEXT_EVENT, &[0u8; 0])
                .expect("an event");
            if event.kind == iw_event::NONE {
                break;
            }
            self.told(&event);
        }
        self.receive();
    }

    /// Peers take what was sent to them, but those that do not.
    fn receive(&mut self) {
        for peer in &mut self.peers {
            peer.receive();
        }
    }

    fn told(&mut self, event: &IwEvent) {
        if event.kind == iw_event::CONNECT_REQUEST {
            assert_eq!(event.cookie, LISTENER);
            assert!(!self.known.contains_key(&event.connection));
            let own = endpoint(self.address, event.remote.port);
            self.requests.push((event.connection, event.remote != own));
            return;
        }
        let known = self
            .known
            .get_mut(&event.connection)
            .expect("an event of a connection that is known");
        assert_eq!(event.cookie, known.cookie);
        let over = match event.kind {
            iw_event::CONNECT_REPLY | iw_event::ESTABLISHED => {
                assert!(!known.established, "{event:?}");
                known.established = event.status == 0;
                event.status != 0
            }
            kind => {
                assert_eq!(kind, iw_event::CLOSE);
                true
            }
        };
        if over {
            self.known.remove(&event.connection);
            for of in &mut self.qps {
                if of.connection == Some(event.connection) {
                    of.connection = None;
                }
            }
        }
    }

    fn leave(mut self, host: &mut Host) {
        self.take();
        for page in &self.canaries {
            let bytes = self.guest.view.get(page * PAGE, PAGE);
            assert!(bytes.iter().all(|byte| *byte == CANARY), "page {page}");
        }
        // Ports that wait for what may still come are of no use.
        for peer in self.peers.drain(..) {
            peer.reset();
        }
        let mut rounds = 0;
        while self.known.values().any(|known| known.of_peer) {
            host.rounds(1);
            self.take();
            rounds += 1;
            assert!(rounds < ROUNDS, "of peers that have gone: {:?}", self.known);
        }
        host.remove(self.guest);
    }
}

impl Peer {
    fn new(stream: TcpStream, active: bool) -> Self {
        stream.set_nonblocking(true).expect("a socket");
        let _ = stream.set_nodelay(true);
        Self {
            stream,
            active,
            input: Vec::new(),
            streams: false,
            next: [1; 4],
            offset: 0,
            asked: Vec::new(),
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        // What the socket does not take is lost: the next bytes are then something else.
        let _ = self.stream.write(bytes);
    }

    fn reset(self) {
        let now = Some(Duration::ZERO);
        let _ = rustix::net::sockopt::set_socket_linger(&self.stream, now);
    }

    /// Takes what came: a frame, and then FPDUs.
    fn receive(&mut self) {
        let mut space = [0; 4096];
        loop {
            match self.stream.read(&mut space) {
                Ok(0) => break,
                Ok(length) => self.input.extend_from_slice(&space[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if !self.streams {
            let Some(head) = self.input.first_chunk::<FRAME>() else {
                return;
            };
            let key: &[u8] = if self.active {
                b"MPA ID Rep Frame"
            } else {
                b"MPA ID Req Frame"
            };
            assert_eq!(&head[..16], key);
            let length = FRAME + usize::from(u16::from_be_bytes([head[18], head[19]]));
            if self.input.len() < length {
                return;
            }
            self.input.drain(..length);
            self.streams = true;
        }
        loop {
            let Some(length) = self.input.first_chunk::<2>() else {
                return;
            };
            let length = usize::from(u16::from_be_bytes(*length));
            let whole = (2 + length).next_multiple_of(4) + 4;
            if self.input.len() < whole {
                return;
            }
            let (covered, sum) = self.input[..whole].split_at(whole - 4);
            assert_eq!(crc32c::crc32c(covered).to_le_bytes(), sum);
            let ulpdu = covered[2..2 + length].to_vec();
            self.input.drain(..whole);
            self.look(&ulpdu);
        }
    }

    /// Remembers what it is asked for.
    fn look(&mut self, ulpdu: &[u8]) {
        assert!(ulpdu[0] & 3 == 1 && ulpdu[1] >> 6 == 1, "{ulpdu:x?}");
        let word = |at: usize| u32::from_be_bytes(ulpdu[at..at + 4].try_into().expect("a word"));
        match ulpdu[1] & 0xf {
            READ_REQUEST => {
                assert_eq!(ulpdu.len(), 46);
                let offset = u64::from(word(22)) << 32 | u64::from(word(26));
                self.asked.push((word(18), offset, Some(word(30))));
            }
            ATOMIC_REQUEST => self.asked.push((word(22), 0, None)),
            opcode => assert!(opcode <= ATOMIC_RESPONSE, "{ulpdu:x?}"),
        }
    }

    /// A whole SEND, as it should be.
    fn send(&mut self, payload: &[u8]) -> Vec<u8> {
        let msn = self.next[0];
        untagged(SEND, true, [0, 0, msn, 0], payload)
    }

    /// A segment, more or less as it should be.
    fn ulpdu(&mut self, mr: &Mr, read_only: &Mr, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let last = !u.ratio(1, 5)?;
        let near = |u: &mut Unstructured<'_>| -> Result<u32> {
            Ok(if u.ratio(1, 30)? {
                u.arbitrary::<u8>()?.into()
            } else {
                0
            })
        };
        match u.arbitrary::<u8>()? {
            0..=49 => {
                let (stag, offset) = place(mr, read_only, u)?;
                let length = length(u)?;
                Ok(tagged(WRITE, last, stag, offset, &vec![0x11; length]))
            }
            50..=119 => {
                let opcode = u.int_in_range(SEND..=SEND_SOLICITED_INVALIDATE)?;
                let opcode = if u.ratio(3, 4)? { SEND } else { opcode };
                let length = length(u)?;
                let stag = if u.ratio(1, 4)? { mr.key } else { 0 };
                let msn = self.next[0].wrapping_add(near(u)?);
                let offset = self.offset.wrapping_add(near(u)?);
                if last {
                    (self.next[0], self.offset) = (msn.wrapping_add(1), 0);
                } else {
                    self.offset = offset.wrapping_add(length as u32);
                }
                let payload = vec![0x22; length];
                Ok(untagged(
                    opcode,
                    last,
                    [stag, near(u)?, msn, offset],
                    &payload,
                ))
            }
            120..=134 => {
                let msn = self.next[0].wrapping_add(near(u)?);
                self.next[0] = msn.wrapping_add(1);
                let opcode = IMMEDIATE + u.int_in_range(0..=1)?;
                Ok(untagged(opcode, true, [0, 0, msn, 0], &[7; 8]))
            }
            135..=164 => {
                let msn = self.next[1].wrapping_add(near(u)?);
                self.next[1] = msn.wrapping_add(1);
                let (stag, offset) = place(mr, read_only, u)?;
                let length = if u.ratio(1, 20)? {
                    u.arbitrary()?
                } else {
                    length(u)? as u32
                };
                let mut body = 5u32.to_be_bytes().to_vec();
                body.extend(0x50u64.to_be_bytes());
                body.extend(length.to_be_bytes());
                body.extend(stag.to_be_bytes());
                body.extend(offset.to_be_bytes());
                Ok(untagged(READ_REQUEST, true, [0, 1, msn, 0], &body))
            }
            165..=184 => {
                let msn = self.next[1].wrapping_add(near(u)?);
                self.next[1] = msn.wrapping_add(1);
                let (stag, offset) = place(mr, read_only, u)?;
                let mut body = Vec::new();
                for word in [*u.choose(&[0u32, 2, 2, 1])?, 3, stag] {
                    body.extend(word.to_be_bytes());
                }
                for word in [offset & !7, 5, 0x55, 6, u64::MAX] {
                    body.extend(word.to_be_bytes());
                }
                Ok(untagged(ATOMIC_REQUEST, true, [0, 1, msn, 0], &body))
            }
            185..=244 => self.answer(last, u),
            245..=251 => {
                let said: [u8; 8] = u.arbitrary()?;
                let length = u.int_in_range(0..=8usize)?;
                Ok(untagged(TERMINATE, true, [0, 2, 1, 0], &said[..length]))
            }
            _ => {
                let length = u.int_in_range(0..=40)?;
                let mut any = vec![0; length];
                u.fill_buffer(&mut any)?;
                Ok(any)
            }
        }
    }

    /// An answer to what the VM asked for first, or to nothing.
    fn answer(&mut self, last: bool, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let (name, offset, wanted) = self.asked.first().copied().unwrap_or((1, 0, Some(8)));
        let wrong = u.ratio(1, 30)?;
        let name = name ^ u32::from(wrong);
        let Some(left) = wanted else {
            self.asked.remove(0);
            let msn = self.next[3];
            self.next[3] = msn.wrapping_add(1);
            let body = [&name.to_be_bytes()[..], &[9; 8]].concat();
            return Ok(untagged(ATOMIC_RESPONSE, true, [0, 3, msn, 0], &body));
        };
        let part = if last {
            left
        } else {
            left.min(length(u)? as u32)
        };
        // It fits into an FPDU.
        let part = part.min(16_000);
        let last = part == left;
        if last && !self.asked.is_empty() {
            self.asked.remove(0);
        } else if let Some(first) = self.asked.first_mut() {
            *first = (first.0, offset + u64::from(part), Some(left - part));
        }
        let length = part as usize + usize::from(u.ratio(1, 30)?);
        Ok(tagged(
            READ_RESPONSE,
            last,
            name,
            offset,
            &vec![0x33; length],
        ))
    }
}

/// A key and an offset: mostly of what may be written to.
fn place(mr: &Mr, read_only: &Mr, u: &mut Unstructured<'_>) -> Result<(u32, u64)> {
    let offset = 16 * u64::from(u.arbitrary::<u8>()?);
    Ok(match u.arbitrary::<u8>()? {
        0..=3 => (u.arbitrary()?, u.arbitrary()?),
        4..=7 => (read_only.key, read_only.iova + offset),
        8..=11 => (mr.key, mr.iova + mr.length - offset),
        _ => (mr.key, mr.iova + offset),
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<usize> {
    Ok(match u.arbitrary::<u8>()? {
        0..=9 => u.int_in_range(0..=15_000)?,
        10..=29 => 0,
        byte => usize::from(byte - 29),
    })
}

fn tagged(opcode: u8, last: bool, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x81 | u8::from(last) << 6, 0x40 | opcode];
    bytes.extend(stag.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// An untagged segment with these words: STag, queue, sequence number, offset.
fn untagged(opcode: u8, last: bool, words: [u32; 4], payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x01 | u8::from(last) << 6, 0x40 | opcode];
    bytes.extend(words.iter().flat_map(|word| word.to_be_bytes()));
    bytes.extend(payload);
    bytes
}

fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
    bytes.extend(ulpdu);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let sum = crc32c::crc32c(&bytes).to_le_bytes();
    bytes.extend(sum);
    bytes
}

/// A request or a reply.
fn frame(key: &[u8; 16], u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let kind = u.arbitrary::<u8>()?;
    let depth = if u.ratio(1, 8)? { u.arbitrary()? } else { 8u16 };
    let (revision, flags, private) = match kind {
        0..=79 => (1, CRC, vec![4; 3]),
        80..=219 => {
            let both = if kind < 150 { PEER_TO_PEER } else { 0 };
            let rtr = if kind < 150 { RTR_WRITE } else { 0 };
            let depths = [(both | depth).to_be_bytes(), (rtr | depth).to_be_bytes()];
            (2, CRC | ENHANCED, depths.concat())
        }
        220..=229 => (2, CRC | REJECTED, vec![1; 9]),
        230..=239 => (1, CRC, vec![0; u.int_in_range(0..=520)?]),
        _ => (
            u.arbitrary()?,
            u.arbitrary()?,
            u.arbitrary::<[u8; 6]>()?.to_vec(),
        ),
    };
    let mut bytes = key.to_vec();
    bytes.extend([flags, revision]);
    bytes.extend((private.len() as u16).to_be_bytes());
    bytes.extend(private);
    match kind {
        240..=243 => bytes.truncate(u.int_in_range(0..=30)?),
        244..=247 => {
            let at = u.choose_index(bytes.len())?;
            bytes[at] = u.arbitrary()?;
        }
        // A segment comes with it.
        248..=249 => bytes.extend(fpdu(&untagged(SEND, true, [0, 0, 1, 0], b"now"))),
        _ => {}
    }
    Ok(bytes)
}
