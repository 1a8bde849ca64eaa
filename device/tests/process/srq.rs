// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared receive queues.
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::core::command::{
    CreateSrq, DestroySrq, ModifySrq, QuerySrq, ResizeSrq,
};
use vhost_device_rdma_bare::spec::command::{self, srq_type, status, Handle};
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::{RecvWqe, SendWqe, Sge, MAX_SGE, MAX_WQ_ENTRIES};
use vhost_device_rdma_bare::spec::verbs::{
    qp_state, qp_type, vendor_err, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Connection, Mr, Pd, Placement, Qp, QpOptions, Srq, SrqOptions, Uses, Vm,
};

use crate::common::{
    all_types, assert_event, assert_no_event, assert_reaches, assert_refused, assert_soon,
    assert_status, assert_success, assert_works, caps, counts, pattern, process, vm, Pair, Side,
    SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

/// Senders of one VM, connected each to a queue pair of the other VM; those share a receive queue.
struct Shared {
    senders: Vec<Side>,
    receivers: Vec<Qp>,
    /// Has the receivers' CQs, region and PD, and an idle queue pair.
    side: Side,
    srq: Arc<Srq>,
}

impl Shared {
    fn new(two: &Two, count: usize, options: &SrqOptions) -> Self {
        Self::connect(two, count, options, |_| ())
    }

    fn connect(
        two: &Two,
        count: usize,
        options: &SrqOptions,
        change: impl Fn(&mut Connection),
    ) -> Self {
        let side = Side::new(&two.b, &SideOptions::default());
        let srq = Srq::new(&side.context, &side.pd, options).unwrap();
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for _ in 0..count {
            let sender = Side::new(&two.a, &SideOptions::default());
            let receiver = with_srq(&two.b, &side, &side.pd, &srq);
            let mut connection = Connection::to(&receiver);
            change(&mut connection);
            sender.qp.connect(&connection).unwrap();
            let mut connection = Connection::to(&sender.qp);
            change(&mut connection);
            receiver.connect(&connection).unwrap();
            senders.push(sender);
            receivers.push(receiver);
        }
        Self {
            senders,
            receivers,
            side,
            srq,
        }
    }

    fn sge(&self, wr_id: u64) -> Sge {
        self.side.mr.sge(wr_id * 64, 64)
    }

    fn post(&self, wr_id: u64) {
        self.srq.post_recv(wr_id, &[self.sge(wr_id)]).unwrap();
    }

    /// Sender `i` sends; it arrives in `wr_id`.
    #[track_caller]
    fn assert_sends(&self, i: usize, wr_id: u64) {
        self.send(i, 8);
        assert_success(&self.senders[i].sent());
        let cqe = self.side.received();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.byte_len), (wr_id, 8));
        assert_eq!(cqe.qp_num, self.receivers[i].number());
        assert_eq!(cqe.src_qp, self.senders[i].qp.number());
        assert_eq!(cqe.wqe_index, 0);
    }

    fn send(&self, i: usize, length: u32) {
        let sender = &self.senders[i];
        sender
            .qp
            .send(i as u64, &[sender.mr.sge(0, length)])
            .unwrap();
    }
}

fn with_srq(vm: &Arc<Vm>, side: &Side, pd: &Arc<Pd>, srq: &Arc<Srq>) -> Qp {
    let uses = Uses {
        context: Some(&side.context),
        pd: Some(pd),
        send_cq: Some(&side.send_cq),
        recv_cq: Some(&side.recv_cq),
        srq: Some(srq),
        xrcd: None,
    };
    Qp::create(vm, &uses, &QpOptions::default()).unwrap()
}

fn handle(handle: u32) -> Handle {
    Handle {
        handle,
        reserved: 0,
    }
}

// D-SRQ-005.
#[test]
fn queue_pairs_share_receives() {
    let two = Two::with_all_types();
    let shared = Shared::new(&two, 4, &SrqOptions::default());
    // One after the other: in the order of the queue.
    for i in 0..64 {
        shared.post(i);
    }
    for i in 0..64u64 {
        shared.assert_sends((i * 7 % 4) as usize, i);
    }
    // All at once, many times over: each receive once.
    let mut posted = 0u64;
    let mut received = HashSet::new();
    let mut next = [0u64; 4];
    for _ in 0..50 {
        while shared.srq.queue().room() > 0 {
            let slot = posted % 64;
            shared
                .srq
                .post_recv(posted, &[shared.side.mr.sge(slot * 64, 64)])
                .unwrap();
            posted += 1;
        }
        for _ in 0..8 {
            for (i, sender) in shared.senders.iter().enumerate() {
                sender.mr.write(0, &next[i].to_le_bytes());
                next[i] += 1;
                shared.send(i, 8);
            }
            for sender in &shared.senders {
                assert_success(&sender.sent());
            }
        }
        for _ in 0..32 {
            let cqe = shared.side.received();
            assert_success(&cqe);
            assert!(received.insert(cqe.wr_id), "{} twice", cqe.wr_id);
        }
    }
    assert_eq!(received.len(), 1600);
    assert_eq!(received.iter().max(), Some(&1599));
    shared.side.assert_quiet();
}

