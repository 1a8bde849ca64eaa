// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! XRC: queue pairs of one direction, and the shared receive queues that messages name.
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::core::command::{self, CreateXrcd, DestroySrq, DestroyXrcd};
use vhost_device_rdma_bare::spec::command::{opcode, status, CommandHeader, CreateQp, Handle};
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, qp_type, vendor_err, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, Mr, Pd, Qp, QpOptions, Srq, SrqOptions, Uses, Vm, Xrcd, PAGE,
};

use crate::common::{
    all_types, assert_event, assert_no_event, assert_reaches, assert_refused, assert_soon,
    assert_status, assert_success, assert_works, pattern, process, vm, Pair, Side, SideOptions,
    Two, ALL, TIMEOUT,
};

/// An initiator with all it needs.
fn initiator(vm: &Arc<Vm>) -> Side {
    Side::with(vm, |vm, uses| {
        let uses = Uses {
            recv_cq: None,
            ..uses
        };
        Qp::create(vm, &uses, &QpOptions::of(qp_type::XRC_INI)).unwrap()
    })
}

/// A process of the target's VM: a shared receive queue of the domain with its own completion
/// queue, PD and memory.
struct Server {
    srq: Arc<Srq>,
    mr: Mr,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
    context: Arc<Context>,
}

impl Server {
    fn new(vm: &Arc<Vm>, domain: &Arc<Xrcd>) -> Self {
        let context = Context::new(vm).unwrap();
        let pd = Pd::new(vm).unwrap();
        let cq = Cq::new(vm, 256, 1).unwrap();
        let srq = Srq::xrc(&context, &pd, domain, &cq, &SrqOptions::default()).unwrap();
        let mr = pd.register(1 << 20, ALL).unwrap();
        Self {
            srq,
            mr,
            cq,
            pd,
            context,
        }
    }

    fn post(&self, wr_id: u64) {
        let sge = self.mr.sge(wr_id * 1000, 1000);
        self.srq.post_recv(wr_id, &[sge]).unwrap();
    }

    #[track_caller]
    fn assert_receives(&self, target: &Qp, wr_id: u64, len: u32) {
        let cqe = self.cq.wait(TIMEOUT).expect("a receive completion");
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.byte_len), (wr_id, len));
        assert_eq!(cqe.qp_num, target.number());
    }

    fn assert_quiet(&self) {
        std::thread::sleep(crate::common::NOTHING);
        assert_eq!(self.cq.poll(), None);
    }
}

/// An initiator and a target that are connected, and the target's domain.
struct Xrc {
    a: Side,
    target: Qp,
    domain: Arc<Xrcd>,
}

fn connect(a: &Qp, target: &Qp, change: impl Fn(&mut Connection)) {
    for (from, to) in [(a, target), (target, a)] {
        let mut connection = Connection::to(to);
        change(&mut connection);
        from.connect(&connection).unwrap();
    }
}

impl Xrc {
    fn new(two: &Two) -> Self {
        Self::with(two, |_| ())
    }

    fn with(two: &Two, change: impl Fn(&mut Connection)) -> Self {
        let domain = Xrcd::new(&two.b).unwrap();
        let target = Qp::xrc_target(&domain).unwrap();
        let a = initiator(&two.a);
        connect(&a.qp, &target, change);
        Self { a, target, domain }
    }

    fn wqe(&self, opcode: u8, server: &Server) -> SendWqe {
        SendWqe {
            opcode,
            srqn: server.srq.number(),
            remote_addr: server.mr.iova,
            rkey: server.mr.rkey,
            wr_id: 3,
            ..SendWqe::default()
        }
    }

    #[track_caller]
    fn assert_sends(&self, server: &Server, wr_id: u64) {
        let a = &self.a;
        a.qp.post_send(&self.wqe(wr_opcode::SEND, server), &[a.mr.sge(0, 10)])
            .unwrap();
        assert_success(&a.sent());
        server.assert_receives(&self.target, wr_id, 10);
    }

