// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The watchdog: notices a worker that makes no progress.
//!
//! A worker that polls enters a read section (`device/sync`) in every poll iteration, and writes
//! that down for writers anyway. The watchdog compares what is written there from time to time. A
//! worker that waits in the kernel for work says so. Anything else is progress or a fault:
//!
//! - It *spins* if it uses the CPU without entering or leaving a read section. What counts is the
//!   time that it had the CPU: a process that was stopped, or a machine that has other things to
//!   do, proves nothing.
//! - It is *blocked* if the same system call or page fault does not return. What counts is how often
//!   the watchdog finds it so, and not how much time has passed: when the process was stopped, the
//!   watchdog was as well. And it does not count what it finds when it was late itself: then it is
//!   the machine that is slow.
//!
//! While all workers wait, so does the watchdog: an idle process has no wake-ups.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{fence, AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use vhost_device_rdma_sync::Readers;

use super::handle::Worker;
use super::supervision::{Failure, OnFailure};
use crate::sandbox::{Kind, Sandbox};

/// When the watchdog takes a worker for failed.
#[derive(Debug, Clone, Copy)]
pub struct WatchdogLimits {
    /// How often it looks.
    pub interval: Duration,
    /// Time of a CPU without progress.
    pub spinning: Duration,
    /// How often a worker is found blocked in the same place.
    pub blocked: u32,
}

impl Default for WatchdogLimits {
    /// The longest poll iteration takes a small part of a second of CPU time. Memory that is swapped
    /// out may take long to come back, but not a single page.
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            spinning: Duration::from_secs(10),
            blocked: 30,
        }
    }
}

/// What a thread does, as the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It runs, or would if it had a CPU.
    Runs,
    /// It waits for something.
    Waits,
    /// It was stopped, is traced, or has ended.
    Stopped,
}

/// What the kernel tells of a thread.
#[derive(Debug)]
pub(super) struct Account {
    stat: File,
    status: File,
    ticks_per_second: u64,
}

impl Account {
    /// Of the calling thread.
    pub(super) fn of_this_thread() -> io::Result<Self> {
        Ok(Self {
            stat: File::open("/proc/thread-self/stat")?,
            status: File::open("/proc/thread-self/status")?,
            ticks_per_second: clock_ticks_per_second(),
        })
    }

    /// How long the thread has been on a CPU; none if the kernel does not tell any longer.
    pub(super) fn time_on_cpu(&self) -> Option<Duration> {
        let (_, time) = parse_stat(&read(&self.stat)?, self.ticks_per_second)?;
        Some(time)
    }

    /// State, time on a CPU, and how often the thread gave its CPU away; none if the kernel does not
    /// tell any longer.
    fn read(&self) -> Option<(State, Duration, u64)> {
        let stat = read(&self.stat)?;
        let (state, time) = parse_stat(&stat, self.ticks_per_second)?;
        Some((state, time, parse_switches(&read(&self.status)?)?))
    }
}

fn read(file: &File) -> Option<String> {
    let mut bytes = vec![0; 4096];
    let length = file.read_at(&mut bytes, 0).ok()?;
    bytes.truncate(length);
    // The name of the process is in it, which may be anything.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// State and time on a CPU in /proc/PID/stat.
fn parse_stat(text: &str, ticks_per_second: u64) -> Option<(State, Duration)> {
    // The name before it may contain anything.
    let (_, rest) = text.rsplit_once(')')?;
    let mut words = rest.split_whitespace();
    let state = match words.next()? {
        "R" => State::Runs,
        "S" | "D" => State::Waits,
        _ => State::Stopped,
    };
    let mut ticks = words.skip(10).map(|word| word.parse::<u64>().ok());
    let ticks = ticks.next()?? + ticks.next()??;
    let ms = ticks.checked_mul(1000)?.checked_div(ticks_per_second)?;
    Some((state, Duration::from_millis(ms)))
}

/// How often a thread gave its CPU away, in /proc/PID/status.
fn parse_switches(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    let number = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    number.trim().parse().ok()
}

/// What the watchdog finds of a worker.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Changes with each read section.
    round: u64,
    /// It waits for work.
    waits: bool,
    /// What the kernel tells, if it was asked and tells it.
    account: Option<(State, Duration, u64)>,
}

/// What the watchdog has found of a worker since that made progress.
#[derive(Debug, Default)]
struct Suspicion {
    last: Option<Sample>,
    spun: Duration,
    blocked: u32,
}

