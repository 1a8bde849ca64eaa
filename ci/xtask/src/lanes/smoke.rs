// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `smoke`: the whole path, from unmodified applications in one VM to such in another, and
//! what it has to survive.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::tools::{counts, device_of, progress, settled, wait_progress, Table};
use super::{roce, Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::setup;
use crate::vm::{wait_for, Capture, FrontEnd, Hosts, SHORT};

/// How long one run of a tool may take on a busy machine without KVM.
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
        name: "smoke",
        about: "the whole path between two VMs, and what it has to survive",
        with_device: true,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs,
    }
}

/// Its cases.
pub const CASES: &[Case] = &[
    Case {
        name: "tools show the device",
        run: tools_show_the_device,
    },
    Case {
        name: "rc_pingpong",
        run: pingpong,
    },
    Case {
        name: "rc_pingpong with events",
        run: pingpong_events,
    },
    Case {
        name: "rc_pingpong, 10,000 times",
        run: pingpong_long,
    },
    Case {
        name: "rc_pingpong, 1 B to 1 MiB",
        run: pingpong_sizes,
    },
    Case {
        name: "rc_pingpong, four at once",
        run: pingpong_at_once,
    },
    Case {
        name: "rc_pingpong within one VM",
        run: pingpong_loopback,
    },
    Case {
        name: "counters in sysfs and in rdma statistic",
        run: counters,
    },
    Case {
        name: "data arrives as it was sent",
        run: verified,
    },
    Case {
        name: "data arrives as it was sent within one VM",
        run: verified_loopback,
    },
    Case {
        name: "packets in Wireshark",
        run: packets,
    },
    Case {
        name: "ib_send_bw -a",
        run: |fixture| bandwidth(fixture, "ib_send_bw"),
    },
    Case {
        name: "ib_write_bw -a",
        run: |fixture| bandwidth(fixture, "ib_write_bw"),
    },
    Case {
        name: "ib_read_bw -a",
        run: |fixture| bandwidth(fixture, "ib_read_bw"),
    },
    Case {
        name: "ib_send_lat -a",
        run: |fixture| latency(fixture, "ib_send_lat"),
    },
    Case {
        name: "ib_write_lat -a",
        run: |fixture| latency(fixture, "ib_write_lat"),
    },
    Case {
        name: "ib_read_lat -a",
        run: |fixture| latency(fixture, "ib_read_lat"),
    },
    Case {
        name: "perftest within one VM",
        run: perftest_loopback,
    },
    Case {
        name: "polling costs no system call and no kick",
        run: polling_is_free,
    },
    Case {
        name: "one-sided operations on a frozen VM",
        run: frozen,
    },
    Case {
        name: "traffic to a stopped VM waits and goes on",
        run: stopped,
    },
    Case {
        name: "1,000 queue pairs and completion queues",
        run: many,
    },
    Case {
        name: "kill -9 in mid-transfer",
        run: kill_applications,
    },
    Case {
        name: "rmmod and insmod, 20 times",
        run: reload,
    },
    Case {
        name: "guest reset under traffic",
        run: |fixture| lose_guest(fixture, true),
    },
    Case {
        name: "guest killed under traffic",
        run: |fixture| lose_guest(fixture, false),
    },
];

/// Those that are about VMs of two device processes, too. The lanes of the wire have others in place of
/// some.
pub fn over_wire() -> impl Iterator<Item = Case> {
    const OTHERS: [&str; 4] = [
        "rc_pingpong",
        "rc_pingpong, four at once",
        "data arrives as it was sent",
        "packets in Wireshark",
    ];
    let is_there =
        |case: &&Case| !OTHERS.contains(&case.name) && !case.name.contains("within one VM");
    CASES.iter().filter(is_there).copied()
}

