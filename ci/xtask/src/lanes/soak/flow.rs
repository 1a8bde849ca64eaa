// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The traffic of a soak: applications in the VMs, one after the other in a few places at a time,
//! and the bare guests.

use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::Value;
use virtio_rdma_hostile::{Random, Victim};

use super::bare::{limits, Seen as BareSeen, Traffic};
use super::hostile::{Hostile, Seen as HostileSeen};
use crate::lanes::tools::{Pair, Ready};
use crate::lanes::Fixture;
use crate::vm::{mac, wait_for, Job};

/// How many applications run at a time.
const PLACES: usize = 3;

/// How long a run may take that nobody disturbs, on a busy machine without KVM.
const LONG: Duration = Duration::from_secs(240);

/// How long one may take to end that was disturbed and then killed.
const ENDS: Duration = Duration::from_secs(20);

/// How often the hostile guest learns whom it can attack.
const NEWS: Duration = Duration::from_secs(5);

/// Of how many queue pairs of each.
const KNOWN: usize = 4;

/// What an application says of data that is not as it was sent.
const CORRUPT: [&str; 5] = [
    "is not what was sent",
    "is not what was written",
    "wrong data",
    "data mismatch",
    "invalid data in page",
];

/// A run of an application.
struct Run {
    what: String,
    pair: Pair,
    server: Job,
    client: Job,
    since: Instant,
    disturbed: bool,
}

/// What was seen of all traffic.
#[derive(Default)]
pub struct Seen {
    pub runs: u64,
    pub disturbed: u64,
    pub lost: u64,
    pub corrupt: u64,
    pub messages: Vec<String>,
    pub bare: BareSeen,
    pub hostile: HostileSeen,
}

impl Seen {
    /// Adds what was seen at another time.
    pub fn add(&mut self, other: Seen) {
        self.runs += other.runs;
        self.disturbed += other.disturbed;
        self.lost += other.lost;
        self.corrupt += other.corrupt;
        self.messages.extend(other.messages);
        self.bare.blocks += other.bare.blocks;
        self.bare.bytes += other.bare.bytes;
        self.bare.lost += other.bare.lost;
        self.bare.corrupt += other.bare.corrupt;
        self.bare.messages.extend(other.bare.messages);
        self.hostile.rounds += other.hostile.rounds;
        self.hostile.failed += other.hostile.failed;
        self.hostile.messages.extend(other.hostile.messages);
    }
}

/// All traffic.
pub struct Flows {
    random: Random,
    runs: Vec<Run>,
    bare: Traffic,
    hostile: Hostile,
    /// When the hostile guest was told last whom it can attack.
    told: Option<Instant>,
    seen: Seen,
}

impl Flows {
    /// Starts it.
    pub fn start(fixture: &mut Fixture, seed: u64) -> Result<Self> {
        let device = fixture.bed.device.as_ref().context("there is no device")?;
        let sockets = [3, 4].map(|number| device.socket(number).map(ToOwned::to_owned));
        let [a, b] = sockets;
        let hostile = device.socket(6)?.to_owned();
        let mut flows = Flows {
            random: Random::new(seed),
            runs: Vec::new(),
            bare: Traffic::start([a?, b?], seed),
            hostile: Hostile::start(hostile, seed),
            told: None,
            seen: Seen::default(),
        };
        flows.tend(fixture)?;
        Ok(flows)
    }

    /// Judges what has ended, and starts something else in its place.
    pub fn tend(&mut self, fixture: &mut Fixture) -> Result<()> {
        self.judge()?;
        if self.told.is_none_or(|told| told.elapsed() > NEWS) {
            self.told = Some(Instant::now());
            self.hostile.set_victims(victims(fixture)?);
        }
        while self.runs.len() < PLACES {
            let run = start(fixture, &mut self.random)?;
            self.runs.push(run);
        }
        Ok(())
    }

