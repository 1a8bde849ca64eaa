// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Queue pairs.
use super::{check_ring, Cq, Pd, QueueMemory, Srq, Xrcd};
use crate::connections::QpReferences;
use crate::device::Device;
use crate::kverbs::{self, KernelQp, KernelQpInit};
use crate::sys::alloc::Arc;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::Udata;
use crate::sys::table::Registration;
use crate::targets::QpTarget;
use core::sync::atomic::Ordering;
use virtio_rdma_driver_core::abi;
use virtio_rdma_driver_core::buffer::{self, RingLayout};
use virtio_rdma_spec::command::{
    create_qp_flag, opcode, CreateQp, CreateQpResponse, Handle, ModifyQp, QpAttr, QueryQpResponse,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::QpRecord;
use virtio_rdma_spec::verbs::{qp_attr, qp_state, qp_type};

/// The number by which the GSI queue pair is known, whatever the device calls it.
const GSI_NUMBER: u32 = 1;

/// A queue pair.
pub(crate) struct Qp {
    /// On the device.
    handle: u32,
    caps: QpCaps,
    /// Doorbell queue and slot.
    doorbell: (u32, u32),
    /// Goes first: events before memory.
    registration: Registration<QpTarget>,
    kernel: Option<Arc<KernelQp>>,
    _memory: QueueMemory,
}

impl Qp {
    /// What the device calls it.
    pub(super) fn handle(&self) -> u32 {
        self.handle
    }

    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        if self.caps.qp_type == qp_type::GSI {
            GSI_NUMBER
        } else {
            self.handle
        }
    }

    /// What it was created with.
    pub(crate) fn caps(&self) -> &QpCaps {
        &self.caps
    }

    /// The doorbell queue of its worker, and its slot there.
    pub(crate) fn doorbell(&self) -> (u32, u32) {
        self.doorbell
    }

    /// The data path, if it is a queue pair of the kernel.
    pub(crate) fn kernel(&self) -> Option<&KernelQp> {
        self.kernel.as_deref()
    }

    /// Who refers to it, if it is one of iWARP.
    pub(crate) fn references(&self) -> Option<&QpReferences> {
        self.registration.target().references()
    }

    /// Does this change succeed on a device that was lost?
    fn may_become(&self, mask: u32, state: u8) -> bool {
        const RESUME: u32 = qp_attr::STATE | qp_attr::CUR_STATE;
        match state {
            // Everything is flushed there, which is what these states mean. Users drain their
            // queues by going there.
            qp_state::ERR | qp_state::RESET => mask == qp_attr::STATE,
            // Its connection is over, which is what this asks for.
            qp_state::SQD => mask == qp_attr::STATE && self.references().is_some(),
            // What the core does when a management datagram failed.
            qp_state::RTS => mask == RESUME && self.caps.qp_type == qp_type::GSI,
            _ => false,
        }
    }

    /// Does it belong to a user in the kernel? The one for management is the core's own, as long as
    /// there is the device.
    fn of_kernel_user(&self) -> bool {
        self.kernel.is_some() && self.caps.qp_type != qp_type::GSI
    }
}

/// What a queue pair was created with.
pub(crate) struct QpCaps {
    pub(crate) qp_type: u8,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) signal_all: bool,
}

/// What a queue pair is to be.
#[derive(Clone, Copy)]
pub(crate) struct QpInit<'a> {
    pub(crate) qp_type: u8,
    /// Flags of verbs, those of `create_qp_flag` that verbs have.
    pub(crate) create_flags: u32,
    pub(crate) signal_all: bool,
    /// Where receives come from, if not from a queue of its own.
    pub(crate) srq: Option<&'a Srq>,
    /// XRC target: its domain.
    pub(crate) xrcd: Option<&'a Xrcd>,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline: u32,
    /// Without meaning for an XRC target: users in the kernel give one all the same.
    pub(crate) pd: Option<&'a Pd>,
    /// None for an XRC target.
    pub(crate) send_cq: Option<&'a Cq>,
    /// None for an XRC target, and for an initiator.
    pub(crate) recv_cq: Option<&'a Cq>,
    /// The context of the process that asks, on the device.
    pub(crate) context: Option<u32>,
}

