// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Fast regions: registered, used, invalidated, well and badly; while others access them, and while
//! memory comes and goes.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::core::command::{AllocMr, ReregMr};
use vhost_device_rdma_bare::spec::command::{
    self, alloc_mr_flag, mw_type, opcode, rereg_flag, status, CommandHeader, PageList,
};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{BindMw, FastReg, SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, qp_state, qp_type, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    block_list, page_list, Buffer, Connection, Cq, FastMr, Placement, Qp, QpOptions, Region, Srq,
    SrqOptions, Uses, Vm, VmOptions, Xrcd, PAGE,
};

use crate::common::{
    assert_footprint_falls_to, assert_refused, assert_status, assert_success, counts, everything,
    pattern, Pair, Side, SideOptions, Two, TIMEOUT,
};
use crate::lifecycle::wait_until_gone;

/// Access of the queue pairs, and what registrations grant.
const EVERYTHING: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::FLUSH_GLOBAL
    | access::MW_BIND;

/// Bytes of the memory that a [`Fast`] has.
const SIZE: usize = 4 * PAGE;

/// Status and `vendor_err` of a work request.
type Outcome = (u8, u8);

const GOOD: Outcome = (wc_status::SUCCESS, 0);

fn two() -> Two {
    Two::of(&[], &everything())
}

/// A pair, and of its second side memory in scattered pages, a fast region, and leave to register.
struct Fast {
    // Dropped first.
    region: FastMr,
    list: PageList,
    _tables: Option<Buffer>,
    memory: Buffer,
    physical: u32,
    pair: Pair,
    vm: Arc<Vm>,
}

impl Fast {
    fn new(two: &Two) -> Self {
        Self::of(two, &SideOptions::default(), 0)
    }

    fn of(two: &Two, options: &SideOptions, flags: u32) -> Self {
        Self::with(two, options, flags, |_| ())
    }

    fn with(
        two: &Two,
        options: &SideOptions,
        flags: u32,
        change: impl Fn(&mut Connection),
    ) -> Self {
        let pair = two.pair_with(options, |connection| {
            connection.access = EVERYTHING;
            change(connection);
        });
        let memory = two.b.buffer(SIZE, Placement::Scattered).unwrap();
        let (list, tables) = memory.page_list().unwrap();
        Self {
            region: pair.b.pd.fast_region(64, flags).unwrap(),
            list,
            _tables: tables,
            memory,
            physical: pair.b.pd.register_physical(access::LOCAL_WRITE).unwrap(),
            vm: two.b.clone(),
            pair,
        }
    }

    /// The registration of all the memory, under its own address, with these low 8 bits of the key.
    fn reg(&self, low: u8) -> FastReg {
        FastReg {
            iova: self.memory.addr(),
            key: self.region.key(low),
            access: EVERYTHING,
            length: SIZE as u64,
            pages: self.list,
            offset: 0,
            lkey: self.physical,
        }
    }

    /// How the next work request of a side fares. After an error both sides are connected anew.
    #[track_caller]
    fn outcome(&self, side: &Side) -> Outcome {
        let cqe = side.sent();
        if cqe.status != wc_status::SUCCESS {
            assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
            self.reconnect();
        }
        (cqe.status, cqe.vendor_err)
    }

    fn reconnect(&self) {
        let (a, b) = (&self.pair.a, &self.pair.b);
        for side in [a, b] {
            side.qp.set_state(qp_state::RESET).unwrap();
            while side.send_cq.poll().is_some() || side.recv_cq.poll().is_some() {}
        }
        for (from, to) in [(a, b), (b, a)] {
            let connection = Connection {
                access: EVERYTHING,
                ..Connection::to(&to.qp)
            };
            from.qp.connect(&connection).unwrap();
        }
    }

    #[track_caller]
    fn register(&self, reg: &FastReg) -> Outcome {
        self.pair.b.qp.post_reg(1, reg).unwrap();
        self.outcome(&self.pair.b)
    }

    #[track_caller]
    fn invalidate(&self, key: u32) -> Outcome {
        self.pair.b.qp.invalidate(2, key).unwrap();
        self.outcome(&self.pair.b)
    }

    /// The first side writes 8 bytes.
    #[track_caller]
    fn write(&self, key: u32, addr: u64) -> Outcome {
        let a = &self.pair.a;
        a.qp.write(3, &[a.mr.sge(0, 8)], addr, key).unwrap();
        self.outcome(a)
    }

    /// The second side reads 8 bytes of the first side's region into what `sink` says.
    #[track_caller]
    fn read_into(&self, opcode: u8, sinks: &[Sge]) -> Outcome {
        let wqe = SendWqe {
            opcode,
            wr_id: 4,
            remote_addr: self.pair.a.mr.iova,
            rkey: self.pair.a.mr.rkey,
            ..SendWqe::default()
        };
        self.pair.b.qp.post_send(&wqe, sinks).unwrap();
        self.outcome(&self.pair.b)
    }

    fn sge(&self, key: u32, length: u32) -> Sge {
        Sge {
            addr: self.memory.addr(),
            length,
            lkey: key,
        }
    }

    /// The first side sends, and has a key of the second invalidated.
    #[track_caller]
    fn send_with_inv(&self, key: u32) -> Outcome {
        let (a, b) = (&self.pair.a, &self.pair.b);
        b.qp.post_recv(5, &[b.mr.sge(0, 8)]).unwrap();
        let wqe = SendWqe {
            opcode: wr_opcode::SEND_WITH_INV,
            imm: key,
            ..SendWqe::default()
        };
        a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
        let outcome = self.outcome(a);
        if outcome == GOOD {
            let cqe = b.received();
            assert_success(&cqe);
            assert_eq!((cqe.wc_flags, cqe.imm), (wc_flag::WITH_INV, key));
        }
        outcome
    }

    /// The region is free: the key gives no access, and a registration is possible. It is free
    /// afterwards, too.
    #[track_caller]
    fn assert_free(&self, key: u32) {
        let unknown = (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN);
        assert_eq!(self.write(key, self.memory.addr()), unknown);
        assert_eq!(self.register(&self.reg(99)), GOOD);
        assert_eq!(self.invalidate(self.region.key(99)), GOOD);
    }

    fn footprint(&self, two: &Two) -> u64 {
        device(two, &self.vm)["footprint_bytes"].as_u64().unwrap()
    }
}

/// What the status tells of a VM.
fn device(two: &Two, vm: &Vm) -> serde_json::Value {
    let status = two.process.status().unwrap();
    let devices = status["devices"].as_array().unwrap();
    let name = vm.path().to_str().unwrap();
    let device = devices.iter().find(|device| device["name"] == name);
    device.unwrap().clone()
}

