// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs, and posting to them.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::slice;
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{CreateQpRequest, CreateQpResponse};
use virtio_rdma_driver_core::buffer::{QpCaps, QpLayout};
use virtio_rdma_driver_core::{Doorbell, RecvQueue, SendBatch, SendQueue};
use virtio_rdma_spec::ring::{Cqe, SendWqe, Sge};
use virtio_rdma_spec::verbs::{send_flag, wc_opcode, wr_opcode};

use super::buffer::{Mapping, Notify, Words};
use super::lock::SpinLock;
use super::{context, cq, object, status, sys, wr, zeroed, Errno, With, EINVAL, EOPNOTSUPP};

// The numbers of the specification are those of verbs: work requests need no translation.
const _: () = {
    assert!(wr_opcode::RDMA_WRITE as u32 == sys::IBV_WR_RDMA_WRITE);
    assert!(wr_opcode::RDMA_WRITE_WITH_IMM as u32 == sys::IBV_WR_RDMA_WRITE_WITH_IMM);
    assert!(wr_opcode::SEND as u32 == sys::IBV_WR_SEND);
    assert!(wr_opcode::SEND_WITH_IMM as u32 == sys::IBV_WR_SEND_WITH_IMM);
    assert!(wr_opcode::RDMA_READ as u32 == sys::IBV_WR_RDMA_READ);
    assert!(wr_opcode::ATOMIC_CMP_AND_SWP as u32 == sys::IBV_WR_ATOMIC_CMP_AND_SWP);
    assert!(wr_opcode::ATOMIC_FETCH_AND_ADD as u32 == sys::IBV_WR_ATOMIC_FETCH_AND_ADD);
    assert!(send_flag::FENCE as u32 == sys::IBV_SEND_FENCE);
    assert!(send_flag::SIGNALED as u32 == sys::IBV_SEND_SIGNALED);
    assert!(send_flag::SOLICITED as u32 == sys::IBV_SEND_SOLICITED);
    assert!(send_flag::INLINE as u32 == sys::IBV_SEND_INLINE);
};

/// A queue pair: the part that libibverbs knows, and ours.
#[repr(C)]
pub struct Qp {
    base: sys::verbs_qp,
    queues: Arc<Queues>,
    /// What `ibv_wr_*` is at; belongs to who holds the lock of the send queue.
    pub wr: UnsafeCell<wr::State>,
}

/// The queues of a queue pair, shared with the completion queues, which free their entries.
#[derive(Debug)]
pub struct Queues {
    pub sq: Option<SendQueue<Words>>,
    pub sq_lock: SpinLock<()>,
    rq: Option<RecvQueue<Words>>,
    rq_lock: SpinLock<()>,
    /// The state that the application moved the queue pair to.
    state: AtomicU32,
    doorbell: Doorbell<Words>,
    notify: Notify,
    /// The number that completions name.
    qpn: u32,
    // The memory of all that, so after it.
    _buffer: Mapping,
    _context: Arc<context::Shared>,
}

impl Queues {
    /// Frees the queue entry that a completion reports.
    #[inline(always)]
    pub fn complete(&self, cqe: &Cqe) {
        if cqe.opcode & wc_opcode::RECV != 0 {
            if let Some(rq) = &self.rq {
                rq.complete(cqe.wqe_index);
            }
        } else if let Some(sq) = &self.sq {
            sq.complete(cqe.wqe_index);
        }
    }

    /// Tells the device that there is new work.
    #[inline(always)]
    pub fn ring(&self) {
        if self.doorbell.ring() {
            self.notify.wake();
        }
    }

    /// The send queue, if the state allows posting to it.
    #[inline(always)]
    pub fn sendable(&self) -> Result<&SendQueue<Words>, Errno> {
        match self.state.load(Ordering::Relaxed) {
            sys::IBV_QPS_RESET | sys::IBV_QPS_INIT | sys::IBV_QPS_RTR => Err(EINVAL),
            _ => self.sq.as_ref().ok_or(EINVAL),
        }
    }

    #[inline(always)]
    fn receivable(&self) -> Result<&RecvQueue<Words>, Errno> {
        match self.state.load(Ordering::Relaxed) {
            sys::IBV_QPS_RESET => Err(EINVAL),
            _ => self.rq.as_ref().ok_or(EINVAL),
        }
    }

    /// Starts over after a change to RESET.
    fn reset(&self) {
        if let Some(sq) = &self.sq {
            let _lock = self.sq_lock.lock();
            sq.reset();
        }
        if let Some(rq) = &self.rq {
            let _lock = self.rq_lock.lock();
            rq.reset();
        }
    }
}

