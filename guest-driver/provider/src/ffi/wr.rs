// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Posting by `ibv_wr_*`: work requests between a start and an end, each an operation and then its data.

use core::ffi::{c_int, c_void};
use core::mem;

use virtio_rdma_driver_core::SendBatch;
use virtio_rdma_spec::ring::{SendWqe, Sge};
use virtio_rdma_spec::verbs::{send_flag, wr_opcode};

use super::buffer::Words;
use super::lock::SpinGuard;
use super::qp::{bytes, imm, queues, takes_inline, Qp, Queues};
use super::{status, sys, Errno, EINVAL};

/// Operations that there are; their flags are `1 <<` opcode of the work request.
const SUPPORTED: u32 = sys::IBV_QP_EX_WITH_RDMA_WRITE
    | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | sys::IBV_QP_EX_WITH_SEND
    | sys::IBV_QP_EX_WITH_SEND_WITH_IMM
    | sys::IBV_QP_EX_WITH_RDMA_READ;

/// Whether all of these operations are supported.
pub fn supports(send_ops_flags: u64) -> bool {
    send_ops_flags & !u64::from(SUPPORTED) == 0
}

/// Between start and end. Belongs to who holds the lock of the send queue.
#[derive(Debug)]
pub struct State {
    /// Null only between batches, or if there is no posting in this state of the queue pair.
    batch: Option<SendBatch<'static, Words>>,
    /// The operation whose data is to come.
    pending: Option<SendWqe>,
    result: Result<(), Errno>,
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

impl State {
    /// Adds the pending operation, with data that `push` brings. The first error stays.
    fn push(
        &mut self,
        push: impl FnOnce(&mut SendBatch<'static, Words>, &SendWqe) -> Result<(), Errno>,
    ) {
        if let (Some(batch), Some(wqe)) = (&mut self.batch, self.pending.take()) {
            if self.result.is_ok() {
                self.result = push(batch, &wqe);
            }
        }
    }

    fn push_sges(&mut self, sges: impl IntoIterator<Item = Sge>) {
        self.push(|batch, wqe| Ok(batch.push(wqe, sges)?));
    }

    fn push_inline<'d>(&mut self, parts: impl IntoIterator<Item = &'d [u8]>) {
        self.push(|batch, wqe| {
            if !takes_inline(wqe.opcode) {
                return Err(EINVAL);
            }
            Ok(batch.push_inline(wqe, parts)?)
        });
    }

    /// Begins an operation. One before it that got no data has none.
    fn begin(&mut self, wqe: SendWqe) {
        self.push_sges([]);
        self.pending = Some(wqe);
    }
}

/// Sets the operations of a queue pair.
pub fn set_ops(qp: &mut sys::ibv_qp_ex) {
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
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
/// The queue pair is ours and alive, the lock of its send queue is held by this thread, and no other reference to the
/// state is in use.
unsafe fn state<'a>(qp: *mut sys::ibv_qp_ex) -> &'a mut State {
    // SAFETY: as the caller says.
    unsafe { &mut *(*qp.cast::<Qp>()).wr.get() }
}

unsafe extern "C" fn wr_start(qp: *mut sys::ibv_qp_ex) {
    // SAFETY: objects are ours and alive. A queue pair is not destroyed between start and end: 'static is until then.
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
    state.push_sges([]);
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

/// Begins an operation with the id and the flags that the application set.
///
/// # Safety
/// The queue pair is ours and alive, and this thread is between start and end.
unsafe fn begin(qp: *mut sys::ibv_qp_ex, wqe: SendWqe) {
    const FLAGS: u8 = send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED;
    // SAFETY: as the caller says; the two fields are the application's.
    unsafe {
        state(qp).begin(SendWqe {
            wr_id: (*qp).wr_id,
            flags: (*qp).wr_flags as u8 & FLAGS,
            ..wqe
        });
    }
}

macro_rules! operations {
    ($($name:ident($($arg:ident: $t:ty),*) => $opcode:ident { $($field:ident: $value:expr),* };)*) => {$(
        unsafe extern "C" fn $name(qp: *mut sys::ibv_qp_ex $(, $arg: $t)*) {
            let wqe = SendWqe {
                opcode: wr_opcode::$opcode,
                $($field: $value,)*
                ..SendWqe::default()
            };
            // SAFETY: objects are ours and alive; between start and end.
            unsafe { begin(qp, wqe) }
        }
    )*};
}
operations! {
    wr_send() => SEND {};
    wr_send_imm(data: u32) => SEND_WITH_IMM { imm: imm(data) };
    wr_rdma_write(key: u32, addr: u64) => RDMA_WRITE { rkey: key, remote_addr: addr };
    wr_rdma_write_imm(key: u32, addr: u64, data: u32) => RDMA_WRITE_WITH_IMM { rkey: key, remote_addr: addr, imm: imm(data) };
    wr_rdma_read(key: u32, addr: u64) => RDMA_READ { rkey: key, remote_addr: addr };
}

unsafe extern "C" fn wr_set_sge(qp: *mut sys::ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: objects are ours and alive; between start and end.
    unsafe { state(qp) }.push_sges([Sge { addr, length, lkey }]);
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
    unsafe { state(qp) }.push_sges(sges);
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut sys::ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: objects are ours and alive; between start and end. The data are the application's.
    unsafe { state(qp).push_inline([bytes(addr.cast(), length)]) };
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
    unsafe { state(qp) }.push_inline(parts);
}
