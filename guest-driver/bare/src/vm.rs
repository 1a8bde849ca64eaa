// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VM: what QEMU and the guest's virtio core do, and the control queue.
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::VhostBackend;
use virtio_rdma_driver_core::command::{self, Command, SetGid, SetPortState, SetStatusPage};
use virtio_rdma_spec::command::{gid_type, QueryDeviceResponse, QueryPort, QueryPortResponse};
use virtio_rdma_spec::config::{
    feature, first_doorbell_queue, Config, CONTROL_QUEUE, EVENT_QUEUE, FIRST_COMPLETION_QUEUE,
};
use virtio_rdma_spec::event::{AsyncEvent, CompletionEvent};

use crate::front_end::{FrontEnd, Session};
use crate::mapping::View;
use crate::memory::{Buffer, Placement, Region};
use crate::virtqueue::{Descriptor, Doorbell, Virtqueue};
use crate::{Error, PAGE};

const VERSION_1: u64 = 1 << 32;
const RING_EVENT_IDX: u64 = 1 << 29;
const RING_INDIRECT_DESC: u64 = 1 << 28;
/// Guest-physical address of the first region, and the distance between regions.
const FIRST_REGION: u64 = 1 << 30;
const REGION_DISTANCE: u64 = 1 << 36;
/// Space for a command, and for a response.
const COMMAND_SPACE: usize = 2 * PAGE;
/// Buffer of an event.
const EVENT_SIZE: usize = AsyncEvent::SIZE;

/// How the VM is made.
#[derive(Debug, Clone)]
pub struct VmOptions {
    /// How it has the device.
    pub front_end: FrontEnd,
    /// Its memory, bytes.
    pub memory: usize,
    /// How the buffers of queues and doorbells, and those that are registered, lie in it.
    pub placement: Placement,
    /// Its first region consists of huge pages of the host, of which there must be enough. Buffers
    /// must be contiguous then.
    pub huge_pages: bool,
    /// Use RING_EVENT_IDX.
    pub event_index: bool,
    /// Size of the control queue.
    pub control_size: u16,
    /// Size of the event queues: buffers for events.
    pub event_size: u16,
    /// Length of these buffers, bytes, at most that of the longest event: shorter ones get events
    /// cut.
    pub event_length: usize,
    /// Tell the memory by one SET_MEM_TABLE, not region by region, with vhost-user.
    pub mem_table: bool,
    /// How long the device may take for a command.
    pub timeout: Duration,
    /// GID at index 0; otherwise one is made from the MAC address. All zero: none.
    pub gid: Option<[u8; 16]>,
    /// Device-specific features to accept beside RC: their bits (1 << `config::feature`).
    pub features: u64,
}

impl Default for VmOptions {
    fn default() -> Self {
        Self {
            front_end: FrontEnd::default(),
            memory: 64 << 20,
            placement: Placement::Scattered,
            huge_pages: false,
            event_index: true,
            control_size: 64,
            event_size: 64,
            event_length: EVENT_SIZE,
            mem_table: false,
            timeout: Duration::from_secs(20),
            gid: None,
            features: 0,
        }
    }
}

/// Serializes commands.
struct Control {
    queue: Virtqueue,
    command: Buffer,
    response: Buffer,
}

/// An event queue with its buffers.
struct EventQueue {
    queue: Virtqueue,
    buffers: Buffer,
    /// Length of each.
    length: usize,
    /// The buffer of each chain.
    slots: Vec<usize>,
}

impl EventQueue {
    /// With what notifies it, if it is not an eventfd.
    fn new(
        region: &Arc<Region>,
        options: &VmOptions,
        doorbell: Option<Doorbell>,
    ) -> Result<Self, Error> {
        let size = options.event_size;
        let buffers = region.buffer(usize::from(size) * EVENT_SIZE, Placement::Contiguous)?;
        let queue = Virtqueue::new(region, size, options.event_index, doorbell)?;
        let mut events = Self {
            queue,
            buffers,
            length: options.event_length.min(EVENT_SIZE),
            slots: vec![0; usize::from(size)],
        };
        for slot in 0..usize::from(size) {
            events.post(slot)?;
        }
        Ok(events)
    }

