// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration space, and where things are in the BARs: a modern virtio device (Virtio 1.2,
//! 4.1), as the guest's driver finds it.

/// Bytes of the configuration space.
pub(super) const CONFIG_SPACE: usize = 256;
/// The BAR of the MSI-X table: 32 bits.
pub(super) const MSIX_BAR: u8 = 0;
/// The BAR of virtio: 64 bits, and so 2 and 3.
pub(super) const VIRTIO_BAR: u8 = 2;

/// Bytes of an entry of the MSI-X table, and where the word with its mask bit is.
pub(super) const MSIX_ENTRY: usize = 16;
pub(super) const MSIX_CONTROL: usize = 12;
/// Where the pending bits are in their BAR, and its size: a page for each.
const PENDING: u32 = 0x1000;
pub(super) const MSIX_BAR_SIZE: u64 = 0x2000;

/// Where the parts of virtio are in their BAR. Each has a page, and each notify address, too: the
/// driver maps those of doorbell queues to processes.
pub(super) const COMMON: u64 = 0;
pub(super) const ISR: u64 = 0x1000;
pub(super) const DEVICE: u64 = 0x2000;
pub(super) const NOTIFY: u64 = 0x4000;
pub(super) const NOTIFY_STEP: u64 = 0x1000;
/// Bytes of the common configuration.
pub(super) const COMMON_SIZE: usize = 60;
/// Bytes of the device's configuration that can be read, most of them reserved.
const DEVICE_SIZE: u32 = 0x1000;

const VENDOR: u16 = 0x1af4;
/// Of a device without a legacy interface: 0x1040 and the type of the virtio device.
const DEVICE_ID: u16 = 0x1040 + virtio_rdma_spec::DEVICE_ID as u16;
/// A network controller of no particular kind.
const CLASS: [u8; 3] = [0, 0x80, 2];

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;

/// Types of virtio's capabilities.
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const PCI_CFG: u8 = 5;

/// A part of a BAR that can be accessed by way of the configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) bar: u8,
    pub(super) offset: u64,
    pub(super) length: usize,
}

/// Size of the BAR of virtio with so many virtqueues, bytes.
pub(super) fn virtio_bar_size(queues: u16) -> u64 {
    (NOTIFY + NOTIFY_STEP * u64::from(queues)).next_power_of_two()
}

/// The configuration space.
#[derive(Debug, Clone)]
pub(super) struct ConfigSpace {
    bytes: [u8; CONFIG_SPACE],
    /// Bits that can be written.
    writable: [u8; CONFIG_SPACE],
    /// Where the capability is that gives access to BARs.
    window: usize,
}

