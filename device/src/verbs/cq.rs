// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues (specification: "Completion queues").
use std::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use virtio_rdma_spec::ring::{self, Cqe, CqeExtension};
use virtio_rdma_spec::verbs::vendor_err;

use super::Error;
use crate::memory::{GuestMemory, Pages};

/// Stride of entries without and with [`CqeExtension`], bytes.
pub const STRIDES: [u32; 2] = [Cqe::SIZE as u32, (Cqe::SIZE + CqeExtension::SIZE) as u32];

/// Offset of `CqRecord::consumer`.
const CONSUMER: u64 = 0;
/// Offset of `CqRecord::arm`.
const ARM: u64 = 4;

/// Where a datagram comes from; all zero for other completions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Source {
    /// MAC address.
    pub mac: [u8; 6],
    /// VLAN id, or 0xffff.
    pub vlan: u16,
}

/// A ring of completions in its buffer. It was checked to lie within it.
#[derive(Debug)]
pub struct Ring {
    /// The buffer, with the `CqRecord` at its start.
    pub buffer: Pages,
    /// Offset of the first entry in the buffer, bytes.
    pub offset: u64,
    /// Entries, a power of two.
    pub entries: u32,
    /// Stride of the entries, one of [`STRIDES`].
    pub stride: u32,
}

impl Ring {
    fn at(&self, position: u32) -> u64 {
        let index = position & self.entries.wrapping_sub(1);
        self.offset + u64::from(index) * u64::from(self.stride)
    }

    /// Phase of the entry at `position`, as in `Cqe`.
    fn phase(&self, position: u32) -> u8 {
        u8::from(position & self.entries == 0)
    }

    fn consumer(&self) -> Option<u32> {
        let word = self.buffer.half_word(CONSUMER)?;
        Some(u32::from_le(word.load(Ordering::Acquire)))
    }
}

#[derive(Debug)]
struct Producer {
    ring: Ring,
    /// What the page list took of our memory when we got it, bytes.
    footprint: u64,
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
    /// Work queues that use it.
    pub users: AtomicU32,
    errored: AtomicBool,
    producer: Mutex<Producer>,
}

impl Cq {
    /// A queue with an empty ring.
    #[must_use]
    pub fn new(number: u32, vector: u16, ring: Ring) -> Self {
        let fired = ring
            .buffer
            .half_word(ARM)
            .map_or(0, |arm| u32::from_le(arm.load(Ordering::Relaxed)))
            & !(ring::ARM_SEQUENCE - 1);
        let producer = Producer {
            footprint: ring.buffer.footprint(),
            ring,
            position: 0,
            consumer: 0,
            fired,
        };
        Self {
            number,
            vector,
            users: AtomicU32::new(0),
            errored: AtomicBool::new(false),
            producer: Mutex::new(producer),
        }
    }

