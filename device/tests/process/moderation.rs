// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moderation: events of completion queues that are held back, by count and by time, and are never
//! lost. (The rules, without the time, have their tests beside the code.)
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::core::command::ModifyCq;
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::command::{self, status};
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{qp_state, send_flag, wr_opcode};

use crate::common::{assert_refused, assert_success, everything, Pair, Two, NOTHING, TIMEOUT};

/// The longest period, microseconds, and as time.
const LONGEST: u16 = u16::MAX;
const LONG: Duration = Duration::from_micros(LONGEST as u64);
/// Attempts at what must be quick: on a busy machine anything may take long, but not always.
const ATTEMPTS: usize = 100;

fn two() -> Two {
    Two::of(&[], &everything())
}

/// Sends `count` messages, all of which have completed on both sides when this returns.
fn send(pair: &Pair, count: usize, flags: u8) {
    let (a, b) = (&pair.a, &pair.b);
    for _ in 0..count {
        b.qp.post_recv(1, &[b.mr.sge(0, 64)]).unwrap();
        let wqe = SendWqe {
            opcode: wr_opcode::SEND,
            flags,
            ..SendWqe::default()
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
    }
    for _ in 0..count {
        assert_success(&a.sent());
        assert_success(&b.received());
    }
}

/// Whether there is an event by now.
fn event(pair: &Pair) -> bool {
    pair.b.recv_cq.wait_event(Duration::ZERO).unwrap()
}

fn wait_event(pair: &Pair) {
    assert!(pair.b.recv_cq.wait_event(TIMEOUT).unwrap(), "no event");
}

/// No further event comes.
fn no_event(pair: &Pair) {
    assert!(!pair.b.recv_cq.wait_event(NOTHING).unwrap(), "an event");
}

/// Arms and holds back an event for [`LONG`], then does something: how long it took from before the
/// hold to the event.
fn held_until(pair: &Pair, mode: ArmMode, flags: u8, what: impl FnOnce()) -> Duration {
    pair.b.recv_cq.arm(mode);
    let start = Instant::now();
    send(pair, 1, flags);
    let early = event(pair);
    assert!(
        !early || start.elapsed() >= LONG,
        "an event was not held back"
    );
    what();
    if !early {
        wait_event(pair);
    }
    start.elapsed()
}

/// What `f` does takes less than [`LONG`], at least once.
fn sometimes_soon(what: &str, mut f: impl FnMut() -> Duration) {
    assert!((0..ATTEMPTS).any(|_| f() < LONG), "{what} ended no hold");
}

// D-CQM-004, D-CQM-005.
#[test]
fn an_event_comes_when_its_period_is_over() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    let mut before = Duration::MAX;
    for (count, period) in [
        (0, LONGEST),
        (1000, LONGEST),
        (1000, 0),
        (0, 20_000),
        (9, 1),
    ] {
        cq.moderate(count, period).unwrap();
        let least = Duration::from_micros(if period == 0 { LONGEST } else { period }.into());
        let mut quickest = Duration::MAX;
        for round in 0..10 {
            cq.arm(ArmMode::Any);
            let start = Instant::now();
            send(&pair, 1 + round % 3, 0);
            wait_event(&pair);
            let time = start.elapsed();
            assert!(time >= least, "{time:?} with {count}, {period}");
            quickest = quickest.min(time);
        }
        // Soon after it: much sooner than with a longer period.
        assert!(
            quickest < 3 * least + Duration::from_millis(20),
            "{quickest:?}"
        );
        before = before.min(quickest);
    }
    assert!(before < LONG);
    no_event(&pair);
}

// D-CQM-003, D-CQM-005.
#[test]
fn an_event_comes_with_the_last_completion_that_it_waits_for() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    for period in [LONGEST, 0] {
        cq.moderate(8, period).unwrap();
        sometimes_soon("the count", || {
            cq.arm(ArmMode::Any);
            let start = Instant::now();
            send(&pair, 7, 0);
            let early = event(&pair);
            assert!(!early || start.elapsed() >= LONG);
            send(&pair, 1, 0);
            if !early {
                wait_event(&pair);
            }
            start.elapsed()
        });
    }
    no_event(&pair);
}

// D-CQM-003, D-ARM-001.
#[test]
fn events_are_fewer_than_completions() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    cq.moderate(16, 5000).unwrap();
    let mut events = 0;
    cq.arm(ArmMode::Any);
    for _ in 0..20 {
        send(&pair, 32, 0);
        while event(&pair) {
            events += 1;
            cq.arm(ArmMode::Any);
        }
    }
    while cq.wait_event(NOTHING).unwrap() {}
    cq.arm(ArmMode::Any);
    send(&pair, 1, 0);
    wait_event(&pair);
    assert!((1..320).contains(&events), "{events} events");
    no_event(&pair);
}

// D-CQM-007, D-CQM-001.
#[test]
fn modifying_ends_a_hold_and_the_moderation() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    sometimes_soon("MODIFY_CQ", || {
        cq.moderate(100, LONGEST).unwrap();
        held_until(&pair, ArmMode::Any, 0, || cq.moderate(0, 0).unwrap())
    });
    for off in [(0, 0), (1, LONGEST)] {
        cq.moderate(100, LONGEST).unwrap();
        cq.moderate(off.0, off.1).unwrap();
        sometimes_soon("nothing", || {
            cq.arm(ArmMode::Any);
            let start = Instant::now();
            send(&pair, 1, 0);
            wait_event(&pair);
            start.elapsed()
        });
    }
    no_event(&pair);
    // Others are not moderated.
    cq.moderate(100, LONGEST).unwrap();
    sometimes_soon("nothing", || {
        pair.a.send_cq.arm(ArmMode::Any);
        let start = Instant::now();
        send(&pair, 1, 0);
        assert!(pair.a.send_cq.wait_event(TIMEOUT).unwrap());
        start.elapsed()
    });
}

