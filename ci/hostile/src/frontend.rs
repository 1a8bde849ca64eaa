// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a hostile front end does.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::fs::{fallocate, memfd_create, openat, FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mount::{
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, FsMountFlags, FsOpenFlags,
    MountAttrFlags,
};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vhost_device_rdma_bare::core::ArmMode;
use vhost_device_rdma_bare::spec::verbs::wc_status;
use vhost_device_rdma_bare::{Placement, Vm, PAGE};
use vmm_sys_util::eventfd::EventFd;

use crate::traffic::{Pair, ACCESS};
use crate::{completed, Attack, Attacker, TIMEOUT};

/// All attacks of this file.
pub const ALL: &[Attack] = &[
    Attack {
        name: "memory_taken_away",
        round: memory_taken_away,
    },
    Attack {
        name: "memory_on_a_full_tmpfs",
        round: memory_on_a_full_tmpfs,
    },
    Attack {
        name: "interrupts_that_block",
        round: interrupts_that_block,
    },
    Attack {
        name: "files_that_are_no_eventfds",
        round: files_that_are_no_eventfds,
    },
    Attack {
        name: "random_messages",
        round: random_messages,
    },
    Attack {
        name: "memory_regions_out_of_bounds",
        round: memory_regions_out_of_bounds,
    },
    Attack {
        name: "memory_regions_without_end",
        round: memory_regions_without_end,
    },
    Attack {
        name: "coming_and_going",
        round: coming_and_going,
    },
];

/// Waits until the device has ended the session.
fn ended(vm: &Vm) -> Result<()> {
    let end = Instant::now() + TIMEOUT;
    while vm.read_config().is_ok() {
        ensure!(Instant::now() < end, "the session has not ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Finding 1: the file behind registered memory is truncated while peers write to it.
fn memory_taken_away(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pair = Pair::new(&vm)?;
    let (a, b) = (&pair.a, &pair.b);
    let region = vm.region(vm.add_memory(4 << 20)?);
    let size = 1 << 20;
    let buffer = region.buffer(size, Placement::Scattered)?;
    let iova = buffer.addr();
    let mr = b.pd.register_buffer(buffer, iova, 0, size as u64, ACCESS)?;
    let large = a.pd.register(size, ACCESS)?;
    let sges = [large.sge(0, size as u32)];
    a.qp.write(1, &sges, mr.iova, mr.rkey)?;
    completed("a write", a.sent()?, &[wc_status::SUCCESS])?;
    // Some are under way when the memory goes.
    for wr_id in 2..8 {
        match attacker.random.below(3) {
            0 => a.qp.write(wr_id, &sges, mr.iova, mr.rkey)?,
            1 => a.qp.read(wr_id, &sges, mr.iova, mr.rkey)?,
            _ => b.qp.write(wr_id, &[mr.sge(0, 8)], a.mr.iova, a.mr.rkey)?,
        }
    }
    region.truncate()?;
    // Whatever came of those.
    let _ = a.qp.write(9, &sges, mr.iova, mr.rkey);
    ended(&vm)?;
    vm.kill();
    Ok(())
}

/// Finding 1: registered memory has no pages, and gets none, since its file is on a tmpfs that is
/// full. (To make a tmpfs takes root.)
fn memory_on_a_full_tmpfs(attacker: &mut Attacker) -> Result<()> {
    const SIZE: usize = 4 << 20;
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).context("cannot make a tmpfs")?;
    fsconfig_set_string(&context, "size", SIZE.to_string())?;
    fsconfig_create(&context)?;
    let none = MountAttrFlags::empty();
    let tmpfs = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, none)?;
    let create = |name| {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok::<_, anyhow::Error>(File::from(openat(&tmpfs, name, flags, Mode::RUSR)?))
    };
    let (memory, mut other) = (create("memory")?, create("other")?);
    memory.set_len(SIZE as u64)?;

    let vm = attacker.vm()?;
    let pair = Pair::new(&vm)?;
    let (a, b) = (&pair.a, &pair.b);
    let region = vm.region(vm.add_memory_of(memory.try_clone()?, SIZE)?);
    let size = 1 << 20;
    let buffer = region.buffer(size, Placement::Scattered)?;
    let iova = buffer.addr();
    let mr = b.pd.register_buffer(buffer, iova, 0, size as u64, ACCESS)?;
    let large = a.pd.register(size, ACCESS)?;
    let sges = [large.sge(0, size as u32)];
    a.qp.write(1, &sges, mr.iova, mr.rkey)?;
    completed("a write", a.sent()?, &[wc_status::SUCCESS])?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&memory, flags, 0, SIZE as u64)?;
    let page = [1; PAGE];
    while other.write_all(&page).is_ok() {}
    match attacker.random.below(2) {
        0 => a.qp.write(2, &sges, mr.iova, mr.rkey)?,
        _ => b.qp.write(2, &[mr.sge(0, 8)], a.mr.iova, a.mr.rkey)?,
    }
    ended(&vm)?;
    vm.kill();
    Ok(())
}

