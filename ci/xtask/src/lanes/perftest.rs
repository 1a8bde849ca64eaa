// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `perftest`: every operation of perftest on every transport, in the variants that perftest
//! has, between two VMs.
//!
//! Each combination is a case and a cell of the lane's table: a figure, or what perftest itself
//! says about a combination that it does not have.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use super::stock::Ends;
use super::tools::Table;
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::report::Outcome;
use crate::vm::{FrontEnd, Hosts};

/// How long one run may take on a busy machine without KVM.
const LONG: Duration = Duration::from_secs(120);

/// How long perftest may take to refuse its arguments.
const REFUSAL: Duration = Duration::from_secs(20);

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "perftest",
        about: "all operations, transports and variants of perftest between two VMs",
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

/// A case for each operation and transport, which consists of one for each variant.
macro_rules! cases {
    ($($operation:literal $transport:literal,)*) => {
        &[$(Case {
            name: concat!($operation, " ", $transport),
            run: |fixture| all_variants(fixture, $operation, $transport),
        },)*]
    };
}

/// Its cases.
pub const CASES: &[Case] = cases![
    "send" "RC", "send" "UC", "send" "UD", "send" "XRC",
    "write" "RC", "write" "UC", "write" "UD", "write" "XRC",
    "read" "RC", "read" "UC", "read" "UD", "read" "XRC",
    "atomic" "RC", "atomic" "UC", "atomic" "UD", "atomic" "XRC",
];

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// MiB/s
    Bandwidth,
    /// µs
    Latency,
}

/// In which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// As the tool does by itself.
    Plain,
    /// Waiting for events.
    Events,
    /// With a shared receive queue.
    Srq,
    /// Connected by rdma_cm.
    RdmaCm,
    /// 64 of them.
    ManyQueuePairs,
    /// Both ends send.
    Bidirectional,
}

impl Variant {
    const ALL: [Variant; 6] = [
        Variant::Plain,
        Variant::Events,
        Variant::Srq,
        Variant::RdmaCm,
        Variant::ManyQueuePairs,
        Variant::Bidirectional,
    ];

    /// The table's column.
    fn column(self) -> &'static str {
        match self {
            Variant::Plain => "plain",
            Variant::Events => "events (-e)",
            Variant::Srq => "SRQ (--use-srq)",
            Variant::RdmaCm => "rdma_cm (-R)",
            Variant::ManyQueuePairs => "64 QPs (-q 64)",
            Variant::Bidirectional => "both ways (-b)",
        }
    }

    fn option(self) -> &'static str {
        match self {
            Variant::Plain => "",
            Variant::Events => "-e",
            Variant::Srq => "--use-srq",
            Variant::RdmaCm => "-R",
            Variant::ManyQueuePairs => "-q 64",
            Variant::Bidirectional => "-b",
        }
    }
}

/// One combination.
#[derive(Clone, Copy, Debug)]
pub struct Combination {
    operation: &'static str,
    transport: &'static str,
    kind: Kind,
    variant: Variant,
    /// With one message size, for peers that are slow and for short runs.
    one_size: bool,
}

impl Combination {
    /// True if InfiniBand defines it and perftest has it.
    fn exists(self) -> bool {
        let send = self.operation == "send";
        let defined = match self.transport {
            "UC" => send || self.operation == "write",
            "UD" => send,
            _ => true,
        };
        let has = match self.variant {
            Variant::Plain => true,
            Variant::Events => self.operation != "write",
            Variant::Srq => send,
            Variant::RdmaCm => self.transport == "RC" || self.transport == "UD",
            Variant::ManyQueuePairs | Variant::Bidirectional => self.kind == Kind::Bandwidth,
        };
        defined && has
    }

    /// An operation of SRD, which perftest has with the patches in `ci/perftest`.
    pub fn srd(operation: &'static str, kind: Kind, variant: Variant, one_size: bool) -> Self {
        Self {
            operation,
            transport: "SRD",
            kind,
            variant,
            one_size,
        }
    }

    fn tool(self) -> String {
        let kind = match self.kind {
            Kind::Bandwidth => "bw",
            Kind::Latency => "lat",
        };
        format!("ib_{}_{kind}", self.operation)
    }

