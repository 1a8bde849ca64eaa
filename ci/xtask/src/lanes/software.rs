// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `software`: stock software of Debian between two VMs: UCX, libfabric, Open MPI, qperf, and
//! the programs of rdma-core that no other lane runs. Each program runs over our device, and has to
//! work there; where it is worth a comparison it runs over Soft-RoCE (rxe), too, in the same two
//! guests, and what comes of that is a column of the report's table.
//!
//! vm2 serves, vm1 uses.

use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use super::tools::{counts, device_of, settled, Ready};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::shell;
use crate::vm::{FrontEnd, Hosts, SHORT};

const CLIENT: u8 = 1;
const SERVER: u8 = 2;

/// How long one run of a program may take on a busy machine without KVM.
const LONG: Duration = Duration::from_secs(240);

/// The lane.
pub fn lane() -> Lane {
    let runs = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, CASES.to_vec()))
            .collect()
    };
    Lane {
        name: "software",
        about:
            "UCX, libfabric, Open MPI, qperf and programs of rdma-core between two VMs, beside rxe",
        with_device: true,
        vms: 2,
        memory: 1536,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Software,
        runs,
    }
}

/// A case on our device.
macro_rules! ours {
    ($name:literal, $test:expr) => {
        Case {
            name: $name,
            run: |fixture| on_ours(fixture, $test),
        }
    };
}

/// The same on rxe, for comparison.
macro_rules! rxe {
    ($name:literal, $test:expr) => {
        Case {
            name: concat!("beside, rxe: ", $name),
            run: |fixture| on_rxe(fixture, $name, $test),
        }
    };
}

const CASES: &[Case] = &[
    ours!("UCX as it comes", ucx_as_it_comes),
    ours!("UCX, rc", |fixture, card| ucx(fixture, card, "rc")),
    ours!("UCX, ud", |fixture, card| ucx(fixture, card, "ud")),
    ours!("UCT, rc_verbs", |fixture, card| uct(fixture, card, &UCT_RC)),
    ours!("UCT, ud_verbs", |fixture, card| uct(fixture, card, &UCT_UD)),
    ours!("libfabric, msg", |fixture, card| fabric(
        fixture, card, "msg"
    )),
    ours!("libfabric, dgram", |fixture, card| fabric(
        fixture, card, "dgram"
    )),
    ours!("libfabric, rdm", |fixture, card| fabric(
        fixture, card, "rdm"
    )),
    ours!("Open MPI, rc: data", |fixture, card| mpi_data(
        fixture, card, "rc"
    )),
    ours!("Open MPI, ud: data", |fixture, card| mpi_data(
        fixture, card, "ud"
    )),
    ours!("Open MPI, rc: speed", |fixture, card| mpi_speed(
        fixture, card, "rc"
    )),
    ours!("Open MPI, ud: speed", |fixture, card| mpi_speed(
        fixture, card, "ud"
    )),
    ours!("Open MPI, rc: latency beside ucx_perftest", mpi_beside_ucx),
    ours!("qperf", qperf),
    ours!("rdma_client", rdma_client),
    ours!("rdma_xclient, RC", |fixture, card| rdma_xclient(
        fixture, card, "r"
    )),
    ours!("rdma_xclient, XRC", |fixture, card| rdma_xclient(
        fixture, card, "x"
    )),
    ours!("rcopy", rcopy),
    ours!("riostream", riostream),
    ours!("podman, RC", in_containers),
    ours!("podman, rdma_cm", in_containers_by_cm),
    Case {
        name: "ibv_asyncwatch",
        run: asyncwatch,
    },
    Case {
        name: "ibstat and ibstatus",
        run: ibstat,
    },
    rxe!("UCX, rc", |fixture, card| ucx(fixture, card, "rc")),
    rxe!("UCX, ud", |fixture, card| ucx(fixture, card, "ud")),
    rxe!("UCT, rc_verbs", |fixture, card| uct(fixture, card, &UCT_RC)),
    rxe!("libfabric, msg", |fixture, card| fabric(
        fixture, card, "msg"
    )),
    rxe!("libfabric, dgram", |fixture, card| fabric(
        fixture, card, "dgram"
    )),
    rxe!("libfabric, rdm", |fixture, card| fabric(
        fixture, card, "rdm"
    )),
    rxe!("Open MPI, rc: data", |fixture, card| mpi_data(
        fixture, card, "rc"
    )),
    rxe!("Open MPI, rc: speed", |fixture, card| mpi_speed(
        fixture, card, "rc"
    )),
    rxe!("qperf", qperf),
    rxe!("rdma_xclient, XRC", |fixture, card| rdma_xclient(
        fixture, card, "x"
    )),
    rxe!("riostream", riostream),
];

