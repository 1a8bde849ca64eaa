// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event queues: completion events and asynchronous events on their way to the guest.
//!
//! Workers bring events at any time. An event for which the guest has no buffer waits: a completion
//! event once per completion queue, however often it is raised.
use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use virtio_rdma_spec::config::{EVENT_QUEUE, FIRST_COMPLETION_QUEUE};
use virtio_rdma_spec::event::{event_type, AsyncEvent, CompletionEvent};

use super::ring::Ring;
use crate::engine::events::EventSink;
use crate::error::sentence;
use crate::footprint::{listed, Share};
use crate::rnic::Rnic;

/// Events that wait for a buffer, at most, per queue. There are no more objects to raise events
/// for.
const MAX_WAITING: usize = 1 << 17;
/// A queue that has had more events than this waiting gives their memory back.
const FEW_WAITING: usize = 256;

/// Events that wait for a buffer, in order, each once.
#[derive(Debug)]
struct Waiting<T> {
    order: VecDeque<T>,
    known: HashSet<T>,
    /// For more than a few, where the objects that events are about have none for them.
    share: Share,
}

impl<T: Copy + Eq + Hash> Waiting<T> {
    fn new(share: Share) -> Self {
        Self {
            order: VecDeque::new(),
            known: HashSet::new(),
            share,
        }
    }

    /// Adds an event. Returns whether that was one too many, and the oldest was dropped for it.
    fn add(&mut self, event: T) -> bool {
        if self.known.contains(&event) {
            return false;
        }
        let full = self.order.len() >= MAX_WAITING || !self.make_room();
        if full {
            self.remove();
        }
        // If there is no memory for a first one, it is dropped itself.
        if self.order.len() < self.order.capacity() && self.known.insert(event) {
            self.order.push_back(event);
        }
        full
    }

    /// Makes room for one more, if there is memory.
    fn make_room(&mut self) -> bool {
        let len = self.order.len();
        if len < self.order.capacity() {
            return true;
        }
        let capacity = (2 * len).max(FEW_WAITING);
        let before = self.share.bytes();
        // The set is half empty at most, and has a byte more for each place.
        let bytes = 4 * listed::<T>(capacity);
        if capacity > FEW_WAITING && self.share.grow(bytes.saturating_sub(before)).is_err() {
            return false;
        }
        let known = self.known.try_reserve(capacity - self.known.len());
        let reserved = known.is_ok() && self.order.try_reserve_exact(capacity - len).is_ok();
        if !reserved {
            self.share.shrink(before);
        }
        reserved
    }

    fn first(&self) -> Option<T> {
        self.order.front().copied()
    }

    fn remove(&mut self) {
        if let Some(event) = self.order.pop_front() {
            self.known.remove(&event);
            self.tidy();
        }
    }

    /// Gives back the memory of many events, if none waits.
    fn tidy(&mut self) {
        if self.order.is_empty() && self.order.capacity() > FEW_WAITING {
            self.order = VecDeque::new();
            self.known = HashSet::new();
            self.share.shrink(0);
        }
    }

    /// Keeps only the events for which `keep` holds.
    fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        if !self.order.is_empty() {
            self.order.retain(&keep);
            self.known.retain(&keep);
            self.tidy();
        }
    }

    fn clear(&mut self) {
        self.order.clear();
        self.known.clear();
        self.tidy();
    }
}

/// A virtqueue of events, and the events that wait for its buffers.
#[derive(Debug)]
pub struct EventQueue<T> {
    ring: Ring,
    waiting: Waiting<T>,
}

impl<T: AsRef<[u8]> + Copy + Eq + Hash> EventQueue<T> {
    fn new(index: u16, share: Share) -> Self {
        Self {
            ring: Ring::new(index),
            waiting: Waiting::new(share),
        }
    }

    fn raise(&mut self, rnic: &Weak<Rnic>, event: T) {
        if self.waiting.add(event) {
            warn(
                rnic,
                "it does not take its events, and the oldest are dropped",
            );
        }
        self.deliver(rnic);
    }

    /// Gives the guest what waits, as far as it has buffers.
    fn deliver(&mut self, rnic: &Weak<Rnic>) {
        let mut delivered = false;
        while let Some(event) = self.waiting.first() {
            match self.ring.push(event.as_ref()) {
                Ok(true) => {
                    self.waiting.remove();
                    delivered = true;
                }
                Ok(false) => break,
                Err(error) => {
                    warn(rnic, &sentence(&error));
                    break;
                }
            }
        }
        if delivered {
            self.ring.notify();
        }
    }
}

