// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs, and posting to them.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, Ordering};
use core::{ptr, slice};
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{CreateQpRequest, CreateQpResponse};
use virtio_rdma_driver_core::buffer::{QpCaps, QpLayout};
use virtio_rdma_driver_core::{Doorbell, RecvQueue, SendBatch, SendEntry, SendQueue, SrdWqe};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::facts::{Opcode, QpType, OPCODES};
use virtio_rdma_spec::ring::{BindMw, Cqe, SendWqe, Sge, UdWqe};
use virtio_rdma_spec::verbs::{access, qp_type, send_flag, wc_opcode, wr_opcode};

use super::buffer::{Mapping, Notify, Resource, Words};
use super::lock::SpinLock;
use super::{
    ah, context, cq, object, pd, status, sys, wr, zeroed, Errno, With, EINVAL, EOPNOTSUPP,
};

// The numbers of the specification are those of verbs: work requests need no translation.
const _: () = {
    assert!(wr_opcode::RDMA_WRITE as u32 == sys::IBV_WR_RDMA_WRITE);
    assert!(wr_opcode::RDMA_WRITE_WITH_IMM as u32 == sys::IBV_WR_RDMA_WRITE_WITH_IMM);
    assert!(wr_opcode::SEND as u32 == sys::IBV_WR_SEND);
    assert!(wr_opcode::SEND_WITH_IMM as u32 == sys::IBV_WR_SEND_WITH_IMM);
    assert!(wr_opcode::RDMA_READ as u32 == sys::IBV_WR_RDMA_READ);
    assert!(wr_opcode::ATOMIC_CMP_AND_SWP as u32 == sys::IBV_WR_ATOMIC_CMP_AND_SWP);
    assert!(wr_opcode::ATOMIC_FETCH_AND_ADD as u32 == sys::IBV_WR_ATOMIC_FETCH_AND_ADD);
    assert!(wr_opcode::LOCAL_INV as u32 == sys::IBV_WR_LOCAL_INV);
    assert!(wr_opcode::BIND_MW as u32 == sys::IBV_WR_BIND_MW);
    assert!(wr_opcode::SEND_WITH_INV as u32 == sys::IBV_WR_SEND_WITH_INV);
    assert!(wr_opcode::FLUSH as u32 == sys::IBV_WR_FLUSH);
    assert!(wr_opcode::ATOMIC_WRITE as u32 == sys::IBV_WR_ATOMIC_WRITE);
    assert!(access::REMOTE_WRITE == sys::IBV_ACCESS_REMOTE_WRITE);
    assert!(access::ZERO_BASED == sys::IBV_ACCESS_ZERO_BASED);
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
    /// Where it completes; null where it does not.
    cqs: [*mut sys::ibv_cq; 2],
    /// What `ibv_wr_*` is at; belongs to who holds the lock of the send queue.
    pub wr: UnsafeCell<wr::State>,
}

/// What the entries of a send queue are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RC, UC: the queue pair knows where messages go.
    Connected,
    /// UD: each work request has an address.
    Datagram,
    /// SRD: the same, with a remote range.
    Reliable,
    /// XRC: each work request names a shared receive queue.
    Xrc,
}

