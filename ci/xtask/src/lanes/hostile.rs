// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `hostile`: two VMs with verified traffic between them, and beside them a third guest of the
//! same device process that attacks it and them (`ci/hostile`), an attack a case. The VMs must not
//! notice, and of the attacker nothing must be left.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use virtio_rdma_hostile::{Attack, Attacker, Random, Victim};

use super::tools::{counts, progress, resident_memory, settled, wait_progress, Counts, Pair};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{mac, wait_for, Bed, FrontEnd, Hosts, Job, SHORT};

/// The attacker's number among the guests of the device.
const ATTACKER: u8 = 3;

/// For how long an attack is repeated.
const TIME: Duration = Duration::from_secs(4);

/// Traffic that makes no progress for so long, on a busy machine, stands still.
const STALL: Duration = Duration::from_secs(60);

/// How much the device may write to its log during an attack, bytes.
const LOG: u64 = 64 << 10;

/// How much more memory the device may have after an attack than before: what its allocator keeps
/// for later, bytes. Most attacks take it well above that.
const MEMORY: u64 = 24 << 20;

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "hostile",
        about: "hostile guests, front ends and processes beside VMs that must not notice",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 1,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        // The attacks are on the device; on another kernel they are the same.
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

/// A case for each attack, and others.
macro_rules! cases {
    ([$($attack:literal)*] $($name:literal: $run:expr,)*) => {
        const CASES: &[Case] = &[
            $(Case { name: $attack, run: |fixture| attack(fixture, $attack) },)*
            $(Case { name: $name, run: $run },)*
        ];
    };
}

cases! {
    [
        "memory_taken_away"
        "memory_on_a_full_tmpfs"
        "interrupts_that_block"
        "files_that_are_no_eventfds"
        "random_messages"
        "memory_regions_out_of_bounds"
        "memory_regions_without_end"
        "coming_and_going"
        "random_commands"
        "random_virtqueues"
        "chains_in_loops"
        "page_lists_that_lie"
        "page_lists_that_change"
        "random_rings"
        "wrapped_ranges"
        "overflowing_cqs"
        "key_collisions"
        "destroy_while_busy"
        "objects_without_end"
        "interrupt_storm"
        "notification_storm"
        "foreign_handles"
        "claimed_gids"
        "connections_of_others"
        "guesses"
        "datagrams_to_everybody"
        "receiver_not_ready"
        "flood"
    ]
    "guest memory is in no core dump": no_core_dump,
    "a process against another of its guest": processes,
    "the traffic ends": traffic_ends,
}

/// Verified traffic from one VM to the other.
struct Traffic {
    server: Job,
    client: Job,
}

impl Traffic {
    fn start(fixture: &Fixture, pair: Pair, command: &str) -> Result<Self> {
        let server = pair.serve(&fixture.bed, &pair.target())?;
        let client = fixture.vm(pair.client)?.spawn(&pair.rdma(command, "0"))?;
        Ok(Self { server, client })
    }

    /// Nothing was lost or wrong so far.
    fn check(&self) -> Result<()> {
        ensure!(
            self.client.running() && self.server.running(),
            "the traffic of the VMs has ended:\n{}\n{}",
            self.client.text(),
            self.server.text()
        );
        Ok(())
    }

    /// What both ends say of themselves.
    fn ends(&self) -> Result<[Value; 2]> {
        let of = |job: &Job| -> Result<Value> {
            let text = job.text();
            let line = text.lines().find_map(|line| line.strip_prefix("end "));
            Ok(serde_json::from_str(line.context("no line about an end")?)?)
        };
        Ok([of(&self.server)?, of(&self.client)?])
    }

    fn stop(self) -> Result<()> {
        for job in [&self.client, &self.server] {
            job.kill(9)?;
            let ended = wait_for(SHORT, || Ok((!job.running()).then_some(())))?;
            ended.context("the traffic of the VMs cannot be killed")?;
        }
        Ok(())
    }
}

/// The traffic that goes on from one case to the next.
pub struct Background {
    traffic: [Traffic; 2],
    /// Its ends.
    victims: Vec<Victim>,
    /// What the device had before it.
    before: Vec<Counts>,
}

