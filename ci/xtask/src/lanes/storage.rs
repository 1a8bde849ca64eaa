// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Storage over RDMA from VM to VM, with the kernel's own NVMe over Fabrics and NFS, and fio, which
//! uses it and verifies what it reads: for the lanes that serve storage.
//!
//! vm2 serves, vm1 uses.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::tools::{counts, settled, Counts};
use super::Fixture;
use crate::vm::{wait_for, Job, SHORT};

/// The VM that uses the storage.
pub const CLIENT: u8 = 1;

/// The VM that serves it.
pub const SERVER: u8 = 2;

/// How long traffic may take to begin, and to go on after the server came back. A client of NFS
/// gives way to its server for longer each time it finds nobody, and the server asks its clients of
/// before first.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// What is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Nvme,
    Nfs,
}

impl Protocol {
    /// Its part of the names of figures, and of commands.
    pub fn word(self) -> &'static str {
        match self {
            Protocol::Nvme => "nvme",
            Protocol::Nfs => "nfs",
        }
    }

    /// Its name for people.
    pub fn title(self) -> &'static str {
        match self {
            Protocol::Nvme => "NVMe",
            Protocol::Nfs => "NFS",
        }
    }
}

/// By which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Ours,
    Rxe,
    Tcp,
}

impl Way {
    /// Its column in the report.
    pub fn title(self) -> &'static str {
        match self {
            Way::Ours => "this device",
            Way::Rxe => "rxe",
            Way::Tcp => "TCP",
        }
    }

    /// Its part of the names of figures.
    pub fn word(self) -> &'static str {
        match self {
            Way::Ours => "ours",
            Way::Rxe => "rxe",
            Way::Tcp => "tcp",
        }
    }

    /// What the kernel calls it.
    pub fn transport(self) -> &'static str {
        match self {
            Way::Ours | Way::Rxe => "rdma",
            Way::Tcp => "tcp",
        }
    }

    /// The RDMA device that guests have meanwhile.
    pub fn device(self) -> &'static str {
        match self {
            Way::Ours | Way::Tcp => "vrdma0",
            Way::Rxe => "rxe0",
        }
    }
}

/// Where the server has its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Gone with the VM.
    Memory,
    /// A disk that outlives the VM.
    Disk,
}

impl Medium {
    fn word(self) -> &'static str {
        match self {
            Medium::Memory => "memory",
            Medium::Disk => "disk",
        }
    }
}

/// Storage that a client has at hand.
pub struct Storage {
    /// What is served.
    pub protocol: Protocol,
    /// By which way.
    pub way: Way,
    medium: Medium,
    /// The server's address.
    server: String,
    /// A further word for `rdma-device`.
    frames: &'static str,
    /// What the client reads and writes: a block device, or a directory.
    pub path: String,
    /// What the device held before.
    before: Vec<Counts>,
}

impl Storage {
    /// Serves and connects, with the longest frames. Whatever a case before this one left behind goes
    /// first.
    pub fn set_up(
        fixture: &mut Fixture,
        protocol: Protocol,
        way: Way,
        medium: Medium,
    ) -> Result<Self> {
        let server = address(SERVER);
        Self::with_frames(fixture, protocol, way, medium, server, "")
    }

    /// The same with frames as long as they are, on our device, and with an address of the server.
    pub fn with_same_mtu(
        fixture: &mut Fixture,
        protocol: Protocol,
        server: String,
    ) -> Result<Self> {
        let (way, medium) = (Way::Ours, Medium::Memory);
        Self::with_frames(fixture, protocol, way, medium, server, "same-mtu")
    }

