// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requester of a fabric with packets. Many messages are under way; answers complete them in
//! order. What is lost is repeated: alone, if the peer is seen to keep what comes after it; otherwise
//! all from there on (go back N).
//!
//! What an RDMA READ brings takes sequence numbers of its own, as many as it has packets. It is asked
//! for in parts, so that the requester bounds what comes back at once. An answer to what comes after
//! it, without it, means that it was lost.
//!
//! Work requests are begun, judged and ended by the engine, in the order in which they were posted.
//! What was begun is kept here as a copy until it is done: its entry is never read again, and its
//! memory is read through its keys whenever a packet is sent.
use std::collections::VecDeque;
use std::sync::Arc;

use arrayvec::ArrayVec;
use virtio_rdma_spec::facts::Kind;
use virtio_rdma_spec::ring::Sge;
use virtio_rdma_spec::verbs::{access, flush_level, flush_type, qp_state, vendor_err, wc_status};

use super::egress::Attempt;
use super::packet::{
    Body, Gaps, Nak, Operands, Packet, Payload, Place, Psn, Request, RequestPacket, Reth, Service,
    Syndrome, HALF, MOST_GAPS,
};
use super::receiver::brings;
use super::verdict::{Reason, Verdict};
use crate::engine::cursor::{check, fetch, transfer, Cursor, DataSource, Fault, Part};
use crate::engine::execute::invalidate_sink;
use crate::engine::message::Message;
use crate::engine::operation::Operation;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::vm::{Congestion, PacketEvent};
use crate::engine::Budget;
use crate::footprint::Share;
use crate::memory::atomic::AtomicOperation;
use crate::memory::{fetch_bytes, ContiguousRange};
use crate::probes;
use crate::verbs::keys::Accessor;
use crate::verbs::timers::rnr_nanoseconds;
use crate::verbs::WcError;

/// Packets that may be under way: at most, and at first.
const WINDOW: u32 = 512;
const FIRST_WINDOW: u32 = 16;
/// So many may be under way though answers take long.
const LEAST_LATE: u32 = 4;
/// Messages that may be under way.
const MESSAGES: usize = 256;
/// Packets that are asked for by one request of an RDMA READ: no more than may be under way at first, and
/// later half of what may be, up to the second of these. Where the first and the last packet of an answer
/// have other lengths than the rest, each of them leaves alone: the fewer answers, the fewer of these.
const FIRST_PART: u32 = FIRST_WINDOW;
const MOST_PART: u32 = 256;
/// An acknowledgement is asked for after so many packets, and at the end of each message.
const ACK_EVERY: u32 = 16;
/// What was not answered is asked for after some round trips, or this, nanoseconds: long before the
/// time-out, in case its last packets were lost. One packet goes again, and another one ([`PROBES`]), and if
/// these have no answer either, all of it: a peer that was kept from its CPU for a moment has all of it
/// already. It counts as no attempt.
const LEAST_PROBE: u64 = 1_000_000;
const PROBES: u8 = 2;
/// What answers take longer than four times the least is due to packets that wait on their way, or
/// to processors that are busy; so much of that is right, nanoseconds.
const MOST_DELAY: u64 = 10_000_000;
/// A window no longer doubles once answers take longer than the least by an eighth of it, or by the
/// first of these at least and the second at most, nanoseconds, as HyStart++ has it (RFC 9406).
const LEAST_GROWTH: u64 = 4_000_000;
const MOST_GROWTH: u64 = 16_000_000;
/// How often the time-out is doubled while answers come too late: four times it is the most.
const MOST_DOUBLINGS: u32 = 2;
/// How long to wait for an answer where no time-out is set, nanoseconds. Such attempts do not
/// count.
const ENDLESS_RETRY: u64 = 100_000_000;

/// What decides which queue pair a packet is for, and how it looks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    pub service: Service,
    pub dest_qp: u32,
    /// Payload of a packet that is not the last of its message, bytes.
    pub mtu: u64,
}

impl Peer {
    /// The packet that answers packet `psn` of it.
    pub(super) fn answer(self, psn: Psn, body: Body<'_>) -> Packet<'_> {
        Packet {
            service: self.service,
            dest_qp: self.dest_qp,
            psn,
            ack_request: false,
            solicited: false,
            body,
        }
    }
}

/// Where packets go. It returns false if the payload could not be read.
pub(super) type Out<'a> = &'a mut dyn FnMut(&Packet<'_>, Payload<'_>, Attempt) -> bool;

/// A message under way.
#[derive(Debug)]
struct Outstanding {
    active: Active,
    first: Psn,
    packets: u32,
    /// Length of its remote range, bytes, if that is not what it moves.
    range: Option<u32>,
    operands: Operands,
    sges: Vec<Sge>,
    inline: Vec<u8>,
}

impl Outstanding {
    /// Whether it is answered by something of its own.
    fn brings(&self) -> bool {
        brings(self.active.message.kind)
    }
}

/// What an answer brings.
#[derive(Debug, Clone, Copy)]
pub(super) enum Brought<'a> {
    /// Bytes of an RDMA READ, or none of FLUSH and ATOMIC WRITE.
    Bytes(&'a [u8]),
    /// What was there before an atomic operation.
    Word(u64),
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Nothing,
    /// An answer, until this time.
    Answer(u64),
    /// The time that the peer asked for, since it has no receive.
    Receive(u64),
}

/// What a peer was seen to do with packets that come after one that was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// Nothing was seen yet, or the last answer was not as before.
    Unknown,
    Them,
    Nothing,
}

/// Queries that a peer may leave without an answer before it is taken for one that does not know them.
const QUERIES: u8 = 4;

/// What is known of the packets that are missing at the peer. One that knows our queries tells all of
/// it at once; others tell of one gap at a time, by NAKs.
#[derive(Debug, Default)]
struct Missing {
    /// The peer has answered a query.
    reports: bool,
    /// Queries that were sent, modulo 2^32, and how many may be without any answer.
    queries: u32,
    queries_left: u8,
    /// The last of them has no answer yet.
    asked: bool,
    /// One is to be sent when what is missing was.
    ask: bool,
    /// The first packet of each gap, and how many there are, the last gap first.
    gaps: ArrayVec<(Psn, u32), MOST_GAPS>,
}

impl Missing {
    /// A packet is missing: the peer is to say what else is.
    fn ask(&mut self) {
        self.ask = self.reports || self.queries_left != 0;
        self.asked = false;
    }

    /// The peer was asked, or is, and what it has told is being sent.
    fn is_known(&self) -> bool {
        self.reports && (self.ask || self.asked || !self.gaps.is_empty())
    }

    /// Everything goes again. (The first answer of a peer is still of use.)
    fn forget(&mut self) {
        self.ask &= !self.reports;
        self.asked &= !self.reports;
        self.gaps.clear();
    }

    /// The number of the query to send now, if there is one.
    fn query(&mut self) -> Option<u32> {
        if !std::mem::take(&mut self.ask) {
            return None;
        }
        self.asked = true;
        self.queries = self.queries.wrapping_add(1);
        self.queries_left = self.queries_left.saturating_sub(1);
        Some(self.queries)
    }

