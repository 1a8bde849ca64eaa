// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Scatter ranges: guest memory that is one range for the guest and several ranges here; copies
//! between them.
use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::avx::{self, LINE, PAGE};
use super::guest::Host;
use super::range::{copy, copy_last, ContiguousRange, Source};

/// Bytes in one contiguous range, or in several of the same size, of which the first and the last
/// may be a part.
#[derive(Debug, Clone, Copy)]
pub struct ScatterRange<'a> {
    /// What is left of the first range.
    first: ContiguousRange<'a>,
    /// The ranges that follow, as many as `left` bytes need. INVARIANT: each is valid for `size`
    /// bytes for `'a`.
    more: &'a [Host],
    /// Size of one of them, bytes.
    size: usize,
    /// Bytes in all of them that belong to it.
    left: u64,
}

impl<'a> From<ContiguousRange<'a>> for ScatterRange<'a> {
    fn from(first: ContiguousRange<'a>) -> Self {
        Self {
            first,
            more: &[],
            size: 0,
            left: 0,
        }
    }
}

impl<'a> ScatterRange<'a> {
    /// The bytes of `first`, and the first `left` of the ranges of `size` bytes at `more`; `None`
    /// if there are not as many.
    ///
    /// The ranges must be valid for `size` bytes each for `'a`.
    pub(super) fn new(
        first: ContiguousRange<'a>,
        more: &'a [Host],
        size: usize,
        left: u64,
    ) -> Option<Self> {
        let count = left.div_ceil(size as u64);
        Some(Self {
            first,
            more: more.get(..usize::try_from(count).ok()?)?,
            size,
            left,
        })
    }

    /// Length, bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.first.len as u64 + self.left
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.len == 0
    }

    /// Takes the first range out, or as much of it as `max` bytes.
    #[inline]
    #[must_use]
    pub fn take(&mut self, max: usize) -> ContiguousRange<'a> {
        let (taken, rest) = self.first.split_at(max);
        self.first = rest;
        if rest.len == 0 {
            if let Some((next, more)) = self.more.split_first() {
                let len = self.left.min(self.size as u64);
                self.first = ContiguousRange {
                    ptr: next.0,
                    len: len as usize,
                    owner: PhantomData,
                };
                self.more = more;
                self.left -= len;
            }
        }
        taken
    }

    /// Leaves out what is left of the first range, and all of the `count - 1` ranges that follow;
    /// as many do.
    #[cfg(target_arch = "x86_64")]
    fn skip(&mut self, count: usize) {
        let Some((before, more)) = self.more.split_at_checked(count) else {
            return;
        };
        if let Some(first) = before.last() {
            self.left -= (count as u64 - 1) * self.size as u64;
            let len = self.left.min(self.size as u64);
            self.left -= len;
            self.more = more;
            self.first = ContiguousRange {
                ptr: first.0,
                len: len as usize,
                owner: PhantomData,
            };
        }
    }

    /// Where it begins, and the ranges that follow.
    #[cfg(target_arch = "x86_64")]
    fn pages(&self) -> (Host, &'a [Host]) {
        (Host(self.first.ptr), self.more)
    }

    /// Whether it begins with a whole page, and consists of such, but for the last.
    #[cfg(target_arch = "x86_64")]
    fn in_pages(&self) -> bool {
        self.first.len == PAGE && self.size == PAGE
    }
}

/// How bytes are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Through the caches.
    Cached,
    /// Past the caches, for what is so large that it would only evict what is in them.
    Streaming,
}

/// Copies the common length of the two, which both move on by that. The bytes become visible in any
/// order, those that were copied past the caches before whatever is stored after [`end_streaming`];
/// but where all of `from` is copied and `last`, what is written last becomes visible last, as with
/// [`copy_last`].
pub fn copy_scattered(
    to: &mut ScatterRange<'_>,
    from: &mut ScatterRange<'_>,
    way: Way,
    last: bool,
) {
    loop {
        copy_pages(to, from, way);
        let len = to.first.len.min(from.first.len);
        if len == 0 {
            return;
        }
        let (part, source) = (to.take(len), Source::from(from.take(len)));
        if last && from.is_empty() {
            if way == Way::Streaming {
                end_streaming();
            }
            copy_last(part, source);
            return;
        }
        copy_contiguous(part, source, (to.first, from.first), way);
    }
}

