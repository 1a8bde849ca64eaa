// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask instructions`: what the device executes for a message, as a figure that other work
//! on the machine does not change. The program that is measured is
//! `device/benches/instructions.rs`; its counts have ceilings in `ci/bench/instructions.json`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::shell;

/// What a ceiling is above the count that it was made of, percent.
const ROOM: f64 = 3.0;

/// The committed file.
#[derive(Debug, Serialize, Deserialize)]
struct Committed {
    /// What it was compiled with: another compiler makes other instructions.
    compiler: String,
    workloads: Vec<Ceiling>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Ceiling {
    name: String,
    /// Instructions per message when this was committed.
    instructions: f64,
    /// Instructions per message that are too many.
    ceiling: f64,
}

/// A workload as it was counted.
#[derive(Debug, PartialEq)]
struct Counted {
    name: String,
    /// Per message.
    instructions: f64,
}

/// Counts and compares; false if there are more instructions than there may be.
pub fn run(update: bool, only: Option<&str>) -> Result<bool> {
    let program = shell::step("Building what is counted", build)?;
    let counted = shell::step("Counting instructions", || count(&program, only))?;
    let compiler = shell::capture(Command::new("rustc").arg("--version"))?
        .trim()
        .to_owned();
    let path = shell::root().join("ci/bench/instructions.json");
    let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    let committed: Committed = serde_json::from_str(&text)?;
    print(&counted, &committed);
    if update {
        let committed = Committed {
            compiler,
            workloads: counted.iter().map(ceiling).collect(),
        };
        fs::write(&path, serde_json::to_string_pretty(&committed)? + "\n")?;
        shell::say(format_args!("written: {}", path.display()));
        return Ok(true);
    }
    let failures = compare(&counted, &committed, only.is_none());
    for failure in &failures {
        println!("{failure}");
    }
    if !failures.is_empty() {
        if compiler != committed.compiler {
            println!(
                "the ceilings were made with {}, this is {compiler}",
                committed.compiler
            );
        }
        println!(
            "`callgrind_annotate --inclusive=yes` tells where, of the files in {}; if it has to be so, commit to it by \
             `cargo xtask instructions --update`",
            directory().display()
        );
    }
    Ok(failures.is_empty())
}

fn directory() -> PathBuf {
    shell::target().join("instructions")
}

/// Builds the program; returns its path.
fn build() -> Result<PathBuf> {
    let messages = shell::capture(shell::cargo().args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "vhost-device-rdma",
        "--bench",
        "instructions",
        "--message-format",
        "json",
    ]))?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == "instructions")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo built no program")
}

/// Runs the program under callgrind, which writes a file for each workload.
fn count(program: &Path, only: Option<&str>) -> Result<Vec<Counted>> {
    let directory = directory();
    shell::remove(&directory)?;
    fs::create_dir_all(&directory)?;
    let mut command = Command::new("valgrind");
    command
        .args(["--quiet", "--tool=callgrind"])
        // Its file for each workload: what was counted since the one before.
        .arg("--dump-after=instructions::measured")
        .arg("--toggle-collect=instructions::device_round")
        .arg(format!(
            "--callgrind-out-file={}",
            directory.join("callgrind").display()
        ))
        .arg(program)
        .args(only);
    let names = shell::capture(&mut command)?;
    ensure!(!names.is_empty(), "there is no such workload");
    (1..)
        .zip(names.lines())
        .map(|(number, line)| {
            let file = directory.join(format!("callgrind.{number}"));
            let text = fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
            counted(line, &text).with_context(|| format!("{} has no total", file.display()))
        })
        .collect()
}

/// What the program and callgrind say of a workload.
fn counted(line: &str, callgrind: &str) -> Option<Counted> {
    let (name, messages) = line.split_once('\t')?;
    let total = callgrind
        .lines()
        .find_map(|line| line.strip_prefix("totals: "))?;
    let messages: f64 = messages.parse().ok()?;
    let total: f64 = total.trim().parse().ok()?;
    Some(Counted {
        name: name.to_owned(),
        instructions: (10.0 * total / messages).round() / 10.0,
    })
}

fn ceiling(counted: &Counted) -> Ceiling {
    Ceiling {
        name: counted.name.clone(),
        instructions: counted.instructions,
        ceiling: (counted.instructions * (1.0 + ROOM / 100.0)).ceil(),
    }
}

/// What is wrong. `all`: everything that is committed must have been counted.
fn compare(counted: &[Counted], committed: &Committed, all: bool) -> Vec<String> {
    let mut failures = Vec::new();
    for Counted {
        name, instructions, ..
    } in counted
    {
        match committed.workloads.iter().find(|known| known.name == *name) {
            Some(known) if *instructions > known.ceiling => failures.push(format!(
                "{name}: {instructions} instructions per message, more than the ceiling of {} ({} when it was made)",
                known.ceiling, known.instructions
            )),
            Some(_) => {}
            None => failures.push(format!("{name}: there is no ceiling")),
        }
    }
    let gone = |known: &&Ceiling| !counted.iter().any(|counted| counted.name == known.name);
    for known in committed.workloads.iter().filter(gone).filter(|_| all) {
        failures.push(format!("{}: it was not counted", known.name));
    }
    failures
}

fn print(counted: &[Counted], committed: &Committed) {
    println!(
        "{:32} {:>14} {:>10} {:>8}",
        "instructions per message", "now", "committed", "change"
    );
    for now in counted {
        let known = committed
            .workloads
            .iter()
            .find(|known| known.name == now.name);
        let (before, change) = known.map_or_else(Default::default, |known| {
            let change = 100.0 * (now.instructions / known.instructions - 1.0);
            (
                format!("{:.1}", known.instructions),
                format!("{change:+.1} %"),
            )
        });
        println!(
            "{:32} {:>14.1} {before:>10} {change:>8}",
            now.name, now.instructions
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, instructions: f64) -> Counted {
        Counted {
            name: name.to_owned(),
            instructions,
        }
    }

    #[test]
    fn counts_are_per_message() {
        let text = "events: Ir\nsummary: 7\n\ntotals: 12345\n";
        assert_eq!(counted("a b\t10", text), Some(of("a b", 1234.5)));
        assert_eq!(counted("a b", text), None);
        assert_eq!(counted("a b\t10", "events: Ir\n"), None);
    }

    #[test]
    fn only_what_is_above_its_ceiling_is_too_much() {
        let committed = Committed {
            compiler: String::new(),
            workloads: vec![ceiling(&of("a", 1000.0)), ceiling(&of("b", 100.0))],
        };
        let failures = |counted: &[Counted], all| compare(counted, &committed, all).len();
        assert_eq!(failures(&[of("a", 1030.0), of("b", 1.0)], true), 0);
        assert_eq!(failures(&[of("a", 1030.1), of("b", 103.0)], true), 1);
        assert_eq!(failures(&[of("a", 1000.0)], true), 1);
        assert_eq!(failures(&[of("a", 1000.0)], false), 0);
        assert_eq!(failures(&[of("c", 1.0)], false), 1);
    }
}
