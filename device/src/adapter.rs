// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The adapter of this process: its workers, and the networks between its VMs.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use log::{info, warn};
use serde_json::{json, Value};
use vhost_device_rdma_sync::{self as sync, Reader, Readers};

use crate::engine::payload_of;
use crate::engine::vm::{Link, Segment};
use crate::eventfd;
use crate::fabric::wire::capture::Capture;
use crate::fabric::wire::egress::View;
use crate::fabric::wire::layer::plan::{Plan, Station};
use crate::fabric::wire::layer::settings::{DeviceFaults, FaultSettings};
use crate::fabric::wire::port::uplinks::Uplinks;
use crate::fabric::wire::port::watch::{InterfaceState, Watch};
use crate::fabric::wire::port::Direction;
use crate::limits::MAX_WORKERS;
use crate::rnic::{Rnic, RnicSettings};
use crate::sandbox::{Kind, Sandbox};
use crate::worker::{
    end_process, Loop, Messages, OnFailure, Shared, ThreadOptions, Watchdog, WatchdogLimits, Worker,
};

/// Why an adapter could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The number of workers is not between 1 and [`MAX_WORKERS`].
    #[error("there can be 1 to {MAX_WORKERS} workers, not {0}")]
    Workers(u16),
    /// A worker could not be started.
    #[error("cannot start a worker")]
    Start(#[source] std::io::Error),
    /// Eventfds cannot be signalled without waiting for who shares them.
    #[error("cannot send interrupts by Linux AIO")]
    Interrupts(#[source] std::io::Error),
    /// The watchdog could not be started.
    #[error("cannot start the watchdog")]
    Watchdog(#[source] std::io::Error),
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
    /// What confines its threads.
    pub sandbox: Sandbox,
    /// The ways out of this process, for VMs that have one.
    pub uplinks: Uplinks,
    /// Some VMs have a port of iWARP.
    pub iwarp: bool,
}

/// An object that an operator puts in error, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    Qp(u32),
    Cq(u32),
}

/// Why a device has no frames that could have faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoFrames {
    /// All its messages stay in this process, where there are no frames.
    #[error("only frames have faults, and the device has no way out of this process")]
    Stay,
    /// Its frames cannot be told from others.
    #[error(
        "faults are of the frames of a MAC address, and the device has none in the configuration: \
         give it its mac"
    )]
    NoMac,
}

impl Default for AdapterSettings {
    fn default() -> Self {
        Self {
            workers: 1,
            poll_budget: Duration::from_micros(50),
            cpus: Vec::new(),
            sandbox: Sandbox::default(),
            uplinks: Uplinks::default(),
            iwarp: false,
        }
    }
}

impl AdapterSettings {
    /// The ways out of this process that are a worker's: the first has them all.
    fn uplinks_of(&self, worker: u16) -> Uplinks {
        if worker == 0 {
            return self.uplinks.clone();
        }
        Uplinks::default()
    }
}

/// The adapter of this process: its workers, and the networks between its VMs.
#[derive(Debug)]
pub struct Adapter {
    workers: Vec<Arc<Worker>>,
    /// The workers, as those who look at the tables of all VMs.
    readers: Readers,
    shared: Shared,
    rnics: Mutex<Vec<Arc<Rnic>>>,
    iwarp: bool,
    watchdog: Mutex<Option<Watchdog>>,
    /// What the kernel tells of this process. It is open before files are out of reach.
    own_status: Option<File>,
}