#[test]
fn writes_with_immediate_data_and_long_messages_take_receives_too() {
    let two = Two::with_all_types();
    let shared = Shared::new(&two, 2, &SrqOptions::default());
    let (sender, side) = (&shared.senders[0], &shared.side);
    let data = pattern(1, 300_000);
    sender.mr.write(0, &data);
    let pieces = [
        side.mr.sge(0, 100_000),
        side.mr.sge(200_000, 1),
        side.mr.sge(300_000, 300_000),
    ];
    shared.srq.post_recv(1, &pieces).unwrap();
    shared.srq.post_recv(2, &[]).unwrap();
    shared.send(0, 300_000);
    assert_success(&sender.sent());
    let cqe = side.received();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.byte_len), (1, 300_000));
    let got = [
        side.mr.read(0, 100_000),
        side.mr.read(200_000, 1),
        side.mr.read(300_000, 199_999),
    ];
    assert_eq!(got.concat(), data);
    let wqe = SendWqe {
        opcode: wr_opcode::RDMA_WRITE_WITH_IMM,
        imm: 77,
        remote_addr: side.mr.iova,
        rkey: side.mr.rkey,
        ..SendWqe::default()
    };
    let sender = &shared.senders[1];
    sender.mr.write(0, &data);
    sender
        .qp
        .post_send(&wqe, &[sender.mr.sge(0, 70_000)])
        .unwrap();
    assert_success(&sender.sent());
    let cqe = side.received();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.imm, cqe.byte_len), (2, 77, 70_000));
    assert_eq!(cqe.opcode, wc_opcode::RECV_RDMA_WITH_IMM);
    assert_eq!(side.mr.read(0, 70_000), data[..70_000]);
}

// D-RQ-001, D-RQ-004.
#[test]
fn posting_wakes_all_that_wait() {
    for arguments in [&["--poll-us", "0", "--workers", "2"][..], &[]] {
        let two = Two::of(arguments, &all_types());
        // Timer code 0 is the longest: 655.36 ms.
        let shared = Shared::connect(&two, 5, &SrqOptions::default(), |c| {
            c.rnr_retry = 7;
            c.min_rnr_timer = 0;
        });
        let mut times = Vec::new();
        for round in 0..5u64 {
            for i in 0..5 {
                shared.send(i, 8);
            }
            shared.side.assert_quiet();
            let start = Instant::now();
            // In two portions: some go on to wait.
            for i in 0..2 {
                shared.post(round * 5 + i);
            }
            for _ in 0..2 {
                assert_success(&shared.side.received());
            }
            for i in 2..5 {
                shared.post(round * 5 + i);
            }
            for _ in 2..5 {
                assert_success(&shared.side.received());
            }
            for sender in &shared.senders {
                assert_success(&sender.sent());
            }
            times.push(start.elapsed());
        }
        assert_soon(times);
        // Once nobody waits, posting is silent again.
        for i in 0..3 {
            shared.post(i);
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            shared.srq.memory().u64(0).load(Ordering::SeqCst) as u32,
            0,
            "rq_waited"
        );
    }
}

#[test]
fn a_sleeping_poster_never_leaves_a_sender_waiting() {
    let two = Two::of(&["--poll-us", "0", "--workers", "2"], &all_types());
    let shared = Shared::connect(&two, 2, &SrqOptions::default(), |c| {
        c.rnr_retry = 7;
        c.min_rnr_timer = 0;
    });
    let start = Instant::now();
    let shared = &shared;
    // The poster and the senders meet at every point of the protocol.
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for i in 0..3000u64 {
                while shared.srq.queue().room() < 62 {
                    std::hint::spin_loop();
                }
                shared.post(i % 64);
            }
        });
        for i in 0..3000 {
            shared.send(i % 2, 8);
            assert_success(&shared.senders[i % 2].sent());
            assert_success(&shared.side.received());
        }
    });
    // (Each wake-up that is lost costs 655 ms.)
    let took = start.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn without_a_receive_a_send_fails_after_the_rnr_retries() {
    let two = Two::with_all_types();
    let shared = Shared::connect(&two, 2, &SrqOptions::default(), |c| {
        c.rnr_retry = 2;
        c.min_rnr_timer = 18;
    });
    let start = Instant::now();
    shared.send(0, 8);
    let cqe = shared.senders[0].sent();
    assert_status(&cqe, wc_status::RNR_RETRY_EXC_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::NO_RECEIVE);
    assert!(start.elapsed() >= Duration::from_micros(2 * 5120));
    shared.post(0);
    shared.assert_sends(1, 0);
}