    /// The message fails like this at the initiator; the target is in error.
    #[track_caller]
    fn assert_fails(&self, wqe: SendWqe, status: u8, reason: u8) {
        let a = &self.a;
        a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
        let cqe = a.sent();
        assert_status(&cqe, status);
        assert_eq!(vendor_err::name(cqe.vendor_err), vendor_err::name(reason));
        assert_reaches(&a.qp, qp_state::ERR);
        assert_reaches(&self.target, qp_state::ERR);
    }
}

// D-XRC-001, D-XRC-003.
#[test]
fn messages_go_to_the_shared_receive_queue_that_they_name() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let servers = [
        Server::new(&two.b, &xrc.domain),
        Server::new(&two.b, &xrc.domain),
    ];
    let a = &xrc.a;
    for size in [0u32, 1, 100, 1000] {
        for (i, server) in servers.iter().enumerate() {
            let data = pattern(u64::from(size) + i as u64, size as usize);
            a.mr.write(0, &data);
            for opcode in [
                wr_opcode::SEND,
                wr_opcode::SEND_WITH_IMM,
                wr_opcode::RDMA_WRITE_WITH_IMM,
            ] {
                server.mr.write(0, &[0; 1000]);
                server.post(0);
                let wqe = SendWqe {
                    imm: 99,
                    ..xrc.wqe(opcode, server)
                };
                a.qp.post_send(&wqe, &[a.mr.sge(0, size)]).unwrap();
                assert_success(&a.sent());
                let cqe = server.cq.wait(TIMEOUT).unwrap();
                assert_success(&cqe);
                assert_eq!((cqe.wr_id, cqe.byte_len), (0, size));
                assert_eq!(
                    (cqe.qp_num, cqe.src_qp),
                    (xrc.target.number(), a.qp.number())
                );
                let with_imm = opcode != wr_opcode::SEND;
                assert_eq!(cqe.imm, if with_imm { 99 } else { 0 });
                let write = opcode == wr_opcode::RDMA_WRITE_WITH_IMM;
                let expected = if write {
                    wc_opcode::RECV_RDMA_WITH_IMM
                } else {
                    wc_opcode::RECV
                };
                assert_eq!(cqe.opcode, expected);
                assert_eq!(server.mr.read(0, size as usize), data);
            }
        }
    }
    for server in &servers {
        server.assert_quiet();
    }
    assert_no_event(&two.b);
}

#[test]
fn rdma_is_checked_against_the_pd_of_the_shared_receive_queue() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let servers = [
        Server::new(&two.b, &xrc.domain),
        Server::new(&two.b, &xrc.domain),
    ];
    let a = &xrc.a;
    let data = pattern(1, 300_000);
    a.mr.write(0, &data);
    for server in &servers {
        a.qp.post_send(
            &xrc.wqe(wr_opcode::RDMA_WRITE, server),
            &[a.mr.sge(0, 300_000)],
        )
        .unwrap();
        assert_success(&a.sent());
        assert_eq!(server.mr.read(0, 300_000), data);
        a.qp.post_send(
            &xrc.wqe(wr_opcode::RDMA_READ, server),
            &[a.mr.sge(400_000, 300_000)],
        )
        .unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.byte_len, 300_000);
        assert_eq!(a.mr.read(400_000, 300_000), data);
    }
    for opcode in [wr_opcode::RDMA_WRITE, wr_opcode::RDMA_READ] {
        let xrc = Xrc::new(&two);
        let [one, other] = [0, 1].map(|_| Server::new(&two.b, &xrc.domain));
        let wqe = SendWqe {
            srqn: other.srq.number(),
            ..xrc.wqe(opcode, &one)
        };
        xrc.assert_fails(wqe, wc_status::REM_ACCESS_ERR, vendor_err::KEY_PD);
        assert_event(&two.b, event_type::QP_ACCESS_ERR, xrc.target.number());
        one.assert_quiet();
        other.assert_quiet();
    }
    // And the flags of the target.
    let xrc = Xrc::with(&two, |c| c.access = access::REMOTE_READ);
    let server = Server::new(&two.b, &xrc.domain);
    let wqe = xrc.wqe(wr_opcode::RDMA_WRITE, &server);
    xrc.assert_fails(wqe, wc_status::REM_INV_REQ_ERR, vendor_err::QP_ACCESS);
}