#[test]
fn a_registered_region_is_as_any_region_and_a_free_one_is_unknown() {
    // D-FMR-001, D-REG-004, D-OBJ-004.
    let two = two();
    let f = Fast::new(&two);
    let (start, end) = (f.memory.addr(), f.memory.addr() + SIZE as u64);
    let remote = wc_status::REM_ACCESS_ERR;
    f.assert_free(f.region.key);
    let (key, other) = (f.region.key(7), f.region.key(8));
    f.pair.b.qp.post_reg(1, &f.reg(7)).unwrap();
    let cqe = f.pair.b.sent();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.opcode), (1, wc_opcode::REG_MR));
    f.pair.a.mr.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(f.write(key, start), GOOD);
    assert_eq!(f.write(key, end - 8), GOOD);
    assert_eq!(f.memory.view().get(SIZE - 8, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    for (key, addr, reason) in [
        (other, start, vendor_err::KEY_UNKNOWN),
        (f.region.key, start, vendor_err::KEY_UNKNOWN),
        (key, end - 7, vendor_err::KEY_RANGE),
        (key, start - 1, vendor_err::KEY_RANGE),
        (key, u64::MAX, vendor_err::KEY_RANGE),
    ] {
        assert_eq!(f.write(key, addr), (remote, reason), "{key:#x} {addr:#x}");
    }
    // Local accesses, too.
    assert_eq!(f.read_into(wr_opcode::RDMA_READ, &[f.sge(key, 8)]), GOOD);
    assert_eq!(
        f.read_into(wr_opcode::RDMA_READ, &[f.sge(other, 8)]),
        (wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN)
    );
    f.pair.b.qp.post_recv(1, &[f.sge(key, 8)]).unwrap();
    f.pair.a.qp.send(1, &[f.pair.a.mr.sge(0, 8)]).unwrap();
    assert_eq!(f.outcome(&f.pair.a), GOOD);
    assert_success(&f.pair.b.received());
    // Another protection domain's queue pair.
    let stranger = Pair::connect(&two.a, &two.b, &SideOptions::default(), |connection| {
        connection.access = EVERYTHING;
    });
    let a = &stranger.a;
    a.qp.write(1, &[a.mr.sge(0, 8)], start, key).unwrap();
    let cqe = a.sent();
    assert_eq!((cqe.status, cqe.vendor_err), (remote, vendor_err::KEY_PD));
    assert_eq!(f.invalidate(key), GOOD);
    f.assert_free(key);

    // Other access, another part of the pages, another address.
    let part = FastReg {
        iova: 0x1000_0010,
        access: access::LOCAL_WRITE | access::REMOTE_READ,
        offset: 100,
        length: (SIZE - 200) as u64,
        ..f.reg(9)
    };
    assert_eq!(f.register(&part), GOOD);
    let key = part.key;
    assert_eq!(f.write(key, part.iova), (remote, vendor_err::KEY_ACCESS));
    let a = &f.pair.a;
    f.memory.view().write(100, &[9; 8]);
    a.qp.read(1, &[a.mr.sge(64, 8)], part.iova, key).unwrap();
    assert_eq!(f.outcome(a), GOOD);
    assert_eq!(a.mr.read(64, 8), [9; 8]);
    let last = part.iova + part.length - 8;
    a.qp.read(1, &[a.mr.sge(64, 9)], last, key).unwrap();
    assert_eq!(f.outcome(a), (remote, vendor_err::KEY_RANGE));
    assert_eq!(f.invalidate(key), GOOD);

    let zero_based = FastReg {
        access: EVERYTHING | access::ZERO_BASED,
        ..f.reg(10)
    };
    assert_eq!(f.register(&zero_based), GOOD);
    assert_eq!(f.write(zero_based.key, SIZE as u64 - 8), GOOD);
    assert_eq!(
        f.write(zero_based.key, start),
        (remote, vendor_err::KEY_RANGE)
    );
    assert_eq!(f.invalidate(zero_based.key), GOOD);
    // Without a byte.
    let empty = FastReg {
        length: 0,
        pages: PageList {
            addr: f.memory.page(0),
            count: 1,
            levels: 0,
            ..f.list
        },
        ..f.reg(11)
    };
    assert_eq!(f.register(&empty), GOOD);
    assert_eq!(f.write(empty.key, start), (remote, vendor_err::KEY_RANGE));
    assert_eq!(f.invalidate(empty.key), GOOD);
}

#[test]
fn atomic_operations_windows_and_flush_go_through_fast_regions() {
    // D-REG-004.
    let two = two();
    let f = Fast::new(&two);
    let (a, b) = (&f.pair.a, &f.pair.b);
    let reg = f.reg(1);
    assert_eq!(f.register(&reg), GOOD);
    let wqe = SendWqe {
        remote_addr: reg.iova + 8,
        rkey: reg.key,
        operand0: 5,
        ..SendWqe::default()
    };
    let add = SendWqe {
        opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
        ..wqe
    };
    for _ in 0..2 {
        a.qp.post_send(&add, &[a.mr.sge(0, 8)]).unwrap();
        assert_eq!(f.outcome(a), GOOD);
    }
    assert_eq!(f.memory.view().get(8, 8), 10u64.to_le_bytes());
    let flush = SendWqe {
        opcode: wr_opcode::FLUSH,
        operand1: 0x101,
        ..wqe
    };
    a.qp.post_send(&flush, &[]).unwrap();
    assert_eq!(f.outcome(a), GOOD);

    let window = b.pd.window(mw_type::TYPE_2).unwrap();
    let bind = BindMw {
        addr: 0x5000,
        mw_rkey: window.rkey,
        length: 64,
        access: access::REMOTE_WRITE,
        mr_lkey: reg.key,
        mr_addr: reg.iova + PAGE as u64 - 8,
        new_rkey: window.rkey | 1,
        ..BindMw::default()
    };
    // To a region that is not as the bind says, no window is bound.
    let bad = BindMw {
        mr_lkey: f.region.key(2),
        ..bind
    };
    b.qp.post_bind(1, &bad).unwrap();
    assert_eq!(f.outcome(b), (wc_status::MW_BIND_ERR, vendor_err::BIND));
    b.qp.post_bind(1, &bind).unwrap();
    assert_eq!(f.outcome(b), GOOD);
    // It is of its queue pair, and so of the one connected now.
    a.mr.write(0, &[7; 8]);
    assert_eq!(f.write(bind.new_rkey, 0x5008), GOOD);
    assert_eq!(f.memory.view().get(PAGE, 8), [7; 8]);
    // As long as it is bound, the region stays.
    let cannot = (wc_status::LOC_QP_OP_ERR, vendor_err::BIND);
    assert_eq!(f.invalidate(reg.key), cannot);
    assert_eq!(
        f.read_into(wr_opcode::RDMA_READ_WITH_INV, &[f.sge(reg.key, 8)]),
        cannot
    );
    assert_eq!(
        f.send_with_inv(reg.key),
        (wc_status::REM_ACCESS_ERR, vendor_err::BIND)
    );
    assert_refused(b.pd.deregister(reg.key), status::EBUSY);
    assert_eq!(f.write(bind.new_rkey, 0x5008), GOOD);
    assert_eq!(f.invalidate(bind.new_rkey), GOOD);
    assert_eq!(f.invalidate(reg.key), GOOD);
    let again = BindMw {
        mw_rkey: bind.new_rkey,
        new_rkey: window.rkey | 2,
        ..bind
    };
    b.qp.post_bind(1, &again).unwrap();
    assert_eq!(f.outcome(b), (wc_status::MW_BIND_ERR, vendor_err::BIND));
}

#[test]
fn a_registration_that_cannot_be_is_refused_with_the_reason_and_changes_nothing() {
    // D-REG-001.
    let two = two();
    let f = Fast::new(&two);
    let pd = &f.pair.b.pd;
    let good = f.reg(1);
    let with = |change: &dyn Fn(&mut FastReg)| {
        let mut reg = good;
        change(&mut reg);
        reg
    };
    let list = |change: fn(&mut PageList)| with(&|reg| change(&mut reg.pages));
    let stranger = Side::new(&two.b, &SideOptions::default());
    let strange = stranger.pd.fast_region(4, 0).unwrap();
    let strange_physical = stranger.pd.register_physical(access::LOCAL_WRITE).unwrap();
    let small = pd.fast_region(3, 0).unwrap();
    let taken = pd.fast_region(64, 0).unwrap();
    let usual = with(&|reg| reg.key = taken.key(1));
    assert_eq!(f.register(&usual), GOOD);
    let (odd, _odd) = page_list(&two.b.region(0), &[f.memory.page(0) + 8; 4]).unwrap();
    let (gone, _gone) = page_list(&two.b.region(0), &[f.memory.page(0), 8 << 40, 0, 0]).unwrap();
    let lkey = |lkey| (with(&|reg| reg.lkey = lkey), vendor_err::PRIVILEGE);
    let key = |key, reason| (with(&|reg| reg.key = key), reason);
    let grants = |access| (with(&|reg| reg.access = access), vendor_err::KEY_ACCESS);
    let pages = |change| (list(change), vendor_err::PAGE_LIST);
    let at = |offset, length| {
        let reg = with(&|reg| (reg.offset, reg.length) = (offset, length));
        (reg, vendor_err::PAGE_LIST)
    };
    let (size, write) = (SIZE as u64, access::LOCAL_WRITE);
    let bad = [
        // Who has no key of all memory cannot name pages.
        lkey(0),
        lkey(f.physical ^ 1),
        lkey(strange_physical),
        lkey(f.pair.b.mr.lkey),
        lkey(usual.key),
        // What is no fast region, or not one of ours, or not free.
        key(f.pair.b.mr.lkey, vendor_err::KEY_UNKNOWN),
        key(0xffff_ff01, vendor_err::KEY_UNKNOWN),
        key(0xff, vendor_err::KEY_UNKNOWN),
        key(strange.key, vendor_err::KEY_PD),
        key(usual.key, vendor_err::REGISTERED),
        key(taken.key(2), vendor_err::REGISTERED),
        // Access that no region has.
        grants(access::REMOTE_WRITE),
        grants(access::REMOTE_ATOMIC),
        grants(write | access::PHYSICAL),
        grants(write | access::ON_DEMAND),
        grants(write | 1 << 15),
        // Ranges that are none.
        (
            with(&|reg| reg.length = (1 << 40) + 1),
            vendor_err::KEY_RANGE,
        ),
        (
            with(&|reg| reg.iova = u64::MAX - size + 2),
            vendor_err::KEY_RANGE,
        ),
        // Lists that are none, or not of this range.
        pages(|pages| pages.count = 0),
        pages(|pages| pages.count = 3),
        pages(|pages| pages.count = 5),
        pages(|pages| pages.count = u32::MAX),
        pages(|pages| pages.levels = 0),
        pages(|pages| pages.levels = 4),
        pages(|pages| pages.page_shift = 11),
        pages(|pages| pages.page_shift = 0),
        pages(|pages| pages.page_shift = 32),
        pages(|pages| pages.page_shift = 13),
        pages(|pages| pages.reserved = 1),
        at(PAGE as u32, PAGE as u64),
        at(u32::MAX, size),
        at(1, size),
        key(small.key, vendor_err::PAGE_LIST),
        (with(&|reg| reg.pages = odd), vendor_err::PAGE_LIST),
        // What is no memory.
        (with(&|reg| reg.pages = gone), vendor_err::MEMORY_GONE),
        (list(|pages| pages.addr = 8 << 40), vendor_err::MEMORY_GONE),
        (list(|pages| pages.addr += 8), vendor_err::MEMORY_GONE),
    ];
    let footprint = f.footprint(&two);
    for (reg, reason) in bad {
        let (status, got) = f.register(&reg);
        assert_eq!(wc_status::name(status), Some("MW_BIND_ERR"), "{reg:?}");
        assert_eq!(vendor_err::name(got), vendor_err::name(reason), "{reg:?}");
    }
    assert_eq!(f.footprint(&two), footprint);
    f.assert_free(good.key);
    // What was registered is as it was.
    assert_eq!(f.write(usual.key, usual.iova), GOOD);
    assert_eq!(
        f.write(taken.key(2), usual.iova),
        (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN)
    );
    for end in [u64::MAX, u64::MAX - 1] {
        let reg = FastReg {
            iova: end - SIZE as u64 + 1,
            ..good
        };
        assert_eq!(f.register(&reg), GOOD);
        assert_eq!(f.invalidate(reg.key), GOOD);
    }
}

#[test]
fn what_cannot_be_invalidated_stays() {
    // D-INV-002.
    let two = two();
    let f = Fast::new(&two);
    let (a, b) = (&f.pair.a, &f.pair.b);
    let reg = f.reg(1);
    let stranger = Fast::new(&two);
    let theirs = stranger.reg(1);
    assert_eq!(stranger.register(&theirs), GOOD);
    let window = b.pd.window(mw_type::TYPE_1).unwrap();
    let cannot = |key| {
        let local = (wc_status::LOC_QP_OP_ERR, vendor_err::BIND);
        let remote = (wc_status::REM_ACCESS_ERR, vendor_err::BIND);
        assert_eq!(f.invalidate(key), local, "{key:#x}");
        assert_eq!(f.send_with_inv(key), remote, "{key:#x}");
    };
    cannot(reg.key);
    assert_eq!(f.register(&reg), GOOD);
    for key in [
        f.region.key(2),
        theirs.key,
        b.mr.lkey,
        window.rkey,
        f.physical,
        0xff,
        0,
    ] {
        cannot(key);
    }
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    assert_eq!(f.send_with_inv(reg.key), GOOD);
    cannot(reg.key);
    f.assert_free(reg.key);
    // Any queue pair of the protection domain may.
    assert_eq!(f.register(&reg), GOOD);
    let uses = Uses {
        context: Some(&b.context),
        pd: Some(&b.pd),
        send_cq: Some(&b.send_cq),
        recv_cq: Some(&b.recv_cq),
        ..Uses::default()
    };
    let sibling = Qp::create(&two.b, &uses, &QpOptions::default()).unwrap();
    sibling.connect(&Connection::to(&a.qp)).unwrap();
    sibling.invalidate(8, reg.key).unwrap();
    let cqe = b.sent();
    assert_success(&cqe);
    assert_eq!((cqe.wr_id, cqe.opcode), (8, wc_opcode::LOCAL_INV));
    f.assert_free(reg.key);
}

#[test]
fn a_read_invalidates_the_key_that_it_was_written_by() {
    // D-INV-003.
    let two = two();
    let f = Fast::new(&two);
    let b = &f.pair.b;
    let read = wr_opcode::RDMA_READ_WITH_INV;
    f.pair.a.mr.write(0, &[4; 8]);
    let reg = f.reg(3);
    assert_eq!(f.register(&reg), GOOD);
    let wqe = SendWqe {
        opcode: read,
        remote_addr: f.pair.a.mr.iova,
        rkey: f.pair.a.mr.rkey,
        ..SendWqe::default()
    };
    b.qp.post_send(&wqe, &[f.sge(reg.key, 8)]).unwrap();
    let cqe = b.sent();
    assert_success(&cqe);
    assert_eq!((cqe.opcode, cqe.byte_len), (wc_opcode::RDMA_READ, 8));
    assert_eq!(f.memory.view().get(0, 8), [4; 8]);
    f.assert_free(reg.key);
    // Whatever is wrong with it: the key stays as it was.
    let unknown = (wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN);
    assert_eq!(f.read_into(read, &[f.sge(reg.key, 8)]), unknown);
    assert_eq!(f.register(&reg), GOOD);
    let bind = (wc_status::LOC_QP_OP_ERR, vendor_err::BIND);
    assert_eq!(f.read_into(read, &[b.mr.sge(0, 8)]), bind);
    assert_eq!(f.read_into(read, &[b.mr.sge(0, 0)]), bind);
    let number = (wc_status::LOC_QP_OP_ERR, vendor_err::TOO_LONG_ENTRY);
    assert_eq!(f.read_into(read, &[]), number);
    assert_eq!(f.read_into(read, &[f.sge(reg.key, 8); 2]), number);
    let range = (wc_status::LOC_PROT_ERR, vendor_err::KEY_RANGE);
    assert_eq!(f.read_into(read, &[f.sge(reg.key, SIZE as u32 + 1)]), range);
    // The peer does not let it read: nothing is invalidated.
    let refused = SendWqe {
        rkey: wqe.rkey ^ 1,
        ..wqe
    };
    b.qp.post_send(&refused, &[f.sge(reg.key, 8)]).unwrap();
    assert_eq!(
        f.outcome(b),
        (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN)
    );
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    // Nothing to read is read, and the key invalidated.
    assert_eq!(f.read_into(read, &[f.sge(reg.key, 0)]), GOOD);
    f.assert_free(reg.key);
}

#[test]
fn registrations_of_one_region_follow_each_other_in_the_queue() {
    // D-REG-002.
    const ROUNDS: u32 = 20;
    let two = two();
    let options = SideOptions {
        qp: QpOptions {
            signal_all: true,
            ..QpOptions::default()
        },
        ..SideOptions::default()
    };
    let f = Fast::of(&two, &options, 0);
    let (a, b) = (&f.pair.a, &f.pair.b);
    // Each has a list of its own, of pages of its own.
    let buffers: Vec<Buffer> = (0..ROUNDS)
        .map(|_| two.b.buffer(SIZE, Placement::Scattered).unwrap())
        .collect();
    let lists: Vec<_> = buffers.iter().map(|b| b.page_list().unwrap()).collect();
    let data = pattern(3, SIZE);
    a.mr.write(0, &data);
    // All posted at once: register, read into it, invalidate, and again.
    let mut batch = b.qp.send_queue().batch();
    for (i, (pages, _tables)) in (0..ROUNDS).zip(&lists) {
        let reg = FastReg {
            iova: 0x1000,
            pages: *pages,
            ..f.reg(i as u8)
        };
        let wqe = SendWqe {
            remote_addr: a.mr.iova,
            rkey: a.mr.rkey,
            ..SendWqe::default()
        };
        let sink = Sge {
            addr: 0x1000,
            length: SIZE as u32,
            lkey: reg.key,
        };
        let opcode = |opcode| SendWqe { opcode, ..wqe };
        batch.push_reg(&opcode(wr_opcode::REG_MR), &reg).unwrap();
        if i % 2 == 0 {
            batch.push(&opcode(wr_opcode::RDMA_READ), [sink]).unwrap();
            let invalidate = SendWqe {
                imm: reg.key,
                flags: 1,
                ..opcode(wr_opcode::LOCAL_INV)
            };
            batch.push(&invalidate, []).unwrap();
        } else {
            let wqe = opcode(wr_opcode::RDMA_READ_WITH_INV);
            batch.push(&wqe, [sink]).unwrap();
        }
    }
    batch.commit();
    b.qp.ring().unwrap();
    for i in 0..ROUNDS {
        for _ in 0..if i % 2 == 0 { 3 } else { 2 } {
            assert_success(&b.sent());
        }
    }
    for buffer in &buffers {
        assert!(buffer.view().get(0, SIZE) == data);
    }
    // The tables are of no use any longer.
    let reg = FastReg {
        pages: lists[0].0,
        ..f.reg(100)
    };
    assert_eq!(f.register(&reg), GOOD);
    if let Some(tables) = &lists[0].1 {
        tables.view().write(0, &[0xff; PAGE]);
    }
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    assert_eq!(buffers[0].view().get(0, 8), data[..8]);
    assert_eq!(f.invalidate(reg.key), GOOD);
}

/// Guest-physical address of a byte of a buffer.
fn at(buffer: &Buffer, offset: usize) -> u64 {
    buffer.page(offset / PAGE) + (offset % PAGE) as u64
}

#[test]
fn blocks_of_any_address_and_length_are_one_region() {
    // D-REG-001, D-REG-004.
    let two = two();
    let f = Fast::of(&two, &SideOptions::default(), alloc_mr_flag::BLOCKS);
    let (a, region) = (&f.pair.a, two.b.region(0));
    // Offsets in the memory, whose pages are scattered, and lengths.
    let parts = [
        (3, 1),
        (100, 3000),
        (PAGE - 1, 1),
        (PAGE, 7),
        (3 * PAGE + 5, 2048),
    ];
    let blocks: Vec<(u64, u64)> = parts
        .iter()
        .map(|(offset, len)| (at(&f.memory, *offset), *len as u64))
        .collect();
    let all: usize = parts.iter().map(|(_, len)| len).sum();
    let (list, _tables) = block_list(&region, &blocks).unwrap();
    let reg = FastReg {
        iova: 0x7777,
        length: all as u64,
        pages: list,
        ..f.reg(1)
    };
    assert_eq!(f.register(&reg), GOOD);
    let data = pattern(5, all);
    a.mr.write(0, &data);
    a.qp.write(1, &[a.mr.sge(0, all as u32)], reg.iova, reg.key)
        .unwrap();
    assert_eq!(f.outcome(a), GOOD);
    let mut expected = vec![0; SIZE];
    let mut from = 0;
    for (offset, len) in parts {
        expected[offset..offset + len].copy_from_slice(&data[from..from + len]);
        from += len;
    }
    assert!(f.memory.view().get(0, SIZE) == expected);
    a.qp.read(2, &[a.mr.sge(0x10000, all as u32)], reg.iova, reg.key)
        .unwrap();
    assert_eq!(f.outcome(a), GOOD);
    assert!(a.mr.read(0x10000, all) == data);
    // An atomic operation has its word in one piece, and aligned.
    let add = SendWqe {
        opcode: wr_opcode::ATOMIC_FETCH_AND_ADD,
        remote_addr: 0x7778,
        rkey: reg.key,
        operand0: 1,
        ..SendWqe::default()
    };
    a.qp.post_send(&add, &[a.mr.sge(0, 8)]).unwrap();
    let alignment = (wc_status::REM_INV_REQ_ERR, vendor_err::ALIGNMENT);
    assert_eq!(f.outcome(a), alignment);
    assert_eq!(f.invalidate(reg.key), GOOD);

    // From within the first block to within the last.
    let (list, _kept) = block_list(&region, &blocks[1..3]).unwrap();
    let part = FastReg {
        pages: list,
        offset: 2999,
        length: 2,
        ..reg
    };
    assert_eq!(f.register(&part), GOOD);
    assert_eq!(f.invalidate(part.key), GOOD);
    let bad = |change: fn(&mut FastReg)| {
        let mut reg = part;
        change(&mut reg);
        reg
    };
    let (none, _none) = block_list(&region, &[(blocks[0].0, 0)]).unwrap();
    let (gone, _gone) = block_list(&region, &[(8 << 40, 4)]).unwrap();
    let end = region.guest_addr() + region.size() as u64;
    let (over, _over) = block_list(&region, &[(end - 4, 5)]).unwrap();
    let (long, _long) = block_list(&region, &[(blocks[0].0, u64::MAX), blocks[0]]).unwrap();
    for (reg, reason) in [
        (bad(|reg| reg.offset = 3000), vendor_err::PAGE_LIST),
        (bad(|reg| reg.length = 3), vendor_err::PAGE_LIST),
        (bad(|reg| reg.length = 1), vendor_err::PAGE_LIST),
        (bad(|reg| reg.length = 0), vendor_err::PAGE_LIST),
        (bad(|reg| reg.pages.page_shift = 12), vendor_err::PAGE_LIST),
        (bad(|reg| reg.pages.levels = 0), vendor_err::PAGE_LIST),
        (bad(|reg| reg.pages.levels = 4), vendor_err::PAGE_LIST),
        (bad(|reg| reg.pages.count = 0), vendor_err::PAGE_LIST),
        (bad(|reg| reg.pages.count = 65), vendor_err::PAGE_LIST),
        (
            FastReg {
                pages: none,
                ..part
            },
            vendor_err::PAGE_LIST,
        ),
        (
            FastReg {
                pages: gone,
                ..part
            },
            vendor_err::MEMORY_GONE,
        ),
        (
            FastReg {
                pages: over,
                ..part
            },
            vendor_err::MEMORY_GONE,
        ),
        (
            FastReg {
                pages: long,
                ..part
            },
            vendor_err::MEMORY_GONE,
        ),
    ] {
        let (status, got) = f.register(&reg);
        assert_eq!(wc_status::name(status), Some("MW_BIND_ERR"), "{reg:?}");
        assert_eq!(vendor_err::name(got), vendor_err::name(reason), "{reg:?}");
    }
    // More than a table holds.
    let many = f
        .pair
        .b
        .pd
        .fast_region(1000, alloc_mr_flag::BLOCKS)
        .unwrap();
    let blocks: Vec<(u64, u64)> = (0..600).map(|i| (at(&f.memory, 20 * i), 5)).collect();
    let (list, _tables) = block_list(&region, &blocks).unwrap();
    assert_eq!(list.levels, 2);
    let reg = FastReg {
        iova: 0,
        key: many.key(1),
        length: 3000,
        pages: list,
        ..part
    };
    let reg = FastReg { offset: 0, ..reg };
    assert_eq!(f.register(&reg), GOOD);
    let data = pattern(6, 3000);
    a.mr.write(0, &data);
    a.qp.write(1, &[a.mr.sge(0, 3000)], 0, reg.key).unwrap();
    assert_eq!(f.outcome(a), GOOD);
    for (i, five) in data.chunks(5).enumerate() {
        assert_eq!(f.memory.view().get(20 * i, 5), five);
    }
}

#[test]
fn pages_have_any_size_from_4_kib_to_2_gib() {
    // D-REG-004.
    let two = Two::of(
        &[],
        &VmOptions {
            memory: 5 << 30,
            ..everything()
        },
    );
    let f = Fast::new(&two);
    let a = &f.pair.a;
    let start = two.b.region(0).guest_addr();
    let whole = Sge {
        addr: 0,
        length: 8,
        lkey: f.physical,
    };
    for shift in 12..=31u8 {
        let size = 1u64 << shift;
        // Two pages of this size, the later one first; the only one, if it is the largest.
        let first = start.next_multiple_of(size);
        let pages: Vec<u64> = match shift {
            31 => vec![first],
            _ => vec![first + size, first],
        };
        let (list, _tables) = page_list(&two.b.region(0), &pages).unwrap();
        let length = size * pages.len() as u64 - 16;
        let reg = FastReg {
            iova: 0,
            offset: 8,
            length,
            pages: PageList {
                page_shift: shift,
                ..list
            },
            ..f.reg(shift)
        };
        assert_eq!(f.register(&reg), GOOD, "{shift}");
        // The last 8 bytes.
        a.mr.write(0, &[shift; 8]);
        assert_eq!(f.write(reg.key, length - 8), GOOD, "{shift}");
        let last = pages.last().unwrap() + size - 16;
        let own = Sge {
            addr: last,
            ..whole
        };
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            remote_addr: a.mr.iova + 64,
            rkey: a.mr.rkey,
            ..SendWqe::default()
        };
        f.pair.b.qp.post_send(&wqe, &[own]).unwrap();
        assert_eq!(f.outcome(&f.pair.b), GOOD);
        assert_eq!(a.mr.read(64, 8), [shift; 8], "{shift}");
        assert_eq!(
            f.write(reg.key, length - 7),
            (wc_status::REM_ACCESS_ERR, vendor_err::KEY_RANGE)
        );
        assert_eq!(f.invalidate(reg.key), GOOD);
        // A page that is not aligned to its size.
        let (list, _tables) = page_list(&two.b.region(0), &[first + PAGE as u64; 2]).unwrap();
        let bad = FastReg {
            pages: PageList {
                count: pages.len() as u32,
                page_shift: shift,
                ..list
            },
            ..reg
        };
        if shift > 12 && shift < 31 {
            let refused = (wc_status::MW_BIND_ERR, vendor_err::PAGE_LIST);
            assert_eq!(f.register(&bad), refused, "{shift}");
        }
    }
}

