// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared receive queues (specification: "Shared receive queues").
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use vhost_device_rdma_sync::lock;
use virtio_rdma_spec::ring::{Sge, PHASE};
use virtio_rdma_spec::verbs::vendor_err;

use super::cq::Cq;
use super::keys::{CachedRange, Keys};
use super::numbers::Numbered;
use super::work_queue::{FastReceive, WorkQueue};
use super::Error;
use crate::footprint::{counted, listed, Share};
use crate::memory::{GuestMemory, Pages};

/// Offset of `SrqRecord::rq_waited`.
const RQ_WAITED: u64 = 0;
/// Offset of `SrqRecord::consumed`.
const CONSUMED: u64 = 4;
/// Offset of `SrqRecord::posted`.
const POSTED: u64 = 64;

/// What an XRC shared receive queue has beside the ring.
#[derive(Debug)]
pub struct Xrc {
    /// Its XRC domain.
    pub domain: u32,
    /// Completion queue of its receives.
    pub cq: Arc<Cq>,
}

/// A sender that waits for a receive work request.
pub trait Waiter: Send + Sync + fmt::Debug {
    /// One was posted.
    fn wake(self: Arc<Self>);
}

/// The senders that wait, each once.
#[derive(Debug)]
struct Waiters<T: ?Sized> {
    /// By address: none is used twice while somebody is known by it.
    known: HashMap<usize, Weak<T>>,
    /// Those that are gone are forgotten when there are as many as this.
    tidy_at: usize,
    /// For `known`, and the memory of those in it, which is kept although they may be gone.
    share: Share,
}

/// Entry of `Waiters::known`, bytes, at most: the map may be as large again, and half empty.
const WAITER_ENTRY: u64 = 4 * size_of::<(usize, Weak<dyn Waiter>)>() as u64;

impl<T: ?Sized> Waiters<T> {
    fn new(share: Share) -> Self {
        Self {
            known: HashMap::new(),
            tidy_at: 0,
            share,
        }
    }

    fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Adds a sender whose memory is of `size` bytes, unless the account has no room for it: it
    /// is not woken then, and tries again when its time is over.
    fn add(&mut self, waiter: &Arc<T>, size: u64) {
        let each = size + WAITER_ENTRY;
        if self.known.len() >= self.tidy_at {
            self.known.retain(|_, other| other.strong_count() != 0);
            self.tidy_at = 2 * self.known.len() + 64;
            self.share.shrink(each * self.known.len() as u64);
        }
        let address = Arc::as_ptr(waiter).cast::<()>() as usize;
        if !self.known.contains_key(&address) && self.share.grow(each).is_ok() {
            self.known.insert(address, Arc::downgrade(waiter));
        }
    }

    /// Takes out all that are still there.
    fn take(&mut self) -> impl Iterator<Item = Arc<T>> {
        let known = std::mem::take(&mut self.known);
        self.tidy_at = 0;
        self.share.shrink(0);
        known.into_values().filter_map(|waiter| waiter.upgrade())
    }
}

#[derive(Debug)]
struct Inner {
    buffer: Pages,
    queue: WorkQueue,
    limit: u32,
    /// The queue pairs whose messages wait for a receive.
    waiters: Waiters<dyn Waiter>,
    /// What was taken and given back: the first to be taken again. Each XRC_TGT queue pair gives
    /// back one at a time, and nothing is taken from the ring meanwhile, so these are no more than
    /// such queue pairs.
    returned: VecDeque<(u64, Vec<Sge>)>,
    /// For `returned`.
    share: Share,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    /// Its number.
    pub number: u32,
    /// Protection domain.
    pub pd: u32,
    /// Context: whose doorbell memory it uses.
    pub context: u32,
    /// The worker whose doorbell it rings.
    pub worker: u16,
    /// Slot in the doorbell block of that worker.
    pub slot: u32,
    /// XRC: its domain and completion queue.
    pub xrc: Option<Xrc>,
    /// Scatter/gather entries per receive work request.
    pub max_sge: usize,
    /// Queue pairs created with it.
    pub users: AtomicU32,
    /// Its ring was found to be gone.
    errored: AtomicBool,
    inner: Mutex<Inner>,
    /// For itself. The ring's page list has its own.
    _share: Share,
}

/// What an SRQ is made of.
pub(crate) struct SrqParts {
    pub number: u32,
    pub pd: u32,
    pub context: u32,
    pub worker: u16,
    pub slot: u32,
    pub xrc: Option<Xrc>,
    pub max_sge: usize,
    pub limit: u32,
    pub buffer: Pages,
    pub queue: WorkQueue,
    pub share: Share,
}

/// A receive work request taken from an SRQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Its id.
    pub wr_id: u64,
    /// The limit was reached by taking it: an event is due.
    pub limit_reached: bool,
    /// What is wrong with it (`vendor_err`), if anything.
    pub bad: Option<u8>,
}

impl Numbered for Arc<Srq> {
    fn number(&self) -> u32 {
        self.number
    }
}