/// The RDMA device that both guests have meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Card {
    Ours,
    Rxe,
}

impl Card {
    /// Its name in the guests.
    fn name(self) -> &'static str {
        match self {
            Card::Ours => "vrdma0",
            Card::Rxe => "rxe0",
        }
    }

    /// Its column in the report.
    fn title(self) -> &'static str {
        match self {
            Card::Ours => "this device",
            Card::Rxe => "rxe",
        }
    }

    /// Its part of the names of figures.
    fn word(self) -> &'static str {
        match self {
            Card::Ours => "ours",
            Card::Rxe => "rxe",
        }
    }

    /// Makes it the guests' only one: rdma_cm takes the first that has the address.
    fn set_up(self, fixture: &Fixture) -> Result<()> {
        for number in [SERVER, CLIENT] {
            let command = format!("/payload/rdma-device {}", self.name());
            fixture.vm(number)?.sh(&command)?;
        }
        Ok(())
    }

    /// How often it does what our device does so many times: in about the same time.
    fn times(self, ours: u32) -> u32 {
        match self {
            Card::Ours => ours,
            Card::Rxe => (ours / 20).max(10),
        }
    }
}

/// What a case does on a device.
type Test = fn(&mut Fixture, Card) -> Result<()>;

/// Runs a test on our device, which has to carry it, and to have nothing left of it.
fn on_ours(fixture: &mut Fixture, test: Test) -> Result<()> {
    Card::Ours.set_up(fixture)?;
    let before = counts(&fixture.bed)?;
    let messages = messages(fixture)?;
    test(fixture, Card::Ours)?;
    settled(&fixture.bed, &before)?;
    ensure!(
        self::messages(fixture)? > messages,
        "not a message went over the device"
    );
    Ok(())
}

/// How many messages vm1 has sent and received over our device.
fn messages(fixture: &Fixture) -> Result<u64> {
    let counters = device_of(&fixture.bed, CLIENT)?["counters"].take();
    ["tx_messages", "rx_messages"]
        .iter()
        .map(|name| {
            counters[name]
                .as_u64()
                .with_context(|| format!("no {name}"))
        })
        .sum()
}

/// Runs a test on rxe. What fails there is told in the table, and is no failure of ours.
fn on_rxe(fixture: &mut Fixture, name: &str, test: Test) -> Result<()> {
    let result = Card::Rxe
        .set_up(fixture)
        .and_then(|()| test(fixture, Card::Rxe));
    if let Err(error) = result {
        let text = format!("{error:#}");
        let row = format!("{}, {name}", fixture.kernel);
        fixture.cell(&row, Card::Rxe.title(), "failed");
        println!(
            "          rxe failed: {}",
            text.chars().take(400).collect::<String>()
        );
    }
    // Whatever it leaves behind, and the kernel says of it, is not the next case's.
    fixture.restart()
}

impl Fixture<'_> {
    /// Writes what a test measured into the table and the figures.
    fn result(&mut self, card: Card, what: &str, value: f64, unit: &str, more: &str) {
        let row = format!("{}, {what}, {unit}", self.kernel);
        self.cell(&row, card.title(), &format!("{}{more}", rounded(value)));
        let name: String = format!("{}_{what}_{unit}", card.word())
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        self.figure(&name, rounded(value));
    }
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A run of `ucx_perftest`: its tests are those in a file, so that its start, which takes longer
/// than they do, is paid once.
struct Perftest<'a> {
    /// What goes before `ucx_perftest` on its command line.
    environment: &'a str,
    /// Options for all tests.
    options: String,
    tests: &'a [UcxTest],
}