#[test]
fn allocations_are_checked_and_cost_nothing_before_they_are_registered() {
    // D-FMR-002, D-FMR-003, D-FMR-004, D-FEAT-006.
    let two = two();
    let f = Fast::new(&two);
    let pd = &f.pair.b.pd;
    let limits = two.b.query_device().unwrap();
    assert_eq!(limits.max_fast_reg_pages, 1 << 20);
    let body = command::AllocMr {
        pd: pd.handle(),
        max_pages: 1,
        key: 0x5a,
        ..command::AllocMr::default()
    };
    let alloc = |body: command::AllocMr| two.b.execute::<AllocMr>(&body);
    assert_refused(alloc(command::AllocMr { pd: 999, ..body }), status::ENOENT);
    for bad in [
        command::AllocMr {
            max_pages: 0,
            ..body
        },
        command::AllocMr {
            max_pages: (1 << 20) + 1,
            ..body
        },
        command::AllocMr { flags: 2, ..body },
        command::AllocMr {
            reserved: [0, 1, 0],
            ..body
        },
    ] {
        assert_refused(alloc(bad), status::EINVAL);
    }
    let keys = alloc(body).unwrap();
    assert_eq!((keys.lkey, keys.lkey & 0xff), (keys.rkey, 0x5a));
    pd.deregister(keys.lkey).unwrap();
    assert_refused(pd.deregister(keys.lkey), status::ENOENT);

    // Large ones cost no more than small ones.
    let before = f.footprint(&two);
    let small: Vec<FastMr> = (0..500)
        .map(|i| pd.fast_region(1, i % 2).unwrap())
        .collect();
    let of_small = f.footprint(&two);
    drop(small);
    let large: Vec<FastMr> = (0..500)
        .map(|i| pd.fast_region(1 << 20, i % 2).unwrap())
        .collect();
    let footprint = f.footprint(&two);
    // Their table may have grown for the handles that rest.
    assert!(footprint - before <= of_small - before + (64 << 10));
    let reg = FastReg {
        key: large[0].key(1),
        ..f.reg(1)
    };
    assert_eq!(f.register(&reg), GOOD);
    assert_eq!(f.footprint(&two), footprint + 4 * 8);
    let listed = device(&two, &f.vm)["fast_mrs"].clone();
    let of = |index: usize| {
        let mut regions = listed.as_array().unwrap().iter();
        regions
            .find(|region| region["index"] == large[index].key >> 8)
            .unwrap()
    };
    // Neither keys nor addresses.
    assert!(of(0)["registered"]["key"].is_null() && of(0)["registered"]["iova"].is_null());
    assert_eq!(of(0)["registered"]["index"], reg.key >> 8);
    assert_eq!(of(0)["registered"]["pages"], 4);
    assert!(of(1)["registered"].is_null());
    assert_eq!(
        (&of(0)["blocks"], &of(1)["blocks"]),
        (&false.into(), &true.into())
    );
    assert_eq!(of(1)["max_pages"], 1 << 20);
    // It goes as it is, whatever the low bits of the handle are; and it cannot be changed by
    // command.
    let rereg = |lkey| {
        two.b.execute::<ReregMr>(&command::ReregMr {
            lkey,
            flags: rereg_flag::ACCESS,
            access: access::LOCAL_WRITE,
            ..command::ReregMr::default()
        })
    };
    for low in [0, 1, 2] {
        assert_refused(rereg(large[0].key(low)), status::EINVAL);
    }
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    let before = counts(&two.process, two.b.path());
    pd.deregister(large[0].key(200)).unwrap();
    assert_eq!(counts(&two.process, two.b.path())[2], before[2] - 1);
    let less = footprint - f.footprint(&two);
    assert!((1..1000).contains(&less), "{less} bytes of a region");
    assert_eq!(
        f.write(reg.key, reg.iova),
        (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN)
    );
    assert_refused(rereg(reg.key), status::ENOENT);
    drop(large);
    assert_eq!(counts(&two.process, two.b.path())[2], before[2] - 500);
}

