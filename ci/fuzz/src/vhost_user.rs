// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `vhost_user`: a front end sends arbitrary messages with file descriptors of all kinds to
//! the socket of one VM. Some inputs bring the device up first, and kick virtqueues with arbitrary
//! contents. The connection of another VM stays, and when the front end is gone, so is its VM.
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fs::{memfd_create, MemfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost_device_rdma::adapter::{Adapter, AdapterSettings};
use vhost_device_rdma::front_end::Server;
use vhost_device_rdma::rnic::RnicSettings;
use vhost_device_rdma::sandbox::Sandbox;
use vhost_device_rdma::socket::{self, Access, BoundSocket};
use vhost_device_rdma::vhost_user;
use vhost_device_rdma_bare::mapping::{Mapping, View};
use vhost_device_rdma_bare::{Vm, VmOptions};

use crate::commands::change;
use crate::host::{FEATURES, LIMITS, PAGE};

/// Messages of an input.
const MOST_STEPS: usize = 60;
/// Pages of the memory that the front end shares.
const PAGES: usize = 64;
/// Where the guest has it, and where the front end says that it has it.
const GUEST_ADDRESS: u64 = 1 << 30;
const USER_ADDRESS: u64 = 1 << 40;
/// Pages that a virtqueue takes: descriptors, available and used ring.
const RING_PAGES: usize = 3;
/// Virtqueues that are brought up.
const QUEUES: u32 = 7;
const RING_SIZE: u32 = 16;
/// The most file descriptors of a message: one more than there may be.
const MOST_FDS: usize = 9;
/// What a session may take to end.
const PATIENCE: Duration = Duration::from_secs(15);

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;

/// Requests of vhost-user.
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    /// Those that a structured message is made for.
    pub const ALL: [u32; 20] = [
        GET_FEATURES,
        SET_FEATURES,
        SET_OWNER,
        SET_MEM_TABLE,
        SET_VRING_NUM,
        SET_VRING_ADDR,
        SET_VRING_BASE,
        GET_VRING_BASE,
        SET_VRING_KICK,
        SET_VRING_CALL,
        SET_VRING_ERR,
        SET_PROTOCOL_FEATURES,
        GET_QUEUE_NUM,
        SET_VRING_ENABLE,
        GET_CONFIG,
        SET_CONFIG,
        RESET_DEVICE,
        GET_MAX_MEM_SLOTS,
        ADD_MEM_REG,
        REM_MEM_REG,
    ];
}

/// MQ, REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;
/// VERSION_1, RING_EVENT_IDX, and that there are protocol features.
const VIRTIO_FEATURES: u64 = 1 << 32 | 1 << 29 | 1 << 30;

/// What serves a socket.
type Serve = fn(
    BoundSocket,
    Arc<Adapter>,
    RnicSettings,
    &Sandbox,
) -> std::result::Result<Server, socket::Error>;

/// The device with its sockets.
pub(crate) struct Device {
    adapter: Arc<Adapter>,
    servers: Vec<Server>,
    pub(crate) sockets: [PathBuf; 2],
    directory: PathBuf,
}

impl Device {
    /// One whose first socket is served by `serve`; the neighbour's is one of vhost-user.
    pub(crate) fn new(serve: Serve) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("fuzz-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let made = Adapter::without_threads(&AdapterSettings::default());
        let (adapter, _) = made.expect("an adapter");
        let mut servers = Vec::new();
        let sockets = [(1, serve), (2, vhost_user::serve)].map(|(number, serve)| {
            let path = directory.join(format!("vm{number}"));
            let settings = RnicSettings {
                name: path.display().to_string(),
                mac: [0x52, 0x54, 0, 0, 0, number],
                limits: LIMITS,
                ..RnicSettings::default()
            };
            let socket = BoundSocket::bind(&path, &Access::default()).expect("a socket");
            let sandbox = Sandbox::default();
            let server = serve(socket, adapter.clone(), settings, &sandbox);
            servers.push(server.expect("a server"));
            path
        });
        Self {
            adapter,
            servers,
            sockets,
            directory,
        }
    }

    /// VMs that are attached.
    fn vms(&self) -> usize {
        let status = self.adapter.status();
        status["devices"].as_array().map_or(0, Vec::len)
    }

    /// The VM on its second socket.
    pub(crate) fn neighbour(&self) -> Arc<Vm> {
        let options = VmOptions {
            memory: 1 << 20,
            event_size: 4,
            ..VmOptions::default()
        };
        Vm::connect(&self.sockets[1], options).expect("a neighbour")
    }

