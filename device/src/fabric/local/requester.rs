// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requester of the local fabric: it hands each message to the peer's responder and has the
//! answer at once. What waits, waits for a time or for a wake-up; nothing is under way meanwhile.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::facts::Kind;
use virtio_rdma_spec::verbs::{access, qp_type, vendor_err, wc_status};

use super::busy_poll::BusyPoll;
use super::fast_path::{fast_path, Left};
use super::lookup_cache::LookupCache;
use super::peer::{deliver_next, Peer};
use super::{reliable, LocalCarrier};
use crate::engine::cursor::{check, Cursor, Sink};
use crate::engine::message::Answer;
use crate::engine::operation::Operation;
use crate::engine::path::Fanout;
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Payload, Slice};
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::{Budget, BUDGET};
use crate::fabric::{Elsewhere, Observe};
use crate::verbs::keys::Accessor;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// How long to wait for a stopped VM before looking again, nanoseconds: at first, and doubled so
/// often at most.
pub(super) const STOPPED_RETRY: u64 = 5_000_000;
const MOST_DOUBLED: u8 = 4;
/// How long to wait between attempts where no time-out is set, nanoseconds.
const ENDLESS_RETRY: u64 = 100_000_000;

/// `rnr_retry` without a limit.
pub(super) const NO_LIMIT: u8 = 7;
/// The longest wait for a receive, nanoseconds, unless the responder asks for a longer one.
const MOST_RNR_WAIT: u64 = 1_000_000_000;

/// How long to let receives gather where a sender that waits for them finds few each time,
/// nanoseconds: at least, and at most (specification: "RNR").
const LEAST_GATHER: u32 = 4_000;
const MOST_GATHER: u32 = 128_000;

/// Polls a send queue at time `now`, nanoseconds, within the budget `whole`. With nothing more to
/// do it may busy poll. The `carrier` learns what was done.
pub(crate) fn poll<'a, B: BusyPoll>(
    carrier: &mut LocalCarrier<'_, 'a, B>,
    sq: &mut SendQueue,
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    now: u64,
    whole: Budget,
) -> Polled {
    let LocalCarrier {
        cache,
        busy_poll,
        done,
        elsewhere,
        observer,
    } = carrier;
    let (cache, busy_poll) = (&mut **cache, &mut **busy_poll);
    if qp.qp_type == qp_type::SRD {
        if let Err(polled) = sq.check_ring(tables, qp) {
            return polled;
        }
        return reliable::poll(sq, cache, tables, qp, now, (BUDGET, done), elsewhere);
    }
    sq.resumed = false;
    if let Some(until) = sq.parked {
        if now < until && cache.registry.appears(&mut sq.path, &qp.vm, sq.dest_gid) {
            // The wait for an answer is cut short: that attempt does not count.
            sq.tries.no_answer = sq.tries.no_answer.saturating_sub(1);
        } else if now < until {
            if !qp.wake.swap(false, Ordering::SeqCst) {
                return Polled::Park(until);
            }
            if sq.gather != 0 && !sq.gathering {
                sq.gathering = true;
                let wait = u64::from(sq.gather).min(until - now);
                return park(sq, now, wait);
            }
        }
        qp.wake.store(false, Ordering::SeqCst);
        sq.parked = None;
        sq.gathering = false;
        sq.resumed = true;
    }
    if let Err(polled) = sq.check_ring(tables, qp) {
        return polled;
    }
    if qp.facts.datagram {
        return datagrams(sq, cache, tables, qp, now, done, (elsewhere, observer));
    }
    let mut path = std::mem::take(&mut sq.path);
    cache.registry.refresh(&mut path, &qp.vm, sq.dest_gid);
    let (polled, sent) = if cache.follow(&path) {
        carry_out(sq, tables, qp, now, whole, busy_poll, cache, observer)
    } else {
        let mut cache = cache.afresh(Peer::at(&path, cache.section));
        carry_out(sq, tables, qp, now, whole, busy_poll, &mut cache, observer)
    };
    sq.path = path;
    *done = sent;
    polled
}