    /// The peer tells of gaps. They count as far as they are in order, and among the `sent` packets from
    /// `unacknowledged` on: no packet goes again twice for one report. Returns how many are missing.
    fn tell(&mut self, gaps: Gaps<'_>, unacknowledged: Psn, sent: u32) -> u32 {
        self.gaps.clear();
        let (mut end, mut missing) = (0, 0);
        for (first, packets) in gaps.iter() {
            let before = first.since(unacknowledged);
            let packets = packets.min(sent.saturating_sub(before));
            if before >= end && packets != 0 && self.gaps.try_push((first, packets)).is_ok() {
                end = before + packets;
                missing += packets;
            }
        }
        self.gaps.reverse();
        missing
    }

    /// The next packet that is missing.
    fn next(&mut self) -> Option<Psn> {
        let (first, packets) = self.gaps.last_mut()?;
        let next = *first;
        (*first, *packets) = (first.after(1), packets.saturating_sub(1));
        if *packets == 0 {
            self.gaps.pop();
        }
        Some(next)
    }
}

/// Where sending goes on behind a packet that goes again by itself.
#[derive(Debug, Clone, Copy)]
struct Resume {
    next: Psn,
    /// Index of its message in `outstanding`.
    at: usize,
    /// The packet is one that is missing.
    fills: bool,
}

/// Packets over which the part that is lost is estimated: more than may be under way, whose losses a
/// report tells at once.
const HISTORY: u32 = 1024;
/// Losses of these that are no sign of congestion.
const STRAY_LOSSES: u32 = 40;

/// How many packets may be under way: more while the network takes them, half as many when answers
/// take long because too many wait on their way, when a router says so, or when packets are lost.
///
/// Until the first of that, or until answers on average take longer than at first, the window doubles
/// each round trip, then it grows by one. With a peer that
/// keeps what comes after a lost packet, that one goes again and nothing else, so few losses are taken
/// for what links do, as BBRv2 does, not for congestion.
#[derive(Debug, Clone, Copy)]
struct Window {
    packets: u32,
    /// It stays as it is: the network loses nothing, and holds senders back itself.
    fixed: bool,
    /// Below this it doubles each round trip: at first, and after a time-out up to the half.
    doubles_to: u32,
    /// Packets that were acknowledged since it grew.
    since: u32,
    /// What was lost before this packet has halved it already.
    halved: Psn,
    /// Packets of the last [`HISTORY`] that were lost, about, in parts of [`HISTORY`].
    losses: u32,
}

impl Window {
    fn new(first: Psn, congestion: Congestion) -> Self {
        let fixed = congestion == Congestion::None;
        Self {
            packets: if fixed { WINDOW } else { FIRST_WINDOW },
            fixed,
            doubles_to: WINDOW,
            since: 0,
            halved: first,
            losses: 0,
        }
    }

    /// So many packets more were acknowledged.
    fn acknowledged(&mut self, packets: u32) {
        self.losses -= self.losses / HISTORY * packets.min(HISTORY);
        if self.packets < self.doubles_to {
            self.packets = self.packets.saturating_add(packets).min(self.doubles_to);
            return;
        }
        self.since = self.since.saturating_add(packets);
        if self.since >= self.packets {
            self.since = 0;
            self.packets = (self.packets + 1).min(WINDOW);
        }
    }

    /// The packet `lost` did not arrive, of those before `sent`, and goes again by itself.
    fn lost_one(&mut self, lost: Psn, sent: Psn) {
        self.since = 0;
        self.losses = self.losses.saturating_add(HISTORY);
        if self.losses > STRAY_LOSSES * HISTORY {
            self.halve(lost, sent, 1);
        }
    }

    /// The packet `lost` did not arrive, of those before `sent`, and all of these go again.
    fn lost(&mut self, lost: Psn, sent: Psn) {
        self.halve(lost, sent, 1);
    }

    /// The answer to packet `late` took too long. What else keeps the peer from answering is no
    /// reason for very few packets.
    fn late(&mut self, late: Psn, sent: Psn) {
        self.halve(late, sent, LEAST_LATE);
    }

    /// Answers begin to take longer: nothing more doubles, unless after a time-out.
    fn stop_doubling(&mut self) {
        if self.doubles_to == WINDOW {
            self.doubles_to = self.packets;
        }
    }

    /// A router on the way of packet `reason` is congested.
    fn congested(&mut self, reason: Psn, sent: Psn) {
        self.halve(reason, sent, 1);
    }

    /// Nothing that was sent is answered.
    fn timed_out(&mut self) {
        if !self.fixed {
            self.doubles_to = (self.packets / 2).max(1);
            self.packets = 1;
        }
    }

    /// Once for all packets before `sent`.
    fn halve(&mut self, reason: Psn, sent: Psn, least: u32) {
        let before = self.halved.since(reason);
        if (before == 0 || before > WINDOW) && self.packets > least && !self.fixed {
            self.packets = (self.packets / 2).max(least);
            self.doubles_to = self.packets;
            self.halved = sent;
        }
    }
}

/// How long answers take, as TCP estimates it (RFC 6298); nanoseconds.
#[derive(Debug, Default)]
struct RoundTrip {
    /// Any was measured.
    measured: bool,
    /// On average, and how much that varies.
    average: u64,
    variation: u64,
    /// The least that was measured, which is forgotten slowly.
    least: u64,
    /// A packet whose answer is waited for, and when it was sent. It was sent once.
    timed: Option<(Psn, u64)>,
    /// Time-outs since anything was measured, up to [`MOST_DOUBLINGS`].
    time_outs: u32,
}

impl RoundTrip {
    /// A packet is sent at time `now`, for the first time or again.
    fn sent(&mut self, psn: Psn, now: u64) {
        self.timed.get_or_insert((psn, now));
    }

    /// All packets before `end`, and after or at `begin`, are answered at time `now`. Returns the
    /// one that was timed if its answer took too long.
    fn answered(&mut self, begin: Psn, end: Psn, now: u64) -> Option<Psn> {
        let (psn, sent) = self.timed?;
        if psn.since(begin) >= end.since(begin) {
            return None;
        }
        self.timed = None;
        self.time_outs = 0;
        let took = now.saturating_sub(sent);
        if !self.measured {
            (self.average, self.variation) = (took, took / 2);
            self.measured = true;
            self.least = took;
            return None;
        }
        self.variation = (3 * self.variation + self.average.abs_diff(took)) / 4;
        self.average = (7 * self.average + took) / 8;
        self.least += self.least / 1024;
        self.least = self.least.min(took);
        (took > 4 * self.least + MOST_DELAY).then_some(psn)
    }

    /// No answer came in time. Those that come later are for packets that were sent twice, and say
    /// nothing of how long they took.
    fn timed_out(&mut self) {
        self.time_outs = (self.time_outs + 1).min(MOST_DOUBLINGS);
    }

    /// Whether answers take longer than they did: packets begin to wait on their way, or at the peer.
    fn grows(&self) -> bool {
        let growth = (self.least / 8).clamp(LEAST_GROWTH, MOST_GROWTH);
        self.average > self.least.saturating_add(growth)
    }

