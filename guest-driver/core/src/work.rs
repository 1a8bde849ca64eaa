// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Send and receive queues: posting and freeing entries (specification: "Rings").
//!
//! A queue is posted to by one thread at a time; threads that share it bring the lock. (Posting
//! from two threads at once is no memory error, but mixes up their work requests.) Entries are
//! freed by any thread, without a lock against posting: but by one at a time, under the lock of the
//! completion queue they complete to.
use core::ops::Range;

use virtio_rdma_spec::facts::completion_opcode;
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{
    BindMw, Cqe, FastReg, MaskedOperands, RecvWqe, SendWqe, Sge, SrdRange, SrqRecord, UdWqe,
    BIND_MW_OFFSET, FAST_REG_OFFSET, MASKED_OPERANDS_OFFSET, MAX_SGE, MAX_WQ_ENTRIES, PHASE,
    RECV_DATA_OFFSET, SEND_DATA_OFFSET, SRD_DATA_OFFSET, SRD_RANGE_OFFSET, UD_DATA_OFFSET,
};
use virtio_rdma_spec::verbs::{send_flag, vendor_err, wc_opcode, wc_status};

use crate::buffer::RingLayout;
use crate::judge::{received, sent, Violation};
use crate::prefetch::prefetch_write;
use crate::record::{InRing, Posted, Private, Record, Slots};
use crate::ring::{word, BadLayout, Memory, PostError, Ring};
use crate::sync::{store_load_order, AtomicU32, AtomicU64, Ordering};

/// Words of the longest fixed part of a send entry.
const MAX_SEND_WORDS: usize = SRD_DATA_OFFSET / 8;
/// Words of the fixed part of a receive entry.
const RECV_WORDS: usize = RECV_DATA_OFFSET / 8;
/// The word of `SrqRecord::posted`.
const SRQ_POSTED_WORD: usize = 8;
/// The phase in the first word of an entry.
const PHASE_BIT: u64 = u64::from_le((PHASE as u64) << 8);

/// The opcode of an entry that is completed though others before it are not.
const DONE: u64 = u64::from_le(0xff);

/// What send and receive queues share: a ring, what is posted and what is completed.
#[derive(Debug)]
struct WorkQueue<M, R> {
    ring: Ring<M>,
    posted: AtomicU32,
    completed: AtomicU32,
    max_sge: u32,
    record: R,
}

impl<M: Memory> WorkQueue<M, InRing> {
    fn new(
        memory: M,
        layout: &RingLayout,
        max_sge: u32,
        data_offset: u32,
    ) -> Result<Self, BadLayout> {
        let fits = max_sge <= MAX_SGE && layout.stride >= data_offset + max_sge * Sge::SIZE as u32;
        if !fits || layout.entries > MAX_WQ_ENTRIES {
            return Err(BadLayout);
        }
        Ok(Self {
            ring: Ring::new(memory, layout)?,
            posted: AtomicU32::new(0),
            completed: AtomicU32::new(0),
            max_sge,
            record: InRing,
        })
    }

    /// The same queue, unused, with another record.
    fn with_record<R>(self, record: R) -> WorkQueue<M, R> {
        WorkQueue {
            ring: self.ring,
            posted: self.posted,
            completed: self.completed,
            max_sge: self.max_sge,
            record,
        }
    }
}

impl<M: Memory, R: Record> WorkQueue<M, R> {
    #[inline(always)]
    fn room(&self, posted: u32) -> u32 {
        // Acquire: what the completion says about the entry happened before it is written again.
        let used = posted.wrapping_sub(self.completed.load(Ordering::Acquire));
        self.ring.entries().wrapping_sub(used)
    }

