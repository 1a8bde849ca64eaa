// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host process's adapter, and the RNIC that each VM sees of it.
//!
//! An [`Adapter`] owns the workers and knows who has which GID. An [`Rnic`] is one VM's device: its
//! objects are in [`Tables`], which workers look at in visits of a bounded turn (crate
//! `vhost-device-rdma-sync`), and which commands and changes of memory or run state close to change
//! them. Whoever has closed them knows that nobody accesses guest memory.
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use serde::Deserialize;
use serde_json::{json, Value};
use virtio_rdma_spec::config::Config;
use virtio_rdma_spec::doorbell::{worker_status, STATUS_STRIDE};
use virtio_rdma_spec::event::{event_type, AsyncEvent, CompletionEvent};
use virtio_rdma_spec::verbs::{qp_state, qp_type};

use crate::engine::notify;
use crate::fabric::local::{Network, Ports};
use crate::memory::{Form, GuestMemory};
use crate::verbs::cq::Cq;
use crate::verbs::fast::FastMr;
use crate::verbs::footprint::Footprint;
use crate::verbs::mr::Mr;
use crate::verbs::qp::Qp;
use crate::verbs::srq::Srq;
use crate::verbs::tables::{Gid, Tables};
use crate::worker::{Loop, Worker};
use vhost_device_rdma_sync::{self as sync, Shared, Visit, Visitor, Visitors};

/// Entries of the GID table.
pub const GID_TABLE_LEN: usize = 32;
/// Longest message, bytes.
pub const MAX_MESSAGE: u64 = 1 << 31;
/// Longest datagram, bytes: the port's MTU.
pub const MAX_DATAGRAM: u64 = 4096;
/// Number of the port.
pub const PORT: u32 = 1;
/// Number of a port's GSI queue pair, as messages name it.
pub const GSI_QPN: u32 = 1;
/// Most workers.
pub const MAX_WORKERS: u16 = 8;
/// Most completion-event queues.
pub const MAX_COMPLETION_QUEUES: u16 = 32;

/// Why an adapter could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The number of workers is not between 1 and [`MAX_WORKERS`].
    #[error("there can be 1 to {MAX_WORKERS} workers, not {0}")]
    Workers(u16),
    /// A worker could not be started.
    #[error("cannot start a worker")]
    Start(#[source] std::io::Error),
}

/// How many objects a VM may have, and how much of our memory their page lists may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Contexts.
    pub contexts: u32,
    /// Protection domains.
    pub pds: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub mws: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// XRC domains.
    pub xrcds: u32,
    /// Attachments to multicast groups.
    pub multicast: u32,
    /// Page lists of all objects, bytes of this process.
    pub footprint: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            contexts: 4096,
            pds: 65536,
            mrs: 1 << 20,
            mws: 1 << 20,
            cqs: 131_072,
            qps: 131_072,
            srqs: 65536,
            xrcds: 4096,
            multicast: 4096,
            footprint: 1 << 30,
        }
    }
}

/// Settings of the process.
#[derive(Debug, Clone)]
pub struct AdapterSettings {
    /// Worker threads.
    pub workers: u16,
    /// How long a worker without work looks for more before it sleeps, at most.
    pub poll_budget: Duration,
    /// CPUs to pin workers to, in turn; empty: none.
    pub cpus: Vec<usize>,
}

impl Default for AdapterSettings {
    fn default() -> Self {
        Self {
            workers: 1,
            poll_budget: Duration::from_micros(50),
            cpus: Vec::new(),
        }
    }
}

/// The link of a device: up, until the operator takes it down.
#[derive(Debug)]
pub struct Link(AtomicBool);

impl Default for Link {
    fn default() -> Self {
        Self(AtomicBool::new(true))
    }
}

