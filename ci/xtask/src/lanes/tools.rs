// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Running the stock tools between VMs, and reading what they say.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::Fixture;
use crate::vm::{mac, wait_for, Bed, Job, Output, NO_END, SHORT};

/// A server in one VM and a client in another, or in the same.
#[derive(Clone, Copy)]
pub struct Pair {
    /// The VM of the server.
    pub server: u8,
    /// The VM of the client.
    pub client: u8,
    /// The TCP port on which they meet.
    pub port: u16,
}

/// How a client learns that its server waits for it.
#[derive(Clone, Copy, Debug)]
pub enum Ready {
    /// It listens on a port of TCP.
    Tcp(u16),
    /// It listens on a port of rdma_cm.
    Cm(u16),
    /// It has written this.
    Says(&'static str),
}

impl Fixture<'_> {
    /// A pair on a port of its own.
    pub fn pair(&mut self, server: u8, client: u8) -> Pair {
        Pair {
            server,
            client,
            port: self.port(),
        }
    }

    /// A tool of perftest at both ends, whose connections are made by rdma_cm (`-R` is one of the
    /// arguments); what the client wrote.
    ///
    /// When both are through with telling each other what they want, the server begins to listen for
    /// connections, and the client to connect: if that is sooner, the client is refused. It is meant
    /// to try again then, but that of Debian 13 was seen to crash. And where packets are lost, both may
    /// wait for ever at their ends ([`Self::waits_to_disconnect`]). So it is run again, twice at most.
    pub fn perftest_by_cm(
        &mut self,
        ends: (u8, u8),
        tool: &str,
        arguments: &str,
        timeout: Duration,
    ) -> Result<String> {
        let host = self.pair(ends.0, ends.1).host();
        self.perftest_by_cm_at(ends, &host, tool, arguments, timeout)
    }

    /// The same with another address of the server.
    pub fn perftest_by_cm_at(
        &mut self,
        (server, client): (u8, u8),
        host: &str,
        tool: &str,
        arguments: &str,
        timeout: Duration,
    ) -> Result<String> {
        let run = |fixture: &mut Self| {
            let pair = fixture.pair(server, client);
            let start = |host: &str| format!("{tool} -F -p {} {arguments} {host}", pair.port);
            let (server, client) = (start(""), start(host));
            let ready = Ready::Cm(pair.port);
            pair.run_when(ready, &fixture.bed, &server, &client, timeout)
        };
        let mut result = run(self);
        for _ in 0..2 {
            let why = match &result {
                Err(error) if connected_too_early(error) => "the client was sooner than the server",
                Err(error) if self.waits_to_disconnect(arguments, error)? => {
                    "both wait to be disconnected"
                }
                _ => break,
            };
            println!("         {tool}: once more, {why}");
            result = run(self);
        }
        result.map(|(text, _)| text)
    }

    /// Whether packets between the VMs are lost now.
    pub fn loses_packets(&self) -> Result<bool> {
        if let Some(switch) = &self.bed.switch {
            return Ok(switch.loses());
        }
        let device = self.bed.device.as_ref().context("no device")?;
        let status = device.status()?;
        let faults = status["workers"][0]["wire"]["faults"].as_array();
        let loses = |one: &Value| {
            let settings = one["settings"].as_str();
            settings.is_some_and(|settings| settings.contains("loss"))
        };
        Ok(faults.is_some_and(|faults| faults.iter().any(loses)))
    }

    /// Whether a server waits because what was to end its connection was lost. The kernel's connection
    /// management asks its peer to disconnect again and again until that answers, but no longer than
    /// the connection's identifier lives, and `rping` destroys it at once (docs/interop.md).
    pub fn lost_its_end(&self, error: &anyhow::Error) -> Result<bool> {
        Ok(format!("{error:#}").contains(NOT_ENDED) && self.loses_packets()?)
    }

    /// Whether perftest has its result, and waits to be disconnected, where packets are lost. Its server
    /// disconnects whether its connection is established or not. If the client's RTU was lost it is
    /// not: then the kernel sends no DREQ, now or later, and both wait (docs/interop.md). Not so with
    /// all sizes of messages, which take longer than the kernel to send its REP again.
    fn waits_to_disconnect(&self, arguments: &str, error: &anyhow::Error) -> Result<bool> {
        let text = format!("{error:#}");
        let all_sizes = arguments.split(' ').any(|word| word == "-a");
        let has_result = !all_sizes && Table::parse(&text).is_ok();
        Ok(has_result && text.contains(NO_END) && self.loses_packets()?)
    }
}

