// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs of verbs between two connected queue pairs, and what has to come of them, whichever
//! fabric is between: for the tests of each fabric.
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use vhost_device_rdma_sync::Readers;
use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::facts::{completion_opcode, QpType};
use virtio_rdma_spec::ring::{Cqe, Sge};
use virtio_rdma_spec::verbs::{
    access, flush_type, mtu, qp_attr, qp_state, send_flag, wc_flag, wc_opcode, wc_status,
    wr_opcode, MASK_24,
};

use crate::engine::fixture::{Destination, Guest, Send, TestQp, DATA, ENTRIES, QKEY};
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::Polled;
use crate::engine::vm::{Schedule, Uplink};

/// Time-out code of the queue pairs: 1.05 ms.
const TIMEOUT: u8 = 8;
pub(super) const TIMEOUT_NANOSECONDS: u64 = 4096 << TIMEOUT;
/// First PSN of each end: it wraps soon.
pub(super) const FIRST: [u32; 2] = [MASK_24 - 3, 77];

/// One of two VMs, with its queue pair.
pub(super) struct End {
    pub guest: Guest,
    pub qp: TestQp,
    /// Where the next buffer is, in the guest's data.
    free: u64,
}

/// A receive that is posted later.
#[derive(Debug, Clone)]
struct Receive {
    end: usize,
    wr_id: u64,
    at: u64,
    len: u32,
}

/// Two VMs, each with a queue pair that is connected to the other's.
pub(super) struct Pair {
    pub ends: [End; 2],
    /// Completions that were polled.
    seen: [Vec<Cqe>; 2],
    later: BTreeMap<(u64, u64), Receive>,
}

impl Pair {
    /// For [`requests`], of which the requester may have `max_rd_atomic` under way that bring
    /// something.
    pub(super) fn for_requests(
        qp_type: u8,
        (readers, uplink): (&Readers, Option<Uplink>),
        path_mtu: u8,
        max_rd_atomic: u8,
    ) -> Self {
        Self::of(qp_type, (readers, uplink), |attr| {
            attr.path_mtu = path_mtu;
            attr.max_rd_atomic = max_rd_atomic;
            attr.max_dest_rd_atomic = 4;
            attr.access_flags |= access::FLUSH_GLOBAL;
        })
    }

    /// Of queue pairs of a type, the first end's, and its peer's at the second, of VMs of one process
    /// or with a way out of theirs. Both ends have the same attributes, with what `change` changes.
    pub(super) fn of(
        qp_type: u8,
        (readers, uplink): (&Readers, Option<Uplink>),
        change: impl Fn(&mut QpAttr),
    ) -> Self {
        let peer = QpType::of(qp_type).unwrap().peer;
        let end = |number, qp_type| {
            let guest = Guest::with_uplink(readers, number, uplink);
            End::new(guest, qp_type)
        };
        Self::between([end(1, qp_type), end(2, peer)], change)
    }

    /// Between these ends, whose queue pairs are in RESET.
    pub(super) fn between(ends: [End; 2], change: impl Fn(&mut QpAttr)) -> Self {
        let pair = Self {
            ends,
            seen: Default::default(),
            later: BTreeMap::new(),
        };
        pair.connect(change);
        pair
    }

    /// Connects the queue pairs, which are in RESET.
    pub(super) fn connect(&self, change: impl Fn(&mut QpAttr)) {
        for (own, other) in [(0, 1), (1, 0)] {
            let [own_end, peer] = [&self.ends[own], &self.ends[other]];
            let mac = peer.mac();
            let to = (&peer.guest, peer.qp.qp.number);
            own_end.guest.connect(&own_end.qp, to, |attr| {
                attr.av.dmac = mac;
                attr.timeout = TIMEOUT;
                attr.sq_psn = FIRST[own];
                attr.rq_psn = FIRST[other];
                change(attr);
            });
        }
    }

