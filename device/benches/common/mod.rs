// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs and the device in one process, with workers that run when they are told to: what the
//! device does for a message, by itself.
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use vhost_device_rdma::adapter::{Adapter, AdapterSettings};
use vhost_device_rdma::config::{Config, ServeArgs};
use vhost_device_rdma::engine::LONE_BUDGET;
use vhost_device_rdma::front_end::Server;
use vhost_device_rdma::rnic::RnicSettings;
use vhost_device_rdma::sandbox::Sandbox;
use vhost_device_rdma::socket::{Access, BoundSocket};
use vhost_device_rdma::vhost_user;
use vhost_device_rdma::worker::Loop;
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{Cqe, SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{access, qp_type, send_flag, wc_status, wr_opcode};
use vhost_device_rdma_bare::{
    Address, Connection, Context, Cq, Mr, Pd, Qp, QpOptions, Srq, SrqOptions, Uses, Vm, VmOptions,
};

/// Bytes of a message, and of a long one.
const SIZE: u32 = 64;
const LONG: u32 = 64 << 10;
/// Work requests of a list.
const LIST: u32 = 32;
/// Work requests of a list that is the whole budget of a queue pair that is alone.
const LONE_LIST: u32 = LONE_BUDGET.messages;
/// Entries of the queues of a queue pair.
const ENTRIES: u32 = 128;
/// Queue pairs where there are many.
const MANY: u32 = 1000;
/// Queue pairs that are polled in one poll iteration.
const SOME: u32 = 16;
/// Rounds that a step may take.
const ROUNDS: u32 = 100_000_000;
const QKEY: u32 = 0x1111;
/// A datagram's receive begins with room for a GRH.
const GRH: u32 = 40;

/// The device and its VMs.
pub struct Bed {
    a: Arc<Vm>,
    b: Arc<Vm>,
    /// The socket of a neighbour, which takes no part.
    neighbour: PathBuf,
    /// For [`Bed::round`]; none: the worker runs by itself.
    work: Vec<Loop>,
    /// One, or one for each VM.
    adapters: Vec<Arc<Adapter>>,
    servers: Vec<Server>,
    directory: PathBuf,
}

impl Bed {
    /// Two VMs on one network, and a worker that runs when it is told to.
    pub fn new() -> Self {
        let (adapter, loops) =
            Adapter::without_threads(&AdapterSettings::default()).expect("an adapter");
        Self::with(adapter, loops)
    }

    /// Two VMs whose adapters send each other packets over loopback, and their workers.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn wired() -> Self {
        let directory = directory();
        let ports = [free_address(), free_address()];
        let parts = [(1, ports[0], ports[1]), (2, ports[1], ports[0])].map(|(i, local, remote)| {
            let path = directory.join(format!("vm{i}"));
            let text = format!(
                "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:00:0{i}'\n\
                 dgram = {{ local = '{local}', remote = '{remote}', mtu = 9000 }}\n",
                path.display()
            );
            (path, configured(&directory, &text))
        });
        let (mut adapters, mut work, mut servers) = (Vec::new(), Vec::new(), Vec::new());
        let sockets = parts.map(|(path, (adapter, loops, serving))| {
            adapters.push(adapter);
            work.extend(loops);
            servers.extend(serving);
            path
        });
        Self {
            a: connect(&sockets[0], Some(address(1))),
            b: connect(&sockets[1], Some(address(2))),
            neighbour: PathBuf::new(),
            work,
            adapters,
            servers,
            directory,
        }
    }

    /// As [`Self::new`], with a way out of the process that nothing goes over: the VMs meet in it.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn beside_idle_wire() -> Self {
        let directory = directory();
        let [own, other] = [free_address(), free_address()];
        let sockets = [1, 2].map(|i| directory.join(format!("vm{i}")));
        let devices = sockets.iter().zip(1..).map(|(path, i)| {
            format!(
                "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:00:0{i}'\nvni = 7\n",
                path.display()
            )
        });
        let text = format!(
            "[wire]\naddress = '{own}'\n[[wire.host]]\naddress = '{other}'\n\
             gids = ['10.0.1.0/24']\n{}",
            devices.collect::<String>()
        );
        let (adapter, work, servers) = configured(&directory, &text);
        Self {
            a: connect(&sockets[0], Some(address(1))),
            b: connect(&sockets[1], Some(address(2))),
            neighbour: PathBuf::new(),
            work,
            adapters: vec![adapter],
            servers,
            directory,
        }
    }

    /// The same with a worker that runs by itself, and sleeps whenever there is nothing to do.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn asleep() -> Self {
        let settings = AdapterSettings {
            poll_budget: Duration::ZERO,
            ..AdapterSettings::default()
        };
        Self::with(Adapter::new(&settings).expect("an adapter"), Vec::new())
    }

    fn with(adapter: Arc<Adapter>, work: Vec<Loop>) -> Self {
        let directory = directory();
        let mut servers = Vec::new();
        let sockets = [1, 2, 3].map(|i| {
            let path = directory.join(format!("vm{i}"));
            let settings = RnicSettings {
                name: path.display().to_string(),
                mac: [0x52, 0x54, 0, 0, 0, i],
                ..RnicSettings::default()
            };
            servers.push(serve(&path, &adapter, settings));
            path
        });
        let [a, b] = [0, 1].map(|i| connect(&sockets[i], None));
        let [_, _, neighbour] = sockets;
        Self {
            a,
            b,
            neighbour,
            work,
            adapters: vec![adapter],
            servers,
            directory,
        }
    }

    /// Lets each worker do a round, if they do not run by themselves.
    pub fn round(&mut self) {
        for work in &mut self.work {
            work.round();
        }
    }

    /// The same, with busy polling for what comes next. Returns whether that found more work for
    /// the last queue pair.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn busy_round(&mut self) -> bool {
        let mut found = false;
        for work in &mut self.work {
            found |= work.busy_round();
        }
        found
    }

    /// Frames that have come over the wire.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn frames(&self) -> u64 {
        let count = |adapter: &Arc<Adapter>| {
            let frames = &adapter.status()["workers"][0]["wire"]["received_frames"];
            frames.as_u64().unwrap_or_default()
        };
        self.adapters.iter().map(count).sum()
    }
}

