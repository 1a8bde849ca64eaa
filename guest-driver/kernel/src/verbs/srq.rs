// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Shared receive queues and XRC domains.
use super::{check_ring, Cq, Pd, QueueMemory};
use crate::device::Device;
use crate::kverbs::{self, KernelCq, KernelSrq};
use crate::sys::alloc::Arc;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{SrqHandle, Udata};
use crate::sys::sync::Locked;
use crate::sys::table::Registration;
use crate::targets::SrqTarget;
use core::sync::atomic::{AtomicU32, Ordering};
use virtio_rdma_driver_core::abi;
use virtio_rdma_driver_core::buffer::{RingLayout, SrqLayout};
use virtio_rdma_spec::command::{
    opcode, resize_srq_flag, srq_type, CreateSrq, CreateSrqResponse, Handle, HandleResponse,
    ModifySrq, QuerySrqResponse, ResizeSrq,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::SrqRecord;

/// An XRC domain.
pub(crate) struct Xrcd {
    handle: u32,
}

impl Xrcd {
    /// What the device calls it.
    pub(super) fn handle(&self) -> u32 {
        self.handle
    }
}

/// Creates an XRC domain.
pub(crate) fn alloc_xrcd(device: &Device, udata: Udata<'_>) -> Result<Xrcd> {
    udata.none()?;
    let HandleResponse { handle, .. } = device.command(opcode::CREATE_XRCD, &[0u8; 0])?;
    Ok(Xrcd { handle })
}

/// Destroys an XRC domain.
pub(crate) fn dealloc_xrcd(device: &Device, xrcd: &Xrcd) -> Result<()> {
    device.destroy(opcode::DESTROY_XRCD, xrcd.handle)
}

/// A shared receive queue.
pub(crate) struct Srq {
    number: u32,
    entries: AtomicU32,
    stride: u32,
    /// Goes first: events before memory.
    _registration: Registration<SrqTarget>,
    kernel: Option<Arc<KernelSrq>>,
    memory: Locked<QueueMemory>,
}

impl Srq {
    /// Its number, also on the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Entries of the ring.
    pub(crate) fn entries(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }

    /// The data path, if it is a queue of the kernel.
    pub(crate) fn kernel(&self) -> Option<&Arc<KernelSrq>> {
        self.kernel.as_ref()
    }
}

/// What a shared receive queue is to be.
pub(crate) struct SrqInit<'a> {
    /// As verbs number it.
    pub(crate) srq_type: u8,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) limit: u32,
    pub(crate) pd: &'a Pd,
    /// XRC: the domain, and where receives complete.
    pub(crate) xrc: Option<(&'a Xrcd, &'a Cq)>,
    /// The context of the process that asks, on the device.
    pub(crate) context: Option<u32>,
}

/// A buffer, the ring in it, and whose doorbell memory is used.
struct SrqMemory {
    memory: QueueMemory,
    ring: RingLayout,
    context: u32,
}

/// Creates a shared receive queue, over a buffer of the process or of the kernel.
pub(crate) fn create_srq(
    device: &Device,
    target: SrqHandle,
    init: &SrqInit<'_>,
    udata: Udata<'_>,
) -> Result<Srq> {
    let xrc = init.srq_type == srq_type::XRC;
    let supported = match init.srq_type {
        srq_type::BASIC => true,
        srq_type::XRC => device.features().has(feature::XRC),
        _ => false,
    };
    if !supported {
        return Err(Errno::EOPNOTSUPP);
    }
    if xrc != init.xrc.is_some() {
        return Err(Errno::EINVAL);
    }
    let limits = device.limits();
    if init.max_wr > limits.max_srq_wr || init.max_sge > limits.max_srq_sge {
        return Err(Errno::EINVAL);
    }
    let place = if udata.is_user() {
        user_place(device, init.context, udata)?
    } else {
        kernel_place(device, init)?
    };
    if place.ring.entries < init.max_wr || place.ring.entries > limits.max_srq_wr {
        return Err(Errno::EINVAL);
    }
    let SrqMemory {
        memory,
        ring,
        context,
    } = place;
    let tree = memory.tree(device.dma())?;
    let buffer = match &memory {
        QueueMemory::Kernel(memory) => Some(memory.clone()),
        _ => None,
    };
    let memory = Locked::new(memory)?;
    let (xrcd, cq) = init
        .xrc
        .map_or((0, 0), |(xrcd, cq)| (xrcd.handle, cq.number()));
    let body = CreateSrq {
        pd: init.pd.handle,
        context,
        entries: ring.entries,
        stride: ring.stride,
        ring_offset: ring.offset,
        max_sge: u16::try_from(init.max_sge).map_err(|_| Errno::EINVAL)?,
        srq_type: init.srq_type,
        xrcd,
        cq,
        limit: init.limit,
        buffer: tree.list(),
        ..Default::default()
    };
    let made: CreateSrqResponse = device.command(opcode::CREATE_SRQ, &body)?;
    let finish = || {
        let kernel = match buffer {
            Some(buffer) => Some(Arc::new(KernelSrq::new(
                device,
                buffer,
                &ring,
                init.max_sge,
                kernel_xrc(init)?,
                &made,
            )?)?),
            None => None,
        };
        let target = SrqTarget::new(target, kernel.clone());
        let registration = device.srqs().insert(made.srqn, target)?;
        let answer = abi::CreateSrqResponse {
            srqn: made.srqn,
            doorbell_queue: made.doorbell_queue,
            slot: made.slot,
            reserved: 0,
        };
        udata.write(&answer.to_bytes())?;
        Ok((registration, kernel))
    };
    match finish() {
        Ok((registration, kernel)) => Ok(Srq {
            number: made.srqn,
            entries: AtomicU32::new(place.ring.entries),
            stride: place.ring.stride,
            _registration: registration,
            kernel,
            memory,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_SRQ, made.srqn);
            Err(error)
        }
    }
}

