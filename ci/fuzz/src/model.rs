// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `model`: sequences of verbs, each of which a simple model of the objects carries out,
//! too: which object exists, what uses it, the state of each queue pair, what each window is bound
//! to. The status of each command, and of each completion, must be one that the model allows.
use std::collections::{BTreeMap, BTreeSet};

use arbitrary::{Result, Unstructured};
use virtio_rdma_spec::command::status::{EBUSY, EINVAL, ENOENT, ENOMEM};
use virtio_rdma_spec::command::{
    mw_type, opcode, rereg_flag, AllocMw, CreateContext, HandleResponse, Multicast,
    QueryQpResponse, RegMr, RegMrResponse, ReregMr,
};
use virtio_rdma_spec::ring::{BindMw, SendWqe, Sge, BIND_MW_OFFSET};
use virtio_rdma_spec::verbs::{
    access, qp_attr, qp_state, qp_type, send_flag, wc_status, wr_opcode,
};

use crate::host::{bytes, Guest, Host, FEATURES, LIMITS, PAGE};
use crate::neighbour::Neighbour;
use crate::queues::{attributes, Context, Cq, Qp, Refs, Srq};

/// Verbs of an input.
const MOST_STEPS: usize = 250;
/// Handles of a kind that are remembered, whether they still exist or not.
const REMEMBERED: usize = 10;
/// Pages of a region, and bytes.
const REGION: usize = 1;
/// Rounds that a work request may take.
const ROUNDS: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Context,
    Pd,
    Xrcd,
    Cq,
    Mr,
    Mw,
    Srq,
    Qp,
}

/// Names an object: its kind and handle. Windows have that with zero in the low 8 bits.
type Id = (Kind, u32);

/// What an object is beside what it uses.
#[derive(Debug)]
enum Detail {
    Nothing,
    Context { page: usize },
    Cq(Cq),
    Mr { pd: u32, access: u32 },
    Mw(Window),
    Srq { srq: Srq, xrc: bool },
    Qp(QueuePair),
}

#[derive(Debug, Clone, Copy)]
struct Window {
    pd: u32,
    type_2: bool,
    /// Its present key.
    key: u32,
    /// The region and the queue pair.
    bound: Option<(u32, u32)>,
    /// Whether that is for writing.
    writes: bool,
}

#[derive(Debug, Clone, Copy)]
struct QueuePair {
    qp: Qp,
    pd: u32,
    cq: u32,
    state: u8,
}

#[derive(Debug)]
struct Object {
    uses: Vec<Id>,
    detail: Detail,
}

/// The guest, and what it has according to the model.
struct Model {
    guest: Guest,
    objects: BTreeMap<Id, Object>,
    seen: BTreeMap<Kind, Vec<u32>>,
    /// Pages of doorbell memory that no context has.
    doorbells: Vec<usize>,
    table: usize,
    memory: usize,
    attached: BTreeSet<(u32, u8)>,
    posted: u64,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::new();
    let mut neighbour = Neighbour::new(&host);
    let mut model = Model::new(&host);
    model.begin().expect("objects to begin with");
    let mut u = Unstructured::new(data);
    for _ in 0..MOST_STEPS {
        if u.is_empty() || model.step(&mut host, &mut u).is_err() {
            break;
        }
    }
    model.check_counts();
    model.destroy_all();
    model.check_counts();
    neighbour.check(&mut host);
    host.remove(model.guest);
    neighbour.leave(&mut host);
}

/// The status must be one of these reasons; without any, there is none.
fn agree<T>(what: &str, result: &std::result::Result<T, u16>, reasons: &[u16]) {
    match result {
        Ok(_) => assert!(reasons.is_empty(), "{what}: done in spite of {reasons:?}"),
        Err(status) => assert!(
            reasons.contains(status),
            "{what}: {status} is none of {reasons:?}"
        ),
    }
}