#[test]
fn what_a_vm_registers_is_limited() {
    // D-SEC-002: 7 MiB are left when the first has been registered.
    let path = std::env::temp_dir().join(format!("fast-{}.toml", std::process::id()));
    std::fs::write(&path, "[limits]\nfootprint = 16777216\n").unwrap();
    let two = Two::of(&["--config", path.to_str().unwrap()], &everything());
    let _ = std::fs::remove_file(&path);
    let f = Fast::new(&two);
    let pd = &f.pair.b.pd;
    // The pages of the memory, again and again, never one behind the other.
    let pages: Vec<u64> = (0..1usize << 20).map(|i| f.memory.page(i % 4)).collect();
    let (list, _tables) = page_list(&two.b.region(0), &pages).unwrap();
    let regions = [0, 1].map(|_| pd.fast_region(1 << 20, 0).unwrap());
    let [first, second] = [0, 1].map(|i: usize| FastReg {
        iova: 0,
        key: regions[i].key(1),
        length: (PAGE << 20) as u64,
        pages: list,
        ..f.reg(0)
    });
    let before = f.footprint(&two);
    assert_eq!(f.register(&first), GOOD);
    assert_eq!(f.footprint(&two), before + (8 << 20));
    f.pair.a.mr.write(0, &[8; 8]);
    let last = first.length - 8;
    assert_eq!(f.write(first.key, last), GOOD);
    assert_eq!(f.memory.view().get(SIZE - 8, 8), [8; 8]);
    let small = FastReg {
        key: regions[1].key(1),
        ..f.reg(0)
    };
    assert_eq!(f.register(&small), GOOD);
    assert_eq!(f.invalidate(small.key), GOOD);
    assert_eq!(
        f.register(&second),
        (wc_status::MW_BIND_ERR, vendor_err::NO_MEMORY)
    );
    assert_eq!(f.invalidate(first.key), GOOD);
    assert_eq!(f.footprint(&two), before);
    assert_eq!(f.register(&second), GOOD);
}

