// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The direct way: runs of plain work requests, carried out without what only others need.
//!
//! A work request is plain if it is a WRITE, a READ or a SEND of one scatter/gather entry or as
//! much inline data, everything about it is as it should be, and its bytes are in regions that
//! commands registered: in one piece at both ends if it is a SEND or inline. Whatever is not plain
//! is left where it is, untouched, for the general way, which alone knows errors, waiting and
//! slices: so there is nothing that only this way decides.
//!
//! The locks that a message needs are taken once for a run, and whether an event is wanted is
//! looked up once at its end.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use arrayvec::ArrayVec;
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge, MIN_SEND_STRIDE, PHASE, SEND_DATA_OFFSET};
use virtio_rdma_spec::verbs::{
    access, completion_opcode, qp_state, qp_type, send_flag, wc_flag, wc_opcode, wr_opcode,
};

use super::Requester;
use crate::engine::queue::{Entries, WorkQueue};
use crate::engine::{settle, Budget};
use crate::fabric::local::{Peer, Route, Target};
use crate::memory::{copy_few, copy_last, copy_stretch, Pages, Source, Span, Way};
use crate::rnic::Rnic;
use crate::verbs::cq::{Batch, Cq, Pushed};
use crate::verbs::keys::Memo;
use crate::verbs::qp::Qp;
use crate::verbs::tables::Tables;
use crate::worker::{Came, Linger};
use vhost_device_rdma_sync::Visit;

/// Size of an entry with one scatter/gather entry, bytes.
const ENTRY: usize = SEND_DATA_OFFSET + Sge::SIZE;

/// Others may use a completion queue again after a message longer than this, bytes.
const SHORT: u64 = 1024;

/// Entries of a run that are fetched ahead.
const AHEAD: usize = 4;

/// Messages after which a run is taken to be long enough for that: who is that close behind the
/// driver would only take away the entries that it is about to write.
const SURE: u32 = 8;

/// Completions that are written together, at most: a driver that waits for them takes the cache
/// line away each time.
const COMPLETIONS: usize = 8;

/// Most messages at a time of who sends but few.
const SPARSE: u32 = 4;

/// Flags of a plain work request.
const FLAGS: u8 =
    PHASE | send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;

/// What the direct way leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// No work request is posted.
    Nothing,
    /// There may be more to do.
    Something,
}

/// A work request that may be plain.
struct Entry {
    wqe: SendWqe,
    /// Its scatter/gather entry, or inline data.
    data: [u8; Sge::SIZE],
}

impl Entry {
    #[inline(always)]
    fn new(bytes: &[u8; ENTRY]) -> Self {
        // All of an entry of a send queue is at hand: no stride is less.
        const { assert!(ENTRY <= MIN_SEND_STRIDE as usize) };
        let mut data = [0; Sge::SIZE];
        data.copy_from_slice(&bytes[SEND_DATA_OFFSET..]);
        Self {
            wqe: SendWqe::get(bytes),
            data,
        }
    }

    /// Whether it may be plain, of at most `max` bytes.
    #[inline(always)]
    fn may_be_plain(&self, kinds: &Kinds, max: u64) -> bool {
        let wqe = &self.wqe;
        let one = if self.inline() {
            usize::from(wqe.count) <= kinds.inline && !self.is_read()
        } else {
            wqe.count == 1
        };
        let len = self.len();
        let readable = !self.is_read() || kinds.reads;
        is_plain(wqe.opcode) && wqe.flags & !FLAGS == 0 && one && readable && len != 0 && len <= max
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

/// What the work requests of a queue pair may be to be plain.
struct Kinds {
    /// Longest inline data, bytes.
    inline: usize,
    /// They may be READs.
    reads: bool,
}

/// The completion queue that is locked, if one is. Never two: others may lock the same two the
/// other way round.
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

    /// Pushes a completion to a queue of the VM of `tables`. Returns false if more than that has
    /// come of it.
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

    /// Does what follows from the last completion, of which more came. Returns false.
    #[inline(never)]
    #[must_use]
    fn follow(&mut self, tables: &'a Tables, cq: &'a Arc<Cq>, pushed: Pushed) -> bool {
        self.finish();
        settle(tables, cq, pushed);
        false
    }

    /// Those of this queue, if it is locked.
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

impl Requester {
    /// Carries out the plain work requests at the head of the queue. None may be in progress. When
    /// there is no more, it stays for as long as `linger` says.
    #[inline(never)]
    pub(super) fn direct<'a>(
        &mut self,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        budget: &mut Budget,
        linger: &mut Linger<'_>,
        found: &mut Found<'a>,
    ) -> Rest {
        if qp.state() != qp_state::RTS {
            return Rest::Something;
        }
        if !self.posted() {
            return Rest::Nothing;
        }
        let Some(mut flow) = Flow::new(self, tables, qp, *budget, found) else {
            return Rest::Something;
        };
        let mut rest = flow.run();
        if rest == Rest::Nothing && linger.may() {
            rest = flow.linger(linger);
        }
        *budget = flow.budget;
        rest
    }

    /// Whether there is a work request.
    #[inline(always)]
    fn posted(&self) -> bool {
        self.queue.ready(&self.buffer).is_some()
    }
}

/// What was found for the queue pairs that had their turn in one look around. The next one is often
/// of the same VM and protection domain, and names the same memory, and so does who it sends to.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(super) visit: &'a Visit<'a>,
    /// The RNICs that peers may be of.
    rnics: &'a [Arc<Rnic>],
    /// The last peer.
    pub(super) peer: Peer<'a>,
    ours: Known<'a>,
    theirs: Known<'a>,
}

