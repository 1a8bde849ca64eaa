// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs with a network between them, in virtual time: what requester, responder and fabric make
//! of a network that loses, repeats, delays and damages frames.
use std::sync::Arc;

use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::facts::completion_opcode;
use virtio_rdma_spec::verbs::{
    access, flush_type, mtu, qp_attr, qp_state, send_flag, vendor_err, wc_status, wr_opcode,
    MASK_24,
};

use super::frame::{self, Addresses};
use super::layer::faults::{FaultSettings, Faults};
use super::packet::{Body, Nak, Operands, Packet, Place, Psn, Request, Reth, Syndrome};
use super::port::sim::{Network, SimPort};
use super::port::Port;
use super::{payload_of, Wire};
use crate::engine::fixture::{Guest, Send, DATA};
use crate::engine::queue_pair::Qp;
use crate::engine::BUDGET;
use crate::fabric::scenario::{
    programs, verify, Clock, End, Pair, World, FIRST, RECEIVES, SECOND, TIMEOUT_NANOSECONDS,
};
use crate::fabric::{self, Fabric};

/// IP packets of a port, bytes at most.
const PORT_MTU: usize = 4200;
/// How long a frame takes, nanoseconds.
const LATENCY: u64 = 5_000;

/// The network between two ends, and their time.
struct Net {
    reader: Reader,
    wires: [Wire<Faults<SimPort>>; 2],
    clock: Clock,
}

impl Net {
    fn new(reader: Reader, faults: [FaultSettings; 2], pair: &Pair) -> Self {
        let network = Network::new(LATENCY);
        let wire = |end: usize| {
            let port = network.port(pair.ends[end].mac(), PORT_MTU);
            Wire::new(Faults::new(port, faults[end]))
        };
        Self {
            reader,
            wires: [0, 1].map(wire),
            clock: Clock::default(),
        }
    }
}

impl World for Net {
    fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    fn serve(&mut self, pair: &Pair, end: usize) -> bool {
        let section = self.reader.enter();
        let tables = pair.ends[end].guest.vm.read_in(&section).unwrap();
        let (wire, now) = (&mut self.wires[end], self.clock.now);
        let came = wire.receive(tables, now, 16) != 0;
        let poll = |qp: &Arc<Qp>| fabric::poll(wire, tables, qp, now, BUDGET);
        self.clock.poll(pair, end, poll) || came
    }

    fn next(&self) -> Option<u64> {
        let ports = self.wires.iter();
        ports.filter_map(|wire| wire.port.timer()).min()
    }
}

/// Two ends with a network between them.
struct Simulation {
    pair: Pair,
    net: Net,
}

impl Simulation {
    fn new(faults: [FaultSettings; 2], change: impl Fn(&mut QpAttr)) -> Self {
        let (readers, mut each) = Readers::new(1);
        let pair = Pair::new(&readers, change);
        let net = Net::new(each.pop().unwrap(), faults, &pair);
        Self { pair, net }
    }

    fn run(&mut self, until: u64) {
        self.net.run(&mut self.pair, until);
    }
}

fn fault_settings() -> impl Strategy<Value = FaultSettings> {
    // So that no packet is lost in all attempts of a queue pair.
    let often = || prop_oneof![2 => Just(0u8), 1 => 1u8..20];
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// SENDs and WRITEs over a network with any faults, with receives that come late, and with
    /// errors: every message once, in order, its data right, and completions as verbs say.
    #[test]
    fn messages_arrive_once_and_in_order_whatever_the_network_does(
        program in programs(),
        faults in [fault_settings(), fault_settings()],
    ) {
        let (readers, mut each) = Readers::new(1);
        let mut pair = Pair::new(&readers, |attr| attr.path_mtu = program.path_mtu);
        let mut net = Net::new(each.pop().unwrap(), faults, &pair);
        verify(&program, &mut pair, &mut net)?;
    }

    /// RDMA READs, atomic operations, ATOMIC WRITE and FLUSH among SENDs and WRITEs over a network
    /// with any faults: each is done once, and what it brings is right.
    #[test]
    fn what_is_brought_is_right_whatever_the_network_does(
        requests in proptest::collection::vec(a_request(), 1..40),
        faults in [fault_settings(), fault_settings()],
        path_mtu in mtu::MTU_256..=mtu::MTU_4096,
        max_rd_atomic in 1..5u8,
    ) {
        let mut simulation = Simulation::new(faults, |attr| {
            attr.path_mtu = path_mtu;
            attr.max_rd_atomic = max_rd_atomic;
            attr.max_dest_rd_atomic = 4;
            attr.access_flags |= access::FLUSH_GLOBAL;
        });
        carry_out(&mut simulation, &requests)?;
    }

    /// Whatever a stranger or the peer itself sends, with ICRC and addresses right: nothing breaks,
    /// and what was not granted is not written.
    #[test]
    fn any_packet_may_come(packets in proptest::collection::vec(any_packet(), 1..60)) {
        let mut simulation = Simulation::new(Default::default(), |_| {});
        let secret = simulation.pair.ends[1].allocate(4096);
        let before = simulation.pair.ends[1].guest.read(secret, 4096);
        // So that there is something under way that answers may be about.
        let guest = &simulation.pair.ends[1].guest;
        let send = Send {
            opcode: wr_opcode::SEND,
            sges: vec![guest.sge(secret, 4000)],
            ..Send::default()
        };
        simulation.pair.post_send(1, &send);
        let [first, second] = &mut simulation.pair.ends;
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
                        operands: Operands::None,
                        immediate: 0,
                        payload: &payload[..usize::from(len)],
                    },
                    Err(syndrome) => Body::Acknowledge { syndrome, msn: 0 },
                },
            };
            let mut bytes = Vec::new();
            frame::write(&mut bytes, &addresses, &packet);
            simulation.net.wires[0].port.send(0, &bytes);
        }
        simulation.run(simulation.net.clock.now + 2 * TIMEOUT_NANOSECONDS);
        prop_assert_eq!(simulation.pair.ends[1].guest.read(secret, 4096), before);
    }
}

