// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands about shared receive queues and XRC domains.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::{
    resize_srq_flag, srq_type, CreateSrq, CreateSrqResponse, ModifySrq, QuerySrqResponse, ResizeSrq,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::{recv_stride, SrqRecord, MAX_SGE};
use virtio_rdma_spec::PAGE_SIZE;

use super::queue_pair::{check_queue, fill_slot, next_worker, release_slot, reserve_slot};
use super::{encode, handle_response, needs, resolve_ring, zero};
use crate::engine::tables::{DoorbellTarget, Pd};
use crate::rnic::Rnic;
use crate::verbs::srq::{Srq, SrqParts, Xrc};
use crate::verbs::Error;

pub(super) fn create(rnic: &Arc<Rnic>, body: &CreateSrq) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::SRQ)?;
    zero(body.reserved0 == 0 && body.reserved1 == 0 && body.reserved2 == 0)?;
    let is_xrc = match body.srq_type {
        srq_type::BASIC => false,
        srq_type::XRC => true,
        _ => return Err(Error::Invalid),
    };
    if is_xrc {
        needs(rnic, feature::XRC)?;
    } else {
        zero(body.xrcd == 0 && body.cq == 0)?;
    }
    let sge = u32::from(body.max_sge);
    zero(sge <= MAX_SGE && body.entries != 0 && body.limit <= body.entries)?;
    let len = u64::from(body.buffer.count).saturating_mul(PAGE_SIZE);
    let least = recv_stride(sge);
    let record = SrqRecord::SIZE;
    let queue = check_queue(
        body.entries,
        body.stride,
        body.ring_offset,
        least,
        record,
        len,
    )?;
    let pages = resolve_ring(rnic, &body.buffer)?;

    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    if tables.pds.get(body.pd).is_none() {
        return Err(Error::NotFound);
    }
    let xrc = if is_xrc {
        if tables.xrcds.get(body.xrcd).is_none() {
            return Err(Error::NotFound);
        }
        let cq = tables.cqs.get(body.cq).cloned().ok_or(Error::NotFound)?;
        Some(Xrc {
            domain: body.xrcd,
            cq,
        })
    } else {
        None
    };
    let (index, _) = next_worker(rnic)?;
    let slot = reserve_slot(tables, body.context, index)?;
    let inserted = tables.adopt(pages).and_then(|buffer| {
        let footprint = buffer.footprint();
        let inserted = tables.srqs.insert_with(|number| {
            Ok(Arc::new(Srq::new(SrqParts {
                number,
                pd: body.pd,
                context: body.context,
                worker: index,
                slot,
                xrc,
                max_sge: usize::from(body.max_sge),
                limit: body.limit,
                buffer,
                queue,
            })))
        });
        inserted.inspect_err(|_| tables.release(footprint))
    });
    let number = match inserted {
        Ok(number) => number,
        Err(error) => {
            release_slot(tables, body.context, index, slot);
            return Err(error);
        }
    };
    let Some(srq) = tables.srqs.get(number).cloned() else {
        return Err(Error::NotFound);
    };
    if let Some(pd) = tables.pds.get_mut(body.pd) {
        pd.users += 1;
    }
    if let Some(xrc) = &srq.xrc {
        xrc.cq.users.fetch_add(1, Ordering::Relaxed);
        if let Some(domain) = tables.xrcds.get_mut(xrc.domain) {
            domain.users += 1;
        }
    }
    fill_slot(tables, body.context, index, slot, DoorbellTarget::Srq(srq));
    rnic.next_worker.fetch_add(1, Ordering::Relaxed);
    let response = CreateSrqResponse {
        srqn: number,
        doorbell_queue: u32::from(index),
        slot,
        ..CreateSrqResponse::default()
    };
    Ok(encode(response.to_bytes()))
}

fn get(rnic: &Rnic, number: u32) -> Result<Arc<Srq>, Error> {
    needs(rnic, feature::SRQ)?;
    let tables = rnic.tables();
    tables.srqs.get(number).cloned().ok_or(Error::NotFound)
}

pub(super) fn modify(rnic: &Arc<Rnic>, body: &ModifySrq) -> Result<Vec<u8>, Error> {
    let srq = get(rnic, body.srqn)?;
    zero(body.reserved == 0)?;
    srq.set_limit(body.limit)?;
    Ok(Vec::new())
}

/// Under the write lock: nobody takes entries meanwhile.
pub(super) fn resize(rnic: &Arc<Rnic>, body: &ResizeSrq) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::SRQ_RESIZE)?;
    zero(body.reserved0 == 0 && body.reserved1 == 0)?;
    zero(body.flags & !resize_srq_flag::LIMIT == 0 && body.entries != 0)?;
    let limit = (body.flags & resize_srq_flag::LIMIT != 0).then_some(body.limit);
    // A queue that comes back under this number meanwhile may have another stride: `resize` looks
    // again.
    let stride = get(rnic, body.srqn)?.stride();
    let len = u64::from(body.buffer.count).saturating_mul(PAGE_SIZE);
    let queue = check_queue(
        body.entries,
        stride,
        body.ring_offset,
        Some(stride),
        SrqRecord::SIZE,
        len,
    )?;
    let pages = resolve_ring(rnic, &body.buffer)?;
    let tables = rnic.tables_mut();
    let srq = tables.srqs.get(body.srqn).cloned().ok_or(Error::NotFound)?;
    let buffer = tables.adopt(pages)?;
    let (old, new) = (srq.footprint(), buffer.footprint());
    srq.resize(buffer, queue, limit)
        .inspect_err(|_| tables.release(new))?;
    tables.release(old);
    Ok(Vec::new())
}

pub(super) fn query(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    let srq = get(rnic, number)?;
    let response = QuerySrqResponse {
        entries: srq.entries(),
        max_sge: srq.max_sge as u32,
        limit: srq.limit(),
        ..QuerySrqResponse::default()
    };
    Ok(encode(response.to_bytes()))
}

pub(super) fn destroy(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::SRQ)?;
    let mut tables = rnic.tables_mut();
    let tables = &mut *tables;
    let users = &tables.srqs.get(number).ok_or(Error::NotFound)?.users;
    if users.load(Ordering::Relaxed) != 0 {
        return Err(Error::Busy);
    }
    let Some(srq) = tables.srqs.remove(number) else {
        return Err(Error::NotFound);
    };
    tables.release(srq.footprint());
    if let Some(sink) = &tables.sink {
        sink.forget_srq(number);
    }
    release_slot(tables, srq.context, srq.worker, srq.slot);
    if let Some(pd) = tables.pds.get_mut(srq.pd) {
        pd.users = pd.users.saturating_sub(1);
    }
    if let Some(xrc) = &srq.xrc {
        xrc.cq.users.fetch_sub(1, Ordering::Relaxed);
        if let Some(domain) = tables.xrcds.get_mut(xrc.domain) {
            domain.users = domain.users.saturating_sub(1);
        }
    }
    Ok(Vec::new())
}

pub(super) fn create_domain(rnic: &Arc<Rnic>) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::XRC)?;
    let domain = rnic.tables_mut().xrcds.insert_with(|_| Ok(Pd::default()));
    domain.map(handle_response)
}

pub(super) fn destroy_domain(rnic: &Arc<Rnic>, handle: u32) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::XRC)?;
    let mut tables = rnic.tables_mut();
    if tables.xrcds.get(handle).ok_or(Error::NotFound)?.users != 0 {
        return Err(Error::Busy);
    }
    tables.xrcds.remove(handle);
    Ok(Vec::new())
}
