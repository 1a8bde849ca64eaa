// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Adaptive polling: how long a worker without work polls for some before it sleeps, and when it
//! backs off instead.
//!
//! Polling saves a wake-up if work comes in time, and posting then costs the guest no VM exit. If
//! none comes it costs the CPU. Where fewer CPUs than threads want to run it is worse: the thread
//! that would bring the work may be waiting for this very CPU. A worker cannot see that. It sees
//! that polling fails, and that work comes as soon as it sleeps.
//!
//! In that situation a driver that posts one work request after the other would notify a sleeping
//! worker of nearly each, which costs much more than a message. So instead of sleeping, which a
//! notification ends, the worker may back off for a fixed time: no driver notifies it, and what is
//! posted meanwhile is carried out together at the end. A sender that waits for each answer would
//! wait for the end of the back-off, so the worker tries it from time to time, and repeats it only
//! while it finds several messages each time.
//!
//! There is no clock and no I/O here. All times are nanoseconds.
use std::time::Duration;

/// Longer than this between two poll iterations, with at most one queue pair polled between them,
/// which copies a MiB: the worker had lost the CPU.
const LOST_CPU: u64 = 400_000;

/// For so long other threads are taken to need the worker's CPU: polling for [`LEAST`] is enough.
/// The system's scheduler does not prefer a thread on wake-up that has used its time up by polling.
const CONTENDED: u64 = 100_000_000;

/// Polling for the longest time has to find work so many times as often as it fails. Otherwise it
/// costs more than it saves.
const WORTH: u32 = 4;

/// So many failures more than that are not chance.
const FAILURES: u32 = 16;

/// A sleep is short if it is shorter than the longest time to poll, times this. The work itself
/// came sooner than the worker sees it, which includes the way of the notification.
const SOON: u64 = 8;

/// The least time to poll, unless the longest is less: a peer that has its CPU and answers at once
/// needs no more.
const LEAST: u64 = 3_000;

/// How long a back-off is.
const BACK_OFF: u64 = 50_000;

/// A back-off with so many messages at its end was worth it.
const STREAM: u64 = 4;

/// A back-off is tried after so many short sleeps at first, then after twice as many each time that
/// it was not worth it, up to the most.
const FIRST_TRY: u32 = 16;
const LAST_TRY: u32 = 1024;

/// After so many sleeps with no work that came at once, busy polling of the last queue pair is left
/// out, and polling for [`LEAST`]: they would take as long as some messages. They are tried again
/// after so many more.
const LATE: u32 = 4;
const LATE_TRY: u32 = 64;

/// What a worker does that has polled for work for as long as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Sleeps until it is notified.
    Sleep,
    /// Waits for so long, and needs no notification.
    BackOff(u64),
}

/// Whether some work comes at once.
#[derive(Debug, Default)]
struct AtOnce {
    /// Sleeps since it did, or since busy polling for it was tried again.
    late: u32,
}

impl AtOnce {
    fn is_expected(&self) -> bool {
        self.late < LATE
    }

    /// The worker has slept instead.
    fn failed(&mut self) {
        self.late = if self.late < LATE_TRY {
            self.late + 1
        } else {
            LATE - 1
        };
    }
}

/// What a worker has learnt of waiting for work.
#[derive(Debug)]
pub struct IdlePolicy {
    /// The longest time to poll.
    most: u64,
    /// The time to poll that suits how often work came of late.
    budget: u64,
    /// Failures of polling for the longest time, each counted [`WORTH`] times, less the successes.
    failures: u32,
    /// Other threads need the worker's CPU, until this time.
    contended_until: u64,
    /// Short sleeps since the last back-off, and how many of them are enough for another.
    sleeps: u32,
    enough: u32,
    /// The last back-off was worth it.
    streams: bool,
    /// Of work that comes at once as the first after a sleep, and of more after that. Of two that
    /// answer each other one may have a CPU, while the other waits for the worker's.
    first: AtOnce,
    then: AtOnce,
    /// Some has come at once since the last sleep.
    came: bool,
}

