// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Timers: queue pairs that are parked until a time, and events of completion queues that are held
//! back until one; and the alarm that wakes the worker for the first of them.
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use vhost_device_rdma_sync::{lock, ReadSection, Reader};
use vmm_sys_util::timerfd::TimerFd;

use crate::engine::events::notify;
use crate::engine::queue_pair::Qp;
use crate::engine::vm::Vm;
use crate::verbs::cq::Cq;

/// How long to leave an event held back whose VM's tables are being changed, nanoseconds.
const BUSY_RETRY: u64 = 10_000;

/// Wakes a thread that sleeps.
///
/// To set the system's timer can take as long as a message, in a VM above all, and most timers are
/// cancelled before they end: one that will end sooner than is asked for is left as it is. It wakes
/// the thread once in vain.
#[derive(Debug)]
pub(super) struct Alarm {
    timer: TimerFd,
    /// When it ends, or ended, nanoseconds.
    at: u64,
}

impl Alarm {
    /// # Errors
    /// If the system has no file descriptors left.
    pub(super) fn new() -> io::Result<Self> {
        let timer = TimerFd::new()?;
        Ok(Self { timer, at: 0 })
    }

    /// It wakes the thread `at` that time, or sooner, nanoseconds; it is `now`. Returns whether the
    /// system's timer was set.
    ///
    /// # Errors
    /// If the system refuses.
    pub(super) fn set(&mut self, now: u64, at: u64) -> io::Result<bool> {
        if self.at > now && self.at <= at {
            return Ok(false);
        }
        // Zero would be no timer.
        let left = Duration::from_nanos(at.saturating_sub(now).max(1));
        self.at = 0;
        self.timer.reset(left, None)?;
        self.at = at;
        Ok(true)
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// Parked queue pairs of a VM by time, nanoseconds; each is in it once at most.
type OfVm = BTreeMap<(u64, usize), Arc<Qp>>;

/// Parked queue pairs, by VM: each VM's are woken within a budget of its own.
#[derive(Debug)]
pub(super) struct Parked {
    /// By the address of the VM. Those of VMs that have none any longer go when the list of VMs
    /// changes.
    vms: BTreeMap<usize, OfVm>,
    /// When the first of all is due, or before.
    next: u64,
    len: usize,
}

impl Default for Parked {
    fn default() -> Self {
        Self {
            vms: BTreeMap::new(),
            next: u64::MAX,
            len: 0,
        }
    }
}

fn id<T>(of: &Arc<T>) -> usize {
    Arc::as_ptr(of) as usize
}

impl Parked {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// When the first of them is due.
    pub(super) fn next(&self) -> Option<u64> {
        self.first_times().min()
    }

    fn first_times(&self) -> impl Iterator<Item = u64> + '_ {
        let first = |of_vm: &OfVm| of_vm.first_key_value().map(|((at, _), _)| *at);
        self.vms.values().filter_map(first)
    }

    /// Parks a queue pair until this time, and not until another.
    pub(super) fn park(&mut self, qp: &Arc<Qp>, until: u64) {
        let old = std::mem::replace(&mut *lock(&qp.timer), until);
        let of_vm = self.vms.entry(id(&qp.vm)).or_default();
        if of_vm.remove(&(old, id(qp))).is_none() {
            self.len += 1;
        }
        of_vm.insert((until, id(qp)), qp.clone());
        self.next = self.next.min(until);
    }

    /// A queue pair is not to be parked any longer.
    pub(super) fn cancel(&mut self, qp: &Arc<Qp>) {
        let until = *lock(&qp.timer);
        let of_vm = self.vms.get_mut(&id(&qp.vm));
        if of_vm.is_some_and(|of_vm| of_vm.remove(&(until, id(qp))).is_some()) {
            self.len -= 1;
        }
    }

    /// Takes out those that are due, the first `most` of each VM; the others remain due.
    #[inline(always)]
    pub(super) fn take_due(&mut self, now: u64, most: usize, f: impl FnMut(Arc<Qp>)) {
        // Most poll iterations find none.
        if self.next <= now {
            self.find_due(now, most, f);
        }
    }

    #[inline(never)]
    fn find_due(&mut self, now: u64, most: usize, mut f: impl FnMut(Arc<Qp>)) {
        for of_vm in self.vms.values_mut() {
            for _ in 0..most {
                match of_vm.first_entry() {
                    Some(entry) if entry.key().0 <= now => {
                        self.len -= 1;
                        f(entry.remove());
                    }
                    _ => break,
                }
            }
            // Of many that are due few are in the caches: what the next ones need is fetched while these
            // are polled, first the queue pair and then what it knows of.
            let mut next = of_vm.values();
            if let Some(qp) = next.next() {
                qp.hints.prefetch();
            }
            if let Some(qp) = next.next() {
                qp.prefetch_all();
            }
        }
        self.next = self.next().unwrap_or(u64::MAX);
    }

    /// Takes out all.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Arc<Qp>> {
        std::mem::take(self)
            .vms
            .into_values()
            .flat_map(BTreeMap::into_values)
    }

    /// Lets go of those that were destroyed.
    pub(super) fn forget_dead(&mut self) {
        for of_vm in self.vms.values_mut() {
            of_vm.retain(|_, qp| !qp.dead.load(Ordering::Relaxed));
        }
        self.vms.retain(|_, of_vm| !of_vm.is_empty());
        self.len = self.vms.values().map(BTreeMap::len).sum();
    }
}

