// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable datagrams of the local fabric (SRD). Each message goes to a destination of its own, and
//! is carried out by itself: one that has to wait is put aside, and the next one goes on. So messages
//! end in any order.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::facts::{Imm, Kind};
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{access, vendor_err, wc_status};

use super::lookup_cache::LookupCache;
use super::peer::Peer;
use super::requester::{rnr_wait, NO_LIMIT, STOPPED_RETRY};
use crate::engine::cursor::{Cursor, DataSource, Sink};
use crate::engine::message::{Answer, Datagram, Message};
use crate::engine::path::Path;
use crate::engine::queue_pair::Qp;
use crate::engine::responder::{Payload, Slice};
use crate::engine::send_queue::{Active, Deferred, Polled, SendQueue, MOST_DEFERRED};
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::fabric;
use crate::verbs::keys::Accessor;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// How long to wait before looking again for a destination that nobody has, nanoseconds, and for how
/// long in all.
const NOBODY_RETRY: u64 = 10_000_000;
const GIVE_UP: u64 = 4_000_000_000;

/// How long to wait where the account of the VM has no room, nanoseconds.
const NO_ROOM_RETRY: u64 = 10_000_000;

/// Takes what nobody in this process is the destination of.
type Elsewhere<'e, 'p> = &'e mut Option<&'p mut dyn fabric::Elsewhere>;

/// Polls a send queue at time `now`, nanoseconds, within a budget. What was done goes to `done`.
pub(super) fn poll(
    sq: &mut SendQueue,
    cache: &LookupCache<'_>,
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
    (whole, done): (Budget, &mut Budget),
    elsewhere: Elsewhere<'_, '_>,
) -> Polled {
    sq.parked = None;
    let mut budget = whole;
    let mut path = std::mem::take(&mut sq.path);
    let polled = try_again(sq, &mut path, cache, tables, qp, now, &mut budget).and_then(|()| {
        begin(
            sq,
            (&mut path, cache),
            tables,
            qp,
            now,
            &mut budget,
            elsewhere,
        )
    });
    sq.path = path;
    *done = budget.spent(whole);
    match polled {
        Ok(()) if sq.deferred.is_empty() => Polled::Idle,
        Ok(()) => {
            let until = sq.deferred.iter().map(|one| one.until).min();
            let until = until.unwrap_or(now);
            sq.parked = Some(until);
            Polled::Park(until)
        }
        Err(polled) => polled,
    }
}

