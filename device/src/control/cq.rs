// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands about completion queues.
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::{CreateCq, ModifyCq, PageList, QueryClockResponse, ResizeCq};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::{CqRecord, MAX_CQ_ENTRIES};
use virtio_rdma_spec::PAGE_SIZE;

use super::{check_ring, encode, handle_response, needs, resolve_ring, zero};
use crate::engine::events::notify;
use crate::engine::tables::Tables;
use crate::memory::Pages;
use crate::rnic::Rnic;
use crate::verbs::cq::{clock, Cq, Ring, STRIDES};
use crate::verbs::Error;

/// Checks a ring and resolves its buffer.
fn resolve(
    rnic: &Rnic,
    entries: u32,
    stride: u32,
    offset: u32,
    list: &PageList,
) -> Result<Pages, Error> {
    zero(entries.is_power_of_two() && entries <= MAX_CQ_ENTRIES)?;
    let len = u64::from(list.count).saturating_mul(PAGE_SIZE);
    check_ring(offset, stride, entries, CqRecord::SIZE, len)?;
    resolve_ring(rnic, list)
}

pub(super) fn create(rnic: &Arc<Rnic>, body: &CreateCq) -> Result<Vec<u8>, Error> {
    zero(body.flags == 0 && body.reserved == 0)?;
    let stride = u32::from(body.stride);
    let [narrow, wide] = STRIDES;
    zero(stride == narrow || (stride == wide && rnic.vm().accepted(feature::CQ_TIMESTAMP)))?;
    zero(body.comp_vector < rnic.settings.completion_queues)?;
    let pages = resolve(rnic, body.entries, stride, body.ring_offset, &body.buffer)?;
    let mut tables = rnic.tables_mut();
    let buffer = tables.adopt(pages)?;
    let footprint = buffer.footprint();
    let ring = Ring {
        buffer,
        offset: u64::from(body.ring_offset),
        entries: body.entries,
        stride,
    };
    let number = tables
        .cqs
        .insert_with(|number| Ok(Arc::new(Cq::new(number, body.comp_vector, ring))));
    number
        .inspect_err(|_| tables.release(footprint))
        .map(handle_response)
}

fn find(tables: &Tables, number: u32) -> Result<Arc<Cq>, Error> {
    tables.cqs.get(number).cloned().ok_or(Error::NotFound)
}

/// Under the write lock: nobody writes completions meanwhile.
pub(super) fn resize(rnic: &Arc<Rnic>, body: &ResizeCq) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::RESIZE_CQ)?;
    zero(body.reserved0 == 0 && body.reserved1 == 0)?;
    // A queue that comes back under this number meanwhile may have another stride: `resize` looks
    // again.
    let stride = find(&rnic.tables(), body.cqn)?.stride();
    let pages = resolve(rnic, body.entries, stride, body.ring_offset, &body.buffer)?;
    let tables = rnic.tables_mut();
    let cq = find(&tables, body.cqn)?;
    let buffer = tables.adopt(pages)?;
    let (old, new) = (cq.footprint(), buffer.footprint());
    let ring = Ring {
        buffer,
        offset: u64::from(body.ring_offset),
        entries: body.entries,
        stride,
    };
    let (moved, event) = cq.resize(ring).inspect_err(|_| tables.release(new))?;
    tables.release(old);
    if event {
        notify(&tables, &cq);
    }
    Ok(handle_response(moved))
}

pub(super) fn modify(rnic: &Rnic, body: &ModifyCq) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::CQ_MODERATION)?;
    // All values of `count` and `period` are within the limits that we report.
    zero(body.reserved == 0)?;
    let tables = rnic.tables();
    let cq = find(&tables, body.cqn)?;
    if cq.moderate(body.count, body.period) {
        notify(&tables, &cq);
    }
    Ok(Vec::new())
}

pub(super) fn query_clock(rnic: &Rnic) -> Result<Vec<u8>, Error> {
    needs(rnic, feature::CQ_TIMESTAMP)?;
    Ok(encode(QueryClockResponse { clock: clock() }.to_bytes()))
}

pub(super) fn destroy(rnic: &Arc<Rnic>, number: u32) -> Result<Vec<u8>, Error> {
    let mut tables = rnic.tables_mut();
    let cq = tables.cqs.get(number).ok_or(Error::NotFound)?;
    if cq.users.load(Ordering::Relaxed) != 0 {
        return Err(Error::Busy);
    }
    if let Some(cq) = tables.cqs.remove(number) {
        tables.release(cq.footprint());
        if let Some(sink) = &tables.sink {
            sink.forget_cq(cq.vector, number);
        }
    }
    Ok(Vec::new())
}
