// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device lets go of, and when: with the response to a command there is no access any more
//! to what it ended.
use std::sync::atomic::Ordering;
use std::time::Duration;

use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::VhostUserFrontend;
use vhost::VhostBackend;
use vhost_device_rdma_bare::core::buffer::CqLayout;
use vhost_device_rdma_bare::core::command as cmd;
use vhost_device_rdma_bare::spec::command::{
    mw_type, opcode, rereg_flag, status, CommandHeader, CreateQp, Handle, ReregMr, SetStatusPage,
};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::doorbell::{DIRECT_SHIFT, STATUS_STRIDE};
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::BindMw;
use vhost_device_rdma_bare::spec::verbs::{access, qp_state, qp_type, vendor_err, wc_status};
use vhost_device_rdma_bare::{
    page_list, Connection, Context, Cq, Descriptor, Mr, Placement, Qp, QpOptions, View, Vm,
    VmOptions, PAGE,
};

use crate::common::{
    assert_no_event, assert_refused, assert_success, counts, everything, process, vm, Pair, Side,
    SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

/// Nobody writes to this memory: whatever is there stays.
#[track_caller]
fn assert_left_alone(memory: &View, offset: usize, len: usize) {
    let mark = vec![0xa5; len];
    memory.write(offset, &mark);
    std::thread::sleep(Duration::from_millis(20));
    assert!(memory.get(offset, len) == mark);
}

// D-QP-002.
#[test]
fn a_queue_pair_that_is_destroyed_leaves_its_memory_alone() {
    let two = Two::new();
    for round in 0..20 {
        let Pair { a, b } = two.pair();
        for i in 0..60 {
            a.qp.write(i, &[a.mr.sge(0, 500_000)], b.mr.iova, b.mr.rkey)
                .unwrap();
        }
        for i in 0..60 {
            a.qp.post_recv(i, &[a.mr.sge(0, 8)]).unwrap();
        }
        std::thread::sleep(Duration::from_micros(round * 100));
        let memory = a.qp.memory().clone();
        let cq = a.send_cq.clone();
        let Side { qp, .. } = a;
        drop(qp);
        while cq.poll().is_some() {}
        assert_left_alone(&memory, 0, 4096);
        assert_left_alone(b.mr.view(), 0, 500_000);
        assert_eq!(cq.poll(), None);
    }
}

// D-CQ-001.
#[test]
fn a_completion_queue_that_is_destroyed_leaves_its_memory_alone() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let cq = Cq::new(&two.a, 64, 0).unwrap();
    let options = QpOptions::default();
    let qp = Qp::new(&side.context, &side.pd, &cq, &cq, &options).unwrap();
    qp.connect(&Connection::to(&qp)).unwrap();
    cq.arm(vhost_device_rdma_bare::core::ArmMode::Any);
    for i in 0..30 {
        qp.write(i, &[side.mr.sge(0, 8)], side.mr.iova, side.mr.rkey)
            .unwrap();
    }
    let (memory, number) = (cq.memory().clone(), cq.number());
    drop(qp);
    drop(cq);
    // An event that was put into a buffer before is the last.
    while two.a.wait_completion_event(0, NOTHING).unwrap().is_some() {}
    assert_left_alone(&memory, 0, 2048);
    // Its number may be another's, but not now.
    assert_ne!(Cq::new(&two.a, 64, 0).unwrap().number(), number);
    assert_eq!(two.a.wait_completion_event(0, NOTHING).unwrap(), None);
}

// D-CTX-001.
#[test]
fn doorbell_memory_is_looked_at_as_long_as_the_context_is_there() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let context = Context::new(&two.a).unwrap();
    let root = context.doorbell().clone();
    let bits = (1u64 << (DIRECT_SHIFT + 7) | 1 << 3).to_le();
    let traffic = || {
        // The worker looks around whenever it is rung.
        for i in 0..20 {
            side.qp.ring().unwrap();
            std::thread::sleep(Duration::from_millis(i % 3));
        }
    };
    root.u64(0).store(bits, Ordering::SeqCst);
    traffic();
    assert_eq!(root.u64(0).load(Ordering::SeqCst), 0);
    drop(context);
    root.u64(0).store(bits, Ordering::SeqCst);
    traffic();
    assert_eq!(root.u64(0).load(Ordering::SeqCst), bits);
}

