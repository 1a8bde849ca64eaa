// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device that writes what it likes, against a driver that keeps a record of what was posted: the
//! kernel, which takes ids for pointers.
// G-SEC-005, G-SEC-006.
#![cfg(not(loom))]
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use virtio_rdma_driver_core::buffer::{QpCaps, QpLayout, SrqLayout};
use virtio_rdma_driver_core::{
    srq_of, Completing, PostError, Private, Receives, RecvQueue, SendQueue, SharedRecvQueue, Slots,
    Violation,
};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, RecvWqe, SendWqe, Sge, UdWqe};
use virtio_rdma_spec::verbs::{send_flag, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode};

type Words<'m> = &'m [AtomicU64];
type Send<'m> = SendQueue<Words<'m>, Private<Vec<AtomicU64>>>;
type Receive<'m> = RecvQueue<Words<'m>, Private<Vec<AtomicU64>>>;
type Shared<'m> = SharedRecvQueue<Words<'m>, Slots<Vec<AtomicU64>>>;

const CAPS: QpCaps = QpCaps {
    max_send_wr: 8,
    max_recv_wr: 4,
    max_send_sge: 3,
    max_recv_sge: 2,
    max_inline: 60,
};
const QPN: u32 = 7;
const SRQN: u32 = 3;
/// What a user of the kernel calls for a completion that the device makes up.
const EVIL: u64 = 0xffff_ffff_8000_0000;

fn zeroed(words: usize) -> Vec<AtomicU64> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

fn sge(length: u32) -> Sge {
    Sge {
        addr: 0x1000,
        length,
        lkey: 1,
    }
}

