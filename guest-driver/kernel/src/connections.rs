// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Connections of iWARP: iw_cm asks for them, accepts them and listens; the device makes them and
//! tells by events how they went (specification: "Connections of iWARP").
//!
//! A connection or listener that the device knows is entered under a cookie, with a reference to
//! what iw_cm has of it, until the device has told, or the driver knows, that it is over. Cookies
//! are not used again, so a late event finds nothing.
//!
//! One lock is held while a command about connections is under way and while an event is delivered.
//! So no event comes before its command has returned, and none after its listener is gone. iw_cm
//! takes events in a fixed order and stops the kernel at any other: each connection gets
//! CONNECT_REPLY or ESTABLISHED once, and then, if it was there, CLOSE once, whatever the device
//! says.
//!
//! iw_cm keeps a reference to a queue pair as long as it wants events of its connection. When the
//! last one is given back, the connection is forgotten here, too: nothing of iw_cm is held, and
//! called, longer than its users know of it.
use crate::device::Device;
use crate::sys::error::{Errno, Result};
use crate::sys::iw::{local_address, CmEvent, CmId, ConnParam, Kind};
use crate::sys::sync::{sleep, which, Completion, Locked};
use crate::sys::table::Map;
use crate::targets::QpTarget;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use virtio_rdma_spec::command::{opcode, HandleResponse};
use virtio_rdma_spec::iwarp::{
    iw_event, IwAccept, IwConnect, IwEndpoint, IwEvent, IwListen, IwReject, MAX_PRIVATE_DATA,
};
use virtio_rdma_spec::verbs::qp_state;

/// In what iw_cm keeps of a connection for the driver: it was accepted, and the rest is its cookie.
/// Before it is what the device calls the connection.
const ACCEPTED: u64 = 1 << 63;
/// How long events wait when there is no memory to ask for them.
const RETRY_MS: u32 = 20;

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It was asked for: CONNECT_REPLY comes.
    Asked,
    /// It was accepted: ESTABLISHED comes.
    Accepted,
    /// It is there: CLOSE comes.
    Connected,
}

/// What a cookie stands for.
enum Entry {
    Listener {
        id: CmId,
        /// On the device.
        handle: u32,
        local: IwEndpoint,
    },
    Connection {
        id: CmId,
        qpn: u32,
        stage: Stage,
    },
}

struct State {
    entries: Map<Entry>,
    next_cookie: u64,
    /// Nobody takes events any longer.
    closed: bool,
}

/// All connections and listeners of a device.
pub(crate) struct Connections(Locked<State>);

/// Who refers to a queue pair of iWARP, and its connection.
pub(crate) struct QpReferences {
    /// One for its owner, from `publish` on, and one for each connection of iw_cm.
    count: AtomicU32,
    idle: Completion,
    /// Its connection; zero: none. Under the lock of the connections.
    cookie: AtomicU64,
}

impl QpReferences {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            count: AtomicU32::new(0),
            idle: Completion::new()?,
            cookie: AtomicU64::new(0),
        })
    }

    /// From here on it can be referred to.
    pub(crate) fn publish(&self) {
        self.count.store(1, Ordering::Release);
    }

    /// Takes a reference; false if it cannot be had (yet, or any longer). Any context.
    pub(crate) fn take(&self) -> bool {
        let take = |count: u32| (count != 0).then(|| count.saturating_add(1));
        self.count
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, take)
            .is_ok()
    }

    /// Gives one back; returns how many are left.
    fn give_back(&self) -> u32 {
        let left = self.count.fetch_sub(1, Ordering::AcqRel).wrapping_sub(1);
        if left == 0 {
            self.idle.complete();
        }
        left
    }

    /// Does only the one that asks refer to it, beside its owner?
    fn is_free(&self) -> bool {
        self.cookie.load(Ordering::Relaxed) == 0 && self.count.load(Ordering::Acquire) == 2
    }
}

