// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How fast the device is between two bare VMs, beside a plain memcpy of the same sizes.
//!
//!     cargo build --release -p vhost-device-rdma
//!     cargo run --release -p vhost-device-rdma-bare --example perf [-- further options of the device]
use std::hint::black_box;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::core::buffer::QpCaps;
use vhost_device_rdma_bare::spec::ring::{Cqe, SendWqe};
use vhost_device_rdma_bare::spec::verbs::{access, wc_status, wr_opcode};
use vhost_device_rdma_bare::{
    Connection, Context, Cq, DeviceProcess, Error, Mr, Pd, ProcessOptions, Qp, QpOptions, Vm,
    VmOptions,
};

const DEPTH: u32 = 512;
const MEMORY: usize = 8 << 20;

struct Side {
    qp: Qp,
    mr: Mr,
}

fn side(process: &DeviceProcess, vm: usize) -> Result<Side, Error> {
    let vm = Vm::connect(process.socket(vm), VmOptions::default())?;
    let context = Context::new(&vm)?;
    let pd = Pd::new(&vm)?;
    let send_cq = Cq::new(&vm, DEPTH, 0)?;
    let recv_cq = Cq::new(&vm, DEPTH, 1)?;
    let caps = QpCaps {
        max_send_wr: DEPTH,
        max_recv_wr: DEPTH,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };
    let options = QpOptions {
        caps,
        signal_all: true,
        ..QpOptions::default()
    };
    let qp = Qp::new(&context, &pd, &send_cq, &recv_cq, &options)?;
    let mr = pd.register(
        MEMORY,
        access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ,
    )?;
    Ok(Side { qp, mr })
}

fn wqe(opcode: u8, peer: &Side) -> SendWqe {
    SendWqe {
        opcode,
        remote_addr: peer.mr.iova,
        rkey: peer.mr.rkey,
        ..SendWqe::default()
    }
}

/// One at a time: median and 99th percentile of post to completion.
fn latency(a: &Side, b: &Side, opcode: u8, size: u32) -> Result<(Duration, Duration), Error> {
    let rounds = 20_000;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        a.qp.post_send(&wqe(opcode, b), &[a.mr.sge(0, size)])?;
        let cqe = a.qp.send_cq().wait(Duration::from_secs(10))?;
        assert_eq!(cqe.status, wc_status::SUCCESS);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok((times[rounds / 2], times[rounds * 99 / 100]))
}

/// Many outstanding, posted in lists: messages per second.
fn rate(a: &Side, b: &Side, opcode: u8, size: u32, list: u32) -> Result<f64, Error> {
    let duration = Duration::from_millis(700);
    let mut completions = [Cqe::default(); 64];
    let (mut posted, mut done) = (0u64, 0u64);
    let start = Instant::now();
    loop {
        let running = start.elapsed() < duration;
        if running && posted - done + u64::from(list) <= u64::from(DEPTH) {
            let mut batch = a.qp.send_queue().batch();
            for _ in 0..list {
                batch.push(&wqe(opcode, b), [a.mr.sge(0, size)])?;
            }
            batch.commit();
            a.qp.ring()?;
            posted += u64::from(list);
        }
        let count = a.qp.send_cq().poll_many(&mut completions);
        for cqe in &completions[..count] {
            assert_eq!(cqe.status, wc_status::SUCCESS);
        }
        done += count as u64;
        if !running && done == posted {
            break;
        }
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

fn memcpy(size: usize) -> f64 {
    let from = vec![1u8; size];
    // Not at the same offset in a page: processors do not like that.
    let mut to = vec![0u8; size + 1024];
    let start = Instant::now();
    let mut rounds = 0u64;
    while start.elapsed() < Duration::from_millis(300) {
        for _ in 0..16 {
            black_box(&mut to[1024..]).copy_from_slice(black_box(&from[..]));
        }
        rounds += 16;
    }
    rounds as f64 * size as f64 / start.elapsed().as_secs_f64()
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let process = DeviceProcess::start(&ProcessOptions::vms(2).arguments(&arguments))?;
    let (a, b) = (side(&process, 0)?, side(&process, 1)?);
    a.qp.connect(&Connection::to(&b.qp))?;
    b.qp.connect(&Connection::to(&a.qp))?;

    for (name, opcode) in [
        ("write", wr_opcode::RDMA_WRITE),
        ("read", wr_opcode::RDMA_READ),
    ] {
        for size in [8, 4096] {
            let (median, p99) = latency(&a, &b, opcode, size)?;
            println!("{name:5} {size:>8} B  latency {median:>10.2?}  (99 %: {p99:.2?})");
        }
    }
    for list in [1, 32] {
        let rate = rate(&a, &b, wr_opcode::RDMA_WRITE, 64, list)?;
        println!(
            "write       64 B  in lists of {list:2}: {:>8.2} million/s",
            rate / 1e6
        );
    }
    for size in [4096u32, 65536, 1 << 20, 8 << 20] {
        let write = rate(&a, &b, wr_opcode::RDMA_WRITE, size, 1)? * f64::from(size);
        let read = rate(&a, &b, wr_opcode::RDMA_READ, size, 1)? * f64::from(size);
        let copy = memcpy(size as usize);
        println!(
            "      {size:>8} B  write {:>6.2} GB/s  read {:>6.2} GB/s  (memcpy {:>6.2} GB/s)",
            write / 1e9,
            read / 1e9,
            copy / 1e9
        );
    }
    Ok(())
}