// D-XRC-001.
#[test]
fn a_message_must_name_a_shared_receive_queue_of_the_domain() {
    let two = Two::with_all_types();
    let basic = {
        let context = Context::new(&two.b).unwrap();
        let pd = Pd::new(&two.b).unwrap();
        Srq::new(&context, &pd, &SrqOptions::default()).unwrap()
    };
    let other_domain = Xrcd::new(&two.b).unwrap();
    let elsewhere = Server::new(&two.b, &other_domain);
    elsewhere.post(0);
    let gone = Server::new(&two.b, &other_domain).srq.number();
    for srqn in [
        0,
        u32::MAX,
        0x00ff_ffff,
        basic.number(),
        elsewhere.srq.number(),
        gone,
    ] {
        for opcode in [wr_opcode::SEND, wr_opcode::RDMA_WRITE, wr_opcode::RDMA_READ] {
            let xrc = Xrc::new(&two);
            let server = Server::new(&two.b, &xrc.domain);
            server.post(0);
            let wqe = SendWqe {
                srqn,
                ..xrc.wqe(opcode, &server)
            };
            xrc.assert_fails(wqe, wc_status::REM_INV_REQ_ERR, vendor_err::SRQ);
            assert_event(&two.b, event_type::QP_REQ_ERR, xrc.target.number());
            assert_eq!(server.cq.poll(), None);
        }
    }
    elsewhere.assert_quiet();
}

// D-RQ-001.
#[test]
fn posting_wakes_who_waits() {
    for arguments in [&["--poll-us", "0", "--workers", "2"][..], &[]] {
        let two = Two::of(arguments, &all_types());
        let domain = Xrcd::new(&two.b).unwrap();
        let server = Server::new(&two.b, &domain);
        let all: Vec<(Side, Qp)> = (0..3)
            .map(|_| {
                let target = Qp::xrc_target(&domain).unwrap();
                let a = initiator(&two.a);
                connect(&a.qp, &target, |c| {
                    c.rnr_retry = 7;
                    c.min_rnr_timer = 0;
                });
                (a, target)
            })
            .collect();
        let mut times = Vec::new();
        for _ in 0..3 {
            for (a, _) in &all {
                let wqe = SendWqe {
                    opcode: wr_opcode::SEND,
                    srqn: server.srq.number(),
                    ..SendWqe::default()
                };
                a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
            }
            server.assert_quiet();
            let start = Instant::now();
            for i in 0..3 {
                server.post(i);
            }
            for (a, _) in &all {
                assert_success(&a.sent());
                assert_success(&server.cq.wait(TIMEOUT).unwrap());
            }
            times.push(start.elapsed());
        }
        assert_soon(times);
        // With one retry.
        let target = Qp::xrc_target(&domain).unwrap();
        let a = initiator(&two.a);
        connect(&a.qp, &target, |c| {
            c.rnr_retry = 1;
            c.min_rnr_timer = 16;
        });
        let wqe = SendWqe {
            opcode: wr_opcode::SEND,
            srqn: server.srq.number(),
            ..SendWqe::default()
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
        assert_status(&a.sent(), wc_status::RNR_RETRY_EXC_ERR);
        assert_eq!(target.state().unwrap(), qp_state::RTS);
    }
}

#[test]
fn a_bad_receive_is_told_in_the_completion_queue_of_its_queue() {
    let two = Two::with_all_types();
    for (from_end, length, remote, local) in [
        (64, 7, wc_status::REM_INV_REQ_ERR, wc_status::LOC_LEN_ERR),
        (7, 8, wc_status::REM_OP_ERR, wc_status::LOC_PROT_ERR),
    ] {
        let xrc = Xrc::new(&two);
        let server = Server::new(&two.b, &xrc.domain);
        let sge = server.mr.sge(server.mr.length - from_end, length);
        server.srq.post_recv(1, &[sge]).unwrap();
        server.post(2);
        let a = &xrc.a;
        a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &server), &[a.mr.sge(0, 8)])
            .unwrap();
        assert_status(&a.sent(), remote);
        let cqe = server.cq.wait(TIMEOUT).unwrap();
        assert_status(&cqe, local);
        assert_eq!((cqe.wr_id, cqe.qp_num), (1, xrc.target.number()));
        assert_reaches(&xrc.target, qp_state::ERR);
        // Others of the domain go on.
        let again = Qp::xrc_target(&xrc.domain).unwrap();
        a.qp.set_state(qp_state::RESET).unwrap();
        connect(&a.qp, &again, |_| ());
        a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &server), &[a.mr.sge(0, 8)])
            .unwrap();
        assert_success(&a.sent());
        server.assert_receives(&again, 2, 8);
        assert_no_event(&two.b);
    }
}

