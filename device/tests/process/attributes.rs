// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device tells about itself, its objects and its completions.
use vhost_device_rdma_bare::core::command::SetGid;
use vhost_device_rdma_bare::spec::command::{
    self, gid_type, opcode, status, CommandHeader, ResponseHeader,
};
use vhost_device_rdma_bare::spec::config::MAX_QUEUES;
use vhost_device_rdma_bare::spec::event::event_type;
use vhost_device_rdma_bare::spec::ring::{
    Cqe, SendWqe, MAX_CQ_ENTRIES, MAX_INLINE, MAX_SGE, MAX_WQ_ENTRIES,
};
use vhost_device_rdma_bare::spec::verbs::{qp_state, wc_status, wr_opcode, MASK_24};
use vhost_device_rdma_bare::{Connection, DeviceProcess, ProcessOptions, Qp, QpOptions, PAGE};

use crate::common::{
    assert_event, assert_reaches, assert_refused, assert_status, assert_success, counts, overflown,
    process, vm, Side, SideOptions, Two, ALL, NOTHING, TIMEOUT,
};

// D-CFG-001, D-CFG-003, D-VQ-001.
#[test]
fn the_configuration_is_as_it_must_be() {
    let two = Two::new();
    let (config, other) = (*two.a.config(), *two.b.config());
    let (c, d) = (config.num_completion_queues, config.num_doorbell_queues);
    assert!(c >= 1 && d >= 1 && 2 + c + d <= MAX_QUEUES, "{config:?}");
    assert_ne!(config.node_guid, 0);
    assert_ne!(config.node_guid, other.node_guid);
    assert_eq!(two.a.query_device().unwrap().node_guid, config.node_guid);
    let path = two.a.path().to_owned();
    let _pair = two.pair();
    two.a.kill();
    assert_eq!(*vm(&path).config(), config);
}

// D-QDEV-001, D-QDEV-002, D-QDEV-003.
#[test]
fn limits_are_within_those_of_the_specification() {
    let two = Two::new();
    let device = two.a.query_device().unwrap();
    assert!(device.max_qp_wr.is_power_of_two() && device.max_qp_wr <= MAX_WQ_ENTRIES);
    assert!(device.max_cqe.is_power_of_two() && device.max_cqe <= MAX_CQ_ENTRIES);
    assert!(device.max_sge <= MAX_SGE && device.max_inline <= MAX_INLINE);
    assert!(device.max_srq_wr == 0 || device.max_srq_wr.is_power_of_two());
    assert!(device.max_srq_wr <= MAX_WQ_ENTRIES && device.max_srq_sge <= MAX_SGE);
    assert_ne!(device.page_size_cap & 1 << 12, 0);
    assert_eq!(device.pkey_table_len, 1);
    let _pair = two.pair();
    assert_eq!(two.a.query_device().unwrap(), device);
}

// D-QPORT-002, D-QPORT-003.
#[test]
fn counters_of_the_port_count_up() {
    let two = Two::new();
    let before = two.a.query_port().unwrap();
    assert_eq!((before.state, before.phys_state), (4, 5));
    assert!(before.max_msg_sz <= 1 << 31);
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    for i in 0..10 {
        a.qp.write(i, &[a.mr.sge(0, 100)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&a.sent());
    }
    let after = two.a.query_port().unwrap();
    assert_eq!(after.tx_messages, before.tx_messages + 10);
    assert_eq!(after.tx_bytes, before.tx_bytes + 1000);
    // A message counts where it was asked for: a READ is sent by its requester.
    let peer = two.b.query_port().unwrap();
    a.qp.read(10, &[a.mr.sge(0, 300)], b.mr.iova, b.mr.rkey)
        .unwrap();
    assert_success(&a.sent());
    let (read, asked) = (two.a.query_port().unwrap(), two.b.query_port().unwrap());
    assert_eq!(read.tx_messages, after.tx_messages + 1);
    assert_eq!(read.tx_bytes, after.tx_bytes + 300);
    assert_eq!(
        (read.rx_messages, read.rx_bytes),
        (after.rx_messages, after.rx_bytes)
    );
    assert_eq!(asked.rx_messages, peer.rx_messages + 1);
    assert_eq!(asked.rx_bytes, peer.rx_bytes + 300);
    assert_eq!(
        (asked.tx_messages, asked.tx_bytes),
        (peer.tx_messages, peer.tx_bytes)
    );
    drop(pair);
    let later = two.a.query_port().unwrap();
    assert!(later.tx_messages >= after.tx_messages && later.tx_bytes >= after.tx_bytes);
}

// D-OBJ-002, D-OBJ-003.
#[test]
fn numbers_and_keys_are_in_their_ranges() {
    let two = Two::new();
    for _ in 0..50 {
        let side = Side::new(&two.a, &SideOptions::default());
        assert!((2..=MASK_24).contains(&side.qp.number()));
        assert_ne!(side.mr.lkey >> 8, 0);
    }
}

// D-CMD-005.
#[test]
fn bytes_beyond_the_length_are_ignored() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let header = CommandHeader {
        opcode: opcode::CREATE_PD,
        reserved: 0,
        length: 8,
    };
    let bytes = [&header.to_bytes()[..], &[0xff; 40]].concat();
    let response = vm.raw_command(&bytes, PAGE).unwrap();
    let header = ResponseHeader::from_bytes(&response[..8].try_into().unwrap());
    assert_eq!(header.status, status::OK);
    assert_eq!(counts(&process, vm.path()), [0, 1, 0, 0, 0]);
}

