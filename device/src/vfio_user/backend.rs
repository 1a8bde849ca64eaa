// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of a front end mean for the PCI device.
use std::fs::File;
use std::io;
use std::sync::Arc;

use libc::{EINVAL, ENOTSUP};
use virtio_rdma_spec::config::first_doorbell_queue;

use super::memory::Mappings;
use super::pci::{
    self, ConfigSpace, Window, CONFIG_SPACE, MSIX_BAR, MSIX_BAR_SIZE, MSIX_CONTROL, MSIX_ENTRY,
    VIRTIO_BAR,
};
use super::protocol::{irq, Body, Header, Malformed, Request, HEADER, MAX_FDS, MAX_TRANSFER};
use super::registers::{Lines, Registers};
use crate::eventfd;
use crate::front_end::{SharedDevice, Vm};
use crate::limits::MAX_MEMORY_REGIONS;

/// Number of regions: six BARs, the expansion ROM, the configuration space, VGA.
const REGIONS: u32 = 9;
const CONFIG_REGION: u32 = 7;
/// Number of kinds of interrupts: INTx, MSI, MSI-X.
const IRQS: u32 = 3;
const MSIX_IRQ: u32 = 2;
/// A region can be read and written; a device can be reset, and is a PCI device.
const READ_WRITE: u32 = 3;
const RESETTABLE_PCI: u32 = 3;
/// The version of the protocol, but for 0 before the dot.
const MINOR: u16 = 1;

/// An answer: a body, or an error number.
pub(super) type Answer = Result<Vec<u8>, i32>;

/// A PCI device, as the messages of its front end change it.
pub(super) struct Backend {
    device: Arc<SharedDevice>,
    queues: u16,
    config: ConfigSpace,
    /// The MSI-X table. Whether a vector is masked is the front end's affair.
    msix: Vec<u8>,
    registers: Registers,
    lines: Lines,
    mappings: Mappings,
    /// The front end has told its version.
    greeted: bool,
}

/// The MSI-X table after a reset: all is masked.
fn masked(vectors: u16) -> Vec<u8> {
    let mut entry = [0; MSIX_ENTRY];
    if let Some(control) = entry.get_mut(MSIX_CONTROL) {
        *control = 1;
    }
    entry.repeat(vectors.into())
}

/// The virtqueue that a guest notifies by the message that these bytes begin with, and its length: if
/// all of it is there, and nobody waits for an answer.
pub(super) fn notification(bytes: &[u8], queues: usize) -> Option<(u64, usize)> {
    let (header, rest) = bytes.split_first_chunk()?;
    let header = Header::read(header).ok()?;
    let body = rest.get(..header.body)?;
    let request = Request::read(header.command, body).ok()?;
    let Request::Write { region, offset, .. } = request else {
        return None;
    };
    let queue = offset.checked_sub(pci::NOTIFY)? / pci::NOTIFY_STEP;
    let there = region == u32::from(VIRTIO_BAR) && queue < queues as u64;
    (there && header.no_reply).then_some((queue, HEADER + header.body))
}

impl Backend {
    /// A device for the VM that connects.
    pub(super) fn new(vm: &Vm) -> io::Result<Self> {
        // Eventfds come first, since what is attached has to be detached.
        let queues = first_doorbell_queue(vm.settings.completion_queues);
        let queues = queues.saturating_add(vm.adapter.workers());
        let vectors = queues + 1;
        let lines = Lines::new(queues, vectors)?;
        let device = SharedDevice::attach(vm)?;
        let registers = device.with(|device| Registers::new(device));
        Ok(Self {
            device: Arc::new(device),
            queues,
            config: ConfigSpace::new(queues, vectors),
            msix: masked(vectors),
            registers,
            lines,
            mappings: Mappings::default(),
            greeted: false,
        })
    }

    pub(super) fn device(&self) -> &Arc<SharedDevice> {
        &self.device
    }

    /// By which the guest notifies virtqueues.
    pub(super) fn kicks(&self) -> &Arc<Vec<File>> {
        self.lines.kicks()
    }

