// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The life of a VM: paused, reset, killed, back again, with memory coming and going.
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::verbs::{qp_state, wc_status};
use vhost_device_rdma_bare::{Context, Pd, Placement, Srq, SrqOptions, Vm, VmOptions};

use crate::common::{
    all_types, assert_status, assert_success, assert_works, counts, pattern, process, process_with,
    vm, Pair, SideOptions, Two, ALL, TIMEOUT,
};

/// A buffer's contents do not change for a while.
fn assert_still(pair: &Pair) {
    let before = pair.b.mr.read(0, 1 << 20);
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        before == pair.b.mr.read(0, 1 << 20),
        "the memory of a stopped VM changes"
    );
}

// D-RTY-004, D-STOP-001, D-STOP-002, D-STOP-003.
#[test]
fn a_stopped_vm_is_quiet_and_goes_on_with_nothing_lost() {
    let two = Two::new();
    // A retry counter that would run out in no time: it must not run while the peer is stopped.
    let pair = two.pair_with(&SideOptions::default(), |c| {
        c.timeout = 8;
        c.retry_cnt = 1;
        c.rnr_retry = 0;
    });
    let (a, b) = (&pair.a, &pair.b);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut n = 0u64;
            let mut done = 0u64;
            while !stop.load(Ordering::Relaxed) || done < n {
                if n < done + 16 && !stop.load(Ordering::Relaxed) {
                    // A long message and its number behind it.
                    let sges = [a.mr.sge(0, 200_000)];
                    a.qp.write(n, &sges, b.mr.iova, b.mr.rkey).unwrap();
                    n += 1;
                }
                while let Some(cqe) = a.send_cq.poll() {
                    assert_success(&cqe);
                    assert_eq!(cqe.wr_id, done);
                    done += 1;
                }
            }
            done
        });
        for round in 0..10u8 {
            std::thread::sleep(Duration::from_millis(10));
            two.b.stop().unwrap();
            // Quiet: from now on every byte that arrives would be seen.
            a.mr.write(0, &vec![round; 200_000]);
            b.mr.write(0, &vec![0xff; 200_000]);
            assert_still(&pair);
            assert_eq!(b.mr.read(0, 200_000), vec![0xff; 200_000]);
            two.b.start().unwrap();
        }
        // And the requester's VM.
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(5));
            two.a.stop().unwrap();
            assert_still(&pair);
            two.a.start().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let done = writer.join().unwrap();
        assert!(done > 0);
    });
    assert_eq!(a.qp.state().unwrap(), qp_state::RTS);
    assert_eq!(b.qp.state().unwrap(), qp_state::RTS);
}

// D-STOP-002.
#[test]
fn commands_and_objects_survive_a_stop() {
    let two = Two::new();
    let pair = two.pair();
    for vm in [&two.a, &two.b] {
        vm.stop().unwrap();
        vm.start().unwrap();
    }
    assert_eq!(counts(&two.process, two.a.path()), [1, 1, 1, 2, 1]);
    pair.b.qp.post_recv(1, &[pair.b.mr.sge(0, 8)]).unwrap();
    pair.a.qp.send(1, &[pair.a.mr.sge(0, 8)]).unwrap();
    assert_success(&pair.a.sent());
    assert_success(&pair.b.received());
}

// D-STOP-004.
#[test]
fn work_posted_while_stopped_is_done_afterwards() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    two.a.stop().unwrap();
    a.qp.write(1, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(a.send_cq.poll(), None);
    two.a.start().unwrap();
    assert_success(&a.sent());
}

// D-INIT-002, D-RST-001, D-RST-002.
#[test]
fn reset_destroys_all_objects() {
    let two = Two::new();
    for silently in [false, true] {
        let pair = two.pair_with(&SideOptions::default(), |c| {
            c.timeout = 10;
            c.retry_cnt = 1;
        });
        if silently {
            two.b.reset_silently().unwrap();
        } else {
            two.b.reset().unwrap();
        }
        assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
        assert_eq!(counts(&two.process, two.a.path()), [1, 1, 1, 2, 1]);
        // The peer sees that nobody answers.
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        assert_status(&pair.a.sent(), wc_status::RETRY_EXC_ERR);
        drop(pair);
        // And the same VM works again.
        let pair = two.pair();
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        assert_success(&pair.a.sent());
    }
}