    fn judge(&mut self) -> Result<()> {
        let (ended, running): (Vec<_>, Vec<_>) = std::mem::take(&mut self.runs)
            .into_iter()
            .partition(|run| !run.client.running() || run.since.elapsed() > LONG);
        self.runs = running;
        for run in ended {
            self.judge_one(run)?;
        }
        Ok(())
    }

    fn judge_one(&mut self, run: Run) -> Result<()> {
        self.seen.runs += 1;
        let client = run.client.wait(Duration::from_millis(100));
        let server = if run.disturbed {
            Ok(None)
        } else {
            run.server.wait(ENDS).map(Some)
        };
        let text = run.client.text() + &run.server.text();
        if CORRUPT.iter().any(|word| text.contains(word)) {
            self.seen.corrupt += 1;
            self.seen.messages.push(format!("{}: {text}", run.what));
        } else if run.disturbed {
            self.seen.disturbed += 1;
        } else {
            let good = client.as_ref().is_ok_and(|output| output.status == 0)
                && server
                    .as_ref()
                    .is_ok_and(|output| output.as_ref().is_none_or(|output| output.status == 0));
            if !good {
                self.seen.lost += 1;
                self.seen.messages.push(format!(
                    "{} between vm{} and vm{}: {client:?}, {server:?}",
                    run.what, run.pair.client, run.pair.server
                ));
            }
        }
        end(&run)
    }

    /// What runs in a VM, or with one, is disturbed; in all of them without a number.
    pub fn disturb(&mut self, number: Option<u8>) {
        for run in &mut self.runs {
            let there =
                number.is_none_or(|number| number == run.pair.server || number == run.pair.client);
            run.disturbed |= there;
        }
    }

    /// Ends what was disturbed and runs all the same (what waits for a peer that is gone waits for
    /// ever), and starts something else.
    pub fn replace_disturbed(&mut self, fixture: &mut Fixture) -> Result<()> {
        self.end_disturbed()?;
        self.tend(fixture)
    }

    /// Ends what was disturbed.
    pub fn end_disturbed(&mut self) -> Result<()> {
        let (disturbed, running): (Vec<_>, Vec<_>) = std::mem::take(&mut self.runs)
            .into_iter()
            .partition(|run| run.disturbed);
        self.runs = running;
        for run in disturbed {
            end(&run)?;
            self.judge_one(run)?;
        }
        Ok(())
    }

    /// Kills one side of one application.
    pub fn kill_one(&mut self, which: u64) -> Result<()> {
        let at = usize::try_from(which % PLACES as u64)?;
        if let Some(run) = self.runs.get_mut(at) {
            run.disturbed = true;
            let side = if which & (1 << 32) == 0 {
                &run.client
            } else {
                &run.server
            };
            side.kill(9)?;
        }
        Ok(())
    }

    /// Breaks the connections of the bare guests.
    pub fn kill_bare(&self) {
        self.bare.kill();
    }

    /// The device process goes away.
    pub fn device_goes(&mut self) {
        self.disturb(None);
        self.bare.device_goes();
        self.hostile.device_is_away(true);
    }

    /// The device process is there again.
    pub fn device_is_back(&self) {
        self.bare.device_is_back();
        self.hostile.device_is_away(false);
    }

    /// Waits until the bare guests move data.
    pub fn wait_moving(&self) -> Result<()> {
        self.bare.wait_moving()
    }

    /// Lets a guest create objects until it is refused any more, beside all others.
    pub fn limits(&self, fixture: &Fixture) -> Result<[usize; 3]> {
        let device = fixture.bed.device.as_ref().context("there is no device")?;
        limits(device.socket(5)?)
    }

    /// Lets all come to its end.
    pub fn stop(mut self) -> Result<Seen> {
        let start = Instant::now();
        while !self.runs.is_empty() && start.elapsed() < LONG {
            self.judge()?;
            self.end_disturbed()?;
            std::thread::sleep(Duration::from_millis(50));
        }
        self.seen.bare = self.bare.stop()?;
        self.seen.hostile = self.hostile.stop()?;
        Ok(self.seen)
    }
}

