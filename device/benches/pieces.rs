// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pieces of the way of a message and of a command, one by one, so that a regression names its
//! culprit.
mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Bed, Flow, WORKLOADS};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use vhost_device_rdma::engine::BUDGET;
use vhost_device_rdma::footprint::Footprint;
use vhost_device_rdma::limits::Limits;
use vhost_device_rdma::memory::{
    copy, copy_last, copy_scattered, ContiguousRange, Form, GuestMemory, ListReader, Pages,
    RegionInfo, ScatterRange, Source, Way,
};
use vhost_device_rdma::verbs::cq::{Cq, CqRing, Pushed, STRIDES};
use vhost_device_rdma::verbs::keys::{CachedRange, Keys};
use vhost_device_rdma::verbs::mr::{Backing, Mr};
use vhost_device_rdma::verbs::work_queue::WorkQueue;
use vhost_device_rdma_bare::core::pages::PageTree;
use vhost_device_rdma_bare::spec::command::PageList;
use vhost_device_rdma_bare::spec::layout::Layout;
use vhost_device_rdma_bare::spec::ring::{Cqe, RecvWqe, SendWqe, Sge, PHASE, SEND_DATA_OFFSET};
use vhost_device_rdma_bare::spec::verbs::{access, wr_opcode};
use vmm_sys_util::tempfile::TempFile;

const PAGE: u64 = 4096;

/// Guest memory of `pages` pages.
fn memory(pages: u64) -> GuestMemory {
    let file = TempFile::new().expect("a file").into_file();
    file.set_len(pages * PAGE).expect("a size");
    GuestMemory::new(vec![RegionInfo {
        guest_addr: 0,
        size: pages * PAGE,
        fd_offset: 0,
        file,
    }])
    .expect("memory")
}

/// `count` of `pages` pages in an order without runs.
fn scattered(count: u64, pages: u64) -> Vec<u64> {
    // A prime number.
    (0..count).map(|i| i * 1009 % pages * PAGE).collect()
}

/// Writes a page list of `addresses` at `at` of guest memory.
fn write_list(memory: &GuestMemory, at: u64, addresses: &[u64]) -> PageList {
    let tree = PageTree::new(addresses.len() as u64).expect("a tree");
    let put = |table: u32, index: u32, value: u64| {
        let addr = at + u64::from(table) * PAGE + 8 * u64::from(index);
        let range = memory.range_at(addr, 8).expect("a table");
        let word = range.word().expect("a word");
        word.store(value.to_le(), std::sync::atomic::Ordering::Relaxed);
    };
    let mut list = PageList {
        count: tree.count(),
        levels: tree.levels(),
        page_shift: 12,
        ..PageList::default()
    };
    for (page, addr) in (0..).zip(addresses) {
        if let Some(slot) = tree.page_slot(page) {
            put(slot.table, slot.index, *addr);
        }
    }
    for table in 0..tree.tables() {
        let addr = at + u64::from(table) * PAGE;
        match tree.table_slot(table) {
            Some(slot) => put(slot.table, slot.index, addr),
            None => list.addr = addr,
        }
    }
    list
}