/// The opcodes of verbs that a type of queue pair has, on a device with these features: bits.
fn opcodes(facts: Option<&QpType>, shared: &context::Shared) -> u32 {
    let has = |of: &Opcode| {
        let any = of.features;
        let supported = any.is_empty() || any.iter().any(|feature| shared.has(*feature));
        supported && facts.is_some_and(|facts| of.is_for(facts.qp_type))
    };
    let opcodes = wr::opcodes().filter(|opcode| Opcode::of(*opcode).is_some_and(has));
    opcodes.fold(0, |bits, opcode| bits | 1 << opcode)
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
    /// None for an XRC target.
    doorbell: Option<(Doorbell<Words>, Notify)>,
    kind: Kind,
    /// Opcodes of send work requests that may be posted: bits.
    opcodes: u32,
    /// The number that completions name.
    qpn: u32,
    // The memory of all that, so after it.
    _buffer: Option<Mapping>,
    context: Arc<context::Shared>,
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

    /// Of a lost device: the completion of the work request that is to be flushed next, with its
    /// queue entry freed.
    pub fn flush(&self, roles: cq::Roles) -> Option<Cqe> {
        let send = |queues: &Self| queues.sq.as_ref()?.flush_next(queues.qpn);
        let receive = |queues: &Self| queues.rq.as_ref()?.flush_next(queues.qpn);
        let cqe = None
            .or_else(|| roles.receives.then(|| receive(self))?)
            .or_else(|| roles.sends.then(|| send(self))?)?;
        self.complete(&cqe);
        Some(cqe)
    }

    /// Tells the device that there is new work.
    #[inline(always)]
    pub fn ring(&self) {
        if let Some((doorbell, notify)) = &self.doorbell {
            if doorbell.ring() {
                notify.wake();
            }
        }
    }

    /// The send queue, if the state allows posting to it.
    #[inline(always)]
    pub fn sendable(&self) -> Result<&SendQueue<Words>, Errno> {
        if may_send(self.state.load(Ordering::Relaxed)) {
            self.sq.as_ref().ok_or(EINVAL)
        } else {
            Err(EINVAL)
        }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether work requests with this opcode may be posted.
    #[inline(always)]
    pub fn allows(&self, opcode: u32) -> bool {
        self.opcodes.checked_shr(opcode).unwrap_or(0) & 1 != 0
    }

    #[inline(always)]
    fn receivable(&self) -> Result<&RecvQueue<Words>, Errno> {
        if may_receive(self.state.load(Ordering::Relaxed)) {
            self.rq.as_ref().ok_or(EINVAL)
        } else {
            Err(EINVAL)
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

#[cfg(test)]
impl Queues {
    /// The queues of a connected queue pair that is ready to send.
    pub fn fixture(shared: &Arc<context::Shared>, caps: &QpCaps, qpn: u32) -> Self {
        let layout = QpLayout::new(caps).unwrap();
        let buffer = Mapping::fixture(layout.size);
        // SAFETY: `Queues` keeps the memory and the context.
        let (words, doorbell) = unsafe { (Words::new(&buffer), shared.doorbell(0, qpn).unwrap()) };
        let (sge, inline) = (caps.max_send_sge, caps.max_inline);
        Self {
            sq: Some(SendQueue::new(words, &layout.sq, sge, inline).unwrap()),
            sq_lock: SpinLock::new(()),
            rq: Some(RecvQueue::new(words, &layout.rq, caps.max_recv_sge).unwrap()),
            rq_lock: SpinLock::new(()),
            state: AtomicU32::new(sys::IBV_QPS_RTS),
            doorbell: Some(doorbell),
            kind: Kind::Connected,
            opcodes: u32::MAX,
            qpn,
            _buffer: Some(buffer),
            context: Arc::clone(shared),
        }
    }

    /// Posts a receive, as `post_recv`.
    pub fn receive(&self, wr_id: u64) {
        if self.receivable().unwrap().post(wr_id, []).unwrap() {
            self.ring();
        }
    }
}

/// Whether the send queue may be posted to in a state.
#[inline(always)]
fn may_send(state: sys::ibv_qp_state) -> bool {
    may_receive(state) && !matches!(state, sys::IBV_QPS_INIT | sys::IBV_QPS_RTR)
}

/// The state that says what may be posted. From INIT the device takes a queue pair of iWARP to RTS
/// when it is connected, and nobody asks us.
fn posting_state(state: sys::ibv_qp_state, iwarp: bool) -> sys::ibv_qp_state {
    match state {
        sys::IBV_QPS_INIT | sys::IBV_QPS_RTR if iwarp => sys::IBV_QPS_RTS,
        state => state,
    }
}

/// Whether the receive queue may be posted to in a state.
#[inline(always)]
fn may_receive(state: sys::ibv_qp_state) -> bool {
    state != sys::IBV_QPS_RESET
}

/// Our part of a queue pair.
///
/// # Safety
/// The queue pair is ours and alive, and stays so for `'a`.
#[inline(always)]
pub unsafe fn queues<'a>(qp: *mut sys::ibv_qp) -> &'a Arc<Queues> {
    // SAFETY: the queue pair is the start of a `Qp`; the reference covers only our part, which does
    // not change.
    unsafe { &(*qp.cast::<Qp>()).queues }
}

/// What creating a queue pair needs of its attributes, which come in two forms.
struct Request {
    context: *mut sys::ibv_context,
    pd: *mut sys::ibv_pd,
    send_cq: *mut sys::ibv_cq,
    recv_cq: *mut sys::ibv_cq,
    has_srq: bool,
    qp_type: sys::ibv_qp_type,
    caps: sys::ibv_qp_cap,
    send_ops: u64,
    /// What is wanted beyond verbs.
    beyond: Beyond,
}

/// What a queue pair may be created with beyond verbs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beyond {
    /// Masked atomic operations: opcodes as bits.
    pub masked: u32,
    /// The device's number of a type that verbs call `IBV_QPT_DRIVER`; zero: it is none.
    pub driver_qp_type: u8,
}

impl Request {
    /// What is so of its type: verbs and the device number them alike, but for the driver's own,
    /// and what iWARP has in the place of RC.
    fn facts(&self, shared: &context::Shared) -> Option<&'static QpType> {
        let own = self.qp_type == sys::IBV_QPT_DRIVER;
        let number = if own {
            self.beyond.driver_qp_type
        } else if self.qp_type == sys::IBV_QPT_RC && shared.has(feature::IWARP) {
            qp_type::IWARP
        } else {
            u8::try_from(self.qp_type).ok()?
        };
        QpType::of(number).filter(|facts| own == (facts.qp_type == qp_type::SRD))
    }

    /// The capabilities of the queues that the queue pair itself has.
    fn caps(&self) -> QpCaps {
        let send = self.qp_type != sys::IBV_QPT_XRC_RECV;
        let recv = !self.has_srq && send && self.qp_type != sys::IBV_QPT_XRC_SEND;
        let (send, recv) = (u32::from(send), u32::from(recv));
        QpCaps {
            max_send_wr: self.caps.max_send_wr * send,
            max_recv_wr: self.caps.max_recv_wr * recv,
            max_send_sge: self.caps.max_send_sge * send,
            max_recv_sge: self.caps.max_recv_sge * recv,
            max_inline: self.caps.max_inline_data * send,
        }
    }

    /// Where it completes.
    fn cqs(&self) -> Result<[*mut sys::ibv_cq; 2], Errno> {
        let cqs = match self.qp_type {
            sys::IBV_QPT_XRC_RECV => return Ok([ptr::null_mut(); 2]),
            sys::IBV_QPT_XRC_SEND => [self.send_cq, ptr::null_mut()],
            _ if self.recv_cq.is_null() => return Err(EINVAL),
            _ => [self.send_cq, self.recv_cq],
        };
        if self.send_cq.is_null() {
            return Err(EINVAL);
        }
        Ok(cqs)
    }
}

type Driver = [u8; CreateQpRequest::SIZE];
type Created = [u8; CreateQpResponse::SIZE];

/// Creates a queue pair; `command` has the kernel create it, with the number of inline bytes that
/// it is given.
///
/// # Safety
/// The objects of the request are ours and alive.
unsafe fn create(
    request: &Request,
    command: impl FnOnce(&mut sys::verbs_qp, Driver, u32) -> Result<Created, Errno>,
) -> Result<*mut Qp, Errno> {
    // SAFETY: as the caller says.
    let (shared, allocator, single) = unsafe {
        let shared = context::shared(request.context);
        let (allocator, single) = (pd::allocator(request.pd), pd::single_threaded(request.pd));
        (shared, allocator, single)
    };
    let kind = match request.qp_type {
        sys::IBV_QPT_RC | sys::IBV_QPT_UC => Kind::Connected,
        sys::IBV_QPT_UD => Kind::Datagram,
        sys::IBV_QPT_XRC_SEND | sys::IBV_QPT_XRC_RECV => Kind::Xrc,
        sys::IBV_QPT_DRIVER if request.facts(&shared).is_some() => Kind::Reliable,
        _ => return Err(EOPNOTSUPP),
    };
    let facts = request.facts(&shared);
    let opcodes = opcodes(facts, &shared);
    let reliable = facts.is_some_and(|of| of.sends && of.acknowledged && !of.datagram);
    let masked = request.beyond.masked != 0;
    if !wr::supports(request.send_ops, opcodes)
        || (masked && !(reliable && shared.has(feature::ATOMIC)))
    {
        return Err(EOPNOTSUPP);
    }
    let cqs = request.cqs()?;
    let (mut caps, limits) = (request.caps(), shared.limits());
    if caps.max_send_wr > limits.max_qp_wr
        || caps.max_recv_wr > limits.max_qp_wr
        || caps.max_send_sge > limits.max_sge
        || caps.max_recv_sge > limits.max_sge
        || caps.max_inline > limits.max_inline
    {
        return Err(EINVAL);
    }
    let layout = match kind {
        Kind::Datagram => QpLayout::datagram(&caps),
        Kind::Reliable => QpLayout::reliable_datagram(&caps),
        Kind::Connected | Kind::Xrc if masked => QpLayout::with_masked_atomics(&caps),
        Kind::Connected | Kind::Xrc => QpLayout::new(&caps),
    }
    .ok_or(EINVAL)?;
    let mut driver = CreateQpRequest::default();
    caps.max_inline = layout.max_inline(&caps, limits.max_inline);
    let (mut sq, mut rq, mut buffer) = (None, None, None);
    if request.qp_type != sys::IBV_QPT_XRC_RECV {
        let memory = Mapping::queue(layout.size, allocator.as_ref(), Resource::Qp)?;
        // SAFETY: writable memory, which `Queues` keeps as long as the queues.
        let words = unsafe { Words::new(&memory) };
        if layout.sq.entries > 0 {
            let (sge, inline) = (caps.max_send_sge, caps.max_inline);
            sq = Some(match kind {
                Kind::Datagram => SendQueue::datagram(words, &layout.sq, sge, inline),
                Kind::Reliable => SendQueue::reliable_datagram(words, &layout.sq, sge, inline),
                Kind::Connected | Kind::Xrc => SendQueue::new(words, &layout.sq, sge, inline),
            }?);
        }
        if layout.rq.entries > 0 {
            rq = Some(RecvQueue::new(words, &layout.rq, caps.max_recv_sge)?);
        }
        driver = CreateQpRequest {
            buffer: memory.address() as u64,
            length: memory.length() as u64,
            sq_entries: layout.sq.entries,
            sq_stride: layout.sq.stride,
            sq_offset: layout.sq.offset,
            rq_entries: layout.rq.entries,
            rq_stride: layout.rq.stride,
            rq_offset: layout.rq.offset,
            driver_qp_type: request.beyond.driver_qp_type.into(),
            reserved: 0,
        };
        buffer = Some(memory);
    }
    // libibverbs initializes a mutex and a condition in it: it stays where it is.
    let mut base: Box<core::mem::MaybeUninit<Qp>> = Box::new_uninit();
    let qp = base.as_mut_ptr();
    // SAFETY: the place of the first field, which all zero is a value of.
    let base_field = unsafe {
        let field = &raw mut (*qp).base;
        field.write(zeroed());
        &mut *field
    };
    let created = command(base_field, driver.to_bytes(), caps.max_inline)?;
    let created = CreateQpResponse::from_bytes(&created);
    // An XRC target is the kernel's: the module is not told of the process, and answers nothing to
    // it.
    // SAFETY: the two forms begin alike.
    let qpn = unsafe { base_field.__bindgen_anon_1.qp.qp_num };
    let mut doorbell = None;
    if buffer.is_some() {
        // SAFETY: `Queues` keeps the context.
        match unsafe { shared.doorbell(created.doorbell_queue, created.slot) } {
            Ok(found) => doorbell = Some(found),
            Err(error) => {
                // SAFETY: just created; nobody knows it yet.
                unsafe { sys::ibv_cmd_destroy_qp(qp.cast()) };
                return Err(error);
            }
        }
    }
    // SAFETY: the application says so with the thread domain.
    let [sq_lock, rq_lock] = unsafe { [pd::lock(single, ()), pd::lock(single, ())] };
    let queues = Arc::new(Queues {
        sq,
        sq_lock,
        rq,
        rq_lock,
        state: AtomicU32::new(sys::IBV_QPS_RESET),
        doorbell,
        kind,
        opcodes: opcodes | request.beyond.masked,
        qpn,
        _buffer: buffer,
        context: shared,
    });
    // SAFETY: the completion queues are ours and alive. With the three fields written the value is
    // complete.
    unsafe {
        for cq in cqs.into_iter().filter(|cq| !cq.is_null()) {
            let roles = cq::Roles {
                sends: cq == cqs[0],
                receives: cq == cqs[1],
            };
            cq::attach(cq, qpn, &queues, roles);
        }
        (&raw mut (*qp).queues).write(queues);
        (&raw mut (*qp).cqs).write(cqs);
        (&raw mut (*qp).wr).write(UnsafeCell::default());
        Ok(Box::into_raw(base.assume_init()))
    }
}

pub unsafe extern "C" fn create_qp(
    pd: *mut sys::ibv_pd,
    attr: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: objects are ours and alive, and so are the attributes; command and response are of
    // these sizes.
    unsafe {
        let request = Request {
            context: (*pd).context,
            pd,
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            has_srq: !(*attr).srq.is_null(),
            qp_type: (*attr).qp_type,
            caps: (*attr).cap,
            send_ops: 0,
            beyond: Beyond::default(),
        };
        let command = |base: &mut sys::verbs_qp, driver, max_inline| {
            (*attr).cap.max_inline_data = max_inline;
            let mut cmd = With::<sys::ibv_create_qp, _>::new(driver);
            let mut response =
                With::<sys::ib_uverbs_create_qp_resp, _>::new([0; CreateQpResponse::SIZE]);
            let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
            Errno::check(sys::ibv_cmd_create_qp(
                pd,
                ptr::from_mut(base).cast(),
                attr,
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
            ))?;
            Ok(response.driver)
        };
        object(create(&request, command)).cast()
    }
}

pub unsafe extern "C" fn create_qp_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_qp_init_attr_ex,
) -> *mut sys::ibv_qp {
    // SAFETY: as the caller says.
    unsafe { create_extended(context, attr, Beyond::default()) }
}

/// Creates a queue pair that may have more than verbs know.
///
/// # Safety
/// The context is ours and alive, and so are the attributes and what they name.
pub unsafe fn create_extended(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_qp_init_attr_ex,
    beyond: Beyond,
) -> *mut sys::ibv_qp {
    const MASK: u32 = sys::IBV_QP_INIT_ATTR_PD
        | sys::IBV_QP_INIT_ATTR_XRCD
        | sys::IBV_QP_INIT_ATTR_CREATE_FLAGS
        | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    const FLAGS: u32 = sys::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    // SAFETY: objects are ours and alive, and so are the attributes; command and response are of
    // these sizes.
    unsafe {
        let mask = (*attr).comp_mask;
        let with_ops = mask & sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        let bad_flags =
            mask & sys::IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && (*attr).create_flags & !FLAGS != 0;
        if mask & !MASK != 0 || bad_flags {
            return object(Err(EOPNOTSUPP));
        }
        if with_ops && (*attr).send_ops_flags & u64::from(sys::IBV_QP_EX_WITH_ATOMIC_WRITE) != 0 {
            // The data of the operation are in the entry.
            let inline = &mut (*attr).cap.max_inline_data;
            *inline = (*inline).max(wr::ATOMIC_WRITE_SIZE);
        }
        let has_pd = mask & sys::IBV_QP_INIT_ATTR_PD != 0;
        let request = Request {
            context,
            pd: if has_pd { (*attr).pd } else { ptr::null_mut() },
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            has_srq: !(*attr).srq.is_null(),
            qp_type: (*attr).qp_type,
            caps: (*attr).cap,
            send_ops: if with_ops { (*attr).send_ops_flags } else { 0 },
            beyond,
        };
        let command = |base: &mut sys::verbs_qp, driver, max_inline| {
            (*attr).cap.max_inline_data = max_inline;
            let mut cmd = With::<sys::ibv_create_qp_ex, _>::new(driver);
            let mut response =
                With::<sys::ib_uverbs_ex_create_qp_resp, _>::new([0; CreateQpResponse::SIZE]);
            let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
            Errno::check(sys::ibv_cmd_create_qp_ex2(
                context,
                base,
                attr,
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
                #[cfg(pabi = "65")]
                ptr::null_mut(),
            ))?;
            Ok(response.driver)
        };
        let qp = object(create(&request, command));
        if !qp.is_null() && (with_ops || beyond.masked != 0) {
            wr::set_ops(&mut (*qp).base.__bindgen_anon_1.qp_ex);
            (*qp).base.comp_mask |= sys::VERBS_QP_EX;
        }
        qp.cast()
    }
}

/// Opens an XRC target that another process may have created.
pub unsafe extern "C" fn open_qp(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_qp_open_attr,
) -> *mut sys::ibv_qp {
    let mut cmd: sys::ibv_open_qp = zeroed();
    let mut response: sys::ib_uverbs_create_qp_resp = zeroed();
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive, and so are the attributes; command and response are of
    // these sizes.
    unsafe {
        if (*attr).qp_type != sys::IBV_QPT_XRC_RECV {
            return object(Err(EINVAL));
        }
        let mut qp = Box::new(Qp {
            base: zeroed(),
            queues: Arc::new(Queues {
                sq: None,
                sq_lock: SpinLock::new(()),
                rq: None,
                rq_lock: SpinLock::new(()),
                state: AtomicU32::new(sys::IBV_QPS_RESET),
                doorbell: None,
                kind: Kind::Xrc,
                opcodes: 0,
                qpn: (*attr).qp_num,
                _buffer: None,
                context: context::shared(context),
            }),
            cqs: [ptr::null_mut(); 2],
            wr: UnsafeCell::default(),
        });
        let rc = sys::ibv_cmd_open_qp(
            context,
            &mut qp.base,
            size_of::<sys::verbs_qp>() as c_int,
            attr,
            &mut cmd,
            cmd_size,
            &mut response,
            response_size,
        );
        object(Errno::check(rc).map(|()| Box::into_raw(qp))).cast()
    }
}

pub unsafe extern "C" fn destroy_qp(qp: *mut sys::ibv_qp) -> c_int {
    // SAFETY: objects are ours and alive; made by `create`. The kernel lets go of the buffer before
    // it returns.
    unsafe {
        let (cqs, qpn) = ((*qp.cast::<Qp>()).cqs, queues(qp).qpn);
        let rc = context::destroyed((*qp).context, sys::ibv_cmd_destroy_qp(qp));
        if rc == 0 {
            for cq in cqs.into_iter().filter(|cq| !cq.is_null()) {
                cq::detach(cq, qpn);
            }
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
            for cq in (*qp.cast::<Qp>()).cqs {
                if !cq.is_null() {
                    cq::forget(cq, queues.qpn);
                }
            }
            queues.reset();
        }
        let iwarp = queues.context.has(feature::IWARP);
        queues
            .state
            .store(posting_state(state, iwarp), Ordering::Relaxed);
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

/// Whether who polls the last byte of what such an operation writes to the memory of this side, as
/// responder or with RDMA READ as requester, finds all of it (D-RC-002 of the specification).
fn in_order(qp_type: sys::ibv_qp_type, op: sys::ibv_wr_opcode) -> bool {
    let reads = op == sys::IBV_WR_RDMA_READ;
    let sends_or_writes = matches!(
        op,
        sys::IBV_WR_SEND
            | sys::IBV_WR_SEND_WITH_IMM
            | sys::IBV_WR_SEND_WITH_INV
            | sys::IBV_WR_RDMA_WRITE
            | sys::IBV_WR_RDMA_WRITE_WITH_IMM
    );
    match qp_type {
        sys::IBV_QPT_RC => reads || sends_or_writes,
        sys::IBV_QPT_XRC_SEND => reads,
        sys::IBV_QPT_XRC_RECV | sys::IBV_QPT_UC => sends_or_writes,
        _ => false,
    }
}

pub unsafe extern "C" fn query_qp_data_in_order(
    qp: *mut sys::ibv_qp,
    op: sys::ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let in_order = in_order(unsafe { (*qp).qp_type }, op);
    // With RETURN_CAPS a mask is asked for, without it 0 or 1: this is both.
    const _: () = assert!(sys::IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG == 1);
    c_int::from(in_order)
}

/// The key that a window of type 1 gets with its next bind.
fn next_rkey(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// What binds a window by a key: the entry, as far as it is about windows.
///
/// # Safety
/// Window and region are ours and alive; the region may be null.
pub unsafe fn bind(mw: *mut sys::ibv_mw, new_rkey: u32, info: &sys::ibv_mw_bind_info) -> BindMw {
    let zero_based = info.mw_access_flags & sys::IBV_ACCESS_ZERO_BASED != 0;
    // SAFETY: as the caller says.
    let (mw_rkey, mr) = unsafe { ((*mw).rkey, info.mr.as_ref()) };
    BindMw {
        addr: if zero_based { 0 } else { info.addr },
        mw_rkey,
        length: info.length,
        access: info.mw_access_flags,
        mr_lkey: mr.map_or(0, |mr| mr.lkey),
        mr_addr: info.addr,
        new_rkey,
        ..BindMw::default()
    }
}

/// Binds a window of type 1: posts the work request, and gives the window its new key.
pub unsafe extern "C" fn bind_mw(
    qp: *mut sys::ibv_qp,
    mw: *mut sys::ibv_mw,
    request: *mut sys::ibv_mw_bind,
) -> c_int {
    // SAFETY: objects are ours and alive, and so is the request.
    let (queues, request) = unsafe { (queues(qp), &*request) };
    let post = || {
        if !queues.allows(sys::IBV_WR_BIND_MW) {
            return Err(EOPNOTSUPP);
        }
        let sq = queues.sendable()?;
        let wqe = SendWqe {
            opcode: wr_opcode::BIND_MW,
            flags: request.send_flags as u8 & (send_flag::FENCE | send_flag::SIGNALED),
            wr_id: request.wr_id,
            ..SendWqe::default()
        };
        let _lock = queues.sq_lock.lock();
        let mut batch = sq.batch();
        // SAFETY: objects are ours and alive.
        unsafe {
            let rkey = (*mw).rkey;
            let new_rkey = next_rkey(rkey);
            batch.push_bind(&wqe, &bind(mw, new_rkey, &request.bind_info))?;
            batch.commit();
            (*mw).rkey = new_rkey;
        }
        Ok(())
    };
    status(post().map(|()| queues.ring()))
}

pub fn sge(sge: &sys::ibv_sge) -> Sge {
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
pub unsafe fn list<'a, T>(first: *mut T, count: c_int) -> Result<&'a [T], Errno> {
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
            sys::IBV_WR_SEND | sys::IBV_WR_BIND_MW => {}
            sys::IBV_WR_SEND_WITH_IMM => {
                wqe.imm = imm(wr.__bindgen_anon_1.imm_data);
            }
            sys::IBV_WR_SEND_WITH_INV | sys::IBV_WR_LOCAL_INV => {
                wqe.imm = wr.__bindgen_anon_1.invalidate_rkey;
            }
            sys::IBV_WR_RDMA_WRITE | sys::IBV_WR_RDMA_READ | sys::IBV_WR_ATOMIC_WRITE => {
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

/// Opcodes whose data may be in the entry: bits.
const INLINE: u64 = {
    let (mut bits, mut i) = (0, 0);
    while i < OPCODES.len() {
        if OPCODES[i].kind.may_be_inline() {
            bits |= 1 << OPCODES[i].opcode;
        }
        i += 1;
    }
    bits
};

/// Whether the data of this opcode may be in the entry.
pub fn takes_inline(opcode: u8) -> bool {
    opcode < 64 && INLINE >> opcode & 1 != 0
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

/// The entry for a datagram, without its data.
///
/// # Safety
/// The work request is initialized as its opcode demands, and its address handle is ours and alive.
#[inline(always)]
unsafe fn ud_wqe(wr: &sys::ibv_send_wr) -> Result<UdWqe, Errno> {
    // SAFETY: as the caller says.
    unsafe {
        let wqe = send_wqe(wr)?;
        let to = wr.wr.ud;
        if to.ah.is_null() {
            return Err(EINVAL);
        }
        Ok(UdWqe {
            opcode: wqe.opcode,
            flags: wqe.flags,
            imm: wqe.imm,
            wr_id: wqe.wr_id,
            remote_qpn: to.remote_qpn,
            remote_qkey: to.remote_qkey,
            ..ah::address(to.ah)
        })
    }
}

/// Adds an entry with the data of a work request.
///
/// # Safety
/// The work request is initialized as its flags demand.
#[inline(always)]
unsafe fn push_data<E: SendEntry>(
    batch: &mut SendBatch<'_, Words>,
    wqe: &E,
    opcode: u8,
    wr: &sys::ibv_send_wr,
) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    let sges = unsafe { list(wr.sg_list, wr.num_sge)? };
    if wqe.flags() & send_flag::INLINE == 0 {
        batch.push(wqe, sges.iter().map(sge))?;
    } else if takes_inline(opcode) {
        let parts = sges
            .iter()
            // SAFETY: inline data are where the entries say.
            .map(|sge| unsafe { bytes(sge.addr as *const u8, sge.length as usize) });
        batch.push_inline(wqe, parts)?;
    } else {
        return Err(EINVAL);
    }
    Ok(())
}

/// # Safety
/// The work request is initialized as its opcode and flags demand.
#[inline(always)]
unsafe fn push_send(
    queues: &Queues,
    batch: &mut SendBatch<'_, Words>,
    wr: &sys::ibv_send_wr,
) -> Result<(), Errno> {
    if !queues.allows(wr.opcode) {
        return Err(EINVAL);
    }
    // SAFETY: as the caller says.
    unsafe {
        if queues.kind == Kind::Datagram {
            let wqe = ud_wqe(wr)?;
            return push_data(batch, &wqe, wqe.opcode, wr);
        }
        if queues.kind == Kind::Reliable {
            // A work request has no place for an address and a remote range at once.
            if !matches!(wr.opcode, sys::IBV_WR_SEND | sys::IBV_WR_SEND_WITH_IMM) {
                return Err(EINVAL);
            }
            let wqe = SrdWqe {
                to: ud_wqe(wr)?,
                ..SrdWqe::default()
            };
            return push_data(batch, &wqe, wqe.to.opcode, wr);
        }
        let mut wqe = send_wqe(wr)?;
        if queues.kind == Kind::Xrc {
            wqe.srqn = wr.qp_type.xrc.remote_srqn;
        }
        match wr.opcode {
            sys::IBV_WR_BIND_MW => {
                let window = wr.__bindgen_anon_2.bind_mw;
                if window.mw.is_null() {
                    return Err(EINVAL);
                }
                Ok(batch.push_bind(&wqe, &bind(window.mw, window.rkey, &window.bind_info))?)
            }
            sys::IBV_WR_LOCAL_INV => Ok(batch.push(&wqe, [])?),
            _ => push_data(batch, &wqe, wqe.opcode, wr),
        }
    }
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
                result = unsafe { push_send(queues, &mut batch, request) };
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

#[cfg(test)]
mod tests {
    use super::*;

    // G-QPS-001.
    #[test]
    fn posts_are_refused_by_state_and_when_the_queue_is_full() {
        use sys::*;
        for (state, send, receive) in [
            (IBV_QPS_RESET, false, false),
            (IBV_QPS_INIT, false, true),
            (IBV_QPS_RTR, false, true),
            (IBV_QPS_RTS, true, true),
            (IBV_QPS_SQD, true, true),
            (IBV_QPS_SQE, true, true),
            (IBV_QPS_ERR, true, true),
        ] {
            assert_eq!((may_send(state), may_receive(state)), (send, receive));
        }
        let posting = posting_state(IBV_QPS_INIT, true);
        assert_eq!((may_send(posting), may_receive(posting)), (true, true));
        assert!(!may_receive(posting_state(IBV_QPS_RESET, true)));
        assert!(!may_send(posting_state(IBV_QPS_INIT, false)));
        // (That a queue is full the driver's core finds.)
        let full = virtio_rdma_driver_core::PostError::Full;
        assert_eq!(Errno::from(full), Errno(libc::ENOMEM));
    }

    // G-MW-001, G-MW-002.
    #[test]
    fn windows_get_other_keys_and_zero_based_ones_no_address() {
        assert_eq!(next_rkey(0x1234_5600), 0x1234_5601);
        assert_eq!(next_rkey(0xffff_ffff), 0xffff_ff00);
        let mut mr: sys::ibv_mr = zeroed();
        mr.lkey = 0x77;
        let mut mw: sys::ibv_mw = zeroed();
        mw.rkey = 0x105;
        let mut info: sys::ibv_mw_bind_info = zeroed();
        (info.mr, info.addr, info.length) = (&mut mr, 0x5000, 64);
        for (flags, addr) in [
            (sys::IBV_ACCESS_REMOTE_READ, 0x5000),
            (sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_ZERO_BASED, 0),
        ] {
            info.mw_access_flags = flags;
            // SAFETY: window and region are there.
            let bind = unsafe { bind(&mut mw, 0x106, &info) };
            assert_eq!((bind.addr, bind.mr_addr, bind.length), (addr, 0x5000, 64));
            assert_eq!(
                (bind.mw_rkey, bind.new_rkey, bind.mr_lkey),
                (0x105, 0x106, 0x77)
            );
            assert_eq!(bind.access, flags);
        }
    }

    #[test]
    fn in_order_is_what_arrives_here() {
        use sys::*;
        for (qp_type, send, write, read) in [
            (IBV_QPT_RC, true, true, true),
            (IBV_QPT_UC, true, true, false),
            (IBV_QPT_XRC_SEND, false, false, true),
            (IBV_QPT_XRC_RECV, true, true, false),
            (IBV_QPT_UD, false, false, false),
        ] {
            assert_eq!(in_order(qp_type, IBV_WR_SEND), send);
            assert_eq!(in_order(qp_type, IBV_WR_RDMA_WRITE_WITH_IMM), write);
            assert_eq!(in_order(qp_type, IBV_WR_RDMA_READ), read);
            for other in [
                IBV_WR_ATOMIC_FETCH_AND_ADD,
                IBV_WR_ATOMIC_WRITE,
                IBV_WR_LOCAL_INV,
            ] {
                assert!(!in_order(qp_type, other));
            }
        }
    }
}
