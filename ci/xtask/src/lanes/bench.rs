// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lanes `bench-vm` and `bench-wire`: how our device compares with what two VMs have today, Soft-RoCE
//! (rxe) and TCP on virtio-net. The VMs have one device process, or one each, with VXLAN between them.
//!
//! All three are in the same two guests and take turns: each round measures all of them, so that a
//! machine that is slower for a while is slower for all. The figures are the medians of the rounds,
//! and each has its target as a case.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use virtio_rdma_bench::{Better, Figure, Part, Target};

use super::tools::Table;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::report::{CaseReport, Outcome};
use crate::vm::{kvm, FrontEnd, Hosts, Vm};

/// Those that there are.
const VMS: (u8, u8) = (1, 2);

/// How often everything is measured.
const ROUNDS: usize = 5;

/// How long one run of a tool may take on a busy machine without KVM.
const LONG: Duration = Duration::from_secs(120);

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "bench-vm",
        about:
            "latency, bandwidth and message rate between two VMs beside rxe and TCP in the same VMs",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

/// The same between VMs of two device processes, as between hosts.
pub fn wire() -> Lane {
    Lane {
        name: "bench-wire",
        about: "the same between VMs of two device processes, with VXLAN between them",
        hosts: Hosts::Vxlan(9000),
        runs: || vec![(Kernel::Trixie, WIRE_CASES.to_vec())],
        ..lane()
    }
}

/// rxe has the network interface, with the frames with which rxe and TCP do best.
const SET_UP: &str = "rxe and jumbo frames";

const CASES: &[Case] = &[
    Case {
        name: SET_UP,
        run: |fixture| set_up(fixture, "Our device needs no network for its data."),
    },
    Case {
        name: "rounds",
        run: |fixture| rounds(fixture, &LOCAL),
    },
    Case {
        name: "curves",
        run: curves,
    },
];

const WIRE_CASES: &[Case] = &[
    Case {
        name: SET_UP,
        run: |fixture| {
            let how = "Over the wire, each VM has a device process of its own, whose packets go to the other one \
                       in VXLAN over loopback.";
            set_up(fixture, how)
        },
    },
    Case {
        name: "rounds",
        run: |fixture| rounds(fixture, &WIRE),
    },
];

/// What is wanted of our values over rxe's, and of our bandwidth over that of TCP.
struct Targets {
    /// What the sections of reports are called besides the quantity.
    way: &'static str,
    latency: Target,
    bandwidth: Target,
    rate: Target,
    tcp: Target,
}

const LOCAL: Targets = Targets {
    way: "",
    latency: Target::Max(1.0 / 15.0),
    bandwidth: Target::Min(100.0),
    rate: Target::Min(20.0),
    tcp: Target::Min(10.0),
};

const WIRE: Targets = Targets {
    way: " over the wire",
    latency: Target::Max(1.0 / 10.0),
    bandwidth: Target::Min(10.0),
    rate: Target::Min(10.0),
    tcp: Target::Min(3.0),
};

impl Targets {
    fn of(&self, quantity: Quantity) -> Target {
        match quantity {
            Quantity::Latency => self.latency,
            Quantity::Bandwidth => self.bandwidth,
            Quantity::Rate => self.rate,
        }
    }
}

/// An RDMA device of the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaDevice {
    Ours,
    Rxe,
}

impl RdmaDevice {
    const BOTH: [RdmaDevice; 2] = [RdmaDevice::Ours, RdmaDevice::Rxe];

    /// Its name in the guests.
    fn name(self) -> &'static str {
        match self {
            RdmaDevice::Ours => "vrdma0",
            RdmaDevice::Rxe => "rxe0",
        }
    }

    /// Its name in reports.
    fn title(self) -> &'static str {
        match self {
            RdmaDevice::Ours => "ours",
            RdmaDevice::Rxe => "rxe",
        }
    }
}

/// What a tool of perftest measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    Latency,
    Bandwidth,
    Rate,
}

impl Quantity {
    pub fn section(self) -> &'static str {
        match self {
            Quantity::Latency => "latency",
            Quantity::Bandwidth => "bandwidth",
            Quantity::Rate => "message rate",
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Quantity::Latency => "µs",
            Quantity::Bandwidth => "MiB/s",
            Quantity::Rate => "M/s",
        }
    }

    pub fn better(self) -> Better {
        match self {
            Quantity::Latency => Better::Lower,
            Quantity::Bandwidth | Quantity::Rate => Better::Higher,
        }
    }
}

/// One measurement with perftest.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    operation: &'static str,
    /// What is measured.
    pub quantity: Quantity,
    /// Bytes in a message.
    pub size: u64,
}