    /// Posts the receives that are due; returns whether there are any.
    pub(super) fn post_due(&mut self, now: u64) -> bool {
        let mut any = false;
        while let Some(entry) = self.later.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let Receive {
                end,
                wr_id,
                at,
                len,
            } = entry.remove();
            self.post_receive(end, wr_id, at, len);
            any = true;
        }
        any
    }

    /// When the next receive is due, nanoseconds.
    pub(super) fn next_due(&self) -> Option<u64> {
        self.later.keys().next().map(|(at, _)| *at)
    }

    pub(super) fn post_receive(&mut self, end: usize, wr_id: u64, at: u64, len: u32) {
        let End { guest, qp, .. } = &mut self.ends[end];
        // In two parts, so that messages go over the end of one.
        let first = len / 3;
        let sges = [
            guest.sge(at, first),
            guest.sge(at + u64::from(first), len - first),
        ];
        guest.post_receive(qp, wr_id, &sges);
    }

    pub(super) fn post_send(&mut self, end: usize, send: &Send) {
        let End { guest, qp, .. } = &mut self.ends[end];
        guest.post_send(qp, send);
    }

    /// A SEND of `len` bytes.
    pub(super) fn a_send(&mut self, end: usize, wr_id: u64, len: u32) -> Send {
        let at = self.ends[end].allocate(u64::from(len));
        Send {
            opcode: wr_opcode::SEND,
            flags: send_flag::SIGNALED,
            wr_id,
            sges: vec![self.ends[end].guest.sge(at, len)],
            ..Send::default()
        }
    }

    /// A reliable datagram from an end to the other.
    pub(super) fn a_reliable_datagram(
        &mut self,
        end: usize,
        opcode: u8,
        wr_id: u64,
        len: u32,
    ) -> Send {
        let End { guest, qp, .. } = &self.ends[1 - end];
        let to = Destination {
            gid: guest.gid,
            mac: self.ends[1 - end].mac(),
            qpn: qp.qp.number,
            qkey: QKEY,
        };
        let mut send = Send {
            opcode,
            imm: 7,
            to,
            ..self.a_send(end, wr_id, len)
        };
        if !matches!(opcode, wr_opcode::SEND | wr_opcode::SEND_WITH_IMM) {
            send.rkey = self.ends[1 - end].guest.key;
            send.remote_addr = DATA + self.ends[1 - end].allocate(len.into());
        }
        send
    }

    /// Ids and statuses of the completions of the first end since the last call, in their order.
    pub(super) fn told(&mut self) -> Vec<(u64, u8)> {
        let cqes = self.completions(0);
        cqes.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect()
    }

    /// Completions since the last call.
    pub(super) fn completions(&mut self, end: usize) -> Vec<Cqe> {
        let cqes = self.ends[end].guest.poll_all();
        self.seen[end].extend(&cqes);
        cqes
    }

    /// All completions.
    pub(super) fn seen(&mut self, end: usize) -> Vec<Cqe> {
        self.completions(end);
        std::mem::take(&mut self.seen[end])
    }

    pub(super) fn state(&self, end: usize) -> u8 {
        self.ends[end].qp.qp.state()
    }

    pub(super) fn modify(&self, end: usize, mask: u32, attr: &QpAttr) {
        let peer = &self.ends[1 - end].guest;
        self.ends[end].qp.qp.modify(peer, mask, attr).unwrap();
    }

    /// Brings a queue pair to a state that needs no further attribute.
    pub(super) fn set_state(&self, end: usize, qp_state: u8) {
        let attr = QpAttr {
            qp_state,
            ..QpAttr::default()
        };
        self.modify(end, qp_attr::STATE, &attr);
    }
}

impl End {
    /// A guest with a queue pair in RESET.
    pub(super) fn new(mut guest: Guest, qp_type: u8) -> Self {
        let qp = guest.queue_pair(qp_type);
        Self { guest, qp, free: 0 }
    }

    /// Room for `len` bytes, and some that nobody writes.
    pub(super) fn allocate(&mut self, len: u64) -> u64 {
        let at = self.free;
        self.free += (len + 64).next_multiple_of(64);
        at
    }

    pub(super) fn mac(&self) -> [u8; 6] {
        self.guest.vm.tables().sources[0].mac
    }
}

/// The time of two ends.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub now: u64,
    /// When the queue pair of each end is to be polled again.
    pub timers: [Option<u64>; 2],
}

impl Clock {
    /// Polls the queue pair of an end, as far as it wants to be, by `poll`; returns whether it did.
    pub(super) fn poll(
        &mut self,
        pair: &Pair,
        end: usize,
        mut poll: impl FnMut(&Arc<Qp>) -> Polled,
    ) -> bool {
        let timer = &mut self.timers[end];
        let End { guest, qp, .. } = &pair.ends[end];
        if timer.is_some_and(|at| at <= self.now) {
            *timer = None;
            guest.run_list.schedule(&qp.qp);
        }
        let mut any = false;
        while let Some(qp) = guest.run_list.take() {
            any = true;
            match poll(&qp) {
                Polled::Idle => *timer = None,
                Polled::Again | Polled::Long => {
                    guest.run_list.schedule(&qp);
                    // The other end has its share of the time, too.
                    break;
                }
                Polled::Park(until) => *timer = Some(until),
            }
        }
        any
    }
}

/// What is between two ends: a fabric, with all that a worker does for it.
pub(super) trait World {
    fn clock(&mut self) -> &mut Clock;

    /// Does what is to be done at an end now; returns whether there was anything.
    fn serve(&mut self, pair: &Pair, end: usize) -> bool;

    /// When the fabric itself has something to do next, nanoseconds.
    fn next(&self) -> Option<u64> {
        None
    }

    /// Lets everything happen until nothing does, or until the time `until`.
    fn run(&mut self, pair: &mut Pair, until: u64) {
        for step in 0.. {
            assert!(step < 2_000_000, "it does not come to an end");
            let mut any = pair.post_due(self.clock().now);
            for end in [0, 1] {
                any |= self.serve(pair, end);
            }
            if any {
                continue;
            }
            let own = self.next();
            let clock = self.clock();
            let timers = clock.timers.into_iter().chain([pair.next_due(), own]);
            match timers.flatten().min() {
                Some(at) if at <= until => clock.now = clock.now.max(at),
                _ => break,
            }
        }
    }
}

