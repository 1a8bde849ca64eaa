// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands about queue pairs.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::{
    create_qp_flag, CreateQp, CreateQpResponse, ModifyQp, Multicast, QueryQpResponse,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::{
    recv_stride, send_stride, srd_send_stride, ud_send_stride, QpRecord, Sge, MAX_INLINE, MAX_SGE,
    MAX_WQE_STRIDE, MAX_WQ_ENTRIES,
};
use virtio_rdma_spec::verbs::qp_type;
use virtio_rdma_spec::PAGE_SIZE;

use super::{check_ring, encode, needs, resolve_ring, zero};
use crate::engine::message::is_multicast;
use crate::engine::queue_pair::{Qp, QpParts};
use crate::engine::responder::Responder;
use crate::engine::send_queue::SendQueue;
use crate::engine::tables::{DoorbellTarget, Tables};
use crate::footprint::{counted, listed};
use crate::memory::Pages;
use crate::rnic::Rnic;
use crate::verbs::cq::Cq;
use crate::verbs::srq::Srq;
use crate::verbs::work_queue::WorkQueue;
use crate::verbs::Error;
use crate::worker::Worker;

/// Checks a work queue; `least` is the stride that its work requests need.
pub(super) fn check_queue(
    entries: u32,
    stride: u32,
    offset: u32,
    least: Option<u32>,
    record: usize,
    len: u64,
) -> Result<WorkQueue, Error> {
    if entries != 0 {
        zero(entries.is_power_of_two() && entries <= MAX_WQ_ENTRIES)?;
        zero(stride.is_power_of_two() && stride <= MAX_WQE_STRIDE)?;
        zero(least.is_some_and(|least| stride >= least))?;
        check_ring(offset, stride, entries, record, len)?;
    }
    Ok(WorkQueue {
        offset: u64::from(offset),
        stride,
        entries,
        position: 0,
    })
}

/// Whether two rings share memory.
fn overlap(a: &WorkQueue, b: &WorkQueue) -> bool {
    let end = |queue: &WorkQueue| queue.offset + u64::from(queue.stride) * u64::from(queue.entries);
    a.entries != 0 && b.entries != 0 && a.offset < end(b) && b.offset < end(a)
}

/// What an attachment to a multicast group takes, bytes: its entry in a map of the VM, in the list
/// of the group's members, and in the map of all groups; each may be half empty.
pub(super) const ATTACHMENT: u64 = 2 * (48 + 16 + 64);

/// What a queue pair takes of its VM's account, without the page list of its buffer.
pub(super) fn footprint(body: &CreateQp, recv_sge: usize) -> u64 {
    // Its places in the lists of its worker, and in the sets of its two completion queues.
    let places = 96 + 2 * 16;
    let inline = (body.max_inline as usize).next_multiple_of(8);
    counted::<Qp>()
        + counted::<Pages>()
        + listed::<Sge>(body.max_send_sge.into())
        + listed::<u8>(inline)
        + 2 * listed::<Sge>(recv_sge)
        + places
}

/// The objects that a new queue pair refers to.
struct Refs {
    send_cq: Option<Arc<Cq>>,
    recv_cq: Option<Arc<Cq>>,
    srq: Option<Arc<Srq>>,
}

fn find(tables: &Tables, body: &CreateQp, kind: &QpType) -> Result<Refs, Error> {
    let cq = |number| tables.cqs.get(number).cloned().ok_or(Error::NotFound);
    if kind.sends && tables.pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    if body.qp_type == qp_type::XRC_TGT && tables.xrcds.get(body.xrcd).is_none() {
        return Err(Error::NotFound);
    }
    let srq = match body.srq {
        0 => None,
        number => Some(tables.srqs.get(number).cloned().ok_or(Error::NotFound)?),
    };
    // An XRC shared receive queue is named by messages, never by a queue pair.
    zero(srq.as_ref().is_none_or(|srq| srq.xrc.is_none()))?;
    Ok(Refs {
        send_cq: if kind.sends {
            Some(cq(body.send_cq)?)
        } else {
            None
        },
        recv_cq: if kind.receives {
            Some(cq(body.recv_cq)?)
        } else {
            None
        },
        srq,
    })
}