#[test]
fn without_the_feature_there_is_none_of_it() {
    // D-FEAT-004.
    let options = |features: u64| VmOptions {
        features,
        ..VmOptions::default()
    };
    let two = Two::of(&[], &options(1 << feature::MW));
    let pair = two.pair();
    assert_refused(pair.b.pd.fast_region(1, 0), status::EOPNOTSUPP);
    for opcode in [wr_opcode::REG_MR, wr_opcode::RDMA_READ_WITH_INV] {
        let pair = two.pair();
        let wqe = SendWqe {
            opcode,
            ..SendWqe::default()
        };
        pair.b.qp.post_send(&wqe, &[]).unwrap();
        let cqe = pair.b.sent();
        let expected = (wc_status::LOC_QP_OP_ERR, vendor_err::OPCODE);
        assert_eq!((cqe.status, cqe.vendor_err), expected);
    }
    let raw = [opcode::ALLOC_MR.to_le_bytes(), [0; 2], [8, 0], [0; 2]].concat();
    assert_eq!(raw.len(), CommandHeader::SIZE);
    assert_ne!(two.b.raw_command(&raw, PAGE).unwrap()[0], 0);
    // It alone brings invalidation, too.
    let two = Two::of(
        &[],
        &options(1 << feature::FAST_REG | 1 << feature::PHYSICAL_MR),
    );
    let pair = two.pair();
    let region = pair.b.pd.fast_region(4, 0).unwrap();
    let physical = pair.b.pd.register_physical(access::LOCAL_WRITE).unwrap();
    let memory = two.b.buffer(SIZE, Placement::Scattered).unwrap();
    let (pages, _tables) = memory.page_list().unwrap();
    let reg = FastReg {
        key: region.key(1),
        access: access::LOCAL_WRITE,
        length: SIZE as u64,
        pages,
        lkey: physical,
        ..FastReg::default()
    };
    pair.b.qp.post_reg(1, &reg).unwrap();
    assert_success(&pair.b.sent());
    pair.b.qp.invalidate(2, reg.key).unwrap();
    assert_success(&pair.b.sent());
    // Windows are another feature's.
    let windows = FastReg {
        access: access::LOCAL_WRITE | access::MW_BIND,
        ..reg
    };
    pair.b.qp.post_reg(1, &windows).unwrap();
    let cqe = pair.b.sent();
    assert_status(&cqe, wc_status::MW_BIND_ERR);
    assert_eq!(cqe.vendor_err, vendor_err::KEY_ACCESS);
}

