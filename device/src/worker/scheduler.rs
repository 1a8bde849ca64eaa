// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scheduler: which queue pair is polled when. Those whose doorbell rang are polled at once, if
//! the run queue is empty; the others in the order of the run queue.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use vhost_device_rdma_sync::ReadSection;
use virtio_rdma_spec::verbs::qp_type;

use super::busy_poll::BusyPoller;
use super::doorbell::Doorbell;
use super::handle::{count, Worker};
use super::iwarp::IwarpEnd;
use super::run_queue::RunQueue;
use super::timers::Parked;
use super::wire::WireEnd;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::Polled;
use crate::engine::tables::Tables;
use crate::engine::vm::Vm;
use crate::engine::{Budget, BUDGET, LONE_BUDGET};
use crate::fabric;
use crate::fabric::local::lookup_cache::LookupCache;
use crate::fabric::local::LocalCarrier;
use crate::fabric::wire::imagined::{Imagined, Positions};
use crate::verbs::cq::clock;

/// Queue pairs of a VM that are polled at once during a scan in which another VM's ring, too.
const AT_ONCE: usize = 4;

/// A queue pair that is about to be polled, with the tables of its VM.
#[derive(Clone, Copy)]
pub(super) struct Served<'a> {
    pub(super) tables: &'a Tables,
    pub(super) qp: &'a Arc<Qp>,
}

/// A scan of doorbells.
pub(super) struct Scan<'a> {
    pub(super) scheduler: Scheduler<'a>,
    /// Queue pairs to poll at once, at most.
    pub(super) most: usize,
    /// Queue pairs that were polled at once, or are about to be.
    pub(super) served: usize,
    /// The queue pair to poll next, and the one after that. While others are polled and found, the
    /// processor fetches what these two need, and what that points to.
    pub(super) next: Option<Served<'a>>,
    pub(super) then: Option<Served<'a>>,
    /// What was looked up for those that were polled.
    pub(super) cache: LookupCache<'a>,
}