impl Link {
    /// Whether it is up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Settings of one VM's RNIC.
#[derive(Debug, Clone)]
pub struct RnicSettings {
    /// Name in logs and status: the socket's path.
    pub name: String,
    /// MAC address of the guest's network interface to pair with; zero: any.
    pub mac: [u8; 6],
    /// VMs of the same network reach each other.
    pub network: String,
    /// Completion-event queues, 1 to [`MAX_COMPLETION_QUEUES`].
    pub completion_queues: u16,
    /// Limits.
    pub limits: Limits,
    /// The link: the same one for all VMs that attach with these settings.
    pub link: Arc<Link>,
}

impl Default for RnicSettings {
    fn default() -> Self {
        Self {
            name: String::new(),
            mac: [0; 6],
            network: "default".to_owned(),
            completion_queues: 4,
            limits: Limits::default(),
            link: Arc::default(),
        }
    }
}

/// Where an RNIC delivers its events: the event virtqueues of its VM.
pub trait EventSink: Send + Sync {
    /// Delivers a completion event to completion-event queue `vector`. If there is no buffer, it is
    /// kept until there is; one per completion queue suffices.
    fn completion(&self, vector: u16, event: CompletionEvent);
    /// Delivers an asynchronous event. If there is no buffer, it is kept until there is, within
    /// reason.
    fn asynchronous(&self, event: AsyncEvent);
    /// Drops what is kept about a completion queue, which is destroyed.
    fn forget_cq(&self, vector: u16, cqn: u32);
    /// Drops what is kept about a queue pair, which is destroyed.
    fn forget_qp(&self, qpn: u32);
    /// Drops what is kept about a shared receive queue, which is destroyed.
    fn forget_srq(&self, srqn: u32);
}

/// The adapter of this process: its workers, and the networks between its VMs.
#[derive(Debug)]
pub struct Adapter {
    workers: Vec<Arc<Worker>>,
    /// The workers, as those who look at the tables of all VMs.
    visitors: Visitors,
    ports: Arc<Ports>,
    rnics: Mutex<Vec<Arc<Rnic>>>,
}

impl Adapter {
    /// Starts the workers.
    ///
    /// # Errors
    /// If their number is out of range, or a thread cannot be started.
    pub fn new(settings: &AdapterSettings) -> Result<Arc<Self>, Error> {
        Self::with(settings, |index, visitor, cpu| {
            Worker::start(index, visitor, settings.poll_budget, cpu)
        })
    }

    /// An adapter whose workers do nothing but what their loops are told to, in the caller's
    /// thread: for measurements and tests.
    ///
    /// # Errors
    /// If the number of workers is out of range, or the system refuses a descriptor.
    pub fn without_threads(settings: &AdapterSettings) -> Result<(Arc<Self>, Vec<Loop>), Error> {
        let mut loops = Vec::new();
        let adapter = Self::with(settings, |index, visitor, _| {
            let (worker, work) = Worker::without_thread(index, visitor, settings.poll_budget)?;
            loops.push(work);
            Ok(worker)
        })?;
        Ok((adapter, loops))
    }

    /// An adapter with the workers that `start` makes of their index and CPU.
    fn with(
        settings: &AdapterSettings,
        mut start: impl FnMut(u16, Visitor, Option<usize>) -> std::io::Result<Arc<Worker>>,
    ) -> Result<Arc<Self>, Error> {
        if settings.workers == 0 || settings.workers > MAX_WORKERS {
            return Err(Error::Workers(settings.workers));
        }
        let (visitors, each) = Visitors::new(settings.workers.into());
        let workers = (0..settings.workers)
            .zip(each)
            .map(|(index, visitor)| {
                let cpu = settings
                    .cpus
                    .get(usize::from(index) % settings.cpus.len().max(1))
                    .copied();
                start(index, visitor, cpu)
            })
            .collect::<Result<_, _>>()
            .map_err(Error::Start)?;
        Ok(Arc::new(Self {
            workers,
            visitors,
            ports: Arc::default(),
            rnics: Mutex::default(),
        }))
    }

    /// Number of workers: doorbell queues of every RNIC.
    #[must_use]
    pub fn workers(&self) -> u16 {
        self.workers.len() as u16
    }

