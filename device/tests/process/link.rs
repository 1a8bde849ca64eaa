// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Links that the operator takes down and up, and ports that drivers do.
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::core::command::SetPortState;
use vhost_device_rdma_bare::spec::command::{self, status};
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, qp_type, vendor_err, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Address, Connection, DeviceProcess, Error, Qp, QpOptions, Srq, SrqOptions, Uses, Vm, Xrcd,
};

use crate::common::{
    assert_event, assert_no_event, assert_refused, assert_status, assert_success, assert_works,
    everything, process, vm, Pair, Side, SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");
const QKEY: u32 = 0x1111;
const GROUP: [u8; 16] = [0xff, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];

/// Who takes which port down: of the first VM or of the second.
#[derive(Debug, Clone, Copy)]
enum By {
    Operator(usize),
    Driver(usize),
}

const WAYS: [By; 4] = [
    By::Operator(0),
    By::Operator(1),
    By::Driver(0),
    By::Driver(1),
];

impl By {
    fn set(self, two: &Two, up: bool) {
        match self {
            Self::Operator(vm) => two.process.set_link(vm, up).unwrap(),
            Self::Driver(0) => two.a.set_port_state(up).unwrap(),
            Self::Driver(_) => two.b.set_port_state(up).unwrap(),
        }
    }
}

fn two() -> Two {
    Two::of(&["--workers", "2"], &everything())
}

/// A pair that makes so many retries, with this time-out code.
fn pair(two: &Two, timeout: u8, retry_cnt: u8) -> Pair {
    two.pair_with(&SideOptions::default(), |c| {
        c.timeout = timeout;
        c.retry_cnt = retry_cnt;
        c.access |= access::REMOTE_ATOMIC;
    })
}

/// State and physical state of a port, as verbs have it.
const ACTIVE: (u8, u8) = (4, 5);
const DOWN: (u8, u8) = (1, 3);

#[track_caller]
fn assert_port(vm: &Vm, expected: (u8, u8)) {
    let port = vm.query_port().unwrap();
    assert_eq!((port.state, port.phys_state), expected);
}

/// `link_up` and `port_up` of the only VM, as the status tells.
fn told(process: &DeviceProcess) -> [bool; 2] {
    let status = process.status().unwrap();
    ["link_up", "port_up"].map(|key| status["devices"][0][key].as_bool().unwrap())
}

fn link(socket: &Path, device: &str, state: &str) -> Output {
    Command::new(BINARY)
        .arg("link")
        .arg(socket)
        .args([device, state])
        .output()
        .unwrap()
}

// D-CFG-001, D-LINK-001, D-QPORT-001.
#[test]
fn the_operator_takes_a_link_down_and_up() {
    let process = process(1);
    let guest = vm(process.socket(0));
    let status = process.status_socket();
    let name = process.socket(0).to_str().unwrap();
    assert_port(&guest, ACTIVE);
    // By either name; what changes nothing is no mistake.
    for (device, state, up) in [
        (name, "down", false),
        ("52:54:00:00:00:01", "down", false),
        (name, "up", true),
        (name, "up", true),
        ("52:54:00:00:00:01", "down", false),
        (name, "up", true),
    ] {
        let before = guest.read_config().unwrap().link_up == 1;
        let output = link(&status, device, state);
        assert!(output.status.success(), "{output:?}");
        assert_eq!((output.stdout.len(), output.stderr.len()), (0, 0));
        let mut config = guest.read_config().unwrap();
        assert_eq!(config.link_up, u8::from(up));
        config.link_up = guest.config().link_up;
        assert_eq!(config, *guest.config());
        assert_port(&guest, if up { ACTIVE } else { DOWN });
        assert_eq!(told(&process), [up, up]);
        match (before, up) {
            (true, false) => assert_event(&guest, event_type::PORT_ERR, 1),
            (false, true) => assert_event(&guest, event_type::PORT_ACTIVE, 1),
            _ => assert_no_event(&guest),
        }
    }
    assert_works(&Pair::new(&guest, &guest));
}

#[test]
fn an_operator_is_told_of_mistakes() {
    let process = process(2);
    let status = process.status_socket();
    for device in ["nobody", "52:54:00:00:00:09", "", "a\nlink b"] {
        let output = link(&status, device, "down");
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(&format!("'{device}'")), "{message}");
        if device == "nobody" {
            let names = [0, 1].map(|i| process.socket(i).to_str().unwrap());
            assert!(names.iter().all(|name| message.contains(name)), "{message}");
        }
    }
    assert_eq!(link(&status, "nobody", "sideways").status.code(), Some(2));
    let nowhere = link(Path::new("/nowhere"), "nobody", "down");
    assert_eq!(nowhere.status.code(), Some(1));
    let help = Command::new(BINARY).args(["link", "--help"]).output();
    let help = String::from_utf8(help.unwrap().stdout).unwrap();
    let parts = ["STATUS-SOCKET", "DEVICE", "up", "down"];
    assert!(parts.iter().all(|part| help.contains(part)), "{help}");
}