// D-STS-001.
#[test]
fn the_status_page_is_the_one_that_was_set_last() {
    let two = Two::with(&["--workers", "2", "--poll-us", "0"]);
    let pair = two.pair();
    let workers = usize::from(two.a.config().num_doorbell_queues);
    let set = |addr| {
        two.a
            .execute::<cmd::SetStatusPage>(&SetStatusPage { addr })
            .unwrap();
    };
    let untouched = [0xff; PAGE];
    let fall_asleep = || {
        // (The driver's core goes by the first page, and so notifies always, once that is marked.)
        for i in 0..20 {
            let (a, b) = (&pair.a, &pair.b);
            a.qp.write(i, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
                .unwrap();
            assert_success(&a.sent());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let first = two.a.status_page().clone();
    let page = two.a.buffer(PAGE, Placement::Contiguous).unwrap();
    let second = page.view();
    second.write(0, &untouched);
    set(page.page(0));
    for worker in 0..workers {
        // Written before the response.
        assert!(second.u32(STATUS_STRIDE * worker).load(Ordering::SeqCst) <= 1u32.to_le());
    }
    first.write(0, &untouched);
    fall_asleep();
    assert_eq!(first.get(0, PAGE), untouched);
    set(0);
    second.write(0, &untouched);
    fall_asleep();
    assert_eq!(second.get(0, PAGE), untouched);
    assert_eq!(first.get(0, PAGE), untouched);
    set(page.page(0));
    assert!(second.u32(0).load(Ordering::SeqCst) <= 1u32.to_le());
}

// D-QP-003.
#[test]
fn the_record_of_a_new_queue_pair_says_that_nobody_waits() {
    let two = Two::new();
    let side = Side::new(&two.a, &SideOptions::default());
    let buffer = two.a.buffer(PAGE, Placement::Contiguous).unwrap();
    let (pages, _tables) = buffer.page_list().unwrap();
    buffer.view().u32(0).store(u32::MAX, Ordering::SeqCst);
    let created = two
        .a
        .execute::<cmd::CreateQp>(&CreateQp {
            pd: side.pd.handle(),
            context: side.context.handle(),
            send_cq: side.send_cq.number(),
            recv_cq: side.recv_cq.number(),
            qp_type: qp_type::RC,
            rq_entries: 16,
            rq_stride: 32,
            rq_offset: 64,
            max_recv_sge: 1,
            buffer: pages,
            ..CreateQp::default()
        })
        .unwrap();
    assert_eq!(buffer.view().u32(0).load(Ordering::SeqCst), 0);
    let handle = Handle {
        handle: created.qpn,
        reserved: 0,
    };
    two.a.execute::<cmd::DestroyQp>(&handle).unwrap();
}

// D-VQ-004.
#[test]
fn notifications_without_work_do_nothing() {
    let two = Two::with(&["--workers", "2", "--poll-us", "0"]);
    let notify = || {
        for _ in 0..200 {
            for queue in 0..u32::from(two.a.config().num_doorbell_queues) {
                two.a.notify_doorbell(queue).unwrap();
            }
        }
    };
    // Before there is anything, and with queues that have nothing to do.
    notify();
    let pair = two.pair();
    notify();
    pair.a.assert_quiet();
    let (a, b) = (&pair.a, &pair.b);
    a.qp.write(1, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    notify();
    pair.a.assert_quiet();
}

// D-FEAT-003.
#[test]
fn without_rc_there_are_no_queue_pairs() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let offered = vm.frontend().get_features().unwrap();
    let rc = 1 << feature::RC;
    vm.frontend().set_features(offered & !rc).unwrap();
    let made = |options: &QpOptions| {
        let context = Context::new(&vm).unwrap();
        let pd = vhost_device_rdma_bare::Pd::new(&vm).unwrap();
        let cq = Cq::new(&vm, 64, 0).unwrap();
        Qp::new(&context, &pd, &cq, &cq, options)
    };
    for kind in [qp_type::RC, qp_type::UD, qp_type::UC] {
        assert_refused(made(&QpOptions::of(kind)), status::EOPNOTSUPP);
    }
    vm.frontend().set_features(offered).unwrap();
    made(&QpOptions::default()).unwrap();
}

// D-CFG-004.
#[test]
fn what_is_written_to_the_configuration_changes_nothing() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let (before, path) = (*vm.config(), vm.path().to_owned());
    let flags = VhostUserConfigFlags::WRITABLE;
    for offset in [0, 6, 8, 10, 16, 24] {
        vm.frontend().set_config(offset, flags, &[0xff; 8]).unwrap();
    }
    let size = std::mem::size_of_val(&before.to_bytes()) as u32;
    let zeros = vec![0; size as usize];
    let (_, now) = vm.frontend().get_config(0, size, flags, &zeros).unwrap();
    assert_eq!(now, before.to_bytes());
    vm.kill();
    assert_eq!(*crate::common::vm(&path).config(), before);
}

// D-EVT-001.
#[test]
fn asynchronous_events_wait_for_buffers_unless_their_object_goes() {
    let process = process(2);
    let options = VmOptions {
        event_size: 2,
        ..VmOptions::default()
    };
    let [a, b] = [0, 1].map(|i| Vm::connect(process.socket(i), options.clone()).unwrap());
    let mut pairs: Vec<Pair> = (0..10).map(|_| Pair::new(&a, &b)).collect();
    for pair in &pairs {
        // An access violation: an event with its reason.
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 8)], 0, pair.b.mr.rkey)
            .unwrap();
        assert_eq!(pair.a.sent().status, wc_status::REM_ACCESS_ERR);
    }
    std::thread::sleep(NOTHING);
    // The first two are in their buffers; of the others some go, and their events with them.
    let gone: Vec<u32> = pairs.drain(4..8).map(|pair| pair.b.qp.number()).collect();
    let mut seen = Vec::new();
    while let Some(event) = b.wait_async_event(NOTHING * 5).unwrap() {
        assert_eq!(event.event_type, event_type::QP_ACCESS_ERR);
        assert_eq!(event.reason, u32::from(vendor_err::KEY_RANGE));
        assert!(!gone.contains(&event.number), "{event:?}");
        seen.push(event.number);
    }
    seen.sort_unstable();
    let mut expected: Vec<u32> = pairs.iter().map(|pair| pair.b.qp.number()).collect();
    expected.sort_unstable();
    assert_eq!(seen, expected);
    assert_no_event(&b);
}