    /// A new RNIC, for a VM that attached.
    #[must_use]
    pub fn attach(self: &Arc<Self>, settings: RnicSettings) -> Arc<Rnic> {
        let counters = (0..self.workers.len())
            .map(|_| CachePadded::new(Counters::default()))
            .collect();
        let mut tables = Tables::new(&settings.limits);
        tables.link_told = settings.link.is_up();
        let rnic = Arc::new(Rnic {
            adapter: Arc::downgrade(self),
            tables: Shared::new(self.visitors.clone(), tables),
            node_guid: node_guid(&settings),
            network: settings.network.as_str().into(),
            workers: self.workers.clone(),
            ports: self.ports.clone(),
            next_worker: AtomicU16::new(0),
            kicks: Mutex::default(),
            features: AtomicU64::new(0),
            up_for_driver: AtomicBool::new(true),
            counters,
            complaints: Mutex::default(),
            settings,
        });
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(rnic.clone());
        for worker in &self.workers {
            worker.add(&rnic);
        }
        rnic
    }

    fn rnics(&self) -> Vec<Arc<Rnic>> {
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Takes the link of a device down or up, whether or not a VM is attached. Returns when nothing
    /// is under way any longer on a link that goes down.
    pub fn set_link(&self, link: &Arc<Link>, up: bool) {
        if link.0.swap(up, Ordering::SeqCst) == up {
            return;
        }
        // An RNIC that attaches from now on sees the new state.
        for rnic in self.rnics() {
            if Arc::ptr_eq(&rnic.settings.link, link) {
                rnic.link_changed();
            }
        }
    }

    /// Objects, counters and state of every VM, for people and programs.
    #[must_use]
    pub fn status(&self) -> Value {
        let rnics = self.rnics();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "resident_bytes": resident_bytes(),
            "workers": self.workers.iter().map(|worker| worker.status()).collect::<Vec<_>>(),
            "lock_waits": sync::waits(),
            "devices": rnics.iter().map(|rnic| rnic.status()).collect::<Vec<_>>(),
        })
    }

    /// Stops the workers.
    pub fn shutdown(&self) {
        for worker in &self.workers {
            worker.stop();
        }
    }
}

/// Resident memory of this process without that of guests, bytes, if the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut lines = status.lines();
    let anonymous = lines.find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = anonymous.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A GUID from the MAC address (EUI-64), or from the name where there is none.
fn node_guid(settings: &RnicSettings) -> u64 {
    let [a, b, c, d, e, f] = settings.mac;
    if settings.mac != [0; 6] {
        return u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    }
    // FNV-1a over the name: stable over restarts, and different for different sockets.
    let hash = settings
        .name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    // Locally administered.
    (hash & !(3 << 56)) | (2 << 56)
}

/// What a worker counts of a VM. Only that worker writes.
#[derive(Debug, Default)]
struct Counters {
    tx_messages: AtomicU64,
    tx_bytes: AtomicU64,
    rx_messages: AtomicU64,
    rx_bytes: AtomicU64,
    rnr_naks: AtomicU64,
    retries: AtomicU64,
    errors: AtomicU64,
    qkey_violations: AtomicU64,
}

/// Adds to a counter that only the calling worker writes.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}

/// Sums of the counters of a VM.
#[derive(Debug, Default, Clone, Copy)]
pub struct Totals {
    /// Messages sent.
    pub tx_messages: u64,
    /// Their bytes.
    pub tx_bytes: u64,
    /// Messages received.
    pub rx_messages: u64,
    /// Their bytes.
    pub rx_bytes: u64,
    /// Messages of ours that met a responder without receive work request.
    pub rnr_naks: u64,
    /// Attempts that nobody answered.
    pub retries: u64,
    /// Work requests completed in error.
    pub errors: u64,
    /// Datagrams with a wrong Q_Key.
    pub qkey_violations: u64,
}

/// Objects of a kind that the status lists, at most.
const LISTED: usize = 1024;

/// Log lines per second about what a guest does wrong.
const COMPLAINTS: u32 = 10;

#[derive(Debug, Default)]
struct Complaints {
    second: u64,
    count: u32,
    suppressed: u64,
}