/// A test of `ucx_perftest`.
struct UcxTest {
    /// With options of its own.
    name: &'static str,
    size: u32,
    times: u32,
}

const fn test(name: &'static str, size: u32, times: u32) -> UcxTest {
    UcxTest { name, size, times }
}

impl UcxTest {
    /// True if the rate is what matters, and not the time of one.
    fn is_bandwidth(&self) -> bool {
        self.size > 4096 || self.name.contains("_bw")
    }
}

/// What `ucx_perftest` says of a test.
#[derive(Debug, PartialEq)]
struct UcxResult {
    median: f64,
    average: f64,
    /// MB/s.
    bandwidth: f64,
}

impl Perftest<'_> {
    /// Runs it; the results are in the order of the tests.
    fn run(&self, fixture: &mut Fixture, card: Card) -> Result<Vec<UcxResult>> {
        let pair = fixture.pair(SERVER, CLIENT);
        let lines = self.tests.iter().enumerate().map(|(n, test)| {
            let (times, warm_up) = (card.times(test.times), card.times(test.times) / 20);
            format!(
                "{n} -t {} -s {} -n {times} -w {warm_up}\n",
                test.name, test.size
            )
        });
        // Both sides read it.
        let (file, lines) = ("/tmp/ucx-tests", lines.collect::<String>());
        for number in [SERVER, CLIENT] {
            let command = format!("cat >{file} <<'END'\n{lines}END\n");
            fixture.vm(number)?.sh(&command)?;
        }
        let start = |host: &str| {
            format!(
                "{} ucx_perftest -P 0 -p {} {} -b {file} -f -v {host}",
                self.environment, pair.port, self.options
            )
        };
        let (text, _) = pair.run(&fixture.bed, &start(""), &start(&pair.host()), LONG)?;
        let results = (0..self.tests.len()).map(|n| ucx_result(&text, n));
        results.collect()
    }

    /// Runs it and writes the results into the report.
    fn report(&self, fixture: &mut Fixture, card: Card, title: &str) -> Result<()> {
        let results = self.run(fixture, card)?;
        for (test, result) in self.tests.iter().zip(results) {
            let name = test.name.split(' ').next().unwrap_or_default();
            let what = format!("{title}, {name} {} B", test.size);
            if test.is_bandwidth() {
                fixture.result(card, &what, result.bandwidth, "MB/s", "");
            } else {
                let more = format!(" (average {})", rounded(result.average));
                fixture.result(card, &what, result.median, "µs", &more);
            }
        }
        Ok(())
    }
}

/// The result of a test by its number.
fn ucx_result(text: &str, number: usize) -> Result<UcxResult> {
    let start = format!("{number},");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    let fields: Option<Vec<f64>> = line.and_then(|line| {
        line.split(',')
            .map(|word| word.trim().parse().ok())
            .collect()
    });
    // Iterations; median, average and overall average of the time; bandwidth of the last while and
    // overall.
    match fields.as_deref() {
        Some([_, median, _, average, _, bandwidth, ..]) => Ok(UcxResult {
            median: *median,
            average: *average,
            bandwidth: *bandwidth,
        }),
        _ => bail!("no result of test {number} from ucx_perftest:\n{text}"),
    }
}

const UCP: &[UcxTest] = &[
    test("tag_lat", 8, 4000),
    test("tag_bw", 65536, 400),
    test("tag_bw", 1 << 20, 100),
    test("tag_sync_lat", 8, 2000),
    test("stream_lat", 8, 2000),
    test("stream_bw", 65536, 400),
    test("ucp_put_lat", 8, 4000),
    test("ucp_put_bw", 1 << 20, 100),
    test("ucp_get", 8, 1000),
    test("ucp_get", 1 << 20, 100),
    test("ucp_fadd", 8, 1000),
    test("ucp_cswap", 8, 1000),
    test("ucp_am_lat", 8, 4000),
    test("ucp_am_bw", 65536, 400),
];

