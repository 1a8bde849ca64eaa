// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What unit tests of engine and fabrics stand on: VMs with memory, regions and queue pairs, in the
//! test's own thread. Nothing here has a thread, a socket or a clock: queue pairs that want to be
//! polled are in a list, and time is what the test says.
//!
//! A [`Guest`] plays the driver: it writes entries to rings in guest memory and reads completions
//! there.
use std::collections::VecDeque;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use vhost_device_rdma_sync::{lock, Readers};
use virtio_rdma_spec::command::{AddressVector, QpAttr};
use virtio_rdma_spec::event::{AsyncEvent, CompletionEvent};
use virtio_rdma_spec::facts::QpType;
use virtio_rdma_spec::ring::{
    recv_stride, send_stride, CqRecord, Cqe, QpRecord, RecvWqe, SendWqe, Sge, SrdRange, SrqRecord,
    UdWqe, ARM_NEXT, ARM_SEQUENCE, CQ_ARM_OFFSET, PHASE, RECV_DATA_OFFSET,
};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_state, qp_type, send_flag};
use virtio_rdma_spec::PAGE_SIZE;

use super::binding::{Binding, Peers};
use super::events::EventSink;
use super::queue_pair::{Qp, QpParts};
use super::responder::Responder;
use super::send_queue::SendQueue;
use super::tables::{Gid, Pd};
use super::vm::{
    Congestion, Link, Local, Network, Schedule, Segment, Uplink, Vm, VmSettings, Warn,
};
use crate::footprint::Share;
use crate::limits::Limits;
use crate::memory::{fetch_bytes, region, Form, GuestMemory, Pages};
use crate::verbs::cq::{Cq, CqRing, NO_VLAN};
use crate::verbs::fast::FastMr;
use crate::verbs::mr::{Backing, Mr};
use crate::verbs::numbers::NUMBERS;
use crate::verbs::srq::{Srq, SrqParts, Xrc};
use crate::verbs::state::attributes;
use crate::verbs::work_queue::WorkQueue;

/// Entries of each work queue of a fixture's queue pair.
pub(crate) const ENTRIES: u32 = 256;
/// Scatter/gather entries of a work request.
const MAX_SGE: u32 = 3;
/// The XRC domain of fixtures.
const XRCD: u32 = 1;
/// The Q_Key of fixtures.
pub(crate) const QKEY: u32 = 0x1234;
/// Inline bytes of a send work request.
const MAX_INLINE: u32 = 48;
/// Entries of a completion queue.
const CQ_ENTRIES: u32 = 1024;
/// Pages of a guest.
const PAGES: u64 = 512;
/// Where the region of a guest begins, as an address and as guest memory: below are the rings.
pub(crate) const DATA: u64 = 160 * PAGE_SIZE;

/// Queue pairs that want to be polled.
#[derive(Debug, Default)]
pub(crate) struct RunList(Mutex<VecDeque<Arc<Qp>>>);

impl RunList {
    /// The next one.
    pub(crate) fn take(&self) -> Option<Arc<Qp>> {
        let qp = lock(&self.0).pop_front();
        if let Some(qp) = &qp {
            qp.scheduled.store(false, Ordering::SeqCst);
        }
        qp
    }
}

impl Schedule for RunList {
    fn schedule(&self, qp: &Arc<Qp>) {
        if !qp.scheduled.swap(true, Ordering::SeqCst) {
            lock(&self.0).push_back(qp.clone());
        }
    }

    fn hold(&self, _: &Weak<Vm>, _: &Arc<Cq>) {}
}

/// Warnings, which a test may read.
#[derive(Clone, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warn for Warnings {
    fn name(&self) -> &'static str {
        "guest"
    }

    fn warn(&self, what: fmt::Arguments<'_>) {
        lock(&self.0).push(what.to_string());
    }
}

impl Warnings {
    pub(crate) fn all(&self) -> Vec<String> {
        lock(&self.0).clone()
    }
}

