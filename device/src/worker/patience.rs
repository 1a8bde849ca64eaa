// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a worker without work looks for some before it sleeps.
//!
//! Looking saves a wake-up if work comes in time, and posting then costs the guest no exit. In vain
//! it costs the CPU, and where there are fewer CPUs than threads that want one it is worse: whoever
//! would bring the work may be waiting for this very CPU. A worker cannot see that; it sees that
//! looking fails, and that work comes as soon as it sleeps.
//!
//! There, who posts one work request after the other would notify a worker that sleeps of nearly
//! each, at a much higher price than that of a message. So instead of a sleep, which a notification
//! ends, the worker may take a nap: nobody notifies it, and what is posted meanwhile is carried out
//! together when it ends. Who waits for each answer would wait for the end of the nap, so the
//! worker tries from time to time, and goes on only while it finds several messages each time.
//!
//! There is no clock and no I/O here. All times are nanoseconds.
use std::time::Duration;

/// Longer than this between two looks with a turn between them at most, which copies a MiB: we had
/// lost the CPU.
const LOST_CPU: u64 = 400_000;

/// For so long others are taken to need our CPU: looking for [`LEAST`] is enough. A thread that
/// uses its share up by looking is not put before others when it is woken.
const CONTENDED: u64 = 100_000_000;

/// Looking for the longest time has to find work so many times as often as it fails. Else it costs
/// more than it saves.
const WORTH: u32 = 4;

/// So many failures more than that are not chance.
const FAILURES: u32 = 16;

/// A sleep is short if it is shorter than the longest time to look, times this. How long the work
/// itself took to come is less than what we see, which contains the way of the notification.
const SOON: u64 = 8;

/// The least time to look, unless the longest is less: a peer that has its CPU and answers at once
/// needs no more.
const LEAST: u64 = 3_000;

/// How long a nap is.
const NAP: u64 = 50_000;

/// So many messages after a nap were worth it.
const STREAM: u64 = 4;

/// A nap is tried after so many short sleeps at first, then after twice as many each time that it
/// was not worth it, up to the most.
const FIRST_TRY: u32 = 16;
const LAST_TRY: u32 = 1024;

/// What a worker does that has looked for work for as long as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Sleeps until it is notified.
    Sleep,
    /// Does nothing for so long, and needs no notification.
    Nap(u64),
}

/// What a worker has learnt of waiting.
#[derive(Debug)]
pub struct Patience {
    /// The longest time to look.
    most: u64,
    /// The time that suits how often work came of late.
    budget: u64,
    /// Failures of looking for the longest time, each counted [`WORTH`] times, less the successes.
    failures: u32,
    /// Others need our CPU, until this time.
    contended_until: u64,
    /// Short sleeps since the last nap, and how many of them are enough for another.
    sleeps: u32,
    enough: u32,
    /// The last nap was worth it.
    streams: bool,
}

impl Patience {
    /// To look for `most` at most.
    pub fn new(most: Duration) -> Self {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        Self {
            most,
            budget: most,
            failures: 0,
            contended_until: 0,
            sleeps: 0,
            enough: FIRST_TRY,
            streams: false,
        }
    }

    /// How long to look from the end of the work to sleep.
    pub fn budget(&self, now: u64) -> u64 {
        if self.is_contended(now) {
            self.budget.min(LEAST)
        } else {
            self.budget
        }
    }

    /// What to do after looking in vain.
    pub fn rest(&mut self, now: u64) -> Rest {
        let again = self.streams || self.sleeps >= self.enough;
        if !again || !self.is_contended(now) {
            return Rest::Sleep;
        }
        self.sleeps = 0;
        Rest::Nap(NAP)
    }

    /// After a nap there were so many messages to carry out.
    pub fn napped(&mut self, messages: u64) {
        self.streams = messages >= STREAM;
        self.enough = if self.streams {
            FIRST_TRY
        } else {
            (2 * self.enough).min(LAST_TRY)
        };
    }

    /// Two looks in a row, the second `now`.
    pub fn looked(&mut self, before: u64, now: u64) {
        if now.saturating_sub(before) > LOST_CPU {
            self.contended(now);
        }
    }

    /// Looking found work.
    pub fn found(&mut self) {
        self.failures = self.failures.saturating_sub(1);
    }

    /// A sleep after looking in vain, from `since` to `now`.
    pub fn slept(&mut self, since: u64, now: u64) {
        let least = LEAST.min(self.most);
        if now.saturating_sub(since) >= self.most.saturating_mul(SOON) {
            self.budget = (self.budget / 2).max(least);
            return;
        }
        self.sleeps = self.sleeps.saturating_add(1);
        if self.budget(since) == self.most {
            self.failures += WORTH;
            if self.failures > FAILURES * WORTH {
                self.contended(now);
            }
        }
        // Work comes often: look for it longer next time.
        self.budget = self.budget.saturating_mul(2).clamp(least, self.most);
    }