    /// Does what a message asks for.
    pub(super) fn handle(
        &mut self,
        command: u16,
        body: &[u8],
        files: Vec<File>,
    ) -> Result<Answer, Malformed> {
        let request = Request::read(command, body)?;
        if !self.greeted && !matches!(request, Request::Version { .. }) {
            return Err(Malformed::NoVersion(command));
        }
        Ok(match request {
            Request::Version {
                major,
                minor,
                capabilities,
            } => Ok(self.greet(major, minor, capabilities)?),
            Request::DmaMap {
                flags,
                offset,
                address,
                size,
            } => {
                let with = self.mappings.with(flags, offset, (address, size), files);
                self.remap(with).map(|()| {
                    if let Some(error) = self.mappings.not_shared().filter(|_| address == 0) {
                        self.device.warn(&error);
                    }
                    Vec::new()
                })
            }
            Request::DmaUnmap {
                flags,
                address,
                size,
            } => {
                let without = self.mappings.without(flags, address, size);
                let done = Body::default().u32(24).u32(flags).u64(address).u64(size);
                self.remap(without).map(|()| done.done())
            }
            Request::GetInfo => {
                let body = Body::default().u32(16).u32(RESETTABLE_PCI);
                Ok(body.u32(REGIONS).u32(IRQS).done())
            }
            Request::GetRegionInfo { index } if index < REGIONS => {
                let size = self.region_size(index);
                let flags = if size == 0 { 0 } else { READ_WRITE };
                let body = Body::default().u32(32).u32(flags).u32(index).u32(0);
                Ok(body.u64(size).u64(0).done())
            }
            Request::GetIrqInfo { index } if index < IRQS => {
                let (flags, count) = match index {
                    MSIX_IRQ => (irq::EVENTFD, u32::from(self.queues) + 1),
                    _ => (0, 0),
                };
                let body = Body::default().u32(16).u32(flags);
                Ok(body.u32(index).u32(count).done())
            }
            Request::SetIrqs {
                flags,
                index,
                start,
                count,
                data,
            } => self
                .set_irqs(flags, index, (start, count), data, files)
                .map(|()| Vec::new()),
            Request::Read {
                region,
                offset,
                count,
            } => self.read(region, offset, count).map(|data| {
                let body = Body::default().u64(offset).u32(region).u32(count);
                body.bytes(&data).done()
            }),
            Request::Write {
                region,
                offset,
                data,
            } => self.write(region, offset, data).map(|()| {
                let body = Body::default().u64(offset).u32(region);
                body.u32(data.len() as u32).done()
            }),
            Request::Reset => {
                self.reset();
                Ok(Vec::new())
            }
            Request::GetRegionInfo { .. } | Request::GetIrqInfo { .. } => Err(EINVAL),
            Request::Other => Err(ENOTSUP),
        })
    }

    fn greet(&mut self, major: u16, minor: u16, theirs: &[u8]) -> Result<Vec<u8>, Malformed> {
        let malformed = Malformed::Version(major);
        if major != 0 || self.greeted {
            return Err(malformed);
        }
        // Nothing that is there has to be known; what is not JSON comes from something else.
        if let Some((end, json)) = theirs.split_last() {
            let json = serde_json::from_slice::<serde_json::Value>(json);
            if *end != 0 || json.is_err() {
                return Err(malformed);
            }
        }
        self.greeted = true;
        let ours = serde_json::json!({ "capabilities": {
            "max_msg_fds": MAX_FDS,
            "max_data_xfer_size": MAX_TRANSFER,
            "max_dma_maps": MAX_MEMORY_REGIONS,
        }});
        let body = Body::default().u16(0).u16(minor.min(MINOR));
        Ok(body.bytes(ours.to_string().as_bytes()).bytes(&[0]).done())
    }

    /// These mappings are those of the front end from now on.
    fn remap(&mut self, mappings: Result<Mappings, super::memory::Error>) -> Result<(), i32> {
        let refused = |error: &dyn std::error::Error| {
            self.device.warn(error);
            EINVAL
        };
        let mappings = mappings.map_err(|error| refused(&error))?;
        if !mappings.same_memory(&self.mappings) {
            let memory = mappings.memory().map_err(|error| refused(&error))?;
            let set = self.device.set_memory(memory);
            set.map_err(|error| refused(&error))?;
        }
        self.mappings = mappings;
        Ok(())
    }

    fn region_size(&self, region: u32) -> u64 {
        match region {
            CONFIG_REGION => CONFIG_SPACE as u64,
            _ => u8::try_from(region).map_or(0, |bar| self.bar_size(bar)),
        }
    }