impl Srq {
    /// What a queue takes of its VM's account, without its ring.
    pub const FOOTPRINT: u64 = counted::<Self>();

    pub(crate) fn new(parts: SrqParts) -> Self {
        let SrqParts {
            number,
            pd,
            context,
            worker,
            slot,
            xrc,
            max_sge,
            limit,
            buffer,
            queue,
            share,
        } = parts;
        let inner = Inner {
            buffer,
            queue,
            limit,
            waiters: Waiters::new(share.another()),
            returned: VecDeque::new(),
            share: share.another(),
        };
        inner.set_waited(false);
        inner.store_consumed();
        Self {
            number,
            pd,
            context,
            worker,
            slot,
            xrc,
            max_sge,
            users: AtomicU32::new(0),
            errored: AtomicBool::new(false),
            inner: Mutex::new(inner),
            _share: share,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Takes the next receive work request; its scatter list goes to `sges`. Without one, `waiter`
    /// is woken when one is posted.
    pub(crate) fn take<W: Waiter + 'static>(
        &self,
        sges: &mut Vec<Sge>,
        waiter: Option<&Arc<W>>,
    ) -> Option<Taken> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        if let Some((wr_id, list)) = inner.returned.pop_front() {
            inner.share.release(returned_bytes(&list));
            if inner.returned.is_empty() {
                inner.returned = VecDeque::new();
            }
            sges.clear();
            sges.extend_from_slice(&list);
            return Some(Taken {
                wr_id,
                limit_reached: false,
                bad: None,
            });
        }
        let head = match inner.queue.ready(&inner.buffer) {
            Some(head) => head,
            None => {
                let waiter = waiter?;
                // As for receive queues: store `rq_waited`, full fence, look again.
                inner.set_waited(true);
                fence(Ordering::SeqCst);
                match inner.queue.ready(&inner.buffer) {
                    Some(head) => {
                        if inner.waiters.is_empty() {
                            inner.set_waited(false);
                        }
                        head
                    }
                    None => {
                        let waiter: Arc<dyn Waiter> = waiter.clone();
                        inner.waiters.add(&waiter, counted::<W>());
                        return None;
                    }
                }
            }
        };
        let (wr_id, good) = inner
            .queue
            .take_receive(&inner.buffer, head, self.max_sge, sges);
        inner.store_consumed();
        let consumed = inner.queue.position;
        let mut limit_reached = false;
        if inner.limit != 0 {
            let posted = inner
                .buffer
                .half_word(POSTED)
                .map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)));
            if posted.wrapping_sub(consumed) < inner.limit {
                limit_reached = true;
                inner.limit = 0;
            }
        }
        Some(Taken {
            wr_id,
            limit_reached,
            bad: (!good).then_some(vendor_err::BAD_RECEIVE),
        })
    }

    /// Takes the next receive work request for a message of `len` bytes, if it is eligible for the
    /// fast path (see [`WorkQueue::take_fast`]) and taking it has no consequences.
    pub(crate) fn take_fast<'a>(
        &self,
        keys: &'a Keys,
        cached: &mut CachedRange<'a>,
        len: u64,
    ) -> Option<FastReceive<'a>> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        if inner.limit != 0 || !inner.returned.is_empty() {
            return None;
        }
        let receive =
            inner
                .queue
                .take_fast(&inner.buffer, self.max_sge, keys, cached, self.pd, len)?;
        inner.store_consumed();
        // Of shared ones the consumer keeps no account by index.
        Some(FastReceive {
            index: 0,
            ..receive
        })
    }

    /// Gives back what was taken, for a message that needs it no longer. Returns whether there is
    /// memory for it.
    pub(crate) fn give_back(&self, wr_id: u64, sges: &[Sge]) -> bool {
        let mut inner = self.inner();
        let kept = inner.share.grow(returned_bytes(sges)).is_ok();
        if kept {
            inner.returned.push_back((wr_id, sges.to_vec()));
        }
        kept
    }

    /// The doorbell rang: senders may wait for the receives that were posted.
    pub(crate) fn receives_posted(&self) {
        let mut guard = self.inner();
        let inner = &mut *guard;
        if !inner.waiters.is_empty() && inner.queue.ready(&inner.buffer).is_none() {
            return;
        }
        inner.set_waited(false);
        for sender in inner.waiters.take() {
            sender.wake();
        }
    }

    /// The limit now armed; zero: none.
    pub(crate) fn limit(&self) -> u32 {
        self.inner().limit
    }

    /// Arms the limit.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is more than the entries.
    pub(crate) fn set_limit(&self, limit: u32) -> Result<(), Error> {
        let mut inner = self.inner();
        if limit > inner.queue.entries {
            return Err(Error::Invalid);
        }
        inner.limit = limit;
        Ok(())
    }

    /// Entries of the ring.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.inner().queue.entries
    }

    /// Stride of the entries, bytes.
    #[must_use]
    pub fn stride(&self) -> u32 {
        self.inner().queue.stride
    }

    /// Goes over to another ring, zeroed, with entries of the same stride: what was not consumed is
    /// at its start then. A `limit` takes the place of the one that is armed.
    ///
    /// # Errors
    /// [`Error::Invalid`] if entries or limit do not fit, [`Error::Fault`] if a ring is not guest
    /// memory: nothing has changed then.
    pub(crate) fn resize(
        &self,
        buffer: Pages,
        queue: WorkQueue,
        limit: Option<u32>,
    ) -> Result<(), Error> {
        let mut guard = self.inner();
        let inner = &mut *guard;
        let limit = limit.unwrap_or(inner.limit);
        if queue.stride != inner.queue.stride || limit > queue.entries {
            return Err(Error::Invalid);
        }
        if inner.buffer.lost() {
            return Err(Error::Fault);
        }
        let (mut from, mut to) = (inner.queue, queue);
        let mut count = 0;
        while count < inner.queue.entries {
            let Some(head) = from.ready(&inner.buffer) else {
                break;
            };
            if count == queue.entries {
                return Err(Error::Invalid);
            }
            let [first, flags, rest @ ..] = head;
            let flags = flags & !PHASE | to.phase();
            for within in (8..queue.stride as usize).step_by(8) {
                to.store(&buffer, within, from.word(&inner.buffer, within))?;
            }
            let [a, b, c, d, e, f] = rest;
            to.store(&buffer, 0, [first, flags, a, b, c, d, e, f])?;
            from.advance();
            to.advance();
            count += 1;
        }
        let posted = buffer.half_word(POSTED).ok_or(Error::Fault)?;
        posted.store(count.to_le(), Ordering::Release);
        inner.buffer = buffer;
        inner.queue = queue;
        inner.limit = limit;
        inner.store_consumed();
        inner.set_waited(!inner.waiters.is_empty());
        Ok(())
    }

    /// Receive work requests consumed, modulo 2^32.
    pub(crate) fn position(&self) -> u32 {
        self.inner().queue.position
    }

    /// Notes that its ring is gone. Returns whether this is the first to tell.
    pub(crate) fn fail(&self) -> bool {
        !self.errored.swap(true, Ordering::Relaxed)
    }

    /// Whether its ring is not in guest memory any longer.
    pub(crate) fn lost(&self) -> bool {
        self.inner().buffer.lost()
    }

    /// Resolves the buffer anew after a change of the memory table.
    pub(crate) fn rebase(&self, memory: Option<&GuestMemory>) {
        self.inner().buffer.rebase(memory);
    }
}