impl Suspicion {
    /// Whether a worker with this round would have made progress.
    fn is_progress(&self, round: u64) -> bool {
        self.last.is_none_or(|last| last.round != round)
    }

    /// Takes in what is found of the worker. If the watchdog is `late`, that says less.
    fn find(&mut self, sample: Sample, late: bool, limits: &WatchdogLimits) -> Option<Failure> {
        let last = self.last.replace(sample);
        let same = last.filter(|last| last.round == sample.round);
        let (Some(last), false) = (same, sample.waits) else {
            self.spun = Duration::ZERO;
            self.blocked = 0;
            return None;
        };
        let (Some((_, before, _)), Some((state, time, switches))) = (last.account, sample.account)
        else {
            return None;
        };
        self.spun += time.saturating_sub(before);
        let blocked = |(state, _, _)| state == State::Waits;
        let in_same_place = last
            .account
            .is_some_and(|last| blocked(last) && last.2 == switches);
        if !(in_same_place && state == State::Waits) {
            self.blocked = 0;
        } else if !late {
            self.blocked += 1;
        }
        if self.spun >= limits.spinning {
            return Some(Failure::Spin(self.spun));
        }
        let enough = self.blocked >= limits.blocked;
        enough.then(|| Failure::Block(limits.interval * self.blocked))
    }
}

/// The sleep of a watchdog whose workers all wait. A worker that wakes up ends it.
#[derive(Debug, Default)]
pub(super) struct WatchdogSleep {
    asleep: AtomicBool,
    watchdog: OnceLock<Thread>,
}

impl WatchdogSleep {
    /// Wakes the watchdog. To be called after a worker has stored that it does not wait.
    #[inline]
    pub(super) fn end(&self) {
        // A load, as long as the watchdog is awake.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            if let Some(thread) = self.watchdog.get() {
                thread.unpark();
            }
        }
    }
}

/// A thread that watches workers.
#[derive(Debug)]
pub struct Watchdog {
    sleeps: Vec<Arc<WatchdogSleep>>,
    /// Dropped to end it.
    running: Sender<()>,
    thread: JoinHandle<()>,
}

impl Watchdog {
    /// Watches `workers`, which are readers of `readers`, each with its own number, and tells
    /// `failed` of one that makes no progress.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(
        workers: &[Arc<Worker>],
        readers: Readers,
        limits: WatchdogLimits,
        sandbox: &Sandbox,
        failed: OnFailure,
    ) -> io::Result<Self> {
        let sleeps = workers
            .iter()
            .map(|worker| worker.watchdog_sleep.clone())
            .collect();
        let workers = workers.iter();
        let workers = workers.map(|worker| (worker.clone(), Suspicion::default()));
        let (running, stopped) = channel();
        let watch = Watch {
            workers: workers.collect(),
            readers,
            limits,
            failed,
            stopped,
        };
        let thread = sandbox.spawn(Kind::Control, "watchdog".into(), move || watch.run())?;
        Ok(Self {
            sleeps,
            running,
            thread,
        })
    }

    /// Ends it.
    pub fn stop(self) {
        drop(self.running);
        self.sleeps.iter().for_each(|sleep| sleep.end());
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            log::error!("the watchdog panicked");
        }
    }
}

/// What the watchdog's thread works with.
struct Watch {
    workers: Vec<(Arc<Worker>, Suspicion)>,
    readers: Readers,
    limits: WatchdogLimits,
    failed: OnFailure,
    stopped: Receiver<()>,
}

impl Watch {
    fn run(mut self) {
        for (worker, _) in &self.workers {
            // It is the only watchdog.
            let _ = worker.watchdog_sleep.watchdog.set(std::thread::current());
        }
        let mut before = Instant::now();
        while self.is_running(self.limits.interval) {
            let now = Instant::now();
            let late = now.duration_since(before) > self.limits.interval * 3 / 2;
            before = now;
            if self.look(late) {
                self.sleep();
                before = Instant::now();
            }
        }
    }

    /// Waits for so long; false: it is to end.
    fn is_running(&self, time: Duration) -> bool {
        matches!(
            self.stopped.recv_timeout(time),
            Err(RecvTimeoutError::Timeout)
        )
    }

