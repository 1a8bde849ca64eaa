// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues (specification: "Completion queues").
use std::collections::BTreeSet;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::time::TimeSpec;
use nix::time::{clock_gettime, ClockId};
use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::ring::{self, Cqe, CqeExtension};
use virtio_rdma_spec::verbs::vendor_err;

use super::Error;
use crate::footprint::{counted, Share};
use crate::memory::{prefetch_write, GuestMemory, Pages};

/// Stride of entries without and with [`CqeExtension`], bytes.
pub const STRIDES: [u32; 2] = [Cqe::SIZE as u32, (Cqe::SIZE + CqeExtension::SIZE) as u32];

/// Offset of `CqRecord::consumer`.
const CONSUMER: u64 = 0;
/// Offset of `CqRecord::arm`.
const ARM: u64 = ring::CQ_ARM_OFFSET as u64;

/// Largest `count` of MODIFY_CQ.
pub const MAX_MODERATION_COUNT: u16 = u16::MAX;
/// Largest `period` of MODIFY_CQ, microseconds.
pub const MAX_MODERATION_PERIOD: u16 = u16::MAX;

/// Where a datagram comes from; all zero for other completions.
#[derive(Debug, Clone, Copy, Default)]
pub struct L2Source {
    /// MAC address.
    pub mac: [u8; 6],
    /// VLAN id, or [`NO_VLAN`].
    pub vlan: u16,
}

/// What stands for a VLAN id where there is none.
pub const NO_VLAN: u16 = 0xffff;

/// A ring of completions in its buffer. It was checked to lie within it.
#[derive(Debug)]
pub struct CqRing {
    /// The buffer, with the `CqRecord` at its start.
    pub buffer: Pages,
    /// Offset of the first entry in the buffer, bytes.
    pub offset: u64,
    /// Entries, a power of two.
    pub entries: u32,
    /// Stride of the entries, one of [`STRIDES`].
    pub stride: u32,
}

impl CqRing {
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

/// How long events are held back (specification: "Moderation").
#[derive(Debug, Clone, Copy)]
struct Moderation {
    /// For so many completions: with 1, not at all.
    count: u32,
    /// For so long, microseconds.
    period: u16,
}

impl Moderation {
    const NONE: Self = Self {
        count: 1,
        period: 0,
    };

    /// With the meaning that zero has: a limit that is not used, but there is always an end to the
    /// wait.
    fn new(count: u16, period: u16) -> Self {
        match (count, period) {
            (1, _) | (0, 0) => Self::NONE,
            (0, _) => Self {
                count: u32::MAX,
                period,
            },
            (_, 0) => Self {
                count: count.into(),
                period: MAX_MODERATION_PERIOD,
            },
            _ => Self {
                count: count.into(),
                period,
            },
        }
    }
}

/// An event that is held back.
#[derive(Debug, Clone, Copy, Default)]
struct Hold {
    /// Changes with each hold.
    number: u32,
    /// Completions so far that the event is for; zero: there is none.
    completions: u32,
    /// The last arming that it is for.
    sequence: u32,
}

#[derive(Debug)]
struct Producer {
    ring: CqRing,
    /// Entries written so far.
    position: u32,
    /// The consumer's position when it was read last.
    consumer: u32,
    /// Sequence of the arming that was last answered by an event, or the idle one.
    fired: u32,
    moderation: Moderation,
    hold: Hold,
}

/// What pushing a completion led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// Written.
    Quiet,
    /// Written, and the queue was armed: it wants an event.
    Event,
    /// Written, and the event that it wants is held back from now on, until its time is over.
    Held,
    /// There was no room, or its memory is gone: it is in error now, for this reason
    /// (`vendor_err`).
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
    /// The queue pairs among them.
    queue_pairs: Mutex<BTreeSet<u32>>,
    /// When the worker's timer for the event that is held back ends, nanoseconds. Only the worker
    /// uses it.
    pub(crate) timer: AtomicU64,
    /// The worker is about to look at the event that is held back.
    pub(crate) handed: AtomicBool,
    errored: AtomicBool,
    producer: Mutex<Producer>,
    /// For itself. The ring's page list has its own.
    _share: Share,
}

impl Cq {
    /// What a queue takes of its VM's account, without its ring: itself, its places in the lists of
    /// a worker, and its event in an event queue.
    pub const FOOTPRINT: u64 = counted::<Self>() + 128 + 64;

