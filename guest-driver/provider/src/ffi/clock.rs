// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When a completion was, on the wall clock of the guest.
//!
//! The device has a clock of its own, of which the kernel tells the time on demand. Both clocks are
//! read together now and then: the difference is good for a while.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{context, sys, Errno};

/// How long a difference is used, nanoseconds by the device's clock. A wall clock that is set is
/// noticed after this time; one that is slewed, by 500 ppm at most, is wrong by half a millisecond
/// then.
const INTERVAL: u64 = 1_000_000_000;
/// The readings of which the quickest counts.
const READINGS: usize = 3;

/// The wall clock now, nanoseconds.
pub fn wall() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// The device's clock, read between two looks at the wall clock; nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    before: u64,
    device: u64,
    after: u64,
}

impl Reading {
    /// Reads both clocks now.
    ///
    /// # Safety
    /// The context is ours and alive.
    pub unsafe fn now(context: *mut sys::ibv_context) -> Result<Self, Errno> {
        let before = wall();
        // SAFETY: as the caller says.
        let device = unsafe { context::device_clock(context) }?;
        Ok(Self {
            before,
            device,
            after: wall(),
        })
    }

    /// How long it took.
    fn uncertainty(&self) -> u64 {
        // Backwards is a clock that was set meanwhile: the worst.
        self.after.checked_sub(self.before).unwrap_or(u64::MAX)
    }
}

/// Translates times of the device.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    /// What to add to a time of the device.
    difference: u64,
    /// When the clocks were read, by the device's.
    read: u64,
}

impl WallClock {
    /// Reads the clocks.
    pub fn new(mut now: impl FnMut() -> Result<Reading, Errno>) -> Result<Self, Errno> {
        let mut best = now()?;
        for _ in 1..READINGS {
            let next = now()?;
            if next.uncertainty() < best.uncertainty() {
                best = next;
            }
        }
        let middle = best
            .before
            .wrapping_add(best.after.wrapping_sub(best.before) / 2);
        Ok(Self {
            difference: middle.wrapping_sub(best.device),
            read: best.device,
        })
    }

    /// The wall clock's time at a time of the device; reads the clocks if that was long ago.
    pub fn at(&mut self, time: u64, now: impl FnMut() -> Result<Reading, Errno>) -> u64 {
        if time > self.read.saturating_add(INTERVAL) {
            // If the device does not answer any more, what we know must do.
            if let Ok(read) = Self::new(now) {
                *self = read;
            }
        }
        time.wrapping_add(self.difference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400_000_000_000;

    fn reading(before: u64, device: u64, after: u64) -> Result<Reading, Errno> {
        Ok(Reading {
            before,
            device,
            after,
        })
    }

    #[test]
    fn the_quickest_reading_counts() {
        let mut readings = [
            reading(DAY, 1000, DAY + 900),
            reading(DAY + 1000, 2000, DAY + 1010),
            // The clock was set back while we looked.
            reading(DAY + 2000, 3000, 5),
        ]
        .into_iter();
        let mut clock = WallClock::new(|| readings.next().unwrap()).unwrap();
        let none = || panic!("the clocks were read just now");
        assert_eq!(clock.at(2000, none), DAY + 1005);
        assert_eq!(clock.at(1500, none), DAY + 505);
        assert_eq!(clock.at(2000 + INTERVAL, none), DAY + 1005 + INTERVAL);
    }

    #[test]
    fn the_clocks_are_read_again_after_a_while() {
        let mut clock = WallClock::new(|| reading(DAY, 1000, DAY)).unwrap();
        // The wall clock was set forward by a day.
        let later = 1000 + 2 * INTERVAL;
        let set = || reading(2 * DAY, later, 2 * DAY);
        assert_eq!(clock.at(1000 + INTERVAL, set), DAY + INTERVAL);
        assert_eq!(clock.at(later, set), 2 * DAY);
        assert_eq!(clock.at(later + 7, || Err(Errno(libc::EIO))), 2 * DAY + 7);
        // A device that is gone leaves what is known.
        let much_later = later + 5 * INTERVAL;
        assert_eq!(
            clock.at(much_later, || Err(Errno(libc::EIO))),
            2 * DAY + 5 * INTERVAL
        );
        assert!(WallClock::new(|| Err(Errno(libc::EIO))).is_err());
    }
}
