// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two guests with queue pairs of all types that are connected to each other, and work requests of
//! all kinds with arbitrary operands, keys and lists.
use std::collections::BTreeMap;

use arbitrary::{Result, Unstructured};
use virtio_rdma_spec::command::{
    mw_type, opcode, AllocMr, AllocMw, HandleResponse, Multicast, PageList, RegMr, RegMrResponse,
};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::{
    BindMw, Cqe, FastReg, RecvWqe, SendWqe, Sge, UdWqe, BIND_MW_OFFSET, FAST_REG_OFFSET, PHASE,
};
use virtio_rdma_spec::verbs::{
    access, qp_state, qp_type, send_flag, wc_status, wr_opcode, MASK_24,
};

use crate::commands::change;
use crate::host::{bytes, gid, Guest, Host, FEATURES, PAGE};
use crate::queues::{attributes, Cq, Mr, Qp, Refs, Srq, QKEY, REMOTE};

/// What fills memory that nobody may change.
const CANARY: u8 = 0xc5;
/// The group that datagram queue pairs are attached to.
const GROUP: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];

/// A guest with its objects.
pub struct Side {
    /// The guest.
    pub guest: Guest,
    number: u8,
    pd: u32,
    /// Its queue pairs, each with the peer's GID and number.
    pub qps: Vec<(Qp, [u8; 16], u32)>,
    srq: Srq,
    xrc_srq: Srq,
    cqs: [Cq; 2],
    /// What work requests may do anything to.
    pub mr: Mr,
    keys: Vec<u32>,
    /// Pages that no work request may change.
    canaries: Vec<usize>,
    /// Whether a region of all memory is there, and so all of it may be changed.
    privileged: bool,
    /// Work requests that have not completed, by their ids.
    outstanding: BTreeMap<u64, ()>,
    posted: u64,
}

/// What a queue pair of a side is for: its type, whether it has the shared receive queue.
const QPS: [(u8, bool); 7] = [
    (qp_type::RC, false),
    (qp_type::RC, true),
    (qp_type::UC, false),
    (qp_type::UD, false),
    // Connected to the next.
    (qp_type::RC, false),
    (qp_type::RC, true),
    (qp_type::GSI, false),
];
const OWN_PAIR: usize = 4;

impl Side {
    fn new(host: &Host, number: u8, privileged: bool, spread: bool) -> Self {
        let physical = u64::from(privileged) << feature::PHYSICAL_MR;
        let mut guest = host.guest(number, FEATURES | physical);
        if spread {
            guest.spread();
        }
        let context = guest.context().expect("a context");
        let pd = guest.create(opcode::CREATE_PD).expect("a PD");
        let other_pd = guest.create(opcode::CREATE_PD).expect("a PD");
        let cqs = [0, 1].map(|_| guest.cq().expect("a completion queue"));
        let all = access::LOCAL_WRITE | access::MW_BIND | REMOTE;
        let mr = guest.mr(pd, all, 2).expect("a region");
        let read_only = guest.mr(pd, access::REMOTE_READ, 1).expect("a region");
        let foreign = guest.mr(other_pd, all, 1).expect("a region");
        let unregistered = guest.take_pages(1);
        let canaries = vec![read_only.page, foreign.page, unregistered];
        for page in &canaries {
            guest.view.write(page * PAGE, &[CANARY; PAGE]);
        }
        let mut keys = vec![mr.key, mr.key, read_only.key, foreign.key];
        for mw_type in [mw_type::TYPE_1, mw_type::TYPE_2, mw_type::TYPE_2] {
            let body = AllocMw {
                pd,
                mw_type,
                key: 1,
                ..AllocMw::default()
            };
            let window: HandleResponse = guest.ask(opcode::ALLOC_MW, &body).expect("a window");
            keys.push(window.handle);
        }
        for flags in [0, 1] {
            let body = AllocMr {
                pd,
                max_pages: 600,
                flags,
                key: 2,
                ..AllocMr::default()
            };
            let fast: RegMrResponse = guest.ask(opcode::ALLOC_MR, &body).expect("a region");
            keys.push(fast.lkey);
        }
        if privileged {
            let body = RegMr {
                pd,
                access: access::PHYSICAL | access::LOCAL_WRITE,
                ..RegMr::default()
            };
            let physical: RegMrResponse = guest.ask(opcode::REG_MR, &body).expect("a region");
            keys.push(physical.lkey);
        }
        let refs = Refs {
            pd,
            cq: cqs[0].number,
            ..Refs::default()
        };
        let srq = guest.srq(context, refs).expect("an SRQ");
        let xrcd = guest.create(opcode::CREATE_XRCD).expect("an XRC domain");
        let refs_xrc = Refs {
            cq: cqs[1].number,
            xrcd,
            ..refs
        };
        let xrc_srq = guest.srq(context, refs_xrc).expect("an SRQ");
        let mut make = |qp_type, srq, xrcd, cq: u32| {
            let refs = Refs {
                srq,
                xrcd,
                cq,
                ..refs
            };
            let qp = guest.qp(qp_type, context, refs).expect("a queue pair");
            (qp, [0; 16], 0)
        };
        let mut qps: Vec<_> = QPS
            .iter()
            .zip([0, 1].iter().cycle())
            .map(|((qp_type, shared), cq)| {
                let srq = if *shared { srq.number } else { 0 };
                make(*qp_type, srq, 0, cqs[*cq].number)
            })
            .collect();
        qps.push(make(qp_type::XRC_INI, 0, 0, cqs[0].number));
        qps.push(make(qp_type::XRC_TGT, 0, xrcd, 0));
        Self {
            guest,
            number,
            pd,
            qps,
            srq,
            xrc_srq,
            cqs,
            mr,
            keys,
            canaries,
            privileged,
            outstanding: BTreeMap::new(),
            posted: 0,
        }
    }