/// Whether a queue pair changes from a state to another with the usual attributes of a connection,
/// or, with `alone`, without any.
fn changes(qp_type: u8, from: u8, to: u8, alone: bool) -> bool {
    use qp_state::{ERR, INIT, RESET, RTR, RTS, SQD};
    match (from, to) {
        (_, RESET) => true,
        (RESET, ERR) => false,
        (_, ERR) | (RTS | SQD, SQD) => true,
        (INIT, INIT) => true,
        (RESET, INIT) => !alone,
        // Only datagrams need no path.
        (INIT, RTR) => !alone || matches!(qp_type, qp_type::UD | qp_type::GSI | qp_type::SRD),
        (RTR, RTS) => !alone,
        (RTS | SQD, RTS) => alone,
        _ => false,
    }
}

impl Model {
    fn new(host: &Host) -> Self {
        let mut guest = host.guest(1, FEATURES);
        let mut doorbells = Vec::new();
        for _ in 0..=LIMITS.contexts {
            doorbells.push(guest.take_pages(Guest::DOORBELL_PAGES));
        }
        let table = guest.take_pages(1);
        let memory = guest.take_pages(REGION);
        Self {
            guest,
            objects: BTreeMap::new(),
            seen: BTreeMap::new(),
            doorbells,
            table,
            memory,
            attached: BTreeSet::new(),
            posted: 0,
        }
    }