/// Private data as commands have it.
fn private_data(from: &[u8]) -> Result<([u8; 256], u16)> {
    let length = u16::try_from(from.len()).map_err(|_| Errno::EINVAL)?;
    let mut to = [0; 256];
    if length > MAX_PRIVATE_DATA {
        return Err(Errno::EINVAL);
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
    Ok((to, length))
}

fn narrow(depth: u32) -> Result<u16> {
    u16::try_from(depth).map_err(|_| Errno::EINVAL)
}

/// Does a listener with this address listen at all addresses?
fn is_wildcard(addr: &[u8; 16]) -> bool {
    matches!(addr, [.., 0, 0, 0, 0]) && (is_v4(addr) || addr.iter().all(|byte| *byte == 0))
}

/// Is it an address of IPv4, mapped to IPv6?
fn is_v4(addr: &[u8; 16]) -> bool {
    matches!(addr, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..])
}

impl Connections {
    pub(crate) fn new() -> Result<Self> {
        let state = State {
            entries: Map::new()?,
            next_cookie: 1,
            closed: false,
        };
        Locked::new_of(which::CONNECTIONS, state).map(Self)
    }

    /// Asks for a connection.
    pub(crate) fn connect(&self, device: &Device, id: CmId, param: &ConnParam<'_>) -> Result<()> {
        let (local, remote) = (id.local()?, id.remote()?);
        let (private_data, private_length) = private_data(param.private_data)?;
        let mut body = IwConnect {
            local,
            remote,
            qpn: param.qpn,
            ord: narrow(param.ord)?,
            ird: narrow(param.ird)?,
            private_length,
            private_data,
            ..Default::default()
        };
        self.0.with(|state| {
            state.connection(device, id, param.qpn, Stage::Asked, |cookie| {
                body.cookie = cookie;
                device
                    .command(opcode::IW_CONNECT, &body)
                    .map(|HandleResponse { .. }| ())
            })
        })
    }

    /// Accepts a connection. One that cannot be accepted is closed.
    pub(crate) fn accept(&self, device: &Device, id: CmId, param: &ConnParam<'_>) -> Result<()> {
        if id.data() & ACCEPTED != 0 {
            return Err(Errno::EINVAL);
        }
        let connection = id.data() as u32;
        self.try_accept(device, id, connection, param)
            .inspect_err(|_| {
                // iw_cm does not reject it any more. The device may have closed it already.
                let _ = reject(device, connection, &[]);
            })
    }

    fn try_accept(
        &self,
        device: &Device,
        id: CmId,
        connection: u32,
        param: &ConnParam<'_>,
    ) -> Result<()> {
        let (private_data, private_length) = private_data(param.private_data)?;
        let mut body = IwAccept {
            connection,
            qpn: param.qpn,
            ord: narrow(param.ord)?,
            ird: narrow(param.ird)?,
            private_length,
            private_data,
            ..Default::default()
        };
        self.0.with(|state| {
            state.connection(device, id, param.qpn, Stage::Accepted, |cookie| {
                body.cookie = cookie;
                device
                    .simple_command(opcode::IW_ACCEPT, &body)
                    .map_err(forgotten)
            })
        })
    }

    /// Rejects a connection.
    pub(crate) fn reject(&self, device: &Device, id: &CmId, data: &[u8]) -> Result<()> {
        let connection = id.data();
        if connection & ACCEPTED != 0 {
            // From here on iw_cm stops the kernel at any event of it.
            self.0
                .with(|state| state.forget(device, connection & !ACCEPTED));
            return Err(Errno::ECONNRESET);
        }
        reject(device, connection as u32, data).map_err(forgotten)
    }

    /// Listens.
    pub(crate) fn listen(&self, device: &Device, id: CmId, backlog: u32) -> Result<()> {
        let local = id.local()?;
        self.0.with(|state| {
            let cookie = state.cookie(device)?;
            let body = IwListen {
                cookie,
                local,
                backlog,
                reserved: 0,
            };
            let HandleResponse { handle, .. } = device.command(opcode::IW_LISTEN, &body)?;
            id.set_data(cookie);
            let entry = Entry::Listener { id, handle, local };
            state.entries.insert(cookie, entry).inspect_err(|_| {
                device.must_destroy(opcode::IW_DESTROY_LISTEN, handle);
            })
        })
    }