    /// Waits until the first VM has gone, and the neighbour alone is left, which is served all the
    /// time.
    pub(crate) fn wait_end(&self, neighbour: &Vm) {
        neighbour.query_port().expect("the neighbour is served");
        let end = Instant::now() + PATIENCE;
        // It may not have been attached yet: then there is nothing to wait for but the end of
        // servers.
        while self.vms() > 1 {
            assert!(Instant::now() < end, "the VM has not gone");
            std::thread::yield_now();
        }
        neighbour.query_port().expect("the neighbour is served");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.servers.drain(..).map(Server::end).for_each(drop);
        self.adapter.shutdown();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The front end, with what it shares.
struct FrontEnd {
    stream: UnixStream,
    memory: OwnedFd,
    view: View,
    kick: OwnedFd,
    ended: bool,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let device = Device::new(vhost_user::serve);
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
        kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"),
        ended: false,
    };
    let mut u = Unstructured::new(data);
    for _ in 0..MOST_STEPS {
        if u.is_empty() || front.ended || front.step(&mut u).is_err() {
            break;
        }
    }
    drop(front);
    device.wait_end(&neighbour);
    drop(neighbour);
}

pub(crate) fn memory(size: usize) -> OwnedFd {
    let file = memfd_create("front-end", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&file, size as u64).expect("memory");
    file
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn long_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl FrontEnd {
    fn step(&mut self, u: &mut Unstructured) -> Result<()> {
        match u.arbitrary::<u8>()? {
            0..=19 => self.bring_up(u.int_in_range(1..=QUEUES)?),
            20..=49 => self.scribble(u)?,
            50..=69 => {
                let _ = rustix::io::write(&self.kick, &1u64.to_le_bytes());
            }
            70..=79 => {
                let length = u.int_in_range(0..=80)?;
                let bytes = u.bytes(usize::min(length, u.len()))?.to_vec();
                self.send(&bytes, &[]);
            }
            80..=89 => {
                let body = self.command(u)?;
                self.view.write(30 * PAGE, &body);
            }
            _ => self.message(u)?,
        }
        Ok(())
    }

    /// What a front end does that brings up a device, as far as it comes.
    fn bring_up(&mut self, queues: u32) {
        let features = VIRTIO_FEATURES | FEATURES;
        self.request(request::SET_OWNER, &[], &[]);
        self.request(
            request::SET_PROTOCOL_FEATURES,
            &PROTOCOL_FEATURES.to_le_bytes(),
            &[],
        );
        self.request(request::SET_FEATURES, &features.to_le_bytes(), &[]);
        let memory = self.memory.try_clone().expect("a file");
        let region = long_words(&[0, GUEST_ADDRESS, (PAGES * PAGE) as u64, USER_ADDRESS, 0]);
        self.request(request::ADD_MEM_REG, &region, &[memory.as_fd()]);
        let kick = self.kick.try_clone().expect("a file");
        for queue in 0..queues {
            self.request(request::SET_VRING_NUM, &words(&[queue, RING_SIZE]), &[]);
            self.request(request::SET_VRING_BASE, &words(&[queue, 0]), &[]);
            self.request(request::SET_VRING_ADDR, &ring(queue), &[]);
            let number = u64::from(queue).to_le_bytes();
            self.request(request::SET_VRING_CALL, &number, &[kick.as_fd()]);
            self.request(request::SET_VRING_KICK, &number, &[kick.as_fd()]);
            self.request(request::SET_VRING_ENABLE, &words(&[queue, 1]), &[]);
        }
        // A command in the control queue: one readable buffer, one writable.
        let [readable, writable] = [30, 31].map(|page| GUEST_ADDRESS + page * PAGE as u64);
        let descriptors = [
            long_words(&[readable, 64 | 1 << 32 | 1 << 48]),
            long_words(&[writable, 256 | 2 << 32]),
        ];
        self.view.write(0, &descriptors.concat());
        self.view.write(PAGE, &[0, 0, 1, 0, 0, 0]);
    }

    /// A command that needs no objects.
    fn command(&self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let opcodes = virtio_rdma_spec::command::opcode::ALL;
        let (_, opcode) = opcodes[u.choose_index(opcodes.len())?];
        let length = u.int_in_range(8..=64)?;
        Ok([words(&[opcode as u32, length]), vec![0; 56]].concat())
    }

    /// Writes to the shared memory, mostly to its rings.
    fn scribble(&mut self, u: &mut Unstructured) -> Result<()> {
        let pages = if u.arbitrary()? { 6 } else { PAGES };
        let page = u.choose_index(pages)?;
        let word = if u.ratio(3, 4)? {
            u.choose_index(16)?
        } else {
            u.choose_index(PAGE / 8)?
        };
        let value = match u.arbitrary::<u8>()? {
            0..=63 => GUEST_ADDRESS + u.int_in_range(0..=PAGES * PAGE)? as u64,
            64..=127 => u.int_in_range(0..=64)? as u64,
            _ => u.arbitrary()?,
        };
        let word = self.view.u64(page * PAGE + 8 * word);
        word.store(value, Ordering::SeqCst);
        Ok(())
    }

    fn message(&mut self, u: &mut Unstructured) -> Result<()> {
        let request = match u.arbitrary::<u8>()? {
            0..=9 => u.int_in_range(0..=60)?,
            10 => u.arbitrary()?,
            _ => *u.choose(&request::ALL)?,
        };
        let (mut body, mut fds) = self.body(request, u)?;
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
            0..=9 => u.arbitrary()?,
            10..=99 => VERSION,
            _ => VERSION | NEED_REPLY,
        };
        let length = match u.arbitrary::<u8>()? {
            0..=3 => u.arbitrary()?,
            _ => body.len() as u32,
        };
        let bytes = [words(&[request, flags, length]), body].concat();
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
        Ok(match u.int_in_range(0..=9u8)? {
            0..=2 => self.memory.try_clone().expect("a file"),
            3 => memory(u.int_in_range(0..=3 * PAGE)?),
            4 => memory(PAGE * u.int_in_range(0..=2usize)?),
            5 => self.kick.try_clone().expect("a file"),
            6 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            7 => rustix::pipe::pipe().expect("a pipe").1,
            8 => File::open("/dev/null").expect("a file").into(),
            _ => UnixStream::pair().expect("sockets").0.into(),
        })
    }

    /// The body and the file descriptors that a request should have.
    fn body(&self, request: u32, u: &mut Unstructured) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let queue = u.int_in_range(0..=QUEUES)?;
        let mut fds = Vec::new();
        let body = match request {
            request::SET_FEATURES => long_words(&[match u.arbitrary::<u8>()? {
                0..=63 => u.arbitrary()?,
                _ => VIRTIO_FEATURES | FEATURES,
            }]),
            request::SET_PROTOCOL_FEATURES => long_words(&[match u.arbitrary::<u8>()? {
                0..=63 => u.arbitrary()?,
                _ => PROTOCOL_FEATURES,
            }]),
            request::SET_MEM_TABLE => {
                let regions = u.int_in_range(0..=8)?;
                let mut body = words(&[regions, 0]);
                for number in 0..regions {
                    body.extend(self.region(number.into(), u)?);
                    fds.push(self.descriptor(u)?);
                }
                body
            }
            request::ADD_MEM_REG | request::REM_MEM_REG => {
                let number = u.int_in_range(0..=3)?;
                let mut body = long_words(&[0]);
                body.extend(self.region(number, u)?);
                if request == request::ADD_MEM_REG {
                    fds.push(self.descriptor(u)?);
                }
                body
            }
            request::SET_VRING_NUM => words(&[queue, 1 << u.int_in_range(0..=16)?]),
            request::SET_VRING_BASE => words(&[queue, u.int_in_range(0..=0x1_0000)?]),
            request::GET_VRING_BASE => words(&[queue, 0]),
            request::SET_VRING_ENABLE => words(&[queue, u.int_in_range(0..=2)?]),
            request::SET_VRING_ADDR => ring(queue),
            request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
                let none = u.ratio(1, 4)?;
                if !none {
                    fds.push(self.descriptor(u)?);
                }
                long_words(&[u64::from(queue) | u64::from(none) << 8])
            }
            request::GET_CONFIG | request::SET_CONFIG => {
                let size = u.int_in_range(0..=70)?;
                let mut body = words(&[u.int_in_range(0..=64)?, size, 0]);
                body.extend(vec![0; size as usize]);
                body
            }
            _ => Vec::new(),
        };
        Ok((body, fds))
    }

    /// A region of memory: the whole of what is shared, or a part of it.
    fn region(&self, number: u64, u: &mut Unstructured) -> Result<Vec<u8>> {
        let size = match u.arbitrary::<u8>()? {
            0..=15 => u.arbitrary()?,
            byte => (PAGE * (1 + usize::from(byte) % PAGES)) as u64,
        };
        let offset = if u.ratio(1, 8)? { u.arbitrary()? } else { 0 };
        Ok(long_words(&[
            GUEST_ADDRESS + (number << 20),
            size,
            USER_ADDRESS + (number << 20),
            offset,
        ]))
    }

    /// Sends a request as it should be, and takes the answer.
    fn request(&mut self, request: u32, body: &[u8], fds: &[BorrowedFd]) {
        let head = words(&[request, VERSION | NEED_REPLY, body.len() as u32]);
        self.send(&[&head, body].concat(), fds);
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
        let sent = sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        );
        match sent {
            Ok(_) => match self.stream.read(&mut [0; 4096]) {
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

/// Where the rings of a virtqueue are.
fn ring(queue: u32) -> Vec<u8> {
    let page = |number: usize| {
        let page = queue as usize % 8 * RING_PAGES + number;
        USER_ADDRESS + (page * PAGE) as u64
    };
    [
        words(&[queue, 0]),
        long_words(&[page(0), page(2), page(1), 0]),
    ]
    .concat()
}
