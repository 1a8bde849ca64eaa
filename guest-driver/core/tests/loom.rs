// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Model checks of the protocols between driver and device: every interleaving, every value a load
//! may return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p virtio-rdma-driver-core --release --test loom
//!
//! The driver's side is the real code. The device's side is written here as the specification has
//! it: the device's code must do the same. The model checker knows sequential consistency from
//! fences only, so the device's side has its fences spelt out.
#![cfg(loom)]

use std::ops::Deref;

use loom::sync::Arc;
use loom::thread;
use virtio_rdma_driver_core::buffer::{CqLayout, RingLayout};
use virtio_rdma_driver_core::sync::{fence, AtomicU32, AtomicU64, Ordering::*};
use virtio_rdma_driver_core::{
    ArmMode, CompletionQueue, Doorbell, Record, RecvQueue, SendQueue, SharedRecvQueue, StatusPage,
};
use virtio_rdma_spec::doorbell::{
    worker_status, BLOCK_SIZE, DIRECT_SHIFT, LEAF_OFFSET, SUMMARY_OFFSET,
};
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, ARM_NEXT, CQ_ARM_OFFSET, PHASE};
use virtio_rdma_spec::verbs::wc_opcode;

/// Shared memory of the model: words that are touched are atomics of the model checker, which are
/// dear.
#[derive(Clone)]
struct Words(Arc<Vec<AtomicU64>>);

impl Words {
    fn new(bytes: usize) -> Self {
        Self(Arc::new(
            (0..bytes / 8).map(|_| AtomicU64::new(0)).collect(),
        ))
    }
}

impl Deref for Words {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

const SQ: RingLayout = RingLayout {
    entries: 1,
    stride: 64,
    offset: 64,
};
const RQ: RingLayout = RingLayout {
    entries: 1,
    stride: 32,
    offset: 64,
};

/// Looks for an entry as the device does: the phase of the first lap.
fn posted(ring: &Words, offset: u32) -> bool {
    ring[offset as usize / 8].load(Acquire).to_ne_bytes()[1] & PHASE != 0
}

/// Word of a byte offset in doorbell memory.
fn at(words: &Words, offset: usize) -> &AtomicU64 {
    &words[offset / 8]
}

/// A poster and a worker that goes to sleep: either the worker finds the work, or it is woken.
// G-DB-001.
#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let (queue, blocks, status) = (Words::new(128), Words::new(BLOCK_SIZE), Words::new(8));
        let notified = Arc::new(AtomicU32::new(0));
        let poster = {
            let (queue, blocks, status, notified) = (
                queue.clone(),
                blocks.clone(),
                status.clone(),
                notified.clone(),
            );
            thread::spawn(move || {
                let sq = SendQueue::new(queue, &SQ, 1, 0).unwrap();
                let doorbell = Doorbell::new(blocks, status, 0, 0).unwrap();
                sq.post(&SendWqe::default(), []).unwrap();
                if doorbell.ring() {
                    notified.store(1, Release);
                }
            })
        };
        status[0].store(u64::from(worker_status::SLEEPING).to_le(), SeqCst);
        fence(SeqCst);
        let awake = at(&blocks, 0).load(SeqCst) != 0;
        if awake {
            assert_ne!(at(&blocks, 0).swap(0, SeqCst), 0);
            fence(SeqCst);
            assert!(
                posted(&queue, SQ.offset),
                "the bit is there and the entry is not"
            );
        }
        poster.join().unwrap();
        assert!(
            awake || notified.load(Acquire) == 1,
            "asleep, and nobody wakes it"
        );
    });
}

/// The bit in the root word of the first slot.
fn bit() -> u64 {
    (1u64 << DIRECT_SHIFT).to_le()
}

/// A poster and a worker that busy-polls its queue: it takes the ring that it sees and looks for
/// what was posted before. Either it finds that, or the ring stands.
// D-DB-001.
#[test]
fn no_ring_is_taken_for_nothing() {
    take_a_ring(0);
}

/// The same where something else has rung before, so that the poster may find the ring standing.
// G-DB-001, D-DB-001.
#[test]
fn no_ring_that_stands_is_taken_for_nothing() {
    take_a_ring(bit());
}

fn take_a_ring(standing: u64) {
    loom::model(move || {
        let (queue, blocks) = (Words::new(128), Words::new(BLOCK_SIZE));
        at(&blocks, 0).store(standing, Relaxed);
        let poster = {
            let (queue, blocks) = (queue.clone(), blocks.clone());
            thread::spawn(move || {
                let sq = SendQueue::new(queue, &SQ, 1, 0).unwrap();
                let doorbell = Doorbell::new(blocks, Words::new(8), 0, 0).unwrap();
                sq.post(&SendWqe::default(), []).unwrap();
                let _ = doorbell.ring();
            })
        };
        let root = at(&blocks, 0);
        if root.load(Relaxed) == bit() {
            root.fetch_and(!bit(), SeqCst);
            fence(SeqCst);
        }
        let found = posted(&queue, SQ.offset);
        poster.join().unwrap();
        assert!(
            found || root.load(Relaxed) == bit(),
            "the ring is gone and the entry was not seen"
        );
    });
}