    fn bar_size(&self, bar: u8) -> u64 {
        match bar {
            MSIX_BAR => MSIX_BAR_SIZE,
            VIRTIO_BAR => pci::virtio_bar_size(self.queues),
            _ => 0,
        }
    }

    fn set_irqs(
        &mut self,
        flags: u32,
        index: u32,
        (start, count): (u32, u32),
        data: &[u8],
        files: Vec<File>,
    ) -> Result<(), i32> {
        if index != MSIX_IRQ {
            // There are none of these to take away.
            let nothing = flags == irq::DATA_NONE | irq::ACTION_TRIGGER && count == 0;
            return if index < IRQS && nothing {
                Ok(())
            } else {
                Err(EINVAL)
            };
        }
        let range = start as usize..(start as usize).saturating_add(count as usize);
        let vectors = self.lines.vectors();
        let vectors = match flags {
            _ if flags & irq::ACTION_TRIGGER == 0 => return Err(EINVAL),
            _ if flags == irq::DATA_NONE | irq::ACTION_TRIGGER && count == 0 => vectors,
            _ => vectors.get_mut(range).ok_or(EINVAL)?,
        };
        const NONE: u32 = irq::DATA_NONE | irq::ACTION_TRIGGER;
        const BOOL: u32 = irq::DATA_BOOL | irq::ACTION_TRIGGER;
        const EVENTFD: u32 = irq::DATA_EVENTFD | irq::ACTION_TRIGGER;
        match flags {
            NONE if count == 0 => vectors.fill_with(|| None),
            NONE | BOOL => {
                if flags == BOOL && data.len() != vectors.len() {
                    return Err(EINVAL);
                }
                let wanted = data.iter().map(|wanted| *wanted != 0);
                let wanted = wanted.chain(std::iter::repeat(flags == NONE));
                for (vector, _) in vectors.iter().zip(wanted).filter(|(_, wanted)| *wanted) {
                    // It was an eventfd when it was set.
                    let _ = vector.as_ref().map(eventfd::signal);
                }
                return Ok(());
            }
            EVENTFD if files.is_empty() => vectors.fill_with(|| None),
            EVENTFD if files.len() == vectors.len() => {
                if files.iter().any(|file| eventfd::check(file).is_err()) {
                    return Err(EINVAL);
                }
                for (vector, file) in vectors.iter_mut().zip(files) {
                    *vector = Some(file);
                }
            }
            _ => return Err(EINVAL),
        }
        let (registers, lines) = (&self.registers, &self.lines);
        self.device
            .with(|device| registers.vectors_changed(device, lines));
        Ok(())
    }