impl IdlePolicy {
    /// A policy that polls for `most` at most.
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
            first: AtOnce::default(),
            then: AtOnce::default(),
            came: false,
        }
    }

    /// Whether it is worth it to look for what may come at once, for a worker that does not poll
    /// otherwise.
    pub fn expects_more(&self) -> bool {
        if self.came {
            self.then.is_expected()
        } else {
            self.first.is_expected()
        }
    }

    /// What comes next.
    fn next(&mut self) -> &mut AtOnce {
        if self.came {
            &mut self.then
        } else {
            &mut self.first
        }
    }

    /// More work came at once after the last.
    pub fn more_came(&mut self) {
        self.next().late = 0;
        self.came = true;
    }

    /// How long to poll from the end of the work to sleep.
    pub fn budget(&self, now: u64) -> u64 {
        if !self.is_contended(now) {
            self.budget
        } else if self.expects_more() {
            self.budget.min(LEAST)
        } else {
            0
        }
    }

    /// What to do after polling in vain.
    pub fn idle(&mut self, now: u64) -> Idle {
        let again = self.streams || self.sleeps >= self.enough;
        if !again || !self.is_contended(now) {
            return Idle::Sleep;
        }
        self.sleeps = 0;
        Idle::BackOff(BACK_OFF)
    }

    /// At the end of a back-off there were so many messages to carry out.
    pub fn backed_off(&mut self, messages: u64) {
        self.streams = messages >= STREAM;
        self.enough = if self.streams {
            FIRST_TRY
        } else {
            (2 * self.enough).min(LAST_TRY)
        };
    }

    /// Two poll iterations followed each other, the second `now`.
    pub fn polled(&mut self, before: u64, now: u64) {
        if now.saturating_sub(before) > LOST_CPU {
            self.contended(now);
        }
    }

    /// Polling found work.
    pub fn found(&mut self) {
        self.failures = self.failures.saturating_sub(1);
    }

    /// The worker slept after polling in vain, from `since` to `now`.
    pub fn slept(&mut self, since: u64, now: u64) {
        self.next().failed();
        self.came = false;
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
        // Work comes often: poll for it longer next time.
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

    fn policy() -> IdlePolicy {
        IdlePolicy::new(Duration::from_nanos(MOST))
    }

    /// Polls until `work` comes, or in vain and then sleeps until then. Returns the time after.
    fn wait(policy: &mut IdlePolicy, now: u64, work: u64) -> u64 {
        let end = now + policy.budget(now);
        if work <= end {
            policy.found();
            policy.more_came();
        } else {
            policy.slept(end, work);
        }
        work
    }

    #[test]
    fn work_that_comes_in_time_keeps_the_worker_polling() {
        let mut policy = policy();
        let mut now = 0;
        for n in 0..10_000 {
            // One in ten comes late.
            let gap = if n % 10 == 0 { MOST + 10_000 } else { 20_000 };
            now = wait(&mut policy, now, now + gap);
            assert_eq!(policy.budget(now), MOST);
        }
    }

    #[test]
    fn work_that_comes_only_during_sleep_makes_the_worker_sleep() {
        let mut policy = policy();
        let mut now = 0;
        for n in 0..10_000 {
            // The peer has the worker's CPU every other time.
            let gap = if n % 2 == 0 {
                2_000
            } else {
                policy.budget(now) + 5_000
            };
            now = wait(&mut policy, now, now + gap);
        }
        assert!(now < 10_000 * 6_000, "{now}");
        // And what comes at once is still found by polling.
        assert!(policy.budget(now) >= 2_000);
    }

    #[test]
    fn losing_the_cpu_shortens_polling_for_a_while() {
        let mut policy = policy();
        policy.polled(0, LOST_CPU);
        assert_eq!(policy.budget(LOST_CPU), MOST);
        policy.polled(0, LOST_CPU + 1);
        assert_eq!(policy.budget(LOST_CPU + 1), LEAST);
        assert_eq!(policy.budget(LOST_CPU + 1 + CONTENDED), MOST);
    }

    #[test]
    fn without_the_cpu_what_never_comes_at_once_is_seldom_polled_for() {
        let mut policy = policy();
        let mut polled = 0;
        for n in 0..10_000 {
            let now = 20_000 * n;
            policy.contended(now);
            polled += u64::from(policy.budget(now) != 0);
            policy.slept(now, now + 15_000);
        }
        assert!((100..250).contains(&polled), "{polled}");
        // What does is.
        let now = 200_000_000;
        for n in 0..100 {
            assert!(n < LATE_TRY || policy.budget(now) == LEAST);
            policy.contended(now);
            if policy.budget(now) == 0 {
                policy.slept(now, now + 15_000);
            } else {
                policy.more_came();
            }
        }
    }

    #[test]
    fn an_answer_is_polled_for_and_not_what_follows_when_the_worker_sleeps() {
        let mut policy = policy();
        let (mut first, mut then) = (0, 0);
        for n in 0..10_000 {
            let now = 20_000 * n;
            policy.contended(now);
            // The first work after a sleep is answered at once, and that comes next during sleep.
            first += u64::from(policy.budget(now) == LEAST);
            policy.more_came();
            then += u64::from(policy.budget(now) != 0);
            policy.slept(now, now + 15_000);
        }
        assert_eq!(first, 10_000);
        assert!((100..250).contains(&then), "{then}");
    }

    #[test]
    fn rare_work_is_not_polled_for_and_frequent_work_is_again() {
        let mut policy = policy();
        for n in 0..10 {
            policy.slept(n * 1_000_000_000, (n + 1) * 1_000_000_000 - 1);
        }
        let now = 10_000_000_000;
        assert_eq!(policy.budget(now), LEAST);
        for _ in 0..10 {
            policy.slept(now, now + 1_000);
        }
        assert_eq!(policy.budget(now), MOST);
    }

    #[test]
    fn a_policy_of_no_polling_never_polls() {
        let mut policy = IdlePolicy::new(Duration::ZERO);
        for n in 0..100 {
            policy.slept(n, n + 1);
            assert_eq!(policy.budget(n), 0);
            assert_eq!(policy.idle(n), Idle::Sleep);
        }
    }

    #[test]
    fn what_never_comes_at_once_is_seldom_polled_for() {
        let mut policy = IdlePolicy::new(Duration::ZERO);
        let expected = (0..10_000u64).filter(|n| {
            policy.slept(20_000 * n, 20_000 * n + 15_000);
            policy.expects_more()
        });
        let expected = expected.count();
        assert!((100..250).contains(&expected), "{expected}");
        policy.more_came();
        assert!(policy.expects_more());
    }

    /// Sleeps and backs off for a second with a message every `pause`, or, if `waits`, `pause`
    /// after the last was carried out, while others need the CPU. Returns how often it did each.
    fn second(policy: &mut IdlePolicy, pause: u64, waits: bool) -> (u32, u32) {
        let (mut sleeps, mut back_offs) = (0, 0);
        let mut now = 1_000_000_000;
        while now < 2_000_000_000 {
            policy.contended(now);
            match policy.idle(now) {
                Idle::Sleep => {
                    sleeps += 1;
                    policy.slept(now, now + pause);
                    now += pause;
                }
                Idle::BackOff(back_off) => {
                    back_offs += 1;
                    policy.backed_off(if waits { 1 } else { back_off / pause });
                    now += back_off;
                }
            }
        }
        (sleeps, back_offs)
    }

    #[test]
    fn a_driver_that_posts_on_and_on_need_not_notify() {
        let mut policy = policy();
        let (sleeps, back_offs) = second(&mut policy, 5_000, false);
        assert_eq!(sleeps, FIRST_TRY);
        assert!(back_offs > 19_000, "{back_offs}");
        // Not once the worker has the CPU for itself.
        assert_eq!(policy.idle(policy.contended_until), Idle::Sleep);
    }

    #[test]
    fn a_sender_that_waits_for_each_answer_seldom_meets_a_back_off() {
        for (pause, waits) in [(5_000, true), (BACK_OFF / STREAM + 1, false)] {
            let mut policy = policy();
            let (sleeps, back_offs) = second(&mut policy, pause, waits);
            assert!(sleeps > 70_000, "{sleeps}");
            assert!(back_offs < 7 + sleeps / LAST_TRY, "{back_offs} of {sleeps}");
            // And where back-offs are worth it, they are soon tried again.
            policy.backed_off(STREAM);
            assert_eq!(policy.enough, FIRST_TRY);
        }
    }
}