// D-SRQ-006.
#[test]
fn the_limit_tells_once() {
    let two = Two::with_all_types();
    let options = SrqOptions {
        limit: 3,
        ..SrqOptions::default()
    };
    let shared = Shared::new(&two, 1, &options);
    let number = shared.srq.number();
    assert_eq!(shared.srq.query().unwrap().limit, 3);
    for i in 0..6 {
        shared.post(i);
    }
    for i in 0..3 {
        shared.assert_sends(0, i);
    }
    assert_no_event(&two.b);
    assert_eq!(shared.srq.query().unwrap().limit, 3);
    shared.assert_sends(0, 3);
    assert_event(&two.b, event_type::SRQ_LIMIT_REACHED, number);
    assert_eq!(shared.srq.query().unwrap().limit, 0);
    shared.assert_sends(0, 4);
    shared.assert_sends(0, 5);
    assert_no_event(&two.b);
    // Armed below what is there: at the next receive that is taken, and not before.
    shared.post(6);
    shared.post(7);
    shared.srq.set_limit(64).unwrap();
    assert_no_event(&two.b);
    assert_eq!(shared.srq.query().unwrap().limit, 64);
    shared.assert_sends(0, 6);
    assert_event(&two.b, event_type::SRQ_LIMIT_REACHED, number);
    // Disarmed.
    shared.srq.set_limit(2).unwrap();
    shared.srq.set_limit(0).unwrap();
    shared.assert_sends(0, 7);
    assert_no_event(&two.b);
}

// D-SRQ-003, D-SRQ-006.
#[test]
fn the_position_may_wrap_the_ring_while_a_limit_is_armed() {
    let two = Two::with_all_types();
    let options = SrqOptions {
        max_wr: 4,
        max_sge: 1,
        ..SrqOptions::default()
    };
    let shared = Shared::new(&two, 2, &options);
    for round in 0..200u64 {
        shared.srq.set_limit(3).unwrap();
        for i in 0..4 {
            shared.post(i);
        }
        shared.srq.post_recv(9, &[]).expect_err("it is full");
        shared.assert_sends((round % 2) as usize, 0);
        assert_eq!(shared.srq.query().unwrap().limit, 3);
        shared.assert_sends(0, 1);
        assert_event(&two.b, event_type::SRQ_LIMIT_REACHED, shared.srq.number());
        shared.assert_sends(1, 2);
        shared.assert_sends(1, 3);
    }
}

// D-SRQ-001, D-SRQ-002.
#[test]
fn commands_are_checked() {
    let two = Two::with_all_types();
    let side = Side::new(&two.b, &SideOptions::default());
    let srq = Srq::new(&side.context, &side.pd, &SrqOptions::default()).unwrap();
    let attributes = srq.query().unwrap();
    assert_eq!(
        (attributes.entries, attributes.max_sge, attributes.limit),
        (64, 4, 0)
    );
    assert_refused(srq.set_limit(65), status::EINVAL);
    srq.set_limit(64).unwrap();
    assert_eq!(srq.query().unwrap().limit, 64);
    let vm = &two.b;
    for number in [0u32, 99, 0x00ff_ffff, u32::MAX] {
        assert_refused(vm.execute::<QuerySrq>(&handle(number)), status::ENOENT);
        assert_refused(vm.execute::<DestroySrq>(&handle(number)), status::ENOENT);
        let modify = command::ModifySrq {
            srqn: number,
            ..Default::default()
        };
        assert_refused(vm.execute::<ModifySrq>(&modify), status::ENOENT);
    }
    let modify = command::ModifySrq {
        srqn: srq.number(),
        reserved: 1,
        ..Default::default()
    };
    assert_refused(vm.execute::<ModifySrq>(&modify), status::EINVAL);
    // What uses it keeps it, and it keeps what it uses.
    let qp = with_srq(vm, &side, &side.pd, &srq);
    assert_refused(
        vm.execute::<DestroySrq>(&handle(srq.number())),
        status::EBUSY,
    );
    drop(qp);
    // Creating.
    let buffer = vm.buffer(16384, Placement::Contiguous).unwrap();
    let (pages, _tables) = buffer.page_list().unwrap();
    let good = command::CreateSrq {
        pd: side.pd.handle(),
        context: side.context.handle(),
        entries: 64,
        stride: 128,
        ring_offset: 128,
        max_sge: 4,
        buffer: pages,
        ..Default::default()
    };
    buffer.view().write(0, &[0xff; 8]);
    let created = vm.execute::<CreateSrq>(&good).unwrap();
    assert_eq!(buffer.view().get(0, 8), [0; 8]);
    vm.execute::<DestroySrq>(&handle(created.srqn)).unwrap();
    let before = counts(&two.process, vm.path());
    let refused = |expected, spoil: &dyn Fn(&mut command::CreateSrq)| {
        let mut body = good;
        spoil(&mut body);
        let result = vm.execute::<CreateSrq>(&body);
        let error = result.expect_err(&format!("{body:?}"));
        assert_eq!(
            error.status().and_then(status::name),
            status::name(expected),
            "{body:?}"
        );
    };
    for pd in [0, 1000, u32::MAX] {
        refused(status::ENOENT, &|b| b.pd = pd);
    }
    refused(status::ENOENT, &|b| b.context = 1000);
    for entries in [0, 3, 63, 128, MAX_WQ_ENTRIES * 2, u32::MAX, 1 << 31] {
        refused(status::EINVAL, &|b| b.entries = entries);
    }
    for stride in [0, 16, 32, 64, 100, 2048, 1 << 31, u32::MAX] {
        refused(status::EINVAL, &|b| b.stride = stride);
    }
    for offset in [0, 64, 129, 192, 16384 - 64 * 128 + 128, u32::MAX - 127] {
        refused(status::EINVAL, &|b| b.ring_offset = offset);
    }
    refused(status::EINVAL, &|b| b.max_sge = 8);
    refused(status::EINVAL, &|b| b.max_sge = MAX_SGE as u16 + 1);
    refused(status::EINVAL, &|b| b.srq_type = 2);
    refused(status::EINVAL, &|b| b.limit = 65);
    refused(status::EINVAL, &|b| b.xrcd = 1);
    refused(status::EINVAL, &|b| b.cq = side.recv_cq.number());
    refused(status::EINVAL, &|b| b.reserved0 = 1);
    refused(status::EINVAL, &|b| b.reserved1 = 1);
    refused(status::EINVAL, &|b| b.reserved2 = 1);
    refused(status::EINVAL, &|b| b.buffer.count = 0);
    refused(status::EINVAL, &|b| b.buffer.page_shift = 13);
    refused(status::EFAULT, &|b| b.buffer.addr = 1 << 50);
    let xrc = |b: &mut command::CreateSrq| {
        b.srq_type = srq_type::XRC;
        b.cq = side.recv_cq.number();
    };
    refused(status::ENOENT, &xrc);
    refused(status::ENOENT, &|b| {
        xrc(b);
        b.xrcd = 77;
    });
    assert_eq!(counts(&two.process, vm.path()), before);
    // A queue pair has one receive queue or the other, and not somebody else's.
    let uses = Uses {
        context: Some(&side.context),
        pd: Some(&side.pd),
        send_cq: Some(&side.send_cq),
        recv_cq: Some(&side.recv_cq),
        srq: Some(&srq),
        xrcd: None,
    };
    let other_vm = Side::new(&two.a, &SideOptions::default());
    let uses_of_other = Uses {
        context: Some(&other_vm.context),
        pd: Some(&other_vm.pd),
        send_cq: Some(&other_vm.send_cq),
        recv_cq: Some(&other_vm.recv_cq),
        ..uses
    };
    assert_refused(
        Qp::create(&two.a, &uses_of_other, &QpOptions::default()),
        status::ENOENT,
    );
    let initiator = QpOptions::of(qp_type::XRC_INI);
    assert_refused(Qp::create(vm, &uses, &initiator), status::EINVAL);
    // PD and context stay as long as it is there.
    let Side {
        qp,
        mr,
        pd,
        context,
        ..
    } = side;
    drop((qp, mr));
    assert_refused(
        vm.execute::<vhost_device_rdma_bare::core::command::DestroyPd>(&handle(pd.handle())),
        status::EBUSY,
    );
    assert_refused(
        vm.execute::<vhost_device_rdma_bare::core::command::DestroyContext>(&handle(
            context.handle(),
        )),
        status::EBUSY,
    );
}

