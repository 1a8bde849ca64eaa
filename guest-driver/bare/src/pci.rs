// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The PCI device of vfio-user: what a VMM does with it, and a driver of virtio (Virtio 1.2, 4.1).
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

use vfio_user::Client;

use crate::memory::Region;
use crate::Error;

/// The region of the configuration space.
pub const CONFIG_REGION: u32 = 7;
/// The interrupts of MSI-X.
pub const MSIX: u32 = 2;
/// Flags of SET_IRQS: eventfds come with it, and are signalled from then on.
pub const SET_EVENTFDS: u32 = 1 << 2 | 1 << 5;
/// File descriptors that go with one message.
const FDS_AT_ONCE: usize = 8;

/// Capabilities in the configuration space.
const VENDOR_CAPABILITY: u8 = 0x09;
const MSIX_CAPABILITY: u8 = 0x11;
/// Kinds of the vendor's.
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;

/// Registers of virtio.
mod register {
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    pub const DEVICE_FEATURE: u64 = 4;
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const NUM_QUEUES: u64 = 18;
    pub const STATUS: u64 = 20;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_DESC: u64 = 32;
    pub const QUEUE_DRIVER: u64 = 40;
    pub const QUEUE_DEVICE: u64 = 48;
}

/// What a driver says of itself in the status register.
mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
}

/// Where something of virtio is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The BAR.
    pub region: u32,
    /// Where it begins there.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Where a virtqueue is in guest memory, and how many entries it has.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    /// Entries.
    pub size: u16,
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
}

/// A connected PCI device, and what a driver has found in its configuration space.
pub struct PciDevice {
    client: Client,
    common: Place,
    notify: Place,
    notify_step: u64,
    device: Place,
    vectors: u32,
}

impl std::fmt::Debug for PciDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PciDevice").finish_non_exhaustive()
    }
}

impl PciDevice {
    /// Connects to the device behind `path`, and looks for what a driver needs.
    ///
    /// # Errors
    /// If there is no device, or it lacks something.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let mut client = Client::new(path)?;
        let mut config = [0; 256];
        client.region_read(CONFIG_REGION, 0, &mut config)?;
        let word = |at: usize| -> u32 {
            let bytes = config
                .get(at..at + 4)
                .and_then(|bytes| bytes.try_into().ok());
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let mut device = Self {
            client,
            common: Place::default(),
            notify: Place::default(),
            notify_step: 0,
            device: Place::default(),
            vectors: 0,
        };
        let mut at = config[0x34];
        // There is no room for more.
        for _ in 0..config.len() / 4 {
            let start = usize::from(at);
            let [kind, next, _, vendor_kind] = word(start).to_le_bytes();
            match kind {
                _ if at == 0 => break,
                MSIX_CAPABILITY => device.vectors = (word(start) >> 16 & 0x7ff) + 1,
                VENDOR_CAPABILITY => {
                    let place = Place {
                        region: word(start + 4) & 0xff,
                        offset: word(start + 8).into(),
                        length: word(start + 12).into(),
                    };
                    match vendor_kind {
                        COMMON => device.common = place,
                        NOTIFY => {
                            device.notify = place;
                            device.notify_step = word(start + 16).into();
                        }
                        DEVICE => device.device = place,
                        _ => {}
                    }
                }
                _ => {}
            }
            at = next;
        }
        let places = [device.common, device.notify, device.device];
        if places.iter().any(|place| place.length == 0) {
            return Err(Error::BadLayout);
        }
        Ok(device)
    }

    /// The client, for what no VMM does.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Where virtqueues are notified, and the distance between one and the next.
    #[must_use]
    pub fn notify_place(&self) -> (Place, u64) {
        (self.notify, self.notify_step)
    }

    /// Number of MSI-X vectors.
    #[must_use]
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Writes a register of virtio.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn set(&mut self, register: u64, bytes: &[u8]) -> Result<(), Error> {
        let Place { region, offset, .. } = self.common;
        Ok(self.client.region_write(region, offset + register, bytes)?)
    }

    /// Reads a register of virtio of up to 8 bytes.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn get(&mut self, register: u64, length: usize) -> Result<u64, Error> {
        let mut bytes = [0; 8];
        let Place { region, offset, .. } = self.common;
        let part = bytes.get_mut(..length).ok_or(Error::BadLayout)?;
        self.client.region_read(region, offset + register, part)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Number of virtqueues.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn queues(&mut self) -> Result<u16, Error> {
        Ok(self.get(register::NUM_QUEUES, 2)? as u16)
    }

