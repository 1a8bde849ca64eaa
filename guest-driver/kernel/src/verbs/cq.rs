// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Completion queues.
use super::{check_buffer, check_ring, QueueMemory};
use crate::device::Device;
use crate::kverbs::{self, KernelCq};
use crate::sys::alloc::Arc;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{CqBuffer, Udata, Umem, CQ_TIMESTAMPS};
use crate::sys::sync::Locked;
use crate::sys::table::Registration;
use crate::targets::CqTarget;
use core::sync::atomic::{AtomicU32, Ordering};
use virtio_rdma_driver_core::abi;
use virtio_rdma_driver_core::buffer::{CqLayout, RingLayout};
use virtio_rdma_spec::command::{opcode, CreateCq, HandleResponse, ModifyCq, ResizeCq};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::{CqRecord, Cqe, CqeExtension};
use virtio_rdma_spec::verbs::access;

/// A completion queue.
pub(crate) struct Cq {
    number: u32,
    entries: AtomicU32,
    stride: u32,
    comp_vector: u32,
    /// Goes first: events before memory.
    registration: Registration<CqTarget>,
    kernel: Option<Arc<KernelCq>>,
    memory: Locked<QueueMemory>,
}

impl Cq {
    /// Its number on the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Entries of the ring.
    pub(crate) fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Its completion vector.
    pub(crate) fn comp_vector(&self) -> u32 {
        self.comp_vector
    }

    /// The data path, if it is a queue of the kernel.
    pub(crate) fn kernel(&self) -> Option<&Arc<KernelCq>> {
        self.kernel.as_ref()
    }
}

/// What a completion queue is to be.
pub(crate) struct CqInit {
    /// Entries asked for.
    pub(crate) entries: u32,
    /// Completion vector.
    pub(crate) comp_vector: u32,
    /// Flags of verbs.
    pub(crate) flags: u32,
    /// Where its buffer is, if the core knows.
    pub(crate) buffer: CqBuffer,
}

/// Creates a completion queue, over a buffer of the process or of the kernel.
pub(crate) fn create_cq(
    device: &Device,
    target: CqTarget,
    init: &CqInit,
    udata: Udata<'_>,
) -> Result<Cq> {
    let timestamps = init.flags & CQ_TIMESTAMPS != 0;
    let has_timestamps = device.features().has(feature::CQ_TIMESTAMP) && udata.is_user();
    if init.flags & !CQ_TIMESTAMPS != 0 || (timestamps && !has_timestamps) {
        return Err(Errno::EOPNOTSUPP);
    }
    let (memory, ring, kernel) = if udata.is_user() {
        let (memory, ring) = user_ring(device, init, udata)?;
        (memory, ring, None)
    } else if !device.features().kernel_verbs() {
        return Err(Errno::EOPNOTSUPP);
    } else {
        // Only with their extensions do completions tell the VLAN of a datagram.
        let layout = if device.features().has(feature::CQ_TIMESTAMP) {
            CqLayout::extended(init.entries)
        } else {
            CqLayout::new(init.entries)
        };
        let layout = layout.ok_or(Errno::EINVAL)?;
        let memory = kverbs::queue_memory(device, layout.size)?;
        let kernel = Arc::new(KernelCq::new(memory.clone(), &layout)?)?;
        (QueueMemory::Kernel(memory), layout.ring, Some(kernel))
    };
    if ring.entries == 0
        || ring.entries < init.entries
        || ring.entries > device.limits().max_cqe
        || init.comp_vector >= u32::from(device.completion_vectors())
    {
        return Err(Errno::EINVAL);
    }
    let tree = memory.tree(device.dma())?;
    let memory = Locked::new(memory)?;
    let body = CreateCq {
        entries: ring.entries,
        comp_vector: init.comp_vector as u16,
        stride: ring.stride as u16,
        ring_offset: ring.offset,
        flags: 0,
        buffer: tree.list(),
        reserved: 0,
    };
    let HandleResponse { handle, .. } = device.command(opcode::CREATE_CQ, &body)?;
    let finish = || {
        let target = target.served_by(kernel.clone());
        let registration = device.cqs().insert(handle, target)?;
        let answer = abi::CreateCqResponse {
            cqn: handle,
            reserved: 0,
        };
        udata.write(&answer.to_bytes())?;
        Ok(registration)
    };
    match finish() {
        Ok(registration) => Ok(Cq {
            number: handle,
            entries: AtomicU32::new(ring.entries),
            stride: ring.stride,
            comp_vector: init.comp_vector,
            registration,
            kernel,
            memory,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_CQ, handle);
            Err(error)
        }
    }
}

