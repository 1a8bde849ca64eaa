// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two VMs of one process, without threads and clock: what the requester of the local fabric makes
//! of them.
use std::sync::Arc;

use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::command::QpAttr;
use virtio_rdma_spec::event::event_type;
use virtio_rdma_spec::verbs::{
    access, qp_attr, qp_state, qp_type, send_flag, vendor_err, wc_opcode, wc_status, wr_opcode,
};

use super::busy_poll::{BusyPoll, Came};
use super::lookup_cache::LookupCache;
use super::{Local, LocalCarrier};
use crate::engine::fixture::{Destination, Guest, Send, DATA, ENTRIES};
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;
use crate::engine::vm::Schedule;
use crate::engine::{Budget, BUDGET, LONE_BUDGET};
use crate::fabric::registry::Registry;
use crate::fabric::scenario::{
    carry_out_reliable_datagrams, fail_reliable_datagrams, programs, reliable_datagrams, verify,
    Clock, End, Pair, World, RECEIVES, SECOND, TIMEOUT_NANOSECONDS,
};
use crate::fabric::wire::capture::Capture;
use crate::fabric::wire::imagined::{Imagined, Positions};
use crate::fabric::{self, Fabric, FLUSH};

/// Nobody busy polls.
pub(in super::super) struct Never;

impl BusyPoll for Never {
    type OwnDoorbell<'d> = ();

    fn may(&self) -> bool {
        false
    }

    fn others_ring<const N: usize>(&self, _: [Option<&()>; N]) -> bool {
        false
    }

    fn spend(&mut self, _: Budget) {}

    fn doorbell<'d>(&self, _: &'d Tables, _: &'d Qp) -> Option<()> {
        None
    }

    fn wait<const N: usize>(
        &mut self,
        _: [&(); N],
        _: bool,
        _: impl Fn() -> Option<Came>,
    ) -> Option<Came> {
        None
    }

    fn pause(&self, _: &Tables, _: &Qp, _: u32) -> bool {
        false
    }

    fn next(&mut self, _: &Arc<Qp>) {}
}

/// The process that two ends are in, and its time.
pub(in super::super) struct Process {
    reader: Reader,
    registry: Registry,
    budget: Budget,
    clock: Clock,
    pub(in super::super) capture: Capture,
    positions: Positions,
}

impl Process {
    pub(in super::super) fn new(reader: Reader, pair: &Pair) -> Self {
        let registry = Registry::default();
        for end in &pair.ends {
            assert!(registry.claim(end.guest.gid, &end.guest.vm));
        }
        Self {
            reader,
            registry,
            budget: BUDGET,
            clock: Clock::default(),
            capture: Capture::default(),
            positions: Positions::default(),
        }
    }
}

impl World for Process {
    fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    fn serve(&mut self, pair: &Pair, end: usize) -> bool {
        let vms = [0, 1].map(|end| pair.ends[end].guest.vm.clone());
        let section = self.reader.enter();
        let tables = pair.ends[end].guest.vm.read_in(&section).unwrap();
        let (registry, budget, now) = (&self.registry, self.budget, self.clock.now);
        let (capture, positions) = (&self.capture, &mut self.positions);
        self.clock.poll(pair, end, |qp| {
            let mut imagined = Imagined::new(capture, positions);
            let mut cache = LookupCache::new(&section, registry, &vms);
            let mut carrier = LocalCarrier {
                cache: &mut cache,
                busy_poll: &mut Never,
                done: Budget::NONE,
                elsewhere: None,
                observer: match &mut imagined {
                    Some(imagined) => Some(imagined),
                    None => None,
                },
            };
            fabric::poll(&mut carrier, tables, qp, now, budget)
        })
    }
}

fn start(change: impl Fn(&mut QpAttr)) -> (Pair, Process) {
    start_with(qp_type::RC, change)
}

