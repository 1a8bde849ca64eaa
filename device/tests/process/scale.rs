// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many objects, and fairness between them.
use std::sync::Arc;

use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{Connection, Cq, Pd, Qp, QpOptions, Uses, Vm, VmOptions};

use crate::common::{assert_success, counts, process, Pair, Side, SideOptions, Two, ALL, TIMEOUT};

// D-OBJ-001, D-QP-001.
#[test]
fn a_thousand_queue_pairs_with_a_completion_queue_each() {
    const COUNT: usize = 1000;
    let process = process(2);
    let options = VmOptions {
        memory: 128 << 20,
        ..VmOptions::default()
    };
    let vms = [0, 1].map(|i| Vm::connect(process.socket(i), options.clone()).unwrap());
    let small = QpOptions {
        caps: QpCaps {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        },
        ..QpOptions::default()
    };
    let sides = vms.each_ref().map(|vm| {
        let context = vhost_device_rdma_bare::Context::new(vm).unwrap();
        let pd = Pd::new(vm).unwrap();
        let mr = pd.register(1 << 20, ALL).unwrap();
        let qps: Vec<Qp> = (0..COUNT)
            .map(|i| {
                let cq = Cq::new(vm, 16, (i % 2) as u16).unwrap();
                Qp::new(&context, &pd, &cq, &cq, &small).unwrap()
            })
            .collect();
        (qps, mr, pd, context)
    });
    for (a, b) in sides[0].0.iter().zip(&sides[1].0) {
        a.connect(&Connection::to(b)).unwrap();
        b.connect(&Connection::to(a)).unwrap();
    }
    for vm in &vms {
        assert_eq!(
            counts(&process, vm.path()),
            [1, 1, 1, COUNT as u64, COUNT as u64]
        );
    }
    for round in 0..3u64 {
        for (i, (a, b)) in (0u64..).zip(sides[0].0.iter().zip(&sides[1].0)) {
            b.post_recv(i, &[sides[1].1.sge(i * 8, 8)]).unwrap();
            sides[0]
                .1
                .write(i as usize * 8, &(i * 3 + round).to_le_bytes());
            a.send(i, &[sides[0].1.sge(i * 8, 8)]).unwrap();
        }
        for (i, (a, b)) in (0u64..).zip(sides[0].0.iter().zip(&sides[1].0)) {
            assert_success(&a.send_cq().wait(TIMEOUT).unwrap());
            let cqe = b.recv_cq().wait(TIMEOUT).unwrap();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, i);
            assert_eq!(
                sides[1].1.read(i as usize * 8, 8),
                (i * 3 + round).to_le_bytes()
            );
        }
    }
    drop(sides);
    for vm in &vms {
        assert_eq!(counts(&process, vm.path()), [0; 5]);
    }
}

#[test]
fn the_status_counts_all_objects_and_lists_some() {
    const COUNT: u64 = 1100;
    let process = process(1);
    let vm = Vm::connect(process.socket(0), VmOptions::default()).unwrap();
    let pd = Pd::new(&vm).unwrap();
    let region = pd.register(1 << 20, ALL).unwrap();
    let cqs: Vec<_> = (0..COUNT).map(|_| Cq::new(&vm, 16, 0).unwrap()).collect();
    let status = process.status().unwrap();
    let device = &status["devices"][0];
    assert_eq!(device["counts"]["cqs"], COUNT);
    let listed = device["cqs"].as_array().unwrap();
    assert_eq!(listed.len(), 1024);
    for (listed, cq) in listed.iter().zip(&cqs) {
        assert_eq!(listed["cqn"], cq.number());
    }
    let listed = device["mrs"].as_array().unwrap();
    let index = region.rkey >> 8;
    assert_eq!((listed.len(), &listed[0]["index"]), (1, &index.into()));
}