// D-XRC-002.
#[test]
fn a_target_keeps_no_protection_domain() {
    let two = Two::with_all_types();
    let domain = Xrcd::new(&two.b).unwrap();
    let of = |handle| Handle {
        handle,
        reserved: 0,
    };
    let create = |pd| {
        let body = CreateQp {
            qp_type: qp_type::XRC_TGT,
            xrcd: domain.handle(),
            pd,
            ..CreateQp::default()
        };
        two.b.execute::<command::CreateQp>(&body).unwrap().qpn
    };
    let first = Pd::new(&two.b).unwrap();
    let next = first.handle() + 1;
    let targets = [create(first.handle()), create(next)];
    let destroyed = two.b.execute::<command::DestroyPd>(&of(first.handle()));
    destroyed.unwrap();
    // Nor does it let go of one that it never had.
    let second = Pd::new(&two.b).unwrap();
    assert_eq!(second.handle(), next);
    let _mr = second.register(PAGE, ALL).unwrap();
    for target in targets {
        let destroyed = two.b.execute::<command::DestroyQp>(&of(target));
        destroyed.unwrap();
    }
    let refused = two.b.execute::<command::DestroyPd>(&of(next));
    assert_refused(refused, status::EBUSY);
}

// D-XRC-002.
#[test]
fn the_target_outlives_those_that_used_it() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    for round in 0..5 {
        let server = Server::new(&two.b, &xrc.domain);
        server.post(round);
        xrc.assert_sends(&server, round);
        // A domain in use stays.
        let domain = Handle {
            handle: xrc.domain.handle(),
            reserved: 0,
        };
        assert_refused(two.b.execute::<DestroyXrcd>(&domain), status::EBUSY);
        // So do the CQ and PD of a queue, but nothing keeps an XRC queue.
        for (opcode, handle) in [
            (opcode::DESTROY_CQ, server.cq.number()),
            (opcode::DESTROY_PD, server.pd.handle()),
            (opcode::DESTROY_CONTEXT, server.context.handle()),
        ] {
            let header = CommandHeader {
                opcode,
                reserved: 0,
                length: 16,
            };
            let handle = Handle {
                handle,
                reserved: 0,
            };
            let bytes = [&header.to_bytes()[..], &handle.to_bytes()].concat();
            let response = two.b.raw_command(&bytes, PAGE).unwrap();
            assert_eq!(u16::from(response[0]), status::EBUSY);
        }
    }
    let Xrc { a, target, domain } = xrc;
    let handle = Handle {
        handle: domain.handle(),
        reserved: 0,
    };
    drop(target);
    two.b.execute::<DestroyXrcd>(&handle).unwrap();
    assert_refused(two.b.execute::<DestroyXrcd>(&handle), status::ENOENT);
    drop((a, domain));
}