    /// Listens no longer: when this returns, no event of it is delivered any more.
    pub(crate) fn destroy_listen(&self, device: &Device, id: &CmId) {
        let cookie = id.data();
        self.0.with(|state| {
            id.set_data(0);
            // A device that was lost has forgotten it.
            if let Some(Entry::Listener { handle, .. }) = state.entries.get(cookie) {
                let handle = *handle;
                device.must_destroy(opcode::IW_DESTROY_LISTEN, handle);
                drop(state.entries.remove(cookie));
            }
        });
    }

    /// Delivers an event of the device.
    fn event(&self, device: &Device, event: &IwEvent) {
        self.0.with(|state| match event.kind {
            iw_event::CONNECT_REQUEST => state.request(device, event),
            iw_event::CONNECT_REPLY | iw_event::ESTABLISHED | iw_event::CLOSE => {
                state.connection_event(device, event);
            }
            kind => device
                .virtio()
                .error("an event of a connection of unknown type", i64::from(kind)),
        });
    }

    /// The driver brought a queue pair to an end: its connection is over.
    pub(crate) fn ended(&self, device: &Device, qp: &QpReferences) {
        self.0.with(|state| state.ended(device, qp));
    }

    /// A queue pair is gone on the device: its connection is over. Returns when nobody refers to it
    /// any longer.
    pub(crate) fn qp_gone(&self, device: &Device, qp: &QpReferences) {
        let left = self.0.with(|state| {
            state.ended(device, qp);
            qp.cookie.store(0, Ordering::Relaxed);
            qp.give_back()
        });
        if left != 0 {
            qp.idle.wait_forever();
        }
    }

    /// iw_cm refers to a queue pair no longer. If nobody does, its connection was given up, perhaps
    /// while it was being closed: its events are for nobody.
    pub(crate) fn released(&self, device: &Device, qp: &QpReferences) {
        self.0.with(|state| {
            // Taken before the last reference goes, and with it the queue pair.
            let cookie = qp.cookie.load(Ordering::Relaxed);
            if qp.give_back() == 1 && cookie != 0 {
                state.forget(device, cookie);
            }
        });
    }

    /// The device was lost: all connections are over, and listeners hear nothing any more.
    pub(crate) fn lost(&self, device: &Device) {
        self.0.with(|state| state.end_all(device));
    }

    /// Events are taken no longer: as [`Self::lost`], and nothing new can be asked for.
    pub(crate) fn close(&self, device: &Device) {
        self.0.with(|state| {
            state.closed = true;
            state.end_all(device);
        });
    }
}

impl State {
    /// One for something new.
    fn cookie(&mut self, device: &Device) -> Result<u64> {
        if self.closed || device.commands().is_dead() {
            return Err(Errno::ENETDOWN);
        }
        let cookie = self.next_cookie;
        self.next_cookie = cookie.wrapping_add(1);
        Ok(cookie)
    }

    /// Enters a connection of a queue pair, which the device is asked for by `command`.
    fn connection(
        &mut self,
        device: &Device,
        id: CmId,
        qpn: u32,
        stage: Stage,
        command: impl FnOnce(u64) -> Result<()>,
    ) -> Result<()> {
        let cookie = self.cookie(device)?;
        let mut free = false;
        device.qps().with(qpn, |qp| {
            free = qp.references().is_some_and(QpReferences::is_free);
        });
        if !free {
            return Err(Errno::EINVAL);
        }
        let entry = Entry::Connection { id, qpn, stage };
        self.entries.insert(cookie, entry)?;
        match command(cookie) {
            Ok(()) => {
                device.qps().with(qpn, |qp| {
                    if let Some(references) = qp.references() {
                        references.cookie.store(cookie, Ordering::Relaxed);
                    }
                });
                if stage == Stage::Accepted {
                    if let Some(Entry::Connection { id, .. }) = self.entries.get(cookie) {
                        id.set_data(cookie | ACCEPTED);
                    }
                    // The first message may come, and be answered, before ESTABLISHED is told.
                    changed(device, qpn, cookie, qp_state::RTS);
                }
                Ok(())
            }
            Err(error) => {
                drop(self.entries.remove(cookie));
                Err(if device.commands().is_dead() {
                    Errno::ENETDOWN
                } else {
                    error
                })
            }
        }
    }

