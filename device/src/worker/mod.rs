// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Workers: the threads that look at doorbells and run queue pairs, shared by all VMs.
//!
//! A worker loops: take what others scheduled, scan the doorbell memory of every VM, look at the
//! timers, and give each queue pair with work a bounded turn: at once where its bit is found if
//! nobody else waits for a turn, else in the order of a queue. Without work it goes on looking for
//! a while, then sleeps until a doorbell queue is notified, another thread schedules something, or
//! a timer ends. Where guests wait for its CPU and would notify it all the time, it takes a nap
//! instead (`patience`).
//!
//! Who sends one message at a time is answered soonest: while nobody else has work, the queue pair
//! that had the last turn keeps it for a moment, and the worker watches its send queue, and that of
//! its peer, beside the doorbells (`Linger`).
//!
//! # Sleeping loses no wake-up
//! A guest sets its doorbell bit and then loads the worker's status word; the worker stores
//! SLEEPING and then scans all doorbells once more before it sleeps. Both pairs are store, full
//! fence, load: so either the guest sees SLEEPING and notifies, or the worker sees the bit. The
//! same holds between [`Worker::schedule`] (inbox, then `asleep`) and the worker (`asleep`, then
//! inbox). The notification itself is an eventfd, which remembers.
mod patience;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::thread::{sched_setaffinity, CpuSet};
use serde_json::{json, Value};
use virtio_rdma_spec::doorbell::{
    worker_status, BLOCK_SIZE, DIRECT_SHIFT, DIRECT_SLOTS, LEAF_OFFSET, ROOT_OFFSET, SUMMARY_OFFSET,
};
use virtio_rdma_spec::verbs::qp_state;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};
use vmm_sys_util::timerfd::TimerFd;

use crate::engine::requester::{Found, Turn};
use crate::engine::{notify, Budget, LONE_SHARE, SHARE};
use crate::memory::{prefetch_write, Pages};
use crate::rnic::{announce, Rnic};
use crate::verbs::cq::Cq;
use crate::verbs::qp::Qp;
use crate::verbs::tables::{Context, Rung, Tables};
use patience::{Patience, Rest};
use vhost_device_rdma_sync::{lock, Visit, Visitor};

/// Queue pairs of the queue that get a turn before the doorbells are scanned again, and those that
/// get one at once while they are.
const TURNS: usize = 32;
/// Doorbells that are watched closely: where there are more contexts, each look is at all of them,
/// and that takes its time.
const WATCHED: usize = 64;
/// How often a look that finds nothing looks at the doorbells again, before it looks at the clock
/// and at all else.
const LOOKS: u32 = 100;
/// How often a lone queue pair may go on after a wait before the clock and all else is looked at,
/// with up to [`LINGER`] each time, or less often with more.
const LINGERS: u32 = 256;
const LINGER: Budget = Budget {
    messages: 32,
    bytes: 4096,
};
/// Work requests flushed in one turn.
const FLUSH: u32 = 64;
/// Epoll data of the notifications from guests.
const KICK: u64 = 1;
/// Epoll data of wake-ups from other threads.
const WAKE: u64 = 0;

/// Epoll data of the end of the first timer.
const TIMER: u64 = 2;
/// How long to leave an event held back whose VM's tables are being changed, nanoseconds.
const BUSY_RETRY: u64 = 10_000;

/// What others hand to a worker.
#[derive(Debug, Default)]
struct Inbox {
    /// Queue pairs to give a turn.
    qps: Vec<Arc<Qp>>,
    /// Completion queues whose event is held back.
    cqs: Vec<Weak<Cq>>,
    /// A port came up: queue pairs that wait may have a way to their peers now.
    try_again: bool,
}

/// What a worker counts. Only the worker writes.
#[derive(Debug, Default)]
struct Stats {
    turns: AtomicU64,
    sleeps: AtomicU64,
    naps: AtomicU64,
    kicks: AtomicU64,
    doorbells: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(1),
        Ordering::Relaxed,
    );
}

/// A worker, as other threads see it.
#[derive(Debug)]
pub struct Worker {
    /// Its number, and that of its doorbell queue in every VM.
    pub index: u16,
    inbox: Mutex<Inbox>,
    inbox_filled: AtomicBool,
    asleep: AtomicBool,
    wake: EventFd,
    epoll: Epoll,
    rnics: Mutex<Vec<Arc<Rnic>>>,
    /// Changes with `rnics`, and when the status must be announced again.
    generation: AtomicU64,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    stats: Stats,
}

