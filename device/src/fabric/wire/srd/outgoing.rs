// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sender's half of a flow: which packets are under way, on which path, which of them are lost,
//! and how many may be (`spec/srd.md`, "Sending again", "Paths", "Congestion"). It knows nothing of
//! what packets are of.
use std::collections::VecDeque;

use super::super::packet::{Psn, HALF};
use super::super::srd_packet::{Answer, Refusal, SPAN};
use crate::engine::vm::Congestion;

/// Paths that are used.
pub(super) const PATHS: usize = 4;
/// A packet is lost when so many that were sent on its path after it have come.
const OVERTAKEN: u32 = 3;
/// How long an answer may take, nanoseconds: at least, at most, and while nothing was measured.
const LEAST_WAIT: u64 = 5_000_000;
const MOST_WAIT: u64 = 100_000_000;
const FIRST_WAIT: u64 = 20_000_000;
/// Packets lost in a row that take a path down.
const LOST_IN_A_ROW: u32 = 8;
/// A path that is down is tried once in this time, nanoseconds.
const TRY_AGAIN: u64 = 100_000_000;
/// The oldest packet may have no answer for so long, nanoseconds, and so many attempts.
pub(super) const GIVE_UP: u64 = 4_000_000_000;
const ATTEMPTS: u32 = 8;
/// Packets that may be under way: at first, and at least.
const FIRST_WINDOW: u32 = 64;
const LEAST_WINDOW: u32 = 8;
/// Round trips that are longer than the least by this are a sign of congestion, nanoseconds.
const MOST_DELAY: u64 = 10_000_000;
/// Losses of a window that are none: one of so many.
const STRAY: u32 = 25;

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Sent,
    Lost,
    Answered,
}

/// A packet that was sent.
#[derive(Debug)]
struct InFlight<W> {
    what: W,
    path: usize,
    psn: Psn,
    /// When, nanoseconds, and how often.
    sent: u64,
    times: u32,
    state: State,
}

/// What a packet that is sent has of its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub number: u32,
    /// The last answer that came.
    pub heard: u32,
    pub path: u8,
    pub psn: Psn,
}

/// A way through the network.
#[derive(Debug, Default)]
struct Path {
    next: Psn,
    /// What was sent on it and has no answer, in order, by number and PSN. (What went again on another
    /// path is in here still.)
    order: VecDeque<(u32, Psn)>,
    under_way: u32,
    /// Answers took so long on average, and vary so much, once any came; nanoseconds.
    average: Option<u64>,
    variation: u64,
    least: u64,
    /// Time-outs since the last answer.
    time_outs: u32,
    lost_in_a_row: u32,
    /// It is down, and is tried next at this time, nanoseconds.
    down: Option<u64>,
    told: Option<Psn>,
}

impl Path {
    /// How long an answer may take, nanoseconds.
    fn wait(&self) -> u64 {
        let wait = match self.average {
            None => FIRST_WAIT,
            Some(average) => average.saturating_add(4 * self.variation),
        };
        let wait = wait.clamp(LEAST_WAIT, MOST_WAIT);
        (wait << self.time_outs.min(5)).min(MOST_WAIT)
    }

    /// An answer took so long. Returns whether that is too long.
    fn measured(&mut self, took: u64) -> bool {
        let Some(average) = &mut self.average else {
            (self.average, self.variation, self.least) = (Some(took), took / 2, took);
            return false;
        };
        self.variation = (3 * self.variation + average.abs_diff(took)) / 4;
        *average = (7 * *average + took) / 8;
        self.least += self.least / 1024;
        self.least = self.least.min(took);
        took > self.least.saturating_add(MOST_DELAY)
    }
}

/// How many packets may be under way.
#[derive(Debug)]
struct Window {
    packets: u32,
    /// It stays as it is: the network holds senders back itself.
    fixed: bool,
    /// There was a sign of congestion.
    slow: bool,
    /// Packets that were answered since it grew.
    since: u32,
    /// Packets before this one have halved it.
    halved: u32,
    /// Packets of this window that were answered, and lost on paths that are up.
    answered: u32,
    lost: u32,
}

impl Window {
    fn new(congestion: Congestion) -> Self {
        let fixed = congestion == Congestion::None;
        Self {
            packets: if fixed { SPAN } else { FIRST_WINDOW },
            fixed,
            slow: false,
            since: 0,
            halved: 0,
            answered: 0,
            lost: 0,
        }
    }