    fn post(&mut self, slot: usize) -> Result<(), Error> {
        let offset = slot * EVENT_SIZE;
        let addr = self.buffers.page(offset / PAGE) + (offset % PAGE) as u64;
        let head = self.queue.add(&[Descriptor {
            addr,
            len: self.length as u32,
            writable: true,
        }])?;
        self.slots[usize::from(head)] = slot;
        Ok(())
    }

    fn wait(&mut self, deadline: Instant) -> Result<Option<Vec<u8>>, Error> {
        let Some((head, len)) = self.queue.wait_used(deadline)? else {
            return Ok(None);
        };
        let slot = *self.slots.get(usize::from(head)).ok_or(Error::BadAddress)?;
        let bytes = self
            .buffers
            .view()
            .get(slot * EVENT_SIZE, (len as usize).min(EVENT_SIZE));
        self.post(slot)?;
        self.queue.notify()?;
        Ok(Some(bytes))
    }
}

/// A connected, running VM.
pub struct Vm {
    path: PathBuf,
    options: VmOptions,
    session: Session,
    config: Config,
    features: u64,
    regions: RwLock<Vec<Arc<Region>>>,
    control: Mutex<Control>,
    asynchronous: Mutex<EventQueue>,
    completion: Vec<Mutex<EventQueue>>,
    doorbells: Vec<Virtqueue>,
    bases: Mutex<Vec<u16>>,
    status_page: Buffer,
    gid: [u8; 16],
    notifications: AtomicU64,
    /// The device does not answer: so that a thousand objects do not wait for it one after the
    /// other when dropped.
    dead: AtomicBool,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Connects to the device behind `path`, and brings up driver and device.
    ///
    /// # Errors
    /// If anything on the way fails.
    pub fn connect(path: &Path, options: VmOptions) -> Result<Arc<Self>, Error> {
        let mut features = VERSION_1 | RING_INDIRECT_DESC | 1 << feature::RC | options.features;
        if options.event_index {
            features |= RING_EVENT_IDX;
        }
        let (session, features) = Session::new(options.front_end, path, features)?;
        let config = session.config()?;
        let first_doorbell = first_doorbell_queue(config.num_completion_queues);
        let queues = first_doorbell + config.num_doorbell_queues;
        if u64::from(queues) != session.queues()? {
            return Err(Error::BadLayout);
        }

        let region = Region::new(FIRST_REGION, options.memory, options.huge_pages)?;
        let event_index = options.event_index;
        let doorbell = |queue| session.doorbell(queue);
        let control_doorbell = doorbell(CONTROL_QUEUE);
        let control = Control {
            queue: Virtqueue::new(&region, options.control_size, event_index, control_doorbell)?,
            command: region.buffer(COMMAND_SPACE, Placement::Contiguous)?,
            response: region.buffer(COMMAND_SPACE, Placement::Contiguous)?,
        };
        let events = |index| EventQueue::new(&region, &options, doorbell(index)).map(Mutex::new);
        let completion = (FIRST_COMPLETION_QUEUE..first_doorbell)
            .map(events)
            .collect::<Result<_, _>>()?;
        let asynchronous = events(EVENT_QUEUE)?;
        let doorbells = (first_doorbell..queues)
            .map(|index| Virtqueue::new(&region, 2, event_index, doorbell(index)))
            .collect::<Result<_, _>>()?;
        let gid = options.gid.unwrap_or_else(|| {
            let [a, b, c, d, e, f] = config.mac;
            [
                0xfe,
                0x80,
                0,
                0,
                0,
                0,
                0,
                0,
                a ^ 2,
                b,
                c,
                0xff,
                0xfe,
                d,
                e,
                f,
            ]
        });
        let vm = Self {
            path: path.to_owned(),
            session,
            config,
            features,
            asynchronous,
            status_page: region.buffer(PAGE, Placement::Contiguous)?,
            regions: RwLock::new(vec![region]),
            control: Mutex::new(control),
            completion,
            doorbells,
            bases: Mutex::new(vec![0; usize::from(queues)]),
            gid,
            notifications: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            options,
        };
        vm.session.map(&vm.region(0), vm.options.mem_table)?;
        vm.start()?;
        vm.initialize()?;
        Ok(Arc::new(vm))
    }