fn start_with(qp_type: u8, change: impl Fn(&mut QpAttr)) -> (Pair, Process) {
    let (readers, mut each) = Readers::new(1);
    let pair = Pair::of(qp_type, (&readers, None), change);
    let process = Process::new(each.pop().unwrap(), &pair);
    (pair, process)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The same programs as over a network, with the same outcome.
    #[test]
    fn messages_arrive_once_and_in_order(program in programs(), lone: bool, captured: bool) {
        let (mut pair, mut process) = start(|attr| attr.path_mtu = program.path_mtu);
        process.capture.set(captured);
        process.budget = if lone { LONE_BUDGET } else { BUDGET };
        verify(&program, &mut pair, &mut process)?;
    }
}

#[test]
fn reads_and_atomics_bring_what_was_there() {
    let (mut pair, mut process) = start(|_| {});
    let there = pair.ends[1].allocate(4096);
    let here = pair.ends[0].allocate(4096);
    pair.ends[1].guest.write(there, &[7; 4096]);
    pair.ends[1].guest.write(there, &40u64.to_le_bytes());
    let (key, guest) = (pair.ends[1].guest.key, &pair.ends[0].guest);
    let request = |opcode, wr_id, len| Send {
        opcode,
        wr_id,
        flags: send_flag::SIGNALED,
        remote_addr: DATA + there,
        rkey: key,
        operands: [2, 0],
        sges: vec![guest.sge(here, len)],
        ..Send::default()
    };
    let read = request(wr_opcode::RDMA_READ, 1, 4096);
    let add = request(wr_opcode::ATOMIC_FETCH_AND_ADD, 2, 8);
    let unaligned = Send {
        remote_addr: DATA + there + 4,
        ..request(wr_opcode::ATOMIC_FETCH_AND_ADD, 3, 8)
    };
    for send in [&read, &add] {
        pair.post_send(0, send);
        process.run(&mut pair, SECOND);
    }
    let brought: Vec<_> = pair
        .completions(0)
        .iter()
        .map(|cqe| (cqe.wr_id, cqe.status, cqe.opcode, cqe.byte_len))
        .collect();
    let good = wc_status::SUCCESS;
    let expected = [
        (1, good, wc_opcode::RDMA_READ, 4096),
        (2, good, wc_opcode::FETCH_ADD, 8),
    ];
    assert_eq!(brought, expected);
    let bytes = pair.ends[0].guest.read(here, 4096);
    assert_eq!((&bytes[..8], bytes[8]), (&40u64.to_le_bytes()[..], 7));
    assert_eq!(pair.ends[1].guest.read(there, 8), 42u64.to_le_bytes());
    pair.post_send(0, &unaligned);
    process.run(&mut pair, SECOND);
    let [cqe] = pair.completions(0)[..] else {
        panic!("not one completion");
    };
    let told = (cqe.status, cqe.vendor_err);
    assert_eq!(told, (wc_status::REM_INV_REQ_ERR, vendor_err::ALIGNMENT));
    let events = pair.ends[1].guest.events.take();
    let request_error = (event_type::QP_REQ_ERR, pair.ends[1].qp.qp.number);
    assert!(events.contains(&request_error), "{events:?}");
}

