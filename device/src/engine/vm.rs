// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM as the engine knows it: its tables, what its driver accepted, its counters, and where
//! warnings about it go.
//!
//! The engine itself does no I/O, writes no log and reads no clock. What it needs of the world
//! around it are two traits, which a test can replace: [`Schedule`], the worker that runs queue
//! pairs, and [`Warn`], the log.
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use crossbeam_utils::CachePadded;
use serde::Deserialize;
use vhost_device_rdma_sync::{self as sync, ReadSection, Readers, Shared};

use virtio_rdma_spec::verbs::{mtu, wc_status};

use super::binding::serial;
use super::queue_pair::Qp;
use super::share::{Caps, WorkerShare};
use super::tables::Tables;
use crate::footprint::Footprint;
use crate::limits::Limits;
use crate::verbs::cq::Cq;
use crate::verbs::numbers::Order;
use crate::verbs::Features;

/// Name of a network. To clone it allocates nothing.
pub(crate) type Network = Arc<str>;

/// What runs queue pairs: a worker, as other threads and peers see it.
pub trait Schedule: Send + Sync + fmt::Debug {
    /// Has a queue pair polled soon.
    fn schedule(&self, qp: &Arc<Qp>);
    /// Raises the event that a completion queue of `vm` holds back when its time is over.
    fn hold(&self, vm: &Weak<Vm>, cq: &Arc<Cq>);
}

/// Where warnings go about what a guest does wrong. They may be many: it is for the receiver to
/// bound what becomes of them.
pub trait Warn: Send + Sync {
    /// What the guest's VM is called.
    fn name(&self) -> &str;

    /// One line.
    fn warn(&self, what: fmt::Arguments<'_>);
}

/// The link of a device: up, until the operator takes it down, or the interface of the host goes down
/// that frames leave by.
#[derive(Debug)]
pub struct Link {
    up_for_operator: AtomicBool,
    interface_is_up: AtomicBool,
    /// The path MTU of that interface (`mtu`), once it was another one than at the start.
    active_mtu: AtomicU8,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            up_for_operator: AtomicBool::new(true),
            interface_is_up: AtomicBool::new(true),
            active_mtu: AtomicU8::new(0),
        }
    }
}

impl Link {
    /// Whether it is up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.up_for_operator.load(Ordering::SeqCst) && self.interface_is_up.load(Ordering::SeqCst)
    }

    /// The operator takes it up or down. Returns whether it went up or down by that.
    pub(crate) fn set(&self, up: bool) -> bool {
        let before = self.is_up();
        self.up_for_operator.store(up, Ordering::SeqCst);
        self.is_up() != before
    }

    /// The interface goes up or down, or has another path MTU. Returns whether the link went up or
    /// down by that.
    pub(crate) fn set_interface(&self, up: bool, active_mtu: u8) -> bool {
        let before = self.is_up();
        self.active_mtu.store(active_mtu, Ordering::SeqCst);
        self.interface_is_up.store(up, Ordering::SeqCst);
        self.is_up() != before
    }
}

/// What happens to packets of a VM, and is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketEvent {
    /// One came before others that were sent earlier.
    OutOfSequence,
    /// A request came again.
    Duplicate,
    /// A request met no receive.
    NoReceive,
    /// A NAK came: packets were missing.
    Nak,
    /// An answer came without one that should be before it.
    ImpliedNak,
    /// Nobody answered in time.
    TimeOut,
    /// An RNR NAK came.
    RnrNak,
    /// One was sent again.
    SentAgain,
    /// One came with the mark of a router that was congested.
    Marked,
    /// A congestion notification was sent.
    Notified,
    /// A congestion notification was obeyed.
    Slowed,
}

