// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues (specification: "Completion queues").
use std::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use virtio_rdma_spec::ring::{self, Cqe};
use virtio_rdma_spec::verbs::vendor_err;

use crate::memory::{GuestMemory, Pages};

/// Offset of `CqRecord::consumer`.
const CONSUMER: u64 = 0;
/// Offset of `CqRecord::arm`.
const ARM: u64 = 4;

#[derive(Debug)]
struct Producer {
    buffer: Pages,
    /// Entries written so far.
    position: u32,
    /// The consumer's position when we last looked.
    consumer: u32,
    /// Sequence of the arming that was last answered by an event, or the idle one.
    fired: u32,
}

/// What pushing a completion led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// Written.
    Quiet,
    /// Written, and the queue was armed: it wants an event.
    Event,
    /// There was no room, or its memory is gone: it is in error now, for this reason (`vendor_err`).
    Error(u8),
    /// The queue was in error before: dropped.
    Dropped,
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    /// Its number.
    pub number: u32,
    /// Completion-event queue of its events.
    pub vector: u16,
    /// Entries, a power of two.
    pub entries: u32,
    ring_offset: u64,
    /// What its page list takes of our memory, bytes.
    pub footprint: u64,
    /// Work queues that use it.
    pub users: AtomicU32,
    errored: AtomicBool,
    producer: Mutex<Producer>,
}

impl Cq {
    /// A queue of `entries` (a power of two) entries at `ring_offset` in `buffer`; the ring was checked to lie within it.
    #[must_use]
    pub fn new(number: u32, vector: u16, entries: u32, ring_offset: u64, buffer: Pages) -> Self {
        let fired = buffer
            .half_word(ARM)
            .map_or(0, |arm| arm.load(Ordering::Relaxed))
            & !(ring::ARM_SEQUENCE - 1);
        let footprint = buffer.footprint();
        let producer = Producer {
            buffer,
            position: 0,
            consumer: 0,
            fired,
        };
        Self {
            number,
            vector,
            entries,
            ring_offset,
            footprint,
            users: AtomicU32::new(0),
            errored: AtomicBool::new(false),
            producer: Mutex::new(producer),
        }
    }

    /// Whether it overflowed or lost its memory.
    #[must_use]
    pub fn errored(&self) -> bool {
        self.errored.load(Ordering::Relaxed)
    }

    /// Completions written so far, modulo 2^32.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.producer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .position
    }

    /// Writes a completion. `solicited`: it also answers an arming for solicited completions (errors always do).
    pub fn push(&self, cqe: &Cqe, solicited: bool) -> Pushed {
        let mut guard = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        let producer = &mut *guard;
        if self.errored.load(Ordering::Relaxed) {
            return Pushed::Dropped;
        }
        match self.write(producer, cqe) {
            Some(true) => {}
            Some(false) => {
                self.errored.store(true, Ordering::Relaxed);
                return Pushed::Error(vendor_err::NONE);
            }
            None => {
                self.errored.store(true, Ordering::Relaxed);
                return Pushed::Error(vendor_err::MEMORY_GONE);
            }
        }
        // The consumer stores `arm`, then, past a full fence, looks for entries; we store the entry, then, past a full fence,
        // load `arm`. One of the two sees the other.
        fence(Ordering::SeqCst);
        let Some(arm) = producer.buffer.half_word(ARM) else {
            return Pushed::Quiet;
        };
        let arm = u32::from_le(arm.load(Ordering::Relaxed));
        let sequence = arm & !(ring::ARM_SEQUENCE - 1);
        let wanted = arm & ring::ARM_NEXT != 0
            || (arm & ring::ARM_SOLICITED != 0 && (solicited || cqe.status != 0));
        if wanted && sequence != producer.fired {
            producer.fired = sequence;
            return Pushed::Event;
        }
        Pushed::Quiet
    }

    /// Whether there was room; `None` if the memory is gone.
    fn write(&self, producer: &mut Producer, cqe: &Cqe) -> Option<bool> {
        let buffer = &producer.buffer;
        if producer.position.wrapping_sub(producer.consumer) >= self.entries {
            let consumer = u32::from_le(buffer.half_word(CONSUMER)?.load(Ordering::Acquire));
            // A consumer that is ahead of us or further behind than before is nonsense: the queue stays full.
            if producer.position.wrapping_sub(consumer) >= self.entries {
                return Some(false);
            }
            producer.consumer = consumer;
        }
        let index = producer.position & (self.entries - 1);
        let offset = self.ring_offset + u64::from(index) * Cqe::SIZE as u64;
        let phase = u8::from(producer.position & self.entries == 0);
        let bytes = Cqe { phase, ..*cqe }.to_bytes();
        for (i, chunk) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
            let at = i as u64 * 8;
            let order = if at == ring::CQE_PHASE_WORD as u64 {
                Ordering::Release
            } else {
                Ordering::Relaxed
            };
            buffer.word(offset + at)?.store(word, order);
        }
        producer.position = producer.position.wrapping_add(1);
        Some(true)
    }

    /// Resolves the buffer anew after a change of the memory table.
    pub fn rebase(&self, memory: Option<&GuestMemory>) {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        producer.buffer = producer.buffer.rebase(memory);
    }
}
