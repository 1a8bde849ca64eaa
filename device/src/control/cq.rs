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
use crate::verbs::cq::{clock, Cq, CqRing, STRIDES};
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
    let share = rnic.vm().footprint().share(Cq::FOOTPRINT)?;
    let mut tables = rnic.tables_mut();
    let ring = CqRing {
        buffer: tables.present(pages)?,
        offset: u64::from(body.ring_offset),
        entries: body.entries,
        stride,
    };
    let number = tables.cqs.insert_with(|number| {
        let cq = Cq::new(number, body.comp_vector, ring).with_share(share);
        Ok(Arc::new(cq))
    });
    number.map(handle_response)
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
    let ring = CqRing {
        buffer: tables.present(pages)?,
        offset: u64::from(body.ring_offset),
        entries: body.entries,
        stride,
    };
    let (moved, event) = cq.resize(ring)?;
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
        if let Some(sink) = &tables.sink {
            sink.forget_cq(cq.vector, number);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::status::{EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM};
    use virtio_rdma_spec::command::{opcode, HandleResponse};

    use super::super::fixture::{name, Host, LIMITS};
    use super::*;

    const FEATURES: u64 = 1 << feature::RC
        | 1 << feature::RESIZE_CQ
        | 1 << feature::CQ_MODERATION
        | 1 << feature::CQ_TIMESTAMP;

    type Change<T> = fn(&mut T);

    // D-CMD-004, D-CMD-008.
    #[test]
    fn a_completion_queue_is_checked_before_it_is_created() {
        let vm = Host::new().vm(1 << feature::RC);
        let good = vm.cq_body();
        let create = |change: Change<CreateCq>| {
            let mut body = good;
            change(&mut body);
            let made = vm.ask::<_, HandleResponse>(opcode::CREATE_CQ, &body);
            made.map(|made| made.handle).map_err(name)
        };
        for change in [
            (|c| c.entries = 0) as Change<CreateCq>,
            |c| c.entries = 63,
            |c| c.entries = 2 * MAX_CQ_ENTRIES,
            // A record of 128 bytes, 64 entries of 32 bytes, and two pages.
            |c| c.entries = 256,
            |c| c.comp_vector = 4,
            |c| c.stride = 16,
            // Without CQ_TIMESTAMP.
            |c| c.stride = 64,
            |c| c.ring_offset = 64,
            |c| c.ring_offset = 127,
            |c| c.ring_offset = 144,
            |c| c.ring_offset = u32::MAX - 31,
            |c| c.flags = 1,
            |c| c.reserved = 1,
            |c| c.buffer.count = 0,
            |c| c.buffer.page_shift = 13,
            |c| c.buffer.levels = 4,
            |c| c.buffer.reserved = 1,
        ] {
            assert_eq!(create(change), Err(name(EINVAL)));
        }
        assert_eq!(create(|c| c.buffer.addr = 1 << 40), Err(name(EFAULT)));
        assert_eq!(create(|c| c.buffer.addr += 8), Err(name(EFAULT)));
        assert_eq!(vm.rnic.tables().footprint.bytes(), 0, "nothing is left");
        let numbers: Vec<_> = (0..LIMITS.cqs).map(|_| create(|_| ()).unwrap()).collect();
        assert_eq!(create(|_| ()), Err(name(ENOMEM)));
        vm.handle(opcode::DESTROY_CQ, numbers[0]).unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_CQ, numbers[0]), Err(ENOENT));
    }

    // D-CMD-008.
    #[test]
    fn a_queue_that_is_used_is_not_destroyed() {
        let vm = Host::new().vm(FEATURES);
        let body = vm.qp_body();
        let qp = vm.make_qp(&body).unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_CQ, body.send_cq), Err(EBUSY));
        vm.handle(opcode::DESTROY_QP, qp.qpn).unwrap();
        vm.handle(opcode::DESTROY_CQ, body.send_cq).unwrap();
    }

    // D-CMD-004, D-CMD-008.
    #[test]
    fn another_buffer_is_checked_as_the_first_was() {
        let vm = Host::new().vm(FEATURES);
        let cqn = vm.cq();
        let good = ResizeCq {
            cqn,
            entries: 32,
            ring_offset: 128,
            buffer: vm.pages(12, &[12]),
            ..ResizeCq::default()
        };
        let resize = |change: Change<ResizeCq>| {
            let mut body = good;
            change(&mut body);
            let moved = vm.ask::<_, HandleResponse>(opcode::RESIZE_CQ, &body);
            moved.map(|moved| moved.handle).map_err(name)
        };
        let before = vm.rnic.tables().footprint.bytes();
        assert_eq!(resize(|r| r.cqn += 1), Err(name(ENOENT)));
        for change in [
            (|r| r.entries = 0) as Change<ResizeCq>,
            |r| r.entries = 48,
            |r| r.entries = 128,
            |r| r.ring_offset = 64,
            |r| r.ring_offset = 96,
            |r| r.ring_offset = 130,
            |r| r.reserved0 = 1,
            |r| r.reserved1 = 1,
        ] {
            assert_eq!(resize(change), Err(name(EINVAL)));
        }
        assert_eq!(resize(|r| r.buffer.addr = 1 << 40), Err(name(EFAULT)));
        assert_eq!(vm.rnic.tables().footprint.bytes(), before);
        assert_eq!(resize(|_| ()), Ok(0), "there was nothing to move");
        vm.handle(opcode::DESTROY_CQ, cqn).unwrap();
        assert_eq!(vm.rnic.tables().footprint.bytes(), 0);
    }

    #[test]
    fn a_clock_goes_forward_and_moderation_needs_a_queue() {
        let vm = Host::new().vm(FEATURES);
        let ask = || vm.ask::<[u8; 0], QueryClockResponse>(opcode::QUERY_CLOCK, &[]);
        let (first, second) = (ask().unwrap().clock, ask().unwrap().clock);
        assert!(first <= second);
        let moderate = |cqn, reserved| {
            let body = ModifyCq {
                cqn,
                count: 8,
                period: 100,
                reserved,
            };
            vm.tell(opcode::MODIFY_CQ, &body)
        };
        let cqn = vm.cq();
        moderate(cqn, 0).unwrap();
        assert_eq!(moderate(cqn, 1), Err(EINVAL));
        assert_eq!(moderate(cqn + 1, 0), Err(ENOENT));
    }
}
