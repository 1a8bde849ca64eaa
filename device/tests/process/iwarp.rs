// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs of iWARP: connections that the device makes, in one process and between two.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_device_rdma::manage;
use vhost_device_rdma_bare::core::command::{
    IwAccept, IwConnect, IwDestroyListen, IwListen, IwNextEvent, IwReject,
};
use vhost_device_rdma_bare::spec::command::QpAttr;
use vhost_device_rdma_bare::spec::command::{status, Handle};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::iwarp::{self, iw_event, IwEndpoint, IwEvent};
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_attr, qp_state, qp_type, send_flag, wc_flag, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{DeviceProcess, Error, ProcessOptions, QpOptions, Vm, VmOptions};

use crate::common::{
    assert_status, assert_success, pattern, Side, SideOptions, ALL, NOTHING, TIMEOUT,
};

/// The port that VMs listen at.
pub const PORT: u16 = 7471;
/// Cookies of a listener, and of connections.
pub const LISTENER: u64 = 1;
pub const PASSIVE: u64 = 2;
pub const ACTIVE: u64 = 3;

/// Two VMs that have a port of iWARP.
pub struct Bed {
    // Dropped first.
    pub vms: [Arc<Vm>; 2],
    pub processes: Vec<DeviceProcess>,
    /// Their addresses on the host.
    pub hosts: [Ipv4Addr; 2],
    pub directory: PathBuf,
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The address that the driver of a VM has.
pub fn guest(vm: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, 1 + vm as u8).into()
}

/// Options of a VM with all features that go with iWARP.
fn options() -> VmOptions {
    let without = [
        feature::UD,
        feature::UC,
        feature::XRC,
        feature::FLUSH,
        feature::HEADER_TYPE,
        feature::SRD,
    ];
    let all = feature::ALL.iter().fold(0, |all, (_, bit)| all | 1 << bit);
    VmOptions {
        features: without.iter().fold(all, |all, bit| all & !(1 << bit)),
        gid: Some([0; 16]),
        ..VmOptions::default()
    }
}

impl Bed {
    /// In one process, or in one for each VM.
    pub fn new(apart: bool) -> Self {
        Self::with(apart, "")
    }

    /// In one process, to which the second device comes later.
    pub fn one_later() -> Self {
        Self::made(false, true, "", "")
    }

    /// With more in the table of each port.
    pub fn with(apart: bool, more: &str) -> Self {
        Self::made(apart, false, "", more)
    }

    /// With more in the tables of each device (`VM` stands for its number) and of its port.
    pub fn configured(apart: bool, of_device: &str, more: &str) -> Self {
        Self::made(apart, false, of_device, more)
    }