/// In lists, work requests that are alike are carried out as trains. Lengths and addresses that are
/// no words, and WRITEs among READs, interrupt these.
#[test]
fn lists_of_reads_and_writes_bring_what_was_there() {
    const LIST: u64 = 16;
    let (mut pair, mut process) = start(|_| {});
    let there = pair.ends[1].allocate(64 << 10);
    let here = pair.ends[0].allocate(64 << 10);
    let key = pair.ends[1].guest.key;
    for round in 0..4u8 {
        let length = |i: u64| [64, 64, 8, 64, 24, 256, 64, 1024, 63, 64][(i % 10) as usize];
        let writes = |i: u64| i % 7 == 3;
        let bytes = |i: u64| vec![16 * round + i as u8; length(i)];
        for i in 0..LIST {
            let (at, to) = (1024 * i, if writes(i) { 0 } else { 1 });
            let from = if to == 0 { here } else { there };
            pair.ends[to].guest.write(from + at, &bytes(i));
            let guest = &pair.ends[0].guest;
            let opcode = if writes(i) {
                wr_opcode::RDMA_WRITE
            } else {
                wr_opcode::RDMA_READ
            };
            let send = Send {
                opcode,
                wr_id: i,
                flags: send_flag::SIGNALED * u8::from(i % 2 == 1 || round == 3),
                remote_addr: DATA + there + at,
                rkey: key,
                sges: vec![guest.sge(here + at, length(i) as u32)],
                ..Send::default()
            };
            pair.post_send(0, &send);
        }
        process.run(&mut pair, SECOND);
        let done: Vec<_> = pair
            .completions(0)
            .iter()
            .map(|cqe| (cqe.wr_id, cqe.status, cqe.opcode, cqe.byte_len))
            .collect();
        let signaled = (0..LIST).filter(|i| i % 2 == 1 || round == 3);
        let expected: Vec<_> = signaled
            .map(|i| match writes(i) {
                true => (i, wc_status::SUCCESS, wc_opcode::RDMA_WRITE, 0),
                false => (
                    i,
                    wc_status::SUCCESS,
                    wc_opcode::RDMA_READ,
                    length(i) as u32,
                ),
            })
            .collect();
        assert_eq!(done, expected, "round {round}");
        for i in 0..LIST {
            let (to, at) = if writes(i) { (1, there) } else { (0, here) };
            let brought = pair.ends[to].guest.read(at + 1024 * i, length(i));
            assert_eq!(brought, bytes(i), "round {round}, {i}");
        }
    }
}

#[test]
fn a_queue_pair_that_grants_nothing_is_not_accessed() {
    let (mut pair, mut process) = start(|attr| attr.access_flags = access::REMOTE_READ);
    let there = pair.ends[1].allocate(64);
    let send = Send {
        opcode: wr_opcode::RDMA_WRITE,
        remote_addr: DATA + there,
        rkey: pair.ends[1].guest.key,
        ..pair.a_send(0, 1, 64)
    };
    pair.ends[0].guest.write(0, &[9; 64]);
    pair.post_send(0, &send);
    process.run(&mut pair, SECOND);
    let [cqe] = pair.completions(0)[..] else {
        panic!("not one completion");
    };
    let told = (cqe.status, cqe.vendor_err);
    assert_eq!(told, (wc_status::REM_INV_REQ_ERR, vendor_err::QP_ACCESS));
    assert_eq!(pair.ends[1].guest.read(there, 64), [0; 64]);
}

// D-RTY-002.
#[test]
fn a_peer_that_is_nowhere_is_given_up_after_all_attempts_and_not_before() {
    let (mut pair, mut process) = start(|attr| attr.retry_cnt = 3);
    let gone = &pair.ends[1].guest;
    process.registry.release(gone.gid, &gone.vm);
    let send = pair.a_send(0, 5, 100);
    pair.post_send(0, &send);
    let waits = 4 * TIMEOUT_NANOSECONDS;
    process.run(&mut pair, waits - 1);
    assert_eq!(pair.completions(0), []);
    process.run(&mut pair, waits);
    let [cqe] = pair.completions(0)[..] else {
        panic!("not one completion");
    };
    let told = (cqe.wr_id, cqe.status, cqe.vendor_err);
    assert_eq!(told, (5, wc_status::RETRY_EXC_ERR, vendor_err::NO_ANSWER));
    assert_eq!(pair.state(0), qp_state::ERR);
}

// D-ERR-005.
#[test]
fn a_completion_in_error_is_seen_after_the_change_of_state() {
    let seen = |qp_type, end: usize, spoil: fn(&mut Pair, &mut Send)| {
        let (mut pair, mut process) = start_with(qp_type, |_| {});
        let at = pair.ends[1].allocate(64);
        pair.post_receive(1, 1, at, 64);
        let mut send = pair.a_send(0, 1, 64);
        spoil(&mut pair, &mut send);
        let watched = &pair.ends[end];
        watched.guest.watch_state(&watched.qp);
        pair.post_send(0, &send);
        process.run(&mut pair, SECOND);
        pair.ends[end].guest.events.states()
    };
    let to_nobody = |pair: &mut Pair, _: &mut Send| {
        pair.set_state(1, qp_state::ERR);
        pair.completions(1);
    };
    let bad_key = |_: &mut Pair, send: &mut Send| send.sges[0].lkey ^= 1;
    let too_long = |pair: &mut Pair, send: &mut Send| *send = pair.a_send(0, 1, 65);
    assert_eq!(seen(qp_type::RC, 0, to_nobody), [qp_state::ERR]);
    assert_eq!(seen(qp_type::RC, 0, bad_key), [qp_state::ERR]);
    assert_eq!(seen(qp_type::UC, 0, bad_key), [qp_state::SQE]);
    for end in [0, 1] {
        assert_eq!(seen(qp_type::RC, end, too_long), [qp_state::ERR]);
    }
}