    /// Creates what much else needs, by the verbs that an input has: two connected queue pairs, a
    /// region, and a window of each type, in one protection domain.
    fn begin(&mut self) -> Result<()> {
        fn bytes(data: &'static [u8]) -> Unstructured<'static> {
            Unstructured::new(data)
        }
        self.create_plain(Kind::Pd);
        self.create_context();
        self.create_cq();
        self.register(&mut bytes(&[0]))?;
        self.allocate_window(&mut bytes(&[0, 0]))?;
        self.allocate_window(&mut bytes(&[0, 1]))?;
        for index in 0..2 {
            self.create_qp(&mut bytes(&[0, 0, 0, 0, 2]))?;
            self.modify(&mut Unstructured::new(&[index, 0]))?;
        }
        let states = (0..2).filter_map(|index| {
            let seen = self.seen.get(&Kind::Qp)?;
            match self.detail((Kind::Qp, *seen.get(index)?))? {
                Detail::Qp(qp) => Some(qp.state),
                _ => None,
            }
        });
        assert!(states.eq([qp_state::RTS; 2]));
        Ok(())
    }

    fn count(&self, kind: Kind) -> u32 {
        self.objects.keys().filter(|id| id.0 == kind).count() as u32
    }

    /// A handle of a kind, of an object that exists or has existed.
    fn pick(&self, kind: Kind, u: &mut Unstructured) -> Result<u32> {
        let seen = self.seen.get(&kind).map_or(&[][..], Vec::as_slice);
        let byte: u8 = u.arbitrary()?;
        Ok(match seen.len() {
            0 => u32::from(byte) + 1,
            len => seen[usize::from(byte) % len],
        })
    }

    fn is_used(&self, id: Id) -> bool {
        let used = |object: &Object| object.uses.contains(&id);
        let bound = |object: &Object| match &object.detail {
            Detail::Mw(window) => window.bound.is_some_and(|(mr, _)| id == (Kind::Mr, mr)),
            _ => false,
        };
        self.objects.values().any(|o| used(o) || bound(o))
    }

    /// Why an object that uses these cannot be created.
    fn reasons(&self, kind: Kind, limit: u32, uses: &[Id]) -> Vec<u16> {
        let mut reasons = Vec::new();
        if uses.iter().any(|id| !self.objects.contains_key(id)) {
            reasons.push(ENOENT);
        }
        if self.count(kind) >= limit {
            reasons.push(ENOMEM);
        }
        reasons
    }

    fn add(&mut self, id: Id, uses: Vec<Id>, detail: Detail) {
        let (kind, handle) = id;
        let before = self.objects.insert(id, Object { uses, detail });
        assert!(before.is_none(), "{id:?} is given out twice");
        let seen = self.seen.entry(kind).or_default();
        seen.retain(|other| *other != handle);
        if seen.len() == REMEMBERED {
            seen.remove(0);
        }
        seen.push(handle);
    }

    fn step(&mut self, host: &mut Host, u: &mut Unstructured) -> Result<()> {
        match u.arbitrary::<u8>()? {
            0..=9 => self.create_context(),
            10..=19 => self.create_plain(Kind::Pd),
            20..=24 => self.create_plain(Kind::Xrcd),
            25..=39 => self.create_cq(),
            40..=59 => self.register(u)?,
            60..=69 => self.allocate_window(u)?,
            70..=79 => self.create_srq(u)?,
            80..=109 => self.create_qp(u)?,
            110..=149 => self.destroy(u)?,
            150..=184 => self.modify(u)?,
            185..=194 => self.query(u)?,
            195..=214 => self.bind(host, u)?,
            215..=224 => self.invalidate(host, u)?,
            225..=239 => self.write(host, u)?,
            240..=245 => self.change_pd(u)?,
            246..=250 => self.multicast(u)?,
            251 => self.check_counts(),
            _ => host.rounds(1),
        }
        Ok(())
    }

    fn create_context(&mut self) {
        let page = *self.doorbells.last().expect("more than contexts");
        let body = CreateContext {
            doorbell: self.guest.list_at(self.table, page, Guest::DOORBELL_PAGES),
            reserved: 0,
        };
        let made = self
            .guest
            .ask::<_, HandleResponse>(opcode::CREATE_CONTEXT, &body);
        let reasons = self.reasons(Kind::Context, LIMITS.contexts, &[]);
        agree("CREATE_CONTEXT", &made, &reasons);
        if let Ok(made) = made {
            self.doorbells.pop();
            let detail = Detail::Context { page };
            self.add((Kind::Context, made.handle), Vec::new(), detail);
        }
    }

    fn create_plain(&mut self, kind: Kind) {
        let (opcode, limit) = match kind {
            Kind::Pd => (opcode::CREATE_PD, LIMITS.pds),
            _ => (opcode::CREATE_XRCD, LIMITS.xrcds),
        };
        let made = self.guest.create(opcode);
        agree("create", &made, &self.reasons(kind, limit, &[]));
        if let Ok(handle) = made {
            self.add((kind, handle), Vec::new(), Detail::Nothing);
        }
    }

    fn create_cq(&mut self) {
        let made = self.guest.cq();
        let reasons = self.reasons(Kind::Cq, LIMITS.cqs, &[]);
        agree("CREATE_CQ", &made, &reasons);
        if let Ok(cq) = made {
            self.add((Kind::Cq, cq.number), Vec::new(), Detail::Cq(cq));
        }
    }

    /// All regions are of the same memory.
    fn iova(&self) -> u64 {
        Guest::address(self.memory)
    }

    fn register(&mut self, u: &mut Unstructured) -> Result<()> {
        const ACCESS: [u32; 4] = [
            access::LOCAL_WRITE | access::REMOTE_WRITE | access::MW_BIND,
            access::LOCAL_WRITE | access::MW_BIND,
            access::MW_BIND,
            access::REMOTE_READ,
        ];
        let pd = self.pick(Kind::Pd, u)?;
        let access = *u.choose(&ACCESS)?;
        let body = RegMr {
            pd,
            access,
            iova: self.iova(),
            length: (REGION * PAGE) as u64,
            pages: self.guest.list(self.memory, REGION),
            key: u.int_in_range(0..=1)?,
            ..RegMr::default()
        };
        let made = self.guest.ask::<_, RegMrResponse>(opcode::REG_MR, &body);
        let uses = vec![(Kind::Pd, pd)];
        let reasons = self.reasons(Kind::Mr, LIMITS.mrs, &uses);
        agree("REG_MR", &made, &reasons);
        if let Ok(made) = made {
            assert_eq!(made.lkey, made.rkey);
            self.add((Kind::Mr, made.lkey), uses, Detail::Mr { pd, access });
        }
        Ok(())
    }

    fn change_pd(&mut self, u: &mut Unstructured) -> Result<()> {
        let (mr, pd) = (self.pick(Kind::Mr, u)?, self.pick(Kind::Pd, u)?);
        let id = (Kind::Mr, mr);
        let body = ReregMr {
            lkey: mr,
            flags: rereg_flag::PD,
            pd,
            key: (mr & 0xff) as u8,
            ..ReregMr::default()
        };
        let made = self.guest.ask::<_, RegMrResponse>(opcode::REREG_MR, &body);
        let mut reasons = self.reasons(Kind::Mr, u32::MAX, &[id, (Kind::Pd, pd)]);
        if self.is_used(id) {
            reasons.push(EBUSY);
        }
        agree("REREG_MR", &made, &reasons);
        if let (Ok(made), Some(object)) = (made, self.objects.get_mut(&id)) {
            assert_eq!(made.lkey, mr);
            object.uses = vec![(Kind::Pd, pd)];
            if let Detail::Mr { pd: of, .. } = &mut object.detail {
                *of = pd;
            }
        }
        Ok(())
    }

    fn allocate_window(&mut self, u: &mut Unstructured) -> Result<()> {
        let pd = self.pick(Kind::Pd, u)?;
        let type_2 = u.arbitrary()?;
        let body = AllocMw {
            pd,
            mw_type: if type_2 {
                mw_type::TYPE_2
            } else {
                mw_type::TYPE_1
            },
            key: 3,
            ..AllocMw::default()
        };
        let made = self.guest.ask::<_, HandleResponse>(opcode::ALLOC_MW, &body);
        let uses = vec![(Kind::Pd, pd)];
        let reasons = self.reasons(Kind::Mw, LIMITS.mws, &uses);
        agree("ALLOC_MW", &made, &reasons);
        if let Ok(made) = made {
            let window = Window {
                pd,
                type_2,
                key: made.handle,
                bound: None,
                writes: false,
            };
            let id = (Kind::Mw, made.handle & !0xff);
            self.add(id, uses, Detail::Mw(window));
        }
        Ok(())
    }

    fn context(&self, handle: u32) -> Context {
        let page = match self.objects.get(&(Kind::Context, handle)) {
            Some(Object {
                detail: Detail::Context { page },
                ..
            }) => *page,
            _ => 0,
        };
        Context { handle, page }
    }

    fn create_srq(&mut self, u: &mut Unstructured) -> Result<()> {
        let (pd, context) = (self.pick(Kind::Pd, u)?, self.pick(Kind::Context, u)?);
        let xrc = u.ratio(1, 2)?;
        let mut refs = Refs {
            pd,
            ..Refs::default()
        };
        let mut uses = vec![(Kind::Pd, pd), (Kind::Context, context)];
        if xrc {
            refs.xrcd = self.pick(Kind::Xrcd, u)?;
            refs.cq = self.pick(Kind::Cq, u)?;
            uses.extend([(Kind::Xrcd, refs.xrcd), (Kind::Cq, refs.cq)]);
        }
        let made = self.guest.srq(self.context(context), refs);
        let reasons = self.reasons(Kind::Srq, LIMITS.srqs, &uses);
        agree("CREATE_SRQ", &made, &reasons);
        if let Ok(srq) = made {
            self.add((Kind::Srq, srq.number), uses, Detail::Srq { srq, xrc });
        }
        Ok(())
    }

    fn create_qp(&mut self, u: &mut Unstructured) -> Result<()> {
        const TYPES: [u8; 9] = [
            qp_type::RC,
            qp_type::RC,
            qp_type::RC,
            qp_type::UC,
            qp_type::UD,
            qp_type::SRD,
            qp_type::GSI,
            qp_type::XRC_INI,
            qp_type::XRC_TGT,
        ];
        let qp_type = *u.choose(&TYPES)?;
        let target = qp_type == qp_type::XRC_TGT;
        let initiator = qp_type == qp_type::XRC_INI;
        let mut refs = Refs::default();
        let mut uses = Vec::new();
        let mut context = 0;
        if target {
            refs.xrcd = self.pick(Kind::Xrcd, u)?;
            uses.push((Kind::Xrcd, refs.xrcd));
        } else {
            refs.pd = self.pick(Kind::Pd, u)?;
            refs.cq = self.pick(Kind::Cq, u)?;
            context = self.pick(Kind::Context, u)?;
            uses.extend([
                (Kind::Pd, refs.pd),
                (Kind::Cq, refs.cq),
                (Kind::Context, context),
            ]);
        }
        if !target && !initiator && qp_type != qp_type::GSI && u.ratio(1, 3)? {
            refs.srq = self.pick(Kind::Srq, u)?;
            uses.push((Kind::Srq, refs.srq));
        }
        let made = self.guest.qp(qp_type, self.context(context), refs);
        let mut reasons = self.reasons(Kind::Qp, LIMITS.qps, &uses);
        if let Some(Detail::Srq { xrc: true, .. }) = self.detail((Kind::Srq, refs.srq)) {
            reasons.push(EINVAL);
        }
        let is_gsi = |object: &Object| match &object.detail {
            Detail::Qp(other) => other.qp.qp_type == qp_type::GSI,
            _ => false,
        };
        if qp_type == qp_type::GSI && self.objects.values().any(is_gsi) {
            reasons.push(EBUSY);
        }
        agree("CREATE_QP", &made, &reasons);
        if let Ok(qp) = made {
            let detail = Detail::Qp(QueuePair {
                qp,
                pd: refs.pd,
                cq: refs.cq,
                state: qp_state::RESET,
            });
            self.add((Kind::Qp, qp.number), uses, detail);
        }
        Ok(())
    }

    fn detail(&self, id: Id) -> Option<&Detail> {
        self.objects.get(&id).map(|object| &object.detail)
    }

    fn destroy(&mut self, u: &mut Unstructured) -> Result<()> {
        const KINDS: [Kind; 10] = [
            Kind::Context,
            Kind::Pd,
            Kind::Xrcd,
            Kind::Cq,
            Kind::Mr,
            Kind::Mr,
            Kind::Mw,
            Kind::Srq,
            Kind::Qp,
            Kind::Qp,
        ];
        let kind = *u.choose(&KINDS)?;
        let handle = self.pick(kind, u)?;
        self.destroy_one((kind, handle));
        Ok(())
    }

    fn destroy_one(&mut self, id: Id) {
        let (kind, handle) = id;
        let opcode = match kind {
            Kind::Context => opcode::DESTROY_CONTEXT,
            Kind::Pd => opcode::DESTROY_PD,
            Kind::Xrcd => opcode::DESTROY_XRCD,
            Kind::Cq => opcode::DESTROY_CQ,
            Kind::Mr => opcode::DEREG_MR,
            Kind::Mw => opcode::DEALLOC_MW,
            Kind::Srq => opcode::DESTROY_SRQ,
            Kind::Qp => opcode::DESTROY_QP,
        };
        let result = self.guest.handle(opcode, handle);
        let mut reasons = Vec::new();
        if !self.objects.contains_key(&id) {
            reasons.push(ENOENT);
        } else if self.is_used(id) {
            reasons.push(EBUSY);
        }
        agree(&format!("{id:?}"), &result, &reasons);
        if result.is_err() {
            return;
        }
        let Some(object) = self.objects.remove(&id) else {
            return;
        };
        match object.detail {
            Detail::Context { page } => {
                self.guest.view.write(page * PAGE, &[0; 3 * PAGE]);
                self.doorbells.push(page);
            }
            Detail::Cq(cq) => self.guest.give_page(cq.page),
            Detail::Srq { srq, .. } => self.guest.give_page(srq.rq.page()),
            Detail::Qp(qp) => {
                self.guest.give_page(qp.qp.sq.page());
                self.attached.retain(|(qpn, _)| *qpn != handle);
                // What it bound is bound to nothing, if it was only for it.
                for window in self.windows() {
                    if window.type_2 && window.bound.is_some_and(|(_, by)| by == handle) {
                        window.bound = None;
                    }
                }
            }
            _ => {}
        }
    }

    fn windows(&mut self) -> impl Iterator<Item = &mut Window> {
        self.objects
            .values_mut()
            .filter_map(|object| match &mut object.detail {
                Detail::Mw(window) => Some(window),
                _ => None,
            })
    }

    fn queue_pair(&mut self, handle: u32) -> Option<&mut QueuePair> {
        match &mut self.objects.get_mut(&(Kind::Qp, handle))?.detail {
            Detail::Qp(qp) => Some(qp),
            _ => None,
        }
    }

    fn modify(&mut self, u: &mut Unstructured) -> Result<()> {
        let handle = self.pick(Kind::Qp, u)?;
        let states: &[u8] = match u.arbitrary::<u8>()? {
            // The whole way.
            0..=99 => &[qp_state::INIT, qp_state::RTR, qp_state::RTS],
            byte => {
                let state = byte % (qp_state::ERR + 1);
                return self.change_state(handle, state, u.arbitrary()?);
            }
        };
        states
            .iter()
            .try_for_each(|state| self.change_state(handle, *state, false))
    }

    fn change_state(&mut self, handle: u32, state: u8, alone: bool) -> Result<()> {
        let gid = self.guest.gid;
        let known = self.queue_pair(handle).copied();
        let qp_type = known.map_or(qp_type::RC, |qp| qp.qp.qp_type);
        // Each is connected to itself.
        let (attr, mut mask) = attributes(qp_type, state, gid, handle);
        if alone {
            mask = qp_attr::STATE;
        }
        let result = self.guest.modify(handle, (attr, mask));
        let reasons: &[u16] = match known {
            None => &[ENOENT],
            Some(qp) if !changes(qp_type, qp.state, state, alone) => &[EINVAL],
            Some(_) => &[],
        };
        let what = format!("MODIFY_QP {known:?} to {state} alone {alone}");
        agree(&what, &result, reasons);
        if let (Ok(()), Some(qp)) = (result, self.queue_pair(handle)) {
            qp.state = state;
            if state == qp_state::RESET {
                let mut copy = *qp;
                copy.qp.sq.reset(&self.guest);
                if let Some(qp) = self.queue_pair(handle) {
                    *qp = copy;
                }
            }
        }
        Ok(())
    }

    fn query(&mut self, u: &mut Unstructured) -> Result<()> {
        let handle = self.pick(Kind::Qp, u)?;
        let body = virtio_rdma_spec::command::Handle {
            handle,
            reserved: 0,
        };
        let result = self
            .guest
            .ask::<_, QueryQpResponse>(opcode::QUERY_QP, &body);
        let known = self.queue_pair(handle).copied();
        let reasons: &[u16] = if known.is_none() { &[ENOENT] } else { &[] };
        agree("QUERY_QP", &result, reasons);
        if let (Ok(response), Some(qp)) = (result, known) {
            assert_eq!(response.attr.qp_state, qp.state, "{qp:?}");
        }
        Ok(())
    }

    /// Has a queue pair carry out a work request, if it is an RC queue pair that carries out or
    /// flushes one. Returns whether it was carried out: its completion has one of these statuses.
    fn post(&mut self, host: &mut Host, handle: u32, entry: &[u8], expected: u8) -> Option<bool> {
        let mut of = *self.queue_pair(handle)?;
        let runs = of.state == qp_state::RTS;
        if of.qp.qp_type != qp_type::RC || !(runs || of.state == qp_state::ERR) {
            return None;
        }
        let expected = if runs {
            expected
        } else {
            wc_status::WR_FLUSH_ERR
        };
        self.posted += 1;
        let mut entry = entry.to_vec();
        entry[1] = send_flag::SIGNALED;
        entry[8..16].copy_from_slice(&self.posted.to_le_bytes());
        of.qp.sq.post(&self.guest, &entry);
        self.guest.ring_qp(&of.qp);
        let mut cq = match self.detail((Kind::Cq, of.cq)) {
            Some(Detail::Cq(cq)) => *cq,
            other => panic!("{other:?} is no completion queue"),
        };
        let mut rounds = 0;
        let cqe = loop {
            host.rounds(1);
            rounds += 1;
            match cq.take(&self.guest) {
                Some(cqe) => break cqe,
                None => assert!(rounds < ROUNDS, "no completion: {of:?}"),
            }
        };
        assert_eq!((cqe.wr_id, cqe.qp_num), (self.posted, handle));
        assert_eq!(cqe.status, expected, "{cqe:?} {of:?}");
        if cqe.status != wc_status::SUCCESS {
            of.state = qp_state::ERR;
        }
        *self.queue_pair(handle)? = of;
        let object = self.objects.get_mut(&(Kind::Cq, of.cq))?;
        object.detail = Detail::Cq(cq);
        Some(cqe.status == wc_status::SUCCESS)
    }

    fn bind(&mut self, host: &mut Host, u: &mut Unstructured) -> Result<()> {
        let handle = self.pick(Kind::Qp, u)?;
        let (index, mr) = (self.pick(Kind::Mw, u)?, self.pick(Kind::Mr, u)?);
        let window = match self.detail((Kind::Mw, index)) {
            Some(Detail::Mw(window)) => Some(*window),
            _ => None,
        };
        let region = match self.detail((Kind::Mr, mr)) {
            Some(Detail::Mr { pd, access }) => Some((*pd, *access)),
            _ => None,
        };
        let Some(qp) = self.queue_pair(handle).copied() else {
            return Ok(());
        };
        // Sometimes with a key of before.
        let stale = u.ratio(1, 8)?;
        let key = window.map_or(index, |window| window.key) ^ if stale { 4 } else { 0 };
        let unbinds = u.ratio(1, 8)?;
        let writes = u.arbitrary()?;
        let bind = BindMw {
            addr: self.iova(),
            mw_rkey: key,
            length: if unbinds { 0 } else { PAGE as u64 },
            access: if writes {
                access::REMOTE_WRITE
            } else {
                access::REMOTE_READ
            },
            mr_lkey: mr,
            mr_addr: self.iova(),
            new_rkey: key ^ 1,
            ..BindMw::default()
        };
        let needed = access::MW_BIND | if writes { access::LOCAL_WRITE } else { 0 };
        let fits = region.is_some_and(|(pd, access)| pd == qp.pd && access & needed == needed);
        let possible = window.is_some_and(|window| {
            !stale
                && window.pd == qp.pd
                && !(window.type_2 && (window.bound.is_some() || unbinds))
                && (unbinds || fits)
        });
        let mut entry = bytes(&SendWqe {
            opcode: wr_opcode::BIND_MW,
            ..SendWqe::default()
        });
        entry.truncate(BIND_MW_OFFSET);
        entry.extend_from_slice(&bytes(&bind));
        let expected = if possible {
            wc_status::SUCCESS
        } else {
            wc_status::MW_BIND_ERR
        };
        if self.post(host, handle, &entry, expected) == Some(true) {
            let new = (!unbinds).then_some((mr, handle));
            if let Some(window) = self.windows().find(|window| window.key & !0xff == index) {
                (window.bound, window.key, window.writes) = (new, bind.new_rkey, writes);
            }
        }
        Ok(())
    }

    /// A queue pair and a window: in most cases ones of which one has bound the other, if there are
    /// any.
    fn binder(&mut self, u: &mut Unstructured) -> Result<(u32, u32)> {
        let bound: Vec<_> = self
            .windows()
            .filter_map(|window| Some((window.bound?.1, window.key & !0xff)))
            .collect();
        if !bound.is_empty() && u.ratio(3, 4)? {
            return Ok(*u.choose(&bound)?);
        }
        Ok((self.pick(Kind::Qp, u)?, self.pick(Kind::Mw, u)?))
    }

    fn invalidate(&mut self, host: &mut Host, u: &mut Unstructured) -> Result<()> {
        let (handle, index) = self.binder(u)?;
        let Some(qp) = self.queue_pair(handle).copied() else {
            return Ok(());
        };
        let window = match self.detail((Kind::Mw, index)) {
            Some(Detail::Mw(window)) => Some(*window),
            _ => None,
        };
        let possible = window.is_some_and(|window| {
            let own = window.bound.is_some_and(|(_, by)| by == handle);
            window.type_2 && window.pd == qp.pd && own
        });
        let entry = bytes(&SendWqe {
            opcode: wr_opcode::LOCAL_INV,
            imm: window.map_or(index, |window| window.key),
            ..SendWqe::default()
        });
        let expected = if possible {
            wc_status::SUCCESS
        } else {
            wc_status::LOC_QP_OP_ERR
        };
        if self.post(host, handle, &entry, expected) == Some(true) {
            if let Some(window) = self.windows().find(|window| window.key & !0xff == index) {
                window.bound = None;
            }
        }
        Ok(())
    }

    /// Whether queue pair `handle` of protection domain `pd` may write by this rkey.
    fn may_write(&self, key: u32, pd: u32, handle: u32) -> bool {
        if let Some(Detail::Mr { pd: of, access }) = self.detail((Kind::Mr, key)) {
            return *of == pd && access & access::REMOTE_WRITE != 0;
        }
        let Some(Detail::Mw(window)) = self.detail((Kind::Mw, key & !0xff)) else {
            return false;
        };
        let by = window.bound.map(|(_, by)| by);
        let for_it = by.is_some() && (!window.type_2 || by == Some(handle));
        window.key == key && window.pd == pd && window.writes && for_it
    }

    fn write(&mut self, host: &mut Host, u: &mut Unstructured) -> Result<()> {
        let (handle, index) = self.binder(u)?;
        let lkey = self.pick(Kind::Mr, u)?;
        let by_window = u.arbitrary()?;
        let rkey = if by_window {
            match self.detail((Kind::Mw, index)) {
                Some(Detail::Mw(window)) => window.key,
                _ => index,
            }
        } else {
            self.pick(Kind::Mr, u)?
        };
        let Some(qp) = self.queue_pair(handle).copied() else {
            return Ok(());
        };
        let local = match self.detail((Kind::Mr, lkey)) {
            Some(Detail::Mr { pd, .. }) => *pd == qp.pd,
            _ => false,
        };
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_WRITE,
            count: 1,
            remote_addr: self.iova() + 64,
            rkey,
            ..SendWqe::default()
        };
        let sge = Sge {
            addr: self.iova(),
            length: 8,
            lkey,
        };
        let entry = [bytes(&wqe), bytes(&sge)].concat();
        let expected = if !local {
            wc_status::LOC_PROT_ERR
        } else if self.may_write(rkey, qp.pd, handle) {
            wc_status::SUCCESS
        } else {
            wc_status::REM_ACCESS_ERR
        };
        self.post(host, handle, &entry, expected);
        Ok(())
    }