/// Carries out work requests that have not begun, until there is none, or no room to put one aside.
/// Fails with what the poll led to if more can be done at once.
fn begin(
    sq: &mut SendQueue,
    (path, cache): (&mut Path, &LookupCache<'_>),
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
    budget: &mut Budget,
    elsewhere: Elsewhere<'_, '_>,
) -> Result<(), Polled> {
    while (sq.under_way() as usize) < MOST_DEFERRED {
        if budget.messages == 0 || budget.bytes == 0 {
            return Err(Polled::Again);
        }
        let active = match sq.next_active(tables, qp) {
            Ok(active) => active,
            Err(Polled::Idle) => return Ok(()),
            Err(polled) => return Err(polled),
        };
        sq.active = Some(active);
        budget.messages -= 1;
        let Some(to) = sq.datagram else {
            let error = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
            sq.fail(tables, qp, error);
            continue;
        };
        let list = List {
            sges: &sq.sges,
            inline: active.inline.then_some(sq.inline.as_slice()),
        };
        cache.registry.refresh(path, &qp.vm, to.dgid);
        let peer = Peer::at(path, cache.section);
        if let (Some(elsewhere), Peer::Nobody, 0) = (elsewhere.as_deref_mut(), peer, active.done) {
            if !elsewhere.take_reliable_datagram(sq, tables, qp, &active, now) {
                return Err(no_room(sq, now));
            }
            sq.take_begun();
            continue;
        }
        let len = (active.message.length - active.done).min(budget.bytes);
        let answer = exchange(&peer, tables, qp, &active, &to, list, len);
        match answer {
            Answer::Progress => {
                budget.bytes -= len;
                let done = active.done + len;
                sq.active = Some(Active { done, ..active });
            }
            Answer::Done => {
                budget.bytes -= len;
                sq.finish(tables, qp, &active);
                count(&peer, qp, &active.message);
            }
            Answer::Busy => return Err(Polled::Again),
            Answer::Refused(error) | Answer::Local(error) => sq.fail(tables, qp, error),
            Answer::Stopped | Answer::NoAnswer | Answer::NotReady(_) => {
                let inline = list.inline.unwrap_or_default();
                let footprint = Deferred::footprint(sq.sges.len(), inline.len());
                let Ok(share) = tables.footprint.share(footprint) else {
                    return Err(no_room(sq, now));
                };
                let mut waits = Deferred {
                    active,
                    to,
                    sges: sq.sges.clone(),
                    inline: inline.to_vec(),
                    since: now,
                    until: now,
                    not_ready: 0,
                    for_receive: false,
                    _share: share,
                };
                sq.take_begun();
                match wait(sq, qp, &mut waits, answer, now) {
                    None => sq.deferred.push(waits),
                    Some(error) => sq.fail_begun(tables, qp, &waits.active, error),
                }
            }
        }
    }
    Ok(())
}

/// The account has no room for the message in progress: the others wait behind it.
fn no_room(sq: &mut SendQueue, now: u64) -> Polled {
    let until = now.saturating_add(NO_ROOM_RETRY);
    sq.parked = Some(until);
    Polled::Park(until)
}

/// Goes on with those that were put aside, and whose time has come.
fn try_again(
    sq: &mut SendQueue,
    path: &mut Path,
    cache: &LookupCache<'_>,
    tables: &Tables,
    qp: &Arc<Qp>,
    now: u64,
    budget: &mut Budget,
) -> Result<(), Polled> {
    let woken = qp.wake.swap(false, Ordering::SeqCst);
    let mut at = 0;
    while let Some(mut waits) = (at < sq.deferred.len()).then(|| sq.deferred.swap_remove(at)) {
        let due = waits.until <= now || (woken && waits.for_receive);
        if !due {
            put_back(sq, waits, &mut at);
            continue;
        }
        if budget.messages == 0 || budget.bytes == 0 {
            put_back(sq, waits, &mut at);
            return Err(Polled::Again);
        }
        budget.messages -= 1;
        let active = waits.active;
        let list = List {
            sges: &waits.sges,
            inline: active.inline.then_some(waits.inline.as_slice()),
        };
        cache.registry.refresh(path, &qp.vm, waits.to.dgid);
        let peer = Peer::at(path, cache.section);
        let len = (active.message.length - active.done).min(budget.bytes);
        let answer = exchange(&peer, tables, qp, &active, &waits.to, list, len);
        match answer {
            Answer::Progress => {
                budget.bytes -= len;
                let done = active.done + len;
                waits.active = Active { done, ..active };
                (waits.since, waits.until) = (now, now);
                put_back(sq, waits, &mut at);
            }
            Answer::Done => {
                budget.bytes -= len;
                sq.finish_begun(tables, qp, &active);
                count(&peer, qp, &active.message);
            }
            Answer::Busy => {
                waits.until = now;
                put_back(sq, waits, &mut at);
                return Err(Polled::Again);
            }
            Answer::Refused(error) | Answer::Local(error) => {
                sq.fail_begun(tables, qp, &active, error);
            }
            Answer::Stopped | Answer::NoAnswer | Answer::NotReady(_) => {
                match wait(sq, qp, &mut waits, answer, now) {
                    None => put_back(sq, waits, &mut at),
                    Some(error) => sq.fail_begun(tables, qp, &active, error),
                }
            }
        }
    }
    Ok(())
}

/// Puts one that was taken out back to index `at`, and goes on to the next.
fn put_back(sq: &mut SendQueue, waits: Deferred, at: &mut usize) {
    sq.deferred.push(waits);
    let last = sq.deferred.len() - 1;
    sq.deferred.swap(*at, last);
    *at += 1;
}

/// How long a message waits after this answer. Returns the error if it has waited long enough.
fn wait(
    sq: &SendQueue,
    qp: &Qp,
    waits: &mut Deferred,
    answer: Answer,
    now: u64,
) -> Option<WcError> {
    waits.for_receive = false;
    let time = match answer {
        Answer::NotReady(timer) => {
            qp.vm.count_rnr(qp.worker_index);
            if sq.rnr_retry != NO_LIMIT && waits.not_ready >= sq.rnr_retry {
                return Some(WcError::new(
                    wc_status::RNR_RETRY_EXC_ERR,
                    vendor_err::NO_RECEIVE,
                ));
            }
            let time = rnr_wait(rnr_nanoseconds(timer), sq.rnr_retry, waits.not_ready);
            waits.not_ready = waits.not_ready.saturating_add(1);
            waits.for_receive = true;
            waits.since = now;
            time
        }
        Answer::NoAnswer => {
            qp.vm.count_retry(qp.worker_index);
            if now.saturating_sub(waits.since) >= GIVE_UP {
                return Some(WcError::new(
                    wc_status::RESP_TIMEOUT_ERR,
                    vendor_err::NO_ANSWER,
                ));
            }
            NOBODY_RETRY
        }
        // Its VM is stopped: that does not count.
        _ => {
            waits.since = now;
            STOPPED_RETRY
        }
    };
    waits.until = now.saturating_add(time);
    None
}

fn count(peer: &Peer<'_>, qp: &Qp, message: &Message) {
    qp.vm.count_sent(qp.worker_index, 1, message.length);
    peer.count_received(qp.worker_index, message.length);
}

/// What a message moves.
#[derive(Clone, Copy)]
struct List<'a> {
    sges: &'a [Sge],
    /// Bytes of the entry itself.
    inline: Option<&'a [u8]>,
}