    /// Looks at all workers. Returns whether each has waited all the time since the last look.
    fn look(&mut self, late: bool) -> bool {
        let mut quiet = true;
        for (worker, suspicion) in &mut self.workers {
            let waits = worker.waits.load(Ordering::SeqCst);
            let round = self.readers.round(usize::from(worker.index));
            let progress = suspicion.is_progress(round);
            quiet &= waits && !progress;
            let suspect = !waits && !progress;
            let sample = Sample {
                round,
                waits,
                // Only of one that may have failed: it takes system calls.
                account: if suspect {
                    worker.account.get().and_then(Account::read)
                } else {
                    None
                },
            };
            if let Some(failure) = suspicion.find(sample, late, &self.limits) {
                (self.failed)(worker.index, failure);
                *suspicion = Suspicion::default();
            }
        }
        quiet
    }

    /// Sleeps until a worker wakes up, or it is to end.
    fn sleep(&self) {
        let sleeps = || {
            self.workers
                .iter()
                .map(|(worker, _)| &worker.watchdog_sleep)
        };
        sleeps().for_each(|sleep| sleep.asleep.store(true, Ordering::SeqCst));
        // Either it sees that a worker has woken up, or that worker sees that it sleeps.
        fence(Ordering::SeqCst);
        let mut workers = self.workers.iter();
        let all_wait = workers.all(|(worker, _)| worker.waits.load(Ordering::SeqCst));
        if all_wait {
            let asleep = || sleeps().all(|sleep| sleep.asleep.load(Ordering::SeqCst));
            while asleep() && self.is_running(Duration::ZERO) {
                std::thread::park();
            }
        }
        sleeps().for_each(|sleep| sleep.asleep.store(false, Ordering::SeqCst));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, AdapterSettings};
    use crate::worker::{Loop, ThreadOptions};

    /// Long enough for a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(60);

    const LIMITS: WatchdogLimits = WatchdogLimits {
        interval: Duration::from_secs(1),
        spinning: Duration::from_secs(10),
        blocked: 3,
    };

    /// A worker as it is found by one look: what changes is said.
    fn sample(round: u64, state: State, time: u64, switches: u64) -> Sample {
        Sample {
            round,
            waits: false,
            account: Some((state, Duration::from_secs(time), switches)),
        }
    }

    /// What comes of looks that are all on time.
    fn judge(samples: impl IntoIterator<Item = Sample>) -> Option<Failure> {
        let mut suspicion = Suspicion::default();
        let mut samples = samples.into_iter();
        samples.find_map(|sample| suspicion.find(sample, false, &LIMITS))
    }

    #[test]
    fn cpu_time_without_progress_is_a_fault() {
        let spins = |round: fn(u64) -> u64| {
            judge((0..30).map(|time| sample(round(time), State::Runs, time, 0)))
        };
        let ten = Duration::from_secs(10);
        assert_eq!(spins(|_| 7), Some(Failure::Spin(ten)));
        assert_eq!(spins(|time| time), None);
        assert_eq!(spins(|time| time / 8), None);
        // It gives the CPU away in between: in a loop of sched_yield, or of page faults.
        let yields = (0..30).map(|time| sample(7, State::Waits, time, time));
        assert_eq!(judge(yields), Some(Failure::Spin(ten)));
    }

    #[test]
    fn waiting_for_a_cpu_is_none() {
        let starved = (0..1000).map(|_| sample(7, State::Runs, 3, 0));
        assert_eq!(judge(starved), None);
        let stopped = (0..1000).map(|_| sample(7, State::Stopped, 3, 0));
        assert_eq!(judge(stopped), None);
        // A little each time that the process is continued, while it is in a long poll iteration.
        let continued = (0..1000).map(|look| sample(look / 8, State::Stopped, look, 0));
        assert_eq!(judge(continued), None);
    }

    #[test]
    fn blocking_in_the_same_place_is_a_fault() {
        let blocked = || (0..30).map(|_| sample(7, State::Waits, 3, 5));
        let three = Duration::from_secs(3);
        assert_eq!(judge(blocked()), Some(Failure::Block(three)));
        // Waiting for work.
        let waits = blocked().map(|found| Sample {
            waits: true,
            ..found
        });
        assert_eq!(judge(waits), None);
        // Page fault by page fault.
        let faults = (0..30).map(|look| sample(7, State::Waits, 3, look / 2));
        assert_eq!(judge(faults), None);
        // The watchdog is late each time: the machine has other things to do.
        let mut suspicion = Suspicion::default();
        let mut late = blocked().map(|sample| suspicion.find(sample, true, &LIMITS));
        assert!(late.all(|failure| failure.is_none()));
        // Late once, as after the process was stopped: the others count.
        let mut suspicion = Suspicion::default();
        let looks = blocked().enumerate();
        let failed = looks
            .map(|(look, sample)| suspicion.find(sample, look == 2, &LIMITS))
            .position(|failure| failure.is_some());
        assert_eq!(failed, Some(4));
    }