    /// How long to wait for an answer that is probably lost, if that is known.
    fn probe(&self) -> Option<u64> {
        let wait = self.average.saturating_add(4 * self.variation);
        self.measured.then(|| wait.max(LEAST_PROBE))
    }
}

/// The requester's half of a queue pair on a fabric with packets.
#[derive(Debug)]
pub(super) struct Sender {
    /// The first packet that was not acknowledged.
    unacknowledged: Psn,
    /// The packet to send next.
    next: Psn,
    /// The packet after the last one that ever was sent.
    sent: Psn,
    /// The packet after the last one of the last message.
    end: Psn,
    /// What is under way, the oldest first.
    outstanding: VecDeque<Box<Outstanding>>,
    /// So many of them are to bring something.
    bringing: usize,
    /// Where `next` is: index in `outstanding`.
    at: usize,
    /// The packet at `next` goes again by itself; then it goes on there.
    resume: Option<Resume>,
    /// The number behind the packet that went again by itself, until it has its answer; and what
    /// such answers say of the peer.
    filled: Option<Psn>,
    keeps: Keeps,
    missing: Missing,
    /// The ends of requests that are to bring something, and that the peer may have got, though they
    /// are to go again: what is asked for again is so within the same bounds. In order.
    asked: VecDeque<Psn>,
    /// The last answer that came though what was to be brought before it had not.
    ahead: Option<Psn>,
    /// The work request in progress in the send queue waits for what is to be brought (FENCE).
    fenced: bool,
    /// Of the past, for their capacity.
    #[expect(
        clippy::vec_box,
        reason = "they go to `outstanding`, and are too large to be moved"
    )]
    spare: Vec<Box<Outstanding>>,
    /// The work request in progress in the send queue fails for this, when all before it is done.
    refused: Option<WcError>,
    /// Memory of the message at `next` could not be read: it fails, when all before it is done.
    unreadable: Option<WcError>,
    wait: Wait,
    /// While an answer is waited for: when it is asked for, before the time-out.
    probe: Option<u64>,
    /// How often it was, without an answer.
    probes: u8,
    round_trip: RoundTrip,
    window: Window,
    /// What is under way, and was, is in the account of the VM: so many messages.
    share: Share,
    accounted: usize,
    /// Packet numbers count from here for asking for acknowledgements.
    packets: u32,
}

impl Sender {
    /// What it has under way is in the account that `share` is of. `asks`: the peer is asked what is
    /// missing.
    pub(super) fn new(first: Psn, congestion: Congestion, asks: bool, share: Share) -> Self {
        let missing = Missing {
            queries_left: if asks { QUERIES } else { 0 },
            ..Missing::default()
        };
        Self {
            missing,
            share,
            accounted: 0,
            unacknowledged: first,
            next: first,
            sent: first,
            end: first,
            outstanding: VecDeque::new(),
            bringing: 0,
            at: 0,
            resume: None,
            filled: None,
            keeps: Keeps::Unknown,
            asked: VecDeque::new(),
            ahead: None,
            fenced: false,
            spare: Vec::new(),
            refused: None,
            unreadable: None,
            wait: Wait::Nothing,
            probe: None,
            probes: 0,
            round_trip: RoundTrip::default(),
            window: Window::new(first, congestion),
            packets: 0,
        }
    }

    /// Polls the send queue: begins work requests and gives packets to `out`, each at most
    /// `peer.mtu` bytes of payload.
    #[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
    pub(super) fn poll(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        now: u64,
        mut budget: Budget,
        out: Out<'_>,
    ) -> Polled {
        let may = sq.check_ring(tables, qp);
        if let Err(polled) = may.and_then(|()| sq.may_go_on(tables, qp)) {
            return polled;
        }
        match self.wait {
            Wait::Receive(until) if now < until => return self.park(sq, until),
            Wait::Receive(_) => self.wait = Wait::Nothing,
            Wait::Answer(until) if now >= until => {
                if let Err(polled) = self.time_out(sq, tables, qp, peer, now, out) {
                    return polled;
                }
            }
            Wait::Answer(until) if self.probe.is_some_and(|at| now >= at) => {
                self.probe = None;
                self.probes += 1;
                if self.probes > PROBES || !self.send_one_again() {
                    self.window.lost(self.unacknowledged, self.sent);
                    self.go_back();
                } else {
                    if self.missing.reports {
                        self.missing.ask();
                    }
                    self.probe = self.next_probe(sq, now).filter(|at| *at < until);
                }
            }
            _ => {}
        }
        if let Err(polled) = self.begin(sq, tables, qp, peer, &mut budget) {
            return polled;
        }
        let more = self.send(sq, tables, qp, peer, now, &mut budget, out);
        if let Some(error) = self.unreadable.filter(|_| self.at == 0) {
            self.fail_oldest(sq, tables, qp, error);
            return Polled::Again;
        }
        if self.unacknowledged == self.sent {
            self.wait = Wait::Nothing;
        } else if self.wait == Wait::Nothing {
            self.wait = Wait::Answer(now.saturating_add(self.time_out_after(sq)));
            self.probes = 0;
            self.probe = self.next_probe(sq, now);
        }
        match self.wait {
            _ if more => Polled::Again,
            Wait::Answer(until) => self.park(sq, self.probe.unwrap_or(until)),
            Wait::Receive(until) => self.park(sq, until),
            Wait::Nothing => {
                sq.parked = None;
                Polled::Idle
            }
        }
    }

    /// How long to wait for an answer, nanoseconds: the time-out, which may be up to four times what
    /// its queue pair has (D-RTY-001), if answers take so long, such as of a peer that many others keep
    /// busy. How long they take is not known of those that come too late: after each time-out, the next
    /// answer is waited for twice as long.
    fn time_out_after(&self, sq: &SendQueue) -> u64 {
        let least = answer_time(sq);
        let usual = self.round_trip.probe().unwrap_or_default();
        let longer = least << self.round_trip.time_outs;
        usual.max(longer).min(least << MOST_DOUBLINGS)
    }

    /// When an answer is asked for that does not come, if it is long before the time-out. The last one is
    /// waited for twice as long.
    fn next_probe(&self, sq: &SendQueue, now: u64) -> Option<u64> {
        let first = sq.tries.no_answer == 0;
        let wait = self.round_trip.probe().filter(|_| first);
        let wait = wait.map(|wait| wait << u8::from(self.probes == PROBES));
        let wait = wait.filter(|wait| *wait < answer_time(sq) / 2);
        wait.map(|wait| now.saturating_add(wait))
    }

    /// A packet goes again by itself, whose answer says what is missing: at first the last one that was sent,
    /// if that is answered by an acknowledgement, else the first one that has no answer. Returns false if
    /// others go again already.
    fn send_one_again(&mut self) -> bool {
        if self.next != self.sent || self.resume.is_some() {
            return false;
        }
        let last = self.sent.before();
        let has = |message: &Outstanding| last.since(message.first) < message.packets;
        let at = self.outstanding.iter().position(|message| has(message));
        let acknowledged = |at: &usize| self.outstanding.get(*at).is_some_and(|one| !one.brings());
        let at = at.filter(|_| self.probes == 1);
        let (psn, at) = match at.filter(acknowledged) {
            Some(at) => (last, at),
            None => (self.unacknowledged, 0),
        };
        self.send_alone(psn, at, false);
        true
    }