/// Asynchronous events of a guest, and the state that a queue pair had at each completion event.
#[derive(Default)]
pub(crate) struct RecordedEvents {
    asynchronous: Mutex<Vec<(u16, u32)>>,
    watched: Mutex<Weak<Qp>>,
    states: Mutex<Vec<u8>>,
}

impl RecordedEvents {
    /// Type and number of those since the last call.
    pub(crate) fn take(&self) -> Vec<(u16, u32)> {
        std::mem::take(&mut lock(&self.asynchronous))
    }

    /// The states of the queue pair that is watched, at the completion events so far.
    pub(crate) fn states(&self) -> Vec<u8> {
        lock(&self.states).clone()
    }
}

impl EventSink for RecordedEvents {
    fn completion(&self, _: u16, _: CompletionEvent) {
        if let Some(qp) = lock(&self.watched).upgrade() {
            lock(&self.states).push(qp.state());
        }
    }

    fn asynchronous(&self, event: AsyncEvent) {
        lock(&self.asynchronous).push((event.event_type, event.number));
    }

    fn forget_cq(&self, _: u16, _: u32) {}
    fn forget_qp(&self, _: u32) {}
    fn forget_srq(&self, _: u32) {}
}

/// The driver's side of a ring.
#[derive(Debug, Clone, Copy)]
struct RingSide {
    at: u64,
    stride: u64,
    position: u32,
}

/// The driver's side of a queue pair.
#[derive(Debug)]
pub(crate) struct TestQp {
    pub qp: Arc<Qp>,
    /// XRC_TGT: the shared receive queue for which messages to it are.
    pub srqn: u32,
    send: RingSide,
    receive: RingSide,
}

/// Where a datagram goes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Destination {
    pub gid: Gid,
    pub mac: [u8; 6],
    pub qpn: u32,
    pub qkey: u32,
}

/// A send work request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Send {
    pub opcode: u8,
    pub flags: u8,
    pub imm: u32,
    pub wr_id: u64,
    pub remote_addr: u64,
    pub rkey: u32,
    /// XRC.
    pub srqn: u32,
    /// Of a datagram.
    pub to: Destination,
    pub operands: [u64; 2],
    pub sges: Vec<Sge>,
    /// Instead of `sges`, with the flag INLINE.
    pub inline: Vec<u8>,
}

/// A VM in the test's own thread, with a region over all of its data.
pub(crate) struct Guest {
    pub vm: Arc<Vm>,
    pub gid: Gid,
    pub events: Arc<RecordedEvents>,
    pub warnings: Warnings,
    pub run_list: Arc<RunList>,
    pub memory: GuestMemory,
    /// Key of the region.
    pub key: u32,
    pd: u32,
    next_page: u64,
    cq: Arc<Cq>,
    cq_side: RingSide,
}

/// The way out of guests that are on hosts of their own.
pub(crate) const ON_HOSTS: Option<Uplink> = Some(Uplink {
    local: Local::Process,
    congestion: Congestion::Window,
    segment: Segment::Vxlan(7),
    active_mtu: mtu::MTU_4096,
});

/// It is the only peer there is, unless it is on another host.
impl Peers for Guest {
    fn connect(&self, _: &Vm, gid: Gid) -> (Binding, bool) {
        let binding = if gid == self.gid && self.vm.uplink().is_none() {
            Binding::to(&self.vm)
        } else {
            Binding::default()
        };
        (binding, false)
    }

    fn forget(&self, _: &Vm, _: Gid) {}
}

impl Drop for Guest {
    /// Queue pairs know their VM, which knows them.
    fn drop(&mut self) {
        self.vm.tables_mut().clear();
        while self.run_list.take().is_some() {}
    }
}

impl Guest {
    /// A guest with a GID that ends in `number`.
    pub(crate) fn new(readers: &Readers, number: u8) -> Self {
        Self::with(readers, number, NUMBERS, None)
    }