    fn answered(&mut self) {
        self.answered += 1;
        if self.answered >= self.packets {
            (self.answered, self.lost) = (0, 0);
        }
        if self.slow {
            self.since += 1;
            if self.since < self.packets {
                return;
            }
            self.since = 0;
        }
        self.packets = (self.packets + 1).min(SPAN);
    }

    /// A packet was lost, of those before `next`.
    fn lost(&mut self, number: u32, next: u32) {
        self.lost += 1;
        if self.lost > self.packets / STRAY {
            self.congested(number, next);
        }
    }

    /// The network is congested, as packet `number` shows: once for all before `next`.
    fn congested(&mut self, number: u32, next: u32) {
        if number.wrapping_sub(self.halved) < 1 << 31 && !self.fixed {
            self.packets = (self.packets / 2).max(LEAST_WINDOW);
            self.slow = true;
            self.halved = next;
            (self.since, self.answered, self.lost) = (0, 0, 0);
        }
    }
}

/// The sender's half of a flow; `W` says what a packet is of.
#[derive(Debug)]
pub(super) struct Outgoing<W> {
    /// The first packet that has no answer, and all from there on.
    oldest: u32,
    flight: VecDeque<InFlight<W>>,
    under_way: u32,
    lost: VecDeque<u32>,
    paths: [Path; PATHS],
    window: Window,
    marks: u32,
    /// The last answer that came, zero if none did.
    heard: u32,
    /// Since when the oldest packet waits for nothing but its answer, nanoseconds.
    since: u64,
}

impl<W: Copy> Outgoing<W> {
    /// That of a flow that begins.
    pub(super) fn new(congestion: Congestion) -> Self {
        Self {
            oldest: 0,
            flight: VecDeque::new(),
            under_way: 0,
            lost: VecDeque::new(),
            paths: Default::default(),
            window: Window::new(congestion),
            marks: 0,
            heard: 0,
            since: 0,
        }
    }

    /// What it takes, bytes, at most.
    pub(super) const FOOTPRINT: u64 = {
        let entries = size_of::<InFlight<W>>() + size_of::<u32>();
        // A path may have as many as there are, some of them twice.
        let order = 2 * PATHS * size_of::<(u32, Psn)>();
        2 * SPAN as u64 * (entries + order) as u64
    };

    /// The number of the next packet that is new.
    pub(super) fn next(&self) -> u32 {
        self.oldest.wrapping_add(self.flight.len() as u32)
    }

    /// Whether all that was sent has its answer.
    pub(super) fn is_idle(&self) -> bool {
        self.flight.is_empty()
    }

    fn at(&mut self, number: u32) -> Option<&mut InFlight<W>> {
        let at = number.wrapping_sub(self.oldest);
        self.flight.get_mut(at as usize)
    }

    /// Whether one more packet may be under way.
    fn has_room(&self) -> bool {
        self.under_way < self.window.packets
    }

    /// Sends a packet of this for the first time, at time `now`. `None` if none may be sent now.
    pub(super) fn send(&mut self, what: W, now: u64) -> Option<Stamp> {
        if !self.has_room() || self.flight.len() as u32 >= SPAN {
            return None;
        }
        if self.flight.is_empty() {
            self.since = now;
        }
        let number = self.next();
        self.flight.push_back(InFlight {
            what,
            path: 0,
            psn: Psn::default(),
            sent: now,
            times: 0,
            state: State::Lost,
        });
        self.stamp(number, now)
    }

    /// Sends the next packet that was lost, and says what it is of.
    pub(super) fn send_lost(&mut self, now: u64) -> Option<(W, Stamp)> {
        while self.has_room() {
            let number = self.lost.pop_front()?;
            let Some(one) = self.at(number).filter(|one| one.state == State::Lost) else {
                continue;
            };
            let what = one.what;
            return Some((what, self.stamp(number, now)?));
        }
        None
    }

    /// What keeps the peer from answering does not count.
    pub(super) fn heard(&mut self, now: u64) {
        self.since = now;
    }

    /// Something is under way instead of what was: that was given up, or fails.
    pub(super) fn replace(&mut self, number: u32, what: W) {
        if let Some(one) = self.at(number) {
            one.what = what;
        }
    }

