// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands that are wrong: each gets its error, and nothing a guest sends hurts the device or
//! other VMs.
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use vhost_device_rdma_bare::core::command as cmd;
use vhost_device_rdma_bare::spec::command::{
    self, opcode, status, CommandHeader, Handle, PageList, QueryDeviceResponse, RegMr,
    ResponseHeader,
};
use vhost_device_rdma_bare::spec::ring::MAX_CQ_ENTRIES;
use vhost_device_rdma_bare::spec::verbs::{access, qp_type};
use vhost_device_rdma_bare::{Context, Cq, Pd, Placement, Vm, VmOptions, PAGE};

use crate::common::{
    assert_success, caps, counts, everything, process, vm, Pair, Side, SideOptions, Two, ALL,
};

fn command(opcode: u16, length: u32, body: &[u8]) -> Vec<u8> {
    let header = CommandHeader {
        opcode,
        reserved: 0,
        length,
    };
    [&header.to_bytes()[..], body].concat()
}

fn status_of(response: &[u8]) -> u16 {
    let header = ResponseHeader::from_bytes(&response[..8].try_into().unwrap());
    if header.status != status::OK {
        assert_eq!(
            (response.len(), header.length),
            (8, 8),
            "an error has no body"
        );
    }
    header.status
}

#[track_caller]
fn assert_response(vm: &Vm, bytes: &[u8], expected: u16) {
    let response = vm.raw_command(bytes, PAGE).unwrap();
    assert_eq!(
        status::name(status_of(&response)),
        status::name(expected),
        "{bytes:?}"
    );
}

const HANDLE: [u8; 8] = [0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0];

// D-CMD-004, D-CMD-008.
#[test]
fn headers_are_checked() {
    let process = process(1);
    let vm = vm(process.socket(0));
    // Unknown opcodes.
    for unknown in [0u16, 5, 0x0f, 0x12, 0x22, 0x54, 0xff, 0x100, 0xffff] {
        assert_response(&vm, &command(unknown, 8, &[]), status::EOPNOTSUPP);
    }
    // Shorter than a header.
    for length in 1..8 {
        assert_response(
            &vm,
            &command(opcode::QUERY_DEVICE, 8, &[])[..length],
            status::EINVAL,
        );
    }
    // A length that is not that of the command.
    for length in [0u32, 7, 9, 100, u32::MAX] {
        assert_response(
            &vm,
            &command(opcode::CREATE_PD, length, &[]),
            status::EINVAL,
        );
    }
    for length in [0u32, 8, 15, 17, u32::MAX] {
        assert_response(
            &vm,
            &command(opcode::DESTROY_PD, length, &HANDLE),
            status::EINVAL,
        );
    }
    // A body that ends early.
    assert_response(
        &vm,
        &command(opcode::DESTROY_PD, 16, &HANDLE[..7]),
        status::EINVAL,
    );
    // Longer is fine if the rest is zero.
    let zeros = [&HANDLE[..], &[0; 100]].concat();
    assert_response(
        &vm,
        &command(opcode::DESTROY_PD, 116, &zeros),
        status::ENOENT,
    );
    let mut not_zero = zeros;
    not_zero[107] = 1;
    assert_response(
        &vm,
        &command(opcode::DESTROY_PD, 116, &not_zero),
        status::EINVAL,
    );
    // As long as it may be, and longer.
    let longest = vec![0; 4096 - 8];
    assert_response(&vm, &command(opcode::CREATE_PD, 4096, &longest), status::OK);
    let too_long = vec![0; 4097 - 8];
    assert_response(
        &vm,
        &command(opcode::CREATE_PD, 4097, &too_long),
        status::EINVAL,
    );
    // Reserved fields.
    let mut reserved = command(opcode::CREATE_PD, 8, &[]);
    reserved[2] = 1;
    assert_response(&vm, &reserved, status::EINVAL);
    let mut handle = HANDLE;
    handle[4] = 1;
    assert_response(
        &vm,
        &command(opcode::DESTROY_PD, 16, &handle),
        status::EINVAL,
    );
    assert_eq!(counts(&process, vm.path()), [0, 1, 0, 0, 0]);
}

