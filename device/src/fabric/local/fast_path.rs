// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fast path: runs of common work requests, carried out without what only others need.
//!
//! A work request is eligible if it is a WRITE, a READ or a SEND of one scatter/gather entry or as
//! much inline data, has no error, and its bytes are in regions that commands registered: in one
//! contiguous range at both ends if it is a SEND or inline. A work request that is not eligible is
//! left in the queue, untouched, for the slow path, which alone knows errors, waiting and slices.
//! So the fast path decides nothing of its own.
//!
//! The locks that a message needs are taken once for a run, and whether an event is wanted is found
//! out once at its end.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use arrayvec::ArrayVec;
use virtio_rdma_spec::facts::completion_opcode;
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, MIN_SEND_STRIDE, PHASE, SEND_DATA_OFFSET};
use virtio_rdma_spec::verbs::{
    access, qp_state, qp_type, send_flag, wc_flag, wc_opcode, wr_opcode,
};

use super::busy_poll::{BusyPoll, Came};
use super::lookup_cache::LookupCache;
use super::peer::{Peer, Target};
use crate::engine::path::Path;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::SendQueue;
use crate::engine::tables::Tables;
use crate::engine::{settle, Budget};
use crate::memory::{copy_last, copy_scattered, ContiguousRange, Pages, Source, Way};
use crate::verbs::cq::{Batch, Cq, Pushed};
use crate::verbs::keys::CachedRange;
use crate::verbs::work_queue::{Entries, WorkQueue};

/// Size of an entry with one scatter/gather entry, bytes.
const ENTRY: usize = SEND_DATA_OFFSET + Sge::SIZE;

/// After a message longer than this, bytes, the completion queue is unlocked for others.
const SHORT: u64 = 1024;

/// How many entries ahead of the current one are prefetched, at most: as many as are carried out
/// while a cache line comes from the driver's core.
const AHEAD: u32 = 16;

/// So many entries in the last poll of a queue pair make a list.
const SURE: u32 = 8;

/// Completions that are written together, at most: a driver that polls for them takes the cache
/// line away each time.
const COMPLETIONS: usize = 8;

/// After two trains that carried nothing, since each message goes to other memory than the one
/// before, the next one comes after so many messages. (The first of a run may miss what was looked
/// up.)
const NO_TRAIN: u32 = 16;

/// Most messages at a time of a sparse sender.
const SPARSE: u32 = 4;

/// A driver that posts one work request after the other is not to be followed closely: each look
/// takes the cache lines away that it writes to, which slows it down, so that the worker stays
/// close behind it. So many entries ahead, both are fast.
const FAR: u32 = 64;
/// How often to look for that, each time after so many looks at the doorbells of others.
const LOOKS: u32 = 60;
const BETWEEN: u32 = 32;

/// Flags of an eligible work request.
const FLAGS: u8 =
    PHASE | send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;

/// What the fast path leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// No work request is posted.
    Nothing,
    /// There may be more to do.
    Something,
}

/// A work request that may be eligible.
struct Entry {
    wqe: SendWqe,
    /// Its scatter/gather entry, or inline data.
    data: [u8; Sge::SIZE],
}

impl Entry {
    #[inline(always)]
    fn new(bytes: &[u8; ENTRY]) -> Self {
        // No stride of a send queue is less.
        const { assert!(ENTRY <= MIN_SEND_STRIDE as usize) };
        let mut data = [0; Sge::SIZE];
        data.copy_from_slice(&bytes[SEND_DATA_OFFSET..]);
        Self {
            wqe: SendWqe::get(bytes),
            data,
        }
    }

    /// Whether it may be eligible, with a message of at most `max` bytes.
    #[inline(always)]
    fn may_be_eligible(&self, kinds: &Kinds, max: u64) -> bool {
        let wqe = &self.wqe;
        let one = if self.inline() {
            usize::from(wqe.count) <= kinds.inline && !self.is_read()
        } else {
            wqe.count == 1
        };
        let len = self.len();
        let readable = !self.is_read() || kinds.reads;
        is_eligible(wqe.opcode)
            && wqe.flags & !FLAGS == 0
            && one
            && readable
            && len != 0
            && len <= max
    }