impl Worker {
    /// Starts worker `index`, which sleeps after looking for work in vain for `poll_budget`, at
    /// most.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(
        index: u16,
        visitor: Visitor,
        poll_budget: Duration,
        cpu: Option<usize>,
    ) -> std::io::Result<Arc<Self>> {
        let (worker, mut work) = Self::without_thread(index, visitor, poll_budget)?;
        let started = Arc::new(Barrier::new(2));
        let ready = started.clone();
        let thread = std::thread::Builder::new()
            .name(format!("worker{index}"))
            .spawn(move || {
                if let Some(cpu) = cpu {
                    pin(index, cpu);
                }
                ready.wait();
                work.run();
            })?;
        started.wait();
        *worker.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(worker)
    }

    /// A worker that does nothing but what its loop is told to, in the caller's thread: for
    /// measurements and tests.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn without_thread(
        index: u16,
        visitor: Visitor,
        poll_budget: Duration,
    ) -> std::io::Result<(Arc<Self>, Loop)> {
        let wake = EventFd::new(EFD_NONBLOCK)?;
        let epoll = Epoll::new()?;
        // Edge triggered: every write wakes, and nobody needs to read.
        let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        epoll.ctl(
            ControlOperation::Add,
            wake.as_raw_fd(),
            EpollEvent::new(events, WAKE),
        )?;
        let timer = TimerFd::new()?;
        epoll.ctl(
            ControlOperation::Add,
            timer.as_raw_fd(),
            EpollEvent::new(events, TIMER),
        )?;
        let worker = Arc::new(Self {
            index,
            inbox: Mutex::default(),
            inbox_filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake,
            epoll,
            rnics: Mutex::default(),
            generation: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            thread: Mutex::default(),
            stats: Stats::default(),
        });
        let work = Loop::new(worker.clone(), visitor, timer, poll_budget);
        Ok((worker, work))
    }

    /// Stops the worker and waits for its end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake_up();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            if thread.join().is_err() {
                log::error!("worker {} panicked", self.index);
            }
        }
    }

    /// Gives a queue pair a turn soon.
    pub fn schedule(&self, qp: &Arc<Qp>) {
        if qp.scheduled.swap(true, Ordering::SeqCst) {
            return;
        }
        self.put(|inbox| inbox.qps.push(qp.clone()));
    }

    /// Gives all queue pairs that wait for a time a turn, in which they look for their peers.
    pub fn try_again(&self) {
        self.put(|inbox| inbox.try_again = true);
    }

    /// Raises the event that a completion queue holds back when its time is over.
    pub fn hold(&self, cq: &Arc<Cq>) {
        if !cq.handed.swap(true, Ordering::SeqCst) {
            self.put(|inbox| inbox.cqs.push(Arc::downgrade(cq)));
        }
    }

    /// Whether anything but doorbells wants the worker, which knows of the changes up to
    /// `generation`.
    #[inline(always)]
    fn is_wanted(&self, generation: u64) -> bool {
        self.inbox_filled.load(Ordering::Relaxed)
            || self.generation.load(Ordering::Relaxed) != generation
            || self.stopping.load(Ordering::Relaxed)
    }

    fn put(&self, put: impl FnOnce(&mut Inbox)) {
        put(&mut lock(&self.inbox));
        self.inbox_filled.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.wake_up();
        }
    }

    fn wake_up(&self) {
        // It fails only when the counter is full: then the worker is woken anyway.
        let _ = self.wake.write(1);
    }

    /// Serves an RNIC from now on.
    pub fn add(&self, rnic: &Arc<Rnic>) {
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(rnic.clone());
        self.announce_again();
    }

    /// Serves an RNIC no longer.
    pub fn remove(&self, rnic: &Arc<Rnic>) {
        self.rnics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, rnic));
        self.announce_again();
    }

    /// Makes the worker look at everything, and tell the guests its status again.
    pub fn announce_again(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.wake_up();
    }

    /// Wakes the worker whenever `fd` is written to.
    pub fn add_kick(&self, fd: &File) {
        let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Err(error) = self.epoll.ctl(
            ControlOperation::Add,
            fd.as_raw_fd(),
            EpollEvent::new(events, KICK),
        ) {
            log::error!(
                "worker {}: cannot watch a doorbell queue: {error}",
                self.index
            );
        }
    }

    /// No longer watches `fd`.
    pub fn remove_kick(&self, fd: &File) {
        let event = EpollEvent::new(EventSet::empty(), KICK);
        if let Err(error) = self
            .epoll
            .ctl(ControlOperation::Delete, fd.as_raw_fd(), event)
        {
            log::error!(
                "worker {}: cannot stop watching a doorbell queue: {error}",
                self.index
            );
        }
    }

    /// Counters and state, for people and programs.
    #[must_use]
    pub fn status(&self) -> Value {
        json!({
            "index": self.index,
            "asleep": self.asleep.load(Ordering::Relaxed),
            "turns": self.stats.turns.load(Ordering::Relaxed),
            "sleeps": self.stats.sleeps.load(Ordering::Relaxed),
            "naps": self.stats.naps.load(Ordering::Relaxed),
            "kicks": self.stats.kicks.load(Ordering::Relaxed),
            "doorbells": self.stats.doorbells.load(Ordering::Relaxed),
        })
    }
}

fn pin(worker: u16, cpu: usize) {
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
    }
    if let Err(error) = sched_setaffinity(None, &set) {
        log::warn!("cannot pin worker {worker} to CPU {cpu}: {error}");
    }
}

/// Whether a look that finds nothing goes on for a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watch {
    No,
    /// Without pauses.
    Eagerly,
    /// With pauses.
    Relaxed,
}

