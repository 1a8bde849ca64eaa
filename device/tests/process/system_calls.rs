// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a worker asks of the operating system while messages flow: nothing but to sleep, when it
//! does. As long as it polls there is no system call at all, and how long that is depends on who
//! else wants its CPU. Over the wire, packets that can leave and come together do so by one system call.
use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{access, mtu, send_flag, wr_opcode};
use vhost_device_rdma_bare::{DeviceProcess, Mr, ProcessOptions, QpOptions, Vm, VmOptions};

use crate::common::{assert_success, Pair, SideOptions, ALL, TIMEOUT};

/// Rounds of four messages.
const ROUNDS: u64 = 2000;
/// What a worker asks for to sleep: to be woken in time, and to wait.
const TO_SLEEP: [&str; 3] = ["epoll_wait", "epoll_pwait", "timerfd_settime"];
const CALLS_TO_SLEEP: u64 = 2;
/// Lists of messages over the wire that are counted together, and how often; how many go before any
/// counts, and messages of one.
const LISTS: usize = 50;
const TRIES: usize = 20;
const FIRST: usize = 20;
const LIST: u64 = 32;
/// What a worker asks of a socket: to send, to have what it sends made into packets of another length,
/// and to receive.
const TO_SEND: [&str; 2] = ["sendto", "sendmsg"];
const TO_CUT: &str = "setsockopt";
const TO_RECEIVE: &str = "recvmsg";

/// What a worker asked of its sockets while lists went over the wire.
#[derive(Debug, Clone, Copy)]
struct WireCalls {
    sends: usize,
    cuts: usize,
    /// Calls to receive that did.
    received: usize,
}

impl WireCalls {
    /// Of the calls in `lines`, which may be of no other kind than these and to sleep.
    fn count(lines: &[String]) -> Self {
        let calls: Vec<_> = lines.iter().filter_map(|line| name(line)).collect();
        let count = |known: &[&str]| {
            let known = calls.iter().filter(|call| known.contains(&call.as_str()));
            known.count()
        };
        let (sends, cuts) = (count(&TO_SEND), count(&[TO_CUT]));
        let all = sends + cuts + count(&[TO_RECEIVE]) + count(&TO_SLEEP);
        assert_eq!(all, calls.len(), "{calls:?}");
        Self {
            sends,
            cuts,
            received: lines.iter().filter(|line| has_received(line)).count(),
        }
    }

    /// Whether each of [`LISTS`] took one to send and one to receive, but for a few.
    fn one_for_a_list(&self) -> bool {
        let expected = LISTS..=LISTS + LISTS / 10;
        expected.contains(&self.sends) && expected.contains(&self.received) && self.cuts == 0
    }
}

/// A device with its system calls written to a file as they are made.
struct Traced {
    process: DeviceProcess,
    directory: PathBuf,
}