impl PacketEvent {
    /// All of them, with the names that operators know from counters of hardware.
    pub(crate) const ALL: [(Self, &'static str); Self::Slowed as usize + 1] = [
        (Self::OutOfSequence, "out_of_sequence"),
        (Self::Duplicate, "duplicate_request"),
        (Self::NoReceive, "out_of_buffer"),
        (Self::Nak, "packet_seq_err"),
        (Self::ImpliedNak, "implied_nak_seq_err"),
        (Self::TimeOut, "local_ack_timeout_err"),
        (Self::RnrNak, "rnr_nak_retry_err"),
        (Self::SentAgain, "retrans_pkts"),
        (Self::Marked, "np_ecn_marked_roce_packets"),
        (Self::Notified, "np_cnp_sent"),
        (Self::Slowed, "rp_cnp_handled"),
    ];
}

/// Statuses that a work request can fail with, and success.
const STATUSES: usize = wc_status::GENERAL_ERR as usize + 1;

/// Places of a table that are gone through at a time.
const PIECE: usize = 1024;

/// What a worker counts of a VM. Only that worker writes.
#[derive(Debug, Default)]
struct Counters {
    tx_messages: AtomicU64,
    tx_bytes: AtomicU64,
    rx_messages: AtomicU64,
    rx_bytes: AtomicU64,
    rnr_naks: AtomicU64,
    retries: AtomicU64,
    /// By status (`wc_status`).
    errors: [AtomicU64; STATUSES],
    qkey_violations: AtomicU64,
    pkey_violations: AtomicU64,
    /// What the VM has had of the worker's time: what its polls cost, by its weight.
    used: AtomicU64,
    contended_ns: AtomicU64,
    /// By `PacketEvent`.
    packets: [AtomicU64; PacketEvent::ALL.len()],
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
    /// Packets with a wrong P_Key.
    pub pkey_violations: u64,
    /// How long workers polled its queue pairs while other VMs had work, too, nanoseconds.
    pub contended_ns: u64,
}

/// The Ethernet segment that frames are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    /// That of VXLAN with this network identifier.
    Vxlan(u32),
    /// The one that an interface leads to, by its number: a VM's own.
    Own(u32),
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vxlan(vni) => write!(f, "vni {vni}"),
            Self::Own(number) => write!(f, "interface {number}"),
        }
    }
}

/// How much connected queue pairs have under way on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// A window of packets, by what answers and routers say of the network.
    #[default]
    Window,
    /// As much as there may be: the network loses nothing, and holds senders back itself.
    None,
}

/// Which messages do not take the way out that their VM has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Local {
    /// Those to VMs of this process that have one, too.
    #[default]
    Process,
    /// Those to the VM itself.
    Vm,
    /// None: there is a way back.
    Nothing,
}

/// The way that a VM's messages have out of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uplink {
    /// Where its frames are.
    pub segment: Segment,
    /// The path MTU that its port has at the start (`mtu`).
    pub active_mtu: u8,
    /// Which messages do not take it.
    pub local: Local,
    /// How senders go by the state of the network.
    pub congestion: Congestion,
}

/// What a VM is made of.
pub struct VmSettings {
    /// Its network.
    pub network: Network,
    /// Its limits.
    pub limits: Limits,
    /// The numbers that its queue pairs may have.
    pub qp_numbers: RangeInclusive<u32>,
    /// The order in which they come.
    pub qp_order: Arc<Order>,
    /// The link.
    pub link: Arc<Link>,
    /// What it may have of the workers.
    pub share: Arc<WorkerShare>,
    /// The way out of this process, if it has one.
    pub uplink: Option<Uplink>,
    /// The workers.
    pub workers: Vec<Arc<dyn Schedule>>,
    /// Where warnings go.
    pub warnings: Box<dyn Warn>,
}

/// A VM.
pub struct Vm {
    /// What tells it from all other VMs of this process, earlier ones on its socket included.
    serial: u64,
    /// How often all of its objects were removed.
    clears: AtomicU32,
    /// The network whose VMs reach each other.
    pub(crate) network: Network,
    /// Its account.
    footprint: Footprint,
    tables: Shared<Tables>,
    /// Feature bits that the driver accepted.
    features: AtomicU64,
    link: Arc<Link>,
    share: Arc<WorkerShare>,
    uplink: Option<Uplink>,
    /// The driver has the port up.
    up_for_driver: AtomicBool,
    workers: Vec<Arc<dyn Schedule>>,
    counters: Vec<CachePadded<Counters>>,
    warnings: Box<dyn Warn>,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm").finish_non_exhaustive()
    }
}

