// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state machines of queue pairs, as the device enforces them.
use vhost_device_rdma_bare::spec::command::{status, QpAttr};
use vhost_device_rdma_bare::spec::ring::{SendWqe, UdWqe};
use vhost_device_rdma_bare::spec::verbs::{qp_attr, qp_state, qp_type, wc_status};
use vhost_device_rdma_bare::{Connection, Qp, QpOptions, Uses, Xrcd};

use crate::common::{
    assert_reaches, assert_success, Pair, Side, SideOptions, Two, NOTHING, TIMEOUT,
};

use qp_state::{ERR, INIT, RESET, RTR, RTS, SQD, SQE};

/// Brings a queue pair from RESET to `state`.
fn bring_to(qp: &Qp, connection: &Connection, state: u8) {
    qp.set_state(RESET).unwrap();
    if state != RESET {
        qp.modify(connection.init()).unwrap();
    }
    if [RTR, RTS, SQD, SQE].contains(&state) {
        qp.modify(connection.rtr()).unwrap();
    }
    if [RTS, SQD, SQE].contains(&state) {
        qp.modify(connection.rts()).unwrap();
    }
    if state == SQE {
        // Nobody asks for it: it comes from a work request that fails.
        if connection.qp_type == qp_type::UC {
            let bad = SendWqe {
                opcode: 255,
                ..SendWqe::default()
            };
            qp.post_send(&bad, &[]).unwrap();
        } else {
            let bad = UdWqe {
                opcode: 255,
                ..UdWqe::default()
            };
            qp.post_send(&bad, &[]).unwrap();
        }
        qp.send_cq().wait(TIMEOUT).unwrap();
        assert_reaches(qp, SQE);
    }
    if state == SQD || state == ERR {
        qp.set_state(state).unwrap();
    }
    assert_eq!(qp.state().unwrap(), state);
}

/// A change to `state` with all that is required on the usual way there, and nothing else.
fn change(connection: &Connection, from: u8, to: u8) -> (QpAttr, u32) {
    match (from, to) {
        (RESET, INIT) => connection.init(),
        (INIT, RTR) => connection.rtr(),
        (RTR, RTS) => connection.rts(),
        _ => (
            QpAttr {
                qp_state: to,
                ..QpAttr::default()
            },
            qp_attr::STATE,
        ),
    }
}

fn every_change_is_allowed_or_refused(qp: &Qp, connection: &Connection) {
    let mut allowed = vec![
        (RESET, vec![RESET, INIT]),
        (INIT, vec![RESET, INIT, RTR, ERR]),
        (RTR, vec![RESET, RTS, ERR]),
        (RTS, vec![RESET, RTS, SQD, ERR]),
        (SQD, vec![RESET, RTS, SQD, ERR]),
        (ERR, vec![RESET, ERR]),
    ];
    if [qp_type::UC, qp_type::UD, qp_type::GSI].contains(&connection.qp_type) {
        allowed.push((SQE, vec![RESET, RTS, ERR]));
    }
    for (from, to_allowed) in allowed {
        for to in [RESET, INIT, RTR, RTS, SQD, SQE, ERR, 7, 255] {
            bring_to(qp, connection, from);
            let result = qp.modify(change(connection, from, to));
            let name = |state| qp_state::name(state).unwrap_or("?");
            if to_allowed.contains(&to) {
                result.unwrap_or_else(|e| panic!("{} to {}: {e}", name(from), name(to)));
                assert_eq!(qp.state().unwrap(), to);
            } else {
                let error = result.expect_err(&format!("{} to {}", name(from), name(to)));
                assert_eq!(
                    error.status(),
                    Some(status::EINVAL),
                    "{} to {}",
                    name(from),
                    name(to)
                );
                assert_eq!(qp.state().unwrap(), from);
            }
        }
    }
}

/// A queue pair of each type but RC, with what brings it up.
fn each_other_type(two: &Two, f: impl Fn(&Qp, &Connection)) {
    for kind in [qp_type::UC, qp_type::UD, qp_type::GSI] {
        let options = SideOptions {
            qp: QpOptions::of(kind),
            ..SideOptions::default()
        };
        let (side, peer) = (Side::new(&two.a, &options), Side::new(&two.b, &options));
        let connection = if kind == qp_type::UC {
            Connection::to(&peer.qp)
        } else {
            Connection {
                qp_type: kind,
                ..Connection::datagram(0x8000_0001)
            }
        };
        f(&side.qp, &connection);
    }
    let domain = Xrcd::new(&two.b).unwrap();
    let target = Qp::xrc_target(&domain).unwrap();
    let side = Side::with(&two.a, |vm, uses| {
        let uses = Uses {
            recv_cq: None,
            ..uses
        };
        Qp::create(vm, &uses, &QpOptions::of(qp_type::XRC_INI)).unwrap()
    });
    f(&side.qp, &Connection::to(&target));
    f(&target, &Connection::to(&side.qp));
}

