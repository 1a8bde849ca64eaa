// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs with a network between them, in virtual time: what requester, responder and fabric make
//! of a network that loses, repeats, delays and damages frames.
use std::net::UdpSocket;
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::verbs::{
    mtu, qp_attr, qp_state, qp_type, send_flag, vendor_err, wc_flag, wc_opcode, wc_status,
    wr_opcode, MASK_24,
};

use super::capture::{CaptureFile, Captured};
use super::egress::View;
use super::frame::{self, Addresses, Vlan};
use super::icrc::icrc;
use super::layer::faults::Faults;
use super::layer::settings::{Chance, FaultSettings};
use super::packet::{
    Body, GapList, Nak, Packet, Place, Psn, Request, RequestPacket, Reth, Service, Syndrome,
};
use super::port::sim::{Network, SimPort};
use super::port::uplinks::{UplinkPort, Uplinks};
use super::port::vxlan::{Directory, Tunnel};
use super::port::{Direction, Port};
use super::recipients::{Arriving, Destination as To, Recipients};
use super::{path_mtu_within, Wire, MOST_WAIT, MOST_WAITING_FOR_ONE};
use crate::engine::fixture::{Destination, Guest, Send, DATA, ON_HOSTS, QKEY};
use crate::engine::message::{is_multicast, GRH};
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::vm::{Congestion, PacketEvent, Segment, Uplink, Vm};
use crate::engine::{payload_of, Budget, BUDGET};
use crate::fabric::local::lookup_cache::LookupCache;
use crate::fabric::local::tests::{Never, Process};
use crate::fabric::local::LocalCarrier;
use crate::fabric::registry::Registry;
use crate::fabric::scenario::{
    carry_out, content, programs, requests, verify, verify_cut, Clock, End, Pair, Program, Wanted,
    World, FIRST, RECEIVES, SECOND, TIMEOUT_NANOSECONDS,
};
use crate::fabric::{self, Fabric};
use crate::footprint::Share;
use crate::limits::GSI_QPN;
use crate::verbs::cq::NO_VLAN;

/// IP packets of a port, bytes at most.
const PORT_MTU: usize = 4200;
/// How long a frame takes, nanoseconds.
const LATENCY: u64 = 5_000;
/// The segment of both ends.
pub(super) const SEGMENT: Segment = Segment::Vxlan(7);
/// The time-out of the queue pairs.
const TIMEOUT: Duration = Duration::from_nanos(TIMEOUT_NANOSECONDS);

/// The only VM behind a port.
struct Only<'a>(&'a Tables);

impl Recipients for Only<'_> {
    fn visit(&mut self, to: To, _: Arriving, visit: &mut dyn FnMut(&Tables)) -> bool {
        if is_multicast(&to.gid) || self.0.gids.contains(&Some(to.gid)) {
            visit(self.0);
        }
        true
    }

    fn visit_vm(&mut self, _: &Vm, visit: &mut dyn FnMut(&Tables)) -> bool {
        visit(self.0);
        true
    }
}

/// The network between two ends, and their time.
pub(in super::super) struct Net {
    reader: Reader,
    pub(super) wires: [Wire<Faults<SimPort>>; 2],
    pub(super) clock: Clock,
    /// Of each process: nobody else is in it.
    registry: Registry,
}

impl Net {
    /// Without faults.
    pub(in super::super) fn clean(reader: Reader, pair: &Pair) -> Self {
        Self::new(reader, clean(), pair)
    }

    /// How many frames an end has dropped for a reason.
    fn dropped(&self, end: usize, reason: &str) -> u64 {
        let mut counts = self.wires[end].out.view.counters.dropped();
        let count = counts.find_map(|(name, count)| (name == reason).then_some(count));
        count.unwrap()
    }

    /// What faults did to the frames of an end, by the name of the count.
    fn suffered(&self, end: usize, name: &str) -> u64 {
        let plan = self.wires[end].out.view.faults.list();
        let mut counts = plan[0].counts.list().into_iter();
        let count = counts.find_map(|(known, count)| (known == name).then_some(count));
        count.unwrap()
    }

    /// From now on an end's frames have these faults.
    pub(super) fn set_faults(&self, end: usize, faults: FaultSettings) {
        let plan = &self.wires[end].out.view.faults;
        let (station, direction) = (plan.list()[0].station, plan.list()[0].direction);
        plan.set(station, direction, Some(faults));
    }

    /// Whether the ends ask each other what is missing.
    fn set_asking(&mut self, asks: bool) {
        for wire in &mut self.wires {
            wire.asks = asks;
        }
    }

    /// Whether the ends keep what comes too early for each other without being asked.
    fn set_keeping(&mut self, keeps: bool) {
        for wire in &mut self.wires {
            wire.keeps_unasked = keeps;
        }
    }

    /// What both ends have sent and received.
    pub(super) fn capture(&self) -> Vec<u8> {
        let taken = |end: usize| self.wires[end].out.view.capture.take().0;
        file([("first ", taken(0)), ("second ", taken(1))])
    }

    /// Runs a simulation. Where it fails or panics, what was sent and received goes to a file, whose name
    /// is added.
    pub(super) fn explained(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        let result = panic::catch_unwind(AssertUnwindSafe(|| run(self)));
        let result = result.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Err(TestCaseError::fail(text.unwrap_or("panic").to_owned()))
        });
        result.map_err(|error| {
            let thread = thread::current();
            let (test, process) = (thread.name().unwrap_or_default(), process::id());
            let test = test.rsplit("::").next().unwrap_or_default();
            let path = std::env::temp_dir().join(format!("{test}-{process}.pcapng"));
            match std::fs::write(&path, self.capture()) {
                Ok(()) => TestCaseError::fail(format!("{error}\ncapture: {}", path.display())),
                Err(_) => error,
            }
        })
    }

    /// With faults of the frames that each end sends.
    pub(in super::super) fn faulty(
        reader: Reader,
        faults: [FaultSettings; 2],
        pair: &Pair,
    ) -> Self {
        Self::new(reader, faults, pair)
    }

    fn new(reader: Reader, faults: [FaultSettings; 2], pair: &Pair) -> Self {
        let network = Network::new(LATENCY);
        let wire = |end: usize| {
            let mac = pair.ends[end].mac();
            let view = Arc::<View>::default();
            let station = (SEGMENT, mac);
            view.faults.set(station, Direction::Out, Some(faults[end]));
            let port = Faults::new(network.port(mac, PORT_MTU), view.faults.clone());
            let wire = Wire::new(port, view, 0);
            wire.out.view.capture.set(true);
            wire
        };
        Self {
            reader,
            wires: [0, 1].map(wire),
            clock: Clock::default(),
            registry: Registry::default(),
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
        let came = wire.receive(now, 16, &mut Only(tables)) != 0;
        let poll = |qp: &Arc<Qp>| {
            if qp.qp_type != qp_type::SRD {
                return fabric::poll(wire, tables, qp, now, BUDGET);
            }
            let mut carrier = LocalCarrier {
                cache: &mut LookupCache::new(&section, &self.registry, &[]),
                busy_poll: &mut Never,
                done: Budget::NONE,
                elsewhere: Some(&mut *wire),
                observer: None,
            };
            fabric::poll(&mut carrier, tables, qp, now, BUDGET)
        };
        self.clock.poll(pair, end, poll) || came
    }

    fn next(&self) -> Option<u64> {
        self.wires.iter().filter_map(Wire::timer).min()
    }
}

/// Two ends with a network between them.
pub(super) struct Simulation {
    pub pair: Pair,
    pub net: Net,
}

impl Simulation {
    fn new(faults: [FaultSettings; 2], change: impl Fn(&mut QpAttr)) -> Self {
        Self::of(qp_type::RC, faults, change)
    }

    pub(super) fn of(
        qp_type: u8,
        faults: [FaultSettings; 2],
        change: impl Fn(&mut QpAttr),
    ) -> Self {
        let (readers, mut each) = Readers::new(1);
        let pair = Pair::of(qp_type, (&readers, ON_HOSTS), change);
        let net = Net::new(each.pop().unwrap(), faults, &pair);
        Self { pair, net }
    }

    pub(super) fn run(&mut self, until: u64) {
        self.net.run(&mut self.pair, until);
    }

    /// Statuses of the completions of the first end.
    fn statuses(&mut self) -> Vec<u8> {
        let cqes = self.pair.completions(0);
        cqes.iter().map(|cqe| cqe.status).collect()
    }
}

pub(super) fn fault_settings() -> impl Strategy<Value = FaultSettings> {
    let often = || prop_oneof![1 => Just(0), 1 => 1u32..234_000].prop_map(Chance::millionths);
    let all = (any::<u64>(), often(), often(), often(), often(), often());
    let delay = prop_oneof![1 => Just((0, 0)), 1 => (0..60u64, 0..60u64)];
    let more = (prop_oneof![1 => Just(1), 1 => 2..4u32], delay);
    (all, more).prop_map(|(all, (burst, (delay, varies)))| {
        let (seed, loss, damage, duplicate, reorder, mark) = all;
        let delay = Duration::from_micros(delay);
        FaultSettings {
            seed,
            loss,
            burst,
            damage,
            duplicate,
            mark,
            reorder,
            reorder_time: TIMEOUT / 4,
            delay: (delay, delay + Duration::from_micros(varies)),
            // Both directions together lose less than there are attempts in that time, of which each may wait
            // for four times as long: none is the last.
            limit: Some((3, 4 * 8 * TIMEOUT)),
            ..FaultSettings::default()
        }
    })
}

/// Two ends of a type, with a network between them. They ask each other what is missing, or keep what
/// comes too early without that, or do neither.
fn between(pair: &Pair, reader: &mut Vec<Reader>, faults: [FaultSettings; 2]) -> Net {
    let mut net = Net::new(reader.pop().unwrap(), faults, pair);
    net.set_asking(faults[0].seed % 3 == 0);
    net.set_keeping(faults[0].seed % 3 == 1);
    net
}

/// Simulations: `PROPTEST_CASES` says how many.
pub(in super::super) fn simulations() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig {
        cases: if default.cases == 256 {
            100
        } else {
            default.cases
        },
        ..default
    }
}

