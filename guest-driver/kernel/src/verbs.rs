// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The verbs: each is one control command, with the memory that belongs to it.
//!
//! What a verb creates holds all that must live as long as the object: its handle on the device, pinned memory, its
//! place in the tables for events. It is dropped only when the device has let go of the object.
use crate::device::Device;
use crate::pages::PageTree;
use crate::port::state;
use crate::sys::alloc::Array;
use crate::sys::dma::DmaPage;
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{
    device_cap, CqBuffer, CqTarget, DeviceAttr, MmapEntry, PortAttr, QpTarget, Udata, Umem,
    UserContext, ACCESS_OPTIONAL, ATOMIC_NONE, PORT_CM_SUP,
};
use crate::sys::table::Registration;
use virtio_rdma_driver_core::abi;
use virtio_rdma_spec::command::{
    create_qp_flag, opcode, CreateContext, CreateCq, CreateQp, CreateQpResponse, Handle,
    HandleResponse, ModifyQp, QpAttr, QueryPort, QueryPortResponse, QueryQpResponse, RegMr,
    RegMrResponse, SetGid,
};
use virtio_rdma_spec::config::first_doorbell_queue;
use virtio_rdma_spec::doorbell::BLOCK_PAGES;
use virtio_rdma_spec::ring::{CqRecord, Cqe, QpRecord};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_type};
use virtio_rdma_spec::PAGE_SIZE;

/// The only port.
const PORT: u8 = 1;

/// A limit of the device, in fields that are signed on some kernels.
fn limit(value: u32) -> u32 {
    value.min(i32::MAX as u32)
}

/// Attributes and limits of the device.
pub(crate) fn query_device(device: &Device, attr: &mut DeviceAttr, udata: Udata<'_>) -> Result<()> {
    udata.none()?;
    let limits = device.limits();
    let (vendor, part, revision) = device.virtio().pci_ids();
    attr.fw_ver = limits.fw_ver;
    attr.sys_image_guid = device.node_guid().to_be();
    attr.vendor_id = vendor;
    attr.vendor_part_id = part;
    attr.hw_ver = revision;
    attr.max_mr_size = limits.max_mr_size;
    attr.page_size_cap = limits.page_size_cap;
    attr.device_cap_flags = device_cap::RC_RNR_NAK_GEN
        | device_cap::SYS_IMAGE_GUID
        | device_cap::PORT_ACTIVE_EVENT
        | device_cap::CURR_QP_STATE_MOD;
    attr.max_qp = limit(limits.max_qp) as _;
    attr.max_qp_wr = limit(limits.max_qp_wr) as _;
    attr.max_send_sge = limit(limits.max_sge) as _;
    attr.max_recv_sge = limit(limits.max_sge) as _;
    attr.max_sge_rd = limit(limits.max_sge_rd) as _;
    attr.max_cq = limit(limits.max_cq) as _;
    attr.max_cqe = limit(limits.max_cqe) as _;
    attr.max_mr = limit(limits.max_mr) as _;
    attr.max_pd = limit(limits.max_pd) as _;
    attr.max_qp_rd_atom = limit(limits.max_qp_rd_atom) as _;
    attr.max_res_rd_atom = limit(limits.max_res_rd_atom) as _;
    attr.max_qp_init_rd_atom = limit(limits.max_qp_init_rd_atom) as _;
    attr.atomic_cap = ATOMIC_NONE;
    attr.masked_atomic_cap = ATOMIC_NONE;
    attr.max_mw = limit(limits.max_mw) as _;
    attr.max_ah = limit(limits.max_ah) as _;
    attr.max_srq = limit(limits.max_srq) as _;
    attr.max_srq_wr = limit(limits.max_srq_wr) as _;
    attr.max_srq_sge = limit(limits.max_srq_sge) as _;
    attr.max_fast_reg_page_list_len = limits.max_fast_reg_pages;
    attr.max_pkeys = u16::try_from(limits.pkey_table_len).unwrap_or(u16::MAX);
    attr.local_ca_ack_delay = limits.local_ca_ack_delay as u8;
    Ok(())
}

