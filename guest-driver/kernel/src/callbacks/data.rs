// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The data path of users in the kernel, as the RDMA core calls it: lists of work requests, and
//! completions.
//!
//! Every function here is called with objects that were created, by users that keep the rules of
//! verbs for what they pass; that is the safety requirement of all of them. Any context.
use super::{device, Object};
use crate::kverbs::{KernelCq, KernelQp, Polled, Sends};
use crate::sys::bindings::*;
use crate::sys::dma::Words;
use crate::sys::error::{code, Errno, Result};
use crate::verbs::Mr;
use core::ffi::c_int;
use core::ptr::NonNull;
use virtio_rdma_driver_core::{ArmMode, Record, RecvBatch, SendEntry};
use virtio_rdma_spec::facts::{Imm, Kind, Opcode};
use virtio_rdma_spec::ring::{FastReg, MaskedOperands, SendWqe, Sge, UdWqe};
use virtio_rdma_spec::verbs::{send_flag, wc_flag, wc_opcode, wc_status, wr_opcode};

/// Flags of send work requests that mean the same to the device.
const SEND_FLAGS: u8 =
    send_flag::FENCE | send_flag::SIGNALED | send_flag::SOLICITED | send_flag::INLINE;

/// The highest VLAN id.
const MAX_VLAN: u16 = 4094;

const _: () = {
    assert!(IB_SEND_FENCE as u8 == send_flag::FENCE);
    assert!(IB_SEND_SIGNALED as u8 == send_flag::SIGNALED);
    assert!(IB_SEND_SOLICITED as u8 == send_flag::SOLICITED);
    assert!(IB_SEND_INLINE as u8 == send_flag::INLINE);
    assert!(IB_WR_RDMA_WRITE == wr_opcode::RDMA_WRITE as u32);
    assert!(IB_WR_ATOMIC_WRITE == wr_opcode::ATOMIC_WRITE as u32);
    assert!(IB_WR_REG_MR == wr_opcode::REG_MR as u32);
};

/// # Safety
/// `qp` must be a queue pair that was created.
unsafe fn kernel_qp<'a>(qp: *mut ib_qp) -> Result<&'a KernelQp> {
    let qp = NonNull::new(qp).ok_or(Errno::EINVAL)?;
    // SAFETY: the caller's.
    unsafe { Object::data(qp) }.kernel().ok_or(Errno::EINVAL)
}

/// # Safety
/// `cq` must be a completion queue that was created.
unsafe fn kernel_cq<'a>(cq: *mut ib_cq) -> Result<&'a KernelCq> {
    let cq = NonNull::new(cq).ok_or(Errno::EINVAL)?;
    // SAFETY: the caller's.
    let kernel = unsafe { Object::data(cq) }.kernel();
    kernel.map(|cq| &**cq).ok_or(Errno::EINVAL)
}

/// The scatter/gather list of a work request.
///
/// # Safety
/// `list` must have as many entries, as long as the result is used.
unsafe fn sg_list<'a>(list: *const ib_sge, count: c_int) -> &'a [ib_sge] {
    match usize::try_from(count) {
        // SAFETY: the caller's.
        Ok(count) if count > 0 && !list.is_null() => unsafe {
            core::slice::from_raw_parts(list, count)
        },
        _ => &[],
    }
}

fn sges(list: &[ib_sge]) -> impl Iterator<Item = Sge> + '_ {
    list.iter().map(|sge| Sge {
        addr: sge.addr,
        length: sge.length,
        lkey: sge.lkey,
    })
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ib_qp,
    list: *const ib_send_wr,
    bad: *mut *const ib_send_wr,
) -> c_int {
    let mut at = list;
    // SAFETY: see the module.
    let result = unsafe {
        kernel_qp(qp).and_then(|kernel| {
            let device = device((*qp).device)?;
            let lost = device.is_lost();
            let result = kernel.post_send(|batch| {
                while let Some(wr) = at.as_ref() {
                    if lost && kernel.is_repeated(wr.__bindgen_anon_1.wr_id) {
                        return Err(Errno::ENETDOWN);
                    }
                    if kernel.is_datagram() {
                        push_datagram(batch, wr)?;
                    } else if wr.opcode == IB_WR_REG_MR {
                        push_registration(batch, kernel, (*(*qp).pd).local_dma_lkey, wr)?;
                    } else {
                        push_message(batch, wr)?;
                    }
                    at = wr.next;
                }
                Ok(())
            });
            device.posted();
            result
        })
    };
    if result.is_err() && !bad.is_null() {
        // SAFETY: a place to write to.
        unsafe { *bad = at };
    }
    code(result)
}