/// A bed of each kind.
#[allow(dead_code)] // this file is part of three programs, and not all of them use it
pub struct Beds {
    local: Bed,
    beside_idle_wire: Bed,
    wired: Bed,
}

#[allow(dead_code)] // this file is part of three programs, and not all of them use it
impl Beds {
    /// All of them.
    pub fn new() -> Self {
        Self {
            local: Bed::new(),
            beside_idle_wire: Bed::beside_idle_wire(),
            wired: Bed::wired(),
        }
    }

    /// The one that a workload needs.
    pub fn of(&mut self, workload: &Workload) -> &mut Bed {
        match workload.bed {
            BedKind::Local => &mut self.local,
            BedKind::BesideIdleWire => &mut self.beside_idle_wire,
            BedKind::Wired => &mut self.wired,
        }
    }
}

/// A UDP address of this host that nobody uses.
fn free_address() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("an address")
}

/// An adapter as a configuration file has it, with its loops, and what serves its devices.
fn configured(directory: &Path, text: &str) -> (Arc<Adapter>, Vec<Loop>, Vec<Server>) {
    let path = directory.join("config");
    std::fs::write(&path, text).expect("a file");
    let args = ServeArgs {
        config: Some(path),
        workers: Some(1),
        ..ServeArgs::default()
    };
    let config = Config::new(args).expect("a configuration");
    let settings = AdapterSettings {
        uplinks: config.uplinks.open().expect("a socket"),
        ..config.adapter
    };
    let (adapter, loops) = Adapter::without_threads(&settings).expect("an adapter");
    let devices = config.devices.into_iter();
    let servers = devices.map(|(asked, device)| serve(&asked.socket, &adapter, device));
    let servers = servers.collect();
    (adapter, loops, servers)
}

/// The GID of an IPv4 address.
fn address(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
    gid
}

