// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Atomic operations, memory windows, changes of regions, FLUSH, physical regions; completion
//! queues that are resized and have time stamps.
use std::sync::Arc;

use vhost_device_rdma_bare::core::command::{DeregMr, QueryClock, RegMr, ReregMr};
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::command::{self, mw_type, rereg_flag, status, PageList};
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::facts::OPCODES;
use vhost_device_rdma_bare::spec::ring::{BindMw, MaskedOperands, SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, flush_level, flush_type, qp_state, vendor_err, wc_flag, wc_opcode, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    page_list, Connection, Cq, DeviceProcess, Error, Mr, Placement, Qp, Vm, VmOptions, PAGE,
};

use crate::common::{
    assert_status, assert_success, process, Pair, Side, SideOptions, Two, NOTHING, TIMEOUT,
};

/// All of these features.
const FEATURES: u64 = 1 << feature::ATOMIC
    | 1 << feature::MW
    | 1 << feature::REREG_MR
    | 1 << feature::RESIZE_CQ
    | 1 << feature::CQ_TIMESTAMP
    | 1 << feature::FLUSH
    | 1 << feature::PHYSICAL_MR;

/// Access of the queue pairs, and of the regions that allow all.
const EVERYTHING: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::FLUSH_GLOBAL
    | access::MW_BIND;

/// A process and two VMs that accepted the features.
struct Featured {
    a: Arc<Vm>,
    b: Arc<Vm>,
    _process: DeviceProcess,
}

impl Featured {
    fn new() -> Self {
        let process = process(2);
        let vm = |i| {
            let options = VmOptions {
                features: FEATURES,
                ..VmOptions::default()
            };
            Vm::connect(process.socket(i), options).unwrap()
        };
        Self {
            a: vm(0),
            b: vm(1),
            _process: process,
        }
    }

    fn pair(&self) -> Featureful {
        self.pair_with(|_| ())
    }

    fn pair_with(&self, change: impl Fn(&mut Connection)) -> Featureful {
        let pair = Pair::connect(&self.a, &self.b, &SideOptions::default(), |connection| {
            connection.access = EVERYTHING;
            change(connection);
        });
        let target = pair.b.pd.register(2 * PAGE, EVERYTHING).unwrap();
        Featureful {
            target,
            vm_b: self.b.clone(),
            pair,
        }
    }
}

/// A pair, and a region of the second side that allows everything.
struct Featureful {
    // Dropped first.
    target: Mr,
    vm_b: Arc<Vm>,
    pair: Pair,
}

impl Featureful {
    /// A work request of the first side for the target.
    fn wqe(&self, opcode: u8, offset: u64) -> SendWqe {
        SendWqe {
            opcode,
            remote_addr: self.target.iova + offset,
            rkey: self.target.rkey,
            ..SendWqe::default()
        }
    }

    fn word(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.target.read(offset, 8).try_into().unwrap())
    }

    /// What an atomic operation brought.
    #[track_caller]
    fn brought(&self, opcode: u8) -> u64 {
        let cqe = self.pair.a.sent();
        assert_success(&cqe);
        assert_eq!((cqe.opcode, cqe.byte_len), (opcode, 8));
        u64::from_le_bytes(self.pair.a.mr.read(8, 8).try_into().unwrap())
    }

    fn sge(&self) -> Sge {
        self.pair.a.mr.sge(8, 8)
    }

    /// The work request fails so, on both sides.
    #[track_caller]
    fn refused(&self, status: u8, reason: u8, event: u16) {
        let cqe = self.pair.a.sent();
        assert_status(&cqe, status);
        assert_eq!(vendor_err::name(cqe.vendor_err), vendor_err::name(reason));
        assert_eq!(self.pair.a.qp.state().unwrap(), qp_state::ERR);
        assert_eq!(self.pair.b.qp.state().unwrap(), qp_state::ERR);
        let event_seen = self.vm_b.wait_async_event(TIMEOUT);
        let event_seen = event_seen.unwrap().expect("an event");
        assert_eq!(event_seen.event_type, event);
        assert_eq!(event_seen.number, self.pair.b.qp.number());
        assert_eq!(event_seen.reason, u32::from(reason));
    }

    /// The work request fails so at the requester, and the peer hears nothing.
    #[track_caller]
    fn refused_here(&self, status: u8, reason: u8) {
        let cqe = self.pair.a.sent();
        assert_status(&cqe, status);
        assert_eq!(vendor_err::name(cqe.vendor_err), vendor_err::name(reason));
        assert_eq!(self.pair.a.qp.state().unwrap(), qp_state::ERR);
        assert_eq!(self.pair.b.qp.state().unwrap(), qp_state::RTS);
    }
}