#[test]
fn a_peer_that_comes_is_met_at_once() {
    let (mut pair, mut process) = start(|_| {});
    let at = pair.ends[1].allocate(100);
    pair.post_receive(1, RECEIVES, at, 100);
    let (gid, vm) = (pair.ends[1].guest.gid, pair.ends[1].guest.vm.clone());
    process.registry.release(gid, &vm);
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    process.run(&mut pair, 10);
    assert_eq!(pair.completions(0), []);
    assert!(process.registry.claim(gid, &vm));
    pair.ends[0].guest.run_list.schedule(&pair.ends[0].qp.qp);
    process.run(&mut pair, 20);
    assert_eq!(pair.completions(0).len(), 1);
    assert_eq!(pair.completions(1).len(), 1);
}

#[test]
fn a_receive_that_never_comes_ends_the_retries() {
    let (mut pair, mut process) = start(|attr| attr.rnr_retry = 2);
    for wr_id in 0..3 {
        let send = pair.a_send(0, wr_id, 3000);
        pair.post_send(0, &send);
    }
    process.run(&mut pair, SECOND);
    let cqes = pair.completions(0);
    let statuses: Vec<_> = cqes.iter().map(|cqe| cqe.status).collect();
    let flushed = wc_status::WR_FLUSH_ERR;
    assert_eq!(statuses, [wc_status::RNR_RETRY_EXC_ERR, flushed, flushed]);
    assert_eq!(pair.ends[0].guest.vm.totals().rnr_naks, 3);
    // The responder has no fault in it.
    assert_eq!(pair.state(1), qp_state::RTS);
}

#[test]
fn a_receive_that_is_posted_wakes_the_sender() {
    // The longest wait of all, were it not woken.
    let (mut pair, mut process) = start(|attr| attr.min_rnr_timer = 0);
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    process.run(&mut pair, 1);
    let at = pair.ends[1].allocate(100);
    pair.post_receive(1, RECEIVES, at, 100);
    process.run(&mut pair, SECOND / 1000);
    assert_eq!(pair.completions(0).len(), 1);
    assert_eq!(pair.completions(1).len(), 1);
}

// D-RNR-003.
#[test]
fn a_sender_that_waits_for_long_seldom_asks() {
    // 10 µs.
    let (mut pair, mut process) = start(|attr| (attr.rnr_retry, attr.min_rnr_timer) = (7, 1));
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    process.run(&mut pair, 10 * SECOND);
    let naks = pair.ends[0].guest.vm.totals().rnr_naks;
    assert!((10..40).contains(&naks), "{naks}");
    // It is woken at once all the same.
    let at = pair.ends[1].allocate(100);
    pair.post_receive(1, RECEIVES, at, 100);
    process.run(&mut pair, 10 * SECOND + SECOND / 1000);
    assert_eq!(pair.completions(0).len(), 1);
}

#[test]
fn a_peer_that_is_stopped_is_waited_for_and_nothing_is_lost() {
    let (mut pair, mut process) = start(|attr| attr.retry_cnt = 0);
    let at = pair.ends[1].allocate(100);
    pair.post_receive(1, RECEIVES, at, 100);
    pair.ends[1].guest.vm.tables_mut().running = false;
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    process.run(&mut pair, SECOND);
    assert_eq!(pair.completions(0), []);
    pair.ends[1].guest.vm.tables_mut().running = true;
    process.run(&mut pair, 2 * SECOND);
    let statuses = pair.completions(0).iter().map(|cqe| cqe.status).max();
    assert_eq!(statuses, Some(wc_status::SUCCESS));
    assert_eq!(pair.completions(1).len(), 1);
}

