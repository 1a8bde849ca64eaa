// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends of vfio-user: VMs, one of which has its driver played here, and front ends that keep
//! to no rules.
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestRunner};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vfio_user::Client;
use vhost_device_rdma_bare::pci::{PciDevice, Rings, CONFIG_REGION, MSIX, SET_EVENTFDS};
use vhost_device_rdma_bare::spec::command::ResponseHeader;
use vhost_device_rdma_bare::spec::command::{opcode, status, CommandHeader, QueryDeviceResponse};
use vhost_device_rdma_bare::spec::config::{feature, Config};
use vhost_device_rdma_bare::{DeviceProcess, Error, FrontEnd, ProcessOptions, Vm, VmOptions};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use crate::common::{assert_works, process_with, vm, Pair, NOTHING, TIMEOUT};

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x77];
/// Where the guest's memory is, and its size.
const MEMORY: u64 = 1 << 30;
const SIZE: u64 = 1 << 20;
const VERSION_1: u64 = 1 << 32;
/// The region of virtio, and registers there.
const BAR: u32 = 2;
const STATUS: u64 = 20;
const QUEUE_NOTIFY_OFF: u64 = 30;

/// A process with one socket of vhost-user and one of vfio-user.
struct Served {
    process: DeviceProcess,
    path: PathBuf,
}

impl Served {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("vfio-user-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let device = format!("{},mac=52:54:00:00:00:77", path.display());
        let process = process_with(1, &["--vfio-user-path", &device]);
        Self { process, path }
    }

    /// The other VM is served, and the process lives.
    fn assert_unharmed(&mut self) {
        assert!(self.process.is_alive());
        let vm = vm(self.process.socket(0));
        Pair::new(&vm, &vm);
    }

    /// How many VMs are attached.
    fn attached(&self) -> usize {
        let status = self.process.status().unwrap();
        status["devices"].as_array().unwrap().len()
    }