    /// The packet `psn`, of the message at index `at`, goes again by itself. `fills`: the peer waits for
    /// it, and the next answer says whether it has kept what comes after it.
    fn send_alone(&mut self, psn: Psn, at: usize, fills: bool) {
        self.resume = Some(Resume {
            next: self.next,
            at: self.at,
            fills,
        });
        (self.next, self.at) = (psn, at);
        self.round_trip.timed = None;
    }

    fn park(&self, sq: &mut SendQueue, until: u64) -> Polled {
        sq.parked = Some(until);
        Polled::Park(until)
    }

    /// No answer came in time: all that is under way is sent again.
    fn time_out(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        now: u64,
        out: Out<'_>,
    ) -> Result<(), Polled> {
        qp.vm.count_retry(qp.worker_index);
        probes::wire_retry(qp.vm.name(), qp.number, self.unacknowledged.value());
        qp.vm.count_packet(qp.worker_index, PacketEvent::TimeOut);
        self.wait = Wait::Nothing;
        self.window.timed_out();
        self.round_trip.timed_out();
        if sq.timeout != 0 {
            if sq.tries.no_answer >= sq.retry_cnt {
                let error = WcError::new(wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER);
                // Who captures sees which packet has no answer.
                self.go_back();
                self.send_alone(self.unacknowledged, 0, false);
                let mut one = Budget {
                    messages: 1,
                    bytes: 1,
                };
                let mut over = |packet: &Packet<'_>, payload: Payload<'_>, _: Attempt| {
                    out(packet, payload, Attempt::Over(error))
                };
                self.send(sq, tables, qp, peer, now, &mut one, &mut over);
                self.fail_oldest(sq, tables, qp, error);
                return Err(Polled::Again);
            }
            sq.tries.no_answer += 1;
        }
        self.go_back();
        Ok(())
    }

    /// The network is congested on the way to the peer.
    pub(super) fn congested(&mut self) {
        self.window.congested(self.unacknowledged, self.sent);
    }

    fn go_back(&mut self) {
        self.missing.forget();
        self.next = self.unacknowledged;
        self.at = 0;
        self.resume = None;
        self.filled = None;
        self.unreadable = None;
        self.round_trip.timed = None;
    }

    /// Whether a packet that is lost goes again by itself: the peer may keep what comes after it.
    fn goes_alone(&self) -> bool {
        self.missing.reports || self.keeps != Keeps::Nothing
    }

    /// The first packet that was not acknowledged is lost: it goes again, by itself if the peer may
    /// have kept what came after it.
    fn fill(&mut self) -> Verdict {
        let others = self.next.since(self.unacknowledged) > 1;
        if !self.goes_alone() || !others {
            if self.resume.is_none() {
                self.go_back();
                return Verdict::Repeats(self.next);
            }
        } else {
            self.send_alone(self.unacknowledged, 0, !self.missing.reports);
            self.unreadable = None;
        }
        Verdict::Fills(self.next)
    }

    /// A packet that is missing goes again by itself, if there is one.
    fn send_missing(&mut self) -> bool {
        while let Some(psn) = self.missing.next() {
            let sent = self.next.since(self.unacknowledged);
            let there = psn.since(self.unacknowledged) < sent;
            let has = |message: &Outstanding| psn.since(message.first) < message.packets;
            let Some(at) = self
                .outstanding
                .iter()
                .position(|message| has(message))
                .filter(|_| there)
            else {
                continue;
            };
            // A request that is to bring something is asked for again by what comes behind it.
            if self
                .outstanding
                .get(at)
                .is_none_or(|message| message.brings())
            {
                continue;
            }
            self.window.lost_one(psn, self.sent);
            self.missing.ask();
            self.send_alone(psn, at, false);
            return true;
        }
        false
    }

    /// The peer says what it expects next, and what is missing.
    #[expect(clippy::too_many_arguments, reason = "they are what a report has")]
    pub(super) fn reported(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        expected: Psn,
        number: u32,
        gaps: Gaps<'_>,
        now: u64,
    ) -> Verdict {
        let sent = self.sent.since(self.unacknowledged);
        let acknowledged = expected.since(self.unacknowledged);
        let asked = self.missing.asked && number == self.missing.queries;
        if !asked || acknowledged > sent {
            return Verdict::Dropped(Reason::Unasked);
        }
        self.missing.reports = true;
        self.missing.asked = false;
        // All of it goes again already where the requester has gone back.
        let next = self.resume.map_or(self.next, |resume| resume.next);
        let under_way = if next == self.sent { sent } else { 0 };
        let missing = self.missing.tell(gaps, self.unacknowledged, under_way);
        // What is to be brought has answers of its own.
        if acknowledged != 0 && acknowledged <= self.first_to_bring() {
            self.progress(sq, tables, qp, acknowledged, now);
        }
        let until = match self.wait {
            Wait::Answer(until) => until,
            _ => u64::MAX,
        };
        self.probes = 0;
        self.probe = self.next_probe(sq, now).filter(|at| *at < until);
        Verdict::Tells(missing)
    }

    /// So many packets are acknowledged. If that says whether the peer kept what came after the one
    /// that went again by itself, that is learned. Returns whether all behind it is to go again.
    fn learn(&mut self, acknowledged: u32) -> bool {
        let Some(end) = self.filled else {
            return false;
        };
        let filled = end.since(self.unacknowledged);
        if acknowledged < filled {
            return false;
        }
        self.filled = None;
        if acknowledged > filled {
            self.keeps = Keeps::Them;
            return false;
        }
        self.keeps = match self.keeps {
            Keeps::Them => Keeps::Unknown,
            _ => Keeps::Nothing,
        };
        true
    }

