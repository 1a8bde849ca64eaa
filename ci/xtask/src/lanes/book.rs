// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `book`: the commands of the pages in `docs/`, as they stand there, in two VMs and on a host
//! of their own. Pages that need other VMs are run by other lanes ([`PAGES`]).

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use super::{Case, Fixture, Lane};
use crate::book::{Fate, Page, Place};
use crate::images::{Image, Kernel};
use crate::report::{CaseReport, Outcome};
use crate::shell;
use crate::vm::{FrontEnd, Hosts, Job, SHORT};

/// How long a block may take.
const LONG: Duration = Duration::from_secs(900);
/// How long a program that waits for others takes until it does.
const BEGINS: Duration = Duration::from_secs(4);

/// Pages with commands, and the lanes that run them.
pub const PAGES: &[(&str, &str)] = &[
    ("first-message.md", "book"),
    ("ci.md", "book"),
    ("software.md", "book"),
    ("storage.md", "ulp"),
    ("control.md", "book"),
    ("operating.md", "book"),
    ("metrics.md", "book"),
    ("wire.md", "book"),
    ("iwarp.md", "book"),
];

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "book",
        about: "the commands of the pages in docs/, as they stand there",
        with_device: true,
        vms: 2,
        memory: 1536,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Software,
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

/// The case of a page.
macro_rules! page {
    ($name:literal) => {
        Case {
            name: $name,
            run: |fixture| run(fixture, $name),
        }
    };
}

const CASES: &[Case] = &[
    page!("first-message.md"),
    Case {
        name: "software.md",
        run: software,
    },
    page!("control.md"),
    page!("operating.md"),
    page!("metrics.md"),
    page!("wire.md"),
    page!("iwarp.md"),
    page!("ci.md"),
    Case {
        name: "the book, by mdBook",
        run: built,
    },
    Case {
        name: "other pages",
        run: others,
    },
];

/// Its hosts of Open MPI are those of the lane `software`.
fn software(fixture: &mut Fixture) -> Result<()> {
    super::software::mpi_hosts(fixture)?;
    run(fixture, "software.md")
}

/// mdBook builds the book, and no link in it is dead.
fn built(_: &mut Fixture) -> Result<()> {
    let dead = crate::book::dead_links(&crate::book::build()?)?;
    ensure!(dead.is_empty(), "lead nowhere:\n{}", dead.join("\n"));
    Ok(())
}

/// Says what of the pages of other lanes is not run.
fn others(fixture: &mut Fixture) -> Result<()> {
    for page in crate::book::pages()? {
        if PAGES.iter().any(|(name, _)| *name == page.name) {
            continue;
        }
        for block in &page.blocks {
            if let Fate::NotRun(reason) = &block.fate {
                skipped(fixture, &page, block.line, reason);
            }
        }
    }
    Ok(())
}

/// Runs the commands of a page.
///
/// # Errors
///
/// The first one that fails, with what it wrote.
pub fn run(fixture: &mut Fixture, name: &str) -> Result<()> {
    let page = Page::read(name)?;
    let mut host: Option<Host> = None;
    let mut jobs: Vec<(String, Job)> = Vec::new();
    for block in &page.blocks {
        let at = format!("docs/{name}:{}", block.line);
        let script = format!("set -e\ncd /tmp\n{}", block.text);
        match &block.fate {
            Fate::Run {
                place: Place::Vm(number),
                goes_on,
            } => {
                let job = fixture.vm(*number)?.spawn(&script)?;
                if *goes_on {
                    std::thread::sleep(BEGINS);
                    jobs.push((at, job));
                } else {
                    let output = job.wait(LONG).context(at.clone())?;
                    ensure!(
                        output.status == 0,
                        "{at} ended with {}:\n{}",
                        output.status,
                        output.text
                    );
                }
            }
            Fate::Run {
                place: Place::Here,
                goes_on: false,
            } => {
                let mut command = Command::new("sh");
                command.current_dir(shell::root());
                command.args(["-e", "-c", &block.text]);
                shell::logged("book", &mut command).context(at)?;
            }
            Fate::Run {
                place: Place::Here,
                goes_on: true,
            } => bail!("{at}: nothing goes on on this machine"),
            Fate::Run {
                place: Place::Host,
                goes_on,
            } => {
                let host = opened(&mut host)?;
                host.run(&block.text, *goes_on).context(at)?;
            }
            Fate::Configuration => {
                let host = opened(&mut host)?;
                host.configure(&block.text).context(at)?;
            }
            Fate::File(file) => {
                let write = format!("cat >{file} <<'END'\n{}END\n", block.text);
                opened(&mut host)?.run(&write, false).context(at)?;
            }
            Fate::NotRun(reason) => skipped(fixture, &page, block.line, reason),
            Fate::Lane { .. } | Fate::Shown => {}
        }
    }
    // Servers end with their clients, or when they are told.
    for (at, job) in jobs {
        let done = crate::vm::wait_for(Duration::from_secs(10), || {
            Ok((!job.running()).then_some(()))
        })?;
        if done.is_none() {
            job.kill(15)?;
            job.wait(SHORT)?;
            continue;
        }
        let output = job.wait(SHORT)?;
        ensure!(
            output.status == 0,
            "{at} ended with {}:\n{}",
            output.status,
            output.text
        );
    }
    Ok(())
}

