// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs with a network between them, in virtual time: what requester, responder and fabric make
//! of a network that loses, repeats, delays and damages frames.
use std::collections::BTreeMap;

use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{
    mtu, qp_attr, qp_state, qp_type, send_flag, vendor_err, wc_flag, wc_opcode, wc_status,
    wr_opcode, MASK_24,
};

use super::frame::{self, Addresses};
use super::layer::faults::{FaultSettings, Faults};
use super::packet::{Body, Packet, Place, Psn, Request, Reth, Syndrome};
use super::port::sim::{Network, SimPort};
use super::port::Port;
use super::{payload_of, Wire};
use crate::engine::fixture::{Guest, Send, TestQp, DATA, ENTRIES};
use crate::engine::send_queue::Polled;
use crate::engine::vm::Schedule;
use crate::engine::BUDGET;
use crate::fabric::{self, Fabric};

/// IP packets of a port, bytes at most.
const PORT_MTU: usize = 4200;
/// How long a frame takes, nanoseconds.
const LATENCY: u64 = 5_000;
/// Time-out code of the queue pairs: 1.05 ms.
const TIMEOUT: u8 = 8;
const TIMEOUT_NANOSECONDS: u64 = 4096 << TIMEOUT;
/// First PSN of each end: it wraps soon.
const FIRST: [u32; 2] = [MASK_24 - 3, 77];

struct End {
    guest: Guest,
    qp: TestQp,
    wire: Wire<Faults<SimPort>>,
    /// When its queue pair is to be polled again.
    timer: Option<u64>,
    /// Where the next buffer is, in the guest's data.
    free: u64,
}

impl End {
    /// Room for `len` bytes, and some that nobody writes.
    fn allocate(&mut self, len: u64) -> u64 {
        let at = self.free;
        self.free += (len + 64).next_multiple_of(64);
        at
    }
}

/// What a test does later.
#[derive(Debug, Clone)]
struct Receive {
    end: usize,
    wr_id: u64,
    at: u64,
    len: u32,
}

struct Simulation {
    reader: Reader,
    ends: [End; 2],
    now: u64,
    later: BTreeMap<(u64, u64), Receive>,
}

impl Simulation {
    fn new(faults: [FaultSettings; 2], change: impl Fn(&mut QpAttr)) -> Self {
        let (readers, mut each) = Readers::new(1);
        let network = Network::new(LATENCY);
        let ends = [1, 2].map(|number| {
            let mut guest = Guest::new(&readers, number);
            let qp = guest.queue_pair(qp_type::RC);
            let mac = guest.vm.tables().sources[0].mac;
            let faults = faults[usize::from(number) - 1];
            let port = Faults::new(network.port(mac, PORT_MTU), faults);
            End {
                guest,
                qp,
                wire: Wire::new(port),
                timer: None,
                free: 0,
            }
        });
        let simulation = Self {
            reader: each.pop().unwrap(),
            ends,
            now: 0,
            later: BTreeMap::new(),
        };
        simulation.connect(&change);
        simulation
    }

    fn connect(&self, change: &impl Fn(&mut QpAttr)) {
        for (own, other) in [(0, 1), (1, 0)] {
            let [own_end, peer] = [&self.ends[own], &self.ends[other]];
            let mac = peer.guest.vm.tables().sources[0].mac;
            let (number, gid) = (peer.qp.qp.number, peer.guest.gid);
            own_end.guest.connect(&own_end.qp, number, gid, |attr| {
                attr.av.dmac = mac;
                attr.timeout = TIMEOUT;
                attr.sq_psn = FIRST[own];
                attr.rq_psn = FIRST[other];
                change(attr);
            });
        }
    }