// D-CMD-002, D-CMD-003.
#[test]
fn chains_may_be_cut_anywhere() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let query = command(opcode::QUERY_DEVICE, 8, &[]);
    let whole = vm.raw_command(&query, PAGE).unwrap();
    let length = ResponseHeader::SIZE + QueryDeviceResponse::SIZE;
    assert_eq!(whole.len(), length);
    assert_eq!(status_of(&whole), status::OK);
    for (readable, writable) in [
        (vec![1; 8], vec![1; 40]),
        (vec![8], vec![length]),
        (vec![3, 5], vec![7, 1, length - 8]),
        (vec![0, 8, 0], vec![0, 4096]),
    ] {
        let response = vm.raw_chain(&query, &readable, &writable).unwrap();
        assert_eq!(response[..], whole[..response.len()]);
        assert_eq!(response.len(), writable.iter().sum::<usize>().min(length));
    }
    // No room for a response: not executed.
    let create = command(opcode::CREATE_PD, 8, &[]);
    for room in [vec![], vec![7], vec![1, 1]] {
        assert!(vm.raw_chain(&create, &[8], &room).unwrap().is_empty());
    }
    assert_eq!(counts(&process, vm.path()), [0; 5]);
    // No command.
    assert_eq!(
        status_of(&vm.raw_chain(&[], &[], &[PAGE]).unwrap()),
        status::EINVAL
    );
}

#[test]
fn handles_that_do_not_exist() {
    let process = process(1);
    let vm = vm(process.socket(0));
    for opcode in [
        opcode::DESTROY_CONTEXT,
        opcode::DESTROY_PD,
        opcode::DEREG_MR,
        opcode::DESTROY_CQ,
        opcode::QUERY_QP,
        opcode::DESTROY_QP,
    ] {
        for handle in [0u32, 1, 2, 0x100, 0x00ff_ffff, 0x0100_0000, u32::MAX] {
            let bytes = Handle {
                handle,
                reserved: 0,
            }
            .to_bytes();
            assert_response(&vm, &command(opcode, 16, &bytes), status::ENOENT);
        }
    }
}

// D-CMD-004.
#[test]
fn objects_in_use_stay() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let destroy = |opcode, handle| {
        let bytes = Handle {
            handle,
            reserved: 0,
        }
        .to_bytes();
        assert_response(&two.a, &command(opcode, 16, &bytes), status::EBUSY);
    };
    destroy(opcode::DESTROY_PD, side.pd.handle());
    destroy(opcode::DESTROY_CQ, side.send_cq.number());
    destroy(opcode::DESTROY_CQ, side.recv_cq.number());
    destroy(opcode::DESTROY_CONTEXT, side.context.handle());
    // With a region only, too.
    let pd = Pd::new(&two.a).unwrap();
    let mr = pd.register(4096, ALL).unwrap();
    destroy(opcode::DESTROY_PD, pd.handle());
    drop(mr);
    drop(pd);
    assert_eq!(counts(&two.process, two.a.path()), [1, 1, 1, 2, 1]);
}

