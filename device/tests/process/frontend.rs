// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends and guests that misbehave towards vhost-user and the virtqueues, and the process
//! around it all.
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost::vhost_user::VhostUserFrontend;
use vhost::VhostBackend;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::{DeviceProcess, Vm, VmOptions};
use vmm_sys_util::eventfd::EventFd;

use crate::common::{assert_success, counts, process, vm, Pair, Two};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");

fn assert_served(vm: &std::sync::Arc<Vm>) {
    let pair = Pair::new(vm, vm);
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 100)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
}

/// A vhost-user message.
fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let head = [request, flags, body.len() as u32].map(u32::to_le_bytes);
    [&head.concat(), body].concat()
}

#[test]
fn random_messages_end_their_connection_at_most() {
    let mut two = Two::new();
    let path = two.b.path().to_owned();
    two.b.kill();
    let one = (
        0u32..48,
        prop_oneof![4 => Just(1u32), 4 => Just(9), 1 => any::<u32>()],
        prop_oneof![
            Just(vec![]),
            prop::collection::vec(prop_oneof![Just(0u8), 0u8..20, any::<u8>()], 8),
            prop::collection::vec(any::<u8>(), 40),
            prop::collection::vec(any::<u8>(), 0..300),
        ],
    );
    let session = prop::collection::vec(one, 1..20);
    let mut runner = TestRunner::new(Config {
        cases: 200,
        ..Config::default()
    });
    let result = runner.run(&session, |messages| {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_nonblocking(true).unwrap();
        // SET_PROTOCOL_FEATURES, so that more is understood: MQ, REPLY_ACK, CONFIG, RESET_DEVICE,
        // CONFIGURE_MEM_SLOTS.
        let features = message(16, 1, &0xa209u64.to_le_bytes());
        for bytes in [features]
            .into_iter()
            .chain(messages.iter().map(|(r, f, b)| message(*r, *f, b)))
        {
            // It may be gone by now.
            if stream.write_all(&bytes).is_err() {
                break;
            }
            let _ = stream.read(&mut [0; 4096]);
        }
        Ok(())
    });
    result.unwrap();
    two.assert_unharmed();
    assert_served(&two.a);
    two.b = vm(&path);
    assert_served(&two.b);
}

#[test]
fn a_message_cut_short_hurts_nobody_else() {
    let mut two = Two::new();
    let path = two.b.path().to_owned();
    two.b.kill();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(&message(5, 1, &[0; 100])[..50]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_served(&two.a);
    drop(stream);
    two.b = vm(&path);
    assert_served(&two.b);
}

#[test]
fn random_virtqueues_do_no_harm() {
    let mut two = Two::new();
    let descriptors = prop::collection::vec(
        (
            0u16..70,
            prop_oneof![
                0u64..1 << 20,
                Just((1 << 30) - 8),
                (1u64 << 30)..(1 << 30) + (1 << 20),
                any::<u64>()
            ],
            prop_oneof![0u32..64, Just(4096), any::<u32>()],
            prop_oneof![0u16..8, any::<u16>()],
            prop_oneof![0u16..64, any::<u16>()],
        ),
        0..64,
    );
    let heads = prop::collection::vec(prop_oneof![4 => 0u16..64, 1 => any::<u16>()], 1..40);
    let jump = prop_oneof![3 => Just(None), 1 => any::<u16>().prop_map(Some)];
    let mut runner = TestRunner::new(Config {
        cases: 150,
        ..Config::default()
    });
    let result = runner.run(&(descriptors, heads, jump), |(descriptors, heads, jump)| {
        two.b.with_control(|queue| {
            for (index, addr, len, flags, next) in &descriptors {
                queue.put_descriptor(index % queue.size(), *addr, *len, *flags, *next);
            }
            for head in &heads {
                queue.publish(*head);
            }
            if let Some(index) = jump {
                queue.available().u16(2).store(index, Ordering::SeqCst);
            }
            queue.notify().unwrap();
        });
        // What it wrote may be anywhere in the memory of this VM, so the other one is asked.
        two.a.query_port().expect("an answer");
        two.b.reset().expect("a reset");
        Ok(())
    });
    result.unwrap();
    assert!(two.process.is_alive());
    assert_served(&two.a);
    assert_served(&two.b);
}

#[test]
fn a_request_that_is_refused_ends_its_connection_and_no_other() {
    let mut two = Two::new();
    let path = two.b.path().to_owned();
    let beyond = 1 << 50;
    let requests: [&dyn Fn(&Vm) -> bool; 5] = [
        &|vm| vm.frontend().set_vring_num(0, 3).is_ok(),
        &|vm| {
            let mut config = vm.with_control(|queue| queue.config());
            config.used_ring_addr = 0x10;
            vm.frontend().set_vring_addr(0, &config).is_ok()
        },
        // Memory of which there is no file, that is no page, or that is there already.
        &|vm| {
            let mut info = vm.region(0).info();
            (info.guest_phys_addr, info.memory_size) = (beyond, info.memory_size * 2);
            vm.frontend().add_mem_region(&info).is_ok()
        },
        &|vm| {
            let mut info = vm.region(0).info();
            info.guest_phys_addr = beyond + 8;
            vm.frontend().add_mem_region(&info).is_ok()
        },
        &|vm| vm.frontend().add_mem_region(&vm.region(0).info()).is_ok(),
    ];
    for (number, request) in requests.into_iter().enumerate() {
        assert!(!request(&two.b), "request {number} was not refused");
        assert_served(&two.a);
        two.b = vm(&path);
        assert_served(&two.b);
    }
    two.assert_unharmed();
}

#[test]
fn kicks_may_block_and_be_replaced() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let mut old = Vec::new();
    for _ in 0..20 {
        // It would block the thread that reads it once too often.
        let kick = EventFd::new(0).unwrap();
        vm.frontend().set_vring_kick(0, &kick).unwrap();
        let before = vm.with_control(|queue| std::mem::replace(&mut queue.kick, kick));
        vm.query_port().expect("an answer");
        old.push(before);
        for kick in &old {
            kick.write(1).unwrap();
        }
        vm.query_port().expect("an answer");
    }
    vm.stop().unwrap();
    vm.start().unwrap();
    assert_served(&vm);
    assert!(process.terminate().unwrap());
    vm.kill();
}

