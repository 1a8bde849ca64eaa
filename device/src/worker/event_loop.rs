// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a worker's thread does, again and again.
use std::fmt;
use std::io;
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use arrayvec::ArrayVec;
use vhost_device_rdma_sync::Reader;
use virtio_rdma_spec::doorbell::worker_status;

use super::busy_poll::{BusyPoller, POLLS};
use super::doorbell::Doorbell;
use super::handle::{count, Worker, IWARP, KICK, MESSAGES, WIRE};
use super::idle_policy::{Idle, IdlePolicy};
use super::iwarp::IwarpEnd;
use super::messages::Unread;
use super::scheduler::{QpQueue, Scan, Scheduler};
use super::timers::{Alarm, Holds, Parked};
use super::watched::{Watched, FEW};
use super::wire::WireEnd;
use crate::engine::queue_pair::Qp;
use crate::engine::tables::{Context, Tables};
use crate::engine::vm::Vm;
use crate::engine::{BUDGET, LONE_BUDGET};
use crate::epoll_fd::NO_EVENT;
use crate::fabric::local::lookup_cache::LookupCache;
use crate::fabric::registry::Registry;
use crate::fabric::wire::egress::View;
use crate::fabric::wire::imagined::Positions;
use crate::fabric::wire::port::uplinks::{UplinkPort, Uplinks};
use crate::probes;
use crate::verbs::cq::clock;

/// Queue pairs that are polled at once during a scan.
const MOST_POLLED: usize = 32;
/// Bytes that polls of the run queue may cost before the doorbells are scanned again.
const MOST_COST: u64 = 12 * BUDGET.bytes;
/// Parked queue pairs of a VM whose time has come that are woken in a poll iteration.
const WOKEN: usize = 1;
/// Most doorbells that are busy polled, one for each bit of a word: with more contexts, each poll
/// iteration scans some of them, and that takes its time.
const BUSY_POLLED: usize = 64;
/// How often the last queue pair may find more work by busy polling before the clock and everything
/// else get their poll iteration.
const BUSY_POLLS: u32 = 256;

/// How often events are taken before work begins, at most: guests can make more and more.
const MOST_WAITS: usize = 256;

/// What a poll iteration busy polls for a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polling {
    No,
    /// The queue pair that was polled last: for what a sender posts at its completion, a sleep costs
    /// more, and a notification of it.
    Last,
    /// If nothing rings, all doorbells, too.
    Eagerly,
    /// The same, with pauses.
    Relaxed,
}

/// What a poll iteration found.
#[derive(Debug, Clone, Copy)]
struct Iteration {
    /// Queue pairs that were polled at once.
    served: usize,
    /// There was nothing at first.
    waited: bool,
    /// Busy polling of the last queue pair found more work.
    busy_polled: bool,
    /// Anything was carried out: a doorbell may ring for what was found before.
    useful: bool,
}

/// The event loop of a worker: what only its thread has.
pub struct Loop {
    worker: Arc<Worker>,
    reader: Reader,
    registry: Arc<Registry>,
    vms: Vec<Arc<Vm>>,
    /// Which doorbells of each of them are looked at.
    watched: Vec<Watched>,
    generation: u64,
    queue: QpQueue,
    parked: Parked,
    holds: Holds,
    /// Wakes the thread from sleep.
    alarm: Alarm,
    unread: Unread,
    /// The time at the end of the last poll iteration, nanoseconds.
    time: u64,
    /// What the polls of VMs that compete cost is measured, and not estimated. Estimates are the
    /// same each time: what does rounds when it is told to goes by them.
    timed: bool,
    /// How long to poll for work before sleeping.
    idle_policy: IdlePolicy,
    /// The ways out of this process, if they are this worker's.
    wire: Option<WireEnd>,
    /// Connections of iWARP, if they are this worker's.
    iwarp: Option<IwarpEnd>,
    /// What is known of queue pairs whose messages are captured.
    positions: Positions,
}

/// The doorbells that a poll iteration has looked at.
struct Doorbells<'a> {
    list: ArrayVec<(&'a Tables, Doorbell<'a>), BUSY_POLLED>,
    /// A bit for each of `list` that rings.
    ringing: u64,
    /// The VM of the last one that rings.
    rang: Option<&'a Tables>,
    /// Those that ring are of several VMs.
    several: bool,
    /// These are all that there are.
    all: bool,
}