// D-CMD-004, D-PAGE-002.
#[test]
fn regions_are_checked() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let pd = Pd::new(&vm).unwrap();
    let buffer = vm.buffer(8 * PAGE, Placement::Contiguous).unwrap();
    let (pages, _tables) = buffer.page_list().unwrap();
    let good = RegMr {
        pd: pd.handle(),
        access: ALL,
        iova: 0x1000,
        length: 8 * PAGE as u64,
        offset: 0,
        pages,
        key: 5,
        reserved: [0; 7],
    };
    let try_it = |change: &dyn Fn(&mut RegMr)| {
        let mut body = good;
        change(&mut body);
        vm.execute::<cmd::RegMr>(&body)
            .map_err(|e| e.status().expect("an answer"))
    };
    let keys = try_it(&|_| ()).unwrap();
    assert_eq!(keys.lkey & 0xff, 5);
    assert_eq!(keys.lkey, keys.rkey);
    vm.execute::<cmd::DeregMr>(&Handle {
        handle: keys.lkey,
        reserved: 0,
    })
    .unwrap();
    let refused = |expected: u16, change: &dyn Fn(&mut RegMr)| {
        let got = try_it(change).expect_err("a bad region was registered");
        assert_eq!(status::name(got), status::name(expected));
    };
    refused(status::ENOENT, &|r| r.pd = 99);
    let empty = try_it(&|r| (r.length, r.pages.count) = (0, 1)).unwrap();
    vm.execute::<cmd::DeregMr>(&Handle {
        handle: empty.lkey,
        reserved: 0,
    })
    .unwrap();
    refused(status::EINVAL, &|r| (r.length, r.pages.count) = (0, 2));
    refused(status::EINVAL, &|r| r.length += 1);
    refused(status::EINVAL, &|r| r.length = u64::MAX);
    refused(status::EINVAL, &|r| r.offset = 4096);
    refused(status::EINVAL, &|r| r.offset = u64::MAX);
    refused(status::EINVAL, &|r| r.iova = u64::MAX - 4096);
    refused(status::EINVAL, &|r| r.reserved[6] = 1);
    refused(status::EINVAL, &|r| r.access = 1 << 30);
    refused(status::EINVAL, &|r| r.access = access::REMOTE_WRITE);
    refused(status::EOPNOTSUPP, &|r| r.access |= access::ON_DEMAND);
    refused(status::EINVAL, &|r| r.pages.count = 0);
    refused(status::EINVAL, &|r| r.pages.count = 9);
    refused(status::EINVAL, &|r| r.pages.count = u32::MAX);
    refused(status::EINVAL, &|r| r.pages.levels = 0);
    refused(status::EINVAL, &|r| r.pages.levels = 4);
    refused(status::EINVAL, &|r| r.pages.page_shift = 11);
    refused(status::EINVAL, &|r| r.pages.page_shift = 32);
    refused(status::EINVAL, &|r| r.pages.page_shift = 255);
    refused(status::EINVAL, &|r| r.pages.reserved = 1);
    refused(status::EFAULT, &|r| r.pages.addr = 0);
    refused(status::EFAULT, &|r| r.pages.addr = !4095);
    // A table whose entries are not guest memory.
    let table = vm.buffer(PAGE, Placement::Contiguous).unwrap();
    table
        .view()
        .u64(0)
        .store(0x7000_0000_0000, Ordering::SeqCst);
    refused(status::EFAULT, &|r| r.pages.addr = table.page(0));
    // Levels of tables that lead to themselves: bounded, whatever comes of it.
    for word in table.view().iter() {
        word.store(table.page(0), Ordering::SeqCst);
    }
    let looping = try_it(&|r| {
        r.pages = PageList {
            addr: table.page(0),
            levels: 3,
            count: 1 << 20,
            page_shift: 12,
            reserved: 0,
        };
        r.length = 4096 << 20;
    });
    if let Ok(keys) = looping {
        vm.execute::<cmd::DeregMr>(&Handle {
            handle: keys.lkey,
            reserved: 0,
        })
        .unwrap();
    }
    assert_eq!(counts(&process, vm.path()), [0, 1, 0, 0, 0]);
}