    fn wait_attached(&self, count: usize) {
        let deadline = Instant::now() + TIMEOUT;
        while self.attached() != count {
            assert!(Instant::now() < deadline, "{} attached", self.attached());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A VM: its memory, and its PCI device.
struct Guest {
    device: PciDevice,
    memory: File,
    vectors: Vec<EventFd>,
    queues: u16,
    next: u16,
}

fn memfd(size: u64) -> File {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file.into()
}

impl Guest {
    /// Connects, and looks for what a driver needs.
    fn probe(path: &Path) -> Self {
        let mut device = PciDevice::connect(path).unwrap();
        let mut id = [0; 4];
        device
            .client()
            .region_read(CONFIG_REGION, 0, &mut id)
            .unwrap();
        assert_eq!(id, [0xf4, 0x1a, 0x6a, 0x10]);
        let irqs = device.client().get_irq_info(MSIX).unwrap();
        assert_eq!((irqs.count, irqs.flags), (device.vectors(), 1));
        let vectors = (0..irqs.count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap());
        Self {
            memory: memfd(SIZE),
            vectors: vectors.collect(),
            queues: device.queues().unwrap(),
            device,
            next: 0,
        }
    }

    fn client(&mut self) -> &mut Client {
        self.device.client()
    }

    /// Maps the memory, and gives eventfds for interrupts, as a VMM does.
    fn connect(&mut self) {
        self.device.map(MEMORY, SIZE, &self.memory).unwrap();
        let fds: Vec<_> = self.vectors.iter().map(AsRawFd::as_raw_fd).collect();
        self.device.set_vectors(0, &fds).unwrap();
    }

    /// Agrees on features, sets up all queues, and says that it runs.
    fn start(&mut self) {
        let features = VERSION_1 | 1 << feature::RC;
        self.device.accept(features).unwrap();
        self.memory.write_all_at(&[0; 1 << 18], 0).unwrap();
        for index in 0..self.queues {
            let [descriptors, available, used] = rings(index);
            let rings = Rings {
                size: self.device.max_size(index).unwrap().min(16),
                descriptors,
                available,
                used,
            };
            // It is still selected: an address of its own to notify it.
            let offset = self.device.get(QUEUE_NOTIFY_OFF, 2).unwrap();
            assert_eq!(offset, u64::from(index));
            self.device.enable(index, &rings).unwrap();
        }
        self.device.run().unwrap();
        self.next = 0;
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, address - MEMORY).unwrap();
    }

    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let at = address - MEMORY;
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    /// Puts QUERY_DEVICE into the control queue, and notifies it.
    fn ask(&mut self) {
        let [descriptors, available, _] = rings(0);
        let (command, response) = (MEMORY + 0x8_0000, MEMORY + 0x8_1000);
        let header = CommandHeader {
            opcode: opcode::QUERY_DEVICE,
            reserved: 0,
            length: CommandHeader::SIZE as u32,
        };
        self.write(command, &header.to_bytes());
        self.write(response, &[0; 256]);
        for (at, address, length, flags, next) in [
            (0, command, CommandHeader::SIZE as u32, 1u16, 1u16),
            (16, response, 256, 2, 0),
        ] {
            self.write(descriptors + at, &address.to_le_bytes());
            self.write(descriptors + at + 8, &length.to_le_bytes());
            self.write(descriptors + at + 12, &flags.to_le_bytes());
            self.write(descriptors + at + 14, &next.to_le_bytes());
        }
        self.write(available + 4 + 2 * u64::from(self.next % 16), &[0, 0]);
        self.next += 1;
        self.write(available + 2, &self.next.to_le_bytes());
        self.device.notify(0).unwrap();
    }

    /// Waits for the interrupt of the control queue, and returns the response.
    fn answer(&mut self) -> Option<QueryDeviceResponse> {
        let deadline = Instant::now() + TIMEOUT;
        while self.vectors[1].read().is_err() {
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let [_, _, used] = rings(0);
        assert_eq!(u16::from_le_bytes(self.read(used + 2)), self.next);
        let response = MEMORY + 0x8_1000;
        let header = ResponseHeader::from_bytes(&self.read(response));
        assert_eq!(header.status, status::OK);
        let body = response + ResponseHeader::SIZE as u64;
        Some(QueryDeviceResponse::from_bytes(&self.read(body)))
    }

    fn assert_served(&mut self) {
        self.ask();
        let response = self.answer().expect("an interrupt");
        assert!(response.max_qp > 0);
    }
}

/// Where the three parts of a virtqueue are.
fn rings(index: u16) -> [u64; 3] {
    let at = MEMORY + 0x3000 * u64::from(index);
    [at, at + 0x1000, at + 0x2000]
}

#[test]
fn a_driver_finds_the_device_and_commands_it() {
    let served = Served::new();
    let mut guest = Guest::probe(&served.path);
    let mut config = [0; Config::SIZE];
    guest.device.config(&mut config).unwrap();
    let config = Config::from_bytes(&config);
    assert_eq!(config.mac, MAC);
    let queues = 2 + config.num_completion_queues + config.num_doorbell_queues;
    assert_eq!(guest.queues, queues);
    assert_eq!(guest.vectors.len(), usize::from(queues) + 1);
    // An address for each queue, alone on its page.
    let (notify, step) = guest.device.notify_place();
    assert_eq!(step, 4096);
    assert_eq!(notify.length, 4096 * u64::from(queues));
    guest.connect();
    guest.start();
    for _ in 0..40 {
        guest.assert_served();
    }
    // The same registers by way of the configuration space.
    let mut space = [0; 256];
    let client = guest.device.client();
    client.region_read(CONFIG_REGION, 0, &mut space).unwrap();
    let window = (0x40..0xf0).find(|at| space[*at] == 9 && space[at + 3] == 5);
    let window = window.expect("a window") as u64;
    let common = (0x40..0xf0)
        .find(|at| space[*at] == 9 && space[at + 3] == 1)
        .unwrap();
    let common = u32::from_le_bytes(space[common + 8..common + 12].try_into().unwrap());
    client
        .region_write(CONFIG_REGION, window + 4, &[2])
        .unwrap();
    let [offset, length] = [common + 18, 2].map(u32::to_le_bytes);
    client
        .region_write(CONFIG_REGION, window + 8, &offset)
        .unwrap();
    client
        .region_write(CONFIG_REGION, window + 12, &length)
        .unwrap();
    let mut number = [0; 2];
    client
        .region_read(CONFIG_REGION, window + 16, &mut number)
        .unwrap();
    assert_eq!(u16::from_le_bytes(number), queues);
}

/// A VM that has the device by vfio-user.
fn by_vfio_user(path: &Path) -> Arc<Vm> {
    let options = VmOptions {
        front_end: FrontEnd::VfioUser,
        ..VmOptions::default()
    };
    Vm::connect(path, options).unwrap()
}

#[test]
fn verbs_are_the_same_by_both_front_ends() {
    let options = ProcessOptions::vms(3).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
    let process = DeviceProcess::start(&options.vfio_user(2)).unwrap();
    let [a, b] = [0, 1].map(|number| by_vfio_user(process.socket(number)));
    let c = vm(process.socket(2));
    for (from, to) in [(&a, &b), (&a, &c), (&c, &a)] {
        let pair = Pair::new(from, to);
        assert_works(&pair);
        // The device sleeps, and has to be notified.
        std::thread::sleep(NOTHING);
        assert_works(&pair);
    }
    // What driver and front end can do to it, but for stopping it.
    let region = a.add_memory(1 << 20).unwrap();
    a.remove_memory(region).unwrap();
    a.replug_memory(region).unwrap();
    assert!(matches!(a.stop(), Err(Error::VhostUserOnly)));
    a.reset().unwrap();
    assert_works(&Pair::new(&a, &c));
    assert_eq!(a.read_config().unwrap().to_bytes(), a.config().to_bytes());
    a.kill();
    assert!(a.query_port().is_err());
    assert_works(&Pair::new(&b, &c));
}

#[test]
fn a_reset_begins_anew() {
    let mut served = Served::new();
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    // By the driver, and by the front end, as when a VM is reset.
    guest.start();
    guest.assert_served();
    guest.client().reset().unwrap();
    assert_eq!(guest.device.get(STATUS, 1).unwrap(), 0);
    guest.ask();
    std::thread::sleep(NOTHING);
    assert!(guest.vectors[1].read().is_err());
    guest.start();
    guest.assert_served();
    // And by another VM on the same socket.
    drop(guest);
    served.wait_attached(0);
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    served.assert_unharmed();
}

#[test]
fn the_msix_table_is_the_drivers() {
    const TABLE: u32 = 0;
    const PENDING: u64 = 0x1000;
    let served = Served::new();
    let mut guest = Guest::probe(&served.path);
    let last = 16 * (guest.vectors.len() as u64 - 1);
    let client = guest.device.client();
    let read = |client: &mut Client, at| {
        let mut entry = [0xff; 16];
        client.region_read(TABLE, at, &mut entry).unwrap();
        entry
    };
    let mut masked = [0; 16];
    masked[12] = 1;
    let entry: [u8; 16] = std::array::from_fn(|at| at as u8);
    for at in [0, last] {
        assert_eq!(read(client, at), masked);
        client.region_write(TABLE, at, &entry).unwrap();
        assert_eq!(read(client, at), entry);
    }
    // Behind the table there is nothing, and nothing is pending.
    for at in [last + 16, PENDING] {
        client.region_write(TABLE, at, &entry).unwrap();
        assert_eq!(read(client, at), [0; 16]);
    }
    client.reset().unwrap();
    assert_eq!(read(client, last), masked);
}

#[test]
fn memory_goes_and_comes_back() {
    let mut served = Served::new();
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    guest.device.unmap(MEMORY, SIZE).unwrap();
    guest.ask();
    std::thread::sleep(NOTHING);
    assert!(guest.vectors[1].read().is_err());
    guest.device.map(MEMORY, SIZE, &guest.memory).unwrap();
    assert!(guest.answer().is_some());
    guest.assert_served();
    served.assert_unharmed();
}

#[test]
fn interrupts_come_where_the_front_end_says() {
    let served = Served::new();
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    // None at all, then another one.
    let client = guest.client();
    client.set_irqs(MSIX, SET_EVENTFDS, 1, 1, &[]).unwrap();
    guest.ask();
    std::thread::sleep(NOTHING);
    assert!(guest.vectors[1].read().is_err());
    let other = EventFd::new(EFD_NONBLOCK).unwrap();
    let fd = other.as_raw_fd();
    guest.device.set_vectors(1, &[fd]).unwrap();
    guest.vectors[1] = other;
    guest.assert_served();
    // The front end may raise one itself.
    let (raise, off) = (1 | 32, 0);
    guest.client().set_irqs(MSIX, raise, 1, 1, &[]).unwrap();
    assert_eq!(guest.vectors[1].read().unwrap(), 1);
    guest.client().set_irqs(MSIX, raise, 0, off, &[]).unwrap();
    guest.ask();
    std::thread::sleep(NOTHING);
    assert!(guest.vectors[1].read().is_err());
}

/// A front end that sends what it likes.
struct Raw(UnixStream);

impl Raw {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self(stream)
    }

    /// The same, with its version told.
    fn greeted(path: &Path) -> Self {
        let mut raw = Self::connect(path);
        let (error, body) = raw.ask(1, b"\0\0\x01\0{}\0", &[]).unwrap();
        assert_eq!((error, &body[..4]), (0, &[0, 0, 1, 0][..]));
        raw
    }

    fn send(&mut self, bytes: &[u8], files: &[&File]) {
        let fds: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(17))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        // It may have been disconnected.
        let flags = SendFlags::NOSIGNAL;
        let _ = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags);
    }

