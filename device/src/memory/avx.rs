// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies by AVX, or by the string instruction where that is faster, with what comes next fetched
//! meanwhile; and past the caches, by stores that do not allocate in them, if `STREAM`.
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::guest::Host;
use super::range::{prefetch_line, prefetch_line_to_write};

/// Size of a page, bytes.
pub const PAGE: usize = 4096;

/// Size of a cache line, bytes.
pub const LINE: usize = 64;

/// Cache lines of a page.
const LINES: usize = PAGE / LINE;

/// Half of a page, bytes.
const HALF: usize = PAGE / 2;

/// Pages after the next of which the processor is to find out where they are.
const SOON: usize = 1;

/// Pages after the next whose place in the list is fetched.
const LISTED: usize = 16;

/// Where a core takes lines that follow each other for a stream and fetches on beyond the end of
/// the page, that is in vain where the next page lies elsewhere; so there the lines of a page are
/// copied all over it: with this step from one to the next, odd, while the processor fetches those
/// that are so many ahead.
const STEP: usize = 27;
const AHEAD: usize = 12;

/// Fewer pages are not copied staggered.
const FEW: usize = 8;

/// Lines of a page that are fetched before it is begun with.
const BEGINNING: usize = 4;

/// The same before a page that is copied by one instruction.
const BEGINNING_OF_WHOLE: usize = 6;

/// Whether the processor has it.
#[inline]
pub fn is_there() -> bool {
    std::arch::is_x86_feature_detected!("avx")
}

/// The order in which the lines of pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Page by page, all over each of them.
    AllOver,
    /// The second half of each page together with the first half of the next.
    Staggered,
    /// Page by page, one after the other, with the next page fetched meanwhile.
    Forward,
    /// Page by page, each by one instruction (`rep movsb`), with the beginning of the next fetched
    /// before.
    Whole,
}

impl Order {
    /// Those among which is chosen. `AllOver` is not: beyond the second cache of an Emerald Rapids it
    /// was the slowest of all, and within it the fastest by less than a fifth.
    const CHOICE: [Self; 3] = [Self::Staggered, Self::Forward, Self::Whole];
}

/// The one that many pages are copied in: its place in [`Order::CHOICE`].
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// Measures on this processor which order is the fastest for many pages, and copies so from now on.
/// It takes some twenty milliseconds; another thread that needs the processor meanwhile does no harm.
pub fn choose() -> Option<Order> {
    /// Pages that are copied at a time: as much at both ends as the second cache of a core may just
    /// hold, and more.
    const COUNTS: [usize; 2] = [256, 512];
    /// Pages among which they are.
    const AMONG: usize = 2048;
    /// Allocations of each end.
    const PIECES: usize = 32;
    /// In what order, by steps from one to the next. Pages of guests lie in any, so perhaps in the same
    /// at both ends, where they compete for the same places in the caches.
    const STEPS: [[usize; 2]; 2] = [[101, 59], [59, 59]];
    // On a busy machine, six ended with the slowest order in a few of a hundred starts.
    const ROUNDS: usize = 24;
    if !is_there() {
        return None;
    }
    // In pieces: after a long one was freed, the C library would keep such, instead of giving them back.
    let memory = || vec![vec![Page([1; PAGE]); AMONG / PIECES]; PIECES];
    let (mut to, mut from) = (memory(), memory());
    let listed = |pages: &mut [Vec<Page>], step: usize| -> Vec<Host> {
        let pages = pages.iter_mut().flatten();
        let places = pages.map(|page| Host(page.0.as_mut_ptr()));
        let places: Vec<_> = places.collect();
        // The step has no factor in common with their number: each is there once.
        let order = (0..AMONG).map(|n| n * step % AMONG);
        order.filter_map(|n| places.get(n).copied()).collect()
    };
    let mut spent = [Duration::ZERO; Order::CHOICE.len()];
    for steps in STEPS {
        let (to, from) = (listed(&mut to, steps[0]), listed(&mut from, steps[1]));
        let (first, source) = (to.first()?, from.first()?);
        for count in COUNTS {
            let (more, sources) = (to.get(1..count)?, from.get(1..count)?);
            let mut best = [Duration::MAX; Order::CHOICE.len()];
            for _ in 0..ROUNDS {
                for (order, best) in Order::CHOICE.into_iter().zip(&mut best) {
                    let begin = Instant::now();
                    // SAFETY: they are pages of vectors of their own, each once, and the processor has
                    // AVX.
                    unsafe { copy_pages_in(order, (*first, more), (*source, sources)) };
                    *best = begin.elapsed().min(*best);
                }
            }
            for (spent, best) in spent.iter_mut().zip(best) {
                *spent += best;
            }
        }
    }
    let all = Order::CHOICE.into_iter().zip(spent);
    let (at, (order, _)) = (0..).zip(all).min_by_key(|(_, (_, spent))| *spent)?;
    CHOSEN.store(at, Ordering::Relaxed);
    Some(order)
}