    fn with_frames(
        fixture: &mut Fixture,
        protocol: Protocol,
        way: Way,
        medium: Medium,
        server: String,
        frames: &'static str,
    ) -> Result<Self> {
        if clean(fixture).is_err() {
            fixture.restart()?;
        }
        for number in [SERVER, CLIENT] {
            let device = way.device();
            fixture
                .vm(number)?
                .sh(&format!("/payload/rdma-device {device} {frames}"))?;
        }
        if medium == Medium::Disk && protocol == Protocol::Nfs {
            fixture.vm(SERVER)?.sh("/payload/storage-server format")?;
        }
        let mut storage = Storage {
            protocol,
            way,
            medium,
            server,
            frames,
            path: "/mnt".to_owned(),
            // With rxe, there is no driver for ours in the guests.
            before: counts(&fixture.bed)?,
        };
        storage.serve(fixture)?;
        let (word, transport) = (protocol.word(), way.transport());
        let said = fixture.vm(CLIENT)?.sh(&format!(
            "/payload/storage-client {word} {} {transport}",
            storage.server
        ))?;
        if protocol == Protocol::Nvme {
            let device = said.lines().last().unwrap_or_default();
            ensure!(device.starts_with("/dev/nvme"), "no NVMe device: {said}");
            device.clone_into(&mut storage.path);
        }
        Ok(storage)
    }

    /// Starts the server.
    fn serve(&self, fixture: &Fixture) -> Result<()> {
        let medium = self.medium.word();
        let command = match self.protocol {
            Protocol::Nvme => {
                let transport = self.way.transport();
                format!("nvme {medium} {} {transport}", self.server)
            }
            Protocol::Nfs => format!("nfs {medium}"),
        };
        let server = fixture.vm(SERVER)?;
        server
            .sh(&format!("/payload/storage-server {command}"))
            .map(drop)
    }

    /// What fio works on. On NFS that is a file, which the server makes: reads are to find
    /// something there.
    pub fn fio_file(&self, fixture: &Fixture) -> Result<String> {
        match self.protocol {
            Protocol::Nvme => Ok(self.path.clone()),
            Protocol::Nfs => {
                let size = Fio::SIZE * Fio::JOBS;
                fixture.vm(SERVER)?.sh(&format!(
                    "dd if=/dev/zero of=/export/data/fio bs=1M count={size} status=none && sync /export/data/fio"
                ))?;
                Ok(format!("{}/fio", self.path))
            }
        }
    }

    /// Kills the server's VM, and brings both back.
    pub fn kill_server(&self, fixture: &mut Fixture) -> Result<()> {
        let server = fixture.vm_mut(SERVER)?;
        server.kill()?;
        server.start_again()?;
        let device = self.way.device();
        server.sh(&format!("/payload/rdma-device {device} {}", self.frames))?;
        self.serve(fixture)
    }

    /// Disconnects, ends the server, and sees that the device has nothing left of it.
    pub fn tear_down(self, fixture: &mut Fixture) -> Result<()> {
        clean(fixture)?;
        if self.way == Way::Ours {
            // As long as it knows the device, the kernel keeps the completion queues that its
            // consumers shared.
            let frames = self.frames;
            let again = format!("rmmod virtio_rdma && /payload/rdma-device vrdma0 {frames}");
            for number in [SERVER, CLIENT] {
                fixture.vm(number)?.sh(&again)?;
            }
        }
        settled(&fixture.bed, &self.before)
    }
}

/// Ends clients and servers.
pub fn clean(fixture: &Fixture) -> Result<()> {
    fixture.vm(CLIENT)?.sh("/payload/storage-client stop")?;
    fixture
        .vm(SERVER)?
        .sh("/payload/storage-server stop")
        .map(drop)
}

/// The address of a VM.
pub fn address(number: u8) -> String {
    format!("10.10.0.{number}")
}

/// A run of fio: random reads and writes, each block written with its checksum, and read again to
/// verify it, soon after and at the end.
pub struct Fio {
    /// The VM that it runs in.
    pub vm: u8,
    /// Tells it from others that run at the same time.
    pub name: &'static str,
    /// What it reads and writes.
    pub file: String,
    /// Bytes that it reads and writes at a time.
    pub block: u32,
    /// For how long.
    pub seconds: u64,
    /// How many processes.
    pub jobs: u32,
    /// MiB for each of them.
    pub size: u32,
    /// How long each does nothing after every eight blocks, so that others in the guest get on with
    /// what they do.
    pub pause: Duration,
    /// Whether what it reads and writes at the same time is never the same. Otherwise it may be, when it
    /// begins again with blocks that it has been at.
    pub serialize: bool,
}

