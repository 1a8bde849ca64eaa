// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of queue pairs by number (specification: "Objects and handles").
//!
//! Peers remember numbers for longer than their queue pairs live. A connection manager takes a
//! request that names a number it knows from an earlier connection for a stale one, and rejects it.
//! So a number comes again as late as possible: numbers are given in order, the first of a table at
//! random, and a reset does not start anew.
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;

use virtio_rdma_spec::verbs::MASK_24;

use super::Error;
use crate::footprint::{listed, Footprint, NoMemory, Share};

/// Numbers of queue pairs: 0 and 1 are those of the management queue pairs, and the last one stands
/// for the members of a multicast group.
pub const NUMBERS: RangeInclusive<u32> = 2..=MASK_24 - 1;
/// Places of a table that has any, at least.
const LEAST: usize = 16;

/// A random number of `range`, another one each time.
pub(super) fn random(range: RangeInclusive<u32>) -> u32 {
    let (first, last) = (u64::from(*range.start()), u64::from(*range.end()));
    let count = last.saturating_sub(first) + 1;
    // The hasher is seeded by the system, and each has a seed of its own. Nothing depends on the
    // number being hard to guess.
    let random = first + RandomState::new().hash_one(()) % count;
    u32::try_from(random).unwrap_or(*range.start())
}

/// A table of objects by number.
#[derive(Debug)]
pub struct Numbers<T> {
    /// None, or a power of two. Number n is at place n modulo that, so that no two objects whose
    /// numbers are near each other want the same. At most half of the places are taken.
    places: Vec<Option<(u32, T)>>,
    /// The numbers that may be given.
    range: RangeInclusive<u32>,
    /// The number to be given next, if its place is free.
    next: u32,
    max: u32,
    len: u32,
    /// For `places`.
    share: Share,
}

impl<T> Numbers<T> {
    /// An empty table, for at most `max` objects with numbers of a range within [`NUMBERS`].
    #[must_use]
    pub fn new(range: RangeInclusive<u32>, max: u32) -> Self {
        let range = *range.start().max(NUMBERS.start())..=*range.end().min(NUMBERS.end());
        Self::starting_at(random(range.clone()), range, max)
    }

    fn starting_at(next: u32, range: RangeInclusive<u32>, max: u32) -> Self {
        let count = range.end().saturating_sub(*range.start()).saturating_add(1);
        Self {
            places: Vec::new(),
            next,
            max: max.min(count),
            range,
            len: 0,
            share: Share::default(),
        }
    }

    /// The same table, whose memory is in an account.
    #[must_use]
    pub fn within(mut self, account: &Footprint) -> Self {
        self.share = account.empty();
        self
    }

    /// The number that is given after this one.
    fn after(&self, number: u32) -> u32 {
        if number >= *self.range.end() {
            *self.range.start()
        } else {
            number + 1
        }
    }

