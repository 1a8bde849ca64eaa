// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! A device from its discovery to its end.
use crate::connections::Connections;
use crate::kverbs::KernelContext;
use crate::sys::alloc::{Arc, Array};
use crate::sys::dma::{DmaBuffer, DmaDevice, DmaPage, Words};
use crate::sys::error::{Errno, Result};
use crate::sys::net::Pairing;
use crate::sys::rdma::{self, DeviceOps};
use crate::sys::sync::{sleep, Completion, SetOnce, Work};
use crate::sys::table::Table;
use crate::sys::virtio::{CommandQueue, EventQueue, Notifier, Rebind, VirtioDevice, Virtqueues};
use crate::targets::{CqTarget, QpTarget, SrqTarget};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use virtio_rdma_driver_core::Violation;
use virtio_rdma_spec::command::{opcode, QueryDeviceResponse, SetStatusPage};
use virtio_rdma_spec::config::{
    feature, first_doorbell_queue, Config, CONTROL_QUEUE, EVENT_QUEUE, FIRST_COMPLETION_QUEUE,
    MAX_QUEUES,
};
use virtio_rdma_spec::doorbell::{worker_status, STATUS_STRIDE};
use virtio_rdma_spec::event::{event_type, AsyncEvent, CompletionEvent};
use virtio_rdma_spec::PAGE_SIZE;

/// How long binding the driver waits for the device to come up. Longer than that, it comes up
/// later, by itself.
const START_WAIT_MS: u32 = 3_000;
/// How long after its loss the driver begins to take a device from its users.
const LOST_DELAY_MS: u32 = 100;
/// How long users in the kernel may take to destroy the queue pairs that they have on a lost
/// device. Those that have done so by the time the device is unregistered connect again by
/// themselves; of others it takes more (an NVMe controller, for one, is removed for good).
const LET_GO_MS: u32 = 10_000;
/// How long after that the device is still there, so that processes, too, see what became of their
/// work requests. It has no GID by which new connections would find it: NFS connects again at once,
/// and if its device goes between address and route, rdma_cm says EINVAL, which NFS hands to
/// applications. Otherwise it is refused, and tries again.
const SETTLES_MS: u32 = 700;
/// How often that is looked at.
const POLL_MS: u32 = 20;

/// Where the notify pages of the doorbell queues are.
#[derive(Clone, Copy)]
pub(crate) struct NotifyPages {
    /// Physical address of the first page; the others follow.
    pub(crate) addr: u64,
    /// Offset of the two bytes to write in each.
    pub(crate) offset: u32,
}

/// The features that device and driver agreed on.
#[derive(Clone, Copy)]
pub(crate) struct Features(u64);

impl Features {
    fn of(virtio: VirtioDevice) -> Self {
        Self(feature::ALL.iter().fold(0, |bits, (_, bit)| {
            let has = virtio.has_feature(*bit as u32);
            bits | u64::from(has).checked_shl(*bit as u32).unwrap_or(0)
        }))
    }

    /// `feature`: was this one agreed on?
    pub(crate) fn has(self, bit: u32) -> bool {
        self.0.checked_shr(bit).unwrap_or(0) & 1 != 0
    }

    /// All of them: bit n is feature n.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Can the kernel itself use the device? It needs a key for all of its memory, and the
    /// communication managers need datagrams, or the device's own connections.
    pub(crate) fn kernel_verbs(self) -> bool {
        self.has(feature::PHYSICAL_MR) && (self.has(feature::UD) || self.has(feature::IWARP))
    }
}

/// Device memory of all processes together, bytes.
pub(crate) const DM_TOTAL: u64 = 4 << 20;

/// One RDMA device. The order of the fields is the order in which they are dropped: what may still
/// call in comes first, the queues come after everything that uses them.
pub(crate) struct Device {
    rebind: Rebind,
    starting: Work<Device>,
    pairing: Pairing<Device>,
    refresh: Work<Device>,
    async_work: Work<Device>,
    connection_work: Work<Device>,
    lost_work: Work<Device>,

    virtio: VirtioDevice,
    dma: DmaDevice,
    ib: IbDevice,
    /// The operations that the core gets for these features.
    ops: fn(Features) -> DeviceOps,
    config: Config,
    features: Features,
    notify: NotifyPages,
    limits: SetOnce<QueryDeviceResponse>,