// D-SEC-002.
#[test]
fn nonsense_on_the_status_socket_is_told_and_does_no_harm() {
    let mut two = Two::new();
    let name = two.process.socket(0).to_str().unwrap().to_owned();
    let part = prop_oneof![
        Just("link".to_owned()),
        Just(" ".to_owned()),
        Just("up\n".to_owned()),
        Just("\n".to_owned()),
        Just(name),
        ".{0,20}",
        Just("x".repeat(10_000)),
    ];
    let request = prop::collection::vec(part, 0..6);
    let mut runner = TestRunner::new(Config {
        cases: 200,
        ..Config::default()
    });
    let process = &two.process;
    let result = runner.run(&request, |parts| {
        let request = parts.concat();
        // A request that is much too long is not read to its end, and the answer may be lost.
        if let Ok(answer) = process.request(request.as_bytes()) {
            let status = request.is_empty() || request == "\n";
            prop_assert_eq!(answer["devices"].is_array(), status, "{}", answer);
        }
        Ok(())
    });
    result.unwrap();
    // A client that says nothing gets the status, and so does one behind a client that does not
    // end.
    let mut silent = UnixStream::connect(process.status_socket()).unwrap();
    let mut slow = UnixStream::connect(process.status_socket()).unwrap();
    slow.write_all(b"link ").unwrap();
    let start = Instant::now();
    assert!(process.status().unwrap()["devices"].is_array());
    assert!(start.elapsed() < Duration::from_secs(10));
    let mut text = String::new();
    silent.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"devices\""), "{text}");
    text.clear();
    slow.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"error\""), "{text}");
    // This one is gone before the answer.
    let gone = UnixStream::connect(process.status_socket()).unwrap();
    gone.shutdown(Shutdown::Both).unwrap();
    drop(gone);
    assert!(process.status().is_ok());
    assert_works(&two.pair());
    two.assert_unharmed();
}

// D-LINK-004.
#[test]
fn a_link_stays_as_it_is_over_resets_and_front_ends() {
    let process = process(1);
    process.set_link(0, false).unwrap();
    let guest = vm(process.socket(0));
    assert_eq!(guest.config().link_up, 0);
    assert_no_event(&guest);
    guest.reset().unwrap();
    assert_eq!(guest.read_config().unwrap().link_up, 0);
    assert_no_event(&guest);
    assert_port(&guest, DOWN);
    guest.kill();
    let guest = vm(process.socket(0));
    assert_eq!(guest.config().link_up, 0);
    process.set_link(0, true).unwrap();
    assert_event(&guest, event_type::PORT_ACTIVE, 1);
    assert_port(&guest, ACTIVE);
    assert_works(&Pair::new(&guest, &guest));
}

// D-LINK-001.
#[test]
fn a_stopped_vm_learns_of_its_link_when_it_goes_on() {
    let process = process(1);
    let guest = vm(process.socket(0));
    guest.stop().unwrap();
    process.set_link(0, false).unwrap();
    guest.start().unwrap();
    assert_event(&guest, event_type::PORT_ERR, 1);
    guest.stop().unwrap();
    process.set_link(0, true).unwrap();
    process.set_link(0, false).unwrap();
    guest.start().unwrap();
    assert_no_event(&guest);
    // What was before a reset is in the configuration.
    guest.stop().unwrap();
    process.set_link(0, true).unwrap();
    guest.reset().unwrap();
    assert_no_event(&guest);
    assert_eq!(guest.read_config().unwrap().link_up, 1);
}