    #[inline(always)]
    fn inline(&self) -> bool {
        self.wqe.flags & send_flag::INLINE != 0
    }

    #[inline(always)]
    fn sge(&self) -> Sge {
        Sge::from_bytes(&self.data)
    }

    /// Length of the message, bytes.
    #[inline(always)]
    fn len(&self) -> u64 {
        if self.inline() {
            self.wqe.count.into()
        } else {
            self.sge().length.into()
        }
    }

    #[inline(always)]
    fn is_read(&self) -> bool {
        self.wqe.opcode == wr_opcode::RDMA_READ
    }
}

/// What eligible work requests of a queue pair may be.
struct Kinds {
    /// Longest inline data, bytes.
    inline: usize,
    /// They may be READs.
    reads: bool,
}

/// The completion queue that is locked, if one is. Never two: another worker may lock the same two
/// in the other order.
#[derive(Default)]
struct Completions<'a> {
    open: Option<(Batch<'a>, &'a Arc<Cq>, &'a Tables)>,
}

impl<'a> Completions<'a> {
    /// Locks a queue of the VM of `tables`, to which completions are about to be pushed.
    #[inline(always)]
    fn lock(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>) {
        let batch = cq.batch();
        batch.prefetch();
        self.open = Some((batch, cq, tables));
    }

    /// Pushes a completion to a queue of the VM of `tables`. Returns false if an event or an error
    /// followed.
    #[inline(always)]
    #[must_use]
    fn push(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>, cqe: &Cqe) -> bool {
        if !matches!(self.open, Some((_, open, _)) if Arc::ptr_eq(open, cq)) {
            self.finish();
        }
        let (batch, ..) = self.open.get_or_insert_with(|| (cq.batch(), cq, tables));
        let pushed = batch.push(cqe);
        pushed == Pushed::Quiet || self.follow(tables, cq, pushed)
    }

    /// Raises the event or error that followed from the last completion. Returns false.
    #[inline(never)]
    #[must_use]
    fn follow(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>, pushed: Pushed) -> bool {
        self.finish();
        settle(tables, cq, pushed);
        false
    }

    /// The batch of this queue, if it is the one that is locked.
    #[inline(always)]
    fn of(&mut self, cq: &Arc<Cq>) -> Option<&mut Batch<'a>> {
        match &mut self.open {
            Some((batch, open, _)) if Arc::ptr_eq(open, cq) => Some(batch),
            _ => None,
        }
    }

    /// Unlocks, and raises the event that is wanted.
    #[inline(always)]
    fn finish(&mut self) {
        if let Some((batch, cq, tables)) = self.open.take() {
            let pushed = batch.finish();
            settle(tables, cq, pushed);
        }
    }
}

/// Carries out the eligible work requests at the head of the queue. None may be in progress. When
/// there are no more, it busy polls for some as long as `busy_poll` says.
#[inline(never)]
pub(super) fn fast_path<'a, B: BusyPoll>(
    sq: &mut SendQueue,
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    budget: &mut Budget,
    busy_poll: &mut B,
    cache: &mut LookupCache<'a>,
) -> Left {
    if qp.state() != qp_state::RTS {
        return Left::Something;
    }
    if !sq.posted() {
        return Left::Nothing;
    }
    let Some(mut flow) = Flow::new(sq, tables, qp, *budget, cache) else {
        return Left::Something;
    };
    let mut rest = flow.run();
    if rest == Left::Nothing && busy_poll.may() {
        rest = flow.busy_poll(busy_poll);
    }
    *budget = flow.budget;
    rest
}

