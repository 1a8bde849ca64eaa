// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The order in which data and completions become visible, what retries count, and who must not be
//! kept waiting.
use std::sync::atomic::{fence, Ordering};
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::ring::{Cqe, SendWqe};
use vhost_device_rdma_bare::spec::verbs::{qp_state, send_flag, vendor_err, wc_status, wr_opcode};
use vhost_device_rdma_bare::{Connection, Cq, Mr};

use crate::common::{
    assert_status, assert_success, pattern, Pair, Side, SideOptions, Two, NOTHING, TIMEOUT,
};

/// Waits for a byte without sleeping.
#[track_caller]
fn spin_for(mr: &Mr, offset: usize, byte: u8) {
    let deadline = Instant::now() + TIMEOUT;
    while mr.read(offset, 1) != [byte] {
        assert!(Instant::now() < deadline, "the last byte did not come");
        std::hint::spin_loop();
    }
    fence(Ordering::Acquire);
}

/// Waits for a completion without sleeping.
#[track_caller]
fn spin_for_completion(cq: &Cq) -> Cqe {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(cqe) = cq.poll() {
            return cqe;
        }
        assert!(Instant::now() < deadline, "no completion came");
        std::hint::spin_loop();
    }
}

// D-RC-002.
#[test]
fn the_last_byte_of_a_message_is_visible_last() {
    let two = Two::new();
    let Pair { a, b } = two.pair();
    for (offset, len) in [(0, 64), (3, 70_001), (8, 4096), (5, 300_000)] {
        for round in 1..=30u8 {
            let data = vec![round; len];
            let here = a.mr.sge(0, len as u32);
            a.mr.write(0, &data);
            a.qp.write(1, &[here], b.mr.iova + offset as u64, b.mr.rkey)
                .unwrap();
            spin_for(&b.mr, offset + len - 1, round);
            assert!(b.mr.read(offset, len) == data, "a write of {len}");
            assert_success(&a.sent());

            let there = b.mr.sge(400_000 + offset as u64, len as u32);
            b.qp.post_recv(1, &[there]).unwrap();
            a.qp.send(1, &[here]).unwrap();
            spin_for(&b.mr, 400_000 + offset + len - 1, round);
            assert!(b.mr.read(400_000 + offset, len) == data, "a send of {len}");
            assert_success(&a.sent());
            assert_success(&b.received());

            let back = a.mr.sge(500_000 + offset as u64, len as u32);
            a.qp.read(1, &[back], b.mr.iova + offset as u64, b.mr.rkey)
                .unwrap();
            spin_for(&a.mr, 500_000 + offset + len - 1, round);
            assert!(a.mr.read(500_000 + offset, len) == data, "a read of {len}");
            assert_success(&a.sent());
        }
    }
}