    /// Begins work requests, as many as the window allows.
    fn begin(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        budget: &mut Budget,
    ) -> Result<(), Polled> {
        loop {
            if self.fenced {
                if self.bringing != 0 {
                    return Ok(());
                }
                self.fenced = false;
                if let Some(active) = sq.active.filter(|active| !active.message.kind.is_local()) {
                    self.admit(sq, active, peer);
                    continue;
                }
            }
            if let Some(active) = sq.active {
                // What is no message, or fails, is carried out when all before it is done.
                if !self.outstanding.is_empty() {
                    return Ok(());
                }
                if let Some(error) = self.refused.take() {
                    sq.fail(tables, qp, error);
                    return Err(Polled::Again);
                }
                sq.execute(tables, qp, &active, budget)?;
            }
            // While the queue drains, nothing more begins.
            let begins = qp.state() == qp_state::RTS && budget.messages != 0;
            let under_way = self.end.since(self.unacknowledged);
            if !begins || under_way >= self.window.packets || self.outstanding.len() >= MESSAGES {
                return Ok(());
            }
            if !sq.posted() || !self.has_room(sq) {
                return Ok(());
            }
            let active = match sq.fetch(tables, qp) {
                None => return Ok(()),
                Some(Err(error)) => {
                    self.refused = Some(error);
                    continue;
                }
                Some(Ok(active)) => active,
            };
            budget.messages -= 1;
            if active.message.kind.is_local() {
                sq.active = Some(active);
                continue;
            }
            if Request::at(peer.service, active.message.opcode, Place::Only).is_none() {
                sq.active = Some(active);
                let error = WcError::new(wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
                self.refused = Some(error);
                continue;
            }
            if active.fence {
                sq.active = Some(active);
                self.fenced = true;
                continue;
            }
            self.admit(sq, active, peer);
        }
    }

    /// Whether the account of the VM has room for another message under way. It always has for one.
    fn has_room(&mut self, sq: &SendQueue) -> bool {
        let kept = self.outstanding.len() + self.spare.len();
        if kept < self.accounted {
            return true;
        }
        let lists = sq.max_sge * size_of::<Sge>() + sq.max_inline;
        // The queue and the list of spare ones grow to twice what they need.
        let each = size_of::<Outstanding>() + 4 * size_of::<Box<Outstanding>>() + lists;
        let grown = self.share.grow(each as u64).is_ok();
        self.accounted += usize::from(grown);
        grown || kept == 0 || !self.spare.is_empty()
    }

    /// The message of the work request in progress is under way from now on.
    fn admit(&mut self, sq: &mut SendQueue, active: Active, peer: Peer) {
        let mut message = self.spare.pop().unwrap_or_else(|| {
            Box::new(Outstanding {
                active,
                first: self.end,
                packets: 0,
                range: None,
                operands: Operands::None,
                sges: Vec::with_capacity(sq.max_sge),
                inline: Vec::new(),
            })
        });
        let packets = active.message.length.div_ceil(peer.mtu).max(1);
        message.active = active;
        message.first = self.end;
        message.packets = u32::try_from(packets).unwrap_or(u32::MAX);
        (message.operands, message.range) = operands(active.message.kind, sq.operation);
        if active.inline {
            message.sges.clear();
            message.inline.clear();
            message.inline.extend_from_slice(&sq.inline);
        } else {
            // The queue reads the next one's into the other list.
            std::mem::swap(&mut message.sges, &mut sq.sges);
        }
        self.end = self.end.after(message.packets);
        self.bringing += usize::from(message.brings());
        self.outstanding.push_back(message);
        sq.take_begun();
    }

    /// The request that asked for packet `psn`, if one did: where its end is in `asked`, or would be,
    /// and its end.
    fn asked_for(&self, psn: Psn) -> (usize, Option<Psn>) {
        let ends_before = |end: &Psn| psn.since(*end) < HALF;
        let at = self.asked.partition_point(ends_before);
        (at, self.asked.get(at).copied())
    }

    /// Sends packets, as many as window and budget allow. Returns whether there are more that may
    /// be sent at once.
    #[expect(clippy::too_many_arguments, reason = "they are what a poll has")]
    fn send(
        &mut self,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        now: u64,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> bool {
        loop {
            if self.resume.is_none() && !self.send_missing() {
                if let Some(number) = self.missing.query() {
                    let query = Packet::ours(peer.dest_qp, self.sent, Body::Query { number });
                    let nothing = Payload {
                        len: 0,
                        read: &mut |_| true,
                    };
                    out(&query, nothing, Attempt::First);
                }
            }
            if self.next == self.end || self.unreadable.is_some() {
                break;
            }
            let in_flight = self.next.since(self.unacknowledged);
            if in_flight >= self.window.packets && self.resume.is_none() {
                return false;
            }
            if budget.bytes == 0 {
                return true;
            }
            let Some(message) = self.outstanding.get(self.at) else {
                return false;
            };
            let number = self.next.since(message.first);
            let Active {
                message: what,
                inline,
                ..
            } = &message.active;
            let offset = u64::from(number) * peer.mtu;
            let reads = what.kind == Kind::Read;
            let bring = brings(what.kind);
            let (asked_at, bound) = if bring {
                self.asked_for(self.next)
            } else {
                (0, None)
            };
            // Sequence numbers that this packet takes, and the bytes that it moves or asks for.
            let count = if reads {
                let window = self.window.packets;
                // A peer that has not answered yet may be one that is asked by many.
                let few = sq.tries.no_answer != 0 || !self.round_trip.measured;
                let part = if few {
                    window.clamp(1, FIRST_PART)
                } else {
                    (window / 2).clamp(FIRST_PART, MOST_PART)
                };
                let end = (number / part + 1).saturating_mul(part);
                let end = end.min(message.packets) - number;
                match bound.map(|bound| bound.since(self.next)) {
                    Some(bound) if few => bound.min(end),
                    Some(bound) => bound.min(window.max(FIRST_PART)),
                    None => end,
                }
            } else {
                1
            };
            let left = what.length.saturating_sub(offset);
            let moved = left.min(u64::from(count) * peer.mtu);
            if bring {
                // The peer may have got all that was asked for, and not more than it takes at a time.
                let others = self.asked.len() - usize::from(bound.is_some());
                if in_flight != 0 && others >= usize::from(sq.max_rd_atomic.max(1)) {
                    return false;
                }
                let with_it = in_flight.saturating_add(count);
                if in_flight != 0 && with_it > self.window.packets {
                    return false;
                }
                // It must not be done if there is no place for what it brings.
                let local = Accessor::local(qp.pd);
                let wanted = access::LOCAL_WRITE;
                if what.kind.brings() {
                    if let Err(key) = check(tables, &message.sges, local, wanted) {
                        self.unreadable = Some(WcError::new(wc_status::LOC_PROT_ERR, key.0));
                        return false;
                    }
                }
            }
            let has_payload = !what.kind.brings() && what.kind != Kind::Flush;
            let len = if has_payload { moved } else { 0 };
            let place = if bring {
                Place::Only
            } else {
                Place::of(number == 0, number + 1 == message.packets)
            };
            let Some(request) = Request::at(peer.service, what.opcode, place) else {
                return false;
            };
            self.packets = self.packets.wrapping_add(1);
            let window_ends = in_flight + 1 == self.window.packets;
            let packet = Packet {
                service: peer.service,
                dest_qp: peer.dest_qp,
                psn: self.next,
                ack_request: place.ends()
                    || window_ends
                    || self.packets % ACK_EVERY == 0
                    || self.resume.is_some(),
                solicited: place.ends() && what.solicited,
                body: Body::Request(request_packet(
                    what,
                    peer.service,
                    request,
                    message.operands,
                    message.range,
                    offset,
                    moved,
                )),
            };
            let mut fault = None;
            let mut read = |space: &mut [u8]| {
                let local = Accessor::local(qp.pd);
                let mut source = if *inline {
                    let from = usize::try_from(offset).unwrap_or(usize::MAX);
                    DataSource::Bytes(message.inline.get(from..).unwrap_or_default())
                } else if let Some(range) = contiguous(tables, &message.sges, qp.pd, offset, len) {
                    fetch_bytes(space, range);
                    return true;
                } else {
                    DataSource::Guest(Cursor::new(tables, &message.sges, local, 0, offset))
                };
                fault = fetch(&mut source, space).err();
                fault.is_none()
            };
            let payload = Payload {
                len: usize::try_from(len).unwrap_or_default(),
                read: &mut read,
            };
            let under_way = self.sent.since(self.unacknowledged);
            let again = self.next.since(self.unacknowledged) < under_way;
            if !out(&packet, payload, Attempt::new(again)) {
                let reason = fault.map_or(0, |key| key.0);
                self.unreadable = Some(WcError::new(wc_status::LOC_PROT_ERR, reason));
                return false;
            }
            if packet.ack_request && self.next == self.sent {
                self.round_trip.sent(self.next, now);
            }
            budget.bytes = budget.bytes.saturating_sub(len.max(64));
            if bring {
                let end = self.next.after(count);
                if bound != Some(end) {
                    self.asked.insert(asked_at, end);
                }
            }
            if let Some(Resume { next, at, fills }) = self.resume.take() {
                if fills {
                    self.filled = Some(self.next.after(count));
                }
                (self.next, self.at) = (next, at);
                continue;
            }
            let ends = number + count == message.packets;
            self.next = self.next.after(count);
            if ends {
                self.at += 1;
            }
            if self.sent.since(self.unacknowledged) < self.next.since(self.unacknowledged) {
                self.sent = self.next;
            }
        }
        // The guest may have posted more meanwhile; its doorbell tells.
        budget.messages == 0 && sq.posted()
    }

    /// An answer came, at time `now`.
    pub(super) fn answer(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        psn: Psn,
        syndrome: Syndrome,
        now: u64,
    ) -> Verdict {
        let sent = self.sent.since(self.unacknowledged);
        // An ACK is for its packet, too; a NAK for all before it.
        let (known, acknowledged) = match syndrome {
            Syndrome::Ack => {
                let behind = psn.after(1).since(self.unacknowledged);
                (behind <= sent, behind)
            }
            Syndrome::RnrNak(_) | Syndrome::Nak(_) => {
                let behind = psn.since(self.unacknowledged);
                (behind < sent, behind)
            }
        };
        // An answer to what is answered already, or never was sent.
        if !known {
            return Verdict::Dropped(Reason::Unasked);
        }
        let first = self.first_to_bring();
        if acknowledged > first {
            // What was to be brought before is lost.
            if !self.lost(sq, tables, qp, psn, first, now) {
                return Verdict::Dropped(Reason::Ahead);
            }
            return Verdict::Repeats(self.next);
        }
        // What comes after a packet that has no receive was not looked at.
        let told = !matches!(syndrome, Syndrome::RnrNak(_));
        let all = told && self.learn(acknowledged);
        if acknowledged != 0 {
            self.progress(sq, tables, qp, acknowledged, now);
        }
        match syndrome {
            Syndrome::Ack if all => {
                self.window.lost(self.unacknowledged, self.sent);
                self.go_back();
                return Verdict::Repeats(self.next);
            }
            Syndrome::Ack => {}
            Syndrome::Nak(Nak::Sequence) => {
                qp.vm.count_packet(qp.worker_index, PacketEvent::Nak);
                // It went again already, or will.
                if self.filled.is_some() || self.missing.is_known() {
                    return Verdict::Dropped(Reason::Unasked);
                }
                if !self.missing.asked {
                    self.missing.ask();
                }
                if all {
                    self.window.lost(self.unacknowledged, self.sent);
                    self.go_back();
                    return Verdict::Repeats(self.next);
                }
                if self.goes_alone() {
                    self.window.lost_one(self.unacknowledged, self.sent);
                } else {
                    self.window.lost(self.unacknowledged, self.sent);
                }
                return self.fill();
            }
            Syndrome::RnrNak(timer) => {
                qp.vm.count_rnr(qp.worker_index);
                probes::wire_rnr(qp.vm.name(), qp.number, self.unacknowledged.value());
                qp.vm.count_packet(qp.worker_index, PacketEvent::RnrNak);
                if sq.rnr_retry != 7 {
                    if sq.tries.not_ready >= sq.rnr_retry {
                        let status = wc_status::RNR_RETRY_EXC_ERR;
                        let error = WcError::new(status, vendor_err::NO_RECEIVE);
                        self.fail_oldest(sq, tables, qp, error);
                        return Verdict::Ends(error);
                    }
                    sq.tries.not_ready += 1;
                }
                self.go_back();
                self.wait = Wait::Receive(now.saturating_add(rnr_nanoseconds(timer)));
                return Verdict::Repeats(self.next);
            }
            Syndrome::Nak(nak) => {
                let status = match nak {
                    Nak::RemoteAccess => wc_status::REM_ACCESS_ERR,
                    Nak::RemoteOperational => wc_status::REM_OP_ERR,
                    Nak::Sequence | Nak::InvalidRequest => wc_status::REM_INV_REQ_ERR,
                };
                let error = WcError::new(status, vendor_err::PEER);
                self.fail_oldest(sq, tables, qp, error);
                return Verdict::Ends(error);
            }
        }
        Verdict::Taken
    }

    /// How many packets after `unacknowledged` the first one is that an acknowledgement does not
    /// answer.
    fn first_to_bring(&self) -> u32 {
        if self.bringing == 0 {
            return u32::MAX;
        }
        let first = self.outstanding.iter().find(|message| message.brings());
        let Some(message) = first else {
            return u32::MAX;
        };
        let begins = message.first.since(self.unacknowledged);
        let begun = self.unacknowledged.since(message.first) < message.packets;
        if begun {
            0
        } else {
            begins
        }
    }

    /// An answer to packet `psn` says that so many packets are acknowledged, and that what the next one
    /// was to bring is lost. Returns whether that goes again.
    fn lost(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        psn: Psn,
        acknowledged: u32,
        now: u64,
    ) -> bool {
        // What comes behind such an answer says nothing new.
        let behind = |before: Psn| (1..HALF).contains(&psn.since(before));
        if self.ahead.replace(psn).is_some_and(behind) && acknowledged == 0 {
            return false;
        }
        qp.vm.count_packet(qp.worker_index, PacketEvent::ImpliedNak);
        if acknowledged != 0 {
            self.progress(sq, tables, qp, acknowledged, now);
        }
        self.window.lost(self.unacknowledged, self.sent);
        self.go_back();
        true
    }

    /// An answer came at time `now` that brings something, and acknowledges all before it.
    #[expect(clippy::too_many_arguments, reason = "they are what an answer has")]
    pub(super) fn bring(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        peer: Peer,
        psn: Psn,
        brought: Brought<'_>,
        now: u64,
    ) -> Verdict {
        let ahead = psn.since(self.unacknowledged);
        let first = self.first_to_bring();
        if ahead >= self.sent.since(self.unacknowledged) || ahead < first {
            return Verdict::Dropped(Reason::Unasked);
        }
        if ahead > first {
            self.lost(sq, tables, qp, psn, first, now);
            return Verdict::Dropped(Reason::Ahead);
        }
        if ahead != 0 {
            self.progress(sq, tables, qp, ahead, now);
        }
        let Some(message) = self.outstanding.front() else {
            return Verdict::Dropped(Reason::Unasked);
        };
        let what = message.active.message;
        let number = psn.since(message.first);
        let offset = u64::from(number) * peer.mtu;
        let word;
        let bytes = match (what.kind, brought) {
            (Kind::Read, Brought::Bytes(bytes)) => bytes,
            (Kind::Flush | Kind::AtomicWrite, Brought::Bytes([])) => &[],
            (Kind::Atomic, Brought::Word(value)) => {
                word = value.to_le_bytes();
                &word[..]
            }
            _ => return self.bad_response(sq, tables, qp),
        };
        if what.kind.brings() {
            let len = what.length.saturating_sub(offset).min(peer.mtu);
            if bytes.len() as u64 != len {
                return self.bad_response(sq, tables, qp);
            }
            let local = Accessor::local(qp.pd);
            let access = access::LOCAL_WRITE;
            let mut to = Cursor::new(tables, &message.sges, local, access, offset);
            let part = Part {
                len,
                last: number + 1 == message.packets,
                large: false,
            };
            let placed = transfer(&mut to, &mut DataSource::Bytes(bytes), part);
            drop(to);
            if let Err(Fault::Destination(key) | Fault::Source(key)) = placed {
                let error = WcError::new(wc_status::LOC_PROT_ERR, key.0);
                self.fail_oldest(sq, tables, qp, error);
                return Verdict::Ends(error);
            }
        }
        self.progress(sq, tables, qp, 1, now);
        Verdict::Taken
    }

    /// The answer is none to what was asked.
    fn bad_response(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) -> Verdict {
        let error = WcError::new(wc_status::BAD_RESP_ERR, vendor_err::PEER);
        self.fail_oldest(sq, tables, qp, error);
        Verdict::Ends(error)
    }

    /// So many packets more are acknowledged: the messages that they end are done.
    fn progress(
        &mut self,
        sq: &mut SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        packets: u32,
        now: u64,
    ) {
        let before = self.unacknowledged;
        let late = self.round_trip.answered(before, before.after(packets), now);
        let behind = self.next.since(before) < packets;
        self.unacknowledged = before.after(packets);
        self.ahead = None;
        if self.round_trip.grows() {
            self.window.stop_doubling();
        }
        self.window.acknowledged(packets);
        if let Some(late) = late {
            self.window.late(late, self.sent);
        }
        let answered = |end: &Psn| end.since(before) <= packets;
        while self.asked.front().is_some_and(answered) {
            self.asked.pop_front();
        }
        sq.reset_retries();
        self.wait = Wait::Nothing;
        while let Some(oldest) = self.outstanding.front() {
            let end = oldest.first.after(oldest.packets);
            if end.since(before) > packets {
                break;
            }
            let Some(done) = self.take_oldest() else {
                break;
            };
            self.at = self.at.saturating_sub(1);
            if let Some(resume) = &mut self.resume {
                resume.at = resume.at.saturating_sub(1);
            }
            let (worker, bytes) = (qp.worker_index, done.active.message.length);
            if done.active.invalidates_sink {
                if let Err(key) = invalidate_sink(&done.sges, tables, qp) {
                    let error = WcError::new(wc_status::LOC_QP_OP_ERR, key.0);
                    sq.fail_begun(tables, qp, &done.active, error);
                    self.spare.push(done);
                    break;
                }
            }
            sq.finish_begun(tables, qp, &done.active);
            qp.vm.count_sent(worker, 1, bytes);
            self.spare.push(done);
        }
        let filled = |end: Psn| end.since(before) <= packets;
        if self.filled.is_some_and(filled) {
            self.filled = None;
        }
        if behind {
            match self.resume.take() {
                // It came after all.
                Some(Resume { next, at, .. }) if next.since(before) >= packets => {
                    (self.next, self.at) = (next, at);
                }
                // It had gone back further than was needed.
                _ => {
                    self.keeps = Keeps::Unknown;
                    self.go_back();
                }
            }
        }
    }

    fn take_oldest(&mut self) -> Option<Box<Outstanding>> {
        let oldest = self.outstanding.pop_front()?;
        self.bringing -= usize::from(oldest.brings());
        Some(oldest)
    }

    /// The oldest message fails, and the queue pair with it.
    fn fail_oldest(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>, error: WcError) {
        if let Some(oldest) = self.take_oldest() {
            sq.fail_begun(tables, qp, &oldest.active, error);
            self.spare.push(oldest);
        }
    }

    /// Flushes all that is under way. The send queue flushes what it has itself.
    pub(super) fn flush(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        while let Some(message) = self.take_oldest() {
            sq.flush_begun(tables, qp, &message.active);
            self.spare.push(message);
        }
        self.unacknowledged = self.end;
        self.next = self.end;
        self.sent = self.end;
        self.at = 0;
        self.resume = None;
        self.filled = None;
        self.missing.forget();
        self.asked.clear();
        self.ahead = None;
        self.fenced = false;
        self.refused = None;
        self.unreadable = None;
        self.wait = Wait::Nothing;
    }
}

/// The `len` bytes of a list of one entry from `offset` on, if they are contiguous, and the queue pair's
/// to read.
fn contiguous<'a>(
    tables: &'a Tables,
    sges: &[Sge],
    pd: u32,
    offset: u64,
    len: u64,
) -> Option<ContiguousRange<'a>> {
    let [sge] = sges else {
        return None;
    };
    let left = u64::from(sge.length).checked_sub(offset)?;
    let (keys, addr) = (&tables.keys, sge.addr.wrapping_add(offset));
    (len <= left).then(|| keys.contiguous_once(sge.lkey, pd, 0, addr, len))?
}