/// UCX with transports of its choice.
fn ucx_as_it_comes(fixture: &mut Fixture, card: Card) -> Result<()> {
    let tests = &[test("tag_lat", 8, 4000), test("tag_bw", 1 << 20, 100)];
    Perftest {
        environment: "",
        options: String::new(),
        tests,
    }
    .report(fixture, card, "UCX as it comes")
}

/// UCX with the transports of a name.
fn ucx(fixture: &mut Fixture, card: Card, transports: &str) -> Result<()> {
    Perftest {
        environment: &format!("UCX_TLS={transports}"),
        options: String::new(),
        tests: UCP,
    }
    .report(fixture, card, &format!("UCX {transports}"))
}

/// The tests of UCX's lower layer on a transport.
struct Uct {
    transport: &'static str,
    tests: &'static [UcxTest],
}

const UCT_RC: Uct = Uct {
    transport: "rc_verbs",
    tests: &[
        test("am_lat", 8, 2000),
        test("am_bw -D bcopy", 8192, 2000),
        test("put_lat", 8, 2000),
        test("put_bw -D zcopy", 1 << 20, 100),
        test("get -D bcopy", 8, 2000),
        test("get_bw -D zcopy", 1 << 20, 100),
        test("fadd", 8, 2000),
        test("cswap", 8, 2000),
    ],
};

const UCT_UD: Uct = Uct {
    transport: "ud_verbs",
    tests: &[
        test("am_lat", 8, 2000),
        test("am_bw -D bcopy", 1024, 2000),
        test("am_bw -D zcopy", 1024, 2000),
    ],
};

fn uct(fixture: &mut Fixture, card: Card, tests: &Uct) -> Result<()> {
    let Uct { transport, tests } = tests;
    Perftest {
        environment: "",
        options: format!("-d {}:1 -x {transport}", card.name()),
        tests,
    }
    .report(fixture, card, &format!("UCT {transport}"))
}

/// `fi_pingpong` with a kind of endpoint, which verifies the data.
fn fabric(fixture: &mut Fixture, card: Card, endpoint: &str) -> Result<()> {
    let provider = match endpoint {
        "rdm" => "verbs;ofi_rxm",
        _ => "verbs",
    };
    let pair = fixture.pair(SERVER, CLIENT);
    let times = card.times(200);
    let start = |port: &str, host: &str| {
        format!(
            "fi_pingpong -p '{provider}' -e {endpoint} -c -I {times} {port} {} {host}",
            pair.port
        )
    };
    let (server, client) = (start("-B", ""), start("-P", &pair.host()));
    let (text, _) = pair.run(&fixture.bed, &server, &client, LONG)?;
    for (size, column, unit) in [("64", 6, "µs"), ("1m", 5, "MB/s")] {
        // Datagrams end at 4 KiB.
        if endpoint == "dgram" && size == "1m" {
            continue;
        }
        let value = fabric_cell(&text, size, column)?;
        let what = format!("libfabric {endpoint}, {size} verified");
        fixture.result(card, &what, value, unit, "");
    }
    Ok(())
}

/// A number of the table of `fi_pingpong`: bytes, sent, acknowledged, total, seconds, MB/s, µs and
/// M/s.
fn fabric_cell(text: &str, size: &str, column: usize) -> Result<f64> {
    let words = text
        .lines()
        .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let row = words
        .into_iter()
        .find(|words| words.first() == Some(&size))
        .with_context(|| format!("no row of {size} from fi_pingpong:\n{text}"))?;
    let word = row.get(column).context("a row of fi_pingpong is short")?;
    Ok(word.parse()?)
}