    /// What the guest driver does once its queues run.
    fn initialize(&self) -> Result<(), Error> {
        self.execute::<SetStatusPage>(&virtio_rdma_spec::command::SetStatusPage {
            addr: self.status_page.page(0),
        })?;
        if self.gid != [0; 16] {
            self.set_gid(0, self.gid)?;
        }
        Ok(())
    }

    /// The MAC address of its network interface, or zero.
    #[must_use]
    pub fn mac(&self) -> [u8; 6] {
        self.config.mac
    }

    /// The socket of its device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration space as it was when the VM came up.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether a `config::feature` was accepted.
    #[must_use]
    pub fn accepted(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }

    /// GID at index 0.
    #[must_use]
    pub fn gid(&self) -> [u8; 16] {
        self.gid
    }

    /// The vhost-user connection, for messages that a front end should not send.
    ///
    /// # Panics
    /// If it is not by vhost-user that the VM has the device.
    #[must_use]
    pub fn frontend(&self) -> Frontend {
        self.session.frontend().expect("vhost-user")
    }

    /// A region of its memory; region 0 is the one it came up with.
    ///
    /// # Panics
    /// If there is no such region.
    #[must_use]
    pub fn region(&self, number: usize) -> Arc<Region> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)[number].clone()
    }

    /// A buffer in region 0.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn buffer(&self, size: usize, placement: Placement) -> Result<Buffer, Error> {
        self.region(0).buffer(size, placement)
    }

    /// A buffer in region 0, placed as the options say.
    ///
    /// # Errors
    /// If there is no memory left.
    pub fn placed_buffer(&self, size: usize) -> Result<Buffer, Error> {
        self.buffer(size, self.options.placement)
    }

    /// The status page, as the device writes it.
    #[must_use]
    pub fn status_page(&self) -> &View {
        self.status_page.view()
    }

    /// Notifications of doorbell queues so far (what would be VM exits).
    #[must_use]
    pub fn notifications(&self) -> u64 {
        self.notifications.load(Ordering::Relaxed)
    }

    /// Notifies a doorbell queue, 0 to D - 1.
    ///
    /// # Errors
    /// If the system refuses.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn notify_doorbell(&self, queue: u32) -> Result<(), Error> {
        self.notifications.fetch_add(1, Ordering::Relaxed);
        self.doorbells[queue as usize].notify()
    }

    /// A doorbell queue, 0 to D - 1, for things that no driver does.
    ///
    /// # Panics
    /// If there is no such queue.
    #[must_use]
    pub fn doorbell_queue(&self, queue: u32) -> &Virtqueue {
        &self.doorbells[queue as usize]
    }

    /// Applies `f` to virtqueue `index`, which exists.
    fn with_queue<R>(&self, index: u16, f: impl FnOnce(&Virtqueue) -> R) -> R {
        let first_doorbell = first_doorbell_queue(self.config.num_completion_queues);
        if index == CONTROL_QUEUE {
            f(&lock(&self.control).queue)
        } else if index == EVENT_QUEUE {
            f(&lock(&self.asynchronous).queue)
        } else if index < first_doorbell {
            f(&lock(&self.completion[usize::from(index - FIRST_COMPLETION_QUEUE)]).queue)
        } else {
            f(&self.doorbells[usize::from(index - first_doorbell)])
        }
    }

    /// Number of virtqueues.
    #[must_use]
    pub fn queues(&self) -> u16 {
        first_doorbell_queue(self.config.num_completion_queues) + self.config.num_doorbell_queues
    }

    /// Starts the virtqueues where they were stopped: the VM runs.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn start(&self) -> Result<(), Error> {
        self.dead.store(false, Ordering::Relaxed);
        self.session.accept(self.features)?;
        for index in 0..self.queues() {
            let base = lock(&self.bases)[usize::from(index)];
            self.with_queue(index, |queue| self.session.start(index, base, queue))?;
        }
        self.session.run()
    }

    /// Stops all virtqueues, as QEMU does for a VM that is paused. When this returns, the VM is
    /// quiet.
    ///
    /// # Errors
    /// If the device refuses, or it is not by vhost-user that the VM has it.
    pub fn stop(&self) -> Result<(), Error> {
        let mut frontend = self.session.frontend()?;
        for index in 0..self.queues() {
            frontend.set_vring_enable(usize::from(index), false)?;
        }
        for index in 0..self.queues() {
            let base = frontend.get_vring_base(usize::from(index))?;
            lock(&self.bases)[usize::from(index)] = base as u16;
        }
        Ok(())
    }

    /// Resets the device and brings it up again, as a guest that boots does. All objects are gone;
    /// drop yours.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn reset(&self) -> Result<(), Error> {
        if self.options.front_end == FrontEnd::VhostUser {
            self.stop()?;
        }
        self.session.reset()?;
        self.restart()
    }

    /// As [`Vm::reset`], but without telling the device: the guest's virtqueues just begin anew.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn reset_silently(&self) -> Result<(), Error> {
        self.stop()?;
        self.restart()
    }

    /// Virtqueues from nothing.
    fn restart(&self) -> Result<(), Error> {
        let region = self.region(0);
        lock(&self.control).queue = Virtqueue::new(
            &region,
            self.options.control_size,
            self.options.event_index,
            self.session.doorbell(CONTROL_QUEUE),
        )?;
        let completion = (FIRST_COMPLETION_QUEUE..).zip(&self.completion);
        for (index, events) in completion.chain([(EVENT_QUEUE, &self.asynchronous)]) {
            let doorbell = self.session.doorbell(index);
            *lock(events) = EventQueue::new(&region, &self.options, doorbell)?;
        }
        lock(&self.bases).fill(0);
        self.status_page.view().zero();
        self.start()?;
        self.initialize()
    }

    /// Breaks the connection, as a QEMU that is killed does.
    pub fn kill(&self) {
        self.dead.store(true, Ordering::Relaxed);
        self.session.kill();
    }

    /// Plugs in memory; returns the number of the new region.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn add_memory(&self, size: usize) -> Result<usize, Error> {
        self.add_region(|guest_addr| Region::new(guest_addr, size, false))
    }

    /// Plugs in memory whose pages are the first `size` bytes of a file; returns the number of the
    /// new region.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn add_memory_of(&self, file: File, size: usize) -> Result<usize, Error> {
        self.add_region(|guest_addr| Region::of(guest_addr, file, size))
    }

    fn add_region(
        &self,
        make: impl FnOnce(u64) -> Result<Arc<Region>, Error>,
    ) -> Result<usize, Error> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        let number = regions.len();
        let region = make(FIRST_REGION + REGION_DISTANCE * number as u64)?;
        self.session.map(&region, false)?;
        regions.push(region);
        Ok(number)
    }

    /// Unplugs a region. Its number stays taken, and the memory is still ours.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn remove_memory(&self, number: usize) -> Result<(), Error> {
        self.session.unmap(&self.region(number))
    }

    /// Plugs a region in that was unplugged.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn replug_memory(&self, number: usize) -> Result<(), Error> {
        self.session.map(&self.region(number), false)
    }

    /// Executes a command.
    ///
    /// # Errors
    /// If the device refuses it, or does not answer.
    pub fn execute<C: Command>(&self, body: &C::Body) -> Result<C::Response, Error> {
        let mut bytes = vec![0; C::COMMAND_LEN];
        command::build::<C>(body, &mut bytes)?;
        Ok(command::parse::<C>(&self.raw_command(&bytes, PAGE)?)?)
    }

    /// Sends any bytes as a command, with space for a response of `space` bytes; returns the
    /// response as far as it was used.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn raw_command(&self, bytes: &[u8], space: usize) -> Result<Vec<u8>, Error> {
        self.raw_chain(bytes, &[bytes.len()], &[space])
    }

    /// As [`Vm::raw_command`], with the command and the space for the response in pieces of these
    /// lengths.
    ///
    /// # Errors
    /// If the device does not answer, or the pieces are too long.
    pub fn raw_chain(
        &self,
        bytes: &[u8],
        readable: &[usize],
        writable: &[usize],
    ) -> Result<Vec<u8>, Error> {
        let space = COMMAND_SPACE;
        let mut control = lock(&self.control);
        let control = &mut *control;
        if bytes.len() > space
            || readable.iter().sum::<usize>() > space
            || writable.iter().sum::<usize>() > space
        {
            return Err(Error::BadAddress);
        }
        if self.dead.load(Ordering::Relaxed) {
            return Err(Error::Timeout);
        }
        control.command.view().write(0, bytes);
        let mut pieces = Vec::new();
        let sides = [
            (&control.command, readable, false),
            (&control.response, writable, true),
        ];
        for (buffer, lengths, writable) in sides {
            let mut addr = buffer.page(0);
            for len in lengths {
                pieces.push(Descriptor {
                    addr,
                    len: *len as u32,
                    writable,
                });
                addr += *len as u64;
            }
        }
        control.queue.add(&pieces)?;
        control.queue.notify()?;
        let deadline = Instant::now() + self.options.timeout;
        let Some((_, len)) = control.queue.wait_used(deadline)? else {
            self.dead.store(true, Ordering::Relaxed);
            return Err(Error::Timeout);
        };
        Ok(control.response.view().get(0, (len as usize).min(space)))
    }

    /// Applies `f` to the control queue, for things that no driver does.
    pub fn with_control<R>(&self, f: impl FnOnce(&mut Virtqueue) -> R) -> R {
        f(&mut lock(&self.control).queue)
    }

    /// Sets an entry of the GID table.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn set_gid(&self, index: u16, gid: [u8; 16]) -> Result<(), Error> {
        self.execute::<SetGid>(&virtio_rdma_spec::command::SetGid {
            gid,
            index,
            gid_type: gid_type::ROCE_V2,
            port_num: 1,
            vlan: 0xffff,
            mac: self.config.mac,
            reserved: [0; 12],
        })?;
        Ok(())
    }

    /// Takes the port down or up, as the driver.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn set_port_state(&self, up: bool) -> Result<(), Error> {
        self.execute::<SetPortState>(&virtio_rdma_spec::command::SetPortState {
            port_num: 1,
            up: up.into(),
            reserved: [0; 6],
        })?;
        Ok(())
    }

    /// The configuration space as it is now.
    ///
    /// # Errors
    /// If the device does not give it.
    pub fn read_config(&self) -> Result<Config, Error> {
        self.session.config()
    }

    /// Device attributes.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn query_device(&self) -> Result<QueryDeviceResponse, Error> {
        self.execute::<command::QueryDevice>(&[])
    }

    /// Port attributes.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn query_port(&self) -> Result<QueryPortResponse, Error> {
        self.execute::<command::QueryPort>(&QueryPort {
            port_num: 1,
            reserved: [0; 7],
        })
    }

    /// Waits for the next completion event of a vector: the number of the completion queue. `None`:
    /// there was none in time.
    ///
    /// # Errors
    /// If the device writes nonsense.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn wait_completion_event(
        &self,
        vector: u16,
        timeout: Duration,
    ) -> Result<Option<u32>, Error> {
        let event = self.wait_raw_completion_event(vector, timeout)?;
        event
            .map(|bytes| decode(&bytes).map(|event| CompletionEvent::from_bytes(&event).cqn))
            .transpose()
    }

    /// Waits for the next completion event of a vector: as much of it as there was room for.
    ///
    /// # Errors
    /// If the device writes nonsense.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn wait_raw_completion_event(
        &self,
        vector: u16,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>, Error> {
        lock(&self.completion[usize::from(vector)]).wait(Instant::now() + timeout)
    }

    /// Waits for the next asynchronous event: as much of it as there was room for.
    ///
    /// # Errors
    /// If the device writes nonsense.
    pub fn wait_raw_async_event(&self, timeout: Duration) -> Result<Option<Vec<u8>>, Error> {
        lock(&self.asynchronous).wait(Instant::now() + timeout)
    }

    /// Waits for the next asynchronous event. `None`: there was none in time.
    ///
    /// # Errors
    /// If the device writes nonsense.
    pub fn wait_async_event(&self, timeout: Duration) -> Result<Option<AsyncEvent>, Error> {
        let event = self.wait_raw_async_event(timeout)?;
        event
            .map(|bytes| decode(&bytes).map(|event| AsyncEvent::from_bytes(&event)))
            .transpose()
    }
}

fn decode<const N: usize>(bytes: &[u8]) -> Result<[u8; N], Error> {
    bytes.try_into().map_err(|_| Error::BadLayout)
}
