// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of objects by handle.
use std::collections::VecDeque;

use super::Error;
use crate::footprint::{grown, listed, Footprint, NoMemory, Share};

/// Freed handles rest until this many are free, so that a stale handle meets nobody for a while.
const REST: usize = 256;

/// Handles go up to this, and then start anew.
const HIGHEST: u32 = 1 << 24;

/// A table of objects by handle, for objects that only their own VM names. Handles start at `first`
/// and are reused late.
///
/// It grows with the number of its objects, and takes no memory when there is none.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<Option<T>>,
    /// Handles that were freed; there is room for all.
    free: VecDeque<u32>,
    first: u32,
    /// Where `first` is at the start, and where it may be at most.
    lowest: u32,
    last: u32,
    max: u32,
    len: u32,
    /// For the capacity of `entries` and `free`.
    share: Share,
}

impl<T> Slab<T> {
    /// An empty table of handles `first` and up, for at most `max` objects.
    #[must_use]
    pub fn new(first: u32, max: u32) -> Self {
        Self::up_to(HIGHEST, first, max)
    }

    /// The same table, whose memory is in an account.
    #[must_use]
    pub fn within(mut self, account: &Footprint) -> Self {
        self.share = account.empty();
        self
    }

    fn up_to(highest: u32, first: u32, max: u32) -> Self {
        Self {
            entries: Vec::new(),
            free: VecDeque::new(),
            first,
            lowest: first,
            last: highest.saturating_sub(room(max)).max(first),
            max,
            len: 0,
            share: Share::default(),
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

    /// Stores the object that `make` makes of its handle.
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
        // The table may be larger than `max` by the handles that rest.
        let handle = if self.free.len() > REST {
            self.free.front().copied()
        } else {
            None
        };
        let handle = match handle {
            Some(handle) => handle,
            None => u32::try_from(self.entries.len())
                .ok()
                .and_then(|n| n.checked_add(self.first))
                .ok_or(Error::NoMemory)?,
        };
        let index = (handle - self.first) as usize;
        if index >= self.entries.capacity() {
            self.grow()?;
        }
        let object = make(handle).inspect_err(|_| {
            if self.len == 0 {
                self.release();
            }
        })?;
        match self.entries.get_mut(index) {
            Some(entry) => {
                *entry = Some(object);
                self.free.pop_front();
            }
            None => self.entries.push(Some(object)),
        }
        self.len += 1;
        Ok(handle)
    }

    /// Makes room for as many objects again, and for their handles when they are freed.
    #[cold]
    fn grow(&mut self) -> Result<(), NoMemory> {
        let (len, free) = (self.entries.len(), self.free.len());
        let capacity = grown(len);
        let before = self.share.bytes();
        let bytes = listed::<Option<T>>(capacity) + listed::<u32>(capacity);
        self.share.grow(bytes.saturating_sub(before))?;
        let entries = self.entries.try_reserve_exact(capacity - len);
        let reserved = entries.and_then(|()| self.free.try_reserve_exact(capacity - free));
        reserved.map_err(|_| {
            self.share.shrink(before);
            NoMemory
        })
    }

    /// Gives the memory of the table back, as there is no object. Handles go on behind those that
    /// were given.
    fn release(&mut self) {
        if self.last.saturating_sub(self.lowest) < REST as u32 {
            // There are too few others: those that were freed rest in the table.
            return;
        }
        let next = self.first.saturating_add(self.entries.len() as u32);
        self.first = if next <= self.last { next } else { self.lowest };
        drop(self.free_all());
    }

    fn free_all(&mut self) -> Vec<Option<T>> {
        self.free = VecDeque::new();
        self.share.shrink(0);
        std::mem::take(&mut self.entries)
    }

    /// The object of a handle.
    #[inline]
    #[must_use]
    pub fn get(&self, handle: u32) -> Option<&T> {
        self.entries
            .get(handle.checked_sub(self.first)? as usize)?
            .as_ref()
    }

    /// The object of a handle, to change it.
    pub fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        self.entries
            .get_mut(handle.checked_sub(self.first)? as usize)?
            .as_mut()
    }

    /// Takes the object of a handle out.
    pub fn remove(&mut self, handle: u32) -> Option<T> {
        let object = self
            .entries
            .get_mut(handle.checked_sub(self.first)? as usize)?
            .take()?;
        self.free.push_back(handle);
        self.len -= 1;
        if self.len == 0 {
            self.release();
        }
        Some(object)
    }

