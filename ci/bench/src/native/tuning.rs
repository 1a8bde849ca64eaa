// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an operator can set, and what it brings: polling, pinning, a second worker, huge pages of
//! the host.
use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;
use vhost_device_rdma_bare::spec::verbs::wr_opcode;
use vhost_device_rdma_bare::{DeviceProcess, Placement};

use super::bed::{self, Pair};
use super::idle::Usage;
use super::lookup::{self, Random};
use super::{cache, figure, quantile, settle, vms, Cores, Settings};
use crate::figure::{Better, Figure};

const SECTION: &str = "tuning";

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let mut figures = polling(settings)?;
    figures.extend(workers(settings)?);
    figures.extend(huge_pages(settings)?);
    Ok(figures)
}

/// A device with one worker and two VMs, and a queue pair between them.
struct Bed {
    pair: Pair,
    process: DeviceProcess,
}

impl Bed {
    fn new(cores: Cores, configuration: &str) -> Result<Self> {
        let process = bed::device_with(cores, 2, configuration)?;
        let (a, b) = (
            bed::vm(&process, 0, 32 << 20)?,
            bed::vm(&process, 1, 32 << 20)?,
        );
        let pair = Pair::new(&a, &b, 1 << 20)?;
        Ok(Self { pair, process })
    }
}

/// Pauses between a completion and the next post, µs.
const PAUSES: [u64; 3] = [0, 20, 100];

/// How long 8 bytes take, and how much time of a CPU the device uses for them, polling included, by
/// what is set and the pause between two.
fn polling(settings: &Settings) -> Result<Vec<Figure>> {
    let cpus = format!("cpus = [{}]\n", settings.cores.worker);
    let ways = [
        ("as it is, pinned", cpus.clone()),
        ("not pinned", String::new()),
        ("pinned, poll_us = 0", format!("{cpus}poll_us = 0\n")),
        ("pinned, poll_us = 500", format!("{cpus}poll_us = 500\n")),
    ];
    let beds = ways
        .iter()
        .map(|(_, text)| Bed::new(settings.cores, &format!("workers = 1\n{text}")))
        .collect::<Result<Vec<_>>>()?;
    let mut runs = vec![[const { [const { Vec::new() }; 3] }; PAUSES.len()]; beds.len()];
    for _ in 0..settings.repetitions() {
        for (pause, of_pause) in PAUSES.iter().enumerate() {
            let all = cache::steady(settings.cores, || {
                let all = beds.iter().map(|bed| spaced(bed, *of_pause, settings));
                all.collect::<Result<Vec<_>>>()
            })?;
            for ((times, used), runs) in all.into_iter().zip(&mut runs) {
                runs[pause][0].push(quantile(&times, 0.5));
                runs[pause][1].push(quantile(&times, 0.99));
                runs[pause][2].push(used);
            }
        }
    }
    let mut figures = Vec::new();
    for (kind, unit) in ["µs", "µs of a CPU"].iter().enumerate() {
        for ((name, _), own) in ways.iter().zip(&runs) {
            for (pause, x) in PAUSES.iter().enumerate() {
                let what = ["WRITE 8 B", "what the device uses for one"][kind];
                let name = format!("{what}, {name}, by µs between two");
                let values = [&own[pause][0], &own[pause][2]][kind];
                let mut point = figure(SECTION, &name, unit, Better::Lower, values).at(*x as f64);
                if kind == 0 {
                    point = point.percentile("p99", &own[pause][1]);
                }
                figures.push(point);
            }
        }
    }
    Ok(figures)
}

/// Sorted times from post to completion, and how much time of a CPU the device used for each, µs.
fn spaced(bed: &Bed, pause: u64, settings: &Settings) -> Result<(Vec<f64>, f64)> {
    settle();
    let pair = &bed.pair;
    let polling = pair.a.send_cq.polling();
    let wqe = bed::signaled(pair.wqe(wr_opcode::RDMA_WRITE));
    let pause = Duration::from_micros(pause);
    let time = settings.time();
    let mut times = Vec::new();
    let before = Usage::of(bed.process.id())?;
    let begin = Instant::now();
    let mut last = begin;
    while last - begin < time {
        while last.elapsed() < pause {}
        let start = Instant::now();
        bed::round(&polling, &pair.a_qp, &wqe, pair.a.mr.sge(0, 8))?;
        last = Instant::now();
        times.push((last - start).as_secs_f64() * 1e6);
    }
    let used = Usage::of(bed.process.id())?.time - before.time;
    let used = used as f64 / times.len() as f64 / 1e3;
    times.sort_unstable_by(f64::total_cmp);
    Ok((times, used))
}