    #[inline(always)]
    fn batch(&self) -> Batch<'_, M, R> {
        let start = self.posted.load(Ordering::Relaxed);
        Batch {
            queue: self,
            position: start,
            room: self.room(start),
            first: None,
        }
    }

    /// The positions of the entries that [`Self::complete`] frees.
    #[inline(always)]
    fn completing(&self, index: u16) -> Range<u32> {
        let completed = self.completed.load(Ordering::Relaxed);
        // Acquire: what was posted was recorded before.
        let posted = self.posted.load(Ordering::Acquire);
        let end = self.ring.completed_up_to(index, completed, posted);
        completed..end.unwrap_or(completed)
    }

    #[inline(always)]
    fn complete(&self, index: u16) {
        let completed = self.completed.load(Ordering::Relaxed);
        let posted = self.posted.load(Ordering::Relaxed);
        // An index that is not outstanding frees nothing: the device may write what it likes.
        if let Some(completed) = self.ring.completed_up_to(index, completed, posted) {
            self.completed.store(completed, Ordering::Release);
        }
    }

    /// One entry is completed, of a queue whose entries complete in any order. It is free when all
    /// before it are, too. (Otherwise an index could be that of two that are outstanding.)
    #[cold]
    fn complete_one(&self, index: u16) {
        let mut completed = self.completed.load(Ordering::Relaxed);
        let posted = self.posted.load(Ordering::Relaxed);
        let Some(end) = self.ring.completed_up_to(index, completed, posted) else {
            return;
        };
        let first = |position| self.ring.entry(position).first();
        // The device has read the entry; its phase stays as it is.
        if let Some(word) = first(end.wrapping_sub(1)) {
            word.store(word.load(Ordering::Relaxed) | DONE, Ordering::Relaxed);
        }
        let done = |word: &AtomicU64| word.load(Ordering::Relaxed) & DONE == DONE;
        while completed != posted && first(completed).is_some_and(done) {
            completed = completed.wrapping_add(1);
        }
        self.completed.store(completed, Ordering::Release);
    }

    /// The oldest work request that is posted and not completed, and its index.
    fn oldest(&self) -> Option<(u16, Posted)> {
        let completed = self.completed.load(Ordering::Relaxed);
        // Acquire: all of the entry was written and recorded before it was posted, but for its
        // first word, if it is the first of a batch.
        let outstanding = self.posted.load(Ordering::Acquire).wrapping_sub(completed);
        // More than there are entries: a reset is under way.
        if outstanding == 0 || outstanding > self.ring.entries() {
            return None;
        }
        let index = self.ring.index(completed);
        let posted = match self.record.recall(index) {
            Some(posted) => posted,
            None => self.in_ring(completed)?,
        };
        Some((index as u16, posted))
    }

    /// What the entry at a position says.
    fn in_ring(&self, position: u32) -> Option<Posted> {
        let words = self.ring.entry(position).first_chunk::<2>()?;
        let [head, id] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
        // Of an entry that is being posted it may be that of an earlier one: nobody may rely on it
        // in a completion that is no success.
        let [opcode, ..] = head.to_ne_bytes();
        Some(Posted {
            wr_id: u64::from_le(id),
            opcode,
            ..Posted::default()
        })
    }

    fn reset(&self) {
        // First nothing is outstanding any more, for those who flush queues meanwhile.
        let posted = self.posted.load(Ordering::Relaxed);
        self.completed.store(posted, Ordering::Relaxed);
        self.ring.zero();
        self.posted.store(0, Ordering::Relaxed);
        self.completed.store(0, Ordering::Release);
    }
}

/// How many entries ahead they are fetched for writing.
const AHEAD: u32 = 12;

/// Entries that are written, of which the first is not published yet; so the device sees none of
/// them.
#[derive(Debug)]
struct Batch<'q, M: Memory, R: Record> {
    queue: &'q WorkQueue<M, R>,
    position: u32,
    room: u32,
    /// The first entry's word 0, and what goes there.
    first: Option<(&'q AtomicU64, u64)>,
}

impl<'q, M: Memory, R: Record> Batch<'q, M, R> {
    /// The entry to write next.
    #[inline(always)]
    fn entry(&self) -> Result<&'q [AtomicU64], PostError> {
        if self.room == 0 {
            return Err(PostError::Full);
        }
        // A thread that posts many would wait for the cache line of each entry, which the device
        // has from the last lap, or nobody has any more. One that posts one entry and waits for its
        // completion needs no more.
        let ring = &self.queue.ring;
        let used = ring.entries().wrapping_sub(self.room);
        if used == 1 && self.first.is_some() {
            // The second of a list, in a queue that was empty: all that would be fetched by now.
            prefetch_write(ring.run(self.position, AHEAD.wrapping_add(1)));
        } else if used != 0 && self.room > AHEAD {
            prefetch_write(ring.entry(self.position.wrapping_add(AHEAD)));
        }
        Ok(self.queue.ring.entry(self.position))
    }

    /// Records a work request; returns the id that goes to its entry.
    #[inline(always)]
    fn keep(&self, posted: &Posted) -> Result<u64, PostError> {
        let index = self.queue.ring.index(self.position);
        self.queue.record.keep(index, posted).ok_or(PostError::Full)
    }

    /// Adds the entry whose other words are written.
    #[inline(always)]
    fn push(&mut self, entry: &'q [AtomicU64], mut word0: u64) {
        if self.queue.ring.phase(self.position) {
            word0 |= PHASE_BIT;
        }
        if let Some(at) = entry.first() {
            if self.first.is_none() {
                self.first = Some((at, word0));
            } else {
                at.store(word0, Ordering::Release);
            }
        }
        self.position = self.position.wrapping_add(1);
        self.room = self.room.saturating_sub(1);
    }

    /// Publishes the entries with one store.
    #[inline(always)]
    fn commit(&mut self) -> bool {
        let Some((at, word0)) = self.first.take() else {
            return false;
        };
        // Before the entry can be seen, so that its completion finds it outstanding. Release: who
        // flushes the queue goes by it.
        self.queue.posted.store(self.position, Ordering::Release);
        at.store(word0, Ordering::SeqCst);
        true
    }
}

impl<M: Memory, R: Record> Drop for Batch<'_, M, R> {
    /// Takes back what is not committed: the entries behind the first got the phase already.
    #[inline(always)]
    fn drop(&mut self) {
        if self.first.take().is_some() {
            self.roll_back();
        }
    }
}

