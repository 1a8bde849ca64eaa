// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask sanitize`: the unit tests of the device and those of its process under a sanitizer,
//! with the stable compiler.

use anyhow::Result;
use clap::ValueEnum;

use super::test::{tests, Count};
use crate::shell;

/// Named so that `RUSTFLAGS` is not for what runs while compiling.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// What finds mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sanitizer {
    /// Accesses beyond objects, and to those that are gone
    Address,
}

/// A test that is not run, and why.
type Skip = (&'static str, &'static str);

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Sanitizer::Address => "address",
        }
    }

    /// Options of its runtime, and the variable that they are in.
    fn options(self) -> (&'static str, &'static str) {
        match self {
            // Whether something is left over is told by counters and by the memory of the process,
            // for which there are tests; to look for it at the end takes system calls that the
            // sandbox refuses. Allocations that are too large fail as they do without.
            Sanitizer::Address => ("ASAN_OPTIONS", "detect_leaks=0:allocator_may_return_null=1"),
        }
    }

    fn skipped(self) -> &'static [Skip] {
        const FREED: &str = "what is freed is kept for a while, to see who still uses it";
        const SIZES: &str = "objects take more memory, which no account knows of";
        const SHADOW: &str = "the shadow of the memory is larger than the limit that it sets";
        match self {
            Sanitizer::Address => &[
                ("killed_vms_leave_no_memory_behind", FREED),
                (
                    "front_ends_follow_each_other_at_once_and_leave_no_memory_behind",
                    FREED,
                ),
                ("objects_of_all_kinds_are_in_the_account_and_limited", SIZES),
                (
                    "regions_that_are_lost_take_no_more_than_the_account_says",
                    SIZES,
                ),
                ("the_process_lives_where_there_is_no_memory", SHADOW),
            ],
        }
    }
}

#[derive(clap::Args, Debug)]
pub struct Options {
    /// Which one
    #[arg(value_enum, default_value = "address")]
    sanitizer: Sanitizer,
}

/// Runs them; false if any fails.
pub fn run(options: &Options) -> Result<bool> {
    let sanitizer = options.sanitizer;
    let name = sanitizer.name();
    let directory = shell::target().join(format!("sanitize-{name}"));
    let flags = format!("-Zsanitizer={name}");
    let (variable, runtime) = sanitizer.options();
    let environment = [
        // Sanitizers are there, but not stable.
        ("RUSTC_BOOTSTRAP", "1"),
        ("RUSTFLAGS", &flags),
        ("CARGO_TARGET_DIR", &directory.to_string_lossy()),
        (variable, runtime),
    ];
    let mut words = vec!["test", "--release", "--no-fail-fast", "--target", PLATFORM];
    words.extend(["--package", "vhost-device-rdma", "--lib", "--test"]);
    words.extend(["process", "--"]);
    for (test, why) in sanitizer.skipped() {
        println!("not run: {test}: {why}");
        words.extend(["--skip", test]);
    }
    let Count { failed, .. } = tests(name, &words, &environment)?;
    Ok(failed == 0)
}
