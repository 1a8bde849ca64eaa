// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! UC queue pairs: like RC, but nobody answers.
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::{SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, qp_type, send_flag, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{Connection, QpOptions};

use crate::common::{
    assert_event, assert_no_event, assert_reaches, assert_status, assert_success, pattern,
    put_entry, Pair, Side, SideOptions, Two, NOTHING, TIMEOUT,
};

fn options() -> SideOptions {
    SideOptions {
        qp: QpOptions::of(qp_type::UC),
        ..SideOptions::default()
    }
}

fn pair(two: &Two) -> Pair {
    two.pair_with(&options(), |_| ())
}

fn write(remote_addr: u64, rkey: u32) -> SendWqe {
    SendWqe {
        opcode: wr_opcode::RDMA_WRITE,
        remote_addr,
        rkey,
        ..SendWqe::default()
    }
}

/// A message gets through, and it is the next one that does.
#[track_caller]
fn assert_gets_through(pair: &Pair) {
    let (a, b) = (&pair.a, &pair.b);
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
    b.qp.post_recv(500, &[b.mr.sge(0, 64)]).unwrap();
    a.qp.send(501, &[a.mr.sge(0, 8)]).unwrap();
    let cqe = a.sent();
    assert_success(&cqe);
    assert_eq!(cqe.wr_id, 501);
    let cqe = b.received();
    assert_success(&cqe);
    assert_eq!(cqe.wr_id, 500);
}

#[test]
fn sends_and_writes_move_data_of_every_size() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let (a, b) = (&pair.a, &pair.b);
    for (i, size) in (0u64..).zip([0usize, 1, 9, 4096, 65_537, 200_003, 1 << 20]) {
        let data = pattern(i, size);
        a.mr.write(0, &data);
        for (opcode, expected) in [
            (wr_opcode::SEND, Some(wc_opcode::RECV)),
            (wr_opcode::SEND_WITH_IMM, Some(wc_opcode::RECV)),
            (
                wr_opcode::RDMA_WRITE_WITH_IMM,
                Some(wc_opcode::RECV_RDMA_WITH_IMM),
            ),
            (wr_opcode::RDMA_WRITE, None),
        ] {
            b.mr.write(0, &vec![0; size]);
            if expected.is_some() {
                b.qp.post_recv(i, &[b.mr.sge(0, 1 << 20)]).unwrap();
            }
            let wqe = SendWqe {
                opcode,
                imm: 0x0403_0201,
                ..write(b.mr.iova, b.mr.rkey)
            };
            a.qp.post_send(&wqe, &[a.mr.sge(0, size as u32)]).unwrap();
            assert_success(&a.sent());
            if let Some(expected) = expected {
                let cqe = b.received();
                assert_success(&cqe);
                assert_eq!((cqe.wr_id, cqe.opcode), (i, expected));
                assert_eq!((cqe.byte_len as usize, cqe.src_qp), (size, a.qp.number()));
                let with_imm = opcode != wr_opcode::SEND;
                assert_eq!(cqe.wc_flags, if with_imm { wc_flag::WITH_IMM } else { 0 });
                assert_eq!(cqe.imm, if with_imm { 0x0403_0201 } else { 0 });
            }
            assert_eq!(b.mr.read(0, size), data);
        }
    }
    b.qp.post_recv(1, &[b.mr.sge(0, 64)]).unwrap();
    let send = SendWqe {
        opcode: wr_opcode::SEND,
        ..SendWqe::default()
    };
    a.qp.post_inline(&send, b"inline").unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
    assert_eq!(b.mr.read(0, 6), b"inline");
    b.assert_quiet();
}

