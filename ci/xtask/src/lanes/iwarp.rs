// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `iwarp`: our device with ports of iWARP, and Soft-iWARP (siw), with each other and with
//! themselves: rping, ucmatose, perftest over rdma_cm, and storage of the kernel.
//!
//! Hosts are network namespaces with bridges and the VMs' TAPs in them. vm2 serves, vm1 uses. A VM with
//! our device is reached at its own address by others of it, since the device's directory leads to
//! its host, and at the address of its host by siw. A VM with siw has one address more, of which no
//! directory knows.
//!
//! Each pair of RNICs is a column of the lane's table.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::storage::{Fio, Protocol, CLIENT, SERVER};
use super::tools::{Ready, Table};
use super::{decode, Case, Fixture, Lane, Skip};
use crate::images::{Image, Kernel};
use crate::setup;
use crate::vm::{host_address, Capture, FrontEnd, Hosts, Processes, IWARP_MTU, NO_END};

/// Its name.
pub const NAME: &str = "iwarp";

/// How long one run of a tool may take on a busy machine without KVM.
const LONG: Duration = Duration::from_secs(120);

/// Size of short messages, bytes.
const SHORT: u64 = 64;

/// How long storage is worked on with blocks of a size, seconds, and how many MiB of it.
const STORAGE_SECONDS: u64 = 10;
const STORAGE_SIZE: u32 = 16;

/// What the client of storage reads and writes at a time, bytes.
const BLOCKS: [u32; 2] = [4 << 10, 64 << 10];

/// What a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rnic {
    Ours,
    /// Soft-iWARP as it is, which has a CRC only if the peer asks for one.
    Siw,
    /// The same, but it asks.
    SiwCrc,
}

impl Rnic {
    /// What `rdma-device` calls it.
    fn word(self) -> &'static str {
        match self {
            Rnic::Ours => "vrdma0",
            Rnic::Siw => "siw",
            Rnic::SiwCrc => "siw_crc",
        }
    }

    /// The address at which a guest with it listens.
    fn address(self, number: u8) -> String {
        match self {
            Rnic::Ours => format!("10.10.0.{number}"),
            Rnic::Siw | Rnic::SiwCrc => format!("10.10.0.{}", 200 + u16::from(number)),
        }
    }
}

/// A pair of RNICs, and the hosts on which they are.
struct Column {
    /// Its part of the names of cases, and of the table.
    name: &'static str,
    /// Its part of the names of figures.
    word: &'static str,
    server: Rnic,
    client: Rnic,
    hosts: Hosts,
}

/// There is no device of iWARP: our driver is not loaded.
const NO_DEVICE: Hosts = Hosts::Tap(IWARP_MTU, "");

const SIW: Column = Column {
    name: "siw to siw",
    word: "siw_siw",
    server: Rnic::Siw,
    client: Rnic::Siw,
    hosts: NO_DEVICE,
};

const SIW_CRC: Column = Column {
    name: "siw to siw, CRC",
    word: "siw_siw_crc",
    server: Rnic::SiwCrc,
    client: Rnic::SiwCrc,
    hosts: NO_DEVICE,
};

const ONE_PROCESS: Column = Column {
    name: "one process",
    word: "one_process",
    server: Rnic::Ours,
    client: Rnic::Ours,
    hosts: Hosts::Iwarp(Processes::One),
};

const TWO_HOSTS: Column = Column {
    name: "two hosts",
    word: "two_hosts",
    server: Rnic::Ours,
    client: Rnic::Ours,
    hosts: Hosts::Iwarp(Processes::Each),
};

const SIW_SERVER: Column = Column {
    name: "siw is server",
    word: "siw_server",
    server: Rnic::Siw,
    client: Rnic::Ours,
    hosts: Hosts::Iwarp(Processes::Each),
};

const SIW_CLIENT: Column = Column {
    name: "siw is client",
    word: "siw_client",
    server: Rnic::Ours,
    client: Rnic::Siw,
    hosts: Hosts::Iwarp(Processes::Each),
};

