// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable datagrams over a network that loses, repeats, delays and damages frames, in virtual time.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use vhost_device_rdma_sync::Readers;
use virtio_rdma_spec::verbs::{qp_state, qp_type, wc_status, wr_opcode};

use super::super::frame::{self, Addresses};
use super::super::packet::{Packet, Psn};
use super::super::srd_packet::{AnswerBytes, Data, Kind, Refusal, SrdPacket, ANSWER};
use super::super::tests::{
    clean, fault_settings, loses_all, simulations, Net, Simulation, SEGMENT,
};
use super::flow::{is_newer, new_token};
use super::incoming::{Admission, Incoming};
use super::outgoing::{Outgoing, PATHS};
use super::Flows;
use crate::engine::fixture::{Destination, Send, DATA, ON_HOSTS};
use crate::engine::vm::Congestion;
use crate::fabric::scenario::{
    carry_out_reliable_datagrams, fail_reliable_datagrams, reliable_datagrams, Pair, World,
    RECEIVES, SECOND,
};
use crate::fabric::wire::layer::settings::FaultSettings;
use crate::fabric::wire::port::Port;

fn start() -> Simulation {
    Simulation::of(qp_type::SRD, clean(), |_| {})
}

proptest! {
    #![proptest_config(simulations())]

    // D-SRD-013, D-SRD-014.
    /// Reliable datagrams over a network with any faults: each is carried out once, and its data are
    /// right.
    #[test]
    fn simulated_reliable_datagrams_arrive_once_whatever_the_network_does(
        messages in reliable_datagrams(),
        faults in [fault_settings(), fault_settings()],
    ) {
        let (readers, mut each) = Readers::new(1);
        let mut pair = Pair::of(qp_type::SRD, (&readers, ON_HOSTS), |_| {});
        let mut net = Net::faulty(each.pop().unwrap(), faults, &pair);
        net.explained(|net| carry_out_reliable_datagrams(&messages, &mut pair, net))?;
    }

    /// Whatever a peer sends, with ICRC and addresses right: nothing breaks, and what was not granted
    /// is not written.
    #[test]
    fn any_reliable_datagram_may_come(
        packets in proptest::collection::vec(
            (0..6u8, any::<[u8; 6]>(), 0..300u16, any::<bool>()),
            1..60,
        ),
        answers in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec(any::<u8>(), 0..200)),
            0..20,
        ),
    ) {
        let mut simulation = start();
        let secret = simulation.pair.ends[1].allocate(4096);
        let before = simulation.pair.ends[1].guest.read(secret, 4096);
        // Something is under way that answers may be about.
        let read = simulation.pair.a_reliable_datagram(1, wr_opcode::RDMA_READ, 1, 4096);
        simulation.pair.post_send(1, &read);
        let [first, second] = &simulation.pair.ends;
        let addresses = Addresses {
            source_mac: first.mac(),
            destination_mac: second.mac(),
            source: first.guest.gid,
            destination: second.guest.gid,
            ..Addresses::default()
        };
        let kinds = [
            Kind::Send, Kind::Write, Kind::Read, Kind::Brought, Kind::Nothing, Kind::Failed,
        ];
        let payload = [0xee; 300];
        let mut frames = Vec::new();
        for (kind, small, len, good) in packets {
            let [number, heard, token, message, offset, length] = small.map(u32::from);
            let data = Data {
                kind: kinds[usize::from(kind)],
                solicited: good,
                path: small[0] % 8,
                token: u64::from(token % 3) << 32,
                number,
                heard: heard % 4,
                src_qp: first.qp.qp.number,
                qkey: if good { read.to.qkey } else { 0 },
                message: message % 3,
                length: if good { u32::from(len) } else { length },
                offset: if good { 0 } else { offset },
                immediate: (heard % 2 == 0).then_some(1),
                // Not a key of that VM.
                rkey: second.guest.key ^ 1,
                remote_addr: DATA + secret,
            };
            let packet = SrdPacket::Data(data, &payload[..usize::from(len)]);
            let packet = Packet::srd(second.qp.qp.number, Psn::new(number), packet);
            frames.push(frame::frame(&addresses, &packet));
        }
        for (token_of_flow, bytes) in &answers {
            let flows = &simulation.net.wires[1].flows;
            let token = flows.all.values().next().map_or(1, |flow| flow.token);
            let mut bytes = bytes.clone();
            if *token_of_flow && bytes.len() >= 12 {
                bytes[0] = 1;
                bytes[2..4].fill(0);
                bytes[4..12].copy_from_slice(&token.to_be_bytes());
                bytes.resize(56, 0xaa);
            }
            if let Some(packet) = SrdPacket::read(ANSWER, &bytes, 0) {
                let packet = Packet::srd(0, Psn::default(), packet);
                frames.push(frame::frame(&addresses, &packet));
            }
        }
        for bytes in frames {
            simulation.net.wires[0].out.port.send(0, SEGMENT, [0; 16], &bytes);
        }
        simulation.run(20 * SECOND);
        prop_assert_eq!(simulation.pair.ends[1].guest.read(secret, 4096), before);
        prop_assert_eq!(simulation.pair.state(1), qp_state::RTS);
    }

    // D-SRD-013, D-SRD-016, D-SRD-020.
    /// Both halves of a flow, with a network of four paths between them that lose what they like, and
    /// a receiver that refuses what it likes: all is taken once, and in the end has its answer.
    #[test]
    fn a_flow_gets_everything_across(
        losses in proptest::array::uniform4(0..=40u64),
        (dead, answers_lost) in (proptest::option::of(0..PATHS), 0..40u64),
        refused in prop_oneof![Just(0), 0..80u64],
        delays in proptest::array::uniform4(1..20_000_000u64),
        seed: u64,
    ) {
        const PACKETS: u32 = 2000;
        let mut random = seed | 1;
        let mut chance = |percent: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % 100 < percent
        };
        let mut out = Outgoing::<u32>::new(Congestion::Window);
        let mut incoming = Incoming::new(7);
        // Time, and whether it is an answer; the packet or the answer.
        let mut there = BTreeMap::new();
        let mut back = BTreeMap::new();
        let (mut now, mut next, mut serial) = (0, 0, 0u64);
        let (mut came, mut told) = (BTreeSet::new(), BTreeSet::new());
        let mut again = VecDeque::new();
        let mut on_path = [0u32; PATHS];
        while told.len() < PACKETS as usize {
            prop_assert!(now < 100 * SECOND, "it does not come to an end: {}", told.len());
            loop {
                let sent = out.try_path(now).or_else(|| out.send_lost(now)).or_else(|| {
                    let what = again.front().copied().unwrap_or(next);
                    let more = what < PACKETS;
                    let stamp = more.then(|| out.send(what, now)).flatten()?;
                    if again.pop_front().is_none() {
                        next += 1;
                    }
                    Some((what, stamp))
                });
                let Some((what, stamp)) = sent else {
                    break;
                };
                let path = usize::from(stamp.path);
                on_path[path] += 1;
                if Some(path) != dead && !chance(losses[path]) {
                    serial += 1;
                    there.insert((now + delays[path], serial), (what, stamp));
                }
            }
            let at = [there.keys().next(), back.keys().next()].into_iter().flatten();
            let at = at.map(|(at, _)| *at).chain(out.deadline()).min();
            now = at.unwrap().max(now);
            while let Some(((at, _), (what, stamp))) = there.first_key_value().map(|(k, v)| (*k, *v)) {
                if at > now {
                    break;
                }
                there.pop_first();
                let numbers = (stamp.number, stamp.heard);
                let admission = incoming.arrives(numbers, (stamp.path, stamp.psn), false);
                if admission != Admission::New || !incoming.may_refuse(16) {
                    continue;
                }
                if chance(refused) {
                    incoming.refused(Refusal {
                        number: stamp.number,
                        status: wc_status::RNR_RETRY_EXC_ERR,
                        reason: 0,
                        timer: 0,
                    });
                } else {
                    prop_assert!(came.insert(what), "packet {} is taken twice", what);
                    incoming.took(stamp.number);
                }
            }
            if incoming.owed() != 0 {
                let answer = incoming.answer();
                if !chance(answers_lost) {
                    serial += 1;
                    back.insert((now + 50_000, serial), answer);
                }
            }
            while back.first_key_value().is_some_and(|((at, _), _)| *at <= now) {
                let (_, answer): (_, AnswerBytes) = back.pop_first().unwrap();
                let Some(SrdPacket::Answer(Some(answer))) =
                    SrdPacket::read(ANSWER, answer.bytes(), 0)
                else {
                    panic!("no answer");
                };
                out.answered(&answer, now, &mut |what, refusal| match refusal {
                    None => assert!(told.insert(what)),
                    Some(_) => again.push_back(what),
                });
            }
            prop_assert!(out.expire(now), "given up");
        }
        prop_assert!(out.is_idle());
        prop_assert!(told.iter().all(|what| came.contains(what)));
        // What nothing comes through is not used for long.
        let few = refused == 0 && losses.iter().all(|lost| *lost <= 10);
        if let Some(dead) = dead.filter(|_| few) {
            prop_assert!(on_path[dead] < 200, "{:?}", on_path);
        }
    }
}