    /// A peer wants a connection.
    fn request(&mut self, device: &Device, event: &IwEvent) {
        if self.try_request(device, event).is_err() {
            // The device may have closed it already.
            let _ = reject(device, event.connection, &[]);
        }
    }

    fn try_request(&mut self, device: &Device, event: &IwEvent) -> Result<()> {
        let Some(Entry::Listener { id, local, .. }) = self.entries.get(event.cookie) else {
            return Err(Errno::ENOENT);
        };
        let remote = &event.remote;
        let everywhere = is_wildcard(&local.addr);
        let both_families = everywhere && !is_v4(&local.addr) && !id.one_family();
        if !both_families && is_v4(&local.addr) != is_v4(&remote.addr) {
            return Err(Errno::EAFNOSUPPORT);
        }
        // Users look up the interface by this: it has to be an address of the guest, while the
        // device may have another, or say none.
        let addr = if everywhere {
            local_address(device.ib(), remote, event.local.addr).ok_or(Errno::ENETDOWN)?
        } else {
            local.addr
        };
        let local = IwEndpoint { addr, ..*local };
        let event = CmEvent {
            request: Some((&local, remote, event.connection)),
            ..cm_event(Kind::ConnectRequest, Ok(()), event)
        };
        id.deliver(device.ib(), &event)
    }

    /// An event of a connection.
    fn connection_event(&mut self, device: &Device, event: &IwEvent) {
        let Some(Entry::Connection { id, qpn, stage }) = self.entries.get(event.cookie) else {
            // It is over already.
            return;
        };
        let status = Errno::check_status(event.status);
        let (kind, expected) = match event.kind {
            iw_event::CONNECT_REPLY => (Kind::ConnectReply, Stage::Asked),
            iw_event::ESTABLISHED => (Kind::Established, Stage::Accepted),
            _ => return self.end(device, event.cookie, status),
        };
        if *stage != expected {
            device.virtio().error(
                "an event of a connection that is not awaited",
                i64::from(event.kind),
            );
            return;
        }
        match (status, expected) {
            (Ok(()), _) => {}
            (_, Stage::Asked) => return self.fail(device, event, status),
            _ => return self.end(device, event.cookie, status),
        }
        *stage = Stage::Connected;
        changed(device, *qpn, event.cookie, qp_state::RTS);
        deliver(device, id, &cm_event(kind, Ok(()), event));
    }

    /// A connection that was asked for did not come about.
    fn fail(&mut self, device: &Device, event: &IwEvent, status: Result<()>) {
        let Some(entry) = self.entries.remove(event.cookie) else {
            return;
        };
        if let Entry::Connection { id, qpn, .. } = &*entry {
            unmark(device, *qpn, event.cookie);
            deliver(device, id, &cm_event(Kind::ConnectReply, status, event));
        }
    }

    /// A connection is over.
    fn end(&mut self, device: &Device, cookie: u64, status: Result<()>) {
        let Some(entry) = self.entries.remove(cookie) else {
            return;
        };
        if let Entry::Connection { id, qpn, stage } = &*entry {
            if *stage != Stage::Asked {
                changed(device, *qpn, cookie, qp_state::ERR);
            }
            unmark(device, *qpn, cookie);
            end(device, id, *stage, status);
        }
    }

    fn ended(&mut self, device: &Device, qp: &QpReferences) {
        let cookie = qp.cookie.load(Ordering::Relaxed);
        if cookie != 0 {
            self.end(device, cookie, Ok(()));
        }
    }

    /// Drops a connection that nobody wants to hear of.
    fn forget(&mut self, device: &Device, cookie: u64) {
        if let Some(entry) = self.entries.remove(cookie) {
            if let Entry::Connection { qpn, .. } = &*entry {
                unmark(device, *qpn, cookie);
            }
        }
    }

