// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver's side of a split virtqueue.
use std::os::fd::AsRawFd;
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use vhost::VringConfigData;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use crate::mapping::View;
use crate::memory::{Buffer, Placement, Region};
use crate::pci::{PciDevice, Rings};
use crate::vm::lock;
use crate::{Error, PAGE};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor {
    /// Guest-physical address.
    pub addr: u64,
    /// Length, bytes.
    pub len: u32,
    /// The device writes it.
    pub writable: bool,
}

/// Notifies a virtqueue of a device that has no eventfd for it.
pub(crate) struct Doorbell {
    pub(crate) device: Arc<Mutex<PciDevice>>,
    pub(crate) queue: u16,
}

/// A virtqueue.
pub struct Virtqueue {
    size: u16,
    descriptors: Buffer,
    available: Buffer,
    used: Buffer,
    /// Notifies the device, unless `doorbell` does.
    pub kick: EventFd,
    doorbell: Option<Doorbell>,
    /// Interrupts the driver.
    pub call: EventFd,
    /// Waits for `call`.
    epoll: Epoll,
    free: Vec<u16>,
    /// The chain that starts with each descriptor: its other descriptors.
    chains: Vec<Vec<u16>>,
    next_used: u16,
    event_index: bool,
    /// The base to go on with, while stopped.
    pub base: u16,
}

