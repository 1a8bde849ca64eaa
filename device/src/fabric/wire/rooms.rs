// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where frames are that are not done with at once: those that wait for their VM, and packets that came
//! too early. Packets of a large burst stay where the burst was read, if they are of one VM, and the
//! next burst is read elsewhere; all others are copied. Rooms are used again, so that nothing is
//! allocated once there were as many.
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::footprint::{listed, Share};

/// Rooms that are kept for the next frames, at most: for single ones, and for bursts.
const MOST_SPARE: usize = 512;
const MOST_SPARE_BURSTS: usize = 32;

/// The bytes of a burst.
#[derive(Debug, Default)]
pub(super) struct Room {
    pub bytes: Vec<u8>,
    /// Its share of the account of the VM that keeps something in it: no other VM does, since nobody is to
    /// pay for what a neighbour keeps.
    share: OnceLock<Share>,
}

impl Clone for Room {
    /// Another one, with nothing in it.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Room {
    /// Where these bytes are, if they are a part of it.
    fn place_of(&self, part: &[u8]) -> Option<Range<usize>> {
        let start = part.as_ptr().addr();
        let start = start.checked_sub(self.bytes.as_ptr().addr())?;
        let end = start.checked_add(part.len())?;
        (end <= self.bytes.len()).then_some(start..end)
    }

    /// Nothing is kept in it any longer.
    pub(super) fn leave_account(&mut self) {
        self.share.take();
    }

    /// Whether it is in the account that `of` is of, from now on if it was in none.
    fn account(&self, of: &Share) -> bool {
        if let Some(share) = self.share.get() {
            return share.is_with(of);
        }
        let mut share = of.another();
        let bytes = listed::<u8>(self.bytes.capacity());
        share.grow(bytes).is_ok() && self.share.set(share).is_ok()
    }
}

/// Bytes that are kept.
#[derive(Debug)]
pub(super) struct Kept {
    bytes: Bytes,
    /// What it takes of the account of its VM.
    _share: Share,
}

#[derive(Debug)]
enum Bytes {
    /// A part of a burst.
    Part(Arc<Room>, Range<usize>),
    Copy(Vec<u8>),
}

impl Kept {
    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Part(room, place) => room.bytes.get(place.clone()).unwrap_or_default(),
            Bytes::Copy(bytes) => bytes,
        }
    }
}

/// Rooms for the next frames.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    single: Vec<Vec<u8>>,
    bursts: Vec<Arc<Room>>,
    /// That of the burst which is being taken, if packets may stay in it.
    pub current: Option<Arc<Room>>,
}

impl Rooms {
    /// Keeps bytes, and the caller keeps as many as `entry` of it; `None` if there is no room for
    /// both in the account that `share` is of.
    pub(super) fn keep(&mut self, bytes: &[u8], entry: u64, share: &Share) -> Option<Kept> {
        let mut share = share.another();
        share.grow(entry).ok()?;
        let part = self
            .current
            .as_ref()
            .and_then(|room| Some((room, room.place_of(bytes)?)))
            .filter(|(room, _)| room.account(&share));
        let bytes = if let Some((room, place)) = part {
            Bytes::Part(room.clone(), place)
        } else {
            let room = self.with(bytes);
            // It may be larger than what is in it.
            if share.grow(listed::<u8>(room.capacity())).is_err() {
                self.put_back(room);
                return None;
            }
            Bytes::Copy(room)
        };
        let _share = share;
        Some(Kept { bytes, _share })
    }

    /// What was kept is done with.
    pub(super) fn release(&mut self, kept: Kept) {
        match kept.bytes {
            Bytes::Copy(room) => self.put_back(room),
            Bytes::Part(mut room, _) => {
                if let Some(last) = Arc::get_mut(&mut room) {
                    last.leave_account();
                    if self.bursts.len() < MOST_SPARE_BURSTS {
                        self.bursts.push(room);
                    }
                }
            }
        }
    }

    /// A room for the next burst, if there is one.
    pub(super) fn for_burst(&mut self) -> Option<Arc<Room>> {
        self.bursts.pop()
    }

    /// A room with these bytes.
    pub(super) fn with(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut room = self.single.pop().unwrap_or_default();
        room.clear();
        room.extend_from_slice(bytes);
        room
    }