/// A work request of a program, and whether it has FENCE.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    Read(u32),
    FetchAdd(u64),
    CompareSwap(bool),
    AtomicWrite(u64),
    Flush,
    Write(u32),
    Send(u32),
}

fn a_request() -> impl Strategy<Value = (Wanted, bool)> {
    let length = prop_oneof![3 => 0..3000u32, 1 => 60_000..70_000u32];
    let wanted = prop_oneof![
        length.prop_map(Wanted::Read),
        any::<u64>().prop_map(Wanted::FetchAdd),
        any::<bool>().prop_map(Wanted::CompareSwap),
        any::<u64>().prop_map(Wanted::AtomicWrite),
        Just(Wanted::Flush),
        (0..3000u32).prop_map(Wanted::Write),
        (0..3000u32).prop_map(Wanted::Send),
    ];
    (wanted, proptest::bool::weighted(0.2))
}

/// Posts requests from the first end to the second, lets them be carried out, and checks what came
/// of them.
fn carry_out(
    simulation: &mut Simulation,
    requests: &[(Wanted, bool)],
) -> Result<(), TestCaseError> {
    const STATIC: u64 = 70_000;
    let Simulation { pair, net } = simulation;
    let secret: Vec<u8> = (0..STATIC).map(|i| (i * 7 + i / 251) as u8).collect();
    let there = pair.ends[1].allocate(STATIC);
    pair.ends[1].guest.write(there, &secret);
    let [counter, swapped, word] = [0; 3].map(|_: u32| pair.ends[1].allocate(8));
    let key = pair.ends[1].guest.key;
    // What the words are, and what is expected of each request: bytes at an end.
    let (mut count, mut swap, mut last) = (0u64, 0u64, 0u64);
    let mut expected = Vec::new();
    let mut opcodes = Vec::new();
    for (index, (wanted, fence)) in requests.iter().enumerate() {
        let wr_id = index as u64;
        let mut send = Send {
            wr_id,
            flags: send_flag::SIGNALED | (send_flag::FENCE * u8::from(*fence)),
            rkey: key,
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
            Wanted::Read(length) => {
                let from = wr_id % 5;
                let length = length.min((STATIC - from) as u32);
                send.opcode = wr_opcode::RDMA_READ;
                send.remote_addr = DATA + there + from;
                let bytes = secret[from as usize..][..length as usize].to_vec();
                sink(pair, &mut send, bytes);
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
    net.run(pair, 100 * SECOND);
    let done: Vec<_> = pair
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status, cqe.opcode, cqe.byte_len))
        .collect();
    prop_assert_eq!(done, opcodes);
    for (end, at, bytes) in expected {
        prop_assert_eq!(pair.ends[end].guest.read(at, bytes.len()), bytes);
    }
    for (at, value) in [(counter, count), (swapped, swap), (word, last)] {
        prop_assert_eq!(pair.ends[1].guest.read(at, 8), value.to_le_bytes());
    }
    prop_assert!(!pair.ends[0].qp.qp.send_queue().in_progress());
    Ok(())
}

#[test]
fn a_read_without_a_key_is_refused_and_nothing_comes() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let Simulation { pair, net } = &mut simulation;
    let there = pair.ends[1].allocate(5000);
    let here = pair.ends[0].allocate(5000);
    pair.ends[1].guest.write(there, &[7; 5000]);
    let read = Send {
        opcode: wr_opcode::RDMA_READ,
        wr_id: 1,
        flags: send_flag::SIGNALED,
        remote_addr: DATA + there,
        rkey: pair.ends[1].guest.key ^ 1,
        sges: vec![pair.ends[0].guest.sge(here, 5000)],
        ..Send::default()
    };
    let send = pair.a_send(0, 2, 10);
    pair.post_send(0, &read);
    pair.post_send(0, &send);
    net.run(pair, SECOND);
    let told: Vec<_> = pair
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status))
        .collect();
    let refused = wc_status::REM_ACCESS_ERR;
    assert_eq!(told, [(1, refused), (2, wc_status::WR_FLUSH_ERR)]);
    assert_eq!(pair.ends[0].guest.read(here, 5000), [0; 5000]);
    assert_eq!(pair.state(1), qp_state::ERR);
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
            0x60 => Syndrome::Nak(Nak::Sequence),
            0x61 => Syndrome::Nak(Nak::InvalidRequest),
            0x62 => Syndrome::Nak(Nak::RemoteAccess),
            _ => Syndrome::Nak(Nak::RemoteOperational),
        })
    });
    (psn, any::<bool>(), prop_oneof![request, answer])
}