/// Makes the guests hosts of Open MPI.
pub fn mpi_hosts(fixture: &Fixture) -> Result<()> {
    let said = fixture.vm(CLIENT)?.sh("/payload/mpi-hosts first")?;
    let key = said.lines().last().context("no key")?;
    let command = format!("/payload/mpi-hosts second '{key}'");
    fixture.vm(SERVER)?.sh(&command).map(drop)
}

/// Runs tests of `mpi-check` with so many processes in each guest.
fn mpi(fixture: &Fixture, transports: &str, each: u8, tests: &[String]) -> Result<String> {
    // It does not bind processes: guests with one CPU have nothing to bind several to.
    let command = format!(
        "cd /tmp && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && \
         mpirun --host vm1:{each},vm2:{each} -np {} --bind-to none --mca pml ucx --mca osc ucx \
         -x UCX_TLS={transports},self,sm /tmp/mpi-check {}",
        2 * each,
        tests.join(" ")
    );
    let output = fixture.vm(CLIENT)?.run(&command, LONG)?;
    let verified = output
        .text
        .lines()
        .filter(|line| line.starts_with("verified "));
    ensure!(
        output.status == 0 && verified.count() == tests.len(),
        "`{command}` ended with {}:\n{}",
        output.status,
        output.text
    );
    Ok(output.text)
}

/// A value that a test of `mpi-check` printed.
fn mpi_value(text: &str, test: &str, name: &str) -> Result<f64> {
    let start = format!("{test} {name} ");
    let rest = text.lines().find_map(|line| line.strip_prefix(&start));
    let word = rest.and_then(|rest| rest.split(' ').next());
    let word = word.with_context(|| format!("no {name} of {test} from mpi-check:\n{text}"))?;
    Ok(word.parse()?)
}

/// A ring, all to all, and one-sided operations, all verified, with one and with two processes in
/// each guest.
fn mpi_data(fixture: &mut Fixture, card: Card, transports: &str) -> Result<()> {
    const ALONE: &[(&str, u32)] = &[
        ("ring 8", 200),
        ("ring 65536", 40),
        ("alltoall 100", 100),
        ("alltoall 262144", 10),
        ("put 65536", 40),
    ];
    // Processes that share a CPU wait for each other's turn.
    const SHARED: &[(&str, u32)] = &[("ring 1024", 20), ("alltoall 16384", 6)];
    mpi_hosts(fixture)?;
    for (each, tests) in [(1, ALONE), (2, SHARED)] {
        let tests: Vec<String> = tests
            .iter()
            .map(|(test, rounds)| format!("{test} {rounds}"))
            .collect();
        mpi(fixture, transports, each, &tests)?;
    }
    let row = format!(
        "{}, Open MPI {transports}: ring, all to all, put",
        fixture.kernel
    );
    fixture.cell(&row, card.title(), "verified");
    Ok(())
}

/// Latency and bandwidth, as everybody measures them.
fn mpi_speed(fixture: &mut Fixture, card: Card, transports: &str) -> Result<()> {
    mpi_hosts(fixture)?;
    let tests = [
        ("latency 8", 10_000),
        ("bandwidth 8", 400),
        ("bandwidth 65536", 20),
        ("bandwidth 1048576", 10),
    ];
    // A round of bandwidth is a window of messages.
    let words = tests.map(|(test, rounds)| format!("{test} {}", card.times(rounds).min(rounds)));
    let text = mpi(fixture, transports, 1, &words)?;
    for (test, _) in tests {
        let what = format!("Open MPI {transports}, {test} B");
        if test.starts_with("latency") {
            let average = mpi_value(&text, test, "average")?;
            let more = format!(" (average {})", rounded(average));
            fixture.result(card, &what, mpi_value(&text, test, "median")?, "µs", &more);
        } else {
            let value = mpi_value(&text, test, "bandwidth")?;
            fixture.result(card, &what, value, "MiB/s", "");
        }
    }
    Ok(())
}

/// At most so many times the latency of `ucx_perftest` may Open MPI have.
const MPI_BESIDE_UCX: f64 = 3.0;

