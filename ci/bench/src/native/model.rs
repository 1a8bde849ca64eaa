// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The model, which is the ceiling: two threads do the hand-overs that a WRITE from VM to VM takes,
//! and nothing else.
//!
//! One writes a 64-byte entry to a ring, its phase last, and sets a bit in a shared doorbell word
//! by an atomic OR, which is the full fence between the two. The other polls that word, takes it by
//! an exchange, reads entries as long as their phase says that they are new, copies the payload,
//! and writes a 32-byte completion, its phase last, which the first one polls: one entry after the
//! other. No permissions, no keys, no limits, no checks.
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, Result};
use arrayvec::ArrayVec;

use super::bed::{measure_rate, DEPTH};
use super::{pin, settle, Cores};

/// Entries of both rings.
const ENTRIES: usize = DEPTH as usize;
/// Most entries that may be read before their completions are written.
pub const MAX_BATCH: usize = 32;
/// Places that payload is copied from and to, in turn.
pub const PLACES: u64 = 8;
/// The phase, in the first word of an entry and the last of a completion.
const PHASE: u64 = 1;
/// In the first word of an entry: write a completion.
const SIGNALED: u64 = 2;
/// In the first word of an entry: the end.
const STOP: u64 = 4;

#[repr(align(64))]
#[derive(Default)]
struct Entry([AtomicU64; 8]);

#[repr(align(32))]
#[derive(Default)]
struct Completion([AtomicU64; 4]);

#[repr(align(128))]
#[derive(Default)]
struct Doorbell(AtomicU64);

/// What both threads share.
struct Shared {
    doorbell: Doorbell,
    entries: Box<[Entry]>,
    completions: Box<[Completion]>,
    source: Box<[Entry]>,
    destination: Box<[Entry]>,
}

fn many<T: Default>() -> Box<[T]> {
    (0..ENTRIES).map(|_| T::default()).collect()
}

fn phase(position: usize) -> u64 {
    if position & ENTRIES == 0 {
        PHASE
    } else {
        0
    }
}

impl Shared {
    fn new() -> Self {
        Self {
            doorbell: Doorbell::default(),
            entries: many(),
            completions: many(),
            source: many(),
            destination: many(),
        }
    }

    /// The worker's side, which writes completions when it has read so many entries, or all that
    /// there are.
    fn serve(&self, batch: usize) {
        let (mut position, mut completed) = (0, 0);
        loop {
            while self.doorbell.0.load(Ordering::Relaxed) == 0 {}
            self.doorbell.0.swap(0, Ordering::SeqCst);
            loop {
                let mut done = ArrayVec::<_, MAX_BATCH>::new();
                let start = position;
                let mut stop = false;
                while position - start < batch {
                    let entry = &self.entries[position % ENTRIES].0;
                    let flags = entry[0].load(Ordering::Acquire);
                    if flags & PHASE != phase(position) {
                        break;
                    }
                    let [_, id, to, key, _, _, from, length] =
                        [0, 1, 2, 3, 4, 5, 6, 7].map(|word| entry[word].load(Ordering::Relaxed));
                    let from = &self.source[from as usize % ENTRIES].0;
                    let to = &self.destination[to as usize % ENTRIES].0;
                    for (to, from) in to.iter().zip(from).take(length as usize / 8) {
                        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
                    }
                    if flags & SIGNALED != 0 {
                        done.push([id, length, key]);
                    }
                    stop |= flags & STOP != 0;
                    position += 1;
                }
                for words in &done {
                    let completion = &self.completions[completed % ENTRIES].0;
                    for (word, value) in completion.iter().zip(words) {
                        word.store(*value, Ordering::Relaxed);
                    }
                    completion[3].store(phase(completed), Ordering::Release);
                    completed += 1;
                }
                if stop {
                    return;
                }
                if position == start {
                    break;
                }
            }
        }
    }
}

/// The driver's side.
struct Driver<'a> {
    shared: &'a Shared,
    position: usize,
    polled: usize,
}

impl Driver<'_> {
    #[inline(always)]
    fn write(&mut self, length: u64, flags: u64) {
        let entry = &self.shared.entries[self.position % ENTRIES].0;
        let place = self.position as u64 % PLACES;
        let words = [self.position as u64, place, 7, 0, 0, place, length];
        for (word, value) in entry[1..].iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        entry[0].store(phase(self.position) | flags, Ordering::Release);
        self.position += 1;
    }

    #[inline(always)]
    fn ring(&self) {
        self.shared.doorbell.0.fetch_or(1, Ordering::SeqCst);
    }

    #[inline(always)]
    fn poll(&mut self) -> bool {
        let completion = &self.shared.completions[self.polled % ENTRIES].0;
        let last = completion[3].load(Ordering::Acquire);
        // The place of the next completion holds zeroes or what was there a lap ago: the other
        // phase.
        if last & PHASE != phase(self.polled) {
            return false;
        }
        let words = [0, 1, 2].map(|word| completion[word].load(Ordering::Relaxed));
        std::hint::black_box(words);
        self.polled += 1;
        true
    }
}

fn with_driver<T>(
    cores: Cores,
    batch: usize,
    measure: impl FnOnce(&mut Driver<'_>) -> Result<T>,
) -> Result<T> {
    let shared = Shared::new();
    settle();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| -> Result<()> {
            // Wherever it runs, it must run, or the other waits for ever.
            let pinned = pin(&[cores.worker]);
            shared.serve(batch.min(MAX_BATCH));
            pinned
        });
        let mut driver = Driver {
            shared: &shared,
            position: 0,
            polled: 0,
        };
        let result = measure(&mut driver);
        driver.write(0, STOP);
        driver.ring();
        worker.join().map_err(|_| anyhow!("the model panicked"))??;
        result
    })
}

/// One at a time: from posting to the completion, µs, sorted.
pub fn latency(cores: Cores, size: u64, rounds: usize) -> Result<Vec<f64>> {
    with_driver(cores, 1, |driver| {
        let mut times = Vec::with_capacity(rounds);
        for round in 0..rounds + rounds / 4 {
            let start = Instant::now();
            driver.write(size, SIGNALED);
            driver.ring();
            while !driver.poll() {}
            if round >= rounds / 4 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times)
    })
}

/// Millions per second, posted in lists of so many, of which the last is signalled. Completions are
/// written after so many entries: one is the model; with [`MAX_BATCH`] the other finds more
/// completions each time when it fetches their cache line.
pub fn rate(cores: Cores, size: u64, list: u64, batch: usize, time: Duration) -> Result<f64> {
    with_driver(cores, batch, |driver| {
        measure_rate(
            driver,
            list,
            time,
            |driver| {
                for _ in 1..list {
                    driver.write(size, 0);
                }
                driver.write(size, SIGNALED);
                driver.ring();
                Ok(())
            },
            |driver| {
                let mut count = 0;
                while count < 64 && driver.poll() {
                    count += 1;
                }
                Ok(count * list)
            },
        )
    })
}
