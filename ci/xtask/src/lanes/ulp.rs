// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `ulp`: storage over RDMA from VM to VM, with the kernel's own NVMe over Fabrics and NFS: on
//! our device, and beside it over Soft-RoCE (rxe) and TCP in the same two guests.
//!
//! vm2 serves, vm1 uses. Data is written with checksums and verified as it is read back, also when
//! the server is killed in the middle of it and comes back. What the device holds when all is over
//! is what it held before.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use super::storage::{
    address, moved, wait_moved, Fio, Medium, Protocol, Storage, Way, CLIENT, SERVER,
};
use super::tools::device_memory;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{FrontEnd, Hosts, SHORT};

/// How long a tree of files may take.
const TREE: Duration = Duration::from_secs(600);

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, CASES.to_vec()))
            .collect()
    };
    Lane {
        name: "ulp",
        about: "NVMe over Fabrics and NFS over RDMA between two VMs, beside rxe and TCP, verified, with servers killed",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Storage,
        runs,
    }
}

/// A case for each pair of a protocol and a way.
macro_rules! case {
    ($name:literal, $what:expr, $protocol:ident over $way:ident) => {
        Case {
            name: $name,
            run: |fixture| $what(fixture, Protocol::$protocol, Way::$way),
        }
    };
}

const CASES: &[Case] = &[
    case!("a changed byte is found", changed, Nvme over Tcp),
    case!("NVMe, RDMA: fio, 4 KiB", small, Nvme over Ours),
    case!("NVMe, RDMA: fio, 1 MiB", large, Nvme over Ours),
    case!("NVMe, RDMA: the target is killed and comes back", killed, Nvme over Ours),
    case!("NFS, RDMA: fio, 4 KiB", small, Nfs over Ours),
    case!("NFS, RDMA: fio, 1 MiB", large, Nfs over Ours),
    case!("NFS, RDMA: a tree of files", tree, Nfs over Ours),
    case!("NFS, RDMA: the server is killed and comes back", killed, Nfs over Ours),
    case!("NFS, RDMA: the server is killed in the middle of a tree", tree_killed, Nfs over Ours),
    case!("NVMe, TCP: fio, 4 KiB", small, Nvme over Tcp),
    case!("NVMe, TCP: fio, 1 MiB", large, Nvme over Tcp),
    case!("NFS, TCP: fio, 4 KiB", small, Nfs over Tcp),
    case!("NFS, TCP: fio, 1 MiB", large, Nfs over Tcp),
    case!("NFS, TCP: a tree of files", tree, Nfs over Tcp),
    case!("NVMe, rxe: fio, 4 KiB", small, Nvme over Rxe),
    case!("NVMe, rxe: fio, 1 MiB", large, Nvme over Rxe),
    case!("NFS, rxe: fio, 4 KiB", small, Nfs over Rxe),
    case!("NFS, rxe: fio, 1 MiB", large, Nfs over Rxe),
    case!("NFS, rxe: a tree of files", tree, Nfs over Rxe),
    Case {
        name: "docs/storage.md",
        run: page,
    },
];