// D-CQM-002, D-CQM-004.
#[test]
fn solicited_completions_are_counted_and_errors_are_told_at_once() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    cq.moderate(3, LONGEST).unwrap();
    cq.arm(ArmMode::Solicited);
    send(&pair, 10, 0);
    no_event(&pair);
    let start = Instant::now();
    send(&pair, 1, send_flag::SOLICITED);
    wait_event(&pair);
    assert!(start.elapsed() >= LONG);
    sometimes_soon("the count", || {
        held_until(&pair, ArmMode::Solicited, send_flag::SOLICITED, || {
            send(&pair, 5, 0);
            send(&pair, 2, send_flag::SOLICITED);
        })
    });
    drop(pair);
    sometimes_soon("an error", || {
        let pair = two.pair();
        pair.b.recv_cq.moderate(100, LONGEST).unwrap();
        held_until(&pair, ArmMode::Any, 0, || {
            pair.b.qp.post_recv(9, &[]).unwrap();
            pair.b.qp.set_state(qp_state::ERR).unwrap();
        })
    });
}

// D-CQM-004, D-CQM-005, D-RSZ-002.
#[test]
fn a_resize_loses_no_event() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    cq.moderate(100, 10_000).unwrap();
    for round in 0..20 {
        cq.arm(ArmMode::Any);
        send(&pair, 1, 0);
        assert_eq!(cq.resize(64 << (round % 2), false).unwrap(), 0);
        wait_event(&pair);
    }
    no_event(&pair);
}

// D-CQ-001.
#[test]
fn what_is_destroyed_raises_no_event() {
    let two = two();
    for round in 0..20 {
        let pair = two.pair();
        let other = two.pair();
        let (cq, number) = (&pair.b.recv_cq, pair.b.recv_cq.number());
        cq.moderate(100, 5000).unwrap();
        cq.arm(ArmMode::Any);
        send(&pair, 1, 0);
        let early = event(&pair);
        drop(pair);
        std::thread::sleep(Duration::from_millis(round % 10));
        // An event that there was before is there before this.
        other.b.recv_cq.arm(ArmMode::Any);
        send(&other, 1, 0);
        let next = |timeout| two.b.wait_completion_event(1, timeout).unwrap();
        let mut seen = next(TIMEOUT);
        if !early && seen == Some(number) {
            seen = next(TIMEOUT);
        }
        assert_eq!(seen, Some(other.b.recv_cq.number()));
        assert_eq!(next(Duration::from_millis(30)), None);
    }
    // Nor does what a reset destroyed.
    let pair = two.pair();
    pair.b.recv_cq.moderate(100, LONGEST).unwrap();
    pair.b.recv_cq.arm(ArmMode::Any);
    send(&pair, 1, 0);
    two.b.reset().unwrap();
    assert_eq!(two.b.wait_completion_event(1, NOTHING).unwrap(), None);
}

// D-CQM-006, D-STOP-001, D-STOP-002.
#[test]
fn a_stop_loses_no_event() {
    let two = two();
    let pair = two.pair();
    let cq = &pair.b.recv_cq;
    for round in 0..20 {
        cq.moderate(100, 10_000).unwrap();
        cq.arm(ArmMode::Any);
        send(&pair, 1, 0);
        two.b.stop().unwrap();
        // Shorter and longer than the period.
        std::thread::sleep(Duration::from_millis(2 * (round % 10)));
        two.b.start().unwrap();
        wait_event(&pair);
    }
    no_event(&pair);
    // And it is held back as before.
    cq.moderate(100, LONGEST).unwrap();
    assert!(held_until(&pair, ArmMode::Any, 0, || ()) >= LONG);
}

// D-ARM-001, D-CQM-004.
#[test]
fn a_sleeper_never_misses_a_completion_that_is_told_late() {
    let two = Two::of(&["--poll-us", "0", "--workers", "2"], &everything());
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    const ROUNDS: u64 = 1000;
    b.recv_cq.moderate(3, 100).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..ROUNDS {
                if i % 64 == 0 {
                    b.recv_cq
                        .moderate((i % 5) as u16, (i % 7) as u16 * 50)
                        .unwrap();
                }
                b.qp.post_recv(i, &[b.mr.sge(0, 8)]).unwrap();
                loop {
                    if let Some(cqe) = b.recv_cq.poll() {
                        assert_success(&cqe);
                        break;
                    }
                    b.recv_cq.arm(ArmMode::Any);
                    if let Some(cqe) = b.recv_cq.poll() {
                        assert_success(&cqe);
                        break;
                    }
                    assert!(
                        b.recv_cq.wait_event(TIMEOUT).unwrap(),
                        "round {i}: no event"
                    );
                }
            }
        });
        for i in 0..ROUNDS {
            a.qp.send(i, &[a.mr.sge(0, 8)]).unwrap();
            assert_success(&a.sent());
        }
    });
}

#[test]
fn what_is_not_there_cannot_be_modified() {
    let two = two();
    let pair = two.pair();
    let modify = |body: &command::ModifyCq| two.b.execute::<ModifyCq>(body);
    let body = command::ModifyCq {
        cqn: pair.b.recv_cq.number(),
        count: u16::MAX,
        period: u16::MAX,
        reserved: 0,
    };
    modify(&body).unwrap();
    assert_refused(
        modify(&command::ModifyCq { cqn: 0, ..body }),
        status::ENOENT,
    );
    let reserved = command::ModifyCq {
        reserved: 1,
        ..body
    };
    assert_refused(modify(&reserved), status::EINVAL);
}
