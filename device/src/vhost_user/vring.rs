// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtqueue as `vhost-user-backend` sees it: what the crate tells it goes on to the device.
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::sync::{Arc, MutexGuard};

use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::backend::Backend;
use crate::virtio::{Addresses, VirtioDevice};

/// The memory of a VM, as the crate has it.
pub type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

thread_local! {
    /// The backend that virtqueues are being made for, and how many there are yet.
    static MAKING: RefCell<Option<(Arc<Backend>, u16)>> = const { RefCell::new(None) };
}

/// Lets the crate make the virtqueues of `backend`, by `make`. It makes them in this thread, in the
/// order of their numbers, and says neither which they are nor whose.
pub fn make_for<R>(backend: &Arc<Backend>, make: impl FnOnce() -> R) -> R {
    MAKING.set(Some((backend.clone(), 0)));
    let made = make();
    MAKING.set(None);
    made
}

/// A virtqueue of the device.
#[derive(Clone)]
pub struct Vring {
    backend: Arc<Backend>,
    index: u16,
    /// What the crate wants to see. It has no kick, is never ready, and so is never registered with
    /// an epoll instance of the crate.
    state: VringMutex<Memory>,
}

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = MutexGuard<'a, VringState<Memory>>;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = MutexGuard<'a, VringState<Memory>>;
}

impl VringT<Memory> for Vring {
    fn new(memory: Memory, max_queue_size: u16) -> Result<Self, Error> {
        let state = VringMutex::new(memory, max_queue_size)?;
        let (backend, index) = MAKING
            .with_borrow_mut(|making| {
                let (backend, count) = making.as_mut()?;
                let index = *count;
                *count = index.checked_add(1)?;
                Some((backend.clone(), index))
            })
            .ok_or(Error::QueueNotReady)?;
        Ok(Self {
            backend,
            index,
            state,
        })
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.state.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.state.get_mut()
    }

    fn set_queue_size(&self, size: u16) {
        self.backend
            .configure(self.index, |ring| ring.set_size(size.into()));
    }

    fn set_queue_info(&self, descriptors: u64, available: u64, used: u64) -> Result<(), Error> {
        let addresses = Addresses {
            descriptors,
            available,
            used,
        };
        self.backend.configure(self.index, |ring| {
            ring.set_addresses(addresses);
            Ok(())
        });
        Ok(())
    }

    fn set_queue_next_avail(&self, position: u16) {
        self.backend
            .device()
            .with(|device| device.set_position(self.index, position));
    }

    fn queue_next_avail(&self) -> u16 {
        let position = |device: &mut VirtioDevice| device.with_ring(self.index, |r| r.position());
        self.backend.device().with(position).unwrap_or_default()
    }

    /// The device keeps no buffer: the next used index is the next available one, whatever the
    /// guest has in its used ring.
    fn queue_used_idx(&self) -> Result<u16, Error> {
        Ok(self.queue_next_avail())
    }

    fn set_queue_next_used(&self, _index: u16) {}

    fn set_enabled(&self, enabled: bool) {
        self.backend
            .device()
            .with(|device| device.set_enabled(self.index, enabled));
    }

    fn set_kick(&self, kick: Option<File>) {
        self.backend.set_kick(self.index, kick);
    }

    fn set_call(&self, call: Option<File>) {
        self.backend
            .configure(self.index, |ring| ring.set_interrupt(call));
    }

    /// No error is told that way.
    fn set_err(&self, _file: Option<File>) {}

    /// [`Backend`] takes over all features at once.
    fn set_queue_event_idx(&self, _enabled: bool) {}

    /// Only asked for with a kick that the crate knows of, or by GET_VRING_BASE, which goes on to
    /// [`Backend`]'s `stop_vring`.
    fn set_queue_ready(&self, _ready: bool) {}

    // What follows is for devices that handle buffers through the crate.

    fn add_used(&self, descriptor: u16, length: u32) -> Result<(), Error> {
        self.state.add_used(descriptor, length)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.state.signal_used_queue()
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.state.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.state.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.state.needs_notification()
    }

    fn read_kick(&self) -> io::Result<bool> {
        self.state.read_kick()
    }
}