// D-SRQ-001.
#[test]
fn a_queue_that_is_destroyed_under_traffic_is_gone() {
    let two = Two::of(&["--workers", "2"], &all_types());
    for round in 0..20 {
        let xrc = Xrc::with(&two, |c| {
            c.rnr_retry = 7;
            c.min_rnr_timer = 12;
        });
        let server = Server::new(&two.b, &xrc.domain);
        let a = &xrc.a;
        let big = round % 2 == 0;
        if big {
            for i in 0..4 {
                let all = server.mr.sge(0, 1 << 20);
                server.srq.post_recv(i, &[all]).unwrap();
            }
        }
        for _ in 0..8 {
            let length = if big { 1 << 20 } else { 10 };
            a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &server), &[a.mr.sge(0, length)])
                .unwrap();
        }
        let srq = Handle {
            handle: server.srq.number(),
            reserved: 0,
        };
        two.b.execute::<DestroySrq>(&srq).unwrap();
        // Nothing of it completes any more, and who waits learns that it is gone.
        while server.cq.poll().is_some() {}
        loop {
            let cqe = a.sent();
            if cqe.status != wc_status::SUCCESS {
                assert_status(&cqe, wc_status::REM_INV_REQ_ERR);
                break;
            }
        }
        assert_eq!(server.cq.poll(), None);
    }
}

// D-RC-007.
#[test]
fn what_a_message_left_behind_is_for_its_queue() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let [one, other] = [0, 1].map(|_| Server::new(&two.b, &xrc.domain));
    let a = &xrc.a;
    let mut left_behind = 0;
    for round in 0..40u64 {
        one.srq
            .post_recv(round, &[one.mr.sge(0, 1 << 20); 4])
            .unwrap();
        other.post(0);
        // Many slices; the sender gives up somewhere among them, or before, or after.
        a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &one), &[a.mr.sge(0, 1 << 20); 4])
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 10));
        a.qp.set_state(qp_state::ERR).unwrap();
        let complete = a.sent().status == wc_status::SUCCESS;
        a.qp.set_state(qp_state::RESET).unwrap();
        a.qp.connect(&Connection::to(&xrc.target)).unwrap();
        if complete {
            one.assert_receives(&xrc.target, round, 4 << 20);
        } else {
            left_behind += u32::from(one.srq.queue().room() == 64);
        }
        xrc.assert_sends(&other, 0);
        if !complete {
            xrc.assert_sends(&one, round);
        }
    }
    println!("{left_behind} of 40 were left behind");
    one.assert_quiet();
    other.assert_quiet();
}

// D-FLUSH-003.
#[test]
fn only_queue_pairs_that_were_created_with_a_queue_have_a_last_receive() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let server = Server::new(&two.b, &xrc.domain);
    server.post(0);
    xrc.assert_sends(&server, 0);
    xrc.target.set_state(qp_state::ERR).unwrap();
    let pair = two.pair();
    pair.b.qp.set_state(qp_state::ERR).unwrap();
    assert_no_event(&two.b);
}

// D-SRQ-007.
#[test]
fn a_queue_of_a_domain_whose_ring_is_gone_is_told_once() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let server = Server::new(&two.b, &xrc.domain);
    let region = two.b.add_memory(1 << 20).unwrap();
    server.srq.resize(8, None, region).unwrap();
    two.b.remove_memory(region).unwrap();
    for round in 0..2 {
        let wqe = xrc.wqe(wr_opcode::SEND, &server);
        xrc.assert_fails(wqe, wc_status::REM_OP_ERR, vendor_err::MEMORY_GONE);
        if round == 0 {
            assert_event(&two.b, event_type::SRQ_ERR, server.srq.number());
        }
        assert_event(&two.b, event_type::QP_FATAL, xrc.target.number());
        for qp in [&xrc.a.qp, &xrc.target] {
            qp.set_state(qp_state::RESET).unwrap();
        }
        connect(&xrc.a.qp, &xrc.target, |_| ());
    }
    assert_no_event(&two.b);
}

