// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `ulp`: storage over RDMA from VM to VM, with the kernel's own NVMe over Fabrics and NFS: on our device, and beside it over
//! Soft-RoCE (rxe) and TCP in the same two guests.
//!
//! vm2 serves, vm1 uses. Data is written with checksums and verified as it is read back, also when the server is killed in the middle
//! of it and comes back. What the device holds when all is over is what it held before.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::tools::{counts, device_memory, settled, Counts};
use super::{Case, Ground, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{wait_for, Job, SHORT};

const CLIENT: u8 = 1;
const SERVER: u8 = 2;

/// How long traffic may take to begin, and to go on after the server came back. A client of NFS gives way to its server for longer each
/// time it finds nobody, and the server asks its clients of before first.
const PATIENCE: Duration = Duration::from_secs(120);

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
        image: Image::Storage,
        runs,
    }
}

/// A case for each pair of a protocol and a way.
macro_rules! case {
    ($name:literal, $what:expr, $protocol:ident over $way:ident) => {
        Case {
            name: $name,
            run: |ground| $what(ground, Protocol::$protocol, Way::$way),
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
];

/// What is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Nvme,
    Nfs,
}

impl Protocol {
    fn word(self) -> &'static str {
        match self {
            Protocol::Nvme => "nvme",
            Protocol::Nfs => "nfs",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Protocol::Nvme => "NVMe",
            Protocol::Nfs => "NFS",
        }
    }
}

/// By which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Ours,
    Rxe,
    Tcp,
}

impl Way {
    /// Its column in the report.
    fn title(self) -> &'static str {
        match self {
            Way::Ours => "this device",
            Way::Rxe => "rxe",
            Way::Tcp => "TCP",
        }
    }

    /// Its part of the names of figures.
    fn word(self) -> &'static str {
        match self {
            Way::Ours => "ours",
            Way::Rxe => "rxe",
            Way::Tcp => "tcp",
        }
    }

    fn transport(self) -> &'static str {
        match self {
            Way::Ours | Way::Rxe => "rdma",
            Way::Tcp => "tcp",
        }
    }

    /// The RDMA device that guests have meanwhile.
    fn device(self) -> &'static str {
        match self {
            Way::Ours | Way::Tcp => "vrdma0",
            Way::Rxe => "rxe0",
        }
    }
}

/// Where the server has its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Gone with the VM.
    Memory,
    /// A disk that outlives the VM.
    Disk,
}

impl Place {
    fn word(self) -> &'static str {
        match self {
            Place::Memory => "memory",
            Place::Disk => "disk",
        }
    }
}

/// Storage that a client has at hand.
struct Storage {
    protocol: Protocol,
    way: Way,
    place: Place,
    /// What the client reads and writes: a block device, or a directory.
    path: String,
    /// What the device held before.
    before: Vec<Counts>,
}

impl Storage {
    /// Serves and connects. Whatever a case before this one left behind goes first.
    fn set_up(ground: &mut Ground, protocol: Protocol, way: Way, place: Place) -> Result<Self> {
        if clean(ground).is_err() {
            ground.restart()?;
        }
        for number in [SERVER, CLIENT] {
            let device = way.device();
            ground
                .vm(number)?
                .sh(&format!("/payload/rdma-device {device}"))?;
        }
        if place == Place::Disk && protocol == Protocol::Nfs {
            ground.vm(SERVER)?.sh("/payload/storage-server format")?;
        }
        let mut storage = Storage {
            protocol,
            way,
            place,
            path: "/mnt".to_owned(),
            // With rxe, there is no driver for ours in the guests.
            before: counts(&ground.bed)?,
        };
        storage.serve(ground)?;
        let (word, transport) = (protocol.word(), way.transport());
        let said = ground.vm(CLIENT)?.sh(&format!(
            "/payload/storage-client {word} {} {transport}",
            address(SERVER)
        ))?;
        if protocol == Protocol::Nvme {
            let device = said.lines().last().unwrap_or_default();
            ensure!(device.starts_with("/dev/nvme"), "no NVMe device: {said}");
            device.clone_into(&mut storage.path);
        }
        Ok(storage)
    }

    /// Starts the server.
    fn serve(&self, ground: &Ground) -> Result<()> {
        let place = self.place.word();
        let command = match self.protocol {
            Protocol::Nvme => {
                let transport = self.way.transport();
                format!("nvme {place} {} {transport}", address(SERVER))
            }
            Protocol::Nfs => format!("nfs {place}"),
        };
        let server = ground.vm(SERVER)?;
        server
            .sh(&format!("/payload/storage-server {command}"))
            .map(drop)
    }