/// Attributes of the port. Its state is that of the device's link and the paired interface together.
pub(crate) fn query_port(device: &Device, port: u32, attr: &mut PortAttr) -> Result<()> {
    if port != u32::from(PORT) {
        return Err(Errno::EINVAL);
    }
    let body = QueryPort {
        port_num: PORT,
        ..Default::default()
    };
    let answer = match device.command(opcode::QUERY_PORT, &body) {
        // The port of a device that failed is down: an error here would keep tools from showing any other device.
        Err(_) if device.commands().is_dead() => QueryPortResponse {
            state: state::DOWN,
            max_mtu: mtu::MTU_4096,
            active_mtu: mtu::MTU_4096,
            active_width: 1,
            active_speed: 1,
            ..Default::default()
        },
        answer => answer?,
    };
    let active = answer.state == state::ACTIVE && device.port_is_active();
    /// Physical states of a port, as in verbs.
    const PHYS_DISABLED: u8 = 3;
    const PHYS_LINK_UP: u8 = 5;
    attr.state = u32::from(if active { state::ACTIVE } else { state::DOWN });
    attr.phys_state = if active { PHYS_LINK_UP } else { PHYS_DISABLED };
    attr.max_mtu = u32::from(answer.max_mtu);
    attr.active_mtu = u32::from(answer.active_mtu);
    attr.gid_tbl_len = limit(device.limits().gid_table_len) as _;
    attr.port_cap_flags = PORT_CM_SUP;
    attr.max_msg_sz = answer.max_msg_sz;
    attr.bad_pkey_cntr = answer.bad_pkey_cntr;
    attr.qkey_viol_cntr = answer.qkey_viol_cntr;
    attr.pkey_tbl_len = u16::try_from(device.limits().pkey_table_len).unwrap_or(u16::MAX);
    attr.max_vl_num = 1;
    attr.active_width = answer.active_width;
    attr.active_speed = answer.active_speed as _;
    Ok(())
}

/// Enters a GID into the device's table.
pub(crate) fn add_gid(
    device: &Device,
    index: u16,
    gid: [u8; 16],
    kind: u8,
    vlan: u16,
    mac: [u8; 6],
) -> Result<()> {
    let body = SetGid {
        gid,
        index,
        gid_type: kind,
        port_num: PORT,
        vlan,
        mac,
        reserved: [0; 12],
    };
    device.simple_command(opcode::SET_GID, &body)
}

/// Takes a GID out of the device's table.
pub(crate) fn del_gid(device: &Device, index: u16) -> Result<()> {
    let body = SetGid {
        index,
        port_num: PORT,
        vlan: 0xffff,
        ..Default::default()
    };
    match device.simple_command(opcode::SET_GID, &body) {
        Err(_) if device.commands().is_dead() => Ok(()),
        result => result,
    }
}

/// A process's context: its doorbell memory and mappings.
pub(crate) struct Context {
    handle: u32,
    /// Doorbell memory, notify pages, status page.
    _entries: [MmapEntry; 3],
    /// Shared with the device until the context is destroyed there.
    _doorbell: Array<DmaPage>,
}

/// Creates a context with `BLOCK_PAGES` pages of doorbell memory per doorbell queue.
pub(crate) fn alloc_context(
    device: &Device,
    context: UserContext,
    udata: Udata<'_>,
) -> Result<Context> {
    udata.read::<0>()?;
    let queues = device.doorbell_queues();
    let pages = usize::from(queues).saturating_mul(BLOCK_PAGES as usize);
    let doorbell = Array::new(pages, |_| DmaPage::new(device.dma()))?;
    let tree = PageTree::of_pages(device.dma(), &doorbell)?;
    let body = CreateContext {
        doorbell: tree.list(),
        reserved: 0,
    };
    let HandleResponse { handle, .. } = device.command(opcode::CREATE_CONTEXT, &body)?;

    let finish = || {
        let notify = device.notify();
        let notify_bytes = usize::from(queues).saturating_mul(PAGE_SIZE as usize);
        let doorbell_entry = MmapEntry::pages(context, &doorbell, false)?;
        let notify_entry = MmapEntry::io(context, notify.addr, notify_bytes)?;
        let status_entry = MmapEntry::pages(context, device.status_page(), true)?;
        let limits = device.limits();
        let answer = abi::AllocContextResponse {
            doorbell_offset: doorbell_entry.offset(),
            notify_offset: notify_entry.offset(),
            status_offset: status_entry.offset(),
            num_doorbell_queues: u32::from(queues),
            first_doorbell_queue: u32::from(first_doorbell_queue(device.completion_vectors())),
            notify_page_offset: notify.offset,
            max_inline: limits.max_inline,
            max_qp_wr: limits.max_qp_wr,
            max_sge: limits.max_sge,
            max_cqe: limits.max_cqe,
            reserved: 0,
        };
        udata.write(&answer.to_bytes())?;
        Ok([doorbell_entry, notify_entry, status_entry])
    };
    match finish() {
        Ok(entries) => Ok(Context {
            handle,
            _entries: entries,
            _doorbell: doorbell,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_CONTEXT, handle);
            Err(error)
        }
    }
}