    /// What it takes of its account, without what its objects take, bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.share.bytes()
    }

    /// Number of objects.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is no object.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The place of a number. Without places it is none.
    #[inline(always)]
    fn place(&self, number: u32) -> usize {
        number as usize & self.places.len().wrapping_sub(1)
    }

    /// Stores the object that `make` makes of its number.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if the table is full or cannot grow, or what `make` fails with.
    pub fn insert_with(
        &mut self,
        make: impl FnOnce(u32) -> Result<T, Error>,
    ) -> Result<u32, Error> {
        if self.len >= self.max {
            return Err(Error::NoMemory);
        }
        if 2 * self.len as usize >= self.places.len() {
            self.grow()?;
        }
        // This ends: half of the places are free, and the numbers lead to all of them, or to more
        // than are taken.
        let mut number = self.next;
        let place = loop {
            let place = self.place(number);
            if matches!(self.places.get(place), Some(None)) {
                break place;
            }
            number = self.after(number);
        };
        let object = make(number).inspect_err(|_| self.tidy())?;
        if let Some(free) = self.places.get_mut(place) {
            *free = Some((number, object));
        }
        self.next = self.after(number);
        self.len += 1;
        Ok(number)
    }

    /// Doubles the places. Objects at different places get different ones again.
    fn grow(&mut self) -> Result<(), NoMemory> {
        let count = (2 * self.places.len()).max(LEAST);
        let before = self.share.bytes();
        let bytes = listed::<Option<(u32, T)>>(count);
        self.share.grow(bytes.saturating_sub(before))?;
        let mut places = Vec::new();
        if places.try_reserve_exact(count).is_err() {
            self.share.shrink(before);
            return Err(NoMemory);
        }
        places.resize_with(count, || None);
        for taken in std::mem::replace(&mut self.places, places)
            .into_iter()
            .flatten()
        {
            let place = self.place(taken.0);
            if let Some(free) = self.places.get_mut(place) {
                *free = Some(taken);
            }
        }
        Ok(())
    }

    /// The object of a number.
    #[inline]
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&T> {
        match self.places.get(self.place(number)) {
            Some(Some((there, object))) if *there == number => Some(object),
            _ => None,
        }
    }

    /// Takes the object of a number out.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let place = self.place(number);
        let taken = self.places.get_mut(place)?;
        let (_, object) = taken.take_if(|(there, _)| *there == number)?;
        self.len -= 1;
        self.tidy();
        Some(object)
    }

    /// Gives the memory of the table back, if there is no object.
    fn tidy(&mut self) {
        if self.len == 0 {
            self.places = Vec::new();
            self.share.shrink(0);
        }
    }

    /// All objects with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let taken = self.places.iter().flatten();
        taken.map(|(number, object)| (*number, object))
    }

    /// All objects, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten().map(|(_, object)| object)
    }

    /// Takes all objects out. Their numbers do not come again for that.
    pub fn clear(&mut self) -> Vec<T> {
        self.len = 0;
        self.share.shrink(0);
        let places = std::mem::take(&mut self.places);
        places
            .into_iter()
            .flatten()
            .map(|(_, object)| object)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn insert(numbers: &mut Numbers<u32>) -> u32 {
        numbers.insert_with(Ok).unwrap()
    }

    // D-OBJ-001, D-OBJ-002, D-OBJ-005.
    #[test]
    fn numbers_go_on_in_order_over_resets_and_skip_what_is_reserved() {
        let mut numbers = Numbers::starting_at(MASK_24 - 3, NUMBERS, 4);
        assert_eq!(insert(&mut numbers), MASK_24 - 3);
        assert_eq!(numbers.remove(MASK_24 - 3), Some(MASK_24 - 3));
        assert_eq!(numbers.remove(MASK_24 - 3), None);
        assert_eq!(insert(&mut numbers), MASK_24 - 2);
        assert_eq!(numbers.clear(), [MASK_24 - 2]);
        assert!(numbers.is_empty());
        assert_eq!(insert(&mut numbers), MASK_24 - 1);
        assert_eq!(insert(&mut numbers), 2);
        for gone in [0, 1, MASK_24 - 3, MASK_24 - 2, MASK_24, u32::MAX] {
            assert_eq!(numbers.get(gone), None);
        }
        assert_eq!(numbers.get(2), Some(&2));
    }

    #[test]
    fn the_limit_holds_and_a_failed_insert_leaves_no_trace() {
        let mut numbers = Numbers::starting_at(7, NUMBERS, 1);
        assert_eq!(numbers.get(7), None);
        let failed = numbers.insert_with(|_| Err(Error::Invalid));
        assert_eq!(failed, Err(Error::Invalid));
        assert_eq!(insert(&mut numbers), 7);
        assert_eq!(numbers.insert_with(Ok), Err(Error::NoMemory));
    }

    #[test]
    fn a_table_takes_memory_for_the_objects_that_there_are() {
        let account = Footprint::new(listed::<Option<(u32, u32)>>(32));
        let mut numbers = Numbers::new(NUMBERS, 300).within(&account);
        let given: Vec<_> = (0..16).map(|_| insert(&mut numbers)).collect();
        assert_eq!(account.bytes(), account.limit());
        assert_eq!(numbers.insert_with(Ok), Err(Error::NoMemory));
        for number in given {
            assert_eq!(numbers.remove(number), Some(number));
        }
        assert_eq!(account.bytes(), 0);
        insert(&mut numbers);
        numbers.clear();
        assert_eq!(account.bytes(), 0);
    }

    #[test]
    fn it_finds_what_is_there_and_nothing_else() {
        let mut numbers = Numbers::new(NUMBERS, 300);
        let mut model = BTreeMap::new();
        let mut given = Vec::new();
        // Some stay for long, so that later numbers meet them.
        for i in 0..5000usize {
            if model.len() == 300 || i % 3 == 2 {
                let at = i * 7919 % model.len();
                let number = *model.keys().nth(at).unwrap();
                assert_eq!(numbers.remove(number), model.remove(&number));
            } else {
                let number = insert(&mut numbers);
                assert_eq!(model.insert(number, number), None);
                given.push(number);
            }
        }
        assert_eq!(numbers.len() as usize, model.len());
        for number in &given {
            assert_eq!(numbers.get(*number), model.get(number));
        }
        let mut all: Vec<_> = numbers.iter().map(|(number, _)| number).collect();
        all.sort_unstable();
        assert!(all.iter().eq(model.keys()));
        assert!(numbers.iter_mut().count() == model.len());
        let count = given.len();
        given.sort_unstable();
        given.dedup();
        assert_eq!(given.len(), count, "a number came twice");
    }

    #[test]
    fn all_numbers_of_a_small_range_are_given() {
        let mut numbers = Numbers::new(40..=46, 100);
        let mut given: Vec<_> = (0..7).map(|_| insert(&mut numbers)).collect();
        given.sort_unstable();
        assert!(given.into_iter().eq(40..=46));
        assert_eq!(numbers.insert_with(Ok), Err(Error::NoMemory));
        assert_eq!(numbers.remove(43), Some(43));
        assert_eq!(insert(&mut numbers), 43);
    }

    #[test]
    fn tables_start_at_different_places() {
        let places: Vec<u32> = (0..8)
            .map(|_| insert(&mut Numbers::new(NUMBERS, 1)))
            .collect();
        assert!(places.iter().any(|place| *place != places[0]));
        assert!(places.iter().all(|place| NUMBERS.contains(place)));
        assert_eq!(random(5..=5), 5);
    }
}