/// All event queues of a device.
#[derive(Debug)]
pub struct Events {
    /// For warnings about the guest. (The RNIC holds this.)
    rnic: Weak<Rnic>,
    asynchronous: Mutex<EventQueue<[u8; AsyncEvent::SIZE]>>,
    completion: Vec<Mutex<EventQueue<[u8; CompletionEvent::SIZE]>>>,
}

fn warn(rnic: &Weak<Rnic>, what: &str) {
    if let Some(rnic) = rnic.upgrade() {
        rnic.vm().warn(format_args!("{what}"));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    /// The event queues of `rnic`, stopped.
    pub fn new(rnic: &Arc<Rnic>) -> Self {
        let completion_queues = rnic.config().num_completion_queues;
        let account = rnic.vm().footprint();
        let completion = |i| {
            let index = FIRST_COMPLETION_QUEUE.saturating_add(i);
            // Each completion queue has a share for its event.
            Mutex::new(EventQueue::new(index, Share::default()))
        };
        Self {
            rnic: Arc::downgrade(rnic),
            asynchronous: Mutex::new(EventQueue::new(EVENT_QUEUE, account.empty())),
            completion: (0..completion_queues).map(completion).collect(),
        }
    }

    /// Applies `f` to virtqueue `index`; `None` if it is not an event queue.
    pub fn with_ring<R>(&self, index: u16, f: impl FnOnce(&mut Ring) -> R) -> Option<R> {
        if index == EVENT_QUEUE {
            return Some(f(&mut lock(&self.asynchronous).ring));
        }
        let queue = self
            .completion
            .get(usize::from(index.checked_sub(FIRST_COMPLETION_QUEUE)?))?;
        let mut queue = lock(queue);
        Some(f(&mut queue.ring))
    }

    /// Delivers what waits for virtqueue `index`.
    pub fn deliver(&self, index: u16) {
        if index == EVENT_QUEUE {
            lock(&self.asynchronous).deliver(&self.rnic);
        } else if let Some(i) = index.checked_sub(FIRST_COMPLETION_QUEUE) {
            if let Some(queue) = self.completion.get(usize::from(i)) {
                lock(queue).deliver(&self.rnic);
            }
        }
    }

    /// Forgets all events that wait.
    pub fn clear(&self) {
        lock(&self.asynchronous).waiting.clear();
        for queue in &self.completion {
            lock(queue).waiting.clear();
        }
    }
}

impl EventSink for Events {
    fn completion(&self, vector: u16, event: CompletionEvent) {
        if let Some(queue) = self.completion.get(usize::from(vector)) {
            lock(queue).raise(&self.rnic, event.to_bytes());
        }
    }

    fn asynchronous(&self, event: AsyncEvent) {
        lock(&self.asynchronous).raise(&self.rnic, event.to_bytes());
    }

    fn forget_cq(&self, vector: u16, cqn: u32) {
        if let Some(queue) = self.completion.get(usize::from(vector)) {
            let waiting = &mut lock(queue).waiting;
            waiting.retain(|event| CompletionEvent::from_bytes(event).cqn != cqn);
        }
        lock(&self.asynchronous).waiting.retain(|event| {
            let event = AsyncEvent::from_bytes(event);
            event.event_type != event_type::CQ_ERR || event.number != cqn
        });
    }

    fn forget_srq(&self, srqn: u32) {
        const SRQ_EVENTS: [u16; 2] = [event_type::SRQ_ERR, event_type::SRQ_LIMIT_REACHED];
        lock(&self.asynchronous).waiting.retain(|event| {
            let event = AsyncEvent::from_bytes(event);
            !SRQ_EVENTS.contains(&event.event_type) || event.number != srqn
        });
    }

    fn forget_qp(&self, qpn: u32) {
        const QP_EVENTS: [u16; 6] = [
            event_type::QP_FATAL,
            event_type::QP_REQ_ERR,
            event_type::QP_ACCESS_ERR,
            event_type::COMM_EST,
            event_type::SQ_DRAINED,
            event_type::QP_LAST_WQE_REACHED,
        ];
        lock(&self.asynchronous).waiting.retain(|event| {
            let event = AsyncEvent::from_bytes(event);
            !QP_EVENTS.contains(&event.event_type) || event.number != qpn
        });
    }
}