#[test]
fn other_types_of_queue_pairs_register_and_invalidate_too() {
    // D-REG-004, D-UC-001.
    let two = two();
    let options = SideOptions {
        qp: QpOptions::of(qp_type::UC),
        ..SideOptions::default()
    };
    let f = Fast::of(&two, &options, 0);
    let reg = f.reg(1);
    assert_eq!(f.register(&reg), GOOD);
    f.pair.a.mr.write(0, &[6; 8]);
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    assert_eq!(f.send_with_inv(reg.key), GOOD);
    // What it does not give access to is dropped.
    f.pair.a.mr.write(0, &[7; 8]);
    assert_eq!(f.write(reg.key, reg.iova), GOOD);
    assert_eq!(f.memory.view().get(0, 8), [6; 8]);
    let error = (wc_status::LOC_QP_OP_ERR, vendor_err::BIND);
    let b = &f.pair.b;
    b.qp.invalidate(1, reg.key).unwrap();
    let cqe = b.sent();
    assert_eq!((cqe.status, cqe.vendor_err), error);
    assert_eq!(b.qp.state().unwrap(), qp_state::SQE);

    // XRC: an initiator registers; what a message invalidates is of the protection domain of the
    // SRQ.
    let f = Fast::new(&two);
    let b = &f.pair.b;
    let domain = Xrcd::new(&two.b).unwrap();
    let target = Qp::xrc_target(&domain).unwrap();
    let srq = Srq::xrc(
        &b.context,
        &b.pd,
        &domain,
        &b.recv_cq,
        &SrqOptions::default(),
    )
    .unwrap();
    let initiator = Side::with(&two.a, |vm, uses| {
        let uses = Uses {
            recv_cq: None,
            ..uses
        };
        Qp::create(vm, &uses, &QpOptions::of(qp_type::XRC_INI)).unwrap()
    });
    for (from, to) in [(&initiator.qp, &target), (&target, &initiator.qp)] {
        from.connect(&Connection {
            access: EVERYTHING,
            ..Connection::to(to)
        })
        .unwrap();
    }
    assert_eq!(f.register(&f.reg(1)), GOOD);
    srq.post_recv(9, &[b.mr.sge(0, 8)]).unwrap();
    let wqe = SendWqe {
        opcode: wr_opcode::SEND_WITH_INV,
        imm: f.region.key(1),
        srqn: srq.number(),
        ..SendWqe::default()
    };
    initiator
        .qp
        .post_send(&wqe, &[initiator.mr.sge(0, 8)])
        .unwrap();
    assert_success(&initiator.sent());
    let cqe = b.received();
    assert_eq!((cqe.wr_id, cqe.wc_flags), (9, wc_flag::WITH_INV));
    f.assert_free(f.region.key(1));
    let own = initiator.pd.fast_region(4, 0).unwrap();
    let memory = two.a.buffer(SIZE, Placement::Scattered).unwrap();
    let (pages, _tables) = memory.page_list().unwrap();
    let reg = FastReg {
        key: own.key(1),
        pages,
        lkey: initiator.pd.register_physical(access::LOCAL_WRITE).unwrap(),
        ..f.reg(1)
    };
    initiator.qp.post_reg(1, &reg).unwrap();
    assert_success(&initiator.sent());
    initiator.qp.invalidate(1, reg.key).unwrap();
    assert_success(&initiator.sent());
}

