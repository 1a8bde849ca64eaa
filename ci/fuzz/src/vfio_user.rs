// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `vfio_user`: a front end sends arbitrary messages of vfio-user with file descriptors of
//! all kinds, and does to the PCI device what no driver does. Some inputs bring the device up
//! first, and notify virtqueues with arbitrary contents. The connection of another VM stays, and
//! when the front end is gone, so is its VM.
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use rustix::event::{eventfd, EventfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost_device_rdma::vfio_user;
use vhost_device_rdma_bare::mapping::{Mapping, View};

use crate::commands::change;
use crate::host::{FEATURES, PAGE};
use crate::vhost_user::{long_words, memory, words, Device};

/// Messages of an input.
const MOST_STEPS: usize = 60;
/// Pages of the memory that the front end shares, and where the guest has it.
const PAGES: usize = 64;
const GUEST_ADDRESS: u64 = 1 << 30;
/// Pages that a virtqueue takes: descriptors, available and used ring.
const RING_PAGES: u64 = 3;
/// Virtqueues that are brought up.
const QUEUES: u64 = 7;
const RING_SIZE: u16 = 16;
/// The most file descriptors of a message: more than there may be.
const MOST_FDS: usize = 17;
/// VERSION_1 and RING_EVENT_IDX.
const VIRTIO_FEATURES: u64 = 1 << 32 | 1 << 29;

/// Commands of vfio-user.
mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const GET_REGION_INFO: u16 = 5;
    pub const GET_IRQ_INFO: u16 = 7;
    pub const SET_IRQS: u16 = 8;
    pub const READ: u16 = 9;
    pub const WRITE: u16 = 10;
    pub const RESET: u16 = 13;
    /// Those that a structured message is made for.
    pub const ALL: [u16; 9] = [
        VERSION,
        DMA_MAP,
        DMA_UNMAP,
        GET_REGION_INFO,
        GET_IRQ_INFO,
        SET_IRQS,
        READ,
        WRITE,
        RESET,
    ];
}

/// The region of virtio, where queues are notified in it, and the MSI-X interrupts.
const BAR: u32 = 2;
const NOTIFY: u64 = 0x4000;
const MSIX: u32 = 2;

/// The front end, with what it shares.
struct FrontEnd {
    stream: UnixStream,
    memory: OwnedFd,
    view: View,
    call: OwnedFd,
    ended: bool,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let device = Device::new(vfio_user::serve);
    let neighbour = device.neighbour();
    let memory = memory(PAGES * PAGE);
    let file = File::from(memory.try_clone().expect("a file"));
    let mapping = Mapping::new(&file, 0, PAGES * PAGE).expect("a mapping");
    let stream = UnixStream::connect(&device.sockets[0]).expect("a connection");
    stream
        .set_read_timeout(Some(Duration::from_millis(1)))
        .expect("a time-out");
    let mut front = FrontEnd {
        stream,
        memory,
        view: View::new(Arc::new(mapping), 0, PAGES * PAGE).expect("a view"),
        call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"),
        ended: false,
    };
    let mut u = Unstructured::new(data);
    if !u.ratio(1, 16).unwrap_or(false) {
        front.request(command::VERSION, b"\0\0\x01\0{}\0", &[]);
    }
    for _ in 0..MOST_STEPS {
        if u.is_empty() || front.ended || front.step(&mut u).is_err() {
            break;
        }
    }
    drop(front);
    device.wait_end(&neighbour);
    drop(neighbour);
}

fn access(offset: u64, region: u32, data: &[u8]) -> Vec<u8> {
    [
        long_words(&[offset]),
        words(&[region, data.len() as u32]),
        data.to_vec(),
    ]
    .concat()
}

fn message(command: u16, flags: u32, length: u32, body: &[u8]) -> Vec<u8> {
    let head = words(&[u32::from(command) << 16, 16 + length, flags, 0]);
    [&head, body].concat()
}

impl FrontEnd {
    fn step(&mut self, u: &mut Unstructured) -> Result<()> {
        match u.arbitrary::<u8>()? {
            0..=19 => self.bring_up(u.int_in_range(1..=QUEUES)?),
            20..=49 => self.scribble(u)?,
            50..=69 => self.set(NOTIFY + 0x1000 * u.int_in_range(0..=QUEUES)?, &[0, 0]),
            70..=129 => self.register(u)?,
            130..=139 => {
                let length = u.int_in_range(0..=80)?;
                let bytes = u.bytes(usize::min(length, u.len()))?.to_vec();
                self.send(&bytes, &[]);
            }
            _ => self.message(u)?,
        }
        Ok(())
    }