// D-CMD-004, D-EXT-001.
#[test]
fn queues_are_checked() {
    let two = Two::new();
    let vm = &two.a;
    let side = Side::new(vm, &SideOptions::default());
    let buffer = vm.buffer(4 * PAGE, Placement::Contiguous).unwrap();
    let (pages, _tables) = buffer.page_list().unwrap();

    let cq = command::CreateCq {
        entries: 64,
        comp_vector: 0,
        stride: 32,
        ring_offset: 128,
        flags: 0,
        buffer: pages,
        reserved: 0,
    };
    let refused = |expected: u16, change: &dyn Fn(&mut command::CreateCq)| {
        let mut body = cq;
        change(&mut body);
        let got = vm
            .execute::<cmd::CreateCq>(&body)
            .expect_err("a bad CQ was created")
            .status()
            .unwrap();
        assert_eq!(status::name(got), status::name(expected), "{body:?}");
    };
    refused(status::EINVAL, &|c| c.entries = 0);
    refused(status::EINVAL, &|c| c.entries = 63);
    refused(status::EINVAL, &|c| c.entries = 1024);
    refused(status::EINVAL, &|c| c.entries = MAX_CQ_ENTRIES * 2);
    refused(status::EINVAL, &|c| c.entries = 1 << 31);
    refused(status::EINVAL, &|c| {
        c.comp_vector = vm.config().num_completion_queues
    });
    refused(status::EINVAL, &|c| c.stride = 64);
    refused(status::EINVAL, &|c| c.stride = 0);
    refused(status::EINVAL, &|c| c.ring_offset = 64);
    refused(status::EINVAL, &|c| c.ring_offset = 129);
    refused(status::EINVAL, &|c| c.ring_offset = u32::MAX - 31);
    refused(status::EINVAL, &|c| c.flags = 1);
    refused(status::EINVAL, &|c| c.reserved = 1);
    refused(status::EINVAL, &|c| c.buffer.page_shift = 13);
    refused(status::EFAULT, &|c| c.buffer.addr = 0x7000_0000_0000);

    let qp = command::CreateQp {
        pd: side.pd.handle(),
        context: side.context.handle(),
        send_cq: side.send_cq.number(),
        recv_cq: side.recv_cq.number(),
        qp_type: qp_type::RC,
        sq_entries: 16,
        sq_stride: 64,
        sq_offset: 64,
        rq_entries: 16,
        rq_stride: 32,
        rq_offset: 64 + 16 * 64,
        max_send_sge: 1,
        max_recv_sge: 1,
        buffer: pages,
        ..command::CreateQp::default()
    };
    let refused = |expected: u16, change: &dyn Fn(&mut command::CreateQp)| {
        let mut body = qp;
        change(&mut body);
        let got = vm
            .execute::<cmd::CreateQp>(&body)
            .expect_err("a bad QP was created")
            .status()
            .unwrap();
        assert_eq!(status::name(got), status::name(expected), "{body:?}");
    };
    refused(status::ENOENT, &|q| q.pd = 1000);
    refused(status::ENOENT, &|q| q.context = 1000);
    refused(status::ENOENT, &|q| q.send_cq = 1000);
    refused(status::ENOENT, &|q| q.recv_cq = 1000);
    refused(status::EOPNOTSUPP, &|q| q.qp_type = qp_type::UD);
    refused(status::EINVAL, &|q| q.qp_type = 200);
    refused(status::EINVAL, &|q| q.flags = 2);
    refused(status::EINVAL, &|q| q.reserved0 = 1);
    refused(status::EINVAL, &|q| q.reserved1[3] = 1);
    refused(status::EINVAL, &|q| q.sq_entries = 3);
    refused(status::EINVAL, &|q| q.sq_entries = 65536);
    refused(status::EINVAL, &|q| q.sq_stride = 32);
    refused(status::EINVAL, &|q| q.sq_stride = 96);
    refused(status::EINVAL, &|q| q.sq_stride = 2048);
    refused(status::EINVAL, &|q| q.sq_offset = 32);
    refused(status::EINVAL, &|q| q.sq_offset = u32::MAX - 63);
    refused(status::EINVAL, &|q| q.rq_stride = 16);
    refused(status::EINVAL, &|q| q.rq_offset = 4 * PAGE as u32);
    refused(status::EINVAL, &|q| q.max_send_sge = 33);
    refused(status::EINVAL, &|q| q.max_send_sge = 2);
    refused(status::EINVAL, &|q| q.max_recv_sge = 2);
    refused(status::EINVAL, &|q| q.max_inline = 17);
    refused(status::EINVAL, &|q| q.max_inline = u32::MAX);
    refused(status::EFAULT, &|q| q.buffer.addr = 0x7000_0000_0000);
    assert_eq!(counts(&two.process, vm.path()), [1, 1, 1, 2, 1]);
}