    fn made(apart: bool, later: bool, of_device: &str, more: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("iwarp-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        // Addresses that no other test has, of this process or another one.
        let [low, high, ..] = std::process::id().to_le_bytes();
        let place = u8::try_from(2 * number + 1).expect("fewer beds");
        let at = |vm: u8| Ipv4Addr::new(127, high, low, place + vm);
        let hosts = [at(0), at(1)];
        let names = format!(
            "directory = {{ '10.0.0.1' = '{}', '10.0.0.2' = '{}' }}",
            hosts[0], hosts[1]
        );
        let device = |vm: usize| {
            let socket = directory.join(format!("vm{vm}"));
            let of_device = of_device.replace("VM", &vm.to_string());
            format!(
                "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:00:0{vm}'\ntransport = 'iwarp'\n\
                 {of_device}\n[device.iwarp]\naddress = '{}'\n{names}\n{more}\n",
                socket.display(),
                hosts[vm]
            )
        };
        let configs = if apart {
            vec![device(0), device(1)]
        } else if later {
            vec![device(0)]
        } else {
            vec![device(0) + &device(1)]
        };
        let start = |(i, text): (usize, &String)| {
            let path = directory.join(format!("config{i}"));
            std::fs::write(&path, format!("drain = 15\n{text}")).unwrap();
            let mut options =
                ProcessOptions::vms(0).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
            options = options.arguments(&["--config", path.to_str().unwrap()]);
            DeviceProcess::start(&options).unwrap()
        };
        let processes: Vec<_> = configs.iter().enumerate().map(start).collect();
        if later {
            let path = directory.join("both");
            std::fs::write(&path, device(0) + &device(1)).unwrap();
            let mut said = Vec::new();
            manage::reload(&processes[0].status_socket(), &path, &mut said).unwrap();
            assert!(said.starts_with(b"added "));
        }
        let vms =
            [0, 1].map(|vm| Vm::connect(&directory.join(format!("vm{vm}")), options()).unwrap());
        Self {
            vms,
            processes,
            hosts,
            directory,
        }
    }

    /// Whatever was done to the processes, they are there, and nothing in them panicked.
    #[track_caller]
    pub fn assert_unharmed(&mut self) {
        for process in &mut self.processes {
            assert!(process.is_alive());
            let log = process.log();
            assert!(!log.contains("panic"), "{log}");
        }
    }

    /// A side of a VM, in INIT.
    pub fn side(&self, vm: usize) -> Side {
        self.side_with(vm, &SideOptions::default())
    }

    pub fn side_with(&self, vm: usize, options: &SideOptions) -> Side {
        let options = SideOptions {
            qp: QpOptions {
                qp_type: qp_type::IWARP,
                ..options.qp
            },
            ..*options
        };
        let side = Side::new(&self.vms[vm], &options);
        init(&side);
        side
    }

    /// A VM listens.
    pub fn listen(&self, vm: usize) -> u32 {
        listen(&self.vms[vm], PORT).unwrap()
    }

    /// Connected sides, the first one actively.
    pub fn pair(&self) -> [Side; 2] {
        self.pair_with(&SideOptions::default())
    }

    pub fn pair_with(&self, options: &SideOptions) -> [Side; 2] {
        let [a, b] = [0, 1].map(|vm| self.side_with(vm, options));
        let listener = self.listen(1);
        connect(&self.vms[0], &a, 1, 16, b"hello");
        let request = event(&self.vms[1], iw_event::CONNECT_REQUEST);
        assert_eq!((request.cookie, request.status), (LISTENER, 0));
        assert_eq!(private(&request), b"hello");
        accept(&self.vms[1], request.connection, &b, 16, b"welcome").unwrap();
        let reply = event(&self.vms[0], iw_event::CONNECT_REPLY);
        assert_eq!((reply.cookie, reply.status), (ACTIVE, 0));
        assert_eq!(private(&reply), b"welcome");
        let established = event(&self.vms[1], iw_event::ESTABLISHED);
        assert_eq!((established.cookie, established.status), (PASSIVE, 0));
        for side in [&a, &b] {
            assert_eq!(side.qp.state().unwrap(), qp_state::RTS);
        }
        destroy_listen(&self.vms[1], listener).unwrap();
        [a, b]
    }
}

pub fn init(side: &Side) {
    let attr = QpAttr {
        qp_state: qp_state::INIT,
        access_flags: access::LOCAL_WRITE
            | access::REMOTE_WRITE
            | access::REMOTE_READ
            | access::REMOTE_ATOMIC,
        ..QpAttr::default()
    };
    let mask = qp_attr::STATE | qp_attr::ACCESS_FLAGS;
    side.qp.modify((attr, mask)).unwrap();
}

pub fn endpoint(ip: IpAddr, port: u16) -> IwEndpoint {
    let addr = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    IwEndpoint {
        addr: addr.octets(),
        port,
        ..IwEndpoint::default()
    }
}

pub fn listen(vm: &Arc<Vm>, port: u16) -> Result<u32, Error> {
    let body = iwarp::IwListen {
        cookie: LISTENER,
        local: endpoint(Ipv4Addr::UNSPECIFIED.into(), port),
        backlog: 16,
        ..iwarp::IwListen::default()
    };
    vm.execute::<IwListen>(&body).map(|made| made.handle)
}

pub fn destroy_listen(vm: &Arc<Vm>, handle: u32) -> Result<(), Error> {
    let body = Handle {
        handle,
        reserved: 0,
    };
    vm.execute::<IwDestroyListen>(&body).map(drop)
}

pub fn private_data(data: &[u8]) -> ([u8; 256], u16) {
    let mut private = [0; 256];
    private[..data.len()].copy_from_slice(data);
    (private, data.len() as u16)
}

/// A queue pair of the first VM connects to the second one, or whichever.
fn connect(vm: &Arc<Vm>, side: &Side, to: usize, depth: u16, data: &[u8]) -> u32 {
    try_connect(vm, side, endpoint(guest(to), PORT), depth, data).unwrap()
}

pub fn try_connect(
    vm: &Arc<Vm>,
    side: &Side,
    remote: IwEndpoint,
    depth: u16,
    data: &[u8],
) -> Result<u32, Error> {
    let (private_data, private_length) = private_data(data);
    let body = iwarp::IwConnect {
        cookie: ACTIVE,
        local: endpoint(guest(0), 0),
        remote,
        qpn: side.qp.number(),
        ord: depth,
        ird: depth,
        private_length,
        private_data,
        ..iwarp::IwConnect::default()
    };
    vm.execute::<IwConnect>(&body).map(|made| made.handle)
}

pub fn accept(
    vm: &Arc<Vm>,
    connection: u32,
    side: &Side,
    depth: u16,
    data: &[u8],
) -> Result<(), Error> {
    let (private_data, private_length) = private_data(data);
    let body = iwarp::IwAccept {
        cookie: PASSIVE,
        connection,
        qpn: side.qp.number(),
        ord: depth,
        ird: depth,
        private_length,
        private_data,
        ..iwarp::IwAccept::default()
    };
    vm.execute::<IwAccept>(&body).map(drop)
}

pub fn next(vm: &Arc<Vm>) -> Option<IwEvent> {
    let event = vm.execute::<IwNextEvent>(&[]).unwrap();
    (event.kind != iw_event::NONE).then_some(event)
}

/// The next event, which is of this kind. It was told of.
#[track_caller]
pub fn event(vm: &Arc<Vm>, kind: u16) -> IwEvent {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(event) = next(vm) {
            assert_eq!(
                iw_event::name(event.kind),
                iw_event::name(kind),
                "{event:?}"
            );
            return event;
        }
        let told = vm.wait_async_event(TIMEOUT).unwrap();
        let told = told.expect("an event of a connection");
        let about = [
            event_type::IW_EVENT,
            event_type::QP_FATAL,
            event_type::QP_REQ_ERR,
            event_type::QP_ACCESS_ERR,
        ];
        assert!(about.contains(&told.event_type), "{told:?}");
        assert!(Instant::now() < deadline);
    }
}

