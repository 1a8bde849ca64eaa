// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The consumer's side of a work queue in guest memory.
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{RecvWqe, Sge, PHASE, RECV_DATA_OFFSET};
use virtio_rdma_spec::verbs::access;

use super::keys::{CachedRange, Keys};
use super::Error;
use crate::memory::{prefetch_from, ContiguousRange, Pages};

/// Offset of the id in an entry of a send queue.
const SEND_ID_OFFSET: usize = 8;

/// A work queue: where it is in its buffer, and how far it was consumed.
#[derive(Debug, Clone, Copy)]
pub struct WorkQueue {
    /// Offset of the ring in the buffer, bytes.
    pub offset: u64,
    /// Stride of its entries, bytes, a power of two.
    pub stride: u32,
    /// Entries, a power of two; zero: there is no queue.
    pub entries: u32,
    /// Entries consumed, modulo 2^32.
    pub position: u32,
}

/// A receive work request that the fast path took for a message.
#[derive(Debug)]
pub struct FastReceive<'a> {
    /// Where the message goes.
    pub range: ContiguousRange<'a>,
    /// Its id.
    pub wr_id: u64,
    /// Its index in its queue.
    pub index: u16,
}

/// Entries of a queue that follow each other in memory. They end with the lap at the latest, so
/// they have the same phase once they are posted.
#[derive(Debug, Default)]
pub struct Entries<'a> {
    words: &'a [AtomicU64],
    /// Words of an entry.
    stride: usize,
    phase: u8,
}

/// The word of an entry that has its phase. All else of the entry was written before that.
///
/// A worker that took the doorbell's bit before sees what was posted before the bit was set, or was
/// seen to be set: both are sequentially consistent, and so is this.
#[inline(always)]
fn load_head(word: &AtomicU64) -> [u8; 8] {
    word.load(Ordering::SeqCst).to_ne_bytes()
}

/// Copies an entry of `N` bytes, if it was posted: if it has this phase.
#[inline(always)]
fn read<const N: usize>(words: &[AtomicU64], phase: u8) -> Option<[u8; N]> {
    const { assert!(N % 8 == 0 && N >= 8) };
    let (first, rest) = words.split_first()?;
    let head = load_head(first);
    let [_, flags, ..] = head;
    if flags & PHASE != phase {
        return None;
    }
    let mut bytes = [0; N];
    let (to, to_rest) = bytes.split_first_chunk_mut()?;
    *to = head;
    for (to, word) in to_rest.chunks_exact_mut(8).zip(rest) {
        to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    Some(bytes)
}

/// Stores the id of an entry of a send queue again, as it was read there, which may be done until
/// the entry is completed (D-RING-006).
///
/// With that its cache line is ours alone. A line that two cores have read is taken back by the one
/// that wrote it at the pace of one after the other, at least on Zen 4; one that the other core
/// wrote is fetched while others are. So the driver, which writes the line one lap later, writes
/// lists two to six times as fast.
#[inline(always)]
fn take_over(id: Option<&AtomicU64>, wr_id: u64) {
    if let Some(id) = id {
        id.store(wr_id.to_le(), Ordering::Relaxed);
    }
}

impl Entries<'_> {
    /// Copies the first `N` bytes of the first entry, a multiple of 8, if it was posted and the
    /// buffer has them.
    #[inline(always)]
    #[must_use]
    pub fn read<const N: usize>(&self) -> Option<[u8; N]> {
        let (words, _) = self.words.split_at_checked(N / 8)?;
        read(words, self.phase)
    }

    /// Makes the cache line of the first entry ours, whose id this is. What it says stays
    /// (D-RING-006).
    #[inline(always)]
    pub fn take_over(&self, wr_id: u64) {
        take_over(self.words.get(SEND_ID_OFFSET / 8), wr_id);
    }

    /// Goes to the next entry.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.words = self.words.get(self.stride..).unwrap_or_default();
    }

    /// Has the processor fetch the entry that comes `ahead` entries later.
    #[inline(always)]
    pub fn prefetch(&self, ahead: usize) {
        if let Some(word) = self.words.get(ahead * self.stride) {
            prefetch_from(word, 1);
        }
    }
}