/// The order for so many pages.
#[inline]
fn order_for(count: usize) -> Order {
    if count < FEW {
        return Order::AllOver;
    }
    let chosen = usize::from(CHOSEN.load(Ordering::Relaxed));
    Order::CHOICE
        .get(chosen)
        .copied()
        .unwrap_or(Order::Staggered)
}

#[repr(align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; PAGE]);

/// Copies pages, the first of `from` to the first of `to` and so on, as long as there is another at
/// both: that is fetched meanwhile.
///
/// Which order is best depends on the processor ([`choose`]). On Zen 4 it is staggered: there the core
/// needs a while at the beginning of each page to find out that lines follow each other, and this is
/// hidden behind the half of another. That takes more than a few pages. On Emerald Rapids it is whole.
///
/// # Safety
/// All pages are valid for [`PAGE`] bytes and aligned to that, and no two of them overlap unless
/// they are the same. The processor has AVX.
#[target_feature(enable = "avx")]
pub unsafe fn copy_pages<const STREAM: bool>(to: (Host, &[Host]), from: (Host, &[Host])) {
    let count = to.1.len().min(from.1.len());
    // SAFETY: the caller promises it.
    unsafe {
        if STREAM {
            stream_pages(to, from);
        } else {
            copy_pages_in(order_for(count), to, from);
        }
    }
}

/// Copies pages past the caches.
///
/// # Safety
/// As for [`copy_pages`].
#[target_feature(enable = "avx")]
#[inline]
unsafe fn stream_pages(to: (Host, &[Host]), from: (Host, &[Host])) {
    let (mut page, mut source) = (to.0 .0, from.0 .0);
    for (i, (next_page, next_source)) in to.1.iter().zip(from.1).enumerate() {
        fetch_list(to.1, from.1, i);
        if let Some((page, source)) = to.1.get(i + SOON).zip(from.1.get(i + SOON)) {
            prefetch_line(page.0);
            prefetch_line(source.0);
        }
        let next = (next_page.0, next_source.0);
        // Half of the next page: to fetch more is slower, and so is less.
        // SAFETY: the caller promises it.
        unsafe { copy_lines::<true>(page, source, LINES, next, LINES / 2) };
        (page, source) = next;
    }
}

/// Copies pages through the caches.
///
/// # Safety
/// As for [`copy_pages`].
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_pages_in(order: Order, to: (Host, &[Host]), from: (Host, &[Host])) {
    let (mut page, mut source) = (to.0 .0, from.0 .0);
    if let (Order::Staggered, Some(next)) = (order, to.1.first().zip(from.1.first())) {
        let next = (next.0 .0, next.1 .0);
        // SAFETY: the caller promises it.
        unsafe { copy_lines::<false>(page, source, LINES / 2, next, BEGINNING) };
    }
    for (i, (next_page, next_source)) in to.1.iter().zip(from.1).enumerate() {
        fetch_list(to.1, from.1, i);
        let next = (next_page.0, next_source.0);
        let after = to.1.get(i + SOON).zip(from.1.get(i + SOON));
        // SAFETY: the caller promises it.
        unsafe {
            match (order, after) {
                (Order::AllOver, _) => copy_all_over(page, source, next),
                (Order::Forward, _) => copy_lines::<false>(page, source, LINES, next, LINES / 2),
                (Order::Whole, _) => copy_whole(page, source, next),
                (Order::Staggered, Some(after)) => {
                    copy_halves((page, source), next, (after.0 .0, after.1 .0));
                }
                (Order::Staggered, None) => {
                    let (page, source) = (page.wrapping_add(HALF), source.wrapping_add(HALF));
                    copy_lines::<false>(page, source, LINES / 2, next, LINES / 2);
                }
            }
        }
        (page, source) = next;
    }
}