/// What a look found.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Turns given at once.
    served: usize,
    /// There was nothing at first.
    watched: bool,
    /// Turns went on after a wait.
    lingered: bool,
}

/// What only the worker's thread has.
pub struct Loop {
    worker: Arc<Worker>,
    visitor: Visitor,
    rnics: Vec<Arc<Rnic>>,
    generation: u64,
    queue: VecDeque<Arc<Qp>>,
    /// Parked queue pairs by time; each is in it once at most.
    timers: BTreeMap<(u64, usize), Arc<Qp>>,
    /// Completion queues whose event is held back by time, with the number of that event; each is
    /// in it once at most.
    holds: BTreeMap<(u64, usize), (Weak<Cq>, u32)>,
    /// Wakes us from sleep.
    timer: TimerFd,
    epoch: Instant,
    /// The time at the end of the last look, nanoseconds.
    time: u64,
    /// How long to look for work before sleeping.
    patience: Patience,
}

impl fmt::Debug for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loop")
            .field("worker", &self.worker.index)
            .finish_non_exhaustive()
    }
}

impl Loop {
    fn new(worker: Arc<Worker>, visitor: Visitor, timer: TimerFd, poll_budget: Duration) -> Self {
        Self {
            worker,
            visitor,
            rnics: Vec::new(),
            generation: u64::MAX,
            queue: VecDeque::new(),
            timers: BTreeMap::new(),
            holds: BTreeMap::new(),
            timer,
            epoch: Instant::now(),
            time: 0,
            patience: Patience::new(poll_budget),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn run(&mut self) {
        let mut idle_since = None;
        // When we looked for work last, if we have only looked since.
        let mut looked = None;
        while !self.worker.stopping.load(Ordering::Relaxed) {
            // Work that comes at once is found sooner without pauses; later they are for who shares
            // our core.
            let watch = match looked {
                _ if self.patience.budget(self.time) == 0 => Watch::No,
                None => Watch::Eagerly,
                Some(_) => Watch::Relaxed,
            };
            let Look {
                served,
                watched,
                lingered,
            } = self.look(TURNS, watch);
            let now = self.time;
            let before = looked.take();
            // More turns than one may have taken so long themselves.
            if let Some(before) = before.filter(|_| served <= 1 && !lingered) {
                self.patience.looked(before, now);
            }
            if served != 0 || !self.queue.is_empty() {
                if before.is_some() || watched || lingered {
                    self.patience.found();
                }
                self.turns(TURNS);
                idle_since = None;
                continue;
            }
            let idle = now.saturating_sub(*idle_since.get_or_insert(now));
            if idle < self.patience.budget(now) {
                looked = Some(now);
            } else {
                match self.patience.rest(now) {
                    Rest::Sleep => self.sleep(now),
                    Rest::Nap(nap) => self.nap(now, nap),
                }
                idle_since = None;
            }
        }
        for qp in self.queue.drain(..) {
            qp.scheduled.store(false, Ordering::SeqCst);
        }
    }

    /// One look at everything that may bring work. It gives `most` turns at once, at most.
    fn look(&mut self, most: usize, watch: Watch) -> Look {
        self.refresh();
        self.take_inbox();
        let look = self.scan(most, watch);
        self.time = self.now();
        self.expire();
        self.release();
        look
    }

    /// What the worker does again and again while it polls: a look, and turns for those who have
    /// work. Returns whether there was any.
    pub fn round(&mut self) -> bool {
        let Look { served, .. } = self.look(TURNS, Watch::No);
        let work = served != 0 || !self.queue.is_empty();
        self.turns(TURNS);
        work
    }

    /// As [`Self::round`], and it waits for a moment for what may come next, as it does while work
    /// comes and goes. Returns whether a queue pair went on after it had waited.
    pub fn watch(&mut self) -> bool {
        let Look { lingered, .. } = self.look(TURNS, Watch::Eagerly);
        self.turns(TURNS);
        lingered
    }

    /// As [`Self::round`], but one turn at most: for who looks at what is between two turns.
    pub fn step(&mut self) {
        self.look(0, Watch::No);
        self.turns(1);
    }

    /// Takes over changes of the list of RNICs.
    fn refresh(&mut self) {
        let generation = self.worker.generation.load(Ordering::SeqCst);
        if generation != self.generation {
            self.take_rnics(generation);
        }
    }

    #[cold]
    fn take_rnics(&mut self, generation: u64) {
        self.generation = generation;
        self.rnics.clone_from(
            &self
                .worker
                .rnics
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.timers.retain(|_, qp| !qp.dead.load(Ordering::Relaxed));
        self.announce(worker_status::POLLING);
    }

    /// Tells all guests our status; false if one could not be told now.
    fn announce(&mut self, status: u32) -> bool {
        let mut all = true;
        let visit = self.visitor.enter();
        for rnic in &self.rnics {
            match rnic.visit(&visit) {
                Some(tables) => announce(tables, self.worker.index, status),
                // Whoever changes the tables may be about to start the VM: then the page says
                // SLEEPING, and the generation changes.
                None => all = false,
            }
        }
        all
    }

    fn take_inbox(&mut self) {
        if self.worker.inbox_filled.load(Ordering::Relaxed) {
            self.empty_inbox();
        }
    }

    // Out of line: looks that find nothing are many.
    #[inline(never)]
    fn empty_inbox(&mut self) {
        let mut inbox = self
            .worker
            .inbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.worker.inbox_filled.store(false, Ordering::SeqCst);
        self.queue.extend(inbox.qps.drain(..));
        let cqs = std::mem::take(&mut inbox.cqs);
        let try_again = std::mem::take(&mut inbox.try_again);
        drop(inbox);
        if try_again {
            for qp in std::mem::take(&mut self.timers).into_values() {
                self.again(qp);
            }
        }
        if !cqs.is_empty() {
            self.take_holds(cqs);
        }
    }

    /// Begins to measure the time of events that are held back.
    fn take_holds(&mut self, cqs: Vec<Weak<Cq>>) {
        let now = self.now();
        for weak in cqs {
            let Some(cq) = weak.upgrade() else {
                continue;
            };
            // Before we look: another event after that needs another look.
            cq.handed.store(false, Ordering::SeqCst);
            let id = Arc::as_ptr(&cq) as usize;
            self.holds.remove(&(cq.timer.load(Ordering::Relaxed), id));
            if let Some((number, period)) = cq.held() {
                let until = now.saturating_add(period);
                cq.timer.store(until, Ordering::Relaxed);
                self.holds.insert((until, id), (weak, number));
            }
        }
    }

    /// Raises the events that were held back and whose time is over.
    fn release(&mut self) {
        while let Some(entry) = self.holds.first_entry() {
            if entry.key().0 > self.time {
                break;
            }
            let ((_, id), (weak, number)) = entry.remove_entry();
            let Some(cq) = weak.upgrade() else {
                continue;
            };
            if !release(&self.visitor.enter(), &cq, number) {
                let until = self.time.saturating_add(BUSY_RETRY);
                cq.timer.store(until, Ordering::Relaxed);
                self.holds.insert((until, id), (weak, number));
            }
        }
    }

    /// When the first timer ends, nanoseconds.
    fn next_timer(&self) -> Option<u64> {
        let timers = self.timers.first_key_value().map(|((at, _), _)| *at);
        let holds = self.holds.first_key_value().map(|((at, _), _)| *at);
        timers.into_iter().chain(holds).min()
    }

    /// Finds the queue pairs whose doorbell rang. If nobody waits for a turn, the first of them get
    /// theirs at once, at most `most`, the others are put in the queue. Where nothing rang, it
    /// watches for a moment whether something does.
    fn scan(&mut self, most: usize, watch: Watch) -> Look {
        let visit = self.visitor.enter();
        let worker = &*self.worker;
        let idle = self.queue.is_empty();
        let mut scan = Scan {
            most: if idle { most } else { 0 },
            turns: Turns {
                visit: &visit,
                worker,
                queue: &mut self.queue,
                timers: &mut self.timers,
                time: self.time,
            },
            served: 0,
            next: None,
            then: None,
            found: Found::new(&visit, &self.rnics),
        };
        let mut bells = ArrayVec::<_, WATCHED>::new();
        let mut all = true;
        let mut rang = false;
        for rnic in &self.rnics {
            let Some(tables) = rnic.visit(&visit).filter(|tables| tables.running) else {
                continue;
            };
            for (_, context) in tables.contexts.iter() {
                let Some(bell) = Bell::new(context, worker) else {
                    continue;
                };
                if bell.rings() {
                    rang = true;
                    scan.answer(tables, &bell);
                }
                all &= bells.try_push((tables, bell)).is_ok();
            }
        }
        let mut watched = false;
        if !rang && idle && all && watch != Watch::No {
            for _ in 0..LOOKS {
                if bells.iter().any(|(_, bell)| bell.rings()) {
                    watched = true;
                    for (tables, bell) in bells.iter().filter(|(_, bell)| bell.rings()) {
                        scan.answer(tables, bell);
                    }
                    break;
                }
                if visit.awaited() || worker.is_wanted(self.generation) {
                    break;
                }
                if watch == Watch::Relaxed {
                    std::hint::spin_loop();
                }
            }
        }
        let mut lingered = false;
        if let Some(last) = scan.then.take() {
            scan.serve(last);
            // Where something ends at a time, that is looked at more often.
            let timed = !scan.turns.timers.is_empty() || !self.holds.is_empty();
            let left = match watch {
                Watch::Eagerly | Watch::Relaxed if all && timed => LINGERS / 16,
                Watch::Eagerly | Watch::Relaxed if all => LINGERS,
                _ => 0,
            };
            let mut linger = Linger {
                visit: &visit,
                worker,
                generation: self.generation,
                bells: &bells,
                left,
                next: None,
            };
            scan.turns.last(last, &mut linger, &mut scan.found);
            lingered = linger.left != left;
        }
        Look {
            served: scan.served,
            watched,
            lingered,
        }
    }

    /// Gives queue pairs whose time has come a turn.
    fn expire(&mut self) {
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > self.time {
                break;
            }
            let qp = entry.remove();
            self.again(qp);
        }
    }

    /// Puts a queue pair whose timer is removed at the end of the queue, unless it is in it.
    fn again(&mut self, qp: Arc<Qp>) {
        if !qp.scheduled.swap(true, Ordering::SeqCst) {
            self.queue.push_back(qp);
        }
    }

    /// Gives the first of the queue their turns, `most` of them.
    fn turns(&mut self, most: usize) {
        if self.queue.is_empty() {
            return;
        }
        let mut visit = self.visitor.enter();
        for _ in 0..most {
            let Some(qp) = self.queue.pop_front() else {
                break;
            };
            // Before the turn: what is scheduled during it needs another.
            qp.scheduled.store(false, Ordering::SeqCst);
            let share = match self.queue.front() {
                Some(next) => {
                    next.prefetch();
                    SHARE
                }
                None => LONE_SHARE,
            };
            visit.pause();
            let mut turns = Turns {
                visit: &visit,
                worker: &self.worker,
                queue: &mut self.queue,
                timers: &mut self.timers,
                time: self.time,
            };
            match qp.rnic.visit(&visit) {
                Some(tables) => {
                    let mut no = turns.no_linger();
                    let mut found = Found::new(&visit, &self.rnics);
                    if turns.give(tables, &qp, share, &mut no, &mut found) {
                        break;
                    }
                }
                None => turns.again(&qp),
            }
        }
    }

    /// Sets the timer that wakes us. Returns how long to wait for it at most, milliseconds, as
    /// epoll has it.
    fn set_timer(&mut self, left: u64) -> i32 {
        // Zero would be no timer.
        match self.timer.reset(Duration::from_nanos(left.max(1)), None) {
            Ok(()) => -1,
            Err(error) => {
                log::error!("worker {}: cannot set a timer: {error}", self.worker.index);
                1
            }
        }
    }

    /// Waits for a notification, another thread, the time `until`, or the first timer.
    fn wait(&mut self, now: u64, until: Option<u64>) {
        let timeout = match self.next_timer().into_iter().chain(until).min() {
            Some(at) => self.set_timer(at.saturating_sub(now)),
            None => -1,
        };
        let mut events = [EpollEvent::default(); 16];
        match self.worker.epoll.wait(timeout, &mut events) {
            Ok(n) => {
                if events.iter().take(n).any(|event| event.data() == KICK) {
                    count(&self.worker.stats.kicks);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => log::error!("worker {}: cannot wait: {error}", self.worker.index),
        }
        self.time = self.now();
    }

    /// Sleeps, unless there is something to do after all.
    fn sleep(&mut self, now: u64) {
        count(&self.worker.stats.sleeps);
        let told = self.announce(worker_status::SLEEPING);
        self.worker.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if told && !self.anything() {
            self.wait(now, None);
            self.patience.slept(now, self.time);
        }
        self.worker.asleep.store(false, Ordering::SeqCst);
        self.announce(worker_status::POLLING);
    }

    /// Does nothing for `nap` nanoseconds, or until a timer or another thread needs us, and then
    /// carries out what there is. Guests take it for polling, and do not notify.
    fn nap(&mut self, now: u64, nap: u64) {
        count(&self.worker.stats.naps);
        self.worker.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !self.worker.is_wanted(self.generation) {
            self.wait(now, Some(now.saturating_add(nap)));
        }
        self.worker.asleep.store(false, Ordering::SeqCst);
        let before = self.messages();
        self.round();
        self.patience.napped(self.messages().wrapping_sub(before));
    }

    /// Messages that we have sent, modulo 2^64.
    fn messages(&self) -> u64 {
        let sent = |rnic: &Arc<Rnic>| rnic.sent(self.worker.index);
        self.rnics.iter().map(sent).fold(0, u64::wrapping_add)
    }

    /// Whether there is anything to do: the look after SLEEPING was announced.
    fn anything(&mut self) -> bool {
        let visit = self.visitor.enter();
        self.worker.inbox_filled.load(Ordering::SeqCst)
            || self.worker.stopping.load(Ordering::SeqCst)
            || self.worker.generation.load(Ordering::SeqCst) != self.generation
            || self.rnics.iter().any(|rnic| match rnic.visit(&visit) {
                Some(tables) => {
                    tables.running
                        && tables.contexts.iter().any(|(_, context)| {
                            Bell::new(context, &self.worker)
                                .is_some_and(|bell| bell.root.load(Ordering::SeqCst) != 0)
                        })
                }
                None => true,
            })
    }
}

/// A worker's doorbell of a context.
#[derive(Clone, Copy)]
struct Bell<'a> {
    /// Set where something rang.
    root: &'a AtomicU64,
    context: &'a Context,
}

impl<'a> Bell<'a> {
    #[inline(always)]
    fn new(context: &'a Context, worker: &Worker) -> Option<Self> {
        let root = context.doorbell.word(block(worker) + ROOT_OFFSET as u64)?;
        Some(Self { root, context })
    }

    /// Whether anything rang. Who asks is about to take what did.
    #[inline(always)]
    fn rings(&self) -> bool {
        prefetch_write(self.root);
        self.root.load(Ordering::Relaxed) != 0
    }

    /// Takes what rang, and calls `f` with the queue pairs.
    #[inline(always)]
    fn take(&self, worker: &Worker, mut f: impl FnMut(&'a Arc<Qp>)) {
        let pages = &self.context.doorbell;
        let Some(slots) = self.context.workers.get(usize::from(worker.index)) else {
            return;
        };
        let seen = u64::from_le(self.root.load(Ordering::Relaxed));
        let first = seen.trailing_zeros().checked_sub(DIRECT_SHIFT);
        if let Some(Rung::Qp(qp)) = first.and_then(|slot| slots.get(slot)) {
            qp.ahead.prefetch_entry();
        }
        let block = block(worker);
        let mut ring = |slot: u32| match slots.get(slot) {
            Some(Rung::Qp(qp)) => {
                count(&worker.stats.doorbells);
                f(qp);
            }
            Some(Rung::Srq(srq)) => {
                count(&worker.stats.doorbells);
                srq.receives_posted();
            }
            None => {}
        };
        // Bits of slots that nobody has cost nothing more: a guest may set all of them all the
        // time.
        let end = slots.end();
        drain(self.root, |bit| {
            if bit >= DIRECT_SHIFT {
                ring(bit - DIRECT_SHIFT);
                return;
            }
            if 64 * 64 * bit >= end {
                return;
            }
            drain_at(
                pages,
                block + SUMMARY_OFFSET as u64 + 8 * u64::from(bit),
                |second| {
                    let leaf = 64 * bit + second;
                    if 64 * leaf >= end {
                        return;
                    }
                    drain_at(
                        pages,
                        block + LEAF_OFFSET as u64 + 8 * u64::from(leaf),
                        |third| {
                            let slot = 64 * leaf + third;
                            if slot >= DIRECT_SLOTS {
                                ring(slot);
                            }
                        },
                    );
                },
            );
        });
    }
}

/// Where a worker's block of the doorbell memory of a context begins.
fn block(worker: &Worker) -> u64 {
    u64::from(worker.index) * BLOCK_SIZE as u64
}

/// Clears the bits of a word, and calls `f` with each that was set.
#[inline(always)]
fn drain(word: &AtomicU64, mut f: impl FnMut(u32)) {
    let mut bits = u64::from_le(word.swap(0, Ordering::SeqCst));
    while bits != 0 {
        f(bits.trailing_zeros());
        bits &= bits - 1;
    }
}

/// The same with the word at `offset`, if any bit is set.
fn drain_at(pages: &Pages, offset: u64, f: impl FnMut(u32)) {
    if let Some(word) = pages.word(offset) {
        if word.load(Ordering::Relaxed) != 0 {
            drain(word, f);
        }
    }
}

/// Raises the event `number` that a completion queue holds back, if it still does; false if that is
/// not possible now.
fn release(visit: &Visit<'_>, cq: &Arc<Cq>, number: u32) -> bool {
    let Some(rnic) = cq.rnic.upgrade() else {
        return true;
    };
    let Some(tables) = rnic.visit(visit) else {
        return false;
    };
    // The start of a stopped VM raises what was held back.
    let present = tables.cqs.get(cq.number);
    if tables.running
        && present.is_some_and(|cq_there| Arc::ptr_eq(cq_there, cq))
        && cq.expire(number)
    {
        notify(tables, cq);
    }
    true
}

/// A queue pair that gets its turn, with the tables of its VM.
#[derive(Clone, Copy)]
struct Served<'a> {
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
}

/// A scan of doorbells.
struct Scan<'a> {
    turns: Turns<'a>,
    /// Turns to give at once, at most.
    most: usize,
    /// Turns given at once, or about to be.
    served: usize,
    /// The one to serve next, and the one after that: while others are served and looked for, what
    /// they need is fetched, and what that names.
    next: Option<Served<'a>>,
    then: Option<Served<'a>>,
    /// What those that were served found.
    found: Found<'a>,
}

impl<'a> Scan<'a> {
    /// Serves those whose doorbell rang.
    #[inline(always)]
    fn answer(&mut self, tables: &'a Tables, bell: &Bell<'a>) {
        bell.take(self.turns.worker, |qp| {
            if self.served == self.most || self.turns.visit.awaited() {
                self.turns.again(qp);
                return;
            }
            self.served += 1;
            let Some(then) = self.then.replace(Served { tables, qp }) else {
                return;
            };
            qp.prefetch();
            self.serve(then);
        });
    }

    /// Serves the next one. What comes after it is `then`.
    #[inline(always)]
    fn serve(&mut self, then: Served<'a>) {
        let Some(Served { tables, qp }) = self.next.replace(then) else {
            return;
        };
        then.qp.ahead.prefetch();
        let mut no = self.turns.no_linger();
        let found = &mut self.found;
        self.turns.give(tables, qp, SHARE, &mut no, found);
    }
}

/// What came while a queue pair lingered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// A work request of its own.
    Own,
    /// One of its peer.
    Answer,
}

/// Leave for a queue pair that has had its turn to wait for a moment for more work, as long as
/// nobody else has any: who sends one message at a time is answered sooner.
pub(crate) struct Linger<'a> {
    pub(crate) visit: &'a Visit<'a>,
    worker: &'a Worker,
    generation: u64,
    /// All doorbells.
    bells: &'a [(&'a Tables, Bell<'a>)],
    /// How often it may still be done.
    left: u32,
    /// The queue pair that gets the next turn.
    pub(crate) next: Option<Arc<Qp>>,
}