/// The buffer that a process describes, pinned, and where in it the ring is.
fn user_ring(
    device: &Device,
    init: &CqInit,
    udata: Udata<'_>,
) -> Result<(QueueMemory, RingLayout)> {
    let request = abi::CreateCqRequest::from_bytes(&udata.read()?);
    let ring = RingLayout {
        entries: request.entries,
        stride: request.stride,
        offset: request.ring_offset,
    };
    check_buffer(request.buffer, request.length)?;
    check_ring(request.length, CqRecord::SIZE, &ring)?;
    let stride = if init.flags & CQ_TIMESTAMPS != 0 {
        Cqe::SIZE.saturating_add(CqeExtension::SIZE)
    } else {
        Cqe::SIZE
    };
    if request.flags != 0 || ring.stride as usize != stride {
        return Err(Errno::EINVAL);
    }
    let umem = Umem::new_cq(
        device.ib(),
        init.buffer,
        request.buffer,
        request.length,
        access::LOCAL_WRITE,
    )?;
    Ok((QueueMemory::User(umem), ring))
}

/// Gives a completion queue of a process another buffer.
pub(crate) fn resize_cq(device: &Device, cq: &Cq, entries: u32, udata: Udata<'_>) -> Result<()> {
    if !udata.is_user() || cq.kernel.is_some() {
        return Err(Errno::EOPNOTSUPP);
    }
    let request = abi::ResizeCqRequest::from_bytes(&udata.read()?);
    let ring = RingLayout {
        entries: request.entries,
        stride: cq.stride,
        offset: request.ring_offset,
    };
    check_ring(request.length, CqRecord::SIZE, &ring)?;
    if ring.entries == 0 || ring.entries < entries || ring.entries > device.limits().max_cqe {
        return Err(Errno::EINVAL);
    }
    let memory = QueueMemory::user(device, request.buffer, request.length)?;
    let tree = memory.tree(device.dma())?;
    let body = ResizeCq {
        cqn: cq.number,
        entries: ring.entries,
        ring_offset: ring.offset,
        buffer: tree.list(),
        ..Default::default()
    };
    let moved = cq.memory.with(|old| -> Result<u32> {
        let HandleResponse { handle, .. } = device.command(opcode::RESIZE_CQ, &body)?;
        cq.entries.store(ring.entries, Ordering::Relaxed);
        // The device has let go of the old one.
        *old = memory;
        Ok(handle)
    })?;
    udata.write(&abi::ResizeCqResponse { moved, reserved: 0 }.to_bytes())
}

/// Has the device hold back events of a completion queue: for `count` completions or `period`
/// microseconds.
pub(crate) fn modify_cq(device: &Device, cq: &Cq, count: u16, period: u16) -> Result<()> {
    let body = ModifyCq {
        cqn: cq.number,
        count,
        period,
        reserved: 0,
    };
    device.simple_command(opcode::MODIFY_CQ, &body)
}

/// Destroys a completion queue.
pub(crate) fn destroy_cq(device: &Device, cq: &Cq) -> Result<()> {
    device.destroy(opcode::DESTROY_CQ, cq.number)?;
    // The core, which frees the queue after this, has taken back its own work that polls it; but an
    // event that came after that, or the loss of the device, has the core begin it again.
    cq.registration.end();
    cq.registration.target().cancel_polling();
    Ok(())
}