    /// What a guest starts.
    fn program(self) -> String {
        match self.transport {
            "SRD" => format!("/payload/perftest/{}", self.tool()),
            _ => self.tool(),
        }
    }

    fn row(self) -> String {
        format!("{} {}", self.tool(), self.transport)
    }

    /// Those of an operation and a transport that exist, with one message size.
    pub fn all_of(operation: &'static str, transport: &'static str) -> Vec<Self> {
        let of = |kind, variant| Self {
            operation,
            transport,
            kind,
            variant,
            one_size: true,
        };
        let kinds = [Kind::Bandwidth, Kind::Latency].into_iter();
        let all = kinds.flat_map(|kind| Variant::ALL.map(|variant| of(kind, variant)));
        all.filter(|combination| combination.exists()).collect()
    }

    /// What it is called.
    pub fn title(self) -> String {
        format!("{}, {}", self.row(), self.variant.column())
    }

    /// True if it goes through all message sizes. Atomic operations have one size, and 64 queue
    /// pairs with buffers of 8 MiB each are more than a guest has memory for.
    fn all_sizes(self) -> bool {
        self.operation != "atomic" && self.variant != Variant::ManyQueuePairs && !self.one_size
    }

    /// The arguments but for those that name the peer.
    fn arguments(self) -> String {
        // Nobody tells a UC queue pair that its peer does not keep up, and perftest waits for all: what
        // 64 of them post at once, 2.5 MiB, is to fit into the buffers on its way.
        let many = self.variant == Variant::ManyQueuePairs;
        let few = self.one_size && self.transport == "UC" && many;
        let size = match (self.all_sizes(), self.operation, self.transport) {
            (true, ..) => "-a",
            (false, "atomic", _) => "",
            (false, _, "UD") | (false, "send", "SRD") => "-s 1024",
            (false, ..) if few => "-s 8192",
            (false, ..) => "-s 65536",
        };
        // More of SRD than the queue holds (128): they complete in any order.
        let count = match (self.transport, self.kind) {
            _ if few => "-n 5",
            ("SRD", Kind::Bandwidth) => "-n 400",
            _ => "-n 100",
        };
        // Soft-RoCE in a guest leaves one of so many alone for longer than the usual time-out (67 ms)
        // and seven retries, whatever it is sent: this is 1 s.
        let patience = match self.transport {
            "RC" if self.one_size && many => "-u 18",
            _ => "",
        };
        let option = self.variant.option();
        let words = [count, "-c", self.transport, size, option, patience];
        words
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect::<Vec<_>>()
            .join(" ")
    }
}

fn all_variants(
    fixture: &mut Fixture,
    operation: &'static str,
    transport: &'static str,
) -> Result<()> {
    for kind in [Kind::Bandwidth, Kind::Latency] {
        for variant in Variant::ALL {
            let combination = Combination {
                operation,
                transport,
                kind,
                variant,
                one_size: false,
            };
            one(fixture, combination)?;
        }
    }
    Ok(())
}

/// Runs a combination, and puts it into the report.
fn one(fixture: &mut Fixture, combination: Combination) -> Result<()> {
    let start = Instant::now();
    let exists = combination.exists();
    let result = if exists {
        measure(fixture, (2, 1), combination)
    } else {
        refusal(fixture, combination)
    };
    let result = result.and_then(|cell| fixture.aftermath().map(|()| cell));
    let (outcome, cell, reason) = match result {
        Ok(cell) if exists => (Outcome::Passed, cell, String::new()),
        Ok(cell) => (Outcome::Skipped, format!("not there: {cell}"), cell),
        Err(error) => {
            let reason = format!("{error:#}{}", fixture.circumstances());
            (Outcome::Failed, "FAILED".to_owned(), reason)
        }
    };
    let (row, column) = (combination.row(), combination.variant.column());
    println!("         {row}, {column}: {cell}");
    fixture.cell(&row, column, &cell);
    fixture.cell_done(format!("{row}, {column}"), start, outcome, reason)
}