    /// Sends a request; returns the error number and the body of its answer, if one comes before
    /// the connection ends.
    fn ask(&mut self, command: u16, body: &[u8], files: &[&File]) -> Option<(u32, Vec<u8>)> {
        self.send(&message(command, 0, body), files);
        self.receive()
    }

    fn receive(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut header = [0; 16];
        match self.0.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => return None,
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut body = vec![0; word(4) as usize - 16];
        self.0.read_exact(&mut body).ok()?;
        assert_eq!(word(8) & 0x20 != 0, word(12) != 0);
        Some((word(12), body))
    }
}

fn message(command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [7u16, command].map(u16::to_le_bytes).concat();
    let words = [body.len() as u32 + 16, flags, 0].map(u32::to_le_bytes);
    bytes.extend(words.concat());
    bytes.extend(body);
    bytes
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn dma_map(flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    let rest = [offset, address, size].map(u64::to_le_bytes).concat();
    [words(&[32, flags]), rest].concat()
}

fn access(offset: u64, region: u32, count: u32, data: &[u8]) -> Vec<u8> {
    [&offset.to_le_bytes(), &*words(&[region, count]), data].concat()
}

const EINVAL: u32 = libc::EINVAL as u32;
const ENOTSUP: u32 = libc::ENOTSUP as u32;

#[test]
fn what_cannot_be_done_is_refused() {
    let mut served = Served::new();
    let mut raw = Raw::greeted(&served.path);
    let null = File::open("/dev/null").unwrap();
    let memory = memfd(SIZE);
    let disk = File::open(std::env::current_exe().unwrap()).unwrap();
    let eventfd = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let set_irqs = |flags, index, start, count| words(&[20, flags, index, start, count]);
    let (read, write) = (9, 10);
    let refused: [(u16, Vec<u8>, Vec<&File>, u32); 24] = [
        // Commands that there are not, and those of devices.
        (6, words(&[16, 0, 2, 0]), vec![], ENOTSUP),
        (11, vec![0; 16], vec![], ENOTSUP),
        (99, vec![], vec![], ENOTSUP),
        // Regions and interrupts that there are not.
        (5, words(&[32, 0, 9, 0]), vec![], EINVAL),
        (7, words(&[16, 0, 3, 0]), vec![], EINVAL),
        (read, access(0, 9, 4, &[]), vec![], EINVAL),
        (read, access(0, 1, 4, &[]), vec![], EINVAL),
        (read, access(254, CONFIG_REGION, 4, &[]), vec![], EINVAL),
        (read, access(u64::MAX, BAR, 4, &[]), vec![], EINVAL),
        (read, access(0, BAR, u32::MAX, &[]), vec![], EINVAL),
        (write, access(1 << 32, BAR, 1, &[0]), vec![], EINVAL),
        (8, set_irqs(SET_EVENTFDS, 0, 0, 1), vec![&eventfd], EINVAL),
        (8, set_irqs(SET_EVENTFDS, MSIX, 0, u32::MAX), vec![], EINVAL),
        (
            8,
            set_irqs(SET_EVENTFDS, MSIX, u32::MAX, 1),
            vec![&eventfd],
            EINVAL,
        ),
        (
            8,
            set_irqs(SET_EVENTFDS, MSIX, 0, 2),
            vec![&eventfd],
            EINVAL,
        ),
        (8, set_irqs(SET_EVENTFDS, MSIX, 0, 1), vec![&null], EINVAL),
        (8, set_irqs(2 | 32, MSIX, 0, 1), vec![], EINVAL),
        (8, set_irqs(1 | 8, MSIX, 0, 1), vec![], EINVAL),
        // What is no memory.
        (2, dma_map(3, 0, 0, SIZE), vec![&null], EINVAL),
        (2, dma_map(3, 0, 0, 4096), vec![&disk], EINVAL),
        (2, dma_map(3, 0, 0, 2 * SIZE), vec![&memory], EINVAL),
        (2, dma_map(3, 0, 100, 4096), vec![&memory], EINVAL),
        (
            2,
            dma_map(3, 0, u64::MAX - 4095, 8192),
            vec![&memory],
            EINVAL,
        ),
        (2, dma_map(99, 0, 0, 4096), vec![&memory], EINVAL),
    ];
    for (number, (command, body, files, error)) in refused.iter().enumerate() {
        let answer = raw.ask(*command, body, files);
        assert_eq!(answer, Some((*error, vec![])), "{number}");
    }
    // And it goes on.
    let mapped = raw.ask(2, &dma_map(3, 0, 0, SIZE), &[&memory]);
    assert_eq!(mapped, Some((0, vec![])));
    let part = [words(&[24, 0]), [0, 4096u64].map(u64::to_le_bytes).concat()].concat();
    assert_eq!(raw.ask(3, &part, &[]), Some((EINVAL, vec![])));
    let (error, info) = raw.ask(4, &words(&[16, 0, 0, 0]), &[]).unwrap();
    assert_eq!((error, info), (0, words(&[16, 3, 9, 3])));
    served.assert_unharmed();
}

#[test]
fn memory_that_is_not_shared_is_told_of() {
    let mut served = Served::new();
    let mut raw = Raw::greeted(&served.path);
    // That of a screen, which has no file, is nothing to tell of.
    for (address, lines) in [(0xfd00_0000, 0), (0, 1)] {
        let mapped = raw.ask(2, &dma_map(3, 0, address, SIZE), &[]);
        assert_eq!(mapped, Some((0, vec![])));
        let log = served.process.log();
        let said = format!("{SIZE:#x} bytes of the VM's memory came without a file");
        assert_eq!(log.matches(&said).count(), lines, "{log}");
    }
    served.assert_unharmed();
}

#[test]
fn an_answer_that_nobody_wants_does_not_come() {
    let served = Served::new();
    let mut raw = Raw::greeted(&served.path);
    let memory = memfd(SIZE);
    raw.send(&message(2, 0x10, &dma_map(3, 0, 0, SIZE)), &[&memory]);
    raw.send(&message(10, 0x10, &access(0x4000, BAR, 2, &[0; 2])), &[]);
    let (error, data) = raw.ask(9, &access(0, CONFIG_REGION, 2, &[]), &[]).unwrap();
    assert_eq!((error, &data[16..]), (0, &[0xf4, 0x1a][..]));
}

#[test]
fn a_notification_wakes_the_worker_without_another_thread() {
    let served = Served::new();
    let mut raw = Raw::greeted(&served.path);
    let worker = || served.process.status().unwrap()["workers"][0].clone();
    let kicks = || worker()["kicks"].as_u64().unwrap();
    let within = |time: Duration, done: &dyn Fn() -> bool| {
        let deadline = Instant::now() + time;
        while !done() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        done()
    };
    let notify = |queue: u64, length: usize| {
        let body = access(
            0x4000 + 0x1000 * queue,
            BAR,
            length as u32,
            &vec![0; length],
        );
        message(10, 0x10, &body)
    };
    let info = message(4, 0, &words(&[16, 0, 0, 0]));
    let config = message(9, 0, &access(0, CONFIG_REGION, 2, &[]));
    let last = {
        let mut queues = [0; 2];
        let body = access(18, BAR, 2, &[]);
        let (_, answer) = raw.ask(9, &body, &[]).unwrap();
        queues.copy_from_slice(&answer[16..]);
        u64::from(u16::from_le_bytes(queues)) - 1
    };
    // No queue is enabled: the other thread would wake nobody.
    for bytes in [
        notify(last, 2),
        notify(last, 4),
        notify(0, 2),
        notify(last, 2).repeat(20),
    ] {
        let mut wakes = || {
            within(TIMEOUT, &|| worker()["asleep"] == true);
            // It says so before it does, so once is not enough.
            std::thread::sleep(Duration::from_millis(20));
            let before = kicks();
            raw.send(&bytes, &[]);
            within(TIMEOUT / 10, &|| kicks() > before)
        };
        assert!((0..5).any(|_| wakes()), "{}", worker());
    }
    // Other messages are answered whoever is woken, in their order, and with their files.
    let memory = memfd(SIZE);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        let (first, rest) = info.split_at(5);
        raw.send(
            &[&*notify(last, 2), &*config, &*notify(last, 2), first].concat(),
            &[],
        );
        let (error, data) = raw.receive().unwrap();
        assert_eq!((error, &data[16..]), (0, &[0xf4, 0x1a][..]));
        raw.send(rest, &[]);
        assert_eq!(raw.receive(), Some((0, words(&[16, 3, 9, 3]))));
        raw.send(&notify(last, 2), &[]);
        let map = message(2, 0, &dma_map(3, 0, 0, SIZE));
        raw.send(&map, &[&memory]);
        assert_eq!(raw.receive(), Some((0, vec![])));
        let all = [words(&[24, 0]), [0, SIZE].map(u64::to_le_bytes).concat()].concat();
        assert_eq!(raw.ask(3, &all, &[]).unwrap().0, 0);
    }
}