    /// Sends the oldest packet once more, on a path that is down, if it is time to try that.
    pub(super) fn try_path(&mut self, now: u64) -> Option<(W, Stamp)> {
        let what = self.flight.front()?.what;
        let due = |path: &&mut Path| path.down.is_some_and(|at| at <= now);
        let at = self
            .paths
            .iter()
            .position(|path| path.down.is_some_and(|at| at <= now))?;
        let path = self.paths.iter_mut().find(due)?;
        path.down = Some(now.saturating_add(TRY_AGAIN));
        let psn = path.next;
        path.next = psn.after(1);
        let stamp = Stamp {
            number: self.oldest,
            heard: self.heard,
            path: at as u8,
            psn,
        };
        Some((what, stamp))
    }

    /// The packet that has no answer for the longest time, as it was sent last.
    pub(super) fn oldest(&self) -> Option<(W, Stamp)> {
        let one = self.flight.front()?;
        let stamp = Stamp {
            number: self.oldest,
            heard: self.heard,
            path: one.path as u8,
            psn: one.psn,
        };
        Some((one.what, stamp))
    }

    /// A packet goes on the path with the fewest under way.
    fn stamp(&mut self, number: u32, now: u64) -> Option<Stamp> {
        let all_down = self.paths.iter().all(|path| path.down.is_some());
        let paths = self.paths.iter_mut().enumerate();
        let usable = paths.filter(|(_, path)| all_down || path.down.is_none());
        let (at, path) = usable.min_by_key(|(_, path)| path.under_way)?;
        let psn = path.next;
        path.next = psn.after(1);
        path.order.push_back((number, psn));
        path.under_way += 1;
        self.under_way += 1;
        let heard = self.heard;
        let one = self.at(number)?;
        (one.path, one.psn, one.sent, one.state) = (at, psn, now, State::Sent);
        one.times = one.times.saturating_add(1);
        Some(Stamp {
            number,
            heard,
            path: at as u8,
            psn,
        })
    }

    /// An answer came at time `now`. `tell` is told of each packet that has one, and whether it was
    /// refused. Returns whether there were any.
    pub(super) fn answered(
        &mut self,
        answer: &Answer<'_>,
        now: u64,
        tell: &mut dyn FnMut(W, Option<Refusal>),
    ) -> bool {
        if answer.not_now {
            self.since = now;
        }
        if answer.serial.wrapping_sub(self.heard) < 1 << 31 {
            self.heard = answer.serial;
        }
        let mut any = false;
        for refusal in answer.refusals() {
            any |= self.resolve(refusal.number, now, Some(refusal), tell);
        }
        let before = answer.expected.wrapping_sub(self.oldest);
        if before <= self.flight.len() as u32 {
            for n in 0..before {
                any |= self.resolve(self.oldest.wrapping_add(n), now, None, tell);
            }
        }
        for number in answer.came() {
            any |= self.resolve(number, now, None, tell);
        }
        let next = self.next();
        let more = answer.marks.wrapping_sub(self.marks);
        if more != 0 && more < 1 << 31 {
            self.marks = answer.marks;
            self.window.congested(self.oldest, next);
        }
        for (path, psn) in answer.paths() {
            self.heard_of(path.into(), psn, now);
        }
        let before = self.oldest;
        while self
            .flight
            .front()
            .is_some_and(|one| one.state == State::Answered)
        {
            self.flight.pop_front();
            self.oldest = self.oldest.wrapping_add(1);
        }
        if self.oldest != before {
            self.since = now;
        }
        any
    }

    /// A packet has its answer. Returns false if it had one before.
    fn resolve(
        &mut self,
        number: u32,
        now: u64,
        refusal: Option<Refusal>,
        tell: &mut dyn FnMut(W, Option<Refusal>),
    ) -> bool {
        let next = self.next();
        let Some(one) = self.at(number).filter(|one| one.state != State::Answered) else {
            return false;
        };
        let (what, path, sent) = (one.what, one.path, one.sent);
        let was_under_way = one.state == State::Sent;
        let once = one.times == 1;
        one.state = State::Answered;
        if let Some(path) = self.paths.get_mut(path) {
            if was_under_way {
                path.under_way = path.under_way.saturating_sub(1);
            }
            if once && path.measured(now.saturating_sub(sent)) {
                self.window.congested(number, next);
            }
        }
        self.under_way -= u32::from(was_under_way);
        self.window.answered();
        tell(what, refusal);
        true
    }

