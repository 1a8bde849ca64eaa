// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Control commands: decode, do, encode (specification: "Control commands").
//!
//! The command is a private copy already. Everything in it is checked here, before any object
//! changes.
#[cfg(test)]
mod account;
mod cq;
#[cfg(test)]
pub(crate) mod fixture;
mod iwarp;
mod memory;
mod queue_pair;
mod srq;

use std::sync::Arc;

use virtio_rdma_spec::command::{
    gid_type, opcode, status, CommandHeader, CreateContext, Handle, HandleResponse, PageList,
    QueryCountersResponse, QueryDeviceResponse, QueryPort, QueryPortResponse, ResponseHeader,
    SetGid, SetPortState, SetStatusPage,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::doorbell::{worker_status, BLOCK_PAGES};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{MAX_CQ_ENTRIES, MAX_INLINE, MAX_SGE, MAX_WQ_ENTRIES};
use virtio_rdma_spec::PAGE_SIZE;

use crate::engine::tables::{Context, Pd, Slots, Tables};
use crate::engine::vm::PacketEvent;
use crate::fabric::Fabric;
use crate::footprint::listed;
use crate::limits::{GID_TABLE_LEN, MAX_MESSAGE, MAX_RD_ATOMIC};
use crate::memory::Pages;
use crate::probes;
use crate::rnic::Rnic;
use crate::verbs::cq::{L2Source, MAX_MODERATION_COUNT, MAX_MODERATION_PERIOD};
use crate::verbs::gid_policy::{MAX_VLAN, NO_VLAN};
use crate::verbs::keys::NULL_LKEY;
use crate::verbs::mr::MAX_MR_SIZE;
use crate::verbs::Error;

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
    probes::command(rnic.vm().name(), header.opcode, status);
    let length = ResponseHeader::SIZE + body.len();
    let header = ResponseHeader {
        status,
        length: u32::try_from(length).unwrap_or(u32::MAX),
        ..ResponseHeader::default()
    };
    let mut response = Vec::with_capacity(length);
    response.extend_from_slice(&header.to_bytes());
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
        opcode::QUERY_COUNTERS => query_counters(rnic, &parse(body)?),
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
        opcode::IW_CONNECT => iwarp::connect(rnic, &parse(body)?),
        opcode::IW_ACCEPT => iwarp::accept(rnic, &parse(body)?),
        opcode::IW_REJECT => iwarp::reject(rnic, &parse(body)?),
        opcode::IW_LISTEN => iwarp::listen(rnic, &parse(body)?),
        opcode::IW_DESTROY_LISTEN => iwarp::destroy_listen(rnic, parse_handle(body)?),
        opcode::IW_NEXT_EVENT => no_body(body).and_then(|()| iwarp::next_event(rnic)),
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
    if rnic.iwarp().is_some() {
        // What it does not offer, and a table that the driver makes up.
        let without = QueryDeviceResponse {
            gid_table_len: 1,
            max_ah: 0,
            max_mcast_grp: 0,
            max_mcast_qp_attach: 0,
            max_xrcd: 0,
            ..response
        };
        return encode(without.to_bytes());
    }
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
        bad_pkey_cntr: totals.pkey_violations as u32,
        qkey_viol_cntr: totals.qkey_violations as u32,
        ..QueryPortResponse::default()
    };
    Ok(encode(response.to_bytes()))
}