    fn end_all(&mut self, device: &Device) {
        while let Some(cookie) = self.entries.first() {
            self.end(device, cookie, Err(Errno::ECONNRESET));
        }
    }
}

/// The event of iw_cm for one of the device.
fn cm_event(kind: Kind, status: Result<()>, event: &IwEvent) -> CmEvent<'_> {
    let length = usize::from(event.private_length.min(MAX_PRIVATE_DATA));
    CmEvent {
        depth: (event.ord, event.ird),
        private_data: event.private_data.get(..length).unwrap_or(&[]),
        ..CmEvent::new(kind, status)
    }
}

/// The last events of a connection.
fn end(device: &Device, id: &CmId, stage: Stage, status: Result<()>) {
    match stage {
        Stage::Asked => {
            let reason = Err(status.err().unwrap_or(Errno::ECONNRESET));
            deliver(device, id, &CmEvent::new(Kind::ConnectReply, reason));
        }
        Stage::Accepted => {
            // iw_cm knows no connection that was accepted and did not come about: it was there for
            // no time.
            deliver(device, id, &CmEvent::new(Kind::Established, Ok(())));
            deliver(device, id, &CmEvent::new(Kind::Close, status));
        }
        Stage::Connected => deliver(device, id, &CmEvent::new(Kind::Close, status)),
    }
}

/// Tells iw_cm of an event that it has to know of: rather without private data than not at all.
fn deliver(device: &Device, id: &CmId, event: &CmEvent<'_>) {
    let ib = device.ib();
    let bare = CmEvent {
        private_data: &[],
        ..*event
    };
    let told = id.deliver(ib, event).or_else(|_| id.deliver(ib, &bare));
    if let Err(error) = told {
        device
            .virtio()
            .failed("an event of a connection was not taken", error);
    }
}

/// Runs `what` on the queue pair with this number, if it is the one with this connection: the
/// device gives the number of one that it destroyed to another.
fn with_qp(device: &Device, qpn: u32, cookie: u64, what: impl FnOnce(&QpTarget, &QpReferences)) {
    device.qps().with(qpn, |qp| match qp.references() {
        Some(references) if references.cookie.load(Ordering::Relaxed) == cookie => {
            what(qp, references);
        }
        _ => {}
    });
}

/// Its queue pair has the connection no longer.
fn unmark(device: &Device, qpn: u32, cookie: u64) {
    with_qp(device, qpn, cookie, |_, references| {
        references.cookie.store(0, Ordering::Relaxed);
    });
}

/// The device took a queue pair to this state by itself: the kernel's data path has to know.
fn changed(device: &Device, qpn: u32, cookie: u64, state: u8) {
    with_qp(device, qpn, cookie, |qp, _| {
        if let Some(kernel) = qp.kernel() {
            kernel.changed(state);
        }
    });
}

fn reject(device: &Device, connection: u32, data: &[u8]) -> Result<()> {
    let (private_data, private_length) = private_data(data)?;
    let body = IwReject {
        connection,
        private_length,
        private_data,
        ..Default::default()
    };
    device.simple_command(opcode::IW_REJECT, &body)
}

/// A connection that the device does not know any longer: the peer has given it up.
fn forgotten(error: Errno) -> Errno {
    if error == Errno::ENOENT {
        Errno::ECONNRESET
    } else {
        error
    }
}

impl Device {
    /// Takes all events of connections from the device and delivers them; a work item.
    pub(crate) fn take_connection_events(&self) {
        while !self.is_closing() {
            match self.command::<_, IwEvent>(opcode::IW_NEXT_EVENT, &[0u8; 0]) {
                Ok(event) if event.kind == iw_event::NONE => return,
                Ok(event) => self.connections().event(self, &event),
                Err(_) if self.commands().is_dead() => return,
                Err(Errno::ENOMEM) => sleep(RETRY_MS),
                Err(error) => {
                    self.virtio()
                        .failed("events of connections cannot be taken", error);
                    return;
                }
            }
        }
    }
}
