// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtio registers in a BAR (Virtio 1.2, 4.1.4.3), and what they make of the device.
//!
//! They are the guest's: what makes no sense is not done, and the session goes on.
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use rustix::event::{eventfd, EventfdFlags};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_F_VERSION_1,
};

use super::pci::COMMON_SIZE;
use crate::virtio::{Addresses, VirtioDevice, MAX_RING_SIZE};

const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;

/// No MSI-X vector.
const NO_VECTOR: u16 = 0xffff;
/// Entries of a doorbell queue, which carries no buffers.
const DOORBELL_QUEUE_SIZE: u16 = 2;
/// Entries of the others, at most. It is as much as a driver can use.
const QUEUE_SIZE: u16 = 256;
const _: () = assert!(QUEUE_SIZE <= MAX_RING_SIZE);

/// Where the registers are.
mod at {
    pub(super) const DEVICE_FEATURE_SELECT: usize = 0;
    pub(super) const DEVICE_FEATURE: usize = 4;
    pub(super) const DRIVER_FEATURE_SELECT: usize = 8;
    pub(super) const DRIVER_FEATURE: usize = 12;
    pub(super) const CONFIG_VECTOR: usize = 16;
    pub(super) const NUM_QUEUES: usize = 18;
    pub(super) const STATUS: usize = 20;
    pub(super) const GENERATION: usize = 21;
    pub(super) const QUEUE_SELECT: usize = 22;
    pub(super) const QUEUE_SIZE: usize = 24;
    pub(super) const QUEUE_VECTOR: usize = 26;
    pub(super) const QUEUE_ENABLE: usize = 28;
    pub(super) const QUEUE_NOTIFY_OFF: usize = 30;
    pub(super) const QUEUE_DESC: usize = 32;
    pub(super) const QUEUE_DRIVER: usize = 40;
    pub(super) const QUEUE_DEVICE: usize = 48;
}

/// What comes from the guest to the device and from the device to the guest, besides data.
#[derive(Debug)]
pub(super) struct Lines {
    /// By which the guest notifies virtqueues. Nobody reads them, and nobody waits for them.
    kicks: Arc<Vec<File>>,
    /// What interrupts the guest, for each MSI-X vector.
    vectors: Vec<Option<File>>,
}

impl Lines {
    pub(super) fn new(queues: u16, vectors: u16) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let kick = |_| Ok(File::from(eventfd(0, flags)?));
        Ok(Self {
            kicks: Arc::new((0..queues).map(kick).collect::<io::Result<_>>()?),
            vectors: (0..vectors).map(|_| None).collect(),
        })
    }

    pub(super) fn kicks(&self) -> &Arc<Vec<File>> {
        &self.kicks
    }

    pub(super) fn vectors(&mut self) -> &mut [Option<File>] {
        &mut self.vectors
    }

    /// The guest notifies a virtqueue, if there is such a one.
    pub(super) fn kick(&self, index: u64) {
        kick(&self.kicks, index);
    }
}

/// A guest notifies a virtqueue, if there is such a one.
pub(super) fn kick(kicks: &[File], index: u64) {
    let kick = usize::try_from(index).ok().and_then(|at| kicks.get(at));
    if let Some(mut kick) = kick {
        // It fails only when the counter is full.
        let _ = kick.write_all(&1u64.to_ne_bytes());
    }
}

#[derive(Debug, Clone)]
struct Queue {
    max_size: u16,
    size: u16,
    vector: u16,
    enabled: bool,
    descriptors: u64,
    driver: u64,
    device: u64,
}

impl Queue {
    fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            vector: NO_VECTOR,
            enabled: false,
            descriptors: 0,
            driver: 0,
            device: 0,
        }
    }
}

/// The registers.
#[derive(Debug)]
pub(super) struct Registers {
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    generation: u8,
    /// The configuration that `generation` is of.
    config: Vec<u8>,
    queue_select: u16,
    queues: Vec<Queue>,
}

