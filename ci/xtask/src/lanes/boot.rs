// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `boot`: the guest images, the launcher and the control channel by themselves, on stock
//! guests and a stock QEMU (`qemu-system-x86_64` in the PATH). For work on those; `smoke` finds the
//! same faults later.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{wait_for, FrontEnd, Hosts, SHORT};

/// The lane.
pub fn lane() -> Lane {
    let cases = || {
        Kernel::STABLE
            .iter()
            .map(|kernel| (*kernel, CASES.to_vec()))
            .collect()
    };
    Lane {
        name: "boot",
        about: "guest images and launcher without the device",
        with_device: false,
        vms: 2,
        memory: 1024,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::Plain,
        runs: cases,
    }
}

const CASES: &[Case] = &[
    Case {
        name: "guests have the RDMA user space and its modules",
        run: guests_are_complete,
    },
    Case {
        name: "guests start nothing by themselves",
        run: guests_are_quiet,
    },
    Case {
        name: "guests reach each other",
        run: guests_reach_each_other,
    },
    Case {
        name: "commands run side by side",
        run: commands_run_side_by_side,
    },
    Case {
        name: "no output is lost",
        run: no_output_is_lost,
    },
    Case {
        name: "commands end as they end",
        run: commands_end_as_they_end,
    },
    Case {
        name: "stop, cont, freeze, thaw",
        run: stop_and_freeze,
    },
    Case {
        name: "reset",
        run: reset,
    },
    Case {
        name: "kill and start again",
        run: kill_and_start_again,
    },
];

fn guests_are_complete(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    vm.sh("set -e; for tool in ibv_devices ibv_devinfo ibv_rc_pingpong ib_write_bw ib_read_lat rping rdma strace lspci ip ss; do command -v $tool; done")?;
    vm.sh("modprobe -a rdma_rxe nvme-rdma ib_iser ib_srp ib_ipoib rpcrdma rds_rdma 9pnet_rdma && modprobe -r rdma_rxe && lsmod | grep ib_uverbs")?;
    vm.sh("python3 -c 'import pyverbs.device, pyverbs.qp'")?;
    vm.sh("ls /usr/share/doc/rdma-core/tests")?;
    Ok(())
}

fn guests_are_quiet(fixture: &mut Fixture) -> Result<()> {
    let shells = "pgrep -fxc 'bash -i'";
    let count = "cut -d' ' -f5 /proc/loadavg";
    for vm in &fixture.bed.vms {
        ensure!(
            vm.sh(shells)?.trim() == "1",
            "vm{}: not one shell on the console",
            vm.number
        );
        let before: u64 = vm.sh(count)?.trim().parse()?;
        vm.sh("sleep 5")?;
        let after: u64 = vm.sh(count)?.trim().parse()?;
        // Our own commands take a few; whatever is started again and again takes many.
        ensure!(
            after - before < 40,
            "vm{}: {} processes were started in 5 s",
            vm.number,
            after - before
        );
        ensure!(
            vm.sh(shells)?.trim() == "1",
            "vm{}: the shells on the console multiply",
            vm.number
        );
    }
    Ok(())
}

fn guests_reach_each_other(fixture: &mut Fixture) -> Result<()> {
    fixture.vm(1)?.sh("ping -c 2 -w 20 10.10.0.2")?;
    fixture.vm(2)?.sh("ping -c 2 -w 20 10.10.0.1")?;
    let addresses = fixture.vm(2)?.sh("ip -br addr show dev eth0")?;
    ensure!(
        addresses.contains("fe80::"),
        "no IPv6 link-local address: {addresses}"
    );
    Ok(())
}

fn commands_run_side_by_side(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    let start = Instant::now();
    let jobs = (0..8)
        .map(|n| vm.spawn(&format!("sleep 2; seq 2000; echo {n}")))
        .collect::<Result<Vec<_>>>()?;
    for (n, job) in jobs.iter().enumerate() {
        let output = job.wait(SHORT)?;
        let lines: Vec<&str> = output.text.lines().collect();
        ensure!(
            lines.len() == 2001 && lines.last() == Some(&n.to_string().as_str()),
            "job {n} wrote {} lines",
            lines.len()
        );
    }
    ensure!(
        start.elapsed() < Duration::from_secs(12),
        "eight sleeps of 2 s took {:?}",
        start.elapsed()
    );
    Ok(())
}

fn no_output_is_lost(fixture: &mut Fixture) -> Result<()> {
    // Many small writes, each a message of its own, from several commands at once and while the
    // vCPU is busy.
    let vm = fixture.vm(1)?;
    let busy = vm.spawn("while :; do :; done")?;
    let command = "for n in $(seq 4000); do echo \"row $n\"; done";
    let jobs = (0..4)
        .map(|_| vm.spawn(command))
        .collect::<Result<Vec<_>>>()?;
    let wanted: String = (1..=4000).map(|n| format!("row {n}\n")).collect();
    for job in &jobs {
        ensure!(
            job.wait(Duration::from_secs(180))?.text == wanted,
            "rows are missing or out of order"
        );
    }
    busy.kill(9)
}

fn commands_end_as_they_end(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    ensure!(vm.run("exit 7", SHORT)?.status == 7);
    ensure!(vm.run("kill -9 $$", SHORT)?.status == -9);
    let output = vm.run("echo out; echo err >&2; sleep 100 &", SHORT)?;
    ensure!(
        output.status == 0 && output.text.contains("out") && output.text.contains("err"),
        "{output:?}"
    );
    let job = vm.spawn("echo started; sleep 100; echo not this")?;
    job.wait_text(SHORT, |text| text.contains("started"))?;
    job.kill(15)?;
    ensure!(job.wait(SHORT)?.status == -15);
    ensure!(vm.run("sleep 100", Duration::from_secs(1)).is_err());
    Ok(())
}

fn stop_and_freeze(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm_mut(2)?;
    vm.qmp("stop")?;
    ensure!(vm.qmp("query-status")?["status"] == "paused");
    let job = vm.spawn("echo hello")?;
    std::thread::sleep(Duration::from_millis(500));
    ensure!(job.running(), "a stopped VM ran a command");
    vm.qmp("cont")?;
    job.wait(SHORT)?;
    vm.freeze()?;
    let job = vm.spawn("echo hello")?;
    std::thread::sleep(Duration::from_millis(500));
    ensure!(job.running(), "a frozen VM ran a command");
    vm.thaw()?;
    job.wait(SHORT)?;
    Ok(())
}

fn reset(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm_mut(2)?;
    let job = vm.spawn("touch /tmp/before; sleep 100")?;
    wait_for(SHORT, || {
        Ok(vm.run("test -e /tmp/before", SHORT)?.status == 0).map(|there| there.then_some(()))
    })?;
    vm.reset()?;
    vm.wait_up()?;
    ensure!(job.wait(SHORT).is_err(), "a command lived through a reset");
    ensure!(
        vm.run("test -e /tmp/before", SHORT)?.status != 0,
        "the guest was not reset"
    );
    fixture.vm(1)?.sh("ping -c 1 -w 20 10.10.0.2").map(drop)
}

fn kill_and_start_again(fixture: &mut Fixture) -> Result<()> {
    for number in [1, 2] {
        let vm = fixture.vm_mut(number)?;
        vm.kill()?;
        ensure!(vm.sh("true").is_err(), "a dead VM ran a command");
        vm.start_again()?;
        vm.sh("true")?;
    }
    Ok(())
}