    /// What VMM and driver do to bring up a device, as far as they come.
    fn bring_up(&mut self, queues: u64) {
        let memory = self.memory.try_clone().expect("a file");
        let size = (PAGES * PAGE) as u64;
        let map = [words(&[32, 3]), long_words(&[0, GUEST_ADDRESS, size])].concat();
        self.request(command::DMA_MAP, &map, &[memory.as_fd()]);
        let call = self.call.try_clone().expect("a file");
        let calls = [call.as_fd(); 4];
        let set = words(&[20, 4 | 32, MSIX, 0, calls.len() as u32]);
        self.request(command::SET_IRQS, &set, &calls);
        self.set(20, &[0]);
        self.set(20, &[3]);
        let features = VIRTIO_FEATURES | FEATURES;
        for half in 0..2u32 {
            self.set(8, &half.to_le_bytes());
            self.set(12, &((features >> (32 * half)) as u32).to_le_bytes());
        }
        self.set(20, &[11]);
        for queue in 0..queues {
            self.set(22, &(queue as u16).to_le_bytes());
            self.set(24, &RING_SIZE.to_le_bytes());
            self.set(26, &((queue % 4) as u16).to_le_bytes());
            for (number, register) in [32, 40, 48].into_iter().enumerate() {
                let page = queue % 8 * RING_PAGES + number as u64;
                let address = GUEST_ADDRESS + page * PAGE as u64;
                self.set(register, &address.to_le_bytes());
            }
            self.set(28, &[1, 0]);
        }
        // A command in the control queue: one readable buffer, one writable.
        let [readable, writable] = [30, 31].map(|page| GUEST_ADDRESS + page * PAGE as u64);
        let descriptors = [
            long_words(&[readable, 64 | 1 << 32 | 1 << 48]),
            long_words(&[writable, 256 | 2 << 32]),
        ];
        self.view.write(0, &descriptors.concat());
        self.view.write(PAGE, &[0, 0, 1, 0, 0, 0]);
        self.set(20, &[15]);
    }

    /// Writes to the shared memory, mostly to its rings.
    fn scribble(&mut self, u: &mut Unstructured) -> Result<()> {
        let pages = if u.arbitrary()? { 6 } else { PAGES };
        let page = u.choose_index(pages)?;
        let words = if u.ratio(3, 4)? { 16 } else { PAGE / 8 };
        let word = u.choose_index(words)?;
        let value = match u.arbitrary::<u8>()? {
            0..=63 => GUEST_ADDRESS + u.int_in_range(0..=PAGES * PAGE)? as u64,
            64..=127 => u.int_in_range(0..=64)? as u64,
            _ => u.arbitrary()?,
        };
        let word = self.view.u64(page * PAGE + 8 * word);
        word.store(value, Ordering::SeqCst);
        Ok(())
    }

    /// Writes a virtio register, or reads some.
    fn register(&mut self, u: &mut Unstructured) -> Result<()> {
        let offset = match u.arbitrary::<u8>()? {
            0..=199 => u.int_in_range(0..=60)?,
            _ => u.int_in_range(0..=0x1_0000)?,
        };
        let length = *u.choose(&[1, 2, 4, 8, 3, 0])?;
        if u.ratio(1, 4)? {
            let read = [long_words(&[offset]), words(&[BAR, length])].concat();
            self.request(command::READ, &read, &[]);
            return Ok(());
        }
        let value = match u.arbitrary::<u8>()? {
            0..=127 => u.int_in_range(0..=64)?,
            128..=191 => GUEST_ADDRESS + u.int_in_range(0..=PAGES * PAGE)? as u64,
            _ => u.arbitrary()?,
        };
        self.set(offset, &value.to_le_bytes()[..length as usize]);
        Ok(())
    }

    fn message(&mut self, u: &mut Unstructured) -> Result<()> {
        let command = match u.arbitrary::<u8>()? {
            0..=9 => u.int_in_range(0..=20)?,
            10 => u.arbitrary()?,
            _ => *u.choose(&command::ALL)?,
        };
        let (mut body, mut fds) = self.body(command, u)?;
        let changes = u.arbitrary::<u8>()?.saturating_sub(175) / 16;
        for _ in 0..changes {
            change(&mut body, u)?;
        }
        // Other file descriptors than there should be.
        if u.ratio(1, 8)? {
            fds.clear();
            for _ in 0..u.int_in_range(0..=MOST_FDS)? {
                fds.push(self.descriptor(u)?);
            }
        }
        let flags = match u.arbitrary::<u8>()? {
            0..=3 => u.arbitrary()?,
            4..=40 => 1 << 4,
            _ => 0,
        };
        let length = match u.arbitrary::<u8>()? {
            0..=3 => u.arbitrary::<u32>()? & 0xffff,
            _ => body.len() as u32,
        };
        let bytes = message(command, flags, length, &body);
        let cut = if u.ratio(1, 32)? {
            u.choose_index(bytes.len())?
        } else {
            bytes.len()
        };
        let fds: Vec<BorrowedFd> = fds.iter().map(AsFd::as_fd).collect();
        self.send(&bytes[..cut], &fds);
        Ok(())
    }