/// Carries out work requests for the peer in `cache`. Returns what it led to, and what was done.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
fn carry_out<'a, B: BusyPoll>(
    sq: &mut SendQueue,
    tables: &'a Tables,
    qp: &'a Arc<Qp>,
    now: u64,
    whole: Budget,
    busy_poll: &mut B,
    cache: &mut LookupCache<'a>,
    observer: &mut Option<&mut dyn Observe>,
) -> (Polled, Budget) {
    let mut budget = whole;
    let polled = loop {
        // This is all that most polls are.
        if sq.active.is_none()
            && observer.is_none()
            && fast_path(sq, tables, qp, &mut budget, busy_poll, cache) == Left::Nothing
        {
            break Polled::Idle;
        }
        if budget.messages == 0 || budget.bytes == 0 {
            break Polled::Again;
        }
        let sent = budget.spent(whole).messages;
        budget.messages -= 1;
        let peer = &cache.peer;
        if let Err(polled) = slow_path(sq, tables, qp, now, sent, &mut budget, peer, observer) {
            break polled;
        }
    };
    let done = budget.spent(whole);
    let long = done.messages > BUDGET.messages || done.bytes > BUDGET.bytes;
    if polled == Polled::Again && long {
        return (Polled::Long, done);
    }
    (polled, done)
}

/// The slow path, for one work request or a slice of it, after `sent` of this poll. Fails with what
/// the poll led to if that ends it.
#[inline(never)]
#[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
fn slow_path(
    sq: &mut SendQueue,
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
    sent: u32,
    budget: &mut Budget,
    peer: &Peer<'_>,
    observer: &mut Option<&mut dyn Observe>,
) -> Result<(), Polled> {
    let active = sq.next_active(tables, qp)?;
    sq.active = Some(active);
    if qp.wake.load(Ordering::Relaxed) {
        // The wake-up has been answered: the next one comes after what the responder says now.
        qp.wake.store(false, Ordering::Relaxed);
    }
    if active.message.kind.is_local() {
        return sq.execute(tables, qp, &active, budget);
    }
    let len = (active.message.length - active.done).min(budget.bytes);
    let mut answer = exchange(sq, tables, qp, &active, len, peer);
    if let Some(observer) = observer {
        observer.answered(sq, tables, qp, &active, answer, now);
    }
    let lost = matches!(
        answer,
        Answer::NoAnswer | Answer::NotReady(_) | Answer::Refused(..) | Answer::Stopped
    );
    let dropped = lost && sq.qp_type == qp_type::UC;
    if dropped {
        // The sender does not learn of it.
        answer = Answer::Done;
    }
    match answer {
        Answer::Progress => {
            sq.reset_retries();
            sq.active = Some(Active {
                done: active.done + len,
                ..active
            });
            budget.bytes -= len;
        }
        Answer::Done => {
            sq.reset_retries();
            budget.bytes -= len;
            if active.invalidates_sink {
                if let Err(key) = sq.invalidate_sink(tables, qp) {
                    let error = WcError::new(wc_status::LOC_QP_OP_ERR, key.0);
                    sq.fail(tables, qp, error);
                    return Err(Polled::Again);
                }
            }
            sq.finish(tables, qp, &active);
            let worker = qp.worker_index;
            qp.vm.count_sent(worker, 1, active.message.length);
            if !dropped {
                peer.count_received(worker, active.message.length);
            }
        }
        Answer::Busy => return Err(Polled::Again),
        Answer::Stopped => {
            let wait = STOPPED_RETRY << sq.tries.stopped;
            sq.tries.stopped = (sq.tries.stopped + 1).min(MOST_DOUBLED);
            return Err(park(sq, now, wait));
        }
        Answer::NoAnswer => {
            qp.vm.count_retry(qp.worker_index);
            if sq.timeout == 0 {
                return Err(park(sq, now, ENDLESS_RETRY));
            }
            if sq.tries.no_answer > sq.retry_cnt {
                let error = WcError::new(wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER);
                sq.fail(tables, qp, error);
                return Err(Polled::Again);
            }
            sq.tries.no_answer += 1;
            return Err(park(sq, now, 4096u64 << sq.timeout));
        }
        Answer::NotReady(timer) => {
            qp.vm.count_rnr(qp.worker_index);
            note_starved(sq, sent);
            if sq.rnr_retry != NO_LIMIT && sq.tries.not_ready >= sq.rnr_retry {
                let error = WcError::new(wc_status::RNR_RETRY_EXC_ERR, vendor_err::NO_RECEIVE);
                sq.fail(tables, qp, error);
                return Err(Polled::Again);
            }
            let wait = rnr_wait(rnr_nanoseconds(timer), sq.rnr_retry, sq.tries.not_ready);
            sq.tries.not_ready = sq.tries.not_ready.saturating_add(1);
            return Err(park(sq, now, wait));
        }
        Answer::Refused(error) | Answer::Local(error) => {
            sq.fail(tables, qp, error);
            return Err(Polled::Again);
        }
    }
    Ok(())
}