/// A queue pair whose eligible work requests are carried out, with all that they need.
struct Flow<'r, 'a> {
    send_queue: &'r mut SendQueue,
    own: Own<'a>,
    target: Target<'a>,
    cache: &'r mut LookupCache<'a>,
    cq: &'a Arc<Cq>,
    kinds: Kinds,
    /// What is left of the budget, and the whole of it.
    budget: Budget,
    whole: Budget,
}

impl<'r, 'a> Flow<'r, 'a> {
    /// None if no work request can be eligible, or there is no peer to send to, for now or for
    /// ever.
    #[inline(always)]
    fn new(
        send_queue: &'r mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        budget: Budget,
        cache: &'r mut LookupCache<'a>,
    ) -> Option<Self> {
        let fast = matches!(send_queue.qp_type, qp_type::RC | qp_type::IWARP);
        if !fast || send_queue.max_sge == 0 {
            return None;
        }
        let cq = qp.send_cq.as_ref()?;
        let (dest_qp, binding) = (send_queue.dest_qp, &send_queue.binding);
        let target = cache.peer.meet(tables, qp, dest_qp, binding).ok()?;
        let kinds = Kinds {
            inline: send_queue.max_inline.min(Sge::SIZE),
            reads: send_queue.max_rd_atomic != 0,
        };
        cache.keep_for(tables, qp, &target);
        Some(Self {
            send_queue,
            cq,
            kinds,
            own: Own { tables, qp },
            target,
            cache,
            budget,
            whole: budget,
        })
    }

    /// Carries out work requests until there are no more, one is not eligible, or the budget is
    /// spent.
    #[inline(never)]
    fn run(&mut self) -> Left {
        let Self {
            send_queue,
            own,
            target,
            cache,
            cq,
            kinds,
            budget,
            ..
        } = self;
        let LookupCache { ours, theirs, .. } = &mut **cache;
        let (ours, theirs) = (&mut ours.cached, &mut theirs.cached);
        let SendQueue {
            queue,
            buffer,
            signal_all,
            ..
        } = &mut **send_queue;
        let (tables, qp) = (own.tables, own.qp);
        let before = *budget;
        let Budget {
            mut messages,
            mut bytes,
        } = before;
        let mut completions = Completions::default();
        let mut list = qp.hints.entries() >= SURE;
        // The next work requests may be a train, of WRITEs or of READs.
        let mut train = false;
        let mut reads = false;
        let (mut missed, mut no_train) = (0, 0);
        // What other threads do to the two queue pairs takes effect between two runs.
        let mut ready = qp.state() == qp_state::RTS && target.takes_fast_path();
        let rest = loop {
            let Some(entry) = queue.read(buffer) else {
                break Left::Nothing;
            };
            if std::mem::take(&mut train) {
                let most = messages.min((bytes / SHORT) as u32);
                let train = Train {
                    ours,
                    theirs,
                    qp_num: qp.number,
                    signal_all: *signal_all,
                    entries: qp.hints.entries(),
                    completions: completions.of(cq),
                };
                let carried = if reads {
                    train.carry_out::<true>(queue, buffer, most)
                } else {
                    train.carry_out::<false>(queue, buffer, most)
                };
                messages -= carried.messages;
                bytes -= carried.bytes;
                if carried.pushed != Pushed::Quiet {
                    ready &= completions.follow(tables, cq, carried.pushed);
                }
                if carried.messages != 0 {
                    missed = 0;
                    continue;
                }
                missed += 1;
                no_train = if missed < 2 { 0 } else { NO_TRAIN };
            }
            let entry = Entry::new(&entry);
            if messages == 0 || !ready || !entry.may_be_eligible(kinds, bytes) {
                break Left::Something;
            }
            let (wqe, len) = (&entry.wqe, entry.len());
            let access = matches!(wqe.opcode, wr_opcode::RDMA_WRITE | wr_opcode::RDMA_READ);
            let short_access = len <= SHORT && access;
            reads = entry.is_read();
            if std::mem::take(&mut list) && short_access {
                // A driver that posts lists asks for completions at their ends. Locking the
                // completion queue only then would wait for all stores before it, and then again
                // for the completion.
                completions.lock(tables, cq);
                train = !theirs.is_empty();
                if train {
                    continue;
                }
            }
            let moved = match wqe.opcode {
                wr_opcode::SEND | wr_opcode::SEND_WITH_IMM => {
                    own.send((ours, theirs), target, &entry, &mut completions, &mut ready)
                }
                _ => own.access_remote((ours, theirs), target, &entry),
            };
            if moved.is_none() {
                break Left::Something;
            }
            let index = queue.index();
            queue.take_over(buffer, wqe.wr_id);
            queue.advance();
            messages -= 1;
            bytes -= len;
            let signaled = *signal_all || wqe.flags & send_flag::SIGNALED != 0;
            if signaled {
                let cqe = Cqe {
                    wr_id: wqe.wr_id,
                    byte_len: if entry.is_read() { len as u32 } else { 0 },
                    qp_num: qp.number,
                    wqe_index: index,
                    opcode: completion_opcode(wqe.opcode),
                    ..Cqe::default()
                };
                ready &= completions.push(tables, cq, &cqe);
            }
            if len > SHORT {
                completions.finish();
            }
            train = short_access && no_train == 0;
            no_train = no_train.saturating_sub(1);
        };
        completions.finish();
        *budget = Budget { messages, bytes };
        let messages = before.messages - messages;
        if messages != 0 {
            qp.hints
                .set(messages, queue.head(buffer), buffer, target.qp);
            send_queue.reset_retries();
            // The wake-up has been answered.
            qp.wake.store(false, Ordering::Relaxed);
            let bytes = before.bytes - bytes;
            let (worker, messages) = (qp.worker_index, u64::from(messages));
            qp.vm.count_sent(worker, messages, bytes);
            target.vm.count_received(worker, messages, bytes);
        }
        rest
    }