fn counters(fixture: &mut Fixture) -> Result<()> {
    const ITERATIONS: u64 = 1000;
    const SIZE: u64 = 4096;
    let read = |fixture: &Fixture| -> Result<Vec<u64>> {
        let text = fixture.vm(1)?.sh(
            "cd /sys/class/infiniband/*/ports/1; cat counters/port_{xmit,rcv}_{packets,data} hw_counters/tx_messages; \
             rdma statistic show | tr -s ' \\n' '\\n\\n' | grep -A1 tx_messages | tail -n 1",
        )?;
        let numbers = text
            .lines()
            .map(|line| line.trim().parse())
            .collect::<Result<_, _>>();
        numbers.with_context(|| format!("not counters:\n{text}"))
    };
    let before = read(fixture)?;
    let arguments = format!("-n {ITERATIONS} -s {SIZE}");
    fixture
        .pair(1, 2)
        .pingpong(&fixture.bed, &arguments, SHORT)?;
    let after = read(fixture)?;
    // Data are counted in words of four bytes.
    let least = [
        ITERATIONS,
        ITERATIONS * SIZE / 4,
        ITERATIONS,
        ITERATIONS * SIZE / 4,
        ITERATIONS,
        ITERATIONS,
    ];
    ensure!(
        before.len() == least.len() && after.len() == least.len(),
        "counters are missing: {after:?}"
    );
    for ((before, after), least) in before.iter().zip(&after).zip(least) {
        ensure!(
            after - before >= least,
            "a counter went from {before} to {after}, and at least {least} were sent"
        );
    }
    Ok(())
}

fn tools_show_the_device(fixture: &mut Fixture) -> Result<()> {
    for vm in &fixture.bed.vms {
        let n = vm.number;
        let devices = vm.sh("ibv_devices")?;
        ensure!(
            devices.lines().count() == 3,
            "vm{n}: ibv_devices does not show one device:\n{devices}"
        );
        let info = vm.sh("ibv_devinfo -v")?;
        for wanted in [
            "PORT_ACTIVE",
            "link_layer:\t\tEthernet",
            &format!("::ffff:10.10.0.{n}"),
            "fe80:",
            "vendor_id:\t\t\t0x1af4",
        ] {
            ensure!(
                info.contains(wanted),
                "vm{n}: no {wanted:?} in ibv_devinfo -v:\n{info}"
            );
        }
        for (limit, least) in [
            ("max_qp:", 1000),
            ("max_cq:", 1000),
            ("max_mr:", 1000),
            ("max_cqe:", 1024),
            ("max_qp_wr:", 1024),
            ("max_sge:", 4),
        ] {
            let line = info
                .lines()
                .find(|line| line.trim_start().starts_with(limit))
                .unwrap_or_default();
            let value = line
                .split_ascii_whitespace()
                .nth(1)
                .and_then(|value| value.parse::<u64>().ok());
            ensure!(
                value.is_some_and(|value| value >= least),
                "vm{n}: {limit} is less than {least}: {line:?}"
            );
        }
        let link = vm.sh("rdma link show")?;
        ensure!(
            link.contains("state ACTIVE") && link.contains("netdev eth0"),
            "vm{n}: rdma link: {link}"
        );
        let resource = vm.sh("rdma resource show")?;
        ensure!(
            ["pd", "cq", "qp", "mr"]
                .iter()
                .all(|kind| resource.contains(kind)),
            "vm{n}: rdma resource: {resource}"
        );
        let parent = vm.sh("cd /sys/class/infiniband/*/device/ && pwd -P && cat vendor device")?;
        ensure!(
            parent.contains("/pci0000:00/") && parent.contains("0x1af4\n0x106a"),
            "vm{n}: the parent is no PCI device: {parent}"
        );
    }
    Ok(())
}

fn pingpong(fixture: &mut Fixture) -> Result<()> {
    for (server, client) in [(1, 2), (2, 1)] {
        fixture
            .pair(server, client)
            .pingpong(&fixture.bed, "", SHORT)?;
    }
    Ok(())
}

fn pingpong_events(fixture: &mut Fixture) -> Result<()> {
    fixture.pair(2, 1).pingpong(&fixture.bed, "-e", LONG)?;
    fixture
        .pair(1, 1)
        .pingpong(&fixture.bed, "-e", LONG)
        .map(drop)
}