    /// A queue with an empty ring.
    #[must_use]
    pub fn new(number: u32, vector: u16, ring: CqRing) -> Self {
        let fired = ring
            .buffer
            .half_word(ARM)
            .map_or(0, |arm| u32::from_le(arm.load(Ordering::Relaxed)))
            & !(ring::ARM_SEQUENCE - 1);
        let producer = Producer {
            ring,
            position: 0,
            consumer: 0,
            fired,
            moderation: Moderation::NONE,
            hold: Hold::default(),
        };
        Self {
            number,
            vector,
            users: AtomicU32::new(0),
            queue_pairs: Mutex::default(),
            timer: AtomicU64::new(0),
            handed: AtomicBool::new(false),
            errored: AtomicBool::new(false),
            producer: Mutex::new(producer),
            _share: Share::default(),
        }
    }

    /// The same queue with a share of its VM's account for itself.
    #[must_use]
    pub fn with_share(self, share: Share) -> Self {
        Self {
            _share: share,
            ..self
        }
    }

    fn producer(&self) -> MutexGuard<'_, Producer> {
        lock(&self.producer)
    }

    /// Numbers of the queue pairs that use it.
    pub(crate) fn queue_pairs(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.queue_pairs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
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

    /// Writes a completion. `solicited`: it also answers an arming for solicited completions
    /// (errors always do).
    pub fn push(&self, cqe: &Cqe, solicited: bool) -> Pushed {
        self.push_from(cqe, &L2Source::default(), solicited)
    }

    /// Writes the completion of a datagram from `source`.
    pub fn push_from(&self, cqe: &Cqe, source: &L2Source, solicited: bool) -> Pushed {
        let mut producer = self.producer();
        match self.write(&mut producer, cqe, source) {
            Pushed::Quiet => {
                let failed = cqe.status != 0;
                producer.check(1, solicited || failed, failed)
            }
            other => other,
        }
    }

    /// Writes a completion, and that is all.
    #[inline(always)]
    fn write(&self, producer: &mut Producer, cqe: &Cqe, source: &L2Source) -> Pushed {
        if self.errored.load(Ordering::Relaxed) {
            return Pushed::Dropped;
        }
        let reason = match producer.write(cqe, source) {
            Some(true) => return Pushed::Quiet,
            Some(false) => vendor_err::NONE,
            None => vendor_err::MEMORY_GONE,
        };
        self.errored.store(true, Ordering::Relaxed);
        Pushed::Error(reason)
    }

    /// Puts it in error, as an overflow does.
    pub(crate) fn fail(&self) -> Pushed {
        // Locked, so that nothing is written after it.
        let _producer = self.producer();
        if self.errored.swap(true, Ordering::Relaxed) {
            return Pushed::Dropped;
        }
        Pushed::Error(vendor_err::NONE)
    }

    /// Locks it for a few completions of success that nobody solicited.
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch {
            cq: self,
            producer: self.producer(),
            written: 0,
        }
    }

    /// Takes over when to hold back events, and raises the one that is held back: whether there is
    /// one.
    pub fn moderate(&self, count: u16, period: u16) -> bool {
        let mut producer = self.producer();
        producer.moderation = Moderation::new(count, period);
        producer.end_hold()
    }

    /// The number of the event that is held back, if there is one, and for how long, nanoseconds.
    pub(crate) fn held(&self) -> Option<(u32, u64)> {
        let producer = self.producer();
        let period = u64::from(producer.moderation.period) * 1000;
        (producer.hold.completions != 0).then_some((producer.hold.number, period))
    }

    /// The time of the event that is held back is over: whether it is still that of this `number`,
    /// and to be raised.
    pub(crate) fn expire(&self, number: u32) -> bool {
        let mut producer = self.producer();
        producer.hold.number == number && producer.end_hold()
    }

    /// Whether there is an event that is held back: it is to be raised.
    pub(crate) fn release(&self) -> bool {
        self.producer().end_hold()
    }

    /// Resolves the buffer anew after a change of the memory table.
    pub fn rebase(&self, memory: Option<&GuestMemory>) {
        self.producer().ring.buffer.rebase(memory);
    }

    /// Goes over to another ring, zeroed, with entries of the same stride and the same `arm`. What
    /// was not consumed is at its start then. Returns the number of these entries, and whether an
    /// event is wanted.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not fit or the queue is in error, [`Error::Fault`] if a ring
    /// is not guest memory: nothing has changed then.
    pub fn resize(&self, ring: CqRing) -> Result<(u32, bool), Error> {
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
        producer.ring = ring;
        producer.position = count;
        producer.consumer = 0;
        let event = count > 0 && producer.check(1, false, true) == Pushed::Event;
        Ok((count, event))
    }
}