/// Has the processor fetch what comes a while after number `i` in two lists of pages.
#[inline(always)]
fn fetch_list(to: &[Host], from: &[Host], i: usize) {
    for list in [to, from] {
        prefetch_line(list.as_ptr().wrapping_add(i + LISTED).cast());
    }
}

/// Copies the second half of a page and the first half of the `next`, line by line in turn, and has
/// the processor fetch the beginning of that `after` it. Each is a destination and a source.
///
/// # Safety
/// The pages are valid for [`PAGE`] bytes and aligned to that, and no two of them overlap unless
/// they are the same. The processor has AVX.
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_halves(
    page: (*mut u8, *mut u8),
    next: (*mut u8, *mut u8),
    after: (*mut u8, *mut u8),
) {
    for line in 0..LINES / 2 {
        let (first, second) = (line * LINE, HALF + line * LINE);
        if line < BEGINNING {
            prefetch_line(after.1.wrapping_add(first));
            prefetch_line_to_write(after.0.wrapping_add(first));
        }
        // SAFETY: the caller promises it: all places are in the pages.
        unsafe {
            copy_line::<false>(page.0.wrapping_add(second), page.1.wrapping_add(second));
            copy_line::<false>(next.0.wrapping_add(first), next.1.wrapping_add(first));
        }
    }
}