#[test]
fn a_port_that_is_down_reaches_nobody() {
    let (mut pair, mut process) = start(|attr| attr.retry_cnt = 1);
    let (local, vm) = (
        Local {
            registry: &process.registry,
        },
        pair.ends[1].guest.vm.clone(),
    );
    assert!(local.port(&vm).up);
    vm.set_up_for_driver(false);
    local.set_link(&vm, false);
    assert!(!local.port(&vm).up);
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    process.run(&mut pair, SECOND);
    let statuses: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.status).collect();
    assert_eq!(statuses, [wc_status::RETRY_EXC_ERR]);
}

#[test]
fn a_queue_that_drains_begins_nothing_more() {
    let (mut pair, mut process) = start(|_| {});
    let send = pair.a_send(0, 1, 100);
    pair.post_send(0, &send);
    // It waits for a receive.
    process.run(&mut pair, 1);
    let drains = QpAttr {
        qp_state: qp_state::SQD,
        en_sqd_async_notify: 1,
        ..QpAttr::default()
    };
    let mask = qp_attr::STATE | qp_attr::EN_SQD_ASYNC_NOTIFY;
    pair.modify(0, mask, &drains);
    let send = pair.a_send(0, 2, 100);
    pair.post_send(0, &send);
    for wr_id in [1, 2] {
        let at = pair.ends[1].allocate(100);
        pair.post_receive(1, RECEIVES + wr_id, at, 100);
    }
    process.run(&mut pair, SECOND);
    let sent: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.wr_id).collect();
    assert_eq!(sent, [1]);
    let events = pair.ends[0].guest.events.take();
    assert!(events
        .iter()
        .any(|(what, _)| *what == event_type::SQ_DRAINED));
    pair.set_state(0, qp_state::RTS);
    process.run(&mut pair, 2 * SECOND);
    let sent: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.wr_id).collect();
    assert_eq!(sent, [2]);
}

/// The second VM of a pair goes. Its place in the pair takes a VM that has its GID and makes a queue
/// pair of its number, connected to the first VM's. With `lurking`, that queue pair was there before
/// the pair was connected.
fn taken_over(qp_type: u8, lurking: bool) -> (Pair, Process) {
    let (readers, mut each) = Readers::new(1);
    let second = || End::new(Guest::with_qp_numbers(&readers, 2, 70..=70), qp_type);
    let first = End::new(Guest::new(&readers, 1), qp_type);
    let other = lurking.then(second);
    let mut pair = Pair::between([first, second()], |attr| attr.retry_cnt = 1);
    let process = Process::new(each.pop().unwrap(), &pair);
    let other = other.unwrap_or_else(second);
    let gone = std::mem::replace(&mut pair.ends[1], other);
    process.registry.release(gone.guest.gid, &gone.guest.vm);
    drop(gone);
    let [first, second] = &pair.ends;
    assert!(process.registry.claim(second.guest.gid, &second.guest.vm));
    let to = (&first.guest, first.qp.qp.number);
    second.guest.connect(&second.qp, to, |attr| {
        attr.retry_cnt = 1;
        attr.timeout = 1;
    });
    (pair, process)
}

/// Types of queue pairs, and whether one lurks.
const TAKEN_OVER: [(u8, bool); 4] = [
    (qp_type::RC, false),
    (qp_type::RC, true),
    (qp_type::UC, false),
    (qp_type::UC, true),
];

/// What comes of a message that nobody takes.
fn lost(qp_type: u8) -> u8 {
    match qp_type {
        qp_type::UC => wc_status::SUCCESS,
        _ => wc_status::RETRY_EXC_ERR,
    }
}