/// Of two that were to end, one has.
const NOT_ENDED: &str = "the client has ended, and the server has not";

/// Whether a client of perftest was refused because nobody listened, and crashed.
fn connected_too_early(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    // IB_CM_REJ_INVALID_SERVICE_ID, IB_SIDR_UNSUPPORTED.
    let refusals = [
        "RDMA_CM_EVENT_REJECTED; error: 8.",
        "RDMA_CM_EVENT_UNREACHABLE; error: 1.",
    ];
    text.contains("ended with -11:") && refusals.iter().any(|refusal| text.contains(refusal))
}

impl Pair {
    /// The server's address.
    pub fn host(self) -> String {
        format!("10.10.0.{}", self.server)
    }

    /// Starts the server and waits until it listens on the port.
    pub fn serve(self, bed: &Bed, command: &str) -> Result<Job> {
        self.serve_when(Ready::Tcp(self.port), bed, command)
    }

    /// Starts the server and waits until it is ready.
    pub fn serve_when(self, ready: Ready, bed: &Bed, command: &str) -> Result<Job> {
        let vm = bed.vm(self.server)?;
        let job = vm.spawn(command)?;
        let there = match ready {
            Ready::Tcp(port) => vm.sh(&format!("/payload/listening {port}")).map(drop),
            Ready::Cm(port) => vm.sh(&format!("/payload/cm-listening {port}")).map(drop),
            Ready::Says(text) => job.wait_text(SHORT, |said| said.contains(text)),
        };
        if let Err(error) = there {
            bail!(
                "`{command}` in vm{} is not ready ({error:#}); it wrote:\n{}",
                self.server,
                job.text()
            );
        }
        Ok(job)
    }

    /// Runs both to their good ends; returns what the client and the server wrote.
    pub fn run(
        self,
        bed: &Bed,
        server: &str,
        client: &str,
        timeout: Duration,
    ) -> Result<(String, String)> {
        self.run_when(Ready::Tcp(self.port), bed, server, client, timeout)
    }

    /// As [`Self::run`], with a server that is ready in another way.
    pub fn run_when(
        self,
        ready: Ready,
        bed: &Bed,
        server: &str,
        client: &str,
        timeout: Duration,
    ) -> Result<(String, String)> {
        let serving = self.serve_when(ready, bed, server)?;
        let output = bed.vm(self.client)?.run(client, timeout);
        let output = match output {
            Ok(output) if output.status == 0 => output,
            Ok(Output { status, text }) => {
                bail!(
                    "client `{client}` ended with {status}:\n{text}\nthe server wrote:\n{}",
                    serving.text()
                )
            }
            Err(error) => bail!("{error:#}\nthe server wrote:\n{}", serving.text()),
        };
        // When what ends a connection is lost, the server learns of it after a minute, or never.
        let served = serving.wait(Duration::from_secs(120)).context(NOT_ENDED)?;
        ensure!(
            served.status == 0,
            "server `{server}` ended with {}:\n{}",
            served.status,
            served.text
        );
        Ok((output.text, served.text))
    }

    /// The command line of `ibv_rc_pingpong` for the server or the client.
    pub fn pingpong_command(self, arguments: &str, host: &str) -> String {
        format!(
            "ibv_rc_pingpong -g $(/payload/gid) -p {} -c {arguments} {host}",
            self.port
        )
    }

    /// `ibv_rc_pingpong` with the data checked on arrival.
    pub fn pingpong(self, bed: &Bed, arguments: &str, timeout: Duration) -> Result<String> {
        let (server, client) = (
            self.pingpong_command(arguments, ""),
            self.pingpong_command(arguments, &self.host()),
        );
        let (text, _) = self.run(bed, &server, &client, timeout)?;
        ensure!(
            text.contains("iters in"),
            "no result from ibv_rc_pingpong:\n{text}"
        );
        Ok(text)
    }

    /// A tool of perftest: what the client wrote, and the table in it, with a row for each message
    /// size.
    pub fn perftest(
        self,
        bed: &Bed,
        tool: &str,
        arguments: &str,
        timeout: Duration,
    ) -> Result<(String, Table)> {
        let (server, client) = (
            self.perftest_command(tool, arguments, false),
            self.perftest_command(tool, arguments, true),
        );
        let (text, _) = self.run(bed, &server, &client, timeout)?;
        let table =
            Table::parse(&text).with_context(|| format!("no table from `{client}`:\n{text}"))?;
        Ok((text, table))
    }