/// Whether a case of this lane needs Soft-iWARP.
pub fn needs_siw(case: &Case) -> bool {
    case.name.contains("siw")
}

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        let cases = [
            SIW_CASES,
            SIW_CRC_CASES,
            SIW_CRC_PACKETS,
            ONE_PROCESS_CASES,
            RDMA_CORE,
            TWO_HOSTS_CASES,
            SIW_SERVER_CASES,
            SIW_SERVER_PACKETS,
            SIW_CLIENT_CASES,
            SIW_CLIENT_PACKETS,
        ];
        let cases = |kernel: &Kernel| (*kernel, cases.concat());
        Kernel::STABLE.iter().map(cases).collect()
    };
    Lane {
        name: NAME,
        about: "ports of iWARP with each other and with Soft-iWARP: rdma_cm, perftest, storage, packets",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: NO_DEVICE,
        front_end: FrontEnd::VhostUser,
        image: Image::Storage,
        runs,
    }
}

/// A case of a column.
macro_rules! case {
    ($column:ident, $column_name:literal, $what:expr, $run:expr) => {
        Case {
            name: concat!($column_name, ": ", $what),
            run: |fixture| one(fixture, &$column, $what, $run),
        }
    };
}

/// A case for a tool of perftest, which polls, or waits for events.
macro_rules! perftest {
    ($column:ident, $name:literal, $tool:literal) => {
        case!($column, $name, concat!($tool, " -R"), |fixture, column| {
            perftest(fixture, column, $tool, "")
        })
    };
    ($column:ident, $name:literal, $tool:literal, events) => {
        case!(
            $column,
            $name,
            concat!($tool, " -e -R"),
            |fixture, column| { perftest(fixture, column, $tool, "-e") }
        )
    };
}

/// The cases that all columns have. The names are literals here, since names of cases are.
macro_rules! cases {
    ($column:ident, $name:literal) => {
        &[
            case!($column, $name, "rping", rping),
            case!($column, $name, "ucmatose", ucmatose),
            perftest!($column, $name, "ib_write_bw"),
            perftest!($column, $name, "ib_read_bw"),
            perftest!($column, $name, "ib_send_bw"),
            case!($column, $name, "ib_write_bw -R, short", rate),
            perftest!($column, $name, "ib_write_lat"),
            perftest!($column, $name, "ib_read_lat"),
            perftest!($column, $name, "ib_send_lat"),
            perftest!($column, $name, "ib_read_lat", events),
            perftest!($column, $name, "ib_send_lat", events),
            case!($column, $name, "NVMe over Fabrics", |fixture, column| {
                storage(fixture, column, Protocol::Nvme)
            }),
            case!($column, $name, "NFS over RDMA", |fixture, column| storage(
                fixture,
                column,
                Protocol::Nfs
            )),
        ]
    };
}

const RDMA_CORE: &[Case] = &[Case {
    name: "one process: rdma-core's tests",
    run: |fixture| {
        ONE_PROCESS.set_up(fixture)?;
        super::suite::on_iwarp(fixture)
    },
}];
const SIW_CASES: &[Case] = cases!(SIW, "siw to siw");
const SIW_CRC_CASES: &[Case] = cases!(SIW_CRC, "siw to siw, CRC");
const ONE_PROCESS_CASES: &[Case] = cases!(ONE_PROCESS, "one process");
const TWO_HOSTS_CASES: &[Case] = cases!(TWO_HOSTS, "two hosts");
const SIW_SERVER_CASES: &[Case] = cases!(SIW_SERVER, "siw is server");
const SIW_CLIENT_CASES: &[Case] = cases!(SIW_CLIENT, "siw is client");

/// The case that looks at packets.
macro_rules! packets {
    ($column:ident, $name:literal) => {
        &[case!($column, $name, "packets in Wireshark", packets)]
    };
}

const SIW_CRC_PACKETS: &[Case] = packets!(SIW_CRC, "siw to siw, CRC");
const SIW_SERVER_PACKETS: &[Case] = packets!(SIW_SERVER, "siw is server");
const SIW_CLIENT_PACKETS: &[Case] = packets!(SIW_CLIENT, "siw is client");

impl Column {
    /// Where the server listens.
    fn bind(&self) -> String {
        self.server.address(SERVER)
    }

    /// Where the client connects to.
    fn host(&self) -> String {
        match (self.server, self.client) {
            (Rnic::Ours, Rnic::Siw | Rnic::SiwCrc) => host_address(SERVER),
            _ => self.bind(),
        }
    }