/// A second of virtual time, nanoseconds.
pub(super) const SECOND: u64 = 1_000_000_000;

/// Ids of receives are above this, those of sends below.
pub(super) const RECEIVES: u64 = 1 << 32;

/// What makes a message fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Poison {
    /// The peer's key is none.
    RemoteKey,
    /// Our own key is none.
    LocalKey,
    /// The receive that the message meets is too short.
    ShortReceive,
    /// This fabric does not carry it.
    Opcode,
}

/// A message of a program.
#[derive(Debug, Clone)]
pub(super) struct Message {
    opcode: u8,
    len: u32,
    inline: bool,
    signaled: bool,
    solicited: bool,
    /// How long after the start its receive is posted, microseconds.
    late: u64,
}

impl Message {
    fn receives(&self) -> bool {
        self.opcode != wr_opcode::RDMA_WRITE
    }
}

/// What a case does.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub path_mtu: u8,
    pub messages: Vec<Message>,
    pub poison: Option<(usize, Poison)>,
    /// Both ends send.
    pub both: bool,
}

fn messages() -> impl Strategy<Value = Message> {
    let opcodes = prop_oneof![
        Just(wr_opcode::SEND),
        Just(wr_opcode::SEND_WITH_IMM),
        Just(wr_opcode::SEND_WITH_INV),
        Just(wr_opcode::RDMA_WRITE),
        Just(wr_opcode::RDMA_WRITE_WITH_IMM),
    ];
    // Around multiples of the payload of a packet.
    let len = prop_oneof![
        0u32..64,
        (0u32..9, -2i32..3).prop_map(|(n, d)| (n * 256).saturating_add_signed(d)),
        (0u32..5, -2i32..3).prop_map(|(n, d)| (n * 4096).saturating_add_signed(d)),
    ];
    let late = prop_oneof![3 => Just(0u64), 1 => 0u64..3000];
    let flags = any::<(bool, bool, bool)>();
    (opcodes, len, late, flags).prop_map(|(opcode, len, late, flags)| {
        let (inline, signaled, solicited) = flags;
        Message {
            opcode,
            len,
            inline: inline && len <= 48,
            signaled,
            solicited,
            late,
        }
    })
}

/// Programs for RC queue pairs.
pub(super) fn programs() -> impl Strategy<Value = Program> {
    let poison = prop_oneof![
        Just(Poison::RemoteKey),
        Just(Poison::LocalKey),
        Just(Poison::ShortReceive),
        Just(Poison::Opcode),
    ];
    let poison = proptest::option::of((any::<proptest::sample::Index>(), poison));
    (
        mtu::MTU_256..=mtu::MTU_4096,
        proptest::collection::vec(messages(), 1..24),
        poison,
        any::<bool>(),
    )
        .prop_map(|(path_mtu, mut messages, poison, both)| {
            let poison = poison.map(|(at, poison)| {
                let at = at.index(messages.len());
                let message = &mut messages[at];
                // Of a message without bytes no key is looked at.
                message.len = message.len.max(2);
                message.inline = false;
                match poison {
                    Poison::RemoteKey => message.opcode = wr_opcode::RDMA_WRITE,
                    Poison::ShortReceive => message.opcode = wr_opcode::SEND,
                    Poison::Opcode => {
                        message.opcode = wr_opcode::RDMA_WRITE;
                        message.len = 8;
                    }
                    Poison::LocalKey => {}
                }
                (at, poison)
            });
            Program {
                path_mtu,
                both: both && poison.is_none(),
                messages,
                poison,
            }
        })
}

/// What a message is to become, from `from` to the other end.
pub(super) struct Expected {
    send: Send,
    content: Vec<u8>,
    /// Where its bytes go, and the number of its receive.
    to: u64,
    receive: Option<u64>,
    signaled: bool,
}

/// The bytes of a message.
pub(super) fn content(number: usize, from: usize, len: u32) -> Vec<u8> {
    let byte = |i: u32| (i as usize * 7 + number * 31 + from * 101 + 1) as u8 | 1;
    (0..len).map(byte).collect()
}

