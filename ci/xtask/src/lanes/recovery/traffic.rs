// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traffic that runs until something ends it: of applications, and of users in the kernel.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::{rounded, ENDS};
use crate::lanes::storage::{address, clean, moved, Fio, CLIENT, SERVER};
use crate::lanes::tools::{wait_progress, Pair, Ready};
use crate::lanes::Fixture;
use crate::vm::{wait_for, Job, SHORT};

/// How long traffic may take to begin, on a busy machine without KVM.
const BEGINS: Duration = Duration::from_secs(180);

/// A guest has one processor: an application that polls leaves it to what else has to be done.
const GIVES_WAY: &str = "nice -n 19";

/// How long storage may take to go on: the NVMe host looks for its target every few seconds, and
/// clients of NFS give way to their server for longer each time they find nobody.
const STORAGE_GOES_ON: Duration = Duration::from_secs(150);

/// Which application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Verified, over rdma_cm.
    Rping,
    /// Many short connections over rdma_cm, one run after the other.
    Ucmatose,
    /// `ib_write_bw`: large messages, without rdma_cm.
    Perftest,
    /// `rdma.py flow`: numbered messages, verified, without rdma_cm.
    Flow,
}

/// What runs.
pub struct Traffic {
    kind: Kind,
    pair: Pair,
    server: Job,
    client: Job,
}

impl Traffic {
    /// Starts it, and waits until it moves data.
    pub fn start(fixture: &mut Fixture, kind: Kind, server: u8, client: u8) -> Result<Self> {
        let pair = fixture.pair(server, client);
        Self::start_to(fixture, kind, pair, &pair.host())
    }

    /// As [`Self::start`], with another address of the server.
    pub fn start_to(fixture: &Fixture, kind: Kind, pair: Pair, host: &str) -> Result<Self> {
        let port = pair.port;
        let (ready, serve, call) = match kind {
            Kind::Rping => (
                Ready::Cm(port),
                format!("exec {GIVES_WAY} rping -s -a {host} -p {port} -V -S 4096"),
                format!("exec {GIVES_WAY} rping -c -a {host} -p {port} -V -S 4096"),
            ),
            Kind::Ucmatose => {
                // A client that comes when the server is about to listen has some of its
                // connections only, and then both wait for the others for ever. With the same time
                // limit on both sides, the next client would come at the same moment of the next
                // server, and so would each one after it.
                let run = |side: &str, limit: u32| {
                    format!(
                        "until [ -e /tmp/stop-{port} ]; do {GIVES_WAY} timeout --foreground {limit} \
                         ucmatose {side} {host} -p {port} -c 4 -C 400 -S 4096 >/tmp/ucmatose 2>&1; done"
                    )
                };
                (Ready::Cm(port), run("-b", 17), run("-s", 10))
            }
            Kind::Perftest => {
                let arguments = "-D 600 -s 65536";
                (
                    Ready::Tcp(port),
                    format!(
                        "exec {GIVES_WAY} {}",
                        pair.perftest_command("ib_write_bw", arguments, false)
                    ),
                    format!(
                        "exec {GIVES_WAY} {}",
                        pair.perftest_command("ib_write_bw", arguments, true)
                    ),
                )
            }
            Kind::Flow => (Ready::Tcp(port), pair.target(), pair.rdma("flow", "0")),
        };
        let server = pair.serve_when(ready, &fixture.bed, &serve)?;
        let client = fixture.vm(pair.client)?.spawn(&call)?;
        let traffic = Traffic {
            kind,
            pair,
            server,
            client,
        };
        traffic.wait_moving(fixture)?;
        Ok(traffic)
    }

    fn wait_moving(&self, fixture: &Fixture) -> Result<()> {
        let application = match self.kind {
            Kind::Flow => return wait_progress(&self.client, 100, BEGINS),
            Kind::Rping => "rping",
            Kind::Ucmatose => "ucmatose",
            Kind::Perftest => "ib_write_bw",
        };
        let command = format!("/payload/connected {application} 5");
        let vm = fixture.vm(self.pair.client)?;
        let moving = wait_for(BEGINS, || {
            self.check()?;
            Ok((vm.run(&command, SHORT)?.status == 0).then_some(()))
        })?;
        moving.with_context(|| {
            format!(
                "{:?} does not connect: {}\n{}",
                self.kind,
                self.texts(),
                self.connections(fixture)
            )
        })?;
        // From being connected to being in full swing.
        std::thread::sleep(Duration::from_millis(500));
        self.check()
    }

