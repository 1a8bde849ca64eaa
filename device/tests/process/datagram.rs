// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! UD queue pairs, the GSI queue pair, multicast groups.
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{Sge, UdWqe};
use vhost_device_rdma_bare::spec::verbs::{
    qp_state, qp_type, send_flag, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Address, Connection, Cq, DeviceProcess, ProcessOptions, Qp, QpOptions, Srq, SrqOptions, Uses,
    Vm, VmOptions,
};

use crate::common::{
    all_types, assert_event, assert_no_event, assert_refused, assert_status, assert_success,
    pattern, process, put_entry, vm, Pair, Side, SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

const QKEY: u32 = 0x1111_1111;
const GRH: usize = 40;

fn of_type(qp_type: u8) -> SideOptions {
    SideOptions {
        qp: QpOptions::of(qp_type),
        ..SideOptions::default()
    }
}

/// A UD queue pair that is ready.
fn side(vm: &Arc<Vm>) -> Side {
    let side = Side::new(vm, &of_type(qp_type::UD));
    side.qp.connect(&Connection::datagram(QKEY)).unwrap();
    side
}

/// The same, deaf to multicast messages of its own VM.
fn blocking(vm: &Arc<Vm>) -> Side {
    let options = SideOptions {
        qp: QpOptions {
            block_multicast_loopback: true,
            ..QpOptions::of(qp_type::UD)
        },
        ..SideOptions::default()
    };
    let side = Side::new(vm, &options);
    side.qp.connect(&Connection::datagram(QKEY)).unwrap();
    side
}

/// The port's GSI queue pair, ready.
fn gsi(vm: &Arc<Vm>) -> Side {
    let side = Side::new(vm, &of_type(qp_type::GSI));
    side.qp.connect(&Connection::datagram(0x8001_0000)).unwrap();
    side
}

fn post(side: &Side, wr_id: u64) {
    side.qp
        .post_recv(wr_id, &[side.mr.sge(wr_id * 8192, 8192)])
        .unwrap();
}

/// Sends `len` bytes to `address`, which completes with success.
#[track_caller]
fn send(from: &Side, wqe: UdWqe, len: u32) {
    from.qp.post_send(&wqe, &[from.mr.sge(0, len)]).unwrap();
    let cqe = from.sent();
    assert_success(&cqe);
    assert_eq!(cqe.wr_id, wqe.wr_id);
}

/// The datagram that `to` receives next is of `len` bytes, and in the receive `wr_id`. Returns the
/// flags of its completion.
#[track_caller]
fn assert_receives(to: &Side, wr_id: u64, len: usize) -> u8 {
    let cqe = to.received();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.byte_len as usize), (wr_id, len + GRH));
    assert_eq!(cqe.opcode, wc_opcode::RECV);
    assert_ne!(cqe.wc_flags & wc_flag::GRH, 0);
    cqe.wc_flags
}

/// `from` reaches `to`, with nothing in between.
#[track_caller]
fn assert_reaches(from: &Side, to: &Side) {
    post(to, 9);
    send(from, Address::of(&to.qp, QKEY).send(7), 77);
    assert_receives(to, 9, 77);
}

fn mapped(address: [u8; 4]) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&address);
    gid
}

// D-UD-001, D-UD-004.
#[test]
fn datagrams_arrive_behind_an_ipv6_header() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    for (i, size) in (0u64..).zip([0usize, 1, 7, 8, 41, 255, 4095, 4096]) {
        let data = pattern(i, size);
        a.mr.write(0, &data);
        b.mr.write(8192, &[0xee; 8192]);
        post(&b, 1);
        let with_imm = i % 2 == 1;
        let wqe = UdWqe {
            opcode: if with_imm {
                wr_opcode::SEND_WITH_IMM
            } else {
                wr_opcode::SEND
            },
            imm: 0x0403_0201,
            flow_label: 0xabcde,
            traffic_class: 0x5a,
            hop_limit: 17,
            sl: 3,
            ..Address::of(&b.qp, QKEY).send(i)
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, size as u32)]).unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.opcode), (i, wc_opcode::SEND));
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.opcode), (1, wc_opcode::RECV));
        assert_eq!(cqe.byte_len as usize, size + GRH);
        assert_eq!((cqe.src_qp, cqe.qp_num), (a.qp.number(), b.qp.number()));
        assert_eq!(cqe.sl, 3);
        let flags = wc_flag::GRH | if with_imm { wc_flag::WITH_IMM } else { 0 };
        assert_eq!(cqe.wc_flags, flags);
        assert_eq!(cqe.imm, if with_imm { 0x0403_0201 } else { 0 });
        let grh = b.mr.read(8192, GRH);
        assert_eq!(grh[..4], [0x65, 0xaa, 0xbc, 0xde]);
        assert_eq!(grh[4..6], (size as u16 + 32).to_be_bytes());
        assert_eq!(grh[6..8], [17, 17]);
        assert_eq!(grh[8..24], two.a.gid());
        assert_eq!(grh[24..], two.b.gid());
        assert_eq!(b.mr.read(8192 + GRH, size), data);
        assert_eq!(b.mr.read(8192 + GRH + size, 100), [0xee; 100]);
    }
}

// D-UD-004.
#[test]
fn datagrams_between_ipv4_addresses_arrive_behind_an_ipv4_header() {
    ipv4_headers(true);
}

