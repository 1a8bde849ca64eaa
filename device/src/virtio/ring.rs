// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One virtqueue: its life, its descriptor chains, its interrupts. How the guest notifies it is the
//! front end's affair.
//!
//! The rings are the guest's. `virtio-queue` checks indices and bounds every walk; what it finds
//! wrong breaks the ring, which is then left alone until it is set up anew.
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;

use log::debug;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::control::MAX_COMMAND;
use crate::eventfd;
use crate::memory::GuestMemory;

/// Largest virtqueue, descriptors.
pub const MAX_RING_SIZE: u16 = 1024;
/// Bit of the available ring's flags: the driver wants no interrupt (without RING_EVENT_IDX).
const NO_INTERRUPT: u16 = 1;

type Chain<'a> = DescriptorChain<&'a GuestMemoryMmap>;

/// Why a ring cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The size is not a power of two, or too large.
    #[error("{0} is not a size of a virtqueue (a power of two up to {MAX_RING_SIZE})")]
    Size(u32),
    /// The guest cannot be interrupted by the file descriptor.
    #[error("the guest cannot be interrupted by the file descriptor that was passed")]
    Interrupt(#[source] io::Error),
    /// The driver broke the rules.
    #[error("the driver broke virtqueue {index}")]
    Broken {
        /// The virtqueue.
        index: u16,
        /// What was wrong.
        #[source]
        source: virtio_queue::Error,
    },
}

/// Where the three parts of a virtqueue are: guest-physical addresses.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring, the driver's.
    pub available: u64,
    /// The used ring, the device's.
    pub used: u64,
}

/// One virtqueue.
#[derive(Debug)]
pub struct Ring {
    index: u16,
    queue: Queue,
    addresses: Option<Addresses>,
    memory: Option<GuestMemory>,
    interrupt: Option<File>,
    started: bool,
    enabled: bool,
    broken: bool,
}

impl Ring {
    /// Virtqueue `index`, stopped.
    pub fn new(index: u16) -> Self {
        Self {
            index,
            // MAX_RING_SIZE is a power of two, which is all that `new` asks for: the default is
            // never used.
            queue: Queue::new(MAX_RING_SIZE).unwrap_or_default(),
            addresses: None,
            memory: None,
            interrupt: None,
            started: false,
            enabled: false,
            broken: false,
        }
    }

    /// Whether buffers may be taken from it.
    fn is_running(&self) -> bool {
        self.is_started() && !self.broken && self.queue.ready()
    }

    /// Whether it is started and enabled.
    pub fn is_started(&self) -> bool {
        self.started && self.enabled
    }

    /// Whether its three parts are in guest memory.
    pub fn is_placed(&self) -> bool {
        self.queue.ready()
    }

    /// Number of descriptors.
    ///
    /// # Errors
    /// If that is no size of a virtqueue.
    pub fn set_size(&mut self, size: u32) -> Result<(), Error> {
        let narrow = u16::try_from(size).map_err(|_| Error::Size(size))?;
        self.queue
            .try_set_size(narrow)
            .map_err(|_| Error::Size(size))?;
        self.place();
        Ok(())
    }

    /// Where its three parts are.
    pub fn set_addresses(&mut self, addresses: Addresses) {
        self.addresses = Some(addresses);
        self.place();
    }

    /// Next available index, which is also the next used one: no buffer is kept.
    pub fn set_position(&mut self, position: u16) {
        self.queue.set_next_avail(position);
        self.queue.set_next_used(position);
        self.broken = false;
        self.place();
    }