    /// Gives both guests what they are to have.
    fn set_up(&self, fixture: &mut Fixture) -> Result<()> {
        if fixture.plan.hosts != self.hosts {
            fixture.plan.hosts = self.hosts;
            fixture.restart()?;
        }
        for (number, rnic) in [(SERVER, self.server), (CLIENT, self.client)] {
            let vm = fixture.vm(number)?;
            let address = rnic.address(number);
            vm.sh(&format!("ip addr replace {address}/24 dev eth0"))?;
            vm.sh(&format!("/payload/rdma-device {} same-mtu", rnic.word()))?;
        }
        Ok(())
    }

    /// Runs a tool at both ends, each of which gets the port; what the client wrote.
    fn tool(
        &self,
        fixture: &mut Fixture,
        server: impl Fn(u16) -> String,
        client: impl Fn(u16) -> String,
    ) -> Result<(String, String)> {
        let pair = fixture.pair(SERVER, CLIENT);
        let port = pair.port;
        let (server, client) = (server(port), client(port));
        pair.run_when(Ready::Cm(port), &fixture.bed, &server, &client, LONG)
    }
}

/// Runs a case, and puts its cell into the table.
fn one(
    fixture: &mut Fixture,
    column: &Column,
    row: &str,
    run: fn(&mut Fixture, &Column) -> Result<String>,
) -> Result<()> {
    let mut run = || column.set_up(fixture).and_then(|()| run(fixture, column));
    let mut result = run();
    // Of a kernel 7.3, siw now and then does not see a request that came at once: with itself, too.
    let unanswered = |error: &anyhow::Error| error.to_string().contains(NO_END);
    if column.server != Rnic::Ours && result.as_ref().is_err_and(unanswered) {
        println!("         Soft-iWARP has not answered; once more");
        result = run();
    }
    let cell = result.as_ref().map_or("FAILED", String::as_str);
    println!("         {row}, {}: {cell}", column.name);
    let title = format!("{}, {}", fixture.kernel, column.name);
    fixture.cell(row, &title, cell);
    if column.server == Rnic::Ours || column.client == Rnic::Ours {
        return result.map(drop);
    }
    // The faults of Soft-iWARP with itself are not ours.
    result
        .map(drop)
        .map_err(|error| Skip(format!("Soft-iWARP alone: {error:#}")).into())
}

fn rping(fixture: &mut Fixture, column: &Column) -> Result<String> {
    let (bind, host) = (column.bind(), column.host());
    for size in [64, 4096, 65000] {
        let start = |side: &str, address: &str, port| {
            format!("rping {side} -a {address} -p {port} -C 20 -V -S {size}")
        };
        column.tool(
            fixture,
            |port| start("-s", &bind, port),
            |port| start("-c", &host, port),
        )?;
    }
    Ok("passed".to_owned())
}

fn ucmatose(fixture: &mut Fixture, column: &Column) -> Result<String> {
    let (bind, host) = (column.bind(), column.host());
    for options in ["-c 1 -C 10 -S 100", "-c 16 -C 4 -S 4096"] {
        let start = |side: &str, address: &str, port| {
            format!("ucmatose {side} {address} -p {port} {options}")
        };
        let (client, server) = column.tool(
            fixture,
            |port| start("-b", &bind, port),
            |port| start("-s", &host, port),
        )?;
        for text in [client, server] {
            ensure!(text.contains("return status 0"), "no good end:\n{text}");
        }
    }
    Ok("passed".to_owned())
}

/// A tool of perftest; its figure. While it polls in a guest of one vCPU, Soft-iWARP's threads wait
/// for their turns there; while it waits for events (`-e`), they do not.
fn perftest(fixture: &mut Fixture, column: &Column, tool: &str, events: &str) -> Result<String> {
    let bandwidth = tool.ends_with("_bw");
    let count = if fixture.quick { 100 } else { 300 };
    let size = if bandwidth { 65536 } else { 64 };
    let start =
        |host: &str, port| format!("{tool} -F -R -n {count} -s {size} -p {port} {events} {host}");
    let host = column.host();
    let (text, _) = column.tool(fixture, |port| start("", port), |port| start(&host, port))?;
    let table = Table::parse(&text).with_context(|| format!("no table:\n{text}"))?;
    let (value, unit, name) = if bandwidth {
        (table.bandwidth(size)?, "MiB/s", "mib_per_s")
    } else {
        (table.latency(size)?, "µs", "us")
    };
    let value = (value * 10.0).round() / 10.0;
    let how = if events.is_empty() { "" } else { "_events" };
    fixture.figure(&format!("{}_{tool}{how}_{name}", column.word), value);
    Ok(format!("{value:.1} {unit} at {size} B"))
}

