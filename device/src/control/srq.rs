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
    let inserted = tables.present(pages).and_then(|buffer| {
        let account = &tables.footprint;
        tables.srqs.insert_with(|number| {
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
                share: account.share(Srq::FOOTPRINT)?,
            })))
        })
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
    srq.resize(tables.present(pages)?, queue, limit)?;
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

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::command::opcode;
    use virtio_rdma_spec::command::status::{EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM, EOPNOTSUPP};
    use virtio_rdma_spec::command::{CreateQp, Handle};

    use super::super::fixture::{name, page, Host, TestVm, LIMITS};
    use super::*;

    const BASIC: u64 = 1 << feature::RC | 1 << feature::SRQ;
    const ALL: u64 = BASIC | 1 << feature::XRC | 1 << feature::SRQ_RESIZE;

    type Change<T> = fn(&mut T);

    fn created(
        vm: &TestVm,
        good: &CreateSrq,
        change: Change<CreateSrq>,
    ) -> Result<u32, &'static str> {
        let mut body = *good;
        change(&mut body);
        vm.make_srq(&body).map(|made| made.srqn).map_err(name)
    }

    fn query(vm: &TestVm, handle: u32) -> Result<QuerySrqResponse, &'static str> {
        let body = Handle {
            handle,
            reserved: 0,
        };
        vm.ask(opcode::QUERY_SRQ, &body).map_err(name)
    }

    // D-CMD-004, D-CMD-008.
    #[test]
    fn a_shared_receive_queue_is_checked_before_it_is_created() {
        let vm = Host::new().vm(BASIC);
        let good = vm.srq_body();
        let before = vm.rnic.tables().footprint.bytes();
        let create = |change| created(&vm, &good, change);
        assert_eq!(create(|s| s.pd += 1), Err(name(ENOENT)));
        assert_eq!(create(|s| s.context += 1), Err(name(ENOENT)));
        assert_eq!(
            create(|s| s.srq_type = srq_type::XRC),
            Err(name(EOPNOTSUPP))
        );
        for change in [
            (|s| s.srq_type = 2) as Change<CreateSrq>,
            |s| s.xrcd = 1,
            |s| s.cq = 1,
            |s| s.entries = 0,
            |s| s.entries = 12,
            |s| s.entries = 256,
            |s| s.stride = 16,
            |s| s.stride = 48,
            |s| s.max_sge = 2,
            |s| s.max_sge = MAX_SGE as u16 + 1,
            |s| s.ring_offset = 64,
            |s| s.ring_offset = 136,
            |s| s.limit = 17,
            |s| s.reserved0 = 1,
            |s| s.reserved1 = 1,
            |s| s.reserved2 = 1,
            |s| s.buffer.page_shift = 13,
        ] {
            assert_eq!(create(change), Err(name(EINVAL)));
        }
        assert_eq!(create(|s| s.buffer.addr = 1 << 40), Err(name(EFAULT)));
        assert_eq!(
            vm.rnic.tables().footprint.bytes(),
            before,
            "nothing is left"
        );
        let made: Vec<_> = (0..LIMITS.srqs).map(|_| create(|_| ()).unwrap()).collect();
        assert_eq!(create(|_| ()), Err(name(ENOMEM)));
        assert_eq!(vm.handle(opcode::DESTROY_PD, good.pd), Err(EBUSY));
        assert_eq!(vm.handle(opcode::DESTROY_CONTEXT, good.context), Err(EBUSY));
        for srq in made {
            vm.handle(opcode::DESTROY_SRQ, srq).unwrap();
            assert_eq!(vm.handle(opcode::DESTROY_SRQ, srq), Err(ENOENT));
        }
        vm.handle(opcode::DESTROY_PD, good.pd).unwrap();
        vm.handle(opcode::DESTROY_CONTEXT, good.context).unwrap();
    }

    // D-CMD-008.
    #[test]
    fn a_limit_is_told_and_no_more_than_there_are_entries() {
        let vm = Host::new().vm(BASIC);
        let srqn = vm.make_srq(&vm.srq_body()).unwrap().srqn;
        let modify = |srqn, limit, reserved| {
            let body = ModifySrq {
                srqn,
                limit,
                reserved,
            };
            vm.tell(opcode::MODIFY_SRQ, &body).map_err(name)
        };
        let limit = || {
            let told = query(&vm, srqn).unwrap();
            assert_eq!((told.entries, told.max_sge), (16, 1));
            told.limit
        };
        assert_eq!(limit(), 4);
        assert_eq!(modify(srqn, 16, 0), Ok(()));
        assert_eq!(limit(), 16);
        assert_eq!(modify(srqn, 17, 0), Err(name(EINVAL)));
        assert_eq!(modify(srqn, 1, 1), Err(name(EINVAL)));
        assert_eq!(modify(srqn + 1, 1, 0), Err(name(ENOENT)));
        assert_eq!(query(&vm, srqn + 1), Err(name(ENOENT)));
        assert_eq!(limit(), 16, "what is refused changes nothing");
        assert_eq!(modify(srqn, 0, 0), Ok(()));
        assert_eq!(limit(), 0);
    }

    // D-CMD-004, D-CMD-008.
    #[test]
    fn another_buffer_is_checked_as_the_first_was() {
        let vm = Host::new().vm(ALL);
        let srqn = vm.make_srq(&vm.srq_body()).unwrap().srqn;
        let good = ResizeSrq {
            srqn,
            entries: 8,
            ring_offset: 128,
            buffer: page(31),
            ..ResizeSrq::default()
        };
        let resize = |change: Change<ResizeSrq>| {
            let mut body = good;
            change(&mut body);
            vm.tell(opcode::RESIZE_SRQ, &body).map_err(name)
        };
        assert_eq!(resize(|r| r.srqn += 1), Err(name(ENOENT)));
        for change in [
            (|r| r.entries = 0) as Change<ResizeSrq>,
            |r| r.entries = 12,
            |r| r.entries = 256,
            // The limit is 4.
            |r| r.entries = 2,
            |r| r.ring_offset = 64,
            |r| r.ring_offset = 144,
            |r| r.flags = 2,
            |r| (r.flags, r.limit) = (resize_srq_flag::LIMIT, 9),
            |r| r.reserved0 = 1,
            |r| r.reserved1 = 1,
        ] {
            assert_eq!(resize(change), Err(name(EINVAL)));
        }
        assert_eq!(resize(|r| r.buffer.addr = 1 << 40), Err(name(EFAULT)));
        assert_eq!(query(&vm, srqn).unwrap().entries, 16);
        assert_eq!(resize(|_| ()), Ok(()));
        let told = query(&vm, srqn).unwrap();
        assert_eq!((told.entries, told.limit), (8, 4));
    }

    // D-CMD-008.
    #[test]
    fn a_queue_of_a_domain_needs_the_domain_and_a_completion_queue() {
        let vm = Host::new().vm(ALL);
        let domain = vm.create(opcode::CREATE_XRCD).unwrap();
        let cq = vm.cq();
        let good = CreateSrq {
            srq_type: srq_type::XRC,
            xrcd: domain,
            cq,
            ..vm.srq_body()
        };
        assert_eq!(created(&vm, &good, |s| s.xrcd += 1), Err(name(ENOENT)));
        assert_eq!(created(&vm, &good, |s| s.cq += 1), Err(name(ENOENT)));
        let srq = created(&vm, &good, |_| ()).unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_XRCD, domain), Err(EBUSY));
        assert_eq!(vm.handle(opcode::DESTROY_CQ, cq), Err(EBUSY));
        // Messages name it, queue pairs do not.
        let body = CreateQp {
            pd: good.pd,
            context: good.context,
            send_cq: cq,
            recv_cq: cq,
            qp_type: virtio_rdma_spec::verbs::qp_type::RC,
            srq,
            buffer: page(20),
            ..CreateQp::default()
        };
        assert_eq!(vm.make_qp(&body).map_err(name), Err(name(EINVAL)));
        vm.handle(opcode::DESTROY_SRQ, srq).unwrap();
        vm.handle(opcode::DESTROY_XRCD, domain).unwrap();
        let another = vm.create(opcode::CREATE_XRCD).unwrap();
        vm.create(opcode::CREATE_XRCD).unwrap();
        assert_eq!(vm.create(opcode::CREATE_XRCD), Err(ENOMEM));
        vm.handle(opcode::DESTROY_XRCD, another).unwrap();
    }

    // D-CMD-008.
    #[test]
    fn a_queue_that_is_used_is_not_destroyed() {
        let vm = Host::new().vm(BASIC);
        let body = vm.srq_body();
        let srq = vm.make_srq(&body).unwrap().srqn;
        let cq = vm.cq();
        let qp = vm
            .make_qp(&CreateQp {
                pd: body.pd,
                context: body.context,
                send_cq: cq,
                recv_cq: cq,
                qp_type: virtio_rdma_spec::verbs::qp_type::RC,
                srq,
                buffer: page(20),
                ..CreateQp::default()
            })
            .unwrap();
        assert_eq!(vm.handle(opcode::DESTROY_SRQ, srq), Err(EBUSY));
        vm.handle(opcode::DESTROY_QP, qp.qpn).unwrap();
        vm.handle(opcode::DESTROY_SRQ, srq).unwrap();
    }
}
