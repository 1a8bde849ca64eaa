// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RNIC that a VM sees of the process's adapter: its life, its port, its doorbell queues.
//!
//! Its objects are in [`Tables`], which workers read in bounded read sections (crate
//! `vhost-device-rdma-sync`). Commands and changes of memory or run state lock them for writing: a
//! writer waits for the readers, and then knows that nobody accesses guest memory.
use std::fmt;
use std::fs::File;
use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vhost_device_rdma_sync::{Read, Readers, Write};
use virtio_rdma_spec::config::Config;
use virtio_rdma_spec::doorbell::worker_status;
use virtio_rdma_spec::event::{event_type, AsyncEvent};
use virtio_rdma_spec::verbs::vendor_err;

use crate::adapter::Adapter;
use crate::engine::events::{notify, raise, EventSink};
use crate::engine::queue_pair::Qp;
use crate::engine::settle;
use crate::engine::share::WorkerShare;
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::{Link, Schedule, Uplink, Vm, VmSettings};
use crate::fabric::iwarp::port::{Port, PortSettings, Request};
use crate::fabric::local::Local;
use crate::fabric::registry::Registry;
use crate::fabric::wire::layer::settings::DeviceFaults;
use crate::fabric::Fabric;
use crate::limits::{Limits, PORT};
use crate::memory::GuestMemory;
use crate::verbs::cq::{L2Source, Pushed};
use crate::verbs::gid_policy::{eui64, GidPolicy, Refusal};
use crate::verbs::numbers::Order;
use crate::warnings::RateLimited;
use crate::worker::Worker;

/// Settings of one VM's RNIC.
#[derive(Debug, Clone)]
pub struct RnicSettings {
    /// Name in logs and status: the socket's path.
    pub name: String,
    /// MAC address of the guest's network interface to pair with; zero: any.
    pub mac: [u8; 6],
    /// VMs of the same network reach each other.
    pub network: String,
    /// Completion-event queues, 1 to [`crate::limits::MAX_COMPLETION_QUEUES`].
    pub completion_queues: u16,
    /// Limits.
    pub limits: Limits,
    /// The link: the same one for all VMs that attach with these settings.
    pub link: Arc<Link>,
    /// The order of its queue pair numbers, likewise: those of one VM go on where those of the one
    /// before ended.
    pub qp_order: Arc<Order>,
    /// The lines that its VMs cause in the log, one VM after the other: who connects again has no
    /// more of them.
    pub log: Arc<RateLimited>,
    /// Which GIDs the VM may set.
    pub gid_policy: GidPolicy,
    /// What the VM may have of the workers.
    pub share: Arc<WorkerShare>,
    /// The way out of this process, if it has one.
    pub uplink: Option<Uplink>,
    /// The faults that its frames have from the start.
    pub faults: DeviceFaults,
    /// It is an RNIC of iWARP, and where its connections are from.
    pub iwarp: Option<Arc<PortSettings>>,
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
            qp_order: Arc::default(),
            log: Arc::default(),
            gid_policy: GidPolicy::default(),
            share: Arc::default(),
            uplink: None,
            faults: DeviceFaults::default(),
            iwarp: None,
        }
    }
}

impl RnicSettings {
    /// Has them be of the same device as others, for VMs that attached with those before.
    pub(crate) fn be_the_device_of(&mut self, others: &Self) {
        self.link = others.link.clone();
        self.qp_order = others.qp_order.clone();
        self.log = others.log.clone();
    }

    /// The GIDs that are this device's own: no other device's VM may have them.
    pub fn own_gids(&self) -> impl Iterator<Item = Gid> + '_ {
        self.gid_policy.own(self.mac)
    }
}

/// The RNIC of one VM.
pub struct Rnic {
    pub(crate) settings: RnicSettings,
    adapter: Weak<Adapter>,
    pub(crate) node_guid: u64,
    vm: Arc<Vm>,
    iwarp: Option<Arc<Port>>,
    pub(crate) workers: Vec<Arc<Worker>>,
    registry: Arc<Registry>,
    pub(crate) next_worker: AtomicU16,
    kicks: Mutex<Vec<Option<File>>>,
}

impl fmt::Debug for Rnic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rnic")
            .field("name", &self.settings.name)
            .finish_non_exhaustive()
    }
}

impl Rnic {
    /// Whether it was attached with the settings of that device.
    pub(crate) fn is_of(&self, device: &RnicSettings) -> bool {
        Arc::ptr_eq(&self.settings.link, &device.link)
    }