    /// Checks that an access is in a region.
    fn check(&self, region: u32, offset: u64, length: usize) -> Result<(), i32> {
        let end = offset.checked_add(length as u64).ok_or(EINVAL)?;
        let fits = length as u64 <= u64::from(MAX_TRANSFER) && end <= self.region_size(region);
        fits.then_some(()).ok_or(EINVAL)
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, i32> {
        self.check(region, offset, count as usize)?;
        let mut data = vec![0; count as usize];
        if region != CONFIG_REGION {
            self.read_bar(region, offset, &mut data);
            return Ok(data);
        }
        // It is within the configuration space.
        let offset = offset as usize;
        if let Some(window) = self.window(offset, data.len()) {
            let mut bytes = [0; 4];
            let bytes = bytes.get_mut(..window.length).unwrap_or_default();
            self.read_bar(window.bar.into(), window.offset, bytes);
            self.config.write(self.config.window_data(), bytes);
        }
        self.config.read(offset, &mut data);
        Ok(data)
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), i32> {
        self.check(region, offset, data.len())?;
        if region != CONFIG_REGION {
            self.write_bar(region, offset, data);
            return Ok(());
        }
        // It is within the configuration space.
        let offset = offset as usize;
        self.config.write(offset, data);
        if let Some(window) = self.window(offset, data.len()) {
            let mut bytes = [0; 4];
            let bytes = bytes.get_mut(..window.length).unwrap_or_default();
            self.config.read(self.config.window_data(), bytes);
            self.write_bar(window.bar.into(), window.offset, bytes);
        }
        Ok(())
    }

    /// What is to be accessed by an access to the configuration space, if that is at the window.
    fn window(&self, offset: usize, length: usize) -> Option<Window> {
        let at_window = self.config.is_at_window(offset, length);
        let window = self.config.window().filter(|_| at_window)?;
        let there = self.check(window.bar.into(), window.offset, window.length);
        // The configuration space is no BAR.
        (u32::from(window.bar) < CONFIG_REGION && there.is_ok()).then_some(window)
    }

    fn read_bar(&mut self, bar: u32, offset: u64, data: &mut [u8]) {
        match (bar as u8, offset) {
            (MSIX_BAR, _) => {
                let table = self.msix.iter().skip(offset as usize);
                // No bit is pending: an eventfd is signaled, and the rest is the front end's.
                data.iter_mut()
                    .zip(table)
                    .for_each(|(to, from)| *to = *from);
            }
            (VIRTIO_BAR, pci::COMMON..pci::ISR) => {
                let registers = &mut self.registers;
                self.device
                    .with(|device| registers.read(offset - pci::COMMON, data, device));
            }
            (VIRTIO_BAR, pci::DEVICE..pci::NOTIFY) => {
                let (at, length) = ((offset - pci::DEVICE) as u32, data.len() as u32);
                let config = self.device.with(|device| device.config(at, length));
                data.iter_mut()
                    .zip(config)
                    .for_each(|(to, from)| *to = from);
            }
            // There is no INTx to acknowledge, and nothing to be read where queues are notified.
            _ => {}
        }
    }

    fn write_bar(&mut self, bar: u32, offset: u64, data: &[u8]) {
        match (bar as u8, offset) {
            (MSIX_BAR, _) => {
                let table = self.msix.iter_mut().skip(offset as usize);
                table.zip(data).for_each(|(to, from)| *to = *from);
            }
            (VIRTIO_BAR, pci::COMMON..pci::ISR) => {
                let (registers, lines) = (&mut self.registers, &self.lines);
                let offset = offset - pci::COMMON;
                self.device
                    .with(|device| registers.write(offset, data, device, lines));
            }
            (VIRTIO_BAR, pci::NOTIFY..) => {
                self.lines.kick((offset - pci::NOTIFY) / pci::NOTIFY_STEP);
            }
            _ => {}
        }
    }

    fn reset(&mut self) {
        let vectors = self.queues + 1;
        self.config = ConfigSpace::new(self.queues, vectors);
        self.msix = masked(vectors);
        let registers = &mut self.registers;
        self.device.with(|device| registers.reset(device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUES: usize = 3;
    const NO_REPLY: u32 = 1 << 4;

    /// A write of so many bytes to a region.
    fn write(region: u32, offset: u64, length: u32, flags: u32) -> Vec<u8> {
        let size = (HEADER + 16) as u32 + length;
        let header = Body::default().u16(7).u16(10).u32(size).u32(flags).u32(0);
        let body = header.u64(offset).u32(region).u32(length);
        body.bytes(&vec![0; length as usize]).done()
    }

    #[test]
    fn only_whole_notifications_are_some() {
        let notify = |queue: u64| pci::NOTIFY + queue * pci::NOTIFY_STEP;
        let bar = u32::from(VIRTIO_BAR);
        for (queue, length) in [(0, 2), (2, 4)] {
            let mut bytes = write(bar, notify(queue), length, NO_REPLY);
            let all = bytes.len();
            bytes.extend([0xff; 8]);
            for end in 0..=bytes.len() {
                let whole = (end >= all).then_some((queue, all));
                assert_eq!(notification(&bytes[..end], QUEUES), whole);
            }
        }
        for other in [
            write(bar, notify(0), 2, 0),
            write(bar, notify(QUEUES as u64), 2, NO_REPLY),
            write(bar, u64::MAX, 2, NO_REPLY),
            write(bar, pci::NOTIFY - 1, 2, NO_REPLY),
            write(bar + 1, notify(0), 2, NO_REPLY),
            Body::default()
                .u16(7)
                .u16(4)
                .u32(16)
                .u32(NO_REPLY)
                .u32(0)
                .done(),
            vec![0xff; 64],
        ] {
            assert_eq!(notification(&other, QUEUES), None);
        }
    }
}