/// Says that it is done when it is dropped, also if the test fails: otherwise others would go on
/// for ever.
struct Finish<'a>(&'a AtomicBool);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes through a key, again and again, whether it is good or not, until `done`.
fn keep_writing(side: &Side, peer: &Qp, key: u32, size: u32, done: &AtomicBool) {
    const PART: u32 = PAGE as u32;
    let reliable = peer.query().unwrap().timeout != 0;
    while !done.load(Ordering::Relaxed) {
        let mut batch = side.qp.send_queue().batch();
        // In one piece of a page each, or as much as there is.
        let part = if reliable { PART } else { size };
        for i in 0..32 {
            let wqe = SendWqe {
                opcode: wr_opcode::RDMA_WRITE,
                remote_addr: u64::from(i * part % size),
                rkey: key,
                ..SendWqe::default()
            };
            batch.push(&wqe, [side.mr.sge(0, part)]).unwrap();
        }
        batch.commit();
        side.qp.ring().unwrap();
        let failed = (0..32).filter(|_| side.sent().status != wc_status::SUCCESS);
        if failed.count() != 0 {
            reconnect(&side.qp, peer);
        }
    }
}

fn reconnect(a: &Qp, b: &Qp) {
    for qp in [a, b] {
        qp.set_state(qp_state::RESET).unwrap();
    }
    for (from, to) in [(a, b), (b, a)] {
        let connection = Connection {
            access: EVERYTHING,
            ..Connection::to(to)
        };
        from.connect(&connection).unwrap();
    }
}

#[test]
fn an_invalidation_ends_all_accesses_before_it_completes() {
    // D-INV-001, D-MM-003.
    let two = Two::of(&["--workers", "2"], &everything());
    let f = Fast::new(&two);
    let b = &f.pair.b;
    let size = 1 << 20;
    let memory = two.b.buffer(size, Placement::Scattered).unwrap();
    let (pages, _tables) = memory.page_list().unwrap();
    let region = b.pd.fast_region(256, 0).unwrap();
    // They are of both workers.
    let kinds = [qp_type::UC, qp_type::UC, qp_type::RC, qp_type::RC];
    let writers = kinds.map(|kind| {
        let options = SideOptions {
            qp: QpOptions::of(kind),
            memory: size,
            ..SideOptions::default()
        };
        let side = Side::new(&two.a, &options);
        side.mr.write(0, &vec![0xaa; size]);
        let [send_cq, recv_cq] = [(); 2].map(|()| Cq::new(&two.b, 256, 0).unwrap());
        let uses = Uses {
            context: Some(&b.context),
            pd: Some(&b.pd),
            send_cq: Some(&send_cq),
            recv_cq: Some(&recv_cq),
            ..Uses::default()
        };
        let qp = Qp::create(&two.b, &uses, &options.qp).unwrap();
        reconnect(&side.qp, &qp);
        (side, qp)
    });
    let words: Vec<usize> = (0..size).step_by(PAGE).collect();
    let word = |at: &usize| memory.view().u64(*at);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (side, peer) in &writers {
            let (done, key) = (&done, region.key(1));
            scope.spawn(move || keep_writing(side, peer, key, size as u32, done));
        }
        let _finish = Finish(&done);
        let mut written = 0;
        let (soon, late) = (
            Instant::now() + Duration::from_secs(5),
            Instant::now() + TIMEOUT,
        );
        for round in 1.. {
            if Instant::now() > if written < 50 { late } else { soon } {
                break;
            }
            let reg = FastReg {
                iova: 0,
                key: region.key(1),
                length: size as u64,
                pages,
                ..f.reg(0)
            };
            assert_eq!(f.register(&reg), GOOD);
            std::thread::sleep(Duration::from_micros(200));
            b.qp.invalidate(2, reg.key).unwrap();
            let cqe = loop {
                if let Some(cqe) = b.send_cq.poll() {
                    break cqe;
                }
            };
            // At once: whatever is still written would be found to be.
            let before = words.iter().filter(|at| {
                let old = word(at).swap(round, Ordering::Relaxed);
                old != 0 && old != round - 1
            });
            written += u32::from(before.count() != 0);
            assert_success(&cqe);
            std::thread::sleep(Duration::from_micros(200));
            let late = words
                .iter()
                .filter(|at| word(at).load(Ordering::Relaxed) != round);
            assert_eq!(late.count(), 0, "round {round}");
        }
        assert!(written >= 50, "{written} registrations were written to");
    });
}

#[test]
fn a_queue_pair_sends_from_what_its_message_invalidates_at_itself() {
    // D-INV-001: a device that waited for its own access would wait for ever.
    let two = two();
    let f = Fast::new(&two);
    let b = &f.pair.b;
    b.qp.set_state(qp_state::RESET).unwrap();
    let own = Connection {
        access: EVERYTHING,
        ..Connection::to(&b.qp)
    };
    b.qp.connect(&own).unwrap();
    let reg = f.reg(1);
    b.qp.post_reg(1, &reg).unwrap();
    assert_success(&b.sent());
    // From one part of it to another, and from all of it to itself; more than a slice.
    for _ in 0..3 {
        let half = SIZE as u32 / 2;
        f.memory.view().write(0, &[3; 16]);
        b.qp.post_recv(
            2,
            &[Sge {
                addr: reg.iova + u64::from(half),
                ..f.sge(reg.key, half)
            }],
        )
        .unwrap();
        let wqe = SendWqe {
            opcode: wr_opcode::SEND_WITH_INV,
            imm: reg.key,
            ..SendWqe::default()
        };
        b.qp.post_send(&wqe, &[f.sge(reg.key, half)]).unwrap();
        assert_success(&b.sent());
        let cqe = b.received();
        assert_eq!((cqe.imm, cqe.wc_flags), (reg.key, wc_flag::WITH_INV));
        assert_eq!(f.memory.view().get(SIZE / 2, 16), [3; 16]);
        b.qp.post_reg(1, &reg).unwrap();
        assert_success(&b.sent());
    }
}