/// Destroys a context. The core gives us no way to refuse.
pub(crate) fn dealloc_context(device: &Device, context: &Context) {
    device.must_destroy(opcode::DESTROY_CONTEXT, context.handle);
}

/// A protection domain.
pub(crate) struct Pd {
    handle: u32,
}

/// Creates a protection domain.
pub(crate) fn alloc_pd(device: &Device, udata: Udata<'_>) -> Result<Pd> {
    udata.read::<0>()?;
    let HandleResponse { handle, .. } = device.command(opcode::CREATE_PD, &[0u8; 0])?;
    let answer = abi::AllocPdResponse {
        pd: handle,
        reserved: 0,
    };
    udata.write(&answer.to_bytes()).inspect_err(|_| {
        device.must_destroy(opcode::DESTROY_PD, handle);
    })?;
    Ok(Pd { handle })
}

/// Destroys a protection domain.
pub(crate) fn dealloc_pd(device: &Device, pd: &Pd) -> Result<()> {
    device.destroy(opcode::DESTROY_PD, pd.handle)
}

/// A memory region.
pub(crate) struct Mr {
    lkey: u32,
    rkey: u32,
    _umem: Umem,
}

impl Mr {
    /// Local and remote key.
    pub(crate) fn keys(&self) -> (u32, u32) {
        (self.lkey, self.rkey)
    }
}

/// Registers `length` bytes at `start` of the current process, which work requests name by addresses from `virt` on.
pub(crate) fn reg_mr(
    device: &Device,
    pd: &Pd,
    start: u64,
    length: u64,
    virt: u64,
    access: u32,
) -> Result<Mr> {
    /// Flags that the core lets through and the device may know; optional ones that it cannot are left out.
    const KNOWN: u32 = access::RELAXED_ORDERING | !ACCESS_OPTIONAL;
    let access = access & KNOWN;
    if length == 0 || access & access::ON_DEMAND != 0 {
        return Err(if length == 0 {
            Errno::EINVAL
        } else {
            Errno::EOPNOTSUPP
        });
    }
    let umem = Umem::new(device.ib(), start, length, access)?;
    /// Page sizes that a page list can have: 2^12 to 2^31.
    const SIZES: u64 = 0xffff_f000;
    // The device is told the offset in the first page: it need not be that of `virt`.
    let page_size = umem.best_page_size(device.limits().page_size_cap & SIZES, start);
    if !page_size.is_power_of_two() {
        return Err(Errno::EINVAL);
    }
    let tree = PageTree::of_umem(device.dma(), &umem, page_size)?;
    let body = RegMr {
        pd: pd.handle,
        access,
        iova: virt,
        length,
        offset: start & page_size.wrapping_sub(1),
        pages: tree.list(),
        key: device.next_key(),
        reserved: [0; 7],
    };
    let RegMrResponse { lkey, rkey } = device.command(opcode::REG_MR, &body)?;
    Ok(Mr {
        lkey,
        rkey,
        _umem: umem,
    })
}

/// Deregisters a region. The device answers when the last access has ended.
pub(crate) fn dereg_mr(device: &Device, mr: &Mr) -> Result<()> {
    device.destroy(opcode::DEREG_MR, mr.lkey)
}

/// Takes a region back whose registration could not be completed.
pub(crate) fn discard_mr(device: &Device, mr: &Mr) {
    device.must_destroy(opcode::DEREG_MR, mr.lkey);
}

