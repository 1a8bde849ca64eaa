// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask fuzz`: runs a fuzz target of `ci/fuzz` under libFuzzer, guided by coverage, with
//! the stable compiler. What is found stays in `target/fuzz`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::shell;

/// What libFuzzer needs to see of a program: which branches it takes, and what it compares.
/// (`cargo fuzz` sets the same, but for the address sanitizer, which is unstable.)
const RUSTFLAGS: &str = "--cfg fuzzing -Cdebug-assertions -Ccodegen-units=1 \
     -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
     -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";
/// Named so that `RUSTFLAGS` is not for what runs while compiling.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";
/// Longest input, bytes.
const LONGEST: usize = 2048;
/// Longest input that is committed, and how many of a target are, at most.
const LONGEST_KEPT: u64 = 1024;
const MOST_KEPT: usize = 40;
/// An input that takes longer hangs, seconds.
const HANG: u32 = 20;

/// What is fuzzed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Target {
    /// Sequences of control commands, as they should be, changed and cut short
    Commands,
    /// Send and receive work requests on queue pairs of all types
    Entries,
    /// Sequences of verbs, compared with a model of the objects
    Model,
    /// Changes of the memory table under traffic
    Memory,
    /// Frames of a peer on the wire
    Packets,
    /// Rings, doorbells and page tables that another thread scribbles over
    Rings,
    /// What a peer sends over a connection of iWARP
    Stream,
    /// Messages of a front end of vfio-user, with file descriptors of all kinds
    VfioUser,
    /// Messages of a front end, with file descriptors of all kinds
    VhostUser,
}

impl Target {
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[derive(Args, Debug)]
pub struct Options {
    /// What is fuzzed
    #[arg(value_enum)]
    target: Target,
    /// How long
    #[arg(long, default_value_t = 10)]
    minutes: u32,
    /// Where the random numbers begin
    #[arg(long)]
    seed: Option<u32>,
    /// Run these inputs once instead, such as one that was found
    #[arg(long, num_args = 1.., conflicts_with_all = ["minutes", "seed", "keep"])]
    input: Vec<PathBuf>,
    /// In the end, commit to what was found: rewrite the target's corpus in ci/fuzz/corpus
    #[arg(long)]
    keep: bool,
}

/// Fuzzes; false if the device or a neighbour took harm.
pub fn run(options: &Options) -> Result<bool> {
    let name = options.target.name();
    let program = shell::step("Building the fuzz targets", build)?;
    let directory = shell::target().join("fuzz");
    let found = directory.join("corpus").join(&name);
    let artifacts = directory.join("artifacts").join(&name);
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&artifacts)?;
    let committed = shell::root().join("ci/fuzz/corpus").join(&name);
    fs::create_dir_all(&committed)?;
    let fuzz = || {
        let mut command = std::process::Command::new(&program);
        command
            .env("FUZZ_TARGET", &name)
            .arg(format!("-timeout={HANG}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()));
        command
    };
    if !options.input.is_empty() {
        let status = fuzz().args(&options.input).status();
        return Ok(status.context("cannot run the target")?.success());
    }
    let mut command = fuzz();
    command
        .arg(format!("-max_total_time={}", 60 * options.minutes))
        .arg(format!("-max_len={LONGEST}"))
        .arg(format!("-seed={}", options.seed.unwrap_or(0)))
        .arg("-use_value_profile=1")
        // Sequences are what is wanted: long inputs from the beginning.
        .arg("-len_control=0")
        .arg("-print_final_stats=1")
        .arg(&found)
        .arg(&committed);
    let status = command.status().context("cannot run the target")?;
    if !status.success() {
        println!(
            "the input is in {}; `cargo xtask fuzz {name} --input FILE` runs it again",
            artifacts.display()
        );
        return Ok(false);
    }
    if options.keep {
        shell::step("Choosing what is kept", || {
            keep(&mut fuzz(), &found, &committed, &directory.join("merged"))
        })?;
    }
    Ok(true)
}

/// Builds the program; returns its path.
fn build() -> Result<PathBuf> {
    let directory = shell::target().join("fuzz");
    shell::logged(
        "fuzz",
        shell::cargo()
            .args(["build", "--release", "--target", PLATFORM])
            .args(["--package", "virtio-rdma-fuzz", "--bin", "fuzz"])
            .args(["--features", "libfuzzer"])
            .env("RUSTFLAGS", RUSTFLAGS)
            // Code that is not inlined across crates has counters of its own.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_TARGET_DIR", &directory),
    )?;
    Ok(directory.join(PLATFORM).join("release/fuzz"))
}

/// Rewrites the committed corpus: of the inputs that together reach all that was reached, those of
/// a moderate length.
fn keep(
    fuzz: &mut std::process::Command,
    found: &Path,
    committed: &Path,
    merged: &Path,
) -> Result<()> {
    shell::remove(merged)?;
    fs::create_dir_all(merged)?;
    shell::capture(
        fuzz.arg("-set_cover_merge=1")
            .arg(format!("-max_len={LONGEST_KEPT}"))
            .args([merged, committed, found]),
    )?;
    let mut inputs = Vec::new();
    for entry in fs::read_dir(merged)? {
        let entry = entry?;
        inputs.push((entry.metadata()?.len(), entry.path()));
    }
    // The long ones reach the most.
    inputs.sort();
    inputs.reverse();
    inputs.truncate(MOST_KEPT);
    shell::remove(committed)?;
    fs::create_dir_all(committed)?;
    for (_, input) in &inputs {
        let name = input.file_name().context("an input without a name")?;
        fs::copy(input, committed.join(name))?;
    }
    shell::say(format_args!("{} inputs are kept", inputs.len()));
    Ok(())
}