// D-GID-001.
#[test]
fn a_gid_is_known_as_long_as_it_is_set() {
    let two = Two::new();
    let gid = two.b.gid();
    let pair = two.pair_with(&SideOptions::default(), |c| {
        c.timeout = 8;
        c.retry_cnt = 0;
    });
    two.b.set_gid(0, [0; 16]).unwrap();
    let write = |side: &Side| {
        let to = &pair.b.mr;
        side.qp
            .write(1, &[side.mr.sge(0, 8)], to.iova, to.rkey)
            .unwrap();
        side.sent()
    };
    assert_status(&write(&pair.a), wc_status::RETRY_EXC_ERR);
    two.b.set_gid(0, gid).unwrap();
    let a = &pair.a;
    a.qp.set_state(qp_state::RESET).unwrap();
    a.qp.connect(&Connection::to(&pair.b.qp)).unwrap();
    assert_success(&write(a));
}

#[test]
fn a_vlan_is_an_id_or_none() {
    let two = Two::new();
    let set = |vlan| {
        let body = command::SetGid {
            gid: two.a.gid(),
            index: 0,
            gid_type: gid_type::ROCE_V2,
            port_num: 1,
            vlan,
            mac: [2, 0, 0, 0, 0, 1],
            reserved: [0; 12],
        };
        two.a.execute::<SetGid>(&body)
    };
    for vlan in [0, 4094, 0xffff] {
        set(vlan).unwrap();
    }
    for vlan in [4095, 0x1001, 0xfffe] {
        assert_refused(set(vlan), status::EINVAL);
    }
}

// D-GID-002, D-SEC-006.
#[test]
fn the_operator_says_which_gids_a_vm_may_have() {
    let mut options = ProcessOptions::vms(2).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
    let policy = ",gids=mac,address=10.0.0.1,address=fd00::1,vlan=5";
    options.vms[0].push_str(policy);
    let process = DeviceProcess::start(&options).unwrap();
    let mapped = |last| {
        [&[0; 10][..], &[0xff, 0xff, 10, 0, 0, last]]
            .concat()
            .try_into()
    };
    let [listed, foreign] = [1, 2].map(|last| mapped(last).unwrap());
    // No VM is attached to the other socket, yet what is its device's is its device's.
    let other = vm(process.socket(1));
    let mut reserved = other.gid();
    reserved[15] = 1;
    assert_refused(other.set_gid(1, reserved), status::EPERM);
    assert_refused(other.set_gid(1, listed), status::EPERM);
    other.set_gid(1, foreign).unwrap();
    // And this one has just those, under the MAC address of its device.
    let strict = vm(process.socket(0));
    assert_eq!(strict.gid(), reserved);
    strict.set_gid(1, listed).unwrap();
    assert_refused(strict.set_gid(2, foreign), status::EPERM);
    let set = |mac, vlan| {
        let body = command::SetGid {
            gid: listed,
            index: 1,
            gid_type: gid_type::ROCE_V2,
            port_num: 1,
            vlan,
            mac,
            reserved: [0; 12],
        };
        strict.execute::<SetGid>(&body)
    };
    set(strict.config().mac, 5).unwrap();
    assert_refused(set(strict.config().mac, 6), status::EPERM);
    assert_refused(set(other.config().mac, 5), status::EPERM);
    strict.set_gid(1, [0; 16]).unwrap();
    let log = process.log();
    for line in [
        "GID ::ffff:10.0.0.1: reserved for another device",
        "GID ::ffff:10.0.0.2: neither that of the device's MAC address nor a listed address",
        "GID ::ffff:10.0.0.1: VLAN 6 is not listed",
        "GID ::ffff:10.0.0.1: the source MAC address 52:54:00:00:00:02 is not the device's",
    ] {
        assert_eq!(log.matches(line).count(), 1, "{line}:\n{log}");
    }
}