/// A process and two VMs with everything; and a connected pair of them with a region of 4 MiB of
/// the second.
struct Under {
    two: Two,
}

impl Under {
    fn new() -> Self {
        Self {
            two: Two::of(&[], &everything()),
        }
    }

    fn pair(&self) -> (Pair, Mr) {
        let pair = self.two.pair();
        let target = pair.b.pd.register(4 << 20, ALL | access::MW_BIND).unwrap();
        (pair, target)
    }

    /// A write of 3 MiB begins.
    fn write(pair: &Pair, addr: u64, rkey: u32) {
        let a = &pair.a;
        a.qp.write(1, &[a.mr.sge(0, 1 << 20); 3], addr, rkey)
            .unwrap();
    }

    /// It ended, whole or with one of these reasons.
    #[track_caller]
    fn ended(pair: &Pair, reasons: &[u8]) -> bool {
        let cqe = pair.a.sent();
        if cqe.status == wc_status::SUCCESS {
            return true;
        }
        assert_eq!(cqe.status, wc_status::REM_ACCESS_ERR);
        assert!(reasons.contains(&cqe.vendor_err), "{cqe:?}");
        assert_eq!(pair.a.qp.state().unwrap(), qp_state::ERR);
        false
    }
}

// D-MW-001.
#[test]
fn a_window_is_deallocated_under_a_message() {
    let under = Under::new();
    let mut whole = 0;
    for round in 0..40 {
        let (pair, target) = under.pair();
        let window = pair.b.pd.window(mw_type::TYPE_1).unwrap();
        let bind = BindMw {
            addr: 0x5000,
            mw_rkey: window.rkey,
            length: 4 << 20,
            access: access::REMOTE_WRITE,
            mr_lkey: target.lkey,
            mr_addr: target.iova,
            new_rkey: window.rkey | 1,
            ..BindMw::default()
        };
        pair.b.qp.post_bind(1, &bind).unwrap();
        assert_success(&pair.b.sent());
        Under::write(&pair, 0x5000, window.rkey | 1);
        std::thread::sleep(Duration::from_micros(round * 15));
        drop(window);
        assert_left_alone(target.view(), 0, 4 << 20);
        whole += u32::from(Under::ended(&pair, &[vendor_err::KEY_UNKNOWN]));
    }
    println!("{whole} of 40 were whole");
}