/// Our part of a queue pair.
///
/// # Safety
/// The queue pair is ours and alive, and stays so for `'a`.
#[inline(always)]
pub unsafe fn queues<'a>(qp: *mut sys::ibv_qp) -> &'a Arc<Queues> {
    // SAFETY: the queue pair is the start of a `Qp`; the reference covers only our part, which does not change.
    unsafe { &(*qp.cast::<Qp>()).queues }
}

/// What creating a queue pair needs of its attributes, which come in two forms.
struct Request {
    context: *mut sys::ibv_context,
    send_cq: *mut sys::ibv_cq,
    recv_cq: *mut sys::ibv_cq,
    caps: sys::ibv_qp_cap,
}

type Command = With<sys::ibv_create_qp, { CreateQpRequest::SIZE }>;
type Response = With<sys::ib_uverbs_create_qp_resp, { CreateQpResponse::SIZE }>;

/// Creates a queue pair; `command` has the kernel create it.
///
/// # Safety
/// The objects of the request are ours and alive.
unsafe fn create(
    request: &Request,
    command: impl FnOnce(&mut sys::verbs_qp, &mut Command, &mut Response) -> c_int,
) -> Result<*mut Qp, Errno> {
    // SAFETY: as the caller says.
    let shared = unsafe { context::shared(request.context) };
    let limits = shared.limits();
    let caps = QpCaps {
        max_send_wr: request.caps.max_send_wr,
        max_recv_wr: request.caps.max_recv_wr,
        max_send_sge: request.caps.max_send_sge,
        max_recv_sge: request.caps.max_recv_sge,
        max_inline: request.caps.max_inline_data,
    };
    if caps.max_send_wr > limits.max_qp_wr
        || caps.max_recv_wr > limits.max_qp_wr
        || caps.max_send_sge > limits.max_sge
        || caps.max_recv_sge > limits.max_sge
        || caps.max_inline > limits.max_inline
        || request.send_cq.is_null()
        || request.recv_cq.is_null()
    {
        return Err(EINVAL);
    }
    let layout = QpLayout::new(&caps).ok_or(EINVAL)?;
    let buffer = Mapping::anonymous(layout.size)?;
    // SAFETY: writable memory, which `Queues` keeps as long as the queues.
    let words = unsafe { Words::new(&buffer) };
    let sq = (layout.sq.entries > 0)
        .then(|| SendQueue::new(words, &layout.sq, caps.max_send_sge, caps.max_inline));
    let rq = (layout.rq.entries > 0).then(|| RecvQueue::new(words, &layout.rq, caps.max_recv_sge));
    let (sq, rq) = (sq.transpose()?, rq.transpose()?);

    let driver = CreateQpRequest {
        buffer: buffer.address() as u64,
        length: buffer.length() as u64,
        sq_entries: layout.sq.entries,
        sq_stride: layout.sq.stride,
        sq_offset: layout.sq.offset,
        rq_entries: layout.rq.entries,
        rq_stride: layout.rq.stride,
        rq_offset: layout.rq.offset,
        reserved: 0,
    };
    let mut cmd = With::new(driver.to_bytes());
    let mut response = With::new([0; CreateQpResponse::SIZE]);
    // libibverbs initializes a mutex and a condition in it: it stays where it is.
    let mut base: Box<core::mem::MaybeUninit<Qp>> = Box::new_uninit();
    let qp = base.as_mut_ptr();
    // SAFETY: the place of the first field, which all zero is a value of.
    let base_field = unsafe {
        let field = &raw mut (*qp).base;
        field.write(zeroed());
        &mut *field
    };
    Errno::check(command(base_field, &mut cmd, &mut response))?;
    let created = CreateQpResponse::from_bytes(&response.driver);
    // SAFETY: `Queues` keeps the context.
    let doorbell = unsafe { shared.doorbell(created.doorbell_queue, created.slot) };
    let (doorbell, notify) = match doorbell {
        Ok(doorbell) => doorbell,
        Err(error) => {
            // SAFETY: just created; nobody knows it yet.
            unsafe { sys::ibv_cmd_destroy_qp(qp.cast()) };
            return Err(error);
        }
    };
    let queues = Arc::new(Queues {
        sq,
        sq_lock: SpinLock::default(),
        rq,
        rq_lock: SpinLock::default(),
        state: AtomicU32::new(sys::IBV_QPS_RESET),
        doorbell,
        notify,
        qpn: created.qpn,
        _buffer: buffer,
        _context: shared,
    });
    // SAFETY: the completion queues are ours and alive. With the two fields written the value is complete.
    unsafe {
        cq::attach(request.send_cq, created.qpn, &queues);
        cq::attach(request.recv_cq, created.qpn, &queues);
        (&raw mut (*qp).queues).write(queues);
        (&raw mut (*qp).wr).write(UnsafeCell::default());
        Ok(Box::into_raw(base.assume_init()))
    }
}