#[test]
fn atomic_operations_change_the_word_and_bring_what_it_was() {
    // D-ATM-001, D-ATM-004.
    let vms = Featured::new();
    let f = vms.pair();
    let a = &f.pair.a;
    f.target.write(16, &100u64.to_le_bytes());
    let add = SendWqe {
        operand0: 5,
        ..f.wqe(wr_opcode::ATOMIC_FETCH_AND_ADD, 16)
    };
    a.qp.post_send(&add, &[f.sge()]).unwrap();
    assert_eq!(f.brought(wc_opcode::FETCH_ADD), 100);
    assert_eq!(f.word(16), 105);
    // Once where it is equal, and once where it is not.
    for before in [105, 7] {
        let swap = SendWqe {
            operand0: 105,
            operand1: 7,
            ..f.wqe(wr_opcode::ATOMIC_CMP_AND_SWP, 16)
        };
        a.qp.post_send(&swap, &[f.sge()]).unwrap();
        assert_eq!(f.brought(wc_opcode::COMP_SWAP), before);
        assert_eq!(f.word(16), 7);
    }
    // The result may go to several places.
    let parts = [a.mr.sge(8, 3), a.mr.sge(11, 5)];
    a.qp.post_send(&add, &parts).unwrap();
    assert_eq!(f.brought(wc_opcode::FETCH_ADD), 7);
    // Or into two pages.
    a.qp.post_send(&add, &[a.mr.sge(PAGE as u64 - 3, 8)])
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(a.mr.read(PAGE - 3, 8), 12u64.to_le_bytes());

    f.target.write(24, &0xff_00ffu64.to_le_bytes());
    let masked = SendWqe {
        operand0: 0x01_0001,
        ..f.wqe(wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD, 24)
    };
    let fields = MaskedOperands {
        mask0: 0x8000_8080,
        mask1: 0,
    };
    a.qp.post_masked(&masked, &fields, f.sge()).unwrap();
    assert_eq!(f.brought(wc_opcode::MASKED_FETCH_ADD), 0xff_00ff);
    assert_eq!(f.word(24), 0x100_0000);
    let masked = SendWqe {
        operand0: 0x0100_0042,
        operand1: 0xabcd,
        ..f.wqe(wr_opcode::MASKED_ATOMIC_CMP_AND_SWP, 24)
    };
    let masks = MaskedOperands {
        mask0: 0xffff_ff00,
        mask1: 0xff00,
    };
    a.qp.post_masked(&masked, &masks, f.sge()).unwrap();
    assert_eq!(f.brought(wc_opcode::MASKED_COMP_SWAP), 0x100_0000);
    assert_eq!(f.word(24), 0x100_ab00);
}

#[test]
fn atomic_write_stores_a_word_from_memory_or_inline() {
    // D-ATM-002, D-ATM-004.
    let vms = Featured::new();
    let f = vms.pair();
    let a = &f.pair.a;
    a.mr.write(3, &0x1122_3344_5566_7788u64.to_le_bytes());
    let wqe = f.wqe(wr_opcode::ATOMIC_WRITE, 8);
    a.qp.post_send(&wqe, &[a.mr.sge(3, 6), a.mr.sge(9, 2)])
        .unwrap();
    let cqe = a.sent();
    assert_success(&cqe);
    assert_eq!(cqe.opcode, wc_opcode::ATOMIC_WRITE);
    assert_eq!(f.word(8), 0x1122_3344_5566_7788);
    a.qp.post_inline(&wqe, &9u64.to_le_bytes()).unwrap();
    assert_success(&a.sent());
    assert_eq!((f.word(8), f.word(0), f.word(16)), (9, 0, 0));
    // It may lie in two pages.
    a.mr.write(PAGE - 3, &0x8877_6655_4433_2211u64.to_le_bytes());
    a.qp.post_send(&wqe, &[a.mr.sge(PAGE as u64 - 3, 8)])
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(f.word(8), 0x8877_6655_4433_2211);
}

