// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands: decode, do, encode (specification: "Control commands").
//!
//! The command is a private copy already. Everything in it is checked here, before any object changes.
mod queue_pair;
mod srq;

use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::{
    gid_type, opcode, status, CommandHeader, CreateContext, CreateCq, Handle, HandleResponse,
    PageList, QueryDeviceResponse, QueryPort, QueryPortResponse, RegMr, RegMrResponse,
    ResponseHeader, SetGid, SetStatusPage,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::doorbell::{worker_status, BLOCK_PAGES};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{CqRecord, Cqe, MAX_CQ_ENTRIES, MAX_INLINE, MAX_SGE, MAX_WQ_ENTRIES};
use virtio_rdma_spec::verbs::{access, mtu};
use virtio_rdma_spec::PAGE_SIZE;

use crate::memory::{read_page_list, Pages};
use crate::rnic::{announce_all, Rnic, GID_TABLE_LEN, MAX_MESSAGE};
use crate::verbs::cq::Cq;
use crate::verbs::mr::Mr;
use crate::verbs::qp::MAX_RD_ATOMIC;
use crate::verbs::tables::{Context, Pd, Slots, Tables};
use crate::verbs::Error;

/// Longest command that a device accepts, bytes.
pub const MAX_COMMAND: usize = 4096;

/// Longest region, bytes.
const MAX_MR_SIZE: u64 = 1 << 40;

/// Access flags that a region may have.
const MR_ACCESS: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::ZERO_BASED
    | access::HUGETLB
    | access::RELAXED_ORDERING;

/// Access flags that the specification names, but that this device does not support yet.
const MR_ACCESS_LATER: u32 =
    access::MW_BIND | access::ON_DEMAND | access::FLUSH_GLOBAL | access::FLUSH_PERSISTENT;

/// Executes a command of `rnic`'s VM; returns the response, header and body.
#[must_use]
pub fn execute(rnic: &Arc<Rnic>, command: &[u8]) -> Vec<u8> {
    let header = CommandHeader::get(command);
    let result = dispatch(rnic, &header, command);
    let (status, body) = match result {
        Ok(body) => (status::OK, body),
        Err(error) => {
            let name = opcode::name(header.opcode).unwrap_or("unknown command");
            rnic.complain(format_args!(
                "{name} ({:#x}) refused: {error}",
                header.opcode
            ));
            (error.status(), Vec::new())
        }
    };
    let length = u32::try_from(ResponseHeader::SIZE + body.len()).unwrap_or(u32::MAX);
    let mut response = ResponseHeader {
        status,
        length,
        ..ResponseHeader::default()
    }
    .to_bytes()
    .to_vec();
    response.extend_from_slice(&body);
    response
}

fn dispatch(rnic: &Arc<Rnic>, header: &CommandHeader, command: &[u8]) -> Result<Vec<u8>, Error> {
    let length = usize::try_from(header.length).map_err(|_| Error::Invalid)?;
    let command = command.get(..length).ok_or(Error::Invalid)?;
    let body = command.get(CommandHeader::SIZE..).ok_or(Error::Invalid)?;
    if opcode::name(header.opcode).is_none() {
        return Err(Error::NotSupported);
    }
    if header.reserved != 0 {
        return Err(Error::Invalid);
    }
    match header.opcode {
        opcode::QUERY_DEVICE => no_body(body).map(|()| query_device(rnic)),
        opcode::QUERY_PORT => query_port(rnic, &parse(body)?),
        opcode::SET_GID => set_gid(rnic, &parse(body)?),
        opcode::SET_STATUS_PAGE => set_status_page(rnic, &parse(body)?),
        opcode::CREATE_CONTEXT => create_context(rnic, &parse(body)?),
        opcode::DESTROY_CONTEXT => destroy_context(rnic, parse_handle(body)?),
        opcode::CREATE_PD => no_body(body).and_then(|()| create_pd(rnic)),
        opcode::DESTROY_PD => destroy_pd(rnic, parse_handle(body)?),
        opcode::REG_MR => reg_mr(rnic, &parse(body)?),
        opcode::DEREG_MR => dereg_mr(rnic, parse_handle(body)?),
        opcode::CREATE_CQ => create_cq(rnic, &parse(body)?),
        opcode::DESTROY_CQ => destroy_cq(rnic, parse_handle(body)?),
        opcode::CREATE_QP => queue_pair::create(rnic, &parse(body)?),
        opcode::MODIFY_QP => queue_pair::modify(rnic, &parse(body)?),
        opcode::QUERY_QP => queue_pair::query(rnic, parse_handle(body)?),
        opcode::DESTROY_QP => queue_pair::destroy(rnic, parse_handle(body)?),
        opcode::CREATE_SRQ => srq::create(rnic, &parse(body)?),
        opcode::MODIFY_SRQ => srq::modify(rnic, &parse(body)?),
        opcode::QUERY_SRQ => srq::query(rnic, parse_handle(body)?),
        opcode::DESTROY_SRQ => srq::destroy(rnic, parse_handle(body)?),
        opcode::CREATE_XRCD => no_body(body).and_then(|()| srq::create_domain(rnic)),
        opcode::DESTROY_XRCD => srq::destroy_domain(rnic, parse_handle(body)?),
        opcode::ATTACH_MCAST => queue_pair::attach(rnic, &parse(body)?),
        opcode::DETACH_MCAST => queue_pair::detach(rnic, &parse(body)?),
        _ => Err(Error::NotSupported),
    }
}

/// The body of a command: what is beyond what we know must be zero.
fn parse<T: Layout>(body: &[u8]) -> Result<T, Error> {
    let known = body.get(..T::SIZE).ok_or(Error::Invalid)?;
    if body.iter().skip(T::SIZE).any(|byte| *byte != 0) {
        return Err(Error::Invalid);
    }
    Ok(T::get(known))
}

fn parse_handle(body: &[u8]) -> Result<u32, Error> {
    let Handle { handle, reserved } = parse(body)?;
    zero(reserved == 0)?;
    Ok(handle)
}

fn no_body(body: &[u8]) -> Result<(), Error> {
    zero(body.iter().all(|byte| *byte == 0))
}

/// Reserved fields must be zero, and whatever else must hold of a value.
fn zero(holds: bool) -> Result<(), Error> {
    if holds {
        Ok(())
    } else {
        Err(Error::Invalid)
    }
}

fn encode<const N: usize>(bytes: [u8; N]) -> Vec<u8> {
    bytes.to_vec()
}

fn handle_response(handle: u32) -> Vec<u8> {
    encode(
        HandleResponse {
            handle,
            ..HandleResponse::default()
        }
        .to_bytes(),
    )
}

fn query_device(rnic: &Rnic) -> Vec<u8> {
    let limits = &rnic.settings.limits;
    let part = |text: &str| text.parse::<u64>().unwrap_or(0);
    let response = QueryDeviceResponse {
        node_guid: rnic.config().node_guid,
        fw_ver: part(env!("CARGO_PKG_VERSION_MAJOR")) << 32
            | part(env!("CARGO_PKG_VERSION_MINOR")) << 16
            | part(env!("CARGO_PKG_VERSION_PATCH")),
        max_mr_size: MAX_MR_SIZE,
        page_size_cap: 0xffff_f000,
        max_context: limits.contexts,
        max_qp: limits.qps,
        max_qp_wr: MAX_WQ_ENTRIES,
        max_sge: MAX_SGE,
        max_sge_rd: MAX_SGE,
        max_inline: MAX_INLINE,
        max_cq: limits.cqs,
        max_cqe: MAX_CQ_ENTRIES,
        max_mr: limits.mrs,
        max_pd: limits.pds,
        max_qp_rd_atom: u32::from(MAX_RD_ATOMIC),
        max_qp_init_rd_atom: u32::from(MAX_RD_ATOMIC),
        max_res_rd_atom: limits.qps.saturating_mul(u32::from(MAX_RD_ATOMIC)),
        gid_table_len: GID_TABLE_LEN as u32,
        pkey_table_len: 1,
        local_ca_ack_delay: 0,
        max_srq: if rnic.accepted(feature::SRQ) {
            limits.srqs
        } else {
            0
        },
        max_srq_wr: if rnic.accepted(feature::SRQ) {
            MAX_WQ_ENTRIES
        } else {
            0
        },
        max_srq_sge: if rnic.accepted(feature::SRQ) {
            MAX_SGE
        } else {
            0
        },
        max_ah: if rnic.accepted(feature::UD) {
            u32::MAX >> 1
        } else {
            0
        },
        max_mcast_grp: if rnic.accepted(feature::UD) {
            limits.multicast
        } else {
            0
        },
        max_mcast_qp_attach: if rnic.accepted(feature::UD) {
            limits.multicast
        } else {
            0
        },
        ..QueryDeviceResponse::default()
    };
    encode(response.to_bytes())
}

fn query_port(rnic: &Rnic, body: &QueryPort) -> Result<Vec<u8>, Error> {
    zero(body.port_num == 1 && body.reserved == [0; 7])?;
    let totals = rnic.totals();
    let response = QueryPortResponse {
        state: 4,
        phys_state: 5,
        max_mtu: mtu::MTU_4096,
        active_mtu: mtu::MTU_4096,
        active_width: 2,
        active_speed: 128,
        max_msg_sz: MAX_MESSAGE as u32,
        tx_bytes: totals.tx_bytes,
        tx_messages: totals.tx_messages,
        rx_bytes: totals.rx_bytes,
        rx_messages: totals.rx_messages,
        rnr_naks: totals.rnr_naks,
        retries: totals.retries,
        errors: totals.errors,
        qkey_viol_cntr: totals.qkey_violations as u32,
        ..QueryPortResponse::default()
    };
    Ok(encode(response.to_bytes()))
}

fn set_gid(rnic: &Arc<Rnic>, body: &SetGid) -> Result<Vec<u8>, Error> {
    zero(body.port_num == 1 && body.reserved == [0; 12])?;
    zero(body.gid_type == gid_type::ROCE_V1 || body.gid_type == gid_type::ROCE_V2)?;
    let mut tables = rnic.tables_mut();
    let entry = tables
        .gids
        .get_mut(usize::from(body.index))
        .ok_or(Error::Invalid)?;
    let new = (body.gid != [0; 16]).then_some(body.gid);
    let old = *entry;
    if old == new {
        return Ok(Vec::new());
    }
    if let Some(gid) = new {
        if !rnic.ports().claim(gid, rnic) {
            return Err(Error::Busy);
        }
    }
    *entry = new;
    if let Some(gid) = old {
        if !tables.gids.contains(&Some(gid)) {
            rnic.ports().release(gid, rnic);
        }
    }
    Ok(Vec::new())
}

fn set_status_page(rnic: &Arc<Rnic>, body: &SetStatusPage) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    tables.status_page = if body.addr == 0 {
        None
    } else {
        let memory = tables.memory.as_ref().ok_or(Error::Fault)?;
        Some(Pages::resolve(memory, vec![body.addr], 12)?)
    };
    announce_all(&tables, rnic.workers.len(), worker_status::SLEEPING);
    drop(tables);
    for worker in &rnic.workers {
        worker.announce_again();
    }
    Ok(Vec::new())
}