pub fn private(event: &IwEvent) -> &[u8] {
    &event.private_data[..event.private_length.into()]
}

/// What all that follows is tried with: one process, and two.
const BOTH: [bool; 2] = [false, true];

// D-IWP-001.
#[test]
fn connections_are_made_and_messages_move() {
    for apart in BOTH {
        let mut bed = Bed::new(apart);
        let [a, b] = bed.pair();
        for size in [0, 1, 7, 64, 1000, 4096, 65536, 300_000] {
            let data = pattern(size.into(), size as usize);
            a.mr.write(0, &data);
            b.qp.post_recv(1, &[b.mr.sge(0, size.max(1))]).unwrap();
            a.qp.send(2, &[a.mr.sge(0, size)]).unwrap();
            assert_success(&a.sent());
            let cqe = b.received();
            assert_success(&cqe);
            assert_eq!((cqe.wr_id, cqe.byte_len), (1, size), "apart: {apart}");
            assert_eq!(b.mr.read(0, size as usize), data);
            let (at, rkey) = (b.mr.iova + 400_000, b.mr.rkey);
            a.qp.write(3, &[a.mr.sge(0, size)], at, rkey).unwrap();
            assert_success(&a.sent());
            a.qp.read(4, &[a.mr.sge(400_000, size)], at, rkey).unwrap();
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!((cqe.opcode, cqe.byte_len), (wc_opcode::RDMA_READ, size));
            assert_eq!(a.mr.read(400_000, size as usize), data);
        }
        // And the other way.
        a.qp.post_recv(5, &[a.mr.sge(0, 100)]).unwrap();
        b.qp.send(6, &[b.mr.sge(0, 100)]).unwrap();
        assert_success(&b.sent());
        assert_eq!(a.received().wr_id, 5);
        bed.assert_unharmed();
    }
}

#[test]
fn a_device_may_come_later() {
    let mut bed = Bed::one_later();
    let [a, b] = bed.pair();
    b.qp.post_recv(1, &[b.mr.sge(0, 100)]).unwrap();
    a.qp.send(2, &[a.mr.sge(0, 100)]).unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
    bed.assert_unharmed();
}