proptest! {
    #![proptest_config(simulations())]

    // D-WIRE-003.
    /// SENDs and WRITEs over a network with any faults, with receives that come late, and with
    /// errors: every message once, in order, its data right, and completions as verbs say.
    #[test]
    fn simulated_messages_arrive_once_and_in_order_whatever_the_network_does(
        program in programs(),
        faults in [fault_settings(), fault_settings()],
    ) {
        let (readers, mut reader) = Readers::new(1);
        let mut pair = Pair::of(qp_type::RC, (&readers, ON_HOSTS), |attr| attr.path_mtu = program.path_mtu);
        let mut net = between(&pair, &mut reader, faults);
        net.explained(|net| verify(&program, &mut pair, net))?;
    }

    /// The same by XRC.
    #[test]
    fn simulated_messages_to_shared_receive_queues_arrive_once_and_in_order(
        program in programs(),
        faults in [fault_settings(), fault_settings()],
    ) {
        let program = Program { both: false, ..program };
        let (readers, mut reader) = Readers::new(1);
        let of = qp_type::XRC_INI;
        let mut pair = Pair::of(of, (&readers, ON_HOSTS), |attr| attr.path_mtu = program.path_mtu);
        let mut net = between(&pair, &mut reader, faults);
        net.explained(|net| verify(&program, &mut pair, net))?;
    }

    // D-WIRE-004.
    /// The network is cut in two, for good, at any time.
    #[test]
    fn simulated_messages_end_when_their_attempts_do_where_the_network_is_cut(
        program in programs(),
        at in 0..4000u64,
        retry_cnt in 0..8u8,
        xrc: bool,
    ) {
        let program = Program { both: false, poison: None, ..program };
        let of = if xrc { qp_type::XRC_INI } else { qp_type::RC };
        let (readers, mut reader) = Readers::new(1);
        let mut pair = Pair::of(of, (&readers, ON_HOSTS), |attr| {
            attr.path_mtu = program.path_mtu;
            attr.retry_cnt = retry_cnt;
        });
        let mut net = between(&pair, &mut reader, clean());
        // Each attempt waits for twice as long as the one before, up to four times what is set.
        let waits: u64 = (0..=retry_cnt).map(|attempt| 1 << attempt.min(2)).sum();
        let cut = |net: &mut Net| [0, 1].map(|end| net.set_faults(end, loses_all()));
        net.explained(|net| {
            let waits = waits * TIMEOUT_NANOSECONDS;
            verify_cut(&program, &mut pair, net, at * 1000, waits, |net| { cut(net); })
        })?;
    }

    /// RDMA READs, atomic operations, ATOMIC WRITE and FLUSH among SENDs and WRITEs over a network
    /// with any faults: each is done once, and what it brings is right.
    #[test]
    fn simulated_requests_bring_what_is_right_whatever_the_network_does(
        requests in requests(),
        faults in [fault_settings(), fault_settings()],
        (path_mtu, max_rd_atomic, xrc) in (mtu::MTU_256..=mtu::MTU_4096, 1..5u8, any::<bool>()),
    ) {
        let (readers, mut reader) = Readers::new(1);
        let of = if xrc { qp_type::XRC_INI } else { qp_type::RC };
        let mut pair = Pair::for_requests(of, (&readers, ON_HOSTS), path_mtu, max_rd_atomic);
        let mut net = between(&pair, &mut reader, faults);
        net.explained(|net| carry_out(&requests, &mut pair, net))?;
    }

    // D-WIRE-005.
    /// UC over a network with any faults: messages arrive whole, in order, at most once; their
    /// sender is never told.
    #[test]
    fn simulated_uc_messages_arrive_whole_and_in_order_or_not_at_all(
        lens in proptest::collection::vec(0..9000u32, 1..24),
        faults in [fault_settings(), fault_settings()],
        path_mtu in mtu::MTU_256..=mtu::MTU_4096,
    ) {
        let (readers, mut reader) = Readers::new(1);
        let mut pair = Pair::of(qp_type::UC, (&readers, ON_HOSTS), |attr| attr.path_mtu = path_mtu);
        let mut net = between(&pair, &mut reader, faults);
        net.explained(|net| {
            let places = post_numbered(&mut pair, &lens, |_| {});
            net.run(&mut pair, SECOND);
            let arrived = check_numbered(&mut pair, &lens, &places, 0)?;
            let ascending = arrived.windows(2).all(|two| two[0] < two[1]);
            prop_assert!(ascending, "{:?}", arrived);
            if faults.iter().all(|faults| *faults == FaultSettings { seed: faults.seed, ..no_faults() }) {
                prop_assert_eq!(arrived.len(), lens.len());
            }
            Ok(())
        })?;
    }

    /// Datagrams over a network with any faults: what arrives is what was sent.
    #[test]
    fn simulated_datagrams_arrive_as_they_were_sent(
        lens in proptest::collection::vec(0..4097u32, 1..24),
        faults in [fault_settings(), fault_settings()],
    ) {
        let (readers, mut reader) = Readers::new(1);
        let mut pair = Pair::of(qp_type::UD, (&readers, ON_HOSTS), |_| {});
        let mut net = between(&pair, &mut reader, faults);
        let to = destination(&pair);
        net.explained(|net| {
            let places = post_numbered(&mut pair, &lens, |send| send.to = to);
            net.run(&mut pair, SECOND);
            let arrived = check_numbered(&mut pair, &lens, &places, GRH as u32)?;
            let lost: u64 = [0, 1].map(|end| net.suffered(end, "lost")).iter().sum();
            let damaged: u64 = [0, 1].map(|end| net.suffered(end, "damaged")).iter().sum();
            prop_assert!(arrived.len() as u64 + lost + damaged >= lens.len() as u64);
            Ok(())
        })?;
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
            vlan: None,
        };
        let payload = vec![0xee; 4096];
        for (psn, ack_request, what) in packets {
            let mut list = GapList::default();
            let packet = Packet {
                service: match what {
                    Anything::Query(_) | Anything::Report(..) => Service::Ours,
                    _ => Service::Rc,
                },
                dest_qp: second.qp.qp.number,
                psn: Psn::new(psn),
                ack_request,
                solicited: false,
                body: match what {
                    Anything::Query(number) => Body::Query { number },
                    Anything::Report(number, gaps) => {
                        for (first, packets) in gaps {
                            list.push(Psn::new(first), packets);
                        }
                        let gaps = list.gaps();
                        Body::Report { number, gaps }
                    }
                    Anything::Request(opcode, place, len) => Body::Request(RequestPacket {
                        reth: Reth {
                            addr: DATA + secret,
                            // Not a key of that VM.
                            rkey: second.guest.key ^ 1,
                            length: u32::from(len),
                        },
                        ..RequestPacket::new(
                            Request::at(Service::Rc, opcode, place).unwrap(),
                            &payload[..usize::from(len)],
                        )
                    }),
                    Anything::Answer(syndrome) => Body::Acknowledge { syndrome, msn: 0 },
                },
            };
            let bytes = frame::frame(&addresses, &packet);
            simulation.net.wires[0].out.port.send(0, SEGMENT, [0; 16], &bytes);
        }
        simulation.run(simulation.net.clock.now + 2 * TIMEOUT_NANOSECONDS);
        prop_assert_eq!(simulation.pair.ends[1].guest.read(secret, 4096), before);
    }
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

// D-WIRE-003.
/// Its requester may have what it asked for, and the key may be invalid by then: the peer invalidates it
/// when it is done.
#[test]
fn a_read_that_comes_again_without_its_key_does_no_harm() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let Simulation { pair, net } = &mut simulation;
    let there = pair.ends[1].allocate(5000);
    let here = pair.ends[0].allocate(5000);
    pair.ends[1].guest.write(there, &[7; 5000]);
    let rkey = pair.ends[1].guest.key;
    let read = Send {
        opcode: wr_opcode::RDMA_READ,
        flags: send_flag::SIGNALED,
        remote_addr: DATA + there,
        rkey,
        sges: vec![pair.ends[0].guest.sge(here, 5000)],
        ..Send::default()
    };
    pair.post_send(0, &read);
    net.run(pair, SECOND);
    assert_eq!(pair.completions(0)[0].status, wc_status::SUCCESS);
    let mut tables = pair.ends[1].guest.vm.tables_mut();
    tables.keys.remove_region(rkey).unwrap();
    drop(tables);
    let request = Request::at(Service::Rc, wr_opcode::RDMA_READ, Place::Only).unwrap();
    let of = |end: &End| end.guest.vm.tables().sources[0].mac;
    let again = Packet {
        service: Service::Rc,
        dest_qp: pair.ends[1].qp.qp.number,
        psn: Psn::new(FIRST[0]),
        ack_request: true,
        solicited: false,
        body: Body::Request(RequestPacket {
            reth: Reth {
                addr: DATA + there,
                rkey,
                length: 5000,
            },
            ..RequestPacket::new(request, &[])
        }),
    };
    let addresses = Addresses {
        source_mac: of(&pair.ends[0]),
        destination_mac: of(&pair.ends[1]),
        source: pair.ends[0].guest.gid,
        destination: pair.ends[1].guest.gid,
        ..Addresses::default()
    };
    let bytes = frame::frame(&addresses, &again);
    let sent = net.counted(1, "sent_frames");
    net.wires[0].out.port.send(SECOND, SEGMENT, [0; 16], &bytes);
    net.run(pair, 2 * SECOND);
    assert_eq!(net.counted(1, "answered_again"), 1);
    assert_eq!(net.counted(1, "sent_frames"), sent);
    assert_eq!(pair.state(1), qp_state::RTS);
}

/// None, if they are not changed.
fn no_faults() -> FaultSettings {
    FaultSettings {
        reorder_time: TIMEOUT / 4,
        limit: Some((3, 8 * TIMEOUT)),
        ..FaultSettings::default()
    }
}

/// All frames are lost.
pub(super) fn loses_all() -> FaultSettings {
    FaultSettings {
        loss: Chance::millionths(1_000_000),
        ..FaultSettings::default()
    }
}

/// Posts SENDs from the first end to the second that have their number for immediate data, as
/// `change` changes them, and more receives than there are SENDs. Returns where these are.
pub(in super::super) fn post_numbered(
    pair: &mut Pair,
    lens: &[u32],
    change: impl Fn(&mut Send),
) -> Vec<u64> {
    const ROOM: u32 = 9100;
    let receives = 0..2 * lens.len() as u64;
    let places = receives.map(|number| {
        let at = pair.ends[1].allocate(ROOM.into());
        pair.post_receive(1, RECEIVES + number, at, ROOM);
        at
    });
    let places = places.collect();
    for (number, len) in lens.iter().enumerate() {
        let mut send = pair.a_send(0, number as u64, *len);
        let at = send.sges[0].addr - DATA;
        pair.ends[0].guest.write(at, &content(number, 0, *len));
        send.opcode = wr_opcode::SEND_WITH_IMM;
        send.imm = number as u32;
        change(&mut send);
        pair.post_send(0, &send);
    }
    places
}