impl Vm {
    /// A VM without objects, whose tables `readers` read.
    #[must_use]
    pub fn new(readers: Readers, settings: VmSettings) -> Arc<Self> {
        let VmSettings {
            network,
            limits,
            qp_numbers,
            qp_order,
            link,
            share,
            uplink,
            workers,
            warnings,
        } = settings;
        let counters = workers.iter().map(|_| CachePadded::default()).collect();
        Arc::new_cyclic(|vm| {
            let mut tables = Tables::new(&limits, qp_numbers, qp_order, vm.clone());
            tables.link_told = link.is_up();
            Self {
                serial: serial(),
                clears: AtomicU32::new(0),
                network,
                footprint: tables.footprint.clone(),
                tables: Shared::new(readers, tables),
                features: AtomicU64::new(0),
                link,
                share,
                uplink,
                up_for_driver: AtomicBool::new(true),
                workers,
                counters,
                warnings,
            }
        })
    }

    /// All of its objects are removed.
    pub(super) fn cleared(&self) {
        self.clears.fetch_add(1, Ordering::SeqCst);
    }

    /// Which of its lives it is in: one ends when all of its objects are removed.
    pub(crate) fn life(&self) -> u32 {
        self.clears.load(Ordering::SeqCst)
    }

    /// What tells it from all other VMs of this process.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Its account: what it makes the process keep.
    pub(crate) fn footprint(&self) -> &Footprint {
        &self.footprint
    }

    /// Takes the feature bits that the driver accepted.
    pub(crate) fn set_features(&self, features: u64) {
        self.features.store(features, Ordering::Relaxed);
    }

    /// What the driver accepted.
    pub(crate) fn features(&self) -> Features {
        Features(self.features.load(Ordering::Relaxed))
    }

    /// Whether the driver accepted a `feature`.
    pub(crate) fn accepted(&self, feature: u32) -> bool {
        self.features().has(feature)
    }

    /// The link.
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The way out of this process, if it has one.
    pub(crate) fn uplink(&self) -> Option<Uplink> {
        self.uplink
    }

    /// The path MTU of its port (`mtu`).
    pub(crate) fn active_mtu(&self) -> u8 {
        match self.link.active_mtu.load(Ordering::SeqCst) {
            0 => self
                .uplink
                .map_or(mtu::MTU_4096, |uplink| uplink.active_mtu),
            changed => changed,
        }
    }