/// Two queue pairs of two VMs with one worker, and with two, of which the driver of the VMs takes
/// the CPU of one.
fn workers(settings: &Settings) -> Result<Vec<Figure>> {
    let Cores { driver, worker } = settings.cores;
    let ways = [
        format!("workers = 1\ncpus = [{worker}]\n"),
        format!("workers = 2\ncpus = [{worker}, {driver}]\n"),
    ];
    let mut beds = Vec::new();
    for text in ways {
        let process = bed::device_with(settings.cores, 2, &text)?;
        let (a, b) = (
            bed::vm(&process, 0, 32 << 20)?,
            bed::vm(&process, 1, 32 << 20)?,
        );
        let pairs = [Pair::new(&a, &b, 1 << 20)?, Pair::new(&a, &b, 1 << 20)?];
        beds.push((pairs, process));
    }
    // Size, how many are posted at once, how many are outstanding, and the unit.
    const LOADS: [(u32, u64, u64, &str, f64); 2] = [
        (64, 32, bed::DEPTH, "million/s", 1.0),
        (1 << 20, 1, 16, "GB/s", 1048.576),
    ];
    let mut figures = Vec::new();
    for (size, list, depth, unit, factor) in LOADS {
        let mut runs = [const { Vec::new() }; 2];
        for _ in 0..settings.repetitions() {
            let rates = cache::steady(settings.cores, || {
                let rates = beds
                    .iter()
                    .map(|(pairs, _)| vms::rate(pairs, size, list, depth, settings.time()));
                rates.collect::<Result<Vec<_>>>()
            })?;
            for (rate, runs) in rates.into_iter().zip(&mut runs) {
                runs.push(rate * factor);
            }
        }
        let name = format!("WRITE {size} B, two queue pairs, two workers on the two CPUs");
        figures.push(
            figure(SECTION, &name, unit, Better::Higher, &runs[1]).beside("one worker", &runs[0]),
        );
    }
    Ok(figures)
}

/// Size of the region that is written to at random.
const REGION: usize = 1 << 30;
/// Memory of a VM that has it.
const MEMORY: usize = REGION + (64 << 20);
/// Size of a huge page.
const HUGE: usize = 2 << 20;

/// Huge pages of the host, which has as many as before when this is dropped.
struct Reserved(String);

impl Reserved {
    const FILE: &str = "/proc/sys/vm/nr_hugepages";

    /// As many more as this takes, if there are.
    fn new(size: usize) -> Result<Option<Self>> {
        let before = fs::read_to_string(Self::FILE)?;
        let total = before.trim().parse::<usize>()? + size.div_ceil(HUGE);
        if fs::write(Self::FILE, total.to_string()).is_err() {
            return Ok(None);
        }
        let reserved = Self(before);
        let now = fs::read_to_string(Self::FILE)?;
        Ok((now.trim().parse::<usize>()? >= total).then_some(reserved))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Err(error) = fs::write(Self::FILE, &self.0) {
            eprintln!("cannot give back huge pages: {error}");
        }
    }
}

/// WRITEs of 8 bytes anywhere in a large region, which lies in huge pages of the host or in others.
fn huge_pages(settings: &Settings) -> Result<Vec<Figure>> {
    let Some(_reserved) = Reserved::new(MEMORY)? else {
        println!("    not measured: huge pages, as the system has not enough of them");
        return Ok(Vec::new());
    };
    let mut beds = Vec::new();
    for huge in [false, true] {
        let process = bed::device(settings.cores, 2, "")?;
        let a = bed::vm(&process, 0, 32 << 20)?;
        let b = bed::vm_on(&process, 1, MEMORY, Placement::Contiguous, huge)?;
        let pair = Pair::new(&a, &b, 4096)?;
        let region = pair.b.pd.register(REGION, bed::ALL)?;
        beds.push((region, pair, process));
    }
    let mut random = Random(88_172_645_463_325_252);
    let places: Vec<u64> = (0..1 << 16)
        .map(|_| 8 * random.below(REGION as u64 / 8))
        .collect();
    let mut runs = [const { Vec::new() }; 2];
    for _ in 0..settings.repetitions() {
        let both = cache::steady(settings.cores, || {
            let both = beds.iter().map(|(region, pair, _)| {
                let targets: Vec<_> = places
                    .iter()
                    .map(|place| (region.rkey, region.iova + place))
                    .collect();
                lookup::cost(pair, &targets, settings.time())
            });
            both.collect::<Result<Vec<_>>>()
        })?;
        for (cost, runs) in both.into_iter().zip(&mut runs) {
            runs.push(cost);
        }
    }
    let name = "WRITE 8 B anywhere in 1 GiB, in huge pages of the host";
    let own = figure(SECTION, name, "ns/WRITE", Better::Lower, &runs[1]);
    Ok(vec![own.beside("pages of 4 KiB", &runs[0])])
}