fn pingpong_long(fixture: &mut Fixture) -> Result<()> {
    let text = fixture
        .pair(2, 1)
        .pingpong(&fixture.bed, "-n 10000", LONG)?;
    let figure = text.lines().find_map(|line| {
        line.strip_suffix(" usec/iter")?
            .rsplit(' ')
            .next()?
            .parse::<f64>()
            .ok()
    });
    fixture.figure("rc_pingpong_us_per_iteration", figure);
    fixture
        .pair(2, 1)
        .pingpong(&fixture.bed, "-e -n 10000", LONG)
        .map(drop)
}

fn pingpong_sizes(fixture: &mut Fixture) -> Result<()> {
    for size in [
        1, 4, 63, 64, 65, 256, 1024, 4096, 4097, 16384, 65536, 262_144, 1_048_576,
    ] {
        let pair = fixture.pair(2, 1);
        pair.pingpong(&fixture.bed, &format!("-n 100 -s {size}"), SHORT)?;
    }
    Ok(())
}

pub fn pingpong_at_once(fixture: &mut Fixture) -> Result<()> {
    let pairs =
        [(2, 1), (1, 2), (2, 1), (1, 1)].map(|(server, client)| fixture.pair(server, client));
    let bed = &fixture.bed;
    std::thread::scope(|scope| {
        let runs = pairs.map(|pair| scope.spawn(move || pair.pingpong(bed, "-n 1000", LONG)));
        runs.into_iter().try_for_each(|run| {
            run.join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a run panicked")))
                .map(drop)
        })
    })
}

fn pingpong_loopback(fixture: &mut Fixture) -> Result<()> {
    fixture.pair(1, 1).pingpong(&fixture.bed, "", LONG)?;
    fixture
        .pair(2, 2)
        .pingpong(&fixture.bed, "-s 1048576 -n 100", LONG)
        .map(drop)
}

pub fn verified(fixture: &mut Fixture) -> Result<()> {
    fixture
        .pair(2, 1)
        .verified(&fixture.bed, "verify", "", LONG)?;
    fixture
        .pair(1, 2)
        .verified(&fixture.bed, "flow", "1000", LONG)
        .map(drop)
}

fn verified_loopback(fixture: &mut Fixture) -> Result<()> {
    fixture
        .pair(1, 1)
        .verified(&fixture.bed, "verify", "", LONG)
        .map(drop)
}

/// Messages that stay in the process are captured as the packets that they would have been.
fn packets(fixture: &mut Fixture) -> Result<()> {
    setup::packages(&["tshark"])?;
    let file = fixture.logs().join("local.pcapng");
    let device = fixture.bed.device.as_ref().context("no device")?;
    let capture = Capture::of_device(device, &file)?;
    roce::send_all(fixture, false)?;
    let seen = roce::check(&capture.finish()?)?;
    println!("         {}", seen.summary());
    ensure!(seen.without_comment() == 0, "{seen:?}");
    seen.expect(&roce::ALL, &["local: not sent"])
}

/// Runs a tool of perftest with `-a` between (server, client); its table must have all message
/// sizes.
fn all_sizes_of(
    fixture: &mut Fixture,
    ends: (u8, u8),
    tool: &str,
    arguments: &str,
) -> Result<Table> {
    let pair = fixture.pair(ends.0, ends.1);
    let (text, table) = pair.perftest(&fixture.bed, tool, arguments, LONG)?;
    let missing: Vec<u64> = (1..=23)
        .map(|shift| 1 << shift)
        .filter(|size| !table.sizes().contains(size))
        .collect();
    ensure!(
        missing.is_empty(),
        "{tool} {arguments}: no result for {missing:?} bytes in:\n{text}"
    );
    Ok(table)
}