fn clean() -> [FaultSettings; 2] {
    Default::default()
}

#[test]
fn a_peer_that_is_cut_off_is_given_up_after_all_attempts_and_not_before() {
    let cut = FaultSettings {
        lost: 255,
        in_a_row: u64::MAX,
        ..FaultSettings::default()
    };
    let mut simulation = Simulation::new([cut, clean()[1]], |attr| attr.retry_cnt = 3);
    let send = simulation.pair.a_send(0, 5, 100);
    simulation.pair.post_send(0, &send);
    let waits = 4 * TIMEOUT_NANOSECONDS;
    simulation.run(waits - 1);
    assert_eq!(simulation.pair.completions(0), []);
    simulation.run(waits);
    let [cqe] = simulation.pair.completions(0)[..] else {
        panic!("not one completion");
    };
    let told = (cqe.wr_id, cqe.status, cqe.vendor_err);
    assert_eq!(told, (5, wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER));
    assert_eq!(simulation.pair.ends[0].guest.vm.totals().retries, 4);
    assert_eq!(simulation.pair.state(0), qp_state::ERR);
}

#[test]
fn a_receive_that_never_comes_ends_the_retries() {
    let mut simulation = Simulation::new(clean(), |attr| attr.rnr_retry = 2);
    for wr_id in 0..3 {
        let send = simulation.pair.a_send(0, wr_id, 3000);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(SECOND);
    let statuses: Vec<_> = simulation
        .pair
        .completions(0)
        .iter()
        .map(|cqe| cqe.status)
        .collect();
    let flushed = wc_status::WR_FLUSH_ERR;
    assert_eq!(statuses, [wc_status::RNR_RETRY_EXC_ERR, flushed, flushed]);
    assert_eq!(simulation.pair.ends[0].guest.vm.totals().rnr_naks, 3);
    // The responder has no fault in it.
    assert_eq!(simulation.pair.state(1), qp_state::RTS);
}

#[test]
fn a_queue_that_drains_is_drained_when_everything_has_its_answer() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let drained = |simulation: &Simulation| {
        let events = simulation.pair.ends[0].guest.events.take();
        events
            .iter()
            .any(|(what, _)| *what == event_type::SQ_DRAINED)
    };
    let send = simulation.pair.a_send(0, 1, 5000);
    simulation.pair.post_send(0, &send);
    // Its packets are under way, or wait for a receive.
    simulation.run(LATENCY / 2);
    let mask = qp_attr::STATE | qp_attr::EN_SQD_ASYNC_NOTIFY;
    simulation.pair.modify(
        0,
        mask,
        &QpAttr {
            qp_state: qp_state::SQD,
            en_sqd_async_notify: 1,
            ..QpAttr::default()
        },
    );
    let send = simulation.pair.a_send(0, 2, 10);
    simulation.pair.post_send(0, &send);
    simulation.run(SECOND / 1000);
    assert!(!drained(&simulation));
    assert_eq!(simulation.pair.ends[0].qp.qp.query().sq_draining, 1);
    for wr_id in [1, 2] {
        let at = simulation.pair.ends[1].allocate(5000);
        simulation.pair.post_receive(1, RECEIVES + wr_id, at, 5000);
    }
    simulation.run(SECOND);
    assert!(drained(&simulation));
    assert_eq!(simulation.pair.ends[0].qp.qp.query().sq_draining, 0);
    // What was posted meanwhile waits until the queue goes on.
    assert_eq!(simulation.pair.completions(0).len(), 1);
    simulation.pair.modify(
        0,
        qp_attr::STATE,
        &QpAttr {
            qp_state: qp_state::RTS,
            ..QpAttr::default()
        },
    );
    simulation.run(2 * SECOND);
    assert_eq!(simulation.pair.completions(0).len(), 1);
}

