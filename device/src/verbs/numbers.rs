// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of objects by number, for objects that peers name: queue pairs, shared receive queues,
//! keys (specification: "Objects and handles").
//!
//! Peers remember numbers for longer than their queue pairs live. A connection manager takes a
//! request that names a number it knows from an earlier connection for a stale one, and rejects it.
//! So a number comes again as late as possible: all others come first, over resets, too.
//!
//! And peers are not to guess numbers: the order in which they come is a random one for each table.
//! So numbers that one VM was told say nothing about those of another, nor about others of its own.
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use virtio_rdma_spec::verbs::MASK_24;

use super::Error;
use crate::footprint::{listed, Footprint, NoMemory, Share};

/// Numbers that there may be: 0 and 1 are those of the management queue pairs, and the last one
/// stands for the members of a multicast group. No key has index 0.
pub const NUMBERS: RangeInclusive<u32> = 2..=MASK_24 - 1;
/// Places of a table that has any, at least.
const LEAST: usize = 16;
/// Rounds of the permutation. Three make one that is hard to tell from random for whom sees numbers,
/// and does not choose them, if what is mixed in each is; there is one more since that is no hash of a
/// cipher's strength, but much faster: the hash was a tenth of the time of a REG_MR.
const ROUNDS: usize = 4;
/// Numbers that are computed at once: the code and the key are at hand then.
const AT_ONCE: usize = 16;

/// What one round of the permutation mixes in: secret, so no log shows it.
struct Round {
    change: u64,
    factor: u64,
}

impl std::fmt::Debug for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Round").finish_non_exhaustive()
    }
}

impl Round {
    /// Depends on all bits of what it is given, and of the secret.
    fn mix(&self, half: u32) -> u32 {
        let product = u128::from(u64::from(half) ^ self.change) * u128::from(self.factor);
        let folded = (product >> 64) as u64 ^ product as u64;
        (folded >> 32) as u32 ^ folded as u32
    }
}

/// A random order of numbers, and how far they are given.
#[derive(Debug)]
pub struct Order {
    /// Choose the order.
    rounds: [Round; ROUNDS],
    /// Position of the next number.
    next: AtomicU32,
}

impl Default for Order {
    fn default() -> Self {
        // Its seed is the system's, and each has one of its own.
        let seed = RandomState::new();
        let round = |number| Round {
            change: seed.hash_one((number, 0)),
            factor: seed.hash_one((number, 1)) | 1,
        };
        Self {
            rounds: std::array::from_fn(round),
            next: AtomicU32::default(),
        }
    }
}

impl Order {
    /// The number at `position`, both below `count`: for each position another one.
    fn at(&self, position: u32, count: u32) -> u32 {
        let bits = u32::BITS - count.saturating_sub(1).leading_zeros();
        let half = bits.div_ceil(2);
        let mask = (1u32 << half) - 1;
        // A Feistel network permutes the numbers of 2 * `half` bits, which are at most four times as
        // many. From one that is below `count`, it leads through those that are not to the next one
        // that is.
        let mut number = position;
        loop {
            let (mut left, mut right) = (number >> half, number & mask);
            for round in &self.rounds {
                (left, right) = (right, left ^ round.mix(right) & mask);
            }
            number = left << half | right;
            if number < count {
                return number;
            }
        }
    }
}

/// An object that has a number, which it keeps.
pub trait Numbered {
    /// Its number.
    fn number(&self) -> u32;
}

/// A table of objects by number.
#[derive(Debug)]
pub struct Numbers<T> {
    /// None, or a power of two. Number n is at place n modulo that. At most half of the places are
    /// taken, and a number whose place is taken is left out.
    places: Vec<Option<T>>,
    /// The numbers that may be given, and their count.
    range: RangeInclusive<u32>,
    count: u32,
    /// The order in which they are.
    order: Arc<Order>,
    /// Numbers from the position `computed_from` on.
    computed: [u32; AT_ONCE],
    computed_from: Option<u32>,
    max: u32,
    len: u32,
    /// For `places`.
    share: Share,
}

impl<T: Numbered> Numbers<T> {
    /// An empty table, for at most `max` objects with numbers of a range within [`NUMBERS`].
    #[must_use]
    pub fn new(range: RangeInclusive<u32>, max: u32) -> Self {
        Self::in_order(Arc::default(), range, max)
    }