#[test]
fn all_that_iwarp_has_is_carried_out() {
    for apart in BOTH {
        let bed = Bed::new(apart);
        let [a, b] = bed.pair();
        let (at, rkey) = (b.mr.iova, b.mr.rkey);
        // Immediate data.
        b.qp.post_recv(1, &[]).unwrap();
        a.mr.write(0, &[7; 100]);
        let with_imm = SendWqe {
            opcode: wr_opcode::RDMA_WRITE_WITH_IMM,
            imm: 0x0403_0201,
            wr_id: 2,
            remote_addr: at,
            rkey,
            ..SendWqe::default()
        };
        a.qp.post_send(&with_imm, &[a.mr.sge(0, 100)]).unwrap();
        assert_success(&a.sent());
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!(cqe.opcode, wc_opcode::RECV_RDMA_WITH_IMM);
        assert_eq!((cqe.imm, cqe.byte_len), (0x0403_0201, 100));
        assert_eq!(b.mr.read(0, 100), [7; 100]);
        // Atomic operations.
        let word = b.pd.register(64, ALL | access::REMOTE_ATOMIC).unwrap();
        let (at, rkey) = (word.iova, word.rkey);
        word.write(0, &41u64.to_le_bytes());
        let add = SendWqe {
            opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
            wr_id: 3,
            remote_addr: at,
            rkey,
            operand0: 1,
            ..SendWqe::default()
        };
        a.qp.post_send(&add, &[a.mr.sge(8, 8)]).unwrap();
        assert_success(&a.sent());
        assert_eq!(a.mr.read(8, 8), 41u64.to_le_bytes());
        let swap = SendWqe {
            opcode: wr_opcode::ATOMIC_CMP_AND_SWP,
            wr_id: 4,
            operand0: 42,
            operand1: 99,
            ..add
        };
        a.qp.post_send(&swap, &[a.mr.sge(8, 8)]).unwrap();
        assert_success(&a.sent());
        assert_eq!(a.mr.read(8, 8), 42u64.to_le_bytes());
        assert_eq!(word.read(0, 8), 99u64.to_le_bytes());
        // Inline, and a solicited event.
        b.qp.post_recv(5, &[b.mr.sge(100, 100)]).unwrap();
        let inline = SendWqe {
            opcode: wr_opcode::SEND,
            flags: send_flag::SOLICITED,
            wr_id: 6,
            ..SendWqe::default()
        };
        a.qp.post_inline(&inline, b"in the entry").unwrap();
        assert_success(&a.sent());
        assert_eq!(b.received().byte_len, 12);
        assert_eq!(b.mr.read(100, 12), b"in the entry");
        // What iWARP lacks.
        let lacks = SendWqe {
            opcode: wr_opcode::SEND_WITH_IMM,
            wr_id: 7,
            ..SendWqe::default()
        };
        a.qp.post_send(&lacks, &[a.mr.sge(0, 8)]).unwrap();
        assert_status(&a.sent(), wc_status::LOC_QP_OP_ERR);
    }
}

#[test]
fn a_send_invalidates_a_key_of_its_responder() {
    for apart in BOTH {
        let bed = Bed::new(apart);
        let [a, b] = bed.pair();
        let key = b.pd.fast_region(16, 0).unwrap();
        let lists = b.mr.sge(0, 4096);
        let _ = lists;
        b.qp.post_recv(1, &[b.mr.sge(0, 8)]).unwrap();
        let send = SendWqe {
            opcode: wr_opcode::SEND_WITH_INV,
            imm: key.key(0),
            wr_id: 2,
            ..SendWqe::default()
        };
        a.qp.post_send(&send, &[a.mr.sge(0, 8)]).unwrap();
        // The region was never registered: its key cannot be invalidated, or says so.
        let cqe = b.received();
        let invalidated = cqe.status == wc_status::SUCCESS && cqe.wc_flags & wc_flag::WITH_INV != 0;
        assert!(
            invalidated || cqe.status == wc_status::WR_FLUSH_ERR,
            "{cqe:?}"
        );
    }
}

/// Many messages are under way in both directions, and complete in order.
#[test]
fn messages_complete_in_order() {
    const COUNT: u64 = 400;
    for apart in BOTH {
        let bed = Bed::new(apart);
        let [a, b] = bed.pair();
        for (from, to) in [(&a, &b), (&b, &a)] {
            let mut posted = 0;
            let mut done = 0;
            while done < COUNT {
                while posted < COUNT && posted - done < 32 {
                    let (at, rkey) = (to.mr.iova + 8192, to.mr.rkey);
                    match posted % 3 {
                        0 => from
                            .qp
                            .write(posted, &[from.mr.sge(0, 3000)], at, rkey)
                            .unwrap(),
                        1 => from
                            .qp
                            .read(posted, &[from.mr.sge(0, 5000)], at, rkey)
                            .unwrap(),
                        _ => {
                            to.qp.post_recv(posted, &[to.mr.sge(0, 64)]).unwrap();
                            from.qp.send(posted, &[from.mr.sge(0, 64)]).unwrap();
                        }
                    }
                    posted += 1;
                }
                let cqe = from.sent();
                assert_success(&cqe);
                assert_eq!(cqe.wr_id, done);
                if done % 3 == 2 {
                    let cqe = to.received();
                    assert_success(&cqe);
                    assert_eq!(cqe.wr_id, done);
                }
                done += 1;
            }
        }
    }
}

/// Who was connected to sends first, whether or not that was offered.
// D-IWP-001.
#[test]
fn either_end_may_send_first() {
    for (apart, more) in [(false, ""), (true, ""), (false, OFFERED), (true, OFFERED)] {
        let bed = Bed::with(apart, more);
        let [a, b] = bed.pair();
        a.qp.post_recv(1, &[a.mr.sge(0, 64)]).unwrap();
        b.mr.write(0, &[3; 64]);
        b.qp.send(2, &[b.mr.sge(0, 64)]).unwrap();
        assert_success(&b.sent());
        assert_success(&a.received());
        assert_eq!(a.mr.read(0, 64), [3; 64]);
    }
}

