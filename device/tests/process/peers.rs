// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Who is a queue pair's peer: the one that it was connected to, and nobody who comes later or
//! guesses. (What a VM could do that has a peer's very number is in the unit tests of the local
//! fabric, where such a VM can be had.)
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{qp_state, qp_type, wc_status, wr_opcode};
use vhost_device_rdma_bare::{Connection, DeviceProcess, QpOptions, Vm, VmOptions};

use crate::common::{
    all_types, assert_no_event, assert_refused, assert_status, assert_success, assert_works,
    pattern, process, Pair, Side, SideOptions, TIMEOUT,
};

/// Guesses of a VM, in all.
const GUESSES: u64 = 1000;
/// The memory of a region that peers may access, bytes.
const MEMORY: usize = 4096;

/// Queue pairs of a type, and as much memory.
fn options(qp_type: u8) -> SideOptions {
    SideOptions {
        qp: QpOptions::of(qp_type),
        memory: MEMORY,
        ..SideOptions::default()
    }
}

/// A connection that gives up soon.
fn impatient(connection: &mut Connection) {
    connection.timeout = 1;
    connection.retry_cnt = 0;
}

fn attach(process: &DeviceProcess, socket: usize) -> Arc<Vm> {
    Vm::connect(process.socket(socket), all_types()).unwrap()
}