    /// An error if it has ended.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.client.running() && self.server.running(),
            "{:?} ended by itself: {}",
            self.kind,
            self.texts()
        );
        Ok(())
    }

    fn texts(&self) -> String {
        let last = |job: &Job| {
            let text = job.text();
            let from = text.len().saturating_sub(600);
            text.get(from..).unwrap_or(&text).to_owned()
        };
        format!(
            "the client wrote:\n{}\nthe server wrote:\n{}",
            last(&self.client),
            last(&self.server)
        )
    }

    /// What the kernels of both sides know of connections, and what ucmatose writes to a file.
    fn connections(&self, fixture: &Fixture) -> String {
        let tell = "rdma resource show cm_id; rdma resource show qp; ps ax -o pid,stat,etime,wchan:32,args \
                    | grep [u]cmatose; cat /tmp/ucmatose";
        [("client", self.pair.client), ("server", self.pair.server)]
            .map(|(side, number)| {
                let told = fixture.vm(number).and_then(|vm| vm.run(tell, SHORT));
                let told = told.map_or_else(|e| format!("{e:#}"), |output| output.text);
                format!("the {side} has:\n{told}")
            })
            .join("\n")
    }

    /// The device was lost under it: both sides end by themselves, and the client with an error.
    /// Returns after how many seconds.
    pub fn lost(self, fixture: &Fixture) -> Result<f64> {
        let start = Instant::now();
        if self.kind == Kind::Ucmatose {
            // It waits for events of its connections for ever, whatever becomes of them.
            self.stop(fixture)?;
            return Ok(start.elapsed().as_secs_f64());
        }
        for (side, job) in [("client", &self.client), ("server", &self.server)] {
            let left = ENDS.saturating_sub(start.elapsed());
            let output = job
                .wait(left.max(Duration::from_millis(100)))
                .with_context(|| format!("the {side} of {:?} does not end by itself", self.kind))?;
            ensure!(
                side == "server" || output.status != 0,
                "the client of {:?} ended with success though its device is gone:\n{}",
                self.kind,
                output.text
            );
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Ends it, whether it runs or not: what is killed has to go.
    pub fn stop(self, fixture: &Fixture) -> Result<()> {
        if self.kind == Kind::Ucmatose {
            for number in [self.pair.server, self.pair.client] {
                // A VM that is gone has taken its side along.
                let _ = fixture
                    .vm(number)?
                    .run(&format!("touch /tmp/stop-{}", self.pair.port), SHORT);
            }
        }
        for (side, job) in [("client", &self.client), ("server", &self.server)] {
            if !job.running() {
                continue;
            }
            job.kill(9)?;
            // The error of a VM that is gone is no error here.
            let killed = wait_for(ENDS, || Ok((!job.running()).then_some(())))?;
            if killed.is_none() {
                bail!(
                    "the {side} of {:?} cannot be killed: {}",
                    self.kind,
                    self.texts()
                );
            }
        }
        Ok(())
    }
}

/// One verified run of rping, which has to be good at the first attempt.
pub fn rping(fixture: &mut Fixture, server: u8, client: u8) -> Result<()> {
    let pair = fixture.pair(server, client);
    rping_to(fixture, pair, &pair.host())
}

/// As [`rping`], with another address of the server.
pub fn rping_to(fixture: &Fixture, pair: Pair, host: &str) -> Result<()> {
    let port = pair.port;
    let start = |side: &str| format!("rping {side} -a {host} -p {port} -C 10 -V -S 4096");
    pair.run_when(
        Ready::Cm(port),
        &fixture.bed,
        &start("-s"),
        &start("-c"),
        SHORT,
    )
    .context("the first rping fails")
    .map(drop)
}

/// NVMe over Fabrics, NFS or both between the VMs, each with a fio that writes, reads and verifies
/// until it is stopped.
pub struct Kernel {
    runs: Vec<(Fio, Job)>,
}

impl Kernel {
    /// Serves, connects, and starts the traffic.
    pub fn start(fixture: &mut Fixture, nvme: bool, nfs: bool) -> Result<Self> {
        clean(fixture)?;
        for number in [SERVER, CLIENT] {
            fixture
                .vm(number)?
                .sh("rm -f /tmp/no-more-fio; /payload/rdma-device vrdma0")?;
        }
        let host = address(SERVER);
        let mut fios = Vec::new();
        if nvme {
            // Bound to no device: the kernel's target gives up a port that was bound to one which
            // was taken out.
            fixture
                .vm(SERVER)?
                .sh("/payload/storage-server nvme memory 0.0.0.0 rdma")?;
            let said = fixture
                .vm(CLIENT)?
                .sh(&format!("/payload/storage-client nvme {host} rdma"))?;
            let device = said.lines().last().unwrap_or_default();
            ensure!(device.starts_with("/dev/nvme"), "no NVMe device: {said}");
            fios.push(("nvme", device.to_owned()));
        }
        if nfs {
            fixture
                .vm(SERVER)?
                .sh("/payload/storage-server nfs memory")?;
            fixture
                .vm(CLIENT)?
                .sh(&format!("/payload/storage-client nfs {host} rdma"))?;
            fixture.vm(SERVER)?.sh(
                "dd if=/dev/zero of=/export/data/fio bs=1M count=32 status=none && sync /export/data/fio",
            )?;
            fios.push(("nfs", "/mnt/fio".to_owned()));
        }
        let mut runs = Vec::new();
        for (name, file) in fios {
            let fio = Fio {
                name,
                jobs: 2,
                size: 16,
                pause: Duration::from_millis(200),
                ..Fio::new(file, 4 << 10, 20)
            };
            // Each round ends with everything verified.
            let command = format!(
                "until [ -e /tmp/no-more-fio ]; do {} || exit; done",
                fio.command()
            );
            let job = fixture.vm(CLIENT)?.spawn(&command)?;
            runs.push((fio, job));
        }
        let kernel = Kernel { runs };
        kernel.wait_moving(fixture)?;
        Ok(kernel)
    }

    /// Waits until all move data; returns after how many seconds.
    pub fn wait_moving(&self, fixture: &Fixture) -> Result<f64> {
        self.wait_moving_of(fixture, &["nvme", "nfs"])
    }

    /// As [`Self::wait_moving`], for some of them.
    pub fn wait_moving_of(&self, fixture: &Fixture, names: &[&str]) -> Result<f64> {
        let start = Instant::now();
        let runs = self.runs.iter();
        let runs = runs.filter(|(fio, _)| names.contains(&fio.name));
        let before: Vec<_> = runs
            .map(|run| Ok((run, moved(fixture, run.0.name)?)))
            .collect::<Result<_>>()?;
        for ((fio, job), before) in before {
            let moving = wait_for(STORAGE_GOES_ON, || {
                if !job.running() {
                    let output = job.wait(SHORT)?;
                    let report = fixture
                        .vm(CLIENT)?
                        .run(&format!("head -c 3000 {}", fio.result()), SHORT)?;
                    bail!(
                        "fio {} ended with {}:\n{}\n{}",
                        fio.name,
                        output.status,
                        output.text,
                        report.text
                    );
                }
                // The next round starts from zero.
                let now = moved(fixture, fio.name)?;
                Ok((now.abs_diff(before) > 256 << 10).then_some(()))
            })?;
            moving
                .with_context(|| format!("{} moves nothing for {STORAGE_GOES_ON:?}", fio.name))?;
        }
        Ok(rounded(start.elapsed().as_secs_f64()))
    }

    /// Lets the last round come to its end, verified, and takes everything down.
    pub fn finish(self, fixture: &Fixture) -> Result<()> {
        fixture.vm(CLIENT)?.sh("touch /tmp/no-more-fio")?;
        for (fio, job) in &self.runs {
            fio.finish(fixture, job)?;
        }
        clean(fixture)
    }
}
