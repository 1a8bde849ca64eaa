// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the messages of vhost-user mean to this device (specification: "Appendix: vhost-user").
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::VhostBackend;
use vhost_device_rdma_bare::spec::config::{first_doorbell_queue, CONTROL_QUEUE};

use crate::common::{assert_success, assert_works, process, vm, Two, NOTHING};

/// VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX, VIRTIO_F_VERSION_1.
const OFFERED: u64 = 1 << 28 | 1 << 29 | 1 << 32;
/// VIRTIO_F_RING_PACKED, VIRTIO_F_IN_ORDER, VIRTIO_F_ORDER_PLATFORM, VIRTIO_F_RING_RESET.
const NOT_OFFERED: u64 = 1 << 34 | 1 << 35 | 1 << 36 | 1 << 40;

// D-FEAT-007.
#[test]
fn the_features_of_virtio_and_of_the_protocol_are_those_of_the_appendix() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let features = vm.frontend().get_features().unwrap();
    assert_eq!(features & OFFERED, OFFERED);
    assert_eq!(features & NOT_OFFERED, 0);
    let protocol = vm.frontend().get_protocol_features().unwrap();
    assert!(protocol.contains(
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    ));
}

/// Whether a write that is posted now completes soon; it completes in the end in any case, once the
/// VM runs.
fn completes_while(two: &Two, stopped: impl FnOnce(), resumed: impl FnOnce()) -> bool {
    let pair = two.pair();
    let (a, b) = (&pair.a, &pair.b);
    stopped();
    a.qp.write(1, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)
        .unwrap();
    let early = a.send_cq.wait(NOTHING);
    resumed();
    let is_early = early.is_ok();
    let cqe = early.unwrap_or_else(|_| a.sent());
    assert_success(&cqe);
    assert_works(&pair);
    is_early
}

#[test]
fn the_control_queue_alone_stops_a_vm_and_lets_it_go_on() {
    let two = Two::new();
    let enable = |queue: u16, on| {
        let mut frontend = two.a.frontend();
        let queue = usize::from(queue);
        frontend.set_vring_enable(queue, on).unwrap();
    };
    // Twice: what was stopped can be stopped again.
    for _ in 0..2 {
        assert!(!completes_while(
            &two,
            || enable(CONTROL_QUEUE, false),
            || enable(CONTROL_QUEUE, true),
        ));
    }
    // A doorbell queue is only a way to wake a worker, and an event queue one to tell of events.
    let first = first_doorbell_queue(two.a.config().num_completion_queues);
    for queue in [1, 2, first] {
        assert!(completes_while(
            &two,
            || enable(queue, false),
            || enable(queue, true)
        ));
    }
}

#[test]
fn virtqueues_have_the_sizes_that_virtio_allows_up_to_1024() {
    let process = process(1);
    for size in [1u16, 2, 64, 1024] {
        let vm = vm(process.socket(0));
        vm.stop().unwrap();
        vm.frontend().set_vring_num(1, size).unwrap();
        vm.frontend().set_vring_num(1, 64).unwrap();
        vm.start().unwrap();
        assert!(vm.query_device().is_ok());
    }
    for size in [0u16, 3, 1000, 2048, 0x8000] {
        let vm = vm(process.socket(0));
        vm.stop().unwrap();
        let refused = vm.frontend().set_vring_num(1, size);
        assert!(refused.is_err(), "{size} is taken");
    }
}