fn bandwidth(fixture: &mut Fixture, tool: &str) -> Result<()> {
    let table = all_sizes_of(fixture, (2, 1), tool, "-a -n 200")?;
    for size in [64, 65536, 1 << 20] {
        fixture.figure(&format!("{tool}_{size}_mib_per_s"), table.bandwidth(size)?);
    }
    Ok(())
}

fn latency(fixture: &mut Fixture, tool: &str) -> Result<()> {
    let table = all_sizes_of(fixture, (2, 1), tool, "-a -n 100")?;
    for size in [2, 64, 65536] {
        // The two differ by much where vCPUs and workers share CPUs: most messages meet no
        // preemption.
        fixture.figure(&format!("{tool}_{size}_us_typical"), table.latency(size)?);
        fixture.figure(&format!("{tool}_{size}_us_average"), table.average(size)?);
    }
    Ok(())
}

fn perftest_loopback(fixture: &mut Fixture) -> Result<()> {
    for tool in ["ib_send_bw", "ib_write_bw", "ib_read_bw"] {
        all_sizes_of(fixture, (1, 1), tool, "-a -n 50")?;
    }
    // Two processes that spin on one vCPU pass each message on when the scheduler takes the CPU
    // away: few and short.
    for tool in ["ib_send_lat", "ib_write_lat", "ib_read_lat"] {
        fixture
            .pair(1, 1)
            .perftest(&fixture.bed, tool, "-s 4096 -n 50", LONG)?;
    }
    Ok(())
}

/// The number of system calls in a summary of `strace -c`.
fn system_calls(summary: &str) -> Result<u64> {
    let line = summary
        .lines()
        .find(|line| line.trim_end().ends_with("total"))
        .context("no total from strace")?;
    let calls = line
        .split_ascii_whitespace()
        .nth(3)
        .context("no number of calls from strace")?;
    Ok(calls.parse()?)
}

// D-DB-006, G-DB-001.
fn polling_is_free(fixture: &mut Fixture) -> Result<()> {
    // The same run with few and with many messages: the difference is what messages cost.
    let (few, more) = (2000_u64, 42_000);
    let mut calls = [0; 2];
    let (mut kicks, mut sleeps) = (0, 0);
    for (n, messages) in [few, more].into_iter().enumerate() {
        let pair = fixture.pair(2, 1);
        let arguments = format!("-s 64 -n {messages}");
        let server = pair.perftest_command("ib_write_bw", &arguments, false);
        let client = pair.perftest_command("ib_write_bw", &arguments, true);
        let client = format!("strace -f -c -o /tmp/calls {client}");
        let before = ["kicks", "sleeps"].map(|name| fixture.bed.counted(name));
        pair.run(&fixture.bed, &server, &client, LONG)?;
        let [kicks_before, sleeps_before] = before;
        kicks = fixture.bed.counted("kicks")?.saturating_sub(kicks_before?);
        sleeps = fixture
            .bed
            .counted("sleeps")?
            .saturating_sub(sleeps_before?);
        calls[n] = system_calls(&fixture.vm(1)?.sh("cat /tmp/calls")?)?;
    }
    let calls_each = calls[1].saturating_sub(calls[0]);
    let messages = more - few;
    fixture.figure("system_calls_in_40000_writes", calls_each);
    fixture.figure("kicks_in_42000_writes", kicks);
    fixture.figure("worker_sleeps_in_42000_writes", sleeps);
    ensure!(
        calls_each < messages / 1000,
        "{messages} writes cost {calls_each} system calls"
    );
    // How often a worker sleeps is a matter of how busy the host is. A kick is due only when it
    // does: one that slept before the first count may be woken after it, hence one more for each
    // worker.
    let status = fixture
        .bed
        .device
        .as_ref()
        .context("there is no device")?
        .status()?;
    let workers = status["workers"].as_array().map_or(0, Vec::len) as u64;
    ensure!(
        kicks <= sleeps + workers,
        "{more} writes cost {kicks} kicks, and workers slept {sleeps} times"
    );
    ensure!(
        kicks < more / 2,
        "{more} writes cost {kicks} kicks: the workers did not poll"
    );
    Ok(())
}