// D-RSS-001.
#[test]
fn a_queue_of_a_domain_is_resized_with_what_was_left_behind() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let [one, other] = [0, 1].map(|_| Server::new(&two.b, &xrc.domain));
    for round in 0..20u64 {
        let (first, second) = (2 * round, 2 * round + 1);
        one.srq
            .post_recv(first, &[one.mr.sge(0, 1 << 20); 4])
            .unwrap();
        one.srq
            .post_recv(second, &[one.mr.sge(0, 1 << 20)])
            .unwrap();
        other.post(0);
        let a = &xrc.a;
        a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &one), &[a.mr.sge(0, 1 << 20); 4])
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 20));
        a.qp.set_state(qp_state::ERR).unwrap();
        let complete = a.sent().status == wc_status::SUCCESS;
        a.qp.set_state(qp_state::RESET).unwrap();
        a.qp.connect(&Connection::to(&xrc.target)).unwrap();
        if complete {
            one.assert_receives(&xrc.target, first, 4 << 20);
        }
        one.srq.resize(8 << (round % 4), None, 0).unwrap();
        xrc.assert_sends(&other, 0);
        if !complete {
            xrc.assert_sends(&one, first);
        }
        one.srq.resize(64, None, 0).unwrap();
        xrc.assert_sends(&one, second);
    }
    one.assert_quiet();
}

#[test]
fn a_receive_under_way_is_flushed_to_the_completion_queue_of_its_queue() {
    let two = Two::with_all_types();
    let mut flushed = 0;
    for round in 0..30u64 {
        let xrc = Xrc::new(&two);
        let server = Server::new(&two.b, &xrc.domain);
        server
            .srq
            .post_recv(1, &[server.mr.sge(0, 1 << 20); 4])
            .unwrap();
        server.post(2);
        let a = &xrc.a;
        a.qp.post_send(
            &xrc.wqe(wr_opcode::SEND, &server),
            &[a.mr.sge(0, 1 << 20); 4],
        )
        .unwrap();
        std::thread::sleep(Duration::from_micros(round * 10));
        xrc.target.set_state(qp_state::ERR).unwrap();
        xrc.target.query().unwrap();
        std::thread::sleep(Duration::from_millis(5));
        // Nothing, if it had not been taken.
        if let Some(cqe) = server.cq.poll() {
            assert_eq!(cqe.wr_id, 1);
            if cqe.status != wc_status::SUCCESS {
                assert_status(&cqe, wc_status::WR_FLUSH_ERR);
                assert_eq!(cqe.qp_num, xrc.target.number());
                flushed += 1;
            }
        }
        assert_eq!(server.cq.poll(), None);
    }
    println!("{flushed} of 30 were under way");
}

#[test]
fn a_full_completion_queue_of_a_queue_ends_the_target() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let context = Context::new(&two.b).unwrap();
    let pd = Pd::new(&two.b).unwrap();
    let cq = Cq::new(&two.b, 4, 1).unwrap();
    let srq = Srq::xrc(&context, &pd, &xrc.domain, &cq, &SrqOptions::default()).unwrap();
    let a = &xrc.a;
    let wqe = SendWqe {
        opcode: wr_opcode::SEND,
        srqn: srq.number(),
        ..SendWqe::default()
    };
    for i in 0..5 {
        srq.post_recv(i, &[]).unwrap();
        a.qp.post_send(&wqe, &[]).unwrap();
        a.sent();
    }
    assert_event(&two.b, event_type::CQ_ERR, cq.number());
    assert_reaches(&xrc.target, qp_state::ERR);
    // Another queue of the domain does not mind.
    let server = Server::new(&two.b, &xrc.domain);
    server.post(1);
    xrc.target.set_state(qp_state::RESET).unwrap();
    a.qp.set_state(qp_state::RESET).unwrap();
    connect(&a.qp, &xrc.target, |_| ());
    xrc.assert_sends(&server, 1);
}