/// Posts what a program says for one direction.
pub(super) fn post(pair: &mut Pair, from: usize, program: &Program) -> Vec<Expected> {
    let to = 1 - from;
    let mut expected = Vec::new();
    let mut receives = 0;
    let mut time = 0;
    for (number, message) in program.messages.iter().enumerate() {
        let poison = program.poison.filter(|(at, _)| *at == number);
        let poison = poison.map(|(_, poison)| poison);
        let content = content(number, from, message.len);
        let source = pair.ends[from].allocate(u64::from(message.len));
        pair.ends[from].guest.write(source, &content);
        let place = pair.ends[to].allocate(u64::from(message.len));
        let receive = message.receives().then(|| {
            receives += 1;
            let short = poison == Some(Poison::ShortReceive);
            let receive = Receive {
                end: to,
                wr_id: RECEIVES + receives,
                at: place,
                len: message.len - u32::from(short),
            };
            // In order, as a queue is.
            time = time.max(message.late * 1000);
            pair.later.insert((time, receives * 2 + to as u64), receive);
            RECEIVES + receives
        });
        let peer_key = pair.ends[to].guest.key;
        let mut send = Send {
            opcode: message.opcode,
            flags: if message.signaled {
                send_flag::SIGNALED
            } else {
                0
            },
            imm: 0xabcd_0000 + number as u32,
            wr_id: number as u64,
            remote_addr: DATA + place,
            rkey: peer_key,
            srqn: pair.ends[to].qp.srqn,
            ..Send::default()
        };
        if message.solicited {
            send.flags |= send_flag::SOLICITED;
        }
        if message.opcode == wr_opcode::SEND_WITH_INV {
            send.imm = pair.ends[to].guest.fast_key();
        }
        if message.inline {
            send.flags |= send_flag::INLINE;
            send.inline.clone_from(&content);
        } else {
            // In three parts, one of them empty.
            let guest = &pair.ends[from].guest;
            let first = message.len / 2;
            send.sges = vec![
                guest.sge(source, first),
                guest.sge(source, 0),
                guest.sge(source + u64::from(first), message.len - first),
            ];
        }
        match poison {
            Some(Poison::RemoteKey) => send.rkey ^= 0x0100_0000,
            Some(Poison::LocalKey) => send.sges[2].lkey ^= 0x0100_0000,
            Some(Poison::Opcode) => {
                // None that there is.
                send.opcode = u8::MAX;
                send.imm = 0;
            }
            Some(Poison::ShortReceive) | None => {}
        }
        pair.post_send(from, &send);
        expected.push(Expected {
            send,
            content,
            to: place,
            receive,
            signaled: message.signaled,
        });
    }
    expected
}

/// What became of the messages of one direction is as verbs say.
fn check(
    program: &Program,
    pair: &Pair,
    from: usize,
    expected: &[Expected],
    sent: &[Cqe],
    received: &[Cqe],
) -> Result<(), TestCaseError> {
    let good = program.poison.map_or(expected.len(), |(at, _)| at);
    // The requester: in order, those that are signaled, and then all in error.
    let completes = |(number, one): &(usize, &Expected)| one.signaled || *number >= good;
    let of = expected.iter().enumerate().filter(completes);
    prop_assert_eq!(
        sent.len(),
        of.clone().count(),
        "completions of sends: {:?}",
        sent
    );
    for ((number, one), cqe) in of.zip(sent) {
        prop_assert_eq!(cqe.wr_id, number as u64);
        prop_assert_eq!(u32::from(cqe.wqe_index), number as u32 % ENTRIES);
        let status = match program.poison {
            Some((at, poison)) if at == number => match poison {
                Poison::RemoteKey => wc_status::REM_ACCESS_ERR,
                Poison::LocalKey => wc_status::LOC_PROT_ERR,
                Poison::ShortReceive => wc_status::REM_INV_REQ_ERR,
                Poison::Opcode => wc_status::LOC_QP_OP_ERR,
            },
            _ if number > good => wc_status::WR_FLUSH_ERR,
            _ => wc_status::SUCCESS,
        };
        prop_assert_eq!(cqe.status, status, "message {}: {:?}", number, cqe);
        if status == wc_status::SUCCESS {
            let kind = match one.send.opcode {
                wr_opcode::RDMA_WRITE | wr_opcode::RDMA_WRITE_WITH_IMM => wc_opcode::RDMA_WRITE,
                _ => wc_opcode::SEND,
            };
            prop_assert_eq!(cqe.opcode, kind);
        }
    }
    // The responder: each message that has a receive takes one, in order and once.
    let arrived = expected
        .iter()
        .take(good)
        .filter(|one| one.receive.is_some());
    let mut cqes = received.iter();
    for one in arrived {
        let cqe = cqes.next();
        prop_assert!(cqe.is_some(), "a message is lost: {:?}", one.send);
        let cqe = cqe.unwrap();
        prop_assert_eq!(Some(cqe.wr_id), one.receive);
        prop_assert_eq!(cqe.status, wc_status::SUCCESS);
        prop_assert_eq!(cqe.byte_len as usize, one.content.len());
        let opcode = match one.send.opcode {
            wr_opcode::RDMA_WRITE_WITH_IMM => wc_opcode::RECV_RDMA_WITH_IMM,
            _ => wc_opcode::RECV,
        };
        prop_assert_eq!(cqe.opcode, opcode);
        let brings = match one.send.opcode {
            wr_opcode::SEND => 0,
            wr_opcode::SEND_WITH_INV => wc_flag::WITH_INV,
            _ => wc_flag::WITH_IMM,
        };
        let told = cqe.wc_flags & (wc_flag::WITH_IMM | wc_flag::WITH_INV);
        prop_assert_eq!(told, brings);
        prop_assert_eq!(cqe.imm, if brings == 0 { 0 } else { one.send.imm });
        prop_assert_eq!(cqe.src_qp, pair.ends[from].qp.qp.number);
    }
    // What is left of the receives ends in error, if the responder failed, or waits.
    let mut cqes = cqes.copied();
    if program
        .poison
        .is_some_and(|(_, poison)| poison == Poison::ShortReceive)
    {
        let cqe = cqes.next().unwrap();
        prop_assert_eq!(cqe.status, wc_status::LOC_LEN_ERR);
        prop_assert_eq!(Some(cqe.wr_id), expected[good].receive);
    }
    for cqe in cqes {
        prop_assert_eq!(cqe.status, wc_status::WR_FLUSH_ERR, "{:?}", cqe);
    }
    // Each byte is where it belongs, and nothing beside it.
    let guest = &pair.ends[1 - from].guest;
    for (number, one) in expected.iter().enumerate() {
        let len = one.content.len();
        let there = guest.read(one.to, len + 16);
        if number < good {
            prop_assert_eq!(&there[..len], &one.content[..], "message {}", number);
        }
        prop_assert_eq!(&there[len..], &[0; 16][..], "beside message {}", number);
        check_key(guest, one, number < good)?;
    }
    Ok(())
}

