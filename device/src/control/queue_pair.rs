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
    recv_stride, send_stride, ud_send_stride, QpRecord, MAX_INLINE, MAX_SGE, MAX_WQE_STRIDE,
    MAX_WQ_ENTRIES,
};
use virtio_rdma_spec::verbs::qp_type;
use virtio_rdma_spec::PAGE_SIZE;

use super::{check_ring, encode, needs, resolve_ring, zero};
use crate::engine::message::is_multicast;
use crate::engine::queue_pair::{Qp, QpParts};
use crate::engine::responder::Responder;
use crate::engine::send_queue::SendQueue;
use crate::engine::tables::{DoorbellTarget, Tables};
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
    if body.srq != 0 {
        needs(rnic, feature::SRQ)?;
    }
    let datagram = kind.datagram;
    zero(datagram || body.flags & create_qp_flag::BLOCK_MULTICAST_LOOPBACK == 0)?;
    zero((body.xrcd == 0) == (body.qp_type != qp_type::XRC_TGT))?;
    zero((kind.receives && body.qp_type != qp_type::GSI) || body.srq == 0)?;
    zero(kind.sends || body.sq_entries == 0)?;
    zero((kind.receives && body.srq == 0) || body.rq_entries == 0)?;
    let (send_sge, recv_sge) = (u32::from(body.max_send_sge), u32::from(body.max_recv_sge));
    zero(send_sge <= MAX_SGE && recv_sge <= MAX_SGE && body.max_inline <= MAX_INLINE)?;
    let len = u64::from(body.buffer.count).saturating_mul(PAGE_SIZE);
    let least = if datagram {
        ud_send_stride(send_sge, body.max_inline)
    } else {
        send_stride(send_sge, body.max_inline)
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
    let buffer = Arc::new(if pages.len() == 0 {
        pages
    } else {
        tables.adopt(pages)?
    });
    let footprint = buffer.footprint();
    let signal_all = body.flags & create_qp_flag::SIGNAL_ALL != 0;
    let inserted = tables.qps.insert_with(|number| {
        let (sge, inline) = (usize::from(body.max_send_sge), body.max_inline as usize);
        let send_queue = SendQueue::new(buffer.clone(), sq, body.qp_type, sge, inline, signal_all);
        // Scatter lists come from whichever queue gives the receives.
        let recv_sge = match &refs.srq {
            Some(srq) => srq.max_sge,
            None => usize::from(body.max_recv_sge),
        };
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
            footprint,
            xrcd: body.xrcd,
            block_multicast_loopback: body.flags & create_qp_flag::BLOCK_MULTICAST_LOOPBACK != 0,
            send_cq: refs.send_cq,
            recv_cq: refs.recv_cq,
            srq: refs.srq,
            send_queue,
            responder,
        })))
    });
    match inserted {
        Ok(number) => tables.qps.get(number).cloned().ok_or(Error::NotFound),
        Err(error) => {
            tables.release(footprint);
            Err(error)
        }
    }
}

/// The worker of the next queue, and its index. (The next one comes when the queue is made.)
pub(super) fn next_worker(rnic: &Rnic) -> Result<(u16, Arc<Worker>), Error> {
    let index = rnic.next_worker.load(Ordering::Relaxed) % (rnic.workers.len().max(1) as u16);
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
    qp.modify(&tables, body.attr_mask, attr)?;
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
    tables.release(qp.footprint);
    if let Some(sink) = &tables.sink {
        sink.forget_qp(number);
    }
    if tables.gsi == Some(number) {
        tables.gsi = None;
    }
    let mut groups = Vec::new();
    groups.extend(
        tables
            .multicast
            .range((number, [0; 16])..=(number, [0xff; 16])),
    );
    for (_, gid) in groups.iter().copied() {
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
    if tables.multicast.contains(&(body.qpn, body.gid)) {
        return Ok(Vec::new());
    }
    if tables.multicast.len() >= rnic.settings.limits.multicast as usize {
        return Err(Error::NoMemory);
    }
    tables.multicast.insert((body.qpn, body.gid));
    rnic.registry().join(body.gid, rnic.vm(), body.qpn);
    Ok(Vec::new())
}

pub(super) fn detach(rnic: &Arc<Rnic>, body: &Multicast) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    group(rnic, &tables, body)?;
    if !tables.multicast.remove(&(body.qpn, body.gid)) {
        return Err(Error::NotFound);
    }
    rnic.registry().leave(body.gid, rnic.vm(), Some(body.qpn));
    Ok(Vec::new())
}