// D-FEAT-004.
#[test]
fn there_are_none_without_the_feature() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let side = Side::new(&vm, &SideOptions::default());
    assert_refused(
        Srq::new(&side.context, &side.pd, &SrqOptions::default()),
        status::EOPNOTSUPP,
    );
    let unsupported = status::EOPNOTSUPP;
    assert_refused(vm.execute::<QuerySrq>(&handle(1)), unsupported);
    assert_refused(vm.execute::<DestroySrq>(&handle(1)), unsupported);
    assert_refused(vm.execute::<ModifySrq>(&Default::default()), unsupported);
    assert_refused(vm.execute::<ResizeSrq>(&Default::default()), unsupported);
}

#[test]
fn keys_are_those_of_the_pd_of_the_shared_receive_queue() {
    let two = Two::with_all_types();
    let side = Side::new(&two.b, &SideOptions::default());
    let other = Pd::new(&two.b).unwrap();
    let mr: Mr = other.register(4096, ALL).unwrap();
    let srq = Srq::new(&side.context, &other, &SrqOptions::default()).unwrap();
    let connect = || {
        let sender = Side::new(&two.a, &SideOptions::default());
        let qp = with_srq(&two.b, &side, &side.pd, &srq);
        sender.qp.connect(&Connection::to(&qp)).unwrap();
        qp.connect(&Connection::to(&sender.qp)).unwrap();
        (sender, qp)
    };
    let (sender, qp) = connect();
    srq.post_recv(1, &[mr.sge(0, 64)]).unwrap();
    sender.mr.write(0, b"to the other");
    sender.qp.send(1, &[sender.mr.sge(0, 12)]).unwrap();
    assert_success(&sender.sent());
    assert_success(&side.received());
    assert_eq!(mr.read(0, 12), b"to the other");
    // Remote keys are those of the queue pair.
    sender
        .qp
        .write(2, &[sender.mr.sge(0, 12)], side.mr.iova, side.mr.rkey)
        .unwrap();
    assert_success(&sender.sent());
    sender
        .qp
        .write(3, &[sender.mr.sge(0, 12)], mr.iova, mr.rkey)
        .unwrap();
    let cqe = sender.sent();
    assert_status(&cqe, wc_status::REM_ACCESS_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::KEY_PD);
    assert_event(&two.b, event_type::QP_ACCESS_ERR, qp.number());
    assert_event(&two.b, event_type::QP_LAST_WQE_REACHED, qp.number());
    // And those of the queue pair are none for the shared receive queue.
    let (sender, _qp) = connect();
    srq.post_recv(4, &[side.mr.sge(0, 64)]).unwrap();
    sender.qp.send(1, &[sender.mr.sge(0, 12)]).unwrap();
    assert_status(&sender.sent(), wc_status::REM_OP_ERR);
    let cqe = side.received();
    assert_status(&cqe, wc_status::LOC_PROT_ERR);
    assert_eq!((cqe.wr_id, cqe.vendor_err), (4, vendor_err::KEY_PD));
}

