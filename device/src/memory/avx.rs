// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copies by AVX, with what comes next fetched meanwhile; and past the caches, by stores that do not allocate in them, if
//! `STREAM`.
use super::guest::Host;
use super::span::prefetch_line;

/// Size of a page, bytes.
pub const PAGE: usize = 4096;

/// Size of a cache line, bytes.
pub const LINE: usize = 64;

/// Pages after the next of which the processor is to find out where they are.
const SOON: usize = 1;

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
        if let (Some(page), Some(source)) = (to.1.get(i + SOON), from.1.get(i + SOON)) {
            prefetch_line(page.0);
            prefetch_line(source.0);
        }
        for line in 0..PAGE / LINE {
            let at = line * LINE;
            prefetch_line(next_source.0.wrapping_add(at));
            if !STREAM {
                prefetch_line(next_page.0.wrapping_add(at));
            }
            // SAFETY: the caller promises it.
            unsafe { copy_line::<STREAM>(page.wrapping_add(at), source.wrapping_add(at)) };
        }
        (page, source) = (next_page.0, next_source.0);
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
    next: (*const u8, *const u8),
    ahead: usize,
) {
    let ahead = ahead.min(lines);
    for line in 0..ahead {
        let at = line * LINE;
        prefetch_line(next.1.wrapping_add(at));
        if !STREAM {
            prefetch_line(next.0.wrapping_add(at));
        }
        // SAFETY: the caller promises it.
        unsafe { copy_line::<STREAM>(to.wrapping_add(at), from.wrapping_add(at)) };
    }
    for line in ahead..lines {
        let at = line * LINE;
        // SAFETY: the caller promises it.
        unsafe { copy_line::<STREAM>(to.wrapping_add(at), from.wrapping_add(at)) };
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
