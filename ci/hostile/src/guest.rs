// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a hostile kernel of a guest does to the device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _, Result};
use vhost_device_rdma_bare::core::command::{
    DeregMr, DestroyContext, DestroyCq, DestroyPd, DestroyQp, DestroySrq,
};
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::command::{
    opcode, status, CommandHeader, PageList, ResponseHeader,
};
use vhost_device_rdma_bare::spec::ring::Sge;
use vhost_device_rdma_bare::spec::verbs::{qp_state, wc_status};
use vhost_device_rdma_bare::{Context, Error, Pd, Placement, QpOptions, Vm, VmOptions, PAGE};

use crate::objects::{aliased, destroy, register, Maker, KINDS};
use crate::traffic::{impatient, Pair, SideOptions, ACCESS};
use crate::{completed, refused, Attack, Attacker, Random, TIMEOUT};

/// All attacks of this file.
pub const ALL: &[Attack] = &[
    Attack {
        name: "random_commands",
        round: random_commands,
    },
    Attack {
        name: "random_virtqueues",
        round: random_virtqueues,
    },
    Attack {
        name: "chains_in_loops",
        round: chains_in_loops,
    },
    Attack {
        name: "page_lists_that_lie",
        round: page_lists_that_lie,
    },
    Attack {
        name: "page_lists_that_change",
        round: page_lists_that_change,
    },
    Attack {
        name: "random_rings",
        round: random_rings,
    },
    Attack {
        name: "wrapped_ranges",
        round: wrapped_ranges,
    },
    Attack {
        name: "overflowing_cqs",
        round: overflowing_cqs,
    },
    Attack {
        name: "key_collisions",
        round: key_collisions,
    },
    Attack {
        name: "destroy_while_busy",
        round: destroy_while_busy,
    },
    Attack {
        name: "objects_without_end",
        round: objects_without_end,
    },
    Attack {
        name: "interrupt_storm",
        round: interrupt_storm,
    },
    Attack {
        name: "notification_storm",
        round: notification_storm,
    },
];

/// The status of a response, if there was one.
fn status_of(response: &[u8]) -> Option<u16> {
    let header = response.get(..ResponseHeader::SIZE)?.try_into().ok()?;
    Some(ResponseHeader::from_bytes(&header).status)
}

/// Any command with random fields: each is answered.
fn random_commands(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let random = &mut attacker.random;
    let deadline = Instant::now() + Duration::from_millis(700);
    while Instant::now() < deadline {
        let bytes = if random.below(8) == 0 {
            let length = random.index(4200);
            random.bytes(length)
        } else {
            random_command(random)
        };
        let response = vm.raw_command(&bytes, PAGE)?;
        ensure!(status_of(&response).is_some(), "no response: {response:?}");
    }
    // It is served all the same.
    vm.reset()?;
    Pair::new(&vm)?.works()
}

/// A known opcode, and fields of which many are zero or small.
fn random_command(random: &mut Random) -> Vec<u8> {
    let at = random.index(opcode::ALL.len());
    let opcode = opcode::ALL.get(at).map_or(0, |(_, value)| *value as u16);
    let length = random.index(160);
    let mut body = random.bytes(length);
    for byte in &mut body {
        *byte = match random.below(6) {
            0..=2 => 0,
            3 | 4 => *byte % 4,
            _ => *byte,
        };
    }
    let right = 8 + body.len() as u32;
    let wrong = random.any() as u32;
    let header = CommandHeader {
        opcode,
        reserved: 0,
        length: random.of(
            &[right, right, right, right, right, right, right, wrong],
            right,
        ),
    };
    [&header.to_bytes()[..], &body].concat()
}

/// A VM that does not wait long for what never comes.
fn impatient_vm(attacker: &Attacker) -> Result<Arc<Vm>> {
    let options = VmOptions {
        timeout: Duration::from_millis(300),
        ..VmOptions::default()
    };
    Ok(Vm::connect(&attacker.socket, options)?)
}

/// Random descriptors and heads in the control queue. What the device writes then may be anywhere
/// in the attacker's memory.
fn random_virtqueues(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let first = vm.region(0).guest_addr();
    for _ in 0..20 {
        let random = &mut attacker.random;
        vm.with_control(|queue| -> Result<()> {
            for index in 0..queue.size() {
                let addr = match random.below(3) {
                    0 => random.odd(),
                    1 => first.wrapping_sub(8),
                    _ => first + random.below(1 << 20),
                };
                let any = random.any() as u32;
                let len = random.of(&[8, 64, 4096, any], 8);
                let (flags, next) = (random.below(8) as u16, random.below(70) as u16);
                queue.put_descriptor(index, addr, len, flags, next);
            }
            for _ in 0..random.below(40) {
                queue.publish(random.below(66) as u16);
            }
            if random.below(4) == 0 {
                let index = random.any() as u16;
                queue.available().u16(2).store(index, Ordering::SeqCst);
            }
            Ok(queue.notify()?)
        })?;
        vm.reset().context("no reset after a random virtqueue")?;
    }
    Pair::new(&vm)?.works()
}