/// The RNIC of one VM.
pub struct Rnic {
    pub(crate) settings: RnicSettings,
    adapter: Weak<Adapter>,
    node_guid: u64,
    network: Network,
    tables: Shared<Tables>,
    pub(crate) workers: Vec<Arc<Worker>>,
    ports: Arc<Ports>,
    pub(crate) next_worker: AtomicU16,
    kicks: Mutex<Vec<Option<File>>>,
    /// Feature bits that the driver accepted.
    features: AtomicU64,
    /// The driver has the port up.
    up_for_driver: AtomicBool,
    counters: Vec<CachePadded<Counters>>,
    complaints: Mutex<Complaints>,
}

impl fmt::Debug for Rnic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rnic")
            .field("name", &self.settings.name)
            .finish_non_exhaustive()
    }
}

impl Rnic {
    /// The configuration space.
    #[must_use]
    pub fn config(&self) -> Config {
        Config {
            mac: self.settings.mac,
            num_completion_queues: self.settings.completion_queues,
            num_doorbell_queues: self.workers.len() as u16,
            link_up: self.settings.link.is_up().into(),
            node_guid: self.node_guid,
            ..Config::default()
        }
    }

    /// Takes the feature bits that the driver accepted.
    pub fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Relaxed);
    }

    /// Whether the driver accepted a `feature`.
    pub(crate) fn accepted(&self, feature: u32) -> bool {
        self.features.load(Ordering::Relaxed) >> feature & 1 != 0
    }

    /// Whether the port is up. Messages that begin see a change, since it changes the routes of all
    /// queue pairs.
    pub(crate) fn port_is_up(&self) -> bool {
        self.settings.link.is_up() && self.up_for_driver.load(Ordering::SeqCst)
    }

    /// The driver takes the port down or up. Returns when nothing is under way any longer on a port
    /// that goes down.
    pub(crate) fn set_port_state(&self, up: bool) {
        if self.up_for_driver.swap(up, Ordering::SeqCst) != up {
            self.port_changed();
        }
    }

    /// The port may have gone down or come up: queue pairs look for their peers again.
    fn port_changed(&self) {
        self.ports.changed();
        // Turns that began before may still follow the old routes. A writer waits for their end.
        drop(self.tables_mut());
        if self.port_is_up() {
            for worker in &self.workers {
                worker.try_again();
            }
        }
    }

    fn link_changed(&self) {
        self.port_changed();
        self.tell_link(&mut self.tables_mut());
    }

    /// Tells the driver that the link is not as it knows it, if that is so and the VM runs.
    fn tell_link(&self, tables: &mut Tables) {
        let up = self.settings.link.is_up();
        let Some(sink) = tables.sink.as_ref().filter(|_| tables.link_told != up) else {
            return;
        };
        sink.asynchronous(AsyncEvent {
            event_type: if up {
                event_type::PORT_ACTIVE
            } else {
                event_type::PORT_ERR
            },
            number: PORT,
            ..AsyncEvent::default()
        });
        tables.link_told = up;
    }

    /// The network whose VMs reach each other.
    pub(crate) fn network(&self) -> &Network {
        &self.network
    }

    pub(crate) fn ports(&self) -> &Ports {
        &self.ports
    }

    /// The tables, for a worker that looks around, if nobody is changing them.
    #[inline(always)]
    pub(crate) fn visit<'a>(&'a self, visit: &'a Visit<'_>) -> Option<&'a Tables> {
        self.tables.visit(visit)
    }

    /// The tables. Not for workers: see [`Self::visit`].
    pub(crate) fn tables(&self) -> sync::Read<'_, Tables> {
        self.tables.read()
    }

    /// The tables, to change them. Returns when no access to guest memory is under way.
    pub(crate) fn tables_mut(&self) -> sync::Write<'_, Tables> {
        self.tables.write()
    }

    /// Replaces guest memory: everything that was resolved is resolved anew. Returns when nobody
    /// uses the old memory.
    pub fn set_memory(&self, memory: Option<GuestMemory>) {
        let mut tables = self.tables_mut();
        let tables = &mut *tables;
        tables.memory.clone_from(&memory);
        let memory = memory.as_ref();
        tables.status_page = tables.status_page.take().map(|page| page.rebase(memory));
        for context in tables.contexts.iter_mut() {
            context.doorbell = context.doorbell.rebase(memory);
        }
        tables.keys.rebase(memory);
        for cq in tables.cqs.iter_mut() {
            cq.rebase(memory);
        }
        for qp in tables.qps.iter_mut() {
            qp.rebase(memory);
        }
        for srq in tables.srqs.iter_mut() {
            srq.rebase(memory);
        }
    }

    /// The front end runs the rings: the VM is served from now on.
    pub fn start(&self, sink: Arc<dyn EventSink>) {
        let mut tables = self.tables_mut();
        tables.sink = Some(sink);
        tables.running = true;
        self.tell_link(&mut tables);
        // Until the workers said so themselves, they may be asleep.
        announce_all(&tables, self.workers.len(), worker_status::SLEEPING);
        for (_, qp) in tables.qps.iter() {
            qp.worker.schedule(qp);
        }
        // Their timers may have ended meanwhile.
        for (_, cq) in tables.cqs.iter() {
            if cq.release() {
                notify(&tables, cq);
            }
        }
        drop(tables);
        for worker in &self.workers {
            worker.announce_again();
        }
    }

    /// The front end stops the rings. Returns when the VM is quiet: nobody accesses its memory
    /// until [`Self::start`].
    pub fn stop(&self) {
        let mut tables = self.tables_mut();
        tables.running = false;
        tables.sink = None;
    }

    /// Destroys all objects, as a device reset does.
    pub fn reset(self: &Arc<Self>) {
        let mut tables = self.tables_mut();
        for gid in tables.gids.iter_mut().filter_map(Option::take) {
            self.ports.release(gid, self);
        }
        for qp in tables.qps.clear() {
            qp.dead.store(true, Ordering::SeqCst);
        }
        tables.gsi = None;
        tables.srqs.clear();
        tables.xrcds.clear();
        let groups: BTreeSet<Gid> = tables.multicast.iter().map(|(_, gid)| *gid).collect();
        for gid in groups {
            self.ports.leave(gid, self, None);
        }
        tables.multicast.clear();
        tables.contexts.clear();
        tables.keys.clear();
        tables.cqs.clear();
        tables.pds.clear();
        tables.status_page = None;
        // A driver that begins reads the configuration.
        tables.link_told = self.settings.link.is_up();
        self.up_for_driver.store(true, Ordering::SeqCst);
        // What is still in use is not this VM's any longer.
        tables.footprint = Footprint::default();
        drop(tables);
        // Their timers hold queue pairs that are gone.
        for worker in &self.workers {
            worker.announce_again();
        }
    }

    /// The VM went away: all objects are destroyed, and the adapter forgets this RNIC.
    pub fn detach(self: &Arc<Self>) {
        self.stop();
        self.reset();
        self.set_memory(None);
        for (queue, worker) in (0..).zip(&self.workers) {
            self.set_doorbell_kick(queue, None);
            worker.remove(self);
        }
        if let Some(adapter) = self.adapter.upgrade() {
            let mut rnics = adapter.rnics.lock().unwrap_or_else(PoisonError::into_inner);
            rnics.retain(|other| !Arc::ptr_eq(other, self));
        }
    }

    /// Takes the eventfd that the VM notifies doorbell queue `queue` by, or takes it back.
    pub fn set_doorbell_kick(&self, queue: u16, fd: Option<File>) {
        let Some(worker) = self.workers.get(usize::from(queue)) else {
            return;
        };
        let mut kicks = self.kicks.lock().unwrap_or_else(PoisonError::into_inner);
        kicks.resize_with(self.workers.len(), || None);
        if let Some(kick) = kicks.get_mut(usize::from(queue)) {
            if let Some(old) = kick.take() {
                worker.remove_kick(&old);
            }
            if let Some(new) = fd {
                worker.add_kick(&new);
                *kick = Some(new);
            }
        }
    }

    /// Executes a control command; returns the response.
    #[must_use]
    pub fn execute(self: &Arc<Self>, command: &[u8]) -> Vec<u8> {
        crate::control::execute(self, command)
    }

    /// Logs what the guest did wrong, a few times a second at most.
    pub(crate) fn complain(&self, what: fmt::Arguments<'_>) {
        let second = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs());
        let mut complaints = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if complaints.second != second {
            if complaints.suppressed != 0 {
                log::warn!(
                    "{}: {} more messages suppressed",
                    self.settings.name,
                    complaints.suppressed
                );
            }
            *complaints = Complaints {
                second,
                ..Complaints::default()
            };
        }
        complaints.count += 1;
        if complaints.count <= COMPLAINTS {
            log::warn!("{}: {what}", self.settings.name);
        } else {
            complaints.count = COMPLAINTS;
            complaints.suppressed += 1;
        }
    }

    fn counters(&self, worker: u16) -> Option<&Counters> {
        self.counters
            .get(usize::from(worker))
            .map(|counters| &**counters)
    }

    pub(crate) fn count_sent(&self, worker: u16, messages: u64, bytes: u64) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.tx_messages, messages);
            add(&counters.tx_bytes, bytes);
        }
    }

    /// Messages that a worker has sent, modulo 2^64.
    pub(crate) fn sent(&self, worker: u16) -> u64 {
        self.counters(worker)
            .map_or(0, |counters| counters.tx_messages.load(Ordering::Relaxed))
    }

    pub(crate) fn count_received(&self, worker: u16, messages: u64, bytes: u64) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.rx_messages, messages);
            add(&counters.rx_bytes, bytes);
        }
    }

    pub(crate) fn count_rnr(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.rnr_naks, 1);
        }
    }

    pub(crate) fn count_retry(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.retries, 1);
        }
    }

    pub(crate) fn count_error(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.errors, 1);
        }
    }

    pub(crate) fn count_qkey_violation(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.qkey_violations, 1);
        }
    }

    /// Sums of all counters.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.counters.iter().fold(Totals::default(), |t, c| {
            let sum = |total: u64, counter: &AtomicU64| {
                total.wrapping_add(counter.load(Ordering::Relaxed))
            };
            Totals {
                tx_messages: sum(t.tx_messages, &c.tx_messages),
                tx_bytes: sum(t.tx_bytes, &c.tx_bytes),
                rx_messages: sum(t.rx_messages, &c.rx_messages),
                rx_bytes: sum(t.rx_bytes, &c.rx_bytes),
                rnr_naks: sum(t.rnr_naks, &c.rnr_naks),
                retries: sum(t.retries, &c.retries),
                errors: sum(t.errors, &c.errors),
                qkey_violations: sum(t.qkey_violations, &c.qkey_violations),
            }
        })
    }

    /// Objects, counters and state, for people and programs.
    #[must_use]
    pub fn status(&self) -> Value {
        let totals = self.totals();
        // Each list by itself, and not all of a long one: who changes the tables waits meanwhile.
        let qps: Vec<_> = self.tables().qps.iter().take(LISTED).map(list_qp).collect();
        let cqs: Vec<_> = self.tables().cqs.iter().take(LISTED).map(list_cq).collect();
        let srqs: Vec<_> = self
            .tables()
            .srqs
            .iter()
            .take(LISTED)
            .map(list_srq)
            .collect();
        let mrs: Vec<_> = self
            .tables()
            .keys
            .regions()
            .take(LISTED)
            .map(list_mr)
            .collect();
        let fast_mrs: Vec<_> = self
            .tables()
            .keys
            .fast_regions()
            .take(LISTED)
            .map(list_fast_mr)
            .collect();
        let tables = self.tables();
        let [a, b, c, d, e, f] = self.settings.mac;
        let gids = tables.gids.iter().enumerate().filter_map(|(index, gid)| {
            let gid = std::net::Ipv6Addr::from((*gid)?);
            Some(json!({ "index": index, "gid": gid.to_string() }))
        });
        json!({
            "name": self.settings.name,
            "mac": format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"),
            "network": self.settings.network,
            "node_guid": format!("{:016x}", self.node_guid),
            "link_up": self.settings.link.is_up(),
            "port_up": self.port_is_up(),
            "running": tables.running,
            "memory_bytes": tables.memory.as_ref().map_or(0, GuestMemory::size),
            "footprint_bytes": tables.footprint.bytes(),
            "gids": gids.collect::<Vec<_>>(),
            "counts": {
                "contexts": tables.contexts.len(),
                "pds": tables.pds.len(),
                "mrs": tables.keys.mrs(),
                "mws": tables.keys.mws(),
                "cqs": tables.cqs.len(),
                "qps": tables.qps.len(),
                "srqs": tables.srqs.len(),
                "xrcds": tables.xrcds.len(),
            },
            "counters": {
                "tx_messages": totals.tx_messages,
                "tx_bytes": totals.tx_bytes,
                "rx_messages": totals.rx_messages,
                "rx_bytes": totals.rx_bytes,
                "rnr_naks": totals.rnr_naks,
                "retries": totals.retries,
                "errors": totals.errors,
                "qkey_violations": totals.qkey_violations,
            },
            "qps": qps,
            "cqs": cqs,
            "mrs": mrs,
            "fast_mrs": fast_mrs,
            "srqs": srqs,
        })
    }
}