// D-EXT-001.
#[test]
fn the_kind_of_a_header_is_not_told_to_who_does_not_know_of_it() {
    ipv4_headers(false);
}

fn ipv4_headers(told: bool) {
    let process = process(2);
    let [a, b] = [1u8, 2].map(|i| {
        let options = VmOptions {
            gid: Some(mapped([192, 168, 7, i])),
            features: all_types().features | u64::from(told) << feature::HEADER_TYPE,
            ..all_types()
        };
        Vm::connect(process.socket(usize::from(i) - 1), options).unwrap()
    });
    // Another address of the sender, which is not IPv4.
    a.set_gid(3, [0xfd; 16]).unwrap();
    let (a, b) = (side(&a), side(&b));
    for (size, hop_limit) in [(0u32, 0u8), (100, 64), (4096, 255)] {
        post(&b, 0);
        let wqe = UdWqe {
            traffic_class: 0xb8,
            hop_limit,
            flow_label: 0xfffff,
            ..Address::of(&b.qp, QKEY).send(1)
        };
        send(&a, wqe, size);
        let flags = assert_receives(&b, 0, size as usize);
        assert_eq!(flags & wc_flag::IPV4 != 0, told);
        let header = b.mr.read(0, GRH);
        assert_eq!(header[..20], [0; 20]);
        let ip = &header[20..];
        assert_eq!(ip[..2], [0x45, 0xb8]);
        assert_eq!(ip[2..4], (size as u16 + 52).to_be_bytes());
        assert_eq!(ip[6..10], [0x40, 0, hop_limit, 17]);
        assert_eq!(ip[12..], [192, 168, 7, 1, 192, 168, 7, 2]);
        let sum: u32 = ip
            .chunks(2)
            .map(|c| u32::from(u16::from_be_bytes([c[0], c[1]])))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
    post(&b, 0);
    let wqe = UdWqe {
        sgid_index: 3,
        ..Address::of(&b.qp, QKEY).send(1)
    };
    send(&a, wqe, 10);
    assert_eq!(assert_receives(&b, 0, 10) & wc_flag::IPV4, 0);
    let grh = b.mr.read(0, GRH);
    assert_eq!(grh[0] >> 4, 6);
    assert_eq!(grh[8..24], [0xfd; 16]);
    assert_eq!(grh[24..], mapped([192, 168, 7, 2]));
}

#[test]
fn header_and_message_are_scattered() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    let data = pattern(1, 1000);
    a.mr.write(0, &data);
    // The usual way: the header elsewhere; and pieces that mix them.
    for lengths in [[40u32, 1000, 0, 0], [1, 38, 2, 4096], [8, 31, 2, 2000]] {
        let mut sges = Vec::new();
        for (i, length) in (0u64..).zip(lengths) {
            sges.push(b.mr.sge(i * 10_000 + i, length));
        }
        b.qp.post_recv(1, &sges).unwrap();
        let parts = [a.mr.sge(0, 300), a.mr.sge(300, 1), a.mr.sge(301, 699)];
        a.qp.post_send(&Address::of(&b.qp, QKEY).send(1), &parts)
            .unwrap();
        assert_success(&a.sent());
        assert_receives(&b, 1, 1000);
        let mut all = Vec::new();
        for (i, length) in lengths.into_iter().enumerate() {
            all.extend(b.mr.read(i * 10_001, length as usize));
        }
        assert_eq!(all[8..24], two.a.gid());
        assert_eq!(all[GRH..1040], data);
    }
    let inline = pattern(2, 100);
    post(&b, 1);
    a.qp.post_inline(&Address::of(&b.qp, QKEY).send(1), &inline)
        .unwrap();
    assert_success(&a.sent());
    assert_receives(&b, 1, 100);
    assert_eq!(b.mr.read(8192 + GRH, 100), inline);
}

// D-UD-003, D-UD-005.
#[test]
fn the_q_key_decides() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    post(&b, 1);
    for qkey in [0, QKEY ^ 1, QKEY & 0xffff, 0x7fff_ffff] {
        send(&a, Address::of(&b.qp, qkey).send(1), 10);
    }
    assert_eq!(two.b.query_port().unwrap().qkey_viol_cntr, 4);
    assert_eq!(two.a.query_port().unwrap().qkey_viol_cntr, 0);
    b.assert_quiet();
    assert_no_event(&two.b);
    // With the privileged bit it is the sender's own.
    for qkey in [0x8000_0000, 0xffff_ffff, 0x8000_0000 | QKEY] {
        send(&a, Address::of(&b.qp, qkey).send(1), 10);
        assert_receives(&b, 1, 10);
        post(&b, 1);
    }
    // A receiver with a privileged one is reached by those only that have it themselves.
    let privileged = Side::new(&two.b, &of_type(qp_type::UD));
    privileged
        .qp
        .connect(&Connection::datagram(0x8123_4567))
        .unwrap();
    post(&privileged, 1);
    for qkey in [0x8123_4567, 0x0123_4567] {
        send(&a, Address::of(&privileged.qp, qkey).send(1), 10);
    }
    privileged.assert_quiet();
    let other = Side::new(&two.a, &of_type(qp_type::UD));
    other
        .qp
        .connect(&Connection::datagram(0x8123_4567))
        .unwrap();
    send(&other, Address::of(&privileged.qp, 0x8123_4567).send(1), 10);
    assert_receives(&privileged, 1, 10);
    // It can be changed while the queue pair is ready.
    let mut attr = b.qp.query().unwrap();
    assert_eq!(attr.qkey, QKEY);
    attr.qkey = 5;
    b.qp.modify((attr, 0x40)).unwrap();
    send(&a, Address::of(&b.qp, QKEY).send(1), 10);
    b.assert_quiet();
    send(&a, Address::of(&b.qp, 5).send(1), 11);
    assert_receives(&b, 1, 11);
}