/// All of [`post_numbered`] were sent, and those that arrived, after `header` bytes, are whole.
/// Returns their numbers.
pub(in super::super) fn check_numbered(
    pair: &mut Pair,
    lens: &[u32],
    places: &[u64],
    header: u32,
) -> Result<Vec<usize>, TestCaseError> {
    let sent = pair.completions(0);
    let sent: Vec<_> = sent.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    let all = (0..lens.len() as u64).map(|wr_id| (wr_id, wc_status::SUCCESS));
    prop_assert_eq!(sent, all.collect::<Vec<_>>());
    let mut arrived = Vec::new();
    for (nth, cqe) in pair.completions(1).into_iter().enumerate() {
        prop_assert_eq!(cqe.wr_id, RECEIVES + nth as u64);
        prop_assert_eq!(
            (cqe.status, cqe.opcode),
            (wc_status::SUCCESS, wc_opcode::RECV)
        );
        let number = cqe.imm as usize;
        let len = lens[number];
        prop_assert_eq!(cqe.byte_len, len + header);
        let at = places[nth] + u64::from(header);
        let there = pair.ends[1].guest.read(at, len as usize);
        prop_assert_eq!(there, content(number, 0, len));
        arrived.push(number);
    }
    Ok(arrived)
}

/// The first SEND of the first end to a queue pair of the second.
fn first_send(dest_qp: u32) -> Packet<'static> {
    let request = Request::at(Service::Rc, wr_opcode::SEND, Place::Only).unwrap();
    Packet {
        service: Service::Rc,
        dest_qp,
        psn: Psn::new(FIRST[0]),
        ack_request: true,
        solicited: false,
        body: Body::Request(RequestPacket::new(request, b"here")),
    }
}

/// Where datagrams to the second end go.
pub(in super::super) fn destination(pair: &Pair) -> Destination {
    let End { guest, qp, .. } = &pair.ends[1];
    Destination {
        gid: guest.gid,
        mac: pair.ends[1].mac(),
        qpn: qp.qp.number,
        qkey: QKEY,
    }
}

/// One datagram of 100 bytes from the first end to another queue pair type and destination.
fn a_datagram(types: [u8; 2], change: impl Fn(&Pair, &mut Destination)) -> (Pair, Net) {
    let (readers, mut reader) = Readers::new(1);
    let ends = [1, 2].map(|number| {
        let guest = Guest::with_uplink(&readers, number, ON_HOSTS);
        End::new(guest, types[usize::from(number) - 1])
    });
    let mut pair = Pair::between(ends, |_| {});
    let mut net = between(&pair, &mut reader, clean());
    let mut to = destination(&pair);
    change(&pair, &mut to);
    post_numbered(&mut pair, &[100], |send| send.to = to);
    net.run(&mut pair, SECOND);
    (pair, net)
}

#[test]
fn a_datagram_says_where_it_comes_from() {
    let (mut pair, _) = a_datagram([qp_type::UD; 2], |_, _| {});
    let [cqe] = pair.completions(1)[..] else {
        panic!("not one completion");
    };
    let [from, to] = &pair.ends;
    assert_eq!((cqe.src_qp, cqe.byte_len), (from.qp.qp.number, 140));
    let flags = wc_flag::GRH | wc_flag::WITH_IMM | wc_flag::IPV4;
    assert_eq!(cqe.wc_flags & flags, flags);
    // The first receive is where the data begins.
    let grh = to.guest.read(0, GRH);
    assert_eq!(grh[..20], [0; 20]);
    assert_eq!(grh[32..36], from.guest.gid[12..]);
    assert_eq!(grh[36..40], to.guest.gid[12..]);
    assert_eq!(grh[21], 3, "traffic class");
}

// D-WIRE-009.
/// Both ends in a VLAN: their frames have its tag.
#[test]
fn what_is_in_a_vlan_stays_in_it() {
    for number in [5, 4094] {
        let in_vlans = |pair: &Pair, vlans: [u16; 2]| {
            for (end, vlan) in pair.ends.iter().zip(vlans) {
                end.guest.vm.tables_mut().sources[0].vlan = vlan;
            }
        };
        let (mut pair, net) = a_datagram([qp_type::UD; 2], |pair, _| in_vlans(pair, [number; 2]));
        let [cqe] = pair.completions(1)[..] else {
            panic!("not one completion");
        };
        assert_eq!(cqe.wc_flags & wc_flag::WITH_IMM, wc_flag::WITH_IMM);
        let tag = [0x81, 0, (number >> 8) as u8, number as u8, 8, 0];
        let frames = net.capture();
        assert!(frames.windows(6).any(|bytes| bytes == tag));
        // They are not in the same one.
        for vlans in [[number, 6], [number, NO_VLAN], [NO_VLAN, number]] {
            let (mut pair, net) = a_datagram([qp_type::UD; 2], |pair, _| in_vlans(pair, vlans));
            assert_eq!(pair.completions(1), []);
            assert_eq!(net.suffered(0, "frames"), 1);
        }
    }
}

// D-WIRE-002, D-WIRE-009.
#[test]
fn connections_are_in_a_vlan() {
    for (vlans, reached) in [([5, 5], true), ([5, 6], false), ([NO_VLAN, 5], false)] {
        let mut simulation = Simulation::new(clean(), |attr| attr.av.sl = 3);
        for (end, vlan) in vlans.into_iter().enumerate() {
            let vm = &simulation.pair.ends[end].guest.vm;
            vm.tables_mut().sources[0].vlan = vlan;
        }
        post_numbered(&mut simulation.pair, &[100], |_| {});
        simulation.run(SECOND / 100);
        let done = simulation.pair.completions(1).len();
        assert_eq!(done, usize::from(reached), "{vlans:?}");
        let priority = [0x81, 0, 3 << 5, 5, 8, 0];
        let frames = simulation.net.capture();
        let tagged = frames.windows(6).any(|bytes| bytes == priority);
        assert_eq!(tagged, vlans[0] == 5);
    }
}

#[test]
fn datagrams_to_queue_pair_1_reach_the_gsi_queue_pair() {
    let (mut pair, _) = a_datagram([qp_type::GSI; 2], |_, to| to.qpn = GSI_QPN);
    let [cqe] = pair.completions(1)[..] else {
        panic!("not one completion");
    };
    assert_eq!(cqe.src_qp, GSI_QPN);
}

#[test]
fn datagrams_to_others_are_dropped() {
    let elsewhere: [fn(&Pair, &mut Destination); 4] = [
        |_, to| to.gid[15] ^= 4,
        |_, to| to.qpn ^= 1,
        |_, to| to.qkey ^= 1,
        // The bit of groups, so that it comes.
        |_, to| to.mac[0] |= 1,
    ];
    for change in elsewhere {
        let (mut pair, net) = a_datagram([qp_type::UD; 2], change);
        assert_eq!(pair.completions(0).len(), 1);
        assert_eq!(pair.completions(1), []);
        assert_eq!(net.suffered(0, "frames"), 1);
    }
    // Nor do datagrams reach a queue pair that is connected.
    let (mut pair, net) = a_datagram([qp_type::UD, qp_type::RC], |_, _| {});
    assert_eq!(pair.completions(1), []);
    assert_eq!(net.suffered(0, "frames"), 1);
}

#[test]
fn datagrams_to_a_group_reach_those_in_it() {
    let mut group = [0; 16];
    group[10..].copy_from_slice(&[0xff, 0xff, 224, 1, 2, 3]);
    for member in [false, true] {
        let (mut pair, _) = a_datagram([qp_type::UD; 2], |pair, to| {
            let End { guest, qp, .. } = &pair.ends[1];
            if member {
                let key = (qp.qp.number, group);
                guest
                    .vm
                    .tables_mut()
                    .multicast
                    .insert(key, Share::default());
            }
            to.gid = group;
            to.qpn = MASK_24;
            to.mac = [1, 0, 0x5e, 1, 2, 3];
        });
        assert_eq!(pair.completions(1).len(), usize::from(member));
    }
}

#[test]
fn a_datagram_fits_the_port_or_fails() {
    let (readers, mut reader) = Readers::new(1);
    let narrow = ON_HOSTS.map(|uplink| Uplink {
        active_mtu: mtu::MTU_1024,
        ..uplink
    });
    let mut pair = Pair::of(qp_type::UD, (&readers, narrow), |_| {});
    let mut net = between(&pair, &mut reader, clean());
    let to = destination(&pair);
    post_numbered(&mut pair, &[1024, 1025], |send| send.to = to);
    net.run(&mut pair, SECOND);
    let sent = pair.completions(0);
    let sent: Vec<_> = sent.iter().map(|cqe| cqe.status).collect();
    assert_eq!(sent, [wc_status::SUCCESS, wc_status::LOC_LEN_ERR]);
    assert_eq!(pair.state(0), qp_state::SQE);
}

/// What both ends of a pair of a type have captured: SENDs and WRITEs, and what else the type has.
fn captured(of: u8, faults: FaultSettings) -> [Vec<Captured>; 2] {
    let (readers, mut reader) = Readers::new(1);
    let mut pair = Pair::for_requests(of, (&readers, ON_HOSTS), mtu::MTU_1024, 4);
    let mut net = between(&pair, &mut reader, [faults, clean()[1]]);
    net.set_asking(true);
    net.set_keeping(true);
    match of {
        qp_type::UD => {
            let to = destination(&pair);
            post_numbered(&mut pair, &[0, 1, 1000], |send| send.to = to);
            net.run(&mut pair, SECOND);
        }
        qp_type::UC => {
            post_numbered(&mut pair, &[0, 1, 5000], |_| {});
            net.run(&mut pair, SECOND);
        }
        _ => {
            let all = [
                Wanted::Send(3000),
                Wanted::Write(3001),
                Wanted::Read(3002),
                Wanted::FetchAdd(1),
                Wanted::CompareSwap(true),
                Wanted::AtomicWrite(2),
                Wanted::Flush,
                Wanted::Send(1),
            ];
            carry_out(&all.map(|wanted| (wanted, false)), &mut pair, &mut net).unwrap();
        }
    }
    net.wires.map(|wire| wire.out.view.capture.take().0)
}

/// A file of what several ends have captured.
fn file<'a>(captures: impl IntoIterator<Item = (&'a str, Vec<Captured>)>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut file = CaptureFile::begin(&mut out, usize::MAX);
    for (name, frames) in captures {
        for frame in frames {
            file.add(&mut out, name, &frame);
        }
    }
    out
}

/// The environment may name a file for the capture, for other programs to read.
#[test]
fn a_capture_has_all_that_went_over_the_wire_and_says_what_became_of_it() {
    let loses = FaultSettings {
        seed: 3,
        loss: Chance::millionths(390_000),
        duplicate: Chance::millionths(195_000),
        ..no_faults()
    };
    let rc = captured(qp_type::RC, loses);
    let [uc, ud, xrc] =
        [qp_type::UC, qp_type::UD, qp_type::XRC_INI].map(|of| captured(of, clean()[0]));
    let names = ["RC ", "UC ", "UD ", "XRC "];
    let all = names.into_iter().zip([rc, uc, ud, xrc]);
    let file = file(all.flat_map(|(name, ends)| ends.map(|end| (name, end))));
    let says = |what: &str| {
        file.windows(what.len())
            .any(|bytes| bytes == what.as_bytes())
    };
    for comment in [
        "faults: lost (frame ",
        "faults: repeated (frame ",
        "taken",
        "packets are missing: NAK, expected PSN ",
        "packets before it are missing: kept",
        "came before: answered again",
        "again: sent",
        "sent again: ",
        "asks what is missing: answered",
    ] {
        assert!(says(comment), "{comment}");
    }
    if let Some(path) = std::env::var_os("CAPTURE") {
        std::fs::write(path, &file).unwrap();
    }
}