// D-PST-001, D-QPORT-001, D-LINK-001, D-FEAT-004.
#[test]
fn the_driver_takes_its_port_down_and_up() {
    let process = process(1);
    let guest = Vm::connect(process.socket(0), everything()).unwrap();
    guest.set_port_state(true).unwrap();
    assert_port(&guest, ACTIVE);
    guest.set_port_state(false).unwrap();
    assert_port(&guest, DOWN);
    assert_eq!(told(&process), [true, false]);
    assert_eq!(guest.read_config().unwrap().link_up, 1);
    assert_no_event(&guest);
    // Both must be up.
    process.set_link(0, false).unwrap();
    assert_event(&guest, event_type::PORT_ERR, 1);
    guest.set_port_state(true).unwrap();
    assert_port(&guest, DOWN);
    guest.set_port_state(false).unwrap();
    process.set_link(0, true).unwrap();
    assert_event(&guest, event_type::PORT_ACTIVE, 1);
    assert_port(&guest, DOWN);
    // It is up after a reset.
    guest.reset().unwrap();
    assert_port(&guest, ACTIVE);
    assert_works(&Pair::new(&guest, &guest));
    let refuse = |guest: &Vm, port_num, up, reserved| -> Result<_, Error> {
        guest.execute::<SetPortState>(&command::SetPortState {
            port_num,
            up,
            reserved,
        })
    };
    for (port_num, up, reserved) in [(0, 0, 0), (2, 0, 0), (1, 2, 0), (1, 255, 0), (1, 0, 1)] {
        let reserved = [0, 0, 0, 0, 0, reserved];
        assert_refused(refuse(&guest, port_num, up, reserved), status::EINVAL);
    }
    assert_port(&guest, ACTIVE);
    guest.kill();
    let old = vm(process.socket(0));
    assert_refused(refuse(&old, 1, 0, [0; 6]), status::EOPNOTSUPP);
    assert_port(&old, ACTIVE);
}

// D-LINK-002, D-RTY-001.
#[test]
fn while_a_port_is_down_requesters_retry_until_they_fail() {
    let two = two();
    for by in WAYS {
        let across = pair(&two, 12, 2);
        let (own, other) = match by {
            By::Operator(0) | By::Driver(0) => (&two.a, &two.b),
            _ => (&two.b, &two.a),
        };
        let options = SideOptions::default();
        let quick = |c: &mut Connection| (c.timeout, c.retry_cnt) = (12, 2);
        // Within the VM a message goes through the port, too. Another VM has its own.
        let within = Pair::connect(own, own, &options, quick);
        let elsewhere = Pair::connect(other, other, &options, quick);
        for pair in [&across, &within, &elsewhere] {
            assert_works(pair);
        }
        by.set(&two, false);
        for pair in [&across, &within] {
            let (a, b) = (&pair.a, &pair.b);
            b.qp.post_recv(1, &[b.mr.sge(0, 8)]).unwrap();
            let start = Instant::now();
            a.qp.send(1, &[a.mr.sge(0, 8)]).unwrap();
            let cqe = a.sent();
            assert_status(&cqe, wc_status::RETRY_EXC_ERR);
            assert_eq!(cqe.vendor_err, vendor_err::NO_ANSWER);
            let took = start.elapsed();
            assert!(
                took >= Duration::from_micros(3 * 16_777),
                "{by:?}: {took:?}"
            );
            assert_eq!(a.qp.state().unwrap(), qp_state::ERR);
            assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
            assert_eq!(b.recv_cq.poll(), None);
        }
        assert_works(&elsewhere);
        by.set(&two, true);
        assert_works(&pair(&two, 12, 2));
    }
}

/// A message from each side to the other.
fn post_both(pair: &Pair) {
    for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
        to.qp.post_recv(1, &[to.mr.sge(0, 8)]).unwrap();
        from.qp
            .write(2, &[from.mr.sge(0, 8)], to.mr.iova, to.mr.rkey)
            .unwrap();
        from.qp.send(3, &[from.mr.sge(0, 8)]).unwrap();
    }
}