/// The last piece of memory that was found for a protection domain.
#[derive(Debug, Default)]
struct Known<'a> {
    /// The tables of its VM, and its number.
    domain: Option<(&'a Tables, u32)>,
    memo: Memo<'a>,
}

impl<'a> Known<'a> {
    /// Forgets what another protection domain than this one used.
    #[inline(always)]
    fn keep_for(&mut self, tables: &'a Tables, pd: u32) {
        if !matches!(self.domain, Some((known, known_pd)) if std::ptr::eq(known, tables) && known_pd == pd)
        {
            self.domain = Some((tables, pd));
            self.memo = Memo::default();
        }
    }
}

impl<'a> Found<'a> {
    /// For a look around at these RNICs.
    pub(crate) fn new(visit: &'a Visit<'a>, rnics: &'a [Arc<Rnic>]) -> Self {
        Self {
            rnics,
            ..Self::with(visit, Peer::Nobody)
        }
    }

    /// For one turn.
    pub(super) fn with(visit: &'a Visit<'a>, peer: Peer<'a>) -> Self {
        Self {
            visit,
            rnics: &[],
            peer,
            ours: Known::default(),
            theirs: Known::default(),
        }
    }

    /// Goes to the peer that a route leads to. Returns whether it is of one of the RNICs; otherwise
    /// nothing has changed.
    #[inline(always)]
    pub(super) fn follow(&mut self, route: &Route) -> bool {
        match (route.rnic(), self.peer) {
            (Some(rnic), Peer::Here(known, _)) if Arc::ptr_eq(known, rnic) => true,
            (Some(rnic), _) => self.find(rnic),
            (None, _) => false,
        }
    }

    /// The same, for another RNIC than that of the last peer. It borrows from the list, which
    /// outlives the route.
    #[inline(never)]
    fn find(&mut self, rnic: &Arc<Rnic>) -> bool {
        let mut rnics = self.rnics.iter();
        let found = rnics.find(|known| Arc::ptr_eq(known, rnic));
        if let Some(rnic) = found {
            self.peer = Peer::of(rnic, self.visit);
        }
        found.is_some()
    }

    /// Forgets what is not for the turn of a queue pair of the VM of `tables` that sends to
    /// `target`.
    #[inline(always)]
    fn keep_for(&mut self, tables: &'a Tables, qp: &Qp, target: &Target<'a>) {
        self.ours.keep_for(tables, qp.pd);
        self.theirs.keep_for(target.tables, target.qp.pd);
        // What one queue pair lets its peer do another may not. And what receives name may be of
        // another protection domain.
        let memo = &mut self.theirs.memo;
        let remote = matches!(memo.access(), access::REMOTE_WRITE | access::REMOTE_READ);
        if !remote || !target.grants(memo.access()) {
            *memo = Memo::default();
        }
    }
}

/// A queue pair whose plain work requests are carried out, with all that they need.
struct Flow<'r, 'a> {
    requester: &'r mut Requester,
    own: Own<'a>,
    target: Target<'a>,
    found: &'r mut Found<'a>,
    cq: &'a Arc<Cq>,
    kinds: Kinds,
    /// What may still be done, and what might be at first.
    budget: Budget,
    whole: Budget,
}