/// What ended a message in error is told where the answer came, and counted.
/// The packets of frames but for what is up to chance, and to the sender: numbers, and when to answer.
/// Those for the second end come first.
fn packets<'a>(captured: impl IntoIterator<Item = &'a Captured>, pair: &Pair) -> [Vec<String>; 2] {
    let mut packets = [Vec::new(), Vec::new()];
    for one in captured {
        let (bytes, _) = one.frame();
        let packet = frame::read(bytes).unwrap().packet().unwrap();
        let mut body = packet.body;
        match &mut body {
            Body::Request(request) => request.reth.rkey = 0,
            Body::Acknowledge { .. } => continue,
            _ => {}
        }
        let end = usize::from(packet.dest_qp == pair.ends[0].qp.qp.number);
        packets[end].push(format!("{:?} {body:?}", packet.psn));
    }
    packets
}

#[test]
fn requests_that_come_together_are_acknowledged_together() {
    let (readers, mut reader) = Readers::new(1);
    let mut pair = Pair::for_requests(qp_type::RC, (&readers, ON_HOSTS), mtu::MTU_1024, 4);
    let mut net = between(&pair, &mut reader, clean());
    post_numbered(&mut pair, &[8; 16], |_| {});
    net.run(&mut pair, SECOND);
    assert_eq!(pair.completions(0).len(), 16);
    let answers = net.counted(1, "sent_frames");
    assert!((1..=4).contains(&answers), "{answers}");
}

/// What stays in the process is captured as the packets that it is on a network.
#[test]
fn messages_that_stay_are_captured_as_the_packets_that_they_are_elsewhere() {
    for of in [qp_type::RC, qp_type::UC] {
        let (readers, mut each) = Readers::new(1);
        let path_mtu = mtu::MTU_1024;
        let mut here = Pair::for_requests(of, (&readers, None), path_mtu, 4);
        let mut process = Process::new(each.pop().unwrap(), &here);
        process.capture.set(true);
        let (readers, mut each) = Readers::new(1);
        let mut elsewhere = Pair::for_requests(of, (&readers, ON_HOSTS), path_mtu, 4);
        let mut net = Net::new(each.pop().unwrap(), clean(), &elsewhere);
        let mut run = |post: &dyn Fn(&mut Pair)| {
            for pair in [&mut here, &mut elsewhere] {
                post(pair);
            }
            process.run(&mut here, SECOND);
            net.run(&mut elsewhere, SECOND);
        };
        run(&|pair| {
            post_numbered(pair, &[0, 1, 1024, 3000], |_| {});
        });
        if of == qp_type::RC {
            run(&|pair| {
                let at = pair.ends[1].allocate(4096);
                let to = pair.ends[0].allocate(4096);
                pair.ends[1].guest.write(at, &content(5, 0, 4096));
                for (opcode, len) in [
                    (wr_opcode::RDMA_WRITE, 2500),
                    (wr_opcode::RDMA_READ, 3000),
                    (wr_opcode::ATOMIC_FETCH_AND_ADD, 8),
                    (wr_opcode::RDMA_READ, 8),
                ] {
                    let send = Send {
                        opcode,
                        flags: send_flag::SIGNALED,
                        remote_addr: DATA + at,
                        rkey: pair.ends[1].guest.key,
                        operands: [7, 0],
                        sges: vec![pair.ends[0].guest.sge(to, len)],
                        ..Send::default()
                    };
                    pair.post_send(0, &send);
                }
            });
        }
        let done = [&mut here, &mut elsewhere].map(|pair| pair.completions(0).len());
        assert_eq!(done, if of == qp_type::RC { [8; 2] } else { [4; 2] });
        let (captured, missed) = process.capture.take();
        assert_eq!(missed, 0);
        let stays = |one: &Captured| one.frame().1 == Some("local: not sent");
        assert!(captured.iter().all(stays));
        let taken = |end: usize| net.wires[end].out.view.capture.take().0;
        let sent: Vec<_> = [0, 1].map(taken).into_iter().flatten().collect();
        // What came has a comment.
        let sent = sent.iter().filter(|one| one.frame().1.is_none());
        assert_eq!(packets(&captured, &here), packets(sent, &elsewhere));
    }
}

#[test]
fn why_what_stays_did_not_arrive_is_captured() {
    let (readers, mut each) = Readers::new(1);
    let mut pair = Pair::for_requests(qp_type::RC, (&readers, None), mtu::MTU_1024, 4);
    let mut process = Process::new(each.pop().unwrap(), &pair);
    process.capture.set(true);
    let send = pair.a_send(0, 1, 3000);
    pair.post_send(0, &send);
    process.run(&mut pair, SECOND / 1000);
    let (captured, _) = process.capture.take();
    let comments: Vec<_> = captured.iter().map(|one| one.frame().1.unwrap()).collect();
    assert_eq!(
        comments[..2],
        ["local: not sent; no receive", "local: not sent"]
    );
    let answer = frame::read(captured[1].frame().0)
        .unwrap()
        .packet()
        .unwrap();
    assert!(matches!(
        answer.body,
        Body::Acknowledge {
            syndrome: Syndrome::RnrNak(_),
            ..
        }
    ));
}

/// What the packets of a message that stays and ends in error say in the end.
#[test]
fn how_what_stays_ended_is_captured() {
    for (there, ends) in [
        (
            true,
            "local: not sent; no receive; ends with RNR_RETRY_EXC_ERR",
        ),
        (
            false,
            "local: not sent; nobody answers; ends with RETRY_EXC_ERR",
        ),
    ] {
        let (readers, mut each) = Readers::new(1);
        let mut pair = Pair::of(qp_type::RC, (&readers, None), |attr| attr.rnr_retry = 2);
        let mut process = Process::new(each.pop().unwrap(), &pair);
        process.capture.set(true);
        if !there {
            pair.ends[1].qp.qp.fail();
        }
        let send = pair.a_send(0, 1, 10);
        pair.post_send(0, &send);
        process.run(&mut pair, 100 * SECOND);
        assert_ne!(pair.completions(0), []);
        let (captured, _) = process.capture.take();
        let says = |one: &Captured| one.frame().1 == Some(ends);
        let last = captured.iter().filter(|one| says(one)).count();
        assert_eq!(last, 1, "{ends}");
    }
}

#[test]
fn why_a_datagram_that_stays_did_not_arrive_is_captured() {
    let (readers, mut each) = Readers::new(1);
    let mut pair = Pair::of(qp_type::UD, (&readers, None), |_| {});
    let mut process = Process::new(each.pop().unwrap(), &pair);
    process.capture.set(true);
    let to = destination(&pair);
    let mut send = |process: &mut Process, change: fn(&mut Destination)| {
        let mut send = pair.a_send(0, 1, 100);
        send.to = to;
        change(&mut send.to);
        pair.post_send(0, &send);
        let until = process.clock().now + SECOND;
        process.run(&mut pair, until);
        let told = pair.completions(0);
        assert_eq!(
            told.iter().map(|cqe| cqe.status).collect::<Vec<_>>(),
            [wc_status::SUCCESS]
        );
        let (captured, _) = process.capture.take();
        assert_eq!(captured.len(), 1);
        captured[0].frame().1.unwrap().to_owned()
    };
    let said = [
        send(&mut process, |_| {}),
        send(&mut process, |to| to.qkey ^= 1),
        send(&mut process, |to| to.qpn ^= 1),
    ];
    let expected = ["no receive", "dropped (QKEY)", "nobody answers"];
    assert_eq!(said, expected.map(|why| format!("local: not sent; {why}")));
    let at = pair.ends[1].allocate(40 + 100);
    pair.post_receive(1, RECEIVES, at, 50);
    let mut send = pair.a_send(0, 1, 100);
    send.to = to;
    pair.post_send(0, &send);
    process.run(&mut pair, 10 * SECOND);
    let (captured, _) = process.capture.take();
    let said = captured[0].frame().1;
    assert_eq!(said, Some("local: not sent; dropped (RECV_TOO_SHORT)"));
}

#[test]
fn a_capture_says_which_answer_ended_a_message() {
    let (readers, mut reader) = Readers::new(1);
    let mut pair = Pair::of(qp_type::RC, (&readers, ON_HOSTS), |_| {});
    let mut net = between(&pair, &mut reader, clean());
    let mut send = pair.a_send(0, 1, 10);
    send.opcode = wr_opcode::RDMA_WRITE;
    send.rkey = pair.ends[1].guest.key ^ 0x100;
    pair.post_send(0, &send);
    net.run(&mut pair, SECOND);
    let sent: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.status).collect();
    assert_eq!(sent, [wc_status::REM_ACCESS_ERR]);
    let mut counts = net.wires[0].out.view.counters.list();
    assert!(counts.any(|count| count == ("answers_of_error", 1)));
    let file = net.capture();
    let comment = b"ends a message with REM_ACCESS_ERR (PEER)";
    assert!(file.windows(comment.len()).any(|bytes| bytes == comment));
}

/// The packet that nobody answered is there once more, and says how its message ended.
#[test]
fn a_capture_says_which_packet_had_no_answer_in_the_end() {
    let not_sent = |simulation: &Simulation| -> Vec<_> {
        let (captured, _) = simulation.net.wires[0].out.view.capture.take();
        let ends = "not sent: its message ends with RETRY_EXC_ERR (NO_ANSWER)";
        let over = |one: &Captured| {
            let (bytes, comment) = one.frame();
            let packet = frame::read(bytes).unwrap().packet().unwrap();
            (comment == Some(ends)).then(|| format!("{:?} {:?}", packet.psn, packet.body))
        };
        captured.iter().filter_map(over).collect()
    };
    for opcode in [wr_opcode::SEND, wr_opcode::RDMA_READ] {
        let mut simulation = Simulation::new([loses_all(), clean()[1]], |_| {});
        let pair = &mut simulation.pair;
        let mut send = pair.a_send(0, 1, 3000);
        send.opcode = opcode;
        pair.post_send(0, &send);
        simulation.run(100 * SECOND);
        assert_eq!(simulation.statuses(), [wc_status::RETRY_EXC_ERR]);
        let found = not_sent(&simulation);
        let first = format!("{:?} ", Psn::new(FIRST[0]));
        assert!(
            found.len() == 1 && found[0].starts_with(&first),
            "{found:?}"
        );
    }
}

