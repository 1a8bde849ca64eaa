// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable datagrams over a fabric with packets (`spec/srd.md`, "On the wire").
//!
//! All messages from one GID to another are in one [`Flow`], whichever queue pairs they are of.
//! [`outgoing`] knows which packets are under way, [`incoming`] which came; [`message`] is what they
//! are of. Packets are sent when a work request begins, when an answer comes, and when a timer ends:
//! all of them have the tables of the VM, whose GID the flow is from.
mod flow;
mod incoming;
mod message;
mod outgoing;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;

use self::flow::{is_newer, Fared, Flow, FORGOTTEN};
use self::incoming::{Admission, Incoming};
use self::message::{footprint, Role, Sending};
use self::outgoing::PATHS;
use super::egress::{Attempt, Egress};
use super::frame::{Addresses, Frame, Route};
use super::packet::{Packet, Payload, Psn};
use super::port::Port;
use super::recipients::Recipients;
use super::srd_packet::{most_refusals, Data, Refusal, SrdPacket, MOST_PATHS};
use super::verdict::{Reason, Verdict};
use crate::engine::payload_of;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Active, SendQueue};
use crate::engine::tables::{Gid, Tables};
use crate::engine::vm::Segment;

/// A receiver answers after so many packets at the latest.
const ANSWER_EVERY: u32 = 16;
/// A flow that was not used for so long begins anew, nanoseconds.
const IDLE: u64 = 30_000_000_000;
/// A flow whose VM is busy is looked at again, nanoseconds.
const LATER: u64 = 1_000_000;
/// Flows that are looked through for some that nobody uses, when one more is made.
const MANY: usize = 64;

/// Between whom a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ends {
    segment: Segment,
    here: Gid,
    there: Gid,
}

/// All flows of a wire.
#[derive(Debug, Default)]
pub(super) struct Flows {
    all: FxHashMap<Ends, Flow>,
    /// When each is to be looked at that waits for a time, nanoseconds.
    timers: BTreeSet<(u64, Ends)>,
    /// Those that owe an answer.
    owing: Vec<Ends>,
    /// Some are forgotten when there are so many.
    tidy_at: usize,
}

impl Flows {
    /// The flow between two GIDs; `None` if the account of the VM has no room. Those that a peer begins
    /// (`forced`) leave half of it.
    fn flow(
        &mut self,
        tables: &Tables,
        ends: Ends,
        way: Addresses,
        forced: bool,
        now: u64,
    ) -> Option<&mut Flow> {
        let known = self.all.get(&ends);
        if !known.is_some_and(|known| known.is_of(tables)) {
            if self.all.len() >= self.tidy_at.max(MANY) {
                self.tidy(now);
            }
            let vm = tables.vm.upgrade()?;
            let footprint = &tables.footprint;
            if forced && footprint.bytes() >= footprint.limit() / 2 {
                return None;
            }
            let share = footprint.share(Flow::FOOTPRINT).ok()?;
            let before = self.all.insert(ends, Flow::new(&vm, way, now, share));
            if let Some(wake) = before.and_then(|before| before.wake) {
                self.timers.remove(&(wake, ends));
            }
        }
        self.all.get_mut(&ends)
    }

    /// Forgets flows that nobody uses.
    fn tidy(&mut self, now: u64) {
        self.keep(|flow| flow.lives() && !flow.is_old(now));
        self.tidy_at = 2 * self.all.len();
    }

    /// Forgets flows of which `stays` does not say otherwise.
    fn keep(&mut self, stays: impl Fn(&Flow) -> bool) {
        let timers = &mut self.timers;
        self.all.retain(|ends, flow| {
            let stays = stays(flow);
            if let Some(wake) = flow.wake.filter(|_| !stays) {
                timers.remove(&(wake, *ends));
            }
            stays
        });
    }

    /// Something was done in a flow: it may be due at another time than before.
    fn watch(&mut self, ends: Ends, running: bool, now: u64) {
        let Some(flow) = self.all.get_mut(&ends) else {
            return;
        };
        let Some(deadline) = flow.deadline(running, now) else {
            return;
        };
        // Not in the same round again, whatever it is.
        let deadline = deadline.max(now.saturating_add(1));
        if flow.wake.is_none_or(|wake| deadline < wake) {
            if let Some(wake) = flow.wake.replace(deadline) {
                self.timers.remove(&(wake, ends));
            }
            self.timers.insert((deadline, ends));
        }
    }

