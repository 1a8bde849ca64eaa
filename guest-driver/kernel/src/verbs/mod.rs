// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The verbs: each is one control command, with the memory that belongs to it.
//!
//! Memory regions, queues and addresses are in modules of their own.
//!
//! What a verb creates holds all that must live as long as the object: its handle on the device,
//! pinned memory, its place in the tables for events. It is dropped only when the device has let go
//! of the object.
mod ah;
mod cq;
mod dm;
mod fast;
mod mr;
mod mw;
mod qp;
mod srq;

pub(crate) use ah::{create_ah, multicast, Ah};
pub(crate) use cq::{create_cq, destroy_cq, modify_cq, resize_cq, Cq, CqInit};
pub(crate) use dm::{alloc_dm, dealloc_dm, reg_dm_mr, Dm};
pub(crate) use fast::{alloc_mr, Extent, FastMr};
pub(crate) use mr::{dereg_mr, discard_mr, get_dma_mr, reg_mr, rereg_mr, Change, Mr, UserRange};
pub(crate) use mw::{alloc_mw, dealloc_mw, Mw};
pub(crate) use qp::{create_qp, destroy_qp, modify_qp, query_qp, Qp, QpInit};
pub(crate) use srq::{
    alloc_xrcd, create_srq, dealloc_xrcd, destroy_srq, modify_srq, query_srq, resize_srq, Srq,
    SrqInit, Xrcd,
};

use crate::device::{Device, DM_TOTAL};
use crate::pages::PageTree;
use crate::port::{state, PORT};
use crate::sys::alloc::{Arc, Array};
use crate::sys::dma::{DmaBuffer, DmaDevice, DmaPage};
use crate::sys::error::{Errno, Result};
use crate::sys::rdma::{
    device_cap, DeviceAttr, MmapEntry, PortAttr, Udata, Umem, UserContext, ATOMIC_GLOB,
    ATOMIC_NONE, PORT_CM_SUP, SG_GAPS_REG,
};
use virtio_rdma_driver_core::abi;
use virtio_rdma_driver_core::buffer::RingLayout;
use virtio_rdma_spec::command::{
    opcode, CreateContext, HandleResponse, QueryClockResponse, QueryCountersResponse, QueryPort,
    QueryPortResponse, SetGid,
};
use virtio_rdma_spec::config::{feature, first_doorbell_queue};
use virtio_rdma_spec::doorbell::BLOCK_PAGES;
use virtio_rdma_spec::verbs::{access, mtu};
use virtio_rdma_spec::PAGE_SIZE;

/// The clock of completion time stamps counts nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// A limit of the device, in fields that are signed on some kernels.
fn limit(value: u32) -> u32 {
    value.min(i32::MAX as u32)
}

/// Entries of the port's table of GIDs. One of iWARP has one, which only the kernel looks at.
pub(crate) fn gid_table_len(device: &Device) -> u32 {
    if device.features().has(feature::IWARP) {
        1
    } else {
        device.limits().gid_table_len
    }
}

/// Entries of the port's table of P_Keys.
pub(crate) fn pkey_table_len(device: &Device) -> u16 {
    if device.features().has(feature::IWARP) {
        1
    } else {
        u16::try_from(device.limits().pkey_table_len).unwrap_or(u16::MAX)
    }
}