/// Resolves a page list, within the VM's share of our memory.
fn resolve(rnic: &Rnic, list: &PageList) -> Result<Pages, Error> {
    let (memory, footprint) = {
        let tables = rnic.tables();
        (tables.memory.clone().ok_or(Error::Fault)?, tables.footprint)
    };
    let left = rnic.settings.limits.footprint.saturating_sub(footprint);
    if u64::from(list.count).saturating_mul(16) > left {
        return Err(Error::NoMemory);
    }
    let guest = read_page_list(&memory, list, list.count)?;
    Ok(Pages::resolve(&memory, guest, list.page_shift)?)
}

/// The same for rings and doorbell memory: in pages of 4 KiB.
fn resolve_ring(rnic: &Rnic, list: &PageList) -> Result<Pages, Error> {
    zero(1u64.checked_shl(u32::from(list.page_shift)) == Some(PAGE_SIZE))?;
    resolve(rnic, list)
}

impl Tables {
    /// Takes `pages` into account. The memory table may have changed since they were resolved.
    fn adopt(&mut self, pages: Pages) -> Result<Pages, Error> {
        let pages = match &self.memory {
            Some(memory) if pages.resolved_in(memory) => pages,
            Some(memory) => Some(pages.rebase(Some(memory)))
                .filter(|pages| !pages.lost())
                .ok_or(Error::Fault)?,
            None => return Err(Error::Fault),
        };
        self.footprint = self.footprint.saturating_add(pages.footprint());
        Ok(pages)
    }

