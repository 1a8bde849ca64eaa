// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device that the threads of a session share.
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use log::error;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::{Connection, Vm};
use crate::engine::vm::Warn;
use crate::error::sentence;
use crate::limits::Limits;
use crate::memory::GuestMemory;
use crate::virtio::VirtioDevice;
use crate::warnings::Named;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device whose front end is served, for all threads of the session.
pub(crate) struct SharedDevice {
    name: String,
    log: Arc<Named>,
    limits: Limits,
    device: Mutex<VirtioDevice>,
    /// Held while waiting for the device, so that only one thread has it at a time.
    turn: Mutex<()>,
    connection: Arc<Connection>,
    more: EventFd,
    lost: Arc<EventFd>,
}

impl SharedDevice {
    /// Attaches a VM.
    ///
    /// # Errors
    /// If the system has no file descriptors left. Then nothing is attached.
    pub(crate) fn attach(vm: &Vm) -> io::Result<Self> {
        let eventfd = || EventFd::new(EFD_NONBLOCK);
        let (more, lost) = (eventfd()?, Arc::new(eventfd()?));
        Ok(Self {
            name: vm.path.display().to_string(),
            log: vm.log.clone(),
            limits: vm.settings.limits,
            device: Mutex::new(VirtioDevice::new(vm.adapter.attach(vm.settings.clone()))),
            turn: Mutex::default(),
            connection: vm.connection.clone(),
            more,
            lost,
        })
    }

    /// There are more commands when this is signaled: the control queue is to be notified.
    pub(crate) fn more(&self) -> &EventFd {
        &self.more
    }

    /// Memory of the VM is lost when this is signaled: [`SharedDevice::end_by_loss`] says so.
    pub(crate) fn lost(&self) -> &EventFd {
        &self.lost
    }

    /// Applies `f` to the device. Threads that want it wait for each other.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut VirtioDevice) -> R) -> R {
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

    /// The guest notified virtqueue `index`.
    pub(crate) fn notified(&self, index: u16) {
        // A panic would be a bug. It must not leave a VM behind that nobody serves.
        let notified = || self.with(|device| device.notified(index));
        if catch_unwind(AssertUnwindSafe(notified)).is_err() {
            error!(device:% = self.name; "{}: disconnected by a panic", self.name);
            self.connection.shut_down();
        }
    }

    /// The VM has this memory from now on, which the front end said and somebody has mapped.
    ///
    /// # Errors
    /// If it is more than the VM may have, or none that can be accessed.
    pub(crate) fn set_memory(&self, memory: Arc<GuestMemoryMmap>) -> io::Result<()> {
        let size = memory.iter().map(GuestMemoryRegion::len);
        let size = size.fold(0, u64::saturating_add);
        self.limits
            .check_memory(memory.num_regions(), size)
            .map_err(io::Error::other)?;
        let memory = GuestMemory::of(memory, &self.lost).map_err(io::Error::other)?;
        self.with(|device| device.set_memory(Some(memory)));
        Ok(())
    }

    /// Ends the session: memory of the VM is lost.
    pub(crate) fn end_by_loss(&self) {
        self.log.warn(format_args!(
            "memory of the VM is lost: its file was truncated, or the system had none left"
        ));
        self.connection.shut_down();
    }

    /// Ends the session: the front end has asked for something that cannot be.
    pub(crate) fn refuse(&self, error: &dyn std::error::Error) {
        let reason = sentence(error);
        self.log
            .warn(format_args!("a request was refused: {reason}"));
        self.connection.shut_down();
    }

    /// Warns of what the front end or the guest does, not too often.
    pub(crate) fn warn(&self, what: &dyn std::error::Error) {
        self.log.warn(format_args!("{}", sentence(what)));
    }
}