    /// The RNIC of a VM that attached to an adapter.
    pub(crate) fn new(
        settings: RnicSettings,
        adapter: Weak<Adapter>,
        readers: Readers,
        workers: Vec<Arc<Worker>>,
        registry: Arc<Registry>,
    ) -> Arc<Self> {
        let schedule = |worker: &Arc<Worker>| -> Arc<dyn Schedule> { worker.clone() };
        let vm = VmSettings {
            network: settings.network.as_str().into(),
            limits: settings.limits,
            qp_numbers: Local {
                registry: &registry,
            }
            .qp_numbers(),
            qp_order: settings.qp_order.clone(),
            link: settings.link.clone(),
            share: settings.share.clone(),
            uplink: settings.uplink,
            workers: workers.iter().map(schedule).collect(),
            warnings: Box::new(settings.log.of(&settings.name)),
        };
        let vm = Vm::new(readers, vm);
        let port = |settings: &Arc<PortSettings>| Port::new(settings.clone(), vm.clone());
        Arc::new(Self {
            iwarp: settings.iwarp.as_ref().map(port),
            vm,
            adapter,
            node_guid: node_guid(&settings),
            workers,
            registry,
            next_worker: AtomicU16::new(0),
            kicks: Mutex::default(),
            settings,
        })
    }

    /// The VM, as the engine knows it.
    pub(crate) fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// The port, if it is one of iWARP.
    pub(crate) fn iwarp(&self) -> Option<&Arc<Port>> {
        self.iwarp.as_ref()
    }

    /// Asks the worker that has the connections of iWARP.
    pub(crate) fn ask_iwarp(&self, request: Request) {
        if let Some(worker) = self.workers.first() {
            worker.ask_iwarp(request);
        }
    }

    /// Gives the VM of a port of iWARP the GID by which its queue pairs find each other in this process.
    /// It is in no table of its driver.
    pub(crate) fn claim_own_gid(&self) {
        let has = |tables: &Tables| tables.gids.first().is_some_and(Option::is_some);
        if has(&self.tables()) {
            return;
        }
        let mut gid = [0; 16];
        for (to, from) in gid.iter_mut().zip(b"\xfd-iwarp-") {
            *to = *from;
        }
        for (to, from) in gid.iter_mut().rev().zip(self.vm.serial().to_le_bytes()) {
            *to = from;
        }
        let mut tables = self.tables_mut();
        if let Some(first) = tables.gids.first_mut() {
            if self.registry.claim(gid, &self.vm) {
                *first = Some(gid);
            }
        }
    }

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
        self.vm.set_features(features);
    }

    /// The driver takes the port down or up. Returns when nothing is under way any longer on a port
    /// that goes down.
    pub(crate) fn set_port_state(&self, up: bool) {
        if self.vm.set_up_for_driver(up) != up {
            self.port_changed();
        }
    }

    /// The port may have gone down or come up: queue pairs look for their peers again.
    fn port_changed(&self) {
        self.fabric().set_link(&self.vm, self.vm.port_is_up());
        // Read sections that began before may still follow the old routes. A writer waits for their
        // end.
        drop(self.tables_mut());
        if self.vm.port_is_up() {
            for worker in &self.workers {
                worker.try_again();
            }
        }
    }

    /// Puts a queue pair in error on behalf of the operator, as a fault of the device would. Returns
    /// false if there is none, or it is in error or in no use.
    pub(crate) fn fail_qp(&self, number: u32) -> bool {
        let tables = self.tables();
        let failed = tables.qps.get(number).is_some_and(Qp::fail);
        if failed {
            raise(&tables, event_type::QP_FATAL, number, vendor_err::NONE);
        }
        failed
    }

    /// The same with a completion queue, as an overflow would.
    pub(crate) fn fail_cq(&self, number: u32) -> bool {
        let tables = self.tables();
        let Some(cq) = tables.cqs.get(number) else {
            return false;
        };
        let pushed = cq.fail();
        settle(&tables, cq, pushed);
        pushed != Pushed::Dropped
    }

    /// The operator took the link up or down.
    pub(crate) fn link_changed(&self) {
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

    /// The fabric that the port is on.
    pub(crate) fn fabric(&self) -> Local<'_> {
        Local {
            registry: &self.registry,
        }
    }

    /// The registry: which VM has which GID.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Whether the VM may set a GID with this source.
    ///
    /// # Errors
    /// If it may not, with the reason.
    pub(crate) fn judge_gid(&self, gid: Gid, source: L2Source) -> Result<(), Refusal> {
        let reserved = self.registry.is_reserved(&self.vm.network, gid);
        let settings = &self.settings;
        let policy = &settings.gid_policy;
        policy.judge(settings.mac, gid, source, reserved)
    }

    /// The tables. Not for workers.
    pub(crate) fn tables(&self) -> Read<'_, Tables> {
        self.vm.tables()
    }

    /// The tables, to change them. Returns when no access to guest memory is under way.
    pub(crate) fn tables_mut(&self) -> Write<'_, Tables> {
        self.vm.tables_mut()
    }

    /// Replaces guest memory: everything that was resolved is resolved anew. Returns when nobody
    /// uses the old memory.
    pub fn set_memory(&self, memory: Option<GuestMemory>) {
        let size = memory.as_ref().map_or(0, GuestMemory::size);
        self.vm
            .footprint()
            .set_limit(self.settings.limits.footprint(size));
        self.tables_mut().set_memory(memory);
    }

    /// The front end runs the rings: the VM is served from now on.
    pub fn start(&self, sink: Arc<dyn EventSink>) {
        let mut tables = self.tables_mut();
        tables.sink = Some(sink);
        tables.running = true;
        self.tell_link(&mut tables);
        if let Some(port) = &self.iwarp {
            port.raise(&tables);
        }
        // Until the workers said so themselves, they may be asleep.
        tables.announce_all(self.workers.len(), worker_status::SLEEPING);
        for (_, qp) in tables.qps.iter() {
            qp.schedule();
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
            self.registry.release(gid, &self.vm);
        }
        for gid in tables.groups() {
            self.registry.leave(gid, &self.vm, None);
        }
        for (_, qp) in tables.qps.iter() {
            qp.forget_peer(&*self.registry);
        }
        tables.clear();
        if let Some(port) = &self.iwarp {
            port.clear();
            self.ask_iwarp(Request::Forget { port: port.clone() });
        }
        // A driver that begins reads the configuration.
        tables.link_told = self.settings.link.is_up();
        self.vm.set_up_for_driver(true);
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
            worker.remove(&self.vm);
        }
        if let Some(adapter) = self.adapter.upgrade() {
            adapter.forget(self);
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
}

