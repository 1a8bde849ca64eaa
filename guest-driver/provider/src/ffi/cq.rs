// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues.

use core::ffi::{c_int, c_uint};
use core::hash::{BuildHasherDefault, Hasher};
use core::mem::{self, ManuallyDrop};
use core::ptr;
use std::collections::HashMap;
use std::sync::Arc;

use virtio_rdma_driver_core::abi::{
    CreateCqRequest, CreateCqResponse, ResizeCqRequest, ResizeCqResponse,
};
use virtio_rdma_driver_core::buffer::CqLayout;
use virtio_rdma_driver_core::{ArmMode, CompletionQueue, StatusPage};
use virtio_rdma_spec::config::feature;
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{wc_flag, wc_opcode, wc_status};

use super::buffer::{Allocator, Mapping, Resource, Words};
use super::clock::{self, Reading, WallClock};
use super::lock::{SpinGuard, SpinLock};
use super::qp::Queues;
use super::{context, object, pd, status, sys, zeroed, Errno, With, EINVAL, EOPNOTSUPP};

// The numbers of the specification are those of verbs: completions need no translation.
const _: () = {
    assert!(wc_status::WR_FLUSH_ERR as u32 == sys::IBV_WC_WR_FLUSH_ERR);
    assert!(wc_status::RNR_RETRY_EXC_ERR as u32 == sys::IBV_WC_RNR_RETRY_EXC_ERR);
    assert!(wc_status::GENERAL_ERR as u32 == sys::IBV_WC_GENERAL_ERR);
    assert!(wc_opcode::SEND as u32 == sys::IBV_WC_SEND);
    assert!(wc_opcode::RDMA_WRITE as u32 == sys::IBV_WC_RDMA_WRITE);
    assert!(wc_opcode::RDMA_READ as u32 == sys::IBV_WC_RDMA_READ);
    assert!(wc_opcode::COMP_SWAP as u32 == sys::IBV_WC_COMP_SWAP);
    assert!(wc_opcode::FETCH_ADD as u32 == sys::IBV_WC_FETCH_ADD);
    assert!(wc_opcode::ATOMIC_WRITE as u32 == sys::IBV_WC_ATOMIC_WRITE);
    assert!(wc_opcode::RECV as u32 == sys::IBV_WC_RECV);
    assert!(wc_opcode::RECV_RDMA_WITH_IMM as u32 == sys::IBV_WC_RECV_RDMA_WITH_IMM);
    assert!(wc_flag::GRH as u32 == sys::IBV_WC_GRH);
    assert!(wc_flag::WITH_IMM as u32 == sys::IBV_WC_WITH_IMM);
    assert!(wc_flag::WITH_INV as u32 == sys::IBV_WC_WITH_INV);
};

/// A completion queue: the part that libibverbs knows, and ours.
#[repr(C)]
struct Cq {
    base: sys::verbs_cq,
    state: SpinLock<State>,
    /// Of the parent domain, if there is one: for another buffer.
    allocator: Option<Arc<Allocator>>,
}

/// What the lock of a completion queue protects.
#[derive(Debug)]
pub struct State {
    queue: CompletionQueue<Words>,
    /// The queue pairs that complete here.
    qps: HashMap<u32, Attached, BuildHasherDefault<QpnHasher>>,
    /// The one that was looked for last.
    last: Option<(u32, Arc<Queues>)>,
    /// XRC shared receive queues that complete here, for queue pairs that are anybody's.
    xrc_srqs: u32,
    /// Says whether the device is lost.
    status: StatusPage<Words>,
    /// It is, and what it had written is polled: what comes now is flushed.
    flushing: bool,
    /// The device says which kind of header is in front of a datagram.
    header_types: bool,
    /// Completions have time stamps.
    stamped: bool,
    /// The completion that extended polling is at, and its time stamp.
    current: Cqe,
    timestamp: u64,
    /// For who asks for the wall clock's time.
    wall_clock: Option<WallClock>,
    // The memory of the queue, so after it.
    buffer: Mapping,
    // The memory of the status page, so after it.
    _context: Arc<context::Shared>,
}

/// What of a queue pair completes in a completion queue.
#[derive(Debug, Clone, Copy)]
pub struct Roles {
    pub sends: bool,
    pub receives: bool,
}

/// A queue pair that completes in a completion queue.
#[derive(Debug)]
struct Attached {
    queues: Arc<Queues>,
    roles: Roles,
}

