// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The receiver's half of a flow: which packets came, and what is answered (`spec/srd.md`,
//! "Receiving", "Answering"). It knows nothing of what packets are of.
use arrayvec::ArrayVec;

use super::super::packet::{Psn, HALF};
use super::super::srd_packet::{AnswerBytes, Refusal, Told, MOST_PATHS, MOST_REFUSALS, SPAN};

/// What becomes of a packet that comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// It is carried out or refused.
    New,
    /// It came before.
    Again,
    /// It is ahead of all that may come.
    Beyond,
}

/// The receiver's half of a flow.
#[derive(Debug)]
pub(super) struct Incoming {
    token: u64,
    /// The first packet that did not come.
    expected: u32,
    /// A bit for each from `expected` on, which came.
    came: [u64; WORDS],
    /// What was refused, and the sender does perhaps not know; with the first answer that told it.
    refusals: ArrayVec<(Refusal, Option<u32>), MOST_REFUSALS>,
    /// The last answer: answers are numbered, from one on.
    serial: u32,
    /// The last packet of each path.
    paths: [Option<Psn>; MOST_PATHS],
    /// The path on which one came last.
    last: u8,
    /// Packets with a mark of congestion.
    marks: u32,
    /// Packets that came since it was answered.
    owed: u32,
    not_now: bool,
}

const WORDS: usize = SPAN as usize / 64;

impl Incoming {
    /// That of a flow with this token, of which nothing came.
    pub(super) fn new(token: u64) -> Self {
        Self {
            token,
            expected: 0,
            came: [0; WORDS],
            refusals: ArrayVec::new(),
            serial: 0,
            paths: [None; MOST_PATHS],
            last: 0,
            marks: 0,
            owed: 0,
            not_now: false,
        }
    }

    pub(super) fn token(&self) -> u64 {
        self.token
    }

    /// A packet came on a path, whose sender has had answer `heard`, and perhaps all before. Returns
    /// what is to become of it.
    pub(super) fn arrives(
        &mut self,
        (number, heard): (u32, u32),
        (path, psn): (u8, Psn),
        marked: bool,
    ) -> Admission {
        self.owed += 1;
        self.not_now = false;
        self.last = path;
        self.marks = self.marks.wrapping_add(u32::from(marked));
        if let Some(last) = self.paths.get_mut(usize::from(path)) {
            if last.is_none_or(|last| psn.since(last) < HALF) {
                *last = Some(psn);
            }
        }
        // It is in all answers from the first on that told it.
        let known = |told: u32| heard.wrapping_sub(told) < 1 << 31;
        self.refusals
            .retain(|(_, told)| heard == 0 || !told.is_some_and(known));
        match number.wrapping_sub(self.expected) {
            ahead if ahead >= 1 << 31 => Admission::Again,
            ahead if ahead >= SPAN => Admission::Beyond,
            ahead if self.bit(ahead) => Admission::Again,
            _ => Admission::New,
        }
    }

    /// A packet came that cannot be carried out now: its VM is stopped.
    pub(super) fn not_now(&mut self) {
        self.owed += 1;
        self.not_now = true;
    }

    /// Whether one more packet may be refused, where answers have at most so many refusals. If not,
    /// it is as if it had not come.
    pub(super) fn may_refuse(&self, most: usize) -> bool {
        self.refusals.len() < most.min(MOST_REFUSALS)
    }

    /// A new packet was carried out.
    pub(super) fn took(&mut self, number: u32) {
        let ahead = number.wrapping_sub(self.expected);
        if let Some(word) = self.came.get_mut(ahead as usize / 64) {
            *word |= 1 << (ahead % 64);
        }
        let mut run = 0;
        for word in &self.came {
            let ones = word.trailing_ones();
            run += ones;
            if ones != 64 {
                break;
            }
        }
        self.expected = self.expected.wrapping_add(run);
        for _ in 0..run / 64 {
            self.came.rotate_left(1);
            self.came[WORDS - 1] = 0;
        }
        let bits = run % 64;
        if bits != 0 {
            let mut above = 0;
            for word in self.came.iter_mut().rev() {
                let whole = *word;
                *word = whole >> bits | above;
                above = whole << (64 - bits);
            }
        }
    }

    /// A new packet was refused, and [`Self::may_refuse`].
    pub(super) fn refused(&mut self, refusal: Refusal) {
        if self.refusals.try_push((refusal, None)).is_ok() {
            self.took(refusal.number);
        }
    }

    fn bit(&self, ahead: u32) -> bool {
        let word = self.came.get(ahead as usize / 64);
        word.is_some_and(|word| word & 1 << (ahead % 64) != 0)
    }

    /// Packets that came and have no answer.
    pub(super) fn owed(&self) -> u32 {
        self.owed
    }

    /// The path on which answers go: something has come on it.
    pub(super) fn path(&self) -> u8 {
        self.last
    }

    /// The answer to all that came.
    pub(super) fn answer(&mut self) -> AnswerBytes {
        self.owed = 0;
        // Zero is none.
        self.serial = self.serial.wrapping_add(1).max(1);
        for (_, told) in &mut self.refusals {
            told.get_or_insert(self.serial);
        }
        let paths = (0..).zip(&self.paths);
        AnswerBytes::new(&Told {
            not_now: self.not_now,
            token: self.token,
            expected: self.expected,
            came: self.came,
            marks: self.marks,
            serial: self.serial,
            paths: paths
                .filter_map(|(path, last)| last.map(|last| (path, last)))
                .collect(),
            refusals: self.refusals.iter().map(|(refusal, _)| *refusal).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        // D-SRD-013.
        /// Each packet is new once, in whatever order they come, and however often.
        #[test]
        fn each_packet_is_new_once(
            begin: u32,
            order in proptest::collection::vec(0..700u32, 0..2000),
        ) {
            let mut incoming = Incoming { expected: begin, ..Incoming::new(1) };
            let (mut came, mut expected) = (BTreeSet::new(), 0);
            for n in order {
                let number = begin.wrapping_add(n);
                let admission = incoming.arrives((number, 0), (0, Psn::default()), false);
                let right = match n {
                    n if came.contains(&n) => Admission::Again,
                    n if n >= expected + SPAN => Admission::Beyond,
                    _ => Admission::New,
                };
                prop_assert_eq!(admission, right);
                if right == Admission::New {
                    incoming.took(number);
                    came.insert(n);
                    while came.contains(&expected) {
                        expected += 1;
                    }
                }
                prop_assert_eq!(incoming.expected, begin.wrapping_add(expected));
                for ahead in 0..SPAN {
                    prop_assert_eq!(incoming.bit(ahead), came.contains(&(expected + ahead)));
                }
            }
        }
    }

    // D-SRD-016.
    /// A refusal is told until the sender has it, and no more are taken meanwhile.
    #[test]
    fn refusals_are_kept_until_they_are_known() {
        let mut incoming = Incoming::new(1);
        for number in 0..16 {
            let admission = incoming.arrives((number, 0), (0, Psn::default()), false);
            assert_eq!(admission, Admission::New);
            assert!(incoming.may_refuse(16));
            incoming.refused(Refusal {
                number,
                status: 13,
                reason: 0,
                timer: 12,
            });
        }
        assert!(!incoming.may_refuse(16));
        incoming.answer();
        incoming.arrives((20, 0), (0, Psn::default()), false);
        assert!(!incoming.may_refuse(16));
        incoming.answer();
        // The second answer has all that the first one had.
        incoming.arrives((21, 2), (0, Psn::default()), false);
        assert!(incoming.refusals.is_empty());
        assert_eq!(incoming.expected, 16);
    }
}