#[test]
fn bad_atomic_operations_are_refused() {
    // D-ATM-003.
    let vms = Featured::new();
    let post = |f: &Featureful, wqe: &SendWqe, length| {
        let sge = f.pair.a.mr.sge(8, length);
        f.pair.a.qp.post_send(wqe, &[sge]).unwrap();
    };
    for opcode in [wr_opcode::ATOMIC_FETCH_AND_ADD, wr_opcode::ATOMIC_WRITE] {
        let f = vms.pair();
        post(&f, &f.wqe(opcode, 12), 8);
        f.refused(
            wc_status::REM_INV_REQ_ERR,
            vendor_err::ALIGNMENT,
            event_type::QP_REQ_ERR,
        );
        // The same of the memory behind the address.
        let f = vms.pair();
        let buffer = f.vm_b.buffer(PAGE, Placement::Contiguous).unwrap();
        let (pages, _tables) = buffer.page_list().unwrap();
        let body = command::RegMr {
            pd: f.pair.b.pd.handle(),
            access: EVERYTHING,
            iova: 0x10000,
            length: 64,
            offset: 4,
            pages,
            ..command::RegMr::default()
        };
        let keys = f.vm_b.execute::<RegMr>(&body).unwrap();
        let wqe = SendWqe {
            remote_addr: 0x10000,
            rkey: keys.rkey,
            ..f.wqe(opcode, 0)
        };
        post(&f, &wqe, 8);
        f.refused(
            wc_status::REM_INV_REQ_ERR,
            vendor_err::ALIGNMENT,
            event_type::QP_REQ_ERR,
        );
        let handle = command::Handle {
            handle: keys.lkey,
            ..command::Handle::default()
        };
        f.vm_b.execute::<DeregMr>(&handle).unwrap();
        let f = vms.pair();
        post(&f, &f.wqe(opcode, 2 * PAGE as u64), 8);
        f.refused(
            wc_status::REM_ACCESS_ERR,
            vendor_err::KEY_RANGE,
            event_type::QP_ACCESS_ERR,
        );
        let f = vms.pair_with(|c| c.access = access::REMOTE_READ);
        post(&f, &f.wqe(opcode, 0), 8);
        f.refused(
            wc_status::REM_INV_REQ_ERR,
            vendor_err::QP_ACCESS,
            event_type::QP_REQ_ERR,
        );
        let f = vms.pair();
        post(&f, &f.wqe(opcode, 0), 7);
        f.refused_here(wc_status::LOC_LEN_ERR, vendor_err::MESSAGE_LENGTH);
    }
    // A region that does not allow it.
    let f = vms.pair();
    let read_only = f.pair.b.pd.register(PAGE, access::REMOTE_READ).unwrap();
    let wqe = SendWqe {
        opcode: wr_opcode::ATOMIC_CMP_AND_SWP,
        remote_addr: read_only.iova,
        rkey: read_only.rkey,
        ..SendWqe::default()
    };
    post(&f, &wqe, 8);
    f.refused(
        wc_status::REM_ACCESS_ERR,
        vendor_err::KEY_ACCESS,
        event_type::QP_ACCESS_ERR,
    );
    // Nothing is done if the result has no place to go.
    let f = vms.pair();
    let bad = Sge {
        lkey: f.pair.a.mr.lkey + 1,
        ..f.sge()
    };
    let add = SendWqe {
        operand0: 1,
        ..f.wqe(wr_opcode::ATOMIC_FETCH_AND_ADD, 0)
    };
    f.pair.a.qp.post_send(&add, &[bad]).unwrap();
    f.refused_here(wc_status::LOC_PROT_ERR, vendor_err::KEY_UNKNOWN);
    assert_eq!(f.word(0), 0);
    let f = vms.pair();
    f.pair.a.qp.post_inline(&add, &[0; 8]).unwrap();
    f.refused_here(wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
    let f = vms.pair_with(|c| c.max_rd_atomic = 0);
    post(&f, &add, 8);
    f.refused_here(wc_status::LOC_QP_OP_ERR, vendor_err::RD_ATOMIC);
}

#[test]
fn without_its_feature_nothing_of_this_exists() {
    // D-FEAT-004.
    let two = Two::new();
    for of in OPCODES.iter().filter(|of| !of.features.is_empty()) {
        let pair = two.pair();
        let wqe = SendWqe {
            opcode: of.opcode,
            ..SendWqe::default()
        };
        pair.a.qp.post_send(&wqe, &[pair.a.mr.sge(0, 8)]).unwrap();
        let cqe = pair.a.sent();
        assert_status(&cqe, wc_status::LOC_QP_OP_ERR);
        assert_eq!(cqe.vendor_err, vendor_err::OPCODE);
    }
    let side = Side::new(&two.a, &SideOptions::default());
    let unsupported = |result: Result<(), Error>| {
        assert_eq!(result.unwrap_err().status(), Some(status::EOPNOTSUPP));
    };
    for extra in [access::MW_BIND, access::FLUSH_GLOBAL] {
        unsupported(side.pd.register(PAGE, extra).map(|_| ()));
    }
    unsupported(side.pd.register_physical(0).map(|_| ()));
    unsupported(side.pd.window(mw_type::TYPE_1).map(|_| ()));
    unsupported(side.send_cq.resize(8, false).map(|_| ()));
    unsupported(side.send_cq.moderate(8, 8));
    unsupported(rereg(&two.a, &side.mr, rereg_flag::ACCESS, |_| ()).map(|_| ()));
    let extended = Cq::extended(&two.a, 8, 0).unwrap_err();
    assert_eq!(extended.status(), Some(status::EINVAL));
    unsupported(two.a.execute::<QueryClock>(&[]).map(|_| ()));
}

/// REREG_MR; returns the new key.
fn rereg(
    vm: &Arc<Vm>,
    mr: &Mr,
    flags: u32,
    change: impl FnOnce(&mut command::ReregMr),
) -> Result<u32, Error> {
    let mut body = command::ReregMr {
        lkey: mr.lkey,
        flags,
        key: 0x33,
        ..command::ReregMr::default()
    };
    change(&mut body);
    Ok(vm.execute::<ReregMr>(&body)?.lkey)
}

impl Featureful {
    fn read_with(&self, remote_addr: u64, rkey: u32) -> (u8, u8) {
        let a = &self.pair.a;
        a.qp.read(1, &[a.mr.sge(0, 8)], remote_addr, rkey).unwrap();
        let cqe = a.sent();
        (cqe.status, cqe.vendor_err)
    }
}

#[test]
fn regions_change_in_all_ways() {
    // D-RRG-001.
    let vms = Featured::new();
    let f = vms.pair();
    let b = &f.pair.b;
    f.target.write(0, &[7; 8]);
    // Other pages under other addresses.
    let buffer = vms.b.buffer(PAGE, Placement::Scattered).unwrap();
    buffer.view().write(16, &[9; 8]);
    let (pages, _tables) = page_list(buffer.region(), &[buffer.page(0)]).unwrap();
    let old = f.target.lkey;
    let key = rereg(&vms.b, &f.target, rereg_flag::TRANSLATION, |r| {
        (r.iova, r.length, r.offset, r.pages) = (0x77_0000, 100, 16, pages);
    })
    .unwrap();
    assert_eq!((key >> 8, key & 0xff), (old >> 8, 0x33));
    assert_eq!(f.read_with(0x77_0000, key), (wc_status::SUCCESS, 0));
    assert_eq!(f.pair.a.mr.read(0, 8), [9; 8]);
    let reregistered = |flags, change: &dyn Fn(&mut command::ReregMr)| {
        rereg(&vms.b, &f.target, flags, |r| {
            r.lkey = key;
            change(r);
        })
        .map_err(|error| error.status().expect("an answer"))
    };
    // What cannot be changes nothing.
    let all = rereg_flag::TRANSLATION | rereg_flag::PD | rereg_flag::ACCESS;
    assert_eq!(reregistered(0, &|_| ()), Err(status::EINVAL));
    assert_eq!(reregistered(8, &|_| ()), Err(status::EINVAL));
    assert_eq!(reregistered(all, &|_| ()), Err(status::EINVAL));
    assert_eq!(reregistered(rereg_flag::PD, &|_| ()), Err(status::ENOENT));
    assert_eq!(
        reregistered(rereg_flag::ACCESS, &|r| r.access = access::REMOTE_WRITE),
        Err(status::EINVAL)
    );
    assert_eq!(
        reregistered(rereg_flag::ACCESS, &|r| r.access = access::PHYSICAL),
        Err(status::EINVAL)
    );
    assert_eq!(
        reregistered(rereg_flag::ACCESS, &|r| r.lkey = old),
        Err(status::ENOENT)
    );
    assert_eq!(
        reregistered(rereg_flag::TRANSLATION, &|r| {
            r.length = 8;
            r.pages = PageList {
                addr: !4095,
                count: 1,
                page_shift: 12,
                ..PageList::default()
            };
        }),
        Err(status::EFAULT)
    );
    assert_eq!(f.read_with(0x77_0000, key), (wc_status::SUCCESS, 0));
    // Other access.
    let read = access::REMOTE_READ;
    assert_eq!(
        reregistered(rereg_flag::ACCESS, &|r| r.access = read),
        Ok(key)
    );
    assert_eq!(f.read_with(0x77_0000, key), (wc_status::SUCCESS, 0));
    // Another protection domain.
    let other = Side::new(&vms.b, &SideOptions::default());
    assert_eq!(
        reregistered(rereg_flag::PD, &|r| r.pd = other.pd.handle()),
        Ok(key)
    );
    assert_eq!(
        f.read_with(0x77_0000, key),
        (wc_status::REM_ACCESS_ERR, vendor_err::KEY_PD)
    );
    assert_eq!(
        other.pd.deregister(old).unwrap_err().status(),
        Some(status::ENOENT)
    );
    b.pd.deregister(key).unwrap();
}

impl Featureful {
    fn bind_request(&self, rkey: u32, new_rkey: u32) -> BindMw {
        BindMw {
            addr: 0x5000,
            mw_rkey: rkey,
            length: 64,
            access: access::REMOTE_READ | access::REMOTE_WRITE,
            mr_lkey: self.target.lkey,
            mr_addr: self.target.iova + 128,
            new_rkey,
            ..BindMw::default()
        }
    }

    #[track_caller]
    fn bind(&self, bind: &BindMw) {
        self.pair.b.qp.post_bind(5, bind).unwrap();
        let cqe = self.pair.b.sent();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.opcode), (5, wc_opcode::BIND_MW));
    }
}