    /// The command line of a tool of perftest for the server or the client.
    pub fn perftest_command(self, tool: &str, arguments: &str, client: bool) -> String {
        let host = if client { self.host() } else { String::new() };
        format!(
            "{tool} -F -x $(/payload/gid) -p {} {arguments} {host}",
            self.port
        )
    }

    /// A command of `rdma.py` against a target; returns what it wrote at last.
    pub fn verified(
        self,
        bed: &Bed,
        command: &str,
        arguments: &str,
        timeout: Duration,
    ) -> Result<String> {
        let (text, _) = self.run(bed, &self.target(), &self.rdma(command, arguments), timeout)?;
        let last = text.lines().last().unwrap_or_default();
        ensure!(
            last.starts_with("verified"),
            "rdma.py {command} did not verify:\n{text}"
        );
        Ok(last.to_owned())
    }

    /// The command line of `rdma.py target`.
    pub fn target(self) -> String {
        format!("/payload/rdma.py target {}", self.port)
    }

    /// The command line of another command of `rdma.py`.
    pub fn rdma(self, command: &str, arguments: &str) -> String {
        format!(
            "/payload/rdma.py {command} {} {} {arguments}",
            self.host(),
            self.port
        )
    }
}

/// What the device says of a VM.
pub fn device_of(bed: &Bed, number: u8) -> Result<Value> {
    let of_vm = |device: &&Value| device["mac"] == mac(number).as_str();
    for device in bed.device.iter().chain(&bed.others) {
        let status = device.status()?;
        let devices = status["devices"].as_array();
        if let Some(found) = devices.and_then(|devices| devices.iter().find(of_vm)) {
            return Ok(found.clone());
        }
    }
    bail!("no device's status knows vm{number}")
}

/// Numbers of objects by their kinds.
pub type Counts = BTreeMap<String, u64>;

/// How many objects the device holds for each VM.
pub fn counts(bed: &Bed) -> Result<Vec<Counts>> {
    bed.vms
        .iter()
        .map(|vm| {
            let counts = device_of(bed, vm.number)?["counts"].take();
            serde_json::from_value(counts).context("no counts in the device's status")
        })
        .collect()
}

/// Waits until the device holds what it held before, and nothing else.
pub fn settled(bed: &Bed, before: &[Counts]) -> Result<()> {
    let same = wait_for(Duration::from_secs(20), || {
        Ok((counts(bed)? == before).then_some(()))
    })?;
    let now = counts(bed)?;
    same.with_context(|| format!("objects are left over: there were {before:?}, there are {now:?}"))
}

/// Memory that the device process has for itself, bytes: without its program, and without the
/// guests' memory, which it shares.
pub fn device_memory(bed: &Bed) -> Result<u64> {
    resident(bed, &["RssAnon:"])
}

/// Resident memory of the device process, bytes, without the guests' memory, which it shares.
pub fn resident_memory(bed: &Bed) -> Result<u64> {
    resident(bed, &["RssAnon:", "RssFile:"])
}

fn resident(bed: &Bed, kinds: &[&str]) -> Result<u64> {
    let device = bed.device.as_ref().context("no device")?;
    let path = format!("/proc/{}/status", device.pid());
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let mut sum = 0;
    for kind in kinds {
        let line = text.lines().find_map(|line| line.strip_prefix(kind));
        let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
        sum += kib.with_context(|| format!("no {kind}"))? * 1024;
    }
    Ok(sum)
}

/// A table of perftest.
#[derive(Debug)]
pub struct Table {
    /// The row for each message size, without the columns `#bytes` and `#iterations`.
    rows: BTreeMap<u64, Vec<f64>>,
}

impl Table {
    /// Reads what a tool wrote.
    pub fn parse(text: &str) -> Result<Self> {
        let rows = text.lines().filter_map(|line| {
            // What perftest thinks of the machine's clock comes behind a row, on the same line.
            let row = line.split("Correlation coefficient").next()?;
            let numbers = row
                .split_ascii_whitespace()
                .map(|word| word.parse().ok())
                .collect::<Option<Vec<f64>>>()?;
            let (size, rest) = numbers.split_first()?;
            // The first columns are whole numbers.
            let size = format!("{size:.0}").parse().ok()?;
            Some((size, rest.get(1..)?.to_vec()))
        });
        let rows: BTreeMap<_, _> = rows.collect();
        ensure!(!rows.is_empty(), "no rows");
        Ok(Table { rows })
    }