    /// Lets everything happen until nothing does, or until the time `end`.
    fn run(&mut self, end: u64) {
        for step in 0.. {
            assert!(step < 2_000_000, "it does not come to an end");
            if self.step() {
                continue;
            }
            let timers = self.ends.iter().flat_map(|end| {
                let port = end.wire.port.timer();
                end.timer.into_iter().chain(port)
            });
            let later = self.later.keys().next().map(|(at, _)| *at);
            match timers.chain(later).min() {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
        }
    }

    fn step(&mut self) -> bool {
        let mut any = false;
        while let Some(entry) = self.later.first_entry() {
            if entry.key().0 > self.now {
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
        for end in &mut self.ends {
            if end.timer.is_some_and(|at| at <= self.now) {
                end.timer = None;
                end.guest.run_list.schedule(&end.qp.qp);
            }
            let section = self.reader.enter();
            let tables = end.guest.vm.read_in(&section).unwrap();
            any |= end.wire.receive(tables, self.now, 16) != 0;
            while let Some(qp) = end.guest.run_list.take() {
                any = true;
                match fabric::poll(&mut end.wire, tables, &qp, self.now, BUDGET) {
                    Polled::Idle => end.timer = None,
                    Polled::Again | Polled::Long => {
                        end.guest.run_list.schedule(&qp);
                        // The other end has a turn, too.
                        break;
                    }
                    Polled::Park(until) => end.timer = Some(until),
                }
            }
        }
        any
    }

    fn post_receive(&mut self, end: usize, wr_id: u64, at: u64, len: u32) {
        let End { guest, qp, .. } = &mut self.ends[end];
        // In two pieces, so that messages go over the end of one.
        let first = len / 3;
        let sges = [
            guest.sge(at, first),
            guest.sge(at + u64::from(first), len - first),
        ];
        guest.post_receive(qp, wr_id, &sges);
    }

    fn post_send(&mut self, end: usize, send: &Send) {
        let End { guest, qp, .. } = &mut self.ends[end];
        guest.post_send(qp, send);
    }

    fn completions(&mut self, end: usize) -> Vec<Cqe> {
        self.ends[end].guest.poll_all()
    }

    fn state(&self, end: usize) -> u8 {
        self.ends[end].qp.qp.state()
    }

    fn modify(&self, end: usize, mask: u32, attr: &QpAttr) {
        let End { guest, qp, .. } = &self.ends[end];
        let tables = guest.vm.tables();
        qp.qp.modify(&tables, mask, attr).unwrap();
    }
}

/// A second of virtual time, nanoseconds.
const SECOND: u64 = 1_000_000_000;

const RECEIVES: u64 = 1 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Poison {
    /// The peer's key is none.
    RemoteKey,
    /// Our own key is none.
    LocalKey,
    /// The receive that the message meets is too short.
    ShortReceive,
    /// This fabric does not carry it.
    Opcode,
}

#[derive(Debug, Clone)]
struct Message {
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
struct Program {
    path_mtu: u8,
    messages: Vec<Message>,
    poison: Option<(usize, Poison)>,
    /// Both ends send.
    both: bool,
    faults: [FaultSettings; 2],
}

fn messages() -> impl Strategy<Value = Message> {
    let opcodes = prop_oneof![
        Just(wr_opcode::SEND),
        Just(wr_opcode::SEND_WITH_IMM),
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

fn fault_settings() -> impl Strategy<Value = FaultSettings> {
    let often = || prop_oneof![2 => Just(0u8), 1 => 1u8..40];
    let all = (any::<u64>(), often(), often(), often(), often());
    all.prop_map(|(seed, lost, damaged, repeated, delayed)| FaultSettings {
        seed,
        lost,
        damaged,
        repeated,
        delayed,
        delay: TIMEOUT_NANOSECONDS / 4,
        in_a_row: 2,
    })
}

fn programs() -> impl Strategy<Value = Program> {
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
        [fault_settings(), fault_settings()],
    )
        .prop_map(|(path_mtu, mut messages, poison, both, faults)| {
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
                faults,
            }
        })
}

/// What a message is to become, from `from` to the other end.
struct Expected {
    send: Send,
    content: Vec<u8>,
    /// Where its bytes go, and the number of its receive.
    to: u64,
    receive: Option<u64>,
    signaled: bool,
}

fn content(number: usize, from: usize, len: u32) -> Vec<u8> {
    let byte = |i: u32| (i as usize * 7 + number * 31 + from * 101 + 1) as u8 | 1;
    (0..len).map(byte).collect()
}

/// Posts what a program says for one direction.
fn post(simulation: &mut Simulation, from: usize, program: &Program) -> Vec<Expected> {
    let to = 1 - from;
    let mut expected = Vec::new();
    let mut receives = 0;
    let mut time = 0;
    for (number, message) in program.messages.iter().enumerate() {
        let poison = program.poison.filter(|(at, _)| *at == number);
        let poison = poison.map(|(_, poison)| poison);
        let content = content(number, from, message.len);
        let source = simulation.ends[from].allocate(u64::from(message.len));
        simulation.ends[from].guest.write(source, &content);
        let place = simulation.ends[to].allocate(u64::from(message.len));
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
            simulation
                .later
                .insert((time, receives * 2 + to as u64), receive);
            RECEIVES + receives
        });
        let peer_key = simulation.ends[to].guest.key;
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
            ..Send::default()
        };
        if message.solicited {
            send.flags |= send_flag::SOLICITED;
        }
        if message.inline {
            send.flags |= send_flag::INLINE;
            send.inline.clone_from(&content);
        } else {
            // In pieces, one of them empty.
            let guest = &simulation.ends[from].guest;
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
                send.opcode = wr_opcode::RDMA_READ;
                send.imm = 0;
            }
            Some(Poison::ShortReceive) | None => {}
        }
        simulation.post_send(from, &send);
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
    simulation: &Simulation,
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
        let with_imm = one.send.opcode != wr_opcode::SEND;
        prop_assert_eq!(cqe.wc_flags & wc_flag::WITH_IMM != 0, with_imm);
        prop_assert_eq!(cqe.imm, if with_imm { one.send.imm } else { 0 });
        prop_assert_eq!(cqe.src_qp, simulation.ends[from].qp.qp.number);
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
    let guest = &simulation.ends[1 - from].guest;
    for (number, one) in expected.iter().enumerate() {
        let len = one.content.len();
        let there = guest.read(one.to, len + 16);
        if number < good {
            prop_assert_eq!(&there[..len], &one.content[..], "message {}", number);
        }
        prop_assert_eq!(&there[len..], &[0; 16][..], "beside message {}", number);
    }
    Ok(())
}

fn is_send(cqe: &Cqe) -> bool {
    cqe.wr_id < RECEIVES
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// SENDs and WRITEs over a network with any faults, with receives that come late, and with
    /// errors: every message once, in order, its data right, and completions as verbs say.
    #[test]
    fn messages_arrive_once_and_in_order_whatever_the_network_does(program in programs()) {
        let mut simulation = Simulation::new(program.faults, |attr| {
            attr.path_mtu = program.path_mtu;
        });
        let there = post(&mut simulation, 0, &program);
        let back = program.both.then(|| post(&mut simulation, 1, &program));
        simulation.run(100 * SECOND);
        let (sent, received): (Vec<_>, Vec<_>) =
            simulation.completions(0).into_iter().partition(is_send);
        let (sent_back, received_there): (Vec<_>, Vec<_>) =
            simulation.completions(1).into_iter().partition(is_send);
        check(&program, &simulation, 0, &there, &sent, &received_there)?;
        if let Some(back) = back {
            check(&program, &simulation, 1, &back, &sent_back, &received)?;
        }
        let failed = program.poison.is_some();
        prop_assert_eq!(simulation.state(0) == qp_state::ERR, failed);
        prop_assert_eq!(simulation.ends[0].guest.warnings.all().is_empty(), !failed);
        for end in &simulation.ends {
            prop_assert!(end.timer.is_none(), "something is still waited for");
            prop_assert!(!end.qp.qp.send_queue().in_progress());
        }
    }

    /// Whatever a stranger or the peer itself sends, with ICRC and addresses right: nothing breaks,
    /// and what was not granted is not written.
    #[test]
    fn any_packet_may_come(packets in proptest::collection::vec(any_packet(), 1..60)) {
        let mut simulation = Simulation::new(Default::default(), |_| {});
        let secret = simulation.ends[1].allocate(4096);
        let before = simulation.ends[1].guest.read(secret, 4096);
        // So that there is something under way that answers may be about.
        let guest = &simulation.ends[1].guest;
        let send = Send {
            opcode: wr_opcode::SEND,
            sges: vec![guest.sge(secret, 4000)],
            ..Send::default()
        };
        simulation.post_send(1, &send);
        let [first, second] = &mut simulation.ends;
        let addresses = Addresses {
            source_mac: first.guest.vm.tables().sources[0].mac,
            destination_mac: second.guest.vm.tables().sources[0].mac,
            source: first.guest.gid,
            destination: second.guest.gid,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 1,
        };
        let payload = vec![0xee; 4096];
        for (psn, ack_request, what) in packets {
            let packet = Packet {
                dest_qp: second.qp.qp.number,
                psn: Psn::new(psn),
                ack_request,
                solicited: false,
                body: match what {
                    Ok((opcode, place, len)) => Body::Request {
                        request: Request::at(opcode, place).unwrap(),
                        reth: Reth {
                            addr: DATA + secret,
                            // Not a key of that VM.
                            rkey: second.guest.key ^ 1,
                            length: u32::from(len),
                        },
                        immediate: 0,
                        payload: &payload[..usize::from(len)],
                    },
                    Err(syndrome) => Body::Acknowledge { syndrome, msn: 0 },
                },
            };
            let mut bytes = Vec::new();
            frame::write(&mut bytes, &addresses, &packet);
            first.wire.port.send(0, &bytes);
        }
        simulation.run(simulation.now + 2 * TIMEOUT_NANOSECONDS);
        prop_assert_eq!(simulation.ends[1].guest.read(secret, 4096), before);
    }
}

fn any_packet() -> impl Strategy<Value = (u32, bool, Result<(u8, Place, u16), Syndrome>)> {
    let psn = prop_oneof![
        (0u32..70).prop_map(|n| FIRST[0].wrapping_add(n) & MASK_24),
        (0u32..70).prop_map(|n| FIRST[1] + n),
        0..=MASK_24,
    ];
    let opcode = prop_oneof![
        Just(wr_opcode::SEND),
        Just(wr_opcode::SEND_WITH_INV),
        Just(wr_opcode::RDMA_WRITE),
        Just(wr_opcode::RDMA_WRITE_WITH_IMM),
    ];
    let place = prop_oneof![
        Just(Place::First),
        Just(Place::Middle),
        Just(Place::Last),
        Just(Place::Only),
    ];
    let len = prop_oneof![Just(1024u16), 0u16..2000];
    let request = (opcode, place, len).prop_map(Ok);
    let answers = [0x60, 0x61, 0x62, 0x63, 0x1f, 0x21];
    let answer = proptest::sample::select(answers.to_vec()).prop_map(|byte| {
        Err(match byte {
            0x1f => Syndrome::Ack,
            0x21 => Syndrome::RnrNak(1),
            0x60 => Syndrome::Nak(super::packet::Nak::Sequence),
            0x61 => Syndrome::Nak(super::packet::Nak::InvalidRequest),
            0x62 => Syndrome::Nak(super::packet::Nak::RemoteAccess),
            _ => Syndrome::Nak(super::packet::Nak::RemoteOperational),
        })
    });
    (psn, any::<bool>(), prop_oneof![request, answer])
}

fn clean() -> [FaultSettings; 2] {
    Default::default()
}

fn a_send(simulation: &mut Simulation, end: usize, wr_id: u64, len: u32) -> Send {
    let at = simulation.ends[end].allocate(u64::from(len));
    Send {
        opcode: wr_opcode::SEND,
        flags: send_flag::SIGNALED,
        wr_id,
        sges: vec![simulation.ends[end].guest.sge(at, len)],
        ..Send::default()
    }
}

#[test]
fn a_peer_that_is_cut_off_is_given_up_after_all_attempts_and_not_before() {
    let cut = FaultSettings {
        lost: 255,
        in_a_row: u64::MAX,
        ..FaultSettings::default()
    };
    let mut simulation = Simulation::new([cut, clean()[1]], |attr| attr.retry_cnt = 3);
    let send = a_send(&mut simulation, 0, 5, 100);
    simulation.post_send(0, &send);
    let waits = 4 * TIMEOUT_NANOSECONDS;
    simulation.run(waits - 1);
    assert_eq!(simulation.completions(0), []);
    simulation.run(waits);
    let [cqe] = simulation.completions(0)[..] else {
        panic!("not one completion");
    };
    let told = (cqe.wr_id, cqe.status, cqe.vendor_err);
    assert_eq!(told, (5, wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER));
    assert_eq!(simulation.ends[0].guest.vm.totals().retries, 4);
    assert_eq!(simulation.state(0), qp_state::ERR);
}

#[test]
fn a_receive_that_never_comes_ends_the_retries() {
    let mut simulation = Simulation::new(clean(), |attr| attr.rnr_retry = 2);
    for wr_id in 0..3 {
        let send = a_send(&mut simulation, 0, wr_id, 3000);
        simulation.post_send(0, &send);
    }
    simulation.run(SECOND);
    let statuses: Vec<_> = simulation
        .completions(0)
        .iter()
        .map(|cqe| cqe.status)
        .collect();
    let flushed = wc_status::WR_FLUSH_ERR;
    assert_eq!(statuses, [wc_status::RNR_RETRY_EXC_ERR, flushed, flushed]);
    assert_eq!(simulation.ends[0].guest.vm.totals().rnr_naks, 3);
    // The responder has no fault in it.
    assert_eq!(simulation.state(1), qp_state::RTS);
}

#[test]
fn a_queue_that_drains_is_drained_when_everything_has_its_answer() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let drained = |simulation: &Simulation| {
        let events = simulation.ends[0].guest.events.all();
        events
            .iter()
            .any(|(what, _)| *what == event_type::SQ_DRAINED)
    };
    let send = a_send(&mut simulation, 0, 1, 5000);
    simulation.post_send(0, &send);
    // Its packets are under way, or wait for a receive.
    simulation.run(LATENCY / 2);
    let mask = qp_attr::STATE | qp_attr::EN_SQD_ASYNC_NOTIFY;
    simulation.modify(
        0,
        mask,
        &QpAttr {
            qp_state: qp_state::SQD,
            en_sqd_async_notify: 1,
            ..QpAttr::default()
        },
    );
    let send = a_send(&mut simulation, 0, 2, 10);
    simulation.post_send(0, &send);
    simulation.run(SECOND / 1000);
    assert!(!drained(&simulation));
    assert_eq!(simulation.ends[0].qp.qp.query().sq_draining, 1);
    for wr_id in [1, 2] {
        let at = simulation.ends[1].allocate(5000);
        simulation.post_receive(1, RECEIVES + wr_id, at, 5000);
    }
    simulation.run(SECOND);
    assert!(drained(&simulation));
    assert_eq!(simulation.ends[0].qp.qp.query().sq_draining, 0);
    // What was posted meanwhile waits until the queue goes on.
    assert_eq!(simulation.completions(0).len(), 1);
    simulation.modify(
        0,
        qp_attr::STATE,
        &QpAttr {
            qp_state: qp_state::RTS,
            ..QpAttr::default()
        },
    );
    simulation.run(2 * SECOND);
    assert_eq!(simulation.completions(0).len(), 1);
}

