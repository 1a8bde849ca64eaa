// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the driver knows of work requests that are outstanding.
//!
//! A process knows it from its rings ([`InRing`]): they are its own memory, and what the device
//! makes of them harms nobody else. The kernel takes the id of a work request for a pointer to what
//! it calls, so it keeps a record where the device cannot write: of each queue one entry per index
//! ([`Private`]), of a shared receive queue, whose entries are used again before their completions
//! are polled, slots of its own ([`Slots`]). There is no id of a user in rings then.
use virtio_rdma_spec::ring::Cqe;

use crate::judge::{received, Violation};
use crate::ring::{BadLayout, Memory};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A work request, as far as its completion is about it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Posted {
    /// The id that its user gave it.
    pub wr_id: u64,
    /// Bytes of its scatter/gather list, or of its inline data.
    pub length: u32,
    /// `wr_opcode` of a send.
    pub opcode: u8,
    /// It completes also if it succeeds.
    pub signaled: bool,
}

/// Where a queue has what is outstanding.
///
/// Work requests are kept and taken back by the thread that posts, one at a time. They are kept
/// before they are posted, and with [`Private`] their entry is free before the next one is kept there.
pub trait Record {
    /// Keeps a work request that goes to the entry at `index`. Returns the id that is to be in the
    /// entry; `None` if there is no room.
    fn keep(&self, index: u32, posted: &Posted) -> Option<u64>;

    /// The work request of the entry at `index`, which is outstanding; `None` if only the ring has
    /// it.
    fn recall(&self, index: u32) -> Option<Posted>;

    /// The work request of the entry at `index` is not posted after all.
    fn take_back(&self, index: u32);
}

/// No record but the ring.
#[derive(Debug, Clone, Copy, Default)]
pub struct InRing;

impl Record for InRing {
    #[inline(always)]
    fn keep(&self, _: u32, posted: &Posted) -> Option<u64> {
        Some(posted.wr_id)
    }

    #[inline(always)]
    fn recall(&self, _: u32) -> Option<Posted> {
        None
    }

    #[inline(always)]
    fn take_back(&self, _: u32) {}
}

/// Words of a work request in a record.
const WORDS: usize = 2;
/// In the second word, whose lower half is the length.
const OPCODE_SHIFT: u32 = 32;
const SIGNALED: u64 = 1 << 40;

/// A record in memory that the device has no part of, by the index of the entry.
#[derive(Debug)]
pub struct Private<P> {
    words: P,
    signal_all: bool,
}

impl<P: Memory> Private<P> {
    /// Words that a record of so many entries takes.
    #[must_use]
    pub const fn words(entries: u32) -> usize {
        (entries as usize).saturating_mul(WORDS)
    }

    /// `signal_all`: all work requests are signaled.
    pub(crate) fn new(words: P, entries: u32, signal_all: bool) -> Result<Self, BadLayout> {
        if words.len() < Self::words(entries) {
            return Err(BadLayout);
        }
        Ok(Self { words, signal_all })
    }

    fn at(&self, index: u32) -> Option<&[AtomicU64; WORDS]> {
        let start = (index as usize).wrapping_mul(WORDS);
        self.words.get(start..)?.first_chunk()
    }
}

impl<P: Memory> Record for Private<P> {
    #[inline]
    fn keep(&self, index: u32, posted: &Posted) -> Option<u64> {
        let [id, rest] = self.at(index)?;
        let signaled = match posted.signaled || self.signal_all {
            true => SIGNALED,
            false => 0,
        };
        let opcode = u64::from(posted.opcode).wrapping_shl(OPCODE_SHIFT);
        id.store(posted.wr_id, Ordering::Relaxed);
        rest.store(
            u64::from(posted.length) | opcode | signaled,
            Ordering::Relaxed,
        );
        // The device has no use for it.
        Some(0)
    }

    #[inline]
    fn recall(&self, index: u32) -> Option<Posted> {
        let [id, rest] = self.at(index)?;
        let rest = rest.load(Ordering::Relaxed);
        Some(Posted {
            wr_id: id.load(Ordering::Relaxed),
            length: rest as u32,
            opcode: rest.wrapping_shr(OPCODE_SHIFT) as u8,
            signaled: rest & SIGNALED != 0,
        })
    }

    #[inline(always)]
    fn take_back(&self, _: u32) {}
}

/// In the lower half of a slot's second word, in place of the next slot of a list: the slot is not
/// in one.
const OUTSTANDING: u32 = u32::MAX;
const CLAIMED: u32 = u32::MAX - 1;
/// The end of a list.
const END: u32 = u32::MAX - 2;

/// A record of a shared receive queue, in memory that the device has no part of: a slot for each
/// receive until its completion is polled. The id in an entry names the slot, and the queue.
///
/// There are two slots for each entry of the ring: one that waits for its completion to be polled
/// keeps nobody from using its entry again. (A receive that the device lost with the queue pair
/// that had taken it never completes: its user does not get it back, nor do we get its slot.)
#[derive(Debug)]
pub struct Slots<P> {
    words: P,
    number: u32,
    slots: u32,
    /// Free slots, a list that only the thread that posts takes from, and those that were given
    /// back since that was empty.
    free: AtomicU32,
    returned: AtomicU32,
}

/// A slot whose completion came, until it is given back.
struct Claimed {
    slot: u32,
    wr_id: u64,
    length: u32,
}