/// Adds the entry with the scatter/gather list or the inline data of a work request.
///
/// # Safety
/// The work request must be valid; with IB_SEND_INLINE its addresses are the kernel's own.
unsafe fn push<E: SendEntry>(batch: &mut Sends<'_>, wr: &ib_send_wr, entry: &E) -> Result<()> {
    // SAFETY: the caller's.
    let list = unsafe { sg_list(wr.sg_list, wr.num_sge) };
    if entry.flags() & send_flag::INLINE == 0 {
        return Ok(batch.push(entry, sges(list))?);
    }
    let parts = list.iter().filter(|sge| sge.length != 0).map(|sge| {
        // SAFETY: the caller's.
        unsafe { core::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) }
    });
    Ok(batch.push_inline(entry, parts)?)
}

/// Opcode, flags and immediate data (or key to invalidate) as the device has them.
fn head(wr: &ib_send_wr) -> Result<(u8, u8, u32)> {
    let flags = u8::try_from(wr.send_flags).map_err(|_| Errno::EINVAL)?;
    if flags & !SEND_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let opcode = u8::try_from(wr.opcode).map_err(|_| Errno::EINVAL)?;
    let imm = match Opcode::of(opcode).map_or(Imm::None, |of| of.imm) {
        // SAFETY: both are four bytes; which it is the opcode says. Immediate data are octets to
        // us.
        Imm::Data => unsafe { u32::from_le(wr.ex.imm_data) },
        // SAFETY: as above.
        Imm::RemoteKey | Imm::LocalKey => unsafe { wr.ex.invalidate_rkey },
        Imm::None => 0,
    };
    Ok((opcode, flags, imm))
}

/// # Safety
/// The work request must be valid for a connected queue pair.
unsafe fn push_message(batch: &mut Sends<'_>, wr: &ib_send_wr) -> Result<()> {
    let (opcode, flags, imm) = head(wr)?;
    let of = Opcode::of(opcode).ok_or(Errno::EINVAL)?;
    let mut entry = SendWqe {
        opcode,
        flags,
        imm,
        // SAFETY: eight bytes, whatever they mean to the user.
        wr_id: unsafe { wr.__bindgen_anon_1.wr_id },
        ..Default::default()
    };
    let wr_ptr: *const ib_send_wr = wr;
    // SAFETY: of these opcodes the work request is the start of a longer structure.
    unsafe {
        match of.kind {
            Kind::Send | Kind::Invalidate => {}
            Kind::Write | Kind::Read | Kind::AtomicWrite => {
                // The device invalidates the key that it reads with. The core's rdma_rw_ctx changes the
                // last octet of that after it has copied it.
                if of.invalidates_sink {
                    match sg_list(wr.sg_list, wr.num_sge) {
                        [sge] if (sge.lkey ^ wr.ex.invalidate_rkey) & !0xff == 0 => {}
                        _ => return Err(Errno::EINVAL),
                    }
                }
                let rdma = &*wr_ptr.cast::<ib_rdma_wr>();
                entry.remote_addr = rdma.remote_addr;
                entry.rkey = rdma.rkey;
            }
            Kind::Atomic => {
                let atomic = &*wr_ptr.cast::<ib_atomic_wr>();
                entry.remote_addr = atomic.remote_addr;
                entry.rkey = atomic.rkey;
                entry.operand0 = atomic.compare_add;
                entry.operand1 = atomic.swap;
                let masked = opcode == wr_opcode::MASKED_ATOMIC_CMP_AND_SWP
                    || opcode == wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD;
                if masked {
                    let operands = MaskedOperands {
                        mask0: atomic.compare_add_mask,
                        mask1: atomic.swap_mask,
                    };
                    let list = sg_list(wr.sg_list, wr.num_sge);
                    if list.len() > 1 || flags & send_flag::INLINE != 0 {
                        return Err(Errno::EINVAL);
                    }
                    return Ok(batch.push_masked(&entry, &operands, sges(list).next())?);
                }
            }
            // Users in the kernel have no work requests of these kinds, or another way (`REG_MR`).
            Kind::Flush | Kind::Bind | Kind::Register => return Err(Errno::EINVAL),
        }
        push(batch, wr, &entry)
    }
}