/// Chains that lead to themselves, out of their table, or out of memory, and tables in tables.
fn chains_in_loops(attacker: &mut Attacker) -> Result<()> {
    let vm = impatient_vm(attacker)?;
    for (flags, next, addr, len) in [
        (1u16, 0u16, 0u64, 0u32),
        (1, 500, 0, 0),
        (3, 0, 0, 16),
        (0, 0, u64::MAX, u32::MAX),
        (2, 0, u64::MAX - 1, 64),
        (4, 0, 0x7000_0000_0000, 64),
        (4, 0, 0, 17),
        (4, 0, 0, u32::MAX),
        (5, 0, 0, 16),
    ] {
        vm.with_control(|queue| {
            queue.put_descriptor(0, addr, len, flags, next);
            queue.publish(0);
            queue.notify()
        })?;
        std::thread::sleep(Duration::from_millis(5));
        vm.reset().context("no reset after a chain that is wrong")?;
    }
    // Two that lead to each other.
    vm.with_control(|queue| {
        queue.put_descriptor(0, 0, 8, 1, 1);
        queue.put_descriptor(1, 0, 8, 1, 0);
        queue.publish(0);
        queue.notify()
    })?;
    vm.reset()?;
    drop(vm);
    Pair::new(&attacker.vm()?)?.works()
}

/// Lists whose counts disagree with their lengths, with loops, and of pages that are no memory.
fn page_lists_that_lie(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pd = Pd::new(&vm)?;
    let (loops, tables) = aliased(&vm)?;
    let page = tables.page(0);
    let good = PageList {
        addr: page,
        count: 1,
        page_shift: 12,
        ..PageList::default()
    };
    let all = [
        status::EINVAL,
        status::EFAULT,
        status::ENOMEM,
        status::EOPNOTSUPP,
    ];
    let wrong = [
        ("a list in a loop", loops),
        ("no pages", PageList { count: 0, ..good }),
        ("pages without a table", PageList { count: 2, ..good }),
        (
            "too few tables",
            PageList {
                count: 600,
                levels: 1,
                ..good
            },
        ),
        ("too many levels", PageList { levels: 9, ..good }),
        (
            "pages of no size",
            PageList {
                page_shift: 0,
                ..good
            },
        ),
        (
            "pages of 2^63 bytes",
            PageList {
                page_shift: 63,
                ..good
            },
        ),
        (
            "a page at the end",
            PageList {
                addr: u64::MAX - 4095,
                ..good
            },
        ),
        (
            "a page that is none",
            PageList {
                addr: page + 1,
                ..good
            },
        ),
        (
            "a page that is no memory",
            PageList {
                addr: 1 << 55,
                ..good
            },
        ),
        (
            "all pages",
            PageList {
                count: u32::MAX,
                levels: 3,
                ..good
            },
        ),
    ];
    for (what, list) in wrong {
        refused(what, register(&vm, &pd, list), &all)?;
    }
    // As many bytes as there are pages, and one more; from an offset; and so many that they wrap.
    for (length, offset) in [
        (PAGE as u64 + 1, 0),
        (PAGE as u64, 1),
        (u64::MAX, 0),
        (u64::MAX, u64::MAX),
        (8, u64::MAX - 4),
        (0, PAGE as u64 + 1),
    ] {
        let body = vhost_device_rdma_bare::spec::command::RegMr {
            pd: pd.handle(),
            access: ACCESS,
            iova: 0,
            length,
            offset,
            pages: good,
            ..Default::default()
        };
        let result = vm.execute::<vhost_device_rdma_bare::core::command::RegMr>(&body);
        refused(
            &format!("{length} bytes from {offset} in a page"),
            result,
            &all,
        )?;
    }
    Pair::new(&vm)?.works()
}