    /// Next available index.
    #[must_use]
    pub fn position(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Memory from now on; what lies in it is looked at anew.
    pub(super) fn set_memory(&mut self, memory: Option<&GuestMemory>) {
        self.memory = memory.cloned();
        self.place();
    }

    /// Whether RING_EVENT_IDX was negotiated.
    pub fn set_event_index(&mut self, enabled: bool) {
        self.queue.set_event_idx(enabled);
    }

    /// Enables or disables it.
    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Starts it: the guest may notify it from now on.
    pub(super) fn start(&mut self) {
        self.started = true;
        self.broken = false;
        self.place();
    }

    /// Stops it, and tells the next available index.
    pub(super) fn stop(&mut self) -> u16 {
        self.started = false;
        self.queue.set_ready(false);
        self.position()
    }

    /// The eventfd that interrupts the guest; `None`: it is not interrupted.
    ///
    /// # Errors
    /// If it is not an eventfd.
    pub fn set_interrupt(&mut self, interrupt: Option<File>) -> Result<(), Error> {
        if let Some(interrupt) = &interrupt {
            eventfd::check(interrupt).map_err(Error::Interrupt)?;
        }
        self.interrupt = interrupt;
        Ok(())
    }

    /// Takes over the addresses; the queue is ready if guest memory has all its parts.
    fn place(&mut self) {
        self.queue.set_ready(false);
        let (Some(addresses), Some(memory)) = (self.addresses, &self.memory) else {
            return;
        };
        // Front ends change memory region by region. The crate takes a ring whose region is not
        // there for an error, and logs it.
        let size = u64::from(self.queue.size());
        let parts = [
            (addresses.descriptors, 16 * size),
            (addresses.available, 6 + 2 * size),
            (addresses.used, 6 + 8 * size),
        ];
        if !parts.iter().all(|(addr, len)| memory.covers(*addr, *len)) {
            return;
        }
        let [descriptors, available, used] =
            [addresses.descriptors, addresses.available, addresses.used].map(GuestAddress);
        let placed = self
            .queue
            .try_set_desc_table_address(descriptors)
            .and_then(|()| self.queue.try_set_avail_ring_address(available))
            .and_then(|()| self.queue.try_set_used_ring_address(used));
        if let Err(error) = placed {
            debug!("virtqueue {}: {error}", self.index);
            return;
        }
        self.queue.set_ready(true);
        if !self.queue.is_valid(memory.guest_memory()) {
            self.queue.set_ready(false);
        }
    }

    fn broken(&mut self, source: virtio_queue::Error) -> Error {
        self.broken = true;
        Error::Broken {
            index: self.index,
            source,
        }
    }

    /// Handles up to `budget` commands by `execute`, which returns the response. Each is read into
    /// `buffer`. Returns whether there are more.
    pub(super) fn serve<R: AsRef<[u8]>>(
        &mut self,
        buffer: &mut [u8; MAX_COMMAND],
        budget: usize,
        mut execute: impl FnMut(Result<&[u8], TooLong>) -> R,
    ) -> Result<bool, Error> {
        if !self.is_running() {
            return Ok(false);
        }
        let Some(memory) = self.memory.clone() else {
            return Ok(false);
        };
        let memory = memory.guest_memory();
        let mut served = 0;
        let mut looked_again = false;
        let result = loop {
            match self.pop(memory) {
                Ok(Some(_)) if served == budget => {
                    self.queue.go_to_previous_position();
                    break Ok(true);
                }
                Ok(Some(chain)) => {
                    served += 1;
                    looked_again = false;
                    let head = chain.head_index();
                    let length = serve_chain(memory, chain, buffer, &mut execute);
                    if let Err(error) = self.queue.add_used(memory, head, length) {
                        break Err(error);
                    }
                }
                // The index says that there is something, and nothing can be read there.
                Ok(None) if looked_again => break Err(virtio_queue::Error::InvalidAvailRingIndex),
                Ok(None) => match self.queue.enable_notification(memory) {
                    Ok(false) => break Ok(false),
                    Ok(true) => looked_again = true,
                    Err(error) => break Err(error),
                },
                Err(error) => break Err(error),
            }
        };
        if served > 0 {
            self.signal(memory);
        }
        result.map_err(|error| self.broken(error))
    }

    /// Writes `bytes` to the next buffer of the guest. Returns whether there was one; if not, the
    /// guest will kick when it adds one.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<bool, Error> {
        if !self.is_running() {
            return Ok(false);
        }
        let Some(memory) = self.memory.clone() else {
            return Ok(false);
        };
        let memory = memory.guest_memory();
        // Twice: the second look is after notifications are enabled.
        for _ in 0..2 {
            match self.pop(memory) {
                Ok(Some(chain)) => {
                    let head = chain.head_index();
                    // A buffer that is too short is the driver's mistake: it gets it back with what
                    // fits.
                    let length = write_chain(memory, chain.writable(), bytes);
                    self.queue
                        .add_used(memory, head, length)
                        .map_err(|error| self.broken(error))?;
                    return Ok(true);
                }
                Ok(None) => match self.queue.enable_notification(memory) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    Err(error) => return Err(self.broken(error)),
                },
                Err(error) => return Err(self.broken(error)),
            }
        }
        Ok(false)
    }

    /// Interrupts the guest, unless it does not want to be, after [`Ring::push`].
    pub(super) fn notify(&mut self) {
        if let Some(memory) = self.memory.clone() {
            self.signal(memory.guest_memory());
        }
    }

    fn pop<'a>(
        &mut self,
        memory: &'a GuestMemoryMmap,
    ) -> Result<Option<Chain<'a>>, virtio_queue::Error> {
        Ok(self.queue.iter(memory)?.next())
    }

    fn signal(&mut self, memory: &GuestMemoryMmap) {
        // An address that is bad by now means that nobody can be waiting there.
        let wanted = self.queue.needs_notification(memory).unwrap_or(false);
        if !wanted || (!self.queue.event_idx_enabled() && self.interrupts_off(memory)) {
            return;
        }
        if let Some(interrupt) = &self.interrupt {
            // It was an eventfd when it was set, and that does not change.
            if let Err(error) = eventfd::signal(interrupt) {
                debug!("virtqueue {}: {error}", self.index);
            }
        }
    }

    fn interrupts_off(&self, memory: &GuestMemoryMmap) -> bool {
        let flags = memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        flags.is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT != 0)
    }
}