/// Open MPI's half round trip beside that of `ucx_perftest`, in turn.
///
/// Both programs and the device wait by polling, three threads on what may be two CPUs: now and
/// then one of them waits for its turn, for milliseconds. A few of those make an average, and say
/// how busy the host is; the median is what a message takes.
fn mpi_beside_ucx(fixture: &mut Fixture, card: Card) -> Result<()> {
    mpi_hosts(fixture)?;
    let rounds = if fixture.quick { 3 } else { 5 };
    let mut values: [Vec<f64>; 4] = Default::default();
    for number in 1..=rounds {
        let perftest = Perftest {
            environment: "UCX_TLS=rc",
            options: String::new(),
            tests: &[test("tag_lat", 8, 10_000)],
        };
        let results = perftest.run(fixture, card)?;
        let ucx = results.first().context("no result")?;
        let text = mpi(fixture, "rc", 1, &["latency 8 10000".to_owned()])?;
        let round = [
            mpi_value(&text, "latency 8", "median")?,
            ucx.median,
            mpi_value(&text, "latency 8", "average")?,
            ucx.average,
        ];
        let [mpi, ucx, mpi_average, ucx_average] = round;
        println!(
            "         round {number}: Open MPI {mpi:.1} µs (average {mpi_average:.1}), \
             ucx_perftest {ucx:.1} µs (average {ucx_average:.1})"
        );
        for (of, value) in values.iter_mut().zip(round) {
            of.push(value);
        }
    }
    let [mpi, ucx, mpi_average, ucx_average] = values.map(median);
    let more = format!(" (average {})", rounded(mpi_average));
    fixture.result(
        card,
        "Open MPI rc in turn with ucx_perftest, 8 B",
        mpi,
        "µs",
        &more,
    );
    let more = format!(" (average {})", rounded(ucx_average));
    fixture.result(
        card,
        "ucx_perftest rc in turn with Open MPI, 8 B",
        ucx,
        "µs",
        &more,
    );
    fixture.figure("open_mpi_over_ucx_perftest", rounded(mpi / ucx));
    fixture.figure(
        "open_mpi_over_ucx_perftest_average",
        rounded(mpi_average / ucx_average),
    );
    ensure!(
        mpi <= MPI_BESIDE_UCX * ucx,
        "8 bytes take Open MPI {mpi:.1} µs and ucx_perftest {ucx:.1} µs (averages: {mpi_average:.1} and {ucx_average:.1} µs)"
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What of qperf sets up its connections by rdma_cm, as RoCE needs: RC alone. It verifies atomics.
///
/// Now and then one of its connections is rejected, on rxe as on our device, and it ends: it gets
/// another attempt, which the report tells.
fn qperf(fixture: &mut Fixture, card: Card) -> Result<()> {
    const ATTEMPTS: u32 = 3;
    // The last test ends the server.
    let tests = "rc_lat rc_bw rc_rdma_read_lat rc_rdma_read_bw rc_rdma_write_lat rc_rdma_write_bw ver_rc_compare_swap ver_rc_fetch_add quit";
    let mut attempt = 1;
    let text = loop {
        let pair = fixture.pair(SERVER, CLIENT);
        let (host, port) = (pair.host(), pair.port);
        let client = format!("qperf -lp {port} -cm 1 -t 1 {host} {tests}");
        match pair.run(&fixture.bed, &format!("qperf -lp {port}"), &client, LONG) {
            Ok((text, _)) => break text,
            Err(error) if attempt < ATTEMPTS && format!("{error:#}").contains("Event rejected") => {
                println!("         attempt {attempt}: rejected");
                attempt += 1;
            }
            Err(error) => return Err(error),
        }
    };
    fixture.figure(&format!("qperf_attempts_{}", card.word()), attempt);
    for name in tests.split(' ').filter(|name| *name != "quit") {
        let value = qperf_value(&text, name)?;
        let row = format!("{}, qperf {name}", fixture.kernel);
        fixture.cell(&row, card.title(), value);
    }
    Ok(())
}

/// What qperf says of a test.
fn qperf_value<'a>(text: &'a str, test: &str) -> Result<&'a str> {
    let mut lines = text
        .lines()
        .skip_while(|line| line.trim_end() != format!("{test}:"));
    let value = lines.nth(1).and_then(|line| line.split_once('='));
    let (_, value) = value.with_context(|| format!("no {test} from qperf:\n{text}"))?;
    Ok(value.trim())
}