#[test]
fn uc_has_no_packet_with_a_key_to_invalidate() {
    let (readers, mut reader) = Readers::new(1);
    let mut pair = Pair::of(qp_type::UC, (&readers, ON_HOSTS), |_| {});
    let mut net = between(&pair, &mut reader, clean());
    let mut send = pair.a_send(0, 1, 10);
    send.opcode = wr_opcode::SEND_WITH_INV;
    send.imm = pair.ends[1].guest.key;
    pair.post_send(0, &send);
    net.run(&mut pair, SECOND);
    let sent: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.status).collect();
    assert_eq!(sent, [wc_status::LOC_QP_OP_ERR]);
}

/// What there may be in a packet.
#[derive(Debug, Clone)]
enum Anything {
    Request(u8, Place, u16),
    Answer(Syndrome),
    Query(u32),
    Report(u32, Vec<(u32, u32)>),
}

fn any_packet() -> impl Strategy<Value = (u32, bool, Anything)> {
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
    let request =
        (opcode, place, len).prop_map(|(opcode, place, len)| Anything::Request(opcode, place, len));
    let gap = (psn.clone(), prop_oneof![0..80u32, any::<u32>()]);
    let gaps = proptest::collection::vec(gap, 0..20);
    let query = (0..4u32).prop_map(Anything::Query);
    let report = (0..4u32, gaps).prop_map(|(number, gaps)| Anything::Report(number, gaps));
    let answers = [0x60, 0x61, 0x62, 0x63, 0x1f, 0x21];
    let answer = proptest::sample::select(answers.to_vec()).prop_map(|byte| {
        Anything::Answer(match byte {
            0x1f => Syndrome::Ack,
            0x21 => Syndrome::RnrNak(1),
            0x60 => Syndrome::Nak(Nak::Sequence),
            0x61 => Syndrome::Nak(Nak::InvalidRequest),
            0x62 => Syndrome::Nak(Nak::RemoteAccess),
            _ => Syndrome::Nak(Nak::RemoteOperational),
        })
    });
    let anything = prop_oneof![request, answer, query, report];
    (psn, any::<bool>(), anything)
}

pub(super) fn clean() -> [FaultSettings; 2] {
    Default::default()
}

// D-WIRE-004.
#[test]
fn a_peer_that_is_cut_off_is_given_up_after_all_attempts_and_not_before() {
    let mut simulation = Simulation::new([loses_all(), clean()[1]], |attr| attr.retry_cnt = 3);
    let send = simulation.pair.a_send(0, 5, 100);
    simulation.pair.post_send(0, &send);
    // Each attempt waits for twice as long as the one before, up to four times what is set.
    let waits = (1 + 2 + 4 + 4) * TIMEOUT_NANOSECONDS;
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

/// Of a peer that is slow from the start it is not known how long answers take.
#[test]
fn a_peer_that_needs_longer_than_the_time_out_is_waited_for() {
    let way = format!("delay={}us", TIMEOUT_NANOSECONDS * 5 / 2 / 1000);
    let mut simulation = Simulation::new([faults(&way), clean()[1]], |attr| attr.retry_cnt = 1);
    for wr_id in 0..10 {
        let write = Send {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: DATA,
            rkey: simulation.pair.ends[1].guest.key,
            ..simulation.pair.a_send(0, wr_id, 100)
        };
        simulation.pair.post_send(0, &write);
        simulation.run((wr_id + 1) * SECOND);
        let told: Vec<_> = simulation.pair.completions(0);
        let told: Vec<_> = told.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        assert_eq!(told, [(wr_id, wc_status::SUCCESS)]);
    }
    // Once it is known, nothing goes again.
    let retries = simulation.pair.ends[0].guest.vm.totals().retries;
    assert!((1..5).contains(&retries), "{retries}");
}

/// Whatever is lost at the end of what was sent, no NAK tells of it.
#[test]
fn what_is_lost_last_is_sent_again_long_before_the_time_out() {
    // 67 ms.
    let mut simulation = Simulation::new(clean(), |attr| attr.timeout = 14);
    let sent = |simulation: &mut Simulation, wr_id: u64, kind: u8| {
        let send = Send {
            opcode: kind,
            remote_addr: DATA,
            rkey: simulation.pair.ends[1].guest.key,
            ..simulation.pair.a_send(0, wr_id, 100)
        };
        simulation.pair.post_send(0, &send);
        let end = simulation.net.clock.now + 5_000_000;
        simulation.run(end);
        let cqes = simulation.pair.completions(0);
        cqes.iter()
            .map(|cqe| (cqe.wr_id, cqe.status))
            .collect::<Vec<_>>()
    };
    let write = wr_opcode::RDMA_WRITE;
    // How long an answer takes is known from the first.
    assert_eq!(sent(&mut simulation, 1, write), [(1, wc_status::SUCCESS)]);
    for (end, opcode) in [
        (0, write),
        (1, write),
        (0, wr_opcode::RDMA_READ),
        (1, wr_opcode::RDMA_READ),
    ] {
        let one = FaultSettings {
            limit: Some((1, Duration::MAX)),
            ..loses_all()
        };
        simulation.net.set_faults(end, one);
        let number = u64::from(opcode) << 8 | end as u64;
        assert_eq!(
            sent(&mut simulation, number, opcode),
            [(number, wc_status::SUCCESS)]
        );
        assert_eq!(simulation.net.suffered(end, "lost"), 1);
        simulation.net.set_faults(end, no_faults());
    }
    // It was no attempt.
    assert_eq!(simulation.pair.ends[0].guest.vm.totals().retries, 0);
}

#[test]
fn why_a_message_was_refused_is_told_again_to_a_requester_that_went_back_further() {
    // The first answers: to a message that arrived, and to one that does not fit its receive.
    let answers = FaultSettings {
        limit: Some((2, Duration::MAX)),
        ..loses_all()
    };
    let mut simulation = Simulation::new([clean()[0], answers], |_| {});
    for (wr_id, room) in [(1, 100), (2, 10)] {
        let at = simulation.pair.ends[1].allocate(100);
        simulation.pair.post_receive(1, RECEIVES + wr_id, at, room);
        let send = simulation.pair.a_send(0, wr_id, 100);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.net.suffered(1, "lost"), 2);
    let sent = simulation.pair.completions(0);
    let sent: Vec<_> = sent.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    let refused = wc_status::REM_INV_REQ_ERR;
    assert_eq!(sent, [(1, wc_status::SUCCESS), (2, refused)]);
}

#[test]
fn a_receive_that_never_comes_ends_the_retries() {
    let mut simulation = Simulation::new(clean(), |attr| attr.rnr_retry = 2);
    for wr_id in 0..3 {
        let send = simulation.pair.a_send(0, wr_id, 3000);
        simulation.pair.post_send(0, &send);
    }
    simulation.run(SECOND);
    let statuses = simulation.statuses();
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
    vm.link().set(false);
    let send = simulation.pair.a_send(0, 1, 100);
    simulation.pair.post_send(0, &send);
    simulation.run(2 * TIMEOUT_NANOSECONDS);
    assert!(!simulation.net.wires[1].port(&vm).up);
    assert_eq!(simulation.pair.completions(1), []);
    assert!(simulation.net.dropped(1, "port_down") > 0);
    // What it sends itself does not leave either.
    let send = simulation.pair.a_send(1, 1, 100);
    simulation.pair.post_send(1, &send);
    simulation.net.wires[1].out.view.capture.take();
    simulation.run(3 * TIMEOUT_NANOSECONDS);
    assert!(simulation.net.counted(1, "own_port_down") > 0);
    assert_eq!(simulation.pair.completions(0), []);
    let (captured, _) = simulation.net.wires[1].out.view.capture.take();
    let comments: Vec<_> = captured.iter().filter_map(|one| one.frame().1).collect();
    assert!(comments.contains(&"lost: the port is down"), "{comments:?}");
    let at = simulation.pair.ends[0].allocate(100);
    simulation.pair.post_receive(0, RECEIVES, at, 100);
    vm.link().set(true);
    simulation.run(SECOND);
    assert_eq!(simulation.pair.completions(0).len(), 2);
    assert_eq!(simulation.pair.completions(1).len(), 2);
}

/// A queue that drains may be given another path; what goes on then takes it.
/// VMs of which one may be busy.
#[derive(Default)]
struct Busy {
    busy: Option<[u8; 16]>,
    /// Where frames went, and how long they were.
    taken: Vec<(u8, usize)>,
}

impl Recipients for Busy {
    fn visit(&mut self, to: To, frame: Arriving, _: &mut dyn FnMut(&Tables)) -> bool {
        if self.busy == Some(to.gid) {
            return false;
        }
        self.taken.push((to.gid[15], frame.bytes));
        true
    }

    fn visit_vm(&mut self, _: &Vm, _: &mut dyn FnMut(&Tables)) -> bool {
        true
    }
}

/// A wire to which frames come that are for VMs.
struct FramesCome {
    port: SimPort,
    wire: Wire<Faults<SimPort>>,
    vms: Busy,
}

impl FramesCome {
    /// The VM at 0.0.0.1 is busy.
    fn new() -> Self {
        let network = Network::new(0);
        let [port, at] = [1, 2].map(|last| network.port([last; 6], PORT_MTU));
        let mut vms = Busy::default();
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 0, 0, 0, 1]);
        vms.busy = Some(gid);
        let view = Arc::<View>::default();
        let wire = Wire::new(Faults::new(at, view.faults.clone()), view, 0);
        Self { port, wire, vms }
    }

    fn send(&mut self, to: u8, len: usize) {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 0, 0, 0, to]);
        let addresses = Addresses {
            destination_mac: [2; 6],
            source: gid,
            destination: gid,
            ..Addresses::default()
        };
        let mut frame = frame::frame(&addresses, &Packet::notification(1));
        assert!(frame.len() <= len, "{}", frame.len());
        // Ethernet may pad it.
        frame.resize(len, 0);
        self.port.send(0, SEGMENT, [0; 16], &frame);
    }

    fn receive(&mut self, now: u64) -> usize {
        self.wire.receive(now, 64, &mut self.vms)
    }

    fn busy_drops(&self) -> u64 {
        let mut counts = self.wire.out.view.counters.dropped();
        counts.find(|(name, _)| *name == "vm_busy").unwrap().1
    }
}

#[test]
fn frames_for_a_busy_vm_wait_in_order_and_others_do_not() {
    let mut come = FramesCome::new();
    for (to, len) in [(1, 90), (2, 91), (1, 92), (2, 93)] {
        come.send(to, len);
    }
    assert_eq!(come.receive(0), 4);
    assert_eq!(come.vms.taken, [(2, 91), (2, 93)]);
    assert!(come.wire.is_waiting());
    assert_eq!(come.receive(1), 0);
    // What comes now does not overtake those that wait.
    come.send(1, 94);
    come.vms.busy = None;
    assert_eq!(come.receive(2), 3);
    assert_eq!(come.vms.taken[2..], [(1, 90), (1, 92), (1, 94)]);
    assert!(!come.wire.is_waiting());
    assert_eq!(come.busy_drops(), 0);
}

