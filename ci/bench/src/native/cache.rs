// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a cache line takes from one core to the other and back: the floor of everything.
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;

use super::{pin, settle, Cores};

/// A cache line, and the one that the processor may fetch with it.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

const STOP: u64 = u64::MAX;

/// Round trip, µs: there in the first line and back in the second, which may be the same.
fn ping_pong(cores: Cores, there: &Line, back: &Line, rounds: u64) -> Result<f64> {
    settle();
    let (there, back) = (&there.0, &back.0);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || -> Result<()> {
            pin(&[cores.worker])?;
            let mut expected = 1;
            loop {
                let value = there.load(Ordering::Acquire);
                if value == STOP {
                    return Ok(());
                }
                if value == expected {
                    back.store(value + 1, Ordering::Release);
                    expected += 2;
                }
            }
        });
        let mut value = 1;
        let mut start = Instant::now();
        for round in 0..rounds + rounds / 4 {
            if round == rounds / 4 {
                start = Instant::now();
            }
            there.store(value, Ordering::Release);
            while back.load(Ordering::Acquire) != value + 1 {
                // A thread that could not be pinned never answers.
                if other.is_finished() {
                    break;
                }
            }
            value += 2;
        }
        let elapsed = start.elapsed();
        there.store(STOP, Ordering::Release);
        match other.join() {
            Ok(result) => result?,
            Err(_) => anyhow::bail!("a thread panicked"),
        }
        Ok(elapsed.as_secs_f64() * 1e6 / rounds as f64)
    })
}

/// With one line that both write, µs.
pub fn one_line(cores: Cores, rounds: u64) -> Result<f64> {
    let line = Line::default();
    ping_pong(cores, &line, &line, rounds)
}

/// With a line for each direction, µs.
pub fn two_lines(cores: Cores, rounds: u64) -> Result<f64> {
    ping_pong(cores, &Line::default(), &Line::default(), rounds)
}

/// How much the round trip may differ before and after a repetition, as a part of it.
const STEADY: f64 = 0.15;
/// How often a repetition is tried.
const TRIES: usize = 12;

/// Measures while the two cores stay as far from each other as they are: in a virtual machine they
/// are not always the same ones of the host, and everything that goes from one to the other then
/// takes another time. What was measured while that changed is measured again.
pub fn steady<T>(cores: Cores, mut measure: impl FnMut() -> Result<T>) -> Result<T> {
    const ROUNDS: u64 = 2_000;
    let mut before = one_line(cores, ROUNDS)?;
    let mut tries = 0;
    loop {
        let result = measure()?;
        let after = one_line(cores, ROUNDS)?;
        tries += 1;
        if (after - before).abs() <= STEADY * before || tries == TRIES {
            return Ok(result);
        }
        before = after;
    }
}