#[test]
fn windows_of_type_1_are_bound_and_unbound() {
    // D-MW-003, D-MW-005.
    let vms = Featured::new();
    let f = vms.pair();
    let window = f.pair.b.pd.window(mw_type::TYPE_1).unwrap();
    f.target.write(128, &[3; 8]);
    // Applications are used to asking for local writes, too.
    let request = f.bind_request(window.rkey, window.rkey | 1);
    f.bind(&BindMw {
        access: request.access | access::LOCAL_WRITE,
        ..request
    });
    assert_eq!(
        f.read_with(0x5000, window.rkey | 1),
        (wc_status::SUCCESS, 0)
    );
    assert_eq!(f.pair.a.mr.read(0, 8), [3; 8]);
    let busy = f.pair.b.pd.deregister(f.target.lkey).unwrap_err();
    assert_eq!(busy.status(), Some(status::EBUSY));
    let busy = rereg(&vms.b, &f.target, rereg_flag::ACCESS, |_| ()).unwrap_err();
    assert_eq!(busy.status(), Some(status::EBUSY));
    f.bind(&BindMw {
        length: 0,
        ..f.bind_request(window.rkey | 1, window.rkey | 2)
    });
    assert_eq!(
        f.read_with(0x5000, window.rkey | 1),
        (wc_status::REM_ACCESS_ERR, vendor_err::KEY_UNKNOWN)
    );
}