impl Virtqueue {
    /// An empty one of `size` descriptors.
    pub(crate) fn new(
        region: &Arc<Region>,
        size: u16,
        event_index: bool,
        doorbell: Option<Doorbell>,
    ) -> Result<Self, Error> {
        let entries = usize::from(size);
        let call = EventFd::new(EFD_NONBLOCK)?;
        let epoll = Epoll::new()?;
        epoll.ctl(
            ControlOperation::Add,
            call.as_raw_fd(),
            EpollEvent::new(EventSet::IN, 0),
        )?;
        Ok(Self {
            size,
            descriptors: region.buffer(16 * entries, Placement::Contiguous)?,
            available: region.buffer(6 + 2 * entries, Placement::Contiguous)?,
            used: region.buffer(6 + 8 * entries, Placement::Contiguous)?,
            kick: EventFd::new(EFD_NONBLOCK)?,
            doorbell,
            call,
            epoll,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); entries],
            next_used: 0,
            event_index,
            base: 0,
        })
    }

    /// What SET_VRING_ADDR tells.
    pub fn config(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: self.descriptors.addr(),
            used_ring_addr: self.used.addr(),
            avail_ring_addr: self.available.addr(),
            log_addr: None,
        }
    }

    /// Where it is in guest memory.
    pub(crate) fn rings(&self) -> Rings {
        Rings {
            size: self.size,
            descriptors: self.descriptors.page(0),
            available: self.available.page(0),
            used: self.used.page(0),
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The descriptor table.
    pub fn descriptors(&self) -> &View {
        self.descriptors.view()
    }

    /// The available ring.
    pub fn available(&self) -> &View {
        self.available.view()
    }

    /// The used ring.
    pub fn used(&self) -> &View {
        self.used.view()
    }

    /// Writes descriptor `index` as told, right or wrong.
    pub fn put_descriptor(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        put_descriptor(self.descriptors.view(), index, addr, len, flags, next);
    }

    /// Makes the chain at `head` available.
    pub fn publish(&self, head: u16) {
        let index = u16::from_le(self.available.view().u16(2).load(Ordering::Relaxed));
        let entry = 4 + 2 * usize::from(index % self.size);
        self.available
            .view()
            .u16(entry)
            .store(head.to_le(), Ordering::Relaxed);
        self.available
            .view()
            .u16(2)
            .store(index.wrapping_add(1).to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Adds a chain, and returns its number.
    pub fn add(&mut self, descriptors: &[Descriptor]) -> Result<u16, Error> {
        if self.free.len() < descriptors.len() || descriptors.is_empty() {
            return Err(Error::QueueFull);
        }
        let chain: Vec<u16> = self.free.split_off(self.free.len() - descriptors.len());
        for (i, descriptor) in descriptors.iter().enumerate() {
            let write = if descriptor.writable { WRITE } else { 0 };
            let (flags, next) = match chain.get(i + 1) {
                Some(next) => (write | NEXT, *next),
                None => (write, 0),
            };
            self.put_descriptor(chain[i], descriptor.addr, descriptor.len, flags, next);
        }
        let head = chain[0];
        self.chains[usize::from(head)] = chain;
        self.publish(head);
        Ok(head)
    }

    /// Adds a chain as an indirect table in `table`, which must stay until it is used.
    pub fn add_indirect(
        &mut self,
        table: &Buffer,
        descriptors: &[Descriptor],
    ) -> Result<u16, Error> {
        let head = self.free.pop().ok_or(Error::QueueFull)?;
        if descriptors.len() * 16 > PAGE {
            return Err(Error::QueueFull);
        }
        for (i, descriptor) in (0u16..).zip(descriptors) {
            let write = if descriptor.writable { WRITE } else { 0 };
            let more = if usize::from(i) + 1 < descriptors.len() {
                NEXT
            } else {
                0
            };
            put_descriptor(
                table.view(),
                i,
                descriptor.addr,
                descriptor.len,
                write | more,
                i + 1,
            );
        }
        self.put_descriptor(
            head,
            table.page(0),
            descriptors.len() as u32 * 16,
            INDIRECT,
            0,
        );
        self.chains[usize::from(head)] = vec![head];
        self.publish(head);
        Ok(head)
    }

    /// Notifies the device.
    pub fn notify(&self) -> Result<(), Error> {
        match &self.doorbell {
            None => Ok(self.kick.write(1)?),
            Some(doorbell) => lock(&doorbell.device).notify(doorbell.queue),
        }
    }

    /// The next used chain and how much was written to it.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let index = u16::from_le(self.used.view().u16(2).load(Ordering::Acquire));
        if index == self.next_used {
            return None;
        }
        let entry = 4 + 8 * usize::from(self.next_used % self.size);
        let head = u32::from_le(self.used.view().u32(entry).load(Ordering::Relaxed)) as u16;
        let len = u32::from_le(self.used.view().u32(entry + 4).load(Ordering::Relaxed));
        self.next_used = self.next_used.wrapping_add(1);
        if self.event_index {
            // Interrupt for the next one, too.
            let event = 4 + 2 * usize::from(self.size);
            self.available
                .view()
                .u16(event)
                .store(self.next_used.to_le(), Ordering::SeqCst);
        }
        if let Some(chain) = self.chains.get_mut(usize::from(head)) {
            self.free.append(chain);
        }
        Some((head, len))
    }

    /// Waits for the next used chain; `None`: there was none in time.
    pub fn wait_used(&mut self, deadline: Instant) -> Result<Option<(u16, u32)>, Error> {
        loop {
            // Cleared before the look, so that an interrupt after the look is not lost.
            let _ = self.call.read();
            if let Some(used) = self.take_used() {
                return Ok(Some(used));
            }
            // An interrupt may have been suppressed just before used_event was stored.
            fence(Ordering::SeqCst);
            let index = u16::from_le(self.used.view().u16(2).load(Ordering::Acquire));
            if index != self.next_used {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let timeout = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).max(1);
            match self.epoll.wait(timeout, &mut [EpollEvent::default()]) {
                Err(e) if e.kind() != std::io::ErrorKind::Interrupted => return Err(e.into()),
                _ => {}
            }
        }
    }
}

fn put_descriptor(table: &View, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
    let at = 16 * usize::from(index);
    table.u64(at).store(addr.to_le(), Ordering::Relaxed);
    table.u32(at + 8).store(len.to_le(), Ordering::Relaxed);
    table.u16(at + 12).store(flags.to_le(), Ordering::Relaxed);
    table.u16(at + 14).store(next.to_le(), Ordering::Relaxed);
}