impl<M: Memory, R: Record> Batch<'_, M, R> {
    #[cold]
    fn roll_back(&mut self) {
        let start = self.queue.posted.load(Ordering::Relaxed);
        let take_back = |position| self.queue.record.take_back(self.queue.ring.index(position));
        take_back(start);
        let mut position = start.wrapping_add(1);
        while position != self.position {
            take_back(position);
            if let Some(at) = self.queue.ring.entry(position).first() {
                let stale = if self.queue.ring.phase(position) {
                    0
                } else {
                    PHASE_BIT
                };
                at.store(stale, Ordering::Relaxed);
            }
            position = position.wrapping_add(1);
        }
    }
}

/// Writes scatter/gather entries behind the fixed part of an entry; returns how many, and their
/// bytes.
#[inline(always)]
fn put_sges(
    data: &[AtomicU64],
    max_sge: u32,
    sges: impl IntoIterator<Item = Sge>,
) -> Result<(u16, u32), PostError> {
    let mut sges = sges.into_iter();
    let (mut count, mut length) = (0u16, 0u32);
    for at in data.chunks_exact(2).take(max_sge as usize) {
        let Some(sge) = sges.next() else {
            return Ok((count, length));
        };
        if let [addr, length_lkey] = at {
            let bytes = sge.to_bytes();
            addr.store(word(&bytes, 0), Ordering::Relaxed);
            length_lkey.store(word(&bytes, 1), Ordering::Relaxed);
        }
        count = count.wrapping_add(1);
        length = length.saturating_add(sge.length);
    }
    match sges.next() {
        None => Ok((count, length)),
        Some(_) => Err(PostError::TooManySges),
    }
}

/// Packs bytes into words, which go to memory as they fill up.
struct Packer<'e> {
    words: core::slice::Iter<'e, AtomicU64>,
    /// Bytes that fill no word yet, the first in the lowest bits.
    pending: u64,
    /// Bits of them: less than 64.
    bits: u32,
}

impl Packer<'_> {
    /// Adds the lowest `bits` bits of a value, whose others are zero: at least one.
    #[inline(always)]
    fn push(&mut self, value: u64, bits: u32) {
        self.pending |= value.wrapping_shl(self.bits);
        self.bits = self.bits.wrapping_add(bits);
        if self.bits >= 64 {
            self.put();
            self.bits = self.bits.wrapping_sub(64);
            // What did not fit; shifting by all 64 bits leaves nothing.
            self.pending = value.checked_shr(bits.wrapping_sub(self.bits)).unwrap_or(0);
        }
    }

    #[inline(always)]
    fn finish(&mut self) {
        if self.bits > 0 {
            self.put();
        }
    }

    #[inline(always)]
    fn put(&mut self) {
        if let Some(at) = self.words.next() {
            at.store(self.pending.to_le(), Ordering::Relaxed);
        }
    }
}

/// Writes inline data behind the fixed part of an entry; returns how many bytes.
#[inline(always)]
fn put_inline<'d>(
    data: &[AtomicU64],
    max_inline: u32,
    parts: impl IntoIterator<Item = &'d [u8]>,
) -> Result<u16, PostError> {
    let max_inline = data.len().saturating_mul(8).min(max_inline as usize);
    let mut packer = Packer {
        words: data.iter(),
        pending: 0,
        bits: 0,
    };
    let mut length = 0;
    for part in parts {
        length = part.len().saturating_add(length);
        if length > max_inline {
            return Err(PostError::InlineTooLong);
        }
        let mut words = part.chunks_exact(8);
        for bytes in &mut words {
            packer.push(u64::from_le(word(bytes, 0)), 64);
        }
        for byte in words.remainder() {
            packer.push(u64::from(*byte), 8);
        }
    }
    packer.finish();
    Ok(length as u16)
}

/// The fixed part of a send entry: [`SendWqe`], or for UD and GSI queue pairs [`UdWqe`].
pub trait SendEntry: Layout + Copy {
    /// `wr_opcode`.
    fn opcode(&self) -> u8;
    /// `send_flag` bits.
    fn flags(&self) -> u8;
    /// The id that its user gave it.
    fn wr_id(&self) -> u64;
    /// The same with another number of scatter/gather entries or inline bytes, other flags, and
    /// another id.
    #[must_use]
    fn with(self, count: u16, flags: u8, wr_id: u64) -> Self;
}

macro_rules! send_entries {
    ($($t:ident),*) => {$(
        impl SendEntry for $t {
            #[inline(always)]
            fn opcode(&self) -> u8 {
                self.opcode
            }
            #[inline(always)]
            fn flags(&self) -> u8 {
                self.flags
            }
            #[inline(always)]
            fn wr_id(&self) -> u64 {
                self.wr_id
            }
            #[inline(always)]
            fn with(self, count: u16, flags: u8, wr_id: u64) -> Self {
                Self { count, flags, wr_id, ..self }
            }
        }

        const _: () = assert!($t::SIZE % 8 == 0 && $t::SIZE <= 8 * MAX_SEND_WORDS);
    )*};
}
send_entries!(SendWqe, UdWqe);

