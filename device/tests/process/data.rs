// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Data moves, all of it and nothing else, with every operation.
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{send_flag, wc_flag, wc_opcode, wr_opcode};
use vhost_device_rdma_bare::Pd;

use crate::common::{assert_success, caps, counts, pattern, Pair, SideOptions, Two, ALL};

/// Around every size where something changes: words, pages, slices of a long message.
const SIZES: [usize; 18] = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    63,
    64,
    65,
    4095,
    4096,
    4097,
    65535,
    65536,
    65537,
    200_003,
    1 << 20,
];

// D-CPL-001, D-RC-003.
#[test]
fn send_moves_data_of_every_size() {
    let two = Two::new();
    let pair = two.pair();
    for (i, size) in (0u64..).zip(SIZES) {
        let data = pattern(i, size);
        pair.a.mr.write(0, &data);
        pair.b
            .qp
            .post_recv(100 + i, &[pair.b.mr.sge(0, 1 << 20)])
            .unwrap();
        pair.a.qp.send(i, &[pair.a.mr.sge(0, size as u32)]).unwrap();
        let sent = pair.a.sent();
        assert_success(&sent);
        assert_eq!(
            (sent.wr_id, sent.opcode, sent.qp_num),
            (i, wc_opcode::SEND, pair.a.qp.number())
        );
        let received = pair.b.received();
        assert_success(&received);
        assert_eq!(
            (received.wr_id, received.opcode),
            (100 + i, wc_opcode::RECV)
        );
        assert_eq!(
            (received.qp_num, received.src_qp),
            (pair.b.qp.number(), pair.a.qp.number())
        );
        assert_eq!(received.byte_len as usize, size);
        assert_eq!(received.wc_flags, 0);
        assert_eq!(pair.b.mr.read(0, size), data);
    }
}

// D-RC-003.
#[test]
fn write_and_read_move_data_of_every_size_and_alignment() {
    let two = Two::new();
    let pair = two.pair();
    for (i, size) in (0u64..).zip(SIZES) {
        for (from, to) in [(0u64, 0u64), (1, 0), (0, 3), (5, 9), (4090, 4)] {
            if size as u64 + from.max(to) + 8 > 1 << 20 {
                continue;
            }
            let data = pattern(i * 10 + from, size);
            let (a, b) = (&pair.a, &pair.b);
            // What surrounds the destination must stay.
            b.mr.write(0, &vec![0xee; size + to as usize + 8]);
            a.mr.write(from as usize, &data);
            a.qp.write(i, &[a.mr.sge(from, size as u32)], b.mr.iova + to, b.mr.rkey)
                .unwrap();
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!((cqe.wr_id, cqe.opcode), (i, wc_opcode::RDMA_WRITE));
            assert_eq!(
                b.mr.read(to as usize, size),
                data,
                "write of {size} from {from} to {to}"
            );
            assert_eq!(b.mr.read(to as usize + size, 8), [0xee; 8]);
            assert_eq!(b.mr.read(0, to as usize), vec![0xee; to as usize]);

            a.mr.write(0, &vec![0; size + 5000]);
            a.qp.read(i, &[a.mr.sge(from, size as u32)], b.mr.iova + to, b.mr.rkey)
                .unwrap();
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!((cqe.wr_id, cqe.opcode), (i, wc_opcode::RDMA_READ));
            assert_eq!(cqe.byte_len as usize, size);
            assert_eq!(
                a.mr.read(from as usize, size),
                data,
                "read of {size} from {to} to {from}"
            );
        }
    }
    pair.b.assert_quiet();
}

#[test]
fn immediate_data_arrives() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    for (opcode, expected) in [
        (wr_opcode::SEND_WITH_IMM, wc_opcode::RECV),
        (
            wr_opcode::RDMA_WRITE_WITH_IMM,
            wc_opcode::RECV_RDMA_WITH_IMM,
        ),
    ] {
        for size in [0usize, 10, 70_000] {
            let data = pattern(size as u64, size);
            a.mr.write(0, &data);
            b.qp.post_recv(1, &[b.mr.sge(0, 1 << 20)]).unwrap();
            let wqe = SendWqe {
                opcode,
                imm: 0x0403_0201,
                remote_addr: b.mr.iova,
                rkey: b.mr.rkey,
                ..SendWqe::default()
            };
            a.qp.post_send(&wqe, &[a.mr.sge(0, size as u32)]).unwrap();
            assert_success(&a.sent());
            let received = b.received();
            assert_success(&received);
            assert_eq!(received.opcode, expected);
            assert_eq!(received.wc_flags, wc_flag::WITH_IMM);
            assert_eq!(received.imm, 0x0403_0201);
            assert_eq!(received.byte_len as usize, size);
            assert_eq!(b.mr.read(0, size), data);
        }
    }
}