/// A directory of its own for a bed.
fn directory() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir().join(format!("bed-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    directory
}

fn serve(path: &Path, adapter: &Arc<Adapter>, settings: RnicSettings) -> Server {
    let socket = BoundSocket::bind(path, &Access::default()).expect("a socket");
    vhost_user::serve(socket, adapter.clone(), settings, &Sandbox::default()).expect("a server")
}

fn connect(socket: &Path, gid: Option<[u8; 16]>) -> Arc<Vm> {
    let options = VmOptions {
        gid,
        features: 1 << feature::UD | 1 << feature::SRQ | 1 << feature::ATOMIC,
        memory: 128 << 20,
        ..VmOptions::default()
    };
    Vm::connect(socket, options).expect("a VM")
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.servers.drain(..).map(Server::end).for_each(drop);
        for adapter in &self.adapters {
            adapter.shutdown();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// Nothing.
    Nothing,
    Write,
    Send,
    /// To a queue pair with a shared receive queue.
    SendShared,
    Read,
    FetchAdd,
    Datagram,
    /// In turn to the other VM and to the own.
    DatagramInTurn,
}

impl Verb {
    fn is_datagram(self) -> bool {
        matches!(self, Self::Datagram | Self::DatagramInTurn)
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    verb: Verb,
    /// Bytes of a message.
    size: u32,
    /// Work requests that are posted at a time, of which the last is signaled.
    list: u32,
    /// Queue pairs, that have one list each.
    qps: u32,
    /// Contexts of a neighbour, in which nothing happens.
    idle_contexts: u32,
    /// The bed that it needs.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub bed: BedKind,
}

/// What kind of bed a workload needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BedKind {
    /// [`Bed::new`].
    Local,
    /// [`Bed::beside_idle_wire`].
    BesideIdleWire,
    /// [`Bed::wired`].
    Wired,
}

const fn workload(name: &'static str, verb: Verb, list: u32, qps: u32) -> Workload {
    Workload {
        name,
        verb,
        size: SIZE,
        list,
        qps,
        idle_contexts: 0,
        bed: BedKind::Local,
    }
}

const fn wire(name: &'static str, verb: Verb, list: u32) -> Workload {
    Workload {
        bed: BedKind::Wired,
        ..workload(name, verb, list, 1)
    }
}

const fn beside_idle_wire(name: &'static str, verb: Verb, list: u32, qps: u32) -> Workload {
    Workload {
        bed: BedKind::BesideIdleWire,
        ..workload(name, verb, list, qps)
    }
}

/// All of them.
pub const WORKLOADS: [Workload; 27] = [
    workload("a poll iteration that finds nothing", Verb::Nothing, 1, 1),
    workload("WRITE, one by one", Verb::Write, 1, 1),
    Workload {
        idle_contexts: 4096,
        ..workload(
            "WRITE, one by one, beside 4,096 contexts",
            Verb::Write,
            1,
            1,
        )
    },
    workload("WRITE, lists of 32", Verb::Write, LIST, 1),
    workload("WRITE, lists of 96", Verb::Write, LONE_LIST, 1),
    workload("WRITE, 1,000 queue pairs", Verb::Write, 1, MANY),
    workload(
        "WRITE, lists of 32, 16 queue pairs",
        Verb::Write,
        LIST,
        SOME,
    ),
    workload("SEND, one by one", Verb::Send, 1, 1),
    workload("SEND, lists of 32", Verb::Send, LIST, 1),
    workload("SEND to an SRQ, one by one", Verb::SendShared, 1, 1),
    workload("SEND to an SRQ, lists of 32", Verb::SendShared, LIST, 1),
    workload("READ, one by one", Verb::Read, 1, 1),
    workload("READ, lists of 32", Verb::Read, LIST, 1),
    workload("FETCH_ADD, one by one", Verb::FetchAdd, 1, 1),
    workload("datagram, one by one", Verb::Datagram, 1, 1),
    workload("datagram, lists of 32", Verb::Datagram, LIST, 1),
    workload("datagram, to two VMs in turn", Verb::DatagramInTurn, 2, 1),
    beside_idle_wire("beside an idle wire: WRITE, one by one", Verb::Write, 1, 1),
    beside_idle_wire(
        "beside an idle wire: WRITE, lists of 32",
        Verb::Write,
        LIST,
        1,
    ),
    beside_idle_wire(
        "beside an idle wire: WRITE, 1,000 queue pairs",
        Verb::Write,
        1,
        MANY,
    ),
    wire("over the wire: WRITE, one by one", Verb::Write, 1),
    wire("over the wire: WRITE, lists of 32", Verb::Write, LIST),
    Workload {
        size: LONG,
        ..wire("over the wire: WRITE of 64 KiB, one by one", Verb::Write, 1)
    },
    wire("over the wire: FETCH_ADD, one by one", Verb::FetchAdd, 1),
    wire("over the wire: SEND, lists of 32", Verb::Send, LIST),
    wire("over the wire: READ, lists of 32", Verb::Read, LIST),
    wire("over the wire: datagram, lists of 32", Verb::Datagram, LIST),
];

/// What a guest process has for a workload.
struct End {
    // Dropped in this order: each before what it needs.
    qps: Vec<Qp>,
    srq: Option<Arc<Srq>>,
    mr: Mr,
    cq: Arc<Cq>,
    _pd: Arc<Pd>,
    _context: Arc<Context>,
}

impl End {
    fn new(vm: &Arc<Vm>, workload: &Workload) -> Self {
        let context = Context::new(vm).expect("a context");
        let pd = Pd::new(vm).expect("a protection domain");
        let cq = Cq::new(vm, 2 * ENTRIES.max(workload.qps), 0).expect("a CQ");
        let access = access::LOCAL_WRITE
            | access::REMOTE_WRITE
            | access::REMOTE_READ
            | access::REMOTE_ATOMIC;
        let mr = pd.register(1 << 20, access).expect("a memory region");
        let srq = (workload.verb == Verb::SendShared).then(|| {
            let options = SrqOptions {
                max_wr: ENTRIES,
                max_sge: 1,
                ..SrqOptions::default()
            };
            Srq::new(&context, &pd, &options).expect("an SRQ")
        });
        let options = QpOptions {
            caps: QpCaps {
                max_send_wr: ENTRIES,
                max_recv_wr: if srq.is_some() { 0 } else { ENTRIES },
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
            },
            signal_all: false,
            qp_type: match workload.verb {
                verb if verb.is_datagram() => qp_type::UD,
                _ => qp_type::RC,
            },
            ..QpOptions::default()
        };
        let uses = Uses {
            context: Some(&context),
            pd: Some(&pd),
            send_cq: Some(&cq),
            recv_cq: Some(&cq),
            srq: srq.as_ref(),
            ..Uses::default()
        };
        let qps = (0..workload.qps)
            .map(|_| Qp::create(vm, &uses, &options).expect("a queue pair"))
            .collect();
        Self {
            qps,
            srq,
            mr,
            cq,
            _pd: pd,
            _context: context,
        }
    }

    /// Takes completions; returns how many.
    fn take(&self) -> u32 {
        let mut cqes = [Cqe::default(); 64];
        let mut count = 0;
        loop {
            let taken = self.cq.poll_many(&mut cqes);
            for cqe in &cqes[..taken] {
                assert_eq!(cqe.status, wc_status::SUCCESS, "{cqe:?}");
            }
            if taken == 0 {
                return count;
            }
            count += taken as u32;
        }
    }
}

/// A workload with all that it needs.
pub struct Flow {
    workload: Workload,
    from: End,
    to: End,
    _idle: Vec<Arc<Context>>,
}

impl Flow {
    /// Makes what `workload` needs.
    pub fn new(bed: &Bed, workload: Workload) -> Self {
        let from = End::new(&bed.a, &workload);
        let to = End::new(&bed.b, &workload);
        for (a, b) in from.qps.iter().zip(&to.qps) {
            for (this, peer) in [(a, b), (b, a)] {
                let connection = if workload.verb.is_datagram() {
                    Connection::datagram(QKEY)
                } else {
                    let all = access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;
                    Connection {
                        access: all,
                        ..Connection::to(peer)
                    }
                };
                this.connect(&connection).expect("a connection");
            }
        }
        let mut idle = Vec::new();
        if workload.idle_contexts != 0 {
            let vm = connect(&bed.neighbour, None);
            let context = |_| Context::new(&vm).expect("a context");
            idle.extend((0..workload.idle_contexts).map(context));
        }
        Self {
            workload,
            from,
            to,
            _idle: idle,
        }
    }

    /// Rings for `count` of the queue pairs, whether they have work or not.
    #[allow(dead_code)] // this file is part of three programs, and not all of them use it
    pub fn ring(&self, count: usize) {
        for qp in &self.from.qps[..count] {
            qp.ring().expect("a doorbell");
        }
    }

    /// Messages of a step.
    pub fn messages(&self) -> u32 {
        self.workload.list * self.workload.qps
    }

    /// Posts a list to each queue pair, has the worker do rounds until all is done, and takes the
    /// completions.
    pub fn step(&self, mut round: impl FnMut()) {
        let receives = matches!(
            self.workload.verb,
            Verb::Send | Verb::SendShared | Verb::Datagram | Verb::DatagramInTurn
        );
        let mut left = match self.workload.verb {
            Verb::Nothing => 0,
            _ if receives => self.workload.qps + self.messages(),
            _ => self.workload.qps,
        };
        for (qp, peer) in self.from.qps.iter().zip(&self.to.qps) {
            if receives {
                self.post_receives(qp, peer);
            }
            if self.workload.verb != Verb::Nothing {
                self.post(qp, peer);
            }
        }
        for _ in 0..ROUNDS {
            round();
            left -= self.from.take() + self.to.take();
            if left == 0 {
                return;
            }
        }
        panic!("{left} completions are missing");
    }

    fn post_receives(&self, qp: &Qp, peer: &Qp) {
        for i in 1..=self.workload.list {
            let (end, qp) = if self.stays(i) {
                (&self.from, qp)
            } else {
                (&self.to, peer)
            };
            let sges = [end.mr.sge(0, self.workload.size + GRH)];
            match &end.srq {
                Some(srq) => srq.post_recv(u64::from(i), &sges),
                None => qp.post_recv(u64::from(i), &sges),
            }
            .expect("a receive");
        }
    }

    /// Whether message `i` of a list goes to the sender itself.
    fn stays(&self, i: u32) -> bool {
        self.workload.verb == Verb::DatagramInTurn && i % 2 == 0
    }

    fn post(&self, qp: &Qp, peer: &Qp) {
        let mut batch = qp.send_queue().batch();
        for i in 1..=self.workload.list {
            let last = i == self.workload.list;
            let flags = if last { send_flag::SIGNALED } else { 0 };
            let result = if self.workload.verb.is_datagram() {
                let to = if self.stays(i) { qp } else { peer };
                let mut wqe = Address::of(to, QKEY).send(u64::from(i));
                wqe.flags = flags;
                batch.push(&wqe, self.sges())
            } else {
                batch.push(&self.entry(u64::from(i), flags), self.sges())
            };
            result.expect("a work request");
        }
        batch.commit();
        qp.ring().expect("a doorbell");
    }

    fn sges(&self) -> [Sge; 1] {
        let size = match self.workload.verb {
            Verb::FetchAdd => 8,
            _ => self.workload.size,
        };
        [self.from.mr.sge(0, size)]
    }

    fn entry(&self, wr_id: u64, flags: u8) -> SendWqe {
        SendWqe {
            opcode: match self.workload.verb {
                Verb::Write => wr_opcode::RDMA_WRITE,
                Verb::Read => wr_opcode::RDMA_READ,
                Verb::FetchAdd => wr_opcode::ATOMIC_FETCH_AND_ADD,
                _ => wr_opcode::SEND,
            },
            flags,
            wr_id,
            remote_addr: self.to.mr.iova,
            rkey: self.to.mr.rkey,
            operand0: 1,
            ..SendWqe::default()
        }
    }
}