/// The buffer that a process describes, pinned, and the ring in it.
fn user_place(device: &Device, context: Option<u32>, udata: Udata<'_>) -> Result<SrqMemory> {
    let context = context.ok_or(Errno::EOPNOTSUPP)?;
    let request = abi::CreateSrqRequest::from_bytes(&udata.read()?);
    let ring = RingLayout {
        entries: request.entries,
        stride: request.stride,
        offset: request.ring_offset,
    };
    check_ring(request.length, SrqRecord::SIZE, &ring)?;
    if request.reserved != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(SrqMemory {
        memory: QueueMemory::user(device, request.buffer, request.length)?,
        ring,
        context,
    })
}

/// The domain of an XRC queue of the kernel, and where its receives complete.
fn kernel_xrc(init: &SrqInit<'_>) -> Result<Option<(u32, Arc<KernelCq>)>> {
    let Some((xrcd, cq)) = init.xrc else {
        return Ok(None);
    };
    let cq = cq.kernel().cloned().ok_or(Errno::EINVAL)?;
    Ok(Some((xrcd.handle, cq)))
}

fn kernel_place(device: &Device, init: &SrqInit<'_>) -> Result<SrqMemory> {
    let context = device.kernel_context().ok_or(Errno::EOPNOTSUPP)?;
    let SrqLayout { ring, size } =
        SrqLayout::new(init.max_wr, init.max_sge).ok_or(Errno::EINVAL)?;
    Ok(SrqMemory {
        memory: QueueMemory::Kernel(kverbs::queue_memory(device, size)?),
        ring,
        context: context.handle(),
    })
}

/// Sets the limit of a shared receive queue.
pub(crate) fn modify_srq(device: &Device, srq: &Srq, limit: u32) -> Result<()> {
    let body = ModifySrq {
        srqn: srq.number,
        limit,
        reserved: 0,
    };
    device.simple_command(opcode::MODIFY_SRQ, &body)
}

/// Gives a shared receive queue of a process another buffer, and where `limit` is, another limit.
/// (For users in the kernel there is none: they post in any context, and would have to wait for the
/// device meanwhile.)
pub(crate) fn resize_srq(
    device: &Device,
    srq: &Srq,
    max_wr: u32,
    limit: Option<u32>,
    udata: Udata<'_>,
) -> Result<()> {
    if !udata.is_user() || srq.kernel.is_some() || !device.features().has(feature::SRQ_RESIZE) {
        return Err(Errno::EOPNOTSUPP);
    }
    let request = abi::ResizeSrqRequest::from_bytes(&udata.read()?);
    let ring = RingLayout {
        entries: request.entries,
        stride: srq.stride,
        offset: request.ring_offset,
    };
    check_ring(request.length, SrqRecord::SIZE, &ring)?;
    if ring.entries == 0 || ring.entries < max_wr || ring.entries > device.limits().max_srq_wr {
        return Err(Errno::EINVAL);
    }
    let memory = QueueMemory::user(device, request.buffer, request.length)?;
    let tree = memory.tree(device.dma())?;
    let body = ResizeSrq {
        srqn: srq.number,
        flags: limit.map_or(0, |_| resize_srq_flag::LIMIT),
        entries: ring.entries,
        ring_offset: ring.offset,
        limit: limit.unwrap_or(0),
        buffer: tree.list(),
        ..Default::default()
    };
    srq.memory.with(|old| {
        device.simple_command(opcode::RESIZE_SRQ, &body)?;
        srq.entries.store(ring.entries, Ordering::Relaxed);
        // The device has let go of the old one.
        *old = memory;
        Ok(())
    })
}

/// The attributes of a shared receive queue.
pub(crate) fn query_srq(device: &Device, srq: &Srq) -> Result<QuerySrqResponse> {
    let body = Handle {
        handle: srq.number,
        reserved: 0,
    };
    device.command(opcode::QUERY_SRQ, &body)
}

/// Destroys a shared receive queue.
pub(crate) fn destroy_srq(device: &Device, srq: &Srq) -> Result<()> {
    device.destroy(opcode::DESTROY_SRQ, srq.number)
}