// D-UD-002.
#[test]
fn a_receive_that_is_too_short_waits_for_a_shorter_datagram() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    b.mr.write(0, &[0xee; 200]);
    b.qp.post_recv(1, &[b.mr.sge(0, 139)]).unwrap();
    b.qp.post_recv(2, &[b.mr.sge(8192, 4136)]).unwrap();
    send(&a, Address::of(&b.qp, QKEY).send(1), 100);
    send(&a, Address::of(&b.qp, QKEY).send(2), 4096);
    b.assert_quiet();
    assert_eq!(b.mr.read(0, 200), [0xee; 200]);
    send(&a, Address::of(&b.qp, QKEY).send(3), 99);
    assert_receives(&b, 1, 99);
    send(&a, Address::of(&b.qp, QKEY).send(4), 4096);
    assert_receives(&b, 2, 4096);
    // None at all.
    send(&a, Address::of(&b.qp, QKEY).send(5), 1);
    b.assert_quiet();
    // Shorter than the header.
    b.qp.post_recv(3, &[b.mr.sge(0, 39)]).unwrap();
    send(&a, Address::of(&b.qp, QKEY).send(6), 0);
    b.assert_quiet();
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
    // One that was taken is flushed like all.
    b.qp.post_recv(4, &[b.mr.sge(0, 100)]).unwrap();
    b.qp.set_state(qp_state::ERR).unwrap();
    for wr_id in [3, 4] {
        let cqe = b.received();
        assert_status(&cqe, wc_status::WR_FLUSH_ERR);
        assert_eq!(cqe.wr_id, wr_id);
    }
    assert_eq!(two.a.query_port().unwrap().rnr_naks, 0);
}

#[test]
fn a_bad_receive_is_the_receivers_error_alone() {
    let two = Two::with_all_types();
    let a = side(&two.a);
    let other = side(&two.b);
    let read_only = other.pd.register(4096, 0).unwrap();
    for bad in [
        Sge {
            lkey: 0,
            ..other.mr.sge(0, 8192)
        },
        read_only.sge(0, 4096),
    ] {
        let b = side(&two.b);
        b.qp.post_recv(1, &[bad]).unwrap();
        b.qp.post_recv(2, &[b.mr.sge(0, 100)]).unwrap();
        send(&a, Address::of(&b.qp, QKEY).send(1), 10);
        let cqe = b.received();
        assert_status(&cqe, wc_status::LOC_PROT_ERR);
        assert_eq!(cqe.wr_id, 1);
        assert_status(&b.received(), wc_status::WR_FLUSH_ERR);
        assert_eq!(b.qp.state().unwrap(), qp_state::ERR);
    }
    assert_reaches(&a, &other);
}

// D-UD-001, D-MC-004.
#[test]
fn datagrams_to_nobody_are_lost() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    let pair = two.pair();
    pair.b.qp.post_recv(1, &[pair.b.mr.sge(0, 8192)]).unwrap();
    let not_ready = Side::new(&two.b, &of_type(qp_type::UD));
    not_ready
        .qp
        .modify(Connection::datagram(QKEY).init())
        .unwrap();
    post(&not_ready, 1);
    post(&b, 1);
    let to = |dgid, qpn| Address {
        dmac: [0; 6],
        dgid,
        qpn,
        qkey: QKEY,
    };
    let gid = two.b.gid();
    for address in [
        to([0xfd; 16], b.qp.number()),
        to([0; 16], b.qp.number()),
        to(two.a.gid(), b.qp.number()),
        to(gid, 0),
        to(gid, 1),
        to(gid, 0x00ff_ffff),
        to(gid, b.qp.number() + 1000),
        to(gid, pair.b.qp.number()),
        to(gid, not_ready.qp.number()),
        // A multicast GID, but not the number that goes with it; and a group of nobody.
        to([0xff; 16], b.qp.number()),
        to([0xff; 16], 0x00ff_ffff),
    ] {
        send(&a, address.send(1), 10);
    }
    b.assert_quiet();
    pair.b.assert_quiet();
    not_ready.assert_quiet();
    // RTR is enough.
    not_ready
        .qp
        .modify(Connection::datagram(QKEY).rtr())
        .unwrap();
    send(&a, Address::of(&not_ready.qp, QKEY).send(1), 10);
    assert_receives(&not_ready, 1, 10);
    assert_reaches_posted(&a, &b);
    // Nor does anything come from another network.
    let options = ProcessOptions {
        vms: vec![
            "mac=52:54:00:00:00:01,network=x".into(),
            "mac=52:54:00:00:00:02,network=y".into(),
        ],
        ..ProcessOptions::vms(0)
    };
    let process =
        DeviceProcess::start(&options.binary(env!("CARGO_BIN_EXE_vhost-device-rdma"))).unwrap();
    let [x, y] = [0, 1].map(|i| Vm::connect(process.socket(i), all_types()).unwrap());
    let group = [0xff; 16];
    let (x, y) = (side(&x), side(&y));
    y.qp.attach(group).unwrap();
    post(&y, 1);
    send(&x, Address::of(&y.qp, QKEY).send(1), 10);
    send(&x, Address::group(group, QKEY).send(1), 10);
    y.assert_quiet();
}