impl Traced {
    /// What `options` say, and a worker that polls for long.
    fn start(options: ProcessOptions, arguments: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let found = Command::new("strace").arg("-V").output();
        assert!(
            found.is_ok(),
            "this needs strace, which `cargo xtask setup` installs"
        );
        let directory =
            std::env::temp_dir().join(format!("strace-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        // The tracer is a process aside: the one that is started here becomes the device.
        let script = format!(
            "#!/bin/sh\nexec strace -D -f -qq -e signal=none -o '{}' '{}' \"$@\"\n",
            directory.join("calls").display(),
            env!("CARGO_BIN_EXE_vhost-device-rdma")
        );
        let path = directory.join("device");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let arguments = [&["--poll-us", "1000000"], arguments].concat();
        let options = options.binary(path).arguments(&arguments);
        let process = DeviceProcess::start(&options).unwrap();
        Self { process, directory }
    }

    /// The thread id of the worker.
    fn worker(&self) -> String {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        let task = tasks
            .map(|task| task.unwrap().path())
            .find(|task| fs::read_to_string(task.join("comm")).unwrap().trim() == "worker0")
            .expect("the worker's thread");
        task.file_name().unwrap().to_str().unwrap().to_owned()
    }

    /// What is written of all calls of a thread so far: one that takes long is two lines.
    fn lines(&self, thread: &str) -> Vec<String> {
        let text = fs::read_to_string(self.directory.join("calls")).unwrap();
        let of_thread = |line: &str| {
            let (id, call) = line.split_once(' ')?;
            (id == thread).then(|| call.trim_start().to_owned())
        };
        text.lines().filter_map(of_thread).collect()
    }

    /// Names of all calls of a thread so far, each when it begins.
    fn calls(&self, thread: &str) -> Vec<String> {
        self.lines(thread)
            .iter()
            .filter_map(|line| name(line))
            .collect()
    }

    fn sleeps(&self) -> u64 {
        let status = self.process.status().unwrap();
        status["workers"][0]["sleeps"].as_u64().unwrap()
    }
}

/// The name of a call that begins.
fn name(line: &str) -> Option<String> {
    let begins = !line.starts_with("<...");
    let (name, _) = line.split_once('(').filter(|_| begins)?;
    Some(name.to_owned())
}

/// Whether a call to receive ends, with something that has come.
fn has_received(line: &str) -> bool {
    let result = line.rsplit_once(" = ").map(|(_, result)| result);
    let bytes = result.and_then(|result| result.parse::<u64>().ok());
    line.contains(TO_RECEIVE) && bytes.is_some_and(|bytes| bytes != 0)
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A WRITE, a READ, a FETCH_ADD and a SEND.
fn messages(pair: &Pair, target: &Mr) {
    let (a, b) = (&pair.a, &pair.b);
    let sges = [a.mr.sge(0, 64)];
    a.qp.write(1, &sges, target.iova, target.rkey).unwrap();
    assert_success(&a.sent());
    a.qp.read(2, &sges, target.iova, target.rkey).unwrap();
    assert_success(&a.sent());
    let add = SendWqe {
        opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
        remote_addr: target.iova,
        rkey: target.rkey,
        operand0: 1,
        ..SendWqe::default()
    };
    a.qp.post_send(&add, &[a.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
    b.qp.post_recv(3, &[b.mr.sge(0, 64)]).unwrap();
    a.qp.send(4, &sges).unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
}

// D-DB-006.
#[test]
fn messages_cost_no_system_call_but_those_of_sleeping() {
    let device = Traced::start(ProcessOptions::vms(2), &[]);
    let options = VmOptions {
        features: 1 << feature::ATOMIC,
        ..VmOptions::default()
    };
    let [a, b] = [0, 1].map(|i| Vm::connect(device.process.socket(i), options.clone()).unwrap());
    let pair = Pair::connect(&a, &b, &SideOptions::default(), |connection| {
        connection.access |= access::REMOTE_ATOMIC;
    });
    let access = ALL | access::REMOTE_ATOMIC;
    let target = pair.b.pd.register(4096, access).unwrap();
    let worker = device.worker();
    // It sleeps while there is nothing to do, and that is seen.
    let start = Instant::now();
    let slept = |calls: &[String]| calls.iter().any(|call| call.starts_with("epoll_"));
    while !slept(&device.calls(&worker)) {
        assert!(start.elapsed() < TIMEOUT, "the worker does not sleep");
        std::thread::sleep(Duration::from_millis(10));
    }
    messages(&pair, &target);
    // In this order: a sleep in between is counted, whether its calls are or not.
    let sleeps_before = device.sleeps();
    let calls_before = device.calls(&worker).len();
    for _ in 0..ROUNDS {
        messages(&pair, &target);
    }
    let calls = device.calls(&worker);
    let calls = &calls[calls_before..];
    let sleeps = device.sleeps() - sleeps_before;
    for call in calls {
        assert!(TO_SLEEP.contains(&call.as_str()), "{calls:?}");
    }
    // One sleep may have been under way at the start, and its calls be written only at its end.
    assert!(
        calls.len() as u64 <= CALLS_TO_SLEEP * (sleeps + 1),
        "{} calls for {} messages, and {sleeps} sleeps",
        calls.len(),
        4 * ROUNDS
    );
}

/// Processes of two hosts: a list of messages leaves by one system call and comes by one, and so does
/// what acknowledges it.
#[test]
fn a_list_of_messages_over_the_wire_costs_a_call_to_send_and_one_to_receive() {
    let free = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
    let free = free.map(|socket| socket.local_addr().unwrap());
    let directory = std::env::temp_dir().join(format!("calls-{}", std::process::id()));
    // Others that want the CPUs make answers late, which would let less than a list be under way.
    fs::create_dir_all(&directory).unwrap();
    let hosts = [0usize, 1].map(|host| {
        let socket = directory.join(format!("vm{host}"));
        let file = directory.join(format!("{host}.toml"));
        let text = format!(
            "workers = 1\n[[device]]\nsocket = '{}'\nmac = '52:54:00:00:01:0{host}'\n\
             congestion = 'none'\ndgram = {{ local = '{}', remote = '{}', mtu = 9000 }}\n",
            socket.display(),
            free[host],
            free[1 - host],
        );
        fs::write(&file, text).unwrap();
        let arguments = ["--config", file.to_str().unwrap()];
        (Traced::start(ProcessOptions::vms(0), &arguments), socket)
    });
    let [a, b] = [0u8, 1].map(|host| {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, host + 1]);
        let options = VmOptions {
            gid: Some(gid),
            ..VmOptions::default()
        };
        Vm::connect(&hosts[usize::from(host)].1, options).unwrap()
    });
    let options = SideOptions {
        qp: QpOptions {
            signal_all: false,
            ..QpOptions::default()
        },
        ..SideOptions::default()
    };
    let pair = Pair::connect(&a, &b, &options, |connection| {
        connection.path_mtu = mtu::MTU_4096;
    });
    let target = pair.b.pd.register(4096, ALL).unwrap();
    let list = || {
        let mut batch = pair.a.qp.send_queue().batch();
        for number in 1..=LIST {
            let last = number == LIST;
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                flags: if last { send_flag::SIGNALED } else { 0 },
                remote_addr: target.iova,
                rkey: target.rkey,
                ..SendWqe::default()
            };
            batch.push(&wqe, [pair.a.mr.sge(0, 64)]).unwrap();
        }
        batch.commit();
        pair.a.qp.ring().unwrap();
        assert_success(&pair.a.sent());
    };
    // The first ones find the way of the peer.
    (0..FIRST).for_each(|_| list());
    let traced = hosts
        .each_ref()
        .map(|(device, _)| (device, device.worker()));
    // A worker that others keep from its CPU has to send or to receive again, or cuts: what is asked for is
    // seen when none does.
    let mut seen = Vec::new();
    let found = (0..TRIES).any(|_| {
        let before = traced
            .each_ref()
            .map(|(device, worker)| device.lines(worker).len());
        (0..LISTS).for_each(|_| list());
        let counts = [0, 1].map(|host| {
            let (device, worker) = &traced[host];
            WireCalls::count(&device.lines(worker)[before[host]..])
        });
        seen.push(counts);
        counts.iter().all(WireCalls::one_for_a_list)
    });
    assert!(found, "{LISTS} lists each: {seen:?}");
    drop((pair, target, a, b));
    let _ = fs::remove_dir_all(&directory);
}