impl Background {
    fn start(fixture: &mut Fixture) -> Result<Self> {
        let before = counts(&fixture.bed)?;
        let pairs = [fixture.pair(2, 1), fixture.pair(1, 2)];
        let traffic = [
            Traffic::start(fixture, pairs[0], "writes")?,
            Traffic::start(fixture, pairs[1], "flow")?,
        ];
        let mut victims = Vec::new();
        for one in &traffic {
            wait_progress(&one.client, 50, SHORT)?;
            for end in one.ends()? {
                victims.push(victim(&end)?);
            }
        }
        Ok(Self {
            traffic,
            victims,
            before,
        })
    }
}

/// All that an end of traffic has.
fn victim(end: &Value) -> Result<Victim> {
    let number = |name: &str| {
        let number = end[name].as_u64();
        number.with_context(|| format!("no {name} of an end: {end}"))
    };
    let gid = end["gid"].as_str().context("no GID of an end")?;
    let gid: std::net::Ipv6Addr = gid.parse().context("no GID")?;
    Ok(Victim {
        gids: vec![gid.octets()],
        qpns: vec![u32::try_from(number("qpn")?)?],
        regions: vec![(u32::try_from(number("rkey")?)?, number("address")?)],
    })
}

/// What the device has of the attacker: None if it has nothing.
fn attackers_device(bed: &Bed) -> Result<Option<Value>> {
    let device = bed.device.as_ref().context("there is no device")?;
    let status = device.status()?;
    let devices = status["devices"].as_array().context("no devices")?;
    let mac = mac(ATTACKER);
    let found = devices.iter().find(|device| device["mac"] == mac.as_str());
    Ok(found.cloned())
}

/// The size of the device's log.
fn log_size(bed: &Bed) -> Result<u64> {
    let device = bed.device.as_ref().context("there is no device")?;
    Ok(fs::metadata(device.log())?.len())
}

/// Repeats an attack beside traffic, and looks for harm.
fn attack(fixture: &mut Fixture, name: &str) -> Result<()> {
    let attack = virtio_rdma_hostile::find(name)?;
    let background = match fixture.background.take() {
        Some(background) => background,
        None => Background::start(fixture)?,
    };
    let traffic = &background.traffic;
    let device = fixture.bed.device.as_ref().context("there is no device")?;
    let attacker = Attacker {
        socket: device.socket(ATTACKER.into())?.to_owned(),
        victims: background.victims.clone(),
        random: Random::new(u64::from(device.pid())),
    };
    let (pid, log) = (device.pid(), log_size(&fixture.bed)?);
    let memory = resident_memory(&fixture.bed)?;
    let alone = rates(traffic, Duration::from_secs(1))?;
    let time = if fixture.quick { TIME / 3 } else { TIME };
    let (rounds, attacked) = repeat(attack, attacker, traffic, time)?;

    let device = fixture.bed.device.as_mut().context("there is no device")?;
    device.check()?;
    ensure!(device.pid() == pid, "the device is another process");
    let gone = wait_for(SHORT, || {
        Ok(attackers_device(&fixture.bed)?.is_none().then_some(()))
    })?;
    if gone.is_none() {
        let left = attackers_device(&fixture.bed)?;
        bail!("the attacker has gone, and is still there: {left:?}");
    }
    for one in traffic {
        one.check()?;
        let now = progress(&one.client);
        wait_progress(&one.client, now + 50, SHORT).context("after the attack")?;
    }
    let written = log_size(&fixture.bed)?.saturating_sub(log);
    ensure!(
        written <= LOG,
        "the device wrote {written} bytes to its log"
    );
    let fell = wait_for(Duration::from_secs(10), || {
        Ok((resident_memory(&fixture.bed)? <= memory + MEMORY).then_some(()))
    })?;
    let grown = resident_memory(&fixture.bed)?.saturating_sub(memory);
    fell.with_context(|| format!("the device has {grown} bytes more than before"))?;
    let row = format!("{} {name}", fixture.kernel);
    let percent = |at: usize| {
        let share = attacked[at] * 100.0 / alone[at].max(1.0);
        format!("{share:.0} %")
    };
    for (column, text) in [
        ("rounds", rounds.to_string()),
        ("writes meanwhile", percent(0)),
        ("sends meanwhile", percent(1)),
        ("log, bytes", written.to_string()),
        ("memory kept, KiB", (grown >> 10).to_string()),
    ] {
        fixture.cell(&row, column, &text);
    }
    fixture.background = Some(background);
    Ok(())
}