/// Attributes and limits of the device.
pub(crate) fn query_device(device: &Device, attr: &mut DeviceAttr, udata: Udata<'_>) -> Result<()> {
    let features = device.features();
    udata.read::<0>()?;
    let clock = if udata.is_user() && features.has(feature::CQ_TIMESTAMP) {
        // Zero: not known. That a device failed must not keep tools from showing it.
        device
            .command(opcode::QUERY_CLOCK, &[0u8; 0])
            .map_or(0, |QueryClockResponse { clock }| clock)
    } else {
        0
    };
    let answer = abi::QueryDeviceResponse { clock, reserved: 0 };
    udata.write(&answer.to_bytes())?;
    let limits = device.limits();
    let (vendor, part, revision) = device.virtio().pci_ids();
    attr.fw_ver = limits.fw_ver;
    attr.sys_image_guid = device.node_guid().to_be();
    attr.vendor_id = vendor;
    attr.vendor_part_id = part;
    attr.hw_ver = revision;
    attr.max_mr_size = limits.max_mr_size;
    attr.page_size_cap = limits.page_size_cap;
    attr.device_cap_flags =
        device_cap::SYS_IMAGE_GUID | device_cap::PORT_ACTIVE_EVENT | device_cap::CURR_QP_STATE_MOD;
    if !features.has(feature::IWARP) {
        attr.device_cap_flags |= device_cap::RC_RNR_NAK_GEN;
    }
    if features.has(feature::UD) {
        attr.device_cap_flags |= device_cap::BAD_QKEY_CNTR;
        attr.max_ah = limit(limits.max_ah) as _;
        attr.max_mcast_grp = limit(limits.max_mcast_grp) as _;
        attr.max_mcast_qp_attach = limit(limits.max_mcast_qp_attach) as _;
        attr.max_total_mcast_qp_attach = limit(limits.max_mcast_qp_attach) as _;
    }
    if features.has(feature::SRQ) {
        attr.max_srq = limit(limits.max_srq) as _;
        attr.max_srq_wr = limit(limits.max_srq_wr) as _;
        attr.max_srq_sge = limit(limits.max_srq_sge) as _;
    }
    if features.has(feature::SRQ_RESIZE) {
        attr.device_cap_flags |= device_cap::SRQ_RESIZE;
    }
    if features.has(feature::XRC) {
        attr.device_cap_flags |= device_cap::XRC;
    }
    if features.has(feature::FAST_REG) {
        attr.device_cap_flags |= device_cap::MEM_MGT_EXTENSIONS;
        attr.kernel_cap_flags |= SG_GAPS_REG;
        attr.max_fast_reg_page_list_len = limits.max_fast_reg_pages;
    }
    if features.has(feature::MW) {
        attr.device_cap_flags |= device_cap::MEM_WINDOW | device_cap::MEM_WINDOW_TYPE_2B;
        attr.max_mw = limit(limits.max_mw) as _;
    }
    if features.has(feature::ATOMIC) {
        // The device uses atomic instructions of the CPU.
        attr.atomic_cap = ATOMIC_GLOB;
        attr.masked_atomic_cap = ATOMIC_GLOB;
        if !features.has(feature::IWARP) {
            attr.device_cap_flags |= device_cap::ATOMIC_WRITE;
        }
    } else {
        attr.atomic_cap = ATOMIC_NONE;
        attr.masked_atomic_cap = ATOMIC_NONE;
    }
    if features.has(feature::FLUSH) {
        attr.device_cap_flags |= device_cap::FLUSH_GLOBAL;
    }
    if features.has(feature::CQ_TIMESTAMP) {
        attr.timestamp_mask = u64::MAX;
        attr.hca_core_clock = CLOCK_KHZ;
    }
    if features.has(feature::CQ_MODERATION) {
        attr.cq_caps.max_cq_moderation_count = limits.max_cq_moderation_count;
        attr.cq_caps.max_cq_moderation_period = limits.max_cq_moderation_period;
    }
    attr.max_dm_size = DM_TOTAL;
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
    attr.max_pkeys = pkey_table_len(device);
    attr.local_ca_ack_delay = limits.local_ca_ack_delay as u8;
    Ok(())
}

/// Counters of the port, by name.
pub(crate) fn port_counters(device: &Device) -> Result<[u64; 18]> {
    let body = QueryPort {
        port_num: PORT,
        ..Default::default()
    };
    let port: QueryPortResponse = device.command(opcode::QUERY_PORT, &body)?;
    let packets: QueryCountersResponse = if device.features().has(feature::COUNTERS) {
        device.command(opcode::QUERY_COUNTERS, &body)?
    } else {
        QueryCountersResponse::default()
    };
    // In the order of their names in glue.c.
    Ok([
        port.tx_bytes,
        port.tx_messages,
        port.rx_bytes,
        port.rx_messages,
        port.rnr_naks,
        port.retries,
        port.errors,
        packets.out_of_sequence,
        packets.duplicate_request,
        packets.out_of_buffer,
        packets.packet_seq_err,
        packets.implied_nak_seq_err,
        packets.local_ack_timeout_err,
        packets.rnr_nak_retry_err,
        packets.retrans_pkts,
        packets.np_ecn_marked_roce_packets,
        packets.np_cnp_sent,
        packets.rp_cnp_handled,
    ])
}