/// The fixed part of an entry of an SRD queue pair's send queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SrdWqe {
    /// What it does, and where it goes.
    pub to: UdWqe,
    /// Of RDMA WRITE and RDMA READ: the remote range.
    pub range: SrdRange,
}

impl Layout for SrdWqe {
    const SIZE: usize = SRD_DATA_OFFSET;
    #[inline(always)]
    fn put(&self, out: &mut [u8]) {
        self.to.put(out);
        self.range
            .put(out.get_mut(SRD_RANGE_OFFSET..).unwrap_or(&mut []));
    }
    #[inline(always)]
    fn get(from: &[u8]) -> Self {
        Self {
            to: UdWqe::get(from),
            range: SrdRange::get(from.get(SRD_RANGE_OFFSET..).unwrap_or(&[])),
        }
    }
}

impl SendEntry for SrdWqe {
    #[inline(always)]
    fn opcode(&self) -> u8 {
        self.to.opcode
    }
    #[inline(always)]
    fn flags(&self) -> u8 {
        self.to.flags
    }
    #[inline(always)]
    fn wr_id(&self) -> u64 {
        self.to.wr_id
    }
    #[inline(always)]
    fn with(self, count: u16, flags: u8, wr_id: u64) -> Self {
        Self {
            to: self.to.with(count, flags, wr_id),
            ..self
        }
    }
}

/// A send queue.
#[derive(Debug)]
pub struct SendQueue<M, R = InRing> {
    queue: WorkQueue<M, R>,
    max_inline: u32,
    /// Entries complete in any order.
    unordered: bool,
}

impl<M: Memory> SendQueue<M> {
    /// A send queue in a zeroed ring; `memory` is the whole buffer that `layout` is about.
    ///
    /// # Errors
    /// The layout is not valid, does not fit the memory, or its stride is too small for the other
    /// two.
    pub fn new(
        memory: M,
        layout: &RingLayout,
        max_sge: u32,
        max_inline: u32,
    ) -> Result<Self, BadLayout> {
        Self::with_data_at(SEND_DATA_OFFSET as u32, memory, layout, max_sge, max_inline)
    }

    /// The send queue of a UD or GSI queue pair: its work requests are [`UdWqe`].
    ///
    /// # Errors
    /// As [`SendQueue::new`].
    pub fn datagram(
        memory: M,
        layout: &RingLayout,
        max_sge: u32,
        max_inline: u32,
    ) -> Result<Self, BadLayout> {
        Self::with_data_at(UD_DATA_OFFSET as u32, memory, layout, max_sge, max_inline)
    }

    /// The send queue of an SRD queue pair: its work requests are [`SrdWqe`], and complete in any
    /// order. An entry is free when all before it are completed, too.
    ///
    /// # Errors
    /// As [`SendQueue::new`].
    pub fn reliable_datagram(
        memory: M,
        layout: &RingLayout,
        max_sge: u32,
        max_inline: u32,
    ) -> Result<Self, BadLayout> {
        let offset = SRD_DATA_OFFSET as u32;
        let queue = Self::with_data_at(offset, memory, layout, max_sge, max_inline)?;
        Ok(Self {
            unordered: true,
            ..queue
        })
    }

    fn with_data_at(
        offset: u32,
        memory: M,
        layout: &RingLayout,
        max_sge: u32,
        max_inline: u32,
    ) -> Result<Self, BadLayout> {
        if u64::from(max_inline) + u64::from(offset) > u64::from(layout.stride) {
            return Err(BadLayout);
        }
        Ok(Self {
            queue: WorkQueue::new(memory, layout, max_sge, offset)?,
            max_inline,
            unordered: false,
        })
    }

    /// The same queue, unused, with a record in `words`, which the device has no part of:
    /// [`Private::words`] of them. `signal_all`: all its work requests are signaled.
    ///
    /// # Errors
    /// There are too few words.
    pub fn recorded<P: Memory>(
        self,
        words: P,
        signal_all: bool,
    ) -> Result<SendQueue<M, Private<P>>, BadLayout> {
        let record = Private::new(words, self.entries(), signal_all)?;
        Ok(SendQueue {
            queue: self.queue.with_record(record),
            max_inline: self.max_inline,
            unordered: self.unordered,
        })
    }
}

impl<M: Memory, P: Memory> SendQueue<M, Private<P>> {
    /// What the user is told of a completion that the device wrote for this queue. The work request
    /// must be outstanding, and all before it that are, too, must be unsignaled: those complete
    /// without a word.
    pub(crate) fn judge(&self, cqe: &Cqe) -> Result<Cqe, Violation> {
        let mut last: Option<Posted> = None;
        for index in self.completing(cqe.wqe_index) {
            if last.is_some_and(|before| before.signaled) {
                return Err(Violation::Skipped);
            }
            last = self.queue.record.recall(index);
        }
        sent(cqe, &last.ok_or(Violation::NotOutstanding)?)
    }
}