// D-RST-001.
#[test]
fn many_resets_under_traffic() {
    let two = Two::new();
    for _ in 0..20 {
        let pair = two.pair();
        for i in 0..32 {
            pair.a
                .qp
                .write(
                    i,
                    &[pair.a.mr.sge(0, 1 << 20)],
                    pair.b.mr.iova,
                    pair.b.mr.rkey,
                )
                .unwrap();
            pair.b
                .qp
                .write(
                    i,
                    &[pair.b.mr.sge(0, 1 << 20)],
                    pair.a.mr.iova,
                    pair.a.mr.rkey,
                )
                .unwrap();
        }
        two.b.reset().unwrap();
        assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
    }
    assert_eq!(counts(&two.process, two.a.path()), [0; 5]);
}

// D-ERR-003, D-RST-004.
#[test]
fn a_killed_front_end_is_cleaned_up_and_taken_back() {
    let mut two = Two::new();
    let bystander = process_pair(&two);
    for _ in 0..10 {
        let pair = two.pair_with(&SideOptions::default(), |c| {
            c.timeout = 10;
            c.retry_cnt = 1;
        });
        for i in 0..16 {
            pair.a
                .qp
                .write(
                    i,
                    &[pair.a.mr.sge(0, 1 << 20)],
                    pair.b.mr.iova,
                    pair.b.mr.rkey,
                )
                .unwrap();
            pair.b
                .qp
                .read(
                    i,
                    &[pair.b.mr.sge(0, 1 << 20)],
                    pair.a.mr.iova,
                    pair.a.mr.rkey,
                )
                .unwrap();
        }
        two.b.kill();
        wait_until_gone(&two);
        // The survivor gets all its completions, of which the last ones tell that nobody answers.
        pair.a
            .qp
            .write(99, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        loop {
            let cqe = pair.a.sent();
            if cqe.wr_id == 99 {
                assert_ne!(cqe.status, wc_status::SUCCESS);
                break;
            }
        }
        drop(pair);
        two.b = vm(two.process.socket(1));
        assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
        // Others were served all the time.
        bystander
            .a
            .qp
            .write(
                1,
                &[bystander.a.mr.sge(0, 8)],
                bystander.b.mr.iova,
                bystander.b.mr.rkey,
            )
            .unwrap();
        assert_success(&bystander.a.sent());
    }
    let pair = two.pair();
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
    assert!(two.process.is_alive());
}

/// Waits until the device knows that the second VM is gone.
pub fn wait_until_gone(two: &Two) {
    let deadline = Instant::now() + TIMEOUT;
    let devices = || {
        two.process.status().unwrap()["devices"]
            .as_array()
            .unwrap()
            .len()
    };
    while devices() > 1 {
        assert!(Instant::now() < deadline, "the VM is still there");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A pair within the first VM.
fn process_pair(two: &Two) -> Pair {
    Pair::new(&two.a, &two.a)
}

#[test]
fn memory_may_come_in_any_way() {
    let process = process(1);
    for mem_table in [true, false] {
        let vm = Vm::connect(
            process.socket(0),
            VmOptions {
                mem_table,
                ..VmOptions::default()
            },
        )
        .unwrap();
        let pair = Pair::new(&vm, &vm);
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 8)], pair.b.mr.iova, pair.b.mr.rkey)
            .unwrap();
        assert_success(&pair.a.sent());
    }
}