#[test]
fn frames_for_a_busy_vm_wait_for_a_while_and_not_too_many() {
    let mut come = FramesCome::new();
    let most = MOST_WAITING_FOR_ONE as u64;
    for _ in 0..most + 8 {
        come.send(1, 90);
    }
    while come.receive(0) != 0 {}
    assert_eq!(come.busy_drops(), 8);
    come.receive(MOST_WAIT - 1);
    assert_eq!(come.busy_drops(), 8);
    come.receive(MOST_WAIT);
    assert_eq!(come.busy_drops(), most + 8);
    assert!(!come.wire.is_waiting());
}

#[test]
fn no_more_frames_are_taken_at_once_though_faults_hold_them_back() {
    let mut come = FramesCome::new();
    let plan = &come.wire.out.view.faults;
    plan.set((SEGMENT, [2; 6]), Direction::In, Some(faults("delay=1ms")));
    for len in 100..300 {
        come.send(2, len);
    }
    assert_eq!([0; 4].map(|now| come.receive(now)), [64, 64, 64, 8]);
    assert_eq!(come.vms.taken, []);
    // What is held back comes at once.
    while come.receive(1_000_000) != 0 {}
    let lens = (100..300).map(|len| (2, len));
    assert_eq!(come.vms.taken, lens.collect::<Vec<_>>());
}

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
    for (ip, payload) in [
        (1500, 1024),
        (4200, 4096),
        (9000, 4096),
        (400, 256),
        (60, 256),
    ] {
        assert_eq!(payload_of(path_mtu_within(ip)), payload, "{ip}");
    }
    let (readers, _) = Readers::new(1);
    let guest = Guest::with_uplink(&readers, 1, ON_HOSTS);
    let wire = Wire::new(Network::new(0).port([1; 6], PORT_MTU), Arc::default(), 0);
    let port = wire.port(&guest.vm);
    assert_eq!((port.active_mtu, port.up), (mtu::MTU_4096, true));
}

/// Nobody on the wire is the peer of a queue pair whose peer is in its own process, whatever
/// addresses its packets have.
// D-WIRE-002.
#[test]
fn what_is_connected_within_a_process_takes_no_packets() {
    let (readers, mut reader) = Readers::new(1);
    let ends = [(1, ON_HOSTS), (2, None)].map(|(number, uplink)| {
        End::new(Guest::with_uplink(&readers, number, uplink), qp_type::RC)
    });
    let mut pair = Pair::between(ends, |attr| attr.retry_cnt = 1);
    let mut net = between(&pair, &mut reader, clean());
    let at = pair.ends[1].allocate(100);
    pair.post_receive(1, RECEIVES, at, 100);
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    net.run(&mut pair, SECOND);
    assert_eq!(net.dropped(1, "stranger"), 2);
    assert_eq!(pair.completions(1), []);
}

// D-WIRE-002.
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
        vlan: None,
    };
    let packet = first_send(second.qp.qp.number);
    let mut other = good;
    other.source[15] ^= 8;
    let mut elsewhere = good;
    elsewhere.destination[15] ^= 8;
    let vlan = Some(Vlan { id: 5, priority: 0 });
    let other_vlan = Addresses { vlan, ..good };
    let wrong_number = Packet {
        dest_qp: packet.dest_qp ^ 1,
        ..packet
    };
    for (addresses, packet) in [
        (other, packet),
        (elsewhere, packet),
        (other_vlan, packet),
        (good, wrong_number),
    ] {
        let bytes = frame::frame(&addresses, &packet);
        simulation.net.wires[0]
            .out
            .port
            .send(0, SEGMENT, [0; 16], &bytes);
    }
    simulation.run(SECOND);
    assert_eq!(simulation.net.dropped(1, "stranger"), 4);
    assert_eq!(simulation.pair.completions(1), []);
    let bytes = frame::frame(&good, &packet);
    simulation.net.wires[0]
        .out
        .port
        .send(SECOND, SEGMENT, [0; 16], &bytes);
    simulation.run(2 * SECOND);
    assert_eq!(simulation.pair.completions(1).len(), 1);
    assert_eq!(simulation.pair.ends[1].guest.read(at, 4), b"here");
}

/// A host that the directory does not have, or not for the source of what it sends, is seen and counted.
#[test]
fn frames_of_strange_hosts_are_counted_and_captured() {
    let directory = Directory::default();
    let tunnel = Tunnel::open(([127, 0, 0, 1], 0).into(), directory, false).unwrap();
    let to = tunnel.address().unwrap();
    let uplinks = Uplinks {
        tunnel: Some(tunnel),
        ..Uplinks::default()
    };
    let view = Arc::<View>::default();
    view.capture.set(true);
    let mut wire = Wire::new(UplinkPort::new(&uplinks).unwrap(), view.clone(), 0);
    let bytes = frame::frame(&Addresses::default(), &Packet::notification(1));
    let vxlan = [&[8, 0, 0, 0, 0, 0, 7, 0], &bytes[..]].concat();
    let host = UdpSocket::bind("127.0.0.1:0").unwrap();
    host.send_to(&vxlan, to).unwrap();
    let mut vms = Busy::default();
    assert_eq!(wire.receive(0, 64, &mut vms), 1);
    assert_eq!(vms.taken, []);
    let mut counts = view.counters.dropped();
    assert!(counts.any(|count| count == ("stranger", 1)));
    let (captured, _) = view.capture.take();
    let frames: Vec<_> = captured.iter().map(Captured::frame).collect();
    let comment = Some("dropped: came from 127.0.0.1, where its source is not");
    assert_eq!(frames, [(&bytes[..], comment)]);
}

#[test]
fn packets_with_a_wrong_p_key_are_dropped_and_counted() {
    let mut simulation = Simulation::new(clean(), |_| {});
    let at = simulation.pair.ends[1].allocate(100);
    simulation.pair.post_receive(1, RECEIVES, at, 100);
    let [first, second] = &simulation.pair.ends;
    let addresses = Addresses {
        destination_mac: second.mac(),
        source: first.guest.gid,
        destination: second.guest.gid,
        ..Addresses::default()
    };
    let other_vlan = Addresses {
        vlan: Some(Vlan { id: 5, priority: 0 }),
        ..addresses
    };
    let packet = first_send(second.qp.qp.number);
    let vm = second.guest.vm.clone();
    let mut send = |addresses: &Addresses, pkey: [u8; 2]| {
        let mut bytes = frame::frame(addresses, &packet);
        let (ethernet, udp) = (if addresses.vlan.is_some() { 18 } else { 14 }, 8);
        let ip = if bytes[ethernet] == 0x45 { 20 } else { 40 };
        bytes[ethernet + ip + udp + 2..][..2].copy_from_slice(&pkey);
        let end = bytes.len() - 4;
        let right = icrc(&bytes[ethernet..end]).unwrap();
        bytes[end..].copy_from_slice(&right);
        let now = simulation.net.clock.now;
        let port = &mut simulation.net.wires[0].out.port;
        port.send(now, SEGMENT, [0; 16], &bytes);
        simulation.run(now + SECOND);
        let taken = simulation.pair.completions(1).len();
        (taken, vm.totals().pkey_violations)
    };
    assert_eq!(send(&addresses, [0x80, 0x01]), (0, 1));
    assert_eq!(send(&other_vlan, [0x80, 0x01]), (0, 1));
    // A limited member of the default partition.
    assert_eq!(send(&addresses, [0x7f, 0xff]), (1, 1));
    assert_eq!(simulation.net.dropped(1, "malformed"), 2);
}

#[test]
fn a_simulation_that_fails_names_a_file_with_its_packets() {
    for panics in [false, true] {
        let mut simulation = Simulation::new(clean(), |_| {});
        let Simulation { pair, net } = &mut simulation;
        let error = net.explained(|net| {
            post_numbered(pair, &[0; 3], |_| {});
            net.run(pair, SECOND);
            assert!(!panics, "it panics");
            Err(TestCaseError::fail("it fails"))
        });
        let said = error.unwrap_err().to_string();
        let why = if panics { "it panics" } else { "it fails" };
        assert!(said.contains(why), "{said}");
        let (_, path) = said.split_once("capture: ").unwrap();
        assert!(std::fs::metadata(path).unwrap().len() > 6 * 100);
        std::fs::remove_file(path).unwrap();
    }
}

/// Posts WRITEs of so many bytes from the first end to the second. Returns how long they took,
/// nanoseconds.
fn write_all(simulation: &mut Simulation, count: u64, len: u32) -> u64 {
    move_all(simulation, wr_opcode::RDMA_WRITE, count, len)
}

/// The same by WRITEs, or by READs from there.
fn move_all(simulation: &mut Simulation, opcode: u8, count: u64, len: u32) -> u64 {
    let from = simulation.pair.ends[0].allocate(u64::from(len));
    let to = simulation.pair.ends[1].allocate(u64::from(len));
    let bytes = content(7, 0, len);
    simulation.pair.ends[0].guest.write(from, &bytes);
    let begun = simulation.net.clock.now;
    let mut done = 0;
    for wr_id in 0..count {
        let guest = &simulation.pair.ends[0].guest;
        let send = Send {
            opcode,
            flags: send_flag::SIGNALED,
            wr_id,
            remote_addr: DATA + to,
            rkey: simulation.pair.ends[1].guest.key,
            sges: vec![guest.sge(from, len)],
            ..Send::default()
        };
        simulation.pair.post_send(0, &send);
        if wr_id % 16 == 15 || wr_id + 1 == count {
            while done <= wr_id && simulation.net.clock.now < begun + 100 * SECOND {
                let until = simulation.net.clock.now + 10_000;
                simulation.run(until);
                simulation.net.clock.now = until;
                let cqes = simulation.pair.completions(0);
                assert!(cqes.iter().all(|cqe| cqe.status == wc_status::SUCCESS));
                done += cqes.len() as u64;
            }
        }
    }
    assert_eq!(done, count);
    if opcode == wr_opcode::RDMA_WRITE {
        let there = simulation.pair.ends[1].guest.read(to, len as usize);
        assert_eq!(there, bytes);
    }
    simulation.net.clock.now - begun
}

impl Net {
    /// What an end has counted.
    fn counted(&self, end: usize, name: &str) -> u64 {
        let mut counts = self.wires[end].out.view.counters.list();
        counts.find(|(known, _)| *known == name).unwrap().1
    }
}

/// Faults as people write them.
fn faults(text: &str) -> FaultSettings {
    text.parse().unwrap()
}

