// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run queue: which queue pair is polled next. Fair by VM first, then by queue pair: the VM
//! that has had least of the worker's time is next, so that one with a thousand busy queue pairs
//! gets no more than one with a single one.
//!
//! The VM that is served goes on until it has had some more than the others ([`QUANTUM`]): what its
//! queue pairs need is in the caches then, and fetched ahead.
//!
//! What an owner uses while nobody else has entries is not charged, and so need not be measured:
//! to read the clock takes as long as a small message.
use std::collections::VecDeque;

/// How much more than another an owner that is polled may have used: a few microseconds of the
/// worker's time, in bytes that it could have copied.
const QUANTUM: u64 = 32 << 10;

/// The entries of an owner.
#[derive(Debug)]
struct OwnerQueue<T> {
    /// A number of its own.
    owner: usize,
    /// What it has had of the worker's time. What it left unused while it had no entry is lost:
    /// nobody can save up for a flood.
    used: u64,
    queue: VecDeque<T>,
}

impl<T> Default for OwnerQueue<T> {
    fn default() -> Self {
        Self {
            owner: 0,
            used: 0,
            queue: VecDeque::new(),
        }
    }
}

/// Entries of several owners: the next one is the first of the owner that is served, until that
/// has used [`QUANTUM`] more than the one that has used least.
///
/// It allocates only when it holds more than ever before.
#[derive(Debug)]
pub(super) struct RunQueue<T> {
    /// The owner of the next entry, or of the last one; without entries only if nobody has any.
    first: OwnerQueue<T>,
    /// The other owners with entries, in any order.
    others: Vec<OwnerQueue<T>>,
    /// What the owner of the last entry for which others waited had used: who comes anew begins
    /// there.
    floor: u64,
    /// Empty queues of owners that had entries.
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        Self {
            first: OwnerQueue::default(),
            others: Vec::new(),
            floor: 0,
            spare: Vec::new(),
        }
    }
}