/// Who connects offers that either end sends first.
const OFFERED: &str = "peer-to-peer = true";

// D-IWP-005.
#[test]
fn a_connection_ends_with_its_queue_pair() {
    for apart in BOTH {
        for how in 0..4 {
            let mut bed = Bed::new(apart);
            let [a, b] = bed.pair();
            b.qp.post_recv(1, &[b.mr.sge(0, 8)]).unwrap();
            let mut a = Some(a);
            match how {
                0 => a.as_ref().unwrap().qp.set_state(qp_state::ERR).unwrap(),
                1 => a.as_ref().unwrap().qp.set_state(qp_state::SQD).unwrap(),
                2 => a.as_ref().unwrap().qp.set_state(qp_state::RESET).unwrap(),
                _ => drop(a.take()),
            }
            let close = event(&bed.vms[1], iw_event::CLOSE);
            assert_eq!(close.cookie, PASSIVE, "{how}, apart: {apart}");
            assert_status(&b.received(), wc_status::WR_FLUSH_ERR);
            assert_eq!(b.qp.state().unwrap(), qp_state::ERR);
            let close = event(&bed.vms[0], iw_event::CLOSE);
            assert_eq!(close.cookie, ACTIVE, "{how}, apart: {apart}");
            if let Some(a) = a.filter(|_| how < 2) {
                assert_eq!(a.qp.state().unwrap(), qp_state::ERR);
            }
            bed.assert_unharmed();
        }
    }
}

// D-IWP-008.
#[test]
fn what_has_begun_is_sent_before_a_connection_closes() {
    let bed = Bed::new(true);
    let options = SideOptions {
        memory: 8 << 20,
        ..SideOptions::default()
    };
    let [a, b] = bed.pair_with(&options);
    let size = 4 << 20;
    let data = pattern(1, size as usize);
    a.mr.write(0, &data);
    b.qp.post_recv(1, &[b.mr.sge(0, size)]).unwrap();
    a.qp.send(2, &[a.mr.sge(0, size)]).unwrap();
    assert_success(&a.sent());
    a.qp.set_state(qp_state::SQD).unwrap();
    let cqe = b.received();
    assert_success(&cqe);
    assert_eq!(b.mr.read(0, size as usize), data);
    let close = event(&bed.vms[1], iw_event::CLOSE);
    assert_eq!(close.status, 0);
}

/// What is posted is with the system before the process ends, and comes to the peer.
#[test]
fn what_is_posted_is_sent_before_the_process_ends() {
    const WRITES: u32 = 48;
    let mut bed = Bed::new(true);
    let options = SideOptions {
        memory: 32 << 20,
        ..SideOptions::default()
    };
    let [a, b] = bed.pair_with(&options);
    let data = pattern(1, 32 << 20);
    a.mr.write(0, &data);
    let length = (32 << 20) / WRITES;
    for n in 0..WRITES {
        let at = u64::from(n * length);
        a.qp.write(n.into(), &[a.mr.sge(at, length)], b.mr.iova + at, b.mr.rkey)
            .unwrap();
    }
    let process = &mut bed.processes[0];
    process.tell_to_end().unwrap();
    assert!(process.wait_for_end().unwrap(), "{}", process.log());
    bed.vms[0].kill();
    for _ in 0..WRITES {
        assert_success(&a.send_cq.poll().expect("a completion"));
    }
    let all = (length * WRITES) as usize;
    let deadline = Instant::now() + TIMEOUT;
    while b.mr.read(0, all) != data[..all] {
        assert!(Instant::now() < deadline, "something was not sent");
    }
}