#[track_caller]
fn assert_both(pair: &Pair) {
    for side in [&pair.a, &pair.b] {
        for wr_id in [2, 3] {
            let cqe = side.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, wr_id);
        }
        assert_success(&side.received());
    }
}

// D-LINK-002, D-LINK-003, D-RTY-002.
#[test]
fn what_waits_goes_on_at_once_when_the_port_comes_up() {
    let two = two();
    for by in WAYS {
        // Time-out 22 is 17 s. Without a time-out it waits 100 ms, and for ever.
        let pairs: Vec<_> = (0..40).map(|i| pair(&two, [22, 0][i % 2], 1)).collect();
        // One waits for a receive, for 655 ms.
        let hungry = two.pair_with(&SideOptions::default(), |c| c.min_rnr_timer = 0);
        hungry.a.qp.send(3, &[hungry.a.mr.sge(0, 8)]).unwrap();
        by.set(&two, false);
        pairs.iter().for_each(post_both);
        let hungry_mr = &hungry.b.mr;
        hungry.b.qp.post_recv(1, &[hungry_mr.sge(0, 8)]).unwrap();
        std::thread::sleep(NOTHING);
        for side in pairs.iter().chain([&hungry]).flat_map(|p| [&p.a, &p.b]) {
            assert_eq!(side.send_cq.poll(), None, "{by:?}");
            assert_eq!(side.recv_cq.poll(), None, "{by:?}");
        }
        let start = Instant::now();
        by.set(&two, true);
        pairs.iter().for_each(assert_both);
        assert_success(&hungry.a.sent());
        assert_success(&hungry.b.received());
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "{by:?}: {took:?}");
    }
}

// D-LINK-002, D-LINK-003.
#[test]
fn xrc_messages_go_on_at_once_when_the_port_comes_up() {
    let two = two();
    let domain = Xrcd::new(&two.b).unwrap();
    let target = Qp::xrc_target(&domain).unwrap();
    let server = Side::new(&two.b, &SideOptions::default());
    let (context, pd, cq) = (&server.context, &server.pd, &server.recv_cq);
    let srq = Srq::xrc(context, pd, &domain, cq, &SrqOptions::default()).unwrap();
    let a = Side::with(&two.a, |vm, uses| {
        let uses = Uses {
            recv_cq: None,
            ..uses
        };
        Qp::create(vm, &uses, &QpOptions::of(qp_type::XRC_INI)).unwrap()
    });
    for (from, to) in [(&a.qp, &target), (&target, &a.qp)] {
        let mut connection = Connection::to(to);
        connection.timeout = 22;
        from.connect(&connection).unwrap();
    }
    for by in WAYS {
        by.set(&two, false);
        srq.post_recv(7, &[server.mr.sge(0, 100)]).unwrap();
        let wqe = SendWqe {
            opcode: wr_opcode::SEND,
            srqn: srq.number(),
            ..SendWqe::default()
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, 100)]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((a.send_cq.poll(), server.recv_cq.poll()), (None, None));
        let start = Instant::now();
        by.set(&two, true);
        assert_success(&a.sent());
        assert_success(&server.received());
        assert!(start.elapsed() < Duration::from_secs(5), "{by:?}");
    }
}

// D-LINK-003, D-RTY-001.
#[test]
fn attempts_that_end_early_do_not_count() {
    let two = two();
    let pair = pair(&two, 16, 1);
    // Time-out 16 is 268 ms. There will be a way to the peer, but nobody there.
    pair.b.qp.set_state(qp_state::ERR).unwrap();
    two.b.set_port_state(false).unwrap();
    let start = Instant::now();
    pair.a.qp.send(1, &[pair.a.mr.sge(0, 8)]).unwrap();
    for _ in 0..50 {
        two.b.set_port_state(true).unwrap();
        two.b.set_port_state(false).unwrap();
    }
    assert_status(&pair.a.sent(), wc_status::RETRY_EXC_ERR);
    assert!(start.elapsed() >= Duration::from_micros(2 * 268_435));
}