/// `from` reaches `to`, which has the receive 1.
#[track_caller]
fn assert_reaches_posted(from: &Side, to: &Side) {
    send(from, Address::of(&to.qp, QKEY).send(1), 33);
    assert_receives(to, 1, 33);
}

/// Posts `wqe`; expects that the device refuses it, and that only the send queue suffers.
#[track_caller]
fn refused(a: &Side, b: &Side, wqe: UdWqe, sges: &[Sge], status: u8, reason: u8) {
    let wqe = UdWqe { wr_id: 1, ..wqe };
    let mut batch = a.qp.send_queue().batch();
    batch.push(&wqe, sges.iter().copied()).unwrap();
    batch
        .push(&Address::of(&b.qp, QKEY).send(2), [a.mr.sge(0, 8)])
        .unwrap();
    batch.commit();
    a.qp.ring().unwrap();
    let cqe = a.sent();
    assert_status(&cqe, status);
    assert_eq!(cqe.wr_id, 1);
    assert_eq!(
        vendor_err::name(cqe.vendor_err),
        vendor_err::name(reason),
        "{wqe:?}"
    );
    let cqe = a.sent();
    assert_status(&cqe, wc_status::WR_FLUSH_ERR);
    assert_eq!(cqe.wr_id, 2);
    assert_eq!(a.qp.state().unwrap(), qp_state::SQE);
    // It still receives.
    assert_reaches(b, a);
    a.qp.set_state(qp_state::RTS).unwrap();
    assert_reaches(a, b);
}