#[test]
fn windows_of_type_2_are_invalidated_from_both_sides() {
    // D-MW-003.
    let vms = Featured::new();
    let f = vms.pair();
    let (a, b) = (&f.pair.a, &f.pair.b);
    let window = b.pd.window(mw_type::TYPE_2).unwrap();
    let key = |n: u32| window.rkey | n;
    f.bind(&f.bind_request(key(0), key(1)));
    a.qp.write(1, &[a.mr.sge(0, 64)], 0x5000, key(1)).unwrap();
    assert_success(&a.sent());
    let invalidate = SendWqe {
        opcode: wr_opcode::LOCAL_INV,
        imm: key(1),
        ..SendWqe::default()
    };
    b.qp.post_send(&invalidate, &[]).unwrap();
    let cqe = b.sent();
    assert_success(&cqe);
    assert_eq!(cqe.opcode, wc_opcode::LOCAL_INV);
    f.bind(&f.bind_request(key(1), key(2)));
    b.qp.post_recv(9, &[b.mr.sge(0, 100)]).unwrap();
    let send = SendWqe {
        opcode: wr_opcode::SEND_WITH_INV,
        imm: key(2),
        ..SendWqe::default()
    };
    a.qp.post_send(&send, &[a.mr.sge(0, 10)]).unwrap();
    let sent = a.sent();
    assert_success(&sent);
    assert_eq!(sent.opcode, wc_opcode::SEND);
    let received = b.received();
    assert_success(&received);
    assert_eq!((received.opcode, received.byte_len), (wc_opcode::RECV, 10));
    assert_eq!(
        (received.wc_flags, received.imm),
        (wc_flag::WITH_INV, key(2))
    );
    // It is not bound any longer, so this fails, and leaves the receive to be flushed.
    b.qp.post_recv(10, &[b.mr.sge(0, 100)]).unwrap();
    a.qp.post_send(&send, &[a.mr.sge(0, 10)]).unwrap();
    f.refused(
        wc_status::REM_ACCESS_ERR,
        vendor_err::BIND,
        event_type::QP_ACCESS_ERR,
    );
    assert_status(&b.received(), wc_status::WR_FLUSH_ERR);
    drop(window);
}