    fn producer(&self) -> MutexGuard<'_, Producer> {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Entries.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.producer().ring.entries
    }

    /// Stride of its entries, bytes.
    #[must_use]
    pub fn stride(&self) -> u32 {
        self.producer().ring.stride
    }

    /// What its page list takes of our memory, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.producer().footprint
    }

    /// Whether it overflowed or lost its memory.
    #[must_use]
    pub fn errored(&self) -> bool {
        self.errored.load(Ordering::Relaxed)
    }

    /// Completions written so far, modulo 2^32.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.producer().position
    }

    /// Writes a completion. `solicited`: it also answers an arming for solicited completions (errors always do).
    pub fn push(&self, cqe: &Cqe, solicited: bool) -> Pushed {
        self.push_from(cqe, &Source::default(), solicited)
    }

    /// Writes the completion of a datagram from `source`.
    pub fn push_from(&self, cqe: &Cqe, source: &Source, solicited: bool) -> Pushed {
        let mut guard = self.producer();
        let producer = &mut *guard;
        if self.errored.load(Ordering::Relaxed) {
            return Pushed::Dropped;
        }
        match producer.write(cqe, source) {
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
        if producer.fires(solicited || cqe.status != 0) {
            return Pushed::Event;
        }
        Pushed::Quiet
    }

    /// Resolves the buffer anew after a change of the memory table.
    pub fn rebase(&self, memory: Option<&GuestMemory>) {
        let buffer = &mut self.producer().ring.buffer;
        *buffer = buffer.rebase(memory);
    }

    /// Goes over to another ring, zeroed, with entries of the same stride and the same `arm`. What was not consumed is at
    /// its start then. Returns the number of these entries, and whether an event is wanted.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not fit or the queue is in error, [`Error::Fault`] if a ring is not guest memory:
    /// nothing has changed then.
    pub fn resize(&self, ring: Ring) -> Result<(u32, bool), Error> {
        let mut guard = self.producer();
        let producer = &mut *guard;
        let old = &producer.ring;
        if self.errored() {
            return Err(Error::Invalid);
        }
        let consumer = old.consumer().ok_or(Error::Fault)?;
        let count = producer.position.wrapping_sub(consumer);
        // A consumer that is ahead of us makes this a large number.
        if count > old.entries.min(ring.entries) || ring.stride != old.stride {
            return Err(Error::Invalid);
        }
        for i in 0..count {
            let (from, to) = (old.at(consumer.wrapping_add(i)), ring.at(i));
            let mut phase_word = 0;
            for at in (0..u64::from(ring.stride)).step_by(8) {
                let word = old.buffer.word(from + at).ok_or(Error::Fault)?;
                let word = word.load(Ordering::Relaxed);
                if at == ring::CQE_PHASE_WORD as u64 {
                    phase_word = word;
                } else {
                    let target = ring.buffer.word(to + at).ok_or(Error::Fault)?;
                    target.store(word, Ordering::Relaxed);
                }
            }
            let mut bytes = phase_word.to_ne_bytes();
            if let Some(phase) = bytes.last_mut() {
                *phase = ring.phase(i);
            }
            let target = ring.buffer.word(to + ring::CQE_PHASE_WORD as u64);
            target
                .ok_or(Error::Fault)?
                .store(u64::from_ne_bytes(bytes), Ordering::Release);
        }
        producer.footprint = ring.buffer.footprint();
        producer.ring = ring;
        producer.position = count;
        producer.consumer = 0;
        Ok((count, count > 0 && producer.fires(false)))
    }
}

impl Producer {
    /// Whether an event is wanted now that entries were written, and was not raised yet. `solicited`: also where only
    /// solicited completions and errors count.
    fn fires(&mut self, solicited: bool) -> bool {
        // The consumer stores `arm`, then, past a full fence, looks for entries; we store the entry, then, past a full fence,
        // load `arm`. One of the two sees the other.
        fence(Ordering::SeqCst);
        let Some(arm) = self.ring.buffer.half_word(ARM) else {
            return false;
        };
        let arm = u32::from_le(arm.load(Ordering::Relaxed));
        let sequence = arm & !(ring::ARM_SEQUENCE - 1);
        let wanted = arm & ring::ARM_NEXT != 0 || (arm & ring::ARM_SOLICITED != 0 && solicited);
        let fires = wanted && sequence != self.fired;
        if fires {
            self.fired = sequence;
        }
        fires
    }

    /// Whether there was room; `None` if the memory is gone.
    fn write(&mut self, cqe: &Cqe, source: &Source) -> Option<bool> {
        let ring = &self.ring;
        if self.position.wrapping_sub(self.consumer) >= ring.entries {
            let consumer = ring.consumer()?;
            // A consumer that is ahead of us or further behind than before is nonsense: the queue stays full.
            if self.position.wrapping_sub(consumer) >= ring.entries {
                return Some(false);
            }
            self.consumer = consumer;
        }
        let at = ring.at(self.position);
        if ring.stride as usize > Cqe::SIZE {
            let extension = CqeExtension {
                timestamp: clock(),
                smac: source.mac,
                vlan: source.vlan,
                ..CqeExtension::default()
            };
            let after = at + Cqe::SIZE as u64;
            store(ring, after, &extension.to_bytes(), Ordering::Relaxed)?;
        }
        let phase = ring.phase(self.position);
        // The phase is in the last word.
        store(
            ring,
            at,
            &Cqe { phase, ..*cqe }.to_bytes(),
            Ordering::Release,
        )?;
        self.position = self.position.wrapping_add(1);
        Some(true)
    }
}