impl Linger<'_> {
    /// Whether there is any time for that.
    #[inline(always)]
    pub(crate) fn may(&self) -> bool {
        self.left != 0
    }

    /// Whether other doorbells than `own` ring.
    #[inline(always)]
    pub(crate) fn others_ring<const N: usize>(&self, own: [Option<&OwnBell<'_>>; N]) -> bool {
        self.bells.iter().any(|(_, bell)| {
            let ours = |own: &OwnBell<'_>| std::ptr::eq(own.root, bell.root).then_some(own.bit);
            let ours = own.into_iter().flatten().filter_map(ours);
            let ours = ours.fold(0, |bits, bit| bits | bit);
            bell.root.load(Ordering::Relaxed) & !ours != 0
        })
    }

    /// Accounts for what came and was carried out.
    #[inline(always)]
    pub(crate) fn spend(&mut self, done: Budget) {
        let messages = done.messages / LINGER.messages;
        let times = 1 + u64::from(messages) + done.bytes / LINGER.bytes;
        let times = u32::try_from(times).unwrap_or(u32::MAX);
        self.left = self.left.saturating_sub(times);
    }

    /// The doorbell of a queue pair of the VM of `tables`.
    #[inline(always)]
    pub(crate) fn bell<'b>(&self, tables: &'b Tables, qp: &'b Qp) -> Option<OwnBell<'b>> {
        let context = tables.contexts.get(qp.context)?;
        let root = Bell::new(context, self.worker)?.root;
        let bit = qp.slot.checked_add(DIRECT_SHIFT)?;
        // Without a bit of its own in the root word it is as everybody else's.
        let bit = 1u64.checked_shl(bit).unwrap_or(0).to_le();
        Some(OwnBell { root, bit, qp })
    }

    /// Waits until `posted` finds something, for as long as nobody else has work. It looks all the
    /// time if `eager`. Otherwise it looks when one of the doorbells `bells` rang, which say that
    /// there is something, and takes their rings.
    #[inline(always)]
    pub(crate) fn wait<const N: usize>(
        &mut self,
        bells: [&OwnBell<'_>; N],
        eager: bool,
        posted: impl Fn() -> Option<Came>,
    ) -> Option<Came> {
        if self.left == 0 {
            return None;
        }
        for _ in 0..LOOKS {
            if self.visit.awaited() || self.worker.is_wanted(self.generation) {
                return None;
            }
            let mut look = eager;
            for bell in bells {
                if eager {
                    // Its rings stay: who sees one standing need not ring again, and leaves us our
                    // cache line.
                    if bell.rings_for_receives() {
                        return None;
                    }
                } else {
                    // What was posted before a ring is looked for after that is taken.
                    look |= bell.hush()?;
                }
            }
            if look {
                if let Some(came) = posted() {
                    return Some(came);
                }
            }
            let others = if eager {
                self.others_ring(bells.map(Some))
            } else {
                self.bells.iter().any(|(_, bell)| bell.rings())
            };
            if others {
                return None;
            }
        }
        None
    }
}

/// The doorbell of one queue pair.
pub(crate) struct OwnBell<'a> {
    root: &'a AtomicU64,
    /// Its bit in there; zero: it has none.
    bit: u64,
    qp: &'a Qp,
}

