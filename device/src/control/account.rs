// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The account of a VM is the sum of what its objects take, whatever was created and destroyed in
//! which order.
use std::collections::BTreeMap;

use proptest::prelude::*;
use virtio_rdma_spec::command::{
    mw_type, opcode, AllocMr, AllocMw, CreateContext, CreateCq, CreateQp, CreateSrq, Multicast,
    RegMr,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::verbs::qp_type;

use super::fixture::{Host, TestVm, WORKERS};
use super::queue_pair::{footprint, ATTACHMENT};
use crate::engine::tables::Slots;
use crate::footprint::{boxed, listed};
use crate::limits::Limits;
use crate::rnic::RnicSettings;
use crate::verbs::cq::Cq;
use crate::verbs::fast::FastMr;
use crate::verbs::keys::WINDOW;
use crate::verbs::mr::Mr;
use crate::verbs::srq::Srq;

/// A kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Context,
    Pd,
    Xrcd,
    Cq,
    Qp,
    Srq,
    Mr,
    FastMr,
    Mw,
    Attachment,
}

/// What uses others comes after them.
const KINDS: [Kind; 10] = [
    Kind::Context,
    Kind::Pd,
    Kind::Xrcd,
    Kind::Cq,
    Kind::Qp,
    Kind::Srq,
    Kind::Mr,
    Kind::FastMr,
    Kind::Mw,
    Kind::Attachment,
];

#[derive(Debug, Clone)]
enum Step {
    Create(Kind, bool),
    Destroy(Kind, prop::sample::Index),
    /// All memory is removed, and perhaps comes back.
    Move(bool),
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = || prop::sample::select(&KINDS[..]);
    let step = prop_oneof![
        20 => (kind(), any::<bool>()).prop_map(|(kind, scattered)| Step::Create(kind, scattered)),
        15 => (kind(), any::<prop::sample::Index>()).prop_map(|(kind, n)| Step::Destroy(kind, n)),
        1 => any::<bool>().prop_map(Step::Move),
        1 => Just(Step::Reset),
    ];
    prop::collection::vec(step, 1..120)
}

/// A VM, and what its objects are to take.
struct Model {
    vm: TestVm,
    /// Objects with what each takes beyond its place in a table.
    live: BTreeMap<Kind, Vec<(u32, u64)>>,
    /// What others are made in.
    pd: u32,
    context: u32,
    cq: u32,
    groups: u32,
}

impl Model {
    fn new(vm: TestVm) -> Self {
        let mut model = Self {
            vm,
            live: BTreeMap::new(),
            pd: 0,
            context: 0,
            cq: 0,
            groups: 0,
        };
        model.begin();
        model
    }

    fn begin(&mut self) {
        self.live.clear();
        self.create(Kind::Pd, false);
        self.create(Kind::Context, true);
        self.create(Kind::Cq, true);
        let first = |kind| self.live[&kind][0].0;
        (self.pd, self.context, self.cq) = (first(Kind::Pd), first(Kind::Context), first(Kind::Cq));
        self.create(Kind::Qp, false);
    }

    /// Two pages in a row, or not; and what a list of them takes.
    fn pages(&self, scattered: bool) -> (virtio_rdma_spec::command::PageList, u64) {
        let (pages, bytes) = if scattered {
            ([41, 40], 16)
        } else {
            ([40, 41], 0)
        };
        (self.vm.pages(1, &pages), bytes)
    }

    fn create(&mut self, kind: Kind, scattered: bool) {
        let vm = &self.vm;
        let (buffer, list) = self.pages(scattered);
        let handle = |opcode, body: &[u8]| {
            let response = vm.command(opcode, body)?;
            let handle = response.first_chunk().copied().unwrap_or_default();
            Ok::<_, u16>(u32::from_le_bytes(handle))
        };
        let (made, bytes) = match kind {
            Kind::Context => {
                let body: CreateContext = vm.context_body();
                // Its pages are in falling order.
                let own = listed::<Slots>(WORKERS.into());
                let bytes = own + 8 * u64::from(body.doorbell.count);
                (handle(opcode::CREATE_CONTEXT, &body.to_bytes()), bytes)
            }
            Kind::Pd => (handle(opcode::CREATE_PD, &[]), 0),
            Kind::Xrcd => (handle(opcode::CREATE_XRCD, &[]), 0),
            Kind::Cq => {
                let body = CreateCq {
                    buffer,
                    ..vm.cq_body()
                };
                let bytes = Cq::FOOTPRINT + list;
                (handle(opcode::CREATE_CQ, &body.to_bytes()), bytes)
            }
            Kind::Qp => {
                let body = CreateQp {
                    pd: self.pd,
                    context: self.context,
                    send_cq: self.cq,
                    recv_cq: self.cq,
                    qp_type: qp_type::UD,
                    sq_entries: 4,
                    sq_stride: 128,
                    sq_offset: 128,
                    rq_entries: 4,
                    rq_stride: 32,
                    rq_offset: 1024,
                    max_send_sge: 1 + u16::from(scattered),
                    max_recv_sge: 1,
                    buffer,
                    ..CreateQp::default()
                };
                let bytes = footprint(&body, 1) + list;
                (handle(opcode::CREATE_QP, &body.to_bytes()), bytes)
            }
            Kind::Srq => {
                let body = CreateSrq {
                    pd: self.pd,
                    context: self.context,
                    entries: 16,
                    stride: 32,
                    ring_offset: 128,
                    max_sge: 1,
                    buffer,
                    ..CreateSrq::default()
                };
                let bytes = Srq::FOOTPRINT + list;
                (handle(opcode::CREATE_SRQ, &body.to_bytes()), bytes)
            }
            Kind::Mr => {
                let body = RegMr {
                    pd: self.pd,
                    length: 8192,
                    pages: buffer,
                    ..RegMr::default()
                };
                let bytes = boxed::<Mr>() + list;
                (handle(opcode::REG_MR, &body.to_bytes()), bytes)
            }
            Kind::FastMr => {
                let body = AllocMr {
                    pd: self.pd,
                    max_pages: 1 << 10,
                    ..AllocMr::default()
                };
                let bytes = boxed::<FastMr>();
                (handle(opcode::ALLOC_MR, &body.to_bytes()), bytes)
            }
            Kind::Mw => {
                let body = AllocMw {
                    pd: self.pd,
                    mw_type: mw_type::TYPE_2,
                    ..AllocMw::default()
                };
                (handle(opcode::ALLOC_MW, &body.to_bytes()), WINDOW)
            }
            Kind::Attachment => {
                self.groups += 1;
                let body = self.multicast(self.groups);
                let made = vm.tell(opcode::ATTACH_MCAST, &body).map(|()| self.groups);
                (made, ATTACHMENT)
            }
        };
        if let Ok(handle) = made {
            self.live.entry(kind).or_default().push((handle, bytes));
        }
    }