/// Two ends whose frames have these faults, with large packets.
fn with_faults(sent: &str, received: &str, congestion: Congestion) -> Simulation {
    let (readers, mut each) = Readers::new(1);
    let uplink = ON_HOSTS.map(|uplink| Uplink {
        congestion,
        ..uplink
    });
    let pair = Pair::for_requests(qp_type::RC, (&readers, uplink), mtu::MTU_4096, 4);
    let faults = [faults(sent), faults(received)];
    let net = Net::new(each.pop().unwrap(), faults, &pair);
    Simulation { pair, net }
}

#[test]
fn what_is_lost_goes_again_alone_to_a_peer_that_keeps_what_comes_after_it() {
    let mut simulation = with_faults("lose=100", "seed=1", Congestion::Window);
    simulation.net.set_asking(false);
    simulation.net.set_keeping(true);
    write_all(&mut simulation, 40, 64 << 10);
    assert_eq!(simulation.net.counted(0, "sent_again"), 1);
    assert!(simulation.net.counted(1, "kept") > 4);
    assert_eq!(simulation.pair.ends[0].guest.vm.totals().retries, 0);
    let file = simulation.net.capture();
    let psn = (FIRST[0] + 100) & MASK_24;
    for comment in [
        format!("sent again: PSN {psn} alone"),
        "packets before it are missing: kept".to_owned(),
    ] {
        let there = file.windows(comment.len());
        assert!(there.into_iter().any(|bytes| bytes == comment.as_bytes()));
    }
}

/// A peer that was kept from its CPU for a moment has lost nothing: single packets ask it for an answer.
#[test]
fn who_answers_late_is_not_sent_all_again() {
    for asks in [true, false] {
        // 67 ms.
        let mut simulation = Simulation::new(clean(), |attr| attr.timeout = 14);
        simulation.net.set_asking(asks);
        // How long an answer takes is known from the first.
        write_all(&mut simulation, 10, 64 << 10);
        simulation.net.set_faults(1, faults("delay=3500us"));
        write_all(&mut simulation, 1, 1 << 20);
        // Two each time that the window is full.
        let again = simulation.net.counted(0, "sent_again");
        assert!((2..10).contains(&again), "{again}");
    }
}

// D-WIRE-011.
/// Who asks nothing sends again all that comes after what is missing, and gets its acknowledgement when
/// that is there. For who asks it is kept, from the first question on.
#[test]
fn what_comes_too_early_is_kept_for_those_who_ask() {
    let lose_one = || faults("lose=500");
    let mut simulation = with_faults("lose=100", "seed=1", Congestion::Window);
    simulation.net.set_asking(false);
    for _ in 0..2 {
        write_all(&mut simulation, 40, 64 << 10);
        assert_eq!(simulation.net.counted(1, "kept"), 0);
        assert!(simulation.net.dropped(1, "ahead") > 0);
        simulation.net.set_faults(0, lose_one());
    }
    let mut simulation = with_faults("lose=100", "seed=1", Congestion::Window);
    write_all(&mut simulation, 40, 64 << 10);
    let first = simulation.net.counted(0, "sent_again");
    assert!((2..100).contains(&first), "{first}");
    simulation.net.set_faults(0, lose_one());
    write_all(&mut simulation, 40, 64 << 10);
    assert_eq!(simulation.net.counted(0, "sent_again"), first + 1);
    assert!(simulation.net.counted(1, "kept") > 0);
}

/// A VM whose tables can be read for so many frames. Then a command changes them.
struct ForFrames<'a>(&'a Tables, usize);

impl Recipients for ForFrames<'_> {
    fn visit(&mut self, _: To, _: Arriving, visit: &mut dyn FnMut(&Tables)) -> bool {
        let there = self.1 != 0;
        if there {
            self.1 -= 1;
            visit(self.0);
        }
        there
    }

    fn visit_vm(&mut self, _: &Vm, visit: &mut dyn FnMut(&Tables)) -> bool {
        visit(self.0);
        true
    }
}

// D-WIRE-012.
/// The message that a program ends with: it destroys its queue pair as soon as that has come. Its peer
/// is told that it came, also where another queue pair's frames come with it, so that its turn to
/// acknowledge is later.
#[test]
fn who_is_destroyed_has_acknowledged_what_it_completed() {
    for others in [0, 1] {
        let mut simulation = with_faults("seed=1", "seed=1", Congestion::Window);
        let Simulation { pair, net } = &mut simulation;
        let mut other = [0, 1].map(|end: usize| pair.ends[end].guest.queue_pair(qp_type::RC));
        let at = pair.ends[1].allocate(8);
        let send = Send {
            opcode: wr_opcode::RDMA_WRITE,
            flags: send_flag::SIGNALED,
            remote_addr: DATA + at,
            rkey: pair.ends[1].guest.key,
            sges: vec![pair.ends[0].guest.sge(0, 8)],
            ..Send::default()
        };
        for (own, peer) in [(0, 1), (1, 0)] {
            let [own_end, peer_end] = [own, peer].map(|end: usize| &pair.ends[end]);
            let to = (&peer_end.guest, other[peer].qp.number);
            own_end.guest.connect(&other[own], to, |attr| {
                attr.av.dmac = peer_end.mac();
            });
        }
        let poll = |net: &mut Net, pair: &Pair, qp: &Arc<Qp>| {
            let section = net.reader.enter();
            let tables = pair.ends[0].guest.vm.read_in(&section).unwrap();
            let now = net.clock.now;
            fabric::poll(&mut net.wires[0], tables, qp, now, BUDGET);
        };
        pair.post_send(0, &send);
        let first = pair.ends[0].qp.qp.clone();
        poll(net, pair, &first);
        for _ in 0..others {
            pair.ends[0].guest.post_send(&mut other[0], &send);
            poll(net, pair, &other[0].qp);
        }
        net.clock.now += 2 * LATENCY;
        let section = net.reader.enter();
        let tables = pair.ends[1].guest.vm.read_in(&section).unwrap();
        let (wire, now) = (&mut net.wires[1], net.clock.now);
        let mut vm = ForFrames(tables, 1 + others);
        assert_eq!(wire.receive(now, 16, &mut vm), 1 + others);
        let qp = &pair.ends[1].qp.qp;
        qp.dead.store(true, Ordering::SeqCst);
        wire.forget(qp, now);
        drop(section);
        simulation.run(SECOND);
        let told = simulation.statuses();
        assert_eq!(told, vec![wc_status::SUCCESS; 1 + others]);
        assert_eq!(simulation.pair.ends[0].guest.vm.totals().retries, 0);
    }
}

// D-WIRE-013.
/// The acknowledgement of the last message is lost, and its queue pair destroyed or in error when its
/// requester sends that message again: it is told that it came. What is new is for nobody, and after a
/// while all is.
#[test]
fn who_has_gone_acknowledges_again_what_it_completed() {
    for (destroyed, later) in [(true, 0), (false, 0), (true, 10 * SECOND)] {
        let mut simulation = with_faults("seed=1", "lose=0", Congestion::Window);
        let at = simulation.pair.ends[1].allocate(8);
        simulation.pair.post_receive(1, RECEIVES, at, 8);
        let send = simulation.pair.a_send(0, 1, 8);
        simulation.pair.post_send(0, &send);
        simulation.run(TIMEOUT_NANOSECONDS / 2);
        assert_eq!(simulation.pair.completions(1).len(), 1);
        assert_eq!(simulation.pair.completions(0), []);
        let qp = simulation.pair.ends[1].qp.qp.clone();
        if destroyed {
            let vm = &simulation.pair.ends[1].guest.vm;
            vm.tables_mut().qps.remove(qp.number);
            qp.dead.store(true, Ordering::SeqCst);
            let now = simulation.net.clock.now;
            simulation.net.wires[1].forget(&qp, now);
        } else {
            qp.fail();
        }
        simulation.net.clock.now += later;
        // It may come with one that is new.
        simulation.pair.post_send(0, &send);
        simulation.run(later + SECOND);
        let told = simulation.statuses();
        let first = if later == 0 {
            wc_status::SUCCESS
        } else {
            wc_status::RETRY_EXC_ERR
        };
        let second = if later == 0 {
            wc_status::RETRY_EXC_ERR
        } else {
            wc_status::WR_FLUSH_ERR
        };
        assert_eq!(told, [first, second], "destroyed: {destroyed}");
        assert_eq!(simulation.net.counted(1, "sent_frames") > 1, later == 0);
    }
}

/// Several are missing: each goes again, and little else.
#[test]
fn gaps_are_filled_one_after_the_other() {
    let mut simulation = with_faults("seed=3,loss=2%", "seed=1", Congestion::Window);
    write_all(&mut simulation, 40, 64 << 10);
    let lost = simulation.net.suffered(0, "lost");
    let again = simulation.net.counted(0, "sent_again");
    let [sender, receiver] = [0, 1].map(|end: usize| &simulation.pair.ends[end].guest.vm);
    assert_eq!(sender.packet_events(PacketEvent::SentAgain), again);
    let naks = sender.packet_events(PacketEvent::Nak);
    assert!((1..=lost).contains(&naks));
    assert!(receiver.packet_events(PacketEvent::OutOfSequence) >= naks);
    // Nothing was kept of what was under way when the first one was lost.
    let most = 2 * lost + 64;
    assert!(lost > 5 && again <= most, "{lost} lost, {again} again");
}

/// A peer that drops what comes too early is sent all of it again, and is known after the first time.
#[test]
fn a_peer_that_keeps_nothing_is_sent_all_again() {
    let mut simulation = with_faults("lose=500", "seed=1", Congestion::Window);
    write_all(&mut simulation, 1, 64 << 10);
    let account = simulation.pair.ends[1].guest.vm.footprint().clone();
    account.set_limit(account.bytes());
    write_all(&mut simulation, 40, 64 << 10);
    assert_eq!(simulation.net.counted(1, "kept"), 0);
    let first = simulation.net.counted(0, "sent_again");
    assert!((3..100).contains(&first), "{first}");
    simulation.net.set_faults(0, faults("lose=500"));
    write_all(&mut simulation, 40, 64 << 10);
    let again = simulation.net.counted(0, "sent_again") - first;
    assert!((3..100).contains(&again), "{again}");
    assert_eq!(simulation.pair.ends[0].guest.vm.totals().retries, 0);
}

/// The part of what WRITEs or READs move over a clean network in the same time.
fn goodput(opcode: u8, loss: &str, asks: bool) -> f64 {
    let took = |loss: &str| {
        let lossy = format!("seed=3,rate=10G,queue=4M,loss={loss}");
        // What has the data is lost.
        let [sent, received] = match opcode {
            wr_opcode::RDMA_WRITE => [lossy.as_str(), "seed=1"],
            _ => ["seed=1", lossy.as_str()],
        };
        let mut simulation = with_faults(sent, received, Congestion::Window);
        simulation.net.set_asking(asks);
        simulation.net.set_keeping(!asks);
        move_all(&mut simulation, opcode, 200, 64 << 10) as f64
    };
    took("0") / took(loss)
}