/// Moves the next `len` bytes of a message to its destination, or from there.
fn exchange(
    peer: &Peer<'_>,
    tables: &Tables,
    qp: &Arc<Qp>,
    active: &Active,
    to: &Datagram,
    list: List<'_>,
    len: u64,
) -> Answer {
    let local = Accessor::local(qp.pd);
    let done = usize::try_from(active.done).unwrap_or(usize::MAX);
    let payload = match (active.message.kind, list.inline) {
        (Kind::Read, _) => {
            let wanted = access::LOCAL_WRITE;
            let sink = Cursor::new(tables, list.sges, local, wanted, active.done);
            Payload::Into(Sink::Guest(sink))
        }
        (_, Some(inline)) => {
            let left = inline.get(done..).unwrap_or_default();
            Payload::From(DataSource::Bytes(left))
        }
        (_, None) => {
            let source = Cursor::new(tables, list.sges, local, 0, active.done);
            Payload::From(DataSource::Guest(source))
        }
    };
    let last = active.done + len >= active.message.length;
    // Immediate data come with the last slice, which claims a receive for them: until then, others
    // may claim theirs.
    let message = Message {
        imm_is: if last {
            active.message.imm_is
        } else {
            Imm::None
        },
        ..active.message
    };
    let slice = Slice {
        message: &message,
        offset: active.done,
        len,
        last,
        claims: last,
        payload,
    };
    peer.deliver_reliable_datagram(qp, to, slice)
}

/// Gives up all that was put aside.
pub(super) fn flush(sq: &mut SendQueue, tables: &Tables, qp: &Qp) {
    for waits in std::mem::take(&mut sq.deferred) {
        sq.flush_begun(tables, qp, &waits.active);
    }
}