// D-QPS-001.
#[test]
fn every_change_of_state_is_allowed_or_refused_as_the_specification_says() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let peer = Side::new(&two.b, &SideOptions::default());
    every_change_is_allowed_or_refused(&side.qp, &Connection::to(&peer.qp));
}

// D-QPS-001.
#[test]
fn the_other_types_have_their_changes_of_state() {
    each_other_type(&Two::with_all_types(), every_change_is_allowed_or_refused);
}

// D-QPS-001.
#[test]
fn required_attributes_are_required_and_others_refused() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let peer = Side::new(&two.b, &SideOptions::default());
    attributes_are_required_or_refused(&side.qp, &Connection::to(&peer.qp));
}

// D-QPS-001.
#[test]
fn the_other_types_have_their_attributes() {
    each_other_type(&Two::with_all_types(), |qp, connection| {
        // PORT is optional for GSI: which state_tables tests.
        if connection.qp_type != qp_type::GSI {
            attributes_are_required_or_refused(qp, connection);
        }
    });
}

fn attributes_are_required_or_refused(qp: &Qp, connection: &Connection) {
    for (from, to) in [(RESET, INIT), (INIT, RTR), (RTR, RTS)] {
        bring_to(qp, connection, from);
        let (attr, mask) = change(connection, from, to);
        for bit in (0..32).map(|i| 1u32 << i) {
            if bit == qp_attr::STATE {
                continue;
            }
            let result = qp.modify((attr, mask ^ bit));
            if mask & bit != 0 {
                assert_eq!(
                    result.unwrap_err().status(),
                    Some(status::EINVAL),
                    "without {bit:#x}"
                );
            } else if let Err(error) = result {
                let unsupported = [
                    qp_attr::ALT_PATH,
                    qp_attr::PATH_MIG_STATE,
                    qp_attr::CAP,
                    qp_attr::RATE_LIMIT,
                ];
                let expected = if unsupported.contains(&bit) {
                    status::EOPNOTSUPP
                } else {
                    status::EINVAL
                };
                assert_eq!(error.status(), Some(expected), "with {bit:#x}");
            } else {
                // An optional attribute.
                bring_to(qp, connection, from);
            }
            assert_eq!(qp.state().unwrap(), from);
        }
    }
}

#[test]
fn attributes_out_of_range_are_refused() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let peer = Side::new(&two.b, &SideOptions::default());
    let connection = Connection::to(&peer.qp);
    let refused = |from: u8, to: u8, spoil: &dyn Fn(&mut QpAttr)| {
        bring_to(&side.qp, &connection, from);
        let (mut attr, mask) = change(&connection, from, to);
        spoil(&mut attr);
        let error = side
            .qp
            .modify((attr, mask))
            .expect_err(&format!("{attr:?}"));
        assert_eq!(error.status(), Some(status::EINVAL), "{attr:?}");
        assert_eq!(side.qp.state().unwrap(), from);
    };
    refused(RESET, INIT, &|a| a.port_num = 0);
    refused(RESET, INIT, &|a| a.port_num = 2);
    refused(RESET, INIT, &|a| a.pkey_index = 1);
    refused(RESET, INIT, &|a| a.access_flags = 0x4000_0000);
    refused(INIT, RTR, &|a| a.path_mtu = 0);
    refused(INIT, RTR, &|a| a.path_mtu = 6);
    refused(INIT, RTR, &|a| a.dest_qp_num = 1 << 24);
    refused(INIT, RTR, &|a| a.rq_psn = 1 << 24);
    refused(INIT, RTR, &|a| a.min_rnr_timer = 32);
    refused(INIT, RTR, &|a| a.max_dest_rd_atomic = 255);
    refused(INIT, RTR, &|a| a.av.sgid_index = 999);
    refused(INIT, RTR, &|a| a.av.port_num = 2);
    refused(INIT, RTR, &|a| a.av.reserved[0] = 1);
    refused(RTR, RTS, &|a| a.timeout = 32);
    refused(RTR, RTS, &|a| a.retry_cnt = 8);
    refused(RTR, RTS, &|a| a.rnr_retry = 8);
    refused(RTR, RTS, &|a| a.sq_psn = 1 << 24);
    refused(RTR, RTS, &|a| a.max_rd_atomic = 255);
    refused(RTR, RTS, &|a| a.reserved0[0] = 1);
    refused(RTR, RTS, &|a| a.reserved1[15] = 1);
}