    /// The same, whose numbers go on where an earlier table with this order ended.
    #[must_use]
    pub fn in_order(order: Arc<Order>, range: RangeInclusive<u32>, max: u32) -> Self {
        let range = *range.start().max(NUMBERS.start())..=*range.end().min(NUMBERS.end());
        let count = range.end().saturating_sub(*range.start()).saturating_add(1);
        Self {
            places: Vec::new(),
            range,
            count,
            order,
            computed: [0; AT_ONCE],
            computed_from: None,
            max: max.min(count),
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

    /// Takes the next number of the order.
    fn next(&mut self) -> u32 {
        let (order, count) = (&self.order, self.count);
        // (An earlier table may have had more numbers.)
        let position = order.next.load(Ordering::Relaxed) % count;
        order.next.store((position + 1) % count, Ordering::Relaxed);
        let computed = |from| self.computed.get(position.checked_sub(from)? as usize);
        let number = match self.computed_from.and_then(computed) {
            Some(number) => *number,
            None => self.compute(position),
        };
        *self.range.start() + number
    }

    /// Computes the numbers from `position` on; returns the first.
    #[cold]
    fn compute(&mut self, position: u32) -> u32 {
        for (number, at) in self.computed.iter_mut().zip(position..self.count) {
            *number = self.order.at(at, self.count);
        }
        self.computed_from = Some(position);
        let [first, ..] = self.computed;
        first
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

    /// Stores the object with the number that it is given that `make` makes.
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
        // This ends: half of the places are free, and all numbers lead to all places, or to more
        // than are taken. As the order is random, every second number does at least.
        let (number, place) = loop {
            let number = self.next();
            let place = self.place(number);
            if matches!(self.places.get(place), Some(None)) {
                break (number, place);
            }
        };
        let object = make(number).inspect_err(|_| self.tidy())?;
        if let Some(free) = self.places.get_mut(place) {
            *free = Some(object);
        }
        self.len += 1;
        Ok(number)
    }

    /// What a table of so many places takes of its account. The least that it has is as much as a VM
    /// without objects takes, and in no account.
    fn accounted(places: usize) -> u64 {
        if places <= LEAST {
            0
        } else {
            listed::<Option<T>>(places)
        }
    }

    /// Doubles the places. Objects at different places get different ones again.
    fn grow(&mut self) -> Result<(), NoMemory> {
        let count = (2 * self.places.len()).max(LEAST);
        let before = self.share.bytes();
        let bytes = Self::accounted(count);
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
            let place = self.place(taken.number());
            if let Some(free) = self.places.get_mut(place) {
                *free = Some(taken);
            }
        }
        Ok(())
    }

    /// The object of a number.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&T> {
        self.candidate(number)
            .filter(|object| object.number() == number)
    }

    /// The only object that can have a number. It may have another one, as the caller finds out.
    #[inline(always)]
    pub(super) fn candidate(&self, number: u32) -> Option<&T> {
        self.places.get(self.place(number))?.as_ref()
    }