#[test]
fn a_reliable_datagram_that_fails_over_the_wire_ends_nothing_else() {
    let Simulation { mut pair, mut net } = start();
    fail_reliable_datagrams(&mut pair, &mut net);
}

// D-SRD-019.
/// Nobody answers: the messages end after a while, and no others do.
#[test]
fn a_destination_that_is_not_there_ends_its_messages_alone() {
    let Simulation { mut pair, mut net } = start();
    let mut send = pair.a_reliable_datagram(0, wr_opcode::SEND, 1, 10);
    send.to = Destination {
        gid: [9; 16],
        mac: [2; 6],
        ..send.to
    };
    pair.post_send(0, &send);
    let write = pair.a_reliable_datagram(0, wr_opcode::RDMA_WRITE, 2, 10_000);
    pair.post_send(0, &write);
    let read = Send {
        to: send.to,
        ..pair.a_reliable_datagram(0, wr_opcode::RDMA_READ, 4, 10_000)
    };
    pair.post_send(0, &read);
    net.run(&mut pair, 3 * SECOND);
    assert_eq!(pair.told(), [(2, wc_status::SUCCESS)]);
    net.run(&mut pair, 10 * SECOND);
    let capture = net.capture();
    let comment = b"not sent: its message ends with RESP_TIMEOUT_ERR (NO_ANSWER)";
    let mut windows = capture.windows(comment.len());
    assert!(windows.any(|bytes| bytes == comment));
    let mut told = pair.told();
    told.sort_unstable();
    assert_eq!(
        told,
        [1, 4].map(|wr_id| (wr_id, wc_status::RESP_TIMEOUT_ERR))
    );
    assert_eq!(pair.state(0), qp_state::RTS);
    // And what is posted then is tried anew.
    pair.post_send(0, &Send { wr_id: 3, ..send });
    net.run(&mut pair, 20 * SECOND);
    assert_eq!(pair.told(), [(3, wc_status::RESP_TIMEOUT_ERR)]);
}