#[test]
fn nothing_of_an_earlier_life_is_left_after_a_reset() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let send = a_send(&mut simulation, 0, 1, 5000);
    simulation.post_send(0, &send);
    simulation.run(LATENCY);
    // Packets are on their way, and their message waits for a receive.
    for end in [0, 1] {
        let reset = QpAttr::default();
        simulation.modify(end, qp_attr::STATE, &reset);
        let End { guest, qp, .. } = &mut simulation.ends[end];
        guest.forget_posted(qp);
    }
    simulation.run(SECOND);
    // Other PSNs: what is left of before is none of theirs.
    simulation.connect(&|attr: &mut QpAttr| {
        attr.sq_psn ^= 0x1000;
        attr.rq_psn ^= 0x1000;
    });
    let at = simulation.ends[1].allocate(100);
    simulation.post_receive(1, RECEIVES + 7, at, 100);
    let send = a_send(&mut simulation, 0, 2, 100);
    simulation.post_send(0, &send);
    simulation.run(2 * SECOND);
    let sent: Vec<_> = simulation
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status))
        .collect();
    assert_eq!(sent, [(2, wc_status::SUCCESS)]);
    let received: Vec<_> = simulation
        .completions(1)
        .iter()
        .map(|cqe| cqe.byte_len)
        .collect();
    assert_eq!(received, [100]);
}