/// A fast region whose memory is in `region`.
fn elsewhere(f: &Fast, region: &Arc<Region>) -> (Buffer, FastReg, Option<Buffer>) {
    let memory = region.buffer(SIZE, Placement::Scattered).unwrap();
    // The tables are in memory that stays.
    let pages: Vec<u64> = (0..4).map(|page| memory.page(page)).collect();
    let (list, tables) = page_list(&f.vm.region(0), &pages).unwrap();
    let reg = FastReg {
        iova: 0,
        pages: list,
        ..f.reg(1)
    };
    (memory, reg, tables)
}

#[test]
fn memory_comes_and_goes_under_fast_regions() {
    // D-STOP-005.
    let two = two();
    let gone = (wc_status::REM_ACCESS_ERR, vendor_err::MEMORY_GONE);
    for flags in [0, alloc_mr_flag::BLOCKS] {
        let f = Fast::of(&two, &SideOptions::default(), flags);
        let number = two.b.add_memory(1 << 20).unwrap();
        let (memory, mut reg, _tables) = elsewhere(&f, &two.b.region(number));
        let mut _blocks = None;
        if flags != 0 {
            let blocks: Vec<_> = (0..4).map(|i| (memory.page(i), PAGE as u64)).collect();
            let (list, tables) = block_list(&two.b.region(0), &blocks).unwrap();
            reg.pages = list;
            _blocks = Some(tables);
        }
        assert_eq!(f.register(&reg), GOOD);
        assert_eq!(f.write(reg.key, 0), GOOD);
        two.b.remove_memory(number).unwrap();
        assert_eq!(f.write(reg.key, 0), gone);
        // It is registered all the same: it can be invalidated, and nothing of that memory
        // registered.
        assert_eq!(f.invalidate(reg.key), GOOD);
        assert_eq!(
            f.register(&reg),
            (wc_status::MW_BIND_ERR, vendor_err::MEMORY_GONE)
        );
        two.b.replug_memory(number).unwrap();
        assert_eq!(f.register(&reg), GOOD);
        two.b.remove_memory(number).unwrap();
        two.b.replug_memory(number).unwrap();
        f.pair.a.mr.write(0, &[5; 8]);
        assert_eq!(f.write(reg.key, 4096), GOOD);
        assert_eq!(memory.view().get(4096, 8), [5; 8]);
        assert_eq!(f.invalidate(reg.key), GOOD);
        assert_eq!(
            f.write(reg.key, 0),
            (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN)
        );
    }
}

#[test]
fn other_memory_comes_and_goes_while_regions_are_registered() {
    // D-STOP-005, D-REG-001.
    let two = two();
    let f = Fast::new(&two);
    let pd = &f.pair.b.pd;
    let pages: Vec<u64> = (0..300_000).map(|i| f.memory.page(i % 4)).collect();
    let (list, _tables) = page_list(&two.b.region(0), &pages).unwrap();
    let region = pd.fast_region(1 << 20, 0).unwrap();
    let reg = FastReg {
        iova: 0,
        key: region.key(1),
        length: (PAGE * pages.len()) as u64,
        pages: list,
        ..f.reg(0)
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (vm, done) = (&two.b, &done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let number = vm.add_memory(1 << 20).unwrap();
                std::thread::sleep(Duration::from_micros(500));
                vm.remove_memory(number).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _finish = Finish(done);
        for i in 0..20u64 {
            assert_eq!(f.register(&reg), GOOD);
            f.pair.a.mr.write(0, &i.to_le_bytes());
            assert_eq!(f.write(reg.key, reg.length - 8), GOOD);
            assert_eq!(f.memory.view().get(SIZE - 8, 8), i.to_le_bytes());
            assert_eq!(f.invalidate(reg.key), GOOD);
        }
    });
}

#[test]
fn a_stop_does_not_disturb_registrations() {
    // D-STOP-002.
    let two = two();
    let f = Fast::new(&two);
    let region = f.pair.b.pd.fast_region(1 << 20, 0).unwrap();
    let pages: Vec<u64> = (0..1 << 20).map(|i| f.memory.page(i % 4)).collect();
    let (list, _tables) = page_list(&two.b.region(0), &pages).unwrap();
    let reg = FastReg {
        iova: 0,
        key: region.key(1),
        length: (PAGE * pages.len()) as u64,
        pages: list,
        ..f.reg(0)
    };
    for round in 0..10u8 {
        f.pair.b.qp.post_reg(1, &reg).unwrap();
        // In the midst of it, most likely.
        std::thread::sleep(Duration::from_micros(300 * u64::from(round)));
        two.b.stop().unwrap();
        two.b.start().unwrap();
        assert_eq!(f.outcome(&f.pair.b), GOOD);
        f.pair.a.mr.write(0, &[round + 1; 8]);
        assert_eq!(f.write(reg.key, reg.length - 8), GOOD);
        assert_eq!(f.memory.view().get(SIZE - 8, 8), [round + 1; 8]);
        two.b.stop().unwrap();
        two.b.start().unwrap();
        assert_eq!(f.invalidate(reg.key), GOOD);
    }
}

#[test]
fn a_vm_is_lost_with_its_registrations() {
    // D-RST-001, D-RST-004, D-SEC-002.
    let mut two = two();
    for way in 0..3 {
        let f = Fast::with(&two, &SideOptions::default(), 0, |connection| {
            connection.timeout = 10;
            connection.retry_cnt = 1;
        });
        let region = f.pair.b.pd.fast_region(1 << 20, 0).unwrap();
        let pages: Vec<u64> = (0..200_000).map(|i| f.memory.page(i % 4)).collect();
        let (list, _tables) = page_list(&two.b.region(0), &pages).unwrap();
        let reg = FastReg {
            key: region.key(1),
            length: (PAGE * pages.len()) as u64,
            pages: list,
            ..f.reg(0)
        };
        assert_eq!(f.register(&f.reg(1)), GOOD);
        // In the midst of it, most likely.
        f.pair.b.qp.post_reg(1, &reg).unwrap();
        match way {
            0 => two.b.reset().unwrap(),
            1 => two.b.reset_silently().unwrap(),
            _ => two.b.kill(),
        }
        if way < 2 {
            assert_eq!(counts(&two.process, two.b.path()), [0; 5]);
            assert_footprint_falls_to(&two.process, two.b.path(), 0);
        } else {
            wait_until_gone(&two);
        }
        let a = &f.pair.a;
        a.qp.write(1, &[a.mr.sge(0, 8)], 0, f.region.key(1))
            .unwrap();
        assert_status(&a.sent(), wc_status::RETRY_EXC_ERR);
        drop((region, _tables, f));
        if way == 2 {
            let path = two.b.path().to_owned();
            two.b = Vm::connect(&path, everything()).unwrap();
            assert_eq!(counts(&two.process, &path), [0; 5]);
        }
    }
    let f = Fast::new(&two);
    assert_eq!(f.register(&f.reg(1)), GOOD);
    assert_eq!(f.write(f.region.key(1), f.memory.addr()), GOOD);
    two.assert_unharmed();
}