impl OwnBell<'_> {
    /// Whether it may ring for a receive that somebody waits for.
    #[inline(always)]
    fn rings_for_receives(&self) -> bool {
        self.qp.awaited.load(Ordering::SeqCst) && self.root.load(Ordering::SeqCst) & self.bit != 0
    }

    /// Takes the ring, if it is the only one, and for a send. Returns whether, or none if it is not
    /// for a send.
    #[inline(always)]
    fn hush(&self) -> Option<bool> {
        if self.root.load(Ordering::Relaxed) != self.bit || self.bit == 0 {
            return Some(false);
        }
        self.root.fetch_and(!self.bit, Ordering::SeqCst);
        // Whoever waits for a receive says so before the guest is asked to ring for it.
        if self.qp.awaited.load(Ordering::SeqCst) {
            self.root.fetch_or(self.bit, Ordering::SeqCst);
            return None;
        }
        Some(true)
    }
}

/// Gives turns, with what follows from them.
struct Turns<'a> {
    visit: &'a Visit<'a>,
    worker: &'a Worker,
    queue: &'a mut VecDeque<Arc<Qp>>,
    timers: &'a mut BTreeMap<(u64, usize), Arc<Qp>>,
    /// The time, nanoseconds: that of the last look.
    time: u64,
}