    fn release(&mut self, footprint: u64) {
        self.footprint = self.footprint.saturating_sub(footprint);
    }
}

fn create_context(rnic: &Arc<Rnic>, body: &CreateContext) -> Result<Vec<u8>, Error> {
    zero(body.reserved == 0)?;
    let workers = rnic.workers.len();
    zero(u64::from(body.doorbell.count) == workers as u64 * u64::from(BLOCK_PAGES))?;
    let pages = resolve_ring(rnic, &body.doorbell)?;
    let mut tables = rnic.tables_mut();
    let doorbell = tables.adopt(pages)?;
    let footprint = doorbell.footprint();
    let handle = tables.contexts.insert_with(|_| {
        let workers = (0..workers).map(|_| Slots::default()).collect();
        Ok(Context {
            doorbell,
            workers,
            users: 0,
            footprint,
        })
    });
    handle
        .inspect_err(|_| tables.release(footprint))
        .map(handle_response)
}

fn destroy_context(rnic: &Arc<Rnic>, handle: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    if tables.contexts.get(handle).ok_or(Error::NotFound)?.users != 0 {
        return Err(Error::Busy);
    }
    if let Some(context) = tables.contexts.remove(handle) {
        tables.release(context.footprint);
    }
    Ok(Vec::new())
}