impl QpInit<'_> {
    /// Can there be such a queue pair?
    fn check(&self, device: &Device, is_user: bool) -> Result<()> {
        let features = device.features();
        let of = QpType::of(self.qp_type).ok_or(Errno::EOPNOTSUPP)?;
        let gsi = self.qp_type == qp_type::GSI;
        // (The core keeps an XRC target itself for those that share it: whichever process asked for
        // it, it is the kernel's.)
        let fits_user = if is_user {
            !gsi
        } else {
            self.qp_type != qp_type::SRD
        };
        let supported = features.has(of.feature) && fits_user;
        let shares = of.receives && !gsi;
        let flags = match self.qp_type {
            qp_type::UD => u32::from(create_qp_flag::BLOCK_MULTICAST_LOOPBACK),
            _ => 0,
        };
        if !supported || self.create_flags & !flags != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let target = !of.sends;
        let initiator = of.sends && !of.receives;
        let limits = device.limits();
        if (self.srq.is_some() && !shares)
            || self.xrcd.is_some() != target
            || (self.pd.is_none() && !target)
            || self.send_cq.is_some() == target
            || (self.recv_cq.is_none() && !initiator && !target)
            || self.max_send_sge > limits.max_sge
            || self.max_recv_sge > limits.max_sge
            || self.max_inline > limits.max_inline
        {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// Has it a receive queue of its own?
    fn receives(&self) -> bool {
        self.srq.is_none() && QpType::of(self.qp_type).is_some_and(|of| of.receives)
    }
}

/// A buffer and the rings in it.
struct Rings {
    memory: QueueMemory,
    sq: RingLayout,
    rq: RingLayout,
    /// Whose doorbell memory is used.
    context: u32,
}

impl Rings {
    fn none() -> Self {
        Self {
            memory: QueueMemory::None,
            sq: RingLayout::default(),
            rq: RingLayout::default(),
            context: 0,
        }
    }
}

/// Creates a queue pair, over a buffer of the process or of the kernel.
pub(crate) fn create_qp(
    device: &Device,
    target: QpTarget,
    init: &QpInit<'_>,
    udata: Udata<'_>,
) -> Result<Qp> {
    let mut init = *init;
    let request = if init.qp_type != qp_type::XRC_TGT && udata.is_user() {
        let request = abi::CreateQpRequest::from_bytes(&udata.read()?);
        init.qp_type = request_type(init.qp_type, &request)?;
        Some(request)
    } else {
        None
    };
    let iwarp = device.features().has(feature::IWARP);
    if iwarp && init.qp_type == qp_type::RC {
        init.qp_type = qp_type::IWARP;
    }
    init.check(device, udata.is_user())?;
    let rings = if init.qp_type == qp_type::XRC_TGT {
        udata.none()?;
        Rings::none()
    } else if let Some(request) = &request {
        user_rings(device, init.context, request)?
    } else {
        let (rings, max_inline) = kernel_rings(device, &init)?;
        init.max_inline = max_inline;
        rings
    };
    let init = &init;
    let max_recv_wr = if init.receives() { init.max_recv_wr } else { 0 };
    if init.qp_type != qp_type::XRC_TGT {
        for (ring, wanted) in [(rings.sq, init.max_send_wr), (rings.rq, max_recv_wr)] {
            if ring.entries < wanted || ring.entries > device.limits().max_qp_wr {
                return Err(Errno::EINVAL);
            }
        }
    }
    let tree = rings.memory.tree(device.dma())?;
    let body = CreateQp {
        buffer: tree.list(),
        ..create_command(init, &rings)?
    };
    let made: CreateQpResponse = device.command(opcode::CREATE_QP, &body)?;
    let finish = || {
        let kernel = match &rings.memory {
            QueueMemory::Kernel(_) => Some(Arc::new(kernel_qp(device, init, &rings, &made)?)?),
            QueueMemory::User(_) | QueueMemory::None => None,
        };
        let domain = init.xrcd.map(Xrcd::handle);
        let references = iwarp.then(QpReferences::new).transpose()?;
        let target = target
            .served_by(kernel.clone())
            .in_domain(domain)
            .referenced(references);
        let registration = device.qps().insert(made.qpn, target)?;
        let answer = abi::CreateQpResponse {
            qpn: made.qpn,
            doorbell_queue: made.doorbell_queue,
            slot: made.slot,
            reserved: 0,
        };
        udata.write(&answer.to_bytes())?;
        Ok((registration, kernel))
    };
    match finish() {
        Ok((registration, kernel)) => {
            let qp = Qp {
                handle: made.qpn,
                caps: QpCaps {
                    qp_type: init.qp_type,
                    max_send_wr: rings.sq.entries,
                    max_recv_wr: rings.rq.entries,
                    max_send_sge: init.max_send_sge,
                    max_recv_sge: init.max_recv_sge,
                    max_inline: init.max_inline,
                    signal_all: init.signal_all,
                },
                doorbell: (made.doorbell_queue, made.slot),
                registration,
                kernel,
                _memory: rings.memory,
            };
            if qp.of_kernel_user() {
                device.kernel_qps().fetch_add(1, Ordering::AcqRel);
            }
            Ok(qp)
        }
        Err(error) => {
            device.must_destroy(opcode::DESTROY_QP, made.qpn);
            Err(error)
        }
    }
}

/// The command, but for the pages of the buffer.
fn create_command(init: &QpInit<'_>, rings: &Rings) -> Result<CreateQp> {
    if init.qp_type == qp_type::XRC_TGT {
        return Ok(CreateQp {
            qp_type: init.qp_type,
            xrcd: init.xrcd.map_or(0, Xrcd::handle),
            ..Default::default()
        });
    }
    let signal_all = if init.signal_all {
        create_qp_flag::SIGNAL_ALL
    } else {
        0
    };
    let narrow = |sge: u32| u16::try_from(sge).map_err(|_| Errno::EINVAL);
    Ok(CreateQp {
        pd: init.pd.map_or(0, |pd| pd.handle),
        context: rings.context,
        send_cq: init.send_cq.map_or(0, Cq::number),
        recv_cq: init.recv_cq.map_or(0, Cq::number),
        qp_type: init.qp_type,
        flags: init.create_flags as u8 | signal_all,
        sq_entries: rings.sq.entries,
        sq_stride: rings.sq.stride,
        sq_offset: rings.sq.offset,
        rq_entries: rings.rq.entries,
        rq_stride: rings.rq.stride,
        rq_offset: rings.rq.offset,
        max_send_sge: narrow(init.max_send_sge)?,
        max_recv_sge: narrow(if init.receives() {
            init.max_recv_sge
        } else {
            0
        })?,
        max_inline: init.max_inline,
        srq: init.srq.map_or(0, Srq::number),
        ..Default::default()
    })
}

/// A queue pair of a type that is the driver's own: `IB_QPT_DRIVER`.
const DRIVER: u8 = 0xff;

/// The type of the queue pair that a process asks for.
fn request_type(qp_type: u8, request: &abi::CreateQpRequest) -> Result<u8> {
    match (qp_type, u8::try_from(request.driver_qp_type)) {
        (DRIVER, Ok(qp_type::SRD)) => Ok(qp_type::SRD),
        (DRIVER | qp_type::SRD, _) => Err(Errno::EOPNOTSUPP),
        (_, Ok(0)) => Ok(qp_type),
        _ => Err(Errno::EINVAL),
    }
}

/// The buffer that a process describes, pinned, and the rings in it.
fn user_rings(
    device: &Device,
    context: Option<u32>,
    request: &abi::CreateQpRequest,
) -> Result<Rings> {
    let context = context.ok_or(Errno::EOPNOTSUPP)?;
    let sq = RingLayout {
        entries: request.sq_entries,
        stride: request.sq_stride,
        offset: request.sq_offset,
    };
    let rq = RingLayout {
        entries: request.rq_entries,
        stride: request.rq_stride,
        offset: request.rq_offset,
    };
    for ring in [&sq, &rq] {
        check_ring(request.length, QpRecord::SIZE, ring)?;
    }
    if request.reserved != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(Rings {
        memory: QueueMemory::user(device, request.buffer, request.length)?,
        sq,
        rq,
        context,
    })
}

/// What the driver core calls it.
fn core_caps(init: &QpInit<'_>) -> buffer::QpCaps {
    buffer::QpCaps {
        max_send_wr: init.max_send_wr,
        max_recv_wr: if init.receives() { init.max_recv_wr } else { 0 },
        max_send_sge: init.max_send_sge,
        max_recv_sge: if init.receives() {
            init.max_recv_sge
        } else {
            0
        },
        max_inline: init.max_inline,
    }
}

/// A buffer for the rings, and the inline bytes to grant.
fn kernel_rings(device: &Device, init: &QpInit<'_>) -> Result<(Rings, u32)> {
    let context = device.kernel_context().ok_or(Errno::EOPNOTSUPP)?;
    let masked = device.features().has(feature::ATOMIC);
    let caps = core_caps(init);
    let layout = kverbs::qp_layout(init.qp_type, &caps, masked)?;
    let rings = Rings {
        memory: QueueMemory::Kernel(kverbs::queue_memory(device, layout.size)?),
        sq: layout.sq,
        rq: layout.rq,
        context: context.handle(),
    };
    Ok((rings, layout.max_inline(&caps, device.limits().max_inline)))
}

fn kernel_qp(
    device: &Device,
    init: &QpInit<'_>,
    rings: &Rings,
    made: &CreateQpResponse,
) -> Result<KernelQp> {
    let QueueMemory::Kernel(memory) = &rings.memory else {
        return Err(Errno::EINVAL);
    };
    let kernel_cq = |cq: Option<&Cq>| cq.and_then(Cq::kernel).cloned().ok_or(Errno::EINVAL);
    let kernel_srq = |srq: &Srq| srq.kernel().cloned().ok_or(Errno::EINVAL);
    KernelQp::new(
        device,
        KernelQpInit {
            qp_type: init.qp_type,
            caps: &core_caps(init),
            sq: &rings.sq,
            rq: &rings.rq,
            memory: memory.clone(),
            signal_all: init.signal_all,
            srq: init.srq.map(kernel_srq).transpose()?,
            cqs: [
                kernel_cq(init.send_cq)?,
                kernel_cq(init.recv_cq.or(init.send_cq))?,
            ],
            number: made.qpn,
            doorbell_queue: made.doorbell_queue,
            slot: made.slot,
        },
    )
}

/// Changes attributes of a queue pair. Which are needed and allowed in which state, the device
/// decides.
pub(crate) fn modify_qp(device: &Device, qp: &Qp, mask: u32, attr: QpAttr) -> Result<()> {
    /// The attributes that the device is told about.
    const KNOWN: u32 = qp_attr::STATE
        | qp_attr::CUR_STATE
        | qp_attr::EN_SQD_ASYNC_NOTIFY
        | qp_attr::ACCESS_FLAGS
        | qp_attr::PKEY_INDEX
        | qp_attr::PORT
        | qp_attr::QKEY
        | qp_attr::AV
        | qp_attr::PATH_MTU
        | qp_attr::TIMEOUT
        | qp_attr::RETRY_CNT
        | qp_attr::RNR_RETRY
        | qp_attr::RQ_PSN
        | qp_attr::MAX_QP_RD_ATOMIC
        | qp_attr::MIN_RNR_TIMER
        | qp_attr::SQ_PSN
        | qp_attr::MAX_DEST_RD_ATOMIC
        | qp_attr::DEST_QPN;
    if mask & !KNOWN != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mask = match qp.references() {
        Some(_) => iwarp_mask(mask, attr.qp_state)?,
        None => Some(mask),
    };
    let Some(mask) = mask else {
        return Ok(());
    };
    let body = ModifyQp {
        qpn: qp.handle,
        attr_mask: mask,
        attr,
    };
    match device.simple_command(opcode::MODIFY_QP, &body) {
        Err(_) if device.commands().is_dead() && qp.may_become(mask, attr.qp_state) => {}
        Err(Errno::EINVAL) if is_closing(device, qp, mask, attr.qp_state) => return Ok(()),
        result => result?,
    }
    if let Some(references) = qp.references() {
        if mask & qp_attr::STATE != 0 && matches!(attr.qp_state, qp_state::ERR | qp_state::RESET) {
            device.connections().ended(device, references);
        }
    }
    if let (Some(kernel), true) = (&qp.kernel, mask & qp_attr::STATE != 0) {
        kernel.changed(attr.qp_state);
    }
    Ok(())
}

/// Does a user ask for the end of a connection of iWARP that is closed, or being closed, already?
/// The peer may have been first; and first librdmacm asks, and then iw_cm.
fn is_closing(device: &Device, qp: &Qp, mask: u32, state: u8) -> bool {
    let asked = qp.references().is_some() && mask & qp_attr::STATE != 0 && state == qp_state::SQD;
    asked
        && query_qp(device, qp)
            .is_ok_and(|attr| matches!(attr.qp_state, qp_state::SQD | qp_state::ERR))
}

/// What of a change of a queue pair of iWARP goes to the device; none: nothing. From INIT to RTS
/// the device takes it by itself. The communication manager asks for RTR and RTS all the same.
fn iwarp_mask(mask: u32, state: u8) -> Result<Option<u32>> {
    const KNOWN: u32 = qp_attr::STATE
        | qp_attr::CUR_STATE
        | qp_attr::EN_SQD_ASYNC_NOTIFY
        | qp_attr::ACCESS_FLAGS
        | qp_attr::PKEY_INDEX
        | qp_attr::PORT;
    if mask & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    if mask & qp_attr::STATE != 0 && !matches!(state, qp_state::RTR | qp_state::RTS) {
        return Ok(Some(mask));
    }
    // In the state in which it is.
    let access = mask & qp_attr::ACCESS_FLAGS;
    Ok((access != 0).then_some(access))
}

/// The attributes of a queue pair.
pub(crate) fn query_qp(device: &Device, qp: &Qp) -> Result<QpAttr> {
    let body = Handle {
        handle: qp.handle,
        reserved: 0,
    };
    let answer: QueryQpResponse = device.command(opcode::QUERY_QP, &body)?;
    Ok(answer.attr)
}

/// Destroys a queue pair.
pub(crate) fn destroy_qp(device: &Device, qp: &Qp) -> Result<()> {
    device.destroy(opcode::DESTROY_QP, qp.handle)?;
    if let Some(kernel) = &qp.kernel {
        kernel.forget();
    }
    if let Some(references) = qp.references() {
        device.connections().qp_gone(device, references);
    }
    if qp.of_kernel_user() {
        device.kernel_qps().fetch_sub(1, Ordering::AcqRel);
    }
    Ok(())
}