impl<'r, 'a> Flow<'r, 'a> {
    /// None if no work request is plain, or there is no peer to send to, for now or for ever.
    #[inline(always)]
    fn new(
        requester: &'r mut Requester,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        budget: Budget,
        found: &'r mut Found<'a>,
    ) -> Option<Self> {
        if requester.qp_type != qp_type::RC || requester.max_sge == 0 {
            return None;
        }
        let cq = qp.send_cq.as_ref()?;
        let target = found.peer.meet(tables, qp, requester.dest_qp).ok()?;
        let kinds = Kinds {
            inline: requester.max_inline.min(Sge::SIZE),
            reads: requester.max_rd_atomic != 0,
        };
        found.keep_for(tables, qp, &target);
        Some(Self {
            requester,
            cq,
            kinds,
            own: Own { tables, qp },
            target,
            found,
            budget,
            whole: budget,
        })
    }

    /// Carries out work requests until there is no more, one is not plain, or the budget is spent.
    #[inline(always)]
    fn run(&mut self) -> Rest {
        let Self {
            requester,
            own,
            target,
            found,
            cq,
            kinds,
            budget,
            ..
        } = self;
        let Found { ours, theirs, .. } = &mut **found;
        let (ours, theirs) = (&mut ours.memo, &mut theirs.memo);
        let Requester {
            queue,
            buffer,
            signal_all,
            ..
        } = &mut **requester;
        let (tables, qp) = (own.tables, own.qp);
        let before = *budget;
        let Budget {
            mut messages,
            mut bytes,
        } = before;
        let mut completions = Completions::default();
        let mut list = qp.ahead.entries() >= SURE;
        // The next message may be like the last one.
        let mut alike = false;
        // What others do to the two takes effect between two runs.
        let mut ready = qp.state() == qp_state::RTS && target.takes_plain();
        let rest = loop {
            if std::mem::take(&mut alike) {
                let most = messages.min((bytes / SHORT) as u32);
                let alike = Alike {
                    from: ours,
                    to: theirs,
                    qp_num: qp.number,
                    signal_all: *signal_all,
                    completions: completions.of(cq),
                };
                let repeated = alike.repeat(queue, buffer, most);
                messages -= repeated.messages;
                bytes -= repeated.bytes;
                if repeated.pushed != Pushed::Quiet {
                    ready &= completions.follow(tables, cq, repeated.pushed);
                }
            }
            let Some(entry) = queue.read(buffer) else {
                break Rest::Nothing;
            };
            let entry = Entry::new(&entry);
            if messages == 0 || !ready || !entry.may_be_plain(kinds, bytes) {
                break Rest::Something;
            }
            let (wqe, len) = (&entry.wqe, entry.len());
            let short_write = len <= SHORT && wqe.opcode == wr_opcode::RDMA_WRITE;
            if std::mem::take(&mut list) && short_write {
                // Who posts lists has completions at their ends. To lock the queue only then would
                // be to wait for all that was stored meanwhile, and then again for the completion.
                completions.lock(tables, cq);
                alike = !theirs.is_empty();
                if alike {
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
                break Rest::Something;
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
            alike = short_write;
        };
        completions.finish();
        *budget = Budget { messages, bytes };
        let messages = before.messages - messages;
        if messages != 0 {
            qp.ahead
                .set(messages, queue.head(buffer), buffer, target.qp);
            requester.reset_retries();
            // Whatever woke us is behind us.
            qp.wake.store(false, Ordering::Relaxed);
            let bytes = before.bytes - bytes;
            let (worker, messages) = (qp.worker.index, u64::from(messages));
            qp.rnic.count_sent(worker, messages, bytes);
            target.rnic.count_received(worker, messages, bytes);
        }
        rest
    }

    /// Whether so few messages were sent that the next is to be found as soon as it is written. Who
    /// writes many at a time is not to be disturbed meanwhile.
    #[inline(always)]
    fn is_sparse(&self) -> bool {
        self.budget.spent(self.whole).messages <= SPARSE
    }

    /// The same again, after a wait.
    #[inline(always)]
    fn go_on(&mut self, linger: &mut Linger<'_>) -> Rest {
        // Nobody else waits.
        self.budget = self.whole;
        let rest = self.run();
        linger.spend(self.budget.spent(self.whole));
        rest
    }

    /// Waits for work requests of this queue pair, and for those by which the peer answers, and
    /// carries them out, as long as nobody else has any.
    #[inline(never)]
    fn linger(&mut self, linger: &mut Linger<'_>) -> Rest {
        let (qp, peer) = (self.own.qp, self.target.qp);
        let tables = self.target.tables;
        let Some(bell) = linger.bell(self.own.tables, qp) else {
            return Rest::Nothing;
        };
        let theirs = linger.bell(tables, peer);
        let bells = [Some(&bell), theirs.as_ref()];
        if linger.others_ring(bells) {
            return Rest::Nothing;
        }
        // It is for us to serve the peer if its worker is ours, and here if it is about to send its
        // next message.
        let mut requester = (peer.worker.index == qp.worker.index && peer.state() == qp_state::RTS)
            .then(|| peer.try_requester())
            .flatten()
            .filter(|requester| requester.is_idle() && !peer.cq_errored());
        let mut route = Route::default();
        let mut found = Found::with(linger.visit, Peer::Nobody);
        let mut answer = None;
        if let Some(requester) = &mut requester {
            route = std::mem::take(&mut requester.route);
            route.refresh(&peer.rnic, requester.dest_gid);
            found.peer = route.peer(linger.visit);
            answer = Flow::new(requester, tables, peer, self.whole, &mut found).zip(theirs);
        }
        let mut rest = Rest::Nothing;
        while rest == Rest::Nothing {
            let own = || self.requester.posted().then_some(Came::Own);
            let came = match &answer {
                None => linger.wait([&bell], self.is_sparse(), own),
                Some((answer, theirs)) => {
                    let eager = self.is_sparse() && answer.is_sparse();
                    linger.wait([&bell, theirs], eager, || {
                        let answered = || answer.requester.posted().then_some(Came::Answer);
                        own().or_else(answered)
                    })
                }
            };
            match (came, &mut answer) {
                (Some(Came::Own), _) => rest = self.go_on(linger),
                (Some(Came::Answer), Some((answer, _))) => {
                    if answer.go_on(linger) != Rest::Nothing {
                        break;
                    }
                }
                _ => break,
            }
        }
        // Rings were taken of what may not have been looked at since.
        if rest == Rest::Nothing && self.requester.posted() {
            rest = Rest::Something;
        }
        if answer.is_some_and(|(answer, _)| answer.requester.posted()) {
            linger.next = Some(peer.clone());
        }
        if let Some(requester) = &mut requester {
            requester.route = route;
        }
        rest
    }
}

/// WRITEs that are like the last one: from and to what was found for that, and of a few words.
struct Alike<'a, 'b> {
    from: &'b Memo<'a>,
    to: &'b Memo<'a>,
    qp_num: u32,
    signal_all: bool,
    /// Where they complete. None: those that are to be completed are not alike.
    completions: Option<&'b mut Batch<'a>>,
}

/// What was carried out of them.
struct Repeated {
    messages: u32,
    bytes: u64,
    /// What came of the completions.
    pushed: Pushed,
}

impl Alike<'_, '_> {
    /// Carries out those at the head of the queue, at most `most`.
    #[inline(never)]
    fn repeat(mut self, queue: &mut WorkQueue, buffer: &Pages, most: u32) -> Repeated {
        let mut entries = queue.entries(buffer);
        let (mut messages, mut bytes) = (0, 0);
        let mut done = ArrayVec::new();
        let mut pushed = Pushed::Quiet;
        while messages < most && pushed == Pushed::Quiet {
            if messages >= SURE {
                entries.prefetch(AHEAD);
            }
            let Some((wr_id, len, signaled)) = self.one(&entries) else {
                break;
            };
            entries.take_over(wr_id);
            if signaled {
                done.push((wr_id, queue.index_after(messages)));
                if done.is_full() {
                    pushed = self.complete(&mut done);
                }
            }
            entries.advance();
            messages += 1;
            bytes += len;
        }
        if !done.is_empty() {
            pushed = self.complete(&mut done);
        }
        queue.position = queue.position.wrapping_add(messages);
        Repeated {
            messages,
            bytes,
            pushed,
        }
    }

    /// Carries out one. Returns its id, its length in bytes, and whether it is to be completed.
    #[inline(always)]
    fn one(&self, entries: &Entries<'_>) -> Option<(u64, u64, bool)> {
        const FLAGS: u8 = PHASE | send_flag::FENCE | send_flag::SOLICITED | send_flag::SIGNALED;
        let entry = Entry::new(&entries.read()?);
        let (wqe, sge) = (&entry.wqe, entry.sge());
        let signaled = self.signal_all || wqe.flags & send_flag::SIGNALED != 0;
        let alike = wqe.opcode == wr_opcode::RDMA_WRITE
            && wqe.flags & !FLAGS == 0
            && wqe.count == 1
            && sge.length != 0
            && (!signaled || self.completions.is_some());
        if !alike {
            return None;
        }
        let len = u64::from(sge.length);
        let from = self.from.recall(sge.lkey, 0, sge.addr, len)?;
        let access = access::REMOTE_WRITE;
        let to = self.to.recall(wqe.rkey, access, wqe.remote_addr, len)?;
        copy_few(to, from.into()).then_some((wqe.wr_id, len, signaled))
    }

    /// Writes the completions of these ids and indices, until more comes of one than that.
    #[inline(always)]
    fn complete(&mut self, done: &mut ArrayVec<(u64, u16), COMPLETIONS>) -> Pushed {
        for (wr_id, wqe_index) in done.drain(..) {
            let cqe = Cqe {
                wr_id,
                qp_num: self.qp_num,
                wqe_index,
                opcode: wc_opcode::RDMA_WRITE,
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
fn is_plain(opcode: u8) -> bool {
    matches!(
        opcode,
        wr_opcode::RDMA_WRITE | wr_opcode::RDMA_READ | wr_opcode::SEND | wr_opcode::SEND_WITH_IMM
    )
}

/// What was found for the requester's side and for the responder's.
type Memos<'r, 'a> = (&'r mut Memo<'a>, &'r mut Memo<'a>);

/// The requester's side of a message.
struct Own<'a> {
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
}

impl<'a> Own<'a> {
    /// The memory of a work request that is not inline.
    #[inline(always)]
    fn piece(&self, memo: &mut Memo<'a>, entry: &Entry, access: u32) -> Option<Span<'a>> {
        let (keys, pd, sge) = (&self.tables.keys, self.qp.pd, entry.sge());
        let len = u64::from(sge.length);
        if let Some(piece) = memo.recall(sge.lkey, access, sge.addr, len) {
            return Some(piece);
        }
        keys.piece(memo, sge.lkey, pd, access, sge.addr, len)
    }

    /// What a WRITE or SEND takes its bytes from.
    #[inline(always)]
    fn source<'b>(&self, memo: &mut Memo<'a>, entry: &'b Entry) -> Option<Source<'b>>
    where
        'a: 'b,
    {
        if entry.inline() {
            let bytes = entry.data.get(..usize::from(entry.wqe.count))?;
            return Some(bytes.into());
        }
        Some(self.piece(memo, entry, 0)?.into())
    }

    /// A WRITE or READ, if it is plain.
    #[inline(always)]
    fn access_remote(
        &self,
        memos: Memos<'_, 'a>,
        target: &Target<'a>,
        entry: &Entry,
    ) -> Option<()> {
        self.access_piece(memos, target, entry)
            .or_else(|| self.access_pieces(target, entry))
    }

    /// The same, if its bytes lie in one piece at both ends.
    #[inline(always)]
    fn access_piece(
        &self,
        (ours, theirs): Memos<'_, 'a>,
        target: &Target<'a>,
        entry: &Entry,
    ) -> Option<()> {
        let wqe = &entry.wqe;
        let (key, addr, len) = (wqe.rkey, wqe.remote_addr, entry.len());
        if entry.is_read() {
            let to = self.piece(ours, entry, access::LOCAL_WRITE)?;
            let from = target.piece(theirs, access::REMOTE_READ, key, addr, len)?;
            copy_last(to, from.into());
        } else {
            let source = self.source(ours, entry)?;
            source.prefetch();
            let to = target.piece(theirs, access::REMOTE_WRITE, key, addr, len)?;
            copy_last(to, source);
        }
        Some(())
    }

    /// The same, if they are at hand without that.
    #[inline(never)]
    fn access_pieces(&self, target: &Target<'_>, entry: &Entry) -> Option<()> {
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
        let mut ours = keys.stretch(sge.lkey, self.qp.pd, our_access, sge.addr, len)?;
        let mut theirs = target.stretch(their_access, wqe.rkey, wqe.remote_addr, len)?;
        let (to, from) = if entry.is_read() {
            (&mut ours, &mut theirs)
        } else {
            (&mut theirs, &mut ours)
        };
        copy_stretch(to, from, Way::Cached, true);
        Some(())
    }

    /// A SEND, if it is plain, and so is the receive that it meets.
    #[inline(always)]
    fn send(
        &self,
        (ours, theirs): Memos<'_, 'a>,
        target: &mut Target<'a>,
        entry: &Entry,
        completions: &mut Completions<'a>,
        ready: &mut bool,
    ) -> Option<()> {
        // Events for solicited completions are not those of others.
        if entry.wqe.flags & send_flag::SOLICITED != 0 {
            return None;
        }
        let source = self.source(ours, entry)?;
        let (receive, cq) = target.take_plain(theirs, entry.len())?;
        copy_last(receive.span, source);
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