fn list_qp((qpn, qp): (u32, &Arc<Qp>)) -> Value {
    let attr = qp.query();
    json!({
        "qpn": qpn,
        "type": qp_type::name(qp.qp_type).unwrap_or("?"),
        "state": qp_state::name(attr.qp_state).unwrap_or("?"),
        "dest_qpn": attr.dest_qp_num,
        "dest_gid": std::net::Ipv6Addr::from(attr.av.dgid).to_string(),
        "pd": qp.pd,
        "send_cq": qp.send_cq.as_ref().map(|cq| cq.number),
        "recv_cq": qp.recv_cq.as_ref().map(|cq| cq.number),
        "srq": qp.srq.as_ref().map(|srq| srq.number),
        "context": qp.context,
        "worker": qp.worker.index,
        "slot": qp.slot,
        "sends": qp.requester().position(),
        "receives": qp.responder().position(),
    })
}

fn list_cq((cqn, cq): (u32, &Arc<Cq>)) -> Value {
    json!({
        "cqn": cqn,
        "entries": cq.entries(),
        "vector": cq.vector,
        "completions": cq.position(),
        "users": cq.users.load(Ordering::Relaxed),
        "error": cq.errored(),
    })
}

fn list_srq((srqn, srq): (u32, &Arc<Srq>)) -> Value {
    json!({
        "srqn": srqn,
        "pd": srq.pd,
        "entries": srq.entries(),
        "limit": srq.limit(),
        "receives": srq.position(),
        "xrcd": srq.xrc.as_ref().map(|xrc| xrc.domain),
        "users": srq.users.load(Ordering::Relaxed),
    })
}

fn list_mr(mr: &Mr) -> Value {
    json!({
        "key": mr.key,
        "pd": mr.pd,
        "access": mr.access,
        "iova": mr.iova,
        "length": mr.length,
        "pages": mr.backing.count(),
    })
}

fn list_fast_mr((index, region): (u32, &FastMr)) -> Value {
    json!({
        "index": index,
        "pd": region.pd,
        "max_pages": region.max_pages,
        "blocks": region.form == Form::Blocks,
        "registered": region.describe(list_mr),
    })
}

/// Writes a worker's status word for the guest.
pub(crate) fn announce(tables: &Tables, worker: u16, status: u32) {
    if !tables.running {
        return;
    }
    if let Some(word) = tables
        .status_page
        .as_ref()
        .and_then(|page| page.half_word(u64::from(worker) * STATUS_STRIDE as u64))
    {
        word.store(status.to_le(), Ordering::SeqCst);
    }
}

/// Writes the status words of all workers.
pub(crate) fn announce_all(tables: &Tables, workers: usize, status: u32) {
    for worker in 0..workers {
        announce(tables, worker as u16, status);
    }
}