/// The same with a ring for a receive that another worker has just asked for: whoever takes it sees
/// that, and puts it back.
// D-DB-001.
#[test]
fn no_ring_for_a_receive_is_taken_away() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (queue, blocks) = (Words::new(96), Words::new(BLOCK_SIZE));
        let awaited = Arc::new(AtomicU32::new(0));
        // There is a ring for something else.
        at(&blocks, 0).store(bit(), Relaxed);
        let poster = {
            let (queue, blocks) = (queue.clone(), blocks.clone());
            thread::spawn(move || {
                let rq = RecvQueue::new(queue, &RQ, 1).unwrap();
                if rq.post(1, []).unwrap() {
                    let _ = Doorbell::new(blocks, Words::new(8), 0, 0).unwrap().ring();
                }
            })
        };
        let watcher = {
            let (blocks, awaited) = (blocks.clone(), awaited.clone());
            thread::spawn(move || {
                let root = at(&blocks, 0);
                if root.load(Relaxed) == bit() {
                    root.fetch_and(!bit(), SeqCst);
                    fence(SeqCst);
                    if awaited.load(SeqCst) != 0 {
                        root.fetch_or(bit(), SeqCst);
                    }
                }
            })
        };
        awaited.store(1, SeqCst);
        queue[0].store(1u64.to_le(), SeqCst);
        fence(SeqCst);
        let found = posted(&queue, RQ.offset);
        poster.join().unwrap();
        watcher.join().unwrap();
        assert!(
            found || at(&blocks, 0).load(Relaxed) == bit(),
            "a message waits, and the ring for its receive is gone"
        );
    });
}

/// One scan of a doorbell block: the leaf bits it takes.
fn scan(blocks: &Words) -> u64 {
    if at(blocks, 0).swap(0, AcqRel) == 0 {
        return 0;
    }
    fence(SeqCst);
    if at(blocks, SUMMARY_OFFSET).swap(0, AcqRel) == 0 {
        return 0;
    }
    fence(SeqCst);
    at(blocks, LEAF_OFFSET).swap(0, AcqRel)
}

/// Two posters with bits in the same leaf word, and a worker that scans meanwhile: each bit is
/// taken by that scan or by the next, though both posters skip the words that are set already.
// G-DB-001.
#[test]
fn no_leaf_bit_is_left_behind() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (blocks, status) = (Words::new(BLOCK_SIZE), Words::new(8));
        let posters: Vec<_> = [48, 49]
            .map(|slot| {
                let doorbell = Doorbell::new(blocks.clone(), status.clone(), 0, slot).unwrap();
                thread::spawn(move || assert!(!doorbell.ring()))
            })
            .into();
        let meanwhile = scan(&blocks);
        for poster in posters {
            poster.join().unwrap();
        }
        assert_eq!(meanwhile | scan(&blocks), 3 << 48);
    });
}

/// A receive posted while a message finds none: the message finds it at second sight, or the
/// doorbell is rung.
// G-RQ-001.
#[test]
fn no_receive_is_overlooked() {
    loom::model(|| {
        let queue = Words::new(96);
        let poster = {
            let queue = queue.clone();
            thread::spawn(move || RecvQueue::new(queue, &RQ, 1).unwrap().post(1, []).unwrap())
        };
        queue[0].store(1u64.to_le(), SeqCst);
        fence(SeqCst);
        let found = posted(&queue, RQ.offset);
        let rung = poster.join().unwrap();
        assert!(
            found || rung,
            "a message waits, and nobody says that there is a receive"
        );
    });
}

const SRQ: RingLayout = RingLayout {
    entries: 1,
    stride: 32,
    offset: 128,
};

/// Receives posted to a shared receive queue of one entry while a message finds none: it finds one
/// at second sight, or the doorbell is rung. What it has consumed is posted, is read before it is
/// written again, and has room after that.
#[test]
fn no_shared_receive_is_overlooked() {
    loom::model(|| {
        let queue = Words::new(160);
        let poster = {
            let queue = queue.clone();
            thread::spawn(move || {
                let srq = SharedRecvQueue::new(queue, &SRQ, 1).unwrap();
                let rung = srq.post(1, []).unwrap();
                (rung, srq.post(2, []).is_ok())
            })
        };
        queue[0].store(1u64.to_le(), SeqCst);
        fence(SeqCst);
        let found = posted(&queue, SRQ.offset);
        if found {
            let wr_id = queue[SRQ.offset as usize / 8 + 1].load(Relaxed);
            assert_eq!(u64::from_le(wr_id), 1, "written again before it is free");
            assert!(
                u64::from_le(queue[8].load(Relaxed)) >= 1,
                "consumed but not posted"
            );
            queue[0].store((1u64 << 32).to_le(), Release);
        }
        let (rung, second) = poster.join().unwrap();
        assert!(
            found || rung,
            "a message waits, and nobody says that there is a receive"
        );
        assert!(found || !second, "there was no room");
    });
}