// D-RC-008.
#[test]
fn the_first_message_establishes_communication() {
    let two = Two::new();
    let a = Side::new(&two.a, &SideOptions::default());
    let b = Side::new(&two.b, &SideOptions::default());
    let connection = Connection::to(&a.qp);
    b.qp.modify(connection.init()).unwrap();
    b.qp.modify(connection.rtr()).unwrap();
    a.qp.connect(&Connection::to(&b.qp)).unwrap();
    assert_eq!(two.b.wait_async_event(NOTHING).unwrap(), None);
    for i in 0..3 {
        a.qp.write(i, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
            .unwrap();
        assert_success(&a.sent());
    }
    let event = two.b.wait_async_event(TIMEOUT).unwrap().expect("COMM_EST");
    assert_eq!(
        (event.event_type, event.number),
        (event_type::COMM_EST, b.qp.number())
    );
    assert_eq!(two.b.wait_async_event(NOTHING).unwrap(), None);
}

// D-CPL-004, D-ERR-002, D-EVT-003.
#[test]
fn an_error_comes_after_what_went_before_and_says_only_what_it_knows() {
    let two = Two::new();
    for _ in 0..20 {
        let pair = two.pair();
        let (a, b) = (&pair.a, &pair.b);
        for i in 0..5 {
            a.qp.write(i, &[a.mr.sge(0, 100_000)], b.mr.iova, b.mr.rkey)
                .unwrap();
        }
        let wqe = SendWqe {
            opcode: wr_opcode::SEND_WITH_IMM,
            imm: 77,
            wr_id: 5,
            ..SendWqe::default()
        };
        b.qp.post_recv(9, &[b.mr.sge(0, 1)]).unwrap();
        a.qp.post_send(&wqe, &[a.mr.sge(0, 8)]).unwrap();
        for i in 0..5 {
            let cqe = a.sent();
            assert_success(&cqe);
            assert_eq!(cqe.wr_id, i);
        }
        let ends = [
            (a.sent(), wc_status::REM_INV_REQ_ERR),
            (b.received(), wc_status::LOC_LEN_ERR),
        ];
        for (cqe, status) in ends {
            assert_status(&cqe, status);
            let known = Cqe {
                wr_id: cqe.wr_id,
                qp_num: cqe.qp_num,
                wqe_index: cqe.wqe_index,
                vendor_err: cqe.vendor_err,
                status,
                opcode: cqe.opcode & 0x80,
                phase: cqe.phase & 1,
                ..Cqe::default()
            };
            assert_eq!(cqe, known);
        }
        // The state is there no later than the event.
        let bad = two.pair();
        bad.a.qp.write(1, &[bad.a.mr.sge(0, 8)], 0, 0).unwrap();
        let event = two.b.wait_async_event(TIMEOUT).unwrap().expect("an event");
        assert_eq!(event.event_type, event_type::QP_ACCESS_ERR);
        assert_eq!(event.number, bad.b.qp.number());
        assert_eq!(bad.b.qp.state().unwrap(), qp_state::ERR);
        let cqe = bad.a.sent();
        assert_status(&cqe, wc_status::REM_ACCESS_ERR);
        assert_eq!(cqe.opcode, 0, "of a write that failed");
    }
}

// D-MR-003.
#[test]
fn a_region_goes_while_it_is_written() {
    let two = Two::new();
    for round in 0..10 {
        let pair = two.pair();
        let (a, b) = (&pair.a, &pair.b);
        let mr = b.pd.register(1 << 20, ALL).unwrap();
        for i in 0..16 {
            a.qp.write(i, &[a.mr.sge(0, 1 << 20)], mr.iova, mr.rkey)
                .unwrap();
        }
        std::thread::sleep(std::time::Duration::from_micros(100 * round));
        let buffer = mr.destroy().unwrap().expect("the memory of the region");
        // From now on nothing arrives there.
        buffer.view().zero();
        let mut failed = false;
        for _ in 0..16 {
            match a.sent().status {
                wc_status::SUCCESS => assert!(!failed),
                wc_status::REM_ACCESS_ERR => failed = true,
                other => assert_eq!((other, failed), (wc_status::WR_FLUSH_ERR, true)),
            }
        }
        assert!(buffer.view().get(0, 1 << 20).iter().all(|byte| *byte == 0));
    }
}

// D-OVF-003.
#[test]
fn a_completion_queue_in_error_takes_new_queue_pairs_to_error() {
    let two = Two::new();
    let pair = overflown(&two);
    let (a, b) = (&pair.a, &pair.b);
    assert_event(&two.a, event_type::CQ_ERR, a.send_cq.number());
    let options = QpOptions::default();
    let qp = Qp::new(&a.context, &a.pd, &a.send_cq, &a.recv_cq, &options).unwrap();
    assert_eq!(qp.state().unwrap(), qp_state::RESET);
    // It may be refused, or be in error afterwards.
    let _ = qp.modify(Connection::to(&b.qp).init());
    assert_reaches(&qp, qp_state::ERR);
}