/// A measurement of an operation.
pub const fn measurement(operation: &'static str, quantity: Quantity, size: u64) -> Measurement {
    Measurement {
        operation,
        quantity,
        size,
    }
}

/// What is measured of each device.
pub const MEASUREMENTS: &[Measurement] = &[
    measurement("write", Quantity::Latency, 8),
    measurement("send", Quantity::Latency, 8),
    measurement("read", Quantity::Latency, 8),
    measurement("write", Quantity::Bandwidth, 1 << 20),
    measurement("send", Quantity::Bandwidth, 1 << 20),
    measurement("read", Quantity::Bandwidth, 1 << 20),
    measurement("write", Quantity::Rate, 64),
    measurement("send", Quantity::Rate, 64),
];

impl Measurement {
    /// The tool.
    pub fn tool(self) -> String {
        let kind = match self.quantity {
            Quantity::Latency => "lat",
            Quantity::Bandwidth | Quantity::Rate => "bw",
        };
        format!("ib_{}_{kind}", self.operation)
    }

    /// The operation as reports call it.
    fn title(self) -> String {
        self.operation.to_uppercase()
    }

    /// Its name in the section of its quantity.
    pub fn name(self) -> String {
        format!("{} {}", self.title(), bytes(self.size))
    }

    /// How many messages: of each device about as much as it moves in half a second.
    pub fn iterations(self, device: RdmaDevice) -> u32 {
        match (self.quantity, device) {
            (Quantity::Latency, RdmaDevice::Ours) => 10_000,
            (Quantity::Latency, RdmaDevice::Rxe) => 400,
            (Quantity::Bandwidth, RdmaDevice::Ours) => 2_000,
            (Quantity::Bandwidth, RdmaDevice::Rxe) => 20,
            (Quantity::Rate, RdmaDevice::Ours) => 100_000,
            (Quantity::Rate, RdmaDevice::Rxe) => 4_000,
        }
    }

    /// The value in a row of a tool's table.
    pub fn value(self, table: &Table, size: u64) -> Result<f64> {
        match self.quantity {
            Quantity::Latency => table.latency(size),
            Quantity::Bandwidth => table.bandwidth(size),
            Quantity::Rate => table.rate(size),
        }
    }
}