/// A completion written while the queue is armed: polled after arming, or announced by an event.
// G-ARM-001.
#[test]
fn no_completion_is_overlooked() {
    loom::model(|| {
        let layout = CqLayout::new(1).unwrap().ring;
        let queue = Words::new(layout.offset as usize + Cqe::SIZE);
        let driver = {
            let queue = queue.clone();
            thread::spawn(move || {
                let cq = CompletionQueue::new(queue, &layout).unwrap();
                cq.arm(ArmMode::Any);
                cq.poll().is_some_and(|cqe| {
                    assert_eq!(cqe.wr_id, 7);
                    true
                })
            })
        };
        let cqe = Cqe {
            wr_id: 7,
            phase: 1,
            ..Cqe::default()
        }
        .to_bytes();
        let words = &queue[layout.offset as usize / 8..];
        for (word, bytes) in words.iter().zip(cqe.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Release);
        }
        fence(SeqCst);
        let event = queue[CQ_ARM_OFFSET / 8].load(Acquire) as u32 & ARM_NEXT != 0;
        let polled = driver.join().unwrap();
        assert!(polled || event, "a completion, and nobody looks for it");
    });
}

/// A work request posted while the device is lost, its loss made known, and queues flushed by
/// whoever learns of it: it is flushed then, or the poster learns of the loss. Whoever flushes it
/// sees all of the entry, as it was posted.
// G-RST-003, G-RST-004, G-RST-005.
#[test]
fn no_work_request_is_left_with_a_lost_device() {
    lose_device(|| SendQueue::new(Words::new(128), &SQ, 1, 0).unwrap());
}

/// The same, where what was posted is recorded elsewhere than in the ring.
#[test]
fn no_recorded_work_request_is_left_with_a_lost_device() {
    lose_device(|| {
        let queue = SendQueue::new(Words::new(128), &SQ, 1, 0).unwrap();
        queue.recorded(Words::new(16), false).unwrap()
    });
}

fn lose_device<R>(queue: impl Fn() -> SendQueue<Words, R> + Send + Sync + 'static)
where
    R: Record + Send + Sync + 'static,
{
    loom::model(move || {
        let (blocks, status) = (Words::new(BLOCK_SIZE), Words::new(8));
        let sq = Arc::new(queue());
        let poster = {
            let (sq, status) = (sq.clone(), status.clone());
            thread::spawn(move || {
                let doorbell = Doorbell::new(blocks, status, 0, 0).unwrap();
                let wqe = SendWqe {
                    wr_id: 7,
                    ..SendWqe::default()
                };
                sq.post(&wqe, []).unwrap();
                assert!(!doorbell.ring());
                doorbell.is_lost()
            })
        };
        // The driver, and behind it the handler of the completion queue.
        status[0].store(u64::from(worker_status::LOST).to_le(), SeqCst);
        fence(SeqCst);
        assert!(StatusPage::new(status.clone()).is_lost());
        let flushed = sq.flush_next(5);
        if let Some(cqe) = &flushed {
            assert_eq!((cqe.wr_id, cqe.wqe_index, cqe.qp_num), (7, 0, 5));
            sq.complete(cqe.wqe_index);
        }
        let told = poster.join().unwrap();
        assert!(
            flushed.is_some() || told,
            "a work request, and nobody flushes it"
        );
        assert!(flushed.is_some() || sq.flush_next(5).is_some());
        assert_eq!(sq.room(), u32::from(flushed.is_some()));
    });
}

/// Two completion queues are polled at once, and a device has written completions of the same
/// receive of a shared receive queue to both, while more is posted: each receive is handed out
/// once, and whole.
// G-SEC-006.
#[test]
fn a_shared_receive_is_handed_out_once() {
    loom::model(|| {
        let queue = Words::new(160);
        let srq = SharedRecvQueue::new(queue.clone(), &SRQ, 1).unwrap();
        let srq = Arc::new(srq.recorded(Words::new(40), 3).unwrap());
        let post = |wr_id: u64, consumed: u64| {
            let sge = Sge {
                length: wr_id as u32,
                ..Sge::default()
            };
            let posted = srq.post(wr_id, [sge]).is_ok();
            queue[0].store((consumed << 32).to_le(), Relaxed);
            posted
        };
        assert!(post(1, 1) && post(2, 2));
        let take = |srq: &SharedRecvQueue<_, _>, byte_len| {
            let cqe = Cqe {
                wr_id: 3 << 32,
                byte_len,
                opcode: wc_opcode::RECV,
                ..Cqe::default()
            };
            let told = srq.take(&cqe, false).ok();
            told.map(|cqe| cqe.wr_id)
        };
        let other = {
            let srq = srq.clone();
            thread::spawn(move || take(&srq, 1))
        };
        let own = take(&srq, 1);
        // In the slot of the first one, as soon as that is free.
        let third = post(3, 3);
        let told = [own, other.join().unwrap(), take(&srq, 3), take(&srq, 3)];
        let times = |wr_id| told.iter().filter(|told| **told == Some(wr_id)).count();
        assert_eq!((times(1), times(2)), (1, 0), "{told:?}");
        assert_eq!(times(3), usize::from(third), "{told:?}");
    });
}