    /// What fio works on. On NFS that is a file, which the server makes: reads are to find something there.
    fn fio_file(&self, ground: &Ground) -> Result<String> {
        match self.protocol {
            Protocol::Nvme => Ok(self.path.clone()),
            Protocol::Nfs => {
                let size = Fio::SIZE * Fio::JOBS;
                ground.vm(SERVER)?.sh(&format!(
                    "dd if=/dev/zero of=/export/data/fio bs=1M count={size} status=none && sync /export/data/fio"
                ))?;
                Ok(format!("{}/fio", self.path))
            }
        }
    }

    /// Kills the server's VM, and brings both back.
    fn kill_server(&self, ground: &mut Ground) -> Result<()> {
        let server = ground.vm_mut(SERVER)?;
        server.kill()?;
        server.start_again()?;
        server.sh(&format!("/payload/rdma-device {}", self.way.device()))?;
        self.serve(ground)
    }

    /// Disconnects, ends the server, and sees that the device has nothing left of it.
    fn tear_down(self, ground: &mut Ground) -> Result<()> {
        clean(ground)?;
        if self.way == Way::Ours {
            // As long as it knows the device, the kernel keeps the completion queues that its consumers shared.
            for number in [SERVER, CLIENT] {
                ground
                    .vm(number)?
                    .sh("rmmod virtio_rdma && /payload/rdma-device vrdma0")?;
            }
        }
        settled(&ground.bed, &self.before)
    }
}

/// Ends clients and servers.
fn clean(ground: &Ground) -> Result<()> {
    ground.vm(CLIENT)?.sh("/payload/storage-client stop")?;
    ground
        .vm(SERVER)?
        .sh("/payload/storage-server stop")
        .map(drop)
}

fn address(number: u8) -> String {
    format!("10.10.0.{number}")
}

/// A run of fio: random reads and writes, each block written with its checksum, and read again to verify it, soon after and at the end.
struct Fio {
    file: String,
    block: u32,
    seconds: u64,
}

impl Fio {
    const JOBS: u32 = 4;

    /// MiB for each job.
    const SIZE: u32 = 48;

    const RESULT: &str = "/tmp/fio.json";

    fn start(&self, ground: &Ground) -> Result<Job> {
        let Fio {
            file,
            block,
            seconds,
        } = self;
        let (jobs, size) = (Self::JOBS, Self::SIZE);
        ground.vm(CLIENT)?.spawn(&format!(
            "fio --name=ulp --filename={file} --rw=randrw --bs={block} --iodepth=32 --numjobs={jobs} --size={size}m \
             --offset_increment={size}m --time_based --runtime={seconds} --direct=1 --ioengine=libaio --verify=crc32c \
             --verify_backlog=64 --verify_fatal=1 --group_reporting --eta=never --output-format=json --output={}",
            Self::RESULT
        ))
    }

    fn finish(&self, ground: &Ground, job: &Job) -> Result<Rates> {
        // Large blocks on a slow way are many seconds of work that has begun when the time is over, and verifying takes as long again.
        let output = job.wait(Duration::from_secs(self.seconds * 2 + 300))?;
        let vm = ground.vm(CLIENT)?;
        let text = vm.sh(&format!("cat {}", Self::RESULT)).unwrap_or_default();
        ensure!(
            output.status == 0,
            "fio ended with {}:\n{}\n{}",
            output.status,
            output.text,
            text.chars().take(4000).collect::<String>()
        );
        Rates::parse(&text)
    }

    fn run(&self, ground: &Ground) -> Result<Rates> {
        let job = self.start(ground)?;
        self.finish(ground, &job)
    }
}

/// What fio measured.
#[derive(Debug, PartialEq)]
struct Rates {
    /// Reads and writes, per second.
    iops: [f64; 2],
    /// Of reads and writes.
    mib_per_s: [f64; 2],
    /// How many reads and writes there were.
    total: [u64; 2],
}

impl Rates {
    /// Reads fio's report; an error if it has errors.
    fn parse(text: &str) -> Result<Self> {
        let (_, json) = text.split_once('{').context("no report of fio")?;
        let report: Value = serde_json::from_str(&format!("{{{json}"))
            .with_context(|| format!("not a report of fio:\n{text}"))?;
        let jobs = report["jobs"]
            .as_array()
            .context("no jobs in the report of fio")?;
        let [job] = jobs.as_slice() else {
            bail!("{} jobs in a report of fio on a group", jobs.len());
        };
        for key in ["error", "total_err"] {
            ensure!(
                job[key].as_u64().is_none_or(|errors| errors == 0),
                "fio reports errors: {key} is {}",
                job[key]
            );
        }
        let number = |direction: &str, key: &str| {
            job[direction][key]
                .as_f64()
                .with_context(|| format!("no {direction} {key} in the report of fio"))
        };
        let total = |direction: &str| {
            job[direction]["total_ios"]
                .as_u64()
                .with_context(|| format!("no {direction} total_ios in the report of fio"))
        };
        let mib = f64::from(1 << 20);
        Ok(Rates {
            iops: [number("read", "iops")?, number("write", "iops")?],
            mib_per_s: [
                number("read", "bw_bytes")? / mib,
                number("write", "bw_bytes")? / mib,
            ],
            total: [total("read")?, total("write")?],
        })
    }