// D-FLUSH-003.
#[test]
fn a_queue_pair_in_error_has_its_last_receive_behind_it() {
    let two = Two::with_all_types();
    let shared = Shared::new(&two, 2, &SrqOptions::default());
    for i in 0..4 {
        shared.post(i);
    }
    shared.assert_sends(0, 0);
    let qp = &shared.receivers[0];
    for _ in 0..3 {
        qp.set_state(qp_state::ERR).unwrap();
        assert_event(&two.b, event_type::QP_LAST_WQE_REACHED, qp.number());
        assert_no_event(&two.b);
        // Not the queue's receives are flushed, but its own sends.
        qp.send(1, &[]).unwrap();
        assert_status(&shared.side.sent(), wc_status::WR_FLUSH_ERR);
        shared.side.assert_quiet();
        qp.set_state(qp_state::RESET).unwrap();
        qp.connect(&Connection::to(&shared.senders[0].qp)).unwrap();
    }
    shared.assert_sends(1, 1);
    shared.assert_sends(0, 2);
    // The same after an error of its own.
    let sender = &shared.senders[0];
    sender
        .qp
        .write(1, &[sender.mr.sge(0, 8)], shared.side.mr.iova, 0)
        .unwrap();
    assert_status(&sender.sent(), wc_status::REM_ACCESS_ERR);
    assert_event(&two.b, event_type::QP_ACCESS_ERR, qp.number());
    assert_event(&two.b, event_type::QP_LAST_WQE_REACHED, qp.number());
    shared.assert_sends(1, 3);
}

// D-SRQ-008.
#[test]
fn a_bad_entry_is_the_error_of_the_queue_pair_that_takes_it() {
    let two = Two::with_all_types();
    type Spoil = fn(&Shared);
    let cases: [(Spoil, u8, u8, u8); 5] = [
        (
            |shared| {
                let bad = Sge {
                    lkey: 0,
                    ..shared.sge(0)
                };
                shared.srq.post_recv(7, &[bad]).unwrap();
            },
            wc_status::REM_OP_ERR,
            wc_status::LOC_PROT_ERR,
            vendor_err::KEY_UNKNOWN,
        ),
        (
            |shared| {
                shared
                    .srq
                    .post_recv(7, &[shared.side.mr.sge(0, 7)])
                    .unwrap()
            },
            wc_status::REM_INV_REQ_ERR,
            wc_status::LOC_LEN_ERR,
            vendor_err::RECV_TOO_SHORT,
        ),
        (
            |shared| store(shared, 0x8000 | 5 << 16),
            wc_status::REM_OP_ERR,
            wc_status::LOC_QP_OP_ERR,
            vendor_err::BAD_RECEIVE,
        ),
        (
            |shared| store(shared, 0x8100 | 1 << 16),
            wc_status::REM_OP_ERR,
            wc_status::LOC_QP_OP_ERR,
            vendor_err::BAD_RECEIVE,
        ),
        (
            |shared| store(shared, 0x8000 | 1 << 16 | 1 << 40),
            wc_status::REM_OP_ERR,
            wc_status::LOC_QP_OP_ERR,
            vendor_err::BAD_RECEIVE,
        ),
    ];
    for (spoil, remote, local, reason) in cases {
        let shared = Shared::new(&two, 2, &SrqOptions::default());
        spoil(&shared);
        shared.send(0, 8);
        assert_status(&shared.senders[0].sent(), remote);
        let cqe = shared.side.received();
        assert_status(&cqe, local);
        assert_eq!((cqe.wr_id, cqe.qp_num), (7, shared.receivers[0].number()));
        assert_eq!(vendor_err::name(cqe.vendor_err), vendor_err::name(reason));
        assert_reaches(&shared.receivers[0], qp_state::ERR);
        assert_event(
            &two.b,
            event_type::QP_LAST_WQE_REACHED,
            shared.receivers[0].number(),
        );
        // The other goes on.
        if shared.srq.queue().room() == 64 {
            // (What was written past the core counts for nobody.)
            continue;
        }
        shared.post(1);
        shared.assert_sends(1, 1);
    }
}