fn create_pd(rnic: &Arc<Rnic>) -> Result<Vec<u8>, Error> {
    rnic.tables_mut()
        .pds
        .insert_with(|_| Ok(Pd::default()))
        .map(handle_response)
}

fn destroy_pd(rnic: &Arc<Rnic>, handle: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    if tables.pds.get(handle).ok_or(Error::NotFound)?.users != 0 {
        return Err(Error::Busy);
    }
    tables.pds.remove(handle);
    Ok(Vec::new())
}

fn reg_mr(rnic: &Arc<Rnic>, body: &RegMr) -> Result<Vec<u8>, Error> {
    zero(body.reserved == [0; 7] && (1..=MAX_MR_SIZE).contains(&body.length))?;
    zero(body.access & !(MR_ACCESS | MR_ACCESS_LATER) == 0)?;
    if body.access & MR_ACCESS_LATER != 0 {
        return Err(Error::NotSupported);
    }
    // Remote writes and atomics need local write (InfiniBand architecture specification, volume 1, 10.6.3.1).
    let writes = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
    zero(body.access & writes == 0 || body.access & access::LOCAL_WRITE != 0)?;
    let zero_based = body.access & access::ZERO_BASED != 0;
    let iova = if zero_based { 0 } else { body.iova };
    zero(iova.checked_add(body.length - 1).is_some())?;
    let end = body.offset.checked_add(body.length).ok_or(Error::Invalid)?;
    zero((12..=31).contains(&body.pages.page_shift))?;
    zero(body.offset >> body.pages.page_shift == 0)?;
    zero(u64::from(body.pages.count) == end.div_ceil(1 << body.pages.page_shift))?;
    if rnic.tables().pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    let pages = resolve(rnic, &body.pages)?;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    if tables.pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    let pages = tables.adopt(pages)?;
    let footprint = pages.footprint();
    let index = tables.mrs.insert_with(|index| {
        let RegMr {
            pd,
            access,
            length,
            offset,
            key,
            ..
        } = *body;
        let key = index << 8 | u32::from(key);
        Ok(Arc::new(Mr {
            key,
            pd,
            access,
            iova,
            length,
            offset,
            footprint,
            pages,
        }))
    });
    let index = match index {
        Ok(index) => index,
        Err(error) => {
            tables.release(footprint);
            return Err(error);
        }
    };
    if let Some(pd) = tables.pds.get_mut(body.pd) {
        pd.users += 1;
    }
    let key = index << 8 | u32::from(body.key);
    Ok(encode(
        RegMrResponse {
            lkey: key,
            rkey: key,
        }
        .to_bytes(),
    ))
}