pub unsafe extern "C" fn create_qp(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe {
        if !(*attr).srq.is_null() {
            return object(Err(EOPNOTSUPP));
        }
        let request = Request {
            context: (*pd).context,
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            caps: (*attr).cap,
        };
        let command = |base: &mut sys::verbs_qp, cmd: &mut Command, response: &mut Response| {
            let (cmd_size, response_size) = (size_of_val(cmd), size_of_val(response));
            sys::ibv_cmd_create_qp(
                pd,
                (&raw mut *base).cast(),
                attr,
                (&raw mut *cmd).cast(),
                cmd_size,
                (&raw mut *response).cast(),
                response_size,
            )
        };
        object(create(&request, command)).cast()
    }
}

pub unsafe extern "C" fn create_qp_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_qp_init_attr_ex,
) -> *mut sys::ibv_qp {
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe {
        let supported = sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let with_ops = (*attr).comp_mask & sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        if (*attr).comp_mask & !supported != 0
            || !(*attr).srq.is_null()
            || (with_ops && !wr::supports((*attr).send_ops_flags))
        {
            return object(Err(EOPNOTSUPP));
        }
        let request = Request {
            context,
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            caps: (*attr).cap,
        };
        let command = |base: &mut sys::verbs_qp, cmd: &mut Command, response: &mut Response| {
            let (cmd_size, response_size) = (size_of_val(cmd), size_of_val(response));
            sys::ibv_cmd_create_qp_ex(
                context,
                base,
                attr,
                (&raw mut *cmd).cast(),
                cmd_size,
                (&raw mut *response).cast(),
                response_size,
            )
        };
        let qp = object(create(&request, command));
        if !qp.is_null() && with_ops {
            wr::set_ops(&mut (*qp).base.__bindgen_anon_1.qp_ex);
            (*qp).base.comp_mask |= sys::VERBS_QP_EX;
        }
        qp.cast()
    }
}

pub unsafe extern "C" fn destroy_qp(qp: *mut sys::ibv_qp) -> c_int {
    // SAFETY: objects are ours and alive; made by `create`. The kernel lets go of the buffer before it returns.
    unsafe {
        let (send_cq, recv_cq, qpn) = ((*qp).send_cq, (*qp).recv_cq, queues(qp).qpn);
        let rc = sys::ibv_cmd_destroy_qp(qp);
        if rc == 0 {
            cq::detach(send_cq, qpn);
            cq::detach(recv_cq, qpn);
            drop(Box::from_raw(qp.cast::<Qp>()));
        }
        rc
    }
}

pub unsafe extern "C" fn modify_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    attr_mask: c_int,
) -> c_int {
    let mut cmd: sys::ibv_modify_qp = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe {
        let rc = sys::ibv_cmd_modify_qp(qp, attr, attr_mask, &mut cmd, size);
        if rc != 0 || attr_mask & sys::IBV_QP_STATE as c_int == 0 {
            return rc;
        }
        let queues = queues(qp);
        let state = (*attr).qp_state;
        if state == sys::IBV_QPS_RESET {
            queues.state.store(state, Ordering::Relaxed);
            cq::forget((*qp).send_cq, queues.qpn);
            cq::forget((*qp).recv_cq, queues.qpn);
            queues.reset();
        }
        queues.state.store(state, Ordering::Relaxed);
    }
    0
}

pub unsafe extern "C" fn query_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    attr_mask: c_int,
    init_attr: *mut sys::ibv_qp_init_attr,
) -> c_int {
    let mut cmd: sys::ibv_query_qp = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe { sys::ibv_cmd_query_qp(qp, attr, attr_mask, init_attr, &mut cmd, size) }
}

fn sge(sge: &sys::ibv_sge) -> Sge {
    Sge {
        addr: sge.addr,
        length: sge.length,
        lkey: sge.lkey,
    }
}

/// A list of a work request; one that cannot be is taken for too long.
///
/// # Safety
/// The list has so many entries, unless the number is negative.
#[inline(always)]
unsafe fn list<'a, T>(first: *mut T, count: c_int) -> Result<&'a [T], Errno> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: as the caller says.
        Ok(count) if !first.is_null() => Ok(unsafe { slice::from_raw_parts(first, count) }),
        _ => Err(EINVAL),
    }
}