pub(super) fn create(rnic: &Arc<Rnic>, body: &CreateQp) -> Result<Vec<u8>, Error> {
    zero(body.reserved0 == 0 && body.reserved1 == [0; 12])?;
    let known = create_qp_flag::SIGNAL_ALL | create_qp_flag::BLOCK_MULTICAST_LOOPBACK;
    zero(body.flags & !known == 0)?;
    zero(qp_type::name(body.qp_type).is_some())?;
    let kind = QpType::of(body.qp_type).ok_or(Error::NotSupported)?;
    needs(rnic, feature::RC)?;
    needs(rnic, kind.feature)?;
    if rnic.vm().accepted(feature::IWARP) && body.qp_type != qp_type::IWARP {
        return Err(Error::NotSupported);
    }
    if body.srq != 0 {
        needs(rnic, feature::SRQ)?;
    }
    let datagram = kind.datagram;
    let unreliable = datagram && !kind.acknowledged;
    zero(unreliable || body.flags & create_qp_flag::BLOCK_MULTICAST_LOOPBACK == 0)?;
    zero((body.xrcd == 0) == (body.qp_type != qp_type::XRC_TGT))?;
    zero((kind.receives && body.qp_type != qp_type::GSI) || body.srq == 0)?;
    zero(kind.sends || body.sq_entries == 0)?;
    zero((kind.receives && body.srq == 0) || body.rq_entries == 0)?;
    let (send_sge, recv_sge) = (u32::from(body.max_send_sge), u32::from(body.max_recv_sge));
    zero(send_sge <= MAX_SGE && recv_sge <= MAX_SGE && body.max_inline <= MAX_INLINE)?;
    let len = u64::from(body.buffer.count).saturating_mul(PAGE_SIZE);
    let least = match (datagram, kind.acknowledged) {
        (true, true) => srd_send_stride(send_sge, body.max_inline),
        (true, false) => ud_send_stride(send_sge, body.max_inline),
        (false, _) => send_stride(send_sge, body.max_inline),
    };
    let record = QpRecord::SIZE;
    let sq = check_queue(
        body.sq_entries,
        body.sq_stride,
        body.sq_offset,
        least,
        record,
        len,
    )?;
    let least = recv_stride(recv_sge);
    let rq = check_queue(
        body.rq_entries,
        body.rq_stride,
        body.rq_offset,
        least,
        record,
        len,
    )?;
    zero(!overlap(&sq, &rq))?;
    let pages = if kind.sends {
        resolve_ring(rnic, &body.buffer)?
    } else {
        Pages::none()
    };

    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let refs = find(tables, body, kind)?;
    if body.qp_type == qp_type::GSI && tables.gsi.is_some() {
        return Err(Error::Busy);
    }
    let (index, worker) = next_worker(rnic)?;
    // Without a send queue there is nothing to ring for.
    let slot = if kind.sends {
        reserve_slot(tables, body.context, index)?
    } else {
        u32::MAX
    };
    let created = insert(rnic, tables, body, pages, [sq, rq], refs, (&worker, slot));
    let qp = match created {
        Ok(qp) => qp,
        Err(error) => {
            release_slot(tables, body.context, index, slot);
            return Err(error);
        }
    };
    fill_slot(
        tables,
        body.context,
        index,
        slot,
        DoorbellTarget::Qp(qp.clone()),
    );
    count_users(tables, &qp, 1);
    if body.qp_type == qp_type::GSI {
        tables.gsi = Some(qp.number);
    }
    rnic.next_worker.fetch_add(1, Ordering::Relaxed);
    let response = CreateQpResponse {
        qpn: qp.number,
        doorbell_queue: u32::from(index),
        slot,
        ..CreateQpResponse::default()
    };
    Ok(encode(response.to_bytes()))
}