impl<'a> Turns<'a> {
    /// No leave to linger.
    fn no_linger(&self) -> Linger<'a> {
        Linger {
            visit: self.visit,
            worker: self.worker,
            generation: 0,
            bells: &[],
            left: 0,
            next: None,
        }
    }

    /// Gives the last one that a scan found its turn. If nobody else waits, it may `linger`.
    #[inline(never)]
    fn last(&mut self, last: Served<'a>, linger: &mut Linger<'_>, found: &mut Found<'a>) {
        let Served { tables, qp } = last;
        if !self.queue.is_empty() {
            let mut no = self.no_linger();
            self.give(tables, qp, SHARE, &mut no, found);
            return;
        }
        self.give(tables, qp, LONE_SHARE, linger, found);
        // Not at once: two that answer each other would keep all others waiting.
        if let Some(qp) = linger.next.take() {
            self.again(&qp);
        }
    }

    /// Gives a queue pair of the VM of `tables` a turn of at most `share`. Returns whether others
    /// should be looked for now.
    fn give<'b>(
        &mut self,
        tables: &'b Tables,
        qp: &'b Arc<Qp>,
        share: Budget,
        linger: &mut Linger<'_>,
        found: &mut Found<'b>,
    ) -> bool
    where
        'a: 'b,
    {
        count(&self.worker.stats.turns);
        match run(tables, qp, self.time, share, linger, found) {
            Turn::Idle if qp.dead.load(Ordering::SeqCst) => {
                let until = *lock(&qp.timer);
                self.timers.remove(&(until, Arc::as_ptr(qp) as usize));
            }
            Turn::Idle => {}
            Turn::Again => self.again(qp),
            Turn::Long => {
                self.again(qp);
                return true;
            }
            Turn::Park(until) => {
                let id = Arc::as_ptr(qp) as usize;
                let old = std::mem::replace(&mut *lock(&qp.timer), until);
                self.timers.remove(&(old, id));
                self.timers.insert((until, id), qp.clone());
            }
        }
        false
    }

    /// Puts a queue pair at the end of the queue, unless it is about to get a turn anyway.
    fn again(&mut self, qp: &Arc<Qp>) {
        if !qp.scheduled.swap(true, Ordering::SeqCst) {
            self.queue.push_back(qp.clone());
        }
    }
}