/// Page lists of regions, from the tables in guest memory to host addresses.
fn page_lists(c: &mut Criterion) {
    let mut group = c.benchmark_group("page list");
    for pages in [1u64, 512, 262_144] {
        let total = 2 * pages + 1024;
        let memory = memory(total);
        let account = Footprint::default();
        let addresses = scattered(pages, pages);
        let list = if pages == 1 {
            PageList {
                addr: addresses[0],
                count: 1,
                page_shift: 12,
                ..PageList::default()
            }
        } else {
            write_list(&memory, pages * PAGE, &addresses)
        };
        group.throughput(Throughput::Elements(pages));
        group.bench_function(BenchmarkId::from_parameter(pages), |b| {
            b.iter_batched(
                || (),
                |()| Pages::read(&memory, black_box(&list), &account).expect("pages"),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

/// The same for registrations by work requests: poll by poll. And what is given back when they are
/// invalidated.
fn page_lists_by_polls(c: &mut Criterion) {
    let pages = 1 << 20;
    let memory = memory(2 * pages + 4096);
    let addresses = scattered(pages, pages);
    let list = write_list(&memory, pages * PAGE, &addresses);
    let most = (BUDGET.bytes / Form::Pages.entry_size()) as usize;
    let account = Footprint::default();
    let reader = || {
        let list = black_box(&list);
        ListReader::new(&memory, list, Form::Pages, &account).expect("a list")
    };
    let mut group = c.benchmark_group("page list by polls");
    group.sample_size(20);
    group.bench_function("first", |b| b.iter_with_large_drop(reader));
    let all = |mut reader: ListReader| {
        while !reader.done() {
            reader.step(most).expect("pages");
        }
        reader.finish().expect("pages")
    };
    group.throughput(Throughput::Elements(pages));
    group.bench_function("all", |b| b.iter_with_large_drop(|| all(reader())));
    group.bench_function("release", |b| {
        b.iter_batched(|| all(reader()), drop, BatchSize::PerIteration);
    });
    group.finish();
}

/// Pages of guest memory one behind the other.
fn linear(memory: &GuestMemory, first: u64, count: u64) -> Pages {
    let guest: Vec<u64> = (first..first + count).map(|page| page * PAGE).collect();
    Pages::resolve(memory, &guest, 12).expect("pages")
}

/// Entries from guest memory to values.
fn entries(c: &mut Criterion) {
    const ENTRIES: u32 = 64;
    const STRIDE: u32 = 64;
    let memory = memory(1);
    let buffer = linear(&memory, 0, 1);
    let queue = WorkQueue {
        offset: 0,
        stride: STRIDE,
        entries: ENTRIES,
        position: 0,
    };
    let fill = |entry: &[u8]| {
        for (at, bytes) in (0..u64::from(ENTRIES * STRIDE))
            .step_by(8)
            .zip(entry.chunks_exact(8).cycle())
        {
            let word = u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
            let to = buffer.word(at).expect("a word");
            to.store(word, Ordering::Relaxed);
        }
    };
    let sge = Sge {
        addr: 0x1000,
        length: 64,
        lkey: 0x100,
    };
    let mut group = c.benchmark_group("entry");
    let send = SendWqe {
        opcode: wr_opcode::RDMA_WRITE,
        flags: PHASE,
        count: 1,
        ..SendWqe::default()
    };
    fill(&[&send.to_bytes()[..], &sge.to_bytes()].concat());
    group.bench_function("send", |b| {
        let mut queue = queue;
        b.iter(|| {
            // The first round has this phase; there is no other here.
            queue.position %= ENTRIES;
            let bytes: [u8; 64] = queue.read(&buffer).expect("an entry");
            queue.advance();
            (SendWqe::get(&bytes), Sge::get(&bytes[SEND_DATA_OFFSET..]))
        });
    });
    let receive = RecvWqe {
        flags: PHASE,
        count: 1,
        ..RecvWqe::default()
    };
    let mut entry = [receive.to_bytes().to_vec(), sge.to_bytes().to_vec()].concat();
    entry.resize(STRIDE as usize, 0);
    fill(&entry);
    group.bench_function("receive", |b| {
        let mut queue = queue;
        let mut sges = Vec::with_capacity(1);
        b.iter(|| {
            queue.position %= ENTRIES;
            let head = queue.ready(&buffer).expect("an entry");
            let (id, good) = queue.take_receive(&buffer, head, 1, &mut sges);
            assert!(good);
            (id, sges.first().copied())
        });
    });
    group.finish();
}

/// Regions of the same `pages` of guest memory, each with its address.
fn regions(memory: &GuestMemory, count: u32, pages: &[u64]) -> (Keys, Vec<u32>) {
    let mut keys = Keys::new(&Limits::default());
    let handles = (0..count).map(|_| {
        let backing = Backing::Pages(Pages::resolve(memory, pages, 12).expect("pages"));
        let index = keys.add_region(|index| Mr {
            key: index << 8,
            pd: 1,
            access: access::REMOTE_WRITE,
            iova: 0,
            length: pages.len() as u64 * PAGE,
            offset: 0,
            windows: AtomicU32::new(0),
            backing,
        });
        index.expect("a region") << 8
    });
    let handles = handles.collect();
    (keys, handles)
}

/// Numbers without an order that anybody would guess.
fn numbers() -> impl FnMut() -> u64 {
    let mut state = 1u64;
    move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        state >> 33
    }
}

/// Keys and addresses to host addresses: whatever there is in all, and however large it is.
fn keys(c: &mut Criterion) {
    let look_up = |keys: &Keys, key, addr| {
        let range = keys.contiguous(
            &mut CachedRange::default(),
            key,
            1,
            access::REMOTE_WRITE,
            addr,
            64,
        );
        range.expect("a piece").len()
    };
    let memory = memory(1 << 18);
    for (name, hot) in [("key, the same", true), ("key, any of", false)] {
        let mut group = c.benchmark_group(name);
        for count in [1u32, 100, 10_000, 1_000_000] {
            let (keys, handles) = regions(&memory, count, &[0]);
            let mut next = numbers();
            group.bench_function(BenchmarkId::from_parameter(count), |b| {
                b.iter(|| {
                    let at = if hot { 0 } else { next() as usize };
                    look_up(&keys, handles[at % handles.len()], 0)
                });
            });
        }
        group.finish();
    }
    for (name, hot) in [("address, the same", true), ("address, any of", false)] {
        let mut group = c.benchmark_group(name);
        for pages in [1u64, 256, 1 << 18] {
            let (keys, handles) = regions(&memory, 1, &scattered(pages, pages));
            let mut next = numbers();
            group.bench_function(BenchmarkId::from_parameter(pages * PAGE), |b| {
                b.iter(|| {
                    let page = if hot { 0 } else { next() % pages };
                    look_up(&keys, handles[0], page * PAGE)
                });
            });
        }
        group.finish();
    }
}

/// Payload from guest memory to guest memory.
fn copies(c: &mut Criterion) {
    const MIB: u64 = 1 << 20;
    type Copy = fn(ContiguousRange<'_>, Source<'_>);
    let ways: [(&str, Copy); 2] = [("copy", copy), ("copy, the last word last", copy_last)];
    let linear = memory(2 * MIB / PAGE);
    for (name, copy) in ways {
        let mut group = c.benchmark_group(name);
        for len in [8, 64, 512, 4096, 65536, MIB] {
            let from = linear.range_at(0, len).expect("memory");
            let to = linear.range_at(MIB, len).expect("memory");
            group.throughput(Throughput::Bytes(len));
            group.bench_function(BenchmarkId::from_parameter(len), |b| {
                b.iter(|| copy(black_box(to), black_box(from).into()));
            });
        }
        group.finish();
    }
    // As far apart as in a VM of some size.
    const TOTAL: u64 = 32 * 1024;
    const LONGEST: u64 = 64 * MIB;
    let scattered = scattered(2 * LONGEST / PAGE, 2 * TOTAL);
    let spread = memory(2 * TOTAL);
    let pages = |addresses| Pages::resolve(&spread, addresses, 12).expect("pages");
    let (from, to) = scattered.split_at(scattered.len() / 2);
    let (from, to) = (pages(from), pages(to));
    for (name, way) in [
        ("copy of scattered pages", Way::Cached),
        ("copy of scattered pages past the caches", Way::Streaming),
    ] {
        let mut group = c.benchmark_group(name);
        for len in [65536, MIB, LONGEST] {
            fn scattered(pages: &Pages, len: u64) -> ScatterRange<'_> {
                black_box(pages).scattered(0, len).expect("pages")
            }
            group.throughput(Throughput::Bytes(len));
            group.bench_function(BenchmarkId::from_parameter(len), |b| {
                b.iter(|| {
                    copy_scattered(
                        &mut scattered(&to, len),
                        &mut scattered(&from, len),
                        way,
                        true,
                    )
                });
            });
        }
        group.finish();
    }
}

/// Completions to a ring whose consumer keeps up.
fn completions(c: &mut Criterion) {
    const ENTRIES: u32 = 1024;
    let mut group = c.benchmark_group("completion");
    for stride in STRIDES {
        let pages = 1 + u64::from(ENTRIES * stride) / PAGE;
        let memory = memory(pages);
        let ring = CqRing {
            buffer: linear(&memory, 0, pages),
            offset: PAGE,
            entries: ENTRIES,
            stride,
        };
        let record = linear(&memory, 0, 1);
        let consumer = record.half_word(0).expect("the record");
        let cq = Cq::new(1, 0, ring);
        let cqe = Cqe::default();
        let mut position = 0u32;
        group.bench_function(BenchmarkId::new("stride", stride), |b| {
            b.iter(|| {
                if position % 64 == 0 {
                    consumer.store(position.to_le(), Ordering::Release);
                }
                position = position.wrapping_add(1);
                assert_eq!(cq.push(black_box(&cqe), false), Pushed::Quiet);
            });
        });
    }
    group.finish();
}

/// The worker's scan of all doorbells, with polls of queue pairs that have no work.
fn poll_iterations(c: &mut Criterion) {
    let mut bed = Bed::new();
    let many = WORKLOADS
        .iter()
        .find(|workload| workload.name == "WRITE, 1,000 queue pairs")
        .expect("the workload");
    let flow = Flow::new(&bed, *many);
    flow.step(|| bed.round());
    let mut group = c.benchmark_group("poll_iteration");
    for count in [0, 1, 32, 1000] {
        group.bench_function(BenchmarkId::new("rung", count), |b| {
            b.iter(|| {
                flow.ring(count);
                // Each round ends after 32 polls.
                for _ in 0..count.div_ceil(32).max(1) {
                    bed.round();
                }
            });
        });
    }
    group.finish();
}

/// A notification, the end of the worker's sleep, and a WRITE of 64 bytes.
fn wake_up(c: &mut Criterion) {
    let bed = Bed::asleep();
    let one = WORKLOADS
        .iter()
        .find(|workload| workload.name == "WRITE, one by one")
        .expect("the workload");
    let flow = Flow::new(&bed, *one);
    c.bench_function("wake-up", |b| b.iter(|| flow.step(std::hint::spin_loop)));
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    entries(&mut criterion);
    keys(&mut criterion);
    copies(&mut criterion);
    completions(&mut criterion);
    poll_iterations(&mut criterion);
    wake_up(&mut criterion);
    page_lists(&mut criterion);
    page_lists_by_polls(&mut criterion);
    criterion.final_summary();
}