/// A GUID from the MAC address (EUI-64), or from the name where there is none.
fn node_guid(settings: &RnicSettings) -> u64 {
    if settings.mac != [0; 6] {
        return u64::from_be_bytes(eui64(settings.mac));
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

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::status::{EBUSY, EFAULT, ENOENT};
    use virtio_rdma_spec::command::{opcode, QpAttr, SetGid};
    use virtio_rdma_spec::config::feature;
    use virtio_rdma_spec::doorbell::worker_status::SLEEPING;
    use virtio_rdma_spec::event::event_type::{PORT_ACTIVE, PORT_ERR};
    use virtio_rdma_spec::verbs::qp_attr;

    use super::*;
    use crate::control::fixture::{Host, TestVm, WORKERS};

    const RC: u64 = 1 << feature::RC;

    #[test]
    fn a_guid_comes_from_the_mac_or_else_from_the_name() {
        let of = |name: &str, mac| {
            node_guid(&RnicSettings {
                name: name.to_owned(),
                mac,
                ..RnicSettings::default()
            })
        };
        assert_eq!(
            of("a", [0x52, 0x54, 0, 0x12, 0x34, 1]),
            0x5054_00ff_fe12_3401
        );
        let (a, b) = (of("a", [0; 6]), of("b", [0; 6]));
        assert!(a != b && a == of("a", [0; 6]));
        // Local, and of one device.
        assert_eq!((a >> 56 & 3, b >> 56 & 3), (2, 2));
    }

    // D-CFG-001.
    #[test]
    fn the_configuration_tells_of_queues_and_link() {
        let host = Host::new();
        let vm = host.vm_with(
            RC,
            &RnicSettings {
                mac: [1, 2, 3, 4, 5, 6],
                completion_queues: 3,
                ..RnicSettings::default()
            },
        );
        let config = vm.rnic.config();
        assert_eq!((config.mac, config.link_up), ([1, 2, 3, 4, 5, 6], 1));
        assert_eq!(
            (config.num_completion_queues, config.num_doorbell_queues),
            (3, WORKERS)
        );
        host.adapter.set_link(&vm.rnic.settings.link, false);
        let down = Config {
            link_up: 0,
            ..config
        };
        assert_eq!(vm.rnic.config(), down);
    }

    fn counts(vm: &TestVm) -> [u32; 4] {
        let tables = vm.rnic.tables();
        [
            tables.pds.len(),
            tables.cqs.len(),
            tables.contexts.len(),
            tables.qps.len(),
        ]
    }

    // D-INIT-002, D-RST-001.
    #[test]
    fn a_reset_leaves_no_object_and_gives_gids_back() {
        let host = Host::new();
        let (vm, other) = (host.vm(RC), host.vm(RC));
        let gid = TestVm::gid_body([7; 16]);
        vm.set_gid(&gid).unwrap();
        let body = vm.qp_body();
        let qpn = vm.make_qp(&body).unwrap().qpn;
        assert_eq!(counts(&vm), [1, 1, 1, 1]);
        assert_eq!(other.set_gid(&gid), Err(EBUSY));
        let qp = vm.rnic.tables().qps.get(qpn).unwrap().clone();
        vm.rnic.reset();
        assert_eq!(counts(&vm), [0; 4]);
        assert!(qp.dead.load(std::sync::atomic::Ordering::SeqCst));
        assert!(vm.rnic.vm().footprint().bytes() > 0, "it is still there");
        drop(qp);
        assert_eq!(vm.rnic.vm().footprint().bytes(), 0);
        assert_eq!(vm.handle(opcode::DESTROY_QP, qpn), Err(ENOENT));
        other.set_gid(&gid).unwrap();
        // And it begins anew.
        vm.make_qp(&vm.qp_body()).unwrap();
    }

    // D-STOP-001, D-STOP-002, D-STOP-004.
    #[test]
    fn a_stopped_vm_keeps_its_objects_and_its_memory_is_left_alone() {
        let vm = Host::new().vm(RC);
        let addr = 3 * virtio_rdma_spec::PAGE_SIZE;
        let page = virtio_rdma_spec::command::SetStatusPage { addr };
        vm.tell(opcode::SET_STATUS_PAGE, &page).unwrap();
        let qpn = vm.make_qp(&vm.qp_body()).unwrap().qpn;
        vm.rnic.stop();
        assert!(!vm.rnic.tables().running && vm.rnic.tables().sink.is_none());
        let marked = 7 << 32 | 7;
        vm.write(3, &[marked; 512]);
        vm.rnic.tables().announce_all(WORKERS.into(), SLEEPING);
        assert_eq!(vm.read(3), 7, "no status word is written");
        vm.rnic.start(vm.events.clone());
        assert_ne!(vm.read(3), 7);
        vm.init(qpn).unwrap();
        assert_eq!(counts(&vm), [1, 1, 1, 1]);
    }

    // D-STOP-005.
    #[test]
    fn objects_find_their_memory_again() {
        let vm = Host::new().vm(RC);
        let body = vm.qp_body();
        vm.make_qp(&body).unwrap();
        let region = vm.register(&vm.mr_body()).unwrap();
        let lost = || {
            let tables = vm.rnic.tables();
            let context = tables.contexts.get(body.context).unwrap();
            context.doorbell.lost()
        };
        assert!(!lost());
        vm.rnic.set_memory(None);
        assert!(lost());
        let mut again = vm.mr_body();
        again.pd = body.pd;
        assert_eq!(vm.register(&again).map(|keys| keys.lkey), Err(EFAULT));
        vm.rnic.set_memory(Some(vm.memory.clone()));
        assert!(!lost());
        vm.register(&again).unwrap();
        vm.handle(opcode::DEREG_MR, region.lkey).unwrap();
    }

    // D-LINK-001, D-LINK-004.
    #[test]
    fn a_driver_is_told_of_the_link_once_it_runs_and_only_if_it_changed() {
        let host = Host::new();
        let vm = host.vm(RC);
        let link = vm.rnic.settings.link.clone();
        assert_eq!(vm.events.take(), []);
        host.adapter.set_link(&link, false);
        host.adapter.set_link(&link, false);
        assert_eq!(vm.events.take(), [(PORT_ERR, PORT)]);
        // Up and down again while it is stopped: nothing new.
        vm.rnic.stop();
        host.adapter.set_link(&link, true);
        host.adapter.set_link(&link, false);
        vm.rnic.start(vm.events.clone());
        assert_eq!(vm.events.take(), []);
        vm.rnic.stop();
        host.adapter.set_link(&link, true);
        vm.rnic.start(vm.events.clone());
        assert_eq!(vm.events.take(), [(PORT_ACTIVE, PORT)]);
        // A reset changes no link, and who begins anew reads it.
        host.adapter.set_link(&link, false);
        vm.events.take();
        vm.rnic.reset();
        vm.rnic.start(vm.events.clone());
        assert_eq!((vm.events.take(), vm.rnic.config().link_up), (vec![], 0));
    }

    #[test]
    fn a_vm_that_goes_is_forgotten() {
        let host = Host::new();
        let (vm, other) = (host.vm(RC), host.vm(RC));
        let gid = TestVm::gid_body([7; 16]);
        vm.set_gid(&gid).unwrap();
        vm.make_qp(&vm.qp_body()).unwrap();
        let devices = || host.adapter.status()["devices"].as_array().unwrap().len();
        assert_eq!(devices(), 2);
        vm.rnic.detach();
        assert_eq!((devices(), counts(&vm)), (1, [0; 4]));
        assert!(vm.rnic.tables().memory.is_none());
        other.set_gid(&gid).unwrap();
        // Its link is still one that others may have.
        host.adapter.set_link(&vm.rnic.settings.link, false);
        assert_eq!(vm.events.take(), []);
    }

    // D-GID-003.
    #[test]
    fn a_gid_is_kept_for_its_device_while_queue_pairs_of_others_name_it() {
        const GID: Gid = [7; 16];
        let host = Host::new();
        let other = host.vm(RC);
        let device = RnicSettings::default();
        let body = TestVm::gid_body(GID);
        let ends: [fn(&TestVm, u32); 4] = [
            |server, qpn| server.handle(opcode::DESTROY_QP, qpn).unwrap(),
            |server, qpn| {
                let reset = QpAttr::default();
                server.modify(qpn, qp_attr::STATE, reset).unwrap();
            },
            |server, _| server.rnic.reset(),
            |server, _| server.rnic.detach(),
        ];
        for end in ends {
            let server = host.vm(RC);
            let qp = server.qp_body();
            let client = host.vm_with(RC, &device);
            client.set_gid(&body).unwrap();
            let qpn = server.connected(&qp, GID);
            client.rnic.detach();
            assert_eq!(other.set_gid(&body), Err(EBUSY));
            // The next VM of the device has it at once.
            let client = host.vm_with(RC, &device);
            client.set_gid(&body).unwrap();
            client.set_gid(&TestVm::gid_body([0; 16])).unwrap();
            assert_eq!(other.set_gid(&body), Err(EBUSY));
            // One that names it only now keeps it no longer.
            let late = server.connected(&qp, GID);
            end(&server, qpn);
            other.set_gid(&body).unwrap();
            other.set_gid(&TestVm::gid_body([0; 16])).unwrap();
            server.handle(opcode::DESTROY_QP, late).ok();
            client.rnic.detach();
        }
    }

    // D-GID-003.
    #[test]
    fn a_gid_that_only_its_own_vm_names_is_free_when_that_goes() {
        const GID: Gid = [7; 16];
        let host = Host::new();
        let (vm, other) = (host.vm(RC), host.vm(RC));
        let body = TestVm::gid_body(GID);
        vm.set_gid(&body).unwrap();
        let qp = vm.qp_body();
        vm.connected(&qp, GID);
        // Nor is one kept that nobody had.
        vm.connected(&qp, [8; 16]);
        other.set_gid(&TestVm::gid_body([8; 16])).unwrap();
        vm.set_gid(&TestVm::gid_body([0; 16])).unwrap();
        other.set_gid(&body).unwrap();
    }

    // D-GID-003.
    #[test]
    fn a_path_that_changes_names_another_gid() {
        let host = Host::new();
        let (server, client, other) = (host.vm(RC), host.vm(RC), host.vm(RC));
        let [old, new] = [[7; 16], [8; 16]];
        let set = |vm: &TestVm, index, gid| {
            let body = SetGid {
                index,
                ..TestVm::gid_body(gid)
            };
            vm.set_gid(&body)
        };
        set(&client, 0, old).unwrap();
        set(&client, 1, new).unwrap();
        let qpn = server.connected(&server.qp_body(), old);
        server.redirect(qpn, new);
        client.rnic.detach();
        assert_eq!(set(&other, 0, new), Err(EBUSY));
        set(&other, 0, old).unwrap();
        server.handle(opcode::DESTROY_QP, qpn).unwrap();
        set(&other, 1, new).unwrap();
    }
}