/// Makes the queue pair and puts it into the table.
fn insert(
    rnic: &Arc<Rnic>,
    tables: &mut Tables,
    body: &CreateQp,
    pages: Pages,
    [sq, rq]: [WorkQueue; 2],
    refs: Refs,
    (worker, slot): (&Arc<Worker>, u32),
) -> Result<Arc<Qp>, Error> {
    let facts = QpType::of(body.qp_type).ok_or(Error::NotSupported)?;
    // Scatter lists come from whichever queue gives the receives.
    let recv_sge = match &refs.srq {
        Some(srq) => srq.max_sge,
        None => usize::from(body.max_recv_sge),
    };
    let share = tables.footprint.share(footprint(body, recv_sge))?;
    let buffer = Arc::new(if pages.len() == 0 {
        pages
    } else {
        tables.present(pages)?
    });
    let signal_all = body.flags & create_qp_flag::SIGNAL_ALL != 0;
    let inserted = tables.qps.insert_with(|number| {
        let (sge, inline) = (usize::from(body.max_send_sge), body.max_inline as usize);
        let send_queue = SendQueue::new(buffer.clone(), sq, body.qp_type, sge, inline, signal_all);
        let responder = Responder::new(buffer, rq, refs.srq.clone(), recv_sge);
        Ok(Arc::new(Qp::new(QpParts {
            number,
            vm: rnic.vm().clone(),
            worker: worker.clone(),
            worker_index: worker.index,
            pd: if refs.send_cq.is_some() { body.pd } else { 0 },
            context: body.context,
            slot,
            facts,
            share,
            xrcd: body.xrcd,
            block_multicast_loopback: body.flags & create_qp_flag::BLOCK_MULTICAST_LOOPBACK != 0,
            send_cq: refs.send_cq,
            recv_cq: refs.recv_cq,
            srq: refs.srq,
            send_queue,
            responder,
        })))
    });
    tables.qps.get(inserted?).cloned().ok_or(Error::NotFound)
}

/// The worker of the next queue, and its index. (The next one comes when the queue is made.)
pub(super) fn next_worker(rnic: &Rnic) -> Result<(u16, Arc<Worker>), Error> {
    // The way out of this process belongs to the first worker.
    let leaves = rnic.vm().uplink().is_some() || rnic.iwarp().is_some();
    let index = match leaves {
        true => 0,
        false => rnic.next_worker.load(Ordering::Relaxed) % (rnic.workers.len().max(1) as u16),
    };
    let worker = rnic.workers.get(usize::from(index)).ok_or(Error::Invalid)?;
    Ok((index, worker.clone()))
}

/// Reserves a slot in the doorbell block of worker `index`.
pub(super) fn reserve_slot(tables: &mut Tables, context: u32, index: u16) -> Result<u32, Error> {
    let context = tables.contexts.get_mut(context).ok_or(Error::NotFound)?;
    let slots = context
        .workers
        .get_mut(usize::from(index))
        .ok_or(Error::Invalid)?;
    let slot = slots.reserve()?;
    context.users += 1;
    Ok(slot)
}

/// Puts what it rings for into a reserved slot.
pub(super) fn fill_slot(
    tables: &mut Tables,
    context: u32,
    index: u16,
    slot: u32,
    target: DoorbellTarget,
) {
    if let Some(context) = tables.contexts.get_mut(context) {
        if let Some(slots) = context.workers.get_mut(usize::from(index)) {
            slots.set(slot, target);
        }
    }
}

/// Frees a slot.
pub(super) fn release_slot(tables: &mut Tables, context: u32, index: u16, slot: u32) {
    if slot == u32::MAX {
        return;
    }
    if let Some(context) = tables.contexts.get_mut(context) {
        context.users = context.users.saturating_sub(1);
        if let Some(slots) = context.workers.get_mut(usize::from(index)) {
            slots.release(slot);
        }
    }
}

/// Adds to the number of users of all that a queue pair refers to.
fn count_users(tables: &mut Tables, qp: &Qp, change: i32) {
    let add = |users: &mut u32| *users = users.saturating_add_signed(change);
    if let Some(pd) = tables.pds.get_mut(qp.pd) {
        add(&mut pd.users);
    }
    if let Some(domain) = tables.xrcds.get_mut(qp.xrcd) {
        add(&mut domain.users);
    }
    let shared = [&qp.send_cq, &qp.recv_cq]
        .into_iter()
        .flatten()
        .map(|cq| &cq.users);
    for users in shared.chain(qp.srq.iter().map(|srq| &srq.users)) {
        users.fetch_add(change as u32, Ordering::Relaxed);
    }
    for cq in [&qp.send_cq, &qp.recv_cq].into_iter().flatten() {
        if change > 0 {
            cq.queue_pairs().insert(qp.number);
        } else {
            cq.queue_pairs().remove(&qp.number);
        }
    }
}