impl Adapter {
    /// Starts the workers, and a watchdog. A worker that fails ends the process.
    ///
    /// # Errors
    /// If their number is out of range, or a thread cannot be started.
    pub fn new(settings: &AdapterSettings) -> Result<Arc<Self>, Error> {
        let failed: OnFailure = Arc::new(end_process);
        let sandbox = &settings.sandbox;
        let adapter = Self::with(settings, |index, reader, shared, cpu| {
            let sandbox = sandbox.clone();
            let options = ThreadOptions {
                cpu,
                sandbox,
                uplinks: settings.uplinks_of(index),
                iwarp: settings.iwarp && index == 0,
            };
            let budget = settings.poll_budget;
            Worker::start(index, reader, shared, budget, options, failed.clone())
        })?;
        let readers = adapter.readers.clone();
        let (workers, limits) = (&adapter.workers, WatchdogLimits::default());
        let watchdog = Watchdog::start(workers, readers, limits, sandbox, failed.clone());
        let watchdog = watchdog.map_err(Error::Watchdog)?;
        *adapter.watchdog() = Some(watchdog);
        Ok(adapter)
    }

    /// The workers, as those who look at the tables of all VMs.
    #[must_use]
    pub fn readers(&self) -> &Readers {
        &self.readers
    }

    fn watchdog(&self) -> std::sync::MutexGuard<'_, Option<Watchdog>> {
        self.watchdog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An adapter whose workers do nothing but what their loops are told to, in the caller's
    /// thread: for measurements and tests.
    ///
    /// # Errors
    /// If the number of workers is out of range, or the system refuses a descriptor.
    pub fn without_threads(settings: &AdapterSettings) -> Result<(Arc<Self>, Vec<Loop>), Error> {
        let mut loops = Vec::new();
        let adapter = Self::with(settings, |index, reader, shared, _| {
            let (worker, mut work) =
                Worker::without_thread(index, reader, shared, settings.poll_budget)?;
            let uplinks = settings.uplinks_of(index);
            if !uplinks.is_empty() {
                work.set_uplinks(&uplinks)?;
            }
            if settings.iwarp && index == 0 {
                work.set_iwarp()?;
            }
            loops.push(work);
            Ok(worker)
        })?;
        Ok((adapter, loops))
    }

    /// An adapter with the workers that `start` makes of their index and CPU.
    fn with(
        settings: &AdapterSettings,
        mut start: impl FnMut(u16, Reader, Shared, Option<usize>) -> std::io::Result<Arc<Worker>>,
    ) -> Result<Arc<Self>, Error> {
        if settings.workers == 0 || settings.workers > MAX_WORKERS {
            return Err(Error::Workers(settings.workers));
        }
        eventfd::set_up().map_err(Error::Interrupts)?;
        let (readers, each) = Readers::new(settings.workers.into());
        let shared = Shared::default();
        let workers = (0..settings.workers)
            .zip(each)
            .map(|(index, reader)| {
                let cpu = settings
                    .cpus
                    .get(usize::from(index) % settings.cpus.len().max(1))
                    .copied();
                start(index, reader, shared.clone(), cpu)
            })
            .collect::<Result<_, _>>()
            .map_err(Error::Start)?;
        Ok(Arc::new(Self {
            workers,
            readers,
            shared,
            rnics: Mutex::default(),
            iwarp: settings.iwarp,
            watchdog: Mutex::default(),
            own_status: File::open("/proc/self/status").ok(),
        }))
    }

    /// Number of workers: doorbell queues of every RNIC.
    #[must_use]
    pub fn workers(&self) -> u16 {
        self.workers.len() as u16
    }