/// Stores words, the last one with this order.
#[inline]
fn store(ring: &Ring, at: u64, bytes: &[u8], last: Ordering) -> Option<()> {
    for (i, chunk) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
        let within = 8 * i;
        let order = if within + 8 == bytes.len() {
            last
        } else {
            Ordering::Relaxed
        };
        ring.buffer.word(at + within as u64)?.store(word, order);
    }
    Some(())
}

/// The device's clock, nanoseconds.
#[must_use]
pub fn clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec as u64, now.tv_nsec as u64);
    seconds
        .wrapping_mul(1_000_000_000)
        .wrapping_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::region;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// Rings of up to 64 KiB.
    fn ring(entries: u32, stride: u32) -> (Ring, GuestMemory) {
        let memory = GuestMemory::new(vec![region(0, 17)]).unwrap();
        let pages = (0..17).map(|page| page << 12).collect();
        let ring = Ring {
            buffer: Pages::resolve(&memory, pages, 12).unwrap(),
            offset: 4096,
            entries,
            stride,
        };
        (ring, memory)
    }

    /// The driver's side.
    struct Consumer {
        memory: GuestMemory,
        entries: u32,
        stride: u32,
        position: u32,
    }

    impl Consumer {
        fn word(&self, at: u64) -> u64 {
            let word = self.memory.span(at, 8).unwrap().word().unwrap();
            word.load(Ordering::Acquire)
        }

        fn poll(&mut self) -> Option<(Cqe, CqeExtension)> {
            let at = 4096 + u64::from(self.position % self.entries) * u64::from(self.stride);
            let mut bytes = [0; 64];
            for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&self.word(at + 8 * i as u64).to_ne_bytes());
            }
            let cqe = Cqe::from_bytes(bytes.first_chunk().unwrap());
            if u32::from(cqe.phase) != 1 - self.position / self.entries % 2 {
                return None;
            }
            self.position += 1;
            Some((cqe, CqeExtension::from_bytes(bytes.last_chunk().unwrap())))
        }

        fn publish(&self) {
            self.record(CONSUMER, self.position);
        }

        fn record(&self, at: u64, value: u32) {
            let pages = Pages::resolve(&self.memory, vec![0], 12).unwrap();
            let word = pages.half_word(at).unwrap();
            word.store(value.to_le(), Ordering::Release);
        }
    }

    fn queue(entries: u32, stride: u32) -> (Cq, Consumer) {
        let (ring, memory) = ring(entries, stride);
        let consumer = Consumer {
            memory,
            entries,
            stride,
            position: 0,
        };
        (Cq::new(7, 0, ring), consumer)
    }

    fn cqe(wr_id: u64) -> Cqe {
        Cqe {
            wr_id,
            ..Cqe::default()
        }
    }

    #[test]
    fn wide_entries_have_time_stamps_that_do_not_go_back() {
        let (cq, mut consumer) = queue(4, 64);
        let mut before = clock();
        for i in 0..10 {
            let source = Source {
                mac: [i as u8; 6],
                vlan: 7,
            };
            assert_eq!(cq.push_from(&cqe(i), &source, false), Pushed::Quiet);
            let (cqe, extension) = consumer.poll().unwrap();
            assert_eq!((cqe.wr_id, extension.vlan), (i, 7));
            assert_eq!(extension.smac, [i as u8; 6]);
            assert!(extension.timestamp >= before);
            before = extension.timestamp;
            consumer.publish();
        }
        assert!(clock() >= before && consumer.poll().is_none());
    }

    #[test]
    fn what_was_armed_stays_armed_over_a_resize() {
        let (cq, mut consumer) = queue(4, 32);
        let armed = |n: u32| n * ring::ARM_SEQUENCE + ring::ARM_NEXT;
        // The driver hands over a ring with the same `arm`.
        let resized = |entries, arm| {
            let (new, memory) = ring(entries, 32);
            let consumer = Consumer {
                memory,
                entries,
                stride: 32,
                position: 0,
            };
            consumer.record(ARM, arm);
            (new, consumer)
        };
        consumer.record(ARM, armed(1));
        assert_eq!(cq.push(&cqe(1), false), Pushed::Event);
        let new;
        (new, consumer) = resized(8, armed(1));
        assert_eq!(cq.resize(new), Ok((1, false)));
        assert_eq!(cq.push(&cqe(2), false), Pushed::Quiet);
        assert_eq!(consumer.poll().unwrap().0.wr_id, 1);
        assert_eq!(consumer.poll().unwrap().0.wr_id, 2);
        consumer.publish();
        consumer.record(ARM, armed(2));
        let new;
        (new, consumer) = resized(2, armed(2));
        assert_eq!(cq.resize(new), Ok((0, false)));
        assert_eq!(cq.push(&cqe(3), false), Pushed::Event);
        assert_eq!(consumer.poll().unwrap().0.wr_id, 3);
        assert_eq!(cq.push(&cqe(4), false), Pushed::Quiet);
        let (new, _) = resized(2, armed(3));
        assert_eq!(cq.resize(new), Ok((2, true)));
    }

    #[test]
    fn a_resize_that_cannot_be_changes_nothing() {
        let (cq, mut consumer) = queue(4, 32);
        for i in 0..3 {
            cq.push(&cqe(i), false);
        }
        assert_eq!(cq.resize(ring(2, 32).0), Err(Error::Invalid));
        assert_eq!(cq.resize(ring(8, 64).0), Err(Error::Invalid));
        consumer.record(CONSUMER, 4);
        assert_eq!(cq.resize(ring(8, 32).0), Err(Error::Invalid));
        consumer.record(CONSUMER, 0);
        for i in 0..3 {
            assert_eq!(consumer.poll().unwrap().0.wr_id, i);
        }
        let lost = ring(8, 32).0;
        let lost = Ring {
            buffer: lost.buffer.rebase(None),
            ..lost
        };
        assert_eq!(cq.resize(lost), Err(Error::Fault));
        assert_eq!(cq.entries(), 4);
        assert_eq!(cq.push(&cqe(3), false), Pushed::Quiet);
        assert_eq!(cq.push(&cqe(4), false), Pushed::Error(vendor_err::NONE));
        assert_eq!(cq.resize(ring(8, 32).0), Err(Error::Invalid));
    }

    proptest! {
        /// Whatever is pushed, polled and resized when: completions come once and in order (D-RSZ-001).
        #[test]
        fn completions_survive_resizes(
            wide: bool, steps in prop::collection::vec((0u8..4, 0u32..6), 1..200),
        ) {
            let stride = if wide { 64 } else { 32 };
            let (cq, mut consumer) = queue(8, stride);
            let mut pending = VecDeque::new();
            let mut next = 0;
            for (what, n) in steps {
                match what {
                    0 if pending.len() < consumer.entries as usize => {
                        prop_assert_eq!(cq.push(&cqe(next), false), Pushed::Quiet);
                        pending.push_back(next);
                        next += 1;
                    }
                    3 => {
                        let entries = 1 << n;
                        let (new, memory) = ring(entries, stride);
                        let fits = pending.len() <= entries as usize;
                        let moved = cq.resize(new);
                        prop_assert_eq!(moved.is_ok(), fits);
                        if fits {
                            prop_assert_eq!(moved, Ok((pending.len() as u32, false)));
                            consumer = Consumer { memory, entries, stride, position: 0 };
                        }
                    }
                    _ => {
                        let polled = consumer.poll().map(|(cqe, _)| cqe.wr_id);
                        prop_assert_eq!(polled, pending.pop_front());
                        consumer.publish();
                    }
                }
            }
        }
    }
}