impl<T> RunQueue<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.first.queue.is_empty()
    }

    /// Number of owners that have entries.
    #[cfg(test)]
    pub(super) fn owners(&self) -> usize {
        self.others.len() + usize::from(!self.is_empty())
    }

    /// Adds an entry behind the others of its owner. If there are none, `begin` is called with it
    /// and with the least that an owner that comes anew has used, and returns what this one has.
    #[inline]
    pub(super) fn push(&mut self, owner: usize, entry: T, begin: impl FnOnce(&T, u64) -> u64) {
        if self.first.owner != owner || self.first.queue.is_empty() {
            if !self.first.queue.is_empty() {
                self.push_other(owner, entry, begin);
                return;
            }
            self.first.owner = owner;
            self.first.used = begin(&entry, self.least());
        }
        self.first.queue.push_back(entry);
    }

    #[inline(never)]
    fn push_other(&mut self, owner: usize, entry: T, begin: impl FnOnce(&T, u64) -> u64) {
        if let Some(other) = self.others.iter_mut().find(|other| other.owner == owner) {
            other.queue.push_back(entry);
            return;
        }
        let used = begin(&entry, self.least());
        let mut queue = self.spare.pop().unwrap_or_default();
        queue.push_back(entry);
        self.others.push(OwnerQueue { owner, used, queue });
    }

    /// Takes the next entry.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        if self.others.is_empty() {
            return self.first.queue.pop_front();
        }
        self.pop_of_several()
    }

    /// What an owner that comes anew has used at least: it is served at once.
    fn least(&self) -> u64 {
        self.floor.saturating_sub(QUANTUM)
    }

    /// The same where several owners have entries.
    #[inline(never)]
    fn pop_of_several(&mut self) -> Option<T> {
        let least = self.others.iter_mut().min_by_key(|other| other.used);
        let most = self.first.used.checked_sub(QUANTUM);
        if let Some(other) = least.filter(|other| Some(other.used) <= most) {
            std::mem::swap(&mut self.first, other);
        }
        self.floor = self.floor.max(self.first.used);
        let entry = self.first.queue.pop_front();
        if self.first.queue.is_empty() {
            if let Some(other) = self.others.pop() {
                let emptied = std::mem::replace(&mut self.first, other);
                self.spare.push(emptied.queue);
            }
        }
        entry
    }

    /// Whether several owners have entries.
    #[inline]
    pub(super) fn has_several(&self) -> bool {
        !self.others.is_empty()
    }

    /// Whether another owner than this one has entries.
    #[inline]
    pub(super) fn has_others(&self, owner: usize) -> bool {
        self.first.owner != owner && !self.is_empty() || !self.others.is_empty()
    }

    /// An owner has used `cost` more.
    #[inline]
    pub(super) fn charge(&mut self, owner: usize, cost: u64) {
        if self.first.owner == owner {
            self.first.used = self.first.used.saturating_add(cost);
        } else if let Some(other) = self.others.iter_mut().find(|other| other.owner == owner) {
            other.used = other.used.saturating_add(cost);
        }
    }

    /// One of the entries that [`Self::pop`] takes soon.
    pub(super) fn next(&self) -> Option<&T> {
        self.first.queue.front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// A run queue, and what owners have used, as the VMs themselves know it.
    #[derive(Default)]
    struct World {
        queue: RunQueue<usize>,
        used: HashMap<usize, u64>,
        /// How much owners were charged.
        charged: HashMap<usize, u64>,
    }

    impl World {
        fn push(&mut self, owner: usize) {
            let used = self.used.entry(owner).or_default();
            self.queue.push(owner, owner, |_, least| {
                *used = least.max(*used);
                *used
            });
        }

        /// The next owner is polled, which costs what `cost` says.
        fn poll(&mut self, cost: impl Fn(usize) -> u64) -> usize {
            let owner = self.queue.pop().unwrap();
            let cost = cost(owner);
            *self.charged.entry(owner).or_default() += cost;
            if self.queue.has_others(owner) {
                *self.used.entry(owner).or_default() += cost;
                self.queue.charge(owner, cost);
            }
            owner
        }
    }

    #[test]
    fn a_vm_with_many_queue_pairs_gets_as_much_as_one_with_one() {
        let mut world = World::default();
        (0..100).for_each(|_| world.push(1));
        world.push(2);
        for _ in 0..1000 {
            // Each has more work every time, and a poll of the first costs ten times as much.
            let owner = world.poll(|owner| if owner == 1 { 10 * QUANTUM } else { QUANTUM });
            world.push(owner);
        }
        let charged = &world.charged;
        assert!(
            charged[&1].abs_diff(charged[&2]) <= 20 * QUANTUM,
            "{charged:?}"
        );
    }

    #[test]
    fn time_that_was_not_used_is_lost() {
        let mut world = World::default();
        for _ in 0..100 {
            world.push(1);
            world.poll(|_| 10 * QUANTUM);
        }
        // The second comes late. It has used nothing yet.
        world.charged.clear();
        (0..10).for_each(|_| world.push(1));
        for _ in 0..20 {
            world.push(2);
            let owner = world.poll(|_| 10 * QUANTUM);
            world.push(owner);
        }
        let charged = &world.charged;
        assert!(
            charged[&1].abs_diff(charged[&2]) <= 20 * QUANTUM,
            "{charged:?}"
        );
    }

    #[test]
    fn who_comes_anew_is_next_and_a_turn_is_several_short_polls() {
        let mut world = World::default();
        (0..4).for_each(|_| (1..=2).for_each(|owner| world.push(owner)));
        let mut changes = 0;
        let mut before = 0;
        for _ in 0..64 {
            let owner = world.poll(|_| QUANTUM / 8);
            changes += usize::from(owner != before);
            before = owner;
            world.push(owner);
        }
        assert!((2..=64 / 8 + 1).contains(&changes), "{changes}");
        world.push(3);
        assert_eq!(world.poll(|_| QUANTUM), 3);
    }

    proptest! {
        /// Nothing is lost, entries of an owner stay in order, and while all have entries nobody
        /// gets ahead of another by more than a quantum and the cost of one poll.
        #[test]
        fn owners_share(
            owners in prop::collection::vec(0..4usize, 0..200),
            costs in prop::collection::vec(1..2 * QUANTUM, 4),
        ) {
            let mut queue = RunQueue::default();
            let mut left = [0; 4];
            for owner in &owners {
                queue.push(*owner, (*owner, left[*owner]), |_, least| least);
                left[*owner] += 1;
            }
            let all = left;
            let mut used = [0u64; 4];
            while let Some((owner, number)) = queue.pop() {
                prop_assert_eq!(number, all[owner] - left[owner]);
                let present = (0..4).filter(|other| left[*other] != 0);
                let least = present.map(|other| used[other]).min().unwrap_or_default();
                prop_assert!(used[owner] < least + QUANTUM);
                left[owner] -= 1;
                used[owner] += costs[owner];
                queue.charge(owner, costs[owner]);
                prop_assert_eq!(queue.is_empty(), left == [0; 4]);
                prop_assert_eq!(queue.owners(), left.iter().filter(|left| **left != 0).count());
                prop_assert_eq!(queue.next().is_some(), left != [0; 4]);
            }
            prop_assert_eq!(left, [0; 4]);
        }
    }
}