    /// Whether the sender is sparse: its next message is to be found as soon as it is written. A
    /// driver that writes many at a time is not to be disturbed meanwhile.
    #[inline(always)]
    fn is_sparse(&self) -> bool {
        self.budget.spent(self.whole).messages <= SPARSE
    }

    /// Carries out what busy polling found.
    #[inline(always)]
    fn go_on<B: BusyPoll>(&mut self, busy_poll: &mut B) -> Left {
        if !self.is_sparse() {
            self.let_gather(busy_poll);
        }
        // Nobody else has work.
        self.budget = self.whole;
        let rest = self.run();
        busy_poll.spend(self.budget.spent(self.whole));
        rest
    }

    /// Lets a driver that posts many work requests get ahead, as long as nobody else has work.
    #[inline(never)]
    fn let_gather<B: BusyPoll>(&mut self, busy_poll: &mut B) {
        let gather = &self.own.qp.hints.gather;
        if gather.skips() {
            return;
        }
        for _ in 0..LOOKS {
            let SendQueue { queue, buffer, .. } = &*self.send_queue;
            match queue.is_posted(buffer, FAR) {
                Some(true) => {
                    gather.worked();
                    return;
                }
                Some(false) => {}
                None => break,
            }
            if !busy_poll.pause(self.own.tables, self.own.qp, BETWEEN) {
                return;
            }
        }
        gather.failed();
    }