    /// Connects each queue pair to that of the other side, or to the next one of this side.
    fn connect(&mut self, peer_gid: [u8; 16], peers: &[u32]) {
        let own: Vec<u32> = self.qps.iter().map(|(qp, ..)| qp.number).collect();
        let gid = self.guest.gid;
        for (index, (qp, to, dest)) in self.qps.iter_mut().enumerate() {
            (*to, *dest) = match index {
                OWN_PAIR => (gid, own[OWN_PAIR + 1]),
                _ if index == OWN_PAIR + 1 => (gid, own[OWN_PAIR]),
                // The initiator of one side to the target of the other.
                7 => (peer_gid, peers[8]),
                8 => (peer_gid, peers[7]),
                _ => (peer_gid, peers[index]),
            };
            self.guest.connect(qp, *to, *dest).expect("a connection");
            if qp.qp_type == qp_type::UD {
                let body = Multicast {
                    gid: GROUP,
                    qpn: qp.number,
                    reserved: 0,
                };
                self.guest
                    .tell(opcode::ATTACH_MCAST, &body)
                    .expect("a group");
            }
        }
    }

    fn next_id(&mut self) -> u64 {
        self.posted += 1;
        self.outstanding.insert(self.posted, ());
        self.posted
    }

    /// Changes the state of a queue pair. From RESET it is connected again.
    pub fn change_state(&mut self, u: &mut Unstructured) -> Result<()> {
        let index = u.choose_index(self.qps.len())?;
        let state = u.int_in_range(0..=qp_state::ERR)?;
        let (qp, to, dest) = &mut self.qps[index];
        let usual = attributes(qp.qp_type, state, *to, *dest);
        if self.guest.modify(qp.number, usual).is_ok() && state == qp_state::RESET {
            qp.sq.reset(&self.guest);
            qp.rq.reset(&self.guest);
            if u.ratio(3, 4)? {
                let _ = self.guest.connect(qp, *to, *dest);
            }
        }
        Ok(())
    }

    /// Posts an arbitrary receive.
    pub fn post_recv(&mut self, other: &Self, u: &mut Unstructured) -> Result<()> {
        let count = u.int_in_range(0..=3)?;
        let id = self.next_id();
        let wqe = RecvWqe {
            count,
            wr_id: id,
            ..RecvWqe::default()
        };
        let mut entry = bytes(&wqe);
        for _ in 0..count {
            entry.extend_from_slice(&bytes(&self.sge(other, u)?));
        }
        change_some(&mut entry, u)?;
        entry[8..16].copy_from_slice(&id.to_le_bytes());
        let rings = u.arbitrary::<bool>()?;
        match u.choose_index(self.qps.len() + 2)? {
            0 => {
                self.srq.rq.post(&self.guest, &entry);
                if rings {
                    self.guest.ring_srq(&self.srq);
                }
            }
            1 => {
                self.xrc_srq.rq.post(&self.guest, &entry);
                if rings {
                    self.guest.ring_srq(&self.xrc_srq);
                }
            }
            index => {
                let (qp, ..) = &mut self.qps[index - 2];
                if qp.qp_type < qp_type::XRC_INI && index != 3 && index != 7 {
                    qp.rq.post(&self.guest, &entry);
                }
                if rings {
                    self.guest.ring_qp(qp);
                }
            }
        }
        Ok(())
    }

