// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a worker asks of the operating system while messages flow: nothing but to sleep, when it
//! does. As long as it polls there is no system call at all, and how long that is depends on who
//! else wants its CPU.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{access, wr_opcode};
use vhost_device_rdma_bare::{DeviceProcess, Mr, ProcessOptions, Vm, VmOptions};

use crate::common::{assert_success, Pair, SideOptions, ALL, TIMEOUT};

/// Rounds of four messages.
const ROUNDS: u64 = 2000;
/// What a worker asks for to sleep: to be woken in time, and to wait.
const TO_SLEEP: [&str; 3] = ["epoll_wait", "epoll_pwait", "timerfd_settime"];
const CALLS_TO_SLEEP: u64 = 2;

/// A device with its system calls written to a file as they are made.
struct Traced {
    process: DeviceProcess,
    directory: PathBuf,
}

impl Traced {
    fn start() -> Self {
        let found = Command::new("strace").arg("-V").output();
        assert!(
            found.is_ok(),
            "this needs strace, which `cargo xtask setup` installs"
        );
        let directory = std::env::temp_dir().join(format!("strace-{}", std::process::id()));
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
        let options = ProcessOptions::vms(2)
            .binary(path)
            .arguments(&["--poll-us", "1000000"]);
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

    /// Names of all calls of a thread so far, each when it begins.
    fn calls(&self, thread: &str) -> Vec<String> {
        let text = fs::read_to_string(self.directory.join("calls")).unwrap();
        text.lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(id, call)| *id == thread && !call.trim_start().starts_with("<..."))
            .filter_map(|(_, call)| Some(call.trim_start().split_once('(')?.0.to_owned()))
            .collect()
    }

    fn sleeps(&self) -> u64 {
        let status = self.process.status().unwrap();
        status["workers"][0]["sleeps"].as_u64().unwrap()
    }
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
    let device = Traced::start();
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