impl WorkQueue {
    /// Index of the current entry.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index_after(0)
    }

    /// Index of the entry that comes `ahead` entries after the current one.
    #[inline]
    #[must_use]
    pub fn index_after(&self, ahead: u32) -> u16 {
        (self.position.wrapping_add(ahead) & self.entries.wrapping_sub(1)) as u16
    }

    /// The first 8 bytes of the current entry, if it was posted.
    #[inline]
    #[must_use]
    pub fn ready(&self, buffer: &Pages) -> Option<[u8; 8]> {
        if self.entries == 0 {
            return None;
        }
        let word = load_head(buffer.word(self.at(0))?);
        let [_, flags, ..] = word;
        (flags & PHASE == self.phase()).then_some(word)
    }

    /// Whether the entry that comes `ahead` entries after the current one was posted; none if the
    /// queue is too short to tell.
    #[inline]
    #[must_use]
    pub fn is_posted(&self, buffer: &Pages, ahead: u32) -> Option<bool> {
        if ahead >= self.entries {
            return None;
        }
        let there = Self {
            position: self.position.wrapping_add(ahead),
            ..*self
        };
        Some(there.ready(buffer).is_some())
    }

    /// How many entries are posted, from the current one on. Only a few of them are looked at: each
    /// is taken for posted if one behind it is. (So is the first of a list that the driver has not
    /// published yet.)
    #[must_use]
    pub fn posted(&self, buffer: &Pages) -> u32 {
        let (mut posted, mut end) = (0, self.entries);
        while posted < end {
            let middle = posted + (end - posted) / 2;
            let position = self.position.wrapping_add(middle);
            match (Self { position, ..*self }).ready(buffer) {
                Some(_) => posted = middle + 1,
                None => end = middle,
            }
        }
        posted
    }

    /// Where the current entry begins.
    #[inline]
    #[must_use]
    pub fn head<'a>(&self, buffer: &'a Pages) -> Option<&'a AtomicU64> {
        buffer.word(self.at(0))
    }

    /// Copies the first `N` bytes of the current entry, a power of two, if it was posted and the
    /// buffer has them.
    #[inline(always)]
    #[must_use]
    pub fn read<const N: usize>(&self, buffer: &Pages) -> Option<[u8; N]> {
        if self.entries == 0 {
            return None;
        }
        read(buffer.words::<N>(self.at(0))?, self.phase())
    }

    /// The current entry and those that follow it in one contiguous range, up to the end of the
    /// ring.
    #[inline(always)]
    #[must_use]
    pub fn entries<'a>(&self, buffer: &'a Pages) -> Entries<'a> {
        let at = self.at(0);
        let end = self.offset + u64::from(self.entries) * u64::from(self.stride);
        Entries {
            words: buffer.run(at, end.saturating_sub(at)).unwrap_or_default(),
            stride: self.stride as usize / 8,
            phase: self.phase(),
        }
    }

    /// The same for the current entry of a send queue.
    #[inline(always)]
    pub fn take_over(&self, buffer: &Pages, wr_id: u64) {
        take_over(buffer.word(self.at(SEND_ID_OFFSET)), wr_id);
    }

    /// The phase of the current entry once it is posted.
    #[must_use]
    pub fn phase(&self) -> u8 {
        if self.position & self.entries == 0 {
            PHASE
        } else {
            0
        }
    }

    /// Stores 8 bytes to the current entry: for entries that are moved to another ring.
    ///
    /// # Errors
    /// [`Error::Fault`] if the ring is not guest memory.
    pub fn store(&self, buffer: &Pages, within: usize, bytes: [u8; 8]) -> Result<(), Error> {
        let word = buffer.word(self.at(within)).ok_or(Error::Fault)?;
        word.store(u64::from_ne_bytes(bytes), Ordering::Release);
        Ok(())
    }

    /// The 8 bytes at `within` of the current entry.
    #[inline]
    #[must_use]
    pub fn word(&self, buffer: &Pages, within: usize) -> [u8; 8] {
        buffer
            .word(self.at(within))
            .map_or([0; 8], |word| word.load(Ordering::Relaxed).to_ne_bytes())
    }

    /// Reads whole words of the current entry, from `within` on; what is not guest memory is zero.
    #[inline]
    pub fn read_words(&self, buffer: &Pages, within: usize, into: &mut [u8]) {
        let run = buffer.run(self.at(within), into.len() as u64);
        let run = run.unwrap_or_default();
        for (i, chunk) in into.chunks_exact_mut(8).enumerate() {
            let word = match run.get(i) {
                Some(word) => word.load(Ordering::Relaxed).to_ne_bytes(),
                // The entry goes over the end of a page.
                None => self.word(buffer, within + 8 * i),
            };
            chunk.copy_from_slice(&word);
        }
    }

    /// Reads the current entry's scatter/gather list of `count` entries, which starts at `within`,
    /// into `sges`.
    #[inline]
    pub fn read_sges(&self, buffer: &Pages, within: usize, count: usize, sges: &mut Vec<Sge>) {
        sges.clear();
        for i in 0..count {
            let at = within + i * Sge::SIZE;
            let mut bytes = [0; Sge::SIZE];
            self.read_words(buffer, at, &mut bytes);
            sges.push(Sge::from_bytes(&bytes));
        }
    }

    /// Takes the current entry of a receive queue, whose first 8 bytes are `head`: its id, and
    /// whether it is a receive of at most `max_sge` entries, which go to `sges` then.
    pub fn take_receive(
        &mut self,
        buffer: &Pages,
        head: [u8; 8],
        max_sge: usize,
        sges: &mut Vec<Sge>,
    ) -> (u64, bool) {
        let mut bytes = [0; RecvWqe::SIZE];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&head);
        high.copy_from_slice(&self.word(buffer, 8));
        let wqe = RecvWqe::from_bytes(&bytes);
        let count = usize::from(wqe.count);
        let good =
            count <= max_sge && wqe.flags & !PHASE == 0 && wqe.reserved0 == 0 && wqe.reserved1 == 0;
        if good {
            self.read_sges(buffer, RECV_DATA_OFFSET, count, sges);
        }
        self.advance();
        (wqe.wr_id, good)
    }

    /// Takes the current entry of a receive queue for a message of `len` bytes, if it is eligible:
    /// posted, without error, of one scatter/gather entry with room for them in one contiguous
    /// range, by its key and protection domain `pd`.
    #[inline(always)]
    pub fn take_fast<'a>(
        &mut self,
        buffer: &Pages,
        max_sge: usize,
        keys: &'a Keys,
        cached: &mut CachedRange<'a>,
        pd: u32,
        len: u64,
    ) -> Option<FastReceive<'a>> {
        let bytes: [u8; RecvWqe::SIZE + Sge::SIZE] = self.read(buffer)?;
        let (wqe, sge) = bytes.split_at_checked(RECV_DATA_OFFSET)?;
        let (wqe, sge) = (RecvWqe::get(wqe), Sge::get(sge));
        let clean = wqe.flags & !PHASE == 0 && wqe.reserved0 == 0 && wqe.reserved1 == 0;
        if wqe.count != 1 || max_sge == 0 || !clean || u64::from(sge.length) < len {
            return None;
        }
        let access = access::LOCAL_WRITE;
        let range = match cached.recall(sge.lkey, access, sge.addr, len) {
            Some(range) => range,
            None => keys.contiguous(cached, sge.lkey, pd, access, sge.addr, len)?,
        };
        let index = self.index();
        self.advance();
        Some(FastReceive {
            range,
            wr_id: wqe.wr_id,
            index,
        })
    }

    /// Goes to the next entry.
    pub fn advance(&mut self) {
        self.position = self.position.wrapping_add(1);
    }

    fn at(&self, within: usize) -> u64 {
        self.offset + u64::from(self.index()) * u64::from(self.stride) + within as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{region, GuestMemory};

    const STRIDE: u32 = 64;

    /// A buffer of pages that do not follow each other.
    fn buffer() -> Pages {
        let memory = GuestMemory::new(vec![region(0, 4)]).unwrap();
        Pages::resolve(&memory, &[0x3000, 0x1000], 12).unwrap()
    }

    fn queue(offset: u64, entries: u32) -> WorkQueue {
        WorkQueue {
            offset,
            stride: STRIDE,
            entries,
            position: 0,
        }
    }

    /// Posts the entry at an index, with an id.
    fn post(buffer: &Pages, queue: &WorkQueue, index: u64, phase: u8, id: u64) {
        let at = queue.offset + index * u64::from(STRIDE);
        buffer.word(at + 8).unwrap().store(id, Ordering::Relaxed);
        let head = u64::from_ne_bytes([0, phase, 0, 0, 0, 0, 0, 0]);
        buffer.word(at).unwrap().store(head, Ordering::Relaxed);
    }

    fn id(entry: [u8; 16]) -> u64 {
        let (_, id) = entry.split_at(8);
        u64::from_ne_bytes(id.try_into().unwrap())
    }

    #[test]
    fn a_queue_without_entries_has_none() {
        let (buffer, queue) = (buffer(), queue(0, 0));
        post(&buffer, &queue, 0, PHASE, 7);
        assert_eq!(queue.read::<16>(&buffer), None);
        assert_eq!(queue.ready(&buffer), None);
    }

    /// Pages that do not follow each other, and an end.
    #[test]
    fn an_entry_is_read_over_the_end_of_a_page_as_far_as_there_is_memory() {
        let buffer = buffer();
        for (at, there) in [(4096 - 24, 6), (8192 - 24, 3)] {
            for word in 0..there {
                let place = buffer.word(at + 8 * word).unwrap();
                place.store(word + 1, Ordering::Relaxed);
            }
            let mut read = [0xff; 48];
            queue(at - 16, 2).read_words(&buffer, 16, &mut read);
            let words = read.chunks_exact(8);
            let words: Vec<_> = words
                .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
                .collect();
            let expected = (1..=6).map(|word| if word <= there { word } else { 0 });
            let expected: Vec<_> = expected.collect();
            assert_eq!(words, expected);
        }
    }

    #[test]
    fn entries_ahead_are_seen() {
        let (buffer, mut queue) = (buffer(), queue(0, 8));
        (0..6).for_each(|index| post(&buffer, &queue, index, PHASE, index));
        queue.position = 4;
        let posted = |ahead| queue.is_posted(&buffer, ahead);
        assert_eq!(
            [0, 1, 2, 3].map(posted),
            [true, true, false, false].map(Some)
        );
        // The next lap.
        assert_eq!(posted(4), Some(false));
        post(&buffer, &queue, 0, 0, 8);
        assert_eq!(posted(4), Some(true));
        assert_eq!(posted(8), None);
    }

    #[test]
    fn entries_end_with_the_page_and_with_the_lap() {
        // The last of them is on the second page, by itself.
        let (buffer, mut queue) = (buffer(), queue(4096 - 7 * 64, 8));
        for index in 0..8 {
            post(&buffer, &queue, index, PHASE, index);
        }
        let mut found = Vec::new();
        while let Some(entry) = queue.read::<16>(&buffer) {
            let mut entries = queue.entries(&buffer);
            assert_eq!(entries.read(), Some(entry));
            let mut part = 0;
            while let Some(entry) = entries.read::<16>() {
                found.push(id(entry));
                entries.prefetch(part);
                entries.take_over(id(entry));
                queue.take_over(&buffer, id(entry));
                assert_eq!(entries.read(), Some(entry));
                entries.advance();
                queue.advance();
                part += 1;
            }
            assert!([7, 1].contains(&part), "{part}");
            if found.len() == 8 {
                // The first again, one lap later.
                post(&buffer, &queue, 0, 0, 8);
            }
        }
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