    /// Posts an arbitrary work request, and mostly rings for it.
    pub fn post_send(&mut self, other: &Self, u: &mut Unstructured) -> Result<()> {
        let index = u.choose_index(self.qps.len() - 1)?;
        let kind = self.qps[index].0.qp_type;
        let id = self.next_id();
        let opcode = match u.arbitrary::<u8>()? {
            0..=239 => {
                let (_, value) = wr_opcode::ALL[u.choose_index(wr_opcode::ALL.len())?];
                value as u8
            }
            _ => u.arbitrary()?,
        };
        let flags = match u.arbitrary::<u8>()? {
            byte @ 0..=127 => (byte & 0xf) | send_flag::SIGNALED,
            byte @ 128..=223 => byte & (send_flag::SIGNALED | send_flag::FENCE),
            byte => byte & 0x7f,
        };
        let mut entry = self.operands(other, kind, opcode, u)?;
        let inline = flags & send_flag::INLINE != 0;
        let count: u16 = if inline {
            let length = if u.ratio(1, 2)? {
                8
            } else {
                u.int_in_range(0..=70)?
            };
            entry.extend(std::iter::repeat_n(0x77, length.into()));
            length
        } else {
            let count = match opcode {
                // It has one, of one word.
                wr_opcode::ATOMIC_CMP_AND_SWP..=wr_opcode::ATOMIC_FETCH_AND_ADD
                | wr_opcode::MASKED_ATOMIC_CMP_AND_SWP..=wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD
                | wr_opcode::ATOMIC_WRITE => 1,
                _ => u.int_in_range(0..=5)?,
            };
            for _ in 0..count {
                let mut sge = self.sge(other, u)?;
                if count == 1 && u.ratio(1, 2)? {
                    sge.length = 8;
                }
                entry.extend_from_slice(&bytes(&sge));
            }
            count
        };
        change_some(&mut entry, u)?;
        entry[0] = opcode;
        entry[1] = flags & !PHASE;
        entry[2..4].copy_from_slice(&count.to_le_bytes());
        entry[8..16].copy_from_slice(&id.to_le_bytes());
        let (qp, ..) = &mut self.qps[index];
        qp.sq.post(&self.guest, &entry);
        if u.ratio(7, 8)? {
            self.guest.ring_qp(qp);
        }
        Ok(())
    }

