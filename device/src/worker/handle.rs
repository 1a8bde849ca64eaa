// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A worker as other threads see it: what they hand to it, and how they wake it.
use std::fs::File;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{sched_setaffinity, CpuSet};
use serde_json::{json, Map, Value};
use vhost_device_rdma_sync::{lock, Reader};
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::event_loop::Loop;
use super::messages;
use super::supervision::{supervise, OnFailure};
use super::timers::{Alarm, Held};
use super::watchdog::{Account, WatchdogSleep};
use crate::engine::queue_pair::Qp;
use crate::engine::vm::{Schedule, Vm};
use crate::epoll_fd::EpollFd;
use crate::eventfd;
use crate::fabric::iwarp::port::Request;
use crate::fabric::registry::Registry;
use crate::fabric::wire::capture::Capture;
use crate::fabric::wire::egress::View;
use crate::fabric::wire::layer::plan::Planned;
use crate::fabric::wire::port::uplinks::Uplinks;
use crate::fabric::wire::port::Direction;
use crate::sandbox::{Kind, Sandbox};
use crate::verbs::cq::Cq;
use crate::verbs::gid_policy::mac_text;

/// Epoll data of the notifications from guests.
pub(super) const KICK: u64 = 1;
/// Epoll data of wake-ups from other threads.
pub(super) const WAKE: u64 = 0;
/// Epoll data of the alarm.
pub(super) const TIMER: u64 = 2;
/// Epoll data of frames that have come.
pub(super) const WIRE: u64 = 3;
/// Epoll data of connections of iWARP.
pub(super) const IWARP: u64 = 4;

/// Epoll data of messages are greater: this and their number.
pub(super) const MESSAGES: u64 = 1 << 32;

/// What others hand to a worker.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Queue pairs to poll.
    pub(super) qps: Vec<Arc<Qp>>,
    /// Completion queues whose event is held back.
    pub(super) cqs: Vec<Held>,
    /// A port came up: queue pairs that wait may have a way to their peers now.
    pub(super) try_again: bool,
    /// What drivers want of connections of iWARP.
    pub(super) iwarp: Vec<Request>,
    /// Who wants to know whether connections of iWARP have anything to send.
    pub(super) asks_unsent: Option<Sender<bool>>,
}

/// Upper bounds of the lengths of turns that are counted, nanoseconds, but for the longest.
pub(crate) const TURNS: [u64; 12] = {
    let mut bounds = [1_000; 12];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4;
        at += 1;
    }
    bounds
};

/// How long turns took: what a worker does from one look at the clock to the next while it has work.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Those that are no longer than the bound of [`TURNS`], and longer than the one before; in the
    /// end those that are longer than all.
    counts: [AtomicU64; TURNS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Turns {
    /// Counts one that took so many nanoseconds.
    pub(super) fn count(&self, nanoseconds: u64) {
        let at = TURNS.iter().take_while(|bound| **bound < nanoseconds);
        if let Some(counter) = self.counts.get(at.count()) {
            count(counter);
        }
        let sum = self.nanoseconds.load(Ordering::Relaxed);
        let sum = sum.wrapping_add(nanoseconds);
        self.nanoseconds.store(sum, Ordering::Relaxed);
    }

    /// How many there were of each length, and how long all took, nanoseconds.
    fn read(&self) -> (Vec<u64>, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (
            self.counts.iter().map(load).collect(),
            load(&self.nanoseconds),
        )
    }
}

/// What a worker counts. Only the worker writes.
#[derive(Debug, Default)]
pub(super) struct Stats {
    pub(super) turns: Turns,
    pub(super) polls: AtomicU64,
    pub(super) sleeps: AtomicU64,
    pub(super) back_offs: AtomicU64,
    pub(super) kicks: AtomicU64,
    pub(super) doorbells: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
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
    pub(super) inbox: Mutex<Inbox>,
    pub(super) inbox_filled: AtomicBool,
    pub(super) asleep: AtomicBool,
    pub(super) wake: EventFd,
    pub(super) epoll: EpollFd,
    pub(super) vms: Mutex<Vec<Arc<Vm>>>,
    pub(super) messages: Mutex<messages::List>,
    /// Changes with `vms`, and when the status must be announced again.
    pub(super) generation: AtomicU64,
    pub(super) stopping: AtomicBool,
    /// The thread waits in the kernel, as it should.
    pub(super) waits: AtomicBool,
    /// The watchdog's, which is woken when this worker wakes up.
    pub(super) watchdog_sleep: Arc<WatchdogSleep>,
    /// What the kernel tells of the thread.
    pub(super) account: OnceLock<Account>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) stats: Stats,
    /// What others see of the ways out of this process, if they are this worker's.
    pub(super) wire: OnceLock<Arc<View>>,
    /// What is captured of this worker's messages, and those of others.
    pub(super) capture: Arc<Capture>,
}

