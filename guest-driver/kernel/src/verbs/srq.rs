// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Shared receive queues and XRC domains.
use super::{check_ring, Cq, Pd, QueueMemory};
use crate::device::Device;
use crate::kverbs::{self, KernelSrq};
use crate::sys::alloc::Arc;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{SrqTarget, Udata};
use crate::sys::table::Registration;
use virtio_rdma_driver_core::abi;
use virtio_rdma_driver_core::buffer::{RingLayout, SrqLayout};
use virtio_rdma_spec::command::{
    opcode, srq_type, CreateSrq, CreateSrqResponse, Handle, HandleResponse, ModifySrq,
    QuerySrqResponse,
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
    ring: RingLayout,
    /// Goes first: events before memory.
    _registration: Registration<SrqTarget>,
    kernel: Option<Arc<KernelSrq>>,
    _memory: QueueMemory,
}

impl Srq {
    /// Its number, also on the device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Entries of the ring.
    pub(crate) fn entries(&self) -> u32 {
        self.ring.entries
    }

    /// The data path, if it is a queue of the kernel.
    pub(crate) fn kernel(&self) -> Option<&KernelSrq> {
        self.kernel.as_deref()
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
}

/// A buffer, the ring in it, and whose doorbell memory is used.
struct Place {
    memory: QueueMemory,
    ring: RingLayout,
    context: u32,
}

/// Creates a shared receive queue, over a buffer of the process or of the kernel.
pub(crate) fn create_srq(
    device: &Device,
    target: SrqTarget,
    init: &SrqInit<'_>,
    udata: Udata<'_>,
) -> Result<Srq> {
    let xrc = init.srq_type == srq_type::XRC;
    let supported = match init.srq_type {
        srq_type::BASIC => true,
        srq_type::XRC => device.features().has(feature::XRC) && udata.is_user(),
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
        user_place(device, udata)?
    } else {
        kernel_place(device, init)?
    };
    if place.ring.entries < init.max_wr || place.ring.entries > limits.max_srq_wr {
        return Err(Errno::EINVAL);
    }
    let tree = place.memory.tree(device.dma())?;
    let (xrcd, cq) = init
        .xrc
        .map_or((0, 0), |(xrcd, cq)| (xrcd.handle, cq.number()));
    let body = CreateSrq {
        pd: init.pd.handle,
        context: place.context,
        entries: place.ring.entries,
        stride: place.ring.stride,
        ring_offset: place.ring.offset,
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
        let kernel = match &place.memory {
            QueueMemory::Kernel(memory) => Some(Arc::new(KernelSrq::new(
                device,
                memory.clone(),
                &place.ring,
                init.max_sge,
                &made,
            )?)?),
            _ => None,
        };
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
            ring: place.ring,
            _registration: registration,
            kernel,
            _memory: place.memory,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_SRQ, made.srqn);
            Err(error)
        }
    }
}

/// The buffer that a process describes, pinned, and the ring in it.
fn user_place(device: &Device, udata: Udata<'_>) -> Result<Place> {
    let context = udata.context()?.handle;
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
    Ok(Place {
        memory: QueueMemory::user(device, request.buffer, request.length)?,
        ring,
        context,
    })
}

fn kernel_place(device: &Device, init: &SrqInit<'_>) -> Result<Place> {
    let context = device.kernel_context().ok_or(Errno::EOPNOTSUPP)?;
    let SrqLayout { ring, size } =
        SrqLayout::new(init.max_wr, init.max_sge).ok_or(Errno::EINVAL)?;
    Ok(Place {
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