#[test]
fn a_port_that_is_down_carries_nothing_and_is_waited_for() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let at = simulation.ends[1].allocate(100);
    simulation.post_receive(1, RECEIVES, at, 100);
    let vm = simulation.ends[1].guest.vm.clone();
    simulation.ends[1].wire.set_link(&vm, false);
    let send = a_send(&mut simulation, 0, 1, 100);
    simulation.post_send(0, &send);
    simulation.run(2 * TIMEOUT_NANOSECONDS);
    assert!(!simulation.ends[1].wire.port(&vm).up);
    assert_eq!(simulation.completions(1), []);
    assert!(simulation.ends[1].wire.dropped.down > 0);
    simulation.ends[1].wire.set_link(&vm, true);
    simulation.run(SECOND);
    assert_eq!(simulation.completions(0).len(), 1);
    assert_eq!(simulation.completions(1).len(), 1);
}

/// A queue that drains may be given another path; what goes on then takes it.
#[test]
fn a_new_path_is_taken() {
    let mut simulation = Simulation::new(clean(), |attr| attr.av.dmac = [3; 6]);
    let at = simulation.ends[1].allocate(100);
    simulation.post_receive(1, RECEIVES, at, 100);
    let send = a_send(&mut simulation, 0, 1, 100);
    simulation.post_send(0, &send);
    simulation.run(2 * TIMEOUT_NANOSECONDS);
    assert_eq!(simulation.completions(1), []);
    let state = |qp_state| QpAttr {
        qp_state,
        ..QpAttr::default()
    };
    simulation.modify(0, qp_attr::STATE, &state(qp_state::SQD));
    for (own, other) in [(0, 1), (1, 0)] {
        let path = simulation.ends[own].qp.qp.query().av;
        let mac = simulation.ends[other].guest.vm.tables().sources[0].mac;
        let attr = QpAttr {
            av: AddressVector { dmac: mac, ..path },
            ..state(qp_state::SQD)
        };
        let other_state = QpAttr {
            av: attr.av,
            ..state(qp_state::RTS)
        };
        if own == 1 {
            simulation.modify(1, qp_attr::STATE, &state(qp_state::SQD));
        }
        simulation.modify(own, qp_attr::STATE | qp_attr::AV, &attr);
        simulation.modify(own, qp_attr::STATE, &other_state);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.completions(1).len(), 1);
    assert_eq!(simulation.completions(0).len(), 1);
}

