// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every error completion, on both sides, and what becomes of the queue pairs.
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::{SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, send_flag, vendor_err, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, Mr, Pd, Qp, QpOptions, VmOptions, RECV_FLAG,
};

use crate::common::{
    assert_event, assert_no_event, assert_reaches, assert_status, assert_success, assert_works,
    caps, overflown_by_lists, pattern, Pair, Side, SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

fn write(remote_addr: u64, rkey: u32) -> SendWqe {
    SendWqe {
        opcode: wr_opcode::RDMA_WRITE,
        remote_addr,
        rkey,
        ..SendWqe::default()
    }
}

fn read(remote_addr: u64, rkey: u32) -> SendWqe {
    SendWqe {
        opcode: wr_opcode::RDMA_READ,
        ..write(remote_addr, rkey)
    }
}

const SEND: SendWqe = SendWqe {
    opcode: wr_opcode::SEND,
    flags: 0,
    count: 0,
    imm: 0,
    wr_id: 0,
    remote_addr: 0,
    rkey: 0,
    srqn: 0,
    operand0: 0,
    operand1: 0,
};

/// The side is in the error state, and everything posted there is flushed, before or after.
#[track_caller]
fn assert_in_error(side: &Side) {
    assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    side.qp
        .post_send(&SendWqe { wr_id: 77, ..SEND }, &[side.mr.sge(0, 1)])
        .unwrap();
    side.qp.post_recv(78, &[side.mr.sge(0, 1)]).unwrap();
    let flushed = side.sent();
    assert_status(&flushed, wc_status::WR_FLUSH_ERR);
    assert_eq!(flushed.wr_id, 77);
    assert_eq!(flushed.opcode & RECV_FLAG, 0);
    let flushed = side.received();
    assert_status(&flushed, wc_status::WR_FLUSH_ERR);
    assert_eq!(flushed.wr_id, 78);
    assert_eq!(flushed.opcode & RECV_FLAG, RECV_FLAG);
}

/// Posts `wqe` at side a; expects that the device refuses it there, and that the peer notices
/// nothing.
#[track_caller]
fn refused_locally(
    two: &Two,
    wqe: SendWqe,
    sges: impl Fn(&Side) -> Vec<Sge>,
    status: u8,
    reason: u8,
) {
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let wqe = SendWqe { wr_id: 7, ..wqe };
    a.qp.post_send(&wqe, &sges(a)).unwrap();
    a.qp.send(8, &[]).unwrap();
    let failed = a.sent();
    assert_status(&failed, status);
    assert_eq!(failed.wr_id, 7);
    assert_eq!(
        vendor_err::name(failed.vendor_err),
        vendor_err::name(reason)
    );
    let flushed = a.sent();
    assert_status(&flushed, wc_status::WR_FLUSH_ERR);
    assert_eq!(flushed.wr_id, 8);
    assert_in_error(a);
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
    b.assert_quiet();
}

// D-ERR-001, D-MR-002, D-OBJ-004.
#[test]
fn local_keys_are_checked() {
    let two = Two::new();
    let protection = |wqe: fn(&Side) -> SendWqe, sges: fn(&Side) -> Vec<Sge>, reason| {
        let side = Side::new(&two.b, &SideOptions::default());
        refused_locally(&two, wqe(&side), sges, wc_status::LOC_PROT_ERR, reason);
    };
    let send = |_: &Side| SEND;
    protection(
        send,
        |s| {
            vec![Sge {
                lkey: 0,
                ..s.mr.sge(0, 8)
            }]
        },
        vendor_err::KEY_UNKNOWN,
    );
    protection(
        send,
        |s| {
            vec![Sge {
                lkey: s.mr.lkey ^ 1,
                ..s.mr.sge(0, 8)
            }]
        },
        vendor_err::KEY_UNKNOWN,
    );
    protection(
        send,
        |s| {
            vec![Sge {
                lkey: u32::MAX,
                ..s.mr.sge(0, 8)
            }]
        },
        vendor_err::KEY_UNKNOWN,
    );
    protection(
        send,
        |s| vec![s.mr.sge(s.mr.length, 1)],
        vendor_err::KEY_RANGE,
    );
    protection(send, |s| vec![s.mr.sge(u64::MAX, 8)], vendor_err::KEY_RANGE);
    protection(
        send,
        |s| vec![s.mr.sge(1, s.mr.length as u32)],
        vendor_err::KEY_RANGE,
    );
    protection(
        send,
        |s| vec![s.mr.sge(0, 1), s.mr.sge(s.mr.length - 3, 4)],
        vendor_err::KEY_RANGE,
    );
    protection(
        |peer| write(peer.mr.iova, peer.mr.rkey),
        |s| {
            vec![Sge {
                addr: u64::MAX,
                ..s.mr.sge(0, 8)
            }]
        },
        vendor_err::KEY_RANGE,
    );
}

// D-ERR-001.
#[test]
fn local_regions_are_of_the_same_protection_domain_and_grant_writing() {
    let two = Two::new();
    let pair = two.pair();
    let other = Pd::new(&two.a).unwrap();
    let foreign = other.register(4096, ALL).unwrap();
    pair.a.qp.send(1, &[foreign.sge(0, 8)]).unwrap();
    let cqe = pair.a.sent();
    assert_status(&cqe, wc_status::LOC_PROT_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::KEY_PD);

    let pair = two.pair();
    let read_only = pair.a.pd.register(4096, access::REMOTE_READ).unwrap();
    // Reading from it is fine.
    pair.a
        .qp
        .write(1, &[read_only.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
    pair.a
        .qp
        .read(2, &[read_only.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    let cqe = pair.a.sent();
    assert_status(&cqe, wc_status::LOC_PROT_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::KEY_ACCESS);
    assert_in_error(&pair.a);
}

// D-MR-001.
#[test]
fn a_deregistered_key_is_gone() {
    let two = Two::new();
    let pair = two.pair();
    let mr = pair.a.pd.register(4096, ALL).unwrap();
    let sge = mr.sge(0, 8);
    mr.destroy().unwrap();
    pair.a.qp.send(1, &[sge]).unwrap();
    assert_status(&pair.a.sent(), wc_status::LOC_PROT_ERR);

    let pair = two.pair();
    let mr = pair.b.pd.register(4096, ALL).unwrap();
    let (iova, rkey) = (mr.iova, mr.rkey);
    mr.destroy().unwrap();
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 8)], iova, rkey)
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::REM_ACCESS_ERR);
}

// D-ERR-001, D-MR-002.
#[test]
fn a_message_of_many_pages_that_may_not_go_all_the_way_moves_nothing() {
    const LEN: u64 = 40_000;
    type At = fn(&Mr) -> (u64, u32);
    let good: At = |mr| (mr.length / 2 + 1, mr.lkey);
    let beyond: At = |mr| (mr.length - LEN + 1, mr.lkey);
    let stale: At = |mr| (0, mr.lkey ^ 1);
    let two = Two::new();
    for (ours, theirs, status) in [
        (beyond, good, wc_status::LOC_PROT_ERR),
        (stale, good, wc_status::LOC_PROT_ERR),
        (good, beyond, wc_status::REM_ACCESS_ERR),
        (good, stale, wc_status::REM_ACCESS_ERR),
    ] {
        for with in [write, read] {
            let pair = two.pair();
            let (a, b) = (&pair.a, &pair.b);
            let data = [a, b].map(|side| pattern(side.mr.iova, side.mr.length as usize));
            a.mr.write(0, &data[0]);
            b.mr.write(0, &data[1]);
            let ((offset, lkey), (remote, rkey)) = (ours(&a.mr), theirs(&b.mr));
            let sge = Sge {
                lkey,
                ..a.mr.sge(offset, LEN as u32)
            };
            a.qp.post_send(&with(b.mr.iova + remote, rkey), &[sge])
                .unwrap();
            assert_status(&a.sent(), status);
            for (side, data) in [a, b].into_iter().zip(&data) {
                assert!(side.mr.read(0, data.len()) == *data);
            }
        }
    }
}

// D-ERR-001, D-EXT-001.
#[test]
fn opcodes_that_do_not_exist_are_refused() {
    let two = Two::new();
    for opcode in [
        wr_opcode::LOCAL_INV,
        wr_opcode::BIND_MW,
        wr_opcode::SEND_WITH_INV,
        wr_opcode::REG_MR,
        10,
        13,
        31,
        33,
        127,
        128,
        255,
    ] {
        let wqe = SendWqe { opcode, ..SEND };
        refused_locally(
            &two,
            wqe,
            |s| vec![s.mr.sge(0, 8)],
            wc_status::LOC_QP_OP_ERR,
            vendor_err::OPCODE,
        );
    }
}

// D-ERR-001.
#[test]
fn flags_that_do_not_exist_are_refused() {
    let two = Two::new();
    for flags in [0x10, 0x20, 0x40] {
        let wqe = SendWqe { flags, ..SEND };
        refused_locally(
            &two,
            wqe,
            |s| vec![s.mr.sge(0, 8)],
            wc_status::LOC_QP_OP_ERR,
            vendor_err::FLAGS,
        );
    }
}

// D-ERR-001.
#[test]
fn a_message_is_not_longer_than_the_port_allows() {
    let two = Two::new();
    let big = 1u32 << 30;
    let sges = move |s: &Side| vec![s.mr.sge(0, big), s.mr.sge(0, big), s.mr.sge(0, 1)];
    refused_locally(
        &two,
        SEND,
        sges,
        wc_status::LOC_LEN_ERR,
        vendor_err::MESSAGE_LENGTH,
    );
    let max = |s: &Side| vec![s.mr.sge(0, u32::MAX); 4];
    refused_locally(
        &two,
        SEND,
        max,
        wc_status::LOC_LEN_ERR,
        vendor_err::MESSAGE_LENGTH,
    );
}

// D-ERR-001.
#[test]
fn an_entry_that_claims_more_than_the_queue_was_created_for_is_refused() {
    let two = Two::new();
    // What the driver core would not post: written over an entry of the ring.
    for (count, inline, status) in [
        (5u16, false, wc_status::LOC_QP_OP_ERR),
        (u16::MAX, false, wc_status::LOC_QP_OP_ERR),
        (129, true, wc_status::LOC_LEN_ERR),
        (u16::MAX, true, wc_status::LOC_LEN_ERR),
    ] {
        let pair = two.pair();
        let a = &pair.a;
        let flags = if inline { 8 } else { 0 };
        let head = u64::from(wr_opcode::SEND) | (0x80 | flags) << 8 | u64::from(count) << 16;
        // The send queue starts behind the record, at the first multiple of its stride.
        let offset = 256;
        a.qp.memory()
            .u64(offset)
            .store(head.to_le(), std::sync::atomic::Ordering::Release);
        a.qp.ring().unwrap();
        let cqe = a.sent();
        assert_status(&cqe, status);
        assert_eq!(cqe.vendor_err, vendor_err::TOO_LONG_ENTRY);
        assert_eq!(a.qp.state().unwrap(), qp_state::ERR);
    }
}

// D-ERR-001.
#[test]
fn a_queue_without_scatter_gather_entries_takes_none() {
    let two = Two::new();
    let options = SideOptions {
        qp: QpOptions {
            caps: caps(4, 0, 16),
            ..QpOptions::default()
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| {});
    let (a, b) = (&pair.a, &pair.b);
    // As above: all but the number of entries is good. The first multiple of this stride behind the
    // record is 64.
    let head = u64::from(wr_opcode::RDMA_WRITE) | 0x80 << 8 | 1 << 16;
    let key_and_length = u64::from(a.mr.lkey) << 32 | 8;
    let words = [
        head,
        7,
        b.mr.iova,
        b.mr.rkey.into(),
        0,
        0,
        a.mr.iova,
        key_and_length,
    ];
    for (i, word) in words.iter().enumerate().rev() {
        a.qp.memory()
            .u64(64 + 8 * i)
            .store(word.to_le(), std::sync::atomic::Ordering::Release);
    }
    a.qp.ring().unwrap();
    let cqe = a.sent();
    assert_status(&cqe, wc_status::LOC_QP_OP_ERR);
    assert_eq!((cqe.wr_id, cqe.vendor_err), (7, vendor_err::TOO_LONG_ENTRY));
    assert_eq!(a.qp.state().unwrap(), qp_state::ERR);
}

/// Posts `wqe` at side a; expects that the responder refuses it, with these consequences.
#[track_caller]
fn refused_remotely(
    two: &Two,
    pair: &Pair,
    wqe: SendWqe,
    status: u8,
    reason: u8,
    event: Option<u16>,
) {
    let (a, b) = (&pair.a, &pair.b);
    a.qp.post_send(&SendWqe { wr_id: 7, ..wqe }, &[a.mr.sge(0, 8)])
        .unwrap();
    let failed = a.sent();
    assert_status(&failed, status);
    assert_eq!(failed.wr_id, 7);
    assert_eq!(
        vendor_err::name(failed.vendor_err),
        vendor_err::name(reason)
    );
    match event {
        Some(event) => assert_event(&two.b, event, b.qp.number()),
        None => assert_no_event(&two.b),
    }
    assert_in_error(a);
    assert_in_error(b);
}

// D-ERR-001, D-MR-002, D-OBJ-004.
#[test]
fn remote_keys_are_checked() {
    let two = Two::new();
    let check = |wqe: &dyn Fn(&Side) -> SendWqe, reason| {
        let pair = two.pair();
        let event = Some(event_type::QP_ACCESS_ERR);
        let wqe = wqe(&pair.b);
        refused_remotely(&two, &pair, wqe, wc_status::REM_ACCESS_ERR, reason, event);
    };
    check(&|b| write(b.mr.iova, 0), vendor_err::KEY_UNKNOWN);
    check(
        &|b| write(b.mr.iova, b.mr.rkey ^ 1),
        vendor_err::KEY_UNKNOWN,
    );
    check(
        &|b| write(b.mr.iova, b.mr.rkey ^ 0x100),
        vendor_err::KEY_UNKNOWN,
    );
    check(
        &|b| write(b.mr.iova + b.mr.length - 7, b.mr.rkey),
        vendor_err::KEY_RANGE,
    );
    check(&|b| write(b.mr.iova - 1, b.mr.rkey), vendor_err::KEY_RANGE);
    check(&|b| write(u64::MAX - 3, b.mr.rkey), vendor_err::KEY_RANGE);
    check(
        &|b| read(b.mr.iova + b.mr.length - 7, b.mr.rkey),
        vendor_err::KEY_RANGE,
    );
    check(&|b| read(b.mr.iova, b.mr.rkey ^ 1), vendor_err::KEY_UNKNOWN);
}

// D-ERR-001, D-SEC-004.
#[test]
fn remote_regions_grant_what_they_were_registered_for() {
    let two = Two::new();
    let event = Some(event_type::QP_ACCESS_ERR);
    for (rights, wqe) in [
        (
            access::LOCAL_WRITE | access::REMOTE_READ,
            write as fn(u64, u32) -> SendWqe,
        ),
        (access::LOCAL_WRITE | access::REMOTE_WRITE, read),
        (0, read),
        (access::LOCAL_WRITE, write),
    ] {
        let pair = two.pair();
        let mr = pair.b.pd.register(4096, rights).unwrap();
        let wqe = wqe(mr.iova, mr.rkey);
        refused_remotely(
            &two,
            &pair,
            wqe,
            wc_status::REM_ACCESS_ERR,
            vendor_err::KEY_ACCESS,
            event,
        );
        assert_eq!(mr.read(0, 8), [0; 8]);
    }
    let pair = two.pair();
    let other = Pd::new(&two.b).unwrap();
    let mr = other.register(4096, ALL).unwrap();
    let wqe = write(mr.iova, mr.rkey);
    refused_remotely(
        &two,
        &pair,
        wqe,
        wc_status::REM_ACCESS_ERR,
        vendor_err::KEY_PD,
        event,
    );
}

// D-ERR-001, D-MOD-001.
#[test]
fn queue_pairs_grant_what_their_access_flags_say() {
    let two = Two::new();
    for (rights, wqe) in [
        (access::REMOTE_READ, write as fn(u64, u32) -> SendWqe),
        (access::REMOTE_WRITE, read),
    ] {
        let pair = two.pair_with(&SideOptions::default(), |c| c.access = rights);
        let wqe = wqe(pair.b.mr.iova, pair.b.mr.rkey);
        let event = Some(event_type::QP_REQ_ERR);
        refused_remotely(
            &two,
            &pair,
            wqe,
            wc_status::REM_INV_REQ_ERR,
            vendor_err::QP_ACCESS,
            event,
        );
    }
}

// D-ERR-001, D-MR-002, D-MOD-001, D-SEC-004.
#[test]
fn what_one_queue_pair_may_do_the_next_may_not() {
    let two = Two::new();
    let (a, b) = (&two.a, &two.b);
    let context = [a, b].map(|vm| Context::new(vm).unwrap());
    let pds = [a, b].map(|vm| [0, 1].map(|_| Pd::new(vm).unwrap()));
    let cqs = [a, b].map(|vm| Cq::new(vm, 1024, 0).unwrap());
    let size = 4096;
    let mrs =
        [0, 1].map(|vm: usize| [0, 1].map(|pd: usize| pds[vm][pd].register(size, ALL).unwrap()));
    let options = QpOptions {
        caps: caps(64, 1, 0),
        ..QpOptions::default()
    };
    let qp = |vm: usize, pd: usize| {
        Qp::new(&context[vm], &pds[vm][pd], &cqs[vm], &cqs[vm], &options).unwrap()
    };
    let both = access::REMOTE_WRITE | access::REMOTE_READ;
    // Protection domains of the two, what the second grants, and what becomes of WRITEs between
    // regions of the first of each.
    let cases = [
        (0, 0, both, wc_status::SUCCESS, vendor_err::NONE),
        (
            0,
            0,
            access::REMOTE_READ,
            wc_status::REM_INV_REQ_ERR,
            vendor_err::QP_ACCESS,
        ),
        (0, 0, both, wc_status::SUCCESS, vendor_err::NONE),
        (0, 1, both, wc_status::REM_ACCESS_ERR, vendor_err::KEY_PD),
        (0, 0, both, wc_status::SUCCESS, vendor_err::NONE),
        (1, 0, both, wc_status::LOC_PROT_ERR, vendor_err::KEY_PD),
        (0, 0, both, wc_status::SUCCESS, vendor_err::NONE),
    ];
    let qps = cases.map(|(ours, theirs, grants, ..)| {
        let (from, to) = (qp(0, ours), qp(1, theirs));
        from.connect(&Connection::to(&to)).unwrap();
        let back = Connection {
            access: grants,
            ..Connection::to(&from)
        };
        to.connect(&back).unwrap();
        (from, to)
    });
    let post = |n: usize, wqe: &SendWqe, from: &Mr| {
        let mut batch = qps[n].0.send_queue().batch();
        for wr_id in 0..16 {
            let wqe = SendWqe {
                wr_id,
                flags: send_flag::SIGNALED,
                ..*wqe
            };
            batch.push(&wqe, [from.sge(64 * n as u64, 64)]).unwrap();
        }
        batch.commit();
    };
    // The worker sleeps until the first rings, and by the time that it looks all have.
    let ring_all = || {
        std::thread::sleep(NOTHING);
        for (from, _) in &qps {
            from.ring().unwrap();
        }
    };
    // All of them have sent lists before.
    for (n, (ours, theirs, ..)) in cases.iter().enumerate() {
        let to = &mrs[1][*theirs];
        post(n, &read(to.iova, to.rkey), &mrs[0][*ours]);
    }
    ring_all();
    for _ in 0..16 * cases.len() {
        assert_success(&cqs[0].wait(TIMEOUT).unwrap());
    }
    for n in 0..cases.len() {
        let at = 64 * n as u64;
        mrs[0][0].write(at as usize, &[n as u8 + 1; 64]);
        let to = &mrs[1][0];
        post(n, &write(to.iova + at, to.rkey), &mrs[0][0]);
    }
    ring_all();
    let mut outcomes = cases.map(|_| Vec::new());
    for _ in 0..16 * cases.len() {
        let cqe = cqs[0].wait(TIMEOUT).unwrap();
        let n = qps.iter().position(|(qp, _)| qp.number() == cqe.qp_num);
        outcomes[n.unwrap()].push((cqe.wr_id, cqe.status, cqe.vendor_err));
    }
    for (n, (case, outcomes)) in cases.iter().zip(&outcomes).enumerate() {
        let (.., status, reason) = *case;
        let success = status == wc_status::SUCCESS;
        for (wr_id, outcome) in outcomes.iter().enumerate() {
            let expected = match wr_id {
                0 => (0, status, reason),
                _ if success => (wr_id as u64, status, reason),
                _ => (wr_id as u64, wc_status::WR_FLUSH_ERR, outcome.2),
            };
            assert_eq!(*outcome, expected, "of queue pair {n}");
        }
        let arrived = if success { n as u8 + 1 } else { 0 };
        assert_eq!(
            mrs[1][0].read(64 * n, 64),
            [arrived; 64],
            "of queue pair {n}"
        );
    }
}

// D-ERR-001.
#[test]
fn reads_need_a_responder_that_is_set_up_for_them() {
    let two = Two::new();
    let pair = Pair {
        a: Side::new(&two.a, &SideOptions::default()),
        b: Side::new(&two.b, &SideOptions::default()),
    };
    let usual = vhost_device_rdma_bare::Connection::to(&pair.b.qp);
    pair.a.qp.connect(&usual).unwrap();
    let none = vhost_device_rdma_bare::Connection {
        max_rd_atomic: 0,
        ..vhost_device_rdma_bare::Connection::to(&pair.a.qp)
    };
    pair.b.qp.connect(&none).unwrap();
    let wqe = read(pair.b.mr.iova, pair.b.mr.rkey);
    let event = Some(event_type::QP_REQ_ERR);
    refused_remotely(
        &two,
        &pair,
        wqe,
        wc_status::REM_INV_REQ_ERR,
        vendor_err::RD_ATOMIC,
        event,
    );
}

// D-ERR-001, D-FLUSH-002.
#[test]
fn a_receive_that_is_too_short_ends_both() {
    let two = Two::new();
    for size in [101u32, 70_000, 200_000] {
        let pair = two.pair();
        let (a, b) = (&pair.a, &pair.b);
        let room = if size > 100_000 { 150_000 } else { 100 };
        b.qp.post_recv(1, &[b.mr.sge(0, room)]).unwrap();
        b.qp.post_recv(2, &[b.mr.sge(0, room)]).unwrap();
        a.qp.send(3, &[a.mr.sge(0, size)]).unwrap();
        assert_status(&a.sent(), wc_status::REM_INV_REQ_ERR);
        let failed = b.received();
        assert_status(&failed, wc_status::LOC_LEN_ERR);
        assert_eq!(
            (failed.wr_id, failed.vendor_err),
            (1, vendor_err::RECV_TOO_SHORT)
        );
        let flushed = b.received();
        assert_status(&flushed, wc_status::WR_FLUSH_ERR);
        assert_eq!(flushed.wr_id, 2);
        assert_in_error(a);
        assert_in_error(b);
        // What lies behind the buffer is untouched.
        assert_eq!(b.mr.read(room as usize, 100), [0; 100]);
    }
}

// D-ERR-001.
#[test]
fn a_bad_receive_is_the_responders_error() {
    let two = Two::new();
    for bad in [
        |b: &Side| Sge {
            lkey: b.mr.lkey ^ 0x300,
            ..b.mr.sge(0, 64)
        },
        |b: &Side| b.mr.sge(b.mr.length - 1, 64),
    ] {
        let pair = two.pair();
        let (a, b) = (&pair.a, &pair.b);
        b.qp.post_recv(1, &[bad(b)]).unwrap();
        a.qp.send(2, &[a.mr.sge(0, 8)]).unwrap();
        assert_status(&a.sent(), wc_status::REM_OP_ERR);
        let failed = b.received();
        assert_status(&failed, wc_status::LOC_PROT_ERR);
        assert_eq!(failed.wr_id, 1);
        assert_in_error(a);
        assert_in_error(b);
    }
    // A region that grants no local write is no place to receive.
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let read_only = b.pd.register(4096, 0).unwrap();
    b.qp.post_recv(1, &[read_only.sge(0, 64)]).unwrap();
    a.qp.send(2, &[a.mr.sge(0, 8)]).unwrap();
    assert_status(&a.sent(), wc_status::REM_OP_ERR);
    assert_status(&b.received(), wc_status::LOC_PROT_ERR);
}

/// Sends into nowhere: completes by itself after the retries, and takes about as long as they do.
#[track_caller]
fn nobody_answers(a: &Side, retry_cnt: u32, timeout: u32) {
    let start = Instant::now();
    a.qp.send(1, &[a.mr.sge(0, 8)]).unwrap();
    let cqe = a.sent();
    assert_status(&cqe, wc_status::RETRY_EXC_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::NO_ANSWER);
    let expected = Duration::from_nanos(4096) * (1 << timeout) * (retry_cnt + 1);
    let took = start.elapsed();
    assert!(took >= expected, "{took:?} of {expected:?}");
    // Much longer would be a wake-up that was lost; a bit longer is a machine with other things to
    // do.
    assert!(
        took < expected * 4 + Duration::from_secs(10),
        "{took:?} of {expected:?}"
    );
    assert_in_error(a);
}

#[test]
fn a_receive_need_not_be_accessible_where_the_message_does_not_reach() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let end = b.mr.length - 100;
    let unknown = Sge {
        lkey: b.mr.lkey ^ 1,
        ..b.mr.sge(0, 64)
    };
    a.mr.write(0, &[7; 101]);
    b.qp.post_recv(1, &[b.mr.sge(end, 4096), unknown]).unwrap();
    a.qp.send(1, &[a.mr.sge(0, 100)]).unwrap();
    assert_success(&a.sent());
    assert_eq!(b.received().byte_len, 100);
    assert_eq!(b.mr.read(end as usize, 100), [7; 100]);
    b.qp.post_recv(2, &[b.mr.sge(end, 4096), unknown]).unwrap();
    a.qp.send(2, &[a.mr.sge(0, 101)]).unwrap();
    assert_status(&a.sent(), wc_status::REM_OP_ERR);
    let received = b.received();
    assert_status(&received, wc_status::LOC_PROT_ERR);
    assert_eq!(received.vendor_err, vendor_err::KEY_RANGE);
}

// D-RTY-001.
#[test]
fn nobody_answers_for_a_queue_pair_that_is_not_there_or_not_ours() {
    let two = Two::new();
    let options = SideOptions::default();
    let quick = |c: &mut vhost_device_rdma_bare::Connection| {
        c.timeout = 12;
        c.retry_cnt = 2;
    };
    // No such number.
    let a = Side::new(&two.a, &options);
    let b = Side::new(&two.b, &options);
    let mut connection = vhost_device_rdma_bare::Connection::to(&b.qp);
    quick(&mut connection);
    connection.dest_qp_num = 0x00ff_fff0;
    a.qp.connect(&connection).unwrap();
    nobody_answers(&a, 2, 12);
    // No such GID.
    let a = Side::new(&two.a, &options);
    let mut connection = vhost_device_rdma_bare::Connection::to(&b.qp);
    quick(&mut connection);
    connection.dgid[15] ^= 0xff;
    a.qp.connect(&connection).unwrap();
    nobody_answers(&a, 2, 12);
    // It is in RESET.
    let a = Side::new(&two.a, &options);
    let mut connection = vhost_device_rdma_bare::Connection::to(&b.qp);
    quick(&mut connection);
    a.qp.connect(&connection).unwrap();
    nobody_answers(&a, 2, 12);
    // It is connected to another.
    let c = Side::new(&two.a, &options);
    b.qp.connect(&vhost_device_rdma_bare::Connection::to(&c.qp))
        .unwrap();
    let a = Side::new(&two.a, &options);
    a.qp.connect(&connection).unwrap();
    nobody_answers(&a, 2, 12);
    // It is in the error state.
    let pair = two.pair_with(&options, quick);
    pair.b.qp.set_state(qp_state::ERR).unwrap();
    nobody_answers(&pair.a, 2, 12);
}

// D-RTY-001.
#[test]
fn nobody_answers_from_another_network() {
    let options = vhost_device_rdma_bare::ProcessOptions {
        vms: vec![
            "mac=52:54:00:00:00:01,network=x".into(),
            "mac=52:54:00:00:00:02,network=y".into(),
        ],
        ..vhost_device_rdma_bare::ProcessOptions::vms(0)
    };
    let process = vhost_device_rdma_bare::DeviceProcess::start(
        &options.binary(env!("CARGO_BIN_EXE_vhost-device-rdma")),
    )
    .unwrap();
    let two = Two::on(process, &VmOptions::default());
    let pair = two.pair_with(&SideOptions::default(), |c| {
        c.timeout = 10;
        c.retry_cnt = 1;
    });
    nobody_answers(&pair.a, 1, 10);
    assert_eq!(pair.b.qp.state().unwrap(), qp_state::RTS);
}

// D-RTY-002.
#[test]
fn a_peer_that_comes_late_is_reached_by_a_retry() {
    let two = Two::new();
    let a = Side::new(&two.a, &SideOptions::default());
    let b = Side::new(&two.b, &SideOptions::default());
    let connection = |to: &Side| vhost_device_rdma_bare::Connection {
        timeout: 14,
        retry_cnt: 7,
        ..vhost_device_rdma_bare::Connection::to(&to.qp)
    };
    a.qp.connect(&connection(&b)).unwrap();
    a.qp.send(1, &[a.mr.sge(0, 8)]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    b.qp.connect(&connection(&a)).unwrap();
    b.qp.post_recv(2, &[b.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
}

// D-RNR-001.
#[test]
fn without_a_receive_a_send_fails_after_the_rnr_retries() {
    let two = Two::new();
    // Codes and times of the RNR NAK timer: 18 is 5.12 ms, 20 is 10.24 ms.
    for (retries, code, at_least) in [(0, 20, 0u32), (1, 20, 10_240), (6, 18, 6 * 5_120)] {
        let pair = two.pair_with(&SideOptions::default(), |c| {
            c.rnr_retry = retries;
            c.min_rnr_timer = code;
        });
        let start = Instant::now();
        pair.a.qp.send(1, &[pair.a.mr.sge(0, 8)]).unwrap();
        let cqe = pair.a.sent();
        assert_status(&cqe, wc_status::RNR_RETRY_EXC_ERR);
        assert_eq!(cqe.vendor_err, vendor_err::NO_RECEIVE);
        let took = start.elapsed();
        assert!(took >= Duration::from_micros(at_least.into()), "{took:?}");
        assert!(took < Duration::from_secs(2), "{took:?}");
        assert_in_error(&pair.a);
        // The responder is as it was.
        assert_eq!(pair.b.qp.state().unwrap(), qp_state::RTS);
        pair.b.assert_quiet();
    }
}

// D-RQ-001, D-RQ-004.
#[test]
fn a_receive_wakes_the_sender_at_once() {
    let two = Two::new();
    // Timer code 0 is the longest: 655.36 ms.
    let pair = two.pair_with(&SideOptions::default(), |c| {
        c.rnr_retry = 7;
        c.min_rnr_timer = 0;
    });
    let (a, b) = (&pair.a, &pair.b);
    for opcode in [wr_opcode::SEND, wr_opcode::RDMA_WRITE_WITH_IMM] {
        for round in 0..5u64 {
            let wqe = SendWqe {
                opcode,
                ..write(b.mr.iova, b.mr.rkey)
            };
            a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
            a.assert_quiet();
            let start = Instant::now();
            b.qp.post_recv(round, &[b.mr.sge(0, 8)]).unwrap();
            assert_success(&a.sent());
            assert_success(&b.received());
            let took = start.elapsed();
            assert!(took < Duration::from_millis(300), "woken after {took:?}");
        }
    }
    let port = two.a.query_port().unwrap();
    assert!(port.rnr_naks >= 10, "{}", port.rnr_naks);
}

// D-RC-006.
#[test]
fn writes_need_no_receive() {
    let two = Two::new();
    let pair = two.pair_with(&SideOptions::default(), |c| c.rnr_retry = 0);
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
    // A zero-length write or read needs no key either.
    pair.a.qp.write(1, &[], 0, 0).unwrap();
    assert_success(&pair.a.sent());
    pair.a.qp.read(1, &[], 0, 0).unwrap();
    assert_success(&pair.a.sent());
    assert_works(&pair);
}

// D-CPL-003, D-FLUSH-001, D-RQ-002, D-RQ-003.
#[test]
fn the_error_state_flushes_everything_in_order() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    // Sends that wait for a receive, and receives that wait for a send.
    for i in 0..20 {
        a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
        a.qp.post_recv(100 + i, &[a.mr.sge(0, 8)]).unwrap();
    }
    a.assert_quiet();
    a.qp.set_state(qp_state::ERR).unwrap();
    for i in 0..20 {
        let sent = a.sent();
        assert_status(&sent, wc_status::WR_FLUSH_ERR);
        assert_eq!((sent.wr_id, sent.opcode & RECV_FLAG), (i, 0));
        assert_eq!(sent.qp_num, a.qp.number());
        let received = a.received();
        assert_status(&received, wc_status::WR_FLUSH_ERR);
        assert_eq!(
            (received.wr_id, received.opcode & RECV_FLAG),
            (100 + i, RECV_FLAG)
        );
    }
    assert_in_error(a);
    a.assert_quiet();
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
    // From the error state there is a way back.
    for side in [a, b] {
        side.qp.set_state(qp_state::RESET).unwrap();
    }
    a.qp.connect(&vhost_device_rdma_bare::Connection::to(&b.qp))
        .unwrap();
    b.qp.connect(&vhost_device_rdma_bare::Connection::to(&a.qp))
        .unwrap();
    assert_works(&pair);
}

// D-CPL-001, D-FLUSH-001, D-FLUSH-002.
#[test]
fn unsignaled_sends_are_told_of_when_they_fail() {
    let two = Two::new();
    let options = SideOptions {
        qp: QpOptions {
            signal_all: false,
            ..QpOptions::default()
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let a = &pair.a;
    a.qp.write(1, &[a.mr.sge(0, 8)], 0, 0).unwrap();
    a.qp.write(2, &[a.mr.sge(0, 8)], 0, 0).unwrap();
    let failed = a.sent();
    assert_status(&failed, wc_status::REM_ACCESS_ERR);
    assert_eq!(failed.wr_id, 1);
    let flushed = a.sent();
    assert_status(&flushed, wc_status::WR_FLUSH_ERR);
    assert_eq!(flushed.wr_id, 2);
}

// D-ERR-003, D-OVF-001, D-OVF-002.
#[test]
fn a_completion_queue_that_overflows_is_in_error_with_its_queue_pairs() {
    for list in [1, 32] {
        overflow_is_an_error(list);
    }
}

fn overflow_is_an_error(list: u64) {
    let two = Two::new();
    let pair = overflown_by_lists(&two, list);
    let a = &pair.a;
    let event = two.a.wait_async_event(TIMEOUT).unwrap();
    let event = event.expect("CQ_ERR");
    assert_eq!(
        (event.event_type, event.number, event.reason),
        (
            event_type::CQ_ERR,
            a.send_cq.number(),
            vendor_err::NONE.into()
        )
    );
    assert_reaches(&a.qp, qp_state::ERR);
    // What is in the queue is right, and no more comes.
    for i in 0..16 {
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, i);
    }
    std::thread::sleep(NOTHING);
    assert_eq!(a.send_cq.poll(), None);
    // Just once.
    while let Some(event) = two.a.wait_async_event(NOTHING).unwrap() {
        assert_ne!(event.event_type, event_type::CQ_ERR);
    }
    // Others are not concerned.
    assert_works(&two.pair());
}

// D-RING-005.
#[test]
fn a_full_completion_queue_that_is_polled_goes_on() {
    let two = Two::new();
    let options = SideOptions {
        qp: QpOptions {
            caps: caps(16, 1, 0),
            ..QpOptions::default()
        },
        cqe: 16,
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for round in 0..100 {
        for i in 0..16 {
            a.qp.write(round * 16 + i, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
                .unwrap();
        }
        for i in 0..16 {
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, round * 16 + i);
        }
    }
}

#[test]
fn one_completion_queue_serves_many_queue_pairs() {
    let two = Two::new();
    let shared = Cq::new(&two.a, 1024, 0).unwrap();
    let side = Side::new(&two.a, &SideOptions::default());
    let mut pairs = Vec::new();
    for _ in 0..16 {
        let qp = vhost_device_rdma_bare::Qp::new(
            &side.context,
            &side.pd,
            &shared,
            &shared,
            &QpOptions::default(),
        )
        .unwrap();
        let peer = Side::new(&two.b, &SideOptions::default());
        qp.connect(&vhost_device_rdma_bare::Connection::to(&peer.qp))
            .unwrap();
        peer.qp
            .connect(&vhost_device_rdma_bare::Connection::to(&qp))
            .unwrap();
        pairs.push((qp, peer));
    }
    for (i, (qp, peer)) in (0u64..).zip(&pairs) {
        qp.post_recv(1000 + i, &[side.mr.sge(0, 8)]).unwrap();
        qp.write(i, &[side.mr.sge(0, 8)], peer.mr.iova, peer.mr.rkey)
            .unwrap();
        peer.qp.send(i, &[peer.mr.sge(0, 8)]).unwrap();
    }
    let mut seen = std::collections::HashSet::new();
    for _ in 0..32 {
        let cqe = shared.wait(TIMEOUT).unwrap();
        assert_success(&cqe);
        assert!(seen.insert((cqe.wr_id, cqe.qp_num)));
    }
}