// D-CPL-002.
#[test]
fn completions_come_after_all_their_data() {
    let two = Two::new();
    let Pair { a, b } = two.pair();
    const LEN: usize = 150_000;
    for round in 0..60 {
        let (written, sent) = (pattern(round, LEN), pattern(round + 1000, LEN));
        a.mr.write(0, &written);
        a.mr.write(LEN, &sent);
        b.qp.post_recv(1, &[b.mr.sge(LEN as u64, LEN as u32)])
            .unwrap();
        a.qp.write(1, &[a.mr.sge(0, LEN as u32)], b.mr.iova, b.mr.rkey)
            .unwrap();
        a.qp.send(2, &[a.mr.sge(LEN as u64, LEN as u32)]).unwrap();
        assert_success(&spin_for_completion(&b.recv_cq));
        assert!(b.mr.read(LEN, LEN) == sent, "what was sent");
        assert!(b.mr.read(0, LEN) == written, "what was written before");
        assert_success(&a.sent());
        assert_success(&a.sent());
        a.qp.read(3, &[a.mr.sge(500_000, LEN as u32)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&spin_for_completion(&a.send_cq));
        assert!(a.mr.read(500_000, LEN) == written, "what was read");
    }
}

// D-RC-001, D-ORD-001, D-ORD-002.
#[test]
fn work_requests_of_a_queue_take_effect_one_after_the_other() {
    let two = Two::new();
    let Pair { a, b } = two.pair();
    const LEN: usize = 100_000;
    for round in 0..50 {
        let (first, second) = (pattern(round, LEN), pattern(round + 77, 3000));
        a.mr.write(0, &first);
        a.mr.write(LEN, &second);
        let (all, part) = (
            a.mr.sge(0, LEN as u32),
            a.mr.sge(LEN as u64, second.len() as u32),
        );
        let mut expected = first;
        expected[50_000..53_000].copy_from_slice(&second);
        // What is written later stays; a read brings both; with FENCE a send finds what the read
        // brought.
        b.qp.post_recv(1, &[b.mr.sge(500_000, LEN as u32)]).unwrap();
        a.qp.write(1, &[all], b.mr.iova, b.mr.rkey).unwrap();
        a.qp.write(2, &[part], b.mr.iova + 50_000, b.mr.rkey)
            .unwrap();
        let brought = a.mr.sge(600_000, LEN as u32);
        a.qp.read(3, &[brought], b.mr.iova, b.mr.rkey).unwrap();
        let fenced = SendWqe {
            opcode: wr_opcode::SEND,
            flags: send_flag::FENCE,
            wr_id: 4,
            ..SendWqe::default()
        };
        a.qp.post_send(&fenced, &[brought]).unwrap();
        assert_success(&b.received());
        assert!(b.mr.read(500_000, LEN) == expected, "what the read brought");
        assert!(b.mr.read(0, LEN) == expected, "what was written");
        for wr_id in 1..=4 {
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, wr_id);
        }
    }
}

// D-RC-005.
#[test]
fn nothing_is_moved_before_everything_is_checked() {
    let two = Two::new();
    let unharmed = |mr: &Mr, byte| assert!(mr.read(0, 1 << 20) == vec![byte; 1 << 20]);
    let good = 300_000;
    for what in 0..4 {
        let Pair { a, b } = two.pair();
        a.mr.write(0, &vec![8; 1 << 20]);
        b.mr.write(0, &vec![9; 1 << 20]);
        let mut bad = a.mr.sge(0, 100);
        bad.lkey ^= 1;
        let (status, reason) = match what {
            // The last entry of the list is bad.
            0 => {
                let list = [a.mr.sge(0, good), bad];
                a.qp.write(1, &list, b.mr.iova, b.mr.rkey).unwrap();
                (wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN)
            }
            1 => {
                let list = [a.mr.sge(0, good), bad];
                a.qp.read(1, &list, b.mr.iova, b.mr.rkey).unwrap();
                (wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN)
            }
            // The end of the remote range is beyond the region.
            2 => {
                let at = b.mr.iova + (1 << 20) - u64::from(good) + 1;
                a.qp.write(1, &[a.mr.sge(0, good)], at, b.mr.rkey).unwrap();
                (wc_status::REM_ACCESS_ERR, vendor_err::KEY_RANGE)
            }
            // The last entry of the receive is bad.
            _ => {
                let mut bad = b.mr.sge(0, good);
                bad.lkey ^= 1;
                b.qp.post_recv(1, &[b.mr.sge(0, good - 1), bad]).unwrap();
                a.qp.send(1, &[a.mr.sge(0, good)]).unwrap();
                (wc_status::REM_OP_ERR, vendor_err::KEY_UNKNOWN)
            }
        };
        let cqe = a.sent();
        assert_status(&cqe, status);
        assert_eq!(vendor_err::name(cqe.vendor_err), vendor_err::name(reason));
        unharmed(&a.mr, 8);
        unharmed(&b.mr, 9);
    }
}

