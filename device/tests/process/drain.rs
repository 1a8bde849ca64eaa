// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end of the process: what VMs have posted completes before, for some time.
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::core::command::ModifyCq;
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::command;
use vhost_device_rdma_bare::spec::verbs::qp_state;
use vhost_device_rdma_bare::{DeviceProcess, QpOptions, Vm, VmOptions};

use crate::common::{assert_success, caps, everything, Pair, SideOptions, Two, TIMEOUT};

/// Longer than what goes on may take, on a busy machine, and longer than any test may.
const LONG: &str = "15";
const SOON: Duration = Duration::from_secs(12);

/// WRITEs of 16 MiB, and a pair that may post as many.
const LENGTH: u32 = 16 << 20;
const WRITES: u64 = 128;

fn options() -> SideOptions {
    SideOptions {
        qp: QpOptions {
            caps: caps(256, 1, 0),
            ..QpOptions::default()
        },
        cqe: 256,
        memory: LENGTH as usize,
    }
}

fn write(pair: &Pair, wr_id: u64, length: u32) {
    let (a, b) = (&pair.a, &pair.b);
    let write =
        a.qp.write(wr_id, &[a.mr.sge(0, length)], b.mr.iova, b.mr.rkey);
    write.unwrap();
}

/// Posts a message for which there is no receive, however long it waits.
fn wait_for_receive(pair: &Pair) {
    pair.a.qp.send(1, &[pair.a.mr.sge(0, 8)]).unwrap();
    pair.a.assert_quiet();
}

/// How long the process takes to end from now on. VMs that go do not wait for it afterwards.
fn time_to_end(two: &mut Two) -> Duration {
    let start = Instant::now();
    let ended = two.process.wait_for_end();
    let time = start.elapsed();
    two.a.kill();
    two.b.kill();
    assert!(ended.unwrap(), "{}", two.process.log());
    time
}

/// Waits until the process ends, but has not yet.
fn await_drain(process: &mut DeviceProcess) {
    let deadline = Instant::now() + TIMEOUT;
    while !process.log().contains("queue pairs may complete") {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(process.is_alive());
}

#[test]
fn what_is_posted_completes_before_the_process_ends() {
    let mut two = Two::with(&["--drain", LONG]);
    let pair = two.pair_with(&options(), |_| ());
    pair.a.send_cq.arm(ArmMode::Any);
    (0..WRITES).for_each(|wr_id| write(&pair, wr_id, LENGTH));
    two.process.tell_to_end().unwrap();
    let time = time_to_end(&mut two);
    for wr_id in 0..WRITES {
        let cqe = pair.a.send_cq.poll();
        let cqe = cqe.unwrap_or_else(|| panic!("{wr_id} did not complete in {time:?}"));
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, wr_id);
    }
    assert!(pair.a.send_cq.wait_event(Duration::ZERO).unwrap());
    assert!(time < SOON, "{time:?}");
    let log = two.process.log();
    assert!(!log.contains("have not completed"), "{log}");
}

#[test]
fn a_process_without_work_ends_soon() {
    let mut two = Two::with(&["--drain", LONG]);
    let pair = two.pair();
    write(&pair, 1, 8);
    assert_success(&pair.a.sent());
    two.process.tell_to_end().unwrap();
    assert!(time_to_end(&mut two) < SOON);
}

/// What a VM posts later is not waited for.
#[test]
fn a_vm_that_posts_forever_holds_nothing_up() {
    let mut two = Two::with(&["--drain", LONG]);
    let pair = two.pair_with(&options(), |_| ());
    let stop = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut posted = 0;
            while !stop.load(Ordering::Relaxed) {
                while posted < 32 {
                    write(&pair, 1, 1 << 20);
                    posted += 1;
                }
                while pair.a.send_cq.poll().is_some() {
                    posted -= 1;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(50));
        two.process.tell_to_end().unwrap();
        let ended = two.process.wait_for_end();
        stop.store(true, Ordering::Relaxed);
        ended
    });
    two.a.kill();
    two.b.kill();
    assert!(ended.unwrap(), "{}", two.process.log());
    let log = two.process.log();
    assert!(!log.contains("have not completed"), "{log}");
}

#[test]
fn a_message_without_a_receive_holds_the_process_up_for_its_time() {
    let mut two = Two::with(&["--drain", "0.7"]);
    let pair = two.pair();
    wait_for_receive(&pair);
    two.process.tell_to_end().unwrap();
    let time = time_to_end(&mut two);
    assert!(time >= Duration::from_millis(600), "{time:?}");
    assert!(time < SOON, "{time:?}");
    assert_eq!(pair.a.send_cq.poll(), None);
    let log = two.process.log();
    let said = "ending with work requests of 1 queue pairs that have not completed";
    assert!(log.contains(said), "{log}");
}