/// Adds the registration of what was mapped into a region. `lkey` is the key of all memory in the
/// queue pair's domain.
///
/// # Safety
/// The work request must be a valid registration; nobody maps into its region meanwhile.
unsafe fn push_registration(
    batch: &mut Sends<'_>,
    kernel: &KernelQp,
    lkey: u32,
    wr: &ib_send_wr,
) -> Result<()> {
    let wr_ptr: *const ib_send_wr = wr;
    let (opcode, flags, _) = head(wr)?;
    // SAFETY: of this opcode the work request is the start of this structure, and its region was
    // created.
    unsafe {
        let registration = &*wr_ptr.cast::<ib_reg_wr>();
        let mr = NonNull::new(registration.mr).ok_or(Errno::EINVAL)?;
        let data: &Mr = Object::data(mr);
        let mapped = data.fast().and_then(|fast| fast.mapped());
        let mapped = mapped.ok_or(Errno::EINVAL)?;
        let entry = SendWqe {
            opcode,
            flags,
            wr_id: wr.__bindgen_anon_1.wr_id,
            ..Default::default()
        };
        let operands = FastReg {
            iova: mr.as_ref().iova,
            key: registration.key,
            access: Mr::known_access(registration.access as u32)?,
            length: mr.as_ref().length,
            pages: mapped.list,
            offset: mapped.offset,
            lkey,
        };
        let index = batch.next_index();
        batch.push_reg(&entry, &operands)?;
        kernel.hold(index, mapped.tables);
    }
    Ok(())
}

/// # Safety
/// The work request must be valid for a datagram queue pair.
unsafe fn push_datagram(batch: &mut Sends<'_>, wr: &ib_send_wr) -> Result<()> {
    let (opcode, flags, imm) = head(wr)?;
    if opcode != wr_opcode::SEND && opcode != wr_opcode::SEND_WITH_IMM {
        return Err(Errno::EINVAL);
    }
    let wr_ptr: *const ib_send_wr = wr;
    // SAFETY: for datagrams the work request is the start of this structure, and the address handle
    // was created.
    unsafe {
        let datagram = &*wr_ptr.cast::<ib_ud_wr>();
        let to = Object::data(NonNull::new(datagram.ah).ok_or(Errno::EINVAL)?).address();
        let entry = UdWqe {
            opcode,
            flags,
            imm,
            wr_id: wr.__bindgen_anon_1.wr_id,
            dgid: to.dgid,
            remote_qpn: datagram.remote_qpn,
            remote_qkey: datagram.remote_qkey,
            flow_label: to.flow_label,
            sgid_index: to.sgid_index,
            sl: to.sl,
            traffic_class: to.traffic_class,
            hop_limit: to.hop_limit,
            dmac: to.dmac,
            pkey_index: datagram.pkey_index,
            ..Default::default()
        };
        push(batch, wr, &entry)
    }
}

/// Adds the work requests of a list; leaves `at` on the first that could not be added.
///
/// # Safety
/// `at` must be a valid list of work requests.
unsafe fn push_receives<R: Record>(
    batch: &mut RecvBatch<'_, Words, R>,
    at: &mut *const ib_recv_wr,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe {
        while let Some(wr) = at.as_ref() {
            let list = sg_list(wr.sg_list, wr.num_sge);
            batch.push(wr.__bindgen_anon_1.wr_id, sges(list))?;
            *at = wr.next;
        }
    }
    Ok(())
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ib_qp,
    list: *const ib_recv_wr,
    bad: *mut *const ib_recv_wr,
) -> c_int {
    let mut at = list;
    // SAFETY: see the module.
    let result = unsafe {
        kernel_qp(qp).and_then(|kernel| {
            let result = kernel.post_recv(|batch| push_receives(batch, &mut at));
            device((*qp).device)?.posted();
            result
        })
    };
    if result.is_err() && !bad.is_null() {
        // SAFETY: a place to write to.
        unsafe { *bad = at };
    }
    code(result)
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ib_srq,
    list: *const ib_recv_wr,
    bad: *mut *const ib_recv_wr,
) -> c_int {
    let mut at = list;
    // SAFETY: see the module.
    let result = unsafe {
        let srq = NonNull::new(srq).and_then(|srq| Object::data(srq).kernel());
        srq.ok_or(Errno::EINVAL)
            .and_then(|kernel| kernel.post(|batch| push_receives(batch, &mut at)))
    };
    if result.is_err() && !bad.is_null() {
        // SAFETY: a place to write to.
        unsafe { *bad = at };
    }
    code(result)
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ib_cq, wanted: c_int, to: *mut ib_wc) -> c_int {
    let wanted = usize::try_from(wanted).unwrap_or(0);
    // SAFETY: see the module; there is room for as many completions as are wanted.
    let taken = unsafe {
        kernel_cq(cq).and_then(|kernel| {
            let device = device((*cq).device)?;
            Ok(kernel.poll(device, wanted, |index, polled| {
                to.add(index).write(completion(polled));
            }))
        })
    };
    match taken {
        Ok(taken) => taken as c_int,
        Err(error) => error.code(),
    }
}