/// A size as people write it.
fn bytes(size: u64) -> String {
    match size {
        0..1024 => format!("{size} B"),
        1024..0x10_0000 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}

/// How often all VMs are started, at most, until their clocks agree.
const STARTS: usize = 4;
/// How much the clocks of VMs may differ, as a part of the slowest.
const SAME: f64 = 0.01;

/// Whether clocks of these frequencies are as fast.
fn agree(frequencies: &[f64]) -> bool {
    let least = frequencies.iter().copied().fold(f64::INFINITY, f64::min);
    let most = frequencies.iter().copied().fold(0.0, f64::max);
    most - least <= SAME * least
}

/// Starts VMs anew whose clocks do not agree. A guest whose processor is busy elsewhere when it
/// boots takes its clock for another than it is (seen: 779 MHz for 2596), and all that perftest says
/// there is wrong by as much.
pub fn set_clocks(fixture: &mut Fixture) -> Result<()> {
    for _ in 0..STARTS {
        let mut frequencies = Vec::new();
        for vm in &fixture.bed.vms {
            let text = vm.sh("sed -n 's/^cpu MHz.*: //p' /proc/cpuinfo | head -n 1")?;
            frequencies.push(text.trim().parse().context("no frequency")?);
        }
        if agree(&frequencies) {
            return Ok(());
        }
        println!("         the guests' clocks differ: {frequencies:?} MHz; starting all anew");
        fixture.restart()?;
    }
    anyhow::bail!("the guests' clocks differ each time")
}

/// Gives rxe the network interface that ours is paired with.
pub fn add_rxe(vm: &Vm, mtu: u16) -> Result<()> {
    vm.sh(&format!("ip link set eth0 mtu {mtu}"))?;
    vm.sh(
        "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0 && /payload/wait-active rxe0",
    )?;
    vm.sh("/payload/wait-active vrdma0").map(drop)
}

/// Gives rxe the network interface that ours is paired with, and the interface the frames with
/// which rxe and TCP do best. `ours`: how our data goes, for the report.
fn set_up(fixture: &mut Fixture, ours: &str) -> Result<()> {
    set_clocks(fixture)?;
    for vm in &fixture.bed.vms {
        add_rxe(vm, 9000)?;
    }
    let guest = fixture.vm(1)?.sh("uname -r; nproc")?;
    let mut words = guest.split_ascii_whitespace();
    let (release, cpus) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let how = if kvm() {
        "KVM, with the host's CPU"
    } else {
        "QEMU's TCG, which translates their code, with the same CPU model (`max` without ERMS and FSRM)"
    };
    let cores = std::thread::available_parallelism()?;
    fixture.note(format!(
        "Between VMs: two guests with Debian 13 and Linux {release} run on {how}, with {cpus} CPU each; both and the device share \
         {cores} CPUs of the host. Our device, rxe and TCP take turns in the same two guests. Latency is what perftest calls \
         typical, the median of its run; each figure is the median of {ROUNDS} runs, each point of a curve one run."
    ));
    fixture.note(
        "Rxe and TCP go over virtio-net with an MTU of 9000, connected by QEMU's own stream socket between the two processes: \
         this needs no privilege, and has no segmentation offload."
            .to_owned(),
    );
    fixture.note(ours.to_owned());
    Ok(())
}

/// Runs a tool of perftest on devices of two VMs, client and server.
pub fn perftest(
    fixture: &mut Fixture,
    (client, server): (u8, u8),
    devices: [RdmaDevice; 2],
    tool: &str,
    arguments: &str,
) -> Result<Table> {
    let pair = fixture.pair(server, client);
    let host = pair.host();
    let [client, server] = devices.map(RdmaDevice::name);
    let start = |name: &str, host: &str| {
        format!(
            "{tool} -F -d {name} -x $(/payload/gid {name}) -p {} {arguments} {host}",
            pair.port
        )
    };
    let (server, client) = (start(server, ""), start(client, &host));
    let (text, _) = pair.run(&fixture.bed, &server, &client, LONG)?;
    Table::parse(&text).with_context(|| format!("no table from {tool}:\n{text}"))
}

/// The bandwidth of TCP, MiB/s.
fn tcp(fixture: &mut Fixture) -> Result<f64> {
    let pair = fixture.pair(2, 1);
    let (text, _) = pair.run(
        &fixture.bed,
        &format!("iperf3 -s -1 -p {}", pair.port),
        &format!("iperf3 -c {} -p {} -O 1 -t 2 -J", pair.host(), pair.port),
        LONG,
    )?;
    received(&text)
}

/// What the receiver got in a report of iperf3, MiB/s.
fn received(text: &str) -> Result<f64> {
    let report: Value = serde_json::from_str(text)
        .with_context(|| format!("iperf3 did not write a report:\n{text}"))?;
    let bits = report["end"]["sum_received"]["bits_per_second"]
        .as_f64()
        .with_context(|| format!("no bandwidth in the report of iperf3:\n{text}"))?;
    Ok(bits / 8.0 / f64::from(1 << 20))
}

/// The values of all rounds.
struct Values {
    /// For each measurement, ours and rxe's.
    perftest: Vec<[Vec<f64>; 2]>,
    tcp: Vec<f64>,
}

fn rounds(fixture: &mut Fixture, targets: &Targets) -> Result<()> {
    let mut values = Values {
        perftest: vec![Default::default(); MEASUREMENTS.len()],
        tcp: Vec::new(),
    };
    for round in 1..=ROUNDS {
        for (at, device) in RdmaDevice::BOTH.into_iter().enumerate() {
            for (measurement, of) in MEASUREMENTS.iter().zip(&mut values.perftest) {
                let arguments = format!(
                    "-s {} -n {}",
                    measurement.size,
                    measurement.iterations(device)
                );
                let tool = measurement.tool();
                let table = perftest(fixture, VMS, [device; 2], &tool, &arguments)?;
                let value = measurement.value(&table, measurement.size)?;
                println!(
                    "         round {round}, {}: {} {value:.3} {}",
                    device.title(),
                    measurement.name(),
                    measurement.quantity.unit()
                );
                if let Some(of) = of.get_mut(at) {
                    of.push(value);
                }
            }
        }
        let value = tcp(fixture)?;
        println!("         round {round}, TCP: {value:.0} MiB/s");
        values.tcp.push(value);
    }
    for figure in figures(&values, targets) {
        fixture.sub_case(judged(&figure));
        fixture.measured(figure);
    }
    Ok(())
}

/// What the rounds come to.
fn figures(values: &Values, targets: &Targets) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (measurement, [ours, rxe]) in MEASUREMENTS.iter().zip(&values.perftest) {
        let quantity = measurement.quantity;
        let section = format!("{}{}", quantity.section(), targets.way);
        let figure = Figure::new(
            Part::Vm,
            &section,
            &measurement.name(),
            quantity.unit(),
            quantity.better(),
            ours,
        );
        let beside = figure.clone().beside("rxe", rxe);
        figures.push(beside.target(targets.of(quantity)));
        if quantity == Quantity::Bandwidth && measurement.operation == "write" {
            figures.push(figure.beside("TCP", &values.tcp).target(targets.tcp));
        }
    }
    figures
}

