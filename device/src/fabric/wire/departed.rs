// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs that were destroyed. A program may end with a message that comes; if the
//! acknowledgement of that is lost, its requester sends it again. For a while it is told then that it
//! was carried out, as TCP does in TIME-WAIT (RFC 9293, section 3.6).
use std::collections::VecDeque;
use std::sync::Weak;

use rustc_hash::FxHashMap;

use super::frame::Route;
use super::receiver::Completed;
use super::sender::Peer;
use crate::engine::vm::{Segment, Vm};

/// For so long, nanoseconds: longer than requesters with the usual time-outs try.
const STAY: u64 = 10_000_000_000;
/// So many are kept, at most. They are in no VM's account.
const MOST: usize = 1024;

/// One that was destroyed.
#[derive(Debug)]
pub(super) struct Departed {
    pub vm: Weak<Vm>,
    pub segment: Segment,
    pub route: Route,
    pub peer: Peer,
    pub completed: Completed,
    /// When, nanoseconds.
    pub since: u64,
}

/// Those of a while.
#[derive(Debug, Default)]
pub(super) struct DepartedList {
    /// By their numbers; one after the other may have had the same.
    all: FxHashMap<u32, Departed>,
    /// In the order in which they were destroyed, with when that was.
    order: VecDeque<(u32, u64)>,
}

impl DepartedList {
    /// The queue pair with this number was destroyed.
    pub(super) fn add(&mut self, number: u32, one: Departed) {
        let over = |(_, since): &(u32, u64)| one.since.saturating_sub(*since) >= STAY;
        while self.order.len() >= MOST || self.order.front().is_some_and(over) {
            let Some((first, since)) = self.order.pop_front() else {
                break;
            };
            if self.all.get(&first).is_some_and(|one| one.since == since) {
                self.all.remove(&first);
            }
        }
        self.order.push_back((number, one.since));
        self.all.insert(number, one);
    }

    /// The one with this number, if it was destroyed not long before time `now`.
    pub(super) fn get(&self, number: u32, now: u64) -> Option<&Departed> {
        let one = self.all.get(&number)?;
        (now.saturating_sub(one.since) < STAY).then_some(one)
    }
}
