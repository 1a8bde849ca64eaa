// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Posting by `ibv_wr_*`: work requests between a start and an end, each an operation and then its
//! data.

use core::ffi::{c_int, c_void};
use core::mem;

use virtio_rdma_driver_core::{SendBatch, SrdWqe};
use virtio_rdma_spec::ring::{BindMw, MaskedOperands, SendWqe, Sge, SrdRange, UdWqe};
use virtio_rdma_spec::verbs::{send_flag, wr_opcode};

use super::buffer::Words;
use super::lock::SpinGuard;
use super::qp::{self, bytes, imm, queues, takes_inline, Kind, Qp, Queues};
use super::{ah, status, sys, Errno, EINVAL};

/// Bytes of an ATOMIC_WRITE.
pub const ATOMIC_WRITE_SIZE: u32 = 8;

/// Operations as creating a queue pair names them, and their opcodes.
const OPERATIONS: [(u32, u8); 12] = [
    (sys::IBV_QP_EX_WITH_RDMA_WRITE, wr_opcode::RDMA_WRITE),
    (
        sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
        wr_opcode::RDMA_WRITE_WITH_IMM,
    ),
    (sys::IBV_QP_EX_WITH_SEND, wr_opcode::SEND),
    (sys::IBV_QP_EX_WITH_SEND_WITH_IMM, wr_opcode::SEND_WITH_IMM),
    (sys::IBV_QP_EX_WITH_RDMA_READ, wr_opcode::RDMA_READ),
    (
        sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
        wr_opcode::ATOMIC_CMP_AND_SWP,
    ),
    (
        sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
        wr_opcode::ATOMIC_FETCH_AND_ADD,
    ),
    (sys::IBV_QP_EX_WITH_LOCAL_INV, wr_opcode::LOCAL_INV),
    (sys::IBV_QP_EX_WITH_BIND_MW, wr_opcode::BIND_MW),
    (sys::IBV_QP_EX_WITH_SEND_WITH_INV, wr_opcode::SEND_WITH_INV),
    (sys::IBV_QP_EX_WITH_FLUSH, wr_opcode::FLUSH),
    (sys::IBV_QP_EX_WITH_ATOMIC_WRITE, wr_opcode::ATOMIC_WRITE),
];

/// The opcodes of these operations: what verbs have.
pub fn opcodes() -> impl Iterator<Item = u8> {
    OPERATIONS.iter().map(|(_, opcode)| *opcode)
}

/// Whether a queue pair with these opcodes has all of these operations.
pub fn supports(send_ops_flags: u64, opcodes: u32) -> bool {
    let known = OPERATIONS
        .iter()
        .filter(|(_, opcode)| opcodes & 1 << opcode != 0)
        .fold(0, |known, (flag, _)| known | u64::from(*flag));
    send_ops_flags & !known == 0
}

/// Between start and end. Belongs to who holds the lock of the send queue.
#[derive(Debug)]
pub struct State {
    /// Null only between batches, or if there is no posting in this state of the queue pair.
    batch: Option<SendBatch<'static, Words>>,
    /// The operation that is not complete yet.
    pending: Option<Pending>,
    result: Result<(), Errno>,
}

/// An operation whose data or address is to come.
#[derive(Debug)]
struct Pending {
    wqe: Wqe,
    /// No address is missing.
    addressed: bool,
    /// Data that came before the address.
    data: Option<Data>,
}

#[derive(Debug)]
enum Wqe {
    Connected(SendWqe),
    Datagram(UdWqe),
    Reliable(SrdWqe),
    Bind(SendWqe, BindMw),
    /// With its data.
    AtomicWrite(SendWqe, [u8; ATOMIC_WRITE_SIZE as usize]),
    Masked(SendWqe, MaskedOperands),
}

#[derive(Debug)]
enum Data {
    Sges(Vec<Sge>),
    Inline(Vec<u8>),
}

impl Default for State {
    fn default() -> Self {
        Self {
            batch: None,
            pending: None,
            result: Ok(()),
        }
    }
}

/// Adds an operation with scatter/gather entries.
fn push_sges(
    batch: &mut SendBatch<'static, Words>,
    wqe: &Wqe,
    sges: impl IntoIterator<Item = Sge>,
) -> Result<(), Errno> {
    Ok(match wqe {
        Wqe::Connected(wqe) => batch.push(wqe, sges),
        Wqe::Datagram(wqe) => batch.push(wqe, sges),
        Wqe::Reliable(wqe) => batch.push(wqe, sges),
        // These bring all they need.
        Wqe::Bind(wqe, bind) => batch.push_bind(wqe, bind),
        Wqe::AtomicWrite(wqe, data) => batch.push_inline(wqe, [&data[..]]),
        Wqe::Masked(wqe, operands) => {
            let mut sges = sges.into_iter();
            let first = sges.next();
            if sges.next().is_some() {
                return Err(EINVAL);
            }
            batch.push_masked(wqe, operands, first)
        }
    }?)
}

