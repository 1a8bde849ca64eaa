// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SRD queue pairs: reliable datagrams.
use std::sync::Arc;

use vhost_device_rdma_bare::spec::verbs::{qp_type, wc_opcode, wc_status, wr_opcode};
use vhost_device_rdma_bare::{Address, Connection, Qp, QpOptions, Uses, Vm};

use crate::common::{assert_status, assert_success, everything, pattern, Side, SideOptions, Two};

const QKEY: u32 = 0x1111_1111;
const NO_RANGE: (u64, u32) = (0, 0);

fn of_srd() -> SideOptions {
    SideOptions {
        qp: QpOptions::of(qp_type::SRD),
        cqe: 4096,
        ..SideOptions::default()
    }
}

/// An SRD queue pair that is ready.
fn side(vm: &Arc<Vm>) -> Side {
    let side = Side::new(vm, &of_srd());
    let ready = Connection::reliable_datagram(QKEY);
    side.qp.connect(&ready).unwrap();
    side
}

/// More of them, with what a side has.
fn more(vm: &Arc<Vm>, side: &Side, count: usize) -> Vec<Qp> {
    let uses = Uses {
        context: Some(&side.context),
        pd: Some(&side.pd),
        send_cq: Some(&side.send_cq),
        recv_cq: Some(&side.recv_cq),
        ..Uses::default()
    };
    let options = QpOptions::of(qp_type::SRD);
    let one = |_| {
        let qp = Qp::create(vm, &uses, &options).unwrap();
        qp.connect(&Connection::reliable_datagram(QKEY)).unwrap();
        qp
    };
    (0..count).map(one).collect()
}

// D-SRD-001.
#[test]
fn reliable_datagrams_go_to_any_number_of_destinations() {
    let two = Two::of(&[], &everything());
    let (a, b) = (side(&two.a), side(&two.b));
    let others = more(&two.b, &b, 20);
    let all = others.iter().chain([&b.qp]);
    for (i, to) in (0u64..).zip(all) {
        let there = Address::of(to, QKEY);
        let data = pattern(i, 4096);
        a.mr.write(0, &data);
        to.post_recv(i, &[b.mr.sge(8192, 4096)]).unwrap();
        let send = there.reliable(wr_opcode::SEND, i, NO_RANGE);
        a.qp.post_send(&send, &[a.mr.sge(0, 4096)]).unwrap();
        assert_success(&a.sent());
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.byte_len), (i, 4096));
        assert_eq!((cqe.qp_num, cqe.src_qp), (to.number(), a.qp.number()));
        assert_eq!(b.mr.read(8192, 4096), data);
        let range = (b.mr.iova + 16384, b.mr.rkey);
        let write = there.reliable(wr_opcode::RDMA_WRITE, i, range);
        a.qp.post_send(&write, &[a.mr.sge(0, 4000)]).unwrap();
        assert_success(&a.sent());
        assert_eq!(b.mr.read(16384, 4000), data[..4000]);
        let read = there.reliable(wr_opcode::RDMA_READ, i, range);
        a.qp.post_send(&read, &[a.mr.sge(20000, 4000)]).unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!((cqe.opcode, cqe.byte_len), (wc_opcode::RDMA_READ, 4000));
        assert_eq!(a.mr.read(20000, 4000), data[..4000]);
    }
}

// D-SRD-001.
/// A thousand queue pairs send to one, which has fewer receives at a time.
#[test]
fn reliable_datagrams_of_a_thousand_queue_pairs_all_arrive_once() {
    const SENDERS: usize = 1000;
    let two = Two::of(&[], &everything());
    let (a, b) = (side(&two.a), side(&two.b));
    let senders = more(&two.a, &a, SENDERS);
    let there = Address::of(&b.qp, QKEY);
    for (i, qp) in (0u64..).zip(&senders) {
        let send = there.reliable(wr_opcode::SEND, i, NO_RANGE);
        qp.post_send(&send, &[a.mr.sge(0, 8)]).unwrap();
    }
    let mut came = vec![false; SENDERS];
    for _ in 0..SENDERS {
        b.qp.post_recv(0, &[b.mr.sge(0, 8)]).unwrap();
        let cqe = b.received();
        assert_success(&cqe);
        let from = senders.iter().position(|qp| qp.number() == cqe.src_qp);
        assert!(!std::mem::replace(&mut came[from.unwrap()], true));
    }
    for _ in 0..SENDERS {
        assert_success(&a.sent());
    }
    b.assert_quiet();
}

// D-SRD-002.
/// One that nobody takes keeps no other.
#[test]
fn a_reliable_datagram_without_a_receive_is_overtaken() {
    let two = Two::of(&[], &everything());
    let (a, b) = (side(&two.a), side(&two.b));
    let there = Address::of(&b.qp, QKEY);
    let waits = there.reliable(wr_opcode::SEND, 1, NO_RANGE);
    a.qp.post_send(&waits, &[a.mr.sge(0, 8)]).unwrap();
    let wrong = Address { qkey: 3, ..there }.reliable(wr_opcode::SEND, 2, NO_RANGE);
    a.qp.post_send(&wrong, &[a.mr.sge(0, 8)]).unwrap();
    let cqe = a.sent();
    assert_eq!(cqe.wr_id, 2);
    assert_status(&cqe, wc_status::REM_INV_RD_REQ_ERR);
    let range = (b.mr.iova, b.mr.rkey);
    let write = there.reliable(wr_opcode::RDMA_WRITE, 3, range);
    a.qp.post_send(&write, &[a.mr.sge(0, 8)]).unwrap();
    let cqe = a.sent();
    assert_eq!(cqe.wr_id, 3);
    assert_success(&cqe);
    b.qp.post_recv(7, &[b.mr.sge(0, 8)]).unwrap();
    let cqe = a.sent();
    assert_eq!(cqe.wr_id, 1);
    assert_success(&cqe);
    assert_eq!(b.received().wr_id, 7);
}