impl Default for Doorbells<'_> {
    fn default() -> Self {
        Self {
            list: ArrayVec::new(),
            ringing: 0,
            rang: None,
            several: false,
            all: true,
        }
    }
}

impl<'a> Doorbells<'a> {
    /// Looks at the doorbell of a context. Returns whether it rings.
    #[inline(always)]
    fn look(&mut self, scan: &mut Scan<'a>, tables: &'a Tables, context: &'a Context) -> bool {
        let Some(doorbell) = Doorbell::new(context, scan.scheduler.worker) else {
            return false;
        };
        let rings = doorbell.rings();
        if rings {
            self.several |= self.rang.is_some_and(|rang| !std::ptr::eq(rang, tables));
            self.rang = Some(tables);
            self.ringing |= 1u64.checked_shl(self.list.len() as u32).unwrap_or_default();
        }
        if self.list.try_push((tables, doorbell)).is_err() {
            self.all = false;
            if rings {
                // With so many there is no hurry.
                scan.most = 0;
                scan.answer(tables, &doorbell);
            }
        }
        rings
    }
}

impl fmt::Debug for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loop")
            .field("worker", &self.worker.index)
            .finish_non_exhaustive()
    }
}

impl Loop {
    pub(super) fn new(
        worker: Arc<Worker>,
        reader: Reader,
        registry: Arc<Registry>,
        alarm: Alarm,
        poll_budget: Duration,
    ) -> Self {
        Self {
            worker,
            reader,
            registry,
            vms: Vec::new(),
            watched: Vec::new(),
            generation: u64::MAX,
            queue: QpQueue::default(),
            parked: Parked::default(),
            holds: Holds::default(),
            alarm,
            unread: Unread::default(),
            time: clock(),
            timed: false,
            idle_policy: IdlePolicy::new(poll_budget),
            wire: None,
            iwarp: None,
            positions: Positions::default(),
        }
    }

    /// The ways out of this process are this worker's.
    ///
    /// # Errors
    /// If the system refuses to wait for them.
    pub fn set_uplinks(&mut self, uplinks: &Uplinks) -> io::Result<()> {
        let port = UplinkPort::new(uplinks)?;
        port.wait_in(&self.worker.epoll, WIRE)?;
        let view = || View::new(self.worker.capture.clone());
        let view = self.worker.wire.get_or_init(|| Arc::new(view())).clone();
        self.wire = Some(WireEnd::new(port, view, self.worker.index));
        // The list of VMs is taken over anew.
        self.generation = u64::MAX;
        Ok(())
    }

