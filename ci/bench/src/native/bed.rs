// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the experiments stand on: a device process, VMs on it, queue pairs between them, and how
//! rates are measured.
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _, Result};
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::config::feature;
use vhost_device_rdma_bare::spec::ring::{SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{access, send_flag, wc_status};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, DeviceProcess, FrontEnd, Mr, Pd, Placement, Polling, ProcessOptions,
    Qp, QpOptions, Vm, VmOptions,
};

use super::{pin, settle, Cores};

/// Work requests outstanding when a rate is measured, at most.
pub const DEPTH: u64 = 512;
/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// All that a peer may do.
pub const ALL: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// Starts a device for so many VMs, with its one worker on its core and anything more of a
/// configuration file.
pub fn device(cores: Cores, vms: u8, configuration: &str) -> Result<DeviceProcess> {
    device_with(cores, vms, &one_worker(cores, configuration))
}

/// The same, with the first so many VMs by vfio-user.
pub fn device_of_both(cores: Cores, vms: u8, vfio_user: usize) -> Result<DeviceProcess> {
    let options = ProcessOptions::vms(vms).vfio_user(vfio_user);
    start(cores, options, &one_worker(cores, ""))
}

fn one_worker(cores: Cores, configuration: &str) -> String {
    format!("workers = 1\ncpus = [{}]\n{configuration}", cores.worker)
}

/// Starts a device for so many VMs with such a configuration file.
pub fn device_with(cores: Cores, vms: u8, configuration: &str) -> Result<DeviceProcess> {
    start(cores, ProcessOptions::vms(vms), configuration)
}

fn start(cores: Cores, options: ProcessOptions, configuration: &str) -> Result<DeviceProcess> {
    let path = std::env::temp_dir().join(format!("virtio-rdma-bench-{}.toml", std::process::id()));
    fs::write(&path, configuration).with_context(|| format!("cannot write {}", path.display()))?;
    // Its other threads answer commands, and stay off the core of the worker as long as there is
    // work for that: so they may run on both. Threads inherit what we are pinned to.
    pin(&[cores.driver, cores.worker])?;
    let options = options.arguments(&["--config", path.to_string_lossy().as_ref()]);
    let process = DeviceProcess::start(&options);
    pin(&[cores.driver])?;
    fs::remove_file(&path)?;
    Ok(process?)
}

/// A VM with so much memory, whose buffers are contiguous: there is no limit to their number then.
pub fn vm(process: &DeviceProcess, number: usize, memory: usize) -> Result<Arc<Vm>> {
    vm_with(process, number, memory, Placement::Contiguous)
}

/// A VM with so much memory.
pub fn vm_with(
    process: &DeviceProcess,
    number: usize,
    memory: usize,
    placement: Placement,
) -> Result<Arc<Vm>> {
    vm_on(process, number, memory, placement, false)
}

/// A VM with so much memory, which consists of huge pages of the host or not.
pub fn vm_on(
    process: &DeviceProcess,
    number: usize,
    memory: usize,
    placement: Placement,
    huge_pages: bool,
) -> Result<Arc<Vm>> {
    let options = VmOptions {
        placement,
        huge_pages,
        ..options(memory)
    };
    Ok(Vm::connect(process.socket(number), options)?)
}

/// A VM with so much contiguous memory that has the device in this way.
pub fn vm_by(
    process: &DeviceProcess,
    number: usize,
    memory: usize,
    front_end: FrontEnd,
) -> Result<Arc<Vm>> {
    let options = VmOptions {
        front_end,
        ..options(memory)
    };
    Ok(Vm::connect(process.socket(number), options)?)
}

fn options(memory: usize) -> VmOptions {
    VmOptions {
        memory,
        placement: Placement::Contiguous,
        features: 1 << feature::ATOMIC,
        ..VmOptions::default()
    }
}

/// What a process in a VM has, but for its queue pairs.
pub struct Side {
    /// Memory.
    pub mr: Mr,
    /// Where sends complete.
    pub send_cq: Arc<Cq>,
    /// Where receives complete.
    pub recv_cq: Arc<Cq>,
    /// Its protection domain.
    pub pd: Arc<Pd>,
    /// Its doorbells.
    pub context: Arc<Context>,
    /// The VM.
    pub vm: Arc<Vm>,
}

impl Side {
    /// With so many bytes of memory registered.
    pub fn new(vm: &Arc<Vm>, memory: usize) -> Result<Self> {
        let context = Context::new(vm)?;
        let pd = Pd::new(vm)?;
        Ok(Self {
            mr: pd.register(memory, ALL)?,
            send_cq: Cq::new(vm, 2 * DEPTH as u32, 0)?,
            recv_cq: Cq::new(vm, 2 * DEPTH as u32, 1)?,
            pd,
            context,
            vm: vm.clone(),
        })
    }

    /// A queue pair with queues of so many entries, which signals what is asked to be.
    pub fn qp(&self, send: u32, recv: u32) -> Result<Qp> {
        let options = QpOptions {
            caps: QpCaps {
                max_send_wr: send,
                max_recv_wr: recv,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 16,
            },
            signal_all: false,
            ..QpOptions::default()
        };
        Ok(Qp::new(
            &self.context,
            &self.pd,
            &self.send_cq,
            &self.recv_cq,
            &options,
        )?)
    }
}

/// Connects two queue pairs.
pub fn connect(a: &Qp, b: &Qp) -> Result<()> {
    for (from, to) in [(a, b), (b, a)] {
        from.connect(&to_peer(to))?;
    }
    Ok(())
}