    /// The first bytes of an entry, without opcode, flags, count and id.
    fn operands(
        &mut self,
        other: &Self,
        kind: u8,
        opcode: u8,
        u: &mut Unstructured,
    ) -> Result<Vec<u8>> {
        if matches!(kind, qp_type::UD | qp_type::GSI) {
            let to = if u.ratio(1, 2)? { other } else { &*self };
            let group = u.ratio(1, 4)?;
            return Ok(bytes(&UdWqe {
                imm: u.arbitrary()?,
                dgid: if group { GROUP } else { gid(to.number) },
                remote_qpn: match u.arbitrary::<u8>()? {
                    _ if group => MASK_24,
                    0..=7 => u.arbitrary::<u32>()? & MASK_24,
                    8..=63 => 1,
                    _ => to.qps[3].0.number,
                },
                remote_qkey: match u.arbitrary::<u8>()? {
                    0..=15 => u.arbitrary()?,
                    16..=63 => 0x8001_0000,
                    _ => QKEY,
                },
                ..UdWqe::default()
            }));
        }
        let mut entry = bytes(&SendWqe {
            imm: if u.ratio(1, 2)? {
                self.key(other, u)?
            } else {
                u.arbitrary()?
            },
            remote_addr: self.address(other, u)?,
            rkey: self.key(other, u)?,
            srqn: if kind == qp_type::XRC_INI {
                other.xrc_srq.number
            } else {
                0
            },
            operand0: if opcode == wr_opcode::FLUSH {
                u.int_in_range(0..=5000)?
            } else {
                u.arbitrary()?
            },
            operand1: match opcode {
                wr_opcode::FLUSH => u.int_in_range(0..=0x203)?,
                wr_opcode::ATOMIC_CMP_AND_SWP | wr_opcode::MASKED_ATOMIC_CMP_AND_SWP => {
                    u.arbitrary()?
                }
                _ => 0,
            },
            ..SendWqe::default()
        });
        match opcode {
            wr_opcode::BIND_MW => {
                let window = self.key(other, u)?;
                let bind = BindMw {
                    addr: self.mr.iova + u.int_in_range(0..=100)?,
                    mw_rkey: window,
                    length: u.int_in_range(0..=2 * PAGE as u64)?,
                    access: u.int_in_range(0..=0x3ff)?,
                    mr_lkey: self.key(other, u)?,
                    mr_addr: self.mr.iova + u.int_in_range(0..=100)?,
                    new_rkey: self.renewed(window, u)?,
                    ..BindMw::default()
                };
                entry[BIND_MW_OFFSET..].copy_from_slice(&bytes(&bind)[..32]);
                entry.extend_from_slice(&bytes(&bind)[32..]);
                entry.truncate(64);
            }
            wr_opcode::REG_MR => {
                let region = self.key(other, u)?;
                let reg = FastReg {
                    iova: self.mr.iova,
                    key: self.renewed(region, u)?,
                    access: u.int_in_range(0..=0x3ff)?,
                    length: u.int_in_range(0..=2 * PAGE as u64)?,
                    pages: self.page_list(u)?,
                    offset: u.int_in_range(0..=16)?,
                    lkey: *self.keys.last().unwrap_or(&0),
                };
                entry.truncate(FAST_REG_OFFSET);
                entry.extend_from_slice(&bytes(&reg));
            }
            _ => {}
        }
        Ok(entry)
    }

    /// A list with a table in the region that everybody writes to.
    fn page_list(&self, u: &mut Unstructured) -> Result<PageList> {
        let table = self.mr.page + 1;
        let list = self.guest.list_at(table, self.mr.page, 2);
        let count = if u.ratio(1, 2)? {
            u.int_in_range(1..=3)?
        } else {
            u.int_in_range(0..=700)?
        };
        Ok(PageList {
            count,
            levels: u.int_in_range(0..=2)?,
            ..list
        })
    }

    /// A key with other lowest bits.
    fn renewed(&self, key: u32, u: &mut Unstructured) -> Result<u32> {
        Ok(key & !0xff | u32::from(u.int_in_range(0..=3)? as u8))
    }

    /// A key of either side, as it was given out or as it may be by now.
    fn key(&self, other: &Self, u: &mut Unstructured) -> Result<u32> {
        let byte: u8 = u.arbitrary()?;
        Ok(match byte {
            0..=7 => u.arbitrary()?,
            8..=11 => 0,
            // A window or a region with another key.
            12..=99 => {
                let key = self.keys[usize::from(byte) % self.keys.len()];
                self.renewed(key, u)?
            }
            100..=179 => self.keys[usize::from(byte) % self.keys.len()],
            _ => other.keys[usize::from(byte) % other.keys.len()],
        })
    }

    fn address(&self, other: &Self, u: &mut Unstructured) -> Result<u64> {
        Ok(match u.arbitrary::<u8>()? {
            0..=7 => u.arbitrary()?,
            8..=15 => 0,
            16..=31 => other.mr.iova + other.mr.length - u.int_in_range(0..=16)?,
            32..=63 => self.mr.iova + u.int_in_range(0..=2 * PAGE as u64)?,
            64..=95 => other.mr.iova + u.int_in_range(0..=8 * PAGE as u64)?,
            byte => other.mr.iova + 8 * u64::from(byte),
        })
    }

    fn sge(&self, other: &Self, u: &mut Unstructured) -> Result<Sge> {
        let addr = match u.arbitrary::<u8>()? {
            0..=31 => self.address(other, u)?,
            byte => self.mr.iova + 8 * u64::from(byte),
        };
        let length = match u.arbitrary::<u8>()? {
            0..=3 => u.arbitrary()?,
            4..=31 => u.int_in_range(0..=3 * PAGE as u32)?,
            byte => u32::from(byte),
        };
        let lkey = match u.arbitrary::<u8>()? {
            0..=63 => self.key(other, u)?,
            _ => self.mr.key,
        };
        Ok(Sge { addr, length, lkey })
    }