/// So is what has completed, but waits for a peer that takes its time.
#[test]
fn what_has_completed_is_sent_before_the_process_ends() {
    const LENGTH: u32 = 16 << 10;
    let signal = |process: &DeviceProcess, name: &str| {
        let id = process.id().to_string();
        let killed = Command::new("kill").args([name, &id]).status();
        assert!(killed.unwrap().success());
    };
    let options = SideOptions {
        memory: 32 << 20,
        ..SideOptions::default()
    };
    // To a peer that takes nothing, so many complete at first. Some of these wait in the process.
    let write_to_silence = |bed: &Bed, most: usize| {
        let [a, b] = bed.pair_with(&options);
        a.mr.write(0, &pattern(1, 32 << 20));
        signal(&bed.processes[1], "-STOP");
        let mut done = 0;
        while done < most {
            let at = done as u64 * u64::from(LENGTH);
            a.qp.write(1, &[a.mr.sge(at, LENGTH)], b.mr.iova + at, b.mr.rkey)
                .unwrap();
            let Ok(cqe) = a.send_cq.wait(Duration::from_millis(300)) else {
                break;
            };
            assert_success(&cqe);
            done += 1;
        }
        (done, a, b)
    };
    let bed = Bed::new(true);
    let most = (32 << 20) / LENGTH as usize;
    let (completed, a, b) = write_to_silence(&bed, most);
    assert!(completed < most, "the system takes all");
    signal(&bed.processes[1], "-CONT");
    drop((a, b, bed));
    let mut bed = Bed::new(true);
    let (completed, a, b) = write_to_silence(&bed, completed - 4);
    bed.processes[0].tell_to_end().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    signal(&bed.processes[1], "-CONT");
    let process = &mut bed.processes[0];
    assert!(process.wait_for_end().unwrap(), "{}", process.log());
    bed.vms[0].kill();
    let all = completed * LENGTH as usize;
    let deadline = Instant::now() + TIMEOUT;
    while b.mr.read(0, all) != a.mr.read(0, all) {
        assert!(Instant::now() < deadline, "something was not sent");
    }
}

/// What has begun is carried out where messages stay in the process, too.
// D-IWP-008.
#[test]
fn a_long_message_goes_on_while_its_queue_pair_closes() {
    let mut bed = Bed::new(false);
    let options = SideOptions {
        memory: 32 << 20,
        ..SideOptions::default()
    };
    let [a, b] = bed.pair_with(&options);
    let size = 32 << 20;
    let data = pattern(1, size as usize);
    a.mr.write(0, &data);
    a.qp.write(2, &[a.mr.sge(0, size)], b.mr.iova, b.mr.rkey)
        .unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while b.mr.read(0, 64) != data[..64] {
        assert!(Instant::now() < deadline);
    }
    a.qp.set_state(qp_state::SQD).unwrap();
    assert_success(&a.sent());
    assert_eq!(b.mr.read(0, size as usize), data);
    for vm in &bed.vms {
        assert_eq!(event(vm, iw_event::CLOSE).status, 0);
    }
    bed.assert_unharmed();
}

/// VMs of different networks of a process have nothing in common but TCP.
// D-IWP-001.
#[test]
fn networks_of_a_process_are_apart() {
    let bed = Bed::configured(false, "network = 'of-VM'", "");
    let [a, b] = [0, 1].map(|vm| bed.side(vm));
    bed.listen(1);
    a.qp.post_recv(1, &[a.mr.sge(0, 64)]).unwrap();
    connect(&bed.vms[0], &a, 1, 1, b"");
    let request = event(&bed.vms[1], iw_event::CONNECT_REQUEST);
    accept(&bed.vms[1], request.connection, &b, 1, b"").unwrap();
    assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, 0);
    // Who was connected to sends first.
    event(&bed.vms[1], iw_event::ESTABLISHED);
    b.qp.send(2, &[b.mr.sge(0, 64)]).unwrap();
    assert_success(&b.sent());
    assert_success(&a.received());
}

#[test]
fn a_connection_is_rejected() {
    for apart in BOTH {
        let bed = Bed::new(apart);
        let a = bed.side(0);
        bed.listen(1);
        connect(&bed.vms[0], &a, 1, 1, b"please");
        let request = event(&bed.vms[1], iw_event::CONNECT_REQUEST);
        let (private_data, private_length) = private_data(b"no");
        let body = iwarp::IwReject {
            connection: request.connection,
            private_length,
            private_data,
            ..iwarp::IwReject::default()
        };
        bed.vms[1].execute::<IwReject>(&body).unwrap();
        let reply = event(&bed.vms[0], iw_event::CONNECT_REPLY);
        assert_eq!(reply.status, status::ECONNREFUSED);
        assert_eq!(private(&reply), b"no");
        assert_eq!(a.qp.state().unwrap(), qp_state::INIT);
        let again = bed.vms[1].execute::<IwReject>(&body);
        assert_eq!(again.unwrap_err().status(), Some(status::ENOENT));
        // It may connect again.
        connect(&bed.vms[0], &a, 1, 1, b"");
        let request = event(&bed.vms[1], iw_event::CONNECT_REQUEST);
        let b = bed.side(1);
        accept(&bed.vms[1], request.connection, &b, 1, b"").unwrap();
        assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, 0);
        event(&bed.vms[1], iw_event::ESTABLISHED);
    }
}