/// An eventfd whose counter is full, so that a write to it waits, whatever the device may have
/// asked for: the file is the front end's, too.
fn make_full(call: &EventFd) -> Result<()> {
    call.write(u64::MAX - 1)?;
    // SAFETY: `call` is open as long as it is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
    Ok(rustix::io::ioctl_fionbio(fd, false)?)
}

/// Finding 2: whoever writes to the call file descriptors waits for ever.
fn interrupts_that_block(attacker: &mut Attacker) -> Result<()> {
    let vm = attacker.vm()?;
    let pair = Pair::new(&vm)?;
    let mut full = Vec::new();
    // Not that of the control queue, which the attacker itself would wait for.
    for queue in 1..usize::from(vm.queues()) {
        let call = EventFd::new(0)?;
        vm.frontend().set_vring_call(queue, &call)?;
        make_full(&call)?;
        full.push(call);
    }
    for _ in 0..200 {
        for cq in [&pair.a.send_cq, &pair.b.recv_cq] {
            cq.arm(ArmMode::Any);
        }
        pair.works()?;
    }
    Ok(())
}

/// The type that the front end passes on wants no more than a file descriptor.
fn as_eventfd(fd: OwnedFd) -> EventFd {
    // SAFETY: nobody else owns it any longer.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

/// Sockets and files where eventfds are due.
fn files_that_are_no_eventfds(attacker: &mut Attacker) -> Result<()> {
    for kick in [false, true] {
        let vm = attacker.vm()?;
        let (_peer, socket) = UnixStream::pair()?;
        let fd: OwnedFd = match attacker.random.below(3) {
            0 => socket.into(),
            1 => File::open("/dev/null")?.into(),
            _ => memfd_create("file", MemfdFlags::CLOEXEC)?,
        };
        let fd = as_eventfd(fd);
        let queue = attacker.random.index(usize::from(vm.queues()));
        let result = if kick {
            vm.frontend().set_vring_kick(queue, &fd)
        } else {
            vm.frontend().set_vring_call(queue, &fd)
        };
        // The answer may come before the end of the connection.
        ensure!(
            result.is_err() || vm.read_config().is_err(),
            "virtqueue {queue} has no eventfd (kick: {kick})"
        );
        vm.kill();
    }
    Ok(())
}

/// A vhost-user message.
fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let head = [request, flags, body.len() as u32].map(u32::to_le_bytes);
    [&head.concat(), body].concat()
}

/// Messages that are random, or cut short.
fn random_messages(attacker: &mut Attacker) -> Result<()> {
    for _ in 0..20 {
        let mut stream = UnixStream::connect(&attacker.socket)?;
        stream.set_nonblocking(true)?;
        // SET_PROTOCOL_FEATURES, so that more is understood: MQ, REPLY_ACK, CONFIG, RESET_DEVICE,
        // CONFIGURE_MEM_SLOTS.
        let mut session = vec![message(16, 1, &0xa209u64.to_le_bytes())];
        let random = &mut attacker.random;
        for _ in 0..random.below(20) {
            let any = random.any() as u32;
            let flags = random.of(&[1, 1, 9, 9, any], 1);
            let longest = random.of(&[0, 8, 40, 300], 0);
            let length = random.index(longest + 1);
            let mut body = random.bytes(length);
            if random.below(2) == 0 {
                body.iter_mut().for_each(|byte| *byte %= 20);
            }
            session.push(message(random.below(48) as u32, flags, &body));
        }
        if let Some(last) = session.last_mut() {
            last.truncate(1 + random.index(last.len()));
        }
        for bytes in session {
            // It may be gone by now.
            if stream.write_all(&bytes).is_err() {
                break;
            }
            let _ = stream.read(&mut [0; 4096]);
        }
    }
    // Who behaves is welcome.
    Pair::new(&attacker.vm()?)?.works()
}