/// Tables that another CPU of the guest changes while the device reads them.
fn page_lists_that_change(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pd = Pd::new(&vm)?;
    let (list, tables) = aliased(&vm)?;
    let list = PageList {
        count: 512 * 512,
        levels: 2,
        ..list
    };
    let (view, page) = (tables.view().clone(), tables.page(2));
    let stop = AtomicBool::new(false);
    let random = &mut attacker.random;
    std::thread::scope(|scope| -> Result<()> {
        let (stop, view) = (&stop, &view);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let word = 8 * random.index(3 * PAGE / 8);
                let value = random.of(&[page, page, 0, u64::MAX, 1 << 55], page);
                view.write(word, &value.to_le_bytes());
            }
        });
        let result = (|| -> Result<()> {
            for _ in 0..40 {
                match register(&vm, &pd, list) {
                    Ok(key) => pd.deregister(key)?,
                    Err(Error::Command(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    Pair::new(&vm)?.works()
}

/// Random words in the rings of queue pairs and the records of completion queues, which another
/// CPU of the guest goes on writing while the device reads them.
fn random_rings(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    for _ in 0..4 {
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let (a, b) = (&pair.a, &pair.b);
        for wr_id in 0..8 {
            b.qp.post_recv(wr_id, &[b.mr.sge(0, 64)])?;
        }
        let stop = AtomicBool::new(false);
        let random = &mut attacker.random;
        std::thread::scope(|scope| -> Result<()> {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for memory in [a.qp.memory(), a.send_cq.memory()] {
                        let at = random.index(memory.len());
                        memory[at].store(random.odd(), Ordering::Relaxed);
                    }
                }
            });
            let end = Instant::now() + Duration::from_millis(150);
            let mut result = Ok(());
            while Instant::now() < end && result.is_ok() {
                for word in a.context.doorbell().iter() {
                    word.store(u64::MAX, Ordering::SeqCst);
                }
                result = a.qp.ring();
            }
            stop.store(true, Ordering::Relaxed);
            Ok(result?)
        })?;
        // The device answers commands whatever it finds in the rings.
        a.qp.state()?;
    }
    Pair::new(&vm)?.works()
}

/// Addresses and lengths whose sum wraps, on both sides.
fn wrapped_ranges(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let local = [wc_status::LOC_PROT_ERR, wc_status::LOC_LEN_ERR];
    let remote = [wc_status::REM_ACCESS_ERR];
    for (addr, length) in [
        (u64::MAX, 2),
        (u64::MAX - 4095, 4096),
        (u64::MAX - 4095, u32::MAX),
        (0, u32::MAX),
    ] {
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let (a, b) = (&pair.a, &pair.b);
        let lkey = a.mr.sge(0, 1).lkey;
        let sge = Sge { addr, length, lkey };
        a.qp.write(1, &[sge], b.mr.iova, b.mr.rkey)?;
        completed("a wrapped range", a.sent()?, &local)?;
    }
    for addr in [u64::MAX, u64::MAX - 4095, 0] {
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let (a, b) = (&pair.a, &pair.b);
        a.qp.write(1, &[a.mr.sge(0, 8192)], addr, b.mr.rkey)?;
        completed("a wrapped remote range", a.sent()?, &remote)?;
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let (a, b) = (&pair.a, &pair.b);
        let behind = b.mr.iova + b.mr.view().size() as u64 - 4096;
        a.qp.read(1, &[a.mr.sge(0, 8192)], behind, b.mr.rkey)?;
        completed("a range beyond the region", a.sent()?, &remote)?;
    }
    Ok(())
}

/// Completion queues that nobody polls, with more completions than entries.
fn overflowing_cqs(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let options = SideOptions {
        cqe: 16,
        ..SideOptions::default()
    };
    for _ in 0..4 {
        let pair = Pair::connect(&vm, &vm, &options, |_| ())?;
        let (a, b) = (&pair.a, &pair.b);
        for wr_id in 0..48 {
            a.qp.write(wr_id, &[a.mr.sge(0, 8)], b.mr.iova, b.mr.rkey)?;
        }
        let end = Instant::now() + TIMEOUT;
        while a.qp.state()? != qp_state::ERR {
            ensure!(
                Instant::now() < end,
                "a queue pair goes on with a CQ that overflows"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Pair::new(&vm)?.works()
}

/// Keys that come and go: no old one reaches what is registered in its place.
fn key_collisions(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pair = Pair::new(&vm)?;
    let mut old = Vec::new();
    for _ in 0..600 {
        let mr = pair.b.pd.register(PAGE, ACCESS)?;
        ensure!(!old.contains(&mr.rkey), "key {:#x} comes again", mr.rkey);
        old.push(mr.rkey);
    }
    // One is there again, in the place of one of those.
    let target = pair.b.pd.register(PAGE, ACCESS)?;
    target.write(0, &[0x5a; PAGE]);
    for _ in 0..20 {
        let at = attacker.random.index(old.len());
        let key = old.get(at).copied().unwrap_or_default();
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let a = &pair.a;
        a.qp.write(1, &[a.mr.sge(0, 64)], target.iova, key)?;
        completed("an old key", a.sent()?, &[wc_status::REM_ACCESS_ERR])?;
    }
    ensure!(
        target.read(0, PAGE) == [0x5a; PAGE],
        "an old key reaches new memory"
    );
    Ok(())
}

/// Objects that others use, and queue pairs in the middle of their messages.
fn destroy_while_busy(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    for _ in 0..4 {
        let pair = Pair::connect(&vm, &vm, &SideOptions::default(), impatient)?;
        let Pair { a, b } = pair;
        let length = 1 << 15;
        for wr_id in 0..48 {
            a.qp.write(wr_id, &[a.mr.sge(0, length)], b.mr.iova, b.mr.rkey)?;
        }
        let busy = [status::EBUSY];
        let cq = a.send_cq.number();
        refused("a CQ in use", destroy::<DestroyCq>(&vm, cq), &busy)?;
        let pd = a.pd.handle();
        refused("a PD in use", destroy::<DestroyPd>(&vm, pd), &busy)?;
        let context = a.context.handle();
        refused(
            "a context in use",
            destroy::<DestroyContext>(&vm, context),
            &busy,
        )?;
        // The region and the queue pair of the peer in the middle of it, in any order, twice.
        let (qpn, rkey) = (b.qp.number(), b.mr.rkey);
        if attacker.random.below(2) == 0 {
            drop(b.mr);
            drop(b.qp);
        } else {
            drop(b.qp);
            drop(b.mr);
        }
        let gone = [status::ENOENT];
        refused("a QP that is gone", destroy::<DestroyQp>(&vm, qpn), &gone)?;
        refused("a key that is gone", destroy::<DeregMr>(&vm, rkey), &gone)?;
        drop(a);
    }
    for handle in [0, 1, 0x100, u32::MAX] {
        let gone = [status::ENOENT];
        refused("no SRQ", destroy::<DestroySrq>(&vm, handle), &gone)?;
        refused("no context", destroy::<DestroyContext>(&vm, handle), &gone)?;
    }
    Pair::new(&vm)?.works()
}

/// Finding 6: objects of each kind until there are no more, none of which are given back.
fn objects_without_end(attacker: &mut Attacker) -> Result<()> {
    let at = attacker.random.index(KINDS.len());
    let Some((name, make, _)) = KINDS.get(at) else {
        return Ok(());
    };
    let vm = attacker.vm()?;
    let maker = Maker::new(&vm)?;
    // The lists of 2^20 pages go to the limit soon; of what is small, that many are enough here.
    let mut result = Ok(0);
    for number in 0..20_000 {
        result = make(&maker, number);
        if result.is_err() {
            break;
        }
    }
    if result.is_err() {
        refused(name, result, &[status::ENOMEM])?;
    }
    vm.kill();
    Ok(())
}

/// Each completion is to raise an interrupt.
fn interrupt_storm(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pairs = [Pair::new(&vm)?, Pair::new(&vm)?, Pair::new(&vm)?];
    let end = Instant::now() + Duration::from_millis(700);
    while Instant::now() < end {
        for pair in &pairs {
            for cq in [&pair.a.send_cq, &pair.b.recv_cq] {
                cq.arm(ArmMode::Any);
            }
            pair.works()?;
        }
    }
    Ok(())
}

/// Finding 5: 1,024 contexts without work, and notifications of all queues without end.
fn notification_storm(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let mut contexts = Vec::new();
    for _ in 0..1024 {
        match Context::new(&vm) {
            Ok(context) => contexts.push(context),
            Err(Error::Command(_) | Error::NoMemory) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let buffer = vm.buffer(PAGE, Placement::Contiguous)?;
    drop(buffer);
    let end = Instant::now() + Duration::from_millis(700);
    while Instant::now() < end {
        for context in contexts.iter().step_by(16) {
            for word in context.doorbell().iter() {
                word.store(u64::MAX, Ordering::SeqCst);
            }
        }
        for queue in 0..u32::from(vm.config().num_doorbell_queues) {
            vm.notify_doorbell(queue)?;
        }
        vm.with_control(|queue| queue.notify())?;
    }
    vm.kill();
    Ok(())
}

/// Options of small queue pairs, of which there can be many.
pub(crate) fn small() -> SideOptions {
    let mut qp = QpOptions::default();
    qp.caps.max_send_wr = 4;
    qp.caps.max_recv_wr = 4;
    qp.caps.max_send_sge = 1;
    qp.caps.max_recv_sge = 1;
    qp.caps.max_inline = 0;
    SideOptions {
        qp,
        cqe: 16,
        memory: PAGE,
    }
}
