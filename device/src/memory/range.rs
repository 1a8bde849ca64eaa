// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contiguous ranges of guest memory, and copies between them.
use std::marker::PhantomData;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, AtomicU8, AtomicUsize, Ordering};

/// A contiguous range of guest memory.
#[derive(Debug, Clone, Copy)]
pub struct ContiguousRange<'a> {
    /// Valid for `len` bytes while the pages or the memory it came from live.
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) owner: PhantomData<&'a ()>,
}

impl Default for ContiguousRange<'_> {
    /// Nothing.
    fn default() -> Self {
        Self {
            ptr: std::ptr::dangling_mut(),
            len: 0,
            owner: PhantomData,
        }
    }
}

impl<'a> ContiguousRange<'a> {
    /// Length, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes, and the rest.
    #[must_use]
    pub fn split_at(self, len: usize) -> (Self, Self) {
        let len = len.min(self.len);
        (
            Self { len, ..self },
            Self {
                ptr: self.ptr.wrapping_add(len),
                len: self.len - len,
                ..self
            },
        )
    }

    /// The `len` bytes at `offset`, if they are in it.
    #[inline(always)]
    #[must_use]
    pub fn get(self, offset: u64, len: u64) -> Option<Self> {
        let left = (self.len as u64).checked_sub(offset)?;
        (len <= left).then(|| Self {
            ptr: self.ptr.wrapping_add(offset as usize),
            len: len as usize,
            ..self
        })
    }

    /// The 8-byte word that it starts with, if that is aligned.
    #[must_use]
    pub fn word(self) -> Option<&'a AtomicU64> {
        if self.len < 8 || self.ptr as usize % 8 != 0 {
            return None;
        }
        // SAFETY: `ptr` is valid for 8 bytes for `'a` (invariant of `ContiguousRange`) and aligned,
        // as just checked. Others change it only as memory, which atomics allow.
        Some(unsafe { &*self.ptr.cast::<AtomicU64>() })
    }
}

/// What a copy reads from: guest memory, or bytes of ours (inline data, results of atomic
/// operations).
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Valid for `len` bytes for `'a`.
    ptr: *const u8,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

impl Source<'_> {
    /// Has the processor fetch its start.
    #[inline(always)]
    pub fn prefetch(&self) {
        prefetch_line(self.ptr);
    }

    /// Its first byte.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Length, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes, and the rest.
    #[must_use]
    pub fn split_at(self, len: usize) -> (Self, Self) {
        let len = len.min(self.len);
        (
            Self { len, ..self },
            Self {
                ptr: self.ptr.wrapping_add(len),
                len: self.len - len,
                ..self
            },
        )
    }
}

impl<'a> From<ContiguousRange<'a>> for Source<'a> {
    fn from(range: ContiguousRange<'a>) -> Self {
        Self {
            ptr: range.ptr,
            len: range.len,
            owner: PhantomData,
        }
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self {
            ptr: bytes.as_ptr(),
            len: bytes.len(),
            owner: PhantomData,
        }
    }
}

/// Copies the common length of `from` to `to`, as memmove does. The bytes become visible in any
/// order.
#[inline]
pub fn copy(to: ContiguousRange<'_>, from: Source<'_>) {
    let len = to.len.min(from.len);
    // SAFETY: both are valid for `len` bytes (invariants of `ContiguousRange` and `Source`). They
    // may overlap, which `copy` allows. The guests may write at the same time: then the bytes are
    // theirs to lose; we never interpret them.
    unsafe { std::ptr::copy(from.ptr, to.ptr, len) };
}

/// Copies like [`copy`], but so that the last aligned word that is written becomes visible after
/// all else, and as a whole where it is 1, 2, 4 or 8 aligned bytes. (MPI, UCX, NCCL and perftest
/// poll on it.)
#[inline(always)]
pub fn copy_last(to: ContiguousRange<'_>, from: Source<'_>) {
    let len = to.len.min(from.len);
    if !copy_few(to, from) && len != 0 {
        copy_any(to, from, len);
    }
}

/// As [`copy_last`], if it is a few aligned words. Returns whether.
#[inline(always)]
fn copy_few(to: ContiguousRange<'_>, from: Source<'_>) -> bool {
    let len = to.len.min(from.len);
    let words = (to.ptr as usize | from.ptr as usize | len) % 8 == 0;
    let few = words && len.wrapping_sub(1) < SHORT;
    if few {
        // SAFETY: both are valid for `len` bytes (invariants of `ContiguousRange` and `Source`), of
        // words as just checked.
        unsafe { copy_words(to.ptr, from.ptr, len) };
    }
    few
}

/// As [`copy_last`], of `len` bytes, which both have: at least one.
// Out of line: loops over small messages keep their registers.
#[inline(never)]
fn copy_any(to: ContiguousRange<'_>, from: Source<'_>, len: usize) {
    // The bytes of the last aligned 8-byte word of the destination that are ours.
    let tail = (((to.ptr as usize).wrapping_add(len - 1) & 7) + 1).min(len);
    let bulk = len - tail;
    let tail_to = to.ptr.wrapping_add(bulk);
    let tail_from = from.ptr.wrapping_add(bulk);
    let mut word = [0u8; 8];
    // SAFETY: `bulk + tail == len`, for which both are valid (invariants of `ContiguousRange` and
    // `Source`); `word` has 8 bytes and `tail` <= 8. The atomics are aligned as their branch
    // checked, and within the destination.
    unsafe {
        if tail == 8 && (tail_from as usize) % 8 == 0 {
            word = (*tail_from.cast::<AtomicU64>())
                .load(Ordering::Relaxed)
                .to_ne_bytes();
        } else {
            std::ptr::copy_nonoverlapping(tail_from, word.as_mut_ptr(), tail);
        }
        std::ptr::copy(from.ptr, to.ptr, bulk);
        fence(Ordering::Release);
        if tail == 8 {
            (*tail_to.cast::<AtomicU64>()).store(u64::from_ne_bytes(word), Ordering::Release);
        } else if tail == 4 && (tail_to as usize) % 4 == 0 {
            let [a, b, c, d, ..] = word;
            (*tail_to.cast::<AtomicU32>())
                .store(u32::from_ne_bytes([a, b, c, d]), Ordering::Release);
        } else {
            for (i, byte) in word.iter().take(tail).enumerate() {
                (*tail_to.wrapping_add(i).cast::<AtomicU8>()).store(*byte, Ordering::Release);
            }
        }
    }
}