/// A message that invalidates a key has done so if it arrived, and not otherwise.
fn check_key(guest: &Guest, one: &Expected, arrived: bool) -> Result<(), TestCaseError> {
    if one.send.opcode == wr_opcode::SEND_WITH_INV {
        let kept = guest.is_registered(one.send.imm);
        prop_assert_eq!(kept, !arrived, "{:?}", one.send);
    }
    Ok(())
}

/// Whether a completion is that of a send.
pub(super) fn is_send(cqe: &Cqe) -> bool {
    cqe.wr_id < RECEIVES
}

/// Runs a program until nothing happens any longer, and checks what came of it.
pub(super) fn verify(
    program: &Program,
    pair: &mut Pair,
    world: &mut impl World,
) -> Result<(), TestCaseError> {
    let there = post(pair, 0, program);
    let back = program.both.then(|| post(pair, 1, program));
    world.run(pair, 100 * SECOND);
    let (sent, received): (Vec<_>, Vec<_>) = pair.completions(0).into_iter().partition(is_send);
    let (sent_back, received_there): (Vec<_>, Vec<_>) =
        pair.completions(1).into_iter().partition(is_send);
    check(program, pair, 0, &there, &sent, &received_there)?;
    if let Some(back) = back {
        check(program, pair, 1, &back, &sent_back, &received)?;
    }
    let failed = program.poison.is_some();
    prop_assert_eq!(pair.state(0) == qp_state::ERR, failed);
    let warnings = pair.ends[0].guest.warnings.all();
    prop_assert_eq!(warnings.is_empty(), !failed, "{:?}", warnings);
    for end in &pair.ends {
        prop_assert!(!end.qp.qp.send_queue().in_progress());
    }
    let timers = world.clock().timers;
    prop_assert_eq!(timers, [None, None], "something is still waited for");
    Ok(())
}

/// Runs a program from the first end to the second in a world that `cut` cuts in two at a time, and checks
/// what came of it: the messages that have their answers succeed, the next one ends with RETRY_EXC_ERR when
/// its attempts have waited for `waits` nanoseconds, not before, and the others are flushed. What arrived is
/// as in a world that is whole, as far as it came.
pub(super) fn verify_cut<W: World>(
    program: &Program,
    pair: &mut Pair,
    world: &mut W,
    at: u64,
    waits: u64,
    cut: impl FnOnce(&mut W),
) -> Result<(), TestCaseError> {
    // An answer under way when it is cut belongs to what was sent some round trips before, and who is told
    // that there is no receive waits for that, too.
    const ABOUT: u64 = TIMEOUT_NANOSECONDS / 2;
    let expected = post(pair, 0, program);
    world.run(pair, at);
    cut(world);
    world.run(pair, at + waits - ABOUT);
    let failed = |cqes: &[Cqe]| cqes.iter().position(|cqe| cqe.status != wc_status::SUCCESS);
    let mut sent = pair.completions(0);
    prop_assert_eq!(failed(&sent), None, "too early: {:?}", sent);
    world.run(pair, at + waits + ABOUT);
    sent.extend(pair.completions(0));
    let good = failed(&sent).map_or(expected.len(), |first| sent[first].wr_id as usize);
    let status = |number: usize| match number.cmp(&good) {
        Ordering::Less => wc_status::SUCCESS,
        Ordering::Equal => wc_status::RETRY_EXC_ERR,
        Ordering::Greater => wc_status::WR_FLUSH_ERR,
    };
    let numbered = expected.iter().enumerate();
    let completes = numbered.filter(|(number, one)| one.signaled || *number >= good);
    let all: Vec<_> = completes
        .map(|(number, _)| (number as u64, status(number)))
        .collect();
    let told: Vec<_> = sent.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    prop_assert_eq!(told, all);
    prop_assert_eq!(pair.state(0) == qp_state::ERR, good < expected.len());
    // The last messages may have arrived, and their answers not.
    let received = pair.completions(1);
    let receives = |messages: &[Expected]| {
        messages
            .iter()
            .filter_map(|one| one.receive)
            .collect::<Vec<_>>()
    };
    let (answered, all) = (receives(&expected[..good]), receives(&expected));
    let arrived: Vec<_> = received.iter().map(|cqe| cqe.wr_id).collect();
    prop_assert!(
        arrived.len() >= answered.len() && all.starts_with(&arrived),
        "{:?} arrived of {:?}, and {} were answered",
        arrived,
        all,
        answered.len()
    );
    prop_assert!(failed(&received).is_none(), "{:?}", received);
    let guest = &pair.ends[1].guest;
    for (number, one) in expected.iter().enumerate() {
        let len = one.content.len();
        let there = guest.read(one.to, len + 16);
        let came = one
            .receive
            .is_some_and(|receive| arrived.contains(&receive));
        if number < good || came {
            prop_assert_eq!(&there[..len], &one.content[..], "message {}", number);
        }
        check_key(guest, one, came)?;
        prop_assert_eq!(&there[len..], &[0; 16][..], "beside message {}", number);
    }
    prop_assert!(!pair.ends[0].qp.qp.send_queue().in_progress());
    prop_assert_eq!(
        world.clock().timers,
        [None, None],
        "something is still waited for"
    );
    Ok(())
}