// D-UC-001, D-UC-002, D-UC-003.
#[test]
fn messages_that_cannot_be_taken_are_dropped() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let (a, b) = (&pair.a, &pair.b);
    let read_only = b.pd.register(4096, access::REMOTE_READ).unwrap();
    let good = write(b.mr.iova, b.mr.rkey);
    a.mr.write(0, &[0xaa; 4096]);
    let dropped = [
        SendWqe {
            opcode: wr_opcode::SEND,
            ..good
        },
        SendWqe {
            opcode: wr_opcode::RDMA_WRITE_WITH_IMM,
            ..good
        },
        write(b.mr.iova, b.mr.rkey ^ 1),
        write(b.mr.iova + b.mr.length - 7, b.mr.rkey),
        write(read_only.iova, read_only.rkey),
    ];
    for wqe in dropped {
        a.qp.post_send(&SendWqe { wr_id: 1, ..wqe }, &[a.mr.sge(0, 8)])
            .unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, 1);
    }
    assert_no_event(&two.b);
    b.assert_quiet();
    assert_eq!(b.mr.read(0, 8), [0; 8]);
    assert_eq!(read_only.read(0, 8), [0; 8]);
    assert_gets_through(&pair);
    // What is dropped for its key leaves the receive to the next.
    b.qp.post_recv(7, &[b.mr.sge(0, 64)]).unwrap();
    let wqe = SendWqe {
        opcode: wr_opcode::RDMA_WRITE_WITH_IMM,
        ..write(b.mr.iova, b.mr.rkey ^ 1)
    };
    a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
    a.qp.send(2, &[a.mr.sge(0, 9)]).unwrap();
    assert_success(&a.sent());
    let cqe = b.received();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.byte_len), (7, 9));
    assert_eq!(two.a.query_port().unwrap().retries, 0);
}

// D-UC-001.
#[test]
fn messages_to_nobody_are_lost_at_once() {
    let two = Two::with_all_types();
    let (a, b) = (Side::new(&two.a, &options()), Side::new(&two.b, &options()));
    let to = Connection::to(&b.qp);
    let nobody = Connection {
        dgid: [0xfd; 16],
        ..to
    };
    let nothing = Connection {
        dest_qp_num: 0x00ff_fff0,
        ..to
    };
    // The last one is in INIT, in which it takes receives but no messages.
    b.qp.modify(Connection::to(&a.qp).init()).unwrap();
    b.qp.post_recv(1, &[b.mr.sge(0, 64)]).unwrap();
    for connection in [nobody, nothing, to] {
        a.qp.set_state(qp_state::RESET).unwrap();
        a.qp.connect(&connection).unwrap();
        a.qp.send(1, &[a.mr.sge(0, 8)]).unwrap();
        assert_success(&a.sent());
        a.qp.write(2, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&a.sent());
    }
    b.assert_quiet();
    // It was kept for the first message that it takes, which is when communication is established.
    b.qp.modify(Connection::to(&a.qp).rtr()).unwrap();
    a.qp.write(3, &[a.mr.sge(0, 8)], b.mr.iova, 0).unwrap();
    assert_success(&a.sent());
    assert_no_event(&two.b);
    a.qp.send(4, &[a.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
    assert_event(&two.b, event_type::COMM_EST, b.qp.number());
}

// D-UC-001.
#[test]
fn a_receive_that_is_bad_is_the_responders_error_alone() {
    let two = Two::with_all_types();
    for (sge, status) in [
        (
            (|b: &Side| b.mr.sge(0, 7)) as fn(&Side) -> Sge,
            wc_status::LOC_LEN_ERR,
        ),
        (
            |b| Sge {
                lkey: 0,
                ..b.mr.sge(0, 64)
            },
            wc_status::LOC_PROT_ERR,
        ),
    ] {
        let pair = pair(&two);
        let (a, b) = (&pair.a, &pair.b);
        b.qp.post_recv(1, &[sge(b)]).unwrap();
        b.qp.post_recv(2, &[b.mr.sge(0, 64)]).unwrap();
        a.qp.send(3, &[a.mr.sge(0, 8)]).unwrap();
        assert_success(&a.sent());
        let cqe = b.received();
        assert_status(&cqe, status);
        assert_eq!(cqe.wr_id, 1);
        assert_status(&b.received(), wc_status::WR_FLUSH_ERR);
        assert_eq!(b.qp.state().unwrap(), qp_state::ERR);
        assert_eq!(a.qp.state().unwrap(), qp_state::RTS);
        a.qp.send(4, &[a.mr.sge(0, 8)]).unwrap();
        assert_success(&a.sent());
    }
}

// D-SQE-001, D-SQE-002.
#[test]
fn an_error_of_a_send_ends_the_send_queue_until_it_is_made_ready_again() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let (a, b) = (&pair.a, &pair.b);
    let read = SendWqe {
        opcode: wr_opcode::RDMA_READ,
        ..write(b.mr.iova, b.mr.rkey)
    };
    let spoilt = Sge {
        lkey: 0,
        ..a.mr.sge(0, 8)
    };
    for (wqe, sge, status, reason) in [
        (
            read,
            a.mr.sge(0, 8),
            wc_status::LOC_QP_OP_ERR,
            vendor_err::OPCODE,
        ),
        (
            SendWqe {
                opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
                ..read
            },
            a.mr.sge(0, 8),
            wc_status::LOC_QP_OP_ERR,
            vendor_err::OPCODE,
        ),
        (
            write(b.mr.iova, b.mr.rkey),
            spoilt,
            wc_status::LOC_PROT_ERR,
            vendor_err::KEY_UNKNOWN,
        ),
    ] {
        let mut batch = a.qp.send_queue().batch();
        batch.push(&SendWqe { wr_id: 1, ..wqe }, [sge]).unwrap();
        for wr_id in 2..20 {
            let wqe = SendWqe {
                wr_id,
                ..write(b.mr.iova, b.mr.rkey)
            };
            batch.push(&wqe, [a.mr.sge(0, 8)]).unwrap();
        }
        batch.commit();
        a.qp.ring().unwrap();
        let cqe = a.sent();
        assert_status(&cqe, status);
        assert_eq!((cqe.wr_id, cqe.vendor_err), (1, reason));
        for wr_id in 2..20 {
            let cqe = a.sent();
            assert_status(&cqe, wc_status::WR_FLUSH_ERR);
            assert_eq!(cqe.wr_id, wr_id);
        }
        assert_eq!(a.qp.state().unwrap(), qp_state::SQE);
        // What comes later is flushed, too; receiving goes on.
        a.qp.send(20, &[a.mr.sge(0, 8)]).unwrap();
        assert_status(&a.sent(), wc_status::WR_FLUSH_ERR);
        a.qp.post_recv(21, &[a.mr.sge(0, 8)]).unwrap();
        b.qp.send(22, &[b.mr.sge(0, 8)]).unwrap();
        assert_success(&b.sent());
        let cqe = a.received();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, 21);
        assert_eq!(a.qp.state().unwrap(), qp_state::SQE);
        a.qp.set_state(qp_state::RTS).unwrap();
        assert_gets_through(&pair);
    }
}