impl<M: Memory, R: Record> SendQueue<M, R> {
    /// Starts a batch of work requests.
    #[inline(always)]
    pub fn batch(&self) -> SendBatch<'_, M, R> {
        SendBatch {
            batch: self.queue.batch(),
            max_inline: self.max_inline,
        }
    }

    /// Posts one work request, as [`SendBatch::push`] and [`SendBatch::commit`]. Ring the doorbell
    /// afterwards.
    ///
    /// # Errors
    /// As [`SendBatch::push`].
    #[inline(always)]
    pub fn post<E: SendEntry>(
        &self,
        wqe: &E,
        sges: impl IntoIterator<Item = Sge>,
    ) -> Result<(), PostError> {
        let mut batch = self.batch();
        batch.push(wqe, sges)?;
        batch.commit();
        Ok(())
    }

    /// Frees the entry with this index and all posted before it: what a completion reports. (Of an
    /// SRD queue pair it is about that entry alone.)
    #[inline(always)]
    pub fn complete(&self, wqe_index: u16) {
        if self.unordered {
            self.queue.complete_one(wqe_index);
        } else {
            self.queue.complete(wqe_index);
        }
    }

    /// The completion that flushes the oldest entry that is outstanding, on a device that is lost
    /// ([`StatusPage`](crate::StatusPage)); none if all are completed. To be freed by
    /// [`Self::complete`] as ever: the next call is about the entry behind it then.
    ///
    /// As `complete` this is for one at a time, under the lock of the completion queue; others may
    /// post meanwhile.
    pub fn flush_next(&self, qp_num: u32) -> Option<Cqe> {
        let (index, posted) = self.queue.oldest()?;
        let opcode = completion_opcode(posted.opcode);
        Some(flushed(qp_num, index, opcode, posted.wr_id))
    }

    /// The indices of the entries that [`Self::complete`] frees, called with the same index.
    pub fn completing(&self, wqe_index: u16) -> impl Iterator<Item = u32> + '_ {
        let Range { start, end } = self.queue.completing(wqe_index);
        let count = end.wrapping_sub(start);
        (0..count).map(move |n| self.queue.ring.index(start.wrapping_add(n)))
    }

    /// Work requests that fit now.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.queue.room(self.queue.posted.load(Ordering::Relaxed))
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.queue.ring.entries()
    }

    /// Starts over, as after a change to RESET: the ring zeroed, nothing posted. Neither thread nor
    /// device may use the queue meanwhile.
    pub fn reset(&self) {
        self.queue.reset();
    }
}

/// Send work requests that become visible to the device together. Dropping it uncommitted takes
/// them back.
#[derive(Debug)]
#[must_use]
pub struct SendBatch<'q, M: Memory, R: Record = InRing> {
    batch: Batch<'q, M, R>,
    max_inline: u32,
}

impl<M: Memory, R: Record> SendBatch<'_, M, R> {
    /// The index of the entry that the next work request goes to.
    #[must_use]
    pub fn next_index(&self) -> u32 {
        self.batch.queue.ring.index(self.batch.position)
    }

    /// Adds a work request. The number of its scatter/gather entries and the phase are filled in;
    /// the flag INLINE must not be set.
    ///
    /// # Errors
    /// The queue is full or there are too many scatter/gather entries; the batch is as before.
    #[inline(always)]
    pub fn push<E: SendEntry>(
        &mut self,
        wqe: &E,
        sges: impl IntoIterator<Item = Sge>,
    ) -> Result<(), PostError> {
        let entry = self.batch.entry()?;
        let data = entry.get(E::SIZE / 8..).unwrap_or(&[]);
        let (count, length) = put_sges(data, self.batch.queue.max_sge, sges)?;
        let flags = wqe.flags() & !send_flag::INLINE;
        self.finish(entry, wqe, count, flags, length)
    }

    /// Adds a work request with inline data, gathered from `parts`. Its length, the flag INLINE and
    /// the phase are filled in.
    ///
    /// # Errors
    /// The queue is full or the data too long; the batch is as before.
    #[inline(always)]
    pub fn push_inline<'d, E: SendEntry>(
        &mut self,
        wqe: &E,
        parts: impl IntoIterator<Item = &'d [u8]>,
    ) -> Result<(), PostError> {
        let entry = self.batch.entry()?;
        let data = entry.get(E::SIZE / 8..).unwrap_or(&[]);
        let count = put_inline(data, self.max_inline, parts)?;
        let flags = wqe.flags() | send_flag::INLINE;
        self.finish(entry, wqe, count, flags, u32::from(count))
    }

    /// Adds a bind of a memory window: of `wqe` count opcode, flags and id.
    ///
    /// # Errors
    /// The queue is full; the batch is as before.
    pub fn push_bind(&mut self, wqe: &SendWqe, bind: &BindMw) -> Result<(), PostError> {
        self.push_operands(wqe, &bind.to_bytes())
    }

    /// Adds a registration of a region: of `wqe` count opcode, flags and id.
    ///
    /// # Errors
    /// The queue is full; the batch is as before.
    pub fn push_reg(&mut self, wqe: &SendWqe, reg: &FastReg) -> Result<(), PostError> {
        self.push_operands(wqe, &reg.to_bytes())
    }

    /// Adds an entry that has `operands` behind the id.
    fn push_operands(&mut self, wqe: &SendWqe, operands: &[u8]) -> Result<(), PostError> {
        const START: usize = BIND_MW_OFFSET / 8;
        const _: () = assert!(BIND_MW_OFFSET == FAST_REG_OFFSET);
        let entry = self.batch.entry()?;
        let (head, at) = entry.split_at_checked(START).unwrap_or_default();
        let id = self.keep(wqe, 0)?;
        put(at, operands);
        let bytes = wqe.with(0, wqe.flags & !send_flag::INLINE, id).to_bytes();
        let id = bytes.get(8..).unwrap_or(&[]);
        put(head.get(1..).unwrap_or(&[]), id);
        self.push_word(entry, &bytes);
        Ok(())
    }

    /// Adds a masked atomic operation, with at most one scatter/gather entry.
    ///
    /// # Errors
    /// The queue is full, or its entries are too short for masked operands (see
    /// `QpLayout::with_masked_atomics`); the batch is as before.
    pub fn push_masked(
        &mut self,
        wqe: &SendWqe,
        operands: &MaskedOperands,
        sge: Option<Sge>,
    ) -> Result<(), PostError> {
        const START: usize = MASKED_OPERANDS_OFFSET / 8;
        let entry = self.batch.entry()?;
        let at = entry
            .get(START..START + MaskedOperands::SIZE / 8)
            .ok_or(PostError::TooManySges)?;
        let data = entry.get(SEND_DATA_OFFSET / 8..START).unwrap_or(&[]);
        let (count, length) = put_sges(data, self.batch.queue.max_sge, sge)?;
        put(at, &operands.to_bytes());
        let flags = wqe.flags & !send_flag::INLINE;
        self.finish(entry, wqe, count, flags, length)
    }

    /// Publishes the work requests. Returns whether there are any: then ring the doorbell.
    #[inline(always)]
    pub fn commit(mut self) -> bool {
        // Sequentially consistent: see `Doorbell::ring`, which comes next.
        self.batch.commit()
    }
}