impl<'a> Scan<'a> {
    /// Takes the queue pairs whose doorbell rang.
    #[inline(always)]
    pub(super) fn answer(&mut self, tables: &'a Tables, doorbell: &Doorbell<'a>) {
        doorbell.take(self.scheduler.worker, |qp| {
            if self.served == self.most || self.scheduler.section.is_awaited() {
                self.scheduler.again(qp);
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

    /// Takes the queue pairs of those `doorbells` whose bits are set in `ringing`. If they are of
    /// `several` VMs, in order of these, some of each are polled at once, and the others go to the
    /// run queue.
    #[inline(always)]
    pub(super) fn answer_all(
        &mut self,
        doorbells: &[(&'a Tables, Doorbell<'a>)],
        mut ringing: u64,
        several: bool,
    ) {
        let most = self.most;
        let mut vm: Option<&Tables> = None;
        while ringing != 0 {
            let at = ringing.trailing_zeros();
            ringing &= ringing - 1;
            let Some((tables, doorbell)) = doorbells.get(at as usize) else {
                return;
            };
            if several && !vm.is_some_and(|vm| std::ptr::eq(vm, *tables)) {
                vm = Some(tables);
                self.most = most.min(self.served + AT_ONCE);
            }
            self.answer(tables, doorbell);
        }
    }

    /// Polls `next`. After it comes `then`.
    #[inline(always)]
    pub(super) fn serve(&mut self, then: Served<'a>) {
        let Some(Served { tables, qp }) = self.next.replace(then) else {
            return;
        };
        then.qp.hints.prefetch();
        let mut no = self.scheduler.no_busy_poll();
        let cache = &mut self.cache;
        self.scheduler.poll(tables, qp, BUDGET, &mut no, cache);
    }
}

/// Bytes that a queue pair sends before the worker looks for answers, which say what to send next.
const LEAVES_AT_ONCE: u64 = 128 << 10;

/// What a poll costs a worker by itself, and a message, in bytes that it could have copied instead:
/// an estimate.
const POLL: u64 = 4096;
const MESSAGE: u64 = 512;
/// Bytes that a worker copies in a nanosecond: an estimate, too.
const BYTES_PER_NS: u64 = 8;
/// A poll that took so many times what is estimated was interrupted: that is not its VM's affair.
const INTERRUPTED: u64 = 16;

/// What a poll in which so much was done costs a worker, in bytes that it could have copied.
#[inline(always)]
fn cost(done: Budget) -> u64 {
    POLL + MESSAGE * u64::from(done.messages) + done.bytes
}

/// The same of a poll that took so many nanoseconds.
fn cost_of_time(nanoseconds: u64, done: Budget) -> u64 {
    let cost_of_time = nanoseconds.saturating_mul(BYTES_PER_NS);
    cost_of_time.min(cost(done).saturating_mul(INTERRUPTED))
}

/// The run queue of queue pairs, by the address of their VM.
pub(super) type QpQueue = RunQueue<Arc<Qp>>;

/// The owner of a queue pair's place in the run queue.
fn owner(qp: &Qp) -> usize {
    Arc::as_ptr(&qp.vm).addr()
}

impl QpQueue {
    /// Puts a queue pair behind the others of its VM.
    pub(super) fn add(&mut self, qp: Arc<Qp>) {
        self.push(owner(&qp), qp, |qp, least| {
            let (vm, worker) = (&qp.vm, qp.worker_index);
            let before = vm.used_of_worker(worker);
            let used = before.max(least);
            vm.use_worker(worker, used - before);
            used
        });
    }

    /// A frame of so many bytes came for a VM, perhaps while others have waited.
    pub(super) fn charge_frame(&mut self, vm: &Vm, worker: u16, bytes: u64) {
        let owner = std::ptr::from_ref(vm).addr();
        if self.has_others(owner) {
            let weighed = vm.weighed(MESSAGE + bytes);
            vm.use_worker(worker, weighed);
            self.charge(owner, weighed);
        }
    }
}

/// The run queue, and what polling its queue pairs leads to.
pub(super) struct Scheduler<'a> {
    pub(super) section: &'a ReadSection<'a>,
    pub(super) worker: &'a Worker,
    pub(super) queue: &'a mut QpQueue,
    pub(super) parked: &'a mut Parked,
    /// The time of the last poll iteration, nanoseconds.
    pub(super) time: u64,
    /// What the polls have cost, in bytes.
    pub(super) cost: u64,
    /// When the last poll ended, nanoseconds, if what polls cost is measured and not estimated.
    pub(super) since: Option<u64>,
    /// Anything was carried out.
    pub(super) useful: bool,
    /// The way out of this process, if it is this worker's.
    pub(super) wire: Option<&'a mut WireEnd>,
    /// Connections of iWARP, if they are this worker's.
    pub(super) iwarp: Option<&'a mut IwarpEnd>,
    /// What is known of queue pairs whose messages are captured.
    pub(super) positions: &'a mut Positions,
}

impl<'a> Scheduler<'a> {
    /// No busy polling.
    pub(super) fn no_busy_poll(&self) -> BusyPoller<'a> {
        BusyPoller::never(self.section, self.worker)
    }

    /// Polls the last queue pair that a scan found. If the run queue is empty, it may `busy_poll`.
    #[inline(never)]
    pub(super) fn last(
        &mut self,
        last: Served<'a>,
        busy_poll: &mut BusyPoller<'_>,
        cache: &mut LookupCache<'a>,
    ) {
        let Served { tables, qp } = last;
        if !self.queue.is_empty() || qp.is_capped() {
            let mut no = self.no_busy_poll();
            self.poll(tables, qp, BUDGET, &mut no, cache);
            return;
        }
        self.poll(tables, qp, LONE_BUDGET, busy_poll, cache);
        // Not at once: two queue pairs that answer each other would keep all others waiting.
        if let Some(qp) = busy_poll.next.take() {
            self.again(&qp);
        }
    }

    /// Polls a queue pair of the VM of `tables`, within `budget`. Returns whether the doorbells
    /// should be scanned now. This is where the carrier is chosen, once for each poll.
    pub(super) fn poll<'b>(
        &mut self,
        tables: &'b Tables,
        qp: &'b Arc<Qp>,
        budget: Budget,
        busy_poll: &mut BusyPoller<'_>,
        cache: &mut LookupCache<'b>,
    ) -> bool
    where
        'a: 'b,
    {
        if qp.is_capped() && self.must_wait(qp) {
            return false;
        }
        count(&self.worker.stats.polls);
        let (polled, done) = if qp.leaves() || self.worker.capture.is_on() {
            self.poll_leaving(tables, qp, budget, cache)
        } else {
            let mut carrier = LocalCarrier {
                cache,
                busy_poll,
                done: Budget::NONE,
                elsewhere: None,
                observer: None,
            };
            let polled = fabric::poll(&mut carrier, tables, qp, self.time, budget);
            (polled, carrier.done)
        };
        self.cost += cost(done);
        self.useful |= done.messages != 0 || done.bytes != 0;
        if qp.is_capped() || self.queue.has_others(owner(qp)) {
            self.charge(qp, done);
        }
        match polled {
            Polled::Idle if qp.dead.load(Ordering::SeqCst) => {
                self.parked.cancel(qp);
                if let Some(wire) = self.wire.as_deref_mut().filter(|_| qp.leaves()) {
                    wire.fabric().forget(qp, self.time);
                }
            }
            Polled::Idle => {}
            Polled::Again => self.again(qp),
            Polled::Long => {
                self.again(qp);
                return true;
            }
            Polled::Park(until) => {
                // The time is that of the last poll iteration: no wait is shorter for that.
                let late = clock().saturating_sub(self.time);
                self.parked.park(qp, until.saturating_add(late));
            }
        }
        false
    }

    /// Polls a queue pair whose messages leave this process, or of whose datagrams some do, or which
    /// are captured. Returns what it led to, and what was done: each frame as a message.
    #[inline(never)]
    fn poll_leaving<'b>(
        &mut self,
        tables: &'b Tables,
        qp: &'b Arc<Qp>,
        budget: Budget,
        cache: &mut LookupCache<'b>,
    ) -> (Polled, Budget)
    where
        'a: 'b,
    {
        if qp.qp_type == qp_type::IWARP {
            if let Some(iwarp) = &mut self.iwarp {
                let registry = cache.registry;
                let polled = iwarp.poll(tables, qp, self.section, registry, self.time, budget);
                if let Some(polled) = polled {
                    return polled;
                }
            }
        }
        let mut no = BusyPoller::never(self.section, self.worker);
        let mut wire = self.wire.as_deref_mut().filter(|_| qp.leaves());
        let before = wire.as_ref().map_or(Budget::NONE, |wire| wire.sent());
        let mut done = Budget::NONE;
        let polled = match &mut wire {
            Some(wire) if !qp.facts.datagram => {
                let budget = Budget {
                    bytes: budget.bytes.min(LEAVES_AT_ONCE),
                    ..budget
                };
                fabric::poll(wire.fabric(), tables, qp, self.time, budget)
            }
            None if qp.leaves() && qp.qp_type != qp_type::IWARP => {
                return (Polled::Idle, Budget::NONE);
            }
            wire => {
                let mut imagined = Imagined::new(&self.worker.capture, self.positions);
                let mut carrier = LocalCarrier {
                    cache,
                    busy_poll: &mut no,
                    done,
                    elsewhere: match wire {
                        Some(wire) => Some(wire.fabric()),
                        None => None,
                    },
                    observer: match &mut imagined {
                        Some(imagined) => Some(imagined),
                        None => None,
                    },
                };
                let polled = fabric::poll(&mut carrier, tables, qp, self.time, budget);
                done = carrier.done;
                polled
            }
        };
        if let Some(wire) = wire {
            let now = wire.sent();
            done.messages += now.messages.wrapping_sub(before.messages);
            done.bytes += now.bytes.wrapping_sub(before.bytes);
        }
        (polled, done)
    }