    fn cell(&self) -> String {
        let [read, write] = self.mib_per_s;
        let [reads, writes] = self.iops;
        format!("{read:.1} + {write:.1} MiB/s ({reads:.0} + {writes:.0} IOPS)")
    }
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn small(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    fio(ground, protocol, way, 4 << 10)
}

fn large(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    fio(ground, protocol, way, 1 << 20)
}

/// Five minutes of fio on our device; what is there to compare with is measured for one.
fn fio(ground: &mut Ground, protocol: Protocol, way: Way, block: u32) -> Result<()> {
    let storage = Storage::set_up(ground, protocol, way, Place::Memory)?;
    let fio = Fio {
        file: storage.fio_file(ground)?,
        block,
        seconds: match (ground.quick, way) {
            (false, Way::Ours) => 300,
            (false, _) => 60,
            (true, _) => 15,
        },
    };
    let rates = fio.run(ground)?;
    let [reads, writes] = rates.total;
    ensure!(reads > 0 && writes > 0, "fio did nothing: {rates:?}");
    let what = if block < 1 << 20 { "4 KiB" } else { "1 MiB" };
    let row = format!(
        "{}, {}, random reads + writes of {what}",
        ground.kernel,
        protocol.title()
    );
    let cell = format!("{}, {} s", rates.cell(), fio.seconds);
    ground.cell(&row, way.title(), &cell);
    let name = format!("{}_{}_{block}", protocol.word(), way.word());
    for (direction, at) in [("read", 0), ("write", 1)] {
        let of = |values: [f64; 2]| rounded(values.get(at).copied().unwrap_or_default());
        ground.figure(&format!("{name}_{direction}_iops"), of(rates.iops));
        ground.figure(
            &format!("{name}_{direction}_mib_per_s"),
            of(rates.mib_per_s),
        );
    }
    storage.tear_down(ground)
}

/// Kills the server in the middle of fio's traffic.
fn killed(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    let memory = device_memory(&ground.bed)?;
    let storage = Storage::set_up(ground, protocol, way, Place::Disk)?;
    let fio = Fio {
        file: storage.fio_file(ground)?,
        block: 4 << 10,
        // The server is away for half a minute, on a busy machine for one and a half.
        seconds: if ground.quick { 180 } else { 300 },
    };
    let job = fio.start(ground)?;
    wait_moved(ground, &job, 0)?;
    let start = Instant::now();
    storage.kill_server(ground)?;
    let up = start.elapsed();
    let moved = moved(ground)?;
    wait_moved(ground, &job, moved)?;
    let name = format!("{}_{}_killed", protocol.word(), way.word());
    ground.figure(
        &format!("{name}_server_away_seconds"),
        rounded(up.as_secs_f64()),
    );
    ground.figure(
        &format!("{name}_traffic_after_seconds"),
        rounded(start.elapsed().as_secs_f64()),
    );
    let rates = fio.finish(ground, &job)?;
    let [reads, writes] = rates.total;
    println!("         {reads} reads and {writes} writes, with the server killed among them");
    storage.tear_down(ground)?;
    no_leak(ground, &name, memory)
}

/// The device keeps no memory of a VM that was killed.
fn no_leak(ground: &mut Ground, name: &str, before: u64) -> Result<()> {
    let after = device_memory(&ground.bed)?;
    ground.figure(
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

/// How much fio has read and written so far.
fn moved(ground: &Ground) -> Result<u64> {
    let text = ground.vm(CLIENT)?.sh("/payload/storage-client moved")?;
    text.trim()
        .parse()
        .with_context(|| format!("not a number: {text}"))
}

/// Waits until fio has moved some MiB beyond so many bytes.
fn wait_moved(ground: &Ground, job: &Job, from: u64) -> Result<()> {
    let there = wait_for(PATIENCE, || {
        if !job.running() {
            let ended = job.wait(SHORT)?;
            bail!(
                "fio ended too early, with {}:\n{}",
                ended.status,
                ended.text
            );
        }
        Ok((moved(ground)? >= from + (4 << 20)).then_some(()))
    })?;
    there.with_context(|| format!("no traffic for {PATIENCE:?}, with {} bytes moved", from))
}

/// fio finds a byte that another one changed: or its silence would prove nothing.
fn changed(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    let storage = Storage::set_up(ground, protocol, way, Place::Memory)?;
    let path = &storage.path;
    let command = |what: &str| {
        format!("fio --name=changed --filename={path} --bs=4k --size=8m --direct=1 --verify=crc32c --eta=never {what}")
    };
    let client = ground.vm(CLIENT)?;
    client.sh(&command("--rw=write --do_verify=0"))?;
    let verify = command("--rw=read --verify_only");
    client.sh(&verify)?;
    // In the middle of a block, far from its header.
    ground.vm(SERVER)?.sh(
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
    storage.tear_down(ground)
}

/// Makes the tree on the client.
fn make_tree(ground: &Ground) -> Result<u32> {
    let files = if ground.quick { 500 } else { 4000 };
    ground.vm(CLIENT)?.sh(&format!(
        "rm -rf /tmp/tree /tmp/tree.sums && /payload/tree.py /tmp/tree {files}"
    ))?;
    Ok(files)
}

/// Compares the copy with what was copied: on the server, and from there again on the client.
fn check_tree(ground: &Ground, storage: &Storage) -> Result<()> {
    let compare = "rm -rf /tmp/tree && umount /mnt";
    ground.vm(CLIENT)?.sh(compare)?;
    // Nothing of what the client has read or written is in its memory any more.
    let (word, transport) = (storage.protocol.word(), storage.way.transport());
    ground.vm(CLIENT)?.sh(&format!(
        "/payload/storage-client {word} {} {transport}",
        address(SERVER)
    ))?;
    let check = |number: u8, directory: &str, sums: &str| -> Result<()> {
        let command = format!("cd {directory} && sha256sum --quiet --strict -c {sums}");
        let output = ground.vm(number)?.run(&command, TREE)?;
        ensure!(
            output.status == 0,
            "vm{number}: files differ:\n{}",
            output.text
        );
        Ok(())
    };
    ground.vm(CLIENT)?.sh("cp /tmp/tree.sums /mnt/sums")?;
    check(CLIENT, "/mnt/tree", "/tmp/tree.sums")?;
    check(SERVER, "/export/data/tree", "../sums")
}

fn tree(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    let storage = Storage::set_up(ground, protocol, way, Place::Memory)?;
    let files = make_tree(ground)?;
    let start = Instant::now();
    let output = ground.vm(CLIENT)?.run("cp -a /tmp/tree /mnt/tree", TREE)?;
    ensure!(
        output.status == 0,
        "cp ended with {}:\n{}",
        output.status,
        output.text
    );
    let seconds = start.elapsed().as_secs_f64();
    check_tree(ground, &storage)?;
    let row = format!(
        "{}, {}, a copy of {files} files",
        ground.kernel,
        protocol.title()
    );
    ground.cell(&row, way.title(), &format!("{seconds:.1} s"));
    ground.figure(
        &format!("{}_{}_tree_seconds", protocol.word(), way.word()),
        rounded(seconds),
    );
    storage.tear_down(ground)
}

/// Kills the server in the middle of a copy of many files.
fn tree_killed(ground: &mut Ground, protocol: Protocol, way: Way) -> Result<()> {
    let memory = device_memory(&ground.bed)?;
    let storage = Storage::set_up(ground, protocol, way, Place::Disk)?;
    let files = make_tree(ground)?;
    let job = ground.vm(CLIENT)?.spawn("cp -av /tmp/tree /mnt/tree")?;
    let part = usize::try_from(files / 4)?;
    job.wait_text(TREE, |text| text.lines().count() >= part)?;
    storage.kill_server(ground)?;
    ensure!(job.running(), "cp ended too early:\n{}", job.text());
    let output = job.wait(TREE)?;
    ensure!(
        output.status == 0,
        "cp ended with {}:\n{}",
        output.status,
        output.text
    );
    check_tree(ground, &storage)?;
    storage.tear_down(ground)?;
    let name = format!("{}_{}_tree_killed", protocol.word(), way.word());
    no_leak(ground, &name, memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: u64, total: u64) -> String {
        format!(
            "note: something\n{{\"jobs\": [{{\"error\": {error}, \"total_err\": {total}, \
             \"read\": {{\"iops\": 10.5, \"bw_bytes\": 1048576, \"total_ios\": 100}}, \
             \"write\": {{\"iops\": 20.0, \"bw_bytes\": 3145728, \"total_ios\": 7}}}}]}}"
        )
    }

    #[test]
    fn reports_of_fio_are_read() {
        let rates = Rates::parse(&report(0, 0)).expect("rates");
        let wanted = Rates {
            iops: [10.5, 20.0],
            mib_per_s: [1.0, 3.0],
            total: [100, 7],
        };
        assert_eq!(rates, wanted);
    }

    #[test]
    fn errors_of_fio_are_errors() {
        assert!(Rates::parse(&report(84, 0)).is_err());
        assert!(Rates::parse(&report(0, 1)).is_err());
        assert!(Rates::parse("fio: nothing").is_err());
    }
}