// D-PEER-001.
#[test]
fn a_vm_that_takes_a_peers_gid_and_number_does_not_reach_memory() {
    for (qp_type, lurking) in TAKEN_OVER {
        let (mut pair, mut process) = taken_over(qp_type, lurking);
        let there = pair.ends[0].allocate(64);
        let received = pair.ends[0].allocate(64);
        pair.ends[1].guest.write(0, &[9; 64]);
        pair.post_receive(0, RECEIVES, received, 64);
        let send = pair.a_send(1, 2, 64);
        let write = Send {
            opcode: wr_opcode::RDMA_WRITE,
            wr_id: 1,
            remote_addr: DATA + there,
            rkey: pair.ends[0].guest.key,
            ..send.clone()
        };
        for send in [write, send] {
            pair.post_send(1, &send);
        }
        process.run(&mut pair, SECOND);
        let cqes = pair.completions(1);
        assert_eq!(cqes.first().map(|cqe| cqe.status), Some(lost(qp_type)));
        for at in [there, received] {
            assert_eq!(pair.ends[0].guest.read(at, 64), [0; 64]);
        }
        assert_eq!(pair.completions(0), []);
        assert_eq!(pair.ends[0].guest.events.take(), []);
        assert_eq!(pair.state(0), qp_state::RTS);
    }
}

// D-PEER-001.
#[test]
fn a_vm_that_takes_a_peers_gid_and_number_receives_nothing() {
    for (qp_type, lurking) in TAKEN_OVER {
        let (mut pair, mut process) = taken_over(qp_type, lurking);
        let at = pair.ends[1].allocate(64);
        let written = pair.ends[1].allocate(64);
        pair.post_receive(1, RECEIVES, at, 64);
        pair.ends[0].guest.write(0, &[9; 64]);
        let send = pair.a_send(0, 1, 64);
        let write = Send {
            opcode: wr_opcode::RDMA_WRITE,
            wr_id: 2,
            remote_addr: DATA + written,
            rkey: pair.ends[1].guest.key,
            ..send.clone()
        };
        for send in [send, write] {
            pair.post_send(0, &send);
        }
        process.run(&mut pair, SECOND);
        let cqes = pair.completions(0);
        assert_eq!(cqes.first().map(|cqe| cqe.status), Some(lost(qp_type)));
        for at in [at, written] {
            assert_eq!(pair.ends[1].guest.read(at, 64), [0; 64]);
        }
        assert_eq!(pair.completions(1), []);
    }
}

// D-PEER-001.
#[test]
fn a_queue_pair_that_is_reset_is_the_same_peer_and_one_with_its_number_is_not() {
    let (readers, mut each) = Readers::new(1);
    let short = |attr: &mut QpAttr| attr.retry_cnt = 1;
    let first = Guest::new(&readers, 1);
    let second = Guest::with_qp_numbers(&readers, 2, 70..=70);
    let ends = [first, second].map(|guest| End::new(guest, qp_type::RC));
    let mut pair = Pair::between(ends, short);
    let mut process = Process::new(each.pop().unwrap(), &pair);
    let mut deliver = |pair: &mut Pair, wr_id| {
        let at = pair.ends[1].allocate(64);
        pair.post_receive(1, RECEIVES + wr_id, at, 64);
        let send = pair.a_send(0, wr_id, 64);
        pair.post_send(0, &send);
        let until = process.clock.now + SECOND;
        process.run(pair, until);
        pair.completions(0).first().map(|cqe| cqe.status)
    };
    assert_eq!(deliver(&mut pair, 1), Some(wc_status::SUCCESS));
    // Its owner connects it again.
    pair.set_state(1, qp_state::RESET);
    let End { guest, qp, .. } = &mut pair.ends[1];
    guest.forget_posted(qp);
    let first = &pair.ends[0];
    let to = (&first.guest, first.qp.qp.number);
    pair.ends[1].guest.connect(&pair.ends[1].qp, to, short);
    assert_eq!(deliver(&mut pair, 2), Some(wc_status::SUCCESS));
    // It is destroyed, and another one is made.
    let End { guest, qp, .. } = &mut pair.ends[1];
    let old = guest.vm.tables_mut().qps.remove(qp.qp.number);
    assert!(old.is_some());
    *qp = guest.queue_pair(qp_type::RC);
    assert_eq!(qp.qp.number, 70);
    let first = &pair.ends[0];
    let to = (&first.guest, first.qp.qp.number);
    pair.ends[1].guest.connect(&pair.ends[1].qp, to, short);
    assert_eq!(deliver(&mut pair, 3), Some(wc_status::RETRY_EXC_ERR));
}

