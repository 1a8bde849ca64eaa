// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM and its front end can make the process keep: all of it is in the VM's account, which
//! has a limit, and the process lives where there is no memory.
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::process::{prlimit, Pid, Resource, Rlimit};
use vhost::vhost_user::VhostUserFrontend;
use vhost::VhostUserMemoryRegionInfo;
use vhost_device_rdma_bare::core::command::{AllocMw, DeallocMw};
use vhost_device_rdma_bare::spec::command::{self, mw_type, status, Handle, PageList};
use vhost_device_rdma_bare::spec::verbs::access;
use vhost_device_rdma_bare::{page_list, DeviceProcess, Pd, ProcessOptions, Vm, VmOptions, PAGE};
use virtio_rdma_hostile::objects::{aliased, register, Maker, KINDS};

use crate::common::{
    assert_footprint_falls_to, assert_refused, counts, device_status, everything, footprint,
    process, process_with, vm, Side, SideOptions, Two,
};

/// A gibibyte.
const GIB: u64 = 1 << 30;
/// What the process may have in memory beyond what its accounts say, bytes: its own, and what its
/// heap keeps for later.
const OWN: u64 = 16 << 20;

/// What the process has in memory, without guest memory, bytes.
fn resident(process: &DeviceProcess) -> u64 {
    let status = process.status().unwrap();
    status["resident_bytes"].as_u64().unwrap()
}

/// Lets the process have only so many bytes of address space more than it has.
fn limit_address_space(process: &DeviceProcess, more: u64) {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", process.id())).unwrap();
    let pages = statm.split(' ').next().unwrap().parse::<u64>().unwrap();
    let most = pages * PAGE as u64 + more;
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    let pid = Pid::from_raw(process.id() as i32);
    prlimit(pid, Resource::As, limit).unwrap();
}

// Regions of memory that is removed keep what they need to be found again. It was 8 bytes for each
// page, in no account.
#[test]
fn regions_that_are_lost_take_no_more_than_the_account_says() {
    const REGIONS: usize = 500;
    let process = process(1);
    let vm = vm(process.socket(0));
    let before = resident(&process);
    let number = vm.add_memory(GIB as usize).unwrap();
    let first = vm.region(number).guest_addr();
    let pd = Pd::new(&vm).unwrap();
    let pages: Vec<u64> = (0..GIB / PAGE as u64)
        .map(|i| first + i * PAGE as u64)
        .collect();
    let (linear, _linear) = page_list(&vm.region(0), &pages).unwrap();
    let reversed: Vec<u64> = pages.iter().rev().copied().collect();
    let (scattered, _scattered) = page_list(&vm.region(0), &reversed).unwrap();
    let mut keys = Vec::new();
    for _ in 0..REGIONS {
        keys.push(register(&vm, &pd, linear).unwrap());
    }
    // Each of these takes 2 MiB: 8 bytes for a page.
    for _ in 0..4 {
        keys.push(register(&vm, &pd, scattered).unwrap());
    }
    let mapped = footprint(&process, vm.path());
    assert!((8 << 20..9 << 20).contains(&mapped), "{mapped}");
    vm.remove_memory(number).unwrap();
    assert_eq!(footprint(&process, vm.path()), mapped);
    let grown = resident(&process).saturating_sub(before);
    assert!(
        grown <= mapped + OWN,
        "{grown} bytes, and {mapped} in the account"
    );
    // They come back with their memory.
    vm.replug_memory(number).unwrap();
    assert_eq!(footprint(&process, vm.path()), mapped);
    for key in keys {
        pd.deregister(key).unwrap();
    }
    drop(pd);
    assert_footprint_falls_to(&process, vm.path(), 0);
}

/// Memory that comes back in other pieces may need lists of pages where there were none. There are
/// as many as the account has room for.
#[test]
fn regions_that_come_back_in_pieces_are_accounted() {
    let config = "[limits]\nfootprint = 4194304\n";
    let (process, vm) = configured(config, &VmOptions::default());
    let size = 256u64 << 20;
    let number = vm.add_memory(size as usize).unwrap();
    let region = vm.region(number);
    let pd = Pd::new(&vm).unwrap();
    let pages = (0..size / PAGE as u64).map(|i| region.guest_addr() + i * PAGE as u64);
    let pages: Vec<u64> = pages.collect();
    let (list, _tables) = page_list(&vm.region(0), &pages).unwrap();
    for _ in 0..64 {
        register(&vm, &pd, list).unwrap();
    }
    let before = resident(&process);
    vm.remove_memory(number).unwrap();
    // The second half, and then the first one behind it in the file.
    let whole = region.info();
    let half = size / 2;
    for (guest, file) in [(half, 0), (0, half)] {
        let info = VhostUserMemoryRegionInfo {
            guest_phys_addr: whole.guest_phys_addr + guest,
            memory_size: half,
            userspace_addr: whole.userspace_addr + guest,
            mmap_offset: file,
            mmap_handle: whole.mmap_handle,
        };
        vm.frontend().add_mem_region(&info).unwrap();
    }
    // 512 KiB each.
    let bytes = footprint(&process, vm.path());
    assert!(bytes <= 4 << 20, "{bytes}");
    let grown = resident(&process).saturating_sub(before);
    assert!(
        grown <= bytes + OWN,
        "{grown} bytes, and {bytes} in the account"
    );
    pd.register(PAGE, access::LOCAL_WRITE).unwrap();
}

