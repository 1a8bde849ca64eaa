// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! What the kernel offers. Raw pointers, bindings and calls into C are in here and in
//! [`callbacks`](crate::callbacks), what the kernel calls, and nowhere else. Nothing here knows
//! what stands on it.
//!
//! Rules that the rest rests on:
//!
//! - Kernel objects that must not move (locks, completions, work items) are allocations of their
//!   own.
//! - The driver's device ([`rdma::DeviceObject`]) is written into the memory of its `ib_device`
//!   before interrupts, work items or verbs can reach it, and dropped after all of them ended.
//! - The driver's data of a verbs object sits behind the core's structure, is written when its
//!   creation succeeded and dropped when its destruction did; the core does not call in between.
//!   Posting and polling go by these, too.
#![allow(unsafe_code)]

pub(crate) mod alloc;
pub(crate) mod dma;
pub(crate) mod error;
pub(crate) mod iw;
pub(crate) mod net;
pub(crate) mod rdma;
pub(crate) mod sync;
pub(crate) mod table;
pub(crate) mod virtio;

/// The kernel's types and functions, and those of `glue.c`, as bindgen reads them.
pub(crate) mod bindings {
    #![allow(warnings, clippy::all, missing_docs, unsafe_op_in_unsafe_fn)]
    include!(env!("VIRTIO_RDMA_BINDINGS"));
}

// The numbers that the C side needs as constants are those of the specification.
const _: () = {
    use virtio_rdma_driver_core::abi;
    use virtio_rdma_spec::config::{self, feature};
    use virtio_rdma_spec::{DEVICE_ID, PAGE_SIZE};
    assert!(bindings::VRDMA_DEVICE_ID == DEVICE_ID);
    assert!(bindings::VRDMA_FEATURE_RC == feature::RC);
    assert!(bindings::VRDMA_FEATURE_UD == feature::UD);
    assert!(bindings::VRDMA_FEATURE_UC == feature::UC);
    assert!(bindings::VRDMA_FEATURE_SRQ == feature::SRQ);
    assert!(bindings::VRDMA_FEATURE_XRC == feature::XRC);
    assert!(bindings::VRDMA_FEATURE_ATOMIC == feature::ATOMIC);
    assert!(bindings::VRDMA_FEATURE_MW == feature::MW);
    assert!(bindings::VRDMA_FEATURE_REREG_MR == feature::REREG_MR);
    assert!(bindings::VRDMA_FEATURE_RESIZE_CQ == feature::RESIZE_CQ);
    assert!(bindings::VRDMA_FEATURE_CQ_TIMESTAMP == feature::CQ_TIMESTAMP);
    assert!(bindings::VRDMA_FEATURE_FLUSH == feature::FLUSH);
    assert!(bindings::VRDMA_FEATURE_PHYSICAL_MR == feature::PHYSICAL_MR);
    assert!(bindings::VRDMA_FEATURE_SRQ_RESIZE == feature::SRQ_RESIZE);
    assert!(bindings::VRDMA_FEATURE_CQ_MODERATION == feature::CQ_MODERATION);
    assert!(bindings::VRDMA_FEATURE_FAST_REG == feature::FAST_REG);
    assert!(bindings::VRDMA_FEATURE_PORT_STATE == feature::PORT_STATE);
    assert!(bindings::VRDMA_FEATURE_HEADER_TYPE == feature::HEADER_TYPE);
    assert!(bindings::VRDMA_FEATURE_COUNTERS == feature::COUNTERS);
    assert!(bindings::VRDMA_FEATURE_SRD == feature::SRD);
    assert!(bindings::VRDMA_FEATURE_IWARP == feature::IWARP);
    assert!(bindings::VRDMA_FEATURES as usize == feature::ALL.len());
    assert!(bindings::VRDMA_EVENT_QUEUE == config::EVENT_QUEUE as u32);
    assert!(bindings::VRDMA_FIRST_COMPLETION_QUEUE == config::FIRST_COMPLETION_QUEUE as u32);
    assert!(bindings::VRDMA_MAX_QUEUES == config::MAX_QUEUES as u32);
    assert!(bindings::VRDMA_PAGE_SIZE as u64 == PAGE_SIZE);
    assert!(bindings::VRDMA_DRIVER_ATTR == abi::DRIVER_ATTR as u32);
    assert!(bindings::VRDMA_METHOD_DM_QUERY == abi::DM_QUERY_METHOD as u32);
    assert!(bindings::VRDMA_DM_QUERY_RESPONSE == abi::DM_QUERY_RESPONSE_ATTR as u32);
    assert!(size_of::<bindings::vrdma_dm_info>() == abi::DmResponse::SIZE);
};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it stops the kernel thread at once (BUG) and never returns.
    unsafe { bindings::vrdma_panic() }
}