/// The opcode for user space, which has no names for masked atomic operations.
#[inline(always)]
fn plain_opcode(opcode: u8) -> u8 {
    match opcode {
        wc_opcode::MASKED_COMP_SWAP => wc_opcode::COMP_SWAP,
        wc_opcode::MASKED_FETCH_ADD => wc_opcode::FETCH_ADD,
        opcode => opcode,
    }
}

/// What `sl` of a datagram's completion is told as: the kind of its header, of RoCE v2 over IPv6 or
/// over IPv4. mlx5's provider tells that there, and UCX goes by it, for any device. RoCE has no
/// service level that would be lost.
const IPV6_HEADER: u8 = 1;
const IPV4_HEADER: u8 = 2;

/// Puts the kind of the header where applications look for it.
#[inline(always)]
fn tell_header_type(cqe: &mut Cqe) {
    cqe.sl = match cqe.wc_flags & wc_flag::IPV4 {
        0 => IPV6_HEADER,
        _ => IPV4_HEADER,
    };
    // Verbs have no such flag.
    cqe.wc_flags &= !wc_flag::IPV4;
}

impl State {
    /// The next completion, with its queue entry freed.
    #[inline(always)]
    fn poll(&mut self) -> Option<Cqe> {
        match self.poll_ring() {
            None if self.status.is_lost() => self.poll_lost(),
            polled => polled,
        }
    }

    /// The next completion of a lost device (G-RST-004 of the specification).
    #[cold]
    #[inline(never)]
    fn poll_lost(&mut self) -> Option<Cqe> {
        if !self.flushing {
            // Something may have been written between the look at the ring and that at the status.
            if let Some(cqe) = self.poll_ring() {
                return Some(cqe);
            }
            self.flushing = true;
        }
        // The queue pair that was flushed last may well have more.
        let last = self.last.as_ref().and_then(|(qpn, _)| self.qps.get(qpn));
        let mut cqe = last
            .into_iter()
            .chain(self.qps.values())
            .find_map(|attached| attached.queues.flush(attached.roles))?;
        cqe.opcode = plain_opcode(cqe.opcode);
        self.find(cqe.qp_num);
        Some(cqe)
    }

    /// The next completion that the device wrote, with its queue entry freed.
    #[inline(always)]
    fn poll_ring(&mut self) -> Option<Cqe> {
        loop {
            let mut cqe = self.queue.poll()?;
            let of_srq = self.xrc_srqs > 0 && cqe.opcode & wc_opcode::RECV != 0;
            match self.find(cqe.qp_num) {
                Some(queues) => queues.complete(&cqe),
                None if of_srq => {}
                // What belongs to no queue pair (any longer) is not for the application.
                None => continue,
            }
            if cqe.status > wc_status::GENERAL_ERR {
                cqe.status = wc_status::GENERAL_ERR;
            }
            cqe.opcode = plain_opcode(cqe.opcode);
            if cqe.wc_flags & wc_flag::GRH != 0 && self.header_types {
                tell_header_type(&mut cqe);
            }
            return Some(cqe);
        }
    }

    #[inline(always)]
    fn find(&mut self, qpn: u32) -> Option<&Queues> {
        if !matches!(&self.last, Some((last, _)) if *last == qpn) {
            self.last = Some((qpn, Arc::clone(&self.qps.get(&qpn)?.queues)));
        }
        self.last.as_ref().map(|(_, queues)| &**queues)
    }
}

/// Queue pair numbers are dealt out one by one: a multiplication spreads them well enough.
#[derive(Debug, Default)]
struct QpnHasher(u64);

impl Hasher for QpnHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The lock of a completion queue.
///
/// # Safety
/// The queue is ours and alive, and stays so for `'a`.
unsafe fn state<'a>(cq: *mut sys::ibv_cq) -> &'a SpinLock<State> {
    // SAFETY: the queue is the start of a `Cq`; the reference covers only our part, which changes
    // under its lock.
    unsafe { &(*cq.cast::<Cq>()).state }
}

/// Makes completions of a queue pair acceptable; `roles` says of which of its queues there are any.
///
/// # Safety
/// The completion queue is ours and alive.
pub unsafe fn attach(cq: *mut sys::ibv_cq, qpn: u32, queues: &Arc<Queues>, roles: Roles) {
    let queues = Arc::clone(queues);
    // SAFETY: as the caller says.
    unsafe { state(cq) }
        .lock()
        .qps
        .insert(qpn, Attached { queues, roles });
}