/// Adds an operation with inline data.
fn push_inline<'d>(
    batch: &mut SendBatch<'static, Words>,
    wqe: &Wqe,
    parts: impl IntoIterator<Item = &'d [u8]>,
) -> Result<(), Errno> {
    match wqe {
        Wqe::Connected(wqe) if takes_inline(wqe.opcode) => Ok(batch.push_inline(wqe, parts)?),
        Wqe::Datagram(wqe) => Ok(batch.push_inline(wqe, parts)?),
        Wqe::Reliable(wqe) if takes_inline(wqe.to.opcode) => Ok(batch.push_inline(wqe, parts)?),
        _ => Err(EINVAL),
    }
}

impl State {
    /// Notes the first error.
    fn note(&mut self, result: Result<(), Errno>) {
        if self.result.is_ok() {
            self.result = result;
        }
    }

    #[inline(always)]
    fn sges(&mut self, sges: impl IntoIterator<Item = Sge>) {
        match (&mut self.batch, &mut self.pending) {
            (Some(batch), Some(pending)) if pending.addressed => {
                let result = push_sges(batch, &pending.wqe, sges);
                self.pending = None;
                self.note(result);
            }
            (_, Some(pending)) => pending.data = Some(Data::Sges(sges.into_iter().collect())),
            _ => {}
        }
    }

    #[inline(always)]
    fn inline<'d>(&mut self, parts: impl IntoIterator<Item = &'d [u8]>) {
        match (&mut self.batch, &mut self.pending) {
            (Some(batch), Some(pending)) if pending.addressed => {
                let result = push_inline(batch, &pending.wqe, parts);
                self.pending = None;
                self.note(result);
            }
            (_, Some(pending)) => {
                pending.data = Some(Data::Inline(parts.into_iter().flatten().copied().collect()));
            }
            _ => {}
        }
    }

    /// Sets the address of the operation, and adds it if its data are there already.
    #[inline(always)]
    fn address(&mut self, set: impl FnOnce(&mut Wqe)) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        set(&mut pending.wqe);
        pending.addressed = true;
        match pending.data.take() {
            None => {}
            Some(Data::Sges(sges)) => self.sges(sges),
            Some(Data::Inline(data)) => self.inline([&data[..]]),
        }
    }

    /// Completes the operation that got no data: it has none.
    #[inline(always)]
    fn finish(&mut self) {
        if let Some(pending) = &self.pending {
            if pending.addressed {
                self.sges([]);
            } else {
                self.pending = None;
                self.note(Err(EINVAL));
            }
        }
    }

    /// Begins an operation.
    #[inline(always)]
    fn begin(&mut self, wqe: Wqe, addressed: bool) {
        self.finish();
        self.pending = Some(Pending {
            wqe,
            addressed,
            data: None,
        });
    }
}

/// Sets the operations of a queue pair.
pub fn set_ops(qp: &mut sys::ibv_qp_ex) {
    qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    qp.wr_atomic_write = Some(wr_atomic_write);
    qp.wr_bind_mw = Some(wr_bind_mw);
    qp.wr_flush = Some(wr_flush);
    qp.wr_local_inv = Some(wr_local_inv);
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_send_inv = Some(wr_send_inv);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
}

/// # Safety
/// The queue pair is ours and alive, and stays so for `'a`.
unsafe fn ours<'a>(qp: *mut sys::ibv_qp_ex) -> &'a Queues {
    // SAFETY: as the caller says.
    unsafe { queues(qp.cast()) }
}

/// # Safety
/// The queue pair is ours and alive, the lock of its send queue is held by this thread, and no
/// other reference to the state is in use.
unsafe fn state<'a>(qp: *mut sys::ibv_qp_ex) -> &'a mut State {
    // SAFETY: as the caller says.
    unsafe { &mut *(*qp.cast::<Qp>()).wr.get() }
}