/// The entry for a work request, without its data.
///
/// # Safety
/// The work request is initialized as its opcode demands.
#[inline(always)]
unsafe fn send_wqe(wr: &sys::ibv_send_wr) -> Result<SendWqe, Errno> {
    const FLAGS: u8 =
        send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;
    let mut wqe = SendWqe {
        opcode: wr.opcode as u8,
        flags: wr.send_flags as u8 & FLAGS,
        wr_id: wr.wr_id,
        ..SendWqe::default()
    };
    // SAFETY: the fields that the opcode demands, all of them integers.
    unsafe {
        match wr.opcode {
            sys::IBV_WR_SEND => {}
            sys::IBV_WR_SEND_WITH_IMM => {
                wqe.imm = imm(wr.__bindgen_anon_1.imm_data);
            }
            sys::IBV_WR_RDMA_WRITE | sys::IBV_WR_RDMA_READ => {
                wqe.remote_addr = wr.wr.rdma.remote_addr;
                wqe.rkey = wr.wr.rdma.rkey;
            }
            sys::IBV_WR_RDMA_WRITE_WITH_IMM => {
                wqe.remote_addr = wr.wr.rdma.remote_addr;
                wqe.rkey = wr.wr.rdma.rkey;
                wqe.imm = imm(wr.__bindgen_anon_1.imm_data);
            }
            sys::IBV_WR_ATOMIC_CMP_AND_SWP | sys::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                wqe.remote_addr = wr.wr.atomic.remote_addr;
                wqe.rkey = wr.wr.atomic.rkey;
                wqe.operand0 = wr.wr.atomic.compare_add;
                wqe.operand1 = wr.wr.atomic.swap;
            }
            _ => return Err(EINVAL),
        }
    }
    Ok(wqe)
}

/// Immediate data are four octets, whatever number they make.
pub fn imm(data: u32) -> u32 {
    u32::from_le_bytes(data.to_ne_bytes())
}

/// Opcodes whose data may be in the entry.
pub fn takes_inline(opcode: u8) -> bool {
    matches!(
        opcode,
        wr_opcode::SEND
            | wr_opcode::SEND_WITH_IMM
            | wr_opcode::RDMA_WRITE
            | wr_opcode::RDMA_WRITE_WITH_IMM
    )
}

/// Memory of the application.
///
/// # Safety
/// The memory is there, unless `length` is zero.
#[inline(always)]
pub unsafe fn bytes<'a>(addr: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { slice::from_raw_parts(addr, length) }
}

/// # Safety
/// The work request is initialized as its opcode and flags demand.
#[inline(always)]
unsafe fn push_send(batch: &mut SendBatch<'_, Words>, wr: &sys::ibv_send_wr) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    let (wqe, sges) = unsafe { (send_wqe(wr)?, list(wr.sg_list, wr.num_sge)?) };
    if wqe.flags & send_flag::INLINE == 0 {
        batch.push(&wqe, sges.iter().map(sge))?;
    } else if takes_inline(wqe.opcode) {
        let parts = sges
            .iter()
            // SAFETY: inline data are where the entries say.
            .map(|sge| unsafe { bytes(sge.addr as *const u8, sge.length as usize) });
        batch.push_inline(&wqe, parts)?;
    } else {
        return Err(EINVAL);
    }
    Ok(())
}

pub unsafe extern "C" fn post_send(
    qp: *mut sys::ibv_qp,
    mut wr: *mut sys::ibv_send_wr,
    bad_wr: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let queues = unsafe { queues(qp) };
    let mut result = Ok(());
    match queues.sendable() {
        Ok(sq) => {
            let lock = queues.sq_lock.lock();
            let mut batch = sq.batch();
            // SAFETY: a list of work requests that ends with null.
            while let Some(request) = unsafe { wr.as_ref() } {
                // SAFETY: the application initialized it.
                result = unsafe { push_send(&mut batch, request) };
                if result.is_err() {
                    break;
                }
                wr = request.next;
            }
            let posted = batch.commit();
            drop(lock);
            if posted {
                queues.ring();
            }
        }
        Err(error) => result = Err(error),
    }
    if result.is_err() {
        // SAFETY: the application's variable.
        unsafe { *bad_wr = wr };
    }
    status(result)
}

pub unsafe extern "C" fn post_recv(
    qp: *mut sys::ibv_qp,
    mut wr: *mut sys::ibv_recv_wr,
    bad_wr: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let queues = unsafe { queues(qp) };
    let mut result = Ok(());
    match queues.receivable() {
        Ok(rq) => {
            let lock = queues.rq_lock.lock();
            let mut batch = rq.batch();
            // SAFETY: a list of work requests that ends with null.
            while let Some(request) = unsafe { wr.as_ref() } {
                // SAFETY: the application initialized it.
                result = unsafe { list(request.sg_list, request.num_sge) }
                    .and_then(|sges| Ok(batch.push(request.wr_id, sges.iter().map(sge))?));
                if result.is_err() {
                    break;
                }
                wr = request.next;
            }
            let waited_for = batch.commit();
            drop(lock);
            if waited_for {
                queues.ring();
            }
        }
        Err(error) => result = Err(error),
    }
    if result.is_err() {
        // SAFETY: the application's variable.
        unsafe { *bad_wr = wr };
    }
    status(result)
}