#[test]
fn inline_data_is_taken_when_posted() {
    let two = Two::new();
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(16, 1, 976),
            ..Default::default()
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for size in [0usize, 1, 7, 8, 9, 16, 975, 976] {
        let data = pattern(size as u64, size);
        b.qp.post_recv(1, &[b.mr.sge(0, 4096)]).unwrap();
        a.qp.post_inline(
            &SendWqe {
                opcode: wr_opcode::SEND,
                ..SendWqe::default()
            },
            &data,
        )
        .unwrap();
        assert_success(&a.sent());
        assert_eq!(b.received().byte_len as usize, size);
        assert_eq!(b.mr.read(0, size), data);
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: b.mr.iova + 8192,
            rkey: b.mr.rkey,
            ..SendWqe::default()
        };
        a.qp.post_inline(&wqe, &data).unwrap();
        assert_success(&a.sent());
        assert_eq!(b.mr.read(8192, size), data);
    }
}

#[test]
fn several_sges_are_gathered_and_scattered() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let data = pattern(1, 100_000);
    a.mr.write(0, &data);
    let from = [
        a.mr.sge(10, 5),
        a.mr.sge(50_000, 0),
        a.mr.sge(60_001, 30_000),
        a.mr.sge(3, 4097),
    ];
    let sent = [&data[10..15], &data[60_001..90_001], &data[3..4100]].concat();
    let to = [
        b.mr.sge(1, 4096),
        b.mr.sge(500_000, 1),
        b.mr.sge(100_000, 0),
        b.mr.sge(200_000, 100_000),
    ];
    let placed = |len: usize| {
        [
            b.mr.read(1, 4096),
            b.mr.read(500_000, 1),
            b.mr.read(200_000, len - 4097),
        ]
        .concat()
    };
    b.qp.post_recv(1, &to).unwrap();
    a.qp.send(1, &from).unwrap();
    assert_success(&a.sent());
    assert_eq!(b.received().byte_len as usize, sent.len());
    assert_eq!(placed(sent.len()), sent);

    a.qp.write(2, &from, b.mr.iova + 600_000, b.mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(b.mr.read(600_000, sent.len()), sent);

    // And the other way round: one remote range to several local ones.
    b.qp.read(3, &to, a.mr.iova + 7, a.mr.rkey).unwrap();
    assert_success(&b.sent());
    let len = 4096 + 1 + 100_000;
    assert_eq!(placed(len)[..90_000], data[7..90_007]);
}

// D-CPL-003, D-RING-002, D-RING-003.
#[test]
fn a_ring_is_used_many_times_over() {
    let two = Two::new();
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(8, 1, 0),
            ..Default::default()
        },
        cqe: 16,
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    let mut posted = 0u64;
    let mut received = 0u64;
    while received < 5000 {
        while posted < received + 8 {
            b.qp.post_recv(posted, &[b.mr.sge((posted % 8) * 8, 8)])
                .unwrap();
            a.mr.write((posted % 8) as usize * 8, &posted.to_le_bytes());
            a.qp.send(posted, &[a.mr.sge((posted % 8) * 8, 8)]).unwrap();
            posted += 1;
        }
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, received);
        assert_eq!(
            b.mr.read((received % 8) as usize * 8, 8),
            received.to_le_bytes()
        );
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, received);
        received += 1;
    }
}

// D-RNR-002.
#[test]
fn receives_that_are_posted_one_by_one_get_all_that_waits_for_them() {
    const SENDS: u64 = 200;
    let two = Two::new();
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(SENDS as u32, 1, 0),
            ..Default::default()
        },
        cqe: 256,
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for i in 0..SENDS {
        a.mr.write(8 * i as usize, &i.to_le_bytes());
        a.qp.send(i, &[a.mr.sge(8 * i, 8)]).unwrap();
    }
    for i in 0..SENDS {
        b.qp.post_recv(i, &[b.mr.sge(0, 8)]).unwrap();
        let cqe = b.received();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, i);
        assert_eq!(b.mr.read(0, 8), i.to_le_bytes());
    }
    for i in 0..SENDS {
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, i);
    }
}

