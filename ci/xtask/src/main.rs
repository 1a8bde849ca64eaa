// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask`: the one door to every developer command.
//!
//! Reading order: a command ([`commands`]) asks [`artifacts`] for everything a VM needs (which
//! [`cache`] keeps), starts a [`vm::Bed`] of VMs with it, and runs something there; a lane
//! ([`lanes`]) is a list of such somethings with a report.
#![forbid(unsafe_code)]

mod artifacts;
mod book;
mod cache;
mod commands;
mod images;
mod lanes;
mod packages;
mod report;
mod setup;
mod shell;
mod vm;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::images::{Image, Kernel, Suite};
use crate::vm::FrontEnd;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "The developer commands of virtio-rdma, an RDMA network card for virtual machines",
    version
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot two VMs, run RDMA between them and show the results
    Demo {
        /// The guests' kernel
        #[arg(long, value_enum, default_value_t = Kernel::Trixie)]
        kernel: Kernel,
        /// On hosts of their own, which are network namespaces, with a device process each and
        /// RoCEv2 between them, which loses a packet in a thousand; takes root
        #[arg(long)]
        wire: bool,
    },
    /// Boot VMs with the device attached and give a shell in each
    Vm {
        /// How many VMs
        #[arg(short = 'n', long = "number", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
        number: u8,
        /// The guests' kernel
        #[arg(long, value_enum, default_value_t = Kernel::Trixie)]
        kernel: Kernel,
        /// What is installed in them
        #[arg(long, value_enum, default_value_t = Image::Plain)]
        image: Image,
        /// Stock guests: neither the device nor the driver
        #[arg(long)]
        plain: bool,
        /// On hosts of their own, which are network namespaces, with a device process each and
        /// RoCEv2 between them; takes root
        #[arg(long, conflicts_with = "plain")]
        wire: bool,
        /// How QEMU has the device; by vfio-user, it is one as Debian has built it
        #[arg(long, value_enum, default_value_t, conflicts_with_all = ["plain", "wire"])]
        front_end: FrontEnd,
        /// Memory of each VM in MiB
        #[arg(long, default_value_t = 1024)]
        memory: u32,
        /// Instead of a shell, run this script in all VMs at a time; VM is the number of the one
        /// that it runs in, and VMS how many there are. Fails if it fails in one of them
        #[arg(long, value_name = "SCRIPT")]
        run: Option<PathBuf>,
        /// How long the script may take, seconds
        #[arg(long, default_value_t = 600, requires = "run")]
        timeout: u64,
    },
    /// Check everything that has to hold before a change goes in
    ///
    /// Formatting, lints, documentation, unit and property tests, instruction counts, the VM lane
    /// `smoke`, a part of `recovery`, and rdma-core's own tests in a VM.
    Test,
    /// Run lanes, which are lists of tests in VMs; reports go to target/reports/
    #[command(after_help = format!("Lanes:{}", lanes::list()))]
    Lane {
        /// Names of lanes
        #[arg(required = true)]
        names: Vec<String>,
        /// Only this guest kernel (default: all that the lane wants)
        #[arg(long, value_enum)]
        kernel: Option<Kernel>,
        /// Only cases whose name contains this, or one of these, separated by `|`
        #[arg(long)]
        only: Option<String>,
        /// Shorter where a lane does the same for minutes: to try it out
        #[arg(long)]
        quick: bool,
    },
    /// Run random traffic through random events for some minutes; the report is
    /// target/reports/soak.md
    Soak(commands::soak::Options),
    /// Give the device inputs that nobody should send, guided by what they reach in it; what does
    /// harm stays in target/fuzz/artifacts/
    Fuzz(commands::fuzz::Options),
    /// Run the device's tests under a sanitizer
    Sanitize(commands::sanitize::Options),
    /// Measure how fast the device is, beside what it competes with; the report is
    /// target/reports/bench.md
    Bench(commands::bench::Options),
    /// Count what the device executes for a message, and compare with the committed ceilings (part
    /// of `test`)
    Instructions {
        /// Commit to what is counted now: rewrite the ceilings
        #[arg(long)]
        update: bool,
        /// Only workloads whose name contains this
        #[arg(long, conflicts_with = "update")]
        only: Option<String>,
    },
    /// Build the Debian packages and the tarball of the sources; they go to target/packages/, which
    /// has a repository for apt
    Package {
        /// The suite of Debian that they are for
        #[arg(long, value_enum, default_value_t = Suite::Trixie)]
        suite: Suite,
        /// Build them also as the version that comes next, for tests of upgrades
        #[arg(long)]
        next: bool,
    },
    /// Install the packages that the other commands need
    Setup,
    /// Make the guest images of Debian 13 (sid's are made when they are wanted)
    Images,
    /// Print where the module for a guest kernel is compiled, or run a command there
    BuildRoot {
        /// The guest kernel; its release is in KVER for the command
        #[arg(value_enum)]
        kernel: Kernel,
        /// A directory to be found at /out
        #[arg(long)]
        out: Option<std::path::PathBuf>,
        /// The command; the repository is at /src, read-only
        #[arg(last = true)]
        command: Vec<String>,
    },
}

fn main() {
    let result = dispatch(Cli::parse().command);
    match result {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::exit(1);
        }
    }
}

/// Runs the command; false if it ran to its end and something in it failed.
fn dispatch(command: Command) -> Result<bool> {
    match command {
        Command::Demo { kernel, wire } => commands::demo::run(kernel, wire),
        Command::Vm {
            number,
            kernel,
            image,
            plain,
            wire,
            front_end,
            memory,
            run,
            timeout,
        } => commands::vm::run(&commands::vm::Options {
            number,
            kernel,
            image,
            plain,
            wire,
            front_end,
            memory,
            script: run.map(|path| (path, Duration::from_secs(timeout))),
        }),
        Command::Test => commands::test::run(),
        Command::Lane {
            names,
            kernel,
            only,
            quick,
        } => {
            let only = only.as_deref();
            commands::lane::run(
                &names,
                &lanes::Choice {
                    kernel,
                    only,
                    quick,
                    ..lanes::Choice::default()
                },
            )
        }
        Command::Fuzz(options) => commands::fuzz::run(&options),
        Command::Sanitize(options) => commands::sanitize::run(&options),
        Command::Soak(options) => commands::soak::run(&options),
        Command::Bench(options) => commands::bench::run(&options),
        Command::Instructions { update, only } => {
            setup::packages(&["valgrind"])?;
            commands::instructions::run(update, only.as_deref())
        }
        Command::Package { suite, next } => commands::package::run(suite, next),
        Command::Setup => setup::run().map(|()| true),
        Command::Images => {
            setup::run()?;
            artifacts::images(&Kernel::STABLE)?;
            Ok(true)
        }
        Command::BuildRoot {
            kernel,
            out,
            command,
        } => commands::build_root::run(kernel, out.as_deref(), &command),
    }
}