fn rdma_client(fixture: &mut Fixture, _: Card) -> Result<()> {
    let pair = fixture.pair(SERVER, CLIENT);
    let (host, port) = (pair.host(), pair.port);
    let (server, client) = (
        format!("rdma_server -p {port}"),
        format!("rdma_client -s {host} -p {port}"),
    );
    pair.run_when(Ready::Cm(port), &fixture.bed, &server, &client, SHORT)
        .map(drop)
}

fn rdma_xclient(fixture: &mut Fixture, card: Card, kind: &str) -> Result<()> {
    let pair = fixture.pair(SERVER, CLIENT);
    let (host, port) = (pair.host(), pair.port);
    let server = format!("rdma_xserver -p {port} -c {kind}");
    let client = format!("rdma_xclient -s {host} -p {port} -c {kind}");
    pair.run_when(Ready::Cm(port), &fixture.bed, &server, &client, SHORT)?;
    let row = format!("{}, rdma_xclient -c {kind}", fixture.kernel);
    fixture.cell(&row, card.title(), "passed");
    Ok(())
}

/// Copies a file, whose checksum has to be the same there.
fn rcopy(fixture: &mut Fixture, _: Card) -> Result<()> {
    const MAKE: &str = "head -c 10000019 /dev/urandom >/tmp/sent";
    let pair = fixture.pair(SERVER, CLIENT);
    let port = pair.port;
    fixture.vm(CLIENT)?.sh(MAKE)?;
    // It serves for ever: it ends with the job.
    let server = fixture.vm(SERVER)?.spawn(&format!("rcopy -p {port}"))?;
    fixture
        .vm(SERVER)?
        .sh(&format!("/payload/cm-listening {port}"))?;
    let copy = format!("rcopy /tmp/sent {}:/tmp/received -p {port}", pair.host());
    fixture.vm(CLIENT)?.sh(&copy)?;
    let sum = |number: u8, file: &str| {
        fixture
            .vm(number)?
            .sh(&format!("sha256sum <{file} && rm {file}"))
    };
    let (sent, received) = (sum(CLIENT, "/tmp/sent")?, sum(SERVER, "/tmp/received")?);
    ensure!(sent == received, "the copy differs: {sent} and {received}");
    server.kill(15)?;
    server.wait(SHORT).map(drop)
}

fn riostream(fixture: &mut Fixture, card: Card) -> Result<()> {
    let pair = fixture.pair(SERVER, CLIENT);
    let (host, port) = (pair.host(), pair.port);
    let start = |side: &str| format!("riostream {side} {host} -p {port} -S 65536 -I 20 -C 10 -T v");
    pair.run_when(
        Ready::Cm(port),
        &fixture.bed,
        &start("-b"),
        &start("-s"),
        SHORT,
    )?;
    let row = format!("{}, riostream", fixture.kernel);
    fixture.cell(&row, card.title(), "verified");
    Ok(())
}

/// A command in a container that has the card.
fn in_container(command: &str) -> String {
    format!("/payload/container sh -c {}", shell::quote(command))
}

/// Both ends are in containers, as users of verbs.
fn in_containers(fixture: &mut Fixture, _: Card) -> Result<()> {
    let pair = fixture.pair(SERVER, CLIENT);
    let command = |host: &str| in_container(&pair.pingpong_command("-n 1000", host));
    let (server, client) = (command(""), command(&pair.host()));
    let (text, _) = pair.run(&fixture.bed, &server, &client, LONG)?;
    ensure!(text.contains("iters in"), "no result in:\n{text}");
    Ok(())
}