/// Drops the completions of a queue pair that are in the queue now.
///
/// # Safety
/// The completion queue is ours and alive.
pub unsafe fn forget(cq: *mut sys::ibv_cq, qpn: u32) {
    // SAFETY: as the caller says.
    unsafe { state(cq) }.lock().queue.forget(qpn);
}

/// Drops the completions of a queue pair, now and in future.
///
/// # Safety
/// The completion queue is ours and alive.
pub unsafe fn detach(cq: *mut sys::ibv_cq, qpn: u32) {
    // SAFETY: as the caller says.
    let mut state = unsafe { state(cq) }.lock();
    state.queue.forget(qpn);
    state.qps.remove(&qpn);
    if matches!(&state.last, Some((last, _)) if *last == qpn) {
        state.last = None;
    }
}

/// Makes receive completions of any queue pair acceptable.
///
/// # Safety
/// The completion queue is ours and alive.
pub unsafe fn attach_xrc_srq(cq: *mut sys::ibv_cq) {
    // SAFETY: as the caller says.
    unsafe { state(cq) }.lock().xrc_srqs += 1;
}

/// Undoes [`attach_xrc_srq`].
///
/// # Safety
/// The completion queue is ours and alive.
pub unsafe fn detach_xrc_srq(cq: *mut sys::ibv_cq) {
    // SAFETY: as the caller says.
    unsafe { state(cq) }.lock().xrc_srqs -= 1;
}

fn layout(cqe: u32, stamped: bool) -> Result<CqLayout, Errno> {
    let layout = if stamped {
        CqLayout::extended(cqe)
    } else {
        CqLayout::new(cqe)
    };
    layout.ok_or(EINVAL)
}

/// What a completion queue may have.
#[derive(Debug, Default)]
struct Options {
    /// Time stamps.
    stamped: bool,
    wall_clock: Option<WallClock>,
    /// It is used by one thread.
    single: bool,
    allocator: Option<Arc<Allocator>>,
}

/// Creates a completion queue for `cqe` entries; `command` has the kernel create it.
///
/// # Safety
/// The context is ours and alive. `single` has been promised by the application.
unsafe fn create(
    context: *mut sys::ibv_context,
    cqe: u32,
    options: Options,
    command: impl FnOnce(&mut sys::verbs_cq, [u8; CreateCqRequest::SIZE]) -> c_int,
) -> Result<*mut Cq, Errno> {
    // SAFETY: as the caller says.
    let shared = unsafe { context::shared(context) };
    if cqe > shared.limits().max_cqe {
        return Err(EINVAL);
    }
    let layout = layout(cqe, options.stamped)?;
    let buffer = Mapping::queue(layout.size, options.allocator.as_ref(), Resource::Cq)?;
    let request = CreateCqRequest {
        buffer: buffer.address() as u64,
        length: buffer.length() as u64,
        entries: layout.ring.entries,
        ring_offset: layout.ring.offset,
        stride: layout.ring.stride,
        flags: 0,
    };
    // SAFETY: writable memory, which `State` keeps as long as the queue.
    let words = unsafe { Words::new(&buffer) };
    let state = State {
        queue: CompletionQueue::new(words, &layout.ring)?,
        qps: HashMap::default(),
        last: None,
        xrc_srqs: 0,
        // SAFETY: `State` keeps the context.
        status: unsafe { shared.status_page() },
        flushing: false,
        header_types: shared.has(feature::HEADER_TYPE),
        stamped: options.stamped,
        current: Cqe::default(),
        timestamp: 0,
        wall_clock: options.wall_clock,
        buffer,
        _context: shared,
    };
    let mut cq = Box::new(Cq {
        base: zeroed(),
        // SAFETY: as the caller says.
        state: unsafe { pd::lock(options.single, state) },
        allocator: options.allocator,
    });
    Errno::check(command(&mut cq.base, request.to_bytes()))?;
    Ok(Box::into_raw(cq))
}

pub unsafe extern "C" fn create_cq(
    context: *mut sys::ibv_context,
    cqe: c_int,
    channel: *mut sys::ibv_comp_channel,
    comp_vector: c_int,
) -> *mut sys::ibv_cq {
    let command = |base: &mut sys::verbs_cq, request| {
        let mut cmd = With::<sys::ibv_create_cq, _>::new(request);
        let mut response =
            With::<sys::ib_uverbs_create_cq_resp, _>::new([0; CreateCqResponse::SIZE]);
        let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
        // SAFETY: objects are ours and alive; command and response are of these sizes.
        unsafe {
            sys::ibv_cmd_create_cq(
                context,
                cqe,
                channel,
                comp_vector,
                (&raw mut *base).cast(),
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
            )
        }
    };
    // SAFETY: objects are ours and alive. A negative number of entries becomes one above all
    // limits.
    object(unsafe { create(context, cqe as u32, Options::default(), command) }).cast()
}