    /// When a flow has something to do, nanoseconds.
    pub(super) fn timer(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Does what is due by time `now`.
    pub(super) fn run_timers<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        now: u64,
        vms: &mut impl Recipients,
    ) {
        while let Some((at, ends)) = self.timers.first().copied() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            let Some(flow) = self.all.get_mut(&ends) else {
                continue;
            };
            flow.wake = None;
            let Some(vm) = flow.vm.upgrade() else {
                self.all.remove(&ends);
                continue;
            };
            let mut running = None;
            // It is told even if it has the GID no longer: its messages have to end.
            let there = vms.visit_vm(&vm, &mut |tables| {
                if flow.is_of(tables) && !flow.is_old(now) {
                    running = Some(tables.running);
                    let has_gid = tables.gids.contains(&Some(ends.here));
                    flow.expire(egress, tables, has_gid, now);
                }
            });
            match running {
                Some(running) => self.watch(ends, running, now),
                None if there => drop(self.all.remove(&ends)),
                // It is busy for a moment.
                None => {
                    flow.wake = Some(now.saturating_add(LATER));
                    self.timers.insert((now.saturating_add(LATER), ends));
                }
            }
        }
    }

    /// Begins the message of the work request in progress. Returns false if the account of its VM
    /// has no room.
    pub(super) fn begin<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        sq: &SendQueue,
        tables: &Tables,
        qp: &Arc<Qp>,
        active: &Active,
        now: u64,
    ) -> bool {
        let (Some(to), Some(uplink)) = (sq.datagram, qp.vm.uplink()) else {
            return false;
        };
        let way = Addresses::of(&to);
        let ends = Ends {
            segment: uplink.segment,
            here: to.sgid,
            there: to.dgid,
        };
        let inline = if active.inline {
            sq.inline.as_slice()
        } else {
            &[]
        };
        let Ok(share) = tables
            .footprint
            .share(footprint(sq.sges.len(), inline.len()))
        else {
            return false;
        };
        let before = self.all.get(&ends).map(|flow| flow.used);
        let Some(flow) = self.flow(tables, ends, way, false, now) else {
            return false;
        };
        flow.used = now;
        let rested = before.is_some_and(|used| now.saturating_sub(used) >= IDLE);
        if rested && flow.messages.is_empty() {
            flow.renew();
        }
        let (sges, inline) = flow.lists(&sq.sges, inline);
        let role = Role::Request {
            active: *active,
            way,
            sges,
            inline,
            rnr_retry: sq.rnr_retry,
        };
        flow.way = way;
        let mtu = payload_of(qp.vm.active_mtu()) as u32;
        let of = (qp, role, active.message);
        flow.insert(Sending::new(of, (to.qpn, to.qkey), mtu, now, share));
        flow.pump(egress, tables, now);
        self.watch(ends, tables.running, now);
        true
    }

    /// Gives up all that a send queue has under way.
    pub(super) fn flush(&mut self, sq: &mut SendQueue, tables: &Tables, qp: &Arc<Qp>) {
        for flow in self.all.values_mut() {
            let of = Arc::downgrade(qp);
            let own = |message: &Sending| message.is_request() && Weak::ptr_eq(&message.qp, &of);
            for message in flow.remove_all(own) {
                if let Role::Request { active, .. } = &message.role {
                    sq.flush_begun(tables, qp, active);
                }
            }
        }
    }

    /// A queue pair was destroyed.
    pub(super) fn forget(&mut self, qp: &Arc<Qp>) {
        let of = Arc::downgrade(qp);
        for flow in self.all.values_mut() {
            flow.remove_all(|message| Weak::ptr_eq(&message.qp, &of));
        }
    }

    /// Forgets flows of VMs that are gone, and what is of queue pairs that are.
    pub(super) fn forget_destroyed(&mut self) {
        self.keep(Flow::lives);
        let gone = |message: &Sending| {
            let qp = message.qp.upgrade();
            qp.is_none_or(|qp| qp.dead.load(Ordering::SeqCst))
        };
        for flow in self.all.values_mut() {
            flow.remove_all(gone);
        }
    }

    /// A packet came for a VM, at an address that it has.
    pub(super) fn take<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        now: u64,
        segment: Segment,
        (frame, packet): (&Frame<'_>, &Packet<'_>),
        srd: &SrdPacket<'_>,
    ) -> Option<Verdict> {
        let from = &frame.addresses;
        if !tables.running && !matches!(srd, SrdPacket::Data(..)) {
            return Some(Verdict::Dropped(Reason::Down));
        }
        let ends = Ends {
            segment,
            here: from.destination,
            there: from.source,
        };
        match srd {
            SrdPacket::Data(data, payload) => {
                let frame = (ends, frame, packet);
                Some(self.take_data(egress, tables, now, frame, data, payload))
            }
            SrdPacket::Answer(answer) => {
                let answer = answer.as_ref()?;
                let flow = self.all.get_mut(&ends)?;
                let ours = flow.is_of(tables) && answer.token == flow.token;
                if !ours {
                    return Some(Verdict::Dropped(Reason::Unasked));
                }
                flow.used = now;
                let new = flow.answered(answer, now);
                flow.pump(egress, tables, now);
                flow.settle(tables);
                self.watch(ends, tables.running, now);
                Some(if new {
                    Verdict::Taken
                } else {
                    Verdict::Dropped(Reason::Behind)
                })
            }
            SrdPacket::Reset { token } => {
                let flow = self.all.get_mut(&ends)?;
                let ours = flow.is_of(tables) && *token == flow.token;
                if !ours {
                    return Some(Verdict::Dropped(Reason::Unasked));
                }
                flow.abandon(FORGOTTEN, 0);
                flow.settle(tables);
                flow.pump(egress, tables, now);
                self.watch(ends, tables.running, now);
                Some(Verdict::Ends(FORGOTTEN))
            }
        }
    }

    fn take_data<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        tables: &Tables,
        now: u64,
        (ends, frame, packet): (Ends, &Frame<'_>, &Packet<'_>),
        data: &Data,
        payload: &[u8],
    ) -> Verdict {
        let way = frame.addresses.back();
        let known = self.all.get(&ends).filter(|flow| flow.is_of(tables));
        let known = known.and_then(|flow| flow.incoming.as_ref().map(Incoming::token));
        let begins = known != Some(data.token);
        if begins && known.is_some_and(|known| !is_newer(data.token, known)) {
            return Verdict::Dropped(Reason::Behind);
        }
        if begins && data.heard != 0 {
            // What came before is not known here. Nothing is kept for it.
            if let Some(vm) = tables.vm.upgrade() {
                let token = data.token;
                let reset = Packet::srd(0, Psn::default(), SrdPacket::Reset { token });
                egress.send_empty(now, &vm, Some(&Route::on_path(way, 0)), &reset);
            }
            return Verdict::Dropped(Reason::State);
        }
        let Some(flow) = self.flow(tables, ends, way, true, now) else {
            return Verdict::Dropped(Reason::NoRoom);
        };
        if begins {
            // What the peer has asked for before is of no use to it.
            flow.remove_all(|message| !message.is_request());
            flow.incoming = Some(Incoming::new(data.token));
        }
        (flow.way, flow.used) = (way, now);
        let Some(incoming) = &mut flow.incoming else {
            return Verdict::Dropped(Reason::State);
        };
        let owed = incoming.owed();
        let mtu = flow
            .vm
            .upgrade()
            .map_or(0, |vm| payload_of(vm.active_mtu()));
        let most = most_refusals(mtu as usize);
        let mut verdict = if tables.running {
            let numbers = (data.number, data.heard);
            let congested = frame.addresses.congested();
            match incoming.arrives(numbers, (data.path, packet.psn), congested) {
                Admission::Again => Verdict::Again,
                Admission::Beyond => Verdict::Dropped(Reason::Ahead),
                Admission::New if !incoming.may_refuse(most) => Verdict::Dropped(Reason::NoRoom),
                Admission::New => Verdict::Taken,
            }
        } else {
            incoming.not_now();
            Verdict::Dropped(Reason::Down)
        };
        if verdict == Verdict::Taken {
            let fared = flow.carry_out(tables, packet.dest_qp, data, payload, now);
            let Some(incoming) = &mut flow.incoming else {
                return verdict;
            };
            match fared {
                Fared::Done => incoming.took(data.number),
                Fared::Refused(error, timer) => {
                    incoming.refused(Refusal {
                        number: data.number,
                        status: error.status,
                        reason: error.vendor,
                        timer,
                    });
                    verdict = Verdict::RefusedMessage(error);
                }
                Fared::NotNow => {
                    incoming.not_now();
                    verdict = Verdict::Dropped(Reason::Down);
                }
            }
            flow.settle(tables);
            flow.pump(egress, tables, now);
        }
        if owed == 0 {
            self.owing.push(ends);
        } else if owed + 1 >= ANSWER_EVERY {
            self.answer_one(egress, ends, now);
        }
        self.watch(ends, tables.running, now);
        verdict
    }

    fn answer_one<P: Port>(&mut self, egress: &mut Egress<P>, ends: Ends, now: u64) {
        let Some(flow) = self.all.get_mut(&ends) else {
            return;
        };
        let Some((vm, incoming)) = flow.vm.upgrade().zip(flow.incoming.as_mut()) else {
            return;
        };
        if incoming.owed() == 0 {
            return;
        }
        let answer = incoming.answer();
        let packet = Packet::srd(0, Psn::default(), SrdPacket::Answer(None));
        let payload = Payload {
            len: answer.bytes().len(),
            read: &mut |space: &mut [u8]| {
                space.copy_from_slice(answer.bytes());
                true
            },
        };
        let route = Route::on_path(flow.way, incoming.path());
        egress.send(now, &vm, Some(&route), &packet, payload, Attempt::First);
    }

    /// Answers all that came.
    pub(super) fn answer<P: Port>(&mut self, egress: &mut Egress<P>, now: u64) {
        while let Some(ends) = self.owing.pop() {
            self.answer_one(egress, ends, now);
        }
    }
}

const _: () = assert!(PATHS <= MOST_PATHS);