    /// Not all are kept that were ever needed at once.
    pub(super) fn put_back(&mut self, room: Vec<u8>) {
        if self.single.len() < MOST_SPARE {
            self.single.push(room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::footprint::Footprint;

    /// What the keeper of bytes keeps of each, bytes.
    const ENTRY: u64 = 20;

    fn room(len: usize) -> Arc<Room> {
        Arc::new(Room {
            bytes: (0..len).map(|at| at as u8).collect(),
            ..Room::default()
        })
    }

    #[test]
    fn packets_of_a_burst_stay_where_they_are_and_count_once() {
        const LEN: usize = 1000;
        let account = Footprint::new(1 << 20);
        let share = account.empty();
        let mut rooms = Rooms::default();
        let burst = room(LEN);
        rooms.current = Some(burst.clone());
        let kept = [0..10, 500..600, 990..1000].map(|place: Range<usize>| {
            let kept = rooms
                .keep(&burst.bytes[place.clone()], ENTRY, &share)
                .unwrap();
            assert_eq!(kept.bytes(), &burst.bytes[place.clone()]);
            assert!(kept.bytes().as_ptr() == burst.bytes[place].as_ptr());
            kept
        });
        assert_eq!(account.bytes(), listed::<u8>(LEN) + 3 * ENTRY);
        rooms.current = None;
        assert!(rooms.for_burst().is_none());
        // It is for the next burst when nobody has any part of it.
        let at = Arc::as_ptr(&burst);
        drop(burst);
        for kept in kept {
            assert!(rooms.bursts.is_empty());
            rooms.release(kept);
        }
        assert_eq!(account.bytes(), 0);
        assert!(Arc::as_ptr(&rooms.for_burst().unwrap()) == at);
    }

    #[test]
    fn other_bytes_are_copied() {
        let account = Footprint::new(1 << 20);
        let share = account.empty();
        let mut rooms = Rooms::default();
        let elsewhere = room(100);
        for current in [None, Some(room(100))] {
            rooms.current = current;
            let kept = rooms.keep(&elsewhere.bytes, ENTRY, &share).unwrap();
            assert_eq!(kept.bytes(), elsewhere.bytes);
            assert!(account.bytes() >= listed::<u8>(100) + ENTRY);
            rooms.release(kept);
            assert_eq!(account.bytes(), 0);
            assert_eq!(rooms.single.len(), 1);
        }
    }

    #[test]
    fn what_has_no_room_in_the_account_is_not_kept() {
        let account = Footprint::new(100);
        let share = account.empty();
        let mut rooms = Rooms::default();
        let burst = room(1000);
        assert!(rooms.keep(&[1; 10], 1000, &share).is_none());
        assert!(rooms.keep(&burst.bytes, ENTRY, &share).is_none());
        // There is room for a copy of a part, but not for the burst.
        let mut rooms = Rooms {
            current: Some(burst.clone()),
            ..Rooms::default()
        };
        let kept = rooms.keep(&burst.bytes[..10], ENTRY, &share).unwrap();
        assert!(matches!(kept.bytes, Bytes::Copy(_)));
        drop(kept);
        assert_eq!(account.bytes(), 0);
    }

    #[test]
    fn nobody_pays_for_what_a_neighbour_keeps() {
        let [first, second] = [0, 1].map(|_| Footprint::new(1 << 20));
        let mut rooms = Rooms::default();
        let burst = room(1000);
        rooms.current = Some(burst.clone());
        let parts = [&burst.bytes[..10], &burst.bytes[10..20]];
        let own = rooms.keep(parts[0], ENTRY, &first.empty()).unwrap();
        let other = rooms.keep(parts[1], ENTRY, &second.empty()).unwrap();
        assert!(matches!(own.bytes, Bytes::Part(..)));
        assert!(matches!(other.bytes, Bytes::Copy(_)));
        rooms.current = None;
        drop(burst);
        rooms.release(own);
        assert_eq!(first.bytes(), 0);
        assert!(second.bytes() != 0 && other.bytes().len() == 10);
    }

    #[test]
    fn rooms_that_are_spare_have_a_limit() {
        let account = Footprint::default();
        let share = account.empty();
        let mut rooms = Rooms::default();
        let kept: Vec<_> = (0..2 * MOST_SPARE)
            .map(|_| rooms.keep(&[1; 10], ENTRY, &share).unwrap())
            .collect();
        kept.into_iter().for_each(|kept| rooms.release(kept));
        assert_eq!(rooms.single.len(), MOST_SPARE);
        let kept: Vec<_> = (0..2 * MOST_SPARE_BURSTS)
            .map(|_| {
                let burst = room(10);
                rooms.current = Some(burst.clone());
                rooms.keep(&burst.bytes, ENTRY, &share).unwrap()
            })
            .collect();
        rooms.current = None;
        kept.into_iter().for_each(|kept| rooms.release(kept));
        assert_eq!(rooms.bursts.len(), MOST_SPARE_BURSTS);
    }
}