#[test]
fn a_port_has_the_largest_path_mtu_that_fits() {
    let (readers, _) = Readers::new(1);
    let guest = Guest::new(&readers, 1);
    for (ip, payload) in [
        (1500, 1024),
        (4200, 4096),
        (9000, 4096),
        (400, 256),
        (60, 256),
    ] {
        let wire = Wire::new(Network::new(0).port([1; 6], ip));
        let port = wire.port(&guest.vm);
        assert_eq!(payload_of(port.active_mtu), payload, "{ip}");
        assert!(port.up);
    }
}

#[test]
fn a_stranger_does_not_reach_a_queue_pair() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let at = simulation.ends[1].allocate(100);
    simulation.post_receive(1, RECEIVES, at, 100);
    let [first, second] = &mut simulation.ends;
    let good = Addresses {
        source_mac: [9; 6],
        destination_mac: second.guest.vm.tables().sources[0].mac,
        source: first.guest.gid,
        destination: second.guest.gid,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 0,
    };
    let packet = Packet {
        dest_qp: second.qp.qp.number,
        psn: Psn::new(FIRST[0]),
        ack_request: true,
        solicited: false,
        body: Body::Request {
            request: Request::at(wr_opcode::SEND, Place::Only).unwrap(),
            reth: Reth::default(),
            immediate: 0,
            payload: b"here",
        },
    };
    let mut other = good;
    other.source[15] ^= 8;
    let mut elsewhere = good;
    elsewhere.destination[15] ^= 8;
    let mut bytes = Vec::new();
    let wrong_number = Packet {
        dest_qp: packet.dest_qp ^ 1,
        ..packet
    };
    for (addresses, packet) in [(other, packet), (elsewhere, packet), (good, wrong_number)] {
        frame::write(&mut bytes, &addresses, &packet);
        first.wire.port.send(0, &bytes);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.ends[1].wire.dropped.stranger, 3);
    assert_eq!(simulation.completions(1), []);
    let first = &mut simulation.ends[0];
    frame::write(&mut bytes, &good, &packet);
    first.wire.port.send(SECOND, &bytes);
    simulation.run(2 * SECOND);
    assert_eq!(simulation.completions(1).len(), 1);
    assert_eq!(simulation.ends[1].guest.read(at, 4), b"here");
}