/// The send queue of a UC queue pair in SQE, full of WRITEs to `there` but for `free` entries: what
/// was posted when nobody polled it any more.
fn in_error(free: u64) -> (Pair, Process, Send) {
    let (mut pair, mut process) = start_with(qp_type::UC, |_| {});
    let there = pair.ends[1].allocate(8);
    let write = Send {
        opcode: wr_opcode::RDMA_WRITE,
        remote_addr: DATA + there,
        rkey: pair.ends[1].guest.key,
        ..pair.a_send(0, 0, 1)
    };
    let refused = Send {
        opcode: wr_opcode::RDMA_READ,
        ..write.clone()
    };
    pair.post_send(0, &refused);
    process.run(&mut pair, SECOND);
    assert_eq!(pair.completions(0)[0].status, wc_status::LOC_QP_OP_ERR);
    assert_eq!(pair.state(0), qp_state::SQE);
    pair.ends[0].guest.write(0, &[9]);
    for wr_id in 1..=u64::from(ENTRIES) - free {
        let write = Send {
            wr_id,
            ..write.clone()
        };
        pair.post_send(0, &write);
    }
    (pair, process, write)
}

// D-SQE-002.
#[test]
fn what_was_posted_before_a_send_queue_is_ready_again_is_flushed_first_and_not_all_at_once() {
    let (mut pair, mut process, write) = in_error(8);
    let there = write.remote_addr - DATA;
    pair.set_state(0, qp_state::RTS);
    // The command itself flushes nothing.
    assert_eq!(pair.completions(0).len(), 0);
    assert_eq!(pair.state(0), qp_state::RTS);
    let old = u64::from(ENTRIES) - 8;
    for wr_id in old + 1..=old + 8 {
        let later = Send {
            wr_id,
            remote_addr: write.remote_addr + 1,
            ..write.clone()
        };
        pair.post_send(0, &later);
    }
    let mut cqes = Vec::new();
    while cqes.len() < old as usize {
        assert!(process.serve(&pair, 0));
        let some = pair.completions(0);
        assert!((1..=FLUSH as usize).contains(&some.len()), "{}", some.len());
        cqes.extend(some);
    }
    process.run(&mut pair, 2 * SECOND);
    cqes.extend(pair.completions(0));
    assert_eq!(cqes.len(), old as usize + 8);
    for (cqe, wr_id) in cqes.iter().zip(1..) {
        let status = match wr_id <= old {
            true => wc_status::WR_FLUSH_ERR,
            false => wc_status::SUCCESS,
        };
        assert_eq!((cqe.wr_id, cqe.status), (wr_id, status));
    }
    assert_eq!(pair.ends[1].guest.read(there, 2), [0, 9]);
}

// D-SQE-002.
#[test]
fn a_send_queue_that_is_ready_again_drains_when_it_has_flushed() {
    let (mut pair, mut process, _) = in_error(0);
    pair.set_state(0, qp_state::RTS);
    let drains = QpAttr {
        qp_state: qp_state::SQD,
        en_sqd_async_notify: 1,
        ..QpAttr::default()
    };
    let mask = qp_attr::STATE | qp_attr::EN_SQD_ASYNC_NOTIFY;
    pair.modify(0, mask, &drains);
    let drained = (event_type::SQ_DRAINED, pair.ends[0].qp.qp.number);
    let mut flushed = 0;
    while flushed < ENTRIES as usize {
        assert!(!pair.ends[0].guest.events.take().contains(&drained));
        assert!(process.serve(&pair, 0));
        flushed += pair.completions(0).len();
    }
    process.run(&mut pair, 2 * SECOND);
    assert_eq!(pair.ends[0].guest.events.take(), [drained]);
    assert_eq!(pair.completions(0), []);
}