// D-SQE-002.
#[test]
fn what_was_posted_before_the_send_queue_is_ready_again_is_not_executed() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let (a, b) = (&pair.a, &pair.b);
    for round in 0..50u8 {
        let bad = SendWqe {
            opcode: wr_opcode::RDMA_READ,
            ..SendWqe::default()
        };
        a.qp.post_send(&bad, &[]).unwrap();
        assert_status(&a.sent(), wc_status::LOC_QP_OP_ERR);
        a.mr.write(0, &[round + 1]);
        for _ in 0..8 {
            // Never executed: the command comes after it.
            a.qp.write(1, &[a.mr.sge(0, 1)], b.mr.iova + 1, b.mr.rkey)
                .unwrap();
        }
        a.qp.set_state(qp_state::RTS).unwrap();
        a.qp.write(2, &[a.mr.sge(0, 1)], b.mr.iova, b.mr.rkey)
            .unwrap();
        for _ in 0..8 {
            assert_status(&a.sent(), wc_status::WR_FLUSH_ERR);
        }
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, 2);
        assert_eq!(b.mr.read(0, 2), [round + 1, 0]);
    }
}

// D-SQE-001.
#[test]
fn an_error_while_draining_ends_all() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let a = &pair.a;
    a.qp.post_recv(1, &[a.mr.sge(0, 8)]).unwrap();
    a.qp.set_state(qp_state::SQE)
        .expect_err("nobody asks for SQE");
    a.qp.set_state(qp_state::ERR).unwrap();
    assert_status(&a.received(), wc_status::WR_FLUSH_ERR);
    assert_reaches(&a.qp, qp_state::ERR);
}

