// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The run queue: which queue pair is polled next. Fair by VM first, then by queue pair: a VM with
//! a thousand busy queue pairs is polled as often as one with a single one.
use std::collections::VecDeque;

/// Entries of several owners, each known by a number: taken out from one owner after the other, and
/// in order of each.
///
/// It allocates only when it holds more than ever before.
#[derive(Debug)]
pub(super) struct RunQueue<T> {
    /// The owner of the next entry.
    owner: usize,
    /// Its entries; none only if nobody has any.
    queue: VecDeque<T>,
    /// The other owners with entries, in the order in which their entries are taken.
    others: VecDeque<(usize, VecDeque<T>)>,
    /// Empty queues of owners that had entries.
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for RunQueue<T> {
    fn default() -> Self {
        Self {
            owner: 0,
            queue: VecDeque::new(),
            others: VecDeque::new(),
            spare: Vec::new(),
        }
    }
}

impl<T> RunQueue<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Adds an entry behind the others of its owner.
    #[inline]
    pub(super) fn push(&mut self, owner: usize, entry: T) {
        if self.owner != owner {
            if !self.queue.is_empty() {
                self.push_other(owner, entry);
                return;
            }
            self.owner = owner;
        }
        self.queue.push_back(entry);
    }

    #[inline(never)]
    fn push_other(&mut self, owner: usize, entry: T) {
        // From the end: the owner that was taken from last is there.
        let known = self.others.iter_mut().rev().find(|(is, _)| *is == owner);
        if let Some((_, queue)) = known {
            queue.push_back(entry);
            return;
        }
        let mut queue = self.spare.pop().unwrap_or_default();
        queue.push_back(entry);
        self.others.push_back((owner, queue));
    }

    /// Takes the next entry. The next after it is another owner's, if there is one.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        let entry = self.queue.pop_front()?;
        if let Some((owner, queue)) = self.others.pop_front() {
            let owner = std::mem::replace(&mut self.owner, owner);
            let queue = std::mem::replace(&mut self.queue, queue);
            if queue.is_empty() {
                self.spare.push(queue);
            } else {
                self.others.push_back((owner, queue));
            }
        }
        Some(entry)
    }

    /// What [`Self::pop`] would take.
    pub(super) fn next(&self) -> Option<&T> {
        self.queue.front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_vm_with_many_queue_pairs_is_polled_as_often_as_one_with_one() {
        let mut queue = RunQueue::default();
        for qp in 0..100 {
            queue.push(1, qp);
        }
        queue.push(2, 0);
        let mut polls = [0, 0];
        for _ in 0..20 {
            // Each has more work every time.
            let is_b = polls[0] > polls[1];
            let qp = queue.pop().unwrap();
            polls[usize::from(is_b)] += 1;
            queue.push(if is_b { 2 } else { 1 }, qp);
        }
        assert_eq!(polls, [10, 10]);
    }

    proptest! {
        /// Nothing is lost, entries of an owner stay in order, and between two of them is at most
        /// one of each other owner.
        #[test]
        fn owners_alternate(owners in prop::collection::vec(0..4usize, 0..60)) {
            let mut queue = RunQueue::default();
            for (n, owner) in owners.iter().enumerate() {
                queue.push(*owner, (*owner, n));
            }
            let mut taken = Vec::new();
            while let Some(next) = queue.next().copied() {
                prop_assert_eq!(queue.pop(), Some(next));
                taken.push(next);
            }
            prop_assert!(queue.is_empty());
            prop_assert_eq!(taken.len(), owners.len());
            for owner in 0..4 {
                let own: Vec<_> = (0..taken.len()).filter(|at| taken[*at].0 == owner).collect();
                for pair in own.windows(2) {
                    prop_assert!(taken[pair[0]].1 < taken[pair[1]].1);
                    let mut between: Vec<_> =
                        taken[pair[0] + 1..pair[1]].iter().map(|(is, _)| *is).collect();
                    between.sort_unstable();
                    prop_assert!(between.windows(2).all(|two| two[0] != two[1]));
                }
            }
        }
    }
}