fn get(rnic: &Rnic, number: u32) -> Result<Arc<Qp>, Error> {
    rnic.tables()
        .qps
        .get(number)
        .cloned()
        .ok_or(Error::NotFound)
}

pub(super) fn modify(rnic: &Arc<Rnic>, body: &ModifyQp) -> Result<Vec<u8>, Error> {
    let attr = &body.attr;
    zero(attr.reserved0 == [0; 6] && attr.reserved1 == [0; 16] && attr.av.reserved == [0; 7])?;
    let tables = rnic.tables();
    let qp = tables.qps.get(body.qpn).ok_or(Error::NotFound)?;
    qp.modify(rnic.registry(), body.attr_mask, attr)?;
    Ok(Vec::new())
}

pub(super) fn query(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    let attr = get(rnic, number)?.query();
    Ok(encode(QueryQpResponse { attr }.to_bytes()))
}

pub(super) fn destroy(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let qp = tables.qps.remove(number).ok_or(Error::NotFound)?;
    qp.dead.store(true, Ordering::SeqCst);
    qp.forget_peer(rnic.registry());
    qp.comes_back();
    if qp.leaves() {
        // Its worker forgets what the wire keeps of it.
        qp.schedule();
    }
    if let Some(sink) = &tables.sink {
        sink.forget_qp(number);
    }
    if tables.gsi == Some(number) {
        tables.gsi = None;
    }
    let mut groups = Vec::new();
    let own = (number, [0; 16])..=(number, [0xff; 16]);
    groups.extend(tables.multicast.range(own).map(|(key, _)| *key));
    for (_, gid) in groups {
        tables.multicast.remove(&(number, gid));
        rnic.registry().leave(gid, rnic.vm(), Some(number));
    }
    tables.keys.forget_qp(number);
    release_slot(tables, qp.context, qp.worker_index, qp.slot);
    count_users(tables, &qp, -1);
    if qp.send_queue().is_parked() {
        // Its worker has a timer for it: let it go now and not when that ends.
        qp.schedule();
    }
    Ok(Vec::new())
}

/// The queue pair and group of a command about multicast.
fn group(rnic: &Rnic, tables: &Tables, body: &Multicast) -> Result<(), Error> {
    if !rnic.vm().accepted(feature::UD) {
        return Err(Error::NotSupported);
    }
    zero(body.reserved == 0 && is_multicast(&body.gid))?;
    let qp = tables.qps.get(body.qpn).ok_or(Error::NotFound)?;
    zero(qp.qp_type == qp_type::UD)
}

pub(super) fn attach(rnic: &Arc<Rnic>, body: &Multicast) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    group(rnic, &tables, body)?;
    if tables.multicast.contains_key(&(body.qpn, body.gid)) {
        return Ok(Vec::new());
    }
    if tables.multicast.len() >= rnic.settings.limits.multicast as usize {
        return Err(Error::NoMemory);
    }
    let share = rnic.vm().footprint().share(ATTACHMENT)?;
    tables.multicast.insert((body.qpn, body.gid), share);
    rnic.registry().join(body.gid, rnic.vm(), body.qpn);
    Ok(Vec::new())
}