/// A command is longer than [`MAX_COMMAND`].
#[derive(Debug, Clone, Copy)]
pub struct TooLong;

/// Executes the command in `chain`, writes the response; returns how much was written. What can be
/// written comes behind what can be read (Virtio 1.2, 2.7.4.2); nothing that comes behind that is read.
fn serve_chain<R: AsRef<[u8]>>(
    memory: &GuestMemoryMmap,
    mut chain: Chain<'_>,
    buffer: &mut [u8; MAX_COMMAND],
    execute: &mut impl FnMut(Result<&[u8], TooLong>) -> R,
) -> u32 {
    let (command, first) = read_chain(memory, &mut chain, buffer);
    let writable = first.into_iter().chain(chain.writable());
    let room = writable
        .clone()
        .fold(0u64, |sum, descriptor| sum + u64::from(descriptor.len()));
    if room < virtio_rdma_spec::command::ResponseHeader::SIZE as u64 {
        return 0;
    }
    write_chain(memory, writable, execute(command).as_ref())
}

/// Copies the readable part of `chain`, once. What lies outside of guest memory ends it. Returns the
/// first descriptor of what can be written, too.
fn read_chain<'b>(
    memory: &GuestMemoryMmap,
    chain: &mut Chain<'_>,
    buffer: &'b mut [u8; MAX_COMMAND],
) -> (Result<&'b [u8], TooLong>, Option<Descriptor>) {
    let (mut end, mut reading, mut too_long) = (0, true, false);
    let mut first = None;
    for descriptor in chain.by_ref() {
        if descriptor.is_write_only() {
            first = Some(descriptor);
            break;
        }
        if !reading {
            continue;
        }
        let length = descriptor.len() as usize;
        match buffer
            .get_mut(end..)
            .and_then(|rest| rest.get_mut(..length))
        {
            Some(part) => {
                reading = memory.read_slice(part, descriptor.addr()).is_ok();
                end += if reading { length } else { 0 };
            }
            None => (reading, too_long) = (false, true),
        }
    }
    let command = buffer.get(..end).filter(|_| !too_long).ok_or(TooLong);
    (command, first)
}

/// Writes `bytes` to descriptors, as far as they reach; returns how much that was.
fn write_chain(
    memory: &GuestMemoryMmap,
    writable: impl Iterator<Item = Descriptor>,
    bytes: &[u8],
) -> u32 {
    let mut rest = bytes;
    let mut written = 0u32;
    for descriptor in writable {
        let (part, after) = rest.split_at(rest.len().min(descriptor.len() as usize));
        if part.is_empty() && after.is_empty() {
            break;
        }
        if memory.write_slice(part, descriptor.addr()).is_err() {
            break;
        }
        // No more than the length of a descriptor, which is 32 bits, and of `bytes`, which is
        // short.
        written = written.saturating_add(part.len() as u32);
        rest = after;
    }
    written
}