/// The request of message `what` that moves, or asks for, `moved` bytes from `offset` on, without its
/// payload. `range` is the length of its remote range if that is not what it moves.
pub(super) fn request_packet(
    what: &Message,
    service: Service,
    request: Request,
    operands: Operands,
    range: Option<u32>,
    offset: u64,
    moved: u64,
) -> RequestPacket<'static> {
    let reth = if request.has_range() {
        let reads = what.kind == Kind::Read;
        let length = if reads { moved } else { what.length };
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        Reth {
            addr: what.remote_addr.wrapping_add(offset),
            rkey: what.rkey,
            length: range.unwrap_or(length),
        }
    } else {
        Reth::default()
    };
    RequestPacket {
        srqn: match service {
            Service::Xrc => what.srqn,
            _ => 0,
        },
        reth,
        operands,
        immediate: if request.imm == what.imm_is {
            what.imm
        } else {
            0
        },
        ..RequestPacket::new(request, &[])
    }
}

/// What a message asks for beyond its remote range, and the length of that if it is not what the
/// message moves.
pub(super) fn operands(kind: Kind, operation: Operation) -> (Operands, Option<u32>) {
    match (kind, operation) {
        (Kind::Atomic, Operation::Atomic(AtomicOperation::CompareSwap { compare, swap, .. })) => {
            let swap_or_add = swap;
            let operands = Operands::Atomic {
                swap_or_add,
                compare,
            };
            (operands, Some(0))
        }
        (Kind::Atomic, Operation::Atomic(AtomicOperation::FetchAdd { add, .. })) => {
            let operands = Operands::Atomic {
                swap_or_add: add,
                compare: 0,
            };
            (operands, Some(0))
        }
        (Kind::Flush, Operation::Flush(wanted, range)) => {
            let mut kind = 0;
            if wanted & access::FLUSH_GLOBAL != 0 {
                kind |= flush_type::GLOBAL;
            }
            if wanted & access::FLUSH_PERSISTENT != 0 {
                kind |= flush_type::PERSISTENT;
            }
            let level = match range {
                Some(_) => flush_level::RANGE,
                None => flush_level::MR,
            };
            let range = u32::try_from(range.unwrap_or(0)).unwrap_or(u32::MAX);
            (Operands::Flush { kind, level }, Some(range))
        }
        _ => (Operands::None, None),
    }
}