// D-STOP-001, D-STOP-004.
#[test]
fn a_vm_whose_control_queue_is_disabled_is_stopped() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    two.b.frontend().set_vring_enable(0, false).unwrap();
    b.mr.write(0, &[0xff; 8]);
    a.qp.write(1, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    a.assert_quiet();
    assert_eq!(b.mr.read(0, 8), [0xff; 8]);
    two.b.frontend().set_vring_enable(0, true).unwrap();
    assert_success(&a.sent());
}

#[test]
fn a_second_front_end_waits_for_its_turn() {
    let process = process(1);
    let first = vm(process.socket(0));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| vm(process.socket(0)));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished());
        assert_served(&first);
        first.kill();
        assert_served(&second.join().unwrap());
    });
}

// D-FEAT-001, D-FEAT-002, D-FEAT-005.
#[test]
fn features_are_those_that_were_offered() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let offered = vm.frontend().get_features().unwrap();
    // VERSION_1 and RC; not what nobody handles, such as PACKED and IN_ORDER.
    assert_eq!(offered & (1 << 32 | 1), 1 << 32 | 1);
    assert_eq!(offered & (1 << 34 | 1 << 35), 0);
    // NOTIFICATION_DATA, NOTIF_CONFIG_DATA.
    assert_eq!(offered & (1 << 38 | 1 << 39), 0);
    // XRC and SRQ_RESIZE are not without SRQ.
    let (srq, xrc) = (1 << feature::SRQ, 1 << feature::XRC);
    assert_eq!(offered & (srq | xrc), srq | xrc);
    vm.frontend().set_features(offered & !xrc).unwrap();
    let path = vm.path().to_owned();
    // Nor is FAST_REG without PHYSICAL_MR.
    let physical = 1 << feature::PHYSICAL_MR;
    assert_eq!(offered & physical, physical);
    let wrong = [
        offered & !srq,
        offered & !(srq | xrc),
        offered & !physical,
        offered | 1 << 34,
    ];
    for wrong in wrong {
        // A refusal is the end of the connection.
        vm.kill();
        let vm = Vm::connect(&path, VmOptions::default()).unwrap();
        assert!(vm.frontend().set_features(wrong).is_err(), "{wrong:#x}");
    }
}

/// Lines of a file of the process in /proc.
fn proc_lines(process: &DeviceProcess, file: &str) -> usize {
    let path = format!("/proc/{}/{file}", process.id());
    match std::fs::read_dir(&path) {
        Ok(directory) => directory.count(),
        Err(_) => std::fs::read_to_string(&path).unwrap().lines().count(),
    }
}

#[test]
fn nothing_is_left_of_vms_that_are_gone() {
    let mut two = Two::new();
    let path = two.b.path().to_owned();
    let life = |two: &mut Two| {
        let pair = two.pair();
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 100)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        assert_success(&pair.a.sent());
        two.b.kill();
        drop(pair);
        two.b = Vm::connect(&path, VmOptions::default()).unwrap();
        assert_eq!(counts(&two.process, &path), [0; 5]);
    };
    for _ in 0..5 {
        life(&mut two);
    }
    let before = ["fd", "task", "maps"].map(|file| proc_lines(&two.process, file));
    for _ in 0..40 {
        life(&mut two);
    }
    let after = ["fd", "task", "maps"].map(|file| proc_lines(&two.process, file));
    for (before, after) in before.into_iter().zip(after) {
        assert!(after <= before + 8, "{before} became {after}");
    }
}

#[test]
fn the_status_can_be_asked_for_on_the_command_line() {
    let two = Two::new();
    let _pair = two.pair();
    let socket = two.process.socket(0).with_file_name("status");
    for pretty in [false, true] {
        let mut command = Command::new(BINARY);
        command.arg("status").arg(&socket);
        if pretty {
            command.arg("--pretty");
        }
        let output = command.output().unwrap();
        assert!(output.status.success());
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(status["devices"].as_array().unwrap().len(), 2);
        assert_eq!(status["devices"][0]["counts"]["qps"], 1);
    }
    let output = Command::new(BINARY)
        .args(["status", "/nowhere"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("/nowhere") && text.contains("No such file"),
        "{text}"
    );
}

#[test]
fn stale_sockets_are_replaced_and_live_ones_are_not() {
    let directory = std::env::temp_dir().join(format!("sockets-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("vm");
    let run = || {
        let mut child = Command::new(BINARY)
            .arg("--socket-path")
            .arg(&path)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        for _ in 0..200 {
            if child.try_wait().unwrap().is_some() || UnixStream::connect(&path).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        child
    };
    // A socket that nobody listens on any longer.
    drop(UnixListener::bind(&path).unwrap());
    let mut child = run();
    assert!(child.try_wait().unwrap().is_none());
    drop(vm(&path));
    // A live one.
    let output = Command::new(BINARY)
        .arg("--socket-path")
        .arg(&path)
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another process listens"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(path.exists());
    // Something else.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    let output = Command::new(BINARY)
        .arg("--socket-path")
        .arg(&path)
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_dir_all(&directory).unwrap();
}