impl Fio {
    /// As long as it is asked to, with four processes and 48 MiB for each.
    pub fn new(file: String, block: u32, seconds: u64) -> Self {
        Fio {
            vm: CLIENT,
            name: "ulp",
            file,
            block,
            seconds,
            jobs: Self::JOBS,
            size: Self::SIZE,
            pause: Duration::ZERO,
            serialize: false,
        }
    }

    const JOBS: u32 = 4;

    const SIZE: u32 = 48;

    /// Where it leaves its report in the guest.
    pub fn result(&self) -> String {
        format!("/tmp/fio-{}.json", self.name)
    }

    /// The command line.
    pub fn command(&self) -> String {
        let Fio {
            name,
            file,
            block,
            seconds,
            jobs,
            size,
            pause,
            serialize,
            ..
        } = self;
        let (result, pause, serialize) = (self.result(), pause.as_micros(), u8::from(*serialize));
        format!(
            "fio --name={name} --filename={file} --rw=randrw --bs={block} --iodepth=32 --numjobs={jobs} --size={size}m \
             --offset_increment={size}m --time_based --runtime={seconds} --direct=1 --ioengine=libaio --verify=crc32c \
             --serialize_overlap={serialize} --verify_backlog=64 --verify_fatal=1 --thinktime={pause} --thinktime_blocks=8 --group_reporting --eta=never --output-format=json --output={result}"
        )
    }

    /// Starts it.
    pub fn start(&self, fixture: &Fixture) -> Result<Job> {
        fixture.vm(self.vm)?.spawn(&self.command())
    }

    /// Waits for its end and reads what it measured; an error if it found any.
    pub fn finish(&self, fixture: &Fixture, job: &Job) -> Result<Rates> {
        // Large blocks on a slow way are many seconds of work that has begun when the time is over,
        // and verifying takes as long again.
        let output = job.wait(Duration::from_secs(self.seconds * 2 + 300))?;
        let vm = fixture.vm(self.vm)?;
        let text = vm.sh(&format!("cat {}", self.result())).unwrap_or_default();
        ensure!(
            output.status == 0,
            "fio ended with {}:\n{}\n{}",
            output.status,
            output.text,
            text.chars().take(4000).collect::<String>()
        );
        Rates::parse(&text)
    }

    /// Runs it to its end.
    pub fn run(&self, fixture: &Fixture) -> Result<Rates> {
        let job = self.start(fixture)?;
        self.finish(fixture, &job)
    }
}

/// What fio measured.
#[derive(Debug, PartialEq)]
pub struct Rates {
    /// Reads and writes, per second.
    pub iops: [f64; 2],
    /// Of reads and writes.
    pub mib_per_s: [f64; 2],
    /// How many reads and writes there were.
    pub total: [u64; 2],
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

    /// For a table.
    pub fn cell(&self) -> String {
        let [read, write] = self.mib_per_s;
        let [reads, writes] = self.iops;
        format!("{read:.1} + {write:.1} MiB/s ({reads:.0} + {writes:.0} IOPS)")
    }
}

/// How much the fio of that name has read and written so far.
pub fn moved(fixture: &Fixture, name: &str) -> Result<u64> {
    let command = format!("/payload/storage-client moved {name}");
    let text = fixture.vm(CLIENT)?.sh(&command)?;
    text.trim()
        .parse()
        .with_context(|| format!("not a number: {text}"))
}

/// Waits until a fio has moved some MiB beyond so many bytes.
pub fn wait_moved(fixture: &Fixture, fio: &Fio, job: &Job, from: u64) -> Result<()> {
    let there = wait_for(TIMEOUT, || {
        if !job.running() {
            let ended = job.wait(SHORT)?;
            bail!(
                "fio ended too early, with {}:\n{}",
                ended.status,
                ended.text
            );
        }
        Ok((moved(fixture, fio.name)? >= from + (4 << 20)).then_some(()))
    })?;
    there.with_context(|| format!("no traffic for {TIMEOUT:?}, with {from} bytes moved"))
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