/// The VM still works.
fn assert_served(vm: &std::sync::Arc<Vm>) {
    let pair = Pair::new(vm, vm);
    pair.a
        .qp
        .write(1, &[pair.a.mr.sge(0, 100)], pair.b.mr.iova, pair.b.mr.rkey)
        .unwrap();
    assert_success(&pair.a.sent());
}

// D-SEC-002, D-SEC-003.
#[test]
fn random_commands_do_no_harm() {
    let mut two = Two::of(&[], &everything());
    let known: Vec<u16> = opcode::ALL.iter().map(|(_, value)| *value as u16).collect();
    let commands = (
        prop::sample::select(known),
        prop::collection::vec(
            prop_oneof![3 => Just(0u8), 2 => 0u8..4, 1 => any::<u8>()],
            0..160,
        ),
        prop_oneof![9 => Just(None), 1 => any::<u32>().prop_map(Some)],
    );
    let mut runner = TestRunner::new(Config {
        cases: 3000,
        ..Config::default()
    });
    let result = runner.run(&commands, |(opcode, body, length)| {
        let length = length.unwrap_or(8 + body.len() as u32);
        let response = two
            .b
            .raw_command(&command(opcode, length, &body), PAGE)
            .expect("an answer");
        prop_assert!(response.len() >= 8);
        Ok(())
    });
    result.unwrap();
    assert!(two.process.is_alive());
    assert_served(&two.a);
    // Whatever was made by accident goes with a reset.
    two.b.reset().unwrap();
    assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
    assert_served(&two.b);
}

// D-SEC-002.
#[test]
fn random_bytes_do_no_harm() {
    let mut two = Two::of(&[], &everything());
    let mut runner = TestRunner::new(Config {
        cases: 2000,
        ..Config::default()
    });
    let bytes = prop::collection::vec(any::<u8>(), 0..4200);
    let result = runner.run(&bytes, |bytes| {
        two.b.raw_command(&bytes, 64).expect("an answer");
        Ok(())
    });
    result.unwrap();
    assert!(two.process.is_alive());
    assert_served(&two.a);
}

// D-ARM-002, D-DB-003, D-DB-004, D-SEC-002, D-SEC-005.
#[test]
fn random_rings_do_no_harm() {
    let mut two = Two::of(&[], &everything());
    let options = SideOptions {
        qp: vhost_device_rdma_bare::QpOptions {
            caps: caps(16, 4, 64),
            ..Default::default()
        },
        memory: 1 << 16,
        ..SideOptions::default()
    };
    // (word, value) pairs over the memory of the queue pair and the record of its completion queue.
    let words = prop::collection::vec(
        (
            0usize..512,
            prop_oneof![
                any::<u64>(),
                0u64..0x1_0000,
                any::<u64>().prop_map(|v| v & 0x00ff_8003)
            ],
        ),
        1..200,
    );
    let mut runner = TestRunner::new(Config {
        cases: 60,
        ..Config::default()
    });
    let result = runner.run(&(words, any::<bool>()), |(words, cq_too)| {
        let pair = two.pair_with(&options, |c| {
            c.timeout = 1;
            c.retry_cnt = 0;
            c.rnr_retry = 0;
        });
        let a = &pair.a;
        for i in 0..8 {
            a.qp.post_recv(i, &[a.mr.sge(0, 64)]).unwrap();
            pair.b.qp.post_recv(i, &[a.mr.sge(0, 64)]).unwrap();
        }
        for (word, value) in &words {
            let memory = a.qp.memory();
            memory[word % memory.len()].store(*value, Ordering::Relaxed);
            if cq_too {
                let memory = a.send_cq.memory();
                memory[word % memory.len()].store(*value, Ordering::Relaxed);
            }
            a.qp.ring().unwrap();
        }
        for word in a.context.doorbell().iter() {
            word.store(u64::MAX, Ordering::SeqCst);
        }
        a.qp.ring().unwrap();
        for i in 0..8 {
            pair.b.qp.send(i, &[pair.b.mr.sge(0, 64)]).unwrap();
        }
        // The device answers commands whatever it finds in the rings.
        a.qp.state().expect("an answer");
        Ok(())
    });
    result.unwrap();
    assert!(two.process.is_alive());
    assert_eq!(counts(&two.process, two.a.path()), [0; 5]);
    assert_served(&two.a);
    assert_served(&two.b);
}