    /// The attachment of the first queue pair to a group.
    fn multicast(&self, number: u32) -> Multicast {
        let [a, b, c, d] = number.to_be_bytes();
        Multicast {
            gid: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d],
            qpn: self.live[&Kind::Qp][0].0,
            reserved: 0,
        }
    }

    fn count(&self, kind: Kind) -> usize {
        self.live.get(&kind).map_or(0, Vec::len)
    }

    /// Destroys any of a kind but the first queue pair, which is attached to groups.
    fn destroy_any(&mut self, kind: Kind, index: &prop::sample::Index) {
        let first = usize::from(kind == Kind::Qp);
        let count = self.count(kind).saturating_sub(first);
        if count != 0 {
            self.destroy(kind, first + index.index(count));
        }
    }

    fn destroy(&mut self, kind: Kind, at: usize) {
        let handle = self.live[&kind][at].0;
        let vm = &self.vm;
        let destroyed = match kind {
            Kind::Context => vm.handle(opcode::DESTROY_CONTEXT, handle),
            Kind::Pd => vm.handle(opcode::DESTROY_PD, handle),
            Kind::Xrcd => vm.handle(opcode::DESTROY_XRCD, handle),
            Kind::Cq => vm.handle(opcode::DESTROY_CQ, handle),
            Kind::Qp => vm.handle(opcode::DESTROY_QP, handle),
            Kind::Srq => vm.handle(opcode::DESTROY_SRQ, handle),
            Kind::Mr | Kind::FastMr => vm.handle(opcode::DEREG_MR, handle),
            Kind::Mw => vm.handle(opcode::DEALLOC_MW, handle),
            Kind::Attachment => vm.tell(opcode::DETACH_MCAST, &self.multicast(handle)),
        };
        // What is in use stays.
        if destroyed.is_ok() {
            if let Some(live) = self.live.get_mut(&kind) {
                live.remove(at);
            }
        }
    }

    /// What all objects and tables take.
    fn expected(&self) -> u64 {
        let objects = self.live.values().flatten().map(|(_, bytes)| bytes);
        let tables = self.vm.rnic.tables();
        let slots = tables
            .contexts
            .iter()
            .flat_map(|(_, context)| &context.workers);
        objects.sum::<u64>()
            + tables.contexts.footprint()
            + tables.pds.footprint()
            + tables.xrcds.footprint()
            + tables.cqs.footprint()
            + tables.qps.footprint()
            + tables.srqs.footprint()
            + tables.keys.footprint()
            + slots.map(Slots::footprint).sum::<u64>()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_account_is_the_sum_of_what_there_is(steps in steps(), limit in 16u64 << 10..256 << 10) {
        let features = [
            feature::RC, feature::UD, feature::SRQ, feature::XRC, feature::MW,
            feature::FAST_REG, feature::PHYSICAL_MR,
        ];
        let features = features.iter().fold(0, |all, bit| all | 1 << bit);
        let host = Host::new();
        let limits = Limits { footprint: Some(limit), ..Limits::default() };
        let settings = RnicSettings { limits, ..RnicSettings::default() };
        let mut model = Model::new(host.vm_of(features, settings));
        let account = model.vm.rnic.vm().footprint().clone();
        for step in steps {
            match &step {
                Step::Create(kind, scattered) => model.create(*kind, *scattered),
                Step::Destroy(kind, index) => model.destroy_any(*kind, index),
                Step::Move(back) => {
                    let memory = model.vm.memory.clone();
                    model.vm.rnic.set_memory(None);
                    prop_assert_eq!(account.bytes(), model.expected());
                    if *back {
                        model.vm.rnic.set_memory(Some(memory));
                    }
                }
                Step::Reset => {
                    model.vm.rnic.reset();
                    prop_assert_eq!(account.bytes(), 0);
                    let memory = model.vm.memory.clone();
                    model.vm.rnic.set_memory(Some(memory));
                    model.begin();
                }
            }
            prop_assert_eq!(account.bytes(), model.expected(), "{:?}", step);
            prop_assert!(account.bytes() <= limit);
        }
        // What uses others goes first.
        for kind in KINDS.iter().rev() {
            for at in (0..model.count(*kind)).rev() {
                model.destroy(*kind, at);
            }
            prop_assert_eq!(model.count(*kind), 0);
        }
        prop_assert_eq!(account.bytes(), 0);
    }
}
