// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues: polling and arming (specification: "Rings", "Completion events").
//!
//! A completion queue is used by one thread at a time; threads that share it bring the lock.
use virtio_rdma_spec::ring::{
    CqRecord, Cqe, CqeExtension, ARM_NEXT, ARM_SEQUENCE, ARM_SOLICITED, CQE_PHASE_WORD,
    CQ_ARM_OFFSET, MAX_CQ_ENTRIES,
};

use crate::buffer::RingLayout;
use crate::ring::{BadLayout, Memory, Ring};
use crate::sync::{fence, AtomicU32, AtomicU64, Ordering};

/// Words of an entry.
const WORDS: usize = Cqe::SIZE / 8;
/// Words of an entry with an extension.
const EXTENDED_WORDS: usize = WORDS + CqeExtension::SIZE / 8;
/// The word that holds the phase.
const PHASE_WORD: usize = CQE_PHASE_WORD / 8;
/// The word that holds the number of the queue pair.
const QP_WORD: usize = 2;
/// The word of `CqRecord` that holds `arm`.
const ARM_WORD: usize = CQ_ARM_OFFSET / 8;
/// The phase, the lowest bit of the last byte.
const PHASE_BIT: u64 = u64::from_le(1 << 56);
/// No queue pair has this number: it marks entries that are not to be returned.
const FORGOTTEN: u32 = u32::MAX;

/// Another buffer for a completion queue, with its record written.
#[derive(Debug)]
pub struct ResizedQueue<M> {
    ring: Ring<M>,
}

fn cq_ring<M: Memory>(memory: M, layout: &RingLayout) -> Result<Ring<M>, BadLayout> {
    let strides = [8 * WORDS as u32, 8 * EXTENDED_WORDS as u32];
    if !strides.contains(&layout.stride)
        || layout.entries > MAX_CQ_ENTRIES
        || layout.offset < CqRecord::SIZE as u32
    {
        return Err(BadLayout);
    }
    Ring::new(memory, layout)
}

/// What an armed completion queue raises an event for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArmMode {
    /// Any completion.
    Any,
    /// Solicited completions and errors.
    Solicited,
}

/// A completion queue. Its buffer starts with the `CqRecord`.
#[derive(Debug)]
pub struct CompletionQueue<M> {
    ring: Ring<M>,
    consumer: AtomicU32,
    /// `CqRecord::arm`.
    arm: AtomicU32,
    /// Completion events that were seen, and what that count was when the queue was armed for any
    /// completion.
    events: AtomicU32,
    armed_any_at: AtomicU32,
}

impl<M: Memory> CompletionQueue<M> {
    /// A completion queue in a zeroed ring; `memory` is the whole buffer that `layout` is about.
    ///
    /// # Errors
    /// The layout is not valid or does not fit the memory.
    pub fn new(memory: M, layout: &RingLayout) -> Result<Self, BadLayout> {
        Ok(Self {
            ring: cq_ring(memory, layout)?,
            consumer: AtomicU32::new(0),
            arm: AtomicU32::new(0),
            events: AtomicU32::new(0),
            armed_any_at: AtomicU32::new(u32::MAX),
        })
    }

    /// Takes the next completion. Call [`CompletionQueue::publish`] after the last of a series.
    #[inline(always)]
    pub fn poll(&self) -> Option<Cqe> {
        // A bound for the entries that are skipped: a lap.
        for skipped in 0..=self.ring.entries() {
            let position = self.consumer.load(Ordering::Relaxed);
            let Some(cqe) = self.peek(position) else {
                if skipped > 0 {
                    // The caller has nothing to publish, but the device needs the room.
                    self.publish();
                }
                return None;
            };
            self.consumer
                .store(position.wrapping_add(1), Ordering::Relaxed);
            if cqe.qp_num != FORGOTTEN {
                return Some(cqe);
            }
        }
        None
    }

