// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies by AVX, with what comes next fetched meanwhile; and past the caches, by stores that do not allocate in them, if
//! `STREAM`.
use super::guest::Host;
use super::span::{prefetch_line, prefetch_line_to_write};

/// Size of a page, bytes.
pub const PAGE: usize = 4096;

/// Size of a cache line, bytes.
pub const LINE: usize = 64;

/// Cache lines of a page.
const LINES: usize = PAGE / LINE;

/// Pages after the next of which the processor is to find out where they are.
const SOON: usize = 1;

/// Pages after the next whose place in the list is fetched.
const LISTED: usize = 16;

/// The order in which the lines of a page are copied: the step from one to the next, odd, and how many lines ahead the processor
/// fetches. Where a core takes lines that follow each other for a stream and fetches on beyond the end of the page, that is in vain
/// where the next page lies elsewhere; so these are copied all over the page. Zen 4 does it best in order. AVX-512
/// stands for that: which of the two is better was measured on Zen 4, and on one other machine whose processor is not known.
const ALL_OVER: (usize, usize) = (27, 12);
const IN_ORDER: (usize, usize) = (1, 32);

/// Whether the processor has it.
#[inline]
pub fn is_there() -> bool {
    std::arch::is_x86_feature_detected!("avx")
}

/// Copies pages, the first of `from` to the first of `to` and so on, as long as there is another at both: that is fetched
/// meanwhile.
///
/// # Safety
/// All pages are valid for [`PAGE`] bytes and aligned to that, and no two of them overlap unless they are the same. The
/// processor has AVX.
#[target_feature(enable = "avx")]
pub unsafe fn copy_pages<const STREAM: bool>(to: (Host, &[Host]), from: (Host, &[Host])) {
    let in_order = std::arch::is_x86_feature_detected!("avx512f");
    // SAFETY: the caller promises it.
    unsafe { copy_pages_by::<STREAM>(in_order, to, from) };
}

/// The same, with the lines of cached pages copied in order or all over the page.
///
/// # Safety
/// As for [`copy_pages`].
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_pages_by<const STREAM: bool>(
    in_order: bool,
    to: (Host, &[Host]),
    from: (Host, &[Host]),
) {
    let (mut page, mut source) = (to.0 .0, from.0 .0);
    for (i, (next_page, next_source)) in to.1.iter().zip(from.1).enumerate() {
        if STREAM {
            if let (Some(page), Some(source)) = (to.1.get(i + SOON), from.1.get(i + SOON)) {
                prefetch_line(page.0);
                prefetch_line(source.0);
            }
        }
        for list in [to.1, from.1] {
            prefetch_line(list.as_ptr().wrapping_add(i + LISTED).cast());
        }
        let next = (next_page.0, next_source.0);
        // SAFETY: the caller promises it.
        unsafe {
            if STREAM {
                copy_lines::<STREAM>(page, source, LINES, next, LINES);
            } else if in_order {
                copy_page::<{ IN_ORDER.0 }, { IN_ORDER.1 }>(page, source, next);
            } else {
                copy_page::<{ ALL_OVER.0 }, { ALL_OVER.1 }>(page, source, next);
            }
        }
        (page, source) = next;
    }
}

/// Where the line of a page is that is copied as number `n`, bytes.
const fn place<const STEP: usize>(n: usize) -> usize {
    n % LINES * STEP % LINES * LINE
}

/// Copies a page, and has the processor fetch what is copied first of the next: a destination and a source.
///
/// # Safety
/// Both pages are valid for [`PAGE`] bytes and aligned to that, and do not overlap. The processor has AVX.
#[target_feature(enable = "avx")]
unsafe fn copy_page<const STEP: usize, const AHEAD: usize>(
    page: *mut u8,
    source: *const u8,
    next: (*mut u8, *mut u8),
) {
    // Written out: as a loop, these few instructions would be what the processor takes for a stream.
    macro_rules! copy_pairs {
        ($($n:literal)*) => {$(
            // SAFETY: the caller promises it.
            unsafe { copy_pair::<$n, STEP, AHEAD>(page, source, next) };
        )*};
    }
    copy_pairs!(0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32 34 36 38 40 42 44 46 48 50 52 54 56 58 60 62);
}

/// Copies the lines of a page that are copied as number `N` and `N + 1`, and has the processor fetch those that are `AHEAD`.
///
/// # Safety
/// As for [`copy_page`].
#[target_feature(enable = "avx")]
#[inline]
unsafe fn copy_pair<const N: usize, const STEP: usize, const AHEAD: usize>(
    page: *mut u8,
    source: *const u8,
    next: (*mut u8, *mut u8),
) {
    for n in [N + AHEAD, N + AHEAD + 1] {
        let (page, source) = if n < LINES {
            (page, source)
        } else {
            (next.0, next.1.cast_const())
        };
        prefetch_line(source.wrapping_add(place::<STEP>(n)));
        prefetch_line_to_write(page.wrapping_add(place::<STEP>(n)));
    }
    for n in [N, N + 1] {
        let at = place::<STEP>(n);
        // SAFETY: the caller promises it: all places are in the page.
        unsafe { copy_line::<false>(page.wrapping_add(at), source.wrapping_add(at)) };
    }
}

/// Copies cache lines, and has the processor fetch the first `ahead` lines at `next`: a destination and a source.
///
/// # Safety
/// `from` and `to` are valid for `lines * LINE` bytes and do not overlap; `to` is aligned to `LINE`. The processor has AVX.
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

    #[test]
    fn pages_are_copied_whole_in_any_order_of_their_lines() {
        const PAGES: usize = 5;
        #[repr(align(4096))]
        #[derive(Clone, Copy)]
        struct Page([u8; PAGE]);
        if !is_there() {
            return;
        }
        for (in_order, stream) in [(false, false), (true, false), (false, true)] {
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
            // SAFETY: these are pages of two vectors, and the processor has AVX.
            unsafe {
                let (to, from) = ((a[0], &a[1..]), (b[0], &b[1..]));
                match stream {
                    false => copy_pages_by::<false>(in_order, to, from),
                    true => copy_pages_by::<true>(in_order, to, from),
                }
            }
            // All that have another behind them.
            for (to, from) in to.iter().zip(&from).take(PAGES - 1) {
                assert!(to.0 == from.0);
            }
            assert!(to[PAGES - 1].0 == [0; PAGE]);
        }
    }
}
