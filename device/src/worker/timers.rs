// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Timers: queue pairs that are parked until a time, and events of completion queues that are held
//! back until one.
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use vhost_device_rdma_sync::{lock, ReadSection, Reader};

use crate::engine::events::notify;
use crate::engine::queue_pair::Qp;
use crate::engine::vm::Vm;
use crate::verbs::cq::Cq;

/// How long to leave an event held back whose VM's tables are being changed, nanoseconds.
const BUSY_RETRY: u64 = 10_000;

/// Parked queue pairs by time, nanoseconds; each is in it once at most.
#[derive(Debug, Default)]
pub(super) struct Parked(BTreeMap<(u64, usize), Arc<Qp>>);

fn id<T>(of: &Arc<T>) -> usize {
    Arc::as_ptr(of) as usize
}

impl Parked {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When the first of them is due.
    pub(super) fn next(&self) -> Option<u64> {
        self.0.first_key_value().map(|((at, _), _)| *at)
    }

    /// Parks a queue pair until this time, and not until another.
    pub(super) fn park(&mut self, qp: &Arc<Qp>, until: u64) {
        let old = std::mem::replace(&mut *lock(&qp.timer), until);
        self.0.remove(&(old, id(qp)));
        self.0.insert((until, id(qp)), qp.clone());
    }

    /// A queue pair is not to be parked any longer.
    pub(super) fn cancel(&mut self, qp: &Arc<Qp>) {
        let until = *lock(&qp.timer);
        self.0.remove(&(until, id(qp)));
    }

    /// Takes out the first one, if it is due.
    pub(super) fn due(&mut self, now: u64) -> Option<Arc<Qp>> {
        let entry = self.0.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }

    /// Takes out all.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Arc<Qp>> {
        std::mem::take(&mut self.0).into_values()
    }

    /// Lets go of those that were destroyed.
    pub(super) fn forget_dead(&mut self) {
        self.0.retain(|_, qp| !qp.dead.load(Ordering::Relaxed));
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