pub unsafe extern "C" fn create_cq_ex(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_cq_init_attr_ex,
) -> *mut sys::ibv_cq_ex {
    // SAFETY: objects are ours and alive, and so are the attributes.
    object(unsafe { try_create_cq_ex(context, &*attr) }).cast()
}

/// # Safety
/// As [`create`].
unsafe fn try_create_cq_ex(
    context: *mut sys::ibv_context,
    attr: &sys::ibv_cq_init_attr_ex,
) -> Result<*mut Cq, Errno> {
    let flags = if attr.comp_mask & sys::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
        attr.flags
    } else {
        0
    };
    const MASK: u32 = sys::IBV_CQ_INIT_ATTR_MASK_FLAGS | sys::IBV_CQ_INIT_ATTR_MASK_PD;
    const STAMPED: u64 = sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP as u64;
    const WALL_CLOCK: u64 = sys::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK as u64;
    let (stamped, wall_clock) = (
        attr.wc_flags & STAMPED != 0,
        attr.wc_flags & WALL_CLOCK != 0,
    );
    // SAFETY: as the caller says.
    let supported = if unsafe { context::shared(context) }.has(feature::CQ_TIMESTAMP) {
        u64::from(sys::IBV_WC_STANDARD_FLAGS) | STAMPED | WALL_CLOCK
    } else {
        u64::from(sys::IBV_WC_STANDARD_FLAGS)
    };
    if attr.comp_mask & !MASK != 0
        || flags & !sys::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
        || attr.wc_flags & !supported != 0
    {
        return Err(EOPNOTSUPP);
    }
    let mut options = Options {
        stamped: stamped || wall_clock,
        single: flags & sys::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
        ..Options::default()
    };
    // SAFETY: objects are ours and alive.
    unsafe {
        if attr.comp_mask & sys::IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            if attr.parent_domain.is_null() || !pd::is_parent(attr.parent_domain) {
                return Err(EINVAL);
            }
            options.allocator = pd::allocator(attr.parent_domain);
            options.single |= pd::single_threaded(attr.parent_domain);
        }
        if wall_clock {
            options.wall_clock = Some(WallClock::new(|| Reading::now(context))?);
        }
    }
    let command = |base: &mut sys::verbs_cq, request| {
        let mut cmd = With::<sys::ibv_create_cq_ex, _>::new(request);
        let mut response =
            With::<sys::ib_uverbs_ex_create_cq_resp, _>::new([0; CreateCqResponse::SIZE]);
        let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
        // SAFETY: objects are ours and alive; command and response are of these sizes.
        unsafe {
            sys::ibv_cmd_create_cq_ex(
                context,
                attr,
                #[cfg(pabi = "65")]
                ptr::null_mut(),
                base,
                (&raw mut cmd).cast(),
                cmd_size,
                (&raw mut response).cast(),
                response_size,
                0,
            )
        }
    };
    // SAFETY: as the caller says.
    let cq = unsafe { create(context, attr.cqe, options, command) }?;
    // SAFETY: just created.
    let ex = unsafe { &mut (*cq).base.__bindgen_anon_1.cq_ex };
    ex.start_poll = Some(start_poll);
    ex.next_poll = Some(next_poll);
    ex.end_poll = Some(end_poll);
    ex.read_opcode = Some(read_opcode);
    ex.read_vendor_err = Some(read_vendor_err);
    ex.read_wc_flags = Some(read_wc_flags);
    ex.read_byte_len = Some(read_byte_len);
    ex.read_imm_data = Some(read_imm_data);
    ex.read_qp_num = Some(read_qp_num);
    ex.read_src_qp = Some(read_src_qp);
    ex.read_slid = Some(read_slid);
    ex.read_sl = Some(read_sl);
    ex.read_dlid_path_bits = Some(read_dlid_path_bits);
    if stamped {
        ex.read_completion_ts = Some(read_completion_ts);
    }
    if wall_clock {
        ex.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    }
    Ok(cq)
}

