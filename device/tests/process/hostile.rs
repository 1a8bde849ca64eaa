// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends and guests that want to harm the VMs of strangers in the same process.
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::verbs::wc_status;
use vhost_device_rdma_bare::{DeviceProcess, Placement};
use virtio_rdma_hostile::{Attacker, Random, Victim};
use vmm_sys_util::eventfd::EventFd;

use crate::common::{
    assert_no_event, assert_success, assert_works, process, vm, Pair, Two, ALL, TIMEOUT,
};

/// Waits until the log of the process has these words.
#[track_caller]
fn wait_for_log(process: &DeviceProcess, words: &str) {
    let end = Instant::now() + TIMEOUT;
    while !process.log().contains(words) {
        assert!(Instant::now() < end, "{}", process.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Two VMs of which the second is hostile, and a pair of strangers that must not notice.
struct Scene {
    two: Two,
    strangers: Pair,
}

impl Scene {
    fn new() -> Self {
        let two = Two::new();
        let strangers = Pair::new(&two.a, &two.a);
        Self { two, strangers }
    }

    /// The strangers have not noticed.
    #[track_caller]
    fn assert_unharmed(&mut self) {
        assert_works(&self.strangers);
        self.two.assert_unharmed();
    }
}

// D-SEC-007.
#[test]
fn memory_that_is_truncated_is_the_loss_of_its_vm() {
    for access in 0..3 {
        let mut scene = Scene::new();
        let path = scene.two.b.path().to_owned();
        let pair = scene.two.pair();
        let (a, b) = (&pair.a, &pair.b);
        let region = scene.two.b.region(scene.two.b.add_memory(4 << 20).unwrap());
        let buffer = region.buffer(1 << 20, Placement::Scattered).unwrap();
        let iova = buffer.addr();
        let mr = b.pd.register_buffer(buffer, iova, 0, 1 << 20, ALL).unwrap();
        a.qp.write(1, &[a.mr.sge(0, 1 << 20)], mr.iova, mr.rkey)
            .unwrap();
        assert_success(&a.sent());
        region.truncate().unwrap();
        match access {
            // The peer writes, the peer reads, the VM itself sends.
            0 => a.qp.write(2, &[a.mr.sge(0, 1 << 20)], mr.iova, mr.rkey),
            1 => a.qp.read(2, &[a.mr.sge(0, 8)], mr.iova, mr.rkey),
            _ => b.qp.write(2, &[mr.sge(0, 8)], a.mr.iova, a.mr.rkey),
        }
        .unwrap();
        wait_for_log(&scene.two.process, "memory of the VM is lost");
        if access < 2 {
            // Before the end of the session, or after it.
            let status = a.sent().status;
            assert!([wc_status::SUCCESS, wc_status::RETRY_EXC_ERR].contains(&status));
        }
        let end = Instant::now() + TIMEOUT;
        while scene.two.b.read_config().is_ok() {
            assert!(Instant::now() < end, "the session has not ended");
        }
        scene.two.b.kill();
        scene.assert_unharmed();
        drop(mr);
        drop(pair);
        // Another front end is welcome.
        scene.two.b = vm(&path);
        assert_works(&scene.two.pair());
        scene.assert_unharmed();
    }
}

/// An eventfd whose counter is full, so that a write to it waits. It is the same file for all.
fn full() -> EventFd {
    let full = EventFd::new(0).unwrap();
    full.write(u64::MAX - 1).unwrap();
    full
}

// D-SEC-007.
#[test]
fn an_interrupt_that_cannot_be_delivered_holds_nobody_up() {
    let mut scene = Scene::new();
    let vm = scene.two.b.clone();
    let pair = Pair::new(&vm, &vm);
    // Not that of the control queue, which the VM itself would wait for.
    let full: Vec<EventFd> = (1..vm.queues()).map(|_| full()).collect();
    for (number, call) in (1..).zip(&full) {
        vm.frontend().set_vring_call(number, call).unwrap();
    }
    // What the device may have asked for is taken back: the file is the front end's, too.
    for call in &full {
        // SAFETY: it is open as long as `full` is there.
        let fd = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
        rustix::io::ioctl_fionbio(fd, false).unwrap();
    }
    for i in 0..100 {
        for cq in [&pair.a.send_cq, &pair.b.recv_cq] {
            cq.arm(ArmMode::Any);
        }
        pair.b.qp.post_recv(i, &[pair.b.mr.sge(0, 8)]).unwrap();
        pair.a.qp.send(i, &[pair.a.mr.sge(0, 8)]).unwrap();
        assert_success(&pair.a.sent());
        assert_success(&pair.b.received());
        assert_works(&scene.strangers);
    }
    scene.assert_unharmed();
}

/// The type that the front end passes on wants no more than a file descriptor.
fn as_eventfd(fd: &OwnedFd) -> EventFd {
    let fd = fd.try_clone().unwrap().into_raw_fd();
    // SAFETY: nobody else owns the clone.
    unsafe { EventFd::from_raw_fd(fd) }
}

// D-SEC-007.
#[test]
fn what_is_no_eventfd_is_refused() {
    let mut scene = Scene::new();
    let path = scene.two.b.path().to_owned();
    let (_reader, writer) = std::io::pipe().unwrap();
    let null = File::open("/dev/null").unwrap();
    for queue in [0, 1, usize::from(scene.two.b.queues()) - 1] {
        for fd in [
            &writer.try_clone().unwrap().into(),
            &null.try_clone().unwrap().into(),
        ] {
            for kick in [false, true] {
                let eventfd = as_eventfd(fd);
                let frontend = scene.two.b.frontend();
                let result = if kick {
                    frontend.set_vring_kick(queue, &eventfd)
                } else {
                    frontend.set_vring_call(queue, &eventfd)
                };
                // The answer may come before the end of the connection.
                let refused = result.is_err() || scene.two.b.read_config().is_err();
                assert!(refused, "virtqueue {queue}, kick: {kick}");
                scene.two.b.kill();
                scene.assert_unharmed();
                scene.two.b = vm(&path);
            }
        }
    }
}

/// Waits until nothing is left of the VM on a socket.
#[track_caller]
fn assert_goes(process: &DeviceProcess, name: &str) {
    let end = Instant::now() + TIMEOUT;
    loop {
        let status = process.status().unwrap();
        let mut devices = status["devices"].as_array().unwrap().iter();
        if devices.all(|device| device["name"] != name) {
            return;
        }
        assert!(Instant::now() < end, "{name} is still in {status}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// The lane `hostile` does the same beside VMs, for longer.
#[test]
fn every_attack_is_refused_and_neighbours_do_not_notice() {
    let mut process = process(3);
    let [a, b] = [0, 1].map(|socket| vm(process.socket(socket)));
    let pair = Pair::new(&a, &b);
    let victims = [(&a, &pair.a), (&b, &pair.b)].map(|(vm, side)| Victim {
        gids: vec![vm.gid()],
        qpns: vec![side.qp.number()],
        regions: vec![(side.mr.rkey, side.mr.iova)],
    });
    let secret = crate::common::pattern(3, 4096);
    for side in [&pair.a, &pair.b] {
        side.mr.write(64, &secret);
    }
    let mut attacker = Attacker {
        socket: process.socket(2).to_owned(),
        victims: victims.to_vec(),
        random: Random::new(11),
    };
    let only = std::env::var("ATTACK").unwrap_or_default();
    for attack in virtio_rdma_hostile::ALL.iter().copied().flatten() {
        if !attack.name.contains(&only) {
            continue;
        }
        for _ in 0..2 {
            let start = Instant::now();
            let result = (attack.round)(&mut attacker);
            println!("{attack:?}: {:?}", start.elapsed());
            if let Err(error) = result {
                panic!("{attack:?}: {error:#}\n{}", process.log());
            }
            assert!(process.is_alive(), "{attack:?}");
            assert_works(&pair);
        }
        assert_goes(&process, attacker.socket.to_str().unwrap());
        for side in [&pair.a, &pair.b] {
            assert_eq!(side.mr.read(64, 4096), secret, "{attack:?}");
        }
        for vm in [&a, &b] {
            assert_no_event(vm);
        }
    }
}

// Each session had as many lines a second as one that stays: 2 MiB in 5 s.
#[test]
fn who_comes_again_writes_no_more_to_the_log() {
    let process = process(2);
    let other = vm(process.socket(0));
    let (start, before) = (Instant::now(), process.log().lines().count());
    for _ in 0..60 {
        let hostile = vm(process.socket(1));
        for _ in 0..10 {
            hostile.set_gid(1, other.gid()).unwrap_err();
        }
    }
    let lines = process.log().lines().count() - before;
    // Ten a second, one that says how many there were beside them, and of both a second more.
    let most = 11 * (start.elapsed().as_secs() as usize + 2);
    assert!(lines <= most, "{lines} lines, and not {most}");
}