/// A turn of a queue pair of the VM of `tables`.
fn run<'a>(
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    now: u64,
    share: Budget,
    linger: &mut Linger<'_>,
    found: &mut Found<'a>,
) -> Turn {
    // The start of a stopped VM schedules all its queue pairs.
    if !tables.running || qp.dead.load(Ordering::SeqCst) {
        return Turn::Idle;
    }
    if qp.cq_errored() {
        qp.fail();
    }
    match qp.state() {
        qp_state::RTS | qp_state::SQD => {
            if qp.awaited.load(Ordering::SeqCst) {
                qp.responder().receives_posted(qp);
            }
            qp.requester().turn(tables, qp, now, share, linger, found)
        }
        qp_state::SQE => {
            if qp.requester().flush(tables, qp, FLUSH) {
                Turn::Again
            } else {
                Turn::Idle
            }
        }
        qp_state::ERR => {
            let sends = qp.requester().flush(tables, qp, FLUSH);
            let receives = qp.responder().flush(tables, qp, FLUSH);
            if sends || receives {
                Turn::Again
            } else {
                Turn::Idle
            }
        }
        _ => {
            if qp.awaited.load(Ordering::SeqCst) {
                qp.responder().receives_posted(qp);
            }
            Turn::Idle
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{region, GuestMemory};
    use crate::verbs::tables::Slots;
    use vhost_device_rdma_sync::Visitors;
    use virtio_rdma_spec::doorbell::BLOCK_PAGES;

    #[test]
    fn bits_of_slots_that_nobody_has_are_not_looked_at() {
        let memory = GuestMemory::new(vec![region(0, u64::from(BLOCK_PAGES))]).unwrap();
        let pages: Vec<u64> = (0..u64::from(BLOCK_PAGES)).map(|page| page << 12).collect();
        let doorbell = Pages::resolve(&memory, &pages, 12).unwrap();
        let words = || (0..BLOCK_SIZE as u64).step_by(8);
        for at in words() {
            doorbell.word(at).unwrap().store(!0, Ordering::Relaxed);
        }
        let mut slots = Slots::default();
        // One leaf, and one slot of the next.
        for slot in 0..65 {
            assert_eq!(slots.reserve(), Ok(slot));
        }
        let context = Context {
            doorbell,
            workers: vec![slots],
            users: 0,
            footprint: 0,
        };
        let (_, mut visitors) = Visitors::new(1);
        let visitor = visitors.pop().unwrap();
        let (worker, _) = Worker::without_thread(0, visitor, Duration::ZERO).unwrap();
        Bell::new(&context, &worker).unwrap().take(&worker, |_| ());
        let read: Vec<u64> = words()
            .filter(|at| context.doorbell.word(*at).unwrap().load(Ordering::Relaxed) == 0)
            .collect();
        let leaf = LEAF_OFFSET as u64;
        let summary = SUMMARY_OFFSET as u64;
        assert_eq!(read, [ROOT_OFFSET as u64, summary, leaf, leaf + 8]);
    }
}
