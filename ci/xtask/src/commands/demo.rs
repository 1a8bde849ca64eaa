// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask demo`: two VMs, and RDMA between them.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use serde_json::Value;

use crate::artifacts;
use crate::images::{Image, Kernel};
use crate::lanes::tools::Pair;
use crate::vm::{kvm, Bed, FrontEnd, Hosts, Plan};
use crate::{setup, shell};

/// How long one run may take on a busy machine without KVM.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Hosts with a device process and a VM each, and a network between them that loses a packet in a
/// thousand each way: each device loses those of what it sends.
const WIRE: Hosts = Hosts::Tap(1500, "seed=1,loss=0.1%");

/// Sets everything up, boots the VMs, runs the tools, shows what they say.
pub fn run(kernel: Kernel, wire: bool) -> Result<bool> {
    let start = Instant::now();
    setup::run()?;
    let everything = artifacts::everything(&[kernel])?;
    let stack = everything.stack(kernel)?;
    let plan = Plan {
        stack: Some(&stack),
        qemu: &everything.qemu,
        stock_qemu: None,
        root: everything.images.root(Image::Plain, kernel)?,
        kernel: everything.images.kernel(kernel)?,
        vms: 2,
        memory: 1024,
        bare: 0,
        front_end: FrontEnd::VhostUser,
        hosts: if wire { WIRE } else { Hosts::One },
        nested: false,
        disk: None,
        logs: shell::target().join("logs/demo"),
        interactive: false,
    };
    let how = if kvm() {
        "KVM"
    } else {
        "TCG: this host runs no KVM guests"
    };
    let bed = shell::step(&format!("Booting two VMs ({how})"), || Bed::start(&plan))?;
    shell::say(format_args!(
        "ready after {}",
        shell::human(start.elapsed())
    ));

    let mut summary = Vec::new();
    for vm in &bed.vms {
        heading(&format!("vm{}: ibv_devinfo", vm.number));
        let info = vm.sh("uname -sr; ibv_devinfo")?;
        show(&info);
        ensure!(
            info.contains("PORT_ACTIVE"),
            "the port of vm{} is not active",
            vm.number
        );
    }

    let pair = |port| Pair {
        server: 2,
        client: 1,
        port,
    };
    heading("vm1 -> vm2: ibv_rc_pingpong (every byte checked)");
    let text = pair(18515).pingpong(&bed, "-n 2000", TIMEOUT)?;
    show(&text);
    let result = text
        .lines()
        .find(|line| line.contains("iters in"))
        .unwrap_or_default();
    summary.push(("ibv_rc_pingpong", result.to_owned()));

    heading("vm1 -> vm2: ib_write_bw");
    let (text, table) = pair(18516).perftest(&bed, "ib_write_bw", "-s 65536 -n 5000", TIMEOUT)?;
    show(&text);
    summary.push((
        "ib_write_bw",
        format!(
            "{:.0} MiB/s with messages of 64 KiB",
            table.bandwidth(65536)?
        ),
    ));

    heading("vm1 -> vm2: ib_read_lat");
    let (text, table) = pair(18517).perftest(&bed, "ib_read_lat", "-s 8 -n 1000", TIMEOUT)?;
    show(&text);
    summary.push((
        "ib_read_lat",
        format!(
            "{:.2} µs typical, {:.2} µs on average, with messages of 8 B",
            table.latency(8)?,
            table.average(8)?
        ),
    ));

    heading("vm1 -> vm2: SEND, WRITE, READ, immediates, inline, scattered, 1 B to 1 MiB, every byte checked");
    let verified = pair(18518).verified(&bed, "verify", "", TIMEOUT)?;
    show(&verified);
    summary.push(("data", verified));

    heading("On the host: what the device has moved for each VM");
    let statuses = bed.statuses()?;
    for device in statuses.iter().flat_map(devices) {
        let counters = &device["counters"];
        println!(
            "    {}: {} messages ({} bytes) sent, {} ({} bytes) received",
            device["mac"],
            counters["tx_messages"],
            counters["tx_bytes"],
            counters["rx_messages"],
            counters["rx_bytes"]
        );
    }

    if wire {
        heading("On the wire: packets, and what the network did to them");
        for status in &statuses {
            let wire = &status["workers"][0]["wire"];
            println!(
                "    {} sent, {} received",
                wire["sent_frames"], wire["received_frames"]
            );
            for faults in wire["faults"].as_array().into_iter().flatten() {
                let (direction, lost) = (&faults["direction"], &faults["counts"]["lost"]);
                println!(
                    "        {lost} lost on the way {}",
                    direction.as_str().unwrap_or("?")
                );
            }
        }
    }

    heading("Summary");
    for (what, result) in summary {
        println!("    {what:16} {result}");
    }
    println!();
    shell::say(format_args!(
        "all of it worked, in {}",
        shell::human(start.elapsed())
    ));
    Ok(true)
}

fn devices(status: &Value) -> impl Iterator<Item = &Value> {
    status["devices"].as_array().into_iter().flatten()
}

fn heading(text: &str) {
    println!("\n--- {text}");
}

fn show(text: &str) {
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        println!("    {}", line.trim_end());
    }
}