    /// Busy polls for work requests of this queue pair, and for those by which the peer answers,
    /// and carries them out, as long as nobody else has any.
    #[inline(never)]
    fn busy_poll<B: BusyPoll>(&mut self, busy_poll: &mut B) -> Left {
        let (qp, peer) = (self.own.qp, self.target.qp);
        let tables = self.target.tables;
        let Some(doorbell) = busy_poll.doorbell(self.own.tables, qp) else {
            return Left::Nothing;
        };
        let theirs = busy_poll.doorbell(tables, peer);
        let doorbells = [Some(&doorbell), theirs.as_ref()];
        if busy_poll.others_ring(doorbells) {
            return Left::Nothing;
        }
        // The peer is polled, too, if this worker runs it and it is about to send its next message.
        let mut send_queue = (peer.worker_index == qp.worker_index
            && peer.state() == qp_state::RTS)
            .then(|| peer.try_send_queue())
            .flatten()
            .filter(|send_queue| send_queue.is_idle() && !peer.cq_errored());
        let mut path = Path::default();
        let mut cache = self.cache.afresh(Peer::Nobody);
        let mut answer = None;
        if let Some(send_queue) = &mut send_queue {
            path = std::mem::take(&mut send_queue.path);
            cache
                .registry
                .refresh(&mut path, &peer.vm, send_queue.dest_gid);
            cache.peer = Peer::at(&path, cache.section);
            answer = Flow::new(send_queue, tables, peer, self.whole, &mut cache).zip(theirs);
        }
        let mut rest = Left::Nothing;
        while rest == Left::Nothing {
            let own = || self.send_queue.posted().then_some(Came::Own);
            let came = match &answer {
                None => busy_poll.wait([&doorbell], self.is_sparse(), own),
                Some((answer, theirs)) => {
                    let eager = self.is_sparse() && answer.is_sparse();
                    busy_poll.wait([&doorbell, theirs], eager, || {
                        let answered = || answer.send_queue.posted().then_some(Came::Answer);
                        own().or_else(answered)
                    })
                }
            };
            match (came, &mut answer) {
                (Some(Came::Own), _) => rest = self.go_on(busy_poll),
                (Some(Came::Answer), Some((answer, _))) => {
                    if answer.go_on(busy_poll) != Left::Nothing {
                        break;
                    }
                }
                _ => break,
            }
        }
        // Doorbells were cleared whose work requests may not have been looked for since.
        if rest == Left::Nothing && self.send_queue.posted() {
            rest = Left::Something;
        }
        if answer.is_some_and(|(answer, _)| answer.send_queue.posted()) {
            busy_poll.next(peer);
        }
        if let Some(send_queue) = &mut send_queue {
            send_queue.path = path;
        }
        rest
    }
}

/// A train: short WRITEs, or READs, between the memory that the last one was of.
struct Train<'a, 'b> {
    ours: &'b CachedRange<'a>,
    theirs: &'b CachedRange<'a>,
    qp_num: u32,
    signal_all: bool,
    /// How many there are, if it is as the last time.
    entries: u32,
    /// Where they complete. None: one that is to be completed ends the train.
    completions: Option<&'b mut Batch<'a>>,
}

/// One of a train that is to be completed.
struct Done {
    wr_id: u64,
    len: u32,
    wqe_index: u16,
}

/// What was carried out of a train.
struct Carried {
    messages: u32,
    bytes: u64,
    /// What the completions led to.
    pushed: Pushed,
}

impl Train<'_, '_> {
    /// Carries out those at the head of the queue, at most `most`.
    #[inline(never)]
    fn carry_out<const READS: bool>(
        mut self,
        queue: &mut WorkQueue,
        buffer: &Pages,
        most: u32,
    ) -> Carried {
        let mut entries = queue.entries(buffer);
        let (mut messages, mut bytes) = (0, 0);
        let mut done = ArrayVec::new();
        let mut pushed = Pushed::Quiet;
        let last = self.entries.min(most);
        let ahead = (last / 4).min(AHEAD);
        while messages < most && pushed == Pushed::Quiet {
            if messages < last - ahead {
                entries.prefetch(ahead as usize);
            }
            let Some((wr_id, len, signaled)) = self.one::<READS>(&entries) else {
                break;
            };
            entries.take_over(wr_id);
            if signaled {
                done.push(Done {
                    wr_id,
                    len,
                    wqe_index: queue.index_after(messages),
                });
                if done.is_full() {
                    pushed = self.complete::<READS>(&mut done);
                }
            }
            entries.advance();
            messages += 1;
            bytes += u64::from(len);
        }
        if !done.is_empty() {
            pushed = self.complete::<READS>(&mut done);
        }
        queue.position = queue.position.wrapping_add(messages);
        Carried {
            messages,
            bytes,
            pushed,
        }
    }