fn set_gid(rnic: &Arc<Rnic>, body: &SetGid) -> Result<Vec<u8>, Error> {
    if rnic.iwarp().is_some() {
        // The table is the driver's to make up.
        return Err(Error::NotSupported);
    }
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
    if let Some(gid) = new {
        rnic.judge_gid(gid, new_source)?;
    }
    if old == new {
        *source = new_source;
        return Ok(Vec::new());
    }
    if let Some(gid) = new {
        if !rnic.registry().claim(gid, rnic.vm()) {
            return Err(Error::GidTaken(gid));
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

fn query_counters(rnic: &Rnic, body: &QueryPort) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::COUNTERS)?;
    zero(body.port_num == 1 && body.reserved == [0; 7])?;
    let count = |event| rnic.vm().packet_events(event);
    let response = QueryCountersResponse {
        out_of_sequence: count(PacketEvent::OutOfSequence),
        duplicate_request: count(PacketEvent::Duplicate),
        out_of_buffer: count(PacketEvent::NoReceive),
        packet_seq_err: count(PacketEvent::Nak),
        implied_nak_seq_err: count(PacketEvent::ImpliedNak),
        local_ack_timeout_err: count(PacketEvent::TimeOut),
        rnr_nak_retry_err: count(PacketEvent::RnrNak),
        retrans_pkts: count(PacketEvent::SentAgain),
        np_ecn_marked_roce_packets: count(PacketEvent::Marked),
        np_cnp_sent: count(PacketEvent::Notified),
        rp_cnp_handled: count(PacketEvent::Slowed),
        ..QueryCountersResponse::default()
    };
    Ok(encode(response.to_bytes()))
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

/// Resolves a page list, if the VM's account has room for it.
fn resolve(rnic: &Rnic, list: &PageList) -> Result<Pages, Error> {
    let memory = rnic.tables().memory.clone().ok_or(Error::Fault)?;
    Ok(Pages::read(&memory, list, rnic.vm().footprint())?)
}

/// The same for rings and doorbell memory: in pages of 4 KiB.
fn resolve_ring(rnic: &Rnic, list: &PageList) -> Result<Pages, Error> {
    zero(1u64.checked_shl(u32::from(list.page_shift)) == Some(PAGE_SIZE))?;
    resolve(rnic, list)
}

impl Tables {
    /// `pages`, or the same resolved anew: the memory table may have changed since they were.
    fn present(&self, mut pages: Pages) -> Result<Pages, Error> {
        let memory = self.memory.as_ref().ok_or(Error::Fault)?;
        if !pages.resolved_in(memory) {
            pages.rebase(Some(memory));
        }
        if pages.lost() {
            return Err(Error::Fault);
        }
        Ok(pages)
    }
}

fn create_context(rnic: &Arc<Rnic>, body: &CreateContext) -> Result<Vec<u8>, Error> {
    zero(body.reserved == 0)?;
    let workers = rnic.workers.len();
    zero(u64::from(body.doorbell.count) == workers as u64 * u64::from(BLOCK_PAGES))?;
    let pages = resolve_ring(rnic, &body.doorbell)?;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let doorbell = tables.present(pages)?;
    let account = &tables.footprint;
    let handle = tables.contexts.insert_with(|_| {
        Ok(Context {
            doorbell,
            share: account.share(listed::<Slots>(workers))?,
            workers: (0..workers).map(|_| Slots::within(account)).collect(),
            users: 0,
        })
    });
    handle.map(handle_response)
}

fn destroy_context(rnic: &Arc<Rnic>, handle: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    if tables.contexts.get(handle).ok_or(Error::NotFound)?.users != 0 {
        return Err(Error::Busy);
    }
    tables.contexts.remove(handle);
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

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::status::{
        EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM, EOPNOTSUPP, EPERM,
    };
    use virtio_rdma_spec::event::event_type;

    use super::fixture::{name, page, Host, TestVm, LIMITS, PAGES, WORKERS};
    use super::*;
    use crate::rnic::RnicSettings;
    use crate::verbs::gid_policy::{link_local, of_address, GidPolicy, Gids};

    const RC: u64 = 1 << feature::RC;

    // D-CMD-004, D-CMD-005, D-CMD-008.
    #[test]
    fn a_command_is_as_long_as_it_says_and_zero_beyond_what_is_known() {
        let vm = Host::new().vm(RC);
        let command = |opcode: u16, reserved: u16, length: u32, body: &[u8]| {
            let header = CommandHeader {
                opcode,
                reserved,
                length,
            };
            vm.send(&[&header.to_bytes()[..], body].concat())
        };
        let pd = opcode::CREATE_PD;
        for length in [0, 7, 9, u32::MAX] {
            assert_eq!(command(pd, 0, length, &[]), Err(EINVAL), "{length}");
        }
        for short in 0..CommandHeader::SIZE {
            let bytes = CommandHeader {
                opcode: opcode::QUERY_DEVICE,
                length: 8,
                ..CommandHeader::default()
            };
            assert_eq!(vm.send(&bytes.to_bytes()[..short]), Err(EINVAL));
        }
        assert_eq!(command(pd, 1, 8, &[]), Err(EINVAL));
        assert_eq!(command(pd, 0, 11, &[0, 0, 1]), Err(EINVAL));
        let handle = [9, 0, 0, 0, 0, 0, 0, 0];
        let destroy = opcode::DESTROY_PD;
        assert_eq!(command(destroy, 0, 15, &handle), Err(EINVAL));
        assert_eq!(
            command(destroy, 0, 17, &[&handle[..], &[1]].concat()),
            Err(EINVAL)
        );
        assert_eq!(
            command(destroy, 0, 16, &[9, 0, 0, 0, 1, 0, 0, 0]),
            Err(EINVAL)
        );
        assert_eq!(
            command(destroy, 0, 17, &[&handle[..], &[0]].concat()),
            Err(ENOENT)
        );
        // What is behind the length is another's affair.
        assert_eq!(
            command(destroy, 0, 16, &[&handle[..], &[1]].concat()),
            Err(ENOENT)
        );
        for unknown in [0, 0x0f, 0x26, 0x54, 0xffff] {
            assert_eq!(command(unknown, 1, 8, &[1]), Err(EOPNOTSUPP), "{unknown}");
        }
        assert_eq!(vm.rnic.tables().pds.len(), 0, "nothing was executed");
    }

    /// Every opcode is refused without the feature that it belongs to, whatever its body is.
    // D-FEAT-004.
    #[test]
    fn commands_of_features_that_were_not_accepted_are_unknown() {
        let vm = Host::new().vm(RC);
        for (opcode, size) in [
            (opcode::QUERY_CLOCK, 0),
            (opcode::SET_PORT_STATE, 8),
            (opcode::QUERY_COUNTERS, 8),
            (opcode::CREATE_XRCD, 0),
            (opcode::DESTROY_XRCD, 8),
            (opcode::REREG_MR, 72),
            (opcode::ALLOC_MR, 16),
            (opcode::ALLOC_MW, 16),
            (opcode::RESIZE_CQ, 40),
            (opcode::MODIFY_CQ, 16),
            (opcode::CREATE_SRQ, 64),
            (opcode::MODIFY_SRQ, 16),
            (opcode::QUERY_SRQ, 8),
            (opcode::DESTROY_SRQ, 8),
            (opcode::RESIZE_SRQ, 48),
            (opcode::ATTACH_MCAST, 24),
            (opcode::DETACH_MCAST, 24),
        ] {
            let refused = vm.command(opcode, &vec![0; size]).map_err(name);
            assert_eq!(refused, Err(name(EOPNOTSUPP)), "{:?}", opcode::name(opcode));
        }
    }

    #[test]
    fn the_device_tells_its_limits() {
        let vm = Host::new().vm(RC);
        let told: QueryDeviceResponse = vm.ask(opcode::QUERY_DEVICE, &[0u8; 0]).unwrap();
        assert_eq!(told.node_guid, vm.rnic.config().node_guid);
        assert_eq!(
            [told.max_pd, told.max_mr, told.max_cq, told.max_qp],
            [LIMITS.pds, LIMITS.mrs, LIMITS.cqs, LIMITS.qps]
        );
        assert_eq!(
            [told.max_srq, told.max_mw, told.max_xrcd, told.max_context],
            [LIMITS.srqs, LIMITS.mws, LIMITS.xrcds, LIMITS.contexts]
        );
        assert_eq!((told.pkey_table_len, told.max_qp_wr), (1, MAX_WQ_ENTRIES));
        assert_eq!(vm.command(opcode::QUERY_DEVICE, &[1]), Err(EINVAL));
    }

    #[test]
    fn counters_of_packets_are_told() {
        let vm = Host::new().vm(RC | 1 << feature::COUNTERS);
        let body = QueryPort {
            port_num: 1,
            ..QueryPort::default()
        };
        let ask = || -> QueryCountersResponse {
            vm.ask(opcode::QUERY_COUNTERS, &body.to_bytes()).unwrap()
        };
        assert_eq!(ask(), QueryCountersResponse::default());
        vm.rnic.vm().count_packet(0, PacketEvent::SentAgain);
        vm.rnic.vm().count_packet(0, PacketEvent::Slowed);
        let expected = QueryCountersResponse {
            retrans_pkts: 1,
            rp_cnp_handled: 1,
            ..QueryCountersResponse::default()
        };
        assert_eq!(ask(), expected);
        let refused = vm.command(opcode::QUERY_COUNTERS, &[2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(refused, Err(EINVAL));
    }

    // D-QPORT-001.
    #[test]
    fn a_port_is_up_while_driver_and_link_have_it_up() {
        let host = Host::new();
        let vm = host.vm(RC | 1 << feature::PORT_STATE);
        let query = |port_num| {
            let body = QueryPort {
                port_num,
                reserved: [0; 7],
            };
            vm.ask::<_, QueryPortResponse>(opcode::QUERY_PORT, &body)
        };
        let state = || {
            let port = query(1).unwrap();
            (port.state, port.phys_state)
        };
        assert_eq!(query(0), Err(EINVAL));
        assert_eq!(query(2), Err(EINVAL));
        assert_eq!(state(), (4, 5));
        let set = |port_num, up| {
            let body = SetPortState {
                port_num,
                up,
                reserved: [0; 6],
            };
            vm.tell(opcode::SET_PORT_STATE, &body)
        };
        assert_eq!((set(2, 1), set(1, 2)), (Err(EINVAL), Err(EINVAL)));
        set(1, 0).unwrap();
        assert_eq!(state(), (1, 3));
        let link = vm.rnic.settings.link.clone();
        host.adapter.set_link(&link, false);
        set(1, 1).unwrap();
        assert_eq!(state(), (1, 3), "the link is down");
        host.adapter.set_link(&link, true);
        assert_eq!(state(), (4, 5));
        let told = [event_type::PORT_ERR, event_type::PORT_ACTIVE];
        assert_eq!(vm.events.take(), told.map(|event| (event, 1)));
    }

    // D-GID-001, D-CMD-008.
    #[test]
    fn an_entry_of_the_gid_table_is_checked_and_belongs_to_one_vm() {
        let host = Host::new();
        let (a, b) = (host.vm(RC), host.vm(RC));
        let gid = |last| {
            let mut gid = [0xfe; 16];
            gid[15] = last;
            gid
        };
        let good = TestVm::gid_body(gid(1));
        let refused = |change: fn(&mut SetGid)| {
            let mut body = good;
            change(&mut body);
            a.set_gid(&body).map_err(name)
        };
        for change in [
            (|g| g.port_num = 2) as fn(&mut SetGid),
            |g| g.index = GID_TABLE_LEN as u16,
            |g| g.gid_type = 2,
            |g| g.vlan = 4095,
            |g| g.vlan = 0xfffe,
            |g| g.reserved[11] = 1,
        ] {
            assert_eq!(refused(change), Err(name(EINVAL)));
        }
        for vlan in [0, 4094, 0xffff] {
            a.set_gid(&SetGid { vlan, ..good }).unwrap();
        }
        assert_eq!(b.set_gid(&good), Err(EBUSY));
        // Twice in the table: it is given back with the second entry.
        a.set_gid(&SetGid { index: 1, ..good }).unwrap();
        a.set_gid(&TestVm::gid_body([0; 16])).unwrap();
        assert_eq!(b.set_gid(&good), Err(EBUSY));
        a.set_gid(&SetGid {
            index: 1,
            ..TestVm::gid_body(gid(2))
        })
        .unwrap();
        b.set_gid(&good).unwrap();
    }

    fn address(text: &str) -> [u8; 16] {
        of_address(text.parse().unwrap())
    }

    /// Two devices with these policies on a network, and one on another.
    fn devices(policies: [Gids; 2]) -> [RnicSettings; 3] {
        let device = |last, gids, network: &str| RnicSettings {
            mac: [0x52, 0x54, 0, 0, 0, last],
            network: network.to_owned(),
            gid_policy: GidPolicy {
                gids,
                addresses: vec![address(&format!("10.0.0.{last}"))],
                vlans: vec![5],
            },
            ..RnicSettings::default()
        };
        let [a, b] = policies;
        [
            device(1, a, "n"),
            device(2, b, "n"),
            device(3, Gids::Any, "m"),
        ]
    }

    // D-GID-002.
    #[test]
    fn a_vm_has_only_the_gids_that_it_is_allowed() {
        let [one, two, other] = devices([Gids::Mac, Gids::Any]);
        let vm = Host::serving(&[one.clone(), two, other]).vm_with(RC, &one);
        let set = |gid, mac, vlan| {
            let body = SetGid {
                mac,
                vlan,
                ..TestVm::gid_body(gid)
            };
            vm.set_gid(&body).map_err(name)
        };
        let (own, mac) = (link_local(one.mac), one.mac);
        set(own, mac, NO_VLAN).unwrap();
        set(address("10.0.0.1"), mac, NO_VLAN).unwrap();
        set(own, mac, 5).unwrap();
        let entry = || {
            let tables = vm.rnic.tables();
            let source = tables.sources[0];
            (tables.gids[0], source.mac, source.vlan)
        };
        let refused = Err(name(EPERM));
        assert_eq!(set(address("10.0.0.9"), mac, NO_VLAN), refused);
        assert_eq!(set(address("fd00::1"), mac, NO_VLAN), refused);
        assert_eq!(set(own, [2, 0, 0, 0, 0, 9], 5), refused);
        assert_eq!(set(own, [0; 6], 5), refused);
        assert_eq!(set(own, mac, 6), refused);
        // A refused command changes nothing, and what is no VLAN at all is an error of its own.
        assert_eq!(entry(), (Some(own), mac, 5));
        assert_eq!(set(own, mac, 4095), Err(name(EINVAL)));
        // An entry is cleared whatever else the command says.
        set([0; 16], [2, 0, 0, 0, 0, 9], 6).unwrap();
        assert_eq!(entry().0, None);
    }

    // D-GID-002.
    #[test]
    fn gids_of_a_device_are_reserved_whether_or_not_its_vm_is_attached() {
        let [one, two, other] = devices([Gids::Any, Gids::Mac]);
        let host = Host::serving(&[one.clone(), two.clone(), other.clone()]);
        let vm = host.vm_with(RC, &one);
        let set = |gid| vm.set_gid(&TestVm::gid_body(gid)).map_err(name);
        let theirs = [link_local(two.mac), address("10.0.0.2")];
        for gid in theirs {
            assert_eq!(set(gid), Err(name(EPERM)));
        }
        // Of another network, of nobody, and its own; with any source.
        for gid in [
            link_local(other.mac),
            address("10.0.0.3"),
            address("10.0.0.9"),
            address("10.0.0.1"),
            link_local(one.mac),
        ] {
            set(gid).unwrap();
        }
        // The VM that they are reserved for comes, has them, and goes.
        let owner = host.vm_with(RC, &two);
        for gid in theirs {
            let body = TestVm::gid_body(gid);
            owner
                .set_gid(&SetGid {
                    mac: two.mac,
                    ..body
                })
                .unwrap();
            assert_eq!(set(gid), Err(name(EPERM)));
        }
        owner.rnic.detach();
        for gid in theirs {
            assert_eq!(set(gid), Err(name(EPERM)));
        }
    }

    /// An address that two devices list is for both: for the VM that sets it first.
    #[test]
    fn an_address_may_be_listed_for_more_than_one_device() {
        let [mut one, mut two, _] = devices([Gids::Mac, Gids::Mac]);
        let shared = address("fd00::5");
        one.gid_policy.addresses.push(shared);
        two.gid_policy.addresses.push(shared);
        let host = Host::serving(&[one.clone(), two.clone()]);
        let [first, second] = [one, two].map(|device| {
            let mac = device.mac;
            let body = TestVm::gid_body(shared);
            (host.vm_with(RC, &device), SetGid { mac, ..body })
        });
        first.0.set_gid(&first.1).unwrap();
        assert_eq!(second.0.set_gid(&second.1), Err(EBUSY));
        first.0.rnic.detach();
        second.0.set_gid(&second.1).unwrap();
    }

    // D-STS-001.
    #[test]
    fn the_status_page_has_the_words_of_all_workers() {
        let vm = Host::new().vm(RC);
        let set = |addr| vm.tell(opcode::SET_STATUS_PAGE, &SetStatusPage { addr });
        assert_eq!(set(8), Err(EINVAL));
        assert_eq!(set(2 * PAGES * PAGE_SIZE), Err(EFAULT));
        let words = [7 << 32 | 7u64; 512];
        vm.write(3, &words);
        vm.write(4, &words);
        set(3 * PAGE_SIZE).unwrap();
        let polling = worker_status::POLLING;
        assert!([polling, worker_status::SLEEPING].contains(&vm.read(3)));
        set(4 * PAGE_SIZE).unwrap();
        set(0).unwrap();
        let last = vm.read(3);
        vm.write(4, &words);
        vm.rnic.tables().announce_all(WORKERS.into(), polling);
        assert_eq!(
            (vm.read(3), vm.read(4)),
            (last, 7),
            "there is no page any longer"
        );
    }

    // D-CMD-008.
    #[test]
    fn contexts_have_doorbell_memory_for_each_worker() {
        let vm = Host::new().vm(RC);
        let good = vm.context_body();
        let create = |change: &dyn Fn(&mut CreateContext)| {
            let mut body = good;
            change(&mut body);
            let made = vm.ask::<_, HandleResponse>(opcode::CREATE_CONTEXT, &body);
            made.map(|made| made.handle).map_err(name)
        };
        assert_eq!(good.doorbell.count, 3 * u32::from(WORKERS));
        assert_eq!(create(&|c| c.doorbell.count -= 1), Err(name(EINVAL)));
        assert_eq!(create(&|c| c.reserved = 1), Err(name(EINVAL)));
        assert_eq!(create(&|c| c.doorbell.page_shift = 13), Err(name(EINVAL)));
        assert_eq!(create(&|c| c.doorbell.addr += 8), Err(name(EFAULT)));
        let contexts: Vec<_> = (0..LIMITS.contexts)
            .map(|_| create(&|_| ()).unwrap())
            .collect();
        assert_eq!(create(&|_| ()), Err(name(ENOMEM)));
        let footprint = vm.rnic.tables().footprint.bytes();
        for context in contexts {
            vm.handle(opcode::DESTROY_CONTEXT, context).unwrap();
            assert_eq!(vm.handle(opcode::DESTROY_CONTEXT, context), Err(ENOENT));
        }
        assert!(footprint > vm.rnic.tables().footprint.bytes());
        assert_eq!(vm.rnic.tables().footprint.bytes(), 0);
    }

    // D-CMD-008.
    #[test]
    fn protection_domains_come_and_go() {
        let vm = Host::new().vm(RC | 1 << feature::MW);
        let pds: Vec<_> = (0..LIMITS.pds).map(|_| vm.pd()).collect();
        assert_eq!(vm.create(opcode::CREATE_PD), Err(ENOMEM));
        vm.handle(opcode::DESTROY_PD, pds[0]).unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_PD, pds[0]), Err(ENOENT));
        // The region's own, and the last that there may be.
        let region = vm.register(&vm.mr_body()).unwrap();
        let owner = vm.rnic.tables().keys.region(region.lkey).unwrap().pd;
        assert_eq!(vm.handle(opcode::DESTROY_PD, owner), Err(EBUSY));
        vm.handle(opcode::DEREG_MR, region.lkey).unwrap();
        vm.handle(opcode::DESTROY_PD, owner).unwrap();
    }

    /// A page may be larger than 4 KiB, but lies in one range of guest memory.
    // D-PAGE-002.
    #[test]
    fn a_page_does_not_lie_in_two_ranges() {
        let vm = Host::new().vm(RC);
        let pd = vm.pd();
        let register = |first: u64, count: u32| {
            let pages = PageList {
                count,
                page_shift: 13,
                ..page(first)
            };
            let length = u64::from(count) << 13;
            let body = virtio_rdma_spec::command::RegMr {
                pd,
                length,
                pages,
                ..Default::default()
            };
            vm.register(&body).map(|keys| keys.lkey)
        };
        // The first range ends within the page that begins here.
        let last = PAGES - 1;
        assert_eq!(last % 2, 0);
        assert_eq!(register(last, 1), Err(EFAULT));
        assert_eq!(register(2 * PAGES, 1), Err(EFAULT));
        assert_eq!(
            register(last + 1, 1),
            Err(EINVAL),
            "not aligned to its size"
        );
        register(last - 2, 1).unwrap();
        register(last + 2, 1).unwrap();
        // More pages than the list can have are not even looked for.
        assert_eq!(register(0, 2), Err(EINVAL));
    }
}