pub unsafe extern "C" fn destroy_cq(cq: *mut sys::ibv_cq) -> c_int {
    // SAFETY: objects are ours and alive; made by `create`. The kernel lets go of the buffer before
    // it returns.
    unsafe {
        let rc = context::destroyed((*cq).context, sys::ibv_cmd_destroy_cq(cq));
        if rc == 0 {
            drop(Box::from_raw(cq.cast::<Cq>()));
        }
        rc
    }
}

pub unsafe extern "C" fn resize_cq(cq: *mut sys::ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: objects are ours and alive.
    status(unsafe { try_resize_cq(cq, cqe) })
}

/// # Safety
/// The queue is ours and alive.
unsafe fn try_resize_cq(cq: *mut sys::ibv_cq, cqe: c_int) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    let (limits, allocator) = unsafe {
        let limits = context::shared((*cq).context).limits();
        (limits, (*cq.cast::<Cq>()).allocator.as_ref())
    };
    let entries = u32::try_from(cqe).map_err(|_| EINVAL)?;
    if entries > limits.max_cqe {
        return Err(EINVAL);
    }
    // Nobody polls from now on, until the device has moved the completions.
    // SAFETY: as the caller says.
    let mut lock = unsafe { state(cq) }.lock();
    let state = &mut *lock;
    let layout = layout(entries, state.stamped)?;
    let buffer = Mapping::queue(layout.size, allocator, Resource::Cq)?;
    // SAFETY: writable memory, which `State` keeps as long as the queue.
    let words = unsafe { Words::new(&buffer) };
    let resized = state.queue.prepare_resize(words, &layout.ring)?;
    let request = ResizeCqRequest {
        buffer: buffer.address() as u64,
        length: buffer.length() as u64,
        entries: layout.ring.entries,
        ring_offset: layout.ring.offset,
    };
    let mut cmd = With::<sys::ibv_resize_cq, _>::new(request.to_bytes());
    let mut response = With::<sys::ib_uverbs_resize_cq_resp, _>::new([0; ResizeCqResponse::SIZE]);
    let (cmd_size, response_size) = (size_of_val(&cmd), size_of_val(&response));
    // SAFETY: objects are ours and alive; command and response are of these sizes.
    Errno::check(unsafe {
        sys::ibv_cmd_resize_cq(
            cq,
            cqe,
            (&raw mut cmd).cast(),
            cmd_size,
            (&raw mut response).cast(),
            response_size,
        )
    })?;
    state.queue.resized(resized);
    state.buffer = buffer;
    Ok(())
}

/// Moderation of events: the device's, which the kernel module asks for it.
pub unsafe extern "C" fn modify_cq(
    cq: *mut sys::ibv_cq,
    attr: *mut sys::ibv_modify_cq_attr,
) -> c_int {
    let mut cmd: sys::ibv_modify_cq = zeroed();
    let size = size_of_val(&cmd);
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe { sys::ibv_cmd_modify_cq(cq, attr, ptr::from_mut(&mut cmd), size) }
}

pub unsafe extern "C" fn req_notify_cq(cq: *mut sys::ibv_cq, solicited_only: c_int) -> c_int {
    let mode = if solicited_only == 0 {
        ArmMode::Any
    } else {
        ArmMode::Solicited
    };
    // SAFETY: objects are ours and alive.
    unsafe { state(cq) }.lock().queue.arm(mode);
    0
}

pub unsafe extern "C" fn cq_event(cq: *mut sys::ibv_cq) {
    // SAFETY: objects are ours and alive.
    unsafe { state(cq) }.lock().queue.event_received();
}

/// Immediate data are four octets; other numbers in that place are numbers.
fn imm_data(cqe: &Cqe) -> u32 {
    u32::from_ne_bytes(cqe.imm.to_le_bytes())
}