    /// Registers what the table in the first page of its region says, and lets it go again.
    pub fn register_and_deregister(&mut self, u: &mut Unstructured) -> Result<()> {
        let pages = PageList {
            addr: self.mr.iova,
            count: u.int_in_range(2..=512)?,
            levels: u.int_in_range(1..=2)?,
            page_shift: 12,
            reserved: 0,
        };
        let body = RegMr {
            pd: self.pd,
            access: access::LOCAL_WRITE | REMOTE,
            length: u64::from(pages.count) * PAGE as u64,
            pages,
            ..RegMr::default()
        };
        let made = self.guest.ask::<_, RegMrResponse>(opcode::REG_MR, &body);
        if let Ok(made) = made {
            let gone = self.guest.handle(opcode::DEREG_MR, made.lkey);
            assert_eq!(gone, Ok(()));
        }
        Ok(())
    }

    /// Takes completions. With `strict`, each is one of a work request that was outstanding.
    ///
    /// # Panics
    /// If one is not what a completion may be.
    pub fn take(&mut self, strict: bool) {
        for cq in &mut self.cqs {
            while let Some(cqe) = cq.take(&self.guest) {
                if strict {
                    check(&cqe, &self.qps);
                    // A send that is not signaled, and is done, has none.
                    let known = self.outstanding.remove(&cqe.wr_id);
                    assert!(known.is_some(), "completed twice, or never posted: {cqe:?}");
                }
            }
        }
    }

    /// Memory that nobody may change has not changed.
    ///
    /// # Panics
    /// If it has.
    pub fn check_canaries(&self) {
        if self.privileged {
            return;
        }
        for page in &self.canaries {
            let bytes = self.guest.view.get(page * PAGE, PAGE);
            let wrong = bytes.iter().position(|byte| *byte != CANARY);
            assert_eq!(wrong, None, "page {page} of VM {}", self.number);
        }
    }
}

fn check(cqe: &Cqe, qps: &[(Qp, [u8; 16], u32)]) {
    assert!(wc_status::name(cqe.status).is_some(), "{cqe:?}");
    let own = qps.iter().any(|(qp, ..)| qp.number == cqe.qp_num);
    assert!(own, "{cqe:?}");
}

/// Changes bytes of some entries.
fn change_some(entry: &mut [u8], u: &mut Unstructured) -> Result<()> {
    let changes = u.arbitrary::<u8>()?.saturating_sub(207) / 16;
    for _ in 0..changes {
        change(entry, u)?;
    }
    Ok(())
}

/// The two sides.
pub struct Scene {
    /// One and the other.
    pub sides: [Side; 2],
}

impl Scene {
    /// Brings both sides up. `privileged`: they have regions of all memory; `spread`: what they
    /// have is in all regions of their memory.
    ///
    /// # Panics
    /// If the device refuses anything.
    #[must_use]
    pub fn new(host: &Host, privileged: bool, spread: bool) -> Self {
        let mut a = Side::new(host, 1, privileged, spread);
        let mut b = Side::new(host, 2, privileged, spread);
        let numbers =
            |side: &Side| -> Vec<u32> { side.qps.iter().map(|(qp, ..)| qp.number).collect() };
        let (of_a, of_b) = (numbers(&a), numbers(&b));
        a.connect(gid(2), &of_b);
        b.connect(gid(1), &of_a);
        Self { sides: [a, b] }
    }

    /// One side, and the other.
    pub fn choose(&mut self, u: &mut Unstructured) -> Result<(&mut Side, &mut Side)> {
        let [a, b] = &mut self.sides;
        Ok(if u.arbitrary()? { (a, b) } else { (b, a) })
    }

    /// Looks at what came of it all, and lets both go.
    ///
    /// # Panics
    /// If what must not have happened has.
    pub fn leave(mut self, host: &mut Host, strict: bool) {
        host.rounds(6);
        for side in &mut self.sides {
            side.take(strict);
            side.check_canaries();
        }
        self.go(host);
    }

    /// Lets both go.
    pub fn go(self, host: &mut Host) {
        for side in self.sides {
            host.remove(side.guest);
        }
    }
}
