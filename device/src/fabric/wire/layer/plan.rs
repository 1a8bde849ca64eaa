// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which devices have faults: others say so at any time, and a worker's port follows.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::port::Direction;
use super::settings::FaultSettings;
use crate::engine::vm::Segment;

/// A device as its frames have it: where they are, and its MAC address.
pub(crate) type Station = (Segment, [u8; 6]);

/// What happened to frames.
#[derive(Debug, Default)]
pub(crate) struct FaultCounts {
    pub(super) frames: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) damaged: AtomicU64,
    pub(super) repeated: AtomicU64,
    pub(super) reordered: AtomicU64,
    pub(super) marked: AtomicU64,
    /// Lost since too many wait.
    pub(super) overrun: AtomicU64,
}

impl FaultCounts {
    /// All of them, with their names.
    pub(crate) fn list(&self) -> [(&'static str, u64); 7] {
        [
            ("frames", &self.frames),
            ("lost", &self.lost),
            ("damaged", &self.damaged),
            ("duplicated", &self.repeated),
            ("reordered", &self.reordered),
            ("marked", &self.marked),
            ("overrun", &self.overrun),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }
}

/// Counts one more. Only the worker writes.
pub(super) fn count(counter: &AtomicU64) {
    let more = counter.load(Ordering::Relaxed).wrapping_add(1);
    counter.store(more, Ordering::Relaxed);
}

/// The faults of a device in a direction.
#[derive(Debug)]
pub(crate) struct Planned {
    pub station: Station,
    pub direction: Direction,
    pub settings: FaultSettings,
    pub counts: FaultCounts,
    /// Frames wait from this number on.
    hold: AtomicU64,
    /// The first frame that waits, if there is one.
    waits: AtomicU64,
}

/// The number of no frame.
const NONE: u64 = u64::MAX;

impl Planned {
    /// Whether frame `number` waits until it is let go.
    pub(super) fn holds(&self, number: u64) -> bool {
        number >= self.hold.load(Ordering::Relaxed)
    }

    /// Frame `first` is the first one that waits now.
    pub(super) fn set_waits(&self, first: Option<u64>) {
        self.waits.store(first.unwrap_or(NONE), Ordering::Release);
    }
}

fn planned(station: Station, direction: Direction, settings: FaultSettings) -> Arc<Planned> {
    Arc::new(Planned {
        station,
        direction,
        settings,
        counts: FaultCounts::default(),
        hold: AtomicU64::new(NONE),
        waits: AtomicU64::new(NONE),
    })
}

/// The faults of all devices.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Changes with each change.
    generation: AtomicU64,
    list: Mutex<Vec<Arc<Planned>>>,
}

impl Plan {
    fn locked(&self) -> MutexGuard<'_, Vec<Arc<Planned>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on frames of a device have these faults, or none. Frames count from 0 again.
    pub(crate) fn set(
        &self,
        station: Station,
        direction: Direction,
        settings: Option<FaultSettings>,
    ) {
        let mut list = self.locked();
        list.retain(|one| (one.station, one.direction) != (station, direction));
        list.extend(settings.map(|settings| planned(station, direction, settings)));
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Frames of a device wait from number `from` on, or no longer, until this is called again. Without faults,
    /// they count from now on. Returns how many there were, and the first one that waits: if it is before
    /// `from`, it goes on in a moment.
    pub(crate) fn hold(
        &self,
        station: Station,
        direction: Direction,
        from: Option<u64>,
    ) -> (u64, Option<u64>) {
        let mut list = self.locked();
        let of = |one: &&Arc<Planned>| (one.station, one.direction) == (station, direction);
        let planned = match list.iter().find(of) {
            Some(planned) => planned.clone(),
            None => {
                let planned = planned(station, direction, FaultSettings::default());
                list.push(planned.clone());
                planned
            }
        };
        let from = from.unwrap_or(NONE);
        if planned.hold.swap(from, Ordering::Relaxed) != from {
            self.generation.fetch_add(1, Ordering::Release);
        }
        let waits = planned.waits.load(Ordering::Acquire);
        let frames = planned.counts.frames.load(Ordering::Relaxed);
        (frames, (waits != NONE).then_some(waits))
    }

    /// All of them.
    pub(crate) fn list(&self) -> Vec<Arc<Planned>> {
        self.locked().clone()
    }

    /// Another one after each change.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}