// D-UC-004.
#[test]
fn a_stopped_vm_gets_no_message_twice() {
    let two = Two::with_all_types();
    let pair = pair(&two);
    let (a, b) = (&pair.a, &pair.b);
    for i in 0..40 {
        b.qp.post_recv(i, &[b.mr.sge(i * 8, 8)]).unwrap();
    }
    for i in 0..20u64 {
        if i == 10 {
            two.b.stop().unwrap();
        }
        a.mr.write(0, &(i + 1).to_le_bytes());
        a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
        if i < 10 {
            assert_success(&a.sent());
        }
    }
    std::thread::sleep(NOTHING);
    two.b.start().unwrap();
    for _ in 10..20 {
        assert_success(&a.sent());
    }
    a.mr.write(0, &100u64.to_le_bytes());
    a.qp.send(20, &[a.mr.sge(0, 8)]).unwrap();
    assert_success(&a.sent());
    let mut values = Vec::new();
    while values.last() != Some(&100) {
        let cqe = b.recv_cq.wait(TIMEOUT).unwrap();
        assert_success(&cqe);
        let bytes = b.mr.read(cqe.wr_id as usize * 8, 8);
        values.push(u64::from_le_bytes(bytes.try_into().unwrap()));
    }
    assert!(values.windows(2).all(|w| w[0] <= w[1]), "{values:?}");
    assert!(values.len() <= 21, "{values:?}");
}

#[test]
fn unsignaled_sends_complete_nothing() {
    let two = Two::with_all_types();
    let options = SideOptions {
        qp: QpOptions {
            signal_all: false,
            ..QpOptions::of(qp_type::UC)
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for i in 0..200u64 {
        let wqe = SendWqe {
            flags: if i % 10 == 9 { send_flag::SIGNALED } else { 0 },
            wr_id: i,
            ..write(b.mr.iova, b.mr.rkey)
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, 64)]).unwrap();
        if i % 10 == 9 {
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, i);
        }
    }
    assert_eq!(a.send_cq.poll(), None);
}

#[test]
fn random_entries_do_no_harm() {
    let mut two = Two::with_all_types();
    let witness = pair(&two);
    let pair = pair(&two);
    let (iova, rkey, lkey) = (pair.a.mr.iova, pair.b.mr.rkey, pair.a.mr.lkey);
    let entry = (
        prop_oneof![0u8..16, any::<u8>()],
        any::<u8>(),
        prop_oneof![0u16..5, any::<u16>()],
        prop_oneof![Just(rkey), any::<u32>()],
        prop::collection::vec(
            (
                prop_oneof![Just(iova), any::<u64>()],
                prop_oneof![0u32..100, any::<u32>()],
                prop_oneof![4 => Just(lkey), 1 => any::<u32>()],
            ),
            5,
        ),
    );
    let mut runner = TestRunner::new(Config {
        cases: 40,
        ..Config::default()
    });
    let a = &pair.a;
    let remote = pair.b.mr.iova;
    let result = runner.run(&prop::collection::vec(entry, 1..8), |entries| {
        a.qp.set_state(qp_state::RESET).unwrap();
        pair.b.qp.set_state(qp_state::RESET).unwrap();
        pair.b.qp.connect(&Connection::to(&a.qp)).unwrap();
        a.qp.connect(&Connection::to(&pair.b.qp)).unwrap();
        // Entries of 256 bytes, at offset 256.
        for (i, (opcode, flags, count, rkey, sges)) in entries.iter().enumerate() {
            let at = 256 + 256 * i;
            let wqe = SendWqe {
                opcode: *opcode,
                flags: *flags | 0x80,
                count: *count,
                remote_addr: remote,
                rkey: *rkey,
                ..SendWqe::default()
            };
            put_entry(&a.qp, at, &wqe.to_bytes(), sges);
        }
        a.qp.ring().unwrap();
        for _ in &entries {
            // Signaled, all of them, whatever becomes of them.
            let cqe = a.send_cq.wait(Duration::from_secs(10)).unwrap();
            assert!(wc_status::name(cqe.status).is_some(), "{cqe:?}");
        }
        while pair.b.recv_cq.poll().is_some() {}
        Ok(())
    });
    result.unwrap();
    assert_gets_through(&witness);
    two.assert_unharmed();
}