// D-CMD-006.
#[test]
fn commands_are_answered_while_a_peer_is_stopped() {
    let two = Two::new();
    let pairs: Vec<Pair> = (0..4).map(|_| two.pair()).collect();
    two.b.stop().unwrap();
    for Pair { a, b } in &pairs {
        for i in 0..60 {
            a.qp.write(i, &[a.mr.sge(0, 100_000)], b.mr.iova, b.mr.rkey)
                .unwrap();
        }
    }
    let mut times = Vec::new();
    for _ in 0..40 {
        let start = Instant::now();
        // Creates and destroys objects of all kinds.
        let side = Side::new(&two.a, &SideOptions::default());
        side.qp.connect(&Connection::to(&pairs[0].b.qp)).unwrap();
        side.qp.set_state(qp_state::ERR).unwrap();
        drop(side);
        pairs[1].a.qp.query().unwrap();
        times.push(start.elapsed());
    }
    // Each takes a dozen commands; none waits for who does not run.
    times.sort_unstable();
    assert!(times[20] < Duration::from_millis(500), "{times:?}");
    // Those of queue pairs with work for the stopped VM as well.
    pairs[2].a.qp.set_state(qp_state::ERR).unwrap();
    pairs[3].a.qp.set_state(qp_state::RESET).unwrap();
    two.b.start().unwrap();
    for _ in 0..60 {
        assert_success(&pairs[0].a.sent());
        assert_status(&pairs[2].a.sent(), wc_status::WR_FLUSH_ERR);
    }
    pairs[3].a.assert_quiet();
}

// D-RNR-003.
#[test]
fn a_sender_without_a_receive_delays_nobody_else() {
    let two = Two::with(&["--workers", "1"]);
    let waiting: Vec<Pair> = (0..8)
        .map(|_| {
            two.pair_with(&SideOptions::default(), |c| {
                c.rnr_retry = 7;
                c.min_rnr_timer = 0;
            })
        })
        .collect();
    let Pair { a, b } = two.pair();
    for pair in &waiting {
        pair.a.qp.send(1, &[pair.a.mr.sge(0, 8)]).unwrap();
    }
    std::thread::sleep(NOTHING);
    let start = Instant::now();
    for i in 0..100 {
        b.qp.post_recv(i, &[b.mr.sge(0, 8)]).unwrap();
        a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
        assert_success(&a.sent());
        assert_success(&b.received());
    }
    // (One that waited for the others each time would take a minute.)
    let took = start.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    for pair in &waiting {
        assert_eq!(pair.a.send_cq.poll(), None);
        pair.b.qp.post_recv(1, &[pair.b.mr.sge(0, 8)]).unwrap();
        assert_success(&pair.a.sent());
    }
}

// D-RTY-003.
#[test]
fn retries_are_counted_anew_with_each_message() {
    let two = Two::new();
    let pair = two.pair_with(&SideOptions::default(), |c| {
        // 1 + 3 attempts of 268 ms each.
        (c.timeout, c.retry_cnt) = (16, 3);
    });
    let Pair { a, b } = &pair;
    for wr_id in 0..3 {
        // Nobody there for more than half of that time, three times.
        b.qp.set_state(qp_state::RESET).unwrap();
        a.qp.write(wr_id, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        std::thread::sleep(Duration::from_millis(600));
        assert_eq!(a.send_cq.poll(), None);
        b.qp.connect(&Connection::to(&a.qp)).unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, wr_id);
    }
}

// D-RNR-002.
#[test]
fn rnr_retries_are_counted_anew_with_each_message() {
    let two = Two::new();
    let pair = two.pair_with(&SideOptions::default(), |c| {
        // 3 waits of 245.76 ms each.
        (c.rnr_retry, c.min_rnr_timer) = (3, 29);
    });
    let Pair { a, b } = &pair;
    for wr_id in 0..3 {
        a.qp.send(wr_id, &[a.mr.sge(0, 8)]).unwrap();
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(a.send_cq.poll(), None);
        b.qp.post_recv(wr_id, &[b.mr.sge(0, 8)]).unwrap();
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, wr_id);
        assert_success(&b.received());
    }
}