#[test]
fn bad_binds_and_invalidations_are_refused() {
    // D-MW-002.
    let vms = Featured::new();
    for case in 0..4 {
        let f = vms.pair();
        let b = &f.pair.b;
        let window = b.pd.window(mw_type::TYPE_2).unwrap();
        let good = f.bind_request(window.rkey, window.rkey | 1);
        let (bad, status) = match case {
            0 => (BindMw { mr_lkey: 1, ..good }, wc_status::MW_BIND_ERR),
            1 => (BindMw { length: 0, ..good }, wc_status::MW_BIND_ERR),
            2 => (
                BindMw {
                    access: access::MW_BIND,
                    ..good
                },
                wc_status::MW_BIND_ERR,
            ),
            _ => (good, wc_status::LOC_QP_OP_ERR),
        };
        if status == wc_status::MW_BIND_ERR {
            b.qp.post_bind(1, &bad).unwrap();
        } else {
            let invalidate = SendWqe {
                opcode: wr_opcode::LOCAL_INV,
                imm: f.target.lkey,
                ..SendWqe::default()
            };
            b.qp.post_send(&invalidate, &[]).unwrap();
        }
        let cqe = b.sent();
        assert_status(&cqe, status);
        assert_eq!(cqe.vendor_err, vendor_err::BIND);
        assert_eq!(b.qp.state().unwrap(), qp_state::ERR);
    }
}

#[test]
fn flush_completes_where_it_is_allowed() {
    // D-FLS-002, D-FLS-003.
    let vms = Featured::new();
    let flush = |f: &Featureful, kind: u8, level: u8, length| {
        let wqe = SendWqe {
            operand0: length,
            operand1: u64::from(kind) | u64::from(level) << 8,
            ..f.wqe(wr_opcode::FLUSH, 0)
        };
        f.pair.a.qp.post_send(&wqe, &[]).unwrap();
    };
    let f = vms.pair();
    for (level, length) in [
        (flush_level::RANGE, 2 * PAGE as u64),
        (flush_level::RANGE, 0),
        (flush_level::MR, u64::MAX),
    ] {
        flush(&f, flush_type::GLOBAL, level, length);
        let cqe = f.pair.a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.opcode, wc_opcode::FLUSH);
    }
    flush(&f, 0, 0, 8);
    f.refused_here(wc_status::LOC_QP_OP_ERR, vendor_err::FLAGS);
    let f = vms.pair();
    flush(
        &f,
        flush_type::GLOBAL,
        flush_level::RANGE,
        2 * PAGE as u64 + 1,
    );
    f.refused(
        wc_status::REM_ACCESS_ERR,
        vendor_err::KEY_RANGE,
        event_type::QP_ACCESS_ERR,
    );
    // Nothing here is persistent.
    let f = vms.pair_with(|c| c.access |= access::FLUSH_PERSISTENT);
    flush(&f, flush_type::PERSISTENT, flush_level::MR, 8);
    f.refused(
        wc_status::REM_ACCESS_ERR,
        vendor_err::KEY_ACCESS,
        event_type::QP_ACCESS_ERR,
    );
}

#[test]
fn a_physical_region_reaches_all_guest_memory_and_nothing_else() {
    // D-MR-004.
    let vms = Featured::new();
    let f = vms.pair();
    let b = &f.pair.b;
    let key =
        b.pd.register_physical(EVERYTHING & !access::MW_BIND)
            .unwrap();
    let buffer = vms.b.buffer(PAGE, Placement::Contiguous).unwrap();
    buffer.view().write(40, &[8; 8]);
    assert_eq!(
        f.read_with(buffer.page(0) + 40, key),
        (wc_status::SUCCESS, 0)
    );
    assert_eq!(f.pair.a.mr.read(0, 8), [8; 8]);
    let (status, _) = f.read_with(u64::MAX - 4096, key);
    assert_eq!(status, wc_status::REM_ACCESS_ERR);
    b.pd.deregister(key).unwrap();
    let bad = b.pd.register_physical(access::MW_BIND).unwrap_err();
    assert_eq!(bad.status(), Some(status::EINVAL));
}