impl ConfigSpace {
    /// That of a device with so many virtqueues and MSI-X vectors.
    pub(super) fn new(queues: u16, vectors: u16) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_SPACE],
            writable: [0; CONFIG_SPACE],
            window: 0,
        };
        space.set(0, &VENDOR.to_le_bytes());
        space.set(2, &DEVICE_ID.to_le_bytes());
        // Memory, bus mastering, no INTx.
        space.allow(COMMAND, &0x0406_u16.to_le_bytes());
        // There are capabilities.
        space.set(STATUS, &0x0010_u16.to_le_bytes());
        // Revision 1: no legacy interface.
        space.set(0x08, &[1]);
        space.set(0x09, &CLASS);
        space.bar(MSIX_BAR, MSIX_BAR_SIZE, 0);
        space.bar(VIRTIO_BAR, virtio_bar_size(queues), 0xc);
        space.set(0x2c, &VENDOR.to_le_bytes());
        // As the devices of QEMU have it.
        space.set(0x2e, &0x1100_u16.to_le_bytes());

        let mut end = FIRST_CAPABILITY;
        let table = u32::from(MSIX_BAR);
        let mut msix = vec![0x11, 0];
        msix.extend((vectors - 1).to_le_bytes());
        msix.extend(table.to_le_bytes());
        msix.extend((PENDING | table).to_le_bytes());
        let at = space.capability(&mut end, &msix);
        // Enable, and mask all.
        space.allow(at + 2, &0xc000_u16.to_le_bytes());

        let notify_size = NOTIFY_STEP as u32 * u32::from(queues);
        let mut virtio = |kind: u8, offset: u64, length: u32, more: &[u8]| {
            let length_of_all = 16 + more.len() as u8;
            let mut bytes = vec![0x09, 0, length_of_all, kind, VIRTIO_BAR, 0, 0, 0];
            bytes.extend((offset as u32).to_le_bytes());
            bytes.extend(length.to_le_bytes());
            bytes.extend(more);
            space.capability(&mut end, &bytes)
        };
        virtio(COMMON_CFG, COMMON, COMMON_SIZE as u32, &[]);
        virtio(ISR_CFG, ISR, 1, &[]);
        virtio(DEVICE_CFG, DEVICE, DEVICE_SIZE, &[]);
        let step = (NOTIFY_STEP as u32).to_le_bytes();
        virtio(NOTIFY_CFG, NOTIFY, notify_size, &step);
        let window = virtio(PCI_CFG, 0, 0, &[0; 4]);
        space.window = window;
        // Which BAR, where in it, how much, and the data.
        space.allow(window + 4, &[0xff]);
        space.allow(window + 8, &[0xff; 12]);
        space
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(at).zip(bits) {
            *to = *from;
        }
    }

    /// Its low bits say what it is; as many address bits can be written as its size leaves.
    fn bar(&mut self, number: u8, size: u64, kind: u8) {
        let at = BARS + 4 * usize::from(number);
        self.set(at, &[kind]);
        let mask = (!(size - 1)).to_le_bytes();
        let wide = kind & 4 != 0;
        self.allow(at, mask.get(..if wide { 8 } else { 4 }).unwrap_or_default());
    }

    /// Adds a capability at `end`; returns where it is.
    fn capability(&mut self, end: &mut usize, bytes: &[u8]) -> usize {
        let at = *end;
        let mut link = CAPABILITIES;
        while let Some(next) = self.bytes.get(link).filter(|next| **next != 0) {
            link = usize::from(*next) + 1;
        }
        self.set(link, &[at as u8]);
        self.set(at, bytes);
        *end = (at + bytes.len()).next_multiple_of(4);
        at
    }

    /// Reads what is at `offset`, all of which is there.
    pub(super) fn read(&self, offset: usize, data: &mut [u8]) {
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(offset)) {
            *to = *from;
        }
    }

    /// Writes what can be written at `offset`.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        let bytes = self.bytes.iter_mut().zip(&self.writable);
        for ((to, writable), from) in bytes.skip(offset).zip(data) {
            *to = *to & !writable | from & writable;
        }
    }

    /// Where the data of the window are.
    pub(super) fn window_data(&self) -> usize {
        self.window + 16
    }

    /// Whether an access goes to the data of the window.
    pub(super) fn is_at_window(&self, offset: usize, length: usize) -> bool {
        offset < self.window_data() + 4 && self.window_data() < offset.saturating_add(length)
    }

    /// What the driver sees in the window.
    pub(super) fn window(&self) -> Option<Window> {
        let field = |at: usize| {
            let bytes = self.bytes.get(self.window + at..)?.first_chunk()?;
            Some(u32::from_le_bytes(*bytes))
        };
        let [bar, ..] = field(4)?.to_le_bytes();
        let length = field(12)? as usize;
        let offset = u64::from(field(8)?);
        [1, 2, 4].contains(&length).then_some(Window {
            bar,
            offset,
            length,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace::new(7, 8)
    }

    fn word(space: &ConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn capabilities(space: &ConfigSpace) -> Vec<(u8, usize)> {
        let mut found = Vec::new();
        let mut at = usize::from(space.bytes[CAPABILITIES]);
        while at != 0 {
            found.push((space.bytes[at], at));
            at = usize::from(space.bytes[at + 1]);
        }
        found
    }

    #[test]
    fn a_driver_knows_the_device() {
        let space = space();
        assert_eq!(word(&space, 0), 0x106a_1af4);
        assert_eq!(word(&space, 8), 0x0280_0001);
        // No INTx.
        assert_eq!(word(&space, 0x3c), 0);
    }

    #[test]
    fn bars_tell_their_size() {
        let mut space = space();
        for bar in 0..6 {
            space.write(BARS + 4 * bar, &[0xff; 4]);
        }
        let bars = [0, 1, 2, 3, 4, 5].map(|bar| word(&space, BARS + 4 * bar));
        let size = virtio_bar_size(7) as u32;
        assert_eq!(size, 0x10000);
        let low = !(size - 1) | 0xc;
        assert_eq!(bars, [0xffff_e000, 0, low, 0xffff_ffff, 0, 0]);
        // With all queues that there may be, it fits the window of a root port.
        assert!(virtio_bar_size(42) <= 32 << 20);
    }

    #[test]
    fn capabilities_name_places_in_bars() {
        let space = space();
        let found = capabilities(&space);
        let ids: Vec<u8> = found.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [0x11, 9, 9, 9, 9, 9]);
        // Eight vectors, the table and the pending bits in BAR 0.
        let (_, msix) = found[0];
        assert_eq!(word(&space, msix) >> 16, 7);
        assert_eq!([4, 8].map(|at| word(&space, msix + at)), [0, 0x1000]);
        assert!(8 * MSIX_ENTRY as u32 <= PENDING);
        let mut kinds = Vec::new();
        for (_, at) in &found[1..] {
            let [_, _, length, kind] = word(&space, *at).to_le_bytes();
            kinds.push(kind);
            let end = word(&space, at + 8) + word(&space, at + 12);
            assert!(u64::from(end) <= virtio_bar_size(7));
            assert_eq!(word(&space, at + 4), u32::from(VIRTIO_BAR));
            assert_eq!(
                length,
                if [NOTIFY_CFG, PCI_CFG].contains(&kind) {
                    20
                } else {
                    16
                }
            );
            if kind == NOTIFY_CFG {
                assert_eq!(word(&space, at + 12), 7 * 0x1000);
                assert_eq!(word(&space, at + 16), 0x1000);
            }
        }
        kinds.sort_unstable();
        assert_eq!(kinds, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn only_what_is_the_drivers_can_be_written() {
        let mut space = space();
        let before = space.bytes;
        space.write(0, &[0xff; CONFIG_SPACE]);
        space.write(0, &[0; CONFIG_SPACE]);
        // But for the window, which named a BAR.
        space.set(space.window + 4, &[VIRTIO_BAR]);
        assert_eq!(space.bytes, before);
        space.write(COMMAND, &[0xff; 2]);
        assert_eq!(word(&space, COMMAND) & 0xffff, 0x0406);
        // Beyond the end.
        space.write(CONFIG_SPACE - 1, &[0xff; 8]);
    }

    #[test]
    fn the_window_shows_what_the_driver_says() {
        let mut space = space();
        assert_eq!(space.window(), None);
        let at = space.window;
        space.write(at + 4, &[0]);
        space.write(at + 8, &[4, 0, 0, 0, 2, 0, 0, 0]);
        let window = Window {
            bar: 0,
            offset: 4,
            length: 2,
        };
        assert_eq!(space.window(), Some(window));
        space.write(at + 12, &[3]);
        assert_eq!(space.window(), None);
        let data = space.window_data();
        let near = [
            (data - 4, 4),
            (data - 1, 2),
            (data, 1),
            (data + 3, 1),
            (data + 4, 4),
        ];
        let at = near.map(|(offset, length)| space.is_at_window(offset, length));
        assert_eq!(at, [false, true, true, true, false]);
    }
}
