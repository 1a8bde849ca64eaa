// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Probes (USDT) for bpftrace, perf and gdb. Where nobody looks, each is an instruction that does
//! nothing, and what it takes to have its arguments in registers; off the data path, in a function of
//! its own. A note in the binary says where it is, and where the arguments are.
//!
//! All of them are here, so that their names and arguments can be compared with the table in
//! docs/operating.md, which `tests/probes.rs` does. Text is two arguments: where it is, and its length.
use probe::probe;

use crate::verbs::WcError;

// None may be in a function of which the linker drops a copy: its note would stay, and lead nowhere. So
// each is a function of its own, or is in one of a worker that is not inlined.

/// A worker looks for work, and carries it out.
#[inline(always)]
pub(crate) fn turn_begin(worker: u16) {
    probe!(vhost_device_rdma, turn_begin, worker);
}

/// It has, with so many polls of queue pairs.
#[inline(always)]
pub(crate) fn turn_end(worker: u16, polls: u64) {
    probe!(vhost_device_rdma, turn_end, worker, polls);
}

/// A worker is about to wait in the kernel.
#[inline(always)]
pub(crate) fn sleep(worker: u16) {
    probe!(vhost_device_rdma, sleep, worker);
}

/// It has waited.
#[inline(always)]
pub(crate) fn wake(worker: u16) {
    probe!(vhost_device_rdma, wake, worker);
}

/// A work request of a queue pair is about to complete in error.
#[cold]
#[inline(never)]
pub(crate) fn completion_error(vm: &str, qp: u32, error: WcError) {
    let (name, length) = (vm.as_ptr(), vm.len());
    probe!(
        vhost_device_rdma,
        completion_error,
        name,
        length,
        qp,
        error.status,
        error.vendor
    );
}

/// A command was carried out, or refused.
#[cold]
#[inline(never)]
pub(crate) fn command(vm: &str, opcode: u16, status: u16) {
    let (name, length) = (vm.as_ptr(), vm.len());
    probe!(vhost_device_rdma, command, name, length, opcode, status);
}

/// The peer of a queue pair had no receive for the packet `psn`.
#[cold]
#[inline(never)]
pub(crate) fn wire_rnr(vm: &str, qp: u32, psn: u32) {
    let (name, length) = (vm.as_ptr(), vm.len());
    probe!(vhost_device_rdma, wire_rnr, name, length, qp, psn);
}

/// No answer to the packet `psn` of a queue pair came in time: it is sent again, and all after it.
#[cold]
#[inline(never)]
pub(crate) fn wire_retry(vm: &str, qp: u32, psn: u32) {
    let (name, length) = (vm.as_ptr(), vm.len());
    probe!(vhost_device_rdma, wire_retry, name, length, qp, psn);
}