/// A scatter/gather entry of the null lkey.
fn nothing(vm: &Vm, addr: u64, length: u32) -> Sge {
    let lkey = vm.query_device().unwrap().null_lkey;
    Sge { addr, length, lkey }
}

#[test]
fn the_null_lkey_reads_zeros_and_discards_what_is_written() {
    // D-MR-005, D-OBJ-004, D-QDEV-005.
    const LONG: usize = 200_000;
    let vms = Featured::new();
    let f = vms.pair();
    let (a, b) = (&f.pair.a, &f.pair.b);
    let device = vms.a.query_device().unwrap();
    assert!(device.null_lkey != 0 && device.null_lkey < 256);
    let (here, there) = (nothing(&vms.a, 0, 0), nothing(&vms.b, 0, 0));
    let source = a.pd.register(LONG, EVERYTHING).unwrap();
    let target = b.pd.register(LONG, EVERYTHING).unwrap();
    let part = |sge: Sge, addr, length| Sge {
        addr,
        length,
        ..sge
    };

    // A write of zeros between bytes, at addresses and of lengths that no region has.
    source.write(0, &[1; 16]);
    target.write(0, &[9; LONG]);
    let zeros = LONG as u32 - 16;
    let parts = [
        source.sge(0, 8),
        part(here, u64::MAX, zeros),
        source.sge(8, 8),
    ];
    a.qp.write(1, &parts, target.iova, target.rkey).unwrap();
    assert_success(&a.sent());
    let mut expected = vec![0; LONG];
    expected[..8].fill(1);
    expected[LONG - 8..].fill(1);
    assert_eq!(target.read(0, LONG), expected);

    // A read of which the middle is not wanted.
    target.write(0, &[9; LONG]);
    let parts = [
        source.sge(0, 8),
        part(here, 3, LONG as u32 - 16),
        source.sge(8, 8),
    ];
    a.qp.read(2, &parts, target.iova, target.rkey).unwrap();
    assert_success(&a.sent());
    assert_eq!(source.read(0, 17), [&[9; 16][..], &[0]].concat());

    // Messages to nowhere arrive, and those from nowhere are zeros, whatever was discarded before.
    b.qp.post_recv(3, &[part(there, 5, LONG as u32)]).unwrap();
    a.qp.send(3, &[source.sge(0, 16)]).unwrap();
    assert_eq!(b.received().byte_len, 16);
    assert_success(&a.sent());
    b.qp.post_recv(4, &[target.sge(0, 100)]).unwrap();
    a.qp.send(4, &[part(here, 5, 100)]).unwrap();
    assert_eq!(b.received().byte_len, 100);
    assert_success(&a.sent());
    assert_eq!(target.read(0, 101), [&[0; 100][..], &[9]].concat());

    // An atomic operation is done, wherever its result goes.
    f.target.write(16, &100u64.to_le_bytes());
    let add = SendWqe {
        operand0: 5,
        ..f.wqe(wr_opcode::ATOMIC_FETCH_AND_ADD, 16)
    };
    a.qp.post_send(&add, &[part(here, 1, 8)]).unwrap();
    assert_success(&a.sent());
    assert_eq!(f.word(16), 105);
}