#[test]
fn a_receive_that_comes_in_time_lets_a_message_go_on() {
    let mut two = Two::with(&["--drain", LONG]);
    let pair = two.pair();
    wait_for_receive(&pair);
    two.process.tell_to_end().unwrap();
    await_drain(&mut two.process);
    pair.b.qp.post_recv(2, &[pair.b.mr.sge(0, 8)]).unwrap();
    assert!(time_to_end(&mut two) < SOON);
    assert_success(&pair.a.send_cq.poll().unwrap());
    assert_success(&pair.b.recv_cq.poll().unwrap());
}

#[test]
fn another_signal_ends_the_process_at_once() {
    let mut two = Two::with(&["--drain", "3600"]);
    let pair = two.pair();
    wait_for_receive(&pair);
    two.process.tell_to_end().unwrap();
    await_drain(&mut two.process);
    two.process.tell_to_end().unwrap();
    time_to_end(&mut two);
    let log = two.process.log();
    assert!(log.contains("ending at once on another SIGTERM"), "{log}");
}

#[test]
fn without_a_time_the_process_ends_at_once() {
    let mut two = Two::with(&["--drain", "0"]);
    let pair = two.pair();
    wait_for_receive(&pair);
    two.process.tell_to_end().unwrap();
    time_to_end(&mut two);
    let log = two.process.log();
    assert!(!log.contains("have not completed"), "{log}");
}

/// Queue pairs that will not send what they have hold nothing up, nor do VMs that are stopped.
#[test]
fn what_cannot_go_on_holds_nothing_up() {
    type Change = fn(&Two, &Pair);
    let changes: [(&str, Change); 4] = [
        // The process may end before it answers.
        ("reset", |_, pair| {
            drop(pair.a.qp.set_state(qp_state::RESET))
        }),
        ("in error", |_, pair| {
            drop(pair.a.qp.set_state(qp_state::ERR))
        }),
        ("stopped", |two, _| drop(two.a.stop())),
        ("gone", |two, _| two.a.kill()),
    ];
    for (what, change) in changes {
        let mut two = Two::with(&["--drain", LONG]);
        let pair = two.pair();
        wait_for_receive(&pair);
        two.process.tell_to_end().unwrap();
        await_drain(&mut two.process);
        change(&two, &pair);
        let time = time_to_end(&mut two);
        assert!(time < SOON, "{what}: {time:?}");
    }
    // They were so before.
    let mut two = Two::with(&["--drain", LONG]);
    let (drained, stopped) = (two.pair(), Pair::new(&two.b, &two.b));
    drained.a.qp.set_state(qp_state::SQD).unwrap();
    write(&drained, 1, 8);
    wait_for_receive(&stopped);
    two.b.stop().unwrap();
    two.process.tell_to_end().unwrap();
    assert!(time_to_end(&mut two) < SOON);
    assert_eq!(drained.a.send_cq.poll(), None);
}

#[test]
fn events_that_are_held_back_are_raised_before_the_process_ends() {
    let mut two = Two::of(&["--drain", LONG], &everything());
    let pair = two.pair();
    let cq = &pair.a.send_cq;
    let moderation = command::ModifyCq {
        cqn: cq.number(),
        count: 1000,
        period: u16::MAX,
        reserved: 0,
    };
    two.a.execute::<ModifyCq>(&moderation).unwrap();
    cq.arm(ArmMode::Any);
    write(&pair, 1, 8);
    two.process.tell_to_end().unwrap();
    time_to_end(&mut two);
    assert_success(&cq.poll().unwrap());
    assert!(cq.wait_event(Duration::ZERO).unwrap(), "no event");
}

#[test]
fn nobody_new_is_served_while_the_process_ends() {
    let mut process = crate::common::process_with(2, &["--drain", "2"]);
    let first = crate::common::vm(process.socket(0));
    let pair = Pair::new(&first, &first);
    wait_for_receive(&pair);
    process.tell_to_end().unwrap();
    await_drain(&mut process);
    // It is there yet, and no longer the one that hears: it ends with the process.
    let other = Vm::connect(process.socket(1), VmOptions::default());
    assert!(other.is_err());
    assert!(UnixStream::connect(process.status_socket()).is_err());
    assert!(process.wait_for_end().unwrap(), "{}", process.log());
    first.kill();
}