    /// Objects that completion and asynchronous events are for. They outlive the objects: the core
    /// destroys those before `stop` ends.
    cqs: Table<CqTarget>,
    qps: Table<QpTarget>,
    srqs: Table<SrqTarget>,
    /// Of iWARP.
    connections: Connections,
    /// What the kernel's own queue pairs ring with; none if the kernel cannot use the device.
    kernel: SetOnce<Option<KernelContext>>,
    notifiers: Array<Notifier>,

    commands: CommandQueue,
    async_queue: EventQueue<{ AsyncEvent::SIZE }>,
    completion_queues: Array<EventQueue<{ CompletionEvent::SIZE }>>,
    /// One status word per worker. The device writes it until it is reset.
    status_page: Arc<DmaBuffer>,
    _queues: Virtqueues,

    link_up: AtomicBool,
    /// The device was told that the interface is up, which is what it starts from.
    port_told_up: AtomicBool,
    /// The last state of the port that was reported.
    port_active: AtomicBool,
    /// The start is over, and how it ended (an errno, or zero).
    started: Completion,
    start_error: AtomicU32,
    /// The device told that it failed.
    failed: AtomicBool,
    /// The device wrote a completion that cannot be: none of them is read any longer.
    distrusted: AtomicBool,
    /// The device was reset because it was lost: it completes nothing any more, and the driver
    /// does.
    lost: AtomicBool,
    /// What follows of a loss was begun; its users were told.
    loss_seen: AtomicBool,
    loss_reported: AtomicBool,
    /// Queue pairs of users in the kernel, but for those of the core itself.
    kernel_qps: AtomicU32,
    /// The driver lets go of the device: nothing new.
    closing: AtomicBool,
    registered: AtomicBool,
    /// It answers, and is as the driver wants it; and interfaces are watched.
    prepared: AtomicBool,
    watching: AtomicBool,
    next_key: AtomicU32,
    /// Of device memory.
    dm_budget: Budget,
}

/// The core's device, with ours behind it.
pub(crate) type DeviceObject = rdma::DeviceObject<Device>;
/// A handle of that.
pub(crate) type IbDevice = rdma::IbDevice<Device>;

/// Something of which there is so much for all together.
pub(crate) struct Budget(AtomicU64);

