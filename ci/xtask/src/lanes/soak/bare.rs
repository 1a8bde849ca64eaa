// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verified traffic between two guests that are no VMs: drivers of `guest-driver/bare` on sockets
//! of the same device process.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use vhost_device_rdma_bare as bare;
use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::verbs::{access, wc_status};

use virtio_rdma_hostile::{Random, Side, SideOptions};

/// How long one operation may take on a busy machine.
const OPERATION: Duration = Duration::from_secs(60);

/// The largest block, bytes, and what is registered.
const BLOCK: usize = 64 << 10;
const MEMORY: usize = 4 * BLOCK;

/// What the traffic shares with those who disturb it.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Connections are to be broken, as by a QEMU that is killed.
    kill: AtomicBool,
    /// No connection lives now.
    idle: AtomicBool,
    /// The device process is away, or will be at once.
    away: AtomicBool,
    /// Rises with each disturbance.
    disturbances: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    corrupt: AtomicU64,
    lost: AtomicU64,
    messages: Mutex<Vec<String>>,
}

/// The traffic.
pub struct Traffic {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What it has seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Verified blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that were not as sent.
    pub corrupt: u64,
    /// Operations that failed though nobody disturbed them.
    pub lost: u64,
    /// What went wrong.
    pub messages: Vec<String>,
}

/// A block that was not as sent.
#[derive(Debug)]
struct Corrupt(String);

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Corrupt {}

impl Traffic {
    /// Starts it between the guests behind two sockets.
    pub fn start(sockets: [PathBuf; 2], seed: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = std::thread::spawn(move || run(&sockets, &of_thread, Random::new(seed)));
        Traffic {
            shared,
            thread: Some(thread),
        }
    }

    /// The device process goes away: what fails until [`Self::device_is_back`] is no loss.
    pub fn device_goes(&self) {
        self.shared.away.store(true, Ordering::SeqCst);
        self.shared.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// The device process is there again.
    pub fn device_is_back(&self) {
        self.shared.disturbances.fetch_add(1, Ordering::SeqCst);
        self.shared.away.store(false, Ordering::SeqCst);
    }

    /// Breaks the guests' connections in the middle of what they do; they come back by themselves.
    pub fn kill(&self) {
        self.shared.disturbances.fetch_add(1, Ordering::SeqCst);
        self.shared.kill.store(true, Ordering::SeqCst);
    }

    /// How many blocks were verified.
    pub fn blocks(&self) -> u64 {
        self.shared.blocks.load(Ordering::SeqCst)
    }

    /// Waits until some more blocks are verified.
    pub fn wait_moving(&self) -> Result<()> {
        let start = Instant::now();
        let before = self.blocks();
        while self.blocks() < before + 10 {
            ensure!(
                start.elapsed() < OPERATION,
                "the bare guests move nothing: {:?}",
                self.messages()
            );
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn messages(&self) -> Vec<String> {
        let messages = self.shared.messages.lock();
        messages.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it; the guests destroy what they have.
    pub fn stop(mut self) -> Result<Seen> {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            ensure!(ended.is_ok(), "the bare guests' thread panicked");
        }
        let of = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        Ok(Seen {
            blocks: of(&self.shared.blocks),
            bytes: of(&self.shared.bytes),
            corrupt: of(&self.shared.corrupt),
            lost: of(&self.shared.lost),
            messages: self.messages(),
        })
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A panic in it was its own.
            let _ = thread.join();
        }
    }
}

fn run(sockets: &[PathBuf; 2], shared: &Shared, mut random: Random) {
    while !shared.stop.load(Ordering::SeqCst) {
        let disturbances = shared.disturbances.load(Ordering::SeqCst);
        let away = shared.away.load(Ordering::SeqCst);
        let Err(error) = connected(sockets, shared, &mut random) else {
            continue;
        };
        let corrupt = error.downcast_ref::<Corrupt>().is_some();
        let disturbed = away
            || shared.away.load(Ordering::SeqCst)
            || shared.disturbances.load(Ordering::SeqCst) != disturbances;
        let counter = match (corrupt, disturbed) {
            (true, _) => &shared.corrupt,
            (false, true) => {
                sleep(Duration::from_millis(100));
                continue;
            }
            (false, false) => &shared.lost,
        };
        counter.fetch_add(1, Ordering::SeqCst);
        let messages = shared.messages.lock();
        let mut messages = messages.unwrap_or_else(PoisonError::into_inner);
        if messages.len() < 20 {
            messages.push(format!("{error:#}"));
        }
        drop(messages);
        sleep(Duration::from_millis(500));
    }
    shared.idle.store(true, Ordering::SeqCst);
}

/// A guest with one queue pair.
fn side(socket: &Path) -> Result<(Side, Arc<bare::Vm>)> {
    let options = bare::VmOptions {
        timeout: Duration::from_secs(10),
        ..bare::VmOptions::default()
    };
    let vm = bare::Vm::connect(socket, options)?;
    let options = SideOptions {
        qp: bare::QpOptions {
            caps: QpCaps {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
            },
            signal_all: true,
            ..bare::QpOptions::default()
        },
        cqe: 64,
        memory: MEMORY,
    };
    Ok((Side::new(&vm, &options)?, vm))
}

/// Waits for completions, as long as the device is not gone.
struct Wait<'a> {
    shared: &'a Shared,
    /// As it was when the guests connected.
    disturbances: u64,
}

impl Wait<'_> {
    fn done(&self, cq: &bare::Cq, wr_id: u64) -> Result<()> {
        const A_WHILE: Duration = Duration::from_millis(500);
        let start = Instant::now();
        let cqe = loop {
            match cq.wait(A_WHILE) {
                Err(bare::Error::Timeout) => {}
                ended => break ended?,
            }
            let now = self.shared.disturbances.load(Ordering::SeqCst);
            ensure!(
                now == self.disturbances && start.elapsed() < OPERATION,
                "no completion of {wr_id}"
            );
        };
        ensure!(
            cqe.status == wc_status::SUCCESS && cqe.wr_id == wr_id,
            "completion of {} with status {} where {wr_id} is due",
            cqe.wr_id,
            cqe.status
        );
        Ok(())
    }
}