#[test]
fn the_null_lkey_is_nothing_else_than_an_lkey() {
    // D-MR-006, D-OBJ-004.
    let vms = Featured::new();
    let unknown = vendor_err::KEY_UNKNOWN;
    let null = vms.b.query_device().unwrap().null_lkey;
    let f = vms.pair();
    let a = &f.pair.a;
    a.qp.read(1, &[a.mr.sge(0, 8)], f.target.iova, null)
        .unwrap();
    f.refused(
        wc_status::REM_ACCESS_ERR,
        unknown,
        event_type::QP_ACCESS_ERR,
    );
    let f = vms.pair();
    let a = &f.pair.a;
    a.qp.write(1, &[a.mr.sge(0, 8)], 0, null).unwrap();
    f.refused(
        wc_status::REM_ACCESS_ERR,
        unknown,
        event_type::QP_ACCESS_ERR,
    );
    // Of the keys below 256 it is the only one.
    let f = vms.pair();
    let other = Sge {
        lkey: null ^ 1,
        ..nothing(&vms.a, 0, 8)
    };
    f.pair.a.qp.send(1, &[other]).unwrap();
    f.refused_here(wc_status::LOC_PROT_ERR, unknown);
    // No window can be bound to it, and it can neither be invalidated nor deregistered.
    let f = vms.pair();
    let window = f.pair.b.pd.window(mw_type::TYPE_2).unwrap();
    let bind = BindMw {
        mr_lkey: null,
        ..f.bind_request(window.rkey, window.rkey | 1)
    };
    f.pair.b.qp.post_bind(1, &bind).unwrap();
    assert_status(&f.pair.b.sent(), wc_status::MW_BIND_ERR);
    let f = vms.pair();
    let invalidate = SendWqe {
        opcode: wr_opcode::LOCAL_INV,
        imm: null,
        ..SendWqe::default()
    };
    f.pair.a.qp.post_send(&invalidate, &[]).unwrap();
    f.refused_here(wc_status::LOC_QP_OP_ERR, vendor_err::BIND);
    let gone = f.pair.a.pd.deregister(null).unwrap_err();
    assert_eq!(gone.status(), Some(status::ENOENT));
}

#[test]
fn completions_move_to_the_new_ring() {
    // D-RSZ-001, D-RSZ-002.
    let vms = Featured::new();
    let f = vms.pair();
    let a = &f.pair.a;
    let write = |wr_id| {
        let (addr, key) = (f.target.iova, f.target.rkey);
        a.qp.write(wr_id, &[a.mr.sge(0, 8)], addr, key).unwrap();
    };
    let posted = |n: u64| {
        (0..n).for_each(write);
        // The last one is there when all are.
        while a.qp.query().unwrap().sq_draining != 0 {}
        std::thread::sleep(NOTHING);
    };
    posted(10);
    let small = a.send_cq.resize(8, false).unwrap_err();
    assert_eq!(small.status(), Some(status::EINVAL));
    assert_eq!(a.send_cq.poll().unwrap().wr_id, 0);
    assert_eq!(a.send_cq.poll().unwrap().wr_id, 1);
    assert_eq!(a.send_cq.resize(8, false).unwrap(), 8);
    for wr_id in 2..10 {
        let cqe = a.sent();
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, wr_id);
    }
    // And on, for some laps, with events.
    for wr_id in 0..30 {
        a.send_cq.arm(ArmMode::Any);
        if wr_id % 7 == 0 {
            assert_eq!(a.send_cq.resize(16, false).unwrap(), 0);
        }
        write(wr_id);
        assert!(a.send_cq.wait_event(TIMEOUT).unwrap());
        assert_eq!(a.sent().wr_id, wr_id);
    }
}

#[test]
fn time_stamps_go_forward() {
    // D-CLK-001, D-TS-001, D-TS-002.
    let vms = Featured::new();
    let f = vms.pair();
    let a = &f.pair.a;
    let cq = Cq::extended(&vms.a, 4, 0).unwrap();
    let options = SideOptions::default();
    let qp = Qp::new(&a.context, &a.pd, &cq, &cq, &options.qp).unwrap();
    let peer = Side::new(&vms.b, &options);
    let mut connection = Connection::to(&peer.qp);
    connection.access = EVERYTHING;
    qp.connect(&connection).unwrap();
    peer.qp.connect(&Connection::to(&qp)).unwrap();
    let mut before = 0;
    for wr_id in 0..10 {
        qp.write(wr_id, &[a.mr.sge(0, 8)], peer.mr.iova, peer.mr.rkey)
            .unwrap();
        let deadline = std::time::Instant::now() + TIMEOUT;
        let (cqe, extension) = loop {
            if let Some(found) = cq.poll_extended() {
                break found;
            }
            assert!(std::time::Instant::now() < deadline);
        };
        assert_success(&cqe);
        assert_eq!(cqe.wr_id, wr_id);
        assert!(extension.timestamp > before);
        before = vms.a.execute::<QueryClock>(&[]).unwrap().clock;
        assert!(extension.timestamp <= before);
        if wr_id == 4 {
            assert_eq!(cq.resize(8, true).unwrap(), 0);
        }
    }
}