// D-SRD-010, D-SRD-011.
/// The peer has forgotten the flow: what is under way ends, and what follows is carried out.
#[test]
fn a_peer_that_was_restarted_ends_what_is_under_way() {
    let mut simulation = start();
    for wr_id in 0..4 {
        let write = simulation
            .pair
            .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, wr_id, 100);
        simulation.pair.post_send(0, &write);
        if wr_id == 2 {
            simulation.net.wires[1].flows = Flows::default();
        }
        simulation.run((wr_id + 1) * SECOND);
    }
    let (good, aborted) = (wc_status::SUCCESS, wc_status::REM_ABORT_ERR);
    let told = simulation.pair.told();
    assert_eq!(told, [(0, good), (1, good), (2, aborted), (3, good)]);
}

// D-SRD-017.
/// A VM that is stopped keeps its peers waiting for as long as that takes.
#[test]
fn reliable_datagrams_wait_for_a_vm_that_is_stopped() {
    let mut simulation = start();
    let set = |simulation: &Simulation, running| {
        simulation.pair.ends[1].guest.vm.tables_mut().running = running;
    };
    set(&simulation, false);
    for (wr_id, opcode) in [(1, wr_opcode::RDMA_WRITE), (2, wr_opcode::RDMA_READ)] {
        let send = simulation
            .pair
            .a_reliable_datagram(0, opcode, wr_id, 10_000);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(20 * SECOND);
    assert_eq!(simulation.pair.told(), []);
    set(&simulation, true);
    simulation.run(22 * SECOND);
    let mut told = simulation.pair.told();
    told.sort_unstable();
    assert_eq!(told, [1, 2].map(|wr_id| (wr_id, wc_status::SUCCESS)));
}

// D-SRD-005, D-SRD-018.
/// Those that were lost are replaced, so that their flow goes on.
#[test]
fn reliable_datagrams_under_way_end_with_their_queue_pair() {
    let mut simulation = Simulation::of(qp_type::SRD, [loses_all(), clean()[1]], |_| {});
    for wr_id in 0..3 {
        let send = simulation
            .pair
            .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, wr_id, 10_000);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.pair.told(), []);
    simulation.pair.set_state(0, qp_state::ERR);
    simulation.run(10 * SECOND);
    let mut flushed = simulation.pair.told();
    flushed.sort_unstable();
    assert_eq!(
        flushed,
        [0, 1, 2].map(|wr_id| (wr_id, wc_status::WR_FLUSH_ERR))
    );
    simulation.net.set_faults(0, FaultSettings::default());
    simulation.run(12 * SECOND);
    let mut flows = simulation.net.wires[0].flows.all.values();
    assert!(flows.next().unwrap().out.is_idle());
}