    /// Carries out one. Returns its id, its length in bytes, and whether it is to be completed.
    #[inline(always)]
    fn one<const READS: bool>(&self, entries: &Entries<'_>) -> Option<(u64, u32, bool)> {
        const FLAGS: u8 = PHASE | send_flag::FENCE | send_flag::SOLICITED | send_flag::SIGNALED;
        let entry = Entry::new(&entries.read()?);
        let (wqe, sge) = (&entry.wqe, entry.sge());
        let signaled = self.signal_all || wqe.flags & send_flag::SIGNALED != 0;
        let opcode = if READS {
            wr_opcode::RDMA_READ
        } else {
            wr_opcode::RDMA_WRITE
        };
        let train = wqe.opcode == opcode
            && wqe.flags & !FLAGS == 0
            && wqe.count == 1
            && u64::from(sge.length).wrapping_sub(1) < SHORT
            && (!signaled || self.completions.is_some());
        if !train {
            return None;
        }
        let (our_access, their_access) = if READS {
            (access::LOCAL_WRITE, access::REMOTE_READ)
        } else {
            (0, access::REMOTE_WRITE)
        };
        let len = u64::from(sge.length);
        let ours = self.ours.recall(sge.lkey, our_access, sge.addr, len)?;
        let (key, addr) = (wqe.rkey, wqe.remote_addr);
        let theirs = self.theirs.recall(key, their_access, addr, len)?;
        let (to, from) = if READS {
            (ours, theirs)
        } else {
            (theirs, ours)
        };
        copy_last(to, from.into());
        Some((wqe.wr_id, sge.length, signaled))
    }

    /// Writes the completions of these, until one leads to an event or an error.
    #[inline(always)]
    fn complete<const READS: bool>(&mut self, done: &mut ArrayVec<Done, COMPLETIONS>) -> Pushed {
        for one in done.drain(..) {
            let cqe = Cqe {
                wr_id: one.wr_id,
                byte_len: if READS { one.len } else { 0 },
                qp_num: self.qp_num,
                wqe_index: one.wqe_index,
                opcode: if READS {
                    wc_opcode::RDMA_READ
                } else {
                    wc_opcode::RDMA_WRITE
                },
                ..Cqe::default()
            };
            let pushed = self.completions.as_mut().map(|batch| batch.push(&cqe));
            if let Some(pushed) = pushed.filter(|pushed| *pushed != Pushed::Quiet) {
                return pushed;
            }
        }
        Pushed::Quiet
    }
}

#[inline(always)]
fn is_eligible(opcode: u8) -> bool {
    matches!(
        opcode,
        wr_opcode::RDMA_WRITE | wr_opcode::RDMA_READ | wr_opcode::SEND | wr_opcode::SEND_WITH_IMM
    )
}

/// The ranges that were looked up last, at the requester's side and at the responder's.
type CachedRanges<'r, 'a> = (&'r mut CachedRange<'a>, &'r mut CachedRange<'a>);

/// The requester's side of a message.
struct Own<'a> {
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
}