/// A work request that may bring something.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted {
    Read(u32),
    /// With the key that it is brought by invalidated.
    ReadOnce(u32),
    FetchAdd(u64),
    CompareSwap(bool),
    AtomicWrite(u64),
    Flush,
    Write(u32),
    Send(u32),
}

/// Work requests, and whether they have FENCE.
pub(super) fn requests() -> impl Strategy<Value = Vec<(Wanted, bool)>> {
    let length = prop_oneof![3 => 0..3000u32, 1 => 60_000..70_000u32];
    let wanted = prop_oneof![
        length.clone().prop_map(Wanted::Read),
        length.prop_map(Wanted::ReadOnce),
        any::<u64>().prop_map(Wanted::FetchAdd),
        any::<bool>().prop_map(Wanted::CompareSwap),
        any::<u64>().prop_map(Wanted::AtomicWrite),
        Just(Wanted::Flush),
        (0..3000u32).prop_map(Wanted::Write),
        (0..3000u32).prop_map(Wanted::Send),
    ];
    let fenced = (wanted, proptest::bool::weighted(0.2));
    proptest::collection::vec(fenced, 1..40)
}

/// Posts requests from the first end to the second, lets them be carried out, and checks what came
/// of them.
pub(super) fn carry_out(
    requests: &[(Wanted, bool)],
    pair: &mut Pair,
    world: &mut impl World,
) -> Result<(), TestCaseError> {
    const STATIC: u64 = 70_000;
    let secret: Vec<u8> = (0..STATIC).map(|i| (i * 7 + i / 251) as u8).collect();
    let there = pair.ends[1].allocate(STATIC);
    pair.ends[1].guest.write(there, &secret);
    let [counter, swapped, word] = [0; 3].map(|_: u32| pair.ends[1].allocate(8));
    let key = pair.ends[1].guest.key;
    // What the words are, and what is expected of each request: bytes at an end.
    let (mut count, mut swap, mut last) = (0u64, 0u64, 0u64);
    let mut expected = Vec::new();
    let mut opcodes = Vec::new();
    let mut keys = Vec::new();
    for (index, (wanted, fence)) in requests.iter().enumerate() {
        let wr_id = index as u64;
        let mut send = Send {
            wr_id,
            flags: send_flag::SIGNALED | (send_flag::FENCE * u8::from(*fence)),
            rkey: key,
            srqn: pair.ends[1].qp.srqn,
            ..Send::default()
        };
        let mut sink = |pair: &mut Pair, send: &mut Send, bytes: Vec<u8>| {
            let at = pair.ends[0].allocate(bytes.len() as u64);
            // In two parts, so that packets go over the end of one.
            let first = bytes.len() as u32 / 3;
            let guest = &pair.ends[0].guest;
            send.sges = if bytes.len() == 8 {
                vec![guest.sge(at, 8)]
            } else {
                let rest = bytes.len() as u32 - first;
                vec![guest.sge(at, first), guest.sge(at + u64::from(first), rest)]
            };
            expected.push((0, at, bytes));
        };
        let length = match *wanted {
            Wanted::Read(length) | Wanted::ReadOnce(length) => {
                let from = wr_id % 5;
                let length = length.min((STATIC - from) as u32);
                send.opcode = wr_opcode::RDMA_READ;
                send.remote_addr = DATA + there + from;
                let bytes = secret[from as usize..][..length as usize].to_vec();
                sink(pair, &mut send, bytes);
                if matches!(wanted, Wanted::ReadOnce(_)) {
                    send.opcode = wr_opcode::RDMA_READ_WITH_INV;
                    // One part, with the key.
                    let lkey = pair.ends[0].guest.fast_key();
                    let addr = send.sges[0].addr;
                    send.sges = vec![Sge { addr, length, lkey }];
                    keys.push(lkey);
                }
                length
            }
            Wanted::FetchAdd(add) => {
                send.opcode = wr_opcode::ATOMIC_FETCH_AND_ADD;
                send.remote_addr = DATA + counter;
                send.operands = [add, 0];
                sink(pair, &mut send, count.to_le_bytes().to_vec());
                count = count.wrapping_add(add);
                8
            }
            Wanted::CompareSwap(hits) => {
                send.opcode = wr_opcode::ATOMIC_CMP_AND_SWP;
                send.remote_addr = DATA + swapped;
                let compare = if hits { swap } else { !swap };
                send.operands = [compare, swap + 1];
                sink(pair, &mut send, swap.to_le_bytes().to_vec());
                swap += u64::from(hits);
                8
            }
            Wanted::AtomicWrite(value) => {
                send.opcode = wr_opcode::ATOMIC_WRITE;
                send.remote_addr = DATA + word;
                let at = pair.ends[0].allocate(8);
                pair.ends[0].guest.write(at, &value.to_le_bytes());
                send.sges = vec![pair.ends[0].guest.sge(at, 8)];
                last = value;
                0
            }
            Wanted::Flush => {
                send.opcode = wr_opcode::FLUSH;
                send.remote_addr = DATA + there;
                send.operands = [64, u64::from(flush_type::GLOBAL)];
                0
            }
            Wanted::Write(length) | Wanted::Send(length) => {
                let bytes: Vec<u8> = (0..length).map(|i| (i * 3) as u8 ^ index as u8).collect();
                let from = pair.ends[0].allocate(length.into());
                let to = pair.ends[1].allocate(length.into());
                pair.ends[0].guest.write(from, &bytes);
                send.sges = vec![pair.ends[0].guest.sge(from, length)];
                if matches!(wanted, Wanted::Send(_)) {
                    send.opcode = wr_opcode::SEND;
                    pair.post_receive(1, RECEIVES + wr_id, to, length);
                } else {
                    send.opcode = wr_opcode::RDMA_WRITE;
                    send.remote_addr = DATA + to;
                }
                expected.push((1, to, bytes));
                0
            }
        };
        opcodes.push((
            wr_id,
            wc_status::SUCCESS,
            completion_opcode(send.opcode),
            length,
        ));
        pair.post_send(0, &send);
    }
    world.run(pair, 100 * SECOND);
    let done: Vec<_> = pair
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status, cqe.opcode, cqe.byte_len))
        .collect();
    prop_assert_eq!(done, opcodes);
    for (end, at, bytes) in expected {
        prop_assert_eq!(pair.ends[end].guest.read(at, bytes.len()), bytes);
    }
    for key in keys {
        prop_assert!(!pair.ends[0].guest.is_registered(key));
    }
    for (at, value) in [(counter, count), (swapped, swap), (word, last)] {
        prop_assert_eq!(pair.ends[1].guest.read(at, 8), value.to_le_bytes());
    }
    prop_assert!(!pair.ends[0].qp.qp.send_queue().in_progress());
    Ok(())
}