    /// Has a worker take notifications from messages at `socket`: that of the first doorbell queue.
    /// Returns what [`Self::remove_messages`] needs.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn add_messages(
        &self,
        socket: &impl AsRawFd,
        messages: Arc<dyn Messages>,
    ) -> io::Result<u64> {
        match self.workers.first() {
            Some(worker) => worker.add_messages(socket, messages),
            None => Ok(0),
        }
    }

    /// Has no worker take them any longer.
    pub(crate) fn remove_messages(&self, socket: &impl AsRawFd, number: u64) {
        if let Some(worker) = self.workers.first() {
            worker.remove_messages(socket, number);
        }
    }

    /// Keeps the own GIDs of a device for it: no other device's VM may have them.
    pub fn reserve_gids_of(&self, device: &RnicSettings) {
        let network = device.network.as_str().into();
        for gid in device.own_gids() {
            self.shared.registry.reserve(&network, gid);
        }
    }

    /// Keeps them no longer, of a device that goes.
    pub fn unreserve_gids_of(&self, device: &RnicSettings) {
        let network = device.network.as_str().into();
        for gid in device.own_gids() {
            self.shared.registry.unreserve(&network, gid);
        }
    }

    /// A new RNIC, for a VM that attached.
    #[must_use]
    pub fn attach(self: &Arc<Self>, settings: RnicSettings) -> Arc<Rnic> {
        let rnic = Rnic::new(
            settings,
            Arc::downgrade(self),
            self.readers.clone(),
            self.workers.clone(),
            self.shared.registry.clone(),
        );
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(rnic.clone());
        for worker in &self.workers {
            worker.add(rnic.vm());
        }
        rnic
    }

    /// The RNICs of all VMs that are attached.
    pub(crate) fn rnics(&self) -> Vec<Arc<Rnic>> {
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Puts an object of the VM of a device in error. Returns false if the VM has no such object
    /// that is in use.
    pub(crate) fn fail(&self, device: &RnicSettings, what: Failing) -> bool {
        let rnics = self.rnics();
        let mut of_device = rnics.iter().filter(|rnic| rnic.is_of(device));
        of_device.any(|rnic| match what {
            Failing::Qp(number) => rnic.fail_qp(number),
            Failing::Cq(number) => rnic.fail_cq(number),
        })
    }

    /// A device has something else of the workers than before.
    pub(crate) fn share_changed(&self, device: &RnicSettings) {
        for rnic in self.rnics() {
            if rnic.is_of(device) {
                rnic.vm().share_changed();
            }
        }
    }

    /// Takes the link of a device down or up, whether or not a VM is attached. Returns when nothing
    /// is under way any longer on a link that goes down.
    pub fn set_link(&self, link: &Arc<Link>, up: bool) {
        if link.set(up) {
            self.link_changed(link);
        }
    }

    /// The interface of the host that frames of a device leave by is up or down, and has this path
    /// MTU (`mtu`). Returns as [`Self::set_link`].
    pub fn set_interface(&self, link: &Arc<Link>, up: bool, active_mtu: u8) {
        if link.set_interface(up, active_mtu) {
            self.link_changed(link);
        }
    }

    /// Has the links of devices follow their interfaces of the host, as long as this adapter is there.
    ///
    /// # Errors
    /// If there is no thread left, or it cannot be confined.
    pub fn follow_interfaces<'a>(
        self: &Arc<Self>,
        watch: Watch,
        devices: impl IntoIterator<Item = &'a RnicSettings>,
        sandbox: &Sandbox,
    ) -> io::Result<()> {
        let of = |device: &RnicSettings| match device.uplink?.segment {
            Segment::Own(number) => Some((number, device.link.clone())),
            Segment::Vxlan(_) => None,
        };
        let links: Vec<_> = devices.into_iter().filter_map(of).collect();
        let adapter = Arc::downgrade(self);
        let follow = move || {
            let ended = watch.run(|number, name, InterfaceState { up, active_mtu }| {
                match up {
                    true => info!(
                        "{name} is up, with a path MTU of {}",
                        payload_of(active_mtu)
                    ),
                    false => info!("{name} is down"),
                }
                let link = links.iter().find(|(of, _)| *of == number);
                if let Some((adapter, (_, link))) = adapter.upgrade().zip(link) {
                    adapter.set_interface(link, up, active_mtu);
                }
            });
            if let Err(error) = ended {
                warn!("links do not follow interfaces any longer: {error}");
            }
        };
        let name = "interfaces".to_owned();
        sandbox.spawn(Kind::Control, name, follow).map(drop)
    }

    fn link_changed(&self, link: &Arc<Link>) {
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
            "resident_bytes": self.resident_bytes(),
            "workers": self.workers.iter().map(|worker| worker.status()).collect::<Vec<_>>(),
            "lock_waits": sync::waits(),
            "devices": rnics.iter().map(|rnic| rnic.status()).collect::<Vec<_>>(),
        })
    }

    /// Resident memory of this process without that of guests, bytes, if the system tells.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        self.own_status.as_ref().and_then(resident_bytes)
    }

    /// The workers.
    pub(crate) fn each_worker(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().map(|worker| &**worker)
    }

    /// What is captured of all workers.
    pub(crate) fn capture(&self) -> &Arc<Capture> {
        &self.shared.capture
    }

    /// What others see of the ways out of this process.
    pub(crate) fn wire(&self) -> Option<&Arc<View>> {
        self.workers.iter().find_map(|worker| worker.wire())
    }

    /// The frames of a device have faults from now on, or none. Frames count from 0 again.
    ///
    /// # Errors
    /// If the device has no frames.
    pub(crate) fn set_faults(
        &self,
        device: &RnicSettings,
        direction: Direction,
        faults: Option<FaultSettings>,
    ) -> Result<(), NoFrames> {
        let (plan, station) = self.faults_of(device)?;
        plan.set(station, direction, faults);
        Ok(())
    }

    /// The frames of a device wait from number `from` on, or no longer, until this is called again. Returns
    /// how many there were, and the first one that waits: if it is before `from`, it goes on in a moment.
    ///
    /// # Errors
    /// If the device has no frames.
    pub(crate) fn hold_frames(
        &self,
        device: &RnicSettings,
        direction: Direction,
        from: Option<u64>,
    ) -> Result<(u64, Option<u64>), NoFrames> {
        let (plan, station) = self.faults_of(device)?;
        Ok(plan.hold(station, direction, from))
    }

    /// The faults of all, and who the device is there.
    fn faults_of(&self, device: &RnicSettings) -> Result<(&Plan, Station), NoFrames> {
        let (view, uplink) = self.wire().zip(device.uplink).ok_or(NoFrames::Stay)?;
        if device.mac == [0; 6] {
            return Err(NoFrames::NoMac);
        }
        Ok((&view.faults, (uplink.segment, device.mac)))
    }

    /// The frames of a device have the faults of its settings.
    ///
    /// # Errors
    /// If there are any, and the device has no frames.
    pub fn begin_faults(&self, device: &RnicSettings) -> Result<(), NoFrames> {
        let DeviceFaults { sent, received } = device.faults;
        for (direction, faults) in [(Direction::Out, sent), (Direction::In, received)] {
            if faults.is_some() {
                self.set_faults(device, direction, faults)?;
            }
        }
        Ok(())
    }

    /// The frames of a device have no faults any longer.
    pub fn end_faults(&self, device: &RnicSettings) {
        for direction in [Direction::Out, Direction::In] {
            // One that has no frames has no faults.
            let _ = self.set_faults(device, direction, None);
        }
    }

    /// Whether VMs may have a port of iWARP.
    #[must_use]
    pub fn has_iwarp(&self) -> bool {
        self.iwarp
    }

    /// Has the worker of connections of iWARP answer whether these have anything to send that the system
    /// has not taken.
    pub(crate) fn ask_unsent(&self, answer: Sender<bool>) {
        // They are the first one's.
        if let Some(worker) = self.workers.first() {
            worker.ask_unsent(answer);
        }
    }

    /// Stops the workers.
    pub fn shutdown(&self) {
        // First: it does not know that workers are to end.
        let watchdog = self.watchdog().take();
        watchdog.into_iter().for_each(Watchdog::stop);
        for worker in &self.workers {
            worker.stop();
        }
    }

    /// Forgets an RNIC, whose VM went away.
    pub(crate) fn forget(&self, rnic: &Rnic) {
        let mut rnics = self.rnics.lock().unwrap_or_else(PoisonError::into_inner);
        rnics.retain(|other| !std::ptr::eq(&**other, rnic));
    }
}