unsafe extern "C" fn wr_start(qp: *mut sys::ibv_qp_ex) {
    // SAFETY: objects are ours and alive. A queue pair is not destroyed between start and end:
    // 'static is until then.
    let queues: &'static Queues = unsafe { ours(qp) };
    mem::forget(queues.sq_lock.lock());
    // SAFETY: the lock was taken just now.
    let state = unsafe { state(qp) };
    *state = State::default();
    match queues.sendable() {
        Ok(sq) => state.batch = Some(sq.batch()),
        Err(error) => state.result = Err(error),
    }
}

/// Ends what wr_start began: returns the lock, and the batch if there was no error.
///
/// # Safety
/// The queue pair is ours and alive, and this thread is between start and end.
unsafe fn end<'a>(
    qp: *mut sys::ibv_qp_ex,
) -> (
    SpinGuard<'a, ()>,
    Result<Option<SendBatch<'static, Words>>, Errno>,
) {
    // SAFETY: as the caller says; wr_start forgot the guard.
    let (lock, state) = unsafe { (ours(qp).sq_lock.resume(), state(qp)) };
    state.finish();
    let batch = state.batch.take();
    (lock, state.result.map(|()| batch))
}

unsafe extern "C" fn wr_complete(qp: *mut sys::ibv_qp_ex) -> c_int {
    // SAFETY: objects are ours and alive; the end of what wr_start began.
    let (lock, batch) = unsafe { end(qp) };
    let result = batch.map(|batch| batch.is_some_and(SendBatch::commit));
    drop(lock);
    status(result.map(|posted| {
        if posted {
            // SAFETY: objects are ours and alive.
            unsafe { ours(qp) }.ring();
        }
    }))
}

unsafe extern "C" fn wr_abort(qp: *mut sys::ibv_qp_ex) {
    // SAFETY: objects are ours and alive; the end of what wr_start began.
    let (lock, batch) = unsafe { end(qp) };
    // The batch first: it takes back its entries.
    drop(batch);
    drop(lock);
}

/// The start of an operation, with the id and the flags that the application set.
///
/// # Safety
/// The queue pair is ours and alive.
#[inline(always)]
unsafe fn head(qp: *mut sys::ibv_qp_ex, opcode: u8) -> SendWqe {
    const FLAGS: u8 = send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED;
    // SAFETY: as the caller says; the two fields are the application's.
    unsafe {
        SendWqe {
            opcode,
            wr_id: (*qp).wr_id,
            flags: (*qp).wr_flags as u8 & FLAGS,
            ..SendWqe::default()
        }
    }
}

/// Begins an operation.
///
/// # Safety
/// The queue pair is ours and alive, and this thread is between start and end.
#[inline(always)]
unsafe fn begin(qp: *mut sys::ibv_qp_ex, wqe: SendWqe) {
    // SAFETY: as the caller says.
    let (kind, state) = unsafe { (ours(qp).kind(), state(qp)) };
    match kind {
        Kind::Connected => state.begin(Wqe::Connected(wqe), true),
        Kind::Xrc => {
            // What stays here has no destination.
            let local = wqe.opcode == wr_opcode::LOCAL_INV;
            state.begin(Wqe::Connected(wqe), local);
        }
        Kind::Datagram | Kind::Reliable => {
            let to = UdWqe {
                opcode: wqe.opcode,
                flags: wqe.flags,
                imm: wqe.imm,
                wr_id: wqe.wr_id,
                ..UdWqe::default()
            };
            let wqe = if kind == Kind::Datagram {
                Wqe::Datagram(to)
            } else {
                let range = SrdRange {
                    remote_addr: wqe.remote_addr,
                    rkey: wqe.rkey,
                    reserved: 0,
                };
                Wqe::Reliable(SrdWqe { to, range })
            };
            state.begin(wqe, false);
        }
    }
}

