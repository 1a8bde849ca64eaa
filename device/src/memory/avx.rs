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

/// How many lines ahead of what is copied the processor fetches.
const AHEAD: usize = 12;

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
            } else {
                copy_page(page, source, next);
            }
        }
        (page, source) = next;
    }
}

/// Where the line of a page is that is copied as number `n`, bytes. Whoever goes through a page line by line has the processor
/// fetch beyond its end what nobody needs, where the pages that follow each other lie elsewhere.
const fn place(n: usize) -> usize {
    const STEP: usize = 27;
    n % LINES * STEP % LINES * LINE
}

/// Copies a page, and has the processor fetch what is copied first of the next: a destination and a source.
///
/// # Safety
/// Both pages are valid for [`PAGE`] bytes and aligned to that, and do not overlap. The processor has AVX.
#[target_feature(enable = "avx")]
unsafe fn copy_page(page: *mut u8, source: *const u8, next: (*mut u8, *mut u8)) {
    // Written out: as a loop, these few instructions would be what the processor takes for a stream.
    macro_rules! copy_pairs {
        ($($n:literal)*) => {$(
            // SAFETY: the caller promises it.
            unsafe { copy_pair::<$n>(page, source, next) };
        )*};
    }
    copy_pairs!(0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32 34 36 38 40 42 44 46 48 50 52 54 56 58 60 62);
}

/// Copies the lines of a page that are copied as number `N` and `N + 1`, and has the processor fetch those that are [`AHEAD`].
///
/// # Safety
/// As for [`copy_page`].
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