/// Stores a little-endian representation of whole words.
#[inline(always)]
fn put(to: &[AtomicU64], bytes: &[u8]) {
    for (i, at) in to.iter().take(bytes.len() / 8).enumerate() {
        at.store(word(bytes, i), Ordering::Relaxed);
    }
}

impl<'q, M: Memory, R: Record> SendBatch<'q, M, R> {
    #[inline(always)]
    fn finish<E: SendEntry>(
        &mut self,
        entry: &'q [AtomicU64],
        wqe: &E,
        count: u16,
        flags: u8,
        length: u32,
    ) -> Result<(), PostError> {
        let id = self.keep(wqe, length)?;
        let mut bytes = [0; 8 * MAX_SEND_WORDS];
        wqe.with(count, flags, id).put(&mut bytes);
        let fixed = bytes.get(8..E::SIZE).unwrap_or(&[]);
        put(entry.get(1..).unwrap_or(&[]), fixed);
        self.push_word(entry, &bytes);
        Ok(())
    }

    /// Records a work request of so many bytes; returns the id that goes to its entry.
    #[inline(always)]
    fn keep<E: SendEntry>(&self, wqe: &E, length: u32) -> Result<u64, PostError> {
        self.batch.keep(&Posted {
            wr_id: wqe.wr_id(),
            length,
            opcode: wqe.opcode(),
            signaled: wqe.flags() & send_flag::SIGNALED != 0,
        })
    }

    /// Adds the entry whose other words are written; `bytes` begin with its first word.
    #[inline(always)]
    fn push_word(&mut self, entry: &'q [AtomicU64], bytes: &[u8]) {
        self.batch.push(entry, word(bytes, 0) & !PHASE_BIT);
    }
}

/// The completion of a work request that is flushed.
fn flushed(qp_num: u32, wqe_index: u16, opcode: u8, wr_id: u64) -> Cqe {
    Cqe {
        wr_id,
        qp_num,
        wqe_index,
        vendor_err: vendor_err::FLUSHED,
        status: wc_status::WR_FLUSH_ERR,
        opcode,
        ..Cqe::default()
    }
}

/// A receive queue. Its buffer starts with the `QpRecord`.
#[derive(Debug)]
pub struct RecvQueue<M, R = InRing> {
    queue: WorkQueue<M, R>,
}

impl<M: Memory> RecvQueue<M> {
    /// A receive queue in a zeroed ring; `memory` is the whole buffer that `layout` is about.
    ///
    /// # Errors
    /// The layout is not valid, does not fit the memory, or its stride is too small for the
    /// entries.
    pub fn new(memory: M, layout: &RingLayout, max_sge: u32) -> Result<Self, BadLayout> {
        Ok(Self {
            queue: WorkQueue::new(memory, layout, max_sge, RECV_DATA_OFFSET as u32)?,
        })
    }