impl<P: Memory> Slots<P> {
    /// Words that a record of so many entries takes.
    #[must_use]
    pub const fn words(entries: u32) -> usize {
        // Also the slot of each entry, for those that are taken back.
        (Self::slots(entries) as usize)
            .saturating_mul(WORDS)
            .saturating_add(entries as usize)
    }

    const fn slots(entries: u32) -> u32 {
        entries.saturating_mul(2)
    }

    /// `number` is that of the queue.
    pub(crate) fn new(words: P, entries: u32, number: u32) -> Result<Self, BadLayout> {
        let slots = Self::slots(entries);
        if words.len() < Self::words(entries) || slots >= END {
            return Err(BadLayout);
        }
        let all = Self {
            words,
            number,
            slots,
            free: AtomicU32::new(0),
            returned: AtomicU32::new(END),
        };
        for slot in 0..slots {
            let next = slot.wrapping_add(1);
            let next = if next == slots { END } else { next };
            if let Some([_, state]) = all.at(slot) {
                state.store(u64::from(next), Ordering::Relaxed);
            }
        }
        Ok(all)
    }

    fn at(&self, slot: u32) -> Option<&[AtomicU64; WORDS]> {
        let start = (slot as usize).wrapping_mul(WORDS);
        (slot < self.slots).then(|| self.words.get(start..)?.first_chunk())?
    }

    /// Where the slot of an entry stands.
    fn of_entry(&self, index: u32) -> Option<&AtomicU64> {
        let start = (self.slots as usize).wrapping_mul(WORDS);
        self.words.get(start.wrapping_add(index as usize))
    }

    /// Takes what an id of the device names, if that is outstanding: nobody else gets it then. Any
    /// thread.
    fn claim(&self, id: u64) -> Option<Claimed> {
        if srq_of(id) != self.number {
            return None;
        }
        let slot = id as u32;
        let [wr_id, rest] = self.at(slot)?;
        let before = rest.load(Ordering::Acquire);
        if before as u32 != OUTSTANDING {
            return None;
        }
        let claimed = with_state(before, CLAIMED);
        rest.compare_exchange(before, claimed, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some(Claimed {
            slot,
            // Not before: it may have been that of an earlier receive.
            wr_id: wr_id.load(Ordering::Relaxed),
            length: before.wrapping_shr(32) as u32,
        })
    }

    /// Makes a slot free.
    fn give_back(&self, claimed: &Claimed) {
        let Some([_, rest]) = self.at(claimed.slot) else {
            return;
        };
        let mut first = self.returned.load(Ordering::Relaxed);
        loop {
            rest.store(u64::from(first), Ordering::Relaxed);
            // Release: what is in the slot is read, and where the next one is is written.
            let put = self.returned.compare_exchange(
                first,
                claimed.slot,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match put {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// Leaves a slot as it was.
    fn restore(&self, claimed: &Claimed) {
        if let Some([_, rest]) = self.at(claimed.slot) {
            let length = u64::from(claimed.length).wrapping_shl(32);
            rest.store(with_state(length, OUTSTANDING), Ordering::Release);
        }
    }

    /// The completion of one of the receives, which is outstanding no longer then. Any thread.
    pub(crate) fn take(&self, cqe: &Cqe, datagram: bool) -> Result<Cqe, Violation> {
        let claimed = self.claim(cqe.wr_id).ok_or(Violation::NotOutstanding)?;
        let judged = received(cqe, claimed.wr_id, claimed.length, datagram);
        match judged {
            Ok(_) => self.give_back(&claimed),
            Err(_) => self.restore(&claimed),
        }
        judged
    }
}

fn with_state(rest: u64, state: u32) -> u64 {
    rest & !u64::from(u32::MAX) | u64::from(state)
}

impl<P: Memory> Record for Slots<P> {
    fn keep(&self, index: u32, posted: &Posted) -> Option<u64> {
        let mut slot = self.free.load(Ordering::Relaxed);
        if slot == END {
            // Acquire: see `give_back`. Nobody else takes from the list.
            slot = self.returned.swap(END, Ordering::Acquire);
        }
        let [id, rest] = self.at(slot)?;
        self.free
            .store(rest.load(Ordering::Relaxed) as u32, Ordering::Relaxed);
        if let Some(of_entry) = self.of_entry(index) {
            of_entry.store(u64::from(slot), Ordering::Relaxed);
        }
        id.store(posted.wr_id, Ordering::Relaxed);
        let length = u64::from(posted.length).wrapping_shl(32);
        rest.store(with_state(length, OUTSTANDING), Ordering::Release);
        Some(u64::from(self.number).wrapping_shl(32) | u64::from(slot))
    }

    fn recall(&self, _: u32) -> Option<Posted> {
        None
    }

    fn take_back(&self, index: u32) {
        let slot = self
            .of_entry(index)
            .map(|slot| slot.load(Ordering::Relaxed));
        let id = slot.map(|slot| u64::from(self.number).wrapping_shl(32) | slot);
        if let Some(claimed) = id.and_then(|id| self.claim(id)) {
            self.give_back(&claimed);
        }
    }
}

/// The number of the shared receive queue that the id of a completion names ([`Slots`]). It may be
/// that of none.
#[must_use]
pub const fn srq_of(wr_id: u64) -> u32 {
    wr_id.wrapping_shr(32) as u32
}