    /// The message sizes.
    pub fn sizes(&self) -> Vec<u64> {
        self.rows.keys().copied().collect()
    }

    /// Millions of messages per second at a size (of a `_bw` tool).
    pub fn message_rate(&self, size: u64) -> Result<f64> {
        self.column(size, 2)
    }

    /// Average bandwidth in MiB/s at a size (of a `_bw` tool).
    pub fn bandwidth(&self, size: u64) -> Result<f64> {
        let bandwidth = self.column(size, 1)?;
        if bandwidth < 1.0 {
            // It has two decimals, the rate has six.
            let size_mib = f64::from(u32::try_from(size)?) / f64::from(1 << 20);
            return Ok(self.rate(size)? * 1e6 * size_mib);
        }
        Ok(bandwidth)
    }

    /// Typical latency in µs at a size (of a `_lat` tool).
    pub fn latency(&self, size: u64) -> Result<f64> {
        self.column(size, 2)
    }

    /// Average latency in µs at a size (of a `_lat` tool).
    pub fn average(&self, size: u64) -> Result<f64> {
        self.column(size, 3)
    }

    /// Messages per µs at a size (of a `_bw` tool).
    pub fn rate(&self, size: u64) -> Result<f64> {
        self.column(size, 2)
    }

    fn column(&self, size: u64, column: usize) -> Result<f64> {
        let row = self
            .rows
            .get(&size)
            .with_context(|| format!("no row for {size} bytes"))?;
        row.get(column)
            .copied()
            .with_context(|| format!("no column {column}"))
    }
}

/// The last progress that a command of `rdma.py` wrote.
pub fn progress(job: &Job) -> u64 {
    let text = job.text();
    let last = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("done "));
    last.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Waits until a command of `rdma.py` has come so far.
pub fn wait_progress(job: &Job, wanted: u64, timeout: Duration) -> Result<()> {
    job.wait_text(timeout, |text| {
        let last = text
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix("done "));
        last.and_then(|number| number.parse::<u64>().ok())
            .is_some_and(|number| number >= wanted)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_was_too_early_is_told_from_others() {
        let too_early = |end: &str, event: &str| {
            let text =
                format!("RDMA CM event error:\nEvent: {event}\n\nERRNO: Operation not supported.");
            connected_too_early(&anyhow::anyhow!(
                "client `ib_send_lat -R` ended with {end}:\n{text}"
            ))
        };
        assert!(too_early("-11", "RDMA_CM_EVENT_REJECTED; error: 8."));
        assert!(too_early("-11", "RDMA_CM_EVENT_UNREACHABLE; error: 1."));
        // Rejected by a listener, no answer, or what is no crash.
        assert!(!too_early("-11", "RDMA_CM_EVENT_REJECTED; error: 28."));
        assert!(!too_early("-11", "RDMA_CM_EVENT_UNREACHABLE; error: -110."));
        assert!(!too_early("1", "RDMA_CM_EVENT_REJECTED; error: 8."));
    }

    #[test]
    fn tables_of_perftest_are_read() {
        let bandwidth = " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n \
                         65536      200              0.00               1234.50              0.019\n---\n";
        let table = Table::parse(bandwidth).expect("a table");
        assert_eq!(table.sizes(), [65536]);
        assert_eq!(table.bandwidth(65536).expect("a row"), 1234.5);
        assert_eq!(table.rate(65536).expect("a row"), 0.019);
        let slow = " 2      100              0.01               0.01              0.004194\n";
        assert_eq!(
            Table::parse(slow)
                .expect("a table")
                .bandwidth(2)
                .expect("a row"),
            4194.0 / 524_288.0
        );
        let latency = " 2       100          8.07           25.82        8.47     \t       9.02        \t2.01   \t\t25.82\n";
        assert_eq!(
            Table::parse(latency)
                .expect("a table")
                .latency(2)
                .expect("a row"),
            8.47
        );
        assert_eq!(
            Table::parse(latency)
                .expect("a table")
                .average(2)
                .expect("a row"),
            9.02
        );
        let complaint =
            "8192 100 13394.05 5892.54 0.754245Correlation coefficient r^2: 0.874897 < 0.9\n";
        assert_eq!(
            Table::parse(complaint)
                .expect("a table")
                .bandwidth(8192)
                .expect("a row"),
            5892.54
        );
        assert!(Table::parse("nothing\n").is_err());
    }
}