    fn is_contended(&self, now: u64) -> bool {
        now < self.contended_until
    }

    fn contended(&mut self, now: u64) {
        self.failures = 0;
        self.contended_until = now.saturating_add(CONTENDED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 50_000;

    fn patience() -> Patience {
        Patience::new(Duration::from_nanos(MOST))
    }

    /// Looks until `work` comes, or in vain and then sleeps until then. Returns the time after.
    fn wait(patience: &mut Patience, now: u64, work: u64) -> u64 {
        let end = now + patience.budget(now);
        if work <= end {
            patience.found();
        } else {
            patience.slept(end, work);
        }
        work
    }

    #[test]
    fn work_that_comes_in_time_keeps_us_looking() {
        let mut patience = patience();
        let mut now = 0;
        for n in 0..10_000 {
            // One in ten comes late.
            let gap = if n % 10 == 0 { MOST + 10_000 } else { 20_000 };
            now = wait(&mut patience, now, now + gap);
            assert_eq!(patience.budget(now), MOST);
        }
    }

    #[test]
    fn work_that_comes_only_when_we_sleep_makes_us_sleep() {
        let mut patience = patience();
        let mut now = 0;
        for n in 0..10_000 {
            // Who answers has our CPU every other time.
            let gap = if n % 2 == 0 {
                2_000
            } else {
                patience.budget(now) + 5_000
            };
            now = wait(&mut patience, now, now + gap);
        }
        assert!(now < 10_000 * 6_000, "{now}");
        // And what comes at once is still found by looking.
        assert!(patience.budget(now) >= 2_000);
    }

    #[test]
    fn losing_the_cpu_shortens_looking_for_a_while() {
        let mut patience = patience();
        patience.looked(0, LOST_CPU);
        assert_eq!(patience.budget(LOST_CPU), MOST);
        patience.looked(0, LOST_CPU + 1);
        assert_eq!(patience.budget(LOST_CPU + 1), LEAST);
        assert_eq!(patience.budget(LOST_CPU + 1 + CONTENDED), MOST);
    }

    #[test]
    fn rare_work_is_not_looked_for_and_frequent_work_is_again() {
        let mut patience = patience();
        for n in 0..10 {
            patience.slept(n * 1_000_000_000, (n + 1) * 1_000_000_000 - 1);
        }
        let now = 10_000_000_000;
        assert_eq!(patience.budget(now), LEAST);
        for _ in 0..10 {
            patience.slept(now, now + 1_000);
        }
        assert_eq!(patience.budget(now), MOST);
    }

    #[test]
    fn who_is_not_to_look_does_not() {
        let mut patience = Patience::new(Duration::ZERO);
        for n in 0..100 {
            patience.slept(n, n + 1);
            assert_eq!(patience.budget(n), 0);
            assert_eq!(patience.rest(n), Rest::Sleep);
        }
    }

    /// Sleeps and naps for a second with a message every `pause`, or, if `waits`, `pause` after the
    /// last was carried out, while others need the CPU. Returns the number of sleeps and naps.
    fn second(patience: &mut Patience, pause: u64, waits: bool) -> (u32, u32) {
        let (mut sleeps, mut naps) = (0, 0);
        let mut now = 1_000_000_000;
        while now < 2_000_000_000 {
            patience.contended(now);
            match patience.rest(now) {
                Rest::Sleep => {
                    sleeps += 1;
                    patience.slept(now, now + pause);
                    now += pause;
                }
                Rest::Nap(nap) => {
                    naps += 1;
                    patience.napped(if waits { 1 } else { nap / pause });
                    now += nap;
                }
            }
        }
        (sleeps, naps)
    }

    #[test]
    fn who_posts_on_and_on_is_not_made_to_notify_us() {
        let mut patience = patience();
        let (sleeps, naps) = second(&mut patience, 5_000, false);
        assert_eq!(sleeps, FIRST_TRY);
        assert!(naps > 19_000, "{naps}");
        // Once we have the CPU for ourselves we no longer do that.
        assert_eq!(patience.rest(patience.contended_until), Rest::Sleep);
    }

    #[test]
    fn who_waits_for_each_answer_seldom_waits_for_a_nap() {
        for (pause, waits) in [(5_000, true), (NAP / STREAM + 1, false)] {
            let mut patience = patience();
            let (sleeps, naps) = second(&mut patience, pause, waits);
            assert!(sleeps > 70_000, "{sleeps}");
            assert!(naps < 7 + sleeps / LAST_TRY, "{naps} of {sleeps}");
            // And naps are tried at once again where they are worth it.
            patience.napped(STREAM);
            assert_eq!(patience.enough, FIRST_TRY);
        }
    }
}