    fn multicast(&mut self, u: &mut Unstructured) -> Result<()> {
        let handle = self.pick(Kind::Qp, u)?;
        let group: u8 = u.int_in_range(1..=3)?;
        let mut gid = [0xff; 16];
        gid[15] = group;
        let body = Multicast {
            gid,
            qpn: handle,
            reserved: 0,
        };
        let of = self.queue_pair(handle).copied();
        let known = self.attached.contains(&(handle, group));
        let mut reasons = Vec::new();
        match of {
            None => reasons.push(ENOENT),
            Some(qp) if qp.qp.qp_type != qp_type::UD => reasons.push(EINVAL),
            Some(_) => {}
        }
        if u.ratio(2, 3)? {
            if !known && self.attached.len() as u32 >= LIMITS.multicast {
                reasons.push(ENOMEM);
            }
            let result = self.guest.tell(opcode::ATTACH_MCAST, &body);
            agree("ATTACH_MCAST", &result, &reasons);
            if result.is_ok() {
                self.attached.insert((handle, group));
            }
        } else {
            if !known && reasons.is_empty() {
                reasons.push(ENOENT);
            }
            let result = self.guest.tell(opcode::DETACH_MCAST, &body);
            agree("DETACH_MCAST", &result, &reasons);
            self.attached.remove(&(handle, group));
        }
        Ok(())
    }

    /// The device has as many objects as the model.
    fn check_counts(&mut self) {
        let status = self.guest.status();
        for (name, kind) in [
            ("contexts", Kind::Context),
            ("pds", Kind::Pd),
            ("xrcds", Kind::Xrcd),
            ("cqs", Kind::Cq),
            ("mrs", Kind::Mr),
            ("mws", Kind::Mw),
            ("srqs", Kind::Srq),
            ("qps", Kind::Qp),
        ] {
            assert_eq!(status["counts"][name], self.count(kind), "{name}");
        }
        assert_eq!(status["counts"]["attachments"], self.attached.len());
    }

    /// Destroys everything: what uses others goes first.
    fn destroy_all(&mut self) {
        for kind in [
            Kind::Qp,
            Kind::Srq,
            Kind::Mw,
            Kind::Mr,
            Kind::Cq,
            Kind::Xrcd,
            Kind::Pd,
            Kind::Context,
        ] {
            let ids: Vec<Id> = self
                .objects
                .keys()
                .filter(|id| id.0 == kind)
                .copied()
                .collect();
            ids.into_iter().for_each(|id| self.destroy_one(id));
        }
        assert!(self.objects.is_empty());
    }
}