/// Takes ports down and up until `stop`.
fn flap(two: &Two, stop: &AtomicBool) {
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        let by = WAYS[round % 4];
        by.set(two, false);
        std::thread::sleep(Duration::from_micros(500 + (round as u64 * 379) % 2000));
        by.set(two, true);
        std::thread::sleep(Duration::from_micros(500 + (round as u64 * 577) % 3000));
        round += 1;
    }
}

// D-LINK-002, D-RC-003.
#[test]
fn nothing_is_lost_or_done_twice_while_ports_flap() {
    const MESSAGES: u64 = 400;
    let mut two = two();
    let stop = AtomicBool::new(false);
    let run = |size: u32| {
        let pair = pair(&two, 18, 7);
        let (a, b) = (&pair.a, &pair.b);
        let counter = a.mr.sge(1 << 19, 8);
        let mut posted = 0;
        let mut received = 0;
        let mut done = 0;
        let atomic = ALL | access::REMOTE_ATOMIC;
        let sum = b.pd.register(8, atomic).unwrap();
        while received < MESSAGES || done < 2 * MESSAGES {
            if posted < MESSAGES && posted < done / 2 + 16 {
                let sge = b.mr.sge(4096, size);
                b.qp.post_recv(posted, &[sge]).unwrap();
                let add = SendWqe {
                    opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
                    remote_addr: sum.iova,
                    rkey: sum.rkey,
                    operand0: 1,
                    wr_id: 2 * posted,
                    ..SendWqe::default()
                };
                a.qp.post_send(&add, &[counter]).unwrap();
                let send = SendWqe {
                    opcode: wr_opcode::SEND_WITH_IMM,
                    imm: posted as u32,
                    wr_id: 2 * posted + 1,
                    ..SendWqe::default()
                };
                a.qp.post_send(&send, &[a.mr.sge(0, size)]).unwrap();
                posted += 1;
            }
            while let Some(cqe) = a.send_cq.poll() {
                assert_success(&cqe);
                assert_eq!(cqe.wr_id, done);
                done += 1;
            }
            while let Some(cqe) = b.recv_cq.poll() {
                assert_success(&cqe);
                assert_eq!((cqe.wr_id, u64::from(cqe.imm)), (received, received));
                assert_eq!(cqe.byte_len, size);
                received += 1;
            }
        }
        assert_eq!(sum.read(0, 8), MESSAGES.to_le_bytes());
    };
    std::thread::scope(|scope| {
        let flapping = scope.spawn(|| flap(&two, &stop));
        let runs = [8, 3000, 200_000].map(|size| scope.spawn(move || run(size)));
        let results = runs.map(std::thread::ScopedJoinHandle::join);
        stop.store(true, Ordering::Relaxed);
        flapping.join().unwrap();
        results.into_iter().for_each(Result::unwrap);
    });
    assert_works(&two.pair());
    two.assert_unharmed();
}

// D-PST-001, D-LINK-002.
#[test]
fn once_a_port_is_down_nothing_moves() {
    let two = two();
    let stop = AtomicBool::new(false);
    // Lists of short messages, one short message at a time, and long ones.
    let pairs = [(32, 64), (1, 8), (2, 150_000)].map(|kind| (kind, pair(&two, 18, 7)));
    std::thread::scope(|scope| {
        let writers = pairs.each_ref().map(|((list, size), pair)| {
            let (a, b, stop) = (&pair.a, &pair.b, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for wr_id in 0..*list {
                        a.qp.write(wr_id, &[a.mr.sge(0, *size)], b.mr.iova, b.mr.rkey)
                            .unwrap();
                    }
                    for _ in 0..*list {
                        assert_success(&a.sent());
                    }
                }
            })
        });
        for round in 0..40 {
            let by = WAYS[round % 4];
            std::thread::sleep(Duration::from_millis(2));
            by.set(&two, false);
            for (_, pair) in &pairs {
                pair.b.mr.write(0, &vec![0xff; 150_000]);
            }
            std::thread::sleep(Duration::from_millis(2));
            for (kind, pair) in &pairs {
                let quiet = pair.b.mr.read(0, 150_000).iter().all(|byte| *byte == 0xff);
                assert!(quiet, "{by:?}: {kind:?} moves");
            }
            by.set(&two, true);
        }
        stop.store(true, Ordering::Relaxed);
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap());
    });
}