// D-STOP-005.
#[test]
fn memory_comes_and_goes_under_traffic() {
    let two = Two::new();
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    let number = two.b.add_memory(4 << 20).unwrap();
    let buffer = two
        .b
        .region(number)
        .buffer(1 << 20, Placement::Scattered)
        .unwrap();
    let iova = buffer.addr();
    let mr = b.pd.register_buffer(buffer, iova, 0, 1 << 20, ALL).unwrap();
    let data = pattern(1, 1 << 20);
    a.mr.write(0, &data);
    a.qp.write(1, &[a.mr.sge(0, 1 << 20)], mr.iova, mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    assert!(mr.read(0, 1 << 20) == data);
    // Other regions come and go: nothing of it is seen.
    for _ in 0..5 {
        for i in 0..8 {
            a.qp.write(i, &[a.mr.sge(0, 1 << 20)], mr.iova, mr.rkey)
                .unwrap();
        }
        let other = two.b.add_memory(1 << 20).unwrap();
        two.b.remove_memory(other).unwrap();
        for _ in 0..8 {
            assert_success(&a.sent());
        }
    }
    // The region itself goes: its key is there, its memory is not.
    two.b.remove_memory(number).unwrap();
    a.qp.write(2, &[a.mr.sge(0, 8)], mr.iova, mr.rkey).unwrap();
    let cqe = a.sent();
    assert_ne!(cqe.status, wc_status::SUCCESS);
    // And comes back.
    two.b.replug_memory(number).unwrap();
    let pair = Pair::new(&two.a, &two.b);
    let buffer = two
        .b
        .region(number)
        .buffer(4096, Placement::Scattered)
        .unwrap();
    let iova = buffer.addr();
    let mr = pair
        .b
        .pd
        .register_buffer(buffer, iova, 0, 4096, ALL)
        .unwrap();
    pair.a
        .qp
        .write(2, &[pair.a.mr.sge(0, 8)], mr.iova, mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
}

#[test]
fn the_process_ends_on_sigterm_with_vms_attached() {
    let two = Two::new();
    let pair = two.pair();
    for i in 0..32 {
        pair.a
            .qp
            .write(
                i,
                &[pair.a.mr.sge(0, 1 << 20)],
                pair.b.mr.iova,
                pair.b.mr.rkey,
            )
            .unwrap();
    }
    let sockets = [
        two.process.socket(0).to_owned(),
        two.process.socket(1).to_owned(),
    ];
    let start = Instant::now();
    assert!(two.process.terminate().unwrap());
    // Nobody there to say goodbye to.
    two.a.kill();
    two.b.kill();
    assert!(start.elapsed() < TIMEOUT);
    for socket in sockets {
        assert!(!socket.exists());
    }
}

#[test]
fn a_vm_connects_and_disconnects_many_times() {
    let process = process(1);
    for _ in 0..50 {
        let vm = vm(process.socket(0));
        let context = Context::new(&vm).unwrap();
        let pd = Pd::new(&vm).unwrap();
        assert_eq!(counts(&process, process.socket(0)), [1, 1, 0, 0, 0]);
        // Without saying goodbye.
        vm.kill();
        drop((context, pd));
    }
}

/// Resident memory of the device process, KiB, without that of the guests.
fn resident(two: &Two) -> u64 {
    let status = two.process.status().unwrap();
    status["resident_bytes"].as_u64().unwrap() / 1024
}

#[test]
fn killed_vms_leave_no_memory_behind() {
    // Until then, the allocator finds its size.
    const FIRST: usize = 50;
    const ROUNDS: usize = 100;
    // Less than the smallest VM takes, by far.
    const LEAST_KIB: u64 = 2;
    let mut two = Two::new();
    let mut sizes = Vec::new();
    for _ in 0..FIRST + ROUNDS {
        let pairs = [two.pair(), two.pair()];
        for Pair { a, b } in &pairs {
            b.qp.write(1, &[b.mr.sge(0, 100_000)], a.mr.iova, a.mr.rkey)
                .unwrap();
            assert_success(&b.sent());
        }
        two.b.kill();
        wait_until_gone(&two);
        drop(pairs);
        two.b = vm(two.process.socket(1));
        sizes.push(resident(&two));
    }
    let (first, last) = (sizes[FIRST], sizes[FIRST + ROUNDS - 1]);
    assert!(
        last < first + LEAST_KIB * ROUNDS as u64,
        "KiB over time: {sizes:?}"
    );
}

// D-RST-004.
#[test]
fn front_ends_follow_each_other_at_once_and_leave_no_memory_behind() {
    const FIRST: usize = 200;
    const ROUNDS: usize = 800;
    let mut two = Two::new();
    let options = VmOptions {
        memory: 8 << 20,
        ..VmOptions::default()
    };
    let small = SideOptions {
        memory: 64 << 10,
        ..SideOptions::default()
    };
    let mut sizes = Vec::new();
    for round in 0..FIRST + ROUNDS {
        let pair = two.pair_with(&small, |_| ());
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            for wr_id in 0..4 {
                let sge = from.mr.sge(0, 60_000);
                from.qp
                    .write(wr_id, &[sge], to.mr.iova, to.mr.rkey)
                    .unwrap();
            }
        }
        assert_success(&pair.a.sent());
        // The next one knocks before the traffic of this one has ended.
        two.b.kill();
        two.b = Vm::connect(two.process.socket(1), options.clone()).unwrap();
        drop(pair);
        if round % 100 == 0 {
            assert_eq!(counts(&two.process, two.process.socket(0))[4], 0);
        }
        sizes.push(resident(&two));
    }
    let (first, last) = (sizes[FIRST], sizes[FIRST + ROUNDS - 1]);
    // A quarter of a page for each: less than any object takes.
    assert!(last < first + ROUNDS as u64, "KiB over time: {sizes:?}");
    assert_works(&two.pair());
    two.assert_unharmed();
}

/// The numbers that peers get to know: of queue pairs and SRQs, and the indices of keys.
fn numbers(vm: &Arc<Vm>) -> [BTreeSet<u32>; 3] {
    let pair = Pair::new(vm, vm);
    let side = &pair.a;
    let srqs = [0; 2].map(|_| Srq::new(&side.context, &side.pd, &SrqOptions::default()).unwrap());
    [
        [pair.a.qp.number(), pair.b.qp.number()].into(),
        srqs.map(|srq| srq.number()).into(),
        [pair.a.mr.lkey >> 8, pair.b.mr.lkey >> 8].into(),
    ]
}

// D-OBJ-005.
#[test]
fn numbers_that_peers_know_do_not_come_again_after_a_reset_or_restart() {
    let [process, other] = [0; 2].map(|_| process(1));
    let socket = process.socket(0);
    let guest = Vm::connect(socket, all_types()).unwrap();
    let mut lives = vec![numbers(&guest)];
    guest.reset().unwrap();
    lives.push(numbers(&guest));
    guest.kill();
    lives.push(numbers(&Vm::connect(socket, all_types()).unwrap()));
    lives.push(numbers(&Vm::connect(other.socket(0), all_types()).unwrap()));
    for kind in 0..3 {
        let all: Vec<_> = lives.iter().flat_map(|life| &life[kind]).collect();
        let different: BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "{all:?}");
    }
}

#[test]
fn the_log_may_be_json() {
    let process = process_with(1, &["--log-format", "json"]);
    drop(vm(process.socket(0)));
    let deadline = Instant::now() + TIMEOUT;
    while !process.log().contains("disconnected") {
        assert!(Instant::now() < deadline, "{}", process.log());
        std::thread::sleep(Duration::from_millis(2));
    }
    let log = process.log();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.len() >= 3, "{log}");
    for line in lines {
        let time = line["time"].as_str().unwrap();
        assert!(time.ends_with('Z') && time.contains('T'), "{time}");
        assert!(["INFO", "WARN"].contains(&line["level"].as_str().unwrap()));
        assert!(line["target"]
            .as_str()
            .unwrap()
            .starts_with("vhost_device_rdma"));
        let message = line["message"].as_str().unwrap();
        assert!(!message.is_empty());
        // What is about a device says about which one.
        let socket = process.socket(0).to_str().unwrap();
        if message.contains(socket) {
            assert_eq!(line["device"], socket, "{line}");
        }
    }
}