/// A completion queue, locked for a few completions. Whether they want an event is looked up at the
/// end.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    cq: &'a Cq,
    producer: MutexGuard<'a, Producer>,
    written: u32,
}

impl Batch<'_> {
    /// Has the processor fetch the place of the next completion, for writing.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let ring = &self.producer.ring;
        if let Some(word) = ring.buffer.word(ring.at(self.producer.position)) {
            prefetch_write(word);
        }
    }

    /// Writes a completion.
    #[inline(always)]
    pub(crate) fn push(&mut self, cqe: &Cqe) -> Pushed {
        let pushed = self.cq.write(&mut self.producer, cqe, &L2Source::default());
        self.written += u32::from(pushed == Pushed::Quiet);
        pushed
    }

    /// What became of them all.
    pub(crate) fn finish(mut self) -> Pushed {
        match self.written {
            0 => Pushed::Quiet,
            written => self.producer.check(written, false, false),
        }
    }
}

impl Producer {
    /// Looks whether an event is wanted now that `written` entries were written, and was not raised
    /// yet. `solicited`: also where only solicited completions and errors count. `urgent`: it is
    /// not held back.
    fn check(&mut self, written: u32, solicited: bool, urgent: bool) -> Pushed {
        // The consumer stores `arm`, then, past a full fence, looks for entries; we store the
        // entry, then, past a full fence, load `arm`. One of the two sees the other.
        fence(Ordering::SeqCst);
        let Some(arm) = self.ring.buffer.half_word(ARM) else {
            return Pushed::Quiet;
        };
        let arm = u32::from_le(arm.load(Ordering::Relaxed));
        let sequence = arm & !(ring::ARM_SEQUENCE - 1);
        let wanted = arm & ring::ARM_NEXT != 0 || (arm & ring::ARM_SOLICITED != 0 && solicited);
        if !wanted || sequence == self.fired {
            return Pushed::Quiet;
        }
        let hold = &mut self.hold;
        hold.sequence = sequence;
        let held = hold.completions != 0;
        hold.completions = hold.completions.saturating_add(written);
        if urgent || hold.completions >= self.moderation.count {
            self.end_hold();
            Pushed::Event
        } else if !held {
            hold.number = hold.number.wrapping_add(1);
            Pushed::Held
        } else {
            Pushed::Quiet
        }
    }

    /// Whether there is an event that is held back. It counts as raised: nothing is needed for that
    /// but what is kept here, so that it does not matter what the guest did to `arm` since.
    fn end_hold(&mut self) -> bool {
        let held = self.hold.completions != 0;
        if held {
            self.hold.completions = 0;
            self.fired = self.hold.sequence;
        }
        held
    }

    /// Whether there was room; `None` if the memory is gone.
    #[inline(always)]
    fn write(&mut self, cqe: &Cqe, source: &L2Source) -> Option<bool> {
        let ring = &self.ring;
        if self.position.wrapping_sub(self.consumer) >= ring.entries {
            let consumer = ring.consumer()?;
            // A consumer that is ahead of us or further behind than before is nonsense: the queue
            // stays full.
            if self.position.wrapping_sub(consumer) >= ring.entries {
                return Some(false);
            }
            self.consumer = consumer;
        }
        let at = ring.at(self.position);
        if ring.stride as usize > Cqe::SIZE {
            extend(ring, at + Cqe::SIZE as u64, source)?;
        }
        let phase = ring.phase(self.position);
        // The phase is in the last word.
        store(ring, at, &Cqe { phase, ..*cqe }.to_bytes())?;
        self.position = self.position.wrapping_add(1);
        Some(true)
    }
}

/// Writes the second half of an entry, which starts at `at`.
#[inline(never)]
fn extend(ring: &CqRing, at: u64, source: &L2Source) -> Option<()> {
    let extension = CqeExtension {
        timestamp: clock(),
        smac: source.mac,
        vlan: source.vlan,
        ..CqeExtension::default()
    };
    store(ring, at, &extension.to_bytes())
}