/// A completion as the core has it.
fn completion(polled: &Polled<'_>) -> ib_wc {
    let Polled { cqe, vlan, qp } = polled;
    // SAFETY: plain data for which zero is a value.
    let mut wc: ib_wc = unsafe { core::mem::zeroed() };
    wc.__bindgen_anon_1.wr_id = cqe.wr_id;
    wc.status = status(cqe.status);
    wc.opcode = opcode(cqe.opcode);
    wc.vendor_err = u32::from(cqe.vendor_err);
    wc.byte_len = cqe.byte_len;
    wc.qp = qp.handle().as_ptr();
    wc.src_qp = cqe.src_qp;
    wc.sl = cqe.sl;
    wc.port_num = 1;
    for (flag, meaning) in [
        (wc_flag::GRH, IB_WC_GRH),
        (wc_flag::WITH_IMM, IB_WC_WITH_IMM),
        (wc_flag::WITH_INV, IB_WC_WITH_INVALIDATE),
    ] {
        if cqe.wc_flags & flag != 0 {
            wc.wc_flags |= meaning as c_int;
        }
    }
    // The communication managers answer in the VLAN that they are asked in.
    if let Some(vlan @ 0..=MAX_VLAN) = *vlan {
        if cqe.opcode & wc_opcode::RECV != 0 && cqe.status == wc_status::SUCCESS {
            wc.vlan_id = vlan;
            wc.wc_flags |= IB_WC_WITH_VLAN as c_int;
        }
    }
    if cqe.wc_flags & wc_flag::WITH_INV != 0 {
        wc.ex.invalidate_rkey = cqe.imm;
    } else {
        // Octets as they came.
        wc.ex.imm_data = cqe.imm.to_le();
    }
    wc
}

fn status(status: u8) -> ib_wc_status {
    // The numbers are those of verbs; what has none is an error, too.
    match wc_status::name(status) {
        Some(_) => ib_wc_status::from(status),
        None => IB_WC_GENERAL_ERR,
    }
}

fn opcode(opcode: u8) -> ib_wc_opcode {
    match opcode {
        wc_opcode::RDMA_WRITE => IB_WC_RDMA_WRITE,
        wc_opcode::RDMA_READ => IB_WC_RDMA_READ,
        wc_opcode::COMP_SWAP => IB_WC_COMP_SWAP,
        wc_opcode::FETCH_ADD => IB_WC_FETCH_ADD,
        wc_opcode::BIND_MW => IB_WC_BIND_MW,
        wc_opcode::LOCAL_INV => IB_WC_LOCAL_INV,
        wc_opcode::FLUSH => IB_WC_FLUSH,
        wc_opcode::ATOMIC_WRITE => IB_WC_ATOMIC_WRITE,
        wc_opcode::REG_MR => IB_WC_REG_MR,
        wc_opcode::MASKED_COMP_SWAP => IB_WC_MASKED_COMP_SWAP,
        wc_opcode::MASKED_FETCH_ADD => IB_WC_MASKED_FETCH_ADD,
        wc_opcode::RECV_RDMA_WITH_IMM => IB_WC_RECV_RDMA_WITH_IMM,
        other if other & wc_opcode::RECV != 0 => IB_WC_RECV,
        _ => IB_WC_SEND,
    }
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ib_cq, flags: ib_cq_notify_flags) -> c_int {
    let mode = if flags & IB_CQ_SOLICITED_MASK == IB_CQ_SOLICITED {
        ArmMode::Solicited
    } else {
        ArmMode::Any
    };
    // SAFETY: see the module.
    match unsafe { kernel_cq(cq).and_then(|kernel| Ok((kernel, device((*cq).device)?))) } {
        Ok((kernel, device)) => {
            let missed = kernel.arm(device, mode);
            c_int::from(missed && flags & IB_CQ_REPORT_MISSED_EVENTS != 0)
        }
        Err(error) => error.code(),
    }
}