// D-MOD-002.
#[test]
fn query_tells_what_modify_set() {
    let two = Two::new();
    let pair = two.pair_with(&SideOptions::default(), |c| {
        c.timeout = 11;
        c.retry_cnt = 3;
        c.rnr_retry = 5;
        c.min_rnr_timer = 9;
        c.max_rd_atomic = 4;
    });
    let attr = pair.a.qp.query().unwrap();
    assert_eq!((attr.qp_state, attr.cur_qp_state), (RTS, RTS));
    assert_eq!((attr.timeout, attr.retry_cnt, attr.rnr_retry), (11, 3, 5));
    assert_eq!(
        (
            attr.min_rnr_timer,
            attr.max_rd_atomic,
            attr.max_dest_rd_atomic
        ),
        (9, 4, 4)
    );
    assert_eq!(attr.dest_qp_num, pair.b.qp.number());
    assert_eq!(attr.av.dgid, two.b.gid());
    assert_eq!(attr.port_num, 1);
    assert_eq!(attr.path_mtu, 5);
}

#[test]
fn receives_may_be_posted_before_the_queue_pair_is_ready() {
    let two = Two::new();
    let a = Side::new(&two.a, &SideOptions::default());
    let b = Side::new(&two.b, &SideOptions::default());
    let connection = Connection::to(&a.qp);
    b.qp.modify(connection.init()).unwrap();
    for i in 0..10 {
        b.qp.post_recv(i, &[b.mr.sge(0, 8)]).unwrap();
    }
    // RTR is enough to receive.
    b.qp.modify(connection.rtr()).unwrap();
    a.qp.connect(&Connection::to(&b.qp)).unwrap();
    for i in 0..10 {
        a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
        assert_success(&a.sent());
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, i);
    }
}

// D-MOD-003, D-RING-004.
#[test]
fn reset_forgets_what_was_posted() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    for round in 0..5 {
        for i in 0..7 {
            a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
            a.qp.post_recv(i, &[a.mr.sge(0, 8)]).unwrap();
        }
        a.qp.set_state(RESET).unwrap();
        a.assert_quiet();
        a.qp.connect(&Connection::to(&b.qp)).unwrap();
        a.assert_quiet();
        a.qp.write(round, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, round);
    }
}

// D-QPS-002, D-QPS-003.
#[test]
fn a_drained_send_queue_says_so_and_goes_on_later() {
    use vhost_device_rdma_bare::spec::event::event_type;
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    a.qp.write(1, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    let attr = QpAttr {
        qp_state: SQD,
        en_sqd_async_notify: 1,
        ..QpAttr::default()
    };
    a.qp.modify((attr, qp_attr::STATE | qp_attr::EN_SQD_ASYNC_NOTIFY))
        .unwrap();
    let event = two
        .a
        .wait_async_event(crate::common::TIMEOUT)
        .unwrap()
        .expect("SQ_DRAINED");
    assert_eq!(
        (event.event_type, event.number),
        (event_type::SQ_DRAINED, a.qp.number())
    );
    assert_eq!(a.qp.query().unwrap().sq_draining, 0);
    // New work waits; receiving goes on.
    a.qp.write(2, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    std::thread::sleep(NOTHING);
    assert_eq!(a.send_cq.poll(), None);
    a.qp.post_recv(3, &[a.mr.sge(0, 8)]).unwrap();
    b.qp.send(4, &[b.mr.sge(0, 8)]).unwrap();
    assert_success(&b.sent());
    assert_success(&a.received());
    a.qp.set_state(RTS).unwrap();
    let cqe = a.sent();
    assert_success(&cqe);
    assert_eq!(cqe.wr_id, 2);
}

// D-DB-005, D-FLUSH-001, D-QPS-002.
// D-MOD-003.
#[test]
fn a_reset_ends_the_flushing() {
    let two = Two::of(&["--workers", "2"], &Default::default());
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    for round in 0..300 {
        a.qp.set_state(ERR).unwrap();
        for i in 0..8 {
            // Flushed, or not any more.
            a.qp.post_recv(i, &[a.mr.sge(0, 8)]).unwrap();
            a.qp.send(i, &[]).unwrap();
        }
        a.qp.set_state(RESET).unwrap();
        a.qp.modify(Connection::to(&b.qp).init()).unwrap();
        a.qp.post_recv(100 + round, &[a.mr.sge(0, 8)]).unwrap();
        a.qp.modify(Connection::to(&b.qp).rtr()).unwrap();
        a.qp.modify(Connection::to(&b.qp).rts()).unwrap();
        a.qp.write(200 + round, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, 200 + round);
        assert_eq!(a.recv_cq.poll(), None);
    }
}

#[test]
fn sends_before_rts_wait_or_are_flushed() {
    let two = Two::new();
    let pair = Pair {
        a: Side::new(&two.a, &SideOptions::default()),
        b: Side::new(&two.b, &SideOptions::default()),
    };
    let a = &pair.a;
    let connection = Connection::to(&pair.b.qp);
    a.qp.modify(connection.init()).unwrap();
    a.qp.write(1, &[a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    a.assert_quiet();
    a.qp.set_state(ERR).unwrap();
    let cqe = a.sent();
    crate::common::assert_status(&cqe, wc_status::WR_FLUSH_ERR);
}