#[test]
fn before_the_version_a_notification_ends_the_session() {
    let mut served = Served::new();
    let mut raw = Raw::connect(&served.path);
    served.wait_attached(1);
    raw.send(&message(10, 0x10, &access(0x4000, BAR, 2, &[0; 2])), &[]);
    assert_eq!(raw.receive(), None);
    served.assert_unharmed();
}

#[test]
fn messages_that_are_none_end_the_session() {
    let mut served = Served::new();
    let small = memfd(4096);
    let with_length = |length: u32| {
        let mut bytes = message(4, 0, &[]);
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    let greeting = |body: &[u8]| message(1, 0, body);
    // Before the version: another command, another version, what is not JSON.
    for bytes in [
        message(4, 0, &[0; 16]),
        greeting(b"\x01\0\0\0{}\0"),
        greeting(b"\0\0\0\0{}"),
        greeting(b"\0\0\0\0{\0"),
        greeting(b"\0\0"),
    ] {
        let mut raw = Raw::connect(&served.path);
        raw.send(&bytes, &[]);
        assert_eq!(raw.receive(), None, "{bytes:?}");
    }
    for bytes in [
        with_length(0),
        with_length(15),
        with_length(u32::MAX),
        message(4, 1, &[]),
        message(5, 0, &[0; 11]),
        message(10, 0, &access(0, BAR, 5, &[0; 4])),
        greeting(b"\0\0\0\0{}\0"),
    ] {
        let mut raw = Raw::greeted(&served.path);
        raw.send(&bytes, &[]);
        assert_eq!(raw.receive(), None, "{bytes:?}");
    }
    let mut raw = Raw::greeted(&served.path);
    raw.send(&message(4, 0, &[]), &[&small; 17]);
    assert_eq!(raw.receive(), None);
    // One that is cut short holds up nobody else.
    let mut raw = Raw::greeted(&served.path);
    raw.send(&message(10, 0, &access(0, BAR, 4, &[0; 4]))[..20], &[]);
    served.assert_unharmed();
    drop(raw);
    served.wait_attached(0);
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
}

#[test]
fn random_messages_end_their_connection_at_most() {
    let mut served = Served::new();
    let memory = memfd(SIZE);
    let small = prop_oneof![Just(0u8), 0u8..48, any::<u8>()];
    let one = (
        prop_oneof![2u16..14, Just(9), Just(10), any::<u16>()],
        prop_oneof![
            // Accesses to registers.
            4 => (0u64..0x6000, prop::collection::vec(small.clone(), 0..9)).prop_map(
                |(offset, data)| access(offset, BAR, data.len() as u32, &data)
            ),
            1 => prop::collection::vec(small, 0..80),
        ],
        any::<bool>(),
    );
    let mut runner = TestRunner::new(Runs {
        cases: 100,
        ..Runs::default()
    });
    let result = runner.run(&prop::collection::vec(one, 1..30), |messages| {
        let mut raw = Raw::greeted(&served.path);
        raw.0.set_nonblocking(true).unwrap();
        for (command, body, file) in messages {
            let files = [&memory];
            let files = if file { &files[..] } else { &[] };
            raw.send(&message(command, 0, &body), files);
            let _ = raw.0.read(&mut [0; 8192]);
        }
        Ok(())
    });
    result.unwrap();
    served.assert_unharmed();
    served.wait_attached(0);
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
}

#[test]
fn lost_memory_ends_the_session_alone() {
    let mut served = Served::new();
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    ftruncate(&guest.memory, 0).unwrap();
    let _ = guest.device.notify(0);
    served.wait_attached(0);
    let log = served.process.log();
    assert!(log.contains("memory of the VM is lost"), "{log}");
    served.assert_unharmed();
}

#[test]
fn the_process_ends_under_a_front_end() {
    let served = Served::new();
    let mut guest = Guest::probe(&served.path);
    guest.connect();
    guest.start();
    guest.assert_served();
    let mut device = guest.device;
    let Served { process, path } = &served;
    let _ = (process, path);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(served.process.id() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while device.queues().is_ok() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}