/// Attributes of the port. Its state is that of the device's link and the paired interface
/// together.
pub(crate) fn query_port(device: &Device, port: u32, attr: &mut PortAttr) -> Result<()> {
    if port != u32::from(PORT) {
        return Err(Errno::EINVAL);
    }
    let body = QueryPort {
        port_num: PORT,
        ..Default::default()
    };
    let answer = match device.command(opcode::QUERY_PORT, &body) {
        // The port of a device that failed is down: an error here would keep tools from showing any
        // other device.
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
    attr.gid_tbl_len = limit(gid_table_len(device)) as _;
    attr.port_cap_flags = PORT_CM_SUP;
    attr.max_msg_sz = answer.max_msg_sz;
    attr.bad_pkey_cntr = answer.bad_pkey_cntr;
    attr.qkey_viol_cntr = answer.qkey_viol_cntr;
    attr.pkey_tbl_len = pkey_table_len(device);
    attr.max_vl_num = 1;
    attr.active_width = answer.active_width;
    attr.active_speed = answer.active_speed as _;
    Ok(())
}

/// Enters a GID into the device's table. The core logs a GID that it could not enter; what it
/// cannot know is that the operator of the host did not want it, or that it is another VM's.
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
    device
        .simple_command(opcode::SET_GID, &body)
        .inspect_err(|error| {
            let why = match *error {
                Errno::EPERM => "the operator of the host does not allow this VM the GID; index",
                Errno::EBUSY => {
                    "another VM has the GID, or had it and is still known by it to others; index"
                }
                _ => return,
            };
            device.virtio().error(why, i64::from(index));
        })
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
    /// What its process was told; for others that import it.
    response: abi::AllocContextResponse,
    /// Doorbell memory, notify pages, status page.
    _entries: [MmapEntry; 3],
    /// Shared with the device until the context is destroyed there.
    _doorbell: Array<DmaPage>,
}

impl Context {
    /// Its number on the device.
    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }
}

impl Context {
    /// What its process was told.
    pub(crate) fn response(&self) -> &abi::AllocContextResponse {
        &self.response
    }
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
            null_lkey: limits.null_lkey,
            features: device.features().bits(),
            max_srq_wr: limits.max_srq_wr,
            max_srq_sge: limits.max_srq_sge,
            reserved: [0; 16],
        };
        udata.write(&answer.to_bytes())?;
        Ok(([doorbell_entry, notify_entry, status_entry], answer))
    };
    match finish() {
        Ok((entries, response)) => Ok(Context {
            handle,
            response,
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

/// Where the rings of a queue are: pinned memory of a process, or the kernel's own; or it has none.
enum QueueMemory {
    None,
    User(Umem),
    Kernel(Arc<DmaBuffer>),
}

impl QueueMemory {
    /// Pins what a process describes: whole pages.
    fn user(device: &Device, addr: u64, length: u64) -> Result<Self> {
        check_buffer(addr, length)?;
        Umem::new(device.ib(), addr, length, access::LOCAL_WRITE).map(Self::User)
    }

    /// The list of its pages. The device takes it in before it answers the command with it.
    fn tree(&self, dma: DmaDevice) -> Result<PageTree> {
        match self {
            Self::None => Ok(PageTree::empty()),
            Self::User(umem) => PageTree::of_umem(dma, umem, PAGE_SIZE),
            Self::Kernel(memory) => PageTree::of_pages(dma, memory.pages()),
        }
    }
}

/// Checks the place of a buffer: whole pages.
fn check_buffer(addr: u64, length: u64) -> Result<()> {
    if length == 0 || addr % PAGE_SIZE != 0 || length % PAGE_SIZE != 0 {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Checks where in a buffer of `length` bytes a ring is: behind the record at its start, and not
/// beyond the end.
fn check_ring(length: u64, record: usize, ring: &RingLayout) -> Result<()> {
    let size = u64::from(ring.entries).saturating_mul(u64::from(ring.stride));
    let fits = u64::from(ring.offset).saturating_add(size) <= length;
    if !fits || (ring.entries != 0 && (ring.offset as usize) < record) {
        return Err(Errno::EINVAL);
    }
    Ok(())
}