impl Budget {
    /// Takes some; false if there is not enough left.
    pub(crate) fn take(&self, amount: u64) -> bool {
        let take = |left: u64| left.checked_sub(amount);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    /// Gives back what was taken.
    pub(crate) fn give_back(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}

impl Device {
    /// Looks at the device and sets up its queues; it is not ready yet.
    pub(crate) fn new(
        virtio: VirtioDevice,
        ib: IbDevice,
        ops: fn(Features) -> DeviceOps,
    ) -> Result<Self> {
        if !virtio.has_feature(feature::RC) {
            virtio.error(
                "the device offers no RC queue pairs: feature bit",
                i64::from(feature::RC),
            );
            return Err(Errno::ENODEV);
        }
        let dma = virtio.dma()?;
        let config = virtio.config();
        let (completions, doorbells) = (config.num_completion_queues, config.num_doorbell_queues);
        let first_doorbell = first_doorbell_queue(completions);
        let total = first_doorbell.saturating_add(doorbells);
        let status_words = PAGE_SIZE as usize / STATUS_STRIDE;
        if completions == 0
            || doorbells == 0
            || total > MAX_QUEUES
            || usize::from(doorbells) > status_words
        {
            virtio.error(
                "bad number of queues in the configuration",
                i64::from(total),
            );
            return Err(Errno::EINVAL);
        }
        // The driver shows the device addresses for DMA; where the platform translates those, the
        // device must know.
        let status_page = Arc::new(DmaBuffer::new(dma, 1)?)?;
        if !has_platform_access(virtio) && !status_page.pages().iter().all(DmaPage::is_physical) {
            virtio.error(
                "DMA is translated here, and the device cannot (ACCESS_PLATFORM): feature bit",
                33,
            );
            return Err(Errno::EOPNOTSUPP);
        }

        let queues = Virtqueues::find(virtio, total, first_doorbell)?;
        let notify = notify_pages(virtio, total, first_doorbell, doorbells)?;
        let completion_queues = Array::new(usize::from(completions), |i| {
            let index = FIRST_COMPLETION_QUEUE.wrapping_add(i as u16);
            queues.spread(index, i as u16);
            EventQueue::new(&queues, index)
        })?;
        let notifiers = Array::new(usize::from(doorbells), |i| {
            queues.notifier(first_doorbell.saturating_add(i as u16))
        })?;
        Ok(Self {
            rebind: Rebind::new(virtio)?,
            starting: Work::new(ib, Device::bring_up)?,
            pairing: Pairing::new(ib, Device::netdev_changed)?,
            refresh: Work::new(ib, Device::refresh)?,
            async_work: Work::new(ib, Device::deliver_async)?,
            connection_work: Work::new(ib, Device::take_connection_events)?,
            lost_work: Work::new(ib, Device::after_loss)?,
            virtio,
            dma,
            ib,
            ops,
            config,
            features: Features::of(virtio),
            notify,
            limits: SetOnce::new(QueryDeviceResponse::default()),
            cqs: Table::new()?,
            qps: Table::new()?,
            srqs: Table::new()?,
            connections: Connections::new()?,
            kernel: SetOnce::new(None),
            notifiers,
            commands: CommandQueue::new(&queues, CONTROL_QUEUE)?,
            async_queue: EventQueue::new(&queues, EVENT_QUEUE)?,
            completion_queues,
            status_page,
            _queues: queues,
            link_up: AtomicBool::new(config.link_up != 0),
            port_told_up: AtomicBool::new(true),
            port_active: AtomicBool::new(false),
            started: Completion::new()?,
            start_error: AtomicU32::new(0),
            failed: AtomicBool::new(false),
            distrusted: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            loss_seen: AtomicBool::new(false),
            loss_reported: AtomicBool::new(false),
            kernel_qps: AtomicU32::new(0),
            closing: AtomicBool::new(false),
            registered: AtomicBool::new(false),
            prepared: AtomicBool::new(false),
            watching: AtomicBool::new(false),
            next_key: AtomicU32::new(0),
            dm_budget: Budget(AtomicU64::new(DM_TOTAL)),
        })
    }

    /// Takes the device into use. On an error, [`Self::stop`] must follow. The process behind the
    /// device may be away, and then the device comes up when it is there.
    pub(crate) fn start(&self) -> Result<()> {
        self.async_queue.fill()?;
        for queue in self.completion_queues.iter() {
            queue.fill()?;
        }
        self.virtio.ready();
        self.async_queue.kick();
        for queue in self.completion_queues.iter() {
            queue.kick();
        }
        self.starting.schedule();
        if !self.started.wait(START_WAIT_MS) {
            self.virtio.warning(
                "the device does not answer yet: it comes up when its process on the host does",
            );
            return Ok(());
        }
        match self.start_error.load(Ordering::Acquire) {
            0 => Ok(()),
            // It is taken into use again by itself.
            _ if self.commands.is_dead() => Ok(()),
            code => Err(Errno::from_number(code)),
        }
    }

    /// The part of the start that needs answers; the work item for that.
    fn bring_up(&self) {
        if let Err(error) = self.try_bring_up() {
            if !self.is_closing() {
                self.virtio.failed("the device cannot be used", error);
            }
            self.start_error.store(error.number(), Ordering::Release);
        }
        self.started.complete();
        self.note_loss();
    }

    fn try_bring_up(&self) -> Result<()> {
        if self.is_closing() || self.registered.load(Ordering::Acquire) {
            return Ok(());
        }
        if !self.prepared.load(Ordering::Relaxed) {
            self.prepare()?;
            self.prepared.store(true, Ordering::Release);
        }
        self.pairing.pair(&self.config.mac);
        let iwarp = self.features.has(feature::IWARP);
        if iwarp && !self.is_paired() {
            // The core has no port of iWARP without an interface.
            if !self.watching.load(Ordering::Relaxed) {
                self.virtio
                    .warning("the RDMA device comes up when its network interface does");
            }
            return self.watch();
        }
        self.tell_port_state();
        self.port_active
            .store(self.port_is_active(), Ordering::Relaxed);
        let vectors = self.config.num_completion_queues;
        let guid = self.config.node_guid;
        let ops = (self.ops)(self.features);
        if iwarp {
            self.ib.set_iwarp();
        }
        self.ib.register(self.dma, guid, vectors, &ops)?;
        self.registered.store(true, Ordering::Release);
        if self.watching.load(Ordering::Relaxed) {
            // What happened since `pair` was not for a device that is known.
            self.schedule_refresh();
        }
        self.watch()?;
        if self.take_failed() {
            // Nobody was there to be told.
            self.schedule_refresh();
        }
        self.virtio.info(
            "RDMA device ready; doorbell queues",
            i64::from(self.config.num_doorbell_queues),
        );
        Ok(())
    }

    /// Watches interfaces from here on; first comes what happened since they were paired.
    fn watch(&self) -> Result<()> {
        if self.watching.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        self.pairing.start()
    }

    /// Asks the device for its limits, and sets up what they allow.
    fn prepare(&self) -> Result<()> {
        let limits: QueryDeviceResponse = self.command(opcode::QUERY_DEVICE, &[0u8; 0])?;
        self.commands.expect_answers();
        if limits.gid_table_len == 0
            || limits.pkey_table_len == 0
            || limits.page_size_cap & PAGE_SIZE == 0
        {
            self.virtio.error(
                "limits of the device that make no sense: page sizes",
                limits.page_size_cap as i64,
            );
            return Err(Errno::EINVAL);
        }
        self.limits.set(limits);
        let addr = self.status_page.pages().first().map_or(0, DmaPage::addr);
        self.simple_command(opcode::SET_STATUS_PAGE, &SetStatusPage { addr })?;
        if self.features.kernel_verbs() {
            self.kernel.set(Some(KernelContext::new(self)?));
        }
        Ok(())
    }

    /// Ends all use of the device. Afterwards nothing calls in any more, and the device is reset.
    pub(crate) fn stop(&self) {
        self.closing.store(true, Ordering::Release);
        if !self.registered.load(Ordering::Acquire) {
            // A start that still waits for an answer waits no longer.
            self.commands.die();
        }
        self.starting.cancel();
        self.pairing.stop();
        // An interface may have come in between.
        self.starting.cancel();
        self.refresh.cancel();
        self.async_work.cancel();
        self.connection_work.cancel();
        // From here on nobody takes events, and those who wait for one must not wait for ever.
        self.connections.close(self);
        if self.registered.swap(false, Ordering::AcqRel) {
            self.wait_for_kernel_users();
            self.ib.unregister();
        }
        self.commands.die();
        // A system that was suspended has set it up again meanwhile.
        self.virtio.reset();
        // Interrupts are over; these may have come in between.
        self.refresh.cancel();
        self.async_work.cancel();
        self.connection_work.cancel();
        self.lost_work.cancel();
    }

    /// Gives users in the kernel the time to let go of a device that was lost.
    fn wait_for_kernel_users(&self) {
        if !self.is_lost() {
            return;
        }
        let mut waited = 0u32;
        loop {
            let queue_pairs = self.kernel_qps.load(Ordering::Acquire);
            if queue_pairs == 0 {
                break;
            }
            if waited >= LET_GO_MS {
                self.virtio.error(
                    "users in the kernel do not let go of the device that was lost; queue pairs",
                    i64::from(queue_pairs),
                );
                return;
            }
            sleep(POLL_MS);
            waited = waited.saturating_add(POLL_MS);
        }
        self.ib.delete_gids();
        sleep(SETTLES_MS);
    }

    /// The system is suspended: the device, which forgets everything now, is given up like one that
    /// was lost, and taken into use again when the system goes on.
    pub(crate) fn freeze(&self) {
        self.give_up();
    }

    /// The system ends: the device touches no memory any more.
    pub(crate) fn shut_down(&self) {
        self.closing.store(true, Ordering::Release);
        self.commands.die();
    }

    /// The device cannot be used any longer: resets it, so that it has no access to memory, and
    /// sees to what follows. Process context.
    pub(crate) fn fail(&self, why: &str) {
        if !self.commands.is_dead() {
            self.virtio.warning(why);
        }
        self.give_up();
    }

    /// As [`Self::fail`], if the reason is known already. Process context.
    pub(crate) fn give_up(&self) {
        self.commands.die();
        self.note_loss();
    }

    /// If the device was lost, begins what follows of that: see [`Self::after_loss`]. Any context.
    pub(crate) fn note_loss(&self) {
        if self.commands.is_dead() && !self.loss_seen.swap(true, Ordering::AcqRel) {
            self.lost_work.schedule();
        }
    }

    /// Was the device lost? Then the driver completes all work requests.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Something was posted: if the device was lost, it has to be completed. Any context.
    pub(crate) fn posted(&self) {
        if self.is_lost() {
            self.lost_work.schedule();
        }
    }

    /// What follows when the device was lost: its users are told, all work requests complete (by
    /// the driver, in the thread that polls), and the device is taken into use again. The work item
    /// for that, and for what is posted later.
    fn after_loss(&self) {
        // Returns when the device is reset, by this thread or another: so it overwrites the status
        // words no more.
        self.commands.die();
        self.status_page
            .words()
            .iter()
            .step_by(STATUS_STRIDE / 8)
            .for_each(|word| word.store(u64::from(worker_status::LOST).to_le(), Ordering::SeqCst));
        self.lost.store(true, Ordering::SeqCst);
        let first = !self.loss_reported.swap(true, Ordering::AcqRel);
        if first && self.registered.load(Ordering::Acquire) && !self.is_closing() {
            self.ib.dispatch(event_type::DEVICE_FATAL);
            self.report_port();
        }
        self.cqs.for_each(CqTarget::flushed);
        if first {
            self.qps.for_each(QpTarget::lost);
            self.connections.lost(self);
            if !self.is_closing() {
                self.rebind.schedule(LOST_DELAY_MS);
            }
        }
    }

    /// As [`Self::fail`], later. Any context.
    pub(crate) fn fail_later(&self) {
        self.failed.store(true, Ordering::Release);
        self.schedule_refresh();
    }

    /// Did [`Self::fail_later`] ask for it?
    pub(crate) fn take_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The device wrote a completion that no device writes, of a queue pair with this number, for a
    /// user in the kernel: gives the device up. Any context.
    pub(crate) fn distrust(&self, qpn: u32, violation: Violation) {
        if !self.distrusted.swap(true, Ordering::AcqRel) {
            self.virtio.error(violation.as_str(), i64::from(qpn));
            self.fail_later();
        }
    }

    /// Did the device write a completion that cannot be?
    pub(crate) fn is_distrusted(&self) -> bool {
        self.distrusted.load(Ordering::Acquire)
    }

    /// The configuration space changed. Any context.
    pub(crate) fn config_changed(&self) {
        self.schedule_refresh();
    }

    /// A network interface came, went or changed. Any context.
    pub(crate) fn netdev_changed(&self) {
        let waits =
            self.watching.load(Ordering::Relaxed) && !self.registered.load(Ordering::Acquire);
        if waits && !self.is_closing() {
            self.starting.schedule();
        }
        self.schedule_refresh();
    }

    fn schedule_refresh(&self) {
        if !self.is_closing() && self.registered.load(Ordering::Acquire) {
            self.refresh.schedule();
        }
    }

    /// Lets the work item of the event queue run.
    pub(crate) fn schedule_async(&self) {
        if !self.is_closing() {
            self.async_work.schedule();
        }
    }

    /// Lets the work item for events of connections run.
    pub(crate) fn schedule_connection_events(&self) {
        if !self.is_closing() {
            self.connection_work.schedule();
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn virtio(&self) -> VirtioDevice {
        self.virtio
    }

    pub(crate) fn dma(&self) -> DmaDevice {
        self.dma
    }

    pub(crate) fn ib(&self) -> IbDevice {
        self.ib
    }

    pub(crate) fn limits(&self) -> &QueryDeviceResponse {
        self.limits.get()
    }

    pub(crate) fn notify(&self) -> NotifyPages {
        self.notify
    }

    /// Pairs the port with its interface, as interfaces are now. True if that changed anything. May
    /// sleep.
    pub(crate) fn pair(&self) -> bool {
        self.pairing.pair(&self.config.mac)
    }

    /// Is the port paired with an interface?
    pub(crate) fn is_paired(&self) -> bool {
        self.pairing.is_paired()
    }

    /// Is the paired interface up?
    pub(crate) fn netdev_is_up(&self) -> bool {
        self.pairing.is_up()
    }

    pub(crate) fn node_guid(&self) -> u64 {
        self.config.node_guid
    }

    pub(crate) fn completion_vectors(&self) -> u16 {
        self.config.num_completion_queues
    }

    pub(crate) fn doorbell_queues(&self) -> u16 {
        self.config.num_doorbell_queues
    }

    pub(crate) fn status_page(&self) -> &[DmaPage] {
        self.status_page.pages()
    }

    /// The status page, to look at.
    pub(crate) fn status(&self) -> Words {
        Words(self.status_page.clone())
    }

    pub(crate) fn features(&self) -> Features {
        self.features
    }

    /// The kernel's own context, if the kernel can use the device.
    pub(crate) fn kernel_context(&self) -> Option<&KernelContext> {
        self.kernel.get().as_ref()
    }

    /// What wakes the worker of a doorbell queue, counted from 0.
    pub(crate) fn notifier(&self, queue: u32) -> Option<Notifier> {
        self.notifiers.get(queue as usize).copied()
    }

    pub(crate) fn cqs(&self) -> &Table<CqTarget> {
        &self.cqs
    }

    pub(crate) fn qps(&self) -> &Table<QpTarget> {
        &self.qps
    }

    pub(crate) fn srqs(&self) -> &Table<SrqTarget> {
        &self.srqs
    }

    /// Connections of iWARP.
    pub(crate) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// Queue pairs of users in the kernel.
    pub(crate) fn kernel_qps(&self) -> &AtomicU32 {
        &self.kernel_qps
    }

    pub(crate) fn dm_budget(&self) -> &Budget {
        &self.dm_budget
    }

    pub(crate) fn commands(&self) -> &CommandQueue {
        &self.commands
    }

    pub(crate) fn async_queue(&self) -> &EventQueue<{ AsyncEvent::SIZE }> {
        &self.async_queue
    }

    pub(crate) fn completion_queue(
        &self,
        index: u16,
    ) -> Option<&EventQueue<{ CompletionEvent::SIZE }>> {
        self.completion_queues.get(usize::from(index))
    }

    pub(crate) fn link_up(&self) -> &AtomicBool {
        &self.link_up
    }

    pub(crate) fn port_told_up(&self) -> &AtomicBool {
        &self.port_told_up
    }

    pub(crate) fn port_active(&self) -> &AtomicBool {
        &self.port_active
    }

    /// The part of the next region's keys that the driver chooses: differs from the last ones, so
    /// that a stale key does not fit.
    pub(crate) fn next_key(&self) -> u8 {
        self.next_key.fetch_add(1, Ordering::Relaxed) as u8
    }
}

/// VIRTIO_F_ACCESS_PLATFORM, which the virtio core negotiates.
fn has_platform_access(virtio: VirtioDevice) -> bool {
    virtio.has_feature(33)
}

/// Finds the notify pages of the doorbell queues, and sees to it that a process that maps them can
/// notify nothing else.
fn notify_pages(virtio: VirtioDevice, total: u16, first: u16, count: u16) -> Result<NotifyPages> {
    let refuse = |number: u32| {
        virtio.error(
            "doorbell queues have no notify pages of their own (QEMU: set page-per-vq=on); notify multiplier",
            i64::from(number),
        );
        Err(Errno::EOPNOTSUPP)
    };
    let capability = virtio.notify_capability()?;
    let multiplier = u64::from(capability.multiplier);
    // With another multiple of the page size they would not follow each other.
    if multiplier != PAGE_SIZE {
        return refuse(capability.multiplier);
    }
    let offsets = virtio.notify_offsets(usize::from(total))?;
    let start = offsets.get(usize::from(first)).copied().unwrap_or(0);
    let expected = |i: usize| usize::from(start).checked_add(i.checked_sub(usize::from(first))?);
    for (i, offset) in offsets.iter().enumerate() {
        let ours = usize::from(start) <= usize::from(*offset)
            && usize::from(*offset) < usize::from(start).saturating_add(usize::from(count));
        let fits = match expected(i) {
            Some(expected) => expected == usize::from(*offset),
            None => !ours,
        };
        if !fits {
            return refuse(capability.multiplier);
        }
    }
    let first_byte = u64::from(start).saturating_mul(multiplier);
    let needed = u64::from(count).saturating_mul(PAGE_SIZE);
    let within = capability.start % PAGE_SIZE;
    if first_byte.saturating_add(needed) > capability.length || within > PAGE_SIZE.saturating_sub(2)
    {
        return refuse(capability.multiplier);
    }
    Ok(NotifyPages {
        addr: capability
            .start
            .saturating_add(first_byte)
            .saturating_sub(within),
        offset: within as u32,
    })
}