// D-RC-004.
#[test]
fn a_queue_pair_with_long_messages_does_not_starve_another() {
    let two = Two::with(&["--workers", "1"]);
    let greedy = two.pair_with(
        &SideOptions {
            memory: 8 << 20,
            ..SideOptions::default()
        },
        |_| (),
    );
    // Both complete on one CQ: its order says what ended before what, however busy the machine is.
    let modest = Pair {
        a: Side::with(&two.a, |vm, uses| {
            let uses = Uses {
                send_cq: Some(&greedy.a.send_cq),
                ..uses
            };
            Qp::create(vm, &uses, &QpOptions::default()).unwrap()
        }),
        b: Side::new(&two.b, &SideOptions::default()),
    };
    for (from, to) in [(&modest.a, &modest.b), (&modest.b, &modest.a)] {
        from.qp.connect(&Connection::to(&to.qp)).unwrap();
    }
    let flood = || {
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: greedy.b.mr.iova,
            rkey: greedy.b.mr.rkey,
            ..SendWqe::default()
        };
        greedy
            .a
            .qp
            .post_send(&wqe, &[greedy.a.mr.sge(0, 8 << 20)])
            .unwrap();
    };
    let mut before = Vec::new();
    let mut outstanding = 0;
    for i in 1..=100u64 {
        while let Some(cqe) = greedy.a.send_cq.poll() {
            assert_success(&cqe);
            outstanding -= 1;
        }
        while outstanding < 32 {
            flood();
            outstanding += 1;
        }
        modest
            .a
            .qp
            .write(
                i,
                &[modest.a.mr.sge(0, 8)],
                modest.b.mr.iova,
                modest.b.mr.rkey,
            )
            .unwrap();
        let mut ended = 0;
        loop {
            let cqe = greedy.a.sent();
            assert_success(&cqe);
            if cqe.wr_id == i {
                break;
            }
            ended += 1;
        }
        outstanding -= ended;
        before.push(ended);
    }
    before.sort_unstable();
    // (The median: this thread may lose its CPU between two posts.)
    let usual = before[before.len() / 2];
    assert!(
        usual < 4,
        "{usual} of 32 long WRITEs ended before a small one"
    );
}

// D-QP-001.
#[test]
fn several_workers_share_the_queue_pairs() {
    let two = Two::with(&["--workers", "2"]);
    let pairs: Vec<_> = (0..8).map(|_| two.pair()).collect();
    let queues: std::collections::HashSet<u32> = pairs
        .iter()
        .map(|pair| pair.a.qp.doorbell_queue())
        .collect();
    assert_eq!(queues.len(), 2);
    std::thread::scope(|scope| {
        for pair in &pairs {
            scope.spawn(move || {
                for i in 0..500 {
                    pair.b.qp.post_recv(i, &[pair.b.mr.sge(0, 4096)]).unwrap();
                    pair.a.qp.send(i, &[pair.a.mr.sge(0, 4096)]).unwrap();
                    assert_success(&pair.a.sent());
                    assert_success(&pair.b.received());
                    pair.b
                        .qp
                        .write(i, &[pair.b.mr.sge(0, 100)], pair.a.mr.iova, pair.a.mr.rkey)
                        .unwrap();
                    assert_success(&pair.b.sent());
                }
            });
        }
    });
}

#[test]
fn workers_wait_for_no_lock_that_the_other_has() {
    let two = Two::with(&["--workers", "2"]);
    let pairs: Vec<_> = (0..8).map(|_| two.pair()).collect();
    let write = |from: &Side, to: &Side, i| {
        let sges = [from.mr.sge(0, 512)];
        from.qp.write(i, &sges, to.mr.iova, to.mr.rkey).unwrap();
    };
    let waited = || {
        let status = two.process.status().unwrap();
        let polls = [0, 1].map(|worker| status["workers"][worker]["polls"].as_u64().unwrap());
        (status["lock_waits"].as_u64().unwrap(), polls)
    };
    let before = waited();
    for i in 0..2000 {
        for Pair { a, b } in &pairs {
            write(a, b, i);
            write(b, a, i);
        }
        for Pair { a, b } in &pairs {
            assert_success(&a.sent());
            assert_success(&b.sent());
        }
    }
    let after = waited();
    assert_eq!(after.0, before.0, "somebody waited for a lock");
    for worker in 0..2 {
        assert!(after.1[worker] >= before.1[worker] + 1000);
    }
}

/// Numbers that are the same each time.
struct Dice(u64);

impl Dice {
    /// Below `sides`.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.0 >> 33) % sides
    }
}

/// Writes a few messages at a time, and at times sends one or receives one, at times that match the
/// other side's in all ways.
fn converse(side: &Side, other: &Side, rounds: u64, seed: u64) {
    let mut dice = Dice(seed);
    for round in 0..rounds {
        let mut count = 1 + dice.roll(6);
        for i in 0..count {
            let sges = [side.mr.sge(0, 8)];
            side.qp
                .write(i, &sges, other.mr.iova, other.mr.rkey)
                .unwrap();
            for _ in 0..dice.roll(200) {
                std::hint::spin_loop();
            }
        }
        if round % 4 == 2 * seed {
            side.qp.send(count, &[side.mr.sge(0, 8)]).unwrap();
            count += 1;
        }
        // It may be waited for already.
        if round % 4 == 2 * (1 - seed) {
            side.qp.post_recv(round, &[side.mr.sge(64, 8)]).unwrap();
            assert_success(&side.received());
        }
        for _ in 0..count {
            assert_success(&side.sent());
        }
        for _ in 0..dice.roll(3000) {
            std::hint::spin_loop();
        }
    }
}