/// A block that is not run is in the report, with the reason.
fn skipped(fixture: &mut Fixture, page: &Page, line: usize, reason: &str) {
    fixture.sub_case(CaseReport {
        name: format!("docs/{}:{line}", page.name),
        outcome: Outcome::Skipped,
        reason: reason.to_owned(),
        seconds: 0.0,
        tabulated: false,
    });
}

/// The page's host, which is made when it is needed.
fn opened(host: &mut Option<Host>) -> Result<&mut Host> {
    if host.is_none() {
        *host = Some(Host::new()?);
    }
    host.as_mut().context("no host")
}

/// Namespaces of this machine that are as good as a host of its own: processes, network, and `/run`,
/// `/etc` and `/tmp` that can be written to.
struct Host {
    shell: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// What a page takes for granted on a host: an interface to the outside with an address, users, and
/// the programs of this project.
const SET_UP: &str = "\
    set -e
    mount -t tmpfs tmpfs /run
    mkdir -p /run/vrdma /run/rdma
    mkdir /run/etc && cp -a /etc/. /run/etc/ && mount --bind /run/etc /etc
    mount -t tmpfs tmpfs /tmp
    mount -t sysfs sysfs /sys && mount -t bpf bpf /sys/fs/bpf
    ip link set lo up
    ip link add eth0 type veth peer name outside && ip link set outside up
    ip link set eth0 up
    ip address add 192.0.2.1/24 dev eth0
    groupadd --force --system kvm
    cp $ROOT/packaging/vhost-device-rdma.toml /etc/
    cd /tmp
    set +e
";

impl Host {
    fn new() -> Result<Self> {
        let programs: PathBuf = shell::cargo_target().join("release");
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = shell::as_root("unshare");
        command
            .args(["--mount", "--net", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc", "env"])
            .arg(format!("PATH={}:{path}", programs.display()))
            .arg(format!("ROOT={}", shell::root().display()))
            .args(["bash", "--noprofile", "--norc"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0);
        let mut shell = command.spawn().context("unshare")?;
        let input = shell.stdin.take().context("its standard input")?;
        let output = BufReader::new(shell.stdout.take().context("its standard output")?);
        let mut host = Host {
            shell,
            input,
            output,
        };
        host.say(SET_UP)?;
        Ok(host)
    }

    /// Has the shell run a script, and takes what it writes.
    ///
    /// # Errors
    ///
    /// It ends with another status than 0.
    fn say(&mut self, script: &str) -> Result<String> {
        const END: &str = "=== end of the script: ";
        // Nobody's standard input is what comes next.
        write!(
            self.input,
            "{{\n{script}\n}} </dev/null 2>&1; echo; echo '{END}'$?\n"
        )?;
        self.input.flush()?;
        let mut text = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                bail!("the shell ended:\n{text}");
            }
            if let Some(status) = line.strip_prefix(END) {
                let status = status.trim();
                ensure!(status == "0", "ended with {status}:\n{text}");
                return Ok(text);
            }
            text += &line;
        }
    }

    /// Runs commands. What goes on writes to a file.
    fn run(&mut self, commands: &str, goes_on: bool) -> Result<String> {
        // Somebody who types needs a moment, too, after what is to go on.
        let mut typed = String::new();
        for line in commands.lines() {
            typed += line;
            typed += match line.ends_with('&') {
                true => "\nsleep 1\n",
                false => "\n",
            };
        }
        if goes_on {
            let text = format!(
                "bash -e -c {} >>/tmp/log 2>&1 &\nsleep 1",
                shell::quote(&typed)
            );
            // It has not ended.
            return self.say(&format!("{text}\nkill -0 $! || {{ cat /tmp/log; false; }}"));
        }
        self.say(&format!("bash -e -c {}", shell::quote(&typed)))
    }

    /// Starts a device process with a configuration, instead of the one before.
    fn configure(&mut self, text: &str) -> Result<String> {
        self.say(&format!(
            "pkill -x vhost-device-rd; while pgrep -x vhost-device-rd; do sleep 0.1; done\n\
             cat >/tmp/configuration <<'END'\n{text}END\n"
        ))?;
        self.run("exec vhost-device-rdma --config /tmp/configuration", true)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.input.write_all(b"exit\n");
        let _ = self.input.flush();
        let _ = self.shell.wait();
    }
}