/// A process with one VM.
fn configured(config: &str, options: &VmOptions) -> (DeviceProcess, Arc<Vm>) {
    let name = format!("limits-{}-{:p}.toml", std::process::id(), options);
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, config).unwrap();
    let process = process_with(1, &["--config", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    let vm = Vm::connect(process.socket(0), options.clone()).unwrap();
    (process, vm)
}

// Three tables can describe 2^27 pages: they are judged before one is looked at.
#[test]
fn a_list_of_more_pages_than_a_vm_may_have_is_refused_at_once() {
    let process = process(1);
    let vm = vm(process.socket(0));
    let pd = Pd::new(&vm).unwrap();
    let (list, _tables) = aliased(&vm).unwrap();
    let before = resident(&process);
    for _ in 0..1000 {
        assert_refused(register(&vm, &pd, list), status::ENOMEM);
    }
    assert!(resident(&process) <= before + OWN);
    // As much as there may be.
    let most = device_status(&process, vm.path())["footprint_limit_bytes"].as_u64();
    let count = (most.unwrap() / 8 - (1 << 16)) as u32;
    let key = register(&vm, &pd, PageList { count, ..list }).unwrap();
    assert!(footprint(&process, vm.path()) >= 8 * u64::from(count));
    assert_refused(register(&vm, &pd, list), status::ENOMEM);
    pd.deregister(key).unwrap();
}

// One command under a limit of memory was enough to end the process.
#[test]
fn the_process_lives_where_there_is_no_memory() {
    // (Nobody may limit what a process of another user has.)
    let config = "sandbox = \"off\"\n[limits]\nfootprint = 1099511627776\n";
    let (mut process, vm) = configured(config, &everything());
    let pd = Pd::new(&vm).unwrap();
    let (list, _tables) = aliased(&vm).unwrap();
    limit_address_space(&process, 96 << 20);
    assert_refused(register(&vm, &pd, list), status::ENOMEM);
    // Small objects, as many as there is memory for.
    let body = command::AllocMw {
        pd: pd.handle(),
        mw_type: mw_type::TYPE_1,
        ..command::AllocMw::default()
    };
    let mut windows = Vec::new();
    let refused = loop {
        match vm.execute::<AllocMw>(&body) {
            Ok(window) => windows.push(window.handle),
            Err(error) => break error,
        }
        assert!(windows.len() < 1 << 20, "there is memory for all");
    };
    assert_refused::<()>(Err(refused), status::ENOMEM);
    assert!(windows.len() > 10_000, "{}", windows.len());
    // It serves what there is, and others, and says so.
    assert_eq!(counts(&process, vm.path())[2], 0);
    vm.query_port().unwrap();
    for window in windows {
        let handle = Handle {
            handle: window,
            reserved: 0,
        };
        vm.execute::<DeallocMw>(&handle).unwrap();
    }
    let _side = Side::new(&vm, &SideOptions::default());
    assert!(process.is_alive());
}

// Of objects, only page lists were accounted.
#[test]
fn objects_of_all_kinds_are_in_the_account_and_limited() {
    const LIMIT: u64 = 2 << 20;
    let config = format!("[limits]\nfootprint = {LIMIT}\n");
    for (name, make, destroy) in KINDS {
        // The heap of another one would have what earlier kinds and their lists in statuses left.
        let (process, vm) = configured(&config, &everything());
        let of = |process: &DeviceProcess| footprint(process, vm.path());
        let maker = Maker::new(&vm).unwrap();
        let before = of(&process);
        let count = || {
            device_status(&process, vm.path())["counts"][name]
                .as_u64()
                .unwrap()
        };
        let had = count();
        let resident_before = resident(&process);
        let mut made = Vec::new();
        let refused = loop {
            match make(&maker, made.len() as u32) {
                Ok(handle) => made.push(handle),
                Err(error) => break error,
            }
        };
        // Before a status lists all of them.
        let grown = resident(&process).saturating_sub(resident_before);
        assert_refused::<()>(Err(refused), status::ENOMEM);
        assert_eq!(count(), had + made.len() as u64, "{name}");
        let (bytes, number) = (of(&process) - before, made.len() as u64);
        assert!(of(&process) <= LIMIT, "{name}");
        assert!(
            grown <= bytes + OWN / 64,
            "{name}: {grown} bytes, and {bytes} in the account"
        );
        // Either the limit of bytes was reached, or that of the number.
        assert!(
            bytes >= LIMIT / 4 || number >= 4095,
            "{name}: {bytes} bytes of {number}"
        );
        for handle in made {
            destroy(&vm, handle).unwrap();
        }
        maker.end().unwrap();
        assert_footprint_falls_to(&process, vm.path(), 0);
    }
}

#[test]
fn a_limit_is_in_proportion_to_the_memory_of_the_vm() {
    let process = process(3);
    for (socket, memory) in [(0, 8usize << 20), (1, 64 << 20), (2, 1 << 30)] {
        let options = VmOptions {
            memory,
            ..VmOptions::default()
        };
        let vm = Vm::connect(process.socket(socket), options).unwrap();
        let limit = || device_status(&process, vm.path())["footprint_limit_bytes"].clone();
        let of = |memory: usize| serde_json::Value::from((64 << 20) + memory / 8);
        assert_eq!(limit(), of(memory));
        let number = vm.add_memory(1 << 30).unwrap();
        assert_eq!(limit(), of(memory + (1 << 30)));
        vm.remove_memory(number).unwrap();
        assert_eq!(limit(), of(memory));
    }
}

/// A file of `size` bytes, of which none was written.
fn sparse(size: u64) -> File {
    let file = File::from(memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

/// The front end adds a region of `size` bytes at a guest-physical address.
fn add(vm: &Vm, addr: u64, size: u64) -> bool {
    let file = sparse(size);
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: addr,
        memory_size: size,
        userspace_addr: addr,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    vm.frontend().add_mem_region(&info).is_ok()
}

/// The device refuses more, says why, and serves others.
fn assert_refused_for(two: &mut Two, reason: &str) {
    let deadline = std::time::Instant::now() + crate::common::TIMEOUT;
    while !two.process.log().contains(reason) {
        assert!(
            std::time::Instant::now() < deadline,
            "{}",
            two.process.log()
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_works_alone(&two.a);
    let path = two.b.path().to_owned();
    two.b = vm(&path);
    assert_works_alone(&two.b);
}

fn assert_works_alone(vm: &Arc<Vm>) {
    let _side = Side::new(vm, &SideOptions::default());
}

// 942 were accepted.
#[test]
fn there_are_as_many_memory_regions_as_are_promised() {
    let mut two = Two::new();
    let promised = two.b.frontend().get_max_mem_slots().unwrap();
    assert_eq!(promised, 509);
    let far = 1u64 << 44;
    let page = PAGE as u64;
    // One is there already.
    let taken = (1..1000)
        .take_while(|i| add(&two.b, far + 2 * i * page, page))
        .count();
    assert_eq!(taken as u64 + 1, promised);
    assert_refused_for(&mut two, "memory in 510 regions: 509 are the most");
}

// 47 files of which nothing is in memory took all of the address space.
#[test]
fn the_memory_of_a_front_end_is_limited() {
    let limit = 1u64 << 30;
    let options = ProcessOptions {
        vms: vec![
            "mac=52:54:00:00:00:01".into(),
            format!("mac=52:54:00:00:00:02,memory={limit}"),
        ],
        ..ProcessOptions::vms(2).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"))
    };
    let process = DeviceProcess::start(&options).unwrap();
    let mut two = Two::on(process, &VmOptions::default());
    let of = |vm: &Vm| device_status(&two.process, vm.path())["memory_limit_bytes"].as_u64();
    assert_eq!([of(&two.a), of(&two.b)], [Some(16 << 40), Some(limit)]);
    let rest = limit - two.b.region(0).size() as u64;
    assert!(add(&two.b, 1 << 44, rest));
    assert!(!add(&two.b, 1 << 45, PAGE as u64));
    assert_refused_for(&mut two, "the limit 'memory' of this device is 1073741824");
    // Without a limit of its own there are 16 TiB.
    let sizes = (0..47).map(|i| (1u64 << 44 | i << 40, 1u64 << 40));
    let taken = sizes
        .take_while(|(addr, size)| add(&two.a, *addr, *size))
        .count();
    assert_eq!(taken, 15);
    let status = two.process.status().unwrap();
    assert!(status["devices"].as_array().unwrap().len() <= 2);
    two.a = vm(two.process.socket(0));
    assert_works_alone(&two.a);
}