    /// A file descriptor of any kind.
    fn descriptor(&self, u: &mut Unstructured) -> Result<OwnedFd> {
        Ok(match u.int_in_range(0..=8u8)? {
            0..=2 => self.memory.try_clone().expect("a file"),
            3 => memory(u.int_in_range(0..=3 * PAGE)?),
            4 | 5 => self.call.try_clone().expect("a file"),
            6 => rustix::pipe::pipe().expect("a pipe").1,
            7 => File::open("/dev/null").expect("a file").into(),
            _ => UnixStream::pair().expect("sockets").0.into(),
        })
    }

    /// The body and the file descriptors that a request should have.
    fn body(&self, command: u16, u: &mut Unstructured) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut fds = Vec::new();
        let page = |u: &mut Unstructured| Ok(PAGE as u64 * u.int_in_range(0..=PAGES as u64)?);
        let body = match command {
            command::VERSION => b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":8}}\0".to_vec(),
            command::DMA_MAP => {
                if u.ratio(7, 8)? {
                    fds.push(self.descriptor(u)?);
                }
                let (flags, offset, at, size) =
                    (u.int_in_range(0..=4)?, page(u)?, page(u)?, page(u)?);
                let place = long_words(&[offset, GUEST_ADDRESS + at, size]);
                [words(&[32, flags]), place].concat()
            }
            command::DMA_UNMAP => {
                let (flags, at, size) = (u.int_in_range(0..=5)?, page(u)?, page(u)?);
                [words(&[24, flags]), long_words(&[GUEST_ADDRESS + at, size])].concat()
            }
            command::GET_REGION_INFO => words(&[32, 0, u.int_in_range(0..=10)?]),
            command::GET_IRQ_INFO => words(&[16, 0, u.int_in_range(0..=6)?]),
            command::SET_IRQS => {
                let (start, count) = (u.int_in_range(0..=10)?, u.int_in_range(0..=9)?);
                let data = *u.choose(&[1, 2, 4, 4, 4])?;
                let action = *u.choose(&[8, 16, 32, 32, 32])?;
                let mut body = words(&[20, data | action, MSIX, start, count]);
                if data == 4 && u.ratio(3, 4)? {
                    for _ in 0..count {
                        fds.push(self.call.try_clone().expect("a file"));
                    }
                }
                if data == 2 {
                    body.extend(vec![1; count as usize]);
                }
                body
            }
            command::READ => {
                let region = u.int_in_range(0..=9)?;
                let (offset, count) = (u.int_in_range(0..=300)?, u.int_in_range(0..=5000)?);
                [long_words(&[offset]), words(&[region, count])].concat()
            }
            command::WRITE => {
                let region = u.int_in_range(0..=9)?;
                let length = u.int_in_range(0..=16)?;
                let data = u.bytes(usize::min(length, u.len()))?.to_vec();
                access(u.int_in_range(0..=300)?, region, &data)
            }
            _ => Vec::new(),
        };
        Ok((body, fds))
    }

    fn set(&mut self, offset: u64, data: &[u8]) {
        self.request(command::WRITE, &access(offset, BAR, data), &[]);
    }

    /// Sends a request as it should be, and takes the answer.
    fn request(&mut self, command: u16, body: &[u8], fds: &[BorrowedFd]) {
        self.send(&message(command, 0, body.len() as u32, body), fds);
    }

    /// Sends bytes, and takes what comes back, if anything does soon. The connection may end.
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd]) {
        if self.ended || bytes.is_empty() {
            return;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags);
        match sent {
            Ok(_) => match self.stream.read(&mut [0; 8192]) {
                Ok(0) => self.ended = true,
                Ok(_) => {}
                Err(error) => {
                    self.ended = error.kind() == std::io::ErrorKind::ConnectionReset;
                }
            },
            Err(_) => self.ended = true,
        }
    }
}