#[test]
fn losses_cost_little() {
    for opcode in [wr_opcode::RDMA_WRITE, wr_opcode::RDMA_READ] {
        for (loss, least) in [("0.1%", 0.9), ("1%", 0.5)] {
            for asks in [false, true] {
                let goodput = goodput(opcode, loss, asks);
                assert!(goodput >= least, "{opcode}, {loss}, {asks}: {goodput}");
            }
        }
    }
}

/// What a network takes is many packets where the way is long: stray losses must not keep it empty.
#[test]
fn losses_cost_little_on_a_long_way() {
    let took = |loss: &str| {
        let way = format!("seed=3,rate=10G,queue=4M,delay=50us,loss={loss}");
        let mut simulation = with_faults(&way, "seed=1", Congestion::Window);
        write_all(&mut simulation, 400, 64 << 10) as f64
    };
    let goodput = took("0") / took("1%");
    assert!(goodput >= 0.5, "{goodput}");
}

// D-WIRE-010.
/// All that is missing of many packets that were under way at a time goes again at a time, however
/// many of them there are, and however many of those are lost again.
#[test]
fn a_peer_that_is_asked_tells_of_all_that_is_missing_at_once() {
    let run = |loss: &str, asks: bool| {
        let way = format!("seed=3,rate=10G,queue=4M,delay=200us,loss={loss}");
        let mut simulation = with_faults("lose=1", "seed=1", Congestion::None);
        simulation.net.set_asking(asks);
        simulation.net.set_keeping(!asks);
        // From the first loss on the peer knows whether it is asked.
        write_all(&mut simulation, 1, 64 << 10);
        simulation.net.set_faults(0, faults(&way));
        let first = simulation.net.counted(0, "sent_again");
        let took = write_all(&mut simulation, 400, 64 << 10) as f64;
        let lost = simulation.net.suffered(0, "lost");
        let again = simulation.net.counted(0, "sent_again") - first;
        (took, lost, again)
    };
    let (clean, ..) = run("0", true);
    for loss in ["2%", "1%,burst=3"] {
        let (without, ..) = run(loss, false);
        let (with, lost, again) = run(loss, true);
        let what = format!("{loss}: {with}, {without} without, {clean} if nothing is lost");
        assert!(with < 1.3 * clean && with < without, "{what}");
        // Questions and answers are lost, too: after a time-out all goes again.
        assert!(again <= lost + 512, "{loss}: {lost} lost, {again} again");
    }
}

/// A queue that is full loses packets, too, and that is for sending fewer.
#[test]
fn few_packets_are_lost_at_a_bottleneck_that_says_nothing() {
    for queue in ["128k", "512k"] {
        let way = format!("rate=1G,queue={queue}");
        let mut simulation = with_faults(&way, "seed=1", Congestion::Window);
        let (count, len) = (400, 64 << 10);
        let took = write_all(&mut simulation, count, len);
        let bytes = count * u64::from(len);
        let lost = simulation.net.suffered(0, "overrun");
        let packets = bytes / 4096;
        assert!(lost < packets / 20, "{queue}: {lost} of {packets}");
        // Headers are some of it.
        let ideal = 8 * bytes;
        assert!(took < ideal * 11 / 10, "{queue}: {took} of {ideal}");
    }
}

/// Packets that are longer than the port's may be lost, and nobody else says why.
#[test]
fn who_has_a_longer_path_mtu_than_the_port_is_warned() {
    for (path_mtu, warned) in [(mtu::MTU_1024, false), (mtu::MTU_4096, true)] {
        let (readers, _) = Readers::new(1);
        let uplink = ON_HOSTS.map(|uplink| Uplink {
            active_mtu: mtu::MTU_1024,
            ..uplink
        });
        let pair = Pair::for_requests(qp_type::RC, (&readers, uplink), path_mtu, 4);
        let said = pair.ends[0].guest.warnings.all();
        let expected = "has a path MTU of 4096, but the port one of 1024: packets may be lost";
        assert_eq!(
            said.iter().any(|line| line.contains(expected)),
            warned,
            "{said:?}"
        );
    }
}

// D-WIRE-008.
/// A router that is congested says so before it must drop packets, and that is enough.
#[test]
fn a_sender_slows_down_when_a_router_is_congested() {
    let sent = "rate=1G,queue=128k";
    let mut deaf = with_faults(sent, "seed=1", Congestion::Window);
    write_all(&mut deaf, 100, 64 << 10);
    assert!(deaf.net.suffered(0, "overrun") > 0);
    assert_eq!(deaf.net.counted(0, "cnp_handled"), 0);
    let marks = format!("{sent},mark-from=32k");
    let mut told = with_faults(&marks, "seed=1", Congestion::Window);
    let took = write_all(&mut told, 100, 64 << 10);
    assert_eq!(told.net.suffered(0, "overrun"), 0);
    let marked = told.net.suffered(0, "marked");
    assert_eq!(told.net.counted(1, "congestion_marks"), marked);
    let notified = told.net.counted(1, "cnp_sent");
    assert!((1..=marked).contains(&notified));
    assert_eq!(told.net.counted(0, "cnp_handled"), notified);
    // The bottleneck is used: headers are some of it.
    let ideal = 100 * (64 << 10) * 8;
    assert!(took < ideal * 12 / 10, "{took} of {ideal}");
    // A network that holds senders back itself is not asked.
    let mut even = with_faults(&marks, "seed=1", Congestion::None);
    write_all(&mut even, 100, 64 << 10);
    assert_eq!(even.net.suffered(0, "marked"), 0);
}

/// What an RDMA READ brings is marked on its way to who asked for it, who asks for less then.
#[test]
fn a_requester_asks_for_less_when_what_comes_was_marked() {
    let mut simulation = with_faults("seed=1", "mark=100%", Congestion::Window);
    let len = 64 << 10;
    let here = simulation.pair.ends[0].allocate(len);
    let there = simulation.pair.ends[1].allocate(len);
    let read = Send {
        opcode: wr_opcode::RDMA_READ,
        flags: send_flag::SIGNALED,
        remote_addr: DATA + there,
        rkey: simulation.pair.ends[1].guest.key,
        sges: vec![simulation.pair.ends[0].guest.sge(here, len as u32)],
        ..Send::default()
    };
    simulation.pair.post_send(0, &read);
    simulation.run(SECOND);
    assert_eq!(simulation.pair.completions(0).len(), 1);
    assert!(simulation.net.counted(0, "congestion_marks") >= 16);
    assert!(simulation.net.counted(1, "cnp_handled") <= simulation.net.counted(0, "cnp_sent"));
}

/// The first end reads.
fn post_read(simulation: &mut Simulation, [here, there]: [u64; 2], len: u32) {
    let read = Send {
        opcode: wr_opcode::RDMA_READ,
        flags: send_flag::SIGNALED,
        remote_addr: DATA + there,
        rkey: simulation.pair.ends[1].guest.key,
        sges: vec![simulation.pair.ends[0].guest.sge(here, len)],
        ..Send::default()
    };
    simulation.pair.post_send(0, &read);
}

/// Four RDMA READs of 600,000 bytes by the first end, whose frames and the peer's have these faults.
fn long_reads(faults_of: [&str; 2], max_rd_atomic: u8) -> Simulation {
    let (readers, mut each) = Readers::new(1);
    let on = (&readers, ON_HOSTS);
    let pair = Pair::for_requests(qp_type::RC, on, mtu::MTU_1024, max_rd_atomic);
    let net = Net::new(each.pop().unwrap(), faults_of.map(faults), &pair);
    let mut simulation = Simulation { pair, net };
    let len = 600_000;
    let here = simulation.pair.ends[0].allocate(len);
    let there = simulation.pair.ends[1].allocate(len);
    let bytes = content(3, 0, len as u32);
    simulation.pair.ends[1].guest.write(there, &bytes);
    for _ in 0..4 {
        post_read(&mut simulation, [here, there], len as u32);
    }
    simulation.run(10 * SECOND);
    let cqes = simulation.pair.completions(0);
    let told: Vec<_> = cqes.iter().map(|cqe| cqe.status).collect();
    let what = format!("{faults_of:?} {max_rd_atomic}");
    assert_eq!(told, [wc_status::SUCCESS; 4], "{what}");
    let came = simulation.pair.ends[0].guest.read(here, len as usize);
    assert!(came == bytes, "{what}");
    simulation
}

/// A long RDMA READ is asked for in many parts.
#[test]
fn long_reads_bring_all() {
    for loss in ["seed=1", "seed=1,loss=1%"] {
        for max_rd_atomic in [1, 4] {
            long_reads([loss; 2], max_rd_atomic);
        }
    }
}

/// The first of four RDMA READs is lost and asked for again in parts, after a time-out. Its peer has
/// kept the others, and takes four at a time.
#[test]
fn what_goes_again_in_parts_is_no_more_than_the_peer_takes_at_a_time() {
    let (readers, mut each) = Readers::new(1);
    let pair = Pair::for_requests(qp_type::RC, (&readers, ON_HOSTS), mtu::MTU_1024, 4);
    let mut net = Net::new(each.pop().unwrap(), [faults("lose=0"); 2], &pair);
    net.set_asking(false);
    net.set_keeping(true);
    let mut simulation = Simulation { pair, net };
    let here = simulation.pair.ends[0].allocate(4096);
    let there = simulation.pair.ends[1].allocate(4096);
    for len in [2049, 1, 1, 1] {
        post_read(&mut simulation, [here, there], len);
    }
    simulation.run(SECOND / 1000);
    assert_eq!(simulation.net.counted(1, "kept"), 2);
    // Of three parts, the second is lost: all behind it waits for it.
    simulation.net.set_faults(0, faults("lose=1"));
    simulation.run(10 * SECOND);
    assert_eq!(simulation.net.suffered(0, "lost"), 1);
    let cqes = simulation.pair.completions(0);
    let told: Vec<_> = cqes.iter().map(|cqe| cqe.status).collect();
    assert_eq!(told, [wc_status::SUCCESS; 4]);
}

/// One packet of what is brought is lost: what is missing is asked for once, though many packets
/// behind it say so, and what is to come anyhow does not come twice.
#[test]
fn what_was_not_brought_is_asked_for_once() {
    let packets = 4 * 600_000u64.div_ceil(1024);
    for max_rd_atomic in [1, 4] {
        for lost in [3, 700, packets - 1] {
            let simulation = long_reads(["seed=1", &format!("lose={lost}")], max_rd_atomic);
            let sent = simulation.net.counted(1, "sent_frames");
            let again = simulation.net.counted(0, "sent_again");
            let what = format!("{max_rd_atomic}, {lost}: {sent} of {packets}, {again} again");
            // At most what was under way, and what it is asked for by.
            assert!(sent <= packets + 512, "{what}");
            assert!((1..=u64::from(max_rd_atomic)).contains(&again), "{what}");
        }
    }
}
