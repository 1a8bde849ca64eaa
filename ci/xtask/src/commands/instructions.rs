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
/// What the name of a workload begins with that is another one in a process with a way out which nothing
/// goes over.
const BESIDE_IDLE_WIRE: &str = "beside an idle wire: ";
/// How many more instructions it may have than the other one, percent.
const EQUAL: f64 = 3.0;
/// What is not counted of them: a look for frames. There is one in 20 µs, however many messages there are,
/// and callgrind makes each message take as long as many do.
const LOOK: &str = "::event_loop::Loop::look_for_frames";

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
        .arg("--compress-strings=no")
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
    let mut total: f64 = total.trim().parse().ok()?;
    if name.starts_with(BESIDE_IDLE_WIRE) {
        total -= taken_by(LOOK, callgrind);
    }
    Some(Counted {
        name: name.to_owned(),
        instructions: (10.0 * total / messages).round() / 10.0,
    })
}

/// What all calls of a function took, with all that was done in them. `function` is the end of its name.
fn taken_by(function: &str, callgrind: &str) -> f64 {
    let mut lines = callgrind.lines();
    let (mut of_function, mut all) = (false, 0.0);
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("cfn=") {
            of_function = name.ends_with(function);
        } else if line.starts_with("calls=") && of_function {
            // The next line is where it was called, and what that took.
            let cost = lines.next().and_then(|line| line.rsplit_once(' '));
            all += cost.and_then(|(_, cost)| cost.parse().ok()).unwrap_or(0.0);
        }
    }
    all
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
        let of = name.strip_prefix(BESIDE_IDLE_WIRE);
        let of = of.and_then(|of| counted.iter().find(|other| other.name == of));
        if let Some(of) = of.filter(|of| *instructions > of.instructions * (1.0 + EQUAL / 100.0)) {
            failures.push(format!(
                "{name}: {instructions} instructions per message, and {} without a wire",
                of.instructions
            ));
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
    fn looks_for_frames_are_not_counted_of_an_idle_wire() {
        let text = "fn=a::iterate\n20 100\ncfn=b::event_loop::Loop::look_for_frames\ncalls=3 70\n21 300\n22 5\n\
                    cfn=b::other\ncalls=1 4\n23 40\n\
                    cfn=b::event_loop::Loop::look_for_frames\ncalls=1 70\n24 55\ntotals: 500\n";
        assert_eq!(counted("a\t1", text), Some(of("a", 500.0)));
        let name = "beside an idle wire: a";
        let line = format!("{name}\t1");
        assert_eq!(counted(&line, text), Some(of(name, 145.0)));
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

    #[test]
    fn an_idle_wire_costs_nothing() {
        let beside = "beside an idle wire: a";
        let committed = Committed {
            compiler: String::new(),
            workloads: vec![ceiling(&of("a", 1000.0)), ceiling(&of(beside, 1000.0))],
        };
        let failures = |counted: &[Counted]| compare(counted, &committed, false);
        assert!(failures(&[of("a", 1000.0), of(beside, 1030.0)]).is_empty());
        let more = failures(&[of("a", 990.0), of(beside, 1030.0)]);
        assert_eq!(
            more,
            ["beside an idle wire: a: 1030 instructions per message, and 990 without a wire"]
        );
        // That without a wire was not counted.
        assert!(failures(&[of(beside, 1030.0)]).is_empty());
    }
}