/// Copies a page by one instruction, and has the processor fetch the beginning of the next before: a
/// destination and a source.
///
/// # Safety
/// Both pages are valid for [`PAGE`] bytes, and do not overlap unless they are the same.
#[inline(always)]
unsafe fn copy_whole(page: *mut u8, source: *const u8, next: (*mut u8, *mut u8)) {
    for line in 0..BEGINNING_OF_WHOLE {
        prefetch_line(next.1.wrapping_add(line * LINE));
        prefetch_line_to_write(next.0.wrapping_add(line * LINE));
    }
    // SAFETY: it copies the bytes that the caller promises, and changes no flag; the direction flag is
    // clear, as everywhere.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") PAGE => _,
            inout("rdi") page => _,
            inout("rsi") source => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Where the line of a page is that is copied as number `n`, bytes.
const fn place(n: usize) -> usize {
    n % LINES * STEP % LINES * LINE
}

/// Copies a page, its lines all over it, and has the processor fetch what is copied first of the
/// next: a destination and a source.
///
/// # Safety
/// Both pages are valid for [`PAGE`] bytes and aligned to that, and do not overlap. The processor
/// has AVX.
#[target_feature(enable = "avx")]
unsafe fn copy_all_over(page: *mut u8, source: *const u8, next: (*mut u8, *mut u8)) {
    // Written out: as a loop, these few instructions would be what the processor takes for a
    // stream.
    macro_rules! copy_pairs {
        ($($n:literal)*) => {$(
            // SAFETY: the caller promises it.
            unsafe { copy_pair::<$n>(page, source, next) };
        )*};
    }
    copy_pairs!(0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32 34 36 38 40 42 44 46 48 50 52 54 56 58 60 62);
}

/// Copies the lines of a page that are copied as number `N` and `N + 1`, and has the processor
/// fetch those that are [`AHEAD`].
///
/// # Safety
/// As for [`copy_all_over`].
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_pair<const N: usize>(page: *mut u8, source: *const u8, next: (*mut u8, *mut u8)) {
    for n in [N + AHEAD, N + AHEAD + 1] {
        let (page, source) = if n < LINES {
            (page, source)
        } else {
            (next.0, next.1.cast_const())
        };
        prefetch_line(source.wrapping_add(place(n)));
        prefetch_line_to_write(page.wrapping_add(place(n)));
    }
    for n in [N, N + 1] {
        let at = place(n);
        // SAFETY: the caller promises it: all places are in the page.
        unsafe { copy_line::<false>(page.wrapping_add(at), source.wrapping_add(at)) };
    }
}

/// Copies cache lines, and has the processor fetch the first `ahead` lines at `next`: a destination
/// and a source.
///
/// # Safety
/// `from` and `to` are valid for `lines * LINE` bytes and do not overlap; `to` is aligned to
/// `LINE`. The processor has AVX.
#[target_feature(enable = "avx")]
pub unsafe fn copy_lines<const STREAM: bool>(
    to: *mut u8,
    from: *const u8,
    lines: usize,
    next: (*mut u8, *mut u8),
    ahead: usize,
) {
    let copy = |line: usize| {
        let at = line * LINE;
        // SAFETY: the caller promises it, for each of the lines.
        unsafe { copy_line::<STREAM>(to.wrapping_add(at), from.wrapping_add(at)) }
    };
    let fetch = |line: usize| {
        let at = line * LINE;
        prefetch_line(next.1.wrapping_add(at));
        if !STREAM {
            prefetch_line(next.0.wrapping_add(at));
        }
    };
    // Two lines at a time: that is faster.
    let pairs = ahead.min(lines) / 2;
    for line in (0..2 * pairs).step_by(2) {
        fetch(line);
        fetch(line + 1);
        copy(line);
        copy(line + 1);
    }
    for line in 2 * pairs..lines {
        copy(line);
    }
}

/// Copies a cache line, with stores that do not allocate in the caches if `STREAM`.
///
/// # Safety
/// `from` and `to` are valid for `LINE` bytes; `to` is aligned to it. The processor has AVX.
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_line<const STREAM: bool>(to: *mut u8, from: *const u8) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256};
    let (to, from) = (to.cast::<__m256i>(), from.cast::<__m256i>());
    // SAFETY: both halves are part of what the caller promises.
    unsafe {
        let halves = (
            _mm256_loadu_si256(from),
            _mm256_loadu_si256(from.wrapping_add(1)),
        );
        if STREAM {
            _mm256_stream_si256(to, halves.0);
            _mm256_stream_si256(to.wrapping_add(1), halves.1);
        } else {
            _mm256_store_si256(to, halves.0);
            _mm256_store_si256(to.wrapping_add(1), halves.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 5;

    /// A list of pages to copy.
    type List<'a> = (Host, &'a [Host]);

    /// Copies the first pages of lists of which one has `count` pages.
    fn check(count: usize, copy: impl Fn(List<'_>, List<'_>)) {
        let mut from = vec![Page([0; PAGE]); PAGES];
        for (i, byte) in from.iter_mut().flat_map(|page| &mut page.0).enumerate() {
            *byte = (i * 7 + i / 251) as u8;
        }
        let mut to = vec![Page([0; PAGE]); PAGES];
        let hosts = |pages: &mut Vec<Page>| {
            let hosts = pages.iter_mut().map(|page| Host(page.0.as_mut_ptr()));
            hosts.collect::<Vec<_>>()
        };
        let (a, b) = (hosts(&mut to), hosts(&mut from));
        copy((a[0], &a[1..count]), (b[0], &b[1..]));
        // All that have another behind them.
        let (copied, others) = to.split_at(count - 1);
        for (to, from) in copied.iter().zip(&from) {
            assert!(to.0 == from.0, "{count} pages");
        }
        for to in others {
            assert!(to.0 == [0; PAGE], "{count} pages");
        }
    }

    #[test]
    fn pages_are_copied_whole_in_any_order_of_their_lines() {
        if !is_there() {
            return;
        }
        for count in 1..=PAGES {
            // SAFETY: they are pages of two vectors, and the processor has AVX.
            check(count, |to, from| unsafe { stream_pages(to, from) });
            for order in Order::CHOICE.into_iter().chain([Order::AllOver]) {
                // SAFETY: the same.
                check(count, |to, from| unsafe { copy_pages_in(order, to, from) });
            }
        }
    }

    #[test]
    fn one_of_the_orders_is_chosen_for_many_pages() {
        if !is_there() {
            return;
        }
        let chosen = choose().unwrap();
        assert_eq!(
            (order_for(FEW), order_for(FEW - 1)),
            (chosen, Order::AllOver)
        );
    }
}