impl Registers {
    pub(super) fn new(device: &VirtioDevice) -> Self {
        let queue = |index| match device.is_doorbell(index) {
            true => Queue::new(DOORBELL_QUEUE_SIZE),
            false => Queue::new(QUEUE_SIZE),
        };
        Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: 0,
            generation: 0,
            config: device.config(0, u32::MAX),
            queue_select: 0,
            queues: (0..device.queues()).map(queue).collect(),
        }
    }

    /// Reads registers from `offset` on; zeros where there are none.
    pub(super) fn read(&mut self, offset: u64, data: &mut [u8], device: &VirtioDevice) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if offset <= at::GENERATION && at::GENERATION < offset.saturating_add(data.len()) {
            let config = device.config(0, u32::MAX);
            if config != self.config {
                (self.config, self.generation) = (config, self.generation.wrapping_add(1));
            }
        }
        let all = self.all(device);
        data.fill(0);
        for (to, from) in data.iter_mut().zip(all.iter().skip(offset)) {
            *to = *from;
        }
    }

    /// All registers, as they are read.
    fn all(&self, device: &VirtioDevice) -> [u8; COMMON_SIZE] {
        let mut all = [0; COMMON_SIZE];
        let mut set = |at: usize, bytes: &[u8]| {
            for (to, from) in all.iter_mut().skip(at).zip(bytes) {
                *to = *from;
            }
        };
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let device_feature = half(device.features(), self.device_feature_select);
        let driver_feature = half(self.driver_features, self.driver_feature_select);
        let select = [self.device_feature_select, self.driver_feature_select];
        let [device_select, driver_select] = select.map(u32::to_le_bytes);
        set(at::DEVICE_FEATURE_SELECT, &device_select);
        set(at::DEVICE_FEATURE, &device_feature.to_le_bytes());
        set(at::DRIVER_FEATURE_SELECT, &driver_select);
        set(at::DRIVER_FEATURE, &driver_feature.to_le_bytes());
        set(at::CONFIG_VECTOR, &self.config_vector.to_le_bytes());
        set(at::NUM_QUEUES, &(self.queues.len() as u16).to_le_bytes());
        set(at::STATUS, &[self.status]);
        set(at::GENERATION, &[self.generation]);
        set(at::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        // All of a queue that there is not is zero.
        let Some(queue) = self.queues.get(usize::from(self.queue_select)) else {
            return all;
        };
        set(at::QUEUE_SIZE, &queue.size.to_le_bytes());
        set(at::QUEUE_VECTOR, &queue.vector.to_le_bytes());
        set(at::QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
        set(at::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
        set(at::QUEUE_DESC, &queue.descriptors.to_le_bytes());
        set(at::QUEUE_DRIVER, &queue.driver.to_le_bytes());
        set(at::QUEUE_DEVICE, &queue.device.to_le_bytes());
        all
    }

    /// Writes a register. What is no register, or no access that a driver makes, changes nothing.
    pub(super) fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        device: &mut VirtioDevice,
        lines: &Lines,
    ) {
        let mut bytes = [0; 8];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let value = u64::from_le_bytes(bytes);
        // Only as many bytes as the register has were written.
        let (byte, half, word) = (value as u8, value as u16, value as u32);
        let vectors = lines.vectors.len();
        let of_vectors = |vector: u16| match usize::from(vector) < vectors {
            true => vector,
            false => NO_VECTOR,
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        match (offset, data.len()) {
            (at::DEVICE_FEATURE_SELECT, 4) => self.device_feature_select = word,
            (at::DRIVER_FEATURE_SELECT, 4) => self.driver_feature_select = word,
            (at::DRIVER_FEATURE, 4) => {
                let shift = match self.driver_feature_select {
                    0 => 0,
                    1 => 32,
                    _ => return,
                };
                let others = self.driver_features & !(u64::from(u32::MAX) << shift);
                self.driver_features = others | u64::from(word) << shift;
            }
            (at::CONFIG_VECTOR, 2) => self.config_vector = of_vectors(half),
            (at::STATUS, 1) => self.set_status(byte, device, lines),
            (at::QUEUE_SELECT, 2) => self.queue_select = half,
            (at::QUEUE_VECTOR, 2) => {
                let index = self.queue_select;
                if let Some(queue) = self.queues.get_mut(usize::from(index)) {
                    queue.vector = of_vectors(half);
                    connect(index, queue.vector, device, lines);
                }
            }
            (at::QUEUE_ENABLE, 2) if half == 1 => {
                let index = self.queue_select;
                let queue = self.queues.get_mut(usize::from(index));
                if let Some(queue) = queue.filter(|queue| !queue.enabled) {
                    queue.enabled = true;
                    if self.status & DRIVER_OK != 0 {
                        self.start(index, device, lines);
                    }
                }
            }
            _ => self.write_queue(offset, data.len(), value),
        }
    }

    /// Writes to a register of the queue that is selected, which must not be enabled.
    fn write_queue(&mut self, offset: usize, length: usize, value: u64) {
        let queue = self.queues.get_mut(usize::from(self.queue_select));
        let Some(queue) = queue.filter(|queue| !queue.enabled) else {
            return;
        };
        let (low, high) = (u64::from(u32::MAX), value << 32);
        let address = match offset & !4 {
            at::QUEUE_DESC => &mut queue.descriptors,
            at::QUEUE_DRIVER => &mut queue.driver,
            at::QUEUE_DEVICE => &mut queue.device,
            at::QUEUE_SIZE if (offset, length) == (at::QUEUE_SIZE, 2) => {
                let size = value as u16;
                if size.is_power_of_two() && size <= queue.max_size {
                    queue.size = size;
                }
                return;
            }
            _ => return,
        };
        *address = match (offset & 4, length) {
            (0, 8) => value,
            (0, 4) => *address & !low | value,
            (4, 4) => *address & low | high,
            _ => return,
        };
    }

    fn set_status(&mut self, status: u8, device: &mut VirtioDevice, lines: &Lines) {
        if status == 0 {
            self.reset(device);
            return;
        }
        // Nothing but a reset takes a bit back.
        let new = status & !self.status;
        self.status |= status;
        if new & FEATURES_OK != 0 {
            let accepted = match self.driver_features & VERSION_1 {
                0 => {
                    device.warn("a driver without VIRTIO_F_VERSION_1");
                    false
                }
                _ => match device.set_features(self.driver_features) {
                    Ok(()) => true,
                    Err(error) => {
                        device.warn(&error.to_string());
                        false
                    }
                },
            };
            if !accepted {
                self.status &= !FEATURES_OK;
            }
        }
        if new & DRIVER_OK != 0 {
            if self.status & FEATURES_OK == 0 {
                device.warn("a driver that has not agreed on features is not served");
                self.status &= !DRIVER_OK;
                return;
            }
            // The control queue comes last: with it, the VM runs.
            for index in (0..device.queues()).rev() {
                self.start(index, device, lines);
            }
        }
    }

    /// All is as at first, but the eventfds of the front end.
    pub(super) fn reset(&mut self, device: &mut VirtioDevice) {
        device.reset();
        for index in 0..device.queues() {
            device.with_ring(index, |ring| ring.set_interrupt(None));
        }
        *self = Self {
            generation: self.generation,
            ..Self::new(device)
        };
    }

    /// Starts virtqueue `index`, if the driver has enabled it.
    fn start(&self, index: u16, device: &mut VirtioDevice, lines: &Lines) {
        let queue = self.queues.get(usize::from(index));
        let Some(queue) = queue.filter(|queue| queue.enabled) else {
            return;
        };
        device.with_ring(index, |ring| {
            // It is a size of a virtqueue: others are not taken from the driver.
            let _ = ring.set_size(queue.size.into());
            ring.set_addresses(Addresses {
                descriptors: queue.descriptors,
                available: queue.driver,
                used: queue.device,
            });
        });
        device.set_position(index, 0);
        connect(index, queue.vector, device, lines);
        if device.is_doorbell(index) {
            let kick = lines.kicks.get(usize::from(index));
            match kick.map(File::try_clone).transpose() {
                Ok(kick) => device.set_doorbell_kick(index, kick),
                Err(error) => device.warn(&format!("virtqueue {index} has no kick: {error}")),
            }
        }
        device.set_enabled(index, true);
        device.start(index);
    }

    /// The front end has other eventfds for these vectors.
    pub(super) fn vectors_changed(&self, device: &mut VirtioDevice, lines: &Lines) {
        for (index, queue) in (0..).zip(&self.queues) {
            connect(index, queue.vector, device, lines);
        }
    }
}

/// Virtqueue `index` interrupts by the eventfd of a vector, if it has one.
fn connect(index: u16, vector: u16, device: &mut VirtioDevice, lines: &Lines) {
    let eventfd = lines.vectors.get(usize::from(vector));
    let eventfd = eventfd.and_then(Option::as_ref).map(File::try_clone);
    let set = match eventfd.transpose() {
        Ok(eventfd) => device.with_ring(index, |ring| ring.set_interrupt(eventfd)),
        Err(error) => Some(Err(crate::virtio::Error::Interrupt(error))),
    };
    if let Some(Err(error)) = set {
        device.warn(&format!("virtqueue {index}: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, AdapterSettings};
    use crate::rnic::RnicSettings;
    use proptest::prelude::*;
    use virtio_rdma_spec::config::feature;

    /// A device, its registers, and what it is attached to.
    struct Guest {
        adapter: Arc<Adapter>,
        settings: RnicSettings,
        device: VirtioDevice,
        registers: Registers,
        lines: Lines,
    }

    impl Guest {
        fn new() -> Self {
            let settings = AdapterSettings::default();
            let (adapter, _) = Adapter::without_threads(&settings).unwrap();
            let settings = RnicSettings::default();
            let device = VirtioDevice::new(adapter.attach(settings.clone()));
            Self {
                registers: Registers::new(&device),
                lines: Lines::new(device.queues(), device.queues() + 1).unwrap(),
                adapter,
                settings,
                device,
            }
        }

        fn write(&mut self, offset: usize, data: &[u8]) {
            let (device, lines) = (&mut self.device, &self.lines);
            self.registers.write(offset as u64, data, device, lines);
        }

        fn read(&mut self, offset: usize, length: usize) -> u64 {
            let mut data = [0xff; 8];
            let read = &mut data[..length];
            self.registers.read(offset as u64, read, &self.device);
            data[length..].fill(0);
            u64::from_le_bytes(data)
        }

        fn accept(&mut self, features: u64) -> u64 {
            self.write(at::STATUS, &[3]);
            for half in 0..2u32 {
                self.write(at::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
                let bits = (features >> (32 * half)) as u32;
                self.write(at::DRIVER_FEATURE, &bits.to_le_bytes());
            }
            self.write(at::STATUS, &[3 | FEATURES_OK]);
            self.read(at::STATUS, 1)
        }
    }

    const RC: u64 = 1 << feature::RC;

    #[test]
    fn a_driver_finds_features_and_queues() {
        let mut guest = Guest::new();
        let mut offered = 0;
        for half in 0..4u32 {
            guest.write(at::DEVICE_FEATURE_SELECT, &half.to_le_bytes());
            let bits = guest.read(at::DEVICE_FEATURE, 4);
            offered |= bits << (32 * (half % 2));
        }
        assert_eq!(offered, guest.device.features());
        let queues = guest.read(at::NUM_QUEUES, 2);
        assert_eq!(queues, u64::from(guest.device.queues()));
        for index in 0..guest.device.queues() {
            guest.write(at::QUEUE_SELECT, &index.to_le_bytes());
            let size = match guest.device.is_doorbell(index) {
                true => DOORBELL_QUEUE_SIZE,
                false => QUEUE_SIZE,
            };
            assert_eq!(guest.read(at::QUEUE_SIZE, 2), u64::from(size));
            assert_eq!(guest.read(at::QUEUE_NOTIFY_OFF, 2), u64::from(index));
            assert_eq!(guest.read(at::QUEUE_ENABLE, 2), 0);
            assert_eq!(guest.read(at::QUEUE_VECTOR, 2), u64::from(NO_VECTOR));
        }
        guest.write(at::QUEUE_SELECT, &[0xff, 0xff]);
        assert_eq!(guest.read(at::QUEUE_SIZE, 8), 0);
    }

    #[test]
    fn features_have_to_go_together() {
        let mut guest = Guest::new();
        assert_eq!(guest.accept(VERSION_1 | RC), u64::from(3 | FEATURES_OK));
        // One that is not offered; none of Virtio 1; one without another that it needs.
        for bad in [VERSION_1 | 1 << 63, RC, VERSION_1 | 1 << feature::XRC] {
            let mut guest = Guest::new();
            assert_eq!(guest.accept(bad), 3);
            // And then nothing starts.
            guest.write(at::STATUS, &[3 | DRIVER_OK]);
            assert_eq!(guest.read(at::STATUS, 1), 3);
        }
    }

    #[test]
    fn queues_are_set_up_before_they_are_enabled() {
        let mut guest = Guest::new();
        guest.accept(VERSION_1 | RC);
        guest.write(at::QUEUE_SIZE, &64u16.to_le_bytes());
        for bad in [0u16, 63, 512, 0xffff] {
            guest.write(at::QUEUE_SIZE, &bad.to_le_bytes());
            assert_eq!(guest.read(at::QUEUE_SIZE, 2), 64);
        }
        let address = 0x1234_5678_9abc_d000u64;
        guest.write(at::QUEUE_DESC, &address.to_le_bytes());
        guest.write(at::QUEUE_DRIVER, &address.to_le_bytes()[..4]);
        guest.write(at::QUEUE_DRIVER + 4, &address.to_le_bytes()[4..]);
        guest.write(at::QUEUE_DEVICE + 4, &address.to_le_bytes()[4..]);
        assert_eq!(guest.read(at::QUEUE_DESC, 8), address);
        assert_eq!(guest.read(at::QUEUE_DRIVER, 8), address);
        assert_eq!(guest.read(at::QUEUE_DEVICE, 8), address >> 32 << 32);
        guest.write(at::QUEUE_ENABLE, &[1, 0]);
        guest.write(at::QUEUE_DESC, &[0; 8]);
        guest.write(at::QUEUE_SIZE, &2u16.to_le_bytes());
        guest.write(at::QUEUE_ENABLE, &[0, 0]);
        assert_eq!(guest.read(at::QUEUE_DESC, 8), address);
        assert_eq!(guest.read(at::QUEUE_SIZE, 2), 64);
        assert_eq!(guest.read(at::QUEUE_ENABLE, 2), 1);
    }

    #[test]
    fn there_are_as_many_vectors_as_there_are() {
        let mut guest = Guest::new();
        let vectors = guest.device.queues() + 1;
        for (wanted, has) in [(vectors - 1, vectors - 1), (vectors, NO_VECTOR)] {
            for register in [at::CONFIG_VECTOR, at::QUEUE_VECTOR] {
                guest.write(register, &wanted.to_le_bytes());
                assert_eq!(guest.read(register, 2), u64::from(has));
            }
        }
    }

    #[test]
    fn a_reset_leaves_nothing() {
        let mut guest = Guest::new();
        guest.accept(VERSION_1 | RC);
        guest.write(at::QUEUE_VECTOR, &[1, 0]);
        guest.write(at::QUEUE_ENABLE, &[1, 0]);
        guest.write(at::STATUS, &[3 | FEATURES_OK | DRIVER_OK]);
        let up = u64::from(3 | FEATURES_OK | DRIVER_OK);
        assert_eq!(guest.read(at::STATUS, 1), up);
        // Bits are not taken back one by one.
        guest.write(at::STATUS, &[1]);
        assert_eq!(guest.read(at::STATUS, 1), up);
        guest.write(at::STATUS, &[0]);
        assert_eq!(guest.read(at::STATUS, 1), 0);
        assert_eq!(guest.read(at::QUEUE_ENABLE, 2), 0);
        assert_eq!(guest.read(at::QUEUE_VECTOR, 2), u64::from(NO_VECTOR));
        assert_eq!(guest.accept(VERSION_1 | RC), u64::from(3 | FEATURES_OK));
    }

    #[test]
    fn the_generation_tells_of_changes() {
        let mut guest = Guest::new();
        let before = guest.read(at::GENERATION, 1);
        assert_eq!(guest.read(at::GENERATION, 1), before);
        guest.adapter.set_link(&guest.settings.link, false);
        assert_eq!(guest.read(at::GENERATION, 1), before + 1);
        assert_eq!(guest.read(at::GENERATION, 1), before + 1);
    }

    proptest! {
        #[test]
        fn no_access_does_harm(accesses in prop::collection::vec(
            (0usize..70, prop::collection::vec(prop_oneof![0u8..8, any::<u8>()], 0..9)),
            0..200,
        )) {
            let mut guest = Guest::new();
            guest.accept(VERSION_1 | RC);
            for (offset, data) in accesses {
                guest.write(offset, &data);
                guest.read(offset, data.len());
            }
        }
    }
}