/// Opcodes and lengths of reliable datagrams, and when the receives come that they need, microseconds.
pub(super) fn reliable_datagrams() -> impl Strategy<Value = Vec<(u8, u32, u64)>> {
    let send = prop_oneof![Just(wr_opcode::SEND), Just(wr_opcode::SEND_WITH_IMM)];
    let other = prop_oneof![
        Just(wr_opcode::RDMA_WRITE),
        Just(wr_opcode::RDMA_WRITE_WITH_IMM),
        Just(wr_opcode::RDMA_READ),
    ];
    let len = prop_oneof![0..64u32, 0..10_000u32, 60_000..70_000u32];
    let one = prop_oneof![(send, 0..4097u32), (other, len)];
    let late = prop_oneof![3 => Just(0u64), 1 => 0..3000u64];
    let one = (one, late).prop_map(|((opcode, len), late)| (opcode, len, late));
    proptest::collection::vec(one, 1..16)
}

/// Carries out reliable datagrams between the ends, in both directions, and checks what came of them:
/// each is carried out once.
// D-SRD-001.
pub(super) fn carry_out_reliable_datagrams(
    messages: &[(u8, u32, u64)],
    pair: &mut Pair,
    world: &mut impl World,
) -> Result<(), TestCaseError> {
    /// What a receive is long enough for, bytes.
    const ROOM: u32 = 4096;
    let mut placed = Vec::new();
    let mut receives = [Vec::new(), Vec::new()];
    let mut arrives = [Vec::new(), Vec::new()];
    for (number, (opcode, len, late)) in messages.iter().enumerate() {
        let end = number % 2;
        let mut send = pair.a_reliable_datagram(end, *opcode, number as u64, *len);
        send.imm = number as u32;
        let bytes = content(number, end, *len);
        let here = send.sges[0].addr - DATA;
        let there = send.remote_addr.wrapping_sub(DATA);
        match *opcode {
            wr_opcode::RDMA_READ => {
                pair.ends[1 - end].guest.write(there, &bytes);
                placed.push((end, here, bytes));
            }
            wr_opcode::RDMA_WRITE => {
                pair.ends[end].guest.write(here, &bytes);
                placed.push((1 - end, there, bytes));
            }
            _ => {
                pair.ends[end].guest.write(here, &bytes);
                let at = pair.ends[1 - end].allocate(ROOM.into());
                let receive = Receive {
                    end: 1 - end,
                    wr_id: RECEIVES + number as u64,
                    at,
                    len: ROOM,
                };
                receives[1 - end].push((receive.wr_id, at));
                pair.later.insert((late * 1000, number as u64), receive);
                let with_imm = *opcode != wr_opcode::SEND;
                let imm = with_imm.then_some(number as u32);
                if *opcode == wr_opcode::RDMA_WRITE_WITH_IMM {
                    placed.push((1 - end, there, bytes));
                    arrives[1 - end].push((imm, *len, None));
                } else {
                    arrives[1 - end].push((imm, *len, Some(bytes)));
                }
            }
        }
        pair.post_send(end, &send);
    }
    world.run(pair, 100 * SECOND);
    for end in [0, 1] {
        let (sent, received): (Vec<_>, Vec<_>) =
            pair.completions(end).into_iter().partition(is_send);
        let mut sent: Vec<_> = sent.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        sent.sort_unstable();
        let all = (0..messages.len() as u64).filter(|number| *number as usize % 2 == end);
        let all: Vec<_> = all.map(|number| (number, wc_status::SUCCESS)).collect();
        prop_assert_eq!(sent, all);
        let mut came = Vec::new();
        for cqe in received {
            prop_assert_eq!(cqe.status, wc_status::SUCCESS);
            prop_assert_eq!(cqe.src_qp, pair.ends[1 - end].qp.qp.number);
            let of = receives[end].iter().find(|(wr_id, _)| *wr_id == cqe.wr_id);
            let at = of.unwrap().1;
            let len = cqe.byte_len as usize;
            let moved = cqe.opcode == wc_opcode::RECV;
            let bytes = moved.then(|| pair.ends[end].guest.read(at, len));
            let imm = (cqe.wc_flags & wc_flag::WITH_IMM != 0).then_some(cqe.imm);
            came.push((imm, cqe.byte_len, bytes));
        }
        came.sort_unstable();
        arrives[end].sort_unstable();
        prop_assert!(
            came == arrives[end],
            "what was received is not what was sent"
        );
    }
    for (end, at, bytes) in placed {
        prop_assert!(pair.ends[end].guest.read(at, bytes.len()) == bytes);
        let beside = pair.ends[end].guest.read(at + bytes.len() as u64, 16);
        prop_assert_eq!(beside, [0; 16]);
    }
    for end in &pair.ends {
        prop_assert!(!end.qp.qp.send_queue().in_progress());
    }
    Ok(())
}