// D-RRG-002.
#[test]
fn a_region_is_changed_under_a_message() {
    let under = Under::new();
    let mut whole = 0;
    for round in 0..40 {
        let (pair, target) = under.pair();
        let buffer = under.two.b.buffer(PAGE, Placement::Scattered).unwrap();
        let (pages, _tables) = page_list(buffer.region(), &[buffer.page(0)]).unwrap();
        Under::write(&pair, target.iova, target.rkey);
        std::thread::sleep(Duration::from_micros(round * 15));
        // Other pages, or no leave to write any more.
        let body = if round % 2 == 0 {
            ReregMr {
                flags: rereg_flag::TRANSLATION,
                iova: target.iova,
                length: PAGE as u64,
                pages,
                ..ReregMr::default()
            }
        } else {
            ReregMr {
                flags: rereg_flag::ACCESS,
                access: access::REMOTE_READ,
                ..ReregMr::default()
            }
        };
        let body = ReregMr {
            lkey: target.lkey,
            key: target.lkey as u8,
            ..body
        };
        under.two.b.execute::<cmd::ReregMr>(&body).unwrap();
        assert_left_alone(target.view(), 0, 4 << 20);
        let reasons = [vendor_err::KEY_RANGE, vendor_err::KEY_ACCESS];
        whole += u32::from(Under::ended(&pair, &reasons));
    }
    println!("{whole} of 40 were whole");
}

// D-TS-003.
#[test]
fn time_stamps_move_with_their_completions() {
    let under = Under::new();
    let vm = &under.two.a;
    let side = Side::new(vm, &SideOptions::default());
    let cq = Cq::extended(vm, 4, 0).unwrap();
    let qp = Qp::new(&side.context, &side.pd, &cq, &cq, &QpOptions::default()).unwrap();
    qp.connect(&Connection::to(&qp)).unwrap();
    for i in 0..4 {
        qp.write(i, &[side.mr.sge(0, 8)], side.mr.iova, side.mr.rkey)
            .unwrap();
    }
    let ring = CqLayout::extended(4).unwrap().ring;
    let entry = |i: u32| (ring.offset + i * ring.stride) as usize;
    let deadline = std::time::Instant::now() + TIMEOUT;
    while cq.memory().get(entry(3) + 31, 1) == [0] {
        assert!(std::time::Instant::now() < deadline);
    }
    let extensions: Vec<Vec<u8>> = (0..4).map(|i| cq.memory().get(entry(i) + 32, 32)).collect();
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(cq.resize(8, true).unwrap(), 4);
    for (i, extension) in extensions.iter().enumerate() {
        let (cqe, moved) = cq.poll_extended().unwrap();
        assert_eq!(cqe.wr_id, i as u64);
        assert_ne!(moved.timestamp, 0);
        assert_eq!(moved.to_bytes().to_vec(), *extension);
    }
}