    /// All objects with their handles.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let first = self.first;
        self.entries
            .iter()
            .enumerate()
            .filter_map(move |(i, e)| Some((first.wrapping_add(i as u32), e.as_ref()?)))
    }

    /// Places of handles, taken or free: what [`Self::iter`] has to walk.
    #[must_use]
    pub fn places(&self) -> usize {
        self.entries.len()
    }

    /// The objects at the next `count` places from `place` on, and behind the last one from the
    /// first on, with their handles.
    pub fn iter_from(&self, place: usize, count: usize) -> impl Iterator<Item = (u32, &T)> {
        let all = self.entries.len();
        (0..count.min(all)).filter_map(move |i| {
            let place = (place % all + i) % all;
            let object = self.entries.get(place)?.as_ref()?;
            Some((self.first.wrapping_add(place as u32), object))
        })
    }

    /// All objects, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().filter_map(Option::as_mut)
    }

    /// Takes all objects out. Handles are as fresh as at the start.
    pub fn clear(&mut self) -> Vec<T> {
        self.first = self.lowest;
        self.len = 0;
        self.free_all().into_iter().flatten().collect()
    }
}

/// Handles that a table of `max` objects needs: some are freed and rest.
fn room(max: u32) -> u32 {
    max.saturating_add(REST as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    // D-OBJ-001.
    #[test]
    fn handles_are_reused_late_and_the_limit_holds() {
        let mut slab = Slab::new(2, 300);
        let first = slab.insert_with(Ok).unwrap();
        assert_eq!(first, 2);
        assert_eq!(slab.remove(first), Some(2));
        assert_eq!(slab.remove(first), None);
        for _ in 0..300 {
            assert_ne!(slab.insert_with(Ok).unwrap(), first);
        }
        assert_eq!(slab.insert_with(Ok), Err(Error::NoMemory));
        assert_eq!(slab.len(), 300);
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.get(0), None);
    }

    #[test]
    fn places_are_walked_in_turn() {
        let mut slab = Slab::new(5, 10);
        assert_eq!(slab.iter_from(3, 4).count(), 0);
        for _ in 0..5 {
            slab.insert_with(Ok).unwrap();
        }
        slab.remove(6);
        let walk = |place, count| -> Vec<u32> {
            slab.iter_from(place, count)
                .map(|(handle, _)| handle)
                .collect()
        };
        assert_eq!(slab.places(), 5);
        assert_eq!(walk(0, 3), [5, 7]);
        assert_eq!(walk(3, 3), [8, 9, 5]);
        assert_eq!(walk(7, 100), [7, 8, 9, 5]);
    }

    #[test]
    fn a_table_takes_memory_for_the_objects_that_there_are() {
        let account = Footprint::new(listed::<Option<u32>>(8) + listed::<u32>(8));
        let mut slab = Slab::new(1, 300).within(&account);
        let first: Vec<u32> = (0..8).map(|_| slab.insert_with(Ok).unwrap()).collect();
        assert_eq!(account.bytes(), account.limit());
        assert_eq!(slab.insert_with(Ok), Err(Error::NoMemory));
        assert_eq!(slab.len(), 8);
        for handle in &first {
            assert_eq!(slab.remove(*handle), Some(*handle));
        }
        assert_eq!(account.bytes(), 0);
        let next = slab.insert_with(Ok).unwrap();
        assert!(!first.contains(&next), "its time has not come");
        assert_eq!((slab.get(first[0]), slab.get(next)), (None, Some(&next)));
        assert_eq!(slab.clear(), [next]);
        assert_eq!(account.bytes(), 0);
        assert_eq!(slab.insert_with(Ok), Ok(1));
    }

    #[test]
    fn handles_of_an_empty_table_start_anew_in_the_end() {
        let last = 1 + REST as u32;
        let mut slab = Slab::up_to(last + room(300), 1, 300);
        let mut given = VecDeque::new();
        for _ in 0..1000 {
            let handle = slab.insert_with(Ok).unwrap();
            assert!((1..=last).contains(&handle) && !given.contains(&handle));
            assert_eq!(slab.remove(handle), Some(handle));
            given.push_back(handle);
            if given.len() == REST {
                given.pop_front();
            }
        }
        // Where there is nothing to choose from, they rest in the table.
        let mut full = Slab::up_to(300, 1, 300);
        assert_eq!(full.insert_with(Ok), Ok(1));
        assert_eq!(full.remove(1), Some(1));
        assert_eq!(full.insert_with(Ok), Ok(2));
    }

    #[test]
    fn a_failed_insert_leaves_no_trace() {
        let mut slab: Slab<u32> = Slab::new(0, 1);
        assert_eq!(
            slab.insert_with(|_| Err(Error::Invalid)),
            Err(Error::Invalid)
        );
        assert_eq!(slab.insert_with(Ok), Ok(0));
    }
}