fn send_queue(memory: Words<'_>, signal_all: bool) -> Send<'_> {
    let layout = QpLayout::new(&CAPS).unwrap();
    let queue = SendQueue::new(memory, &layout.sq, CAPS.max_send_sge, CAPS.max_inline).unwrap();
    let words = zeroed(Private::<Vec<AtomicU64>>::words(8));
    queue.recorded(words, signal_all).unwrap()
}

fn receive_queue(memory: Words<'_>) -> Receive<'_> {
    let layout = QpLayout::new(&CAPS).unwrap();
    let queue = RecvQueue::new(memory, &layout.rq, CAPS.max_recv_sge).unwrap();
    let words = zeroed(Private::<Vec<AtomicU64>>::words(4));
    queue.recorded(words).unwrap()
}

fn shared_queue(memory: Words<'_>) -> Shared<'_> {
    let layout = SrqLayout::new(4, 2).unwrap();
    let queue = SharedRecvQueue::new(memory, &layout.ring, 2).unwrap();
    let words = zeroed(Slots::<Vec<AtomicU64>>::words(4));
    queue.recorded(words, SRQN).unwrap()
}

fn qp_memory() -> Vec<AtomicU64> {
    zeroed(QpLayout::new(&CAPS).unwrap().size / 8)
}

fn srq_memory() -> Vec<AtomicU64> {
    zeroed(SrqLayout::new(4, 2).unwrap().size / 8)
}

/// A send work request that is signaled.
fn wqe(opcode: u8, wr_id: u64) -> SendWqe {
    SendWqe {
        opcode,
        wr_id,
        flags: send_flag::SIGNALED,
        ..SendWqe::default()
    }
}

fn completion(opcode: u8, wqe_index: u16) -> Cqe {
    Cqe {
        wr_id: EVIL,
        qp_num: QPN,
        wqe_index,
        opcode,
        ..Cqe::default()
    }
}

fn received(wqe_index: u16, byte_len: u32) -> Cqe {
    Cqe {
        byte_len,
        ..completion(wc_opcode::RECV, wqe_index)
    }
}

fn flushed(opcode: u8, wqe_index: u16) -> Cqe {
    Cqe {
        status: wc_status::WR_FLUSH_ERR,
        vendor_err: vendor_err::FLUSHED,
        ..completion(opcode, wqe_index)
    }
}

fn take_send(queue: &Send<'_>, cqe: &Cqe) -> Result<Cqe, Violation> {
    let completing = Completing {
        datagram: false,
        sends: Some(queue),
        receives: None,
    };
    completing.take(cqe, |_| {})
}

fn take_receive(queue: &Receive<'_>, datagram: bool, cqe: &Cqe) -> Result<Cqe, Violation> {
    let completing = Completing {
        datagram,
        sends: None,
        receives: Some(Receives::Own(queue)),
    };
    completing.take(cqe, |_| {})
}

#[test]
fn the_id_of_a_completion_is_the_one_that_was_posted() {
    let memory = qp_memory();
    let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
    sq.post(&wqe(wr_opcode::RDMA_READ, 11), [sge(100), sge(20)])
        .unwrap();
    rq.post(22, [sge(100), sge(20)]).unwrap();
    // The device learns no pointer of the kernel, and may write over what is in the rings.
    let layout = QpLayout::new(&CAPS).unwrap();
    for ring in [&layout.sq, &layout.rq] {
        assert_eq!(memory[ring.offset as usize / 8 + 1].load(Relaxed), 0);
    }
    memory
        .iter()
        .for_each(|word| word.store(EVIL.to_le(), Relaxed));
    let cqe = Cqe {
        byte_len: 5000,
        imm: 1,
        src_qp: 2,
        sl: 3,
        wc_flags: wc_flag::WITH_INV,
        ..completion(wc_opcode::RDMA_READ, 0)
    };
    let expected = Cqe {
        wr_id: 11,
        byte_len: 120,
        imm: 0,
        src_qp: 0,
        sl: 0,
        wc_flags: 0,
        ..cqe
    };
    assert_eq!(take_send(&sq, &cqe), Ok(expected));
    let cqe = Cqe {
        imm: 5,
        src_qp: 6,
        wc_flags: wc_flag::WITH_IMM,
        ..received(0, 120)
    };
    let expected = Cqe { wr_id: 22, ..cqe };
    assert_eq!(take_receive(&rq, false, &cqe), Ok(expected));
}

#[test]
fn a_completion_of_nothing_outstanding_is_refused() {
    let memory = qp_memory();
    let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
    let send = |index| take_send(&sq, &completion(wc_opcode::SEND, index)).map(|cqe| cqe.wr_id);
    let receive = |index| take_receive(&rq, false, &received(index, 0)).map(|cqe| cqe.wr_id);
    let refused = Err(Violation::NotOutstanding);
    assert_eq!((send(0), receive(0)), (refused, refused));
    for i in 0..2 {
        sq.post(&wqe(wr_opcode::SEND, 10 + i), []).unwrap();
        rq.post(20 + i, []).unwrap();
    }
    // Not posted, and no entries.
    for index in [2, 4, 7, 8, 9, 0x7fff, u16::MAX] {
        assert_eq!((send(index), receive(index)), (refused, refused), "{index}");
    }
    assert_eq!((sq.room(), rq.room()), (6, 2));
    assert_eq!((send(0), receive(0)), (Ok(10), Ok(20)));
    // Twice the same.
    assert_eq!((send(0), receive(0)), (refused, refused));
    assert_eq!((send(1), receive(1)), (Ok(11), Ok(21)));
    assert_eq!((send(1), receive(1)), (refused, refused));
    // What is in a batch is not posted yet.
    let mut batch = sq.batch();
    batch.push(&wqe(wr_opcode::SEND, 12), []).unwrap();
    assert_eq!(send(2), refused);
    assert!(batch.commit());
    assert_eq!(send(2), Ok(12));
}

// G-SEC-003.
#[test]
fn a_completion_in_another_queue_pairs_name_is_refused() {
    let memory = qp_memory();
    let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
    sq.post(&wqe(wr_opcode::SEND, 1), []).unwrap();
    rq.post(2, []).unwrap();
    let neither = Completing::<Words<'_>, Vec<AtomicU64>> {
        datagram: false,
        sends: None,
        receives: None,
    };
    let refused = Err(Violation::QueuePair);
    for cqe in [completion(wc_opcode::SEND, 0), received(0, 0)] {
        assert_eq!(neither.take(&cqe, |_| {}), refused);
    }
    // Its receives complete there, its sends elsewhere; and the other way round.
    assert_eq!(
        take_receive(&rq, false, &completion(wc_opcode::SEND, 0)),
        refused
    );
    assert_eq!(take_send(&sq, &received(0, 0)), refused);
    assert_eq!((sq.room(), rq.room()), (7, 3));
}

#[test]
fn sends_complete_in_order_and_as_they_were_asked_to() {
    let memory = qp_memory();
    let sq = send_queue(&memory, false);
    let silent = |wr_id| SendWqe {
        flags: 0,
        ..wqe(wr_opcode::SEND, wr_id)
    };
    let take = |cqe: &Cqe| take_send(&sq, cqe).map(|cqe| cqe.wr_id);
    let success = |index| take(&completion(wc_opcode::SEND, index));
    for send in [silent(0), silent(1), wqe(wr_opcode::SEND, 2), silent(3)] {
        sq.post(&send, []).unwrap();
    }
    sq.post(&wqe(wr_opcode::SEND, 4), []).unwrap();
    // Its user does not expect it, and gave it no id that means anything.
    assert_eq!(success(1), Err(Violation::Unsignaled));
    assert_eq!(success(3), Err(Violation::Skipped));
    assert_eq!(success(4), Err(Violation::Skipped));
    let late = flushed(wc_opcode::SEND, 3);
    assert_eq!(take(&late), Err(Violation::Skipped));
    assert_eq!(sq.room(), 3);
    let mut retired = Vec::new();
    let completing = Completing {
        datagram: false,
        sends: Some(&sq),
        receives: None,
    };
    let cqe = completion(wc_opcode::SEND, 2);
    let taken = completing.take(&cqe, |index| retired.push(index));
    assert_eq!(
        (taken.map(|cqe| cqe.wr_id), retired),
        (Ok(2), vec![0, 1, 2])
    );
    assert_eq!(sq.room(), 6);
    // An error comes unasked.
    assert_eq!(take(&late), Ok(3));
    assert_eq!(success(4), Ok(4));
    assert_eq!(sq.room(), 8);

    let memory = qp_memory();
    let sq = send_queue(&memory, true);
    sq.post(&silent(0), []).unwrap();
    sq.post(&silent(1), []).unwrap();
    let success = |index| take_send(&sq, &completion(wc_opcode::SEND, index));
    assert_eq!(success(1), Err(Violation::Skipped));
    assert_eq!(success(0).map(|cqe| cqe.wr_id), Ok(0));
}

#[test]
fn receives_complete_in_order() {
    let memory = qp_memory();
    let rq = receive_queue(&memory);
    for wr_id in 0..3 {
        rq.post(wr_id, []).unwrap();
    }
    let take = |cqe: &Cqe| take_receive(&rq, false, cqe).map(|cqe| cqe.wr_id);
    assert_eq!(take(&received(1, 0)), Err(Violation::NotOutstanding));
    let late = flushed(wc_opcode::RECV, 2);
    assert_eq!(take(&late), Err(Violation::NotOutstanding));
    assert_eq!(take(&received(0, 0)), Ok(0));
    assert_eq!(take(&received(1, 0)), Ok(1));
    assert_eq!(take(&late), Ok(2));
}

#[test]
fn a_receive_is_no_longer_than_it_was_posted() {
    let memory = qp_memory();
    let rq = receive_queue(&memory);
    let take = |datagram, cqe: &Cqe| {
        let taken = take_receive(&rq, datagram, cqe);
        if taken.is_err() {
            assert_eq!(rq.room(), 3);
        }
        taken.map(|cqe| cqe.byte_len)
    };
    let mut index = 0;
    let mut post = |length| {
        rq.post(1, [sge(length), sge(28)]).unwrap();
        index += 1;
        (index - 1) % 4
    };
    let at = post(100);
    assert_eq!(take(false, &received(at, 129)), Err(Violation::Length));
    assert_eq!(take(false, &received(at, u32::MAX)), Err(Violation::Length));
    assert_eq!(take(false, &received(at, 128)), Ok(128));
    let at = post(u32::MAX);
    assert_eq!(take(false, &received(at, u32::MAX)), Ok(u32::MAX));
    // There are always 40 bytes before a datagram, which users subtract.
    let at = post(100);
    assert_eq!(take(true, &received(at, 39)), Err(Violation::Length));
    assert_eq!(take(true, &received(at, 129)), Err(Violation::Length));
    assert_eq!(take(true, &received(at, 40)), Ok(40));
    // The data of an RDMA WRITE are not in the receive. Datagrams have none.
    let at = post(0);
    let write = Cqe {
        opcode: wc_opcode::RECV_RDMA_WITH_IMM,
        ..received(at, 1 << 20)
    };
    assert_eq!(take(true, &write), Err(Violation::Opcode));
    assert_eq!(take(false, &write), Ok(1 << 20));
    // Of one that failed the length means nothing.
    let at = post(100);
    let failed = Cqe {
        byte_len: 5000,
        ..flushed(wc_opcode::RECV, at)
    };
    assert_eq!(take(false, &failed), Ok(0));
}

#[test]
fn the_opcode_of_a_completion_is_that_of_what_was_posted() {
    let memory = qp_memory();
    let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
    rq.post(1, [sge(8)]).unwrap();
    for opcode in [0x82, 0xc0, 0xff] {
        let cqe = Cqe {
            opcode,
            ..received(0, 0)
        };
        assert_eq!(
            take_receive(&rq, false, &cqe),
            Err(Violation::Opcode),
            "{opcode}"
        );
        let failed = Cqe {
            status: wc_status::LOC_LEN_ERR,
            ..cqe
        };
        let told = take_receive(&rq, false, &failed).map(|cqe| cqe.opcode);
        assert_eq!(told, Ok(wc_opcode::RECV));
        rq.reset();
        rq.post(1, [sge(8)]).unwrap();
    }
    let mut index = 0;
    for (opcode, completes_as, length) in [
        (wr_opcode::SEND, wc_opcode::SEND, 0),
        (wr_opcode::RDMA_WRITE_WITH_IMM, wc_opcode::RDMA_WRITE, 0),
        (wr_opcode::RDMA_READ, wc_opcode::RDMA_READ, 8),
        (wr_opcode::ATOMIC_FETCH_AND_ADD, wc_opcode::FETCH_ADD, 8),
    ] {
        sq.post(&wqe(opcode, 5), [sge(8)]).unwrap();
        for other in 0..32 {
            let taken = take_send(&sq, &completion(other, index));
            if other != completes_as {
                assert_eq!(taken, Err(Violation::Opcode), "{other} for {opcode}");
                continue;
            }
            let told = taken.map(|cqe| (cqe.wr_id, cqe.opcode, cqe.byte_len));
            assert_eq!(told, Ok((5, completes_as, length)));
            break;
        }
        index += 1;
        sq.post(&wqe(opcode, 6), [sge(8)]).unwrap();
        let told = take_send(&sq, &flushed(0x7f, index)).map(|cqe| (cqe.wr_id, cqe.opcode));
        assert_eq!(told, Ok((6, completes_as)));
        index = (index + 1) % 8;
    }
}

#[test]
fn operands_and_inline_data_are_recorded_as_well() {
    use virtio_rdma_spec::ring::{BindMw, FastReg, MaskedOperands};
    let layout = QpLayout::with_masked_atomics(&CAPS).unwrap();
    let memory = zeroed(layout.size / 8);
    let queue = SendQueue::new(&memory[..], &layout.sq, 3, 60).unwrap();
    let words = zeroed(Private::<Vec<AtomicU64>>::words(8));
    let sq = queue.recorded(words, false).unwrap();
    let mut batch = sq.batch();
    batch
        .push_inline(&wqe(wr_opcode::SEND, 1), [&[0; 9][..]])
        .unwrap();
    batch
        .push_bind(&wqe(wr_opcode::BIND_MW, 2), &BindMw::default())
        .unwrap();
    batch
        .push_reg(&wqe(wr_opcode::REG_MR, 3), &FastReg::default())
        .unwrap();
    let masked = wqe(wr_opcode::MASKED_ATOMIC_CMP_AND_SWP, 4);
    batch
        .push_masked(&masked, &MaskedOperands::default(), Some(sge(8)))
        .unwrap();
    assert!(batch.commit());
    for (index, opcode, length) in [
        (0, wc_opcode::SEND, 0),
        (1, wc_opcode::BIND_MW, 0),
        (2, wc_opcode::REG_MR, 0),
        (3, wc_opcode::MASKED_COMP_SWAP, 8),
    ] {
        let word = memory
            [(layout.sq.offset + u32::from(index) * layout.sq.stride) as usize / 8 + 1]
            .load(Relaxed);
        assert_eq!(word, 0, "the device was shown an id");
        let taken = take_send(&sq, &completion(opcode, index));
        let told = taken.map(|cqe| (cqe.wr_id, cqe.byte_len));
        assert_eq!(told, Ok((u64::from(index) + 1, length)));
    }

    let layout = QpLayout::datagram(&CAPS).unwrap();
    let memory = zeroed(layout.size / 8);
    let queue = SendQueue::datagram(&memory[..], &layout.sq, 3, 60).unwrap();
    let words = zeroed(Private::<Vec<AtomicU64>>::words(8));
    let sq = queue.recorded(words, true).unwrap();
    let wqe = UdWqe {
        opcode: wr_opcode::SEND,
        wr_id: 9,
        ..UdWqe::default()
    };
    sq.post(&wqe, [sge(100)]).unwrap();
    let taken = take_send(&sq, &completion(wc_opcode::SEND, 0));
    assert_eq!(taken.map(|cqe| cqe.wr_id), Ok(9));
}

/// What a lost device leaves is flushed by the record, whatever is in the rings.
// G-RST-004.
#[test]
fn rings_are_not_read_back() {
    let memory = qp_memory();
    let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
    for i in 0..3 {
        sq.post(&wqe(wr_opcode::RDMA_READ, 10 + i), [sge(8)])
            .unwrap();
        rq.post(20 + i, [sge(8)]).unwrap();
    }
    memory.iter().for_each(|word| word.store(EVIL, Relaxed));
    for i in 0..3 {
        let cqe = sq.flush_next(QPN).unwrap();
        let told = (cqe.wr_id, cqe.opcode, cqe.wqe_index);
        assert_eq!(told, (10 + i, wc_opcode::RDMA_READ, i as u16));
        sq.complete(cqe.wqe_index);
        let cqe = rq.flush_next(QPN).unwrap();
        let told = (cqe.wr_id, cqe.opcode, cqe.wqe_index);
        assert_eq!(told, (20 + i, wc_opcode::RECV, i as u16));
        rq.complete(cqe.wqe_index);
    }
    assert_eq!((sq.flush_next(QPN), rq.flush_next(QPN)), (None, None));
}

/// Says that the device has consumed so many entries of a shared receive queue.
fn consume(memory: Words<'_>, consumed: u32) {
    memory[0].store((u64::from(consumed) << 32).to_le(), Relaxed);
}

/// The id in an entry of a shared receive queue.
fn id_in(memory: Words<'_>, index: u32) -> u64 {
    let ring = SrqLayout::new(4, 2).unwrap().ring;
    let at = (ring.offset + index % 4 * ring.stride) as usize / 8;
    let bytes: Vec<u8> = memory[at..at + 2]
        .iter()
        .flat_map(|word| word.load(Relaxed).to_ne_bytes())
        .collect();
    RecvWqe::get(&bytes).wr_id
}

fn shared(wr_id: u64, byte_len: u32) -> Cqe {
    Cqe {
        wr_id,
        byte_len,
        ..completion(wc_opcode::RECV, 0)
    }
}

#[test]
fn shared_receives_complete_by_what_was_posted() {
    let memory = srq_memory();
    let srq = shared_queue(&memory);
    let completing = Completing::<Words<'_>, Vec<AtomicU64>> {
        datagram: false,
        sends: None,
        receives: Some(Receives::Shared(&srq)),
    };
    let take = |cqe: &Cqe| completing.take(cqe, |_| {}).map(|cqe| cqe.wr_id);
    let refused = Err(Violation::NotOutstanding);
    for id in [0, 1, EVIL, u64::MAX, u64::from(SRQN) << 32] {
        assert_eq!(take(&shared(id, 0)), refused, "{id:#x}");
    }
    for wr_id in 0..4 {
        srq.post(100 + wr_id, [sge(100), sge(28)]).unwrap();
    }
    assert_eq!(srq.post(104, []), Err(PostError::Full));
    let ids: Vec<u64> = (0..4).map(|index| id_in(&memory, index)).collect();
    assert!(ids.iter().all(|id| srq_of(*id) == SRQN));
    // Too long, of another queue, of a slot that is not used, of none.
    assert_eq!(take(&shared(ids[2], 129)), Err(Violation::Length));
    for id in [
        ids[2] ^ 1 << 32,
        ids[3] + 1,
        (u64::from(SRQN) << 32) + 8,
        u64::from(SRQN) << 32 | u64::from(u32::MAX),
    ] {
        assert_eq!(take(&shared(id, 0)), refused, "{id:#x}");
    }
    // In any order, each once, whatever the device writes to the ring.
    consume(&memory, 4);
    assert_eq!(take(&shared(ids[2], 128)), Ok(102));
    assert_eq!(take(&shared(ids[2], 128)), refused);
    assert_eq!(take(&flushed_shared(ids[0])), Ok(100));
    assert_eq!(take(&flushed_shared(ids[0])), refused);
    memory[8..]
        .iter()
        .for_each(|word| word.store(EVIL, Relaxed));
    assert_eq!(take(&shared(ids[3], 0)), Ok(103));
    // Entries are used again while completions wait to be polled; up to twice as many.
    let mut posted = 4;
    while srq.post(100 + posted, []).is_ok() {
        posted += 1;
        consume(&memory, posted as u32);
    }
    assert_eq!(posted, 4 + 7);
    assert_eq!(take(&shared(ids[1], 5)), Ok(101));
    srq.post(200, []).unwrap();
    let last = id_in(&memory, posted as u32);
    assert_eq!(take(&shared(last, 0)), Ok(200));
    assert_eq!(take(&shared(last, 0)), refused);
}

fn flushed_shared(wr_id: u64) -> Cqe {
    Cqe {
        wr_id,
        ..flushed(wc_opcode::RECV, 0)
    }
}

#[test]
fn shared_receives_that_were_not_posted_leave_nothing() {
    let memory = srq_memory();
    let srq = shared_queue(&memory);
    for round in 0..20 {
        let mut batch = srq.batch();
        for wr_id in 0..3 {
            batch.push(wr_id, [sge(8)]).unwrap();
        }
        let full = batch.push(3, [sge(8), sge(8), sge(8)]);
        assert_eq!(full, Err(PostError::TooManySges), "{round}");
        drop(batch);
        let id = u64::from(SRQN) << 32;
        for slot in 0..8 {
            let taken = srq.take(&shared(id | slot, 0), false);
            assert_eq!(taken, Err(Violation::NotOutstanding));
        }
    }
    assert_eq!(srq.room(), 4);
}

#[test]
fn a_record_that_is_too_small_is_refused() {
    let (memory, shared) = (qp_memory(), srq_memory());
    let layout = QpLayout::new(&CAPS).unwrap();
    let ring = SrqLayout::new(4, 2).unwrap().ring;
    let sq = || SendQueue::new(&memory[..], &layout.sq, 3, 60).unwrap();
    let rq = || RecvQueue::new(&memory[..], &layout.rq, 2).unwrap();
    let srq = || SharedRecvQueue::new(&shared[..], &ring, 2).unwrap();
    let words = Private::<Vec<AtomicU64>>::words;
    assert!(sq().recorded(zeroed(words(8) - 1), false).is_err());
    assert!(rq().recorded(zeroed(words(4) - 1)).is_err());
    let words = Slots::<Vec<AtomicU64>>::words;
    assert!(srq().recorded(zeroed(words(4) - 1), 1).is_err());
}

/// What users posted and what a device makes of it.
#[derive(Debug, Clone)]
enum Step {
    Send {
        opcode: u8,
        signaled: bool,
    },
    Receive {
        length: u32,
    },
    Share {
        length: u32,
    },
    /// A completion that the device makes up, of the n-th of what it was shown, or of anything.
    Complete {
        cqe: Cqe,
        slot: u64,
    },
    Scribble,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let opcodes = prop::sample::select(vec![0u8, 1, 2, 4, 5, 6, 7]);
    let cqe = (
        0u16..10,
        prop::sample::select(vec![0u8, 1, 2, 3, 4, 6, 128, 129, 130]),
        prop::sample::select(vec![0u8, 0, 5, 200]),
        0u32..50,
        any::<u64>(),
    );
    let cqe = cqe.prop_map(|(wqe_index, opcode, status, byte_len, wr_id)| Cqe {
        wr_id,
        wqe_index,
        opcode,
        status,
        byte_len,
        ..Cqe::default()
    });
    let step = prop_oneof![
        (opcodes, any::<bool>()).prop_map(|(opcode, signaled)| Step::Send { opcode, signaled }),
        (0u32..50).prop_map(|length| Step::Receive { length }),
        (0u32..50).prop_map(|length| Step::Share { length }),
        (cqe, 0u64..12).prop_map(|(cqe, slot)| Step::Complete { cqe, slot }),
        Just(Step::Scribble),
    ];
    prop::collection::vec(step, 1..300)
}

proptest! {
    /// Whatever completions a device writes: users are told of what they posted, each once, sends
    /// and receives of a queue pair in their order, and never of more than they had room for.
    #[test]
    fn users_are_told_of_what_they_posted_and_once(steps in steps()) {
        let (memory, shared) = (qp_memory(), srq_memory());
        let (sq, rq) = (send_queue(&memory, false), receive_queue(&memory));
        let srq = shared_queue(&shared);
        let (mut sends, mut receives) = (VecDeque::new(), VecDeque::new());
        let mut shares = BTreeMap::new();
        let mut consumed = 0;
        for (step, id) in steps.into_iter().zip(1u64..) {
            match step {
                Step::Send { opcode, signaled } => {
                    let flags = if signaled { send_flag::SIGNALED } else { 0 };
                    let full = sends.len() == 8;
                    let posted = sq.post(&SendWqe { flags, ..wqe(opcode, id) }, [sge(8)]);
                    prop_assert_eq!(posted.is_err(), full);
                    if !full {
                        sends.push_back((id, signaled));
                    }
                }
                Step::Receive { length } => {
                    let full = receives.len() == 4;
                    prop_assert_eq!(rq.post(id, [sge(length)]).is_err(), full);
                    if !full {
                        receives.push_back((id, length));
                    }
                }
                Step::Share { length } => {
                    let full = shares.len() == 8;
                    prop_assert_eq!(srq.post(id, [sge(length)]).is_err(), full);
                    if !full {
                        shares.insert(id, length);
                        consumed += 1;
                        consume(&shared, consumed);
                    }
                }
                Step::Scribble => {
                    memory.iter().for_each(|word| word.store(id, Relaxed));
                    shared[8..].iter().for_each(|word| word.store(id, Relaxed));
                }
                Step::Complete { mut cqe, slot } => {
                    let is_receive = cqe.opcode & wc_opcode::RECV != 0;
                    let from_srq = is_receive && cqe.wr_id % 2 == 0;
                    if from_srq && cqe.wr_id % 8 != 0 {
                        cqe.wr_id = u64::from(SRQN) << 32 | slot;
                    }
                    let completing = Completing {
                        datagram: false,
                        sends: Some(&sq),
                        receives: Some(match from_srq {
                            true => Receives::Shared(&srq),
                            false => Receives::Own(&rq),
                        }),
                    };
                    let Ok(told) = completing.take(&cqe, |_| {}) else {
                        continue;
                    };
                    prop_assert_eq!(told.status, cqe.status);
                    let success = cqe.status == wc_status::SUCCESS;
                    let fits = |length| match told.opcode {
                        wc_opcode::RECV => told.byte_len <= length,
                        _ => success && told.opcode == wc_opcode::RECV_RDMA_WITH_IMM,
                    };
                    if from_srq {
                        let length = shares.remove(&told.wr_id);
                        prop_assert!(length.is_some_and(fits), "{told:?}");
                    } else if is_receive {
                        let (id, length) = receives.pop_front().expect("nothing was posted");
                        prop_assert_eq!(told.wr_id, id);
                        prop_assert!(fits(length), "{told:?}");
                    } else {
                        let at = sends.iter().position(|(id, _)| *id == told.wr_id);
                        let at = at.expect("it was not posted");
                        let before = sends.drain(..at).any(|(_, signaled)| signaled);
                        prop_assert!(!before, "a signaled one is passed over");
                        let signaled = sends.pop_front().map(|(_, signaled)| signaled);
                        prop_assert!(signaled == Some(true) || !success);
                    }
                }
            }
            prop_assert_eq!(sq.room() as usize, 8 - sends.len());
            prop_assert_eq!(rq.room() as usize, 4 - receives.len());
        }
    }
}