/// The same by connection management.
fn in_containers_by_cm(fixture: &mut Fixture, _: Card) -> Result<()> {
    let pair = fixture.pair(SERVER, CLIENT);
    let server = in_container(&format!("rping -s -C 10 -v -p {}", pair.port));
    let client = format!("rping -c -C 10 -v -a {} -p {}", pair.host(), pair.port);
    let client = in_container(&client);
    let (text, _) = pair.run_when(Ready::Cm(pair.port), &fixture.bed, &server, &client, LONG)?;
    ensure!(text.contains("rdma-ping-9"), "not all pings in:\n{text}");
    Ok(())
}

/// Sees the port go and come back with the network interface.
fn asyncwatch(fixture: &mut Fixture) -> Result<()> {
    Card::Ours.set_up(fixture)?;
    let vm = fixture.vm(CLIENT)?;
    let watch = vm.spawn("stdbuf -oL ibv_asyncwatch")?;
    watch.wait_text(SHORT, |text| text.contains("async event FD"))?;
    vm.sh("ip link set eth0 down")?;
    let down = watch.wait_text(SHORT, |text| text.contains("IBV_EVENT_PORT_ERR"));
    vm.sh("ip link set eth0 up && /payload/wait-active")?;
    down?;
    watch.wait_text(SHORT, |text| text.contains("IBV_EVENT_PORT_ACTIVE"))?;
    // Neighbours are to be found again before the next case.
    vm.sh("ping -c 1 -W 20 10.10.0.2")?;
    watch.kill(15)?;
    watch.wait(SHORT).map(drop)
}

fn ibstat(fixture: &mut Fixture) -> Result<()> {
    Card::Ours.set_up(fixture)?;
    for vm in &fixture.bed.vms {
        let text = vm.sh("ibstat && ibstatus")?;
        for wanted in [
            &format!("CA '{}'", Card::Ours.name()),
            "State: Active",
            "Physical state: LinkUp",
            "Link layer: Ethernet",
            "4: ACTIVE",
        ] {
            ensure!(
                text.contains(wanted),
                "vm{}: no {wanted:?} in:\n{text}",
                vm.number
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_ucx_perftest_are_read() {
        let text = "batch,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                    0,5000,12.500,34.0,34.962,0.22,0.23,28603,28603\n1, 500,2.000,43.268,43.268,1444.48,1444.48,23112,23112\n";
        let first = ucx_result(text, 0).expect("a result");
        assert_eq!(
            first,
            UcxResult {
                median: 12.5,
                average: 34.962,
                bandwidth: 0.23
            }
        );
        assert_eq!(ucx_result(text, 1).expect("a result").bandwidth, 1444.48);
        assert!(ucx_result(text, 2).is_err());
    }

    #[test]
    fn tables_of_fi_pingpong_are_read() {
        let text =
            "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                    64      200     =200     25k         0.01s      1.75      36.63       0.03\n\
                    1m      200     =200     400m        8.41s     49.88   21022.85       0.00\n";
        assert_eq!(fabric_cell(text, "64", 6).expect("a cell"), 36.63);
        assert_eq!(fabric_cell(text, "1m", 5).expect("a cell"), 49.88);
        assert!(fabric_cell(text, "4k", 5).is_err());
    }

    #[test]
    fn what_qperf_and_mpi_check_say_is_read() {
        let text = "rc_lat:\n    latency  =  211 us\nrc_bw:\n    bw  =  10.5 GB/sec\nquit:\n";
        assert_eq!(qperf_value(text, "rc_bw").expect("a value"), "10.5 GB/sec");
        assert!(qperf_value(text, "uc_lat").is_err());
        let text = "latency 8 median 10.50 us\nlatency 8 average 26.08 us\nverified latency 8\n";
        assert_eq!(
            mpi_value(text, "latency 8", "average").expect("a value"),
            26.08
        );
        assert!(mpi_value(text, "bandwidth 8", "rate").is_err());
    }
}