/// Most bytes that are copied in line.
const SHORT: usize = 64;

/// As [`copy_last`], of `len` bytes: at least a word, at most [`SHORT`], all of them words. All is
/// read before anything is written.
///
/// # Safety
/// `from` and `to` are valid for `len` bytes and aligned to 8.
#[inline(always)]
unsafe fn copy_words(to: *mut u8, from: *const u8, len: usize) {
    /// Reads `N` pairs of words, the last of which is the end of `len` bytes, and then writes them:
    /// those at the end may be among the first.
    ///
    /// # Safety
    /// `from` and `to` are valid for `len` bytes, which are at least `N` pairs and at most twice as
    /// many.
    #[inline(always)]
    unsafe fn ends<const N: usize>(to: *mut u8, from: *const u8, len: usize) {
        const PAIR: usize = size_of::<Pair>();
        let at = |i: usize| (i * PAIR, len - (N - i) * PAIR);
        // SAFETY: the caller promises that both are valid for all of these; nothing needs to be
        // aligned.
        unsafe {
            let pair = |at: usize| from.wrapping_add(at).cast::<Pair>().read_unaligned();
            let pairs: [_; N] = std::array::from_fn(|i| (pair(at(i).0), pair(at(i).1)));
            for (i, (first, last)) in pairs.into_iter().enumerate() {
                to.wrapping_add(at(i).0)
                    .cast::<Pair>()
                    .write_unaligned(first);
                to.wrapping_add(at(i).1)
                    .cast::<Pair>()
                    .write_unaligned(last);
            }
        }
    }
    /// What the processor moves at once.
    #[cfg(target_arch = "x86_64")]
    type Pair = std::arch::x86_64::__m128i;
    #[cfg(not(target_arch = "x86_64"))]
    type Pair = [u64; 2];
    let bulk = len - 8;
    // SAFETY: the caller promises all of it; each branch is for the lengths that it may be for.
    unsafe {
        let last = (*from.wrapping_add(bulk).cast::<AtomicU64>()).load(Ordering::Relaxed);
        match bulk {
            32.. => ends::<2>(to, from, bulk),
            16.. => ends::<1>(to, from, bulk),
            8.. => to.cast::<u64>().write(from.cast::<u64>().read()),
            _ => {}
        }
        (*to.wrapping_add(bulk).cast::<AtomicU64>()).store(last, Ordering::Release);
    }
}

/// Has the processor fetch what is needed soon: from the beginning of `object`, so many cache
/// lines.
#[inline(always)]
pub fn prefetch_from<T>(object: &T, lines: usize) {
    prefetch_lines(std::ptr::from_ref(object).cast(), lines);
}

/// Cache lines that an object is on, at most.
#[must_use]
pub const fn lines<T>() -> usize {
    size_of::<T>().div_ceil(LINE) + 1
}

/// Has the processor fetch cache lines, wherever they are.
#[inline(always)]
fn prefetch_lines(first: *const u8, count: usize) {
    for line in 0..count {
        prefetch_line(first.wrapping_add(line * LINE));
    }
}

/// Has the processor fetch a cache line, wherever it is.
#[inline(always)]
pub(super) fn prefetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: this changes nothing but caches, whatever the address; SSE is part of every
        // processor of this architecture.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Has the processor fetch a word that is to be changed soon, so that the change need not take it
/// from others a second time.
#[inline(always)]
pub fn prefetch_write(word: &AtomicU64) {
    prefetch_line_to_write(word.as_ptr().cast_const().cast());
}

/// Has the processor fetch a cache line that is to be written soon, wherever it is.
#[inline(always)]
pub(super) fn prefetch_line_to_write(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this changes nothing but caches, whatever the address; processors that do not know
    // the instruction do nothing for it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Where something is that will be needed.
#[derive(Debug, Default)]
pub struct Hint(AtomicUsize);

impl Hint {
    /// It is this, or nobody knows where.
    #[inline(always)]
    pub fn set<T>(&self, object: Option<&T>) {
        let address = object.map_or(0, |object| std::ptr::from_ref(object) as usize);
        self.0.store(address, Ordering::Relaxed);
    }

    /// Has the processor fetch it, and what follows, of `lines` cache lines in all.
    #[inline(always)]
    pub fn prefetch(&self, lines: usize) {
        prefetch_lines(self.0.load(Ordering::Relaxed) as *const u8, lines);
    }
}

/// Size of a cache line, bytes.
const LINE: usize = 64;

/// Reads up to `into.len()` bytes of `from`; returns how many.
pub fn fetch_bytes(into: &mut [u8], from: ContiguousRange<'_>) -> usize {
    let len = into.len().min(from.len);
    // SAFETY: `from` is valid for `len` bytes, `into` is ours and has them; they cannot overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.ptr, into.as_mut_ptr(), len) };
    len
}