pub unsafe extern "C" fn poll_cq(
    cq: *mut sys::ibv_cq,
    num_entries: c_int,
    wc: *mut sys::ibv_wc,
) -> c_int {
    // SAFETY: objects are ours and alive.
    let mut state = unsafe { state(cq) }.lock();
    let mut count = 0;
    while count < num_entries {
        let Some(cqe) = state.poll() else {
            break;
        };
        let imm = if cqe.wc_flags & wc_flag::WITH_INV != 0 {
            sys::ibv_wc__bindgen_ty_1 {
                invalidated_rkey: cqe.imm,
            }
        } else {
            sys::ibv_wc__bindgen_ty_1 {
                imm_data: imm_data(&cqe),
            }
        };
        let entry = sys::ibv_wc {
            wr_id: cqe.wr_id,
            status: cqe.status.into(),
            opcode: cqe.opcode.into(),
            vendor_err: cqe.vendor_err.into(),
            byte_len: cqe.byte_len,
            __bindgen_anon_1: imm,
            qp_num: cqe.qp_num,
            src_qp: cqe.src_qp,
            wc_flags: cqe.wc_flags.into(),
            pkey_index: 0,
            slid: 0,
            sl: cqe.sl,
            dlid_path_bits: 0,
        };
        // SAFETY: the caller's array has `num_entries` entries.
        unsafe { wc.add(count as usize).write(entry) };
        count += 1;
    }
    if count > 0 {
        state.queue.publish();
    }
    count
}

/// The state, while a call of start_poll that succeeded waits for its end_poll.
///
/// # Safety
/// The queue is ours and alive, this thread is between the two, and no other guard is in use.
unsafe fn polling<'a>(cq: *mut sys::ibv_cq_ex) -> ManuallyDrop<SpinGuard<'a, State>> {
    // SAFETY: start_poll forgot the guard; guards made here are forgotten too.
    ManuallyDrop::new(unsafe { state(cq.cast()).resume() })
}

/// Steps to the next completion.
///
/// # Safety
/// The queue is ours and alive.
unsafe fn step(cq: *mut sys::ibv_cq_ex, state: &mut State) -> bool {
    let Some(cqe) = state.poll() else {
        return false;
    };
    // SAFETY: as the caller says; these two fields are the provider's.
    unsafe {
        (*cq).status = cqe.status.into();
        (*cq).wr_id = cqe.wr_id;
    }
    // What is flushed has no time of its own: that of the last completion stays.
    if state.stamped && !state.flushing {
        state.timestamp = state.queue.extension().timestamp;
    }
    state.current = cqe;
    true
}

unsafe extern "C" fn start_poll(
    cq: *mut sys::ibv_cq_ex,
    attr: *mut sys::ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: objects are ours and alive, and so are the attributes.
    unsafe {
        if (*attr).comp_mask != 0 {
            return libc::EINVAL;
        }
        let mut state = state(cq.cast()).lock();
        if !step(cq, &mut state) {
            return libc::ENOENT;
        }
        mem::forget(state);
    }
    0
}

unsafe extern "C" fn next_poll(cq: *mut sys::ibv_cq_ex) -> c_int {
    // SAFETY: objects are ours and alive; between start_poll and end_poll.
    let stepped = unsafe { step(cq, &mut polling(cq)) };
    if stepped {
        0
    } else {
        libc::ENOENT
    }
}

unsafe extern "C" fn end_poll(cq: *mut sys::ibv_cq_ex) {
    // SAFETY: objects are ours and alive; the end of what start_poll began.
    let state = unsafe { polling(cq) };
    state.queue.publish();
    drop(ManuallyDrop::into_inner(state));
}

/// The completion that polling is at.
///
/// # Safety
/// As [`polling`].
unsafe fn current(cq: *mut sys::ibv_cq_ex) -> Cqe {
    // SAFETY: as the caller says.
    unsafe { polling(cq) }.current
}

unsafe extern "C" fn read_completion_ts(cq: *mut sys::ibv_cq_ex) -> u64 {
    // SAFETY: objects are ours and alive; called between start_poll and end_poll.
    unsafe { polling(cq) }.timestamp
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut sys::ibv_cq_ex) -> u64 {
    // SAFETY: objects are ours and alive; called between start_poll and end_poll.
    let mut state = unsafe { polling(cq) };
    let timestamp = state.timestamp;
    match &mut state.wall_clock {
        Some(clock) => {
            // SAFETY: as before.
            let time = clock.at(timestamp, || unsafe { Reading::now((*cq).context) });
            // However inexact that is: it was not later than now.
            time.min(clock::wall())
        }
        None => 0,
    }
}