    /// The same queue, unused, with a record in `words`, which the device has no part of:
    /// [`Private::words`] of them.
    ///
    /// # Errors
    /// There are too few words.
    pub fn recorded<P: Memory>(self, words: P) -> Result<RecvQueue<M, Private<P>>, BadLayout> {
        let record = Private::new(words, self.entries(), true)?;
        Ok(RecvQueue {
            queue: self.queue.with_record(record),
        })
    }
}

impl<M: Memory, P: Memory> RecvQueue<M, Private<P>> {
    /// What the user is told of a completion that the device wrote for this queue: that of the
    /// oldest work request.
    pub(crate) fn judge(&self, cqe: &Cqe, datagram: bool) -> Result<Cqe, Violation> {
        match self.queue.oldest() {
            Some((index, posted)) if index == cqe.wqe_index => {
                received(cqe, posted.wr_id, posted.length, datagram)
            }
            _ => Err(Violation::NotOutstanding),
        }
    }
}

impl<M: Memory, R: Record> RecvQueue<M, R> {
    /// Starts a batch of work requests.
    #[inline(always)]
    pub fn batch(&self) -> RecvBatch<'_, M, R> {
        RecvBatch {
            batch: self.queue.batch(),
            shared: false,
        }
    }

    /// Posts one work request, as [`RecvBatch::push`] and [`RecvBatch::commit`]. Returns whether to
    /// ring the doorbell.
    ///
    /// # Errors
    /// As [`RecvBatch::push`].
    #[inline(always)]
    pub fn post(&self, wr_id: u64, sges: impl IntoIterator<Item = Sge>) -> Result<bool, PostError> {
        let mut batch = self.batch();
        batch.push(wr_id, sges)?;
        Ok(batch.commit())
    }

    /// Frees the entry with this index and all posted before it: what a completion reports.
    #[inline(always)]
    pub fn complete(&self, wqe_index: u16) {
        self.queue.complete(wqe_index);
    }

    /// The completion that flushes the oldest entry that is outstanding: as
    /// [`SendQueue::flush_next`].
    pub fn flush_next(&self, qp_num: u32) -> Option<Cqe> {
        let (index, posted) = self.queue.oldest()?;
        Some(flushed(qp_num, index, wc_opcode::RECV, posted.wr_id))
    }

    /// Work requests that fit now.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.queue.room(self.queue.posted.load(Ordering::Relaxed))
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.queue.ring.entries()
    }

    /// Starts over, as after a change to RESET: the ring zeroed, nothing posted. Neither thread nor
    /// device may use the queue meanwhile.
    pub fn reset(&self) {
        self.queue.reset();
    }
}

/// A shared receive queue. Its buffer starts with the `SrqRecord`.
#[derive(Debug)]
pub struct SharedRecvQueue<M, R = InRing> {
    /// What is completed here is what the device has consumed.
    queue: WorkQueue<M, R>,
}

impl<M: Memory> SharedRecvQueue<M> {
    /// A shared receive queue in a zeroed ring; `memory` is the whole buffer that `layout` is
    /// about.
    ///
    /// # Errors
    /// The layout is not valid, does not fit the memory, or its stride is too small for the
    /// entries.
    pub fn new(memory: M, layout: &RingLayout, max_sge: u32) -> Result<Self, BadLayout> {
        if layout.offset < SrqRecord::SIZE as u32 {
            return Err(BadLayout);
        }
        Ok(Self {
            queue: WorkQueue::new(memory, layout, max_sge, RECV_DATA_OFFSET as u32)?,
        })
    }

    /// The same queue, unused, with a record in `words`, which the device has no part of:
    /// [`Slots::words`] of them. `number` is the queue's.
    ///
    /// # Errors
    /// There are too few words.
    pub fn recorded<P: Memory>(
        self,
        words: P,
        number: u32,
    ) -> Result<SharedRecvQueue<M, Slots<P>>, BadLayout> {
        let record = Slots::new(words, self.entries(), number)?;
        Ok(SharedRecvQueue {
            queue: self.queue.with_record(record),
        })
    }

    /// Checks another, zeroed buffer for the queue: to give to the device, which moves there what
    /// it has not consumed. Until [`SharedRecvQueue::resized`], or until the device refused,
    /// nothing may be posted.
    ///
    /// # Errors
    /// The layout is not valid, does not fit the memory, or has another stride than the queue.
    pub fn prepare_resize(
        &self,
        memory: M,
        layout: &RingLayout,
    ) -> Result<ResizedSharedQueue<M>, BadLayout> {
        let Self { queue } = Self::new(memory, layout, self.queue.max_sge)?;
        if queue.ring.entry(0).len() != self.queue.ring.entry(0).len() {
            return Err(BadLayout);
        }
        Ok(ResizedSharedQueue { queue })
    }

    /// Goes on with the buffer that the device has moved the entries to: they are the first of its
    /// ring, and the device has stored how many. Returns the old one.
    pub fn resized(&mut self, new: ResizedSharedQueue<M>) -> M {
        let queue = new.queue;
        let posted = match queue.ring.memory().get(SRQ_POSTED_WORD) {
            Some(posted) => u64::from_le(posted.load(Ordering::Acquire)) as u32,
            None => 0,
        };
        // More than there are entries cannot be posted.
        let posted = posted.min(queue.ring.entries());
        queue.posted.store(posted, Ordering::Relaxed);
        core::mem::replace(&mut self.queue, queue)
            .ring
            .into_memory()
    }
}

