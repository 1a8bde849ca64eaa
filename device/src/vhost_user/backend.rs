// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of the front end mean for the device, and the thread of its virtqueues.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{Error, VhostUserBackend, VhostUserDaemon, VringEpollHandler};
use virtio_rdma_spec::config::CONTROL_QUEUE;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::vring::{make_for, Memory, Vring};
use crate::eventfd;
use crate::front_end::{lock, SharedDevice, Vm};
use crate::virtio::{self, Ring, VirtioDevice, MAX_RING_SIZE};

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

pub type Daemon = VhostUserDaemon<Arc<Backend>>;

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
    queues: u16,
    device: SharedDevice,
    /// Where the virtqueues' thread waits.
    handler: OnceLock<Weak<VringEpollHandler<Arc<Self>>>>,
    /// How the guest notifies virtqueues, by their numbers. Those of doorbell queues are a worker's.
    kicks: Mutex<Vec<Option<File>>>,
    end: EventFd,
}

/// Edge triggered: every write is seen, and nobody reads, which the front end could have wait.
fn edges() -> EventSet {
    EventSet::IN | EventSet::EDGE_TRIGGERED
}

impl Backend {
    /// A device for the VM that connects.
    pub fn new(vm: &Vm) -> io::Result<Arc<Self>> {
        let end = EventFd::new(EFD_NONBLOCK)?;
        // Nothing fails from here on, so that what is attached is detached by its session.
        let device = SharedDevice::attach(vm)?;
        let queues = device.with(|device| device.queues());
        Ok(Arc::new(Self {
            queues,
            device,
            handler: OnceLock::new(),
            kicks: Mutex::new((0..queues).map(|_| None).collect()),
            end,
        }))
    }

    /// The device.
    pub fn device(&self) -> &SharedDevice {
        &self.device
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
            let (more, lost) = (self.device.more(), self.device.lost());
            let events = [(&self.end, END), (more, MORE), (lost, LOST)];
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

    /// Applies `f` to virtqueue `index`.
    pub fn configure(&self, index: u16, f: impl FnOnce(&mut Ring) -> Result<(), virtio::Error>) {
        let result = self.device.with(|device| device.with_ring(index, f));
        if let Some(Err(error)) = result {
            self.device.refuse(&error);
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
            self.device.refuse(&NoKick { index, error });
            return;
        }
        // A doorbell queue's kick goes straight to the worker.
        let ours = self.device.with(|device| {
            if device.is_doorbell(index) {
                device.set_doorbell_kick(index, Some(kick));
                return None;
            }
            Some(kick)
        });
        if let Some(kick) = ours {
            if let Err(error) = self.watch(index, Some(kick)) {
                self.device.refuse(&error);
                return;
            }
        }
        self.device.with(|device| device.start(index));
    }

    fn stop(&self, index: u16) {
        self.device.with(|device| device.stop(index));
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
        self.device.with(|device| device.features()) | PROTOCOL_FEATURES
    }

    fn acked_features(&self, features: u64) {
        let result = self
            .device
            .with(|device| device.set_features(features & !PROTOCOL_FEATURES));
        if let Err(error) = result {
            self.device.refuse(&error);
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
        self.device.with(VirtioDevice::reset);
        for index in 0..self.queues {
            self.forget_kick(index);
        }
    }

    /// [`Backend::acked_features`] takes over all features at once.
    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.device.with(|device| device.config(offset, size))
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        // The crate has mapped it already. What is refused goes with the connection, at once.
        self.device.set_memory(memory.memory().into_inner())
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
                self.device.end_by_loss();
                return Ok(());
            }
            _ => match event.checked_sub(FIRST_KICK) {
                Some(index) => index,
                None => return Ok(()),
            },
        };
        self.device.notified(index);
        Ok(())
    }
}
