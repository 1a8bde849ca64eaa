// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What others do between two processes on the same two cores: UCX's and libfabric's own benchmarks
//! over shared memory, as Debian packages them (`ucx-utils`, `libfabric-bin`).
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context as _, Result};

use super::{settle, Cores};

/// How long one run may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A program on one core. It is killed when dropped.
struct Program(Child);

impl Program {
    fn start(cpu: usize, words: &[&str]) -> Result<Self> {
        let child = Command::new("taskset")
            .args(["-c", &cpu.to_string()])
            .args(words)
            .env("UCX_TLS", "posix,self")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run taskset")?;
        Ok(Self(child))
    }

    /// What it prints until it ends.
    fn output(&mut self) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            match self.0.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > deadline => bail!("it does not end"),
                None => sleep(Duration::from_millis(5)),
            }
        };
        let (mut text, mut errors) = (String::new(), String::new());
        if let Some(mut output) = self.0.stdout.take() {
            output.read_to_string(&mut text)?;
        }
        if let Some(mut output) = self.0.stderr.take() {
            output.read_to_string(&mut errors)?;
        }
        ensure!(status.success(), "{status}: {text}{errors}");
        Ok(text)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to kill.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program as server and then as client; returns what the client prints.
fn both(cores: Cores, program: &[&str], server: &[&str], client: &[&str]) -> Result<String> {
    settle();
    let run = || -> Result<String> {
        let mut listening = Program::start(cores.worker, &[program, server].concat())?;
        // The client does not wait for the server; nothing tells that it listens.
        let mut tries = 0;
        loop {
            sleep(Duration::from_millis(150));
            if let Some(status) = listening.0.try_wait()? {
                bail!("the server ended: {status}");
            }
            let mut connected = Program::start(cores.driver, &[program, client].concat())?;
            match connected.output() {
                Ok(text) => {
                    listening.output()?;
                    return Ok(text);
                }
                Err(_) if tries < 10 => tries += 1,
                Err(error) => return Err(error),
            }
        }
    };
    run().with_context(|| format!("{} failed (cargo xtask setup installs it)", program[0]))
}

/// The fields of the one line of results of ucx_perftest.
fn ucx(cores: Cores, test: &[&str]) -> Result<Vec<f64>> {
    // Builds with MPI want to be told not to use it.
    let help = Command::new("ucx_perftest").arg("-h").output();
    let help = help.context("there is no ucx_perftest (cargo xtask setup installs it)")?;
    let mpi: &[&str] = if String::from_utf8_lossy(&help.stdout).contains("\n     -P ") {
        &["-P", "0"]
    } else {
        &[]
    };
    let client = [&["127.0.0.1"], test, &["-f", "-v"], mpi].concat();
    let text = both(cores, &["ucx_perftest"], mpi, &client)?;
    let fields = text
        .lines()
        .filter_map(|line| {
            line.split(',')
                .map(|field| field.trim().parse::<f64>().ok())
                .collect::<Option<Vec<f64>>>()
        })
        .next_back();
    // Iterations, percentile, average and overall latency, average and overall bandwidth, average
    // and overall rate.
    fields
        .filter(|fields| fields.len() == 8)
        .with_context(|| format!("ucx_perftest printed\n{text}"))
}

/// Latency of a put, one way, µs.
pub fn ucx_put_latency(cores: Cores, size: u32, rounds: usize) -> Result<f64> {
    let (size, rounds) = (size.to_string(), rounds.to_string());
    Ok(ucx(cores, &["-t", "ucp_put_lat", "-s", &size, "-n", &rounds])?[1])
}

/// Puts, millions per second.
pub fn ucx_put_rate(cores: Cores, size: u32, quick: bool) -> Result<f64> {
    let rounds = if quick { "1000000" } else { "5000000" };
    let size = size.to_string();
    Ok(ucx(cores, &["-t", "ucp_put_bw", "-s", &size, "-n", rounds])?[7] / 1e6)
}

/// Puts, GB/s.
pub fn ucx_put_bandwidth(cores: Cores, size: u32, quick: bool) -> Result<f64> {
    let rounds = if quick { "1000" } else { "4000" };
    let text = size.to_string();
    let fields = ucx(cores, &["-t", "ucp_put_bw", "-s", &text, "-n", rounds])?;
    Ok(fields[7] * f64::from(size) / 1e9)
}

/// Latency of a message of libfabric's shared-memory provider, one way, µs.
pub fn libfabric_latency(cores: Cores, size: u32, rounds: usize) -> Result<f64> {
    let (size, rounds) = (size.to_string(), rounds.to_string());
    let common = ["-p", "shm", "-e", "rdm", "-I", &rounds, "-S", &size];
    let client = [&common[..], &["127.0.0.1"]].concat();
    let text = both(cores, &["fi_pingpong"], &common, &client)?;
    // bytes, sent, acknowledged, total, time, MB/sec, usec/xfer, Mxfers/sec
    let value = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(6)?.parse().ok())
        .next_back();
    value.with_context(|| format!("fi_pingpong printed\n{text}"))
}