#[test]
fn each_half_talks_to_its_other_half_only() {
    let two = Two::with_all_types();
    let domain = Xrcd::new(&two.b).unwrap();
    let quick = |c: Connection, kind| Connection {
        qp_type: kind,
        timeout: 10,
        retry_cnt: 1,
        ..c
    };
    // An initiator to an initiator, to an RC queue pair, and RC to a target.
    let b = initiator(&two.b);
    let rc = Side::new(&two.b, &SideOptions::default());
    let target = Qp::xrc_target(&domain).unwrap();
    let rc_a = Side::new(&two.a, &SideOptions::default());
    let (ini, of_rc) = (qp_type::XRC_INI, qp_type::RC);
    for (from, to, kind, kind_there) in [
        (&initiator(&two.a), &b.qp, ini, ini),
        (&initiator(&two.a), &rc.qp, ini, of_rc),
        (&rc_a, &target, of_rc, qp_type::XRC_TGT),
    ] {
        from.qp.connect(&quick(Connection::to(to), kind)).unwrap();
        to.connect(&quick(Connection::to(&from.qp), kind_there))
            .unwrap();
        from.qp
            .write(1, &[from.mr.sge(0, 8)], rc.mr.iova, rc.mr.rkey)
            .unwrap();
        assert_status(&from.sent(), wc_status::RETRY_EXC_ERR);
    }
}

#[test]
fn creating_is_checked() {
    let two = Two::with_all_types();
    let side = Side::new(&two.b, &SideOptions::default());
    let domain = Xrcd::new(&two.b).unwrap();
    let create = |body: &CreateQp| two.b.execute::<command::CreateQp>(body);
    let target = CreateQp {
        qp_type: qp_type::XRC_TGT,
        xrcd: domain.handle(),
        ..CreateQp::default()
    };
    let created = create(&target).unwrap();
    two.b
        .execute::<command::DestroyQp>(&Handle {
            handle: created.qpn,
            reserved: 0,
        })
        .unwrap();
    for (xrcd, expected) in [
        (0, status::EINVAL),
        (77, status::ENOENT),
        (u32::MAX, status::ENOENT),
    ] {
        assert_refused(create(&CreateQp { xrcd, ..target }), expected);
    }
    for spoil in [
        (|b: &mut CreateQp| b.sq_entries = 4) as fn(&mut CreateQp),
        |b| b.rq_entries = 4,
        |b| b.srq = 1,
        |b| b.flags = 2,
        |b| b.flags = 0x80,
        |b| b.reserved0 = 1,
        |b| b.reserved1[11] = 1,
    ] {
        let mut body = target;
        spoil(&mut body);
        assert_refused(create(&body), status::EINVAL);
    }
    // Others have no domain; an initiator no receives.
    let uses = Uses {
        context: Some(&side.context),
        pd: Some(&side.pd),
        send_cq: Some(&side.send_cq),
        recv_cq: Some(&side.recv_cq),
        srq: None,
        xrcd: Some(&domain),
    };
    for kind in [
        qp_type::RC,
        qp_type::UC,
        qp_type::UD,
        qp_type::GSI,
        qp_type::XRC_INI,
    ] {
        assert_refused(
            Qp::create(&two.b, &uses, &QpOptions::of(kind)),
            status::EINVAL,
        );
    }
    let uses = Uses { xrcd: None, ..uses };
    assert_refused(
        Qp::create(&two.b, &uses, &QpOptions::of(qp_type::XRC_INI)),
        status::EINVAL,
    );
    // An XRC queue is named by messages, not by queue pairs.
    let server = Server::new(&two.b, &domain);
    let uses = Uses {
        srq: Some(&server.srq),
        ..uses
    };
    assert_refused(
        Qp::create(&two.b, &uses, &QpOptions::default()),
        status::EINVAL,
    );
    // Without the feature there is nothing of it.
    let process = process(1);
    let plain = vm(process.socket(0));
    assert_refused(plain.execute::<CreateXrcd>(&[]), status::EOPNOTSUPP);
    let handle = Handle {
        handle: 1,
        reserved: 0,
    };
    assert_refused(plain.execute::<DestroyXrcd>(&handle), status::EOPNOTSUPP);
}

