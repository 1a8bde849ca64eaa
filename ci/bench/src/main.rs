// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-bench`: measures, and makes the report. `cargo xtask bench` is the door to it.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use virtio_rdma_bench::native::{self, Cores, Settings};
use virtio_rdma_bench::{report, Measurements};

#[derive(Parser)]
#[command(
    about = "Measures the device beside what it competes with, and reports",
    version
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure without VMs; the figures go to bench-native.json
    Native {
        /// Where reports are
        #[arg(long, default_value = "target/reports")]
        reports: PathBuf,
        /// Little of everything, to try things out
        #[arg(long)]
        quick: bool,
        /// Only sections whose name contains this; figures of others are kept. May be repeated
        #[arg(long)]
        only: Vec<String>,
    },
    /// Make the report of what was measured: bench.md, bench.json and plots
    Report {
        /// Where reports are
        #[arg(long, default_value = "target/reports")]
        reports: PathBuf,
        /// A line about the machine and what runs on it, beside what can be found out
        #[arg(long)]
        note: Vec<String>,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Native {
            reports,
            quick,
            only,
        } => {
            let settings = Settings {
                cores: Cores::first_two()?,
                quick,
            };
            let mut all = native::run(&settings, &only)?;
            let path = reports.join(Measurements::NATIVE);
            if !only.is_empty() && path.exists() {
                all = all.merged_into(Measurements::read(&path)?);
            }
            all.write(&path).context("cannot keep the figures")
        }
        Command::Report { reports, note } => {
            let path = report::make(&reports, note)?;
            println!("{}", path.display());
            Ok(())
        }
    }
}