fn dereg_mr(rnic: &Arc<Rnic>, key: u32) -> Result<Vec<u8>, Error> {
    // The write lock is the guarantee: whoever used the key holds the lock for reading until its access has ended.
    let mut tables = rnic.tables_mut();
    if tables.mrs.get(key >> 8).ok_or(Error::NotFound)?.key != key {
        return Err(Error::NotFound);
    }
    if let Some(mr) = tables.mrs.remove(key >> 8) {
        tables.release(mr.footprint);
        if let Some(pd) = tables.pds.get_mut(mr.pd) {
            pd.users = pd.users.saturating_sub(1);
        }
    }
    Ok(Vec::new())
}

/// Checks that a ring lies within `len` bytes, behind the record of `record` bytes, and is aligned to its stride.
fn check_ring(
    offset: u32,
    stride: u32,
    entries: u32,
    record: usize,
    len: u64,
) -> Result<(), Error> {
    let size = u64::from(stride)
        .checked_mul(u64::from(entries))
        .ok_or(Error::Invalid)?;
    let end = u64::from(offset).checked_add(size).ok_or(Error::Invalid)?;
    zero(offset as usize >= record && offset % stride.max(1) == 0 && end <= len)
}

fn create_cq(rnic: &Arc<Rnic>, body: &CreateCq) -> Result<Vec<u8>, Error> {
    zero(body.flags == 0 && body.reserved == 0)?;
    zero(body.entries.is_power_of_two() && body.entries <= MAX_CQ_ENTRIES)?;
    zero(
        usize::from(body.stride) == Cqe::SIZE && body.comp_vector < rnic.settings.completion_queues,
    )?;
    let len = u64::from(body.buffer.count).saturating_mul(PAGE_SIZE);
    check_ring(
        body.ring_offset,
        u32::from(body.stride),
        body.entries,
        CqRecord::SIZE,
        len,
    )?;
    let pages = resolve_ring(rnic, &body.buffer)?;
    let mut tables = rnic.tables_mut();
    let pages = tables.adopt(pages)?;
    let footprint = pages.footprint();
    let number = tables.cqs.insert_with(|number| {
        Ok(Arc::new(Cq::new(
            number,
            body.comp_vector,
            body.entries,
            u64::from(body.ring_offset),
            pages,
        )))
    });
    number
        .inspect_err(|_| tables.release(footprint))
        .map(handle_response)
}

fn destroy_cq(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    if tables
        .cqs
        .get(number)
        .ok_or(Error::NotFound)?
        .users
        .load(Ordering::Relaxed)
        != 0
    {
        return Err(Error::Busy);
    }
    if let Some(cq) = tables.cqs.remove(number) {
        tables.release(cq.footprint);
        if let Some(sink) = &tables.sink {
            sink.forget_cq(cq.vector, number);
        }
    }
    Ok(Vec::new())
}