/// Polls a queue pair that sends datagrams: each has its own destination, and is sent whole. One to
/// a multicast group counts once for each queue pair in it. What nobody here has, and what goes to a
/// group, goes `elsewhere`, too.
fn datagrams(
    sq: &mut SendQueue,
    cache: &LookupCache<'_>,
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
    done: &mut Budget,
    (elsewhere, observer): (
        &mut Option<&mut dyn Elsewhere>,
        &mut Option<&mut dyn Observe>,
    ),
) -> Polled {
    for _ in 0..BUDGET.messages {
        let active = match sq.next_active(tables, qp) {
            Ok(active) => active,
            Err(polled) => return polled,
        };
        sq.active = Some(active);
        let Some(datagram) = sq.datagram else {
            let error = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
            sq.fail(tables, qp, error);
            return Polled::Again;
        };
        let answer = if datagram.multicast() {
            let fanout = sq.fanout.take().or_else(|| {
                let members = cache.registry.members(&qp.vm.network, datagram.dgid);
                Fanout::begin(members, &tables.footprint)
            });
            let source = sq.source(tables, qp, &active);
            match fanout {
                Some(mut fanout) => {
                    let answer = deliver_next(
                        &mut fanout,
                        cache.section,
                        qp,
                        &active.message,
                        &datagram,
                        source,
                    );
                    if matches!(answer, Answer::Progress | Answer::Busy) {
                        sq.fanout = Some(fanout);
                    }
                    answer
                }
                // It is lost, as datagrams may be.
                None => Answer::NoAnswer,
            }
        } else {
            cache.registry.refresh(&mut sq.path, &qp.vm, datagram.dgid);
            let source = sq.source(tables, qp, &active);
            let peer = Peer::at(&sq.path, cache.section);
            peer.deliver_datagram(qp, &active.message, &datagram, source)
        };
        // What leaves is seen where it does; of those of a group, the last one stands for all.
        let leaves = elsewhere.is_some() && (datagram.multicast() || sq.path.vm().is_none());
        if let Some(observer) = observer.as_mut().filter(|_| !leaves) {
            observer.answered(sq, tables, qp, &active, answer, now);
        }
        let answer = match elsewhere {
            None => answer,
            Some(elsewhere) => leave(*elsewhere, answer, sq, tables, qp, now),
        };
        match answer {
            Answer::Busy => return Polled::Again,
            Answer::Local(error) => {
                sq.fail(tables, qp, error);
                return Polled::Again;
            }
            Answer::Progress => {}
            _ => {
                sq.finish(tables, qp, &active);
                qp.vm.count_sent(qp.worker_index, 1, active.message.length);
            }
        }
        done.messages += 1;
        done.bytes += active.message.length;
        if done.bytes >= BUDGET.bytes {
            return Polled::Again;
        }
    }
    Polled::Again
}