// D-SQE-001, D-SQE-002.
#[test]
fn entries_that_are_wrong_end_the_send_queue_until_it_is_made_ready_again() {
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    let good = Address::of(&b.qp, QKEY).send(1);
    let sge = [a.mr.sge(0, 8)];
    let check = |wqe, status, reason| refused(&a, &b, wqe, &sge, status, reason);
    for opcode in [
        wr_opcode::RDMA_WRITE,
        wr_opcode::RDMA_WRITE_WITH_IMM,
        wr_opcode::RDMA_READ,
        wr_opcode::ATOMIC_CMP_AND_SWP,
        wr_opcode::LOCAL_INV,
        wr_opcode::BIND_MW,
        wr_opcode::SEND_WITH_INV,
        wr_opcode::FLUSH,
        255,
    ] {
        check(
            UdWqe { opcode, ..good },
            wc_status::LOC_QP_OP_ERR,
            vendor_err::OPCODE,
        );
    }
    for flags in [0x10, 0x20, 0x40] {
        let wqe = UdWqe { flags, ..good };
        check(wqe, wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
    }
    for spoil in [
        (|w: &mut UdWqe| w.sgid_index = 1) as fn(&mut UdWqe),
        |w| w.sgid_index = 32,
        |w| w.sgid_index = u16::MAX,
        |w| w.sl = 16,
        |w| w.flow_label = 1 << 20,
        |w| w.remote_qpn = 1 << 24,
        |w| w.pkey_index = 1,
        |w| w.reserved0 = 1,
        |w| w.reserved1[5] = 1,
    ] {
        let mut wqe = good;
        spoil(&mut wqe);
        check(wqe, wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
    }
    let lengths = |lengths: &[u32]| -> Vec<Sge> {
        let sges = lengths.iter().map(|length| a.mr.sge(0, *length));
        sges.collect()
    };
    for long in [&[4097][..], &[4096, 1], &[u32::MAX; 4]] {
        refused(
            &a,
            &b,
            good,
            &lengths(long),
            wc_status::LOC_LEN_ERR,
            vendor_err::MESSAGE_LENGTH,
        );
    }
    let bad = [Sge {
        lkey: a.mr.lkey ^ 1,
        ..a.mr.sge(0, 8)
    }];
    refused(
        &a,
        &b,
        good,
        &bad,
        wc_status::LOC_PROT_ERR,
        vendor_err::KEY_UNKNOWN,
    );
    assert_no_event(&two.a);
}

#[test]
fn many_send_to_one() {
    let two = Two::of(&["--workers", "2"], &all_types());
    let to = side(&two.b);
    let from: Vec<Side> = (0..6)
        .map(|i| side(if i % 3 == 0 { &two.b } else { &two.a }))
        .collect();
    for wr_id in 0..64 {
        to.qp
            .post_recv(wr_id, &[to.mr.sge(wr_id * 64, 64)])
            .unwrap();
    }
    let address = Address::of(&to.qp, QKEY);
    let mut last = std::collections::HashMap::new();
    let mut received = 0;
    // (No more under way than there are receives.)
    for round in 0..40u64 {
        for from in &from {
            from.mr.write(0, &round.to_le_bytes());
            from.qp
                .post_send(&address.send(round), &[from.mr.sge(0, 8)])
                .unwrap();
        }
        for from in &from {
            assert_success(&from.sent());
        }
        for _ in &from {
            let cqe = to.received();
            assert_success(&cqe);
            let at = cqe.wr_id as usize * 64;
            let value = to.mr.read(at + GRH, 8);
            let value = u64::from_le_bytes(value.try_into().unwrap());
            let expected = last
                .entry((cqe.src_qp, to.mr.read(at + 8, 16)))
                .or_insert(0);
            assert_eq!(value, *expected);
            *expected += 1;
            received += 1;
            to.qp
                .post_recv(cqe.wr_id, &[to.mr.sge(cqe.wr_id * 64, 64)])
                .unwrap();
        }
    }
    assert_eq!((received, last.len()), (240, 6));
}

#[test]
fn a_queue_pair_sends_to_itself() {
    let two = Two::with_all_types();
    let a = side(&two.a);
    assert_reaches(&a, &a);
}

// D-UC-004, D-UD-006.
#[test]
fn datagrams_to_a_stopped_vm_hold_nobody_up() {
    let two = Two::with_all_types();
    let (a, b, c) = (side(&two.a), side(&two.b), side(&two.a));
    post(&b, 1);
    two.b.stop().unwrap();
    for i in 0..100 {
        send(&a, Address::of(&b.qp, QKEY).send(i), 10);
    }
    assert_reaches(&a, &c);
    two.b.start().unwrap();
    assert_reaches_posted(&a, &b);
    two.b.reset().unwrap();
    send(&a, Address::of(&b.qp, QKEY).send(1), 10);
}

#[test]
fn receives_may_come_from_a_shared_receive_queue() {
    let two = Two::with_all_types();
    let a = side(&two.a);
    let mut shared = None;
    let b = Side::with(&two.b, |vm, uses| {
        let srq = Srq::new(
            uses.context.unwrap(),
            uses.pd.unwrap(),
            &SrqOptions::default(),
        )
        .unwrap();
        let uses = Uses {
            srq: Some(&srq),
            ..uses
        };
        let qp = Qp::create(vm, &uses, &QpOptions::of(qp_type::UD)).unwrap();
        shared = Some(srq);
        qp
    });
    let srq = shared.unwrap();
    b.qp.connect(&Connection::datagram(QKEY)).unwrap();
    let address = Address::of(&b.qp, QKEY);
    send(&a, address.send(1), 10);
    b.assert_quiet();
    // The first is too short, and waits.
    srq.post_recv(0, &[b.mr.sge(0, 100)]).unwrap();
    srq.post_recv(1, &[b.mr.sge(8192, 8192)]).unwrap();
    send(&a, address.send(1), 61);
    send(&a, address.send(1), 60);
    assert_receives(&b, 0, 60);
    send(&a, address.send(1), 61);
    assert_receives(&b, 1, 61);
    for i in 0..300u64 {
        srq.post_recv(i, &[b.mr.sge(0, 100)]).unwrap();
        send(&a, address.send(1), 10);
        assert_receives(&b, i, 10);
    }
}

// D-MC-001, D-MC-002, D-MC-003.
#[test]
fn multicast_messages_reach_all_members() {
    let two = Two::with_all_types();
    let group = mapped([224, 0, 1, 7]);
    let other_group = mapped([224, 0, 1, 8]);
    let sender = side(&two.a);
    let members = [side(&two.a), side(&two.b), side(&two.b)];
    let outsider = side(&two.b);
    let wrong_key = Side::new(&two.b, &of_type(qp_type::UD));
    wrong_key.qp.connect(&Connection::datagram(1)).unwrap();
    let without_receive = side(&two.b);
    for member in members.iter().chain([&wrong_key, &without_receive]) {
        member.qp.attach(group).unwrap();
    }
    // Twice is as good as once.
    members[0].qp.attach(group).unwrap();
    outsider.qp.attach(other_group).unwrap();
    for side in members.iter().chain([&outsider, &wrong_key]) {
        post(side, 0);
        post(side, 1);
    }
    let data = pattern(1, 500);
    sender.mr.write(0, &data);
    let to_group = Address::group(group, QKEY);
    send(&sender, to_group.send(1), 500);
    for member in &members {
        assert_receives(member, 0, 500);
        assert_eq!(member.mr.read(GRH, 500), data);
        assert_eq!(member.mr.read(24, 16), group);
        assert_eq!(member.mr.read(8, 16), two.a.gid());
    }
    for side in members.iter().chain([&outsider, &wrong_key, &sender]) {
        side.assert_quiet();
    }
    // A member hears itself, unless it does not want to.
    sender.qp.attach(group).unwrap();
    post(&sender, 0);
    send(&sender, to_group.send(2), 20);
    assert_receives(&sender, 0, 20);
    for member in &members {
        assert_receives(member, 1, 20);
        post(member, 0);
    }
    sender.qp.detach(group).unwrap();
    let blocking = blocking(&two.a);
    blocking.qp.attach(group).unwrap();
    post(&blocking, 0);
    send(&blocking, to_group.send(3), 30);
    assert_receives(&members[1], 0, 30);
    assert_receives(&members[2], 0, 30);
    blocking.assert_quiet();
    members[0].assert_quiet();
    // It does hear others of its VM.
    send(&sender, to_group.send(4), 40);
    assert_receives(&blocking, 0, 40);
    assert_receives(&members[0], 0, 40);
    // Who has left hears nothing.
    for member in &members {
        post(member, 0);
    }
    members[1].qp.detach(group).unwrap();
    send(&sender, to_group.send(5), 50);
    assert_receives(&members[2], 0, 50);
    assert_receives(&members[0], 0, 50);
    members[1].assert_quiet();
}

// D-RC-004 has the same for other messages.
#[test]
fn large_groups_take_many_polls() {
    const MEMBERS: u64 = 100;
    const MESSAGES: u64 = 20;
    /// Messages moved in a poll.
    const BURST: u64 = 32;
    let two = Two::with_all_types();
    let group = mapped([224, 0, 1, 7]);
    let (sender, base) = (side(&two.a), side(&two.b));
    let recv_cq = Cq::new(&two.b, 4096, 0).unwrap();
    let uses = Uses {
        context: Some(&base.context),
        pd: Some(&base.pd),
        send_cq: Some(&base.send_cq),
        recv_cq: Some(&recv_cq),
        ..Uses::default()
    };
    let members: Vec<Qp> = (0..MEMBERS)
        .map(|i| {
            let qp = Qp::create(&two.b, &uses, &QpOptions::of(qp_type::UD)).unwrap();
            qp.connect(&Connection::datagram(QKEY)).unwrap();
            qp.attach(group).unwrap();
            for message in 0..MESSAGES {
                qp.post_recv(message, &[base.mr.sge(i * 128, 128)]).unwrap();
            }
            qp
        })
        .collect();
    let polls = || {
        let status = two.process.status().unwrap();
        let workers = status["workers"].as_array().unwrap();
        let polls = workers.iter().map(|worker| worker["polls"].as_u64());
        polls.sum::<Option<u64>>().unwrap()
    };
    let before = polls();
    let to_group = Address::group(group, QKEY);
    for message in 0..MESSAGES {
        send(&sender, to_group.send(message), 8);
    }
    // Each member has got each message once, and in order.
    let mut next = vec![0; members.len()];
    for _ in 0..MEMBERS * MESSAGES {
        let cqe = recv_cq.wait(TIMEOUT).expect("a receive completion");
        assert_success(&cqe);
        let index = members.iter().position(|qp| qp.number() == cqe.qp_num);
        let next = &mut next[index.unwrap()];
        assert_eq!(cqe.wr_id, *next);
        *next += 1;
    }
    assert!(polls() - before >= MEMBERS * MESSAGES / BURST);
}

#[test]
fn groups_forget_who_is_gone() {
    let mut two = Two::with_all_types();
    let group = [0xff; 16];
    let sender = side(&two.a);
    let to_group = Address::group(group, QKEY);
    for _ in 0..300 {
        let member = side(&two.b);
        member.qp.attach(group).unwrap();
    }
    let member = side(&two.b);
    member.qp.attach(group).unwrap();
    post(&member, 0);
    send(&sender, to_group.send(1), 10);
    assert_receives(&member, 0, 10);
    two.b.stop().unwrap();
    send(&sender, to_group.send(1), 10);
    two.b.start().unwrap();
    two.b.reset().unwrap();
    send(&sender, to_group.send(1), 10);
    drop(member);
    two.b.kill();
    send(&sender, to_group.send(1), 10);
    let path = two.b.path().to_owned();
    two.b = Vm::connect(&path, all_types()).unwrap();
    let member = side(&two.b);
    post(&member, 0);
    send(&sender, to_group.send(1), 10);
    member.assert_quiet();
    member.qp.attach(group).unwrap();
    send(&sender, to_group.send(1), 10);
    assert_receives(&member, 0, 10);
}

// D-MC-001, D-MC-002.
#[test]
fn commands_of_a_member_do_not_make_it_miss_a_message() {
    let two = Two::of(&["--workers", "2"], &all_types());
    let group = mapped([239, 1, 2, 3]);
    let sender = side(&two.a);
    let member = side(&two.b);
    member.qp.attach(group).unwrap();
    std::thread::scope(|scope| {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let told = stop.clone();
        let busy = scope.spawn(move || {
            while !told.load(std::sync::atomic::Ordering::Relaxed) {
                drop(member.pd.register(4096, ALL).unwrap());
            }
            member
        });
        for i in 0..50 {
            send(&sender, Address::group(group, QKEY).send(i), 10);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let member = busy.join().unwrap();
        // None had a receive.
        member.assert_quiet();
    });
    let member = side(&two.b);
    member.qp.attach(group).unwrap();
    let member = &member;
    std::thread::scope(|scope| {
        let busy = scope.spawn(move || {
            for _ in 0..300 {
                drop(member.pd.register(4096, ALL).unwrap());
            }
        });
        for i in 0..300 {
            member.qp.post_recv(i, &[member.mr.sge(0, 100)]).unwrap();
            send(&sender, Address::group(group, QKEY).send(i), 10);
            assert_receives(member, i, 10);
        }
        busy.join().unwrap();
    });
}

#[test]
fn commands_about_groups_are_checked() {
    let two = Two::with_all_types();
    let group = mapped([224, 0, 1, 7]);
    let ud = side(&two.a);
    assert_refused(ud.qp.attach(two.a.gid()), status::EINVAL);
    assert_refused(ud.qp.attach([0; 16]), status::EINVAL);
    assert_refused(ud.qp.attach(mapped([240, 0, 0, 1])), status::EINVAL);
    assert_refused(ud.qp.attach(mapped([223, 255, 0, 1])), status::EINVAL);
    assert_refused(ud.qp.detach(group), status::ENOENT);
    ud.qp.attach(group).unwrap();
    assert_refused(ud.qp.detach(mapped([224, 0, 1, 8])), status::ENOENT);
    ud.qp.detach(group).unwrap();
    assert_refused(ud.qp.detach(group), status::ENOENT);
    let rc = Side::new(&two.a, &SideOptions::default());
    assert_refused(rc.qp.attach(group), status::EINVAL);
    // Without the feature.
    let process = process(1);
    let plain = vm(process.socket(0));
    let rc = Side::new(&plain, &SideOptions::default());
    assert_refused(rc.qp.attach(group), status::EOPNOTSUPP);
    assert_refused(rc.qp.detach(group), status::EOPNOTSUPP);
}

#[test]
fn the_gsi_queue_pair_is_queue_pair_1() {
    let two = Two::with_all_types();
    let (a, b) = (gsi(&two.a), gsi(&two.b));
    let to = |vm: &Vm| Address {
        dmac: vm.mac(),
        dgid: vm.gid(),
        qpn: 1,
        // The well-known Q_Key, which is privileged: everyone's own.
        qkey: 0x8001_0000,
    };
    post(&b, 1);
    a.mr.write(0, &pattern(1, 256));
    send(&a, to(&two.b).send(1), 256);
    let cqe = b.received();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.byte_len), (1, 296));
    // The sender is told by 1, the receiver by its handle.
    assert_eq!((cqe.src_qp, cqe.qp_num), (1, b.qp.number()));
    assert_eq!(b.mr.read(8192 + GRH, 256), pattern(1, 256));
    // Back and forth, also to itself.
    for _ in 0..10 {
        post(&a, 1);
        send(&b, to(&two.a).send(1), 10);
        assert_receives(&a, 1, 10);
        post(&a, 1);
        send(&a, to(&two.a).send(1), 20);
        assert_receives(&a, 1, 20);
    }
    // An application without that key does not get there.
    let app = side(&two.a);
    post(&b, 1);
    send(&app, to(&two.b).send(1), 10);
    let violations = two.b.query_port().unwrap().qkey_viol_cntr;
    assert_eq!(violations, 1);
    b.assert_quiet();
    // A GSI queue pair can write to applications, too.
    post(&app, 1);
    send(&b, Address::of(&app.qp, QKEY).send(1), 10);
    let cqe = app.received();
    assert_success(&cqe);
    assert_eq!(cqe.src_qp, 1);
    // There is one per port.
    let context = &a.context;
    let again = Qp::new(
        context,
        &a.pd,
        &a.send_cq,
        &a.recv_cq,
        &QpOptions::of(qp_type::GSI),
    );
    assert_refused(again, status::EBUSY);
    drop(a);
    send(&b, to(&two.a).send(1), 10);
    let a = gsi(&two.a);
    post(&a, 1);
    send(&b, to(&two.a).send(1), 30);
    assert_receives(&a, 1, 30);
}

// D-FEAT-004, D-FEAT-006.
#[test]
fn creating_datagram_queue_pairs_is_checked() {
    let two = Two::with_all_types();
    let a = side(&two.a);
    let srq = Srq::new(&a.context, &a.pd, &SrqOptions::default()).unwrap();
    let uses = Uses {
        context: Some(&a.context),
        pd: Some(&a.pd),
        send_cq: Some(&a.send_cq),
        recv_cq: Some(&a.recv_cq),
        srq: Some(&srq),
        xrcd: None,
    };
    let create = |uses: &Uses<'_>, options: &QpOptions| Qp::create(&two.a, uses, options);
    assert_refused(create(&uses, &QpOptions::of(qp_type::GSI)), status::EINVAL);
    let blocking = QpOptions {
        block_multicast_loopback: true,
        ..QpOptions::default()
    };
    let uses = Uses { srq: None, ..uses };
    assert_refused(create(&uses, &blocking), status::EINVAL);
    let none = Uses {
        recv_cq: None,
        ..uses
    };
    assert_refused(create(&none, &QpOptions::of(qp_type::UD)), status::ENOENT);
    // Without the feature.
    let process = process(1);
    let plain = vm(process.socket(0));
    let rc = Side::new(&plain, &SideOptions::default());
    for kind in [
        qp_type::UD,
        qp_type::GSI,
        qp_type::UC,
        qp_type::XRC_INI,
        qp_type::XRC_TGT,
    ] {
        let qp = Qp::new(
            &rc.context,
            &rc.pd,
            &rc.send_cq,
            &rc.recv_cq,
            &QpOptions::of(kind),
        );
        assert_refused(qp, status::EOPNOTSUPP);
    }
    for vm in [&plain, &two.a] {
        let limits = vm.query_device().unwrap();
        assert!(limits.max_ah > 0 && limits.max_mcast_grp > 0 && limits.max_mcast_qp_attach > 0);
        assert!(limits.max_srq > 0 && limits.max_srq_wr > 0 && limits.max_srq_sge > 0);
        assert!(limits.max_xrcd > 0 && limits.max_mw > 0);
        assert!(limits.max_cq_moderation_count > 0 && limits.max_cq_moderation_period > 0);
    }
}

#[test]
fn a_receive_queue_that_is_solicited_raises_an_event() {
    use vhost_device_rdma_bare::core::ArmMode;
    let two = Two::with_all_types();
    let (a, b) = (side(&two.a), side(&two.b));
    post(&b, 0);
    post(&b, 1);
    b.recv_cq.arm(ArmMode::Solicited);
    let address = Address::of(&b.qp, QKEY);
    send(&a, address.send(1), 10);
    assert!(!b.recv_cq.wait_event(NOTHING).unwrap());
    let wqe = UdWqe {
        flags: send_flag::SOLICITED,
        ..address.send(2)
    };
    send(&a, wqe, 10);
    assert!(b.recv_cq.wait_event(TIMEOUT).unwrap());
}

#[test]
fn a_full_completion_queue_is_the_receivers_error_alone() {
    use vhost_device_rdma_bare::spec::event::event_type;
    let two = Two::with_all_types();
    let a = side(&two.a);
    let b = Side::with(&two.b, |vm, uses| {
        let small = Cq::new(vm, 4, 1).unwrap();
        let uses = Uses {
            recv_cq: Some(&small),
            ..uses
        };
        Qp::create(vm, &uses, &QpOptions::of(qp_type::UD)).unwrap()
    });
    b.qp.connect(&Connection::datagram(QKEY)).unwrap();
    for i in 0..8 {
        b.qp.post_recv(i, &[b.mr.sge(0, 100)]).unwrap();
        send(&a, Address::of(&b.qp, QKEY).send(i), 10);
    }
    assert_event(&two.b, event_type::CQ_ERR, b.qp.recv_cq().number());
    crate::common::assert_reaches(&b.qp, qp_state::ERR);
    assert_eq!(a.qp.state().unwrap(), qp_state::RTS);
}

#[test]
fn random_entries_do_no_harm() {
    let mut two = Two::with_all_types();
    let (witness_a, witness_b) = (side(&two.a), side(&two.b));
    let (a, b) = (side(&two.a), side(&two.b));
    let group = [0xff; 16];
    b.qp.attach(group).unwrap();
    a.qp.attach(group).unwrap();
    let gids = [two.a.gid(), two.b.gid(), group, [0; 16]];
    let numbers = [a.qp.number(), b.qp.number(), 1, 0x00ff_ffff];
    let (iova, lkey) = (a.mr.iova, a.mr.lkey);
    let sge = (
        prop_oneof![4 => Just(iova), 1 => any::<u64>()],
        prop_oneof![6 => 0u32..300, 1 => any::<u32>()],
        prop_oneof![6 => Just(lkey), 1 => any::<u32>()],
    );
    let entry = (
        prop_oneof![6 => 2u8..4, 1 => any::<u8>()],
        prop_oneof![4 => 0u8..16, 1 => any::<u8>()],
        prop_oneof![6 => 0u16..5, 1 => any::<u16>()],
        (
            prop_oneof![4 => (0usize..4).prop_map(move |i| gids[i]), 1 => any::<[u8; 16]>()],
            prop_oneof![4 => (0usize..4).prop_map(move |i| numbers[i]), 1 => any::<u32>()],
            prop_oneof![4 => Just(QKEY), 1 => any::<u32>()],
        ),
        prop_oneof![3 => Just([0u8; 24]), 1 => prop::array::uniform24(any::<u8>())],
        prop::collection::vec(sge, 4),
    );
    let mut runner = TestRunner::new(Config {
        cases: 60,
        ..Config::default()
    });
    let result = runner.run(&prop::collection::vec(entry, 1..8), |entries| {
        for side in [&a, &b] {
            side.qp.set_state(qp_state::RESET).unwrap();
            side.qp.connect(&Connection::datagram(QKEY)).unwrap();
            for i in 0..16 {
                let sges = [side.mr.sge(1000 * i, 40), side.mr.sge(1000 * i + 40, 300)];
                side.qp.post_recv(i, &sges).unwrap();
            }
        }
        for (i, (opcode, flags, count, (dgid, qpn, qkey), rest, sges)) in entries.iter().enumerate()
        {
            // Entries of 256 bytes, at offset 256.
            let at = 256 + 256 * i;
            let mut bytes = UdWqe {
                opcode: *opcode,
                flags: *flags | 0x80,
                count: *count,
                dgid: *dgid,
                remote_qpn: *qpn,
                remote_qkey: *qkey,
                ..UdWqe::default()
            }
            .to_bytes();
            bytes[40..].copy_from_slice(rest);
            put_entry(&a.qp, at, &bytes, sges);
        }
        a.qp.ring().unwrap();
        for _ in &entries {
            let cqe = a.send_cq.wait(Duration::from_secs(10)).unwrap();
            assert!(wc_status::name(cqe.status).is_some(), "{cqe:?}");
        }
        for side in [&a, &b] {
            while let Some(cqe) = side.recv_cq.poll() {
                assert_success(&cqe);
                assert!((40..=340).contains(&cqe.byte_len), "{cqe:?}");
            }
        }
        Ok(())
    });
    result.unwrap();
    assert_reaches(&witness_a, &witness_b);
    two.assert_unharmed();
}

#[test]
fn rc_goes_on_beside() {
    let two = Two::with_all_types();
    let pair = Pair::new(&two.a, &two.b);
    let (a, b) = (side(&two.a), side(&two.b));
    for i in 0..100 {
        assert_reaches(&a, &b);
        pair.b.qp.post_recv(i, &[pair.b.mr.sge(0, 64)]).unwrap();
        pair.a.qp.send(i, &[pair.a.mr.sge(0, 64)]).unwrap();
        assert_success(&pair.a.sent());
        assert_success(&pair.b.received());
    }
}
