// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion events: one for an armed queue, none for one that is not, never too late.
use std::time::Duration;

use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{qp_state, send_flag, wr_opcode};
use vhost_device_rdma_bare::{Vm, VmOptions};

use crate::common::{assert_success, process, Pair, Two, NOTHING, TIMEOUT};

fn send(pair: &Pair, flags: u8) {
    let (a, b) = (&pair.a, &pair.b);
    b.qp.post_recv(1, &[b.mr.sge(0, 64)]).unwrap();
    let wqe = SendWqe {
        opcode: wr_opcode::SEND,
        flags,
        ..SendWqe::default()
    };
    a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
}

// D-ARM-001.
#[test]
fn an_armed_queue_raises_one_event() {
    for event_index in [false, true] {
        let process = process(2);
        let options = VmOptions {
            event_index,
            event_size: 4,
            ..VmOptions::default()
        };
        let a = Vm::connect(process.socket(0), options.clone()).unwrap();
        let b = Vm::connect(process.socket(1), options).unwrap();
        let pair = Pair::new(&a, &b);
        let cq = &pair.b.recv_cq;
        send(&pair, 0);
        assert!(
            !cq.wait_event(NOTHING).unwrap(),
            "an event of a queue that was never armed"
        );
        assert_success(&pair.b.received());
        for _ in 0..10 {
            cq.arm(ArmMode::Any);
            assert_eq!(cq.poll(), None);
            send(&pair, 0);
            assert!(cq.wait_event(TIMEOUT).unwrap());
            send(&pair, 0);
            assert_success(&pair.b.received());
            assert_success(&pair.b.received());
        }
        assert!(
            !cq.wait_event(NOTHING).unwrap(),
            "a second event of a queue that was armed once"
        );
    }
}

// D-ARM-001, G-ARM-002.
#[test]
fn solicited_arming_waits_for_solicited_completions_and_errors() {
    let two = Two::new();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    cq.arm(ArmMode::Solicited);
    send(&pair, 0);
    assert!(!cq.wait_event(NOTHING).unwrap());
    send(&pair, send_flag::SOLICITED);
    assert!(cq.wait_event(TIMEOUT).unwrap());
    // Asking for any completion wins over asking for solicited ones.
    cq.arm(ArmMode::Any);
    cq.arm(ArmMode::Solicited);
    send(&pair, 0);
    assert!(cq.wait_event(TIMEOUT).unwrap());
    // Errors are always worth telling.
    cq.arm(ArmMode::Solicited);
    pair.b.qp.post_recv(9, &[]).unwrap();
    pair.b.qp.set_state(qp_state::ERR).unwrap();
    assert!(cq.wait_event(TIMEOUT).unwrap());
}

// D-ARM-001.
#[test]
fn send_queues_raise_events_too() {
    let two = Two::new();
    let pair = two.pair();
    pair.a.send_cq.arm(ArmMode::Any);
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert!(pair.a.send_cq.wait_event(TIMEOUT).unwrap());
    assert_success(&pair.a.sent());
}

// D-ARM-001, D-CEV-001.
#[test]
fn a_sleeper_never_misses_a_completion() {
    let two = Two::with(&["--poll-us", "0"]);
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    const ROUNDS: u64 = 3000;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..ROUNDS {
                b.qp.post_recv(i, &[b.mr.sge(0, 8)]).unwrap();
                // As ibv_rc_pingpong -e does it.
                loop {
                    if let Some(cqe) = b.recv_cq.poll() {
                        assert_success(&cqe);
                        break;
                    }
                    b.recv_cq.arm(ArmMode::Any);
                    if let Some(cqe) = b.recv_cq.poll() {
                        assert_success(&cqe);
                        break;
                    }
                    assert!(
                        b.recv_cq.wait_event(TIMEOUT).unwrap(),
                        "round {i}: no event"
                    );
                }
            }
        });
        for i in 0..ROUNDS {
            a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
            assert_success(&a.sent());
        }
    });
}

// D-CEV-002.
#[test]
fn events_wait_for_buffers() {
    let process = process(2);
    let options = VmOptions {
        event_size: 2,
        ..VmOptions::default()
    };
    let a = Vm::connect(process.socket(0), options.clone()).unwrap();
    let b = Vm::connect(process.socket(1), options).unwrap();
    // More queues with an event each than the guest has buffers for.
    let pairs: Vec<Pair> = (0..10).map(|_| Pair::new(&a, &b)).collect();
    for pair in &pairs {
        pair.b.recv_cq.arm(ArmMode::Any);
        send(pair, 0);
    }
    std::thread::sleep(Duration::from_millis(20));
    let mut seen = Vec::new();
    while let Some(cqn) = b
        .wait_completion_event(1, TIMEOUT.min(Duration::from_millis(500)))
        .unwrap()
    {
        seen.push(cqn);
    }
    let mut expected: Vec<u32> = pairs.iter().map(|pair| pair.b.recv_cq.number()).collect();
    expected.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, expected);
}