/// Checks a buffer that a process describes, and where in it a ring of `entries` times `stride` bytes is.
fn check_ring(length: u64, offset: u32, entries: u32, stride: u32) -> Result<()> {
    let size = u64::from(entries).saturating_mul(u64::from(stride));
    if u64::from(offset).saturating_add(size) > length {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Checks the place of a buffer: whole pages.
fn check_buffer(addr: u64, length: u64) -> Result<()> {
    if length == 0 || addr % PAGE_SIZE != 0 || length % PAGE_SIZE != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// A completion queue.
pub(crate) struct Cq {
    number: u32,
    entries: u32,
    /// Goes first: events before memory.
    _registration: Registration<CqTarget>,
    _umem: Umem,
}

impl Cq {
    /// Entries of the ring.
    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }
}

/// What a completion queue is to be.
pub(crate) struct CqInit {
    /// Entries asked for.
    pub(crate) entries: u32,
    /// Completion vector.
    pub(crate) comp_vector: u32,
    /// Flags of verbs; none is supported.
    pub(crate) flags: u32,
    /// Where its buffer is, if the core knows.
    pub(crate) buffer: CqBuffer,
}

/// Creates a completion queue over a buffer of the process.
pub(crate) fn create_cq(
    device: &Device,
    target: CqTarget,
    init: &CqInit,
    udata: Udata<'_>,
) -> Result<Cq> {
    if init.flags != 0 || !udata.is_user() {
        return Err(Errno::EOPNOTSUPP);
    }
    let request = abi::CreateCqRequest::from_bytes(&udata.read()?);
    check_buffer(request.buffer, request.length)?;
    check_ring(
        request.length,
        request.ring_offset,
        request.entries,
        request.stride,
    )?;
    if request.flags != 0
        || request.stride != Cqe::SIZE as u32
        || request.ring_offset < CqRecord::SIZE as u32
        || request.entries == 0
        || request.entries < init.entries
        || request.entries > device.limits().max_cqe
        || init.comp_vector >= u32::from(device.completion_vectors())
    {
        return Err(Errno::EINVAL);
    }
    let umem = Umem::new_cq(
        device.ib(),
        init.buffer,
        request.buffer,
        request.length,
        access::LOCAL_WRITE,
    )?;
    let tree = PageTree::of_umem(device.dma(), &umem, PAGE_SIZE)?;
    let body = CreateCq {
        entries: request.entries,
        comp_vector: init.comp_vector as u16,
        stride: request.stride as u16,
        ring_offset: request.ring_offset,
        flags: 0,
        buffer: tree.list(),
        reserved: 0,
    };
    let HandleResponse { handle, .. } = device.command(opcode::CREATE_CQ, &body)?;
    let finish = || {
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
            entries: request.entries,
            _registration: registration,
            _umem: umem,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_CQ, handle);
            Err(error)
        }
    }
}

/// Destroys a completion queue.
pub(crate) fn destroy_cq(device: &Device, cq: &Cq) -> Result<()> {
    device.destroy(opcode::DESTROY_CQ, cq.number)
}

/// A queue pair.
pub(crate) struct Qp {
    number: u32,
    caps: QpCaps,
    /// Goes first: events before memory.
    _registration: Registration<QpTarget>,
    _umem: Umem,
}

impl Qp {
    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// What it was created with.
    pub(crate) fn caps(&self) -> &QpCaps {
        &self.caps
    }
}

/// What a queue pair was created with.
pub(crate) struct QpCaps {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) signal_all: bool,
}

/// What a queue pair is to be.
pub(crate) struct QpInit<'a> {
    pub(crate) qp_type: u8,
    /// Flags of verbs; none is supported.
    pub(crate) create_flags: u32,
    pub(crate) signal_all: bool,
    /// With a shared receive queue: not supported.
    pub(crate) has_srq: bool,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) pd: &'a Pd,
    pub(crate) send_cq: &'a Cq,
    pub(crate) recv_cq: &'a Cq,
}