/// Short messages in lists, with few completions.
fn rate(fixture: &mut Fixture, column: &Column) -> Result<String> {
    // A WRITE is done when TCP has its bytes: so many more than TCP keeps.
    let many = column.client == Rnic::Ours;
    let count = if many { 512 << 10 } else { 5_120 };
    let start = |host: &str, port| {
        format!("ib_write_bw -F -R -n {count} -s {SHORT} -t 256 -l 32 -p {port} {host}")
    };
    let host = column.host();
    let (text, _) = column.tool(fixture, |port| start("", port), |port| start(&host, port))?;
    let table = Table::parse(&text).with_context(|| format!("no table:\n{text}"))?;
    let rate = table.message_rate(SHORT)?;
    fixture.figure(&format!("{}_million_per_s", column.word), rate);
    Ok(format!("{:.1} thousand/s at {SHORT} B", rate * 1e3))
}

/// Storage in the memory of the server, written and read again by the client, with checksums.
fn storage(fixture: &mut Fixture, column: &Column, protocol: Protocol) -> Result<String> {
    let stop = |fixture: &Fixture| -> Result<()> {
        fixture.vm(CLIENT)?.sh("/payload/storage-client stop")?;
        let stop = "/payload/storage-server stop";
        fixture.vm(SERVER)?.sh(stop).map(drop)
    };
    stop(fixture)?;
    let word = protocol.word();
    let serve = match protocol {
        Protocol::Nvme => format!("nvme memory {} rdma", column.bind()),
        Protocol::Nfs => "nfs memory".to_owned(),
    };
    let server = fixture.vm(SERVER)?;
    server.sh(&format!("/payload/storage-server {serve}"))?;
    let connect = format!("/payload/storage-client {word} {} rdma", column.host());
    let said = fixture.vm(CLIENT)?.sh(&connect)?;
    let file = match protocol {
        Protocol::Nvme => said.lines().last().unwrap_or_default().to_owned(),
        Protocol::Nfs => {
            // The server makes it: reads are to find something there.
            server.sh(&format!(
                "dd if=/dev/zero of=/export/data/fio bs=1M count={STORAGE_SIZE} status=none"
            ))?;
            "/mnt/fio".to_owned()
        }
    };
    let mut cell = Vec::new();
    for block in BLOCKS {
        let fio = Fio {
            jobs: 1,
            size: STORAGE_SIZE,
            // siw sends NFS pages that a write may change behind their CRC.
            serialize: true,
            ..Fio::new(file.clone(), block, STORAGE_SECONDS)
        };
        let rates = fio.run(fixture)?;
        let [reads, writes] = rates.total;
        ensure!(reads > 0 && writes > 0, "{reads} reads, {writes} writes");
        let [read, write] = rates.mib_per_s;
        cell.push(format!("{read:.1} + {write:.1} MiB/s at {block} B"));
        let name = format!("{}_{word}_{block}_mib_per_s", column.word);
        fixture.figure(&name, ((read + write) * 10.0).round() / 10.0);
    }
    stop(fixture)?;
    Ok(cell.join(", "))
}

/// What goes over the wire is iWARP as Wireshark knows it, with CRCs that are right.
fn packets(fixture: &mut Fixture, column: &Column) -> Result<String> {
    setup::packages(&["tshark"])?;
    let file = fixture.logs().join(format!("{}.pcapng", column.word));
    let capture = Capture::start(&fixture.bed, CLIENT, "wire", "tcp", &file)?;
    rping(fixture, column)?;
    let host = column.host();
    // Messages of a segment, of several, and of many, most not multiples of four.
    for (tool, size) in [
        ("ib_send_bw", 1),
        ("ib_send_bw", 8191),
        ("ib_write_bw", 65535),
        ("ib_read_bw", 65535),
    ] {
        let start = |host: &str, port| format!("{tool} -F -R -n 20 -s {size} -p {port} {host}");
        column.tool(fixture, |port| start("", port), |port| start(&host, port))?;
    }
    // The last segments of what is closed.
    std::thread::sleep(Duration::from_secs(1));
    let file = capture.finish()?;
    decode::check(&file)
}
