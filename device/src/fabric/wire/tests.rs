// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs with a network between them, in virtual time: what requester, responder and fabric make
//! of a network that loses, repeats, delays and damages frames.
use std::sync::Arc;

use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::verbs::{qp_attr, qp_state, vendor_err, wc_status, wr_opcode, MASK_24};

use super::frame::{self, Addresses};
use super::layer::faults::{FaultSettings, Faults};
use super::packet::{Body, Nak, Packet, Place, Psn, Request, Reth, Syndrome};
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