#[test]
fn nothing_of_an_earlier_life_is_left_after_a_reset() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let send = simulation.pair.a_send(0, 1, 5000);
    simulation.pair.post_send(0, &send);
    simulation.run(LATENCY);
    // Packets are on their way, and their message waits for a receive.
    for end in [0, 1] {
        let reset = QpAttr::default();
        simulation.pair.modify(end, qp_attr::STATE, &reset);
        let End { guest, qp, .. } = &mut simulation.pair.ends[end];
        guest.forget_posted(qp);
    }
    simulation.run(SECOND);
    // Other PSNs: what is left of before is none of theirs.
    simulation.pair.connect(|attr: &mut QpAttr| {
        attr.sq_psn ^= 0x1000;
        attr.rq_psn ^= 0x1000;
    });
    let at = simulation.pair.ends[1].allocate(100);
    simulation.pair.post_receive(1, RECEIVES + 7, at, 100);
    let send = simulation.pair.a_send(0, 2, 100);
    simulation.pair.post_send(0, &send);
    simulation.run(2 * SECOND);
    let sent: Vec<_> = simulation
        .pair
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status))
        .collect();
    assert_eq!(sent, [(2, wc_status::SUCCESS)]);
    let received: Vec<_> = simulation
        .pair
        .completions(1)
        .iter()
        .map(|cqe| cqe.byte_len)
        .collect();
    assert_eq!(received, [100]);
}

#[test]
fn a_port_that_is_down_carries_nothing_and_is_waited_for() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let at = simulation.pair.ends[1].allocate(100);
    simulation.pair.post_receive(1, RECEIVES, at, 100);
    let vm = simulation.pair.ends[1].guest.vm.clone();
    simulation.net.wires[1].set_link(&vm, false);
    let send = simulation.pair.a_send(0, 1, 100);
    simulation.pair.post_send(0, &send);
    simulation.run(2 * TIMEOUT_NANOSECONDS);
    assert!(!simulation.net.wires[1].port(&vm).up);
    assert_eq!(simulation.pair.completions(1), []);
    assert!(simulation.net.wires[1].dropped.down > 0);
    simulation.net.wires[1].set_link(&vm, true);
    simulation.run(SECOND);
    assert_eq!(simulation.pair.completions(0).len(), 1);
    assert_eq!(simulation.pair.completions(1).len(), 1);
}

/// A queue that drains may be given another path; what goes on then takes it.
#[test]
fn a_new_path_is_taken() {
    let mut simulation = Simulation::new(clean(), |attr| attr.av.dmac = [3; 6]);
    let at = simulation.pair.ends[1].allocate(100);
    simulation.pair.post_receive(1, RECEIVES, at, 100);
    let send = simulation.pair.a_send(0, 1, 100);
    simulation.pair.post_send(0, &send);
    simulation.run(2 * TIMEOUT_NANOSECONDS);
    assert_eq!(simulation.pair.completions(1), []);
    let state = |qp_state| QpAttr {
        qp_state,
        ..QpAttr::default()
    };
    simulation
        .pair
        .modify(0, qp_attr::STATE, &state(qp_state::SQD));
    for (own, other) in [(0, 1), (1, 0)] {
        let path = simulation.pair.ends[own].qp.qp.query().av;
        let mac = simulation.pair.ends[other].guest.vm.tables().sources[0].mac;
        let attr = QpAttr {
            av: AddressVector { dmac: mac, ..path },
            ..state(qp_state::SQD)
        };
        let other_state = QpAttr {
            av: attr.av,
            ..state(qp_state::RTS)
        };
        if own == 1 {
            simulation
                .pair
                .modify(1, qp_attr::STATE, &state(qp_state::SQD));
        }
        simulation
            .pair
            .modify(own, qp_attr::STATE | qp_attr::AV, &attr);
        simulation.pair.modify(own, qp_attr::STATE, &other_state);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.pair.completions(1).len(), 1);
    assert_eq!(simulation.pair.completions(0).len(), 1);
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
    let at = simulation.pair.ends[1].allocate(100);
    simulation.pair.post_receive(1, RECEIVES, at, 100);
    let [first, second] = &mut simulation.pair.ends;
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
            operands: Operands::None,
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
        simulation.net.wires[0].port.send(0, &bytes);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.net.wires[1].dropped.stranger, 3);
    assert_eq!(simulation.pair.completions(1), []);
    frame::write(&mut bytes, &good, &packet);
    simulation.net.wires[0].port.send(SECOND, &bytes);
    simulation.run(2 * SECOND);
    assert_eq!(simulation.pair.completions(1).len(), 1);
    assert_eq!(simulation.pair.ends[1].guest.read(at, 4), b"here");
}