#[test]
fn a_queue_pair_that_is_reset_flushes_nothing_of_its_former_life() {
    let (mut pair, mut process, write) = in_error(8);
    pair.set_state(0, qp_state::RTS);
    pair.set_state(0, qp_state::RESET);
    assert_eq!(pair.completions(0).len(), 0);
    for end in [0, 1] {
        pair.set_state(end, qp_state::RESET);
        let End { guest, qp, .. } = &mut pair.ends[end];
        guest.forget_posted(qp);
    }
    pair.connect(|_| {});
    pair.post_send(0, &write);
    process.run(&mut pair, 2 * SECOND);
    let statuses: Vec<_> = pair.completions(0).iter().map(|cqe| cqe.status).collect();
    assert_eq!(statuses, [wc_status::SUCCESS]);
}

/// Reliable datagrams: two ends, each with a queue pair of SRD.
fn start_srd() -> (Pair, Process) {
    start_with(qp_type::SRD, |_| {})
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The same as over a network.
    #[test]
    fn reliable_datagrams_arrive_once(messages in reliable_datagrams()) {
        let (mut pair, mut process) = start_srd();
        carry_out_reliable_datagrams(&messages, &mut pair, &mut process)?;
    }
}

/// What has to wait for a receive, or for its destination, is overtaken.
#[test]
fn a_reliable_datagram_that_waits_keeps_no_other() {
    let (mut pair, mut process) = start_srd();
    let nowhere = Send {
        to: Destination {
            gid: [9; 16],
            ..Destination::default()
        },
        ..pair.a_reliable_datagram(0, wr_opcode::SEND, 0, 10)
    };
    pair.post_send(0, &nowhere);
    for (wr_id, opcode) in [
        (1, wr_opcode::SEND),
        (2, wr_opcode::RDMA_WRITE_WITH_IMM),
        (3, wr_opcode::RDMA_WRITE),
    ] {
        let len = 100_000 * u32::from(opcode != wr_opcode::SEND);
        let send = pair.a_reliable_datagram(0, opcode, wr_id, len);
        pair.post_send(0, &send);
    }
    process.run(&mut pair, SECOND);
    assert_eq!(pair.told(), [(3, wc_status::SUCCESS)]);
    pair.post_receive(1, RECEIVES, 0, 100);
    pair.post_receive(1, RECEIVES + 1, 0, 100);
    process.run(&mut pair, 3 * SECOND);
    let mut waited = pair.told();
    waited.sort_unstable();
    assert_eq!(waited, [(1, wc_status::SUCCESS), (2, wc_status::SUCCESS)]);
    process.run(&mut pair, 5 * SECOND);
    assert_eq!(pair.told(), [(0, wc_status::RESP_TIMEOUT_ERR)]);
    assert_eq!([0, 1].map(|end| pair.state(end)), [qp_state::RTS; 2]);
}

// D-SRD-003.
/// An error is of its message alone, at both ends.
#[test]
fn a_reliable_datagram_that_fails_ends_nothing_else() {
    let (mut pair, mut process) = start_srd();
    fail_reliable_datagrams(&mut pair, &mut process);
}

// D-SRD-005.
/// What waits is flushed when the queue pair goes to ERR, and forgotten when it is reset.
#[test]
fn reliable_datagrams_that_wait_end_with_their_queue_pair() {
    let (mut pair, mut process) = start_srd();
    for wr_id in 0..3 {
        let send = pair.a_reliable_datagram(0, wr_opcode::SEND, wr_id, 8);
        pair.post_send(0, &send);
    }
    process.run(&mut pair, SECOND);
    assert_eq!(pair.told(), []);
    pair.set_state(0, qp_state::ERR);
    process.run(&mut pair, 2 * SECOND);
    let mut flushed = pair.told();
    flushed.sort_unstable();
    assert_eq!(
        flushed,
        [0, 1, 2].map(|wr_id| (wr_id, wc_status::WR_FLUSH_ERR))
    );
}