/// Whom a hostile guest can attack: all that the device's status says of the others, but only the
/// GIDs that are reserved. (Another may be claimed by whoever is first after a reset.)
fn victims(fixture: &Fixture) -> Result<Vec<Victim>> {
    let device = fixture.bed.device.as_ref().context("there is no device")?;
    let status = device.status()?;
    let devices = status["devices"].as_array().context("no devices")?;
    let others = devices.iter().filter(|device| {
        let number = |number| device["mac"] == mac(number).as_str();
        (1..=4).any(number)
    });
    let victim = |device: &Value| {
        let list = |name: &str| device[name].as_array().cloned().unwrap_or_default();
        let gids = list("gids").into_iter().filter_map(|gid| {
            let gid: Ipv6Addr = gid["gid"].as_str()?.parse().ok()?;
            (gid.segments()[0] == 0xfe80).then(|| gid.octets())
        });
        let qpns = list("qps").into_iter().filter_map(|qp| {
            let qpn = qp["qpn"].as_u64()?;
            u32::try_from(qpn).ok()
        });
        Victim {
            gids: gids.collect(),
            qpns: qpns.take(KNOWN).collect(),
            regions: Vec::new(),
        }
    };
    Ok(others.map(victim).collect())
}

/// Kills what runs of a run; it has to go.
fn end(run: &Run) -> Result<()> {
    for job in [&run.client, &run.server] {
        if !job.running() {
            continue;
        }
        job.kill(9)?;
        if wait_for(ENDS, || Ok((!job.running()).then_some(())))?.is_none() {
            bail!("{} cannot be killed: {}", run.what, job.text());
        }
    }
    Ok(())
}

/// Starts a random application between random VMs.
fn start(fixture: &mut Fixture, random: &mut Random) -> Result<Run> {
    let (server, client) = random.of(&[(2, 1), (1, 2), (1, 1), (2, 2)], (2, 1));
    let pair = fixture.pair(server, client);
    let (host, port) = (pair.host(), pair.port);
    let largest = random_size(random);
    let size = 1 + random.below(largest);
    let (ready, serve, call) = match random.below(6) {
        0 => {
            let run = |side: &str| {
                format!(
                    "exec rping {side} -a {host} -p {port} -C 300 -V -S {}",
                    // It wants 23 at least.
                    32 + size % 60000
                )
            };
            (Ready::Cm(port), run("-s"), run("-c"))
        }
        1 => (Ready::Tcp(port), pair.target(), pair.rdma("verify", "")),
        2 => (Ready::Tcp(port), pair.target(), pair.rdma("flow", "3000")),
        3 => (Ready::Tcp(port), pair.target(), pair.rdma("writes", "300")),
        4 => {
            let tool = random.of(&["ib_write_bw", "ib_send_bw", "ib_read_bw"], "ib_write_bw");
            let arguments = format!("-s {size} -n 3000");
            let of = |client| pair.perftest_command(tool, &arguments, client);
            (Ready::Tcp(port), of(false), of(true))
        }
        _ => {
            let arguments = format!("-n 500 -s {size}");
            (
                Ready::Tcp(port),
                pair.pingpong_command(&arguments, ""),
                pair.pingpong_command(&arguments, &host),
            )
        }
    };
    let server = pair.serve_when(ready, &fixture.bed, &serve)?;
    let job = fixture.vm(client)?.spawn(&call)?;
    Ok(Run {
        what: call,
        pair,
        server,
        client: job,
        since: Instant::now(),
        disturbed: false,
    })
}

/// Small messages as often as large ones.
fn random_size(random: &mut Random) -> u64 {
    random.of(&[64, 4096, 65536, 1 << 20], 64)
}