/// What the workers of an adapter share.
#[derive(Debug, Clone, Default)]
pub struct Shared {
    /// Who has which GID.
    pub registry: Arc<Registry>,
    /// What is captured.
    pub(crate) capture: Arc<Capture>,
}

/// How a worker's thread is started.
#[derive(Debug, Clone, Default)]
pub struct ThreadOptions {
    /// The CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// What confines it.
    pub sandbox: Sandbox,
    /// The ways out of this process, as far as they are this worker's.
    pub uplinks: Uplinks,
    /// Connections of iWARP are this worker's.
    pub iwarp: bool,
}

impl Worker {
    /// Starts worker `index`, which sleeps after looking for work in vain for `poll_budget`, at
    /// most. `failed` is told if its thread ends before it is stopped.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(
        index: u16,
        reader: Reader,
        shared: Shared,
        poll_budget: Duration,
        options: ThreadOptions,
        failed: OnFailure,
    ) -> std::io::Result<Arc<Self>> {
        let (worker, mut work) = Self::without_thread(index, reader, shared, poll_budget)?;
        if !options.uplinks.is_empty() {
            work.set_uplinks(&options.uplinks)?;
        }
        if options.iwarp {
            work.set_iwarp()?;
        }
        worker.run(work, options, failed, Loop::run)?;
        Ok(worker)
    }

    /// Starts the worker's thread, which does `body`.
    pub(super) fn run(
        &self,
        mut work: Loop,
        options: ThreadOptions,
        failed: OnFailure,
        body: impl FnOnce(&mut Loop) + Send + 'static,
    ) -> std::io::Result<()> {
        let index = self.index;
        let begin = move || {
            if let Some(cpu) = options.cpu {
                pin(index, cpu);
            }
            let account = Account::of_this_thread();
            if let Err(error) = &account {
                log::warn!("no watchdog for worker {index}: /proc does not tell of it: {error}");
            }
            eventfd::set_up_thread()?;
            Ok(account.ok())
        };
        let (kind, name) = (Kind::Worker, format!("worker{index}"));
        let worker = work.worker();
        let thread = options
            .sandbox
            .spawn_after(kind, name, begin, move |account| {
                // It is the only one.
                let _ = account.map(|account| worker.account.set(account));
                supervise(&worker, &failed, || body(&mut work));
            })?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// A worker that does nothing but what its loop is told to, in the caller's thread: for
    /// measurements and tests.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn without_thread(
        index: u16,
        reader: Reader,
        shared: Shared,
        poll_budget: Duration,
    ) -> std::io::Result<(Arc<Self>, Loop)> {
        let wake = EventFd::new(EFD_NONBLOCK)?;
        let epoll = EpollFd::new()?;
        // Edge triggered: every write wakes, and nobody needs to read.
        epoll.add_edge_triggered(&wake, WAKE)?;
        let alarm = Alarm::new()?;
        epoll.add_edge_triggered(&alarm, TIMER)?;
        let worker = Arc::new(Self {
            index,
            inbox: Mutex::default(),
            inbox_filled: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake,
            epoll,
            vms: Mutex::default(),
            messages: Mutex::default(),
            generation: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            watchdog_sleep: Arc::default(),
            account: OnceLock::new(),
            thread: Mutex::default(),
            stats: Stats::default(),
            wire: OnceLock::new(),
            capture: shared.capture,
        });
        let work = Loop::new(worker.clone(), reader, shared.registry, alarm, poll_budget);
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

    /// Has all parked queue pairs polled: they look for their peers again.
    pub fn try_again(&self) {
        self.put(|inbox| inbox.try_again = true);
    }

    /// A driver wants something of connections of iWARP, which are this worker's.
    pub(crate) fn ask_iwarp(&self, request: Request) {
        self.put(|inbox| inbox.iwarp.push(request));
    }

    /// Has it answer whether connections of iWARP have anything to send that the system has not taken.
    pub(crate) fn ask_unsent(&self, answer: Sender<bool>) {
        self.put(|inbox| inbox.asks_unsent = Some(answer));
    }

    /// Whether anything but doorbells wants the worker, which knows of the changes up to
    /// `generation`.
    #[inline(always)]
    pub(super) fn is_wanted(&self, generation: u64) -> bool {
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

    /// Wakes a thread that is parked: that of a test.
    #[cfg(test)]
    pub(super) fn unpark(&self) {
        let stopping = &self.stopping;
        stopping.store(true, Ordering::SeqCst);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.iter().for_each(|thread| thread.thread().unpark());
    }

    /// Whether it was told to stop.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn wake_up(&self) {
        // It fails only when the counter is full: then the worker is woken anyway.
        let _ = self.wake.write(1);
    }

    /// Serves a VM from now on.
    pub fn add(&self, vm: &Arc<Vm>) {
        self.vms
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(vm.clone());
        self.announce_again();
    }

    /// Serves a VM no longer.
    pub fn remove(&self, vm: &Arc<Vm>) {
        self.vms
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, vm));
        self.announce_again();
    }

    /// Makes the worker take over the list of VMs and tell the guests its status again.
    pub fn announce_again(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.wake_up();
    }

    /// Wakes the worker whenever `fd` is written to.
    pub fn add_kick(&self, fd: &File) {
        if let Err(error) = self.epoll.add_edge_triggered(fd, KICK) {
            log::error!(
                "worker {}: cannot wait for a doorbell queue: {error}",
                self.index
            );
        }
    }

    /// No longer waits for `fd`.
    pub fn remove_kick(&self, fd: &File) {
        if let Err(error) = self.epoll.remove(fd) {
            log::error!(
                "worker {}: cannot stop waiting for a doorbell queue: {error}",
                self.index
            );
        }
    }

    /// What others see of the ways out of this process, if they are this worker's.
    pub(crate) fn wire(&self) -> Option<&Arc<View>> {
        self.wire.get()
    }

    /// Whether its thread sleeps.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// What it has counted: polls of queue pairs, sleeps, waits that were cut short for others, wake-ups
    /// by guests, doorbells that rang.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 5] {
        [
            ("polls", &self.stats.polls),
            ("sleeps", &self.stats.sleeps),
            ("back_offs", &self.stats.back_offs),
            ("kicks", &self.stats.kicks),
            ("doorbells", &self.stats.doorbells),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }

    /// How many turns there were of each length ([`TURNS`]), and how long all took, nanoseconds.
    pub(crate) fn turns(&self) -> (Vec<u64>, u64) {
        self.stats.turns.read()
    }

    /// How long its thread has been on a CPU; none, if the kernel does not tell.
    pub(crate) fn time_on_cpu(&self) -> Option<Duration> {
        self.account.get()?.time_on_cpu()
    }

    /// Counters and state, for people and programs.
    #[must_use]
    pub fn status(&self) -> Value {
        let mut status = json!({ "index": self.index, "asleep": self.is_asleep() });
        for (name, count) in self.counts() {
            status[name] = count.into();
        }
        if let Some(View {
            counters, faults, ..
        }) = self.wire.get().map(|view| &**view)
        {
            let numbers = |(name, count): (&str, u64)| (name.to_owned(), json!(count));
            let mut wire: Map<_, _> = counters.list().map(numbers).collect();
            let dropped: Map<_, _> = counters.dropped().map(numbers).collect();
            wire.insert("dropped".to_owned(), dropped.into());
            let faults: Vec<_> = faults.list().iter().map(|one| planned(one)).collect();
            wire.insert("faults".to_owned(), faults.into());
            status["wire"] = wire.into();
        }
        status
    }
}

/// The faults of a device in a direction, and what they did.
fn planned(one: &Planned) -> Value {
    let ((segment, mac), direction) = (one.station, one.direction);
    let counts = one.counts.list().into_iter();
    let counts = counts.map(|(name, count)| (name.to_owned(), json!(count)));
    json!({
        "segment": segment.to_string(),
        "mac": mac_text(&mac),
        "direction": match direction { Direction::In => "in", Direction::Out => "out" },
        "settings": one.settings.to_string(),
        "counts": counts.collect::<Map<_, _>>(),
    })
}

impl Schedule for Worker {
    fn schedule(&self, qp: &Arc<Qp>) {
        if qp.scheduled.swap(true, Ordering::SeqCst) {
            return;
        }
        self.put(|inbox| inbox.qps.push(qp.clone()));
    }

    fn hold(&self, vm: &Weak<Vm>, cq: &Arc<Cq>) {
        if !cq.handed.swap(true, Ordering::SeqCst) {
            self.put(|inbox| {
                let held = Held {
                    vm: vm.clone(),
                    cq: Arc::downgrade(cq),
                };
                inbox.cqs.push(held);
            });
        }
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