/// A completion queue whose event is held back.
#[derive(Debug)]
pub(super) struct Held {
    /// Its VM.
    pub(super) vm: Weak<Vm>,
    pub(super) cq: Weak<Cq>,
}

/// Events that are held back, by the time at which they are raised, nanoseconds, with their
/// numbers; each completion queue is in it once at most.
#[derive(Debug, Default)]
pub(super) struct Holds(BTreeMap<(u64, usize), (Held, u32)>);

impl Holds {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When the first of them is due.
    pub(super) fn next(&self) -> Option<u64> {
        self.0.first_key_value().map(|((at, _), _)| *at)
    }

    /// Begins to measure the time of an event that is held back.
    pub(super) fn begin(&mut self, held: Held, now: u64) {
        let Some(cq) = held.cq.upgrade() else {
            return;
        };
        // Before the queue is asked: another event after that is handed over again.
        cq.handed.store(false, Ordering::SeqCst);
        self.0.remove(&(cq.timer.load(Ordering::Relaxed), id(&cq)));
        if let Some((number, period)) = cq.held() {
            self.insert(&cq, held, number, now.saturating_add(period));
        }
    }

    fn insert(&mut self, cq: &Arc<Cq>, held: Held, number: u32, until: u64) {
        cq.timer.store(until, Ordering::Relaxed);
        self.0.insert((until, id(cq)), (held, number));
    }

    /// Raises the events that are due.
    #[inline(always)]
    pub(super) fn release(&mut self, now: u64, reader: &mut Reader) {
        // Most poll iterations find none.
        if !self.0.is_empty() {
            self.release_due(now, reader);
        }
    }

    #[inline(never)]
    fn release_due(&mut self, now: u64, reader: &mut Reader) {
        while let Some(entry) = self.0.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let (held, number) = entry.remove();
            let (Some(vm), Some(cq)) = (held.vm.upgrade(), held.cq.upgrade()) else {
                continue;
            };
            if !release(&reader.enter(), &vm, &cq, number) {
                self.insert(&cq, held, number, now.saturating_add(BUSY_RETRY));
            }
        }
    }
}

/// Raises the event `number` that a completion queue holds back, if it still does; false if that is
/// not possible now.
fn release(section: &ReadSection<'_>, vm: &Vm, cq: &Arc<Cq>, number: u32) -> bool {
    let Some(tables) = vm.read_in(section) else {
        return false;
    };
    // The start of a stopped VM raises what was held back.
    let present = tables.cqs.get(cq.number);
    if tables.running && present.is_some_and(|there| Arc::ptr_eq(there, cq)) && cq.expire(number) {
        notify(tables, cq);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fixture::Guest;
    use vhost_device_rdma_sync::Readers;
    use virtio_rdma_spec::verbs::qp_type;

    #[test]
    fn an_alarm_is_set_when_the_one_before_is_too_late_or_over() {
        const SECOND: u64 = 1_000_000_000;
        let mut alarm = Alarm::new().unwrap();
        let mut set = |now, at| alarm.set(now, at).unwrap();
        assert!(set(5, SECOND));
        assert!(!set(6, SECOND));
        assert!(!set(6, 2 * SECOND));
        assert!(set(7, SECOND - 1));
        assert!(set(SECOND, SECOND + 1));
        // In the past.
        assert!(set(2 * SECOND, SECOND));
        assert_eq!(alarm.timer.wait().unwrap(), 1);
        assert!(alarm.set(2 * SECOND, 3 * SECOND).unwrap());
    }

    #[test]
    fn each_vm_has_a_budget_of_its_own() {
        let (readers, _each) = Readers::new(1);
        let mut guests = [1, 2].map(|number| Guest::new(&readers, number));
        let [many, few] = &mut guests;
        let make = |guest: &mut Guest, count| -> Vec<Arc<Qp>> {
            (0..count)
                .map(|_| guest.queue_pair(qp_type::RC).qp)
                .collect()
        };
        let (many, few) = (make(many, 8), make(few, 2));
        let mut parked = Parked::default();
        for (time, qp) in many.iter().enumerate() {
            parked.park(qp, time as u64);
        }
        // One is parked for longer, and one not at all, after all.
        few.iter().for_each(|qp| parked.park(qp, 50));
        parked.park(&few[0], 200);
        parked.park(&many[7], 60);
        parked.cancel(&many[7]);
        let mut taken = |now| {
            let mut taken = Vec::new();
            parked.take_due(now, 3, |qp| taken.push(qp));
            let of = |all: &[Arc<Qp>]| {
                let is = |qp: &&Arc<Qp>| all.iter().any(|one| Arc::ptr_eq(one, qp));
                taken.iter().filter(is).count()
            };
            (of(&many), of(&few), parked.next(), parked.is_empty())
        };
        assert_eq!(taken(100), (3, 1, Some(3), false));
        assert_eq!(taken(100), (3, 0, Some(6), false));
        assert_eq!(taken(100), (1, 0, Some(200), false));
        assert_eq!(taken(199), (0, 0, Some(200), false));
        assert_eq!(taken(200), (0, 1, None, true));
    }
}