/// Stores the half of an entry that starts at `at`, its last word after all else.
#[inline(always)]
fn store(ring: &CqRing, at: u64, bytes: &[u8; Cqe::SIZE]) -> Option<()> {
    const WORDS: usize = Cqe::SIZE / 8;
    let words = ring.buffer.words::<{ Cqe::SIZE }>(at)?;
    for (i, (word, chunk)) in words.iter().zip(bytes.chunks_exact(8)).enumerate() {
        let value = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
        let last = i + 1 == WORDS;
        word.store(
            value,
            if last {
                Ordering::Release
            } else {
                Ordering::Relaxed
            },
        );
    }
    Some(())
}

/// The device's clock, nanoseconds.
#[must_use]
pub fn clock() -> u64 {
    // It is always there.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or(TimeSpec::new(0, 0));
    let (seconds, nanoseconds) = (now.tv_sec() as u64, now.tv_nsec() as u64);
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
    fn ring(entries: u32, stride: u32) -> (CqRing, GuestMemory) {
        let memory = GuestMemory::new(vec![region(0, 17)]).unwrap();
        let pages: Vec<u64> = (0..17).map(|page| page << 12).collect();
        let ring = CqRing {
            buffer: Pages::resolve(&memory, &pages, 12).unwrap(),
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
            let word = self.memory.range_at(at, 8).unwrap().word().unwrap();
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
            let pages = Pages::resolve(&self.memory, &[0], 12).unwrap();
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
            let source = L2Source {
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

    /// An arming for any completion.
    fn arm_any(n: u32) -> u32 {
        n * ring::ARM_SEQUENCE + ring::ARM_NEXT
    }

    /// Pushes that many completions, none of which ends a hold.
    fn push_quietly(cq: &Cq, consumer: &mut Consumer, count: u32) {
        for _ in 0..count {
            assert_eq!(cq.push(&cqe(0), false), Pushed::Quiet);
            assert!(consumer.poll().is_some());
            consumer.publish();
        }
    }

    /// Pushes one after which an event is held back.
    fn push_held(cq: &Cq, consumer: &mut Consumer) -> u32 {
        assert_eq!(cq.push(&cqe(0), false), Pushed::Held);
        assert!(consumer.poll().is_some());
        consumer.publish();
        cq.held().unwrap().0
    }

    #[test]
    fn the_count_ends_a_hold() {
        // D-CQM-003, D-CQM-005.
        let (cq, mut consumer) = queue(4, 32);
        assert!(!cq.moderate(3, 0));
        push_quietly(&cq, &mut consumer, 5);
        for round in 1..10 {
            consumer.record(ARM, arm_any(round));
            push_held(&cq, &mut consumer);
            push_quietly(&cq, &mut consumer, 1);
            assert_eq!(cq.push(&cqe(0), false), Pushed::Event);
            assert!(consumer.poll().is_some());
            assert_eq!(cq.held(), None);
            consumer.publish();
            push_quietly(&cq, &mut consumer, 5);
        }
    }

    #[test]
    fn time_ends_the_hold_that_it_was_measured_for() {
        // D-CQM-004, D-CQM-005.
        let (cq, mut consumer) = queue(4, 32);
        assert!(!cq.moderate(0, 7));
        consumer.record(ARM, arm_any(1));
        let first = push_held(&cq, &mut consumer);
        assert_eq!(cq.held(), Some((first, 7000)));
        push_quietly(&cq, &mut consumer, 100);
        assert!(cq.expire(first) && !cq.expire(first));
        push_quietly(&cq, &mut consumer, 1);
        // Of two that count, the second is told of by its own time alone.
        assert!(!cq.moderate(2, 9));
        consumer.record(ARM, arm_any(2));
        let second = push_held(&cq, &mut consumer);
        assert_eq!(cq.push(&cqe(0), false), Pushed::Event);
        assert!(consumer.poll().is_some());
        consumer.publish();
        consumer.record(ARM, arm_any(3));
        let third = push_held(&cq, &mut consumer);
        assert_eq!(cq.held(), Some((third, 9000)));
        assert!(!cq.expire(second) && cq.expire(third));
    }

    #[test]
    fn zero_is_a_limit_that_is_not_used_but_waits_end() {
        // D-CQM-003, D-CQM-004, D-CQM-007.
        for (count, period, held) in [
            (0, 0, None),
            (1, 0, None),
            (1, 7, None),
            (0, 7, Some(7000)),
            (2, 7, Some(7000)),
            (2, 0, Some(65_535_000)),
        ] {
            let (cq, mut consumer) = queue(4, 32);
            assert!(!cq.moderate(count, period));
            consumer.record(ARM, arm_any(1));
            let pushed = cq.push(&cqe(0), false);
            assert_eq!(pushed == Pushed::Held, held.is_some());
            assert_eq!(pushed == Pushed::Event, held.is_none());
            assert_eq!(cq.held().map(|(_, period)| period), held);
            assert!(consumer.poll().is_some());
        }
    }

    #[test]
    fn what_is_armed_while_an_event_is_held_back_is_not_lost() {
        // D-ARM-001, D-CQM-003.
        let (cq, mut consumer) = queue(4, 32);
        cq.moderate(3, 7);
        consumer.record(ARM, arm_any(1));
        let first = push_held(&cq, &mut consumer);
        // Armed again, and nothing came: the event is that of the first arming, and the second
        // stands.
        consumer.record(ARM, arm_any(2));
        assert!(cq.expire(first));
        let second = push_held(&cq, &mut consumer);
        // Armed again, and met: one event for both.
        consumer.record(ARM, arm_any(3));
        push_quietly(&cq, &mut consumer, 1);
        assert!(cq.expire(second));
        push_quietly(&cq, &mut consumer, 5);
    }

    #[test]
    fn solicited_arming_counts_solicited_completions() {
        // D-CQM-002, D-CQM-003.
        let (cq, mut consumer) = queue(64, 32);
        cq.moderate(2, 7);
        let armed = |n: u32| n * ring::ARM_SEQUENCE + ring::ARM_SOLICITED;
        consumer.record(ARM, armed(1));
        push_quietly(&cq, &mut consumer, 5);
        assert_eq!(cq.push(&cqe(0), true), Pushed::Held);
        assert_eq!(cq.push(&cqe(0), false), Pushed::Quiet);
        assert_eq!(cq.push(&cqe(0), true), Pushed::Event);
        consumer.record(ARM, armed(2));
        let failed = Cqe {
            status: 1,
            ..cqe(0)
        };
        assert_eq!(cq.push(&failed, false), Pushed::Event);
        consumer.record(ARM, armed(3));
        assert_eq!(cq.push(&cqe(0), true), Pushed::Held);
        assert_eq!(cq.push(&failed, false), Pushed::Event);
        assert_eq!(cq.held(), None);
    }

    #[test]
    fn changes_end_a_hold() {
        // D-CQM-001, D-RSZ-002.
        let (cq, mut consumer) = queue(4, 32);
        cq.moderate(3, 7);
        consumer.record(ARM, arm_any(1));
        push_held(&cq, &mut consumer);
        assert!(cq.moderate(3, 9));
        assert!(!cq.release() && !cq.moderate(3, 7));
        consumer.record(ARM, arm_any(2));
        assert_eq!(cq.push(&cqe(0), false), Pushed::Held);
        let resized = |arm| {
            let (new, memory) = ring(8, 32);
            let consumer = Consumer {
                memory,
                entries: 8,
                stride: 32,
                position: 0,
            };
            consumer.record(ARM, arm);
            (new, consumer)
        };
        let new;
        (new, consumer) = resized(arm_any(2));
        assert_eq!(cq.resize(new), Ok((1, true)));
        assert_eq!(cq.held(), None);
        assert!(consumer.poll().is_some());
        consumer.publish();
        // With nothing to move it goes on.
        consumer.record(ARM, arm_any(3));
        let number = push_held(&cq, &mut consumer);
        let new;
        (new, consumer) = resized(arm_any(3));
        assert_eq!(cq.resize(new), Ok((0, false)));
        assert!(consumer.poll().is_none() && cq.expire(number));
        // Nothing of the guest's memory is needed.
        consumer.record(ARM, arm_any(4));
        push_held(&cq, &mut consumer);
        cq.rebase(None);
        assert!(cq.release());
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
        let mut lost = ring(8, 32).0;
        lost.buffer.rebase(None);
        assert_eq!(cq.resize(lost), Err(Error::Fault));
        assert_eq!(cq.entries(), 4);
        assert_eq!(cq.push(&cqe(3), false), Pushed::Quiet);
        assert_eq!(cq.push(&cqe(4), false), Pushed::Error(vendor_err::NONE));
        assert_eq!(cq.resize(ring(8, 32).0), Err(Error::Invalid));
    }

    proptest! {
        /// Whatever is pushed, polled and resized when: completions come once and in order
        /// (D-RSZ-001).
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