/// Writes an entry past the driver's core: the ring starts at 128.
fn store(shared: &Shared, head: u64) {
    let memory = shared.srq.memory();
    memory.u64(128 + 8).store(7u64.to_le(), Ordering::Relaxed);
    memory.u64(128).store(head.to_le(), Ordering::Release);
}

// D-SRQ-007.
#[test]
fn a_ring_that_is_gone_is_told_once() {
    let two = Two::with_all_types();
    let region = two.b.add_memory(1 << 20).unwrap();
    let options = SrqOptions {
        region,
        ..SrqOptions::default()
    };
    let shared = Shared::new(&two, 2, &options);
    shared.post(0);
    shared.assert_sends(0, 0);
    two.b.remove_memory(region).unwrap();
    for i in 0..2 {
        // What needs no receive does not mind.
        let sender = &shared.senders[i];
        let mr = &shared.side.mr;
        sender
            .qp
            .write(1, &[sender.mr.sge(0, 8)], mr.iova, mr.rkey)
            .unwrap();
        assert_success(&sender.sent());
        shared.send(i, 8);
        let cqe = sender.sent();
        assert_status(&cqe, wc_status::REM_OP_ERR);
        assert_eq!(cqe.vendor_err, vendor_err::MEMORY_GONE);
        if i == 0 {
            assert_event(&two.b, event_type::SRQ_ERR, shared.srq.number());
        }
        let qpn = shared.receivers[i].number();
        assert_event(&two.b, event_type::QP_FATAL, qpn);
        assert_event(&two.b, event_type::QP_LAST_WQE_REACHED, qpn);
    }
    assert_no_event(&two.b);
    two.b.replug_memory(region).unwrap();
}

// D-RSS-001, G-RSS-001.
#[test]
fn entries_move_to_another_ring_in_their_order() {
    let two = Two::with_all_types();
    let shared = Shared::new(&two, 2, &SrqOptions::default());
    let size = || {
        (
            shared.srq.query().unwrap().entries,
            shared.srq.queue().room(),
        )
    };
    // Smaller, larger and the same, with none, some and all of the entries posted, for several
    // laps.
    let mut next = 0;
    let mut pending = std::collections::VecDeque::new();
    let steps = [
        (10, 3, 16),
        (9, 0, 16),
        (0, 16, 1),
        (1, 0, 64),
        (63, 40, 32),
        (8, 0, 32),
        (0, 32, 64),
    ];
    for (post, take, entries) in steps {
        for _ in 0..post {
            shared.post(next % 64);
            pending.push_back(next % 64);
            next += 1;
        }
        for i in 0..take {
            shared.assert_sends(i % 2, pending.pop_front().unwrap());
        }
        shared.srq.resize(entries, None, 0).unwrap();
        assert_eq!(size(), (entries, entries - pending.len() as u32));
    }
    for wr_id in 0..200 {
        shared.post(wr_id % 64);
        shared.assert_sends(0, wr_id % 64);
    }
    // Under traffic: each one once, in the order of the queue.
    let mut posted = 0u64;
    for (received, round) in (0..600).enumerate() {
        if round % 5 == 0 {
            shared
                .srq
                .resize([64, 128, 256][round / 5 % 3], None, 0)
                .unwrap();
        }
        while posted < received as u64 + 40 {
            shared.post(posted % 64);
            posted += 1;
        }
        shared.send(0, 8);
        let cqe = shared.side.received();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, received as u64 % 64);
        assert_success(&shared.senders[0].sent());
    }
}

#[test]
fn a_size_that_cannot_be_changes_nothing() {
    // D-CMD-004.
    let two = Two::with_all_types();
    let options = SrqOptions {
        limit: 5,
        ..SrqOptions::default()
    };
    let shared = Shared::new(&two, 1, &options);
    for i in 0..10 {
        shared.post(i);
    }
    let buffer = two.b.buffer(16384, Placement::Scattered).unwrap();
    let (pages, _tables) = buffer.page_list().unwrap();
    let refused = |expected, change: &dyn Fn(&mut command::ResizeSrq)| {
        let mut body = command::ResizeSrq {
            srqn: shared.srq.number(),
            entries: 32,
            ring_offset: 128,
            buffer: pages,
            ..command::ResizeSrq::default()
        };
        change(&mut body);
        assert_refused(two.b.execute::<ResizeSrq>(&body), expected);
    };
    refused(status::ENOENT, &|b| b.srqn += 1);
    for entries in [0, 3, 8, MAX_WQ_ENTRIES * 2, u32::MAX] {
        refused(status::EINVAL, &|b| b.entries = entries);
    }
    for offset in [0, 64, 192, 16384] {
        refused(status::EINVAL, &|b| b.ring_offset = offset);
    }
    refused(status::EINVAL, &|b| b.flags = 2);
    refused(status::EINVAL, &|b| (b.flags, b.limit) = (1, 33));
    refused(status::EINVAL, &|b| b.reserved0 = 1);
    refused(status::EINVAL, &|b| b.reserved1 = 1);
    refused(status::EINVAL, &|b| b.buffer.count = 0);
    refused(status::EFAULT, &|b| b.buffer.addr = 1 << 50);
    let attributes = shared.srq.query().unwrap();
    assert_eq!((attributes.entries, attributes.limit), (64, 5));
    for i in 0..3 {
        shared.assert_sends(0, i);
    }
    // The limit that is armed must fit as well.
    shared.srq.resize(8, Some(8), 0).unwrap();
    for i in 3..9 {
        shared.assert_sends(0, i);
    }
    assert_event(&two.b, event_type::SRQ_LIMIT_REACHED, shared.srq.number());
    shared.srq.set_limit(5).unwrap();
    let refused = shared.srq.resize(4, None, 0).unwrap_err();
    assert_eq!(refused.status(), Some(status::EINVAL));
    shared.srq.resize(4, Some(0), 0).unwrap();
    let attributes = shared.srq.query().unwrap();
    assert_eq!((attributes.entries, attributes.limit), (4, 0));
    shared.assert_sends(0, 9);
    // A ring that is gone cannot be moved.
    let region = two.b.add_memory(1 << 20).unwrap();
    shared.srq.resize(4, None, region).unwrap();
    two.b.remove_memory(region).unwrap();
    let refused = shared.srq.resize(8, None, 0).unwrap_err();
    assert_eq!(refused.status(), Some(status::EFAULT));
    two.b.replug_memory(region).unwrap();
    shared.srq.resize(8, None, 0).unwrap();
    shared.post(1);
    shared.assert_sends(0, 1);
}