pub(super) fn detach(rnic: &Arc<Rnic>, body: &Multicast) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    group(rnic, &tables, body)?;
    let attached = tables.multicast.remove(&(body.qpn, body.gid));
    attached.ok_or(Error::NotFound)?;
    rnic.registry().leave(body.gid, rnic.vm(), Some(body.qpn));
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::status::{EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM, EOPNOTSUPP};
    use virtio_rdma_spec::command::{opcode, Handle, QpAttr};
    use virtio_rdma_spec::verbs::{access, qp_attr, qp_state};

    use super::super::fixture::{name, ready_to_receive, Host, TestVm, LIMITS, RTR, WORKERS};
    use super::*;
    use crate::limits::GID_TABLE_LEN;

    const RC: u64 = 1 << feature::RC;
    const TYPES: u64 = RC | 1 << feature::UD | 1 << feature::SRQ | 1 << feature::XRC;

    type Change<T> = fn(&mut T);

    fn created(
        vm: &TestVm,
        good: &CreateQp,
        change: Change<CreateQp>,
    ) -> Result<u32, &'static str> {
        let mut body = *good;
        change(&mut body);
        vm.make_qp(&body).map(|made| made.qpn).map_err(name)
    }

    // D-CMD-004, D-CMD-008.
    #[test]
    fn a_queue_pair_is_checked_before_it_is_created() {
        let vm = Host::new().vm(RC);
        let good = vm.qp_body();
        let before = vm.rnic.tables().footprint.bytes();
        let create = |change| created(&vm, &good, change);
        for change in [
            (|q| q.pd = 99) as Change<CreateQp>,
            |q| q.context = 99,
            |q| q.send_cq = 99,
            |q| q.recv_cq = 99,
        ] {
            assert_eq!(create(change), Err(name(ENOENT)));
        }
        for change in [
            (|q| q.qp_type = qp_type::UD) as Change<CreateQp>,
            |q| q.qp_type = qp_type::UC,
            |q| q.qp_type = qp_type::XRC_INI,
            |q| (q.srq, q.rq_entries) = (1, 0),
        ] {
            assert_eq!(create(change), Err(name(EOPNOTSUPP)));
        }
        for change in [
            (|q| q.qp_type = 0) as Change<CreateQp>,
            |q| q.qp_type = 200,
            |q| q.flags = 4,
            |q| q.flags = create_qp_flag::BLOCK_MULTICAST_LOOPBACK,
            |q| q.xrcd = 1,
            |q| q.reserved0 = 1,
            |q| q.reserved1[11] = 1,
            |q| q.sq_entries = 3,
            |q| q.sq_entries = 2 * MAX_WQ_ENTRIES,
            |q| q.rq_entries = 5,
            |q| q.sq_stride = 32,
            |q| q.sq_stride = 96,
            |q| q.sq_stride = 2 * MAX_WQE_STRIDE,
            |q| q.rq_stride = 16,
            |q| q.sq_offset = 0,
            |q| q.sq_offset = 96,
            |q| q.rq_offset = 64,
            |q| q.rq_offset = 4096,
            |q| q.max_send_sge = 33,
            |q| q.max_send_sge = 2,
            |q| q.max_recv_sge = 2,
            |q| q.max_inline = 17,
            |q| q.max_inline = u32::MAX,
            |q| q.buffer.page_shift = 13,
        ] {
            assert_eq!(create(change), Err(name(EINVAL)));
        }
        assert_eq!(create(|q| q.buffer.addr = 1 << 40), Err(name(EFAULT)));
        assert_eq!(
            vm.rnic.tables().footprint.bytes(),
            before,
            "nothing is left"
        );
        assert_eq!(vm.handle(opcode::DESTROY_CONTEXT, good.context), Ok(()));
        assert_eq!(create(|_| ()), Err(name(ENOENT)), "its context is gone");
    }

    // D-CMD-008, D-QP-001.
    #[test]
    fn queue_pairs_are_spread_over_workers_and_limited() {
        let vm = Host::new().vm(RC);
        let good = vm.qp_body();
        let made: Vec<_> = (0..LIMITS.qps)
            .map(|_| vm.make_qp(&good).unwrap())
            .collect();
        assert_eq!(vm.make_qp(&good).map_err(name), Err(name(ENOMEM)));
        for (n, qp) in (0..).zip(&made) {
            assert_eq!(qp.doorbell_queue, n % u32::from(WORKERS));
            assert_eq!(qp.slot, n / u32::from(WORKERS));
        }
        assert_eq!(vm.handle(opcode::DESTROY_CONTEXT, good.context), Err(EBUSY));
        assert_eq!(vm.handle(opcode::DESTROY_PD, good.pd), Err(EBUSY));
        for qp in made {
            vm.handle(opcode::DESTROY_QP, qp.qpn).unwrap();
            assert_eq!(vm.handle(opcode::DESTROY_QP, qp.qpn), Err(ENOENT));
        }
        vm.handle(opcode::DESTROY_CONTEXT, good.context).unwrap();
        vm.handle(opcode::DESTROY_PD, good.pd).unwrap();
    }

    // D-CMD-008.
    #[test]
    fn each_type_has_what_it_has() {
        let vm = Host::new().vm(TYPES);
        let good = vm.qp_body();
        let create = |change| created(&vm, &good, change);
        // A datagram's entry has 64 bytes before its list.
        assert_eq!(create(|q| q.qp_type = qp_type::UD), Err(name(EINVAL)));
        let datagram = CreateQp {
            sq_stride: 128,
            sq_offset: 128,
            rq_offset: 128 + 16 * 128,
            ..good
        };
        let gsi = |q: &mut CreateQp| q.qp_type = qp_type::GSI;
        let first = created(&vm, &datagram, gsi).unwrap();
        assert_eq!(created(&vm, &datagram, gsi), Err(name(EBUSY)));
        vm.handle(opcode::DESTROY_QP, first).unwrap();
        created(&vm, &datagram, gsi).unwrap();
        for change in [
            (|q| q.qp_type = qp_type::XRC_INI) as Change<CreateQp>,
            |q| q.qp_type = qp_type::XRC_TGT,
            |q| q.srq = 1,
        ] {
            assert_eq!(create(change), Err(name(EINVAL)));
        }
        assert_eq!(
            create(|q| (q.srq, q.rq_entries) = (1, 0)),
            Err(name(ENOENT))
        );
        let domain = vm.create(opcode::CREATE_XRCD).unwrap();
        let target = CreateQp {
            qp_type: qp_type::XRC_TGT,
            xrcd: domain,
            ..CreateQp::default()
        };
        assert_eq!(created(&vm, &target, |q| q.xrcd += 1), Err(name(ENOENT)));
        let target = created(&vm, &target, |_| ()).unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_XRCD, domain), Err(EBUSY));
        vm.handle(opcode::DESTROY_QP, target).unwrap();
        vm.handle(opcode::DESTROY_XRCD, domain).unwrap();
    }

    fn query(vm: &TestVm, handle: u32) -> Result<QpAttr, &'static str> {
        let body = Handle {
            handle,
            reserved: 0,
        };
        let response = vm.ask::<_, QueryQpResponse>(opcode::QUERY_QP, &body);
        response.map(|response| response.attr).map_err(name)
    }

    // D-CMD-004, D-CMD-008, D-MOD-002, D-QPS-001.
    #[test]
    fn attributes_are_checked_and_told() {
        let vm = Host::new().vm(RC);
        let qpn = vm.make_qp(&vm.qp_body()).unwrap().qpn;
        let modify = |mask, attr| vm.modify(qpn, mask, attr).map_err(name);
        assert_eq!(query(&vm, qpn + 1), Err(name(ENOENT)));
        assert_eq!(
            vm.modify(qpn + 1, qp_attr::STATE, QpAttr::default()),
            Err(ENOENT)
        );
        let reset = QpAttr {
            port_num: 1,
            ..QpAttr::default()
        };
        assert_eq!(query(&vm, qpn), Ok(reset));
        // Not from here, not without what it needs, and not with what there is not.
        assert_eq!(modify(RTR, ready_to_receive()), Err(name(EINVAL)));
        let init = QpAttr {
            qp_state: qp_state::INIT,
            ..reset
        };
        let mask = qp_attr::STATE | qp_attr::PKEY_INDEX | qp_attr::PORT | qp_attr::ACCESS_FLAGS;
        assert_eq!(modify(mask & !qp_attr::PORT, init), Err(name(EINVAL)));
        assert_eq!(modify(mask | qp_attr::TIMEOUT, init), Err(name(EINVAL)));
        assert_eq!(modify(mask | 1 << 31, init), Err(name(EINVAL)));
        assert_eq!(
            modify(mask | qp_attr::ALT_PATH, init),
            Err(name(EOPNOTSUPP))
        );
        for change in [
            (|a| a.port_num = 2) as Change<QpAttr>,
            |a| a.pkey_index = 1,
            |a| a.access_flags = 1 << 30,
            |a| a.reserved0[5] = 1,
            |a| a.reserved1[15] = 1,
            |a| a.av.reserved[6] = 1,
        ] {
            let mut attr = init;
            change(&mut attr);
            assert_eq!(modify(mask, attr), Err(name(EINVAL)));
        }
        // Whether the queue drains is the device's to say: a driver may pass on what it read.
        let draining = QpAttr {
            sq_draining: 1,
            access_flags: access::REMOTE_READ,
            ..init
        };
        assert_eq!(modify(mask, draining), Ok(()));
        let told = query(&vm, qpn).unwrap();
        assert_eq!(
            (told.qp_state, told.cur_qp_state),
            (qp_state::INIT, qp_state::INIT)
        );
        assert_eq!(
            (told.access_flags, told.sq_draining),
            (access::REMOTE_READ, 0)
        );
    }

    /// A fabric without packets goes by no index, but it is one of the table.
    // D-CMD-008.
    #[test]
    fn an_address_is_checked_where_it_is_set() {
        let vm = Host::new().vm(RC);
        let qpn = vm.make_qp(&vm.qp_body()).unwrap().qpn;
        vm.init(qpn).unwrap();
        for change in [
            (|a| a.av.port_num = 0) as Change<QpAttr>,
            |a| a.av.sl = 16,
            |a| a.av.flow_label = 1 << 20,
            |a| a.av.sgid_index = GID_TABLE_LEN as u16,
            |a| a.av.dgid = [0; 16],
            |a| a.path_mtu = 0,
            |a| a.path_mtu = 6,
            |a| a.rq_psn = 1 << 24,
            |a| a.dest_qp_num = 1 << 24,
            |a| a.min_rnr_timer = 32,
            |a| a.max_dest_rd_atomic = 129,
        ] {
            let mut attr = ready_to_receive();
            change(&mut attr);
            assert_eq!(vm.modify(qpn, RTR, attr).map_err(name), Err(name(EINVAL)));
        }
        let mut attr = ready_to_receive();
        // No GID is there.
        attr.av.sgid_index = GID_TABLE_LEN as u16 - 1;
        attr.av.static_rate = 18;
        vm.modify(qpn, RTR, attr).unwrap();
        let told = query(&vm, qpn).unwrap();
        assert_eq!(told.av, attr.av);
        // What is asked of the state is the state.
        let mask = qp_attr::STATE | qp_attr::CUR_STATE;
        let wrong = QpAttr {
            qp_state: qp_state::ERR,
            cur_qp_state: qp_state::RTS,
            ..QpAttr::default()
        };
        assert_eq!(vm.modify(qpn, mask, wrong), Err(EINVAL));
        let reset = QpAttr::default();
        vm.modify(qpn, qp_attr::STATE, reset).unwrap();
        assert_eq!(query(&vm, qpn).unwrap().dest_qp_num, 0);
    }

    // D-CMD-008.
    #[test]
    fn attachments_to_groups_are_checked_and_limited_in_all() {
        let vm = Host::new().vm(TYPES);
        let body = vm.qp_body();
        let rc = vm.make_qp(&body).unwrap().qpn;
        let ud = vm
            .make_qp(&CreateQp {
                qp_type: qp_type::UD,
                sq_stride: 128,
                sq_offset: 128,
                rq_offset: 128 + 16 * 128,
                ..body
            })
            .unwrap()
            .qpn;
        let group = |n: u8| {
            let mut gid = [0; 16];
            (gid[0], gid[15]) = (0xff, n);
            gid
        };
        let send = |opcode, gid, qpn, reserved| {
            let body = Multicast { gid, qpn, reserved };
            vm.tell(opcode, &body).map_err(name)
        };
        let attach = |gid, qpn| send(opcode::ATTACH_MCAST, gid, qpn, 0);
        let detach = |gid, qpn| send(opcode::DETACH_MCAST, gid, qpn, 0);
        assert_eq!(attach([0; 16], ud), Err(name(EINVAL)));
        assert_eq!(attach(group(1), rc), Err(name(EINVAL)));
        assert_eq!(attach(group(1), ud + 1000), Err(name(ENOENT)));
        assert_eq!(
            send(opcode::ATTACH_MCAST, group(1), ud, 1),
            Err(name(EINVAL))
        );
        assert_eq!(detach(group(1), ud), Err(name(ENOENT)));
        for n in 0..LIMITS.multicast as u8 {
            assert_eq!(attach(group(n), ud), Ok(()));
            assert_eq!(attach(group(n), ud), Ok(()), "once more changes nothing");
        }
        assert_eq!(attach(group(9), ud), Err(name(ENOMEM)));
        assert_eq!(detach(group(0), ud), Ok(()));
        assert_eq!(attach(group(9), ud), Ok(()));
        vm.handle(opcode::DESTROY_QP, ud).unwrap();
        assert!(vm.rnic.tables().multicast.is_empty());
    }
}