/// Reliable datagrams that fail, each by itself, in any order.
// D-SRD-003.
pub(super) fn fail_reliable_datagrams(pair: &mut Pair, world: &mut impl World) {
    pair.post_receive(1, RECEIVES, 0, 5);
    type Change = fn(&mut Send);
    let fail: [(u8, u8, Change); 7] = [
        (wr_opcode::SEND, wc_status::REM_INV_RD_REQ_ERR, |send| {
            send.to.qkey += 1;
        }),
        (wr_opcode::SEND, wc_status::REM_INV_RD_REQ_ERR, |send| {
            send.to.qpn += 1;
        }),
        (wr_opcode::SEND, wc_status::REM_INV_REQ_ERR, |_| {}),
        (wr_opcode::RDMA_WRITE, wc_status::REM_ACCESS_ERR, |send| {
            send.rkey += 1;
        }),
        (wr_opcode::RDMA_READ, wc_status::REM_ACCESS_ERR, |send| {
            send.rkey += 1;
        }),
        (wr_opcode::RDMA_WRITE, wc_status::LOC_PROT_ERR, |send| {
            send.sges[0].lkey += 1;
        }),
        (
            wr_opcode::ATOMIC_FETCH_AND_ADD,
            wc_status::LOC_QP_OP_ERR,
            |_| {},
        ),
    ];
    let mut expected = Vec::new();
    for (wr_id, (opcode, status, change)) in (0..).zip(fail) {
        let mut send = pair.a_reliable_datagram(0, opcode, wr_id, 8);
        change(&mut send);
        pair.post_send(0, &send);
        expected.push((wr_id, status));
    }
    let good = pair.a_reliable_datagram(0, wr_opcode::RDMA_WRITE, 100, 8);
    pair.post_send(0, &good);
    expected.push((100, wc_status::SUCCESS));
    world.run(pair, SECOND);
    let mut told = pair.told();
    told.sort_unstable();
    assert_eq!(told, expected);
    let [receive] = pair.completions(1)[..] else {
        panic!("not one receive");
    };
    assert_eq!(receive.status, wc_status::LOC_LEN_ERR);
    assert_eq!([0, 1].map(|end| pair.state(end)), [qp_state::RTS; 2]);
}