/// To a peer that may do everything.
pub fn to_peer(peer: &Qp) -> Connection {
    Connection {
        access: access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC,
        ..Connection::to(peer)
    }
}

/// Two VMs with a connected queue pair each.
pub struct Pair {
    // Dropped in this order: each before what it needs.
    /// Queue pair of the first.
    pub a_qp: Qp,
    /// Queue pair of the second.
    pub b_qp: Qp,
    /// The first.
    pub a: Side,
    /// The second.
    pub b: Side,
}

impl Pair {
    /// Between two VMs, with so many bytes registered in each.
    pub fn new(a: &Arc<Vm>, b: &Arc<Vm>, memory: usize) -> Result<Self> {
        let (a, b) = (Side::new(a, memory)?, Side::new(b, memory)?);
        let (a_qp, b_qp) = (
            a.qp(DEPTH as u32, DEPTH as u32)?,
            b.qp(DEPTH as u32, DEPTH as u32)?,
        );
        connect(&a_qp, &b_qp)?;
        Ok(Self { a_qp, b_qp, a, b })
    }

    /// A work request from the start of the first's memory to the start of the second's, or the
    /// other way.
    pub fn wqe(&self, opcode: u8) -> SendWqe {
        SendWqe {
            opcode,
            remote_addr: self.b.mr.iova,
            rkey: self.b.mr.rkey,
            ..SendWqe::default()
        }
    }
}

/// The same work request, signalled.
pub fn signaled(wqe: SendWqe) -> SendWqe {
    SendWqe {
        flags: wqe.flags | send_flag::SIGNALED,
        ..wqe
    }
}

/// Waits for a completion by looking for it all the time, and frees what it completes.
#[inline(always)]
pub fn wait(polling: &Polling<'_>, qp: &Qp) -> Result<()> {
    let mut spins = 0u32;
    let cqe = loop {
        if let Some(cqe) = polling.poll() {
            break cqe;
        }
        spins = spins.wrapping_add(1);
        // The clock is not looked at all the time: that would be half of what is measured.
        ensure!(spins != u32::MAX, "no completion");
    };
    polling.publish();
    qp.send_queue().complete(cqe.wqe_index);
    ensure!(
        cqe.status == wc_status::SUCCESS,
        "a completion with status {}",
        cqe.status
    );
    Ok(())
}

/// Posts one work request and waits for its completion.
#[inline(always)]
pub fn round(polling: &Polling<'_>, qp: &Qp, wqe: &SendWqe, sge: Sge) -> Result<()> {
    qp.send_queue().post(wqe, [sge])?;
    qp.ring()?;
    wait(polling, qp)
}

/// Posts a list of which the last is signalled.
#[inline(always)]
pub fn post_list(qp: &Qp, list: u64, mut next: impl FnMut() -> (SendWqe, Sge)) -> Result<()> {
    let mut batch = qp.send_queue().batch();
    for i in 1..=list {
        let (mut wqe, sge) = next();
        if i == list {
            wqe.flags |= send_flag::SIGNALED;
        }
        batch.push(&wqe, [sge])?;
    }
    batch.commit();
    qp.ring()?;
    Ok(())
}

/// Polls what there is, up to 64, and frees it; returns how many lists of work requests have
/// completed.
#[inline(always)]
pub fn poll_lists<'q>(polling: &Polling<'_>, qp: impl Fn(u64) -> Option<&'q Qp>) -> Result<u64> {
    let mut count = 0;
    while count < 64 {
        let Some(cqe) = polling.poll() else {
            break;
        };
        ensure!(
            cqe.status == wc_status::SUCCESS,
            "a completion with status {}",
            cqe.status
        );
        if let Some(qp) = qp(cqe.wr_id) {
            qp.send_queue().complete(cqe.wqe_index);
        }
        count += 1;
    }
    if count > 0 {
        polling.publish();
    }
    Ok(count)
}

/// Millions of work requests per second, with [`DEPTH`] outstanding: posts while there is room,
/// then polls once, and again.
///
/// `post` posts so many, `poll` returns how many have completed.
pub fn measure_rate<S>(
    state: &mut S,
    list: u64,
    time: Duration,
    post: impl FnMut(&mut S) -> Result<()>,
    poll: impl FnMut(&mut S) -> Result<u64>,
) -> Result<f64> {
    measure_rate_of(state, list, DEPTH, time, post, poll)
}

/// As [`measure_rate`], with another number outstanding.
pub fn measure_rate_of<S>(
    state: &mut S,
    list: u64,
    depth: u64,
    time: Duration,
    mut post: impl FnMut(&mut S) -> Result<()>,
    mut poll: impl FnMut(&mut S) -> Result<u64>,
) -> Result<f64> {
    settle();
    let (mut posted, mut done) = (0u64, 0u64);
    // The first fifth is for warming up.
    let begin = Instant::now();
    let mut start = None;
    let (elapsed, counted) = loop {
        for _ in 0..16 {
            while posted - done + list <= depth {
                post(state)?;
                posted += list;
            }
            done += poll(state)?;
        }
        let now = Instant::now();
        match start {
            None if now - begin >= time / 5 => start = Some((now, done)),
            Some((from, before)) if now - begin >= time + time / 5 && done > before => {
                break (now - from, done - before);
            }
            _ => ensure!(now - begin < TIMEOUT, "completions do not come"),
        }
    };
    while done < posted {
        done += poll(state)?;
        ensure!(begin.elapsed() < 2 * TIMEOUT, "completions do not come");
    }
    Ok(counted as f64 / elapsed.as_secs_f64() / 1e6)
}