impl<'a> Own<'a> {
    /// The memory of a work request that is not inline.
    #[inline(always)]
    fn contiguous(
        &self,
        cached: &mut CachedRange<'a>,
        entry: &Entry,
        access: u32,
    ) -> Option<ContiguousRange<'a>> {
        let (keys, pd, sge) = (&self.tables.keys, self.qp.pd, entry.sge());
        let len = u64::from(sge.length);
        if let Some(part) = cached.recall(sge.lkey, access, sge.addr, len) {
            return Some(part);
        }
        keys.contiguous(cached, sge.lkey, pd, access, sge.addr, len)
    }

    /// What a WRITE or SEND takes its bytes from.
    #[inline(always)]
    fn source<'b>(&self, cached: &mut CachedRange<'a>, entry: &'b Entry) -> Option<Source<'b>>
    where
        'a: 'b,
    {
        if entry.inline() {
            let bytes = entry.data.get(..usize::from(entry.wqe.count))?;
            return Some(bytes.into());
        }
        Some(self.contiguous(cached, entry, 0)?.into())
    }

    /// A WRITE or READ, if it is eligible.
    #[inline(always)]
    fn access_remote(
        &self,
        cached: CachedRanges<'_, 'a>,
        target: &Target<'a>,
        entry: &Entry,
    ) -> Option<()> {
        self.access_contiguous(cached, target, entry)
            .or_else(|| self.access_scattered(target, entry))
    }

    /// The same, if its bytes are in one contiguous range at both ends.
    #[inline(always)]
    fn access_contiguous(
        &self,
        (ours, theirs): CachedRanges<'_, 'a>,
        target: &Target<'a>,
        entry: &Entry,
    ) -> Option<()> {
        let wqe = &entry.wqe;
        let (key, addr, len) = (wqe.rkey, wqe.remote_addr, entry.len());
        if entry.is_read() {
            let to = self.contiguous(ours, entry, access::LOCAL_WRITE)?;
            let from = target.contiguous(theirs, access::REMOTE_READ, key, addr, len)?;
            copy_last(to, from.into());
        } else {
            let source = self.source(ours, entry)?;
            source.prefetch();
            let to = target.contiguous(theirs, access::REMOTE_WRITE, key, addr, len)?;
            copy_last(to, source);
        }
        Some(())
    }

    /// The same, if its bytes are in scatter ranges.
    #[inline(never)]
    fn access_scattered(&self, target: &Target<'_>, entry: &Entry) -> Option<()> {
        if entry.inline() {
            return None;
        }
        let (wqe, sge, len) = (&entry.wqe, entry.sge(), entry.len());
        let (our_access, their_access) = if entry.is_read() {
            (access::LOCAL_WRITE, access::REMOTE_READ)
        } else {
            (0, access::REMOTE_WRITE)
        };
        let keys = &self.tables.keys;
        let mut ours = keys.scattered(sge.lkey, self.qp.pd, our_access, sge.addr, len)?;
        let mut theirs = target.scattered(their_access, wqe.rkey, wqe.remote_addr, len)?;
        let (to, from) = if entry.is_read() {
            (&mut ours, &mut theirs)
        } else {
            (&mut theirs, &mut ours)
        };
        copy_scattered(to, from, Way::Cached, true);
        Some(())
    }

    /// A SEND, if it and its receive are eligible.
    #[inline(always)]
    fn send(
        &self,
        (ours, theirs): CachedRanges<'_, 'a>,
        target: &mut Target<'a>,
        entry: &Entry,
        completions: &mut Completions<'a>,
        ready: &mut bool,
    ) -> Option<()> {
        // Solicited completions raise events by rules of their own.
        if entry.wqe.flags & send_flag::SOLICITED != 0 {
            return None;
        }
        let source = self.source(ours, entry)?;
        let (receive, cq) = target.take_fast(theirs, entry.len())?;
        copy_last(receive.range, source);
        let with_imm = entry.wqe.opcode == wr_opcode::SEND_WITH_IMM;
        let cqe = Cqe {
            wr_id: receive.wr_id,
            byte_len: entry.len() as u32,
            imm: if with_imm { entry.wqe.imm } else { 0 },
            qp_num: target.qp.number,
            src_qp: self.qp.number,
            wqe_index: receive.index,
            opcode: wc_opcode::RECV,
            wc_flags: if with_imm { wc_flag::WITH_IMM } else { 0 },
            ..Cqe::default()
        };
        *ready &= completions.push(target.tables, cq, &cqe);
        Some(())
    }
}