    /// The device's configuration, from its start.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn config(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        let Place { region, offset, .. } = self.device;
        Ok(self.client.region_read(region, offset, bytes)?)
    }

    /// The features that the device offers.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn features(&mut self) -> Result<u64, Error> {
        let mut features = 0;
        for half in 0..2u32 {
            self.set(register::DEVICE_FEATURE_SELECT, &half.to_le_bytes())?;
            features |= self.get(register::DEVICE_FEATURE, 4)? << (32 * half);
        }
        Ok(features)
    }

    /// Resets the device by its status register.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.set(register::STATUS, &[0])
    }

    /// Resets the device, and accepts features.
    ///
    /// # Errors
    /// If the device does not have them so.
    pub fn accept(&mut self, features: u64) -> Result<(), Error> {
        self.reset()?;
        let mut state = status::ACKNOWLEDGE;
        self.set(register::STATUS, &[state])?;
        state |= status::DRIVER;
        self.set(register::STATUS, &[state])?;
        for half in 0..2u32 {
            let bits = (features >> (32 * half)) as u32;
            self.set(register::DRIVER_FEATURE_SELECT, &half.to_le_bytes())?;
            self.set(register::DRIVER_FEATURE, &bits.to_le_bytes())?;
        }
        state |= status::FEATURES_OK;
        self.set(register::STATUS, &[state])?;
        if self.get(register::STATUS, 1)? != u64::from(state) {
            return Err(Error::Features(features));
        }
        Ok(())
    }

    /// Entries of a virtqueue, at most.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn max_size(&mut self, queue: u16) -> Result<u16, Error> {
        self.set(register::QUEUE_SELECT, &queue.to_le_bytes())?;
        Ok(self.get(register::QUEUE_SIZE, 2)? as u16)
    }

    /// Says where a virtqueue is, and enables it. Its interrupts are those of [`vector`].
    ///
    /// # Errors
    /// If the device does not take it so.
    pub fn enable(&mut self, queue: u16, rings: &Rings) -> Result<(), Error> {
        if rings.size > self.max_size(queue)? {
            return Err(Error::BadLayout);
        }
        self.set(register::QUEUE_SIZE, &rings.size.to_le_bytes())?;
        let vector = vector(queue) as u16;
        self.set(register::QUEUE_VECTOR, &vector.to_le_bytes())?;
        if self.get(register::QUEUE_VECTOR, 2)? != u64::from(vector) {
            return Err(Error::BadLayout);
        }
        self.set(register::QUEUE_DESC, &rings.descriptors.to_le_bytes())?;
        self.set(register::QUEUE_DRIVER, &rings.available.to_le_bytes())?;
        self.set(register::QUEUE_DEVICE, &rings.used.to_le_bytes())?;
        self.set(register::QUEUE_ENABLE, &1u16.to_le_bytes())
    }

    /// Says that the driver runs.
    ///
    /// # Errors
    /// If the device does not.
    pub fn run(&mut self) -> Result<(), Error> {
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.set(register::STATUS, &[all])?;
        if self.get(register::STATUS, 1)? != u64::from(all) {
            return Err(Error::BadLayout);
        }
        Ok(())
    }

    /// Has vectors from `first` on signal these eventfds.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn set_vectors(&mut self, first: u32, eventfds: &[RawFd]) -> Result<(), Error> {
        for (at, fds) in eventfds.chunks(FDS_AT_ONCE).enumerate() {
            let start = first + (at * FDS_AT_ONCE) as u32;
            let count = fds.len() as u32;
            self.client
                .set_irqs(MSIX, SET_EVENTFDS, start, count, fds)?;
        }
        Ok(())
    }

    /// Gives the device memory of the guest: so many bytes of a file, from its start.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn map(&mut self, address: u64, size: u64, file: &impl AsRawFd) -> Result<(), Error> {
        let fd = file.as_raw_fd();
        Ok(self.client.dma_map(0, address, size, fd)?)
    }

    /// Gives the device a region of memory.
    pub(crate) fn map_region(&mut self, region: &Region) -> Result<(), Error> {
        let info = region.info();
        let (address, size) = (info.guest_phys_addr, info.memory_size);
        Ok(self.client.dma_map(0, address, size, info.mmap_handle)?)
    }

    /// Takes memory of the guest away from it.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn unmap(&mut self, address: u64, size: u64) -> Result<(), Error> {
        Ok(self.client.dma_unmap(address, size)?)
    }

    /// Notifies a virtqueue.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn notify(&mut self, queue: u16) -> Result<(), Error> {
        let Place { region, offset, .. } = self.notify;
        let at = offset + u64::from(queue) * self.notify_step;
        Ok(self.client.region_write(region, at, &queue.to_le_bytes())?)
    }
}

/// The vector of a virtqueue: number 0 is that of changes of the configuration.
#[must_use]
pub fn vector(queue: u16) -> u32 {
    u32::from(queue) + 1
}