#[test]
fn the_limit_counts_on_in_another_ring() {
    // D-SRQ-006.
    let two = Two::with_all_types();
    let options = SrqOptions {
        limit: 3,
        ..SrqOptions::default()
    };
    let shared = Shared::new(&two, 1, &options);
    for i in 0..5 {
        shared.post(i);
    }
    shared.assert_sends(0, 0);
    shared.srq.resize(8, None, 0).unwrap();
    shared.assert_sends(0, 1);
    assert_no_event(&two.b);
    shared.assert_sends(0, 2);
    assert_event(&two.b, event_type::SRQ_LIMIT_REACHED, shared.srq.number());
}

// D-RSS-002.
#[test]
fn who_waits_for_a_receive_waits_on_at_another_ring() {
    let two = Two::with_all_types();
    let shared = Shared::connect(&two, 3, &SrqOptions::default(), |c| {
        c.rnr_retry = 7;
        c.min_rnr_timer = 0;
    });
    let mut times = Vec::new();
    for round in 0..5 {
        for i in 0..3 {
            shared.send(i, 8);
        }
        shared.side.assert_quiet();
        shared.srq.resize(16 << (round % 2), None, 0).unwrap();
        let start = Instant::now();
        for i in 0..3 {
            shared.post(i);
            assert_success(&shared.side.received());
        }
        times.push(start.elapsed());
        for sender in &shared.senders {
            assert_success(&sender.sent());
        }
    }
    assert_soon(times);
}

#[test]
fn stop_reset_and_loss_are_survived() {
    let two = Two::with_all_types();
    let shared = Shared::new(&two, 3, &SrqOptions::default());
    two.b.stop().unwrap();
    for i in 0..3 {
        shared.send(i, 8);
    }
    std::thread::sleep(NOTHING);
    assert_eq!(shared.senders[0].send_cq.poll(), None);
    for i in 0..3 {
        // Posted while it is stopped: nobody looks before it runs.
        shared.post(i);
    }
    two.b.start().unwrap();
    for sender in &shared.senders {
        assert_success(&sender.sent());
        assert_success(&shared.side.received());
    }
    // Senders wait for receives of a VM that is reset.
    for i in 0..3 {
        shared.send(i, 8);
    }
    std::thread::sleep(NOTHING);
    two.b.reset().unwrap();
    for sender in &shared.senders {
        sender.qp.set_state(qp_state::ERR).unwrap();
        assert_status(&sender.sent(), wc_status::WR_FLUSH_ERR);
    }
    let again = Shared::new(&two, 1, &SrqOptions::default());
    again.post(0);
    again.assert_sends(0, 0);
}