    /// Packets up to this one came on a path.
    fn heard_of(&mut self, at: usize, told: Psn, now: u64) {
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        let sent = path.next.since(told);
        let newer = path
            .told
            .is_none_or(|before| matches!(told.since(before), 1..HALF));
        if sent == 0 || sent >= HALF || !newer {
            return;
        }
        path.told = Some(told);
        (path.time_outs, path.lost_in_a_row) = (0, 0);
        path.down = None;
        // What is at the front has no answer, or has gone again.
        while let Some(path) = self.paths.get_mut(at) {
            let Some((number, psn)) = path.order.front().copied() else {
                return;
            };
            let overtaken = told.since(psn);
            let overtaken = (OVERTAKEN..HALF).contains(&overtaken);
            if self.is_under_way(number, at, psn) && !overtaken {
                return;
            }
            self.drop_first(at, now, false);
        }
    }

    fn is_under_way(&mut self, number: u32, path: usize, psn: Psn) -> bool {
        let one = self.at(number);
        one.is_some_and(|one| one.state == State::Sent && (one.path, one.psn) == (path, psn))
    }

    /// Takes the first packet out of what is under way on a path. It is lost, if it has no answer yet.
    fn drop_first(&mut self, at: usize, now: u64, quietly: bool) {
        let next = self.next();
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        let Some((number, psn)) = path.order.pop_front() else {
            return;
        };
        if !self.is_under_way(number, at, psn) {
            return;
        }
        if let Some(one) = self.at(number) {
            one.state = State::Lost;
        }
        self.lost.push_back(number);
        self.under_way -= 1;
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        path.under_way = path.under_way.saturating_sub(1);
        if quietly {
            return;
        }
        path.lost_in_a_row += 1;
        if path.lost_in_a_row >= LOST_IN_A_ROW && path.down.is_none() {
            path.down = Some(now.saturating_add(TRY_AGAIN));
            self.lose_all(at, now);
        } else {
            self.window.lost(number, next);
        }
    }

    /// All on a path goes again.
    fn lose_all(&mut self, at: usize, now: u64) {
        while self
            .paths
            .get(at)
            .is_some_and(|path| !path.order.is_empty())
        {
            self.drop_first(at, now, true);
        }
    }

    /// When the first packet of a path should have its answer.
    fn due(&mut self, at: usize) -> Option<u64> {
        loop {
            let (number, psn) = *self.paths.get(at)?.order.front()?;
            if self.is_under_way(number, at, psn) {
                let sent = self.at(number)?.sent;
                return Some(sent.saturating_add(self.paths.get(at)?.wait()));
            }
            self.paths.get_mut(at)?.order.pop_front();
        }
    }

    /// When there is something to do, nanoseconds, if no answer comes.
    pub(super) fn deadline(&mut self) -> Option<u64> {
        if self.is_idle() {
            return None;
        }
        let due = (0..PATHS).filter_map(|at| self.due(at)).min();
        let tries = self.paths.iter().filter_map(|path| path.down).min();
        due.into_iter().chain(tries).min()
    }

    /// Time has come to `now`: what has waited for too long is lost. Returns false if nothing of the
    /// flow has come for so long that it is given up.
    pub(super) fn expire(&mut self, now: u64) -> bool {
        for at in 0..PATHS {
            if self.due(at).is_none_or(|due| now < due) {
                continue;
            }
            let again = self.paths.get(at).is_some_and(|path| path.time_outs != 0);
            self.drop_first(at, now, false);
            if again {
                self.lose_all(at, now);
            }
            if let Some(path) = self.paths.get_mut(at) {
                path.time_outs = path.time_outs.saturating_add(1);
                if path.time_outs >= 3 && path.down.is_none() {
                    path.down = Some(now.saturating_add(TRY_AGAIN));
                }
            }
        }
        let oldest = self.flight.front();
        let tried = oldest.is_some_and(|one| one.times >= ATTEMPTS);
        !(tried && now.saturating_sub(self.since) >= GIVE_UP)
    }
}