    /// Whether a queue pair's VM has caps and may not send now; then it is parked.
    #[inline(never)]
    fn must_wait(&mut self, qp: &Arc<Qp>) -> bool {
        let caps = qp.vm.caps();
        caps.is_some_and(|caps| match caps.wait(self.time) {
            Some(until) => {
                self.parked.park(qp, until);
                true
            }
            None => false,
        })
    }

    /// So much was done in a poll of a queue pair, and another VM has waited for it, or its own has
    /// caps.
    #[inline(never)]
    fn charge(&mut self, qp: &Qp, done: Budget) {
        let cost = match &mut self.since {
            Some(since) => {
                let now = clock();
                let elapsed = now.saturating_sub(std::mem::replace(since, now));
                qp.vm.count_contended(self.worker.index, elapsed);
                cost_of_time(elapsed, done)
            }
            None => cost(done),
        };
        let weighed = qp.vm.weighed(cost);
        qp.vm.use_worker(self.worker.index, weighed);
        self.queue.charge(owner(qp), weighed);
        if let Some(caps) = qp.vm.caps() {
            caps.spend(self.time, done);
        }
    }

    /// Puts a queue pair at the end of the run queue, unless it is about to be polled anyway.
    pub(super) fn again(&mut self, qp: &Arc<Qp>) {
        if !qp.scheduled.swap(true, Ordering::SeqCst) {
            self.queue.add(qp.clone());
        }
    }
}