// D-ERR-003, D-SEC-002.
#[test]
fn virtqueues_that_break_the_rules_stop_and_others_go_on() {
    let mut two = Two::new();
    let quick = VmOptions {
        timeout: Duration::from_millis(300),
        ..VmOptions::default()
    };
    let b_path = two.b.path().to_owned();
    two.b.kill();
    two.b = Vm::connect(&b_path, quick.clone()).unwrap();
    // An index that is far ahead.
    two.b.with_control(|queue| {
        queue.available().u16(2).store(5000, Ordering::SeqCst);
        queue.notify().unwrap();
    });
    std::thread::sleep(Duration::from_millis(20));
    assert_served(&two.a);
    two.b.reset().unwrap();
    assert_served(&two.b);
    // A chain that leads to itself, one that leaves the table, one that leaves memory, and a table
    // in a table.
    for (flags, next, addr, len) in [
        (1u16, 0u16, 0u64, 0u32),
        (1, 500, 0, 0),
        (3, 0, 0, 16),
        (0, 0, u64::MAX, u32::MAX),
        (2, 0, u64::MAX - 1, 64),
        (4, 0, 0x7000_0000_0000, 64),
        (4, 0, 0, 17),
        (4, 0, 0, u32::MAX),
        (5, 0, 0, 16),
    ] {
        two.b.with_control(|queue| {
            queue.put_descriptor(0, addr, len, flags, next);
            queue.publish(0);
            queue.notify().unwrap();
        });
        std::thread::sleep(Duration::from_millis(5));
        assert!(two.process.is_alive());
        two.b.reset().unwrap();
    }
    // A head that does not exist.
    two.b.with_control(|queue| {
        queue.publish(9999);
        queue.notify().unwrap();
    });
    std::thread::sleep(Duration::from_millis(5));
    assert!(two.process.is_alive());
    two.b.reset().unwrap();
    assert_served(&two.a);
    assert_served(&two.b);
}

// D-SEC-006.
#[test]
fn limits_are_told_and_kept() {
    let path = std::env::temp_dir().join(format!("limits-{}.toml", std::process::id()));
    std::fs::write(
        &path,
        "[limits]\ncontexts = 1\npds = 2\nmrs = 3\ncqs = 2\nqps = 1\n",
    )
    .unwrap();
    let process = crate::common::process_with(1, &["--config", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    let vm = vm(process.socket(0));
    let device = vm.query_device().unwrap();
    assert_eq!(
        (device.max_context, device.max_pd, device.max_mr),
        (1, 2, 3)
    );
    assert_eq!((device.max_cq, device.max_qp), (2, 1));
    let side = Side::new(&vm, &SideOptions::default());
    let full = |result: Result<(), vhost_device_rdma_bare::Error>| {
        assert_eq!(result.unwrap_err().status(), Some(status::ENOMEM));
    };
    full(Context::new(&vm).map(|_| ()));
    full(Cq::new(&vm, 16, 0).map(|_| ()));
    full(
        vhost_device_rdma_bare::Qp::new(
            &side.context,
            &side.pd,
            &side.send_cq,
            &side.recv_cq,
            &vhost_device_rdma_bare::QpOptions::default(),
        )
        .map(|_| ()),
    );
    let _pd = Pd::new(&vm).unwrap();
    full(Pd::new(&vm).map(|_| ()));
    let _mrs = [
        side.pd.register(4096, ALL).unwrap(),
        side.pd.register(4096, ALL).unwrap(),
    ];
    full(side.pd.register(4096, ALL).map(|_| ()));
}