#[test]
fn nobody_listens() {
    let bed = Bed::new(true);
    let a = bed.side(0);
    connect(&bed.vms[0], &a, 1, 1, b"");
    let reply = event(&bed.vms[0], iw_event::CONNECT_REPLY);
    assert_eq!((reply.status, reply.cookie), (status::ECONNREFUSED, ACTIVE));
    // The host itself is nobody whom a VM may connect to.
    let host = endpoint(Ipv4Addr::LOCALHOST.into(), PORT);
    let refused = try_connect(&bed.vms[0], &a, host, 1, b"");
    assert_eq!(refused.unwrap_err().status(), Some(status::EPERM));
    // An address is in use once, and free again at once.
    let vm = &bed.vms[1];
    let first = listen(vm, PORT).unwrap();
    assert_eq!(
        listen(vm, PORT).unwrap_err().status(),
        Some(status::EADDRINUSE)
    );
    destroy_listen(vm, first).unwrap();
    listen(vm, PORT).unwrap();
    assert_eq!(
        destroy_listen(vm, first).unwrap_err().status(),
        Some(status::ENOENT)
    );
}

/// Who listens everywhere for one family of addresses goes, and who does so for the other one stays.
#[test]
fn a_listener_stays_when_that_of_the_other_family_goes() {
    let bed = Bed::new(false);
    let (a, vm) = (bed.side(0), &bed.vms[1]);
    let first = listen(vm, PORT).unwrap();
    let body = iwarp::IwListen {
        cookie: 77,
        local: endpoint(Ipv6Addr::UNSPECIFIED.into(), PORT),
        backlog: 1,
        ..iwarp::IwListen::default()
    };
    let second = vm.execute::<IwListen>(&body).unwrap().handle;
    let again = vm.execute::<IwListen>(&body).map(drop);
    assert_eq!(again.unwrap_err().status(), Some(status::EADDRINUSE));
    for (gone, cookie) in [(None, LISTENER), (Some(first), 77)] {
        if let Some(first) = gone {
            destroy_listen(vm, first).unwrap();
        }
        connect(&bed.vms[0], &a, 1, 1, b"");
        let request = event(vm, iw_event::CONNECT_REQUEST);
        assert_eq!(request.cookie, cookie);
        let reject = iwarp::IwReject {
            connection: request.connection,
            ..iwarp::IwReject::default()
        };
        vm.execute::<IwReject>(&reject).unwrap();
        let reply = event(&bed.vms[0], iw_event::CONNECT_REPLY);
        assert_eq!(reply.status, status::ECONNREFUSED);
    }
    destroy_listen(vm, second).unwrap();
    // It is free again.
    listen(vm, PORT).unwrap();
}

// D-IWP-002.
#[test]
fn what_a_peer_must_not_do_ends_its_connection() {
    for apart in BOTH {
        // A key that there is not, a range that is too long, a message without a receive.
        for what in 0..4 {
            let mut bed = Bed::new(apart);
            let [a, b] = bed.pair();
            let (at, rkey) = (b.mr.iova, b.mr.rkey);
            b.mr.write(0, &[0; 64]);
            a.mr.write(0, &[1; 64]);
            let long = b.mr.iova + (1 << 20) - 8;
            match what {
                0 => a.qp.write(1, &[a.mr.sge(0, 64)], at, rkey ^ 0x100).unwrap(),
                1 => a.qp.write(1, &[a.mr.sge(0, 64)], long, rkey).unwrap(),
                2 => a.qp.read(1, &[a.mr.sge(0, 64)], long, rkey).unwrap(),
                _ => a.qp.send(1, &[a.mr.sge(0, 64)]).unwrap(),
            }
            let cqe = a.sent();
            match what {
                2 => assert_status(&cqe, wc_status::REM_ACCESS_ERR),
                3 if !apart => assert_status(&cqe, wc_status::RNR_RETRY_EXC_ERR),
                _ if !apart => assert_status(&cqe, wc_status::REM_ACCESS_ERR),
                _ => {}
            }
            let closed = event(&bed.vms[0], iw_event::CLOSE);
            assert_eq!(closed.cookie, ACTIVE, "{what}, apart: {apart}");
            event(&bed.vms[1], iw_event::CLOSE);
            for side in [&a, &b] {
                assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
            }
            assert_eq!(b.mr.read(0, 64), [0; 64]);
            bed.assert_unharmed();
        }
    }
}