    /// Whether messages between it and a VM of its network, perhaps itself, stay in this process.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let Some((ours, theirs)) = self.uplink.zip(other.uplink) else {
            return true;
        };
        if std::ptr::eq(self, other) {
            return ours.local != Local::Nothing;
        }
        [ours, theirs].iter().all(|way| way.local == Local::Process)
    }

    /// Whether the port is up.
    pub(crate) fn port_is_up(&self) -> bool {
        self.link.is_up() && self.up_for_driver.load(Ordering::SeqCst)
    }

    /// The driver takes the port up or down. Returns whether it was up.
    pub(crate) fn set_up_for_driver(&self, up: bool) -> bool {
        self.up_for_driver.swap(up, Ordering::SeqCst)
    }

    /// The tables, for a worker in a read section, if nobody is changing them.
    #[inline(always)]
    pub(crate) fn read_in<'a>(&'a self, section: &'a ReadSection<'_>) -> Option<&'a Tables> {
        self.tables.read_in(section)
    }

    /// The tables. Not for workers: see [`Self::read_in`].
    pub(crate) fn tables(&self) -> sync::Read<'_, Tables> {
        self.tables.read()
    }

    /// Goes through all queue pairs, a piece of the table at a time, so that who changes it does not
    /// wait for long, and begins anew if they are elsewhere meanwhile.
    pub(crate) fn fold_queue_pairs<T: Default>(&self, mut add: impl FnMut(&mut T, &Arc<Qp>)) -> T {
        let mut sum = T::default();
        let (mut place, mut places) = (0, 0);
        loop {
            let tables = self.tables();
            let qps = &tables.qps;
            if qps.places() != places {
                // There is twice the room each time, so that ends.
                (place, places, sum) = (0, qps.places(), T::default());
            }
            if place >= places {
                return sum;
            }
            for qp in qps.at_places(place, PIECE) {
                add(&mut sum, qp);
            }
            place += PIECE;
        }
    }

    /// The operator has changed what it has of the workers.
    pub(crate) fn share_changed(&self) {
        // A queue pair that is made from now on sees it.
        let capped = self.caps().is_some();
        self.fold_queue_pairs(|(), qp| qp.set_capped(capped));
    }

    /// The tables, to change them. Returns when no access to guest memory is under way.
    pub(crate) fn tables_mut(&self) -> sync::Write<'_, Tables> {
        self.tables.write()
    }

    /// Has the event that a completion queue holds back raised in time.
    pub(super) fn hold(self: &Arc<Self>, cq: &Arc<Cq>) {
        let workers = &self.workers;
        if let Some(worker) = workers.get(cq.number as usize % workers.len().max(1)) {
            worker.hold(&Arc::downgrade(self), cq);
        }
    }

    /// What it is called in the log.
    pub(crate) fn name(&self) -> &str {
        self.warnings.name()
    }

    /// Warns of what the guest did wrong.
    pub(crate) fn warn(&self, what: fmt::Arguments<'_>) {
        self.warnings.warn(what);
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

    /// The caps, if it has any.
    #[inline]
    pub(crate) fn caps(&self) -> Option<&Caps> {
        self.share.caps()
    }

    /// What a poll that costs a worker so much counts for this VM.
    #[inline]
    pub(crate) fn weighed(&self, cost: u64) -> u64 {
        self.share.weighed(cost)
    }

    /// Adds to what the VM has had of a worker's time.
    pub(crate) fn use_worker(&self, worker: u16, weighed: u64) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.used, weighed);
        }
    }

    /// What the VM has had of a worker's time.
    pub(crate) fn used_of_worker(&self, worker: u16) -> u64 {
        self.counters(worker)
            .map_or(0, |counters| counters.used.load(Ordering::Relaxed))
    }

    /// A worker has polled for so long while other VMs had work, too.
    pub(crate) fn count_contended(&self, worker: u16, nanoseconds: u64) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.contended_ns, nanoseconds);
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

    /// A work request was completed with this status of failure.
    pub(crate) fn count_error(&self, worker: u16, status: u8) {
        let counters = self.counters(worker);
        if let Some(counter) = counters.and_then(|all| all.errors.get(usize::from(status))) {
            add(counter, 1);
        }
    }

    /// How many work requests failed, by status, for those that any failed with.
    pub(crate) fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        (0..STATUSES as u8).filter_map(|status| {
            let of = |counters: &CachePadded<Counters>| {
                let counter = counters.errors.get(usize::from(status));
                counter.map_or(0, |counter| counter.load(Ordering::Relaxed))
            };
            let count = self.counters.iter().map(of).fold(0, u64::wrapping_add);
            let name = wc_status::name(status)?;
            (count != 0).then_some((name, count))
        })
    }

    /// Something has happened to a packet.
    pub(crate) fn count_packet(&self, worker: u16, event: PacketEvent) {
        let counters = self.counters(worker);
        if let Some(counter) = counters.and_then(|all| all.packets.get(event as usize)) {
            add(counter, 1);
        }
    }

    /// How often something has happened to packets.
    pub(crate) fn packet_events(&self, event: PacketEvent) -> u64 {
        let all = self.counters.iter();
        let counter = all.filter_map(|counters| counters.packets.get(event as usize));
        counter.fold(0, |sum, one| sum.wrapping_add(one.load(Ordering::Relaxed)))
    }

    pub(crate) fn count_qkey_violation(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.qkey_violations, 1);
        }
    }

    pub(crate) fn count_pkey_violation(&self, worker: u16) {
        if let Some(counters) = self.counters(worker) {
            add(&counters.pkey_violations, 1);
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
                errors: c.errors.iter().fold(t.errors, sum),
                qkey_violations: sum(t.qkey_violations, &c.qkey_violations),
                pkey_violations: sum(t.pkey_violations, &c.pkey_violations),
                contended_ns: sum(t.contended_ns, &c.contended_ns),
            }
        })
    }
}