macro_rules! readers {
    ($($name:ident -> $t:ty, |$cqe:ident| $value:expr;)*) => {$(
        unsafe extern "C" fn $name(cq: *mut sys::ibv_cq_ex) -> $t {
            // SAFETY: objects are ours and alive; called between start_poll and end_poll.
            let $cqe = unsafe { current(cq) };
            $value
        }
    )*};
}
readers! {
    read_opcode -> sys::ibv_wc_opcode, |cqe| cqe.opcode.into();
    read_vendor_err -> u32, |cqe| cqe.vendor_err.into();
    read_wc_flags -> c_uint, |cqe| cqe.wc_flags.into();
    read_byte_len -> u32, |cqe| cqe.byte_len;
    read_imm_data -> u32, |cqe| if cqe.wc_flags & wc_flag::WITH_INV != 0 { cqe.imm } else { imm_data(&cqe) };
    read_qp_num -> u32, |cqe| cqe.qp_num;
    read_src_qp -> u32, |cqe| cqe.src_qp;
    read_slid -> u32, |_cqe| 0;
    read_sl -> u8, |cqe| cqe.sl;
    read_dlid_path_bits -> u8, |_cqe| 0;
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering;

    use virtio_rdma_driver_core::buffer::QpCaps;
    use virtio_rdma_spec::doorbell::worker_status;
    use virtio_rdma_spec::ring::SendWqe;
    use virtio_rdma_spec::verbs::{vendor_err, wr_opcode};

    use super::*;

    const CAPS: QpCaps = QpCaps {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };

    /// A completion queue as the device sees it.
    struct Fixture {
        shared: Arc<context::Shared>,
        layout: CqLayout,
        state: State,
        /// Completions that the device wrote.
        written: u32,
    }

    impl Fixture {
        fn new() -> Self {
            let shared = Arc::new(context::Shared::fixture());
            Self::of(&shared)
        }

        fn of(shared: &Arc<context::Shared>) -> Self {
            let layout = layout(16, false).unwrap();
            let buffer = Mapping::fixture(layout.size);
            // SAFETY: the mapping is kept behind the queue.
            let (words, status) = unsafe { (Words::new(&buffer), shared.status_page()) };
            let state = State {
                queue: CompletionQueue::new(words, &layout.ring).unwrap(),
                qps: HashMap::default(),
                last: None,
                xrc_srqs: 0,
                status,
                flushing: false,
                header_types: true,
                stamped: false,
                current: Cqe::default(),
                timestamp: 0,
                wall_clock: None,
                buffer,
                _context: Arc::clone(shared),
            };
            Self {
                shared: Arc::clone(shared),
                layout,
                state,
                written: 0,
            }
        }

        fn attach(&mut self, qpn: u32, queues: &Arc<Queues>, sends: bool, receives: bool) {
            let roles = Roles { sends, receives };
            let queues = Arc::clone(queues);
            self.state.qps.insert(qpn, Attached { queues, roles });
        }

        /// Writes a completion of a success, as the device does.
        fn write(&mut self, qp_num: u32, opcode: u8, wr_id: u64, wqe_index: u16) {
            let cqe = Cqe {
                wr_id,
                qp_num,
                wqe_index,
                opcode,
                phase: 1,
                ..Cqe::default()
            };
            let at = self.layout.ring.offset + self.written * self.layout.ring.stride;
            // SAFETY: the mapping is there.
            let words = unsafe { Words::new(&self.state.buffer) };
            for (to, from) in words[at as usize / 8..]
                .iter()
                .zip(cqe.to_bytes().chunks_exact(8))
            {
                to.store(
                    u64::from_ne_bytes(from.try_into().unwrap()),
                    Ordering::Release,
                );
            }
            self.written += 1;
        }

        /// What there is to poll: ids and statuses.
        fn poll(&mut self) -> Vec<(u64, u8)> {
            std::iter::from_fn(|| self.state.poll())
                .map(|cqe| {
                    let flushed = cqe.status == wc_status::WR_FLUSH_ERR;
                    assert_eq!(cqe.vendor_err == vendor_err::FLUSHED, flushed);
                    (cqe.wr_id, cqe.status)
                })
                .collect()
        }
    }

    fn send(queues: &Queues, wr_id: u64) {
        let wqe = SendWqe {
            opcode: wr_opcode::RDMA_READ,
            wr_id,
            ..SendWqe::default()
        };
        queues.sq.as_ref().unwrap().post(&wqe, []).unwrap();
        queues.ring();
    }

    const OK: u8 = wc_status::SUCCESS;
    const FLUSH: u8 = wc_status::WR_FLUSH_ERR;

    // G-RST-004, G-RST-005.
    #[test]
    fn a_lost_device_leaves_nothing_outstanding() {
        let mut cq = Fixture::new();
        let queues = Arc::new(Queues::fixture(&cq.shared, &CAPS, 7));
        cq.attach(7, &queues, true, true);
        for wr_id in 1..=3 {
            send(&queues, wr_id);
            queues.receive(10 + wr_id);
        }
        cq.write(7, wc_opcode::RDMA_READ, 1, 0);
        assert_eq!(cq.poll(), [(1, OK)]);
        // The device goes on until it is lost.
        cq.write(7, wc_opcode::RECV, 11, 0);
        cq.shared.lose();
        cq.write(7, wc_opcode::RDMA_READ, 2, 1);
        let polled = cq.poll();
        assert_eq!(polled[..2], [(11, OK), (2, OK)]);
        let of = |sends: bool| {
            let of = polled[2..]
                .iter()
                .filter(|(wr_id, _)| (*wr_id < 10) == sends);
            of.copied().collect::<Vec<_>>()
        };
        assert_eq!(of(true), [(3, FLUSH)]);
        assert_eq!(of(false), [(12, FLUSH), (13, FLUSH)]);
        assert_eq!(cq.poll(), []);
        // Later ones as well, lap after lap.
        for wr_id in 100..110 {
            send(&queues, wr_id);
            assert_eq!(cq.poll(), [(wr_id, FLUSH)]);
        }
        let room = queues.sq.as_ref().unwrap().room();
        assert_eq!(room, CAPS.max_send_wr);
        // Nobody was woken: see `Shared::fixture`, whose notify pages cannot be written to.
    }

    #[test]
    fn flushed_work_requests_complete_where_they_belong() {
        let mut sends = Fixture::new();
        let mut receives = Fixture::of(&sends.shared);
        let (one, other) = (
            Arc::new(Queues::fixture(&sends.shared, &CAPS, 7)),
            Arc::new(Queues::fixture(&sends.shared, &CAPS, 8)),
        );
        for (qpn, queues) in [(7, &one), (8, &other)] {
            sends.attach(qpn, queues, true, false);
            receives.attach(qpn, queues, false, true);
        }
        send(&one, 1);
        one.receive(2);
        other.receive(3);
        sends.shared.lose();
        assert_eq!(sends.poll(), [(1, FLUSH)]);
        let mut polled = receives.poll();
        polled.sort_unstable();
        assert_eq!(polled, [(2, FLUSH), (3, FLUSH)]);
        // What is detached completes nothing any more.
        send(&other, 4);
        sends.state.qps.remove(&8);
        assert_eq!(sends.poll(), []);
    }

    // G-RST-005.
    #[test]
    fn posting_goes_on_while_work_requests_are_flushed() {
        const COUNT: u64 = 20_000;
        let mut cq = Fixture::new();
        let queues = Arc::new(Queues::fixture(&cq.shared, &CAPS, 7));
        cq.attach(7, &queues, true, true);
        let posted = Arc::clone(&queues);
        let poster = std::thread::spawn(move || {
            for wr_id in 0..COUNT {
                while posted.sq.as_ref().unwrap().room() == 0 {
                    std::thread::yield_now();
                }
                send(&posted, wr_id);
            }
        });
        cq.shared.lose();
        let mut polled = Vec::new();
        while polled.len() < COUNT as usize {
            polled.extend(cq.poll());
            std::thread::yield_now();
        }
        poster.join().unwrap();
        assert!(polled
            .into_iter()
            .eq((0..COUNT).map(|wr_id| (wr_id, FLUSH))));
        assert_eq!(cq.poll(), []);
    }

    #[test]
    fn without_a_loss_nothing_is_flushed() {
        let mut cq = Fixture::new();
        let queues = Arc::new(Queues::fixture(&cq.shared, &CAPS, 7));
        cq.attach(7, &queues, true, true);
        queues.receive(1);
        assert_eq!(worker_status::POLLING, 0);
        assert_eq!(cq.poll(), []);
    }

    #[test]
    fn the_kind_of_a_header_is_told_as_service_level() {
        let of = |wc_flags| {
            let mut cqe = Cqe {
                sl: 3,
                wc_flags,
                ..Cqe::default()
            };
            tell_header_type(&mut cqe);
            (cqe.sl, cqe.wc_flags)
        };
        let (grh, imm) = (wc_flag::GRH, wc_flag::WITH_IMM);
        assert_eq!(of(grh | imm), (IPV6_HEADER, grh | imm));
        assert_eq!(of(grh | imm | wc_flag::IPV4), (IPV4_HEADER, grh | imm));
    }
}
