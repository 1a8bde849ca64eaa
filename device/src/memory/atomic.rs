// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Atomic operations on words of guest memory (specification: "Atomic operations").
//!
//! They are atomic with respect to each other, and to what the guest's processors do: all are
//! instructions of the host.
use std::sync::atomic::{AtomicU64, Ordering};

/// Attempts before a word counts as contended. Only a guest that writes the word all the time uses
/// them up.
const ATTEMPTS: u32 = 1000;

/// An operation on a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Replaces the bits of `swap_mask` by those of `swap`, if the bits of `compare_mask` are those
    /// of `compare`.
    CompareSwap {
        /// What to compare with.
        compare: u64,
        /// What to compare.
        compare_mask: u64,
        /// What to write.
        swap: u64,
        /// Where to write.
        swap_mask: u64,
    },
    /// Adds to each field. Bits of `boundary` are the most significant bits of fields: no carry
    /// leaves them.
    FetchAdd {
        /// What to add.
        add: u64,
        /// Where fields end.
        boundary: u64,
    },
}

impl AtomicOperation {
    /// What the word becomes; `None` if it stays.
    #[must_use]
    pub fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::CompareSwap {
                compare,
                compare_mask,
                swap,
                swap_mask,
            } => ((old ^ compare) & compare_mask == 0)
                .then_some((old & !swap_mask) | (swap & swap_mask)),
            Self::FetchAdd { add, boundary } => {
                // With both most significant bits of a field clear nothing is carried out of it;
                // they are added without carry.
                let sum = (old & !boundary).wrapping_add(add & !boundary);
                Some(sum ^ ((old ^ add) & boundary))
            }
        }
    }

    /// Carries it out on a little-endian word of guest memory; returns what the word was. `None` if
    /// others change the word so fast that it did not succeed: nothing has happened then.
    #[must_use]
    pub fn execute(self, word: &AtomicU64) -> Option<u64> {
        let mut raw = word.load(Ordering::SeqCst);
        for _ in 0..ATTEMPTS {
            let old = u64::from_le(raw);
            let new = self.apply(old).unwrap_or(old).to_le();
            // Also where nothing changes: a comparison that fails is an operation in the order of
            // all others, too.
            match word.compare_exchange_weak(raw, new, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(old),
                Err(now) => raw = now,
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Stores a word that is given in the order of memory, as a whole and after all that was written
/// before.
pub fn store(word: &AtomicU64, bytes: [u8; 8]) {
    word.store(u64::from_ne_bytes(bytes), Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{region, GuestMemory};
    use proptest::prelude::*;

    /// The adder bit by bit, as InfiniBand's masked fetch and add is described.
    fn add_bitwise(old: u64, add: u64, boundary: u64) -> u64 {
        let mut result = 0;
        let mut carry = 0;
        for i in 0..64 {
            let bit = |v: u64| v >> i & 1;
            let sum = bit(old) + bit(add) + carry;
            result |= (sum & 1) << i;
            carry = if bit(boundary) == 1 { 0 } else { sum >> 1 };
        }
        result
    }

    fn swap_bitwise(old: u64, [compare, compare_mask, swap, swap_mask]: [u64; 4]) -> u64 {
        let bit = |v: u64, i: u32| v >> i & 1;
        let equal = (0..64).all(|i| bit(compare_mask, i) == 0 || bit(compare, i) == bit(old, i));
        if !equal {
            return old;
        }
        (0..64).fold(0, |new, i| {
            let from = if bit(swap_mask, i) == 1 { swap } else { old };
            new | bit(from, i) << i
        })
    }

    fn add(add: u64, boundary: u64) -> AtomicOperation {
        AtomicOperation::FetchAdd { add, boundary }
    }

    fn swap([compare, compare_mask, swap, swap_mask]: [u64; 4]) -> AtomicOperation {
        AtomicOperation::CompareSwap {
            compare,
            compare_mask,
            swap,
            swap_mask,
        }
    }

    /// Numbers among which equal bits and carries are frequent.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            Just(0),
            Just(u64::MAX),
            (0u32..64).prop_map(|i| 1 << i),
            (0u32..64).prop_map(|i| u64::MAX << i)
        ]
    }

    proptest! {
        #[test]
        fn fields_are_added_as_bit_by_bit(old in number(), n in number(), boundary in number()) {
            prop_assert_eq!(add(n, boundary).apply(old), Some(add_bitwise(old, n, boundary)));
        }

        #[test]
        fn without_boundary_it_is_addition(old in number(), n in number()) {
            prop_assert_eq!(add(n, 0).apply(old), Some(old.wrapping_add(n)));
            prop_assert_eq!(add(n, u64::MAX).apply(old), Some(old ^ n));
        }

        #[test]
        fn swaps_are_as_bit_by_bit(
            old in number(), compare in number(), compare_mask in number(), with in number(), swap_mask in number(),
        ) {
            let operands = [compare, compare_mask, with, swap_mask];
            let new = swap(operands).apply(old);
            prop_assert_eq!(new.unwrap_or(old), swap_bitwise(old, operands));
            // The same with a comparison that holds where it can.
            let operands = [old ^ (compare & !compare_mask), compare_mask, with, swap_mask];
            prop_assert_eq!(swap(operands).apply(old), Some(swap_bitwise(old, operands)));
        }
    }

    #[test]
    fn operations_act_on_guest_memory_and_return_what_was_there() {
        let memory = GuestMemory::new(vec![region(0, 1)]).unwrap();
        let word = memory.range_at(16, 8).unwrap().word().unwrap();
        assert!(memory.range_at(17, 8).unwrap().word().is_none());
        assert!(memory.range_at(16, 7).unwrap().word().is_none());
        assert_eq!(add(5, 0).execute(word), Some(0));
        assert_eq!(swap([4, u64::MAX, 9, u64::MAX]).execute(word), Some(5));
        assert_eq!(swap([5, u64::MAX, 9, u64::MAX]).execute(word), Some(5));
        assert_eq!(u64::from_le(word.load(Ordering::SeqCst)), 9);
        store(word, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(
            u64::from_le(word.load(Ordering::SeqCst)),
            0x0807_0605_0403_0201
        );
    }

    #[test]
    fn concurrent_additions_all_count() {
        let memory = GuestMemory::new(vec![region(0, 1)]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let word = memory.range_at(0, 8).unwrap().word().unwrap();
                    for _ in 0..10_000 {
                        while add(1, 0).execute(word).is_none() {}
                    }
                });
            }
        });
        let word = memory.range_at(0, 8).unwrap().word().unwrap();
        assert_eq!(u64::from_le(word.load(Ordering::SeqCst)), 40_000);
    }
}