/// Runs a combination between the VMs of server and client; its figure.
pub fn measure(
    fixture: &mut Fixture,
    (server, client): Ends,
    combination: Combination,
) -> Result<String> {
    let (tool, arguments) = (combination.program(), combination.arguments());
    let (text, table) = if combination.variant == Variant::RdmaCm {
        let text = fixture.perftest_by_cm((server, client), &tool, &arguments, LONG)?;
        let table = Table::parse(&text)?;
        (text, table)
    } else {
        let pair = fixture.pair(server, client);
        pair.perftest(&fixture.bed, &tool, &arguments, LONG)?
    };
    let sizes = table.sizes();
    if combination.all_sizes() {
        // What is one packet ends at the MTU: of one process 1024, between hosts 4096.
        let last = match (combination.operation, combination.transport) {
            (_, "UD") => 10,
            ("send", "SRD") => 12,
            _ => 23,
        };
        let missing: Vec<u64> = (1..=last)
            .map(|shift| 1 << shift)
            .filter(|size| !sizes.contains(size))
            .collect();
        ensure!(
            missing.is_empty(),
            "no result for {missing:?} bytes in:\n{text}"
        );
    }
    match combination.kind {
        Kind::Bandwidth => {
            let size = [65536, 8192, 1024, 8]
                .into_iter()
                .find(|size| sizes.contains(size));
            let size = size.unwrap_or_default();
            Ok(format!("{:.0} MiB/s at {size} B", table.bandwidth(size)?))
        }
        Kind::Latency => {
            let size = sizes.first().copied().unwrap_or_default();
            Ok(format!("{:.1} µs at {size} B", table.latency(size)?))
        }
    }
}

/// Asks perftest for a combination that it does not have; what it answers.
fn refusal(fixture: &Fixture, combination: Combination) -> Result<String> {
    let command = format!("{} {}", combination.tool(), combination.arguments());
    let output = fixture.vm(1)?.run(&command, REFUSAL)?;
    ensure!(
        output.status != 0,
        "`{command}` was expected to refuse, and did not:\n{}",
        output.text
    );
    let said = output
        .text
        .lines()
        .map(str::trim)
        .find(|line| line.chars().any(char::is_alphabetic));
    Ok(said.unwrap_or("refused without a word").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combination(
        operation: &'static str,
        transport: &'static str,
        kind: Kind,
        variant: Variant,
    ) -> Combination {
        Combination {
            operation,
            transport,
            kind,
            variant,
            one_size: false,
        }
    }

    #[test]
    fn commands_are_as_perftest_wants_them() {
        let of = |operation, transport, variant| {
            combination(operation, transport, Kind::Bandwidth, variant).arguments()
        };
        assert_eq!(of("send", "RC", Variant::Plain), "-n 100 -c RC -a");
        assert_eq!(of("atomic", "XRC", Variant::Events), "-n 100 -c XRC -e");
        assert_eq!(
            of("send", "UD", Variant::ManyQueuePairs),
            "-n 100 -c UD -s 1024 -q 64"
        );
        assert_eq!(
            combination("read", "RC", Kind::Latency, Variant::Plain).row(),
            "ib_read_lat RC"
        );
        let srd = |one_size| Combination::srd("send", Kind::Latency, Variant::Plain, one_size);
        assert_eq!(srd(false).program(), "/payload/perftest/ib_send_lat");
        assert_eq!(srd(false).arguments(), "-n 100 -c SRD -a");
        assert_eq!(srd(true).arguments(), "-n 100 -c SRD -s 1024");
    }

    #[test]
    fn what_infiniband_and_perftest_do_not_have_is_known() {
        let exists = |operation, transport, kind, variant| {
            combination(operation, transport, kind, variant).exists()
        };
        assert!(exists("write", "UC", Kind::Latency, Variant::Plain));
        assert!(!exists("read", "UC", Kind::Latency, Variant::Plain));
        assert!(!exists("write", "RC", Kind::Latency, Variant::Events));
        assert!(!exists("send", "UC", Kind::Bandwidth, Variant::RdmaCm));
        assert!(!exists("send", "RC", Kind::Latency, Variant::Bidirectional));
        let all = ["send", "write", "read", "atomic"]
            .iter()
            .flat_map(|operation| {
                ["RC", "UC", "UD", "XRC"].iter().flat_map(move |transport| {
                    [Kind::Bandwidth, Kind::Latency]
                        .iter()
                        .flat_map(move |kind| {
                            Variant::ALL.iter().filter(move |variant| {
                                exists(operation, transport, *kind, **variant)
                            })
                        })
                })
            });
        assert_eq!(all.count(), 78);
    }
}