macro_rules! operations {
    ($($name:ident($($arg:ident: $t:ty),*) => $opcode:ident { $($field:ident: $value:expr),* };)*) => {$(
        unsafe extern "C" fn $name(qp: *mut sys::ibv_qp_ex $(, $arg: $t)*) {
            // SAFETY: objects are ours and alive; between start and end.
            unsafe {
                let wqe = SendWqe {
                    $($field: $value,)*
                    ..head(qp, wr_opcode::$opcode)
                };
                begin(qp, wqe);
            }
        }
    )*};
}
operations! {
    wr_send() => SEND {};
    wr_send_imm(data: u32) => SEND_WITH_IMM { imm: imm(data) };
    wr_rdma_write(key: u32, addr: u64) => RDMA_WRITE { rkey: key, remote_addr: addr };
    wr_rdma_write_imm(key: u32, addr: u64, data: u32) => RDMA_WRITE_WITH_IMM { rkey: key, remote_addr: addr, imm: imm(data) };
    wr_rdma_read(key: u32, addr: u64) => RDMA_READ { rkey: key, remote_addr: addr };
    wr_send_inv(key: u32) => SEND_WITH_INV { imm: key };
    wr_local_inv(key: u32) => LOCAL_INV { imm: key };
    wr_atomic_cmp_swp(key: u32, addr: u64, compare: u64, swap: u64) =>
        ATOMIC_CMP_AND_SWP { rkey: key, remote_addr: addr, operand0: compare, operand1: swap };
    wr_atomic_fetch_add(key: u32, addr: u64, add: u64) =>
        ATOMIC_FETCH_AND_ADD { rkey: key, remote_addr: addr, operand0: add };
    wr_flush(key: u32, addr: u64, length: usize, placement: u8, level: u8) =>
        FLUSH { rkey: key, remote_addr: addr, operand0: length as u64,
            operand1: u64::from(placement) | u64::from(level) << 8 };
}

unsafe extern "C" fn wr_atomic_write(
    qp: *mut sys::ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    data: *const c_void,
) {
    // SAFETY: objects are ours and alive; between start and end. The data are the application's.
    unsafe {
        let wqe = SendWqe {
            rkey,
            remote_addr,
            ..head(qp, wr_opcode::ATOMIC_WRITE)
        };
        let data = data
            .cast::<[u8; ATOMIC_WRITE_SIZE as usize]>()
            .read_unaligned();
        let addressed = ours(qp).kind() == Kind::Connected;
        state(qp).begin(Wqe::AtomicWrite(wqe, data), addressed);
    }
}

/// Begins a masked atomic operation.
///
/// # Safety
/// The queue pair is ours and alive, and this thread is between start and end.
pub unsafe fn masked(
    qp: *mut sys::ibv_qp_ex,
    opcode: u8,
    rkey: u32,
    remote_addr: u64,
    operands: [u64; 2],
    masks: MaskedOperands,
) {
    // SAFETY: as the caller says.
    unsafe {
        let (queues, state) = (ours(qp), state(qp));
        if !queues.allows(opcode.into()) {
            state.note(Err(EINVAL));
            return;
        }
        let [operand0, operand1] = operands;
        let wqe = SendWqe {
            rkey,
            remote_addr,
            operand0,
            operand1,
            ..head(qp, opcode)
        };
        state.begin(Wqe::Masked(wqe, masks), queues.kind() == Kind::Connected);
    }
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut sys::ibv_qp_ex,
    mw: *mut sys::ibv_mw,
    rkey: u32,
    info: *const sys::ibv_mw_bind_info,
) {
    // SAFETY: objects are ours and alive; between start and end.
    unsafe {
        let wqe = Wqe::Bind(head(qp, wr_opcode::BIND_MW), qp::bind(mw, rkey, &*info));
        state(qp).begin(wqe, true);
    }
}

unsafe extern "C" fn wr_set_ud_addr(
    qp: *mut sys::ibv_qp_ex,
    ah: *mut sys::ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: objects are ours and alive; between start and end.
    let (address, state) = unsafe { (ah::address(ah), state(qp)) };
    state.address(|wqe| {
        if let Wqe::Datagram(wqe) | Wqe::Reliable(SrdWqe { to: wqe, .. }) = wqe {
            *wqe = UdWqe {
                opcode: wqe.opcode,
                flags: wqe.flags,
                imm: wqe.imm,
                wr_id: wqe.wr_id,
                remote_qpn,
                remote_qkey,
                ..address
            };
        }
    });
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut sys::ibv_qp_ex, srqn: u32) {
    // SAFETY: objects are ours and alive; between start and end.
    unsafe { state(qp) }.address(|wqe| {
        if let Wqe::Connected(wqe) | Wqe::AtomicWrite(wqe, _) | Wqe::Masked(wqe, _) = wqe {
            wqe.srqn = srqn;
        }
    });
}

unsafe extern "C" fn wr_set_sge(qp: *mut sys::ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: objects are ours and alive; between start and end.
    unsafe { state(qp) }.sges([Sge { addr, length, lkey }]);
}

