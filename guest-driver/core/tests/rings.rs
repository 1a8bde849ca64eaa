// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work and completion queues against a model of the device, over many laps.
#![cfg(not(loom))]
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use virtio_rdma_driver_core::buffer::{CqLayout, QpCaps, QpLayout, RingLayout, SrqLayout};
use virtio_rdma_driver_core::{
    ArmMode, CompletionQueue, Doorbell, PostError, RecvQueue, SendQueue, SharedRecvQueue, SrdWqe,
    StatusPage,
};
use virtio_rdma_spec::command::PageList;
use virtio_rdma_spec::doorbell::{bit, worker_status, Bit, BLOCK_SIZE, SLOTS, STATUS_STRIDE};
use virtio_rdma_spec::layout::Layout;
use virtio_rdma_spec::ring::{
    BindMw, CqRecord, Cqe, CqeExtension, FastReg, MaskedOperands, RecvWqe, SendWqe, Sge, SrqRecord,
    UdWqe, PHASE,
};
use virtio_rdma_spec::verbs::{send_flag, vendor_err, wc_opcode, wc_status};

fn zeroed(bytes: usize) -> Vec<AtomicU64> {
    (0..bytes / 8).map(|_| AtomicU64::new(0)).collect()
}

fn read(memory: &[AtomicU64], offset: u32, bytes: usize) -> Vec<u8> {
    memory[offset as usize / 8..][..bytes.div_ceil(8)]
        .iter()
        .flat_map(|word| word.load(Relaxed).to_ne_bytes())
        .take(bytes)
        .collect()
}

fn write(memory: &[AtomicU64], offset: u32, bytes: &[u8]) {
    for (at, word) in memory[offset as usize / 8..]
        .iter()
        .zip(bytes.chunks_exact(8))
    {
        at.store(u64::from_ne_bytes(word.try_into().unwrap()), Relaxed);
    }
}

/// The device's side of a work queue: takes entries while their phase is right.
struct Reader<'m> {
    memory: &'m [AtomicU64],
    layout: RingLayout,
    position: u32,
}

impl Reader<'_> {
    /// The next entry and its index.
    fn next(&mut self) -> Option<(Vec<u8>, u16)> {
        let index = self.position % self.layout.entries;
        let offset = self.layout.offset + index * self.layout.stride;
        let entry = read(self.memory, offset, self.layout.stride as usize);
        let phase = (self.position / self.layout.entries) % 2 == 0;
        if (entry[1] & PHASE != 0) != phase {
            return None;
        }
        self.position = self.position.wrapping_add(1);
        Some((entry, index as u16))
    }
}

fn sge(seed: u64) -> Sge {
    Sge {
        addr: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        length: seed as u32 ^ 0x55,
        lkey: !(seed as u32),
    }
}

fn sges(entry: &[u8], offset: usize, count: u16) -> Vec<Sge> {
    entry[offset..]
        .chunks_exact(16)
        .take(count.into())
        .map(Sge::get)
        .collect()
}

const CAPS: QpCaps = QpCaps {
    max_send_wr: 8,
    max_recv_wr: 4,
    max_send_sge: 3,
    max_recv_sge: 2,
    max_inline: 60,
};

/// One batch of work requests, and what the device does after it.
#[derive(Debug, Clone)]
struct Step {
    pushes: usize,
    commit: bool,
    sges: usize,
    inline: usize,
    takes: usize,
    completes: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (
        0usize..12,
        any::<bool>(),
        0usize..5,
        0usize..70,
        0usize..9,
        any::<bool>(),
    )
        .prop_map(|(pushes, commit, sges, inline, takes, completes)| Step {
            pushes,
            commit,
            sges,
            inline,
            takes,
            completes,
        })
}