/// Copies the whole pages that both begin with, page by page, as long as others follow at both:
/// those are fetched meanwhile.
#[inline]
fn copy_pages(to: &mut ScatterRange<'_>, from: &mut ScatterRange<'_>, way: Way) {
    #[cfg(target_arch = "x86_64")]
    {
        let count = to.more.len().min(from.more.len());
        if count == 0 || !to.in_pages() || !from.in_pages() || !avx::is_there() {
            return;
        }
        // SAFETY: the ranges are valid for `PAGE` bytes each (invariant of `ScatterRange`), which
        // is what `size` says. They are pages of guest memory, so aligned, and two of them are the
        // same or do not overlap. Others may write at the same time, as in `copy`.
        unsafe {
            match way {
                Way::Cached => avx::copy_pages::<false>(to.pages(), from.pages()),
                Way::Streaming => avx::copy_pages::<true>(to.pages(), from.pages()),
            }
        }
        to.skip(count);
        from.skip(count);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (to, from, way);
}

/// Copies the common length of `from` to `to`, and has the processor fetch `next`, of which nothing
/// is accessed.
fn copy_contiguous(
    to: ContiguousRange<'_>,
    from: Source<'_>,
    next: (ContiguousRange<'_>, ContiguousRange<'_>),
    way: Way,
) {
    #[cfg(target_arch = "x86_64")]
    {
        // A range that is longer needs nothing but to be copied: the processor fetches by itself
        // what comes next in it.
        const LONG: usize = 4 * PAGE;
        // Less is not worth a loop of our own.
        const FEW: usize = 256;
        let len = to.len.min(from.len());
        let apart = (to.ptr as usize).abs_diff(from.ptr() as usize) >= len;
        let own = if way == Way::Cached {
            FEW..LONG
        } else {
            FEW..usize::MAX
        };
        if apart && own.contains(&len) && avx::is_there() {
            // A line of the destination is written as a whole, or it costs more than it saves.
            let head = (to.ptr as usize).wrapping_neg() % LINE;
            let (to_head, to) = to.split_at(head);
            let (from_head, from) = from.split_at(head);
            copy(to_head, from_head);
            let lines = (len - head) / LINE;
            let ahead = next.0.len.min(next.1.len).min(PAGE) / LINE;
            let next = (next.0.ptr, next.1.ptr);
            // SAFETY: both are valid for `lines * LINE` bytes (invariants of `ContiguousRange` and
            // `Source`) and do not overlap, and the destination is aligned to `LINE`. Others may
            // write at the same time, as in `copy`.
            unsafe {
                match way {
                    Way::Cached => avx::copy_lines::<false>(to.ptr, from.ptr(), lines, next, ahead),
                    Way::Streaming => {
                        avx::copy_lines::<true>(to.ptr, from.ptr(), lines, next, ahead)
                    }
                }
            }
            let done = lines * LINE;
            copy(to.split_at(done).1, from.split_at(done).1);
            return;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (next, way);
    copy(to, from);
}

/// Makes what was copied past the caches visible before whatever is stored from now on.
pub fn end_streaming() {
    // SAFETY: this instruction is part of every processor of this architecture.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{fetch_bytes, region, GuestMemory, Pages};
    use super::*;
    use proptest::prelude::*;

    /// Pages of the buffers of these tests.
    const PAGES: usize = 8;
    const SIZE: usize = PAGES * 4096;

    /// Guest memory, all of it in a row, and in an order of its pages.
    struct Memory {
        memory: GuestMemory,
        pages: Pages,
    }

    impl Memory {
        fn new(order: &[u64]) -> Self {
            let memory = GuestMemory::new(vec![region(0, PAGES as u64)]).unwrap();
            let guest: Vec<u64> = order.iter().map(|page| page << 12).collect();
            let pages = Pages::resolve(&memory, &guest, 12).unwrap();
            Self { memory, pages }
        }

        fn scattered(&self, at: usize, len: usize) -> ScatterRange<'_> {
            self.pages.scattered(at as u64, len as u64).unwrap()
        }

        fn fill(&self, bytes: &[u8]) {
            let mut from = bytes;
            let mut to = self.scattered(0, bytes.len());
            while !to.is_empty() {
                let part = to.take(usize::MAX);
                let (head, rest) = from.split_at(part.len());
                copy(part, head.into());
                from = rest;
            }
        }

        fn read(&self) -> Vec<u8> {
            let mut bytes = vec![0; SIZE];
            let mut all = self.scattered(0, SIZE);
            let mut at = 0;
            while !all.is_empty() {
                at += fetch_bytes(&mut bytes[at..], all.take(1000));
            }
            bytes
        }
    }

    fn orders() -> impl Strategy<Value = Vec<u64>> {
        let all: Vec<u64> = (0..PAGES as u64).collect();
        prop_oneof![Just(all.clone()), Just(all).prop_shuffle()]
    }

    fn pattern(seed: u8) -> Vec<u8> {
        (0..SIZE as u32)
            .map(|i| (i * 7 + i / 256) as u8 ^ seed)
            .collect()
    }

    #[test]
    fn pages_are_where_the_list_says() {
        let order = [3, 1, 7, 0, 2, 6, 5, 4];
        let memory = Memory::new(&order);
        for (i, page) in order.into_iter().enumerate() {
            let linear = memory.memory.range_at(page << 12, 4096).unwrap();
            copy(linear, [i as u8; 4096].as_slice().into());
        }
        let read = memory.read();
        assert!(read
            .iter()
            .enumerate()
            .all(|(at, byte)| at / 4096 == usize::from(*byte)));
    }

    proptest! {
        /// Whatever the order of the pages and the way, all bytes arrive, and nothing else changes.
        #[test]
        fn copies_through_any_pages(
            orders in (orders(), orders()), ats in (0usize..8500, 0usize..8500), len in 0usize..19_500, rest in (0usize..4700, 0usize..4700),
            seed: u8, streams: bool, last: bool,
        ) {
            let (from, to) = (Memory::new(&orders.0), Memory::new(&orders.1));
            let (data, old) = (pattern(seed), pattern(!seed));
            from.fill(&data);
            to.fill(&old);
            let way = if streams { Way::Streaming } else { Way::Cached };
            let (mut source, mut sink) = (from.scattered(ats.0, len + rest.0), to.scattered(ats.1, len + rest.1));
            copy_scattered(&mut sink, &mut source, way, last);
            end_streaming();
            let copied = len + rest.0.min(rest.1);
            prop_assert_eq!((source.len(), sink.len()), ((rest.0 + len - copied) as u64, (rest.1 + len - copied) as u64));
            let mut expected = old;
            expected[ats.1..][..copied].copy_from_slice(&data[ats.0..][..copied]);
            prop_assert_eq!(to.read(), expected);
            prop_assert_eq!(from.read(), data);
        }

        /// What overlaps is copied as if all was read first, as long as it is no more than is
        /// copied at once.
        #[test]
        fn short_copies_may_overlap(
            from in 0usize..3000, to in 0usize..3000, len in 0usize..1000, streams: bool, last: bool,
        ) {
            let memory = Memory::new(&(0..PAGES as u64).collect::<Vec<_>>());
            let data = pattern(0);
            memory.fill(&data);
            let way = if streams { Way::Streaming } else { Way::Cached };
            copy_scattered(&mut memory.scattered(to, len), &mut memory.scattered(from, len), way, last);
            end_streaming();
            let mut expected = data;
            expected.copy_within(from..from + len, to);
            prop_assert_eq!(memory.read(), expected);
        }

        /// The same for a few words.
        #[test]
        fn a_few_words_may_overlap(
            from in 0usize..100, to in 0usize..100, len in 0usize..100, unit in prop_oneof![Just(1usize), Just(8)],
        ) {
            let memory = Memory::new(&[0, 1, 2, 3, 4, 5, 6, 7]);
            let [from, to, len] = [from, to, len].map(|n| n / unit * unit);
            let data = pattern(0);
            memory.fill(&data);
            let range = |at| memory.scattered(at, len.max(1)).take(len);
            copy_last(range(to), range(from).into());
            let mut expected = data;
            expected.copy_within(from..from + len, to);
            prop_assert_eq!(memory.read(), expected);
        }
    }
}