/// What a receive that was given back takes, bytes: its entry in a list that may be half empty, and
/// its scatter list.
fn returned_bytes(sges: &[Sge]) -> u64 {
    2 * size_of::<(u64, Vec<Sge>)>() as u64 + listed::<Sge>(sges.len())
}

impl Inner {
    fn store_consumed(&self) {
        if let Some(word) = self.buffer.half_word(CONSUMED) {
            word.store(self.queue.position.to_le(), Ordering::Release);
        }
    }

    fn set_waited(&self, waited: bool) {
        if let Some(word) = self.buffer.half_word(RQ_WAITED) {
            word.store(u32::from(waited).to_le(), Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::footprint::Footprint;

    #[test]
    fn each_waits_once_and_is_woken_once() {
        let account = Footprint::default();
        let mut waiters = Waiters::new(account.empty());
        let all: Vec<_> = (0..1000).map(Arc::new).collect();
        for waiter in all.iter().chain(&all) {
            waiters.add(waiter, 8);
        }
        assert_eq!(account.bytes(), 1000 * (8 + WAITER_ENTRY));
        let mut woken: Vec<_> = waiters.take().map(|waiter| *waiter).collect();
        woken.sort_unstable();
        assert!(woken.into_iter().eq(0..1000));
        assert!(waiters.is_empty());
        assert_eq!(account.bytes(), 0);
    }

    #[test]
    fn waiters_that_are_gone_are_forgotten() {
        let mut waiters = Waiters::new(Share::default());
        let stays = Arc::new(0);
        waiters.add(&stays, 8);
        for gone in 1..10_000 {
            waiters.add(&Arc::new(gone), 8);
            assert!(waiters.known.len() < 100);
        }
        assert_eq!(waiters.take().collect::<Vec<_>>(), [stays]);
    }

    #[test]
    fn those_for_whom_there_is_no_memory_are_not_woken() {
        let account = Footprint::new(8 + WAITER_ENTRY);
        let mut waiters = Waiters::new(account.empty());
        let all = [1, 2].map(Arc::new);
        all.iter().for_each(|waiter| waiters.add(waiter, 8));
        assert_eq!(waiters.take().collect::<Vec<_>>(), [all[0].clone()]);
        waiters.add(&all[1], 8);
        assert_eq!(waiters.take().collect::<Vec<_>>(), [all[1].clone()]);
    }
}