    #[test]
    fn what_the_kernel_tells_is_read() {
        let text = "7 (a) R (b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        let found = parse_stat(text, 100);
        assert_eq!(found, Some((State::Waits, Duration::from_secs(3))));
        assert_eq!(parse_stat("7 (a) R", 100), None);
        assert_eq!(parse_stat("", 100), None);
        let text = "Name:\ta\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(parse_switches(text), Some(12));
        assert_eq!(parse_switches("Name:\ta\n"), None);
        let account = Account::of_this_thread().unwrap();
        let (state, before, switches) = account.read().unwrap();
        assert_eq!(state, State::Runs);
        std::thread::sleep(Duration::from_millis(2));
        assert!(account.read().unwrap().2 > switches);
        let deadline = Instant::now() + TIMEOUT;
        while account.read().unwrap().1 == before {
            assert!(Instant::now() < deadline);
        }
    }

    /// A worker that runs `body`, and a watchdog that waits for little time.
    fn watched(
        body: impl FnOnce(&mut Loop) + Send + 'static,
    ) -> (Arc<Worker>, Watchdog, Receiver<Failure>) {
        let (adapter, mut loops) = Adapter::without_threads(&AdapterSettings::default()).unwrap();
        let work = loops.pop().unwrap();
        let worker = work.worker();
        let (told, heard) = channel();
        let failed: OnFailure = Arc::new(move |_, failure| {
            // A test that has seen one needs no more.
            let _ = told.send(failure);
        });
        let options = ThreadOptions::default();
        worker.run(work, options, failed.clone(), body).unwrap();
        let limits = WatchdogLimits {
            interval: Duration::from_millis(10),
            spinning: Duration::from_millis(100),
            blocked: 5,
        };
        let (readers, sandbox) = (adapter.readers().clone(), Sandbox::default());
        let workers = [worker.clone()];
        let watchdog = Watchdog::start(&workers, readers, limits, &sandbox, failed).unwrap();
        (worker, watchdog, heard)
    }

    #[test]
    fn a_worker_that_spins_or_blocks_is_found() {
        let spin = |worker: &Worker| while !worker.is_stopping() {};
        let block = |worker: &Worker| {
            while !worker.is_stopping() {
                std::thread::park();
            }
        };
        let body = |spins: bool| {
            watched(move |work| match spins {
                true => spin(&work.worker()),
                false => block(&work.worker()),
            })
        };
        for spins in [true, false] {
            let (worker, watchdog, heard) = body(spins);
            let failure = heard.recv_timeout(TIMEOUT).unwrap();
            assert_eq!(matches!(failure, Failure::Spin(_)), spins, "{failure}");
            assert_eq!(matches!(failure, Failure::Block(_)), !spins, "{failure}");
            watchdog.stop();
            worker.unpark();
            worker.stop();
        }
    }

    #[test]
    fn a_worker_at_rest_lets_the_watchdog_sleep() {
        let (worker, watchdog, heard) = watched(Loop::run);
        let asleep = || worker.watchdog_sleep.asleep.load(Ordering::SeqCst);
        for _ in 0..20 {
            let deadline = Instant::now() + TIMEOUT;
            while !asleep() {
                assert!(Instant::now() < deadline, "the watchdog does not sleep");
                std::thread::sleep(Duration::from_millis(1));
            }
            worker.try_again();
            while asleep() {
                assert!(Instant::now() < deadline, "the watchdog does not wake up");
                std::thread::yield_now();
            }
        }
        watchdog.stop();
        worker.stop();
        assert_eq!(heard.try_recv().ok(), None);
    }

    #[test]
    fn a_worker_with_work_is_left_alone() {
        let (worker, watchdog, heard) = watched(|work| {
            let worker = work.worker();
            while !worker.is_stopping() {
                work.round();
            }
        });
        std::thread::sleep(Duration::from_secs(1));
        watchdog.stop();
        worker.stop();
        assert_eq!(heard.try_recv().ok(), None);
    }
}