/// The commands of the page on storage. What it takes for granted is what Debian's services do.
fn page(fixture: &mut Fixture) -> Result<()> {
    fixture.vm(SERVER)?.sh(
        "mountpoint -q /sys/kernel/config || { modprobe configfs && mount -t configfs configfs /sys/kernel/config; }; \
         /payload/rdma-device vrdma0 9000 && /payload/storage-server nfs memory tcp",
    )?;
    fixture.vm(CLIENT)?.sh("/payload/rdma-device vrdma0 9000")?;
    super::book::run(fixture, "storage.md")?;
    // Both are there, and by RDMA.
    let client = fixture.vm(CLIENT)?;
    client.sh("nvme list-subsys | grep rdma && grep ' /mnt nfs4 .*proto=rdma' /proc/mounts")?;
    client.sh("echo text >/mnt/file && umount /mnt && nvme disconnect -n disk")?;
    fixture.vm(SERVER)?.sh(
        "grep text /export/data/file && cd /sys/kernel/config/nvmet && rm ports/1/subsystems/disk && rmdir ports/1 && \
         echo 0 >subsystems/disk/namespaces/1/enable && rmdir subsystems/disk/namespaces/1 subsystems/disk && \
         /payload/storage-server stop",
    )?;
    Ok(())
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn small(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    fio(fixture, protocol, way, 4 << 10)
}

fn large(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    fio(fixture, protocol, way, 1 << 20)
}

/// Five minutes of fio on our device; what is there to compare with is measured for one.
fn fio(fixture: &mut Fixture, protocol: Protocol, way: Way, block: u32) -> Result<()> {
    let storage = Storage::set_up(fixture, protocol, way, Medium::Memory)?;
    let seconds = match (fixture.quick, way) {
        (false, Way::Ours) => 300,
        (false, _) => 60,
        (true, _) => 15,
    };
    let fio = Fio::new(storage.fio_file(fixture)?, block, seconds);
    let rates = fio.run(fixture)?;
    let [reads, writes] = rates.total;
    ensure!(reads > 0 && writes > 0, "fio did nothing: {rates:?}");
    let what = if block < 1 << 20 { "4 KiB" } else { "1 MiB" };
    let row = format!(
        "{}, {}, random reads + writes of {what}",
        fixture.kernel,
        protocol.title()
    );
    let cell = format!("{}, {} s", rates.cell(), fio.seconds);
    fixture.cell(&row, way.title(), &cell);
    let name = format!("{}_{}_{block}", protocol.word(), way.word());
    for (direction, at) in [("read", 0), ("write", 1)] {
        let of = |values: [f64; 2]| rounded(values.get(at).copied().unwrap_or_default());
        fixture.figure(&format!("{name}_{direction}_iops"), of(rates.iops));
        fixture.figure(
            &format!("{name}_{direction}_mib_per_s"),
            of(rates.mib_per_s),
        );
    }
    storage.tear_down(fixture)
}

/// Kills the server in the middle of fio's traffic.
fn killed(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    let memory = device_memory(&fixture.bed)?;
    let storage = Storage::set_up(fixture, protocol, way, Medium::Disk)?;
    // The server is away for half a minute, on a busy machine for one and a half.
    let seconds = if fixture.quick { 180 } else { 300 };
    let fio = Fio::new(storage.fio_file(fixture)?, 4 << 10, seconds);
    let job = fio.start(fixture)?;
    wait_moved(fixture, &fio, &job, 0)?;
    let start = Instant::now();
    storage.kill_server(fixture)?;
    let up = start.elapsed();
    let moved = moved(fixture, fio.name)?;
    wait_moved(fixture, &fio, &job, moved)?;
    let name = format!("{}_{}_killed", protocol.word(), way.word());
    fixture.figure(
        &format!("{name}_server_away_seconds"),
        rounded(up.as_secs_f64()),
    );
    fixture.figure(
        &format!("{name}_traffic_after_seconds"),
        rounded(start.elapsed().as_secs_f64()),
    );
    let rates = fio.finish(fixture, &job)?;
    let [reads, writes] = rates.total;
    println!("         {reads} reads and {writes} writes, with the server killed among them");
    storage.tear_down(fixture)?;
    no_leak(fixture, &name, memory)
}

/// The device keeps no memory of a VM that was killed.
fn no_leak(fixture: &mut Fixture, name: &str, before: u64) -> Result<()> {
    let after = device_memory(&fixture.bed)?;
    fixture.figure(
        &format!("{name}_device_memory_kib"),
        [before >> 10, after >> 10].to_vec(),
    );
    ensure!(
        after <= before + LEAK,
        "the device has {after} bytes of memory after the server was killed, and had {before} before"
    );
    Ok(())
}

/// How many bytes the allocator may keep of a device that was busy.
const LEAK: u64 = 4 << 20;

/// fio finds a byte that another one changed: or its silence would prove nothing.
fn changed(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    let storage = Storage::set_up(fixture, protocol, way, Medium::Memory)?;
    let path = &storage.path;
    let command = |what: &str| {
        format!("fio --name=changed --filename={path} --bs=4k --size=8m --direct=1 --verify=crc32c --eta=never {what}")
    };
    let client = fixture.vm(CLIENT)?;
    client.sh(&command("--rw=write --do_verify=0"))?;
    let verify = command("--rw=read --verify_only");
    client.sh(&verify)?;
    // In the middle of a block, far from its header.
    fixture.vm(SERVER)?.sh(
        "dd if=/dev/ram0 of=/tmp/block bs=4096 skip=1000 count=1 iflag=direct status=none && \
         printf x | dd of=/tmp/block bs=1 seek=3000 conv=notrunc status=none && \
         dd if=/tmp/block of=/dev/ram0 bs=4096 seek=1000 count=1 oflag=direct status=none",
    )?;
    let output = client.run(&verify, SHORT)?;
    ensure!(
        output.status != 0 && output.text.contains("verify"),
        "fio did not find the changed byte:\n{}",
        output.text
    );
    storage.tear_down(fixture)
}

/// Makes the tree on the client.
fn make_tree(fixture: &Fixture) -> Result<u32> {
    let files = if fixture.quick { 500 } else { 4000 };
    fixture.vm(CLIENT)?.sh(&format!(
        "rm -rf /tmp/tree /tmp/tree.sums && /payload/tree.py /tmp/tree {files}"
    ))?;
    Ok(files)
}

/// Compares the copy with what was copied: on the server, and from there again on the client.
fn check_tree(fixture: &Fixture, storage: &Storage) -> Result<()> {
    let compare = "rm -rf /tmp/tree && umount /mnt";
    fixture.vm(CLIENT)?.sh(compare)?;
    // Nothing of what the client has read or written is in its memory any more.
    let (word, transport) = (storage.protocol.word(), storage.way.transport());
    fixture.vm(CLIENT)?.sh(&format!(
        "/payload/storage-client {word} {} {transport}",
        address(SERVER)
    ))?;
    let check = |number: u8, directory: &str, sums: &str| -> Result<()> {
        let command = format!("cd {directory} && sha256sum --quiet --strict -c {sums}");
        let output = fixture.vm(number)?.run(&command, TREE)?;
        ensure!(
            output.status == 0,
            "vm{number}: files differ:\n{}",
            output.text
        );
        Ok(())
    };
    fixture.vm(CLIENT)?.sh("cp /tmp/tree.sums /mnt/sums")?;
    check(CLIENT, "/mnt/tree", "/tmp/tree.sums")?;
    check(SERVER, "/export/data/tree", "../sums")
}

fn tree(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    let storage = Storage::set_up(fixture, protocol, way, Medium::Memory)?;
    let files = make_tree(fixture)?;
    let start = Instant::now();
    let output = fixture.vm(CLIENT)?.run("cp -a /tmp/tree /mnt/tree", TREE)?;
    ensure!(
        output.status == 0,
        "cp ended with {}:\n{}",
        output.status,
        output.text
    );
    let seconds = start.elapsed().as_secs_f64();
    check_tree(fixture, &storage)?;
    let row = format!(
        "{}, {}, a copy of {files} files",
        fixture.kernel,
        protocol.title()
    );
    fixture.cell(&row, way.title(), &format!("{seconds:.1} s"));
    fixture.figure(
        &format!("{}_{}_tree_seconds", protocol.word(), way.word()),
        rounded(seconds),
    );
    storage.tear_down(fixture)
}

/// Kills the server in the middle of a copy of many files.
fn tree_killed(fixture: &mut Fixture, protocol: Protocol, way: Way) -> Result<()> {
    let memory = device_memory(&fixture.bed)?;
    let storage = Storage::set_up(fixture, protocol, way, Medium::Disk)?;
    let files = make_tree(fixture)?;
    let job = fixture.vm(CLIENT)?.spawn("cp -av /tmp/tree /mnt/tree")?;
    let part = usize::try_from(files / 4)?;
    job.wait_text(TREE, |text| text.lines().count() >= part)?;
    storage.kill_server(fixture)?;
    ensure!(job.running(), "cp ended too early:\n{}", job.text());
    let output = job.wait(TREE)?;
    ensure!(
        output.status == 0,
        "cp ended with {}:\n{}",
        output.status,
        output.text
    );
    check_tree(fixture, &storage)?;
    storage.tear_down(fixture)?;
    let name = format!("{}_{}_tree_killed", protocol.word(), way.word());
    no_leak(fixture, &name, memory)
}