// D-CPL-001, D-CPL-003, D-RING-006.
#[test]
fn completions_of_lists_come_in_order_each_with_its_index() {
    const DEPTH: u64 = 64;
    let two = Two::new();
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(DEPTH as u32, 1, 0),
            signal_all: false,
            ..Default::default()
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    // Each list has another length, and some completions together that others do not have.
    let mut posted = 0u64;
    for list in 1..=DEPTH {
        let signaled = |i: u64| i + 1 == list || !(i + list).is_multiple_of(3);
        let mut batch = a.qp.send_queue().batch();
        for i in 0..list {
            a.mr.write(8 * i as usize, &(posted + i).to_le_bytes());
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                flags: if signaled(i) { send_flag::SIGNALED } else { 0 },
                wr_id: posted + i,
                remote_addr: b.mr.iova + 8 * i,
                rkey: b.mr.rkey,
                ..SendWqe::default()
            };
            batch.push(&wqe, [a.mr.sge(8 * i, 8)]).unwrap();
        }
        batch.commit();
        a.qp.ring().unwrap();
        for i in (0..list).filter(|i| signaled(*i)) {
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, posted + i);
            assert_eq!(u64::from(cqe.wqe_index), (posted + i) % DEPTH);
        }
        for i in 0..list {
            assert_eq!(b.mr.read(8 * i as usize, 8), (posted + i).to_le_bytes());
        }
        assert_eq!(a.send_cq.poll(), None);
        posted += list;
    }
}

// D-CPL-001.
#[test]
fn unsignaled_sends_complete_nothing_and_are_freed_by_the_next() {
    let two = Two::new();
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(8, 1, 0),
            signal_all: false,
            ..Default::default()
        },
        ..SideOptions::default()
    };
    let pair = two.pair_with(&options, |_| ());
    let (a, b) = (&pair.a, &pair.b);
    for round in 0..20u64 {
        for i in 0..8u64 {
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                flags: if i == 7 { send_flag::SIGNALED } else { 0 },
                wr_id: round * 8 + i,
                remote_addr: b.mr.iova,
                rkey: b.mr.rkey,
                ..SendWqe::default()
            };
            a.qp.post_send(&wqe, &[a.mr.sge(0, 100)]).unwrap();
        }
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, round * 8 + 7);
        assert_eq!(a.send_cq.poll(), None);
    }
}

#[test]
fn a_vm_talks_to_itself() {
    let two = Two::new();
    let pair = Pair::new(&two.a, &two.a);
    let data = pattern(9, 300_000);
    pair.a.mr.write(0, &data);
    pair.b
        .qp
        .post_recv(1, &[pair.b.mr.sge(0, 1 << 20)])
        .unwrap();
    pair.a.qp.send(2, &[pair.a.mr.sge(0, 300_000)]).unwrap();
    assert_success(&pair.a.sent());
    assert_success(&pair.b.received());
    assert_eq!(pair.b.mr.read(0, 300_000), data);
}

#[test]
fn a_queue_pair_talks_to_itself() {
    let two = Two::new();
    let side = crate::common::Side::new(&two.a, &SideOptions::default());
    side.qp
        .connect(&vhost_device_rdma_bare::Connection::to(&side.qp))
        .unwrap();
    let data = pattern(3, 5000);
    side.mr.write(0, &data);
    side.qp.post_recv(1, &[side.mr.sge(100_000, 5000)]).unwrap();
    side.qp.send(2, &[side.mr.sge(0, 5000)]).unwrap();
    assert_success(&side.sent());
    assert_success(&side.received());
    assert_eq!(side.mr.read(100_000, 5000), data);
}

#[test]
fn a_region_may_start_within_a_page_and_have_any_address() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let pd: &std::sync::Arc<Pd> = &b.pd;
    let buffer = two
        .b
        .buffer(1 << 16, vhost_device_rdma_bare::Placement::Scattered)
        .unwrap();
    // The address need not agree with the offset in the page.
    let mr = pd
        .register_buffer(buffer, 0xffff_8000_0000_0123, 0x456, 50_000, ALL)
        .unwrap();
    let data = pattern(5, 50_000);
    a.mr.write(0, &data);
    a.qp.write(1, &[a.mr.sge(0, 50_000)], mr.iova, mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(mr.read(0, 50_000), data);
    assert_eq!(mr.view().get(0x456, 50_000), data);
}

#[test]
fn counts_return_to_zero() {
    let two = Two::new();
    for _ in 0..3 {
        let pair = two.pair();
        assert_eq!(counts(&two.process, two.a.path()), [1, 1, 1, 2, 1]);
        drop(pair);
        assert_eq!(counts(&two.process, two.a.path()), [0; 5]);
        assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
    }
}