/// Waits until nothing is left of the VM on a socket.
fn await_detached(process: &DeviceProcess, socket: usize) {
    let name = process.socket(socket).to_str().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let status = process.status().unwrap();
        let mut devices = status["devices"].as_array().unwrap().iter();
        if devices.all(|device| device["name"] != name) {
            return;
        }
        assert!(Instant::now() < deadline, "{name} is still in {status}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What comes of a message that nobody takes: a sender of UC does not learn of it.
fn assert_lost(side: &Side, qp_type: u8) {
    let expected = match qp_type {
        qp_type::UC => wc_status::SUCCESS,
        _ => wc_status::RETRY_EXC_ERR,
    };
    assert_status(&side.sent(), expected);
}

// D-PEER-001, D-GID-003.
#[test]
fn a_vm_that_comes_after_another_is_the_peer_of_none_of_its_connections() {
    let process = process(3);
    let [server, other] = [0, 1].map(|socket| attach(&process, socket));
    // One that no device has for its own: those are kept anyway.
    let gid = [0xfd; 16];
    let attach_client = || {
        let options = VmOptions {
            gid: Some(gid),
            ..all_types()
        };
        Vm::connect(process.socket(2), options).unwrap()
    };
    let client = attach_client();
    let types = [qp_type::RC, qp_type::UC];
    let pairs = types.map(|of| Pair::connect(&server, &client, &options(of), impatient));
    for pair in &pairs {
        assert_works(pair);
    }
    // The client goes. (Its objects first: they hold it.)
    let served = pairs.map(|Pair { a, b }| {
        let number = b.qp.number();
        drop(b);
        (a, number)
    });
    drop(client);
    await_detached(&process, 2);
    let secret = pattern(1, MEMORY);
    for (side, _) in &served {
        side.mr.write(0, &secret);
    }
    // Its GID is kept for its device.
    assert_refused(other.set_gid(1, gid), status::EBUSY);
    let next = attach_client();
    assert_refused(other.set_gid(1, gid), status::EBUSY);
    // The next VM knows all that the one before knew.
    for (qp_type, (served, number)) in types.into_iter().zip(&served) {
        for _ in 0..50 {
            let side = Side::new(&next, &options(qp_type));
            assert_ne!(side.qp.number(), *number);
            let mut to = Connection::to(&served.qp);
            impatient(&mut to);
            side.qp.connect(&to).unwrap();
            let (from, into) = (side.mr.sge(0, 64), &served.mr);
            side.qp.write(1, &[from], into.iova, into.rkey).unwrap();
            assert_lost(&side, qp_type);
        }
        assert_eq!(served.mr.read(0, MEMORY), secret);
        assert_eq!(served.qp.state().unwrap(), qp_state::RTS);
        served.assert_quiet();
        // And the server has nobody to send to.
        let qp = &served.qp;
        qp.send(2, &[served.mr.sge(0, 64)]).unwrap();
        assert_lost(served, qp_type);
    }
    assert_no_event(&server);
    // When no queue pair names it any longer, another device may have it.
    drop(next);
    await_detached(&process, 2);
    let [rc, uc] = served;
    drop(rc);
    assert_refused(other.set_gid(1, gid), status::EBUSY);
    drop(uc);
    other.set_gid(1, gid).unwrap();
    let line = "GID fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd: another device has it, or had it and";
    assert!(process.log().contains(line), "{}", process.log());
}

// D-PEER-001, D-OBJ-004, D-OBJ-006, D-SEC-004.
#[test]
fn a_thousand_random_guesses_from_another_vm_reach_nothing() {
    let mut process = process(3);
    let [server, client, stranger] = [0, 1, 2].map(|socket| attach(&process, socket));
    let types = [qp_type::RC, qp_type::UC];
    let pairs = types.map(|of| Pair::connect(&server, &client, &options(of), impatient));
    let secret = pattern(2, MEMORY);
    for pair in &pairs {
        assert_works(pair);
        for side in [&pair.a, &pair.b] {
            side.mr.write(0, &secret);
        }
    }
    // The server serves the stranger as well, in the protection domain of its region, but gave it
    // no key.
    let served = Side::new(&server, &options(qp_type::UC));
    let known = Side::new(&stranger, &options(qp_type::UC));
    for (from, to) in [(&served, &known), (&known, &served)] {
        from.qp.connect(&Connection::to(&to.qp)).unwrap();
    }
    served.mr.write(0, &secret);
    let guessing = types.map(|of| Side::new(&stranger, &options(of)));
    let own = guessing.each_ref().map(|side| side.mr.rkey);
    let seed = RandomState::new();
    let random = |what: &str, i: u64| seed.hash_one((what, i));
    let number = |i| random("number", i) as u32 & 0x00ff_ffff;
    // Any key, those near its own, and those that are near what others have if all begin at the
    // same place. The consumer's part may well be known: a guess of all else is the best there is.
    let key = |i: u64| match i % 4 {
        0 => random("key", i) as u32,
        1 => (random("key", i) as u32 & !0xff) | own[0] & 0xff,
        2 => own[1].wrapping_add((random("key", i) as u32 % 64).wrapping_sub(32) << 8),
        _ => (1 + i as u32 / 4) << 8 | own[0] & 0xff,
    };
    for i in 0..GUESSES {
        let victim = [&pairs[0].a, &pairs[0].b, &pairs[1].a, &pairs[1].b][i as usize % 4];
        let write = SendWqe {
            opcode: match random("opcode", i) % 4 {
                0 => wr_opcode::SEND,
                _ => wr_opcode::RDMA_WRITE,
            },
            remote_addr: victim.mr.iova,
            rkey: key(i),
            ..SendWqe::default()
        };
        // To a number that it guesses, of a queue pair that knows it not.
        let (qp_type, side) = (types[i as usize / 4 % 2], &guessing[i as usize / 4 % 2]);
        let mut to = Connection {
            qp_type,
            dest_qp_num: number(i),
            ..Connection::to(&victim.qp)
        };
        impatient(&mut to);
        side.qp.set_state(qp_state::RESET).unwrap();
        side.qp.connect(&to).unwrap();
        side.qp.post_send(&write, &[side.mr.sge(0, 64)]).unwrap();
        assert_lost(side, qp_type);
        // With a key that it guesses, to a queue pair that is connected to it.
        let write = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: served.mr.iova,
            ..write
        };
        known.qp.post_send(&write, &[known.mr.sge(0, 64)]).unwrap();
        assert_success(&known.sent());
    }
    for side in pairs.iter().flat_map(|pair| [&pair.a, &pair.b]) {
        assert_eq!(side.mr.read(0, MEMORY), secret);
        assert_eq!((side.send_cq.poll(), side.recv_cq.poll()), (None, None));
    }
    assert_eq!(served.mr.read(0, MEMORY), secret);
    for vm in [&server, &client] {
        assert_no_event(vm);
    }
    for pair in &pairs {
        assert_works(pair);
    }
    assert!(process.is_alive());
}