// D-SRD-021.
#[test]
fn a_flow_slows_down_once_for_each_window_of_congestion() {
    let mut out = Outgoing::<u32>::new(Congestion::Window);
    let mut incoming = Incoming::new(7);
    let mut windows = Vec::new();
    let (mut now, mut next) = (0, 0);
    for round in 0..6 {
        let mut sent = Vec::new();
        while let Some(stamp) = out.send(next, now) {
            next += 1;
            sent.push(stamp);
        }
        windows.push(sent.len());
        now += 50_000;
        // In some rounds half of them have a mark, told by several answers.
        for (n, stamp) in sent.iter().enumerate() {
            let marked = matches!(round, 2 | 3) && n % 2 == 0;
            incoming.arrives((stamp.number, stamp.heard), (stamp.path, stamp.psn), marked);
            incoming.took(stamp.number);
            let answer = incoming.answer();
            let Some(SrdPacket::Answer(Some(answer))) = SrdPacket::read(ANSWER, answer.bytes(), 0)
            else {
                panic!("no answer");
            };
            out.answered(&answer, now, &mut |_, _| {});
        }
    }
    assert_eq!(windows[..3], [64, 128, 256]);
    // It grows by one for each window then, of which a part was before the mark.
    let near = |window: usize, about: usize| window.abs_diff(about) <= 3;
    assert!(
        near(windows[3], 128) && near(windows[4], 64) && near(windows[5], 65),
        "{windows:?}"
    );
}

// D-SRD-004, D-SRD-015.
/// The key of a READ goes while it is answered: it fails, and brings no more.
#[test]
fn a_read_whose_key_goes_ends_with_that() {
    let mut simulation = start();
    let read = simulation
        .pair
        .a_reliable_datagram(0, wr_opcode::RDMA_READ, 1, 1_000_000);
    simulation.pair.post_send(0, &read);
    let begun = simulation.net.clock.now + 11_000;
    simulation.run(begun);
    let mut tables = simulation.pair.ends[1].guest.vm.tables_mut();
    tables.keys.remove_region(read.rkey).unwrap();
    drop(tables);
    simulation.run(SECOND);
    let told = simulation.pair.told();
    assert_eq!(told, [(1, wc_status::REM_ACCESS_ERR)]);
    assert_eq!(
        [0, 1].map(|end| simulation.pair.state(end)),
        [qp_state::RTS; 2]
    );
}

/// A thousand queue pairs would wait here as these do: those that have no receive keep nobody else.
#[test]
fn a_message_without_a_receive_keeps_no_other_over_the_wire() {
    let mut simulation = start();
    for wr_id in 0..100 {
        let send = simulation
            .pair
            .a_reliable_datagram(0, wr_opcode::SEND, wr_id, 10);
        simulation.pair.post_send(0, &send);
    }
    let write = simulation
        .pair
        .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, 100, 10_000);
    simulation.pair.post_send(0, &write);
    simulation.run(SECOND);
    assert_eq!(simulation.pair.told(), [(100, wc_status::SUCCESS)]);
    for wr_id in 0..100 {
        simulation.pair.post_receive(1, RECEIVES + wr_id, 0, 10);
    }
    simulation.run(5 * SECOND);
    assert_eq!(simulation.pair.told().len(), 100);
}

// D-SRD-005, D-SRD-019.
/// The GID goes from which messages are sent: they end.
#[test]
fn messages_end_when_the_gid_goes_that_they_are_from() {
    let mut simulation = Simulation::of(qp_type::SRD, [loses_all(), clean()[1]], |_| {});
    for wr_id in 0..3 {
        let send = simulation
            .pair
            .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, wr_id, 10_000);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(SECOND);
    simulation.pair.ends[0]
        .guest
        .vm
        .tables_mut()
        .gids
        .fill(None);
    simulation.run(10 * SECOND);
    let mut told = simulation.pair.told();
    told.sort_unstable();
    let error = wc_status::RESP_TIMEOUT_ERR;
    assert_eq!(told, [0, 1, 2].map(|wr_id| (wr_id, error)));
    assert_eq!(simulation.pair.state(0), qp_state::RTS);
    simulation.run(300 * SECOND);
    assert_eq!(simulation.net.wires[0].flows.all.len(), 0);
}

