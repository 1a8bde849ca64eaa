// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of the front end mean for the device, and the thread of its virtqueues.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use log::error;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{
    Error, ShutdownHandle, VhostUserBackend, VhostUserDaemon, VringEpollHandler,
};
use virtio_rdma_spec::config::CONTROL_QUEUE;
use vm_memory::{
    GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::vring::{make_for, Memory, Vring};
use crate::engine::vm::Warn;
use crate::error::sentence;
use crate::eventfd;
use crate::limits::Limits;
use crate::memory::GuestMemory;
use crate::virtio::{self, Ring, VirtioDevice, MAX_RING_SIZE};
use crate::warnings::Named;

/// The feature of which vhost-user itself makes use.
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// Numbers of events, which are above those of virtqueues: the session ends.
const END: u16 = 0x100;
/// There are more commands.
const MORE: u16 = 0x101;
/// Memory of the VM is lost.
const LOST: u16 = 0x102;
/// Kicks of virtqueue i have this number plus i.
const FIRST_KICK: u16 = 0x200;

/// The connection of a session, as soon as there is one.
pub type Connection = Arc<Mutex<Option<ShutdownHandle>>>;

pub type Daemon = VhostUserDaemon<Arc<Backend>>;

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file descriptor is no eventfd.
#[derive(Debug, thiserror::Error)]
#[error("virtqueue {index} cannot be notified by the file descriptor that was passed")]
struct NoKick {
    index: u16,
    #[source]
    error: io::Error,
}

/// A device, as the messages of its front end change it.
pub struct Backend {
    name: String,
    log: Arc<Named>,
    queues: u16,
    limits: Limits,
    device: Mutex<VirtioDevice>,
    /// Held while waiting for the device, so that only one thread has it at a time.
    turn: Mutex<()>,
    connection: Connection,
    /// Where the virtqueues' thread waits.
    handler: OnceLock<Weak<VringEpollHandler<Arc<Self>>>>,
    /// How the guest notifies virtqueues, by their numbers. Those of doorbell queues are a worker's.
    kicks: Mutex<Vec<Option<File>>>,
    end: EventFd,
    more: EventFd,
    lost: Arc<EventFd>,
}

/// Edge triggered: every write is seen, and nobody reads, which the front end could have wait.
fn edges() -> EventSet {
    EventSet::IN | EventSet::EDGE_TRIGGERED
}

impl Backend {
    /// The device that `attach` gives, behind a new connection.
    pub fn new(
        name: &str,
        log: Arc<Named>,
        limits: Limits,
        connection: Connection,
        attach: impl FnOnce() -> VirtioDevice,
    ) -> io::Result<Arc<Self>> {
        let eventfd = || EventFd::new(EFD_NONBLOCK);
        let (end, more, lost) = (eventfd()?, eventfd()?, Arc::new(eventfd()?));
        // Nothing fails from here on, so that what is attached is detached by its session.
        let device = attach();
        let queues = device.queues();
        Ok(Arc::new(Self {
            name: name.to_owned(),
            log,
            queues,
            limits,
            device: Mutex::new(device),
            turn: Mutex::default(),
            connection,
            handler: OnceLock::new(),
            kicks: Mutex::new((0..queues).map(|_| None).collect()),
            end,
            more,
            lost,
        }))
    }

    /// What handles the messages of a front end by this. Dropping it takes [`Backend::end`] first.
    pub fn daemon(self: &Arc<Self>) -> Result<Daemon, Error> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let new = || Daemon::new("requests".into(), self.clone(), memory);
        let daemon = make_for(self, new)?;
        if let Err(error) = self.listen(&daemon) {
            // Its thread would never end, and dropping it waits for that.
            std::mem::forget(daemon);
            return Err(Error::StartDaemon(error));
        }
        Ok(daemon)
    }

    /// Has the virtqueues' thread wait for what is not a virtqueue.
    fn listen(&self, daemon: &Daemon) -> io::Result<()> {
        for handler in daemon.get_epoll_handlers() {
            let events = [(&self.end, END), (&self.more, MORE), (&*self.lost, LOST)];
            for (event, number) in events {
                handler.register_listener(event.as_raw_fd(), edges(), number.into())?;
            }
            // The handler holds us.
            let _ = self.handler.set(Arc::downgrade(&handler));
        }
        Ok(())
    }

    /// Has the virtqueues' thread end.
    pub fn end(&self) {
        // It fails only when the counter is full, which takes more ends than one.
        let _ = self.end.write(1);
    }

    /// Applies `f` to the device. Threads that want it wait for each other.
    pub fn with_device<R>(&self, f: impl FnOnce(&mut VirtioDevice) -> R) -> R {
        let turn = lock(&self.turn);
        let mut device = lock(&self.device);
        drop(turn);
        let result = f(&mut device);
        if device.has_more_commands() {
            // It fails only when the counter is full: then there is an event anyway.
            let _ = self.more.write(1);
        }
        result
    }

    /// Applies `f` to virtqueue `index`.
    pub fn configure(&self, index: u16, f: impl FnOnce(&mut Ring) -> Result<(), virtio::Error>) {
        let result = self.with_device(|device| device.with_ring(index, f));
        if let Some(Err(error)) = result {
            self.refuse(&error);
        }
    }

    /// The guest notifies virtqueue `index` by `kick`, and with that the virtqueue is started; or it
    /// cannot notify it, and then it is not.
    pub fn set_kick(&self, index: u16, kick: Option<File>) {
        let Some(kick) = kick else {
            self.stop(index);
            return;
        };
        if let Err(error) = eventfd::check(&kick) {
            self.refuse(&NoKick { index, error });
            return;
        }
        // A doorbell queue's kick goes straight to the worker.
        let ours = self.with_device(|device| {
            if device.is_doorbell(index) {
                device.set_doorbell_kick(index, Some(kick));
                return None;
            }
            Some(kick)
        });
        if let Some(kick) = ours {
            if let Err(error) = self.watch(index, Some(kick)) {
                self.refuse(&error);
                return;
            }
        }
        self.with_device(|device| device.start(index));
    }

    fn stop(&self, index: u16) {
        self.with_device(|device| device.stop(index));
        self.forget_kick(index);
    }

    fn forget_kick(&self, index: u16) {
        // It cannot fail: what is watched can be left alone.
        let _ = self.watch(index, None);
    }

    /// Has the virtqueues' thread wait for `kick`, and no longer for the one before.
    fn watch(&self, index: u16, kick: Option<File>) -> io::Result<()> {
        let number = u64::from(FIRST_KICK) + u64::from(index);
        let handler = self.handler.get().and_then(Weak::upgrade);
        let mut kicks = lock(&self.kicks);
        let (Some(handler), Some(slot)) = (handler, kicks.get_mut(usize::from(index))) else {
            return Ok(());
        };
        if let Some(old) = slot.take() {
            handler.unregister_listener(old.as_raw_fd(), edges(), number)?;
        }
        if let Some(new) = kick {
            handler.register_listener(new.as_raw_fd(), edges(), number)?;
            *slot = Some(new);
        }
        Ok(())
    }

    /// Ends the connection: the front end has asked for something that cannot be.
    fn refuse(&self, error: &dyn std::error::Error) {
        let reason = sentence(error);
        self.log
            .warn(format_args!("a request was refused: {reason}"));
        self.shut_down();
    }

    fn shut_down(&self) {
        if let Some(connection) = &*lock(&self.connection) {
            connection.shutdown();
        }
    }
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        self.queues.into()
    }

    fn max_queue_size(&self) -> usize {
        MAX_RING_SIZE.into()
    }

    fn features(&self) -> u64 {
        self.with_device(|device| device.features()) | PROTOCOL_FEATURES
    }

    fn acked_features(&self, features: u64) {
        let result = self.with_device(|device| device.set_features(features & !PROTOCOL_FEATURES));
        if let Err(error) = result {
            self.refuse(&error);
        }
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn reset_device(&self) {
        self.with_device(VirtioDevice::reset);
        for index in 0..self.queues {
            self.forget_kick(index);
        }
    }

    /// [`Backend::acked_features`] takes over all features at once.
    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.with_device(|device| device.config(offset, size))
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        let memory = memory.memory().into_inner();
        // The crate has mapped it already. What is refused goes with the connection, at once.
        let size = memory.iter().map(GuestMemoryRegion::len);
        let size = size.fold(0, u64::saturating_add);
        self.limits
            .check_memory(memory.num_regions(), size)
            .map_err(io::Error::other)?;
        let memory = GuestMemory::of(memory, &self.lost).map_err(io::Error::other)?;
        self.with_device(|device| device.set_memory(Some(memory)));
        Ok(())
    }

    /// One thread, and no virtqueue in it: their kicks are listeners of our own (`watch`).
    fn queues_per_thread(&self) -> Vec<u64> {
        vec![0]
    }

    fn stop_vring(&self, index: u32) -> io::Result<()> {
        if let Ok(index) = u16::try_from(index) {
            self.stop(index);
        }
        Ok(())
    }

    fn handle_event(
        &self,
        event: u16,
        _set: EventSet,
        _vrings: &[Vring],
        _thread: usize,
    ) -> io::Result<()> {
        let index = match event {
            // That is how the thread ends.
            END => return Err(io::Error::other("the session has ended")),
            MORE => CONTROL_QUEUE,
            LOST => {
                self.log.warn(format_args!(
                    "memory of the VM is lost: its file was truncated, or the system had none left"
                ));
                self.shut_down();
                return Ok(());
            }
            _ => match event.checked_sub(FIRST_KICK) {
                Some(index) => index,
                None => return Ok(()),
            },
        };
        // A panic would be a bug. It must not leave a VM behind that nobody serves.
        let notified = || self.with_device(|device| device.notified(index));
        if catch_unwind(AssertUnwindSafe(notified)).is_err() {
            error!("{}: disconnected by a panic", self.name);
            self.shut_down();
        }
        Ok(())
    }
}