#[test]
fn stop_and_reset_are_survived() {
    let two = Two::with_all_types();
    let xrc = Xrc::new(&two);
    let server = Server::new(&two.b, &xrc.domain);
    let a = &xrc.a;
    two.b.stop().unwrap();
    a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &server), &[a.mr.sge(0, 8)])
        .unwrap();
    server.assert_quiet();
    server.post(0);
    two.b.start().unwrap();
    assert_success(&a.sent());
    server.assert_receives(&xrc.target, 0, 8);
    two.b.reset().unwrap();
    a.qp.set_state(qp_state::RESET).unwrap();
    a.qp.connect(&Connection {
        timeout: 10,
        retry_cnt: 0,
        ..Connection::to(&xrc.target)
    })
    .unwrap();
    a.qp.post_send(&xrc.wqe(wr_opcode::SEND, &server), &[a.mr.sge(0, 8)])
        .unwrap();
    assert_status(&a.sent(), wc_status::RETRY_EXC_ERR);
}

#[test]
fn random_messages_do_no_harm() {
    let mut two = Two::with_all_types();
    let witness = Pair::new(&two.a, &two.b);
    let domain = Xrcd::new(&two.b).unwrap();
    let servers = [
        Server::new(&two.b, &domain),
        Server::new(&two.b, &domain),
        Server::new(&two.b, &Xrcd::new(&two.b).unwrap()),
    ];
    let target = Qp::xrc_target(&domain).unwrap();
    let a = initiator(&two.a);
    let numbers = servers.each_ref().map(|server| server.srq.number());
    let keys = servers.each_ref().map(|server| server.mr.rkey);
    let iova = servers[0].mr.iova;
    let message = (
        prop_oneof![6 => 0u8..5, 1 => any::<u8>()],
        prop_oneof![8 => (0usize..2).prop_map(move |i| numbers[i]), 1 => Just(numbers[2]), 1 => any::<u32>()],
        prop_oneof![8 => (0usize..3).prop_map(move |i| keys[i]), 1 => any::<u32>()],
        prop_oneof![8 => Just(iova), 1 => any::<u64>()],
        0u32..2000,
    );
    let mut runner = TestRunner::new(Config {
        cases: 80,
        ..Config::default()
    });
    let result = runner.run(&prop::collection::vec(message, 1..12), |messages| {
        a.qp.set_state(qp_state::RESET).unwrap();
        target.set_state(qp_state::RESET).unwrap();
        connect(&a.qp, &target, |c| c.rnr_retry = 0);
        for (i, server) in (0u64..).zip(&servers) {
            while server.srq.queue().room() > 40 {
                server.post(i);
            }
        }
        for (opcode, srqn, rkey, remote_addr, length) in &messages {
            let wqe = SendWqe {
                opcode: *opcode,
                srqn: *srqn,
                rkey: *rkey,
                remote_addr: *remote_addr,
                ..SendWqe::default()
            };
            a.qp.post_send(&wqe, &[a.mr.sge(0, *length)]).unwrap();
        }
        for _ in &messages {
            let cqe = a.sent();
            assert!(wc_status::name(cqe.status).is_some(), "{cqe:?}");
        }
        for server in &servers {
            while let Some(cqe) = server.cq.poll() {
                assert_eq!(cqe.qp_num, target.number());
            }
        }
        while two.b.wait_async_event(Duration::ZERO).unwrap().is_some() {}
        Ok(())
    });
    result.unwrap();
    assert_eq!(servers[2].srq.queue().room(), 40);
    assert_works(&witness);
    two.assert_unharmed();
}