/// How long to wait for an answer, nanoseconds.
fn answer_time(sq: &SendQueue) -> u64 {
    match sq.timeout {
        0 => ENDLESS_RETRY,
        timeout => 4096 << timeout,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::wire::packet::GapList;

    #[test]
    fn the_time_of_answers_is_estimated_from_packets_that_were_sent_once() {
        let at = Psn::new;
        let mut round_trip = RoundTrip::default();
        assert_eq!(round_trip.probe(), None);
        round_trip.sent(at(7), 100);
        round_trip.sent(at(8), 200);
        // Not yet this one.
        round_trip.answered(at(0), at(7), 5_000_000);
        assert_eq!(round_trip.probe(), None);
        round_trip.answered(at(7), at(9), 2_000_100);
        assert_eq!(
            (round_trip.average, round_trip.variation),
            (2_000_000, 1_000_000)
        );
        assert_eq!(round_trip.probe(), Some(6_000_000));
        for _ in 0..100 {
            round_trip.sent(at(9), 0);
            assert_eq!(round_trip.answered(at(9), at(10), 2_000), None);
        }
        assert_eq!(round_trip.probe(), Some(LEAST_PROBE));
        // Packets begin to wait on their way. One that takes long may have another reason.
        for (took, times, grows) in [(6, 1, false), (2, 8, true)] {
            assert!(!round_trip.grows());
            for _ in 0..times {
                round_trip.sent(at(9), 0);
                round_trip.answered(at(9), at(10), took * LEAST_GROWTH);
            }
            assert_eq!(round_trip.grows(), grows);
        }
        // Packets wait on their way.
        for (took, late) in [(MOST_DELAY, None), (MOST_DELAY + 10_000, Some(at(9)))] {
            round_trip.sent(at(9), 0);
            assert_eq!(round_trip.answered(at(9), at(10), took), late);
        }
    }

    // D-WIRE-010.
    #[test]
    fn a_peer_that_does_not_answer_is_not_asked_on_and_on() {
        let mut missing = Missing {
            queries_left: QUERIES,
            ..Missing::default()
        };
        for number in 0..=u32::from(QUERIES) {
            missing.ask();
            let query = (number < QUERIES.into()).then_some(number + 1);
            assert_eq!(missing.query(), query);
            assert_eq!(missing.query(), None);
            // What it says otherwise is heeded.
            assert!(!missing.is_known());
        }
        missing.reports = true;
        missing.ask();
        assert!(missing.query().is_some() && missing.is_known());
    }

    #[test]
    fn gaps_count_once_and_among_what_was_sent() {
        let at = Psn::new;
        let mut list = GapList::default();
        // The second and third overlap the first, the next one ends behind what was sent.
        for (first, packets) in [
            (102, 3),
            (102, 3),
            (104, 1),
            (107, u32::MAX),
            (300, 2),
            (90, 5),
        ] {
            list.push(at(first), packets);
        }
        let mut missing = Missing::default();
        assert_eq!(missing.tell(list.gaps(), at(100), 10), 6);
        let all: Vec<_> = std::iter::from_fn(|| missing.next()).collect();
        assert_eq!(all, [102, 103, 104, 107, 108, 109].map(at));
    }

    #[test]
    fn the_window_doubles_then_grows_by_one_and_is_halved_once_for_each() {
        let at = Psn::new;
        let mut window = Window::new(at(0), Congestion::Window);
        window.acknowledged(FIRST_WINDOW);
        assert_eq!(window.packets, 2 * FIRST_WINDOW);
        // Several packets of the same window are lost.
        window.lost(at(20), at(30));
        window.lost(at(25), at(33));
        assert_eq!(window.packets, FIRST_WINDOW);
        window.lost(at(30), at(40));
        assert_eq!(window.packets, FIRST_WINDOW / 2);
        window.acknowledged(FIRST_WINDOW / 2 - 1);
        assert_eq!(window.packets, FIRST_WINDOW / 2);
        window.acknowledged(1);
        assert_eq!(window.packets, FIRST_WINDOW / 2 + 1);
        // After a time-out it doubles again, as far as to the half of what it was.
        window.timed_out();
        assert_eq!(window.packets, 1);
        window.acknowledged(1);
        window.acknowledged(2);
        assert_eq!(window.packets, FIRST_WINDOW / 4);
        window.acknowledged(3);
        assert_eq!(window.packets, FIRST_WINDOW / 4);
        for _ in 0..100_000 {
            window.acknowledged(WINDOW);
        }
        assert_eq!(window.packets, WINDOW);
        for n in 1..100 {
            window.late(at(1000 * n), at(1000 * n + 1));
        }
        assert_eq!(window.packets, LEAST_LATE);
        for n in 100..200 {
            window.lost(at(1000 * n), at(1000 * n + 1));
        }
        assert_eq!(window.packets, 1);
        window.late(at(0), at(1));
        assert_eq!(window.packets, 1);
        // Answers begin to take longer.
        let mut doubling = Window::new(at(0), Congestion::Window);
        doubling.acknowledged(FIRST_WINDOW);
        doubling.stop_doubling();
        doubling.acknowledged(FIRST_WINDOW);
        assert_eq!(doubling.packets, 2 * FIRST_WINDOW);
        doubling.acknowledged(FIRST_WINDOW);
        assert_eq!(doubling.packets, 2 * FIRST_WINDOW + 1);
        // A network that loses nothing.
        let mut fixed = Window::new(at(0), Congestion::None);
        fixed.lost(at(0), at(9));
        fixed.congested(at(20), at(30));
        fixed.timed_out();
        assert_eq!(fixed.packets, WINDOW);
    }

    #[test]
    fn single_losses_are_no_congestion_until_they_are_many() {
        let at = Psn::new;
        let after = |every: u32| {
            let mut window = Window::new(at(0), Congestion::Window);
            for n in 0..1000 {
                window.acknowledged(every);
                window.lost_one(at(n * every), at(n * every + 1));
            }
            window.packets
        };
        // Of one and four of a hundred.
        let [one, four] = [100, 25].map(after);
        assert!(one > 4 * FIRST_WINDOW, "{one}");
        assert!(four < FIRST_WINDOW, "{four}");
        // Of one and a half, told of eight at a time.
        let mut window = Window::new(at(0), Congestion::Window);
        for n in 0..1000 {
            window.acknowledged(500);
            let sent = at(500 * (n + 1));
            (0..8).for_each(|lost| window.lost_one(at(500 * n + lost), sent));
        }
        assert!(window.packets > 4 * FIRST_WINDOW, "{}", window.packets);
    }
}