fn frozen(fixture: &mut Fixture) -> Result<()> {
    let pair = fixture.pair(2, 1);
    fixture.vm(1)?.sh("rm -f /tmp/frozen /tmp/thawed")?;
    let target = pair.serve(&fixture.bed, &pair.target())?;
    let job = fixture.vm(1)?.spawn(&pair.rdma("onesided", ""))?;
    job.wait_text(LONG, |text| text.contains("ready"))?;
    fixture.vm(2)?.freeze()?;
    let result = fixture
        .vm(1)?
        .sh("touch /tmp/frozen")
        .and_then(|_| job.wait_text(SHORT, |text| text.contains("done while frozen")));
    fixture.vm(2)?.thaw()?;
    result?;
    fixture.vm(1)?.sh("touch /tmp/thawed")?;
    let output = job.wait(LONG)?;
    ensure!(
        output.status == 0 && output.text.contains("verified"),
        "onesided ended with {}:\n{}",
        output.status,
        output.text
    );
    ensure!(
        target.wait(SHORT)?.status == 0,
        "the target failed:\n{}",
        target.text()
    );
    Ok(())
}

// D-STOP-003.
fn stopped(fixture: &mut Fixture) -> Result<()> {
    let messages = 3000;
    let pair = fixture.pair(2, 1);
    let target = pair.serve(&fixture.bed, &pair.target())?;
    let job = fixture
        .vm(1)?
        .spawn(&pair.rdma("flow", &messages.to_string()))?;
    wait_progress(&job, 300, LONG)?;
    fixture.vm_mut(2)?.qmp("stop")?;
    let waits = (|| {
        let stopped = wait_for(SHORT, || {
            Ok((device_of(&fixture.bed, 2)?["running"] == false).then_some(()))
        })?;
        stopped.context("the device does not see that vm2 was stopped")?;
        // What was complete before is still on its way through the application.
        sleep(Duration::from_secs(2));
        let before = progress(&job);
        // Meanwhile the other VM is served.
        fixture.pair(1, 1).pingpong(&fixture.bed, "-n 200", LONG)?;
        let after = progress(&job);
        ensure!(
            before == after && after < messages,
            "{after} messages are done, {before} before, and the receiver is stopped"
        );
        ensure!(
            job.running(),
            "the sender ended while the receiver was stopped:\n{}",
            job.text()
        );
        Ok(())
    })();
    fixture.vm_mut(2)?.qmp("cont")?;
    waits?;
    wait_progress(&job, messages / 3, LONG)?;
    // The sender stops too, and nothing is lost either.
    fixture.vm_mut(1)?.qmp("stop")?;
    sleep(Duration::from_secs(2));
    fixture.vm_mut(1)?.qmp("cont")?;
    let output = job.wait(LONG)?;
    ensure!(
        output.status == 0 && output.text.contains("verified"),
        "flow ended with {}:\n{}",
        output.status,
        output.text
    );
    ensure!(
        target.wait(SHORT)?.status == 0,
        "the target failed:\n{}",
        target.text()
    );
    Ok(())
}

fn many(fixture: &mut Fixture) -> Result<()> {
    let before = counts(&fixture.bed)?;
    fixture.vm(1)?.sh("rm -f /tmp/counted")?;
    let job = fixture.vm(1)?.spawn("/payload/rdma.py many 1000")?;
    job.wait_text(LONG, |text| text.contains("all there"))?;
    let during = counts(&fixture.bed)?;
    for kind in ["qps", "cqs"] {
        let (had, has) = (
            before[0].get(kind).copied().unwrap_or(0),
            during[0].get(kind).copied().unwrap_or(0),
        );
        ensure!(
            has == had + 1000,
            "the device counts {has} {kind}, and there were {had} before 1,000 more"
        );
    }
    fixture.vm(1)?.sh("touch /tmp/counted")?;
    let output = job.wait(LONG)?;
    ensure!(
        output.status == 0 && output.text.contains("all gone"),
        "many ended with {}:\n{}",
        output.status,
        output.text
    );
    settled(&fixture.bed, &before)
}