proptest! {
    /// Whatever is committed, in batches or not, arrives in order and unchanged; a full queue says
    /// so.
    // G-RING-001, G-RING-002, G-RING-003.
    #[test]
    fn sends_arrive(steps in prop::collection::vec(step(), 1..200)) {
        let layout = QpLayout::new(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        let sq = SendQueue::new(&memory[..], &layout.sq, CAPS.max_send_sge, CAPS.max_inline).unwrap();
        let mut device = Reader { memory: &memory, layout: layout.sq, position: 0 };
        let mut posted = VecDeque::new();
        let mut taken = Vec::new();
        let mut id = 0u64;
        for step in steps {
            let mut batch = sq.batch();
            let mut pushed = Vec::new();
            for _ in 0..step.pushes {
                id += 1;
                let wqe = SendWqe {
                    opcode: 2, flags: send_flag::SIGNALED, imm: id as u32 ^ 77, wr_id: id, remote_addr: id << 20,
                    rkey: 9, srqn: 1, operand0: 2, operand1: id ^ 3, count: 999,
                };
                let list: Vec<Sge> = (0..step.sges as u64).map(|i| sge(id + i)).collect();
                let data: Vec<u8> = (0..step.inline as u8).collect();
                let (result, error) = if id % 2 == 0 {
                    let (a, b) = data.split_at(step.inline / 3);
                    (batch.push_inline(&wqe, [a, &[], b]), (step.inline > 60).then_some(PostError::InlineTooLong))
                } else {
                    (batch.push(&wqe, list.iter().copied()), (step.sges > 3).then_some(PostError::TooManySges))
                };
                let full = posted.len() + taken.len() + pushed.len() == 8;
                let error = if full { Some(PostError::Full) } else { error };
                prop_assert_eq!(result.err(), error);
                if error.is_none() {
                    pushed.push((wqe, list, data));
                }
            }
            // Nothing is visible before the commit.
            let mut peek = Reader { memory: &memory, layout: layout.sq, position: device.position };
            prop_assert_eq!(std::iter::from_fn(|| peek.next()).take(9).count(), posted.len());
            if step.commit {
                prop_assert_eq!(batch.commit(), !pushed.is_empty());
                posted.extend(pushed);
            } else {
                drop(batch);
            }
            prop_assert_eq!(sq.room() as usize, 8 - posted.len() - taken.len());
            for _ in 0..step.takes {
                let Some((entry, index)) = device.next() else {
                    prop_assert!(posted.is_empty());
                    break;
                };
                let (wqe, list, data) = posted.pop_front().expect("the device sees what was not posted");
                let got = SendWqe::get(&entry);
                prop_assert_eq!(SendWqe { flags: wqe.flags, count: wqe.count, ..got }, wqe);
                if wqe.wr_id % 2 == 0 {
                    prop_assert_eq!(got.flags & !PHASE, wqe.flags | send_flag::INLINE);
                    prop_assert_eq!(&entry[48..48 + usize::from(got.count)], &data[..]);
                } else {
                    prop_assert_eq!(got.flags & !PHASE, wqe.flags);
                    prop_assert_eq!(sges(&entry, 48, got.count), list);
                }
                taken.push(index);
            }
            if let (true, Some(last)) = (step.completes, taken.last()) {
                // One completion stands for all before it; an index that is not outstanding frees
                // nothing.
                sq.complete(*last);
                if posted.is_empty() {
                    sq.complete(*last);
                }
                sq.complete(u16::MAX);
                taken.clear();
            }
        }
    }

    /// The same for receives.
    // G-RING-003, G-RQ-001.
    #[test]
    fn receives_arrive(steps in prop::collection::vec((0u64..7, 0usize..4, 0usize..6), 1..200), waited: bool) {
        let layout = QpLayout::new(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        memory[0].store(u64::from(waited).to_le(), Relaxed);
        let rq = RecvQueue::new(&memory[..], &layout.rq, CAPS.max_recv_sge).unwrap();
        let mut device = Reader { memory: &memory, layout: layout.rq, position: 0 };
        let mut posted = VecDeque::new();
        let mut id = 0;
        for (posts, sge_count, complete) in steps {
            for _ in 0..posts {
                id += 1;
                let list: Vec<Sge> = (0..sge_count as u64).map(|i| sge(id + i)).collect();
                let expected = if posted.len() == 4 {
                    Err(PostError::Full)
                } else if sge_count > 2 {
                    Err(PostError::TooManySges)
                } else {
                    Ok(waited)
                };
                prop_assert_eq!(rq.post(id, list.iter().copied()), expected);
                if expected.is_ok() {
                    posted.push_back((id, list));
                }
            }
            for _ in 0..complete {
                let Some((entry, index)) = device.next() else {
                    prop_assert!(posted.is_empty());
                    break;
                };
                let (id, list) = posted.pop_front().expect("the device sees what was not posted");
                let got = RecvWqe::get(&entry);
                prop_assert_eq!(got.wr_id, id);
                prop_assert_eq!((got.reserved0, got.flags & !PHASE, got.reserved1), (0, 0, 0));
                prop_assert_eq!(sges(&entry, 16, got.count), list);
                rq.complete(index);
            }
        }
    }

    /// Of a lost device, whatever it completed and whatever it left in the rings: what is
    /// outstanding is flushed, once and in order, posted before or after, and its room is free
    /// again.
    // G-RST-004, G-RST-005.
    #[test]
    fn what_a_lost_device_leaves_is_flushed(
        before in 0usize..20,
        done in 0usize..20,
        steps in prop::collection::vec((0usize..6, 0usize..6), 1..50),
        scribbled: bool,
    ) {
        let layout = QpLayout::new(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        let sq = SendQueue::new(&memory[..], &layout.sq, CAPS.max_send_sge, CAPS.max_inline).unwrap();
        let rq = RecvQueue::new(&memory[..], &layout.rq, CAPS.max_recv_sge).unwrap();
        // Work requests outstanding, and the next one's id and index.
        let (mut sends, mut receives) = (VecDeque::new(), VecDeque::new());
        let mut next = [0u64; 2];
        let mut post = |sends: &mut VecDeque<_>, receives: &mut VecDeque<_>| {
            let wqe = SendWqe { opcode: 4, wr_id: 1000 + next[0], ..SendWqe::default() };
            if sq.post(&wqe, []).is_ok() {
                sends.push_back((1000 + next[0], next[0] as u16 % 8));
                next[0] += 1;
            }
            if rq.post(2000 + next[1], []).is_ok() {
                receives.push_back((2000 + next[1], next[1] as u16 % 4));
                next[1] += 1;
            }
        };
        for _ in 0..before {
            post(&mut sends, &mut receives);
            // The device is a little behind.
            if sends.len() > done % 8 {
                sq.complete(sends.pop_front().unwrap().1);
            }
            if receives.len() > done % 4 {
                rq.complete(receives.pop_front().unwrap().1);
            }
        }
        prop_assert_eq!(sq.room() as usize, 8 - sends.len());
        for (posts, flushes) in steps {
            for _ in 0..posts {
                post(&mut sends, &mut receives);
            }
            for _ in 0..flushes {
                let cqe = sq.flush_next(7);
                // Until it is completed it is the oldest.
                prop_assert_eq!(sq.flush_next(7), cqe);
                let expected = sends.pop_front().map(|(wr_id, wqe_index)| Cqe {
                    wr_id, wqe_index, qp_num: 7, status: wc_status::WR_FLUSH_ERR, vendor_err: vendor_err::FLUSHED,
                    opcode: wc_opcode::RDMA_READ, ..Cqe::default()
                });
                prop_assert_eq!(cqe, expected);
                cqe.iter().for_each(|cqe| sq.complete(cqe.wqe_index));
                let cqe = rq.flush_next(9);
                let expected = receives.pop_front().map(|(wr_id, wqe_index)| Cqe {
                    wr_id, wqe_index, qp_num: 9, status: wc_status::WR_FLUSH_ERR, vendor_err: vendor_err::FLUSHED,
                    opcode: wc_opcode::RECV, ..Cqe::default()
                });
                prop_assert_eq!(cqe, expected);
                cqe.iter().for_each(|cqe| rq.complete(cqe.wqe_index));
            }
        }
        if scribbled {
            memory.iter().for_each(|word| word.store(u64::MAX, Relaxed));
        }
        // It ends: with as many as are outstanding, whatever is in the memory.
        let rest = std::iter::from_fn(|| sq.flush_next(7).inspect(|cqe| sq.complete(cqe.wqe_index)));
        prop_assert_eq!(rest.count(), sends.len());
        let rest = std::iter::from_fn(|| rq.flush_next(9).inspect(|cqe| rq.complete(cqe.wqe_index)));
        prop_assert_eq!(rest.count(), receives.len());
        prop_assert_eq!((sq.room(), rq.room()), (8, 4));
    }

    /// What is posted to a shared receive queue arrives in order; it is full until the device has
    /// consumed.
    // G-SRQ-002, G-SRQ-003.
    // G-SRQ-004.
    #[test]
    fn shared_receives_arrive(steps in prop::collection::vec((0u64..7, 0usize..4, 0u32..6, any::<bool>()), 1..200)) {
        let layout = SrqLayout::new(4, 2).unwrap();
        let memory = zeroed(layout.size);
        let srq = SharedRecvQueue::new(&memory[..], &layout.ring, 2).unwrap();
        let mut device = Reader { memory: &memory, layout: layout.ring, position: 0 };
        let mut posted = VecDeque::new();
        let (mut id, mut total) = (0, 0u32);
        for (posts, sge_count, consume, waited) in steps {
            let word = u64::from(device.position) << 32 | u64::from(waited);
            memory[0].store(word.to_le(), Relaxed);
            prop_assert_eq!(srq.room() as usize, 4 - posted.len());
            for _ in 0..posts {
                id += 1;
                let list: Vec<Sge> = (0..sge_count as u64).map(|i| sge(id + i)).collect();
                let expected = if posted.len() == 4 {
                    Err(PostError::Full)
                } else if sge_count > 2 {
                    Err(PostError::TooManySges)
                } else {
                    Ok(waited)
                };
                prop_assert_eq!(srq.post(id, list.iter().copied()), expected);
                if expected.is_ok() {
                    posted.push_back((id, list));
                    total += 1;
                }
            }
            prop_assert_eq!(SrqRecord::get(&read(&memory, 0, SrqRecord::SIZE)).posted, total);
            for _ in 0..consume {
                let Some((entry, _)) = device.next() else {
                    prop_assert!(posted.is_empty());
                    break;
                };
                let (id, list) = posted.pop_front().expect("the device sees what was not posted");
                let got = RecvWqe::get(&entry);
                prop_assert_eq!(got.wr_id, id);
                prop_assert_eq!(sges(&entry, 16, got.count), list);
            }
        }
    }

    /// Datagrams, binds and masked atomic operations are where the specification says, whatever the
    /// entry held before.
    #[test]
    fn other_entries_are_in_their_places(seed: u64, flags in 0u8..8, length in 0usize..=60) {
        let word = |i: u64| seed.wrapping_mul(2 * i + 1).wrapping_add(i);
        let dirty = |layout: &RingLayout, memory: &[AtomicU64]| {
            // All but the phase.
            for i in 0..layout.entries * layout.stride / 8 {
                let value = if i % (layout.stride / 8) == 0 { !u64::from_le(0x8000) } else { u64::MAX };
                memory[(layout.offset / 8 + i) as usize].store(value, Relaxed);
            }
        };

        let layout = QpLayout::datagram(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        let sq = SendQueue::datagram(&memory[..], &layout.sq, CAPS.max_send_sge, CAPS.max_inline).unwrap();
        dirty(&layout.sq, &memory);
        let ud = UdWqe {
            opcode: 3, flags, imm: word(1) as u32, wr_id: word(2), dgid: (word(3) as u128).to_le_bytes(),
            remote_qpn: 0xff_ffff, remote_qkey: word(4) as u32, flow_label: 5, sgid_index: 6, sl: 7, traffic_class: 8,
            hop_limit: 9, dmac: [1, 2, 3, 4, 5, 6], pkey_index: 10, ..UdWqe::default()
        };
        let data: Vec<u8> = (0..length as u8).collect();
        let list = [sge(word(5)), sge(word(6))];
        sq.post(&ud, list).unwrap();
        let mut batch = sq.batch();
        batch.push_inline(&ud, [&data[..]]).unwrap();
        prop_assert_eq!(batch.push_inline(&ud, [&[0; 61][..]]), Err(PostError::InlineTooLong));
        prop_assert!(batch.commit());
        let mut device = Reader { memory: &memory, layout: layout.sq, position: 0 };
        let (entry, _) = device.next().unwrap();
        prop_assert_eq!(UdWqe::get(&entry), UdWqe { count: 2, flags: flags | PHASE, ..ud });
        prop_assert_eq!(sges(&entry, 64, 2), list);
        let (entry, _) = device.next().unwrap();
        let flags = flags & !send_flag::INLINE;
        let expected = UdWqe { count: length as u16, flags: flags | send_flag::INLINE | PHASE, ..ud };
        prop_assert_eq!(UdWqe::get(&entry), expected);
        prop_assert_eq!(&entry[64..64 + length], &data[..]);
        prop_assert!(device.next().is_none());

        let layout = QpLayout::with_masked_atomics(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        let sq = SendQueue::new(&memory[..], &layout.sq, CAPS.max_send_sge, CAPS.max_inline).unwrap();
        dirty(&layout.sq, &memory);
        let bind = BindMw {
            addr: word(1), mw_rkey: word(2) as u32, length: word(3), access: 6, mr_lkey: word(4) as u32,
            mr_addr: word(5), new_rkey: word(6) as u32, ..BindMw::default()
        };
        let wqe = SendWqe { opcode: 8, flags, wr_id: word(7), imm: 1, ..SendWqe::default() };
        let masked = SendWqe { opcode: 12, remote_addr: word(8), rkey: 3, operand0: word(9), operand1: 5, ..wqe };
        let operands = MaskedOperands { mask0: word(10), mask1: word(11) };
        let mut batch = sq.batch();
        batch.push_bind(&wqe, &bind).unwrap();
        let pages = PageList { addr: word(1), count: word(2) as u32, levels: 2, page_shift: 12, ..PageList::default() };
        let reg = FastReg {
            iova: word(3), key: word(4) as u32, access: 7, length: word(5), pages, offset: word(6) as u32, lkey: word(7) as u32,
        };
        batch.push_reg(&SendWqe { opcode: 32, ..wqe }, &reg).unwrap();
        batch.push_masked(&masked, &operands, Some(list[0])).unwrap();
        prop_assert!(batch.commit());
        let mut device = Reader { memory: &memory, layout: layout.sq, position: 0 };
        let (entry, _) = device.next().unwrap();
        let head = SendWqe::get(&entry);
        prop_assert_eq!((head.opcode, head.flags, head.count, head.wr_id), (8, flags | PHASE, 0, wqe.wr_id));
        prop_assert_eq!(BindMw::get(&entry[16..]), bind);
        let (entry, _) = device.next().unwrap();
        let head = SendWqe::get(&entry);
        prop_assert_eq!((head.opcode, head.flags, head.count, head.wr_id), (32, flags | PHASE, 0, wqe.wr_id));
        prop_assert_eq!(FastReg::get(&entry[16..]), reg);
        let (entry, _) = device.next().unwrap();
        prop_assert_eq!(SendWqe::get(&entry), SendWqe { count: 1, flags: flags | PHASE, ..masked });
        prop_assert_eq!(sges(&entry, 48, 1), &list[..1]);
        prop_assert_eq!(MaskedOperands::get(&entry[64..]), operands);
    }

    /// Completions with an extension, and a queue that changes its size: nothing is lost, doubled
    /// or out of order.
    // G-RSZ-001, G-RSZ-002.
    #[test]
    fn resized_queues_go_on(extended: bool, steps in prop::collection::vec((0u32..20, 0u32..20, 0u32..3), 1..60)) {
        let layout_of = |cqe| if extended { CqLayout::extended(cqe) } else { CqLayout::new(cqe) }.unwrap();
        let cqe_at = |position: u32, layout: &RingLayout, id: u64| Cqe {
            wr_id: id, qp_num: 5, phase: u8::from((position / layout.entries) % 2 == 0), ..Cqe::default()
        };
        let put = |memory: &[AtomicU64], layout: &RingLayout, position: u32, id: u64| {
            let at = layout.offset + position % layout.entries * layout.stride;
            if extended {
                let extension = CqeExtension { timestamp: id + 7, vlan: 3, ..CqeExtension::default() };
                write(memory, at + 32, &extension.to_bytes());
            }
            write(memory, at, &cqe_at(position, layout, id).to_bytes());
        };
        let mut layout = layout_of(16);
        let mut buffers = vec![zeroed(layout.size)];
        let sizes: Vec<u32> = steps.iter().map(|step| 16 << step.2).collect();
        for size in &sizes {
            buffers.push(zeroed(layout_of(*size).size));
        }
        let mut memory = &buffers[0];
        let mut cq = CompletionQueue::new(&memory[..], &layout.ring).unwrap();
        let (mut produced, mut position) = (0u64, 0u32);
        let mut pending = VecDeque::new();
        for (((produce, consume, _), size), new_memory) in steps.iter().zip(&sizes).zip(&buffers[1..]) {
            for _ in 0..(*produce).min(layout.ring.entries - pending.len() as u32) {
                put(memory, &layout.ring, position, produced);
                pending.push_back(produced);
                (produced, position) = (produced + 1, position.wrapping_add(1));
            }
            for _ in 0..*consume {
                let polled = cq.poll();
                prop_assert_eq!(polled.map(|cqe| cqe.wr_id), pending.pop_front());
                if let Some(cqe) = polled {
                    prop_assert_eq!(cq.extension().timestamp, if extended { cqe.wr_id + 7 } else { 0 });
                }
            }
            cq.arm(ArmMode::Any);
            if (*size as usize) < pending.len() {
                continue;
            }
            let new_layout = layout_of(*size);
            let old = CqRecord::get(&read(memory, 0, CqRecord::SIZE));
            let resized = cq.prepare_resize(&new_memory[..], &new_layout.ring).unwrap();
            let consumer = CqRecord::get(&read(memory, 0, CqRecord::SIZE)).consumer;
            prop_assert_eq!(position.wrapping_sub(consumer) as usize, pending.len());
            let new = CqRecord::get(&read(new_memory, 0, CqRecord::SIZE));
            prop_assert_eq!((new.consumer, new.arm), (0, old.arm));
            for (i, id) in pending.iter().enumerate() {
                put(new_memory, &new_layout.ring, i as u32, *id);
            }
            prop_assert!(std::ptr::eq(cq.resized(resized), &memory[..]));
            (layout, memory, position) = (new_layout, new_memory, pending.len() as u32);
        }
    }

    /// Completions are returned once, in order, and not those of a forgotten queue pair.
    // G-QP-002, G-RING-004, G-RING-005.
    #[test]
    fn completions_arrive(steps in prop::collection::vec((0u32..20, 0u32..20, any::<bool>()), 1..100)) {
        let layout = CqLayout::new(13).unwrap();
        prop_assert_eq!(layout.ring.entries, 16);
        let memory = zeroed(layout.size);
        let cq = CompletionQueue::new(&memory[..], &layout.ring).unwrap();
        let mut produced = 0u32;
        let mut pending = VecDeque::new();
        for (produce, consume, forget) in steps {
            let consumer = CqRecord::get(&read(&memory, 0, CqRecord::SIZE)).consumer;
            for _ in 0..produce.min(16 - produced.wrapping_sub(consumer)) {
                let cqe = Cqe {
                    wr_id: produced.into(), byte_len: 1, imm: 2, qp_num: produced % 3, src_qp: 4, wqe_index: 5,
                    vendor_err: 6, sl: 7, status: 8, opcode: 9, wc_flags: 10,
                    phase: u8::from((produced / 16) % 2 == 0),
                };
                write(&memory, layout.ring.offset + (produced % 16) * 32, &cqe.to_bytes());
                pending.push_back(cqe);
                produced += 1;
            }
            if forget {
                cq.forget(1);
                pending.retain(|cqe| cqe.qp_num != 1);
                if pending.is_empty() {
                    // Whoever gets nothing need not publish that entries were passed over.
                    prop_assert_eq!(cq.poll(), None);
                    prop_assert_eq!(CqRecord::get(&read(&memory, 0, CqRecord::SIZE)).consumer, produced);
                }
            }
            for _ in 0..consume {
                prop_assert_eq!(cq.poll(), pending.pop_front());
            }
            cq.publish();
        }
    }

    /// The bit of every slot is where the specification says, and announced.
    // G-DB-001.
    #[test]
    fn doorbells_set_their_bits(queue in 0u32..3, slot in 0..SLOTS, sleeping: bool) {
        let blocks = zeroed(3 * BLOCK_SIZE);
        let status = zeroed(4096);
        status[8 * queue as usize].store(u64::from(sleeping).to_le(), Relaxed);
        let doorbell = Doorbell::new(&blocks[..], &status[..], queue, slot).unwrap();
        prop_assert_eq!(doorbell.ring(), sleeping);
        prop_assert_eq!(doorbell.ring(), sleeping);
        let word = |offset: usize| blocks[(queue as usize * BLOCK_SIZE + offset) / 8].load(Relaxed);
        let set: u32 = blocks.iter().map(|word| word.load(Relaxed).count_ones()).sum();
        match bit(slot).unwrap() {
            Bit::Direct { root } => {
                prop_assert_eq!(word(0), root.to_le());
                prop_assert_eq!(set, 1);
            }
            Bit::Leaf { leaf_offset, leaf, summary_offset, summary, root } => {
                prop_assert_eq!(word(leaf_offset), leaf.to_le());
                prop_assert_eq!(word(summary_offset), summary.to_le());
                prop_assert_eq!(word(0), root.to_le());
                prop_assert_eq!(set, 3);
            }
        }
    }
}

/// A lost device is asked for nothing, whichever of its words is looked at.
// G-RST-005.
#[test]
fn a_lost_device_is_not_woken() {
    let (blocks, status) = (zeroed(2 * BLOCK_SIZE), zeroed(4096));
    let page = StatusPage::new(&status[..]);
    let doorbells = [(0, 3), (1, 3), (1, 3000)]
        .map(|(queue, slot)| Doorbell::new(&blocks[..], &status[..], queue, slot).unwrap());
    for (word, wake, lost) in [
        (worker_status::POLLING, false, false),
        (worker_status::SLEEPING, true, false),
        (worker_status::LOST, false, true),
    ] {
        for status in status.iter().step_by(STATUS_STRIDE / 8) {
            status.store(u64::from(word).to_le(), Relaxed);
        }
        assert_eq!(page.is_lost(), lost);
        for doorbell in &doorbells {
            assert_eq!((doorbell.ring(), doorbell.is_lost()), (wake, lost));
        }
    }
}

#[test]
fn bad_layouts_are_refused() {
    let memory = zeroed(4096);
    let ok = RingLayout {
        entries: 8,
        stride: 64,
        offset: 64,
    };
    let sq = |layout, sge, inline| SendQueue::new(&memory[..], &layout, sge, inline).is_ok();
    assert!(sq(ok, 1, 16));
    assert!(!sq(ok, 2, 0));
    assert!(!sq(ok, 0, 17));
    assert!(!sq(ok, u32::MAX, 0));
    assert!(!sq(ok, 0, u32::MAX));
    assert!(!sq(RingLayout { entries: 7, ..ok }, 1, 0));
    assert!(!sq(RingLayout { entries: 64, ..ok }, 1, 0));
    assert!(!sq(RingLayout { entries: 0, ..ok }, 1, 0));
    assert!(!sq(RingLayout { stride: 96, ..ok }, 1, 0));
    assert!(!sq(RingLayout { offset: 32, ..ok }, 1, 0));
    assert!(!sq(
        RingLayout {
            offset: u32::MAX - 63,
            ..ok
        },
        1,
        0
    ));
    let ud = |layout, sge, inline| SendQueue::datagram(&memory[..], &layout, sge, inline).is_ok();
    assert!(ud(
        RingLayout {
            stride: 128,
            offset: 128,
            ..ok
        },
        4,
        64
    ));
    assert!(ud(ok, 0, 0));
    assert!(!ud(ok, 1, 0));
    assert!(!ud(ok, 0, 1));
    let srq = |layout, sge| SharedRecvQueue::new(&memory[..], &layout, sge).is_ok();
    assert!(srq(RingLayout { offset: 128, ..ok }, 3));
    assert!(!srq(RingLayout { offset: 128, ..ok }, 4));
    assert!(!srq(ok, 1));
    let short = SendQueue::new(&memory[..], &ok, 1, 0).unwrap();
    let (one, two) = (
        SrqLayout::new(1, 1).unwrap().ring,
        SrqLayout::new(1, 2).unwrap().ring,
    );
    let shared = SharedRecvQueue::new(&memory[..], &one, 1).unwrap();
    assert!(shared.prepare_resize(&memory[..], &one).is_ok());
    assert!(shared.prepare_resize(&memory[..], &two).is_err());
    let masked = short
        .batch()
        .push_masked(&SendWqe::default(), &MaskedOperands::default(), None);
    assert_eq!(masked, Err(PostError::TooManySges));
    let (small, extended) = (CqLayout::new(1).unwrap(), CqLayout::extended(1).unwrap());
    let cq = CompletionQueue::new(&memory[..], &small.ring).unwrap();
    assert!(cq.prepare_resize(&memory[..], &extended.ring).is_err());
    assert!(CompletionQueue::new(
        &memory[..],
        &RingLayout {
            stride: 128,
            offset: 128,
            ..ok
        }
    )
    .is_err());
    assert!(Doorbell::new(&memory[..], &memory[..], 0, 0).is_err());
    let blocks = zeroed(BLOCK_SIZE);
    assert!(Doorbell::new(&blocks[..], &memory[..], 0, SLOTS).is_err());
    assert!(Doorbell::new(&blocks[..], &memory[..], 1, 0).is_err());
    assert!(Doorbell::new(&blocks[..], &memory[..], u32::MAX, 0).is_err());
}

/// The device moves what it has not consumed to another buffer, and the queue goes on there.
#[test]
fn shared_receive_queues_go_on_in_another_buffer() {
    let layout = SrqLayout::new(8, 2).unwrap();
    let memory = zeroed(layout.size);
    let mut srq = SharedRecvQueue::new(&memory[..], &layout.ring, 2).unwrap();
    for id in 0..8 {
        srq.post(id, [sge(id)]).unwrap();
    }
    memory[0].store((5u64 << 32).to_le(), Relaxed);
    let mut device = Reader {
        memory: &memory,
        layout: layout.ring,
        position: 5,
    };
    let new_layout = SrqLayout::new(4, 2).unwrap();
    let new_memory = zeroed(new_layout.size);
    let resized = srq
        .prepare_resize(&new_memory[..], &new_layout.ring)
        .unwrap();
    let mut moved = 0;
    while let Some((mut entry, _)) = device.next() {
        entry[1] |= PHASE;
        let at = new_layout.ring.offset + moved * new_layout.ring.stride;
        write(&new_memory, at, &entry);
        moved += 1;
    }
    assert_eq!(moved, 3);
    new_memory[8].store(u64::from(moved).to_le(), Relaxed);
    assert!(std::ptr::eq(srq.resized(resized), &memory[..]));
    assert_eq!((srq.entries(), srq.room()), (4, 1));
    srq.post(8, []).unwrap();
    assert_eq!(srq.post(9, []), Err(PostError::Full));
    let mut device = Reader {
        memory: &new_memory,
        layout: new_layout.ring,
        position: 0,
    };
    for id in 5..9 {
        let (entry, _) = device.next().unwrap();
        assert_eq!(RecvWqe::get(&entry).wr_id, id);
    }
    assert!(device.next().is_none());
    assert_eq!(
        SrqRecord::get(&read(&new_memory, 0, SrqRecord::SIZE)).posted,
        4
    );
    // However many the device says that it moved, there are no more than entries.
    let last = zeroed(layout.size);
    let resized = srq.prepare_resize(&last[..], &layout.ring).unwrap();
    last[8].store(u64::MAX, Relaxed);
    srq.resized(resized);
    assert_eq!(srq.room(), 0);
}

// G-ARM-001, G-ARM-002.
#[test]
fn arming_counts_and_does_not_downgrade() {
    let layout = CqLayout::new(1).unwrap();
    let memory = zeroed(layout.size);
    let cq = CompletionQueue::new(&memory[..], &layout.ring).unwrap();
    let arm = || CqRecord::get(&read(&memory, 0, CqRecord::SIZE)).arm;
    assert_eq!(arm(), 0);
    cq.arm(ArmMode::Solicited);
    assert_eq!(arm(), 4 | 2);
    cq.arm(ArmMode::Any);
    assert_eq!(arm(), 8 | 1);
    cq.arm(ArmMode::Solicited);
    assert_eq!(
        arm(),
        12 | 1,
        "any completion was asked for, and no event has come"
    );
    cq.event_received();
    cq.arm(ArmMode::Solicited);
    assert_eq!(arm(), 16 | 2);
}

// G-MOD-001.
#[test]
fn a_reset_queue_starts_over() {
    let layout = QpLayout::new(&CAPS).unwrap();
    let memory = zeroed(layout.size);
    let sq = SendQueue::new(&memory[..], &layout.sq, 1, 0).unwrap();
    let rq = RecvQueue::new(&memory[..], &layout.rq, 1).unwrap();
    for _ in 0..4 {
        sq.post(&SendWqe::default(), []).unwrap();
        rq.post(0, []).unwrap();
    }
    let (fresh, waiting) = (zeroed(256), zeroed(256));
    let ring = RingLayout {
        entries: 2,
        stride: 64,
        offset: 128,
    };
    let srq = SharedRecvQueue::new(&fresh[..], &ring, 1).unwrap();
    assert_eq!(srq.post(1, []), Ok(false));
    // A count that cannot be frees nothing.
    fresh[0].store((7u64 << 32).to_le(), Relaxed);
    assert_eq!(srq.room(), 1);
    waiting[0].store(1u64.to_le(), Relaxed);
    let srq = SharedRecvQueue::new(&waiting[..], &ring, 1).unwrap();
    assert_eq!(srq.post(1, []), Ok(true));
    sq.reset();
    rq.reset();
    assert!(memory.iter().all(|word| word.load(Relaxed) == 0));
    assert_eq!((sq.room(), rq.room()), (8, 4));
}

#[test]
fn completing_names_what_complete_frees() {
    let caps = QpCaps {
        max_send_wr: 8,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };
    let layout = QpLayout::new(&caps).unwrap();
    let memory = zeroed(layout.size);
    let queue = SendQueue::new(&memory[..], &layout.sq, 1, 0).unwrap();
    let freed = |index: u16| queue.completing(index).collect::<Vec<_>>();
    let post = |count: u32| {
        for _ in 0..count {
            queue.post(&SendWqe::default(), []).unwrap();
        }
    };
    assert_eq!(queue.entries(), 8);
    assert_eq!(freed(0), []);
    assert_eq!(queue.batch().next_index(), 0);
    post(6);
    assert_eq!(queue.batch().next_index(), 6);
    assert_eq!(freed(3), [0, 1, 2, 3]);
    // Not outstanding, and no entry.
    assert_eq!(freed(6), []);
    assert_eq!(freed(8), []);
    queue.complete(3);
    assert_eq!(queue.room(), 6);
    post(4);
    assert_eq!(freed(1), [4, 5, 6, 7, 0, 1]);
    assert_eq!(freed(4), [4]);
    queue.complete(1);
    assert_eq!(queue.room(), 8);
    assert_eq!(freed(1), []);
}

proptest! {
    // G-SRD-001.
    /// Work requests of SRD complete in any order: no entry is written again before all that were posted
    /// before it have completed, and what is outstanding in the end is flushed, each once.
    #[test]
    fn reliable_datagrams_complete_in_any_order(
        steps in proptest::collection::vec(any::<Option<proptest::sample::Index>>(), 1..200),
    ) {
        let layout = QpLayout::reliable_datagram(&CAPS).unwrap();
        let memory = zeroed(layout.size);
        let (sge, inline) = (CAPS.max_send_sge, CAPS.max_inline.min(16));
        let sq = SendQueue::reliable_datagram(&memory[..], &layout.sq, sge, inline).unwrap();
        let entries = u64::from(sq.entries());
        // Positions of those that are outstanding.
        let mut outstanding = Vec::new();
        let mut next = 0u64;
        for step in steps {
            match step {
                Some(which) if !outstanding.is_empty() => {
                    let position: u64 = outstanding.remove(which.index(outstanding.len()));
                    sq.complete((position % entries) as u16);
                }
                _ => {
                    let oldest = outstanding.iter().min().copied().unwrap_or(next);
                    let wqe = SrdWqe {
                        to: UdWqe { opcode: 2, wr_id: next, ..UdWqe::default() },
                        ..SrdWqe::default()
                    };
                    let posted = sq.post(&wqe, []);
                    prop_assert_eq!(posted.is_ok(), next - oldest < entries);
                    if posted.is_ok() {
                        outstanding.push(next);
                        next += 1;
                    }
                }
            }
        }
        outstanding.sort_unstable();
        for position in outstanding {
            let cqe = sq.flush_next(1).unwrap();
            prop_assert_eq!(cqe.wr_id, position);
            prop_assert_eq!(u64::from(cqe.wqe_index), position % entries);
            sq.complete(cqe.wqe_index);
        }
        prop_assert!(sq.flush_next(1).is_none());
        // A device may say what it likes.
        for index in 0..=u16::MAX {
            sq.complete(index);
        }
        prop_assert_eq!(u64::from(sq.room()), entries);
    }
}