/// A region of memory, as the front end tells it, and the size of its file.
fn add(vm: &Vm, info: VhostUserMemoryRegionInfo, file_size: u64) -> Result<bool> {
    let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC)?);
    file.set_len(file_size)?;
    let info = VhostUserMemoryRegionInfo {
        mmap_handle: file.as_raw_fd(),
        ..info
    };
    Ok(vm.frontend().add_mem_region(&info).is_ok())
}

/// What a region is to be, for a VM.
type Change<'a> = &'a dyn Fn(&Arc<Vm>) -> VhostUserMemoryRegionInfo;

/// Regions that wrap, overlap, are no pages, or are longer than their files.
fn memory_regions_out_of_bounds(attacker: &mut Attacker) -> Result<()> {
    let page = PAGE as u64;
    let whole = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 50,
        memory_size: 4 * page,
        userspace_addr: 1 << 46,
        mmap_offset: 0,
        mmap_handle: -1,
    };
    let wrong: [(&str, Change); 6] = [
        ("wraps", &|_| VhostUserMemoryRegionInfo {
            guest_phys_addr: u64::MAX - 2 * page + 1,
            ..whole
        }),
        ("overlaps", &|vm| VhostUserMemoryRegionInfo {
            guest_phys_addr: vm.region(0).guest_addr() + page,
            ..whole
        }),
        ("is no page", &|_| VhostUserMemoryRegionInfo {
            guest_phys_addr: whole.guest_phys_addr + 8,
            ..whole
        }),
        ("is longer than its file", &|_| VhostUserMemoryRegionInfo {
            memory_size: 5 * page,
            ..whole
        }),
        ("begins behind its file", &|_| VhostUserMemoryRegionInfo {
            mmap_offset: 4 * page,
            ..whole
        }),
        ("has an offset that wraps", &|_| VhostUserMemoryRegionInfo {
            mmap_offset: u64::MAX - page + 1,
            ..whole
        }),
    ];
    for (what, region) in wrong {
        let vm = attacker.vm()?;
        ensure!(
            !add(&vm, region(&vm), 4 * page)?,
            "a region that {what} was accepted"
        );
        vm.kill();
    }
    Ok(())
}

/// Finding 6: more and more regions, and more and more memory.
fn memory_regions_without_end(attacker: &mut Attacker) -> Result<()> {
    for (size, most) in [(PAGE as u64, 509), (1 << 40, 16)] {
        let vm = attacker.vm()?;
        let mut taken = 0;
        loop {
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: (1 << 50) + 2 * size * taken,
                memory_size: size,
                userspace_addr: (1 << 60) + 2 * size * taken,
                mmap_offset: 0,
                mmap_handle: -1,
            };
            if !add(&vm, region, size)? {
                break;
            }
            taken += 1;
            if taken > most {
                bail!("{taken} regions of {size} bytes were accepted");
            }
        }
        ensure!(taken > 0, "no region of {size} bytes was accepted");
        vm.kill();
    }
    Ok(())
}

/// QEMUs that are killed with messages under way, one after the other.
fn coming_and_going(attacker: &mut Attacker) -> Result<()> {
    for _ in 0..4 {
        let vm = attacker.vm()?;
        let pair = Pair::new(&vm)?;
        pair.works()?;
        let (a, b) = (&pair.a, &pair.b);
        let length = 1 << 15;
        for wr_id in 0..32 {
            a.qp.write(wr_id, &[a.mr.sge(0, length)], b.mr.iova, b.mr.rkey)?;
        }
        // In the middle of it, or a moment later.
        std::thread::sleep(Duration::from_micros(attacker.random.below(2000)));
        vm.kill();
    }
    Ok(())
}