/// A UD queue pair that is ready, in the group, with a receive.
fn member(vm: &Arc<Vm>) -> Side {
    let options = SideOptions {
        qp: QpOptions::of(qp_type::UD),
        ..SideOptions::default()
    };
    let side = Side::new(vm, &options);
    side.qp.connect(&Connection::datagram(QKEY)).unwrap();
    side.qp.attach(GROUP).unwrap();
    side.qp.post_recv(1, &[side.mr.sge(0, 1000)]).unwrap();
    side
}

// D-LINK-002, D-UD-001.
#[test]
fn datagrams_of_a_port_that_is_down_are_dropped() {
    let two = two();
    for by in WAYS {
        let (sender, own, other) = (member(&two.a), member(&two.a), member(&two.b));
        let send = |to: Address| {
            sender
                .qp
                .post_send(&to.send(1), &[sender.mr.sge(0, 8)])
                .unwrap();
            assert_success(&sender.sent());
        };
        let all = |own: &Side, other: &Side| {
            send(Address::of(&own.qp, QKEY));
            send(Address::of(&other.qp, QKEY));
            send(Address::group(GROUP, QKEY));
        };
        by.set(&two, false);
        all(&own, &other);
        other.assert_quiet();
        if matches!(by, By::Operator(0) | By::Driver(0)) {
            own.assert_quiet();
            assert_eq!(sender.recv_cq.poll(), None);
        } else {
            // The port of the second VM alone is down.
            assert_success(&own.received());
            assert_success(&sender.received());
            sender.qp.post_recv(1, &[sender.mr.sge(0, 1000)]).unwrap();
            own.qp.post_recv(1, &[own.mr.sge(0, 1000)]).unwrap();
        }
        by.set(&two, true);
        send(Address::group(GROUP, QKEY));
        for side in [&sender, &own, &other] {
            assert_success(&side.received());
        }
    }
}

// D-LINK-002, D-UC-001, D-UC-002, D-UC-003.
#[test]
fn uc_messages_are_dropped_whole_while_a_port_is_down() {
    const MESSAGES: u32 = 600;
    const MOST: u32 = 100 * MESSAGES;
    const SIZE: usize = 150_000;
    let two = two();
    let options = SideOptions {
        qp: QpOptions::of(qp_type::UC),
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    let stop = AtomicBool::new(false);
    let post = || b.qp.post_recv(0, &[b.mr.sge(0, SIZE as u32)]).unwrap();
    post();
    let send = |n: u32| {
        a.mr.write(0, &n.to_le_bytes().repeat(SIZE / 4));
        let wqe = SendWqe {
            opcode: wr_opcode::SEND_WITH_IMM,
            imm: n,
            ..SendWqe::default()
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, SIZE as u32)]).unwrap();
        assert_success(&a.sent());
    };
    // A receive is there for each message, so that only the port drops any.
    let take = || {
        let cqe = b.recv_cq.poll()?;
        assert_success(&cqe);
        assert_eq!(cqe.byte_len as usize, SIZE);
        assert_eq!(b.mr.read(0, SIZE), cqe.imm.to_le_bytes().repeat(SIZE / 4));
        post();
        Some(cqe.imm)
    };
    let (mut sent, mut got) = (0, Vec::new());
    std::thread::scope(|scope| {
        let flapping = scope.spawn(|| flap(&two, &stop));
        // On a busy machine, it may be long before a message meets a port that is down.
        while sent < MESSAGES || (got.len() == sent as usize && sent < MOST) {
            send(sent);
            sent += 1;
            got.extend(take());
        }
        stop.store(true, Ordering::Relaxed);
        flapping.join().unwrap();
    });
    assert!(got.is_sorted_by(|a, b| a < b), "{got:?}");
    assert!(
        !got.is_empty() && got.len() < sent as usize,
        "{} of {sent}",
        got.len()
    );
    send(sent);
    b.recv_cq.wait(TIMEOUT).expect("a message");
}