fn kill_applications(fixture: &mut Fixture) -> Result<()> {
    let before = counts(&fixture.bed)?;
    for victim in ["the sender", "the receiver"] {
        let pair = fixture.pair(2, 1);
        let target = pair.serve(&fixture.bed, &pair.target())?;
        let job = fixture.vm(1)?.spawn(&pair.rdma("flow", "0"))?;
        wait_progress(&job, 300, LONG)?;
        if victim == "the sender" {
            job.kill(9)?;
            job.wait(SHORT)?;
            target.kill(9)?;
            target.wait(SHORT)?;
        } else {
            target.kill(9)?;
            target.wait(SHORT)?;
            let output = job.wait(LONG)?;
            ensure!(
                output.status != 0 && output.text.contains("IBV_WC_"),
                "the sender did not see the receiver go:\n{}",
                output.text
            );
        }
        settled(&fixture.bed, &before).with_context(|| format!("after {victim} was killed"))?;
        fixture.pair(2, 1).pingpong(&fixture.bed, "", SHORT)?;
    }
    Ok(())
}

fn reload(fixture: &mut Fixture) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let command = "for n in $(seq 20); do rmmod virtio_rdma && insmod /payload/virtio_rdma.ko && /payload/wait-active || exit 1; done";
    let output = fixture.vm(2)?.run(command, LONG)?;
    ensure!(
        output.status == 0,
        "ended with {}:\n{}",
        output.status,
        output.text
    );
    settled(&fixture.bed, &before)?;
    fixture
        .pair(2, 1)
        .pingpong(&fixture.bed, "", SHORT)
        .map(drop)
}

/// vm2 goes away under traffic: vm1 is served on, and vm2 is taken back.
// D-RST-001, D-RST-004.
fn lose_guest(fixture: &mut Fixture, reset: bool) -> Result<()> {
    let before = counts(&fixture.bed)?;
    let pairs = [fixture.pair(2, 1), fixture.pair(1, 1)];
    let _targets = pairs
        .iter()
        .map(|pair| pair.serve(&fixture.bed, &pair.target()))
        .collect::<Result<Vec<_>>>()?;
    let to_vm2 = fixture.vm(1)?.spawn(&pairs[0].rdma("flow", "0"))?;
    let within_vm1 = fixture.vm(1)?.spawn(&pairs[1].rdma("writes", "0"))?;
    wait_progress(&to_vm2, 100, LONG)?;
    wait_progress(&within_vm1, 50, LONG)?;
    let vm2 = fixture.vm_mut(2)?;
    if reset {
        vm2.reset()?;
    } else {
        vm2.kill()?;
    }
    let done = progress(&within_vm1);
    wait_progress(&within_vm1, done + 100, LONG).context("vm1 was not served on")?;
    let output = to_vm2.wait(LONG)?;
    ensure!(
        output.status != 0 && output.text.contains("IBV_WC_"),
        "the sender did not see vm2 go:\n{}",
        output.text
    );
    let vm2 = fixture.vm_mut(2)?;
    if reset {
        vm2.wait_up()?;
    } else {
        vm2.start_again()?;
    }
    let done = progress(&within_vm1);
    wait_progress(&within_vm1, done + 50, LONG)
        .context("vm1 was not served on when vm2 came back")?;
    drop((within_vm1, _targets));
    settled(&fixture.bed, &before)?;
    fixture.pair(2, 1).pingpong(&fixture.bed, "", SHORT)?;
    fixture
        .pair(1, 2)
        .verified(&fixture.bed, "flow", "500", LONG)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_strace_are_read() {
        let summary = "% time     seconds  usecs/call     calls    errors syscall\n\
                       ------ ----------- ----------- --------- --------- ----------------\n\
                       100.00    0.012345          12      1029        17 total\n";
        assert_eq!(system_calls(summary).expect("a total"), 1029);
        assert!(system_calls("").is_err());
    }
}