// D-VQ-002.
#[test]
fn buffers_of_doorbell_queues_are_not_used() {
    let two = Two::with(&["--poll-us", "0"]);
    let buffer = two.a.buffer(PAGE, Placement::Contiguous).unwrap();
    buffer.view().write(0, &[0xa5; PAGE]);
    let queue = two.a.doorbell_queue(0);
    // Device-writable.
    queue.put_descriptor(0, buffer.page(0), PAGE as u32, 2, 0);
    queue.publish(0);
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    for i in 0..20 {
        two.a.notify_doorbell(0).unwrap();
        a.qp.write(i, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&a.sent());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(queue.used().u16(2).load(Ordering::SeqCst), 0);
    assert_eq!(buffer.view().get(0, PAGE), [0xa5; PAGE]);
    let interrupts = queue.call.read().map_err(|error| error.kind());
    assert_eq!(interrupts, Err(std::io::ErrorKind::WouldBlock));
}

// D-INIT-001.
#[test]
fn commands_wait_until_the_queues_run() {
    let process = process(1);
    let vm = vm(process.socket(0));
    vm.stop().unwrap();
    let buffer = vm.buffer(PAGE, Placement::Contiguous).unwrap();
    let header = CommandHeader {
        opcode: opcode::CREATE_PD,
        length: 8,
        ..CommandHeader::default()
    };
    buffer.view().write(0, &header.to_bytes());
    let (addr, room) = (buffer.page(0), buffer.page(0) + 64);
    let command = [(addr, 8, false), (room, 16, true)].map(|(addr, len, writable)| Descriptor {
        addr,
        len,
        writable,
    });
    let used_within = |time| {
        vm.with_control(|queue| queue.wait_used(std::time::Instant::now() + time))
            .unwrap()
    };
    vm.with_control(|queue| {
        queue.add(&command).unwrap();
        queue.notify().unwrap();
    });
    assert_eq!(used_within(NOTHING), None);
    assert_eq!(counts(&process, vm.path())[1], 0);
    vm.start().unwrap();
    assert_eq!(used_within(TIMEOUT).map(|(_, len)| len), Some(16));
    assert_eq!(counts(&process, vm.path())[1], 1);
}

// D-CEV-003, D-EVT-002.
#[test]
fn events_are_cut_to_their_buffers() {
    let process = process(2);
    for length in [4, 8, 12] {
        let options = VmOptions {
            event_length: length,
            ..VmOptions::default()
        };
        let [a, b] = [0, 1].map(|i| Vm::connect(process.socket(i), options.clone()).unwrap());
        let pair = Pair::new(&a, &b);
        let number = pair.b.qp.number().to_le_bytes();
        let cqn = pair.a.send_cq.number().to_le_bytes();
        pair.a
            .send_cq
            .arm(vhost_device_rdma_bare::core::ArmMode::Any);
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 8)], 0, pair.b.mr.rkey)
            .unwrap();
        assert_eq!(pair.a.sent().status, wc_status::REM_ACCESS_ERR);
        let kind = event_type::QP_ACCESS_ERR.to_le_bytes();
        let reason = u32::from(vendor_err::KEY_RANGE).to_le_bytes();
        let whole = [&kind[..], &[0; 2], &number, &reason, &[0; 4]].concat();
        let got = b.wait_raw_async_event(TIMEOUT).unwrap().unwrap();
        assert_eq!(got, whole[..length]);
        let whole = [&cqn[..], &[0; 4]].concat();
        let got = a.wait_raw_completion_event(0, TIMEOUT).unwrap().unwrap();
        assert_eq!(got, whole[..length.min(8)]);
        // They count as delivered.
        assert_eq!(b.wait_raw_async_event(NOTHING).unwrap(), None);
        assert_eq!(a.wait_raw_completion_event(0, NOTHING).unwrap(), None);
        drop(pair);
        a.kill();
        b.kill();
    }
}