// D-SRD-010.
/// What is of an older flow, or seems to be, changes nothing of the one that there is.
#[test]
fn packets_of_an_older_flow_change_nothing() {
    let mut simulation = start();
    let write = simulation
        .pair
        .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, 1, 100);
    simulation.pair.post_send(0, &write);
    simulation.run(SECOND);
    assert_eq!(simulation.pair.told(), [(1, wc_status::SUCCESS)]);
    let known = |simulation: &Simulation| {
        let mut flows = simulation.net.wires[1].flows.all.values();
        let flow = flows.next().unwrap();
        let token = flow.incoming.as_ref().map_or(0, Incoming::token);
        (token, flow.way, flow.used)
    };
    let before = known(&simulation);
    let [first, second] = &simulation.pair.ends;
    let addresses = Addresses {
        source_mac: [0x66; 6],
        destination_mac: second.mac(),
        source: first.guest.gid,
        destination: second.guest.gid,
        ..Addresses::default()
    };
    let data = Data {
        kind: Kind::Nothing,
        solicited: false,
        path: 0,
        token: before.0 - (1 << 32),
        number: 0,
        heard: 0,
        src_qp: 0,
        qkey: 0,
        message: 0,
        length: 0,
        offset: 0,
        immediate: None,
        rkey: 0,
        remote_addr: 0,
    };
    let packet = Packet::srd(0, Psn::default(), SrdPacket::Data(data, &[]));
    let bytes = frame::frame(&addresses, &packet);
    simulation.net.wires[0]
        .out
        .port
        .send(SECOND, SEGMENT, [0; 16], &bytes);
    simulation.run(2 * SECOND);
    assert_eq!(
        simulation.net.wires[1]
            .out
            .view
            .counters
            .dropped()
            .find(|of| of.0 == "behind"),
        Some(("behind", 1))
    );
    assert_eq!(known(&simulation), before);
}

// D-SRD-010.
/// What is of flows that are not known here is answered, and nothing is kept for it.
#[test]
fn packets_of_unknown_flows_leave_nothing() {
    let mut simulation = start();
    let [first, second] = &simulation.pair.ends;
    for source in 0..10 {
        let mut gid = first.guest.gid;
        gid[14] = source;
        let addresses = Addresses {
            source_mac: first.mac(),
            destination_mac: second.mac(),
            source: gid,
            destination: second.guest.gid,
            ..Addresses::default()
        };
        let data = Data {
            kind: Kind::Nothing,
            solicited: false,
            path: 0,
            token: new_token(0),
            number: 5,
            heard: 1,
            src_qp: 0,
            qkey: 0,
            message: 0,
            length: 0,
            offset: 0,
            immediate: None,
            rkey: 0,
            remote_addr: 0,
        };
        let packet = Packet::srd(0, Psn::default(), SrdPacket::Data(data, &[]));
        let bytes = frame::frame(&addresses, &packet);
        let port = &mut simulation.net.wires[0].out.port;
        port.send(0, SEGMENT, [0; 16], &bytes);
    }
    simulation.run(SECOND);
    let wire = &simulation.net.wires[1];
    let mut dropped = wire.out.view.counters.dropped();
    assert_eq!(dropped.find(|of| of.0 == "state"), Some(("state", 10)));
    assert_eq!(wire.flows.all.len(), 0);
}

/// A VM is reset again and again, and its peers go on: nothing of its earlier lives is left.
#[test]
fn flows_of_earlier_lives_leave_no_timers() {
    let mut simulation = start();
    for life in 1..=5 {
        let write = simulation
            .pair
            .a_reliable_datagram(0, wr_opcode::RDMA_WRITE, life, 100);
        simulation.pair.post_send(0, &write);
        simulation.run(life * SECOND);
        assert_eq!(simulation.pair.told().len(), 1);
        let flows = &simulation.net.wires[1].flows;
        assert!(flows.timers.len() <= flows.all.len());
        let guest = &simulation.pair.ends[1].guest;
        let mut tables = guest.vm.tables_mut();
        tables.clear();
        tables.gids[0] = Some(guest.gid);
        drop(tables);
        if life % 2 == 0 {
            simulation.net.wires[1].flows.forget_destroyed();
        }
    }
}

#[test]
fn tokens_rise() {
    let mut token = new_token(0);
    for _ in 0..1000 {
        let next = new_token(token);
        assert!(is_newer(next, token) && !is_newer(token, next));
        token = next;
    }
}