/// Resident memory of this process without that of guests, bytes, if the system tells in `status`.
fn resident_bytes(status: &File) -> Option<u64> {
    let mut bytes = vec![0; 4096];
    let length = status.read_at(&mut bytes, 0).ok()?;
    bytes.truncate(length);
    let status = String::from_utf8_lossy(&bytes);
    let mut lines = status.lines();
    let anonymous = lines.find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = anonymous.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::verbs::mtu;

    use super::*;
    use crate::engine::vm::{Congestion, Local, Uplink};
    use crate::fabric::wire::port::interface::Interface;

    #[test]
    fn an_adapter_has_as_many_workers_as_there_may_be() {
        for workers in [0, MAX_WORKERS + 1, u16::MAX] {
            let settings = AdapterSettings {
                workers,
                ..AdapterSettings::default()
            };
            let made = Adapter::without_threads(&settings).map(drop);
            assert!(matches!(made, Err(Error::Workers(n)) if n == workers));
        }
        for workers in [1, MAX_WORKERS] {
            let settings = AdapterSettings {
                workers,
                ..AdapterSettings::default()
            };
            let (adapter, loops) = Adapter::without_threads(&settings).unwrap();
            assert_eq!((adapter.workers(), loops.len()), (workers, workers.into()));
            let rnic = adapter.attach(RnicSettings::default());
            assert_eq!(rnic.config().num_doorbell_queues, workers);
        }
    }

    #[test]
    fn faults_are_of_devices_whose_frames_can_be_told_apart() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let from = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let settings = AdapterSettings {
            uplinks: Uplinks {
                interfaces: vec![Interface::open(from, to).unwrap()],
                ..Uplinks::default()
            },
            ..AdapterSettings::default()
        };
        let (adapter, _loops) = Adapter::without_threads(&settings).unwrap();
        let uplink = Uplink {
            segment: Segment::Own(0),
            active_mtu: mtu::MTU_1024,
            local: Local::default(),
            congestion: Congestion::default(),
        };
        let device = |mac, uplink| RnicSettings {
            mac,
            uplink,
            faults: DeviceFaults {
                sent: "loss=1%".parse().ok(),
                received: None,
            },
            ..RnicSettings::default()
        };
        let mac = [2, 0, 0, 0, 0, 1];
        let begin = |mac, uplink| adapter.begin_faults(&device(mac, uplink));
        assert_eq!(begin(mac, None), Err(NoFrames::Stay));
        assert_eq!(begin([0; 6], Some(uplink)), Err(NoFrames::NoMac));
        assert_eq!(begin(mac, Some(uplink)), Ok(()));
    }

    #[test]
    fn a_link_is_that_of_the_devices_with_its_settings() {
        let (adapter, _loops) = Adapter::without_threads(&AdapterSettings::default()).unwrap();
        let settings = [RnicSettings::default(), RnicSettings::default()];
        let [a, b] = settings.map(|settings| adapter.attach(settings));
        adapter.set_link(&a.settings.link, false);
        assert_eq!((a.config().link_up, b.config().link_up), (0, 1));
        // A VM that attaches with these settings finds it as it is.
        let again = adapter.attach(a.settings.clone());
        assert_eq!(again.config().link_up, 0);
        adapter.set_link(&a.settings.link, true);
        assert_eq!((a.config().link_up, again.config().link_up), (1, 1));
        // An interface is up for the link to be up, and the operator wants it to be.
        let up = |rnic: &Rnic| rnic.config().link_up == 1;
        for (operator, interface) in [(true, false), (false, false), (false, true), (true, true)] {
            adapter.set_link(&a.settings.link, operator);
            adapter.set_interface(&a.settings.link, interface, mtu::MTU_2048);
            assert_eq!((up(&a), up(&b)), (operator && interface, true));
        }
        let of = |rnic: &Rnic| rnic.vm().active_mtu();
        assert_eq!((of(&a), of(&b)), (mtu::MTU_2048, mtu::MTU_4096));
    }
}