/// Sends the datagram of the work request in progress `elsewhere`, too, if it goes there: `answer` is
/// that of this process. Returns how it fared.
#[inline(never)]
fn leave(
    elsewhere: &mut dyn Elsewhere,
    answer: Answer,
    sq: &SendQueue,
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
) -> Answer {
    let group = sq.datagram.is_some_and(|datagram| datagram.multicast());
    let nobody = group || sq.path.vm().is_none();
    match (answer, sq.active) {
        (Answer::Done | Answer::NoAnswer, Some(active)) if nobody => {
            let sent = elsewhere.send_datagram(sq, tables, qp, &active, now);
            sent.map_or_else(Answer::Local, |()| Answer::Done)
        }
        _ => answer,
    }
}

/// How long to wait for a receive that is not there for the `retries`th time, nanoseconds, where
/// the responder asks for `timer`.
///
/// The guest rings for the next receive, and that ends the wait. The time is for a driver that does
/// not. Where there is no limit of retries, each further wait is twice as long: so many queue pairs
/// that wait for long cost next to nothing.
pub(super) fn rnr_wait(timer: u64, limit: u8, retries: u8) -> u64 {
    if limit != NO_LIMIT {
        return timer;
    }
    let longer = timer << retries.saturating_sub(NO_LIMIT).min(16);
    longer.min(MOST_RNR_WAIT).max(timer)
}

/// There is no receive, after `sent` messages of this poll. Each that is posted while the sender
/// waits makes the guest ring and a worker wake up, which costs much more than a message: where
/// they come one by one, several are left to gather.
fn note_starved(sq: &mut SendQueue, sent: u32) {
    sq.gather = match sent {
        0..=15 if sq.resumed => (2 * sq.gather).clamp(LEAST_GATHER, MOST_GATHER),
        16..=31 if sq.resumed => sq.gather,
        _ if sq.gather > LEAST_GATHER => sq.gather / 2,
        _ => 0,
    };
}

fn park(sq: &mut SendQueue, now: u64, wait: u64) -> Polled {
    let until = now.saturating_add(wait);
    sq.parked = Some(until);
    Polled::Park(until)
}

/// Moves `len` bytes of the message.
fn exchange(
    sq: &SendQueue,
    tables: &Tables,
    qp: &Arc<Qp>,
    active: &Active,
    len: u64,
    peer: &Peer<'_>,
) -> Answer {
    let local = Accessor::local(qp.pd);
    let sink = || {
        let cursor = Cursor::new(tables, &sq.sges, local, access::LOCAL_WRITE, active.done);
        Sink::Guest(cursor)
    };
    let payload = match (active.message.kind, sq.operation) {
        (Kind::Send | Kind::Write | Kind::AtomicWrite, _) => {
            Payload::From(sq.source(tables, qp, active))
        }
        (Kind::Read, _) => Payload::Into(sink()),
        (Kind::Atomic, Operation::Atomic(operation)) => {
            // It must not be done if its result has no place to go.
            if let Err(key) = check(tables, &sq.sges, local, access::LOCAL_WRITE) {
                return Answer::Local(WcError::new(wc_status::LOC_PROT_ERR, key.0));
            }
            Payload::Atomic(operation, sink())
        }
        (Kind::Flush, Operation::Flush(wanted, range)) => Payload::Flush(wanted, range),
        // No message, or one whose operands are others'.
        (Kind::Atomic | Kind::Flush | Kind::Bind | Kind::Invalidate | Kind::Register, _) => {
            let error = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
            return Answer::Local(error);
        }
    };
    let slice = Slice {
        message: &active.message,
        offset: active.done,
        len,
        last: active.done + len >= active.message.length,
        claims: active.done == 0,
        payload,
    };
    peer.deliver(tables, qp, sq.dest_qp, &sq.binding, slice)
}