// D-QP-001.
#[test]
fn slots_beyond_those_of_the_root_word_ring_as_well() {
    let two = Two::of(&["--poll-us", "0"], &all_types());
    let sender = Side::new(&two.a, &SideOptions::default());
    let side = Side::new(&two.b, &SideOptions::default());
    let small = SrqOptions {
        max_wr: 2,
        max_sge: 1,
        ..SrqOptions::default()
    };
    let options = QpOptions {
        caps: caps(2, 1, 0),
        ..QpOptions::default()
    };
    let mut slots = HashSet::from([side.qp.slot()]);
    let mut times = Vec::new();
    let mut all = Vec::new();
    for _ in 0..90 {
        let srq = Srq::new(&side.context, &side.pd, &small).unwrap();
        let uses = Uses {
            context: Some(&side.context),
            pd: Some(&side.pd),
            send_cq: Some(&side.send_cq),
            recv_cq: Some(&side.recv_cq),
            srq: Some(&srq),
            xrcd: None,
        };
        let qp = Qp::create(&two.b, &uses, &options).unwrap();
        assert!(slots.insert(srq.slot()) && slots.insert(qp.slot()));
        all.push((srq, qp));
    }
    assert!(slots.iter().any(|slot| *slot >= 128), "{slots:?}");
    for (i, (srq, qp)) in (0u64..).zip(&all) {
        sender.qp.set_state(qp_state::RESET).unwrap();
        let to = Connection {
            min_rnr_timer: 0,
            ..Connection::to(qp)
        };
        sender.qp.connect(&to).unwrap();
        let back = Connection {
            min_rnr_timer: 0,
            ..Connection::to(&sender.qp)
        };
        qp.connect(&back).unwrap();
        sender.qp.send(i, &[sender.mr.sge(0, 8)]).unwrap();
        let waited = Instant::now() + TIMEOUT;
        while srq.memory().u64(0).load(Ordering::SeqCst) as u32 == 0 {
            assert!(Instant::now() < waited, "nobody waits");
            std::thread::yield_now();
        }
        let start = Instant::now();
        srq.post_recv(i, &[side.mr.sge(0, 8)]).unwrap();
        assert_success(&sender.sent());
        times.push(start.elapsed());
        let cqe = side.received();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.qp_num), (i, qp.number()));
        qp.write(i, &[side.mr.sge(0, 8)], sender.mr.iova, sender.mr.rkey)
            .unwrap();
        assert_success(&side.sent());
        qp.set_state(qp_state::ERR).unwrap();
    }
    assert_soon(times);
}

// D-SRQ-004.
#[test]
fn random_entries_do_no_harm() {
    let mut two = Two::with_all_types();
    let witness = Pair::new(&two.a, &two.b);
    let shared = Shared::new(&two, 1, &SrqOptions::default());
    let (iova, lkey) = (shared.side.mr.iova, shared.side.mr.lkey);
    let sge = (
        prop_oneof![4 => Just(iova), 1 => any::<u64>()],
        prop_oneof![6 => 0u32..300, 1 => any::<u32>()],
        prop_oneof![6 => Just(lkey), 1 => any::<u32>()],
    );
    let entry = (
        prop_oneof![8 => Just(0u8), 1 => any::<u8>()],
        prop_oneof![8 => Just(0x80u8), 1 => any::<u8>()],
        prop_oneof![6 => 0u16..5, 1 => any::<u16>()],
        prop_oneof![8 => Just(0u32), 1 => any::<u32>()],
        prop::collection::vec(sge, 4),
    );
    let record = prop::collection::vec(prop_oneof![Just(0u32), any::<u32>()], 32);
    let strategy = (prop::collection::vec(entry, 1..6), record);
    let mut runner = TestRunner::new(Config {
        cases: 60,
        ..Config::default()
    });
    let result = runner.run(&strategy, |(entries, record)| {
        let srq = Srq::new(
            &shared.side.context,
            &shared.side.pd,
            &SrqOptions {
                limit: 2,
                ..SrqOptions::default()
            },
        )
        .unwrap();
        let memory = srq.memory();
        for (i, (reserved0, flags, count, reserved1, sges)) in entries.iter().enumerate() {
            // Entries of 128 bytes, at offset 128.
            let at = 128 + 128 * i;
            let wqe = RecvWqe {
                reserved0: *reserved0,
                flags: *flags,
                count: *count,
                reserved1: *reserved1,
                wr_id: i as u64,
            };
            memory.write(at, &wqe.to_bytes());
            for (j, (addr, length, lkey)) in sges.iter().enumerate() {
                let sge = Sge {
                    addr: *addr,
                    length: *length,
                    lkey: *lkey,
                };
                memory.write(at + 16 + 16 * j, &sge.to_bytes());
            }
        }
        for (i, word) in record.iter().enumerate() {
            memory.write(4 * i, &word.to_le_bytes());
        }
        let sender = &shared.senders[0];
        for _ in 0..entries.len() + 1 {
            let qp = with_srq(&two.b, &shared.side, &shared.side.pd, &srq);
            sender.qp.set_state(qp_state::RESET).unwrap();
            let to = Connection {
                rnr_retry: 0,
                ..Connection::to(&qp)
            };
            sender.qp.connect(&to).unwrap();
            qp.connect(&Connection::to(&sender.qp)).unwrap();
            sender.qp.send(1, &[sender.mr.sge(0, 100)]).unwrap();
            let sent = sender.sent();
            assert!(wc_status::name(sent.status).is_some(), "{sent:?}");
            if sent.status == wc_status::RNR_RETRY_EXC_ERR {
                break;
            }
            let received = shared.side.received();
            assert_eq!(
                sent.status == wc_status::SUCCESS,
                received.status == wc_status::SUCCESS
            );
            drop(qp);
            srq.ring().unwrap();
        }
        while two.b.wait_async_event(Duration::ZERO).unwrap().is_some() {}
        Ok(())
    });
    result.unwrap();
    assert_works(&witness);
    two.assert_unharmed();
}