    /// Connections of iWARP are this worker's.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn set_iwarp(&mut self) -> io::Result<()> {
        let iwarp = IwarpEnd::new(self.worker.index)?;
        iwarp.wait_in(&self.worker.epoll, IWARP)?;
        self.iwarp = Some(iwarp);
        Ok(())
    }

    pub(super) fn worker(&self) -> Arc<Worker> {
        self.worker.clone()
    }

    // Out of line: there are probes in it.
    #[inline(never)]
    pub(super) fn run(&mut self) {
        self.timed = true;
        let mut idle_since = None;
        // The time of the last poll iteration, if it found nothing.
        let mut polled = None;
        // There was work since the last sleep.
        let mut worked = false;
        while !self.worker.stopping.load(Ordering::Relaxed) {
            // Work that comes at once is found sooner without pauses. Later, pauses leave the core
            // to its other hardware thread.
            let polling = match polled {
                _ if self.idle_policy.budget(self.time) == 0 => {
                    if self.idle_policy.expects_more() {
                        Polling::Last
                    } else {
                        Polling::No
                    }
                }
                None => Polling::Eagerly,
                Some(_) => Polling::Relaxed,
            };
            let began = self.time;
            let polls = self.polls();
            probes::turn_begin(self.worker.index);
            let Iteration {
                served,
                waited,
                busy_polled,
                useful,
            } = self.iterate(MOST_POLLED, polling);
            let now = self.time;
            let before = polled.take();
            // Several queue pairs may have taken so long themselves.
            if let Some(before) = before.filter(|_| served <= 1 && !busy_polled) {
                self.idle_policy.polled(before, now);
            }
            if served != 0 || !self.queue.is_empty() {
                let useful = useful || !self.queue.is_empty();
                if useful && (before.is_some() || waited || busy_polled) {
                    self.idle_policy.found();
                }
                if useful && (worked || busy_polled) {
                    self.idle_policy.more_came();
                }
                if worked && !waited && !busy_polled {
                    let turns = &self.worker.stats.turns;
                    turns.count(now.saturating_sub(began));
                }
                worked |= useful;
                if self.unread.is_urgent(now) {
                    self.take_notifications();
                }
                self.run_queued(MOST_COST);
                probes::turn_end(self.worker.index, self.polls().wrapping_sub(polls));
                idle_since = None;
                continue;
            }
            probes::turn_end(self.worker.index, 0);
            let idle = now.saturating_sub(*idle_since.get_or_insert(now));
            let budget = self.idle_policy.budget(now);
            // It costs nothing while the worker looks for more. Without work, they may be about
            // something else.
            let read = budget != 0 || !worked || self.unread.is_due(now);
            if read && !self.unread.is_empty() {
                self.take_notifications();
            }
            if idle < budget {
                polled = Some(now);
            } else {
                worked = false;
                match self.idle_policy.idle(now) {
                    Idle::Sleep => self.sleep(now),
                    Idle::BackOff(back_off) => self.back_off(now, back_off),
                }
                idle_since = None;
            }
        }
        if let Some(wire) = &mut self.wire {
            wire.flush();
        }
        while let Some(qp) = self.queue.pop() {
            qp.scheduled.store(false, Ordering::SeqCst);
        }
    }

    /// One poll iteration: looks at everything that may bring work, and polls up to `most` queue
    /// pairs at once.
    fn iterate(&mut self, most: usize, polling: Polling) -> Iteration {
        self.refresh();
        self.positions.end_with(&self.worker.capture);
        self.take_inbox();
        let came = self.look_at_wire() | self.look_at_connections();
        let mut iteration = self.scan(most, polling);
        iteration.served += usize::from(came);
        iteration.useful |= came;
        if let Some(wire) = self.wire.as_mut().filter(|_| self.queue.is_empty()) {
            wire.flush();
        }
        self.time = clock();
        self.expire();
        self.holds.release(self.time, &mut self.reader);
        iteration
    }

    /// Takes frames that have come, if it is time to look for them. Returns whether there were any.
    #[inline(always)]
    fn look_at_wire(&mut self) -> bool {
        let wire = self.wire.as_mut();
        wire.is_some_and(|wire| wire.is_due(self.time, &self.queue)) && self.look_for_frames()
    }

    // Out of line: most poll iterations do not look.
    #[inline(never)]
    fn look_for_frames(&mut self) -> bool {
        let Some(wire) = &mut self.wire else {
            return false;
        };
        let section = self.reader.enter();
        let (queue, worker) = (&mut self.queue, self.worker.index);
        wire.look(self.time, &section, &self.registry, queue, worker)
    }

    /// Looks at connections of iWARP. Returns whether there was anything to do.
    #[inline(always)]
    fn look_at_connections(&mut self) -> bool {
        let Some(iwarp) = &mut self.iwarp else {
            return false;
        };
        let section = self.reader.enter();
        iwarp.look(self.time, &section, &self.registry, &mut self.queue)
    }

    /// What the worker does again and again while it polls: a poll iteration, and then the run
    /// queue. Returns whether there was any work: a doorbell that rings is none.
    pub fn round(&mut self) -> bool {
        let Iteration { useful, .. } = self.iterate(MOST_POLLED, Polling::No);
        let work = useful || !self.queue.is_empty();
        self.run_queued(MOST_COST);
        work
    }

    /// As [`Self::round`], with busy polling for what may come next, as while work comes and goes.
    /// Returns whether busy polling of the last queue pair found more work.
    pub fn busy_round(&mut self) -> bool {
        let Iteration { busy_polled, .. } = self.iterate(MOST_POLLED, Polling::Eagerly);
        self.run_queued(MOST_COST);
        busy_polled
    }

    /// As [`Self::round`], but polls one queue pair at most: for tests of what is in between.
    pub fn step(&mut self) {
        self.iterate(0, Polling::No);
        self.run_queued(1);
    }

    /// Takes over changes of the list of VMs.
    fn refresh(&mut self) {
        let generation = self.worker.generation.load(Ordering::SeqCst);
        if generation != self.generation {
            self.take_vms(generation);
        }
    }

    #[cold]
    fn take_vms(&mut self, generation: u64) {
        self.generation = generation;
        self.vms.clone_from(
            &self
                .worker
                .vms
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.watched.clear();
        self.watched.resize_with(self.vms.len(), Watched::default);
        self.parked.forget_dead();
        if let Some(wire) = &mut self.wire {
            wire.set_vms(&self.vms);
        }
        self.announce(worker_status::POLLING);
    }

    /// Tells all guests the worker's status; false if one could not be told now.
    fn announce(&mut self, status: u32) -> bool {
        let mut all = true;
        let section = self.reader.enter();
        for vm in &self.vms {
            match vm.read_in(&section) {
                Some(tables) => tables.announce(self.worker.index, status),
                // The writer may be about to start the VM: then the page says SLEEPING, and the
                // generation changes.
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

    // Out of line: most poll iterations find the inbox empty.
    #[inline(never)]
    fn empty_inbox(&mut self) {
        let mut inbox = self
            .worker
            .inbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.worker.inbox_filled.store(false, Ordering::SeqCst);
        for qp in inbox.qps.drain(..) {
            self.queue.add(qp);
        }
        let cqs = std::mem::take(&mut inbox.cqs);
        let try_again = std::mem::take(&mut inbox.try_again);
        let requests = std::mem::take(&mut inbox.iwarp);
        let asks_unsent = inbox.asks_unsent.take();
        drop(inbox);
        if let Some(iwarp) = self.iwarp.as_mut().filter(|_| !requests.is_empty()) {
            let section = self.reader.enter();
            iwarp.ask(requests, &section, &self.registry, clock());
        }
        if let Some(asks) = asks_unsent {
            let unsent = self.iwarp.as_ref().is_some_and(IwarpEnd::waits_to_send);
            // Who has asked may have gone.
            let _ = asks.send(unsent);
        }
        if try_again {
            for qp in self.parked.take() {
                self.again(qp);
            }
        }
        if !cqs.is_empty() {
            let time = clock();
            for held in cqs {
                self.holds.begin(held, time);
            }
        }
    }

    /// When the first timer ends, nanoseconds.
    fn next_timer(&self) -> Option<u64> {
        self.parked
            .next()
            .into_iter()
            .chain(self.holds.next())
            .chain(self.wire.as_ref().and_then(WireEnd::timer))
            .chain(self.iwarp.as_ref().and_then(IwarpEnd::timer))
            .chain(self.unread.latest())
            .min()
    }

    /// Scans the doorbells. If the run queue is empty, the first `most` queue pairs that rang are
    /// polled at once; the others go to the run queue. If nothing rang, it busy polls the doorbells
    /// for a moment.
    fn scan(&mut self, most: usize, polling: Polling) -> Iteration {
        let section = self.reader.enter();
        let worker = &*self.worker;
        let idle = self.queue.is_empty();
        let mut scan = Scan {
            most: if idle { most } else { 0 },
            scheduler: Scheduler {
                section: &section,
                worker,
                queue: &mut self.queue,
                parked: &mut self.parked,
                time: self.time,
                cost: 0,
                since: None,
                useful: false,
                wire: self.wire.as_mut(),
                iwarp: self.iwarp.as_mut(),
                positions: &mut self.positions,
            },
            served: 0,
            next: None,
            then: None,
            cache: LookupCache::new(&section, &self.registry, &self.vms),
        };
        let mut doorbells = Doorbells::default();
        for (at, vm) in self.vms.iter().enumerate() {
            let Some(tables) = vm.read_in(&section).filter(|tables| tables.running) else {
                continue;
            };
            if tables.contexts.places() <= FEW {
                for (_, context) in tables.contexts.iter() {
                    doorbells.look(&mut scan, tables, context);
                }
            } else if let Some(watched) = self.watched.get_mut(at) {
                doorbells.all = false;
                watched.look(tables, |context| doorbells.look(&mut scan, tables, context));
            }
        }
        let (mut ringing, several, all) = (doorbells.ringing, doorbells.several, doorbells.all);
        let doorbells = doorbells.list.as_slice();
        let rang = ringing != 0;
        if rang {
            scan.answer_all(doorbells, ringing, several);
        }
        let mut waited = false;
        if !rang && idle && all && matches!(polling, Polling::Eagerly | Polling::Relaxed) {
            for _ in 0..POLLS {
                if doorbells.iter().any(|(_, doorbell)| doorbell.rings()) {
                    waited = true;
                    for (at, (_, doorbell)) in doorbells.iter().enumerate() {
                        ringing |= u64::from(doorbell.rings()) << at;
                    }
                    scan.answer_all(doorbells, ringing, ringing.count_ones() > 1);
                    break;
                }
                if section.is_awaited() || worker.is_wanted(self.generation) {
                    break;
                }
                if polling == Polling::Relaxed {
                    std::hint::spin_loop();
                }
            }
        }
        let mut busy_polled = false;
        if let Some(last) = scan.then.take() {
            scan.serve(last);
            // With timers, the clock has to be read more often, and with more doorbells than are
            // busy polled, these have to be looked at.
            let timed = !scan.scheduler.parked.is_empty() || !self.holds.is_empty();
            let left = match polling {
                Polling::No => 0,
                _ if timed || !all => BUSY_POLLS / 16,
                _ => BUSY_POLLS,
            };
            let mut busy_poll = BusyPoller {
                section: &section,
                worker,
                generation: self.generation,
                doorbells,
                left,
                next: None,
            };
            scan.scheduler.last(last, &mut busy_poll, &mut scan.cache);
            busy_polled = busy_poll.left != left;
        }
        Iteration {
            served: scan.served,
            waited,
            busy_polled,
            useful: scan.scheduler.useful,
        }
    }

    /// Puts parked queue pairs whose time has come into the run queue.
    fn expire(&mut self) {
        let queue = &mut self.queue;
        self.parked.take_due(self.time, WOKEN, |qp| {
            if !qp.scheduled.swap(true, Ordering::SeqCst) {
                queue.add(qp);
            }
        });
    }

    /// Puts a queue pair that is not parked at the end of the run queue, unless it is in it.
    fn again(&mut self, qp: Arc<Qp>) {
        if !qp.scheduled.swap(true, Ordering::SeqCst) {
            self.queue.add(qp);
        }
    }

    /// Polls the first queue pairs of the run queue, until that has cost so much.
    fn run_queued(&mut self, most: u64) {
        if self.queue.is_empty() {
            return;
        }
        let mut section = self.reader.enter();
        let mut cost = MOST_COST.saturating_sub(most);
        let mut since = None;
        loop {
            section.yield_to_writers();
            let mut no = BusyPoller::never(&section, &self.worker);
            // Until a writer waits.
            while !section.is_awaited() {
                // Only while VMs compete: to read the clock takes as long as a small message.
                let timed = self.timed && self.queue.has_several();
                since = timed.then(|| since.unwrap_or_else(clock));
                let Some(qp) = self.queue.pop() else {
                    return;
                };
                // Before the poll: a queue pair that is scheduled during it is polled again.
                qp.scheduled.store(false, Ordering::SeqCst);
                let budget = match self.queue.next() {
                    Some(next) => {
                        next.prefetch();
                        BUDGET
                    }
                    None => LONE_BUDGET,
                };
                let mut scheduler = Scheduler {
                    section: &section,
                    worker: &self.worker,
                    queue: &mut self.queue,
                    parked: &mut self.parked,
                    time: self.time,
                    cost,
                    since,
                    useful: false,
                    wire: self.wire.as_mut(),
                    iwarp: self.iwarp.as_mut(),
                    positions: &mut self.positions,
                };
                match qp.vm.read_in(&section) {
                    Some(tables) => {
                        let mut cache = LookupCache::new(&section, &self.registry, &self.vms);
                        let long = scheduler.poll(tables, &qp, budget, &mut no, &mut cache);
                        (cost, since) = (scheduler.cost, scheduler.since);
                        if long || cost >= MOST_COST {
                            return;
                        }
                    }
                    // A writer is at them: not for long.
                    None => {
                        scheduler.again(&qp);
                        cost += BUDGET.bytes;
                        if cost >= MOST_COST {
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Has the thread woken at a time. Returns how long to wait for that at most, milliseconds, as
    /// epoll has it.
    fn set_alarm(&mut self, now: u64, at: u64) -> i32 {
        match self.alarm.set(now, at) {
            Ok(_) => -1,
            Err(error) => {
                log::error!("worker {}: cannot set a timer: {error}", self.worker.index);
                1
            }
        }
    }

    /// Waits for a notification, another thread, the time `until`, or the first timer.
    // Out of line: there are probes in it.
    #[inline(never)]
    fn wait(&mut self, now: u64, until: Option<u64>) {
        let timeout = match self.next_timer().into_iter().chain(until).min() {
            Some(at) => self.set_alarm(now, at),
            None => -1,
        };
        self.worker.waits.store(true, Ordering::SeqCst);
        probes::sleep(self.worker.index);
        let notified = self.wait_for_events(timeout);
        probes::wake(self.worker.index);
        self.worker.waits.store(false, Ordering::SeqCst);
        self.worker.watchdog_sleep.end();
        if let Some(wire) = &mut self.wire {
            wire.look_soon();
        }
        if let Some(iwarp) = &mut self.iwarp {
            iwarp.look_soon();
        }
        match notified {
            Ok(true) => count(&self.worker.stats.kicks),
            Ok(false) => {}
            Err(error) => log::error!("worker {}: cannot wait: {error}", self.worker.index),
        }
        self.time = clock();
        self.unread.slept(now, self.time);
    }

    /// Waits for events, for `timeout` milliseconds at most. Returns whether a guest has notified the
    /// worker, and keeps which messages there are.
    fn wait_for_events(&mut self, mut timeout: i32) -> io::Result<bool> {
        let mut notified = false;
        let mut space = [NO_EVENT; 16];
        for _ in 0..MOST_WAITS {
            let events = self.worker.epoll.wait(timeout, &mut space)?;
            for event in events {
                notified |= event.data == KICK || event.data > MESSAGES;
                if event.data > MESSAGES {
                    self.unread.add(event.data);
                }
            }
            // Nobody else is woken for messages that the worker was: it has to know all of them.
            if events.len() < space.len() {
                break;
            }
            timeout = 0;
        }
        Ok(notified)
    }

    /// Takes the notifications from messages that have woken the worker.
    #[inline(never)]
    fn take_notifications(&mut self) {
        for number in self.unread.take() {
            self.worker.take_notifications(number);
        }
    }

    /// Sleeps, unless there is something to do after all.
    fn sleep(&mut self, now: u64) {
        count(&self.worker.stats.sleeps);
        let told = self.announce(worker_status::SLEEPING);
        self.worker.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if told && !self.anything() {
            self.wait(now, None);
            self.idle_policy.slept(now, self.time);
        } else {
            self.idle_policy.more_came();
        }
        self.worker.asleep.store(false, Ordering::SeqCst);
        self.announce(worker_status::POLLING);
    }

    /// Waits for `back_off` nanoseconds, or until a timer or another thread needs the worker, and
    /// then carries out what there is. Guests take it for polling, and do not notify.
    fn back_off(&mut self, now: u64, back_off: u64) {
        count(&self.worker.stats.back_offs);
        self.worker.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !self.worker.is_wanted(self.generation) {
            self.wait(now, Some(now.saturating_add(back_off)));
        }
        self.worker.asleep.store(false, Ordering::SeqCst);
        let before = self.messages();
        self.round();
        self.idle_policy
            .backed_off(self.messages().wrapping_sub(before));
    }

    /// Polls of queue pairs, modulo 2^64.
    fn polls(&self) -> u64 {
        self.worker.stats.polls.load(Ordering::Relaxed)
    }

    /// Messages that this worker has sent, modulo 2^64.
    fn messages(&self) -> u64 {
        let sent = |vm: &Arc<Vm>| vm.sent(self.worker.index);
        self.vms.iter().map(sent).fold(0, u64::wrapping_add)
    }

    /// Whether there is anything to do: asked after SLEEPING was announced.
    fn anything(&mut self) -> bool {
        let section = self.reader.enter();
        self.worker.inbox_filled.load(Ordering::SeqCst)
            || self.iwarp.as_ref().is_some_and(IwarpEnd::has_more)
            || self.worker.stopping.load(Ordering::SeqCst)
            || self.worker.generation.load(Ordering::SeqCst) != self.generation
            || self.vms.iter().any(|vm| match vm.read_in(&section) {
                Some(tables) => {
                    tables.running
                        && tables.contexts.iter().any(|(_, context)| {
                            Doorbell::new(context, &self.worker)
                                .is_some_and(|doorbell| doorbell.root.load(Ordering::SeqCst) != 0)
                        })
                }
                None => true,
            })
    }
}