unsafe extern "C" fn wr_set_sge_list(
    qp: *mut sys::ibv_qp_ex,
    count: usize,
    list: *const sys::ibv_sge,
) {
    let sges = (0..count).map(|i| {
        // SAFETY: the application's list has so many entries.
        let sge = unsafe { &*list.add(i) };
        Sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey,
        }
    });
    // SAFETY: objects are ours and alive; between start and end.
    unsafe { state(qp) }.sges(sges);
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut sys::ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: objects are ours and alive; between start and end. The data are the application's.
    unsafe { state(qp).inline([bytes(addr.cast(), length)]) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut sys::ibv_qp_ex,
    count: usize,
    list: *const sys::ibv_data_buf,
) {
    let parts = (0..count).map(|i| {
        // SAFETY: the application's list has so many entries, and the data are where they say.
        unsafe {
            let part = &*list.add(i);
            bytes(part.addr.cast(), part.length)
        }
    });
    // SAFETY: objects are ours and alive; between start and end.
    unsafe { state(qp) }.inline(parts);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;
    use virtio_rdma_driver_core::buffer::{QpCaps, QpLayout};
    use virtio_rdma_driver_core::SendQueue;

    /// A send queue for masked atomic operations, and a batch of it.
    struct Posting {
        words: Words,
        offset: usize,
        state: State,
    }

    impl Posting {
        fn new() -> Self {
            let caps = QpCaps {
                max_send_wr: 4,
                max_send_sge: 3,
                max_inline: 32,
                ..QpCaps::default()
            };
            let layout = QpLayout::with_masked_atomics(&caps).unwrap();
            let words = Words::leaked(layout.size);
            let queue = SendQueue::new(words, &layout.sq, 3, 32).unwrap();
            let queue: &'static SendQueue<Words> = Box::leak(Box::new(queue));
            Self {
                words,
                offset: layout.sq.offset as usize,
                state: State {
                    batch: Some(queue.batch()),
                    ..State::default()
                },
            }
        }

        fn masked(&mut self, addressed: bool) {
            let wqe = SendWqe {
                opcode: wr_opcode::MASKED_ATOMIC_CMP_AND_SWP,
                wr_id: 7,
                operand0: 1,
                operand1: 2,
                ..SendWqe::default()
            };
            let masks = MaskedOperands { mask0: 3, mask1: 4 };
            self.state.begin(Wqe::Masked(wqe, masks), addressed);
        }

        /// Posts; returns the bytes of the first entry.
        fn complete(mut self) -> Result<Vec<u8>, Errno> {
            self.state.finish();
            self.state.result?;
            assert!(self.state.batch.take().unwrap().commit());
            let entry = self.words[self.offset / 8..][..16].iter();
            Ok(entry
                .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
                .collect())
        }
    }

    const SGE: Sge = Sge {
        addr: 0x1000,
        length: 8,
        lkey: 9,
    };

    fn assert_posted(entry: &[u8], srqn: u32) {
        let wqe = SendWqe::from_bytes(entry[..48].try_into().unwrap());
        assert_eq!(wqe.opcode, wr_opcode::MASKED_ATOMIC_CMP_AND_SWP);
        assert_eq!((wqe.wr_id, wqe.count, wqe.srqn), (7, 1, srqn));
        assert_eq!((wqe.operand0, wqe.operand1), (1, 2));
        assert_eq!(entry[48..64], SGE.to_bytes());
        assert_eq!(
            entry[64..80],
            MaskedOperands { mask0: 3, mask1: 4 }.to_bytes()
        );
    }

    #[test]
    fn masked_atomics_have_their_masks_in_the_entry() {
        let mut posting = Posting::new();
        posting.masked(true);
        posting.state.sges([SGE]);
        assert_posted(&posting.complete().unwrap(), 0);
        // XRC: the shared receive queue may be named before the data or after.
        let name = |wqe: &mut Wqe| match wqe {
            Wqe::Masked(wqe, _) => wqe.srqn = 5,
            other => panic!("{other:?}"),
        };
        for data_first in [false, true] {
            let mut posting = Posting::new();
            posting.masked(false);
            if data_first {
                posting.state.sges([SGE]);
                posting.state.address(name);
            } else {
                posting.state.address(name);
                posting.state.sges([SGE]);
            }
            assert_posted(&posting.complete().unwrap(), 5);
        }
    }

    #[test]
    fn what_masked_atomics_cannot_have_is_refused() {
        let refused = |wrong: fn(&mut State)| {
            let mut posting = Posting::new();
            posting.masked(true);
            wrong(&mut posting.state);
            assert_eq!(posting.complete(), Err(EINVAL));
        };
        refused(|state| state.sges([SGE; 2]));
        refused(|state| state.inline([&[0u8; 8][..]]));
        let mut posting = Posting::new();
        posting.masked(false);
        posting.state.sges([SGE]);
        assert_eq!(posting.complete(), Err(EINVAL));
    }
}