// D-IWP-006.
#[test]
fn peers_that_do_nothing_keep_nobody_waiting() {
    let mut bed = Bed::new(false);
    bed.listen(1);
    // They connect, and say nothing, or nonsense.
    let quiet: Vec<_> = (0..40u8)
        .map(|i| {
            use std::io::Write;
            let mut stream = TcpStream::connect((bed.hosts[1], PORT)).unwrap();
            let said: &[u8] = match i % 3 {
                0 => b"",
                1 => b"GET / HTTP/1.1\r\n\r\n",
                _ => b"MPA ID Req",
            };
            let _ = stream.write_all(said);
            stream
        })
        .collect();
    std::thread::sleep(NOTHING);
    // Those that spoke nonsense are gone, and there is room again.
    drop(quiet);
    std::thread::sleep(NOTHING);
    let a = bed.side(0);
    connect(&bed.vms[0], &a, 1, 1, b"");
    let request = event(&bed.vms[1], iw_event::CONNECT_REQUEST);
    let b = bed.side(1);
    accept(&bed.vms[1], request.connection, &b, 1, b"").unwrap();
    assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, 0);
    bed.assert_unharmed();
}

// D-IWP-007.
#[test]
fn events_wait_for_their_driver() {
    let bed = Bed::new(true);
    bed.listen(1);
    let sides: Vec<_> = (0..8).map(|_| bed.side(0)).collect();
    for side in &sides {
        connect(&bed.vms[0], side, 1, 1, b"");
    }
    std::thread::sleep(10 * NOTHING);
    let came = std::iter::from_fn(|| next(&bed.vms[1]));
    assert_eq!(came.count(), sides.len());
    // Who listens no longer is told nothing.
    bed.vms[0].stop().unwrap();
    bed.vms[0].start().unwrap();
    drop(sides);
    let deadline = Instant::now() + TIMEOUT;
    let mut closed = 0;
    while closed < 8 {
        assert!(Instant::now() < deadline);
        closed += usize::from(next(&bed.vms[0]).is_some());
        std::thread::sleep(Duration::from_millis(1));
    }
}

// D-FEAT-009.
#[test]
fn a_device_of_iwarp_has_no_other_queue_pairs() {
    let bed = Bed::new(false);
    let vm = &bed.vms[0];
    assert!(vm.accepted(feature::IWARP));
    let limits = vm.query_device().unwrap();
    assert_eq!(
        (limits.max_ah, limits.max_xrcd, limits.max_mcast_grp),
        (0, 0, 0)
    );
    assert_eq!(limits.gid_table_len, 1);
    let gid = vm.set_gid(0, [7; 16]);
    assert_eq!(gid.unwrap_err().status(), Some(status::EOPNOTSUPP));
    let options = QpOptions::of(qp_type::RC);
    let side = bed.side(0);
    let uses = vhost_device_rdma_bare::Uses {
        context: Some(&side.context),
        pd: Some(&side.pd),
        send_cq: Some(&side.send_cq),
        recv_cq: Some(&side.recv_cq),
        ..Default::default()
    };
    let rc = vhost_device_rdma_bare::Qp::create(vm, &uses, &options);
    assert_eq!(rc.unwrap_err().status(), Some(status::EOPNOTSUPP));
    let other = VmOptions {
        features: options_of_roce(),
        ..VmOptions::default()
    };
    let socket = bed.directory.join("vm1");
    bed.vms[1].kill();
    assert!(Vm::connect(&socket, other).is_err());
}

fn options_of_roce() -> u64 {
    1 << feature::UD
}

/// RDMA READs are asked for as both ends agreed to, however many are posted.
// D-IWP-004.
#[test]
fn reads_under_way_are_as_many_as_was_agreed() {
    let bed = Bed::new(true);
    let [a, b] = [0, 1].map(|vm| bed.side(vm));
    bed.listen(1);
    connect(&bed.vms[0], &a, 1, 8, b"");
    let request = event(&bed.vms[1], iw_event::CONNECT_REQUEST);
    assert_eq!((request.ord, request.ird), (8, 8));
    accept(&bed.vms[1], request.connection, &b, 2, b"").unwrap();
    let reply = event(&bed.vms[0], iw_event::CONNECT_REPLY);
    assert_eq!((reply.status, reply.ord), (0, 2));
    event(&bed.vms[1], iw_event::ESTABLISHED);
    b.mr.write(0, &pattern(3, 20_000));
    for i in 0..40 {
        let at = b.mr.iova;
        a.qp.read(i, &[a.mr.sge(0, 20_000)], at, b.mr.rkey).unwrap();
    }
    for i in 0..40 {
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, i);
    }
    assert_eq!(a.mr.read(0, 20_000), pattern(3, 20_000));
}

// D-IWP-003.
#[test]
fn a_crc_may_be_left_out_if_both_ends_want_that() {
    let bed = Bed::with(true, "crc = false");
    let [a, b] = bed.pair();
    let data = pattern(9, 100_000);
    a.mr.write(0, &data);
    b.qp.post_recv(1, &[b.mr.sge(0, 100_000)]).unwrap();
    a.qp.send(2, &[a.mr.sge(0, 100_000)]).unwrap();
    assert_success(&b.received());
    assert_eq!(b.mr.read(0, 100_000), data);
}