/// Another side with the context of a side, and so with a doorbell word in common.
fn beside(side: &Side, vm: &Arc<Vm>) -> Side {
    let [send_cq, recv_cq] = [0, 1].map(|vector| Cq::new(vm, 256, vector).unwrap());
    let (context, pd) = (side.context.clone(), side.pd.clone());
    let qp = Qp::new(&context, &pd, &send_cq, &recv_cq, &QpOptions::default()).unwrap();
    let mr = pd.register(4096, ALL).unwrap();
    Side {
        qp,
        mr,
        send_cq,
        recv_cq,
        pd,
        context,
    }
}

// D-DB-001, D-DB-007: a worker that waits for the next message of a queue pair, or for the answer
// of its peer, takes rings on its own account.
#[test]
fn whoever_answers_at_whatever_time_is_heard() {
    const ROUNDS: u64 = 4000;
    let two = Two::with(&["--workers", "1", "--poll-us", "5000000"]);
    let apart = two.pair();
    // Both of one VM, with a doorbell word in common.
    let a = Side::new(&two.a, &SideOptions::default());
    let b = beside(&a, &two.a);
    a.qp.connect(&Connection::to(&b.qp)).unwrap();
    b.qp.connect(&Connection::to(&a.qp)).unwrap();
    let together = Pair { a, b };
    for pair in [&apart, &together] {
        std::thread::scope(|scope| {
            scope.spawn(|| converse(&pair.a, &pair.b, ROUNDS, 0));
            scope.spawn(|| converse(&pair.b, &pair.a, ROUNDS, 1));
        });
    }
    std::thread::scope(|scope| {
        for Pair { a, b } in [&apart, &together] {
            scope.spawn(move || converse(a, b, ROUNDS / 4, 0));
            scope.spawn(move || converse(b, a, ROUNDS / 4, 1));
        }
    });
}

// D-DB-004.
#[test]
fn two_that_always_have_work_keep_nobody_waiting() {
    /// Bytes, and messages of each: there is always something to send.
    const LENGTH: u32 = 64 << 10;
    const OUTSTANDING: u32 = 8;
    /// What the two may send while another waits for its poll: more than the budget that nobody
    /// else waits for.
    const FEW: u32 = 256;
    let two = Two::with(&["--workers", "1", "--poll-us", "5000000"]);
    let (busy, other) = (two.pair(), two.pair());
    let write = |from: &Side, to: &Side, length| {
        let sges = [from.mr.sge(0, length)];
        from.qp.write(0, &sges, to.mr.iova, to.mr.rkey).unwrap();
    };
    let both = [(&busy.a, &busy.b), (&busy.b, &busy.a)];
    for (from, to) in both {
        (0..OUTSTANDING).for_each(|_| write(from, to, LENGTH));
    }
    for _ in 0..50 {
        // Since the start of this round, and since the other has posted.
        let (mut sent, mut since) = (0, None);
        loop {
            for (from, to) in both {
                if let Some(cqe) = from.send_cq.poll() {
                    assert_success(&cqe);
                    write(from, to, LENGTH);
                    sent += 1;
                }
            }
            match since {
                None if sent >= FEW => {
                    write(&other.a, &other.b, 8);
                    since = Some(sent);
                }
                None => {}
                Some(before) => {
                    if let Some(cqe) = other.a.send_cq.poll() {
                        assert_success(&cqe);
                        break;
                    }
                    assert!(sent - before < FEW, "it is not polled");
                }
            }
        }
    }
}

// D-DB-006.
#[test]
fn posting_to_a_polling_worker_notifies_nobody() {
    // A worker that may poll for so long sleeps only when others need its CPU.
    let two = Two::with(&["--poll-us", "5000000"]);
    let pair = two.pair();
    pair.a
        .qp
        .write(0, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
    let sleeps = || {
        let status = two.process.status().unwrap();
        status["workers"][0]["sleeps"].as_u64().unwrap()
    };
    let (notifications, slept) = (two.a.notifications(), sleeps());
    for i in 0..1000 {
        pair.a
            .qp
            .write(i, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        assert_success(&pair.a.sent());
    }
    // Each needs a worker that announced to sleep; the one for what was posted before it said so
    // may come late.
    let notified = two.a.notifications() - notifications;
    let announced = sleeps() - slept;
    assert!(
        notified <= announced + 1,
        "{notified} notifications, {announced} sleeps"
    );
}

// D-DB-001, D-DB-002.
#[test]
fn sleeping_workers_are_woken_whenever_needed() {
    let two = Two::with(&["--poll-us", "0", "--workers", "2"]);
    let side = |vm| Side::new(vm, &SideOptions::default());
    let (a, b) = (side(&two.a), side(&two.b));
    a.qp.connect(&Connection::to(&b.qp)).unwrap();
    b.qp.connect(&Connection::to(&a.qp)).unwrap();
    for i in 0..5000 {
        a.qp.write(i, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&a.sent());
    }
    assert!(two.a.notifications() > 0);
}