/// A figure as a case: whether its target is met.
pub fn judged(figure: &Figure) -> CaseReport {
    let peer = figure
        .peer
        .as_ref()
        .map(|peer| format!(" beside {}", peer.name));
    let met = figure.met == Some(true);
    let reason = format!(
        "{:.3} {}, {:.4} times the peer's {:.3}; the target is {:?}",
        figure.value,
        figure.unit,
        figure.ratio.unwrap_or(f64::NAN),
        figure.peer.as_ref().map_or(f64::NAN, |peer| peer.value),
        figure.target
    );
    CaseReport {
        name: format!(
            "{}: {}{}",
            figure.section,
            figure.name,
            peer.unwrap_or_default()
        ),
        outcome: if met {
            Outcome::Passed
        } else {
            Outcome::Failed
        },
        reason: if met { String::new() } else { reason },
        seconds: 0.0,
        tabulated: true,
    }
}

/// What is measured at all message sizes, once: latency and bandwidth of writes.
const CURVES: &[Measurement] = &[
    measurement("write", Quantity::Latency, 0),
    measurement("write", Quantity::Bandwidth, 0),
];

/// Measures each device at all message sizes that perftest has.
fn curves(fixture: &mut Fixture) -> Result<()> {
    for curve in CURVES {
        let iterations = |device| match device {
            RdmaDevice::Ours => 500,
            RdmaDevice::Rxe => 10,
        };
        let mut of = |device| {
            let arguments = format!("-a -n {}", iterations(device));
            perftest(fixture, VMS, [device; 2], &curve.tool(), &arguments)
        };
        let (ours, rxe) = (of(RdmaDevice::Ours)?, of(RdmaDevice::Rxe)?);
        for size in ours.sizes() {
            let figure = Figure::new(
                Part::Vm,
                &format!("{} by size", curve.quantity.section()),
                &curve.title(),
                curve.quantity.unit(),
                curve.quantity.better(),
                &[curve.value(&ours, size)?],
            );
            // Sizes are far below 2^53.
            #[allow(clippy::cast_precision_loss)]
            let figure = figure.at(size as f64);
            fixture.measured(figure.beside("rxe", &[curve.value(&rxe, size)?]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_wrong_is_found() {
        assert!(agree(&[2596.077, 2596.147, 2596.128]));
        assert!(!agree(&[778.944, 2596.077, 2596.128]));
    }

    #[test]
    fn the_report_of_iperf3_is_read() {
        let text = r#"{"start": {}, "end": {"sum_sent": {"bits_per_second": 1.0},
            "sum_received": {"bits_per_second": 3355443200.0}}}"#;
        assert_eq!(received(text).expect("a bandwidth"), 400.0);
        assert!(received("{\"error\": \"unable to connect\"}").is_err());
    }

    #[test]
    fn every_measurement_has_its_peers_and_targets() {
        let values = Values {
            perftest: MEASUREMENTS
                .iter()
                .map(|measurement| match measurement.quantity {
                    Quantity::Latency => [vec![40.0, 20.0, 30.0], vec![600.0, 600.0, 1.0]],
                    Quantity::Bandwidth => [vec![4000.0], vec![41.0]],
                    Quantity::Rate => [vec![0.2], vec![0.01]],
                })
                .collect(),
            tcp: vec![400.0],
        };
        let figures = figures(&values, &LOCAL);
        let met = |section: &str, peer: &str| -> Vec<bool> {
            figures
                .iter()
                .filter(|figure| figure.section == section)
                .filter(|figure| figure.peer.as_ref().is_some_and(|of| of.name == peer))
                .map(|figure| judged(figure).outcome == Outcome::Passed)
                .collect()
        };
        assert_eq!(met("latency", "rxe"), [true; 3]);
        assert_eq!(met("bandwidth", "rxe"), [false; 3]);
        assert_eq!(met("message rate", "rxe"), [true; 2]);
        assert_eq!(met("bandwidth", "TCP"), [true]);
        let figures = super::figures(&values, &WIRE);
        let over = figures
            .iter()
            .filter(|figure| figure.section.ends_with("over the wire"));
        // That of TCP is one more.
        assert_eq!(over.count(), MEASUREMENTS.len() + 1);
    }

    #[test]
    fn sizes_are_written_as_people_do() {
        assert_eq!(bytes(64), "64 B");
        assert_eq!(bytes(65536), "64 KiB");
        assert_eq!(bytes(1 << 20), "1 MiB");
    }
}