impl<M: Memory, P: Memory> SharedRecvQueue<M, Slots<P>> {
    /// What the user is told of a completion that the device wrote for a receive of this queue,
    /// which is outstanding no longer then. Any thread.
    ///
    /// # Errors
    /// No device writes this completion that does what it should; nothing has changed.
    pub fn take(&self, cqe: &Cqe, datagram: bool) -> Result<Cqe, Violation> {
        self.queue.record.take(cqe, datagram)
    }
}

impl<M: Memory, R: Record> SharedRecvQueue<M, R> {
    /// Starts a batch of work requests.
    #[inline(always)]
    pub fn batch(&self) -> RecvBatch<'_, M, R> {
        self.refresh();
        RecvBatch {
            batch: self.queue.batch(),
            shared: true,
        }
    }

    /// Looks up what the device has consumed.
    #[inline(always)]
    fn refresh(&self) {
        let Some(record) = self.queue.ring.memory().first() else {
            return;
        };
        // Acquire: the device has read the entries before it said so.
        let consumed = (u64::from_le(record.load(Ordering::Acquire)) >> 32) as u32;
        let posted = self.queue.posted.load(Ordering::Relaxed);
        // More than was posted cannot be consumed: such a count frees nothing.
        if posted.wrapping_sub(consumed) <= self.queue.ring.entries() {
            self.queue.completed.store(consumed, Ordering::Release);
        }
    }

    /// Posts one work request, as [`RecvBatch::push`] and [`RecvBatch::commit`]. Returns whether to
    /// ring the doorbell of the shared receive queue.
    ///
    /// # Errors
    /// As [`RecvBatch::push`].
    #[inline(always)]
    pub fn post(&self, wr_id: u64, sges: impl IntoIterator<Item = Sge>) -> Result<bool, PostError> {
        let mut batch = self.batch();
        batch.push(wr_id, sges)?;
        Ok(batch.commit())
    }

    /// Work requests that fit now.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.refresh();
        self.queue.room(self.queue.posted.load(Ordering::Relaxed))
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.queue.ring.entries()
    }
}

/// Another buffer for a shared receive queue.
#[derive(Debug)]
pub struct ResizedSharedQueue<M> {
    queue: WorkQueue<M, InRing>,
}

/// Receive work requests that become visible to the device together. Dropping it uncommitted takes
/// them back.
#[derive(Debug)]
#[must_use]
pub struct RecvBatch<'q, M: Memory, R: Record = InRing> {
    batch: Batch<'q, M, R>,
    /// The queue is a shared receive queue.
    shared: bool,
}

impl<M: Memory, R: Record> RecvBatch<'_, M, R> {
    /// Adds a work request.
    ///
    /// # Errors
    /// The queue is full or there are too many scatter/gather entries; the batch is as before.
    #[inline(always)]
    pub fn push(
        &mut self,
        wr_id: u64,
        sges: impl IntoIterator<Item = Sge>,
    ) -> Result<(), PostError> {
        let entry = self.batch.entry()?;
        let data = entry.get(RECV_WORDS..).unwrap_or(&[]);
        let (count, length) = put_sges(data, self.batch.queue.max_sge, sges)?;
        let id = self.batch.keep(&Posted {
            wr_id,
            length,
            ..Posted::default()
        })?;
        let wqe = RecvWqe {
            count,
            wr_id: id,
            ..RecvWqe::default()
        };
        let bytes = wqe.to_bytes();
        if let Some(at) = entry.get(1) {
            at.store(word(&bytes, 1), Ordering::Relaxed);
        }
        self.batch.push(entry, word(&bytes, 0));
        Ok(())
    }

    /// Publishes the work requests. Returns whether the device waits for them: then ring the
    /// doorbell of the queue pair, or of the shared receive queue.
    ///
    /// # Ordering
    ///
    /// The device that finds no receive for a message stores `rq_waited`, looks at the ring once
    /// more behind a full fence, and only then leaves the message waiting. Here the ring is stored
    /// to, then `rq_waited` is loaded. All of it is sequentially consistent, so one of the two
    /// comes first in the one total order: if the store to the ring is before the device's second
    /// look, the device sees the entry; if it is after, the load of `rq_waited` is after the
    /// device's store to it, and the doorbell is rung.
    #[inline(always)]
    pub fn commit(mut self) -> bool {
        if self.shared && self.batch.first.is_some() {
            // Before the entries can be consumed, so that never more are consumed than posted.
            if let Some(posted) = self.batch.queue.ring.memory().get(SRQ_POSTED_WORD) {
                posted.store(u64::from(self.batch.position).to_le(), Ordering::Relaxed);
            }
        }
        if !self.batch.commit() {
            return false;
        }
        store_load_order();
        match self.batch.queue.ring.memory().first() {
            Some(record) => u64::from_le(record.load(Ordering::SeqCst)) as u32 != 0,
            None => false,
        }
    }
}