/// Creates a queue pair over a buffer of the process.
pub(crate) fn create_qp(
    device: &Device,
    target: QpTarget,
    init: &QpInit<'_>,
    udata: Udata<'_>,
) -> Result<Qp> {
    if init.qp_type != qp_type::RC || init.create_flags != 0 || init.has_srq || !udata.is_user() {
        return Err(Errno::EOPNOTSUPP);
    }
    let limits = device.limits();
    let context = udata.context()?;
    let request = abi::CreateQpRequest::from_bytes(&udata.read()?);
    check_buffer(request.buffer, request.length)?;
    for (entries, wanted, offset, stride) in [
        (
            request.sq_entries,
            init.max_send_wr,
            request.sq_offset,
            request.sq_stride,
        ),
        (
            request.rq_entries,
            init.max_recv_wr,
            request.rq_offset,
            request.rq_stride,
        ),
    ] {
        check_ring(request.length, offset, entries, stride)?;
        if entries < wanted
            || entries > limits.max_qp_wr
            || (entries != 0 && offset < QpRecord::SIZE as u32)
        {
            return Err(Errno::EINVAL);
        }
    }
    if request.reserved != 0
        || init.max_send_sge > limits.max_sge
        || init.max_recv_sge > limits.max_sge
        || init.max_inline > limits.max_inline
    {
        return Err(Errno::EINVAL);
    }
    let umem = Umem::new(
        device.ib(),
        request.buffer,
        request.length,
        access::LOCAL_WRITE,
    )?;
    let tree = PageTree::of_umem(device.dma(), &umem, PAGE_SIZE)?;
    let body = CreateQp {
        pd: init.pd.handle,
        context: context.handle,
        send_cq: init.send_cq.number,
        recv_cq: init.recv_cq.number,
        qp_type: init.qp_type,
        flags: if init.signal_all {
            create_qp_flag::SIGNAL_ALL
        } else {
            0
        },
        reserved0: 0,
        sq_entries: request.sq_entries,
        sq_stride: request.sq_stride,
        sq_offset: request.sq_offset,
        rq_entries: request.rq_entries,
        rq_stride: request.rq_stride,
        rq_offset: request.rq_offset,
        max_send_sge: u16::try_from(init.max_send_sge).map_err(|_| Errno::EINVAL)?,
        max_recv_sge: u16::try_from(init.max_recv_sge).map_err(|_| Errno::EINVAL)?,
        max_inline: init.max_inline,
        srq: 0,
        buffer: tree.list(),
        xrcd: 0,
        reserved1: [0; 12],
    };
    let made: CreateQpResponse = device.command(opcode::CREATE_QP, &body)?;
    let finish = || {
        let registration = device.qps().insert(made.qpn, target)?;
        let answer = abi::CreateQpResponse {
            qpn: made.qpn,
            doorbell_queue: made.doorbell_queue,
            slot: made.slot,
            reserved: 0,
        };
        udata.write(&answer.to_bytes())?;
        Ok(registration)
    };
    match finish() {
        Ok(registration) => Ok(Qp {
            number: made.qpn,
            caps: QpCaps {
                max_send_wr: request.sq_entries,
                max_recv_wr: request.rq_entries,
                max_send_sge: init.max_send_sge,
                max_recv_sge: init.max_recv_sge,
                max_inline: init.max_inline,
                signal_all: init.signal_all,
            },
            _registration: registration,
            _umem: umem,
        }),
        Err(error) => {
            device.must_destroy(opcode::DESTROY_QP, made.qpn);
            Err(error)
        }
    }
}

/// Changes attributes of a queue pair. Which are needed and allowed in which state, the device decides.
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
    let body = ModifyQp {
        qpn: qp.number,
        attr_mask: mask,
        attr,
    };
    device.simple_command(opcode::MODIFY_QP, &body)
}

/// The attributes of a queue pair.
pub(crate) fn query_qp(device: &Device, qp: &Qp) -> Result<QpAttr> {
    let body = Handle {
        handle: qp.number,
        reserved: 0,
    };
    let answer: QueryQpResponse = device.command(opcode::QUERY_QP, &body)?;
    Ok(answer.attr)
}

/// Destroys a queue pair.
pub(crate) fn destroy_qp(device: &Device, qp: &Qp) -> Result<()> {
    device.destroy(opcode::DESTROY_QP, qp.number)
}