    /// The extension of the completion that was polled last, as long as that is not published; zero
    /// where entries have none.
    #[inline(always)]
    #[must_use]
    pub fn extension(&self) -> CqeExtension {
        let position = self.consumer.load(Ordering::Relaxed).wrapping_sub(1);
        let words = self.ring.entry(position).get(WORDS..).unwrap_or(&[]);
        let mut bytes = [0; CqeExtension::SIZE];
        for (to, from) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes());
        }
        CqeExtension::from_bytes(&bytes)
    }

    /// Is there a completion to poll?
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.written(self.consumer.load(Ordering::Relaxed))
            .is_some()
    }

    /// The entry at a position, if it is written.
    #[inline(always)]
    fn peek(&self, position: u32) -> Option<Cqe> {
        let words = self.written(position)?;
        let mut bytes = [0; Cqe::SIZE];
        for (to, from) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(Cqe::from_bytes(&bytes))
    }

    #[inline(always)]
    fn written(&self, position: u32) -> Option<&[AtomicU64; WORDS]> {
        let words = self.ring.entry(position).first_chunk::<WORDS>()?;
        // Acquire: the rest of the entry, and the data of the message, were written before the
        // phase.
        let phase = words[PHASE_WORD].load(Ordering::Acquire) & PHASE_BIT != 0;
        (phase == self.ring.phase(position)).then_some(words)
    }

    /// Tells the device what is consumed, so that it can use the entries again.
    #[inline(always)]
    pub fn publish(&self) {
        let consumer = self.consumer.load(Ordering::Relaxed);
        if let Some(at) = self.ring.memory().first() {
            at.store(u64::from(consumer).to_le(), Ordering::Release);
        }
    }

    /// Tells the device, in `ring`, what is asked for.
    fn store_arm(&self, ring: &Ring<M>) {
        let arm = self.arm.load(Ordering::Relaxed);
        if let Some(at) = ring.memory().get(ARM_WORD) {
            at.store(u64::from(arm).to_le(), Ordering::SeqCst);
        }
    }

    /// Prepares another, zeroed buffer for the queue: to give to the device, which moves there what
    /// is not consumed. Until [`CompletionQueue::resized`], or until the device refused, the queue
    /// must not be used.
    ///
    /// # Errors
    /// The layout is not valid, does not fit the memory, or has another stride than the queue.
    pub fn prepare_resize(
        &self,
        memory: M,
        layout: &RingLayout,
    ) -> Result<ResizedQueue<M>, BadLayout> {
        let ring = cq_ring(memory, layout)?;
        if ring.entry(0).len() != self.ring.entry(0).len() {
            return Err(BadLayout);
        }
        // The device moves what the record says is not consumed.
        self.publish();
        self.store_arm(&ring);
        Ok(ResizedQueue { ring })
    }

    /// Goes on with the buffer that the device has moved the completions to: they are the first of
    /// its ring. Returns the old one.
    pub fn resized(&mut self, queue: ResizedQueue<M>) -> M {
        self.consumer.store(0, Ordering::Relaxed);
        core::mem::replace(&mut self.ring, queue.ring).into_memory()
    }

    /// Asks for an event with the next completion. Completions that are there already raise none:
    /// poll again afterwards.
    ///
    /// # Ordering
    ///
    /// The device writes an entry, then behind a full fence loads `arm`. Here `arm` is stored, then
    /// behind a full fence the caller polls once more. If the device's load misses the store, its
    /// fence came before this one, and so the poll behind this one sees the entry: nobody sleeps
    /// while a completion lies there.
    pub fn arm(&self, mode: ArmMode) {
        let events = self.events.load(Ordering::Relaxed);
        // While no event has come, what was asked for before stands: any completion includes the
        // solicited ones.
        let any = mode == ArmMode::Any || self.armed_any_at.load(Ordering::Relaxed) == events;
        if any {
            self.armed_any_at.store(events, Ordering::Relaxed);
        }
        let mode = if any { ARM_NEXT } else { ARM_SOLICITED };
        let sequence = self.arm.load(Ordering::Relaxed) & !(ARM_NEXT | ARM_SOLICITED);
        self.arm.store(
            sequence.wrapping_add(ARM_SEQUENCE) | mode,
            Ordering::Relaxed,
        );
        self.store_arm(&self.ring);
        fence(Ordering::SeqCst);
    }

    /// Notes that an event of this queue was received. May be called without the lock.
    pub fn event_received(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes [`CompletionQueue::poll`] pass over the completions of a queue pair that are in the
    /// ring now: for queue pairs that were destroyed or reset.
    pub fn forget(&self, qp_num: u32) {
        self.forget_each(qp_num, |_| {});
    }

    /// As [`Self::forget`]; calls `forgotten` for each completion.
    pub fn forget_each(&self, qp_num: u32, mut forgotten: impl FnMut(&Cqe)) {
        let consumer = self.consumer.load(Ordering::Relaxed);
        for i in 0..self.ring.entries() {
            let position = consumer.wrapping_add(i);
            let Some(cqe) = self.peek(position) else {
                return;
            };
            if cqe.qp_num == qp_num {
                forgotten(&cqe);
                let [a, b, c, d] = FORGOTTEN.to_le_bytes();
                let [e, f, g, h] = cqe.src_qp.to_le_bytes();
                if let Some(at) = self.ring.entry(position).get(QP_WORD) {
                    at.store(
                        u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
                        Ordering::Relaxed,
                    );
                }
            }
        }
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }
}