    /// The object of a number, to change it.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let place = self.place(number);
        let object = self.places.get_mut(place)?.as_mut()?;
        (object.number() == number).then_some(object)
    }

    /// Takes the object of a number out.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let place = self.place(number);
        let taken = self.places.get_mut(place)?;
        let object = taken.take_if(|object| object.number() == number)?;
        self.len -= 1;
        self.tidy();
        Some(object)
    }

    /// Gives the memory of the table back if there is no object, but for the least that it has: a VM
    /// that makes and destroys its only object would pay for a table each time.
    fn tidy(&mut self) {
        if self.len == 0 && self.places.len() > LEAST {
            self.places = Vec::new();
            self.share.shrink(0);
        }
    }

    /// All objects with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let taken = self.places.iter().flatten();
        taken.map(|object| (object.number(), object))
    }

    /// How many places there are, taken or free: what [`Self::iter`] has to walk.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// The objects at so many places from `place` on. As long as there are as many places, an object
    /// keeps its own.
    pub fn at_places(&self, place: usize, count: usize) -> impl Iterator<Item = &T> {
        self.places.iter().skip(place).take(count).flatten()
    }

    /// All objects, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }

    /// Takes all objects out. Their numbers do not come again for that.
    pub fn clear(&mut self) -> Vec<T> {
        self.len = 0;
        self.share.shrink(0);
        std::mem::take(&mut self.places)
            .into_iter()
            .flatten()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    impl Numbered for u32 {
        fn number(&self) -> u32 {
            *self
        }
    }

    fn insert(numbers: &mut Numbers<u32>) -> u32 {
        numbers.insert_with(Ok).unwrap()
    }

    #[test]
    fn objects_are_found_piece_by_piece() {
        let mut numbers = Numbers::new(NUMBERS, 1000);
        let mut all: Vec<_> = (0..1000).map(|_| insert(&mut numbers)).collect();
        let pieces = (0..numbers.places()).step_by(300);
        let found = pieces.flat_map(|place| numbers.at_places(place, 300));
        let mut found: Vec<_> = found.copied().collect();
        assert_eq!(numbers.at_places(numbers.places(), 300).count(), 0);
        all.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, all);
    }

    // D-OBJ-001, D-OBJ-002, D-OBJ-005.
    #[test]
    fn a_number_comes_again_after_all_others_over_resets_and_tables() {
        let range = 100..=1123;
        let order = Arc::new(Order::default());
        let table = || Numbers::in_order(order.clone(), range.clone(), 8);
        let mut numbers = table();
        let mut given = Vec::new();
        for i in 0..3 * 1024 {
            let number = insert(&mut numbers);
            assert!(range.contains(&number));
            assert_eq!(numbers.get(number), Some(&number));
            given.push(number);
            match i % 100 {
                50 => assert_eq!(numbers.clear(), [number]),
                70 => numbers = table(),
                _ => assert_eq!(numbers.remove(number), Some(number)),
            }
            assert_eq!(numbers.remove(number), None);
            assert!(numbers.is_empty());
        }
        for some in given.chunks(1024) {
            let mut all = some.to_vec();
            all.sort_unstable();
            assert!(all.into_iter().eq(range.clone()));
        }
        assert_eq!(given[..1024], given[1024..2048], "the order is the same");
        for gone in [0, 1, MASK_24, u32::MAX] {
            assert_eq!(numbers.get(gone), None);
        }
    }

    #[test]
    fn the_limit_holds_and_a_failed_insert_leaves_nothing() {
        let mut numbers = Numbers::new(7..=8, 1);
        assert_eq!(numbers.get(7), None);
        let failed = numbers.insert_with(|_| Err(Error::Invalid));
        assert_eq!(failed, Err(Error::Invalid));
        assert!(numbers.is_empty());
        let number = insert(&mut numbers);
        assert!((7..=8).contains(&number));
        assert_eq!(numbers.insert_with(Ok), Err(Error::NoMemory));
    }

    #[test]
    fn a_table_takes_memory_for_the_objects_that_there_are() {
        let account = Footprint::new(listed::<Option<u32>>(32));
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
            assert_eq!(numbers.get_mut(*number), model.get_mut(number));
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
    fn as_many_objects_fit_as_there_may_be() {
        const MOST: u32 = 1 << 20;
        let mut numbers = Numbers::new(NUMBERS, MOST);
        for _ in 0..MOST {
            insert(&mut numbers);
        }
        assert_eq!(numbers.insert_with(Ok), Err(Error::NoMemory));
        assert_eq!(numbers.len(), MOST);
        assert!(numbers.iter().all(|(number, object)| number == *object));
    }

    // D-OBJ-006. What is counted is as many as chance makes, give or take eight times the standard
    // deviation.
    #[test]
    fn numbers_are_spread_and_those_of_one_table_say_nothing_about_another() {
        const MANY: u32 = 1 << 16;
        let mut tables: Vec<_> = (0..4).map(|_| Numbers::new(NUMBERS, MANY)).collect();
        let mut given = Vec::new();
        for table in &mut tables {
            let numbers: Vec<u32> = (0..MANY).map(|_| insert(table)).collect();
            given.push(numbers);
        }
        let near = |expected: f64, got: usize| {
            (got as f64 - expected).abs() < 8.0 * expected.sqrt().max(2.0)
        };
        for numbers in &given {
            // In each sixteenth of the range, and with each value of the lowest four bits.
            for shift in [20, 0] {
                for value in 0..16 {
                    let there = numbers.iter().filter(|n| **n >> shift & 15 == value);
                    assert!(near(f64::from(MANY) / 16.0, there.count()));
                }
            }
            // The next number is not near the last one.
            let close = numbers.windows(2).filter(|n| n[0].abs_diff(n[1]) < 256);
            assert!(near(
                f64::from(MANY) * 512.0 / f64::from(1 << 24),
                close.count()
            ));
        }
        for (a, b) in [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)] {
            // Numbers of one table are those of another as often as those of nobody, in either.
            let own = &given[a];
            let both = own.iter().filter(|n| tables[b].get(**n).is_some());
            let chance = f64::from(MANY) * f64::from(MANY) / f64::from(1 << 24);
            assert!(near(chance, both.count()));
            let next = own.iter().filter(|n| tables[b].get(**n + 1).is_some());
            assert!(near(chance, next.count()));
            // And there is no distance at which they follow each other.
            let mut distances: Vec<_> = own.iter().zip(&given[b]).collect();
            distances.sort_unstable_by_key(|(a, b)| a.wrapping_sub(**b));
            let same =
                |w: &[(&u32, &u32)]| w[0].0.wrapping_sub(*w[0].1) == w[1].0.wrapping_sub(*w[1].1);
            let most = distances
                .chunk_by(|x, y| same(&[*x, *y]))
                .map(<[_]>::len)
                .max();
            assert!(most < Some(8), "{most:?}");
        }
    }

    #[test]
    fn steps_from_one_number_to_the_next_do_not_repeat() {
        let count = NUMBERS.end() - NUMBERS.start() + 1;
        let steps = |order: &Order| -> Vec<u32> {
            let numbers: Vec<_> = (0..2000)
                .map(|position| order.at(position, count))
                .collect();
            let steps = numbers.windows(2).map(|two| two[1].wrapping_sub(two[0]));
            steps.collect()
        };
        let orders = [Order::default(), Order::default()];
        let mut steps: Vec<_> = orders.iter().flat_map(steps).collect();
        let all = steps.len();
        steps.sort_unstable();
        steps.dedup();
        // Of so many random ones, one or none is there twice.
        assert!(all - steps.len() < 20, "{} of {all}", steps.len());
    }
}