/// The traffic ends, and of it nothing is left.
fn traffic_ends(fixture: &mut Fixture) -> Result<()> {
    let Some(background) = fixture.background.take() else {
        return Ok(());
    };
    for one in background.traffic {
        one.check()?;
        one.stop()?;
    }
    settled(&fixture.bed, &background.before)
}

/// The progress of each a second, over some time.
fn rates(traffic: &[Traffic; 2], time: Duration) -> Result<[f64; 2]> {
    let now = || traffic.each_ref().map(|one| progress(&one.client));
    let (start, before) = (Instant::now(), now());
    let mut seen = (Instant::now(), before);
    while start.elapsed() < time {
        sleep(Duration::from_millis(50));
        check_moving(traffic, &mut seen)?;
    }
    let (after, seconds) = (now(), start.elapsed().as_secs_f64());
    Ok([0, 1].map(|at| after[at].saturating_sub(before[at]) as f64 / seconds))
}

/// Each has made progress since `seen`, or that is not long ago.
fn check_moving(traffic: &[Traffic; 2], seen: &mut (Instant, [u64; 2])) -> Result<()> {
    let now = traffic.each_ref().map(|one| progress(&one.client));
    for one in traffic {
        one.check()?;
    }
    if now.iter().zip(&seen.1).all(|(now, before)| now > before) {
        *seen = (Instant::now(), now);
    }
    ensure!(
        seen.0.elapsed() < STALL,
        "the traffic of the VMs stands still"
    );
    Ok(())
}

/// Attacks for some time; returns how often, and the progress of traffic a second meanwhile.
fn repeat(
    attack: Attack,
    mut attacker: Attacker,
    traffic: &[Traffic; 2],
    time: Duration,
) -> Result<(u64, [f64; 2])> {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (stop, rounds) = (&stop, &rounds);
        let attacks = scope.spawn(move || -> Result<()> {
            while !stop.load(Ordering::Relaxed) {
                (attack.round)(&mut attacker)?;
                rounds.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let rates = rates(traffic, time);
        stop.store(true, Ordering::Relaxed);
        let ended = attacks.join();
        ended
            .map_err(|_| anyhow::anyhow!("the attacker panicked"))?
            .with_context(|| format!("round {}", rounds.load(Ordering::Relaxed) + 1))?;
        Ok((rounds.load(Ordering::Relaxed), rates?))
    })
}

/// Finding 7: of each mapping of guest memory the kernel says that it is in no core dump.
fn no_core_dump(fixture: &mut Fixture) -> Result<()> {
    let device = fixture.bed.device.as_ref().context("there is no device")?;
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", device.pid()))?;
    let (mut mapping, mut size, mut seen) = ("", 0, 0);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next().unwrap_or_default() {
            "Size:" => size = words.next().unwrap_or_default().parse::<u64>()?,
            "VmFlags:" if size >= 256 << 10 && mapping.contains(" rw-s ") => {
                seen += 1;
                ensure!(
                    words.any(|flag| flag == "dd"),
                    "guest memory would be in a core dump: {mapping}"
                );
            }
            range if range.contains('-') && !range.ends_with(':') => mapping = line,
            _ => {}
        }
    }
    ensure!(seen >= 2, "{seen} mappings of guest memory were found");
    Ok(())
}

/// Tests of `ci/verbs/hostile.c`: a process without privileges against another of its guest.
fn processes(fixture: &mut Fixture) -> Result<()> {
    for test in [
        "process_foreign_handles",
        "process_foreign_mappings",
        "process_foreign_memory",
        "process_fresh_doorbells_are_zero",
    ] {
        super::verbs::alone(fixture, test)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_attack_has_its_case() {
        let all = virtio_rdma_hostile::ALL.iter().copied().flatten();
        let all: BTreeSet<_> = all.map(|attack| attack.name).collect();
        let cases = CASES.iter().map(|case| case.name);
        let cases: BTreeSet<_> = cases.filter(|name| !name.contains(' ')).collect();
        assert_eq!(all, cases);
    }
}