    /// The same, with a way out of its process.
    pub(crate) fn with_uplink(readers: &Readers, number: u8, uplink: Option<Uplink>) -> Self {
        Self::with(readers, number, NUMBERS, uplink)
    }

    /// The same, whose queue pairs have numbers of a range.
    pub(crate) fn with_qp_numbers(
        readers: &Readers,
        number: u8,
        qp_numbers: RangeInclusive<u32>,
    ) -> Self {
        Self::with(readers, number, qp_numbers, None)
    }

    fn with(
        readers: &Readers,
        number: u8,
        qp_numbers: RangeInclusive<u32>,
        uplink: Option<Uplink>,
    ) -> Self {
        let run_list = Arc::new(RunList::default());
        let warnings = Warnings::default();
        let vm = Vm::new(
            readers.clone(),
            VmSettings {
                network: Network::from("default"),
                limits: Limits::default(),
                qp_numbers,
                qp_order: Arc::default(),
                link: Arc::new(Link::default()),
                share: Arc::default(),
                uplink,
                workers: vec![run_list.clone()],
                warnings: Box::new(warnings.clone()),
            },
        );
        vm.set_features(u64::MAX);
        let memory = GuestMemory::new(vec![region(0, PAGES)]).unwrap();
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, number]);
        let events = Arc::new(RecordedEvents::default());
        let mut tables = vm.tables_mut();
        tables.memory = Some(memory.clone());
        tables.running = true;
        tables.sink = Some(events.clone());
        tables.gids[0] = Some(gid);
        tables.sources[0].mac = [0x52, 0x54, 0, 0, 0, number];
        tables.sources[0].vlan = NO_VLAN;
        let pd = tables.pds.insert_with(|_| Ok(Pd::default())).unwrap();
        let pages: Vec<u64> = (DATA / PAGE_SIZE..PAGES).map(|n| n * PAGE_SIZE).collect();
        let index = tables.keys.add_region(|index| Mr {
            key: index << 8 | 7,
            pd,
            access: access::LOCAL_WRITE
                | access::REMOTE_WRITE
                | access::REMOTE_READ
                | access::REMOTE_ATOMIC
                | access::FLUSH_GLOBAL,
            iova: DATA,
            length: PAGES * PAGE_SIZE - DATA,
            offset: 0,
            windows: 0.into(),
            backing: Backing::Pages(Pages::resolve(&memory, &pages, 12).unwrap()),
        });
        let key = index.unwrap() << 8 | 7;
        let record = CqRecord::SIZE as u64;
        let ring_pages = (record + u64::from(CQ_ENTRIES) * Cqe::SIZE as u64).div_ceil(PAGE_SIZE);
        let pages: Vec<u64> = (0..ring_pages).map(|n| n * PAGE_SIZE).collect();
        let ring = CqRing {
            buffer: Pages::resolve(&memory, &pages, 12).unwrap(),
            offset: record,
            entries: CQ_ENTRIES,
            stride: Cqe::SIZE as u32,
        };
        let mut cq = None;
        let made = tables.cqs.insert_with(|number| {
            let made = Arc::new(Cq::new(number, 0, ring));
            cq = Some(made.clone());
            Ok(made)
        });
        made.unwrap();
        drop(tables);
        Self {
            vm,
            gid,
            events,
            warnings,
            run_list,
            memory,
            key,
            pd,
            next_page: ring_pages,
            cq: cq.unwrap(),
            cq_side: RingSide {
                at: record,
                stride: Cqe::SIZE as u64,
                position: 0,
            },
        }
    }

    /// A queue pair in RESET.
    pub(crate) fn queue_pair(&mut self, qp_type: u8) -> TestQp {
        let record = QpRecord::SIZE as u64;
        let sq_stride = send_stride(MAX_SGE, MAX_INLINE).unwrap();
        let rq_stride = recv_stride(MAX_SGE).unwrap();
        let rq_offset = record + u64::from(ENTRIES * sq_stride);
        let len = rq_offset + u64::from(ENTRIES * rq_stride);
        let first = self.next_page;
        self.next_page += len.div_ceil(PAGE_SIZE);
        assert!(self.next_page * PAGE_SIZE <= DATA, "too many queue pairs");
        let pages: Vec<u64> = (first..self.next_page).map(|n| n * PAGE_SIZE).collect();
        let buffer = Arc::new(Pages::resolve(&self.memory, &pages, 12).unwrap());
        let facts = QpType::of(qp_type).unwrap();
        let queue = |offset, stride, there| WorkQueue {
            offset,
            stride,
            entries: if there { ENTRIES } else { 0 },
            position: 0,
        };
        let target = qp_type == qp_type::XRC_TGT;
        let cq = (!target).then(|| self.cq.clone());
        let send_queue = SendQueue::new(
            buffer.clone(),
            queue(record, sq_stride, facts.sends),
            qp_type,
            MAX_SGE as usize,
            MAX_INLINE as usize,
            false,
        );
        let receive_queue = queue(rq_offset, rq_stride, facts.receives);
        let responder = Responder::new(buffer, receive_queue, None, MAX_SGE as usize);
        let mut tables = self.vm.tables_mut();
        let mut made = None;
        let number = tables.qps.insert_with(|number| {
            let qp = Arc::new(Qp::new(QpParts {
                number,
                vm: self.vm.clone(),
                worker: self.run_list.clone(),
                worker_index: 0,
                pd: self.pd,
                context: 0,
                slot: u32::MAX,
                facts,
                share: Share::default(),
                xrcd: if target { XRCD } else { 0 },
                block_multicast_loopback: false,
                send_cq: cq.clone(),
                recv_cq: cq,
                srq: None,
                send_queue,
                responder,
            }));
            made = Some(qp.clone());
            Ok(qp)
        });
        number.unwrap();
        if qp_type == qp_type::GSI {
            tables.gsi = made.as_ref().map(|qp| qp.number);
        }
        let base = first * PAGE_SIZE;
        let side = |offset, stride| RingSide {
            at: base + offset,
            stride: u64::from(stride),
            position: 0,
        };
        drop(tables);
        let (srqn, receive) = if qp_type == qp_type::XRC_TGT {
            self.shared_receive_queue()
        } else {
            (0, side(rq_offset, rq_stride))
        };
        TestQp {
            qp: made.unwrap(),
            srqn,
            send: side(record, sq_stride),
            receive,
        }
    }

    /// A shared receive queue of the XRC domain: its number, and its ring.
    fn shared_receive_queue(&mut self) -> (u32, RingSide) {
        let record = SrqRecord::SIZE as u64;
        let stride = recv_stride(MAX_SGE).unwrap();
        let first = self.next_page;
        self.next_page += (record + u64::from(ENTRIES * stride)).div_ceil(PAGE_SIZE);
        let pages: Vec<u64> = (first..self.next_page).map(|n| n * PAGE_SIZE).collect();
        let buffer = Pages::resolve(&self.memory, &pages, 12).unwrap();
        let made = self.vm.tables_mut().srqs.insert_with(|number| {
            Ok(Arc::new(Srq::new(SrqParts {
                number,
                pd: self.pd,
                context: 0,
                worker: 0,
                slot: u32::MAX,
                xrc: Some(Xrc {
                    domain: XRCD,
                    cq: self.cq.clone(),
                }),
                max_sge: MAX_SGE as usize,
                limit: 0,
                buffer,
                queue: WorkQueue {
                    offset: record,
                    stride,
                    entries: ENTRIES,
                    position: 0,
                },
                share: Share::default(),
            })))
        });
        let ring = RingSide {
            at: first * PAGE_SIZE + record,
            stride: u64::from(stride),
            position: 0,
        };
        (made.unwrap(), ring)
    }

    /// Brings a queue pair from RESET to RTS, connected to queue pair `number` of another guest.
    /// `change` changes the attributes, which are the same for both ends otherwise.
    pub(crate) fn connect(
        &self,
        qp: &TestQp,
        (peer, number): (&Self, u32),
        change: impl Fn(&mut QpAttr),
    ) {
        let mut attr = QpAttr {
            port_num: 1,
            path_mtu: mtu::MTU_1024,
            access_flags: access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC,
            dest_qp_num: number,
            qkey: QKEY,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 4,
            retry_cnt: 7,
            rnr_retry: 7,
            av: AddressVector {
                dgid: peer.gid,
                port_num: 1,
                hop_limit: 64,
                ..AddressVector::default()
            },
            ..QpAttr::default()
        };
        change(&mut attr);
        for state in [qp_state::INIT, qp_state::RTR, qp_state::RTS] {
            attr.qp_state = state;
            let (required, _) = attributes(qp.qp.qp_type, qp.qp.state(), state).unwrap();
            let mask = required | qp_attr::STATE;
            qp.qp.modify(peer, mask, &attr).unwrap();
        }
    }

    fn word(&self, at: u64) -> u64 {
        let word = self.memory.range_at(at, 8).unwrap().word().unwrap();
        word.load(Ordering::Acquire)
    }

    fn store(&self, at: u64, value: u64) {
        let range = self.memory.range_at(at, 8).unwrap();
        let word: &AtomicU64 = range.word().unwrap();
        word.store(value, Ordering::Release);
    }

    /// Writes an entry, the word with the phase last.
    fn post(&self, side: &mut RingSide, entry: &mut [u8]) {
        let lap = side.position / ENTRIES;
        entry[1] |= if lap % 2 == 0 { PHASE } else { 0 };
        let at = side.at + u64::from(side.position % ENTRIES) * side.stride;
        assert!(entry.len() as u64 <= side.stride, "the entry is too long");
        let words: Vec<u64> = entry
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
            .collect();
        for (i, word) in words.iter().enumerate().rev() {
            self.store(at + 8 * i as u64, *word);
        }
        side.position += 1;
    }

    /// Posts a send work request, and rings.
    pub(crate) fn post_send(&self, qp: &mut TestQp, send: &Send) {
        let inline = send.flags & send_flag::INLINE != 0;
        let count = if inline {
            send.inline.len()
        } else {
            send.sges.len()
        };
        let mut entry = if qp.qp.facts.datagram {
            let wqe = UdWqe {
                opcode: send.opcode,
                flags: send.flags,
                count: count as u16,
                imm: send.imm,
                wr_id: send.wr_id,
                dgid: send.to.gid,
                dmac: send.to.mac,
                remote_qpn: send.to.qpn,
                remote_qkey: send.to.qkey,
                traffic_class: 3,
                hop_limit: 64,
                ..UdWqe::default()
            };
            let mut entry = wqe.to_bytes().to_vec();
            if qp.qp.facts.acknowledged {
                let range = SrdRange {
                    remote_addr: send.remote_addr,
                    rkey: send.rkey,
                    reserved: 0,
                };
                entry.extend_from_slice(&range.to_bytes());
            }
            entry
        } else {
            let wqe = SendWqe {
                opcode: send.opcode,
                flags: send.flags,
                count: count as u16,
                imm: send.imm,
                wr_id: send.wr_id,
                remote_addr: send.remote_addr,
                rkey: send.rkey,
                srqn: send.srqn,
                operand0: send.operands[0],
                operand1: send.operands[1],
            };
            wqe.to_bytes().to_vec()
        };
        if inline {
            entry.extend_from_slice(&send.inline);
        } else {
            entry.extend(send.sges.iter().flat_map(|sge| sge.to_bytes()));
        }
        self.post(&mut qp.send, &mut entry);
        qp.qp.schedule();
    }

    /// Posts a receive work request, and rings.
    pub(crate) fn post_receive(&self, qp: &mut TestQp, wr_id: u64, sges: &[Sge]) {
        let wqe = RecvWqe {
            count: sges.len() as u16,
            wr_id,
            ..RecvWqe::default()
        };
        let mut entry = wqe.to_bytes().to_vec();
        assert_eq!(entry.len(), RECV_DATA_OFFSET);
        entry.extend(sges.iter().flat_map(|sge| sge.to_bytes()));
        self.post(&mut qp.receive, &mut entry);
        qp.qp.schedule();
    }

    /// Asks for an event at the next completion, at which the queue pair's state is recorded.
    pub(crate) fn watch_state(&self, qp: &TestQp) {
        *lock(&self.events.watched) = Arc::downgrade(&qp.qp);
        let arm = ARM_SEQUENCE | ARM_NEXT;
        self.store(CQ_ARM_OFFSET as u64, u64::from(arm).to_le());
    }

    /// The queue pair was reset: its rings are empty, and begin anew.
    pub(crate) fn forget_posted(&self, qp: &mut TestQp) {
        for side in [&mut qp.send, &mut qp.receive] {
            side.position = 0;
            for at in 0..u64::from(ENTRIES) {
                self.store(side.at + at * side.stride, 0);
            }
        }
    }

    /// The next completion.
    pub(crate) fn poll(&mut self) -> Option<Cqe> {
        let side = self.cq_side;
        let at = side.at + u64::from(side.position % CQ_ENTRIES) * side.stride;
        let mut bytes = [0; Cqe::SIZE];
        for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(at + 8 * i as u64).to_ne_bytes());
        }
        let cqe = Cqe::from_bytes(&bytes);
        if u32::from(cqe.phase) != 1 - side.position / CQ_ENTRIES % 2 {
            return None;
        }
        self.cq_side.position += 1;
        // `CqRecord::consumer`, with four reserved bytes that are zero.
        self.store(0, u64::from(self.cq_side.position).to_le());
        Some(cqe)
    }

    /// All completions.
    pub(crate) fn poll_all(&mut self) -> Vec<Cqe> {
        std::iter::from_fn(|| self.poll()).collect()
    }

    /// A scatter/gather entry of `length` bytes at `offset` in the data.
    pub(crate) fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            addr: DATA + offset,
            length,
            lkey: self.key,
        }
    }

    /// The key of a fast region of the data, which is registered.
    pub(crate) fn fast_key(&self) -> u32 {
        let mut tables = self.vm.tables_mut();
        let pages: Vec<u64> = (DATA / PAGE_SIZE..PAGES).map(|n| n * PAGE_SIZE).collect();
        let most = pages.len() as u32;
        let made = |index| FastMr::new(index, self.pd, most, Form::Pages);
        let index = tables.keys.add_fast_region(made).unwrap();
        let mr = Mr {
            key: index << 8 | 9,
            pd: self.pd,
            access: access::LOCAL_WRITE | access::REMOTE_WRITE,
            iova: DATA,
            length: PAGES * PAGE_SIZE - DATA,
            offset: 0,
            windows: 0.into(),
            backing: Backing::Pages(Pages::resolve(&self.memory, &pages, 12).unwrap()),
        };
        let key = mr.key;
        tables.keys.register(mr).unwrap();
        key
    }

    /// Whether a fast region has not been invalidated.
    pub(crate) fn is_registered(&self, key: u32) -> bool {
        let tables = self.vm.tables();
        let region = tables.keys.fast_region(key);
        region.is_some_and(|region| region.describe(|mr| mr.key == key) == Some(true))
    }

    /// Writes bytes at `offset` in the data.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let range = self.memory.range_at(DATA + offset, bytes.len() as u64);
        let range = range.filter(|range| range.len() == bytes.len()).unwrap();
        crate::memory::copy(range, bytes.into());
    }

    /// Reads bytes at `offset` in the data.
    pub(crate) fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let range = self.memory.range_at(DATA + offset, length as u64).unwrap();
        assert_eq!(fetch_bytes(&mut bytes, range), length);
        bytes
    }
}
