// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands: decode, do, encode (specification: "Control commands").
//!
//! The command is a private copy already. Everything in it is checked here, before any object
//! changes.
mod cq;
mod memory;
mod queue_pair;
mod srq;

use std::sync::Arc;

use virtio_rdma_spec::command::{
    gid_type, opcode, status, CommandHeader, CreateContext, Handle, HandleResponse, PageList,
    QueryDeviceResponse, QueryPort, QueryPortResponse, ResponseHeader, SetGid, SetPortState,
    SetStatusPage,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::doorbell::{worker_status, BLOCK_PAGES};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{MAX_CQ_ENTRIES, MAX_INLINE, MAX_SGE, MAX_WQ_ENTRIES};
use virtio_rdma_spec::PAGE_SIZE;

use crate::engine::tables::{Context, Pd, Slots, Tables};
use crate::fabric::Fabric;
use crate::limits::{GID_TABLE_LEN, MAX_MESSAGE, MAX_RD_ATOMIC};
use crate::memory::Pages;
use crate::rnic::Rnic;
use crate::verbs::cq::{L2Source, MAX_MODERATION_COUNT, MAX_MODERATION_PERIOD};
use crate::verbs::keys::NULL_LKEY;
use crate::verbs::mr::MAX_MR_SIZE;
use crate::verbs::Error;

/// The highest VLAN id, and what stands for none.
const MAX_VLAN: u16 = 4094;
const NO_VLAN: u16 = 0xffff;

/// Longest command that a device accepts, bytes.
pub const MAX_COMMAND: usize = 4096;

/// Executes a command of `rnic`'s VM; returns the response, header and body.
#[must_use]
pub fn execute(rnic: &Arc<Rnic>, command: &[u8]) -> Vec<u8> {
    let header = CommandHeader::get(command);
    let result = dispatch(rnic, &header, command);
    let (status, body) = match result {
        Ok(body) => (status::OK, body),
        Err(error) => {
            let name = opcode::name(header.opcode).unwrap_or("unknown command");
            rnic.vm().warn(format_args!(
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
        opcode::SET_PORT_STATE => set_port_state(rnic, &parse(body)?),
        opcode::SET_STATUS_PAGE => set_status_page(rnic, &parse(body)?),
        opcode::QUERY_CLOCK => no_body(body).and_then(|()| cq::query_clock(rnic)),
        opcode::CREATE_CONTEXT => create_context(rnic, &parse(body)?),
        opcode::DESTROY_CONTEXT => destroy_context(rnic, parse_handle(body)?),
        opcode::CREATE_PD => no_body(body).and_then(|()| create_pd(rnic)),
        opcode::DESTROY_PD => destroy_pd(rnic, parse_handle(body)?),
        opcode::REG_MR => memory::register(rnic, &parse(body)?),
        opcode::DEREG_MR => memory::deregister(rnic, parse_handle(body)?),
        opcode::REREG_MR => memory::reregister(rnic, &parse(body)?),
        opcode::ALLOC_MR => memory::allocate_region(rnic, &parse(body)?),
        opcode::ALLOC_MW => memory::allocate_window(rnic, &parse(body)?),
        opcode::DEALLOC_MW => memory::deallocate_window(rnic, parse_handle(body)?),
        opcode::CREATE_CQ => cq::create(rnic, &parse(body)?),
        opcode::DESTROY_CQ => cq::destroy(rnic, parse_handle(body)?),
        opcode::RESIZE_CQ => cq::resize(rnic, &parse(body)?),
        opcode::MODIFY_CQ => cq::modify(rnic, &parse(body)?),
        opcode::CREATE_QP => queue_pair::create(rnic, &parse(body)?),
        opcode::MODIFY_QP => queue_pair::modify(rnic, &parse(body)?),
        opcode::QUERY_QP => queue_pair::query(rnic, parse_handle(body)?),
        opcode::DESTROY_QP => queue_pair::destroy(rnic, parse_handle(body)?),
        opcode::CREATE_SRQ => srq::create(rnic, &parse(body)?),
        opcode::MODIFY_SRQ => srq::modify(rnic, &parse(body)?),
        opcode::QUERY_SRQ => srq::query(rnic, parse_handle(body)?),
        opcode::DESTROY_SRQ => srq::destroy(rnic, parse_handle(body)?),
        opcode::RESIZE_SRQ => srq::resize(rnic, &parse(body)?),
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

/// What a command needs must have been accepted.
fn needs(rnic: &Rnic, feature: u32) -> Result<(), Error> {
    if rnic.vm().accepted(feature) {
        Ok(())
    } else {
        Err(Error::NotSupported)
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
        max_mw: limits.mws,
        max_fast_reg_pages: memory::MAX_FAST_REG_PAGES,
        max_pd: limits.pds,
        max_qp_rd_atom: u32::from(MAX_RD_ATOMIC),
        max_qp_init_rd_atom: u32::from(MAX_RD_ATOMIC),
        max_res_rd_atom: limits.qps.saturating_mul(u32::from(MAX_RD_ATOMIC)),
        gid_table_len: GID_TABLE_LEN as u32,
        pkey_table_len: 1,
        local_ca_ack_delay: 0,
        max_srq: limits.srqs,
        max_srq_wr: MAX_WQ_ENTRIES,
        max_srq_sge: MAX_SGE,
        max_ah: u32::MAX >> 1,
        max_mcast_grp: limits.multicast,
        max_mcast_qp_attach: limits.multicast,
        max_xrcd: limits.xrcds,
        null_lkey: NULL_LKEY,
        max_cq_moderation_count: MAX_MODERATION_COUNT,
        max_cq_moderation_period: MAX_MODERATION_PERIOD,
        ..QueryDeviceResponse::default()
    };
    encode(response.to_bytes())
}

fn query_port(rnic: &Rnic, body: &QueryPort) -> Result<Vec<u8>, Error> {
    zero(body.port_num == 1 && body.reserved == [0; 7])?;
    let totals = rnic.vm().totals();
    // As in verbs: active and link up, or down and disabled.
    let port = rnic.fabric().port(rnic.vm());
    let (state, phys_state) = if port.up { (4, 5) } else { (1, 3) };
    let response = QueryPortResponse {
        state,
        phys_state,
        max_mtu: port.max_mtu,
        active_mtu: port.active_mtu,
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
    zero(body.vlan <= MAX_VLAN || body.vlan == NO_VLAN)?;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let index = usize::from(body.index);
    let entry = tables.gids.get_mut(index).ok_or(Error::Invalid)?;
    let source = tables.sources.get_mut(index).ok_or(Error::Invalid)?;
    let new = (body.gid != [0; 16]).then_some(body.gid);
    let old = *entry;
    let new_source = L2Source {
        mac: body.mac,
        vlan: body.vlan,
    };
    if old == new {
        *source = new_source;
        return Ok(Vec::new());
    }
    if let Some(gid) = new {
        if !rnic.registry().claim(gid, rnic.vm()) {
            return Err(Error::Busy);
        }
    }
    *entry = new;
    *source = new_source;
    if let Some(gid) = old {
        if !tables.gids.contains(&Some(gid)) {
            rnic.registry().release(gid, rnic.vm());
        }
    }
    Ok(Vec::new())
}

fn set_port_state(rnic: &Arc<Rnic>, body: &SetPortState) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::PORT_STATE)?;
    zero(body.port_num == 1 && body.up <= 1 && body.reserved == [0; 6])?;
    rnic.set_port_state(body.up == 1);
    Ok(Vec::new())
}

fn set_status_page(rnic: &Arc<Rnic>, body: &SetStatusPage) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    tables.status_page = if body.addr == 0 {
        None
    } else {
        let memory = tables.memory.as_ref().ok_or(Error::Fault)?;
        Some(Pages::resolve(memory, &[body.addr], 12)?)
    };
    tables.announce_all(rnic.workers.len(), worker_status::SLEEPING);
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
        let memory = tables.memory.clone().ok_or(Error::Fault)?;
        (memory, tables.footprint.bytes())
    };
    let left = rnic.settings.limits.footprint.saturating_sub(footprint);
    if u64::from(list.count).saturating_mul(Pages::PAGE_FOOTPRINT) > left {
        return Err(Error::NoMemory);
    }
    Ok(Pages::read(&memory, list)?)
}

/// The same for rings and doorbell memory: in pages of 4 KiB.
fn resolve_ring(rnic: &Rnic, list: &PageList) -> Result<Pages, Error> {
    zero(1u64.checked_shl(u32::from(list.page_shift)) == Some(PAGE_SIZE))?;
    resolve(rnic, list)
}

impl Tables {
    /// `pages`, or the same resolved anew: the memory table may have changed since they were.
    fn present(&self, pages: Pages) -> Result<Pages, Error> {
        match &self.memory {
            Some(memory) if pages.resolved_in(memory) => Ok(pages),
            Some(memory) => Some(pages.rebase(Some(memory)))
                .filter(|pages| !pages.lost())
                .ok_or(Error::Fault),
            None => Err(Error::Fault),
        }
    }

    /// The same, and takes them into account.
    fn adopt(&self, pages: Pages) -> Result<Pages, Error> {
        let pages = self.present(pages)?;
        self.footprint.add(pages.footprint());
        Ok(pages)
    }

    fn release(&self, footprint: u64) {
        self.footprint.release(footprint);
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

/// Checks that a ring lies within `len` bytes, behind the record of `record` bytes, and is aligned
/// to its stride.
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