/// Connects, and moves data until somebody stops it.
fn connected(sockets: &[PathBuf; 2], shared: &Shared, random: &mut Random) -> Result<()> {
    let wait = Wait {
        shared,
        disturbances: shared.disturbances.load(Ordering::SeqCst),
    };
    let [(a, a_vm), (b, b_vm)] = [side(&sockets[0])?, side(&sockets[1])?];
    for (from, to) in [(&a, &b), (&b, &a)] {
        from.qp.connect(&bare::Connection::to(&to.qp))?;
    }
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.kill.swap(false, Ordering::SeqCst) {
            // With an operation under way, which nobody waits for.
            a.qp.write(9, &[a.mr.sge(0, BLOCK as u32)], b.mr.iova, b.mr.rkey)?;
            a_vm.kill();
            b_vm.kill();
            return Ok(());
        }
        let (from, to) = if random.below(2) == 0 {
            (&a, &b)
        } else {
            (&b, &a)
        };
        let length = 1 + random.below(BLOCK as u64) as usize;
        round(&wait, from, to, length, random)?;
        shared.blocks.fetch_add(1, Ordering::SeqCst);
        shared.bytes.fetch_add(length as u64, Ordering::SeqCst);
        // There is work for others, too.
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// A block there by WRITE or SEND, and back by READ.
fn round(
    wait: &Wait<'_>,
    from: &Side,
    to: &Side,
    length: usize,
    random: &mut Random,
) -> Result<()> {
    let data = random.bytes(length);
    let size = u32::try_from(length)?;
    let target = BLOCK as u64;
    from.mr.write(0, &data);
    let sge = [from.mr.sge(0, size)];
    if random.below(2) == 0 {
        from.qp.write(1, &sge, to.mr.iova + target, to.mr.rkey)?;
        wait.done(&from.send_cq, 1)?;
    } else {
        to.qp.post_recv(2, &[to.mr.sge(target, BLOCK as u32)])?;
        from.qp.send(1, &sge)?;
        wait.done(&from.send_cq, 1)?;
        wait.done(&to.recv_cq, 2)?;
    }
    same(&data, &to.mr.read(BLOCK, length), "where it was sent to")?;
    let back = [from.mr.sge(2 * target, size)];
    from.qp.read(3, &back, to.mr.iova + target, to.mr.rkey)?;
    wait.done(&from.send_cq, 3)?;
    same(&data, &from.mr.read(2 * BLOCK, length), "read back")
}

fn same(wanted: &[u8], found: &[u8], place: &str) -> Result<()> {
    match wanted.iter().zip(found).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(anyhow::Error::new(Corrupt(format!(
            "a block of {} bytes differs from byte {at} on, {place}",
            wanted.len()
        )))),
    }
}

/// A guest that creates objects until the device or its memory has no room; returns how many of
/// each kind. All are destroyed.
pub fn limits(socket: &Path) -> Result<[usize; 3]> {
    let vm = bare::Vm::connect(socket, bare::VmOptions::default())?;
    let pds = until_refused(|| bare::Pd::new(&vm))?;
    let pd = pds.first().context("no protection domain")?.clone();
    // One kind after the other: each takes all of the guest's memory.
    let mrs = until_refused(|| pd.register(bare::PAGE, access::LOCAL_WRITE))?.len();
    let cqs = until_refused(|| bare::Cq::new(&vm, 16, 0))?.len();
    Ok([pds.len(), mrs, cqs])
}

/// As many are enough, where nobody refuses.
const MANY: usize = 100_000;

fn until_refused<T>(mut make: impl FnMut() -> Result<T, bare::Error>) -> Result<Vec<T>> {
    let mut made = Vec::new();
    while made.len() < MANY {
        match make() {
            Ok(one) => made.push(one),
            Err(bare::Error::NoMemory | bare::Error::Command(_)) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(made)
}
